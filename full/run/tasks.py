"""Define what a task must have, import one from a user's file, and play a file of questions.

`make_task` makes the task of --task: `train_grpo.Guess`, the task `jsonl`, or a class from a file,
`--task FILE.py:Class`. `jsonl` is `train_grpo.Questions` with conversations, chat templates and
rewards of a user. If you bring a task of your own, read `Task` and skip the rest.
"""

import copy
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import math
import re
import sys
import traceback
import zlib
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import train_grpo
from full.run.config import TASKS, Config
from full.run.directory import read_json_lines
from full.run.text import naming, text_of


class Task:
    """The methods of a task. The rewards of a rollout's turns add up, and 1 or more is solved.

    A task need not derive from this class. If its attribute `threads` is False, one thread asks for
    all replies.
    """

    vocab_size: int
    end: tuple[int, ...]  # tokens that end a turn
    held_out: int | None = None  # how many held-out prompts there are; None: they are drawn
    longest: int = 0  # tokens of the longest prompt; 0: unknown

    def __init__(self, config=None):
        """Make the task. It is called as Class(config)."""

    def prompt(self, rng, index: int, held_out: bool):
        """Begin a group: return (state, prompt tokens). index: in the run, or in the evaluation."""
        raise NotImplementedError

    def reply(self, state, answer: list[int]):
        """Reply to a turn, whose end token is last: return (new state, reply tokens, reward).

        The state is a plain value, so rollouts can share it. A reply of None ends the rollout. No
        reply is asked for a turn that max_new_tokens has cut off.
        """
        raise NotImplementedError

    def where(self, state) -> str:
        """Return the source of a state, such as a file's line, for errors, or ""."""
        return ""

    def contents(self) -> dict:
        """Return {name: JSON value} of the data that prompts and rewards are made of.

        A run cannot be resumed with another value, and the error gives the name.
        """
        return {}

    def show(self, tokens: list[int]) -> str:
        """Return tokens as a person reads them, for samples.jsonl and errors."""
        return " ".join(map(str, tokens))


def is_held_out(data: bytes) -> bool:
    """Return whether a prompt is held out for evaluation: one in ten, by its hash."""
    return zlib.crc32(data) % 10 == 0


def require_code(flag, spec, expected):
    """Raise ValueError unless spec is FILE.py:NAME of an existing file. expected: in words."""
    file = spec.rpartition(":")[0]
    if not file.endswith(".py"):
        raise ValueError(f"expected {flag} {expected}, got {spec!r}")
    if not Path(file).is_file():
        raise ValueError(f"{flag} {spec}: {file}: no such file")


class FileLoader(importlib.machinery.SourceFileLoader):
    """Loads a file that the user has named. `place_in_users_file` knows the file by this class."""


def require_arguments(function, *names):
    """Raise ValueError unless a user's function can be called with these arguments, by place."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"expected {name}({', '.join(names)}), got "
                         f"{name}{inspect.signature(function)}: {error}") from error
    except ValueError:  # a function of C may have no signature
        pass


def from_file(spec, kind):
    """Import FILE.py of FILE.py:NAME; return its NAME. kind: class or function."""
    file, _, name = spec.rpartition(":")
    path = Path(file).absolute()
    # The file may import files of its folder, and the workers of a process pool import the file by
    # its name with this sys.path. The folder is last, so that it hides no other module. If the
    # file's name finds another module, the file gets a name that no worker can import.
    sys.path += [f"{path.parent}"] * (f"{path.parent}" not in sys.path)
    importlib.invalidate_caches()
    spec = importlib.machinery.PathFinder.find_spec(path.stem)
    is_own = spec is not None and spec.origin == f"{path}"
    is_free = is_own and path.stem not in sys.stdlib_module_names
    called = path.stem if is_free else f"task_{path.stem}"
    loader = FileLoader(called, f"{path}")
    spec = importlib.util.spec_from_file_location(called, path, loader=loader)
    module = sys.modules[called] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{file} has no {kind} {name!r}")
    return getattr(module, name)


def place_in_users_file(error) -> str:
    """Return the line of a user's file that raised an error, as "FILE, line 8, in reply".

    It is the innermost such line, of the error or of its cause. "" if there is none.
    """
    place = ""
    while error is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            if isinstance(getattr(frame.f_globals.get("__spec__"), "loader", None), FileLoader):
                code = frame.f_code
                place = f"{code.co_filename}, line {line}, in {code.co_qualname}"
        error = error.__cause__
    return place


# Questions and conversations ---------------------------------------------------------------------


def require_task(config):
    """Raise ValueError unless --task is one of TASKS, or names an existing file."""
    if config.task not in TASKS:
        require_code("--task", config.task, f"{', '.join(TASKS)} or FILE.py:Class")


def make_task(config) -> Task:
    """Make the task of `--task`: one of TASKS, or a class from a file; ValueError for neither."""
    if config.task == "jsonl":
        return Jsonl(config)
    if config.task in TASKS:
        return train_grpo.Guess(config)
    require_task(config)
    return require_usable(from_file(config.task, "class")(config))


def require_usable(task) -> Task:
    """Return a user's task. ValueError if its vocabulary or its end tokens are missing."""
    # A user's task need not derive from Task, so it may lack anything.
    name = type(task).__name__
    size = getattr(task, "vocab_size", 0)
    end = getattr(task, "end", ())
    if not isinstance(end, (tuple, list)) or not end or not all(0 <= t < size for t in end):
        raise ValueError(f"{name} needs vocab_size and end, ids under it; got {size} and {end}")
    return task


class Line(NamedTuple):
    """A line of --data or --eval-data, ready to be played."""

    where: str  # FILE.jsonl line N, for errors
    row: dict  # the JSON object, for the reward
    split_key: str  # the question or the messages; its hash decides whether it is held out
    messages: list  # the prompt's messages
    prompt: list  # the prompt's tokens
    later: list  # the user's messages after the policy's first, second, .. answer
    arguments: dict  # the row's arguments to the chat template, such as tools

    def conversation(self, answers) -> list:
        """Return the messages so far: the prompt's, and after each answer the user's next."""
        messages = list(self.messages)
        for n, answer in enumerate(answers):
            messages.append({"role": "assistant", "content": answer})
            messages += self.later[n : n + 1]  # none after the last answer
        return messages


class Jsonl(Task):
    """Questions and conversations from a file of JSON lines, in the checkpoint's chat template.

        {"question": "What is 3 + 4?", "answer": "3 and 4 make\\n#### 7"}        GSM8K's form
        {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}

    --template selects the form of a question. `chat`: the user's turn, in the checkpoint's chat
    template, is the question and on the next line --instruction. A system message may precede it,
    see --template-args. `raw`: the same two lines as plain text. A text with {question}: the whole
    prompt.

    Messages need the chat template. The policy answers the last message. If two of the user's
    messages follow each other, the policy answers the first, and then gets the second:

        system  user  assistant  user  [the policy]  user  [the policy]

    The row's `tools`, `documents` and `chat_template_kwargs` go to the chat template. Its other
    fields are for the reward, and the template must not read one of them.

    An assistant's message at the end is left out. Only the last answer is rewarded. --reward names
    a function(text, row). Without it, an answer has reward 1 if what follows its `####` equals what
    follows `####` in the row's answer, or the row's whole answer without `####`. So the prompt has
    to ask for `####`. An answer that --max-new-tokens cuts off has reward 0.

    The lines of --eval-data are held out, in their order, and all of --data is trained on. Without
    --eval-data every tenth prompt of --data, by its hash, is held out, with all of its lines. With
    all_lines every prompt of the file is held out, for an evaluation that trains on none.

    A state is (line, texts of the policy's answers so far).
    """

    def __init__(self, config, all_lines=False, *, data=None, eval_data=None, reward=None):
        """Read and check all lines.

        data, eval_data: lists of rows. Default: the rows of the files.
        reward: function. Default: the one that --reward names, if any.
        """
        self.config = config
        self.text = text_of(config)
        self.end = self.text.end
        self.vocab_size = self.text.vocab_size
        # By default the checkpoint's own template: a model trained on other marks would first have
        # to unlearn its own.
        self.template = config.template or ("raw" if self.text.template is None else "chat")
        if self.template != "chat" and config.template_args:
            raise ValueError(f"--template-args: {config.model} has no chat template to put them in")
        self.reward = reward
        if config.reward and reward is None:
            require_code("--reward", config.reward, "FILE.py:function")
            self.reward = from_file(config.reward, "function")
        if self.reward is not None:
            require_arguments(self.reward, "text", "row")
        # Threads ask for rewards (see `Task`), unless the function has `threads = False`.
        self.threads = getattr(self.reward, "threads", True)
        self.is_arithmetic = self.reward is None  # threads may ask, but would not help
        # A reward sees no special tokens, unless the function has `special_tokens = True`.
        self.special = getattr(self.reward, "special_tokens", False)

        # Encode and check every line now, so that an error in one is found before the run starts.
        lines = self._lines(config.data, data)
        held_out = self._lines(config.eval_data, eval_data) if config.eval_data else []
        self.lines = {"data": lines, "eval_data": held_out}
        self.rows = self._split(all_lines)  # by held out
        for is_out, file in {False: config.data, True: config.eval_data or config.data}.items():
            if not self.rows[is_out]:
                raise ValueError(
                    f"expected lines in {file} to {'hold out' if is_out else 'train on'}, got none "
                    f"of {len(lines)}; without --eval-data FILE every tenth prompt is held out, by "
                    f"a hash of what it asks")
        used = itertools.chain(self.rows[True], lines)
        if config.instruction != Config.instruction and not any("question" in x.row for x in used):
            raise ValueError(f"--instruction follows a question; {config.data} has none")
        self.held_out = len(self.rows[True])  # see `Task`
        self.longest = max((len(line.prompt) for line in [*lines, *held_out]), default=0)
        self.note = "\n".join(self._notes(all_lines))

    def prompt(self, rng, index, held_out):
        rows = self.rows[held_out]
        line = rows[index % len(rows) if held_out else int(rng.integers(len(rows)))]
        return (line, ()), line.prompt

    def reply(self, state, answer):
        # The last token ends the turn. The tokens before it are the policy's answer.
        line, answers = state
        text = self.text.decode(answer[:-1], special=self.special)
        answers = (*answers, text)
        if len(answers) <= len(line.later):
            tokens = self.text.next_turn(line.conversation(answers), answer[-1], line.arguments)
            return (line, answers), tokens, 0.0
        if self.reward is None:
            right = same_answer(final_answer(text), gold_of(line.row))
            return (line, answers), None, float(right)
        # The function gets a copy: a change to the row would affect the next answer's reward.
        return (line, answers), None, self.reward(text, copy.deepcopy(line.row))

    def where(self, state):
        return state[0].where

    def contents(self):
        data = {name: [line.row for line in lines] for name, lines in self.lines.items() if lines}
        contents = data | self.text.contents()
        if self.template != "chat":
            del contents["chat template"]
        return contents

    def show(self, tokens):
        return self.text.decode(tokens, special=True)

    # From a row of a file to a Line.

    def _lines(self, file, rows=None) -> list:
        """Return the Lines of a file, or of rows. ValueError names a row that cannot be played."""
        lines = []
        for number, row in read_json_lines(file) if rows is None else enumerate(rows, 1):
            where = f"{file} line {number}"
            with naming(where):  # a complaint of the chat template's too
                lines.append(self._line(where, row))
        return lines

    def _line(self, where, row) -> Line:
        """Make a Line of a row. ValueError says what is wrong with the row."""
        question, arguments = row.get("question", ""), arguments_in(row)
        if ("question" in row) == ("messages" in row) or not isinstance(question, str):
            raise ValueError(f"expected a string 'question' or a list 'messages', got {[*row]}")
        only_in_chats = sorted(arguments.keys() | row.keys() & {"messages"})
        if only_in_chats and self.template != "chat":
            raise ValueError(f"it holds {', '.join(only_in_chats)}, which only --template chat can "
                             f"say")  # fmt: skip
        if self.config.instruction and "question" in row:
            question += f"\n{self.config.instruction}"
        messages = row.get("messages", [{"role": "user", "content": question}])
        require_messages(messages)
        if not self.config.reward:
            require_answer(row)

        # Files for supervised training end in an answer, which the policy has to give by itself.
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        split_key = row.get("question", json.dumps(messages, sort_keys=True))
        first, later = played_turns(messages)
        if self.template == "chat":
            first, prompt = self._encode_chat(row, first, arguments)
        else:
            text = f"{question}\n"
            if self.config.has_whole_template:
                text = self.config.template.replace("{question}", row["question"])
            prompt = self.text.encode(text, bos=True)  # if this checkpoint's texts begin with BOS
        line = Line(where, row, split_key, first, prompt, later, arguments)
        self._require_room(line)
        return line

    def _encode_chat(self, row, first, arguments):
        """Return the prompt's messages, with the system's, and their tokens."""
        # What the chat template reads of the row must reach the template.
        self.text.require_read(arguments)
        for name in sorted(self.text.variables(arguments) & row.keys() - {*ARGUMENTS}):
            raise ValueError(f"it holds {name}, which the chat template reads: put it into "
                             f"chat_template_kwargs")  # fmt: skip
        if self.config.system and first[0]["role"] != "system":
            first = [{"role": "system", "content": self.config.system}, *first]
        return first, self.text.prompt(first, arguments)

    def _split(self, all_lines) -> dict:
        """Return {False: the lines to train on, True: the lines that are held out}."""
        rows = {False: self.lines["data"], True: self.lines["eval_data"]}
        if not self.config.eval_data:
            # Lines with the same prompt tokens are held out together, even if their texts differ.
            is_prompt_out = {}
            for line in self.lines["data"]:
                is_prompt_out.setdefault(tuple(line.prompt), is_held_out(line.split_key.encode()))
            rows = {False: [], True: []}
            for line in self.lines["data"]:
                rows[is_prompt_out[tuple(line.prompt)]].append(line)
        if all_lines:  # for an evaluation, which trains on none
            every = rows[True] + ([] if self.config.eval_data else rows[False])
            rows = {False: every, True: every}

        # An evaluation plays equal lines once.
        different = {}
        for line in rows[True]:
            answer = f"{line.row.get('answer')}"
            different.setdefault((tuple(line.prompt), f"{line.later}", answer), line)
        return rows | {True: [*different.values()]}

    def _require_room(self, line):
        """Raise a ValueError if a token is not the model's, or --max-new-tokens is too small."""
        # The replies count among the new tokens, and so does each answer's end. No reply depends on
        # an answer's text.
        replies = []
        for n in range(len(line.later)):
            conversation = line.conversation([""] * (n + 1))
            replies += self.text.next_turn(conversation, self.end[0], line.arguments)
        token = max([*line.prompt, *replies], default=0)
        if token >= self.vocab_size:
            raise ValueError(f"it holds token {token}, {self.show([token])!r}; the model's last "
                             f"token is {self.vocab_size - 1}")  # fmt: skip
        limit = self.config.max_new_tokens
        if len(replies) + len(line.later) + 1 > limit:
            raise ValueError(f"{len(replies)} tokens are said after the policy's answers, which "
                             f"leaves no room for these in --max-new-tokens {limit}")  # fmt: skip

    def _notes(self, all_lines):
        """Yield sentences for a run to print, on settings chosen by default and on the files."""
        c = self.config
        if not c.template and self.template == "raw":
            yield f"{c.model} has no chat template: prompts are plain text (--template raw)"
        if self.template == "chat" and self.text.settings_in_words:
            yield self.text.settings_in_words
        if not c.eval_data or all_lines:
            return

        trained = {tuple(line.prompt) for line in self.rows[False]}
        seen = sum(tuple(line.prompt) in trained for line in self.rows[True])
        if seen and c.data != c.eval_data:
            yield (f"{seen} of the {self.held_out} prompts of {c.eval_data} are in {c.data} too, "
                   f"and are trained on")  # fmt: skip


# The fields of a row that transformers' apply_chat_template takes under their own names.
ARGUMENTS = "tools", "documents"


def arguments_in(row) -> dict:
    """Return {name: value} of a row's arguments to the chat template.

    They are its `tools`, its `documents`, and the entries of its `chat_template_kwargs`, as in the
    data sets of other trainers. A null is ignored.
    """
    more = row.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise ValueError(f"expected chat_template_kwargs to be an object, got {more!r:.80}")
    return {name: row[name] for name in ARGUMENTS if row.get(name) is not None} | more


def require_answer(row):
    """Raise a ValueError unless a row has an answer to compare with, for runs without --reward."""
    # An empty answer would equal only `####`, and no line equals several lines.
    if not re.fullmatch(".+", gold_of(row) or ""):
        raise ValueError(f"expected an answer, a number or a line of text, which may follow ####, "
                         f"or a --reward, got {row.get('answer')!r:.80}")  # fmt: skip


def require_messages(messages):
    """Raise a ValueError unless messages are a conversation of a user and an assistant."""
    # Templates accept any role, "asistant" too, so an unknown role is refused here.
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"expected a list of 'messages', got {messages!r:.80}")
    for n, message in enumerate(messages, 1):
        roles = ("system", "user", "assistant") if n == 1 else ("user", "assistant")
        fields = message if isinstance(message, dict) else {}
        if fields.get("role") not in roles or not isinstance(fields.get("content"), str):
            raise ValueError(f"message {n}: expected a role of {', '.join(roles)}, and one string "
                             f"of content, got {message!r:.80}")  # fmt: skip


def played_turns(messages):
    """Split a conversation into the prompt's messages and the user's later messages."""
    # If the user speaks twice in a row, the policy answers in between, so the prompt ends there.
    # Earlier messages of the assistant are history.
    #
    #     user  assistant  user | user | user      the prompt, and two later messages
    roles = [message["role"] for message in messages]
    if roles[-1:] != ["user"]:
        raise ValueError("the last message must be the user's: the policy answers it")
    twice = [n for n in range(1, len(roles)) if roles[n - 1] == roles[n] == "user"]
    cut = min(twice, default=len(roles))
    if "assistant" in roles[cut:]:
        place = roles.index("assistant", cut) + 1
        raise ValueError(f"message {place} is the assistant's, after an answer that the policy has "
                         f"to give")  # fmt: skip
    return messages[:cut], messages[cut:]


# Rewards: compare the answer after the last `####` as a number or as text.


# Soft hyphens, zero-width spaces and joiners, marks of direction, and the byte order mark.
INVISIBLE = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"


def trimmed(text) -> str:
    """Return a text without the blanks and the invisible marks at its ends."""
    return re.sub(rf"^[\s{INVISIBLE}]+|[\s{INVISIBLE}]+$", "", text)


def final_answer(text):
    """Return what follows the last `####`, to the end of its line. None without `####`."""
    _, mark, rest = text.rpartition("####")
    return trimmed(rest.split("\n")[0]) if mark else None


def gold_of(row) -> str | None:
    """Return the right answer of a row: what follows its `####`, or without `####` all of it.

    A JSON number becomes a text: 1e3 is 1000. None if the answer is neither text nor number.
    """
    answer = row.get("answer")
    if type(answer) in (int, float) and math.isfinite(answer):
        answer = f"{Decimal(str(answer)):f}"
    if not isinstance(answer, str):
        return None
    final = final_answer(answer)
    return trimmed(answer) if final is None else final


def number_of(text):
    """Return a text as an exact Decimal, or None if it is not a number."""
    # Ignore invisible marks, the signs of money and percent, and Markdown around a number. A minus
    # may be a Unicode sign, and LaTeX writes 9{,}500 and 9\,500 for 9,500.
    plain = re.sub(rf"[{INVISIBLE}]|\\?[$%]", "", text)
    plain = re.sub(r"[\u2212\u2013\ufe63\uff0d]", "-", plain)
    plain = re.sub(r"\{,\}|\\,", ",", plain)
    plain = re.sub(r"^[\s*_`]+|[\s*_`.]+$", "", plain)

    # Commas and blanks belong to a number only between groups of three digits: `3, 4` is not 34.
    # Decimal would also accept nan, inf and 1e3, which are not answers.
    if re.fullmatch(r"[-+]?\d{1,3}([,\s]\d{3})+(\.\d*)?", plain):
        plain = re.sub(r"[,\s]", "", plain)
    return Decimal(plain) if re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)", plain) else None


def same_answer(a, b):
    """Compare answers as numbers (1,000 = 1000.0 = $1000) or, unless both are, as trimmed text."""
    if a is None or b is None:
        return False
    x, y = number_of(a), number_of(b)
    return trimmed(a) == trimmed(b) if x is None or y is None else x == y

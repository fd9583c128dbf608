"""Text: adds tokenizers, chat templates and JSONL files of questions to `train_grpo.py`.

The trainer knows token ids and no text. This file is everything between the two. transformers
encodes, decodes and applies the chat template: `pip install transformers`. Two things are left to
do, because a policy is trained on the very tokens that it sampled:

- The next turn of a conversation. BPE is not a bijection: the sampled tokens 1, 2 may decode to 12,
  which encodes as one token. So a row is never rendered again. Only the text after the sampled
  answer is encoded, and appended to the row (`Text.next_turn`).
- The end of a turn. A policy stops at the mark that the template itself writes after an answer,
  such as <|im_end|>. No file names this mark, so the template is asked (`Text._find_ends`).
"""

import contextlib
import copy
import inspect
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import train_grpo
from full.config import TASKS, Config, _flag, read_arguments, read_date
from full.files import read_json_lines
from full.model_config import ModelConfig, read_json
from full.tasks import (
    Task, TaskError, bare, file_of, from_file, is_finite_number, is_held_out, naming_the_task,
    refuse_object, require_code,
)  # fmt: skip


def require_task(config):
    """Raise ValueError unless --task is one of TASKS, or names a file that is there."""
    if config.task not in TASKS:
        require_code("--task", config.task, f"{', '.join(TASKS)} or FILE.py:Class")


def make_task(config, objects=None) -> Task:
    """Make the task of `--task`: one of TASKS, or a class from a file; ValueError for neither.

    objects: {field: what full.api was given where the field of Config names a file}. Default: none.
    """
    objects = objects or {}
    if config.task == "jsonl":
        return Jsonl(config, objects=objects)
    if config.task in TASKS:
        return train_grpo.Guess(config)
    if "task" in objects:
        task = objects["task"]
    else:
        require_task(config)
        file, make = from_file(config.task, "class")
        with naming_the_task(file, config.task.rpartition(":")[2]):
            task = make(config)

    # A task need not derive from Task, so nothing can be taken for granted.
    name = type(task).__name__
    size = getattr(task, "vocab_size", 0)
    end = getattr(task, "end", ())
    if not isinstance(end, (tuple, list)) or not end or not all(0 <= t < size for t in end):
        raise ValueError(f"{name} needs vocab_size and end, ids under it; got {size} and {end}")
    return task


# A chat template's `strftime_now`. transformers would give a template the moment, and takes no
# function of ours, but a macro of the same name can be put before the template. The line break
# after it is trimmed, so the template begins at the beginning of a line, as by itself.
DATE_MACRO = (
    "{% macro strftime_now(format) %}{% set found = namespace(text=format) %}"
    "{% for code, text in date_codes.items() %}"
    "{% set found.text = found.text | replace(code, text) %}"
    "{% endfor %}{{ found.text }}{% endmacro %}\n"
)
DATE_LETTERS = "aAbBcdDeFfGHIjklmMpRsSTuUVwWxXyYzZ"


class Text:
    """The text side of a checkpoint directory: its tokenizer, its chat template, the ends of turns.

    A conversation is a list of messages, {"role": "system" | "user" | "assistant", "content": ..}.
    A damaged file is a ValueError of one line, and so is a directory in which nothing ends a turn.

    config: ModelConfig. The model's shape, from config.json.
    vocab_size: int. How many ids the model has. That is more than the tokenizer has where the
        model's rows are rounded up (Qwen), and one less where the tokenizer alone knows the place
        of an image (Gemma 3 1B).
    tokenizer: transformers' tokenizer.
    template: the chat template, as transformers read it. None where the directory has none.
    bos: int. The id that raw text begins with. None if the checkpoint wants none.
    end: tuple of int. The ids that end a turn. The mark that the template itself writes after an
        answer is first, then the ids of generation_config.json, then the ids of config.json.
    parts: set of str. The roles whose content the template wants as a list of parts.
    note: str. What the template gets besides messages. "" if that is nothing.
    """

    def __init__(self, directory, *, date=None, arguments=None):
        """Read a directory.

        date: datetime. Of `strftime_now` in the template. Default: now.
        arguments: {name: value} of --template-args. Default: none.
        """
        self.directory = Path(directory)
        self.date = date or read_date("")
        self.arguments = arguments or {}
        self.tokenizer = load_tokenizer(self.directory)
        self.config = ModelConfig.from_hf(self.directory)
        self.vocab_size = self.config.vocab_size
        self.template = self.tokenizer.chat_template
        # The tokenizer itself writes BOS before any text, or nothing does.
        bare = self.encode("a")
        whole = self.tokenizer.encode("a")
        self.bos = whole[0] if whole[:1] != bare[:1] else None
        self._require_arguments()
        self.parts = set()
        self._find_parts()
        self.end = self._find_ends()  # last, because the template is asked

    @property
    def note(self) -> str:
        given = [f"{name} = {json.dumps(value)}" for name, value in self.arguments.items()]
        if "strftime_now" in f"{self.template}":
            given.append(f"the date {self.date:%Y-%m-%d}")
        what = f"the chat template of {self.directory} gets {', '.join(given)}"
        return what if given else ""

    def encode(self, text, *, bos=False) -> list[int]:
        """Encode a text as it stands: marks in it become their ids, and nothing is added.

        bos: begin with BOS, if the checkpoint wants one and the text does not begin with it.
        """
        # A pipe and the command line may bring bytes that are not UTF-8. Python passes them on as
        # lone surrogates, and the tokenizer would fail without naming them. This names them.
        text.encode("utf-8")

        # Here "special tokens" are the tokens that the tokenizer would put around the text. Marks
        # inside the text are recognized in either case.
        tokens = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if bos and self.bos is not None and tokens[:1] != [self.bos]:
            tokens = [self.bos, *tokens]
        return tokens

    def decode(self, tokens, *, special=False) -> str:
        """Decode tokens to text. special: keep the marks, such as <|im_end|>."""
        how = dict(skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return self.tokenizer.decode(list(tokens), **how)

    def render(self, messages, *, add_generation_prompt=True) -> str:
        """Write a conversation as the checkpoint's chat template writes it.

        add_generation_prompt: end with the text that precedes an answer of the assistant.
        ValueError without a template, or with the template's own complaint.
        """
        if self.template is None:
            raise ValueError(f"{self.directory} has no chat template")
        # A template is a program, written by somebody else: any error may come out of it. That
        # jinja2 is not installed is not its fault.
        how = dict(tokenize=False, add_generation_prompt=add_generation_prompt)
        how |= self.arguments
        messages = [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in self.parts else message
            for message in messages
        ]  # fmt: skip
        with named(f"the chat template of {self.directory} fails"):
            template = self.tokenizer.get_chat_template(tools=self.arguments.get("tools"))
            if "strftime_now" in template:
                how |= dict(chat_template=DATE_MACRO + template, date_codes=self._date_codes())
            return self.tokenizer.apply_chat_template(messages, **how)

    def prompt(self, messages) -> list[int]:
        """Encode a conversation up to the place where the assistant answers.

        The template decides whether BOS is among the tokens: Gemma's writes it, Qwen has none.
        ValueError if the template leaves a message out.
        """
        tokens = self.encode(self.render(messages))
        self._require_said(messages, range(len(messages)))
        return tokens

    def next_turn(self, messages, end_token) -> list[int]:
        """Encode the text between a sampled answer and the answer to the next message.

        messages[-2] is an answer of the policy. Its tokens are in a row already, end_token last.
        messages[-1] is the next message. The result is appended to the row:

            row so far   .. <|im_start|>assistant, line break, 12. <|im_end|>
            next_turn    line break, <|im_start|>user, line break, And 7? <|im_end|>,
                         line break, <|im_start|>assistant, line break

        No sampled token is decoded and encoded again, so the tokens of a row stay as they were
        drawn. The row can therefore differ from the rendering of the whole conversation where a
        template rewrites history. Qwen3's template leaves the thoughts of earlier turns out, and
        Gemma's trims the spaces around an answer. In a row the thoughts and the spaces stay.
        """
        answered = [*messages[:-2], messages[-2] | {"content": "An answer"}, messages[-1]]
        after = self._text_after(answered, -2, add_generation_prompt=True)
        self._require_said(answered, [len(answered) - 1])

        # The mark after the answer is encoded with the rest, since some marks absorb the spaces
        # that follow. The policy has sampled this mark, unless it ended its turn in another way.
        # Where the template writes no mark, the sampled mark keeps a tokenizer from taking what
        # follows for the beginning of a text, before which it might write a blank.
        added = self.tokenizer.added_tokens_decoder
        mark = added[end_token].content if end_token in added else ""
        tokens = self.encode(after if after.startswith(mark) else mark + after)
        return tokens[1:] if tokens[:1] == [end_token] else tokens

    def _date_codes(self) -> dict:
        """Return {code of strftime: what it says of the date}, for DATE_MACRO."""
        # The macro replaces one code after another, so %% is a mark of its own until the last.
        names = [f"%{sign}{letter}" for sign in ("-", "") for letter in DATE_LETTERS]
        codes = {name: self.date.strftime(name) for name in names}
        return {"%%": "\uffff"} | codes | {"\uffff": "%"}

    def _require_said(self, messages, places):
        """Raise a ValueError if the template leaves out a part of one of messages[places]."""
        # A message may be short, and stand elsewhere in the prompt too, so it cannot be searched.
        # It gets marks at its ends that can. What is between, the template may trim and escape. Of
        # an answer it need write the end alone: many templates leave earlier thoughts out.
        word = "Mark"
        while word in str(messages):
            word += " again"
        marked = list(messages)
        for n in places:
            message = messages[n]
            begins = "" if message["role"] == "assistant" else f"{word} {n} begins "
            content = f"{begins}{message['content']} {word} {n} ends"
            marked[n] = message | {"content": content}
        text = self.render(marked)
        for n in places:
            role, content = messages[n]["role"], messages[n]["content"]
            begins = role == "assistant" or f"{word} {n} begins" in text
            if content.strip() and not (begins and f"{word} {n} ends" in text):
                raise ValueError(f"expected the {role}'s message {content[:60]!r} in the prompt, "
                                 f"but the chat template of {self.directory} leaves it out, or a "
                                 f"part of it")  # fmt: skip

    def _require_arguments(self):
        """Raise a ValueError for an argument of --template-args that the template does not read."""
        for name in self.arguments if self.template is not None else ():
            reads = re.search(rf"\b{re.escape(name)}\b", f"{self.template}")
            if not reads or name in ("messages", "add_generation_prompt", "strftime_now"):
                raise ValueError(f"--template-args: the chat template of {self.directory} has no "
                                 f"argument {name}")  # fmt: skip

    def _find_parts(self):
        """Find the roles whose content the template wants as parts, [{"type": "text", ..}]."""
        # Such a template writes nothing of a string, whose letters have no type. So a role says a
        # word as a string, and, if the template loses it, as a part.
        word, asked = "something", {"role": "user", "content": "2 + 2?"}

        def is_written(conversation):
            with contextlib.suppress(ValueError):
                text = self.render(conversation, add_generation_prompt=False)
                # A list that is written as a list is not read as parts.
                return word in text and not re.search(rf"text['\"]: *['\"]{word}", text)
            return False

        for role in ("user", "system", "assistant"):
            said = {"role": role, "content": word}
            conversation = {"user": [said], "system": [said, asked], "assistant": [asked, said]}
            if not is_written(conversation[role]):
                self.parts.add(role)
                if not is_written(conversation[role]):
                    self.parts.remove(role)

    def _text_after(self, messages, turn, *, add_generation_prompt) -> str:
        """Return what the template writes after the content of messages[turn], to the end."""
        # How can this be known of a program? Run it with an answer that can be found again: plain
        # words, which no template trims, splits or escapes. If a message has these very words,
        # take other words.
        marker = "here the answer stands"
        while marker in str(messages):
            marker += " again"
        messages = list(messages)
        messages[turn] = {"role": messages[turn]["role"], "content": marker}

        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        if text.count(marker) != 1:
            raise ValueError(f"the chat template of {self.directory} writes an answer "
                             f"{text.count(marker)} times, not once")  # fmt: skip
        return text.partition(marker)[2]

    def _find_ends(self) -> tuple:
        """Return the ids that end a turn, each once."""
        # What does the template write after an answer? It is a mark if it is a token of its own;
        # Gemma has such tokens for line breaks too. A template that wants other conversations has
        # none, and of one that is wrong `render` will say so.
        ends = []
        conversation = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant"}]
        with contextlib.suppress(ValueError):
            after = self.encode(self._text_after(conversation, -1, add_generation_prompt=False))
            added = self.tokenizer.added_tokens_decoder
            ends += [x for x in after[:1] if x in added and not added[x].content.isspace()]

        # A chat model's config.json often names one end alone, of a turn or of a document;
        # generation_config.json has both.
        path = self.directory / "generation_config.json"
        said = (read_json(path) if path.exists() else {}).get("eos_token_id") or []
        said = said if isinstance(said, list) else [said]
        own = list(self.config.eos_token_id)
        for file, ids in ((path, said), (self.directory / "config.json", own)):
            if not all(type(token) is int and 0 <= token < self.vocab_size for token in ids):
                raise ValueError(f"{file}: eos_token_id: expected ids under {self.vocab_size}, got "
                                 f"{ids}")  # fmt: skip
        ends += said + own
        if not ends:
            raise ValueError(f"{self.directory}: nothing ends a turn: no eos_token_id, and no chat "
                             f"template that writes a mark after an answer")  # fmt: skip
        return tuple(dict.fromkeys(ends))


def text_of(config) -> Text:
    """Return the Text of --model, whose chat template gets what the settings say."""
    arguments = read_arguments(config.template_args)
    return Text(config.model, date=read_date(config.date), arguments=arguments)


@contextlib.contextmanager
def named(what):
    """Turn any error of a library into a ValueError of one line, `what` first."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        said = " ".join(f"{error}".split())
        raise ValueError(f"{what}: {type(error).__name__}: {said}") from error


def load_tokenizer(directory):
    """Load transformers' tokenizer of a checkpoint directory."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ImportError("text needs transformers: pip install transformers") from error

    # transformers would look a name up on the network, and make up a tokenizer of five tokens for a
    # directory that has none. It does not say which file is damaged, so JSON is read here first.
    if not directory.is_dir():
        raise ValueError(f"expected the local directory of a checkpoint, got {directory}")
    if not (directory / "tokenizer.json").exists():
        raise ValueError(f"{directory} has no tokenizer.json")
    for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"):
        if (directory / name).exists():
            read_json(directory / name)

    # DEVIATES: from transformers' AutoTokenizer. Version 5 takes the vocabulary alone out of
    # tokenizer.json where it has a class for the model's family, and cuts text into words as this
    # class does. The class here takes the file as its authors wrote it.
    # Pinned by tests/full/test_text.py::test_a_tokenizer_is_the_one_of_its_file.
    with named(f"{directory / 'tokenizer.json'} cannot be read"):
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


# The task `jsonl` -------------------------------------------------------------------------------
# Questions and conversations of a file, in the checkpoint's own words. Skip it if you bring a task
# of your own.


class Line(NamedTuple):
    """A line of --data or --eval-data, as `Jsonl` plays it."""

    where: str  # FILE.jsonl line N, for errors
    row: dict  # the JSON object, for the reward
    shown: str  # what the line asks; its hash decides whether the line is held out
    messages: list  # the prompt's messages
    said: str  # the prompt's text
    prompt: list  # the prompt's tokens
    later: list  # the user's messages after the policy's first, second, .. answer
    demo: str | None  # an answer of the policy, to be learned


class Jsonl(Task):
    """Questions and conversations from a file of JSON lines, in the checkpoint's own words.

        {"question": "What is 3 + 4?", "answer": "3 and 4 make\\n#### 7"}        GSM8K's form
        {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}

    --template says how a question is put. `chat`: the user's turn, in the checkpoint's own chat
    template, is the question and on the next line --instruction; --system is the system's message.
    `raw`: the same two lines as plain text. A text with {question}: that is the whole prompt.

    Messages are said as they stand, in the chat template. The policy answers the last message, and
    where two of the user's messages follow each other, the first of the two. The second message is
    then said to the policy:

        system  user  assistant  user  [the policy]  user  [the policy]

    An assistant's message at the end is a demonstration (--demos), and is not shown. Only the last
    answer is rewarded. --reward names a function(text, row). Without it, an answer has reward 1 if
    it ends in `####` and a number or text equal to what follows `####` in the line's answer (equal
    to the whole answer, if nothing does), so the prompt has to ask for `####`. An answer that
    --max-new-tokens cuts off has reward 0.

    The lines of --eval-data are held out, in their order, and all of --data is trained on. Without
    --eval-data every tenth prompt of --data, by its hash, is held out. With all_lines every prompt
    of the one file is, for an evaluation that trains on none.

    A state is (line, texts of the policy's answers so far).
    """

    def __init__(self, config, all_lines=False, objects=None):
        self.config = config
        objects = objects or {}
        self.text = text_of(config)
        self.end = self.text.end
        self.vocab_size = self.text.vocab_size
        self.template = template_of(config, self.text)
        notes = []  # sentences about settings that were not given, for a run to print
        if not config.template and self.template == "raw":
            notes.append(f"{config.model} has no chat template: prompts are plain text "
                         f"(--template raw)")  # fmt: skip
        if self.template == "chat" and self.text.note:
            notes.append(self.text.note)
        if config.reward:
            self.reward_file, self.reward = reward_of(config.reward, objects.get("reward"))
        # Threads ask for rewards (see `Task`), unless the function says `threads = False`.
        self.threads = bool(config.reward) and getattr(self.reward, "threads", True)
        # A reward sees no special tokens, unless the function says `special_tokens = True`.
        self.special = bool(config.reward) and getattr(self.reward, "special_tokens", False)

        # Every line is encoded and checked now, so that a bad one is named before the run starts.
        lines = self._lines("data", objects)
        self.rows = {False: [], True: []}  # by held out
        if config.eval_data:
            self.rows = {False: lines, True: self._lines("eval_data", objects)}
            notes += self._notes_on_files() if not all_lines else []
        else:
            for line in lines:
                self.rows[is_held_out(line.shown.encode())].append(line)
        if all_lines:  # for an evaluation, which trains on none
            every = self.rows[True] + ([] if config.eval_data else self.rows[False])
            self.rows = {False: every, True: every}
        self.note = "\n".join(notes)

        # What a file as a whole must be.
        if not all(self.rows.values()) and not config.eval_data:
            raise ValueError(
                f"{config.data} is too small to hold every tenth prompt out: by a hash of what it "
                f"asks, {len(self.rows[True])} of {len(lines)} lines are; --eval-data FILE holds "
                f"the lines of another file out")
        for held_out, file in {False: config.data, True: config.eval_data}.items():
            if not self.rows[held_out]:
                raise ValueError(f"expected lines in {file}, got none")
        has_question = any("question" in line.row for line in (*self.rows[True], *lines))
        if config.instruction != Config.instruction and not has_question:
            raise ValueError(f"--instruction follows a question; {config.data} has none")
        for line in self.rows[False] if config.demos else ():
            with naming_the_line(line.where):
                count = len(self.demo((line, ()), None))
                if count > config.max_new_tokens:  # its end would be cut off, and not be learned
                    raise ValueError(f"a demonstration of {count} tokens is over --max-new-tokens "
                                     f"{config.max_new_tokens}")  # fmt: skip

    def prompt(self, rng, index, held_out):
        rows = self.rows[held_out]
        line = rows[index % len(rows) if held_out else int(rng.integers(len(rows)))]
        return (line, ()), line.prompt

    def reply(self, state, answer):
        # The last token ends the turn; the policy has said everything before it.
        line, answers = state
        text = self.text.decode(answer[:-1], special=self.special)
        answers = (*answers, text)
        if len(answers) <= len(line.later):
            said = self.text.next_turn(conversation(line, answers), answer[-1])
            return (line, answers), said, 0.0
        return (line, answers), None, self._reward(line, text)

    def demo(self, state, rng):
        """Encode a line's demonstration, its end included, as the policy should say it."""
        # A line may have no demonstration. The task begins without it, and only --demos needs it.
        line, _ = state
        if line.demo is None:
            raise ValueError("it holds no demonstration, neither an answer to its question nor an "
                             "assistant's message that is the policy's only one")  # fmt: skip
        if any(token in self.end for token in self.text.encode(line.demo)):
            raise ValueError(f"the demonstration {line.demo!r} holds a mark that would end it")

        # The chat template may write an answer in another form: Gemma's strips blanks around it,
        # and Qwen3's puts an empty block of thoughts before it. What the template adds after the
        # end is not the policy's. A template that asks for answers in one form and writes them in
        # another (DeepSeek-R1's, with its thoughts) gives no text that follows the prompt, or none
        # that holds the answer. Then the answer is taken as it stands.
        before = line.said
        whole = before + line.demo
        if self.template == "chat":
            answered = [*line.messages, {"role": "assistant", "content": line.demo}]
            text = self.text.render(answered, add_generation_prompt=False)
            is_held = squeezed(line.demo) in squeezed(text.removeprefix(before))
            whole = text if text.startswith(before) and is_held else whole

        # The answer's tokens are those of the whole text after the prompt's. Alone, its first word
        # would get a blank from some tokenizers.
        tokens = self.text.encode(whole, bos=self.template != "chat")
        count = len(line.prompt)
        if tokens[:count] != line.prompt:
            raise ValueError(f"the tokens of its prompt change when the demonstration "
                             f"{line.demo!r:.60} follows: let the prompt end, or the answer "
                             f"begin, in another way")  # fmt: skip
        tokens = tokens[count:]
        self._require_known(tokens)
        ends = [n for n, token in enumerate(tokens) if token in self.end]
        return tokens[: ends[0] + 1] if ends else [*tokens, self.end[0]]

    def where(self, state):
        return state[0].where

    def show(self, tokens):
        return self.text.decode(tokens, special=True)

    # How a row of a file becomes a Line.

    def _lines(self, field, objects) -> list:
        """Return the Lines of --data or --eval-data. ValueError names one that cannot be played."""
        file = getattr(self.config, field)
        if field in objects:
            rows = enumerate(objects[field], 1)
        else:
            refuse_object(field, file)
            rows = read_json_lines(file)
        lines = []
        for number, row in rows:
            where = f"{file} line {number}"
            with naming_the_line(where):
                lines.append(self._line(where, row))
        return lines

    def _notes_on_files(self) -> list:
        """Return a sentence for each thing about --eval-data that makes its figure another one."""
        c, held_out = self.config, self.rows[True]
        trained = {line.shown for line in self.rows[False]}
        seen = sum(line.shown in trained for line in held_out)
        notes = []
        if held_out and c.eval_prompts != len(held_out):
            notes.append(f"{c.eval_data} has {len(held_out)} lines, and an evaluation asks "
                         f"{c.eval_prompts} prompts: --eval-prompts {len(held_out)} asks each line "
                         f"once")  # fmt: skip
        if seen and c.data != c.eval_data:
            notes.append(f"{seen} of the {len(held_out)} prompts of {c.eval_data} are in {c.data} "
                         f"too, and are trained on")  # fmt: skip
        return notes

    def _line(self, where, row) -> Line:
        """Make a Line of a row. ValueError says what is wrong with the row."""
        messages = self._messages(row)

        # Without a reward function, which may do without an answer, the row's says what is right.
        # Only `####` could equal an empty one.
        if not self.config.reward and not isinstance(row.get("answer"), str):
            raise ValueError("it holds no answer, a string, and there is no --reward")
        if not self.config.reward and not gold_of(row["answer"]):
            raise ValueError("its answer is empty, so nothing says what is right")

        # An assistant's message at the end is a demonstration, and is not shown. It is none if the
        # policy would have to give other answers before it.
        asked, demo = messages, None
        if messages[-1]["role"] == "assistant":
            asked, demo = messages[:-1], messages[-1]["content"]
        shown = json.dumps(asked, sort_keys=True) if "messages" in row else row["question"]
        first, later = played_turns(asked)

        # The chat template writes the marks of turns, and BOS if it should be there. Plain text
        # begins with BOS if this checkpoint's texts do.
        if self.template == "chat":
            if self.config.system and first[0]["role"] != "system":
                first = [{"role": "system", "content": self.config.system}, *first]
            said, prompt = self.text.render(first), self.text.prompt(first)
        else:
            said = plain_prompt(self.config, shown)
            prompt = self.text.encode(said, bos=True)
        line = Line(where, row, shown, first, said, prompt, later, None if later else demo)
        self._require_room(line)
        return line

    def _messages(self, row) -> list:
        """Return a row's messages. A question is the user's, and its answer a demonstration."""
        if "messages" in row:
            if "question" in row:
                raise ValueError("it holds both a question and messages: one would be dropped")
            require_messages(row["messages"])
            if self.template != "chat":
                raise ValueError("it holds messages, which only --template chat can say")
            return row["messages"]
        if not isinstance(row.get("question"), str):
            raise ValueError(f"it holds no question, a string, and no messages; it has {[*row]}")

        # With --template raw the messages are never rendered.
        messages = [{"role": "user", "content": with_instruction(self.config, row["question"])}]
        if isinstance(row.get("answer"), str):
            messages.append({"role": "assistant", "content": row["answer"]})
        return messages

    def _require_known(self, tokens):
        """Raise a ValueError if the model has no row for one of the tokens."""
        token = max(tokens, default=0)
        if token >= self.vocab_size:
            raise ValueError(f"it holds token {token}, {self.show([token])!r}; the model's last "
                             f"token is {self.vocab_size - 1}")  # fmt: skip

    def _require_room(self, line):
        """Raise a ValueError if the model has too few positions for a prompt and an answer."""
        limit = self.config.max_new_tokens
        room = self.text.config.max_position_embeddings - limit
        self._require_known(line.prompt)
        if len(line.prompt) > room:
            raise ValueError(f"a prompt of {len(line.prompt)} tokens; the model's positions less "
                             f"--max-new-tokens leave {room}")  # fmt: skip

        # The user's later messages count among the new tokens, and so does each answer's end. What
        # an answer says changes none of these messages.
        said = 0
        for n in range(len(line.later)):
            tokens = self.text.next_turn(conversation(line, [""] * (n + 1)), self.end[0])
            self._require_known(tokens)
            said += len(tokens)
        if said + len(line.later) + 1 > limit:
            raise ValueError(f"{said} tokens are said after the policy's answers, which leaves no "
                             f"room for these in --max-new-tokens {limit}")  # fmt: skip

    def _reward(self, line, text) -> float:
        """Score a last answer. ValueError that names the line if the score is not a number."""
        if not self.config.reward:
            return float(same_answer(final_answer(text), gold_of(line.row["answer"])))

        # The function gets a copy: a change to the row itself would reach the next answer's reward.
        where = f"for the answer {text[:200]!r} to {line.where}"
        try:
            with naming_the_task(self.reward_file):
                reward = self.reward(text, copy.deepcopy(line.row))
        except TaskError as error:
            name = f"--reward {self.config.reward}"
            raise TaskError(f"{name}: {error}, {where}") from error.__cause__
        if not is_finite_number(reward):
            raise ValueError(f"--reward {self.config.reward} gave {reward!r} {where}: rewards must "
                             f"be finite numbers")  # fmt: skip
        return float(bare(reward))


@contextlib.contextmanager
def naming_the_line(where):
    """Put FILE.jsonl line N before what a ValueError says, of the chat template's too."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def template_of(config, text) -> str:
    """Return how a run puts a question to this checkpoint: chat, raw, or a text with {question}.

    text: the checkpoint's Text. --template decides, and without it the checkpoint does.
    """
    # Unless somebody wants it otherwise, a checkpoint is spoken to as it has learned to be: a model
    # that is trained on other marks than its own has to unlearn its own first.
    has_own = text.template is not None
    template = config.template or ("chat" if has_own else "raw")
    if template == "chat" and not has_own:
        raise ValueError(
            f"--template chat: {config.model} has no chat template; --template raw needs none")
    for name in ("system", "template_args"):
        if template != "chat" and getattr(config, name):
            raise ValueError(f"{_flag(name)}: {config.model} has no chat template to put it in")
    return template


def squeezed(text) -> str:
    """Return a text without its blanks and line breaks, which a chat template may change."""
    return "".join(text.split())


def with_instruction(config, question) -> str:
    """Return a question and, on the next line, --instruction."""
    return f"{question}\n{config.instruction}" if config.instruction else question


def plain_prompt(config, question) -> str:
    """Return the prompt without a chat template: a text with {question}, else --template raw."""
    if "{question}" in config.template:
        return config.template.replace("{question}", question)
    return with_instruction(config, question) + "\n"


def conversation(line, answers) -> list:
    """Return the messages of a line so far: the prompt's, and after each answer the user's next."""
    messages = list(line.messages)
    for n, answer in enumerate(answers):
        messages.append({"role": "assistant", "content": answer})
        messages += line.later[n : n + 1]  # none after the last answer
    return messages


def require_messages(messages):
    """Raise a ValueError unless messages are a conversation of a user and an assistant."""
    # Templates write any role down, "asistant" too, so an unknown role is refused here.
    if not isinstance(messages, list) or not messages:
        raise ValueError("it holds no messages, a list of objects")
    for n, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"message {n} has no role and content: it is {message!r:.80}")
        role, content = message["role"], message["content"]
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"message {n}: expected the role system, user or assistant, got "
                             f"{role!r}")  # fmt: skip
        if not isinstance(content, str):
            advice = "; join the texts of its parts" if isinstance(content, list) else ""
            raise ValueError(f"message {n}: expected content as one string, got {content!r:.80}"
                             f"{advice}")  # fmt: skip
        if message["role"] == "system" and n > 1:
            raise ValueError(f"message {n} is the system's, which can only be the first")


def played_turns(messages):
    """Split a conversation that is played into the prompt's messages and the user's later ones."""
    # Where the user speaks twice in a row, the policy answers in between, so the prompt ends there.
    # What the assistant has said before is history.
    #
    #     user  assistant  user | user | user      the prompt, and two later messages
    roles = [message["role"] for message in messages]
    if roles[-1:] != ["user"]:
        raise ValueError("the messages end with no user's, which the policy could answer")
    twice = [n for n in range(1, len(roles)) if roles[n - 1] == roles[n] == "user"]
    cut = min(twice, default=len(roles))
    if "assistant" in roles[cut:]:
        place = roles.index("assistant", cut) + 1
        raise ValueError(f"message {place} is the assistant's, after an answer that the policy has "
                         f"to give")  # fmt: skip
    return messages[:cut], messages[cut:]


# Rewards: the answer after the last `####`, compared as a number or as text.


def reward_of(spec, function=None):
    """Import FILE.py:function of --reward. Return the file and the function.

    function: what full.api was given in place of a file. Then nothing is imported.
    """
    if function is None:
        require_code("--reward", spec, "FILE.py:function")
        file, function = from_file(spec, "function")
    else:
        file = file_of(function)

    # Its arguments are checked now: answers that are cut off are never shown to the function, so a
    # run that has only such answers would not notice. Some built-in functions tell no arguments.
    try:
        with contextlib.suppress(ValueError):
            inspect.signature(function).bind("text", {})
    except TypeError as error:
        raise ValueError(f"--reward {spec} cannot be called with (text, row): {error}") from error
    return file, function


# Soft hyphens, zero-width spaces and joiners, marks of direction, and the byte order mark.
INVISIBLE = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"


def trimmed(text) -> str:
    """Return a text without the blanks and the invisible marks at its ends."""
    return re.sub(rf"^[\s{INVISIBLE}]+|[\s{INVISIBLE}]+$", "", text)


def final_answer(text):
    """Return what follows the last `####`, to the end of its line. None without `####`."""
    _, mark, rest = text.rpartition("####")
    return trimmed(rest.split("\n")[0]) if mark else None


def gold_of(answer) -> str:
    """Return what a line's answer says is right: what follows `####`, or without it all of it."""
    final = final_answer(answer)
    return trimmed(answer) if final is None else final


def number_of(text):
    """Return the number that a text is, exactly as it is written. None if the text is not one."""
    # Invisible marks, the signs of money and percent, and Markdown around a number say nothing
    # about it. A minus may be a sign of its own, and LaTeX writes 9{,}500 and 9\,500 for 9,500.
    plain = re.sub(rf"[{INVISIBLE}]|\\?[$%]", "", text)
    plain = re.sub(r"[\u2212\u2013\ufe63\uff0d]", "-", plain)
    plain = re.sub(r"\{,\}|\\,", ",", plain)
    plain = re.sub(r"^[\s*_`]+|[\s*_`.]+$", "", plain)

    # Commas and blanks belong to a number only between groups of three digits: `3, 4` is not 34.
    # Decimal would also take nan, inf and 1e3, which are no answers.
    if re.fullmatch(r"[-+]?\d{1,3}([,\s]\d{3})+(\.\d*)?", plain):
        plain = re.sub(r"[,\s]", "", plain)
    return Decimal(plain) if re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)", plain) else None


def same_answer(a, b):
    """Compare answers as numbers (1,000 = 1000.0 = $1000) or, unless both are, as trimmed text."""
    if a is None or b is None:
        return False
    x, y = number_of(a), number_of(b)
    return trimmed(a) == trimmed(b) if x is None or y is None else x == y

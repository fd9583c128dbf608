"""Text: tokenizers and chat templates, questions from JSONL files, and eval, chat and export.

train_grpo.py trains on token ids and knows no text. This file is everything between the two. It is
imported where text is, by `--task jsonl` and by three commands; other runs never load it:

    python train_grpo.py --task jsonl --data questions.jsonl --model DIR ..   # train on questions
    python train_grpo.py eval RUN_OR_DIR     # pass@k on held-out prompts, with intervals
    python train_grpo.py chat RUN_OR_DIR     # talk: a line from the terminal or a pipe is a turn
    python train_grpo.py export RUN DIR      # a checkpoint as a Hugging Face directory

transformers encodes, decodes and applies the chat template: `pip install transformers`. Two things
are left to do, because a policy is trained on the very tokens that it sampled:

- The next turn of a conversation. BPE is not a bijection: the sampled tokens 1, 2 may decode to 12,
  which encodes as one token. So a row is never rendered again. Only the text after the sampled
  answer is encoded, and appended to the row (`Text.next_turn`).
- The end of a turn. A policy stops at the mark that the template itself writes after an answer,
  such as <|im_end|>. No file names this mark, so the template is asked (`Text._find_ends`).
"""

import argparse
import contextlib
import copy
import dataclasses
import inspect
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import models
import parallel
from models import ModelConfig, Row
from train_grpo import (
    ERRORS, EVALUATION, ONE_PROCESS, TASKS, Config, Sampler, Task, TaskError, add_flags, asking,
    beside, draw_prompts, evaluate, from_file, is_finite_number, is_held_out, make_task, names_code,
    naming_the_task, one_process, play, policy_in, read_json_lines, report, require_room,
    require_rows, resumed_config, uniforms, write_hf,
)  # fmt: skip


# 1. Tokenizer, chat template, ends of turns ------------------------------------------------------
# One class for a checkpoint directory. Both the task below and `chat` use it. Skip it if you only
# want to know what a line of a data file means.


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
    """

    def __init__(self, directory):
        self.directory = Path(directory)
        self.tokenizer = load_tokenizer(self.directory)
        self.config = ModelConfig.from_hf(self.directory)
        self.vocab_size = self.config.vocab_size
        self.template = self.tokenizer.chat_template
        # The tokenizer itself writes BOS before any text, or nothing does.
        bare = self.encode("a")
        whole = self.tokenizer.encode("a")
        self.bos = whole[0] if whole[:1] != bare[:1] else None
        self.end = self._find_ends()  # last, because the template is asked

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
        with named(f"the chat template of {self.directory} fails"):
            return self.tokenizer.apply_chat_template(messages, **how)

    def prompt(self, messages) -> list[int]:
        """Encode a conversation up to the place where the assistant answers.

        The template decides whether BOS is among the tokens: Gemma's writes it, Qwen has none.
        """
        return self.encode(self.render(messages))

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
        # The mark after the answer is encoded with the rest, since some marks absorb the spaces
        # that follow. The policy has sampled this mark, unless it ended its turn in another way.
        tokens = self.encode(self._text_after(messages, -2, add_generation_prompt=True))
        return tokens[1:] if tokens[:1] == [end_token] else tokens

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
        said = (models.read_json(path) if path.exists() else {}).get("eos_token_id") or []
        said = said if isinstance(said, list) else [said]
        if any(type(token) is not int for token in said):
            raise ValueError(f"{path}: eos_token_id: expected ids, got {said}")
        ends += said + list(self.config.eos_token_id)
        if not ends:
            raise ValueError(f"{self.directory}: nothing ends a turn: no eos_token_id, and no chat "
                             f"template that writes a mark after an answer")  # fmt: skip
        return tuple(dict.fromkeys(ends))


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
            models.read_json(directory / name)

    # DEVIATES: from transformers' AutoTokenizer. Version 5 takes the vocabulary alone out of
    # tokenizer.json where it has a class for the model's family, and cuts text into words as this
    # class does. The class here takes the file as its authors wrote it.
    # Pinned by tests/test_text.py::test_a_tokenizer_is_the_one_of_its_file.
    with named(f"{directory / 'tokenizer.json'} cannot be read"):
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


# 2. The task `jsonl` -----------------------------------------------------------------------------
# Questions and conversations of a file, in the checkpoint's own words. Skip it if you bring a task
# of your own.


class Line(NamedTuple):
    """A line of --data, as `Jsonl` plays it."""

    where: str  # FILE.jsonl line N, for errors
    row: dict  # the JSON object, for the reward
    shown: str  # what the line asks; its hash decides whether the line is held out
    messages: list  # the prompt's messages
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
    --max-new-tokens cuts off has reward 0. Every tenth prompt, by its hash, is held out; with
    all_lines every prompt is, for the evaluation of a file of its own.

    A state is (line, texts of the policy's answers so far).
    """

    def __init__(self, config, all_lines=False):
        self.config = config
        self.text = Text(config.model)
        self.end = self.text.end
        self.vocab_size = self.text.vocab_size
        self.template = template_of(config, self.text)
        self.note = ""
        if not config.template and self.template == "raw":
            self.note = (f"{config.model} has no chat template: prompts are plain text "
                         f"(--template raw)")  # fmt: skip
        if config.reward:
            self.reward_file, self.reward = reward_of(config.reward)
        # Threads ask for rewards (see `Task`), unless the function says `threads = False`.
        self.threads = bool(config.reward) and getattr(self.reward, "threads", True)

        # Every line is encoded and checked now, so that a bad one is named before the run starts.
        lines = []
        for number, row in read_json_lines(config.data):
            where = f"{config.data} line {number}"
            with naming_the_line(where):
                lines.append(self._line(where, row))
        self.rows = {False: [], True: []}  # by held out
        for line in lines:
            self.rows[is_held_out(line.shown.encode())].append(line)
        if all_lines:  # for an evaluation, which trains on none
            every = self.rows[True] + self.rows[False]
            self.rows = {False: every, True: every}

        # What the file as a whole must be.
        if not all(self.rows.values()):
            raise ValueError(
                f"{config.data} is too small to hold every tenth prompt out: by a hash of what it "
                f"asks, {len(self.rows[True])} of {len(lines)} lines are")
        has_question = any("question" in line.row for line in lines)
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
        text = self.text.decode(answer[:-1])
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
        tokens = self.text.encode(line.demo)
        self._require_known(tokens)
        if any(token in self.end for token in tokens):
            raise ValueError(f"the demonstration {line.demo!r} holds a mark that would end it")

        # The chat template may write an answer in another form: Gemma's strips blanks around it,
        # and Qwen3's puts an empty block of thoughts before it. What the template adds after the
        # end is not the policy's. A template that asks for answers in one form and writes them in
        # another (DeepSeek-R1's, with its thoughts) gives no text that follows the prompt; then the
        # answer is taken as it stands.
        if self.template == "chat":
            before = self.text.render(line.messages)
            answered = [*line.messages, {"role": "assistant", "content": line.demo}]
            whole = self.text.render(answered, add_generation_prompt=False)
            if whole.startswith(before):
                tokens = self.text.encode(whole[len(before) :])
        ends = [n for n, token in enumerate(tokens) if token in self.end]
        return tokens[: ends[0] + 1] if ends else [*tokens, self.end[0]]

    def show(self, tokens):
        return self.text.decode(tokens, special=True)

    # How a row of a file becomes a Line.

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
            prompt = self.text.prompt(first)
        else:
            prompt = self.text.encode(plain_prompt(self.config, shown), bos=True)
        line = Line(where, row, shown, first, prompt, later, None if later else demo)
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
            raise TaskError(f"{error}, {where}") from error.__cause__
        if not is_finite_number(reward):
            raise ValueError(f"--reward {self.config.reward} gave {reward!r} {where}: rewards must "
                             f"be finite numbers")  # fmt: skip
        return float(reward)


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
    if template != "chat" and config.system:
        raise ValueError(f"--system: {config.model} has no chat template to put it in")
    return template


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
        good = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not good or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"message {n} has no role (system, user or assistant) and content")
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


def reward_of(spec):
    """Import FILE.py:function of --reward. Return the file and the function."""
    if not names_code(spec):
        raise ValueError(f"expected --reward FILE.py:function, got {spec!r}")
    file, function = from_file(spec, "function")

    # Its arguments are checked now: answers that are cut off are never shown to the function, so a
    # run that has only such answers would not notice. Some built-in functions tell no arguments.
    try:
        with contextlib.suppress(ValueError):
            inspect.signature(function).bind("text", {})
    except TypeError as error:
        raise ValueError(f"--reward {spec} cannot be called with (text, row): {error}") from error
    return file, function


def final_answer(text):
    """Return what follows the last `####`, to the end of its line. None without `####`."""
    _, mark, rest = text.rpartition("####")
    return rest.split("\n")[0].strip() if mark else None


def gold_of(answer) -> str:
    """Return what a line's answer says is right: what follows `####`, or without it all of it."""
    final = final_answer(answer)
    return answer.strip() if final is None else final


def same_answer(a, b):
    """Compare answers as numbers (1,000 = 1000.0 = $1000) or, unless both are, as stripped text."""

    # Return a number, or None. Commas and blanks belong to a number only between groups of three
    # digits: `3, 4` is not 34. float() would also take nan, inf and 1e3, which nobody writes.
    def number(text):
        plain = re.sub(r"[$%]", "", text).strip().rstrip(".")
        if re.fullmatch(r"[-+]?\d{1,3}([,\s]\d{3})+(\.\d*)?", plain):
            plain = re.sub(r"[,\s]", "", plain)
        return float(plain) if re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)", plain) else None

    if a is None or b is None:
        return False
    x, y = number(a), number(b)
    return a.strip() == b.strip() if x is None or y is None else x == y


# 3. A policy to evaluate, talk to or export ------------------------------------------------------
# How the three commands below read a run or a Hugging Face directory. Skip it if you only train.


def is_run(directory) -> bool:
    """Return whether a directory is a run's, else a checkpoint's: both hold a config.json."""
    path = Path(directory) / "config.json"
    what = "the directory of a run, or of a checkpoint in Hugging Face's format"
    return "advantage" in models.read_json(path, what=what)


def settings_of_run(run, given=None, imported=()) -> Config:
    """Return what a run was started with, under the settings that are given: {field: value}.

    imported: of `task` and `reward` those whose file the caller imports. If the run had a file and
        none is given, a ValueError asks for it: no file is imported because a directory names it.
    """
    # `resumed_config` wants both flags again. A flag that nobody imports is given as it stands.
    given = given or {}
    path = Path(run) / "config.json"
    stored = models.read_json(path, what="the configuration of a run")
    free = [name for name in ("task", "reward") if name in given or name not in imported]
    again = {name: f"{stored[name]}" for name in free if name in stored}
    return dataclasses.replace(resumed_config(path, again), **given)


def load_policy(source, task=None, *, step=None, dtype="", device="cpu"):
    """Load the policy of a run or of a Hugging Face directory, whole. Return the model and a name.

    task: of a run without --model, whose tokens are the task's.
    step: int. Of the run's checkpoint. Default: the newest undamaged one.
    dtype: str. Default: of a run its generator's, in which it evaluates; of a directory as stored.
    """
    if not is_run(source):
        if step is not None:
            raise ValueError(f"--step is of a run, and {source} is a checkpoint in another format")
        stored = getattr(torch, dtype) if dtype else None
        model = models.load_hf(source, dtype=stored, device=device)
        return model.requires_grad_(False), f"{source}"

    # Which checkpoint. Steps are checked before anything large is read.
    config = settings_of_run(source)
    steps = {int(path.name[5:]): path for path in parallel.checkpoints(source)}
    if not steps and step is None and parallel.checkpoints(source, "demos"):
        raise ValueError(f"{source} is still in its supervised start: its first checkpoint of the "
                         f"loop, step-00000000, comes at the end of that")  # fmt: skip
    if not steps or step not in (None, *steps):
        held = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{source} holds no such checkpoint; those that it holds are of: {held}")

    # A checkpoint does not hold the model's shape. --model or the flags say it, and
    # `read_checkpoint` refuses tensors of another shape by name.
    if config.model and not Path(config.model).is_dir():
        raise ValueError(f"this run's model has its shape and text from --model {config.model}, "
                         f"which is gone: put it back")  # fmt: skip

    def read(path):
        return policy_in(path, config, task, dtype or config.rollout_dtype)

    if step is None:
        path, model = parallel.read_newest(source, read)
    else:
        path, model = steps[step], read(steps[step])
    return model.to(device), f"{source}, {Path(path).name}"


def command_parser(name):
    """Return a parser with the flags by which `eval` and `chat` choose a model."""
    parser = argparse.ArgumentParser(f"train_grpo.py {name}", allow_abbrev=False)
    parser.add_argument("source", metavar="RUN_OR_DIR", help="a run, or a Hugging Face directory")
    parser.add_argument("--step", type=int, help="of the run's checkpoint [the newest]")
    parser.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16"), default="",
        help="of the model's weights [of a run: its generator's; of a directory: as stored]",
    )  # fmt: skip
    return parser


# 4. eval -----------------------------------------------------------------------------------------
# An evaluation asks two things of the same held-out prompts. Greedy play says how many the policy
# solves at its best. Several samples of each say how likely one answer solves it (pass@1), and how
# often one of k does (pass@k). If the figures are far apart, training can still help.


# Flags of a run that an evaluation has too. All others would change nothing, and are refused.
EVAL_FLAGS = (
    "task", "data", "template", "instruction", "system", "reward", "size", "turns",
    "eval_prompts", "max_new_tokens", "temperature", "batch_rows", "seed", "device", "threads",
)  # fmt: skip

NORMAL_95 = 1.959964  # a normal number is within so many deviations 95 % of the time


def pass_at_k(solved, count, k) -> float:
    """Estimate the chance that one of k samples solves a prompt, if `solved` of `count` did.

    Chen et al. 2021, arXiv:2107.03374: 1 - C(count - solved, k) / C(count, k). It has no bias, and
    1 - (1 - solved / count)^k has one: with 1 of 2 solved it says 3/4 for k = 2, where it was 1.
    """
    # Of all ways to choose k of the samples, the share that chooses only failures.
    return 1 - math.comb(count - solved, k) / math.comb(count, k)


def wilson(mean, count):
    """Return Wilson's 95 % interval for a chance of which `count` prompts gave this mean."""
    # The interval holds every chance p whose own spread, sqrt(p (1 - p) / count), reaches to the
    # mean. So 7 of 7 gives 0.65 to 1, where mean +- 2 deviations would give 1 to 1.
    #
    # That is for prompts that count 0 or 1. pass@1 counts c / n, and pass@k too counts a number
    # between 0 and 1. Of all such numbers with mean p, 0 and 1 spread the most: x^2 <= x, so the
    # variance mean(x^2) - p^2 is at most p - p^2. For them the interval is right or too wide.
    z2 = NORMAL_95**2 / count
    center = (mean + z2 / 2) / (1 + z2)
    half = math.sqrt(mean * (1 - mean) * z2 + z2 * z2 / 4) / (1 + z2)

    # Rounding may leave an end just beyond 0 or 1, or the mean of 1 just outside.
    return min(max(0.0, center - half), mean), max(min(1.0, center + half), mean)


def evaluated(config, task, model, samples):
    """Play each held-out prompt greedily and `samples` times at the temperature. Collective.

    Returns figures, name -> (value, low, high); the number of different prompts; and as texts
    (prompt, answer, reward) of some samples.
    """
    # A run plays greedily every `eval_every` steps, by the same call: for the same weights it gives
    # the same figure, if seed, prompts and limits are the run's.
    sampler = Sampler(model)
    values = {"solved": evaluate(config, task, sampler)[0]}
    prompts = range(config.eval_prompts)
    starts = draw_prompts(config, task, EVALUATION, 0, prompts, held_out=True)

    # The samples have random numbers of their own: a key of one number more than a rollout's. They
    # do not fork, as rollouts of training do where --forks says so.
    several = dataclasses.replace(config, group=samples, forks=1, fork_turns=0)
    groups = play(several, task, sampler, starts, key=(config.seed, EVALUATION, 0))
    counts = [sum(t.reward >= 1 for t in group) for group in groups]
    powers = [2**n for n in range(samples.bit_length())]  # 1 2 4 of 6 samples, and 6 itself
    for k in sorted({*powers, samples}):
        values[f"pass@{k}"] = float(np.mean([pass_at_k(c, samples, k) for c in counts]))

    # A prompt that is drawn twice is not a second prompt: `guess` has 7, and draws each 10 times.
    different = len({(repr(state), tuple(prompt)) for _, state, prompt in starts})
    figures = {name: (value, *wilson(value, different)) for name, value in values.items()}

    # The first sample of the first prompts, so that a reader sees what the figures are about.
    shown = []
    for (_, _, prompt), (t, *_) in zip(starts[:3], groups):
        with asking(task):
            texts = task.show(t.tokens[: len(prompt)]), task.show(t.tokens[len(prompt) :])
        shown.append((*texts, t.reward))
    return figures, different, shown


def settings_of_evaluation(source, given) -> Config:
    """Return the run's own settings, or the defaults for a directory, and what was given."""
    # A run's device may be gone, its demonstrations are not learned, and its plan needs other
    # processes.
    if is_run(source):
        elsewhere = ONE_PROCESS | {"device": "", "demos": 0}
        return settings_of_run(source, elsewhere | given, imported=("task", "reward")).check()
    if "task" not in given:
        raise ValueError(f"{source} is a checkpoint, so say what to ask it: --task NAME, with "
                         f"--data FILE for --task jsonl")  # fmt: skip
    return Config(**given | {"model": f"{source}"}).check()


def evaluation(argv) -> int:
    """`eval`: print how many held-out prompts a policy solves, greedily and in several samples."""
    parser = command_parser("eval")
    parser.add_argument("--samples", type=int, default=8, metavar="K", help="of each prompt [8]")
    parser.add_argument(
        "--all-lines", action="store_true", help="jsonl: every line of --data, a file of its own, "
        "in place of the tenth that is held out")  # fmt: skip
    fields = [f for f in dataclasses.fields(Config) if f.name in EVAL_FLAGS]
    add_flags(parser.add_argument_group("flags", "default: the run's own; of a directory [these]"),
              fields)  # fmt: skip
    options = parser.parse_args(argv)
    if options.samples < 1:
        raise ValueError(f"--samples must be positive, got {options.samples}")

    # Everything that is wrong with the flags is said before a model is read. `given` are the flags
    # that were typed: the others are the run's own.
    given = {f.name: getattr(options, f.name) for f in fields if hasattr(options, f.name)}
    config = settings_of_evaluation(options.source, given)
    if options.all_lines and config.task != "jsonl":
        raise ValueError(f"--all-lines is for --task jsonl, not {config.task}")
    with one_process("an evaluation", config.device, config.threads) as device:
        task = Jsonl(config, all_lines=True) if options.all_lines else make_task(config)
        if options.all_lines:
            config = dataclasses.replace(config, eval_prompts=len(task.rows[True]))
        which = dict(step=options.step, dtype=options.dtype, device=device)
        model, name = load_policy(options.source, task, **which)
        require_rows(task, model.config, options.source)
        require_room(config, task, model.config.max_position_embeddings)
        figures, different, shown = evaluated(config, task, model, options.samples)

    # First what the task has decided by itself, such as a template. Then a table and samples for a
    # reader, and one line of JSON for a program.
    if getattr(task, "note", ""):
        print(task.note)
    which = "prompts" if options.all_lines else "held-out prompts"
    print(f"{name}: {config.task}, {config.eval_prompts} {which}, {different} different; "
          f"{options.samples} samples each at temperature {config.temperature:g}, "
          f"seed {config.seed}\n{'':24}   95 % interval over prompts")  # fmt: skip
    for name, (value, low, high) in figures.items():
        label = f"{name} (greedy)" if name == "solved" else name
        print(f"{label:16}{value:8.3f}   {low:.3f} - {high:.3f}")
    for prompt, answer, reward in shown:
        print(f"\nprompt: {prompt}\nanswer: {answer}\nreward: {reward:g}")
    print(f"\n{json.dumps(figures)}")
    return 0


# 5. chat -----------------------------------------------------------------------------------------
# A conversation is one growing row of tokens. A message of the user is encoded and appended, and
# the answer is sampled after it. Nothing is encoded twice. Every turn runs the row from its
# beginning, which is simple, and quick for what a person can type.


class Answer(Row):
    """An answer that is printed while it is sampled."""

    def __init__(self, tokens, draws, text):
        super().__init__(tokens, draws)
        self.text = text
        self.start = len(tokens)
        self.printed = ""

    def append(self, token, logprob):
        sampled = super().append(token, logprob)
        self.print_whole()
        return sampled

    def print_whole(self, ended=False):
        """Print what is new, up to the last whole character. ended: print all of it."""
        # A character may be the bytes of several tokens. Until the last of them is sampled, the
        # text ends in U+FFFD, which is printed only if no more bytes will come.
        text = self.text.decode(self.tokens[self.start :])
        if ended or not text.endswith("\ufffd"):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text


def converse(sampler, positions, text, options, plain):
    """Answer every line of the standard input that is not blank, to its end.

    sampler: a Sampler, or an object with its methods.
    positions: the longest conversation that the model has been built for, in tokens.
    plain: makes a prompt of a line where no chat template is used. None: the chat template is.
    """
    # What was said, as messages for the chat template and as the row that the model sees.
    messages = [{"role": "system", "content": options.system}] if options.system else []
    row, turn = [], 0
    for line in lines_said():
        # Only what is new is encoded: tokens of answers stay as they were sampled. At a terminal a
        # line that cannot be encoded may be typed again. In a pipe nobody would see that it was
        # skipped.
        said = [*messages, {"role": "user", "content": line}]
        try:
            if plain is not None:
                new = text.encode(plain(line), bos=turn == 0)
            else:
                new = text.next_turn(said, row[-1]) if turn else text.prompt(said)
        except ValueError as error:
            if not sys.stdin.isatty():
                raise
            print(error, file=sys.stderr)
            continue
        row = row + new
        room = min(options.max_new_tokens, positions - len(row))
        if room < 1:
            raise ValueError(f"the conversation has {len(row)} tokens, and the model has "
                             f"{positions} positions: begin another")  # fmt: skip

        # The random numbers are a function of the seed and the turn, so that a conversation from a
        # pipe can be repeated, and a second turn is not drawn by the numbers of the first.
        answer = Answer(row, uniforms((options.seed, turn), room), text)
        how = dict(max_new_tokens=room, temperature=options.temperature, end=text.end)
        sampler.generate([answer], **how)
        answer.print_whole(ended=True)
        print(flush=True)
        if answer.truncated:
            print(f"(cut off after {room} tokens)", file=sys.stderr)
        messages = [*said, {"role": "assistant", "content": answer.printed}]
        row = answer.tokens
        turn += 1


def lines_said():
    """Yield the lines that are typed, or come through a pipe, without blank ones."""
    # Even an empty line has its newline. Nothing at all is the end, Ctrl-D at a terminal.
    prompt = "> " if sys.stdin.isatty() else ""
    print(prompt, end="", flush=True)
    while line := sys.stdin.readline():
        if line.strip():
            yield line.rstrip("\n")
        print(prompt, end="", flush=True)
    print(end="\n" if prompt else "")


def chat(argv) -> int:
    """`chat`: talk to a policy until the input ends or somebody presses Ctrl-C."""
    # Answers are drawn from the policy's own distribution at the temperature, as rollouts are: no
    # top-k, top-p or penalty of generation_config.json, so one sees what was trained.
    parser = command_parser("chat")
    parser.add_argument("--system", help="the system's message, in a chat template [the run's]")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy [0.7]")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer [512]")
    parser.add_argument("--seed", type=int, default=0, help="of sampling [0]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="[cuda, if there]")
    options = parser.parse_args(argv)
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be positive, got {options.max_new_tokens}")

    # A directory in Hugging Face's format has no settings.
    is_of_run = is_run(options.source)
    config = settings_of_run(options.source) if is_of_run else Config(model=options.source)
    if not config.model:
        raise ValueError(f"{options.source} has no tokenizer, because it began without --model")
    try:
        with one_process("a chat", options.device, torch.get_num_threads()) as device:
            # A run on text is spoken to as it was trained, also where it decided by itself.
            text = Text(config.model)
            how, plain = "its own chat template", None
            template = template_of(config, text) if config.task == "jsonl" else "chat"
            if template != "chat":
                how = f"each line is put into the run's prompt, --template {template!r}"
                plain = lambda line: plain_prompt(config, line)  # noqa: E731
            elif text.template is None:
                how = "no chat template, so each line is plain text that the model goes on with"
                plain = str
            if options.system is None:
                options.system = config.system
            if options.system and plain is not None:
                raise ValueError(f"--system needs a chat template, and {options.source} has none")

            # Only answers go to the standard output, for a program that reads a pipe.
            which = dict(step=options.step, dtype=options.dtype, device=device)
            model, name = load_policy(options.source, **which)
            print(f"{name}: {how}", file=sys.stderr)
            positions = model.config.max_position_embeddings
            converse(Sampler(model), positions, text, options, plain)
    except KeyboardInterrupt:
        print(flush=True)  # one leaves by Ctrl-C, or by Ctrl-D, which ends the input
    return 0


# 6. export, main ---------------------------------------------------------------------------------
# A run leaves its last weights in OUT/hf by itself. `export` does the same with any checkpoint.


def export(argv) -> int:
    """`export`: write a run's checkpoint as the directory that the run itself writes to OUT/hf."""
    parser = argparse.ArgumentParser("train_grpo.py export", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    parser.add_argument("directory", metavar="DIR", help="to write; not there yet, or empty")
    parser.add_argument("--step", type=int, help="of the run's checkpoint [the newest]")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    options = parser.parse_args(argv)

    # Nothing is deleted for this but an empty directory.
    directory = Path(options.directory)
    partial = beside(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is not empty: give a directory that is, or a new one")
    if partial.exists():
        raise ValueError(f"{partial} is there, where the files are first written: remove it")
    if not is_run(options.run):
        raise ValueError(f"{options.run} is not a run: it is in Hugging Face's format already")

    # A run without --model has a shape with its task's tokens. A task's file that only the run's
    # directory names is asked for and not imported.
    config = settings_of_run(options.run)
    if options.task and (config.model or config.task in TASKS):
        raise ValueError(f"--task is for a run with a task from a file: {options.run} needs none")
    task = None
    if not config.model:
        given = {"task": options.task} if options.task else {}
        task = make_task(settings_of_run(options.run, given, imported=("task",)))
    with one_process("an export"):
        dtype = config.dtype if config.is_mixed else ""  # the masters, as at the run's own end
        model, name = load_policy(options.run, task, step=options.step, dtype=dtype)
        write_hf(model, directory, config.model)
    print(f"wrote {directory}: {name}")
    return 0


def main(argv) -> int:
    """Run a command and return its exit code: 0; 2 after an error, which is named on stderr."""
    # train_grpo.py hands its own commands of these names over, and nothing but their words.
    commands = dict(eval=evaluation, chat=chat, export=export)
    if not argv or argv[0] not in commands:
        print(f"usage: python text.py {' | '.join(commands)} ..", file=sys.stderr)
        return 2
    try:
        return models.quietly(commands[argv[0]], argv[1:])
    except ERRORS as error:
        return report(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Encode text for a policy: a checkpoint's tokenizer, its chat template, and the ends of turns.

The trainer knows token ids and no text. transformers encodes, decodes and applies the chat
template: `pip install transformers`. Two things are left to do, because a policy is trained on the
very tokens that it sampled:

- The next turn of a conversation. BPE is not a bijection: the sampled tokens 1, 2 may decode to 12,
  which encodes as one token. So a row is never rendered again. Only the text after the sampled
  answer is encoded, and appended to the row (`Text.next_turn`).
- The end of a turn. A policy stops at the mark that the template itself writes after an answer,
  such as <|im_end|>. No file names this mark, so the template is asked (`Text._find_ends`).
"""

import contextlib
import functools
import json
import re
from pathlib import Path

from full.model.config import ModelConfig, read_json
from full.run.config import read_arguments, read_date

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
    begin: list of int. The ids that raw text begins with, such as BOS. Mostly it is empty.
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
        # The tokenizer itself writes BOS before any text, or nothing does. It may also write marks
        # after a text, which would end an answer before it begins: a prompt gets none of them.
        bare, whole = self.encode("a"), self.tokenizer.encode("a")
        places = [n for n in range(len(whole)) if whole[n : n + len(bare)] == bare]
        self.begin = whole[: places[0]] if places else []

        # The template is asked for the rest.
        if self.template is not None and self.arguments:
            with naming("--template-args"):
                self.require_read(self.arguments)
        self.parts = set()
        self._find_parts()
        self.end = self._find_ends()

    @property
    def note(self) -> str:
        given = [f"{name} = {json.dumps(value)}" for name, value in self.arguments.items()]
        if "strftime_now" in f"{self.template}":
            given.append(f"the date {self.date:%Y-%m-%d}")
        what = f"the chat template of {self.directory} gets {', '.join(given)}"
        return what if given else ""

    def contents(self) -> dict:
        """Return {what: JSON value} that tokens are a function of: see `Task.contents`."""
        # What the files say, however they are laid out. Calls leave padding behind, which no
        # prompt has.
        tokenizer = json.loads(self.tokenizer.backend_tokenizer.to_str())
        tokenizer |= dict(truncation=None, padding=None, marks=self.tokenizer.special_tokens_map)
        return {"chat template": self.template, "tokenizer": tokenizer,
                "list of end ids": self.end}  # fmt: skip

    def encode(self, text, *, bos=False) -> list[int]:
        """Encode a text as it stands: marks in it become their ids, and nothing is added.

        bos: begin with `begin`, unless the text does so by itself.
        """
        # A pipe and the command line may bring bytes that are not UTF-8. Python passes them on as
        # lone surrogates, and the tokenizer would fail without naming them. This names them.
        text.encode("utf-8")

        # Here "special tokens" are the tokens that the tokenizer would put around the text. Marks
        # inside the text are recognized in either case.
        tokens = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if bos and tokens[: len(self.begin)] != self.begin:
            tokens = [*self.begin, *tokens]
        return tokens

    def decode(self, tokens, *, special=False) -> str:
        """Decode tokens to text. special: keep the marks, such as <|im_end|>."""
        how = dict(skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return self.tokenizer.decode(list(tokens), **how)

    def require_read(self, arguments):
        """Raise ValueError if the chat template does not read one of these arguments."""
        for name in sorted(arguments.keys() - self.variables(arguments)):
            if arguments[name] != []:  # no tools, and no documents, are what such a template says
                raise ValueError(f"the chat template of {self.directory} has no argument {name}")

    def variables(self, arguments) -> set:
        """Return the names that the chat template reads, and that a row or a flag may give."""
        with naming(f"the chat template of {self.directory} fails", Exception):
            template = self.tokenizer.get_chat_template(tools=arguments.get("tools"))
            return variables_of(template) - {"messages", "add_generation_prompt", "strftime_now"}

    def render(self, messages, arguments=None, *, add_generation_prompt=True) -> str:
        """Write a conversation as the checkpoint's chat template writes it.

        arguments: {name: value}. What the template gets besides, such as `tools`, as
            apply_chat_template takes them. They win over those of --template-args. Default: none.
        add_generation_prompt: end with the text that precedes an answer of the assistant.
        ValueError without a template, or with the template's own complaint.
        """
        # A template is a program, written by somebody else: any error may come out of it. That
        # jinja2 is not installed is not its fault.
        arguments = self.arguments | (arguments or {})
        how = dict(tokenize=False, add_generation_prompt=add_generation_prompt) | arguments
        messages = [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in self.parts else message
            for message in messages
        ]  # fmt: skip
        with naming(f"the chat template of {self.directory} fails", Exception):
            template = self.tokenizer.get_chat_template(tools=arguments.get("tools"))
            if "strftime_now" in template:
                # The macro replaces one code after another, so %% is a mark of its own until the
                # last.
                names = [f"%{sign}{letter}" for sign in ("-", "") for letter in DATE_LETTERS]
                codes = {name: self.date.strftime(name) for name in names}
                codes = {"%%": "\uffff"} | codes | {"\uffff": "%"}
                how |= dict(chat_template=DATE_MACRO + template, date_codes=codes)
            return self.tokenizer.apply_chat_template(messages, **how)

    def prompt(self, messages, arguments=None) -> list[int]:
        """Encode a conversation up to the place where the assistant answers.

        The template decides whether BOS is among the tokens: Gemma's writes it, Qwen has none.
        ValueError if the template leaves a message out. arguments: as in `render`.
        """
        tokens = self.encode(self.render(messages, arguments))
        self._require_said(messages, range(len(messages)), arguments)
        return tokens

    def next_turn(self, messages, end_token, arguments=None) -> list[int]:
        """Encode the text between a sampled answer and the answer to the next message.

        arguments: as in `render`.

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
        after = self._text_after(answered, -2, arguments, add_generation_prompt=True)
        self._require_said(answered, [len(answered) - 1], arguments)

        # The mark after the answer is encoded with the rest, since some marks absorb the spaces
        # that follow. The policy has sampled this mark, unless it ended its turn in another way.
        # Where the template writes no mark, the sampled mark keeps a tokenizer from taking what
        # follows for the beginning of a text, before which it might write a blank.
        added = self.tokenizer.added_tokens_decoder
        mark = added[end_token].content if end_token in added else ""
        tokens = self.encode(after if after.startswith(mark) else mark + after)
        return tokens[1:] if tokens[:1] == [end_token] else tokens

    # What a template does with messages can only be seen in what it writes: a word that no message
    # has is put into one of them, and looked for.

    def _require_said(self, messages, places, arguments=None):
        """Raise a ValueError if the template leaves out a part of one of messages[places]."""
        # A message may be short, and stand elsewhere in the prompt too, so it cannot be searched.
        # It gets marks at its ends that can. What is between, the template may trim and escape. Of
        # an answer it need write the end alone: many templates leave earlier thoughts out.
        word = unused("Mark", messages, arguments)
        marked = list(messages)
        for n in places:
            message = messages[n]
            begins = "" if message["role"] == "assistant" else f"{word} {n} begins "
            marked[n] = message | {"content": f"{begins}{message['content']} {word} {n} ends"}
        text = self.render(marked, arguments)
        for n in places:
            role, content = messages[n]["role"], messages[n]["content"]
            begins = role == "assistant" or f"{word} {n} begins" in text
            if content.strip() and not (begins and f"{word} {n} ends" in text):
                raise ValueError(f"expected the {role}'s message {content[:60]!r} in the prompt, "
                                 f"but the chat template of {self.directory} leaves it out, or a "
                                 f"part of it")  # fmt: skip

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

    def _text_after(self, messages, turn, arguments=None, *, add_generation_prompt) -> str:
        """Return what the template writes after the content of messages[turn], to the end."""
        # Plain words, which no template trims, splits or escapes.
        words = unused("here the answer stands", messages, arguments)
        messages = list(messages)
        messages[turn] = {"role": messages[turn]["role"], "content": words}
        text = self.render(messages, arguments, add_generation_prompt=add_generation_prompt)
        if text.count(words) != 1:
            raise ValueError(f"the chat template of {self.directory} writes an answer "
                             f"{text.count(words)} times, not once")  # fmt: skip
        return text.partition(words)[2]

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


def unused(words, *said) -> str:
    """Return words that nothing said has: the given ones, or a longer form of them."""
    while words in str(said):
        words += " again"
    return words


@functools.cache
def variables_of(template) -> set:
    """Return the names of the variables that a chat template reads and does not make itself."""
    import jinja2.meta  # transformers needs it for any template

    # {% generation %} is transformers' own mark, which says nothing of variables.
    plain = re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", template)
    tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    read = jinja2.meta.find_undeclared_variables(tree)

    # A name that is made on some paths only counts as read, such as `content` in Qwen3's. It can be
    # an argument if the template asks whether it is defined.
    made = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "store"}
    asked = {test.node.name for test in tree.find_all(jinja2.nodes.Test)
             if test.name == "defined" and isinstance(test.node, jinja2.nodes.Name)}  # fmt: skip
    return {name for name in read if name not in made or name in asked}


def text_of(config) -> Text:
    """Return the Text of --model, whose chat template gets what the settings say."""
    arguments = read_arguments(config.template_args)
    arguments.pop("system", None)  # a message, see `Jsonl`
    return Text(config.model, date=read_date(config.date), arguments=arguments)


@contextlib.contextmanager
def naming(where, errors=ValueError):
    """Turn an error of the body into a ValueError of one line, `where` first.

    errors: Exception means those of a library, which are named by their class too.
    """
    try:
        yield
    except ImportError:
        raise
    except errors as error:
        kind = f"{type(error).__name__}: " if errors is Exception else ""
        raise ValueError(f"{where}: {kind}{' '.join(f'{error}'.split())}") from error


def load_tokenizer(directory):
    """Load transformers' tokenizer of a checkpoint directory."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ImportError("text needs transformers: pip install transformers") from error

    # transformers would look a name up on the network, and make up a tokenizer of five tokens for a
    # directory that has none. It does not say which file is damaged, so JSON is read here first.
    if not (directory / "tokenizer.json").exists():
        raise ValueError(f"{directory} has no tokenizer.json")
    for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"):
        if (directory / name).exists():
            read_json(directory / name)

    # DEVIATES: from transformers' AutoTokenizer. Version 5 takes the vocabulary alone out of
    # tokenizer.json where it has a class for the model's family, and cuts text into words as this
    # class does. The class here takes the file as its authors wrote it.
    # Pinned by tests/full/test_text.py::test_a_tokenizer_is_the_one_of_its_file.
    with naming(f"{directory / 'tokenizer.json'} cannot be read", Exception):
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)

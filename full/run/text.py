"""Encode text for a policy: a checkpoint's tokenizer, its chat template, and the ends of turns.

The trainer knows token ids and no text. transformers encodes, decodes and applies the chat
template: `pip install transformers`. This file adds two things, because a policy is trained on
exactly the tokens that it sampled:

- The next turn of a conversation. BPE is not a bijection: the sampled tokens 1, 2 may decode to 12,
  which encodes as one token. So a row is never rendered again. Only the text after the sampled
  answer is encoded, and appended to the row (`Text.next_turn`).
- The end of a turn. A policy stops at the mark that the template writes after an answer, such as
  <|im_end|>. No file names this mark, so it is found by rendering (`Text._find_ends`).
"""

import contextlib
import functools
import json
import re
from pathlib import Path

from full.model.config import ModelConfig, read_json
from full.run.config import read_arguments, read_date

# A chat template's `strftime_now`. transformers would use the present, and accepts no function of
# ours, so a macro of the same name is put before the template. The line break after the macro is
# trimmed, so the template still begins at the beginning of a line.
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
    A damaged file is a ValueError of one line, and so is a directory without an end of a turn.

    config: ModelConfig. The model's shape, from config.json.
    vocab_size: int. The model's number of ids. The tokenizer has fewer if the model's rows are
        rounded up (Qwen), and one more if only the tokenizer has a token for images (Gemma 3 1B).
    tokenizer: transformers' tokenizer.
    template: the chat template, as transformers read it. None where the directory has none.
    begin: list of int. The ids that raw text begins with, such as BOS. Usually empty.
    end: tuple of int. The ids that end a turn. The mark that the template writes after an answer is
        first, then the ids of generation_config.json, then the ids of config.json.
    roles_as_parts: set of str. The roles whose content the template wants as a list of parts.
    settings_in_words: str. The template's arguments besides messages. "" without any.
    """

    def __init__(self, directory, *, date=None, arguments=None):
        """Read a directory.

        date: datetime. For `strftime_now` in the template. Default: now.
        arguments: {name: value} of --template-args. Default: none.
        """
        self.directory = Path(directory)
        self.date = date or read_date("")
        self.arguments = arguments or {}
        self.tokenizer = load_tokenizer(self.directory)
        self.config = ModelConfig.from_hf(self.directory)
        self.vocab_size = self.config.vocab_size
        self.template = self.tokenizer.chat_template
        # Find the marks, such as BOS, that the tokenizer writes before any text. It may also write
        # marks after a text. A prompt gets none of these, which would end an answer at its start.
        bare, whole = self.encode("a"), self.tokenizer.encode("a")
        places = [n for n in range(len(whole)) if whole[n : n + len(bare)] == bare]
        self.begin = whole[: places[0]] if places else []

        # Find the rest by rendering conversations.
        if self.template is not None and self.arguments:
            with naming("--template-args"):
                self.require_read(self.arguments)
        self.roles_as_parts = set()
        self._find_roles_as_parts()
        self.end = self._find_ends()

    @property
    def settings_in_words(self) -> str:
        settings = [f"{name} = {json.dumps(value)}" for name, value in self.arguments.items()]
        if "strftime_now" in f"{self.template}":
            settings.append(f"the date {self.date:%Y-%m-%d}")
        text = f"the chat template of {self.directory} gets {', '.join(settings)}"
        return text if settings else ""

    def contents(self) -> dict:
        """Return {name: JSON value} of the data that tokens depend on: see `Task.contents`."""
        # Compare contents, not layout. Calls leave padding settings in the tokenizer, on which no
        # prompt depends.
        tokenizer = json.loads(self.tokenizer.backend_tokenizer.to_str())
        tokenizer |= dict(truncation=None, padding=None, marks=self.tokenizer.special_tokens_map)
        return {"chat template": self.template, "tokenizer": tokenizer,
                "list of end ids": self.end}  # fmt: skip

    def require_same_tokens(self, directory):
        """Raise ValueError if an id means another token in a directory's tokenizer, if it has one.

        Added tokens, such as marks of a template, may differ within a family.
        """
        if not (Path(directory) / "tokenizer.json").exists():
            return
        vocabularies = (x.backend_tokenizer.get_vocab(with_added_tokens=False)
                        for x in (self.tokenizer, load_tokenizer(Path(directory))))  # fmt: skip
        own, other = ({n: token for token, n in x.items()} for x in vocabularies)
        wrong = [n for n in sorted(own.keys() & other.keys()) if own[n] != other[n]]
        if wrong:
            raise ValueError(f"expected a tokenizer with the tokens of {self.directory} in "
                             f"{directory}, got {other[wrong[0]]!r} in place of {own[wrong[0]]!r} "
                             f"as token {wrong[0]}")  # fmt: skip

    def encode(self, text, *, bos=False) -> list[int]:
        """Encode a text as it is: marks in it become their ids, and nothing is added.

        bos: begin with `begin`, unless the text begins with it already.
        """
        # A pipe or the command line may contain bytes that are not UTF-8. Python turns them into
        # lone surrogates, for which the tokenizer has no clear error. This line has one.
        text.encode("utf-8")

        # "special tokens" are the tokens that the tokenizer would put around the text. Marks inside
        # the text are recognized in either case.
        tokens = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if bos and tokens[: len(self.begin)] != self.begin:
            tokens = [*self.begin, *tokens]
        return tokens

    def decode(self, tokens, *, special=False) -> str:
        """Decode tokens to text. special: keep the marks, such as <|im_end|>."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=not special,
                                     clean_up_tokenization_spaces=False)  # fmt: skip

    def require_read(self, arguments):
        """Raise ValueError if the chat template does not read one of these arguments."""
        for name in sorted(arguments.keys() - self.variables(arguments)):
            if arguments[name] != []:  # an empty list of tools or documents needs no support
                raise ValueError(f"the chat template of {self.directory} has no argument {name}")

    def variables(self, arguments) -> set:
        """Return the names that the chat template reads, and that a row or a flag may set."""
        with naming(f"the chat template of {self.directory} fails", Exception):
            template = self.tokenizer.get_chat_template(tools=arguments.get("tools"))
            return variables_of(template) - {"messages", "add_generation_prompt", "strftime_now"}

    def render(self, messages, arguments=None, *, add_generation_prompt=True) -> str:
        """Render a conversation with the checkpoint's chat template.

        arguments: {name: value}. Further arguments of the template, such as `tools`. They win over
            those of --template-args. Default: none.
        add_generation_prompt: end with the text that precedes an answer of the assistant.
        ValueError without a template, or with the template's own error.
        """
        # A template is somebody else's program and may raise any error. `naming` lets an
        # ImportError pass: a missing jinja2 is not the template's fault.
        arguments = self.arguments | (arguments or {})
        options = dict(tokenize=False, add_generation_prompt=add_generation_prompt) | arguments
        messages = [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in self.roles_as_parts else message
            for message in messages
        ]  # fmt: skip
        with naming(f"the chat template of {self.directory} fails", Exception):
            template = self.tokenizer.get_chat_template(tools=arguments.get("tools"))
            if "strftime_now" in template:
                # The macro replaces one code after another, so %% becomes a mark first, and the
                # mark becomes % last.
                names = [f"%{sign}{letter}" for sign in ("-", "") for letter in DATE_LETTERS]
                codes = {name: self.date.strftime(name) for name in names}
                codes = {"%%": "\uffff"} | codes | {"\uffff": "%"}
                options |= dict(chat_template=DATE_MACRO + template, date_codes=codes)
            return self.tokenizer.apply_chat_template(messages, **options)

    def prompt(self, messages, arguments=None) -> list[int]:
        """Encode a conversation up to the assistant's answer. arguments: as in `render`.

        The template writes BOS or not: Gemma's does, Qwen has none. ValueError if the template
        leaves a message out.
        """
        tokens = self.encode(self.render(messages, arguments))
        self._require_rendered(messages, range(len(messages)), arguments)
        return tokens

    def next_turn(self, messages, end_token, arguments=None) -> list[int]:
        """Encode the text between a sampled answer and the answer to the next message.

        messages[-2] is an answer of the policy. Its tokens are in a row already, end_token last.
        messages[-1] is the next message. arguments: as in `render`. The result is appended to the
        row:

            row so far   .. <|im_start|>assistant, line break, 12. <|im_end|>
            next_turn    line break, <|im_start|>user, line break, And 7? <|im_end|>,
                         line break, <|im_start|>assistant, line break

        No sampled token is decoded and encoded again. So a row differs from the rendering of the
        whole conversation if a template rewrites history. Qwen3's template leaves out the thoughts
        of earlier turns, and Gemma's trims the spaces around an answer. A row keeps both.
        """
        answered = [*messages[:-2], messages[-2] | {"content": "An answer"}, messages[-1]]
        after = self._text_after(answered, -2, arguments, add_generation_prompt=True)
        self._require_rendered(answered, [len(answered) - 1], arguments)

        # The mark after the answer is encoded with the text, since some marks absorb the spaces
        # that follow. It is dropped again if it is the end that the policy sampled. If the template
        # writes no mark, the sampled one is put before the text, so that a tokenizer does not write
        # a blank as at the beginning of a text.
        added = self.tokenizer.added_tokens_decoder
        mark = added[end_token].content if end_token in added else ""
        tokens = self.encode(after if after.startswith(mark) else mark + after)
        return tokens[1:] if tokens[:1] == [end_token] else tokens

    # The output alone shows what a template does with a message. So a word that no message contains
    # is put into one of them, and searched for in the output.

    def _require_rendered(self, messages, places, arguments=None):
        """Raise a ValueError if the template leaves out a part of one of messages[places]."""
        # Mark both ends of each message: a short message could occur elsewhere in the prompt, but
        # the marks cannot. Between them the template may trim and escape. Of an answer only the end
        # must be there: many templates leave earlier thoughts out.
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

    def _find_roles_as_parts(self):
        """Find the roles whose content the template wants as parts, [{"type": "text", ..}]."""
        # Such a template writes nothing of a string, whose letters have no type. So each role has a
        # word as a string, and as a part if the string is lost.
        word, question = "something", {"role": "user", "content": "2 + 2?"}

        def is_written(conversation):
            with contextlib.suppress(ValueError):
                text = self.render(conversation, add_generation_prompt=False)
                # A list that is printed as a list was not read as parts.
                return word in text and not re.search(rf"text['\"]: *['\"]{word}", text)
            return False

        for role in ("user", "system", "assistant"):
            message = {"role": role, "content": word}
            conversations = {"user": [message], "system": [message, question],
                             "assistant": [question, message]}  # fmt: skip
            if not is_written(conversations[role]):
                self.roles_as_parts.add(role)
                if not is_written(conversations[role]):
                    self.roles_as_parts.remove(role)

    def _text_after(self, messages, turn, arguments=None, *, add_generation_prompt) -> str:
        """Return the text that the template writes after the content of messages[turn]."""
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
        # The text that the template writes after an answer begins with a mark if its first token is
        # an added token. Gemma has added tokens for line breaks too. A template that does not
        # accept this conversation gives no mark, and `render` will raise its error.
        ends = []
        conversation = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant"}]
        with contextlib.suppress(ValueError):
            after = self.encode(self._text_after(conversation, -1, add_generation_prompt=False))
            added = self.tokenizer.added_tokens_decoder
            ends += [x for x in after[:1] if x in added and not added[x].content.isspace()]

        # A chat model's config.json often has only one end, of a turn or of a document.
        # generation_config.json has both.
        path = self.directory / "generation_config.json"
        generation = (read_json(path) if path.exists() else {}).get("eos_token_id") or []
        generation = generation if isinstance(generation, list) else [generation]
        config = list(self.config.eos_token_id)
        for file, ids in ((path, generation), (self.directory / "config.json", config)):
            if not all(type(token) is int and 0 <= token < self.vocab_size for token in ids):
                raise ValueError(f"{file}: eos_token_id: expected ids under {self.vocab_size}, got "
                                 f"{ids}")  # fmt: skip
        ends += generation + config
        if not ends:
            raise ValueError(f"{self.directory}: nothing ends a turn: no eos_token_id, and no chat "
                             f"template that writes a mark after an answer")  # fmt: skip
        return tuple(dict.fromkeys(ends))


def unused(words, *texts) -> str:
    """Return words that no text contains: the given words, or a longer form of them."""
    while words in str(texts):
        words += " again"
    return words


@functools.cache
def variables_of(template) -> set:
    """Return the names of the variables that a chat template reads but does not set."""
    import jinja2.meta  # transformers needs it for any template

    # {% generation %} is transformers' own tag, and jinja2 does not know it.
    plain = re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", template)
    tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    read = jinja2.meta.find_undeclared_variables(tree)

    # A name that is set on some paths only counts as read, such as `content` in Qwen3's. It can be
    # an argument if the template tests whether it is defined.
    stored = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "store"}
    tested = {test.node.name for test in tree.find_all(jinja2.nodes.Test)
              if test.name == "defined" and isinstance(test.node, jinja2.nodes.Name)}  # fmt: skip
    return {name for name in read if name not in stored or name in tested}


def text_of(config) -> Text:
    """Return the Text of --model, with the settings' date and template arguments."""
    arguments = read_arguments(config.template_args)
    arguments.pop("system", None)  # a message, see `Jsonl`
    return Text(config.model, date=read_date(config.date), arguments=arguments)


@contextlib.contextmanager
def naming(where, errors=ValueError):
    """Turn an error of the body into a ValueError of one line that begins with `where`.

    errors: which errors. Exception is for a library's errors, and adds the name of their class.
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

    # transformers would look a name up on the network, and invent a tokenizer of five tokens for a
    # directory without one. It does not name a damaged file, so JSON is read here first.
    if not (directory / "tokenizer.json").exists():
        raise ValueError(f"{directory} has no tokenizer.json")
    for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"):
        if (directory / name).exists():
            read_json(directory / name)

    # DEVIATES: from transformers' AutoTokenizer. If version 5 has a class for the model's family,
    # it reads only the vocabulary of tokenizer.json, and that class cuts text into words. The class
    # below reads the whole file as its authors wrote it.
    # Pinned by tests/full/test_text.py::test_a_tokenizer_is_the_one_of_its_file.
    with naming(f"{directory / 'tokenizer.json'} cannot be read", Exception):
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)

"""Define what a task must have, and import a task or a reward from a user's file.

A task of your own is a class in a file: `--task FILE.py:Class`.
"""

import datetime
import importlib.machinery
import importlib.util
import json
import sys
import traceback
import zlib
from pathlib import Path

# Values of --task that name no file: `make_task` of questions.py makes them.
TASKS = "guess", "jsonl"


class Task:
    """The methods of a task. The rewards of a rollout's turns add up, and 1 or more is solved.

    A task need not derive from this class. With the attribute `threads = False` one thread asks for
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
        """Hear a turn, its end token last: return (new state, reply tokens, reward).

        The state is a plain value, so rollouts can share it. A reply of None ends the rollout. A
        turn that max_new_tokens has cut off is never heard.
        """
        raise NotImplementedError

    def where(self, state) -> str:
        """Return the place that a state comes from, such as a file's line, for errors, or ""."""
        return ""

    def contents(self) -> dict:
        """Return {what: JSON value} that prompts and rewards are made of, other than code.

        A run that goes on with another value is refused by the name of what it is.
        """
        return {}

    def show(self, tokens: list[int]) -> str:
        """Return tokens as a person reads them, for samples.jsonl and errors."""
        return " ".join(map(str, tokens))


def is_held_out(data: bytes) -> bool:
    """Return whether a prompt is kept for evaluation: one in ten, by its hash."""
    return zlib.crc32(data) % 10 == 0


def require_code(flag, spec, expected):
    """Raise ValueError unless spec is FILE.py:NAME of a file that is there. expected: in words."""
    file = spec.rpartition(":")[0]
    if not file.endswith(".py"):
        raise ValueError(f"expected {flag} {expected}, got {spec!r}")
    if not Path(file).is_file():
        raise ValueError(f"{flag} {spec}: {file}: no such file")


class FileLoader(importlib.machinery.SourceFileLoader):
    """Loads a file that the user has named. `place_in_users_file` knows the file by this class."""


def from_file(spec, kind):
    """Import FILE.py of FILE.py:NAME; return its NAME. kind: class or function."""
    file, _, name = spec.rpartition(":")
    path = Path(file).absolute()
    # The file may import files of its folder. A worker of a process pool imports the file itself by
    # its name, for which it gets this sys.path. The folder is last there and hides nothing: if the
    # name finds another module, the file gets a name that no worker can import.
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
    """Return the line of a user's file that an error came out of, as "FILE, line 8, in reply".

    It is the innermost such line, of the error or of what caused it. "" if there is none.
    """
    place = ""
    while error is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            if isinstance(getattr(frame.f_globals.get("__spec__"), "loader", None), FileLoader):
                code = frame.f_code
                place = f"{code.co_filename}, line {line}, in {code.co_qualname}"
        error = error.__cause__
    return place


def read_arguments(text) -> dict:
    """Return the arguments of --template-args; ValueError unless they are a JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"expected --template-args to be a JSON object, such as "
                         f"{{\"enable_thinking\": false}}, got {text!r}")  # fmt: skip
    return found


def read_date(text) -> datetime.datetime:
    """Return the date and time of --date, or of this moment if it is empty. ValueError for others.

    A date without a time is midnight's.
    """
    try:
        return datetime.datetime.fromisoformat(text) if text else datetime.datetime.now()
    except ValueError as error:
        raise ValueError(f"expected --date YYYY-MM-DD or YYYY-MM-DDTHH:MM:SS, got "
                         f"{text!r}") from error

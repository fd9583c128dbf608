"""Say what a task must have, and import a task or a reward from a user's file.

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
    """Loads a file that the user has named. The next file of the same name takes its place."""


def importable_name(path) -> str:
    """Put a file's folder on sys.path. Return the name by which other processes import the file.

    A worker of a process pool gets a function by the names of its module and of itself, and it gets
    this sys.path. So a function of the file reaches every worker, as in `python FILE.py`.
    """
    # This project stays before it, so that a neighbor called models.py hides no file of it.
    root, folder = Path(__file__).resolve().parents[2], f"{path.parent}"
    if path.parent.resolve() != root:
        sys.path[:] = [other for other in sys.path if other != folder]
        at = [n for n, other in enumerate(sys.path) if Path(other).resolve() == root]
        sys.path.insert(at[0] + 1 if at else 0, folder)
    importlib.invalidate_caches()

    # A file called like another module must hide nothing. It gets another name, which no worker
    # can import.
    found = importlib.machinery.PathFinder.find_spec(path.stem)
    held = getattr(sys.modules.get(path.stem), "__spec__", None)
    is_free = path.stem not in sys.modules or isinstance(getattr(held, "loader", None), FileLoader)
    is_free = is_free and path.stem not in sys.stdlib_module_names
    is_own = found is not None and found.origin == f"{path}"
    return path.stem if is_free and is_own else f"task_{path.stem}"


def from_file(spec, kind):
    """Import FILE.py of FILE.py:NAME; return its NAME. kind: class or function."""
    file, _, name = spec.rpartition(":")
    path = Path(file).absolute()
    called = importable_name(path)
    loader = FileLoader(called, f"{path}")
    found = importlib.util.spec_from_file_location(called, path, loader=loader)
    module = sys.modules[called] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
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

"""How a command prints and ends: adds error lines and exit codes to `train_grpo.main`.

An error that a user can mend is one line, which the rank that found it prints.
"""

import contextlib
import os
import sys
import traceback

import torch.distributed as dist

from full.ranks.joining import ERRORS, is_one_of_several
from full.run.tasks import place_in_users_file


@contextlib.contextmanager
def replacing_characters():
    """Print ? for a character that standard output cannot encode, while the context lasts.

    A text of a model may hold any character, and no print of it may end a run that has trained.
    Standard error of Python does so by itself. A notebook's output takes every character.
    """
    stream = sys.stdout
    before = getattr(stream, "errors", None)

    def reconfigure(errors):
        # A stream may be closed by now, its reader may have gone, or another file took its place.
        with contextlib.suppress(OSError, ValueError):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors=errors)

    reconfigure("replace")
    try:
        yield
    finally:
        reconfigure(before)


def quietly(command, argv) -> int:
    """Return the exit code of a command whose output may go to `| head`."""
    try:
        code = command(argv)
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        # The reader of our output has seen enough. What is still buffered would fail once more as
        # Python ends, so it goes nowhere. 141 is what a shell gives for such an end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def report(error) -> int:
    """Name an error in one line on stderr, after the traceback of one that no flag can mend.

    Returns 2.
    """
    # An error that all ranks raised is named by the rank that found it, any other by each rank.
    finder = finder_of(error)
    if finder is None or finder == dist.get_rank():
        said = " ".join(f"{error}".splitlines())
        # A note says in which rollout a task has failed.
        places = *getattr(error, "__notes__", ()), place_in_users_file(error)
        if any(places):
            said += f" ({'; '.join(filter(None, places))})"
        if not isinstance(error, ERRORS):
            said = f"{type(error).__name__}: {said}"
        if not isinstance(error, (*ERRORS, SystemExit)):
            traceback.print_exception(error)
        # One write, so that the lines of two ranks do not run into each other.
        who = f"rank {os.environ['RANK']}: " if os.environ.get("RANK") else ""
        sys.stderr.write(f"{who}error: {said}\n")
        sys.stderr.flush()

    # COMM: torchrun ends all ranks when one ends. So the ranks that share an error leave together,
    # after the finder has named it: all of them come here. A rank that is lost meanwhile is no
    # other error. Pinned by tests/full/test_commands.py::test_an_error_of_all_ranks_is_named_once.
    if finder is not None:
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    return leave(2)  # a clean teardown would wait for ranks that may be gone or stuck


def finder_of(error):
    """Return which rank found an error that all ranks raised, see `errors_on_all_ranks`, or None.

    All ranks raised it too if it was raised in the place of such an error.
    """
    while error is not None and not hasattr(error, "finder"):
        error = error.__cause__
    return None if error is None else error.finder


def leave(code, at_once=False) -> int:
    """Return the exit code. Of several ranks, or at_once, exit here: gloo may abort at an end."""
    if at_once or is_one_of_several():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code

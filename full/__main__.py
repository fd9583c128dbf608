"""Run a command of the full edition, from the repository's root.

    torchrun --nproc-per-node 2 -m full --plan t2             # train; --help has every flag
    python -m full plot runs/guess-0 [runs/guess-1 ..]        # reward curves, PNG
    python -m full audit runs/guess-0 [--step N]              # a step from its definition
    python -m full eval | export runs/guess-0 ..              # pass@k; Hugging Face
    python -m full check [parallel | grpo]                    # against definitions, float64
"""

import contextlib
import os
import signal
import sys
import traceback

import torch.distributed as dist

from full import check, evaluate
from full.audit import audit
from full.ranks.joining import (
    USER_ERRORS, Progress, connect, errors_on_all_ranks, is_one_of_several, naming_lost_ranks,
)  # fmt: skip
from full.run.config import Config
from full.run.flags import parse_config
from full.run.logs import plot, replacing_characters
from full.run.run import start_run
from full.run.tasks import place_in_users_file, require_task

# Commands other than training; each is one process.
COMMANDS = {
    "audit": audit.main, "check": check.main, "eval": evaluate.evaluation,
    "export": evaluate.export, "plot": plot,
}  # fmt: skip


def connected(argv):
    """Connect the ranks of a run, and return its checked settings."""
    # Ranks with wrong settings connect too, so that one of them prints the error for all.
    config, own_error = Config(device="cpu"), None
    try:
        config = parse_config(argv).check()
        require_task(config)
    except USER_ERRORS as error:
        if not is_one_of_several():
            raise
        own_error = error
    connect(config.device, timeout=config.timeout, threads=config.threads)
    with errors_on_all_ranks():
        if own_error is not None:
            raise own_error
    return config


def quietly(command, argv) -> int:
    """Return the exit code of a command whose output may go to `| head`."""
    try:
        code = command(argv)
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        # The reader has closed the pipe. Buffered output would fail again as Python ends, so it is
        # discarded. A shell returns 141 in this case.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def report(error) -> int:
    """Print an error once if all ranks have it, else on each rank. Leave with exit code 2."""
    finder = finder_of(error)
    if finder is None or finder == dist.get_rank():
        name_error(error)
    if finder is not None:
        leave_together()
    return leave(2)  # a clean teardown would wait for ranks that may be gone or stuck


def finder_of(error):
    """Return the rank that found an error which all ranks raise, or None for any other error."""
    # An error that was raised in place of such an error has the same finder, see
    # `errors_on_all_ranks`.
    while error is not None and not hasattr(error, "finder"):
        error = error.__cause__
    return getattr(error, "finder", None)


def name_error(error):
    """Print an error on stderr in one line, after its traceback unless the user can fix it."""
    text = " ".join(f"{error}".splitlines())
    # A note names the rollout in which a task failed.
    places = *getattr(error, "__notes__", ()), place_in_users_file(error)
    if any(places):
        text += f" ({'; '.join(filter(None, places))})"
    if not isinstance(error, USER_ERRORS):
        text = f"{type(error).__name__}: {text}"
    if not isinstance(error, (*USER_ERRORS, SystemExit)):
        traceback.print_exception(error)
    # One write, so that the lines of two ranks are not mixed.
    rank = f"rank {os.environ['RANK']}: " if os.environ.get("RANK") else ""
    sys.stderr.write(f"{rank}error: {text}\n")
    sys.stderr.flush()


def leave_together():
    """Wait until the finder of an error has printed it."""
    # COMM: torchrun ends all ranks when one ends. So ranks that share an error wait here for the
    # finder. It does not matter if another rank is lost meanwhile. Pinned by
    # tests/full/test_commands.py::test_an_error_of_all_ranks_is_named_once.
    with contextlib.suppress(RuntimeError):
        dist.barrier()


def leave(code, at_once=False) -> int:
    """Return the exit code. With several ranks, or at_once, exit: gloo may abort a normal end."""
    if at_once or is_one_of_several():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


@replacing_characters()
def main(argv) -> int:
    """Run what the command line says and return the exit code.

    0: done. 1: an audit disagrees with the run, or a check with its definition. 2: an error, which
    is on stderr. 130, 143: the run was saved after Ctrl-C or SIGTERM.
    """
    try:
        if argv and argv[0] in COMMANDS:
            return quietly(COMMANDS[argv[0]], argv[1:])
        progress = Progress()
        with naming_lost_ranks(progress):
            number = start_run(connected(argv), progress).signal
            code = 128 + number if number else 0
    except (Exception, SystemExit) as error:
        # sys.exit(0) of a task or a reward is an error, and sys.exit of argparse is not.
        if isinstance(error, SystemExit) and not place_in_users_file(error):
            raise
        return report(error)
    except KeyboardInterrupt:  # before the first step; after it `Stop` handles Ctrl-C
        print("interrupted, with nothing to save", file=sys.stderr, flush=True)
        return leave(128 + signal.SIGINT)
    # Several ranks leave without destroying their group. A thread may still wait for a task.
    if dist.get_world_size() == 1 and not code:
        dist.destroy_process_group()
    return leave(code)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # After an error there may be a group, and a thread that waits for a task without end.
    sys.exit(leave(code, at_once=code != 0 or dist.is_initialized()))

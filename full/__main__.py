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
    ERRORS, Progress, connect, errors_on_all_ranks, is_one_of_several, naming_lost_ranks,
)  # fmt: skip
from full.run.config import Config
from full.run.flags import parse_config
from full.run.logs import plot, replacing_characters
from full.run.run import start_run
from full.run.tasks import place_in_users_file, require_task

# Commands read a run, or measure. They are one process, and none of them trains.
COMMANDS = {
    "audit": audit.main, "check": check.main, "eval": evaluate.evaluation,
    "export": evaluate.export, "plot": plot,
}  # fmt: skip


def connected(argv):
    """Return the checked settings of a run, for which the ranks have met."""
    # Ranks whose settings are wrong meet too, so that one of them says so for all.
    config, problem = Config(device="cpu"), None
    try:
        config = parse_config(argv).check()
        require_task(config)
    except ERRORS as error:
        if not is_one_of_several():
            raise
        problem = error
    connect(config.device, timeout=config.timeout, threads=config.threads)
    with errors_on_all_ranks():
        if problem is not None:
            raise problem
    return config


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
    # An error that all ranks raised is named by the rank that found it, see `errors_on_all_ranks`,
    # and so is an error raised in its place. Any other error is named by each rank.
    cause = error
    while cause is not None and not hasattr(cause, "finder"):
        cause = cause.__cause__
    finder = getattr(cause, "finder", None)
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


def leave(code, at_once=False) -> int:
    """Return the exit code. Of several ranks, or at_once, exit here: gloo may abort at an end."""
    if at_once or is_one_of_several():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


@replacing_characters()
def main(argv) -> int:
    """Run what the command line says and return the exit code.

    0: done. 1: an audit disagrees with the run, or a check with its definition. 2: an error, named
    on stderr. 130, 143: the run was saved after Ctrl-C or SIGTERM.
    """
    try:
        if argv and argv[0] in COMMANDS:
            return quietly(COMMANDS[argv[0]], argv[1:])
        progress = Progress()
        with naming_lost_ranks(progress):
            number = start_run(connected(argv), progress).signal
            code = 128 + number if number else 0
    except (Exception, SystemExit) as error:
        # sys.exit(0) in a task or a reward has not done the run. argparse ends a command by it.
        if isinstance(error, SystemExit) and not place_in_users_file(error):
            raise
        return report(error)
    except KeyboardInterrupt:  # a Ctrl-C before the first step; from there on Stop has it
        print("interrupted, with nothing to save", file=sys.stderr, flush=True)
        return leave(128 + signal.SIGINT)
    # Of several ranks each leaves its group as it is. A thread may still wait for a task, and it is
    # left alone.
    if dist.get_world_size() == 1 and not code:
        dist.destroy_process_group()
    return leave(code)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # After an error a group is left, and a thread that waits for a task for ever.
    sys.exit(leave(code, at_once=code != 0 or dist.is_initialized()))

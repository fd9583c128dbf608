"""Connect ranks, and let them agree and leave together, through restarts, lost ranks and signals.

Read this file if you write a training loop, or if a run does not start.
"""

import contextlib
import datetime
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

import parallel

# What is wrong with flags, files, packages or numbers: a user can mend it, and reads one line.
ERRORS = ValueError, ImportError, OSError, FloatingPointError


def all_gather_objects(item, group=None) -> list:
    """Return the items of all ranks of a group, in rank order. They are pickled. Collective."""
    items = [None] * dist.get_world_size(group)
    # COMM: an all-gather of pickled objects. The callers say what they gather, and why.
    # Pinned by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    dist.all_gather_object(items, item, group=group)
    return items


def wait_for_all(device="cpu") -> None:
    """Return when all ranks of the default group are here."""
    # COMM: an all-reduce. A rank that refuses its settings next leaves at once. It must not close
    # the connections, or rank 0 the store, with which another rank still joins a group.
    # Pinned by tests/full/test_faults.py::test_no_rank_leaves_while_another_joins.
    dist.all_reduce(torch.zeros((), device=device))


def connect(device="", *, timeout=60, threads=1) -> str:
    """Join torchrun's process group, or make a group of one rank. Return this rank's device.

    device: "cpu", "cuda" or "". The empty string takes CUDA if there is a GPU.
    timeout: seconds that a collective waits for another rank before it fails.
    threads: int. CPU threads of this rank.
    """
    torch.set_num_threads(threads)
    device = own_device(device)
    if dist.is_initialized():
        text = f"torch.distributed is on and is used as it is: timeout={timeout} has no effect"
        warnings.warn(text, stacklevel=2)
        return f"cuda:{torch.cuda.current_device()}" if "nccl" in dist.get_backend() else "cpu"

    patience = datetime.timedelta(seconds=timeout)
    where = dict(store=dist.HashStore(), rank=0, world_size=1)
    # A launcher that sets only a part of its variables would start processes that each run alone.
    if os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or is_one_of_several():
        store, rank, world = meet(patience)
        store = store_of_this_attempt(store, rank, world, timeout)
        where = dict(store=store, rank=rank, world_size=world)
    # gloo in addition to NCCL, because Python objects and checkpoints travel as CPU tensors.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, **where, timeout=patience)
    wait_for_all()
    return device


def is_rank_0() -> bool:
    """Return whether torchrun has told this process that it is rank 0, or nothing."""
    return os.environ.get("RANK") in (None, "", "0")


def is_one_of_several() -> bool:
    """Return whether torchrun has told this process that there are other ranks."""
    return os.environ.get("WORLD_SIZE") not in (None, "", "1")


def meet(patience):
    """Return the store in which the ranks meet, this rank, and how many ranks there are."""
    try:
        return next(dist.rendezvous("env://", timeout=patience))
    except dist.DistNetworkError as error:
        if not is_rank_0():  # it waits for rank 0, see `naming_lost_ranks`
            raise
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(f"expected a free port at {place}, where the ranks meet, got: "
                              f"{str(error).splitlines()[0][:160]}; set another MASTER_PORT"
                              ) from error  # fmt: skip


@contextlib.contextmanager
def joined(device="", *, timeout=60, threads=1):
    """Be connected for the time of the body: `connect`, then leave the process as it was."""
    threads_before = torch.get_num_threads()
    was_on = dist.is_initialized()
    try:
        yield connect(device, timeout=timeout, threads=threads)
    finally:
        torch.set_num_threads(threads_before)
        if dist.is_initialized() and not was_on:
            dist.destroy_process_group()


def own_device(device) -> str:
    """Choose the device of this process: "cpu", or the GPU that torchrun's LOCAL_RANK says."""
    has_cuda = torch.cuda.is_available()
    if device not in ("cpu", "cuda", "") or (device == "cuda" and not has_cuda):
        raise ValueError(f'expected "cpu", "cuda" where there is a GPU, or "", got {device!r}; '
                         f"torch.cuda.is_available() is {has_cuda}")  # fmt: skip
    if device == "cpu" or not has_cuda:
        return "cpu"
    device = f"cuda:{os.environ.get('LOCAL_RANK') or '0'}"  # one process drives one device
    torch.cuda.set_device(device)
    return device


def store_of_this_attempt(store, rank, world, timeout):
    """Return the part of torchrun's key-value store that belongs to this start of the ranks.

    `torchrun --max-restarts` gives restarted ranks the old store, where gloo would find the
    addresses of dead processes. TORCHELASTIC_RESTART_COUNT cannot tell the starts apart, because
    each machine's torchrun counts its own. So rank 0 draws a new name, and each rank answers it:

        rank 0   attempt = a7f3          reads a7f3/1 = 52        a7f3/go = {"1": "52"}
        rank 1   reads attempt = a7f3    a7f3/1 = 52              reads go, finds its 52

    A rank that read an old name gets no `go`, or one without its number, and reads the name again.
    """
    # COMM: rank 0 waits for the number of every other rank, and they wait for the `go` of rank 0.
    # Each has sent before it waits, and `timeout` bounds both waits.
    # Pinned by tests/full/test_faults.py::test_a_killed_rank_is_started_again_and_the_run_goes_on.
    if rank == 0:
        attempt = uuid.uuid4().hex
        store.set("attempt", attempt)
        numbers = {str(r): store.get(f"{attempt}/{r}").decode() for r in range(1, world)}
        store.set(f"{attempt}/go", json.dumps(numbers))
        return dist.PrefixStore(attempt, store)

    own_number = uuid.uuid4().hex
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        attempt = store.get("attempt").decode()
        store.set(f"{attempt}/{rank}", own_number)
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{attempt}/go"], datetime.timedelta(seconds=1))
            if json.loads(store.get(f"{attempt}/go")).get(str(rank)) == own_number:
                return dist.PrefixStore(attempt, store)
            time.sleep(0.1)
    raise dist.DistStoreError(f"rank 0 did not answer within {timeout} seconds")


@contextlib.contextmanager
def errors_on_all_ranks(group=None, *, alone=False):
    """Raise the error of the first rank whose body has one on all ranks. Collective.

    The body sends no messages: a rank that raised in the middle would leave the others waiting.

    group: of the ranks that call it. Default: all ranks.
    alone: bool. This rank calls it by itself, and no message is sent.

    The rank that found the error raises it as it is, and the others a copy. An error that is not
    about flags, files or numbers is a RuntimeError on the others. If all ranks raise it,
    `error.finder` is the rank that found it, so that `report` of __main__.py names it once.
    """
    if alone or not dist.is_initialized() or dist.get_world_size(group) == 1:
        yield
        return
    problem = None
    try:
        yield
    except (Exception, SystemExit) as error:  # a task may exit
        problem = error

    # A class of a task's own may not be pickled, or made again, but its name and text can.
    copied = problem
    is_ours = type(problem).__module__.partition(".")[0] in ("builtins", "full")
    if problem is not None and not (isinstance(problem, ERRORS) and is_ours):
        text = f"rank {dist.get_rank()} ended with {type(problem).__name__}: {problem}"
        copied = RuntimeError(text)
    # COMM: an all-gather of an error or None. Each rank comes here once, whatever it met before.
    # Pinned by tests/full/test_checkpoints.py::test_what_one_rank_finds_all_ranks_raise.
    found = all_gather_objects(copied, group)
    first = next((n for n, error in enumerate(found) if error is not None), None)
    if first is None:
        return
    finder = first if group is None else dist.get_global_rank(group, first)
    raised = problem if finder == dist.get_rank() else found[first]
    if len(found) == dist.get_world_size():
        raised.finder = finder
    raise raised


def on_all_ranks(function, group=None, *, alone=False) -> list:
    """Return what function() returns on all ranks, in rank order, or raise the first one's error.

    group, alone: as in `errors_on_all_ranks`. Collective.
    """
    with errors_on_all_ranks(group, alone=alone):
        value = function()
    return [value] if alone else all_gather_objects(value, group)


def agree(function, group=None):
    """Call function() on rank 0. Return its value on every rank, or raise its error on every rank.

    group: of all ranks. Default: the default group.
    """
    return on_all_ranks(lambda: function() if dist.get_rank() == 0 else None, group)[0]


def summed(values, group=None) -> list:
    """Sum a list of numbers, or of lists of numbers, over all ranks in float64.

    group: of CPU tensors. Default: the default group, of the rank's device.
    """
    device = current_device() if group is None else "cpu"
    values = torch.tensor(values, dtype=torch.float64, device=device)
    # COMM: an all-reduce. All ranks call it at the same place, with lists of the same shape.
    # Pinned by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    return parallel.all_reduce_sum(values, group).tolist()


class Stop:
    """Remember the first SIGTERM or Ctrl-C (SIGINT), so that all ranks end at the same step.

    The handler sets a flag and saves nothing, because a collective inside it would hang. A second
    Ctrl-C ends the process at once. torchrun repeats the terminal's Ctrl-C to its ranks, so a
    signal within a second of the first is the same key press. One Stop listens at a time. Python
    runs no handler while a process waits in a collective, which ends as soon as another rank does.

    returns_to_caller: bool. The process is a program that goes on after the run. Then a second
        Ctrl-C raises KeyboardInterrupt in place of ending the process, and `close` gives the
        signals back. In a thread that is not the main one, Python allows no handlers, and no signal
        is seen.
    """

    SAME_KEY_PRESS = 1.0  # seconds
    current = None  # the Stop that listens
    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, returns_to_caller=False):
        self.number = 0  # of the first signal seen
        self.seen_at = 0.0
        self.returns_to_caller = returns_to_caller
        self.process = os.getpid()
        self.handlers = {}  # those before
        if threading.current_thread() is threading.main_thread():
            Stop.current = self
            self.handlers = {n: signal.signal(n, self.handle) for n in self.SIGNALS}

    def close(self):
        """Give the signals back to the handlers that they had before."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not Python's handler
        if self.handlers:
            Stop.current = None
        self.handlers = {}

    def handle(self, number, frame):
        # A process that a task's reward has forked ends by its own signals.
        if os.getpid() != self.process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.number:
            self.number = number
            self.seen_at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self.seen_at + self.SAME_KEY_PRESS:
            if self.returns_to_caller:
                raise KeyboardInterrupt
            os._exit(128 + number)

    def agreed(self, device) -> int:
        """Return the signal that any rank has seen, or 0. The number is the same on all ranks."""
        number = torch.tensor(self.number, device=device)
        # COMM: an all-reduce. All ranks call it after the same step, with a signal or without.
        # Pinned by
        # tests/full/test_faults.py::test_a_fault_ends_a_run_as_its_row_says.
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)


@dataclass
class Progress:
    """How far a program is, and what its user can do if another rank is lost.

    where: function without arguments that returns it in words.
    advice: str. What the user can do: the remaining ranks cannot save, so it names a checkpoint.
    """

    where: Callable = lambda: "starting"
    advice: str = "look at its error"


@contextlib.contextmanager
def naming_lost_ranks(progress):
    """Turn the error of a collective that lost a rank into a ConnectionError that says so.

    It is wrapped around the whole program, once. Every collective waits at most the timeout of its
    group, so a rank that is lost, stopped or slow ends the others by such an error.
    """
    try:
        yield
    except RuntimeError as error:
        # A single rank has no other to lose.
        several = dist.get_world_size() > 1 if dist.is_initialized() else is_one_of_several()
        if not several or not is_lost_rank(error):
            raise
        reason = str(error).splitlines()[0][:160]
        raise ConnectionError(
            f"{progress.where()}: another rank is gone or silent for too long ({reason}); if "
            f"it printed an error, that is the cause; this rank leaves without saving; "
            f"{progress.advice}") from error  # fmt: skip


def is_lost_rank(error) -> bool:
    """Tell whether an error, or an error that caused it, says that another rank is gone."""
    # NCCL and torch's stores raise a DistError. gloo raises a RuntimeError whose text begins with a
    # line of gloo's C++ source, which "connection timed out" of a task's database does not. torch's
    # pipelines wrap what a stage raised, hence the loop over causes.
    while error is not None:
        from_gloo = re.search(r"gloo/\S+\.cc:\d+\]|Gloo connectFullMesh failed", str(error))
        if isinstance(error, dist.DistError) or from_gloo:
            return True
        error = error.__cause__
    return False


def current_device():
    """Return where this rank computes, and where sums over ranks are made."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def warn(text):
    """Print one line on standard error, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr)


def say(text):
    """Print one line above the bar, on rank 0 alone."""
    if dist.get_rank() == 0:
        tqdm.write(text)


class Interrupted(Exception):
    """Raised to end the loop after a step in which a signal was seen. It holds the number."""


class ReplyTimeout(ValueError):
    """A reply that did not come. It holds a text and the number of the signal seen, or 0."""

    def __str__(self):
        return self.args[0]


# What the task of a run begins with, in its settings, if full.api was given objects: python:MyTask.
PYTHON = "python:"

"""Connect ranks, let them agree, and end them together, also after lost ranks and signals.

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

# Errors in flags, files, packages or numbers: the user can fix these, so only one line is printed.
USER_ERRORS = ValueError, ImportError, OSError, FloatingPointError


def all_gather_objects(item, group=None) -> list:
    """Return the items of all ranks of a group, in rank order. They are pickled. Collective."""
    items = [None] * dist.get_world_size(group)
    # COMM: an all-gather of pickled objects. The callers explain what they gather, and why.
    # Pinned by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    dist.all_gather_object(items, item, group=group)
    return items


def wait_for_all(device="cpu") -> None:
    """Return when all ranks of the default group are here."""
    # COMM: an all-reduce. A rank that then refuses its settings leaves at once. It must not close
    # connections, or the store of rank 0, while another rank still joins a group.
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

    limit = datetime.timedelta(seconds=timeout)
    ranks = dict(store=dist.HashStore(), rank=0, world_size=1)
    # Any of a launcher's variables is enough. Otherwise each process would silently run alone.
    if os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or is_one_of_several():
        store, rank, world = meet(limit)
        store = store_of_this_attempt(store, rank, world, timeout)
        ranks = dict(store=store, rank=rank, world_size=world)
    # gloo in addition to NCCL, because Python objects and checkpoints travel as CPU tensors.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, **ranks, timeout=limit)
    wait_for_all()
    return device


def is_rank_0() -> bool:
    """Return whether torchrun has told this process that it is rank 0, or nothing."""
    return os.environ.get("RANK") in (None, "", "0")


def is_one_of_several() -> bool:
    """Return whether torchrun has told this process that there are other ranks."""
    return os.environ.get("WORLD_SIZE") not in (None, "", "1")


def meet(limit):
    """Return the store in which the ranks meet, this rank, and how many ranks there are."""
    try:
        return next(dist.rendezvous("env://", timeout=limit))
    except dist.DistNetworkError as error:
        if not is_rank_0():  # this rank waited for rank 0, see `naming_lost_ranks`
            raise
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(f"expected a free port at {place}, where the ranks meet, got: "
                              f"{str(error).splitlines()[0][:160]}; set another MASTER_PORT"
                              ) from error  # fmt: skip


@contextlib.contextmanager
def connection(device="", *, timeout=60, threads=1):
    """Connect for the duration of a with block, then restore the process."""
    threads_before = torch.get_num_threads()
    was_connected = dist.is_initialized()
    try:
        yield connect(device, timeout=timeout, threads=threads)
    finally:
        torch.set_num_threads(threads_before)
        if dist.is_initialized() and not was_connected:
            dist.destroy_process_group()


def own_device(device) -> str:
    """Choose the device of this process: "cpu", or the GPU with torchrun's LOCAL_RANK."""
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
    """Raise an error of the body on all ranks. If several ranks have one, the first counts.

    Collective. The body must send no messages: the others would wait for a rank that raised.

    group: the ranks that call it. Default: all ranks.
    alone: bool. This rank calls it by itself, and no message is sent.

    The rank that found the error raises it unchanged, and the others a copy. If it is not one of
    USER_ERRORS, the copy is a RuntimeError. If all ranks raise it, `error.finder` is the rank that
    found it, so that `report` of __main__.py prints it once.
    """
    if alone or not dist.is_initialized() or dist.get_world_size(group) == 1:
        yield
        return
    own_error = None
    try:
        yield
    except (Exception, SystemExit) as error:  # a task may call sys.exit
        own_error = error

    # An error of a user's class cannot always be pickled, but its name and text can.
    sent = own_error
    is_ours = type(own_error).__module__.partition(".")[0] in ("builtins", "full")
    if own_error is not None and not (isinstance(own_error, USER_ERRORS) and is_ours):
        text = f"rank {dist.get_rank()} ended with {type(own_error).__name__}: {own_error}"
        sent = RuntimeError(text)
    # COMM: an all-gather of an error or None. Each rank gathers once, with an error or without.
    # Pinned by tests/full/test_checkpoints.py::test_what_one_rank_finds_all_ranks_raise.
    errors = all_gather_objects(sent, group)
    first = next((n for n, error in enumerate(errors) if error is not None), None)
    if first is None:
        return
    finder = first if group is None else dist.get_global_rank(group, first)
    raised = own_error if finder == dist.get_rank() else errors[first]
    if len(errors) == dist.get_world_size():
        raised.finder = finder
    raise raised


def on_all_ranks(function, group=None, *, alone=False) -> list:
    """Call function() on all ranks and return all values, in rank order. Collective.

    Its first error is raised on all ranks. group, alone: as in `errors_on_all_ranks`.
    """
    with errors_on_all_ranks(group, alone=alone):
        value = function()
    return [value] if alone else all_gather_objects(value, group)


def agree(function, group=None):
    """Call function() on rank 0. Return its value, or raise its error, on every rank.

    group: a group of all ranks. Default: the default group.
    """
    return on_all_ranks(lambda: function() if dist.get_rank() == 0 else None, group)[0]


def summed(values, group=None) -> list:
    """Sum a list of numbers, or of lists of numbers, over all ranks in float64.

    group: a gloo group. Default: the default group, with tensors on the rank's device.
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
    Python allows handlers in the main thread only: in another thread no signal is seen.

    returns_to_caller: bool. The process continues after the run. Then a second Ctrl-C raises
        KeyboardInterrupt and does not end the process, and `close` restores the handlers.
    """

    SAME_KEY_PRESS = 1.0  # seconds
    current = None  # the Stop that has the handlers
    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, returns_to_caller=False):
        self.number = 0  # of the first signal seen
        self.seen_at = 0.0
        self.returns_to_caller = returns_to_caller
        self.process = os.getpid()
        self.handlers = {}  # the previous handlers
        if threading.current_thread() is threading.main_thread():
            Stop.current = self
            self.handlers = {n: signal.signal(n, self.handle) for n in self.SIGNALS}

    def close(self):
        """Restore the previous signal handlers."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not Python's handler
        if self.handlers:
            Stop.current = None
        self.handlers = {}

    def handle(self, number, frame):
        # A process that a reward has forked is ended by its own signals.
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
        # Pinned by tests/full/test_faults.py::test_a_fault_ends_a_run_as_its_row_says.
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)


@dataclass
class Progress:
    """How far a program is, and what its user can do if another rank is lost.

    where: function without arguments. It returns in words how far the program is.
    advice: str. What the user can do. The remaining ranks cannot save, so it names a checkpoint.
    """

    where: Callable = lambda: "starting"
    advice: str = "look at its error"


@contextlib.contextmanager
def naming_lost_ranks(progress):
    """Raise a ConnectionError with advice if a collective fails because another rank is lost.

    One call surrounds the whole program. Every collective waits at most the timeout of its group,
    so a rank that is lost, stopped or slow ends the others with such an error.
    """
    try:
        yield
    except RuntimeError as error:
        # A single rank cannot lose another one.
        several = dist.get_world_size() > 1 if dist.is_initialized() else is_one_of_several()
        if not several or not is_lost_rank(error):
            raise
        reason = str(error).splitlines()[0][:160]
        raise ConnectionError(
            f"{progress.where()}: another rank is gone or silent for too long ({reason}); if "
            f"it printed an error, that is the cause; this rank leaves without saving; "
            f"{progress.advice}") from error  # fmt: skip


def is_lost_rank(error) -> bool:
    """Return whether an error, or its cause, is that another rank is gone."""
    # NCCL and torch's stores raise a DistError. gloo raises a RuntimeError that names a line of
    # gloo's C++ source, unlike "connection timed out" of a task's database. torch's pipelines wrap
    # the error of a stage, hence the loop over causes.
    while error is not None:
        from_gloo = re.search(r"gloo/\S+\.cc:\d+\]|Gloo connectFullMesh failed", str(error))
        if isinstance(error, dist.DistError) or from_gloo:
            return True
        error = error.__cause__
    return False


def current_device():
    """Return the device on which this rank computes and sums over ranks."""
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
    """End of the loop after a step in which a signal was seen. Its argument is the number."""


class ReplyTimeout(ValueError):
    """Lack of a reply in time. Its arguments are a text and the number of the signal seen, or 0."""

    def __str__(self):
        return self.args[0]


# In the settings of a run with Python objects, the task begins with this prefix: python:MyTask.
PYTHON = "python:"

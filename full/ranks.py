"""Ranks that join, agree and leave: adds restarts, lost ranks and signals to `parallel.py`.

Process groups that survive restarts, errors that name a lost rank, and one last step for all ranks.
Read this file if you write a training loop, or if a run does not start.
"""

import _thread
import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import uuid
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm


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


def all_gather_objects(item, group=None) -> list:
    """Return the items of all ranks of a group, in rank order. Collective. Default: of all ranks.

    item: anything that can be pickled.
    """
    items = [None] * dist.get_world_size(group)
    # COMM: an all-gather of pickled objects. The callers say what they gather, and why.
    # Pinned by tests/full/test_packed.py::test_ranks_are_one_process.
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
    if os.environ.get("RANK"):
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
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not re.fullmatch("[0-9]+", os.environ.get(name, "")):
            raise ValueError(f"{name}: expected a number, as torchrun sets it, got "
                             f"{os.environ.get(name)!r}")  # fmt: skip
    try:
        return next(dist.rendezvous("env://", timeout=patience))
    except dist.DistNetworkError as error:
        if not is_rank_0():  # it waits for rank 0, see `naming_lost_ranks`
            raise
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(f"expected a free port at {place}, where the ranks meet, got: "
                              f"{str(error).splitlines()[0][:160]}; set another MASTER_PORT"
                              ) from error  # fmt: skip


@contextlib.contextmanager
def joined(device="", *, timeout=60, threads=1):
    """Be connected for the time of the body: `connect`, then leave the process as it was.

    A process group that is on is used and kept. All other groups that the body has made end here.
    """
    threads_before = torch.get_num_threads()
    was_on = dist.is_initialized()
    groups = {*dist.distributed_c10d._world.pg_map}
    try:
        yield connect(device, timeout=timeout, threads=threads)
    finally:
        torch.set_num_threads(threads_before)
        if dist.is_initialized() and not was_on:
            dist.destroy_process_group()
        for group in {*dist.distributed_c10d._world.pg_map} - groups:
            dist.destroy_process_group(group)


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


def agree(function, group=None):
    """Call function() on rank 0. Return its value on every rank, or raise its error on every rank.

    group: of all ranks. Default: the default group.

    A ValueError or an OSError becomes a ValueError of the same text on all ranks. Any other error
    of rank 0 is raised there as it is, and as a RuntimeError that quotes it on the other ranks.
    """
    box = [None, None]  # the value, and the error that the other ranks raise
    own_error = None
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            box[1] = own_error = ValueError(str(error))
            if not isinstance(error, (ValueError, OSError)):
                own_error = error
                box[1] = RuntimeError(f"rank 0 ended with {type(error).__name__}: {error}")
    # COMM: rank 0 broadcasts to all ranks. It does so after an error too, so no rank waits for a
    # rank 0 that has failed.
    # Pinned by tests/full/test_faults.py::test_any_error_of_rank_0_reaches_all_ranks_at_once.
    dist.broadcast_object_list(box, src=0, group=group)
    value, error = box
    if own_error or error:
        raise own_error or error
    return value


def raise_on_all_ranks(problem, group=None):
    """Raise the first rank's problem on all ranks, if a rank has one. Collective.

    problem: this rank's Exception, or None. An OSError stays one, and others become ValueErrors. A
        single rank raises it as it is.
    """
    if problem is not None and dist.get_world_size() == 1:
        raise problem
    # COMM: each rank comes here once, whatever it met before: a rank that raised on its own would
    # leave the others waiting for it. An all-gather of the texts. Pinned by
    # tests/full/test_checkpoints.py::test_what_one_rank_finds_all_ranks_raise.
    kind = OSError if isinstance(problem, OSError) else ValueError
    texts = all_gather_objects(None if problem is None else (kind, f"{problem}"), group)
    for rank, found in enumerate(texts):
        if found is not None:
            kind, text = found
            raise kind(f"rank {rank}: {text}") from problem


def summed(values, device, group=None) -> list:
    """Sum a list of numbers, or of lists of numbers, over all ranks in float64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    # COMM: an all-reduce. All ranks call it at the same place, with lists of the same shape.
    # Pinned by tests/full/test_ranks.py::test_ranks_and_sharding_give_the_one_process_run.
    dist.all_reduce(total, group=group)
    return total.tolist()


class Stop:
    """Remember the first SIGTERM or Ctrl-C (SIGINT), so that all ranks end at the same step.

    A handler saves nothing, because a collective inside it would hang. A second Ctrl-C ends this
    process at once, even inside a collective. torchrun repeats the terminal's Ctrl-C to its ranks,
    so a signal within a second of the first is the same key press. One Stop listens at a time.

    goes_on: bool. The process is a program that goes on after the run. Then a second Ctrl-C raises
        KeyboardInterrupt in place of ending the process, and `close` gives the signals back. In a
        thread that is not the main one, Python allows no handlers, and no signal is seen.
    """

    SAME_KEY_PRESS = 1.0  # seconds
    current = None  # the Stop that listens
    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, goes_on=False):
        self.number = 0  # of the first signal seen
        self.seen_at = 0.0
        self.goes_on = goes_on
        self.is_second = False  # a second Ctrl-C was seen
        self.listens = threading.current_thread() is threading.main_thread()
        Stop.current = self
        if not self.listens:
            return

        # While a process waits in a collective, Python runs no handler, and two signals become
        # one. But Python's C code writes each signal's number to a pipe at once. A thread reads it.
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)  # `set_wakeup_fd` asks for this
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        self.handlers = {number: signal.getsignal(number) for number in self.SIGNALS}
        self.wakeup = signal.set_wakeup_fd(self.write_end)
        for number in self.SIGNALS:
            signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._forget)

    def close(self):
        """Give the signals back to the handlers that they had before, and end the thread."""
        if not self.listens:
            return
        self.listens = False
        Stop.current = None
        for number, handler in self.handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not Python's handler
        signal.set_wakeup_fd(self.wakeup)
        os.write(self.write_end, b"\0")
        self.thread.join()
        os.close(self.read_end)
        os.close(self.write_end)

    def _forget(self):
        # A process that a task's reward forks dies of these signals, and does not tell the run.
        if self.listens:
            signal.set_wakeup_fd(-1)
            for number in self.SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    def _handle(self, number, frame):
        if self.is_second:
            raise KeyboardInterrupt

    def _listen(self):
        while True:
            for number in os.read(self.read_end, 64):
                if number == 0:  # from `close`
                    return
                if number in self.SIGNALS:
                    self._remember(number)

    def _remember(self, number):
        if not self.number:
            self.number = number
            self.seen_at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self.seen_at + self.SAME_KEY_PRESS:
            if not self.goes_on:
                os._exit(128 + number)
            # The handler of this signal may have run already. `interrupt_main` lets it run again,
            # and writes to the pipe again too, which must not go round in a circle.
            if not self.is_second:
                self.is_second = True
                _thread.interrupt_main()

    def agreed(self, device) -> int:
        """Return the signal that any rank has seen, or 0. The number is the same on all ranks."""
        number = torch.tensor(self.number, device=device)
        # COMM: an all-reduce. All ranks call it after the same step, with a signal or without.
        # Pinned by
        # tests/full/test_run.py::test_sigterm_to_one_rank_saves_on_all_and_says_how_to_go_on.
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)


class Progress:
    """How far a program is, and what its user can do if another rank is lost.

    where: function without arguments that returns it in words.
    advice: str. What the user can do: the remaining ranks cannot save, so it names a checkpoint.
    """

    def __init__(self):
        self.where = lambda: "starting"
        self.advice = "look at its error"


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
        several = is_one_of_several()
        if dist.is_initialized():
            several = dist.get_world_size() > 1
        if not several or not is_lost_rank(error):
            raise
        reason = str(error).splitlines()[0][:160]
        raise ConnectionError(
            f"{progress.where()}: another rank is gone or silent for too long ({reason}); this "
            f"rank leaves without saving; {progress.advice}") from error  # fmt: skip


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


def is_error_of_rank_0(error) -> bool:
    """Return whether rank 0 ends with an error of this text too. Every rank that fails calls it."""
    # A lost rank is never news of rank 0 alone: each rank that is left says that it leaves.
    if not dist.is_initialized() or isinstance(error, ConnectionError):
        return False

    # COMM: rank 0 writes its error to the store in which the ranks met, and the others look there
    # for three seconds. A collective would wait for ranks that have no error. As rank 0 may hold
    # the store, it stays as long, unless all have read it. Pinned by
    # tests/full/test_commands.py::test_an_error_of_all_ranks_is_named_once.
    store = dist.group.WORLD.get_group_store()
    rank, patience = dist.get_rank(), datetime.timedelta(seconds=3)
    is_alike = rank == 0
    with contextlib.suppress(dist.DistError):
        if rank == 0:
            store.set("error", str(error))
            store.wait([f"rank {r} has read" for r in range(1, dist.get_world_size())], patience)
        else:
            store.wait(["error"], patience)
            is_alike = store.get("error").decode() == str(error)
            store.set(f"rank {rank} has read", "")
    return is_alike


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


# How the settings of a run name what full.api was given as an object: object:MyTask. The fields of
# Config that may hold such a name.
OBJECT = "object:"
MAY_BE_OBJECTS = "task", "reward", "data", "eval_data"


def flags_to_resume(out) -> str:
    """Return the flags with which the run of a directory goes on, as a shell takes them.

    A run with objects goes on from Python alone: of such a run this is the call.
    """
    # No command imports a file because a run's directory names it, so the user names it again.
    flags = ["--resume", "--out", str(out)]
    path = Path(out) / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(stored.get(name, "").startswith(OBJECT) for name in MAY_BE_OBJECTS):
        return f"full.api.run(Config(out={str(out)!r}, resume=True), ..)"
    for name in ("task", "reward"):
        if ":" in stored.get(name, ""):
            flags += [f"--{name}", stored[name]]
    return shlex.join(flags)


def advice_of(out) -> str:
    """Return how to go on with a run, for errors and signals."""
    return f"go on with {flags_to_resume(out)}"

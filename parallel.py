"""Plans: data, tensor, context, pipeline and expert parallelism, each equal to one process.

Each rank computes some terms of one sum; terms are added, nothing is averaged. So neither the
number of ranks nor who holds what can change the result beyond rounding.

    python parallel.py check               # every plan on this CPU against one process, float64
    python parallel.py plan p2d2t2         # its ranks, groups, and the memory of a rank
    python parallel.py bench               # tokens a second by plan

With this file alone, check compares ddp and fsdp of a toy; with models.py, ring_attention.py and
tests/ beside it, every kind of plan.

What it must equal, for ranks r and the loss L = sum_r L_r (each already divided by a global count):

    (1)  g      = sum_r dL_r / dtheta
    (2)  norm   = sqrt( sum over distinct gradient entries of g^2 )       the same on every rank
    (3)  theta <- optimiser( theta, g min(1, max_norm / norm) )           not if norm is not finite
    (4)  f, into split matrices:    x forward           sum_r dx_r backward   section 3 says why
    (5)  g, out of them:            sum_r y_r forward   dy backward

SP is sequence parallelism, the router is a mixture's gate.

  |          | split               | forward               | backward              | of a weight's |
  |          |                     |                       |                       | gradient      |
  | d ddp    | rows of the batch   | nothing               | nothing               | + over d c    |
  | d fsdp   | weights too         | gather a layer        | gather, scatter-add   | own rows      |
  | d zero1  | AdamW's states too  | nothing               | nothing               | as ddp        |
  | t        | heads, inner width, | a layer 2 gathers, 2  | the same; ends: a     | own rows;     |
  |          | vocabulary; tokens  | scatter-adds; ends: 1 | gather, an all-reduce | norms, router |
  |          | between them        | and 1, 2 all-reduces  |                       | + over t      |
  | t, no SP | the same, no tokens | 2 all-reduces a layer | 2 a layer; ends: 1    | own rows;     |
  |          |                     | ends: 1 and 2         |                       | q, k norm + t |
  | c        | tokens              | attention's           | attention's           | as d          |
  | c and t  | tokens, twice; SP   | 1 gather of lengths   | nothing               | as c and t    |
  | e        | experts             | 3 all-to-all: counts, | 2 all-to-all          | + over        |
  |          |                     | rows, back            |                       | expert-dp     |
  | p        | layers              | send states           | send their gradient   | own; tied     |
  |          |                     |                       |                       | + over ends   |

The ends, under t: forward a scatter-add behind the embedding and a gather of the last states (one
all-reduce without SP), and two all-reduces of (N,) numbers for log-probs over the vocabulary's
parts; backward a gather, and an all-reduce of the last states' gradient.

`ddp` reduces once per optimiser step, so micro-batches cost no message, and ranks may run different
numbers of them, none included: it and zero1 suit trees. Under fsdp, t, c, e and p each forward is
collective: all ranks of a group run the same calls.

Numbers a rank sends for Q parameters on W ranks: ddp 2 Q (W - 1) / W a step; fsdp Q (W - 1) / W
for each forward, each backward's gather and scatter-add; t 4 S M (t - 1) / t a layer each way.

    B rows   S tokens   M width   N rows for experts   E experts   W ranks
    Small: this rank's part of what the capital names: n of the N rows
    etp: over how many of the t ranks an expert's inner width is split, 1 or t

How it deviates: PyTorch's DDP averages and overlaps; this sums and does not overlap. FSDP2 averages
by default; here it is told to sum. Without SP experts need etp = t.

Not here: Float8 (its converters would go between parallelize and the optimiser, its scales into
`LocalOptimizer(after_step=)`); the routers' balance loss under a plan; ranks that only generate;
logits (`model(tokens)`) and embeddings as input under t: use `hidden` and `logprobs`.

References: Megatron arXiv:1909.08053, sequence parallelism arXiv:2205.05198; experts: GShard
arXiv:2006.16668, folding arXiv:2504.14960; FSDP arXiv:2304.11277; ZeRO arXiv:1910.02054; 1F1B
arXiv:2104.04473; ZB-V arXiv:2401.10241; torch.distributed.checkpoint (DCP).
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import math
import os
import pickletools
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torch.utils.checkpoint as ckpt
from torch.distributed import fsdp, pipelining
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.flop_counter import FlopCounterMode

# 1. Joining, agreeing, leaving ---------------------------------------------------------------


def connect(device="", *, timeout=60, threads=1) -> str:
    """Join torchrun's process group, or one of a single rank without torchrun; this rank's device.

    device: "cpu", "cuda" or "" (CUDA where there is one). timeout: seconds that a collective waits
    for a rank before it fails. threads: CPU threads of this rank.
    """
    torch.set_num_threads(threads)
    if dist.is_initialized():
        text = f"torch.distributed is on and is used as it is: timeout={timeout} has no effect"
        warnings.warn(text, stacklevel=2)
        return f"cuda:{torch.cuda.current_device()}" if "nccl" in dist.get_backend() else "cpu"

    cuda = device != "cpu" and torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)

    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    patience = datetime.timedelta(seconds=timeout)
    with naming_lost_ranks(lambda: "starting", "look at its error"):
        if "RANK" in os.environ:
            store, rank, world = next(dist.rendezvous("env://", timeout=patience))
            store = store_of_this_attempt(store, rank, world, timeout)
        else:
            store, rank, world = dist.HashStore(), 0, 1
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=patience
        )
    return device


def store_of_this_attempt(store, rank, world, timeout):
    """The part of torchrun's key-value store that this start of the ranks has for itself.

    `torchrun --max-restarts` gives restarted ranks the store of the ranks before them. There gloo
    would find the addresses of processes that are gone. TORCHELASTIC_RESTART_COUNT cannot tell the
    starts apart: each machine's torchrun counts its own. So rank 0 makes a name that was never
    used, and every rank shows that it is alive by a number of its own:

        rank 0   attempt = a7f3          reads a7f3/1 = 52        a7f3/go = {"1": "52"}
        rank 1   reads attempt = a7f3    a7f3/1 = 52              reads go, finds its 52

    A rank that finds an old name sees a `go` without its own number, and reads the name again.
    """
    deadline = time.monotonic() + timeout
    own_number = uuid.uuid4().hex
    if rank == 0:
        attempt = uuid.uuid4().hex
        store.set("attempt", attempt)
        # COMM: rank 0 waits for every other rank, and they for its `go`; `timeout` bounds both.
        # Pinned by tests/test_faults.py::test_a_killed_rank_is_started_again_and_the_run_goes_on.
        numbers = {}
        for other in range(1, world):
            numbers[str(other)] = store.get(f"{attempt}/{other}").decode()
        store.set(f"{attempt}/go", json.dumps(numbers))
        return dist.PrefixStore(attempt, store)

    while True:
        attempt = store.get("attempt").decode()
        store.set(f"{attempt}/{rank}", own_number)
        # An old attempt whose rank 0 died early never says go: look for a newer name each second.
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{attempt}/go"], datetime.timedelta(seconds=1))
            if json.loads(store.get(f"{attempt}/go"))[str(rank)] == own_number:
                return dist.PrefixStore(attempt, store)
            time.sleep(0.1)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank 0 did not answer within {timeout} seconds")


def patience_of(device_type) -> datetime.timedelta:
    """How long the default group's collectives wait for a rank; other groups should wait as long.

    torch gives any further group its backend's own default instead: 30 minutes for gloo, 10 for
    NCCL, whatever the default group was given.
    """
    backend = dist.group.WORLD._get_backend(torch.device(device_type))
    return backend.options._timeout


def agree(function):
    """Rank 0 calls function(); every rank returns its value, or raises its error as ValueError."""
    box = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except (ValueError, OSError) as error:
            box[1] = str(error)
    # COMM: rank 0 broadcasts always, whatever happened there, so no rank waits for a failure.
    # Pinned by tests/test_run.py::test_an_output_directory_that_holds_a_run_is_refused.
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ValueError(box[1])
    return box[0]


def summed(values, device) -> list:
    """A list of numbers, or of lists of numbers, summed over ranks in float64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


class Stop:
    """SIGTERM or Ctrl-C (SIGINT) asks for an end; `agreed` ends all ranks at the same step.

    Nothing is saved from inside a handler: a collective there would hang. A second Ctrl-C ends this
    process at once. torchrun repeats the terminal's Ctrl-C to its ranks, so a signal within a
    second of the first is the same key press.
    """

    SAME_KEY_PRESS = 1.0  # seconds

    def __init__(self):
        self.number = 0  # of the first signal seen
        self.seen_at = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number, frame):
        if not self.number:
            self.number = number
            self.seen_at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self.seen_at + self.SAME_KEY_PRESS:
            os._exit(128 + number)

    def agreed(self, device) -> int:
        """The signal that any rank has seen, the same on all ranks; 0 if none has. Collective."""
        number = torch.tensor(self.number, device=device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)


@contextlib.contextmanager
def naming_lost_ranks(where, advice):
    """Turn a collective that fails because a rank is gone into an error that says what to do.

    where: called for the text that says how far this rank was. It leaves without saving, because
    saving needs the ranks that are gone; the last checkpoint is whole.
    """
    try:
        yield
    except RuntimeError as error:
        world = dist.get_world_size() if dist.is_initialized() else os.environ.get("WORLD_SIZE", 1)
        if int(world) == 1 or not is_lost_rank(error):
            raise
        reason = str(error).splitlines()[0][:160]
        raise ConnectionError(
            f"{where()}: another rank is gone or silent for too long ({reason}); this rank leaves "
            f"without saving; {advice}") from error  # fmt: skip


LOST_RANK_WORDS = r"gloo|NCCL|[Cc]onnection|[Tt]imed out|timeout|pair closure"
SENDING_FILES = {"parallel.py", "ring_attention.py", "tree_attention.py"}


def is_lost_rank(error) -> bool:
    """Whether an error says that another rank is gone.

    NCCL and torch's stores have an error of their own for it, DistError; gloo raises a plain
    RuntimeError. Its words alone do not tell: a task may say "connection timed out" of its own
    database. So gloo's words count where gloo speaks: in a call of torch.distributed, or of these
    files, which wait for messages. torch's pipelines wrap what a stage raised, hence the chain.
    """
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and re.search(LOST_RANK_WORDS, str(error)):
            if _raised_while_sending(error):
                return True
        error = error.__cause__
    return False


def _raised_while_sending(error) -> bool:
    torch_folder = Path(torch.__file__).parent
    own_folder = Path(__file__).resolve().parent
    # From the frame that raised outwards, through torch, to the first frame of somebody else.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not file.is_relative_to(torch_folder):
            return file.resolve().parent == own_folder and file.name in SENDING_FILES
        if file.is_relative_to(torch_folder / "distributed"):
            return True
    return False


# 2. Plans ------------------------------------------------------------------------------------


TIED = "model.embed_tokens.weight"
KINDS = "dp", "cp", "tp", "pp", "ep", "etp", "expert-dp", "fsdp"
BACKENDS = "archon", "fsdp", "megatron", "sglang", "vllm"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many ranks each kind of parallelism has, and which ones.

        d2t2            4 ranks: data 2, tensor 2             p2d2t2        pipeline 2 besides
        d2t2e4          the same ranks: experts over all 4    d2c2          context 2
        (attn:d2t2|ffn:e2t2)   expert tensor degree 2, on the tensor ranks
        archon:d2t2     a backend's name, archon[actor]:d2t2 a role's too

    Letters d t p c e, each once, any order. Rank r sits at (pp, dp, cp, tp), tp innermost; for the
    experts the d c t ranks of a stage are (expert-dp, ep, etp) again, etp innermost, 1 or tp.

        p2d2t2    pp 0: dp 0: 0 1      groups("tp"): [0 1] [2 3] [4 5] [6 7]
                        dp 1: 2 3      groups("dp"): [0 2] [1 3] [4 6] [5 7]
                  pp 1: dp 0: 4 5      groups("pp"): [0 4] [1 5] [2 6] [3 7]
                        dp 1: 6 7      groups("fsdp"): as dp here; with context, d and c together
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    backend: str | None = None
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """From a string; ValueError says where it is wrong. `Allocation.parse` takes + and |."""
        reader = _Reader(text)
        plan = reader.plan()
        reader.takes(r"\Z", "the end")
        return plan

    def __post_init__(self):
        degrees = dict(d=self.dp, c=self.cp, t=self.tp, p=self.pp, e=self.ep, etp=self.etp)
        for letter, degree in degrees.items():
            if not (isinstance(degree, int) and degree > 0):
                raise ValueError(f"{letter} must be an integer of 1 or more; came {degree!r}")
        if self.name is not None and self.backend is None:
            raise ValueError(f"the name {self.name!r} needs a backend, as in archon[actor]:d2")
        if self.etp not in (1, self.tp):
            raise ValueError(f"the experts' t = {self.etp} must be 1 or attention's t = {self.tp}")
        if self.ep == 1:
            return
        # Folding: an expert group is whole context (and tensor) groups, and divides the stage.
        inner = self.cp * (self.tp if self.etp == 1 else 1)
        outer, what = self.dp * inner, "c * t" if self.etp == 1 else "c"
        if self.ep % inner:
            raise ValueError(f"e = {self.ep} must be a multiple of {what} = {inner}")
        if outer % self.ep:
            raise ValueError(f"e = {self.ep} must divide d * {what} = {outer}")

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """How many ranks hold the same experts: d c t / (e etp)."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def shapes(self) -> tuple[dict, dict]:
        """Names and degrees of the rank grid, outermost first, for attention and for experts."""
        attention = dict(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)
        return attention, {"pp": self.pp, "expert-dp": self.edp, "ep": self.ep, "etp": self.etp}

    def groups(self, kind: str) -> list[list[int]]:
        """The ranks of each group of a kind, see KINDS; no communicator is made."""
        attention, experts = self.shapes
        shape = attention if kind in attention or kind == "fsdp" else experts
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; came {kind!r}")
        names = ("dp", "cp") if kind == "fsdp" else (kind,)
        along = [n for n, name in enumerate(shape) if name in names]
        grid = np.arange(self.world).reshape([*shape.values()])
        grid = np.moveaxis(grid, along, range(-len(along), 0))
        return grid.reshape(-1, math.prod(shape[name] for name in names)).tolist()

    def require_fits(self, *, world=None, config=None, microbatches=None, ulysses=False) -> None:
        """ValueError if it does not fit a number of ranks, a model (ModelConfig), a step.

        ulysses: context parallelism deals heads out, so c must divide them too.
        """
        if world is not None and world != self.world:
            raise ValueError(
                f"{self} is for p * d * c * t = {self.world} ranks, but there are {world}; start "
                f"{self.world}, or change the plan")  # fmt: skip
        if microbatches is not None and self.pp > 1 and microbatches < self.pp:
            raise ValueError(
                f"{microbatches} microbatches are fewer than the {self.pp} stages of {self}; cut "
                f"the batch smaller")  # fmt: skip
        if config is None:
            return
        if not config.sparse_layers and (self.ep > 1 or self.etp > 1):
            raise ValueError(f"{self} spreads experts, but the model is dense; leave e and ffn out")
        heads, inner = config.num_attention_heads, config.moe_intermediate_size
        for letter, degree, what, size in (
            ("t", self.tp, "query heads", heads),
            ("t", self.tp, "key heads", config.num_key_value_heads),
            ("t", self.tp, "rows of intermediate_size", config.intermediate_size),
            ("t * c", self.tp * self.cp if ulysses else 1, "query heads (ulysses)", heads),
            ("e", self.ep, "experts", config.num_experts if self.ep > 1 else 0),
            ("ffn's t", self.etp, "rows of moe_intermediate_size", inner if self.etp > 1 else 0),
        ):
            if size % degree:
                raise ValueError(f"plan {self}: {letter} = {degree} must divide the {size} {what}")
        layers = config.num_hidden_layers
        if self.pp > layers:
            raise ValueError(f"plan {self}: p = {self.pp} stages are more than the {layers} layers")

    def describe(self) -> str:
        """One line of degrees, and the grid of ranks of each stage: a row a (dp, cp), tp across."""
        degrees = self.shapes[0] | {"ep": self.ep, "etp": self.etp}
        lines, width = [" ".join(f"{k}={n}" for k, n in degrees.items())], len(str(self.world - 1))
        for row, ranks in enumerate(self.groups("tp")):
            place = np.unravel_index(row, (self.pp, self.dp, self.cp))
            where = "  ".join(f"{k} {n}" for k, n in zip(("pp", "dp", "cp"), place, strict=True))
            lines.append(f"{where} | {' '.join(f'{rank:>{width}}' for rank in ranks)}")
        return "\n".join(lines)

    def __str__(self):
        """The shortest string that parses to this plan again."""
        text = f"p{self.pp}d{self.dp}t{self.tp}c{self.cp}"
        apart = f"(attn:{text}|ffn:p{self.pp}e{self.ep}t{self.etp})"
        text = apart if self.etp > 1 else f"{text}e{self.ep}"
        text = re.sub("[a-z]1(?![0-9])", "", text) or "d1"
        name = f"[{self.name}]" if self.name else ""
        return f"{self.backend}{name}:{text}" if self.backend else text


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Plans on devices: `a+b` on separate ones, `a|b` on the same, which binds tighter.

    groups: one tuple of plans for each set of devices, e.g. sglang:d4t2+archon:d4p2t2 is
    ((sglang:d4t2,), (archon:p2d4t2,)). All plans of a set have one world.
    """

    groups: tuple[tuple[Plan, ...], ...]

    @classmethod
    def parse(cls, text: str) -> "Allocation":
        reader, groups = _Reader(text), []
        while not groups or reader.takes(r"\+"):
            plans = [reader.plan()]
            while reader.takes(r"\|"):
                plans.append(reader.plan())
            if len({plan.world for plan in plans}) > 1:
                worlds = ", ".join(f"{plan} has {plan.world} ranks" for plan in plans)
                raise ValueError(f"plans on the same devices need one world: {worlds}")
            groups.append(tuple(plans))
        reader.takes(r"\Z", "the end")
        return cls(tuple(groups))

    @property
    def world(self) -> int:
        return sum(plans[0].world for plans in self.groups)

    def __str__(self):
        return "+".join("|".join(map(str, plans)) for plans in self.groups)


class _Reader:
    """The grammar, one method a rule, left to right:

        plan    =  [ backend [ "[" name "]" ] ":" ] ( "(" hybrid ")" | hybrid | dims )
        hybrid  =  "attn:" dims "|" "ffn:" dims
        dims    =  one or more of a letter and a number [1-9][0-9]*, each letter once
    """

    def __init__(self, text):
        if not isinstance(text, str):
            raise ValueError(f"a plan is a string such as d2t2; came {text!r}")
        self.text, self.at = text, 0

    def fail(self, expected):
        came = repr(self.text[self.at :]) if self.at < len(self.text) else "the end"
        where = f"plan {self.text!r}, position {self.at}"
        raise ValueError(f"{where}: expected {expected}; came {came}")

    def takes(self, pattern, expected=None):
        """Read past what matches here; where nothing does None, or ValueError if it is needed."""
        found = re.compile(pattern).match(self.text, self.at)
        if found:
            self.at = found.end()
        elif expected:
            self.fail(expected)
        return found

    def plan(self):
        backend = name = None
        if found := self.takes(r"(?!attn:|ffn:)([a-z]+)(?:\[(\w+)\])?:"):
            backend, name = found.groups()
            if backend not in BACKENDS:
                raise ValueError(f"plan {self.text!r}: backend {backend!r} is none of {BACKENDS}")
        paren = self.takes(r"\(")
        hybrid = paren or self.text.startswith("attn:", self.at)
        degrees = self.hybrid() if hybrid else self.dims("dtpce")
        if paren:
            self.takes(r"\)", "')'")
        names = dict(d="dp", c="cp", t="tp", p="pp", e="ep", etp="etp")
        return Plan(**{names[k]: n for k, n in degrees.items()}, backend=backend, name=name)

    def hybrid(self):
        self.takes("attn:", "'attn:'")
        attention = self.dims("dtpc")
        self.takes(r"\|", "'|'")
        self.takes("ffn:", "'ffn:'")
        experts = self.dims("detp")
        stages = attention.get("p", 1)
        if experts.get("p", stages) != stages:
            raise ValueError(
                f"plan {self.text!r}: attn has p{stages}, ffn p{experts['p']}; they must agree, or "
                f"leave ffn's p out")  # fmt: skip
        e, etp = experts.get("e", 1), experts.get("t", 1)
        ranks = math.prod(attention.get(k, 1) for k in "dtc")
        if "d" in experts and experts["d"] * e * etp != ranks:
            raise ValueError(
                f"plan {self.text!r}: attn has d * t * c = {ranks} ranks a stage, ffn d * e * t = "
                f"{experts['d'] * e * etp}; they must agree, or leave ffn's d out")  # fmt: skip
        return attention | {"e": e, "etp": etp}

    def dims(self, letters):
        degrees = {}
        while found := self.takes(r"([a-z])([1-9][0-9]*)(?![0-9])"):
            letter, number = found.groups()
            if letter not in letters or letter in degrees:
                self.at = found.start()
                self.fail(f"one of {' '.join(k for k in letters if k not in degrees)}, each once")
            degrees[letter] = int(number)
        if not degrees:
            self.fail(f"a letter of {' '.join(letters)} and a number of 1 or more")
        return degrees


# 3. Operators -------------------------------------------------------------------------------
#
# W by rows, y_r = W_r x: the loss sees x in every y_r, so dx = sum_r W_r^T dy_r, a term a rank.
#   (4)  f:  x forward, all-reduce of dx backward.
# W by columns, y = sum_r W_r x_r: each rank has a term of y, and dx_r = W_r^T dy needs all of dy.
#   (5)  g:  all-reduce forward, dy backward.
# Sequence parallel, tokens shared out where no matrix is split: an all-reduce is a reduce-scatter
# and an all-gather, and each is moved to its side: f = gather forward, scatter the sum backward.


def _whole(x, group):  # along dimension 1, the tokens, like the other parts here
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts, 1)


def _summed_part(x, group):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), 1)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out


def _sum(x, group):
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _part(x, group):
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _same(x, group):
    return x.view_as(x)


class _Move(torch.autograd.Function):
    """One way forward, another backward; both of (x, group)."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.rest = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, dx):
        group, backward = ctx.rest
        return backward(dx, group), None, None, None


# into and out of split matrices, by whether the tokens are shared out between them (sequence)
ENTER = {False: (_same, _sum), True: (_whole, _summed_part)}  # f
LEAVE = {False: (_sum, _same), True: (_summed_part, _whole)}  # g


def add_terms(x, group):
    """(5): the sum over a group of terms that each rank has some of; the loss is alike on all."""
    return _Move.apply(x, group, _sum, _same)


def _exchange(x_NM, group, gives, takes):
    """Rows to ranks: gives[r] rows go to rank r, takes[r] come from it."""
    out_nM = x_NM.new_empty(sum(takes), *x_NM.shape[1:])
    dist.all_to_all_single(out_nM, x_NM.contiguous(), takes, gives, group=group)
    return out_nM


def dispatch_experts(x_NM, counts_E, experts, group, /):
    """Rows sorted by expert -> the rank that holds it, through `experts`, and back: (N, M).

    counts_E: rows for each of all E experts; rank r of the group holds the r-th E / world of them.
    Ranks and experts without a row take part with none.
    """
    world = dist.get_world_size(group)
    counts_WE = counts_E.view(world, -1)
    # COMM: every rank sends every rank its counts first, so both sides of the second message know
    # its size. Pinned by tests/test_parallel.py::test_experts_and_ranks_without_a_token.
    arriving_WE = torch.empty_like(counts_WE)
    dist.all_to_all_single(arriving_WE, counts_WE.contiguous(), group=group)
    gives, takes = (c.sum(1).tolist() for c in (counts_WE, arriving_WE))
    there = functools.partial(_exchange, gives=gives, takes=takes)
    back = functools.partial(_exchange, gives=takes, takes=gives)
    rows_nM = _Move.apply(x_NM, group, there, back)
    # they come by rank, then expert: sort by expert, and back
    kind_n = torch.arange(arriving_WE.shape[1], device=x_NM.device).repeat(world)
    order_n = kind_n.repeat_interleave(arriving_WE.flatten()).argsort(stable=True)
    out_nM = experts(rows_nM.index_select(0, order_n), arriving_WE.sum(0))
    out_nM = out_nM.index_select(0, order_n.argsort())
    return _Move.apply(out_nM, group, back, there)


# 4. Plans applied to a model -----------------------------------------------------------------


class Grid(NamedTuple):
    """A plan's communicators. Every rank makes all of them, in one order."""

    plan: Plan
    dense: DeviceMesh  # (pp, replicate, fsdp, tp); fsdp: the ranks that shard weights, dp and cp
    experts: DeviceMesh  # (pp, expert-dp, ep, etp)
    context: dist.ProcessGroup  # the ranks that share sequences
    data: dist.ProcessGroup  # the ranks with other tokens and the same weights: dp and cp
    replica: dist.ProcessGroup  # the ranks that work on the same sequences: c, t and p
    ends: dist.ProcessGroup | None  # first and last stage, which both hold a tied embedding

    @classmethod
    def make(cls, plan, device_type="cpu", *, shard=None) -> "Grid":
        """shard: HSDP, weights are sharded over so many of the dp ranks; all by default.

        Every group waits as long for a rank as the default group does, see `patience_of`.
        """
        plan.require_fits(world=dist.get_world_size())
        shard = plan.dp if shard is None else shard
        if plan.dp % shard:
            raise ValueError(f"plan {plan}: {shard} ranks that shard must divide d = {plan.dp}")
        patience = patience_of(device_type)
        made = {}  # lists of ranks -> this rank's group among them, so that none is made twice

        def group_among(lists):
            lists = tuple(tuple(ranks) for ranks in lists)
            if lists == (tuple(range(plan.world)),):
                return dist.group.WORLD
            if lists not in made:
                # COMM: every rank makes every group, in one order, its own among them.
                # Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
                made[lists], _ = dist.new_subgroups_by_enumeration(lists, timeout=patience)
            return made[lists]

        def mesh_of(shape):
            """A mesh of these degrees by name, with a group along each of its dimensions."""
            ranks = np.arange(plan.world).reshape([*shape.values()])
            groups = []
            for n, degree in enumerate(shape.values()):
                along = np.moveaxis(ranks, n, -1).reshape(-1, degree)
                groups.append(group_among(along.tolist()))
            names = tuple(shape)
            return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)

        dense = dict(pp=plan.pp, replicate=plan.dp // shard, fsdp=shard * plan.cp, tp=plan.tp)
        # The ranks that work on the same sequences: of each d, all stages, c and t.
        by_stage = np.arange(plan.world).reshape(plan.pp, plan.dp, -1)
        replicas = by_stage.swapaxes(0, 1).reshape(plan.dp, -1).tolist()
        ends = None
        if plan.pp > 1:
            ends = group_among([[stages[0], stages[-1]] for stages in plan.groups("pp")])
        return cls(
            plan, dense=mesh_of(dense), experts=mesh_of(plan.shapes[1]),
            context=group_among(plan.groups("cp")), data=group_among(plan.groups("fsdp")),
            replica=group_among(replicas), ends=ends,
        )  # fmt: skip

    @property
    def dp_rank(self) -> int:
        """Which of the dp shares of the batch is this rank's."""
        return dist.get_rank() // (self.plan.cp * self.plan.tp) % self.plan.dp


def _place(module, name, mesh, placements, terms=False):
    """Keep this rank's part of a parameter that all ranks have, as a DTensor of the same name.

    terms: its gradients on the ranks are terms of a sum.
    """
    p = getattr(module, name)
    local = p.detach()
    for n, placement in enumerate(placements):
        if placement.is_shard():
            local = local.chunk(mesh.size(n), placement.dim)[mesh.get_local_rank(n)]
    whole = dict(shape=p.shape, stride=p.stride())
    local = DTensor.from_local(local.clone(), mesh, placements, run_check=False, **whole)
    placed = torch.nn.Parameter(local, requires_grad=p.requires_grad)
    placed.terms = terms
    setattr(module, name, placed)


def _split(module, mesh, *, terms=False, factor=1, **placements):
    """Place parameters (name=placement); while the module runs it sees them as plain tensors.

    terms: what a rank computes of their gradients is a term of a sum over the mesh. factor: of what
    the module sees.
    """
    seen = {}
    for name, placement in placements.items():
        if getattr(module, name, None) is not None:
            placement = placement if isinstance(placement, tuple) else (placement,)
            _place(module, name, mesh, placement, terms)
            seen[name] = (Partial(),) if terms else placement

    def show(module, args):
        # NUMERICS: DTensor's default takes a plain tensor's gradient to be whole on every rank; a
        # norm that saw this rank's tokens or heads has a term of it, and says so. Pinned by
        # tests/test_parallel.py::test_every_plan_is_one_process.
        for name, placement in seen.items():
            p = module._parameters[name]
            plain = p.to_local(grad_placements=placement)
            module.__dict__[name] = plain if factor == 1 else plain * factor

    def cover(module, args, output):
        for name in seen:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(show)
    module.register_forward_hook(cover, always_call=True)


def _between(first, last, group, sequence):
    """(4) on the way into `first`, (5) on the way out of `last`."""
    enter, leave = ENTER[sequence], LEAVE[sequence]
    enters = lambda _, args: (_Move.apply(args[0], group, *enter), *args[1:])  # noqa: E731
    first.register_forward_pre_hook(enters)
    last.register_forward_hook(lambda _, args, out: _Move.apply(out, group, *leave))


def tensor_parallel(model, mesh, *, sequence=True, expert_tensor=1) -> None:
    """Split heads, inner widths and vocabulary over `mesh`; tokens between them, with `sequence`.

    `hidden` takes and gives whole sequences on every rank. A loss that all ranks compute alike
    gives the right gradient: `logprobs` sums what the vocabulary's parts tell of it.
    """
    group, rank = mesh.get_group(), mesh.get_local_rank()
    rows, columns, whole = Shard(0), Shard(1), Replicate()
    norms = dict(weight=whole, terms=sequence)
    for layer in model.model.layers:
        at, mlp = layer.self_attn, layer.mlp
        for linear in (at.q_proj, at.k_proj, at.v_proj):
            _split(linear, mesh, weight=rows, bias=rows)
        _split(at.o_proj, mesh, weight=columns)
        _split(at.o_proj, mesh, bias=whole, terms=True, factor=int(rank == 0))  # added once
        for norm in (at.q_norm, at.k_norm):
            _split(norm, mesh, weight=whole, terms=True)
        for name, norm in layer.named_children():
            if name.endswith("layernorm"):
                _split(norm, mesh, **norms)
        _between(at, at.o_proj, group, sequence)
        if hasattr(mlp, "experts"):
            _split(mlp.gate, mesh, weight=whole, terms=True)
            if expert_tensor > 1:
                _between(mlp, mlp, group, sequence)
        else:
            for linear in (mlp.gate_proj, mlp.up_proj):
                _split(linear, mesh, weight=rows)
            _split(mlp.down_proj, mesh, weight=columns)
            _between(mlp, mlp.down_proj, group, sequence)
    norm = model.model.norm
    if not isinstance(norm, torch.nn.Identity):  # else a stage that others follow
        _split(norm, mesh, **norms)
        if sequence:
            norm.register_forward_hook(lambda _, args, out: _Move.apply(out, group, _whole, _part))
    if hasattr(model, "score"):
        _split(model.score, mesh, weight=whole)
    _vocabulary_parallel(model, mesh, sequence)


def _vocabulary_parallel(model, mesh, sequence):
    """Split the rows of the embedding and of the head, where this part of a model has them."""
    group, rank, world, rows = mesh.get_group(), mesh.get_local_rank(), mesh.size(), Shard(0)
    embedding = getattr(model.model, "embed_tokens", None)
    if hasattr(model, "lm_head"):
        _place(model.lm_head, "weight", mesh, (rows,))
    first = rank * -(-model.config.vocab_size // world)  # the last shard may be shorter

    def embed(tokens_BS):
        if sequence and tokens_BS.shape[1] % world:
            S = tokens_BS.shape[1]
            raise ValueError(
                f"{S} tokens a sequence must divide by t = {world} where tokens are shared out; "
                f"pad to {-(-S // world) * world}")  # fmt: skip
        local_BS = tokens_BS - first
        own_BS = (local_BS >= 0) & (local_BS < len(embedding.weight))
        x_BSM = F.embedding(local_BS.masked_fill(~own_BS, 0), embedding.weight) * own_BS[..., None]
        return _Move.apply(x_BSM, group, *LEAVE[sequence])

    def head_rows():
        weight = model.head_weight.to_local(grad_placements=[rows])
        return weight, dict(group=group, vocab_start=first)

    model.head_rows = head_rows
    if embedding is not None and not isinstance(embedding.weight, DTensor):  # zbv: done already
        _split(embedding, mesh, weight=rows)
        embedding.forward = embed


def experts_of(model) -> list:
    """The modules that hold all experts of a layer."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def expert_parallel(model, mesh) -> None:
    """Deal whole experts over the mesh's ep ranks, and their inner width over its etp ranks."""
    placements = dict(gate_proj=(Shard(0), Shard(1)), up_proj=(Shard(0), Shard(1)),
                      down_proj=(Shard(0), Shard(2)))  # fmt: skip
    group = mesh["ep"].get_group()
    for experts in experts_of(model):
        _split(experts, mesh["ep", "etp"], **placements)
        if mesh["ep"].size() > 1:
            run = experts.forward
            experts.forward = lambda x, counts, run=run: dispatch_experts(x, counts, run, group)


class Micro(NamedTuple):
    """A microbatch: (B, S) token ids, their positions, and the attention of their documents."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: object = None  # None: the model's


SCHEDULES = {"1f1b": (pipelining.Schedule1F1B, 1),  # and how many stages a rank has
             "interleaved1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
             "zbv": (pipelining.ScheduleZBVZeroBubble, 2)}  # fmt: skip


def stage_part(model, stage, stages):
    """A copy of stage `stage` of a whole model: its layers under their own names, and the ends.

    Layers are dealt evenly, the first stages get one more. A tied embedding is in the first stage
    and, as the head, in the last.
    """
    first, last, tied = stage == 0, stage == stages - 1, model.config.tie_word_embeddings
    kept = np.array_split(np.arange(len(model.model.layers)), stages)[stage]
    others = [layer for n, layer in enumerate(model.model.layers) if n not in kept]
    if not last:
        others += [model.model.norm, *(getattr(model, name, None) for name in ("lm_head", "score"))]
    if not (first or last and tied):
        others.append(model.model.embed_tokens)
    # what other stages have is not copied, nor is attention, which may hold a process group
    instead = {id(module): None for module in others} | {id(model.attention): model.attention}
    part = copy.deepcopy(model, instead)
    for module in (part, part.model, part.model.layers):
        module._modules = {name: m for name, m in module._modules.items() if m is not None}
    if not last:
        part.model.norm = torch.nn.Identity()
    return part


class _Stage(torch.nn.Module):
    """What torch's schedule runs: (index of a microbatch, or the states before) -> states."""

    def __init__(self, part, pipeline):
        super().__init__()
        self.part, self.micros = part, pipeline.micros

    def forward(self, x, index):
        tokens, positions, attention = self.micros[int(index)]
        x = x if x.is_floating_point() else tokens
        return self.part.hidden(x, positions=positions, attention=attention)


class Pipeline:
    """This rank's stages of a model, run by a schedule of torch.distributed.pipelining.

    1f1b, 2 stages, 4 microbatches (F forward, B backward):     interleaved: rank 0 has stages 0, 2

        rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3                  rank 0   F0a F1a F0c F1c ..
        rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3                     rank 1   ... F0b F1b F0d ..

    It has the parameters of its stages under the names of the whole model. zbv: rank r has stages
    r and 2 p - 1 - r, and a backward's weights are done apart from its inputs.
    """

    def __init__(self, model, grid, schedule):
        self.grid, self.micros, self.runs, self.loss_fn = grid, [], {}, None
        like = next(model.parameters())
        self.like = dict(dtype=like.dtype, device=like.device)  # the states between stages
        self.schedule, per_rank = SCHEDULES[schedule]
        p, rank = grid.plan.pp, grid.dense["pp"].get_local_rank()
        self.stages, self.config = p * per_rank, model.config
        self.rank_of = [*range(p)] * per_rank  # of each stage
        if schedule == "zbv":
            self.rank_of = [*range(p), *reversed(range(p))]
        mine = [stage for stage, holder in enumerate(self.rank_of) if holder == rank]
        self.parts = {stage: stage_part(model, stage, self.stages) for stage in mine}
        self.split_tie = model.config.tie_word_embeddings and schedule != "zbv"
        if model.config.tie_word_embeddings and schedule == "zbv" and rank == 0:
            self.parts[self.stages - 1].model.embed_tokens = self.parts[0].model.embed_tokens

    @property
    def last(self):
        """The part with the head, None on ranks that do not have it."""
        return self.parts.get(self.stages - 1)

    def named_parameters(self):
        named = (pair for part in self.parts.values() for pair in part.named_parameters())
        return iter(dict(named).items())

    def parameters(self):
        return (p for _, p in self.named_parameters())

    def named_buffers(self):
        named = (pair for part in self.parts.values() for pair in part.named_buffers())
        return iter(dict(named).items())

    def buffers(self):
        return (buffer for _, buffer in self.named_buffers())

    def _schedule(self, shape, n):
        states = torch.empty(self._between(shape), **self.like, requires_grad=True)
        whole = torch.empty(*shape, states.shape[2], **self.like, requires_grad=True)
        stages, group = [], self.grid.dense["pp"].get_group()
        for stage, part in self.parts.items():
            stages.append(pipelining.PipelineStage(
                _Stage(part, self), stage, self.stages, states.device,
                input_args=states.new_zeros(1, dtype=torch.int64) if stage == 0 else states,
                output_args=whole if part is self.last else states, group=group,
            ))  # fmt: skip
        given = stages if self.stages > self.grid.plan.pp else stages[0]
        loss_fn = lambda hidden, index: self.loss_fn(int(index), hidden)  # noqa: E731
        return self.schedule(given, n, loss_fn=loss_fn, scale_grads=False)

    def forward_backward(self, micros, loss_fn) -> list:
        """Gradients of the sum of loss_fn(k, hidden of microbatch k); the losses where `last` is.

        All ranks of the plan call it with microbatches of the same number and shape, each padded to
        the longest; `loss_fn` runs on the last stage, where `last.logprobs` is.
        """
        shape, n, plan = tuple(micros[0].tokens.shape), len(micros), self.grid.plan
        if any(tuple(micro.tokens.shape) != shape for micro in micros):
            raise ValueError("microbatches of a step must have one shape; pad them to the longest")
        self._require_tokens(micros)
        plan.require_fits(microbatches=n)
        if self.stages > plan.pp and n % plan.pp:
            raise ValueError(f"{n} microbatches must divide by the {plan.pp} ranks of the pipeline")
        if (shape, n) not in self.runs:
            self.runs[shape, n] = self._schedule(shape, n)
        self.micros[:], self.loss_fn, losses = micros, loss_fn, []
        index = torch.arange(n, device=self.like["device"])
        first = (index,) if 0 in self.parts else ()
        options = dict(target=index, losses=losses) if self.last is not None else {}
        self.runs[shape, n].step(*first, index=index, return_outputs=False, **options)
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def forward(self, micros) -> list | None:
        """`hidden` of each microbatch where `last` is, without gradient or loss; None elsewhere."""
        # DEVIATES: torch's schedules cannot run zbv forward only (2.13), so these few lines do, for
        # all of them. COMM: a microbatch's stages run one after another, and all ranks take the
        # microbatches in one order, so each send meets the receive it waits for. Pinned by
        # tests/test_plan_run.py::test_old_and_reference_log_probs_too.
        self._require_tokens(micros)
        group, out = self.grid.dense["pp"].get_group(), []
        at = [dist.get_global_rank(group, rank) for rank in self.rank_of]
        for tokens, positions, attention in micros:
            x = tokens
            for stage, part in sorted(self.parts.items()):
                if stage and at[stage - 1] != dist.get_rank():
                    x = torch.empty(*self._between(tokens.shape), **self.like)
                    dist.recv(x, at[stage - 1], group=group)
                x = part.hidden(x, positions=positions, attention=attention)
                if part is not self.last and at[stage + 1] != dist.get_rank():
                    dist.send(x.contiguous(), at[stage + 1], group=group)
            out.append(x)
        return out if self.last is not None else None

    def _require_tokens(self, micros):
        """ValueError on every stage for tokens that only the first one would find wrong."""
        part = next(iter(self.parts.values()))
        for micro in micros:
            part.require_tokens(micro.tokens)
        if self.sequence and self.grid.plan.tp > 1:
            lengths = [micro.tokens.shape[1] for micro in micros]
            require_even_lengths(self.grid, lengths, self.like["device"])

    def _between(self, shape):
        """Of the states between stages, for tokens of a shape."""
        t = self.grid.plan.tp if self.sequence else 1
        return shape[0], shape[1] // t, self.config.hidden_size


# What "op" keeps: products, and what costs a message; norms, activations, rotations come again.
KEPT = {"mm", "bmm", "addmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention"}  # fmt: skip


def checkpoint_layers(layers, ac, *, every=2, debug=False) -> None:
    """Compute layers again in the backward instead of keeping their activations.

    ac: "full": of every layer, only its input is kept; "layers": so for every `every`-th layer, the
    others keep all; "op": products and attention are kept (KEPT), the rest is computed again. No
    parameter's name changes. debug: print the FLOPs of what was computed again, a line a layer.
    """
    _require_every(every)

    def policy(context, op, *args, **options):
        kept = op._overloadpacket.__name__ in KEPT
        return ckpt.CheckpointPolicy.MUST_SAVE if kept else ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    def counted(n, run, *args):
        if torch._C._current_graph_task_id() == -1:  # not in a backward: the first time
            return run(*args)
        counter = FlopCounterMode(display=False)
        try:  # torch leaves by an exception once it has all that the backward needs
            with counter:
                return run(*args)
        finally:
            by_op = counter.get_flop_counts()["Global"].items()
            again = sum(flops for op, flops in by_op if ac != "op" or op.__name__ not in KEPT)
            print(f"layer {n}: {again} FLOPs again", flush=True)

    options = dict(use_reentrant=False)
    if ac == "op":
        options["context_fn"] = functools.partial(ckpt.create_selective_checkpoint_contexts, policy)
    for n, layer in enumerate(layers):
        if ac != "layers" or n % every == 0:
            run = functools.partial(counted, n, layer.forward) if debug else layer.forward
            layer.forward = lambda *args, run=run: ckpt.checkpoint(run, *args, **options)


AC = "none", "full", "layers", "op", "memory_budget"
MODES = "ddp", "fsdp", "zero1"


def _require_every(every):
    if type(every) is not int or every < 1:
        raise ValueError(f"every n-th layer needs an integer n of 1 or more; came {every!r}")


def require_even_lengths(grid, lengths, device) -> None:
    """ValueError if t does not divide this rank's lengths, or those of another of its context.

    lengths: of the sequences of one forward, or of all microbatches of a step.
    """
    t = grid.plan.tp
    odd = [length for length in lengths if length % t]
    # One length speaks for all: the first that does not divide, where there is one.
    own = [*odd, *lengths, 0][0]
    found = [own]

    if grid.plan.cp > 1:
        # 27 tokens in a zigzag over 2 ranks are 14 and 13: under t = 2 one rank alone would refuse
        # its part, and the other would wait for its keys until the timeout.
        # COMM: an all-gather of one number over the ranks that share the sequence, once a forward,
        # so that all of them refuse, with one text. Pinned by
        # tests/test_parallel_faults.py::test_an_odd_share_of_a_sequence_is_refused_by_every_rank.
        parts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(grid.plan.cp)]
        dist.all_gather(parts, torch.tensor([own], device=device), group=grid.context)
        found = [int(part) for part in parts]

    if all(length % t == 0 for length in found):
        return
    if grid.plan.cp == 1:
        raise ValueError(
            f"{own} tokens a sequence must divide by t = {t} where tokens are shared out; pad to "
            f"{-(-own // t) * t}")  # fmt: skip
    raise ValueError(
        f"the {grid.plan.cp} ranks that share a sequence have {', '.join(map(str, found))} tokens "
        f"of it; each must divide by t = {t} where tokens are shared out; pad the sequence, for a "
        f"zigzag to a multiple of 2 c t = {2 * grid.plan.cp * t}")  # fmt: skip


def _with_even_lengths(model, grid):
    """Let `hidden` first agree on the lengths of the ranks that share a sequence."""
    run = model.hidden

    def hidden(tokens_BS, /, **options):
        require_even_lengths(grid, [tokens_BS.shape[1]], tokens_BS.device)
        return run(tokens_BS, **options)

    model.hidden = hidden


def _refuse(
    plan, model, grid, *, attention, mode, sequence, schedule, ac, ac_every, memory_budget, compile,
    offload,
):  # fmt: skip
    """ValueError for what cannot be, from what every rank has, before the first message.

    Nothing of the model is changed yet, so that a caller may mend the call and make it again.
    """
    config = model.config
    given = ("mode", mode, MODES), ("schedule", schedule, SCHEDULES), ("ac", ac, AC)
    for name, value, known in given:
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; came {value!r}")
    _require_every(ac_every)
    number = isinstance(memory_budget, int | float) and not isinstance(memory_budget, bool)
    if not (number and 0 <= memory_budget <= 1):
        raise ValueError(f"memory_budget is a share between 0 and 1; came {memory_budget!r}")
    # The degrees decide; a backend's name may differ.
    if plan.shapes != grid.plan.shapes:
        raise ValueError(
            f"plan {plan} was given the grid of plan {grid.plan}; use Grid.make(plan) of this one")
    if getattr(model, "grid", None) is not None or isinstance(model, fsdp.FSDPModule):
        raise ValueError(
            "this model is split or sharded already; parallelize takes a whole one, once")
    plan.require_fits(world=dist.get_world_size(), config=config)
    if plan.pp == 1 and schedule != "1f1b":
        raise ValueError(f"schedule={schedule!r} is of a pipeline, but plan {plan} has no p")
    stages = plan.pp * SCHEDULES[schedule][1]
    if plan.pp > 1 and stages > config.num_hidden_layers:
        raise ValueError(
            f"{schedule} cuts {stages} stages, but the model has {config.num_hidden_layers} layers")
    if grid.dense["replicate"].size() > 1 and mode != "fsdp":
        raise ValueError(f'a grid that replicates shards is for mode="fsdp"; came mode={mode!r}')
    uneven = plan.tp > 1 and config.vocab_size % plan.tp and plan.dp * plan.cp > 2
    if uneven and mode != "ddp":
        raise ValueError(
            f"t = {plan.tp} cuts {config.vocab_size} rows of the vocabulary unevenly; torch cannot"
            f' save such parts sharded again over d c > 2; pad it, or use mode="ddp"')  # fmt: skip
    if offload and mode != "fsdp":
        raise ValueError(f'offload=True moves shards: it needs mode="fsdp"; came {mode!r}')
    if ac == "memory_budget" and not compile:
        raise ValueError('ac="memory_budget" is a choice of torch.compile: it needs compile=True')
    if plan.cp > 1 and attention is None:
        raise ValueError(f"plan {plan} splits sequences: give attention=, e.g. a ring over its c")
    if plan.pp > 1 and schedule == "zbv" and mode == "fsdp":
        raise ValueError(
            "zbv computes a stage's weight gradients apart from its backward, which FSDP2 does not "
            'follow; use schedule="1f1b" or mode="zero1"')  # fmt: skip
    if config.sparse_layers and plan.tp > 1 and not sequence and plan.etp == 1:
        raise ValueError(
            f"plan {plan}: without sequence=True every tensor rank would send the same tokens to "
            f"the experts; use ffn's t = {plan.tp}")  # fmt: skip


def parallelize(
    model, plan, *, device_mesh, attention=None, mode="ddp", sequence=True, schedule="1f1b",
    ac="none", ac_every=2, ac_debug=False, memory_budget=0.5, compile=False, offload=False,
):  # fmt: skip
    """Make a whole model, equal on all ranks, into this rank's part of a plan; returns that.

    device_mesh: Grid.make(plan). attention: the callable of context parallelism, which the layers
    call from here on; plans with c > 1 need one. mode: "ddp" (whole copies, one reduction a step),
    "fsdp" (FSDP2; HSDP where the grid replicates), "zero1" (as ddp, with the optimiser's states
    sharded: `LocalOptimizer(zero=True)`). sequence: share tokens out over the tensor ranks where no
    matrix is split; such sequences divide by t. schedule: of a pipeline, see SCHEDULES; a plan with
    p > 1 gives a `Pipeline`, else the model itself comes back, changed. ac: activations that are
    computed again, see `checkpoint_layers`; "memory_budget": torch.compile's own choice, to keep
    that share of them. compile: each layer by itself, for any length. offload: see `shard`.

    The loss is a sum over tokens divided by a global count. Ranks of one tensor group are given the
    same sequences; those of one context group its tokens; those of different dp other sequences.
    """
    _refuse(
        plan, model, device_mesh, attention=attention, mode=mode, sequence=sequence,
        schedule=schedule, ac=ac, ac_every=ac_every, memory_budget=memory_budget, compile=compile,
        offload=offload)  # fmt: skip
    if attention is not None:
        model.attention = attention
    whole = model if plan.pp == 1 else Pipeline(model, device_mesh, schedule)
    whole.grid, whole.mode, whole.sequence = device_mesh, mode, sequence
    for part in [model] if plan.pp == 1 else whole.parts.values():
        if plan.tp > 1:
            mesh = device_mesh.dense["tp"]
            tensor_parallel(part, mesh, sequence=sequence, expert_tensor=plan.etp)
        if plan.ep * plan.etp > 1:
            expert_parallel(part, device_mesh.experts)
        part.grid = device_mesh
        if ac in ("full", "layers", "op"):
            checkpoint_layers(part.model.layers, ac, every=ac_every, debug=ac_debug)
        if ac == "memory_budget":
            torch._functorch.config.activation_memory_budget = memory_budget
        for layer in part.model.layers if compile else ():
            layer.compile(dynamic=True)
        if mode == "fsdp":
            shard(part, offload=offload)
        # A pipeline agrees on its microbatches' lengths once a step, before the first of them.
        if plan.cp > 1 and plan.tp > 1 and sequence and plan.pp == 1:
            _with_even_lengths(part, device_mesh)
    return whole


# 5. Gradients --------------------------------------------------------------------------------


def shard(model, *, offload=False) -> None:
    """FSDP2 on every layer and the rest, with gradients summed over ranks, not averaged.

    Experts are a part of their own: other ranks hold copies of them than of the rest. offload:
    shards, their gradients and so the optimiser live on the CPU.
    """
    cuda = torch.cuda.is_available()
    policy = fsdp.CPUOffloadPolicy(pin_memory=cuda) if offload else fsdp.OffloadPolicy()
    grid, mesh, parts = getattr(model, "grid", None), None, []
    if grid is not None:
        mesh = grid.dense[("replicate", "fsdp") if grid.dense["replicate"].size() > 1 else "fsdp"]
        parts = [(module, grid.experts["expert-dp"]) for module in experts_of(model)]
    for module, over in parts + [(module, mesh) for module in (*model.model.layers, model)]:
        fsdp.fully_shard(module, mesh=over, offload_policy=policy)
        # NUMERICS: FSDP2 averages by default; the losses here are parts of a sum. gloo has no
        # pre-multiplied sum, hence the second call.
        # Pinned by tests/test_ranks.py::test_ranks_and_sharding_give_the_one_process_run.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    fsdp.register_fsdp_forward_method(model, "hidden")


def sharded(model) -> bool:
    """Not read off the parameters: between forward and backward the root's are whole."""
    return getattr(model, "mode", None) == "fsdp" or isinstance(model, fsdp.FSDPModule)


def reshard(model) -> None:
    """Drop what FSDP gathered: a forward without a backward leaves the root's weights whole."""
    for part in model.parts.values() if isinstance(model, Pipeline) else [model]:
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor):
    """The whole of a possibly sharded tensor. Collective if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def holders(grid, name):
    """The ranks with the same part of a parameter and other tokens; without a plan all, None."""
    if grid is None:
        return None
    return grid.experts["expert-dp"].get_group() if ".mlp.experts." in name else grid.data


def reduce_gradients(model) -> int:
    """(1) in place; a rank without a gradient adds zeros. FSDP has done it in backward.

    Returns the position, counted from the last parameter because backward reaches that first, of
    this rank's first parameter whose own gradient is not finite; -1 if there is none.
    """
    reshard(model)  # else the gradients of the root's shards are out of sight
    suspect, backwards = -1, list(model.named_parameters())[::-1]
    backwards = [(n, name, p) for n, (name, p) in enumerate(backwards) if p.requires_grad]
    grid, by_message = getattr(model, "grid", None), {}
    for n, name, p in backwards:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if suspect < 0 and not local(p.grad).isfinite().all():
            suspect = n
        kind = holders(grid, name), is_split(p)
        by_message.setdefault(kind, []).append(local(p.grad))

    # First over the ranks with other tokens. FSDP has done so in backward.
    if not sharded(model) and dist.get_world_size() > 1:
        for (group, _), grads in by_message.items():
            _reduce_together(grads, group)

    # Then over the ranks that hold the same parameter and have terms of its gradient.
    # NUMERICS: in this order, because an all-reduce gives all of its ranks the same bits, but two
    # groups that sum the same numbers may add them in other orders, as a ring's order goes by the
    # place in the message. For the same reason split and whole parameters have messages of their
    # own: parts of a vocabulary may differ in length, and would move what follows. So replicas stay
    # bitwise alike. Pinned by
    # tests/test_parallel_faults.py::test_replicas_hold_the_same_bits_after_three_steps.
    for _, name, p in backwards:
        # COMM: by the parameter, not by its gradient, so that all ranks of a tensor group agree.
        # Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
        if getattr(p, "terms", False):
            total = local(p.grad)
            dist.all_reduce(total, group=p.device_mesh.get_group())
            p.grad = DTensor.from_local(total, p.device_mesh, p.placements, run_check=False)
        if name == TIED and getattr(model, "split_tie", False):
            # COMM: both ends of a pipeline hold the embedding; each has a term of its gradient.
            # Stages between them do not. Pinned by
            # tests/test_parallel.py::test_every_plan_is_one_process.
            dist.all_reduce(local(p.grad), group=grid.ends)
    return suspect


def is_split(p) -> bool:
    """Whether a rank holds only a part of a parameter."""
    return isinstance(p, DTensor) and any(not x.is_replicate() for x in p.placements)


def _reduce_together(grads, group):
    """Sum gradients over a group, up to 64 a message."""
    if dist.get_world_size(group) == 1:
        return
    for n in range(0, len(grads), 64):
        some = grads[n : n + 64]
        flat = torch.cat([g.reshape(-1) for g in some])
        dist.all_reduce(flat, group=group)
        for g, part in zip(some, flat.split([g.numel() for g in some]), strict=True):
            g.copy_(part.view_as(g))


def copies(p, ranks: int) -> int:
    """On how many of the `ranks` that hold parts of a parameter each of its entries is."""
    if not isinstance(p, DTensor):
        return ranks
    split = (n for n, x in enumerate(p.placements) if not (x.is_replicate() or x.is_partial()))
    return ranks // math.prod(p.device_mesh.size(n) for n in split)


def clip_grad_norm(model, max_norm: float):
    """(2) and (3): scale the reduced gradients in place; the norm before it, a 0-d tensor.

    Gradients of a norm that is not finite are left alone.
    """
    grid, named = getattr(model, "grid", None), dict(model.named_parameters())
    named = {name: p for name, p in named.items() if p.grad is not None}
    if grid is None:
        norm = full(torch.nn.utils.get_total_norm([p.grad for p in named.values()]))
    else:
        # NUMERICS: an entry that k ranks hold counts 1 / k on each, so that one sum over all ranks
        # counts every distinct entry once, and gives all ranks the same bits. Pinned by
        # tests/test_parallel.py::test_every_plan_is_one_process.
        ranks, tied = grid.plan.world // grid.plan.pp, TIED * getattr(model, "split_tie", False)
        squares = []
        for name, p in named.items():
            norm = torch.linalg.vector_norm(local(p.grad), dtype=torch.float64)
            squares.append(norm.square() / (copies(p, ranks) * (1 + (name == tied))))
        norm = torch.stack(squares).sum()
        dist.all_reduce(norm)
        norm = norm.sqrt()
    # NUMERICS: torch's own clip divides by norm + 1e-6; (3) does not.
    # Pinned by tests/test_ranks.py::test_the_clip_is_exactly_the_ratio_of_norms.
    if norm.isfinite() and norm > max_norm:
        for p in named.values():
            local(p.grad).mul_(max_norm / norm.item())
    return norm


def name_suspects(model, suspect: int) -> str:
    """Which rank had which non-finite gradient first, from every rank's `reduce_gradients`."""
    names = [name for name, _ in model.named_parameters()][::-1]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, names[suspect] if suspect >= 0 else None)
    named = [f"{name} on rank {rank}" for rank, name in enumerate(found) if name]
    return ", ".join(named) or "no single gradient: their norm overflowed"


def persistent_buffers(model) -> dict:
    """Name -> buffer, of those that belong to a model's state, such as the votes of a router."""
    found = {}
    for part in model.parts.values() if isinstance(model, Pipeline) else [model]:
        for prefix, module in part.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


@torch.no_grad()
def copy_weights(source, target) -> None:
    """target's parameters and buffers := source's, gathered if sharded, one at a time, in target's
    dtypes.

    Every rank of the plan calls it; of a pipeline, the stage that holds a tensor sends it.
    """
    held = dict(source.named_parameters()) | persistent_buffers(source)
    wanted = dict(target.named_parameters()) | persistent_buffers(target)

    # What all stages together hold, and who sends each tensor: the first stage that has it.
    holds, senders, group = {name: tuple(x.shape) for name, x in held.items()}, {}, None
    if isinstance(source, Pipeline):
        group = source.grid.dense["pp"].get_group()
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, holds, group=group)
        for stage in reversed(range(len(found))):
            holds |= found[stage]
            senders |= dict.fromkeys(found[stage], dist.get_global_rank(group, stage))

    # Compared before the first of them moves, and by what every rank knows now.
    wants = {name: tuple(x.shape) for name, x in wanted.items()}
    if holds != wants:
        differ = sorted(name for name, _ in holds.items() ^ wants.items())
        raise ValueError(f"models differ: {sorted(set(differ))}")

    for name, q in wanted.items():
        whole = full(held[name]) if name in held else torch.empty_like(q)
        if name in senders:
            # COMM: stages gather what they hold in one order, then its first holder sends the
            # whole. Pinned by tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
            whole = whole.contiguous().to(q.dtype)
            dist.broadcast(whole, src=senders[name], group=group)
        q.copy_(whole)


def lr_factor(
    step, /, *, warmup, total, decay="linear", decay_steps=None, min_ratio=0.0, first_step="nonzero"
) -> float:
    """The multiple of lr that step 0 .. total - 1 uses: warm-up, stable, decay.

    warmup steps rise to 1, the last decay_steps (None: all behind the warm-up) fall towards
    min_ratio: "linear" 1 - d, "sqrt" 1 - sqrt(d), "cosine" (1 + cos(pi d)) / 2, d the share of them
    that is done; "constant" does not fall. first_step "nonzero": step 0 uses 1 / warmup, as in
    torchtitan; "zero": 0, as in Hugging Face and verl. For warmup 2, total 10, linear:

        nonzero  .5  1  1  .875  .75  .625  .5  .375  .25  .125
        zero      0 .5  1  .875  .75  .625  .5  .375  .25  .125
    """
    falls = {"constant": lambda d: 1.0, "linear": lambda d: 1 - d,
             "sqrt": lambda d: 1 - math.sqrt(d),
             "cosine": lambda d: (1 + math.cos(math.pi * d)) / 2}  # fmt: skip
    if decay not in falls or first_step not in ("nonzero", "zero"):
        raise ValueError(
            f'decay must be one of {", ".join(falls)} and first_step "nonzero" or "zero"; came '
            f"{decay!r} and {first_step!r}")  # fmt: skip
    decay_steps = total - warmup if decay_steps is None else decay_steps
    if not (0 <= warmup <= total and 0 <= decay_steps <= total - warmup and 0 <= min_ratio <= 1):
        raise ValueError(
            f"warm-up {warmup} and decay {decay_steps} must fit into {total} steps, and min_ratio "
            f"{min_ratio} between 0 and 1")  # fmt: skip
    if step < warmup:
        return (step + (first_step == "nonzero")) / warmup
    done = max(0, step - (total - decay_steps)) / max(decay_steps, 1)
    return min_ratio + (1 - min_ratio) * falls[decay](min(done, 1.0))


class LocalOptimizer:
    """A torch optimiser on the plain tensors that are on this rank: what DTensors and shards hold.

    make: from a list of parameters to the optimiser. zero: ZeRO-1, each of the ranks with the same
    weights updates a stretch of their rows, holds its state alone, and sends it to the others.
    after_step: called with the model once its weights are new; Float8's scales would go there.
    """

    def __init__(self, model, make, *, zero=False, after_step=None):
        # Ranks that shard the weights too hold other rows each: sending them around would overwrite
        # one rank's rows with another's.
        if zero and (getattr(model, "mode", None) != "zero1" or sharded(model)):
            came = "fsdp" if sharded(model) else getattr(model, "mode", None)
            raise ValueError(
                f'zero=True shares out the states of whole weights: it needs a model of '
                f'parallelize(.., mode="zero1"); came mode={came!r}')  # fmt: skip
        self.model, self.zero, self.after_step = model, zero, after_step
        self.mine = {}  # name -> the part of the parameter that is updated here; shares its memory
        for name, p in model.named_parameters():
            part = self._part(name, local(p.detach()))
            self.mine[name] = torch.nn.Parameter(part, requires_grad=p.requires_grad)
        self.inner = make([*self.mine.values()])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _part(self, name, x):
        if not self.zero:
            return x
        group = holders(self.model.grid, name)
        parts, rank = x.chunk(dist.get_world_size(group)), dist.get_rank(group)
        return parts[rank] if rank < len(parts) else x[:0]

    @torch.no_grad()
    def step(self) -> None:
        """One update from .grad; a parameter without one keeps its value."""
        named = dict(self.model.named_parameters())
        for name, part in self.mine.items():
            grad = named[name].grad
            part.grad = None if grad is None else self._part(name, local(grad))
        self.inner.step()
        for name, p in named.items() if self.zero else ():
            group = holders(self.model.grid, name)
            whole = local(p.detach())
            # COMM: rows are padded to equal stretches, so all send alike, also one without a row.
            # Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
            rows = -(-len(whole) // dist.get_world_size(group))
            sent = whole.new_zeros(rows, *whole.shape[1:])
            sent[: len(self.mine[name])] = self.mine[name]
            parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, sent, group=group)
            whole.copy_(torch.cat(parts)[: len(whole)])
        if self.after_step is not None:
            self.after_step(self.model)

    def zero_grad(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def states(self, name, p) -> dict:
        """The state of a parameter, sharded as it is, as DTensors that share its memory."""
        state = adamw_state(self.state, self.mine[name])
        return {key: self._sharded(name, p, x) if x.dim() else x for key, x in state.items()}

    def _sharded(self, name, p, x):
        mesh, placements = (p.device_mesh, p.placements) if isinstance(p, DTensor) else (None, ())
        if self.zero:
            names, grid = mesh.mesh_dim_names if mesh is not None else (), self.model.grid
            # Rows were split by the mesh first, and then along the copies: the other way round than
            # the order of the dimensions says.
            factor = math.prod(mesh.size(n) for n, s in enumerate(placements) if s == Shard(0))
            first = _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)
            placements, expert = (first, *placements), ".mlp.experts." in name
            mesh = grid.experts["expert-dp", *names] if expert else grid.dense["fsdp", *names]
        if mesh is None:
            return x
        whole = dict(shape=p.shape, stride=p.stride())
        return DTensor.from_local(x, mesh, placements, run_check=False, **whole)


def adamw_state(states, p) -> dict:
    """AdamW's state of a parameter, made as before its first step if it is absent."""
    if not states[p]:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        states[p] |= dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return states[p]


def training_tensors(model, optimizer) -> dict:
    """Every tensor that a resumed run needs, under flat names; AdamW's states made if absent.

    model.NAME and optimizer.NAME.KEY of a parameter, buffer.NAME of a persistent buffer.
    """
    reshard(model)
    tensors, own = {}, isinstance(optimizer, LocalOptimizer)
    for name, p in model.named_parameters():
        state = optimizer.states(name, p) if own else adamw_state(optimizer.state, p)
        tensors[f"model.{name}"] = p.detach()
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    tensors |= {f"buffer.{name}": buffer for name, buffer in persistent_buffers(model).items()}
    return tensors


def replica_difference(model, optimizer=None) -> str | None:
    """Collective. The ranks and the first tensor at which replicas differ, None if none does.

    Two ranks that hold the same entries of the same parameter, of its optimiser's state or of a
    buffer must hold the same bits, whatever the plan. The text is the same on every rank. Without a
    plan all ranks are replicas but for what a DTensor says of itself. optimizer: a LocalOptimizer
    or torch's; without one only the model is compared.
    """
    reshard(model)
    mine = _held_bits(model, optimizer)
    tables = [None] * dist.get_world_size()
    # COMM: one gather of 8 bytes and a name a tensor; every rank then compares all tables, so that
    # all say the same. Pinned by tests/test_parallel_faults.py::test_a_flipped_bit_is_named.
    dist.all_gather_object(tables, mine)

    differing, first = set(), None
    for held in dict.fromkeys(key for table in tables for key in table):
        by_digest = {}
        for rank, table in enumerate(tables):
            if held in table:
                by_digest.setdefault(table[held], []).append(rank)
        if len(by_digest) > 1:
            first = first or (held, by_digest)
            differing.add(held)
    if first is None:
        return None

    # Nobody can say which of two replicas is right; of several, the largest set comes first.
    (name, _), by_digest = first
    ranks = sorted(by_digest.values(), key=lambda ranks: (-len(ranks), ranks))
    sets = " / ".join(f"rank{'s' * (len(some) > 1)} {' '.join(map(str, some))}" for some in ranks)
    others = {name for name, _ in differing} - {name}
    more = f"; {len(others)} more tensors differ" if others else ""
    return f"replicas differ in {name}: {sets} hold other bits{more}"


def _held_bits(model, optimizer) -> dict:
    """(name, which part of it) -> digest, of all that this rank holds."""
    own = isinstance(optimizer, LocalOptimizer)
    table = {}

    def enter(name, tensor):
        # A DTensor tells where its part lies in the whole, as it does for a checkpoint; a plain
        # tensor is whole.
        part = "whole"
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            part = f"{tuple(chunk.offsets)} + {tuple(chunk.sizes)}"
        flat = local(tensor.detach()).contiguous().reshape(-1)
        bits = flat.view(torch.uint8).cpu().numpy()
        table[name, part] = hashlib.blake2b(bits, digest_size=8).digest()

    for name, p in model.named_parameters():
        enter(name, p)
        if optimizer is None:
            continue
        # Read with get: asking a torch optimiser for the state of a parameter would make one.
        state = optimizer.state.get(optimizer.mine[name] if own else p, {})
        for key, value in state.items():
            if torch.is_tensor(value):
                sharded_too = own and value.dim() > 0
                value = optimizer._sharded(name, p, value) if sharded_too else value
                enter(f"{name} ({key})", value)
        rest = {key: None if torch.is_tensor(x) else repr(x) for key, x in state.items()}
        text = repr(sorted(rest.items())).encode()
        table[f"{name} (names of its states)", ""] = hashlib.blake2b(text, digest_size=8).digest()
    for name, buffer in persistent_buffers(model).items():
        enter(name, buffer)
    return table


# 6. Checkpoints ------------------------------------------------------------------------------


def write_checkpoint(path, tensors, state) -> None:
    """Collective. `tensors` by DCP and `state` as JSON in the directory `path`, all or nothing:
    a temporary directory, renamed once every byte and its checksum are on disk."""
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")

    def require_json():
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"checkpoint {path}: its state is no finite JSON: {error}") from error

    agree(require_json)  # what could be written and never read again

    def start():
        for stale in (partial, path):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish():
        files = {f.name: [f.stat().st_size, _crc32(f)] for f in sorted(partial.iterdir())}
        with (partial / "state.json").open("w") as file:
            json.dump(sealed(state | {"files": files}), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

    try:
        agree(start)
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial))
        agree(finish)
    except (dcp.CheckpointException, ValueError) as error:  # raised on every rank, whichever failed
        failures = getattr(error, "failures", {0: [error]})
        reason = "; ".join(f"rank {rank}: {e[0]}" for rank, e in failures.items())
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # what was cut short takes room
        raise OSError(
            f"checkpoint {path} not written ({reason}); older ones are whole: make room or mend "
            f"the directory, then go on with --resume --out {path.parent}"
        ) from error


def sealed(state) -> dict:
    """A checkpoint's JSON state, which holds the checksums of its other files, with its own."""
    rest = {key: value for key, value in state.items() if key != "seal"}
    return rest | {"seal": zlib.crc32(json.dumps(rest).encode())}


def _crc32(path):
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def verify_checkpoint(path, *, counts=()) -> dict:
    """The JSON state of a checkpoint that is whole and undamaged, else ValueError.

    Its files have their size and checksum, its table of contents describes them, and its numbers
    are finite. counts: names in the state that must be integers of 0 or more.
    """
    return _inspect(path, counts)[0]


def _inspect(path, counts):
    """A checkpoint's JSON state and its table of contents, both verified."""
    state, sizes = _undamaged(path)
    for name in counts:
        value = state.get(name)
        if type(value) is not int or value < 0:  # True is an int, and no count
            raise ValueError(
                f"checkpoint {path}: {name} in state.json must be an integer of 0 or more; came "
                f"{value!r:.80}")  # fmt: skip
    return state, read_table(path, sizes)


def _undamaged(path):
    """A checkpoint's JSON state, and {name: bytes} of its files, which have their checksums."""
    path = Path(path)
    try:
        state, files, damaged = _read_state(path / "state.json"), {}, []
        if not isinstance(state, dict) or state != sealed(state):
            damaged.append("state.json")
        else:
            files = _listed_files(path, state)
        for name, (size, crc) in files.items():
            if (path / name).stat().st_size != size or _crc32(path / name) != crc:
                damaged.append(name)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"checkpoint {path}: state.json, or a file that it lists, is missing or unreadable: "
            f"{error}"
        ) from error
    if damaged:
        names = ", ".join(damaged)
        raise ValueError(f"checkpoint {path}: {names} is damaged (size or checksum differs)")
    return state, {name: size for name, (size, _) in files.items()}


def _read_state(file):
    """What state.json says. Numbers that are not finite are refused: JSON has no word for them."""

    def refuse(constant):
        raise ValueError(f"{constant} is no number")

    def finite(digits):
        number = float(digits)
        return number if math.isfinite(number) else refuse(digits)

    return json.loads(file.read_text(), parse_constant=refuse, parse_float=finite)


def _listed_files(path, state) -> dict:
    """{name: [bytes, checksum]} of the files that a state lists, all of them in its directory."""
    listed = state.get("files")
    if not isinstance(listed, dict) or ".metadata" not in listed:
        raise ValueError("state.json lists no .metadata among its files")
    for name, entry in listed.items():
        if not is_plain(name):
            raise ValueError(f"state.json lists {name!r:.80}, which is no file of the directory")
        if not isinstance(entry, list) or [type(number) for number in entry] != [int, int]:
            raise ValueError(f"state.json has no size and checksum of {name}")
        # A pipe or a device has no size, and reading it might never end.
        if (path / name).exists() and not (path / name).is_file():
            raise ValueError(f"{name} is no file")
    return listed


def is_plain(name) -> bool:
    """Whether a name is that of a file in a directory, and of none elsewhere."""
    if not isinstance(name, str) or name in (".", ".."):
        return False
    return re.fullmatch(r"[\w.-]+", name) is not None


# DCP pickles its table of contents. A pickle is a program for a small stack machine, whose
# instructions can import any object by name, call it, and set its attributes. So it is not run as
# Python would: `_unpickle` is that machine with the instructions that DCP's table needs, in which a
# name stays text, a call and an object stay a record of what was asked for, and nothing of Python's
# is ever looked up, called or changed. `read_table` makes DCP's own objects from such records, each
# value of the type and in the range that it must have.

META = "torch.distributed.checkpoint.metadata."
STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
DTYPES = {f"torch.{name}": getattr(torch, name) for name in (
    "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
)}  # fmt: skip
STRIDED = "torch.serialization._get_layout"
NAMES = {
    "torch.Size", *DTYPES, STRIDED, STORED, f"{META}Metadata", f"{META}MetadataIndex",
    f"{META}TensorStorageMetadata", f"{META}TensorProperties", f"{META}ChunkStorageMetadata",
    f"{META}StorageMeta", f"{META}_MEM_FORMAT_ENCODING", "pathlib.PosixPath",
    "pathlib.PurePosixPath", "pathlib.Path", "pathlib.WindowsPath",
}  # fmt: skip


class _Record:
    """An object that a pickle asks for: a name, what it would be called with, and its state."""

    def __init__(self, name, arguments):
        self.name, self.arguments, self.state = name, arguments, {}


def _unpickle(raw):
    """What a pickle of DCP's table says, as dicts, lists, tuples, texts, numbers and records."""
    stack, marks, memo = [], [], {}

    def since_mark():
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def fill(table, pairs):
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Other keys would be hashed, and a deep tuple's hash exhausts the C stack.
            if not isinstance(key, str | _Record):
                raise ValueError(f"a {type(key).__name__} as a key")
            table[key] = value

    for opcode, value, _ in pickletools.genops(raw):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            # Constants, and things already read.
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                stack.append(value)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(dict(NONE=None, NEWTRUE=True, NEWFALSE=False)[opcode.name])
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            # Containers.
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = since_mark()
                stack[-1].extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                pair = stack[-2:]
                del stack[-2:]
                fill(stack[-1], pair)
            case "SETITEMS":
                pairs = since_mark()
                fill(stack[-1], pairs)
            # Names, calls, objects and their states: noted, not done.
            case "STACK_GLOBAL":
                module, name = stack[-2:]
                if not (isinstance(module, str) and isinstance(name, str)):
                    raise ValueError("it asks for an object without a name")
                if f"{module}.{name}" not in NAMES:
                    raise ValueError(f"it asks for {module:.60}.{name:.60}: not on the allow-list")
                stack[-2:] = [f"{module}.{name}"]
            case "REDUCE" | "NEWOBJ":
                stack[-2:] = [_Record(*stack[-2:])]
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case other:
                raise ValueError(f"instruction {other} is not on the allow-list")


def _fields(record, name, *keys):
    """Values of the state of a record that must be an object of a class."""
    if not (isinstance(record, _Record) and record.name == name and isinstance(record.state, dict)):
        raise ValueError(f"something else where a {name.rpartition('.')[2]} belongs")
    return [record.state.get(key) for key in keys]


def _integers(values):
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("sizes and offsets must be integers of 0 or more")
    return values


def _size(record):
    _fields(record, "torch.Size")
    (sizes,) = record.arguments
    if not isinstance(sizes, tuple):
        raise ValueError("a torch.Size of something else than a tuple")
    return torch.Size(_integers(sizes))


def _tensor_entry(name, record) -> TensorStorageMetadata:
    """A tensor's dtype and size, and the chunks that it is cut into, which tile it."""
    if not (isinstance(record, _Record) and record.name == f"{META}TensorStorageMetadata"):
        raise ValueError(f"entry {name:.80} is no tensor; refusing to unpickle it")
    properties, size, chunks = _fields(record, record.name, "properties", "size", "chunks")
    if not (isinstance(properties, _Record) and properties.name == f"{META}TensorProperties"):
        raise ValueError(f"{name:.80} has no properties")
    dtype, layout, *_ = properties.state
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name:.80} has no dtype of {', '.join(DTYPES)}")
    strided = isinstance(layout, _Record) and layout.name == STRIDED
    if not (strided and layout.arguments == ("torch.strided",)):
        raise ValueError(f"{name:.80} is no strided tensor")
    size = _size(size)
    pairs = [_fields(chunk, f"{META}ChunkStorageMetadata", "offsets", "sizes") for chunk in chunks]
    chunks = [ChunkStorageMetadata(_size(offsets), _size(sizes)) for offsets, sizes in pairs]
    _require_tiled(name, size, chunks)
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[dtype]), size, chunks)


def _require_tiled(name, size, chunks):
    """Every entry of a tensor is in exactly one chunk."""
    for chunk in chunks:
        if len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size):
            raise ValueError(f"a chunk of {name:.80} has another number of dimensions")

    # Inside the tensor, with as many entries as it has, and no two over one entry.
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    ends = [[o + s for o, s in zip(c.offsets, c.sizes, strict=True)] for c in filled]
    inside = all(end <= n for row in ends for end, n in zip(row, size, strict=True))
    count = sum(math.prod(chunk.sizes) for chunk in filled)
    if not inside or count != math.prod(size):
        raise ValueError(f"the chunks of {name:.80} do not tile it")
    begin_CD = np.array([chunk.offsets for chunk in filled], dtype=np.int64)
    end_CD = np.array(ends, dtype=np.int64)
    for n in range(len(filled) - 1):
        meets_cD = (begin_CD[n + 1 :] < end_CD[n]) & (begin_CD[n] < end_CD[n + 1 :])
        if meets_cD.all(axis=1).any():
            raise ValueError(f"chunks of {name:.80} overlap")


class Stored(NamedTuple):
    """Where the bytes of a chunk are."""

    file: str
    offset: int
    length: int


def _places(record, entries, sizes) -> dict:
    """{index of a chunk: Stored}: every chunk once, the bytes of every file end to end."""
    if not isinstance(record, dict):
        raise ValueError("it does not say where its chunks are")
    places = {}
    for index, info in record.items():
        name, offset = _fields(index, f"{META}MetadataIndex", "fqn", "offset")
        file, start, length = _fields(info, STORED, "relative_path", "offset", "length")
        if not is_plain(file) or file not in sizes:
            named = f"{file:.80}" if isinstance(file, str) else type(file).__name__
            raise ValueError(f"it names the file {named}, which state.json does not list")
        if not isinstance(name, str) or info.state.get("transform_descriptors"):
            raise ValueError("a chunk without a name, or one that would have to be decoded")
        where = MetadataIndex(name, _size(offset))
        if where in places:
            raise ValueError(f"a chunk of {name:.80} is stored twice")
        places[where] = Stored(file, *_integers((start, length)))

    # DCP may leave out a chunk without entries, such as the rows of a rank that has none.
    chunks = {
        MetadataIndex(name, chunk.offsets): math.prod(chunk.sizes)
        for name, entry in entries.items()
        for chunk in entry.chunks
    }
    needed = {index for index, count in chunks.items() if count}
    if not needed <= places.keys() <= chunks.keys():
        raise ValueError("the chunks of its tensors are not those that it stores")

    # Bytes that two chunks shared would be one tensor's, taken for another's.
    ends = dict.fromkeys((place.file for place in places.values()), 0)
    for file, start, length in sorted(places.values()):
        if start != ends[file]:
            raise ValueError(f"the chunks in {file} do not lie end to end")
        ends[file] = start + length
    if any(end != sizes[file] for file, end in ends.items()):
        raise ValueError("the chunks in a file are not all of it")
    return places


def read_table(path, sizes) -> Metadata:
    """DCP's table of contents of a checkpoint, made of verified values, else ValueError.

    sizes: {name: bytes} of the checkpoint's files; the table may name no others.
    """
    try:
        record = _unpickle((Path(path) / ".metadata").read_bytes())
        named, stored = _fields(record, f"{META}Metadata", "state_dict_metadata", "storage_data")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named):
            raise ValueError("it does not say which tensors there are")
        entries = {name: _tensor_entry(name, entry) for name, entry in named.items()}
        return Metadata(entries, storage_data=_places(stored, entries, sizes))
    except Exception as error:  # a damaged program may fail anywhere, and in any way
        raise ValueError(
            f"checkpoint {path}: .metadata is damaged or not of this program: "
            f"{type(error).__name__}: {error}") from error  # fmt: skip


class SafeReader(dcp.FileSystemReader):
    """A DCP reader of a verified table: tensors only (`weights_only`), each as the table has it."""

    def __init__(self, path, table):
        super().__init__(path)
        self.table = table
        self.expected = {
            MetadataIndex(name, chunk.offsets): (entry.properties.dtype, chunk.sizes)
            for name, entry in table.state_dict_metadata.items()
            for chunk in entry.chunks
        }

    # Without keyword arguments: with them DCP, where this fails on one rank, tries again for a
    # table of that rank, and if it finds one leaves the others waiting in a collective.
    def read_metadata(self):
        return self.table

    def read_data(self, plan, planner):
        try:
            for item in plan.items:
                self._read(item, planner)
        except Exception as error:  # of any kind, and DCP pickles what is raised to tell the others
            text = str(error).splitlines()[0] if str(error) else ""
            raise ValueError(f"{type(error).__name__}: {text}") from error
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, item, planner):
        """One stored chunk, or a part of it, into the part of a tensor that wants it."""
        index = item.storage_index
        place = self.table.storage_data[index]
        with (Path(self.path) / place.file).open("rb") as file:
            stored = self._slice_file(file, place)
            saved = torch.load(stored, map_location="cpu", weights_only=True)
        tensor = isinstance(saved, torch.Tensor) and saved.layout == torch.strided
        if not tensor or (saved.dtype, saved.shape) != self.expected[index]:
            raise ValueError(f"{place.file}: {index.fqn} is not stored as the table says")
        target = planner.resolve_tensor(item).detach()
        for dimension, start in enumerate(item.storage_offsets):
            saved = saved.narrow(dimension, start, item.lengths[dimension])
        target.copy_(saved)
        planner.commit_tensor(item, target)


def read_checkpoint(path, tensors, *, counts=()) -> dict:
    """Collective. Fill `tensors` in place, whatever their sharding, from a verified checkpoint;
    returns its JSON state, see `verify_checkpoint` for counts.

    Rank 0 reads the table of contents and gives it to all, so that a bad one is refused by all.
    What goes wrong on any rank is a ValueError on every rank, and leaves `tensors` half filled.
    """
    mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes = [mine] * dist.get_world_size()
    dist.all_gather_object(shapes, mine)  # a pipeline's ranks hold different parameters
    wanted = {name: shape for some in shapes for name, shape in some.items()}

    def inspect():
        state, table = _inspect(path, counts)
        saved = {name: tuple(entry.size) for name, entry in table.state_dict_metadata.items()}
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f"checkpoint {path} is of another model: {name} is {saved.get(name, 'absent')} "
                    f"there and {wanted.get(name, 'absent')} here")  # fmt: skip
        return state, table

    state, table = agree(inspect)
    try:
        dcp.load(tensors, storage_reader=SafeReader(path, table))
    except dcp.CheckpointException as error:  # raised on every rank, whichever failed
        reason = "; ".join(f"rank {rank}: {e[0]}" for rank, e in sorted(error.failures.items()))
        raise ValueError(f"checkpoint {path} cannot be read: {reason}") from error
    return state


def checkpoints(directory):
    """The step-NNNNNNNN directories, oldest first."""
    return sorted(Path(directory).glob("step-" + "[0-9]" * 8))


def superseded(directory, step, keep):
    """Checkpoints to delete once `step` is saved: all but the newest `keep` up to it, and all later
    ones, which a resume from here has found damaged."""
    found, own = checkpoints(directory), Path(directory) / f"step-{step:08d}"
    return [p for p in found if p <= own][:-keep] + [p for p in found if p > own]


def newest_checkpoint(directory):
    """The newest undamaged checkpoint; damaged ones are named and passed over. None if there is
    none at all; if none is whole, ValueError, so that a run is not begun again by mistake.

    A crash or a disk does not leave a right seal on wrong contents. Such a checkpoint was made so;
    it is not passed over but refused, when `read_checkpoint` reads it.
    """
    found = checkpoints(directory)
    for path in reversed(found):
        try:
            _undamaged(path)
            return str(path)
        except ValueError as error:
            print(f"warning: {error}; trying an older one", file=sys.stderr)
    if found:
        raise ValueError(
            f"no checkpoint in {directory} is whole ({', '.join(path.name for path in found)}): "
            f"put a copy of one back, or begin again with --overwrite"
        )
    return None


# 7. check ------------------------------------------------------------------------------------


class _Toy(torch.nn.Module):
    """The shape that `shard` expects: `.model.layers` and a `.hidden`."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))
        self.head = torch.nn.Linear(5, 3)

    def hidden(self, x_BM):
        for layer in self.model.layers:
            x_BM = torch.tanh(layer(x_BM))
        return self.head(x_BM)


ROWS, LR, CLIP = 7, 0.5, (0.1, 1e9)  # rows of data; the first step clips, the second does not


def _toy():
    torch.manual_seed(0)
    return _Toy().double(), torch.randn(ROWS, 5).double()


def definition():
    """Norms and weights after the two steps in one process, (1)-(3) written out for plain SGD."""
    model, x_BM = _toy()
    norms = []
    for max_norm in CLIP:
        loss = model.hidden(x_BM).square().sum() / ROWS
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(sum((g * g).sum() for g in grads).sqrt())
        for p, g in zip(model.parameters(), grads):
            p.data -= LR * g * min(1.0, max_norm / norms[-1])
    return torch.cat([torch.stack(norms), *(p.detach().flatten() for p in model.parameters())])


def _toy_step(rank, world, mode, store, out):
    """The same by this file, on rows rank, rank + world, ..; rank 0 leaves the result in `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model, x_BM = _toy()
    if mode == "fsdp":
        shard(model)
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=LR), []
    for max_norm in CLIP:
        (model.hidden(x_BM[rank::world]).square().sum() / ROWS).backward()
        reduce_gradients(model)
        norms.append(clip_grad_norm(model, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    result = [torch.stack(norms), *(full(p.detach()).flatten() for p in model.parameters())]
    if rank == 0:
        torch.save(torch.cat(result), out)
    dist.barrier()
    dist.destroy_process_group()


def check() -> bool:
    """Norms and weights after two steps: every mode and number of ranks against `definition`."""
    results, run = {}, torch.multiprocessing.start_processes
    with tempfile.TemporaryDirectory() as folder:
        for mode, world in itertools.product(("ddp", "fsdp"), (1, 2, 3)):
            store, out = f"{folder}/store-{mode}-{world}", f"{folder}/out-{mode}-{world}"
            run(_toy_step, (world, mode, store, out), nprocs=world, start_method="fork")
            results[f"{mode}, {world} ranks"] = torch.load(out, weights_only=True)
    truth = definition()  # behind the forks: autograd's threads do not survive one
    rows = {}  # name -> the relative error, and what it may be
    for name, result in results.items():
        rows[name] = ((result - truth).abs() / truth.abs().clamp(min=1e-3)).max().item(), 1e-12
    try:
        rows |= {name: (error, 1e-10) for name, error in _measure().matrix().items()}
    except ImportError as missing:
        print(f"every other plan: SKIP ({missing}); it would compare them with one process")
    for name, (error, budget) in rows.items():
        print(f"{name:36} {error:.1e}  {'ok' if error <= budget else 'FAILED'}")
    ok = all(error <= budget for error, budget in rows.values())
    worst = max(error for error, _ in rows.values())
    print(json.dumps({"check": "parallel", "ok": ok, "max_error": worst}))
    return ok


def _measure():
    """tests/measure_parallel.py, which needs models.py and ring_attention.py besides."""
    sys.path.append(str(Path(__file__).resolve().parent / "tests"))
    return __import__("measure_parallel")


def main(argv) -> int:
    """check is here; plan and bench are in tests/measure_parallel.py. The exit code."""
    if argv == ["check"]:
        return 0 if check() else 1
    if argv and argv[0] in ("plan", "bench"):
        return _measure().main(argv)
    print("usage: python parallel.py check | plan STRING | bench", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

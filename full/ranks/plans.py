"""Read plan strings, refuse those that do not fit, and make the groups and meshes of a plan.

LETTERS says what each letter splits and sends. Tensor parallelism is Megatron's (arXiv:1909.08053,
arXiv:2205.05198), experts are GShard's and folded (arXiv:2006.16668, arXiv:2504.14960).
"""

import dataclasses
import math
import re
import textwrap
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

import parallel
from full.ranks.joining import errors_on_all_ranks, wait_for_all


class Letter(NamedTuple):
    """What one letter of a plan means. See LETTERS."""

    axis: str  # the field of `Plan` that holds its degree
    splits: str
    forward: str  # what a rank sends
    backward: str
    gradients: str  # over which ranks they are summed once a step


# Schedules of a pipeline; places.py runs them.
SCHEDULES = {"1f1b": (None, 1),  # torch's class, and how many stages a rank has
             "interleaved1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
             "zbv": (pipelining.ScheduleZBVZeroBubble, 2)}  # fmt: skip


# What each letter means; `Plan` has a field for each. The order is the order of the grids,
# outermost first: p d c t of a stage's ranks, and e and ffn's t of the same ranks for experts. SP
# is sequence parallelism, which is on by default.
LETTERS = {
    "p": Letter("pp", "layers", "states to the next stage", "gradients of the states, back",
                "of a tied embedding: over the first and the last stage"),
    "d": Letter("dp", "rows of the batch", "ddp, zero1: nothing. fsdp: a layer's all-gather",
                "fsdp: an all-gather and a reduce-scatter of a layer",
                "over d and c; fsdp's backward has summed them"),
    "c": Letter("cp", "tokens of each sequence", "what the attention sends",
                "what the attention sends back", "over d and c"),
    "t": Letter("tp", "heads, inner widths, vocabulary; with SP tokens in between",
                "a layer: 2 all-gathers, 2 reduce-scatters; without SP 2 all-reduces. Ends: a "
                "reduce-scatter after the embedding, an all-gather of the last states, 2 "
                "all-reduces of (N,) numbers for log-probs",
                "the same for a layer. Ends: an all-gather, an all-reduce of the last states",
                "of norms, routers and biases after g: over t too"),
    "e": Letter("ep", "experts of a layer", "3 all-to-all: counts, rows, rows back",
                "2 all-to-all", "of experts: over the d c t / (e etp) ranks with the same ones"),
    "ffn's t": Letter("etp", "the inner width of each expert", "as t, around the experts",
                      "as t, around the experts", "of routers: over t too"),
}  # fmt: skip


def letters_table() -> str:
    """Return LETTERS as text: what each letter splits, sends and sums."""
    lines = []
    for name, letter in LETTERS.items():
        lines.append(f"  {name:9}{letter.splits}")
        for field in ("forward", "backward", "gradients"):
            text = f"{field + ':':11}{getattr(letter, field)}"
            indents = dict(initial_indent=" " * 11, subsequent_indent=" " * 22)
            lines.append(textwrap.fill(text, 98, **indents))
    return "\n".join(lines)


DEGREES = "(?:[a-z][1-9][0-9]*)+"  # one or more letters, each with a number of 1 or more

PLAN = rf"""
    (?P<flat> {DEGREES} )
    | (?P<open> \( )? attn: (?P<attn> {DEGREES} ) \| ffn: (?P<ffn> {DEGREES} ) (?(open) \) )
"""  # for re.VERBOSE


@dataclasses.dataclass(frozen=True)
class Plan:
    """Define how many ranks each kind of parallelism uses, and which ranks form its groups.

        d2t2            4 ranks: data 2, tensor 2             p2d2t2        8 ranks: pipeline 2 too
        d2t2e4          the same 4 ranks, experts over all    d2c2          data 2, context 2
        (attn:d2t2|ffn:e2t2)   expert tensor degree 2, on the tensor ranks

    LETTERS says what each letter does. A letter appears at most once, and a missing one means 1.
    The ranks are a grid (p, d, c, t), as in `parallel.Grid`. For experts, the d c t ranks of a
    stage are numbered again as a grid (expert-dp, ep, etp), where etp, ffn's t, is 1 or t.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def parse(cls, text) -> "Plan":
        """Read a plan from a string, or raise ValueError."""
        found = re.fullmatch(PLAN, text, re.VERBOSE) if isinstance(text, str) else None
        if found is None:
            raise ValueError(
                f"expected a plan such as d2t2 or (attn:d2t2|ffn:e2t2), got {text!r}. "
                f"Each letter has a number of 1 or more")  # fmt: skip

        def degrees(part, letters):
            pairs = re.findall("([a-z])([0-9]+)", part)
            numbers = {letter: int(number) for letter, number in pairs}
            if len(numbers) < len(pairs) or not numbers.keys() <= {*letters}:
                raise ValueError(f"plan {text!r}: expected letters of {' '.join(letters)}, each at "
                                 f"most once, got {part!r}")  # fmt: skip
            return numbers

        ffn = {}
        if found["flat"]:
            attn = degrees(found["flat"], "dtpce")
        else:
            attn = degrees(found["attn"], "dtpc")
            ffn = degrees(found["ffn"], "detp")
            attn |= {"e": ffn.get("e", 1), "ffn's t": ffn.get("t", 1)}
        axes = {LETTERS[letter].axis: number for letter, number in attn.items()}
        plan = cls(**axes)

        # Experts use the ranks of attention, in another grid. So d and p of ffn follow from the
        # other degrees: they may be left out, and must agree where they are given. For example, in
        # (attn:d4t2|ffn:d2e2t2) a copy of the experts takes e t = 4 of 8 ranks, so ffn has d2.
        for letter, degree in (("d", plan.edp), ("p", plan.pp)):
            if ffn.get(letter, degree) != degree:
                raise ValueError(f"plan {text!r}: expected {letter}{degree} in ffn, as it follows "
                                 f"from attn, got {letter}{ffn[letter]}. Leave it out")  # fmt: skip
        return plan

    def __post_init__(self):
        if self.etp not in (1, self.tp):
            raise ValueError(
                f"plan {self}: expected ffn's t to be 1 or attn's t = {self.tp}, got {self.etp}")
        # A stage consists of whole groups of experts, each of e times ffn's t ranks.
        product = "d * c * t" if self.etp == 1 else "d * c"
        ranks = self.dp * self.cp * self.tp // self.etp
        if ranks % self.ep:
            enough = dataclasses.replace(self, dp=math.lcm(ranks, self.ep) // ranks * self.dp)
            raise ValueError(f"plan {self}: expected e to divide {product} = {ranks}, got "
                             f"{self.ep}. Experts add no ranks: {enough} has {enough.world}")

    @property
    def world(self) -> int:
        """The number of ranks. Experts add none: they are distributed over the existing ones."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.world // (self.pp * self.ep * self.etp)

    @property
    def for_sampling(self) -> "Plan":
        """Return the plan of the sampler of a trainer with this plan.

        The sampler has the trainer's t and e. All other ranks hold replicas: under p2d2t2 each pair
        of t ranks has all layers, d4t2. Tokens are decoded one after the other, so ranks with other
        layers, or with other tokens of a sequence, would only wait for each other.
        """
        return dataclasses.replace(self, dp=self.world // self.tp, pp=1, cp=1)

    def require_fits(self, *, world=None, config=None, shard=None) -> None:
        """Raise ValueError unless the plan fits the ranks and the model that are given.

        world: int. The number of ranks that were started.
        shard: int. HSDP: how many of the d ranks share the weights.
        config: ModelConfig.
        """
        for is_wrong, text in (
            (world not in (None, self.world),
             f"expected p * d * c * t = {self.world} ranks, got {world}. Start {self.world} ranks, "
             f"or change the plan"),
            (shard is not None and self.dp % shard,
             f"{shard} ranks that shard must divide d = {self.dp}"),
            (config is not None and not config.sparse_layers and self.ep * self.etp > 1,
             "expected a model with experts, got a dense one. Leave e and ffn out"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(f"plan {self}: {text}")

        # Each degree splits something into equal parts.
        for letters, degree, what, size in (
            ("t", self.tp, "query heads", "num_attention_heads"),
            ("t", self.tp, "key heads", "num_key_value_heads"),
            ("t", self.tp, "key heads of recurrent layers", "linear_num_key_heads"),
            ("t", self.tp, "intermediate_size", "intermediate_size"),
            ("e", self.ep, "experts", "num_experts"),
            ("ffn's t", self.etp, "moe_intermediate_size", "moe_intermediate_size"),
        ):
            size = getattr(config, size, 0)  # models.ModelConfig has no recurrent layers
            if degree > 1 and size % degree:
                raise ValueError(f"plan {self}: expected {what} divisible by {letters} = {degree}, "
                                 f"got {size}")  # fmt: skip

    def __str__(self):
        """Return the shortest string that parses to this plan."""
        text = f"p{self.pp}d{self.dp}t{self.tp}c{self.cp}"
        if self.etp > 1:
            text = f"(attn:{text}|ffn:p{self.pp}e{self.ep}t{self.etp})"
        else:
            text = f"{text}e{self.ep}"
        return re.sub("[a-z]1(?![0-9])", "", text) or "d1"  # degrees of 1 are left out


class Grid(parallel.Grid):
    """The groups of `parallel.Grid`, and meshes: grids of ranks as torch knows them.

    Making it makes all communicators of the plan, and is collective over the world.

    plan: Plan.
    device_type: "cpu" or "cuda". Where the model runs.
    shard: int. HSDP: how many of the d ranks share the weights. Default: all.

    dense: DeviceMesh (t, replicate, fsdp) of this rank's stage. fsdp: the d and c ranks that share
        the weights under FSDP. replicate: those that hold copies of them, which HSDP has.
    experts: DeviceMesh (e, etp, replicate, fsdp) of this rank's stage. Ranks of one fsdp are ranks
        of one fsdp of `dense`, too, and one alone where e needs all of these.
    ends: the first and the last stage, which both hold a tied embedding.

    A parameter is cut over the first dimensions of a mesh, and then by FSDP or ZeRO-1 over the
    last. A tensor of a DeviceMesh lists its cuts in this order.
    """

    def __init__(self, plan, device_type="cpu", *, shard=None):
        plan.require_fits(world=dist.get_world_size(), shard=shard)
        # By default torch gives each new group 10 or 30 minutes, whatever the first one was given.
        backend = dist.group.WORLD._get_backend(torch.device(device_type))
        degrees = f"p{plan.pp}d{plan.dp}c{plan.cp}t{plan.tp}e{plan.ep * plan.etp}"
        super().__init__(f"{degrees} sp", backend.options._timeout)
        self.plan = plan
        index = torch.cuda.current_device() if device_type == "cuda" else None
        self.device = torch.device(device_type, index)
        along = self.group_along
        shard = shard or plan.dp

        def mesh(ranks, **groups):
            names, groups = tuple(groups), list(groups.values())
            return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)

        stage = self.group["p"].rank()
        ranks = self.ranks.reshape(plan.pp, plan.dp // shard, -1, plan.tp)
        self.group |= {"replicate": along(ranks, [1]), "fsdp": along(ranks, [2])}
        dense = {name: self.group[name] for name in ("t", "replicate", "fsdp")}
        self.dense = mesh(np.moveaxis(ranks[stage], -1, 0), **dense)
        # Of d8e2 with shard 4 the ranks 0 2 4 6 have the same experts. 0 2 and 4 6 share them.
        shares, rest = divmod(shard * plan.cp * plan.tp, plan.ep * plan.etp)
        shares = 1 if rest else shares
        ranks = self.ranks.reshape(plan.pp, plan.edp // shares, shares, plan.ep, plan.etp)
        self.group |= {"e": along(ranks, [3]), "etp": along(ranks, [4])}
        experts = {name: self.group[name] for name in ("e", "etp")}
        experts |= {"replicate": along(ranks, [1]), "fsdp": along(ranks, [2])}
        self.experts = mesh(np.moveaxis(ranks[stage], (0, 1), (2, 3)), **experts)
        self.ends = None
        if plan.pp > 1:  # the stages in between are in no such group
            self.ends = along(self.ranks.reshape(plan.pp, -1)[[0, -1]], [0])
        wait_for_all(device_type)

    def require_cut(self, length) -> None:
        """Raise ValueError on all c ranks unless t can cut the tokens of each. Collective over c.

        length: int. The tokens of a row that this rank has.
        """
        # The ranks of c may hold unequal shards, 27 tokens are 13 and 14. A rank that raised alone
        # would leave the others in the first layer.
        t = self.plan.tp if self.sequence else 1
        with errors_on_all_ranks(self.group["c"], alone=t == 1):
            if length % t:
                raise ValueError(f"plan {self.plan}: expected t = {t} to divide the tokens of a "
                                 f"rank, got {length}; pad rows")  # fmt: skip

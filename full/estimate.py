"""What a plan holds and sends: adds a model in closed form to plan strings.

    python -m full plan d2t2                                # its ranks and groups
    python -m full plan d16 d4t4 --model qwen3-8b           # a row for each plan

Nothing is measured. `Rank` says from a model's shape and a plan which bytes a rank holds at the
peak of a step, and which bytes it hands to each kind of group. If you only train, skip this file.
"""

import argparse
import copy
import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from full.model_config import ModelConfig
from full.optimizer import messages_of
from full.parallelize import MODES
from full.pipeline import keep_stage_and_ends
from full.places import TIED, inner_width
from full.plans import Plan
from full.transformer import Transformer
from parallel import layout, ranks_along

# Published shapes, so that the commands of RESULTS.md need no download.
QWEN3 = dict(vocab_size=151936, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False)
SPARSE = QWEN3 | dict(
    model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip
PUBLISHED = {
    "qwen3-8b": QWEN3 | dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8,
    ),
    "qwen3-30b-a3b": SPARSE | dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        moe_intermediate_size=768,
    ),
    "qwen3-235b-a22b": SPARSE | dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64,
        moe_intermediate_size=1536,
    ),
}  # fmt: skip
WIRE = {  # bytes that a rank puts on the wire for each that it hands over, by the ring algorithm
    "allgather": lambda k: k - 1, "reducescatter": lambda k: (k - 1) / k,
    "allreduce": lambda k: 2 * (k - 1) / k, "alltoall": lambda k: (k - 1) / k,
    "send": lambda k: 1,
}  # fmt: skip


class Step(NamedTuple):
    """One optimiser step of one of a plan's d replicas."""

    mode: str = "ddp"
    tokens: int = 131072  # of the replica: all of its t, c and p ranks work on them
    micros: int = 8  # micro-batches that they are cut into
    size: int = 4  # bytes of a weight, a gradient, either moment, a state between layers
    ac: str = "full"  # as parallelize's: full | none
    compute: int = 0  # bytes of what products take and give, with compute_dtype; 0: as size

    @property
    def product(self):
        return self.compute or self.size


class Message(NamedTuple):
    """Of all messages of one kind of group in a step: bytes that this rank hands over."""

    kind: str  # t c d e p, the plan's letters
    op: str  # as `Sent` names it
    ranks: int  # of a group
    given: float

    @property
    def wire(self):
        return self.given * WIRE[self.op](self.ranks)


MADE = {}  # (shape, stage, stages) -> the stage: a table asks for the same ones in each row


def without_memory(config, stage=0, stages=1):
    """Return a stage of a model on the meta device. Callers only read it."""
    key = repr(config), stage, stages
    if key not in MADE and stages == 1:
        with torch.device("meta"):
            MADE[key] = Transformer(config)
    elif key not in MADE:
        MADE[key] = copy.deepcopy(without_memory(config))
        keep_stage_and_ends(MADE[key], stage, stages, config.tie_word_embeddings)
    return MADE[key]


def layout_of(name):
    """The core's `layout` of a parameter in training, where sequence parallelism is on."""
    return layout(f".{name}", SimpleNamespace(fsdp=False, sequence=True))


class Rank:
    """What a rank of a stage holds, and sends in a step: a model in closed form, no measurement.

    Sent: without the norm, counters, metrics, passes without gradients. Sliding windows and
    documents save hops of a ring that are counted here. Held: without fragmentation, cuBLAS, NCCL,
    and the generator's cache. All parts are added, though not all peak at once.

    Sources: t, activations arXiv:2205.05198 section 4; d arXiv:1910.02054 sections 5, 7; c
    arXiv:2310.01889; p arXiv:2104.04473 section 2; e arXiv:2006.16668. tests/full/test_plan.py
    counts what ranks hand over, keep for a backward, and hold.
    """

    def __init__(self, plan, config, step, stage=0):
        parts = step.micros * plan.cp * plan.tp
        if step.tokens % parts:
            raise ValueError(f"{step.tokens} tokens of a replica must divide by "
                             f"micro-batches * c * t = {parts}")  # fmt: skip
        self.plan, self.config, self.step, self.stage = plan, config, step, stage
        self.first, self.last = stage == 0, stage == plan.pp - 1
        self.n, self.wide = step.tokens // step.micros // plan.cp, max(4, step.product)
        self.x = self.n * config.hidden_size * step.product  # bytes of n tokens' normed states
        self.states = self.n * config.hidden_size * step.size  # and of what layers add to
        self.again = int(step.ac == "full")
        whole = without_memory(config)
        self.numbers = {name: p.numel() for name, p in whole.named_parameters()}
        part = without_memory(config, stage, plan.pp)
        self.shapes = {name: [*p.shape] for name, p in part.named_parameters()}
        for name, shape in self.shapes.items():  # before fsdp
            for dim, parts, _ in self.cuts(name):
                shape[dim] = -(-shape[dim] // parts)
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        whole, shards = sum(self.sizes.values()), sum(self.shard(name) for name in self.shapes)
        self.kept = shards if step.mode == "fsdp" else whole  # numbers of weights and of gradients
        self.stepped = whole if step.mode == "ddp" else shards  # and of each moment
        self.layers = [int(name) for name, _ in part.model.layers.named_children()]
        sparse = set(self.layers) & set(config.sparse_layers)
        self.sparse, self.apart = len(sparse), len(sparse) if plan.etp == 1 else 0

    def _copies(self, name):
        """Ranks with the same part, over which fsdp and zero1 share it out again."""
        return self.plan.edp if ".mlp.experts." in name else self.plan.dp * self.plan.cp

    def shard(self, name):
        """Numbers of the largest share of a parameter: rows are dealt out."""
        rows, *width = self.shapes[name]
        return -(-rows // self._copies(name)) * math.prod(width)

    def messages(self) -> list:
        """A Message for each kind of group and collective."""
        kinds = self.tensor, self.context, self.experts, self.pipeline, self.data
        return [message for kind in kinds for message in kind() if message.ranks > 1]

    def tensor(self):
        """A gather before and a scatter-add after attention and an MLP, unless its experts are
        whole; 5 numbers a token and a gradient for log-probs; partial gradients once."""
        t, m = self.plan.tp, self.step.micros
        blocks = 2 * len(self.layers) - self.apart
        dropped = 0 if self.config.post_norms else len(self.layers) - self.apart
        gathers = blocks * (2 + self.again) + self.first + self.last
        scatters = blocks * (2 + self.again) - dropped * self.again + self.first
        yield Message("t", "allgather", t, m * gathers * self.x / t)
        yield Message("t", "reducescatter", t, m * scatters * self.x)
        whole = [name for name in self.shapes if layout_of(name)["partial"] == "dct"]
        is_fsdp = self.step.mode == "fsdp"
        # Elsewhere one message sums over d and c too: see `data`.
        terms = sum(self.shard(name) if is_fsdp else self.sizes[name]
                    for name in whole if is_fsdp or self._copies(name) == 1)  # fmt: skip
        once = terms * self.step.size
        scores = self.last * m * (5 * self.n * self.wide + self.x)
        yield Message("t", "allreduce", t, once + scores)

    def context(self):
        c, calls = self.plan.cp, self.step.micros * len(self.layers)
        heads = self.config.num_key_value_heads / self.plan.tp
        numbers = 2 * heads * self.config.head_dim * self.n  # of a block of k and v
        sent = numbers * ((2 + self.again) * self.step.product + self.wide)
        yield Message("c", "send", c, calls * (c - 1) * sent)

    def experts(self):
        """Rows to their experts and back, on average over ranks."""
        rows = self.x * self.config.num_experts_per_tok
        rows /= self.plan.tp if self.plan.etp == 1 else 1  # else all t ranks have all tokens
        counts = 8 * self.config.num_experts * (1 + self.again)
        given = self.step.micros * self.sparse * (rows * (4 + 2 * self.again) + counts)
        yield Message("e", "alltoall", self.plan.ep, given)

    def pipeline(self):
        """1F1B: states to the next stage, and as much back."""
        p, states = self.plan.pp, self.step.micros * self.states / self.plan.tp
        yield Message("p", "send", p, states * (2 - self.first - self.last))
        if p > 1 and self.config.tie_word_embeddings and (self.first or self.last):
            yield Message("p", "allreduce", 2, self.sizes[TIED] * self.step.size)

    def data(self):
        mode, m, w = self.step.mode, self.step.micros, self.step.size
        for name, numbers in self.sizes.items():
            k, shard = self._copies(name), self.shard(name)
            given = shard * self.step.product
            if mode == "fsdp":
                yield Message("d", "allgather", k, m * given * (1 + (".layers." in name)))
                yield Message("d", "reducescatter", k, m * shard * k * w)
            else:
                is_of_t = k > 1 and layout_of(name)["partial"] == "dct"
                ranks = k * self.plan.tp if is_of_t else k
                yield Message("d", "allreduce", ranks, numbers * w)
            if mode == "zero1":
                yield Message("d", "allgather", k, given)

    def memory(self) -> dict:
        """Bytes at the peak of a step by what they are for."""
        size = self.step.size
        weights = self.kept * size
        if self.step.compute and self.step.mode != "fsdp":  # rounded, beside their masters
            weights = self.kept * self.step.compute + self.stepped * size
        parts = dict(weights=weights, gradients=self.kept * size, moments=2 * self.stepped * size)
        return parts | dict(activations=self.activations(), buffers=self.buffers())

    def activations(self):
        """Bytes that wait for their backward: with R, the input of each layer and all of one layer;
        else all of all. A pipeline's stage s has min(p - s, m) micro-batches on their way."""
        waiting = min(self.plan.pp - self.stage, self.step.micros)
        if not self.again:
            return waiting * len(self.layers) * self.layer()
        return waiting * len(self.layers) * self.states / self.plan.tp + self.layer()

    def layer(self):
        """Bytes that a CPU keeps of a layer for its backward: the input of four norms in float32 or
        better, and of a norm in less, which is torch's, the product too; what the matrices read,
        whole where t gathers it; q, k, v, attention's output; gate, up, activation and product of
        an MLP, and of a row for an expert what goes in and comes out."""
        config, t, w = self.config, self.plan.tp, self.step.product
        M, D, K = config.hidden_size, config.head_dim, config.num_experts_per_tok
        H, G = config.num_attention_heads, config.num_key_value_heads
        kept = {True: 1, False: 2}  # tensors of a norm, by whether it computes in float32 or more
        norms = kept[self.step.size >= 4] * 2 * M + kept[w >= 4] * (H + G) * D
        norms = norms / t * max(self.wide, self.step.size)
        rest = M + (2 * H + 2 * G) * D / t
        if self.sparse:
            inner = config.moe_intermediate_size / self.plan.etp
            mlp = (M + K * (2 * M + 4 * inner)) / (t if self.plan.etp == 1 else 1)
        else:
            mlp = M + 4 * config.intermediate_size / t
        return self.n * (norms + (rest + mlp) * w)

    def buffers(self):
        """Bytes of the head's gradient while it is summed up, and of what is whole for a moment:
        under fsdp weights and gradients of the ends, of two layers, and of one; else the longest
        message of several gradients."""
        head = TIED if self.config.tie_word_embeddings else "lm_head.weight"
        summed = self.sizes[head] * self.wide if self.last else 0
        if self.step.mode == "fsdp":
            start = f"model.layers.{self.layers[0]}."
            layer = sum(n for name, n in self.sizes.items() if name.startswith(start))
            ends = sum(n for name, n in self.sizes.items() if ".layers." not in name)
            if self.step.compute:  # and the gradients of one unit, as wide as they are summed
                summed += max(ends, layer) * self.step.size
            return summed + (2 * ends + 3 * layer) * self.step.product
        together = {}  # gradients that are summed over one group, from the last to the first
        for name, numbers in reversed(self.sizes.items()):
            is_cut = self.plan.tp > 1 and bool(self.cuts(name))
            if self._copies(name) > 1:
                size = numbers * self.step.size
                gradient = torch.empty(size, dtype=torch.uint8, device="meta")
                together.setdefault((".mlp.experts." in name, is_cut), []).append(gradient)
        messages = (message for some in together.values() for message in messages_of(some))
        longest = max((sum(g.nbytes for g in m) for m in messages if len(m) > 1), default=0)
        return summed + longest

    def cuts(self, name, copies=False) -> list:
        """(dimension, parts, how far apart their ranks are) of each cut of a parameter; copies:
        whether ranks with the same part have cut it once more, by rows."""
        plan, how, inner = self.plan, layout_of(name), self.plan.tp
        cuts = [(how["dim"], plan.tp, 1)] if how["over"] == "t" else []
        if how["over"] == "e":
            inner = plan.ep * plan.etp
            cuts = [(0, plan.ep, plan.etp), (inner_width(name), plan.etp, 1)]
        if copies:
            cuts.append((0, self._copies(name), inner))
        return [cut for cut in cuts if cut[1] > 1]

    def pushed_from(self, size):
        """(bytes of a number, whether copies are cut) of what a generator of a dtype is given: the
        parameter, or where products have another dtype than the generator its master."""
        if self.step.mode == "fsdp":
            return self.step.size, True
        if self.step.compute not in (0, size):
            return self.step.size, self.step.mode == "zero1"
        return self.step.product, False

    def shares(self, name, generator, size):
        """Whether a parameter of the generator, another Rank, is in the policy's own memory."""
        alike = self.cuts(name) == generator.cuts(name) and size == self.step.product
        return alike and self.step.mode != "fsdp" and self.plan.pp == 1

    def generator(self, generator, size) -> int:
        """Bytes that a generator takes besides the policy; size: of one of its weights."""
        sizes = generator.sizes.items()
        return sum(n for name, n in sizes if not self.shares(name, generator, size)) * size

    def pushed(self, generator, size) -> int:
        """Bytes that come in for the generator's new weights. Where the policy was first cut as the
        generator is, what was cut behind that is gathered; elsewhere the whole of a tensor."""
        come = 0
        width, copies = self.pushed_from(size)
        for name, numbers in generator.sizes.items():
            cuts = generator.cuts(name)
            alike = self.cuts(name, copies)[: len(cuts)] == cuts
            wanted = numbers if alike else self.numbers[name]
            if name not in self.shapes:
                come += wanted * size  # from another stage
            elif not self.shares(name, generator, size):
                own = self.shard(name) if copies else self.sizes[name]
                come += (wanted - own) * width
        return come


def stages_of(plan, config, step):
    """A Rank of each stage that differs: the first, one inside, the last."""
    return [
        Rank(plan, config, step, stage) for stage in sorted({0, min(1, plan.pp - 1), plan.pp - 1})
    ]


def memory(plan, config, step) -> dict:
    """Bytes of the fullest stage, see `Rank`."""
    parts = [rank.memory() for rank in stages_of(plan, config, step)]
    return max(parts, key=lambda of_stage: sum(of_stage.values()))


def wire(plan, config, step) -> list:
    """Bytes of the busiest stage on the wire, by kind of group, see `Rank`."""
    stages = [rank.messages() for rank in stages_of(plan, config, step)]
    return [max(sum(m.wire for m in sent if m.kind == kind) for sent in stages) for kind in "tcdep"]


def main(argv) -> int:
    """Print a plan's degrees and groups, or a model of what a rank holds and sends in a step."""
    parser = argparse.ArgumentParser("python -m full plan", description=main.__doc__)
    add = parser.add_argument
    add("plan", nargs="+", help="such as d2t2; several: a row each")
    add("--world", type=int, help="refuse the plan unless it has so many ranks")
    add("--model", help=f"a Hugging Face directory, its config.json, or {', '.join(PUBLISHED)}")
    add("--mode", nargs="+", choices=MODES, default=["ddp", "zero1", "fsdp"])
    add("--tokens", type=int, default=Step().tokens, help="a step, of each of the d replicas")
    add("--micro-batches", type=int, default=Step().micros, help="that they are cut into")
    add("--bytes", type=int, choices=(2, 4), default=4, help="of a weight and a product")
    add("--compute-bytes", type=int, choices=(0, 2), default=0,
        help="of a product, with --compute-dtype bfloat16; 0: as --bytes")
    add("--generator-bytes", type=int, choices=(0, 2, 4), default=2, help="of its weights; 0: none")
    add("--ac", choices=("full", "none"), default="full", help="as parallelize's")
    options = parser.parse_args(argv)
    plans = [Plan.parse(text) for text in options.plan]
    config = None
    if options.model:
        config = ModelConfig.from_hf(PUBLISHED.get(options.model, options.model))
    for plan in plans:
        plan.require_fits(world=options.world, config=config)
    if len(plans) == 1:
        describe(plans[0])
    if config is not None:
        print_table(plans, config, options)
    return 0


def describe(plan):
    """Print a plan, its degrees, its tensor groups, and all groups of more than one rank."""
    # The letters and groups are those of `Grid.group`, the order is that of the ranks.
    attention = dict(p=plan.pp, d=plan.dp, c=plan.cp, t=plan.tp)
    experts = dict(p=plan.pp, edp=plan.edp, e=plan.ep, etp=plan.etp)
    grids = [np.arange(plan.world).reshape([*shape.values()]) for shape in (attention, experts)]
    degrees = attention | dict(e=plan.ep, etp=plan.etp)
    print(plan, " ".join(f"{letter}={degree}" for letter, degree in degrees.items()), sep="\n")
    width = len(str(plan.world - 1))
    for p, d, c in np.ndindex(plan.pp, plan.dp, plan.cp):
        row = " ".join(f"{rank:>{width}}" for rank in grids[0][p, d, c])
        print(f"p {p}  d {d}  c {c} | {row}")

    groups = {letter: ranks_along(grids[0], [n]) for n, letter in enumerate(attention)}
    if plan.ep * plan.etp > 1:
        groups |= {letter: ranks_along(grids[1], [n]) for n, letter in enumerate(experts)}
    groups["fsdp"] = ranks_along(grids[0], [1, 2])
    for name, rows in groups.items():
        if len(rows[0]) > 1:
            print(f"{name:>5}: " + " ".join(str(row).replace(",", "") for row in rows))


def print_table(plans, config, options):
    """Print a row for each plan and mode, as Markdown; GiB are 2^30 bytes, GB 10^9.

    What is above 100 % of 80 GB does not train there, whatever the allocator does.
    """
    print("A model, not a measurement: GiB a rank holds, GB it sends a step by kind of group.\n")
    print("| plan | ranks | mode | weights + gradients + moments | activations | buffers "
          "| generator | GiB in all | of 80 GB | at start "
          "| GB t | GB c | GB d | GB e | GB p | push |")  # fmt: skip
    print("|---" * 16 + "|")
    size = options.generator_bytes
    for plan, mode in itertools.product(plans, options.mode):
        step = Step(mode, options.tokens, options.micro_batches, options.bytes, options.ac,
                    options.compute_bytes)  # fmt: skip
        first = Rank(plan, config, step)
        sampler = Rank(plan.for_sampling, config, step._replace(tokens=0))
        parts = memory(plan, config, step) | dict(generator=first.generator(sampler, size))
        # At start this rank has its part of the weights, and then of the generator. In mixed
        # precision weights are filled in before they are rounded and before zero1 shares them.
        start = max(parts["weights"] + parts["generator"], first.kept * step.size)
        *state, activations, buffers, sampling, total, start = (
            f"{x / 2**30:.1f}" for x in (*parts.values(), sum(parts.values()), start)
        )
        sent = [*wire(plan, config, step), first.pushed(sampler, size)]
        cells = [str(plan), str(plan.world), mode]
        cells += [" + ".join(state), activations, buffers, sampling, total]
        cells += [f"{sum(parts.values()) / 80e9:.0%}", start]
        cells += [f"{x / 1e9:.1f}" if x else "" for x in sent]
        print("| " + " | ".join(cells) + " |")

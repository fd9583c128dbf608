"""What a rank of a plan holds: adds a model in closed form to plan strings.

    python -m full plan d2t2                                # its ranks and groups
    python -m full plan d16 d4t4 --model qwen3-8b           # a row for each plan

Nothing is measured. `Rank` says from a model's shape and a plan which bytes a rank holds at the
peak of a step, to find a plan that fits. If you only train, skip this file.
"""

import argparse
import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from full.deltanet import CHUNK
from full.model_config import LINEAR, ModelConfig
from full.optimizer import messages_of
from full.parallelize import MODES
from full.pipeline import keep_stage_and_ends
from full.places import TIED, inner_width, layout
from full.plans import Plan
from full.transformer import Critic, Transformer
from models import FULL
from parallel import ranks_along

# Published shapes, so that the commands of RESULTS.md need no download.
QWEN3 = dict(vocab_size=151936, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False)
PUBLISHED = {
    "qwen3-8b": QWEN3 | dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8,
    ),
    "qwen3-235b-a22b": QWEN3 | dict(
        model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64,
        moe_intermediate_size=1536,
    ),
}  # fmt: skip


class Step(NamedTuple):
    """One optimizer step of one of a plan's d replicas."""

    mode: str = "ddp"
    tokens: int = 131072  # of the replica: all of its t, c and p ranks work on them
    micros: int = 8  # micro-batches that they are cut into
    size: int = 4  # bytes of a weight, a gradient, either moment, a state between layers
    ac: str = "full"  # as parallelize's: full | none
    compute: int = 0  # bytes of what products take and give, with compute_dtype; 0: as size
    critic: str = "shared"  # separate: there is a second model

    @property
    def product(self):
        return self.compute or self.size


def without_memory(kind, config, stage, stages):
    """Return a stage of a model on the meta device. kind: Transformer or Critic."""
    with torch.device("meta"):
        model = kind(config)
    if stages > 1:
        is_tied = config.tie_word_embeddings and kind is Transformer
        keep_stage_and_ends(model, stage, stages, is_tied)
    return model


class Rank:
    """What a rank of a stage holds in a step: a model in closed form, no measurement.

    Left out: fragmentation, cuBLAS, NCCL, and the generator's cache. All parts are added, though
    not all peak at once. tests/full/test_plan.py counts what ranks keep for a backward, and hold.

    Sources: activations under t arXiv:2205.05198 section 4; d arXiv:1910.02054 section 5; p
    arXiv:2104.04473 section 2; e arXiv:2006.16668.

    sizes: {name: numbers of each parameter on this rank, before fsdp and zero1 share them out}.
    """

    def __init__(self, plan, config, step, stage=0, kind=Transformer):
        parts = step.micros * plan.cp * plan.tp
        if step.tokens % parts:
            raise ValueError(f"{step.tokens} tokens of a replica must divide by "
                             f"micro-batches * c * t = {parts}")  # fmt: skip
        self.plan = plan
        self.config = config
        self.step = step
        self.stage = stage
        self.n = step.tokens // step.micros // plan.cp  # tokens of a micro-batch
        self.wide = max(4, step.product)  # bytes of what is computed in float32 or better
        part = without_memory(kind, config, stage, plan.pp)
        self.layers = [int(name) for name, _ in part.model.layers.named_children()]

        # Rows are distributed: the largest share counts.
        self.sizes = {}
        shards = 0
        for name, p in part.named_parameters():
            shape = list(p.shape)
            for dim, ranks in self.cuts(name):
                shape[dim] = -(-shape[dim] // ranks)
            self.sizes[name] = math.prod(shape)
            shards += -(-shape[0] // self.copies(name)) * math.prod(shape[1:])
        whole = sum(self.sizes.values())
        self.kept = shards if step.mode == "fsdp" else whole  # numbers of weights and of gradients
        self.stepped = whole if step.mode == "ddp" else shards  # and of each moment

    def cuts(self, name) -> list:
        """Return (dimension, ranks) of each cut of a parameter by t and e."""
        # By the layout, in training, where sequence parallelism is on.
        how = layout(f".{name}", SimpleNamespace(fsdp=False, sequence=True))
        if how["over"] == "e":
            return [(0, self.plan.ep), (inner_width(name), self.plan.etp)]
        return [(how["dim"], self.plan.tp)] if how["over"] == "t" else []

    def copies(self, name) -> int:
        """Return how many ranks have the same part, which fsdp and zero1 share out among them."""
        return self.plan.edp if ".mlp.experts." in name else self.plan.dp * self.plan.cp

    def state(self) -> dict:
        """Return the bytes that last from step to step by what they are for."""
        size = self.step.size
        weights = self.kept * size
        if self.step.compute and self.step.mode != "fsdp":  # rounded, next to their masters
            weights = self.kept * self.step.compute + self.stepped * size
        return dict(weights=weights, gradients=self.kept * size, moments=2 * self.stepped * size)

    def memory(self) -> dict:
        """Return the bytes at the peak of a step by what they are for."""
        held = self.state() | dict(activations=self.activations(), buffers=self.buffers())
        if self.step.critic == "separate":  # it runs when the policy's activations are gone
            critic = Rank(self.plan, self.config, self.step, self.stage, Critic).state()
            held |= {name: held[name] + critic[name] for name in critic}
        return held

    def activations(self):
        """Return the bytes that wait for their backward.

        With recomputation, these are the input of each layer and all of one layer; else all of all.
        """
        # A pipeline's stage s has min(p - s, m) micro-batches in flight.
        waiting = min(self.plan.pp - self.stage, self.step.micros)
        layers = [self.layer(self.config.layer_types[n]) for n in self.layers]
        if self.step.ac == "none":
            return waiting * sum(layers)
        states = self.n * self.config.hidden_size * self.step.size
        return waiting * len(layers) * states / self.plan.tp + max(layers)

    def layer(self, kind=FULL):
        """Return the bytes that a CPU keeps of a layer of some type for its backward.

        The input of four norms in float32 or better, and of a norm in less, which is torch's, the
        product too. What the matrices read, whole where t gathers it. q, k, v, attention's output.
        Gate, up, activation and product of an MLP. Of a row for an expert what goes in and comes
        out.
        """
        config, t, w = self.config, self.plan.tp, self.step.product
        M, D, K = config.hidden_size, config.head_dim, config.num_experts_per_tok
        H, G = config.num_attention_heads, config.num_key_value_heads
        kept = {True: 1, False: 2}  # tensors of a norm, by whether it computes in float32 or more
        own = max(self.wide, self.step.size)  # bytes of what a norm keeps
        norms = kept[self.step.size >= 4] * 2 * M / t * own
        if kind == LINEAR:
            mixer = M * w + self.recurrence() / t
        else:
            gates = (2 * H + (2 * H + G) * (w >= 4)) * D if config.attn_output_gate else 0
            norms += kept[w >= 4] * (H + G) * D / t * own
            mixer = (M + ((2 * H + 2 * G) * D + gates) / t) * w
        if {*self.layers} & {*config.sparse_layers}:
            inner = config.moe_intermediate_size / self.plan.etp
            mlp = (M + K * (2 * M + 4 * inner)) / (t if self.plan.etp == 1 else 1)
        else:
            mlp = M + 4 * config.intermediate_size / t
        return self.n * (norms + mixer + mlp * w)

    def recurrence(self):
        """Return the bytes that a gated DeltaNet keeps of a token, besides its input.

        Counted as in `layer`: inputs of the convolution, X channels of it, keys and values of
        heads, matrices of a chunk, and a state for each chunk, all of them wide.
        """
        config = self.config
        HK = config.linear_num_value_heads * config.linear_key_head_dim
        HV = config.linear_num_value_heads * config.linear_value_head_dim
        X = 2 * config.linear_num_key_heads * config.linear_key_head_dim + HV
        HC = config.linear_num_value_heads * CHUNK
        states = HV * config.linear_key_head_dim / CHUNK
        wide = (config.linear_conv_kernel_dim + 2) * X + 8 * HV + 3 * HK + 7 * HC + states
        return wide * self.wide + 2 * HV * self.step.product

    def buffers(self):
        """Return the bytes of the head's gradient while it is summed, and of what is whole briefly.

        Under fsdp these are weights and gradients of the ends, of two layers, and of one. Else they
        are the longest message of several gradients.
        """
        head = TIED if self.config.tie_word_embeddings else "lm_head.weight"
        summed = self.sizes[head] * self.wide if self.stage == self.plan.pp - 1 else 0
        if self.step.mode == "fsdp":
            start = f"model.layers.{self.layers[0]}."
            layer = sum(n for name, n in self.sizes.items() if name.startswith(start))
            ends = sum(n for name, n in self.sizes.items() if ".layers." not in name)
            if self.step.compute:  # and the gradients of one unit, as wide as they are summed
                summed += max(ends, layer) * self.step.size
            return summed + (2 * ends + 3 * layer) * self.step.product
        together = {}  # gradients that are summed over one group, from the last to the first
        for name, numbers in reversed(self.sizes.items()):
            if self.copies(name) > 1:
                size = numbers * self.step.size
                gradient = torch.empty(size, dtype=torch.uint8, device="meta")
                is_cut = any(ranks > 1 for _, ranks in self.cuts(name))
                together.setdefault((".mlp.experts." in name, is_cut), []).append(gradient)
        messages = (message for some in together.values() for message in messages_of(some))
        longest = max((sum(g.nbytes for g in m) for m in messages if len(m) > 1), default=0)
        return summed + longest


def memory(plan, config, step) -> dict:
    """Return the bytes of the fullest stage, see `Rank`: of the first, one inside, or the last."""
    stages = sorted({0, min(1, plan.pp - 1), plan.pp - 1})
    parts = [Rank(plan, config, step, stage).memory() for stage in stages]
    return max(parts, key=lambda of_stage: sum(of_stage.values()))


def generator(plan, config, step, size) -> int:
    """Return the bytes that a generator takes besides the policy. size: of one of its weights."""
    # It is cut as the policy is by t and e, so it is in the policy's own memory if it can be.
    if step.mode != "fsdp" and plan.pp == 1 and size == step.product:
        return 0
    return size * sum(Rank(plan.for_sampling, config, step._replace(tokens=0)).sizes.values())


def main(argv) -> int:
    """Print a plan's degrees and groups, or a model of what a rank holds in a step."""
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
    add("--critic", choices=("shared", "separate"), default="shared", help="as the run's")
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
    """Print a row for each plan and mode, as Markdown; GiB are 2^30 bytes.

    What is above 100 % of 80 GB does not train there, whatever the allocator does.
    """
    print("A model, not a measurement: GiB that a rank holds.\n")
    print("| plan | ranks | mode | weights + gradients + moments | activations | buffers "
          "| generator | GiB in all | of 80 GB |")  # fmt: skip
    print("|---" * 9 + "|")
    for plan, mode in itertools.product(plans, options.mode):
        step = Step(mode, options.tokens, options.micro_batches, options.bytes, options.ac,
                    options.compute_bytes, options.critic)  # fmt: skip
        held = [*memory(plan, config, step).values()]
        held.append(generator(plan, config, step, options.generator_bytes))
        *state, activations, buffers, sampling, total = (
            f"{x / 2**30:.1f}" for x in (*held, sum(held))
        )
        cells = [str(plan), str(plan.world), mode, " + ".join(state), activations, buffers]
        cells += [sampling, total, f"{sum(held) / 80e9:.0%}"]
        print("| " + " | ".join(cells) + " |")

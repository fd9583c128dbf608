"""What `python -m full check parallel | plan | bench` run besides parallel.py's own rows.

check: every plan of CASES against one process: loss, every gradient, clip norm, three AdamW steps.
plan: a plan's grid, groups, and a model (`Rank`) of what a rank holds and sends in a step.
bench: tokens a second by plan, and the bytes handed over.
"""

import argparse
import copy
import functools
import json
import math
import pickle
import statistics
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from full import ring
from full.attend import attend
from full.check import tiny_model
from full.masks import Mask
from full.model_config import ModelConfig
from full.optimizer import LocalOptimizer, clip_grad_norm, messages_of, reduce_gradients
from full.packing import Micro
from full.parallelize import MODES, parallelize
from full.pipeline import keep_stage_and_ends, run_micro_batches
from full.places import TIED, full, inner_width, part_of
from full.plans import Grid, Plan, plans_on_same_ranks
from full.ring import indices
from full.transformer import Transformer
from full.weights import require_generator_plan
from parallel import layout, ranks_along
from ring_attention import launch
# check ------------------------------------------------------------------------------------------

KINDS = {
    "dense": dict(model_type="qwen3", vocab_size=57, num_hidden_layers=2),
    "tied": dict(model_type="gemma3_text", vocab_size=57),
    "bias": dict(model_type="llama", vocab_size=56, qkv_bias=True, o_bias=True, mlp_bias=True),
    "moe": dict(model_type="qwen3_moe", vocab_size=56, num_experts=4),
    "starved": dict(model_type="qwen3_moe", vocab_size=56, num_experts=4, router_bias_rate=1.0),
}
KINDS["deep"] = KINDS["dense"] | dict(num_hidden_layers=4)
KINDS["deep_tied"] = KINDS["deep"] | dict(tie_word_embeddings=True)
LENGTH, ROWS, TEMPERATURE = 24, 4, 0.7
BENCH = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
             num_key_value_heads=2, intermediate_size=384, vocab_size=2048)  # fmt: skip


class Batch(NamedTuple):
    """Rows of tokens and their loss."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    weight_BS: torch.Tensor  # of log-probs, and a tenth of its absolute value of entropies
    documents_BS: torch.Tensor
    positions_BS: torch.Tensor  # in the document
    states_BSM: torch.Tensor | None = None  # weights of the last states

    @classmethod
    def of(cls, tokens, weights, documents, **more):
        """The targets are the next tokens."""
        positions = (documents[:, :, None] == documents[:, None]).tril().sum(-1) - 1
        return cls(tokens, tokens.roll(-1, 1), weights, documents, positions, **more)

    def part(self, rows, take, device):
        return Batch(*(x if x is None else x[rows][:, take].to(device) for x in self))

    def loss(self, hidden_BSM, logprobs_N, entropies_N):
        """This part's terms of the loss, a sum."""
        w = self.weight_BS.flatten().to(logprobs_N)
        loss = -(w * logprobs_N + 0.1 * w.abs() * entropies_N).sum()
        if self.states_BSM is None:
            return loss
        return loss + 0.1 * (self.states_BSM * hidden_BSM).sum()


def batch(is_packed=True, without=0) -> Batch:
    """Rows of several documents, or of one each; the last `without` rows have no target."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(56, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([[24], [9], [13], [24]] if is_packed else [[LENGTH]] * ROWS)
    documents = torch.arange(LENGTH) // lengths
    weights = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    last = documents != documents.roll(-1, 1)
    last[:, -1] = True
    last[ROWS - without :] = True
    return Batch.of(tokens, weights.masked_fill(last, 0.0), documents)


def build(kind, dtype, **changes):
    sizes = dict(KINDS[kind]) | changes
    model = tiny_model(sizes.pop("model_type"), seed=2, dtype=dtype, **sizes)
    for name, votes in model.named_buffers():
        assert name.endswith("votes") and kind == "starved"
        votes.copy_(torch.tensor([9, 9, 0, 0]))  # all go to the first two
    return model


def backward(model, parts, attentions, total):
    """Add the gradients of micro-batches; their loss, 0 on ranks without the last stage.

    attentions: of each micro-batch, None is the model's own. total: the loss's divisor.
    """
    micros = [Micro(x.tokens_BS, x.positions_BS, of) for x, of in zip(parts, attentions)]
    part, losses = part_of(model), []

    def forward(root, k, x):
        hidden = micros[k].through(root, x)
        if not part.has_head(root):
            return hidden
        targets = parts[k].targets_BS.flatten()
        scored = model.logprobs(hidden.flatten(0, 1), targets, temperature=TEMPERATURE)
        loss = parts[k].loss(hidden, *scored) / total
        losses.append(loss.detach())
        return loss

    like = None
    if part.plan.pp > 1:  # the states between stages
        rows, length = micros[0].tokens.shape
        length //= part.plan.tp if part.grid.sequence else 1
        p = next(model.parameters())
        dtype = getattr(model, "residual_dtype", None) or part.compute_dtype or p.dtype
        like = torch.empty(rows, length, model.config.hidden_size, dtype=dtype, device=p.device)
    run_micro_batches(model, forward, len(micros), like)
    return sum(losses, torch.zeros(()))


def one_process(kind, dtype, whole, steps):
    """[(loss, gradients, clip norm)] of each step, and the parameters after them."""
    model, found = build(kind, dtype), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def attention(q, k, v, /, *, layer, scale, window=None):
        mask = Mask.documents(doc_ids=whole.documents_BS, window=window)
        return attend(q, k, v, mask, scale=scale)[0]

    for _ in range(steps):
        loss = backward(model, [whole], [attention], ROWS * LENGTH)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / norm.item())
        found.append((loss, grads, norm))
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


@functools.lru_cache
def truth_of(kind, steps, dtype=torch.float64, without=0):
    """`one_process` of a kind of model; without: see `batch`."""
    return one_process(kind, dtype, batch(without=without), steps)


class Training:
    """A model under a plan, its optimizer, and this rank's micro-batches.

    rows: of this rank. Default: its share by d.
    micros: how many micro-batches they make. Default: a row each in a pipeline, else one.
    method: of ring_attention. adamw: AdamW's options. options: of `parallelize`.
    """

    def __init__(self, model, grid, whole, *, rows=None, micros=0, method="ring",
                 adamw=None, **options):  # fmt: skip
        plan, device = grid.plan, next(model.parameters()).device
        count, length = whole.tokens_BS.shape
        if rows is None:
            rows = torch.arange(count).chunk(plan.dp)[grid.group["d"].rank()]
        is_packed = bool(whole.documents_BS.any())

        def attention(q, k, v, /, *, layer, scale, window=None, of=rows):
            mask = Mask.causal(length, window=window)
            if is_packed:
                mask = Mask.documents(doc_ids=whole.documents_BS[of], window=window)
            given = dict(mask=mask, method=method, scale=scale)
            return ring.ring_attention(q, k, v, group=grid.group["c"], **given)

        own = attention if is_packed or plan.cp > 1 else None
        self.model = parallelize(model, plan, device_mesh=grid, attention=own, **options)
        make = lambda p: torch.optim.AdamW(p, **adamw or dict(lr=0.01))  # noqa: E731
        self.optimizer = LocalOptimizer(self.model, make, zero=options.get("mode") == "zero1")

        # The model's own attention is that of all rows.
        of_micros = rows.chunk(micros or (len(rows) if plan.pp > 1 else 1))
        take = indices(length, grid.group["c"].rank(), plan.cp)
        self.parts = [whole.part(some, take, device) for some in of_micros]
        self.attentions = [None] * len(of_micros)
        if is_packed and len(of_micros) > 1:
            self.attentions = [functools.partial(attention, of=some) for some in of_micros]
        self.total, self.tp = whole.tokens_BS.numel(), plan.tp
        self.before_sum = lambda model: None  # a test's fault

    def backward(self):
        """Add this rank's gradients and sum them over ranks; its loss."""
        loss = backward(self.model, self.parts, self.attentions, self.total)
        self.before_sum(self.model)
        reduce_gradients(self.model)
        return loss

    def update(self):
        """Clip the gradients and apply them; their norm before."""
        norm = clip_grad_norm(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def results(self, steps):
        """What `one_process` gives, of this rank's parameters; the loss is that of all ranks."""
        found, places = [], self.model.part.places
        for _ in range(steps):
            loss = self.backward().double() / self.tp  # the ranks of a t group have the same loss
            dist.all_reduce(loss)
            grads = {name: full(p.grad, places[name]).cpu().clone()
                     for name, p in self.model.named_parameters()}  # fmt: skip
            found.append((loss.cpu(), grads, self.update().cpu()))
        return found, {name: full(p, places[name]).cpu()
                       for name, p in self.model.named_parameters()}  # fmt: skip


def off(found, truth, by_tensor=False):
    """The largest error of some tensors, by the largest entry of all, or of the tensor itself."""
    scale = max(x.abs().max() for x in truth.values())
    errors = [
        (found[name] - truth[name]).abs().max() / (truth[name].abs().max() if by_tensor else scale)
        for name in found
    ]
    return torch.stack(errors).max()


def errors(found, truth, by_tensor=False) -> list:
    """The worst errors of loss, gradients, clip norm of any step; of the parameters after them."""
    rows = []
    for (loss, grads, norm), (true_loss, true_grads, true_norm) in zip(
        found[0], truth[0], strict=True
    ):
        of_step = (loss / true_loss - 1).abs(), off(grads, true_grads, by_tensor)
        rows.append([*of_step, (norm / true_norm - 1).abs(), off(found[1], truth[1])])
    return torch.tensor(rows).nan_to_num(nan=math.inf).amax(0).tolist()


def compare(rank, text, kind, options, steps=3, dtype=torch.float64, truth=None, device="cpu"):
    """This rank's worst errors: loss, gradients, clip norm, parameters after `steps` steps.

    truth: what `truth_of` gives for this plan, where the ranks need not all find it out again.
    device: of the plan without c and p; the truth is found on the CPU.
    """
    plan, options = Plan.parse(text), dict(options)
    without = ROWS // plan.dp if options.pop("empty", False) else 0
    truth = truth or truth_of(kind, steps, dtype, without)
    # Tests have a device that is only a name. The CPU's backend carries its messages.
    backend = "cuda" if torch.device(device).type == "cuda" else "cpu"
    grid = Grid(plan, backend, shard=options.pop("shard", None))
    training = Training(build(kind, dtype).to(device), grid, batch(without=without), **options)
    found = training.results(steps)
    held = found[1].keys()
    assert held == truth[1].keys() if plan.pp == 1 else held < truth[1].keys()
    return errors(found, truth)


# A case is written as its plan, the kind of its model, and words of this table.
OPTIONS = {  # of `parallelize`; method: of ring_attention; shard: of Grid; empty: see `compare`
    "fsdp": dict(mode="fsdp"), "zero1": dict(mode="zero1"), "hsdp": dict(mode="fsdp", shard=2),
    "offload": dict(offload=True), "mixed": dict(compute_dtype=torch.bfloat16),
    "alone": dict(sequence=False), "allgather": dict(method="allgather"),
    "ulysses": dict(method="ulysses"), "interleaved": dict(schedule="interleaved1f1b"),
    "zbv": dict(schedule="zbv"), "full": dict(ac="full"), "op": dict(ac="op"),
    "compile": dict(compile=True), "empty": dict(empty=True),
}  # fmt: skip
ETP = {"etp": "(attn:d2t2|ffn:e2t2)", "p2etp": "(attn:p2d2t2|ffn:p2e2t2)"}


def read_cases(text) -> dict:
    """{"PLAN KIND WORD ..": (plan, kind, options)} of a text with commas between its cases."""
    cases = {}
    for case in text.strip().strip(",").split(","):
        plan, kind, *words = case.split()
        options = {key: value for word in words for key, value in OPTIONS[word].items()}
        cases[" ".join(case.split())] = ETP.get(plan, plan), kind, options
    return cases


# empty: a rank with nothing to learn; starved: a rank's experts get no token
CASES = read_cases("""
    d2 dense, d2 dense empty, d4 dense hsdp, d2 tied fsdp, t2 dense, t2 dense alone, t2 tied,
    t2 bias, c2 dense, c2 tied ulysses, c4 dense, d2t2 tied, d2t2 tied fsdp, d2t2c2 dense,
    d2t2c2 dense zero1, c2t2e2 moe, t2 moe op, d2e2 moe, t2 moe, d2t2e4 moe, etp moe,
    etp moe alone, d2e2 moe fsdp, d2t2e4 moe fsdp,
    etp moe fsdp, d2c2e4 moe, d2e2 starved, d2e2 starved fsdp, d2 tied zero1, d2 moe fsdp offload,
    d2t2e4 moe zero1, etp moe zero1, c2p2 tied zero1, d2 moe full, t2 tied op,
    d2t2e4 moe fsdp full, c2 dense op, p2 dense full, d2 dense compile,
    t2 dense compile, d2 dense fsdp full compile, p2 dense, p2 tied, p2 deep interleaved,
    p2 deep_tied interleaved, p2 deep zbv, p2 deep_tied zbv, p2 deep interleaved fsdp,
    p2t2 deep_tied zbv, t2 tied zero1, d2p2 tied fsdp, p2c2 dense, p2d2t2 tied, p2etp moe,
""")


def matrix():
    """{case: the worst error of any rank}: CASES but those that wait for a compiler."""
    found = {}
    for name, (text, _, _) in CASES.items():
        if "compile" not in name:
            parts = launch(Plan.parse(text).world, _case, name)
            found[name if text in name else f"{name} ({text})"] = max(map(max, parts))
    return found


def _case(name):
    return compare(dist.get_rank(), *CASES[name])


# plan -------------------------------------------------------------------------------------------

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


@functools.lru_cache(maxsize=2)
def without_memory(pickled):
    """A model on the meta device, of a pickled config; made once for the many ranks of a table."""
    with torch.device("meta"):
        return Transformer(pickle.loads(pickled))


@functools.lru_cache(maxsize=8)
def stage_without_memory(pickled, stage, stages):
    """A stage of that model, made once for all rows of a table. Callers only read both."""
    model = copy.deepcopy(without_memory(pickled))
    keep_stage_and_ends(model, stage, stages, pickle.loads(pickled).tie_word_embeddings)
    return model


def layout_of(name):
    """The core's `layout` of a parameter in training, where sequence parallelism is on."""
    return layout(f".{name}", SimpleNamespace(fsdp=False, sequence=True))


class Rank:
    """What a rank of a stage holds, and sends in a step: a model in closed form, no measurement.

    Sent: without the norm, counters, metrics, passes without gradients. Sliding windows and
    documents save hops of a ring that are counted here. Held: without fragmentation, cuBLAS, NCCL,
    and the generator's cache. All parts are added, though not all peak at once.

    Sources: t, activations arXiv:2205.05198 section 4; d arXiv:1910.02054 sections 5, 7; c
    arXiv:2310.01889; p arXiv:2104.04473 section 2; e arXiv:2006.16668. Pinned by
    tests/full/test_plan.py
    ::test_the_bytes_that_plan_tells_are_what_ranks_hand_over, ::test_activations_are_what_is_kept,
    and ::test_the_memory_that_plan_tells_is_what_a_rank_holds.
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
        pickled = pickle.dumps(config)
        model = without_memory(pickled)
        self.numbers = {name: p.numel() for name, p in model.named_parameters()}
        self.whole = sum(self.numbers.values())
        part = model
        if plan.pp > 1:
            part = stage_without_memory(pickled, stage, plan.pp)
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


def plans_in(texts):
    """(plans, generator, trainer) of each A|B and each B of the command line."""
    for text in texts:
        plans = plans_on_same_ranks(text)
        *generators, trainer = plans
        if len(generators) > 1:
            raise ValueError(f"plan {text!r}: A|B has two plans, generator's and trainer's")
        for plan in generators:
            require_generator_plan(plan)
        # By default the trainer's t and e, and replicas of them.
        degrees = dict(tp=trainer.tp, ep=trainer.ep, etp=trainer.etp)
        default = Plan(dp=trainer.world // trainer.tp, **degrees)
        yield plans, (*generators, default)[0], trainer


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


def plan_command(argv):
    """A plan's degrees, grid, groups, and a model of what a rank holds and sends in a step."""
    parser = argparse.ArgumentParser("python -m full plan")
    add = parser.add_argument
    add("plan", nargs="+", help="such as d2t2, or t4|d2t2, generator|trainer; several: a row each")
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
    config = None
    if options.model:
        config = ModelConfig.from_hf(PUBLISHED.get(options.model, options.model))
    for plans, generator, trainer in plans_in(options.plan):
        for plan in (trainer, generator):
            plan.require_fits(world=options.world, config=config)
        if len(options.plan) == 1:
            for plan in plans:
                _describe(plan)
    if config is not None:
        _table(config, options)
    return 0


def _describe(plan):
    """Print a plan, its degrees, its tensor groups, and all groups of more than one rank."""
    attention = dict(pp=plan.pp, dp=plan.dp, cp=plan.cp, tp=plan.tp)
    experts = {"pp": plan.pp, "expert-dp": plan.edp, "ep": plan.ep, "etp": plan.etp}
    grids = [np.arange(plan.world).reshape([*shape.values()]) for shape in (attention, experts)]
    degrees = attention | dict(ep=plan.ep, etp=plan.etp)
    print(plan, " ".join(f"{axis}={degree}" for axis, degree in degrees.items()), sep="\n")
    width = len(str(plan.world - 1))
    for p, d, c in np.ndindex(plan.pp, plan.dp, plan.cp):
        row = " ".join(f"{rank:>{width}}" for rank in grids[0][p, d, c])
        print(f"pp {p}  dp {d}  cp {c} | {row}")

    groups = {axis: ranks_along(grids[0], [n]) for n, axis in enumerate(attention)}
    if plan.ep * plan.etp > 1:
        groups |= {axis: ranks_along(grids[1], [n]) for n, axis in enumerate(experts)}
    groups["fsdp"] = ranks_along(grids[0], [1, 2])
    for axis, rows in groups.items():
        if len(rows[0]) > 1:
            print(f"{axis:>10}: " + " ".join(str(row).replace(",", "") for row in rows))


def _table(config, options):
    """A row for each plan and mode, as Markdown; GiB are 2^30 bytes, GB 10^9.

    What is above 100 % of 80 GB does not train there, whatever the allocator does.
    """
    print("A model, not a measurement: GiB a rank holds, GB it sends a step by kind of group.\n")
    print("| plan | ranks | mode | weights + gradients + moments | activations | buffers "
          "| generator | GiB in all | of 80 GB | at start "
          "| GB t | GB c | GB d | GB e | GB p | push |")  # fmt: skip
    print("|---" * 16 + "|")
    size = options.generator_bytes
    for plans, generator, plan in plans_in(options.plan):
        for mode in options.mode:
            step = Step(mode, options.tokens, options.micro_batches, options.bytes, options.ac,
                        options.compute_bytes)  # fmt: skip
            first = Rank(plan, config, step)
            sampler = Rank(generator, config, step._replace(tokens=0))
            parts = memory(plan, config, step) | dict(generator=first.generator(sampler, size))
            # At start this rank has its part of the weights, and then of the generator. In mixed
            # precision weights are filled in before they are rounded and before zero1 shares them.
            start = max(parts["weights"] + parts["generator"], first.kept * step.size)
            *state, activations, buffers, sampling, total, start = (
                f"{x / 2**30:.1f}" for x in (*parts.values(), sum(parts.values()), start)
            )
            sent = [*wire(plan, config, step), first.pushed(sampler, size)]
            cells = ["|".join(map(str, plans)).replace("|", "\\|"), str(plan.world), mode]
            cells += [" + ".join(state), activations, buffers, sampling, total]
            cells += [f"{sum(parts.values()) / 80e9:.0%}", start]
            cells += [f"{x / 1e9:.1f}" if x else "" for x in sent]
            print("| " + " | ".join(cells) + " |")


# bench ------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Bytes that this rank hands to each collective and each P2P send inside: of a gather its part,
    of a scatter-add and an all-to-all all parts. `WIRE` says what a ring then puts on the wire."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].replace("_", "")
        op = next((op for op in WIRE if name.startswith(op)), None)
        if "c10d" in function.namespace and op is not None:
            first = op in ("send", "allreduce") or "functional" in function.namespace
            given = (x for x in tree_leaves(args[0 if first else 1]) if torch.is_tensor(x))
            self.bytes[op] = self.bytes.get(op, 0) + sum(x.nbytes for x in given)
        return function(*args, **(kwargs or {}))


def training_of(plan, model, options, rows, length, micros):
    """A plan's training on rows of random tokens, one document each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (rows, length), generator=generator)
    whole = Batch.of(tokens, torch.ones(rows, length), torch.zeros_like(tokens))
    return Training(model, Grid(plan), whole, micros=micros, **options)


def handed_over(text, kind, options, micros, rows=8):
    """What `Sent` counts in a step and its update, of a model of KINDS with 56 words."""
    model = build(kind, torch.float32, vocab_size=56)
    if options.get("compute_dtype"):
        model.residual_dtype = torch.float32
    training = training_of(Plan.parse(text), model, options, rows, LENGTH, micros)
    training.backward()  # what only the first step sends, the shapes of a pipeline, say
    with Sent() as sent:
        training.backward()
        training.optimizer.step()
    return sent.bytes


def _timed(plan_text, rows, length, steps):
    """Median seconds of a step of this rank, and the bytes it sent by collective."""
    plan = Plan.parse(plan_text)
    torch.set_num_threads(max(1, 2 // plan.world))
    model = tiny_model("qwen3", dtype=torch.float32, **BENCH)
    training = training_of(plan, model, {}, rows, length, 0)
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        begun = time.perf_counter()
        training.backward()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        training.optimizer.zero_grad()
    with Sent() as sent:
        training.backward()
    return statistics.median(seconds[1:]), sent.bytes


def bench(argv):
    """Tokens a second by plan, against one process with as many threads; bytes sent a step."""
    parser = argparse.ArgumentParser("python -m full bench parallel")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plans", nargs="+", default=["d1", "d2", "t2", "c2", "p2"])
    options = parser.parse_args(argv)
    rows, whole = [], None
    print(f"{'plan':>8} {'tokens/s':>9} {'of one process':>15}  kB a rank sends a step")
    for text in options.plans:
        world = Plan.parse(text).world
        found = launch(world, _timed, text, options.rows, options.length, options.steps)
        rate = options.rows * options.length / max(seconds for seconds, _ in found)
        whole = whole or rate
        rows.append(dict(plan=text, tokens_per_s=rate, of_one=rate / whole, bytes=found[0][1]))
        kilo = ", ".join(f"{name} {size / 1000:.0f}" for name, size in found[0][1].items())
        print(f"{text:>8} {rate:9.0f} {rate / whole:15.0%}  {kilo}")
    print(json.dumps({"bench": "parallel", "torch": torch.__version__, "rows": rows}))
    return 0


def main(argv):
    return {"plan": plan_command, "bench": bench}[argv[0]](argv[1:])

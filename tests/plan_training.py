"""A model of the folder in training under a plan, without a trainer: for tests and measurements.

Rows of random tokens, their loss, and an optimizer.
"""

import functools
from typing import NamedTuple

import torch

from full.attention import ring
from full.attention.masks import Mask
from full.attention.ring import indices
from full.learn.packing import Micro, run_micro_batches, states_like
from full.model.parallelize import parallelize
from full.ranks.optimizer import LocalOptimizer, clip_grad_norm, reduce_gradients
from full.ranks.places import part_of
from full.tiny import tiny_model

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


class Batch(NamedTuple):
    """Rows of tokens and their loss."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    weight_BS: torch.Tensor  # of log-probs, and a tenth of its absolute value of entropies
    documents_BS: torch.Tensor
    positions_BS: torch.Tensor  # in the document

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
        return -(w * logprobs_N + 0.1 * w.abs() * entropies_N).sum()


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
        if not part.pipeline.has_head(root):
            return hidden
        targets = parts[k].targets_BS.flatten()
        scored = model.logprobs(hidden.flatten(0, 1), targets, temperature=TEMPERATURE)
        loss = parts[k].loss(hidden, *scored) / total
        losses.append(loss.detach())
        return loss

    like = states_like(model, micros[0].tokens.shape)
    run_micro_batches(model, forward, len(micros), like)
    return sum(losses, torch.zeros(()))


class Training:
    """A model under a plan, its optimizer, and this rank's micro-batches.

    rows: of this rank. Default: its share by d.
    micros: how many micro-batches they make. Default: a row each in a pipeline, else one.
    method: of ring_attention. options: of `parallelize`.
    """

    def __init__(self, model, grid, whole, *, rows=None, micros=0, method="ring",
                 **options):  # fmt: skip
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
        make = lambda p: torch.optim.AdamW(p, lr=0.01)  # noqa: E731
        self.optimizer = LocalOptimizer(self.model, make, zero=options.get("mode") == "zero1")

        # The model's own attention is that of all rows.
        of_micros = rows.chunk(micros or (len(rows) if plan.pp > 1 else 1))
        take = indices(length, grid.group["c"].rank(), plan.cp)
        self.parts = [whole.part(some, take, device) for some in of_micros]
        self.attentions = [None] * len(of_micros)
        if is_packed and len(of_micros) > 1:
            self.attentions = [functools.partial(attention, of=some) for some in of_micros]
        self.total, self.tp = whole.tokens_BS.numel(), plan.tp

    def backward(self):
        """Add this rank's gradients and sum them over ranks; its loss."""
        loss = backward(self.model, self.parts, self.attentions, self.total)
        reduce_gradients(self.model)
        return loss

    def update(self):
        """Clip the gradients and apply them; their norm before."""
        norm = clip_grad_norm(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


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

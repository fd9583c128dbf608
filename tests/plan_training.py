"""A model of the folder in training under a plan, without a trainer: rows, a loss, an optimizer."""

from typing import NamedTuple

import torch

from full.attention.masks import Mask
from full.attention.ring import indices, ring_attention
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
}
KINDS["deep"] = KINDS["dense"] | dict(num_hidden_layers=4)
KINDS["deep_tied"] = KINDS["deep"] | dict(tie_word_embeddings=True)
LENGTH, ROWS, TEMPERATURE = 24, 4, 0.7


class Batch(NamedTuple):
    """Rows of tokens, and the weights of their targets' log-probs in a loss."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    weight_BS: torch.Tensor
    positions_BS: torch.Tensor

    def part(self, rows, columns=slice(None)):
        return Batch(*(x[rows][:, columns] for x in self))


def batch() -> Batch:
    """Random rows. Their last tokens have no target."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(56, (ROWS, LENGTH), generator=generator)
    weights = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    weights[:, -1] = 0
    return Batch(tokens, tokens.roll(-1, 1), weights, torch.arange(LENGTH).expand(ROWS, -1))


def build(kind, dtype, **changes):
    sizes = KINDS[kind] | changes
    return tiny_model(sizes.pop("model_type"), seed=2, dtype=dtype, **sizes)


def backward(model, parts, total):
    """Add the gradients of micro-batches of a loss that is a sum, divided by `total`."""
    micros = [Micro(x.tokens_BS, x.positions_BS) for x in parts]

    def forward(root, n, x):
        hidden = micros[n].through(root, x)
        if not part_of(model).pipeline.has_head(root):
            return hidden
        given = hidden.flatten(0, 1), parts[n].targets_BS.flatten()
        logprobs, entropies = model.logprobs(*given, temperature=TEMPERATURE)
        w = parts[n].weight_BS.flatten().to(logprobs)
        return -(w * logprobs + 0.1 * w.abs() * entropies).sum() / total

    run_micro_batches(model, forward, len(micros), states_like(model, micros[0].tokens.shape))


class Training:
    """A model under a plan, its optimizer, and this rank's micro-batches: a row each under p.

    rows: of this rank. Default: its share by d. options: of `parallelize`.
    """

    def __init__(self, model, grid, whole, *, rows=None, **options):
        plan, self.total = grid.plan, whole.tokens_BS.numel()
        if rows is None:
            rows = torch.arange(ROWS).chunk(plan.dp)[grid.group["d"].rank()]

        def attention(q, k, v, /, *, layer, scale, window=None):
            mask = Mask.causal(LENGTH, window=window)
            return ring_attention(q, k, v, group=grid.group["c"], mask=mask, scale=scale)

        own = attention if plan.cp > 1 else None
        self.model = parallelize(model, plan, device_mesh=grid, attention=own, **options)
        make = lambda p: torch.optim.AdamW(p, lr=0.01)  # noqa: E731
        self.optimizer = LocalOptimizer(self.model, make, zero=options.get("mode") == "zero1")
        columns = indices(LENGTH, grid.group["c"].rank(), plan.cp)
        micros = rows.chunk(len(rows) if plan.pp > 1 else 1)
        self.parts = [whole.part(some, columns) for some in micros]

    def backward(self):
        """Add this rank's gradients, and sum them over ranks."""
        backward(self.model, self.parts, self.total)
        reduce_gradients(self.model)

    def update(self):
        """Clip the gradients and apply them."""
        clip_grad_norm(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

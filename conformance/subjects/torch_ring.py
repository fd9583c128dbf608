"""torch's ring attention with its kernels for a CPU, in one layer of causal attention.

    python conformance/parallel.py conformance/subjects/torch_ring.py
    BALANCE=0 ROTATE=alltoall python conformance/parallel.py conformance/subjects/torch_ring.py

torch's public `context_parallel` has no kernel for a CPU. Its template takes any. Each rank has a
part of the tokens, and the two ends of a sequence are on one rank if BALANCE is 1.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.experimental import _attention as public
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

SETTINGS = dict(ranks="sum")
BALANCE = bool(int(os.environ.get("BALANCE", 1)))
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ring(torch.autograd.Function):
    """torch's forward and backward of causal attention over the tokens of all ranks."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = ring._templated_ring_attention(
            dist.group.WORLD, 2, KERNEL, q, k, v, is_causal=True, dropout_p=0.0
        )[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        return ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, KERNEL_BACKWARD, gradient.contiguous(), "grad_out", q, k, v, out,
            lse, is_causal=True, dropout_p=0.0,
        )[:3]  # fmt: skip


class Layer(nn.Module):
    """Attention with 2 heads of width 4, and linears before and after it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, attend):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


def build():
    return Layer(), (torch.randn(2, 16, 8), torch.randn(2, 16, 8))


def shard(model, mesh):
    public._cp_options.enable_load_balance = BALANCE
    public._cp_options.convert_to_f32 = False  # it would merge blocks in float32
    public.set_rotate_method(os.environ.get("ROTATE", "allgather"))
    return model


def loss(model, batch):
    x, y = batch
    attend = lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)  # noqa: E731
    return (model(x, attend) - y).square().mean()


def rank_loss(model, batch):
    # Rank 0 of 2 has the parts 0 and 3 of 4, which is torch's order with balance.
    rank, world = dist.get_rank(), dist.get_world_size()
    own = [rank, 2 * world - 1 - rank] if BALANCE else [2 * rank, 2 * rank + 1]
    x, y = (torch.cat([z.chunk(2 * world, 1)[i] for i in own], 1) for z in batch)
    terms = (model(x, Ring.apply) - y).square().sum() / batch[1].numel()
    terms.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return terms.detach()

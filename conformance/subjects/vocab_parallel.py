"""Log-probs of a head whose vocabulary is split: Megatron-LM, slime and NeMo-RL.

    SOURCES=DIR KIND=megatron python conformance/parallel.py conformance/subjects/vocab_parallel.py

KIND may also be megatron_smooth, slime, slime_entropy, nemo, nemo_entropy and nemo_soft.
"""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from take import take
from torch import nn

KIND = os.environ.get("KIND", "megatron")
SETTINGS = dict(tolerance=1e-5)  # all of them compute in float32
VOCABULARY, SMOOTH = 16, 0.1
RANGE = SimpleNamespace(vocab_range_from_per_partition_vocab_size=lambda n, rank, world: (
    rank * n, (rank + 1) * n))  # fmt: skip
if KIND.startswith("megatron"):
    M = take("Megatron-LM/megatron/core/tensor_parallel/cross_entropy.py",
             "VocabParallelCrossEntropy", "_VocabParallelCrossEntropy",
             "vocab_parallel_cross_entropy", VocabUtility=RANGE, Tuple=tuple,
             get_pg_rank=lambda _: dist.get_rank(),
             get_pg_size=lambda _: dist.get_world_size())  # fmt: skip
elif KIND.startswith("slime"):
    S = take("slime/slime/utils/ppo_utils.py", "_maybe_all_reduce",
             "_get_vocab_parallel_rank_size", "_VocabParallelLogProbEntropy")  # fmt: skip
else:
    R = take("RL/nemo_rl/distributed/model_utils.py", "DistributedLogprob",
             "_compute_distributed_log_softmax_with_grad", "DistributedCrossEntropy",
             "ChunkedDistributedEntropy", "_compute_distributed_log_softmax",
             "_compute_distributed_softmax")  # fmt: skip


class Copied(torch.autograd.Function):
    """Copy forward, sum gradients over ranks backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY, bias=False)


def build():
    model = Model()
    nn.init.normal_(model.head.weight)
    x, y = torch.randint(VOCABULARY, (2, 3, 5))
    return model, (x, y, torch.randn(3, 5), torch.randn(3, 5, VOCABULARY))


def shard(model, mesh):
    part = model.head.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
    model.head.weight = nn.Parameter(part.clone())
    return model


def gather(model, name, x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def clip(model, max_norm):
    """Clip by the norm of the split head and of the embedding, which is a replica."""
    total = model.head.weight.grad.square().sum()
    dist.all_reduce(total)
    norm = (total + model.embed.weight.grad.square().sum()).sqrt()
    for p in model.parameters():
        p.grad.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))
    return norm


def loss(model, batch):
    x, y, weight, target = batch
    logp = model.head(model.embed(x)).log_softmax(-1)
    picked = logp.gather(-1, y[..., None])[..., 0]
    if KIND == "megatron_smooth":  # the rest is spread over all other entries
        rest = logp.sum(-1) - picked
        picked = (1 - SMOOTH) * picked + SMOOTH / (VOCABULARY - 1) * rest
    if KIND == "nemo_soft":
        picked = (target.softmax(-1) * logp).sum(-1)
    return (weight * (-(logp.exp() * logp).sum(-1) if "entropy" in KIND else picked)).sum()


def rank_loss(model, batch):
    x, y, weight, target = batch
    rank, n = dist.get_rank(), VOCABULARY // dist.get_world_size()
    logits, group = model.head(Copied.apply(model.embed(x))), dist.group.WORLD
    if KIND.startswith("megatron"):
        smooth = SMOOTH if "smooth" in KIND else 0.0
        value = -M.vocab_parallel_cross_entropy(logits.clone(), y, smooth, group)
    elif KIND.startswith("slime"):
        found = S._VocabParallelLogProbEntropy.apply(
            logits.reshape(-1, n), y.flatten(), None, group, True, True)
        value = found["entropy" in KIND].view_as(weight)
    elif KIND == "nemo":
        value = R.DistributedLogprob.apply(logits, y, rank * n, (rank + 1) * n, group)
    elif KIND == "nemo_entropy":
        value = -R.ChunkedDistributedEntropy.apply(logits, 2, group)
    else:
        part = target[..., rank * n : (rank + 1) * n]
        value = -R.DistributedCrossEntropy.apply(logits, part, group)
    return (weight * value).sum()

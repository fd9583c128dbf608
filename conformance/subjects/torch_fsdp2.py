"""FSDP2 with two micro-batches of unequal size a step, reduced once; 4 ranks are 2 replicas of 2.

    python conformance/parallel.py conformance/subjects/torch_fsdp2.py
    SYNC=every python conformance/parallel.py conformance/subjects/torch_fsdp2.py

SYNC=every reduces the gradients of each micro-batch, which is FSDP2's default.
"""

import os

import torch.distributed as dist
from torch import nn, randn
from torch.distributed.fsdp import fully_shard

MESH = {1: dict(replica=1, shard=1), 4: dict(replica=2, shard=2)}
SETTINGS = dict(ranks="mean", mesh=MESH)
SYNC = os.environ.get("SYNC", "last")


def build():
    layers = [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2)]
    return nn.Sequential(*layers), (randn(22, 6), randn(22, 6))


def shard(model, mesh):
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def rank_loss(model, batch):
    # A rank has 5 or 6 of 22 rows, in micro-batches of 2 and the rest. All terms are divided by the
    # count of the whole batch, times the ranks, because FSDP2 takes the mean over ranks.
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (z.tensor_split(world)[rank] for z in batch)
    total = 0
    for part in (slice(0, 2), slice(2, None)):
        model.set_requires_gradient_sync(SYNC == "every" or part.stop is None)
        terms = world * (model(x[part]) - y[part]).square().sum() / batch[1].numel()
        terms.backward()
        total += terms.detach()
    return total

"""DistributedDataParallel, 9 rows on 2 or 4 ranks, each rank with the mean of its own rows.

    python conformance/parallel.py conformance/subjects/ddp_uneven.py

This is what a loop with `loss = criterion(model(x), y)` does. `ddp.py` has the remedy.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LOSS = "mean"


def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, (torch.randn(9, 4), torch.randn(9, 3))


def shard(model, mesh):
    return DistributedDataParallel(model)


def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def rank_loss(model, batch):
    return loss(model, [x.tensor_split(dist.get_world_size())[dist.get_rank()] for x in batch])

"""DistributedDataParallel, 9 rows on 2 or 4 ranks, divided by the count of the whole batch.

    python conformance/parallel.py conformance/subjects/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SETTINGS = dict(ranks="mean")


def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, (torch.randn(9, 4), torch.randn(9, 3))


def shard(model, mesh):
    return DistributedDataParallel(model)


def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def rank_loss(model, batch):
    # DDP takes the mean over ranks. So the terms are divided by the whole batch's count, and
    # multiplied by the number of ranks.
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (z.tensor_split(world)[rank] for z in batch)
    return world * (model(x) - y).square().sum() / batch[1].numel()

"""DistributedDataParallel, 9 rows on 2 or 4 ranks, each rank with the mean of its own rows.

    python conformance/parallel.py conformance/subjects/ddp_uneven.py

This is what a loop with `loss = criterion(model(x), y)` does. `ddp.py` has the remedy.
"""

import torch.distributed as dist
from ddp import SETTINGS, build, loss, shard  # noqa: F401, what the kit reads


def rank_loss(model, batch):
    return loss(model, [x.tensor_split(dist.get_world_size())[dist.get_rank()] for x in batch])

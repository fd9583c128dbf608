"""torch.distributed.pipelining: four layers in stages, four micro-batches.

    python conformance/parallel.py conformance/subjects/torch_pipelining.py
    SCHEDULE=Interleaved1F1B python conformance/parallel.py conformance/subjects/torch_pipelining.py
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

SETTINGS = dict(mesh={1: dict(pp=1)})
SCHEDULE = os.environ.get("SCHEDULE", "1F1B")
STAGES_OF_RANK = 1 if SCHEDULE in ("1F1B", "GPipe") else 2  # two of 8 layers a rank at most


class Model(nn.Module):
    """Eight layers. A stage has some of them, under the names that the whole model gives them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, x):
        for layer in self.layers.children():
            x = x + layer(x).tanh()
        return x


def build():
    return Model(), (torch.randn(8, 6), torch.randn(8, 6))


def shard(model, mesh):
    # Stages go round the ranks, and for ZBV in a V: 0 1 | 1 0 on two ranks.
    rank, world = mesh.get_rank(), mesh.size()
    number = world * STAGES_OF_RANK
    own = [rank + world * n for n in range(STAGES_OF_RANK)]
    if SCHEDULE == "ZBVZeroBubble":
        own = [rank, number - 1 - rank]
    stages = []
    for n in own:
        part = copy.deepcopy(model)
        for i in range(8):
            if i not in range(8 * n // number, 8 * (n + 1) // number):
                delattr(part.layers, str(i))
        stages.append(pipelining.PipelineStage(part, n, number, torch.device("cpu")))
    schedule = pipelining.schedules.get_schedule_class(SCHEDULE)
    several = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
    model = nn.Module()
    model.layers = nn.ModuleDict()
    for stage in stages:
        model.layers.update(dict(stage.submod.layers.named_children()))
    model.schedule = schedule(stages if several else stages[0], 4, loss_fn=mean_square)
    model.is_first, model.is_last = 0 in own, number - 1 in own
    return model


def clip(model, max_norm):
    # torch's clip_grad_norm_ knows this rank's stages only.
    square = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).square()
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())
    return square.sqrt()


def mean_square(found, want):
    return (found - want).square().mean()


def loss(model, batch):
    return mean_square(model(batch[0]), batch[1])


def rank_loss(model, batch):
    losses = []
    given = [batch[0]] if model.is_first else []
    wanted = dict(target=batch[1], losses=losses) if model.is_last else {}
    model.schedule.step(*given, **wanted)
    return torch.stack(losses).mean().detach() if model.is_last else None

"""`parallel.py` of this repository: every kind of plan, with ZeRO-1, for a model of `models.py`.

    python conformance/parallel.py conformance/subjects/ours.py
    PLAN="p2t2 sp" python conformance/parallel.py conformance/subjects/ours.py --ranks 4

Run it in the repository's root. Without PLAN, 2 ranks run "t2 sp", and 4 ranks "d2t2e2 sp".
"""

import os
import re

import parallel
import torch
import torch.distributed as dist

PLAN = os.environ.get("PLAN")
PLANS = {1: "d1", 2: "t2 sp", 4: "d2t2e2 sp"}
DEGREES = {w: dict(re.findall(r"([pdct])(\d+)", PLAN or text)) for w, text in PLANS.items()}
MESH = {w: {letter: int(x.get(letter, 1)) for letter in "pdct"} for w, x in DEGREES.items()}
SETTINGS = dict(ranks="sum", mesh=MESH)


def build():
    tokens = torch.randint(parallel.VOCAB, (8, 9))
    mask = torch.rand(8, 8) < 0.7
    return parallel.check_model(), (tokens[:, :-1], tokens[:, 1:], mask)


def shard(model, mesh):
    training = parallel.Training(model, PLAN or PLANS[mesh.size()])
    model.training_under_plan = [training]  # in a list: the model's parameters stay as they are
    return model


def optimizer(model, **adamw):
    return parallel.ZeroAdamW(model, model.training_under_plan[0].grid, **adamw)


def gather(model, name, x):
    # A part of 11 rows on 2 ranks has 6 or 5, and an all-gather needs equal shapes.
    grid = model.training_under_plan[0].grid
    part = parallel.layout(name, grid)
    group = grid.group[part["over"]]
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, x, group=group)
    return torch.cat(parts, part["dim"])


def clip(model, max_norm):
    return parallel.clip_grad_norm(model, max_norm, model.training_under_plan[0].grid)


def loss(model, batch):
    return parallel.check_loss(model, model.hidden(batch[0]), *batch[1:], batch[2].sum())


def rank_loss(model, batch):
    # As in parallel.py's own check: d ranks have different rows, c ranks different tokens of them.
    grid = model.training_under_plan[0].grid
    share, options = parallel.check_share(grid, batch)
    micro_batches = list(zip(*(x.split(2) for x in share)))
    losses, t = [], grid.group["t"].size()

    def forward(n, x):
        tokens, *rest = micro_batches[n]
        x = model.hidden(tokens if x is None else x, **options)
        if hasattr(model, "lm_head"):
            x = parallel.check_loss(model, x, *rest, batch[2].sum())
            losses.append(x.detach() / t)  # each of t ranks has the whole loss
        return x

    s = share[0].shape[1] // (t if grid.sequence else 1)
    like = torch.empty(2, s, parallel.WIDTH)
    parallel.run_1f1b(forward, len(micro_batches), like, grid.group["p"])
    parallel.reduce_gradients(model, grid)
    return sum(losses) if losses else None

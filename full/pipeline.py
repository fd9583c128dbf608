"""Pipelines: adds two schedules of torch to `parallel.run_1f1b`, which idle less.

`run_1f1b` runs one stage a rank. The two schedules give a rank two stages.
Interleaved, of 4 stages on 2 ranks rank 0 has 0 and 2 (a and c below), so that a rank waits for
half a rank's layers only. zbv: rank r has stages r and 2 p - 1 - r, a V, and a backward computes
the gradients of weights later than those of states (ZB-V, arXiv:2401.10241). Skip this file unless
you use p.

    rank 0   F0a F1a F0c F1c ..
    rank 1   ... F0b F1b F0d ..
"""

import copy
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import parallel
from full.places import part_of

SCHEDULES = {"1f1b": (None, 1),  # torch's class, and how many stages a rank has
             "interleaved1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
             "zbv": (pipelining.ScheduleZBVZeroBubble, 2)}  # fmt: skip


def run_micro_batches(model, forward, number, like=None) -> None:
    """Run forward and backward of micro-batches 0 to number - 1, as `run_1f1b`. Collective for p.

    forward: forward(root, n, x), where `root.hidden` runs the layers: the model, or a stage of it.
    like: as in `run_1f1b`. For p > 1 only.
    """
    part = part_of(model)
    if part.plan.pp == 1:
        # The graph of a micro-batch is freed before the next one is made.
        for n in range(number):
            forward(model, n, None).backward()
    elif part.pipeline is None:
        parallel.run_1f1b(functools.partial(forward, model), number, like, part.grid.group["p"])
    else:
        part.pipeline.run(forward, number, like)


def run_forwards(model, forward, number, like=None) -> None:
    """Run the forward of each micro-batch by itself, without gradients: see run_micro_batches."""
    # COMM: the stages of a micro-batch run one after another, and all ranks take the micro-batches
    # in one order, so each send meets the receive that waits for it. Pinned by
    # tests/full/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
    part = part_of(model)
    group = part.grid.group["p"] if part.plan.pp > 1 else None
    own = part.stages(model)
    rank_of = range(part.plan.pp) if part.pipeline is None else part.pipeline.rank_of
    for n in range(number):
        x = None
        for stage, root in own.items():
            # Where one rank has two neighboring stages, as at the turn of a V, x stays.
            if stage > 0 and stage - 1 not in own:
                x = torch.empty_like(like)
                dist.recv(x, group=group, group_src=rank_of[stage - 1])
            x = forward(root, n, x)
            if stage < len(rank_of) - 1 and stage + 1 not in own:
                dist.send(x.contiguous(), group=group, group_dst=rank_of[stage + 1])


def keep_stage_and_ends(model, stage, stages, is_tied) -> None:
    """Keep the layers of a stage, in place, and what it has of the ends."""
    embedding = model.model.embed_tokens
    parallel.keep_stage(model, stage, stages)
    if stage < stages - 1:
        model._modules.pop("score", None)  # a critic's head
    elif is_tied:
        model.model.embed_tokens = embedding  # its rows are the head


class TorchPipeline:
    """The two stages that this rank has of a model, run by torch.distributed.pipelining.

    own: dict. Number of a stage -> a module with its layers, which are also the model's.
    rank_of: list. The rank of the group that has each stage.
    """

    def __init__(self, model, group, schedule, is_tied):
        p = group.size()
        self.group = group
        self.schedule, _ = SCHEDULES[schedule]
        # Which rank has each stage. 4 stages on 2 ranks: 0 1 0 1 interleaved, 0 1 1 0 as a V.
        self.rank_of = [*range(p)] * 2
        if schedule == "zbv":
            self.rank_of = [*range(p), *reversed(range(p))]
        self.stages = len(self.rank_of)
        self.own = {}
        for stage, rank in enumerate(self.rank_of):
            if rank == group.rank():
                self.own[stage] = copy_of_lists(model)
                keep_stage_and_ends(self.own[stage], stage, self.stages, is_tied)
        self.last = self.own.get(self.stages - 1)  # None on ranks that do not have it

        # The model keeps what one of its stages has: parameters have one name in it, in its stages
        # and in a checkpoint of any plan.
        held = {id(module) for stage in self.own.values() for module in stage.modules()}
        held |= {id(model.model), id(model.model.layers)}
        for owner in (model.model.layers, model.model, model):
            for name, module in [*owner._modules.items()]:
                if id(module) not in held:
                    del owner._modules[name]
        self.forward = None  # of the current step, for `_Stage`
        self.run_for = None  # (shape, number) of the micro-batches of `made`, torch's schedule
        self.made = None

    def run(self, forward, number, like) -> None:
        """Run a step, as `run_micro_batches` says."""
        # torch makes a schedule for one shape, because its stages keep buffers of that shape. Only
        # the latest schedule is kept, because each padded length brings new buffers. A length that
        # changes in every step costs a new schedule each time, some milliseconds.
        if self.run_for != (like.shape, number):
            self.run_for, self.made = (like.shape, number), None  # the old buffers go first
            self.made = self.make_schedule(like, number)
        self.forward = forward

        # A schedule hands tensors from stage to stage and nothing else. Every stage is given the
        # index of the micro-batch, the first one in place of tokens. The last one returns the loss.
        # COMM: each stage sends states to the next and their gradients back. torch's schedule
        # orders the sends and receives of neighbors so that they match. Pinned by
        # tests/full/test_parallel.py::test_collectives_are_those_of_the_table.
        index = torch.arange(number, device=like.device)
        inputs = (index,) if 0 in self.own else ()
        options = dict(target=index, losses=[]) if self.last is not None else {}
        self.made.step(*inputs, index=index, return_outputs=False, **options)
        self.forward = None

    def make_schedule(self, like, number):
        """Return torch's schedule for micro-batches whose states between stages are as `like`."""
        states = torch.empty_like(like, requires_grad=True)
        index = torch.zeros(1, dtype=torch.int64, device=like.device)
        loss = torch.zeros((), device=like.device, requires_grad=True)
        stages = [
            pipelining.PipelineStage(
                _Stage(self, root), stage, self.stages, like.device, group=self.group,
                input_args=index if stage == 0 else states,
                output_args=loss if stage == self.stages - 1 else states,
            )
            for stage, root in self.own.items()
        ]  # fmt: skip
        # scale_grads=False: torch would average the losses.
        return self.schedule(stages, number, loss_fn=lambda loss, index: loss, scale_grads=False)


class _Stage(nn.Module):
    """The module that torch's schedule runs: (index of a micro-batch, or states) -> states."""

    def __init__(self, pipeline, root):
        super().__init__()
        self.pipeline = pipeline
        self.root = root

    def forward(self, x, index):
        return self.pipeline.forward(self.root, int(index), x if x.is_floating_point() else None)


def copy_of_lists(model):
    """Return a model that shares the modules of another one, but not its lists of them."""
    def shallow(module):
        copied = copy.copy(module)
        copied._modules = dict(module._modules)
        return copied

    copied = shallow(model)
    copied.model = shallow(model.model)
    copied.model.layers = shallow(model.model.layers)
    return copied

"""Run the stages of a model on several ranks, by `parallel.run_1f1b` or two schedules of torch.

`run_1f1b` runs one stage a rank. The two schedules give a rank two stages, and idle less.
Interleaved, of 4 stages on 2 ranks rank 0 has 0 and 2 (a and c below), so that a rank waits for a
stage of half as many layers. zbv: rank r has stages r and 2 p - 1 - r, a V, and a backward computes
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

SCHEDULES = {"1f1b": (None, 1),  # torch's class, and how many stages a rank has
             "interleaved1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
             "zbv": (pipelining.ScheduleZBVZeroBubble, 2)}  # fmt: skip


class Pipeline:
    """The stages of a model over ranks, one a rank, by `parallel.run_1f1b`. A whole model is one.

    group: the ranks that have the stages. Default: every rank has the whole model.
    rank_of: the rank of the group that has each stage.
    """

    def __init__(self, group=None):
        self.group = group
        self.rank_of = range(1 if group is None else group.size())

    def stages(self, model) -> dict:
        """Return {stage: the module whose `hidden` runs its layers} of this rank's stages."""
        return {0 if self.group is None else self.group.rank(): model}

    def has_head(self, root=None) -> bool:
        """Return whether a stage computes log-probs. root: the stage. None: any of this rank's."""
        found = self.stages(root)
        last = len(self.rank_of) - 1
        return last in found and root in (None, found[last])

    def micro_batches(self, count) -> int:
        """Return how many micro-batches are run where there is data for `count` of them."""
        # 1F1B runs any number from 1, and an empty micro-batch costs it a whole row.
        return max(count, 1) if len(self.rank_of) > 1 else count

    def run(self, model, forward, number, like) -> None:
        """Run forward and backward of all micro-batches, as `packing.run_micro_batches` says."""
        if len(self.rank_of) > 1:
            parallel.run_1f1b(functools.partial(forward, model), number, like, self.group)
            return
        # The graph of a micro-batch is freed before the next one is made.
        for n in range(number):
            forward(model, n, None).backward()

    def run_forwards(self, model, forward, number, like) -> None:
        """Run the forward of each micro-batch by itself, without gradients."""
        # COMM: the stages of a micro-batch run one after another, and all ranks take the
        # micro-batches in one order, so each send meets the receive that waits for it. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        own = self.stages(model)
        for n in range(number):
            x = None
            for stage, root in own.items():
                # Where one rank has two neighboring stages, as at the turn of a V, x stays.
                if stage > 0 and stage - 1 not in own:
                    x = torch.empty_like(like)
                    dist.recv(x, group=self.group, group_src=self.rank_of[stage - 1])
                x = forward(root, n, x)
                if stage < len(self.rank_of) - 1 and stage + 1 not in own:
                    after = self.rank_of[stage + 1]
                    dist.send(x.contiguous(), group=self.group, group_dst=after)


def keep_stage_and_ends(model, stage, stages, is_tied) -> None:
    """Keep the layers of a stage, in place, and what it has of the ends."""
    embedding = model.model.embed_tokens
    parallel.keep_stage(model, stage, stages)
    if stage < stages - 1:
        model._modules.pop("score", None)  # a critic's head
    elif is_tied:
        model.model.embed_tokens = embedding  # its rows are the head


class TorchPipeline(Pipeline):
    """A pipeline whose ranks have two stages each, run by torch.distributed.pipelining.

    roots: dict. Number of a stage of this rank -> a module with its layers, which are the model's.
    """

    def __init__(self, model, group, schedule, is_tied):
        super().__init__(group)
        p = group.size()
        self.schedule, _ = SCHEDULES[schedule]
        # Which rank has each stage. 4 stages on 2 ranks: 0 1 0 1 interleaved, 0 1 1 0 as a V.
        self.rank_of = [*range(p)] * 2
        if schedule == "zbv":
            self.rank_of = [*range(p), *reversed(range(p))]
        count = len(self.rank_of)
        self.roots = {}
        for stage, rank in enumerate(self.rank_of):
            if rank == group.rank():
                self.roots[stage] = copy_of_lists(model)
                keep_stage_and_ends(self.roots[stage], stage, count, is_tied)

        # The model keeps what one of its stages has: parameters have one name in it, in its stages
        # and in a checkpoint of any plan.
        held = {id(module) for stage in self.roots.values() for module in stage.modules()}
        held |= {id(model.model), id(model.model.layers)}
        for owner in (model.model.layers, model.model, model):
            for name, module in [*owner._modules.items()]:
                if id(module) not in held:
                    del owner._modules[name]
        self.forward = None  # of the current step, for `_Stage`
        self.run_for = None  # (shape, number) of the micro-batches of `made`, torch's schedule
        self.made = None

    def stages(self, model) -> dict:
        return self.roots

    def micro_batches(self, count) -> int:
        # torch's schedules want at least 2 p micro-batches, and a multiple of p: 5 of them on 2
        # stages become 6.
        p = self.group.size()
        return max(2 * p, -(-count // p) * p)

    def run(self, model, forward, number, like) -> None:
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
        inputs = (index,) if 0 in self.roots else ()
        options = dict(target=index, losses=[]) if self.has_head() else {}
        self.made.step(*inputs, index=index, return_outputs=False, **options)
        self.forward = None

    def make_schedule(self, like, number):
        """Return torch's schedule for micro-batches whose states between stages are as `like`."""
        count = len(self.rank_of)
        states = torch.empty_like(like, requires_grad=True)
        index = torch.zeros(1, dtype=torch.int64, device=like.device)
        loss = torch.zeros((), device=like.device, requires_grad=True)
        stages = [
            pipelining.PipelineStage(
                _Stage(self, root), stage, count, like.device, group=self.group,
                input_args=index if stage == 0 else states,
                output_args=loss if stage == count - 1 else states,
            )
            for stage, root in self.roots.items()
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

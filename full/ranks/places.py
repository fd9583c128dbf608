"""Describe a rank's part of a model: the place of each parameter, and the pipeline's stages.

Functions that sum and clip gradients, or that update, compare, write, read or send weights, use the
places of parameters and need not know the plan. A pipeline runs the stages.
"""

import copy
import dataclasses
import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import parallel
from full.ranks.joining import all_gather_objects
from full.ranks.plans import SCHEDULES, Plan


class Place(NamedTuple):
    """Where this rank's entries of a parameter lie, and which ranks share the work on them.

    A box is a range for each dimension. A matrix of 13 x 8, cut by t = 2 along dimension 0 and then
    by FSDP over d = 2 along dimension 0, on the rank with t = 1 and d = 1:

        boxes[0]   0-13, 0-8      the whole
        boxes[1]   7-13, 0-8      t = 0 has the rows 0-7
        boxes[2]   10-13, 0-8     d = 0 has the rows 7-10

    mesh: DeviceMesh, of the grid. None without a grid.
    boxes: tuple. boxes[k] holds this rank's entries after the first k cuts.
    cuts: tuple of (dimension of the tensor, name of the mesh's dimension), in the order of cutting.
    gradient_groups: tuple of process groups. The gradient is summed over one after the other.
    replica_count: int. The number of ranks of the world that hold each entry.
    """

    mesh: DeviceMesh | None
    boxes: tuple
    cuts: tuple = ()
    gradient_groups: tuple = ()
    replica_count: int = 1

    @property
    def shape(self) -> tuple:
        """The shape of the whole parameter."""
        return tuple(map(len, self.boxes[0]))

    @property
    def region(self) -> tuple:
        """The slices of the whole that are on this rank."""
        return tuple(slice(r.start, r.stop) for r in self.boxes[-1])

    def cut(self, dim, name) -> "Place":
        """Cut this rank's entries along `dim` over a dimension of the mesh, as `own_chunk` does."""
        ranks = self.mesh[name].size()
        if ranks == 1:
            return self
        # 7 rows on 2 ranks are 4 and 3. If rows run out, the last ranks have none.
        rows = self.boxes[-1][dim]
        size = math.ceil(len(rows) / ranks)
        first = self.mesh.get_local_rank(name) * size
        box = list(self.boxes[-1])
        box[dim] = rows[first : first + size]
        return self._replace(
            boxes=(*self.boxes, tuple(box)), cuts=(*self.cuts, (dim, name)),
            replica_count=self.replica_count // ranks,
        )  # fmt: skip

    def cut_copies(self) -> "Place":
        """Cut by rows over the ranks with other tokens and the same entries."""
        # A number without dimensions has no rows: each of the ranks has it.
        return self.cut(0, self.mesh.mesh_dim_names[-1]) if self.shape else self

    def as_dtensor(self, x):
        """Return this rank's entries x as the DTensor that torch's checkpoints expect."""
        if not self.cuts:
            return x
        # The mesh has its dimensions in the order of cutting, which is what a DTensor means by two
        # cuts of one dimension.
        by_name = {name: Shard(dim) for dim, name in self.cuts}
        placements = [by_name.get(name, Replicate()) for name in self.mesh.mesh_dim_names]
        whole = dict(shape=torch.Size(self.shape))
        whole["stride"] = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, placements, run_check=False, **whole)

    @torch.no_grad()
    def gather(self, x, kept=0):
        """Undo all cuts of this rank's entries x but the first `kept`. Collective.

        It holds the result of one cut at a time, what this was gathered from, and a copy of that.
        `parallel.all_gather` cuts the last dimension alone, and would hold the result twice. To
        gather rows it takes 3 times as long.
        """
        # 13 rows under t2, and then FSDP over d2:
        #
        #     t 0: 7 rows   d 0: 4  d 1: 3          gathered over d: 7 and 6 rows
        #     t 1: 6 rows   d 0: 3  d 1: 3          and then over t: 13
        for k in reversed(range(kept, len(self.cuts))):
            dim, name = self.cuts[k]
            group = self.mesh.get_group(name)
            size = len(self.boxes[k][dim])
            rows = x.movedim(dim, 0)
            piece = math.ceil(size / group.size())
            # COMM: an all-gather over the ranks of one cut. Pieces are padded to equal size, so an
            # empty one is sent too. Pinned by
            # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
            if len(rows) < piece:
                rows = torch.cat([rows, rows.new_zeros(piece - len(rows), *rows.shape[1:])])
            whole = rows.new_empty(piece * group.size(), *rows.shape[1:])
            dist.all_gather_single(whole, rows.contiguous(), group=group)
            x = whole[:size].movedim(0, dim)
        return x


def layout(name, grid):
    """Return `parallel.layout`, extended by recurrent layers and by a critic's whole head."""
    if name == "score.weight":
        name = "model.norm.weight"
    path, is_recurrent, rest = name.partition(".linear_attn.")
    if is_recurrent:
        like = {"out_proj": "o_proj", "norm": "q_norm"}.get(rest.split(".")[0], "q_proj")
        name = f"{path}.self_attn.{like}.weight"
    return parallel.layout(name, grid)


def place_of(name, shape, grid, mode, ends_share_embedding) -> Place:
    """Return the place of a parameter whose whole has this shape.

    ends_share_embedding: bool. The first and the last stage share an embedding, on different ranks.
    """
    plan = grid.plan
    how = layout(name, grid)
    is_expert = ".experts." in name
    mesh = grid.experts if is_expert else grid.dense
    place = Place(mesh, (tuple(map(range, shape)),), replica_count=plan.world // plan.pp)
    if how["over"]:
        place = place.cut(how["dim"], how["over"])
    if is_expert:
        place = place.cut(inner_width(name), "etp")

    # Experts have received the rows of all ranks except those of edp. If the experts' width is cut,
    # a router sees a partial sum of the outputs that it weighs. After the last norm all t ranks
    # compute the same, so a critic's head has the whole gradient.
    partial = "edp" if is_expert else how["partial"]
    if plan.etp > 1 and ".mlp.gate." in name:
        partial = "dct"
    if partial == "dct" and not name.startswith("model."):
        partial = "dc"
    if mode == "fsdp":  # FSDP2 cuts the parts of t and e further, and sums over these ranks
        place = place.cut_copies()
        partial = "t" if partial == "dct" else ""
    groups = [grid.group[partial]]
    if ends_share_embedding and name == TIED and grid.ends is not None:
        groups.append(grid.ends)
        place = place._replace(replica_count=2 * place.replica_count)
    return place._replace(gradient_groups=tuple(group for group in groups if group.size() > 1))


TIED = "model.embed_tokens.weight"  # of a tied model, on the first stage and on the last


# The stages of a rank ---------------------------------------------------------------------------
#
# `parallel.run_1f1b` runs one stage per rank. Two schedules of torch give a rank two stages and
# idle less. Interleaved: of 4 stages on 2 ranks, rank 0 has 0 and 2 (a and c below), so that a rank
# waits for a stage of half as many layers. zbv: rank r has stages r and 2 p - 1 - r, a V, and a
# backward computes the gradients of weights after the gradients of states (ZB-V, arXiv:2401.10241).
# Skip this section unless you use p.
#
#     rank 0   F0a F1a F0c F1c ..
#     rank 1   ... F0b F1b F0d ..


class Pipeline:
    """One stage of a model per rank, run by `parallel.run_1f1b`. A whole model is one stage.

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
        own = self.stages(root)
        last = len(self.rank_of) - 1
        return last in own and root in (None, own[last])

    def micro_batches(self, count) -> int:
        """Return the number of micro-batches to run if there is data for `count` of them."""
        # 1F1B runs any number from 1 on. An empty micro-batch costs as much as a whole row.
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
                # If one rank has two neighboring stages, as at the turn of a V, x is not sent.
                if stage > 0 and stage - 1 not in own:
                    x = torch.empty_like(like)
                    dist.recv(x, group=self.group, group_src=self.rank_of[stage - 1])
                x = forward(root, n, x)
                if stage < len(self.rank_of) - 1 and stage + 1 not in own:
                    after = self.rank_of[stage + 1]
                    dist.send(x.contiguous(), group=self.group, group_dst=after)


def keep_stage_and_ends(model, stage, stages, is_tied) -> None:
    """Keep the layers of a stage, and the embedding or value head that the stage uses, in place."""
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
        self.schedule, stages = SCHEDULES[schedule]
        # Which rank has each stage. 4 stages on 2 ranks: 0 1 0 1 interleaved, 0 1 1 0 as a V.
        self.rank_of = [*range(p)] * stages
        if schedule == "zbv":
            self.rank_of = [*range(p), *reversed(range(p))]
        count = len(self.rank_of)
        self.roots = {}
        for stage, rank in enumerate(self.rank_of):
            if rank == group.rank():
                self.roots[stage] = copy_of_lists(model)
                keep_stage_and_ends(self.roots[stage], stage, count, is_tied)

        # The model keeps the modules of its stages, so a parameter has one name in the model, in a
        # stage and in a checkpoint of any plan.
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

        # A schedule passes only tensors from stage to stage. Every stage gets the index of the
        # micro-batch, the first stage in place of tokens. The last stage returns the loss.
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


# A model on a rank ------------------------------------------------------------------------------


@dataclasses.dataclass
class Part:
    """This rank's part of a model, and the plan.

    places: dict. Name of a parameter -> Place.
    grid: Grid. None for a model that `parallelize` has not seen: each rank has a copy.
    mode, offload, compute_dtype: as given to `parallelize`.
    pipeline: runs the model's stages. A whole model is one stage.
    """

    plan: Plan
    device: torch.device
    places: dict
    grid: object = None
    mode: str = "ddp"
    offload: bool = False
    compute_dtype: torch.dtype | None = None
    pipeline: Pipeline = dataclasses.field(default_factory=Pipeline)


def part_of(model) -> Part:
    """Return a model's Part: what `parallelize` made, or a new one if every rank has it whole."""
    if getattr(model, "part", None) is not None:
        return model.part
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("expected a whole model or one of parallelize, got one with DTensors")
    # Without a process group there is one rank, and no other rank to sum with.
    world = dist.get_world_size() if dist.is_initialized() else 1
    groups = (dist.group.WORLD,) if world > 1 else ()
    places = {name: whole_place(p)._replace(gradient_groups=groups, replica_count=world)
              for name, p in model.named_parameters()}  # fmt: skip
    return Part(Plan(dp=world), next(model.parameters()).device, places)


def whole_place(x) -> Place:
    """Return the place of a tensor that is whole on this rank."""
    return Place(None, (tuple(map(range, x.shape)),))


def local(tensor):
    """Return the plain tensor on this rank. A DTensor shares its memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_tensor(model, name, x) -> None:
    """Replace a parameter, a buffer or a module of a model by another one."""
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, x)


def variant_of(model, kind, *arguments):
    """Return a model of another class, kind(config, *arguments), that shares a model's parameters.

    Tensors that the model does not have, such as factors, are on the meta device.
    """
    with torch.device("meta"):
        variant = kind(model.config, *arguments)
    shared = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, _ in [*variant.named_parameters(), *variant.named_buffers()]:
        if name in shared:
            set_tensor(variant, name, shared[name])
    variant.residual_dtype, variant.head_dtype = model.residual_dtype, model.head_dtype
    return variant


def full(tensor, place=None):
    """Return the whole tensor, from this rank's part. Collective if it is sharded.

    place: Place. The entry of `model.part.places`, for a parameter or its gradient. Default: the
        tensor is whole, or a DTensor.
    """
    if place is not None:
        return place.gather(local(tensor.detach()))
    # COMM: all-gathers over the ranks of each cut, by torch. All of them must call it. Pinned by
    # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard(model) -> None:
    """Free the weights that FSDP gathered: after a forward alone, the root's are still whole."""
    for root in part_of(model).pipeline.stages(model).values():
        if isinstance(root, fsdp.FSDPModule):
            root.reshard()


def inner_width(name) -> int:
    """Return the dimension of the inner width in a weight of a layer's experts."""
    # Weights are (E, inner, M), except for down_proj, which is (E, M, inner).
    return 2 if name.endswith("down_proj") else 1


def is_replica_leader(model) -> bool:
    """Return whether this rank's measurements count, among ranks with the same sequences."""
    part = part_of(model)
    if part.grid is None:
        return True
    # The first rank of its tensor group that is also the first of its context.
    #
    #     plan t2c2: tensor groups 0 1 | 2 3, contexts 0 2 | 1 3   ->   rank 0 alone
    first = all(part.grid.group[letter].rank() == 0 for letter in "ct")
    return first and part.pipeline.has_head()


def gather_replica(model, items):
    """Return the items of all ranks of this rank's replica, and the index of its own first item.

    Data is often distributed over all ranks, but the ranks of one c, t or p group run the same
    forward.

    items: list of anything that can be pickled. The result is in the order of the ranks.
    """
    part = part_of(model)
    if part.plan.world == part.plan.dp:
        return items, 0
    # COMM: an all-gather over the c, t and p ranks of one data share. Pinned by
    # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    replica = part.grid.group["pct"]
    parts = all_gather_objects(items, replica)
    first = sum(len(part) for part in parts[: replica.rank()])
    return [item for part in parts for item in part], first

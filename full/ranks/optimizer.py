"""Sum and clip gradients, step AdamW with master weights or ZeRO-1, and name a run's tensors.

After the backward, gradients are summed over ranks, checked for non-finite entries, and clipped.
AdamW updates the plain tensors of this rank, with ZeRO-1 (arXiv:1910.02054) or with master weights.
PyTorch's DDP and FSDP2 average gradients over ranks, and this file sums them. DDP and Megatron
overlap the sum with the backward, and this file does not.

Equations (1) to (7) are in parallel.py.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from full.ranks.joining import all_gather_objects
from full.ranks.places import local, part_of, reshard, set_tensor

MESSAGE = 256 << 20  # bytes


@torch.no_grad()
def reduce_gradients(model) -> int:
    """Sum each parameter's gradient over ranks, in place: (1). Collective, once before each step.

    A rank without a gradient adds zeros. FSDP2 has summed over data ranks in the backward already.
    Returns the index, in backward order, of this rank's first non-finite gradient, or -1, for
    `name_suspects`. Index 0 is the model's last parameter.
    """
    reshard(model)  # otherwise the root's parameters have no gradients
    places = part_of(model).places
    gradients = []
    by_message = {}
    for name, p in reversed([*model.named_parameters()]):
        # A rank without tokens sends zeros, because the others wait for it.
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        gradients.append(local(p.grad) if p.requires_grad else None)
        # NUMERICS: copies of a parameter must get the same bits, and the order in which an
        # all-reduce adds depends on the place in the message. Two groups may hold copies of a
        # parameter that is not cut. So it shares no message with cut ones, whose parts may differ
        # in length. Pinned by
        # tests/full/test_parallel_faults.py::test_replicas_hold_the_same_bits_after_three_steps.
        for group in places[name].gradient_groups if p.requires_grad else ():
            key = group, bool(places[name].cuts)
            by_message.setdefault(key, []).append(gradients[-1])
    suspect = first_non_finite(gradients)

    # COMM: the places decide what is sent, and they are the same on all ranks of a group, whatever
    # gradients a rank has. Pinned by
    # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    for (group, _), summands in by_message.items():
        sum_in_messages(summands, group)  # (1)
    return suspect


def sum_in_messages(gradients, group):
    """Sum gradients over a group, in place, in messages of at most MESSAGE bytes.

    Several in a message need a buffer of its size. A larger gradient is alone. The 30 gradients of
    `guess` take 7 ms on 2 ranks of a CPU, and 70 ms one by one by `parallel.all_reduce_sum`.
    """
    buckets = []
    for gradient in gradients:
        if not buckets or sum(g.nbytes for g in buckets[-1]) + gradient.nbytes > MESSAGE:
            buckets.append([])
        buckets[-1].append(gradient)
    for bucket in buckets:
        # COMM: all ranks of the group have the same gradients, in the same order. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat, group=group)
        for g, total in zip(bucket, flat.split([g.numel() for g in bucket])):
            g.copy_(total.view_as(g))


def first_non_finite(gradients) -> int:
    """Return the index of the first gradient with an entry that is not finite, or -1.

    gradients: list of tensors, with None for a frozen parameter.
    """
    # One transfer to the host for all gradients: on a GPU each `if` on a tensor waits for it.
    indices = [n for n, g in enumerate(gradients) if g is not None]
    finite = [gradients[n].isfinite().all() for n in indices]
    finite = torch.stack(finite).tolist() if finite else []
    return next((n for n, is_finite in zip(indices, finite) if not is_finite), -1)


def name_suspects(model, suspect: int, prefix="") -> str:
    """Name each rank's first non-finite gradient, which `reduce_gradients` has found.

    prefix: str. It precedes the names.
    """
    names = [prefix + name for name, _ in model.named_parameters()][::-1]
    # COMM: an all-gather of one name over all ranks, which all skip the same step. Pinned by
    # tests/full/test_faults.py::test_a_nan_on_one_rank_is_skipped_by_all_and_named.
    suspects = all_gather_objects(names[suspect] if suspect >= 0 else None)
    texts = [f"{name} on rank {rank}" for rank, name in enumerate(suspects) if name]
    return ", ".join(texts) or "every gradient is finite; only the norm overflowed"


@torch.no_grad()
def clip_grad_norm(model, max_norm: float):
    """Scale the summed gradients of all ranks to a norm of at most max_norm, in place.

    Returns the norm before that, a 0-d float64 tensor, the same on every rank. If it is not finite,
    no gradient is changed, and the caller must skip the step. Collective.
    """
    part = part_of(model)
    gradients = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    # NUMERICS: in float64, as a float32 sum of squares over 100,000 entries of an embedding is off
    # in the fifth digit. An entry that k ranks hold counts 1 / k on each. Pinned by
    # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    sum_of_squares = torch.zeros((), dtype=torch.float64, device=part.device)
    for name, g in gradients.items():
        square = torch.linalg.vector_norm(g, dtype=torch.float64).square()
        sum_of_squares += square.to(part.device) / part.places[name].replica_count
    # COMM: an all-reduce of one number over all ranks. Pinned by
    # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    if dist.is_initialized():
        dist.all_reduce(sum_of_squares)
    norm = sum_of_squares.sqrt()  # (6)

    # DEVIATES: torch divides by norm + 1e-6, and so does parallel.py. This divides by the norm.
    # Pinned by tests/full/test_ranks.py::test_the_clip_is_exactly_the_ratio_of_norms.
    value = norm.item()  # one wait for the device, and not one for each gradient
    if max_norm < value < math.inf:
        for g in gradients.values():
            g.mul_(max_norm / value)  # (7)
    return norm


# The optimizer, its precision, and the state of a run -------------------------------------------
#
# Mixed precision. A step of lr 1e-6 moves a weight of 0.02 by 1e-6, and bf16, with 8 bits, has
# nothing between 0.02 and 0.0201: added to a bf16 weight such a step is lost, and a thousand of
# them too. So AdamW updates master weights, in float32 say, and the model computes with them
# rounded:
#
#     bytes of      computes    master    gradient    moments
#     fsdp          2 (a unit)  4         4           4 + 4      all sharded; 2 while a unit runs
#     ddp, zero1    2           4         4           4 + 4      zero1 shards master and moments
#
# Under fsdp FSDP2 does it: parameters are the masters' shards, an all-gather rounds them, and the
# reduce-scatter is of wide gradients. Elsewhere the model's parameters are the rounded ones. Their
# `grad_dtype` tells torch to cast a gradient before it is added to .grad, so the sums over
# micro-batches and over ranks are wide. The states between layers, to which each layer adds, stay
# wide too if the model has a `residual_dtype`, as torch.autocast does it.
class LocalOptimizer:
    """Run a torch optimizer on the plain tensors of this rank: whole weights, or their parts.

    model: any module, or what `parallelize` returned.
    make: from a list of parameters to the optimizer: lambda p: torch.optim.AdamW(p, lr=1e-5).
    zero: bool. ZeRO-1: each of the ranks with the same weights updates some of their rows, holds
        the state of those alone, and sends them to the others.

    mine: dict. Name -> the tensor that is updated.
    places: dict. Name -> Place of that tensor in the whole.
    """

    def __init__(self, model, make, *, zero=False):
        self.model = model
        self.part = part_of(model)
        # Ranks that shard the weights hold different rows, which must not overwrite one another.
        if zero and self.part.mode != "zero1":
            raise ValueError(
                f"zero=True shards the states of whole weights: expected a model of "
                f'parallelize(.., mode="zero1"), got mode={self.part.mode!r}')  # fmt: skip
        self.has_masters = self.part.compute_dtype is not None and self.part.mode != "fsdp"
        self.places = dict(self.part.places)
        if zero:
            self.places = {name: place.cut_copies() for name, place in self.places.items()}

        # The optimizer gets views of the model's own memory: what it updates is the model. AdamW
        # treats each entry by itself, so it needs to know neither DTensors nor the other rows.
        # Masters are not views: the model gets rounded parameters in their place.
        self.mine = {}
        for name in [name for name, p in model.named_parameters() if p.requires_grad]:
            p = model.get_parameter(name)  # one at a time: there are never two whole models
            rows = self.own_rows(name, local(p.detach()))
            if self.has_masters:
                if zero:
                    rows = rows.clone()  # a view of some rows would keep all of them in memory
                rounded = nn.Parameter(p.detach().to(self.part.compute_dtype))
                # NUMERICS: the gradients of micro-batches, and of the two uses of a tied embedding,
                # are added in the master's precision. Pinned by
                # tests/full/test_precision.py::test_values_of_a_critic_are_as_good_as_plain_torch.
                rounded.grad_dtype = p.dtype
                set_tensor(model, name, rounded)
            self.mine[name] = nn.Parameter(rows)
        # torch refuses an empty list, and a stage of a pipeline may have nothing that is trained. A
        # group of no parameters is accepted.
        self.inner = make([dict(params=[*self.mine.values()])])
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def own_rows(self, name, x):
        """Return the rows of a rank's tensor that this rank updates: all of them without `zero`."""
        here, own = (places[name].boxes[-1] for places in (self.part.places, self.places))
        return x[own[0].start - here[0].start :][: len(own[0])] if own != here else x

    @torch.no_grad()
    def step(self) -> None:
        """Make one update from .grad, (7). A parameter without a gradient keeps its value."""
        for name, own in self.mine.items():
            # NUMERICS: torch's fused AdamW reads the memory of a gradient as if it were contiguous.
            # `backward` makes it so, but the zbv of torch leaves a gradient that is a view. Pinned
            # by tests/full/test_precision.py::test_a_gradient_that_is_a_view_is_read_right.
            grad = self.model.get_parameter(name).grad
            own.grad = None if grad is None else self.own_rows(name, local(grad)).contiguous()
        self.inner.step()  # (7)
        self.copy_to_model()

    def zero_grad(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Bring updated, or loaded, weights into the model. Collective with `zero`.

        Without masters and without `zero` they are there already.
        """
        for name, own in self.mine.items():
            p = self.model.get_parameter(name)
            kept = len(self.part.places[name].cuts)
            if self.has_masters or len(self.places[name].cuts) > kept:
                # COMM: an all-gather over the ranks with the same weights, of the rows that each
                # has updated. They are rounded before they are sent. Pinned by
                # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
                rows = own.detach().to(p.dtype)
                local(p.detach()).copy_(self.places[name].gather(rows, kept))


def weights_and_places(model, optimizer=None) -> tuple[dict, dict]:
    """Return the weights of a model, masters where there are, and their places."""
    reshard(model)
    weights, places = dict(model.named_parameters()), dict(part_of(model).places)
    if getattr(optimizer, "has_masters", False):
        weights |= optimizer.mine
        places |= {name: optimizer.places[name] for name in optimizer.mine}
    return weights, places


def weights_to_store(model, optimizer=None) -> dict:
    """Return name -> weight. If this rank has a part, it is a DTensor that shares memory."""
    weights, places = weights_and_places(model, optimizer)
    return {name: places[name].as_dtensor(local(x.detach())) for name, x in weights.items()}


def persistent_buffers(model) -> dict:
    """Return name -> buffer of those that belong to a model's state, such as a router's bias."""
    names = dict(model.named_buffers())
    state = model.state_dict(keep_vars=True)
    return {name: x for name, x in state.items() if name in names}


def tensors_of(model) -> dict:
    """Return name -> tensor of the weights and of the buffers that belong to a model's state."""
    return weights_to_store(model) | persistent_buffers(model)


def training_tensors(model, optimizer) -> dict:
    """Return every tensor that a resumed run needs, under flat names. AdamW's state is made.

    model.NAME and optimizer.NAME.KEY of a parameter, buffer.NAME of a persistent buffer. If this
    rank has a part of a tensor, it is a DTensor, which shares the memory.

    optimizer: LocalOptimizer, or torch's AdamW.
    """
    # The base of factors never changes: its directory, or the seed, has it.
    has_base = hasattr(model, "lora")
    kept = [name for name, p in model.named_parameters() if p.requires_grad or not has_base]
    stored = weights_to_store(model, optimizer)
    tensors = {f"model.{name}": stored[name] for name in kept}
    places = getattr(optimizer, "places", part_of(model).places)
    for name in kept:
        p = model.get_parameter(name)
        own = optimizer.mine.get(name, p) if isinstance(optimizer, LocalOptimizer) else p
        # Read with get: asking a torch optimizer for the state of a parameter would make one.
        state = optimizer.state.get(own, {})
        if p.requires_grad and not state:  # as AdamW makes it before its first step
            step = torch.zeros((), dtype=torch.float32, device=own.device)
            zeros = {key: torch.zeros_like(own) for key in ("exp_avg", "exp_avg_sq")}
            state = optimizer.state[own] = dict(step=step, **zeros)
        for key, x in state.items():
            # The number of steps has no dimension, and is the same on all ranks.
            tensors[f"optimizer.{name}.{key}"] = places[name].as_dtensor(local(x)) if x.dim() else x
    return tensors | {f"buffer.{name}": x for name, x in persistent_buffers(model).items()}


def lr_factor(step, /, *, warmup, total, decay="linear") -> float:
    """Return the multiple of lr for a step: a linear warm-up, then a decay to the last step.

    step: int from 0 to total - 1. A later step has the factor at the end of the decay.
    warmup: int, at most total. The number of steps that rise to 1.
    total: int. The number of steps of the run.
    decay: "linear", "cosine" or "constant". Default: "linear".

    For warmup 2, total 10, linear: .5  1  1  .875  .75  .625  .5  .375  .25  .125. The warm-up
    begins with 1 / warmup, as in torchtitan, and not with 0, as in Hugging Face and verl.
    """
    if step < warmup:
        return (step + 1) / warmup

    # The decay is 0 done in the first step after the warm-up, and would be all done at `total`. If
    # all steps are warm-up, only a step past the end gets here, and max avoids a division by 0.
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return left[decay]

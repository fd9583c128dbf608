"""Copies a policy's weights into the model that samples, one tensor after the other."""

import torch
import torch.distributed as dist
from torch import nn

from full.model.lora import factors_of, is_factor, merged
from full.ranks.joining import all_gather_objects
from full.ranks.optimizer import persistent_buffers, weights_and_places
from full.ranks.places import local, part_of, set_tensor, whole_place


def share_or_allocate(source, target, device) -> None:
    """Give a model on the meta device memory, the source's own where it can have it.

    source, target: as in `gather_weights`. What an optimizer writes into a shared parameter of the
        source is in the target at once, and `copy_weights` leaves it out.

    The content of new memory is undefined.
    """
    # Both are cut alike by t and e. But FSDP moves its shards' memory about, a stage of a pipeline
    # has some of the layers only, which the other ranks of its pipeline need to be sent, and what
    # has factors is not shared: the target gets the merged weights.
    shared = {}
    part = part_of(source)
    if part.mode != "fsdp" and part.plan.pp == 1:
        shared = dict(source.named_parameters())
        for name in factors_of(source):
            del shared[name]
    for name, q in [*target.named_parameters()]:
        p = shared.get(name)
        is_shared = p is not None and p.dtype == q.dtype
        memory = p.detach() if is_shared else torch.empty_like(q, device=device)
        set_tensor(target, name, nn.Parameter(memory, requires_grad=False))
    for name, buffer in [*target.named_buffers()]:
        set_tensor(target, name, torch.zeros_like(buffer, device=device))


@torch.no_grad()
def copy_weights(source, target, optimizer=None) -> None:
    """Copy source's parameters and buffers into target's, in target's dtypes. Collective.

    The arguments are those of `gather_weights`. A parameter that both have in one memory is left
    out.
    """
    wanted = dict(target.named_parameters()) | persistent_buffers(target)
    for name, x in gather_weights(source, target, optimizer):
        local(wanted[name].detach()).copy_(x)


@torch.no_grad()
def gather_weights(source, target, optimizer=None):
    """Yield the name and this rank's tensor of each parameter and buffer of target. Collective.

    source: of any plan.
    target: whole on every rank, also on the meta device, or of `split_for_decoding`, by the
        source's t and e.
    optimizer: the source's, which may have masters.

    The tensors have target's shapes, and a dtype that is still to be rounded to target's. They may
    be the source's own memory. One after the other is gathered: at most one whole tensor is in
    memory. A value head that target does not have is left out, and so is a parameter that both
    have in one memory. ValueError if names or shapes differ.
    """
    part = part_of(source)
    # In compute_dtype a parameter is its master, rounded once. In another dtype it would be rounded
    # twice. The master itself may be a part of a rank's part (zero1), and then costs more messages.
    is_rounded = next(target.parameters()).dtype == part.compute_dtype
    tensors, places = weights_and_places(source, None if is_rounded else optimizer)
    tensors = tensors | persistent_buffers(source)
    places = {name: whole_place(x) for name, x in tensors.items()} | places
    factors_of_matrix = factors_of(source)
    factors, places_of_factors = weights_and_places(source, optimizer)

    # COMM: an all-gather over the stages says what each of them has. The first stage that has a
    # tensor sends it. The ranks of this group have other layers, and the same entries of what t and
    # e cut. Pinned by
    # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    group = part.grid.group["p"] if part.plan.pp > 1 else None
    table = {name: places[name].shape for name in tensors if not is_factor(name)}
    tables = [table] if group is None else all_gather_objects(table, group)

    # Every rank has all tables now, so all of them find a difference before any weight is sent.
    wanted = dict(target.named_parameters()) | persistent_buffers(target)
    targets = {name: whole_place(x) for name, x in wanted.items()} | part_of(target).places
    shapes = {name: shape for table in tables for name, shape in table.items()}
    differ = shapes.items() ^ {name: targets[name].shape for name in wanted}.items()
    if differ:
        raise ValueError(f"models differ: {sorted({name for name, _ in differ})}")

    for name, q in wanted.items():
        q = local(q.detach())
        x = local(tensors[name].detach()) if name in tensors else None
        if x is not None and not q.is_meta and x.is_set_to(q):
            continue
        # The source was first cut as the target is, by t and e, or the target is whole. Only what
        # was cut after that, by FSDP, is gathered.
        kept = len(targets[name].cuts)
        if x is not None:
            x = places[name].gather(x, kept)
            if name in factors_of_matrix:
                pair = [places_of_factors[factor].gather(local(factors[factor].detach()))
                        for factor in factors_of_matrix[name]]  # fmt: skip
                region = [slice(r.start, r.stop) for r in places[name].boxes[kept]]
                x = merged(x, *pair, source.lora.scale, region)
        if group is not None:
            # COMM: a broadcast over the stages. All take the names in one order. Pinned by
            # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
            to = dict(dtype=q.dtype, device=part.grid.device if q.is_meta else q.device)
            x = torch.empty(q.shape, **to) if x is None else x.to(**to).contiguous()
            first = next(stage for stage, table in enumerate(tables) if name in table)
            dist.broadcast(x, group=group, group_src=first)
        yield name, x

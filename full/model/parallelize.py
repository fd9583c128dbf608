"""Split a model by a plan, for training or for sampling, and copy weights between split models.

The steps that `parallel.py` has are called there. FSDP2: arXiv:2304.11277. Not here: Float8; under
t gradients of logits (`model(tokens)`), and embeddings as input.
"""

import contextlib
import copy
import functools
import re
from collections import deque
from typing import NamedTuple

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.utils.checkpoint as ckpt
from torch import nn
from torch.distributed import fsdp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import parallel
from full.model import lora
from full.model.experts import CallsInStep
from full.model.transformer import Critic, Transformer
from full.ranks.joining import all_gather_objects
from full.ranks.optimizer import persistent_buffers, weights_and_places
from full.ranks.places import (
    Part, Pipeline, TorchPipeline, inner_width, keep_stage_and_ends, local, part_of,
    place_of, set_tensor, whole_place,
)  # fmt: skip
from full.ranks.plans import SCHEDULES, Grid

AC = "none", "full", "op"  # and memory_budget=X, see `memory_budget`
KNOWN_AC = f"expected {', '.join(AC)} or memory_budget=X with X from 0 to 1"

MODES = "ddp", "fsdp", "zero1"


class SplitOptions(NamedTuple):
    """Store how `parallelize` splits a model, in addition to the plan.

    mode: "ddp" (whole copies), "zero1" (copies, with `LocalOptimizer(zero=True)`) or "fsdp" (FSDP2;
        HSDP if the grid replicates). `parallel.fully_shard_layer` has both.
    sequence: Sequence parallelism: distribute tokens over the t ranks where no matrix is cut. t
        must divide the number of tokens.
    schedule: A key of SCHEDULES, for p > 1.
    ac: What the backward computes again. "none". "full": each layer, from its input. "op": all but
        large products and messages, see `keep_products_and_messages`. "memory_budget=0.5", with
        compile: what the compiler chooses, to keep half of what it would keep at 1.
    compile: torch.compile each layer by itself, for any length.
    offload: Keep the shards of fsdp, their gradients and the optimizer on the CPU.
    compute_dtype: Mixed precision: products in this dtype, everything else in the dtype of the
        weights. optimizer.py has the details.
    """

    mode: str = "ddp"
    sequence: bool = True
    schedule: str = "1f1b"
    ac: str = "none"
    compile: bool = False
    offload: bool = False
    compute_dtype: torch.dtype | None = None


def parallelize(model, plan, *, device_mesh, attention=None, **options):
    """Turn a whole model, equal on all ranks, into this rank's part of a plan, and return it.

    model: a `Transformer`, minimal or full; under a plan of d alone with ddp or zero1, any module.
        On the device where it will run, or on the meta device, for `materialise`. It is changed.
    plan: Plan. Its world is the number of ranks.
    device_mesh: Grid. `Grid(plan)`.
    attention: the callable of context parallelism, which the layers call. Needed for c > 1.
    options: of `SplitOptions`.

    Returns the model, which has a `part`: its parameters are this rank's entries, plain tensors,
    and under fsdp DTensors of FSDP2. ValueError on every rank, before the first message and before
    the model is changed, if options do not fit together.

    `PackedBatches` runs the result. If you write your own loop: data-parallel ranks get different
    sequences, tensor- and pipeline-parallel ranks the same ones, and context-parallel ranks
    different tokens of the same ones. Each divides its loss by the global count, and tensor ranks
    all compute the same loss. Run micro-batches by `run_micro_batches`, then call reduce_gradients,
    clip_grad_norm and the optimizer's step.
    """
    options = SplitOptions(**options)
    mode, schedule = options.mode, options.schedule
    for name, value, known in (("mode", mode, MODES), ("schedule", schedule, SCHEDULES)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    budget = memory_budget(options.ac)
    if options.ac not in AC and budget is None:
        raise ValueError(f"ac: {KNOWN_AC}, got {options.ac!r}")
    plan.require_fits(config=getattr(model, "config", None))
    for is_wrong, text in option_errors(model, plan, device_mesh, attention, options):
        if is_wrong:
            raise ValueError(f"plan {plan}: {text}")
    if attention is not None:
        model.attention = attention
    grid = with_sequence(device_mesh, options.sequence)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    is_tied = not hasattr(model, "lm_head") and not isinstance(model, Critic)
    shard_model(model, grid)
    pipeline = Pipeline(grid.group["p"])
    if schedule != "1f1b":
        pipeline = TorchPipeline(model, grid.group["p"], schedule, is_tied)
    elif plan.pp > 1:
        keep_stage_and_ends(model, grid.group["p"].rank(), plan.pp, is_tied)
    places = {name: place_of(name, shapes[name], grid, mode, is_tied and schedule != "zbv")
              if not lora.is_factor(name) else lora.place_of_factor(name, shapes[name], grid, mode)
              for name, _ in model.named_parameters()}  # fmt: skip
    model.part = Part(plan, grid.device, places, grid, mode, options.offload,
                      options.compute_dtype, pipeline)  # fmt: skip

    # The order matters. What is computed again includes the messages inside a layer. FSDP is last,
    # because it cuts what the others have left.
    if options.ac in ("full", "op"):
        recompute = dict(use_reentrant=False)
        if options.ac == "op":
            recompute["context_fn"] = functools.partial(keep_products_and_messages, plan)
        for layer in model.model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, **recompute)
    if options.compile:
        backend = "inductor" if budget is None else functools.partial(compile_within, budget)
        for layer in model.model.layers:
            layer.compile(dynamic=True, backend=backend)
    if mode == "fsdp":
        for root in model.part.pipeline.stages(model).values():
            apply_fsdp(root, model.part)
    return model


def option_errors(model, plan, grid, attention, options) -> list:
    """Return (is_wrong, text) pairs: options that need or exclude each other."""
    mode, schedule, ac, compute_dtype = (
        options.mode, options.schedule, options.ac, options.compute_dtype)  # fmt: skip
    is_fsdp = mode == "fsdp"
    is_sparse = hasattr(model, "config") and bool(model.config.sparse_layers)
    stages = plan.pp * SCHEDULES[schedule][1]
    layers = len(model.model.layers) if plan.pp > 1 else stages
    names = dict(model.named_parameters(remove_duplicate=False))
    wide = trained_dtype(model)
    is_coarser = compute_dtype is None or (
        compute_dtype.is_floating_point and torch.finfo(compute_dtype).eps > torch.finfo(wide).eps)
    return [
        (plan != grid.plan,
         f"expected its grid, got the grid of plan {grid.plan}; use Grid(plan)"),
        (getattr(model, "part", None) is not None or isinstance(model, fsdp.FSDPModule),
         "expected a whole model, got one that is split or sharded already; split it once"),
        (not is_coarser,
         f"compute_dtype: expected a coarser dtype than the weights' {wide}, got {compute_dtype}"),
        (plan.tp > 1 and len(names) > len({*map(id, names.values())}),
         "one parameter with two names cannot be cut; set tie_word_embeddings"),
        (plan.pp == 1 and schedule != "1f1b", f"schedule={schedule!r} needs a pipeline, p"),
        (stages > layers, f"{schedule} cuts {stages} stages, but the model has {layers} layers"),
        (grid.group["replicate"].size() > 1 and not is_fsdp,
         f'a grid that replicates shards needs mode="fsdp", got mode={mode!r}'),
        (options.offload and not is_fsdp,
         f'offload=True moves shards: it needs mode="fsdp", got mode={mode!r}'),
        (plan.cp > 1 and attention is None,
         "c splits sequences: give attention=, e.g. a ring over its c ranks"),
        # zbv runs backward twice through a stage, for inputs and for weights.
        (schedule == "zbv" and (is_fsdp or ac == "op"),
         'zbv has no mode="fsdp" and no ac="op", which follow one backward of a layer'),
        (is_fsdp and ac == "op" and is_sparse and grid.experts["fsdp"].size() == 1,
         'each expert is whole on one rank, and ac="op" does not follow FSDP2 there; use "full"'),
        (memory_budget(ac) is not None and not options.compile,
         f"ac={ac!r} is the compiler's: it needs compile=True"),
        (ac == "op" and options.compile and plan.tp * plan.ep > 1,
         'torch.compile cannot keep what messages have brought: use ac="full", or no compile'),
        (is_sparse and plan.tp > 1 and not options.sequence and plan.etp == 1,
         f"without sequence=True every tensor rank would send the same tokens to the experts; use "
         f"ffn's t = {plan.tp}"),
    ]  # fmt: skip


def trained_dtype(model) -> torch.dtype:
    """Return the dtype of what is trained, which a frozen base of lora.py may not have."""
    parameters = [*model.parameters()]
    return next((p for p in parameters if p.requires_grad), parameters[0]).dtype


def with_sequence(grid, sequence) -> Grid:
    """Return a grid for models with or without sequence parallelism, with the same groups."""
    grid = copy.copy(grid)
    grid.sequence = sequence or grid.plan.tp == 1
    return grid


def shard_model(model, grid) -> None:
    """Cut a whole model by t and e, in place, by the functions of parallel.py."""
    group = grid.group
    factors = {name: p for name, p in model.named_parameters() if lora.is_factor(name)}
    if grid.plan.tp > 1:
        parallel.tensor_parallel(model, group["t"], grid.sequence)
        if isinstance(model, Transformer):
            # It computes logits and log-probs itself, in chunks, from a rank's rows.
            del model.logits, model.logprobs
            model.shard = dict(group=group["t"], vocab_start=model.model.embed_tokens.first)
        # A row of tokens enters the model here.
        model.model.embed_tokens.register_forward_pre_hook(
            lambda _, args: grid.require_cut(args[0].shape[1])
        )
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                recurrent_tensor_parallel(layer.linear_attn, grid)
    if grid.plan.etp > 1:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                expert_tensor_parallel(layer.mlp, grid)
    if grid.plan.ep > 1:
        parallel.expert_parallel(model, group["e"])
    lora.shard_factors(model, factors, grid)


def expert_tensor_parallel(mlp, grid) -> None:
    """Keep this rank's part of each expert's inner width, in place."""
    # parallel.py leaves experts whole, and each t rank sends its own tokens to them. If their width
    # is split, all t ranks need all tokens: f is applied before the router, g after the experts.
    region = grid.group["t"], grid.sequence
    mlp.register_forward_pre_hook(
        lambda _, args: (parallel.copy_to_tp_region(args[0], *region), *args[1:])
    )
    mlp.register_forward_hook(lambda _, args, y: parallel.reduce_from_tp_region(y, *region))
    for name, p in list(mlp.experts.named_parameters()):
        if not lora.is_factor(name):
            part = parallel.parameter_shard(p, grid.group["etp"], inner_width(name))
            setattr(mlp.experts, name, part)


def recurrent_tensor_parallel(mixer, grid) -> None:
    """Keep this rank's key heads of a recurrent layer, and the value heads of each, in place."""
    # in_proj_qkv and conv1d have a key head's rows of q, k and v next to one another, so the rows
    # of some heads are one slice, as everywhere else. Each head has a state of its own.
    region = group, _ = grid.group["t"], grid.sequence
    mixer.register_forward_pre_hook(
        lambda _, args: (parallel.copy_to_tp_region(args[0], *region), *args[1:])
    )
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
        parallel.shard_rows(getattr(mixer, name), group)
    mixer.out_proj = parallel.RowParallelLinear(mixer.out_proj, *region)
    for owner, name in ((mixer.conv1d, "weight"), (mixer, "A_log"), (mixer, "dt_bias")):
        setattr(owner, name, parallel.parameter_shard(getattr(owner, name), group))


def apply_fsdp(root, part) -> None:
    """Apply FSDP2 to every layer and the rest, with gradients summed over ranks, not averaged."""
    policy = fsdp.OffloadPolicy()
    if part.offload:
        policy = fsdp.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    # NUMERICS: ranks add in float32 or better, and round once, as in parallel.py. Pinned by
    # tests/full/test_precision.py::test_ranks_add_bfloat16_in_float32.
    wide = torch.promote_types(trained_dtype(root), torch.float32)
    precision = fsdp.MixedPrecisionPolicy(reduce_dtype=wide)
    if part.compute_dtype is not None:
        # NUMERICS: FSDP2 would cast every floating tensor that enters a layer, also the cosines and
        # sines of the positions, which bf16 gets wrong from position 257 on. Pinned by
        # tests/full/test_precision.py::test_fsdp_computes_as_ddp_does.
        precision = fsdp.MixedPrecisionPolicy(part.compute_dtype, wide, cast_forward_inputs=False)

    # A layer is a unit: its weights are gathered just before it runs and dropped after. Experts are
    # a unit of their own over fewer ranks, as other ranks hold copies of them than of the rest. The
    # inner units come first: fully_shard takes what is in a module and in no unit yet.
    layers = [*root.model.layers.children()]
    units = [(layer.mlp.experts, part.grid.experts)
             for layer in layers if hasattr(layer.mlp, "experts")]  # fmt: skip
    units += [(module, part.grid.dense) for module in (*layers, root)]
    for module, mesh in units:
        ranks = mesh["replicate", "fsdp"] if mesh["replicate"].size() > 1 else mesh["fsdp"]
        fsdp.fully_shard(module, mesh=ranks, offload_policy=policy, mp_policy=precision)
        # NUMERICS: FSDP2 averages by default; the losses here are parts of a sum. gloo has no
        # pre-multiplied sum, hence the second call.
        # Pinned by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # The root's own weights (embedding, norm, head) are gathered when one calls the model's
    # `forward`. Training here calls `hidden`, so that must gather them too.
    fsdp.register_fsdp_forward_method(root, "hidden")


@torch.no_grad()
def materialise(model) -> None:
    """Allocate this rank's part of a model that was on the meta device when it was split.

    Its content is undefined afterwards. The largest tensor that is ever made is a part's.
    """
    part = part_of(model)
    for root in part.pipeline.stages(model).values():
        root.to_empty(device="cpu" if part.offload else part.device)


# The results that ac="op" stores of a layer.
STORED = {"mm", "bmm", "addmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
          "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
          "_scaled_dot_product_cudnn_attention"}  # fmt: skip

STORED_MESSAGES = {"allreduce_", "allgather_", "reduce_scatter_", "alltoall_base_"}


def keep_products_and_messages(plan):
    """Return a context for a layer's forward, and one for running it again in the backward.

    Norms, activations and rotations are computed again. The results of products, of attention and
    of the collectives of t and e are stored. A ring sends its blocks again: to store them would
    undo its saving. FSDP2 gathers weights by other collectives, which are not stored either.
    """

    def policy(context, op, *args, **options):
        if op._overloadpacket.__name__ in STORED:
            return ckpt.CheckpointPolicy.MUST_SAVE
        return ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = ckpt.create_selective_checkpoint_contexts(policy)
    if plan.tp * plan.ep == 1:
        return contexts
    # Messages come first, so that torch, which counts operations, does not see what it copies.
    stored = deque()
    return [both(Messages(stored, again), context) for again, context in enumerate(contexts)]


@contextlib.contextmanager
def both(first, second):
    """Enter two contexts as one."""
    with first, second:
        yield


def memory_budget(ac) -> float | None:
    """Return the number of ac="memory_budget=0.5", from 0 to 1. None for any other ac."""
    match = re.fullmatch(r"memory_budget=(0?\.[0-9]+|0|1|1\.0)", f"{ac}")
    return float(match[1]) if match else None


def compile_within(budget, graph, inputs, **options):
    """Compile a graph as torch.compile does, under a budget of activations from 0 to 1."""
    # The compiler reads the budget while it compiles, which is at a layer's first call and at new
    # shapes. It is set for this time only, so each model of the process keeps its own.
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return torch._dynamo.lookup_backend("inductor")(graph, inputs, **options)


class Messages(TorchDispatchMode):
    """Store the results of collectives while a layer runs, for when the layer runs again.

    stored: deque of (tensors, what the collective returned), in the order of the calls.
    """

    def __init__(self, stored, again):
        super().__init__()
        self.stored = stored
        self.again = again

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace != "c10d" or op._overloadpacket.__name__ not in STORED_MESSAGES:
            return op(*args, **(kwargs or {}))
        # COMM: torch's collectives fill their first argument. Nothing is sent again: all ranks of a
        # group run the same layers again, and none of them sends. Pinned by
        # tests/full/test_parallel.py::test_what_checkpointing_computes_again.
        filled = tree_leaves(args[0])
        if not self.again:
            work = op(*args, **(kwargs or {}))
            self.stored.append(([x.detach() for x in filled], work))
            return work
        results, work = self.stored.popleft()
        for x, result in zip(filled, results, strict=True):
            x.copy_(result)
        return work


def split_for_decoding(model, grid):
    """Turn a whole model into this rank's part of a sampler, and return it.

    grid: Grid of a plan of d, t and e, such as `Plan.for_sampling`.

    The result only samples: rows of experts are sent without gradients. The t ranks of a replica
    share the decoding: all of them get the same tokens, and compute the same logits of the whole
    vocabulary. `gather_replica` makes the same batch of their lists. Ranks that exchange rows of
    experts with other replicas need the same number of model calls: `end_together`.
    """
    # A group of experts is in one replica, or consists of whole replicas, which decode in step.
    plan = grid.plan
    if max(plan.ep, plan.tp) % min(plan.ep, plan.tp):
        raise ValueError(f"plan {plan}: e = {plan.ep} or t = {plan.tp} must divide the other")
    plan.require_fits(config=model.config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    # One new token in a row cannot be split along the sequence, so between f and g every tensor
    # rank has all rows.
    grid = with_sequence(grid, False)
    shard_model(model, grid)
    places = {name: place_of(name, shape, grid, "ddp", False) for name, shape in shapes.items()}
    model.part = Part(plan, grid.device, places, grid)

    # All t ranks have all rows. Each sends a share of them to experts that are whole, or these
    # would get every row t times.
    if plan.tp > 1 and plan.etp == 1:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.rows_group = grid.group["t"]
    if plan.ep * plan.etp > plan.tp:
        model.calls = CallsInStep(grid.group["e"], grid.device)
    return model


# Weights from one model to another --------------------------------------------------------------
# For: a sampler that gets a policy's weights, one tensor after the other.


def share_or_allocate(source, target, device) -> None:
    """Give a model on the meta device memory, the source's own where it can have it.

    source, target: as in `gather_weights`. A shared parameter needs no copy: the optimizer's update
        is in both models, and `copy_weights` leaves it out.

    The content of new memory is undefined.
    """
    # Both are sharded identically by t and e. But FSDP moves its shards in memory, a stage of a
    # pipeline lacks the other stages' layers, and a matrix with factors has merged weights in the
    # target only.
    shared = {}
    part = part_of(source)
    if part.mode != "fsdp" and part.plan.pp == 1:
        shared = dict(source.named_parameters())
        for name in lora.factors_of(source):
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
    tensors = dict(target.named_parameters()) | persistent_buffers(target)
    for name, x in gather_weights(source, target, optimizer):
        local(tensors[name].detach()).copy_(x)


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
    factors_of_matrix = lora.factors_of(source)
    factors, places_of_factors = weights_and_places(source, optimizer)

    def local_weight(name, num_cuts):
        """Return this rank's entries of the merged weight, cut as the target is by t and e."""
        x = places[name].gather(local(tensors[name].detach()), num_cuts)
        if name not in factors_of_matrix:
            return x
        pair = [places_of_factors[factor].gather(local(factors[factor].detach()))
                for factor in factors_of_matrix[name]]  # fmt: skip
        region = [slice(r.start, r.stop) for r in places[name].boxes[num_cuts]]
        return lora.merged(x, *pair, source.lora.scale, region)

    # Every rank gets all tables, so all of them see a difference before any weight is sent.
    group = part.grid.group["p"] if part.plan.pp > 1 else None
    shapes_of_stages = gather_shapes(tensors, places, group)
    target_tensors = dict(target.named_parameters()) | persistent_buffers(target)
    target_places = {name: whole_place(x) for name, x in target_tensors.items()}
    target_places |= part_of(target).places
    shapes = {name: shape for table in shapes_of_stages for name, shape in table.items()}
    differ = shapes.items() ^ {name: target_places[name].shape for name in target_tensors}.items()
    if differ:
        raise ValueError(f"models differ: {sorted({name for name, _ in differ})}")

    for name, q in target_tensors.items():
        q = local(q.detach())
        has_weight = name in tensors
        if has_weight and not q.is_meta and local(tensors[name].detach()).is_set_to(q):
            continue
        # The source was first cut as the target is, by t and e, or the target is whole. Only what
        # was cut after that, by FSDP, is gathered.
        x = local_weight(name, len(target_places[name].cuts)) if has_weight else None
        if group is not None:
            # COMM: a broadcast over the stages, from the first that has the tensor. All take the
            # names in one order. Pinned by
            # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
            to = dict(dtype=q.dtype, device=part.grid.device if q.is_meta else q.device)
            x = x.to(**to).contiguous() if has_weight else torch.empty(q.shape, **to)
            first = next(stage for stage, table in enumerate(shapes_of_stages) if name in table)
            dist.broadcast(x, group=group, group_src=first)
        yield name, x


def gather_shapes(tensors, places, group) -> list:
    """Return {name: whole shape} of each stage of a pipeline. Collective over a group of stages."""
    # COMM: an all-gather over the stages. The ranks of this group have other layers, and the same
    # entries of what t and e cut. Pinned by
    # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    table = {name: places[name].shape for name in tensors if not lora.is_factor(name)}
    return [table] if group is None else all_gather_objects(table, group)

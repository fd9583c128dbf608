"""Freeze a model and train two small factors for each of some of its matrices: LoRA.

    (13)  y  = x W^T + (alpha / r) (x A^T) B^T      W (out, in) is frozen; A (r, in), B (out, r)
    (14)  W' = W + (alpha / r) B A                  what a sampler, an engine and `export` get

B begins at 0, so a run begins with its base, and the base without factors is the reference of a KL.

Under a plan a factor is cut where its matrix is, along the dimension that they share. A factor
without this dimension is whole on each t rank, which sees a part of x or of dy only: its gradients
are partial, and are summed over t too. Ranks that leave this out train different factors.

    matrix                       cut by t along     A              B
    q k v gate up, lm_head       out                whole          cut as W
    o down                       in                 cut as W       whole
    router                       nothing            whole          whole

A stack of experts (E, out, in) has stacks of factors, (E, r, in) and (E, out, r). e cuts all of
them identically, and ffn's t cuts them as t does. Not here: dropout of x, DoRA, and factors of an
embedding.

References: LoRA arXiv:2106.09685, equation 3. The first values and the files are those of PEFT.
"""

import contextlib
import math
import zlib

import torch
import torch.nn.functional as F
from torch import nn

import parallel
from full.model.experts import Experts, grouped_linear
from full.model.transformer import Transformer
from full.ranks.places import Place, local, part_of, place_of, set_tensor, variant_of


class AdaptedLinear(nn.Module):
    """Compute (13): a linear, whole or a rank's part, with its factors."""

    def __init__(self, linear, scale, A_rI, B_Or):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.region = getattr(linear, "region", None)  # of a `parallel.RowParallelLinear`
        self.lora_A, self.lora_B = A_rI, B_Or
        self.lora_scale = scale

    def forward(self, x, /):
        y = F.linear(x, self.weight, self.bias if self.region is None else None)
        if self.lora_scale:
            y = y + self.lora_scale * F.linear(F.linear(x, self.lora_A), self.lora_B)  # (13)
        if self.region is None:
            return y
        # Each rank adds a part of both terms. The bias is added once, after the sum.
        y = parallel.reduce_from_tp_region(y, *self.region)
        return y if self.bias is None else y + self.bias


class AdaptedExperts(Experts):
    """Run experts with stacks of factors for the matrices that `lora` names."""

    def __init__(self, config, lora):
        super().__init__(config)
        self.lora_scale = lora.scale
        for name, p in [*self.named_parameters()]:
            if name in lora.targets:
                A_ErI, B_EOr = new_factors(p, lora.rank)
                self.register_parameter(f"{name}_lora_A", A_ErI)
                self.register_parameter(f"{name}_lora_B", B_EOr)

    def product(self, name, x_NM, counts_E, /):
        y_NI = super().product(name, x_NM, counts_E)
        if not hasattr(self, f"{name}_lora_A") or not self.lora_scale:
            return y_NI
        inner_Nr = grouped_linear(x_NM, getattr(self, f"{name}_lora_A"), counts_E)
        B_EIr = getattr(self, f"{name}_lora_B")
        return y_NI + self.lora_scale * grouped_linear(inner_Nr, B_EIr, counts_E)


def new_factors(weight, r):
    """Return empty factors A (.., r, in) and B (.., out, r) of a matrix or of a stack of them."""
    *stack, rows, columns = weight.shape
    shapes = (*stack, r, columns), (*stack, rows, r)
    return [nn.Parameter(weight.new_empty(shape)) for shape in shapes]


class AdaptedTransformer(Transformer):
    """Run a `Transformer` with factors for the matrices whose last names are in lora.targets.

    ValueError for a target that the model does not have.
    """

    def __init__(self, config, lora):
        super().__init__(config)
        self.lora = lora
        for path, part in [*self.named_modules()]:
            is_target = path.rpartition(".")[2] in lora.targets
            if isinstance(part, nn.Linear) and is_target:
                factors = new_factors(part.weight, lora.rank)
                set_tensor(self, path, AdaptedLinear(part, lora.scale, *factors))
            if isinstance(part, Experts):
                set_tensor(self, path, AdaptedExperts(config, lora))
        adapted = {name.removesuffix(".weight").split(".")[-1] for name in factors_of(self)}
        for target in lora.targets:
            if target not in adapted:
                tied = "; its head is its embedding" if target == "lm_head" else ""
                raise ValueError(f"lora_targets: the model has no matrix to adapt called "
                                 f"{target!r}{tied}")  # fmt: skip

    def embed(self, tokens_BS, /):
        # The states before the first factors have no gradient of their own. Pipelines, chunks of a
        # tree and FSDP2 call backward on them all the same.
        x_BSM = super().embed(tokens_BS)
        return x_BSM.requires_grad_() if torch.is_grad_enabled() else x_BSM

    def head(self, hidden, /):
        # (13) is one product of longer rows: (x, scale x A^T) (W, B)^T.
        x, weight_vM = super().head(hidden)
        head = self._modules.get("lm_head")
        if not hasattr(head, "lora_A") or not head.lora_scale:
            return x, weight_vM
        A_rM, B_vr = self.for_head(head.lora_A), self.for_head(head.lora_B)
        inner = head.lora_scale * F.linear(x, A_rM)
        return torch.cat([x, inner], -1), torch.cat([weight_vM, B_vr], 1)


# Names ------------------------------------------------------------------------------------------
#
#     ..q_proj.weight          ..q_proj.lora_A             ..q_proj.lora_B
#     ..experts.up_proj        ..experts.up_proj_lora_A    ..experts.up_proj_lora_B


def is_factor(name) -> bool:
    """Return whether a parameter of this name is a factor."""
    return name.endswith(("lora_A", "lora_B"))


def matrix_of(name) -> str:
    """Return the name of the matrix that a factor belongs to."""
    path = name[: -len("lora_A")]
    return f"{path}weight" if path.endswith(".") else path[:-1]


def factors_of(model) -> dict:
    """Return {name of a matrix: names of its A and B} of all that this rank has."""
    names = [name for name, _ in model.named_parameters() if name.endswith("lora_A")]
    return {matrix_of(name): (name, name[:-1] + "B") for name in names}


# A model with factors and without ---------------------------------------------------------------


def add_factors(model, lora, dtype) -> AdaptedTransformer:
    """Freeze a whole model, and return one with factors that shares its parameters.

    The factors' contents are undefined, see `draw_factors`. They alone are trained, in `dtype`.
    ValueError for a target that the model does not have.
    """
    adapted = variant_of(model, AdaptedTransformer, lora).requires_grad_(False)
    for name, p in [*adapted.named_parameters()]:
        if is_factor(name):
            factor = torch.empty(p.shape, dtype=dtype, device=model.head_weight.device)
            set_tensor(adapted, name, nn.Parameter(factor))
    return adapted


def plain(model) -> Transformer:
    """Return the base of a whole model with factors, as a model that shares its parameters."""
    return variant_of(model, Transformer)


@contextlib.contextmanager
def base_of(model):
    """Compute with the base alone, for as long as the context lasts: the reference of a KL.

    The votes of a router's bias are trained too, so the base has none.
    """
    factors = [(part, "lora_scale", part.lora_scale) for part in model.modules()
               if hasattr(part, "lora_scale")]  # fmt: skip
    biases = [(part, "rate", part.rate) for part in model.modules() if hasattr(part, "votes")]
    for part, name, _ in factors + biases:
        setattr(part, name, 0.0)
    try:
        yield
    finally:
        for part, name, value in factors + biases:
            setattr(part, name, value)


def merged(weight, A, B, scale, region=None):
    """Return W' of (14), in float32 or better.

    region: the slices of the whole that `weight` is, if A and B are whole. Default: all.
    """
    # NUMERICS: in bf16 an entry of W near 0.02 has nothing between itself and 0.0201, so a small
    # step of B A would be lost before the sum is rounded. Pinned by
    # tests/full/test_lora.py::test_what_reaches_the_generator_is_the_base_and_the_factors.
    if region is not None:
        *stack, rows, columns = region
        A, B = A[(*stack, slice(None), columns)], B[(*stack, rows)]
    wide = torch.promote_types(torch.promote_types(weight.dtype, A.dtype), torch.float32)
    return weight.to(wide) + scale * (B.to(wide) @ A.to(wide))  # (14)


@torch.no_grad()
def merge(model, dtype=None) -> Transformer:
    """Turn a whole model with factors into a plain one with the merged weights, and return it."""
    # One matrix after the other is replaced in both models, so that no second copy is in memory.
    whole = plain(model)
    for name, (A, B) in factors_of(model).items():
        p = whole.get_parameter(name)
        pair = model.get_parameter(A), model.get_parameter(B)
        p.data = merged(p, *pair, model.lora.scale).to(dtype or p.dtype)
    return whole.to(dtype) if dtype else whole


# Under a plan -----------------------------------------------------------------------------------


def place_of_factor(name, shape, grid, mode) -> Place:
    """Return the place of a factor with this shape of the whole: see the table above."""
    # How the matrix is cut says how its factors are: by the numbers of the dimensions, whatever
    # their sizes. One number means the rank r: that of the rows for A, of the columns for B.
    matrix = place_of(matrix_of(name), shape, grid, mode, False)
    of_rank = len(shape) - 2 if name.endswith("lora_A") else len(shape) - 1
    world = grid.plan.world // grid.plan.pp
    place = Place(matrix.mesh, (tuple(map(range, shape)),), replica_count=world)
    groups = list(matrix.gradient_groups)
    for dim, axis in matrix.cuts:
        # FSDP, the last to cut, cuts the first dimension of every parameter. t, e and etp do not
        # cut r. A factor that they leave whole has a partial gradient. But after the last norm all
        # t ranks compute the same, and the head's product returns the whole gradient of its input.
        if axis == matrix.mesh.mesh_dim_names[-1]:
            place = place.cut_copies()
        elif dim != of_rank:
            place = place.cut(dim, axis)
        elif name.startswith("model."):
            groups.append(grid.group[axis])
    return place._replace(gradient_groups=tuple(groups))


def shard_factors(model, factors, grid) -> None:
    """Give a model that is split by t and e its parts of a whole model's factors, in place."""
    own = {}
    for name, p in factors.items():
        region = place_of_factor(name, p.shape, grid, "ddp").region
        own[name] = nn.Parameter(p.detach()[region].clone(), p.requires_grad)
    for name, p in own.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf == "lora_A":  # a linear that is split has been made without factors
            pair = p, own[f"{path}.lora_B"]
            set_tensor(model, path, AdaptedLinear(owner, model.lora.scale, *pair))
        elif leaf != "lora_B":
            setattr(owner, leaf, p)


@torch.no_grad()
def draw_factors(model, seed: int) -> None:
    """Draw A uniformly from within 1 / sqrt(in) of 0 and set B to 0, also on a rank's part."""
    places = part_of(model).places
    for name, p in model.named_parameters():
        if not is_factor(name):
            continue
        # Each factor has a generator of its own: a stage of a pipeline has some of them only. On a
        # CPU torch reads the lower 32 bits of a seed, so the checksum is of `seed` and the name.
        key = zlib.crc32(name.encode(), seed % 2**32)
        generator = torch.Generator().manual_seed(key)
        whole = torch.zeros(places[name].shape)
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(whole.shape[-1])
            whole.uniform_(-bound, bound, generator=generator)
        local(p).copy_(whole[places[name].region])

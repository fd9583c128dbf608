"""Plans: data, tensor, context, expert and pipeline parallelism, each equal to one process.

The idea. A loss is a sum over tokens, so its gradient is a sum too. Each rank computes some terms
of that sum; what this file does is to add terms where they belong together. Nothing is averaged,
because every term is already divided by the global count, of all ranks and micro-batches of a step.
The caller finds it before the first forward: the masks say it. So neither the number of ranks nor
who holds what can change the result beyond rounding.

    python parallel.py check               # every plan on this CPU against one process, float64
    python parallel.py plan p2d2t2         # its ranks, groups, and the memory of a rank
    python parallel.py bench               # tokens a second by plan

This file alone checks ddp and fsdp of a toy; with models.py, ring_attention.py and tests/, all.

What it must equal. A data share d is the ranks that work on the same sequences: c, t and p of them.
They compute its loss L_d together, and it counts once, however many of them have it:

    (1)  grad   = sum_d dL_d / dtheta             over the data shares, so that L = sum_d L_d
    (2)  norm   = sqrt( sum of the squares of grad's distinct entries )   the same on every rank
    (3)  theta <- optimiser( theta, grad min(1, max_norm / norm) )        skipped if not finite
    (4)  f, into split matrices:    x forward           sum_r dx_r backward   r: ranks of a group
    (5)  g, out of them:            sum_r y_r forward   dy backward           section 3 says why

Inside a share a rank may have worked on some tokens, heads or layers only. It then has a term of
dL_d / dtheta, and a sum over such ranks comes on top (section 7).

What each kind splits and sends. A gather gives every rank the parts of all, an all-reduce the sum
over ranks, and a scatter-add (reduce-scatter) gives each rank one part of that sum. SP, sequence
parallelism: t shares out the tokens too, wherever no matrix is split. The ends: what stands before
the first layer and behind the last one. The router: a mixture's gate.

    d   rows of the batch; zero1: AdamW's states too; fsdp: weights too. ddp and zero1 send nothing
        in forward and backward; fsdp gathers a layer in each, and scatter-adds its gradient.
    t   heads, inner widths, vocabulary; with SP tokens between them.
        A layer: 2 gathers and 2 scatter-adds forward, as many backward; no SP: 2 all-reduces each.
        Ends, forward: a scatter-add behind the embedding and a gather of the last states (no SP: 1
        all-reduce), and 2 all-reduces of (N,) numbers for log-probs. Ends, backward: a gather (no
        SP: nothing), and an all-reduce of the last states' gradient.
    c   tokens of each sequence. The attention sends what it needs; with t, SP: 1 gather of lengths.
    e   experts. A sparse layer: 3 all-to-all forward, counts, rows and rows back; 2 backward.
        Its balance loss, under t and under c: 1 all-reduce of counts each, forward.
    p   layers. States go on to the next stage, and their gradient comes back.

Once a step gradients are summed: over d and c (fsdp has done it; of experts over expert-dp); of
norms, router and o's bias also over t (no SP: of norms only those of q and k); of a tied embedding
also over the first and the last stage.

With ddp and zero1 micro-batches cost no message, so ranks may run different numbers of them, or
none: that suits trees, whose sizes differ. Under fsdp, t, c, e and p every forward is collective:
all ranks of a group must make the same calls. `PackedBatches` sees to that, and runs a batch of
sequences and a loss function under every plan (section 10).

Numbers a rank sends for Q parameters on W ranks: ddp 2 Q (W - 1) / W a step; fsdp Q (W - 1) / W
for each forward, each backward's gather and scatter-add; t 4 S M (t - 1) / t a layer each way.

    B rows   S tokens   M width   N rows for experts   E experts   V vocabulary   W ranks
    Small: this rank's part of what the capital names: n of the N rows
    etp: over how many of the t ranks an expert's inner width is split, 1 or t

How it deviates: PyTorch's DDP averages and overlaps; this sums and does not overlap. FSDP2 averages
by default; here it is told to sum. Without SP experts need etp = t.

To copy a part: of section 7 `clip_grad_norm` takes any nn.Module and needs `local`, `full`,
`copies` and TIED; `reduce_gradients` too, and needs `local`, `holders`, TIED, and from appendices
`is_split`, `sharded`, `reshard`, `sum_in_messages`. `Plan` needs KINDS and appendix D.

Not here: Float8; under t gradients of logits (`model(tokens)`), and embeddings as input.

References: Megatron arXiv:1909.08053, sequence parallelism arXiv:2205.05198; experts: GShard
arXiv:2006.16668, folding arXiv:2504.14960; FSDP arXiv:2304.11277; ZeRO arXiv:1910.02054; 1F1B
arXiv:2104.04473; ZB-V arXiv:2401.10241; torch.distributed.checkpoint (DCP).
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import pickletools
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torch.utils.checkpoint as ckpt
from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# 1. The definition ---------------------------------------------------------------------------


def definition(model, x_BM, /, *, lr, max_norms) -> torch.Tensor:
    """One process takes a step of plain SGD for each of `max_norms`; (1)-(3) are written out.

    model: a module with `hidden`; its weights are changed. x_BM: the whole batch. Returns one
    vector: the norm of each step, and then all weights after the last one.
    """
    norms = []
    for max_norm in max_norms:
        # The count is that of the whole batch. A rank of a plan has only some of the rows, and
        # divides by this same number: that is why its terms need no weights when they are added.
        loss = model.hidden(x_BM).square().sum() / len(x_BM)
        gradients = torch.autograd.grad(loss, list(model.parameters()))  # (1)
        norms.append(sum((grad * grad).sum() for grad in gradients).sqrt())  # (2)

        # One factor for all parameters: clipping shortens the gradient and keeps its direction.
        for p, grad in zip(model.parameters(), gradients):
            p.data -= lr * grad * min(1.0, max_norm / norms[-1])  # (3)

    weights = [p.detach().flatten() for p in model.parameters()]
    return torch.cat([torch.stack(norms), *weights])


# 2. Plans: which rank does what --------------------------------------------------------------

KINDS = "dp", "cp", "tp", "pp", "ep", "etp", "expert-dp", "fsdp"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many ranks each kind of parallelism has, and which ones.

        d2t2            4 ranks: data 2, tensor 2             p2d2t2        pipeline 2 besides
        d2t2e4          the same ranks: experts over all 4    d2c2          context 2
        (attn:d2t2|ffn:e2t2)   expert tensor degree 2, on the tensor ranks
        archon:d2t2     a backend's name, archon[actor]:d2t2 a role's too

    Letters d t p c e stand once each, in any order. The ranks are the cells of a grid (pp, dp, cp,
    tp), numbered with tp innermost, because tensor ranks send most and should be neighbours:

        p2d2t2    pp 0: dp 0: 0 1      groups("tp"): [0 1] [2 3] [4 5] [6 7]
                        dp 1: 2 3      groups("dp"): [0 2] [1 3] [4 6] [5 7]
                  pp 1: dp 0: 4 5      groups("pp"): [0 4] [1 5] [2 6] [3 7]
                        dp 1: 6 7      groups("fsdp"): as dp here; with context, d and c together

    For experts, the d c t ranks of a stage are numbered once more as a grid (expert-dp, ep, etp),
    etp innermost, which is 1 or tp. Ranks of one expert-dp group hold the same experts.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    backend: str | None = None
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """From a string; ValueError says where it is wrong. `Allocation.parse` takes + and |."""
        return _Grammar(text).one_plan()

    def __post_init__(self):
        _require_degrees(self)

    @property
    def world(self) -> int:
        """The number of ranks. e does not count: experts are dealt over ranks that are there."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """How many ranks hold the same experts: d c t / (e etp)."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def shapes(self) -> tuple[dict, dict]:
        """Names and degrees of the rank grid, outermost first, for attention and for experts."""
        attention = dict(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)
        experts = {"pp": self.pp, "expert-dp": self.edp, "ep": self.ep, "etp": self.etp}
        return attention, experts

    def groups(self, kind: str) -> list[list[int]]:
        """The ranks of each group of a kind, see KINDS; no communicator is made."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; came {kind!r}")
        attention, experts = self.shapes
        shape = attention if kind in attention or kind == "fsdp" else experts

        # Lay the ranks out as the grid and move the wanted dimensions last; each row is then a
        # group. For d2t2 and "dp":
        #
        #     grid (dp, tp)   [[0 1]     dp last   [[0 2]     groups   [0 2] and [1 3]
        #                      [2 3]]               [1 3]]
        names = ("dp", "cp") if kind == "fsdp" else (kind,)
        wanted = [n for n, name in enumerate(shape) if name in names]
        grid = np.arange(self.world).reshape([*shape.values()])
        grid = np.moveaxis(grid, wanted, range(-len(wanted), 0))
        return grid.reshape(-1, math.prod(shape[name] for name in names)).tolist()

    def require_fits(self, *, world=None, config=None, microbatches=None, ulysses=False) -> None:
        """ValueError if it does not fit a number of ranks, a model (ModelConfig), a step.

        ulysses: context parallelism deals heads out, so c must divide them too.
        """
        _require_fits(self, world, config, microbatches, ulysses)

    def describe(self) -> str:
        """One line of degrees, and the grid of ranks of each stage: a row a (dp, cp), tp across."""
        return _describe(self)

    def __str__(self):
        """The shortest string that parses to this plan again."""
        return _shortest_text(self)


# 3. The operators f and g --------------------------------------------------------------------
#
# Take a matrix product y = W x whose W is too large for one rank. There are two ways to cut W.
#
# By rows, y_r = W_r x: every rank needs all of x and has a part of y. The loss sees x in every
# y_r, so dx = sum_r W_r^T dy_r: each rank has a term of dx, and none has dx.
#   (4)  f on x:  nothing forward, all-reduce of dx backward.
#
# By columns, y = sum_r W_r x_r: every rank needs a part of x and has a term of y. Once y is summed
# all ranks compute alike with it, so each has all of dy, and dx_r = W_r^T dy needs no message.
#   (5)  g on y:  all-reduce forward, nothing backward.
#
# Rows first and columns next is what makes this cheap: y_r of the first is x_r of the second, and
# what stands between them (attention by heads, an MLP's activation) needs no message at all. W is
# torch's weight, out by in. (Megatron writes y = x A, and calls the first cut column-parallel, the
# second row-parallel.)
#
#     x --f--> [W by rows] --> y_r = x_r --> [W by columns] --g--> y
#
# Sequence parallelism. Between g and the next f stand norms and residuals, which treat each token
# by itself: all t ranks would compute the same. Instead each keeps a t-th of the tokens there. An
# all-reduce is a scatter-add and then a gather, so g does the first half, the next f does the
# second, and no byte more is sent. Backward, each does the other's half.


def _gather_tokens(x_BsM, group):
    """The tokens of all ranks in the order of the ranks, (B, s, M) -> (B, S, M)."""
    parts = [torch.empty_like(x_BsM) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x_BsM.contiguous(), group)
    return torch.cat(parts, 1)


def _scatter_add_tokens(x_BSM, group):
    """Sum over ranks, of which each rank gets its own tokens, (B, S, M) -> (B, s, M)."""
    parts = [part.contiguous() for part in x_BSM.chunk(dist.get_world_size(group), 1)]
    sum_BsM = torch.empty_like(parts[0])
    dist.reduce_scatter(sum_BsM, parts, group=group)
    return sum_BsM


def _own_tokens(x_BSM, group):
    """This rank's tokens of a tensor that all ranks have, (B, S, M) -> (B, s, M); no message."""
    return x_BSM.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _sum_over_ranks(x, group):
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _unchanged(x, group):
    return x.view_as(x)


class _Operator(torch.autograd.Function):
    """Does one thing forward and another backward; both are functions of (x, group)."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group = group
        ctx.backward_of_x = backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, dx):
        return ctx.backward_of_x(dx, ctx.group), None, None, None


def enter_split(x, group, sequence):
    """f: on the way into matrices split by rows. sequence: x comes with this rank's tokens only."""
    if sequence:
        return _Operator.apply(x, group, _gather_tokens, _scatter_add_tokens)  # (4)
    return _Operator.apply(x, group, _unchanged, _sum_over_ranks)  # (4)


def leave_split(x, group, sequence):
    """g: on the way out of a matrix split by columns. sequence: return this rank's tokens only."""
    if sequence:
        return _Operator.apply(x, group, _scatter_add_tokens, _gather_tokens)  # (5)
    return _Operator.apply(x, group, _sum_over_ranks, _unchanged)  # (5)


# 4. Tensor parallelism -----------------------------------------------------------------------
#
# `split_parameters(module, mesh, weight=Shard(0))` keeps this rank's rows of a weight that all
# ranks have. The parameter becomes a DTensor under its old name, so that checkpoints and optimisers
# know the whole; while the module runs, it sees the plain tensor of its own rows (appendix A),
# multiplied by `factor`. `terms=True` marks a parameter that every rank holds whole, but of whose
# gradient a rank has only a term (rank 0 used the norm of q for heads 0-3, rank 1 for 4-7):
# `reduce_gradients` adds those up. `enter_and_leave(first, last, ..)` applies f to what comes into
# the module `first`, and g to what comes out of the module `last`.


def tensor_parallel(model, mesh, *, sequence=True, expert_tensor=1) -> None:
    """Split heads, inner widths and vocabulary over `mesh`; with `sequence` also tokens between.

    expert_tensor: over how many ranks section 5 splits an expert's width, 1 or all of the mesh.
    `hidden` takes and gives whole sequences on every rank, and all ranks then compute the same
    loss; `logprobs` sums over them what its softmax needs of each part of the vocabulary.
    """
    group = mesh.get_group()
    rows = Shard(0)
    columns = Shard(1)
    whole = Replicate()

    for layer in model.model.layers:
        # Attention: the rows of q, k and v are heads, and heads do not talk to each other. So each
        # rank runs attention on its own heads, and o, split by columns, sums their outputs.
        attention = layer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            split_parameters(linear, mesh, weight=rows, bias=rows)
        split_parameters(attention.o_proj, mesh, weight=columns)

        # A row-parallel layer adds its bias before the sum over ranks, which would add it t times.
        # So the first rank sees the bias and the others see zero times it. Its gradient is then
        # whole on the first rank and 0 on the others, and the sum of these terms is right on all.
        factor = 1 if mesh.get_local_rank() == 0 else 0
        split_parameters(attention.o_proj, mesh, bias=whole, terms=True, factor=factor)

        # Every rank holds the norms of q and k whole, but applies them to its own heads only.
        for norm in (attention.q_norm, attention.k_norm):
            split_parameters(norm, mesh, weight=whole, terms=True)
        enter_and_leave(attention, attention.o_proj, group, sequence)

        # The layer's own norms stand where tokens are shared out: with `sequence` a rank has the
        # term of its tokens, and without it every rank has the whole gradient.
        for name, norm in layer.named_children():
            if name.endswith("layernorm"):
                split_parameters(norm, mesh, weight=whole, terms=sequence)

        # A dense MLP: gate and up by rows, down by columns. Experts are split in section 5. Their
        # router is whole on every rank, but each rank has only a term of its gradient. With whole
        # experts it routed its own tokens only. With split ones f and g stand around router and
        # experts: it routed all tokens, but had only a term of the outputs that it weighed.
        mlp = layer.mlp
        if hasattr(mlp, "experts"):
            split_parameters(mlp.gate, mesh, weight=whole, terms=True)
            if expert_tensor > 1:
                enter_and_leave(mlp, mlp, group, sequence)
        else:
            for linear in (mlp.gate_proj, mlp.up_proj):
                split_parameters(linear, mesh, weight=rows, bias=rows)
            split_parameters(mlp.down_proj, mesh, weight=columns)
            split_parameters(mlp.down_proj, mesh, bias=whole, terms=True, factor=factor)
            enter_and_leave(mlp, mlp.down_proj, group, sequence)

    # The last states are gathered, so that the caller has whole sequences. What follows is computed
    # alike on all ranks and gives each the whole gradient, so backward takes its own tokens' part
    # of it. A scatter-add, as in (4), would count it t times.
    norm = model.model.norm
    if not isinstance(norm, torch.nn.Identity):  # else a stage that others follow
        split_parameters(norm, mesh, weight=whole, terms=sequence)
        if sequence:
            norm.register_forward_hook(
                lambda _, args, out: _Operator.apply(out, group, _gather_tokens, _own_tokens)
            )
    if hasattr(model, "score"):  # a critic's head: whole, and computed alike on all ranks
        split_parameters(model.score, mesh, weight=whole)
    _vocabulary_parallel(model, mesh, sequence)


# 5. Expert parallelism -----------------------------------------------------------------------
#
# A layer's experts are dealt over ranks. A token's row travels to the ranks of its experts and
# back, because rows are small and experts large. `expert_parallel` (appendix A) sets that up.


def dispatch_experts(x_NM, counts_E, experts, group, /):
    """Send rows to the ranks that hold their experts, run `experts` there, and send rows back.

    x_NM: rows sorted by expert. counts_E: how many of them each of all E experts gets; rank r of
    the group holds the r-th E / W experts. experts: called with rows sorted by expert and the
    counts of this rank's experts. Returns (N, M), in the order of x_NM. Ranks and experts without a
    row take part with none.
    """
    world = dist.get_world_size(group)
    counts_We = counts_E.view(world, -1)
    # COMM: every rank sends every rank its counts first, so both sides of the second message know
    # its size. Pinned by tests/test_parallel.py::test_experts_and_ranks_without_a_token.
    arriving_We = torch.empty_like(counts_We)
    dist.all_to_all_single(arriving_We, counts_We.contiguous(), group=group)

    # Rows are sorted by expert and experts lie by rank: what goes to one rank is one stretch. The
    # gradient takes the same way in the other direction, so each move is the other's backward.
    rows_to = counts_We.sum(1).tolist()
    rows_from = arriving_We.sum(1).tolist()
    to_experts = functools.partial(_exchange, gives=rows_to, takes=rows_from)
    back_home = functools.partial(_exchange, gives=rows_from, takes=rows_to)
    rows_nM = _Operator.apply(x_NM, group, to_experts, back_home)

    # Rows arrive sorted by rank and then by expert. Sort them by expert, stably, and undo it after.
    # Two ranks send this rank's experts a and b [3 1] and [1 1] rows:
    #
    #     they arrive as       a a a b | a b
    #     order_n              0 1 2 4 3 5
    #     sorted               a a a a b b      counts [4 2]
    expert_n = torch.arange(arriving_We.shape[1], device=x_NM.device).repeat(world)
    order_n = expert_n.repeat_interleave(arriving_We.flatten()).argsort(stable=True)
    out_nM = experts(rows_nM.index_select(0, order_n), arriving_We.sum(0))
    out_nM = out_nM.index_select(0, order_n.argsort())
    return _Operator.apply(out_nM, group, back_home, to_experts)


# 6. Pipelines --------------------------------------------------------------------------------
#
# A stage is some of the layers, and states travel from stage to stage, their gradients back. One
# batch would keep one stage busy and the others waiting, so it is cut into microbatches. 1F1B:
# stage i of p, counted from 0, begins with p - i forwards (the first with p, the last with one),
# then takes backward and forward in turn. So it never holds the activations of more than p - i
# microbatches. F0 is the forward of microbatch 0; 3 stages, 4 microbatches:
#
#     rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
#     rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
#     rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3
#
# torch.distributed.pipelining runs such schedules; appendix B gives it our stages. The loss exists
# on the last stage only. Losses of microbatches are terms of one sum, as those of data shares are.


# 7. Gradients --------------------------------------------------------------------------------
#
# Ranks that hold a parameter have terms of its gradient for one of two reasons. Some had other
# tokens: the data shares, and the ranks of a context, where only attention looks across. Others had
# the same tokens and did another part of the work: `terms`, and the two ends of a pipeline. Each
# reason has a sum of its own. In the plan d2t2, ranks 0 and 1 have the same tokens, 2 and 3 too:
#
#     rows of q_proj, split by t    over d: ranks 0 + 2, ranks 1 + 3
#     a norm under SP, `terms`      over d: ranks 0 + 2, ranks 1 + 3; over t: ranks 0 + 1, 2 + 3

TIED = "model.embed_tokens.weight"  # of a tied model, on the first stage and on the last


def local(tensor):
    """The plain tensor that is on this rank: of a DTensor its part, which shares its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def holders(grid, name):
    """The group of ranks with the same part of a parameter and other tokens.

    Experts are dealt over ranks of other data shares too, so fewer ranks hold the same ones. None,
    torch's default group of all ranks, without a plan.
    """
    if grid is None:
        return None
    return grid.experts["expert-dp"].get_group() if ".mlp.experts." in name else grid.data


def reduce_gradients(model) -> int:
    """(1): sum each parameter's gradient over ranks, in place. Collective, once before each step.

    A rank without a gradient adds zeros. FSDP has summed over data ranks in backward already.
    Returns, for `name_suspects`, which of this rank's gradients was not finite before any sum: the
    first of them in the order of backward, 0 for the model's last parameter; -1 if there is none.
    """
    reshard(model)  # else the gradients of the root's shards are out of sight
    grid = getattr(model, "grid", None)

    # Go from the last parameter to the first, as backward does. A rank that had no tokens has no
    # gradients; it must send zeros, or the others would wait for it.
    suspect = -1
    trained = []
    by_message = {}
    for position, (name, p) in enumerate(reversed(list(model.named_parameters()))):
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        if suspect < 0 and not local(p.grad).isfinite().all():
            suspect = position
        trained.append((name, p))
        by_message.setdefault((holders(grid, name), is_split(p)), []).append(local(p.grad))

    # First sum over the ranks with other tokens and the same part of the parameter.
    if not sharded(model) and dist.get_world_size() > 1:
        for (group, _), gradients in by_message.items():
            sum_in_messages(gradients, group)  # (1)

    # Then sum over the ranks that hold the same parameter and have terms of its gradient.
    # NUMERICS: copies of a parameter must get the same bits. An all-reduce gives its own ranks the
    # same bits, but two groups (0 + 2 and 1 + 3) may add in other orders, as the order goes by
    # the place in the message. So the sum over t comes last. A copy that has no such sum (a norm
    # without SP) must lie at the same place in both groups' messages: so it shares none with split
    # parameters, whose parts may differ in length and would shift it. Pinned by
    # tests/test_parallel_faults.py::test_replicas_hold_the_same_bits_after_three_steps.
    for name, p in trained:
        # COMM: the mark on the parameter decides whether to send, as it is alike on all ranks of a
        # tensor group. A gradient's placement does not tell: zeros filled in above are not Partial.
        # Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
        if getattr(p, "terms", False):
            total = local(p.grad)
            dist.all_reduce(total, group=p.device_mesh.get_group())  # (1)
            p.grad = DTensor.from_local(total, p.device_mesh, p.placements, run_check=False)

        if name == TIED and getattr(model, "split_tie", False):
            # COMM: both ends of a pipeline hold the embedding; each has a term of its gradient.
            # Stages between them do not. Pinned by
            # tests/test_parallel.py::test_every_plan_is_one_process.
            dist.all_reduce(local(p.grad), group=grid.ends)  # (1)
    return suspect


def clip_grad_norm(model, max_norm: float):
    """(2) and the factor of (3): scale the reduced gradients in place, on all ranks alike.

    Returns the norm before it, a 0-d tensor, the same on every rank. Where that is not finite, no
    gradient is changed, and the caller must skip the step. Collective for a model of a plan.
    """
    grid = getattr(model, "grid", None)
    reduced = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    if grid is None:
        # A float32 sum of squares over 100,000 entries of an embedding is off in the fifth digit.
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for _, p in reduced]
        norm = full(torch.linalg.vector_norm(torch.stack(norms)))  # (2)
    else:
        # Other stages hold other parameters, and both ends of a pipeline hold one: add up squares.
        # NUMERICS: an entry that k ranks hold counts 1 / k on each, so that one sum over all ranks
        # counts it once. Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
        ranks_of_stage = grid.plan.world // grid.plan.pp
        squares = []
        for name, p in reduced:
            norm_of_p = torch.linalg.vector_norm(local(p.grad), dtype=torch.float64)
            k = copies(p, ranks_of_stage)
            if name == TIED and getattr(model, "split_tie", False):
                k *= 2  # the first and the last stage
            squares.append(norm_of_p.square() / k)
        sum_of_squares = torch.stack(squares).sum()
        dist.all_reduce(sum_of_squares)
        norm = sum_of_squares.sqrt()  # (2)

    # NUMERICS: torch's own clip divides by norm + 1e-6; (3) does not.
    # Pinned by tests/test_ranks.py::test_the_clip_is_exactly_the_ratio_of_norms.
    if norm.isfinite() and norm > max_norm:
        for _, p in reduced:
            local(p.grad).mul_(max_norm / norm.item())  # (3)
    return norm


# 8. The optimiser, ZeRO-1 and FSDP -----------------------------------------------------------
#
# After (1) the ranks that hold a parameter hold the same gradient, and would all make the same
# update and keep the same two moments of AdamW. There are three ways to deal with that:
#
#            weights    gradients    moments     messages of a step
#     ddp    whole      whole        whole       sum gradients
#     zero1  whole      whole        own rows    sum gradients, gather updated weights
#     fsdp   own rows   own rows     own rows    gather weights, scatter-add gradients, a layer at
#                                                a time, in every forward and backward
#
# ddp is a plain optimiser behind `reduce_gradients`; `LocalOptimizer` is zero1; torch's FSDP2 is
# fsdp, and `shard` (appendix C) tells it which layers are a unit, and to sum, not to average.


class LocalOptimizer:
    """A torch optimiser on the plain tensors that are on this rank: what DTensors and shards hold.

    model: any module, or what `parallelize` returned. make: from a list of parameters to the
    optimiser, as in lambda p: torch.optim.AdamW(p, lr=1e-5). zero: ZeRO-1, each of the ranks with
    the same weights updates some of their rows, holds the state of those alone, and sends them to
    the others. after_step: called with the model once its weights are new, for Float8's scales.
    """

    def __init__(self, model, make, *, zero=False, after_step=None):
        if zero:
            _require_whole_weights(model)
        self.model = model
        self.zero = zero
        self.after_step = after_step

        # The optimiser gets views of the model's own memory: what it updates is the model. AdamW
        # treats each entry by itself, so it needs to know neither DTensors nor the other rows.
        # Without `zero`, they are all rows that are on this rank. Masters are no views: appendix M.
        self.mine = {}
        for name, p in round_parameters(model):
            rows = _own_weights(self, name, p)
            self.mine[name] = torch.nn.Parameter(rows, requires_grad=p.requires_grad)
        self.inner = make([*self.mine.values()])
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    @torch.no_grad()
    def step(self) -> None:
        """(3): one update from .grad; a parameter without one keeps its value."""
        named = dict(self.model.named_parameters())
        for name, rows in self.mine.items():
            grad = named[name].grad
            rows.grad = None if grad is None else _own_rows(self, name, local(grad))
        self.inner.step()  # (3)

        # Under ZeRO each rank has updated its rows of its own copy: now all get all rows. Masters
        # are not in the model: they are rounded into it.
        show_updates(self)
        if self.after_step is not None:
            self.after_step(self.model)

    def zero_grad(self) -> None:
        for p in self.model.parameters():
            p.grad = None


# 9. The public call --------------------------------------------------------------------------
# (Models that only generate are split by appendix L; appendix N is for ranks that only do that.)


def parallelize(
    model, plan, *, device_mesh, attention=None, mode="ddp", sequence=True, schedule="1f1b",
    ac="none", ac_every=2, memory_budget=0.5, compile=False, offload=False, compute_dtype=None,
):  # fmt: skip
    """Make a whole model, equal on all ranks, into this rank's part of a plan; returns that.

    model: a `models.Transformer`, or a module with its names (appendix F), where it will run, or on
        the meta device, for `materialise`; it is changed.
    plan: a `Plan` for as many ranks as there are.
    device_mesh: `Grid.make(plan)`.
    attention: the callable of context parallelism, which the layers call; needed for c > 1.
    mode: "ddp" (whole copies, one reduction a step), "fsdp" (FSDP2; HSDP where the grid
        replicates), "zero1" (as ddp, with `LocalOptimizer(zero=True)`); section 8 compares them.
    sequence: share tokens out over the tensor ranks where no matrix is split: t divides them.
    schedule: of a pipeline, see SCHEDULES. A plan with p > 1 gives a `Pipeline`, else the model
        itself comes back, changed.
    ac: activations that are computed again: "none", "full", "layers" or "op", see
        `checkpoint_layers`; "memory_budget": torch.compile chooses what to keep.
    ac_every: of "layers", every how many-th layer is computed again.
    memory_budget: of ac="memory_budget", the share of the activations that is kept, 0 to 1.
    compile: torch.compile each layer by itself, for any length.
    offload: keep the shards of fsdp on the CPU, see `shard`.
    compute_dtype: mixed precision (appendix M): products in this dtype, all else in the weights'.

    Raises ValueError on every rank, before the first message, for what cannot be. Section 10 runs
    the result. Who runs it otherwise gives ranks of different d different sequences, those of a
    tensor group and of a pipeline the same ones, and those of a context different tokens of the
    same ones. Each divides its loss by the global count, and tensor ranks all compute the same
    loss; then come reduce_gradients, clip_grad_norm and the optimiser's step.
    """
    _refuse_what_cannot_be(
        plan, model, device_mesh, attention=attention, mode=mode, sequence=sequence,
        schedule=schedule, ac=ac, ac_every=ac_every, memory_budget=memory_budget, compile=compile,
        offload=offload, compute_dtype=compute_dtype)  # fmt: skip
    if attention is not None:
        model.attention = attention

    # What this rank will train: the model, or some stages of it, each of which is a model itself.
    whole = model if plan.pp == 1 else Pipeline(model, device_mesh, schedule, compute_dtype)

    # These tell the functions of sections 7, 8 and 10, which get only the model, how it was split:
    # communicators, who sums gradients and holds moments, who has which tokens. A Pipeline has a
    # `split_tie` too: its two ends hold one embedding. A model without them is a whole copy on each
    # rank: reduce_gradients, clip_grad_norm and LocalOptimizer work on any nn.Module.
    whole.grid = device_mesh
    whole.mode = mode
    whole.sequence = sequence
    whole.offload = offload
    whole.compute_dtype = compute_dtype

    for part in parts_of(whole):
        part.grid = device_mesh
        # The order matters. Tensor and expert parallelism first, on plain weights.
        if plan.tp > 1:
            mesh = device_mesh.dense["tp"]
            tensor_parallel(part, mesh, sequence=sequence, expert_tensor=plan.etp)
        if plan.ep * plan.etp > 1:
            expert_parallel(part, device_mesh.experts)

        # Then wrap the layers: what is computed again includes the messages inside a layer.
        if ac in ("full", "layers", "op"):
            checkpoint_layers(part.model.layers, ac, every=ac_every)
        if compile:
            _compile_layers(part.model.layers, memory_budget if ac == "memory_budget" else None)

        # FSDP last, because it shards again what the others have left of a weight.
        if mode == "fsdp":
            shard(part, offload=offload, compute_dtype=compute_dtype)

        if plan.cp > 1 and plan.tp > 1 and sequence:
            _check_lengths_first(part, device_mesh)
    return whole


# 10. A packed batch under a plan -------------------------------------------------------------
#
# A training script has sequences of unequal lengths, and a loss. In between, plans want different
# things: t a number of tokens that it divides, c this rank's tokens of each sequence, p all
# micro-batches at once and the loss on one stage. With `PackedBatches` it reads as on one device:
#
#     batches = PackedBatches(model, attention=attention)    # model: of `parallelize`, or unsplit
#     loss = batches.forward_backward(sequences, masks, loss_fn)
#     reduce_gradients(model)
#     clip_grad_norm(model, 1.0)
#     optimizer.step()


class PackedRow(NamedTuple):
    """Sequences end to end in a row of S places; on the CPU, and the same on every rank.

    Sequences a b c and d e in 8 places, of which b, c and e are scored:

        tokens      a b c d e 0 0 0        padding is in no document, and at position 0
        document    0 0 0 1 1 - - -
        position    0 1 2 0 1 0 0 0
        mask        [[1, 1], [1, 0]]       of the targets b c and e, padded to two
        at          [0, 1, 3]              b is predicted at a, c at b, e at d
        sequence    [0, 0, 0, 1, 1]        who holds the tokens that stand at these places, once
        token       [0, 1, 2, 3, 4]        for each holder: in a tree there may be several
    """

    tokens_1S: torch.Tensor
    positions_1S: torch.Tensor
    sees: object  # for the attention: (1, S), which sequence a token is of; -1: padding
    mask_BT: torch.Tensor  # which targets are scored
    at_N: torch.Tensor  # where the token stands that predicts each of those
    targets_N: torch.Tensor  # the tokens that are predicted
    entries_K: torch.Tensor  # for each True of the mask, which of the N it is: here 0 1 2
    sequence_J: torch.Tensor  # which sequences hold which tokens: padding is nobody's
    token_J: torch.Tensor


class PackedBatches:
    """A model that is given batches of sequences and a loss: one call, alike under every plan.

    model: what `parallelize` returned, or an unsplit one with `hidden` and `logprobs`.
    attention: attention(document_1S, group) makes what the layers call for a `PackedRow`: tokens
        see those before them in their own document. group: None, or the ranks of the context.
    indices: indices(length, rank, world), ascending: the tokens of a row that a rank of the context
        has, as this attention wants them: `ring_attention.indices`. For c > 1 only.
    balance: balance(sequence_j, token_j, sequences=, groups=) makes what sparse layers are given
        in training to attach their loss by, such as a `models.Balance`. None: nothing.
    micro_tokens: of a micro-batch, at most; a longer sequence is alone in one.
    temperature: of the log-probs.

    Different data shares bring different sequences. The c, t and p ranks of one share, its replica
    group, bring the same ones: `gather_replica` makes one batch of what each of them has.
    """

    def __init__(self, model, *, attention, indices=None, balance=None, micro_tokens=8192,
                 temperature=1.0):  # fmt: skip
        self.model = model
        self.attention = attention
        self.balance = balance  # is made anew for each row, as the attention is
        self.indices = indices
        self.micro_tokens = micro_tokens
        self.temperature = temperature
        self.plan = _plan_of(model)
        self.device = _device_of(model)
        _require_indices(self)

    def forward_backward(self, sequences, masks, loss_fn) -> torch.Tensor:
        """Add the gradient of a batch's loss to .grad; returns the loss, summed over data shares.

        sequences: lists of token ids. masks: for each a bool for each target, tokens[1:]. loss_fn:
        called as loss_fn(indices, mask_BT, logprobs_BT, entropies_BT), of a critic values_BT too:
        sequence indices[b] has row b, which is 0 where nothing is scored. It returns this
        micro-batch's term of L_d, divided by the global count, and does so alike on all c and t
        ranks of the share d (under p, of its last stage). Collective.
        """
        micros, rows = self.lay_out(sequences, masks)

        def loss_of_states(k, hidden_1sM):
            scores = self.score(rows[k], hidden_1sM)
            if not micros[k]:  # a loss of 0 with a graph: others wait for its backward's messages
                return sum(x_BT.sum() for x_BT in scores)
            return loss_fn(micros[k], rows[k].mask_BT.to(self.device), *scores)

        # A pipeline runs all micro-batches by its schedule. Else it is as on one device: forward,
        # loss, backward, whose graph is freed before the next one. backward() adds to .grad, and
        # that is right, because the losses are terms of one sum.
        losses = []
        if isinstance(self.model, Pipeline):
            parts = _own_parts(self, rows, self.balance)
            losses = self.model.forward_backward(parts, loss_of_states)
        else:
            for k, row in enumerate(rows):
                loss = loss_of_states(k, self.states(row, self.balance))
                loss.backward()
                losses.append(loss.detach())
        return _sum_over_replicas(self.model, losses, self.device)

    def forward(self, sequences, masks) -> list:
        """(logprobs, entropies), of a critic values too, of each sequence, without gradient:
        (L - 1,) each, on the CPU, on every rank of the replica. Collective."""
        return _scores_without_gradient(self, sequences, masks)

    def lay_out(self, sequences, masks):
        """The micro-batches, as lists of indices, and the `PackedRow` of each. Collective."""
        return _lay_out(self, sequences, masks)

    def states(self, row, balance=None):
        """The states (1, s, M) of this rank's tokens of a row."""
        (micro,) = _own_parts(self, [row], balance)
        return micro.through(self.model, micro.tokens)

    def score(self, row, hidden_1sM) -> list:
        """Log-probs, entropies, of a critic values of a row's targets, (B, T) each."""
        # Of the N scored tokens, those whose state lies here; searchsorted finds it among ours.
        # Here are 0 1 6 7 of 8 tokens, and scored are 0 1 3: states 0 and 1, and 3 is another's.
        model = self.model.last if isinstance(self.model, Pipeline) else self.model
        local_s = _own_tokens_of(self, row)
        here_N = torch.isin(row.at_N, local_s)
        at_n = row.at_N[here_N]
        x_nM = hidden_1sM[0, torch.searchsorted(local_s, at_n).to(self.device)]
        targets_n = row.targets_N[here_N].to(self.device)
        columns = [*model.logprobs(x_nM, targets_n, temperature=self.temperature)]
        if getattr(model.config, "value_head", False):
            columns.append(model.values(x_nM))

        # Back into (B, T). The ranks of a context have filled in different entries, and the others
        # are 0: their sum is the whole, and all compute the same loss of it. So each has the whole
        # gradient of the sum: `add_terms` sends nothing backward, else it would count c times.
        here_n = here_N.nonzero()[:, 0].to(self.device)
        entries_K = row.entries_K.to(self.device)
        places = row.mask_BT.nonzero().T.to(self.device)
        scores = []
        for x_n in columns:
            x_N = x_n.new_zeros(len(here_N)).index_copy(0, here_n, x_n)
            if self.plan.cp > 1:
                x_N = add_terms(x_N, self.model.grid.context)
            x_BT = x_n.new_zeros(row.mask_BT.shape)
            scores.append(x_BT.index_put((*places,), x_N[entries_K]))
        return scores


# =============================================================================================
# The idea ends here. What follows makes it strict, fast and connected: nobody needs it to
# understand the sections above.
# =============================================================================================

# A. Split parameters -------------------------------------------------------------------------
#
# How a module comes to hold and to see only this rank's part of its weights, by DTensors and hooks.
# Skip it unless you add a module that tensor or expert parallelism must split.


def own_part(whole, mesh, placements):
    """This rank's part of a tensor that all ranks have, as a DTensor cuts it: a view."""
    # Cut along one dimension of the mesh after the other. chunk gives the first ranks one row more
    # where rows do not divide, which is how a DTensor's own Shard cuts.
    part = whole
    for n, placement in enumerate(placements):
        if placement.is_shard():
            part = part.chunk(mesh.size(n), placement.dim)[mesh.get_local_rank(n)]
    return part


def _place_parameter(module, name, mesh, placements, terms=False):
    """Keep this rank's part of a parameter that all ranks have, as a DTensor of the same name.

    terms: its gradients on the ranks are terms of a sum.
    """
    p = getattr(module, name)
    part = own_part(p.detach(), mesh, placements)

    # clone, because a view would keep the whole weight alive. The shape of the whole must be said:
    # from unequal parts torch cannot tell it without a message.
    whole = dict(shape=p.shape, stride=p.stride())
    placed = DTensor.from_local(part.clone(), mesh, placements, run_check=False, **whole)
    parameter = torch.nn.Parameter(placed, requires_grad=p.requires_grad)
    parameter.terms = terms
    setattr(module, name, parameter)


def split_parameters(module, mesh, *, terms=False, factor=1, **placements):
    """Place parameters (name=placement); while the module runs it sees them as plain tensors.

    terms: what a rank computes of their gradients is a term of a sum over the mesh. factor: of what
    the module sees.
    """
    seen = {}
    for name, placement in placements.items():
        if getattr(module, name, None) is not None:
            placement = placement if isinstance(placement, tuple) else (placement,)
            _place_parameter(module, name, mesh, placement, terms)
            seen[name] = (Partial(),) if terms else placement

    # Before the module runs, an entry in its __dict__ shadows the parameter: Python looks there
    # first, and only then does nn.Module look into _parameters. So `self.weight` is for that time
    # the plain tensor of this rank, as a function of the DTensor, into whose .grad backward then
    # goes. After the module has run, or failed, the entry is taken out again.
    def show(module, args):
        # NUMERICS: DTensor's default takes a plain tensor's gradient to be whole on every rank; a
        # norm that saw this rank's tokens or heads has a term of it, and says so. Pinned by
        # tests/test_parallel.py::test_every_plan_is_one_process.
        for name, placement in seen.items():
            p = module._parameters[name]
            plain = p.to_local(grad_placements=placement)
            module.__dict__[name] = plain if factor == 1 else plain * factor

    def cover(module, args, output):
        for name in seen:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(show)
    module.register_forward_hook(cover, always_call=True)


def enter_and_leave(first, last, group, sequence):
    """f on the way into the module `first`, g on the way out of the module `last`."""

    def entering(module, args):
        return enter_split(args[0], group, sequence), *args[1:]

    def leaving(module, args, out):
        return leave_split(out, group, sequence)

    first.register_forward_pre_hook(entering)
    last.register_forward_hook(leaving)


def _vocabulary_parallel(model, mesh, sequence):
    """Split the rows of the embedding and of the head, where this part of a model has them."""
    group = mesh.get_group()
    world = mesh.size()

    # Parts are cut as torch cuts: ceil(V / t) rows each, and the last rank takes what is left.
    # V = 7, t = 2: rank 0 has rows 0 1 2 3, rank 1 rows 4 5 6, and their `first` is 0 and 4.
    first = mesh.get_local_rank() * -(-model.config.vocab_size // world)

    def embed(tokens_BS):
        if sequence:
            _require_divisible(tokens_BS.shape[1], world)
        # Each token's row of the embedding is on one rank; the other ranks add zeros, and g sums.
        # (As a matrix product with one-hot vectors it is cut along the inner dimension, V: hence g
        # and not f.) Token ids 5 2 5 on rank 1 are local rows 1 -2 1, of which the second is
        # another's: it reads row 0, times zero.
        local_BS = tokens_BS - first
        here_BS = (local_BS >= 0) & (local_BS < len(embedding.weight))
        x_BSM = F.embedding(local_BS.masked_fill(~here_BS, 0), embedding.weight)
        return leave_split(x_BSM * here_BS[..., None], group, sequence)

    def lm_head_shard():
        # The whole (N, V) logits never exist: each rank has its rows of the head, and
        # `token_logprobs` adds up over the group what the softmax needs of them.
        weight_vM = model.head_weight.to_local(grad_placements=[Shard(0)])
        return weight_vM, dict(group=group, vocab_start=first)

    # `logprobs` asks model.lm_head_shard() for its weight: from here on it gets this rank's part.
    if hasattr(model, "lm_head"):
        _place_parameter(model.lm_head, "weight", mesh, (Shard(0),))
    model.lm_head_shard = lm_head_shard

    # `embed` replaces the lookup of this one module; the hooks that show it the plain rows still
    # run around it. A rank may hold two stages that share this embedding, the first and the last
    # (schedule zbv, appendix B): it is replaced once.
    embedding = getattr(model.model, "embed_tokens", None)
    if embedding is not None and not isinstance(embedding.weight, DTensor):
        split_parameters(embedding, mesh, weight=Shard(0))
        embedding.forward = embed


def _exchange(x_NM, group, gives, takes):
    """Rows to ranks: gives[r] rows go to rank r, takes[r] come from it."""
    out_nM = x_NM.new_empty(sum(takes), *x_NM.shape[1:])
    dist.all_to_all_single(out_nM, x_NM.contiguous(), takes, gives, group=group)
    return out_nM


def expert_parallel(model, mesh) -> None:
    """Deal whole experts over the mesh's ep ranks, and their inner width over its etp ranks."""
    group = mesh["ep"].get_group()
    for experts in experts_of(model):
        # Weights are (E, inner, M), and down (E, M, inner). Dimension 0 goes by ep. The inner width
        # goes by etp, rows of gate and up, columns of down, as in a dense MLP.
        rows = (Shard(0), Shard(1))
        columns = (Shard(0), Shard(2))
        split = dict(gate_proj=rows, up_proj=rows, down_proj=columns)
        split_parameters(experts, mesh["ep", "etp"], **split)

        # The layer's call of experts(x, counts) now goes over the wire.
        # run=run binds this layer's function; without it all layers would call the last one's.
        if mesh["ep"].size() > 1:
            run = experts.forward
            experts.forward = lambda x, counts, run=run: dispatch_experts(x, counts, run, group)


# B. Running a pipeline -----------------------------------------------------------------------
#
# Stages as the schedules of torch.distributed.pipelining want them, and a forward without them.
# Skip it unless you use p: section 6 says what a pipeline is.


class Micro(NamedTuple):
    """A microbatch: (B, S) token ids, their positions, and the attention of their documents."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: object = None  # None: the model's
    balance: object = None  # of its sparse layers; None: they attach no loss

    def through(self, part, x):
        """What a model, or a stage of one, makes of x: of the tokens, or of the states before."""
        options = dict(positions=self.positions, attention=self.attention)
        # Only a model with experts needs to know what a balance is.
        if self.balance is not None:
            options["balance"] = self.balance
        return part.hidden(x, **options)


SCHEDULES = {"1f1b": (pipelining.Schedule1F1B, 1),  # and how many stages a rank has
             "interleaved1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
             "zbv": (pipelining.ScheduleZBVZeroBubble, 2)}  # fmt: skip


def stage_part(model, stage, stages):
    """A copy of stage `stage` of a whole model: its layers under their own names, and the ends.

    Layers are dealt evenly, the first stages get one more. A tied embedding is in the first stage
    and, as the head, in the last.
    """
    first = stage == 0
    last = stage == stages - 1

    # 5 layers in 2 stages are [0 1 2] and [3 4]. Layers keep their numbers, so that a parameter has
    # one name in the model, in its stage and in a checkpoint of any plan.
    own_layers = np.array_split(np.arange(len(model.model.layers)), stages)[stage]
    others = [layer for n, layer in enumerate(model.model.layers) if n not in own_layers]
    if not last:
        others += [model.model.norm, getattr(model, "lm_head", None), getattr(model, "score", None)]
    if not first and not (last and model.config.tie_word_embeddings):
        others.append(model.model.embed_tokens)

    # A stage that others follow hands its states on as they are, without the last norm.
    part = _copy_without(others, model)
    if not last:
        part.model.norm = torch.nn.Identity()
    return part


def _copy_without(others, model):
    """A deep copy of a model in which these of its modules are absent."""
    # deepcopy looks up by id(object) what it has copied already. Entries made beforehand tell it to
    # put None where those modules are, so that they are never copied, and to share attention, which
    # may hold a process group and cannot be copied.
    copied = {id(module): None for module in others}
    copied[id(model.attention)] = model.attention
    part = copy.deepcopy(model, copied)

    # Take the Nones out of the tables of children.
    for module in (part, part.model, part.model.layers):
        module._modules = {name: m for name, m in module._modules.items() if m is not None}
    return part


class _Stage(torch.nn.Module):
    """What torch's schedule runs: (index of a microbatch, or the states before) -> states.

    A schedule hands tensors from stage to stage and nothing else. So each stage looks up positions
    and attention of a microbatch itself, by the index that all stages are given.
    """

    def __init__(self, part, pipeline):
        super().__init__()
        self.part = part
        self.micros = pipeline.micros

    def forward(self, x, index):
        micro = self.micros[int(index)]
        x = x if x.is_floating_point() else micro.tokens
        return micro.through(self.part, x)


class Pipeline:
    """This rank's stages of a model, run by a schedule of torch.distributed.pipelining.

    1f1b gives a rank one stage, the others two. Interleaved, of 4 stages on 2 ranks, rank 0 has 0
    and 2 (a and c below), so that a rank waits for half a rank's layers only:

        rank 0   F0a F1a F0c F1c ..
        rank 1   ... F0b F1b F0d ..

    zbv: rank r has stages r and 2 p - 1 - r, a V, and a backward's weights are done apart from its
    inputs. A Pipeline has the parameters of its stages under the names of the whole model.
    """

    def __init__(self, model, grid, schedule, compute_dtype=None):
        p = grid.plan.pp
        rank = grid.dense["pp"].get_local_rank()
        dtype = next(model.parameters()).dtype
        self.behind_norm = compute_dtype or dtype  # the last stage's states
        dtype = getattr(model, "residual_dtype", None) or self.behind_norm
        self.grid = grid
        self.config = model.config
        self.like = dict(dtype=dtype, device=_device_of_grid(grid))  # the states between stages
        self.schedule, per_rank = SCHEDULES[schedule]

        # What `_Stage` and the loss of the current step look up; filled by `forward_backward`.
        self.micros = []
        self.loss_fn = None
        self.runs = {}  # (shape, number) of microbatches -> torch's schedule for them

        # Which rank has each stage. 4 stages on 2 ranks: 0 1 0 1 interleaved, 0 1 1 0 as a V.
        self.stages = p * per_rank
        self.rank_of = [*range(p)] * per_rank
        if schedule == "zbv":
            self.rank_of = [*range(p), *reversed(range(p))]
        mine = [stage for stage, holder in enumerate(self.rank_of) if holder == rank]
        self.parts = {stage: stage_part(model, stage, self.stages) for stage in mine}

        # A tied embedding is in the first and in the last stage. Under zbv one rank has both, and
        # they share it; else two ranks do, and reduce_gradients sums over them (`split_tie`).
        tied = model.config.tie_word_embeddings
        self.split_tie = tied and schedule != "zbv"
        if tied and schedule == "zbv" and rank == 0:
            self.parts[self.stages - 1].model.embed_tokens = self.parts[0].model.embed_tokens

    @property
    def last(self):
        """The part with the head, None on ranks that do not have it."""
        return self.parts.get(self.stages - 1)

    def named_parameters(self):
        named = (pair for part in self.parts.values() for pair in part.named_parameters())
        return iter(dict(named).items())

    def parameters(self):
        return (p for _, p in self.named_parameters())

    def named_buffers(self):
        named = (pair for part in self.parts.values() for pair in part.named_buffers())
        return iter(dict(named).items())

    def buffers(self):
        return (buffer for _, buffer in self.named_buffers())

    def forward_backward(self, micros, loss_fn) -> list:
        """Gradients of the sum of loss_fn(k, hidden of microbatch k); the losses where `last` is.

        All ranks of the plan call it with microbatches of the same number and shape, each padded to
        the longest; `loss_fn` runs on the last stage, where `last.logprobs` is.
        """
        shape = tuple(micros[0].tokens.shape)
        n = len(micros)
        p = self.grid.plan.pp
        if any(tuple(micro.tokens.shape) != shape for micro in micros):
            raise ValueError("microbatches of a step must have one shape; pad them to the longest")
        self._require_tokens(micros)
        self.grid.plan.require_fits(microbatches=n)
        if self.stages > p and n % p:
            raise ValueError(f"{n} microbatches must divide by the {p} ranks of the pipeline")

        # Torch's schedule is made for a shape, since its stages keep buffers of that shape. The
        # stages hold on to the list `micros`, so it is filled and not replaced.
        if (shape, n) not in self.runs:
            self.runs[shape, n] = self._schedule_of(shape, n)
        self.micros[:] = micros
        self.loss_fn = loss_fn

        # Only the first stage is given an input and only the last one targets. Both are indices of
        # microbatches: `_Stage` and `loss_fn` know the rest.
        losses = []
        index = torch.arange(n, device=self.like["device"])
        inputs = (index,) if 0 in self.parts else ()
        options = dict(target=index, losses=losses) if self.last is not None else {}
        self.runs[shape, n].step(*inputs, index=index, return_outputs=False, **options)
        return [loss.detach() for loss in losses]

    def _schedule_of(self, shape, n):
        """Torch's schedule for n microbatches of a shape."""
        # Examples of what a stage takes and gives: under sequence parallelism a part of the tokens,
        # but the last stage has gathered them. scale_grads=False: torch would average the losses.
        states = torch.empty(self._states_shape(shape), **self.like, requires_grad=True)
        behind_norm = self.like | dict(dtype=self.behind_norm)
        whole = torch.empty(*shape, states.shape[2], **behind_norm, requires_grad=True)
        index = states.new_zeros(1, dtype=torch.int64)
        stages = []
        for number, part in self.parts.items():
            stages.append(pipelining.PipelineStage(
                _Stage(part, self), number, self.stages, states.device,
                input_args=index if number == 0 else states,
                output_args=whole if part is self.last else states,
                group=self.grid.dense["pp"].get_group(),
            ))  # fmt: skip

        def loss_of(hidden, index):
            return self.loss_fn(int(index), hidden)

        given = stages if self.stages > self.grid.plan.pp else stages[0]
        return self.schedule(given, n, loss_fn=loss_of, scale_grads=False)

    @torch.no_grad()
    def forward(self, micros) -> list | None:
        """`hidden` of each microbatch where `last` is, without gradient or loss; None elsewhere."""
        # DEVIATES: torch's schedules cannot run zbv forward only (2.13), so these few lines do, for
        # all of them. COMM: a microbatch's stages run one after another, and all ranks take the
        # microbatches in one order, so each send meets the receive it waits for. Pinned by
        # tests/test_plan_run.py::test_old_and_reference_log_probs_too.
        self._require_tokens(micros)
        group = self.grid.dense["pp"].get_group()
        at = [dist.get_global_rank(group, rank) for rank in self.rank_of]
        out = []
        for micro in micros:
            x = micro.tokens
            for stage, part in sorted(self.parts.items()):
                # Where one rank has two neighbouring stages, as at the turn of a V, x stays here.
                if stage and at[stage - 1] != dist.get_rank():
                    x = torch.empty(*self._states_shape(micro.tokens.shape), **self.like)
                    dist.recv(x, at[stage - 1], group=group)
                x = micro.through(part, x)
                if part is not self.last and at[stage + 1] != dist.get_rank():
                    dist.send(x.contiguous(), at[stage + 1], group=group)
            out.append(x)
        return out if self.last is not None else None

    def _require_tokens(self, micros):
        """ValueError on every stage for tokens that only the first one would find wrong."""
        part = next(iter(self.parts.values()))
        for micro in micros:
            part.require_tokens(micro.tokens)
        if self.sequence and self.grid.plan.tp > 1:
            lengths = [micro.tokens.shape[1] for micro in micros]
            require_even_lengths(self.grid, lengths, self.like["device"])

    def _states_shape(self, shape):
        """Shape of the hidden states that one stage sends to the next, for tokens of a shape."""
        t = self.grid.plan.tp if self.sequence else 1
        return shape[0], shape[1] // t, self.config.hidden_size


# C. FSDP's units, and activations that are computed again -------------------------------------
#
# What torch's FSDP2, activation checkpointing and compiler are told about a model's layers.
# Skip it unless you use fsdp or ac, or want to know why FSDP2 does not average here.


def shard(model, *, offload=False, compute_dtype=None) -> None:
    """FSDP2 on every layer and the rest, with gradients summed over ranks, not averaged.

    model: whole, or of tensor and expert parallelism, with `.model.layers` and `.hidden`. offload:
    shards, their gradients and so the optimiser live on the CPU. compute_dtype: see appendix M.
    """
    pin_memory = torch.cuda.is_available()
    policy = fsdp.CPUOffloadPolicy(pin_memory=pin_memory) if offload else fsdp.OffloadPolicy()
    grid = getattr(model, "grid", None)

    # A layer is a unit: its weights are gathered just before it runs and dropped after. Experts are
    # a unit of their own over fewer ranks, as other ranks hold copies of them than of the rest. The
    # inner units come first: fully_shard takes what lies in a module and is in no unit yet.
    mesh = None
    units = []
    if grid is not None:
        replicates = grid.dense["replicate"].size() > 1
        mesh = grid.dense["replicate", "fsdp"] if replicates else grid.dense["fsdp"]
        units = [(experts, grid.experts["expert-dp"]) for experts in experts_of(model)]
    units += [(module, mesh) for module in (*model.model.layers, model)]

    precision = fsdp_precision(model, compute_dtype)
    for module, ranks in units:
        fsdp.fully_shard(module, mesh=ranks, offload_policy=policy, mp_policy=precision)
        # NUMERICS: FSDP2 averages by default; the losses here are parts of a sum. gloo has no
        # pre-multiplied sum, hence the second call.
        # Pinned by tests/test_ranks.py::test_ranks_and_sharding_give_the_one_process_run.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    # The root's own weights (embedding, norm, head) are gathered when one calls the model's
    # `forward`. Training here calls `hidden`, so that must gather them too.
    fsdp.register_fsdp_forward_method(model, "hidden")


@torch.no_grad()
def materialise(model) -> None:
    """Allocate this rank's part of a model that was on the meta device when it was split.

    What is then in it is undefined. The largest tensor that is ever made is a part's.
    """
    device = _device_of(model)
    for part in parts_of(model):
        # torch's to_empty replaces the parameters, and what was noted on them is lost.
        terms = {name: getattr(p, "terms", False) for name, p in part.named_parameters()}
        part.to_empty(device="cpu" if model.offload else device)
        for name, p in part.named_parameters():
            p.terms = terms[name]


def experts_of(model) -> list:
    """The modules that hold all experts of a layer."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def sharded(model) -> bool:
    """Whether FSDP holds the model's weights. Not read off the parameters: between forward and
    backward the root's are whole."""
    return getattr(model, "mode", None) == "fsdp" or isinstance(model, fsdp.FSDPModule)


def reshard(model) -> None:
    """Drop what FSDP gathered: a forward without a backward leaves the root's weights whole."""
    for part in parts_of(model):
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def parts_of(model) -> list:
    """The stages of a pipeline that this rank has, else the model itself."""
    return list(model.parts.values()) if isinstance(model, Pipeline) else [model]


# What "op" keeps: products, and what costs a message; norms, activations, rotations come again.
KEPT = {"mm", "bmm", "addmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention"}  # fmt: skip


def checkpoint_layers(layers, ac, *, every=2) -> None:
    """Compute layers again in the backward instead of keeping their activations.

    ac: "full": of every layer, only its input is kept; "layers": so for every `every`-th layer, the
    others keep all; "op": products and attention are kept (KEPT), the rest is computed again. No
    parameter's name changes.
    """
    _require_every(every)

    def policy(context, op, *args, **options):
        if op._overloadpacket.__name__ in KEPT:
            return ckpt.CheckpointPolicy.MUST_SAVE
        return ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    options = dict(use_reentrant=False)
    if ac == "op":
        options["context_fn"] = functools.partial(ckpt.create_selective_checkpoint_contexts, policy)

    # The layer object keeps its place and its names; only what calling it runs is replaced. run=run
    # binds each layer's own forward.
    for n, layer in enumerate(layers):
        if ac != "layers" or n % every == 0:
            run = layer.forward
            layer.forward = lambda *args, run=run: ckpt.checkpoint(run, *args, **options)


def _require_every(every):
    if type(every) is not int or every < 1:
        raise ValueError(f"every n-th layer needs an integer n of 1 or more; came {every!r}")


def _compile_layers(layers, memory_budget):
    """torch.compile of each layer; memory_budget: the share of activations to keep, None: all."""
    if memory_budget is not None:
        torch._functorch.config.activation_memory_budget = memory_budget
    for layer in layers:
        layer.compile(dynamic=True)


# D. Plans as text, and what they fit ----------------------------------------------------------
#
# The grammar of plan strings, their printing, and the refusals of degrees that do not fit.
# Skip it unless a plan was refused and you want to know why, or you copy `Plan`.

BACKENDS = "archon", "fsdp", "megatron", "sglang", "vllm"


def _require_degrees(plan):
    """ValueError for degrees of which no grid of ranks can be made."""
    degrees = dict(d=plan.dp, c=plan.cp, t=plan.tp, p=plan.pp, e=plan.ep, etp=plan.etp)
    for letter, degree in degrees.items():
        if not (isinstance(degree, int) and degree > 0):
            raise ValueError(f"{letter} must be an integer of 1 or more; came {degree!r}")
    if plan.name is not None and plan.backend is None:
        raise ValueError(f"the name {plan.name!r} needs a backend, as in archon[actor]:d2")
    if plan.etp not in (1, plan.tp):
        raise ValueError(f"the experts' t = {plan.etp} must be 1 or attention's t = {plan.tp}")
    if plan.ep == 1:
        return

    # Folding: an expert group is whole context groups, and whole tensor groups unless those split
    # an expert's width; and expert groups divide the stage. So c2t2e2 is refused and c2t2e4 is not.
    if plan.etp == 1:
        inner = plan.cp * plan.tp
        what = "c * t"
    else:
        inner = plan.cp
        what = "c"
    outer = plan.dp * inner
    if plan.ep % inner:
        raise ValueError(f"e = {plan.ep} must be a multiple of {what} = {inner}")
    if outer % plan.ep:
        raise ValueError(f"e = {plan.ep} must divide d * {what} = {outer}")


def _require_fits(plan, world, config, microbatches, ulysses):
    """`Plan.require_fits`: ValueError for ranks, a model or a step that a plan does not fit."""
    if world is not None and world != plan.world:
        raise ValueError(
            f"{plan} is for p * d * c * t = {plan.world} ranks, but there are {world}; start "
            f"{plan.world}, or change the plan")  # fmt: skip
    if microbatches is not None and plan.pp > 1 and microbatches < plan.pp:
        raise ValueError(
            f"{microbatches} microbatches are fewer than the {plan.pp} stages of {plan}; cut "
            f"the batch smaller")  # fmt: skip
    if config is None:
        return
    if not config.sparse_layers and (plan.ep > 1 or plan.etp > 1):
        raise ValueError(f"{plan} spreads experts, but the model is dense; leave e and ffn out")

    # What each degree cuts into equal parts. A dense model has no experts, and its fields for them
    # may hold anything: they count only where the plan cuts them.
    heads = config.num_attention_heads
    cuts = [
        ("t", plan.tp, "query heads", heads),
        ("t", plan.tp, "key heads", config.num_key_value_heads),
        ("t", plan.tp, "rows of intermediate_size", config.intermediate_size),
    ]
    if ulysses:
        cuts.append(("t * c", plan.tp * plan.cp, "query heads (ulysses)", heads))
    if plan.ep > 1:
        cuts.append(("e", plan.ep, "experts", config.num_experts))
    if plan.etp > 1:
        what = "rows of moe_intermediate_size"
        cuts.append(("ffn's t", plan.etp, what, config.moe_intermediate_size))
    for letter, degree, what, size in cuts:
        if size % degree:
            raise ValueError(f"plan {plan}: {letter} = {degree} must divide the {size} {what}")

    layers = config.num_hidden_layers
    if plan.pp > layers:
        raise ValueError(f"plan {plan}: p = {plan.pp} stages are more than the {layers} layers")


def _describe(plan):
    """`Plan.describe`: degrees, then a line for each tensor group with its place in the grid."""
    attention, _ = plan.shapes
    degrees = attention | {"ep": plan.ep, "etp": plan.etp}
    lines = [" ".join(f"{kind}={degree}" for kind, degree in degrees.items())]

    # Tensor groups come in the order of the grid, so the number of a group is its cell without tp.
    width = len(str(plan.world - 1))
    for number, ranks in enumerate(plan.groups("tp")):
        place = np.unravel_index(number, (plan.pp, plan.dp, plan.cp))
        where = "  ".join(f"{k} {n}" for k, n in zip(("pp", "dp", "cp"), place, strict=True))
        lines.append(f"{where} | {' '.join(f'{rank:>{width}}' for rank in ranks)}")
    return "\n".join(lines)


def _shortest_text(plan):
    """`str(plan)`: all degrees are written down, and then those of 1 are left out."""
    text = f"p{plan.pp}d{plan.dp}t{plan.tp}c{plan.cp}"
    if plan.etp > 1:
        text = f"(attn:{text}|ffn:p{plan.pp}e{plan.ep}t{plan.etp})"
    else:
        text = f"{text}e{plan.ep}"
    text = re.sub("[a-z]1(?![0-9])", "", text) or "d1"
    name = f"[{plan.name}]" if plan.name else ""
    return f"{plan.backend}{name}:{text}" if plan.backend else text


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Plans on devices: `a+b` on separate ones, `a|b` on the same, which binds tighter.

    groups: one tuple of plans for each set of devices, e.g. sglang:d4t2+archon:d4p2t2 is
    ((sglang:d4t2,), (archon:p2d4t2,)). All plans of a set have one world.
    """

    groups: tuple[tuple[Plan, ...], ...]

    @classmethod
    def parse(cls, text: str) -> "Allocation":
        """From a string; ValueError says where it is wrong."""
        grammar = _Grammar(text)
        groups = []
        while not groups or grammar.read(r"\+"):
            plans = [grammar.plan()]
            while grammar.read(r"\|"):
                plans.append(grammar.plan())
            # On the same devices every plan must use all of them.
            if len({plan.world for plan in plans}) > 1:
                worlds = ", ".join(f"{plan} has {plan.world} ranks" for plan in plans)
                raise ValueError(f"plans on the same devices need one world: {worlds}")
            groups.append(tuple(plans))
        grammar.read(r"\Z", "the end")
        return cls(tuple(groups))

    @property
    def world(self) -> int:
        """The number of devices of all sets together."""
        return sum(plans[0].world for plans in self.groups)

    def __str__(self):
        return "+".join("|".join(map(str, plans)) for plans in self.groups)


class _Grammar:
    """Reads a text from left to right, one method a rule:

        plan    =  [ backend [ "[" name "]" ] ":" ] ( "(" hybrid ")" | hybrid | degrees )
        hybrid  =  "attn:" degrees "|" "ffn:" degrees
        degrees =  one or more of a letter and a number [1-9][0-9]*, each letter once
    """

    def __init__(self, text):
        if not isinstance(text, str):
            raise ValueError(f"a plan is a string such as d2t2; came {text!r}")
        self.text = text
        self.at = 0  # how far it has been read

    def fail(self, expected):
        came = repr(self.text[self.at :]) if self.at < len(self.text) else "the end"
        where = f"plan {self.text!r}, position {self.at}"
        raise ValueError(f"{where}: expected {expected}; came {came}")

    def read(self, pattern, expected=None):
        """Read past what matches here. Where nothing does: ValueError if something is expected,
        else None."""
        found = re.compile(pattern).match(self.text, self.at)
        if found:
            self.at = found.end()
        elif expected:
            self.fail(expected)
        return found

    def one_plan(self):
        """A plan that is all of the text."""
        plan = self.plan()
        self.read(r"\Z", "the end")
        return plan

    def plan(self):
        # attn: and ffn: look like backends, but begin a hybrid.
        backend = None
        name = None
        if found := self.read(r"(?!attn:|ffn:)([a-z]+)(?:\[(\w+)\])?:"):
            backend, name = found.groups()
            if backend not in BACKENDS:
                raise ValueError(f"plan {self.text!r}: backend {backend!r} is none of {BACKENDS}")

        paren = self.read(r"\(")
        hybrid = paren or self.text.startswith("attn:", self.at)
        degrees = self.hybrid() if hybrid else self.degrees("dtpce")
        if paren:
            self.read(r"\)", "')'")
        names = dict(d="dp", c="cp", t="tp", p="pp", e="ep", etp="etp")
        return Plan(**{names[k]: n for k, n in degrees.items()}, backend=backend, name=name)

    def hybrid(self):
        self.read("attn:", "'attn:'")
        attention = self.degrees("dtpc")
        self.read(r"\|", "'|'")
        self.read("ffn:", "'ffn:'")
        experts = self.degrees("detp")

        # The experts use the ranks of attention, once more and in another way. So ffn's p and d
        # say nothing new: they may be left out, and where they stand they must agree.
        stages = attention.get("p", 1)
        if experts.get("p", stages) != stages:
            raise ValueError(
                f"plan {self.text!r}: attn has p{stages}, ffn p{experts['p']}; they must agree, or "
                f"leave ffn's p out")  # fmt: skip
        e = experts.get("e", 1)
        etp = experts.get("t", 1)
        ranks = math.prod(attention.get(k, 1) for k in "dtc")
        if "d" in experts and experts["d"] * e * etp != ranks:
            raise ValueError(
                f"plan {self.text!r}: attn has d * t * c = {ranks} ranks a stage, ffn d * e * t = "
                f"{experts['d'] * e * etp}; they must agree, or leave ffn's d out")  # fmt: skip
        return attention | {"e": e, "etp": etp}

    def degrees(self, letters):
        """{letter: number}; of these letters, each at most once."""
        found = {}
        while pair := self.read(r"([a-z])([1-9][0-9]*)(?![0-9])"):
            letter, number = pair.groups()
            if letter not in letters or letter in found:
                self.at = pair.start()  # the error should point at the letter, not behind it
                self.fail(f"one of {' '.join(k for k in letters if k not in found)}, each once")
            found[letter] = int(number)
        if not found:
            self.fail(f"a letter of {' '.join(letters)} and a number of 1 or more")
        return found


# E. Communicators ----------------------------------------------------------------------------
#
# The process groups and meshes of a plan, each made once, with the same patience.
# Skip it unless ranks wait for each other while groups are made.


class Grid(NamedTuple):
    """A plan's communicators. Every rank makes all of them, in one order: `Grid.make(plan)`.

    A DeviceMesh is a grid of ranks with a process group along each of its named dimensions.
    """

    plan: Plan
    dense: DeviceMesh  # (pp, replicate, fsdp, tp); fsdp: the ranks that shard weights, dp and cp
    experts: DeviceMesh  # (pp, expert-dp, ep, etp)
    context: dist.ProcessGroup  # the ranks that share sequences
    data: dist.ProcessGroup  # the ranks with other tokens and the same weights: dp and cp
    replica: dist.ProcessGroup  # the ranks that work on the same sequences: c, t and p
    ends: dist.ProcessGroup | None  # first and last stage, which both hold a tied embedding

    @classmethod
    def make(cls, plan, device_type="cpu", *, shard=None) -> "Grid":
        """All communicators of a plan; every rank of the world calls it, or none comes back.

        shard: HSDP, weights are sharded over so many of the dp ranks; all by default.
        """
        return _make_grid(plan, device_type, shard)

    @property
    def dp_rank(self) -> int:
        """Which of the dp shares of the batch is this rank's."""
        return dist.get_rank() // (self.plan.cp * self.plan.tp) % self.plan.dp


def _make_grid(plan, device_type, shard):
    """`Grid.make`. Every group waits as long for a rank as the default group does."""
    plan.require_fits(world=dist.get_world_size())
    shard = plan.dp if shard is None else shard
    if plan.dp % shard:
        raise ValueError(f"plan {plan}: {shard} ranks that shard must divide d = {plan.dp}")
    patience = patience_of(device_type)
    made = {}  # lists of ranks -> this rank's group among them, so that none is made twice

    def group_among(lists):
        lists = tuple(tuple(ranks) for ranks in lists)
        if lists == (tuple(range(plan.world)),):
            return dist.group.WORLD
        if lists not in made:
            # COMM: every rank makes every group, in one order, its own among them.
            # Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
            made[lists], _ = dist.new_subgroups_by_enumeration(lists, timeout=patience)
        return made[lists]

    def mesh_of(shape):
        """A mesh of these degrees by name, with a group along each of its dimensions."""
        ranks = np.arange(plan.world).reshape([*shape.values()])
        groups = []
        for n, degree in enumerate(shape.values()):
            along = np.moveaxis(ranks, n, -1).reshape(-1, degree)
            groups.append(group_among(along.tolist()))
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(shape))

    # The ranks that work on the same sequences are, of each data share, all stages, c and t. Of
    # p2d2: ranks by (pp, dp) are [0 1], [2 3], so the replicas are [0 2] and [1 3].
    dense = dict(pp=plan.pp, replicate=plan.dp // shard, fsdp=shard * plan.cp, tp=plan.tp)
    by_stage = np.arange(plan.world).reshape(plan.pp, plan.dp, -1)
    replicas = by_stage.swapaxes(0, 1).reshape(plan.dp, -1).tolist()
    ends = None
    if plan.pp > 1:
        ends = group_among([[stages[0], stages[-1]] for stages in plan.groups("pp")])
    return Grid(
        plan, dense=mesh_of(dense), experts=mesh_of(plan.shapes[1]),
        context=group_among(plan.groups("cp")), data=group_among(plan.groups("fsdp")),
        replica=group_among(replicas), ends=ends,
    )  # fmt: skip


def patience_of(device_type) -> datetime.timedelta:
    """How long the default group's collectives wait for a rank; other groups should wait as long.

    torch gives any further group its backend's own default instead: 30 minutes for gloo, 10 for
    NCCL, whatever the default group was given.
    """
    backend = dist.group.WORLD._get_backend(torch.device(device_type))
    return backend.options._timeout


# F. What parallelize refuses ------------------------------------------------------------------
#
# Each sentence here is raised on every rank, before anything is changed and before a message.
# Skip it: the messages say what was expected.

AC = "none", "full", "layers", "op", "memory_budget"
MODES = "ddp", "fsdp", "zero1"

# The names that `parallelize` needs of a model; a ValueError lists those that are absent:
#
#     always   hidden(tokens, positions=, attention=), logprobs(hidden, targets, temperature=),
#              model.layers, and the fields of `config` in _NEEDED
#     c        attention: what layers call unless `hidden` is given another
#     t        lm_head_shard(), head_weight, model.embed_tokens, model.norm, lm_head if not tied; of
#              each layer self_attn's q_proj k_proj v_proj o_proj q_norm k_norm, and mlp's
#              gate_proj up_proj down_proj, or gate and experts
#     e        of sparse layers mlp.experts(rows, counts): weights gate_proj up_proj down_proj
#     p        attention, require_tokens(tokens), model.embed_tokens, model.norm, lm_head


def _refuse_what_cannot_be(
    plan, model, grid, *, attention, mode, sequence, schedule, ac, ac_every, memory_budget, compile,
    offload, compute_dtype,
):  # fmt: skip
    """ValueError for what cannot be, from what every rank has, before the first message.

    The parameters are those of `parallelize`. Nothing of the model is changed yet, so that a caller
    may mend the call and make it again.
    """
    # Values that are none of those that there are.
    given = ("mode", mode, MODES), ("schedule", schedule, SCHEDULES), ("ac", ac, AC)
    for name, value, known in given:
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; came {value!r}")
    _require_every(ac_every)
    number = isinstance(memory_budget, int | float) and not isinstance(memory_budget, bool)
    if not (number and 0 <= memory_budget <= 1):
        raise ValueError(f"memory_budget is a share between 0 and 1; came {memory_budget!r}")

    if compute_dtype is not None:
        require_lower_precision(compute_dtype, model)

    # A plan, a grid and a model that do not belong together. The degrees decide; a backend's name
    # may differ.
    if plan.shapes != grid.plan.shapes:
        raise ValueError(
            f"plan {plan} was given the grid of plan {grid.plan}; use Grid.make(plan) of this one")
    if getattr(model, "grid", None) is not None or isinstance(model, fsdp.FSDPModule):
        raise ValueError(
            "this model is split or sharded already; parallelize takes a whole one, once")
    _require_names(plan, model)
    config = model.config
    plan.require_fits(world=dist.get_world_size(), config=config)
    if plan.pp == 1 and schedule != "1f1b":
        raise ValueError(f"schedule={schedule!r} is of a pipeline, but plan {plan} has no p")
    _, stages_of_rank = SCHEDULES[schedule]
    stages = plan.pp * stages_of_rank
    if plan.pp > 1 and stages > config.num_hidden_layers:
        raise ValueError(
            f"{schedule} cuts {stages} stages, but the model has {config.num_hidden_layers} layers")

    # Options that need one another, or exclude one another.
    if grid.dense["replicate"].size() > 1 and mode != "fsdp":
        raise ValueError(f'a grid that replicates shards is for mode="fsdp"; came mode={mode!r}')
    uneven = plan.tp > 1 and config.vocab_size % plan.tp and plan.dp * plan.cp > 2
    if uneven and mode != "ddp":
        raise ValueError(
            f"t = {plan.tp} cuts {config.vocab_size} rows of the vocabulary unevenly; torch cannot"
            f' save such parts sharded again over d c > 2; pad it, or use mode="ddp"')  # fmt: skip
    if offload and mode != "fsdp":
        raise ValueError(f'offload=True moves shards: it needs mode="fsdp"; came {mode!r}')
    if ac == "memory_budget" and not compile:
        raise ValueError('ac="memory_budget" is a choice of torch.compile: it needs compile=True')
    if plan.cp > 1 and attention is None:
        raise ValueError(f"plan {plan} splits sequences: give attention=, e.g. a ring over its c")
    if plan.pp > 1 and schedule == "zbv" and ac == "op":
        raise ValueError(
            "zbv runs backward twice through a stage, for inputs and for weights, and torch's "
            'selective checkpoint allows one; use ac="full" or another schedule')  # fmt: skip
    if plan.pp > 1 and schedule == "zbv" and mode == "fsdp":
        raise ValueError(
            "zbv computes a stage's weight gradients apart from its backward, which FSDP2 does not "
            'follow; use schedule="1f1b" or mode="zero1"')  # fmt: skip
    if config.sparse_layers and plan.tp > 1 and not sequence and plan.etp == 1:
        raise ValueError(
            f"plan {plan}: without sequence=True every tensor rank would send the same tokens to "
            f"the experts; use ffn's t = {plan.tp}")  # fmt: skip


# What the letters of a plan need of a model, "" is every plan, and of which of its layers.
_NEEDED = {
    "": "hidden logprobs model.layers config.num_hidden_layers config.num_attention_heads "
        "config.num_key_value_heads config.intermediate_size config.sparse_layers",
    "c": "attention",
    "t": "lm_head_shard head_weight model.embed_tokens model.norm lm_head config.vocab_size "
         "config.tie_word_embeddings",
    "e": "config.num_experts config.moe_intermediate_size",
    "p": "attention require_tokens model.embed_tokens model.norm lm_head config.hidden_size "
         "config.tie_word_embeddings",
}  # fmt: skip
_NEEDED_OF_LAYERS = [
    ("t", "every", "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight "
                   "self_attn.o_proj.weight self_attn.q_norm self_attn.k_norm"),
    ("t", "dense", "mlp.gate_proj.weight mlp.up_proj.weight mlp.down_proj.weight"),
    ("t", "sparse", "mlp.gate.weight"),
    ("e", "sparse", "mlp.experts.gate_proj mlp.experts.up_proj mlp.experts.down_proj"),
]  # fmt: skip


def _has(owner, path) -> bool:
    """Whether owner has an attribute `a.b.c`, and it is not None."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
        if owner is None:
            return False
    return True


def _require_names(plan, model):
    """ValueError that lists every name that `parallelize` needs of a model and does not find."""
    degrees = {"c": plan.cp, "t": plan.tp, "e": plan.ep * plan.etp, "p": plan.pp}
    letters = ["", *(letter for letter, degree in degrees.items() if degree > 1)]
    absent = {}  # its keys, in order: two letters may need the same name

    # A tied model has no head of its own.
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    for letter in letters:
        for path in _NEEDED[letter].split():
            if not _has(model, path) and not (tied and path == "lm_head"):
                absent[f".{path}"] = True
    if _has(model, "hidden"):
        takes = inspect.signature(model.hidden).parameters
        for name in ("positions", "attention"):
            if name not in takes:
                absent[f".hidden(.., {name}=)"] = True

    # Where several layers lack the same name, the first of them speaks for all.
    layers = model.model.layers if _has(model, "model.layers") else []
    sparse = model.config.sparse_layers if _has(model, "config.sparse_layers") else ()
    for letter, which, paths in _NEEDED_OF_LAYERS:
        if letter not in letters:
            continue
        for path in paths.split():
            for n, layer in enumerate(layers):
                kind = "sparse" if n in sparse else "dense"
                if which in ("every", kind) and not _has(layer, path):
                    absent[f".model.layers[{n}].{path}"] = True
                    break
    if absent:
        raise ValueError(
            f"parallelize needs for plan {plan} what models.Transformer has; "
            f"{type(model).__name__} has no {', no '.join(absent)}")  # fmt: skip


def _require_divisible(length, t):
    """ValueError for sequences of a length that t ranks cannot share out evenly."""
    if length % t:
        raise ValueError(
            f"{length} tokens a sequence must divide by t = {t} where tokens are shared out; "
            f"pad to {-(-length // t) * t}")  # fmt: skip


def require_even_lengths(grid, lengths, device) -> None:
    """ValueError if t does not divide this rank's lengths, or those of another of its context.

    lengths: of the sequences of one forward, or of all microbatches of a step.
    """
    # One length speaks for all of them: the first that t does not divide, where there is one.
    t = grid.plan.tp
    odd = [length for length in lengths if length % t]
    length_here = [*odd, *lengths, 0][0]
    if grid.plan.cp == 1:
        _require_divisible(length_here, t)
        return

    # 27 tokens in a zigzag over 2 ranks are 14 and 13: under t = 2 one rank alone would refuse
    # its part, and the other would wait for its keys until the timeout.
    # COMM: an all-gather of one number over the ranks that share the sequence, once a forward,
    # so that all of them refuse, with one text. Pinned by
    # tests/test_parallel_faults.py::test_an_odd_share_of_a_sequence_is_refused_by_every_rank.
    parts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(grid.plan.cp)]
    dist.all_gather(parts, torch.tensor([length_here], device=device), group=grid.context)
    found = [int(part) for part in parts]
    if any(length % t for length in found):
        raise ValueError(
            f"the {grid.plan.cp} ranks that share a sequence have {', '.join(map(str, found))} "
            f"tokens of it; each must divide by t = {t} where tokens are shared out; pad the "
            f"sequence, for a zigzag to a multiple of 2 c t = {2 * grid.plan.cp * t}")  # fmt: skip


def _check_lengths_first(model, grid):
    """Let `hidden` first agree on the lengths of the ranks that share a sequence."""
    # A pipeline agrees on its microbatches' lengths once a step, before the first of them.
    if grid.plan.pp > 1:
        return
    run = model.hidden

    def hidden(tokens_BS, /, **options):
        require_even_lengths(grid, [tokens_BS.shape[1]], tokens_BS.device)
        return run(tokens_BS, **options)

    model.hidden = hidden


def _require_whole_weights(model):
    """ValueError for ZeRO-1 on a model whose weights are sharded, or are nobody's to share out."""
    # Ranks that shard the weights too hold other rows each: sending them around would overwrite
    # one rank's rows with another's.
    mode = getattr(model, "mode", None)
    if mode != "zero1" or sharded(model):
        came = "fsdp" if sharded(model) else mode
        raise ValueError(
            f'zero=True shares out the states of whole weights: it needs a model of '
            f'parallelize(.., mode="zero1"); came mode={came!r}')  # fmt: skip


# G. Messages, states and replicas -------------------------------------------------------------
#
# Gradients in few messages, ZeRO's rows, learning rates, and the comparison of replicas.
# Skip what you do not call: each function stands by itself.


def full(tensor):
    """The whole of a possibly sharded tensor. Collective if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def copies(p, ranks: int) -> int:
    """How many of the `ranks` that hold p hold a copy of each of its entries.

    On 4 ranks, d2t2, a norm has 4 copies and a matrix that t splits has 2. FSDP over d then splits
    that matrix again, and each entry is on one rank.
    """
    if not isinstance(p, DTensor):
        return ranks
    parts = 1
    for n, placement in enumerate(p.placements):
        if not (placement.is_replicate() or placement.is_partial()):
            parts *= p.device_mesh.size(n)
    return ranks // parts


def add_terms(x, group):
    """(5): the sum over a group of terms of any shape, one of each rank. The loss that follows must
    be the same on all of them: each rank then has the whole gradient of the sum, which is that of
    its term, so nothing is sent backward."""
    return leave_split(x, group, sequence=False)


def is_split(p) -> bool:
    """Whether a rank holds only a part of a parameter."""
    return isinstance(p, DTensor) and any(not x.is_replicate() for x in p.placements)


def sum_in_messages(gradients, group):
    """Sum gradients over a group in place, up to 64 a message: a message costs time of its own."""
    if dist.get_world_size(group) == 1:
        return
    for n in range(0, len(gradients), 64):
        together = gradients[n : n + 64]
        flat = torch.cat([g.reshape(-1) for g in together])
        dist.all_reduce(flat, group=group)
        for g, part in zip(together, flat.split([g.numel() for g in together]), strict=True):
            g.copy_(part.view_as(g))


def _own_rows(optimizer, name, x):
    """The rows of a tensor that a LocalOptimizer's rank updates: all of them without `zero`; with
    it, of 5 rows on 2 ranks, 0 1 2 and 3 4."""
    if not optimizer.zero:
        return x
    group = holders(optimizer.model.grid, name)
    parts = x.chunk(dist.get_world_size(group))
    rank = dist.get_rank(group)
    # chunk makes fewer parts than ranks where rows run out; the last ranks then have none.
    return parts[rank] if rank < len(parts) else x[:0]


def gather_rows(whole, rows, group):
    """Fill `whole` with the rows that each rank of the group has updated, in the ranks' order."""
    # COMM: rows are padded to equal stretches, so all send alike, also one without a row.
    # Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
    world = dist.get_world_size(group)
    stretch = -(-len(whole) // world)
    sent = whole.new_zeros(stretch, *whole.shape[1:])
    sent[: len(rows)] = rows
    parts = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(parts, sent, group=group)
    whole.copy_(torch.cat(parts)[: len(whole)])


def name_suspects(model, suspect: int) -> str:
    """Which rank had which non-finite gradient first, from every rank's `reduce_gradients`."""
    names = [name for name, _ in model.named_parameters()][::-1]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, names[suspect] if suspect >= 0 else None)
    named = [f"{name} on rank {rank}" for rank, name in enumerate(found) if name]
    return ", ".join(named) or "no single gradient: their norm overflowed"


def persistent_buffers(model) -> dict:
    """Name -> buffer, of those that belong to a model's state, such as the votes of a router."""
    found = {}
    for part in parts_of(model):
        for prefix, module in part.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def lr_factor(
    step, /, *, warmup, total, decay="linear", decay_steps=None, min_ratio=0.0, first_step="nonzero"
) -> float:
    """The multiple of lr that a step uses: warm-up, stable, decay.

    step: 0 .. total - 1.
    warmup: so many steps rise to 1.
    total: steps of the run.
    decay: the fall, of the share d of it that is done: "linear" 1 - d, "sqrt" 1 - sqrt(d),
        "cosine" (1 + cos(pi d)) / 2; "constant" does not fall.
    decay_steps: so many steps at the end fall; None: all behind the warm-up.
    min_ratio: what they fall towards.
    first_step: "nonzero": step 0 uses 1 / warmup, as in torchtitan; "zero": 0, as in Hugging Face
        and verl.

    For warmup 2, total 10, linear:

        nonzero  .5  1  1  .875  .75  .625  .5  .375  .25  .125
        zero      0 .5  1  .875  .75  .625  .5  .375  .25  .125
    """
    falls = {"constant": lambda d: 1.0, "linear": lambda d: 1 - d,
             "sqrt": lambda d: 1 - math.sqrt(d),
             "cosine": lambda d: (1 + math.cos(math.pi * d)) / 2}  # fmt: skip
    if decay not in falls or first_step not in ("nonzero", "zero"):
        raise ValueError(
            f'decay must be one of {", ".join(falls)} and first_step "nonzero" or "zero"; came '
            f"{decay!r} and {first_step!r}")  # fmt: skip
    decay_steps = total - warmup if decay_steps is None else decay_steps
    if not (0 <= warmup <= total and 0 <= decay_steps <= total - warmup and 0 <= min_ratio <= 1):
        raise ValueError(
            f"warm-up {warmup} and decay {decay_steps} must fit into {total} steps, and min_ratio "
            f"{min_ratio} between 0 and 1")  # fmt: skip

    # The rise. Then d is 0 until the fall begins, decay_steps before the end.
    if step < warmup:
        risen = step + 1 if first_step == "nonzero" else step
        return risen / warmup
    done = max(0, step - (total - decay_steps)) / max(decay_steps, 1)
    return min_ratio + (1 - min_ratio) * falls[decay](min(done, 1.0))


def adamw_state(states, p) -> dict:
    """AdamW's state of a parameter, made as before its first step if it is absent."""
    if not states[p]:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        states[p] |= dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return states[p]


def _state_as_dtensor(optimizer, name, p, x):
    """A tensor of a LocalOptimizer's state, with the sharding of its parameter p; memory is shared.

    A checkpoint needs it, to know where in the whole this rank's entries lie.
    """
    mesh = None
    placements = ()
    if isinstance(p, DTensor):
        mesh = p.device_mesh
        placements = tuple(p.placements)

    # ZeRO-1 cuts the rows that the mesh has left once more. 8 rows, t = 2, and then d = 2:
    #
    #     t 0, d 0: rows 0 1    t 0, d 1: rows 2 3    t 1, d 0: rows 4 5    t 1, d 1: rows 6 7
    #
    # The mesh (d, t) reads from left to right, as if d had cut first and had rows 0-3 and 4-7.
    # _StridedShard(split_factor=2) says that a later dimension has cut the rows in 2 before.
    if optimizer.zero:
        grid = optimizer.model.grid
        factor = 1
        for n, placement in enumerate(placements):
            if placement == Shard(0):
                factor *= mesh.size(n)
        by_copies = _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)
        names = () if mesh is None else mesh.mesh_dim_names
        if ".mlp.experts." in name:
            mesh = grid.experts["expert-dp", *names]
        else:
            mesh = grid.dense["fsdp", *names]
        placements = (by_copies, *placements)

    if mesh is None:
        return x
    whole = dict(shape=p.shape, stride=p.stride())
    return DTensor.from_local(x, mesh, placements, run_check=False, **whole)


def training_tensors(model, optimizer) -> dict:
    """Every tensor that a resumed run needs, under flat names; AdamW's states made if absent.

    model.NAME and optimizer.NAME.KEY of a parameter, buffer.NAME of a persistent buffer. optimizer:
    a LocalOptimizer, or torch's AdamW.
    """
    reshard(model)
    tensors = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = master_of(optimizer, name, p)
        # Of a LocalOptimizer the moments are plain tensors of this rank, and are told where they
        # lie; the number of steps has no dimension and is everywhere the same.
        if isinstance(optimizer, LocalOptimizer):
            state = dict(adamw_state(optimizer.state, optimizer.mine[name]))
            for key, x in state.items():
                state[key] = _state_as_dtensor(optimizer, name, p, x) if x.dim() else x
        else:
            state = adamw_state(optimizer.state, p)
        for key, x in state.items():
            tensors[f"optimizer.{name}.{key}"] = x
    for name, buffer in persistent_buffers(model).items():
        tensors[f"buffer.{name}"] = buffer
    return tensors


def replica_difference(model, optimizer=None) -> str | None:
    """Collective. The ranks and the first tensor at which replicas differ, None if none does.

    Two ranks that hold the same entries of the same parameter, of its optimiser's state or of a
    buffer must hold the same bits, whatever the plan. The text is the same on every rank. Without a
    plan all ranks are replicas but for what a DTensor says of itself. optimizer: a LocalOptimizer
    or torch's; without one only the model is compared.
    """
    reshard(model)
    mine = _digests(model, optimizer)
    tables = [None] * dist.get_world_size()
    # COMM: one gather of 8 bytes and a name a tensor; every rank then compares all tables, so that
    # all say the same. Pinned by tests/test_parallel_faults.py::test_a_flipped_bit_is_named.
    dist.all_gather_object(tables, mine)

    # For every (name, part) that any rank holds: which ranks have which digest of it.
    differing = set()
    first = None
    for key in dict.fromkeys(key for table in tables for key in table):
        by_digest = {}
        for rank, table in enumerate(tables):
            if key in table:
                by_digest.setdefault(table[key], []).append(rank)
        if len(by_digest) > 1:
            first = first or (key, by_digest)
            differing.add(key)
    if first is None:
        return None

    # Nobody can say which of two replicas is right; of several, the largest set comes first.
    (name, _), by_digest = first
    sets = []
    for ranks in sorted(by_digest.values(), key=lambda ranks: (-len(ranks), ranks)):
        word = "ranks" if len(ranks) > 1 else "rank"
        sets.append(f"{word} {' '.join(map(str, ranks))}")
    others = {name for name, _ in differing} - {name}
    more = f"; {len(others)} more tensors differ" if others else ""
    return f"replicas differ in {name}: {' / '.join(sets)} hold other bits{more}"


def _digests(model, optimizer) -> dict:
    """(name, which part of it) -> digest, of all that this rank holds."""
    ours = isinstance(optimizer, LocalOptimizer)  # else torch's
    table = {}

    def enter(name, tensor):
        # A DTensor tells where its part lies in the whole, as it does for a checkpoint; a plain
        # tensor is whole.
        part = "whole"
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            part = f"{tuple(chunk.offsets)} + {tuple(chunk.sizes)}"
        flat = local(tensor.detach()).contiguous().reshape(-1)
        bits = flat.view(torch.uint8).cpu().numpy()
        table[name, part] = hashlib.blake2b(bits, digest_size=8).digest()

    for name, p in model.named_parameters():
        enter(name, p)
        if optimizer is None:
            continue
        if has_masters(optimizer):
            enter(f"{name} (master)", master_of(optimizer, name, p))
        # Read with get: asking a torch optimiser for the state of a parameter would make one.
        state = optimizer.state.get(optimizer.mine[name] if ours else p, {})
        for key, value in state.items():
            if torch.is_tensor(value):
                if ours and value.dim() > 0:
                    value = _state_as_dtensor(optimizer, name, p, value)
                enter(f"{name} ({key})", value)
        names = {key: None if torch.is_tensor(x) else repr(x) for key, x in state.items()}
        text = repr(sorted(names.items())).encode()
        table[f"{name} (names of its states)", ""] = hashlib.blake2b(text, digest_size=8).digest()
    for name, buffer in persistent_buffers(model).items():
        enter(name, buffer)
    return table


# H. Joining, agreeing, leaving ----------------------------------------------------------------
#
# Process groups that survive restarts, errors that name lost ranks, and an end that all agree on.
# Skip it unless you write a training loop of your own, or a run does not start.


def connect(device="", *, timeout=60, threads=1) -> str:
    """Join torchrun's process group, or without torchrun make one of a single rank.

    device: "cpu", "cuda" or "" (CUDA where there is one). timeout: seconds that a collective waits
    for a rank before it fails. threads: CPU threads of this rank. Returns this rank's device.
    """
    torch.set_num_threads(threads)
    if dist.is_initialized():
        text = f"torch.distributed is on and is used as it is: timeout={timeout} has no effect"
        warnings.warn(text, stacklevel=2)
        return f"cuda:{torch.cuda.current_device()}" if "nccl" in dist.get_backend() else "cpu"

    device = own_device(device)

    # Under torchrun ranks meet in its store; without, a single rank needs none.
    patience = datetime.timedelta(seconds=timeout)
    with naming_lost_ranks(lambda: "starting", "look at its error"):
        if "RANK" in os.environ:
            store, rank, world = next(dist.rendezvous("env://", timeout=patience))
            store = store_of_this_attempt(store, rank, world, timeout)
        else:
            store = dist.HashStore()
            rank = 0
            world = 1
        dist.init_process_group(
            backend_of(device), store=store, rank=rank, world_size=world, timeout=patience
        )
    return device


def own_device(device) -> str:
    """The device of this process, for "cpu", "cuda" or "" (CUDA where there is one)."""
    # One process drives one device: torchrun's LOCAL_RANK says which of the machine's.
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(device)
    return device


def backend_of(device) -> str:
    """The backends of a process group on a device."""
    # gloo besides NCCL, because Python objects and checkpoints travel as CPU tensors.
    return "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"


def store_of_this_attempt(store, rank, world, timeout):
    """The part of torchrun's key-value store that this start of the ranks has for itself.

    `torchrun --max-restarts` gives restarted ranks the store of the ranks before them. There gloo
    would find the addresses of processes that are gone. TORCHELASTIC_RESTART_COUNT cannot tell the
    starts apart: each machine's torchrun counts its own. So rank 0 makes a name that was never
    used, and every rank shows that it is alive by a number of its own:

        rank 0   attempt = a7f3          reads a7f3/1 = 52        a7f3/go = {"1": "52"}
        rank 1   reads attempt = a7f3    a7f3/1 = 52              reads go, finds its 52

    A rank that finds an old name sees a `go` without its own number, and reads the name again.
    """
    deadline = time.monotonic() + timeout
    own_number = uuid.uuid4().hex
    if rank == 0:
        attempt = uuid.uuid4().hex
        store.set("attempt", attempt)
        # COMM: rank 0 waits for every other rank, and they for its `go`; `timeout` bounds both.
        # Pinned by tests/test_faults.py::test_a_killed_rank_is_started_again_and_the_run_goes_on.
        numbers = {}
        for other in range(1, world):
            numbers[str(other)] = store.get(f"{attempt}/{other}").decode()
        store.set(f"{attempt}/go", json.dumps(numbers))
        return dist.PrefixStore(attempt, store)

    while True:
        attempt = store.get("attempt").decode()
        store.set(f"{attempt}/{rank}", own_number)
        # An old attempt whose rank 0 died early never says go: look for a newer name each second.
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{attempt}/go"], datetime.timedelta(seconds=1))
            if json.loads(store.get(f"{attempt}/go"))[str(rank)] == own_number:
                return dist.PrefixStore(attempt, store)
            time.sleep(0.1)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank 0 did not answer within {timeout} seconds")


def agree(function):
    """Rank 0 calls function(); every rank returns its value, or raises its error as ValueError."""
    box = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except (ValueError, OSError) as error:
            box[1] = str(error)
    # COMM: rank 0 broadcasts always, whatever happened there, so no rank waits for a failure.
    # Pinned by tests/test_run.py::test_an_output_directory_that_holds_a_run_is_refused.
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ValueError(box[1])
    return box[0]


def summed(values, device) -> list:
    """Sum a list of numbers, or of lists of numbers, over all ranks in float64. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


class Stop:
    """SIGTERM or Ctrl-C (SIGINT) asks for an end; `agreed` ends all ranks at the same step.

    Nothing is saved from inside a handler: a collective there would hang. A second Ctrl-C ends this
    process at once, also while it waits for another rank. torchrun repeats the terminal's Ctrl-C to
    its ranks, so a signal within a second of the first is the same key press. One a process: the
    handlers and the thread that listens stay as long as it lives.
    """

    SAME_KEY_PRESS = 1.0  # seconds
    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.number = 0  # of the first signal seen
        self.seen_at = 0.0

        # Python runs a handler between two steps of its own, and a rank that waits in a collective
        # makes none, perhaps for minutes: by then two signals have become one. But their numbers
        # are also written to a pipe, at once, whatever the process is doing. A thread reads them.
        self.read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)  # `set_wakeup_fd` asks for this
        threading.Thread(target=self._listen, daemon=True).start()
        signal.set_wakeup_fd(write_end)
        for number in self.SIGNALS:
            signal.signal(number, lambda number, frame: None)
        os.register_at_fork(after_in_child=self._forget)

    def _listen(self):
        while True:
            for number in os.read(self.read_end, 64):
                if number in self.SIGNALS:
                    self._remember(number)

    def _remember(self, number):
        if not self.number:
            self.number = number
            self.seen_at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self.seen_at + self.SAME_KEY_PRESS:
            os._exit(128 + number)

    @classmethod
    def _forget(cls):
        """A process that a task's reward forks dies of these signals, and does not tell the run."""
        signal.set_wakeup_fd(-1)
        for number in cls.SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def agreed(self, device) -> int:
        """The signal that any rank has seen, the same on all ranks; 0 if none has. Collective."""
        number = torch.tensor(self.number, device=device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)


@contextlib.contextmanager
def naming_lost_ranks(where, advice):
    """Turn a collective that fails because a rank is gone into an error that says what to do.

    where: called for the text that says how far this rank was. It leaves without saving, because
    saving needs the ranks that are gone; the last checkpoint is whole.
    """
    try:
        yield
    except RuntimeError as error:
        # A single rank has nobody to lose, and an error of its own keeps its own text.
        # (A side of a run may be one rank, beside others.)
        world = int(os.environ.get("WORLD_SIZE", 1))
        if dist.is_initialized():
            world = max(world, dist.get_world_size())
        if world == 1 or not is_lost_rank(error):
            raise
        reason = str(error).splitlines()[0][:160]
        raise ConnectionError(
            f"{where()}: another rank is gone or silent for too long ({reason}); this rank leaves "
            f"without saving; {advice}") from error  # fmt: skip


LOST_RANK_WORDS = r"gloo|NCCL|[Cc]onnection|[Tt]imed out|timeout|pair closure"
SENDING_FILES = {"parallel.py", "ring_attention.py", "tree_attention.py"}


def is_lost_rank(error) -> bool:
    """Whether an error says that another rank is gone.

    NCCL and torch's stores have an error of their own for it, DistError; gloo raises a plain
    RuntimeError. Its words alone do not tell: a task may say "connection timed out" of its own
    database. So gloo's words count where gloo speaks: in a call of torch.distributed, or of these
    files, which wait for messages. torch's pipelines wrap what a stage raised, hence the chain.
    """
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and re.search(LOST_RANK_WORDS, str(error)):
            if _raised_while_sending(error):
                return True
        error = error.__cause__
    return False


def _raised_while_sending(error) -> bool:
    """Whether an error came out of torch.distributed, or out of a file here that sends."""
    torch_folder = Path(torch.__file__).parent
    own_folder = Path(__file__).resolve().parent
    # From the frame that raised outwards, through torch, to the first frame of somebody else.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not file.is_relative_to(torch_folder):
            return file.resolve().parent == own_folder and file.name in SENDING_FILES
        if file.is_relative_to(torch_folder / "distributed"):
            return True
    return False


# I. Checkpoints -------------------------------------------------------------------------------
#
# What a run writes so that it can go on under any plan, all or nothing, and how it is read back.
# Skip it unless a checkpoint was refused, or you write checkpoints of your own.


def write_checkpoint(path, tensors, state) -> None:
    """Collective. Write `tensors` by DCP and `state` as JSON into the directory `path`.

    tensors: {name: tensor}, DTensors where they are sharded. All or nothing: a temporary directory
    is renamed once every byte and its checksum are on disk. Raises on every rank, ValueError for a
    state that is no finite JSON, before anything is touched, and OSError if it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")

    def require_json():
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"checkpoint {path}: its state is no finite JSON: {error}") from error

    # JSON would write NaN, and no reader would take it: refuse it before anything is deleted.
    agree(require_json)

    def start():
        # What a run that was cut short has left here.
        for stale in (partial, path):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish():
        # state.json comes last, with size and checksum of every other file, and then the rename.
        files = {f.name: [f.stat().st_size, _crc32(f)] for f in sorted(partial.iterdir())}
        with (partial / "state.json").open("w") as file:
            json.dump(sealed(state | {"files": files}), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

    try:
        agree(start)
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial))
        agree(finish)
    except (dcp.CheckpointException, ValueError) as error:  # raised on every rank, whichever failed
        failures = getattr(error, "failures", {0: [error]})
        reason = "; ".join(f"rank {rank}: {e[0]}" for rank, e in failures.items())
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # what was cut short takes room
        raise OSError(
            f"checkpoint {path} not written ({reason}); older ones are whole: make room or mend "
            f"the directory, then go on with --resume --out {path.parent}"
        ) from error


def sealed(state) -> dict:
    """A checkpoint's JSON state, which holds the checksums of its other files, with its own."""
    unsealed = {key: value for key, value in state.items() if key != "seal"}
    return unsealed | {"seal": zlib.crc32(json.dumps(unsealed).encode())}


def _crc32(path):
    """The checksum of a file's bytes, read 4 MiB at a time."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def verify_checkpoint(path, *, counts=()) -> dict:
    """The JSON state of a checkpoint that is whole and undamaged, else ValueError.

    Its files have their size and checksum, its table of contents describes them, and its numbers
    are finite. counts: names in the state that must be integers of 0 or more.
    """
    return _inspect(path, counts)[0]


def _inspect(path, counts):
    """A checkpoint's JSON state and its table of contents, both verified."""
    state, sizes = _undamaged(path)
    for name in counts:
        value = state.get(name)
        if type(value) is not int or value < 0:  # True is an int, and no count
            raise ValueError(
                f"checkpoint {path}: {name} in state.json must be an integer of 0 or more; came "
                f"{value!r:.80}")  # fmt: skip
    return state, read_table(path, sizes)


def _undamaged(path):
    """A checkpoint's JSON state, and the sizes of its files, {name: bytes}.

    ValueError if a file is missing, or has another size or checksum than state.json says.
    """
    path = Path(path)
    # First the list of files, then their sizes, then their bytes: each needs the one before.
    try:
        # Nothing that an unsealed state says is used: it may be of any type.
        state = _read_state(path / "state.json")
        files = {}
        damaged = []
        if not isinstance(state, dict) or state != sealed(state):
            damaged.append("state.json")
        else:
            files = _listed_files(path, state)

        # Every file that the state lists has the size and the checksum that it had when written.
        for name, (size, crc) in files.items():
            if (path / name).stat().st_size != size or _crc32(path / name) != crc:
                damaged.append(name)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"checkpoint {path}: state.json, or a file that it lists, is missing or unreadable: "
            f"{error}"
        ) from error
    if damaged:
        names = ", ".join(damaged)
        raise ValueError(f"checkpoint {path}: {names} is damaged (size or checksum differs)")
    return state, {name: size for name, (size, _) in files.items()}


def _read_state(file):
    """What state.json says. Numbers that are not finite are refused: JSON has no word for them."""

    # Python's JSON reads NaN, Infinity and 1e999 (as infinity). No state of ours has them.
    def refuse(constant):
        raise ValueError(f"{constant} is no number")

    def finite(digits):
        number = float(digits)
        return number if math.isfinite(number) else refuse(digits)

    return json.loads(file.read_text(), parse_constant=refuse, parse_float=finite)


def _listed_files(path, state) -> dict:
    """{name: [bytes, checksum]} of the files that a state lists, all of them in its directory."""
    listed = state.get("files")
    if not isinstance(listed, dict) or ".metadata" not in listed:
        raise ValueError("state.json lists no .metadata among its files")
    for name, entry in listed.items():
        if not is_plain(name):
            raise ValueError(f"state.json lists {name!r:.80}, which is no file of the directory")
        if not isinstance(entry, list) or [type(number) for number in entry] != [int, int]:
            raise ValueError(f"state.json has no size and checksum of {name}")
        # A pipe or a device has no size, and reading it might never end.
        if (path / name).exists() and not (path / name).is_file():
            raise ValueError(f"{name} is no file")
    return listed


def is_plain(name) -> bool:
    """Whether a name is that of a file in a directory, and of none elsewhere."""
    if not isinstance(name, str) or name in (".", ".."):
        return False
    return re.fullmatch(r"[\w.-]+", name) is not None


def read_checkpoint(path, tensors, *, counts=(), only="", alone=False) -> dict:
    """Collective. Fill `tensors` in place, whatever their sharding, from a verified checkpoint;
    returns its JSON state, see `verify_checkpoint` for counts.

    Both have the same tensors, by name and shape, or it is refused. only: how names begin, one way
    or a tuple of several; stored tensors that are called otherwise are left where they are.
    "model." leaves AdamW's state. alone: this rank reads by itself, into whole tensors.
    Rank 0 reads the table of contents and gives it to all, so that a bad one is refused by all.
    What goes wrong on any rank is a ValueError on every rank, and leaves `tensors` half filled.
    """
    mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes = [mine] * dist.get_world_size()
    if not alone:
        dist.all_gather_object(shapes, mine)  # a pipeline's ranks hold different parameters
    wanted = {name: shape for of_rank in shapes for name, shape in of_rank.items()}

    def inspect():
        state, table = _inspect(path, counts)
        # Strict both ways, so that no tensor is left as it was made, or stays behind unseen.
        saved = {
            name: tuple(entry.size)
            for name, entry in table.state_dict_metadata.items()
            if name.startswith(only)
        }
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f"checkpoint {path} is of another model: {name} is {saved.get(name, 'absent')} "
                    f"there and {wanted.get(name, 'absent')} here")  # fmt: skip
        return state, table

    if alone:
        state, table = inspect()
        with warnings.catch_warnings():  # that it is alone
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=SafeReader(path, table), no_dist=True)
        return state

    state, table = agree(inspect)
    try:
        dcp.load(tensors, storage_reader=SafeReader(path, table))
    except dcp.CheckpointException as error:  # raised on every rank, whichever failed
        reason = "; ".join(f"rank {rank}: {e[0]}" for rank, e in sorted(error.failures.items()))
        raise ValueError(f"checkpoint {path} cannot be read: {reason}") from error
    return state


def checkpoints(directory, kind="step"):
    """The step-NNNNNNNN directories, oldest first. kind: how else their names begin."""
    return sorted(Path(directory).glob(f"{kind}-" + "[0-9]" * 8))


def superseded(directory, step, keep, kind="step"):
    """Checkpoints to delete once `step` is saved: all but the newest `keep` up to it, and all later
    ones, which a resume from here has found damaged. kind: as in `checkpoints`."""
    # Of steps 2, 4, 6 and 8, with 6 just saved and keep 2, they are 2 and 8.
    found = checkpoints(directory, kind)
    saved = Path(directory) / f"{kind}-{step:08d}"
    up_to_it = [path for path in found if path <= saved]
    later = [path for path in found if path > saved]
    return up_to_it[:-keep] + later


def newest_checkpoint(directory, kind="step"):
    """The newest undamaged checkpoint; damaged ones are named and passed over. None if there is
    none at all; if none is whole, ValueError, so that a run is not begun again by mistake.
    kind: as in `checkpoints`.

    A crash or a disk does not leave a right seal on wrong contents. Such a checkpoint was made so;
    it is not passed over but refused, when `read_checkpoint` reads it.
    """
    found = checkpoints(directory, kind)
    # Reading all bytes for their checksum takes a while, so only of as many as it takes.
    for path in reversed(found):
        try:
            _undamaged(path)
            return str(path)
        except ValueError as error:
            print(f"warning: {error}; trying an older one", file=sys.stderr)
    if found:
        raise ValueError(
            f"no checkpoint in {directory} is whole ({', '.join(path.name for path in found)}): "
            f"put a copy of one back, or begin again with --overwrite"
        )
    return None


# J. The table of contents of a checkpoint, read without running it ----------------------------
#
# DCP pickles its table, and unpickling a stranger's file can run a stranger's program.
# Skip it unless you load checkpoints that somebody else could have written.


# A pickle is a program for a small stack machine, whose instructions can import any object by name,
# call it, and set its attributes. So it is not run as Python would: `_unpickle` is that machine
# with the instructions that DCP's table needs, in which a name stays text, a call and an object
# stay a record of what was asked for, and nothing of Python's is ever looked up, called or changed.
# `read_table` makes DCP's own objects from such records, each value of the type and in the range
# that it must have.

META = "torch.distributed.checkpoint.metadata."
STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
DTYPES = {f"torch.{name}": getattr(torch, name) for name in (
    "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
)}  # fmt: skip
STRIDED = "torch.serialization._get_layout"
NAMES = {
    "torch.Size", *DTYPES, STRIDED, STORED, f"{META}Metadata", f"{META}MetadataIndex",
    f"{META}TensorStorageMetadata", f"{META}TensorProperties", f"{META}ChunkStorageMetadata",
    f"{META}StorageMeta", f"{META}_MEM_FORMAT_ENCODING", "pathlib.PosixPath",
    "pathlib.PurePosixPath", "pathlib.Path", "pathlib.WindowsPath",
}  # fmt: skip


class _Record:
    """An object that a pickle asks for: a name, what it would be called with, and its state."""

    def __init__(self, name, arguments):
        self.name = name
        self.arguments = arguments
        self.state = {}


def _unpickle(raw):
    """What a pickle of DCP's table says, as dicts, lists, tuples, texts, numbers and records.

    The dict {"w": 7} is such a program, and its value is what STOP finds on top of the stack:

        instruction    EMPTY_DICT    MARK    "w"       7           SETITEMS    STOP
        stack          {}            {}      {} "w"    {} "w" 7    {"w": 7}
    """
    stack = []
    marks = []  # heights of the stack at which an unfinished container begins
    memo = {}  # what was read before, by its number, to be put on the stack again

    def since_mark():
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def fill(table, pairs):
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Other keys would be hashed, and a deep tuple's hash exhausts the C stack.
            if not isinstance(key, str | _Record):
                raise ValueError(f"a {type(key).__name__} as a key")
            table[key] = value

    for opcode, value, _ in pickletools.genops(raw):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            # Constants, and things already read.
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                stack.append(value)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(dict(NONE=None, NEWTRUE=True, NEWFALSE=False)[opcode.name])
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            # Containers.
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = since_mark()
                stack[-1].extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                pair = stack[-2:]
                del stack[-2:]
                fill(stack[-1], pair)
            case "SETITEMS":
                pairs = since_mark()
                fill(stack[-1], pairs)
            # Names, calls, objects and their states: noted, not done.
            case "STACK_GLOBAL":
                module, name = stack[-2:]
                if not (isinstance(module, str) and isinstance(name, str)):
                    raise ValueError("it asks for an object without a name")
                if f"{module}.{name}" not in NAMES:
                    raise ValueError(f"it asks for {module:.60}.{name:.60}: not on the allow-list")
                stack[-2:] = [f"{module}.{name}"]
            case "REDUCE" | "NEWOBJ":
                stack[-2:] = [_Record(*stack[-2:])]
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case other:
                raise ValueError(f"instruction {other} is not on the allow-list")


def _fields(record, name, *keys):
    """The values under `keys` in the state of a record, which must ask for an object `name`."""
    if not (isinstance(record, _Record) and record.name == name and isinstance(record.state, dict)):
        raise ValueError(f"something else where a {name.rpartition('.')[2]} belongs")
    return [record.state.get(key) for key in keys]


def _integers(values):
    """The values, if they can be sizes and offsets: integers, no truth values, of 0 or more."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("sizes and offsets must be integers of 0 or more")
    return values


def _size(record):
    """A torch.Size, made here, of the tuple that a record would have called it with."""
    _fields(record, "torch.Size")
    (sizes,) = record.arguments
    if not isinstance(sizes, tuple):
        raise ValueError("a torch.Size of something else than a tuple")
    return torch.Size(_integers(sizes))


def _tensor_entry(name, record) -> dcp.metadata.TensorStorageMetadata:
    """A tensor's dtype and size, and the chunks that it is cut into, which tile it."""
    if not (isinstance(record, _Record) and record.name == f"{META}TensorStorageMetadata"):
        raise ValueError(f"entry {name:.80} is no tensor; refusing to unpickle it")

    # Its properties: a dtype that DCP may load, and the one layout whose chunks can be narrowed.
    properties, size, chunks = _fields(record, record.name, "properties", "size", "chunks")
    if not (isinstance(properties, _Record) and properties.name == f"{META}TensorProperties"):
        raise ValueError(f"{name:.80} has no properties")
    dtype, layout, *_ = properties.state
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name:.80} has no dtype of {', '.join(DTYPES)}")
    strided = isinstance(layout, _Record) and layout.name == STRIDED
    if not (strided and layout.arguments == ("torch.strided",)):
        raise ValueError(f"{name:.80} is no strided tensor")

    # Where its chunks lie. A table with a hole, or with two chunks over one entry, would load half.
    size = _size(size)
    pairs = [_fields(chunk, f"{META}ChunkStorageMetadata", "offsets", "sizes") for chunk in chunks]
    chunks = []
    for offsets, sizes in pairs:
        chunks.append(dcp.metadata.ChunkStorageMetadata(_size(offsets), _size(sizes)))
    _require_tiled(name, size, chunks)
    properties = dcp.metadata.TensorProperties(dtype=DTYPES[dtype])
    return dcp.metadata.TensorStorageMetadata(properties, size, chunks)


def _require_tiled(name, size, chunks):
    """ValueError unless every entry of a tensor is in exactly one of its chunks."""
    for chunk in chunks:
        if len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size):
            raise ValueError(f"a chunk of {name:.80} has another number of dimensions")

    # Inside the tensor, with as many entries as it has, and no two over one entry.
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    ends = [[o + s for o, s in zip(c.offsets, c.sizes, strict=True)] for c in filled]
    inside = all(end <= n for row in ends for end, n in zip(row, size, strict=True))
    count = sum(math.prod(chunk.sizes) for chunk in filled)
    if not inside or count != math.prod(size):
        raise ValueError(f"the chunks of {name:.80} do not tile it")

    # Two boxes meet if they meet in every dimension. C chunks, D dimensions, c of them behind n.
    begin_CD = np.array([chunk.offsets for chunk in filled], dtype=np.int64)
    end_CD = np.array(ends, dtype=np.int64)
    for n in range(len(filled) - 1):
        meets_cD = (begin_CD[n + 1 :] < end_CD[n]) & (begin_CD[n] < end_CD[n + 1 :])
        if meets_cD.all(axis=1).any():
            raise ValueError(f"chunks of {name:.80} overlap")


class Stored(NamedTuple):
    """Where the bytes of a chunk are."""

    file: str
    offset: int
    length: int


def _places(record, entries, sizes) -> dict:
    """Where each chunk is stored, {index of a chunk: Stored}.

    ValueError unless every chunk is stored once and chunks fill every file end to end. sizes: as
    in `read_table`.
    """
    if not isinstance(record, dict):
        raise ValueError("it does not say where its chunks are")
    places = {}
    for index, info in record.items():
        name, offset = _fields(index, f"{META}MetadataIndex", "fqn", "offset")
        file, start, length = _fields(info, STORED, "relative_path", "offset", "length")
        if not is_plain(file) or file not in sizes:
            named = f"{file:.80}" if isinstance(file, str) else type(file).__name__
            raise ValueError(f"it names the file {named}, which state.json does not list")
        if not isinstance(name, str) or info.state.get("transform_descriptors"):
            raise ValueError("a chunk without a name, or one that would have to be decoded")
        where = dcp.metadata.MetadataIndex(name, _size(offset))
        if where in places:
            raise ValueError(f"a chunk of {name:.80} is stored twice")
        places[where] = Stored(file, *_integers((start, length)))

    # DCP may leave out a chunk without entries, such as the rows of a rank that has none.
    chunks = {
        dcp.metadata.MetadataIndex(name, chunk.offsets): math.prod(chunk.sizes)
        for name, entry in entries.items()
        for chunk in entry.chunks
    }
    needed = {index for index, count in chunks.items() if count}
    if not needed <= places.keys() <= chunks.keys():
        raise ValueError("the chunks of its tensors are not those that it stores")

    # Bytes that two chunks shared would be one tensor's, taken for another's.
    ends = dict.fromkeys((place.file for place in places.values()), 0)
    for file, start, length in sorted(places.values()):
        if start != ends[file]:
            raise ValueError(f"the chunks in {file} do not lie end to end")
        ends[file] = start + length
    if any(end != sizes[file] for file, end in ends.items()):
        raise ValueError("the chunks in a file are not all of it")
    return places


def read_table(path, sizes) -> dcp.metadata.Metadata:
    """DCP's table of contents of a checkpoint, made of verified values, else ValueError.

    sizes: {name: bytes} of the checkpoint's files; the table may name no others.
    """
    try:
        record = _unpickle((Path(path) / ".metadata").read_bytes())
        named, stored = _fields(record, f"{META}Metadata", "state_dict_metadata", "storage_data")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named):
            raise ValueError("it does not say which tensors there are")
        entries = {name: _tensor_entry(name, entry) for name, entry in named.items()}
        return dcp.metadata.Metadata(entries, storage_data=_places(stored, entries, sizes))
    except Exception as error:  # a damaged program may fail anywhere, and in any way
        raise ValueError(
            f"checkpoint {path}: .metadata is damaged or not of this program: "
            f"{type(error).__name__}: {error}") from error  # fmt: skip


class SafeReader(dcp.FileSystemReader):
    """A DCP reader of a verified table: tensors only (`weights_only`), each as the table has it."""

    def __init__(self, path, table):
        super().__init__(path)
        self.table = table
        self.expected = {
            dcp.metadata.MetadataIndex(name, chunk.offsets): (entry.properties.dtype, chunk.sizes)
            for name, entry in table.state_dict_metadata.items()
            for chunk in entry.chunks
        }

    # Without keyword arguments: with them DCP, where this fails on one rank, tries again for a
    # table of that rank, and if it finds one leaves the others waiting in a collective.
    def read_metadata(self):
        return self.table

    def read_data(self, plan, planner):
        try:
            for item in plan.items:
                self._read(item, planner)
        except Exception as error:  # of any kind, and DCP pickles what is raised to tell the others
            text = str(error).splitlines()[0] if str(error) else ""
            raise ValueError(f"{type(error).__name__}: {text}") from error
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, item, planner):
        """One stored chunk, or a part of it, into the part of a tensor that wants it."""
        # The slice of the file that the table names is a torch.save of one chunk.
        index = item.storage_index
        place = self.table.storage_data[index]
        with (Path(self.path) / place.file).open("rb") as file:
            stored = self._slice_file(file, place)
            saved = torch.load(stored, map_location="cpu", weights_only=True)
        tensor = isinstance(saved, torch.Tensor) and saved.layout == torch.strided
        if not tensor or (saved.dtype, saved.shape) != self.expected[index]:
            raise ValueError(f"{place.file}: {index.fqn} is not stored as the table says")

        # A plan with other shards wants a box of the chunk: cut it out, dimension by dimension.
        target = planner.resolve_tensor(item).detach()
        for dimension, start in enumerate(item.storage_offsets):
            saved = saved.narrow(dimension, start, item.lengths[dimension])
        target.copy_(saved)
        planner.commit_tensor(item, target)


# K. Packed batches: cutting them, and what their ranks agree on ------------------------------
#
# Micro-batches, as many on all ranks that need it; what is sent around; what is refused.
# Skip it: `PackedBatches` calls what it needs.


def pack(lengths, micro_tokens, shared=None) -> list:
    """Cut sequences into micro-batches of at most micro_tokens tokens, in order: lists of indices.

    A longer sequence is alone in one. shared: how many tokens each has in common with the one
    before it, where those are run once (a tree of prefixes).
    """
    # Lengths 9, 10 and 11 with micro_tokens 12, where all begin with the same 8:
    #
    #     shared None         [0] [1] [2]
    #     shared [0, 8, 8]    [0, 1] [2]     9 + 2 new ones are 11; 3 more would be 14
    micros = []
    room = 0  # tokens that the last micro-batch can still take
    for i, length in enumerate(lengths):
        count = length if shared is None else length - shared[i]
        # In a micro-batch of its own nothing is shared with what came before: it counts whole.
        if not micros or count > room:
            micros.append([])
            room = micro_tokens
            count = length
        micros[-1].append(i)
        room -= count
    return micros


def micro_batches(model, lengths, micro_tokens, shared=None) -> list:
    """`pack` for a model of any plan: filled up with [] where other ranks need more of them."""
    # A pipeline of p stages idles less the more micro-batches it has: at least 2 p of them, of
    # about one size, since all are padded to the longest.
    plan = _plan_of(model)
    if plan.pp > 1:
        longest = max(lengths, default=0)
        micro_tokens = min(micro_tokens, sum(lengths) // (2 * plan.pp) + longest)
    micros = pack(lengths, micro_tokens, shared)
    count = agreed_micro_batches(model, len(micros))
    return micros + [[]] * (count - len(micros))


def agreed_micro_batches(model, count) -> int:
    """How many micro-batches a rank runs that has data for `count` of them. Collective."""
    # A pipeline of p stages wants at least 2 p, and interleaved schedules a multiple of p: 5
    # micro-batches on 2 stages become 6.
    plan = _plan_of(model)
    if plan.pp > 1:
        count = max(2 * plan.pp, -(-count // plan.pp) * plan.pp)
    if sharded(model) or plan.ep > 1:
        # COMM: a sharded forward gathers weights from all, and tokens go to all ranks' experts,
        # so ranks agree on their number and fill up with empty ones.
        # Pinned by tests/test_ranks.py::test_a_rank_without_data_takes_part.
        most = torch.tensor(count, device=_device_of(model))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        count = int(most)
    return count


def pack_row(sequences, masks, length) -> PackedRow:
    """Lay sequences end to end and pad the row to `length`. masks: which of tokens[1:] count."""
    lengths = [len(tokens) for tokens in sequences]
    padding = np.zeros(length - sum(lengths), dtype=np.int64)
    tokens_S = np.concatenate([*map(np.asarray, sequences), padding])
    positions_S = np.concatenate([*map(np.arange, lengths), padding])
    document_S = np.repeat([*range(len(lengths)), -1], [*lengths, len(padding)])

    mask_BT = np.zeros((len(masks), max(lengths) - 1), dtype=bool)
    for b, mask in enumerate(masks):
        mask_BT[b, : len(mask)] = mask

    # Each scored target is predicted by the token before it, which no other target shares here.
    row_N, column_N = mask_BT.nonzero()
    first_B = np.cumsum([0, *lengths[:-1]])
    at_N = first_B[row_N] + column_N
    in_row = [x_S[None] for x_S in (tokens_S, positions_S, document_S)]
    scored = [mask_BT, at_N, tokens_S[at_N + 1], np.arange(len(at_N))]
    token_J = np.arange(sum(lengths))  # each token is of one sequence
    holds = [document_S[token_J], token_J]
    return PackedRow(*map(torch.from_numpy, [*in_row, *scored, *holds]))


def _lay_out(batches, sequences, masks):
    """The micro-batches of a batch, and of each its `PackedRow`; an empty one has one token."""
    require_batch(batches.model, sequences, masks)
    lengths = [len(tokens) for tokens in sequences]
    # Other ranks may need more micro-batches than this one has data for: the rest have one token.
    micros = micro_batches(batches.model, lengths, batches.micro_tokens)
    parts = []
    for indices in micros:
        if indices:
            parts.append(([sequences[i] for i in indices], [masks[i] for i in indices]))
        else:
            parts.append(([[0]], [[]]))

    sizes = row_lengths(batches.plan, [sum(map(len, in_row)) for in_row, _ in parts])
    rows = []
    for indices, part, size in zip(micros, parts, sizes, strict=True):
        row = pack_row(*part, size)
        rows.append(row if indices else of_nobody(row))
    return micros, rows


def of_nobody(row) -> PackedRow:
    """A row that only fills up: its tokens are in no sequence."""
    return row._replace(sequence_J=row.sequence_J[:0], token_J=row.token_J[:0])


def row_lengths(plan, sizes) -> list:
    """The lengths to which rows of these sizes are padded under a plan."""
    # Sequence parallelism cuts a row in t, and a zigzag over a context cuts it in 2 c first. A
    # pipeline wants all rows of one length.
    unit = plan.tp * 2 * plan.cp if plan.cp > 1 else plan.tp
    if plan.pp > 1:
        sizes = [max(sizes)] * len(sizes)
    return [-(-size // unit) * unit for size in sizes]


def _own_tokens_of(batches, row):
    """Which tokens of a row this rank of the context has, ascending: all, without c."""
    length = row.tokens_1S.shape[1]
    if batches.plan.cp == 1:
        return torch.arange(length)
    return batches.indices(length, dist.get_rank(batches.model.grid.context), batches.plan.cp)


def _own_parts(batches, rows, balance=None) -> list:
    """Of each row this rank's tokens, as a `Micro`, with the attention of its documents and what
    `balance` makes for its sparse layers."""
    group = batches.model.grid.context if batches.plan.cp > 1 else None
    micros = []
    for row in rows:
        local_s = _own_tokens_of(batches, row)
        tokens_1s = row.tokens_1S[:, local_s].to(batches.device)
        positions_1s = row.positions_1S[:, local_s].to(batches.device)
        # Attention and balance are about the whole row; tokens and positions are this rank's.
        micro = Micro(tokens_1s, positions_1s, batches.attention(row.sees, group))
        if balance is not None:
            made = balance_of_rank(batches.model, row.sequence_J, row.token_J, local_s, balance)
            micro = micro._replace(balance=made)
        micros.append(micro)
    return micros


def balance_of_rank(model, sequence_J, token_J, local_s, balance):
    """What `balance` makes of the tokens whose routing is this rank's to count.

    sequence_J, token_J: as in `PackedRow`. local_s: the tokens that this rank is given, ascending.
    """
    # A balance loss is a sum over tokens, so each token is one rank's, though several may see it.
    # The ranks of a context have different ones already. Those of a tensor group are given the same
    # ones, and rank r takes the r-th stretch: with sequence parallelism its layers see no others.
    # But around experts whose inner width is split f and g gather all of them (section 4).
    #
    #     t2, 6 tokens, rank 1     takes 3 4 5    a layer sees them as 0 1 2, with etp 2 as 3 4 5
    plan = _plan_of(model)
    groups = []
    first = 0  # of local_s, the first that a sparse layer sees
    taken_s = local_s
    if plan.cp > 1:
        groups.append(model.grid.context)
    if plan.tp > 1:
        mesh = model.grid.dense["tp"]
        stretch = -(-len(local_s) // plan.tp)
        start = mesh.get_local_rank() * stretch
        taken_s = local_s[start : start + stretch]
        first = start if plan.etp == 1 else 0
        groups.append(mesh.get_group())

    # Tokens are numbered as the layer sees them, and sequences as in the whole row.
    is_taken_J = torch.isin(token_J, taken_s)
    token_j = torch.searchsorted(local_s, token_J[is_taken_J]) - first
    sequences = int(sequence_J.max()) + 1 if len(sequence_J) else 0
    device = _device_of(model)
    pairs = sequence_J[is_taken_J].to(device), token_j.to(device)
    return balance(*pairs, sequences=sequences, groups=groups)


@torch.no_grad()
def _scores_without_gradient(batches, sequences, masks) -> list:
    """`PackedBatches.forward`."""
    micros, rows = batches.lay_out(sequences, masks)
    pipeline = isinstance(batches.model, Pipeline)
    if pipeline:
        states = batches.model.forward(_own_parts(batches, rows)) or ()
    else:
        states = map(batches.states, rows)  # one row after the other: no two are held at once

    # Sequences go back to their places, and leave their padding behind.
    found = [None] * len(sequences)
    for indices, row, hidden_1sM in zip(micros, rows, states):
        columns = [x_BT.cpu() for x_BT in batches.score(row, hidden_1sM)]
        for b, i in enumerate(indices):
            found[i] = tuple(x_BT[b, : len(sequences[i]) - 1] for x_BT in columns)
    reshard(batches.model)  # without a backward FSDP would leave the gathered weights lying there

    # Only the last stage of a pipeline has found anything.
    if pipeline:
        replica = batches.model.grid.replica
        parts = [None] * dist.get_world_size(replica)
        mine = None if batches.model.last is None else found
        dist.all_gather_object(parts, mine, group=replica)
        found = next(part for part in parts if part is not None)
    return found


def speaks_for_replica(model) -> bool:
    """Whether what this rank measures of its sequences counts, among ranks with the same ones."""
    grid = getattr(model, "grid", None)
    if grid is None:
        return True
    if isinstance(model, Pipeline) and model.last is None:
        return False

    # The first rank of its tensor group that is also the first of its context.
    #
    #     plan t2c2: tensor groups 0 1 | 2 3, contexts 0 2 | 1 3   ->   rank 0 alone
    first_of_tensor = grid.dense["tp"].get_local_rank() == 0
    return first_of_tensor and dist.get_rank(grid.context) == 0


def _sum_over_replicas(model, losses, device):
    """The sum of all ranks' losses in float64; of ranks with the same sequences one counts."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if speaks_for_replica(model):
        for loss in losses:
            total += loss
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def shares_sequences(model) -> bool:
    """Whether other ranks work on the same sequences as this one: the c, t and p of its replica."""
    plan = _plan_of(model)
    return plan.world > plan.dp


def gather_replica(model, items):
    """A list of what all ranks of this rank's replica have, and where its own items begin in it.

    Data is often dealt to all ranks, but those of one c, t or p group run the same forward. items:
    a list of anything that can be pickled; the parts come in the order of the ranks.
    """
    if not shares_sequences(model):
        return items, 0
    replica = model.grid.replica
    parts = [None] * dist.get_world_size(replica)
    dist.all_gather_object(parts, items, group=replica)
    first = sum(len(part) for part in parts[: dist.get_rank(replica)])
    return [item for part in parts for item in part], first


def _plan_of(model):
    """The plan that `parallelize` was given; that of one rank for a model that it has not seen."""
    grid = getattr(model, "grid", None)
    return Plan() if grid is None else grid.plan


def _device_of(model):
    """Where a model runs, even if its shards wait on the CPU."""
    grid = getattr(model, "grid", None)
    return next(model.parameters()).device if grid is None else _device_of_grid(grid)


def _device_of_grid(grid):
    """Where a model of a plan runs: on a CUDA machine the device of this rank."""
    kind = grid.dense.device_type
    return torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)


def _require_indices(batches):
    """ValueError where nobody says which tokens of a row a rank of the context has."""
    if batches.plan.cp > 1 and batches.indices is None:
        raise ValueError(
            f"plan {batches.plan} splits rows: give indices=, e.g. ring_attention.indices")


def require_batch(model, sequences, masks):
    """ValueError, on all ranks of a replica, for masks that do not fit or sequences that differ."""
    found = ""
    if len(sequences) != len(masks):
        found = f"{len(sequences)} sequences came with {len(masks)} masks"
    for i, (tokens, mask) in enumerate(zip(sequences, masks)):
        if not found and (len(tokens) == 0 or len(mask) != len(tokens) - 1):
            found = (
                f"sequence {i} has {len(tokens)} tokens and a mask of {len(mask)}; it needs a "
                f"token at least, and an entry of the mask for each of tokens[1:]")  # fmt: skip

    # COMM: eight bytes a rank of the replica tell whether all of them have the same batch. Pinned
    # by tests/test_packed.py::test_a_batch_that_cannot_be_is_refused_on_every_rank.
    plan = _plan_of(model)
    if plan.world > plan.dp:
        digest = hashlib.blake2b(digest_size=8)
        for tokens, mask in zip(sequences, masks):
            digest.update(np.asarray([len(tokens), *tokens], dtype=np.int64).tobytes())
            digest.update(np.asarray(mask, dtype=bool).tobytes())
        replica = model.grid.replica
        parts = [None] * dist.get_world_size(replica)
        dist.all_gather_object(parts, (digest.digest(), found), group=replica)
        found = next((text for _, text in parts if text), "")
        if not found and len({part for part, _ in parts}) > 1:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(replica)))
            found = (
                f"ranks {ranks} work on the same sequences in plan {plan}, but were given "
                f"different ones or masks; gather_replica makes one batch of them")  # fmt: skip
    if found:
        raise ValueError(found)


class PaddedTokens:
    """A model under sequence parallelism for callers that know nothing of it, such as trees.

    Pads the tokens (1, S) to a multiple of t, runs the model, drops the padding. Attention never
    sees the padding. Everything else is the model's. whole_routing: `balance` is told of all S
    tokens; else, as of the model itself, of those that this rank's sparse layers see.
    """

    def __init__(self, model, multiple, *, whole_routing=False):
        self.model = model
        self.multiple = multiple
        self.whole_routing = whole_routing

    def __getattr__(self, name):
        return getattr(self.model, name)

    def hidden(self, tokens_1S, /, *, positions, attention, balance=None):
        # Sequence parallelism gives each rank 1/t of the tokens: 5 of them become 6 for t = 2. A
        # rank without any still runs t, because its partners wait for it.
        length = tokens_1S.shape[1]
        padded_length = max(1, -(-length // self.multiple)) * self.multiple
        pad = padded_length - length

        def attention_without_padding(q, k, v, /, **options):
            out = attention(*(x[:, :, :length] for x in (q, k, v)), **options)
            return F.pad(out, (0, 0, 0, pad))

        def balance_of_all_tokens(scores_nE, chosen_nK, /, *, layer):
            scores_NE = self._of_all_ranks(scores_nE)
            chosen_NK = self._of_all_ranks(chosen_nK)
            return balance(scores_NE[:length], chosen_NK[:length], layer=layer)

        options = {}
        if balance is not None:
            options["balance"] = balance_of_all_tokens if self.whole_routing else balance
        x_1SM = self.model.hidden(
            F.pad(tokens_1S, (0, pad)), positions=F.pad(positions, (0, pad)),
            attention=attention_without_padding, **options,
        )  # fmt: skip
        return x_1SM[:, :length]

    def _of_all_ranks(self, x_nE):
        """What the routers of all tensor ranks say of their tokens, one stretch after the other."""
        # COMM: all tensor ranks gather, and each then computes the same loss of all tokens. So each
        # has the whole gradient, and backward takes its own tokens' part without a message: also
        # where the layer has seen all tokens, lest they count t times. Pinned by
        # tests/test_balance.py::test_a_rank_sees_some_tokens.
        mesh = self.model.grid.dense["tp"]
        if self.model.grid.plan.etp > 1:
            x_nE = x_nE.chunk(mesh.size())[mesh.get_local_rank()]
        gathered = _Operator.apply(x_nE[None], mesh.get_group(), _gather_tokens, _own_tokens)
        return gathered[0]


# L. Generators -------------------------------------------------------------------------------
#
# A model that only samples, split by a plan of its own (d, t and e), and how weights reach it, one
# tensor at a time, from a model of another plan. Skip it if every rank samples with a whole model.


def require_generator_plan(plan) -> None:
    """ValueError for a plan with letters that a generator cannot have."""
    for letter, degree, what in (("c", plan.cp, "sequences"), ("p", plan.pp, "layers")):
        if degree > 1:
            raise ValueError(
                f"plan {plan}: a generator has d, t and e, and no {letter}: it decodes one token "
                f"after the other, and ranks with other {what} would only wait")  # fmt: skip


def split_for_decoding(model, plan, *, device_mesh):
    """Make a whole model into this rank's part of a generator's plan, without gradients; return it.

    model, plan and device_mesh are as for `parallelize`. What the t ranks of a replica share is the
    decoding: all of them get the same tokens, and compute the same logits, the whole vocabulary's
    (`gather_replica` makes the same batch of what each of them has). Ranks that exchange rows of
    experts with other replicas need the same number of model calls: `end_together`.
    """
    require_generator_plan(plan)
    if plan.shapes != device_mesh.plan.shapes:
        raise ValueError(f"plan {plan} was given the grid of plan {device_mesh.plan}")
    if getattr(model, "grid", None) is not None:
        raise ValueError("this model is split already; split_for_decoding takes a whole one, once")
    _require_names(plan, model)
    plan.require_fits(world=dist.get_world_size(), config=model.config)

    # As `parallelize` does: functions that get only the model find its ranks here.
    model.grid = device_mesh
    model.mode = "ddp"
    model.sequence = False
    model.offload = False
    model.calls = None

    # One new token a row is no sequence that could be shared out, so between f and g every tensor
    # rank has all rows. Experts whose width is not split get each row once all the same.
    if plan.tp > 1:
        mesh = device_mesh.dense["tp"]
        tensor_parallel(model, mesh, sequence=False, expert_tensor=plan.etp)
        if plan.etp == 1:
            for layer in model.model.layers:
                if hasattr(layer.mlp, "experts"):
                    _share_out_rows(layer.mlp, mesh.get_group())
    if plan.ep * plan.etp > 1:
        expert_parallel(model, device_mesh.experts)

    # Experts that are dealt over more ranks than a replica has: replicas decode in step.
    if plan.ep * plan.etp > plan.tp:
        model.calls = _CallsInStep(model, device_mesh.experts["ep"].get_group())
        model.hidden = model.calls.hidden
    return model


def _share_out_rows(mlp, group):
    """Let each of the tensor ranks, which have the same rows, send some of them to the experts."""
    run = mlp.forward
    world = dist.get_world_size(group)

    def forward(x_BSM, balance=None, /):
        # 5 rows on 2 ranks are 0 1 2 and 3 4 -, where - is a row of zeros. Whatever it is routed
        # to, its result is cut off.
        rows_NM = x_BSM.flatten(0, -2)
        N = len(rows_NM)
        padded_1NM = F.pad(rows_NM, (0, 0, 0, -N % world))[None]
        out_1nM = run(_own_tokens(padded_1NM, group), balance)
        return _gather_tokens(out_1nM, group)[0, :N].view_as(x_BSM)

    mlp.forward = forward


class _CallsInStep:
    """The model calls of ranks that exchange rows of experts, one at a time on all of them.

        rank 0   call  call  call  call  end           a rank that has ended runs one token, for
        rank 1   call  call  end   ....  ....          nobody, for as long as another one calls
    """

    def __init__(self, model, group):
        self.run = model.hidden
        self.group = group
        self.device = _device_of_grid(model.grid)

    def hidden(self, tokens_BS, /, **options):
        """`hidden` of a rank that has something to decode."""
        self.ranks_that_call(1)
        return self.run(tokens_BS, **options)

    def ranks_that_call(self, here) -> int:
        # COMM: one number before each model call, so that a rank which has ended knows whether the
        # others need its experts once more. Pinned by
        # tests/test_generator_plan.py::test_replicas_that_end_early_serve_their_experts.
        count = torch.tensor(here, device=self.device)
        dist.all_reduce(count, group=self.group)
        return int(count)

    @torch.no_grad()
    def end(self):
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self.ranks_that_call(0):
            self.run(token_11)


def end_together(model) -> None:
    """This rank has decoded all it had: serve the experts it has until the others have, too."""
    calls = getattr(model, "calls", None)
    if calls is not None:
        calls.end()


def share_or_allocate(source, target, device) -> None:
    """Give `target`, a model on the meta device, memory: the source's own where both have the same
    part of a parameter in one dtype, and new memory elsewhere, whose content is undefined.

    What an optimiser writes into a shared parameter of the source is in the target at once, and
    `copy_weights` leaves it out. Degrees decide what is shared, so it is the same on all ranks.
    source: None where there is none on these ranks.
    """
    # FSDP moves its shards' memory about, and a stage of a pipeline has some of the layers only,
    # which the other ranks of its pipeline need to be sent.
    sources = {}
    if source is not None and not (sharded(source) or isinstance(source, Pipeline)):
        sources = dict(source.named_parameters())

    for prefix, module in target.named_modules():
        for name, q in module.named_parameters(recurse=False):
            p = sources.get(f"{prefix}.{name}" if prefix else name)
            if p is not None and p.dtype == q.dtype and cuts_of(p) == cuts_of(q):
                memory = local(p.detach())
            else:
                memory = torch.empty_like(local(q.detach()), device=device)
            if isinstance(q, DTensor):
                whole = dict(shape=q.shape, stride=q.stride())
                mesh = q.device_mesh
                memory = DTensor.from_local(memory, mesh, q.placements, run_check=False, **whole)
            setattr(module, name, torch.nn.Parameter(memory, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device=device)


class Cut(NamedTuple):
    """One cut of a parameter: along which dimension, into how many parts, which of them is here."""

    dim: int
    parts: int
    part: int
    # Ranks that are so far apart hold neighbouring parts: 2 for the data of d2t2. Two cuts that
    # agree in this and in the number of parts give every rank the same part, not just this one.
    stride: int

    def range_of(self, size) -> tuple:
        """[first, end) of this part in a dimension of a size: as torch's chunk, the last are short.

        13 in 4 parts of 4 are 0-4, 4-8, 8-12 and 12-13.
        """
        length = -(-size // self.parts)
        first = min(self.part * length, size)
        return first, min(first + length, size)


def _mesh_dimensions(p) -> list:
    """The dimensions of a parameter's mesh along which it is cut, in the order of the cuts."""
    # FSDP cuts what t and e have left: its cut is the last, though its dimension is the first.
    placements = getattr(p, "placements", ())
    cuts = [n for n, placement in enumerate(placements) if not placement.is_replicate()]
    cuts = [n for n in cuts if p.device_mesh.size(n) > 1]
    if len(cuts) > 1:
        names = p.device_mesh.mesh_dim_names
        cuts.sort(key=lambda n: names[n] in ("fsdp", "expert-dp"))
    return cuts


def cuts_of(p) -> list:
    """The `Cut`s that have made this rank's part of a parameter, the first one first."""
    cuts = []
    for n in _mesh_dimensions(p):
        mesh = p.device_mesh
        first, second, *_ = dist.get_process_group_ranks(mesh.get_group(n))
        own = mesh.get_local_rank(n)
        cuts.append(Cut(p.placements[n].dim, mesh.size(n), own, second - first))
    return cuts


def cut_shape(shape, cuts) -> list:
    """What cuts leave of a shape on this rank."""
    left = list(shape)
    for cut in cuts:
        first, end = cut.range_of(left[cut.dim])
        left[cut.dim] = end - first
    return left


def gathered(p, cuts=()):
    """The whole of a parameter, on every rank, or what `cuts`, the first of its own, leave of it.

    It takes no more memory than that and a part: torch's full_tensor() has up to two copies of the
    whole besides.
    """
    # 13 rows under t2, and then FSDP over d2:
    #
    #     t 0: 7 rows   d 0: 4  d 1: 3          gathered over d: 7 and 6 rows
    #     t 1: 6 rows   d 0: 3  d 1: 3          and then over t: 13
    x = local(p)
    dimensions = _mesh_dimensions(p)
    own = cuts_of(p)
    for k in reversed(range(len(cuts), len(own))):
        size = cut_shape(p.shape, own[:k])[own[k].dim]
        x = _gather_pieces(x, own[k].dim, size, p.device_mesh.get_group(dimensions[k]))
    return x


def _gather_pieces(x, dim, size, group):
    """Pieces along a dimension, of equal size but for the last ones, as one tensor."""
    piece = -(-size // dist.get_world_size(group))
    rows = x.movedim(dim, 0)
    if len(rows) < piece:
        padded = rows.new_zeros(piece, *rows.shape[1:])
        padded[: len(rows)] = rows
        rows = padded
    # torch 2.13 has a new name for what 2.11 calls all_gather_into_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    # COMM: padded to equal pieces, so all ranks send alike, also one whose piece is empty. Pinned
    # by tests/test_generator_plan.py::test_a_push_goes_tensor_by_tensor_from_any_layout_to_any.
    whole = rows.new_empty(piece * dist.get_world_size(group), *rows.shape[1:])
    gather(whole, rows.contiguous(), group=group)
    return whole[:size].movedim(0, dim)


def tensors_of(model) -> dict:
    """Name -> tensor, of the parameters and of the buffers that belong to a model's state."""
    return dict(model.named_parameters()) | persistent_buffers(model)


class Weights:
    """The tensors of a model of any plan, given out one at a time. All ranks of the model ask for
    the same names in the same order. shapes: name -> shape of the whole, alike on all ranks.
    weights: what is asked for in place of the model's parameters."""

    def __init__(self, source, weights=()):
        self.tensors = tensors_of(source) | dict(weights)
        found = {name: (tuple(x.shape), cuts_of(x)) for name, x in self.tensors.items()}
        self.senders = {}
        self.group = None
        if isinstance(source, Pipeline):
            # What all stages together have, and who sends each tensor: the first stage that has it.
            # The ranks of this group have other layers, and the same part of what t and e cut.
            self.group = source.grid.dense["pp"].get_group()
            of_stages = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(of_stages, found, group=self.group)
            found = {}
            for stage, part in enumerate(of_stages):
                for name in part:
                    if name not in found:
                        found[name] = part[name]
                        self.senders[name] = dist.get_global_rank(self.group, stage)
        self.shapes = {name: shape for name, (shape, _) in found.items()}
        self.cuts = {name: cuts for name, (_, cuts) in found.items()}

    @torch.no_grad()
    def gathered(self, name, dtype, device, cuts=()):
        """The whole of a tensor on every rank, or what `cuts`, the first ones that the source has
        made, leave of it. Collective."""
        if name in self.tensors:
            x = gathered(self.tensors[name].detach(), cuts)
        else:
            x = torch.empty(cut_shape(self.shapes[name], cuts), dtype=dtype, device=device)
        if name in self.senders:
            # COMM: stages gather what they hold in one order, then its first holder sends it.
            # Pinned by tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
            x = x.to(device, dtype).contiguous()
            dist.broadcast(x, src=self.senders[name], group=self.group)
        return x


@torch.no_grad()
def keep_part(q, whole) -> None:
    """Copy this rank's part of a whole tensor into q, a plain tensor or a DTensor, in q's dtype."""
    part = own_part(whole, q.device_mesh, q.placements) if isinstance(q, DTensor) else whole
    local(q.detach()).copy_(part)


@torch.no_grad()
def copy_weights(source, target, optimizer=None) -> None:
    """Collective. Copy source's parameters and buffers into target's, in target's dtypes.

    source: of any plan. target: whole on every rank, or of `split_for_decoding`. One tensor after
    the other is gathered, and each rank keeps its part: what is ever here is the two models' parts
    and one whole tensor. A parameter that both have in one memory is left out. optimizer: the
    source's, which may have masters. ValueError if names or shapes differ.
    """
    dtype = next(target.parameters()).dtype
    weights = Weights(source, weights_to_push(source, optimizer, dtype))
    wanted = tensors_of(target)

    # Compared before the first of them moves, and by what every rank knows now.
    wants = {name: tuple(x.shape) for name, x in wanted.items()}
    if weights.shapes != wants:
        differ = sorted({name for name, _ in weights.shapes.items() ^ wants.items()})
        raise ValueError(f"models differ: {differ}")

    for name, q in wanted.items():
        own = weights.tensors.get(name)
        if own is not None and local(own.detach()).is_set_to(local(q.detach())):
            continue
        # Where the source was first cut as the target is, by t and e of one degree, only what was
        # cut behind that, by FSDP, is gathered. Degrees decide, so all ranks go the same way.
        cuts = cuts_of(q)
        if weights.cuts[name][: len(cuts)] == cuts:
            local(q.detach()).copy_(weights.gathered(name, q.dtype, q.device, cuts))
        else:
            keep_part(q, weights.gathered(name, q.dtype, q.device))


# M. Mixed precision ---------------------------------------------------------------------------
#
# Products in one precision, and what adds up over steps, micro-batches and ranks in a higher one.
# Skip it unless you use compute_dtype.
#
# A step of lr 1e-6 moves a weight of 0.02 by 1e-6, and bf16, with 8 bits, has nothing between 0.02
# and 0.0201: added to a bf16 weight such a step is lost, and a thousand of them too. So the weights
# that AdamW updates stay as they are, in float32 say; they are the masters. What computes is their
# rounding. Bytes of a number, of which zero1 and fsdp share some out:
#
#                computes    master    gradient    moments
#     fsdp       2 (a unit)  4         4           4 + 4      all shared out; 2 while a unit runs
#     others     2           4         4           4 + 4      zero1 shares out master and moments
#
# Under fsdp torch's FSDP2 does it: parameters are the masters' shards, a gather rounds them, and
# the scatter-add is of wide gradients. Elsewhere the model's parameters are the rounded ones. A
# backward makes gradients in their precision, but `grad_dtype` (torch 2.10 and later) tells torch
# to cast them before it adds them to .grad: the sum over micro-batches is wide, and so is that over
# ranks. `LocalOptimizer` holds the masters, and under zero1 those of its own rows alone.
#
# The states between layers, to which each layer adds, stay in the weights' precision, if the model
# has a `residual_dtype` and is told so (models.Transformer): the trainer does, torch.autocast does.
# With states in bf16 the gradients' error was 1.15 to 1.41 times that of autocast training of the
# same model, with states in float32 it is 1.05 to 1.22 times that (tests/RESULTS.md). What enters a
# matrix is rounded right before it. So a layer's input takes 4 bytes an entry while it waits for
# the backward, and on the way from stage to stage; what t, c and e send is of compute_dtype.


def require_lower_precision(dtype, model):
    """ValueError if products in `dtype` make no mixed precision of the model's weights."""
    # Only a coarser precision saves anything: its masters are then worth their room.
    of_weights = next(model.parameters()).dtype
    lower = torch.is_floating_point(torch.empty(0, dtype=dtype))
    lower = lower and torch.finfo(dtype).eps > torch.finfo(of_weights).eps
    if not lower:
        raise ValueError(
            f"compute_dtype={dtype} must be coarser than the weights' {of_weights}, which are the "
            f"masters; without it products are in {of_weights} too")  # fmt: skip
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise ValueError(
            f"compute_dtype needs gradients that are wider than their parameter, Tensor.grad_dtype "
            f"of torch 2.10 and later; this is {torch.__version__}")  # fmt: skip


def fsdp_precision(model, compute_dtype):
    """FSDP2's policy: gather in compute_dtype, add gradients in the weights' own."""
    if compute_dtype is None:
        return fsdp.MixedPrecisionPolicy()
    # NUMERICS: FSDP2 would cast every floating tensor that enters a layer, and with the states the
    # cosines and sines of the positions, which bf16 gets wrong from position 257 on. The embedding
    # gives states of the right dtype by itself. Pinned by
    # tests/test_precision.py::test_fsdp_computes_as_ddp_does.
    return fsdp.MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=next(model.parameters()).dtype,
        cast_forward_inputs=False,
    )  # fmt: skip


def has_masters(optimizer) -> bool:
    """Whether a LocalOptimizer updates other tensors than those that compute."""
    model = getattr(optimizer, "model", None)
    return getattr(model, "compute_dtype", None) is not None and not sharded(model)


def round_parameters(model):
    """The (name, parameter) pairs of a model, which with masters gets rounded ones in their place.

    A generator: one parameter is rounded at a time, so that never two whole models are there.
    """
    dtype = getattr(model, "compute_dtype", None)
    if dtype is None or sharded(model):
        yield from model.named_parameters()
        return

    done = set()
    for part in parts_of(model):
        for prefix, module in part.named_modules():
            for last, p in list(module.named_parameters(recurse=False)):
                # Under zbv one rank's two ends share their embedding, a module of both parts.
                name = f"{prefix}.{last}" if prefix else last
                if name in done:
                    continue
                done.add(name)
                rounded = torch.nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad)
                # NUMERICS: the gradients of micro-batches and of the two uses of a tied embedding
                # are added in the master's precision. Pinned by
                # tests/test_precision.py::test_gradients_add_up_in_float32.
                rounded.grad_dtype = p.dtype
                rounded.terms = getattr(p, "terms", False)
                setattr(module, last, rounded)
                yield name, p


def _own_weights(optimizer, name, p):
    """What a LocalOptimizer updates of a parameter: views of it, or masters that it alone holds."""
    rows = _own_rows(optimizer, name, local(p.detach()))
    if has_masters(optimizer) and optimizer.zero:
        return rows.clone()  # a view of some rows would keep all of them in memory
    return rows


@torch.no_grad()
def show_updates(optimizer) -> None:
    """Bring what a LocalOptimizer has updated, or has read, into its model. Collective with zero.

    Without masters and without `zero` it is there already.
    """
    for name, p in optimizer.model.named_parameters():
        rows = optimizer.mine[name]
        if optimizer.zero:
            # Rounded before they are sent: the parameter's dtype is that of the message.
            gather_rows(local(p.detach()), rows, holders(optimizer.model.grid, name))
        elif has_masters(optimizer):
            local(p.detach()).copy_(rows)


def master_of(optimizer, name, p):
    """What of parameter p is in a checkpoint: its master, as a DTensor where it is a part."""
    if not has_masters(optimizer):
        return p.detach()
    return _state_as_dtensor(optimizer, name, p, optimizer.mine[name].detach())


def weights_to_push(model, optimizer, dtype) -> dict:
    """Name -> the tensor to be copied into a model of a dtype."""
    # In compute_dtype a parameter is its master, rounded once. In another one it would be rounded
    # twice; the master itself may be a part of a rank's part (zero1), and costs more messages.
    tensors = dict(model.named_parameters())
    if has_masters(optimizer) and dtype != model.compute_dtype:
        return {name: master_of(optimizer, name, p) for name, p in tensors.items()}
    return tensors


def weights_to_store(model, optimizer) -> dict:
    """Name -> the weight as a checkpoint has it, a part or whole."""
    return {name: master_of(optimizer, name, p) for name, p in model.named_parameters()}


def read_training(path, model, optimizer, *, counts=()) -> dict:
    """Read a checkpoint of `training_tensors` into a model and its optimiser; its JSON values."""
    state = read_checkpoint(path, training_tensors(model, optimizer), counts=counts)
    if has_masters(optimizer):
        show_updates(optimizer)
    return state


# N. Two sides: ranks that generate, and ranks that train --------------------------------------
#
# What goes between two sets of ranks that work at the same time, each with a world of its own:
# signs of life, messages, weights. Skip it if all ranks do the same.


# A run `d2+d1t2`, as everybody in it is called:
#
#     rank of the run    0            1            2          3
#     side               generator    generator    trainer    trainer
#     rank of its side   0            1            0          1
#
# Each side has a default process group of its own, so what is written for a world of ranks runs on
# a side as it is. The sides meet in torchrun's store alone, but for the weights: those go from
# trainer rank 0 to all generators.
GENERATOR = "generator"
TRAINER = "trainer"


class Side:
    """This rank's place on one of two sides, and what it knows of the others.

    name      GENERATOR or TRAINER
    rank      on this side
    sizes     {GENERATOR: ranks, TRAINER: ranks}
    store     of both sides
    timeout   seconds without a sign of life after which another rank is lost

    No rank waits in a collective for the other side, since that may be at work for any time. It
    asks the store for what it wants, and looks whether all ranks still show that they live.
    """

    PAUSE = 0.004  # seconds between two questions
    # Errors about the run itself, not about a rank: all ranks end with the same words.
    REFUSALS = {kind.__name__: kind for kind in (
        ValueError, ImportError, ModuleNotFoundError, OSError, FloatingPointError)}  # fmt: skip

    def __init__(self, name, rank, sizes, store, timeout):
        self.name = name
        self.rank = rank
        self.sizes = sizes
        self.store = store
        self.timeout = timeout
        self.device = "cpu"
        self.where = lambda: "starting"  # how far this rank is, in words
        self.advice = "look at its error"
        self.stop = None  # a Stop: a signal that it has seen is told to all

        # A thread says so and often that this process lives; it has a connection of its own, for
        # one that waits lets nobody else speak.
        self.others = [(side, r) for side in sizes for r in range(sizes[side])]
        self.others.remove((name, rank))
        self.seen = dict.fromkeys(self.others, (None, time.monotonic()))
        self.looked = time.monotonic()
        self.interval = min(1.0, timeout / 5)
        self.leaving = threading.Event()
        threading.Thread(target=self._show_life, daemon=True).start()

    def _show_life(self):
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone: the run ends
            store = self.store.clone()
            for n in itertools.count():
                store.set(f"alive/{self.name}/{self.rank}", str(n))
                if self.stop is not None and self.stop.number:
                    store.set("signal", str(self.stop.number))
                if self.leaving.wait(self.interval):
                    return

    def wait(self, ready):
        """Return when ready() says so; ConnectionError if a rank of either side is lost first."""
        # Asking is cheap, and looking at all the others is not: that is done once an interval.
        try:
            while not ready():
                if time.monotonic() > self.looked + self.interval:
                    self.looked = time.monotonic()
                    self.require_others()
                time.sleep(self.PAUSE)
        except dist.DistError as error:
            reason = str(error).splitlines()[0][:160]
            where = "in torchrun, or in rank 0 of the run"
            raise self.lost(f"the store of all ranks, {where}, is gone ({reason})") from error

    def wait_for(self, *keys):
        """Return when the store has all the keys."""
        self.wait(lambda: self.store.check(list(keys)))

    def require_others(self):
        """ConnectionError if a rank has ended with an error, or shows no life any more."""
        if self.store.check(["failed"]):
            # Whoever was the first to end may have ended because another one was gone: silent
            # ranks are told in a moment.
            told = json.loads(self.store.get("failed"))
            self.store.set(f"heard/{self.name}/{self.rank}", "1")
            if told["kind"] in self.REFUSALS:
                raise self.REFUSALS[told["kind"]](told["text"])
            who = (told["side"], told["rank"])
            silent = [other for other in self.silent_now() if other != who]  # who has said why
            names = "".join(f"; {self.called(*other)} is gone" for other in silent)
            raise self.lost(f"{self.called(*who)} has ended: {told['text']}{names}")
        silent = self.silent(self.timeout)
        if silent:
            names = " and ".join(self.called(*other) for other in silent)
            raise self.lost(f"{names} is gone or silent for more than {self.timeout:g} seconds")

    def silent(self, seconds) -> list:
        """The other ranks that have shown no sign of life for so long."""
        # Signs are counters: clocks of other machines are not compared. A rank that has not shown
        # any life yet counts from the moment at which this one began.
        now = time.monotonic()
        found = []
        for other in self.others:
            key = "alive/{}/{}".format(*other)
            sign = self.store.get(key) if self.store.check([key]) else None
            last, since = self.seen[other]
            if sign != last:
                self.seen[other] = sign, now
            elif now > since + seconds:
                found.append(other)
        return found

    def silent_now(self) -> list:
        """The other ranks that show no life at this moment."""
        self.silent(0)  # notes the last signs
        time.sleep(3 * self.interval)
        return self.silent(2.5 * self.interval)

    def called(self, side, rank) -> str:
        """A rank by its name."""
        number = rank if side == GENERATOR else rank + self.sizes[GENERATOR]
        return f"{side} rank {rank} (rank {number} of the run)"

    def lost(self, text) -> ConnectionError:
        """The error that ends this rank."""
        return ConnectionError(
            f"{self.where()}: {text}; this rank leaves without saving; {self.advice}")

    def lost_in_exchange(self, error) -> ConnectionError:
        """The error of a rank whose message to the other side has failed."""
        names = " and ".join(self.called(*other) for other in self.silent_now())
        reason = str(error).splitlines()[0][:160]
        return self.lost(f"{names or 'another rank'} is gone, weights did not arrive ({reason})")

    def signal(self) -> int:
        """A signal that any rank of either side has seen; 0 if none has."""
        return int(self.store.get("signal")) if self.store.check(["signal"]) else 0

    @contextlib.contextmanager
    def leaving_word(self):
        """Tell the other side of an error that ends this rank, so that it need not wait."""
        try:
            yield
        except BaseException as error:
            kind = type(error).__name__
            if isinstance(error, ValueError):
                kind = "ValueError"  # a task's, say, which has a name of its own
            text = str(error).partition("; this rank leaves")[0] or type(error).__name__
            word = {"side": self.name, "rank": self.rank, "kind": kind, "text": text[:2000]}
            # The first word stays: what ended because of it would say less.
            with contextlib.suppress(dist.DistError, RuntimeError):
                self.store.compare_set("failed", "", json.dumps(word))
                self._wait_until_heard()
            raise
        finally:
            self.leaving.set()

    def _wait_until_heard(self):
        """Rank 0 of the run may have the store, so it stays until the word is read, or a moment."""
        heard = [f"heard/{side}/{rank}" for side, rank in self.others]
        until = time.monotonic() + 5 * self.interval
        while (self.name, self.rank) == (GENERATOR, 0) and time.monotonic() < until:
            if self.store.check(heard):
                return
            time.sleep(self.PAUSE)

    def finish(self):
        """The last call of a run that has gone well. Returns when nobody needs the store any more.

        The store may live in a process of the run, its rank 0, which therefore leaves last.
        """
        for word in ("done", "leaving"):
            self.store.set(f"{word}/{self.name}/{self.rank}", "1")
            first = self.name == GENERATOR and self.rank == 0
            if word == "done" or first:
                self.wait_for(*(f"{word}/{side}/{rank}" for side, rank in self.others))

    # Messages ----------------------------------------------------------------------------------

    PIECE = 4 << 20  # bytes of a value: the store refuses more than 8 MiB

    def post(self, name, value) -> None:
        """Leave a JSON value in the store."""
        text = json.dumps(value).encode()
        count = 0
        for count, first in enumerate(range(0, len(text), self.PIECE), 1):
            self.store.set(f"{name}/{count}", text[first : first + self.PIECE])
        self.store.set(name, str(count))  # last: who sees it finds all pieces

    def read(self, name):
        """The value of that name, when it is there."""
        self.wait_for(name)
        count = int(self.store.get(name))
        pieces = [self.store.get(f"{name}/{n}") for n in range(1, count + 1)]
        return json.loads(b"".join(pieces))

    def delete(self, name) -> None:
        """Forget a value: the store lives as long as the run."""
        if self.store.check([name]):
            for n in range(int(self.store.get(name))):
                self.store.delete_key(f"{name}/{n + 1}")
            self.store.delete_key(name)


def connect_side(device, sizes, *, timeout=60, threads=1) -> Side:
    """`connect` for a run whose first ranks generate and whose other ranks train.

    sizes: {GENERATOR: ranks, TRAINER: ranks}. device, timeout, threads: as for `connect`.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != sum(sizes.values()):
        raise ValueError(
            f"generators on {sizes[GENERATOR]} and trainers on {sizes[TRAINER]} ranks of their own "
            f"are {sum(sizes.values())} ranks, but there are {world}: start so many, by torchrun, "
            f"or change --plan ('' for none)")
    torch.set_num_threads(threads)
    device = own_device(device)
    patience = datetime.timedelta(seconds=timeout)
    with naming_lost_ranks(lambda: "starting", "look at its error"):
        store, rank, world = next(dist.rendezvous("env://", timeout=patience))
        store = store_of_this_attempt(store, rank, world, timeout)
        name = GENERATOR
        if rank >= sizes[GENERATOR]:
            name = TRAINER
            rank -= sizes[GENERATOR]
        dist.init_process_group(
            backend_of(device), store=dist.PrefixStore(name, store), rank=rank,
            world_size=sizes[name], timeout=patience,
        )  # fmt: skip

        # The weights' own group: trainer rank 0, and behind it the generators.
        side = Side(name, rank, sizes, store.clone(), timeout)
        side.device = device
        side.weights = None
        if name == GENERATOR or rank == 0:
            place = rank + 1 if name == GENERATOR else 0
            store = dist.PrefixStore("weights", store)
            side.weights = dist.ProcessGroupGloo(store, place, sizes[GENERATOR] + 1, patience)
    return side


# Weights ---------------------------------------------------------------------------------------
#
# Behind each of its steps the trainer sends an order: the weights, and what the generators are to
# do with them. They come into a copy in the generator's host memory, made by a thread, so that the
# trainer need not wait until the generator has sampled what it is at:
#
#     trainer     step 0     send 1   step 1     send 2   step 2     ..
#     thread                 take 1              take 2
#     generator   sample with 0       sample with 1       sample with 2
#
# The copy is one version deep: a trainer that is two versions ahead waits in `send`.


class WeightSender:
    """The trainer's end. Collective over its ranks. generator: a model on the meta device that has
    the names, shapes and dtypes of what is sent; optimizer: the trainer's, which may have masters.
    """

    def __init__(self, side, model, optimizer, generator):
        self.side = side
        self.model = model
        self.optimizer = optimizer
        self.wanted = tensors_of(generator)
        self.count = 0  # orders given

    def send(self, order, weights=True) -> None:
        """Give an order, a dict of JSON values, and behind it the weights as they are now."""
        # COMM: a generator says that its copy is free before it waits for an order, and only then
        # the trainer sends; so the broadcast itself waits for nobody. All trainer ranks ask, since
        # they gather each tensor together. Pinned by
        # tests/test_apart.py::test_losing_a_rank_ends_the_run_in_time_and_says_which.
        generators = range(self.side.sizes[GENERATOR])
        self.side.wait_for(*(f"ready/{self.count}/{rank}" for rank in generators))
        first = self.side.rank == 0
        if first:
            # What everybody has read is forgotten.
            self.side.delete(f"order/{self.count - 1}")
            for rank in generators:
                self.side.delete(f"ready/{self.count - 1}/{rank}")
            order = order | {"weights": weights, "tensors": described(self.wanted)}
            self.side.post(f"order/{self.count}", order)
        self.count += 1
        if not weights:
            return

        dtype = next(q.dtype for q in self.wanted.values() if q.is_floating_point())
        weights_now = Weights(self.model, weights_to_push(self.model, self.optimizer, dtype))
        for name in sorted(self.wanted):
            dtype = self.wanted[name].dtype
            whole = weights_now.gathered(name, dtype, self.side.device)
            if first:
                try:
                    exchange(self.side, whole.to("cpu", dtype).contiguous())
                except RuntimeError as error:
                    raise self.side.lost_in_exchange(error) from error


def described(tensors) -> list:
    """[name, shape, dtype] of each tensor, in the order in which they are sent."""
    return [[name, list(q.shape), str(q.dtype)] for name, q in sorted(tensors.items())]


class WeightReceiver:
    """The generator's end: a thread that takes orders and weights while the generator works."""

    def __init__(self, side, generator):
        # Both ends go through the tensors by name, since their models may be cut differently.
        self.side = side
        tensors = tensors_of(generator)
        self.tensors = {name: tensors[name].detach() for name in sorted(tensors)}
        self.copy = {
            name: torch.empty_like(local(q), device="cpu") for name, q in self.tensors.items()
        }
        self.orders = []  # filled by the thread
        self.free = threading.Event()
        self.free.set()
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self):
        try:
            for count in itertools.count():
                # The main thread has its own connection and its own look at the other ranks.
                self._until(self.free.is_set)
                self.free.clear()
                self.side.post(f"ready/{count}/{self.side.rank}", 1)
                self._until(lambda: self.side.store.check([f"order/{count}"]))
                if self.side.leaving.is_set():
                    return
                order = self.side.read(f"order/{count}")
                if order["tensors"] != described(self.tensors):
                    raise ValueError("the trainer sends other tensors than the generator has")
                if order["weights"]:
                    self._receive()
                self.orders.append(order)
                if not order["weights"]:
                    return
        except Exception as error:  # raised in the main thread, by `next`
            self.orders.append(error)

    def _until(self, ready):
        while not (ready() or self.side.leaving.is_set()):
            time.sleep(self.side.PAUSE)

    @torch.no_grad()
    def _receive(self):
        for name, q in self.tensors.items():
            whole = torch.empty(q.shape, dtype=q.dtype)
            exchange(self.side, whole)
            part = whole
            if isinstance(q, DTensor):
                part = own_part(whole, q.device_mesh, q.placements)
            self.copy[name].copy_(part)

    @torch.no_grad()
    def next(self) -> dict:
        """The next order; its weights are in the generator then."""
        # What the thread has met is raised here, where somebody can end the run.
        self.side.wait(lambda: self.orders)
        order = self.orders.pop(0)
        if isinstance(order, ValueError):
            raise order
        if isinstance(order, Exception):
            raise self.side.lost_in_exchange(order) from order
        if order["weights"]:
            for name, q in self.tensors.items():
                local(q).copy_(self.copy[name])
            self.free.set()
        return order


def exchange(side, tensor) -> None:
    """Send a tensor from trainer rank 0 to all generators, or receive it there."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    side.weights.broadcast([tensor], options).wait()


# O. check -------------------------------------------------------------------------------------
#
# Two optimiser steps of a toy, ddp and fsdp on 1 to 3 ranks against `definition`, and every plan.
# Skip it: `python parallel.py check` runs it.


class _Toy(torch.nn.Module):
    """The shape that `shard` expects: `.model.layers` and a `.hidden`."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))
        self.head = torch.nn.Linear(5, 3)

    def hidden(self, x_BM):
        for layer in self.model.layers:
            x_BM = torch.tanh(layer(x_BM))
        return self.head(x_BM)


ROWS = 7  # of data
LR = 0.5
CLIP = 0.1, 1e9  # the first step clips, the second does not


def _toy():
    """The same toy and the same (ROWS, 5) data on every rank."""
    torch.manual_seed(0)
    return _Toy().double(), torch.randn(ROWS, 5).double()


def _toy_step(rank, world, mode, store, out):
    """What `definition` computes, by this file; rank 0 leaves the result in the file `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model, x_BM = _toy()
    if mode == "fsdp":
        shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    # This rank's rows are rank, rank + world, ..: unequal shares of 7 rows, so that a mean over
    # ranks would be wrong. Its loss is divided by the count of all rows.
    norms = []
    for max_norm in CLIP:
        (model.hidden(x_BM[rank::world]).square().sum() / ROWS).backward()
        reduce_gradients(model)
        norms.append(clip_grad_norm(model, max_norm))
        optimizer.step()
        optimizer.zero_grad()

    result = [torch.stack(norms), *(full(p.detach()).flatten() for p in model.parameters())]
    if rank == 0:
        torch.save(torch.cat(result), out)
    dist.barrier()
    dist.destroy_process_group()


def check() -> bool:
    """Norms and weights after two steps: every mode and number of ranks against `definition`."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode, world in itertools.product(("ddp", "fsdp"), (1, 2, 3)):
            store = f"{folder}/store-{mode}-{world}"
            out = f"{folder}/out-{mode}-{world}"
            torch.multiprocessing.start_processes(
                _toy_step, (world, mode, store, out), nprocs=world, start_method="fork"
            )
            results[f"{mode}, {world} ranks"] = torch.load(out, weights_only=True)

    # The truth comes behind the forks: autograd's threads do not survive one.
    model, x_BM = _toy()
    truth = definition(model, x_BM, lr=LR, max_norms=CLIP)
    rows = {}  # name -> the relative error, and what it may be
    for name, result in results.items():
        error = ((result - truth).abs() / truth.abs().clamp(min=1e-3)).max().item()
        rows[name] = (error, 1e-12)
    try:
        rows |= {name: (error, 1e-10) for name, error in _measuring_file().matrix().items()}
    except ImportError as missing:
        print(f"every other plan: SKIP ({missing}); it would compare them with one process")

    for name, (error, budget) in rows.items():
        print(f"{name:36} {error:.1e}  {'ok' if error <= budget else 'FAILED'}")
    ok = all(error <= budget for error, budget in rows.values())
    worst = max(error for error, _ in rows.values())
    print(json.dumps({"check": "parallel", "ok": ok, "max_error": worst}))
    return ok


def _measuring_file(name="measure_parallel"):
    """A file of tests/; ImportError where it, or a file that it needs, is missing."""
    sys.path.append(str(Path(__file__).resolve().parent / "tests"))
    return __import__(name)


def main(argv) -> int:
    """check is here; plan and bench are in tests/measure_parallel.py. The exit code."""
    if argv == ["check"]:
        return 0 if check() else 1

    # The rest is long, needs what only tests need, and is imported when asked for.
    if argv[:2] == ["check", "--device"]:
        return _measuring_file("measure_gpu").check("parallel", argv[1:])
    if argv and argv[0] in ("plan", "bench"):
        return _measuring_file().main(argv)
    print("usage: python parallel.py check [--device cuda] | plan STRING | bench", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

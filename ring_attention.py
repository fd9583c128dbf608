"""Exact attention over a sequence that is split over ranks, with its proof; on CPU and on CUDA.

Each rank keeps its queries, and blocks of keys and values travel round the ring. Attention over
one block comes with its log-sum-exp (lse). With it, two partial results merge into attention over
both sets of keys, in any order. The backward sends the blocks round once more, and their gradients
after them.

    python ring_attention.py check                     # 4 ranks on this CPU, every error, < 60 s
    python ring_attention.py bench                     # seconds, and percent of the ideal
    python ring_attention.py memory                    # peak memory by sequence length
    python ring_attention.py stress                    # values at the limits, bf16 training, PAD
    python ring_attention.py stress --model            # a VLA model on 2 rings of 2, 50 steps
    python ring_attention.py longest --budget-mb 300   # the longest sequence that fits
    torchrun --nproc-per-node 8 ring_attention.py check          # its ranks; NCCL where CUDA is

check needs this file alone (tests/measure_ring.py beside it adds lower dtypes and the work of each
rank). The other commands need that file too, and --model needs models.py and tests/measure_vla.py.

What it must equal, for each query i (each key head serves H / G query heads, in order):

    (1)  i sees j  iff  start_j <= i < end_j,  rows_i,  and position_i - position_j < window
    (2)  s_ij      =  scale q_i . k_j     (softcap tanh(s_ij / softcap) with a softcap)
    (3)  lse_i     =  log sum_{j seen} exp(s_ij),   out_i = sum_{j seen} exp(s_ij - lse_i) v_j
    (4)  a row that sees nothing: out 0, lse -inf, gradient 0 whatever arrives from upstream

Why the trick is allowed. For disjoint sets A and B of keys, (3) over both is, from the two parts,

    (5)  lse = log(exp lse_A + exp lse_B),   out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

The gradients, with P_ij = exp(s_ij - lse_i) and delta_i = dout_i . out_i - dlse_i of the *global*
out and lse, are sums over tiles (some queries against some keys), and each tile can be computed
anywhere, by torch's own flash kernel:

    (6)  dv_j = sum_i P_ij dout_i,          dS_ij = P_ij (dout_i . v_j - delta_i),
         dq_i = scale sum_j dS_ij k_j,      dk_j  = scale sum_i dS_ij q_i

The letters in the names of tensors. A capital is the same on every rank; a small letter is this
rank's share of it, or a part.

    B   batch                       S   tokens of the whole sequence, s of them on this rank
    H   query heads, h here         G   key heads, g here              D   head_dim
    q   queries of a call           k   keys of a call                 W   ranks
    b, i, j   batch rows, queries and keys of a tile
    r   the queries of a tile that read one key head, i H / G of them
    m   keys of the block that lies here          n   of the block that comes next
    p   keys of a block whose gradient is being summed up
    2   keys and values, stacked                  X   any dimension

    | method    | keys reach queries by   | numbers a rank sends, forward | keys and values held   |
    | ring      | W - 1 hops of a block   | 2 B G D S (W-1)/W at most     | two blocks             |
    | ulysses   | an all-to-all           | B D (2 H + 2 G') S/W (W-1)/W  | S tokens, 1/W of heads |
    | usp       | all-to-all, then a ring | those of both                 | 2 blocks, 1/u of heads |
    | allgather | one all-gather          | 2 B G D S (W-1)/W             | all S tokens           |

An all-to-all trades tokens for heads, so u ranks that do it need a number of key heads that u
divides: G' = lcm(G, u), for ulysses with u = W. usp arranges the ranks as c groups of u, with an
all-to-all in each group and a ring over the groups; a block is then a group's tokens. The ring's
backward sends the blocks again, and their gradients in float32 or better: twice the forward's bytes
in float32, three times in bf16. A hop that no rank needs (documents, windows) is not sent.

How it deviates. Ring Attention carries a running maximum and a sum, this file one lse for both.
Ulysses repeats key heads where there are too few. FlashMask keeps two intervals of hidden rows a
key, this file one interval of visible rows. The ranks compare digests of shapes, mask and options
at every call (0.4 ms on 2 ranks of gloo). To compare only when a shape is new would hang: a rank
that had seen the shape before would not send what another rank waits for.

Not here: dropout, additive biases, sinks, second derivatives, dv != dk, Sq != Sk across ranks.
torch.compile leaves these calls out of its graphs. On CUDA flash computes full and causal tiles of
bf16 and fp16, head_dim a multiple of 8 up to 256; what is left runs by the formulas in tiles
("math"), which is exact and slower.

References: Ring Attention arXiv:2310.01889; zigzag: Striped Attention arXiv:2311.09431, Llama 3
arXiv:2407.21783 (3.3.2); Ulysses arXiv:2309.14509; USP arXiv:2405.07719; FlashAttention-2
arXiv:2307.08691; FlashMask arXiv:2410.01359; pi0.7's ring: OpenTau PR 298 and issue 300.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import sys
import tempfile
import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

METHODS = ("ring", "allgather", "ulysses", "usp")  # how keys reach queries
LAYOUTS = ("zigzag", "contiguous")  # which tokens a rank holds
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALL = slice(None)


# 1. The definition ---------------------------------------------------------------------------

# What (1) says of queries, arrays (B, q), and of keys, (B, k), under the names that it uses. A part
# of a sequence keeps the indices of the whole, so that a shard is asked the same question.
Queries = namedtuple("Queries", "index rows position")
Keys = namedtuple("Keys", "index start end position")


def visible_pairs(queries, keys, window, /):
    """Equation (1): bool (B, q, k), True where query i sees key j.

    queries: Queries. keys: Keys. window: an integer, or None for none.

    A table of S^2 bits would say the same, at more memory than all the rest here. But in each mask
    that people train with, the queries that see key j are consecutive. So two integers a key tell
    who sees it: start, the first of these queries, and end, the one behind the last. The least and
    greatest of them over a tile tell whether nobody or everybody sees it (once the bits in rows and
    the window have been asked too). With 4 tokens:

        causal          documents 0 0 1 1      blocks 0 0 1 1        tree 0-(1-2, 3)
        j:     0 1 2 3  j:     0 1 2 3         j:     0 1 2 3        j:     0 1 2 3
        start: 0 1 2 3  start: 0 1 2 3         start: 0 0 2 2        start: 0 1 2 3
        end:   4 4 4 4  end:   2 2 4 4         end:   4 4 4 4        end:   4 3 3 4
        row 3: x x x x  row 3: . . x x         row 0: x x . .        row 3: x . . x

    Documents are packed sequences, each causal. Blocks see themselves both ways and all blocks
    before them (prefix-LM). A tree's tokens lie in preorder and see their ancestors: those who see
    key j are j and its descendants, the tokens right behind it. A PAD token has an empty interval
    as a key, and its bit in rows is off as a query. A `Mask` (appendix A) makes and holds the three
    arguments; `mask.slice(queries, keys)` is a part of it.
    """
    # In the tree key 1 has start 1 and end 3, so rows 1 and 2 see it, and row 3 does not.
    index_Bq1 = queries.index[:, :, None]
    see_Bqk = (keys.start[:, None] <= index_Bq1) & (index_Bq1 < keys.end[:, None])  # (1)
    see_Bqk &= queries.rows[:, :, None]

    # A window limits how far back a query looks; the interval decides about the keys ahead of it.
    # It measures positions: indices, or places within a document, or depths in a tree.
    if window is not None:
        position_Bq1 = queries.position[:, :, None]
        position_B1k = keys.position[:, None]
        see_Bqk &= position_Bq1 - position_B1k < window  # (1)
    return see_Bqk


def definition(q_BHqD, k_BGkD, v_BGkD, visible_BHqk, /, *, scale=None, softcap=None):
    """Equations (2) to (4) as they are written: what everything below must equal.

    It takes O(S^2) memory. visible_BHqk is bool and broadcastable, True where query i sees key j.
    Returns out_BHqD and lse_BHq, which autograd can differentiate.
    """
    # Grouped heads: H / G query heads read the same key head, so copy it as many times.
    group_size = q_BHqD.shape[1] // k_BGkD.shape[1]
    k_BHkD = k_BGkD.repeat_interleave(group_size, 1)
    v_BHkD = v_BGkD.repeat_interleave(group_size, 1)

    # Every query against every key: S^2 scores, which is what the rest of this file never holds.
    scale = q_BHqD.shape[-1] ** -0.5 if scale is None else scale
    s_BHqk = torch.einsum("bhqd,bhkd->bhqk", q_BHqD, k_BHkD) * scale  # (2)
    if softcap is not None:
        s_BHqk = softcap * torch.tanh(s_BHqk / softcap)

    # A softmax over nothing is 0 / 0. Let such a row see scores of 0, so that softmax and
    # logsumexp stay finite there, forward and backward, and overwrite what came out.
    visible_BHqk = visible_BHqk.expand_as(s_BHqk)
    dead_BHq = ~visible_BHqk.any(-1)
    s_BHqk = s_BHqk.masked_fill(~visible_BHqk, -math.inf).masked_fill(dead_BHq[..., None], 0.0)
    p_BHqk = torch.softmax(s_BHqk, -1).masked_fill(dead_BHq[..., None], 0.0)  # (4)
    lse_BHq = torch.logsumexp(s_BHqk, -1).masked_fill(dead_BHq, -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", p_BHqk, v_BHkD), lse_BHq  # (3)


# 2. One device: attention in tiles, merged ---------------------------------------------------
#
# The keys need not be seen at once. Attention over some of them gives an out and an lse; `merge`
# joins two such pairs. So the S x S scores never exist: `forward_tiles` computes them tile by
# tile, and `backward_tiles` computes them again. A ring is the same loop, with the tiles' keys on
# other machines.


def merge(out1, lse1, out2, lse2, /):
    """Equation (5): attention over two disjoint sets of keys, from that over each.

    out1, out2: (.., q, D) and lse1, lse2: (.., q); differentiable in all four. It computes in
    float32 or better; out comes back in the common dtype of out1 and out2. The pair (0, -inf) is
    neutral, and the order of merges does not matter.
    """
    # exp(lse) is how much softmax mass a set of keys holds. The mean of the two outputs, with these
    # masses as weights, is the output over both sets. Since both outputs are normalised already,
    # Ring Attention's running maximum and running sum are needed only as max + log(sum), the lse.
    #
    #     set     scores        mass   lse     values    out
    #     A       0, 0          2      log 2   1, 3      2
    #     B       log 2         2      log 2   6         6
    #     both    0, 0, log 2   4      log 4   1, 3, 6   (2 * 2 + 2 * 6) / 4 = 4
    narrow = torch.promote_types(out1.dtype, out2.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    lse1 = lse1.to(wide)
    lse2 = lse2.to(wide)

    # NUMERICS: the larger lse is subtracted, 0 where both are -inf: no overflow, no NaN. Pinned by
    # tests/test_attend.py::test_merge_of_dead_rows_has_clean_values_and_gradients.
    top = torch.maximum(lse1, lse2).detach()
    top = torch.where(top == -math.inf, 0.0, top)
    weight1 = torch.exp(lse1 - top)
    weight2 = torch.exp(lse2 - top)

    # A row that neither set of keys serves has total 0. It divides by 1 instead, so its out is 0.
    total = weight1 + weight2
    dead = total == 0
    total = torch.where(dead, 1.0, total)
    share1 = (weight1 / total)[..., None]
    share2 = (weight2 / total)[..., None]
    out = (out1 * share1).addcmul_(out2, share2)  # (5)
    lse = torch.where(dead, -math.inf, torch.log(total) + top)
    return out.to(narrow), lse


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How the tiles of one call are computed."""

    backend: str  # "fused": torch's flash kernel (appendix C); "math": the formulas just below
    scale: float
    softcap: float | None = None
    accurate: bool = False  # tiles of bf16 inputs in float32


def fold_heads(x_bHiX, g, /):
    """Makes the query heads of a key head into more rows of it: (b, H, i, X) -> (b, G, r, X).

    With r = i H / G rows against its one key head, a matmul needs no copies of k and v.
    """
    # H = 4, G = 2, i = 3: heads 0 and 1 become the 6 rows of key head 0, heads 2 and 3 those of 1.
    b, h, i, x = x_bHiX.shape
    return x_bHiX.reshape(b, g, h // g * i, x)


def tile_scores(q_bHiD, k_bGjD, visible, kernel):
    """Equation (2) of a tile, folded: scores s_bGrj with -inf where masked, and visible_bGrj.

    visible: bool, broadcastable to (b, H, i, j), or None where all is seen; then visible_bGrj is
    None too.
    """
    # One matmul a key head, of all query rows that read it.
    s_bGrj = fold_heads(q_bHiD, k_bGjD.shape[1]) @ k_bGjD.transpose(-1, -2) * kernel.scale  # (2)
    if kernel.softcap is not None:
        s_bGrj = kernel.softcap * torch.tanh(s_bGrj / kernel.softcap)
    if visible is None:
        return s_bGrj, None

    # Masked is -inf and not a large negative number. In a row that sees a key, in this tile or in
    # another, both come to a weight of 0. But the lse of a row that sees none at all would be that
    # number: P would be 1 for each masked key, and out the sum of values that it must not see.
    visible_bHij = visible.expand(*q_bHiD.shape[:3], k_bGjD.shape[2])
    visible_bGrj = fold_heads(visible_bHij, k_bGjD.shape[1])
    return s_bGrj.masked_fill(~visible_bGrj, -math.inf), visible_bGrj


def tile_forward(q_bHiD, k_bGjD, v_bGjD, visible, kernel, all_finite):
    """One tile of (3) and (4) by its formulas: out_bHiD and lse_bHi over these keys alone.

    q_bHiD: the tile's queries.
    k_bGjD, v_bGjD: its keys and values.
    visible: as in `tile_scores`.
    kernel: a Kernel, of which scale and softcap are used.
    all_finite: True if no NaN, inf or overflow can come, or nothing is masked, so that a plain
        matrix product is right.
    """
    s_bGrj, visible_bGrj = tile_scores(q_bHiD, k_bGjD, visible, kernel)
    lse_bGr = torch.logsumexp(s_bGrj, -1)

    # A row that sees nothing has the lse -inf, and -inf - -inf is NaN. With 0 in place of that lse
    # its P is exp(-inf) = 0 (4).
    finite_lse_bGr = lse_bGr.masked_fill(lse_bGr == -math.inf, 0.0)
    p_bGrj = torch.exp(s_bGrj - finite_lse_bGr[..., None])

    # P of a masked key is 0, but 0 * NaN is NaN: with `@` a NaN in one masked value would reach the
    # rows that do not see it. `matmul_of_seen` is `@` without that.
    out_bGrD = matmul_of_seen(p_bGrj, v_bGjD, visible_bGrj, all_finite)  # (3)
    return out_bGrD.reshape(q_bHiD.shape), lse_bGr.reshape(q_bHiD.shape[:3])


def tile_backward(
    dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi, dlse_bHi, visible, kernel, all_finite
):
    """One tile of (6) by its formulas: its parts of dq_bHiD, dk_bGjD, dv_bGjD.

    dout_bHiD: the gradient that arrives for out.
    q_bHiD, k_bGjD, v_bGjD: the tile's queries, keys, values.
    out_bHiD, lse_bHi: the result for these queries over *all* keys, not over the tile's.
    dlse_bHi: the gradient that arrives for lse.
    visible, kernel, all_finite: as in `tile_forward`.
    """
    # A softmax's gradient needs two sums over *all* keys: the one that normalises P, which is in
    # lse, and sum_j P_ij (dout_i . v_j), which is dout_i . out_i. With the global lse and out both
    # are final, so no tile needs to know of another one.
    s_bGrj, visible_bGrj = tile_scores(q_bHiD, k_bGjD, visible, kernel)
    delta_bHi = (dout_bHiD * out_bHiD).sum(-1) - dlse_bHi

    # One key head at a time, as for the scores. The sums over r in dk and dv then run over all
    # query heads that read this key head, which is the gradient of having copied it.
    g = k_bGjD.shape[1]
    q_bGrD = fold_heads(q_bHiD, g)
    dout_bGrD = fold_heads(dout_bHiD, g)
    lse_bGr1 = fold_heads(lse_bHi[..., None], g)
    delta_bGr1 = fold_heads(delta_bHi[..., None], g)

    # dS with the factor `scale` in it, which dq and dk share. s_bGrj is c tanh(x / c) already, of
    # which the derivative is 1 - tanh^2 = 1 - (s / c)^2.
    p_bGrj = torch.exp(s_bGrj - lse_bGr1)
    ds_bGrj = p_bGrj * (dout_bGrD @ v_bGjD.transpose(-1, -2) - delta_bGr1) * kernel.scale  # (6)
    if kernel.softcap is not None:
        ds_bGrj = ds_bGrj * (1 - (s_bGrj / kernel.softcap) ** 2)

    # Masked pairs give exp(-inf) = 0 by themselves, unless an lse, v or dout is NaN: then P and dS
    # are NaN there, and one bad token would reach keys that it does not see.
    seen_bGjr = None
    if visible_bGrj is not None:
        p_bGrj = p_bGrj.where(visible_bGrj, 0.0)
        ds_bGrj = ds_bGrj.where(visible_bGrj, 0.0)
        seen_bGjr = visible_bGrj.transpose(-1, -2)

    dq_bGrD = matmul_of_seen(ds_bGrj, k_bGjD, visible_bGrj, all_finite)  # (6)
    dk_bGjD = matmul_of_seen(ds_bGrj.transpose(-1, -2), q_bGrD, seen_bGjr, all_finite)
    dv_bGjD = matmul_of_seen(p_bGrj.transpose(-1, -2), dout_bGrD, seen_bGjr, all_finite)
    return dq_bGrD.reshape(q_bHiD.shape), dk_bGjD, dv_bGjD


def forward_tiles(q_BHqD, k_BGkD, v_BGkD, mask, kernel, before=None, more=False, /):
    """(3) and (4), tile by tile, outside autograd: out_BHqD and lse_BHq in float32 or better.

    mask: a Mask of q queries and k keys, or None where everything is seen. kernel: a Kernel.
    before: this pair of the same queries over other keys, to merge these keys into; it is used up.
    more: whether the result will be such a `before`.
    """
    # A row that no tile has come to has out 0 and lse -inf, which is (4) and neutral under `merge`:
    # Parts (appendix C) writes that where it is needed.
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)
    out_before = lse_before = None
    if before is not None:
        out_before, lse_before = before
    out = Parts(q_BHqD, wide, 0.0, out_before, more)
    lse = Parts(q_BHqD[..., 0], wide, -math.inf, lse_before, more)

    # The mask cuts itself into boxes: rows = (batch rows, all heads, queries) are indices into q,
    # columns = (batch rows, all heads, keys) into k and v. A box in which nobody sees anything is
    # left out, so a causal mask costs half. One in which all is seen, or exactly the causal
    # triangle, comes without a bool tensor (visible is None), as flash kernels like it.
    given = q_BHqD, k_BGkD, v_BGkD
    (q, k, v), all_finite, tiles = cut_into_tiles("forward", kernel, mask, *given)
    for rows, columns, visible, causal, tile_kernel in tiles:
        # Attention of these rows over these columns alone, by the formulas or by torch's kernel.
        # Both give the same pair, so what follows need not know which it was.
        if tile_kernel.backend == "math":
            wider = (x.to(wide) for x in (q[rows], k[columns], v[columns]))
            part_out, part_lse = tile_forward(*wider, visible, tile_kernel, all_finite)
        else:
            part_out, part_lse = fused_tile_forward(
                q[rows], k[columns], v[columns], visible, causal, tile_kernel.scale
            )

        # Tiles of the same rows hold other keys, so they merge. For the first tile of its rows
        # there is nothing to merge with yet, and it is the result so far.
        if out.has_any(rows):
            part_out, part_lse = merge(out.at(rows), lse.at(rows), part_out, part_lse)  # (5)
        out.put(rows, part_out)
        lse.put(rows, part_lse)
    return out.whole(), lse.whole()


def backward_tiles(
    dout_BHqD, q_BHqD, k_BGkD, v_BGkD, out_BHqD, lse_BHq, dlse_BHq, mask, kernel, before=None, /
):
    """(6), tile by tile: dq_BHqD, dk_BGkD, dv_BGkD in float32 or better.

    dout_BHqD: the gradient that arrives for out.
    q_BHqD, k_BGkD, v_BGkD: as in the forward, and here again because no scores were kept.
    out_BHqD, lse_BHq: of these queries over all keys, wherever those are.
    dlse_BHq: the gradient that arrives for lse; None for zero.
    mask, kernel: as in `forward_tiles`.
    before: dq_BHqD of the same queries over other keys, to add these keys' part to; it is used up.
    """
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)

    # NUMERICS: (4). A row that saw nothing has the lse -inf, and exp(-inf - -inf) is NaN. With an
    # lse of 0 its P is exp(-inf - 0) = 0, since all its scores are -inf. Its dout (and dlse, below)
    # become 0 too, so that its delta is 0 and not whatever arrives. Pinned by
    # tests/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
    dead_BHq = lse_BHq == -math.inf
    if dead_BHq.any():
        lse_BHq = lse_BHq.masked_fill(dead_BHq, 0.0)
        dout_BHqD = dout_BHqD.masked_fill(dead_BHq[..., None], 0.0)

    # d lse_i / d s_ij is P_ij, so a gradient of lse enters (6) through delta alone. torch's kernels
    # compute a delta without it. So where there is one, the formulas compute every tile.
    if dlse_BHq is None:
        dlse_BHq = torch.zeros_like(lse_BHq)
    else:
        kernel = dataclasses.replace(kernel, backend="math")
        dlse_BHq = dlse_BHq.masked_fill(dead_BHq, 0.0)

    # The same boxes as in the forward. Each makes its P again from q, k and lse, so that a training
    # step holds the scores of one tile at a time and never those of all.
    given = q_BHqD, k_BGkD, v_BGkD, out_BHqD, dout_BHqD
    (q, k, v, out, dout), all_finite, tiles = cut_into_tiles("backward", kernel, mask, *given)
    dq = Parts(q, wide, 0.0, before)
    dk = Parts(k, wide, 0.0)
    dv = Parts(v, wide, 0.0)

    # The gradients are plain sums over tiles. Nothing is merged here: the weights are in P already.
    for rows, columns, visible, causal, tile_kernel in tiles:
        block = dout[rows], q[rows], k[columns], v[columns], out[rows]
        if tile_kernel.backend == "math":
            wider = (x.to(wide) for x in block)
            part_dq, part_dk, part_dv = tile_backward(
                *wider, lse_BHq[rows], dlse_BHq[rows], visible, tile_kernel, all_finite
            )
        else:
            part_dq, part_dk, part_dv = fused_tile_backward(
                *block, lse_BHq[rows], visible, causal, tile_kernel.scale
            )
        dq.add(rows, part_dq)
        dk.add(columns, part_dk)
        dv.add(columns, part_dv)
    return dq.whole(), dk.whole(), dv.whole()


class _Attend(torch.autograd.Function):
    """`forward_tiles` with `backward_tiles` as its gradient."""

    @staticmethod
    def forward(ctx, q, k, v, mask, kernel):
        out, lse = forward_tiles(q, k, v, mask, kernel)
        out = out.to(q.dtype)

        # These five are O(S). Autograd through the tiles would keep every tile's P, O(S^2) in all.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask = mask
        ctx.kernel = kernel
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        refuse_second_derivative()
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        grads = backward_tiles(dout, q, k, v, out, lse, dlse, ctx.mask, ctx.kernel)
        return (*(grad.to(q.dtype) for grad in grads), None, None)


def not_compiled(function):
    """Keeps a function out of torch.compile's graphs; imports the compiler only where it runs."""

    # Masks are numpy arrays and a ring's messages are no tensor operations: no graph can hold them.
    @functools.wraps(function)
    def call(*args, **options):
        run = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return run(*args, **options)

    return call


@not_compiled
def attend(q, k, v, /, mask=None, *, scale=None, softcap=None, backend=None, accurate=False):
    """Attention with its log-sum-exp on one device: equations (1) to (4), differentiable.

    q: (B, H, q, D), any strides.
    k, v: (B, G, k, D) of q's dtype: float64, float32, bf16 or fp16. H is a multiple of G, and D is
        1 to 512.
    mask: a Mask, or bool (B, 1 or H, q, k); None: everything is seen.
    scale: D^-1/2 by default.
    softcap: a positive number, or None for none.
    backend: see `choose_backend`.
    accurate: computes the tiles of bf16 inputs in float32.

    Returns out (B, H, q, D) in q's dtype and lse (B, H, q) in float32 or float64: the natural log,
    of the scaled scores, differentiable too. A row that sees nothing has 0 and -inf. Raises
    ValueError if the input does not fit.
    """
    # What does not fit is refused here; behind this line nothing looks at shapes again.
    mask = as_mask(mask)
    check_inputs(q, k, v, mask, q.shape[2:3], k.shape[2:3])
    return _Attend.apply(q, k, v, mask, make_kernel(q, scale, softcap, backend, accurate))


# 3. Across ranks: who holds what, and what travels -------------------------------------------
#
# Rank r holds the queries, keys and values of its tokens: its shard. Queries stay. Its keys and
# values are block r, which starts out there and goes one rank to the right at each hop. So during
# hop h block r lies with rank r + h, and rank r has block r - h (modulo W). After W - 1 hops each
# block has met all queries. With 3 ranks:
#
#     hop      rank 0    rank 1    rank 2
#      0       block 0   block 1   block 2        each rank attends to its own keys
#      1       block 2   block 0   block 1        .. and to its left neighbour's
#      2       block 1   block 2   block 0
#
# A `Route` (appendix D) answers what depends on the mask:
#
#     block_at(hop)            the block that lies with this rank
#     own_block                the block that began here: this rank's number
#     mask_of(block)           the mask of our queries against its keys
#     is_needed(block, hop)    whether our queries see any of it (hop 0: always; hop `hops`: never)
#     last_hop[block]          the last hop at which a rank needs it (0: only its owner does)
#     hops                     how many hops, hop 0 included, until no rank needs any block
#     buffer(like, block)      an empty tensor for a block, or for its gradient
#
# and, of the sum of a block's gradients, which follows it in the backward:
#
#     gradient_moves(block, hop)    whether the sum goes one rank on: in each hop up to last_hop,
#                                   after the first one at which another than the owner needed it
#     gradient_returns(block, hop)  whether the sum is complete and goes to the owner: in the hop
#                                   after last_hop, unless that is 0
#
# All ranks have the whole mask and work out the same answers, so that sender and receiver of each
# message know of it without asking. `post` starts messages and returns what to wait for.

TAG_BLOCK, TAG_GRADIENT, TAG_HOME = range(3)  # what a message carries; gloo tells them apart by it


def indices(length, rank, world, layout="zigzag"):
    """int64 (s,): the global index of each token of a rank's shard, ascending; RoPE needs it.

    "contiguous" cuts the sequence into `world` chunks and gives chunk r to rank r. "zigzag" cuts it
    into 2 world chunks and gives chunks r and 2 world - 1 - r to rank r. Chunks may be unequal, or
    empty. Raises ValueError for another layout, a rank that is not in the world, or a negative
    length.
    """
    # Under a causal mask a late query sees more keys than an early one. With contiguous chunks the
    # last of W ranks has almost 2 - 1/W times the mean work, the more nearly the longer the
    # sequence, and all wait for it. An early chunk and its mirror image together have the mean.
    # Length 8, world 2:
    #
    #     zigzag        rank 0 holds 0 1 . . . . 6 7, and they see 1 + 2 + 7 + 8 = 18 keys
    #                   rank 1 holds . . 2 3 4 5 . .               3 + 4 + 5 + 6 = 18
    #     contiguous    10 on rank 0, 26 on rank 1, which is 1.44 times the mean
    if layout not in LAYOUTS:
        raise ValueError(f'layout must be "zigzag" or "contiguous"; came {layout!r}')
    if not 0 <= rank < world or length < 0:
        raise ValueError(f"need 0 <= rank < world, length >= 0; came {rank}, {world}, {length}")
    chunks = [rank] if layout == "contiguous" else [rank, 2 * world - 1 - rank]
    num_chunks = world if layout == "contiguous" else 2 * world
    edges = [c * length // num_chunks for c in range(num_chunks + 1)]
    return torch.cat([torch.arange(edges[c], edges[c + 1]) for c in chunks])


def onward(route, block_2BgmD, hop, /):
    """The messages that move every block one rank on, and room for the block that comes here.

    Returns next_2BgnD, without tokens if no block comes, and the list that `Route.post` takes:
    (send or receive, tensor, rank, tag).
    """
    # Blocks bear the number of the rank on which they began. So own_block is this rank's number,
    # and own_block + 1 the right neighbour's (`post` takes it modulo W).
    leaving = route.block_at(hop)
    coming = route.block_at(hop + 1)
    messages = []

    # A block travels to the last rank that needs it and no further. Ranks on its way that do not
    # need it pass it on.
    if route.last_hop[leaving] > hop:
        messages.append((dist.isend, block_2BgmD, route.own_block + 1, TAG_BLOCK))
    next_2BgnD = block_2BgmD[:, :, :, :0]
    if route.last_hop[coming] > hop:
        next_2BgnD = route.buffer(block_2BgmD, coming)
        messages.append((dist.irecv, next_2BgnD, route.own_block - 1, TAG_BLOCK))
    return next_2BgnD, messages


def ring_forward(q_BhqD, k_BgkD, v_BgkD, route, kernel, probe, /):
    """(5) round the ring: out_BhqD and lse_Bhq of this rank's queries over everybody's keys.

    q_BhqD: this rank's queries, which stay.
    k_BgkD, v_BgkD: its keys and values, its block at hop 0.
    route: the Route of this call.
    kernel: the Kernel of its tiles.
    probe: looks for values that are not finite (appendix F), if the caller wants that.

    Both results are in float32 or better.
    """
    # Keys and values travel together, so that a hop is one message and not two.
    block_2BgmD = torch.stack((k_BgkD, v_BgkD))
    so_far = None  # out_BhqD and lse_Bhq over the blocks that have been here

    for hop in range(route.hops):
        # COMM: each rank posts its send to the right and its receive from the left, then computes,
        # then waits. So the next block travels while this one is computed; and since nobody waits
        # before it has posted, ranks cannot wait for each other in a circle. Pinned by
        # tests/test_ring.py::test_double_buffering_hides_a_delay_on_the_wire.
        next_2BgnD, messages = onward(route, block_2BgmD, hop)
        under_way = route.post(messages)

        # Our queries against the block that lies here now. With documents or a window they may see
        # nothing in it: it was passed on, but there is nothing to compute. Our own block, at hop 0,
        # is always computed, so that out and lse exist even if no row sees anything. One rank's
        # blocks come in another order than its neighbour's: (5) allows that.
        block = route.block_at(hop)
        if route.is_needed(block, hop):
            given = q_BhqD, *block_2BgmD, route.mask_of(block), kernel
            so_far = forward_tiles(*given, so_far, hop + 1 < route.hops)
            probe.look(hop + 1, "out", so_far[0])

        # Only now must the next block be here, and only now may the old one be overwritten.
        for message in under_way:
            message.wait()
        block_2BgmD = next_2BgnD
    return so_far


def ring_backward(dout_BhqD, q_BhqD, k_BgkD, v_BgkD, out, lse, dlse, route, kernel, probe, /):
    """(6) round the ring: dq_BhqD, dk_BgkD, dv_BgkD of this rank's tokens, in float32 or better.

    dout_BhqD: the gradient that arrives for this rank's out.
    q_BhqD, k_BgkD, v_BgkD: as in the forward.
    out, lse: what the forward gave, over everybody's keys.
    dlse: the gradient that arrives for lse, or None.
    route, kernel, probe: as in the forward.
    """
    # dq stays here, for the queries do. But the gradient of a block is a sum over all ranks whose
    # queries saw it, and it belongs to the rank where the block began. So the blocks travel as in
    # the forward, and behind each block, one hop later, travels the sum of its gradients so far.
    # Block 0 of 3 ranks:
    #
    #     hop   the block   computed there             the sum that follows it
    #      0    on rank 0   rank 0's part, own_2BgkD   none: this part stays on rank 0
    #      1    on rank 1   rank 1's part              begins as this part
    #      2    on rank 2   rank 2's part              goes to rank 2, which adds its part
    #      3    nowhere                                goes home to rank 0, which adds own_2BgkD
    #
    # Hence one hop more than in the forward, in which nothing is computed. If a block travelled
    # together with its gradient instead, each hop would have to compute first and send then, and
    # nothing would overlap.
    block_2BgmD = torch.stack((k_BgkD, v_BgkD))
    dq_BhqD = own_2BgkD = None  # both begin at hop 0
    sum_2BgpD = None  # when a hop begins: the sum for the block that lay here at the hop before

    for hop in range(route.hops + 1):
        # The blocks go round as in the forward: the backward saved none but its own.
        block = route.block_at(hop)
        block_before = route.block_at(hop - 1)
        next_2BgnD, messages = onward(route, block_2BgmD, hop)

        # COMM: what hop - 1 computed is on the wire while this hop computes. Blocks, gradients, and
        # gradients that go home, in one order on both sides (NCCL), with tags (gloo). Pinned by
        # tests/test_ring.py::test_bytes_on_the_wire_match_the_formula.
        incoming_2BgpD = None
        if route.gradient_moves(block_before, hop):
            messages.append((dist.isend, sum_2BgpD, route.own_block + 1, TAG_GRADIENT))
        if route.gradient_moves(block, hop):
            incoming_2BgpD = route.buffer(own_2BgkD, block)
            messages.append((dist.irecv, incoming_2BgpD, route.own_block - 1, TAG_GRADIENT))

        # When the last rank that needed a block has added its part, the sum is complete and goes to
        # its owner, rank block_before, in one message, whatever the distance. Ours comes from where
        # our block lay at the hop before: hop - 1 ranks to our right.
        returned_2BgkD = None
        if route.gradient_returns(block_before, hop):
            messages.append((dist.isend, sum_2BgpD, block_before, TAG_HOME))
        if route.gradient_returns(route.own_block, hop):
            returned_2BgkD = torch.empty_like(own_2BgkD)
            messages.append((dist.irecv, returned_2BgkD, route.own_block + hop - 1, TAG_HOME))
        under_way = route.post(messages)

        # Meanwhile this rank's part for the block that lies here. out and lse are the global ones,
        # so the parts are final: those of dq are added up here, never weighted as in the forward.
        sum_2BgpD = None
        if route.is_needed(block, hop):
            saved = dout_BhqD, q_BhqD, *block_2BgmD, out, lse, dlse
            mask = route.mask_of(block)
            dq_BhqD, part_dk, part_dv = backward_tiles(*saved, mask, kernel, dq_BhqD)
            sum_2BgpD = torch.stack((part_dk, part_dv))
            probe.look(hop + 1, "dq, dk or dv", dq_BhqD, sum_2BgpD)
        if hop == 0:
            own_2BgkD = sum_2BgpD

        # The sums meet: what came with the block (from the left), and what we have just computed.
        for message in under_way:
            message.wait()

        # NUMERICS: parts are summed in float32 or better, in the order of the hops. Pinned by
        # tests/test_ring.py::test_gradients_travel_in_float32_or_better.
        if incoming_2BgpD is not None:
            sum_2BgpD = incoming_2BgpD if sum_2BgpD is None else sum_2BgpD.add_(incoming_2BgpD)
        if returned_2BgkD is not None:
            own_2BgkD.add_(returned_2BgkD)
        block_2BgmD = next_2BgnD

    dk_BgkD, dv_BgkD = own_2BgkD
    return dq_BhqD, dk_BgkD, dv_BgkD


# 4. The public calls -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """What the ranks of a ring agreed on for one call; the backward uses it again."""

    route: object  # a Route: who holds what, and which hops are needed
    kernel: Kernel
    method: str  # one of METHODS
    debug: object  # False, True, or a label for error messages
    return_lse: bool  # whether a gradient of lse can arrive


class _RingAttention(torch.autograd.Function):
    """The forward and the backward of all four methods; q, k, v are this rank's shards."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        route = call.route
        probe = Probe(call.debug, route.ring, "forward")
        for name, x in (("q", q), ("k", k), ("v", v)):
            probe.look(0, name, x)

        # Ulysses: within groups of u ranks an all-to-all trades this rank's tokens of all heads for
        # all its group's tokens of 1/u of the heads, since heads do not need each other. From here
        # to the last line, q, k and v are these. A block of the ring is a group's keys and values,
        # and a hop leads from group to group. For method "ring" u is 1, and nothing happens; for
        # "ulysses" u is W, and the ring has one hop. Each rank must have whole heads, so where u
        # does not divide G, key heads are repeated until it does.
        repeat = math.lcm(k.shape[1], route.inner) // k.shape[1]
        if repeat > 1:
            k = k.repeat_interleave(repeat, 1)
            v = v.repeat_interleave(repeat, 1)
        q, k, v = (swap(x, route) for x in (q, k, v))

        # All keys at once need no merge and one message, but the memory of the whole sequence.
        if call.method == "allgather":
            kv = gather_blocks(k, v, route)
            out, lse = forward_tiles(q, *kv, route.mask_of(None), call.kernel)
            probe.look(1, "out", out)
        else:
            out, lse = ring_forward(q, k, v, route, call.kernel, probe)
        probe.raise_on_all_ranks()

        # Saved are this rank's own q, k, v, out, lse, and no block of another rank: the backward
        # gets them again by the same route, so that memory stays O(S / W).
        # NUMERICS: lse stays in float32 or better; in bf16 the gradients are 10 to 80 times worse.
        # Pinned by tests/test_ring_faults.py::test_the_suite_catches_eight_planted_faults.
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.repeat = repeat
        return swap(out, route, back=True), swap(lse[..., None], route, back=True)[..., 0]

    @staticmethod
    def backward(ctx, dout, dlse):
        # Ours are q, k, v and dout; out and lse are of our queries too, but over everybody's keys.
        refuse_second_derivative()
        q, k, v, out, lse = ctx.saved_tensors
        call = ctx.call
        route = call.route
        probe = Probe(call.debug, route.ring, "backward")
        probe.look(0, "dout", dout)

        # COMM: autograd gives zeros for an output that this rank's loss leaves out, so all ranks
        # send the same messages, whichever outputs each of them uses. Pinned by
        # tests/test_ring.py::test_ranks_may_use_different_outputs.
        dout = swap(dout, route)
        dlse = swap(dlse[..., None], route)[..., 0] if call.return_lse else None

        # A gradient of lse that is all zero is as good as none, and none lets flash kernels run.
        if dlse is not None and not dlse.any():
            dlse = None

        # After an all-gather each rank has a part of every token's dk and dv: sum over ranks, and
        # keep our tokens. In the ring the sums came home by themselves.
        if call.method == "allgather":
            kv = gather_blocks(k, v, route)
            mask = route.mask_of(None)
            dq, dk, dv = backward_tiles(dout, q, *kv, out, lse, dlse, mask, call.kernel)
            probe.look(1, "dq, dk or dv", dq, dk, dv)
            dk, dv = scatter_sum(torch.stack((dk, dv)), 3, route.ring, route.layout)
        else:
            dq, dk, dv = ring_backward(dout, q, k, v, out, lse, dlse, route, call.kernel, probe)
        probe.raise_on_all_ranks()

        # The forward's first lines, backwards: heads for tokens again, then the copies of each key
        # head summed into the one that they were copied from.
        # NUMERICS: copies of a key head are summed before the cast. Pinned by
        # tests/test_ring.py::test_every_layout_and_method_is_the_definition.
        dq, dk, dv = (swap(x, route, back=True) for x in (dq.to(q.dtype), dk, dv))
        dk, dv = (x.unflatten(1, (-1, ctx.repeat)).sum(2).to(q.dtype) for x in (dk, dv))
        return dq, dk, dv, None


@not_compiled
def ring_attention(
    q, k, v, /, *, group=None, mask=None, layout="zigzag", method="ring", scale=None, softcap=None,
    return_lse=False, backend=None, accurate=False, inner=None, batch=None, debug=False,
):  # fmt: skip
    """Attention of a whole sequence whose shards the ranks of a group hold: (1) to (4), exactly.

    Every rank of the group calls it, forward and backward.

    q: (B, H, s, D), the tokens `indices(S, rank, world, layout)` of this rank.
    k, v: (B, G, s, D), the same tokens, in q's dtype.
    group: a process group; None: all ranks, or a world of 1 where torch.distributed is off.
    mask: of the whole sequence, the same on every rank: a Mask or bool (B, 1 or H, S, S); None:
        everything is seen.
    layout: "zigzag" or "contiguous", see `indices`.
    method: "ring"; "allgather"; "ulysses" (H a multiple of the world); "usp".
    inner: for "usp", how many ranks trade heads by all-to-all; by default the largest proper
        divisor of the world that divides H. If that is 1, it is the ring.
    scale, softcap, backend, accurate: as in `attend`.
    return_lse: returns lse beside out.
    batch: nested tensors and values, say the tokens, of which all ranks must have the same.
    debug: True, or a label ("step 3 layer 7"): if any tensor, its masked part included, is not
        finite, a FloatingPointError on every rank names rank, block and tensor.

    Returns out (B, H, s, D) in q's dtype; with return_lse also lse (B, H, s), float32 or float64.
    Raises ValueError on every rank, before a block is sent, if the input of any rank does not fit
    or the ranks' inputs differ.
    """
    # A rank that raised an error alone would leave the others waiting in the first hop. So the
    # ranks first compare what came, and go on together or raise together (appendix F).
    options = dict(
        layout=layout, method=method, scale=scale, softcap=softcap, return_lse=return_lse,
        backend=backend, accurate=accurate, inner=inner, debug=debug,
    )  # fmt: skip
    call = agree_on_call(ring_of(group), q, k, v, mask, batch, **options)
    out, lse = _RingAttention.apply(q, k, v, call)
    return (out, lse) if return_lse else out


def shard(x, /, *, dim, group=None, layout="zigzag"):
    """This rank's tokens of a whole x that every rank has: x along dim at `indices`.

    Its gradient is 0 at the other ranks' tokens. So what made x gets, on each rank, the gradient
    of that rank's tokens: sum it over ranks.
    """
    ring = ring_of(group)
    return x.index_select(dim, indices(x.shape[dim], ring.rank, ring.world, layout).to(x.device))


def unshard(x, /, *, dim, group=None, layout="zigzag", length):
    """The whole along dim, of `length` tokens, on every rank; x holds this rank's tokens.

    Its gradient is the sum over ranks of what they do with the whole, cut back to this rank's
    tokens (a reduce-scatter). If all W ranks compute the same loss from the whole, the sum counts
    that loss W times, and the loss must be divided by W (`loss_scale`, in appendix G, has the
    factor, also where gradients are averaged later). Every rank of the group calls it, forward and
    backward. Raises ValueError if x has not the tokens of `indices`.
    """
    return _Unshard.apply(x, dim % x.ndim, ring_of(group), layout, length)


# =============================================================================================
# The idea ends here. What follows makes it fast, strict or connected.
# =============================================================================================


# Appendix A. Masks: the constructors ----------------------------------------------------------
# For: the masks that `visible_pairs` pictures, from what a data loader has; and parts of them.
# Skip it unless you audit a mask: each constructor only works out start and end of a picture.

NEVER = 1 << 60  # the start of an interval that holds no row
ANY = 1 << 60  # as a largest side: no limit


class Mask:
    """Which query sees which key: equation (1), one interval of rows a key.

    start_BS, end_BS: (B, S) or (S,) integers (torch, numpy, lists); key j is seen by the queries
        start_j up to end_j - 1. An interval may be empty.
    rows_BS: bool, off where a query sees nothing (PAD).
    window: the keys with position_i - position_j < window are seen, the query itself included.
    position_BS: what a window measures; the index by default.

    A batch of 1 serves any batch. Raises ValueError if shapes or types do not fit. Pictures of the
    usual masks are in `visible_pairs`.
    """

    def __init__(self, start_BS, end_BS, *, rows_BS=None, position_BS=None, window=None):
        # Copies of our own, so that a caller may write on into his arrays.
        given = {"start": start_BS, "end": end_BS, "rows": rows_BS, "position": position_BS}
        given = {name: as_integers(x, name) for name, x in given.items() if x is not None}
        shape = given["start"].shape
        if {x.shape for x in given.values()} - {shape, (1, shape[1])}:
            shapes = ", ".join(f"{name} {x.shape}" for name, x in given.items())
            raise ValueError(f"the parts of a mask must have one shape (B, S); came {shapes}")

        # From here on each part is there and has the shape (B, S).
        parts = {name: np.broadcast_to(x, shape) for name, x in given.items()}
        index_BS = np.broadcast_to(np.arange(shape[1]), shape)
        position_BS = parts.get("position", index_BS)
        rows_BS = parts.get("rows", np.ones(shape, int)) != 0

        # An empty interval may come as 5..5 or 7..2. All become NEVER..0: then the smallest start
        # and the largest end over a tile's keys are those of the keys that somebody sees.
        void_BS = parts["start"] >= parts["end"]
        start_BS = np.where(void_BS, NEVER, parts["start"])
        end_BS = np.where(void_BS, 0, parts["end"])
        self.queries = Queries(index_BS, rows_BS, position_BS)
        self.keys = Keys(index_BS, start_BS, end_BS, position_BS)
        self.window = checked_window(window)
        self.cache = {}  # boxes, digest and routes, found once and used in every layer and step

    @classmethod
    def full(cls, length):
        """Everything sees everything."""
        return cls(np.zeros(length, int), np.full(length, length))

    @classmethod
    def causal(cls, length, *, batch=1, window=None):
        """Each token sees itself and what came before it."""
        # From the key's side: j is seen from row j on, to the last.
        index_BS = np.tile(np.arange(length), (batch, 1))
        return cls(index_BS, np.full_like(index_BS, length), window=window)

    @classmethod
    def documents(cls, *, doc_ids=None, position_ids=None, window=None):
        """Packed documents, each causal.

        doc_ids: (B, S), one number a document; -1 is PAD, which may stand anywhere.
        position_ids: (B, S); a document starts where a position is not the one before plus 1; -1
            is PAD. A document that starts at previous + 1 needs doc_ids. If both come, doc_ids
            decide, with a warning, and position_ids only measure the window.

        Raises ValueError if neither comes, or if a document comes back after another one.
        """
        doc_BS, position_BS = document_numbers(doc_ids, position_ids)
        rows_BS = doc_BS >= 0
        start_BS = np.zeros_like(doc_BS)
        end_BS = np.zeros_like(doc_BS)  # 0..0 where nothing is written: PAD is seen by nobody

        # As if causal, but a key's interval ends where the next document begins. It may run over
        # PAD, whose rows are off anyway.
        #
        #     doc_ids    7 7 . 2 2 2        ".": PAD
        #     start      0 1 . 3 4 5        document 7: first token 0, run of 2
        #     end        3 3 . 6 6 6        document 2: first token 3, run of 3
        for row, (tokens, first, run) in enumerate(runs_of_labels(doc_BS, rows_BS)):
            if len(np.unique(doc_BS[row, first])) < len(first):
                raise ValueError(f"row {row}: a document id comes back after another one")
            next_first = np.append(first, doc_BS.shape[1])[1:]
            start_BS[row, tokens] = tokens
            end_BS[row, tokens] = np.repeat(next_first, run)
        return cls(start_BS, end_BS, rows_BS=rows_BS, position_BS=position_BS, window=window)

    @classmethod
    def blocks(cls, block_BS, valid_BS=None):
        """Block-causal, prefix-LM (pi0.7): a token sees its own block and all blocks before it.

        block_BS: (B, S) integers, ascending over valid tokens. valid_BS: off for PAD, anywhere.
        Raises ValueError where block numbers go down.
        """
        block_BS = as_integers(block_BS, "block")
        valid_BS = np.ones_like(block_BS) if valid_BS is None else as_integers(valid_BS, "valid")

        # A key is seen from its block's first row on, even if that lies before the key itself. So
        # the tokens of a block see each other both ways.
        start_BS = np.zeros_like(block_BS)
        end_BS = np.where(valid_BS != 0, block_BS.shape[1], 0)
        for row, (tokens, first, run) in enumerate(runs_of_labels(block_BS, valid_BS != 0)):
            if (np.diff(block_BS[row, tokens]) < 0).any():
                raise ValueError(f"row {row}: block numbers go down; sort the tokens by block")
            start_BS[row, tokens] = np.repeat(first, run)
        return cls(start_BS, end_BS, rows_BS=valid_BS)

    @classmethod
    def padding(cls, valid_BS, *, causal=True):
        """PAD tokens (off in valid_BS, anywhere) see nothing and are seen by nothing."""
        valid_BS = as_integers(valid_BS, "valid")
        start_BS = np.zeros_like(valid_BS)
        if causal:
            start_BS = start_BS + np.arange(valid_BS.shape[1])
        return cls(start_BS, np.where(valid_BS != 0, valid_BS.shape[1], 0), rows_BS=valid_BS)

    @classmethod
    def tree(cls, subtree_end_S, position_S=None, window=None):
        """A token tree in DFS preorder: a token sees its ancestors and itself.

        subtree_end_S: (S,) or (B, S), the index after a token's last descendant. position_S: depth,
        which a window measures; counted from the ends by default. Raises ValueError if the ends are
        not those of a tree.
        """
        # In preorder the descendants of j are the tokens right behind it. They are the ones that
        # have j as an ancestor, so the rows that see key j are j .. subtree_end_j - 1: an interval.
        end_BS = as_integers(subtree_end_S, "subtree_end")
        index_S = np.arange(end_BS.shape[1])
        if (end_BS <= index_S).any() or (end_BS > len(index_S)).any():
            raise ValueError("subtree_end[j] must lie in j + 1 .. S")
        depth_BS = np.stack([preorder_depth(end_S) for end_S in end_BS])
        position_BS = depth_BS if position_S is None else position_S
        start_BS = np.broadcast_to(index_S, end_BS.shape)
        return cls(start_BS, end_BS, position_BS=position_BS, window=window)

    def dense(self):
        """bool (B, 1, Sq, Sk): equation (1), written out."""
        return torch.from_numpy(visible_pairs(self.queries, self.keys, self.window))[:, None]

    def slice(self, queries, keys, batch=ALL, heads=ALL):
        """The part for some queries and keys: slices, or ascending arrays, of local indices.

        i and j keep their meaning, which is global. So a part may be a shard against a block, or a
        suffix against a cache (Sq != Sk). An interval mask is the same for all heads.
        """
        queries_at = checked_index(queries)
        keys_at = checked_index(keys)
        return self._changed(
            queries=Queries(*(x[batch, queries_at] for x in self.queries)),
            keys=Keys(*(x[batch, keys_at] for x in self.keys)),
        )

    def with_window(self, window):
        """The same mask with another window (None: none), for models whose layers differ."""
        key = ("window", checked_window(window))
        if key not in self.cache:  # kept, so that the next step finds its boxes again
            self.cache[key] = self if window == self.window else self._changed(window=window)
        return self.cache[key]

    def _changed(self, **changes):
        """A copy with some attributes changed, and with a cache of its own."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, cache={}, **changes)
        return other

    @property
    def shape(self):
        """(batch, heads, queries, keys) of `dense()`; 1 serves any batch and any heads."""
        return self.queries.rows.shape[0], 1, self.queries.rows.shape[1], self.keys.end.shape[1]

    def classify(self, row_edges, key_edges):
        """Kinds of the tiles that begin at these ascending edges; a causal one is PARTIAL."""
        return kinds_of_tiles(self, row_edges, key_edges)

    def regions(self, tile, join=32, square=ANY):
        """[(batch, queries, keys, kind)]: disjoint boxes, as slices, with all that is visible.

        A PARTIAL box is at most `tile` long, but `join` equal neighbours may be one. A CAUSAL box
        is at most `square` long; with a square of 0 there is none. See appendix B.
        """
        key = ("regions", tile, join, square)
        if key not in self.cache:
            if 0 < square < ANY:
                # Forward and backward want squares of two lengths: one search serves both.
                whole = self.regions(tile, join)
                self.cache[key] = with_squares_cut(whole, square, tile * join)
            else:
                self.cache[key] = find_boxes(self, tile, join, square)
        return self.cache[key]

    def digest(self):
        """A 63-bit number that two masks share only if they are the same."""
        if "digest" not in self.cache:
            parts = [y for x in (*self.queries, *self.keys) for y in (x.shape, x.tobytes())]
            self.cache["digest"] = digest(self.window, *parts)
        return self.cache["digest"]


class DenseMask(Mask):
    """A bool tensor (B, 1 or H, Sq, Sk) for what is not an interval: the caller's O(S^2) memory."""

    def __init__(self, dense):
        if not isinstance(dense, torch.Tensor) or dense.ndim != 4 or dense.dtype != torch.bool:
            came = getattr(dense, "dtype", type(dense)), tuple(getattr(dense, "shape", ()))
            raise ValueError(f"a mask is a Mask or a bool tensor (B, 1 or H, Sq, Sk); came {came}")
        self.bits = dense.detach().to("cpu", copy=True)
        self.cache = {}

    shape = property(lambda self: tuple(self.bits.shape))

    def with_window(self, window):
        if window is not None:
            raise ValueError("a dense mask has no positions: put the window into it, or use a Mask")
        return self

    def slice(self, queries, keys, batch=ALL, heads=ALL):
        bits = self.bits[batch, heads if self.bits.shape[1] > 1 else ALL]
        return DenseMask(bits[:, :, checked_index(queries)][..., checked_index(keys)])

    def dense(self):
        return self.bits

    def digest(self):
        return digest(self.shape, self.bits.numpy().tobytes())

    def classify(self, row_edges, key_edges):
        # A tile is full if all of its bits are on in all heads, and empty if none is in any.
        def tiles(reduction):
            bits = reduction.reduce(self.bits.numpy(), axis=1)
            bits = reduction.reduceat(bits, row_edges, axis=1)
            return reduction.reduceat(bits, key_edges, axis=2)

        full = tiles(np.logical_and)
        visible = tiles(np.logical_or)
        return np.where(full, FULL, np.where(visible, PARTIAL, EMPTY))


def as_mask(mask):
    """A Mask, from a Mask, a dense bool tensor, or None."""
    return mask if mask is None or isinstance(mask, Mask) else DenseMask(mask)


def as_integers(x, name):
    """A copy of x as int64 (B, S); one row may come as (S,). ValueError for anything else."""
    array = np.array(x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or (array.size and array.dtype.kind not in "iub"):
        came = f"{array.dtype} {array.shape}"
        raise ValueError(f"a mask's {name} must be (B, S) or (S,) integers; came {came}")
    return array.astype(np.int64)


def checked_index(index):
    """A slice or an int64 array that picks tokens in ascending order, or ValueError."""
    if isinstance(index, slice) and (index.step or 1) > 0:
        return index
    array = np.asarray(index)
    if (array.size and array.dtype.kind not in "iu") or (np.diff(array) < 1).any():
        raise ValueError("a mask is sliced by slices or arrays of integers, both ascending")
    return array.astype(np.int64)


def checked_window(window):
    """The window, or ValueError if it is neither None nor an integer of at least 1."""
    if window is not None and (not isinstance(window, (int, np.integer)) or window < 1):
        raise ValueError(f"a window is None or an integer of at least 1; came {window!r}")
    return window


def document_numbers(doc_ids, position_ids):
    """doc_BS, one number a document with -1 for PAD, and position_BS or None: `Mask.documents`."""
    position_BS = None if position_ids is None else as_integers(position_ids, "position_ids")
    if doc_ids is not None:
        doc_BS = as_integers(doc_ids, "doc_ids")
        if position_BS is not None:
            warnings.warn("doc_ids and position_ids both came: doc_ids decide", stacklevel=3)
        return doc_BS, position_BS
    if position_BS is None:
        raise ValueError("documents need doc_ids or position_ids of shape (B, S); neither came")

    # A document starts where a position is not the one before plus 1. Counting the jumps numbers
    # the documents:
    #
    #     position  4 5 6 0 1 -1 0        a -2 stands before the first, so it is a jump
    #     jump      1 0 0 1 0  1 0        from -1 to 0 is none, but the jump to -1 has counted
    #     document  1 1 1 2 2 -1 3
    jump_BS = np.diff(position_BS, axis=1, prepend=-2) != 1
    return np.where(position_BS < 0, -1, np.cumsum(jump_BS, axis=1)), position_BS


def runs_of_labels(label_BS, valid_BS):
    """Per row: indices of the valid tokens, the first index of each run of one label, run lengths.

    PAD may stand anywhere, also inside a run:

        label  7 7 . 7 2 2        tokens  0 1 3 4 5
                                  first   0 4
                                  length  3 2
    """
    for label_S, valid_S in zip(label_BS, valid_BS, strict=True):
        tokens = np.flatnonzero(valid_S)
        new = tokens  # of no tokens there is no first
        if len(tokens):
            new = np.flatnonzero(np.diff(label_S[tokens], prepend=label_S[tokens[0]] - 1))
        yield tokens, tokens[new], np.diff(np.append(new, len(tokens)))


def preorder_depth(end_S):
    """Depth of each token of a preorder; ValueError where a subtree ends after its parent's."""
    # A token's ancestors are those whose subtrees began before it and have not ended. All tokens
    # before it began one, so the depth is the index less the number of subtrees that have ended.
    #
    #     end    4 3 3 4       0-(1-2, 3)
    #     ended  0 0 0 2       subtrees 1 and 2 end where token 3 begins
    #     depth  0 1 2 1
    index_S = np.arange(len(end_S))
    slots = len(end_S) + 1
    ended_S = np.cumsum(np.bincount(end_S, minlength=slots)[:-1])
    depth_S = index_S - ended_S

    # A parent is the last token before, one level up. Sorted by (depth, index) as one number, it is
    # the entry before the place where (depth - 1, index) would stand.
    by_depth = np.sort(depth_S * slots + index_S)
    parent_S = by_depth[np.searchsorted(by_depth, (depth_S - 1) * slots + index_S) - 1] % slots
    wrong = np.flatnonzero((depth_S > 0) & (end_S > end_S[parent_S]))
    if len(wrong):
        raise ValueError(f"subtree_end[{wrong[0]}] lies outside the subtree of its parent")
    return depth_S


# Appendix B. Masks: finding boxes -------------------------------------------------------------
# For: speed. It cuts what is visible into few boxes, most of which need no mask inside.
# Skip it if you believe that boxes are disjoint and hold every visible pair: test_mask.py shows it.

EMPTY, PARTIAL, FULL, CAUSAL = range(4)  # kinds of a tile of queries against a tile of keys


def kinds_of_tiles(mask, row_edges, key_edges):
    """(B, rows, columns) of EMPTY, PARTIAL, FULL for the tiles that begin at these edges.

    It is safe and not sharp: a tile of whose pairs none is visible may be called PARTIAL.
    """

    def least(x_BS, edges):
        return np.minimum.reduceat(x_BS, edges, axis=1)

    def most(x_BS, edges):
        return np.maximum.reduceat(x_BS, edges, axis=1)

    # The first and the last row of each tile that see anything; (B, rows, 1) against (B, 1, keys).
    index, rows, position = mask.queries
    first = least(np.where(rows, index, NEVER), row_edges)[:, :, None]
    last = most(np.where(rows, index, -1), row_edges)[:, :, None]
    every_row = least(rows, row_edges)[:, :, None]

    # Nobody sees anything if all intervals begin behind the last row, or end before the first.
    # Everybody sees everything if all begin by the first row and end behind the last.
    _, start, end, position_k = mask.keys
    empty = least(start, key_edges)[:, None] > last
    empty |= most(end, key_edges)[:, None] <= first
    full = most(start, key_edges)[:, None] <= first
    full &= least(end, key_edges)[:, None] > last
    full &= every_row

    # A window hides the whole tile if even the nearest pair is too far apart, and hides nothing if
    # the farthest pair is near enough.
    if mask.window is not None:
        nearest = least(position, row_edges)[:, :, None] - most(position_k, key_edges)[:, None]
        farthest = most(position, row_edges)[:, :, None] - least(position_k, key_edges)[:, None]
        empty |= nearest >= mask.window
        full &= farthest < mask.window
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL))


def find_boxes(mask, tile, join, square):
    """[(batch, queries, keys, kind)] for `Mask.regions`: disjoint, with all that is visible.

    Edges stand where the structure changes (a document, block, chunk, fork) and at most `tile`
    apart, so that most boxes are FULL or CAUSAL. CAUSAL neighbours along the diagonal become one
    square with what lies below them, if `square` is not 0. Of the rest, up to `join` neighbours of
    one kind become one box along the keys, and up to `join` FULL ones along the queries.
    """
    # Batch rows that are equal and lie side by side share their boxes, and so their kernel calls.
    boxes = []
    for batch in equal_batch_rows(mask):
        first = batch.start or 0
        one = mask.slice(ALL, ALL, slice(first, first + 1))
        boxes += [(batch, *box) for box in boxes_of_one(one, tile, join, square)]
    return boxes


def equal_batch_rows(mask):
    """Slices of consecutive batch rows that are equal; a batch of 1 is for every row."""
    batch = mask.shape[0]
    if batch == 1:
        return [ALL]
    if isinstance(mask, DenseMask):  # not worth a comparison of S^2 bits
        return [slice(b, b + 1) for b in range(batch)]

    # Row b begins a run if any part of the mask differs from row b - 1.
    differs = np.zeros(batch - 1, bool)
    for x in (*mask.queries, *mask.keys):
        differs |= (x[1:] != x[:-1]).any(axis=1)
    edges = [0, *(np.flatnonzero(differs) + 1).tolist(), batch]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def boxes_of_one(mask, tile, join, square):
    """[[queries, keys, kind]] of a mask of batch 1."""
    num_rows, num_keys = mask.shape[2:]
    if not num_rows or not num_keys:
        return []
    row_edges, key_edges = structure_edges(mask, tile)
    kinds = mask.classify(row_edges, key_edges)[0]
    row_edges = [*row_edges, num_rows]
    key_edges = [*key_edges, num_keys]

    # What a causal kernel computes comes first, and leaves the grid. A causal mask of 12 tokens
    # with tile 4 is one square, of which nothing else remains:
    #
    #     rows 0-3     CAUSAL EMPTY  EMPTY
    #     rows 4-7     FULL   CAUSAL EMPTY      gives (0-11, 0-11, CAUSAL)
    #     rows 8-11    FULL   FULL   CAUSAL
    boxes = []
    squares = causal_squares(mask, row_edges, key_edges) if square else []
    for tiles in squares:
        kinds[tiles.rows, tiles.keys] = EMPTY
        rows = slice(row_edges[tiles.rows.start], row_edges[tiles.rows.stop])
        keys = slice(key_edges[tiles.keys.start], key_edges[tiles.keys.stop])
        boxes.append([rows, keys, CAUSAL])

    # The rest goes strip by strip, from the top. A prompt of 4 tokens with answers of 4 and 8 makes
    # the squares of tokens 0-7 and 8-15, and below the first of them remains:
    #
    #     rows 8-11    FULL   EMPTY
    #     rows 12-15   FULL   EMPTY             gives (8-15, 0-3, FULL)
    full_above = {}  # keys of a FULL box that ends where this strip begins -> the box
    for row_start, row_stop, kind in zip(row_edges, row_edges[1:], kinds, strict=False):
        # Equal neighbours along the keys are one box, up to `join` of them.
        new = np.diff(kind, prepend=-1) != 0
        starts = np.flatnonzero(new | (np.arange(len(kind)) % join == 0))
        full_here = {}
        for c, stop in zip(starts, [*starts[1:], len(kind)], strict=True):
            span = key_edges[c], key_edges[stop]
            if kind[c] == EMPTY:
                continue
            box = full_above.get(span) if kind[c] == FULL else None

            # A FULL box below a FULL box of the same keys makes that one longer.
            if box and row_stop - box[0].start <= tile * join:
                box[0] = slice(box[0].start, row_stop)
            else:
                box = [slice(row_start, row_stop), slice(*span), kind[c]]
                boxes.append(box)
            if kind[c] == FULL:
                full_here[span] = box
        full_above = full_here
    return boxes


# Tiles on the diagonal, of the same tokens both ways: slices of the grid's tiles; the index of the
# last query; where the first of the keys' intervals ends; the extremes of what a window measures.
Square = namedtuple("Square", "rows keys last end latest earliest")


def causal_squares(mask, row_edges, key_edges):
    """The largest Squares that a causal kernel computes, from the top; disjoint.

    Their tokens are the same both ways, and each sees itself and all before it in the square.
    """
    if isinstance(mask, DenseMask):
        return []
    index_q, sees, position_q = (x[0] for x in mask.queries)
    index_k, start, end, position_k = (x[0] for x in mask.keys)

    def computable(square):
        # No interval may end inside, and no pair may lie outside the window.
        if square.end <= square.last:
            return False
        return mask.window is None or square.latest - square.earliest < mask.window

    # The tile of keys that begins with the token of a tile of queries stands on the diagonal.
    key_tile = {index_k[edge]: c for c, edge in enumerate(key_edges[:-1])}
    squares = []
    for r, (row_start, row_stop) in enumerate(zip(row_edges, row_edges[1:], strict=False)):
        c = key_tile.get(index_q[row_start])
        if c is None:
            continue

        # The same tokens, none of them PAD, and each key is seen from itself on.
        i = slice(row_start, row_stop)
        j = slice(key_edges[c], key_edges[c + 1])
        if not np.array_equal(index_q[i], index_k[j]):
            continue
        if not sees[i].all() or not np.array_equal(start[j], index_k[j]):
            continue
        tile = Square(
            slice(r, r + 1),
            slice(c, c + 1),
            index_q[row_stop - 1],
            end[j].min(),
            position_q[i].max(),
            position_k[j].min(),
        )

        # It makes the square above it longer, if the two are one still; or it begins another.
        if squares and squares[-1].rows.stop == r and squares[-1].keys.stop == c:
            above = squares[-1]
            both = Square(
                slice(above.rows.start, r + 1),
                slice(above.keys.start, c + 1),
                tile.last,
                min(above.end, tile.end),
                max(above.latest, tile.latest),
                min(above.earliest, tile.earliest),
            )
            if computable(both):
                squares[-1] = both
                continue
        if computable(tile):
            squares.append(tile)
    return squares


def with_squares_cut(boxes, square, full):
    """Boxes of `find_boxes` whose CAUSAL ones are cut by `halves`."""
    cut = []
    for batch, rows, keys, kind in boxes:
        parts = [[rows, keys, kind]]
        if kind == CAUSAL:
            parts = halves(rows, keys, square, full)
        cut += [(batch, *part) for part in parts]
    return cut


def halves(rows, keys, square, full=ANY):
    """[[queries, keys, kind]] of a causal square.

    square, full: how many queries a CAUSAL box and a FULL box may have.

    The lower half of the rows sees the upper half of the keys wholly. The rest is two squares:

        C . . .
        F C . .      length 4, square 1: two FULL boxes of one token, one of two, four CAUSAL
        F F C .
        F F F C
    """
    length = rows.stop - rows.start
    if length <= square:
        return [[rows, keys, CAUSAL]]

    # The upper half of the queries sees no key of the lower half, so there are three parts.
    upper_rows = slice(rows.start, rows.start + length // 2)
    upper_keys = slice(keys.start, keys.start + length // 2)
    lower_rows = slice(upper_rows.stop, rows.stop)
    lower_keys = slice(upper_keys.stop, keys.stop)
    below = []
    for start in range(lower_rows.start, lower_rows.stop, full):
        below.append([slice(start, min(start + full, lower_rows.stop)), upper_keys, FULL])
    upper = halves(upper_rows, upper_keys, square, full)
    return upper + below + halves(lower_rows, lower_keys, square, full)


def structure_edges(mask, tile):
    """Edges along the queries and along the keys, at the same tokens: two ascending lists."""
    if isinstance(mask, DenseMask):
        return [list(range(0, n, tile)) for n in mask.shape[2:]]

    # Global tokens at which what is seen changes: where an interval ends, where the starts do not
    # go on by 0 (a block) or 1 (causal), and at a fork of a tree, below which not all is seen by
    # all. Documents 0 0 0 1 1, whose starts are 0 1 2 3 4 and ends 3 3 3 5 5, give 0, 3, 5.
    _, start, end, _ = (x[0] for x in mask.keys)
    rows_index = mask.queries.index[0]
    keys_index = mask.keys.index[0]
    jumps = np.flatnonzero(~np.isin(np.diff(start), (0, 1))) + 1
    seen = np.flatnonzero(start < end)
    forks = seen[1:][np.diff(end[seen]) < 0]
    places = [start[:1], start[jumps], end, keys_index[forks]]

    # In a shard also where a chunk begins, and behind the last token.
    for index in (rows_index, keys_index):
        chunk_starts = np.flatnonzero(np.diff(index, prepend=-9) != 1)
        places += [index[chunk_starts], index[-1:] + 1]
    places = np.unique(np.concatenate(places))
    places = spaced_edges(places[places < NEVER], tile)

    # From global tokens to places in this part of the sequence.
    edges = []
    for index in (rows_index, keys_index):
        local = np.unique(np.append(0, np.searchsorted(index, places)))
        edges.append(local[local < len(index)].tolist())
    return edges


def spaced_edges(places, tile):
    """Edges at these places, at most one in each half tile, and then at most `tile` apart.

    With tile 4, places 0 1 5 12: 0 and 1 lie in one half tile, of which 0 stays; 5 tokens to the
    next place are 2 tiles, and 7 are 2, so the edges are 0 2, 5 8, 12.
    """
    half_tile = places // max(tile // 2, 1)
    spaced = places[np.unique(half_tile, return_index=True)[1]]
    stops = [*spaced[1:], *places[-1:]]
    edges = [places[:0]]
    for a, b in zip(spaced, stops, strict=True):
        n = max(-(-(b - a) // tile), 1)  # tiles from a to b, rounded up
        edges.append(a + np.arange(n) * (b - a) // n)
    return np.unique(np.concatenate(edges))


# Appendix C. Kernels: torch's flash attention, and which tiles it may compute ------------------
# For: speed on CPU and CUDA, and values that are not finite. The formulas of section 2 suffice.
# Skip it unless you audit a dtype, a NaN under a mask, or the arguments of a kernel call.

# Side of a PARTIAL tile, how many equal neighbours may be one call, and the longest causal square
# that is one call, in the forward and in the backward. Of torch's CPU kernels the forward skips
# what lies above the diagonal, in steps of some 100 keys; the backward in steps of 512, so halves
# of a square down to 128 are faster there (8 heads of 64, float32, ns a visible pair of one head):
#
#     length of the square            128   256   512   1024   2048   4096
#     forward, one call               5.3   4.5   4.6    3.3    2.7    2.4     (a FULL box: 2.1)
#     backward, one call               12    11    11    8.0    6.6    5.8     (a FULL box: 5.1)
#     backward_tiles, halves to 128    15    11   9.5    7.9    6.2    5.6     (with its sums)
Sizes = namedtuple("Sizes", "tile join forward backward")
TILES = {
    "cpu": Sizes(tile=128, join=32, forward=ANY, backward=128),
    "cuda": Sizes(tile=1024, join=1024, forward=ANY, backward=ANY),
    "math": Sizes(tile=512, join=1, forward=0, backward=0),
}
KEPT_PAIRS = 1 << 22  # of PARTIAL tiles, whose masks stay with a mask for all layers: 5 bytes each


def make_kernel(q, scale, softcap, backend, accurate):
    """The Kernel of a call; ValueError for a scale, softcap or backend that cannot be."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number or None; came {value!r}")
    backend = choose_backend(q, softcap=softcap, backend=backend, accurate=accurate)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Kernel(backend, float(scale), softcap, bool(accurate))


def choose_backend(q, /, *, softcap=None, backend=None, accurate=False):
    """The backend that `attend` takes for queries like q (B, H, q, D): "fused" if the kernel can.

    backend: None, "math" or "fused". Raises ValueError, which says why, where "fused" is asked for
    and the kernel cannot.
    """
    why = None
    if softcap is not None:
        why = "torch's flash kernels have no softcap"
    elif q.device.type == "cuda" and (accurate or q.dtype not in (torch.bfloat16, torch.float16)):
        why = "on CUDA flash takes bf16 and fp16, and has no accurate mode"
    elif q.device.type == "cuda" and (q.shape[-1] % 8 or q.shape[-1] > 256):
        why = f"on CUDA flash needs a head_dim that is a multiple of 8 to 256; came {q.shape[-1]}"
    elif q.device.type not in ("cpu", "cuda"):
        why = f"no flash kernel is known for {q.device.type}"

    # The caller's wish comes first, if it can be.
    if backend not in (None, "math", "fused"):
        raise ValueError(f'backend must be None, "math" or "fused"; came {backend!r}')
    if backend == "fused" and why:
        raise ValueError(f'backend="fused" cannot do this: {why}; pass backend=None')
    return backend or ("math" if why else "fused")


def tile_dtype(kernel, q):
    """The dtype in which the tiles of queries like q are computed."""
    # NUMERICS: torch's CPU kernel takes 10 times as long in fp16 and rounds each tile's result;
    # float32 tiles do neither. "math" is float32 or float64 always. Pinned by
    # tests/test_attend.py::test_low_precision_stays_within_twice_the_error_of_sdpa.
    half_cpu = q.dtype == torch.float16 and q.device.type == "cpu"
    wide = kernel.accurate or half_cpu or kernel.backend == "math"
    return torch.promote_types(q.dtype, torch.float32) if wide else q.dtype


def cut_into_tiles(direction, kernel, mask, q, k, *others):
    """What `forward_tiles` and `backward_tiles` loop over.

    direction: "forward" or "backward".
    kernel, mask, q, k, others: their arguments.

    Returns the tensors in the dtype of the tiles; all_finite, see below; and an iterator of (rows,
    columns, visible, causal, kernel), the first two being indices into q and k. visible is None
    where all is seen or causal says what is, a bool tensor for the formulas, a Bias for the kernel.
    """
    if mask is None:
        mask = nothing_hidden(q.shape[2], k.shape[2])

    # With another stride than 1 in the last dimension torch's CPU kernel is silently wrong.
    tensors = [x.to(tile_dtype(kernel, q)) for x in (q, k, *others)]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]

    # NUMERICS: torch's kernels multiply what is masked by 0. Beside NaN, inf, or numbers of which a
    # product overflows, only tiles that use `matmul_of_seen` are right. Norms below 1e18 exclude
    # all three (Cauchy-Schwarz); a larger one costs time and nothing else. Pinned by
    # tests/test_attend.py::test_huge_finite_numbers_in_a_pad_token_reach_no_row.
    # Where no tile has a masked pair, scores alone matter: the lse of a row of which all are -inf
    # is 0 by the kernel. Pinned by tests/test_attend.py::test_a_row_of_minus_inf_has_no_mass.
    boxes = boxes_of(direction, kernel, mask, q)
    looked_at = tensors
    if all(kind == FULL for *_, kind in boxes):
        looked_at = tensors[:2]
    all_finite = all(is_tame(x) for x in looked_at)
    if not all_finite:
        kernel = dataclasses.replace(kernel, backend="math")
        tensors = [x.to(tile_dtype(kernel, q)) for x in tensors]
        boxes = boxes_of(direction, kernel, mask, q)

    def tiles():
        for batch, queries, keys, kind in boxes:
            visible = None
            tile_kernel = kernel

            # Only what is neither full nor the kernel's own triangle needs a mask, of tile size.
            if kind == PARTIAL:
                if q.device.type == "cuda":  # flash takes no mask there
                    tile_kernel = dataclasses.replace(kernel, backend="math")
                like = None if tile_kernel.backend == "math" else tensors[0]
                visible = visible_inside(mask, batch, queries, keys, q.device, like)
            rows = batch, ALL, queries
            columns = batch, ALL, keys
            yield rows, columns, visible, kind == CAUSAL, tile_kernel

    return tensors, all_finite, tiles()


def is_tame(x) -> bool:
    """Whether no entry is NaN or inf, nor so large that a product with another could be."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return bool(torch.linalg.vector_norm(x, dtype=wide) < 1e18)


def boxes_of(direction, kernel, mask, q):
    """The boxes of a mask, of the size that is fastest for this kernel on this device."""
    sizes = TILES["math" if kernel.backend == "math" else q.device.type]
    return mask.regions(sizes.tile, sizes.join, getattr(sizes, direction))


class Parts:
    """A tensor (B, heads, tokens, ..) that tiles put together, each at its index.

    like: a tensor of its shape and device.
    empty: what tokens hold that no tile has come to. It is not written beforehand: a pass over all
        tokens, nearly always for nothing, would cost as much as adding a tile's part.
    before: the tensor so far, which is gone on with; None: nothing has come to any token.
    more: whether the result will be the `before` of another.
    """

    def __init__(self, like, dtype, empty, before=None, more=False):
        self.like = like
        self.dtype = dtype
        self.empty = empty
        self.more = more
        self.tensor = before
        self.is_ours = True
        self.begun_Bs = np.full((like.shape[0], like.shape[2]), before is not None)

    def has_any(self, index) -> bool:
        """Whether a part has come to any of these tokens. index: slices of B, heads, tokens."""
        return bool(self.begun_Bs[index[0], index[2]].any())

    def writable(self):
        """The tensor, made where there is none, and copied where it is not ours to change."""
        # The heads of a token lie side by side, as torch's kernels give a part, and as a model's
        # next product reads the whole without a copy.
        if self.tensor is None:
            b, h, s, *rest = self.like.shape
            tensor = torch.empty((b, s, h, *rest), dtype=self.dtype, device=self.like.device)
            self.tensor = tensor.transpose(1, 2)
        elif not self.is_ours:
            self.tensor = self.tensor.clone()
        self.is_ours = True
        return self.tensor

    def fill(self, index):
        """Writes `empty` to those of these tokens that no part has come to."""
        missing_bs = ~self.begun_Bs[index[0], index[2]]
        if self.tensor is None or missing_bs.any():
            here = self.writable()[index]
            missing = torch.from_numpy(missing_bs).to(here.device)
            missing = missing.reshape(len(missing), 1, -1, *[1] * (here.ndim - 3))
            here.masked_fill_(missing, self.empty)

    def at(self, index):
        """What has come to these tokens so far."""
        self.fill(index)
        return self.tensor[index]

    def put(self, index, part, *, ours=False):
        """These tokens are the part from now on. A part of all tokens is not even copied.

        ours: whether such a part may be changed later. What a kernel gave in the forward may not:
            under selective checkpointing autograd keeps it.
        """
        if part.shape == self.like.shape and (ours or not self.more):
            self.tensor = part.to(self.dtype)
            self.is_ours = ours
        else:
            self.writable()[index] = part
        self.begun_Bs[index[0], index[2]] = True

    def add(self, index, part):
        """The part, a kernel's in the backward, is added to what has come to these tokens."""
        if not self.has_any(index):
            self.put(index, part, ours=True)
            return
        self.fill(index)
        self.writable()[index].add_(part)
        self.begun_Bs[index[0], index[2]] = True

    def whole(self):
        """All tokens, in the end."""
        self.fill((ALL, ALL, ALL))
        return self.tensor


@functools.lru_cache(maxsize=64)
def nothing_hidden(num_queries, num_keys):
    """The Mask under which so many queries see all of so many keys."""
    longest = Mask.full(max(num_queries, num_keys))
    return longest.slice(slice(num_queries), slice(num_keys))


# What torch's CPU kernel takes in place of a bool mask, 0 or -inf a pair; and the rows of a tile
# that see none of its keys (b, H, i), or None where each sees one.
Bias = namedtuple("Bias", "pairs blind")


def visible_inside(mask, batch, queries, keys, device, like):
    """Which pairs of a PARTIAL tile are visible: bool, or a Bias in the dtype of `like`.

    It is kept with the mask, so that the next layer, and the backward, need not make it again.
    """
    first = batch.start or 0
    kept = mask.cache.setdefault("inside", {})
    place = first, queries.start, queries.stop, keys.start, keys.stop
    key = *place, device, None if like is None else like.dtype
    if key in kept:
        return kept[key]

    part = mask.slice(queries, keys, slice(first, first + 1))
    visible = part.dense().to(device)
    if like is not None:
        seeing = visible.any(-1)
        blind = None if seeing.all() else ~seeing
        zeros = torch.zeros(visible.shape, dtype=like.dtype)
        visible = Bias(zeros.masked_fill_(~visible, -math.inf), blind)

    # MEMORY: a long sequence under a ragged mask has more partial tiles than one would keep. Pinned
    # by tests/test_attend.py::test_partial_tiles_are_made_once_and_kept_up_to_a_bound.
    num_pairs = part.shape[1] * part.shape[2] * part.shape[3]
    if mask.cache.get("kept_pairs", 0) + num_pairs <= KEPT_PAIRS:
        mask.cache["kept_pairs"] = mask.cache.get("kept_pairs", 0) + num_pairs
        kept[key] = visible
    return visible


def matmul_of_seen(weight_bGij, value_bGjD, visible_bGij, all_finite, /):
    """weight @ value, where a value that row i does not see adds nothing to it, not even its NaN.

    A masked weight is 0, but 0 * NaN is NaN. all_finite: as in `tile_forward`.
    """
    if all_finite or visible_bGij is None:
        return weight_bGij @ value_bGjD

    # NUMERICS: a non-finite value reaches the rows that see it, as NaN, and no other row. Pinned by
    # tests/test_attend.py::test_nan_in_masked_tokens_leaves_visible_rows_clean.
    bad_bGjD = ~torch.isfinite(value_bGjD)
    reached_bGiD = visible_bGij.to(value_bGjD.dtype) @ bad_bGjD.to(value_bGjD.dtype) > 0
    return torch.where(reached_bGiD, math.nan, weight_bGij @ value_bGjD.masked_fill(bad_bGjD, 0.0))


def fused_tile_forward(q_bHiD, k_bGjD, v_bGjD, visible, causal, scale):
    """One tile of (3) and (4) by torch's kernel; never an empty one, of which it would die.

    q_bHiD, k_bGjD, v_bGjD: the tile's queries, keys, values.
    visible: a Bias, or None.
    causal: whether the tile is a causal square.
    scale: of (2).
    """
    tensors = q_bHiD, k_bGjD, v_bGjD
    aten = torch.ops.aten
    if q_bHiD.device.type == "cuda":
        return aten._scaled_dot_product_flash_attention(*tensors, 0.0, causal, scale=scale)[:2]
    bias = None if visible is None else visible.pairs
    out_bHiD, lse_bHi = aten._scaled_dot_product_flash_attention_for_cpu(
        *tensors, 0.0, causal, attn_mask=bias, scale=scale
    )
    if visible is not None and visible.blind is not None:
        # NUMERICS: the kernel says 0 for the lse of a row that sees nothing. Pinned by
        # tests/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
        lse_bHi = lse_bHi.masked_fill(visible.blind, -math.inf)
    return out_bHiD, lse_bHi


def fused_tile_backward(
    dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi, visible, causal, scale
):
    """One tile of (6) by torch's kernel, which is called with the global out and lse.

    dout_bHiD: the gradient that arrives for out.
    q_bHiD, k_bGjD, v_bGjD: the tile's queries, keys, values.
    out_bHiD, lse_bHi: of these queries over all keys.
    visible, causal, scale: as in `fused_tile_forward`.
    """
    tensors = dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD
    aten = torch.ops.aten
    if q_bHiD.device.type == "cuda":
        # Nothing is packed (None, None), and the seed is dropout's, which is off.
        seed = torch.empty(2, dtype=torch.uint64, device=q_bHiD.device)
        lengths = None, None, q_bHiD.shape[2], k_bGjD.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *tensors, lse_bHi.contiguous(), *lengths, 0.0, causal, seed, seed[0], scale=scale
        )
    bias = None if visible is None else visible.pairs
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, lse_bHi, 0.0, causal, attn_mask=bias, scale=scale
    )


# Appendix D. Routes: which hops are needed, and the groups of usp -----------------------------
# For: the messages that a mask saves, and rings over groups of ranks that trade heads.
# Skip it if you take it that the ranks derive the same route from the same mask.


@dataclasses.dataclass(frozen=True)
class Ring:
    """A process group, and this rank's place in it; world 1 has no group."""

    group: object
    rank: int
    world: int

    def peer(self, rank):
        """The global rank of a rank of this group, which is what P2P and errors name."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def ring_of(group=None) -> Ring:
    """The Ring of a group; None: all ranks, or a world of 1 where torch.distributed is off.

    Raises ValueError if this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ValueError("a group came, but torch.distributed is not initialised")
        return Ring(None, 0, 1)

    # torch gives a rank that is not a member a placeholder, or a negative rank.
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        rank = dist.get_rank()
        raise ValueError(f"rank {rank} is not in this group; every rank must pass a group it is in")
    return Ring(group, dist.get_rank(group), dist.get_world_size(group))


class Route:
    """Which tokens each block holds, which ranks need it, and how far it travels.

    The W ranks are c Ulysses groups of u = `inner` each, and the ring runs over these groups: rank
    r is member r % u of group r // u. For method "ring" u is 1 and a group is a rank. After `swap`
    the ranks of group b hold block b, that is the tokens of all of them, each for 1/u of the heads.
    At hop h block s is with group (s + h) % c. All of it follows from the mask, on each rank alike.
    """

    def __init__(self, ring, length, layout, inner, mask):
        self.ring = ring
        self.layout = layout
        self.inner = inner
        self.mask = mask
        self.masks_of_blocks = {}
        self.num_blocks = ring.world // inner  # c
        self.own_block, self.head_share = divmod(ring.rank, inner)

        # A block is the shards of a Ulysses group, sorted; block_order sorts what an all-to-all
        # delivers.
        # 8 tokens, zigzag, 4 ranks in 2 groups:
        #
        #     shards            0 7 | 1 6        2 5 | 3 4
        #     blocks            0 1 6 7          2 3 4 5
        #     block_order       0 2 3 1          0 2 3 1
        shards = [indices(length, rank, ring.world, layout).numpy() for rank in range(ring.world)]
        self.shard_sizes = [len(tokens) for tokens in shards]
        groups = range(0, ring.world, inner)
        joined = [np.concatenate(shards[first : first + inner]) for first in groups]
        self.block_tokens = [np.sort(tokens) for tokens in joined]
        self.block_order = np.argsort(joined[self.own_block])

        # needed_at[s, h]: does whoever has block s at hop h need it? Of 3 ranks with
        # contiguous shards and a window that reaches one shard back:
        #
        #     needed_at   hop 0  1  2      last_hop   first_hop
        #     block 0        x  x  .          1          1
        #     block 1        x  x  .          1          1
        #     block 2        x  .  .          0          3 (never)
        hops = np.arange(self.num_blocks)
        group_at = (hops[:, None] + hops) % self.num_blocks
        self.needed_at = self._needed_blocks(length)[group_at, hops[:, None]]
        self.last_hop = np.where(self.needed_at, hops, 0).max(axis=1)
        away = self.needed_at & (hops > 0)
        self.first_hop = np.where(away, hops, self.num_blocks).min(axis=1)
        self.hops = int(self.last_hop.max()) + 1

    def _needed_blocks(self, length):
        """bool (c, c): does Ulysses group b need block s? By bounds of consecutive tokens."""
        # Cut the sequence wherever the next token belongs to another block, ..
        chunk_starts = [x[np.flatnonzero(np.diff(x, prepend=-9) != 1)] for x in self.block_tokens]
        owner = np.repeat(np.arange(self.num_blocks), [len(x) for x in chunk_starts])
        order = np.argsort(np.concatenate(chunk_starts))
        edges = np.concatenate(chunk_starts)[order]
        owner = owner[order]

        # .. ask the mask about each chunk against each, and map chunks to their owners.
        mask = self.mask or Mask.full(length)
        rows, keys = np.nonzero(mask.classify(edges, edges).any(axis=0))
        need = np.zeros((self.num_blocks, self.num_blocks), bool)
        need[owner[rows], owner[keys]] = True
        return need

    def block_at(self, hop):
        """The block that lies with this rank at a hop."""
        return (self.own_block - hop) % self.num_blocks

    def is_needed(self, block, hop):
        """Whether this rank, which has the block at this hop, computes with it."""
        return hop == 0 or (hop < self.hops and bool(self.needed_at[block, hop]))

    def gradient_moves(self, block, hop):
        """Whether the sum of a block's gradients goes one rank on during a hop of the backward."""
        return hop > 1 and self.first_hop[block] < hop <= self.last_hop[block]

    def gradient_returns(self, block, hop):
        """Whether that sum, now complete, goes home during a hop of the backward."""
        return hop > 1 and self.last_hop[block] == hop - 1

    def mask_of(self, block):
        """The mask of this rank's queries and heads against a block's keys; None: all keys."""
        if self.mask is None:
            return None
        # Kept for all layers and steps, since a part of a mask finds its boxes anew.
        if block not in self.masks_of_blocks:
            heads = self.mask.shape[1] // self.inner
            own_heads = slice(self.head_share * heads, (self.head_share + 1) * heads)
            keys = ALL if block is None else self.block_tokens[block]
            rows = self.block_tokens[self.own_block]
            self.masks_of_blocks[block] = self.mask.slice(rows, keys, heads=own_heads)
        return self.masks_of_blocks[block]

    def post(self, messages):
        """Starts messages (send or receive, tensor, block, tag), and returns what to wait for.

        A block's number, modulo c, names the Ulysses group that owns it; the peer is the rank of it
        that has our share of the heads. A message without numbers is posted on neither side.
        """
        ops = []
        for send_or_receive, tensor, block, tag in messages:
            peer = self.ring.peer(block % self.num_blocks * self.inner + self.head_share)
            if tensor.numel():
                ops.append(dist.P2POp(send_or_receive, tensor, peer, self.ring.group, tag))
        return dist.batch_isend_irecv(ops) if ops else []

    def buffer(self, like_2BGkD, block):
        """Room for a block, or for its gradient."""
        e, b, g, _, d = like_2BGkD.shape
        return like_2BGkD.new_empty(e, b, g, len(self.block_tokens[block]), d)


# Appendix E. All-to-all, all-gather and their adjoints ----------------------------------------
# For: the methods "ulysses", "usp" and "allgather", and `unshard`.
# Skip it if you only use the ring.


def swap(x_BhsD, route, /, *, back=False):
    """All-to-all: this rank's tokens of all heads <-> all tokens of its block, 1/u of the heads."""
    u = route.inner
    if u == 1:
        return x_BhsD
    b, h, _, d = x_BhsD.shape
    first = route.own_block * u  # the first rank of our Ulysses group
    block_sizes = route.shard_sizes[first : first + u]
    own_sizes = [route.shard_sizes[route.ring.rank]] * u
    order = torch.from_numpy(route.block_order)

    # Forth: member a gets its 1/u of the heads, of our tokens. Back: it gets its tokens, of our
    # heads; for that the block leaves its order by index and lies shard by shard again. With 4
    # tokens, zigzag, and the heads x and y on 2 ranks:
    #
    #     rank 0   x and y of tokens 0 3   - forth ->   x of tokens 0 1 2 3
    #     rank 1   x and y of tokens 1 2   <- back -    y of tokens 0 1 2 3
    if back:
        heads = h
        shard_by_shard = torch.argsort(order).to(x_BhsD.device)
        pieces = x_BhsD[:, :, shard_by_shard].split(block_sizes, 2)
        sent_sizes = block_sizes
        received_sizes = own_sizes
    else:
        heads = h // u
        pieces = x_BhsD.split(heads, 1)
        sent_sizes = own_sizes
        received_sizes = block_sizes

    def counts(sizes):
        """Numbers to or from each rank of all W: none for those outside our Ulysses group."""
        numbers = [size * b * heads * d for size in sizes]
        return [0] * first + numbers + [0] * (route.ring.world - first - u)

    # COMM: one all-to-all of all W ranks, so that Ulysses groups need no communicators. Pinned by
    # tests/test_ring.py::test_every_layout_and_method_is_the_definition.
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    received = sent.new_empty(sum(counts(received_sizes)))
    splits = counts(received_sizes), counts(sent_sizes)
    dist.all_to_all_single(received, sent, *splits, group=route.ring.group)

    # What came, one piece a member; it knows nothing of heads and tokens until we say so.
    pieces = received.split(counts(received_sizes)[first : first + u])
    sized = zip(pieces, received_sizes, strict=True)
    parts = [piece.view(b, heads, size, d) for piece, size in sized]
    if back:
        return torch.cat(parts, 1)
    return torch.cat(parts, 2)[:, :, order.to(x_BhsD.device)]


def token_slots(length, world, layout):
    """Each token's slot when the shards lie one after another, each padded to the longest.

    5 tokens, contiguous, 2 ranks: shards 0 1 and 2 3 4 lie as 0 1 . 2 3 4, so the slots are 0 1 3 4
    5. Returns them, int64 (length,), and the padded size of a shard.
    """
    shards = [indices(length, rank, world, layout) for rank in range(world)]
    most = max(len(tokens) for tokens in shards)
    slot_S = torch.empty(length, dtype=torch.int64)
    for rank, tokens in enumerate(shards):
        slot_S[tokens] = rank * most + torch.arange(len(tokens))
    return slot_S, most


def gather(x, dim, ring, layout, length, /):
    """All-gather along dim: the whole, its tokens in order, on every rank."""
    own_tokens = len(indices(length, ring.rank, ring.world, layout))
    if x.shape[dim] != own_tokens:
        raise ValueError(
            f"rank {ring.rank} of {ring.world} holds {own_tokens} of {length} tokens in {layout} "
            f"layout, but x has {x.shape[dim]} in dimension {dim}")  # fmt: skip
    if ring.world == 1:
        return x

    # An all-gather wants equal shapes, so shards are padded to the longest; picking the tokens by
    # their slots drops the padding and puts them in order at once.
    x = x.movedim(dim, 0)
    slot_S, most = token_slots(length, ring.world, layout)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: len(x)] = x
    whole = x.new_empty(ring.world * most, *x.shape[1:])
    if padded.numel():
        dist.all_gather(list(whole.chunk(ring.world)), padded, group=ring.group)
    return whole[slot_S.to(x.device)].movedim(0, dim)


def gather_blocks(k, v, route):
    """Keys and values of all blocks, stacked: what "allgather" has instead of hops."""
    length = sum(route.shard_sizes)
    return gather(torch.stack((k, v)), 3, route.ring, route.layout, length)


def scatter_sum(x, dim, ring, layout, /):
    """Reduce-scatter along dim: this rank's tokens of the sum over ranks; `gather`'s adjoint."""
    if ring.world == 1:
        return x

    # The steps of `gather`, each turned round and in the opposite order.
    x = x.movedim(dim, 0)
    slot_S, most = token_slots(len(x), ring.world, layout)
    padded = x.new_zeros(ring.world * most, *x.shape[1:])
    padded[slot_S.to(x.device)] = x
    mine = x.new_empty(most, *x.shape[1:])
    if mine.numel():
        dist.reduce_scatter(mine, list(padded.chunk(ring.world)), group=ring.group)
    return mine[: len(indices(len(x), ring.rank, ring.world, layout))].movedim(0, dim)


class _Unshard(torch.autograd.Function):
    """`gather`, with the sum over ranks as its gradient, taken in float32 or better."""

    @staticmethod
    def forward(ctx, x, dim, ring, layout, length):
        ctx.place = dim, ring, layout
        return gather(x, dim, ring, layout, length)

    @staticmethod
    def backward(ctx, grad):
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return scatter_sum(wide, *ctx.place).to(grad.dtype), None, None, None, None


# Appendix F. Guards: all ranks go on together, or raise together ------------------------------
# For: a wrong input on one rank, ranks that differ, NaN: a message on every rank, and no hang.
# Skip it on a first reading: with right inputs nothing here changes a number.


def check_inputs(q, k, v, mask, rows, keys):
    """ValueError unless q, k, v and a mask for (rows, keys) fit together.

    q, k, v: as in `attend`.
    mask: a Mask or None.
    rows, keys: sequences of one integer each, what the mask's last two sizes must be.
    """
    named = zip("qkv", (q, k, v), strict=True)
    came = ", ".join(f"{name} {x.dtype} {tuple(x.shape)} {x.device}" for name, x in named)
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(f"expected q (B, H, q, D) and k, v (B, G, k, D); came {came}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k and v must have one shape, and q's batch and head_dim; came {came}")
    if not k.shape[1] or not q.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads; came {came}")
    if not 1 <= q.shape[3] <= 512:
        raise ValueError(f"head_dim must be 1 to 512; came {came}")
    if q.dtype not in DTYPES or len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        raise ValueError(f"q, k, v must share a device and one dtype of {DTYPES}; came {came}")
    if mask is None:
        return

    # A mask of another length would be read at the wrong tokens, and without any error.
    batch, heads, *size = mask.shape
    if size != [*rows, *keys]:
        raise ValueError(
            f"the mask is for {tuple(size)} queries and keys, but there are {(*rows, *keys)}; "
            f"build it for the whole sequence, or take mask.slice(queries, keys)")  # fmt: skip
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[1]):
        raise ValueError(f"the mask has batch {batch} and {heads} heads; came {came}")


def refuse_second_derivative():
    """NotImplementedError where a gradient of a gradient is about to be wrong."""
    if torch.is_grad_enabled():  # so it is in a backward only under create_graph=True
        raise NotImplementedError("attention has no second derivative here: no create_graph=True")


# What all ranks of a ring must have alike, in the order in which `agree_on_call` lists it.
AGREE = ("batch size", "query heads", "key heads", "head_dim", "dtype", "mask", "options", "batch")


def agree_on_call(
    ring, q, k, v, mask, batch, *, layout, method, scale, softcap, return_lse, backend, accurate,
    inner, debug,
):  # fmt: skip
    """The Call of `ring_attention`, once every rank has shown that it is about to do the same.

    ring: the Ring of the group.
    Everything else: as it came to `ring_attention`.

    Raises ValueError on every rank, with the same text, if one rank's input is wrong or two differ.
    """
    # An error of this rank is not raised at once: it travels to the others first, in `handshake`.
    problem = None
    tokens = 0
    facts = [0] * len(AGREE)
    try:
        mask = as_mask(mask)
        length = None if mask is None else mask.shape[2]
        whole = q.shape[2:3] if mask is None else (length,)
        check_inputs(q, k, v, mask, whole, whole)
        kernel = make_kernel(q, scale, softcap, backend, accurate)
        inner = inner_degree(method, ring.world, q.shape[1], inner)

        # With a mask each rank knows how many tokens it must hold; without one see below.
        tokens = q.shape[2]
        expected = len(indices(length or 0, ring.rank, ring.world, layout))
        if k.shape[2] != tokens or (mask is not None and tokens != expected):
            raise ValueError(
                f"q has {tokens} tokens, k {k.shape[2]}; rank {ring.rank} of {ring.world} holds "
                f"{expected} of {length} of the mask in {layout} layout; use shard()")  # fmt: skip

        # What is not a number is compared by a 63-bit digest, so that one small tensor holds all.
        sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[3], DTYPES.index(q.dtype)
        options = layout, method, inner, kernel, bool(debug), bool(return_lse)
        facts = [*sizes, mask.digest() if mask else 0, digest(options), digest_of(batch)]
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        problem = str(error)
    tokens_of_ranks = handshake(ring, problem, tokens, facts, getattr(q, "device", "cpu"))

    # Without a mask the length is the sum of what the ranks hold; the layout says how it is cut.
    length = sum(tokens_of_ranks)
    shards = [len(indices(length, rank, ring.world, layout)) for rank in range(ring.world)]
    if tokens_of_ranks != shards:
        raise ValueError(
            f"the ranks hold {tokens_of_ranks} tokens, but the {layout} shards of {length} are "
            f"{shards}; take them by shard()")  # fmt: skip

    # A mask keeps its routes, for the next layer and step.
    routes = {} if mask is None else mask.cache
    place = ring, length, layout, inner
    if place not in routes:
        routes[place] = Route(*place, mask)
    return Call(routes[place], kernel, method, debug, return_lse)


def handshake(ring, problem, tokens, facts, device):
    """Each rank's number of tokens, once all have shown that they are about to do the same.

    problem: this rank's error text, or None. facts: an integer for each of AGREE. An error of any
    rank, or a fact that differs, is a ValueError on every rank that names the ranks.
    """
    mine = torch.tensor([problem is not None, tokens, *facts], device=device)
    every = [mine.clone() for _ in range(ring.world)]
    if ring.world > 1:
        # COMM: at every call, for a rank that remembered a shape would not meet one that does not;
        # on the tensors' device, so that NCCL has a communicator before its first P2P. Pinned by
        # tests/test_ring.py::test_ranks_that_disagree_are_named_on_every_rank.
        dist.all_gather(every, mine, group=ring.group)

    # All ranks read the same table, so all of them take the same branch.
    problems, tokens_of_ranks, *every = torch.stack(every, dim=1).tolist()
    if any(problems):
        raise ValueError(name_ranks(gather_objects(problem, ring), ring))
    for name, values in zip(AGREE, every, strict=True):
        if len(set(values)) > 1:
            raise ValueError(
                f"the ranks of a ring must pass the same {name}, but {name_ranks(values, ring)} "
                f"(large numbers are digests); make it from the same data on every rank, say by "
                f"broadcast_batch")  # fmt: skip
    return tokens_of_ranks


def name_ranks(values, ring):
    """ "rank 0, 2: a; rank 1: b", for the values of all ranks, in order; None is left out."""
    ranks = {value: [] for value in values if value is not None}
    for rank, value in enumerate(values):
        ranks.get(value, []).append(str(ring.peer(rank)))
    return "; ".join(f"rank {', '.join(named)}: {value}" for value, named in ranks.items())


def inner_degree(method, world, heads, inner):
    """Ranks of an all-to-all: 1 for a ring, the world for ulysses, between them for usp."""
    if method not in METHODS:
        raise ValueError(f"method must be ring, allgather, ulysses or usp; came {method!r}")
    if inner is not None and method != "usp":
        raise ValueError(f'inner={inner} is for method="usp"; came method={method!r}')

    # usp, if not told: the largest proper divisor of the world that divides the heads.
    if method == "usp" and inner is None:
        inner = max((u for u in range(1, world) if world % u == heads % u == 0), default=1)
    inner = world if method == "ulysses" else inner or 1
    if world % inner or heads % inner:
        raise ValueError(
            f"{method} over {inner} ranks: {inner} must divide the {world} ranks and the {heads} "
            f'query heads; use method="ring", or pad the heads')  # fmt: skip
    return inner


class Probe:
    """Finds the first tensor that is not finite; all ranks learn of it and raise, so none hangs."""

    def __init__(self, debug, ring, phase):
        self.debug = debug
        self.ring = ring
        self.phase = phase
        self.found = None  # (hop, name) of the first one

    def look(self, hop, name, *tensors):
        """Remembers the name if one of the tensors is not finite; does nothing without debug."""
        if self.debug and not self.found and not all(bool(x.isfinite().all()) for x in tensors):
            self.found = (hop, name)

    def raise_on_all_ranks(self):
        """FloatingPointError on every rank if any found something; a collective with debug."""
        if not self.debug:
            return
        every = enumerate(gather_objects(self.found, self.ring))
        bad = [(*found, self.ring.peer(rank)) for rank, found in every if found]
        if bad:
            # The earliest hop is the likeliest cause; what is bad later may follow from it.
            hop, name, first = min(bad, key=lambda found: found[0])
            label = "" if self.debug is True else f"{self.debug}, "
            raise FloatingPointError(
                f"{label}ring {self.phase}: {name} is not finite, first on rank {first} at block "
                f"{hop} (0: its input); ranks with any: {[rank for *_, rank in bad]}")  # fmt: skip


def gather_objects(mine, ring):
    """The objects of all ranks, in order."""
    every = [mine] * ring.world
    if ring.world > 1:
        dist.all_gather_object(every, mine, group=ring.group)
    return every


def digest(*parts):
    """A 63-bit number of some values: bytes, or anything whose repr says what it is."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part if isinstance(part, bytes) else repr(part).encode() + b"\0")
    return int.from_bytes(state.digest(), "big") >> 1


def digest_of(batch):
    """`digest` of nested dicts, lists, tuples, tensors and plain values."""

    def one(x):
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tuple(x.shape), x.dtype, x.device.type, digest(raw.numpy().tobytes())

    return digest(map_nested(batch, torch.Tensor, one))


def map_nested(nested, kind, function):
    """Nested containers with function(x) for each x of a kind."""
    if isinstance(nested, kind):
        return function(nested)
    if isinstance(nested, dict):
        return {key: map_nested(value, kind, function) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        items = [map_nested(value, kind, function) for value in nested]
        return type(nested)(*items) if hasattr(nested, "_fields") else type(nested)(items)
    return nested


# Appendix G. Rings inside, data parallel across; the prefix and suffix of pi0.7 ---------------
# For: a training script that has more ranks than one ring, or a short suffix on a long prefix.
# Skip it if all your ranks are one ring.


def rings(world, ring_size):
    """Rings inside, data parallel across, as lists of ranks: rings(4, 2) is [[0, 1], [2, 3]]."""
    if ring_size < 1 or world % ring_size:
        raise ValueError(f"ring_size must divide the world of {world} ranks; came {ring_size}")
    return [list(range(first, first + ring_size)) for first in range(0, world, ring_size)]


def make_ring(ring_size):
    """This rank's process group among rings(world, ring_size). Collective over all ranks."""
    groups = [dist.new_group(ranks) for ranks in rings(dist.get_world_size(), ring_size)]
    return groups[dp_rank(dist.get_rank(), ring_size)]


def dp_rank(rank, ring_size):
    """Which ring a rank is in: its data-parallel rank, with no communicator for it."""
    return rank // ring_size


def sampler_seed(seed, rank, ring_size):
    """A seed that the ranks of a ring share and other rings do not, for the sampler of data."""
    return digest(seed, dp_rank(rank, ring_size))


def loss_scale(ring_size, *, replicated, reduce="mean"):
    """The factor on each rank's loss that makes every parameter's gradient right.

    replicated: every rank of a ring computes the same loss, after `unshard`; otherwise a rank's
    loss is of its own tokens, and the ring's loss is their sum. reduce: what is done with gradients
    over all ranks: "mean" (DDP, FSDP) gives the mean over rings, "sum" the sum. It is exact before
    and after the gather, because the gradient of `unshard` sums over ranks. Raises ValueError for
    another reduce.
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce must be "mean" or "sum"; came {reduce!r}')
    return (ring_size if reduce == "mean" else 1.0) / (ring_size if replicated else 1.0)


SentTensor = namedtuple("SentTensor", "tensor device")  # on the CPU, and where it belongs


def broadcast_batch(batch, group=None):
    """The first rank's batch on every rank of a group: nested dicts, lists, tuples, tensors, text.

    For data whose randomness a seed does not cover: the ranks of a ring must hold one batch.
    Tensors keep dtype and kind of device, and lose their graph. All of it is pickled.
    """
    ring = ring_of(group)
    if ring.world == 1:
        return batch

    def packed(x):
        return SentTensor(x.detach().cpu().clone(), x.device.type)

    def unpacked(sent):
        return sent.tensor.to(sent.device)

    # Pickling a CUDA tensor would bring its device along, which may be another rank's.
    box = [map_nested(batch, torch.Tensor, packed) if ring.rank == 0 else None]
    dist.broadcast_object_list(box, src=ring.peer(0), group=ring.group)
    return map_nested(box[0], SentTensor, unpacked)


def prefix_attention(q, k, v, /, *, length, group=None, layout="zigzag", **options):
    """A prefix of P = `length` tokens over the ring, and what fills a cache.

    Returns out (B, H, s, D) of this rank, and k, v (B, G, P, D) whole on each, differentiable.
    options: those of `ring_attention`. The suffix route of pi0.7, with `suffix_attention`.
    """
    out = ring_attention(q, k, v, group=group, layout=layout, **options)
    whole = dict(dim=2, group=group, layout=layout, length=length)
    return out, unshard(k, **whole), unshard(v, **whole)


def suffix_attention(q_BHTD, k_BGTD, v_BGTD, k_BGPD, v_BGPD, /, mask=None, **options):
    """A suffix of T tokens that attends to a cached prefix and itself, on one device: out_BHTD.

    q_BHTD, k_BGTD, v_BGTD: of the suffix.
    k_BGPD, v_BGPD: of the prefix, from `prefix_attention`. Gradients go back through them into the
        ring; if every rank computes the same suffix, its loss is replicated (`loss_scale`).
    mask: of prefix and suffix together, P + T tokens; None: everything is seen.
    options: those of `attend`.

    Raises ValueError if the mask is not of P + T tokens.
    """
    p = k_BGPD.shape[2]
    both = p + q_BHTD.shape[2]
    mask = as_mask(mask)

    # The rows of the suffix against the keys of both; i and j stay those of the whole sequence.
    if mask is not None:
        if tuple(mask.shape[2:]) != (both, both):
            raise ValueError(f"the mask must be of all {both} tokens; came {mask.shape[2:]}")
        mask = mask.slice(slice(p, None), slice(None))
    k_BGkD = torch.cat((k_BGPD, k_BGTD), 2)
    v_BGkD = torch.cat((v_BGPD, v_BGTD), 2)
    return attend(q_BHTD, k_BGkD, v_BGkD, mask, **options)[0]


# Appendix H. check: everything above against the definition -----------------------------------
# For: `python ring_attention.py check`, and the parts of it that the tests use too.
# Skip it unless you doubt the numbers; then it is the place to begin.

WAYS = [(method, layout) for method in METHODS for layout in LAYOUTS]


def launch(world, function, *args):
    """function(*args) on so many gloo ranks of one thread: their results. One failure ends all."""
    with tempfile.TemporaryDirectory() as folder:
        method = "fork" if sys.platform == "linux" else "spawn"
        given = folder, world, function, args
        files = [f"{folder}/{r}" for r in range(world)]
        try:
            start_processes(run_rank, given, world, start_method=method)
        except ProcessExitedException:  # gloo sometimes aborts after the work is done
            if not all(os.path.exists(file) for file in files):
                raise
        return [torch.load(file, weights_only=False) for file in files]


def run_rank(rank, folder, world, function, args):
    """One process of `launch`: its result goes to the file that bears its rank."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    torch.save(function(*args), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def examples(length, heads=1):
    """A mask of every kind for `length` tokens, with a batch of 2 where its rows can differ."""
    gen = torch.Generator().manual_seed(0)
    valid_BS = torch.rand(2, length, generator=gen) > 0.3
    valid_BS[1, : length // 2] = False  # a rank of two may hold nothing that is valid
    doc_BS = torch.arange(length) * torch.tensor([[3], [7]]) // max(length, 1)

    # Subtrees of 2 tokens inside subtrees of 6 inside subtrees of 24.
    end = np.arange(1, length + 1)
    for size in (2, 6, 24):  # each divides the next, so that subtrees nest
        end[::size] = np.minimum(np.arange(0, length, size) + size, length)
    tree = Mask.tree(end)
    return {
        "full": None,
        "causal": Mask.causal(length),
        "documents": Mask.documents(doc_ids=doc_BS.masked_fill(doc_BS == 1, -1)),
        "positions": Mask.documents(position_ids=torch.arange(length) % torch.tensor([[11], [4]])),
        "blocks": Mask.blocks(torch.arange(length).expand(2, -1) // 5, valid_BS),
        "padding": Mask.padding(valid_BS),
        "tree": tree,
        "window": Mask.causal(length, window=5),
        "tree, window": tree.with_window(3),
        "dense": torch.rand(2, heads, length, length, generator=gen) > 0.8,
    }


def relative(found, truth):
    """Frobenius norm of the error over that of the truth: 1.0 for a wrong zero, inf for NaN."""
    error = (found.double() - truth).norm().item()
    size = truth.norm().item()
    return math.inf if math.isnan(error) else error / (size or 1.0)


def compare(
    mask, group, dtype, tokens, device="cpu", *, heads=(12, 2), width=16, attention=None, **options
):  # fmt: skip
    """Errors of (out, lse, dq, dk, dv) of `ring_attention`, whole; the worst of all ranks, on each.

    mask, group: as in `ring_attention`.
    dtype, device: of the inputs.
    tokens, heads, width: S, (H, G) and D.
    attention: a function of q, k, v on one device that is compared instead.
    options: those of `ring_attention`; layout must be among them.

    The truth is the definition's, in float64, of the same rounded inputs. The gradients of shard()
    and unshard() are on the way.
    """
    # Upstream gradients are random: that of out, and in float64 that of lse too.
    ring = ring_of(group)
    gen = torch.Generator().manual_seed(7)
    h, g = heads
    shapes = [(2, n, tokens, width) for n in (h, g, g, h)] + [(2, h, tokens)]
    drawn = [torch.randn(s, generator=gen, dtype=torch.float64).to(device, dtype) for s in shapes]
    visible = (Mask.full(tokens) if mask is None else as_mask(mask)).dense().to(device)
    place = dict(dim=2, group=group, layout=options["layout"])
    with_lse = dtype == torch.float64

    def over_ranks(*qkv):
        parts = [shard(x, **place) for x in qkv]
        pair = ring_attention(*parts, group=group, mask=mask, return_lse=True, **options)
        return [unshard(x, **place, length=tokens) for x in pair]

    def run(attention, q, k, v, *upstream):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        outputs = attention(*leaves)
        n = 2 if with_lse else 1
        grads = torch.autograd.grad(outputs[:n], leaves, upstream[:n])
        return [x.detach().double() for x in (*outputs, *grads)]

    # unshard sums upstream gradients over ranks, so only rank 0 has any; each rank then has the
    # gradient of its own tokens, and their sum is that of the whole.
    truth = run(lambda *x: definition(*x, visible), *(x.double() for x in drawn))
    upstream = [x if ring.rank == 0 else torch.zeros_like(x) for x in drawn[3:]]
    found = run(attention or over_ranks, *drawn[:3], *upstream)
    if ring.world > 1:
        for grad in found[2:]:
            dist.all_reduce(grad, group=group)

    # -inf - -inf is no error where both say that a row sees nothing, and NaN where only one does.
    dead = truth[1] == -math.inf
    if not torch.equal(found[1] == -math.inf, dead):
        found[1].fill_(math.nan)
    found[1] = found[1].masked_fill(dead, 0.0)
    truth[1] = truth[1].masked_fill(dead, 0.0)
    errors = [relative(a, b) for a, b in zip(found, truth, strict=True)]
    return np.max(gather_objects(errors, ring), axis=0).tolist()


def by_way(group, error):
    """{column: error(method=.., layout=..)} of the ways in which a group can share 12 heads."""
    ways = WAYS if 12 % ring_of(group).world == 0 else WAYS[:4]
    return {f"{m[:4]} {layout[:3]}": error(method=m, layout=layout) for m, layout in ways}


def _measuring_file(name="measure_ring"):
    """A file of tests/; ImportError where it, or a file that it needs, is missing."""
    sys.path.append(str(Path(__file__).resolve().parent / "tests"))
    return __import__(name)


def rows_of_rank(tokens, device):
    """[(table, row, budget, {column: value})] of this rank's worlds; rank 0 is in all of them."""
    rank = dist.get_rank()
    total = dist.get_world_size()
    worlds = [world for world in sorted({1, 2, 3, 4, total}) if world <= total]

    # A group is made by all ranks, its members or not; only its members compute.
    groups = {world: dist.new_group(list(range(world))) for world in worlds}
    rows = []
    for world in worlds:
        if rank >= world:
            continue
        for name, mask in examples(tokens, 12).items():
            given = mask, groups[world], torch.float64, tokens, device
            row = by_way(groups[world], lambda **way: max(compare(*given, **way)))  # noqa: B023
            rows.append((f"float64, world {world}", name, 1e-12, row))
    try:
        rows += _measuring_file().check_rows(groups[total], device)
    except ImportError as missing:
        if rank == 0:
            print(f"SKIP lower dtypes and the work of each rank: {missing}")
    return rows


def rows_of_torchrun(tokens):
    """`rows_of_rank` on the ranks that torchrun has started; None on all but the first."""
    device = "cpu"
    backend = "gloo"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        backend = "nccl"
        torch.cuda.set_device(device)

    # Every rank computes its part of the table; the first prints it.
    dist.init_process_group(backend)
    rank = dist.get_rank()
    rows = rows_of_rank(tokens, device)
    dist.barrier()
    dist.destroy_process_group()
    return rows if rank == 0 else None


def check():
    """Every error beside its budget; 1 if one is over. 4 ranks here, or those of torchrun."""
    rows = rows_of_torchrun(23) if "RANK" in os.environ else launch(4, rows_of_rank, 23, "cpu")[0]
    if rows is None:
        return 0

    # One table a world and a dtype, one row a mask, one column a method and layout.
    failed = 0
    largest = 0.0  # error in float64: what the README quotes
    last_table = None
    for table, name, budget, row in rows:
        ok = all(value <= budget for value in row.values())
        if not ok:
            failed += 1
        if "float64" in table:
            largest = max([largest, *row.values()])
        if table != last_table:
            print(f"\n{table:>24}" + "".join(f" {column:>8}" for column in row) + "   budget")
        numbers = "".join(f" {value:8.3g}" for value in row.values())
        print(f"{name:>24}{numbers}   {budget:.3g} {'ok' if ok else 'FAILED'}")
        last_table = table
    print(json.dumps({"check": "ring_attention", "ok": not failed, "max_error": largest}))
    return 1 if failed else 0


# Appendix I. main ------------------------------------------------------------------------------
# For: the command line.
# Skip it.


def main(argv):
    """check is here; bench, memory, longest, stress are in tests/measure_ring.py. The exit code."""
    if argv == ["check"]:
        return check()

    # Those who measure have the tests beside this file; who copied it alone has not.
    measures = argv[:1] in (["bench"], ["memory"], ["longest"], ["stress"])
    if measures or argv[:2] == ["check", "--device"]:
        try:
            if argv[0] == "check":
                return _measuring_file("measure_gpu").check("ring_attention", argv[1:])
            return _measuring_file().main(argv)
        except ImportError as missing:
            print(f"{argv[0]} needs the tests beside this file: {missing}", file=sys.stderr)
            return 2
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

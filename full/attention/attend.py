"""Compute attention under a mask on one device, in tiles, by torch's flash kernel where it can.

For 16 documents of 128 tokens, `models.packed_attention` takes 14 times as long forward.

What it must equal, in addition to (1) to (3) of ring_attention.py and (4) of masks.py:

    (5)  a query that sees nothing: out 0, lse -inf, gradient 0 whatever arrives from upstream
    (6)  a gradient of lse enters (3): dS_ij = P_ij (dout_i . v_j - dout_i . out_i + dlse_i)

On CUDA, flash computes full and causal boxes of bf16 and fp16 with a head size that is a multiple
of 8 up to 256; everything else runs by the formulas in tiles, which is exact and slower.
torch.compile leaves these calls out of its graphs. Not here: dropout, additive biases, softcaps,
sinks, second derivatives, dv != dk. `attend_short` is for trees of many short paths.

A NaN or inf in PAD reaches nothing, because PAD is zeroed on entry. A NaN in a visible token may
spread to every token of its tile. Torch's CPU kernel hides a NaN in q where a tile has fewer keys
than a vector register: 8 in float64, else 16.

Letters:  B batch, b of a tile   H query heads   G key heads   D head size   i, j queries and keys
of a tile   r queries of a tile that read one key head: i H / G   X any dimension   n queries and m
keys of a row   U groups of W queries, each with Y keys

Reference: FlashAttention-2 arXiv:2307.08691.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from full.attention.masks import (
    ALL, CAUSAL, PARTIAL, TILES, Keys, Mask, Queries, boxes, visible_pairs,
)  # fmt: skip
from ring_attention import block_attention, block_backward, merge, widen

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

KEPT_PAIRS = 1 << 22  # most pairs that a mask keeps for all layers: up to 8 bytes each


def group_query_heads(x_bHiX, g, /):
    """View the query heads of a key head as more rows of it: (b, H, i, X) -> (b, G, r, X).

    With r = i H / G rows against one key head, a matmul needs no copies of k and v. H = 4, G = 2,
    i = 3: heads 0 and 1 become the 6 rows of key head 0, and heads 2 and 3 the rows of key head 1.
    """
    return x_bHiX.unflatten(1, (g, -1)).flatten(2, 3)


def tile_forward(q_bHiD, k_bGjD, v_bGjD, visible, scale):
    """Compute out_bHiD and lse_bHi of one tile by the formulas. visible: None if all is seen."""
    g = k_bGjD.shape[1]
    if visible is not None:
        visible = group_query_heads(visible.expand(*q_bHiD.shape[:3], -1), g)
    out, lse = block_attention(group_query_heads(q_bHiD, g), k_bGjD, v_bGjD, visible, scale)  # (1)
    return out.reshape(q_bHiD.shape), lse.reshape(q_bHiD.shape[:3])


class Saved(NamedTuple):
    """Store the tensors of a forward for its backward, or of one tile: O(S), no scores."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor  # of these queries over all keys, wherever the keys are
    lse: torch.Tensor  # likewise, in float32 or better


def tile_backward(saved, dout_bHiD, dlse_bHi, visible, scale):
    """Compute the parts dq_bHiD, dk_bGjD, dv_bGjD of one tile by the formulas, equation (3).

    dlse: the gradient of lse, or None.
    """
    dout, q, k, v, out = map(widen, (dout_bHiD, saved.q, saved.k, saved.v, saved.out))
    if dlse_bHi is not None:
        # (6) is (3) with one more number in each vector: (dout, dlse) . (v, 0) is dout . v, and
        # (dout, dlse) . (out, -1) is dout . out - dlse.
        dout = torch.cat((dout, dlse_bHi[..., None]), -1)
        out = pad(out, (0, 1), value=-1.0)
        v = pad(v, (0, 1))

    # The sums over r in dk and dv run over all query heads that read the key head, which is the
    # gradient of having copied it.
    g = k.shape[1]
    if visible is not None:
        visible = group_query_heads(visible.expand(*q.shape[:3], -1), g)
    dout, q, out, lse = (group_query_heads(x, g) for x in (dout, q, out, saved.lse))
    dq, dk, dv = block_backward(dout, q, k, v, out, lse, visible, scale)  # (3)
    return dq.reshape(saved.q.shape), dk, dv[..., : q.shape[3]]


def forward_tiles(q_BHqD, k_BGkD, v_BGkD, mask, scale, out_and_lse=None, /):
    """Compute out_BHqD and lse_BHq tile by tile, in float32 or better, outside autograd.

    mask: a Mask of q queries and k keys. scale: of (1).
    out_and_lse: of the same queries over earlier keys. The new result is merged into both in
        place. Default: none.
    """
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)
    B, H, s, D = q_BHqD.shape
    out_BHqD, lse_BHq = out_and_lse or (
        # No key seen yet, equation (5). In memory the heads of a token are neighbors, as the
        # model's next matmul reads them.
        q_BHqD.new_zeros(B, s, H, D, dtype=wide).transpose(1, 2),
        q_BHqD.new_full((B, H, s), -math.inf, dtype=wide),
    )
    has_result_Bq = np.full((B, s), out_and_lse is not None)
    fuses = can_fuse(q_BHqD)
    q, k, v = ready_for_tiles(fuses, q_BHqD, k_BGkD, v_BGkD)
    for rows, columns, seen, is_causal, is_fused in iterate_tiles("forward", mask, fuses, q):
        qkv = q[rows], k[columns], v[columns]
        if is_fused:
            part_out, part_lse = flash_forward(*qkv, seen, is_causal, scale)
        else:
            part_out, part_lse = tile_forward(*map(widen, qkv), seen, scale)

        # Tiles of the same queries have different keys, so they merge. The first tile of its
        # queries is their result so far: to merge it with nothing would make a row of 40 documents
        # take 1.5 times as long forward, and 1.2 times with its backward.
        has_result_bi = has_result_Bq[rows[0], rows[2]]
        if has_result_bi.any():
            so_far = out_BHqD[rows], lse_BHq[rows]
            out_BHqD[rows], lse_BHq[rows] = merge(*so_far, widen(part_out), part_lse)  # (2)
        else:
            out_BHqD[rows] = part_out
            lse_BHq[rows] = part_lse
        has_result_bi[:] = True
    return out_BHqD, lse_BHq


def backward_tiles(saved, dout, dlse, mask, scale, dq_BHqD=None, /):
    """Compute dq_BHqD, dk_BGkD, dv_BGkD tile by tile, in float32 or better, equation (3).

    saved: Saved. mask, scale: as in `forward_tiles`.
    dout (B, H, q, D), dlse (B, H, q): the gradients that arrive for out and lse, 0 where a query
        sees nothing. dlse may be None.
    dq_BHqD: of the same queries over other keys. The new part is added in place. Default: 0.
    """
    # Torch's kernels know no gradient of lse. Where one arrives, the formulas compute every tile.
    fuses = dlse is None and can_fuse(saved.q)
    wide = torch.promote_types(saved.q.dtype, torch.float32)
    lse = saved.lse
    q, k, v, out, dout = ready_for_tiles(fuses, *saved[:4], dout)

    # The sums are float32 or better, whatever the dtype of a tile is.
    if dq_BHqD is None:
        dq_BHqD = torch.zeros_like(q, dtype=wide)
    dk_BGkD = torch.zeros_like(k, dtype=wide)
    dv_BGkD = torch.zeros_like(v, dtype=wide)
    for rows, columns, seen, is_causal, is_fused in iterate_tiles("backward", mask, fuses, q):
        tile = Saved(q[rows], k[columns], v[columns], out[rows], lse[rows])
        if is_fused:
            dq, dk, dv = flash_backward(tile, dout[rows], seen, is_causal, scale)
        else:
            dlse_rows = None if dlse is None else dlse[rows]
            dq, dk, dv = tile_backward(tile, dout[rows], dlse_rows, seen, scale)

        # Gradients are plain sums over tiles: the weights are in P already.
        dq_BHqD[rows] += dq
        dk_BGkD[columns] += dk
        dv_BGkD[columns] += dv
        del dq, dk, dv  # before the next tile has results of its own
    return dq_BHqD, dk_BGkD, dv_BGkD


class TiledAttention(torch.autograd.Function):
    """Compute attention, store no scores, and compute them again in the backward."""

    @staticmethod
    def forward(ctx, q, k, v, forward_tiles, backward_tiles, mask_or_shards, scale):
        """Return (out, lse).

        forward_tiles, backward_tiles: the functions above, or two like them.
        mask_or_shards: what these take as their mask. It has `padding_tokens` too.
        """
        # NUMERICS: a masked weight is 0, but 0 * NaN is NaN: garbage in PAD would reach queries
        # that do not see it. Zeroed once, here, it reaches nothing. Its gradients are 0 anyway: P
        # is 0 where a PAD is the key, and dout is 0 where it is the query. Pinned by
        # tests/full/test_attend.py::test_garbage_in_pad_reaches_nothing.
        blind_Bq, unseen_Bk = mask_or_shards.padding_tokens()
        if blind_Bq.any():
            blind_B1q = torch.from_numpy(blind_Bq).to(q.device)[:, None]
            q = q.masked_fill(blind_B1q[..., None], 0.0)
        if unseen_Bk.any():
            unseen_B1k = torch.from_numpy(unseen_Bk).to(k.device)[:, None]
            k, v = (x.masked_fill(unseen_B1k[..., None], 0.0) for x in (k, v))
        out, lse = forward_tiles(q, k, v, mask_or_shards, scale)
        out = out.to(q.dtype)

        # Boxes may include PAD among the queries. It has seen nothing, equation (5).
        if blind_Bq.any():
            out.masked_fill_(blind_B1q[..., None], 0.0)
            lse.masked_fill_(blind_B1q, -math.inf)

        # These five are O(S), and on a ring O(S / W): no block of another rank. Autograd through
        # the tiles would keep the P of every tile: O(S^2).
        # NUMERICS: lse stays in float32 or better; in bf16 the gradients are 10 to 80 times worse.
        # Pinned by tests/full/test_ring.py::test_every_method_is_the_definition.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.setting = backward_tiles, mask_or_shards, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if torch.is_grad_enabled():  # in a backward only under create_graph=True
            raise NotImplementedError("attention has no second derivative here: no create_graph")
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout  # of a loss that uses lse alone

        # NUMERICS: the lse of a query that saw nothing is -inf, and exp(-inf - -inf) is NaN. With
        # an lse of 0 its P is exp(-inf - 0) = 0. Its dout and dlse become 0, so that its delta is 0
        # whatever arrives. On CUDA, to look whether there is such a query would wait for the
        # device. Pinned by
        # tests/full/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
        blind_BHq = lse == -math.inf
        if lse.device.type != "cpu" or blind_BHq.any():
            dout = dout.masked_fill(blind_BHq[..., None], 0.0)
            lse = lse.masked_fill(blind_BHq, 0.0)
            dlse = None if dlse is None else dlse.masked_fill(blind_BHq, 0.0)
        backward_tiles, mask_or_shards, scale = ctx.setting
        grads = backward_tiles(Saved(q, k, v, out, lse), dout, dlse, mask_or_shards, scale)
        return *(grad.to(q.dtype) for grad in grads), None, None, None, None


def not_compiled(function):
    """Keep a function out of torch.compile's graphs; import the compiler only where it runs."""

    # Masks are numpy arrays, and messages of a ring are not tensor operations: no graph holds them.
    @functools.wraps(function)
    def call(*args, **options):
        run = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return run(*args, **options)

    return call


class Attention:
    """Tell the layers of a model which tokens of a row come before which.

    An `Attention` is also called as the five files call theirs, so that their models take it.
    """

    def __call__(self, q, k, v, /, **options):
        return self.attend(q, k, v, **options)

    def attend(self, q, k, v, /, *, layer, scale, window=None):
        """Return the outputs (B, H, S, D) of a softmax layer; window: of a sliding one."""
        raise NotImplementedError

    def windows(self, x_BSX, /, *, kernel, layer):
        """Return the last `kernel` inputs of each token in a recurrent layer, (B, S, X, kernel).

        The last of them is the token's own. An input before a document's first one is 0.
        """
        raise NotImplementedError

    def recurrence(self, q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS, /, *, layer):
        """Return the outputs (B, H, S, V) of a recurrent layer, by (3) of deltanet.py."""
        raise NotImplementedError


@not_compiled
def attend(q, k, v, /, mask=None, *, scale=None):
    """Compute attention and its log-sum-exp on one device, equations (1) and (4) to (6).

    q: (B, H, q, D), any strides. float64, float32, bf16 or fp16.
    k, v: (B, G, k, D), dtype of q. H must be divisible by G, and D be 1 to 512.
    mask: a Mask of q queries and k keys. Default: all is seen.
    scale: positive number that multiplies q . k. Default: D ** -0.5.

    Returns out (B, H, q, D) in the dtype of q, and lse (B, H, q) in float32 or float64: the natural
    log, of the scaled scores. Both are differentiable, once. A query that sees nothing has 0 and
    -inf. Raises ValueError if the input does not fit.
    """
    scale = checked_scale(q, k, v, mask, scale)
    if mask is None:
        num_queries, num_keys = q.shape[2], k.shape[2]
        mask = Mask.full(max(num_queries, num_keys)).slice(slice(num_queries), slice(num_keys))
    return TiledAttention.apply(q, k, v, forward_tiles, backward_tiles, mask, scale)


def checked_scale(q, k, v, mask, scale, size=None):
    """Return the scale of a call; raise ValueError unless its inputs fit together.

    mask: a Mask or None. size: how many queries and keys it must have. Default: those of q and k.
    """
    named = zip("qkv", (q, k, v), strict=True)
    got = ", ".join(f"{name} {x.dtype} {tuple(x.shape)} {x.device}" for name, x in named)

    # A product over other batches or head sizes would broadcast. Torch's kernels and the equations
    # differ only in rounding for these head sizes and dtypes.
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and k.shape[::3] == q.shape[::3]
    fits = fits and q.dtype in DTYPES and len({(x.dtype, x.device) for x in (q, k, v)}) == 1
    if fits:
        (_, H, _, D), G = q.shape, k.shape[1]
        fits = 1 <= D <= 512 and 1 <= G <= H and H % G == 0
    if not fits:
        raise ValueError(
            "expected q (B, H, q, D) and k, v (B, G, k, D) on one device, in one dtype of float64, "
            "float32, bfloat16 or float16: k and v of one shape, with q's batch and head size, "
            f"which is 1 to 512, and query heads in a multiple of key heads, got {got}")

    # A mask of another length would be read at the wrong tokens, without any error.
    size = size or (q.shape[2], k.shape[2])
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(f"expected a Mask or None as mask, got {type(mask).__name__}")
    if mask is not None and (mask.shape[2:] != size or mask.shape[0] not in (1, len(q))):
        raise ValueError(
            f"expected a mask of {size} queries and keys, got {mask.shape[2:]} in a batch of "
            f"{mask.shape[0]}; make it for the whole sequence, or use mask.slice")  # fmt: skip
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"expected a positive number or None as scale, got {scale!r}")
    return q.shape[3] ** -0.5 if scale is None else float(scale)


# Short paths ------------------------------------------------------------------------------------
# A tree of many short segments would be very many boxes of few pairs each. Instead, groups of WIDTH
# queries attend, each to all keys that one of them sees. It is 2 to 4 times as fast as boxes for
# paths of 17 to 48 tokens, and no faster beyond SHORT.

WIDTH = 32

SHORT = 128  # keys that a query sees

GATHERED = 1 << 22  # most numbers of keys that a layer gathers, and the same again of values


@not_compiled
def attend_short(q, k, v, mask, *, scale=None):
    """Compute (out,) of `attend`, in groups of queries where all of them see few keys."""
    scale = checked_scale(q, k, v, mask, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = None
    if q.device.type == "cpu" and len(q) == 1:  # measured on a CPU only
        if ("groups", wide) not in mask.cache:
            mask.cache["groups", wide] = groups_of_queries(mask, wide)
        groups = mask.cache["groups", wide]
    if groups is None or groups[0].numel() * k.shape[1] * k.shape[3] > GATHERED:
        return attend(q, k, v, mask, scale=scale)[:1]
    return (grouped_attention(q, k, v, *groups, scale),)


def groups_of_queries(mask, dtype):
    """Return keys_UY, the keys of each group of WIDTH queries, and the bias (U, 1, W, Y).

    None: the mask has PAD, or a query that sees more than SHORT keys.
    """
    index, rows, position = (x[0] for x in mask.queries)
    _, start, end, key_position = (x[0] for x in mask.keys)
    if not len(index) or not rows.all() or (start >= end).any():
        return None
    sees_from = np.bincount(start, minlength=index[-1] + 2)
    sees_from[: end.max() + 1] -= np.bincount(end)[: len(sees_from)]
    if sees_from.cumsum()[index].max() > SHORT:
        return None

    # Tokens of 5 6 7 / 5 6 8 / 5 9 in groups of 3; the last group repeats its last query:
    #
    #     index    0 1 2 3 4    queries  0 1 2    keys  0 1 2 .
    #     token    5 6 7 8 9             3 4 4          0 1 3 4
    rows_UW = np.arange(-(-len(index) // WIDTH) * WIDTH).clip(max=len(index) - 1).reshape(-1, WIDTH)
    seen = [(start <= index[w[-1]]) & (index[w[0]] < end) for w in rows_UW]
    seen = [np.flatnonzero(x) for x in seen]
    length_U1 = np.array([[len(x)] for x in seen])
    is_key_UY = np.arange(length_U1.max()) < length_U1
    keys_UY = np.zeros(is_key_UY.shape, np.int64)
    keys_UY[is_key_UY] = np.concatenate(seen)
    queries = Queries(index[rows_UW], rows[rows_UW], position[rows_UW])
    keys = Keys(keys_UY, start[keys_UY], end[keys_UY], key_position[keys_UY])
    sees_UWY = visible_pairs(queries, keys, mask.window) & is_key_UY[:, None]  # (4)
    bias_UWY = torch.zeros(sees_UWY.shape, dtype=dtype)
    bias_UWY.masked_fill_(torch.from_numpy(~sees_UWY), -math.inf)
    return torch.from_numpy(keys_UY), bias_UWY[:, None]


def grouped_attention(q_1HnD, k_1GmD, v_1GmD, keys_UY, bias_U1WY, scale):
    """Compute attention of all groups of `groups_of_queries` in one call of torch's."""
    # NUMERICS: scores, softmax and sums are in float32 or better, as in boxes. Pinned by
    # tests/full/test_tree.py::test_tree_attention_in_low_precision_is_as_good_as_plain_torch.
    n = q_1HnD.shape[2]
    q_nHD = q_1HnD[0].transpose(0, 1).to(bias_U1WY.dtype)
    q_UWHD = pad(q_nHD, (0, 0, 0, 0, 0, -n % WIDTH)).unflatten(0, (-1, WIDTH))

    # Queries are in order already. Keys are gathered: each group needs the path above it too.
    def gathered(x_1GmD):
        x_mGD = x_1GmD[0].transpose(0, 1).to(bias_U1WY.dtype)
        x_UYGD = x_mGD.index_select(0, keys_UY.flatten()).unflatten(0, keys_UY.shape)
        return x_UYGD.transpose(1, 2)

    out_UHWD = scaled_dot_product_attention(
        q_UWHD.transpose(1, 2), gathered(k_1GmD), gathered(v_1GmD), bias_U1WY, scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    out_nHD = out_UHWD.transpose(1, 2).flatten(0, 1)[:n]
    return out_nHD.transpose(0, 1)[None].to(q_1HnD.dtype)


# Kernels ----------------------------------------------------------------------------------------
# For: torch's flash attention on CPU and CUDA, and which tiles it can compute.
# Skip it unless you audit a dtype or the arguments of a kernel call.


def can_fuse(q):
    """Return whether torch's flash kernel takes tensors like q."""
    fits_cuda = q.dtype.itemsize == 2 and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    return q.device.type == "cpu" or (q.device.type == "cuda" and fits_cuda)


def ready_for_tiles(fuses, q, *others):
    """Return tensors in the dtype in which tiles are computed, with stride 1 in the last dimension.

    With another stride torch's CPU kernel is silently wrong.
    """
    # NUMERICS: torch's CPU kernel takes 10 times as long in fp16 and rounds the result of each
    # tile; float32 tiles do neither. The formulas are float32 or float64 always. Pinned by
    # tests/full/test_attend.py::test_low_precision_is_as_good_as_sdpa.
    dtype = q.dtype
    if not fuses or (dtype == torch.float16 and q.device.type == "cpu"):
        dtype = torch.promote_types(dtype, torch.float32)
    tensors = [x.to(dtype) for x in (q, *others)]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def iterate_tiles(direction, mask, fuses, q):
    """Yield (rows, columns, seen, is_causal, is_fused) for every tile that holds a visible pair.

    rows = (batch, all heads, queries) indexes q, columns = (batch, all heads, keys) indexes k.
    seen: for the formulas True where a query sees a key, for a kernel 0 or -inf. None where every
    query sees every key, or where is_causal says it to a kernel.
    """
    # A box of the formulas has a matrix of scores in memory, so it is small. The kernels have none.
    device = q.device.type
    sizes = TILES["formulas"]
    if fuses:
        sizes = TILES[f"cpu {direction}" if device == "cpu" else "cuda"]
    for box in boxes(mask, sizes):
        # On CUDA flash takes no mask, so the formulas compute a PARTIAL tile. They have no
        # is_causal.
        is_fused = fuses and (box.kind != PARTIAL or device == "cpu")
        seen = None
        if box.kind == PARTIAL or (box.kind == CAUSAL and not is_fused):
            seen = pairs_of(mask, box, q.device, q.dtype if is_fused else torch.bool)
        rows, columns = (box.batch, ALL, box.rows), (box.batch, ALL, box.keys)
        yield rows, columns, seen, box.kind == CAUSAL, is_fused


def pairs_of(mask, box, device, dtype):
    """Return `seen` of a box; the mask keeps it for the next layer and the backward."""
    cached = mask.cache.setdefault("pairs", {})
    key = str(box), device, dtype
    if key in cached:
        return cached[key]
    seen = mask.slice(box.rows, box.keys, box.batch).dense()
    if dtype != torch.bool:
        seen = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
    seen = seen.to(device)

    # MEMORY: a long sequence with a ragged mask has more PARTIAL boxes than one would keep. Pinned
    # by tests/full/test_attend.py::test_partial_tiles_are_made_once_and_kept_up_to_a_bound.
    total = mask.cache.get("kept_pairs", 0) + seen.numel()
    if total <= KEPT_PAIRS:
        mask.cache["kept_pairs"] = total
        cached[key] = seen
    return seen


def flash_forward(q_bHiD, k_bGjD, v_bGjD, bias, is_causal, scale):
    """Compute out_bHiD and lse_bHi of one tile with torch's kernel. An empty tile would kill it."""
    # 0.0 is the dropout. Both kernels read G key heads for H query heads, without copies.
    qkv = q_bHiD, k_bGjD, v_bGjD
    aten = torch.ops.aten
    if q_bHiD.device.type == "cuda":
        return aten._scaled_dot_product_flash_attention(*qkv, 0.0, is_causal, scale=scale)[:2]
    out_bHiD, lse_bHi = aten._scaled_dot_product_flash_attention_for_cpu(
        *qkv, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    if bias is not None:
        # NUMERICS: the kernel returns an lse of 0 for a query that sees nothing. Pinned by
        # tests/full/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
        lse_bHi = lse_bHi + bias.amax(-1)
    return out_bHiD, lse_bHi


def flash_backward(saved, dout_bHiD, bias, is_causal, scale):
    """Compute the parts of dq, dk, dv of one tile with torch's kernel."""
    # Given the out and lse over all keys, the kernel computes this tile's part of (3).
    *tensors, lse_bHi = saved
    aten = torch.ops.aten
    if dout_bHiD.device.type == "cuda":
        # Nothing is packed (None, None), and the seed is for dropout, which is off.
        seed = torch.empty(2, dtype=torch.uint64, device=dout_bHiD.device)
        lengths = None, None, saved.q.shape[2], saved.k.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            dout_bHiD, *tensors, lse_bHi.contiguous(), *lengths, 0.0, is_causal, seed, seed[0],
            scale=scale,
        )  # fmt: skip
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout_bHiD, *tensors, lse_bHi, 0.0, is_causal, attn_mask=bias, scale=scale
    )

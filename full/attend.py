"""Attention on one device: adds masks, dtypes and fused kernels to `ring_attention.py`.

What it must equal, in addition to (1) to (3) of ring_attention.py and (4) of masks.py:

    (5)  a query that sees nothing: out 0, lse -inf, gradient 0 whatever arrives from upstream
    (6)  with a softcap c the scores are c tanh(s_ij / c); a gradient of lse enters (3) as
         dS_ij = P_ij (dout_i . v_j - dout_i . out_i + dlse_i)

On CUDA, flash computes full and causal boxes of bf16 and fp16 with a head size that is a multiple
of 8 up to 256; everything else runs by the formulas in tiles, which is exact and slower.
torch.compile leaves these calls out of its graphs. Not here: dropout, additive biases, sinks,
second derivatives, dv != dk.

A NaN or inf in PAD reaches nothing, because PAD is zeroed on entry. A NaN in a visible token may
spread to every token of its tile. Torch's CPU kernel hides a NaN in q where a tile has fewer keys
than a vector register: 8 in float64, else 16.

Letters:  B batch, b of a tile   H query heads   G key heads   D head size   S tokens i, j queries
and keys of a tile   r queries of a tile that read one key head: i H / G

Reference: FlashAttention-2 arXiv:2307.08691.
"""

import dataclasses
import functools
import math

import numpy as np
import torch

from full.masks import ALL, CAUSAL, FULL, PARTIAL, TILES, Box, as_mask, boxes, cut

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How the boxes of one call are computed."""

    fused: bool  # by torch's flash kernel where it can, else by the formulas
    scale: float  # of (1)
    softcap: float | None = None  # c of (6)


KEPT_PAIRS = 1 << 22  # of biases that a mask keeps for all layers: 4 to 8 bytes each


def group_query_heads(x_bHiX, g, /):
    """View the query heads of a key head as more rows of it: (b, H, i, X) -> (b, G, r, X).

    With r = i H / G rows against one key head, a matmul needs no copies of k and v. H = 4, G = 2,
    i = 3: heads 0 and 1 become the 6 rows of key head 0, and heads 2 and 3 the rows of key head 1.
    """
    return x_bHiX.unflatten(1, (g, -1)).flatten(2, 3)


def tile_scores(q_bHiD, k_bGjD, bias, config):
    """Compute the scores s_bGrj of a tile, equations (1) and (6), with -inf where masked."""
    g = k_bGjD.shape[1]
    s_bGrj = group_query_heads(q_bHiD, g) @ k_bGjD.mT * config.scale  # (1)

    # The cap comes before the mask: c tanh(-inf) would be -c, a score that counts.
    if config.softcap is not None:
        s_bGrj = config.softcap * torch.tanh(s_bGrj / config.softcap)  # (6)
    if bias is None:
        return s_bGrj

    # Masked is -inf and not a large negative number. With a large number, the lse of a query that
    # sees nothing would be that number, its P would be 1 for each masked key, and its output the
    # sum of values that it must not see.
    return s_bGrj + group_query_heads(bias.expand(*q_bHiD.shape[:3], -1), g)


def tile_forward(q_bHiD, k_bGjD, v_bGjD, bias, config):
    """Compute out_bHiD and lse_bHi of one tile by the formulas."""
    s_bGrj = tile_scores(q_bHiD, k_bGjD, bias, config)
    lse_bGr = torch.logsumexp(s_bGrj, -1)  # (1)

    # As in block_attention, a query that sees no key of this tile has out 0 and lse -inf.
    finite_bGr = lse_bGr.masked_fill(lse_bGr == -math.inf, 0.0)
    p_bGrj = torch.exp(s_bGrj - finite_bGr[..., None])
    out_bGrD = p_bGrj @ v_bGjD
    return out_bGrD.reshape(q_bHiD.shape), lse_bGr.reshape(q_bHiD.shape[:3])


def tile_backward(dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi, dlse_bHi, bias, config):
    """Compute the parts dq_bHiD, dk_bGjD, dv_bGjD of one tile by the formulas, equation (3).

    out, lse, dlse: of these queries over all keys. dlse: the gradient of lse, or None.
    """
    delta_bHi = (dout_bHiD * out_bHiD).sum(-1)
    if dlse_bHi is not None:
        delta_bHi = delta_bHi - dlse_bHi  # (6): d lse_i / d s_ij = P_ij

    # One key head at a time. The sums over r in dk and dv run over all query heads that read the
    # key head, which is the gradient of having copied it.
    g = k_bGjD.shape[1]
    s_bGrj = tile_scores(q_bHiD, k_bGjD, bias, config)
    q_bGrD = group_query_heads(q_bHiD, g)
    dout_bGrD = group_query_heads(dout_bHiD, g)
    lse_bGr1 = group_query_heads(lse_bHi[..., None], g)
    delta_bGr1 = group_query_heads(delta_bHi[..., None], g)

    # s is c tanh(x / c) already, whose derivative is 1 - tanh^2 = 1 - (s / c)^2. A masked s is
    # -inf: clamp it, so that its P of 0 is multiplied by a finite number.
    p_bGrj = torch.exp(s_bGrj - lse_bGr1)  # (3)
    dp_bGrj = dout_bGrD @ v_bGjD.mT
    ds_bGrj = p_bGrj * (dp_bGrj - delta_bGr1) * config.scale  # (3)
    if config.softcap is not None:
        tanh_bGrj = s_bGrj.clamp(min=-config.softcap) / config.softcap
        ds_bGrj = ds_bGrj * (1 - tanh_bGrj**2)
    dq_bGrD = ds_bGrj @ k_bGjD
    return dq_bGrD.reshape(q_bHiD.shape), ds_bGrj.mT @ q_bGrD, p_bGrj.mT @ dout_bGrD


def forward_tiles(q_BHqD, k_BGkD, v_BGkD, mask, config, before=None, /):
    """Compute out_BHqD and lse_BHq tile by tile, in float32 or better, outside autograd.

    mask: a Mask of q queries and k keys. None: every query sees every key.
    config: an AttentionConfig.
    before: (out, lse) of the same queries over earlier keys. The new result is merged into it in
        place. Default: none.
    """
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)
    B, H, s, D = q_BHqD.shape
    if before is not None:
        out_BHqD, lse_BHq = before
    else:
        # No key seen yet, equation (5). In memory the heads of a token are neighbors, as the
        # model's next matmul reads them.
        out_BHqD = q_BHqD.new_zeros(B, s, H, D, dtype=wide).transpose(1, 2)
        lse_BHq = q_BHqD.new_full((B, H, s), -math.inf, dtype=wide)
    has_result_Bq = np.full((B, s), before is not None)

    q, k, v = ready_for_tiles(config, q_BHqD, k_BGkD, v_BGkD)
    for rows, columns, bias, is_causal, is_fused in iterate_tiles("forward", mask, config, q, k):
        qkv = q[rows], k[columns], v[columns]
        if is_fused:
            part_out, part_lse = flash_forward(*qkv, bias, is_causal, config.scale)
        else:
            qkv = (x.to(wide) for x in qkv)
            part_out, part_lse = tile_forward(*qkv, bias, config)

        # Tiles of the same queries have different keys, so they merge. The first tile of its
        # queries is their result so far: a copy is cheaper than a merge with nothing.
        has_result_bi = has_result_Bq[rows[0], rows[2]]
        if has_result_bi.any():
            merge_(out_BHqD[rows], lse_BHq[rows], part_out.to(wide), part_lse)  # (2)
        else:
            out_BHqD[rows] = part_out
            lse_BHq[rows] = part_lse
        has_result_bi[:] = True

    return out_BHqD, lse_BHq


def merge_(out1, lse1, out2, lse2):
    """Compute `merge`, equation (2), in place: out1 and lse1 become the result."""
    # With share2 = 1 / (1 + exp(lse1 - lse2)), out = out1 + share2 (out2 - out1): one pass over the
    # outputs where `merge` makes three. The second set is neutral if a query sees none of it.
    # With the masses 2 and 2 of the example at `merge`, share2 is 1/2 and out 2 + (6 - 2) / 2 = 4.
    # NUMERICS: the sigmoid and logaddexp do not overflow, whichever lse is larger. Pinned by
    # tests/full/test_attend.py::test_scores_of_1e5_in_either_order_stay_finite.
    share2 = torch.sigmoid(lse2 - lse1).masked_fill_(lse2 == -math.inf, 0.0)
    out1.lerp_(out2, share2[..., None])
    torch.logaddexp(lse1, lse2, out=lse1)


def backward_tiles(dout, q_BHqD, k_BGkD, v_BGkD, out, lse, dlse, mask, config, before=None, /):
    """Compute dq_BHqD, dk_BGkD, dv_BGkD tile by tile, in float32 or better, equation (3).

    q, k, v, mask, config: as in `forward_tiles`, which stored no scores.
    dout (B, H, q, D), dlse (B, H, q): the gradients that arrive for out and lse; see
        `without_blind_rows`. dlse may be None.
    out (B, H, q, D), lse (B, H, q): the results of these queries over all keys, wherever those are.
    before: dq of the same queries over other keys, to which the new part is added in place.
    """
    # Torch's kernels know no gradient of lse. Where one arrives, the formulas compute every tile.
    if dlse is not None:
        config = dataclasses.replace(config, fused=False)
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)
    q, k, v, dout, out = ready_for_tiles(config, q_BHqD, k_BGkD, v_BGkD, dout, out)

    # The sums are float32 or better, whatever the dtype of a tile is.
    dq_BHqD = torch.zeros_like(q, dtype=wide) if before is None else before
    dk_BGkD = torch.zeros_like(k, dtype=wide)
    dv_BGkD = torch.zeros_like(v, dtype=wide)
    for rows, columns, bias, is_causal, is_fused in iterate_tiles("backward", mask, config, q, k):
        block = dout[rows], q[rows], k[columns], v[columns], out[rows]
        if is_fused:
            dq, dk, dv = flash_backward(*block, lse[rows], bias, is_causal, config.scale)
        else:
            block = (x.to(wide) for x in block)
            dlse_rows = None if dlse is None else dlse[rows]
            dq, dk, dv = tile_backward(*block, lse[rows], dlse_rows, bias, config)

        # Gradients are plain sums over tiles: the weights are in P already.
        dq_BHqD[rows] += dq
        dk_BGkD[columns] += dk
        dv_BGkD[columns] += dv
        del block, dq, dk, dv  # before the next tile has results of its own
    return dq_BHqD, dk_BGkD, dv_BGkD


def without_blind_rows(dout, lse, dlse):
    """Return dout, lse and dlse without the queries that saw nothing, equation (5)."""
    # NUMERICS: the lse of such a query is -inf, and exp(-inf - -inf) is NaN. With an lse of 0 its P
    # is exp(-inf - 0) = 0. Its dout and dlse become 0, so that its delta is 0 whatever arrives.
    # Pinned by tests/full/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
    blind_BHq = lse == -math.inf

    # Most calls have no such query. On CUDA, to look would wait for the device.
    if lse.device.type == "cpu" and not blind_BHq.any():
        return dout, lse, dlse
    dout = dout.masked_fill(blind_BHq[..., None], 0.0)
    lse = lse.masked_fill(blind_BHq, 0.0)
    if dlse is not None:
        dlse = dlse.masked_fill(blind_BHq, 0.0)
    return dout, lse, dlse


def run_forward(ctx, forward, padding, q, k, v, where, config):
    """Return (out, lse) of forward(q, k, v, where, config), and save what its backward needs.

    forward: `forward_tiles` or `ring_forward`. padding: see `Mask.padding_tokens`, or None.
    """
    # NUMERICS: a masked weight is 0, but 0 * NaN is NaN: garbage in PAD would reach queries that do
    # not see it. Zeroed once, here, it reaches nothing. Its gradients are 0 anyway: P is 0 where a
    # PAD is the key, and dout is 0 where it is the query. Pinned by
    # tests/full/test_attend.py::test_garbage_in_pad_reaches_nothing.
    has_blind, has_unseen = (False, False) if padding is None else (x.any() for x in padding)
    if has_blind:
        blind_B1q = torch.from_numpy(padding[0]).to(q.device)[:, None]
        q = q.masked_fill(blind_B1q[..., None], 0.0)
    if has_unseen:
        unseen_B1k = torch.from_numpy(padding[1]).to(k.device)[:, None]
        k, v = (x.masked_fill(unseen_B1k[..., None], 0.0) for x in (k, v))
    out, lse = forward(q, k, v, where, config)
    out = out.to(q.dtype)

    # Boxes may include PAD among the queries. It has seen nothing, equation (5).
    if has_blind:
        out.masked_fill_(blind_B1q[..., None], 0.0)
        lse.masked_fill_(blind_B1q, -math.inf)

    # These five are O(S), and on a ring O(S / W): no block of another rank. Autograd through the
    # tiles would keep the P of every tile: O(S^2).
    # NUMERICS: lse stays in float32 or better; in bf16 the gradients are 10 to 80 times worse.
    # Pinned by tests/full/test_ring.py::test_every_layout_and_method_is_the_definition.
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.setting = where, config
    ctx.set_materialize_grads(False)
    return out, lse


def run_backward(ctx, backward, dout, dlse):
    """Return dq, dk, dv in the dtype of q, by `backward_tiles` or `ring_backward`."""
    if torch.is_grad_enabled():  # in a backward only under create_graph=True
        raise NotImplementedError("attention has no second derivative here: no create_graph")
    q, k, v, out, lse = ctx.saved_tensors

    # COMM: a loss that leaves out and lse of one rank unused still runs this backward there, with
    # None for the unused ones, so all ranks send the same messages. Pinned by
    # tests/full/test_ring.py::test_ranks_may_use_different_outputs.
    if dout is None:
        dout = torch.zeros_like(out)
    dout, lse, dlse = without_blind_rows(dout, lse, dlse)
    grads = backward(dout, q, k, v, out, lse, dlse, *ctx.setting)
    return [grad.to(q.dtype) for grad in grads]


class _Attend(torch.autograd.Function):
    """Attention on one device. The mask may be None."""

    @staticmethod
    def forward(ctx, q, k, v, mask, config):
        padding = None if mask is None else mask.padding_tokens()
        return run_forward(ctx, forward_tiles, padding, q, k, v, mask, config)

    @staticmethod
    def backward(ctx, dout, dlse):
        return *run_backward(ctx, backward_tiles, dout, dlse), None, None


def not_compiled(function):
    """Keep a function out of torch.compile's graphs; import the compiler only where it runs."""

    # Masks are numpy arrays, and messages of a ring are not tensor operations: no graph holds them.
    @functools.wraps(function)
    def call(*args, **options):
        run = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return run(*args, **options)

    return call


@not_compiled
def attend(q, k, v, /, mask=None, *, scale=None, softcap=None, backend=None):
    """Compute attention and its log-sum-exp on one device, equations (1) and (4) to (6).

    q: (B, H, q, D), any strides. float64, float32, bf16 or fp16.
    k, v: (B, G, k, D), dtype of q. H must be divisible by G, and D be 1 to 512.
    mask: a Mask, or bool (B, 1 or H, q, k), True where a query sees a key. Default: all is seen.
    scale: positive number that multiplies q . k. Default: D ** -0.5.
    softcap: positive number, see (6). Default: none.
    backend: "fused" (torch's flash kernel), "math" (the formulas), None (fused where it can).

    Returns out (B, H, q, D) in the dtype of q, and lse (B, H, q) in float32 or float64: the natural
    log, of the scaled scores. Both are differentiable, once. A query that sees nothing has 0 and
    -inf. Raises ValueError if the input does not fit.
    """
    mask = as_mask(mask)
    config = checked_config(q, k, v, mask, scale=scale, softcap=softcap, backend=backend)
    return _Attend.apply(q, k, v, mask, config)


# Kernels ----------------------------------------------------------------------------------------
# For: torch's flash attention on CPU and CUDA, and which tiles it can compute.
# Skip it unless you audit a dtype or the arguments of a kernel call.


def ready_for_tiles(config, q, *others):
    """Return tensors in the dtype in which tiles are computed, with stride 1 in the last dimension.

    With another stride torch's CPU kernel is silently wrong.
    """
    # NUMERICS: torch's CPU kernel takes 10 times as long in fp16 and rounds the result of each
    # tile; float32 tiles do neither. The formulas are float32 or float64 always. Pinned by
    # tests/full/test_attend.py::test_low_precision_stays_within_twice_the_error_of_sdpa.
    dtype = q.dtype
    is_half_on_cpu = dtype == torch.float16 and q.device.type == "cpu"
    if is_half_on_cpu or not config.fused:
        dtype = torch.promote_types(dtype, torch.float32)

    tensors = [x.to(dtype) for x in (q, *others)]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def iterate_tiles(direction, mask, config, q, k):
    """Yield (rows, columns, bias, is_causal, is_fused) for every tile that holds a visible pair.

    rows = (batch, all heads, queries) indexes q, columns = (batch, all heads, keys) indexes k. bias
    is None where everything is seen, or where is_causal says what is.
    """
    # A box of the formulas has a matrix of scores in memory, so it is small. The kernels have none.
    device = q.device.type
    sizes = TILES["formulas"]
    if config.fused:
        sizes = TILES[f"cpu {direction}" if device == "cpu" else "cuda"]
    # The forward and the backward of a layer, and all layers, get the same list.
    if mask is not None:
        found = boxes(mask, sizes)
    else:
        everything = Box(ALL, slice(0, q.shape[2]), slice(0, k.shape[2]), FULL)
        found = cut(everything, sizes)
    for box in found:
        # On CUDA flash takes no mask, so the formulas compute a PARTIAL tile. They want a bias for
        # a causal square too.
        is_fused = config.fused and (box.kind != PARTIAL or device == "cpu")
        bias = None
        if box.kind == PARTIAL or (box.kind == CAUSAL and not is_fused):
            dtype = q.dtype if is_fused else torch.promote_types(q.dtype, torch.float32)
            bias = bias_of(mask, box, q.device, dtype)

        rows = box.batch, ALL, box.rows
        columns = box.batch, ALL, box.keys
        yield rows, columns, bias, box.kind == CAUSAL, is_fused


def bias_of(mask, box, device, dtype):
    """Return 0 or -inf per pair of a box; the mask keeps it for the next layer and the backward."""
    kept = mask.cache.setdefault("biases", {})
    key = str(box), device, dtype
    if key in kept:
        return kept[key]

    visible = mask.slice(box.rows, box.keys, box.batch).dense()
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf).to(device)

    # MEMORY: a long sequence with a ragged mask has more PARTIAL boxes than one would keep. Pinned
    # by tests/full/test_attend.py::test_partial_tiles_are_made_once_and_kept_up_to_a_bound.
    total = mask.cache.get("kept_pairs", 0) + bias.numel()
    if total <= KEPT_PAIRS:
        mask.cache["kept_pairs"] = total
        kept[key] = bias
    return bias


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


def flash_backward(dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi, bias, is_causal, scale):
    """Compute the parts of dq, dk, dv of one tile with torch's kernel. out and lse are final."""
    # Given the out and lse over all keys, the kernel computes this tile's part of (3).
    given = dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD
    aten = torch.ops.aten
    if q_bHiD.device.type == "cuda":
        # Nothing is packed (None, None), and the seed is for dropout, which is off.
        seed = torch.empty(2, dtype=torch.uint64, device=q_bHiD.device)
        lengths = None, None, q_bHiD.shape[2], k_bGjD.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *given, lse_bHi.contiguous(), *lengths, 0.0, is_causal, seed, seed[0], scale=scale
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, lse_bHi, 0.0, is_causal, attn_mask=bias, scale=scale
    )


def checked_config(q, k, v, mask, size=None, *, scale, softcap, backend):
    """Return the AttentionConfig of a call; raise ValueError unless its inputs fit together.

    mask: a Mask or None. size: how many queries and keys it must have. Default: those of q and k.
    scale, softcap, backend: as in `attend`.
    """
    named = zip("qkv", (q, k, v), strict=True)
    got = ", ".join(f"{name} {x.dtype} {tuple(x.shape)} {x.device}" for name, x in named)
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(f"expected q (B, H, q, D) and k, v (B, G, k, D), got {got}")

    # A product over other batches or head sizes would broadcast. Torch's kernels and the equations
    # differ only in rounding for these head sizes and dtypes.
    batch, heads, num_queries, head_size = q.shape
    key_heads, num_keys = k.shape[1:3]
    fits = k.shape == v.shape == (batch, key_heads, num_keys, head_size) and head_size <= 512
    if not fits or not head_size or not 1 <= key_heads <= heads or heads % key_heads:
        raise ValueError(
            "expected k and v of one shape, with q's batch and head size, which is 1 to 512, and "
            f"query heads in a multiple of key heads, got {got}")  # fmt: skip
    if q.dtype not in DTYPES or len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        raise ValueError(f"expected q, k, v on one device, in one dtype of {DTYPES}, got {got}")

    # A mask of another length would be read at the wrong tokens, without any error.
    size = size or (num_queries, num_keys)
    if mask is not None and mask.shape[2:] != size:
        raise ValueError(
            f"expected a mask of {size} queries and keys, got {mask.shape[2:]}; make it for the "
            f"whole sequence, or take mask.slice(queries, keys)")  # fmt: skip
    if mask is not None and not (mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)):
        raise ValueError(f"the mask has batch {mask.shape[0]} and {mask.shape[1]} heads, got {got}")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"expected a positive number or None as {name}, got {value!r}")
    if backend not in (None, "math", "fused"):
        raise ValueError(f'expected None, "math" or "fused" as backend, got {backend!r}')

    # Torch's flash kernels compute equation (1), on CUDA for some inputs only. A caller who asks
    # for the kernel wants to know why it is not used.
    device = q.device.type
    fits_cuda = q.dtype.itemsize == 2 and head_size % 8 == 0 and head_size <= 256
    can_fuse = softcap is None and (device == "cpu" or (device == "cuda" and fits_cuda))
    if backend == "fused" and not can_fuse:
        raise ValueError(
            'expected for backend="fused" no softcap, and a CPU, or on CUDA bf16 or fp16 and a '
            f"head size that is a multiple of 8 up to 256; got softcap {softcap}, {q.dtype} on "
            f"{device}, head size {head_size}; pass backend=None")  # fmt: skip
    scale = head_size**-0.5 if scale is None else float(scale)
    return AttentionConfig(backend != "math" and can_fuse, scale, softcap)

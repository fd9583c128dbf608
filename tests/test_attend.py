"""attend and merge on one device: exact, clean of what PAD holds, within SDPA's own error."""

import functools
import math

import pytest
import torch
import torch.utils.checkpoint as ckpt
from conftest import shortened
from oracles import plain_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import ring_attention as ra
from ring_attention import Mask, Sizes, attend, make_config, merge, relative

KINDS = list(ra.examples(8))
BACKENDS = ("math", "fused")


def _draw(rows, keys=None, *, heads=4, groups=2, width=8, batch=2, dtype=torch.float64, seed=0):
    keys, gen = rows if keys is None else keys, torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, rows, width), *[(batch, groups, keys, width)] * 2]
    leaves = [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes]
    dout = torch.randn(shapes[0], generator=gen, dtype=torch.float64).to(dtype)
    return [x.requires_grad_() for x in leaves], dout


def _dense(mask, rows, keys):
    every = Mask.full(max(rows, keys)).slice(slice(rows), slice(keys))
    return (every if mask is None else ra.as_mask(mask)).dense()


def _worst(leaves, dout, mask, **options):
    """The worst error of out, lse, and the gradients through out and through out and lse."""
    visible = _dense(mask, leaves[0].shape[2], leaves[1].shape[2])
    scores = {name: options[name] for name in ("scale", "softcap") if name in options}
    pair, truth = attend(*leaves, mask, **options), plain_attention(*leaves, visible, **scores)
    dead = truth[1] == -math.inf
    assert torch.equal(pair[1] == -math.inf, dead)
    dlse = torch.randn(dead.shape, dtype=truth[1].dtype, generator=torch.Generator().manual_seed(5))
    errors = [relative(pair[0].detach(), truth[0].detach())]
    errors.append(relative(*(x[1].detach().masked_fill(dead, 0.0) for x in (pair, truth))))
    for n in (1, 2):
        grads, want = (
            torch.autograd.grad(x[:n], leaves, (dout, dlse)[:n], retain_graph=True)
            for x in (pair, truth)
        )
        errors += [relative(a, b) for a, b in zip(grads, want, strict=True)]
    return max(errors)


@pytest.fixture(params=[128, 8, 3])
def tile(request, monkeypatch):
    """The side of a tile: one, many, and ones that divide nothing."""
    set_tiles(monkeypatch, request.param)
    return request.param


def set_tiles(monkeypatch, tile, *, partial=None, most=None):
    """Cut boxes into small ones: causal squares of a tile in the backward and in the formulas."""
    partial, most = partial or 2 * tile, most or 4 * tile
    whole = Sizes(tile, ra.NEVER, most, most, partial)
    small = whole._replace(square=tile)
    names = {"cpu forward": whole, "cuda": whole, "cpu backward": small, "formulas": small}
    assert names.keys() == ra.TILES.keys()
    monkeypatch.setattr(ra, "TILES", names)


# Exactness -----------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_gradients_are_the_plain_attention(kind, backend, tile):
    leaves, dout = _draw(41)
    assert _worst(leaves, dout, ra.examples(41, 4)[kind], backend=backend) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_of_any_mask_may_be_zero(kind):
    """The sibling: each gradient that is compared is far from 0, but dv's through lse, which is."""
    leaves, dout = _draw(41)
    out, lse = plain_attention(*leaves, _dense(ra.examples(41, 4)[kind], 41, 41))
    dlse = torch.ones_like(lse).masked_fill(lse == -math.inf, 0.0)
    for grad in torch.autograd.grad(out, leaves, dout, retain_graph=True):
        assert grad.norm() > 1 and relative(torch.zeros_like(grad), grad) == 1.0
    dq, dk, dv = torch.autograd.grad(lse, leaves, dlse, allow_unused=True)
    assert dq.norm() > 1 and dk.norm() > 1 and dv is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_through_lse_alone_is_the_definitions(kind, backend, tile):
    leaves, _ = _draw(21)
    mask = ra.examples(21, 4)[kind]
    lse, truth = (
        attend(*leaves, mask, backend=backend)[1],
        plain_attention(*leaves, _dense(mask, 21, 21))[1],
    )
    dlse = torch.randn(lse.shape, dtype=lse.dtype, generator=torch.Generator().manual_seed(3))
    dq, dk, dv = torch.autograd.grad(lse, leaves, dlse)
    want = torch.autograd.grad(truth, leaves[:2], dlse)
    assert max(relative(a, b) for a, b in zip((dq, dk), want, strict=True)) < 1e-12
    assert not dv.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_part_of_the_queries_and_keys_of_any_mask_is_exact(kind, backend, monkeypatch):
    set_tiles(monkeypatch, 4)
    whole = ra.as_mask(ra.examples(29, 4)[kind])
    for rows, keys in ((ra.indices(29, 1, 3), ra.indices(29, 0, 3)), (slice(9, 29), slice(0, 13))):
        mask = whole.slice(rows, keys)
        leaves, dout = _draw(*mask.shape[2:])
        assert _worst(leaves, dout, mask, backend=backend) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_mask_row_serves_a_batch_and_equal_rows_may_share(backend, tile):
    leaves, dout = _draw(20, batch=5)
    doc = torch.arange(20) // torch.tensor([[6], [6], [6], [9], [6]])
    for mask in (Mask.documents(doc_ids=doc), Mask.documents(doc_ids=doc[0])):
        assert _worst(leaves, dout, mask, backend=backend) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 3, 64, 129, 512])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_grouping_of_heads_and_any_head_dim(groups, width, backend):
    leaves, dout = _draw(11, groups=groups, width=width)
    assert _worst(leaves, dout, Mask.causal(11), backend=backend) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows, keys", [(5, 23), (23, 5), (1, 1), (1, 40), (0, 7), (7, 0), (0, 0)])
def test_queries_and_keys_may_differ_in_number_and_be_none(rows, keys, backend):
    leaves, dout = _draw(rows, keys)
    mask = Mask.causal(40).slice(slice(40 - rows, 40), slice(keys))
    assert _worst(leaves, dout, mask, backend=backend) < 1e-12
    assert _worst(leaves, dout, None, backend=backend) < 1e-12


def test_scale_and_softcap_are_those_of_the_plain_attention(tile):
    leaves, dout = _draw(30)
    for mask in ra.examples(30, 4).values():
        assert _worst(leaves, dout, mask, softcap=1.5) < 1e-12
        assert _worst(leaves, dout, mask, scale=0.7, softcap=3.0) < 1e-12
        assert _worst(leaves, dout, mask, scale=0.7) < 1e-12


def _layouts(x):
    """The same values behind other strides, one of them 0."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return [x.mT.contiguous().mT, x.transpose(1, 2).contiguous().transpose(1, 2), wide[..., ::2]]


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", range(3))
def test_strides_do_not_matter(backend, which):
    leaves, dout = _draw(20, width=6)
    truth = attend(*leaves, Mask.causal(20), backend=backend)[0]
    want = torch.autograd.grad(truth, leaves, dout)
    *views, upstream = (_layouts(x.detach())[which] for x in (*leaves, dout))
    views = [x.requires_grad_() for x in views]
    out = attend(*views, Mask.causal(20), backend=backend)[0]
    grads = torch.autograd.grad(out, views, upstream)
    for a, b in zip((out, *grads), (truth, *want), strict=True):
        assert relative(a.detach(), b.detach()) < 1e-14
    one = torch.autograd.grad(attend(*views, backend=backend)[0].sum(), views)  # expanded upstream
    all_ones = torch.autograd.grad(attend(*leaves)[0], leaves, torch.ones_like(dout))
    assert max(relative(a, b) for a, b in zip(one, all_ones, strict=True)) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_inputs_get_the_sum_of_the_gradients(backend):
    leaves, dout = _draw(13, heads=4, groups=4)
    one = [x.detach()[:1, :1].clone().requires_grad_() for x in leaves]
    out, lse = attend(*(x.expand(2, 4, -1, -1) for x in one), Mask.causal(13), backend=backend)
    truth = plain_attention(*one, Mask.causal(13).dense())
    grads = torch.autograd.grad(out, one, dout)
    want = torch.autograd.grad(truth[0], one, dout.sum((0, 1), keepdim=True))
    pairs = zip((out, lse, *grads), (*(x.expand(2, 4, *x.shape[2:]) for x in truth), *want))
    assert max(relative(a.detach(), b.detach()) for a, b in pairs) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("which", range(3))
def test_one_input_alone_may_need_its_gradient(which):
    leaves, dout = _draw(9)
    want = torch.autograd.grad(attend(*leaves, Mask.causal(9))[0], leaves[which], dout)[0]
    alone = [x if i == which else x.detach() for i, x in enumerate(leaves)]
    (grad,) = torch.autograd.grad(attend(*alone, Mask.causal(9))[0], leaves[which], dout)
    assert torch.equal(grad, want)
    with torch.no_grad():
        assert not attend(*leaves)[0].requires_grad


@pytest.mark.quick
def test_a_zero_gradient_fails_the_comparison():
    leaves, dout = _draw(9)
    grads = torch.autograd.grad(attend(*leaves)[0], leaves, dout)
    assert [relative(torch.zeros_like(grad), grad) for grad in grads] == [1.0] * 3


@pytest.mark.quick
def test_a_second_derivative_is_refused():
    leaves, dout = _draw(5)
    for function in (attend, lambda *qkv: ra.ring_attention(*qkv, return_lse=True)):
        with pytest.raises(NotImplementedError, match="second derivative"):
            torch.autograd.grad(function(*leaves)[0], leaves[0], dout, create_graph=True)


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_written_into_arguments(backend):
    leaves, dout = _draw(12)
    mask = ra.examples(12, 4)["blocks"]
    before = [x.detach().clone() for x in (*leaves, dout)]
    out, lse = attend(*leaves, mask, backend=backend)
    kept = out.detach().clone(), lse.detach().clone()
    out.backward(dout)
    merge(out, lse, out, lse)
    for a, b in zip((*leaves, dout, out, lse), (*before, *kept), strict=True):
        assert torch.equal(a, b)


# Lower precision -----------------------------------------------------------------------------


def _three(dtype, mask, accurate=False):
    """Errors of out, dq, dk, dv against float64: ours, and SDPA's at this dtype."""
    leaves, dout = _draw(512, heads=8, groups=2, width=64, batch=1, dtype=dtype)

    def run(attention, tensors, upstream):
        out = attention(*tensors)
        return [x.detach() for x in (out, *torch.autograd.grad(out, tensors, upstream))]

    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth = run(lambda *x: plain_attention(*x, mask.dense())[0], exact, dout.double())
    options = {"attn_mask": mask.dense(), "enable_gqa": True}
    rival = run(lambda *x: scaled_dot_product_attention(*x, **options), leaves, dout)
    ours = run(lambda *x: attend(*x, mask, accurate=accurate)[0], leaves, dout)
    assert all(x.dtype == dtype for x in ours)
    return [[relative(a, b) for a, b in zip(x, truth, strict=True)] for x in (ours, rival)]


@pytest.mark.parametrize("mask", [Mask.causal(512), Mask.causal(512, window=200)])
@pytest.mark.parametrize(
    "dtype, most", [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)]
)
def test_low_precision_stays_within_twice_the_error_of_sdpa(dtype, most, mask):
    ours, rival = _three(dtype, mask)
    assert max(a / b for a, b in zip(ours, rival, strict=True)) <= most


def test_accurate_bf16_is_below_2e_3():
    ours, rival = _three(torch.bfloat16, Mask.causal(512), accurate=True)
    assert max(ours) < 2e-3 < max(rival)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ra.DTYPES)
def test_out_has_the_dtype_of_q_and_lse_float32_or_float64(dtype):
    leaves, _ = _draw(4, dtype=dtype)
    out, lse = attend(*leaves, Mask.causal(4))
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)


# Rows that see nothing, NaN, large scores ----------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("upstream", [1.0, 1e300, math.inf, math.nan])
def test_a_row_that_sees_nothing_is_zero_whatever_arrives(upstream, backend, tile):
    valid = torch.arange(40) % 3 != 1
    mask = Mask.blocks(torch.arange(40) // 7, valid)
    leaves, dout = _draw(40)
    clean = torch.autograd.grad(attend(*leaves, mask, backend=backend)[0], leaves, dout)
    dout[:, :, ~valid] *= upstream
    out, lse = attend(*leaves, mask, backend=backend)
    dlse = torch.randn_like(lse).masked_fill(~valid, upstream)
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert (out[:, :, ~valid] == 0).all() and (lse[:, :, ~valid] == -math.inf).all()
    assert all((grad[:, :, ~valid] == 0).all() for grad in grads)
    assert max(relative(a, b) for a, b in zip(grads, clean, strict=True)) < 1e-12
    through_lse = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert all((g[:, :, ~valid] == 0).all() and g.isfinite().all() for g in through_lse)


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("upstream", [1.0, 1e4, math.inf, math.nan])
def test_dead_rows_are_zero_in_low_precision_and_in_dense_masks(upstream, dtype, backend):
    visible = torch.rand(2, 4, 30, 30, generator=torch.Generator().manual_seed(0)) > 0.7
    dead = torch.arange(30) % 5 == 2
    visible[:, :, dead] = False
    leaves, dout = _draw(30, dtype=dtype)
    want = torch.autograd.grad(attend(*leaves, visible, backend=backend)[0], leaves, dout)
    out, lse = attend(*leaves, visible, backend=backend)
    grads = torch.autograd.grad(out, leaves, dout.masked_fill(dead[:, None], upstream))
    assert not out[:, :, dead].any() and (lse[:, :, dead] == -math.inf).all()
    assert not grads[0][:, :, dead].any() and lse[:, :, ~dead].isfinite().all()
    most = 1e-2 if dtype == torch.bfloat16 else 1e-3  # the way may be another, the value is not
    assert max(relative(a, b.double()) for a, b in zip(grads, want, strict=True)) < most


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", range(3))
def test_nan_stays_inside_the_tiles_of_its_document_and_is_not_hidden(which, backend, tile):
    """Documents of 10 have tiles of their own, unless a tile is longer."""
    doc = torch.arange(40) // 10
    leaves, dout = _draw(40)
    want = torch.autograd.grad(attend(*leaves, Mask.documents(doc_ids=doc))[0], leaves, dout)
    tensors = [x.detach().clone() for x in leaves]
    tensors[which][:, :, 13] = math.nan
    tensors = [x.requires_grad_() for x in tensors]
    out, lse = attend(*tensors, Mask.documents(doc_ids=doc), backend=backend)
    grads = torch.autograd.grad(out, tensors, dout)
    for a, b in zip(grads, want, strict=True):
        assert tile > 10 or relative(a[:, :, doc != 1], b[:, :, doc != 1]) < 1e-12
    assert out[:, :, 13].isnan().all() and (which == 2 or lse[:, :, 13].isnan().all())
    assert grads[0][:, :, 13].isnan().all()


PAD = torch.arange(40) % 9 == 4
PADDED = {
    "padding": lambda: Mask.padding(~PAD),
    "padding, all see": lambda: Mask.padding(~PAD, causal=False),
    "documents": lambda: Mask.documents(doc_ids=torch.where(PAD, -1, torch.arange(40) // 15)),
    "blocks": lambda: Mask.blocks(torch.arange(40) // 7, ~PAD),
    "dense": lambda: Mask.padding(~PAD).dense(),
}


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", PADDED)
def test_garbage_in_pad_reaches_nothing(kind, poison, backend, tile):
    """In q, k, v and both upstream gradients at once: every result is equal to the last bit."""
    leaves, dout = _draw(40)
    dlse = torch.randn(dout.shape[:3], dtype=dout.dtype, generator=torch.Generator().manual_seed(4))
    mask = PADDED[kind]()

    def run(fill):
        tensors = [x.detach().masked_fill(PAD[:, None], fill).requires_grad_() for x in leaves]
        upstream = dout.masked_fill(PAD[:, None], fill), dlse.masked_fill(PAD, fill)
        pair = attend(*tensors, mask, backend=backend)
        through_out = torch.autograd.grad(pair[0], tensors, upstream[0], retain_graph=True)
        return [*pair, *through_out, *torch.autograd.grad(pair, tensors, upstream)]

    clean, found = run(0.5), run(poison)
    assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))
    out, lse, *grads = found
    assert not any(x[:, :, PAD].any() for x in (out, *grads))
    assert (lse[:, :, PAD] == -math.inf).all() and lse[:, :, ~PAD].isfinite().all()
    assert all(grad[:, :, ~PAD].any() for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", range(3))
def test_nan_in_a_pad_token_reaches_no_gradient(which, backend, tile):
    pad = torch.arange(40) % 9 == 4
    leaves, dout = _draw(40)
    want = attend(*leaves, Mask.padding(~pad), backend=backend)[0]
    want = torch.autograd.grad(want, leaves, dout)
    tensors = [x.detach().clone() for x in leaves]
    tensors[which][:, :, pad] = math.nan
    tensors = [x.requires_grad_() for x in tensors]
    out = attend(*tensors, Mask.padding(~pad), backend=backend)[0]
    grads = torch.autograd.grad(out, tensors, dout.masked_fill(pad[:, None], math.nan))
    assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))
    assert not any(grad[:, :, pad].any() for grad in grads) and not out[:, :, pad].any()


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [1, 2])
def test_huge_finite_numbers_in_a_pad_token_reach_no_row(which, backend):
    valid = torch.arange(20) != 7
    leaves, dout = _draw(20, dtype=torch.float32)
    want = attend(*leaves, Mask.padding(valid))[0]
    want = want, *torch.autograd.grad(want, leaves, dout)
    tensors = [x.detach().clone() for x in leaves]
    tensors[0] *= 8
    tensors[1] /= 8
    tensors[which][0, 0, 7, 0] = 3e38  # q . k and dout . v overflow; the sum of k or v does not
    tensors = [x.requires_grad_() for x in tensors]
    out = attend(*tensors, Mask.padding(valid), backend=backend)[0]
    dq, dk, dv = torch.autograd.grad(out, tensors, 8 * dout)
    found = out, dq, dk / 64, dv / 8
    assert max(relative(a.detach(), b.double()) for a, b in zip(found, want, strict=True)) < 1e-5


class _TwoHops(torch.autograd.Function):
    """The forward of rank 0 in a zigzag ring of 2; its backward only asks for what was saved."""

    @staticmethod
    def forward(ctx, q, k, v):
        config = ra.AttentionConfig(fused=True, scale=8**-0.5)
        mine, other = (ra.indices(512, rank, 2).numpy() for rank in (0, 1))
        causal = ra.Mask.causal(512)
        hops = [causal.slice(mine, block) for block in (mine, other)]
        so_far = ra.forward_tiles(q, k, v, hops[0], config)
        out, lse = ra.forward_tiles(q, k, v, hops[1], config, so_far)
        ctx.save_for_backward(q, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, out, _ = ctx.saved_tensors
        return (dout * out).to(q.dtype), None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_selective_checkpointing_keeps_is_not_changed(dtype):
    """Hop 0 gives the kernel's own tensors, of all rows, and hop 1 writes to half of them."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    contexts = functools.partial(ckpt.create_selective_checkpoint_contexts, [flash])
    q, k, v = (torch.randn(1, 2, 256, 8, dtype=dtype) for _ in range(3))
    q.requires_grad_()
    options = dict(use_reentrant=False, context_fn=contexts)
    kept = torch.autograd.grad(ckpt.checkpoint(_TwoHops.apply, q, k, v, **options).sum(), q)
    assert torch.equal(kept[0], torch.autograd.grad(_TwoHops.apply(q, k, v).sum(), q)[0])


def test_a_row_of_minus_inf_has_no_mass():
    """All its scores overflow downwards in one set of keys: the other set alone is the result."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    q = q.abs() * 1e10
    k[:, :, :3] = -1e30
    k[:, :, 3:] *= 1e-10  # so that their lse is small, and a mass of exp(0) would count
    truth, _ = attend(q, k[:, :, 3:], v[:, :, 3:], backend="math")
    config = ra.AttentionConfig(fused=False, scale=8**-0.5)
    so_far = ra.forward_tiles(q, k[:, :, 3:], v[:, :, 3:], None, config)
    out, lse = ra.forward_tiles(q, k[:, :, :3], v[:, :, :3], None, config, so_far)
    assert torch.equal(out, truth) and lse.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", shortened([math.nan, math.inf, -math.inf], math.nan, math.inf))
@pytest.mark.parametrize("case", ["future", "document", "pad", "window"])
def test_what_is_not_finite_stays_out_of_other_tiles_and_is_not_hidden(case, poison, backend, tile):
    """Rows that share no tile with a query of the bad key are clean; rows that see it are not."""
    at = torch.arange(40)
    bad, mask, reached, clean = {
        "future": (30, Mask.causal(40), at >= 30, at < 0),
        "document": (12, Mask.documents(doc_ids=at // 10), (at // 10 == 1) & (at >= 12), at < 10),
        "pad": (17, Mask.padding(at != 17), at < 0, at != 17),
        "window": (20, Mask.causal(40, window=6), (at >= 20) & (at < 26), at < 12),
    }[case]
    if tile > 10 and case != "pad":
        clean = at < 0
    leaves, dout = _draw(40)
    truth = attend(*leaves, mask, backend=backend)[0]
    for which in (1, 2):
        tensors = [x.detach().clone() for x in leaves]
        tensors[which][:, :, bad] = poison
        tensors[0][:, :, ~mask.dense()[0, 0].any(1)] = poison  # dead queries
        tensors = [x.requires_grad_() for x in tensors]
        out = attend(*tensors, mask, backend=backend)[0]
        assert relative(out[:, :, clean].detach(), truth[:, :, clean].detach()) < 1e-12
        if reached.any() and (which == 2 or math.isnan(poison)):
            assert not out[:, :, reached].isfinite().all(-1).any()  # never hidden
        upstream = torch.where(clean[:, None], dout, 0.0)
        dq = torch.autograd.grad(out, tensors, upstream)[0]
        want = torch.autograd.grad(truth, leaves, upstream, retain_graph=True)[0]
        assert relative(dq[:, :, clean], want[:, :, clean]) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_of_1e5_in_either_order_stay_finite(dtype, order, backend, tile):
    leaves, dout = _draw(40, dtype=dtype)
    with torch.no_grad():
        leaves[0][..., 0] = 100.0
        leaves[1][..., 0] = (
            torch.linspace(-3000, 3000, 40)[::order].clone()
            if order > 0
            else torch.linspace(3000, -3000, 40)
        )
    out, lse = attend(*leaves, Mask.causal(40), backend=backend)
    grads = torch.autograd.grad(out, leaves, dout)
    truth, true_lse = plain_attention(*(x.double() for x in leaves), Mask.causal(40).dense())
    assert lse.abs().max() > 1e4
    assert all(x.isfinite().all() for x in (out, lse, *grads))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert relative(out.detach(), truth.detach()) < bound
    assert relative(lse.detach(), true_lse.detach()) < bound


# merge ---------------------------------------------------------------------------------------


@pytest.mark.quick
def test_parts_merge_to_the_whole_in_any_order():
    leaves, _ = _draw(9, 30)
    q, k, v = leaves
    parts = [attend(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 4), (4, 19), (19, 30))]
    whole = attend(*leaves)
    for a, b, c in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        for pair in (
            merge(*merge(*parts[a], *parts[b]), *parts[c]),
            merge(*parts[a], *merge(*parts[b], *parts[c])),
        ):
            assert all(
                relative(x.detach(), y.detach()) < 1e-14 for x, y in zip(pair, whole, strict=True)
            )


@pytest.mark.quick
def test_merge_of_dead_rows_has_clean_values_and_gradients():
    gen = torch.Generator().manual_seed(0)
    out1, out2 = (torch.randn(5, 3, generator=gen, dtype=torch.float64) for _ in range(2))
    lse1, lse2 = (torch.randn(5, generator=gen, dtype=torch.float64) * 3 for _ in range(2))
    tensors = [x.requires_grad_() for x in (out1, lse1, out2, lse2)]
    assert torch.autograd.gradcheck(merge, tensors)
    lse1, lse2 = lse1.detach().clone(), lse2.detach().clone()
    lse1[[0, 1]], lse2[[0, 2]] = -math.inf, -math.inf
    lse1[3], lse2[3] = 1e5, -1e5
    tensors[1], tensors[3] = lse1.requires_grad_(), lse2.requires_grad_()
    out, lse = merge(*tensors)
    assert (
        torch.equal(out[1], out2[1])
        and torch.equal(out[2], out1[2])
        and torch.equal(out[3], out1[3])
    )
    assert (out[0] == 0).all() and lse[0] == -math.inf and lse[1] == lse2[1] and lse[3] == 1e5
    grads = torch.autograd.grad((out, lse), tensors, (torch.randn_like(out), torch.ones_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[0] == 0).all() for grad in grads)
    assert grads[1].tolist()[1] == 0 and grads[3].tolist()[2] == 0


@pytest.mark.quick
def test_the_gradient_through_a_merge_is_that_of_the_whole():
    leaves, dout = _draw(11, 24)
    mask, (q, k, v) = Mask.causal(24).slice(slice(4, 15), slice(24)), leaves  # dead beyond key 14
    dlse = torch.randn(dout.shape[:3], dtype=dout.dtype, generator=torch.Generator().manual_seed(2))
    parts = []
    for keys in (slice(0, 3), slice(3, 9), slice(9, 24)):
        parts += [*attend(q, k[:, :, keys], v[:, :, keys], mask.slice(slice(None), keys))]
    assert (parts[5] == -math.inf).any() and (parts[1] > -math.inf).all()
    merged = merge(*merge(*parts[:4]), *parts[4:])
    grads = torch.autograd.grad(merged, leaves, (dout, dlse))
    want = torch.autograd.grad(plain_attention(*leaves, mask.dense()), leaves, (dout, dlse))
    assert max(relative(a, b) for a, b in zip(grads, want, strict=True)) < 1e-12
    assert all(grad.norm() > 1 for grad in want)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merge_takes_parts_in_low_precision_and_gives_their_dtype(dtype):
    gen = torch.Generator().manual_seed(0)
    out1, out2, dout = torch.randn(3, 6, 4, generator=gen).to(dtype)
    lse1, lse2, dlse = torch.randn(3, 6, generator=gen)
    given = [x.requires_grad_() for x in (out1, lse1, out2, lse2)]
    exact = [x.detach().double().requires_grad_() for x in given]
    pair, truth = merge(*given), merge(*exact)
    grads = torch.autograd.grad(pair, given, (dout, dlse))
    want = torch.autograd.grad(truth, exact, (dout.double(), dlse.double()))
    assert [x.dtype for x in (*pair, *grads)] == [dtype, torch.float32] * 3
    most = 4 * torch.finfo(dtype).eps
    for a, b in zip((*pair, *grads), (*truth, *want), strict=True):
        assert relative(a.detach(), b.detach()) < most


# Choice, bad input, memory -------------------------------------------------------------------


@pytest.mark.quick
def test_the_backend_is_fused_where_the_kernel_can_and_says_why_not():
    def is_fused(x, softcap=None, backend=None):
        return make_config(x, None, softcap, backend, False).fused

    q = torch.zeros(1, 2, 3, 5)
    other = torch.empty(1, 2, 3, 64, device="meta", dtype=torch.bfloat16)
    assert is_fused(q) and is_fused(q.half())
    assert not is_fused(q, softcap=1.0) and not is_fused(q, backend="math")
    assert not is_fused(other)
    with pytest.raises(ValueError, match="softcap"):
        attend(q, q, q, softcap=1.0, backend="fused")
    with pytest.raises(ValueError, match="meta"):
        is_fused(other, backend="fused")


def _bad(**changes):
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8)} | changes
    return [torch.zeros(shapes[name]) for name in "qkv"]


@pytest.mark.quick
@pytest.mark.parametrize(
    "tensors, options, text",
    [
        (_bad(q=(2, 4, 8)), {}, r"expected q \(B, H, q, D\).*\(2, 4, 8\)"),
        (_bad(v=(2, 2, 6, 8)), {}, "k and v of one shape"),
        (_bad(q=(1, 4, 5, 8)), {}, "batch and head size"),
        (_bad(q=(2, 4, 5, 16)), {}, "batch and head size"),
        (_bad(q=(2, 3, 5, 8)), {}, "multiple of key heads"),
        (_bad(q=(2, 0, 5, 8)), {}, "multiple of key heads"),
        (_bad(q=(2, 4, 5, 513), k=(2, 2, 5, 513), v=(2, 2, 5, 513)), {}, "1 to 512"),
        ([*_bad()[:2], _bad()[2].double()], {}, "one dtype"),
        ([x.long() for x in _bad()], {}, "one dtype"),
        (_bad(), {"mask": Mask.causal(6)}, r"a mask of \(5, 5\) queries and keys, got \(6, 6\)"),
        (_bad(), {"mask": Mask.causal(5, batch=3)}, "batch 3"),
        (_bad(), {"mask": torch.ones(2, 3, 5, 5, dtype=torch.bool)}, "3 heads"),
        (_bad(), {"mask": torch.ones(5, 5)}, "expected a Mask or a bool tensor"),
        (_bad(), {"mask": "causal"}, "expected a Mask or a bool tensor"),
        (_bad(), {"scale": -1.0}, "expected a positive number or None as scale"),
        (_bad(), {"softcap": math.inf}, "expected a positive number or None as softcap"),
        (_bad(), {"backend": "flash"}, "as backend, got"),
    ],
)
def test_bad_input_is_refused_with_what_came(tensors, options, text):
    with pytest.raises(ValueError, match=text):
        attend(*tensors, **options)


def test_a_compiled_model_calls_attention_outside_its_graphs():
    leaves, dout = _draw(12)
    mask = Mask.causal(12)

    def model(q, k, v):
        out = ra.ring_attention(2 * q, k, v, mask=mask)
        return out + attend(q, k, v)[0]

    plain = torch.autograd.grad(model(*leaves), leaves, dout)
    compiled = torch.autograd.grad(torch.compile(model, backend="aot_eager")(*leaves), leaves, dout)
    assert max(relative(a, b) for a, b in zip(compiled, plain, strict=True)) < 1e-14


class _Largest(TorchDispatchMode):
    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return out


LARGE = ["causal", "documents", "blocks", "padding", "tree", "window"]


@pytest.mark.parametrize("kind", shortened(LARGE, "causal", "padding", "tree"))
def test_nothing_of_size_s_by_s_is_allocated(kind):
    leaves, dout = _draw(4096, heads=1, groups=1, width=16, batch=1, dtype=torch.float32)
    at = torch.arange(4096)
    mask = {
        "causal": Mask.causal(4096),
        "documents": Mask.documents(doc_ids=at // 300),
        "blocks": Mask.blocks(at // 77, at % 50 != 3),
        "padding": Mask.padding(at % 7 != 2),
        "tree": Mask.tree(torch.where(at < 1000, 4096, torch.where(at < 2500, 2500, 4096))),
        "window": Mask.causal(4096, window=1000),
    }[kind]
    for backend in BACKENDS:
        with _Largest() as hook:
            attend(*leaves, mask, backend=backend)[0].backward(dout)
        assert hook.most <= 4096 * 4096 // 16


def test_the_hook_sees_what_the_definition_allocates():
    leaves, dout = _draw(512, heads=1, groups=1, batch=1, dtype=torch.float32)
    with _Largest() as hook:
        plain_attention(*leaves, Mask.causal(512).dense())[0].backward(dout)
    assert hook.most >= 512 * 512


# Few calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, Mask.full(4096), Mask.causal(4096)])
def test_a_causal_or_full_mask_is_one_call_on_cuda(mask, monkeypatch):
    """Counted here with the sizes of CUDA: one call forward, one backward."""
    sizes = {name: ra.TILES["cuda"] for name in ra.TILES}
    monkeypatch.setattr(ra, "TILES", sizes)
    calls = []
    for name, at in (("flash_forward", 3), ("flash_backward", 6)):  # where bias stands

        def counted(*args, name=name, at=at, real=getattr(ra, name)):
            calls.append((name, args[at] is None, args[at + 1]))
            return real(*args)

        monkeypatch.setattr(ra, name, counted)
    q, k, v = (torch.randn(1, 1, 4096, 8, requires_grad=True) for _ in range(3))
    attend(q, k, v, mask)[0].sum().backward()
    causal = mask is not None and not mask.dense().all()
    no_bias = True
    assert calls == [("flash_forward", no_bias, causal), ("flash_backward", no_bias, causal)]


def test_partial_tiles_are_made_once_and_kept_up_to_a_bound(monkeypatch):
    """Of documents that fit no tile: layers and directions share masks, and the rest are remade."""
    made = []
    real = Mask.dense

    def counted(mask):
        made.append(mask.shape)
        return real(mask)

    def three_layers():
        mask = Mask.documents(doc_ids=[i // 5 for i in range(64)])
        made.clear()
        for _ in range(3):
            grads = torch.autograd.grad(attend(*leaves, mask)[0], leaves, dout)
        return grads, len(made), mask

    leaves, dout = _draw(64)
    set_tiles(monkeypatch, 16, partial=16, most=16)
    monkeypatch.setattr(Mask, "dense", counted)
    want, once, mask = three_layers()
    tiles = [box.kind for box in ra.boxes(mask, ra.TILES["cpu forward"])]
    assert once == tiles.count(ra.PARTIAL) > 3

    # Room for one tile of 16 x 16: the others are made by 3 layers, forward and backward.
    monkeypatch.setattr(ra, "KEPT_PAIRS", 256)
    some, more, mask = three_layers()
    kept = len(mask.cache["biases"])
    assert kept >= 1 and more == kept + 6 * (once - kept)
    monkeypatch.setattr(ra, "KEPT_PAIRS", 0)
    none, most, mask = three_layers()
    assert not mask.cache["biases"] and most == 6 * once
    for grads in (some, none):
        assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))

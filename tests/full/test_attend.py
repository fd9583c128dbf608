"""attend on one device: exact, clean of what PAD holds, within SDPA's own error."""

import functools
import itertools
import math

import pytest
import torch
import torch.utils.checkpoint as ckpt
from conftest import diagonal, shortened, slow
from oracles import FLASH, Watch, draw, worst
from torch.autograd import grad as grad_of

from full.attention import attend as attention
from full.attention import ring
from full.attention.attend import DTYPES, KEPT_PAIRS, attend
from check_attention import examples, multiple_of_sdpa, relative
from full.attention.masks import ALL, NEVER, PARTIAL, TILES, Mask, Sizes, boxes
from full.attention.ring import indices
from ring_attention import attention_definition
from full.model.logprobs import token_logprobs


@pytest.fixture(params=("formulas", "fused"))
def both(request, monkeypatch):
    """Torch's kernels, and the formulas, which other devices and gradients of lse use."""
    if request.param == "formulas":
        monkeypatch.setattr("full.attention.attend.can_fuse", lambda q: False)
    return request.param


quick = pytest.mark.quick


def noise(shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(5))


def compared(leaves, dout, mask, **options):
    """Ours, and the definition's: out, lse, gradients through out, through lse, through both."""
    every = Mask.full(max(leaves[0].shape[2], leaves[1].shape[2]))
    every = every.slice(slice(leaves[0].shape[2]), slice(leaves[1].shape[2]))
    visible = (mask or every).dense()
    pairs = attend(*leaves, mask, **options), attention_definition(*leaves, visible, **options)
    upstream = dout, noise(pairs[1][1].shape, pairs[1][1].dtype)
    results = []
    for pair in pairs:
        results.append([*pair])
        for some in (slice(0, 1), slice(1, 2), slice(0, 2)):
            how = dict(retain_graph=True, materialize_grads=True)
            results[-1] += grad_of(pair[some], leaves, upstream[some], **how)
    assert torch.equal(pairs[0][1] == -math.inf, pairs[1][1] == -math.inf)
    return results


@pytest.fixture(params=[128, 8, 3])
def tile(request, monkeypatch):
    """The side of a tile: one, many, and ones that divide nothing."""
    set_tiles(monkeypatch, request.param)
    return request.param


def set_tiles(monkeypatch, tile, *, partial=None, most=None):
    """Cut boxes into small ones: causal squares of a tile in the backward and in the formulas."""
    partial, most = partial or 2 * tile, most or 4 * tile
    whole = Sizes(tile, NEVER, most, most, partial)
    small = whole._replace(square=tile)
    names = {"cpu forward": whole, "cuda": whole, "cpu backward": small, "formulas": small}
    assert names.keys() == TILES.keys()
    monkeypatch.setattr("full.attention.attend.TILES", names)


def exact_cases():
    """{name: (arguments of `draw`, mask, options, sides of a tile)}."""
    found = {}
    for kind, mask in examples(41).items():
        found[kind] = dict(rows=41), mask, {}, (128, 3)
        whole = mask or Mask.full(41)
        for name, rows, keys in (
            ("two shards", indices(41, 1, 3), indices(41, 0, 3)),
            ("a corner", slice(9, 41), slice(0, 13)),
        ):
            part = whole.slice(rows, keys)
            shape = dict(rows=part.shape[2], keys=part.shape[3])
            found[f"{name} of {kind}"] = shape, part, {}, (4,)
        found[f"{kind}, scale"] = dict(rows=41), mask, dict(scale=0.7), (8,)

    # Heads and widths, numbers of queries and keys, and none; one row of a mask for a whole batch.
    for groups, width in itertools.product((1, 2, 4), (1, 3, 64, 129, 512)):
        shape = dict(rows=11, groups=groups, width=width)
        found[f"{shape}"] = shape, Mask.causal(11), {}, (128,)
    for rows, keys in ((5, 23), (23, 5), (1, 1), (1, 40), (0, 7), (7, 0), (0, 0)):
        mask = Mask.causal(40).slice(slice(40 - rows, 40), slice(keys))
        shape = dict(rows=rows, keys=keys)
        found[f"{shape}"] = shape, mask, {}, (128,)
        found[f"{shape}, full"] = shape, None, {}, (128,)
    doc = torch.arange(20) // torch.tensor([[6], [6], [6], [9], [6]])
    for name, ids in (("five rows", doc), ("one row for five", doc[0])):
        found[name] = dict(rows=20, batch=5), Mask.documents(doc_ids=ids), {}, (128, 8, 3)
    return found


EXACT = exact_cases()
EVERY = [
    pytest.param(name, tile, marks=[] if options or tile == 4 else quick)
    for name, (_, _, options, tiles) in EXACT.items() for tile in tiles
]  # fmt: skip


@pytest.mark.parametrize("name, tile", EVERY)
def test_attention_and_its_gradients_are_the_definition(name, tile, both, monkeypatch):
    set_tiles(monkeypatch, tile)
    shape, mask, options, _ = EXACT[name]
    found, truth = compared(*draw(**shape), mask, **options)
    assert worst(found, truth) < 1e-12
    if name in examples(8):  # zeros would not pass, but for dv through lse, which is 0
        norms = [x.detach().norm() for x in truth[2:]]
        assert norms.pop(5) == 0 and min(norms) > 1 and relative(0 * truth[2], truth[2]) == 1


@quick
def test_strides_do_not_matter(both):
    """Torch's kernel is silently wrong where the last one is not 1."""
    leaves, dout = draw(20, width=6)
    truth = attend(*leaves, Mask.causal(20))[0]
    *turned, dout_turned = (x.detach().mT.contiguous().mT for x in (*leaves, dout))
    views = [x.requires_grad_() for x in turned]
    out = attend(*views, Mask.causal(20))[0]
    found = out, *grad_of(out, views, dout_turned)
    assert worst(found, (truth, *grad_of(truth, leaves, dout))) < 1e-14


@quick
def test_a_second_derivative_is_refused():
    leaves, dout = draw(5)

    def logprobs(q, *_):
        return q * token_logprobs(q[0, 0], q[0, 1], torch.arange(5))[0].sum()

    for function in (lambda *x: attend(*x)[0], ring.ring_attention, logprobs):
        with pytest.raises(NotImplementedError, match="second derivative"):
            grad_of(function(*leaves), leaves[0], dout, create_graph=True)


@quick
def test_nothing_is_written_into_arguments(both):
    leaves, dout = draw(12)
    before = [x.detach().clone() for x in (*leaves, dout)]
    out, lse = attend(*leaves, examples(12)["blocks"])
    before += out.detach().clone(), lse.detach().clone()
    out.backward(dout)
    assert all(torch.equal(a, b) for a, b in zip((*leaves, dout, out, lse), before, strict=True))


@pytest.mark.parametrize("dtype, most, window", [
    (torch.float32, 1.3, 200), (torch.bfloat16, 1.3, None), (torch.float16, 0.9, 200),
    *slow((torch.float32, 1.3, None), (torch.bfloat16, 1.3, 200), (torch.float16, 0.9, None)),
])  # fmt: skip
def test_low_precision_is_as_good_as_sdpa(dtype, most, window, monkeypatch):
    """In tiles of 8: a sum over them in bfloat16 would show, and float16 that is not widened."""
    set_tiles(monkeypatch, 8)
    mask, qkv = Mask.causal(512, window=window), draw(512, dtype=dtype)[0]
    assert attend(*qkv, mask)[1].dtype == torch.float32
    assert multiple_of_sdpa(mask, None, dtype, 512, heads=(4, 4), width=64) <= most


DEAD = torch.arange(40) % 5 == 2
SEE_NOTHING = {  # masks in which some queries see nothing
    "blocks": Mask.blocks(torch.arange(40) // 7, ~DEAD),
    "padding": Mask.padding(~DEAD),
}


@quick
@pytest.mark.parametrize("kind", SEE_NOTHING)
@pytest.mark.parametrize("dtype, tile", diagonal(DTYPES, (3, 128, 8)), indirect=["tile"])
def test_a_row_that_sees_nothing_is_zero_whatever_arrives(dtype, kind, both, tile):
    leaves, dout = draw(40, dtype=dtype)
    mask = SEE_NOTHING[kind].slice(ALL, ALL)  # without boxes of another tile
    clean = grad_of(attend(*leaves, mask)[0], leaves, dout)
    most = {torch.float64: 1e-12, torch.bfloat16: 1e-2}.get(dtype, 1e-3)  # the way may be another
    arriving = torch.tensor([1.0, 1e300, math.inf, math.nan], dtype=torch.float64).repeat(2)
    dout[:, :, DEAD] = arriving[:, None].to(dtype)
    out, lse = attend(*leaves, mask)
    assert (out[:, :, DEAD] == 0).all() and (lse[:, :, DEAD] == -math.inf).all()
    assert lse[:, :, ~DEAD].isfinite().all()
    grads = grad_of(out, leaves, dout, retain_graph=True)
    assert worst(grads, [x.double() for x in clean]) < most
    dlse = noise(lse.shape).to(lse)
    dlse[:, :, DEAD] = arriving.to(lse)
    grads += grad_of((out, lse), leaves, (dout, dlse))
    assert not any(x[:, :, DEAD].any() for x in grads[::3])
    assert all(x.isfinite().all() for x in grads)


PAD = torch.arange(40) % 9 == 4
PADDED = {
    "padding": Mask.padding(~PAD),
    "padding, all see": Mask.padding(~PAD, causal=False),
    "documents": Mask.documents(doc_ids=torch.where(PAD, -1, torch.arange(40) // 15)),
    "blocks": Mask.blocks(torch.arange(40) // 7, ~PAD),
}


@quick
@pytest.mark.parametrize("poison, tile", diagonal(
    (math.nan, math.inf, -math.inf, 1e300), (3, 8, 128)), indirect=["tile"])  # fmt: skip
@pytest.mark.parametrize("kind", PADDED)
def test_garbage_in_pad_reaches_nothing(kind, poison, both, tile):
    """In q, k, v and both upstream gradients at once: every result is equal to the last bit."""
    leaves, dout = draw(40)
    mask = PADDED[kind].slice(ALL, ALL)  # without boxes of another tile

    def run(fill):
        tensors = [x.detach().masked_fill(PAD[:, None], fill).requires_grad_() for x in leaves]
        dlse = noise(dout.shape[:3]).masked_fill(PAD, fill)
        upstream = dout.masked_fill(PAD[:, None], fill), dlse
        pair = attend(*tensors, mask)
        through_out = grad_of(pair[0], tensors, upstream[0], retain_graph=True)
        return [*pair, *through_out, *grad_of(pair, tensors, upstream)]

    clean, found = run(0.5), run(poison)
    assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))
    out, lse, *grads = found
    assert not any(x[:, :, PAD].any() for x in (out, *grads))
    assert (lse[:, :, PAD] == -math.inf).all() and lse[:, :, ~PAD].isfinite().all()
    assert all(grad[:, :, ~PAD].any() for grad in grads)


@pytest.mark.parametrize("which", range(3))
def test_nan_stays_in_its_document_and_is_not_hidden(which, both, tile):
    """Token 12 of the second document: of its q, k or v. Tiles of 128 hold several documents."""
    at, bad = torch.arange(40), 12
    mask, (leaves, dout) = Mask.documents(doc_ids=at // 10), draw(40)
    clean = (at // 10 != 1) & (tile <= 10)
    truth = attend(*leaves, mask)[0]
    want = truth, *grad_of(truth, leaves, dout)
    tensors = [x.detach().clone() for x in leaves]
    tensors[which][:, :, bad] = math.nan
    tensors = [x.requires_grad_() for x in tensors]
    out, lse = attend(*tensors, mask)
    found = out, *grad_of(out, tensors, dout)
    assert worst([x[:, :, clean] for x in found], [x[:, :, clean] for x in want]) < 1e-12
    reached = at == bad if which == 0 else (at >= bad) & (at < 20)
    assert not out[:, :, reached].isfinite().all(-1).any()
    assert which == 2 or lse[:, :, reached].isnan().all()
    assert found[1][:, :, bad].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_selective_checkpointing_keeps_is_not_changed(dtype):
    """A kernel's own results are kept for the backward, and later boxes of the same rows merge."""
    flash = getattr(torch.ops.aten, FLASH).default
    contexts = functools.partial(ckpt.create_selective_checkpoint_contexts, [flash])
    mask = Mask.causal(512).slice(indices(512, 0, 2), ALL)
    leaves, dout = draw(256, 512, dtype=dtype)
    run = lambda *qkv: attend(*qkv, mask)[0]  # noqa: E731
    kept = ckpt.checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)
    pairs = zip(grad_of(kept, leaves, dout), grad_of(run(*leaves), leaves, dout), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@quick
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_of_1e5_in_either_order_stay_finite(dtype, order, both, tile):
    leaves, dout = draw(40, dtype=dtype)
    with torch.no_grad():
        leaves[0][..., 0] = 100.0
        leaves[1][..., 0] = torch.linspace(-3000 * order, 3000 * order, 40)
    pair = attend(*leaves, Mask.causal(40))
    truth = attention_definition(*(x.double() for x in leaves), Mask.causal(40).dense())
    assert pair[1].abs().max() > 1e4
    assert all(x.isfinite().all() for x in (*pair, *grad_of(pair[0], leaves, dout)))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert worst(pair, truth) < bound


def test_a_compiled_model_calls_attention_outside_its_graphs():
    leaves, dout = draw(12)

    def model(q, k, v):
        return ring.ring_attention(2 * q, k, v, mask=Mask.causal(12)) + attend(q, k, v)[0]

    compiled = grad_of(torch.compile(model, backend="aot_eager")(*leaves), leaves, dout)
    assert worst(compiled, grad_of(model(*leaves), leaves, dout)) < 1e-14


AT = torch.arange(4096)
LARGE = {
    "causal": lambda: Mask.causal(4096),
    "documents": lambda: Mask.documents(doc_ids=AT // 300),
    "blocks": lambda: Mask.blocks(AT // 77, AT % 50 != 3),
    "padding": lambda: Mask.padding(AT % 7 != 2),
    "tree": lambda: Mask.tree(torch.where((AT < 1000) | (AT >= 2500), 4096, 2500)),
}


@pytest.mark.parametrize("kind", shortened(LARGE, "causal", "padding", "tree"))
def test_nothing_of_size_s_by_s_is_allocated(kind, both):
    given = dict(heads=1, groups=1, batch=1, dtype=torch.float32)
    leaves, dout = draw(4096, width=16, **given)
    with Watch() as watch:
        attend(*leaves, LARGE[kind]())[0].backward(dout)
    assert watch.largest <= 4096 * 4096 // 16

    # The watch sees what the definition allocates.
    leaves, dout = draw(512, **given)
    with Watch() as watch:
        attention_definition(*leaves, Mask.causal(512).dense())[0].backward(dout)
    assert watch.largest >= 512 * 512


@pytest.mark.parametrize("mask", [None, Mask.full(4096), Mask.causal(4096)])
def test_a_causal_or_full_mask_is_one_call_on_cuda(mask, monkeypatch):
    """Counted here with the sizes of CUDA: one call forward, one backward, without a bias."""
    of_cuda = dict.fromkeys(("cpu forward", "cpu backward"), TILES["cuda"])
    monkeypatch.setattr("full.attention.attend.TILES", TILES | of_cuda)  # the formulas' stay small
    q, k, v = (torch.randn(1, 1, 4096, 8, requires_grad=True) for _ in range(3))
    with Watch() as watch:
        attend(q, k, v, mask)[0].sum().backward()
    causal = mask is not None and not mask.dense().all()
    for name in (FLASH, f"{FLASH}_backward"):  # is_causal is the last of the arguments
        given = [(args[-1] is True, kw.get("attn_mask")) for args, kw in watch.calls(name)]
        assert given == [(causal, None)]


def test_partial_tiles_are_made_once_and_kept_up_to_a_bound(monkeypatch):
    """Of documents that fit no tile: layers and directions share masks, and the rest are remade."""
    made, real = [], Mask.dense
    monkeypatch.setattr(Mask, "dense", lambda mask: made.append(mask.shape) or real(mask))
    set_tiles(monkeypatch, 16, partial=16, most=16)
    leaves, dout = draw(64)

    def three_layers(room):
        monkeypatch.setattr("full.attention.attend.KEPT_PAIRS", room)
        mask = Mask.documents(doc_ids=[i // 5 for i in range(64)])
        made.clear()
        for _ in range(3):
            grads = grad_of(attend(*leaves, mask)[0], leaves, dout)
        return grads, len(made), mask

    want, once, mask = three_layers(KEPT_PAIRS)
    tiles = [box.kind for box in boxes(mask, attention.TILES["cpu forward"])]
    assert once == tiles.count(PARTIAL) > 3

    # Room for two tiles, and for none: 3 layers make the others, forward and backward.
    for room, kept in ((512, 2), (0, 0)):
        grads, count, _ = three_layers(room)
        assert count == kept + 6 * (once - kept)
        assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))

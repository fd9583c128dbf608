"""Across gloo ranks: every layout and method is the definition; faults are named on every rank."""

import json
import math
import time
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import shortened
from measure_ring import bench, multiple_of_sdpa, unshard_replicated
from measure_vla import broadcast_batch, prefix_attention, sampler_seed, suffix_attention
from oracles import plain_attention
from test_ranks import ranks

import ring_attention as ra
from ring_attention import Mask, indices, relative, ring_attention, shard, unshard

METHODS = ("ring", "allgather", "ulysses", "usp")
LAYOUTS = ("zigzag", "contiguous")


def _draw(tokens, *, heads=12, keys=2, width=8, batch=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, tokens, width) for n in (heads, keys, keys, heads)]
    drawn = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    return [x.requires_grad_() for x in drawn[:3]], drawn[3]


def _dense(mask, tokens):
    return (Mask.full(tokens) if mask is None else ra.as_mask(mask)).dense()


# Exactness -----------------------------------------------------------------------------------


def _errors(rank, lengths):
    """{(length, mask, layout, method): worst error of out, lse, dq, dk, dv}, of this rank."""
    found, world = {}, dist.get_world_size()
    for tokens in lengths:
        for name, mask in ra.examples(tokens, 12).items():
            qkv, dout = _draw(tokens)
            dlse = torch.randn(
                2, 12, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
            )
            truth = plain_attention(*qkv, _dense(mask, tokens))
            grads = torch.autograd.grad(truth, qkv, (dout, dlse))
            for layout in LAYOUTS:
                index = indices(tokens, rank, world, layout)
                want = [x.detach()[:, :, index] for x in (*truth, *grads)]
                upstream = dout[:, :, index], dlse[:, :, index]
                for method in METHODS:
                    parts = [x.detach()[:, :, index].requires_grad_() for x in qkv]
                    options = {"layout": layout, "method": method, "return_lse": True}
                    pair = ring_attention(*parts, mask=mask, **options)
                    ours = (*pair, *torch.autograd.grad(pair, parts, upstream))
                    dead = want[1] == -math.inf
                    assert torch.equal(pair[1] == -math.inf, dead)
                    pairs = [(a.detach(), b) for a, b in zip(ours, want, strict=True)]
                    pairs[1] = tuple(x.masked_fill(dead, 0.0) for x in pairs[1])
                    found[tokens, name, layout, method] = max(relative(a, b) for a, b in pairs)
    return found


@pytest.mark.parametrize("world", shortened([1, 2, 3, 4], 4))
def test_every_layout_and_method_is_the_definition(tmp_path, world):
    for found in ranks(tmp_path, world, _errors, (41,)):
        assert len(found) == 10 * 2 * 4
        assert max(found.values()) < 1e-12, max(found, key=found.get)


LENGTHS = [(2, (0, 1, 7))]  # on two ranks: nothing, less than a token each, and an uneven zigzag
LENGTHS += [pytest.param(n, (0, 1, 2, 3, 7, 13), marks=pytest.mark.slow) for n in (2, 3, 4)]


@pytest.mark.parametrize("world, lengths", LENGTHS)
def test_every_length_is_right_on_every_world(tmp_path, world, lengths):
    for found in ranks(tmp_path, world, _errors, lengths):
        assert max(found.values()) < 1e-12, max(found, key=found.get)


def _mistaken(rank):
    """The errors of a gradient that is zero, transposed, scaled by the world."""
    qkv, dout = _draw(24, width=24)
    out, _ = plain_attention(*qkv, _dense(Mask.causal(24), 24))
    (truth,) = torch.autograd.grad(out, qkv[0], dout)
    return [relative(x, truth) for x in (0 * truth, truth.transpose(-1, -2), 2 * truth)]


def test_a_zero_a_transposed_and_a_scaled_gradient_fail_the_comparison(tmp_path):
    assert min(ranks(tmp_path, 1, _mistaken)[0]) > 0.5


def _dtype_errors(rank):
    found, options = {}, {"heads": (4, 2), "width": 64, "layout": "zigzag"}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for method in METHODS:
            given = Mask.causal(256), None, dtype, 256
            found[dtype, method] = multiple_of_sdpa(*given, method=method, **options)
    given = Mask.causal(256), None, torch.bfloat16, 256
    accurate = [ra.compare(*given, accurate=True, method=m, **options) for m in METHODS]
    return found, max(map(max, accurate))


@pytest.mark.parametrize("world", shortened([2, 4], 2))
def test_low_precision_over_ranks_stays_within_its_multiple_of_sdpa(tmp_path, world):
    for found, accurate in ranks(tmp_path, world, _dtype_errors):
        for (dtype, _), multiple in found.items():
            assert multiple <= (4 if dtype == torch.float32 else 2)
        assert accurate < 2e-3


def _summed(rank):
    """The gradient of three numbers of each of three ranks, in bf16: 256 from one of them, 1, 1."""
    x = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    factor = torch.where(torch.arange(9) % 3 == rank, 256.0, 1.0)
    (unshard(x, dim=0, layout="contiguous", length=9) * factor).sum().backward()
    return x.grad.tolist()


def test_gradients_of_a_gather_are_summed_before_they_are_rounded(tmp_path):
    """bf16 has no 257, and 256 + 1 is 256 there, in whatever order ranks are added."""
    assert ranks(tmp_path, 3, _summed) == [[258.0] * 3] * 3


def _core_errors(rank, fault):
    """`core_check` of this rank, with a message of each hop that does not arrive."""
    real, stale = ra.shift, {"block": 0, "gradient": 1}.get(fault)

    def shift(x, tag, group):
        return (x, lambda: None) if tag == stale else real(x, tag, group)

    ra.shift = shift
    return ra.core_check()


@pytest.mark.parametrize("fault", [None, "block", "gradient"])
@pytest.mark.parametrize("world", shortened([2, 3, 4], 3))
def test_the_core_check_passes_and_catches_a_stale_block(tmp_path, world, fault):
    worst = max(ranks(tmp_path, world, _core_errors, fault))
    assert worst <= 1e-12 if fault is None else worst > 1e-2


# Messages ------------------------------------------------------------------------------------


class _Slow:
    """A message that is there 50 ms after it was posted, or that takes 50 ms to wait for."""

    def __init__(self, work, serial):
        self.work, self.serial, self.posted = work, serial, time.perf_counter()

    def wait(self):
        passed = 0.0 if self.serial else time.perf_counter() - self.posted
        time.sleep(max(0.0, 0.05 - passed))
        self.work.wait()


def _seconds(rank):
    """Of a forward and backward whose tiles take 80 ms: without a delay, with it, and in series."""
    real, forward, backward = dist.batch_isend_irecv, ra.forward_tiles, ra.backward_tiles

    def slowly(function):
        return lambda *args: (time.sleep(0.08), function(*args))[1]

    ra.forward_tiles, ra.backward_tiles = slowly(forward), slowly(backward)
    qkv, dout = _draw(16)
    parts, upstream = [shard(x, dim=2) for x in qkv], shard(dout, dim=2)
    seconds = []
    for delayed, serial in ((False, False), (True, False), (True, True)):
        dist.batch_isend_irecv = lambda ops, serial=serial: [_Slow(w, serial) for w in real(ops)]
        if not delayed:
            dist.batch_isend_irecv = real
        dist.barrier()
        begin = time.perf_counter()
        ring_attention(*parts, mask=Mask.causal(16)).backward(upstream, retain_graph=True)
        seconds.append(time.perf_counter() - begin)
    return seconds


def test_double_buffering_hides_a_delay_on_the_wire(tmp_path):
    for without, delayed, serial in ranks(tmp_path, 3, _seconds):
        assert serial - without > 0.15  # the delay is real: it shows where nothing hides it
        assert delayed - without < (serial - without) / 2


def _traffic(rank, masks):
    """{(mask, layout, dtype): [(bytes, dtype) of each send]}, forward and backward apart."""
    world, found, real = dist.get_world_size(), {}, dist.batch_isend_irecv
    sent = []

    def count(ops):
        sent.extend((op.tensor.nbytes, op.tensor.dtype) for op in ops if op.op is dist.isend)
        return real(ops)

    dist.batch_isend_irecv = count
    for name, mask in masks.items():
        for layout in LAYOUTS:
            for dtype in (torch.bfloat16, torch.float64):
                shape = (1, 2, len(indices(48, rank, world, layout)), 4)
                x = torch.randn(shape).to(dtype).requires_grad_()
                sent.clear()
                out = ring_attention(x, x, x, mask=mask, layout=layout)
                forward = list(sent)
                sent.clear()
                out.sum().backward()
                found[name, layout, dtype] = forward, list(sent)
    return found


def _moves(visible, world, layout):
    """How many times the blocks move: the last hop at which any rank sees some of its block."""
    held = [indices(48, rank, world, layout) for rank in range(world)]
    pairs = ((block, hop) for block in range(world) for hop in range(1, world))
    needed = [
        hop for block, hop in pairs if visible[held[(block + hop) % world]][:, held[block]].any()
    ]
    return max(needed, default=0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_on_the_wire_match_the_formula(tmp_path, world):
    alone = Mask.documents(doc_ids=np.arange(48) * world // 48)
    masks = {"full": None, "causal": Mask.causal(48), "window": Mask.causal(48, window=5)}
    masks |= {"documents": Mask.documents(doc_ids=np.arange(48) // 20), "alone": alone}
    tables = ranks(tmp_path, world, _traffic, masks)
    for name, layout, dtype in tables[0]:
        parts = [table[name, layout, dtype] for table in tables]
        sums = [sum(n for part in parts for n, _ in part[way]) for way in range(2)]
        size, wide = (2, 4) if dtype == torch.bfloat16 else (8, 8)
        numbers = 2 * 2 * 4 * 48 * _moves(_dense(masks[name], 48)[0, 0], world, layout)
        assert sums == [numbers * size, numbers * (size + wide)], (name, layout)
        if (name, layout) == ("alone", "contiguous"):
            assert sums == [0, 0]


def test_gradients_travel_in_float32_or_better(tmp_path):
    for table in ranks(tmp_path, 3, _traffic, {"full": None}):
        for (_, _, dtype), (forward, backward) in table.items():
            wide = torch.promote_types(dtype, torch.float32)
            assert {d for _, d in forward} == {dtype}
            assert {d for _, d in backward} == {dtype, wide}


def _bytes_saved(rank):
    qkv, dout = _draw(48)
    parts, sizes = [shard(x, dim=2).detach().requires_grad_() for x in qkv], []

    def pack(x):
        sizes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ring_attention(*parts, mask=Mask.causal(48))
    return sorted(sizes)


def test_only_q_k_v_out_and_lse_are_saved(tmp_path):
    want = sorted([(2, 12, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8), (2, 12, 24, 8), (2, 12, 24)])
    assert ranks(tmp_path, 2, _bytes_saved) == [want, want]


# Ranks that differ, and bad input ------------------------------------------------------------


def _refused(rank, cases):
    """What each case raises on this rank when only rank 1 has it, and that nothing was sent."""
    texts, real, sent = {}, dist.batch_isend_irecv, []
    dist.batch_isend_irecv = lambda ops: (sent.append(ops), real(ops))[1]
    for name in cases:
        q, k, v = (torch.randn(2, n, 12, 8) for n in (4, 2, 2))
        options = {"mask": Mask.causal(24)}
        if rank == 1:
            q, k, v, options = CASES[name](q, k, v, options)
        try:
            ring_attention(q, k, v, **options)
            texts[name] = "accepted"
        except ValueError as error:
            texts[name] = str(error)
    nothing_sent = not sent
    out = ring_attention(*(torch.randn(2, 2, 12, 8) for _ in range(3)), mask=Mask.causal(24))
    return texts, nothing_sent, out.isfinite().all().item()


CASES = {
    "mask": lambda q, k, v, o: (q, k, v, {"mask": Mask.causal(24, window=9)}),
    "batch": lambda q, k, v, o: (q, k, v, {**o, "batch": {"tokens": torch.arange(3)}}),
    "dtype": lambda q, k, v, o: (q.double(), k.double(), v.double(), o),
    "query heads": lambda q, k, v, o: (torch.cat((q, q), 1), k, v, o),
    "key heads": lambda q, k, v, o: (q, k[:, :1], v[:, :1], o),
    "batch size": lambda q, k, v, o: (q[:1], k[:1], v[:1], o),
    "head_dim": lambda q, k, v, o: (q[..., :4], k[..., :4], v[..., :4], o),
    "options, method": lambda q, k, v, o: (q, k, v, {**o, "method": "allgather"}),
    "options, scale": lambda q, k, v, o: (q, k, v, {**o, "scale": 0.5}),
    "options, debug": lambda q, k, v, o: (q, k, v, {**o, "debug": True}),
    "multiple of key heads": lambda q, k, v, o: (q[:, :3], k, v, o),
    "expected q (B, H, q, D)": lambda q, k, v, o: (q[0], k, v, o),
    "one dtype": lambda q, k, v, o: (q, k.double(), v, o),
    "expected a mask of": lambda q, k, v, o: (q, k, v, {"mask": torch.ones(1, 1, 9, 24) > 0}),
    "one shape": lambda q, k, v, o: (q, k, v[:, :, :5], o),
    "hold [12, 7] tokens": lambda q, k, v, o: (q[:, :, :7], k[:, :, :7], v[:, :, :7], o),
    "layout": lambda q, k, v, o: (q, k, v, {**o, "layout": "spiral"}),
    "method": lambda q, k, v, o: (q, k, v, {**o, "method": "star"}),
    "backend": lambda q, k, v, o: (q, k, v, {**o, "backend": "magic"}),
    "softcap": lambda q, k, v, o: (q, k, v, {**o, "softcap": 0.0}),
    "must divide": lambda q, k, v, o: (q[:, :1], k[:, :1], v[:, :1], {**o, "method": "ulysses"}),
    'is for method="usp"': lambda q, k, v, o: (q, k, v, {**o, "inner": 2}),
    "NoneType": lambda q, k, v, o: (None, k, v, o),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return ranks(tmp_path_factory.mktemp("refused"), 2, _refused, list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_disagree_are_named_on_every_rank(refusals, case):
    for texts, _, _ in refusals:
        assert case.split(",")[0] in texts[case]
        assert "rank 1" in texts[case]


def test_nothing_is_sent_before_all_agree_and_the_group_works_afterwards(refusals):
    assert all(nothing_sent and works for _, nothing_sent, works in refusals)


def _lengths(rank):
    """Without a mask the length is the sum of the shards; they must be those of the layout."""
    x = torch.randn(1, 2, 5 - 4 * rank, 4)
    with pytest.raises(ValueError, match=r"hold \[5, 1\] tokens, but the zigzag shards of 6"):
        ring_attention(x, x, x)


def test_shards_of_no_layout_are_refused(tmp_path):
    ranks(tmp_path, 2, _lengths)


class _Broken:
    def __repr__(self):
        raise RuntimeError("this batch cannot be printed")


def _data(rank):
    """What `batch=` says of equal data, of one number among 5000, and of an error on rank 1."""
    x, texts = torch.randn(1, 2, 4, 4), []
    numbers = np.arange(5000)
    other = numbers.copy()
    other[2500] += rank
    table = dict(zip("ab", (1, 2))) if rank else {"b": 2, "a": 1}
    broken = _Broken() if rank else 3
    for batch in ({"tokens": numbers, "of": table}, {"tokens": other}, {"a": broken}, [numbers]):
        try:
            ring_attention(x, x, x, batch=batch)
            texts.append(None)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_a_batch_is_compared_to_its_last_number_and_its_error_is_everybodys(tmp_path):
    for equal, differs, broken, again in ranks(tmp_path, 2, _data):
        assert equal is None and again is None
        assert "the same batch" in differs and "rank 1" in differs
        assert "rank 1: RuntimeError: this batch cannot be printed" in broken


@pytest.mark.quick
def test_one_change_anywhere_changes_a_digest_and_the_order_of_a_dict_does_not():
    text = np.array(["a prompt", "another"], object)
    parts = {"x": np.arange(5000.0), "y": [torch.arange(3000), (1, "a", None)], "z": text}
    digests = [ra.digest(parts), ra.digest(dict(reversed(parts.items())))]
    assert digests[0] == digests[1] == ra.digest(parts | {"z": text.copy()})
    for change in (
        {"x": np.where(np.arange(5000) == 2500, -1.0, parts["x"])},
        {"x": parts["x"].astype(np.float32)}, {"x": parts["x"].reshape(50, 100)},
        {"y": [torch.arange(3000).flip(0), (1, "a", None)]},
        {"y": [torch.arange(3000), [1, "a", None]]}, {"y": [torch.arange(3000), (1, "b", None)]},
        {"z": np.array(["a prompt", "a third"], object)}, {"w": 0},
    ):  # fmt: skip
        digests.append(ra.digest(parts | change))
    assert len(set(digests)) == len(digests) - 1 and all(0 <= x < 2**63 for x in digests)


def _outsider(rank):
    group, x = dist.new_group([0]), torch.randn(1, 2, 4, 4)
    if rank == 0:
        return ring_attention(x, x, x, group=group).shape == x.shape
    with pytest.raises(ValueError, match="rank 1 is not in this group"):
        ring_attention(x, x, x, group=group)
    return True


def test_a_group_without_this_rank_is_refused(tmp_path):
    assert ranks(tmp_path, 2, _outsider) == [True, True]


def _probed(rank, method):
    """Error texts of a NaN in v on rank 1 and an inf in dout on rank 2, and if clean is equal."""
    qkv, dout = _draw(24)
    texts = []
    for where in ("v", "dout", None):
        parts = [shard(x, dim=2).detach().clone() for x in qkv]
        upstream = shard(dout, dim=2).clone()
        if where == "v" and rank == 1:
            parts[2][0, 0, 0, 0] = math.nan
        if where == "dout" and rank == 2:
            upstream[0, 0, 0, 0] = math.inf
        parts = [x.requires_grad_() for x in parts]
        try:
            out = ring_attention(
                *parts, mask=Mask.causal(24), method=method, debug="step 3, layer 7"
            )
            grads = torch.autograd.grad(out, parts, upstream)
            plain = ring_attention(*parts, mask=Mask.causal(24), method=method)
            same = zip(grads, torch.autograd.grad(plain, parts, upstream), strict=True)
            texts.append(torch.equal(out, plain) and all(torch.equal(a, b) for a, b in same))
        except FloatingPointError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("method", METHODS)
def test_the_first_tensor_that_is_not_finite_is_named_on_every_rank(tmp_path, method):
    for forward, backward, clean in ranks(tmp_path, 3, _probed, method):
        assert "step 3, layer 7" in forward and "not finite: rank 1: v" in forward
        assert "not finite: rank 2: dout" in backward
        assert clean is True


# Gather, scatter, batches, rings -------------------------------------------------------------


def _gathered(rank):
    world, gen, found = dist.get_world_size(), torch.Generator().manual_seed(rank), []
    for tokens in (0, 1, 7, 12):
        for layout in LAYOUTS:
            x = torch.randn(3, tokens, 2, dtype=torch.float64).cumsum(0)
            dist.broadcast(x, 0)
            upstream = torch.randn(x.shape, generator=gen, dtype=torch.float64)  # another per rank
            total = upstream.clone()
            dist.all_reduce(total)
            index = indices(tokens, rank, world, layout)
            place = {"dim": -2, "layout": layout}
            mine = shard(x, **place).requires_grad_()
            grads = []
            for function in (unshard, unshard_replicated):
                whole = function(mine, **place, length=tokens)
                found.append(torch.equal(whole, x))
                grads += torch.autograd.grad(whole, mine, upstream)
            found.append(torch.allclose(grads[0], total[:, index], rtol=1e-14, atol=0))
            found.append(torch.equal(grads[1], upstream[:, index]))
            leaf = x.clone().requires_grad_()
            shard(leaf, **place).backward(upstream[:, index])
            want = torch.zeros_like(x)
            want[:, index] = upstream[:, index]
            found.append(torch.equal(leaf.grad, want))
            ids = torch.arange(tokens)
            found.append(torch.equal(unshard(shard(ids, dim=0), dim=0, length=tokens), ids))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_gather_undoes_a_shard_and_its_two_gradients_are_sum_and_slice(tmp_path, world):
    assert all(all(found) for found in ranks(tmp_path, world, _gathered))


def _different(rank, method):
    """Errors where rank 0's loss uses only out, rank 1's only lse, and the last rank's neither."""
    qkv, dout = _draw(13)
    out, lse = plain_attention(*qkv, _dense(Mask.causal(13), 13))
    pieces = [indices(13, r, 3) for r in range(3)]
    loss = (out * dout)[:, :, pieces[0]].sum() + lse[:, :, pieces[1]].pow(2).sum()
    want = torch.autograd.grad(loss, qkv)
    parts = [shard(x, dim=2) for x in qkv]
    ours, log = ring_attention(*parts, mask=Mask.causal(13), method=method, return_lse=True)
    upstream = dout[:, :, pieces[rank]]
    loss = [(ours * upstream).sum(), log.pow(2).sum(), 0.0 * ours.sum()][rank]
    grads = torch.autograd.grad(loss, qkv)
    for grad in grads:
        dist.all_reduce(grad)
    return [relative(a, b) for a, b in zip(grads, want, strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_ranks_may_use_different_outputs(tmp_path, method):
    assert max(max(errors) for errors in ranks(tmp_path, 3, _different, method)) < 1e-12


Pair = namedtuple("Pair", "left right")


def _batch(seed):
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(9, (2, 3), generator=gen)
    return {
        "text": f"prompt {seed}", "none": None, "number": 0.5 + seed, "tokens": tokens.T,
        "nested": [Pair(tokens > 4, (torch.randn(4, generator=gen).bfloat16(), tokens.sum()))],
        "empty": torch.zeros(0, 3),
    }  # fmt: skip


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _broadcast(rank):
    with pytest.raises(ValueError, match="divides 4 ranks, got 3"):
        ra.make_ring(3)
    group = ra.make_ring(2)
    assert dist.get_process_group_ranks(group) == [[0, 1], [2, 3]][rank // 2]
    mine = _batch(10 + rank)
    got = broadcast_batch(mine, group)
    return _same(got, _batch(10 + rank // 2 * 2)) and _same(mine, _batch(10 + rank))


def test_broadcast_batch_gives_each_ring_the_batch_of_its_first_rank(tmp_path):
    assert ranks(tmp_path, 4, _broadcast) == [True] * 4


def _two_dimensional(rank, replicated, gather):
    """Each parameter's gradient after the mean over 4 ranks, over one process's; 2 rings of 2."""
    group, gen = ra.make_ring(2), torch.Generator().manual_seed(0)
    trunk, head = (torch.randn(s, generator=gen, dtype=torch.float64) for s in ((8, 48), (16, 4)))
    data = torch.randn(2, 1, 14, 8, generator=gen, dtype=torch.float64)
    params, mask = [trunk.requires_grad_(), head.requires_grad_()], Mask.causal(14)

    def hidden(x_BsD, attention):
        q, k, v = (x_BsD @ trunk).unflatten(-1, (6, 8)).transpose(1, 2).split((2, 2, 2), 1)
        return attention(q, k, v).transpose(1, 2).flatten(2)

    def loss(x_BsD):
        return (x_BsD @ head).pow(2).sum()

    def plain(*qkv):
        return plain_attention(*qkv, mask.dense())[0]

    truth = sum(loss(hidden(x, plain)) for x in data) / 2
    want = torch.autograd.grad(truth, params)
    mine = data[rank // 2]
    x = hidden(
        shard(mine, dim=1, group=group), lambda *qkv: ring_attention(*qkv, group=group, mask=mask)
    )
    if replicated:
        x = gather(x, dim=1, group=group, length=14)
    grads = torch.autograd.grad(loss(x) * ra.loss_scale(2, replicated=replicated), params)
    for grad in grads:
        dist.all_reduce(grad)
    ratios = [(g / 4 * w).sum() / (w * w).sum() for g, w in zip(grads, want, strict=True)]
    errors = [relative(g / 4, w) for g, w in zip(grads, want, strict=True)]
    return [x.item() for x in ratios], max(errors)


@pytest.mark.parametrize("replicated", [True, False])
def test_every_gradient_of_rings_times_data_is_that_of_one_process(tmp_path, replicated):
    for ratios, error in ranks(tmp_path, 4, _two_dimensional, replicated, unshard):
        assert error < 1e-12
        assert ratios == pytest.approx([1.0, 1.0], abs=1e-12)


def test_the_slice_gradient_leaves_the_trunk_with_a_share(tmp_path):
    ratios, _ = ranks(tmp_path, 4, _two_dimensional, True, unshard_replicated)[0]
    assert ratios == pytest.approx([0.5, 1.0], abs=1e-12)  # no factor on the loss makes both 1


def test_ranks_of_a_ring_share_a_seed_and_rings_do_not():
    seeds = [sampler_seed(7, rank, 2) for rank in range(6)]
    assert seeds[0::2] == seeds[1::2] and len(set(seeds)) == 3
    assert ra.loss_scale(4, replicated=False) == 4 and ra.loss_scale(4, replicated=True) == 1
    assert ra.loss_scale(4, replicated=True, reduce="sum") == 0.25


def _suffix(rank):
    """Errors of the suffix route: outputs, and gradients of prefix and suffix."""
    world, gen = dist.get_world_size(), torch.Generator().manual_seed(0)
    p, t = 13, 5
    shapes = [(1, h, n, 8) for n in (p, t) for h in (4, 2, 2)]
    leaves = [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]
    upstream = torch.randn(1, 4, p + t, 8, generator=gen, dtype=torch.float64)
    block = torch.tensor([0] * 6 + [1] * 7 + [2] * 5)
    valid = torch.arange(18) != 3
    mask = Mask.blocks(block, valid)
    whole = [torch.cat((a, b), 2) for a, b in zip(leaves[:3], leaves[3:], strict=True)]
    truth, _ = plain_attention(*whole, mask.dense())
    want = torch.autograd.grad(truth, leaves, upstream)
    parts = [shard(x, dim=2) for x in leaves[:3]]
    prefix = Mask.blocks(block[:p], valid[:p])
    out, k, v = prefix_attention(*parts, length=p, mask=prefix)
    suffix = suffix_attention(*leaves[3:], k, v, mask)
    # the prefix's loss is of each rank's tokens, the suffix's is replicated: summed over ranks
    upstreams = (shard(upstream[:, :, :p], dim=2), upstream[:, :, p:] / world)
    grads = [x.contiguous() for x in torch.autograd.grad((out, suffix), leaves, upstreams)]
    for grad in grads:
        dist.all_reduce(grad)
    got = torch.cat((unshard(out, dim=2, length=p), suffix), 2)
    return [relative(a.detach(), b) for a, b in zip((got, *grads), (truth, *want), strict=True)]


@pytest.mark.parametrize("world", [2, 3])
def test_a_prefix_over_the_ring_and_a_suffix_on_each_rank_are_one_sequence(tmp_path, world):
    assert max(max(errors) for errors in ranks(tmp_path, world, _suffix)) < 1e-12


# Rows that see nothing, and reuse ------------------------------------------------------------


def _dead(rank):
    """Values and gradients of dead rows under awful upstreams; errors of the others beside NaN."""
    found = []
    valid = torch.arange(26) % 4 != 1
    mask = Mask.padding(valid[None])
    qkv, dout = _draw(26)
    truth, _ = plain_attention(*qkv, mask.dense())
    want = torch.autograd.grad(truth, qkv, torch.where(valid[:, None], dout, 0.0))
    for method in METHODS:
        parts, upstream = [x.detach().clone() for x in qkv], dout.clone()
        for x, value in zip(
            (*parts, upstream), (math.nan, math.inf, math.nan, math.inf), strict=True
        ):
            x[:, :, ~valid] = value
        parts = [shard(x, dim=2).requires_grad_() for x in parts]
        out, lse = ring_attention(*parts, mask=mask, method=method, return_lse=True)
        grads = torch.autograd.grad(out, parts, shard(upstream, dim=2))
        alive = shard(valid, dim=0)
        dead = [x[:, :, ~alive] for x in (out, *grads)]
        found.append(max(x.abs().max().item() for x in dead))
        found.append(0.0 if bool((lse[:, :, ~alive] == -math.inf).all()) else math.inf)
        pairs = zip((out, *grads), (truth, *want), strict=True)
        found += [relative(a.detach(), shard(b.detach(), dim=2)) for a, b in pairs]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_pad_on_any_rank_is_nothing_and_its_nan_reaches_nobody(tmp_path, world):
    for found in ranks(tmp_path, world, _dead):
        assert max(found) < 1e-12 and not any(math.isnan(x) for x in found)


def _reused(rank):
    """One mask with other layouts, methods, groups, strides; gradients that accumulate."""
    pair, errors, mask = ra.make_ring(2), [], Mask.causal(20, window=8)
    qkv, dout = _draw(20, heads=4)
    truth, _ = plain_attention(*qkv, mask.dense())
    want = torch.autograd.grad(truth, qkv, dout)
    for group in (None, pair, None):
        for method in METHODS:
            for layout in LAYOUTS:
                place = {"dim": 2, "group": group, "layout": layout}
                parts = [
                    shard(x.detach(), **place).transpose(0, 1).contiguous().transpose(0, 1)
                    for x in qkv
                ]
                parts = [x.requires_grad_() for x in parts]
                upstream = shard(dout, **place).mT.contiguous().mT
                for _ in range(2):
                    out = ring_attention(
                        *parts, group=group, mask=mask, layout=layout, method=method
                    )
                    out.backward(upstream)
                errors.append(relative(out.detach(), shard(truth.detach(), **place)))
                errors += [
                    relative(x.grad / 2, shard(y, **place))
                    for x, y in zip(parts, want, strict=True)
                ]
    with torch.no_grad():
        plain = ring_attention(*parts, mask=mask, layout=layout, method=method)
    errors.append(relative(plain, out.detach()))
    return errors


def test_one_mask_serves_every_call(tmp_path):
    for errors in ranks(tmp_path, 4, _reused):
        assert max(errors) < 1e-12


def _largest(rank, tokens):
    """Numbers in the largest tensor of a forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Hook(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    self.most = max(self.most, x.numel())
            return out

    parts = [torch.randn(1, 1, tokens // 4, 16).requires_grad_() for _ in range(3)]
    mask = Mask.causal(tokens)
    with Hook() as hook:
        ring_attention(*parts, mask=mask).sum().backward()
    return hook.most


def test_no_tensor_is_larger_than_a_few_shards(tmp_path):
    for most in ranks(tmp_path, 4, _largest, 4096):
        assert most <= 8 * 4096 // 4 * 16


@pytest.mark.quick
def test_the_kernels_bench_runs_at_toy_size(capsys):
    assert bench("--device cpu --tokens 16 24 --repeats 1".split()) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["bench"]
    assert len(rows) == 8 and all(seconds > 0 for seconds in rows.values())


@pytest.mark.quick
def test_without_torch_distributed_a_ring_just_attends():
    qkv, dout = _draw(9)
    for method in METHODS:
        out = ring_attention(*qkv, mask=Mask.causal(9), method=method)
        assert torch.equal(out, ra.attend(*qkv, Mask.causal(9))[0])
    with pytest.raises(ValueError, match="not initialized"):
        ring_attention(*qkv, group=object())


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_a_partition_in_order(layout):
    for length in (0, 1, 2, 3, 7, 24, 97):
        for world in (1, 2, 3, 4, 8):
            shards = [indices(length, rank, world, layout) for rank in range(world)]
            assert sorted(torch.cat(shards).tolist()) == list(range(length))
            assert all((x[1:] > x[:-1]).all() for x in shards)
    assert indices(8, 0, 2).tolist() == [0, 1, 6, 7] and indices(8, 1, 2).tolist() == [2, 3, 4, 5]

"""Across gloo ranks: every layout and method is the definition; faults are named on every rank."""

import collections
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import slow
from oracles import Messages, Watch, draw, worst
from test_ranks import ranks
from torch.autograd import grad as grad_of

import ring_attention as ra
from full.attention import ring
from full.attention.attend import DTYPES, attend
from check_attention import examples, multiple_of_sdpa
from full.attention.masks import Mask
from full.attention.ring import Ring, indices, ring_attention, shard, unshard
from full.ranks.plans import Grid, Plan
from parallel import Grid as SimpleGrid

METHODS = ("ring", "allgather", "ulysses")
HEADS = dict(heads=12, groups=2)


def dense_of(mask, tokens):
    return (mask or Mask.full(tokens)).dense()


def truth_of(leaves, mask, dout):
    """Out and gradients of the whole sequence, on one process."""
    out, _ = ra.attention_definition(*leaves, dense_of(mask, leaves[0].shape[2]))
    return [x.detach() for x in (out, *grad_of(out, leaves, dout))]


def run(leaves, dout, group=None, passes=1, **options):
    """The same of this rank's shards, by `ring_attention`, of tensors in other layouts.

    passes: how often out, and its backward into one .grad, are computed.
    """
    place = dict(dim=2, group=group)
    parts = [shard(x.detach(), **place).transpose(0, 1).contiguous() for x in leaves]
    parts = [x.transpose(0, 1).requires_grad_() for x in parts]
    for _ in range(passes):
        out = ring_attention(*parts, group=group, **options)
        out.backward(shard(dout, **place).mT.contiguous().mT)
    return [x.detach() for x in (out, *(part.grad / passes for part in parts))]


def _errors(rank, lengths, names=None):
    """{(length, mask, method): worst error of out, dq, dk, dv}, of this rank.

    PAD holds NaN and inf, in upstream gradients too. One mask serves two passes into one .grad, and
    rings of two on four ranks. names: of masks; all by default.
    """
    found = {}
    pair = [dist.new_subgroups(2)[0], None] if dist.get_world_size() == 4 else []
    for tokens in lengths:
        masks = examples(tokens)
        for name in names or masks:
            mask = masks[name]
            qkv, dout = draw(tokens, **HEADS)
            truth = truth_of(qkv, mask, dout)
            blind, unseen = (~dense_of(mask, tokens).any(1).any(dim) for dim in (2, 1))
            given = [x.detach().clone() for x in (*qkv, dout)]
            pad = [blind, unseen, unseen, blind]
            for x, at, fill in zip(given, pad, (math.nan, math.inf, math.nan, math.inf)):
                x.movedim(1, 2)[at.expand(2, -1)] = fill

            for group in (None, *(pair if name == "window" else ())):
                for method in METHODS:
                    if method == "ulysses" and 12 % dist.get_world_size(group):
                        continue
                    twice = name == "window" and group is None
                    how = dict(mask=mask, method=method, passes=1 + twice)
                    ours = run(given[:3], given[3], group=group, **how)
                    want = [shard(x, dim=2, group=group) for x in truth]
                    key = tokens, name, method
                    found[key] = max(found.get(key, 0.0), worst(ours, want))
    return found


@pytest.mark.quick
def test_messages_name_the_global_rank(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 12)
    assert (Ring("a group", 2, 3).name, Ring(None, 0, 1).name) == ("rank 12", "rank 0")


# On two ranks: nothing, less than a token each, and an uneven zigzag.
WORLDS = [(2, (0, 1, 7), None), (4, (41,), ("documents", "blocks", "tree", "window"))]
WORLDS += slow((1, (41,), None), *((n, (0, 1, 2, 3, 7, 13, 41), None) for n in (2, 3, 4)))


@pytest.mark.parametrize("world, lengths, names", WORLDS)
def test_every_method_is_the_definition(tmp_path, world, lengths, names):
    for found in ranks(tmp_path, world, _errors, lengths, names):
        assert len(found) == sum(len(names or examples(n)) for n in lengths) * 3
        assert max(found.values()) < 1e-12, max(found, key=found.get)


def _dtype_errors(rank, dtypes):
    found, options = {}, {"heads": (4, 2), "width": 64}
    alone, _ = dist.new_subgroups(1)
    given = [(Mask.causal(256), alone, dtype, 256) for dtype in dtypes]
    for case in given:
        for method in METHODS:
            found[case[2], method] = multiple_of_sdpa(*case, method=method, **options)
    return found


@pytest.mark.parametrize("world, dtypes", [
    (2, DTYPES[1:3]), *slow((2, DTYPES[3:]), (4, DTYPES[1:]))])  # fmt: skip
def test_low_precision_over_ranks_stays_within_its_multiple_of_sdpa(tmp_path, world, dtypes):
    for found in ranks(tmp_path, world, _dtype_errors, dtypes):
        assert max(found.values()) <= 1.3, found


def _events(rank):
    """What happens in a forward and in a backward, in order; what is repeated counts once."""
    leaves, found, events = [shard(x, dim=2).detach().requires_grad_() for x in draw(18)[0]], [], []
    post = dist.batch_isend_irecv

    def noted(name, function):
        return lambda *given: events.append(name) or function(*given)

    def noted_post(ops):
        events.append("post")
        return [SimpleNamespace(wait=noted("wait", work.wait)) for work in post(ops)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", noted_post)
        for name in ("forward_tiles", "backward_tiles"):
            patch.setattr(ring, name, noted("compute", getattr(ring, name)))
        out = ring_attention(*leaves, mask=Mask.causal(18))
        found.append(events[:])
        events.clear()
        out.sum().backward()
        found.append(events)
    return [[x for n, x in enumerate(some) if some[n - 1 : n] != [x]] for some in found]


def test_double_buffering_computes_while_a_message_is_in_flight(tmp_path):
    hop = ["post", "compute", "wait"]
    for forward, backward in ranks(tmp_path, 3, _events):
        assert forward == [*hop * 2, "compute"]
        # A block while it is computed; then the sum of the hop before, and this one's leaves.
        assert backward == [*hop, "post", "compute", "post", "wait", "compute", "wait", "post",
                            "wait"]  # fmt: skip


def _traffic(rank):
    """{(method, dtype): numbers that this rank sends by dtype, forward and backward apart}."""
    found = {}
    for method, dtype in itertools.product(METHODS, (torch.bfloat16, torch.float64)):
        drawn = (torch.randn(2, heads, 48, 8) for heads in (12, 4, 4))
        qkv = [shard(x, dim=2).to(dtype).requires_grad_() for x in drawn]
        with Messages() as forward:
            out = ring_attention(*qkv, mask=Mask.causal(48, window=5), method=method)
        with Messages() as backward:
            out.sum().backward()
        found[method, dtype] = [collections.Counter(), collections.Counter()]
        for numbers, messages in zip(found[method, dtype], (forward, backward), strict=True):
            for _, size, of in messages.sent:
                numbers[of] += size / of.itemsize
    return found


def test_messages_are_those_of_the_table(tmp_path):
    """Of B D S (W - 1) / W numbers: 2 G for keys and their gradients; Ulysses 2 H + 2 lcm(G, W).

    Blocks travel in their dtype, and sums in float32 or better. A window saves no message.
    """
    unit, blocks, trades = 2 * 8 * 48 * 2 / 3, 2 * 4, (2 * 12 + 2 * 12) / 3
    for found in ranks(tmp_path, 3, _traffic):
        for (method, dtype), (forward, backward) in found.items():
            wide = torch.promote_types(dtype, torch.float32)
            numbers = trades if method == "ulysses" else blocks
            sums = {dtype: trades} if method == "ulysses" else collections.Counter({wide: blocks})
            if method == "ring":
                sums[dtype] += blocks  # the blocks travel a second time
            assert forward == {dtype: numbers * unit}, (method, dtype)
            assert backward == {of: n * unit for of, n in sums.items()}, (method, dtype)


def _held(rank):
    """The shapes that a forward saves, and the numbers in the largest tensor of all."""
    shapes, tokens = [], 4096
    parts = [shard(x, dim=2).detach().requires_grad_() for x in draw(tokens, batch=1, width=16)[0]]
    pack = lambda x: (shapes.append(tuple(x.shape)), x)[1]  # noqa: E731
    with Watch() as watch:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = ring_attention(*parts, mask=Mask.causal(tokens))
        out.sum().backward()
    return sorted(shapes), watch.largest


def test_only_q_k_v_out_and_lse_are_saved_and_no_tensor_is_larger_than_a_few_shards(tmp_path):
    want = sorted([(1, 4, 1024, 16)] * 2 + [(1, 2, 1024, 16)] * 2 + [(1, 4, 1024)])
    for shapes, largest in ranks(tmp_path, 4, _held):
        assert shapes == want and largest <= 8 * 4 * 1024 * 16


CASES = {  # a part of the error: q, k, v and options of rank 1, from those of rank 0
    "mask": lambda q, k, v, o: (q, k, v, {"mask": Mask.causal(24, window=9)}),
    "dtype": lambda q, k, v, o: (q.double(), k.double(), v.double(), o),
    "query heads": lambda q, k, v, o: (torch.cat((q, q), 1), k, v, o),
    "key heads": lambda q, k, v, o: (q, k[:, :1], v[:, :1], o),
    "batch size": lambda q, k, v, o: (q[:1], k[:1], v[:1], o),
    "head_dim": lambda q, k, v, o: (q[..., :4], k[..., :4], v[..., :4], o),
    "method, another": lambda q, k, v, o: (q, k, v, {**o, "method": "allgather"}),
    "scale": lambda q, k, v, o: (q, k, v, {**o, "scale": 0.5}),
    "[True, False, False]": lambda q, k, v, o: (q.requires_grad_(), k, v, o),
    "[False, True, True]": lambda q, k, v, o: (q, k.requires_grad_(), v.requires_grad_(), o),
    "multiple of key heads": lambda q, k, v, o: (q[:, :3], k, v, o),
    "expected q (B, H, q, D)": lambda q, k, v, o: (q[0], k, v, o),
    "one dtype": lambda q, k, v, o: (q, k.double(), v, o),
    "expected a mask of": lambda q, k, v, o: (
        q, k, v, {"mask": Mask.causal(24).slice(slice(9), slice(24))}),
    "expected a Mask or None": lambda q, k, v, o: (q, k, v, {"mask": torch.ones(24, 24) > 0}),
    "one shape": lambda q, k, v, o: (q, k, v[:, :, :5], o),
    "got 7 queries and 7 keys": lambda q, k, v, o: (q[:, :, :7], k[:, :, :7], v[:, :, :7], o),
    "got 8 queries and 12 keys": lambda q, k, v, o: (q[:, :, :8], k, v, o),
    "method": lambda q, k, v, o: (q, k, v, {**o, "method": "star"}),
    "must divide": lambda q, k, v, o: (q[:, :1], k[:, :1], v[:, :1], {**o, "method": "ulysses"}),
    "NoneType": lambda q, k, v, o: (None, k, v, o),
}  # fmt: skip


def _text(*given, **options):
    """What `ring_attention` raises; None where it accepts."""
    try:
        ring_attention(*given, **options)
    except ValueError as error:
        return str(error)


def _refused(rank):
    """What each case raises on this rank if only rank 1 has it, and what other calls raise."""
    texts, x = {}, torch.randn(1, 2, 4, 4)
    with Messages() as heard:
        for name, case in CASES.items():
            q, k, v = (torch.randn(2, n, 12, 8) for n in (4, 2, 2))
            given = q, k, v, {"mask": Mask.causal(24)}
            *qkv, options = case(*given) if rank == 1 else given
            texts[name] = _text(*qkv, **options, debug=True)

        # Without a mask the length is the sum of the shards; they must be zigzag.
        short = torch.randn(1, 2, 5 - 4 * rank, 4)
        unequal = _text(short, short, short, debug=True)
    nothing_sent = not heard.sent

    # The group works after all these errors.
    accepted = _text(x, x, x)
    others = dist.new_group([0])
    outsider = _text(x, x, x, group=others)
    return texts, unequal, nothing_sent, accepted, outsider


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return ranks(tmp_path_factory.mktemp("refused"), 2, _refused)


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_disagree_are_named_on_every_rank(refusals, case):
    for texts, *_ in refusals:
        assert case.split(",")[0] in texts[case] and "rank 1" in texts[case]


def test_nothing_is_sent_before_all_agree_and_the_group_works_afterwards(refusals):
    for _, unequal, nothing_sent, accepted, _ in refusals:
        assert nothing_sent and accepted is None
        assert unequal == "expected zigzag shards of (3, 3) tokens, got (5, 1); use shard()"
    inside, outside = (outsider for *_, outsider in refusals)
    assert inside is None and "rank 1 is not in this group" in outside


def _agreements(rank):
    """How many objects are gathered: with a mask, without one, and in debug.

    Rank 0 uses one mask again and again, and rank 1 makes an equal one for each call.
    """
    calls, real = [], dist.all_gather_object
    dist.all_gather_object = lambda *given, **options: calls.append(0) or real(*given, **options)
    qkv, kept, counts = [shard(x, dim=2) for x in draw(16)[0]], Mask.causal(16), []
    for options in (None, None, None, {}, dict(mask=kept, debug=True)):
        given = dict(mask=Mask.causal(16) if rank else kept) if options is None else options
        ring_attention(*qkv, **given)
        counts.append(len(calls))
    return counts


def test_a_rank_may_make_its_mask_anew(tmp_path):
    """Ranks agree under debug only: on errors, on the call, then on q, k, v, then on out."""
    assert ranks(tmp_path, 2, _agreements) == [[0, 0, 0, 1, 5]] * 2


def _probed(rank, method):
    """Error texts of a NaN in v on rank 1 and an inf in dout on rank 2, and if clean is equal."""
    found = []
    for where in ("v", "dout", None):
        leaves, dout = draw(24, **HEADS)
        if where == "v":
            leaves[2].data[0, 0, indices(24, 1, 3)[0], 0] = math.nan
        if where == "dout":
            dout[0, 0, indices(24, 2, 3)[0], 0] = math.inf
        given = dict(mask=Mask.causal(24), method=method)
        try:
            ours = run(leaves, dout, debug="step 3, layer 7", **given)
            plain = run(leaves, dout, **given)
            found.append(all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)))
        except FloatingPointError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_the_first_tensor_that_is_not_finite_is_named_on_every_rank(tmp_path, method):
    for forward, backward, clean in ranks(tmp_path, 3, _probed, method):
        assert "step 3, layer 7" in forward and "not finite: rank 1: v" in forward
        assert "not finite: rank 2: dout" in backward and clean is True


def _communicators(rank):
    """The sizes of all groups after attention over all ranks, by the core and every method."""
    q, k, v = (shard(x, dim=2).detach().requires_grad_() for x in draw(16)[0])
    grids = Grid(Plan.parse("c2")).group["c"], SimpleGrid("c2").group["c"]
    out = ra.ring_attention(q, k, v) + ra.ulysses_attention(q, k, v)
    for group, method in itertools.product((None, *grids), METHODS):
        out = out + ring_attention(q, k, v, group=group, method=method, mask=Mask.causal(16))
    out.sum().backward()
    return sorted(dist.get_world_size(x) for x in dist.distributed_c10d._world.pg_map)


def test_a_ring_of_the_world_opens_no_second_communicator(tmp_path):
    for sizes in ranks(tmp_path, 2, _communicators):
        assert sizes.count(2) == 1 and len(sizes) > 1, sizes


def _gathered(rank):
    found = []
    for tokens in (0, 1, 7, 12):
        x = torch.arange(6.0 * tokens, dtype=torch.float64).view(3, tokens, 2)
        found.append(unshard(shard(x, dim=-2), dim=-2, length=tokens).equal(x))
        leaf = x.clone().requires_grad_()
        shard(leaf, dim=-2).backward(shard(1 + x, dim=-2))  # of this rank's tokens alone
        found.append(leaf.grad.sum(0).eq(0).all(1).sum() == tokens - len(indices(tokens, rank, 3)))
    with pytest.raises(ValueError, match=f"rank {rank} of 3 holds 4 of 12 tokens"):
        unshard(torch.zeros(3), dim=0, length=12)
    return found


def test_a_gather_undoes_a_shard(tmp_path):
    assert all(all(found) for found in ranks(tmp_path, 3, _gathered))


@pytest.mark.quick
def test_without_torch_distributed_a_ring_just_attends():
    qkv, _ = draw(9)
    for method in METHODS:
        out = ring_attention(*qkv, mask=Mask.causal(9), method=method)
        assert torch.equal(out, attend(*qkv, Mask.causal(9))[0])
        with torch.no_grad():
            assert torch.equal(ring_attention(*qkv, mask=Mask.causal(9), method=method), out)

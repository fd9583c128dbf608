"""Masks: each constructor is its rule in words; boxes cover what is visible, once."""

import numpy as np
import pytest
import torch
from measure_ring import work_of

import ring_attention as ra
from ring_attention import ALL, CAUSAL, FULL, NEVER, DenseMask, Mask, Sizes, boxes, indices

pytestmark = pytest.mark.quick


def _rule(rows, keys, sees, batch=1):
    """bool (batch, 1, rows, keys) by asking sees(b, i, j) for each pair."""
    table = [[[bool(sees(b, i, j)) for j in keys] for i in rows] for b in range(batch)]
    return torch.tensor(table).reshape(batch, 1, len(rows), len(keys))


def _tree(length, seed):
    """Parents of a random forest in DFS preorder, -1 for a root, and the ends of the subtrees."""
    rng, parent, path = np.random.default_rng(seed), [], []
    for j in range(length):
        path = path[: rng.integers(len(path) + 1)] if rng.random() < 0.4 else path
        parent.append(path[-1] if path else -1)
        path = [*path, j]
    ends = [max(d + 1 for d in range(length) if j in _ancestors(parent, d)) for j in range(length)]
    return parent, ends


def _ancestors(parent, j):
    """j, its parent, and so on to a root."""
    found = [j]
    while parent[found[-1]] >= 0:
        found.append(parent[found[-1]])
    return found


def _many(length, seed):
    """Masks of every kind, with a batch of 3, for random documents, blocks, PAD and trees."""
    gen = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(n, (3, length), generator=gen)  # noqa: E731
    valid, label = draw(4) > 0, (draw(4) == 0).cumsum(1)
    tree = Mask.tree(_tree(length, seed)[1])
    return [
        Mask.full(length), Mask.causal(length, batch=2), Mask.causal(length, window=1 + seed),
        Mask.documents(doc_ids=label.masked_fill(~valid, -1)), Mask.blocks(label, valid),
        Mask.documents(doc_ids=label, window=3), Mask.padding(valid),
        Mask.padding(valid, causal=False), tree, tree.with_window(2),
        Mask(draw(length + 1), draw(length + 2), rows_BS=valid, position_BS=draw(9), window=4),
        DenseMask(torch.rand(3, 2, length, length, generator=gen) > 0.7),
    ]  # fmt: skip


# Constructors --------------------------------------------------------------------------------


def test_causal_sees_what_came_before():
    want = _rule(range(6), range(6), lambda b, i, j: j <= i, batch=2)
    assert torch.equal(Mask.causal(6, batch=2).dense(), want)
    assert Mask.full(6).dense().all()


@pytest.mark.parametrize("window", [1, 2, 5, 6, 99])
def test_a_window_counts_the_token_itself(window):
    want = _rule(range(6), range(6), lambda b, i, j: j <= i and i - j < window)
    assert torch.equal(Mask.causal(6, window=window).dense(), want)
    assert torch.equal(Mask.causal(6, window=3).with_window(window).dense(), want)
    assert torch.equal(
        Mask.causal(6, window=window).with_window(None).dense(), Mask.causal(6).dense()
    )


def test_a_window_measures_positions():
    position = [0, 1, 2, 10, 11, 12]
    mask = Mask(range(6), [6] * 6, position_BS=position, window=3)
    want = _rule(range(6), range(6), lambda b, i, j: j <= i and position[i] - position[j] < 3)
    assert torch.equal(mask.dense(), want)


def test_documents_see_themselves_and_pad_sees_nothing():
    doc = [[7, 7, -1, 7, 2, 2, -1], [0, 1, 1, 1, 2, -1, -1]]
    sees = lambda b, i, j: j <= i and doc[b][i] == doc[b][j] >= 0  # noqa: E731
    want = _rule(range(7), range(7), sees, batch=2)
    for given in (doc, torch.tensor(doc), np.array(doc, np.int32)):
        assert torch.equal(Mask.documents(doc_ids=given).dense(), want)


def test_documents_start_where_positions_do_not_go_on_by_one():
    position = [4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10]
    same = Mask.documents(doc_ids=[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]).dense()
    assert torch.equal(Mask.documents(position_ids=position).dense(), same)
    padded = Mask.documents(position_ids=[0, 1, -1, -1, 0, 1]).dense()
    assert torch.equal(padded, Mask.documents(doc_ids=[0, 0, -1, -1, 1, 1]).dense())


def test_doc_ids_win_over_position_ids_with_a_warning():
    with pytest.warns(UserWarning, match="doc_ids decide"):
        mask = Mask.documents(doc_ids=[0, 0, 1, 1], position_ids=[0, 5, 6, 7], window=3)
    seen = [(0, 0), (1, 1), (2, 2), (3, 2), (3, 3)]  # 1 does not see 0: 5 positions apart
    assert mask.dense()[0, 0].nonzero().tolist() == [list(pair) for pair in seen]


def test_blocks_see_their_own_and_earlier_blocks_and_pad_stands_anywhere():
    block = [[0, 0, 1, 1, 1, 5], [2, 2, 2, 3, 3, 3]]
    valid = [[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]]
    sees = lambda b, i, j: valid[b][i] and valid[b][j] and block[b][j] <= block[b][i]  # noqa: E731
    want = _rule(range(6), range(6), sees, batch=2)
    assert torch.equal(Mask.blocks(block, valid).dense(), want)
    free = _rule(range(6), range(6), lambda b, i, j: block[0][j] <= block[0][i])
    assert torch.equal(Mask.blocks(block[0]).dense(), free)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_takes_no_part(causal):
    valid = [[1, 0, 1, 1], [0, 0, 0, 0]]
    sees = lambda b, i, j: valid[b][i] and valid[b][j] and (j <= i or not causal)  # noqa: E731
    want = _rule(range(4), range(4), sees, batch=2)
    assert torch.equal(Mask.padding(torch.tensor(valid) > 0, causal=causal).dense(), want)


@pytest.mark.parametrize("seed", range(6))
def test_a_token_of_a_tree_sees_its_ancestors_and_a_window_counts_depth(seed):
    parent, ends = _tree(17, seed)
    want = _rule(range(17), range(17), lambda b, i, j: j in _ancestors(parent, i))
    assert torch.equal(Mask.tree(ends).dense(), want)
    near = _rule(range(17), range(17), lambda b, i, j: j in _ancestors(parent, i)[:3])
    assert torch.equal(Mask.tree(ends, window=3).dense(), near)
    depth = [len(_ancestors(parent, j)) for j in range(17)]
    assert torch.equal(Mask.tree(ends, depth, window=3).dense(), near)


@pytest.mark.parametrize("seed", range(4))
def test_random_positions_cut_documents_where_a_loop_does(seed):
    gen = torch.Generator().manual_seed(seed)
    step = torch.randint(4, (3, 19), generator=gen)  # 0: a jump, else one more
    position, doc = [[0] * 19 for _ in range(3)], [[0] * 19 for _ in range(3)]
    for b in range(3):
        for j in range(1, 19):
            goes_on = bool(step[b, j])
            position[b][j] = position[b][j - 1] + 1 if goes_on else 5 * j % 7
            doc[b][j] = doc[b][j - 1] + (position[b][j] != position[b][j - 1] + 1)
    near = lambda b, i, j: j <= i and doc[b][i] == doc[b][j] and i - j < 3  # noqa: E731
    want = _rule(range(19), range(19), near, batch=3)
    assert torch.equal(Mask.documents(position_ids=position, window=3).dense(), want)


@pytest.mark.parametrize("off", [[5], [4, 5], [0], [2, 3], range(6), []])
def test_pad_takes_no_part_wherever_it_stands(off):
    block = [0, 0, 1, 1, 2, 2]
    on = lambda i, j: i not in off and j not in off  # noqa: E731
    valid = [i not in off for i in range(6)]
    rule = lambda b, i, j: on(i, j) and block[j] <= block[i]  # noqa: E731
    assert torch.equal(Mask.blocks(block, valid).dense(), _rule(range(6), range(6), rule))
    rule = lambda b, i, j: on(i, j) and j <= i  # noqa: E731
    assert torch.equal(Mask.padding(valid).dense(), _rule(range(6), range(6), rule))
    rule = lambda b, i, j: on(i, j) and block[j] == block[i] and j <= i  # noqa: E731
    doc = [-1 if i in off else block[i] for i in range(6)]
    assert torch.equal(Mask.documents(doc_ids=doc).dense(), _rule(range(6), range(6), rule))


@pytest.mark.parametrize("seed", range(6))
def test_any_intervals_rows_positions_and_window_are_the_rule(seed):
    gen = torch.Generator().manual_seed(seed)
    start, end, position = torch.randint(-5, 20, (3, 2, 14), generator=gen).tolist()
    rows = (torch.rand(14, generator=gen) > 0.2).tolist()  # one row serves the batch
    sees = lambda b, i, j: (  # noqa: E731
        rows[i] and start[b][j] <= i < end[b][j] and position[b][i] - position[b][j] < 3
    )
    mask = Mask(start, end, rows_BS=rows, position_BS=position, window=3)
    assert torch.equal(mask.dense(), _rule(range(14), range(14), sees, batch=2))
    for tile in (1, 2, 8):
        _covers(mask, tile)
        _covers(mask.slice([0, 1, 5, 6, 7, 13], slice(2, 12)), tile)


@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one_token_make_masks(n):
    zeros, ones = np.zeros(n, int), np.ones(n, int)
    for mask in (
        Mask.full(n), Mask.causal(n, window=1), Mask.documents(doc_ids=zeros), Mask.tree(ones),
        Mask.documents(position_ids=zeros + 3), Mask.blocks(zeros), Mask.padding(ones),
        Mask.padding(ones, causal=False), DenseMask(torch.ones(1, 1, n, n) > 0),
    ):  # fmt: skip
        assert mask.shape == (1, 1, n, n) and mask.dense().all()
        assert len(boxes(mask, sizes_of(4))) == n
        _covers(mask, 4)


def test_a_dense_mask_may_differ_by_head():
    bits = torch.rand(2, 4, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.5
    mask = DenseMask(bits)
    assert mask.shape == (2, 4, 9, 9) and torch.equal(mask.dense(), bits)
    assert torch.equal(mask.slice(ALL, ALL, heads=slice(1, 3)).dense(), bits[:, 1:3])
    assert torch.equal(mask.slice([0, 4], slice(3)).dense(), bits[:, :, [0, 4]][..., :3])


def test_a_dense_mask_keeps_what_came_when_the_caller_writes_on():
    bits = torch.ones(1, 1, 6, 6).tril() > 0
    mask = DenseMask(bits)
    bits.fill_(True)
    assert torch.equal(mask.dense(), torch.ones(1, 1, 6, 6).tril() > 0)


def test_the_callers_arrays_are_neither_kept_nor_written():
    start, end = torch.arange(4), torch.full((4,), 4)
    mask = Mask(start, end)
    before = mask.dense()
    start += 3
    end.zero_()
    assert torch.equal(mask.dense(), before) and start.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Mask([0, 1], [2, 2, 2]), r"one shape.*start \(1, 2\), end \(1, 3\)"),
        (lambda: Mask([0.5, 1], [2, 2]), "integers as a mask's start, got float64"),
        (lambda: Mask(torch.zeros(1, 1, 2), [2, 2]), r"\(B, S\) or \(S,\)"),
        (lambda: Mask([0, 0], [2, 2], window=0), "at least 1 as a window, got 0"),
        (lambda: Mask.causal(4).with_window(2.5), "got 2.5"),
        (lambda: Mask.causal(4, window=True), "got True"),
        (lambda: Mask.documents(), "got neither"),
        (lambda: Mask.documents(doc_ids=[0, 1, 0]), "row 0: a document continues after another"),
        (lambda: Mask.blocks([[0, 0], [1, 0]]), "row 1: block numbers decrease"),
        (lambda: Mask.tree([1, 1]), "subtree_end"),
        (lambda: Mask.tree([3, 2]), "subtree_end"),
        (lambda: Mask.tree([3, 4, 3, 4]), "subtree_end.1. lies outside"),
        (lambda: Mask.causal(2).slice([False, True], slice(None)), "arrays of integers"),
        (lambda: Mask.causal(2).slice([0.0, 1.0], slice(None)), "arrays of integers"),
        (lambda: Mask.causal(4).slice([2, 1], slice(None)), "ascending"),
        (lambda: Mask.causal(4).slice(slice(None), slice(None, None, -1)), "ascending"),
        (lambda: DenseMask(torch.ones(2, 2)), "bool tensor"),
        (lambda: DenseMask(torch.ones(1, 1, 2, 2) > 0).with_window(1), "no positions"),
    ],
)
def test_what_cannot_be_a_mask_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("name", ["rows_BS", "position_BS", "end_BS"])
def test_any_part_may_bring_the_batch_of_a_mask(name):
    """start (S,) and end (S,) serve every row, whichever part differs from row to row."""
    parts = dict(end_BS=[4] * 4, rows_BS=[1] * 4, position_BS=[0, 1, 2, 3])
    parts[name] = {
        "rows_BS": [[1, 0, 1, 1], [1, 1, 1, 0]], "position_BS": [[0, 1, 2, 3], [0, 5, 6, 9]],
        "end_BS": [[4, 4, 4, 4], [2, 2, 4, 4]],
    }[name]  # fmt: skip
    mask = Mask(range(4), **parts, window=3)
    end, rows, position = (
        np.broadcast_to(parts[x], (2, 4)) for x in ("end_BS", "rows_BS", "position_BS")
    )
    sees = lambda b, i, j: (  # noqa: E731
        rows[b][i] and j <= i < end[b][j] and position[b][i] - position[b][j] < 3
    )
    assert mask.shape == (2, 1, 4, 4)
    assert torch.equal(mask.dense(), _rule(range(4), range(4), sees, batch=2))


# Slices, digests -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_slice_keeps_the_meaning(seed):
    for mask in _many(13, seed):
        whole = mask.dense()
        for rows, keys in ((slice(3, 11), slice(None)), ([1, 4, 12], [0, 2]), (slice(5, 5), [3])):
            part = mask.slice(rows, keys)
            assert torch.equal(part.dense(), whole[:, :, rows][..., keys])
            assert part.shape == tuple(part.dense().shape)
        twice = mask.slice(slice(2, 12), slice(1, 13)).slice([0, 3, 9], slice(4, 8))
        assert torch.equal(twice.dense(), whole[:, :, [2, 5, 11]][..., 5:9])


def test_masks_share_a_digest_only_if_they_are_equal():
    masks = [Mask.causal(9), Mask.causal(9, window=3), Mask.causal(9, batch=2), Mask.causal(10)]
    masks += [Mask.full(9), Mask.padding(torch.arange(9) != 4), Mask.padding(torch.arange(9) != 5)]
    masks += [
        Mask.causal(9).slice(slice(1, 9), slice(None)),
        Mask.documents(doc_ids=[0] * 5 + [1] * 4),
    ]
    masks += [Mask(range(9), [9] * 9, position_BS=[0] * 9), DenseMask(Mask.causal(9).dense())]
    digests = [mask.digest() for mask in masks]
    assert len(set(digests)) == len(masks) and all(0 <= d < 2**63 for d in digests)
    assert Mask.causal(9, window=3).digest() == Mask.causal(9).with_window(3).digest() == digests[1]


@pytest.mark.parametrize("what", ["start", "end", "rows", "position", "window", "batch"])
def test_one_change_changes_the_digest(what):
    gen = torch.Generator().manual_seed(0)
    start, end, position = torch.randint(12, (3, 2, 11), generator=gen)
    start, end = torch.minimum(start, end), torch.maximum(start, end) + 1
    parts = dict(start=start, end=end, rows=torch.ones_like(start), position=position)

    def made(window=5):
        rows, position = parts["rows"], parts["position"]
        mask = Mask(parts["start"], parts["end"], rows_BS=rows, position_BS=position, window=window)
        return mask.digest()

    before = made()
    assert made() == before
    if what in parts:
        parts[what][1, 7] -= 1
    elif what == "batch":
        parts = {name: x.flip(0) for name, x in parts.items()}
    assert made(6 if what == "window" else 5) != before


def test_one_bit_or_the_order_of_heads_changes_the_digest_of_a_dense_mask():
    bits = torch.rand(2, 3, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.5
    other = bits.clone()
    other[1, 2, 6, 0] ^= True
    masks = [bits, other, bits.flip(1), bits.flip(0), bits.mT, bits.reshape(3, 2, 7, 7)]
    assert len({DenseMask(x).digest() for x in masks}) == len(masks)
    assert DenseMask(bits.clone()).digest() == DenseMask(bits).digest()


# Boxes ---------------------------------------------------------------------------------------


def sizes_of(tile, *, square=NEVER, most=NEVER, partial=NEVER):
    """Sizes in which only the named ones limit a box."""
    return Sizes(tile, square, most, most, partial)


def _covers(mask, tile):
    """Boxes are disjoint, hold all that is visible, and are of the kind and size that they say."""
    dense = mask.dense()
    some = {"square": tile, "most": 3 * tile, "partial": 2 * tile}
    limits = {}, some, {"square": 1, "most": tile}
    for limit in limits:
        sizes = sizes_of(tile, **limit)
        seen = torch.zeros(dense.shape, dtype=torch.int64)
        for batch, rows, keys, kind in boxes(mask, sizes):
            box = dense[batch, :, rows, keys]
            seen[batch, :, rows, keys] += 1
            alive = ~torch.from_numpy(mask.padding_tokens()[0])[batch, None, rows]
            assert rows.start < rows.stop and keys.start < keys.stop

            # PAD among the queries is computed and overwritten; keys of FULL and CAUSAL are seen.
            if kind == FULL:
                assert box[alive.expand(box.shape[:3])].all()
                assert box.shape[2] <= sizes.rows and box.shape[3] <= sizes.keys
            elif kind == CAUSAL:
                triangle = torch.ones_like(box).tril() & alive[..., None]
                assert torch.equal(box, triangle)
                assert box.shape[2] == box.shape[3] <= sizes.square
            else:
                assert kind == ra.PARTIAL
                assert max(box.shape[2:]) <= sizes.partial
        assert not (seen > 1).any()
        assert not (dense & (seen == 0)).any()


@pytest.mark.parametrize("tile", [1, 2, 3, 4, 128])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_boxes_cover_every_visible_pair_once(seed, tile):
    for mask in _many(23, seed):
        _covers(mask, tile)
        for world in (2, 3):
            parts = [indices(23, rank, world).numpy() for rank in range(world)]
            for rows in parts:
                for keys in parts:
                    _covers(mask.slice(rows, keys), tile)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_that_see_are_told_apart_safely(seed):
    """Uneven chunks: never wrongly apart, and exact where a mask has no batch, PAD or window."""
    edges = np.array([0, 1, 4, 6, 11])
    exact = {*range(2), 8}  # full, causal, tree
    for n, mask in enumerate(_many(13, seed)):
        found, dense = mask.chunks_that_see(edges), mask.dense()
        for r, c in np.ndindex(found.shape):
            i, j = (slice(edges[x], [*edges, 13][x + 1]) for x in (r, c))
            sees = dense[:, :, i, j].any()
            assert found[r, c] or not sees
            assert not found[r, c] or sees or n not in exact


def test_causal_chunks_are_told_apart_exactly():
    def count(mask):
        return int(mask.chunks_that_see(np.arange(0, 1024, 128)).sum())

    assert count(Mask.causal(1024)) == 8 + 28
    assert count(Mask.documents(doc_ids=np.arange(1024) // 128)) == 8
    assert count(Mask.blocks(np.arange(1024) // 128)) == 36
    assert count(Mask.causal(1024, window=256)) == 8 + 7 + 6


def test_no_tokens_have_no_boxes():
    for mask in (
        Mask.causal(0),
        Mask.causal(5).slice(slice(0), slice(5)),
        Mask.causal(5).slice([4], []),
    ):
        assert boxes(mask, sizes_of(8)) == [] and work_of(mask) == 0


def test_boxes_are_few_and_waste_little():
    causal = Mask.causal(8192)
    assert len(boxes(causal, sizes_of(128))) == 1
    assert len(boxes(causal, sizes_of(128, square=256))) == 2 * 32 - 1
    exact = 8192 * 8193 / 2
    assert exact * 0.98 < work_of(causal) < 1.05 * exact
    documents = Mask.documents(doc_ids=np.arange(4096) // 300)
    assert work_of(documents) < 1.3 * documents.dense().sum().item()
    short = Mask.documents(doc_ids=np.arange(4096) // 5)
    assert len(boxes(short, sizes_of(128))) <= 4 * 32
    for size, tile in ((50, 64), (5, 128)):
        blocks = Mask.blocks(np.arange(4096) // size)
        assert work_of(blocks, tile) < 1.05 * blocks.dense().sum().item()
        assert len(boxes(blocks, sizes_of(tile))) <= 2 * 4096 // size
    window = Mask.causal(4096, window=500)
    assert work_of(window, 64) < 1.3 * window.dense().sum().item()


@pytest.mark.parametrize("layout, most", [("zigzag", 1.05), ("contiguous", 1.76)])
def test_zigzag_balances_causal_work(layout, most):
    parts = (indices(4096, rank, 4, layout).numpy() for rank in range(4))
    work = np.array([work_of(Mask.causal(4096).slice(part, slice(None))) for part in parts])
    assert most - 0.1 < work.max() / work.mean() <= most


@pytest.mark.parametrize("length", [200, 300, 517, 1000])
def test_zigzag_balances_documents(length):
    mask = Mask.documents(doc_ids=np.arange(4096) // length)
    parts = (indices(4096, rank, 4).numpy() for rank in range(4))
    work = np.array([work_of(mask.slice(part, slice(None))) for part in parts])
    assert work.max() / work.mean() <= 1.25


def test_long_structures_are_one_square_each():
    """Zigzag shards, long documents, a tree's paths, windows that hide nothing; and none of PAD."""

    def squares(mask, tile=16):
        found = sorted(box[1:3] for box in boxes(mask, sizes_of(tile)) if box.kind == CAUSAL)
        return [(q.start, q.stop, k.start, k.stop) for q, k in found]

    shard = indices(256, 1, 4).numpy()
    assert squares(Mask.causal(256).slice(shard, shard)) == [(0, 64, 0, 64)]
    assert squares(Mask.causal(256).slice(shard, ALL)) == [(0, 32, 32, 64), (32, 64, 192, 224)]
    documents = Mask.documents(doc_ids=[0] * 100 + [1] * 60 + [-1] * 16)
    assert squares(documents) == [(0, 100, 0, 100), (100, 160, 100, 160)]

    # A prompt of 40 with answers of 50 and 30: the first path is one square, what is left another.
    end = [120] * 40 + [90] * 50 + [120] * 30
    assert squares(Mask.tree(end)) == [(0, 90, 0, 90), (90, 120, 90, 120)]
    assert len(squares(Mask.causal(256, window=256))) == 1
    assert len(squares(Mask.causal(256, window=40))) == 7  # 6 of 40, and the last 16
    assert squares(Mask.blocks([0] * 64)) == squares(Mask.full(64)) == []


def test_memory_is_linear_and_boxes_are_kept():
    mask = Mask.causal(1000)
    assert sum(x.nbytes for x in (mask.keys.start, mask.keys.end)) == 2 * 8 * 1000
    assert boxes(mask, sizes_of(128)) is boxes(mask, sizes_of(128))
    assert mask.with_window(7) is mask.with_window(7)
    assert ra.as_mask(mask) is mask and ra.as_mask(None) is None

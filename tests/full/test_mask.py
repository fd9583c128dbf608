"""Masks: each constructor is its rule in words; boxes cover what is visible, once."""

import numpy as np
import pytest
import torch
from conftest import shortened

from full.attention.masks import ALL, CAUSAL, FULL, NEVER, PARTIAL, Mask, Sizes, boxes
from full.attention.ring import indices

pytestmark = pytest.mark.quick


def work_of(mask, tile=128):
    """Query-key pairs that the boxes of a mask compute, over the batch; causal boxes count half."""
    total = 0
    for batch, queries, keys, kind in boxes(mask, Sizes(tile, NEVER, NEVER, NEVER, NEVER)):
        rows_of_batch = len(range(mask.shape[0])[batch])
        pairs = (queries.stop - queries.start) * (keys.stop - keys.start) * rows_of_batch
        total += pairs / 2 if kind == CAUSAL else pairs
    return total


def ancestors(parent, j):
    """j, its parent, and so on to a root."""
    found = [j]
    while parent[found[-1]] >= 0:
        found.append(parent[found[-1]])
    return found


def tree(length, seed):
    """Parents of a random forest in DFS preorder, -1 for a root, and the ends of the subtrees."""
    rng, parent, path = np.random.default_rng(seed), [], []
    for j in range(length):
        path = path[: rng.integers(len(path) + 1)] if rng.random() < 0.4 else path
        parent.append(path[-1] if path else -1)
        path = [*path, j]
    ends = [max(d + 1 for d in range(length) if j in ancestors(parent, d)) for j in range(length)]
    return parent, ends


def masks(length, seed):
    """{name: (mask, whether query i of row b sees key j)}, of random documents, blocks, PAD, trees.

    A batch of 3 where rows may differ. PAD ends row 0, begins row 1, and is all of row 2.
    """
    gen = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(n, (3, length), generator=gen)  # noqa: E731
    valid, label = draw(4) > 0, (draw(4) == 0).cumsum(1)
    valid[0, -1:] = valid[1, :1] = valid[2] = False
    parent, ends = tree(length, seed)
    above = [ancestors(parent, i) for i in range(length)]
    window = (1, 2, 5, 99)[seed]
    parts = dict(
        start_BS=draw(length + 1), end_BS=draw(length + 2), rows_BS=valid, position_BS=draw(9)
    )
    far = torch.arange(length) + (draw(3) == 0).cumsum(1)

    # Positions go on by one inside a document, and jump up or down where the next one starts.
    position = torch.arange(length) + 3 + label * torch.tensor([[2], [-2], [1]])
    of_tree = Mask.tree(ends)
    on = lambda b, i, j: valid[b, i] and valid[b, j]  # noqa: E731
    near = lambda b, i, j: j <= i and label[b, i] == label[b, j]  # noqa: E731

    def in_intervals(start_BS, end_BS, rows_BS, position_BS):
        return lambda b, i, j: (
            rows_BS[b, i] and start_BS[b, j] <= i < end_BS[b, j]
            and position_BS[b, i] < position_BS[b, j] + 4)

    # Any part may bring the batch; the others are (S,) then.
    intervals = {}
    for key in parts:
        shared = {name: x if name == key else x[1] for name, x in parts.items()}
        every = {name: x.expand(3, length) for name, x in shared.items()}
        intervals[f"intervals, {key}"] = Mask(**shared, window=4), in_intervals(**every)
    return intervals | {
        "full": (Mask.full(length), lambda b, i, j: True),
        "causal": (
            Mask.causal(length, batch=2, window=3).with_window(None), lambda b, i, j: j <= i),
        "window": (Mask.causal(length, window=window), lambda b, i, j: j <= i < j + window),
        "window of places": (
            Mask(range(length), [length] * length, position_BS=far, window=3),
            lambda b, i, j: j <= i and far[b, i] < far[b, j] + 3),
        "documents": (
            Mask.documents(doc_ids=label.masked_fill(~valid, -1)),
            lambda *at: on(*at) and near(*at)),
        "documents in a window": (
            Mask.documents(doc_ids=label.numpy(), window=3),
            lambda b, i, j: near(b, i, j) and i < j + 3),
        "positions": (
            Mask.documents(position_ids=position.masked_fill(~valid, -1)),
            lambda b, i, j: near(b, i, j) and valid[b, j : i + 1].all()),
        "positions in a window": (
            Mask.documents(position_ids=position.tolist(), window=3),
            lambda b, i, j: near(b, i, j) and i < j + 3),
        "blocks": (
            Mask.blocks(label, valid), lambda b, i, j: on(b, i, j) and label[b, j] <= label[b, i]),
        "blocks without PAD": (Mask.blocks(label), lambda b, i, j: label[b, j] <= label[b, i]),
        "padding": (Mask.padding(valid), lambda b, i, j: on(b, i, j) and j <= i),
        "padding, all see": (Mask.padding(valid.tolist(), causal=False), on),
        "tree": (of_tree, lambda b, i, j: j in above[i]),
        "tree in a window": (of_tree.with_window(2), lambda b, i, j: j in above[i][:2]),
        "intervals": (Mask(**parts, window=4), in_intervals(**parts)),
    }  # fmt: skip


# Rules, slices, chunks ------------------------------------------------------------------------

seeds = pytest.mark.parametrize("seed", range(4))


@seeds
def test_each_constructor_is_its_rule(seed):
    for name, (mask, sees) in masks(13, seed).items():
        dense = mask.dense()
        pairs = np.ndindex(len(dense), 13, 13)
        want = torch.tensor([bool(sees(*at)) for at in pairs]).reshape(-1, 1, 13, 13)
        assert torch.equal(dense, want), name
        batch = {"full": 1, "causal": 2, "window": 1}.get(name, 1 if "tree" in name else 3)
        assert mask.shape == tuple(dense.shape) == (batch, 1, 13, 13)


@seeds
def test_a_slice_keeps_the_meaning(seed):
    for mask, _ in masks(13, seed).values():
        whole = mask.dense()
        for rows, keys in ((slice(3, 11), ALL), ([1, 4, 12], [0, 2]), (slice(5, 5), [3])):
            part = mask.slice(rows, keys)
            assert torch.equal(part.dense(), whole[:, :, rows][..., keys])
            assert part.shape == tuple(part.dense().shape)
        twice = mask.slice(slice(2, 12), slice(1, 13)).slice([0, 3, 9], slice(4, 8))
        assert torch.equal(twice.dense(), whole[:, :, [2, 5, 11]][..., 5:9])


def test_doc_ids_win_over_position_ids():
    mask = Mask.documents(doc_ids=[0, 0, 1, 1], position_ids=[0, 5, 6, 7], window=3)
    seen = [(0, 0), (1, 1), (2, 2), (3, 2), (3, 3)]  # 1 does not see 0: 5 positions apart
    assert mask.dense()[0, 0].nonzero().tolist() == [list(pair) for pair in seen]


def test_the_callers_arrays_are_neither_kept_nor_written():
    start, end = torch.arange(4), torch.full((4,), 4)
    mask = Mask(start, end)
    before = mask.dense()
    start += 3
    end.zero_()
    assert torch.equal(mask.dense(), before) and start.tolist() == [3, 4, 5, 6]


@seeds
def test_masks_share_a_digest_only_if_they_are_equal(seed):
    """Also after one change of one number."""
    gen = torch.Generator().manual_seed(seed)
    start, end, position = torch.randint(12, (3, 2, 11), generator=gen)
    start, end = torch.minimum(start, end), torch.maximum(start, end) + 1
    parts = dict(start_BS=start, end_BS=end, rows_BS=torch.ones_like(start), position_BS=position)
    causal, mask = Mask.causal(9), Mask(**parts, window=5)
    different = [
        mask, Mask(**parts, window=6), causal, Mask.causal(9, window=3), Mask.causal(9, batch=2),
        Mask.causal(10), causal.slice(slice(1, 9), ALL), *(x for x, _ in masks(13, seed).values()),
    ]  # fmt: skip
    for name, x in parts.items():
        changed = x.clone()
        changed[1, 7] -= 1
        different.append(Mask(**parts | {name: changed}, window=5))
    digests = [x.digest() for x in different]
    assert len(set(digests)) == len(different)
    assert [causal.with_window(3).digest(), Mask(**parts, window=5).digest()] == [
        digests[3], digests[0]]  # fmt: skip


def sizes_of(tile, *, square=NEVER, most=NEVER, partial=NEVER):
    """Sizes in which only the named ones limit a box."""
    return Sizes(tile, square, most, most, partial)


def covers(mask, tile):
    """Boxes are disjoint, hold all that is visible, and are of the kind and size that they say."""
    dense = mask.dense()
    some = {"square": tile, "most": 3 * tile, "partial": 2 * tile}
    for limit in ({}, some, {"square": 1, "most": tile}):
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
                assert kind == PARTIAL and max(box.shape[2:]) <= sizes.partial
        assert not (seen > 1).any() and not (dense & (seen == 0)).any()


@pytest.mark.parametrize("tile", shortened([1, 2, 3, 5, 128], 5, 128))
@pytest.mark.parametrize("seed", shortened([0, 2], 0))
def test_boxes_cover_every_visible_pair_once(seed, tile):
    for mask, _ in masks(23, seed).values():
        covers(mask, tile)
        for world in (2, 3):
            parts = [indices(23, rank, world).numpy() for rank in range(world)]
            for rows in parts:
                for keys in parts:
                    covers(mask.slice(rows, keys), tile)


@pytest.mark.parametrize(
    "mask, tile, most_boxes, most_work",
    [
        (Mask.causal(4096), 128, 1, 1.05),
        (Mask.documents(doc_ids=np.arange(4096) // 5), 128, 128, 99),
        (Mask.documents(doc_ids=np.arange(4096) // 300), 128, 99, 1.3),
        (Mask.causal(4096, window=500), 64, 999, 1.3),
        (Mask.blocks(np.arange(4096) // 50), 64, 163, 1.05),
        (Mask.blocks(np.arange(4096) // 5), 128, 1638, 1.05),
    ],
)
def test_boxes_are_few_and_waste_little(mask, tile, most_boxes, most_work):
    assert 0.98 < work_of(mask, tile) / mask.dense().sum().item() < most_work
    assert len(boxes(mask, sizes_of(tile))) <= most_boxes


def test_memory_is_linear_and_boxes_are_kept():
    mask = Mask.causal(1000)
    assert sum(x.nbytes for x in (mask.keys.start, mask.keys.end)) == 2 * 8 * 1000
    assert boxes(mask, sizes_of(128)) is boxes(mask, sizes_of(128))
    assert mask.with_window(7) is mask.with_window(7)

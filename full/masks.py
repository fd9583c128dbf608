"""Masks as intervals, cut into boxes: adds masks to `ring_attention.py`, which has the causal one.

    (4)  i sees j  iff  start_j <= i < end_j, rows_i, and position_i - position_j < window

Two integers a key, O(S) memory: causal, documents, blocks, PAD, trees of tokens in preorder,
windows. For speed, what is visible becomes a few rectangles, most of which need no mask inside.

FlashMask (arXiv:2410.01359) keeps two intervals of hidden queries per key, this file one interval
of visible queries.

Letters:  B batch   S all tokens   i, j and q, k queries and keys   X any dimension
"""

import hashlib
import warnings
from collections import namedtuple

import numpy as np
import torch

ALL = slice(None)


NEVER = 1 << 60  # the start of an interval without a query; as a size: no limit

# The per-query and per-key arrays of equation (4), (B, q) and (B, k). A shard stores global
# indices, so the same test works for a shard and for the whole sequence.
Queries = namedtuple("Queries", "index rows position")

Keys = namedtuple("Keys", "index start end position")


def visible_pairs(queries, keys, window, /):
    """Compute equation (4): bool (B, q, k), True where query i sees key j.

    queries: Queries. keys: Keys. window: an integer, or None.

    A table of S^2 bits would say the same, with more memory than everything else here. But in each
    mask that people train with, the queries that see key j are consecutive. So two integers per key
    describe them: start, the first of these queries, and end, the first one after them. The minimum
    and maximum of both over some keys tell whether a query sees none or all of them. With 4 tokens:

        causal          documents 0 0 1 1      blocks 0 0 1 1        tree 0-(1-2, 3)
        j:     0 1 2 3  j:     0 1 2 3         j:     0 1 2 3        j:     0 1 2 3
        start: 0 1 2 3  start: 0 1 2 3         start: 0 0 2 2        start: 0 1 2 3
        end:   4 4 4 4  end:   2 2 4 4         end:   4 4 4 4        end:   4 3 3 4
        row 3: x x x x  row 3: . . x x         row 0: x x . .        row 3: x . . x

    Documents are packed sequences, each causal. A block sees itself in both directions and all
    blocks before it (prefix-LM). The tokens of a tree are in preorder and see their ancestors: key
    j is seen by j and its descendants, which are the tokens right after it. A PAD token has an
    empty interval as a key, and its bit in rows is off as a query.
    """
    # In the tree key 1 has start 1 and end 3, so queries 1 and 2 see it, and query 3 does not.
    index_Bq1 = queries.index[:, :, None]
    see_Bqk = (keys.start[:, None] <= index_Bq1) & (index_Bq1 < keys.end[:, None])  # (4)
    see_Bqk &= queries.rows[:, :, None]

    # A window limits how far back a query sees. It measures positions: indices, or places within a
    # document, or depths in a tree.
    if window is not None:
        position_Bq1 = queries.position[:, :, None]
        position_B1k = keys.position[:, None]
        see_Bqk &= position_Bq1 - position_B1k < window  # (4)
    return see_Bqk


class Mask:
    """Which query sees which key: equation (4), one interval of queries per key.

    start_BS, end_BS: (B, S) or (S,) integers (torch, numpy, lists). Key j is seen by the queries
        start_j to end_j - 1. An interval may be empty.
    rows_BS: bool. Off where a query sees nothing (PAD). Default: on.
    window: a query sees keys with position_i - position_j < window. Default: no window.
    position_BS: integers that the window measures. Default: the index.

    A batch of 1 serves every batch, and is faster: each row of a larger batch has kernel calls of
    its own, even if all rows are equal. Raises ValueError if shapes or types do not fit.
    `visible_pairs` has pictures of the usual masks.
    """

    def __init__(self, start_BS, end_BS, *, rows_BS=None, position_BS=None, window=None):
        # Any part may bring the batch: start (S,) and end (S,) serve every row of rows_BS (B, S).
        start_BS = as_integers(start_BS, "start")
        index_BS = np.arange(start_BS.shape[1])[None]
        rows_BS = np.ones_like(index_BS) if rows_BS is None else rows_BS
        position_BS = index_BS if position_BS is None else position_BS
        given = {"start": start_BS, "end": end_BS, "rows": rows_BS, "position": position_BS}
        parts = [as_integers(x, name) for name, x in given.items()]
        shape = max(len(x) for x in parts), index_BS.shape[1]
        shapes = [x.shape for x in parts]
        if {*shapes} - {shape, index_BS.shape}:
            got = ", ".join(f"{name} {x}" for name, x in zip(given, shapes, strict=True))
            raise ValueError(f"expected parts of a mask of one shape (B, S), got {got}")
        whole = (np.broadcast_to(x, shape) for x in (index_BS, *parts))
        index_BS, start_BS, end_BS, rows_BS, position_BS = whole

        # Write every empty interval as NEVER..0. Then the minimum start and the maximum end of some
        # keys are the minimum and maximum over the keys that somebody sees. With the intervals 2..5
        # and 4..4 of two keys, 4..4 would raise the maximum of the starts, though nobody sees it.
        empty_BS = start_BS >= end_BS
        start_BS = np.where(empty_BS, NEVER, start_BS)
        end_BS = np.where(empty_BS, 0, end_BS)

        self.queries = Queries(index_BS, rows_BS != 0, position_BS)
        self.keys = Keys(index_BS, start_BS, end_BS, position_BS)
        self.window = checked_window(window)
        self.cache = {}  # boxes, biases, schedules: found once, used in every layer and step

    @classmethod
    def full(cls, length):
        """Make the mask in which every token sees every token."""
        # Every key is seen from query 0 on, to the end.
        return cls(np.zeros(length, int), np.full(length, length))

    @classmethod
    def causal(cls, length, *, batch=1, window=None):
        """Make the mask in which each token sees itself and the tokens before it."""
        # Key j is seen from query j on, to the end.
        index_BS = np.tile(np.arange(length), (batch, 1))
        return cls(index_BS, np.full_like(index_BS, length), window=window)

    @classmethod
    def documents(cls, *, doc_ids=None, position_ids=None, window=None):
        """Make the mask of packed documents, each causal.

        doc_ids: (B, S) integers, one number per document; -1 is PAD, allowed anywhere.
        position_ids: (B, S) integers. A document starts where a position is not the previous one
            plus 1; -1 is PAD. A document that starts at previous + 1 cannot be seen: use doc_ids.
            If both are given, doc_ids decide, with a warning, and position_ids only measure the
            window.

        Raises ValueError if neither is given, or if a document continues after another one.
        """
        if position_ids is not None:
            position_ids = as_integers(position_ids, "position_ids")
        if doc_ids is None and position_ids is None:
            raise ValueError("expected doc_ids or position_ids of shape (B, S), got neither")
        if doc_ids is None:
            doc_ids = document_numbers(position_ids)
        elif position_ids is not None:
            warnings.warn("got doc_ids and position_ids: doc_ids decide", stacklevel=2)

        # Like causal, but a key's interval ends where the next document starts. It may include PAD,
        # whose rows are off anyway.
        #
        #     doc_ids    7 7 . 2 2 2        ".": PAD
        #     start      0 1 2 3 4 5        document 7: first token 0, next document at 3
        #     end        3 3 0 6 6 6        document 2: first token 3, next document at 6
        doc_BS = as_integers(doc_ids, "doc_ids")
        rows_BS = doc_BS >= 0
        label_BS, first_BS, next_BS = runs_of_labels(doc_BS, rows_BS)
        for row, label_S in enumerate(label_BS):
            # A document that comes back has one label and two runs.
            label_of_runs = label_S[np.unique(first_BS[row])]
            if len(np.unique(label_of_runs)) < len(label_of_runs):
                raise ValueError(f"row {row}: a document continues after another one; sort tokens")
        start_S = np.arange(doc_BS.shape[1])
        end_BS = np.where(rows_BS, next_BS, 0)
        return cls(start_S, end_BS, rows_BS=rows_BS, position_BS=position_ids, window=window)

    @classmethod
    def blocks(cls, block_BS, valid_BS=None):
        """Make the block-causal mask (prefix-LM, pi0.7): see your own block and all before it.

        block_BS: (B, S) integers that do not decrease over valid tokens.
        valid_BS: (B, S). Off for PAD, anywhere. Default: on.

        Raises ValueError if block numbers decrease.
        """
        block_BS = as_integers(block_BS, "block")
        valid_BS = np.ones_like(block_BS) if valid_BS is None else as_integers(valid_BS, "valid")

        # A key is seen from the first token of its block on, even by queries before the key. So the
        # tokens of a block see each other in both directions.
        label_BS, start_BS, _ = runs_of_labels(block_BS, valid_BS)
        decreasing = np.nonzero(np.diff(label_BS) < 0)[0]
        if len(decreasing):
            row = decreasing[0]
            raise ValueError(f"row {row}: block numbers decrease; sort the tokens by block")

        end_BS = np.where(valid_BS != 0, block_BS.shape[1], 0)
        return cls(start_BS, end_BS, rows_BS=valid_BS)

    @classmethod
    def padding(cls, valid_BS, *, causal=True):
        """Make a mask in which PAD tokens (off in valid_BS) see nothing and nobody sees them."""
        valid_BS = as_integers(valid_BS, "valid")
        index_S = np.arange(valid_BS.shape[1])
        start_S = index_S if causal else np.zeros_like(index_S)

        # A PAD key has the end 0, so its interval is empty.
        end_BS = np.where(valid_BS != 0, len(index_S), 0)
        return cls(start_S, end_BS, rows_BS=valid_BS)

    @classmethod
    def tree(cls, subtree_end_S, position_S=None, window=None):
        """Make the mask of a token tree in preorder: a token sees its ancestors and itself.

        subtree_end_S: (S,) or (B, S) integers. The index after a token's last descendant.
        position_S: depths, which a window measures. Default: computed from subtree_end_S.

        Raises ValueError if the ends do not form a tree.
        """
        # In preorder the descendants of j are the tokens right after it. They are exactly the
        # tokens that have j as an ancestor, so the queries that see key j are an interval.
        end_BS = as_integers(subtree_end_S, "subtree_end")
        index_S = np.arange(end_BS.shape[1])
        if (end_BS <= index_S).any() or (end_BS > len(index_S)).any():
            raise ValueError("expected subtree_end[j] in j + 1 .. S")
        depth_BS = np.stack([preorder_depth(end_S) for end_S in end_BS])
        position_BS = depth_BS if position_S is None else position_S
        return cls(index_S, end_BS, position_BS=position_BS, window=window)

    def dense(self):
        """Return equation (4) as bool (B, 1, q, k)."""
        return torch.from_numpy(visible_pairs(self.queries, self.keys, self.window))[:, None]

    def slice(self, queries, keys, batch=ALL, heads=ALL):
        """Return the mask of some queries and keys: slices, or ascending arrays of local indices.

        i and j keep their global meaning. So a part may be a shard against a block, or a suffix
        against a cache (q != k). An interval mask is the same for all heads.
        """
        rows = checked_index(queries)
        columns = checked_index(keys)
        part_of_queries = Queries(*(x[batch, rows] for x in self.queries))
        part_of_keys = Keys(*(x[batch, columns] for x in self.keys))
        return self._changed(queries=part_of_queries, keys=part_of_keys)

    def with_window(self, window):
        """Return the same mask with another window (None: none), for models whose layers differ."""
        if checked_window(window) == self.window:
            return self
        # Kept, so that the next layer and the next step find the boxes of this window again.
        if ("window", window) not in self.cache:
            self.cache["window", window] = self._changed(window=window)
        return self.cache["window", window]

    def _changed(self, **changes):
        """Return a copy with some attributes changed and an empty cache."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, cache={}, **changes)
        return other

    @property
    def shape(self):
        """Return (batch, heads, queries, keys) of `dense()`. A 1 serves any batch or any heads."""
        batch, num_queries = self.queries.rows.shape
        return batch, 1, num_queries, self.keys.end.shape[1]

    def padding_tokens(self):
        """Return bool arrays (B, q) and (B, k): queries that see nothing, keys that nobody sees."""
        return ~self.queries.rows, self.keys.start >= self.keys.end

    def chunks_that_see(self, edges):
        """Return bool (n, n): can a token of chunk r see a token of chunk c?

        edges: the ascending first indices of n chunks that cut the sequence. Never wrongly False.
        """
        # The queries of a chunk that see anything lie in first .. last, and the intervals of the
        # keys of a chunk in start .. end. So chunk r may see chunk c if these two ranges meet.
        def smallest(x_BS):
            return np.minimum.reduceat(x_BS, edges, axis=1)

        def largest(x_BS):
            return np.maximum.reduceat(x_BS, edges, axis=1)

        index_BS, rows_BS, position_BS = self.queries
        first_Bn = smallest(np.where(rows_BS, index_BS, NEVER))
        last_Bn = largest(np.where(rows_BS, index_BS, -1))
        start_Bn = smallest(self.keys.start)
        end_Bn = largest(self.keys.end)
        sees_Bnn = start_Bn[:, None] <= last_Bn[:, :, None]
        sees_Bnn &= first_Bn[:, :, None] < end_Bn[:, None]

        # Under a window the nearest pair of the two chunks must be near enough.
        if self.window is not None:
            nearest_Bnn = smallest(position_BS)[:, :, None] - largest(position_BS)[:, None]
            sees_Bnn &= nearest_Bnn < self.window
        return sees_Bnn.any(axis=0)

    def digest(self):
        """Return a 63-bit number that is different for different masks."""
        if "digest" not in self.cache:
            self.cache["digest"] = digest(self.window, *self.queries, *self.keys)
        return self.cache["digest"]


class DenseMask(Mask):
    """A bool tensor (B, 1 or H, q, k) as a Mask, for what is not an interval.

    It takes the caller's O(S^2) memory. `attend` and `ring_attention` make one from a bool tensor
    at every call. Make it yourself, once, and all layers share its boxes.
    """

    def __init__(self, dense):
        is_tensor = isinstance(dense, torch.Tensor)
        if not is_tensor or dense.ndim != 4 or dense.dtype != torch.bool:
            got = f"{dense.dtype} {tuple(dense.shape)}" if is_tensor else f"{dense!r}"
            raise ValueError(f"expected a Mask or a bool tensor (B, 1 or H, q, k), got {got}")

        # A copy, so that the caller may write into the tensor; on the CPU, where boxes are found.
        self.bits = dense.detach().to("cpu", copy=True)
        self.cache = {}

    shape = property(lambda self: tuple(self.bits.shape))

    def with_window(self, window):
        if window is not None:
            raise ValueError("a dense mask has no positions: put the window into it, or use a Mask")
        return self

    def slice(self, queries, keys, batch=ALL, heads=ALL):
        # A mask of one head serves all heads, also if this rank has a share of the heads.
        bits = self.bits[batch, heads if self.bits.shape[1] > 1 else ALL]
        return DenseMask(bits[:, :, checked_index(queries)][..., checked_index(keys)])

    def dense(self):
        return self.bits

    def padding_tokens(self):
        return ~self.bits.any(3).any(1).numpy(), ~self.bits.any(2).any(1).numpy()

    def chunks_that_see(self, edges):
        # One bit of the tile, in any batch row and head, is enough.
        bits = np.logical_or.reduceat(self.bits.numpy(), edges, axis=2)
        return np.logical_or.reduceat(bits, edges, axis=3).any(axis=(0, 1))

    def digest(self):
        return digest(self.bits.numpy())


def as_mask(mask):
    """Return a Mask for a Mask, a bool tensor, or None."""
    return mask if mask is None or isinstance(mask, Mask) else DenseMask(mask)


def as_integers(x, name):
    """Return a copy of x as int64 (B, S); x may be (S,). Raise ValueError for anything else."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().numpy()
    array = np.array(x)
    if array.ndim == 1:
        array = array[None]

    # An empty list becomes float64, which is meant as no integers.
    if array.ndim != 2 or (array.size and array.dtype.kind not in "iub"):
        got = f"{array.dtype} {array.shape}"
        raise ValueError(f"expected (B, S) or (S,) integers as a mask's {name}, got {got}")
    return array.astype(np.int64)


def checked_index(index):
    """Return a slice or an int64 array of ascending indices, or raise ValueError."""
    # The search for boxes finds tokens by bisection, so indices must ascend.
    if isinstance(index, slice) and (index.step or 1) > 0:
        return index
    array = np.asarray(index)
    if (array.size and array.dtype.kind not in "iu") or (np.diff(array) < 1).any():
        raise ValueError("expected slices or arrays of integers, both ascending, to slice a mask")
    return array.astype(np.int64)


def checked_window(window):
    """Return the window, or raise ValueError unless it is None or an integer of at least 1."""
    # In Python True is an integer, and would be a window of 1.
    is_integer = isinstance(window, (int, np.integer)) and not isinstance(window, bool)
    if window is not None and not (is_integer and window >= 1):
        raise ValueError(f"expected None or an integer of at least 1 as a window, got {window!r}")
    return window


def document_numbers(position_BS):
    """Return doc_BS, one number per document and -1 for PAD, from positions."""
    # A document starts where a position is not the previous one plus 1. The number of such jumps so
    # far numbers the documents:
    #
    #     position  4 5 6 0 1 -1 0        a -2 stands before the first one, so 4 is a jump
    #     jump      1 0 0 1 0  1 0        -1 to 0 is not a jump, but the jump to -1 has counted
    #     document  1 1 1 2 2 -1 3
    jump_BS = np.diff(position_BS, prepend=-2) != 1
    return np.where(position_BS < 0, -1, np.cumsum(jump_BS, axis=1))


def runs_of_labels(label_BS, valid_BS):
    """Return the label, the first token and the next run of every token's run, (B, S) each.

    PAD may stand anywhere. It belongs to the run of the valid token before it:

        label  . 7 7 . 7 2 2        first  0 1 1 1 1 5 5
                                    next   1 5 5 5 5 7 7        7: the end of the sequence
    """
    # PAD before the first valid token is a run of its own, whose label is the smallest.
    index_S = np.arange(label_BS.shape[1])
    last_valid_BS = np.maximum.accumulate(np.where(valid_BS, index_S, 0), axis=1)
    label_BS = np.where(valid_BS, label_BS, -NEVER)
    label_BS = np.take_along_axis(label_BS, last_valid_BS, axis=1)

    # Carry the index of each first token to the right, and the index after each last to the left.
    is_first_BS = np.diff(label_BS, prepend=NEVER) != 0
    is_last_BS = np.diff(label_BS, append=NEVER) != 0

    first_BS = np.maximum.accumulate(np.where(is_first_BS, index_S, 0), axis=1)
    next_BS = np.where(is_last_BS, index_S + 1, len(index_S))
    next_BS = np.minimum.accumulate(next_BS[:, ::-1], axis=1)[:, ::-1]
    return label_BS, first_BS, next_BS


def preorder_depth(end_S):
    """Return the depth of each token of a preorder, or raise ValueError if subtrees overlap."""
    # A token's ancestors are those whose subtrees started before it and have not ended. Their ends:
    #
    #     end        4 3 3 4       0-(1-2, 3)
    #     ancestors  - 4 4 4       subtrees 1 and 2 end where token 3 starts
    #                    3
    #     depth      0 1 2 1
    depth = []
    open_ends = []  # of the subtrees that the next token may be in
    for token, end in enumerate(end_S.tolist()):
        while open_ends and open_ends[-1] <= token:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            raise ValueError(f"subtree_end[{token}] lies outside the subtree of its parent")
        depth.append(len(open_ends))
        open_ends.append(end)
    return np.array(depth, int)


# Boxes ------------------------------------------------------------------------------------------
# For: speed. Skip it if you accept that the boxes are disjoint and hold every visible pair.

PARTIAL, FULL, CAUSAL = range(3)  # what of a box is visible: some pairs, all, the causal triangle

Box = namedtuple("Box", "batch rows keys kind")  # three slices, and the kind

# tile: keys of which no smaller box is sought. Then the longest square (CAUSAL), the most rows and
# keys of a FULL box, and the longest side of a PARTIAL box.
Sizes = namedtuple("Sizes", "tile square rows keys partial")

# Of torch's CPU kernels only the forward skips what lies above the diagonal in small steps. So the
# backward cuts a causal square into halves down to 128, which saves 20 % at 512 tokens; see
# full/RESULTS.md. Limits of rows and keys bound the memory of one call's results: 8 MB of 54 at
# 8192 tokens.
TILE = 64

TILES = {
    "cpu forward": Sizes(tile=TILE, square=NEVER, rows=2048, keys=NEVER, partial=1024),
    "cpu backward": Sizes(tile=TILE, square=128, rows=1024, keys=2048, partial=1024),
    "cuda": Sizes(tile=1024, square=NEVER, rows=NEVER, keys=NEVER, partial=1024),
    "formulas": Sizes(tile=512, square=512, rows=512, keys=512, partial=512),
}


def boxes(mask, sizes):
    """Return disjoint Boxes, of at most these sizes, that hold every visible pair of a mask."""
    if ("boxes", sizes) not in mask.cache:
        found = []
        for box in whole_boxes(mask, sizes.tile):
            found += cut(box, sizes)
        mask.cache["boxes", sizes] = found
    return mask.cache["boxes", sizes]


def whole_boxes(mask, tile):
    """Return the Boxes of a mask before they are cut: one search for forward and backward."""
    if ("boxes", tile) not in mask.cache:
        find = boxes_of_bits if isinstance(mask, DenseMask) else boxes_of_intervals
        found = []
        for b in range(mask.shape[0]):
            # A mask with one row serves every row of q.
            batch = slice(b, b + 1) if mask.shape[0] > 1 else ALL
            found += [Box(batch, *box) for box in find(mask, b, tile)]
        mask.cache["boxes", tile] = found
    return mask.cache["boxes", tile]


def cut(box, sizes):
    """Cut a Box into Boxes of at most these sizes: a grid, or the halves of a causal square."""
    size = box.keys.stop - box.keys.start
    if box.kind == CAUSAL and size <= sizes.square:
        return [box]
    if box.kind == CAUSAL:
        # Two smaller squares, and the rectangle below the first one, of which all is visible.
        keys = split_slice(box.keys, (size + 1) // 2)
        rows = split_slice(box.rows, (size + 1) // 2)
        below = box._replace(rows=rows[1], keys=keys[0], kind=FULL)
        squares = [box._replace(rows=i, keys=j) for i, j in zip(rows, keys, strict=True)]
        return [*cut(squares[0], sizes), *cut(below, sizes), *cut(squares[1], sizes)]
    most_rows = sizes.partial if box.kind == PARTIAL else sizes.rows
    most_keys = sizes.partial if box.kind == PARTIAL else sizes.keys
    rows = split_slice(box.rows, most_rows)
    keys = split_slice(box.keys, most_keys)
    return [box._replace(rows=i, keys=j) for i in rows for j in keys]


def split_slice(whole, most):
    """Cut a slice into slices of at most this length."""
    starts = range(whole.start, whole.stop, most)
    return [slice(start, min(start + most, whole.stop)) for start in starts]


def boxes_of_bits(mask, b, tile):
    """Return strips of a tile's queries, each against the keys from its first visible to its last.

    One strip serves all heads: the bias of its box has the bits of each head.
    """
    found = []
    visible_qk = mask.bits[b].any(0).numpy()
    for rows in split_slice(slice(0, len(visible_qk)), tile):
        seen = np.flatnonzero(visible_qk[rows].any(0)).tolist()
        if seen:
            found.append((rows, slice(seen[0], seen[-1] + 1), PARTIAL))
    return found


def boxes_of_intervals(mask, b, tile):
    """Return [(rows, keys, kind)] of one batch row of a mask."""
    queries = Queries(*(x[b] for x in mask.queries))
    keys = Keys(*(x[b] for x in mask.keys))
    if not queries.index.size or not keys.index.size:
        return []

    # PAD among the queries is computed and overwritten later. Only stop after the last real query.
    last_row = queries.index[queries.rows].max(initial=-1) + 1
    keys = keys._replace(end=np.minimum(keys.end, last_row))
    search = BoxSearch(queries, keys, mask.window, tile)
    search.visit(0, len(keys.index), 0, len(queries.index))
    return search.found


class BoxSearch:
    """Find the boxes of one batch row: look at all keys at once, then at each half of them.

    The minimum and the maximum of the intervals of some keys say which rows see a part of the keys
    (1, 3) and which see all of them (2). Part 2 is one FULL box. Only for 1 and 3 the keys are
    halved, and halved again, down to a tile. A causal triangle is one box by itself.

        1   from the smallest start to the largest start
        2   from there to the smallest end
        3   from there to the largest end

    The cuts are where the mask changes: where documents, branches of a tree, blocks or PAD begin. A
    prompt 0-3 with answers 4-5 and 6-7, which see the prompt:

        keys 0-7   no row sees all of them: cut at 4
        keys 0-3   rows 0-3 are a triangle: CAUSAL; rows 4-7 see all: FULL
        keys 4-7   no row sees all of them: cut at 6, then rows 4-5 and rows 6-7: CAUSAL
    """

    def __init__(self, queries, keys, window, tile):
        self.queries = queries
        self.window = window
        self.tile = tile
        self.found = []  # (rows, keys, kind) of each box

        # A key on the diagonal is seen from its own query on, which is here, in row own_row.
        self.own_row = np.searchsorted(queries.index, keys.index)
        has_own = queries.index[self.own_row.clip(max=len(queries.index) - 1)] == keys.index
        is_causal = keys.start == keys.index
        self.on_diagonal = has_own & is_causal & (keys.start < keys.end)
        self.after_own = keys.start + is_causal

        # The mask goes on from key to key if both are seen from their own query on, or both from
        # the same query on, and both up to the same one. Elsewhere it may be cut.
        goes_on = (np.diff(keys.start) == 0) | (is_causal[1:] & is_causal[:-1])
        goes_on &= (np.diff(keys.index) == 1) & (np.diff(keys.end) == 0)
        goes_on &= np.diff(self.on_diagonal) == 0
        may_cut = np.concatenate(([True], ~goes_on))
        if window is not None:
            # The longest triangle that a window leaves whole is as long as the window.
            n = np.arange(len(may_cut))
            since_cut = n - np.maximum.accumulate(np.where(may_cut, n, 0))
            may_cut |= since_cut % window == 0
            keys = keys._replace(end=ends_in_window(queries, keys, window))
        self.cuts = np.flatnonzero(may_cut)
        self.keys = keys

    def visit(self, a, z, low, high):
        """Find the boxes of keys a .. z - 1 within the rows low .. high - 1."""
        # Leave out keys that nobody sees, at both ends. There may be more between them.
        seen = a + np.flatnonzero(self.keys.start[a:z] < self.keys.end[a:z])
        if not len(seen):
            return
        a, z = int(seen[0]), int(seen[-1]) + 1
        length = z - a
        starts = self.keys.start[seen]
        ends = self.keys.end[seen]

        # Parts 1 to 3 lie between these rows. A causal key leaves its own row to the triangle.
        some_start_later = starts.min() < starts.max()
        full = self.after_own[seen].max() if some_start_later else starts.max()
        bounds = starts.min(), full, ends.min(), ends.max()
        rows = np.searchsorted(self.queries.index, bounds).tolist()
        first, full, partial, last = (min(max(row, low), high) for row in rows)
        if first >= last:
            return
        if self.is_triangle(a, z, low, high):
            self.add(self.own_row[a], self.own_row[a] + length, a, z, CAUSAL)
            first = full

        # Part 2 waits for the halves of the keys if it has few rows: boxes are then less narrow. It
        # waits too if a tile of keys in it is not seen. Fewer unseen keys are masked.
        is_tile = length <= self.tile
        is_large = first == full and partial == last or is_tile or 2 * (partial - full) >= length
        is_dense = len(seen) == length or np.diff(seen).max() <= self.tile
        rest = [(first, last)]
        if full < partial and is_large and is_dense and self.is_near(full, partial, a, z):
            self.add(full, partial, a, z, FULL if len(seen) == length else PARTIAL)
            rest = [(first, full), (partial, last)]

        for start, stop in rest:
            if start < stop and is_tile:
                self.add_partial(start, stop, a, z)
            elif start < stop:
                middle = self.middle(a, z)
                self.visit(a, middle, start, stop)
                self.visit(middle, z, start, stop)

    def is_triangle(self, a, z, low, high):
        """Return whether keys a .. z - 1 make a causal triangle with their own rows, all here."""
        top = self.own_row[a]
        length = z - a
        if length == 1 or not low <= top <= high - length:
            return False
        # The rows follow each other without a gap, and none of the keys ends within them.
        return (
            self.on_diagonal[a:z].all()
            and self.own_row[z - 1] == top + length - 1
            and self.keys.end[a:z].min() > self.keys.index[z - 1]
            and self.is_near(top, top + length, a, z)
        )

    def middle(self, a, z):
        """Return the cut nearest to the middle of keys a .. z - 1. Without one, the middle."""
        # Of 3 tiles 2 go to the first half: halves of 1.5 tiles would both be halved again.
        tiles = -(-(z - a) // self.tile)
        middle = a + (z - a) * ((tiles + 1) // 2) // tiles
        n = np.searchsorted(self.cuts, middle)
        near = [cut for cut in self.cuts[max(n - 1, 0) : n + 1].tolist() if a < cut < z]
        return min(near, key=lambda cut: abs(cut - middle), default=middle)

    def is_near(self, start, stop, a, z):
        """Return whether the window lets every one of these rows see every one of these keys."""
        if self.window is None:
            return True
        farthest = self.queries.position[start:stop].max() - self.keys.position[a:z].min()
        return farthest < self.window

    def add(self, start, stop, a, z, kind):
        self.found.append((slice(int(start), int(stop)), slice(a, z), kind))

    def add_partial(self, start, stop, a, z):
        """Add rows of which the mask hides some keys, without those that a window hides whole."""
        if self.window is None:
            self.add(start, stop, a, z, PARTIAL)
            return
        newest = self.keys.position[a:z].max()
        for rows in split_slice(slice(start, stop), self.tile):
            if self.queries.position[rows].min() - newest < self.window:
                self.add(rows.start, rows.stop, a, z, PARTIAL)


def ends_in_window(queries, keys, window):
    """Return the ends of the keys' intervals, earlier where the window alone decides that.

    With positions that count like indices over an interval, a window of 3 lets queries 5, 6 and 7
    see key 5: it ends at 8. In a tree positions are depths, and the intervals stay as they are.
    """
    # Number the runs of real queries over which position - index does not change.
    index = queries.index[queries.rows]
    shift = queries.position[queries.rows] - index
    run = np.cumsum(np.diff(shift, prepend=shift[:1]) != 0)

    # Is a key's whole interval in one run, with the key's own difference?
    first = np.searchsorted(index, keys.start)
    last = np.searchsorted(index, keys.end) - 1
    is_seen = first <= last
    first = first[is_seen]
    counts_alike = run[first] == run[last[is_seen]]
    counts_alike &= shift[first] == (keys.position - keys.index)[is_seen]
    end = keys.end.copy()
    near = np.minimum(end, keys.index + window)
    end[is_seen] = np.where(counts_alike, near[is_seen], end[is_seen])
    return end


def digest(*parts):
    """Return a 63-bit number that is different for different arrays, or values by their repr."""
    state = hashlib.blake2b(digest_size=8)
    for x in parts:
        # A text has an end, so that (1, 23) and (12, 3) differ. The shape says where an array ends.
        is_array = isinstance(x, np.ndarray)
        text = f"{x.dtype} {x.shape}" if is_array else repr(x)
        state.update(text.encode() + b"\0" + (x.tobytes() if is_array else b""))
    return int.from_bytes(state.digest(), "big") >> 1

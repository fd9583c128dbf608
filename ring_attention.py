"""Exact attention over a sequence that is split over ranks, with its proof; on CPU and on CUDA.

Each rank keeps its queries; blocks of keys and values travel round the ring. A partial result with
its log-sum-exp (lse) merges with any other, in any order, so what is summed over blocks is the
softmax over everything. The backward sends the blocks round again, and their gradients with them.

    python ring_attention.py check                     # 4 ranks on this CPU, every error, < 60 s
    python ring_attention.py bench                     # seconds, and percent of the ideal
    python ring_attention.py memory                    # peak memory by sequence length
    python ring_attention.py stress                    # values at the limits, bf16 training, PAD
    python ring_attention.py stress --model            # a VLA model on 2 rings of 2, 50 steps
    python ring_attention.py longest --budget-mb 300   # the longest sequence that fits
    torchrun --nproc-per-node 8 ring_attention.py check          # its ranks; NCCL where CUDA is

check needs this file alone (tests/measure_ring.py beside it adds lower dtypes and the work of each
rank); the other commands need that file, --model also models.py and tests/measure_vla.py.

What it must equal, for each row i of q (query head h uses key head h // N, N = H / G):

    (1)  i sees j  iff  start_j <= i < end_j,  rows_i,  and position_i - position_j < window
    (2)  s_ij      =  scale q_i . k_j     (softcap tanh(s_ij / softcap) with a softcap)
    (3)  lse_i     =  log sum_{j seen} exp(s_ij),   out_i = sum_{j seen} exp(s_ij - lse_i) v_j
    (4)  a row that sees nothing: out 0, lse -inf, gradient 0 whatever arrives from upstream

Why the trick is allowed. For disjoint sets A and B of keys, (3) over both is, from the two parts,

    (5)  lse = log(exp lse_A + exp lse_B),   out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

and with P_ij = exp(s_ij - lse_i), delta_i = dout_i . out_i - dlse_i of the *global* out and lse,

    (6)  dv_j = sum_i P_ij dout_i,          dS_ij = P_ij (dout_i . v_j - delta_i),
         dq_i = scale sum_j dS_ij k_j,      dk_j  = scale sum_i dS_ij q_i

is a sum over tiles: each can be computed anywhere, by torch's own flash kernel.

    B batch   H query heads   G key heads   N = H / G   D head_dim   S whole sequence   E = 2: k, v
    q, k      queries, keys of this rank or call   b, i, j, r   of a tile, r = N i   X   anything
    m, n, p   keys of a block on its way: here, the next, one whose gradient is summed up
    W ranks = c outer x u inner.  Capital: the same on every rank.  Small: this rank's share, a part

    | method    | keys reach queries by          | numbers a rank sends, forward   | it holds      |
    | ring      | W - 1 hops of a block          | 2 B G D S (W-1)/W at most       | 2 blocks      |
    | ulysses   | all-to-all: heads for tokens   | B D (2 H + 2 G') S/W (W-1)/W    | S, 1/W heads  |
    | usp       | that inside, a ring outside    | both, the ring with 1/u heads   | 2 blocks of u |
    | allgather | one all-gather                 | 2 B G D S (W-1)/W               | S             |

The ring's backward sends the blocks again, and their gradients in float32 or better: twice the
forward in float32, three times in bf16. Hops that no rank needs (documents, windows) are not sent.
Layout "zigzag" cuts 2 W chunks and gives rank r chunks r and 2 W - 1 - r: equal work under a causal
mask, where "contiguous" gives the last rank 2 - 1/W of the mean. Masks are two integers a key, and
tell by their bounds which tiles of queries against keys are empty, full, causal or partial.

    S = 8, W = 2, zigzag:   rank 0 holds 0 1 . . . . 6 7     rank 1 holds . . 2 3 4 5 . .

How it deviates. Ring Attention: lse instead of a running maximum and sum. Ulysses: key heads are
repeated to G' = lcm(G, u) where u does not divide them. FlashMask: one interval of rows a key.

Not here: dropout, additive biases, sinks, second derivatives, dv != dk, Sq != Sk across ranks;
torch.compile leaves these calls out of its graphs. On CUDA flash computes full and causal tiles of
bf16 and fp16, head_dim a multiple of 8 up to 256; what is left runs by the formulas in tiles
("math"): exact, slower.

References: Ring Attention arXiv:2310.01889; zigzag: Striped Attention arXiv:2311.09431, Llama 3
arXiv:2407.21783 (3.3.2); Ulysses arXiv:2309.14509; USP arXiv:2405.07719; FlashAttention-2
arXiv:2307.08691; FlashMask arXiv:2410.01359; pi0.7's ring: OpenTau PR 298 and issue 300.
"""

import dataclasses
import functools
import hashlib
import importlib
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

EMPTY, PARTIAL, FULL, CAUSAL = range(4)  # kinds of a tile of queries against a tile of keys
NEVER = 1 << 60  # the start of an interval that holds no row
ALL = slice(None)
METHODS, LAYOUTS = ("ring", "allgather", "ulysses", "usp"), ("zigzag", "contiguous")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# 1. The definition ---------------------------------------------------------------------------


def definition(q_BHqD, k_BGkD, v_BGkD, visible_BHqk, /, *, scale=None, softcap=None):
    """Equations (2) to (4) as they are written, O(S^2) memory: what everything below must equal.

    visible_BHqk: bool, broadcastable. Returns out_BHqD and lse_BHq; differentiable by autograd.
    """
    n = q_BHqD.shape[1] // k_BGkD.shape[1]
    k_BHkD, v_BHkD = k_BGkD.repeat_interleave(n, 1), v_BGkD.repeat_interleave(n, 1)
    scale = q_BHqD.shape[-1] ** -0.5 if scale is None else scale
    s_BHqk = torch.einsum("bhqd,bhkd->bhqk", q_BHqD, k_BHkD) * scale
    if softcap is not None:
        s_BHqk = softcap * torch.tanh(s_BHqk / softcap)
    visible_BHqk = visible_BHqk.expand_as(s_BHqk)
    dead_BHq = ~visible_BHqk.any(-1)
    s_BHqk = s_BHqk.masked_fill(~visible_BHqk, -math.inf).masked_fill(dead_BHq[..., None], 0.0)
    p_BHqk = torch.softmax(s_BHqk, -1).masked_fill(dead_BHq[..., None], 0.0)
    lse_BHq = torch.logsumexp(s_BHqk, -1).masked_fill(dead_BHq, -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", p_BHqk, v_BHkD), lse_BHq


# 2. One mask for everything ------------------------------------------------------------------


# All (B, q): global index, bit of `rows`, position for the window. All (B, k): global index, the
# first row that sees it, the row after the last, position.
Queries = namedtuple("Queries", "index rows position")
Keys = namedtuple("Keys", "index start end position")


class Mask:
    """Which query sees which key, as one interval of rows per key: equation (1), O(S) memory.

    start_BS, end_BS: (B, S) or (S,) integers (torch, numpy, lists); an interval may be empty.
    rows_BS: bool, off where a query sees nothing (PAD). window: keys at position_i - position_j <
    window are seen, itself included; position_BS: the index by default. Batch 1 serves any batch.

        causal          documents 0 0 1 1      blocks 0 0 1 1        tree 0-(1-2, 3)
        j:     0 1 2 3  j:     0 1 2 3         j:     0 1 2 3        j:     0 1 2 3
        start: 0 1 2 3  start: 0 1 2 3         start: 0 0 2 2        start: 0 1 2 3
        end:   4 4 4 4  end:   2 2 4 4         end:   4 4 4 4        end:   4 3 3 4
        row 3: x x x x  row 3: . . x x         row 0: x x . .        row 3: x . . x
    """

    def __init__(self, start_BS, end_BS, *, rows_BS=None, position_BS=None, window=None):
        given = {"start": start_BS, "end": end_BS, "rows": rows_BS, "position": position_BS}
        given = {name: _integers(x, name) for name, x in given.items() if x is not None}
        shape = given["start"].shape
        if {x.shape for x in given.values()} - {shape, (1, shape[1])}:
            shapes = ", ".join(f"{name} {x.shape}" for name, x in given.items())
            raise ValueError(f"the parts of a mask must have one shape (B, S); came {shapes}")
        index_BS = np.broadcast_to(np.arange(shape[1]), shape)
        full = {name: np.broadcast_to(x, shape) for name, x in given.items()}
        position_BS, rows_BS = full.get("position", index_BS), full.get("rows", index_BS >= 0) != 0
        void_BS = full["start"] >= full["end"]
        start_BS = np.where(void_BS, NEVER, full["start"])
        end_BS = np.where(void_BS, 0, full["end"])
        self.queries = Queries(index_BS, rows_BS, position_BS)
        self.keys = Keys(index_BS, start_BS, end_BS, position_BS)
        self.window, self.cache = _checked_window(window), {}

    @classmethod
    def full(cls, length):
        """Everything sees everything."""
        return cls(np.zeros(length, int), np.full(length, length))

    @classmethod
    def causal(cls, length, *, batch=1, window=None):
        """Each token sees itself and what came before it."""
        index_BS = np.tile(np.arange(length), (batch, 1))
        return cls(index_BS, np.full_like(index_BS, length), window=window)

    @classmethod
    def documents(cls, *, doc_ids=None, position_ids=None, window=None):
        """Packed documents, each causal. doc_ids: (B, S), one number per document, -1 for PAD.

        position_ids: (B, S); a document starts where a position is not the one before plus 1; -1
        is PAD. A document that starts at previous + 1 needs doc_ids. If both come, doc_ids decide,
        with a warning, and position_ids only measure the window.
        """
        position_BS = None if position_ids is None else _integers(position_ids, "position_ids")
        if doc_ids is not None:
            doc_BS = _integers(doc_ids, "doc_ids")
            if position_BS is not None:
                warnings.warn("doc_ids and position_ids both came: doc_ids decide", stacklevel=2)
        elif position_BS is None:
            raise ValueError("documents need doc_ids or position_ids of shape (B, S); neither came")
        else:
            jump_BS = np.diff(position_BS, axis=1, prepend=-2) != 1
            doc_BS = np.where(position_BS < 0, -1, np.cumsum(jump_BS, axis=1))
        start_BS, end_BS, rows_BS = np.zeros_like(doc_BS), np.zeros_like(doc_BS), doc_BS >= 0
        for row, (at, first, length) in enumerate(_runs(doc_BS, rows_BS)):
            if len(np.unique(doc_BS[row, first])) < len(first):
                raise ValueError(f"row {row}: a document id comes back after another one")
            start_BS[row, at] = at
            end_BS[row, at] = np.repeat(np.append(first, doc_BS.shape[1])[1:], length)
        return cls(start_BS, end_BS, rows_BS=rows_BS, position_BS=position_BS, window=window)

    @classmethod
    def blocks(cls, block_BS, valid_BS=None):
        """Block-causal, prefix-LM (pi0.7): a token sees its own block and all blocks before it.

        block_BS: (B, S) integers, ascending over valid tokens. valid_BS: off for PAD, anywhere.
        """
        block_BS = _integers(block_BS, "block")
        valid_BS = np.ones_like(block_BS) if valid_BS is None else _integers(valid_BS, "valid")
        start_BS, end_BS = np.zeros_like(block_BS), np.where(valid_BS != 0, block_BS.shape[1], 0)
        for row, (at, first, length) in enumerate(_runs(block_BS, valid_BS != 0)):
            if (np.diff(block_BS[row, at]) < 0).any():
                raise ValueError(f"row {row}: block numbers go down; sort the tokens by block")
            start_BS[row, at] = np.repeat(first, length)
        return cls(start_BS, end_BS, rows_BS=valid_BS)

    @classmethod
    def padding(cls, valid_BS, *, causal=True):
        """PAD tokens (off in valid_BS, anywhere) see nothing and are seen by nothing."""
        valid_BS = _integers(valid_BS, "valid")
        start_BS = np.broadcast_to(np.arange(valid_BS.shape[1]) * causal, valid_BS.shape)
        return cls(start_BS, np.where(valid_BS != 0, valid_BS.shape[1], 0), rows_BS=valid_BS)

    @classmethod
    def tree(cls, subtree_end_S, position_S=None, window=None):
        """A token tree in DFS preorder: a token sees its ancestors and itself.

        subtree_end_S: the index after a token's last descendant. position_S: depth, which a window
        measures; counted from the ends by default.
        """
        end_BS = _integers(subtree_end_S, "subtree_end")
        index_S = np.arange(end_BS.shape[1])
        if (end_BS <= index_S).any() or (end_BS > len(index_S)).any():
            raise ValueError("subtree_end[j] must lie in j + 1 .. S")
        depth_BS = np.stack([_depth(end_S) for end_S in end_BS])
        position_BS = depth_BS if position_S is None else position_S
        start_BS = np.broadcast_to(index_S, end_BS.shape)
        return cls(start_BS, end_BS, position_BS=position_BS, window=window)

    @property
    def shape(self):
        """(batch, heads, queries, keys) of `dense()`; 1 serves any batch and any heads."""
        return self.queries.rows.shape[0], 1, self.queries.rows.shape[1], self.keys.end.shape[1]

    def with_window(self, window):
        """The same mask with another window (None: none), for models whose layers differ."""
        key = ("window", _checked_window(window))
        if key not in self.cache:  # kept, so that the next step finds its regions again
            self.cache[key] = self if window == self.window else self._copy(window=window)
        return self.cache[key]

    def slice(self, queries, keys, batch=ALL, heads=ALL):
        """The part for some queries and keys: slices, or ascending arrays, of local indices.

        i and j keep their meaning, which is global: a shard, a cache, a suffix (Sq != Sk). An
        interval mask is the same for all heads.
        """
        pairs = ((self.queries, _indexer(queries)), (self.keys, _indexer(keys)))
        queries, keys = (x._make(part[batch, at] for part in x) for x, at in pairs)
        return self._copy(queries=queries, keys=keys)

    def _copy(self, **changes):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, cache={}, **changes)
        return other

    def dense(self):
        """bool (B, 1, Sq, Sk): equation (1), the definition of every mask here."""
        i_Bq1, rows_Bq1, position_Bq1 = (x[:, :, None] for x in self.queries)
        _, start_B1k, end_B1k, position_B1k = (x[:, None] for x in self.keys)
        see_Bqk = (start_B1k <= i_Bq1) & (i_Bq1 < end_B1k) & rows_Bq1
        if self.window is not None:
            see_Bqk &= position_Bq1 - position_B1k < self.window
        return torch.from_numpy(see_Bqk)[:, None]

    def digest(self):
        """A 63-bit number that two masks share only if they are the same."""
        if "digest" not in self.cache:
            parts = [y for x in (*self.queries, *self.keys) for y in (x.shape, x.tobytes())]
            self.cache["digest"] = digest(self.window, *parts)
        return self.cache["digest"]

    def classify(self, row_edges, key_edges):
        """Kinds of the tiles that begin at these ascending edges; a causal one is PARTIAL."""

        def bounds(x_BS, edges, axis):
            both = (how.reduceat(x_BS, edges, axis=1) for how in (np.minimum, np.maximum))
            return [np.expand_dims(x, axis) for x in both]

        (index, rows, position), (_, start, end, position_k) = self.queries, self.keys
        first, _ = bounds(np.where(rows, index, NEVER), row_edges, 2)
        _, last = bounds(np.where(rows, index, -1), row_edges, 2)
        every_row, _ = bounds(rows, row_edges, 2)
        start_low, start_high = bounds(start, key_edges, 1)
        end_low, end_high = bounds(end, key_edges, 1)
        empty = (start_low > last) | (end_high <= first)
        full = (start_high <= first) & (end_low > last) & every_row
        if self.window is not None:
            low_q, high_q = bounds(position, row_edges, 2)
            low_k, high_k = bounds(position_k, key_edges, 1)
            empty |= low_q - high_k >= self.window
            full &= high_q - low_k < self.window
        return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL))

    def regions(self, tile, join=32):
        """[(batch, queries, keys, kind)]: disjoint boxes, as slices, with all that is visible.

        Edges stand where the structure changes (a document, block, chunk, fork) and at most `tile`
        apart, so that most boxes are FULL or CAUSAL. join: so many equal neighbours along the keys,
        or of full ones along the queries, may be one box.
        """
        key = ("regions", tile, join)
        if key not in self.cache:
            boxes = [self._boxes(batch, tile, join) for batch in self._alike()]
            self.cache[key] = [box for some in boxes for box in some]
        return self.cache[key]

    def work(self, tile=128):
        """Query-key pairs that the regions compute, over the batch; a causal box counts half."""
        total, batch_size = 0, self.shape[0]
        for batch, i, j, kind in self.regions(tile):
            pairs = (i.stop - i.start) * (j.stop - j.start) * len(range(batch_size)[batch])
            total += pairs / 2 if kind == CAUSAL else pairs
        return total

    def _alike(self):
        """Slices of consecutive batch rows that are equal; a batch of 1 is for every row."""
        if self.shape[0] == 1:
            return [ALL]
        differ = sum((x[1:] != x[:-1]).any(axis=1) for x in (*self.queries, *self.keys))
        edges = [0, *(np.flatnonzero(differ) + 1).tolist(), self.shape[0]]
        return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]

    def _boxes(self, batch, tile, join):
        one = self.slice(ALL, ALL, slice(batch.start or 0, (batch.start or 0) + 1))
        (rows, keys), (n, m) = one._edges(tile), self.shape[2:]
        if not n or not m:
            return []
        kinds, rows, keys = one.classify(rows, keys)[0], [*rows, n], [*keys, m]
        boxes, above = [], {}  # above: the FULL boxes that end with the rows before, by their keys
        for r, kind in enumerate(kinds):
            span, below = slice(rows[r], rows[r + 1]), {}
            for c in np.flatnonzero(kind == PARTIAL):
                if one.slice(span, slice(keys[c], keys[c + 1]))._is_causal():
                    kind[c] = CAUSAL
            new = (np.diff(kind, prepend=-1) != 0) | (kind == CAUSAL)
            starts = np.flatnonzero(new | (np.arange(len(kind)) % join == 0))
            for c, stop in zip(starts, [*starts[1:], len(kind)], strict=True):
                at = keys[c], keys[stop]
                box = above.get(at) if kind[c] == FULL else None
                if box and span.stop - box[0].start <= tile * join:
                    box[0] = slice(box[0].start, span.stop)
                elif kind[c] != EMPTY:
                    box = [span, slice(*at), kind[c]]
                    boxes.append(box)
                if kind[c] == FULL:
                    below[at] = box
            above = below
        return [(batch, *box) for box in boxes]

    def _edges(self, tile):
        """Edges along the queries and along the keys, at the same tokens."""
        start, end = self.keys.start[0], self.keys.end[0]
        index = self.queries.index[0], self.keys.index[0]
        jumps = np.flatnonzero(~np.isin(np.diff(start), (0, 1))) + 1
        alive = np.flatnonzero(start < end)
        forks = alive[1:][np.diff(end[alive]) < 0]  # of a tree: below here not all is seen by all
        places = [start[:1], start[jumps], end, self.keys.index[0][forks]]
        for x in index:  # where a chunk begins, and after the last
            places += [x[np.flatnonzero(np.diff(x, prepend=-9) != 1)], x[-1:] + 1]
        places = np.unique(np.concatenate(places))
        places = _spaced(places[places < NEVER], tile)
        edges = [np.unique(np.append(0, np.searchsorted(x, places))) for x in index]
        return [x[x < len(i)].tolist() for x, i in zip(edges, index, strict=True)]

    def _is_causal(self):
        """Is this a square whose diagonal is the tokens' own: what a causal kernel computes?"""
        (i, rows, far), (j, start, end, near) = self.queries, self.keys
        if i.shape != j.shape or not (i == j).all() or not (start == j).all() or not rows.all():
            return False
        return end.min() > i.max() and (self.window is None or far.max() - near.min() < self.window)


class DenseMask(Mask):
    """A bool tensor (B, 1 or H, Sq, Sk) for what is not an interval: the caller's O(S^2) memory."""

    def __init__(self, dense):
        if not isinstance(dense, torch.Tensor) or dense.ndim != 4 or dense.dtype != torch.bool:
            came = getattr(dense, "dtype", type(dense)), tuple(getattr(dense, "shape", ()))
            raise ValueError(f"a mask is a Mask or a bool tensor (B, 1 or H, Sq, Sk); came {came}")
        self.bits, self.cache = dense.detach().to("cpu", copy=True), {}

    shape = property(lambda self: tuple(self.bits.shape))

    def with_window(self, window):
        if window is not None:
            raise ValueError("a dense mask has no positions: put the window into it, or use a Mask")
        return self

    def slice(self, queries, keys, batch=ALL, heads=ALL):
        bits = self.bits[batch, heads if self.bits.shape[1] > 1 else ALL]
        return DenseMask(bits[:, :, _indexer(queries)][..., _indexer(keys)])

    def dense(self):
        return self.bits

    def digest(self):
        return digest(self.shape, self.bits.numpy().tobytes())

    def classify(self, row_edges, key_edges):
        def tiles(how):
            heads = how.reduce(self.bits.numpy(), axis=1)
            return how.reduceat(how.reduceat(heads, row_edges, axis=1), key_edges, axis=2)

        full, some = tiles(np.logical_and), tiles(np.logical_or)
        return np.where(full, FULL, np.where(some, PARTIAL, EMPTY))

    def _alike(self):
        return [slice(b, b + 1) for b in range(len(self.bits))] if len(self.bits) > 1 else [ALL]

    def _edges(self, tile):
        return [list(range(0, n, tile)) for n in self.shape[2:]]

    def _is_causal(self):
        return False


def _integers(x, name):
    """x as int64 (B, S) of our own; one row may come as (S,)."""
    array = np.array(x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or (array.size and array.dtype.kind not in "iub"):
        came = f"{array.dtype} {array.shape}"
        raise ValueError(f"a mask's {name} must be (B, S) or (S,) integers; came {came}")
    return array.astype(np.int64)


def _indexer(index):
    if isinstance(index, slice) and (index.step or 1) > 0:
        return index
    array = np.asarray(index)
    if (array.size and array.dtype.kind not in "iu") or (np.diff(array) < 1).any():
        raise ValueError("a mask is sliced by slices or arrays of integers, both ascending")
    return array.astype(np.int64)


def _checked_window(window):
    if window is not None and (not isinstance(window, (int, np.integer)) or window < 1):
        raise ValueError(f"a window is None or an integer of at least 1; came {window!r}")
    return window


def _runs(label_BS, valid_BS):
    """Per row: indices of valid tokens, the first of each run of one label, and the run lengths."""
    for label_S, valid_S in zip(label_BS, valid_BS, strict=True):
        at = np.flatnonzero(valid_S)  # PAD may stand anywhere, also inside a run
        new = np.flatnonzero(np.diff(label_S[at], prepend=label_S[at[:1]] - 1)) if len(at) else at
        yield at, at[new], np.diff(np.append(new, len(at)))


def _depth(end_S):
    """Depth of each token of a preorder; ValueError where a subtree ends after its parent's."""
    index_S, slots = np.arange(len(end_S)), len(end_S) + 1
    depth_S = index_S - np.cumsum(np.bincount(end_S, minlength=slots)[:-1])
    by_depth = np.sort(depth_S * slots + index_S)  # a parent: the last token before, one level up
    parent_S = by_depth[np.searchsorted(by_depth, (depth_S - 1) * slots + index_S) - 1] % slots
    wrong = np.flatnonzero((depth_S > 0) & (end_S > end_S[parent_S]))
    if len(wrong):
        raise ValueError(f"subtree_end[{wrong[0]}] lies outside the subtree of its parent")
    return depth_S


def _spaced(places, tile):
    """Edges at these places, at most one in each half tile, and then at most `tile` apart."""
    keep = np.unique(places // max(tile // 2, 1), return_index=True)[1]
    edges, last = [places[:0]], places[-1:]
    for a, b in zip(places[keep], [*places[keep][1:], *last], strict=True):
        n = max(-(-(b - a) // tile), 1)
        edges.append(a + np.arange(n) * (b - a) // n)
    return np.unique(np.concatenate(edges))


def digest(*parts):
    """A 63-bit number of some values: bytes, or anything whose repr says what it is."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part if isinstance(part, bytes) else repr(part).encode() + b"\0")
    return int.from_bytes(state.digest(), "big") >> 1


# 3. One device: tiles, merged ----------------------------------------------------------------

# Side of a tile, and how many equal neighbours may be one call. torch's CPU kernel takes 512 keys
# at a time and saves nothing on a causal square below that, so small squares waste less; a call on
# more than 4096 keys leaves the cache.
TILES = {"cpu": (128, 32), "cuda": (1024, 1024), "math": (512, 1)}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How tiles are computed: backend "fused" or "math", scale, softcap, accurate."""

    backend: str
    scale: float
    softcap: float | None = None
    accurate: bool = False

    def dtype(self, x):
        # NUMERICS: torch's CPU kernel takes 10 times as long in fp16 and rounds each tile's result;
        # float32 tiles do neither. "math" is float32 or float64 always. Pinned by
        # tests/test_attend.py::test_low_precision_stays_within_twice_the_error_of_sdpa.
        half_cpu = x.dtype == torch.float16 and x.device.type == "cpu"
        wide = self.accurate or half_cpu or self.backend == "math"
        return torch.promote_types(x.dtype, torch.float32) if wide else x.dtype


def choose_backend(q, /, *, softcap=None, backend=None, accurate=False):
    """The backend that `attend` takes for queries like q_BHqD: "fused" where torch's kernel can.

    backend: None, or one of the two; "fused" where the kernel cannot is a ValueError that says why.
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
    if backend not in (None, "math", "fused"):
        raise ValueError(f'backend must be None, "math" or "fused"; came {backend!r}')
    if backend == "fused" and why:
        raise ValueError(f'backend="fused" cannot do this: {why}; pass backend=None')
    return backend or ("math" if why else "fused")


def merge(out1, lse1, out2, lse2, /):
    """Equation (5): attention over two disjoint sets of keys, from that over each.

    out: (.., q, D), lse: (.., q); differentiable in all four. Computed in float32 or better; out
    comes back in the common dtype of out1 and out2.
    """
    narrow = torch.promote_types(out1.dtype, out2.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    lse1, lse2 = lse1.to(wide), lse2.to(wide)
    top = torch.maximum(lse1, lse2).detach()
    # NUMERICS: the larger lse is subtracted, 0 where both are -inf: no overflow, no NaN. Pinned by
    # tests/test_attend.py::test_merge_of_dead_rows_has_clean_values_and_gradients.
    top = torch.where(top == -math.inf, 0.0, top)
    weight1, weight2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = weight1 + weight2
    dead = total == 0
    total = torch.where(dead, 1.0, total)
    out = torch.addcmul(out1 * (weight1 / total)[..., None], out2, (weight2 / total)[..., None])
    return out.to(narrow), torch.where(dead, -math.inf, torch.log(total) + top)


def product(weight_bGij, value_bGjD, visible_bGij, clean, /):
    """weight @ value, where a masked weight, 0, keeps even NaN and inf out (0 * NaN is NaN)."""
    if clean or visible_bGij is None:
        return weight_bGij @ value_bGjD
    # NUMERICS: a non-finite value reaches the rows that see it, as NaN, and no other row. Pinned by
    # tests/test_attend.py::test_nan_in_masked_tokens_leaves_visible_rows_clean.
    bad_bGjD = ~torch.isfinite(value_bGjD)
    reached_bGiD = visible_bGij.to(value_bGjD.dtype) @ bad_bGjD.to(value_bGjD.dtype) > 0
    return torch.where(reached_bGiD, math.nan, weight_bGij @ value_bGjD.masked_fill(bad_bGjD, 0.0))


def fold(x_bHiX, g, /):
    """(b, H, i, X) -> (b, G, r, X), r = N i: the query heads of a key head as more rows of it."""
    b, h, i, x = x_bHiX.shape
    return x_bHiX.reshape(b, g, h // g * i, x)


def _scores(q_bHiD, k_bGjD, visible, kernel):
    """Equation (2), folded, -inf where masked; and which are visible, folded (None: all)."""
    s_bGrj = fold(q_bHiD, k_bGjD.shape[1]) @ k_bGjD.transpose(-1, -2) * kernel.scale
    if kernel.softcap is not None:
        s_bGrj = kernel.softcap * torch.tanh(s_bGrj / kernel.softcap)
    if visible is None:
        return s_bGrj, None
    visible_bGrj = fold(visible.expand(*q_bHiD.shape[:3], k_bGjD.shape[2]), k_bGjD.shape[1])
    return s_bGrj.masked_fill(~visible_bGrj, -math.inf), visible_bGrj


def _math_forward(q_bHiD, k_bGjD, v_bGjD, visible, kernel, clean):
    """One tile of (3) and (4) by its formulas."""
    s_bGrj, visible_bGrj = _scores(q_bHiD, k_bGjD, visible, kernel)
    lse_bGr = torch.logsumexp(s_bGrj, -1)
    p_bGrj = torch.exp(s_bGrj - lse_bGr.masked_fill(lse_bGr == -math.inf, 0.0)[..., None])
    out_bGrD = product(p_bGrj, v_bGjD, visible_bGrj, clean)
    return out_bGrD.reshape(q_bHiD.shape), lse_bGr.reshape(q_bHiD.shape[:3])


def _math_backward(
    dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi, dlse_bHi, visible, kernel, clean
):
    """One tile of (6) by its formulas: its parts of dq, dk, dv."""
    s_bGrj, visible_bGrj = _scores(q_bHiD, k_bGjD, visible, kernel)
    delta_bHi = (dout_bHiD * out_bHiD).sum(-1) - dlse_bHi
    rows = (dout_bHiD, q_bHiD, lse_bHi[..., None], delta_bHi[..., None])
    dout_bGrD, q_bGrD, lse_bGr1, delta_bGr1 = (fold(x, k_bGjD.shape[1]) for x in rows)
    p_bGrj = torch.exp(s_bGrj - lse_bGr1)
    ds_bGrj = p_bGrj * (dout_bGrD @ v_bGjD.transpose(-1, -2) - delta_bGr1) * kernel.scale
    if kernel.softcap is not None:  # d tanh = 1 - tanh^2
        ds_bGrj = ds_bGrj * (1 - (s_bGrj / kernel.softcap) ** 2)
    seen_bGjr = None
    if visible_bGrj is not None:  # exp(-inf - NaN) is NaN, and so may dS be where nothing is seen
        p_bGrj, ds_bGrj = (x.where(visible_bGrj, 0.0) for x in (p_bGrj, ds_bGrj))
        seen_bGjr = visible_bGrj.transpose(-1, -2)
    dq_bGrD = product(ds_bGrj, k_bGjD, visible_bGrj, clean)
    dk_bGjD = product(ds_bGrj.transpose(-1, -2), q_bGrD, seen_bGjr, clean)
    dv_bGjD = product(p_bGrj.transpose(-1, -2), dout_bGrD, seen_bGjr, clean)
    return dq_bGrD.reshape(q_bHiD.shape), dk_bGjD, dv_bGjD


def _bias(visible, like):
    """The float mask that torch's CPU kernel takes (it refuses bool), or None."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, -math.inf)


def _fused_forward(q_bHiD, k_bGjD, v_bGjD, visible, causal, scale):
    """One tile of (3) and (4) by torch's kernel; never an empty one, of which it would die."""
    tensors, aten = (q_bHiD, k_bGjD, v_bGjD), torch.ops.aten
    if q_bHiD.device.type == "cuda":
        return aten._scaled_dot_product_flash_attention(*tensors, 0.0, causal, scale=scale)[:2]
    out_bHiD, lse_bHi = aten._scaled_dot_product_flash_attention_for_cpu(
        *tensors, 0.0, causal, attn_mask=_bias(visible, q_bHiD), scale=scale)  # fmt: skip
    if visible is not None:
        # NUMERICS: the kernel says 0 for the lse of a row that sees nothing. Pinned by
        # tests/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
        lse_bHi = lse_bHi.masked_fill(~visible.any(-1), -math.inf)
    return out_bHiD, lse_bHi


def _fused_backward(dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi, visible, causal, scale):
    """One tile of (6) by torch's kernel, which is called with the global out and lse."""
    tensors, aten = (dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi), torch.ops.aten
    if q_bHiD.device.type == "cuda":  # None: no packing; the two seeds are dropout's, unused
        seed = torch.empty(2, dtype=torch.uint64, device=q_bHiD.device)
        lengths = None, None, q_bHiD.shape[2], k_bGjD.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *tensors[:5], lse_bHi.contiguous(), *lengths, 0.0, causal, seed, seed[0], scale=scale
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, causal, attn_mask=_bias(visible, q_bHiD), scale=scale)  # fmt: skip


def _tiles(kernel, mask, q, k, *others):
    """Tensors in the dtype of the tiles; per tile: rows, columns, visible, causal, kernel."""
    if mask is None:
        rows, keys = q.shape[2], k.shape[2]
        mask = Mask.full(max(rows, keys)).slice(slice(rows), slice(keys))
    # With another stride than 1 in the last dimension torch's CPU kernel is silently wrong.
    tensors = [x.to(kernel.dtype(q)) for x in (q, k, *others)]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    # NUMERICS: torch's kernels multiply what is masked by 0. Beside NaN, inf, or numbers of which a
    # product overflows, only the tiles that use `product` are right. Norms below 1e18 exclude all
    # three (Cauchy-Schwarz); a larger one costs time and nothing else. Pinned by
    # tests/test_attend.py::test_huge_finite_numbers_in_a_pad_token_reach_no_row.
    wide = torch.float32 if tensors[0].dtype == torch.float16 else None
    clean = all(bool(torch.linalg.vector_norm(x, dtype=wide) < 1e18) for x in tensors)
    if not clean:
        kernel = dataclasses.replace(kernel, backend="math")
        tensors = [x.to(kernel.dtype(q)) for x in tensors]
    side, join = TILES["math" if kernel.backend == "math" else q.device.type]

    def tiles():
        for batch, queries, keys, kind in mask.regions(side, join):
            causal, visible, tile = kind == CAUSAL and kernel.backend == "fused", None, kernel
            if kind != FULL and not causal:
                one = slice(batch.start or 0, (batch.start or 0) + 1)
                visible = mask.slice(queries, keys, one).dense().to(q.device)
                if q.device.type == "cuda":  # flash takes no mask there
                    tile = dataclasses.replace(kernel, backend="math")
            yield (batch, ALL, queries), (batch, ALL, keys), visible, causal, tile

    return tensors, clean, tiles()


def forward_tiles(q_BHqD, k_BGkD, v_BGkD, mask, kernel, /):
    """(3) and (4), tile by tile: out_BHqD and lse_BHq in float32 or better, outside autograd."""
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)
    out_BHqD = q_BHqD.new_zeros(q_BHqD.shape, dtype=wide)
    lse_BHq = q_BHqD.new_full(q_BHqD.shape[:3], -math.inf, dtype=wide)
    (q, k, v), clean, tiles = _tiles(kernel, mask, q_BHqD, k_BGkD, v_BGkD)
    begun = np.zeros((len(q), q.shape[2]), bool)
    for rows, columns, visible, causal, tile in tiles:
        if tile.backend == "math":
            wider = (x.to(wide) for x in (q[rows], k[columns], v[columns]))
            part = _math_forward(*wider, visible, tile, clean)
        else:
            part = _fused_forward(q[rows], k[columns], v[columns], visible, causal, tile.scale)
        if begun[rows[0], rows[2]].any():
            part = merge(out_BHqD[rows], lse_BHq[rows], *part)  # (5)
        out_BHqD[rows], lse_BHq[rows], begun[rows[0], rows[2]] = *part, True
    return out_BHqD, lse_BHq


def backward_tiles(dout_BHqD, q_BHqD, k_BGkD, v_BGkD, out_BHqD, lse_BHq, dlse_BHq, mask, kernel, /):
    """(6), tile by tile: dq_BHqD, dk_BGkD, dv_BGkD in float32 or better.

    out_BHqD, lse_BHq: of these queries over all keys, wherever those are. dlse_BHq: None for zero.
    """
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)
    # NUMERICS: (4). With an lse of -inf P would be NaN, and with a sentinel for it P = 1; such rows
    # get dout 0, lse 0, delta 0, and a masked score is -inf, so P = 0. Pinned by
    # tests/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
    dead_BHq = lse_BHq == -math.inf
    if dead_BHq.any():
        lse_BHq = lse_BHq.masked_fill(dead_BHq, 0.0)
        dout_BHqD = dout_BHqD.masked_fill(dead_BHq[..., None], 0.0)
    if dlse_BHq is None:
        dlse_BHq = torch.zeros_like(lse_BHq)
    else:  # torch's kernels have no gradient of lse
        kernel = dataclasses.replace(kernel, backend="math")
        dlse_BHq = dlse_BHq.masked_fill(dead_BHq, 0.0)
    tensors, clean, tiles = _tiles(kernel, mask, q_BHqD, k_BGkD, v_BGkD, out_BHqD, dout_BHqD)
    q, k, v, out, dout = tensors
    dq_BHqD, dk_BGkD, dv_BGkD = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for rows, columns, visible, causal, tile in tiles:
        block = dout[rows], q[rows], k[columns], v[columns], out[rows]
        if tile.backend == "math":
            block = [x.to(wide) for x in block]
            part = _math_backward(*block, lse_BHq[rows], dlse_BHq[rows], visible, tile, clean)
        else:
            part = _fused_backward(*block, lse_BHq[rows], visible, causal, tile.scale)
        dq_BHqD[rows] += part[0]
        dk_BGkD[columns] += part[1]
        dv_BGkD[columns] += part[2]
    return dq_BHqD, dk_BGkD, dv_BGkD


class _Attend(torch.autograd.Function):
    """Saves q, k, v, out, lse; the backward makes the scores again."""

    @staticmethod
    def forward(ctx, q, k, v, mask, kernel):
        out, lse = forward_tiles(q, k, v, mask, kernel)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.kernel = mask, kernel
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        _refuse_second_derivative()
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        grads = backward_tiles(dout, q, k, v, out, lse, dlse, ctx.mask, ctx.kernel)
        return (*(grad.to(q.dtype) for grad in grads), None, None)


def not_compiled(function):
    """Keep a function out of torch.compile's graphs; imports the compiler only where it runs."""

    @functools.wraps(function)
    def call(*args, **options):
        run = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return run(*args, **options)

    return call


def _refuse_second_derivative():
    if torch.is_grad_enabled():  # so it is in a backward only under create_graph=True
        raise NotImplementedError("attention has no second derivative here: no create_graph=True")


@not_compiled
def attend(q, k, v, /, mask=None, *, scale=None, softcap=None, backend=None, accurate=False):
    """Attention with its log-sum-exp on one device: equations (1) to (4), differentiable.

    q: (B, H, q, D); k, v: (B, G, k, D), one dtype of float64, float32, bf16, fp16, any strides; H a
    multiple of G, D 1 to 512. mask: Mask or bool (B, 1 or H, q, k); None: full. scale: D^-1/2 by
    default. backend: see `choose_backend`. accurate: tiles of bf16 inputs in float32.

    Returns out (B, H, q, D) in q's dtype and lse (B, H, q) in float32 or float64: natural log, of
    the scaled scores, differentiable too. A row that sees nothing: 0 and -inf. ValueError if the
    input does not fit.
    """
    mask = as_mask(mask)
    _check(q, k, v, mask, q.shape[2:3], k.shape[2:3])
    return _Attend.apply(q, k, v, mask, _kernel(q, scale, softcap, backend, accurate))


def as_mask(mask):
    """A Mask, from a Mask, a dense bool tensor, or None."""
    return mask if mask is None or isinstance(mask, Mask) else DenseMask(mask)


def _kernel(q, scale, softcap, backend, accurate):
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number or None; came {value!r}")
    backend = choose_backend(q, softcap=softcap, backend=backend, accurate=accurate)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Kernel(backend, float(scale), softcap, bool(accurate))


def _check(q, k, v, mask, rows, keys):
    """ValueError unless q, k, v and a mask for (rows, keys) fit together."""
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
    batch, heads, *size = mask.shape
    if size != [*rows, *keys]:
        raise ValueError(
            f"the mask is for {tuple(size)} queries and keys, but there are {(*rows, *keys)}; "
            f"build it for the whole sequence, or take mask.slice(queries, keys)")  # fmt: skip
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[1]):
        raise ValueError(f"the mask has batch {batch} and {heads} heads; came {came}")


# 4. Across ranks: who holds what, and how it travels ------------------------------------------


def indices(length, rank, world, layout="zigzag"):
    """int64 (s,): the global index of each token of a rank's shard, ascending; RoPE needs it.

    zigzag: chunks rank and 2 world - 1 - rank of 2 world; contiguous: chunk rank of world. Chunk c
    of n is c * length // n up to (c + 1) * length // n, so shards may be unequal, or empty.
    """
    if layout not in LAYOUTS:
        raise ValueError(f'layout must be "zigzag" or "contiguous"; came {layout!r}')
    if not 0 <= rank < world or length < 0:
        raise ValueError(f"need 0 <= rank < world, length >= 0; came {rank}, {world}, {length}")
    chunks = [rank] if layout == "contiguous" else [rank, 2 * world - 1 - rank]
    n = world if layout == "contiguous" else 2 * world
    return torch.cat([torch.arange(c * length // n, (c + 1) * length // n) for c in chunks])


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
    """The Ring of a group; None: all ranks, or a world of 1 where torch.distributed is off."""
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ValueError("a group came, but torch.distributed is not initialised")
        return Ring(None, 0, 1)
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        rank = dist.get_rank()
        raise ValueError(f"rank {rank} is not in this group; every rank must pass a group it is in")
    return Ring(group, dist.get_rank(group), dist.get_world_size(group))


class Route:
    """Which tokens each block holds, which ranks need it, and how far it travels.

    The world is c outer x u inner ranks: rank r is inner r % u of outer r // u. After `swap` the u
    ranks of outer b hold block b (the tokens of all of them), each for 1/u of the heads. At hop h
    block s is with outer rank (s + h) % c. All of it follows from the mask, on every rank alike.
    """

    def __init__(self, ring, length, layout, inner, mask):
        self.ring, self.layout, self.inner, self.c = ring, layout, inner, ring.world // inner
        self.b, self.a = divmod(ring.rank, inner)
        self.mask, self.parts, every = mask, {}, range(ring.world)
        shards = [indices(length, rank, ring.world, layout).numpy() for rank in every]
        self.sizes = [len(shard) for shard in shards]
        joined = [np.concatenate(shards[b * inner : (b + 1) * inner]) for b in range(self.c)]
        self.order, self.blocks = np.argsort(joined[self.b]), [np.sort(block) for block in joined]
        need, hops = self._needs(length), np.arange(self.c)
        # there[s, h]: does the rank that has block s at hop h need it? last[s]: the last hop at
        # which one does, 0: only its owner. first[s]: the first behind hop 0, c: none.
        self.there = need[(hops[:, None] + hops) % self.c, hops[:, None]]
        self.last = np.where(self.there, hops, 0).max(axis=1)
        self.first = np.where(self.there & (hops > 0), hops, self.c).min(axis=1)
        self.hops = int(self.last.max()) + 1

    def _needs(self, length):
        """bool (c, c): does outer rank b need block s? By bounds of runs of consecutive tokens."""
        runs = [b[np.flatnonzero(np.diff(b, prepend=-9) != 1)] for b in self.blocks]
        owner = np.concatenate([np.full(len(run), b) for b, run in enumerate(runs)])
        order = np.argsort(np.concatenate(runs))
        edges, owner = np.concatenate(runs)[order], owner[order]
        mask, need = self.mask or Mask.full(length), np.zeros((self.c, self.c), bool)
        rows, keys = np.nonzero(mask.classify(edges, edges).any(axis=0))
        need[owner[rows], owner[keys]] = True
        return need

    def part(self, block=None):
        """The mask of this rank's queries and heads against a block's keys; None: all keys."""
        if self.mask is not None and block not in self.parts:
            heads = self.mask.shape[1] // self.inner
            heads = slice(self.a * heads, (self.a + 1) * heads)
            keys = ALL if block is None else self.blocks[block]
            self.parts[block] = self.mask.slice(self.blocks[self.b], keys, heads=heads)
        return self.parts.get(block)

    def block_at(self, hop):
        return (self.b - hop) % self.c

    def post(self, messages):
        """Start messages (send or receive, tensor, outer rank, tag); empty ones on neither side."""
        ops = []
        for how, tensor, outer, tag in messages:
            peer = self.ring.peer(outer % self.c * self.inner + self.a)
            if tensor.numel():
                ops.append(dist.P2POp(how, tensor, peer, self.ring.group, tag))
        return dist.batch_isend_irecv(ops) if ops else []

    def buffer(self, like_EBGkD, block):
        """Room for a block."""
        e, b, g, _, d = like_EBGkD.shape
        return like_EBGkD.new_empty(e, b, g, len(self.blocks[block]), d)


def swap(x_BhsD, route, /, *, back=False):
    """All-to-all: this rank's tokens of all heads <-> all tokens of its block, 1/u of the heads."""
    u, (b, h, _, d) = route.inner, x_BhsD.shape
    if u == 1:
        return x_BhsD
    first = route.b * u  # of this rank's inner set
    tokens, order = route.sizes[first : first + u], torch.from_numpy(route.order)
    order = (torch.argsort(order) if back else order).to(x_BhsD.device)
    mine, heads = [route.sizes[route.ring.rank]] * u, h if back else h // u
    pieces = x_BhsD[:, :, order].split(tokens, 2) if back else x_BhsD.split(heads, 1)
    out, come = (tokens, mine) if back else (mine, tokens)

    def splits(counts):  # 0 for the ranks of other inner sets
        counts = [count * b * heads * d for count in counts]
        return [0] * first + counts + [0] * (route.ring.world - first - u)

    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    buffer = sent.new_empty(sum(splits(come)))
    # COMM: one all-to-all of the whole group, so that inner sets need no communicators. Pinned by
    # tests/test_ring.py::test_every_layout_and_method_is_the_definition.
    dist.all_to_all_single(buffer, sent, splits(come), splits(out), group=route.ring.group)
    parts = zip(buffer.split(splits(come)[first : first + u]), come, strict=True)
    parts = [part.view(b, heads, count, d) for part, count in parts]
    return torch.cat(parts, 1) if back else torch.cat(parts, 2)[:, :, order]


def _onward(route, kv_EBgmD, hop):
    """Room for the next block (or nothing), and the messages that move blocks one rank on."""
    held, coming, messages = route.block_at(hop), route.block_at(hop + 1), []
    next_EBgnD = kv_EBgmD[:, :, :, :0]
    if route.last[held] > hop:
        messages.append((dist.isend, kv_EBgmD, route.b + 1, 0))
    if route.last[coming] > hop:
        next_EBgnD = route.buffer(kv_EBgmD, coming)
        messages.append((dist.irecv, next_EBgnD, route.b - 1, 0))
    return next_EBgnD, messages


def ring_forward(q_BhqD, k_BgkD, v_BgkD, route, kernel, probe, /):
    """(5) round the ring: out_BhqD and lse_Bhq of this rank's queries over all keys."""
    kv_EBgmD, out_BhqD, lse_Bhq = torch.stack((k_BgkD, v_BgkD)), None, None
    for hop in range(route.hops):
        # COMM: each rank posts both directions, then computes, then waits: the next block travels
        # under the compute of this one, and nobody waits in a circle. Pinned by
        # tests/test_ring.py::test_double_buffering_hides_a_delay_on_the_wire.
        next_EBgnD, messages = _onward(route, kv_EBgmD, hop)
        works, block = route.post(messages), route.block_at(hop)
        if hop == 0 or route.there[block, hop]:
            part = forward_tiles(q_BhqD, *kv_EBgmD, route.part(block), kernel)
            probe.look(hop + 1, "out", part[0])
            out_BhqD, lse_Bhq = part if hop == 0 else merge(out_BhqD, lse_Bhq, *part)
        for work in works:
            work.wait()
        kv_EBgmD = next_EBgnD
    return out_BhqD, lse_Bhq


def ring_backward(dout_BhqD, q_BhqD, k_BgkD, v_BgkD, out, lse, dlse, route, kernel, probe, /):
    """(6) round the ring: dq_BhqD, dk_BgkD, dv_BgkD in float32 or better.

    Blocks travel as in the forward. A block's gradient follows one hop behind, gains each rank's
    part, and goes home to its owner from the last rank that needs the block.
    """
    kv_EBgmD = torch.stack((k_BgkD, v_BgkD))
    dq_BhqD = dkv_EBgkD = part_EBgpD = None
    for hop in range(route.hops + 1):
        block, before = route.block_at(hop), route.block_at(hop - 1)
        next_EBgnD, messages = _onward(route, kv_EBgmD, hop)
        come_EBgpD = home_EBgkD = None
        # COMM: what hop - 1 computed is on the wire while this hop computes. Blocks, gradients, and
        # gradients that go home, in one order on both sides (NCCL), with tags (gloo). Pinned by
        # tests/test_ring.py::test_bytes_on_the_wire_match_the_formula.
        if hop > 1 and route.first[before] < hop <= route.last[before]:
            messages.append((dist.isend, part_EBgpD, route.b + 1, 1))
        if hop > 1 and route.first[block] < hop <= route.last[block]:
            come_EBgpD = route.buffer(dkv_EBgkD, block)
            messages.append((dist.irecv, come_EBgpD, route.b - 1, 1))
        if hop > 1 and route.last[before] == hop - 1:
            messages.append((dist.isend, part_EBgpD, before, 2))
        if hop > 1 and route.last[route.b] == hop - 1:
            home_EBgkD = torch.empty_like(dkv_EBgkD)
            messages.append((dist.irecv, home_EBgkD, route.b + hop - 1, 2))
        works, part_EBgpD = route.post(messages), None
        if hop == 0 or (hop < route.hops and route.there[block, hop]):
            saved = dout_BhqD, q_BhqD, *kv_EBgmD, out, lse, dlse
            part_BhqD, *part = backward_tiles(*saved, route.part(block), kernel)
            part_EBgpD = torch.stack(part)
            probe.look(hop + 1, "dq, dk or dv", part_BhqD, part_EBgpD)
            dq_BhqD = part_BhqD if hop == 0 else dq_BhqD.add_(part_BhqD)
        for work in works:
            work.wait()
        if hop == 0:
            dkv_EBgkD = part_EBgpD
        # NUMERICS: parts are summed in float32 or better, in the order of the hops. Pinned by
        # tests/test_ring.py::test_gradients_travel_in_float32_or_better.
        if come_EBgpD is not None:
            part_EBgpD = come_EBgpD if part_EBgpD is None else part_EBgpD + come_EBgpD
        if home_EBgkD is not None:
            dkv_EBgkD = dkv_EBgkD + home_EBgkD
        kv_EBgmD = next_EBgnD
    return dq_BhqD, *dkv_EBgkD


def _slots(length, world, layout):
    """Each token's slot when the shards are laid one after another, padded; and the padded size."""
    shards = [indices(length, rank, world, layout) for rank in range(world)]
    most, slot_S = max(len(shard) for shard in shards), torch.empty(length, dtype=torch.int64)
    for rank, shard in enumerate(shards):
        slot_S[shard] = rank * most + torch.arange(len(shard))
    return slot_S, most


def gather(x, dim, ring, layout, length, /):
    """All-gather along dim: the whole, its tokens in order, on every rank."""
    held = len(indices(length, ring.rank, ring.world, layout))
    if x.shape[dim] != held:
        raise ValueError(
            f"rank {ring.rank} of {ring.world} holds {held} of {length} tokens in {layout} layout, "
            f"but x has {x.shape[dim]} in dimension {dim}")  # fmt: skip
    if ring.world == 1:
        return x
    x = x.movedim(dim, 0)
    slot_S, most = _slots(length, ring.world, layout)
    padded, whole = x.new_zeros(most, *x.shape[1:]), x.new_empty(ring.world * most, *x.shape[1:])
    padded[: len(x)] = x
    if padded.numel():
        dist.all_gather(list(whole.chunk(ring.world)), padded, group=ring.group)
    return whole[slot_S.to(x.device)].movedim(0, dim)


def scatter_sum(x, dim, ring, layout, /):
    """Reduce-scatter along dim: this rank's tokens of the sum over ranks; `gather`'s adjoint."""
    if ring.world == 1:
        return x
    x = x.movedim(dim, 0)
    slot_S, most = _slots(len(x), ring.world, layout)
    padded, mine = x.new_zeros(ring.world * most, *x.shape[1:]), x.new_empty(most, *x.shape[1:])
    padded[slot_S.to(x.device)] = x
    if mine.numel():
        dist.reduce_scatter(mine, list(padded.chunk(ring.world)), group=ring.group)
    return mine[: len(indices(len(x), ring.rank, ring.world, layout))].movedim(0, dim)


class Probe:
    """Finds the first tensor that is not finite; all ranks learn of it and raise, so none hangs."""

    def __init__(self, debug, ring, phase):
        self.debug, self.ring, self.phase, self.found = debug, ring, phase, None

    def look(self, hop, name, *tensors):
        if self.debug and not self.found and not all(bool(x.isfinite().all()) for x in tensors):
            self.found = (hop, name)

    def settle(self):
        every = enumerate(_objects(self.found, self.ring) if self.debug else [])
        bad = [(*found, self.ring.peer(rank)) for rank, found in every if found]
        if bad:
            hop, name, first = min(bad, key=lambda found: found[0])
            label = "" if self.debug is True else f"{self.debug}, "
            raise FloatingPointError(
                f"{label}ring {self.phase}: {name} is not finite, first on rank {first} at block "
                f"{hop} (0: its input); ranks with any: {[rank for *_, rank in bad]}")  # fmt: skip


def _objects(mine, ring):
    every = [mine] * ring.world
    if ring.world > 1:
        dist.all_gather_object(every, mine, group=ring.group)
    return every


AGREE = ("batch size", "query heads", "key heads", "head_dim", "dtype", "mask", "options", "batch")


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
    problems, held, *every = torch.stack(every, dim=1).tolist()
    if any(problems):
        raise ValueError(_by_rank(_objects(problem, ring), ring))
    for name, values in zip(AGREE, every, strict=True):
        if len(set(values)) > 1:
            raise ValueError(
                f"the ranks of a ring must pass the same {name}, but {_by_rank(values, ring)} "
                f"(large numbers are digests); make it from the same data on every rank, say by "
                f"broadcast_batch")  # fmt: skip
    return held


def _by_rank(values, ring):
    ranks = {value: [] for value in values if value is not None}
    for rank, value in enumerate(values):
        ranks.get(value, []).append(str(ring.peer(rank)))
    return "; ".join(f"rank {', '.join(which)}: {value}" for value, which in ranks.items())


# 5. Entry points -----------------------------------------------------------------------------


class _RingAttention(torch.autograd.Function):
    """Saves q, k, v, out, lse of this rank (its heads of the block, after `swap`); nothing else."""

    @staticmethod
    def forward(ctx, q, k, v, route, kernel, method, debug, return_lse):
        probe = Probe(debug, route.ring, "forward")
        for name, x in (("q", q), ("k", k), ("v", v)):
            probe.look(0, name, x)
        repeat = math.lcm(k.shape[1], route.inner) // k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
        q, k, v = (swap(x, route) for x in (q, k, v))
        if method == "allgather":
            kv = gather(torch.stack((k, v)), 3, route.ring, route.layout, sum(route.sizes))
            out, lse = forward_tiles(q, *kv, route.part(), kernel)
            probe.look(1, "out", out)
        else:
            out, lse = ring_forward(q, k, v, route, kernel, probe)
        probe.settle()
        out = out.to(q.dtype)
        # NUMERICS: lse stays in float32 or better; in bf16 the gradients are 10 to 80 times worse.
        # Pinned by tests/test_ring_faults.py::test_the_suite_catches_eight_planted_faults.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = route, kernel, method, debug, repeat, return_lse
        return swap(out, route, back=True), swap(lse[..., None], route, back=True)[..., 0]

    @staticmethod
    def backward(ctx, dout, dlse):
        _refuse_second_derivative()
        q, k, v, out, lse = ctx.saved_tensors
        route, kernel, method, debug, repeat, return_lse = ctx.options
        probe = Probe(debug, route.ring, "backward")
        probe.look(0, "dout", dout)
        # COMM: autograd gives zeros for an output that this rank's loss leaves out, so all ranks
        # send the same messages, whichever outputs each of them uses. Pinned by
        # tests/test_ring.py::test_ranks_may_use_different_outputs.
        dout = swap(dout, route)
        dlse = swap(dlse[..., None], route)[..., 0] if return_lse else None
        dlse = dlse if return_lse and dlse.any() else None
        if method == "allgather":
            kv = gather(torch.stack((k, v)), 3, route.ring, route.layout, sum(route.sizes))
            dq, *dkv = backward_tiles(dout, q, *kv, out, lse, dlse, route.part(), kernel)
            probe.look(1, "dq, dk or dv", dq, *dkv)
            dk, dv = scatter_sum(torch.stack(dkv), 3, route.ring, route.layout)
        else:
            dq, dk, dv = ring_backward(dout, q, k, v, out, lse, dlse, route, kernel, probe)
        probe.settle()
        dq, dk, dv = (swap(x, route, back=True) for x in (dq.to(q.dtype), dk, dv))
        # NUMERICS: copies of a key head are summed before the cast. Pinned by
        # tests/test_ring.py::test_every_layout_and_method_is_the_definition.
        dk, dv = (x.unflatten(1, (-1, repeat)).sum(2).to(q.dtype) for x in (dk, dv))
        return dq, dk, dv, None, None, None, None, None


@not_compiled
def ring_attention(
    q, k, v, /, *, group=None, mask=None, layout="zigzag", method="ring", scale=None, softcap=None,
    return_lse=False, backend=None, accurate=False, inner=None, batch=None, debug=False,
):  # fmt: skip
    """Attention of a whole sequence whose shards the ranks of `group` hold: (1) to (4), exactly.

    q: (B, H, s, D); k, v: (B, G, s, D): the tokens `indices(S, rank, world, layout)`. group: None
    is all ranks, or a world of 1 where torch.distributed is off. mask: of the whole sequence, Mask
    or bool (B, 1 or H, S, S), the same on every rank; None: full. method: "ring"; "allgather";
    "ulysses" (H a multiple of the world); "usp": `inner` ranks by all-to-all, by default the
    largest proper divisor of the world that divides H (if it is 1: the ring). scale, softcap,
    backend, accurate: as in `attend`. batch: nested tensors and values (the tokens, say) that the
    handshake is to compare too. debug: True, or a label ("step 3 layer 7"): if any tensor, its
    masked part included, is not finite, a FloatingPointError on every rank names rank, block and
    tensor.

    Returns out (B, H, s, D) in q's dtype; with return_lse also lse (B, H, s), float32 or float64.
    Every rank of the group calls it, forward and backward. ValueError on every rank, before a block
    is sent, if the input of any does not fit or they differ.
    """
    ring, problem, tokens, facts = ring_of(group), None, 0, [0] * len(AGREE)
    try:
        mask, length = as_mask(mask), None if mask is None else mask.shape[2]
        whole = q.shape[2:3] if mask is None else (length,)
        _check(q, k, v, mask, whole, whole)
        kernel = _kernel(q, scale, softcap, backend, accurate)
        inner = _inner_degree(method, ring.world, q.shape[1], inner)
        tokens, held = q.shape[2], len(indices(length or 0, ring.rank, ring.world, layout))
        if k.shape[2] != tokens or (mask is not None and tokens != held):
            raise ValueError(
                f"q has {tokens} tokens, k {k.shape[2]}; rank {ring.rank} of {ring.world} holds "
                f"{held} of {length} of the mask in {layout} layout; use shard()")  # fmt: skip
        options = layout, method, inner, kernel, bool(debug), bool(return_lse)
        numbers = q.shape[0], q.shape[1], k.shape[1], q.shape[3], DTYPES.index(q.dtype)
        facts = [*numbers, mask.digest() if mask else 0, digest(options), digest_of(batch)]
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        problem = str(error)
    held = handshake(ring, problem, tokens, facts, getattr(q, "device", "cpu"))
    shards = [len(indices(sum(held), rank, ring.world, layout)) for rank in range(ring.world)]
    if held != shards:
        raise ValueError(
            f"the ranks hold {held} tokens, but the {layout} shards of {sum(held)} are {shards}; "
            f"take them by shard()")  # fmt: skip
    kept, place = {} if mask is None else mask.cache, (ring, sum(held), layout, inner)
    if place not in kept:  # for the next layer and step
        kept[place] = Route(*place, mask)
    out, lse = _RingAttention.apply(q, k, v, kept[place], kernel, method, debug, return_lse)
    return (out, lse) if return_lse else out


def _inner_degree(method, world, heads, inner):
    """Ranks of an all-to-all: 1 for a ring, the world for ulysses, between them for usp."""
    if method not in METHODS:
        raise ValueError(f"method must be ring, allgather, ulysses or usp; came {method!r}")
    if inner is not None and method != "usp":
        raise ValueError(f'inner={inner} is for method="usp"; came method={method!r}')
    if method == "usp" and inner is None:
        inner = max((u for u in range(1, world) if world % u == heads % u == 0), default=1)
    inner = world if method == "ulysses" else inner or 1
    if world % inner or heads % inner:
        raise ValueError(
            f"{method} over {inner} ranks: {inner} must divide the {world} ranks and the {heads} "
            f'query heads; use method="ring", or pad the heads')  # fmt: skip
    return inner


def shard(x, /, *, dim, group=None, layout="zigzag"):
    """This rank's tokens of a whole that every rank has. Its gradient: 0 at the others' tokens.

    So what made x gets, on each rank, the gradient of that rank's tokens: sum it over ranks.
    """
    ring = ring_of(group)
    return x.index_select(dim, indices(x.shape[dim], ring.rank, ring.world, layout).to(x.device))


def unshard(x, /, *, dim, group=None, layout="zigzag", length):
    """The whole, of `length` tokens, on every rank. Its gradient is the reduce-scatter over ranks.

    That is the adjoint of a gather, right whatever ranks do with the whole; if all compute the same
    loss from it, `loss_scale` says the factor. Collective, forward and backward.
    """
    return _Unshard.apply(x, dim % x.ndim, ring_of(group), layout, length)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, ring, layout, length):
        ctx.place = dim, ring, layout
        return gather(x, dim, ring, layout, length)

    @staticmethod
    def backward(ctx, grad):
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return scatter_sum(wide, *ctx.place).to(grad.dtype), None, None, None, None


def unshard_replicated(x, /, *, dim, group=None, layout="zigzag", length):
    """As `unshard`, but its gradient is this rank's slice, with no message.

    Right only where all ranks compute the same loss from the whole and nothing after the gather has
    parameters, or those are averaged and the rest summed: no factor on the loss makes both right
    (the head of OpenTau's model got 2.0 times its gradient on 2 ranks). Prefer `unshard`.
    """
    ring = ring_of(group)
    index = indices(length, ring.rank, ring.world, layout).to(x.device)
    return gather(x.detach(), dim, ring, layout, length).index_copy(dim, index, x)


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
    over all ranks: "mean" (DDP, FSDP) gives the mean over rings, "sum" the sum. Exact before and
    after the gather, because the gradient of `unshard` sums over ranks.
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce must be "mean" or "sum"; came {reduce!r}')
    return (ring_size if reduce == "mean" else 1.0) / (ring_size if replicated else 1.0)


def _mapped(nested, kind, function):
    """Nested containers with function(x) for each x of a kind."""
    if isinstance(nested, kind):
        return function(nested)
    if isinstance(nested, dict):
        return {key: _mapped(value, kind, function) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        items = [_mapped(value, kind, function) for value in nested]
        return type(nested)(*items) if hasattr(nested, "_fields") else type(nested)(items)
    return nested


def digest_of(batch):
    """`digest` of nested dicts, lists, tuples, tensors and plain values."""

    def one(x):
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tuple(x.shape), x.dtype, x.device.type, digest(raw.numpy().tobytes())

    return digest(_mapped(batch, torch.Tensor, one))


_Sent = namedtuple("_Sent", "tensor device")  # on its way: on the CPU, and where it belongs


def broadcast_batch(batch, group=None):
    """The first rank's batch on every rank of a group: nested dicts, lists, tuples, tensors, text.

    For data whose randomness a seed does not cover: the ranks of a ring must hold one batch.
    Tensors keep dtype and kind of device, and lose their graph. All of it is pickled.
    """
    ring = ring_of(group)
    if ring.world == 1:
        return batch
    mine = batch if ring.rank == 0 else None
    box = [_mapped(mine, torch.Tensor, lambda x: _Sent(x.detach().cpu().clone(), x.device.type))]
    dist.broadcast_object_list(box, src=ring.peer(0), group=ring.group)
    return _mapped(box[0], _Sent, lambda sent: sent.tensor.to(sent.device))


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

    mask: of prefix and suffix together, P + T tokens; None: all is seen. options: of `attend`.
    Gradients go back through k_BGPD, v_BGPD into the ring; if every rank computes the same suffix,
    its loss is replicated (`loss_scale`).
    """
    p, both = k_BGPD.shape[2], k_BGPD.shape[2] + q_BHTD.shape[2]
    mask = as_mask(mask)
    if mask is not None:
        if tuple(mask.shape[2:]) != (both, both):
            raise ValueError(f"the mask must be of all {both} tokens; came {mask.shape[2:]}")
        mask = mask.slice(slice(p, None), slice(None))
    k_BGkD, v_BGkD = torch.cat((k_BGPD, k_BGTD), 2), torch.cat((v_BGPD, v_BGTD), 2)
    return attend(q_BHTD, k_BGkD, v_BGkD, mask, **options)[0]


# 6. check: everything above against the definition -------------------------------------------

WAYS = [(method, layout) for method in METHODS for layout in LAYOUTS]


def launch(world, function, *args):
    """function(*args) on so many gloo ranks of one thread: their results. One failure ends all."""
    with tempfile.TemporaryDirectory() as folder:
        method = "fork" if sys.platform == "linux" else "spawn"
        given, files = (folder, world, function, args), [f"{folder}/{r}" for r in range(world)]
        try:
            start_processes(_rank, given, world, start_method=method)
        except ProcessExitedException:  # gloo sometimes aborts after the work is done
            if not all(os.path.exists(file) for file in files):
                raise
        return [torch.load(file, weights_only=False) for file in files]


def _rank(rank, folder, world, function, args):
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
    valid_BS[1, : length // 2] = False
    doc_BS = torch.arange(length) * torch.tensor([[3], [7]]) // max(length, 1)
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
    error, size = (found.double() - truth).norm().item(), truth.norm().item()
    return math.inf if math.isnan(error) else error / (size or 1.0)


def compare(
    mask, group, dtype, tokens, device="cpu", *, heads=(12, 2), width=16, attention=None, **options
):  # fmt: skip
    """Errors of (out, lse, dq, dk, dv) of `ring_attention`, whole; the worst of all ranks, on each.

    Upstream gradients are random, of lse too in float64. The truth: the definition's, in float64,
    of the same rounded inputs. The gradients of shard() and unshard() are on the way. attention: a
    function of q, k, v on one device that is compared instead.
    """
    ring, gen, (h, g) = ring_of(group), torch.Generator().manual_seed(7), heads
    shapes = [(2, n, tokens, width) for n in (h, g, g, h)] + [(2, h, tokens)]
    drawn = [torch.randn(s, generator=gen, dtype=torch.float64).to(device, dtype) for s in shapes]
    visible = (Mask.full(tokens) if mask is None else as_mask(mask)).dense().to(device)
    place = dict(dim=2, group=group, layout=options["layout"])

    def over_ranks(*qkv):
        parts = [shard(x, **place) for x in qkv]
        pair = ring_attention(*parts, group=group, mask=mask, return_lse=True, **options)
        return [unshard(x, **place, length=tokens) for x in pair]

    def run(attention, q, k, v, *upstream):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        outputs, n = attention(*leaves), 2 if dtype == torch.float64 else 1
        grads = torch.autograd.grad(outputs[:n], leaves, upstream[:n])
        return [x.detach().double() for x in (*outputs, *grads)]

    truth = run(lambda *x: definition(*x, visible), *(x.double() for x in drawn))
    mine = [x if ring.rank == 0 else torch.zeros_like(x) for x in drawn[3:]]  # one term, one rank
    found, dead = run(attention or over_ranks, *drawn[:3], *mine), truth[1] == -math.inf
    for grad in found[2:] if ring.world > 1 else ():  # each rank has the part of its tokens
        dist.all_reduce(grad, group=group)
    if not torch.equal(found[1] == -math.inf, dead):
        found[1].fill_(math.nan)
    found[1], truth[1] = found[1].masked_fill(dead, 0.0), truth[1].masked_fill(dead, 0.0)
    errors = [relative(a, b) for a, b in zip(found, truth, strict=True)]
    return np.max(_objects(errors, ring), axis=0).tolist()


def by_way(group, error):
    """{column: error(method=.., layout=..)} of the ways in which a group can share 12 heads."""
    ways = WAYS if 12 % ring_of(group).world == 0 else WAYS[:4]
    return {f"{m[:4]} {layout[:3]}": error(method=m, layout=layout) for m, layout in ways}


@functools.cache
def measure():
    """The module tests/measure_ring.py; None where this file is alone."""
    folder = Path(__file__).resolve().parent / "tests"
    if not (folder / "measure_ring.py").exists():
        return None
    sys.path.append(str(folder))
    return importlib.import_module("measure_ring")


def _check_rank(tokens, device):
    """[(table, row, budget, {column: value})] of this rank's worlds; rank 0 is in all of them."""
    rank, total, rows = dist.get_rank(), dist.get_world_size(), []
    worlds = [world for world in sorted({1, 2, 3, 4, total}) if world <= total]
    groups = {world: dist.new_group(list(range(world))) for world in worlds}
    for world in (world for world in worlds if rank < world):
        for name, mask in examples(tokens, 12).items():
            given = mask, groups[world], torch.float64, tokens, device
            row = by_way(groups[world], lambda **way: max(compare(*given, **way)))
            rows.append((f"float64, world {world}", name, 1e-12, row))
    return rows + (measure().check_rows(groups[total], device) if measure() else [])


def check():
    """Every error beside its budget; 1 if one is over. 4 ranks here, or those of torchrun."""
    if "RANK" in os.environ:
        cuda = torch.cuda.is_available()
        device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
        rows, rank = _check_rank(23, device), dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        if rank:
            return 0
    else:
        rows = launch(4, _check_rank, 23, "cpu")[0]
    if not measure():
        print("SKIP lower dtypes and the work of each rank: there is no tests/measure_ring.py")
    last, bad, exact = None, 0, 0.0
    for table, name, budget, row in rows:
        ok = all(value <= budget for value in row.values())
        bad, exact = bad + (not ok), max([exact, *row.values()] if "float64" in table else [exact])
        if table != last:
            print(f"\n{table:>24}" + "".join(f" {column:>8}" for column in row) + "   budget")
        numbers = "".join(f" {value:8.3g}" for value in row.values())
        print(f"{name:>24}{numbers}   {budget:.3g} {'ok' if ok else 'FAILED'}")
        last = table
    print(json.dumps({"check": "ring_attention", "ok": not bad, "max_error": exact}))
    return int(bad > 0)


# 7. main --------------------------------------------------------------------------------------


def main(argv):
    """check is here; bench, memory, longest, stress are in tests/measure_ring.py. The exit code."""
    if argv == ["check"]:
        return check()
    if argv and argv[0] in ("bench", "memory", "longest", "stress") and measure():
        return measure().main(argv)
    print(__doc__ if measure() else f"{__doc__}\nHere only check: no tests/measure_ring.py.")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

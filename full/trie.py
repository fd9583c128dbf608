"""The tree of tokens as arrays: adds trees of any size to `tree_attention.py`.

`TokenTrie` is `radix_tree` and `pack` in one. `Stretch` is what a run of its tokens sees.

Equations (1) to (5) are in tree_attention.py.

Letters:  N tokens of the tree   R sequences, of L_i tokens   T = L - 1 of the longest   K targets
that point to edges; an edge has its child's index
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from full.masks import ALL, Mask


class TokenTrie:
    """The tree of all prefixes of some sequences, packed in preorder; of a fork's branches the
    largest comes first.

    sequences: 1-D integer tensors (or lists) of 1 token or more, ids >= 0. Not changed.
    labels: for each sequence an integer array (L_i,), 0 to 2^31 - 1. Tokens of sequences are one
        token of the tree if they and all tokens before them have equal ids and equal labels.
        Default: equal ids.

    Sequences that equal others, or are prefixes of others, end inside the tree and add no token.
    All tensors are int64 and on the CPU:

        tokens (N,)        token ids           positions (N,)    depth, which is what RoPE wants
        subtree_end (N,)   the index after a token's last descendant
        parent (N,)        index of the token before, -1 for a first one
        ends (R,)          index of each sequence's last token     lengths (R,)   L_i

        paths              the paths of all sequences, end to end: path i begins at begins[i]
        order              the sequences' numbers, as their paths end in preorder
        shared (R,)        numpy: the first tokens each of them shares with the one before it

    A ValueError names a sequence that is not 1-D integers. The cost is a sort and O(total tokens).
    """

    def __init__(self, sequences, labels=None):
        arrays = _arrays_of_ids(sequences)
        if labels is not None:  # an id and its label as one number, until the tree is made
            arrays = [x + (np.asarray(y, np.int64) << 32) for x, y in zip(arrays, labels)]
        lengths = np.array([len(x) for x in arrays], np.int64)
        begins = lengths.cumsum() - lengths

        # Sort the sequences like words in a dictionary (as bytes, the most significant first). Then
        # a sequence shares with its predecessor all that it shares with any sequence before it. The
        # new tokens of one sequence after another are the tree in preorder:
        #
        #     sorted     5 6 7    5 6 8    5 9
        #     shared       0        2       1
        #     new        5 6 7        8      9       the tree's tokens: 5 6 7 8 9
        words = [x.astype(">i8").tobytes() for x in arrays]
        total = int(lengths.sum())
        tokens, positions, parent, end, paths = np.zeros((5, total), np.int64)

        n = 0  # tokens of the tree so far
        path = before = np.zeros(0, np.int64)
        for i in sorted(range(len(arrays)), key=words.__getitem__):
            x = arrays[i]
            compared = min(len(x), len(before))
            differ = np.flatnonzero(x[:compared] != before[:compared])
            shared = int(differ[0]) if len(differ) else compared

            # The predecessor's tokens past the shared ones have nothing more below them.
            end[path[shared:]] = n

            # Its own tokens past the shared ones are new, and continue the path.
            new = np.arange(n, n + len(x) - shared)
            path = np.concatenate([path[:shared], new])
            tokens[new] = x[shared:]
            positions[new] = np.arange(shared, len(x))
            parent[new] = np.append(-1, path)[positions[new]]
            paths[begins[i] :][: len(x)] = path
            n += len(new)
            before = x
        end[path] = n  # the tokens of the last path end with the tree

        # Move whole branches, so that the largest one of each fork comes first. Then a chunk can go
        # down the largest branch as one path. Old token t moves to place[t].
        place = _largest_branches_first(parent[:n], end[:n])
        old = np.argsort(place)
        size = (end[:n] - np.arange(n))[old]
        self.tokens = _int64(tokens[old] if labels is None else tokens[old] & (2**32 - 1))
        self.positions = _int64(positions[old])
        self.parent = _int64(np.append(place, -1)[parent[old]])
        self.subtree_end = _int64(np.arange(n) + size)
        self.paths = _int64(place[paths])
        self.begins = _int64(begins)
        self.lengths = _int64(lengths)
        self.ends = self.paths[self.begins + self.lengths - 1]

        # In preorder, all tokens after the end of one sequence, up to the end of the next, are on
        # the path of the next, and new. The rest of its path is shared.
        order = np.argsort(self.ends.numpy(), kind="stable")
        self.order = order.tolist()
        self.shared = lengths[order] - np.diff(self.ends.numpy()[order], prepend=-1)

    def __len__(self):
        return len(self.tokens)

    def path(self, i):
        """Return the tokens of sequence i, (L_i,) int64: tokens[path(i)] is the sequence."""
        return self.paths[self.begins[i] :][: self.lengths[i]]

    def mask(self, window=None):
        """Return (1) as a `masks.Mask`; a window counts in depth, not in indices."""
        return self.stretch.mask(window)

    @functools.cached_property
    def stretch(self):
        """Return the whole tree as a `Stretch`, made once for all layers."""
        return Stretch(self, 0, len(self))

    def stats(self, flops_per_token=None, flops_per_pair=None):
        """Return what sharing saves, as `Stats`; the two costs are FLOPs of a model per token and
        per (query, key) pair."""
        # A token of depth d is paired with d ancestors and itself. A sequence of L tokens has
        # 1 + 2 + .. + L pairs.
        lengths = self.lengths.numpy()
        flat_tokens = int(lengths.sum())
        flat_pairs = int((lengths * (lengths + 1) // 2).sum())
        tree_tokens = len(self)
        tree_pairs = int((self.positions + 1).sum())

        # If only tokens cost time, sharing wins the ratio of tokens; else the ratio of all FLOPs.
        token_bound = flat_tokens / tree_tokens if tree_tokens else 1.0
        flop_bound = None
        if flops_per_token is not None and flops_per_pair is not None and tree_tokens:
            flat_flops = flat_tokens * flops_per_token + flat_pairs * flops_per_pair
            tree_flops = tree_tokens * flops_per_token + tree_pairs * flops_per_pair
            flop_bound = flat_flops / tree_flops

        return Stats(flat_tokens, tree_tokens, flat_pairs, tree_pairs, token_bound, flop_bound)


class Stats(NamedTuple):
    """Tokens and (query, key) pairs of the flat batch and of the tree, and their ratios."""

    flat_tokens: int
    tree_tokens: int
    flat_pairs: int
    tree_pairs: int
    token_bound: float  # how many times faster, if tokens were the only cost
    flop_bound: float | None  # the same of FLOPs; None without their costs


def _arrays_of_ids(sequences):
    """Return each sequence as an int64 array of its own, or raise ValueError."""
    arrays = []
    for i, x in enumerate(sequences):
        array = x.detach().cpu().numpy() if torch.is_tensor(x) else np.asarray(x)
        if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
            raise ValueError(f"sequence {i}: expected 1-D integers, 1 token or more, got "
                             f"{array.dtype} {array.shape}; leave empty sequences out")  # fmt: skip
        arrays.append(array.astype(np.int64))

        # Ids beyond 2^63, which only uint64 holds, come out of the cast negative.
        if arrays[-1].min() < 0:
            raise ValueError(f"sequence {i}: expected token ids 0 to 2^63 - 1, got "
                             f"{arrays[-1].min()}")  # fmt: skip
    return arrays


def _largest_branches_first(parent, end):
    """Return the new index of each token of a preorder, once every fork's branches are by size."""
    # A subtree is consecutive indices, so moving a branch shifts all of its tokens by one number.
    # Sort siblings by size. A branch moves to one past its parent, plus the sizes of the siblings
    # that are now before it:
    #
    #     5 9 / 5 6 7 / 5 6 8      index   0 1 2 3 4      token 9 has size 1, token 6 size 3
    #                              token   5 9 6 7 8      offset  0 4 1 1 2
    #                              parent  . 0 0 2 2      place   0 4 1 2 3
    N = len(parent)
    index = np.arange(N)
    size = end - index
    siblings = np.lexsort((index, -size, parent))
    parent_of = parent[siblings]
    size_of = size[siblings]

    # Sizes are summed over all tokens, so take off what the sum was at the first sibling.
    before = size_of.cumsum() - size_of
    is_first = np.diff(parent_of, prepend=-2) != 0
    before -= np.maximum.accumulate(np.where(is_first, before, 0))
    one_past_parent = np.where(parent_of >= 0, 1, 0)
    offset = np.empty(N, np.int64)
    offset[siblings] = before + one_past_parent

    # The place of a token is the sum of the offsets on its path: add each at the token, subtract it
    # where the token's subtree ends, and sum up.
    change = np.append(offset, 0)
    np.subtract.at(change, end, offset)
    return change[:N].cumsum()


def _int64(x):
    return torch.from_numpy(np.asarray(x, np.int64))


class Stretch:
    """Tokens start .. stop - 1 of a tree in preorder, and the p tokens on the path above the first.

    All ancestors of its tokens are among both: a subtree is a stretch of the preorder, so one that
    begins before `start` and contains a token of the stretch contains the first token too. So path
    and stretch are a tree themselves, of p + n tokens in preorder.
    """

    def __init__(self, trie, start, stop):
        # Any sequence through the first token has the path above it: for example the first one, in
        # preorder, that ends at the token or after it.
        self.above = np.zeros(0, np.int64)
        if start:
            ends = trie.ends.numpy()[trie.order]
            i = trie.order[int(np.searchsorted(ends, start))]
            self.above = trie.path(i).numpy()[: int(trie.positions[start])]
        p = len(self.above)

        # Indices of the small tree: 0 .. p - 1 is the path, p .. p + n - 1 the stretch.
        both = np.concatenate([self.above, np.arange(start, stop)])
        self.end = trie.subtree_end.numpy()[both].clip(max=stop) - start + p
        self.depth = trie.positions.numpy()[both]
        self.groups = {}  # of `groups_of_tokens`, made once for all layers of a kind

    def mask(self, window=None):
        """Return which of the p + n keys each of the n queries sees, as a `Mask`."""
        return self.mask_without_window.with_window(window)

    @functools.cached_property
    def mask_without_window(self):
        """Return (1), made once: a mask keeps its boxes, so that all layers share one search."""
        # In preorder the descendants of token j are the indices j + 1 .. end_j - 1. So the queries
        # that see key j are an interval, and the mask is two integers per token. `Mask.tree` would
        # ask whether the ends form a tree, which they do.
        p = len(self.above)
        index = np.arange(len(self.end))
        whole = Mask(index, self.end, position_BS=self.depth)  # (1)
        return whole.slice(slice(p, None), ALL) if p else whole

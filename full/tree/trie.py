"""Pack sequences into arrays, as a tree of their prefixes or end to end, and share them out.

`TokenTrie` is `radix_tree` and `pack` of tree_attention.py in one. For 64 sequences of 640 tokens
it takes a fifth of their time. Equations (1) to (5) are in tree_attention.py. In addition:

    (6)  log softmax(W h / temperature) in (2), entropies of the same distribution, and the values
         of a critic; f_i may depend on all of them

In one call of the model (packing.py) attention has sum_t (depth_t + 1) pairs, where the flat
batch has sum_i L_i (L_i + 1) / 2.

Letters:  N tokens of the tree   R sequences, of L_i tokens   e edges to score; an edge has its
child's index   K targets that point to edges   n tokens of a chunk   M width

References: Tree Training arXiv:2511.00413; Prefix Grouper arXiv:2506.05433, which shares one
prefix.
"""

import bisect
import itertools
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from full.attention.masks import ALL, Mask
from full.ranks.joining import on_all_ranks


class FlatTokens:
    """Sequences end to end: a forest that shares no token, under the names of `TokenTrie`."""

    def __init__(self, sequences):
        self.lengths = torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int64)
        self.begins = self.lengths.cumsum(0) - self.lengths
        self.documents = torch.arange(len(sequences)).repeat_interleave(self.lengths)
        self.paths = torch.arange(len(self.documents))
        self.positions = self.paths - self.begins[self.documents]
        self.parent = torch.where(self.positions > 0, self.paths - 1, -1)
        arrays = [np.zeros(0, np.int64), *map(np.asarray, sequences)]
        self.tokens = torch.from_numpy(np.concatenate(arrays))
        self.order = [*range(len(sequences))]
        self.shared = np.zeros(len(sequences), np.int64)

    def __len__(self):
        return len(self.tokens)

    def document_ids(self, length):
        """Return the sequence of each token, (1, length) int64, and -1 for the padding."""
        return F.pad(self.documents, (0, length - len(self)), value=-1)[None]

    def row_mask(self, length):
        """Return (1) as a `Mask` for a row of `length` places, whose padding sees nothing."""
        return Mask.documents(doc_ids=self.document_ids(length))


class TokenTrie:
    """The tree of all prefixes of some sequences, in preorder, a fork's largest branch first.

    sequences: 1-D integer tensors (or lists) of 1 token or more. Not changed.

    Sequences that equal others, or are prefixes of others, end inside the tree and add no token.
    All tensors are int64 and on the CPU:

        tokens (N,)        token ids           positions (N,)    depth, the position for RoPE
        subtree_end (N,)   the index after a token's last descendant
        parent (N,)        index of the token before, -1 for a first one
        ends (R,)          index of each sequence's last token     lengths (R,)   L_i

        paths              the paths of all sequences, end to end: path i begins at begins[i]
        order              the sequences' numbers, as their paths end in preorder
        shared (R,)        numpy: the first tokens each of them shares with the one before it

    A ValueError names a sequence that is not 1-D integers. The cost is a sort and O(total tokens).
    """

    def __init__(self, sequences):
        arrays = arrays_of_ids(sequences)
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
        tokens, positions, parent, end, paths = np.zeros((5, int(lengths.sum())), np.int64)

        n = 0  # tokens of the tree so far
        path = before = np.zeros(0, np.int64)
        for i in sorted(range(len(arrays)), key=words.__getitem__):
            x = arrays[i]
            compared = min(len(x), len(before))
            differ = np.flatnonzero(x[:compared] != before[:compared])
            shared = int(differ[0]) if len(differ) else compared

            # The predecessor's tokens past the shared ones get no more descendants. The tokens of
            # this sequence past the shared ones are new, and continue the path.
            end[path[shared:]] = n
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
        place = largest_branches_first(parent[:n], end[:n])
        old = np.argsort(place)
        self.tokens = torch.from_numpy(tokens[old])
        self.positions = torch.from_numpy(positions[old])
        self.parent = torch.from_numpy(np.append(place, -1)[parent[old]])
        self.subtree_end = torch.from_numpy(np.arange(n) + (end[:n] - np.arange(n))[old])
        self.paths = torch.from_numpy(place[paths])
        self.begins = torch.from_numpy(begins)
        self.lengths = torch.from_numpy(lengths)
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

    def row_mask(self, length):
        """Return (1) as a `Mask` for a row of `length` places. Padding sees itself alone."""
        return self.mask(0, len(self), length - len(self))

    def mask(self, start, stop, padding=0):
        """Return (1) for the queries start .. stop - 1 of the preorder, and for padding after them.

        The keys are the path above the first query, and the queries. A window counts in depth.
        """
        # All ancestors of the queries are among the keys: a subtree that begins before `start` and
        # holds a query holds the first query too. So the keys are a tree themselves, in preorder,
        # and the descendants of key j are the indices j + 1 .. end_j - 1. Each token of the padding
        # is a tree by itself.
        above = np.flatnonzero(self.subtree_end.numpy()[:start] > start)
        keys = np.concatenate([above, np.arange(start, stop)])
        end = self.subtree_end.numpy()[keys].clip(max=stop) - start + len(above)
        end = np.append(end, len(keys) + 1 + np.arange(padding))
        return Mask.tree(end).slice(slice(len(above), None), ALL)


def arrays_of_ids(sequences):
    """Return each sequence as an int64 array of its own, or raise ValueError."""
    arrays = []
    for i, x in enumerate(sequences):
        array = x.detach().cpu().numpy() if torch.is_tensor(x) else np.asarray(x)
        if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
            raise ValueError(f"sequence {i}: expected 1-D integers, 1 token or more, got "
                             f"{array.dtype} {array.shape}; leave empty sequences out")  # fmt: skip
        arrays.append(array.astype(np.int64))
    return arrays


def largest_branches_first(parent, end):
    """Return the new index of each token of a preorder, once every fork's branches are by size."""
    # A subtree is consecutive indices, so moving a branch shifts all of its tokens by one number.
    # Sort siblings by size. A branch moves to one past its parent, plus the sizes of the siblings
    # that are now before it:
    #
    #     5 9 / 5 6 7 / 5 6 8      index   0 1 2 3 4      token 9 has size 1, token 6 size 3
    #                              token   5 9 6 7 8      offset  0 4 1 1 2
    #                              parent  . 0 0 2 2      place   0 4 1 2 3
    index = np.arange(len(parent))
    size = end - index
    siblings = np.lexsort((index, -size, parent))
    parent_of = parent[siblings]
    size_of = size[siblings]

    # Sizes are summed over all tokens, so subtract the sum at the first sibling.
    before = size_of.cumsum() - size_of
    is_first = np.diff(parent_of, prepend=-2) != 0
    before -= np.maximum.accumulate(np.where(is_first, before, 0))
    offset = np.empty(len(parent), np.int64)
    offset[siblings] = before + (parent_of >= 0)

    # The place of a token is the sum of the offsets on its path: add each at the token, subtract it
    # where the token's subtree ends, and sum up.
    change = np.append(offset, 0)
    np.subtract.at(change, end, offset)
    return change[:-1].cumsum()


# Chunks -----------------------------------------------------------------------------------------


class TreeChunk(NamedTuple):
    """Tokens start .. stop - 1 of the preorder: one call of the model. Six tokens, max_tokens = 4:

        index   0   1   2   3
        token   5 - 6 - 7 - 8      chunk 0: tokens 0-3, parent -1
        token        `- 9 - 3      chunk 1: tokens 4-5, parent 0
        index           4   5
    """

    start: int
    stop: int
    parent: int  # index of the chunk that contains the parent of token `start`, -1 for none

    def run_of(self, tokens):
        """Return the slice of ascending token indices, a tensor, that are in this chunk."""
        return slice(*torch.searchsorted(tokens, torch.tensor([self.start, self.stop])).tolist())


def partition_tree(trie, max_tokens=None, *, join_only_children=False) -> list[TreeChunk]:
    """Cut a tree into chunks of at most max_tokens tokens, in preorder. None: one chunk.

    join_only_children: a chunk that is the only child of another joins it, however long they are.
        For a walk that holds the graphs of both anyway.

    Raises ValueError unless max_tokens is a positive integer or None.
    """
    if max_tokens is not None and not (hasattr(max_tokens, "__index__") and max_tokens > 0):
        raise ValueError(f"expected max_tokens of 1 or more, or None, got {max_tokens}")
    N = len(trie)
    end = trie.subtree_end.numpy()
    parent = trie.parent.numpy()
    child_count = np.bincount(parent[parent >= 0], minlength=N)
    segment_ends = np.append(np.flatnonzero(child_count != 1) + 1, N)

    starts = []
    start = 0
    while start < N:
        starts.append(start)
        limit = start + (max_tokens or N)
        stop = start
        subtree_stop = N  # the chunk may take whole subtrees up to here

        # A subtree that does not fit begins with a part of its path: along the largest branch of
        # each fork, which comes first, while there is room for the other branches. At the first
        # fork where there is not, the path ends.
        while stop < min(N, limit) and end[stop] > limit:
            segment_end = segment_ends[np.searchsorted(segment_ends, stop, side="right")]
            stop = min(int(segment_end), limit)
            subtree_stop = int(end[stop - 1])
            if stop == limit or subtree_stop - int(end[stop]) >= limit - stop:
                break

        # Then whole subtrees: below the path, or, without one, the next ones in preorder.
        while stop < min(subtree_stop, limit) and end[stop] <= limit:
            stop = int(end[stop])
        start = stop

    # The chunk of a token is the last one that starts at it or before it; -1 stays -1. An only
    # child comes right after its parent, so to join them is to forget where it starts.
    parents = np.searchsorted(starts, parent[starts], side="right") - 1
    if join_only_children:
        is_joined = (parents >= 0) & (np.bincount(parents + 1)[parents + 1] == 1)
        starts = np.array(starts, np.int64)[~is_joined].tolist()
        parents = np.searchsorted(starts, parent[starts], side="right") - 1
    stops = [*starts, N][1:]
    return [TreeChunk(*x) for x in zip(starts, stops, parents.tolist(), strict=True)]


# Scores of edges --------------------------------------------------------------------------------
# They decide at which tokens the head runs, and where sequences find their scores.


def wanted_edges(trie, masks=None):
    """Return the edges to score (e,), ascending, and which of them each wanted target is (K,).

    masks: a bool (L_i - 1,) for each sequence, of its targets tokens[1:]. Default: all are wanted.
        Targets come sequence after sequence. Several targets may be one token of the tree, which is
        scored once.

    Raises ValueError unless each sequence has a mask, of its shape.
    """
    # Targets are all tokens of a path but the first: 6 7, 6 8 and 9 in 5 6 7 / 5 6 8 / 5 9.
    targets = np.delete(trie.paths.numpy(), trie.begins.numpy())
    if masks is not None:
        if len(masks) != len(trie.lengths):
            raise ValueError(f"got {len(masks)} masks for {len(trie.lengths)} sequences")
        masks = [np.asarray(x.cpu() if torch.is_tensor(x) else x, bool) for x in masks]
        for i, (mask, length) in enumerate(zip(masks, trie.lengths.tolist(), strict=True)):
            if mask.shape != (length - 1,):
                raise ValueError(f"mask {i}: expected shape {(length - 1,)}, got {mask.shape}")
        targets = targets[np.concatenate([np.zeros(0, bool), *masks])]
    is_wanted_N = np.zeros(len(trie), bool)
    is_wanted_N[targets] = True
    return np.flatnonzero(is_wanted_N), (is_wanted_N.cumsum() - 1)[targets]


def scores_of(model, hidden_nM, targets_n, temperature) -> tuple:
    """Return scores of some targets, (n,) each, in this order, given the states before them.

    Log-probs and entropies; of a critic, values.
    """
    if model.logprobs is None:
        return (model.values(hidden_nM),)
    return tuple(model.logprobs(hidden_nM, targets_n, temperature=temperature))  # (2), (6)


# Shares of ranks and micro-batches ---------------------------------------------------------------

def pack(lengths, most, shared=None) -> list:
    """Cut sequences into runs of at most `most` tokens, in order: lists of indices.

    A longer sequence is alone in one. shared: how many tokens each has in common with the one
    before it, where those are run once (a tree of prefixes).
    """
    # Lengths 9, 10 and 11 with a limit of 12, where all begin with the same 8:
    #
    #     shared None         [0] [1] [2]
    #     shared [0, 8, 8]    [0, 1] [2]     9 + 2 new ones are 11; 3 more would be 14
    packed = []
    room = 0  # tokens that the last run can still take
    for i, length in enumerate(lengths):
        count = length if shared is None else length - shared[i]
        # In a new run nothing is shared with the sequence before: it counts whole.
        if not packed or count > room:
            packed.append([])
            room = most
            count = length
        packed[-1].append(i)
        room -= count
    return packed


def pack_evenly(lengths, count, low, high, shared=None) -> list:
    """Return `pack` by the least limit from low to high that makes at most `count` runs."""
    def is_enough(limit):
        return len(pack(lengths, limit, shared)) <= count

    limit = bisect.bisect_left(range(high), True, low, high, key=is_enough)
    return pack(lengths, limit, shared)


TOKEN = 6 * 1024  # a token's time over a pair's: 24 M^2 / 4 M FLOPs for a width M of 1024


def time_of_path(lengths):
    """Return the modeled time of paths of some lengths, integers in units of one pair."""
    return lengths * TOKEN + lengths * (lengths + 1) // 2


def partition(sequences, world) -> list[list[int]]:
    """Return which sequences each of `world` ranks trains on: indices, the same on every rank.

    They are runs of the sorted sequences, so that shared prefixes stay together, cut where the
    largest modeled time of a rank is least. More ranks than sequences: some lists are empty.
    """
    # The time of a sorted sequence: its whole path if a rank begins with it, else only the tokens
    # that it does not share with the one before.
    trie = TokenTrie(sequences)
    whole = time_of_path(trie.lengths.numpy()[trie.order]).tolist()
    shared = time_of_path(trie.shared).tolist()
    runs = pack_evenly(whole, world, max(whole, default=0), sum(whole), shared)
    runs += [[]] * (world - len(runs))
    return [[trie.order[k] for k in run] for run in runs]


def redistribute(sequences, data, *, group=None):
    """Distribute all ranks' sequences by `partition`; return this rank's (sequences, data).

    sequences: this rank's own. data: anything that pickles, one for each (a tuple of advantages, a
        mask, an id to find it again). Either may be [].

    Every rank of the group calls it, once. Raises ValueError on every rank if the lists of any rank
    do not fit.
    """
    def local_sequences():
        arrays = arrays_of_ids(sequences)
        if len(arrays) != len(data):
            raise ValueError(f"{len(arrays)} sequences, but data for {len(data)}; one for each")
        return arrays, list(data)

    # COMM: every rank sends two messages, its error or None, then its sequences. Pinned
    # by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
    is_alone = not dist.is_initialized()
    parts = on_all_ranks(local_sequences, group, alone=is_alone)
    arrays, items = (list(itertools.chain(*x)) for x in zip(*parts, strict=True))

    # Every rank has the same list now, so every rank finds the same partition.
    rank = 0 if is_alone else dist.get_rank(group)
    share = partition(arrays, len(parts))[rank]
    return [torch.from_numpy(arrays[i]) for i in share], [items[i] for i in share]

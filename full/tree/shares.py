"""Cut sequences into runs, and share them out to ranks: sequences with one prefix stay together.

Micro-batches are such runs, and so are the shares of data-parallel ranks.
"""

import bisect
import itertools

import torch
import torch.distributed as dist

from full.ranks.joining import on_all_ranks
from full.tree.trie import TokenTrie, arrays_of_ids


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

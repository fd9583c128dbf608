"""Run recurrent layers on packed rows, trees and ranks: each token continues its parent's state.

Attention asks which tokens a token sees. A gated DeltaNet (deltanet.py) asks for less: the last
inputs of its convolution, and the state before the token. Both are found at its parent, the token
before it. So a forest, which has each token's parent, describes documents as well as trees:

    two documents 5 6 | 7 8      token    5  6  7  8      the tree 5 6 7 / 5 8    5  6  7  8
                                 parent   -  0  -  2                              -  0  1  0

A row is computed in segments of tokens start .. stop - 1: all of them, a chunk of a tree, or one of
the two chunks that a rank of c has. A segment needs a few inputs of earlier segments, and the
states after some of their tokens. A chunk of a tree reads both from leaves of a graph (chunks.py).

Ranks run their segments at the same time, before the states of earlier segments are known. But a
state is affine in the state S_0 before its segment. With K = V = 1, and in each token k = 1,
a = b = 1/2 and v = 4, by (3) of deltanet.py:

    after one token     S = a (1 - b) S_0 + b v = S_0 / 4 + 2
    after two tokens    S = (S_0 / 4 + 2) / 4 + 2 = S_0 / 16 + 5/2      so S_0 = 8 gives S = 3

So by (6) of deltanet.py one run, with K more columns than V, gives A and B of S = A S_0 + B, and R
and o0 of the outputs o_i = R_i S_0 + o0_i. The ranks gather all maps [B A], K (K + V) numbers for
each head, and follow the states from segment to segment. A zigzag has two segments a rank. It runs
as many tokens as the contiguous shares of flash-linear-attention and Megatron-LM, and gathers twice
as many states.

Not here: a kernel for all runs of a tree at once; each is a call of `by_chunk`.

Letters:  N tokens of a row   n tokens of a segment   s of a rank   m tokens that others read
X channels of the convolution   k its kernel   H heads   K width of a key   V of a value   v = V + K
W ranks   c segments of all ranks
"""

import itertools
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from full.attention.attend import Attention, attend, not_compiled
from full.attention.ring import ring_attention
from full.model.deltanet import by_chunk
from parallel import Communicate, all_gather, reduce_scatter


class Run(NamedTuple):
    """Tokens first .. stop - 1 of a segment, without a fork inside."""

    first: int
    stop: int
    ancestor: int  # the nearest ancestor of `first` in an earlier segment, or -1 for none


class Forest:
    """The order of a row's tokens, and what recurrent layers call of an attention over the row.

    parent_N: for each token the index of the token before it, which is smaller, or -1 for none.
    """

    def __init__(self, parent_N):
        self.parent_N = np.asarray(parent_N)
        index_N = np.arange(len(self.parent_N))
        is_jump_N = (self.parent_N >= 0) & (self.parent_N != index_N - 1)
        self.jumps = index_N[is_jump_N]  # tokens that do not follow the token next to them
        self.last_child_N = latest(index_N, self.parent_N)
        self.tokens_of_kernel = {}  # kernel -> `last_tokens`, which all layers share

    def last_tokens(self, kernel):
        """Return each token's last tokens and last reader.

        The last `kernel` tokens, (N, k): the token itself is the last, and -1 is none. The last
        reader of a token, (N,): the last token that has it among its last tokens.
        """
        # 5 6 7 / 5 8 and a kernel of 3: . . 5, . 5 6, 5 6 7, . 5 8.
        if kernel not in self.tokens_of_kernel:
            columns = [np.arange(len(self.parent_N))]
            for _ in range(kernel - 1):
                columns.append(np.append(self.parent_N, -1)[columns[-1]])
            readers = [latest(columns[0], column_N) for column_N in columns]
            self.tokens_of_kernel[kernel] = np.stack(columns[::-1], 1), np.max(readers, 0)
        return self.tokens_of_kernel[kernel]

    def inputs_read_later(self, start, stop, kernel):
        """Return the tokens of a segment whose inputs later segments read, ascending."""
        _, last_reader_N = self.last_tokens(kernel)
        return start + np.flatnonzero(last_reader_N[start:stop] >= stop)

    def states_read_later(self, start, stop):
        """Return the tokens of a segment whose states later segments read, ascending."""
        return start + np.flatnonzero(self.last_child_N[start:stop] >= stop)

    def inputs_at(self, x_1nX, tokens_n, others, kernel):
        """Return the last `kernel` inputs of each token of some segments, (1, n, X, k).

        x_1nX: the inputs of these tokens.
        others: (tokens (m,), their inputs (1, m, X)) pairs, of other segments.
        """
        # All inputs, and a zero, which is the input of token -1.
        parts = [(tokens_n, x_1nX), *others, ([-1], torch.zeros_like(x_1nX[:, :1]))]
        tokens, inputs = zip(*parts, strict=True)
        count = sum(map(len, tokens))
        # A token without an input here gets a place out of range, which raises.
        place_N = np.full(len(self.parent_N) + 1, count)
        place_N[np.concatenate(tokens)] = np.arange(count)
        place_nk = torch.from_numpy(place_N[self.last_tokens(kernel)[0][tokens_n]])
        return torch.cat(inputs, 1)[:, place_nk.to(x_1nX.device)].mT

    def runs(self, start, stop):
        """Yield each `Run` of a segment."""
        # A run ends after a parent of a jump, and begins at a jump: [5] [6 7] [8] of 5 6 7 / 5 8.
        cuts = np.concatenate([[start, stop], self.jumps, self.parent_N[self.jumps] + 1])
        cuts = np.unique(cuts[(start <= cuts) & (cuts <= stop)]).tolist()
        ancestors = {}  # last token of a run -> the run's ancestor
        for first, after in itertools.pairwise(cuts):
            parent = int(self.parent_N[first])
            ancestors[after - 1] = parent if parent < start else ancestors[parent]
            yield Run(first, after, ancestors[after - 1])

    def run_segment(self, qkvab, start, stop, states):
        """Return the outputs (1, H, n, V) of a segment. `states` gets the states after its runs.

        qkvab: q, k, v, log_a and b of its tokens.
        states: {token: the state after it}, with the states of the runs' ancestors.
        """
        restart_1n = torch.from_numpy(self.parent_N[start:stop] < 0)[None].to(qkvab[0].device)
        out = []
        for first, after, _ in self.runs(start, stop):
            local = slice(first - start, after - start)
            parent = int(self.parent_N[first])
            state = None if parent < 0 else states[parent]
            part, states[after - 1] = by_chunk(
                *(x[:, :, local] for x in qkvab), state, restart_1n[:, local])
            out.append(part)
        return torch.cat(out, 2)

    @not_compiled
    def windows(self, x_1NX, /, *, kernel, layer):
        """Return the last `kernel` inputs of each token, its own the last: (1, N, X, k)."""
        return self.inputs_at(x_1NX, np.arange(len(self.parent_N)), [], kernel)

    @not_compiled
    def recurrence(self, *qkvab, layer):
        """Return the outputs (1, H, N, V) of q, k, v, log_a and b."""
        return self.run_segment(qkvab, 0, len(self.parent_N), {})


def latest(index_N, read_N):
    """Return the last token n' with read_N[n'] = n for each token n, (N,), or -1."""
    out = np.full(len(index_N) + 1, -1)
    out[read_N] = index_N  # of equal places numpy keeps the last; -1 is one past the end
    return out[:-1]


class SharedForest(Forest):
    """A `Forest` over W ranks: each has two of 2 W segments of equal length, as a zigzag."""

    def __init__(self, parent_N, group):
        super().__init__(parent_N)
        self.group = group
        W = group.size()
        if len(self.parent_N) % (2 * W):
            raise ValueError(f"expected a row divisible by 2 c = {2 * W}, got {len(parent_N)}")
        edges = range(0, len(self.parent_N) + 1, len(self.parent_N) // (2 * W))
        self.segments = [*itertools.pairwise(edges)]
        self.own = [self.segments[c] for c in (group.rank(), 2 * W - 1 - group.rank())]
        # Segment c is the first one of rank c, or the second one of rank 2 W - 1 - c.
        self.slots = [2 * c if c < W else 2 * (2 * W - 1 - c) + 1 for c in range(2 * W)]

    def gather(self, x_2):
        """Return the tensors of all segments, in order, from the tensors of our two."""
        # COMM: an all-gather over the c ranks. Its backward, a reduce-scatter, sums the gradients
        # of all readers of a segment. So each rank needs a graph from it to all that it returns,
        # even where it sends or reads padding only: the others wait for its backward. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        return Communicate.apply(x_2, self.group, all_gather, reduce_scatter)[self.slots]

    @not_compiled
    def windows(self, x_1sX, /, *, kernel, layer):
        """Return the last `kernel` inputs of each of our tokens: (1, s, X, k)."""
        # A segment may be shorter than a kernel: a token may read inputs of several before it.
        tokens_s = np.concatenate([np.arange(*segment) for segment in self.own])
        reads = [self.inputs_read_later(*segment, kernel) for segment in self.segments]
        m = max(map(len, reads))
        if m == 0:  # documents end where segments end
            return self.inputs_at(x_1sX, tokens_s, [], kernel)
        # NUMERICS: gradients of what several ranks read are summed in float32 or better. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        wide = torch.promote_types(x_1sX.dtype, torch.float32)
        sent = [x_1nX[0, self.inputs_read_later(*segment, kernel) - segment[0]]
                for x_1nX, segment in zip(x_1sX.to(wide).chunk(2, 1), self.own)]  # fmt: skip
        inputs_cmX = self.gather(torch.stack([F.pad(x, (0, 0, 0, m - len(x))) for x in sent]))
        others = [(read, x_mX[None, : len(read)].to(x_1sX.dtype))
                  for read, x_mX in zip(reads, inputs_cmX)]  # fmt: skip
        return self.inputs_at(x_1sX, tokens_s, others, kernel)

    @not_compiled
    def recurrence(self, q_1HsK, k_1HsK, v_1HsV, log_a_1Hs, b_1Hs, /, *, layer):
        """Return the outputs (1, H, s, V) of our tokens, by (6) of deltanet.py."""
        # A run from [0 I], with values [v 0], gives the outputs [o0 R].
        # NUMERICS: the chain of A is in the dtype of the states, which is float32 or better. Pinned
        # by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        K, V = k_1HsK.shape[-1], v_1HsV.shape[-1]
        identity_1HKv = F.pad(torch.eye(K).to(v_1HsV), (V, 0)).expand(*k_1HsK.shape[:2], -1, -1)
        qkvab = q_1HsK, k_1HsK, F.pad(v_1HsV, (0, K)), log_a_1Hs, b_1Hs
        reads = [self.states_read_later(*segment).tolist() for segment in self.segments]
        m = max(map(len, reads))
        runs, outs, maps = self.local_maps(qkvab, identity_1HKv, m)
        if m == 0:
            return torch.cat([out_1Hnv[..., :V] for out_1Hnv in outs], 2)

        maps_cmHKv = self.gather(torch.stack(maps).unflatten(0, (2, m)))
        states = self.follow_states(reads, maps_cmHKv, torch.zeros_like(identity_1HKv[0, ..., :V]))
        # One tensor of all states, so that a rank which needs none has a graph to them as well.
        place = {token: n for n, token in enumerate(states)}
        states_mHKV = torch.stack([*states.values()])
        outs = [out_1Hnv[..., :V] + out_1Hnv[..., V:] @ states_mHKV[place[run.ancestor]]
                for run, out_1Hnv in zip(runs, outs)]  # fmt: skip
        return torch.cat(outs, 2)

    def local_maps(self, qkvab, identity_1HKv, m):
        """Run our two segments from [0 I]. Return their runs, outputs, and m maps [B A] of each."""
        runs = []
        outs = []
        sent = []
        for segment, *half in zip(self.own, *(x.chunk(2, 2) for x in qkvab)):
            own_runs = [*self.runs(*segment)]
            maps = {run.ancestor: identity_1HKv for run in own_runs if run.ancestor >= 0}
            out_1Hnv = self.run_segment(half, *segment, maps)
            runs += own_runs
            outs += out_1Hnv.split([run.stop - run.first for run in own_runs], 2)
            read = self.states_read_later(*segment).tolist()
            padding = [segment[1] - 1] * (m - len(read))  # not zeros: they would have no graph
            sent += [maps[token][0] for token in read + padding]
        return runs, outs, sent

    def follow_states(self, reads, maps_cmHKv, zero_HKV):
        """Return {token: the state after it} of all tokens that others read, S = A S_0 + B.

        reads: for each segment, the tokens whose maps are in maps_cmHKv.
        """
        V = zero_HKV.shape[-1]
        states = {-1: zero_HKV}
        for segment, read, maps_mHKv in zip(self.segments, reads, maps_cmHKv):
            ancestors = {run.stop - 1: run.ancestor for run in self.runs(*segment)}
            for token, map_HKv in zip(read, maps_mHKv):
                A_HKK, B_HKV = map_HKv[..., V:], map_HKv[..., :V]
                states[token] = A_HKK @ states[ancestors[token]] + B_HKV
        return states


class MaskedAttention(Attention):
    """Attention under a mask of the whole row, by a group or alone.

    parent_N: which token comes before which, for recurrent layers; see `Forest`.
    method: how the ranks of the group share the keys, as in `ring_attention`.
    attend_alone: `attend`, or `attend_short` for trees, whose paths are often short.
    """

    def __init__(self, mask, parent_N, group, method="ring", attend_alone=attend):
        self.forest = Forest(parent_N) if group is None else SharedForest(parent_N, group)
        self.mask = mask
        self.group = group
        self.method = method
        self.attend_alone = attend_alone

    def windows(self, x_1SX, /, **options):
        return self.forest.windows(x_1SX, **options)

    def recurrence(self, *qkvab, layer):
        return self.forest.recurrence(*qkvab, layer=layer)

    def attend(self, q, k, v, /, *, layer, scale, window=None):
        # A layer with a window narrows the mask further.
        mask = self.mask.with_window(window)
        if self.group is None:
            return self.attend_alone(q, k, v, mask, scale=scale)[0]
        options = dict(group=self.group, mask=mask, method=self.method, scale=scale)
        return ring_attention(q, k, v, **options)

"""Runs recurrent layers on packed rows, trees and ranks: a token goes on where its parent stopped.

Attention asks which tokens a token sees. A gated DeltaNet (deltanet.py) asks for less: the last
inputs of its convolution, and the state before the token. Both are found at its parent, the token
before it. So documents, trees, chunks of a tree and shares of a ring are one thing, a forest:

    two documents 5 6 | 7 8      token    5  6  7  8      the tree 5 6 7 / 5 8    5  6  7  8
                                 parent   -  0  -  2                              -  0  1  0

A stretch is the tokens start .. stop - 1 of a row: all of them, a chunk of a tree, or one of the
two chunks that a rank has. Whoever runs it needs the states after some tokens of earlier stretches,
and a few inputs. A chunk reads both from leaves: the state at a fork is one more leaf of the walk
(chunks.py), and it stands for all tokens above it. Ranks run their stretches at the same time and
have no state to begin with. But a state is affine in the state S_0 before the stretch: by (6) of
deltanet.py one run gives A, B, R and o0 with S = A S_0 + B and o_i = R_i S_0 + o0_i. The ranks
gather all [B A], K (K + V) numbers for each head, and follow the states from stretch to stretch.
The recurrence then has K more columns than its V. A zigzag has two stretches a rank. It runs as
many tokens as the contiguous shares of flash-linear-attention and Megatron-LM, and gathers twice as
many states.

Not here: a kernel for all pieces of a tree at once; each is a call of `by_chunk`.

Letters:  N tokens of a row   n tokens of a stretch   s of a rank   m tokens that others read
X channels of the convolution   k its kernel   H heads   K width of a key   V of a value   v = V + K
W ranks   c stretches of all ranks
"""

import itertools

import numpy as np
import torch
import torch.nn.functional as F

from full.attention.attend import Attention, attend, not_compiled
from full.attention.ring import ring_attention
from full.model.deltanet import by_chunk
from parallel import Communicate, all_gather, reduce_scatter


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
        self.of_kernel = {}  # kernel -> `last_tokens`, which all layers share

    def last_tokens(self, kernel):
        """Return each token's last `kernel` tokens, itself the last, -1 for none, (N, k), and the
        last token that has each one among them, (N,)."""
        # 5 6 7 / 5 8 and a kernel of 3: . . 5, . 5 6, 5 6 7, . 5 8.
        if kernel not in self.of_kernel:
            columns = [np.arange(len(self.parent_N))]
            for _ in range(kernel - 1):
                columns.append(np.append(self.parent_N, -1)[columns[-1]])
            readers = [latest(columns[0], column_N) for column_N in columns]
            self.of_kernel[kernel] = np.stack(columns[::-1], 1), np.max(readers, 0)
        return self.of_kernel[kernel]

    def inputs_read_after(self, start, stop, kernel):
        """Return which tokens of a stretch have inputs that later stretches read, ascending."""
        return start + np.flatnonzero(self.last_tokens(kernel)[1][start:stop] >= stop)

    def states_read_after(self, start, stop):
        """Return the tokens of a stretch after which later stretches read the state, ascending."""
        return start + np.flatnonzero(self.last_child_N[start:stop] >= stop)

    def inputs_at(self, x_1nX, tokens_n, elsewhere, kernel):
        """Return the last `kernel` inputs of each token of some stretches, (1, n, X, k).

        elsewhere: (tokens (m,), their inputs (1, m, X)) pairs, of other stretches.
        """
        # All inputs that are at hand, and a zero, which is the input of token -1.
        parts = [(tokens_n, x_1nX), *elsewhere, ([-1], torch.zeros_like(x_1nX[:, :1]))]
        tokens, inputs = zip(*parts, strict=True)
        count = sum(map(len, tokens))
        place_N = np.full(len(self.parent_N) + 1, count)  # a place out of range: what lacks, fails
        place_N[np.concatenate(tokens)] = np.arange(count)
        place_nk = torch.from_numpy(place_N[self.last_tokens(kernel)[0][tokens_n]])
        return torch.cat(inputs, 1)[:, place_nk.to(x_1nX.device)].mT

    def pieces(self, start, stop):
        """Yield each piece of a stretch that has no fork inside: its first token, the token after
        its last one, and the token of an earlier stretch that it goes back to, or -1."""
        # A piece ends after a parent of a jump, and begins at a jump: [5] [6 7] [8] of 5 6 7 / 5 8.
        cuts = np.concatenate([[start, stop], self.jumps, self.parent_N[self.jumps] + 1])
        cuts = np.unique(cuts[(start <= cuts) & (cuts <= stop)]).tolist()
        origins = {}
        for first, after in itertools.pairwise(cuts):
            parent = int(self.parent_N[first])
            origins[after - 1] = parent if parent < start else origins[parent]
            yield first, after, origins[after - 1]

    def run(self, given, start, stop, states):
        """Return the outputs (1, H, n, V) of a stretch, and put states into `states`.

        given: q, k, v, log_a and b of its tokens.
        states: {token: the state after it}. It has the tokens that the pieces go back to.
        """
        restart_1n = torch.from_numpy(self.parent_N[start:stop] < 0)[None].to(given[0].device)
        out = []
        for first, after, _ in self.pieces(start, stop):
            own = slice(first - start, after - start)
            parent = int(self.parent_N[first])
            state = None if parent < 0 else states[parent]
            part, states[after - 1] = by_chunk(
                *(x[:, :, own] for x in given), state, restart_1n[:, own])
            out.append(part)
        return torch.cat(out, 2)

    @not_compiled
    def windows(self, x_1NX, /, *, kernel, layer):
        """Return the last `kernel` inputs of each token, its own the last: (1, N, X, k)."""
        return self.inputs_at(x_1NX, np.arange(len(self.parent_N)), [], kernel)

    @not_compiled
    def recurrence(self, *given, layer):
        """Return the outputs (1, H, N, V) of q, k, v, log_a and b."""
        return self.run(given, 0, len(self.parent_N), {})


def parents_in(document_N):
    """Return parent_N of a row of documents side by side. Padding is in document -1."""
    document_N = np.asarray(document_N)
    follows_N = (np.diff(document_N, prepend=-1) == 0) & (document_N >= 0)
    return np.where(follows_N, np.arange(len(document_N)) - 1, -1)


def latest(index_N, read_N):
    """Return the last token n' with read_N[n'] = n for each token n, (N,), or -1."""
    out = np.full(len(index_N) + 1, -1)
    out[read_N] = index_N  # of equal places numpy keeps the last; -1 is one past the end
    return out[:-1]


class SharedForest(Forest):
    """A `Forest` over W ranks: each has two of 2 W stretches of equal length, as a zigzag."""

    def __init__(self, parent_N, group):
        super().__init__(parent_N)
        self.group = group
        W = group.size()
        if len(self.parent_N) % (2 * W):
            raise ValueError(f"expected a row divisible by 2 c = {2 * W}, got {len(parent_N)}")
        edges = range(0, len(self.parent_N) + 1, len(self.parent_N) // (2 * W))
        self.stretches = [*itertools.pairwise(edges)]
        self.own = [self.stretches[c] for c in (group.rank(), 2 * W - 1 - group.rank())]
        # Stretch c is the first one of rank c, or the second one of rank 2 W - 1 - c.
        self.slots = [2 * c if c < W else 2 * (2 * W - 1 - c) + 1 for c in range(2 * W)]

    def gather(self, x_2):
        """Return the tensors of all stretches, in order, from the tensors of our two."""
        # COMM: an all-gather over the c ranks. Its backward, a reduce-scatter, sums what all ranks
        # read of a stretch. So each rank needs a graph from it to all that it returns, even where
        # it sends or reads padding only: the others wait for its backward. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        return Communicate.apply(x_2, self.group, all_gather, reduce_scatter)[self.slots]

    @not_compiled
    def windows(self, x_1sX, /, *, kernel, layer):
        """Return the last `kernel` inputs of each of our tokens: (1, s, X, k)."""
        # A stretch may be shorter than a kernel: a token may read inputs of several before it.
        tokens_s = np.concatenate([np.arange(*stretch) for stretch in self.own])
        reads = [self.inputs_read_after(*stretch, kernel) for stretch in self.stretches]
        m = max(map(len, reads))
        if m == 0:  # documents end where stretches end
            return self.inputs_at(x_1sX, tokens_s, [], kernel)
        # NUMERICS: gradients of what several ranks read are summed in float32 or better. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        wide = torch.promote_types(x_1sX.dtype, torch.float32)
        sent = [x_1nX[0, self.inputs_read_after(*stretch, kernel) - stretch[0]]
                for x_1nX, stretch in zip(x_1sX.to(wide).chunk(2, 1), self.own)]  # fmt: skip
        found_cmX = self.gather(torch.stack([F.pad(x, (0, 0, 0, m - len(x))) for x in sent]))
        elsewhere = [(read, x_mX[None, : len(read)].to(x_1sX.dtype))
                     for read, x_mX in zip(reads, found_cmX)]  # fmt: skip
        return self.inputs_at(x_1sX, tokens_s, elsewhere, kernel)

    @not_compiled
    def recurrence(self, q_1HsK, k_1HsK, v_1HsV, log_a_1Hs, b_1Hs, /, *, layer):
        """Return the outputs (1, H, s, V) of our tokens, by (6) of deltanet.py."""
        # One run from [0 I], with values [v 0], gives the outputs from no state, and what any state
        # would add to them.
        # NUMERICS: the chain of A is in the dtype of the states, which is float32 or better. Pinned
        # by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        K, V = k_1HsK.shape[-1], v_1HsV.shape[-1]
        start_1HKv = F.pad(torch.eye(K).to(v_1HsV), (V, 0)).expand(*k_1HsK.shape[:2], -1, -1)
        given = q_1HsK, k_1HsK, F.pad(v_1HsV, (0, K)), log_a_1Hs, b_1Hs
        reads = [self.states_read_after(*stretch).tolist() for stretch in self.stretches]
        m = max(map(len, reads))
        parts = []
        sent = []
        for stretch, *half in zip(self.own, *(x.chunk(2, 2) for x in given)):
            pieces = [*self.pieces(*stretch)]
            maps = {origin: start_1HKv for _, _, origin in pieces if origin >= 0}
            out_1Hnv = self.run(half, *stretch, maps)
            parts += zip(pieces, out_1Hnv.split([after - first for first, after, _ in pieces], 2))
            read = self.states_read_after(*stretch).tolist()
            padding = [stretch[1] - 1] * (m - len(read))  # no zeros: they would have no graph
            sent += [maps[token][0] for token in read + padding]
        if m == 0:
            return torch.cat([out[..., :V] for _, out in parts], 2)

        # Follow the states from stretch to stretch. The state of token -1 is 0.
        found_cmHKv = self.gather(torch.stack(sent).unflatten(0, (2, m)))
        number = {-1: 0}
        states = [torch.zeros_like(start_1HKv[0, ..., :V])]
        for stretch, read, maps_mHKv in zip(self.stretches, reads, found_cmHKv):
            origins = {after - 1: origin for _, after, origin in self.pieces(*stretch)}
            for token, BA_HKv in zip(read, maps_mHKv):
                number[token] = len(states)
                state_HKV = states[number[origins[token]]]
                states.append(BA_HKv[..., V:] @ state_HKV + BA_HKv[..., :V])
        # One tensor of all states, so that a rank which needs none has a graph to them as well.
        states_mHKV = torch.stack(states)
        outs = [out[..., :V] + out[..., V:] @ states_mHKV[number[origin]]
                for (_, _, origin), out in parts]  # fmt: skip
        return torch.cat(outs, 2)


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

    def recurrence(self, *given, layer):
        return self.forest.recurrence(*given, layer=layer)

    def attend(self, q, k, v, /, *, layer, scale, window=None):
        # A layer with a window narrows the mask further.
        mask = self.mask.with_window(window)
        if self.group is None:
            return self.attend_alone(q, k, v, mask, scale=scale)[0]
        options = dict(group=self.group, mask=mask, method=self.method, scale=scale)
        return ring_attention(q, k, v, **options)

"""Training on a tree of token sequences at the cost of its distinct tokens, exactly; CPU and CUDA.

Sequences that begin alike (GRPO groups, branching or multi-turn rollouts) form a tree. A causal
model gives a shared token the same state in all of them, so it is computed once, forward and
backward; the losses stay functions of whole sequences, and the gradients are those of training on
every sequence by itself. One knob, max_tokens: the whole tree at once, or block by block, depth
first, in the memory of one path.

    python tree_attention.py check             # every gradient against per-sequence autograd
    python tree_attention.py bench             # CPU seconds, peak memory, percent of the bound
    python tree_attention.py plan FILE.json    # a list of token lists: statistics, drawing, blocks

check needs ring_attention.py beside it; its rows for models.py, bench and plan need tests/ too.

What it must equal, for sequences x^1 .. x^R of L_i tokens each, and a loss f_i of each:

    (1)  token i of the tree sees token j  iff  j <= i < end_j:  its ancestors and itself
    (2)  h_t       =  the model's state of token t after its path, at position depth_t
    (3)  lp^i_s    =  log softmax(W h / temperature)[x^i_s],  h of token s - 1 of x^i,  0 < s < L_i,
                      and entropy^i_s, of the same distribution
    (4)  loss      =  sum_i f_i(lp^i, entropy^i)
    (5)  dloss/dlp_t  =  sum over the sequences i that hold t of  df_i/dlp^i at t
    (6)  dk_j, dv_j   =  the sum over the tokens that see j: of its own block, and of all below it
    (7)  aux       =  coef sum_i E / (K L_i^2) sum_e n_ie sum_{t in x^i} p_te   (sparse layers; p:
                      the router's, n_ie: tokens of x^i that went to expert e; in no f_i)

Why it is allowed. (2) depends on a token's ancestors alone, so (1) makes one forward of the packed
tree the forward of every path. A gradient is a sum over sequences, and what sequences share enters
it once for each: that is (5), and (6) is the same sum for keys and values.

    sequences  5 6 7 / 5 6 8 / 5 9      packed, DFS preorder      who sees whom
                                        index  0 1 2 3 4          0  x
        5 - 6 - 7                       token  5 6 7 8 9          1  x x
        |    `- 8                       depth  0 1 2 2 1          2  x x x
         `- 9                           end    5 4 3 4 5          3  x x . x
                                                                  4  x . . . x
The tree in blocks: a block is a piece of one path, at most max_tokens of it, and whole subtrees
that hang from its end, as many as fit. Blocks form a tree themselves. Depth first, the K and V of
the pieces above lie on a stack, where the index is the depth; a block attends to the stack and to
itself, merged by log-sum-exp. Its backward adds its part of (6) to the stack's gradient; to its own
dK and dV it adds what the blocks below have left there for its piece.

    B = 1 batch   H, G query and key heads   D head_dim   M width   V vocabulary   E experts
    N tokens of the tree   n of a block   p on the stack above it   K experts a token
    e edges scored in a block, an edge a token and its parent   r sequences that end in it
    P longest path   T longest sequence's targets
    R sequences, L_i tokens of sequence i   C = 2 or 3: log-prob, entropy and, for a critic, value

    |                | tokens forward, backward     | held at the peak                            |
    | one by one     | sum L_i, sum L_i             | the longest sequence                        |
    | one block      | N, N                         | N tokens' graph                             |
    | blocks         | N, N                         | graphs of a path of blocks; K, V, dK, dV    |
    | ... recompute  | N + inner blocks', N         | one block's graph; K, V, dK, dV of a path   |

A token's pairs with its ancestors are computed once: N tokens and sum_t (depth_t + 1) pairs, where
the flat batch has sum_i L_i and sum_i L_i (L_i + 1) / 2. `TokenTrie.stats` gives the ratio.

How it deviates. Prefix Grouper shares one prefix, here any tree. Tree Training packs a tree that
fits; AReaL-DTA walks leaf by leaf with one segment at a time: blocks are both, and packing sibling
subtrees keeps the matrices large. The log-prob of a fork's first tokens is computed where their
parent's state is, in the parent's block, so there is no fork cache of any kind.

Not here: dropout; mixers that are no causal softmax attention; batches of trees (a forest is one
tree); blocks across a sequence's ranks (the whole tree at once: `tree_logprobs(group=)`).

References: AReaL-DTA arXiv:2602.00482; Tree Training arXiv:2511.00413; Prefix Grouper
arXiv:2506.05433; FlashMask arXiv:2410.01359; (7): DeepSeek-V3 arXiv:2412.19437, equations 17-20.
"""

import functools
import inspect
import itertools
import json
import math
import re
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ring_attention as ring

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
MIXERS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d)
OTHER_MIXERS = re.compile("mamba|rwkv|deltanet|linearattention|ssm|retention", re.IGNORECASE)


# 1. The definition ---------------------------------------------------------------------------

def definition(model, sequences, loss_fn, /, *, temperature=1.0):
    """(3), (4) and the gradient, one sequence at a time: what everything below must equal.

    Returns the loss and the log-probs of each sequence; adds to .grad.
    """
    total, found = 0.0, []
    for i, x_L in enumerate(sequences):
        hidden_LM = model.hidden(x_L[None])[0]
        scored_lM = hidden_LM[:-1]
        scores = model.logprobs(scored_lM, x_L[1:], temperature=temperature)
        values = (model.values(scored_lM),) if _is_critic(model) else ()
        loss = loss_fn(i, *scores, *values)
        if loss.requires_grad:
            loss.backward()
        total, found = total + loss.detach(), [*found, scores[0].detach()]
    return total, found


def _is_critic(model):
    return getattr(getattr(model, "config", None), "value_head", False)


# 2. The tree of tokens -----------------------------------------------------------------------

class Stats(NamedTuple):
    """Tokens and (query, key) pairs, of the flat batch and of the tree, and their ratios."""

    flat_tokens: int
    tree_tokens: int
    flat_pairs: int
    tree_pairs: int
    token_bound: float  # how many times faster, if tokens were all that costs
    flop_bound: float | None  # the same of FLOPs, None without their costs


class TokenTrie:
    """The tree of all prefixes of some sequences, packed in DFS preorder.

    sequences: 1-D integer tensors (or lists) of 1 token or more, ids >= 0; none is changed.
    max_length: a ValueError names the sequence that is longer. Sequences that are equal, or
    prefixes of others, end inside the tree and add no token. All tensors are int64, on the CPU:

        tokens (N,)        token ids           positions (N,)    depth, which is what RoPE wants
        subtree_end (N,)   the index after a token's last descendant
        parent (N,)        index of the token before, -1 for a first one
        ends (R,)          index of each sequence's last token     lengths (R,)   L_i

    O(total tokens) numpy after a sort, and a Python loop over sequences, not over tokens.
    """

    def __init__(self, sequences, *, max_length=None):
        arrays = [_checked(i, x, max_length) for i, x in enumerate(sequences)]
        lengths, none = np.array([len(x) for x in arrays], np.int64), np.zeros(0, np.int64)
        # Big-endian bytes sort as the ids do. A sequence then shares most with its neighbours.
        keys = [x.astype(">i8").tobytes() for x in arrays]
        self._order = sorted(range(len(arrays)), key=keys.__getitem__)
        ordered = [arrays[i] for i in self._order]
        shared = [_common(a, b) for a, b in zip([none, *ordered], ordered, strict=False)]
        self._shared = np.array(shared, np.int64)
        sizes = lengths[self._order] - self._shared  # what a sequence adds to the tree
        N, starts = int(sizes.sum()), np.cumsum(sizes) - sizes
        tokens, positions = np.empty((2, N), np.int64)
        parent, end = np.arange(N) - 1, np.full(N, N)
        path, held = np.zeros(lengths.max(initial=0), np.int64), 0  # of one sequence after another
        self._paths = [None] * len(arrays)
        for i, low, start in zip(self._order, shared, starts.tolist(), strict=True):
            x, stop = arrays[i], len(arrays[i])
            own = slice(start, start + stop - low)
            end[path[low:held]] = start  # nothing more hangs from what the last one has alone
            tokens[own], positions[own] = x[low:], np.arange(low, stop)
            path[low:stop], held = np.arange(own.start, own.stop), stop
            if low < stop:
                parent[start] = path[low - 1] if low else -1
            self._paths[i] = _tensor(path[:stop].copy())
        self.tokens, self.positions, self.subtree_end = map(_tensor, (tokens, positions, end))
        self.parent, self.lengths = _tensor(parent), _tensor(lengths)
        self.ends = _tensor([path[-1] for path in self._paths])
        self._mask, self._ancestors = None, None

    def __len__(self):
        return len(self.tokens)

    def path(self, i):
        """(L_i,) int64: the tokens of sequence i, so that tokens[path(i)] is the sequence."""
        return self._paths[i]

    def ancestors(self):
        """(N, P) int64: the token at each depth of each token's path, itself where the path is
        shorter; and (N, P) bool: which are no such filling."""
        if self._ancestors is None:
            depth, index = self.positions, torch.arange(len(self))
            latest_NP = torch.full((len(self), int(depth.max()) + 1), -1)
            latest_NP[index, depth] = index
            seen_NP = torch.arange(latest_NP.shape[1]) <= depth[:, None]
            latest_NP = latest_NP.cummax(0).values  # preorder: the last at a depth is the ancestor
            self._ancestors = torch.where(seen_NP, latest_NP, index[:, None]), seen_NP
        return self._ancestors

    def mask(self, window=None):
        """(1) as a Mask; a window is measured in depth."""
        if self._mask is None:  # kept with its tiles: a layer finds what the one before it made
            self._mask = ring.Mask.tree(self.subtree_end, self.positions)
        return self._mask.with_window(window)

    def segments(self):
        """({parent token, -1 for none: [first tokens]}, {first token: its segment's end}).

        A segment is a stretch of one path without a fork; where one ends, children begin.
        """
        parent = self.parent.numpy()
        count = np.bincount(parent[parent >= 0], minlength=len(self))
        first = np.flatnonzero((parent < 0) | (count[parent] != 1))
        children = {}
        for token in first.tolist():
            children.setdefault(int(parent[token]), []).append(token)
        stops = np.append(np.flatnonzero(count != 1) + 1, len(self))
        found = stops[np.searchsorted(stops, first + 1)]
        return children, dict(zip(first.tolist(), found.tolist(), strict=True))

    def stats(self, flops_per_token=None, flops_per_pair=None) -> Stats:
        """What sharing saves. flops_per_token, flops_per_pair: what a model spends on each."""
        lengths = self.lengths.numpy()
        flat, pairs = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
        tree, tree_pairs = len(self), int((self.positions + 1).sum())
        bound = None
        if flops_per_token is not None and flops_per_pair is not None and tree:
            flops = tree * flops_per_token + tree_pairs * flops_per_pair
            bound = (flat * flops_per_token + pairs * flops_per_pair) / flops
        return Stats(flat, tree, pairs, tree_pairs, flat / tree if tree else 1.0, bound)

    def draw(self, most=40) -> str:
        """A segment a line: its tokens, how many, and the sequences that end in it."""
        (children, stops), ends, lines = self.segments(), {}, []
        for i, token in enumerate(self.ends.tolist()):
            ends.setdefault(token, []).append(i)
        todo = [(first, 0) for first in reversed(children.get(-1, []))]
        while todo and len(lines) < most:
            first, level = todo.pop()
            stop = stops[first]
            text = " ".join(str(x) for x in self.tokens[first : min(stop, first + 8)].tolist())
            here = [f"{ends[t]} at {t + 1 - first}" for t in range(first, stop) if t in ends]
            more = f" .. ({stop - first} tokens)" if stop > first + 8 else ""
            finished = f"   ends: {', '.join(here)}" if here else ""
            lines.append(f"{'|  ' * level}+- {text}{more}{finished}")
            todo += [(child, level + 1) for child in reversed(children.get(stop - 1, []))]
        return "\n".join([*lines, f".. {len(todo)} branches and more" if todo else ""]).rstrip("\n")


def _tensor(x):
    return torch.from_numpy(np.asarray(x, np.int64))


def _checked(i, sequence, max_length):
    array = sequence.detach().cpu().numpy() if torch.is_tensor(sequence) else np.asarray(sequence)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"sequence {i} must be 1-D integers, 1 token or more; came {array.dtype} "
                         f"{array.shape}; leave empty sequences out")
    array = array.astype(np.int64)
    if array.min() < 0:
        raise ValueError(f"sequence {i} has the token id {array.min()}; ids are 0 to 2^63 - 1")
    if max_length is not None and len(array) > max_length:
        raise ValueError(f"sequence {i} has {len(array)} tokens, the limit is {max_length}; cut it")
    return array


def _common(a, b):
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


# 3. Attention over the packed tree -----------------------------------------------------------

SHORT, GATHERED = 48, 2**24  # tokens of a path, and numbers gathered; see `tree_attention`


def tree_attention(q, k, v, /, trie, *, scale=None, window=None, softcap=None, backend=None):
    """Attention of every token to its ancestors and itself, (1): out (1, H, N, D), differentiable.

    q: (1, H, N, D), k, v: (1, G, N, D) in the order of trie.tokens; dtypes and the other arguments
    as in `ring_attention.attend`, whose autograd Function this is over the tree's mask.

    In preorder a segment's own pairs are a triangle of contiguous slices, and everything below it
    sees it whole, a rectangle: the mask's bounds find those boxes, they run through the fused
    kernels without a mask, and only boxes of many short segments take a mask of their own size.
    Where no path is longer than SHORT, on a CPU, tiles would be nearly empty: then, with no backend
    given, each token's keys are gathered, GATHERED numbers at most, and the gradient is autograd's.
    """
    longest = int(trie.positions.max()) + 1 if len(trie) else 0
    held = len(trie) * longest * k.shape[1] * k.shape[3]  # numbers, of K and of V
    if backend is None and q.device.type == "cpu" and 0 < longest <= SHORT and held <= GATHERED:
        return _gathered_attention(q, k, v, trie, scale, window, softcap)
    return ring.attend(q, k, v, trie.mask(window), scale=scale, softcap=softcap, backend=backend)[0]


def _gathered_attention(q_1HND, k_1GND, v_1GND, trie, scale, window, softcap):
    """(1) as it reads: the keys of each token's path, P = the longest, gathered; h = H / G."""
    (H, N, D), G = q_1HND.shape[1:], k_1GND.shape[1]
    above_NP, seen_NP = (x.to(q_1HND.device) for x in trie.ancestors())
    if window is not None:
        depth_P = torch.arange(seen_NP.shape[1], device=seen_NP.device)
        seen_NP = seen_NP & (trie.positions.to(depth_P.device)[:, None] - depth_P < window)
    # NUMERICS: scores, their softmax and sums in float32 or better, as in the tiles. Pinned by
    # tests/test_tree.py::test_tree_attention_in_low_precision_is_within_twice_plain_torch.
    wide = torch.promote_types(q_1HND.dtype, torch.float32)
    q_NGhD = q_1HND[0].transpose(0, 1).reshape(N, G, H // G, D).to(wide)
    k_NGPD, v_NGPD = (
        x[0].transpose(0, 1).index_select(0, above_NP.flatten()).unflatten(0, above_NP.shape)
        .transpose(1, 2).to(wide) for x in (k_1GND, v_1GND))  # fmt: skip
    score_NGhP = q_NGhD @ k_NGPD.mT * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        score_NGhP = softcap * torch.tanh(score_NGhP / softcap)
    score_NGhP = score_NGhP.masked_fill(~seen_NP[:, None, None], -math.inf)
    out_NGhD = score_NGhP.softmax(-1) @ v_NGPD
    return out_NGhD.reshape(N, H, D).transpose(0, 1)[None].to(q_1HND.dtype)


# 4. Blocks -----------------------------------------------------------------------------------

class Block(NamedTuple):
    """tokens (n,): ascending indices. The first `piece` of them, 0 where no block is below, are a
    stretch of one path that other blocks hang from; the rest are whole subtrees. parent: the block
    above, -1 for none. depth: of its first token, and how much of the stack it sees."""

    tokens: np.ndarray
    piece: int
    parent: int
    depth: int


def plan(trie, max_tokens=None) -> list[Block]:
    """Blocks of at most max_tokens, each after the one above it; None: all in one.

    From the end of a piece, subtrees that fit into a block are packed together, the first of them
    into what is left of the piece's block; a larger one begins with its segment, cut into pieces.
    """
    if max_tokens is not None and not (hasattr(max_tokens, "__index__") and max_tokens > 0):
        raise ValueError(f"max_tokens must be an integer of 1 or more, or None; came {max_tokens}")
    N = len(trie)
    if max_tokens is None or N <= max_tokens:
        return [Block(np.arange(N), 0, -1, 0)] if N else []
    (children, stops), blocks, todo = trie.segments(), [], [(-1, -1)]
    end, positions = trie.subtree_end.numpy(), trie.positions.numpy()
    while todo:
        token, holder = todo.pop()  # what hangs from this token, whose piece is in that block
        below = children.get(token, [])
        small = [child for child in below if end[child] - child <= max_tokens]
        _pack(blocks, holder, [np.arange(child, end[child]) for child in small], max_tokens,
              int(positions[token]) + 1 if token >= 0 else 0)  # fmt: skip
        for child in (child for child in below if end[child] - child > max_tokens):
            above = holder
            for first in range(child, stops[child], max_tokens):
                tokens = np.arange(first, min(first + max_tokens, stops[child]))
                blocks.append(Block(tokens, len(tokens), above, int(positions[first])))
                above = len(blocks) - 1
            todo.append((stops[child] - 1, above))
    inner = {block.parent for block in blocks}
    return [x if b in inner else x._replace(piece=0) for b, x in enumerate(blocks)]


def _pack(blocks, holder, subtrees, max_tokens, depth):
    """Put whole subtrees, in order, into the holder's block while they fit, then into new ones."""
    used, bundles = (len(blocks[holder].tokens) if holder >= 0 else max_tokens), [[]]
    for tokens in subtrees:
        if used + len(tokens) > max_tokens:
            used = 0
            bundles.append([])
        used += len(tokens)
        bundles[-1].append(tokens)
    if bundles[0]:
        tokens = np.concatenate([blocks[holder].tokens, *bundles[0]])
        blocks[holder] = blocks[holder]._replace(tokens=tokens)
    blocks.extend(Block(np.concatenate(some), 0, holder, depth) for some in bundles[1:])


class Stack:
    """Keys and values of the pieces above the current block, by layer; the index is the depth."""

    def __init__(self, limit):
        self.limit, self.kv, self.grads = limit, {}, {}  # layer -> (2, 1, G, capacity, D)

    def put(self, layer, depth, k_1GnD, v_1GnD, piece):
        """Write a piece over what another path had left there."""
        if piece:
            at = slice(depth, depth + piece)
            kv_21GpD = self._room(self.kv, layer, k_1GnD, at.stop)
            kv_21GpD[0, :, :, at] = k_1GnD[:, :, :piece].detach()
            kv_21GpD[1, :, :, at] = v_1GnD[:, :, :piece].detach()

    def leave(self, layer, first, dk_1GpD, dv_1GpD):
        """A block's part of (6) for the tokens above it."""
        # NUMERICS: the sum over all blocks below is in float32 or better, and is cast once, with
        # the block's own. Pinned by tests/test_tree.py::test_bf16_is_as_good_as_flat_bf16.
        at = slice(first, first + dk_1GpD.shape[2])
        grad_21GmD = self._room(self.grads, layer, dk_1GpD, at.stop)
        grad_21GmD[0, :, :, at] += dk_1GpD
        grad_21GmD[1, :, :, at] += dv_1GpD

    def take(self, layer, depth, piece):
        """What all blocks below have left for a piece; zero from here on. None: nothing."""
        if layer not in self.grads or not piece:
            return None
        grad_21GnD = self.grads[layer][:, :, :, depth : depth + piece]
        taken_21GnD = grad_21GnD.clone()
        grad_21GnD.zero_()
        return taken_21GnD

    def _room(self, store, layer, like_1GnD, needed):
        """A layer's part, grown to twice its length if need be, but never beyond the limit."""
        held = store[layer].shape[3] if layer in store else 0
        if held < needed:
            _, G, _, D = like_1GnD.shape
            new_21GpD = like_1GnD.new_zeros(2, 1, G, min(max(needed, 2 * held), self.limit), D)
            if held:
                new_21GpD[:, :, :, :held] = store[layer]
            store[layer] = new_21GpD
        return store[layer]


def overlay(blocks, group) -> list[Block]:
    """This rank's blocks in the union of all ranks' forests: root laid on root, n-th child on n-th.

    Where only others have a block stands an empty one, so that all make the same calls in one
    order, and a call's backward, whose messages are of the forward's sizes, meets its own kind.
    """
    place = ring.ring_of(group)
    parents, children = [[block.parent for block in blocks]] * place.world, []
    if place.world > 1:
        dist.all_gather_object(parents, parents[0], group=place.group)
    for some in parents:
        children.append({})
        for b, parent in enumerate(some):
            children[-1].setdefault(parent, []).append(b)
    out, todo = [], [(-1, (-1,) * place.world)]
    for above, nodes in todo:  # it grows meanwhile
        lists = (below.get(node, ()) for below, node in zip(children, nodes, strict=True))
        for laid in itertools.zip_longest(*lists):
            own = laid[place.rank]
            block = Block(np.zeros(0, np.int64), 0, -1, 0) if own is None else blocks[own]
            out.append(block._replace(parent=above))
            todo.append((len(out) - 1, laid))
    return out


def block_ends(trie, block):
    """subtree_end of a block's tokens inside the block, (n,)."""
    end = np.searchsorted(block.tokens, trie.subtree_end.numpy()[block.tokens])
    end[: block.piece] = len(end)  # everything else in the block hangs from the piece's end
    return end


def block_masks(trie, block, window):
    """(1) for a block: (mask of its tokens among themselves, of these against the stack from depth
    `first` on or None for all of it, first): stack, piece and subtrees are a tree of their own."""
    positions, end = trie.positions.numpy()[block.tokens], block_ends(trie, block)
    n, p = len(positions), block.depth
    own = trie.mask(window) if n == len(trie) else ring.Mask.tree(end, positions, window)
    if window is None or not p:
        return own, None, 0
    first = min(max(0, int(positions.min()) - window + 1), p - 1)  # the rest is out of the window
    above = p - first
    ends = np.concatenate([np.full(above, above + n), above + end])
    depths = np.concatenate([np.arange(first, p), positions])
    both = ring.Mask.tree(ends, depths, window)
    return own, both.slice(slice(above, None), slice(above)), first


class _BlockAttention(torch.autograd.Function):
    """A block against itself and the stack above it; its backward is (6) through the stack."""

    @staticmethod
    def forward(ctx, q, k, v, stack, layer, block, masks, kernel):
        own, above, first = masks
        out, lse = ring.forward_tiles(q, k, v, own, kernel)
        if block.depth:
            kv = stack.kv[layer][:, :, :, first : block.depth]
            out, lse = ring.merge(out, lse, *ring.forward_tiles(q, *kv, above, kernel))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = stack, layer, block, masks, kernel
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        stack, layer, block, (own, above, first), kernel = ctx.rest
        dq, dk, dv = ring.backward_tiles(dout, q, k, v, out, lse, None, own, kernel)
        if block.depth:  # with the out and lse over all keys, the parts of the gradient add up
            kv = stack.kv[layer][:, :, :, first : block.depth]
            parts = ring.backward_tiles(dout, q, *kv, out, lse, None, above, kernel)
            dq += parts[0]
            stack.leave(layer, first, *parts[1:])
        below = stack.take(layer, block.depth, block.piece)
        if below is not None:
            reached = below.shape[3]  # less than the piece if no block below saw all of it
            dk[:, :, :reached] += below[0]
            dv[:, :, :reached] += below[1]
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), *[None] * 5


class Routing:
    """The `balance` callable of a block's sparse layers: what (7) needs of their routers."""

    def __init__(self, end_n):
        self.end_n, self.experts_per_token = end_n, 0
        self.scores, self.chosen = {}, {}  # layer -> p (n, E) with its graph, and 0 or 1 (n, E)
        self.graph = torch.is_grad_enabled()

    def __call__(self, scores_nE, chosen_nK, /, *, layer):
        if self.graph and not torch.is_grad_enabled():
            raise ValueError("a reentrant checkpoint would lose (7); use_reentrant=False")
        self.scores[layer], self.experts_per_token = scores_nE, chosen_nK.shape[1]
        zeros_nE = torch.zeros_like(scores_nE, dtype=torch.float64)
        self.chosen[layer] = zeros_nE.scatter(1, chosen_nK, 1.0)


def subtree_sums(x_nE, end_n, /):
    """Sum of the rows t .. end_t - 1, and of all rows: in preorder, over a token's subtree."""
    sums_mE = torch.cat([x_nE.new_zeros(1, x_nE.shape[1]), x_nE.cumsum(0)])
    return sums_mE[end_n] - sums_mE[:-1], sums_mE[-1]


def path_sums(x_nE, end_n, /):
    """Sum of x over a token's ancestors and itself: a row counts until its subtree ends."""
    events_mE = torch.cat([x_nE, x_nE.new_zeros(1, x_nE.shape[1])])
    return events_mE.index_add(0, end_n, -x_nE)[:-1].cumsum(0)


# 5. The engine -------------------------------------------------------------------------------

class NonFiniteLoss(FloatingPointError, ValueError):
    """A caller's loss, or its gradient, is not finite; the message names the sequence."""


class _Engine:
    """Blocks depth first: forward, losses of complete paths, the blocks below, backward.

    An edge leads from a token to the next one and goes by that, its child; it is scored in the
    block that holds the parent. found: (C, N), (3) by edge. upstream: (5), the same. used: which of
    the C some loss used; the first always.
    """

    def __init__(self, model, trie, *, max_tokens=None, temperature=1.0, aux_coef=0.0,
                 lockstep=None, masks=None, batched=False, check_finite=True):  # fmt: skip
        self.model, self.trie, self.blocks = model, trie, plan(trie, max_tokens)
        self.temperature, self.aux_coef = temperature, aux_coef
        self.lockstep, self.batched, self.check_finite = lockstep, batched, check_finite
        if lockstep is not None:
            self.blocks = overlay(self.blocks, lockstep)
        self.routed = "balance" in inspect.signature(model.hidden).parameters
        weight = next(model.parameters())
        self.device, dtype = weight.device, torch.promote_types(weight.dtype, torch.float32)
        size = 2 + bool(_is_critic(model)), len(trie)
        self.found_CN = torch.zeros(size, dtype=dtype, device=self.device)
        self.upstream_CN, self.used = None, [True, False, False]
        self.stack = Stack(max((b.depth + b.piece for b in self.blocks if b.piece), default=0))
        owner, parent = np.zeros(len(trie), np.int64), trie.parent.numpy()
        for b, block in enumerate(self.blocks):
            owner[block.tokens] = b
        scored = np.flatnonzero((parent >= 0) & _wanted(trie, masks))
        by_parent = _grouped(owner[parent[scored]], len(self.blocks))
        self.edges = [torch.from_numpy(scored[some]) for some in by_parent]
        self.ending = _grouped(owner[trie.ends.numpy()], len(self.blocks))
        above = np.array([block.parent for block in self.blocks], np.int64)
        self.below = _grouped(above + 1, len(self.blocks) + 1)  # [0]: those without one above
        self.paths, self.owed = {}, {}  # of (7), by block and layer: n (E,) so far, factors below
        self.loss, self.aux_loss, self.router_counts = 0.0, 0.0, {}

    def run(self, loss_fn=None, recompute=False):
        """Without loss_fn: forward only, under no_grad, and no memory for any gradient."""
        if loss_fn is not None:
            self.upstream_CN = torch.zeros_like(self.found_CN)
        todo = [(b, False, None) for b in self.below[0][::-1].tolist()]
        while todo:
            b, visited, work = todo.pop()
            if visited:
                self.backward(b, work or self.forward(b))
                continue
            # A block with none below goes backward next: its graph is kept in any case.
            below = self.below[b + 1]
            keep = loss_fn is not None and not (recompute and len(below))
            with torch.set_grad_enabled(keep):
                work = self.forward(b)
            self.note(b, *work)
            if loss_fn is not None:
                self.evaluate(b, loss_fn)
                todo.append((b, True, work if keep else None))
            todo += [(child, False, None) for child in below[::-1].tolist()]

    def forward(self, b):
        """The scores (C of (e,)) of edges that leave this block's tokens, its routing, states."""
        trie, stack, block, masks, seen = self.trie, self.stack, self.blocks[b], {}, set()
        if not len(block.tokens):
            return self.stand_in()
        routing = Routing(torch.from_numpy(block_ends(trie, block)).to(self.device))

        def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
            if layer in seen:
                raise ValueError(f"two layers call attention with layer={layer}; number them")
            if running:  # a checkpoint calls again later
                seen.add(layer)
            if window not in masks:
                masks[window] = block_masks(trie, block, window)
            stack.put(layer, block.depth, k, v, block.piece)
            kernel = ring.Kernel(ring.choose_backend(q, softcap=softcap), float(scale), softcap)
            return _BlockAttention.apply(q, k, v, stack, layer, block, masks[window], kernel)

        own, running = torch.from_numpy(block.tokens), True
        tokens_1n, depth_1n = (x[own][None].to(self.device) for x in (trie.tokens, trie.positions))
        also = {"balance": routing} if self.routed else {}
        hidden_1nM = self.model.hidden(tokens_1n, positions=depth_1n, attention=attention, **also)
        running = False
        seen.clear()
        if not masks:
            raise ValueError(f"{type(self.model).__name__}.hidden never called `attention`: its "
                             "tokens mix in a way a tree cannot follow; every layer must call it")
        if self.aux_coef and not routing.scores:
            raise ValueError(f"aux_coef={self.aux_coef}, but the model has no router; leave it 0")
        edges, scores = self.edges[b], ()
        if len(edges):
            scores = _scores(self.model, hidden_1nM[0], own, trie, edges, self.temperature)
        unseen = block.piece and not scores  # by any loss, but perhaps by blocks below
        return scores, routing, hidden_1nM if unseen or self.lockstep is not None else None

    def stand_in(self):
        """What an empty block runs: one token that no loss sees, for the messages of the layers."""

        def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
            return ring.attend(q, k, v, scale=scale, softcap=softcap)[0]

        tokens_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        hidden_11M = self.model.hidden(tokens_11, positions=tokens_11, attention=attention)
        return (), Routing(None), hidden_11M

    def note(self, b, scores, routing, _):
        """Keep the scores, and the tokens that each expert got on the way here, (7)'s n."""
        edges, block = self.edges[b].to(self.device), self.blocks[b]
        for row_N, score in zip(self.found_CN, scores, strict=False):
            row_N[edges] = score.detach().to(row_N.dtype)
        if not routing.chosen:
            return
        ending = torch.from_numpy(self.ending[b])
        at = torch.searchsorted(torch.from_numpy(block.tokens), self.trie.ends[ending])
        lengths_r1 = self.trie.lengths[ending].to(self.device)[:, None]
        for layer, chosen_nE in routing.chosen.items():
            n_nE = path_sums(chosen_nE, routing.end_n)
            if block.parent >= 0:
                n_nE = n_nE + self.paths[block.parent, layer]
            if block.piece:
                self.paths[b, layer] = n_nE[block.piece - 1]
            n_rE, factor = n_nE[at.to(self.device)], n_nE.shape[1] / routing.experts_per_token
            self.router_counts[layer] = self.router_counts.get(layer, 0) + n_rE.sum(0)
            if self.aux_coef:
                owed_nE = torch.zeros_like(n_nE)
                owed_nE.index_add_(0, at.to(self.device), factor * n_rE / lengths_r1.square())
                self.owed[b, layer] = owed_nE * self.aux_coef

    def evaluate(self, b, loss_fn):
        """(4) and (5) of the sequences that end in this block."""
        losses, finite, ending = [], [], self.ending[b].tolist()
        for some in [ending] * bool(ending) if self.batched else [[i] for i in ending]:
            at, inside = _padded_paths(self.trie, some, self.device)
            scores = (row_N[at].masked_fill(~inside, 0.0) for row_N in self.found_CN)
            leaves = [x_RT.requires_grad_() for x_RT in scores]
            with torch.enable_grad():
                given = (some, *leaves) if self.batched else (some[0], *(x[0] for x in leaves))
                loss = loss_fn(*given)
                loss = loss if torch.is_tensor(loss) else self.found_CN.new_tensor(loss)
                if loss.dim():
                    raise ValueError("loss_fn must return one number a call, of shape (); for "
                                     f"sequence {given[0]} came {[*loss.shape]}; sum or average it")
                if loss.requires_grad:
                    loss.backward()
            losses.append(loss.detach().to(self.found_CN))
            checks = [losses[-1].isfinite()]
            for c, leaf in enumerate(leaves):
                if leaf.grad is not None:
                    self.upstream_CN[c].index_add_(0, at[inside], leaf.grad[inside])
                    self.used[c] = True
                    checks.append(leaf.grad[inside].isfinite().all())
            finite.append(torch.stack(checks).all())
        # one wait for the device a block
        if self.check_finite and ending and not torch.stack(finite).all():
            k = finite.index(False)
            which = f"sequences {ending}" if self.batched else f"sequence {ending[k]}"
            what = ", its gradient is not finite" if losses[k].isfinite() else ""
            raise NonFiniteLoss(f"the loss of {which} is {losses[k].item()}{what}")
        self.loss = sum(losses, self.loss)

    def backward(self, b, work):
        """The gradient of this block, of its losses and of what lies below it."""
        (scores, routing, hidden_1nM), edges = work, self.edges[b].to(self.device)
        outputs, grads = [], []
        for c, score in enumerate(scores):
            if self.used[c] and score.requires_grad:
                # Zeros for an entropy that no loss uses would cost the head a second time.
                outputs.append(score)
                grads.append(self.upstream_CN[c, edges].to(score.dtype))
        block = self.blocks[b]
        for layer, scores_nE in routing.scores.items() if self.aux_coef else ():
            owed_nE = self.owed.pop((b, layer))
            factor_nE, total_E = subtree_sums(owed_nE, routing.end_n)
            if block.parent >= 0:
                end = self.blocks[block.parent].piece - 1
                self.owed[block.parent, layer][end] += total_E
            self.aux_loss = self.aux_loss + (factor_nE * scores_nE.detach()).sum()
            if scores_nE.requires_grad:
                outputs.append(scores_nE)
                grads.append(factor_nE.to(scores_nE.dtype))
        if hidden_1nM is not None and not any(score.requires_grad for score in scores):
            # no loss of its own, but what blocks below left for K and V, and the ranks' messages
            outputs += [hidden_1nM] * hidden_1nM.requires_grad
            grads += [torch.zeros_like(hidden_1nM)] * hidden_1nM.requires_grad
        if outputs:
            torch.autograd.backward(outputs, grads)


def _scores(model, hidden_nM, own_n, trie, edges_e, temperature):
    """(3): the head at the parents of some edges alone; own_n: the tokens of the states, ascending.

    An edge goes by its child. (log-probs, entropies, of a critic values), (e,) each.
    """
    device = hidden_nM.device
    at_eM = hidden_nM[torch.searchsorted(own_n, trie.parent[edges_e]).to(device)]
    targets = trie.tokens[edges_e].to(device)
    scores = model.logprobs(at_eM, targets, temperature=temperature)
    return (*scores, model.values(at_eM)) if _is_critic(model) else tuple(scores)


def _padded_paths(trie, some, device):
    """What scores are about, (R, T): tokens of the tree, and bool, which are no filling."""
    at_RT = pad_sequence([trie.path(i)[1:] for i in some], batch_first=True)
    inside_RT = torch.arange(at_RT.shape[1]) < trie.lengths[list(some)][:, None] - 1
    return at_RT.to(device), inside_RT.to(device)


def _wanted(trie, masks):
    """Which edges to score, (N,) bool: those that the mask of any sequence wants."""
    wanted_N = np.full(len(trie), masks is None)
    if masks is not None and len(masks) != len(trie.lengths):
        raise ValueError(f"{len(masks)} masks for {len(trie.lengths)} sequences; one for each")
    for i, mask in enumerate(() if masks is None else masks):
        mask = np.asarray(mask.cpu() if torch.is_tensor(mask) else mask, bool)
        path = trie.path(i)[1:].numpy()
        if mask.shape != path.shape:
            raise ValueError(f"mask {i} has shape {mask.shape}; its sequence wants ({len(path)},)")
        wanted_N[path[mask]] = True
    return wanted_N


def _grouped(keys, count):
    """[indices of the keys 0, of the keys 1, ..], each ascending."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.searchsorted(keys[order], np.arange(1, count))) if count else []


def require_tree_model(model, trie, /):
    """ValueError, before anything runs, if this model's tokens may mix otherwise than in (1).

    Each layer must call attention(q, k, v, layer=, scale=, window=, softcap=) once, with a number
    of its own; the last two may be left out.
    """
    if not isinstance(trie, TokenTrie):
        raise ValueError(f"expected a TokenTrie, came {type(trie).__name__}; TokenTrie(sequences)")
    takes = inspect.signature(model.hidden).parameters if hasattr(model, "hidden") else {}
    if not {"positions", "attention"} <= set(takes) or not hasattr(model, "logprobs"):
        raise ValueError(f"{type(model).__name__} must have .hidden(tokens, positions=, attention=)"
                         " and .logprobs(hidden, targets, temperature=), like models.Transformer")
    for name, module in model.named_modules():
        if isinstance(module, DROPOUT) and module.p and module.training:
            raise ValueError(f"{name} drops out with p = {module.p}: what a shared token loses "
                             "would differ between its sequences; call model.eval(), or set p = 0")
        if isinstance(module, MIXERS) or OTHER_MIXERS.search(type(module).__name__):
            raise ValueError(f"{name} is {type(module).__name__}: it mixes tokens in another way "
                             "than causal softmax attention; train the sequences one by one")
    config = getattr(model, "config", None)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layers of {sorted(kinds)}: not all are causal softmax attention")
    vocab = getattr(config, "vocab_size", math.inf)
    if len(trie) and (largest := int(trie.tokens.max())) >= vocab:
        i = next(i for i in range(len(trie.ends)) if largest in trie.tokens[trie.path(i)])
        raise ValueError(f"sequence {i} has the token id {largest}; ids are below {vocab}")
    longest = int(trie.lengths.max()) if len(trie) else 0
    if longest > (getattr(config, "max_position_embeddings", None) or math.inf):
        i, limit = int(trie.lengths.argmax()), config.max_position_embeddings
        raise ValueError(f"sequence {i} has {longest} tokens, the model's limit is {limit}; cut it")


# 6. Across ranks -----------------------------------------------------------------------------

class Cost(NamedTuple):
    """Modelled time of a tree, in units of a token: of a token, of a pair, of a token done again.

    pair: a layer's 4 M FLOPs a pair over 24 M^2 a token, for a width M of 1024. again: 1/3 with
    recompute=True (a forward is a third of a step), charged for each token above a fork.
    """

    token: float = 1.0
    pair: float = 1 / (6 * 1024)
    again: float = 0.0

    def of_path(self, lengths):
        return lengths * self.token + lengths * (lengths + 1) / 2 * self.pair


def partition(sequences, world, *, strategy="dfs", cost=None) -> list[list[int]]:
    """Which sequences each of `world` ranks trains on: indices, each once, the same on every rank.

    "dfs": stretches of the sorted sequences, so that shared prefixes stay together, cut where the
    largest modelled time (`Cost`) of a rank is least. "lpt": each sequence by itself, the longest
    first, to the rank with least so far. "round_robin": i to rank i % world. The last two pay for
    a prefix on every rank that has it. More ranks than sequences: some lists are empty.
    """
    if strategy not in ("dfs", "lpt", "round_robin") or world < 1:
        raise ValueError('strategy must be "dfs", "lpt" or "round_robin" and world 1 or more; '
                         f"came {strategy!r} and {world}")
    trie, cost = TokenTrie(sequences), cost or Cost()
    L, R = trie.lengths.numpy(), len(trie.lengths)
    if strategy == "round_robin":
        return [list(range(rank, R, world)) for rank in range(world)]
    if strategy == "lpt":
        shares, load, time = [[] for _ in range(world)], np.zeros(world), cost.of_path(L)
        for i in np.argsort(-time, kind="stable").tolist():
            rank = int(load.argmin())
            shares[rank].append(i)
            load[rank] += time[i]
        return shares
    whole = cost.of_path(L[trie._order])
    own = whole - cost.of_path(trie._shared)
    times = list(zip(*(x.tolist() for x in (whole, own, trie._shared)), strict=True))
    low, high = whole.max(initial=0.0), whole.sum()
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        enough = _stretches(times, cost.again, middle, world)
        low, high = (low, middle) if enough else (middle, high)
    cuts = _stretches(times, cost.again, high, world)
    return [[trie._order[k] for k in range(a, b)] for a, b in zip(cuts, cuts[1:], strict=False)]


def _stretches(times, again, most, world):
    """Ends of the longest stretches within a time, [0, .., R] of world + 1; [] if too many.

    The first sequence of a stretch pays for its whole path, another one for its own part, which it
    does not share with the one before; and of tokens above forks, for those it shares beyond what
    that one shares. times: (whole, own, tokens shared) of each sequence, sorted.
    """
    cuts, time, before = [0], 0.0, 0
    for k, (whole, own, shared) in enumerate(times):
        time += own + again * max(shared - before, 0)
        before = shared
        if time > most * (1 + 1e-12):
            cuts.append(k)
            time, before = whole, 0
            if len(cuts) > world:
                return []
    return cuts + [len(times)] * (world + 1 - len(cuts))


def redistribute(sequences, data, *, group=None, strategy="dfs", cost=None):
    """Deal all ranks' sequences out by `partition`: this rank's share of (sequences, data).

    sequences: this rank's own, data: anything that pickles, one for each (a tuple of advantages, a
    mask, an id to find it again); either may be []. Tensors come back on the CPU. ValueError on
    every rank if the lists of any do not fit. Every rank of the group calls it, once.
    """
    place, problem, arrays, mine = ring.ring_of(group), None, [], []
    try:
        arrays = [_checked(i, x, None) for i, x in enumerate(sequences)]
        mine = tree_map(lambda x: x.cpu() if torch.is_tensor(x) else x, list(data))
        if len(arrays) != len(mine):
            raise ValueError(f"{len(arrays)} sequences, but data for {len(mine)}; one for each")
    except (TypeError, ValueError) as error:
        problem = str(error)
    # COMM: one message, which every rank sends, also with nothing or with its error in it. All see
    # all sequences, as `partition` must; their data are of the same size and go along. Pinned by
    # tests/test_tree_ranks.py::test_redistribute_when_only_rank_0_has_data.
    held = [(problem, arrays, mine)] * place.world
    if place.world > 1:
        dist.all_gather_object(held, held[0], group=place.group)
    problems = [f"rank {rank}: {why}" for rank, (why, *_) in enumerate(held) if why]
    if problems:
        raise ValueError("; ".join(problems))
    every = [pair for _, *both in held for pair in zip(*both, strict=True)]
    shares = partition([x for x, _ in every], place.world, strategy=strategy, cost=cost)
    share = [every[i] for i in shares[place.rank]]
    return [torch.from_numpy(x) for x, _ in share], [x for _, x in share]


@torch.no_grad()
def sum_gradients(parameters, *, group=None):
    """.grad becomes the sum over the ranks; a rank that has none takes part with zeros."""
    place, works = ring.ring_of(group), []
    for p in parameters:
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if place.world > 1:
                works.append(dist.all_reduce(p.grad, group=place.group, async_op=True))
    for work in works:
        work.wait()


class _Sum(torch.autograd.Function):
    """Sum over the ranks of terms that only one has; the loss, so its gradient, all have."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# 7. Entry points -----------------------------------------------------------------------------

def tree_scores(model, trie, *, temperature=1.0, masks=None, max_tokens=None, lockstep=None,
                padded=False, group=None, method="ring", layout="zigzag"):  # fmt: skip
    """For each sequence, in input order, (L_i - 1,) log-probs, entropies and, of a critic, values.

    Differentiable with the graph of the whole tree. max_tokens: block by block, without gradients
    (call it under torch.no_grad; `tree_backward` trains so). masks, lockstep: see there. padded:
    instead a (R, longest) tensor of each, 0 behind a sequence's end. group: its ranks share the
    tokens out, attention goes through `ring_attention` (method, layout) with the tree's mask, all
    get all scores, and a loss that each computes alike gives each its tokens' part of the gradient.
    """
    require_tree_model(model, trie)
    if max_tokens is None and lockstep is None and len(trie):
        columns = _packed_scores(model, trie, temperature, masks, group, method, layout)
    elif (len(trie) or lockstep is not None) and (torch.is_grad_enabled() or group is not None):
        raise ValueError("max_tokens and lockstep are for forward passes without group: call "
                         "tree_scores under torch.no_grad(), or train with tree_backward")
    else:
        options = dict(temperature=temperature, masks=masks, lockstep=lockstep)
        engine = _Engine(model, trie, max_tokens=max_tokens, **options)
        engine.run()
        columns = engine.found_CN.unbind()
    if not len(trie):
        return [x_N.view(0, 0) for x_N in columns] if padded else []
    at_RT, inside_RT = _padded_paths(trie, range(len(trie.lengths)), columns[0].device)
    if padded:
        return [x_N[at_RT].masked_fill(~inside_RT, 0.0) for x_N in columns]
    at, sizes = at_RT[inside_RT], (trie.lengths - 1).tolist()
    return list(zip(*(x_N.index_select(0, at).split(sizes) for x_N in columns), strict=True))


def _packed_scores(model, trie, temperature, masks, group, method, layout):
    """(3) for each token of the tree given its parent, C of (N,), in one graph; 0 where none is."""
    place = ring.Ring(None, 0, 1) if group is None else ring.ring_of(group)
    own = ring.indices(len(trie), place.rank, place.world, layout)

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        if place.world == 1:
            return tree_attention(q, k, v, trie, scale=scale, window=window, softcap=softcap)
        options = dict(group=group, method=method, layout=layout, scale=scale, softcap=softcap)
        return ring.ring_attention(q, k, v, mask=trie.mask(window), **options)

    device = next(model.parameters()).device
    tokens_1n, positions_1n = (x[own][None].to(device) for x in (trie.tokens, trie.positions))
    hidden_nM = model.hidden(tokens_1n, positions=positions_1n, attention=attention)[0]
    here_N = np.isin(trie.parent.numpy(), own.numpy()) & _wanted(trie, masks)
    edges = torch.from_numpy(np.flatnonzero(here_N))
    scores = _scores(model, hidden_nM, own, trie, edges, temperature)
    whole = (x.new_zeros(len(trie)).index_copy(0, edges.to(device), x) for x in scores)
    return tuple(whole if place.world == 1 else (_Sum.apply(x, place.group) for x in whole))


def tree_logprobs(model, trie, **options):
    """Log-probs (L_i - 1,) of each sequence, in input order; options: those of `tree_scores`."""
    return [scores[0] for scores in tree_scores(model, trie, **options)]


class TreeResult(NamedTuple):
    """What `tree_backward` returns, detached."""

    loss: torch.Tensor  # (4), without (7)
    logprobs: list  # (L_i - 1,) of each sequence, in input order
    aux_loss: torch.Tensor | float = 0.0  # (7)
    router_counts: dict | None = None  # layer -> (E,): tokens each expert got, once a sequence


def tree_backward(model, trie, loss_fn, *, max_tokens=None, recompute=False, temperature=1.0,
                  aux_coef=0.0, masks=None, lockstep=None, batched=False,
                  check_finite=True) -> TreeResult:  # fmt: skip
    """Add the gradient of (4) and (7) to .grad, like loss.backward(), in O(path) memory.

    loss_fn(i, logprobs, entropy), for a critic also values, all (L_i - 1,): sequence i's loss, a
    tensor (), called once for each i, also where L_i = 1, as soon as the sequence's path is done;
    it may have no gradient, and it may not use what an earlier call was given. Item s of these is
    about x_s+1 given x_0 .. x_s; values are of that state. Hooks of parameters fire once a block.
    max_tokens: of a block; None: one block. recompute: keep K and V, not graphs, of the blocks
    above, and run them forward twice. aux_coef: coef of (7). masks: bool (L_i - 1,) of each
    sequence: the head runs where one wants it, the rest of what loss_fn gets is 0 and has no
    gradient; None: everywhere. lockstep: a group whose ranks' layers send to each other (experts;
    FSDP2 in one block): they make as many calls as each other, whatever their trees, see `overlay`;
    all call this at once, one without sequences too. batched: instead one call a block,
    loss_fn([i, ..], scores, ..) -> (), for the R sequences that end in it, with (R, T) scores, 0
    behind a sequence's end: many short ones are then as fast as one. check_finite: False lets NaN
    into the gradient, as loss.backward() would, for a caller who looks at that; no rank of a
    lockstep may stop by itself.

    ValueError where model or tree do not fit, NonFiniteLoss, or whatever loss_fn raises: .grad is
    then as it was.
    """
    require_tree_model(model, trie)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters or torch.is_inference_mode_enabled():
        raise ValueError("no parameter of the model requires a gradient here; use tree_scores")
    if lockstep is not None and check_finite:
        raise ValueError("with lockstep a rank cannot stop by itself: pass check_finite=False")
    engine = _Engine(model, trie, max_tokens=max_tokens, temperature=temperature, masks=masks,
                     aux_coef=aux_coef, lockstep=lockstep, batched=batched,
                     check_finite=check_finite)  # fmt: skip
    before, own = [p.grad for p in parameters], [None] * len(parameters)  # so after a failure too
    try:
        for p in parameters:
            p.grad = None
        with torch.enable_grad():
            engine.run(loss_fn, recompute)
        own = [p.grad for p in parameters]
    finally:
        for p, old, new in zip(parameters, before, own, strict=True):
            p.grad = old if new is None else new if old is None else old.add_(new)
    loss = torch.as_tensor(engine.loss, dtype=engine.found_CN.dtype)
    logprobs = [engine.found_CN[0, trie.path(i)[1:]] for i in range(len(trie.lengths))]
    return TreeResult(loss, logprobs, engine.aux_loss, engine.router_counts)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive: `now`, and at most, `peak`."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given, made = ([x.untyped_storage() for x in tree_leaves(some) if torch.is_tensor(x)]
                       for some in ((args, kwargs), out))  # fmt: skip
        for storage in made:
            key, size = storage._cdata, storage.nbytes()
            if key not in self.known and key not in [x._cdata for x in given]:
                self.known.add(key)
                self.now += size
                weakref.finalize(storage, self._freed, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key, size):
        self.known.discard(key)
        self.now -= size


class Memory(NamedTuple):
    """Bytes beyond the parameters and their .grad; what accumulates is held beside a .grad."""

    stack: int  # K, V, dK and dV of the deepest path of pieces
    activations: int  # graphs and what forward and backward hold for a moment


def predict_memory(model, trie, *, max_tokens=None, recompute=False) -> Memory:
    """What `tree_backward` would hold at its peak, were it called now.

    Measured: one block of 64 tokens and one of 128, forward and backward; a block of n tokens then
    counts by the straight line through both, and the walk over the tree's blocks is exact. Too
    much where the log-probs' chunks are full (`models.token_logprobs`).
    """
    require_tree_model(model, trie)
    small, large = _probe(model, 64), _probe(model, 128)
    (graph1, extra1, *_), (graph2, extra2, key_bytes, grad_bytes, layers) = small, large
    blocks, above, peak = plan(trie, max_tokens), {-1: 0.0}, 0.0
    inner, deepest = {block.parent for block in blocks}, 0
    for b, block in enumerate(blocks):
        share = len(block.tokens) / 64 - 1
        graph, extra = graph1 + share * (graph2 - graph1), extra1 + share * (extra2 - extra1)
        peak = max(peak, above[block.parent] + graph + extra + block.depth * grad_bytes / layers)
        above[b] = 0.0 if recompute and b in inner else above[block.parent] + graph
        deepest = max(deepest, block.depth + block.piece if block.piece else 0)
    columns = 2 * (2 + bool(_is_critic(model))) * 4 * len(trie)
    second = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return Memory(int(deepest * (key_bytes + grad_bytes)), int(max(peak, 0) + columns + second))


def _probe(model, n):
    """Bytes of the graph of n tokens, of its backward besides; of K and V a token, of dK and dV."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    engine = _Engine(model, TokenTrie([[0] * (n + 1)]), max_tokens=n)
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        engine.upstream_CN = torch.zeros_like(engine.found_CN)
        with torch.enable_grad(), LiveBytes() as live:
            work = engine.forward(0)
            graph = live.now
            engine.backward(0, work)
            extra = live.peak - graph
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
    held = list(engine.stack.kv.values())
    key_bytes = sum(x.nbytes for x in held) / n
    wide = torch.promote_types(held[0].dtype, torch.float32).itemsize / held[0].itemsize
    return graph - key_bytes * n, extra, key_bytes, key_bytes * wide, len(held)


# 8. check: every gradient against the definition ---------------------------------------------

class TinyModel(nn.Module):
    """What a tree asks of a model, small: GQA, q/k norm, RoPE, tied head, window, softcap."""

    def __init__(self, seed=0, *, vocab=11, layers=2, heads=4, groups=2, head_dim=4, width=16):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = (heads + 2 * groups) * head_dim, width
        shapes = {"embed": (vocab, width), "qkv": (layers, *sizes), "norm": (layers, 2, head_dim),
                  "o": (layers, width, heads * head_dim), "up": (layers, 2 * width, width),
                  "down": (layers, width, 2 * width)}  # fmt: skip
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
            setattr(self, name, nn.Parameter(drawn))
        self.heads, self.groups, self.forwarded = heads, groups, 0

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        self.forwarded += tokens_BS.numel()
        x_BSM = self.embed[tokens_BS]
        positions = torch.arange(x_BSM.shape[1])[None] if positions is None else positions
        frequencies = 0.1 ** torch.arange(0, self.norm.shape[2], 2).to(x_BSM)
        angles_B1Sf = positions[:, None, :, None] * frequencies
        turn_B1Sf = torch.polar(torch.ones_like(angles_B1Sf), angles_B1Sf)

        def rotated(x, norm):  # with q/k norm
            x = norm * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            return torch.view_as_real(torch.view_as_complex(x.unflatten(3, (-1, 2))) * turn_B1Sf)

        for layer in range(len(self.qkv)):
            parts = (x_BSM @ self.qkv[layer].T).unflatten(2, (-1, self.norm.shape[2]))
            q, k, v = parts.transpose(1, 2).split([self.heads, self.groups, self.groups], 1)
            q, k = (rotated(*x).flatten(3) for x in zip((q, k), self.norm[layer], strict=True))
            options = dict(scale=0.5, window=None if layer % 2 else 3, softcap=2.0)
            out = (attention or self.defined)(q, k, v, layer=layer, **options)
            x_BSM = x_BSM + out.transpose(1, 2).flatten(2) @ self.o[layer].T
            x_BSM = x_BSM + torch.tanh(x_BSM @ self.up[layer].T) @ self.down[layer].T
        return x_BSM

    @staticmethod
    def defined(q, k, v, /, *, layer, scale, window, softcap):
        visible = ring.Mask.causal(q.shape[2], window=window).dense()
        return ring.definition(q, k, v, visible, scale=scale, softcap=softcap)[0]

    def logprobs(self, hidden, targets, /, *, temperature=1.0):
        logp = (hidden @ self.embed.T / temperature).log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def forests(seed=0):
    """{name: sequences}: every shape of a tree that the engine could get wrong."""
    rng = np.random.default_rng(seed)

    def draw(n):
        return rng.integers(0, 11, n).tolist()

    stem, tips = draw(7), [[t] for t in range(5)]
    return {
        "one token": [[3], [3], [4]],
        "one sequence": [draw(9)],
        "duplicates": [stem, stem, draw(4), stem],
        "prefixes": [stem[:n] for n in (7, 3, 1, 7, 5)],
        "forks at 0": [[t, *draw(3)] for t in range(4)],
        "forks at 1": [[2, t, *draw(3)] for t in range(4)],
        "forks at the end": [stem + tip for tip in tips],
        "caterpillar": [stem[:n] + [9 - stem[n], *draw(2)] for n in range(1, 7)],
        "star": [stem + tip + draw(4) for tip in tips],
        "binary": [[*a, *b, *draw(2)] for a in ([1, 2], [1, 3]) for b in ([4, 5], [6, 5])],
        "forest": [rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(14)],
    }


def example_loss(i, logprobs, entropy, values=None):
    """PPO's clipped ratio with an advantage and a mask of i's own, entropy, and a sequence term."""
    n = torch.arange(len(logprobs)) + 1.0
    old, weight = (torch.sin(n * k + i).to(logprobs) for k in (3, 7))
    ratio = torch.exp(logprobs - logprobs.detach() + 0.3 * old)
    advantage, mask = math.cos(5 * i + 1), (weight > -0.5).to(logprobs)
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = -(clipped * mask).sum() - 0.01 * entropy.sum() + 0.1 * logprobs.sum().square()
    return loss if values is None else loss + ((values - old) * weight).square().sum()


def _outcome(model, way, *given, **options):
    """Loss, log-probs and every gradient after way(model, ..)."""
    model.zero_grad()
    loss, logprobs, *_ = way(model, *given, temperature=0.7, **options)
    grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    return [torch.as_tensor(loss), *logprobs, *(grad.clone() for grad in grads)]


def _one_graph(model, trie, loss_fn, *, temperature):
    """The whole tree packed, and one backward of it."""
    scores = tree_scores(model, trie, temperature=temperature)
    loss = torch.stack([loss_fn(i, *score) for i, score in enumerate(scores)]).sum()
    loss.backward()
    return loss.detach(), [score[0].detach() for score in scores]


def _tree_rows(model, cases):
    """(row, {column: the largest relative error of loss, log-probs and every gradient}).

    Columns: one graph; block sizes, each the worse of with and without recomputation.
    """
    for name, sequences in cases.items():
        sequences = [torch.tensor(x) for x in sequences]
        trie, truth = TokenTrie(sequences), _outcome(model, definition, sequences, example_loss)

        def error(way, trie=trie, truth=truth, **options):
            found = _outcome(model, way, trie, example_loss, **options)
            return max(ring.relative(a, b) for a, b in zip(found, truth, strict=True))

        line = {"packed": error(_one_graph)}
        sizes = {"1": 1, "2": 2, "3": 3, "5": 5, "path": int(trie.lengths.max()), "all": None}
        for column, size in sizes.items():
            ways = (dict(max_tokens=size, recompute=recompute) for recompute in (False, True))
            line[column] = max(error(tree_backward, **way) for way in ways)
        if isinstance(model, TinyModel):
            model.forwarded = 0
            tree_backward(model, trie, example_loss, max_tokens=2)
            line["twice"] = abs(model.forwarded - len(trie))  # tokens not forwarded just once
        yield name, line


def check() -> int:
    """Every error beside its budget; 1 if one is over."""
    torch.set_num_threads(1)
    tables, worst = {"by max_tokens": dict(_tree_rows(TinyModel(), forests()))}, 0.0
    tables["families"] = measure() and measure().family_rows()
    for name, rows in tables.items():
        if rows is None:
            print(f"\n{name}: SKIP, tests/measure_tree.py is not here; it shows those of models.py")
            continue
        columns = next(iter(rows.values()))
        print(f"\n{name:>24}" + "".join(f" {x:>11}" for x in columns) + "   budget 1e-10")
        for row, line in rows.items():
            values = [x if x == x else math.inf for x in line.values()]  # noqa: PLR0124, a NaN
            worst = max(worst, *values)
            ok = "ok" if max(values) <= 1e-10 else "FAILED"
            print(f"{row:>24}" + "".join(f" {x:11.1e}" for x in values) + f"   {ok}")
    print(json.dumps({"check": "tree_attention", "ok": worst <= 1e-10, "max_error": worst}))
    return int(worst > 1e-10)


# 9. main -------------------------------------------------------------------------------------

@functools.cache
def measure():
    """The module tests/measure_tree.py; None where this file is alone."""
    folder = Path(__file__).resolve().parent / "tests"
    if not (folder / "measure_tree.py").exists():
        return None
    sys.path.append(str(folder))
    return __import__("measure_tree")


def main(argv) -> int:
    """check is here; bench and plan are in tests/measure_tree.py. The exit code."""
    if argv == ["check"]:
        return check()
    if argv[:1] in (["bench"], ["plan"]) and measure():
        return measure().main(argv)
    print(__doc__, "" if measure() else "Here only check: tests/measure_tree.py is missing.")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Trains on sequences that share prefixes at the cost of their distinct tokens, exactly.

Sequences that begin alike (GRPO groups, branching or multi-turn rollouts) form a tree. A causal
model gives a shared token the same state in all of them, so each token of the tree is computed
once, forward and backward. The losses stay functions of whole sequences, and the gradient is that
of training on every sequence by itself. One knob, max_tokens, sets the memory: the whole tree at
once, or block by block, depth first, in the memory of one path.

    python tree_attention.py check             # every gradient against per-sequence autograd
    python tree_attention.py bench             # CPU seconds, peak memory, percent of the bound
    python tree_attention.py plan FILE.json    # a list of token lists: statistics, drawing, blocks

check needs ring_attention.py beside it; its rows for models.py, bench and plan need tests/ too.

What it must equal, for sequences x^1 .. x^R of L_i tokens each, and a loss f_i of each:

    (1)  token i of the tree sees token j  iff  j <= i < end_j:  its ancestors and itself
    (2)  h_t       =  the model's state of token t after its path, at position depth_t
    (3)  lp^i_s    =  log softmax(W h / temperature)[x^i_s],  h of token s - 1 of x^i,  0 < s < L_i,
                      and entropy^i_s of that distribution
    (4)  loss      =  sum_i f_i(lp^i, entropy^i), vectors of L_i - 1: entry s - 1 is about token s
    (5)  dloss/dlp_t  =  sum over the sequences i that hold t of  df_i/dlp^i at t
    (6)  dk_j, dv_j   =  the sum over the tokens that see j: of its own block, and of all below it
    (7)  aux       =  coef sum_i E / (K L_i^2) sum_e n_ie sum_{t in x^i} p_te

(7) is for mixture-of-experts layers, beside the f_i: p_te is the router's probability of expert e
at token t, and n_ie tokens of x^i chose e. A sequence that chose all equally often adds coef.

Why it is allowed. The state (2) depends on a token's ancestors alone. So one forward of the packed
tree, with every token attending by (1), is the forward of every path. A gradient is a sum over
sequences, and a token that many sequences share enters that sum once for each of them: that is
(5), and (6) is the same sum for keys and values. The state of a leaf is scored by nobody, so no f_i
sends a gradient through a leaf, and a leaf adds nothing to (6) of its ancestors; only (7) can.

    sequences  5 6 7 / 5 6 8 / 5 9      packed, DFS preorder      who sees whom
                                        index  0 1 2 3 4          0  x
        5 - 6 - 7                       token  5 6 7 8 9          1  x x
        |    `- 8                       depth  0 1 2 2 1          2  x x x
         `- 9                           end    5 4 3 4 5          3  x x . x
                                                                  4  x . . . x

The tree in blocks. A block is a piece of one path and, behind it, whole subtrees that hang from the
piece, as many as fit into max_tokens. Other blocks hang from the piece's end, so blocks form a tree
themselves. They are walked depth first. The keys and values of the pieces above the current
block lie on a stack whose index is the depth; a block attends to the stack and to itself, and the
two results are merged by log-sum-exp. Its backward adds its part of (6) to the stack's gradient,
and takes from it what the blocks below have added for its own piece.

    B = 1 batch   H, G query and key heads   D head_dim   M width   V vocabulary   E experts
    N tokens of the tree   n tokens of a block   p tokens above it, on the stack   m part of a piece
    R sequences, of L_i tokens   L longest path   T = L - 1, the longest row of log-probs
    e edges scored in a block, from its tokens to their children; an edge has the child's index
    r sequences that end in a block   K experts a token
    C = 2 or 3 scores of an edge: log-prob, entropy and, for a critic, value

    |                   | tokens forward, backward | held at the peak                             |
    | one by one        | sum L_i, sum L_i         | the graph of the longest sequence            |
    | one block         | N, N                     | the graph of N tokens                        |
    | blocks            | N, N                     | graphs of this block and of all above; stack |
    | blocks, recompute | N + N', N                | the graph of this block; stack               |

N' counts the tokens of the blocks that others hang from; the stack is K, V, dK, dV of one path.
Where graphs are held, a block that alone hangs from another is one call with it, since a cut there
would free nothing. With recompute the first forwards of four blocks of a path are one call.
Attention has sum_t (depth_t + 1) pairs, where the flat batch has sum_i L_i (L_i + 1) / 2.

How it deviates. Prefix Grouper shares one prefix; here it is any tree. Tree Training packs a tree
that fits into memory; AReaL-DTA walks leaf by leaf with one segment at a time. Blocks are both, and
packing sibling subtrees together keeps the matrices large. The first token behind a fork is scored
in its parent's block, so there is no cache of forks. A rank without sequences is ordinary: loss 0.

Not here: dropout; mixers other than causal softmax attention; batches of trees (a forest is one
tree); blocks across the ranks of one sequence (the whole tree at once: `tree_logprobs(group=)`).

References: AReaL-DTA arXiv:2602.00482; Tree Training arXiv:2511.00413; Prefix Grouper
arXiv:2506.05433; FlashMask arXiv:2410.01359; (7): DeepSeek-V3 arXiv:2412.19437, equations 17-20.
"""

import contextlib
import inspect
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

import ring_attention as ring

# 1. The definition ---------------------------------------------------------------------------


def definition(model, sequences, loss_fn, /, *, temperature=1.0):
    """Computes (3), (4) and the gradient one sequence at a time; all below must equal it.

    sequences: (L_i,) int64 tensors on the model's device. loss_fn: as in `tree_backward`.
    Returns the loss () and a list of log-probs (L_i - 1,), detached. Adds to .grad.
    """
    total_loss = 0.0
    logprobs = []

    for i, x_L in enumerate(sequences):
        hidden_LM = model.hidden(x_L[None])[0]

        # The state of a token predicts the token behind it. So L tokens have L - 1 log-probs, and
        # the last state, which predicts a token that nobody sampled, is scored by nobody.
        scored_lM = hidden_LM[:-1]
        scores = list(model.logprobs(scored_lM, x_L[1:], temperature=temperature))
        if _is_critic(model):
            scores.append(model.values(scored_lM))

        # Gradients of all sequences add up in .grad, and nothing is averaged. A token that many
        # sequences share is computed anew in each of them here: this is the cost to be saved.
        loss = loss_fn(i, *scores)
        if loss.requires_grad:
            loss.backward()
        total_loss = total_loss + loss.detach()
        logprobs.append(scores[0].detach())

    return total_loss, logprobs


# 2. The tree of tokens -----------------------------------------------------------------------


class TokenTrie:
    """The tree of all prefixes of some sequences, packed in DFS preorder: first a token, then all
    that hangs from it, branch after branch.

    sequences: 1-D integer tensors (or lists) of 1 token or more, ids >= 0; none is changed.

    Sequences that are equal to others, or prefixes of them, end inside the tree and add no token to
    it. All tensors are int64 and on the CPU:

        tokens (N,)        token ids           positions (N,)    depth, which is what RoPE wants
        subtree_end (N,)   the index after a token's last descendant
        parent (N,)        index of the token before, -1 for a first one
        ends (R,)          index of each sequence's last token     lengths (R,)   L_i

        paths              the paths of all sequences, end to end: that of i begins at begins[i]

    Of a fork's branches the largest comes first. order: the sequences' numbers as their paths end.
    shared (R,), numpy: the first tokens that each of them has in common with the one before it.

    A ValueError names the sequence that is no sequence of tokens. The cost is two sorts, O(total
    tokens) in numpy, and short Python loops over sequences, not over tokens.
    """

    def __init__(self, sequences):
        arrays = _arrays_of_ids(sequences)
        lengths = np.array([len(x) for x in arrays], np.int64)
        begins = lengths.cumsum() - lengths
        joined = np.concatenate([*arrays, np.zeros(0, np.int64)])

        # Sort the sequences like the words of a dictionary: those that begin alike become
        # neighbours. As bytes, the most significant first, ids >= 0 sort alike, and much faster.
        words = joined.astype(">i8").tobytes()
        keys = [words[8 * a : 8 * (a + n)] for a, n in zip(begins.tolist(), lengths.tolist())]
        order = sorted(range(len(arrays)), key=keys.__getitem__)

        # In this order a sequence shares with its neighbour all that it shares with any sequence
        # before it. What it does not share are new tokens, and the new tokens of one sequence
        # after another are the tree in DFS preorder:
        #
        #     sorted     5 6 7    5 6 8    5 9
        #     shared       0        2       1
        #     new        5 6 7        8      9       the tree's tokens: 5 6 7 8 9
        shared = _common_prefixes(joined, begins[order], lengths[order])

        # Branches may change places as a whole. The largest one of a fork comes first.
        self.order, self.shared = _largest_branches_first(order, lengths, shared)

        # All paths end to end, in this order: J pairs of a sequence and one of its tokens. place_J
        # says where the pair's token stands in `joined`.
        count = lengths[self.order]
        row_J = np.repeat(np.arange(len(arrays)), count)
        depth_J = _runs(np.zeros_like(count), count)
        place_J = begins[self.order][row_J] + depth_J
        is_new_J = depth_J >= self.shared[row_J]

        # A new token has the next index of the tree. One that is shared is the token that the path
        # before has at this depth, so in the order of depths it is the last one that was new:
        #
        #     paths    5 6 7   5 6 8   5 9      by depth    5 5 5   6 6 9   7 8
        #     new      x x x   . . x   . x      new         x . .   x . x   x x
        #     index    0 1 2   0 1 3   0 4      index       0 0 0   1 1 4   2 3
        by_depth = np.argsort(depth_J, kind="stable")
        last_new_J = np.maximum.accumulate(np.where(is_new_J[by_depth], np.arange(len(row_J)), 0))
        path_J = np.empty_like(depth_J)
        path_J[by_depth] = (is_new_J.cumsum() - 1)[by_depth][last_new_J]

        # A token's parent stands before it on its path. last_row is the last path that holds the
        # token, and its subtree ends where the new tokens of the next path begin.
        new = np.flatnonzero(is_new_J)
        tokens = joined[place_J[new]]
        positions = depth_J[new]
        parent = np.where(positions > 0, path_J[new - 1], -1)
        last_row = np.zeros(len(new), np.int64)
        np.maximum.at(last_row, path_J, row_J)  # of all its rows the last
        subtree_end = np.append(0, (count - self.shared).cumsum())[last_row + 1]

        # The paths again in input order, end to end as `joined` is.
        paths = np.empty_like(joined)
        paths[place_J] = path_J
        ends = paths[begins + lengths - 1]
        self.paths = _int64(paths)
        self.begins = _int64(begins)
        self.tokens = _int64(tokens)
        self.positions = _int64(positions)
        self.subtree_end = _int64(subtree_end)
        self.parent = _int64(parent)
        self.ends = _int64(ends)
        self.lengths = _int64(lengths)
        self.cache = {}  # what is made once, for all layers

    def __len__(self):
        return len(self.tokens)

    def path(self, i):
        """(L_i,) int64: the tokens of sequence i, so that tokens[path(i)] is the sequence."""
        return self.paths[self.begins[i] :][: self.lengths[i]]

    def mask(self, window=None):
        """(1) as a `ring_attention.Mask`; a window counts in depth, not in places of the order."""
        # In preorder a token's descendants are the indices up to its subtree_end. So the rows that
        # see token j are one interval, j .. end_j - 1, and the mask is two integers a token. It
        # keeps the tiles that it finds, so that all layers share one search for them.
        if "mask" not in self.cache:
            self.cache["mask"] = ring.Mask.tree(self.subtree_end, self.positions)  # (1)
        return self.cache["mask"].with_window(window)

    def stats(self, flops_per_token=None, flops_per_pair=None):
        """What sharing saves, as `Stats`; the two costs are what a model spends on each."""
        return _stats(self, flops_per_token, flops_per_pair)


# 3. Attention over the packed tree -----------------------------------------------------------


def tree_attention(q, k, v, /, trie, *, scale=None, window=None, softcap=None, backend=None):
    """Attention of every token to its ancestors and itself, (1), differentiable.

    q: (1, H, N, D); k, v: (1, G, N, D), in the order of trie.tokens.
    trie: the packed tree.
    window: how many tokens, itself and the nearest ancestors, a token sees; None: all of them.
    scale, softcap, backend: as in `ring_attention.attend`, with its dtypes and errors.

    Returns (1, H, N, D) in q's dtype.
    """
    # Where all paths are short, tiles of queries and keys would be many and nearly empty.
    if backend is None and _chunks_pay(q, k, v, trie, softcap):
        return _chunked_attention(q, k, v, trie, scale, window)

    # A segment against itself is a causal triangle of contiguous rows, and everything below a
    # segment sees all of it: a full rectangle. The mask's bounds find both, and torch's fused
    # kernels compute them without a mask and without a gathered copy of any key:
    #
    #     5 6 7 8 / 5 6 9      0  x               rows 0 1 against keys 0 1: a triangle
    #                          1  x x             rows 2 3 4 against keys 0 1: a rectangle
    #                          2  x x x           rows 2 3 against keys 2 3: a triangle
    #                          3  x x x x         row 4 against key 4
    #                          4  x x . . x       row 4 against keys 2 3: never computed
    mask = trie.mask(window)
    return ring.attend(q, k, v, mask, scale=scale, softcap=softcap, backend=backend)[0]


# 4. One graph of the whole tree, on one rank or on several -----------------------------------


def _score_edges(model, hidden_nM, tokens_n, trie, edges_e, temperature):
    """(3) of some edges: log-probs, entropies and, of a critic, values, (e,) each.

    model, trie, temperature: as in `tree_backward`.
    hidden_nM: the states of some tokens.
    tokens_n: which tokens of the tree these are, ascending.
    edges_e: the edges, whose parents are among these tokens.
    """
    # Edge t scores token t, given its parent's state. The head is the largest matrix, so it runs at
    # the parents of these edges and nowhere else. A token at a fork stands once for each child:
    #
    #     5 6 7 / 5 6 8 / 5 9      edges    1 2 3 4      edge 2: token 7 given the state of 6
    #                              parents  0 1 1 0      edge 3: token 8 given the same state
    device = hidden_nM.device
    rows_e = torch.searchsorted(tokens_n, trie.parent[edges_e]).to(device)
    scored_eM = hidden_nM[rows_e]
    targets_e = trie.tokens[edges_e].to(device)
    scores = model.logprobs(scored_eM, targets_e, temperature=temperature)  # (3)
    if _is_critic(model):
        return (*scores, model.values(scored_eM))
    return tuple(scores)


def _packed_scores(model, trie, temperature, masks, group, method, layout, balance):
    """(3) of every edge in one graph, C of (N,); 0 where no edge is. All ranks get all scores.

    model, trie, temperature, masks: as in `tree_backward`; balance: as in `tree_scores`.
    group: None for this rank alone; else its ranks share the packed tokens out.
    method, layout: of `ring_attention`.
    """
    place = ring.Ring(None, 0, 1) if group is None else ring.ring_of(group)

    # A rank holds some of the packed tokens; the mask (1) is about indices of the whole tree. So a
    # tree crosses ranks as any one sequence does: keys and values travel, queries stay.
    tokens_n = ring.indices(len(trie), place.rank, place.world, layout)

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        if place.world == 1:
            return tree_attention(q, k, v, trie, scale=scale, window=window, softcap=softcap)
        options = dict(group=group, method=method, layout=layout, scale=scale, softcap=softcap)
        return ring.ring_attention(q, k, v, mask=trie.mask(window), **options)

    # Positions are depths, not places in the packed order. So RoPE turns a token's query and key as
    # it would in each of its sequences.
    device = next(model.parameters()).device
    options = {} if balance is None else {"balance": balance}
    hidden_1nM = model.hidden(  # (2)
        trie.tokens[tokens_n][None].to(device),
        positions=trie.positions[tokens_n][None].to(device), attention=attention, **options
    )  # fmt: skip

    # An edge is scored where its parent's state is: on exactly one rank. The sum over ranks of rows
    # that are 0 elsewhere gives all scores to all.
    is_here = np.isin(trie.parent.numpy(), tokens_n.numpy()) & _wanted_edges(trie, masks)
    edges_e = torch.from_numpy(np.flatnonzero(is_here))
    columns = []
    for score_e in _score_edges(model, hidden_1nM[0], tokens_n, trie, edges_e, temperature):
        column_N = score_e.new_zeros(len(trie)).index_copy(0, edges_e.to(device), score_e)
        columns.append(_sum_over_ranks(column_N, place))
    return tuple(columns)


# 5. Blocks, and the stack of keys and values above them --------------------------------------


class Block(NamedTuple):
    """A part of the tree that one call of the model computes.

    A block is a stretch of one path and then whole subtrees that hang from it, or whole subtrees
    alone. If other blocks hang from the stretch's end, it is the block's piece, and its keys go
    onto the stack. Otherwise it needs no place there, and the piece is 0. Six tokens, cut with
    max_tokens = 4:

        index   0   1   2   3
        token   5 - 6 - 7 - 8      block 0: tokens 0 1 2 3, piece 2, parent -1, depth 0
        token        `- 9 - 3      block 1: tokens 4 5,     piece 0, parent 0,  depth 2
        index           4   5

    The backward of block 1 begins at edge 5, so token 4 alone adds to the gradient of the keys 0
    and 1: token 5 is a leaf. Without it block 1 would have no edge to score, and no backward.
    """

    tokens: np.ndarray  # (n,) indices into the tree, ascending
    piece: int
    parent: int  # index of the block whose piece lies directly above, -1 for none
    depth: int  # of the first token: how many tokens lie on the stack above this block


def plan(trie, max_tokens=None) -> list[Block]:
    """Blocks of at most max_tokens tokens, each listed after its parent; None: all in one block.

    Subtrees that hang from the end of one piece and fit into a block are packed together, first
    into what is left of the piece's own block. One that no longer fits begins a new block, and
    nothing goes back to an earlier one. With max_tokens = 4 a path of 10 tokens becomes the blocks
    0-3, 4-7 and 8-9. ValueError if max_tokens is no positive integer.
    """
    _require_block_size(max_tokens)
    N = len(trie)
    if N == 0:
        return []
    if max_tokens is None or N <= max_tokens:
        return [Block(np.arange(N), 0, -1, 0)]

    # children[t]: the first tokens of all that hangs from token t, a fork; t = -1: from no token.
    children, stops = segments(trie)
    end = trie.subtree_end.numpy()
    positions = trie.positions.numpy()
    blocks = []

    # To do: a token that segments hang from, and the block whose piece ends with it. At first the
    # roots, which hang from nothing. A list does not recurse, however deep the forks are.
    todo = [(-1, -1)]
    while todo:
        token, holder = todo.pop()
        depth = int(positions[token]) + 1 if token >= 0 else 0
        small = [x for x in children.get(token, []) if end[x] - x <= max_tokens]
        large = [x for x in children.get(token, []) if end[x] - x > max_tokens]

        # A subtree is a stretch of indices, child .. end - 1. In the example of `Block` the subtree
        # 2 3 still fits into block 0, the holder, behind its piece. The subtree 4 5 no longer does,
        # and gets a block whose parent is the holder.
        subtrees = [np.arange(child, end[child]) for child in small]
        _pack_subtrees(blocks, holder, subtrees, max_tokens, depth)

        # A larger one begins with a piece, from which the next piece hangs. A piece goes on past
        # forks, along the largest branch, where all else that hangs there fits into the block. At
        # the first fork where it does not the piece ends, and the fork is dealt with later.
        for child in large:
            stop = child
            parent = holder
            while stop == child or stop < stops[stop - 1]:  # until a piece ends at such a fork
                first = stop
                stop, tokens = _longest_piece(first, max_tokens, children, stops, end)
                blocks.append(Block(tokens, stop - first, parent, int(positions[first])))
                parent = len(blocks) - 1
            todo.append((stop - 1, parent))

    # A piece that no block hangs from needs no place on the stack.
    inner = {block.parent for block in blocks}
    return [x if b in inner else x._replace(piece=0) for b, x in enumerate(blocks)]


class Stack:
    """Keys and values of the pieces above the current block, and their gradients, by layer.

    The index is the depth: a walk that goes depth first has one path above it at any time, and a
    path has one token at each depth. So memory grows with the longest path, not with the tree.
    limit: the depth of the deepest piece's end.
    """

    def __init__(self, limit):
        self.limit = limit
        self.kv = {}  # layer -> (2, 1, G, capacity, D): keys and values
        self.grads = {}  # layer -> the same of their gradients, in float32 or better

    def put(self, layer, depth, k_1GnD, v_1GnD, piece):
        """Writes the keys and values of a piece over what another path had at these depths."""
        if piece:
            depths = slice(depth, depth + piece)
            kv_21GpD = _grown(self.kv, layer, k_1GnD, depths.stop, self.limit)
            kv_21GpD[0, :, :, depths] = k_1GnD[:, :, :piece].detach()
            kv_21GpD[1, :, :, depths] = v_1GnD[:, :, :piece].detach()

    def add(self, layer, first, dk_1GpD, dv_1GpD):
        """Adds a block's part of (6) for the tokens above it, from depth `first` on."""
        # NUMERICS: the sum over all blocks below is in float32 or better, and is cast once, with
        # the block's own. Pinned by tests/test_tree.py::test_bf16_is_as_good_as_flat_bf16.
        depths = slice(first, first + dk_1GpD.shape[2])
        grad_21GmD = _grown(self.grads, layer, dk_1GpD, depths.stop, self.limit)
        grad_21GmD[0, :, :, depths] += dk_1GpD
        grad_21GmD[1, :, :, depths] += dv_1GpD

    def give(self, layer, block, dk_1GnD, dv_1GnD):
        """Adds to a block's dk and dv what all blocks below have added for its piece."""
        # Every block below that has a backward is through with it, so for the piece the sum is
        # complete. Blocks in which nothing is scored (single leaves) have none. If all below are
        # such, the stack's gradient may never have grown to the end of the piece, or at all: then
        # what lies here is shorter than the piece, or empty, and the rest of it is 0.
        if layer not in self.grads or not block.piece:
            return
        grad_21GmD = self.grads[layer][:, :, :, block.depth : block.depth + block.piece]
        m = grad_21GmD.shape[3]
        dk_1GnD[:, :, :m] += grad_21GmD[0]  # (6), from all blocks below
        dv_1GnD[:, :, :m] += grad_21GmD[1]
        grad_21GmD.zero_()  # the next path will use these depths, and must not inherit it


class _BlockAttention(torch.autograd.Function):
    """Attention of a block to itself and to the stack above it; the backward is (6).

    stack, layer: the `Stack`, and the number under which it holds this layer's keys and values.
    block, masks: the `Block`, and what its tokens see, as `BlockMasks`. masks.first is the least
        depth on the stack that a window leaves in sight, 0 without a window.
    kernel: how tiles are computed, a `ring_attention.Kernel`.
    """

    @staticmethod
    def forward(ctx, q_1HnD, k_1GnD, v_1GnD, stack, layer, block, masks, kernel):
        own = q_1HnD, k_1GnD, v_1GnD, masks.inside, kernel
        so_far = ring.forward_tiles(*own, None, block.depth > 0)

        # A softmax over two sets of keys is the mean of the softmaxes over each, weighted by how
        # much of the total each holds, which is what the log-sum-exp says.
        if block.depth:
            kv_21GpD = stack.kv[layer][:, :, :, masks.first : block.depth]
            so_far = ring.forward_tiles(q_1HnD, *kv_21GpD, masks.stack, kernel, so_far)
        out_1HnD, lse_1Hn = so_far

        # The stack's keys are not saved. When the backward comes they will lie there still: until
        # then the walk writes only to the depths of this block and to greater ones.
        out_1HnD = out_1HnD.to(q_1HnD.dtype)
        ctx.save_for_backward(q_1HnD, k_1GnD, v_1GnD, out_1HnD, lse_1Hn)
        ctx.setting = stack, layer, block, masks, kernel
        return out_1HnD

    @staticmethod
    def backward(ctx, dout_1HnD):
        return _BlockAttention.gradients(dout_1HnD, ctx.saved_tensors, *ctx.setting)

    @staticmethod
    def gradients(dout_1HnD, saved, stack, layer, block, masks, kernel):
        # What `forward` has saved comes as it was read: a checkpoint lets it be read only once.
        q_1HnD, k_1GnD, v_1GnD, out_1HnD, lse_1Hn = saved
        dq_1HnD, dk_1GnD, dv_1GnD = ring.backward_tiles(
            dout_1HnD, q_1HnD, k_1GnD, v_1GnD, out_1HnD, lse_1Hn, None, masks.inside, kernel
        )

        # out and lse are those over all keys, so the gradients of the two parts add up. Of the keys
        # above, this block has one part and other blocks have more: the stack holds the sum.
        if block.depth:
            kv_21GpD = stack.kv[layer][:, :, :, masks.first : block.depth]
            above = dout_1HnD, q_1HnD, *kv_21GpD, out_1HnD, lse_1Hn, None, masks.stack
            dq_1HnD, dk_1GpD, dv_1GpD = ring.backward_tiles(*above, kernel, dq_1HnD)
            stack.add(layer, masks.first, dk_1GpD, dv_1GpD)  # (6), for the tokens above

        # And of our own keys the blocks below had a part.
        stack.give(layer, block, dk_1GnD, dv_1GnD)
        dtype = q_1HnD.dtype
        return dq_1HnD.to(dtype), dk_1GnD.to(dtype), dv_1GnD.to(dtype), None, None, None, None, None


# 6. The engine: blocks depth first -----------------------------------------------------------


class _Forwarded(NamedTuple):
    """What one block's forward leaves: with a graph behind it, what the block's backward needs."""

    scores: tuple  # C of (e,), of the edges that leave this block's tokens
    routing: object  # what the sparse layers' routers did, for (7)
    hidden_1nM: torch.Tensor | None  # only where the backward has to begin at the states


class _Engine:
    """Walks the tree of blocks: forward, losses of finished sequences, the blocks below, backward.

        block 0 - block 1      forward 0: puts the keys and values of its piece on the stack
                `- block 2     forward 1, backward 1: sees them, and adds to their gradient
                               forward 2, backward 2: the same
                               backward 0: takes the gradient from the stack

    Block 0 has to wait: only when the walk comes back up have all sequences that share its tokens
    had their losses, so that (5) and (6) are complete for it. scores_CN[c, t] is score c of edge t,
    (3); dscores_CN is (5). as_planned: of `blocks_to_walk`; the rest is as in `tree_backward`.
    """

    def __init__(self, model, trie, *, max_tokens=None, recompute=False, as_planned=True,
                 temperature=1.0, masks=None, aux_coef=0.0, lockstep=None, batched=False,
                 check_finite=True):  # fmt: skip
        self.model = model
        self.trie = trie
        self.recompute = recompute
        self.temperature = temperature
        self.lockstep = lockstep
        self.batched = batched
        self.check_finite = check_finite
        self.blocks = blocks_to_walk(trie, max_tokens, as_planned, lockstep)

        # Edge t scores token t from its parent's state, so it belongs to the parent's block, also
        # where token t itself lies in a block below.
        block_of = np.zeros(len(trie), np.int64)
        for b, block in enumerate(self.blocks):
            block_of[block.tokens] = b
        parent = trie.parent.numpy()
        edges = np.flatnonzero((parent >= 0) & _wanted_edges(trie, masks))
        edges_by_block = _grouped(block_of[parent[edges]], len(self.blocks))
        self.edges = [torch.from_numpy(edges[indices]) for indices in edges_by_block]

        # ending_in[b]: the sequences whose last token is in block b. Once it has run, their losses
        # can be computed: all of their edges belong to that block and to those above it.
        self.ending_in = _grouped(block_of[trie.ends.numpy()], len(self.blocks))

        # The way down goes from a block to its children, in the order of `plan`.
        self.roots, self.children = children_of_blocks(self.blocks)
        self.runs = runs_of_blocks(self.blocks, self.children, recompute, lockstep)

        # NUMERICS: losses and the sums (5) are in the model's dtype, float32 at least. Pinned by
        # tests/test_tree.py::test_the_loss_is_summed_in_the_models_precision.
        weight = next(model.parameters())
        self.device = weight.device
        dtype = torch.promote_types(weight.dtype, torch.float32)
        C = 3 if _is_critic(model) else 2
        self.scores_CN = torch.zeros(C, len(trie), dtype=dtype, device=self.device)
        self.dscores_CN = None
        # Which of the C scores some loss depends on. Log-probs always count, so that every block
        # with a score has a backward and can take what blocks below have added for its piece.
        self.is_used = [True, False, False]
        self.loss = 0.0

        self.stack = Stack(max((b.depth + b.piece for b in self.blocks if b.piece), default=0))
        self.balance = TreeBalance(trie, self.blocks, self.ending_in, aux_coef, self.device)
        self.takes_balance = "balance" in inspect.signature(model.hidden).parameters

    def run(self, loss_fn=None):
        """Without loss_fn: forward only, under no_grad, and no memory for any gradient."""
        if loss_fn is not None:
            self.dscores_CN = torch.zeros_like(self.scores_CN)

        # Each block is met twice: on the way down (forward) and on the way up (backward), when all
        # that was put on the list after it is done. A list does not recurse, however deep the tree.
        todo = [("down", b, None) for b in reversed(self.roots.tolist())]
        ahead = set()  # blocks that the walk need not run forward when it comes down to them
        while todo:
            way, b, forwarded = todo.pop()
            if way == "up":
                if forwarded is None:
                    forwarded = self.forward([b])  # again, and now with a graph
                self.backward(b, forwarded)
                continue

            # With recompute, a block that others hang from keeps no graph while they run, only its
            # keys and values on the stack, and a run of such blocks is one call. A block with none
            # below goes backward next: it keeps its graph.
            children = self.children[b].tolist()
            keep = loss_fn is not None and not (self.recompute and children)
            if b not in ahead:
                with torch.set_grad_enabled(keep):
                    forwarded = self.forward(self.runs[b])
                self.record(self.runs[b], forwarded)
                ahead.update(self.runs[b])

            # The sequences that end here have all their scores now. No block of their paths has
            # gone backward yet, so their part of (5) comes in time.
            if loss_fn is not None:
                self.finish_sequences(b, loss_fn)
                todo.append(("up", b, forwarded if keep else None))
            todo += [("down", child, None) for child in reversed(children)]

    def forward(self, run):
        """Calls the model for a run of blocks, with an attention that knows the stack; scores."""
        block = joined([self.blocks[b] for b in run])
        if not len(block.tokens):
            return _stand_in(self.model, self.device)  # a block that only other ranks have
        routing = self.balance.routing(block)
        guard = _LayerGuard(self.model)
        masks = {}  # window -> masks: layers with one window share them, and the tiles found

        # The model does not know that it runs on a tree: it calls this once in each layer. A piece
        # is on the stack before any block below runs, since those are entered after this one.
        def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
            guard.enter(layer)
            if window not in masks:
                masks[window] = block_masks(self.trie, block, window)
            self.stack.put(layer, block.depth, k, v, block.piece)
            kernel = ring.Kernel(ring.choose_backend(q, softcap=softcap), float(scale), softcap)
            given = self.stack, layer, block, masks[window], kernel
            return which_attention(q, k, v, masks[window], kernel).apply(q, k, v, *given)

        # Positions are depths, so that a piece's keys are right for every block below.
        tokens_n = torch.from_numpy(block.tokens)
        options = {"balance": routing} if self.takes_balance else {}
        hidden_1nM = self.model.hidden(  # (2)
            self.trie.tokens[tokens_n][None].to(self.device),
            positions=self.trie.positions[tokens_n][None].to(self.device),
            attention=attention, **options
        )  # fmt: skip
        guard.leave()
        self.balance.require_router(routing)

        edges_e = torch.cat([self.edges[b] for b in run])
        scores = ()  # a block of leaves has no edge to score
        if len(edges_e):
            scores = _score_edges(
                self.model, hidden_1nM[0], tokens_n, self.trie, edges_e, self.temperature
            )

        # A backward begins at the scores, and the states can be freed. Two kinds of blocks may have
        # no scores and must go backward all the same: a piece, since blocks below add to its keys
        # and values (`masks` may want no score of it); and under lockstep any block, since other
        # ranks wait for the messages of its layers. These keep the states, and begin there.
        begins_at_states = (block.piece and not scores) or self.lockstep is not None
        return _Forwarded(scores, routing, hidden_1nM if begins_at_states else None)

    def record(self, run, forwarded):
        """Writes scores where the losses of all sequences through these blocks will find them."""
        edges_e = torch.cat([self.edges[b] for b in run]).to(self.device)
        for row_N, score_e in zip(self.scores_CN, forwarded.scores, strict=False):
            row_N[edges_e] = score_e.detach().to(row_N.dtype)
        self.balance.count(run, forwarded.routing)

    def finish_sequences(self, b, loss_fn):
        """(4) and (5) of the sequences that end in this block."""
        # One call of the loss for each sequence, or one for a list of all, which costs less Python.
        calls = self.ending_in[b].tolist()
        if self.batched and calls:
            calls = [calls]

        results = [self._call_loss(called_for, loss_fn) for called_for in calls]
        if self.check_finite and calls:
            _require_finite(calls, results)
        for loss, _ in results:
            self.loss = self.loss + loss  # (4)

    def _call_loss(self, called_for, loss_fn):
        """One call of the loss: its value, detached, and whether it and its gradient are finite."""
        # The scores along each path, in order, gathered from wherever their blocks wrote them; 0
        # behind a path's end. Two sequences through token t both read scores_CN[:, t]. In the tree
        # at the top 5 6 8 has the path 0 1 3 and the edges 1 3: entries 0 and 1 of what f_i gets.
        paths = PathEdges(self.trie, called_for, self.device)

        # They are leaves of a graph of their own. The loss's backward ends here, before any block's
        # graph: a block must be gone through once, not once for every sequence that shares it.
        leaves = [paths.gather(row_N).requires_grad_() for row_N in self.scores_CN]
        with torch.enable_grad():
            loss = loss_fn(called_for, *leaves)
            loss = _one_number(loss, self.scores_CN, called_for)
            if loss.requires_grad:
                loss.backward()

        # What the loss left in its leaves goes back to the edges, and adds up where paths meet. A
        # score that no loss uses (often the entropy) has no gradient, which is not a gradient of 0:
        # that would send the head's backward through the whole vocabulary a second time.
        loss = loss.detach().to(self.scores_CN)
        finite = [loss.isfinite()]
        for c, leaf in enumerate(leaves):
            if leaf.grad is not None:
                dscores = paths.inside(leaf.grad)
                self.dscores_CN[c].index_add_(0, paths.edges, dscores)  # (5)
                self.is_used[c] = True
                finite.append(dscores.isfinite().all())
        return loss, torch.stack(finite).all()

    def backward(self, b, forwarded):
        """The gradient through this block: of all losses that its tokens had a part in."""
        # By now every sequence through this block has had its loss, so dscores_CN is complete at
        # its edges. One backward through the graph serves them all. On its way _BlockAttention
        # takes from the stack what the blocks below have added, layer by layer.
        edges_e = self.edges[b].to(self.device)
        outputs, grads = [], []
        for c, score_e in enumerate(forwarded.scores):
            if self.is_used[c] and score_e.requires_grad:
                outputs.append(score_e)
                grads.append(self.dscores_CN[c, edges_e].to(score_e.dtype))

        # The routers' loss is a sum over tokens too, so it joins the same backward.
        for router_nE, drouter_nE in self.balance.gradients(b, forwarded.routing):  # (7)
            outputs.append(router_nE)
            grads.append(drouter_nE)

        # Where nothing is scored, the backward begins at the states with a gradient of 0, only to
        # reach the layers' keys and values.
        hidden_1nM = forwarded.hidden_1nM
        begun = any(score_e.requires_grad for score_e in forwarded.scores)
        if hidden_1nM is not None and hidden_1nM.requires_grad and not begun:
            outputs.append(hidden_1nM)
            grads.append(torch.zeros_like(hidden_1nM))

        if outputs:
            torch.autograd.backward(outputs, grads)


# 7. The public calls -------------------------------------------------------------------------


def tree_scores(model, trie, *, temperature=1.0, masks=None, max_tokens=None, lockstep=None,
                padded=False, group=None, method="ring", layout="zigzag",
                balance=None):  # fmt: skip
    """For each sequence, in input order: log-probs, entropies and, of a critic, values, (L_i - 1,).

    model, trie, temperature, masks, lockstep: as in `tree_backward`.
    max_tokens: None gives one graph of the whole tree, differentiable. A number computes block by
        block, without gradients: call it under torch.no_grad.
    padded: return one (R, longest) tensor of each score instead, 0 behind a sequence's end.
    group: its ranks share the tokens of the tree out, and all get all scores. Every rank then
        computes the same loss from them. Its .grad is its tokens' part: sum it over the group.
    method, layout: how attention then crosses the ranks, see `ring_attention`.
    balance: what the sparse layers of one graph are told by, such as a `models.Balance`.

    ValueError where model, tree or masks do not fit, or max_tokens meets gradients or a group.
    """
    require_tree_model(model, trie)
    by_blocks = lockstep is not None or max_tokens is not None
    _require_no_gradient_by_blocks(by_blocks, trie, lockstep, group)

    # Either one graph of the packed tree, or the engine of section 6 on its way down only.
    if not by_blocks and len(trie):
        how = dict(group=group, method=method, layout=layout, balance=balance)
        columns = _packed_scores(model, trie, temperature, masks, **how)
    else:
        options = dict(temperature=temperature, masks=masks, lockstep=lockstep)
        engine = _Engine(model, trie, max_tokens=max_tokens, **options)
        engine.run()
        columns = engine.scores_CN.unbind()

    # From scores by edge to scores by sequence: each path picks its own, and in the backward the
    # gradients of all paths add up at their edge, which is (5) by autograd.
    return _scores_by_sequence(trie, columns, padded)


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
    """Adds the gradient of (4) and (7) to .grad, like loss.backward(), in O(path) memory.

    model: like models.Transformer; see `require_tree_model` for what it must have.
    trie: the `TokenTrie` of the sequences.
    loss_fn: loss_fn(i, logprobs, entropy), for a critic also values, all (L_i - 1,), returns the
        loss of sequence i, a tensor () or a number. Entry s - 1 is about token s given those before
        it, and a value is of the state of token s - 1. It is called once for each i, also where
        L_i = 1, as soon as the path is done. It may return no gradient, and may not use what an
        earlier call got.
    max_tokens: of a block. None: the whole tree is one block. Without recompute a block that alone
        hangs from another joins it: both graphs would be held all the same.
    recompute: keep the keys and values of the blocks above, not their graphs, and run these blocks
        forward twice.
    temperature: that of (3).
    aux_coef: coef of (7).
    masks: a bool (L_i - 1,) for each sequence. The head runs where any of them wants a score; the
        rest of what loss_fn gets is 0 and has no gradient. None: everywhere.
    lockstep: a process group whose ranks' layers send to each other (experts, or FSDP2 in one
        block). Its ranks then make equally many model calls, whatever their trees (see `overlay`).
        All of them call this at once, one without sequences too, with check_finite=False.
    batched: call loss_fn([i, ..], scores, ..) once a block instead, for the R sequences that end in
        it, with (R, T) scores, 0 behind a sequence's end. This is faster for many short sequences.
    check_finite: False lets NaN into the gradient, as loss.backward() would.

    Hooks of parameters fire once a block. Raises ValueError where model, tree or masks do not fit,
    NonFiniteLoss, or whatever loss_fn raises; .grad is then as it was before.
    """
    require_tree_model(model, trie)
    parameters = _trainable(model)
    if lockstep is not None and check_finite:
        raise ValueError("with lockstep a rank cannot stop by itself: pass check_finite=False")
    engine = _Engine(model, trie, max_tokens=max_tokens, recompute=recompute, as_planned=recompute,
                     temperature=temperature, masks=masks, aux_coef=aux_coef, lockstep=lockstep,
                     batched=batched, check_finite=check_finite)  # fmt: skip

    # A loss may fail in the middle of the walk, when some blocks have gone backward already. Then
    # .grad must be as it was, or the caller's next step would take half a gradient.
    with _all_or_nothing(parameters), torch.enable_grad():
        engine.run(loss_fn)

    loss = torch.as_tensor(engine.loss, dtype=engine.scores_CN.dtype)
    logprobs = [engine.scores_CN[0, trie.path(i)[1:]] for i in range(len(trie.lengths))]
    return TreeResult(loss, logprobs, engine.balance.loss, engine.balance.router_counts)


# =============================================================================================
# The idea ends here. What follows makes it fast, strict or connected: checks of what comes in,
# short paths, the routers' loss, ranks with different trees, and `check`.
# =============================================================================================


# 8. Checks of what comes in ------------------------------------------------------------------
# For callers: each mistake is an error that names it, before anything runs or anything is changed.
# Skip this to understand the algorithm; read it before passing a model of your own.

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
MIXERS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d)
OTHER_MIXERS = re.compile("mamba|rwkv|deltanet|linearattention|ssm|retention", re.IGNORECASE)


class NonFiniteLoss(FloatingPointError, ValueError):
    """A caller's loss, or its gradient, is not finite; the message names the sequence."""


def require_tree_model(model, trie, /):
    """ValueError, before anything runs, if this model's tokens may mix otherwise than in (1).

    A model needs .hidden(tokens, positions=, attention=) and .logprobs(hidden, targets,
    temperature=). Each layer must call attention(q, k, v, layer=, scale=, window=, softcap=) once,
    with a number of its own; the last two may be left out.
    """
    if not isinstance(trie, TokenTrie):
        raise ValueError(f"expected a TokenTrie, came {type(trie).__name__}; TokenTrie(sequences)")
    takes = inspect.signature(model.hidden).parameters if hasattr(model, "hidden") else {}
    if not {"positions", "attention"} <= set(takes) or not hasattr(model, "logprobs"):
        raise ValueError(f"{type(model).__name__} must have .hidden(tokens, positions=, attention=)"
                         " and .logprobs(hidden, targets, temperature=), like models.Transformer")

    # A shared token has one state. Nothing may make it differ between its sequences, and nothing
    # but `attention`, which knows the tree, may carry information from token to token.
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

    # The sequences must fit the model: its vocabulary, and its longest position.
    vocab_size = getattr(config, "vocab_size", math.inf)
    if len(trie) and (largest := int(trie.tokens.max())) >= vocab_size:
        i = next(i for i in range(len(trie.ends)) if largest in trie.tokens[trie.path(i)])
        raise ValueError(f"sequence {i} has the token id {largest}; ids are below {vocab_size}")
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    longest = int(trie.lengths.max()) if len(trie) else 0
    if longest > limit:
        i = int(trie.lengths.argmax())
        raise ValueError(f"sequence {i} has {longest} tokens, the model's limit is {limit}; cut it")


def _arrays_of_ids(sequences):
    """Each sequence as an int64 array of its own; ValueError if one is none."""
    arrays = []
    for i, x in enumerate(sequences):
        array = x.detach().cpu().numpy() if torch.is_tensor(x) else np.asarray(x)
        if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
            raise ValueError(f"sequence {i} must be 1-D integers, 1 token or more; came "
                             f"{array.dtype} {array.shape}; leave empty sequences out")
        arrays.append(array.astype(np.int64))

    # Ids beyond 2^63, which only uint64 holds, come out of the cast negative and are refused too.
    if arrays and np.concatenate(arrays).min() < 0:
        i = next(i for i, array in enumerate(arrays) if array.min() < 0)
        raise ValueError(f"sequence {i} has the token id {arrays[i].min()}; ids are 0 to 2^63 - 1")
    return arrays


class _LayerGuard:
    """Sees to it that each layer calls `attention` with a number of its own, in one forward."""

    def __init__(self, model):
        self.model = model
        self.layers = set()
        self.in_forward = True

    def enter(self, layer):
        # The stack keeps one set of keys for each number, so two layers of one number would read
        # each other's. After the forward a layer may call again, where a checkpoint recomputes it.
        if layer in self.layers:
            raise ValueError(f"two layers call attention with layer={layer}; number them")
        if self.in_forward:
            self.layers.add(layer)

    def leave(self):
        if not self.layers:
            raise ValueError(f"{type(self.model).__name__}.hidden never called `attention`: its "
                             "tokens mix in a way a tree cannot follow; every layer must call it")
        self.in_forward = False
        self.layers.clear()


def _trainable(model):
    """The parameters that tree_backward adds gradients to; ValueError if there are none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters or torch.is_inference_mode_enabled():
        raise ValueError("no parameter of the model requires a gradient here; use tree_scores")
    return parameters


@contextlib.contextmanager
def _all_or_nothing(parameters):
    """Adds to .grad what is added inside, or nothing if that fails."""
    # Inside, .grad begins empty. What was there before is kept aside, and comes back either way.
    before = [p.grad for p in parameters]
    added = [None] * len(parameters)
    try:
        for p in parameters:
            p.grad = None
        yield
        added = [p.grad for p in parameters]
    finally:
        for p, old, new in zip(parameters, before, added, strict=True):
            if old is None:
                p.grad = new
            else:
                p.grad = old if new is None else old.add_(new)


def _one_number(loss, like, called_for):
    """What loss_fn returned, as a tensor (); ValueError if it is a vector."""
    if not torch.is_tensor(loss):
        return like.new_tensor(loss)
    if loss.dim():
        raise ValueError("loss_fn must return one number a call, of shape (); for "
                         f"sequence {called_for} came {[*loss.shape]}; sum or average it")
    return loss


def _require_finite(calls, results):
    """NonFiniteLoss if one of a block's losses, or its gradient, is not finite.

    calls: what the loss was called for, a sequence or a list. results: of `_Engine._call_loss`.
    """
    # One look at all losses of the block: on a GPU each look waits for the device.
    losses, finite = zip(*results, strict=True)
    if torch.stack(finite).all():
        return
    k = finite.index(False)
    sequence = f"sequence {calls[k]}"
    if isinstance(calls[k], list):
        sequence = f"sequences {calls[k]}"
    reason = ", its gradient is not finite" if losses[k].isfinite() else ""
    raise NonFiniteLoss(f"the loss of {sequence} is {losses[k].item()}{reason}")


def _require_block_size(max_tokens):
    """ValueError unless blocks can be of at most so many tokens."""
    if max_tokens is not None and not (hasattr(max_tokens, "__index__") and max_tokens > 0):
        raise ValueError(f"max_tokens must be an integer of 1 or more, or None; came {max_tokens}")


def _require_no_gradient_by_blocks(by_blocks, trie, lockstep, group):
    """ValueError where `tree_scores` would have to compute block by block with a graph or a group.

    by_blocks: whether max_tokens or lockstep was given. trie, lockstep, group: as in `tree_scores`.
    """
    # An empty tree has nothing to compute, but under lockstep it makes the other ranks' calls.
    runs = len(trie) or lockstep is not None
    if by_blocks and runs and (torch.is_grad_enabled() or group is not None):
        raise ValueError("max_tokens and lockstep are for forward passes without group: call "
                         "tree_scores under torch.no_grad(), or train with tree_backward")


# 9. Small tables -----------------------------------------------------------------------------
# For sections 2 to 6: index tables with their examples, packing, counting, and growing the stack.
# Skip them unless you change the tree or the walk; their names say what they return.


def _is_critic(model):
    return getattr(getattr(model, "config", None), "value_head", False)


class Stats(NamedTuple):
    """Tokens and (query, key) pairs, of the flat batch and of the tree, and their ratios."""

    flat_tokens: int
    tree_tokens: int
    flat_pairs: int
    tree_pairs: int
    token_bound: float  # how many times faster, if tokens were all that costs
    flop_bound: float | None  # the same of FLOPs, None without their costs


def _stats(trie, flops_per_token, flops_per_pair):
    """`TokenTrie.stats`."""
    # A token of depth d is paired with d ancestors and itself. So a sequence of L tokens, alone,
    # has 1 + 2 + .. + L pairs.
    lengths = trie.lengths.numpy()
    flat_tokens = int(lengths.sum())
    flat_pairs = int((lengths * (lengths + 1) // 2).sum())
    tree_tokens = len(trie)
    tree_pairs = int((trie.positions + 1).sum())

    token_bound = flat_tokens / tree_tokens if tree_tokens else 1.0
    flop_bound = None
    if flops_per_token is not None and flops_per_pair is not None and tree_tokens:
        tree_flops = tree_tokens * flops_per_token + tree_pairs * flops_per_pair
        flop_bound = (flat_tokens * flops_per_token + flat_pairs * flops_per_pair) / tree_flops
    return Stats(flat_tokens, tree_tokens, flat_pairs, tree_pairs, token_bound, flop_bound)


def _int64(x):
    return torch.from_numpy(np.asarray(x, np.int64))


def _runs(first, lengths):
    """Runs of integers, end to end: 3 4 5 and 7 8 for first 3 7 and lengths 3 2."""
    before = lengths.cumsum() - lengths
    return np.repeat(first - before, lengths) + np.arange(lengths.sum())


def _common_prefixes(joined, begins, lengths):
    """(R,) how many tokens each sequence has in common with the one before it, the first with none.

    joined: the tokens of all, in which sequence k has `lengths[k]` from begins[k] on.
    """
    # Neighbours are compared as far as the shorter one goes, and of the places where two differ the
    # first counts. Two that differ nowhere have all in common that was compared.
    compared = np.minimum(lengths[1:], lengths[:-1])
    row = np.repeat(np.arange(len(compared)), compared)
    column = _runs(np.zeros_like(compared), compared)
    differ = np.flatnonzero(joined[begins[:-1][row] + column] != joined[begins[1:][row] + column])
    common = compared.copy()
    differing_rows, first = np.unique(row[differ], return_index=True)
    common[differing_rows] = column[differ][first]
    return np.append(np.zeros(min(len(lengths), 1), np.int64), common)


def _largest_branches_first(order, lengths, shared):
    """(order, shared) of sorted sequences once each fork's branches are by size, largest first.

    order, shared: as in `TokenTrie`. lengths: (R,), in input order.
    """
    # A node is a fork: [its depth, the place of its first sequence, its branches]. A branch is a
    # node or, of a single sequence, that one's place. Neighbours that share s tokens meet at a fork
    # of depth s. So a fork is complete when the next sequence shares less than its depth:
    #
    #     sorted   5 6 7   5 6 8   5 9       after 5 6 8 the fork at depth 2 is complete, and is a
    #     shared     0       2      1        branch of the fork at depth 1, beside 5 9
    count = len(order)
    lengths = lengths[order]
    ends = np.cumsum(lengths - shared).tolist()  # tokens of the tree behind each sequence
    following = [*shared[1:].tolist(), -1]
    lengths = lengths.tolist()
    open_forks = []

    def add(fork, branch, last):
        # Its tokens below the fork: what its first sequence has there, and all that follows.
        first = branch if isinstance(branch, int) else branch[1]
        fork[2].append((lengths[first] - fork[0] + ends[last] - ends[first], branch))

    for k in range(count):
        branch = k
        while open_forks and open_forks[-1][0] > following[k]:
            fork = open_forks.pop()
            add(fork, branch, k)
            fork[2].sort(key=lambda item: -item[0])  # stable: equal ones stay sorted by tokens
            branch = fork
        if k + 1 == count:
            break
        if not open_forks or open_forks[-1][0] < following[k]:
            first = branch if isinstance(branch, int) else branch[1]
            open_forks.append([following[k], first, []])
        add(open_forks[-1], branch, k)

    # From the top, the branches in their new order. The first of a fork follows what the fork
    # follows, each other one shares the fork's depth with the branch before it.
    new_order = []
    new_shared = []
    todo = [(branch, 0)] if count else []
    while todo:
        branch, before = todo.pop()
        if isinstance(branch, int):
            new_order.append(order[branch])
            new_shared.append(before)
            continue
        depth, _, branches = branch
        later = [(other, depth) for _, other in branches[1:]]
        todo += [*reversed(later), (branches[0][1], before)]
    return new_order, np.array(new_shared, np.int64)


def segments(trie):
    """Where the tree forks: (children, stops). A segment is a stretch of path without a fork.

    children: {a token, or -1 for no token: first tokens of the segments that hang from it}.
    stops: (N,), for each token the index after the last token of its segment.
    """
    # A segment begins where a path begins, and behind a token that has several children.
    #
    #     5 6 7 8 / 5 6 9      index     0  1  2  3  4      children  {-1: [0], 1: [2, 4]}
    #                          token     5  6  7  8  9      stops     2  2  4  4  5
    #                          children  1  2  1  0  0
    parent = trie.parent.numpy()
    child_count = np.bincount(parent[parent >= 0], minlength=len(trie))
    first_tokens = np.flatnonzero((parent < 0) | (child_count[parent] != 1))
    children = {}
    for token in first_tokens.tolist():
        children.setdefault(int(parent[token]), []).append(token)

    # It ends with the next token, in preorder, that has no child or several.
    ends = np.append(np.flatnonzero(child_count != 1) + 1, len(trie))
    stops = ends[np.searchsorted(ends, np.arange(len(trie)) + 1)]
    return children, stops.tolist()


def _longest_piece(first, max_tokens, children, stops, end):
    """A stretch of path from a token on, with all that hangs beside it, in at most max_tokens.

    children, stops: of `segments`. end: subtree_end, numpy.
    Returns the index after the stretch's last token, and all tokens, ascending.
    """
    stop = first
    beside = []  # whole subtrees
    room = max_tokens
    while True:
        # To the end of the segment, or as far as there is room.
        length = min(stops[stop] - stop, room)
        cut = length < stops[stop] - stop
        stop += length
        room -= length

        # At a fork it goes on along the first branch, which is the largest and whose indices follow
        # at once, if the others fit in as they are and leave room for one token of it.
        branches = children.get(stop - 1, [])
        others = [np.arange(child, end[child]) for child in branches[1:]]
        size = sum(len(tokens) for tokens in others)
        if cut or not branches or size >= room:
            return stop, np.sort(np.concatenate([np.arange(first, stop), *beside]))
        beside += others
        room -= size


def _pack_subtrees(blocks, holder, subtrees, max_tokens, depth):
    """Puts whole subtrees, the smallest first, into the holder's block, then into new ones."""
    # The first bundle joins the holder's block. Roots have no such block, so nothing fits into it.
    bundles = [[]]
    room = max_tokens - len(blocks[holder].tokens) if holder >= 0 else 0
    for tokens in sorted(subtrees, key=len):
        if len(tokens) > room:
            bundles.append([])
            room = max_tokens
        bundles[-1].append(tokens)
        room -= len(tokens)

    if bundles[0]:
        tokens = np.sort(np.concatenate([blocks[holder].tokens, *bundles[0]]))
        blocks[holder] = blocks[holder]._replace(tokens=tokens)
    for bundle in bundles[1:]:
        blocks.append(Block(np.sort(np.concatenate(bundle)), 0, holder, depth))


def _wanted_edges(trie, masks):
    """(N,) bool: the edges to score, which are those that the mask of any sequence wants."""
    if masks is None:
        return np.full(len(trie), True)
    if len(masks) != len(trie.lengths):
        raise ValueError(f"{len(masks)} masks for {len(trie.lengths)} sequences; one for each")

    # Item s of a mask is about token s + 1, as item s of the log-probs is: edge path[s + 1].
    arrays = [np.asarray(mask.cpu() if torch.is_tensor(mask) else mask, bool) for mask in masks]
    targets = (trie.lengths - 1).numpy()
    for i, (array, count) in enumerate(zip(arrays, targets.tolist(), strict=True)):
        if array.shape != (count,):
            raise ValueError(f"mask {i} has shape {array.shape}; its sequence wants ({count},)")
    edges = trie.paths.numpy()[_runs(trie.begins.numpy() + 1, targets)]
    wanted = np.full(len(trie), False)
    wanted[edges[np.concatenate([*arrays, np.zeros(0, bool)])]] = True
    return wanted


def _grouped(keys, count):
    """[indices of the keys 0, of the keys 1, .., of the keys count - 1], each ascending."""
    if not count:
        return []
    order = np.argsort(keys, kind="stable")  # [1, 0, 1] -> [1, 0, 2], cut before the first 1
    return np.split(order, np.searchsorted(keys[order], np.arange(1, count)))


def _padded_paths(trie, sequences, device):
    """The edges of some sequences, (R, T), padded with 0, and (R, T) bool: which are no padding."""
    #     sequences 5 6 7 and 5 9 of the tree 5 6 7 8 9      [[1, 2],     [[x, x],
    #                                                         [4, 0]]      [x, .]]
    rows = list(sequences)
    targets = trie.lengths[rows].numpy() - 1
    inside_RT = np.arange(targets.max()) < targets[:, None]
    edges_RT = np.zeros(inside_RT.shape, np.int64)
    edges_RT[inside_RT] = trie.paths.numpy()[_runs(trie.begins[rows].numpy() + 1, targets)]
    return torch.from_numpy(edges_RT).to(device), torch.from_numpy(inside_RT).to(device)


class PathEdges:
    """The edges of one path, or of several: what a loss is called with is gathered from there.

    called_for: a sequence, whose edges are (T,), or a list, with (R, T), padded. edges: all, flat.
    """

    def __init__(self, trie, called_for, device):
        if isinstance(called_for, list):
            self.padded_edges, self.inside_RT = _padded_paths(trie, called_for, device)
            self.edges = self.padded_edges[self.inside_RT]
        else:
            # One path by itself needs neither padding nor to leave it out again.
            self.inside_RT = None
            self.edges = trie.path(called_for)[1:].to(device)

    def gather(self, score_N):
        """A score along the path, (T,), or along each, (R, T), 0 behind its end."""
        if self.inside_RT is None:
            return score_N[self.edges]
        return score_N[self.padded_edges].masked_fill(~self.inside_RT, 0.0)

    def inside(self, x):
        """The entries of a tensor like that of `gather` that belong to `edges`."""
        if self.inside_RT is None:
            return x
        return x[self.inside_RT]


def _scores_by_sequence(trie, columns, padded):
    """What `tree_scores` returns, from each score of every edge, (N,) each; differentiable."""
    if not len(trie):
        return [column_N.view(0, 0) for column_N in columns] if padded else []
    edges_RT, inside_RT = _padded_paths(trie, range(len(trie.lengths)), columns[0].device)
    if padded:
        return [column_N[edges_RT].masked_fill(~inside_RT, 0.0) for column_N in columns]

    # Without padding: the edges of all sequences end to end, cut at the sequences' lengths.
    edges = edges_RT[inside_RT]
    sizes = (trie.lengths - 1).tolist()
    by_score = [column_N.index_select(0, edges).split(sizes) for column_N in columns]
    return list(zip(*by_score, strict=True))


def _grown(store, layer, like_1GnD, needed, limit):
    """A layer's tensor on the stack, (2, 1, G, m, D), with room for depths below `needed`."""
    # Nothing is allocated ahead of need. Doubling keeps the copies few, and the limit keeps a deep
    # path from holding twice what it can use.
    old_capacity = store[layer].shape[3] if layer in store else 0
    if old_capacity < needed:
        _, G, _, D = like_1GnD.shape
        capacity = min(max(needed, 2 * old_capacity), limit)
        new_21GmD = like_1GnD.new_zeros(2, 1, G, capacity, D)
        if old_capacity:
            new_21GmD[:, :, :, :old_capacity] = store[layer]
        store[layer] = new_21GmD
    return store[layer]


# 10. Masks of a block ------------------------------------------------------------------------
# For section 5: equation (1) for the tokens of one block, with sliding windows.
# Skip it unless your model has sliding-window layers, or you change what a block holds.


class BlockMasks(NamedTuple):
    """Which keys the tokens of a block see: (1) in two parts."""

    inside: ring.Mask  # of the block itself
    stack: ring.Mask | None  # of the stack from depth `first` on; None: all of it
    first: int
    is_path: bool  # whether the block is a stretch of one path, without a window


def block_ends(trie, block):
    """subtree_end of a block's tokens, counted inside the block, (n,)."""
    # The descendants of a token that lie in the block are contiguous there too. Were both
    # subtrees of the example in `Block` in one block of their own, it would be
    #
    #     tokens  2 3 4 5      subtree_end  4 4 6 6      counted inside the block  2 2 4 4
    return np.searchsorted(block.tokens, trie.subtree_end.numpy()[block.tokens])


def block_masks(trie, block, window):
    """(1) for the tokens of a block, against themselves and against the stack above them."""
    # In preorder the next index, one deeper, is a child.
    positions = trie.positions.numpy()[block.tokens]
    goes_on = (np.diff(block.tokens) == 1) & (np.diff(positions) == 1)
    is_path = window is None and bool(goes_on.all())
    if len(block.tokens) == len(trie):
        return BlockMasks(trie.mask(window), None, 0, is_path)
    ends = block_ends(trie, block)
    inside = ring.Mask.tree(ends, positions, window)

    # Every token of the block has the whole stack as ancestors, so the stack needs a mask only
    # where a window hides its upper part.
    p = block.depth
    if window is None or not p:
        return BlockMasks(inside, None, 0, is_path)

    # Leave out what no token of the block sees, but keep one key, so that no call is empty. Then
    # the rest of the stack and the block are one tree, a path with the block behind it, and the
    # mask wanted is the part of that tree's mask with the block's rows and the stack's columns.
    #
    #     p = 4, window = 2, first position 4:     first = 3, one key of the stack, depth 3
    first = min(max(0, int(positions.min()) - window + 1), p - 1)
    seen = p - first
    n = len(positions)
    ends = np.concatenate([np.full(seen, seen + n), seen + ends])
    depths = np.concatenate([np.arange(first, p), positions])
    both = ring.Mask.tree(ends, depths, window)
    return BlockMasks(inside, both.slice(slice(seen, None), slice(seen)), first, is_path)


# 11. Short paths -----------------------------------------------------------------------------
# For speed on a CPU: trees of short paths would be very many tiles of few pairs each.
# Skip it; the result is that of the mask in section 3.

# Chunks or tiles, and which chunks, in milliseconds of one thread: the first two rows are a step of
# train_grpo.py's bench, the others attention alone, forward and backward, with 4 query and 2 key
# heads of 32. The length of the longest path decides.
#
#     tree                     tokens   longest path   chunks of 16     32     64   tiles
#     guess branching             463             17           30.3   31.3   31.9    45.2
#     guess                      3326             17            151    147    152     286
#
#     8 of 16 + 16 x 32          3169             48           14.8   13.1   13.8    32.0
#     binary, 7 x 16             2032            112           13.0    9.7   10.1    30.0
#     4 of 64 + 8 x 64           1768            128           13.9   10.8    9.4    15.8
#     2 of 128 + 8 x 64          1040            189           10.1    8.1    7.6     9.7
#     256 + 8 x 64                621            313            8.9    6.7    6.1     6.6

SHORT = 192  # tokens of the longest path; beyond it little is gained
GATHERED = 2**22  # numbers gathered for a layer, of keys and as many of values: a bound on memory


class Chunks(NamedTuple):
    """The packed tree as U chunks of W tokens, and the Y keys that each chunk looks at.

    What stands for no key of a chunk, and for the tokens that fill up the last one, has a number
    from N on.
    """

    queries_UW: np.ndarray
    keys_UY: np.ndarray
    index_I: torch.Tensor  # keys_UY, flat, with the last token in place of what is no key


def _chunk_length(trie):
    """Tokens of a chunk: the longer the path above it can be, the more rows are to share it.

    The limits follow the table above.
    """
    longest = int(trie.positions.max()) + 1
    if longest <= 24:
        return 16
    if longest <= 112:
        return 32
    return 64


def _chunks_pay(q_1HND, k_1GND, v_1GND, trie, softcap):
    """Whether `_chunked_attention` is possible, and faster than tiles."""
    if softcap is not None or q_1HND.device.type != "cpu" or not len(trie):
        return False
    longest = int(trie.positions.max()) + 1
    length = _chunk_length(trie)
    numbers = -(-len(trie) // length) * (length + longest) * k_1GND.shape[1] * k_1GND.shape[3]
    if longest > SHORT or numbers > GATHERED:
        return False

    # NUMERICS: a masked pair has the weight 0, and 0 times NaN or inf is NaN: it would reach other
    # paths of the chunk. Tiles know of that. Pinned by
    # tests/test_tree.py::test_a_token_that_is_not_finite_reaches_its_own_paths_only.
    return all(ring.is_tame(x) for x in (q_1HND, k_1GND, v_1GND))


def _chunks(trie):
    """The `Chunks` of a tree."""
    # A token's ancestors lie in its own chunk, or they are ancestors of the chunk's first token: a
    # subtree is a stretch of indices, so one that begins before the chunk and holds the token holds
    # the first token too. So a chunk's keys are the path above its first token, and the chunk.
    #
    #     5 6 7 / 5 6 8 / 5 9     index    0 1 2 3 4    queries  0 1 2    keys  . . 0 1 2
    #                             token    5 6 7 8 9             3 4 .          0 1 3 4 .
    #                             depth    0 1 2 2 1
    N = len(trie)
    count = -(-N // _chunk_length(trie))
    queries_UW = np.arange(count * -(-N // count)).reshape(count, -1)
    first_U = queries_UW[:, 0].clip(max=N - 1)
    depth_U = trie.positions.numpy()[first_U]

    # The path above a token is the beginning of the first sequence's that has the token.
    new = (trie.lengths.numpy()[trie.order] - trie.shared).cumsum()
    sequence_U = np.asarray(trie.order)[np.searchsorted(new, first_U, side="right")]
    chunk_J = np.repeat(np.arange(count), depth_U)
    depth_J = _runs(np.zeros_like(depth_U), depth_U)
    above_UA = np.full((count, int(depth_U.max())), queries_UW.size)
    above_UA[chunk_J, depth_J] = trie.paths.numpy()[_runs(trie.begins.numpy()[sequence_U], depth_U)]
    keys_UY = np.concatenate([above_UA, queries_UW], 1)
    return Chunks(queries_UW, keys_UY, torch.from_numpy(keys_UY.clip(max=N - 1)).flatten())


def _chunk_bias(trie, chunks, window, dtype):
    """(1) inside the chunks, (U, 1, W, Y): 0 where a query sees a key, -inf elsewhere."""
    # What fills up the last chunk is a path of one token each, and what stands for no key comes
    # after every query, so that the rule of (1) holds for all: j <= i < end_j.
    i_UW1 = chunks.queries_UW[:, :, None]
    j_U1Y = chunks.keys_UY[:, None]
    beyond = np.arange(len(trie), chunks.queries_UW.size + 1)
    end = np.append(trie.subtree_end.numpy(), beyond + 1)
    sees_UWY = (j_U1Y <= i_UW1) & (i_UW1 < end[j_U1Y])  # (1)
    if window is not None:
        depth = np.append(trie.positions.numpy(), np.zeros_like(beyond))
        sees_UWY &= depth[i_UW1] - depth[j_U1Y] < window
    bias_UWY = torch.zeros(sees_UWY.shape, dtype=dtype)
    return bias_UWY.masked_fill_(torch.from_numpy(~sees_UWY), -math.inf)[:, None]


def _chunked_attention(q_1HND, k_1GND, v_1GND, trie, scale, window):
    """Attention by (1) of short paths, all chunks in one call; the gradient is autograd's, but see
    `_TilesWhereNotTame`.

    The arguments are those of `tree_attention`.
    """
    # NUMERICS: scores, their softmax and sums in float32 or better, as in the tiles. Pinned by
    # tests/test_tree.py::test_tree_attention_in_low_precision_is_within_twice_plain_torch.
    dtype = q_1HND.dtype
    wide = torch.promote_types(dtype, torch.float32)

    # Which keys a chunk looks at, and which of them each query sees, are found once for all layers.
    N = len(trie)
    if "chunks" not in trie.cache:
        trie.cache["chunks"] = _chunks(trie)
    chunks = trie.cache["chunks"]
    if ("bias", window, wide) not in trie.cache:
        trie.cache["bias", window, wide] = _chunk_bias(trie, chunks, window, wide)
    bias_U1WY = trie.cache["bias", window, wide]

    # Queries lie as the chunks want them, but for the end. Keys are copied: to those of a chunk the
    # path above it is added, which for short paths is little.
    def gathered(x_1GND):
        x_NGD = x_1GND[0].transpose(0, 1).to(wide)
        x_UYGD = x_NGD.index_select(0, chunks.index_I).unflatten(0, chunks.keys_UY.shape)
        return x_UYGD.transpose(1, 2)

    q_NHD = q_1HND[0].transpose(0, 1).to(wide)
    missing = chunks.queries_UW.size - N
    if missing:
        q_NHD = nn.functional.pad(q_NHD, (0, 0, 0, 0, 0, missing))
    q_UHWD = q_NHD.unflatten(0, chunks.queries_UW.shape).transpose(1, 2)
    k_UGYD = gathered(k_1GND)
    v_UGYD = gathered(v_1GND)
    out_UHWD = nn.functional.scaled_dot_product_attention(
        q_UHWD, k_UGYD, v_UGYD, bias_U1WY, scale=scale, enable_gqa=True
    )
    out_NHD = out_UHWD.transpose(1, 2).flatten(0, 1)[:N]
    out_1HND = out_NHD.transpose(0, 1)[None].to(dtype)
    in_chunks = q_UHWD, k_UGYD, v_UGYD
    return _TilesWhereNotTame.apply(
        out_1HND, q_1HND, k_1GND, v_1GND, in_chunks, trie, scale, window
    )


class _TilesWhereNotTame(torch.autograd.Function):
    """Chunked attention's output as it is; its gradient goes the chunks' way, or by tiles.

    out_1HND: of the chunks. The rest are the arguments of `tree_attention`, and in_chunks those of
    torch's attention.
    """

    @staticmethod
    def forward(ctx, out_1HND, q_1HND, k_1GND, v_1GND, in_chunks, trie, scale, window):
        # MEMORY: torch's attention holds queries and keys as the chunks have them, and nobody needs
        # to hold q, k and v as they came. Pinned by
        # tests/test_tree.py::test_the_gradient_of_chunks_holds_nothing_of_its_own.
        ctx.save_for_backward(*(x.detach() for x in in_chunks))
        ctx.setting = trie, scale, window, q_1HND.dtype
        return out_1HND.view_as(out_1HND)

    @staticmethod
    def backward(ctx, dout_1HND):
        # NUMERICS: 0 times a NaN that arrives for one token would be NaN for the keys of all paths
        # of its chunk. Pinned by
        # tests/test_tree.py::test_a_gradient_that_is_not_finite_reaches_its_own_path_only.
        if ring.is_tame(dout_1HND):
            return dout_1HND, None, None, None, None, None, None, None

        # A chunk's last W keys are its own tokens: all chunks together have each token once.
        trie, scale, window, dtype = ctx.setting
        in_chunks = ctx.saved_tensors
        W = in_chunks[0].shape[2]
        given = []
        for x_UhYD in in_chunks:
            x_NhD = x_UhYD[:, :, -W:].transpose(1, 2).flatten(0, 1)[: len(trie)]
            given.append(x_NhD.transpose(0, 1)[None].to(dtype).requires_grad_())
        with torch.enable_grad():
            out_1HND = ring.attend(*given, trie.mask(window), scale=scale)[0]
        gradients = torch.autograd.grad(out_1HND, given, dout_1HND)
        return None, *gradients, None, None, None, None


# 12. The routers' balance loss on a tree -----------------------------------------------------
# For mixtures of experts: equation (7), and how many tokens each expert got.
# Skip it for dense models.


class TreeBalance:
    """(7) over a walk: for each sequence as if it were alone, at the cost of the tree.

    (7) is linear in p once the counts n are known, and p_te is shared by all sequences that hold
    token t. So it is a sum over tokens, with one factor for each token and expert:

        aux = sum_t sum_e factor_te p_te,   factor_te = sum_(i holds t) coef E n_ie / (K L_i^2)

    n_ie is a sum along a path, from the root to the sequence's last token: it is built on the way
    down. factor_te is a sum over the sequences that end at or below t: it is built on the way up.
    """

    def __init__(self, trie, blocks, ending_in, coef, device):
        self.trie = trie
        self.blocks = blocks
        self.ending_in = ending_in  # by block: the sequences that end in it
        self.coef = coef
        self.device = device
        self.loss = 0.0
        self.router_counts = {}  # layer -> (E,)
        self.counts_above = {}  # (block, layer) -> n (E,) of the path to the end of its piece
        self.factors = {}  # (block, layer) -> (n, E), each at the token where its sequence ends

    def routing(self, block):
        """The `balance` argument of the model's hidden() for one `Block`."""
        ends = block_ends(self.trie, block)
        return Routing(torch.from_numpy(ends).to(self.device))

    def require_router(self, routing):
        if self.coef and not routing.scores:
            raise ValueError(f"aux_coef={self.coef}, but the model has no router; leave it 0")

    def count(self, run, routing):
        """On the way down: n of (7) for the sequences that end here, and for the blocks below.

        run: the blocks whose tokens were routed in one call, from the top.
        """
        if len(run) == 1:
            self._count_block(run[0], routing)
            return

        # What hangs beside a piece lies behind the pieces below it, so each block picks its rows.
        together = joined([self.blocks[b] for b in run])
        for b in run:
            rows_n = np.searchsorted(together.tokens, self.blocks[b].tokens)
            rows_n = torch.from_numpy(rows_n).to(self.device)
            of_block = self.routing(self.blocks[b])
            of_block.experts_per_token = routing.experts_per_token
            for layer, chosen_nE in routing.chosen.items():
                of_block.chosen[layer] = chosen_nE[rows_n]
            self._count_block(b, of_block)

    def _count_block(self, b, routing):
        if not routing.chosen:
            return

        # Where in the block the last token of each of these sequences lies.
        block = self.blocks[b]
        ending = torch.from_numpy(self.ending_in[b])
        last_r = torch.searchsorted(torch.from_numpy(block.tokens), self.trie.ends[ending])
        last_r = last_r.to(self.device)
        lengths_r1 = self.trie.lengths[ending].to(self.device)[:, None]

        for layer, chosen_nE in routing.chosen.items():
            # Row t: tokens of the path from the root to t that each expert got.
            n_nE = path_sums(chosen_nE, routing.end_n)
            if block.parent >= 0:
                n_nE = n_nE + self.counts_above[block.parent, layer]
            if block.piece:
                self.counts_above[b, layer] = n_nE[block.piece - 1]

            n_rE = n_nE[last_r]
            self.router_counts[layer] = self.router_counts.get(layer, 0) + n_rE.sum(0)
            if self.coef:
                E_over_K = n_nE.shape[1] / routing.experts_per_token
                factor_nE = torch.zeros_like(n_nE)
                factor_nE.index_add_(0, last_r, E_over_K * n_rE / lengths_r1.square())
                self.factors[b, layer] = factor_nE * self.coef

    def gradients(self, b, routing):
        """On the way up: [(p (n, E) of a layer, its gradient)], to go backward with the block."""
        found = []
        if not self.coef:
            return found
        for layer, scores_nE in routing.scores.items():
            # Sequences that end in blocks below hold all of this block's piece. Those blocks have
            # added their totals at its last token already; so does this one in its parent.
            factor_nE, total_E = subtree_sums(self.factors.pop((b, layer)), routing.end_n)
            parent = self.blocks[b].parent
            if parent >= 0:
                self.factors[parent, layer][self.blocks[parent].piece - 1] += total_E

            self.loss = self.loss + (factor_nE * scores_nE.detach()).sum()  # (7)
            if scores_nE.requires_grad:
                found.append((scores_nE, factor_nE.to(scores_nE.dtype)))
        return found


class Routing:
    """The `balance` callable of a block's sparse layers: it keeps what (7) needs of the routers."""

    def __init__(self, end_n):
        self.end_n = end_n
        self.experts_per_token = 0
        self.scores = {}  # layer -> p (n, E), with its graph
        self.chosen = {}  # layer -> (n, E), 1 where an expert was chosen
        self.with_graph = torch.is_grad_enabled()

    def __call__(self, scores_nE, chosen_nK, /, *, layer):
        if self.with_graph and not torch.is_grad_enabled():
            raise ValueError("a reentrant checkpoint would lose (7); use_reentrant=False")
        self.scores[layer] = scores_nE
        self.experts_per_token = chosen_nK.shape[1]
        zeros_nE = torch.zeros_like(scores_nE, dtype=torch.float64)
        self.chosen[layer] = zeros_nE.scatter(1, chosen_nK, 1.0)


def subtree_sums(x_nE, end_n, /):
    """For each row t the sum of the rows t .. end_t - 1, its subtree, and the sum of all rows."""
    # With sums S from the front, S_0 = 0, the sum of a stretch is S_end - S_t.
    sums_mE = torch.cat([x_nE.new_zeros(1, x_nE.shape[1]), x_nE.cumsum(0)])
    return sums_mE[end_n] - sums_mE[:-1], sums_mE[-1]


def path_sums(x_nE, end_n, /):
    """For each row the sum over its ancestors and itself."""
    # Row t counts from t until its subtree ends: add it at t, take it away at end_t, and sum.
    #
    #     5 6 7 / 5 6 8 / 5 9      token t        0  1  2  3  4
    #                              add at         0  1  2  3  4
    #                              take away at   5  4  3  4  5
    events_mE = torch.cat([x_nE, x_nE.new_zeros(1, x_nE.shape[1])])
    return events_mE.index_add(0, end_n, -x_nE)[:-1].cumsum(0)


# 13. Ranks that must make the same calls -----------------------------------------------------
# For section 4 across ranks, and for layers that send to ranks with other trees (`lockstep`).
# Skip it on one rank.


def _sum_over_ranks(x, place):
    """The sum of terms that only one rank has each; every rank computes the same loss of it."""
    return x if place.world == 1 else _Sum.apply(x, place.group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        # Each rank has the whole gradient already, because each computes the whole loss. A second
        # sum would count it once for every rank.
        return grad, None


def overlay(blocks, group) -> list[Block]:
    """This rank's blocks, with empty ones where only other ranks have a block.

    Expert-parallel ranks must make the same number of model calls, in one order, so that a call's
    messages meet their like in forward and backward. So the ranks' block trees are aligned by
    position, n-th child with n-th child, and where this rank has no block stands an empty one.
    """
    place = ring.ring_of(group)
    parents = [[block.parent for block in blocks]] * place.world
    if place.world > 1:
        dist.all_gather_object(parents, parents[0], group=place.group)

    children = []  # by rank: {block: its children}
    for parents_of_rank in parents:
        children.append({})
        for b, parent in enumerate(parents_of_rank):
            children[-1].setdefault(parent, []).append(b)

    # To do: a position in the common tree, as the index of its block here and by rank (None: the
    # rank has none). The loop appends to the list that it walks over.
    #
    #     rank 0 has   0 - 1        together   0 - 2      rank 0 has there: 0, empty, 1
    #     rank 1 has   0 and 1                 1          rank 1 has there: 0, 1, empty
    aligned = []
    todo = [(-1, (-1,) * place.world)]
    for parent, block_by_rank in todo:
        lists = [of_rank.get(b, ()) for of_rank, b in zip(children, block_by_rank, strict=True)]
        for child_by_rank in itertools.zip_longest(*lists):
            child = child_by_rank[place.rank]
            block = Block(np.zeros(0, np.int64), 0, -1, 0) if child is None else blocks[child]
            aligned.append(block._replace(parent=parent))
            todo.append((len(aligned) - 1, child_by_rank))
    return aligned


def _stand_in(model, device):
    """What an empty block runs: one token that no loss sees, for the messages of the layers."""

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        return ring.attend(q, k, v, scale=scale, softcap=softcap)[0]

    tokens_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    hidden_11M = model.hidden(tokens_11, positions=tokens_11, attention=attention)
    return _Forwarded((), Routing(None), hidden_11M)


# 14. Which blocks one forward computes --------------------------------------------------------
# For section 6: fewer and larger calls of the model, where that costs no memory.
# Skip it, and take it that each block of `plan` is a call of its own.

# MEMORY: at most so many blocks are one forward without a graph. It frees a layer's states before
# the next layer runs, where a graph holds those of all layers: in a model of two layers or more,
# four blocks need less than the graph of one. Pinned by
# tests/test_tree_blocks.py::test_larger_calls_hold_no_more.
RUN = 4


def joined(blocks):
    """One block of several, of which each hangs from the one before it."""
    if len(blocks) == 1:
        return blocks[0]

    # A piece goes on with the next index where the piece above it ends. So the pieces are one
    # stretch of a path, and what hangs beside it has larger indices. If no block hangs from the
    # last one, none of it goes onto the stack.
    tokens = np.sort(np.concatenate([block.tokens for block in blocks]))
    piece = 0
    if blocks[-1].piece:
        piece = sum(block.piece for block in blocks)
    return Block(tokens, piece, blocks[0].parent, blocks[0].depth)


def children_of_blocks(blocks):
    """The blocks with the parent -1, and the children of each block, in the order of `plan`."""
    parents = np.array([block.parent for block in blocks], np.int64)
    blocks_by_parent = _grouped(parents + 1, len(blocks) + 1)
    return blocks_by_parent[0], blocks_by_parent[1:]


def join_only_children(blocks):
    """The blocks of `plan`, but one that alone hangs from another has joined that one.

    It is for a walk that keeps the graphs of the blocks above. Nothing goes backward between the
    forwards of two such blocks, nor forward between their backwards. So both graphs are held at
    once, and a cut between them saves nothing.
    """
    _, children = children_of_blocks(blocks)

    # Each block is listed after its parent, so it is known which group that one is in.
    groups = []
    group_of = []
    for block in blocks:
        if block.parent >= 0 and len(children[block.parent]) == 1:
            group_of.append(group_of[block.parent])
            groups[group_of[-1]].append(block)
        else:
            group_of.append(len(groups))
            groups.append([block])

    merged = []
    for group in groups:
        block = joined(group)
        if block.parent >= 0:
            block = block._replace(parent=group_of[block.parent])
        merged.append(block)
    return merged


def blocks_to_walk(trie, max_tokens, as_planned, lockstep):
    """The engine's blocks; under lockstep those of all ranks are aligned.

    trie, max_tokens, lockstep: of `_Engine`.
    as_planned: the blocks are those of `plan`. A walk without gradients wants them so, and one that
        recomputes, since they bound what it holds. False: only children join their parents.
    """
    blocks = plan(trie, max_tokens)
    if not as_planned:
        blocks = join_only_children(blocks)
    if lockstep is not None:
        blocks = overlay(blocks, lockstep)
    return blocks


def runs_of_blocks(blocks, children, recompute, lockstep):
    """For each block, which blocks its first forward computes in one call, from the top.

    children: of each block, in the order of the walk. recompute, lockstep: of `_Engine`.
    """
    runs = [[b] for b in range(len(blocks))]
    if not recompute or lockstep is not None:
        return runs

    # A run begins at a block that others hang from and goes down, each time to the first child with
    # a piece. A child without one may come before it: that puts nothing on the stack. The first one
    # with a piece is that of the largest branch, whose indices go on where the piece above it ends.
    for run in runs:
        while blocks[run[-1]].piece and len(run) < RUN:
            inner = [child for child in children[run[-1]].tolist() if blocks[child].piece]
            if not inner:
                break
            run.append(inner[0])
    return runs


# 15. Blocks that are stretches of a path ------------------------------------------------------
# For speed on a CPU: a path in small blocks, where asking for tiles takes a third of attention.
# Skip it; the result is that of `_BlockAttention`.

# Causal squares of that many tokens and more have a faster backward in tiles, see `ring.TILES`.
ONE_SQUARE = 512


def which_attention(q_1HnD, k_1GnD, v_1GnD, masks, kernel):
    """The autograd Function that computes a block's attention; the arguments are those of both."""
    # torch's CPU kernel takes keys and values as they are if they are of one dtype, no narrower
    # than the sums, and lie token by token.
    # NUMERICS: it multiplies what is above the diagonal by 0, which would bring a NaN into rows
    # that do not see it. Tiles know of that. Pinned by
    # tests/test_tree_blocks.py::test_a_token_that_is_not_finite_reaches_no_token_above_it.
    if not masks.is_path or kernel.backend != "fused" or q_1HnD.device.type != "cpu":
        return _BlockAttention
    given = q_1HnD, k_1GnD, v_1GnD
    if {x.dtype for x in given} not in ({torch.float32}, {torch.float64}):
        return _BlockAttention
    if any(x.stride(-1) != 1 for x in given) or not all(ring.is_tame(x) for x in given):
        return _BlockAttention
    return _PathAttention


class _PathAttention(_BlockAttention):
    """`_BlockAttention` of a stretch of one path: a causal square and, above it, the whole stack.

    What tiles would have to be asked for is known here: one call of the kernel is for the block's
    own keys, one for those of the stack, and no row has seen nothing.
    """

    @staticmethod
    def forward(ctx, q_1HnD, k_1GnD, v_1GnD, stack, layer, block, masks, kernel):
        out_1HnD, lse_1Hn = ring.fused_tile_forward(
            q_1HnD, k_1GnD, v_1GnD, None, True, kernel.scale
        )
        if block.depth:
            kv_21GpD = stack.kv[layer][:, :, :, : block.depth]
            above_1HnD, above_1Hn = ring.fused_tile_forward(
                q_1HnD, *kv_21GpD, None, False, kernel.scale
            )

            # Not in place: a checkpoint may keep what the kernel gave, and wants it as it was.
            out_1HnD, lse_1Hn = ring.merge(out_1HnD, lse_1Hn, above_1HnD, above_1Hn)
        ctx.save_for_backward(q_1HnD, k_1GnD, v_1GnD, out_1HnD, lse_1Hn)
        ctx.setting = stack, layer, block, masks, kernel
        return out_1HnD

    @staticmethod
    def backward(ctx, dout_1HnD):
        # A checkpoint lets a saved tensor be read once only, so the tiles are given what was read.
        saved = ctx.saved_tensors
        q_1HnD, k_1GnD, v_1GnD, out_1HnD, lse_1Hn = saved
        if q_1HnD.shape[2] >= ONE_SQUARE or not ring.is_tame(dout_1HnD):
            return _BlockAttention.gradients(dout_1HnD, saved, *ctx.setting)
        stack, layer, block, _, kernel = ctx.setting

        # As there: the gradients of the two parts add up, those of the keys above on the stack.
        of_rows = out_1HnD, lse_1Hn, None
        dq_1HnD, dk_1GnD, dv_1GnD = ring.fused_tile_backward(
            dout_1HnD, q_1HnD, k_1GnD, v_1GnD, *of_rows, True, kernel.scale
        )
        if block.depth:
            kv_21GpD = stack.kv[layer][:, :, :, : block.depth]
            dq_above_1HnD, dk_1GpD, dv_1GpD = ring.fused_tile_backward(
                dout_1HnD, q_1HnD, *kv_21GpD, *of_rows, False, kernel.scale
            )
            dq_1HnD.add_(dq_above_1HnD)
            stack.add(layer, 0, dk_1GpD, dv_1GpD)  # (6), for the tokens above
        stack.give(layer, block, dk_1GnD, dv_1GnD)
        return dq_1HnD, dk_1GnD, dv_1GnD, None, None, None, None, None


# 16. Dealing sequences out to ranks ----------------------------------------------------------
# For data-parallel training: who trains on which sequences, so that prefixes stay together.
# Skip it on one rank, and if your own sampler deals out groups.


class Cost(NamedTuple):
    """Modelled time of a tree, in units of a token: of a token, of a pair, of a token done again.

    pair: a layer's 4 M FLOPs a pair over 24 M^2 a token, for a width M of 1024. recomputed: 1/3
    with recompute=True (a forward is a third of a step), charged for each token above a fork.
    """

    token: float = 1.0
    pair: float = 1 / (6 * 1024)
    recomputed: float = 0.0

    def of_path(self, lengths):
        return lengths * self.token + lengths * (lengths + 1) / 2 * self.pair


def partition(sequences, world, *, strategy="dfs", cost=None) -> list[list[int]]:
    """Which sequences each of `world` ranks trains on: indices, each once, the same on every rank.

    "dfs": stretches of the sorted sequences, so that shared prefixes stay together, cut where the
    largest modelled time (`Cost`) of a rank is least. "round_robin": i to rank i % world, which
    pays for a prefix on every rank that has it. More ranks than sequences: some lists are empty.
    """
    if strategy not in ("dfs", "round_robin") or world < 1:
        raise ValueError('strategy must be "dfs" or "round_robin" and world 1 or more; '
                         f"came {strategy!r} and {world}")
    trie = TokenTrie(sequences)
    cost = cost or Cost()
    lengths = trie.lengths.numpy()
    if strategy == "round_robin":
        return [list(range(rank, len(lengths), world)) for rank in range(world)]

    # The time of a sorted sequence: its whole path if a rank begins with it, else only the tokens
    # that it does not share with the one before.
    whole = cost.of_path(lengths[trie.order])
    new = whole - cost.of_path(trie.shared)
    times = list(zip(whole.tolist(), new.tolist(), trie.shared.tolist(), strict=True))

    # If no rank may take longer than some time, greedy stretches use the fewest ranks. So the least
    # time for which `world` ranks are enough is found by bisection.
    low = whole.max(initial=0.0)
    high = whole.sum()
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _cut(times, cost.recomputed, middle, world) is None:
            low = middle
        else:
            high = middle
    cuts = _cut(times, cost.recomputed, high, world)
    return [[trie.order[k] for k in range(a, b)] for a, b in itertools.pairwise(cuts)]


def _cut(times, recomputed, limit, world):
    """[0, .., R], world + 1 ends of the longest stretches within a time; None if world is too few.

    times: for each sorted sequence (time of its whole path, time of its new tokens, how many tokens
    it shares with the one before). recomputed: that of `Cost`.
    """
    # A stretch pays the whole path of its first sequence, then new tokens. A token above a fork is
    # computed again: those are the shared ones, counted when the shared part gets longer.
    cuts = [0]
    time = 0.0
    forked = 0  # tokens of the current path that are known to lie above a fork
    for k, (whole, new, shared) in enumerate(times):
        time += new + recomputed * max(shared - forked, 0)
        forked = shared
        if time > limit * (1 + 1e-12):
            cuts.append(k)
            time = whole
            forked = 0
            if len(cuts) > world:
                return None
    return cuts + [len(times)] * (world + 1 - len(cuts))


def redistribute(sequences, data, *, group=None, strategy="dfs", cost=None):
    """Deals all ranks' sequences out by `partition`: this rank's share of (sequences, data).

    sequences: this rank's own. data: anything that pickles, one for each (a tuple of advantages, a
    mask, an id to find it again). Either may be []. Tensors come back on the CPU. ValueError on
    every rank if the lists of any do not fit. Every rank of the group calls it, once.
    """
    # A rank whose own lists are wrong may not stop here: the others would wait for it forever.
    place = ring.ring_of(group)
    problem = None
    arrays = []
    items = []
    try:
        arrays = _arrays_of_ids(sequences)
        items = tree_map(lambda x: x.cpu() if torch.is_tensor(x) else x, list(data))
        if len(arrays) != len(items):
            raise ValueError(f"{len(arrays)} sequences, but data for {len(items)}; one for each")
    except (TypeError, ValueError) as error:
        problem = str(error)

    # COMM: one message, which every rank sends, also with nothing or with its error in it. All see
    # all sequences, as `partition` must; their data are of the same size and go along. Pinned by
    # tests/test_tree_ranks.py::test_redistribute_when_only_rank_0_has_data.
    by_rank = [(problem, arrays, items)] * place.world
    if place.world > 1:
        dist.all_gather_object(by_rank, by_rank[0], group=place.group)
    problems = [f"rank {rank}: {why}" for rank, (why, _, _) in enumerate(by_rank) if why]
    if problems:
        raise ValueError("; ".join(problems))

    # Every rank has the same list now, so every rank finds the same partition.
    pairs = []
    for _, arrays_of_rank, items_of_rank in by_rank:
        pairs += zip(arrays_of_rank, items_of_rank, strict=True)
    shares = partition([x for x, _ in pairs], place.world, strategy=strategy, cost=cost)
    share = [pairs[i] for i in shares[place.rank]]
    return [torch.from_numpy(x) for x, _ in share], [item for _, item in share]


# 17. check: every gradient against the definition --------------------------------------------
# For auditors: a small model, every shape of tree that could go wrong, and a table of errors.
# Skip it to use the file; run it after every change.


class TinyModel(nn.Module):
    """What a tree asks of a model, small: GQA, q/k norm, RoPE, tied head, window, softcap."""

    def __init__(self, seed=0, *, vocab=11, layers=2, heads=4, groups=2, head_dim=4, width=16):
        super().__init__()
        self.heads = heads
        self.groups = groups
        self.forwarded = 0  # tokens that `hidden` was given

        # One tensor for all layers of a kind: the first dimension is the layer.
        shapes = {
            "embed": (vocab, width),
            "qkv": (layers, (heads + 2 * groups) * head_dim, width),
            "norm": (layers, 2, head_dim),
            "o": (layers, width, heads * head_dim),
            "up": (layers, 2 * width, width),
            "down": (layers, width, 2 * width),
        }
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
            setattr(self, name, nn.Parameter(drawn))

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        self.forwarded += tokens_BS.numel()
        attention = attention or self.defined
        x_BSM = self.embed[tokens_BS]
        positions = torch.arange(x_BSM.shape[1])[None] if positions is None else positions

        # RoPE as a rotation in the complex plane: a token's pairs of numbers turn by angles that
        # grow with its position. On a tree the position is the depth.
        frequencies = 0.1 ** torch.arange(0, self.norm.shape[2], 2).to(x_BSM)
        angles_B1Sf = positions[:, None, :, None] * frequencies
        turn_B1Sf = torch.polar(torch.ones_like(angles_B1Sf), angles_B1Sf)

        def normed_and_turned(x, norm):
            x = norm * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            turned = torch.view_as_complex(x.unflatten(3, (-1, 2))) * turn_B1Sf
            return torch.view_as_real(turned).flatten(3)

        for layer in range(len(self.qkv)):
            parts = (x_BSM @ self.qkv[layer].T).unflatten(2, (-1, self.norm.shape[2]))
            q, k, v = parts.transpose(1, 2).split([self.heads, self.groups, self.groups], 1)
            q = normed_and_turned(q, self.norm[layer, 0])
            k = normed_and_turned(k, self.norm[layer, 1])

            # Every second layer has a window, as in Gemma.
            window = None if layer % 2 else 3
            out = attention(q, k, v, layer=layer, scale=0.5, window=window, softcap=2.0)
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

    # The dictionary draws in its order, so a new shape goes to its end: the others then stay.
    stem = draw(7)
    tips = [[t] for t in range(5)]
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
    # All of it depends on i, so that a gradient that reaches the wrong sequence shows. The square
    # of the sum is a term that no sum over tokens can replace.
    n = torch.arange(len(logprobs)) + 1.0
    old = torch.sin(n * 3 + i).to(logprobs)
    weight = torch.sin(n * 7 + i).to(logprobs)
    advantage = math.cos(5 * i + 1)
    mask = (weight > -0.5).to(logprobs)
    ratio = torch.exp(logprobs - logprobs.detach() + 0.3 * old)
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = -(clipped * mask).sum() - 0.01 * entropy.sum() + 0.1 * logprobs.sum().square()
    if values is None:
        return loss
    return loss + ((values - old) * weight).square().sum()


def _outcome(model, way, *given, **options):
    """Loss, log-probs and every gradient after way(model, ..)."""
    model.zero_grad()
    loss, logprobs, *_ = way(model, *given, temperature=0.7, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [x.cpu() for x in (torch.as_tensor(loss), *logprobs, *grads)]


def _one_graph(model, trie, loss_fn, *, temperature):
    """The whole tree packed, and one backward of it."""
    scores = tree_scores(model, trie, temperature=temperature)
    loss = torch.stack([loss_fn(i, *score) for i, score in enumerate(scores)]).sum()
    loss.backward()
    return loss.detach(), [score[0].detach() for score in scores]


def _tree_rows(model, cases, mine=None):
    """(row, {column: the largest relative error of loss, log-probs and every gradient}).

    Columns: one graph; block sizes, each the worse of with and without recomputation.
    mine: the same model on another device, which is then held against the definition on the CPU.
    """
    if mine is None:
        mine = model
    for name, sequences in cases.items():
        sequences = [torch.tensor(x) for x in sequences]
        trie = TokenTrie(sequences)
        truth = _outcome(model, definition, sequences, example_loss)

        def error(way, trie=trie, truth=truth, **options):
            found = _outcome(mine, way, trie, example_loss, **options)
            return max(ring.relative(a, b) for a, b in zip(found, truth, strict=True))

        # Blocks of 1 token cut every segment and every fork; "path" holds the longest path.
        line = {"packed": error(_one_graph)}
        sizes = {"1": 1, "2": 2, "3": 3, "5": 5, "path": int(trie.lengths.max()), "all": None}
        for column, size in sizes.items():
            errors = [error(tree_backward, max_tokens=size, recompute=x) for x in (False, True)]
            line[column] = max(errors)

        # That gradients are right does not show that a token was computed once; this does.
        if isinstance(model, TinyModel):
            mine.forwarded = 0
            tree_backward(mine, trie, example_loss, max_tokens=2)
            line["twice"] = abs(mine.forwarded - len(trie))
        yield name, line


def check() -> int:
    """Every error beside its budget; 1 if one is over."""
    torch.set_num_threads(1)
    tables = {"by max_tokens": dict(_tree_rows(TinyModel(), forests()))}
    try:
        tables["families"] = _measuring_file().family_rows()
    except ImportError as missing:
        print(f"families: SKIP ({missing}); it would show those of models.py")
    worst = 0.0
    for name, rows in tables.items():
        columns = next(iter(rows.values()))
        print(f"\n{name:>24}" + "".join(f" {x:>11}" for x in columns) + "   budget 1e-10")
        for row, line in rows.items():
            # A NaN is smaller than any budget to `max`, so it counts as infinite.
            values = [math.inf if math.isnan(x) else x for x in line.values()]
            worst = max(worst, *values)
            ok = "ok" if max(values) <= 1e-10 else "FAILED"
            print(f"{row:>24}" + "".join(f" {x:11.1e}" for x in values) + f"   {ok}")
    print(json.dumps({"check": "tree_attention", "ok": worst <= 1e-10, "max_error": worst}))
    return int(worst > 1e-10)


# 18. main ------------------------------------------------------------------------------------
# For the command line: check is above; bench and plan are in tests/measure_tree.py.
# Skip it if you import the file.


def _measuring_file(name="measure_tree"):
    """A file of tests/; ImportError where it, or a file that it needs, is missing."""
    sys.path.append(str(Path(__file__).resolve().parent / "tests"))
    return __import__(name)


def main(argv) -> int:
    """Runs a command and returns its exit code."""
    if argv == ["check"]:
        return check()

    # Those who measure have the tests beside this file; who copied it alone has not.
    if argv[:1] in (["bench"], ["plan"]) or argv[:2] == ["check", "--device"]:
        try:
            if argv[0] == "check":
                return _measuring_file("measure_gpu").check("tree_attention", argv[1:])
            return _measuring_file().main(argv)
        except ImportError as missing:
            print(f"{argv[0]} needs the tests beside this file: {missing}", file=sys.stderr)
            return 2
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

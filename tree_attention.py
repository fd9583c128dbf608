"""Tree attention: train on sequences that share prefixes, at the cost of their distinct tokens.

The trick in one sentence: run a shared segment once, give its children detached copies of what they
read, and when they are done, backpropagate the gradients of the copies into it.

Sequences that begin identically (GRPO groups, branching or multi-turn rollouts) form a tree. A
causal model gives a shared token the same state in all of them, so one forward and one backward per
distinct token is enough: 5 for the 8 tokens of 5 6 7 / 5 6 8 / 5 9. Each loss still sees its whole
sequence, and the gradient is the gradient of training on every sequence by itself.

    python tree_attention.py core       # check the core against each sequence by itself, 10 s
    python tree_attention.py check      # check the file: every shape of tree and family of models

What it must equal, for sequences x^1 .. x^R of L_i tokens and a loss f_i of each:

    (1)  token i of the tree sees token j  iff  j is an ancestor of i, or i itself
    (2)  lp^i_s     =  log softmax(W h)[x^i_s],  where h is the state of the token before it
    (3)  loss       =  sum_i f_i(lp^i)
    (4)  dloss/dlp_t   =  sum of df_i/dlp^i at token t, over the sequences i that contain t
    (5)  dk_j, dv_j    =  sum over the tokens that see j: those of its own segment, by autograd,
                          and those of the segments below, by the leaves that they have read

Letters in names are dimensions:  N tokens of the tree   n tokens of one segment   m of it and the
path above   B, S of a batch   H query heads   G key heads   D head size   M width   V vocabulary
"""

import sys

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

# 1. The definition: each sequence by itself ---------------------------------------------------


def definition(model, sequences, loss_fn, /, **options):
    """Compute the loss and its gradient one sequence at a time: everything below must equal this.

    model: has .hidden(tokens (1, n), positions=, attention=) -> (1, n, M) and .logprobs(states
        (n, M), targets (n,)) -> (log-probs, entropies), (n,) each. Each layer calls attention(q
        (1, H, n, D), k, v (1, G, n, D), layer=, scale=) -> (1, H, n, D) once, after RoPE.
    sequences: 1-D int64 tensors of L_i tokens.
    loss_fn: loss_fn(i, logprobs, entropies), (L_i - 1,) each, returns the loss of sequence i.
    options: for model.logprobs, for example temperature=.

    Returns the loss and a list of log-probs (L_i - 1,), detached. Adds to .grad.
    """
    total = 0.0
    logprobs = []
    for i, x in enumerate(sequences):
        # The state of a token predicts the next token. So L tokens have L - 1 log-probs.
        states_nM = model.hidden(x[None])[0, :-1]
        scores = model.logprobs(states_nM, x[1:], **options)  # (2)
        loss = loss_fn(i, *scores)
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()  # (3)
        logprobs.append(scores[0].detach())
    return total, logprobs


# 2. A radix tree ----------------------------------------------------------------------------------


class Node:
    """A segment: tokens without a fork, the nodes below it, and the sequences that end with it."""

    def __init__(self, tokens, depth):
        self.tokens = tokens
        self.depth = depth  # of the first token: its position in every sequence
        self.children = []
        self.ends = []


def radix_tree(sequences):
    """Return the root of the tree of all prefixes, an empty segment.

        sequences  5 6 7 / 5 6 8 / 5 9       root - [5] - [6] - [7]
                                                     |     `--- [8]
                                                      `--- [9]
    """

    def grow(node, members, end):
        # members: the sequences that run through the node; end: the depth after its last token.
        node.ends = [i for i in members if len(sequences[i]) == end]
        branches = {}
        for i in members:
            if len(sequences[i]) > end:
                branches.setdefault(sequences[i][end], []).append(i)

        # One child per next token. It is as long as all its sequences agree and none ends.
        for some in branches.values():
            stop = end + 1
            while all(len(sequences[i]) > stop for i in some):
                if len({sequences[i][stop] for i in some}) > 1:
                    break
                stop += 1
            child = Node(sequences[some[0]][end:stop], end)
            node.children.append(child)
            grow(child, some, stop)

    sequences = [x.tolist() for x in sequences]
    root = Node([], 0)
    grow(root, range(len(sequences)), 0)
    return root


# 3. The whole tree in one call ------------------------------------------------------------------
#
# Pack the tokens in preorder: a token, then everything below it, branch after branch. A mask hides
# everything but the ancestors (1), and the position of a token is its depth. 5 6 7 / 5 6 8 / 5 9:
#
#     index  0 1 2 3 4       token 5   sees  0  x             path  0
#     token  5 6 7 8 9             6         1  x x                 0 1
#     depth  0 1 2 2 1             7         2  x x x               0 1 2
#                                  8         3  x x . x             0 1 3
#                                  9         4  x . . . x           0 4


def pack(root):
    """Return the tokens in preorder, the path to each, and {sequence: path to its last token}.

    A path is a list of indices, from the first token of a sequence to the token itself.
    """
    tokens = []
    paths = []
    last_path = {}

    def visit(node, path):
        # The next free index is the token's index: a parent comes before everything below it.
        for token in node.tokens:
            path = [*path, len(tokens)]
            tokens.append(token)
            paths.append(path)
        for i in node.ends:
            last_path[i] = path
        for child in node.children:
            visit(child, path)

    visit(root, [])
    return tokens, paths, last_path


def simple_tree_logprobs(model, sequences):
    """Return the log-probs (L_i - 1,) of each sequence, differentiable: one forward of the tree."""
    tokens, paths, last_path = pack(radix_tree(sequences))
    visible_NN = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for t, path in enumerate(paths):
        visible_NN[t, path] = True  # (1)

    def attention(q, k, v, /, *, layer, scale):
        return scaled_dot_product_attention(q, k, v, visible_NN, scale=scale, enable_gqa=True)

    positions = torch.tensor([[len(path[:-1]) for path in paths]])  # as many as it has ancestors
    hidden_NM = model.hidden(torch.tensor([tokens]), positions=positions, attention=attention)[0]

    # Token t is scored from the state of its parent, so a token at a fork predicts several. The
    # first token of a path has no parent: take any state, since nobody reads its score.
    parents = [path[-2] if len(path) > 1 else 0 for path in paths]
    logprobs_N, _ = model.logprobs(hidden_NM[parents], torch.tensor(tokens))  # (2)

    # Every sequence reads the scores on its path. Autograd sums over those that read one (4).
    return [logprobs_N[last_path[i][1:]] for i in range(len(sequences))]


# 4. Depth first, with leaves --------------------------------------------------------------------
#
# The graph of the whole tree may not fit into memory. So call the model once per segment, depth
# first. A segment needs three things from the segments above it: their keys and values, the state
# of the last token, which predicts its own first token, and the log-probs of the path so far. It
# gets all of them as leaves: detached copies, each of which collects a gradient of its own.
#
#     forward [5], forward [6], forward [7]       [7] reads leaves of [5] and [6]
#     backward [7], forward [8], backward [8]     both add to the gradients of these leaves
#     backward [6]                                starts from what the leaves of [6] have collected
#     forward [9], backward [9], backward [5]
#
# So every segment has one forward and one backward, however many sequences run through it. All that
# reads a segment is below it, and has had its backward before: depth first is the graph reversed.
#
# Two things still grow: a segment may be long, and the graphs of a whole path wait for their
# backward. With max_tokens, segments are cut into chunks, and no graph waits: a chunk runs without
# a graph on the way down, and once more, with a graph, on the way up. Then memory holds the keys
# and values of one path, on one stack, and the graph of one chunk.


def simple_tree_backward(model, sequences, loss_fn, max_tokens=None):
    """Add the gradient of (3) to .grad; return the loss and the log-probs, like `definition`.

    loss_fn: loss_fn(i, logprobs), (L_i - 1,), returns the loss of sequence i.
    max_tokens: tokens of a chunk, of which there is one graph at a time. Default: whole segments,
        with the graphs of one path at a time.
    """
    recompute = max_tokens is not None
    root = radix_tree(sequences)
    if recompute:
        cut_segments(root, max_tokens)
    losses = []
    found = {}
    stack = {}  # layer -> [(k, v) of each segment from the root down], all leaves

    def visit(node, state_above, path_above):
        """Run a segment forward, then everything below it, then the segment backward.

        state_above: leaf (1, M), the state before the first token, or None.
        path_above: [leaf of the log-probs of each segment above].
        """
        own_kv = {}

        def attention(q, k, v, /, *, layer, scale):
            own_kv[layer] = (k, v)
            pairs = [*stack.get(layer, []), (k, v)]
            keys, values = (torch.cat(x, 2) for x in zip(*pairs, strict=True))
            return path_attention(q, keys, values, scale)

        with torch.set_grad_enabled(not recompute):
            logprobs_n, state_1M = run_segment(model, node, state_above, attention)

        # Detach what others read: the keys and values, the last state, the log-probs.
        for layer, kv in own_kv.items():
            stack.setdefault(layer, []).append([leaf_of(x) for x in kv])
        state = leaf_of(state_1M)
        path = [*path_above, leaf_of(logprobs_n)]

        # The losses of the sequences that end here, then everything below.
        for i in node.ends:
            found[i] = torch.cat(path)
            loss = loss_fn(i, found[i])
            loss.backward()  # (4): sequences with a common token add to the same leaf
            losses.append(loss.item())
        for child in node.children:
            visit(child, state, path)

        # Everything below is done, so the leaves have all of their gradient. Pop them before the
        # second run: it must read what is above it, not its own keys twice. (The loss would stay
        # right, and only the gradient would be wrong.)
        leaves = {layer: stack[layer].pop() for layer in own_kv}
        if recompute:
            logprobs_n, state_1M = run_segment(model, node, state_above, attention)

        # Backpropagate into what the leaves were detached from, from several tensors at once. A
        # leaf that nobody read has no gradient.
        pairs = [(logprobs_n, path[-1]), (state_1M, state)]
        for layer, kv in own_kv.items():
            pairs += zip(kv, leaves[layer], strict=True)
        pairs = [(x, leaf.grad) for x, leaf in pairs if leaf.grad is not None]
        if pairs:
            tensors, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, gradients)  # (5)

    for child in root.children:
        visit(child, None, [])
    return sum(losses), [found[i].detach() for i in range(len(sequences))]  # (3)


def leaf_of(x):
    """Return x without its graph, ready to collect a gradient in .grad."""
    return x.detach().requires_grad_()


def run_segment(model, node, state_above, attention):
    """Return the log-probs of a segment's tokens, and its last state (1, M)."""
    depths = torch.arange(node.depth, node.depth + len(node.tokens))
    tokens = torch.tensor(node.tokens)
    hidden_nM = model.hidden(tokens[None], positions=depths[None], attention=attention)[0]

    # Each token is scored from the state before it. The first token of a sequence has none.
    if state_above is None:
        logprobs_n, _ = model.logprobs(hidden_nM[:-1], tokens[1:])
    else:
        logprobs_n, _ = model.logprobs(torch.cat([state_above, hidden_nM[:-1]]), tokens)  # (2)
    return logprobs_n, hidden_nM[-1:]


def path_attention(q_1HnD, k_1GmD, v_1GmD, scale):
    """Attend causally from the last n of m consecutive tokens of a path to all m."""
    # Query i is token m - n + i, and sees the keys up to there. With n = 2 and m = 5:
    #
    #     x x x x .
    #     x x x x x
    n = q_1HnD.shape[2]
    m = k_1GmD.shape[2]
    visible_nm = torch.ones(n, m, dtype=torch.bool).tril(m - n)  # (1)
    return scaled_dot_product_attention(
        q_1HnD, k_1GmD, v_1GmD, visible_nm, scale=scale, enable_gqa=True
    )


def cut_segments(node, max_tokens):
    """Cut every segment below a node into chunks of at most max_tokens tokens, in place."""
    # 7 tokens and max_tokens = 3: the node keeps 3, and a new child takes over the other 4, all
    # children and all ends. Then the child is cut in turn.
    if len(node.tokens) > max_tokens:
        rest = Node(node.tokens[max_tokens:], node.depth + max_tokens)
        rest.children = node.children
        rest.ends = node.ends
        node.tokens = node.tokens[:max_tokens]
        node.children = [rest]
        node.ends = []
    for child in node.children:
        cut_segments(child, max_tokens)


# 5. The check -----------------------------------------------------------------------------------


class CheckModel(nn.Module):
    """A small transformer in float64: grouped heads, RoPE, MLP, a head tied to the embedding."""

    def __init__(self, seed=0, *, vocab=11, layers=2, heads=4, groups=2, head_size=4, width=16):
        super().__init__()
        # One tensor for all layers of a kind: the first dimension is the layer.
        self.split = [heads, groups, groups]
        qkv = sum(self.split) * head_size
        shapes = {"embed": (vocab, width), "qkv": (layers, qkv, width)}
        shapes |= {"out": (layers, width, heads * head_size)}
        shapes |= {"up": (layers, 2 * width, width), "down": (layers, width, 2 * width)}
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
            setattr(self, name, nn.Parameter(drawn))

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        return check_hidden(self, tokens_BS, positions, attention or self.plain_attention)

    def logprobs(self, states_nM, targets_n, /, *, temperature=1.0):
        return check_logprobs(self, states_nM, targets_n, temperature)

    def layer_options(self, layer):
        """Return more options of `attention`, for a model with a window or a softcap."""
        return {}

    @staticmethod
    def plain_attention(q, k, v, /, *, layer, scale):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def check_hidden(model, tokens_BS, positions_BS, attention):
    """Return the states (B, S, M) of a `CheckModel`."""
    if positions_BS is None:
        positions_BS = torch.arange(tokens_BS.shape[1])[None]
    x_BSM = model.embed[tokens_BS]

    # RoPE as a rotation in the complex plane: pairs of numbers turn by angles that grow with the
    # position. In a tree the position is the depth.
    angles_B1S1 = positions_BS[:, None, :, None].to(x_BSM)
    turn_B1S2 = torch.polar(torch.ones_like(angles_B1S1), angles_B1S1 * x_BSM.new_tensor([1, 0.1]))

    def turned(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(3, (2, 2))) * turn_B1S2)

    for layer in range(len(model.qkv)):
        heads = (x_BSM @ model.qkv[layer].T).unflatten(2, (sum(model.split), -1)).transpose(1, 2)
        q, k, v = heads.split(model.split, 1)
        options = dict(layer=layer, scale=0.5, **model.layer_options(layer))
        out = attention(turned(q).flatten(3), turned(k).flatten(3), v, **options)
        x_BSM = x_BSM + out.transpose(1, 2).flatten(2) @ model.out[layer].T
        x_BSM = x_BSM + torch.tanh(x_BSM @ model.up[layer].T) @ model.down[layer].T
    return x_BSM


def check_logprobs(model, states_nM, targets_n, temperature):
    """Return the log-probs of the targets and the entropies, (n,) each, of a `CheckModel`."""
    logp_nV = (states_nM @ model.embed.T / temperature).log_softmax(-1)
    return logp_nV.gather(1, targets_n[:, None])[:, 0], -(logp_nV.exp() * logp_nV).sum(-1)


def check_loss(i, logprobs, entropies=None):
    """Return a loss that depends on i, on each token, and on the sequence as a whole."""
    weights = torch.cos(torch.arange(len(logprobs)) * 3.0 + i).to(logprobs)
    return (weights * logprobs).sum() + 0.1 * logprobs.sum().square()


def check_packed(model, sequences, loss_fn):
    """Do what `definition` does with one call of the packed tree."""
    logprobs = simple_tree_logprobs(model, sequences)
    loss = sum(loss_fn(i, x) for i, x in enumerate(logprobs))
    loss.backward()
    return loss.detach(), [x.detach() for x in logprobs]


def core_check():
    """Return the largest relative error of loss, log-probs and gradients, over trees and ways."""
    trees = {
        "forks": ["567", "568", "59", "56", "12342", "123993", "12397"],
        "duplicates and prefixes": ["8123456", "812", "8123456", "8", "7"],
        "one long path": ["12345678901234567890"],
    }
    ways = [definition, check_packed, simple_tree_backward]
    for size in (1, 2, 3, 8):
        ways.append(lambda *given, size=size: simple_tree_backward(*given, size))

    model = CheckModel()
    errors = []
    for texts in trees.values():
        sequences = [torch.tensor([int(digit) for digit in text]) for text in texts]
        results = []
        for way in ways:
            model.zero_grad()
            loss, logprobs = way(model, sequences, check_loss)
            loss = torch.as_tensor(loss, dtype=torch.float64)
            results.append([loss, *logprobs, *(p.grad.clone() for p in model.parameters())])
        for found in results[1:]:
            for a, b in zip(found, results[0], strict=True):
                errors.append((a - b).norm() / b.norm() if b.numel() else b.sum())
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def core_main(argv):
    """Check the core; exit with 1 if an error is too large."""
    worst = core_check()
    print(f"packed, depth first, in chunks: largest error {worst:.1e}")
    if not worst <= 1e-10:
        sys.exit(1)


# ================================================================================================
# The core ends here. The full version follows: fast kernels, chunks, losses of every kind, ranks.
# ================================================================================================
#
# What it adds to (1) to (5):
#
#     (6)  log softmax(W h / temperature) in (2), entropies of the same distribution, and the values
#          of a critic; f_i may depend on all of them
#
# The tree in chunks. A chunk is a stretch of the preorder of at most max_tokens tokens: a segment
# of one path, followed by as many complete subtrees as fit. All ancestors of its tokens are in the
# chunk or on the path to its first token. Chunks run depth first, as the core's segments do. Whole
# subtrees in one call keep the matrices large.
#
#     |                   | tokens forward, backward | held at the peak                            |
#     | one by one        | sum L_i, sum L_i         | the graph of the longest sequence           |
#     | one chunk         | N, N                     | the graph of N tokens                       |
#     | chunks            | N, N                     | graphs of this chunk and of all above       |
#     | chunks, recompute | N + N', N                | the graph of this chunk; K, V of one path   |
#
# N' counts the tokens of chunks that others are below. Where graphs are held, a chunk that is the
# only child of another is one call with it, because a cut there would free nothing. Attention has
# sum_t (depth_t + 1) pairs, where the flat batch has sum_i L_i (L_i + 1) / 2.
#
# How it deviates from the papers. Prefix Grouper shares one prefix; here it is any tree. Tree
# Training packs a tree that fits into memory; AReaL-DTA walks leaf by leaf, one segment at a time.
# Chunks are both. The first token below a fork is scored in its parent's chunk, so there is no
# cache of forks. A rank without sequences is ordinary: loss 0.
#
# Not here: dropout; mixers other than causal softmax attention; batches of trees (a forest is one
# tree); chunks across the ranks of one sequence (the whole tree at once: `tree_scores(group=)`).
#
# More letters:  R sequences, of L_i tokens   L the longest   T = L - 1   e edges scored in a chunk,
# from its tokens to their children; an edge has the child's index   K targets that point to edges
# E experts   C = 2 or 3 scores of an edge: log-prob, entropy and, for a critic, value   p tokens on
# the path above a chunk, and m = p + n keys of both   U groups of W tokens, each with Y keys, A of
# them above
#
# References: AReaL-DTA arXiv:2602.00482; Tree Training arXiv:2511.00413; Prefix Grouper
# arXiv:2506.05433; FlashMask arXiv:2410.01359.

import contextlib  # noqa: E402
import functools  # noqa: E402
import inspect  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import re  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

import ring_attention as ring  # noqa: E402

# 6. The tree of tokens --------------------------------------------------------------------------
# For: trees of any size, as arrays, without recursion. It is `radix_tree` and `pack` in one.


class TokenTrie:
    """The tree of all prefixes of some sequences, packed in preorder; of a fork's branches the
    largest comes first.

    sequences: 1-D integer tensors (or lists) of 1 token or more, ids >= 0. Not changed.

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

    def __init__(self, sequences):
        arrays = _arrays_of_ids(sequences)
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
        self.tokens = _int64(tokens[old])
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
        """Return (1) as a `ring_attention.Mask`; a window counts in depth, not in indices."""
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


# 7. Attention over the packed tree --------------------------------------------------------------
# For: `tree_attention`, and the attention of every chunk.


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
        """Return which of the p + n keys each of the n queries sees, as a `ring.Mask`."""
        return self.mask_without_window.with_window(window)

    @functools.cached_property
    def mask_without_window(self):
        """Return (1), made once: a mask keeps its boxes, so that all layers share one search."""
        # In preorder the descendants of token j are the indices j + 1 .. end_j - 1. So the queries
        # that see key j are an interval, and the mask is two integers per token. `Mask.tree` would
        # ask whether the ends form a tree, which they do.
        p = len(self.above)
        index = np.arange(len(self.end))
        whole = ring.Mask(index, self.end, position_BS=self.depth)  # (1)
        return whole.slice(slice(p, None), ring.ALL) if p else whole


def tree_attention(q, k, v, /, trie, *, scale=None, window=None, softcap=None, backend=None):
    """Compute attention of every token of a tree to its ancestors and itself (1), differentiable.

    q: (1, H, N, D). k, v: (1, G, N, D). In the order of trie.tokens.
    trie: the `TokenTrie`.
    window: how many tokens, itself and the nearest ancestors, a token sees. Default: all.
    scale, softcap, backend: as in `ring_attention.attend`, with its dtypes and errors.

    Returns (1, H, N, D) in the dtype of q.
    """
    return stretch_attention(q, k, v, trie.stretch, scale, window, softcap, backend)


def stretch_attention(q, k, v, stretch, scale, window, softcap, backend=None):
    """Compute attention of a `Stretch`: q (1, H, n, D) against k, v (1, G, p + n, D)."""
    mask = stretch.mask(window)
    options = dict(scale=scale, softcap=softcap, backend=backend)
    if backend is None and softcap is None and groups_pay(q, k, stretch):
        # A caller's mistake is the same error as in `attend`.
        scale = ring.checked_config(q, k, v, mask, **options).scale
        return grouped_attention(q, k, v, stretch, scale, window)

    # A segment against itself is a causal triangle, and everything below it sees all of it: a full
    # rectangle. Fused kernels compute both without a mask and without a copied key:
    #
    #     5 6 7 8 / 5 6 9      0  x               rows 0 to 3 against keys 0 to 3: a triangle
    #                          1  x x             row 4 against keys 0 1: a rectangle
    #                          2  x x x           row 4 against key 4: a triangle
    #                          3  x x x x
    #                          4  x x . . x       row 4 against keys 2 3: never computed
    return ring.attend(q, k, v, mask, **options)[0]


# Short paths: a tree of many short segments would be very many boxes of few pairs each. Instead,
# groups of WIDTH tokens attend, each to the path above its first token and to itself. It is 2 to 4
# times as fast as boxes for paths of 17 to 48 tokens, and no faster beyond SHORT.
WIDTH = 32
SHORT = 128  # tokens of the longest path
GATHERED = 1 << 22  # numbers that a layer gathers, of keys and as many of values: bounds memory


def groups_pay(q, k, stretch):
    """Return True if `grouped_attention` can compute this and is faster than boxes."""
    # It is written for one tree, and measured on a CPU only. Other shapes are for the checks.
    if q.device.type != "cpu" or q.ndim != 4 or len(q) != 1 or not q.shape[2]:
        return False

    # Each group gathers as many keys as the longest path has, and its own.
    longest = int(stretch.depth.max()) + 1
    groups = -(-q.shape[2] // WIDTH)
    gathered = groups * (WIDTH + longest) * k.shape[1] * k.shape[3]
    return longest <= SHORT and gathered <= GATHERED


def groups_of_tokens(stretch, window, dtype):
    """Return keys_UY, which keys each group of WIDTH tokens looks at, and the bias (U, 1, W, Y)."""
    # The ancestors of a group's tokens are in the group or on the path to its first token. Tokens
    # of 5 6 7 / 5 6 8 / 5 9 in groups of 3; ".": nothing, and the last group is filled up:
    #
    #     index    0 1 2 3 4    queries  0 1 2    keys  . . 0 1 2
    #     token    5 6 7 8 9             3 4 .          0 1 3 4 .
    p, m = len(stretch.above), len(stretch.end)
    count = -(-(m - p) // WIDTH)
    rows_UW = p + np.arange(count * WIDTH).reshape(count, WIDTH)
    index = np.arange(m)
    paths = [index[:t][stretch.end[:t] > t] for t in rows_UW[:, 0]]

    # "Nothing" gets an index after all queries, so that the rule of (1) hides it: j <= i < end_j.
    nothing = p + count * WIDTH
    above_UA = np.full((count, max(len(path) for path in paths)), nothing)
    for group, path in enumerate(paths):
        above_UA[group, : len(path)] = path
    keys_UY = np.concatenate([above_UA, rows_UW], 1)

    # Then all pairs of a group are one comparison.
    end = np.append(stretch.end, np.arange(m, nothing + 1) + 1)
    i_UW1 = rows_UW[:, :, None]
    j_U1Y = keys_UY[:, None]
    sees_UWY = (j_U1Y <= i_UW1) & (i_UW1 < end[j_U1Y])  # (1)
    if window is not None:
        depth = np.append(stretch.depth, np.zeros(nothing + 1 - m, np.int64))
        sees_UWY &= depth[i_UW1] - depth[j_U1Y] < window

    # Torch adds the bias to the scores. Index m and up is nothing: any key will do.
    bias_UWY = torch.zeros(sees_UWY.shape, dtype=dtype)
    bias_UWY.masked_fill_(torch.from_numpy(~sees_UWY), -math.inf)
    return torch.from_numpy(keys_UY.clip(max=m - 1)), bias_UWY[:, None]


def grouped_attention(q_1HnD, k_1GmD, v_1GmD, stretch, scale, window):
    """Compute attention of a `Stretch` with short paths: all groups in one call of torch's."""
    # NUMERICS: scores, softmax and sums are in float32 or better, as in boxes. Pinned by
    # tests/test_tree.py::test_tree_attention_in_low_precision_is_as_good_as_plain_torch.
    wide = torch.promote_types(q_1HnD.dtype, torch.float32)
    if (window, wide) not in stretch.groups:
        stretch.groups[window, wide] = groups_of_tokens(stretch, window, wide)
    keys_UY, bias_U1WY = stretch.groups[window, wide]

    # Queries are in order already, but for the end of the last group. Keys are gathered: each group
    # needs the path above it too, which for short paths is little.
    n = q_1HnD.shape[2]
    filled = len(keys_UY) * WIDTH - n
    q_nHD = q_1HnD[0].transpose(0, 1).to(wide)
    q_UWHD = nn.functional.pad(q_nHD, (0, 0, 0, 0, 0, filled)).unflatten(0, (-1, WIDTH))
    q_UHWD = q_UWHD.transpose(1, 2)

    def gathered(x_1GmD):
        x_mGD = x_1GmD[0].transpose(0, 1).to(wide)
        x_UYGD = x_mGD.index_select(0, keys_UY.flatten()).unflatten(0, keys_UY.shape)
        return x_UYGD.transpose(1, 2)

    out_UHWD = scaled_dot_product_attention(
        q_UHWD, gathered(k_1GmD), gathered(v_1GmD), bias_U1WY, scale=scale, enable_gqa=True
    )
    out_nHD = out_UHWD.transpose(1, 2).flatten(0, 1)[:n]
    return out_nHD.transpose(0, 1)[None].to(q_1HnD.dtype)


# 8. The whole tree in one graph, on one rank or on several --------------------------------------
# For: --tree sparse. It is `simple_tree_logprobs` with masks, padding, critics, and a ring.


def packed_tree(trie, length=None):
    """Return a tree as a row of `length` places: its tokens and their positions, (1, S) each.

    Padding follows the tree: token 0 at position 0. Default: none.
    """
    # Positions are depths: every token is where it is in its sequences.
    padding = 0 if length is None else length - len(trie)
    pad = nn.functional.pad
    return tuple(pad(x, (0, padding))[None] for x in (trie.tokens, trie.positions))


def packed_tree_attention(trie, length=None, *, group=None, debug=False, **ring_options):
    """Return what the layers call for a row of `packed_tree`: attention of each token to its path.

    group: the ranks that share the row, by `ring_attention` with ring_options. Default: one rank.
    debug: on a ring, the checks of `ring_attention`, whose message names the layer.
    """
    N = len(trie)
    length = N if length is None else length

    def on_one_rank(q, k, v, /, *, layer, scale, window=None, softcap=None):
        # Short paths are faster by `tree_attention` than by a mask. The output of padding is 0.
        options = dict(scale=scale, window=window, softcap=softcap)
        out = tree_attention(*(x[:, :, :N] for x in (q, k, v)), trie, **options)
        return out if length == N else nn.functional.pad(out, (0, 0, 0, length - N))

    if group is None:
        return on_one_rank

    # On a ring a rank holds some of the tokens, while the mask is about indices of the whole row.
    # So a tree crosses ranks like any sequence: keys and values travel, queries stay. Each token of
    # the padding is a tree by itself:
    #
    #     5 6 7 / 5 9 in 6 places     tokens 5 6 7 9 0 0    subtree_end 4 3 3 4 5 6
    _, depth_1S = packed_tree(trie, length)
    end_S = np.append(trie.subtree_end.numpy(), np.arange(N, length) + 1)
    mask = ring.Mask(np.arange(length), end_S, position_BS=depth_1S)  # (1)

    def on_ring(q, k, v, /, *, layer, scale, window=None, softcap=None):
        options = dict(group=group, scale=scale, softcap=softcap, **ring_options)
        options |= dict(mask=mask.with_window(window), debug=debug and f"layer {layer}")
        return ring.ring_attention(q, k, v, **options)

    return on_ring


def _is_critic(model):
    """Return True if the model has a value head: its losses get values too."""
    return getattr(getattr(model, "config", None), "value_head", False)


def _score_edges(model, hidden_nM, tokens_n, trie, edges_e, temperature):
    """Return log-probs, entropies and, of a critic, values of some edges, (e,) each.

    hidden_nM, tokens_n: states and ascending indices of tokens that include the edges' parents.
    """
    # The head is the largest matmul, so it runs at the parents of the wanted edges and nowhere
    # else. A token at a fork is used once per child:
    #
    #     5 6 7 / 5 6 8 / 5 9      edges    1 2 3 4      edge 2: token 7 given the state of 6
    #                              parents  0 1 1 0      edge 3: token 8 given the same state
    rows_e = torch.searchsorted(tokens_n, trie.parent[edges_e])
    scored_eM = hidden_nM[rows_e.to(hidden_nM.device)]
    targets_e = trie.tokens[edges_e].to(hidden_nM.device)
    scores = model.logprobs(scored_eM, targets_e, temperature=temperature)  # (2), (6)
    if _is_critic(model):
        return (*scores, model.values(scored_eM))
    return tuple(scores)


def wanted_edges(trie, masks=None):
    """Return the edges to score (e,), ascending, and which of them each wanted target is (K,).

    masks: a bool (L_i - 1,) for each sequence, of its targets tokens[1:]. Default: all are wanted.
        Targets come sequence after sequence. Those of several may be one token of the tree, which
        is scored once.

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


def _packed_scores(model, trie, temperature, masks, group, method, layout):
    """Return (2) of every edge in one graph, C of (N,), 0 where no edge is, on all ranks.

    group: None for this rank alone; else its ranks share the packed tokens.
    method, layout: of `ring_attention`.
    """
    place = ring.Ring(None, 0, 1) if group is None else ring.ring_of(group)
    tokens_n = ring.indices(len(trie), place.rank, place.world, layout)
    options = {} if place.world == 1 else dict(group=group, method=method, layout=layout)
    device = next(model.parameters()).device
    tokens_1n, positions_1n = (x[:, tokens_n].to(device) for x in packed_tree(trie))
    attention = packed_tree_attention(trie, **options)
    hidden_1nM = model.hidden(tokens_1n, positions=positions_1n, attention=attention)

    # An edge is scored on the rank that has its parent's state.
    edges, _ = wanted_edges(trie, masks)
    edges_e = torch.from_numpy(edges[np.isin(trie.parent.numpy()[edges], tokens_n.numpy())])
    scores = _score_edges(model, hidden_1nM[0], tokens_n, trie, edges_e, temperature)
    columns = []
    for score_e in scores:
        column_N = score_e.new_zeros(len(trie)).index_copy(0, edges_e.to(device), score_e)
        if place.world > 1:
            # COMM: the sum over ranks of columns that are 0 elsewhere gives all scores to all
            # ranks. Each of them computes the same loss, and has the whole gradient: so only its
            # own column has a graph. A sum of gradients would count them once per rank. Pinned by
            # tests/test_tree_ranks.py::test_a_tree_on_a_ring_is_one_process.
            total_N = column_N.detach().clone()
            dist.all_reduce(total_N, group=place.group)
            column_N = column_N + (total_N - column_N.detach())
        columns.append(column_N)
    return tuple(columns)


def path_edges(trie, sequences, device):
    """Return the edges of some paths, (R, T), and True where an entry is inside its path.

    Sequences 5 6 7 and 5 9 of the tree 5 6 7 8 9 have the edges 1 2 and 4. Edge 0 fills up:

        edges_RT  1 2      inside_RT  x x
                  4 0                 x .
    """
    targets_R1 = trie.lengths[sequences].numpy()[:, None] - 1
    column_T = np.arange(targets_R1.max(initial=0))
    inside_RT = column_T < targets_R1
    begins_R1 = trie.begins[sequences].numpy()[:, None]
    index_RT = np.where(inside_RT, begins_R1 + 1 + column_T, 0)
    edges_RT = np.where(inside_RT, trie.paths.numpy()[index_RT], 0)
    return [torch.from_numpy(x).to(device) for x in (edges_RT, inside_RT)]


# 9. Chunks of the tree --------------------------------------------------------------------------
# For: --tree dta. Which stretches of the preorder are one call of the model.


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
        first, after = torch.searchsorted(tokens, torch.tensor([self.start, self.stop])).tolist()
        return slice(first, after)


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
        after = N  # the end of the subtree in which this chunk may have whole subtrees

        # A subtree that does not fit begins with a part of its path: along the largest branch of
        # each fork, which comes first, while there is room for the other branches. At the first
        # fork where there is not, the path ends.
        while stop < min(N, limit) and end[stop] > limit:
            segment_end = segment_ends[np.searchsorted(segment_ends, stop, side="right")]
            stop = min(int(segment_end), limit)
            after = int(end[stop - 1])
            if stop == limit or after - int(end[stop]) >= limit - stop:
                break

        # Then whole subtrees: below the path, or, without one, the next ones in preorder.
        while stop < min(after, limit) and end[stop] <= limit:
            stop = int(end[stop])
        start = stop

    # An only child comes right after its parent, so to join them is to forget where it starts.
    parents = _chunks_of(parent[starts], starts)
    if join_only_children:
        is_joined = (parents >= 0) & (np.bincount(parents + 1)[parents + 1] == 1)
        starts = np.array(starts, np.int64)[~is_joined].tolist()
        parents = _chunks_of(parent[starts], starts)
    stops = [*starts, N][1:]
    return [TreeChunk(*x) for x in zip(starts, stops, parents.tolist(), strict=True)]


def _chunks_of(tokens, starts):
    """Return which chunk each token is in, -1 for token -1; starts: of the chunks, ascending."""
    return np.searchsorted(starts, tokens, side="right") - 1


# 10. Depth first over the chunks -----------------------------------------------------------------
# For: --tree dta. In three parts: the losses of sequences, the scores of a chunk, and the walk,
# which says what runs next and what waits. It is `simple_tree_backward` for chunks.


class _ChunkForward(NamedTuple):
    """The result of a chunk's forward. If the graph was kept, it is enough for the backward."""

    edges_e: torch.Tensor  # the edges that are scored
    scores: tuple  # C of (e,)
    own_kv: dict  # layer -> (k, v) of the chunk's tokens
    router_counts: dict  # layer -> (E,)
    hidden_1nM: torch.Tensor


class _Open(NamedTuple):
    """A chunk on the stack: others are below it, or it goes backward next."""

    number: int
    chunk: TreeChunk
    rows: object  # its tokens that chunks below see: a slice or indices
    kv: dict  # layer -> (k, v) of these rows, each a `_SummingLeaf`
    forward: _ChunkForward | None  # None: without a graph, so it runs again


class _Losses:
    """The losses of the sequences (3), from the scores of the edges, and their gradient (4).

    scores_CN[c, t] is score c of edge t; dscores_CN is (4). loss_fn: of `tree_backward`, or None.
    """

    def __init__(self, model, trie, loss_fn=None, batched=False, check_finite=True):
        # NUMERICS: losses and the sums (4) are in the model's dtype, float32 at least. Pinned by
        # tests/test_tree.py::test_the_loss_is_summed_in_the_models_precision.
        weight = next(model.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        C = 3 if _is_critic(model) else 2
        self.scores_CN = torch.zeros(C, len(trie), dtype=dtype, device=weight.device)
        self.dscores_CN = None if loss_fn is None else torch.zeros_like(self.scores_CN)
        self.is_used = [False] * C  # which scores some loss depends on
        self.total = 0.0
        self.trie = trie
        self.loss_fn = loss_fn
        self.batched = batched
        self.check_finite = check_finite

    def write(self, edges_e, scores):
        """Write a chunk's scores to where the losses of all sequences through it find them."""
        for row_N, score_e in zip(self.scores_CN, scores, strict=False):
            row_N[edges_e] = score_e.detach().to(row_N.dtype)

    def finish(self, sequences):
        """Compute (3) and (4) of sequences whose scores are all written."""
        # One call of the loss per sequence, or one for a list of all, which costs less Python.
        calls = [sequences] if self.batched and sequences else sequences
        losses = []
        finite = []
        for called_for in calls:
            loss, is_finite = self.call(called_for)
            self.total = self.total + loss  # (3)
            losses.append(loss)
            finite.append(is_finite)

        # One look at all losses of the chunk: on a GPU each look waits for the device.
        if self.check_finite and calls and not torch.stack(finite).all():
            k = finite.index(False)
            name = f"sequences {calls[k]}" if self.batched else f"sequence {calls[k]}"
            reason = ", its gradient is not finite" if losses[k].isfinite() else ""
            raise NonFiniteLoss(f"the loss of {name} is {losses[k].item()}{reason}")

    def call(self, called_for):
        """Call the loss once; return its value, and whether it and its gradient are finite."""
        # The scores along each path are leaves of a graph of their own. So the loss's backward ends
        # here: a chunk must be gone through once, not once for every sequence that shares it.
        is_one = not isinstance(called_for, list)
        sequences = [called_for] if is_one else called_for
        edges, inside = path_edges(self.trie, sequences, self.scores_CN.device)
        if is_one:
            edges, inside = edges[0], inside[0]
        leaves = []
        for row_N in self.scores_CN:
            leaves.append(row_N[edges].masked_fill(~inside, 0.0).requires_grad_())
        with torch.enable_grad():
            loss = self.loss_fn(called_for, *leaves)
            loss = loss if torch.is_tensor(loss) else self.scores_CN.new_tensor(loss)
            if loss.dim():
                raise ValueError(f"expected one number from loss_fn, of shape (), got "
                                 f"{[*loss.shape]} for sequence {called_for}; sum it")  # fmt: skip
            if loss.requires_grad:
                loss.backward()

        # The gradients go back to the edges, and add up where paths meet. A score that no loss uses
        # (often the entropy) gets no gradient, which is not a gradient of 0: a gradient of 0 would
        # send the head's backward through the whole vocabulary a second time.
        loss = loss.detach().to(self.scores_CN)
        finite = [loss.isfinite()]
        for c, leaf in enumerate(leaves):
            if leaf.grad is not None:
                dscores = leaf.grad.masked_fill(~inside, 0.0).flatten()
                self.dscores_CN[c].index_add_(0, edges.flatten(), dscores)  # (4)
                self.is_used[c] = True
                finite.append(dscores.isfinite().all())
        return loss, torch.stack(finite).all()

    def gradients(self, forward):
        """Return [(score of a chunk, (4) at its edges)], of scores that some loss depends on."""
        numbered = enumerate(forward.scores)
        return [(x, self.dscores_CN[c, forward.edges_e]) for c, x in numbered if self.is_used[c]]


class _ChunkScores:
    """Run the model on one chunk: its scores, its keys and values, its tokens' experts."""

    def __init__(self, model, trie, temperature, counts_experts):
        self.model = model
        self.trie = trie
        self.temperature = temperature
        self.device = next(model.parameters()).device
        takes = inspect.signature(model.hidden).parameters
        self.counts_experts = counts_experts and "on_routing" in takes

        # A token counts once for each sequence that contains it: sequences_N[t] times.
        if self.counts_experts:
            sequences_N = torch.bincount(trie.paths, minlength=len(trie))
            self.sequences_N = sequences_N.double().to(self.device)

    def forward(self, chunk, stack, edges_e):
        """Call the model for a chunk, with an attention that reads the chunks on the stack."""
        stretch = self.trie.stretch
        if chunk.stop - chunk.start < len(self.trie):
            stretch = Stretch(self.trie, chunk.start, chunk.stop)
        path = self.path_above(chunk, stack)
        own_kv = {}
        counts = {}
        in_forward = True
        keeps_graph = torch.is_grad_enabled()

        # The model does not know that it runs on a tree: it calls this once in each layer.
        def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
            # After the forward a layer may call again, where a checkpoint recomputes it.
            if in_forward and layer in own_kv:
                raise ValueError(f"two layers call attention with layer={layer}; number them")
            if in_forward:
                own_kv[layer] = (k, v)
                if keeps_graph and not torch.is_grad_enabled():
                    self.require_graph_of_keys(chunk, k)

            # The keys of the path, from the root down, and then the chunk's own.
            if path:
                above = [[x.leaf[:, :, :n] for x in opened.kv[layer]] for opened, n in path]
                k, v = (torch.cat(parts, 2) for parts in zip(*above, (k, v), strict=True))
            return stretch_attention(q, k, v, stretch, scale, window, softcap)

        def on_routing(scores_nE, chosen_nK, /, *, layer):
            # A layer that runs again finds the same counts again.
            weight_n1 = self.sequences_N[chunk.start : chunk.stop, None]
            weights = weight_n1.expand_as(chosen_nK).flatten()
            counts[layer] = torch.bincount(chosen_nK.flatten(), weights, scores_nE.shape[1])

        # Positions are depths, so the keys of a path are right for every chunk below.
        tokens_n = torch.arange(chunk.start, chunk.stop)
        hidden_1nM = self.model.hidden(
            self.trie.tokens[tokens_n][None].to(self.device),
            positions=self.trie.positions[tokens_n][None].to(self.device), attention=attention,
            **({"on_routing": on_routing} if self.counts_experts else {}),
        )  # fmt: skip
        in_forward = False
        if not own_kv:
            name = type(self.model).__name__
            raise ValueError(f"{name}.hidden never called `attention`: its tokens mix in a way a "
                             "tree cannot follow; every layer must call it")  # fmt: skip

        # The children of a token may be in chunks below: their edges are scored already here.
        # A chunk of leaves has no edge to score.
        scores = ()
        if len(edges_e):
            given = hidden_1nM[0], tokens_n, self.trie, edges_e
            scores = _score_edges(self.model, *given, self.temperature)
        return _ChunkForward(edges_e.to(self.device), scores, own_kv, counts, hidden_1nM)

    def path_above(self, chunk, stack):
        """Return [(open chunk, how many of its open tokens are on the path to this chunk)]."""
        # Open tokens have consecutive depths, so they are on the path as long as their depth is
        # less than the depth at which the next chunk of the path begins. Chunks that begin at the
        # depths 0, 6 and 9 have 6 and 3 tokens on the path to the last one.
        starts = [*(opened.chunk.start for opened in stack), chunk.start]
        depths = self.trie.positions[starts].tolist()
        counts = [below - above for above, below in itertools.pairwise(depths)]
        return [*zip(stack, counts, strict=True)]

    def open_rows(self, chunk):
        """Return the rows of the chunk's tokens that other chunks are below: a slice or indices."""
        # These are the ancestors of token `stop`: a path that starts with the chunk's first token.
        # Subtrees of upper forks may stand between them, so a slice is not always enough.
        end = self.trie.subtree_end.numpy()[chunk.start : chunk.stop]
        rows = np.flatnonzero(end > chunk.stop)
        if not len(rows) or rows[-1] == len(rows) - 1:
            return slice(0, len(rows))
        return torch.from_numpy(rows).to(self.device)

    def require_graph_of_keys(self, chunk, k):
        """Raise ValueError if the keys that chunks below read have lost their graph."""
        # A reentrant checkpoint around a layer computes its keys without a graph, and again in the
        # backward. So (5) has no keys to start from. Around attention alone, it gets keys that have
        # a graph. Pinned by
        # tests/test_tree.py::test_a_reentrant_checkpoint_of_whole_layers_is_refused.
        end = self.trie.subtree_end[chunk.start : chunk.stop].max()
        if not k.requires_grad and end > chunk.stop:
            raise ValueError("a reentrant checkpoint would lose the gradient of keys that other "
                             "chunks read; pass use_reentrant=False")  # fmt: skip


class _TreeWalk:
    """Run chunks depth first: forward, losses of finished sequences, the chunks below, backward.

        chunk 0 - chunk 1      forward 0
                `- chunk 2     forward 1, backward 1: adds to the gradient of 0's keys and values
                               forward 2, backward 2: likewise
                               backward 0: starts from its scores, and from its keys and values

    losses: `_Losses`; without a loss_fn the walk is a forward, without memory for any gradient.
    Takes the arguments of `tree_backward`.
    """

    def __init__(self, model, trie, losses, *, max_tokens=None, recompute=False, temperature=1.0,
                 masks=None, lockstep=None):  # fmt: skip
        self.model = model
        self.trie = trie
        self.losses = losses
        self.trains = losses.loss_fn is not None
        self.recompute = recompute
        self.lockstep = lockstep
        self.scores = _ChunkScores(model, trie, temperature, counts_experts=self.trains)
        self.router_counts = {}  # layer -> (E,)
        joins = self.trains and not recompute  # then both chunks' graphs are held anyway
        chunks = partition_tree(trie, max_tokens, join_only_children=joins)

        # Edge t scores token t from its parent's state, so it belongs to the parent's chunk, even
        # if token t is in a chunk below. Sorted by parents, the edges of a chunk are a run.
        edges, _ = wanted_edges(trie, masks)
        by_parent = np.argsort(trie.parent.numpy()[edges], kind="stable")
        self.edges = torch.from_numpy(edges[by_parent])
        self.parents = trie.parent[self.edges]
        self.sorted_ends = trie.ends[trie.order]

        # COMM: under lockstep this list of calls has the same length on all ranks. Pinned by
        # tests/test_tree_ranks.py::test_ranks_with_other_trees_make_the_same_calls.
        self.chunks = chunks if lockstep is None else overlay(chunks, lockstep)

    def run(self):
        """Run all chunks forward and, with a loss_fn, backward."""
        stack = []  # the chunks above the current one, each `_Open`
        for b, chunk in enumerate(self.chunks):
            # Chunks that this one is not below are complete: nothing else will read their keys.
            while stack and stack[-1].number != chunk.parent:
                self.backward(stack)

            # With recompute, a chunk that others are below keeps no graph while they run, only keys
            # and values. A chunk with none below goes backward next, and keeps its graph.
            has_children = b + 1 < len(self.chunks) and self.chunks[b + 1].parent == b
            keep_graph = self.trains and not (self.recompute and has_children)
            with torch.set_grad_enabled(keep_graph):
                forward = self.forward(chunk, stack)
            self.losses.write(forward.edges_e, forward.scores)
            for layer, counts_E in forward.router_counts.items():
                self.router_counts[layer] = self.router_counts.get(layer, 0) + counts_E

            # Without chunks below, nobody reads its keys and values: the graph frees them layer by
            # layer.
            rows = self.scores.open_rows(chunk)
            if not has_children:
                forward = forward._replace(own_kv={})
            kv = {}
            for layer, own_kv in forward.own_kv.items():
                kv[layer] = [_SummingLeaf(x[:, :, rows], keep_graph) for x in own_kv]

            # All scores of the sequences that end here exist now, and no chunk of their paths has
            # gone backward yet.
            if self.trains:
                ended = self.trie.order[chunk.run_of(self.sorted_ends)]
                self.losses.finish(sorted(ended))
            stack.append(_Open(b, chunk, rows, kv, forward if keep_graph else None))
            del forward  # so that the backward frees it
        while stack:
            self.backward(stack)

    def forward(self, chunk, stack):
        """Return the `_ChunkForward` of a chunk, also of an empty one."""
        if chunk.stop == chunk.start:  # a chunk that only other ranks have
            return _stand_in(self.model, self.scores.device)
        return self.scores.forward(chunk, stack, self.edges[chunk.run_of(self.parents)])

    def backward(self, stack):
        """Pop a chunk, and backpropagate through it once for all losses that it had a part in."""
        _, chunk, rows, kv, forward = stack.pop()
        if not self.trains:
            return
        if forward is None:
            with torch.enable_grad():
                forward = self.forward(chunk, stack)  # again, and now with a graph

        # It starts at the scores; (4) is complete at them. And at its own keys and values, with
        # what the chunks below have found for them. From here on nobody reads them.
        pairs = self.losses.gradients(forward)
        for layer, leaves in kv.items():
            for x, leaf in zip(forward.own_kv[layer], leaves, strict=True):
                if leaf.sums:
                    pairs.append((x[:, :, rows], leaf.sums[0]))  # (5)
        del kv

        # Under lockstep other ranks wait for the messages of every layer, so the backward starts at
        # the states too.
        if self.lockstep is not None:
            pairs.append((forward.hidden_1nM, torch.zeros_like(forward.hidden_1nM)))
        pairs = [(x, grad.to(x.dtype)) for x, grad in pairs if x.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))


class _SummingLeaf:
    """Keys or values that chunks below read: a leaf, and the sum of the gradients that it gets."""

    def __init__(self, x, keep_graph):
        # Where a graph is kept, it holds keys and values anyway, and a view costs nothing. If not,
        # a view would hold all of the matrix that queries, keys and values come from.
        self.leaf = leaf_of(x if keep_graph else x.clone())
        self.sums = sums = []  # at most one tensor

        # NUMERICS: the sum over all chunks below is in float32 or better, and is cast once: in bf16
        # 256 + 1 is 256, and a prompt may have thousands of chunks below it. Pinned by
        # tests/test_tree.py::test_gradients_of_keys_are_summed_in_float32_or_better.
        def add(leaf):
            wide = torch.promote_types(leaf.dtype, torch.float32)
            if sums:
                sums[0].add_(leaf.grad)
            else:
                sums.append(leaf.grad.to(wide))
            leaf.grad = None

        self.leaf.register_post_accumulate_grad_hook(add)


# 11. The public calls ---------------------------------------------------------------------------


def tree_scores(model, trie, *, temperature=1.0, masks=None, max_tokens=None, lockstep=None,
                padded=False, group=None, method="ring", layout="zigzag"):  # fmt: skip
    """Return log-probs, entropies and, of a critic, values (L_i - 1,) of each sequence, in order.

    model, trie, temperature, masks, lockstep: as in `tree_backward`.
    max_tokens: None: one graph of the whole tree, differentiable. A number: chunk by chunk, without
        gradients; call it under torch.no_grad.
    padded: return one (R, T) tensor of each score instead, 0 past a sequence's end.
    group: a process group whose ranks share the tokens; all get all scores. Each rank then computes
        the same loss. Its .grad is the part of its own tokens: sum it over the group.
    method, layout: how attention crosses the ranks, as in `ring_attention`.

    Raises ValueError where model, tree or masks do not fit, or max_tokens meets gradients or group.
    """
    require_tree_model(model, trie)
    by_chunks = lockstep is not None or max_tokens is not None
    runs = len(trie) or lockstep is not None
    if by_chunks and runs and (torch.is_grad_enabled() or group is not None):
        raise ValueError("max_tokens and lockstep are for forward passes without group: call "
                         "tree_scores under torch.no_grad(), or train with tree_backward")
    if not by_chunks and len(trie):
        columns = _packed_scores(model, trie, temperature, masks, group, method, layout)
    else:
        losses = _Losses(model, trie)
        options = dict(temperature=temperature, masks=masks, lockstep=lockstep)
        _TreeWalk(model, trie, losses, max_tokens=max_tokens, **options).run()
        columns = losses.scores_CN.unbind()

    # Each path reads its own scores. In the backward the gradients of all paths add up at an edge:
    # (4) by autograd.
    every = list(range(len(trie.lengths)))
    edges_RT, inside_RT = path_edges(trie, every, columns[0].device)
    if padded:
        return [column_N[edges_RT].masked_fill(~inside_RT, 0.0) for column_N in columns]
    sizes = (trie.lengths - 1).tolist()
    by_score = [column_N[edges_RT[inside_RT]].split(sizes) for column_N in columns]
    return list(zip(*by_score, strict=True)) if len(trie) else []


class TreeResult(NamedTuple):
    """What `tree_backward` returns, detached."""

    loss: torch.Tensor  # (3)
    logprobs: list  # (L_i - 1,) of each sequence, in order
    router_counts: dict  # layer -> (E,): tokens of each expert, once per sequence


def tree_backward(model, trie, loss_fn, *, max_tokens=None, recompute=False, temperature=1.0,
                  masks=None, lockstep=None, batched=False,
                  check_finite=True) -> TreeResult:  # fmt: skip
    """Add the gradient of (3) to .grad, like loss.backward(), in O(path) memory.

    model: like models.Transformer; see `require_tree_model`.
    trie: the `TokenTrie` of the sequences.
    loss_fn: loss_fn(i, logprobs, entropies), for a critic also values, (L_i - 1,) each, returns the
        loss of sequence i, a tensor () or a number. Entry s - 1 is about token s; a value is of the
        state before token s. Called once for each i, also where L_i = 1. It may return a tensor
        without gradient, and must not use arguments of an earlier call.
    max_tokens: tokens of a chunk, at most. Default: the whole tree is one chunk. Without recompute
        an only child joins its parent chunk, because both graphs would be held anyway.
    recompute: hold keys and values of the chunks above, not their graphs, and run them twice.
    temperature: of (6).
    masks: a bool (L_i - 1,) for each sequence. The head runs where any of them wants a score; other
        entries that loss_fn gets are 0, without gradient. Default: everywhere.
    lockstep: a process group whose ranks' layers exchange messages (experts, or FSDP2 in one
        chunk). Its ranks make equally many calls, whatever their trees; see `overlay`. All of them
        call this at once, one without sequences too, with check_finite=False.
    batched: call loss_fn([i, ..], ..) once per chunk, for the R sequences that end in it, with
        (R, T) scores, 0 past a sequence's end. Faster for many short sequences.
    check_finite: False lets NaN into the gradient, as loss.backward() would.

    Hooks of parameters fire once per chunk. Raises ValueError where model, tree or masks do not
    fit, NonFiniteLoss, or what loss_fn raises; .grad is then as it was before.
    """
    require_tree_model(model, trie)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters or torch.is_inference_mode_enabled():
        raise ValueError("no parameter of the model requires a gradient here; use tree_scores")
    if lockstep is not None and check_finite:
        raise ValueError("with lockstep a rank cannot stop by itself: pass check_finite=False")
    losses = _Losses(model, trie, loss_fn, batched, check_finite)
    walk = _TreeWalk(model, trie, losses, max_tokens=max_tokens, recompute=recompute,
                     temperature=temperature, masks=masks, lockstep=lockstep)  # fmt: skip

    # A loss may fail in the middle of the walk, when some chunks have gone backward already. Then
    # .grad must be as it was, or the caller's next step would use half a gradient.
    with _all_or_nothing(parameters), torch.enable_grad():
        walk.run()
    loss = torch.as_tensor(losses.total, dtype=losses.scores_CN.dtype)
    logprobs = [losses.scores_CN[0, trie.path(i)[1:]] for i in range(len(trie.lengths))]
    return TreeResult(loss, logprobs, walk.router_counts)


# 12. Checks of what callers pass ----------------------------------------------------------------
# For: an error that names the mistake, before anything runs or changes.
# Skip it to understand the algorithm; read it before you pass a model of your own.

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
MIXERS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d)
OTHER_MIXERS = re.compile("mamba|rwkv|deltanet|linearattention|ssm|retention", re.IGNORECASE)


class NonFiniteLoss(FloatingPointError, ValueError):
    """A caller's loss, or its gradient, is not finite; the message names the sequence."""


def require_tree_model(model, trie, /):
    """Raise ValueError, before anything runs, if the model's tokens may mix otherwise than by (1).

    A model needs .hidden(tokens, positions=, attention=) and .logprobs(hidden, targets,
    temperature=). Each layer must call attention(q, k, v, layer=, scale=, window=, softcap=) once,
    with a number of its own; window and softcap may be left out.
    """
    if not isinstance(trie, TokenTrie):
        raise ValueError(f"expected a TokenTrie, got {type(trie).__name__}; TokenTrie(sequences)")
    takes = inspect.signature(model.hidden).parameters if hasattr(model, "hidden") else {}
    if not {"positions", "attention"} <= set(takes) or not hasattr(model, "logprobs"):
        raise ValueError(f"{type(model).__name__} must have .hidden(tokens, positions=, attention=)"
                         " and .logprobs(hidden, targets, temperature=)")  # fmt: skip

    # A shared token has one state. Nothing may make it differ between its sequences, and nothing
    # but `attention`, which knows the tree, may carry information from token to token.
    for name, module in model.named_modules():
        if isinstance(module, DROPOUT) and module.p and module.training:
            raise ValueError(f"{name} drops out with p = {module.p}: a shared token would differ "
                             "between its sequences; call model.eval(), or set p = 0")  # fmt: skip
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


@contextlib.contextmanager
def _all_or_nothing(parameters):
    """Add to .grad what is added inside, or nothing if that fails."""
    # Inside, .grad starts empty. What was there before is kept aside, and comes back either way.
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


# 13. Ranks that must make the same calls --------------------------------------------------------
# For: layers that send to ranks with other trees (`lockstep`: experts).
# Skip it on one rank.


def overlay(chunks, group) -> list[TreeChunk]:
    """Return this rank's chunks, with empty ones where only other ranks have a chunk.

    Expert-parallel ranks must make the same number of model calls, in one order, so that the
    messages of a call meet their counterparts in forward and backward. So the trees of chunks of
    all ranks are aligned, n-th child with n-th child, and an empty chunk fills each gap.
    """
    place = ring.ring_of(group)
    parents = [chunk.parent for chunk in chunks]
    children = []  # by rank: {chunk: its children}
    for parents_of_rank in ring.gather_objects(parents, place):
        children.append({})
        for b, parent in enumerate(parents_of_rank):
            children[-1].setdefault(parent, []).append(b)

    def children_of(by_rank):
        lists = [of_rank.get(b, ()) for of_rank, b in zip(children, by_rank, strict=True)]
        return reversed([*itertools.zip_longest(*lists)])

    # To do: the parent in the common tree, and the chunk by rank (None: the rank has none), depth
    # first.
    #
    #     rank 0 has   0 - 1        together   0 - 1      rank 0 has there: 0, 1, empty
    #     rank 1 has   0 and 1                 2          rank 1 has there: 0, empty, 1
    aligned = []
    todo = [(-1, by_rank) for by_rank in children_of((-1,) * place.world)]
    while todo:
        parent, by_rank = todo.pop()
        own = by_rank[place.rank]
        chunk = TreeChunk(0, 0, parent) if own is None else chunks[own]._replace(parent=parent)
        aligned.append(chunk)
        todo += [(len(aligned) - 1, below) for below in children_of(by_rank)]
    return aligned


def _stand_in(model, device):
    """Run one token that no loss sees, for the messages of the layers: an empty chunk."""

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        return ring.attend(q, k, v, scale=scale, softcap=softcap)[0]

    tokens_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    hidden_11M = model.hidden(tokens_11, positions=tokens_11, attention=attention)
    return _ChunkForward(tokens_11[0, :0], (), {}, {}, hidden_11M)


# 14. Which rank trains on which sequences -------------------------------------------------------
# For: data-parallel training with prefixes kept together.
# Skip it on one rank, and if your own sampler distributes groups.


class Cost(NamedTuple):
    """Modeled time of a tree, in units of one token: of a token, a pair, a token done again.

    pair: 4 M FLOPs of a layer per pair over 24 M^2 per token, for a width M of 1024.
    recomputed: 1/3 with recompute=True (a forward is a third of a step), for each token above a
    fork.
    """

    token: float = 1.0
    pair: float = 1 / (6 * 1024)
    recomputed: float = 0.0

    def of_path(self, lengths):
        return lengths * self.token + lengths * (lengths + 1) / 2 * self.pair


def partition(sequences, world, *, strategy="dfs", cost=None) -> list[list[int]]:
    """Return which sequences each of `world` ranks trains on: indices, the same on every rank.

    strategy: "dfs": runs of the sorted sequences, so that shared prefixes stay together, cut where
        the largest modeled time (`Cost`) of a rank is least. "round_robin": i to rank i % world,
        which computes a prefix on every rank that has it.

    More ranks than sequences: some lists are empty. Raises ValueError for another strategy.
    """
    if strategy not in ("dfs", "round_robin") or world < 1:
        raise ValueError('expected strategy "dfs" or "round_robin" and world of 1 or more, '
                         f"got {strategy!r} and {world}")  # fmt: skip
    if strategy == "round_robin":
        count = len(_arrays_of_ids(sequences))
        return [list(range(rank, count, world)) for rank in range(world)]

    # The time of a sorted sequence: its whole path if a rank begins with it, else only the tokens
    # that it does not share with the one before.
    trie = TokenTrie(sequences)
    cost = cost or Cost()
    whole = cost.of_path(trie.lengths.numpy()[trie.order])
    new = whole - cost.of_path(trie.shared)
    columns = whole.tolist(), new.tolist(), trie.shared.tolist()
    times = [*zip(*columns, strict=True)]

    # If no rank may take longer than some time, greedy runs use the fewest ranks. So find the least
    # time for which `world` ranks are enough, by bisection.
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
    """Return [0, .., R], world + 1 ends of the longest runs within a time; None if too few ranks.

    times: (time of the whole path, time of the new tokens, shared tokens) of each sorted sequence.
    """
    # A run pays the whole path of its first sequence, then new tokens. A token above a fork is
    # computed again: those are the shared ones, counted when the shared part gets longer.
    cuts = [0]
    time = 0.0
    forked = 0  # tokens of the current path that are known to be above a fork
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
    """Distribute all ranks' sequences by `partition`; return this rank's (sequences, data).

    sequences: this rank's own. data: anything that pickles, one for each (a tuple of advantages, a
        mask, an id to find it again). Either may be []. Tensors return on the CPU.

    Every rank of the group calls it, once. Raises ValueError on every rank if the lists of any rank
    do not fit.
    """
    # A rank whose own lists are wrong may not stop here: the others would wait for it forever.
    place = ring.ring_of(group)
    problem = None
    arrays = []
    items = []

    def on_cpu(x):
        return x.cpu() if torch.is_tensor(x) else x

    try:
        arrays = _arrays_of_ids(sequences)
        items = tree_map(on_cpu, list(data))
        if len(arrays) != len(items):
            raise ValueError(f"{len(arrays)} sequences, but data for {len(items)}; one for each")
    except Exception as error:  # of whatever kind: it travels to the others first
        problem = str(error)

    # COMM: one message, which every rank sends, also with nothing or with its error in it. Pinned
    # by tests/test_tree_ranks.py::test_the_sum_of_the_ranks_gradients_is_the_gradient.
    by_rank = ring.gather_objects((problem, arrays, items), place)
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


# 15. check --------------------------------------------------------------------------------------
# For: `python tree_attention.py check`: every shape of tree, every chunk size, the core.
# Skip it to use the file; run it after every change.


class TinyModel(CheckModel):
    """The core's model with a window and a softcap in every second layer, as in Gemma."""

    def __init__(self, seed=0, **sizes):
        super().__init__(seed, **sizes)
        self.forwarded = 0  # tokens that `hidden` was given

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        self.forwarded += tokens_BS.numel()
        return super().hidden(tokens_BS, positions=positions, attention=attention)

    def layer_options(self, layer):
        return dict(window=None, softcap=None) if layer % 2 else dict(window=3, softcap=2.0)

    @staticmethod
    def plain_attention(q, k, v, /, *, layer, scale, window, softcap):
        # One sequence by itself, by the formulas of attention as they stand.
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        visible = (distance >= 0) & (distance < (window or math.inf))
        k, v = ring.repeat_key_heads(q, k, v)
        s = q @ k.mT * scale
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        return s.masked_fill(~visible.to(s.device), -math.inf).softmax(-1) @ v


def forests(seed=0):
    """Return {name: sequences}: every shape of a tree that the walk could get wrong."""
    rng = np.random.default_rng(seed)

    def draw(n):
        return rng.integers(0, 11, n).tolist()

    # The dictionary draws in its order, so add a new shape at its end: the others stay.
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
    """Return the core's `check_loss` with terms of the entropies and of a critic's values."""
    # All of it depends on i, so that a gradient that reaches the wrong sequence shows. Some tokens
    # have no entropy term. No sum over tokens can replace the square of the sum in `check_loss`.
    weights = torch.sin(torch.arange(len(logprobs)) * 7.0 + i).to(logprobs)
    loss = check_loss(i, logprobs) - 0.1 * (weights.relu() * entropy).sum()
    if values is None:
        return loss
    return loss + ((values - 0.5) * weights).square().sum()


def _outcome(model, way, *given, **options):
    """Return loss, log-probs and every gradient after way(model, ..)."""
    model.zero_grad()
    loss, logprobs, *_ = way(model, *given, temperature=0.7, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [x.cpu() for x in (torch.as_tensor(loss), *logprobs, *grads)]


def _one_graph(model, trie, loss_fn, *, temperature):
    """Pack the whole tree, and run one backward of it."""
    scores = tree_scores(model, trie, temperature=temperature)
    loss = torch.stack([loss_fn(i, *score) for i, score in enumerate(scores)]).sum()
    loss.backward()
    return loss.detach(), [score[0].detach() for score in scores]


def _tree_rows(model, cases, mine=None):
    """Yield (row, {column: the largest relative error of loss, log-probs and every gradient}).

    Columns: one graph; chunk sizes, each the worse of with and without recomputation.
    mine: the same model on another device, to compare with the definition on the CPU.
    """
    mine = model if mine is None else mine
    for name, sequences in cases.items():
        sequences = [torch.tensor(x) for x in sequences]
        trie = TokenTrie(sequences)
        truth = _outcome(model, definition, sequences, example_loss)

        def error(way, trie=trie, truth=truth, **options):
            found = _outcome(mine, way, trie, example_loss, **options)
            return max(ring.relative(a, b) for a, b in zip(found, truth, strict=True))

        # Chunks of 1 token cut every segment and every fork; "path" holds the longest path. A
        # chunk with others below runs twice with recomputation, so both ways are compared.
        line = {"packed": error(_one_graph)}
        sizes = {"1": 1, "2": 2, "3": 3, "5": 5, "path": int(trie.lengths.max()), "all": None}
        for column, size in sizes.items():
            errors = [error(tree_backward, max_tokens=size, recompute=x) for x in (False, True)]
            line[column] = max(errors)

        # Right gradients do not show that a token was computed once; this does.
        if isinstance(model, TinyModel):
            mine.forwarded = 0
            tree_backward(mine, trie, example_loss, max_tokens=2)
            line["twice"] = abs(mine.forwarded - len(trie))
        yield name, line


def check() -> int:
    """Print every error with its budget; return 1 if one is over."""
    torch.set_num_threads(1)
    tables = {"by max_tokens": dict(_tree_rows(TinyModel(), forests()))}
    tables["the core"] = {"packed, depth first, chunks": {"worst": core_check()}}
    try:
        tables["families"] = _measuring_file().family_rows()
    except ImportError as missing:
        print(f"families: SKIP ({missing}); it would show the families of models.py")
    worst = 0.0
    for name, rows in tables.items():
        columns = next(iter(rows.values()))
        print(f"\n{name:>28}" + "".join(f" {x:>11}" for x in columns) + "   budget 1e-10")
        for row, line in rows.items():
            # A NaN is smaller than any budget to `max`, so it counts as infinite.
            values = [math.inf if math.isnan(x) else x for x in line.values()]
            worst = max(worst, *values)
            ok = "ok" if max(values) <= 1e-10 else "FAILED"
            print(f"{row:>28}" + "".join(f" {x:11.1e}" for x in values) + f"   {ok}")
    print(json.dumps({"check": "tree_attention", "ok": worst <= 1e-10, "max_error": worst}))
    return int(worst > 1e-10)


def _measuring_file(name="measure_tree"):
    """Import a file of tests/; ImportError if it, or a file that it needs, is missing."""
    tests = Path(__file__).resolve().parent / "tests"
    sys.path += [str(tests), str(tests / "bench")]
    return __import__(name)


def main(argv) -> int:
    """Run a command and return its exit code; bench and plan are in tests/bench/measure_tree.py."""
    # The core has no command line of its own: `core` runs what the cut file runs.
    if argv[:1] == ["core"]:
        core_main(argv[1:])
        return 0
    if argv == ["check"]:
        return check()
    if argv[:1] in (["bench"], ["plan"]) or argv[:2] == ["check", "--device"]:
        try:
            if argv[0] == "check":
                return _measuring_file("measure_gpu").check("tree_attention", argv[1:])
            return _measuring_file().main(argv)
        except ImportError as missing:
            print(f"{argv[0]} needs the tests folder next to this file: {missing}", file=sys.stderr)
            return 2
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Depth first over chunks: adds losses of every kind and ranks to `tree_attention.py`.

A chunk is a stretch of the preorder of at most max_tokens tokens: a segment of one path, followed
by as many complete subtrees as fit. All ancestors of its tokens are in the chunk or on the path to
its first token. Chunks run depth first, as the segments of `tree_attention.tree_backward` do. Whole
subtrees in one call keep the matrices large.

    |                   | tokens forward, backward | held at the peak                            |
    | one by one        | sum L_i, sum L_i         | the graph of the longest sequence           |
    | one chunk         | N, N                     | the graph of N tokens                       |
    | chunks            | N, N                     | graphs of this chunk and of all above       |
    | chunks, recompute | N + N', N                | the graph of this chunk; K, V of one path   |

N' counts the tokens of chunks that others are below. Where graphs are held, a chunk that is the
only child of another is one call with it, because a cut there would free nothing.

AReaL-DTA (arXiv:2602.00482) walks leaf by leaf, one segment at a time, and Tree Training
(arXiv:2511.00413) packs a tree that fits into memory. Chunks are both. The first token below a fork
is scored in its parent's chunk, so there is no cache of forks. A rank without sequences is
ordinary: loss 0. Not here: dropout; mixers other than causal softmax attention; batches of trees (a
forest is one tree); chunks across the ranks of one sequence (the whole tree at once:
`tree_scores(group=)`).

Equations (1) to (5) are in tree_attention.py, (6) is in tree.py.

Letters:  N tokens of the tree   n tokens of a chunk   p tokens on the path above, m = p + n keys of
both   R sequences, of L_i tokens   T = L - 1 of the longest   e edges scored in a chunk, from its
tokens to their children   C = 2 or 3 scores of an edge   E experts   K targets that point to edges
"""

import contextlib
import inspect
import itertools
import math
import re
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from full.attend import attend
from full.ring import gather_objects, ring_of
from full.tree import (
    _is_critic, _packed_scores, _score_edges, path_edges, stretch_attention, wanted_edges,
)  # fmt: skip
from full.trie import Stretch, TokenTrie, _arrays_of_ids
from tree_attention import leaf_of


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


# Depth first over the chunks --------------------------------------------------------------------
# For: --tree dta. In three parts: the losses of sequences, the scores of a chunk, and the walk,
# which says what runs next and what waits. It does for chunks what
# `tree_attention.tree_backward` does for segments.


class _ChunkForward(NamedTuple):
    """The result of a chunk's forward. If the graph was kept, it is enough for the backward."""

    edges_e: torch.Tensor  # the edges that are scored
    scores: tuple  # C of (e,)
    own_kv: dict  # layer -> (k, v) of the chunk's tokens
    router_counts: dict  # layer -> (E,)
    hidden_1nM: torch.Tensor
    replay_counts: dict = {}  # layer -> (2,): `changed` of a `Replay`


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
        # tests/full/test_tree.py::test_the_loss_is_summed_in_the_models_precision.
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

    def __init__(self, model, trie, temperature, counts_experts, replay=None):
        self.replay = replay
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
        options = {"on_routing": on_routing} if self.counts_experts else {}
        replay = None
        if self.replay is not None:
            replay = options["on_routing"] = self.replay.of_tokens(tokens_n, on_routing)
        hidden_1nM = self.model.hidden(
            self.trie.tokens[tokens_n][None].to(self.device),
            positions=self.trie.positions[tokens_n][None].to(self.device), attention=attention,
            **options,
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
        changed = replay.changed if replay else {}
        return _ChunkForward(edges_e.to(self.device), scores, own_kv, counts, hidden_1nM, changed)

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
        # tests/full/test_tree.py::test_a_reentrant_checkpoint_of_whole_layers_is_refused.
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
                 masks=None, lockstep=None, replay=None):  # fmt: skip
        self.model = model
        self.trie = trie
        self.losses = losses
        self.trains = losses.loss_fn is not None
        self.recompute = recompute
        self.lockstep = lockstep
        self.scores = _ChunkScores(model, trie, temperature, self.trains, replay)
        self.router_counts = {}  # layer -> (E,)
        self.replay_counts = {}  # layer -> (2,)
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
        # tests/full/test_tree_ranks.py::test_ranks_with_other_trees_make_the_same_calls.
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
            for sums, found in ((self.router_counts, forward.router_counts),
                                (self.replay_counts, forward.replay_counts)):  # fmt: skip
                for layer, counts in found.items():
                    sums[layer] = sums.get(layer, 0) + counts

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
        # tests/full/test_tree.py::test_gradients_of_keys_are_summed_in_float32_or_better.
        def add(leaf):
            wide = torch.promote_types(leaf.dtype, torch.float32)
            if sums:
                sums[0].add_(leaf.grad)
            else:
                sums.append(leaf.grad.to(wide))
            leaf.grad = None

        self.leaf.register_post_accumulate_grad_hook(add)


# The public calls -------------------------------------------------------------------------------


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
    replay_counts: dict = {}  # layer -> (2,): `changed` of the replay


def tree_backward(model, trie, loss_fn, *, max_tokens=None, recompute=False, temperature=1.0,
                  masks=None, lockstep=None, batched=False, check_finite=True,
                  replay=None) -> TreeResult:  # fmt: skip
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
    replay: an `experts.Replay` of the tree's tokens, for a model with experts. Default: none.

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
                     temperature=temperature, masks=masks, lockstep=lockstep,
                     replay=replay)  # fmt: skip

    # A loss may fail in the middle of the walk, when some chunks have gone backward already. Then
    # .grad must be as it was, or the caller's next step would use half a gradient.
    with _all_or_nothing(parameters), torch.enable_grad():
        walk.run()
    loss = torch.as_tensor(losses.total, dtype=losses.scores_CN.dtype)
    logprobs = [losses.scores_CN[0, trie.path(i)[1:]] for i in range(len(trie.lengths))]
    return TreeResult(loss, logprobs, walk.router_counts, walk.replay_counts)


# Checks of what callers pass --------------------------------------------------------------------
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


# Ranks that must make the same calls ------------------------------------------------------------
# For: layers that send to ranks with other trees (`lockstep`: experts).
# Skip it on one rank.


def overlay(chunks, group) -> list[TreeChunk]:
    """Return this rank's chunks, with empty ones where only other ranks have a chunk.

    Expert-parallel ranks must make the same number of model calls, in one order, so that the
    messages of a call meet their counterparts in forward and backward. So the trees of chunks of
    all ranks are aligned, n-th child with n-th child, and an empty chunk fills each gap.
    """
    place = ring_of(group)
    parents = [chunk.parent for chunk in chunks]
    children = []  # by rank: {chunk: its children}
    for parents_of_rank in gather_objects(parents, place):
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
        return attend(q, k, v, scale=scale, softcap=softcap)[0]

    tokens_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    hidden_11M = model.hidden(tokens_11, positions=tokens_11, attention=attention)
    return _ChunkForward(tokens_11[0, :0], (), {}, {}, hidden_11M)


# Which rank trains on which sequences -----------------------------------------------------------
# For: data-parallel ranks whose sequences share prefixes.


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
    place = ring_of(group)
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
    # by tests/full/test_tree_ranks.py::test_the_sum_of_the_ranks_gradients_is_the_gradient.
    by_rank = gather_objects((problem, arrays, items), place)
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

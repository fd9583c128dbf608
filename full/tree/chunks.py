"""Train on a tree depth first, in chunks of bounded memory.

A chunk is a segment of the preorder, of at most max_tokens tokens: a part of one path, followed
by as many complete subtrees as fit. All ancestors of its tokens are in the chunk or on the path to
its first token. Chunks run depth first, as the segments of `tree_attention.tree_backward` do. Whole
subtrees in one call keep the matrices large.

    |                   | tokens forward, backward | held at the peak                            |
    | one by one        | sum L_i, sum L_i         | the graph of the longest sequence           |
    | one chunk         | N, N                     | the graph of N tokens                       |
    | chunks            | N, N                     | graphs of this chunk and of all above       |
    | chunks, recompute | N + N', N                | the graph of this chunk; K, V of one path   |

N' counts the tokens of chunks that have chunks below. Where graphs are held, a chunk that is the
only child of another is one call with it, because a cut there would free nothing.

AReaL-DTA (arXiv:2602.00482) walks leaf by leaf, one segment at a time, and Tree Training
(arXiv:2511.00413) packs a tree that fits into memory. Chunks are both. The first token below a fork
is scored in its parent's chunk, so there is no cache of forks. A gated DeltaNet has no keys: its
state at a fork is one more leaf (forest.py). Not here: dropout; mixers other than these two;
batches of trees (a forest is one tree). Only a packed tree supports layers that exchange messages
with ranks of other trees (experts, FSDP), and context ranks.

Equations (1) to (5) are in tree_attention.py, (6) is in trie.py.

Letters:  N tokens of the tree   n tokens of a chunk   p tokens on the path above, m = p + n keys of
both   R sequences, of L_i tokens   T = L - 1 of the longest   e edges scored in a chunk, from its
tokens to their children   C = 2 scores of an edge, or a critic's 1
"""

import re
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from full.attention.attend import Attention, attend_short
from full.model.deltanet import GatedDeltaNet
from full.tree.forest import Forest
from full.tree.trie import partition_tree, scores_of, wanted_edges
from tree_attention import depth_first, leaf_of


class WalkOptions(NamedTuple):
    """Options of the walk of `tree_backward` through a tree.

    max_tokens: tokens of a chunk, at most. None: the whole tree is one chunk. Without recompute an
        only child joins its parent chunk, because both graphs would be held anyway.
    recompute: hold keys and values of the chunks above, not their graphs, and run them twice.
    temperature: of (6).
    masks: a bool (L_i - 1,) for each sequence. The head runs where any mask is on. Elsewhere
        loss_fn gets 0, without gradient. None: everywhere.
    batched: call loss_fn([i, ..], ..) once per chunk, for the R sequences that end in it, with
        (R, T) scores, 0 past a sequence's end. Faster for many short sequences.
    routing: routing(chunk) returns the on_routing= of `model.hidden` for the tokens of the chunk.
        With recompute it is called twice for some chunks. None: on_routing is not passed.
    multiple: each call is padded to a multiple of so many tokens. Sequence parallelism gives each
        rank 1/t of them: 5 tokens become 6 for t = 2.
    """

    max_tokens: int | None = None
    recompute: bool = False
    temperature: float = 1.0
    masks: list | None = None
    batched: bool = False
    routing: object = None
    multiple: int = 1


# Depth first over the chunks --------------------------------------------------------------------


class _ChunkAttention(Attention):
    """What the layers of a chunk call: they read leaves of the chunks above, and leave their own.

    A softmax layer leaves the keys and values of the tokens that chunks below see. A recurrent one
    leaves a few inputs of its convolution, and the states at the forks and at the end.

    stack: a pair of each chunk above, from the root down: the `TreeChunk`, and its leaves by layer.
    """

    def __init__(self, walk, chunk, stack):
        trie = walk.trie
        self.forest = walk.forest
        self.chunk = chunk
        self.stack = stack
        self.mask = trie.mask(chunk.start, chunk.stop)
        self.outputs = {}  # layer -> tensors that chunks below read
        self.in_forward = True
        self.keeps_graph = torch.is_grad_enabled()

        # Which of the chunk's tokens other chunks are below: a slice or indices. These are the
        # ancestors of token `stop`: a path that starts with the chunk's first token. Subtrees of
        # upper forks may stand between them, so a slice is not always enough.
        rows = np.flatnonzero(trie.subtree_end.numpy()[chunk.start : chunk.stop] > chunk.stop)
        self.has_below = len(rows) > 0
        is_slice = not self.has_below or rows[-1] == len(rows) - 1
        self.rows = slice(0, len(rows)) if is_slice else torch.from_numpy(rows).to(walk.device)

        # The open tokens of a chunk have consecutive depths. Those whose depth is less than the
        # depth at which the next chunk of the path begins are on the path to this chunk. Chunks
        # that begin at the depths 0, 6 and 9 have 6 and 3 tokens on the path to the last one.
        starts = [*(above.start for above, _ in stack), chunk.start]
        self.counts = trie.positions[starts].diff().tolist()

    def leave(self, key, make):
        """Keep the tensors make() for chunks below: the chunk's backward starts from them."""
        # After the forward a layer may call again, where a checkpoint recomputes it.
        if not self.in_forward:
            return
        if key in self.outputs:
            raise ValueError(f"two layers call attention with layer={key[0]}; number them")
        lost_graph = self.keeps_graph and not torch.is_grad_enabled()
        with torch.set_grad_enabled(self.keeps_graph):
            self.outputs[key] = make() if self.has_below else []

        # A reentrant checkpoint around a layer computes its keys without a graph, and again in the
        # backward. So (5) has no keys to start from. Around attention alone, it gets keys that have
        # a graph. Pinned by
        # tests/full/test_tree.py::test_a_reentrant_checkpoint_of_whole_layers_is_refused.
        if lost_graph and not all(x.requires_grad for x in self.outputs[key]):
            raise ValueError("a reentrant checkpoint would lose the gradient of keys that "
                             "other chunks read; pass use_reentrant=False")  # fmt: skip

    def attend(self, q, k, v, /, *, layer, scale, window=None):
        self.leave((layer, "keys"), lambda: [x[:, :, self.rows] for x in (k, v)])
        # The keys of the path, from the root down, and then the chunk's own.
        if self.stack:
            above = [[x[:, :, :n] for x in leaves[layer, "keys"]]
                     for (_, leaves), n in zip(self.stack, self.counts, strict=True)]  # fmt: skip
            k, v = (torch.cat(parts, 2) for parts in zip(*above, (k, v), strict=True))
        return attend_short(q, k, v, self.mask.with_window(window), scale=scale)[0]

    def windows(self, x_1nX, /, *, kernel, layer):
        """Return each token's last inputs, as `Forest.windows`."""
        def read_of(chunk):
            return self.forest.inputs_read_later(chunk.start, chunk.stop, kernel)

        start, stop, _ = self.chunk
        self.leave((layer, "inputs"), lambda: [x_1nX[:, read_of(self.chunk) - start]])
        above = [(read_of(chunk), *leaves[layer, "inputs"]) for chunk, leaves in self.stack]
        return self.forest.inputs_at(x_1nX, np.arange(start, stop), above, kernel)

    def recurrence(self, *qkvab, layer):
        """Return the outputs of a chunk, as `Forest.recurrence`."""
        def read_of(chunk):
            return self.forest.states_read_later(chunk.start, chunk.stop).tolist()

        states = {}
        for chunk, leaves in self.stack:
            states |= zip(read_of(chunk), leaves[layer, "states"], strict=True)
        out_1HnV = self.forest.run_segment(qkvab, self.chunk.start, self.chunk.stop, states)
        self.leave((layer, "states"), lambda: [states[token] for token in read_of(self.chunk)])
        return out_1HnV


class _WithoutPadding(Attention):
    """An attention for rows of `length` tokens and `pad` tokens of padding, whose outputs are 0."""

    def __init__(self, attention, length, pad):
        self.attention = attention
        self.length = length
        self.pad = pad

    def attend(self, *qkv, **options):
        out = self.attention(*(x[:, :, : self.length] for x in qkv), **options)
        return F.pad(out, (0, 0, 0, self.pad))

    def windows(self, x_1SX, /, **options):
        x_1SXk = self.attention.windows(x_1SX[:, : self.length], **options)
        return F.pad(x_1SXk, (0, 0, 0, 0, 0, self.pad))

    def recurrence(self, *qkvab, **options):
        out = self.attention.recurrence(*(x[:, :, : self.length] for x in qkvab), **options)
        return F.pad(out, (0, 0, 0, self.pad))


class _TreeWalk:
    """Run chunks depth first: forward, losses of finished sequences, the chunks below, backward.

        chunk 0 - chunk 1      forward 0
                `- chunk 2     forward 1, backward 1: adds to the gradient of 0's keys and values
                               forward 2, backward 2: likewise
                               backward 0: starts from its scores, and from its keys and values

    It does for chunks what `tree_attention.tree_backward` does for segments.
    loss_fn: of `tree_backward`. Without one the walk is a forward, without memory for any gradient.
    scores_CN[c, t] is score c of edge t; dscores_CN is (4).
    """

    def __init__(self, model, trie, options, loss_fn=None):
        self.model = model
        self.trie = trie
        self.options = options
        self.loss_fn = loss_fn
        self.trains = loss_fn is not None
        self.forest = Forest(trie.parent.numpy())
        joins = self.trains and not options.recompute  # then both chunks' graphs are held anyway
        self.chunks = partition_tree(trie, options.max_tokens, join_only_children=joins)
        self.below = {b: [] for b in range(-1, len(self.chunks))}  # -1: chunks with none above
        for b, chunk in enumerate(self.chunks):
            self.below[chunk.parent].append(b)

        # Edge t scores token t from its parent's state, so it belongs to the parent's chunk, even
        # if token t is in a chunk below. Sorted by parents, the edges of a chunk are a run.
        edges_e = torch.from_numpy(wanted_edges(trie, options.masks)[0])
        self.edges = edges_e[trie.parent[edges_e].argsort(stable=True)]
        self.parents = trie.parent[self.edges]
        self.sorted_ends = trie.ends[trie.order]

        # NUMERICS: losses and the sums (4) are in the model's dtype, float32 at least. Pinned by
        # tests/full/test_tree.py::test_bf16_is_as_good_as_flat_bf16.
        weight = next(model.parameters())
        self.device = weight.device
        dtype = torch.promote_types(weight.dtype, torch.float32)
        C = 1 if model.logprobs is None else 2  # as many as `scores_of` returns
        self.scores_CN = torch.zeros(C, len(trie), dtype=dtype, device=self.device)
        self.dscores_CN = torch.zeros_like(self.scores_CN) if self.trains else None
        self.is_used = [False] * C  # which scores some loss depends on
        self.total = self.scores_CN.new_zeros(())

    def run(self):
        """Run all chunks forward and, with a loss_fn, backward."""
        for b in self.below[-1]:
            depth_first(self.visit(b, []))

    def visit(self, b, stack):
        """Run a chunk forward, the chunks below it, then the chunk backward."""
        # With recompute, a chunk that others are below keeps no graph while they run, only keys
        # and values. A chunk with none below goes backward next, and keeps its graph.
        chunk, below = self.chunks[b], self.below[b]
        keep_graph = self.trains and not (self.options.recompute and below)
        with torch.set_grad_enabled(keep_graph):
            edges_e, scores, outputs = self.forward(chunk, stack)
        # Where a graph is kept, it holds the tensors anyway, and a view costs nothing. If not, a
        # view would hold all of the matrix that queries, keys and values come from.
        # NUMERICS: `leaf_of` sums over all chunks below in float32 or better, and the sum is cast
        # once. Pinned by
        # tests/full/test_tree.py::test_gradients_of_keys_are_summed_in_float32_or_better.
        leaves = {key: [leaf_of(x if keep_graph else x.clone()) for x in tensors]
                  for key, tensors in outputs.items()}  # fmt: skip

        # All scores of the sequences that end here exist now, and no chunk of their paths has gone
        # backward yet. One call of the loss for a list of all costs less Python.
        for row_N, score_e in zip(self.scores_CN, scores, strict=False):
            row_N[edges_e] = score_e.detach().to(row_N.dtype)
        ended = sorted(self.trie.order[chunk.run_of(self.sorted_ends)]) if self.trains else []
        is_one_call = self.options.batched and ended
        for sequences in [ended] if is_one_call else [[i] for i in ended]:
            self.call_loss(sequences)

        if not keep_graph:
            del scores, outputs
        for child in below:
            yield self.visit(child, [*stack, (chunk, leaves)])
        if not self.trains:
            return
        if not keep_graph:
            edges_e, scores, outputs = self.forward(chunk, stack)  # again, and now with a graph
        self.backward(edges_e, scores, outputs, leaves)

    def backward(self, edges_e, scores, outputs, leaves):
        """Backpropagate once for all losses that depend on a chunk. The leaves are used up."""
        # Start from the chunk's scores, whose gradients (4) are complete now, and from its keys,
        # values, inputs and states, with the gradients that the chunks below have added.
        pairs = [(x, self.dscores_CN[c, edges_e]) for c, x in enumerate(scores) if self.is_used[c]]
        for key, tensors in outputs.items():
            for x, leaf in zip(tensors, leaves[key], strict=True):
                if leaf.grad is not None:
                    pairs.append((x, leaf.grad))  # (5)
        leaves.clear()  # free their memory before the backward
        pairs = [(x, grad.to(x.dtype)) for x, grad in pairs if x.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))

    def call_loss(self, sequences):
        """Call the loss once, and add its value to (3) and its gradient to (4)."""
        # Sequences 5 6 7 and 5 9 of the tree 5 6 7 8 9 have the edges 1 2 and 4. Edge 0 fills up:
        #
        #     edges_RT  1 2      outside_RT  . .
        #               4 0                  . x
        paths = [self.trie.path(i)[1:] for i in sequences]
        edges_RT = pad_sequence(paths, batch_first=True, padding_value=-1).to(self.device)
        outside_RT = edges_RT < 0
        edges_RT = edges_RT.clamp(min=0)

        # The scores along each path are leaves of a graph of their own. So the loss's backward ends
        # here: a chunk must be gone through once, not once for every sequence that shares it.
        leaves = [leaf_of(row_N[edges_RT].masked_fill(outside_RT, 0.0)) for row_N in self.scores_CN]
        with torch.enable_grad():
            columns = sequences, *leaves
            arguments = columns if self.options.batched else [x[0] for x in columns]
            loss = self.loss_fn(*arguments)
            loss = loss if torch.is_tensor(loss) else self.scores_CN.new_tensor(loss)
            if loss.dim():
                raise ValueError(f"expected one number from loss_fn, of shape (), got "
                                 f"{[*loss.shape]} for sequences {sequences}; sum it")  # fmt: skip
            if loss.requires_grad:
                loss.backward()
        self.total += loss.detach()  # (3)

        # The gradients go back to the edges, and add up where paths meet. A score that no loss uses
        # (often the entropy) gets no gradient, which is not a gradient of 0: a gradient of 0 would
        # send the head's backward through the whole vocabulary a second time.
        for c, leaf in enumerate(leaves):
            if leaf.grad is not None:
                grad = leaf.grad.masked_fill(outside_RT, 0.0).flatten()
                self.dscores_CN[c].index_add_(0, edges_RT.flatten(), grad)  # (4)
                self.is_used[c] = True

    def forward(self, chunk, stack):
        """Call the model for a chunk, with an attention that reads the chunks on the stack.

        Returns the edges that are scored (e,), C scores (e,), and `_ChunkAttention.outputs`.
        """
        # The model does not know that it runs on a tree: each layer calls this once.
        attention = _ChunkAttention(self, chunk, stack)

        # Positions are depths, so the keys of a path are right for every chunk below.
        routing = self.options.routing
        length = chunk.stop - chunk.start
        pad = -length % self.options.multiple
        tokens_1n, positions_1n = (
            F.pad(x_N[chunk.start : chunk.stop], (0, pad))[None].to(self.device)
            for x_N in (self.trie.tokens, self.trie.positions))  # fmt: skip
        hidden_1nM = self.model.hidden(
            tokens_1n, positions=positions_1n,
            attention=_WithoutPadding(attention, length, pad) if pad else attention,
            **({} if routing is None else {"on_routing": routing(chunk)}),
        )  # fmt: skip
        attention.in_forward = False
        if not attention.outputs:
            name = type(self.model).__name__
            raise ValueError(f"{name}.hidden never called `attention`: its tokens mix in a way a "
                             "tree cannot follow; every layer must call it")  # fmt: skip

        # The head is the largest matmul, so it runs at the parents of the wanted edges and nowhere
        # else. A token at a fork is used once per child. The children may be in chunks below: their
        # edges are scored already here.
        #
        #     5 6 7 / 5 6 8 / 5 9      edges    1 2 3 4      edge 2: token 7 given the state of 6
        #                              parents  0 1 1 0      edge 3: token 8 given the same state
        #
        # A chunk of leaves has no edge to score. But the scores of a whole tree have a graph.
        run = chunk.run_of(self.parents)
        edges_e = self.edges[run]
        scores = ()
        if len(edges_e) or length == len(self.trie):
            scored_eM = hidden_1nM[0, (self.parents[run] - chunk.start).to(self.device)]
            targets_e = self.trie.tokens[edges_e].to(self.device)
            scores = scores_of(self.model, scored_eM, targets_e, self.options.temperature)
        return edges_e.to(self.device), scores, attention.outputs


# The public calls -------------------------------------------------------------------------------


def tree_scores(model, trie, *, temperature=1.0, masks=None, max_tokens=None):
    """Return log-probs and entropies, or a critic's values, (L_i - 1,) of each sequence, in order.

    model, trie, temperature, masks: as in `tree_backward`.
    max_tokens: None: one graph of the whole tree, differentiable. A number: chunk by chunk, without
        gradients.

    Raises ValueError where model, tree or masks do not fit.
    """
    require_tree_model(model)
    walk = _TreeWalk(model, trie, WalkOptions(max_tokens, temperature=temperature, masks=masks))
    columns = walk.scores_CN.unbind()
    if max_tokens is not None:
        walk.run()
    elif len(trie):
        edges_e, scores, _ = walk.forward(walk.chunks[0], [])
        columns = [x_e.new_zeros(len(trie)).index_copy(0, edges_e, x_e) for x_e in scores]

    # Each path reads its own scores. In the backward the gradients of all paths add up at an edge:
    # (4) by autograd.
    paths = [trie.path(i)[1:].to(walk.device) for i in range(len(trie.lengths))]
    return [tuple(column_N[path] for column_N in columns) for path in paths]


class TreeResult(NamedTuple):
    """What `tree_backward` returns, detached."""

    loss: torch.Tensor  # (3)
    logprobs: list  # (L_i - 1,) of each sequence, in order


def tree_backward(model, trie, loss_fn, **options) -> TreeResult:
    """Add the gradient of (3) to .grad, like loss.backward(), in O(path) memory.

    model: like models.Transformer; see `require_tree_model`.
    trie: the `TokenTrie` of the sequences.
    loss_fn: loss_fn(i, logprobs, entropies), of a critic (i, values), (L_i - 1,) each, returns the
        loss of sequence i, a tensor () or a number. Entry s - 1 is about token s; a value is of the
        state before token s. Called once for each i, also where L_i = 1. It may return a tensor
        without gradient, and must not use arguments of an earlier call.
    options: of `WalkOptions`.

    Hooks of parameters fire once per chunk. Raises ValueError where model, tree or masks do not
    fit, before anything runs, or what loss_fn raises, when .grad may be half done.
    """
    require_tree_model(model)
    if torch.is_inference_mode_enabled() or not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient here; use tree_scores")
    walk = _TreeWalk(model, trie, WalkOptions(**options), loss_fn)
    with torch.enable_grad():
        walk.run()
    logprobs = [walk.scores_CN[0, trie.path(i)[1:]] for i in range(len(trie.lengths))]
    return TreeResult(walk.total, logprobs)


# Checks of what callers pass --------------------------------------------------------------------
# To understand the algorithm, skip this section. Read it before you pass a model of your own.

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
MIXERS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d)
OTHER_MIXERS = re.compile("mamba|rwkv|deltanet|linearattention|ssm|retention", re.IGNORECASE)


def require_tree_model(model, /):
    """Raise ValueError, before anything runs, if the model's tokens may mix otherwise than by (1).

    A model needs .hidden(tokens, positions=, attention=) and .logprobs(hidden, targets,
    temperature=). Each layer must call attention(q, k, v, layer=, scale=, window=) once, with a
    number of its own; window may be left out.
    """
    # A shared token has one state. Nothing may make it differ between its sequences, and nothing
    # but `attention`, which knows the tree, may carry information from token to token.
    # Our recurrent layers ask the tree as well. Their convolution is but a weight.
    ours = tuple(f"{name}." for name, module in model.named_modules()
                 if isinstance(module, GatedDeltaNet))  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, DROPOUT) and module.p and module.training:
            raise ValueError(f"{name} drops out with p = {module.p}: a shared token would differ "
                             "between its sequences; call model.eval(), or set p = 0")  # fmt: skip
        is_other = isinstance(module, MIXERS) or OTHER_MIXERS.search(type(module).__name__)
        if is_other and not f"{name}.".startswith(ours):
            raise ValueError(f"{name} is {type(module).__name__}: it mixes tokens in another way "
                             "than causal softmax attention; train the sequences one by one")

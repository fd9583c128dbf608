"""How many bytes live at once: counted while something runs, and predicted for a tree.

`tree_attention.tree_backward` promises the memory of one path. `LiveBytes` counts what it holds, on
a CPU too, and `predict_memory` says beforehand what it would hold, from two small measurements.
"""

import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tree_attention as tree


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive: `now`, and at most, `peak`."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))

        # A view, and an operation in place, return a storage that came in: nothing was made.
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(out):
            storage = x.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if key not in self.known and key not in given:
                self.known.add(key)
                self.now += size
                weakref.finalize(storage, self._freed, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key, size):
        self.known.discard(key)
        self.now -= size


def _tensors(nested):
    return [x for x in tree_leaves(nested) if torch.is_tensor(x)]


class Memory(NamedTuple):
    """Bytes beyond the parameters and their .grad; the sums of a step are held next to a .grad."""

    path: int  # K, V that chunks below read, and their gradients, where that is most
    activations: int  # graphs, and the temporary tensors of forward and backward


class Probe(NamedTuple):
    """Bytes of one chunk of n tokens with nothing above it."""

    graph: float  # what its forward keeps, its own keys and values included
    backward: float  # the most that its backward holds beyond the graph
    key_bytes: float  # keys and values of a token, all layers
    grad_bytes: float  # their gradients, summed over the chunks below
    layers: int


def predict_memory(model, trie, *, max_tokens=None, recompute=False) -> Memory:
    """Return what `tree_backward` would hold at its peak, if it were called now.

    Measured: one chunk of 160 tokens and one of 320, forward and backward; a chunk of n tokens then
    counts by the straight line through both, and the walk over the tree's chunks is exact. Too
    much where the log-probs' chunks are full (`models.token_logprobs`).
    """
    tree.require_tree_model(model, trie)
    small = _probe(model, 160)
    large = _probe(model, 320)
    chunks = tree.partition_tree(trie, max_tokens, join_only_children=not recompute)
    inner = {chunk.parent for chunk in chunks}
    end = trie.subtree_end.numpy()

    # Down the tree of chunks: what the chunks above hold, while one runs. The keys and values that
    # chunks below read are `path`, wherever they are part of a graph too.
    most = Memory(0, 0)
    held = {-1: Memory(0, 0)}
    for b, chunk in enumerate(chunks):
        n = chunk.stop - chunk.start
        graph = small.graph + (n / 160 - 1) * (large.graph - small.graph)
        backward = small.backward + (n / 160 - 1) * (large.backward - small.backward)
        keys, bias_bytes = _copied_keys(model, trie, chunk)
        graph += keys * large.key_bytes + bias_bytes

        # A chunk's backward has the gradient of all copied keys, of one layer at a time.
        backward += keys * large.grad_bytes / large.layers

        # Under a graph the rows that chunks below read are a view of the chunk's keys and values
        # if they are its first rows, else a copy. The first chunk below makes their gradients.
        rows = np.flatnonzero(end[chunk.start : chunk.stop] > chunk.stop)
        is_view = not len(rows) or rows[-1] == len(rows) - 1
        path = len(rows) * (large.key_bytes + large.grad_bytes)
        waiting = graph - (len(rows) * large.key_bytes if is_view else 0)
        if recompute and b in inner:
            waiting = 0.0

        before = held[chunk.parent]
        now = Memory(before.path, before.activations + graph + backward)
        most = max(most, now, key=sum)
        held[b] = Memory(before.path + path, before.activations + waiting)

        # An inner chunk goes backward when all chunks below it are done.
        if b in inner:
            again = before.activations + graph + backward
            most = max(most, Memory(before.path + path, again), key=sum)

    # Also: scores and their gradients, and a second .grad while a step adds up its own.
    scores = 3 if tree._is_critic(model) else 2
    columns = 2 * scores * 4 * len(trie)
    second = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return Memory(int(most.path), int(max(most.activations, 0) + columns + second))


def _copied_keys(model, trie, chunk):
    """Return how many keys a chunk's attention copies, and the bytes of its bias."""
    stretch = tree.Stretch(trie, chunk.start, chunk.stop)
    c = model.config
    n = chunk.stop - chunk.start
    q = torch.empty(1).expand(1, c.num_attention_heads, n, c.head_dim)
    k = torch.empty(1).expand(1, c.num_key_value_heads, n, c.head_dim)
    if tree.groups_pay(q, k, stretch):
        # Each group copies the path above it and its own keys.
        keys_UY, bias_U1WY = tree.groups_of_tokens(stretch, None, torch.float32)
        return keys_UY.numel(), bias_U1WY.nbytes
    return len(stretch.end) if len(stretch.above) else 0, 0


def _probe(model, n):
    """Measure one chunk of n tokens; leave .grad as it was."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    walk = tree._TreeWalk(model, tree.TokenTrie([[0] * (n + 1)]), max_tokens=n)
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        walk.dscores_CN = torch.zeros_like(walk.scores_CN)
        walk.is_used[0] = True  # a loss of the log-probs
        with torch.enable_grad(), LiveBytes() as live:
            forward = walk.forward(0, [])
            graph = live.now
            layers = len(forward.own_kv)
            kv = [x for kv in forward.own_kv.values() for x in kv]
            key_bytes = sum(x.nbytes for x in kv) / n
            wide = torch.promote_types(kv[0].dtype, torch.float32).itemsize / kv[0].itemsize

            # The walk lets go of them too, where nothing is below.
            del kv
            forward.own_kv.clear()
            walk.backward(0, forward, [])
            extra = live.peak - graph
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
    return Probe(graph, extra, key_bytes, key_bytes * wide, layers)

"""How many bytes live at once: counted while something runs, and predicted for a tree.

`tree_attention.tree_backward` promises the memory of one path. `LiveBytes` counts what it holds, on
a CPU too, and `predict_memory` says beforehand what it would hold, from two small measurements.
"""

import weakref
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tree_attention import TokenTrie, _Engine, _is_critic, blocks_to_walk, require_tree_model


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
    """Bytes beyond the parameters and their .grad; what accumulates is held beside a .grad."""

    stack: int  # K, V, dK and dV of the deepest path of pieces
    activations: int  # graphs and what forward and backward hold for a moment


class Probe(NamedTuple):
    """Bytes of one block of n tokens."""

    graph: float  # what its forward keeps, without the keys and values on the stack
    backward: float  # what its backward holds at most, beyond the graph
    key_bytes: float  # keys and values of a token, all layers
    grad_bytes: float  # their gradients on the stack
    layers: int


def predict_memory(model, trie, *, max_tokens=None, recompute=False) -> Memory:
    """What `tree_backward` would hold at its peak, were it called now.

    Measured: one block of 64 tokens and one of 128, forward and backward; a block of n tokens then
    counts by the straight line through both, and the walk over the tree's blocks is exact. Too
    much where the log-probs' chunks are full (`models.token_logprobs`).
    """
    require_tree_model(model, trie)
    small = _probe(model, 64)
    large = _probe(model, 128)
    blocks = blocks_to_walk(trie, max_tokens, bool(recompute), None)
    inner = {block.parent for block in blocks}

    # Down the tree of blocks: the graphs above a block are held while it runs, unless recomputed.
    peak = 0.0
    graphs_above = {-1: 0.0}
    deepest = 0
    for b, block in enumerate(blocks):
        steps = len(block.tokens) / 64 - 1
        graph = small.graph + steps * (large.graph - small.graph)
        backward = small.backward + steps * (large.backward - small.backward)
        stack_gradient = block.depth * large.grad_bytes / large.layers
        peak = max(peak, graphs_above[block.parent] + graph + backward + stack_gradient)
        graphs_above[b] = graphs_above[block.parent] + graph
        if recompute and b in inner:
            graphs_above[b] = 0.0
        if block.piece:
            deepest = max(deepest, block.depth + block.piece)

    # Beside the walk: scores and their gradients, and a second .grad while one accumulates.
    scores = 3 if _is_critic(model) else 2
    columns = 2 * scores * 4 * len(trie)
    second = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    stack = deepest * (large.key_bytes + large.grad_bytes)
    return Memory(int(stack), int(max(peak, 0) + columns + second))


def _probe(model, n):
    """Measures one block of n tokens; leaves .grad as it was."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    engine = _Engine(model, TokenTrie([[0] * (n + 1)]), max_tokens=n)
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        engine.dscores_CN = torch.zeros_like(engine.scores_CN)
        with torch.enable_grad(), LiveBytes() as live:
            forwarded = engine.forward([0])
            graph = live.now
            engine.backward(0, forwarded)
            extra = live.peak - graph
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad

    held = list(engine.stack.kv.values())
    key_bytes = sum(x.nbytes for x in held) / n
    wide = torch.promote_types(held[0].dtype, torch.float32).itemsize / held[0].itemsize
    return Probe(graph - key_bytes * n, extra, key_bytes, key_bytes * wide, len(held))

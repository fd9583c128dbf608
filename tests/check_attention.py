"""Hold the ring and the trees of the folder to the definitions of the five: rows of errors.

Tests and `tests/bench/gpu.py` use these masks, forests and the tiny model.
"""

import functools
import math

import numpy as np
import torch
import torch.distributed as dist

import ring_attention as minimal_ring
from full.attention.masks import Mask
from full.attention.ring import METHODS, ring_attention, ring_of, shard, unshard
from full.tiny import HYBRID, TINY, tiny_model
from full.tree.chunks import tree_backward, tree_scores
from full.tree.trie import TokenTrie
from ring_attention import attention_definition
from tree_attention import CheckModel, check_loss, definition

# The ring ---------------------------------------------------------------------------------------
# Every method and mask against `ring_attention.attention_definition`.


def examples(length):
    """Return one mask of every kind for `length` tokens; a batch of 2 where its rows can differ."""
    generator = torch.Generator().manual_seed(0)
    valid_BS = torch.rand(2, length, generator=generator) > 0.3
    valid_BS[1, : length // 2] = False  # a rank of two may hold nothing that is valid
    doc_BS = torch.arange(length) * torch.tensor([[3], [7]]) // max(length, 1)

    # Subtrees of 2 tokens inside subtrees of 6 inside subtrees of 24. Each size divides the next,
    # so that they nest.
    end = np.arange(1, length + 1)
    for size in (2, 6, 24):
        end[::size] = np.minimum(np.arange(0, length, size) + size, length)
    tree = Mask.tree(end)
    return {
        "full": None,
        "causal": Mask.causal(length),
        "documents": Mask.documents(doc_ids=doc_BS.masked_fill(doc_BS == 1, -1)),
        "positions": Mask.documents(position_ids=torch.arange(length) % torch.tensor([[11], [4]])),
        "blocks": Mask.blocks(torch.arange(length).expand(2, -1) // 5, valid_BS),
        "padding": Mask.padding(valid_BS),
        "tree": tree,
        "window": Mask.causal(length, window=5),
        "tree, window": tree.with_window(3),
    }


def relative(found, truth):
    """Return the norm of the error over the norm of the truth: 1 for a wrong zero, inf for NaN."""
    # A norm of the whole tensor: elements near 0 have no relative error that says anything. Where
    # both are -inf, the lse of a query that sees nothing, there is no error.
    found, truth = found.cpu().double(), truth.cpu().double()
    both_blind = (found == -math.inf) & (truth == -math.inf)
    error = (found - truth).masked_fill(both_blind, 0.0).norm().item()
    size = truth.masked_fill(both_blind, 0.0).norm().item()
    return error / (size or 1.0) if math.isfinite(error) else math.inf


def compare(
    mask, group, dtype, tokens, device="cpu", *, heads=(12, 2), width=16, attention=None, **options
):  # fmt: skip
    """Return the errors of (out, dq, dk, dv) of `ring_attention`: the worst of all ranks.

    mask, group: as in `ring_attention`. dtype, device: of the inputs. tokens, heads, width: S,
    (H, G) and D. options: of `ring_attention`.
    attention: a function of this rank's q, k, v, and group=, that returns out, to compare instead.

    The truth is the definition in float64, of the same rounded inputs.
    """
    # Every rank draws the same whole sequence, and a random upstream gradient.
    generator = torch.Generator().manual_seed(7)
    h, g = heads
    shapes = [(2, n, tokens, width) for n in (h, g, g, h)]
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    drawn = [x.to(device, dtype) for x in drawn]
    visible = (mask or Mask.full(tokens)).dense().to(device)
    place = dict(dim=2, group=group)
    attention = attention or functools.partial(ring_attention, mask=mask, **options)

    def defined(q, k, v):
        return attention_definition(q, k, v, visible)[0]

    def run(function, q, k, v, upstream):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, upstream)
        return [x.detach().double() for x in (out, *grads)]

    # Each rank computes its tokens. Then all of them see the whole results.
    truth = run(defined, *(x.double() for x in drawn))
    of_shards = functools.partial(attention, group=group)
    found = run(of_shards, *(shard(x, **place) for x in drawn))
    found = [unshard(x, **place, length=tokens) for x in found]
    errors = [relative(a, b) for a, b in zip(found, truth, strict=True)]

    # Every rank returns the largest error of all ranks, so that all of them print the same.
    return np.max(ring_of(group).all_gather(errors), axis=0).tolist()


def multiple_of_sdpa(mask, alone, dtype, tokens, **options):
    """Return the worst error of out, dq, dk, dv as a multiple of SDPA's own at this dtype.

    alone: a group of this rank, which computes SDPA's by itself. options: of `compare`.
    """
    def sdpa(*qkv, group):
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(*qkv, attn_mask=mask.dense(), enable_gqa=True)

    ours = compare(mask, None, dtype, tokens, **options)
    options.pop("method", None)
    theirs = compare(mask, alone, dtype, tokens, attention=sdpa, **options)
    return max(a / b for a, b in zip(ours, theirs, strict=True))


def by_way(group, error):
    """Return {column: error(method=..)} for the ways a group can share 12 heads."""
    # The ring and the all-gather run on any number of ranks.
    methods = METHODS if 12 % ring_of(group).world == 0 else [*METHODS][:2]
    return {method[:8]: error(method=method) for method in methods}


def rows_of_rank(tokens, device):
    """Return [(table, row, budget, {column: value})] of the worlds of this rank; rank 0 has all."""
    # A group is made by all ranks, its members or not. Only its members compute.
    rank = dist.get_rank()
    total = dist.get_world_size()
    worlds = [world for world in sorted({1, 2, 3, 4, total}) if world <= total]
    groups = {world: dist.new_group(list(range(world))) for world in worlds if world < total}
    groups[total] = dist.group.WORLD
    rows = []
    for world in worlds:
        if rank >= world:
            continue
        table = f"float64, world {world}"
        for name, mask in examples(tokens).items():
            given = mask, groups[world], torch.float64, tokens, device
            row = by_way(groups[world], lambda **way: max(compare(*given, **way)))  # noqa: B023
            rows.append((table, name, 1e-12, row))

        # ring_attention.py knows the causal mask alone, and shards of one length.
        if 12 % world == 0 and device == "cpu":
            minimal = [minimal_ring.ring_attention, minimal_ring.allgather_attention,
                       minimal_ring.ulysses_attention]  # fmt: skip
            given = Mask.causal(8 * world), groups[world], torch.float64, 8 * world
            row = {way.__name__[:6]: max(compare(*given, attention=way)) for way in minimal}
            rows.append((f"float64, ring_attention.py, world {world}", "causal", 1e-12, row))

    return rows


# Trees ------------------------------------------------------------------------------------------
# Every shape of tree, every chunk size.


class TinyModel(CheckModel):
    """`CheckModel` with a window in every second layer, as in Gemma."""

    def __init__(self):
        super().__init__()
        self.forwarded = 0  # tokens that `hidden` was given

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        self.forwarded += tokens_BS.numel()
        attend = attention or self.plain_attention

        def attention_of_layer(q, k, v, /, *, layer, scale, window=None):
            return attend(q, k, v, layer=layer, scale=scale, **self.layer_options(layer))

        return super().hidden(tokens_BS, positions=positions, attention=attention_of_layer)

    def layer_options(self, layer):
        """Return the options of `attention` in addition to those of `CheckModel`."""
        return dict(window=None if layer % 2 else 3)

    @staticmethod
    def plain_attention(q, k, v, /, *, layer, scale, window):
        # One sequence by itself, by the formulas of attention as they stand.
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        visible = (distance >= 0) & (distance < (window or math.inf))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = q @ k.mT * scale
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


def example_loss(i, logprobs, entropy):
    """Return `check_loss` with other weights for each sequence."""
    # All of it depends on i, so that a gradient that reaches the wrong sequence shows. Some tokens
    # have no entropy term. No sum over tokens can replace the square of the sum in `check_loss`.
    weights = torch.sin(torch.arange(len(logprobs)) * 7.0 + i).to(logprobs)
    return check_loss(i, logprobs, weights.relu() * entropy)


def outcome(model, way, *given, **options):
    """Return loss, log-probs and every gradient after way(model, ..)."""
    model.zero_grad()
    loss, logprobs, *_ = way(model, *given, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [x.cpu() for x in (torch.as_tensor(loss), *logprobs, *grads)]


def _one_graph(model, trie, loss_fn, *, temperature):
    """Pack the whole tree, and run one backward of it."""
    scores = tree_scores(model, trie, temperature=temperature)
    loss = torch.stack([loss_fn(i, *score) for i, score in enumerate(scores)]).sum()
    loss.backward()
    return loss.detach(), [score[0].detach() for score in scores]


def tree_rows(model, cases, mine=None):
    """Yield (row, {column: the largest relative error of loss, log-probs and every gradient}).

    Columns: one graph; chunk sizes, each the worse of with and without recomputation.
    mine: the same model on another device, to compare with the definition on the CPU.
    """
    mine = model if mine is None else mine
    for name, sequences in cases.items():
        sequences = [torch.tensor(x) for x in sequences]
        trie = TokenTrie(sequences)
        truth = outcome(model, definition, sequences, example_loss, temperature=0.7)

        def error(way, trie=trie, truth=truth, **options):
            found = outcome(mine, way, trie, example_loss, temperature=0.7, **options)
            return max(relative(a, b) for a, b in zip(found, truth, strict=True))

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


def family_rows(device="cpu"):
    """Return {family: the worst of each column} over a few trees. device: of the tree's model."""
    few = {name: forests()[name] for name in ("prefixes", "binary", "forest")}
    found = {}
    for kind in (*TINY, *HYBRID):
        lines = [line for _, line in tree_rows(tiny_model(kind), few, tiny_model(kind).to(device))]
        found[kind] = {column: max(line[column] for line in lines) for column in lines[0]}
    return found

"""Chunks of a tree: only children that join, calls, what they hold, and their attention."""

import numpy as np
import pytest
import torch
from test_tree import SIZES, error, gradients, hang_right, peak, random_forest, small_model, stars
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import models
import tree_attention as tree
from tree_attention import TokenTrie, definition, example_loss, partition_tree, tree_backward
from tree_attention import tree_scores


def held_tokens(chunks):
    """The most tokens of chunks that are below each other: their graphs are held at once."""
    held = []
    for chunk in chunks:
        above = held[chunk.parent] if chunk.parent >= 0 else 0
        held.append(above + chunk.stop - chunk.start)
    return max(held)


def calls_of(model, run):
    """How many tokens each of the model's calls has had, in run()."""
    calls = []
    hidden = model.hidden

    def counted(tokens, /, *, positions, attention):
        calls.append((tokens.shape[1], torch.is_grad_enabled()))
        return hidden(tokens, positions=positions, attention=attention)

    model.hidden = counted
    try:
        run()
    finally:
        model.hidden = hidden
    return calls


def chain(length=40):
    """A conversation that is trained on at each turn: one path."""
    return TokenTrie([np.arange(n) % 11 for n in range(5, length + 1, 5)])


# What the longest paths of chunks held, in all, when pieces of a path could have subtrees of any
# fork on it in their chunk: forests 0 to 19, by max_tokens.
HELD = {1: 276, 2: 282, 3: 291, 7: 405, 13: 607, 40: 1303}


@pytest.mark.quick
def test_joined_chunks_are_a_cut_of_the_same_tree_that_holds_no_more():
    total = dict.fromkeys(SIZES, 0)
    for seed in range(20):
        trie = TokenTrie(random_forest(seed, count=25, longest=14))
        for size in SIZES:
            before = partition_tree(trie, size)
            chunks = partition_tree(trie, size, join_only_children=True)
            hang_right(trie, chunks)
            assert held_tokens(chunks) == held_tokens(before)
            total[size] += held_tokens(chunks)

            # Nobody is an only child any more, and chunks that were no only child begin as before.
            parents = [chunk.parent for chunk in chunks if chunk.parent >= 0]
            assert all(parents.count(parent) > 1 for parent in parents)
            were = [chunk.parent for chunk in before]
            kept = [x.start for x in before if x.parent < 0 or were.count(x.parent) > 1]
            assert [chunk.start for chunk in chunks] == kept
    assert all(total[size] <= HELD[size] for size in SIZES)


@pytest.mark.quick
def test_a_path_is_one_call_where_its_graphs_are_kept():
    model = models.tiny_model("qwen3")
    for size in (None, 10, 3):
        options = dict(max_tokens=size)
        calls = calls_of(
            model, lambda o=options: tree_backward(model, chain(), example_loss, **o)
        )
        assert calls == [(40, True)]

    # A scoring pass has no graph: there a chunk is all that bounds what a call holds.
    with torch.no_grad():
        calls = calls_of(model, lambda: tree_scores(model, chain(), max_tokens=10))
    assert calls == [(10, False)] * 4


@pytest.mark.quick
def test_with_recomputation_chunks_run_twice_where_others_are_below_and_only_there():
    model = models.tiny_model("qwen3")

    def calls(trie, size):
        options = dict(max_tokens=size, recompute=True)
        return calls_of(model, lambda: tree_backward(model, trie, example_loss, **options))

    # Four chunks: three without a graph, then each with its own, from the last one up.
    assert calls(chain(), 10) == [(10, False)] * 3 + [(10, True)] * 4
    assert calls(chain(), 4) == [(4, False)] * 9 + [(4, True)] * 10

    # At a fork the walk goes down the largest branch first.
    fork = TokenTrie([np.arange(30) % 11, np.append(np.arange(10), [5] * 12)])
    lengths = [chunk.stop - chunk.start for chunk in partition_tree(fork, 10)]
    assert lengths == [10, 10, 10, 10, 2]
    assert calls(fork, 10) == [
        (10, False), (10, False), (10, True), (10, True),  # down the long branch, and back
        (10, False), (2, True), (10, True),  # the other branch
        (10, True),  # the chunk above both
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3_text", "critic"])
def test_recomputation_changes_no_gradient_no_score_and_no_count(kind, monkeypatch):
    """Long paths in small chunks: a router, windows, values; and masks that want few scores."""
    model = models.tiny_model("qwen3" if kind == "critic" else kind)
    if kind == "critic":
        nn.init.normal_(model.add_value_head().score.weight)
    aux = dict(aux_coef=0.3) if kind == "qwen3_moe" else {}
    sequences = [x.tolist() * 2 for x in random_forest(3, count=9, longest=12)]
    trie = TokenTrie(sequences)
    masks = [torch.arange(len(x) - 1) % 3 == 0 for x in sequences]

    def run(**options):
        return tree_backward(model, trie, example_loss, masks=masks, **aux, **options)

    truth, result_of_all = gradients(model, run)
    for size in (1, 2, 5):
        for recompute in (False, True):
            options = dict(max_tokens=size, recompute=recompute)
            found, result = gradients(model, lambda: run(**options))  # noqa: B023
            assert max(tree.ring.relative(a, b) for a, b in zip(found, truth, strict=True)) < 1e-10
            assert abs(result.loss - result_of_all.loss) < 1e-12 * abs(result.loss)
            assert abs(result.aux_loss - result_of_all.aux_loss) < 1e-12
            for a, b in zip(result.logprobs, result_of_all.logprobs, strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-12)
            counts = result_of_all.router_counts
            assert result.router_counts.keys() == counts.keys()
            assert all(torch.equal(result.router_counts[x], counts[x]) for x in counts)

    # The test sees keys that go wrong on the way down.
    leaf_of = tree.leaf_of
    monkeypatch.setattr(tree, "leaf_of", lambda x: leaf_of(x.flip(2) if x.ndim == 4 else x))
    assert error(model, lambda: run(**options), truth) > 1e-3


def test_larger_calls_hold_no_more(monkeypatch):
    """MEMORY: at the peak as many bytes as with a call for each chunk, on paths and on a star."""
    model = small_model()
    trees = {
        "path": TokenTrie([np.arange(n) % 53 for n in range(60, 481, 60)]),
        "star": stars(range(12)),
    }
    with_larger = {name: peak(model, trie, max_tokens=60) for name, trie in trees.items()}
    plain = partition_tree
    monkeypatch.setattr(tree, "partition_tree", lambda *x, join_only_children: plain(*x))
    for name, trie in trees.items():
        assert with_larger[name] < 1.02 * peak(model, trie, max_tokens=60), name
    whole = peak(model, trees["path"], max_tokens=480)
    assert whole > 2.5 * peak(model, trees["path"], max_tokens=60, recompute=True)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_keys_are_summed_in_float32_or_better(dtype):
    """In bf16, 256 + 1 is 256."""
    read = tree._SummingLeaf(torch.zeros(3, dtype=dtype))
    for n in range(3000):
        (read.leaf * (1 + n % 2)).sum().backward()
    assert len(read.sums) == 1 and read.leaf.grad is None
    assert read.sums[0].dtype == torch.promote_types(dtype, torch.float32)
    assert (read.sums[0] == 4500).all()


# Attention of a chunk --------------------------------------------------------------------------


def attention_of_a_chunk(dtype, window, tokens=24):
    """A chunk below 40 others: its stretch, q, k, v with the keys above, the gradient, the mask."""
    spine = [np.arange(n) % 7 for n in range(8, 89, 8)]
    trie = TokenTrie([*spine, np.append(spine[7], [9] * 4)])
    stretch = tree.Stretch(trie, 40, 40 + tokens)
    generator = torch.Generator().manual_seed(5)

    def draw(heads, count):
        laid = torch.randn(1, count, heads, 8, generator=generator, dtype=dtype)
        return laid.transpose(1, 2)

    given = [x.requires_grad_() for x in (draw(4, tokens), draw(2, 40 + tokens))]
    given.append(draw(2, 40 + tokens).requires_grad_())
    seen = trie.mask(window).dense()[:, :, 40 : 40 + tokens, : 40 + tokens]
    return stretch, given, draw(4, tokens), seen


@pytest.mark.quick
@pytest.mark.parametrize("tokens", [1, 24, 32, 48])
@pytest.mark.parametrize("window", [None, 5, 60])
@pytest.mark.parametrize("short", [0, 128])
def test_attention_of_a_chunk_is_the_definition(monkeypatch, short, window, tokens):
    """In groups and in boxes: 24 queries at depth 40 see 41 keys, 42, and so on."""
    monkeypatch.setattr(tree, "SHORT", short)
    calls, grouped = [], tree.grouped_attention
    monkeypatch.setattr(tree, "grouped_attention", lambda *x: calls.append(1) or grouped(*x))
    stretch, given, dout, seen = attention_of_a_chunk(torch.float64, window, tokens)
    q, k, v = given
    if tokens == 24 and window is None:
        assert torch.equal(seen[0, 0], torch.ones(24, 64, dtype=torch.bool).tril(40))

    # The same numbers in another layout: with a stride in the last dimension, and copied.
    found = []
    for laid in (given, [x.mT.contiguous().mT for x in given]):
        out = tree.stretch_attention(*laid, stretch, 0.3, window, None)
        found.append([out.detach(), *torch.autograd.grad(out, laid, dout)])
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    out = (q @ k.mT * 0.3).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    truth = [out.detach(), *torch.autograd.grad(out, given, dout)]
    for result in found:
        for a, b in zip(result, truth, strict=True):
            assert tree.ring.relative(a, b) < 1e-13 and not (b == 0).all()
    assert len(calls) == (2 if short else 0)


@pytest.mark.quick
@pytest.mark.parametrize("short", [0, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_of_a_chunk_in_other_dtypes(monkeypatch, dtype, short):
    """At most twice the error of plain torch, against float64."""
    monkeypatch.setattr(tree, "SHORT", short)
    stretch, given, dout, seen = attention_of_a_chunk(dtype, None)

    def plain(*qkv):
        return nn.functional.scaled_dot_product_attention(
            *qkv, seen, scale=0.3, enable_gqa=True
        )

    def run(attention, to):
        leaves = [x.detach().to(to).requires_grad_() for x in given]
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(to))]

    truth = run(plain, torch.float64)
    ours = run(lambda *qkv: tree.stretch_attention(*qkv, stretch, 0.3, None, None), dtype)
    for a, b, c in zip(ours, run(plain, dtype), truth, strict=True):
        assert a.dtype == dtype
        assert tree.ring.relative(a, c) <= 2 * tree.ring.relative(b, c) + 1e-7


@pytest.mark.quick
def test_groups_are_for_short_paths_on_a_cpu_without_a_softcap(monkeypatch):
    calls = []
    monkeypatch.setattr(tree, "grouped_attention", lambda q, *_: calls.append(1) or q)

    def grouped(longest=16, device="cpu", heads=2, batch=1, **options):
        calls.clear()
        stretch = TokenTrie([list(range(longest)), [*range(12), 20]]).stretch()
        n = len(stretch.depth)
        qkv = torch.zeros(3, batch, heads, n, 4, device=device)
        if device != "cpu":
            return tree.groups_pay(*qkv[:2], stretch)
        options = dict(scale=1.0, window=None, softcap=None) | options
        tree.stretch_attention(*qkv, stretch, **options)
        return bool(calls)

    assert grouped() and grouped(longest=tree.SHORT) and grouped(window=4)
    assert not grouped(longest=tree.SHORT + 1)
    assert not grouped(device="meta")
    assert not grouped(batch=2)
    assert not grouped(softcap=2.0) and not grouped(backend="math")
    monkeypatch.setattr(tree, "GATHERED", 300)
    assert not grouped()


def keeping_attention():
    """Contexts of a checkpoint that keeps what torch's attention gave, and recomputes the rest."""
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    return create_selective_checkpoint_contexts(kept)


@pytest.mark.quick
@pytest.mark.parametrize("context_fn", [noop_context_fn, keeping_attention])
@pytest.mark.parametrize("short", [0, 128])
def test_checkpoints_around_attention_change_no_gradient(monkeypatch, short, context_fn):
    """In boxes, and in groups."""
    monkeypatch.setattr(tree, "SHORT", short)
    model = models.tiny_model("qwen3").double()
    sequences = [torch.arange(n) % 11 for n in range(5, 41, 5)]
    trie = TokenTrie(sequences)
    truth, _ = gradients(model, lambda: definition(model, sequences, example_loss))
    calls, grouped = [], tree.grouped_attention
    monkeypatch.setattr(tree, "grouped_attention", lambda *x: calls.append(1) or grouped(*x))
    hidden = model.hidden

    def checkpointed(tokens, /, *, positions=None, attention=None):
        def again(*qkv, **options):
            how = dict(use_reentrant=False, context_fn=context_fn)
            return checkpoint(lambda *x: attention(*x, **options), *qkv, **how)

        return hidden(tokens, positions=positions, attention=again)

    model.hidden = checkpointed
    layers = model.config.num_hidden_layers
    for recompute in (False, True):
        calls.clear()
        run = lambda r=recompute: tree_backward(  # noqa: E731
            model, trie, example_loss, max_tokens=10, recompute=r
        )
        assert error(model, run, truth) < 1e-10

        # Each layer's, forward and again: of the whole path, or of three chunks and then of four.
        expected = layers * (3 + 2 * 4) if recompute else layers * 2
        assert len(calls) == (expected if short else 0)

    def one_graph():
        scores = tree_scores(model, trie)
        sum(example_loss(i, *of_one) for i, of_one in enumerate(scores)).backward()

    calls.clear()
    assert error(model, one_graph, truth) < 1e-10
    assert len(calls) == (2 * layers if short else 0)


@pytest.mark.quick
def test_a_path_in_chunks_makes_two_kernel_calls_a_chunk_and_layer(monkeypatch):
    """Where paths are long: a rectangle of the keys above, and a triangle; no mask in either."""
    monkeypatch.setattr(tree, "SHORT", 0)
    calls = {"forward": [], "backward": []}
    for name, function in (("forward", "flash_forward"), ("backward", "flash_backward")):
        real = getattr(tree.ring, function)
        monkeypatch.setattr(
            tree.ring, function, lambda *x, r=real, n=name: calls[n].append(x) or r(*x)
        )
    model = models.tiny_model("qwen3")
    layers = model.config.num_hidden_layers
    path = TokenTrie([np.arange(n) % 11 for n in range(5, 1025, 5)])
    tree_backward(model, path, example_loss, max_tokens=256, recompute=True)

    # Forward: the first chunk has nothing above it. Three chunks run twice, the last one once.
    assert len(calls["forward"]) == layers * (2 * 1 + 2 * 2 * 2 + 2)

    # The backward cuts a triangle of 256 into one of 128, a square and another triangle.
    assert len(calls["backward"]) == layers * (3 + 3 * 4)

"""Which blocks of a tree one forward computes: only children, runs, and what they hold."""

import itertools

import numpy as np
import pytest
import torch
from test_tree import error, gradients, peak, random_forest, see_the_rest_of_their_paths
from test_tree import small_model, stars
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import models
import tree_attention as tree
from tree_attention import TokenTrie, example_loss, plan, tree_backward, tree_scores

SIZES = 1, 2, 3, 7, 13, 40


def held_tokens(blocks):
    """The most tokens of blocks that lie one below the other: whose graphs are held at once."""
    held = []
    for block in blocks:
        above = held[block.parent] if block.parent >= 0 else 0
        held.append(above + len(block.tokens))
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


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(20))
def test_joined_blocks_are_a_cut_of_the_same_tree_that_holds_no_more(seed):
    trie = TokenTrie(random_forest(seed, count=25, longest=14))
    for size in SIZES:
        before = plan(trie, size)
        blocks = tree.join_only_children(before)
        assert sorted(sum((b.tokens.tolist() for b in blocks), [])) == list(range(len(trie)))
        assert held_tokens(blocks) == held_tokens(before)

        # Nobody is an only child any more, and those that were left alone are as they were.
        _, children = tree.children_of_blocks(blocks)
        assert all(len(below) != 1 for below in children)
        whole = {tuple(block.tokens): block for block in blocks}
        for block in before:
            if tuple(block.tokens) in whole:
                assert whole[tuple(block.tokens)].depth == block.depth

        see_the_rest_of_their_paths(trie, blocks)


@pytest.mark.quick
def test_a_path_is_one_call_where_its_graphs_are_kept():
    model = models.tiny_model("qwen3")
    for size in (None, 10, 3):
        options = dict(max_tokens=size)
        calls = calls_of(
            model, lambda o=options: tree_backward(model, chain(), example_loss, **o)
        )
        assert calls == [(40, True)]

    # A scoring pass has no graph: there a block is all that bounds what a call holds.
    with torch.no_grad():
        calls = calls_of(model, lambda: tree_scores(model, chain(), max_tokens=10))
    assert calls == [(10, False)] * 4


@pytest.mark.quick
def test_blocks_without_a_graph_are_one_call_and_no_token_is_forwarded_more_often():
    model = models.tiny_model("qwen3")

    def calls(trie, size):
        options = dict(max_tokens=size, recompute=True)
        return calls_of(model, lambda: tree_backward(model, trie, example_loss, **options))

    # Four blocks: three at once without a graph, then each with its own, from the last one up.
    assert calls(chain(), 10) == [(30, False)] + [(10, True)] * 4

    # Ten blocks: of the nine with others below, four and four and one.
    assert calls(chain(), 4) == [(16, False)] * 2 + [(4, False)] + [(4, True)] * 10
    assert tree.RUN == 4

    # A fork ends no run: it goes on along the branch that the walk comes to first.
    fork = TokenTrie([np.arange(30) % 11, np.append(np.arange(10), [5] * 12)])
    lengths = [len(block.tokens) for block in plan(fork, 10)]
    assert lengths == [10, 10, 10, 10, 2]
    assert calls(fork, 10) == [
        (20, False), (10, True), (10, True),  # the long branch: two of its blocks, its leaf, back
        (10, False), (2, True), (10, True),  # the other branch
        (10, True),  # what both hang from
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3_text"])
def test_runs_change_no_gradient_no_score_and_no_count(kind, monkeypatch):
    """Long paths in small blocks, with a router or with windows, and masks that want few scores."""
    model = models.tiny_model(kind)
    aux = dict(aux_coef=0.3) if kind == "qwen3_moe" else {}
    sequences = [x.tolist() * 2 for x in random_forest(3, count=9, longest=12)]
    trie = TokenTrie(sequences)
    masks = [torch.arange(len(x) - 1) % 3 == 0 for x in sequences]

    def run(**options):
        return tree_backward(model, trie, example_loss, masks=masks, **aux, **options)

    truth, told = gradients(model, run)
    for size in (2, 5):
        options = dict(max_tokens=size, recompute=True)
        runs = tree._Engine(model, trie, max_tokens=size, recompute=True).runs
        assert max(map(len, runs)) == tree.RUN  # there is something to see
        found, result = gradients(model, lambda: run(**options))  # noqa: B023
        assert max(tree.ring.relative(a, b) for a, b in zip(found, truth, strict=True)) < 1e-10
        for a, b in zip(result.logprobs, told.logprobs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)
        assert (result.router_counts or {}).keys() == (told.router_counts or {}).keys()
        for layer, count in (told.router_counts or {}).items():
            assert torch.equal(result.router_counts[layer], count)

    # The check sees a run that goes wrong: without the keys of what is above it.
    put = tree.Stack.put
    monkeypatch.setattr(tree.Stack, "put", lambda self, layer, depth, k, v, piece: put(
        self, layer, depth, k.flip(2), v, piece))  # fmt: skip
    assert error(model, lambda: run(**options), truth) > 1e-3


def test_larger_calls_hold_no_more(monkeypatch):
    """MEMORY: at the peak as many bytes as with a call for each block, on paths and on a star."""
    model = small_model()
    trees = {
        "path": TokenTrie([np.arange(n) % 53 for n in range(60, 481, 60)]),
        "star": stars(range(12)),
    }
    cases = list(itertools.product(trees, (False, True)))
    with_larger = [
        peak(model, trees[name], max_tokens=60, recompute=recompute) for name, recompute in cases
    ]
    monkeypatch.setattr(tree, "join_only_children", lambda blocks: blocks)
    monkeypatch.setattr(tree, "RUN", 1)
    for (name, recompute), larger in zip(cases, with_larger, strict=True):
        single = peak(model, trees[name], max_tokens=60, recompute=recompute)
        assert larger < 1.02 * single, (name, recompute)
    whole = peak(model, trees["path"], max_tokens=480)
    assert whole > 2.5 * peak(model, trees["path"], max_tokens=60, recompute=True)


# Stretches of a path ---------------------------------------------------------------------------


def path_block(dtype=torch.float64):
    """A block of 24 tokens under 40 others, 16 of it for the stack: q, k, v, its masks, a stack."""
    trie = TokenTrie([np.arange(n) % 7 for n in range(8, 89, 8)])
    block = tree.Block(np.arange(40, 64), 16, 0, 40)
    generator = torch.Generator().manual_seed(5)

    def draw(heads, tokens):
        laid = torch.randn(1, tokens, heads, 8, generator=generator, dtype=dtype)
        return laid.transpose(1, 2)

    stack = tree.Stack(56)
    stack.put(0, 0, draw(2, 40), draw(2, 40), 40)
    stack.add(0, 40, draw(2, 12), draw(2, 12))  # blocks below have added for 12 of the 16
    given = [x.requires_grad_() for x in (draw(4, 24), draw(2, 24), draw(2, 24))]
    return given, draw(4, 24), stack, block, tree.block_masks(trie, block, None)


def outcome(function, dtype=torch.float64, spoil=None):
    """Output, gradients, and the gradient on the stack; and which Function it was."""
    given, dout, stack, block, masks = path_block(dtype)
    if spoil is not None:
        spoil(given, dout)
    kernel = tree.ring.Kernel("fused", 0.3)
    chosen = function or tree.which_attention(*given, masks, kernel)
    out = chosen.apply(*given, stack, 0, block, masks, kernel)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in given), stack.grads[0]], chosen


@pytest.mark.quick
@pytest.mark.parametrize("one_square", [1, 512])
def test_a_stretch_of_a_path_is_what_tiles_make_of_it(monkeypatch, one_square):
    """In float64, with and without the backward of its own."""
    monkeypatch.setattr(tree, "ONE_SQUARE", one_square)
    truth, _ = outcome(tree._BlockAttention)
    found, chosen = outcome(None)
    assert chosen is tree._PathAttention
    assert all(tree.ring.relative(a, b) < 1e-13 for a, b in zip(found, truth, strict=True))
    assert not any((x == 0).all() for x in found)

    # Against nothing but the definition: 24 queries at depth 40 see 41 keys, 42, and so on.
    (q, k, v), dout, stack, _, _ = path_block()
    keys = torch.cat([stack.kv[0][0][:, :, :40], k], 2)
    values = torch.cat([stack.kv[0][1][:, :, :40], v], 2)
    visible = torch.ones(24, 64, dtype=torch.bool).tril(40)
    out, _ = tree.ring.definition(q, keys, values, visible[None, None], scale=0.3)
    out.backward(dout)
    assert tree.ring.relative(found[0], out.detach()) < 1e-13
    assert tree.ring.relative(found[1], q.grad) < 1e-12


def keeping_attention():
    """Contexts of a checkpoint that keeps what torch's attention gave, and recomputes the rest."""
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    return create_selective_checkpoint_contexts(kept)


@pytest.mark.quick
@pytest.mark.parametrize("context_fn", [noop_context_fn, keeping_attention])
@pytest.mark.parametrize("in_tiles", ["", "backward", "both"])
def test_checkpoints_around_attention_change_no_gradient(monkeypatch, in_tiles, context_fn):
    """Of stretches of a path by themselves or in tiles, and of chunks."""
    if in_tiles:
        monkeypatch.setattr(tree, "ONE_SQUARE", 1)
    if in_tiles == "both":
        monkeypatch.setattr(tree, "_PathAttention", tree._BlockAttention)
    model = models.tiny_model("qwen3").double()
    sequences = [torch.arange(n) % 11 for n in range(5, 41, 5)]
    trie = TokenTrie(sequences)
    truth, _ = gradients(model, lambda: tree.definition(model, sequences, example_loss))
    chosen, in_chunks = [], []
    which, chunked = tree.which_attention, tree._chunked_attention
    monkeypatch.setattr(tree, "which_attention", lambda *x: chosen.append(which(*x)) or chosen[-1])
    monkeypatch.setattr(tree, "_chunked_attention", lambda *x: in_chunks.append(1) or chunked(*x))
    hidden = model.hidden

    def checkpointed(tokens, /, *, positions=None, attention=None):
        def again(*qkv, **options):
            how = dict(use_reentrant=False, context_fn=context_fn)
            return checkpoint(lambda *x: attention(*x, **options), *qkv, **how)

        return hidden(tokens, positions=positions, attention=again)

    model.hidden = checkpointed
    for recompute in (False, True):
        run = lambda r=recompute: tree_backward(  # noqa: E731
            model, trie, example_loss, max_tokens=10, recompute=r
        )
        assert error(model, run, truth) < 1e-10
        assert set(chosen) == {tree._PathAttention}

    def one_graph():
        scores = tree_scores(model, trie)
        sum(example_loss(i, *of_one) for i, of_one in enumerate(scores)).backward()

    assert error(model, one_graph, truth) < 1e-10
    assert len(in_chunks) == 2 * model.config.num_hidden_layers  # each layer's, forward and again


@pytest.mark.quick
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e300])
def test_a_token_that_is_not_finite_reaches_no_token_above_it(bad):
    """As with tiles: in a key, in a value, or in the gradient that arrives."""
    clean, _ = outcome(None)
    for x in (1, 2):
        found, chosen = outcome(None, spoil=lambda given, _, x=x: given[x].data[0, :, 9].fill_(bad))
        assert chosen is tree._BlockAttention
        assert tree.ring.relative(found[0][:, :, :9], clean[0][:, :, :9]) < 1e-12

    # What arrives for token 9 goes to the keys that it sees, 0 to 9 of the block.
    found, chosen = outcome(None, spoil=lambda _, dout: dout[0, :, 9].fill_(bad))
    assert chosen is tree._PathAttention
    for x in (2, 3):
        assert tree.ring.relative(found[x][:, :, 16:], clean[x][:, :, 16:]) < 1e-12


@pytest.mark.quick
def test_other_blocks_and_dtypes_are_left_to_tiles():
    def chosen(given=None, window=None, backend="fused", tokens=None):
        block = tree.Block(np.arange(8, 16) if tokens is None else np.array(tokens), 0, -1, 8)
        trie = TokenTrie([list(range(16)), [*range(12), 20]])
        masks = tree.block_masks(trie, block, window)
        given = given or [torch.randn(1, 2, 8, 4) for _ in range(3)]
        return tree.which_attention(*given, masks, tree.ring.Kernel(backend, 1.0))

    assert chosen() is tree._PathAttention
    x = torch.randn(1, 2, 8, 4)
    tiles = [
        chosen(window=4),
        chosen(backend="math"),  # a softcap
        chosen(tokens=[8, 9, 10, 11, 12, 16]),  # a branch hangs beside it
        chosen([x.bfloat16()] * 3),
        chosen([x.half()] * 3),
        chosen([x, x.double(), x]),
        chosen([x, x, torch.randn(1, 2, 4, 8).mT]),
    ]
    assert tiles == [tree._BlockAttention] * len(tiles)


@pytest.mark.quick
def test_a_path_in_blocks_makes_two_kernel_calls_a_block_and_layer(monkeypatch):
    calls = {"forward": [], "backward": []}
    for name, function in (("forward", "fused_tile_forward"), ("backward", "fused_tile_backward")):
        real = getattr(tree.ring, function)
        monkeypatch.setattr(
            tree.ring, function, lambda *x, r=real, n=name: calls[n].append(1) or r(*x)
        )
    model = models.tiny_model("qwen3")
    layers = model.config.num_hidden_layers
    tree_backward(model, chain(), example_loss, max_tokens=10, recompute=True)

    # Forward: the run and the first block have nothing above them, three blocks have.
    assert len(calls["forward"]) == layers * (1 + 1 + 2 * 3)
    assert len(calls["backward"]) == layers * (1 + 2 * 3)

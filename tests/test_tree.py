"""tree_attention.py on one process: the tree, its attention, the walk, the partition."""

import copy
import gc
import itertools
import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from conftest import shortened
from measure_memory import LiveBytes, predict_memory
from measure_tree import draw, modeled_time
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import models
import tree_attention as tree
from ring_attention import relative
from tree_attention import (
    Cost,
    NonFiniteLoss,
    TinyModel,
    TokenTrie,
    definition,
    example_loss,
    forests,
    partition,
    partition_tree,
    tree_backward,
    tree_logprobs,
    tree_scores,
)


def tensors(sequences):
    return [torch.tensor(x) for x in sequences]


def random_forest(seed, count=12, longest=9, letters=2):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest + 1, count)
    return tensors([rng.integers(0, letters, n).tolist() for n in sizes])


def gradients(model, run):
    """.grad of every parameter after run(), from none; and what run() returned."""
    model.zero_grad()
    result = run()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return grads, result


def error(model, run, truth):
    return max(relative(a, b) for a, b in zip(gradients(model, run)[0], truth, strict=True))


def with_values(model):
    """Return a critic as `definition` wants it: its .logprobs returns the values too."""
    wrapped = types.SimpleNamespace(hidden=model.hidden, parameters=model.parameters)
    wrapped.logprobs = lambda states_nM, *given, **options: (
        *model.logprobs(states_nM, *given, **options), model.values(states_nM)
    )  # fmt: skip
    return wrapped


def linear_loss(i, logprobs, entropy):
    """A loss whose gradient is a fixed weight of each token of each sequence, and no entropy."""
    return (torch.cos(torch.arange(len(logprobs)) * 1.0 + i).to(logprobs) * logprobs).sum()


# The tree --------------------------------------------------------------------------------------


def brute_force(sequences):
    """Every distinct prefix in DFS preorder, of a fork's branches the largest one first."""
    nodes = sorted({tuple(x.tolist()[:n]) for x in sequences for n in range(1, len(x) + 1)})

    def size(node):
        return sum(other[: len(node)] == node for other in nodes)

    def walk(node):
        branches = [other for other in nodes if other[:-1] == node]
        below = [walk(branch) for branch in sorted(branches, key=size, reverse=True)]
        return sum(below, [node] if node else [])

    return walk(())


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(30))
def test_the_trie_is_the_set_of_prefixes(seed):
    sequences = random_forest(seed, letters=1 + seed % 4)
    trie, nodes = TokenTrie(sequences), brute_force(sequences)
    assert trie.tokens.tolist() == [node[-1] for node in nodes]
    assert trie.positions.tolist() == [len(node) - 1 for node in nodes]
    index = {node: i for i, node in enumerate(nodes)}
    assert trie.parent.tolist() == [index.get(node[:-1], -1) for node in nodes]
    below = [[m for m in nodes if m[: len(node)] == node] for node in nodes]
    assert trie.subtree_end.tolist() == [index[some[-1]] + 1 for some in below]
    for i, x in enumerate(sequences):
        assert torch.equal(trie.tokens[trie.path(i)], x)
        assert trie.ends[i] == trie.path(i)[-1]


@pytest.mark.quick
def test_the_mask_is_ancestors_and_the_window_is_in_depth():
    sequences = random_forest(5)
    trie, nodes = TokenTrie(sequences), brute_force(sequences)
    sees = torch.tensor([[q[: len(k)] == k for k in nodes] for q in nodes])
    near = trie.positions[:, None] - trie.positions < 3
    assert torch.equal(trie.mask().dense()[0, 0], sees)
    assert torch.equal(trie.mask(3).dense()[0, 0], sees & near)


@pytest.mark.quick
def test_stats_count_tokens_and_pairs():
    sequences = tensors([[5, 6, 7], [5, 6, 8], [5, 9]])
    stats = TokenTrie(sequences).stats(10.0, 1.0)
    assert stats[:4] == (8, 5, 15, 11)
    assert stats.token_bound == 8 / 5
    assert stats.flop_bound == (80 + 15) / (50 + 11)
    assert TokenTrie(sequences).stats().flop_bound is None
    assert TokenTrie([]).stats().token_bound == 1.0


@pytest.mark.quick
def test_a_drawing_shows_segments_and_ends():
    drawn = draw(TokenTrie(tensors([[5, 6, 7], [5, 6, 8], [5, 9], [5, 6]])))
    assert drawn == (
        "+- 5\n|  +- 6   ends: [3] at 1\n|  |  +- 7   ends: [0] at 1\n"
        "|  |  +- 8   ends: [1] at 1\n|  +- 9   ends: [2] at 1"
    )
    star = TokenTrie(tensors([[k] for k in range(99)]))
    assert len(draw(star, most=10).splitlines()) == 11


@pytest.mark.quick
def test_order_of_the_input_changes_nothing_and_the_input_is_not_changed():
    sequences = random_forest(3)
    kept, order = [x.clone() for x in sequences], torch.randperm(len(sequences)).tolist()
    a, b = TokenTrie(sequences), TokenTrie([sequences[i] for i in order])
    for name in ("tokens", "positions", "subtree_end", "parent"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    model = TinyModel()
    first, _ = gradients(model, lambda: tree_backward(model, a, linear_loss, max_tokens=4))
    second, result = gradients(
        model,
        lambda: tree_backward(model, b, lambda k, *x: linear_loss(order[k], *x), max_tokens=4),
    )
    assert max(relative(x, y) for x, y in zip(first, second, strict=True)) < 1e-14
    assert [len(x) for x in result.logprobs] == [len(sequences[i]) - 1 for i in order]
    assert all(torch.equal(x, y) for x, y in zip(sequences, kept, strict=True))


def nested_forks(n):
    return [np.append(np.zeros(k, int), 1) for k in range(1, n + 1)]


@pytest.mark.quick
def test_thousands_of_forks_and_leaves_need_no_recursion():
    star = [np.append(np.arange(200), [k, 7]) for k in range(2000)]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        for sequences, tokens in ((nested_forks(3000), 6000), (star, 200 + 4000)):
            trie = TokenTrie(sequences)
            assert len(trie) == tokens
            chunks = partition_tree(trie, 64)
            assert chunks[0].start == 0 and chunks[-1].stop == tokens
            assert max(chunk.stop - chunk.start for chunk in chunks) <= 64
            assert sorted(sum(partition(sequences, 8), [])) == list(range(len(sequences)))
            draw(trie)
    finally:
        sys.setrecursionlimit(limit)


def test_deeply_nested_forks_have_the_gradient_of_the_definition():
    model, stem = TinyModel(), np.random.default_rng(0).integers(0, 10, 150).tolist()
    sequences = tensors(stem[:n] + [10, n % 10] for n in range(2, 150, 10))
    truth, _ = gradients(model, lambda: definition(model, sequences, example_loss))
    for size in (1, 16):
        trie = TokenTrie(sequences)
        run = lambda: tree_backward(model, trie, example_loss, max_tokens=size)  # noqa: E731
        assert error(model, run, truth) < 1e-10


# Attention -------------------------------------------------------------------------------------


MORE_SEEDS = [
    pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (2, 0), (0, 48))
]


@pytest.mark.parametrize("window", [None, 2, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("seed, short", [(0, 0), (1, 48), *MORE_SEEDS])
def test_tree_attention_is_dense_attention_over_ancestors(
    monkeypatch, seed, short, window, softcap
):
    monkeypatch.setattr(tree, "SHORT", short)  # 0: in boxes; 48: in groups
    sequences = random_forest(seed, count=40, longest=30)
    trie, nodes = TokenTrie(sequences), brute_force(sequences)
    sees = torch.tensor([[q[: len(k)] == k for k in nodes] for q in nodes])
    if window is not None:
        sees &= trie.positions[:, None] - trie.positions < window
    gen = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(1, h, len(trie), 8, generator=gen, dtype=torch.float64, requires_grad=True)
        for h in (4, 2, 2, 4)
    )
    out = tree.tree_attention(q, k, v, trie, scale=0.4, window=window, softcap=softcap)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * 0.4
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    truth = scores.masked_fill(~sees, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    found, true = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, truth))
    assert relative(out, truth) < 1e-14
    assert max(relative(a, b) for a, b in zip(found, true, strict=True)) < 1e-13
    assert relative(torch.zeros_like(found[1]), true[1]) > 1 - 1e-12  # 0 would not pass


@pytest.mark.parametrize("short", [0, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tree_attention_in_low_precision_is_within_twice_plain_torch(monkeypatch, dtype, short):
    monkeypatch.setattr(tree, "SHORT", short)
    trie = TokenTrie(random_forest(1, count=40, longest=30))
    gen = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 4, len(trie), 16, generator=gen).to(dtype) for _ in range(4)]
    mask = trie.mask().dense()

    def run(attention, *given):
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]

    truth = run(lambda *x: scaled_dot_product_attention(*x, mask), *(x.double() for x in drawn))
    plain = run(lambda *x: scaled_dot_product_attention(*x, mask), *drawn)
    ours = run(lambda *x: tree.tree_attention(*x, trie), *drawn)
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert relative(a, c) <= 2 * relative(b, c) + 1e-9


@pytest.mark.parametrize("short", [0, 48])
def test_a_huge_token_reaches_its_own_paths_only(monkeypatch, short):
    monkeypatch.setattr(tree, "SHORT", short)
    trie = TokenTrie([[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8]])
    gen = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, len(trie), 8, generator=gen)
    clean = tree.tree_attention(q, k, v, trie)
    spoilt = int(trie.path(1)[2])  # token 5: itself and 6 see it
    for x in (k, v):
        x[0, :, spoilt] = 1e30
    found = tree.tree_attention(q, k, v, trie)
    sees = trie.mask().dense()[0, 0, :, spoilt]
    assert sees.sum() == 2 and not torch.allclose(found[:, :, sees], clean[:, :, sees])
    assert relative(found[:, :, ~sees], clean[:, :, ~sees]) < 1e-6


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("short", [0, 48])
def test_a_huge_gradient_reaches_its_own_path_only(monkeypatch, short, window):
    monkeypatch.setattr(tree, "SHORT", short)
    trie = TokenTrie([[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8]])
    gen = torch.Generator().manual_seed(0)
    draw = [torch.randn(1, heads, len(trie), 8, generator=gen) for heads in (4, 2, 2, 4)]
    dout = draw.pop()

    def run(dout):
        leaves = [x.clone().requires_grad_() for x in draw]
        out = tree.tree_attention(*leaves, trie, window=window)
        return torch.autograd.grad(out, leaves, dout)

    clean = run(dout)
    spoilt = int(trie.path(1)[2])  # token 5 sees 1, 2 and itself
    dout[0, :, spoilt] = 1e30
    found = run(dout)

    # Its own query, and the keys and values that it sees; of the rest nothing changes.
    own = torch.arange(len(trie)) == spoilt
    seen = trie.mask(window).dense()[0, 0, spoilt]
    assert seen.sum() == (window or 3)
    for new, old, reached in zip(found, clean, (own, seen, seen), strict=True):
        assert not torch.allclose(new[:, :, reached], old[:, :, reached])
        assert relative(new[:, :, ~reached], old[:, :, ~reached]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_hold_what_torchs_attention_holds_and_nothing_more(dtype):
    """Bytes that a backward waits with."""
    trie = TokenTrie(random_forest(1, count=40, longest=30))
    assert len(trie) % tree.WIDTH  # a group is filled up, so queries are a copy
    given = [torch.randn(1, h, len(trie), 8).to(dtype).requires_grad_() for h in (4, 2, 2)]
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = tree.tree_attention(*given, trie)
    assert type(out.grad_fn).__name__ != "_AttendBackward"

    # In float32: q, out, lse of each query, k and v of each group, the bias; and which keys, twice.
    keys_UY, bias_U1WY = tree.groups_of_tokens(trie.stretch(), None, torch.float32)
    queries = len(keys_UY) * tree.WIDTH
    most = 4 * queries * 4 * (8 + 8 + 1) + 2 * 4 * keys_UY.numel() * 2 * 8
    most += bias_U1WY.nbytes + 2 * keys_UY.nbytes
    assert 0.5 * most < sum(storages.values()) <= most


def test_groups_and_what_they_see_are_found_once_for_all_layers(monkeypatch):
    names = "groups_of_tokens", "grouped_attention"
    model, trie = models.tiny_model("qwen3", num_hidden_layers=3), TokenTrie([[1, 2], [1, 3]])
    made = []
    for name in names:
        function = getattr(tree, name)

        def counted(*given, function=function, name=name):
            made.append(name)
            return function(*given)

        monkeypatch.setattr(tree, name, counted)
    sum(scores[0].sum() for scores in tree.tree_scores(model, trie)).backward()
    assert [made.count(name) for name in names] == [1, 3]
    monkeypatch.setattr(tree, "SHORT", 1)  # paths of 2 tokens are long now
    tree.tree_scores(model, trie)
    assert made.count("grouped_attention") == 3


@pytest.mark.quick
@pytest.mark.parametrize("short", [0, 128])
def test_inputs_are_checked_where_paths_are_short_too(monkeypatch, short):
    """Of batches, dtypes, lengths and options tree_attention says what `attend` says."""
    monkeypatch.setattr(tree, "SHORT", short)
    trie = TokenTrie([[1, 2, 3], [1, 2, 4], [5]])
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    out = tree.tree_attention(q, k, v, trie)
    assert out.shape == q.shape
    assert relative(out, tree.ring.attend(q, k, v, trie.mask())[0]) < 1e-6

    one = q[:1], k[:1], v[:1]
    longer = torch.randn(1, 4, 6, 8)
    wrong = [
        ((one[0], one[1].double(), one[2]), {}, "in one dtype"),
        ((one[0], longer, longer), {}, "expected a mask of .5, 6. queries and keys, got .5, 5."),
        ((one[0], one[1][:, :3], one[2][:, :3]), {}, "multiple of key heads"),
        ((one[0][0], one[1][0], one[2][0]), {}, "expected q .B, H, q, D."),
        (one, dict(scale=-1), "positive number or None as scale, got -1"),
        (one, dict(window=0), "at least 1 as a window, got 0"),
        (one, dict(softcap=-2.0), "positive number or None as softcap"),
        (one, dict(backend="flash"), "as backend, got 'flash'"),
    ]
    for given, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            tree.tree_attention(*given, trie, **options)


def test_every_pair_of_a_token_and_an_ancestor_is_computed_once():
    trie = TokenTrie(random_forest(2, count=60, longest=40))
    dense, times = trie.mask().dense()[0, 0], torch.zeros(len(trie), len(trie), dtype=int)
    mask = trie.mask()
    for box in tree.ring.boxes(mask, tree.ring.TILES["cpu forward"]):
        times[box.rows, box.keys] += 1
    assert (times[dense] == 1).all() and times.max() == 1
    assert dense.sum() == trie.stats().tree_pairs


# Chunks ----------------------------------------------------------------------------------------

SIZES = 1, 2, 3, 7, 13, 40


def hang_right(trie, chunks):
    """Chunks are the preorder, cut; each sees its ancestors in itself and on the path above it."""
    assert [chunk.stop for chunk in chunks] == [*(chunk.start for chunk in chunks[1:]), len(trie)]
    assert chunks[0].start == 0 and all(chunk.start < chunk.stop for chunk in chunks)
    parent = trie.parent.tolist()
    chunk_of = [b for b, chunk in enumerate(chunks) for _ in range(chunk.start, chunk.stop)]
    for b, chunk in enumerate(chunks):
        # The path above the first token, token by token from the parents.
        path, at = [], parent[chunk.start]
        while at >= 0:
            path, at = [at, *path], parent[at]
        assert chunk.parent == (chunk_of[path[-1]] if path else -1) < b
        assert trie.positions[path].tolist() == list(range(len(path)))
        stretch = tree.Stretch(trie, chunk.start, chunk.stop)
        assert stretch.above.tolist() == path

        # The chunks above are on that path, and `open_rows` of one are its tokens on the path.
        for token in range(chunk.start, chunk.stop):
            own = set(path) | set(range(chunk.start, token))
            assert parent[token] in own or parent[token] == -1 == (path or [-1])[-1]


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(20))
def test_chunks_hold_each_token_once_and_see_the_rest_of_their_paths_above(seed):
    trie = TokenTrie(random_forest(seed, count=25, longest=14))
    for size in SIZES:
        chunks = partition_tree(trie, size)
        assert all(chunk.stop - chunk.start <= size for chunk in chunks)
        hang_right(trie, chunks)


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(20))
def test_open_rows_of_the_chunks_above_are_the_path(seed):
    model = TinyModel()
    trie = TokenTrie(random_forest(seed, count=25, longest=14))
    for size in SIZES:
        walk = tree._TreeWalk(model, trie, max_tokens=size)
        waiting = []
        for b, chunk in enumerate(walk.chunks):
            while waiting and waiting[-1][0] != chunk.parent:
                waiting.pop()
            path = []
            for a, count in walk.path_above(b, waiting):
                above = torch.arange(walk.chunks[a].start, walk.chunks[a].stop)
                path += above[walk.open_rows(walk.chunks[a])][:count].tolist()
            assert path == tree.Stretch(trie, chunk.start, chunk.stop).above.tolist()
            waiting.append((b, None))


@pytest.mark.quick
def test_sibling_subtrees_are_packed_together():
    star = TokenTrie([[1] * 10 + [k] * 5 for k in range(8)])
    lengths = lambda size: [x.stop - x.start for x in partition_tree(star, size)]  # noqa: E731
    assert lengths(20) == [20, 20, 10]
    assert lengths(None) == [50]
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"expected max_tokens of 1 or more.*got {wrong}"):
            partition_tree(star, wrong)
    assert len(partition_tree(star, np.int64(20))) == 3


@pytest.mark.quick
def test_a_path_runs_past_forks_while_what_is_below_it_fits():
    """A spine with a small branch every 8 tokens: chunks are full, and no fork ends a path."""
    spine = np.arange(128)
    trie = TokenTrie([np.append(spine[:k], np.full(4, 500 + k)) for k in range(8, 129, 8)])
    depths_of = lambda chunks: trie.positions[[x.start for x in chunks]].tolist()  # noqa: E731
    chunks = partition_tree(trie, 48)
    assert len(trie) == 192 and [x.stop - x.start for x in chunks] == [48] * 4

    # Twelve branches of three chunks' forks are one more chunk, below the last fork of them all.
    assert [x.parent for x in chunks] == [-1, 0, 1, 1] and depths_of(chunks) == [0, 48, 96, 96]

    # Other branches that fill the chunk end a path too: none of the largest branch would fit.
    trie = TokenTrie([[1, 2, 3] + [4] * 10, [1, 2, 3, 5, 5]])
    assert [x.stop - x.start for x in partition_tree(trie, 5)] == [3, 5, 5, 2]
    assert [x.stop - x.start for x in partition_tree(trie, 6)] == [6, 6, 3]

    # A branch that does not fit next to the path ends it, and gets a chunk of its own.
    trie = TokenTrie([spine, np.append(spine[:40], np.full(20, 500))])
    chunks = partition_tree(trie, 48)
    assert [x.stop - x.start for x in chunks] == [40, 48, 40, 20]
    assert [x.parent for x in chunks] == [-1, 0, 1, 0] and depths_of(chunks) == [0, 40, 88, 40]


# The walk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.quick)])
@pytest.mark.parametrize("name", forests())
def test_gradients_are_those_of_every_sequence_by_itself(name, recompute):
    model, sequences = TinyModel(), tensors(forests()[name])
    run = lambda: definition(model, sequences, example_loss, temperature=0.7)  # noqa: E731
    truth, (loss, logprobs) = gradients(model, run)
    for size in (2, 5) if recompute else (None, 3):
        options = dict(max_tokens=size, recompute=recompute, temperature=0.7)
        trie = TokenTrie(sequences)
        found, result = gradients(
            model, lambda o=options, t=trie: tree_backward(model, t, example_loss, **o)
        )
        assert relative(result.loss, torch.as_tensor(loss)) < 1e-12
        for a, b in zip(result.logprobs, logprobs, strict=True):
            assert relative(a, b) < 1e-12
        assert max(relative(a, b) for a, b in zip(found, truth, strict=True)) < 1e-10
    if name != "one token":
        assert all(relative(torch.zeros_like(x), x) == 1 for x in truth)  # zeros would not pass


CHUNKS = [*itertools.product((None, 1, 2, 3, 7), (False, True))]  # tokens a chunk, recomputation
# TinyModel has all of these sizes in test_gradients_are_those_of_every_sequence_by_itself.
FEW = [(None, True), (3, False), (7, True)]


@pytest.mark.parametrize(
    "chunks", [FEW, pytest.param(CHUNKS, marks=pytest.mark.slow)], ids=["few", "every"]
)
@pytest.mark.parametrize("critic", shortened([False, True], True))  # with values beside the rest
@pytest.mark.parametrize("kind", models.TINY)
def test_every_family_of_models_has_the_gradients_of_the_flat_batch(kind, critic, chunks):
    model = models.tiny_model(kind)
    if critic:
        nn.init.normal_(model.add_value_head().score.weight)
    alone = with_values(model) if critic else model
    for name in ("prefixes", "binary", "forest"):
        sequences = tensors(forests()[name])
        truth, _ = gradients(model, lambda s=sequences: definition(alone, s, example_loss))
        for size, recompute in chunks:
            run = lambda: tree_backward(  # noqa: E731
                model,
                TokenTrie(sequences),
                example_loss,
                max_tokens=size,
                recompute=recompute,
            )
            assert error(model, run, truth) < 1e-10


@pytest.mark.parametrize("kind", models.TINY)
def test_one_graph_of_the_packed_tree_is_the_flat_batch(kind):
    model, sequences = models.tiny_model(kind), tensors(forests()["forest"])
    truth, (_, logprobs) = gradients(
        model, lambda: definition(model, sequences, example_loss, temperature=0.8)
    )
    trie = TokenTrie(sequences)
    for a, b in zip(tree_logprobs(model, trie, temperature=0.8), logprobs, strict=True):
        assert relative(a, b) < 1e-12

    def run():
        scores = tree_scores(model, trie, temperature=0.8)
        sum(example_loss(i, *score) for i, score in enumerate(scores)).backward()

    assert error(model, run, truth) < 1e-10


def test_forward_passes_by_chunks_are_the_packed_ones_and_hold_no_gradient():
    model, sequences = models.tiny_model("gemma3_text"), tensors(forests()["forest"])
    trie = TokenTrie(sequences)
    with torch.no_grad():
        whole = tree_scores(model, trie)
        for size in (1, 2, 7):
            for a, b in zip(tree_scores(model, trie, max_tokens=size), whole, strict=True):
                assert all(relative(x, y) < 1e-12 for x, y in zip(a, b, strict=True))

    # A walk without a loss records no graph, and keeps the keys of one path at a time.
    walk = tree._TreeWalk(model, trie, max_tokens=2)
    record, kept = walk.record, []

    def recorded(forward):
        tensors = [*forward.scores, forward.hidden_1nM, *sum(forward.own_kv.values(), ())]
        assert not any(x.requires_grad for x in tensors)
        kept.append(len(walk.kv))
        record(forward)

    walk.record = recorded
    walk.run()
    assert not walk.kv and 0 < max(kept) <= int(trie.lengths.max())
    assert walk.dscores_CN is None
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="call tree_scores under torch.no_grad"):
        tree_logprobs(model, trie, max_tokens=2)


def test_each_token_is_forwarded_once_and_inner_chunks_twice_with_recomputation():
    model, trie = TinyModel(), TokenTrie(forests()["forest"])
    for size in (None, 2, 5):
        chunks = partition_tree(trie, size)
        above = [chunks[b] for b in {chunk.parent for chunk in chunks} - {-1}]
        inner = sum(chunk.stop - chunk.start for chunk in above)
        for recompute in (False, True):
            model.forwarded = 0
            tree_backward(model, trie, example_loss, max_tokens=size, recompute=recompute)
            assert model.forwarded == len(trie) + recompute * inner


@pytest.mark.quick
@pytest.mark.parametrize("size", [None, 4])
def test_masks_score_what_a_loss_uses_and_nothing_else(size):
    model, sequences, rng = models.tiny_model("qwen3"), random_forest(3), np.random.default_rng(0)
    masks, trie = [rng.random(len(x) - 1) < 0.4 for x in sequences], TokenTrie(sequences)

    def loss_fn(i, *scores):
        return linear_loss(i, *(torch.where(torch.from_numpy(masks[i]), x, 0.0) for x in scores))

    options = dict(max_tokens=size)
    truth, _ = gradients(model, lambda: tree_backward(model, trie, loss_fn, **options))
    scored, plain = [], model.logprobs
    model.logprobs = lambda x_nM, *rest, **more: (
        scored.append(len(x_nM)) or plain(x_nM, *rest, **more)
    )
    options["masks"] = masks
    run, found = gradients(model, lambda: tree_backward(model, trie, loss_fn, **options))
    worst = max((a - b).abs().max().item() for a, b in zip(run, truth, strict=True))
    wanted = {int(n) for i, m in enumerate(masks) for n in trie.path(i)[1:][torch.from_numpy(m)]}
    assert sum(scored) == len(wanted) < len(trie) and worst < 1e-12
    with torch.no_grad():
        given = tree_logprobs(model, trie, **options), tree_logprobs(model, trie)
    for mask, few, every in zip(masks, *given, strict=True):
        assert (few - every)[torch.from_numpy(mask)].abs().sum() < 1e-10
        assert len(few) == len(mask)


@pytest.mark.quick
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_chunk_that_no_mask_wants_passes_on_the_gradient_from_below(size, recompute):
    stem = [1, 2, 3, 4, 5, 6]
    sequences = tensors([stem + [7, 8], stem + [8, 9, 1], stem[:3] + [9, 9, 9, 2], [3, 3]])
    masks = [np.arange(len(x) - 1) >= k for x, k in zip(sequences, (5, 5, 2, 1), strict=True)]
    model, trie = TinyModel(), TokenTrie(sequences)

    def loss_fn(i, logprobs, entropy):
        return (logprobs * torch.from_numpy(masks[i])).sum() * (i + 1)

    truth, _ = gradients(model, lambda: tree_backward(model, trie, loss_fn))
    options = dict(max_tokens=size, recompute=recompute, masks=masks)
    found, _ = gradients(model, lambda: tree_backward(model, trie, loss_fn, **options))
    assert max(relative(a, b) for a, b in zip(found, truth, strict=True)) < 1e-13


@pytest.mark.quick
def test_masks_that_do_not_fit_are_refused():
    model, trie = TinyModel(), TokenTrie([[1, 2, 3], [1, 4]])
    with pytest.raises(ValueError, match="got 1 masks for 2 sequences"):
        tree_logprobs(model, trie, masks=[[True, True]])
    with pytest.raises(ValueError, match=r"mask 1: expected shape \(1,\), got \(2,\)"):
        tree_logprobs(model, trie, masks=[[True, True], [True, False]])


def test_a_kernel_that_is_asked_for_is_taken(monkeypatch):
    trie, calls = TokenTrie(random_forest(0)), []
    monkeypatch.setattr(tree, "grouped_attention", lambda *given: calls.append(given))
    q, k, v = torch.randn(3, 1, 2, len(trie), 8)
    tree.tree_attention(q, k, v, trie, backend="math")
    tree.tree_attention(q, k, v, trie, backend="fused")
    assert not calls
    tree.tree_attention(q, k, v, trie)
    assert len(calls) == 1


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("critic", [False, True])
def test_a_loss_of_all_sequences_of_a_chunk_is_the_sum_of_theirs(critic, size):
    model, sequences = models.tiny_model("qwen3"), random_forest(5) + tensors([[0], [1, 1, 1]] * 2)
    model = model.add_value_head() if critic else model
    trie, calls = TokenTrie(sequences), []

    def together(some, *scores):
        calls.extend(some)
        lengths = [len(sequences[i]) - 1 for i in some]
        assert all((x[n:] == 0).all() for y in scores for x, n in zip(y, lengths, strict=True))
        parts = zip(*([x[:n] for x, n in zip(y, lengths, strict=True)] for y in scores))
        return sum(example_loss(i, *part) for i, part in zip(some, parts, strict=True))

    options = dict(max_tokens=size, temperature=0.7)
    truth, alone = gradients(model, lambda: tree_backward(model, trie, example_loss, **options))
    run, result = gradients(
        model, lambda: tree_backward(model, trie, together, batched=True, **options)
    )
    assert sorted(calls) == list(range(len(sequences)))
    assert abs(result.loss - alone.loss) < 1e-12 * abs(alone.loss)
    assert max((a - b).abs().max().item() for a, b in zip(run, truth, strict=True)) < 1e-13
    with pytest.raises(NonFiniteLoss, match="loss of sequences"):
        wrong = dict(options, batched=True)
        tree_backward(model, trie, lambda some, lp, *rest: lp.sum() * math.nan, **wrong)


def test_padded_scores_are_the_lists_of_scores():
    model, sequences = models.tiny_model("qwen3"), random_forest(5) + tensors([[0]])
    trie = TokenTrie(sequences)
    lists, padded = tree_scores(model, trie), tree_scores(model, trie, padded=True)
    for rows, few in zip(lists, zip(*padded, strict=True), strict=True):
        for row, x in zip(rows, few, strict=True):
            assert torch.equal(x[: len(row)], row) and (x[len(row) :] == 0).all()


def test_nan_goes_on_into_the_gradient_where_nobody_may_stop():
    model, trie = models.tiny_model("qwen3"), TokenTrie(random_forest(5))

    def loss_fn(i, logprobs, entropy):
        return logprobs.sum() * (math.nan if i == 3 else 1.0)

    grads, _ = gradients(model, lambda: tree_backward(model, trie, loss_fn, check_finite=False))
    assert not all(grad.isfinite().all() for grad in grads)


def test_the_loss_is_called_once_for_each_sequence_with_its_own_vectors():
    sequences, seen = tensors([[3, 1, 2], [3], [3, 1, 2], [3, 1]]), {}

    def loss_fn(i, logprobs, entropy):
        assert i not in seen
        seen[i] = len(logprobs), len(entropy), logprobs.requires_grad
        return torch.tensor(float(i))  # no gradient is fine

    model = TinyModel()
    for size in (None, 1):
        seen.clear()
        result = tree_backward(model, TokenTrie(sequences), loss_fn, max_tokens=size)
        assert seen == {0: (2, 2, True), 1: (0, 0, True), 2: (2, 2, True), 3: (1, 1, True)}
        assert result.loss == 6
    assert tree_backward(model, TokenTrie(sequences), lambda i, *x: 1.5).loss == 6


def test_two_calls_accumulate_like_one():
    model, sequences = TinyModel(), random_forest(4)
    whole, _ = gradients(model, lambda: tree_backward(model, TokenTrie(sequences), linear_loss))

    def run():
        for first in (0, 5):
            some = TokenTrie(sequences[first : first + (5 if not first else 99)])
            tree_backward(model, some, lambda i, *x: linear_loss(i + first, *x), max_tokens=3)

    assert error(model, run, whole) < 1e-13


def failing_losses():
    def raises(i, logprobs, entropy):
        if i == 7:
            raise KeyError("from loss_fn")
        return linear_loss(i, logprobs, entropy)

    def nan(i, logprobs, entropy):
        return linear_loss(i, logprobs, entropy) * (math.nan if i == 7 else 1.0)

    def nan_gradient(i, logprobs, entropy):
        zero = (logprobs - logprobs.detach()).sum()
        return linear_loss(i, logprobs, entropy) + (zero.square().sqrt() if i == 7 else 0.0)

    def vector(i, logprobs, entropy):
        return logprobs if i == 7 else linear_loss(i, logprobs, entropy)

    return {
        "raises": (raises, KeyError, "from loss_fn"),
        "nan": (nan, NonFiniteLoss, "the loss of sequence 7 is nan"),
        "nan gradient": (
            nan_gradient,
            NonFiniteLoss,
            "sequence 7 is .*, its gradient is not finite",
        ),
        "vector": (vector, ValueError, "expected one number from loss_fn.*sequence 7"),
    }


@pytest.mark.parametrize("size", shortened([None, 4], 4))
@pytest.mark.parametrize("name", failing_losses())
def test_a_failure_in_the_middle_leaves_nothing_behind(name, size):
    loss_fn, kind, message = failing_losses()[name]
    model, trie = TinyModel(), TokenTrie(random_forest(1, count=14))
    truth, _ = gradients(model, lambda: tree_backward(model, trie, linear_loss, max_tokens=size))
    before = [torch.ones_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), before, strict=True):
        p.grad = grad
    with pytest.raises(kind, match=message):
        tree_backward(model, trie, loss_fn, max_tokens=size)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert p.grad is grad and (grad == 1).all()
    assert (
        error(model, lambda: tree_backward(model, trie, linear_loss, max_tokens=size), truth) == 0
    )


def test_an_entropy_that_no_loss_uses_costs_no_second_head():
    """The head's backward gets None for it, which a zero gradient would not be."""
    model, trie, got = TinyModel(), TokenTrie(random_forest(0)), []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.set_materialize_grads(False)
            return x.clone(), y.clone()

        @staticmethod
        def backward(ctx, dx, dy):
            got.append(dy is None)
            return dx, dy

    real = model.logprobs
    model.logprobs = lambda *x, **options: Spy.apply(*real(*x, **options))
    tree_backward(model, trie, linear_loss, max_tokens=4)
    assert got and all(got)
    got.clear()
    tree_backward(model, trie, example_loss)
    assert got == [False]


def test_the_loss_is_summed_in_the_models_precision():
    model, trie = TinyModel(), TokenTrie([[k] for k in range(10)] * 12 + [[0]])
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        result = tree_backward(model, trie, lambda i, *x, d=dtype: torch.tensor(6e4).to(d))
        assert result.loss == 121 * torch.tensor(6e4).to(dtype).double()


def test_a_frozen_router_has_no_gradient_but_its_loss_is_told():
    model, trie = models.tiny_model("qwen3_moe"), TokenTrie(forests()["forest"])
    told = tree_backward(model, trie, example_loss, aux_coef=0.1).aux_loss
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("lm_head"))
    found = tree_backward(model, trie, example_loss, aux_coef=0.1, max_tokens=3).aux_loss
    assert abs(found - told) < 1e-12


def test_frozen_parameters_and_no_grad_outside():
    model, sequences = models.tiny_model("qwen3"), tensors(forests()["forest"])
    names = ("model.layers.1", "lm_head")
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(names))
    truth, _ = gradients(model, lambda: definition(model, sequences, example_loss))

    def run():
        with torch.no_grad():
            tree_backward(model, TokenTrie(sequences), example_loss, max_tokens=3, recompute=True)

    assert error(model, run, truth) < 1e-10
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        tree_backward(model, TokenTrie(sequences), example_loss)


@pytest.mark.quick
def test_nothing_is_an_ordinary_case():
    model, trie = TinyModel(), TokenTrie([])
    result = tree_backward(model, trie, example_loss, max_tokens=3)
    assert result.loss == 0 and result.logprobs == []
    assert [x.shape for x in tree_scores(model, trie, padded=True)] == [(0, 0)] * 2
    assert tree_scores(model, trie) == [] and draw(trie) == "" and partition_tree(trie) == []
    assert all(p.grad is None for p in model.parameters())
    assert partition([], 3) == [[], [], []]


# Mixtures of experts ---------------------------------------------------------------------------


def flat_with_balance(model, sequences, coef):
    """The flat batch with models.Balance, one sequence at a time: aux loss and expert counts."""
    total, counts = 0.0, {}
    for i, x in enumerate(sequences):
        balance = models.Balance(torch.zeros(len(x)).long(), coef=coef)
        hidden = model.hidden(x[None], balance=balance)[0]
        example_loss(i, *model.logprobs(hidden[:-1], x[1:])).backward()
        total += sum(balance.losses.values())
        for layer, n in balance.counts.items():
            counts[layer] = counts.get(layer, 0) + n
    return total, counts


@pytest.mark.parametrize(
    "chunks", [FEW, pytest.param(CHUNKS, marks=pytest.mark.slow)], ids=["few", "every"]
)
@pytest.mark.parametrize("name", ["lone", "duplicates", "prefixes", "caterpillar", "forest"])
def test_the_auxiliary_loss_counts_tokens_as_the_flat_batch_does(name, chunks):
    model = models.tiny_model("qwen3_moe", num_hidden_layers=3)
    sequences = tensors((forests() | {"lone": [[3], [3], [4, 5, 6]]})[name])
    truth, (aux, counts) = gradients(model, lambda: flat_with_balance(model, sequences, 0.3))
    plain, _ = gradients(model, lambda: definition(model, sequences, example_loss))
    assert max(relative(a, b) for a, b in zip(plain, truth, strict=True)) > 1e-4  # it matters
    for size, recompute in chunks:
        options = dict(max_tokens=size, recompute=recompute, aux_coef=0.3)
        trie = TokenTrie(sequences)
        found, result = gradients(
            model, lambda t=trie, o=options: tree_backward(model, t, example_loss, **o)
        )
        assert max(relative(a, b) for a, b in zip(found, truth, strict=True)) < 1e-10
        assert abs(result.aux_loss - aux) < 1e-12
        assert result.router_counts.keys() == counts.keys()
        assert all(torch.equal(result.router_counts[k], counts[k]) for k in counts)


# Precision, memory -----------------------------------------------------------------------------


BF16 = [("qwen3", (None, 32))]
BF16 += [
    pytest.param(kind, (None, 64, 32, 8), marks=pytest.mark.slow)
    for kind in ("qwen3", "gemma3_text")
]


@pytest.mark.parametrize("kind, sizes", BF16)
def test_bf16_is_as_good_as_flat_bf16(kind, sizes):
    """Root mean square over seeds and shapes: one case alone is +-10 % by the roundings' luck."""
    flat, ours = [], {size: [] for size in sizes}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        prompt = rng.integers(0, 53, 96)
        star = [np.append(prompt, rng.integers(0, 53, 24)) for _ in range(8)]
        for sequences in (star, [prompt[:n] for n in range(12, 97, 12)]):
            sequences = tensors(sequences)
            low = models.tiny_model(kind, seed=seed, dtype=torch.bfloat16, hidden_size=64)
            high = copy.deepcopy(low).float()
            truth = gradients(high, lambda: definition(high, sequences, linear_loss))[0]
            truth = torch.cat([x.flatten() for x in truth]).double()

            def off(run, low=low, truth=truth):
                found = torch.cat([x.flatten() for x in gradients(low, run)[0]])
                return relative(found, truth)

            flat.append(off(lambda: definition(low, sequences, linear_loss)))
            for size, errors in ours.items():
                trie = TokenTrie(sequences)
                errors.append(off(lambda: tree_backward(low, trie, linear_loss, max_tokens=size)))
    for size, errors in ours.items():
        assert np.linalg.norm(errors) <= 1.1 * np.linalg.norm(flat), size


def peak(model, trie, **options):
    """Bytes that tree_backward held, beyond the parameters' gradients."""
    model.zero_grad()
    with LiveBytes() as live:
        tree_backward(model, trie, linear_loss, **options)
    return live.peak - sum(p.grad.nbytes for p in model.parameters())


def stars(leaves):
    return TokenTrie([np.append(np.arange(200) % 50, [k, *range(31)]) for k in leaves])


def small_model(kind="qwen3"):
    return models.tiny_model(kind, dtype=torch.float32, hidden_size=64, vocab_size=101)


@pytest.mark.parametrize("kind", shortened(["qwen3", "qwen3_moe"], "qwen3_moe"))
@pytest.mark.parametrize("recompute", shortened([False, True], True))
def test_memory_does_not_depend_on_the_number_of_leaves(recompute, kind):
    model = small_model(kind)
    few, many = (peak(model, stars(range(n)), max_tokens=32, recompute=recompute) for n in (8, 32))
    assert few <= many < 1.1 * few
    assert peak(model, stars(range(64))) > 4 * many  # all at once, it does


PREDICTED = [(True, (None, 60))]
PREDICTED += [pytest.param(r, (None, 150, 60), marks=pytest.mark.slow) for r in (False, True)]


@pytest.mark.parametrize("recompute, sizes", PREDICTED)
def test_memory_is_what_was_predicted(recompute, sizes):
    model = small_model()
    tries = {
        "star": stars(range(20)),
        "chain": TokenTrie([np.arange(n) % 53 for n in range(50, 401, 50)]),
        "none": TokenTrie([np.arange(200) % 47 + k for k in range(5)]),
    }
    for name, trie in tries.items():
        for size in sizes:
            options = dict(max_tokens=size, recompute=recompute)
            model.zero_grad()
            told, found = predict_memory(model, trie, **options), peak(model, trie, **options)
            assert 0.97 < sum(told) / found < 1.15, (name, size)
            walked = partition_tree(trie, size, join_only_children=not recompute)
            assert (told.path > 0) == any(chunk.parent >= 0 for chunk in walked)
    again = predict_memory(model, trie, **options)  # as `peak` left them: .grad is there
    assert again.activations - told.activations == sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        assert predict_memory(model, trie, **options) == again


@pytest.mark.quick
@pytest.mark.parametrize("recompute", [False, True])
def test_the_walk_holds_the_keys_of_one_path_and_no_more(monkeypatch, recompute):
    model, trie = TinyModel(), TokenTrie([np.append(np.zeros(n, int), 1) for n in (40, 90, 100)])
    walk = tree._TreeWalk(model, trie, max_tokens=30, recompute=recompute)
    most, finish = [], walk.finish_sequences

    def finished(chunk, loss_fn):
        held = [leaf for of_chunk in walk.kv.values() for leaf in of_chunk[0]]
        most.append(sum(leaf.leaf.shape[2] for leaf in held) // 2)  # of layer 0, k and v
        for leaf in held:
            # Without a graph, a leaf that is a view would hold all of the chunk.
            size = leaf.leaf.untyped_storage().nbytes()
            assert not recompute or size == leaf.leaf.nbytes
        finish(chunk, loss_fn)

    walk.finish_sequences = finished
    walk.run(linear_loss)
    deepest = max(int(trie.positions[chunk.start]) for chunk in walk.chunks)
    assert max(most) == deepest < 101 and not walk.kv


def test_a_walk_leaves_nothing_for_the_garbage_collector():
    """MEMORY: what a chunk held is freed when it is done, not when Python looks for cycles."""
    model, trie = models.tiny_model("gemma3_text"), TokenTrie(random_forest(0))
    tree_backward(model, trie, linear_loss, max_tokens=4)
    gc.collect()
    gc.disable()
    try:
        for recompute in (False, True):
            tree_backward(model, trie, linear_loss, max_tokens=4, recompute=recompute)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            garbage = [x for x in gc.garbage if isinstance(x, torch.Tensor | tree.ring.Mask)]
            gc.set_debug(0)
            gc.garbage.clear()
            assert not garbage
    finally:
        gc.set_debug(0)
        gc.enable()


# Bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sequences, message",
    [
        ([[1, 2], []], "sequence 1: expected 1-D integers, 1 token or more"),
        ([[1.5, 2.0]], "sequence 0: expected 1-D integers"),
        ([[[1, 2]]], "sequence 0: expected 1-D integers"),
        ([[1, 2], [3, -1]], "sequence 1: expected token ids .*, got -1"),
        ([[1], np.array([2**63 + 1], np.uint64)], "sequence 1: expected token ids .*, got -"),
    ],
)
def test_sequences_that_are_none_are_refused(sequences, message):
    with pytest.raises(ValueError, match=message):
        TokenTrie([torch.tensor(x) if isinstance(x, list) else x for x in sequences])


def test_a_sequence_longer_than_the_limit_is_named():
    model = models.tiny_model("qwen3", max_position_embeddings=8)
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens, the model's limit is 8"):
        tree_backward(model, TokenTrie([[1], [1] * 9]), linear_loss)


class Wrong(TinyModel):
    """TinyModel with one thing that a tree cannot have."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class LinearAttention(nn.Module):
    pass


class Deaf(TinyModel):
    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        return super().hidden(tokens_BS, positions=positions)


@pytest.mark.parametrize(
    "model, message",
    [
        (Wrong(drop=nn.Dropout(0.1)), "drop drops out with p = 0.1.*model.eval"),
        (Wrong(mix=nn.Conv1d(1, 1, 3)), "mix is Conv1d: it mixes tokens in another way"),
        (Wrong(mix=nn.GRU(2, 2)), "mix is GRU"),
        (Wrong(mix=LinearAttention()), "mix is LinearAttention"),
        (Deaf(), "Deaf.hidden never called `attention`"),
        (nn.Linear(2, 2), "Linear must have .hidden"),
    ],
)
def test_models_that_a_tree_cannot_train_are_refused(model, message):
    for run in (tree_backward, lambda *x: tree._TreeWalk(*x[:2]).run()):
        if run is tree_backward or isinstance(model, Deaf):
            with pytest.raises(ValueError, match=message):
                run(model, TokenTrie([[1, 2]]), linear_loss)
    assert all(p.grad is None for p in model.parameters())


def test_layers_of_one_number_are_refused():
    model, trie = TinyModel(), TokenTrie([[1, 2, 3], [1, 4, 5]])
    hidden = model.hidden

    def shared(tokens, /, *, positions=None, attention=None):
        numbered = lambda *x, layer, **options: attention(*x, layer=0, **options)  # noqa: E731
        return hidden(tokens, positions=positions, attention=numbered)

    model.hidden = shared
    with pytest.raises(ValueError, match="two layers call attention with layer=0"):
        tree_backward(model, trie, linear_loss, max_tokens=2)


class Checkpointed(TinyModel):
    """Every layer's attention, and so the walk's callable, runs again in the backward."""

    reentrant = False

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        def again(*qkv, **options):
            return checkpoint(
                lambda *x: attention(*x, **options), *qkv, use_reentrant=self.reentrant
            )

        return super().hidden(tokens_BS, positions=positions, attention=attention and again)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(reentrant):
    model, sequences = Checkpointed(), random_forest(0)
    model.reentrant = reentrant
    truth, _ = gradients(model, lambda: definition(model, sequences, example_loss))
    for size in (None, 1, 4):
        trie = TokenTrie(sequences)
        run = lambda: tree_backward(model, trie, example_loss, max_tokens=size)  # noqa: E731
        assert error(model, run, truth) < 1e-10


class CheckpointedLayers(nn.Module):
    """Two layers, each under a checkpoint of its own: the keys are made inside."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"embed": (11, 8), "qkv": (2, 24, 8)}.items():
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(drawn))

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        def layer(x_BSM, n):
            q, k, v = (x_BSM @ self.qkv[n].T)[:, None].chunk(3, 3)
            seen = attention or tree.CheckModel.plain_attention
            return x_BSM + seen(q, k, v, layer=n, scale=0.4)[:, 0]

        x_BSM = self.embed[tokens_BS]
        for n in range(2):
            x_BSM = checkpoint(layer, x_BSM, n, use_reentrant=self.reentrant)
        return x_BSM

    def logprobs(self, states_nM, targets_n, /, *, temperature=1.0):
        logp_nV = (states_nM @ self.embed.T / temperature).log_softmax(-1)
        return logp_nV.gather(1, targets_n[:, None])[:, 0], -(logp_nV.exp() * logp_nV).sum(-1)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_reentrant_checkpoint_of_whole_layers_is_refused(recompute):
    """It loses the gradient of keys that chunks below read; where none is below, it is fine."""
    model, sequences = CheckpointedLayers(False), random_forest(0)
    truth, _ = gradients(model, lambda: definition(model, sequences, example_loss))
    trie = TokenTrie(sequences)
    options = dict(max_tokens=4, recompute=recompute)
    assert error(model, lambda: tree_backward(model, trie, example_loss, **options), truth) < 1e-10

    model.reentrant = True
    assert error(model, lambda: tree_backward(model, trie, example_loss), truth) < 1e-10
    with pytest.raises(ValueError, match="reentrant checkpoint.*pass use_reentrant=False"):
        tree_backward(model, trie, example_loss, **options)
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        tree_scores(model, trie, max_tokens=4)  # nobody wants a graph here


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(ValueError, match="use tree_scores"):
        tree_backward(TinyModel(), TokenTrie([[1, 2]]), linear_loss)


@pytest.mark.quick
def test_dropout_is_fine_where_it_drops_nothing():
    for model in (Wrong(drop=nn.Dropout(0.0)), Wrong(drop=nn.Dropout(0.1)).eval()):
        tree_backward(model, TokenTrie([[1, 2]]), linear_loss)


def test_other_refusals_say_what_to_do():
    model = models.tiny_model("qwen3")
    with pytest.raises(ValueError, match="sequence 1 has the token id 53; ids are below 53"):
        tree_backward(model, TokenTrie([[1, 2], [3, 53]]), linear_loss)
    with pytest.raises(ValueError, match="the model has no router; leave 0"):
        tree_backward(model, TokenTrie([[1, 2]]), linear_loss, aux_coef=0.1)
    with pytest.raises(ValueError, match="expected a TokenTrie, got list"):
        tree_backward(model, [[1, 2]], linear_loss)
    model = Wrong(config=types.SimpleNamespace(layer_types=["linear_attention"]))
    with pytest.raises(ValueError, match="linear_attention.*not all are causal softmax"):
        tree_backward(model, TokenTrie([[1, 2]]), linear_loss)


# Partition -------------------------------------------------------------------------------------


def contiguous(order, world):
    """Every way to cut the order into `world` stretches, empty ones too."""
    for cuts in itertools.combinations_with_replacement(range(len(order) + 1), world - 1):
        edges = [0, *cuts, len(order)]
        yield [order[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.quick
@pytest.mark.parametrize("again", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_dfs_partition_is_the_best_of_all_contiguous_ones(seed, again):
    sequences, cost = random_forest(seed, count=9, longest=12), Cost(1.0, 0.05, again)

    def worst(shares):
        return max(modeled_time(TokenTrie([sequences[i] for i in x]), cost) for x in shares)

    order = sum(partition(sequences, 1), [])
    assert order == TokenTrie(sequences).order
    for world in (1, 2, 3, 4):
        shares = partition(sequences, world, cost=cost)
        assert sum(shares, []) == order and len(shares) == world
        best = min(worst(x) for x in contiguous(order, world))
        assert worst(shares) <= best * (1 + 1e-6)


@pytest.mark.parametrize("strategy", ["dfs", "round_robin"])
def test_every_strategy_deals_each_sequence_once_and_the_same_again(strategy):
    sequences = random_forest(1, count=7)
    for world in (1, 2, 4, 20):
        shares = partition(sequences, world, strategy=strategy)
        assert sorted(sum(shares, [])) == list(range(7)) and len(shares) == world
        assert shares == partition(sequences, world, strategy=strategy)
    with pytest.raises(ValueError, match="expected strategy .dfs. or"):
        partition(sequences, 2, strategy="best")
    with pytest.raises(ValueError, match="world of 1 or more"):
        partition(sequences, 0)


def longest_first(sequences, world):
    """Each sequence by itself, the longest first, to the rank with the fewest tokens so far."""
    shares = [[] for _ in range(world)]
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        min(shares, key=lambda share: sum(len(sequences[k]) for k in share)).append(i)
    return shares


def test_groups_stay_together_and_the_work_is_even():
    rng = np.random.default_rng(0)
    groups = [np.append(k, rng.integers(0, 99, 199)) for k in range(8)]
    sequences = [np.append(group, rng.integers(0, 99, 20)) for group in groups for _ in range(8)]
    dealt = [sequences[i] for i in rng.permutation(64)]
    for world in (2, 4, 8):
        ways = {"dfs": partition(dealt, world), "longest first": longest_first(dealt, world)}
        ways["round_robin"] = partition(dealt, world, strategy="round_robin")
        tokens = {
            way: [len(TokenTrie([dealt[i] for i in share])) for share in shares]
            for way, shares in ways.items()
        }
        assert sum(tokens["dfs"]) == len(TokenTrie(dealt))  # no prompt twice
        assert max(tokens["dfs"]) < 1.01 * min(tokens["dfs"])
        others = max(tokens["longest first"]), max(tokens["round_robin"])
        assert min(others) > 1.2 * max(tokens["dfs"])


# Commands --------------------------------------------------------------------------------------


def test_check_fails_where_a_gradient_is_wrong(monkeypatch, capsys):
    class Constant:  # (5) without what chunks below find
        def __init__(self, x):
            self.leaf = x.detach()
            self.sums = []

    monkeypatch.setattr(tree, "_SummingLeaf", Constant)
    few = {"forks at the end": forests()["forks at the end"]}
    monkeypatch.setattr(tree, "forests", lambda: few)
    monkeypatch.setitem(sys.modules, "measure_tree", None)  # an ImportError: no families
    assert tree.check() == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if "forks at the end" in x)
    assert line.endswith("FAILED")


@pytest.mark.quick
def test_plan_prints_tree_chunks_and_partition(tmp_path, capsys):
    (tmp_path / "x.json").write_text(json.dumps([[1, 2, 3], [1, 2, 4], [7]]))
    assert tree.main(["plan", str(tmp_path / "x.json"), "--max-tokens", "3", "--world", "2"]) == 0
    out = capsys.readouterr().out
    assert "+- 1 2" in out and "tree_tokens 5" in out and "sequences [1, 2]" in out

    # A path of ten in chunks of three: four to list, and one call where the graphs are kept.
    (tmp_path / "x.json").write_text(json.dumps([list(range(10))]))
    assert tree.main(["plan", str(tmp_path / "x.json"), "--max-tokens", "3", "--world", "2"]) == 0
    out = capsys.readouterr().out
    assert "3: below    2, depth     9, 1 tokens" in out
    assert "1 calls of at most 10 tokens" in out


@pytest.mark.slow  # test_readme.py runs it too
def test_bench_runs_at_toy_size(tmp_path, capsys):
    (tmp_path / "x.json").write_text(json.dumps([[[1, 2, 3], [1, 2, 4]]]))
    assert tree.main(["bench", "--repeats", "1", "--scale", "0.02", "--only", "GRPO"]) == 0
    assert tree.main(["bench", "--repeats", "1", "--data", str(tmp_path / "x.json")]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["way"] for row in last["rows"]} == {"flat", "sparse", "dta N/4", "dta N/8"}
    assert tree.main(["nonsense"]) == 2

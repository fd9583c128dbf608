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
from measure_memory import LiveBytes
from measure_tree import draw, modeled_time
from oracles import FLASH, Watch, plain_attention, worst
from torch import nn
from torch.autograd import grad as grad_of
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import models
import tree_attention as tree
from ring_attention import relative
from tree_attention import Cost, NonFiniteLoss, TinyModel, TokenTrie, definition, example_loss
from tree_attention import forests, partition, partition_tree, tree_attention, tree_backward
from tree_attention import tree_logprobs, tree_scores

quick = pytest.mark.quick
short_or_not = pytest.mark.parametrize("short", [0, 48])  # in boxes, or in groups


def tensors(sequences):
    return [torch.tensor(x) for x in sequences]


def random_forest(seed, count=12, longest=9, letters=2):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest + 1, count)
    return tensors([rng.integers(0, letters, n).tolist() for n in sizes])


def outcome(model, way, *given, **options):
    """Loss, log-probs and all gradients of way(model, ..), from no .grad; and what it returned."""
    model.zero_grad()
    result = way(model, *given, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return [torch.as_tensor(result[0]), *result[1], *grads], result


def flat(model, sequences, loss_fn=example_loss, **options):
    """The outcome of every sequence by itself. A critic's .logprobs returns the values too."""
    alone = model
    if getattr(getattr(model, "config", None), "value_head", False):
        alone = types.SimpleNamespace(hidden=model.hidden)
        alone.logprobs = lambda states_nM, *given, **options: (
            *model.logprobs(states_nM, *given, **options), model.values(states_nM)
        )  # fmt: skip
    return outcome(model, lambda _, *given: definition(alone, *given, **options),
                   sequences, loss_fn)[0]  # fmt: skip


def walked(model, sequences, loss_fn=example_loss, **options):
    """The outcome of a walk."""
    return outcome(model, tree_backward, TokenTrie(sequences), loss_fn, **options)[0]


def one_graph(model, trie, loss_fn=example_loss, **options):
    """The whole tree in one graph."""
    scores = tree_scores(model, trie, **options)
    loss = sum(loss_fn(i, *score) for i, score in enumerate(scores))
    loss.backward()
    return loss.detach(), [score[0].detach() for score in scores]


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


def ancestors(trie, sequences, window=None):
    """bool (N, N): which tokens each token of a tree sees."""
    nodes = brute_force(sequences)
    sees = torch.tensor([[q[: len(k)] == k for k in nodes] for q in nodes])
    return sees & (trie.positions[:, None] - trie.positions < (window or math.inf))


@quick
@pytest.mark.parametrize("seed", range(30))
def test_the_trie_is_the_set_of_prefixes_and_its_mask_is_ancestors(seed):
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
    for window in (None, 3):
        sees = ancestors(trie, sequences, window)
        assert torch.equal(trie.mask(window).dense()[0, 0], sees)
    assert trie.stats().tree_pairs == ancestors(trie, sequences).sum()

    # The order of the input changes nothing, and the input is not changed.
    shuffled = [sequences[i] for i in torch.randperm(len(sequences))]
    again, after = TokenTrie(shuffled), random_forest(seed, letters=1 + seed % 4)
    for name in ("tokens", "positions", "subtree_end", "parent"):
        assert torch.equal(getattr(trie, name), getattr(again, name))
    assert all(torch.equal(x, y) for x, y in zip(sequences, after, strict=True))


@quick
def test_stats_count_tokens_and_pairs():
    trie = TokenTrie(tensors([[5, 6, 7], [5, 6, 8], [5, 9]]))
    assert trie.stats(10.0, 1.0) == (8, 5, 15, 11, 8 / 5, (80 + 15) / (50 + 11))
    assert trie.stats().flop_bound is None and TokenTrie([]).stats().token_bound == 1.0


@quick
def test_a_drawing_shows_segments_and_ends():
    drawn = draw(TokenTrie(tensors([[5, 6, 7], [5, 6, 8], [5, 9], [5, 6]])))
    assert drawn == (
        "+- 5\n|  +- 6   ends: [3] at 1\n|  |  +- 7   ends: [0] at 1\n"
        "|  |  +- 8   ends: [1] at 1\n|  +- 9   ends: [2] at 1"
    )
    star = TokenTrie(tensors([[k] for k in range(99)]))
    assert len(draw(star, most=10).splitlines()) == 11


@quick
def test_thousands_of_forks_and_leaves_need_no_recursion():
    nested = [np.append(np.zeros(k, int), 1) for k in range(1, 3001)]
    star = [np.append(np.arange(200), [k, 7]) for k in range(2000)]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        for sequences, tokens in ((nested, 6000), (star, 200 + 4000)):
            trie = TokenTrie(sequences)
            chunks = partition_tree(trie, 64)
            assert chunks[0].start == 0 and chunks[-1].stop == len(trie) == tokens
            assert max(chunk.stop - chunk.start for chunk in chunks) <= 64
            assert sorted(sum(partition(sequences, 8), [])) == list(range(len(sequences)))
            draw(trie)
    finally:
        sys.setrecursionlimit(limit)


# Attention -------------------------------------------------------------------------------------

MORE_SEEDS = [
    pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (2, 0), (0, 48))
]


def draw_qkv(tokens, *, dtype=torch.float64, heads=(4, 2, 2, 4), width=8, seed=0):
    """q, k, v that want gradients, and an upstream gradient."""
    gen = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(1, h, tokens, width, generator=gen, dtype=dtype) for h in heads]
    return [x.requires_grad_() for x in drawn[:3]], drawn[3]


@pytest.mark.parametrize("window", [None, 2, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("seed, short", [(0, 0), (1, 48), *MORE_SEEDS])
def test_tree_attention_is_dense_attention_over_ancestors(
    monkeypatch, seed, short, window, softcap
):
    monkeypatch.setattr(tree, "SHORT", short)
    sequences = random_forest(seed, count=40, longest=30)
    trie = TokenTrie(sequences)
    leaves, dout = draw_qkv(len(trie), seed=seed)
    sees = ancestors(trie, sequences, window)
    out = tree_attention(*leaves, trie, scale=0.4, window=window, softcap=softcap)
    truth, _ = plain_attention(*leaves, sees, scale=0.4, softcap=softcap)
    found, true = (grad_of(x, leaves, dout) for x in (out, truth))
    assert worst([out], [truth]) < 1e-14 and worst(found, true) < 1e-13
    assert relative(torch.zeros_like(found[1]), true[1]) > 1 - 1e-12  # 0 would not pass


@short_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tree_attention_in_low_precision_is_within_twice_plain_torch(monkeypatch, dtype, short):
    monkeypatch.setattr(tree, "SHORT", short)
    trie = TokenTrie(random_forest(1, count=40, longest=30))
    leaves, dout = draw_qkv(len(trie), dtype=torch.float32, heads=[4] * 4, width=16)
    mask = trie.mask().dense()

    def run(attention, to):
        given = [x.detach().to(dtype).to(to).requires_grad_() for x in leaves]
        out = attention(*given)
        return [out.detach(), *grad_of(out, given, dout.to(dtype).to(to))]

    plain = lambda *x: scaled_dot_product_attention(*x, mask)  # noqa: E731
    results = run(lambda *x: tree_attention(*x, trie), dtype), run(plain, dtype)
    for ours, theirs, truth in zip(*results, run(plain, torch.float64), strict=True):
        assert relative(ours, truth) <= 2 * relative(theirs, truth) + 1e-9


@pytest.mark.parametrize("window", [None, 2])
@short_or_not
def test_a_huge_token_and_a_huge_gradient_reach_their_own_paths_only(monkeypatch, short, window):
    monkeypatch.setattr(tree, "SHORT", short)
    trie = TokenTrie([[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8]])
    leaves, dout = draw_qkv(len(trie), dtype=torch.float32)
    spoilt = int(trie.path(1)[2])  # token 5 sees 1, 2 and itself; itself and 6 see it

    def run(leaves, dout):
        out = tree_attention(*leaves, trie, window=window)
        return out.detach(), *grad_of(out, leaves, dout)

    clean, sees = run(leaves, dout), trie.mask(window).dense()[0, 0]
    keys = [leaves[0], *(x.detach().clone().requires_grad_() for x in leaves[1:])]
    for x in keys[1:]:
        x.data[0, :, spoilt] = 1e30
    huge = dout.clone()
    huge[0, :, spoilt] = 1e30

    # Its own query, and the keys and values that it sees; of the rest nothing changes.
    own, seen = torch.arange(len(trie)) == spoilt, sees[spoilt]
    assert sees[:, spoilt].sum() == 2 and seen.sum() == (window or 3)
    pairs = [(run(keys, dout)[0], clean[0], sees[:, spoilt])]
    pairs += zip(run(leaves, huge)[1:], clean[1:], (own, seen, seen), strict=True)
    for new, old, reached in pairs:
        assert not torch.allclose(new[:, :, reached], old[:, :, reached])
        assert relative(new[:, :, ~reached], old[:, :, ~reached]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_hold_what_torchs_attention_holds_and_nothing_more(dtype):
    """Bytes that a backward waits with."""
    trie = TokenTrie(random_forest(1, count=40, longest=30))
    assert len(trie) % tree.WIDTH  # a group is filled up, so queries are a copy
    leaves, _ = draw_qkv(len(trie), dtype=dtype)
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        tree_attention(*leaves, trie)

    # In float32: q, out, lse of each query, k and v of each group, the bias; and which keys, twice.
    groups = -(-len(trie) // tree.WIDTH)
    keys = groups * (int(trie.positions[:: tree.WIDTH].max()) + tree.WIDTH)
    most = 4 * groups * tree.WIDTH * 4 * (8 + 8 + 1) + 2 * 4 * keys * 2 * 8
    most += 4 * tree.WIDTH * keys + 2 * 8 * keys
    assert 0.5 * most < sum(storages.values()) <= most


def biases_of_groups(watch):
    """The biases of torch's attention over groups of tokens; boxes have fewer or more rows."""
    calls = watch.calls(FLASH)
    return [kw["attn_mask"] for args, kw in calls if args[0].shape[2] == tree.WIDTH]


@quick
def test_groups_are_for_short_paths_on_a_cpu_without_a_softcap(monkeypatch):
    def grouped(longest=16, device="cpu", batch=1, **options):
        trie = TokenTrie([list(range(longest)), [*range(12), 20]])
        with Watch() as watch:
            tree_attention(*torch.zeros(3, batch, 2, len(trie), 4, device=device), trie, **options)
        return bool(biases_of_groups(watch))

    assert grouped() and grouped(longest=tree.SHORT) and grouped(window=4)
    assert not grouped(longest=tree.SHORT + 1)
    assert not grouped(device="meta") and not grouped(batch=2) and not grouped(softcap=2.0)
    assert not grouped(backend="math") and not grouped(backend="fused")
    monkeypatch.setattr(tree, "GATHERED", 300)
    assert not grouped()


def test_groups_and_what_they_see_are_found_once_for_all_layers(monkeypatch):
    model = models.tiny_model("qwen3", num_hidden_layers=3)
    trie = TokenTrie([[1, 2], [1, 3]])
    with Watch() as watch:
        sum(scores[0].sum() for scores in tree_scores(model, trie)).backward()
    biases = biases_of_groups(watch)
    assert len(biases) == 3 and len({bias.data_ptr() for bias in biases}) == 1
    monkeypatch.setattr(tree, "SHORT", 1)  # paths of 2 tokens are long now
    with Watch() as watch:
        tree_scores(model, trie)
    assert not biases_of_groups(watch)


@quick
@pytest.mark.parametrize("short", [0, 128])
def test_inputs_are_checked_where_paths_are_short_too(monkeypatch, short):
    """Of batches, dtypes, lengths and options tree_attention says what `attend` says."""
    monkeypatch.setattr(tree, "SHORT", short)
    trie = TokenTrie([[1, 2, 3], [1, 2, 4], [5]])
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    out = tree_attention(q, k, v, trie)
    assert out.shape == q.shape
    assert relative(out, tree.ring.attend(q, k, v, trie.mask())[0]) < 1e-6

    one = q[:1], k[:1], v[:1]
    longer = torch.randn(1, 4, 6, 8)
    for given, options, message in [
        ((one[0], one[1].double(), one[2]), {}, "in one dtype"),
        ((one[0], longer, longer), {}, "expected a mask of .5, 6. queries and keys, got .5, 5."),
        ((one[0], one[1][:, :3], one[2][:, :3]), {}, "multiple of key heads"),
        ((one[0][0], one[1][0], one[2][0]), {}, "expected q .B, H, q, D."),
        (one, dict(scale=-1), "positive number or None as scale, got -1"),
        (one, dict(window=0), "at least 1 as a window, got 0"),
        (one, dict(softcap=-2.0), "positive number or None as softcap"),
        (one, dict(backend="flash"), "as backend, got 'flash'"),
    ]:
        with pytest.raises(ValueError, match=message):
            tree_attention(*given, trie, **options)


def test_every_pair_of_a_token_and_an_ancestor_is_computed_once():
    mask = TokenTrie(random_forest(2, count=60, longest=40)).mask()
    dense = mask.dense()[0, 0]
    times = torch.zeros(dense.shape, dtype=int)
    for box in tree.ring.boxes(mask, tree.ring.TILES["cpu forward"]):
        times[box.rows, box.keys] += 1
    assert (times[dense] == 1).all() and times.max() == 1


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
        path, at = set(), parent[chunk.start]
        assert chunk.parent == (chunk_of[at] if at >= 0 else -1) < b
        while at >= 0:
            path, at = path | {at}, parent[at]
        for token in range(chunk.start, chunk.stop):
            assert parent[token] in path | {*range(chunk.start, token)} or not path


@quick
@pytest.mark.parametrize("seed", range(20))
def test_chunks_hold_each_token_once_and_see_the_rest_of_their_paths_above(seed):
    """And a forward pass by chunks is the one by sequences: it reads the paths above."""
    sequences = random_forest(seed, count=25, longest=14)
    trie, model = TokenTrie(sequences), TinyModel()
    for size in SIZES:
        chunks = partition_tree(trie, size)
        assert all(chunk.stop - chunk.start <= size for chunk in chunks)
        hang_right(trie, chunks)
    with torch.no_grad():
        truth = tree_logprobs(model, trie)
        for size in (1, 3, 13) if seed < 10 else (2, 7, 40):
            assert worst(tree_logprobs(model, trie, max_tokens=size), truth) < 1e-12


@quick
def test_sibling_subtrees_are_packed_together():
    star = TokenTrie([[1] * 10 + [k] * 5 for k in range(8)])
    lengths = lambda size: [x.stop - x.start for x in partition_tree(star, size)]  # noqa: E731
    assert lengths(20) == [20, 20, 10] and lengths(None) == [50]
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"expected max_tokens of 1 or more.*got {wrong}"):
            partition_tree(star, wrong)
    assert len(partition_tree(star, np.int64(20))) == 3


@quick
def test_a_path_runs_past_forks_while_what_is_below_it_fits():
    spine = np.arange(128)

    def cut(sequences, size):
        trie = TokenTrie(sequences)
        chunks = partition_tree(trie, size)
        depths = trie.positions[[x.start for x in chunks]].tolist()
        return [x.stop - x.start for x in chunks], [x.parent for x in chunks], depths

    # A spine with a small branch every 8 tokens: chunks are full, and no fork ends a path. Twelve
    # branches of three chunks' forks are one more chunk, below the last fork of them all.
    branches = [np.append(spine[:k], np.full(4, 500 + k)) for k in range(8, 129, 8)]
    assert cut(branches, 48) == ([48] * 4, [-1, 0, 1, 1], [0, 48, 96, 96])

    # Other branches that fill the chunk end a path too: none of the largest branch would fit.
    two = [[1, 2, 3] + [4] * 10, [1, 2, 3, 5, 5]]
    assert cut(two, 5)[0] == [3, 5, 5, 2] and cut(two, 6)[0] == [6, 6, 3]

    # A branch that does not fit next to the path ends it, and gets a chunk of its own.
    two = [spine, np.append(spine[:40], np.full(20, 500))]
    assert cut(two, 48) == ([40, 48, 40, 20], [-1, 0, 1, 0], [0, 40, 88, 40])


# The walk ----------------------------------------------------------------------------------------

STEM = np.random.default_rng(0).integers(0, 10, 150).tolist()
NESTED = {"nested": [STEM[:n] + [10, n % 10] for n in range(2, 150, 10)]}


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=quick)])
@pytest.mark.parametrize("name", forests() | NESTED)
def test_gradients_are_those_of_every_sequence_by_itself(name, recompute):
    model, sequences = TinyModel(), tensors((forests() | NESTED)[name])
    truth = flat(model, sequences, temperature=0.7)
    for size in (2, 5) if recompute else (None, 3):
        options = dict(max_tokens=size, recompute=recompute, temperature=0.7)
        assert worst(walked(model, sequences, **options), truth) < 1e-12
    if name != "one token":  # zeros would not pass
        grads = truth[-len([*model.parameters()]) :]
        assert all(relative(torch.zeros_like(x), x) == 1 for x in grads)


CHUNKS = [*itertools.product((None, 1, 2, 3, 7), (False, True))]  # tokens a chunk, recomputation
# TinyModel has all of these sizes in test_gradients_are_those_of_every_sequence_by_itself.
FEW = [(None, True), (3, False), (7, True)]
few_or_every = pytest.mark.parametrize(
    "chunks", [FEW, pytest.param(CHUNKS, marks=pytest.mark.slow)], ids=["few", "every"]
)


@few_or_every
@pytest.mark.parametrize("critic", shortened([False, True], True))  # with values beside the rest
@pytest.mark.parametrize("kind", models.TINY)
def test_every_family_of_models_has_the_gradients_of_the_flat_batch(kind, critic, chunks):
    model = models.tiny_model(kind)
    if critic:
        nn.init.normal_(model.add_value_head().score.weight)
    for name in ("prefixes", "binary", "forest"):
        sequences = tensors(forests()[name])
        truth = flat(model, sequences, temperature=0.8)
        found, _ = outcome(model, one_graph, TokenTrie(sequences), temperature=0.8)
        assert worst(found, truth) < 1e-10
        for size, recompute in chunks:
            options = dict(max_tokens=size, recompute=recompute, temperature=0.8)
            assert worst(walked(model, sequences, **options), truth) < 1e-10


@pytest.mark.parametrize("kind", models.TINY)
def test_forward_passes_are_the_definitions_and_leave_no_gradient(kind):
    model, sequences = models.tiny_model(kind), tensors(forests()["forest"])
    trie = TokenTrie(sequences)
    _, logprobs = definition(model, sequences, example_loss, temperature=0.8)
    assert worst(tree_logprobs(model, trie, temperature=0.8), logprobs) < 1e-12
    model.zero_grad()
    with torch.no_grad():
        whole = tree_scores(model, trie)
        for size in (1, 2, 7):
            for few, every in zip(tree_scores(model, trie, max_tokens=size), whole, strict=True):
                assert worst(few, every) < 1e-12

        # Padded, they are the same numbers, and 0 past the end of a sequence.
        padded = zip(*tree_scores(model, trie, padded=True), strict=True)
    for row, few in zip(whole, padded, strict=True):
        for x, y in zip(row, few, strict=True):
            assert torch.equal(y[: len(x)], x) and not y[len(x) :].any()
    assert all(p.grad is None for p in model.parameters())


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


@quick
@pytest.mark.parametrize("size", [None, 4])
def test_masks_score_what_a_loss_uses_and_nothing_else(size):
    model, sequences, rng = models.tiny_model("qwen3"), random_forest(3), np.random.default_rng(0)
    masks, trie = [rng.random(len(x) - 1) < 0.4 for x in sequences], TokenTrie(sequences)

    def loss_fn(i, *scores):
        return linear_loss(i, *(torch.where(torch.from_numpy(masks[i]), x, 0.0) for x in scores))

    options, R = dict(max_tokens=size), len(sequences)
    truth = walked(model, sequences, loss_fn, **options)
    scored, plain = [], model.logprobs
    model.logprobs = lambda x_nM, *rest, **more: (
        scored.append(len(x_nM)) or plain(x_nM, *rest, **more)
    )
    options["masks"] = masks
    found = walked(model, sequences, loss_fn, **options)
    wanted = {int(n) for i, m in enumerate(masks) for n in trie.path(i)[1:][torch.from_numpy(m)]}
    assert sum(scored) == len(wanted) < len(trie)
    pairs = zip(found[R + 1 :], truth[R + 1 :], strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-12
    with torch.no_grad():
        given = tree_logprobs(model, trie, **options), tree_logprobs(model, trie)
    for mask, few, every in zip(masks, *given, strict=True):
        assert (few - every)[torch.from_numpy(mask)].abs().sum() < 1e-10
        assert len(few) == len(mask)


@quick
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_chunk_that_no_mask_wants_passes_on_the_gradient_from_below(size, recompute):
    stem, model = [1, 2, 3, 4, 5, 6], TinyModel()
    sequences = tensors([stem + [7, 8], stem + [8, 9, 1], stem[:3] + [9, 9, 9, 2], [3, 3]])
    masks = [np.arange(len(x) - 1) >= k for x, k in zip(sequences, (5, 5, 2, 1), strict=True)]

    def loss_fn(i, logprobs, entropy):
        return (logprobs * torch.from_numpy(masks[i])).sum() * (i + 1)

    truth = walked(model, sequences, loss_fn)
    options = dict(max_tokens=size, recompute=recompute, masks=masks)
    assert worst(walked(model, sequences, loss_fn, **options)[5:], truth[5:]) < 1e-13


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("critic", [False, True])
def test_a_loss_of_all_sequences_of_a_chunk_is_the_sum_of_theirs(critic, size):
    model, sequences = models.tiny_model("qwen3"), random_forest(5) + tensors([[0], [1, 1, 1]] * 2)
    if critic:
        model.add_value_head()
    calls = []

    def together(some, *scores):
        calls.extend(some)
        lengths = [len(sequences[i]) - 1 for i in some]
        assert all((x[n:] == 0).all() for y in scores for x, n in zip(y, lengths, strict=True))
        parts = zip(*([x[:n] for x, n in zip(y, lengths, strict=True)] for y in scores))
        return sum(example_loss(i, *part) for i, part in zip(some, parts, strict=True))

    options = dict(max_tokens=size, temperature=0.7)
    truth = walked(model, sequences, **options)
    found = walked(model, sequences, together, batched=True, **options)
    assert sorted(calls) == list(range(len(sequences)))
    assert relative(found[0], truth[0]) < 1e-12
    assert max((a - b).abs().max() for a, b in zip(found, truth) if len(a.shape) > 1) < 1e-13
    with pytest.raises(NonFiniteLoss, match="loss of sequences"):
        walked(model, sequences, lambda some, lp, *_: lp.sum() * math.nan, batched=True, **options)


def test_the_loss_is_called_once_for_each_sequence_with_its_own_vectors():
    sequences, seen = tensors([[3, 1, 2], [3], [3, 1, 2], [3, 1]]), {}

    def loss_fn(i, logprobs, entropy):
        assert i not in seen
        seen[i] = len(logprobs), len(entropy), logprobs.requires_grad
        return torch.tensor(float(i))  # no gradient is fine

    for size in (None, 1):
        seen.clear()
        assert tree_backward(TinyModel(), TokenTrie(sequences), loss_fn, max_tokens=size).loss == 6
        assert seen == {0: (2, 2, True), 1: (0, 0, True), 2: (2, 2, True), 3: (1, 1, True)}
    assert tree_backward(TinyModel(), TokenTrie(sequences), lambda i, *x: 1.5).loss == 6


def test_two_calls_accumulate_like_one():
    model, sequences = TinyModel(), random_forest(4)

    def twice(model):
        for first, some in ((0, sequences[:5]), (5, sequences[5:])):
            loss = lambda i, *x, first=first: linear_loss(i + first, *x)  # noqa: E731
            result = tree_backward(model, TokenTrie(some), loss, max_tokens=3)
        return result

    P = len([*model.parameters()])
    found, truth = outcome(model, twice)[0], walked(model, sequences, linear_loss)
    assert worst(found[-P:], truth[-P:]) < 1e-13


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


FAILING = {
    raises: (KeyError, "from loss_fn"),
    nan: (NonFiniteLoss, "the loss of sequence 7 is nan"),
    nan_gradient: (NonFiniteLoss, "sequence 7 is .*, its gradient is not finite"),
    vector: (ValueError, "expected one number from loss_fn.*sequence 7"),
}


@pytest.mark.parametrize("size", shortened([None, 4], 4))
@pytest.mark.parametrize("loss_fn", FAILING, ids=lambda loss_fn: loss_fn.__name__)
def test_a_failure_in_the_middle_leaves_nothing_behind(loss_fn, size):
    model, sequences = TinyModel(), random_forest(1, count=14)
    truth = walked(model, sequences, linear_loss, max_tokens=size)
    before = [torch.ones_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), before, strict=True):
        p.grad = grad
    with pytest.raises(FAILING[loss_fn][0], match=FAILING[loss_fn][1]):
        tree_backward(model, TokenTrie(sequences), loss_fn, max_tokens=size)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert p.grad is grad and (grad == 1).all()
    assert worst(walked(model, sequences, linear_loss, max_tokens=size), truth) == 0

    # Where nobody may stop, NaN goes on into the gradient.
    if loss_fn is nan:
        found = walked(model, sequences, nan, max_tokens=size, check_finite=False)
        assert not all(x.isfinite().all() for x in found[-len(before) :])


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
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("model.layers.1", "lm_head")))
    truth = flat(model, sequences)
    with torch.no_grad():
        found = walked(model, sequences, max_tokens=3, recompute=True)
    assert worst(found, truth) < 1e-10


@quick
def test_nothing_is_an_ordinary_case():
    model, trie = TinyModel(), TokenTrie([])
    result = tree_backward(model, trie, example_loss, max_tokens=3)
    assert result.loss == 0 and result.logprobs == []
    assert [x.shape for x in tree_scores(model, trie, padded=True)] == [(0, 0)] * 2
    assert tree_scores(model, trie) == [] and draw(trie) == "" and partition_tree(trie) == []
    assert all(p.grad is None for p in model.parameters())
    assert partition([], 3) == [[], [], []]


# Mixtures of experts ---------------------------------------------------------------------------


def with_balance(model, sequences, coef):
    """The flat batch with models.Balance, one sequence at a time: aux loss and expert counts."""
    total, counts = 0.0, {}
    for i, x in enumerate(sequences):
        balance = models.Balance(torch.zeros(len(x)).long(), coef=coef)
        hidden = model.hidden(x[None], balance=balance)[0]
        example_loss(i, *model.logprobs(hidden[:-1], x[1:])).backward()
        total += sum(balance.losses.values())
        for layer, n in balance.counts.items():
            counts[layer] = counts.get(layer, 0) + n
    return total, [], counts


@few_or_every
@pytest.mark.parametrize("name", ["lone", "duplicates", "prefixes", "caterpillar", "forest"])
def test_the_auxiliary_loss_counts_tokens_as_the_flat_batch_does(name, chunks):
    model = models.tiny_model("qwen3_moe", num_hidden_layers=3)
    sequences = tensors((forests() | {"lone": [[3], [3], [4, 5, 6]]})[name])
    (_, *truth), (aux, _, counts) = outcome(model, with_balance, sequences, 0.3)
    P = len(truth)
    assert worst(flat(model, sequences)[-P:], truth) > 1e-4  # it matters
    for size, recompute in chunks:
        options = dict(max_tokens=size, recompute=recompute, aux_coef=0.3)
        given = tree_backward, TokenTrie(sequences), example_loss
        found, result = outcome(model, *given, **options)
        assert worst(found[-P:], truth) < 1e-10 and abs(result.aux_loss - aux) < 1e-12
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
    errors = {size: [] for size in ("flat", *sizes)}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        prompt = rng.integers(0, 53, 96)
        star = [np.append(prompt, rng.integers(0, 53, 24)) for _ in range(8)]
        low = models.tiny_model(kind, seed=seed, dtype=torch.bfloat16, hidden_size=64)
        P = len([*low.parameters()])
        for sequences in (star, [prompt[:n] for n in range(12, 97, 12)]):
            sequences = tensors(sequences)
            results = {"flat": flat(low, sequences, linear_loss)}
            for size in sizes:
                results[size] = walked(low, sequences, linear_loss, max_tokens=size)
            truth = flat(copy.deepcopy(low).float(), sequences, linear_loss)
            joined = lambda some: torch.cat([x.flatten() for x in some[-P:]])  # noqa: E731
            for way, found in results.items():
                errors[way].append(relative(joined(found), joined(truth).double()))
    for size in sizes:
        assert np.linalg.norm(errors[size]) <= 1.1 * np.linalg.norm(errors["flat"]), size


def peak(model, trie, **options):
    """Bytes that tree_backward held, beyond the parameters' gradients."""
    model.zero_grad()
    with LiveBytes() as live:
        tree_backward(model, trie, linear_loss, **options)
    return live.peak - sum(p.grad.nbytes for p in model.parameters())


def peak_of_scores(model, trie, **options):
    with LiveBytes() as live, torch.no_grad():
        tree_scores(model, trie, **options)
    return live.peak - 16 * len(trie)  # what it returns


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
    few, many = (peak_of_scores(model, stars(range(n)), max_tokens=32) for n in (8, 32))
    assert 0.9 * few < many < 1.1 * few < 0.5 * peak_of_scores(model, stars(range(64)))


def test_a_path_grows_by_its_keys_and_values_and_their_gradients():
    """MEMORY: and by what the lowest chunk makes of them: copies, and scores where they are capped.

    That is 10.4 times the bytes of the keys and values. They are a part of a matrix that holds the
    queries too: a value that kept all of it alive would make it 11.9 times.
    """
    model = TinyModel(layers=4)
    paths = {n: TokenTrie([np.append(np.zeros(n, int), k) for k in (1, 2)]) for n in (330, 660)}
    held = {n: peak(model, trie, max_tokens=30, recompute=True) for n, trie in paths.items()}
    keys_and_values = 330 * 4 * 2 * (2 * 4) * 8
    assert 9 < (held[660] - held[330]) / keys_and_values < 11


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


def wrong(model=None, **parts):
    """A model with one thing that a tree cannot have."""
    model = TinyModel() if model is None else model
    for name, part in parts.items():
        setattr(model, name, part)
    return model


class LinearAttention(nn.Module):
    pass


def numbered(tokens, /, *, positions=None, attention=None):
    """Both layers call attention with the number 0."""
    zero = lambda *x, layer, **options: attention(*x, layer=0, **options)  # noqa: E731
    return TinyModel().hidden(tokens, positions=positions, attention=zero)


def deaf(tokens, /, *, positions=None, attention=None):
    return TinyModel().hidden(tokens, positions=positions)


LINEAR = types.SimpleNamespace(layer_types=["linear_attention"])
TWO = [[1, 2, 3], [1, 4, 5]]


@pytest.mark.parametrize(
    "model, sequences, options, message",
    [
        (wrong(drop=nn.Dropout(0.1)), TWO, {}, "drop drops out with p = 0.1.*model.eval"),
        (wrong(mix=nn.Conv1d(1, 1, 3)), TWO, {}, "mix is Conv1d: it mixes tokens in another way"),
        (wrong(mix=nn.GRU(2, 2)), TWO, {}, "mix is GRU"),
        (wrong(mix=LinearAttention()), TWO, {}, "mix is LinearAttention"),
        (wrong(config=LINEAR), TWO, {}, "linear_attention.*not all are causal softmax"),
        (wrong(hidden=deaf), TWO, {}, "TinyModel.hidden never called `attention`"),
        (wrong(hidden=numbered), TWO, {}, "two layers call attention with layer=0"),
        (nn.Linear(2, 2), TWO, {}, "Linear must have .hidden"),
        (TinyModel(), TWO, dict(masks=[[True, True]]), "got 1 masks for 2 sequences"),
        (TinyModel(), TWO, dict(masks=[[True, True], [True]]),
         r"mask 1: expected shape \(2,\), got \(1,\)"),
        (models.tiny_model("qwen3"), [[1, 2], [3, 53]], {},
         "sequence 1 has the token id 53; ids are below 53"),
        (models.tiny_model("qwen3"), TWO, dict(aux_coef=0.1), "the model has no router; leave 0"),
        (models.tiny_model("qwen3", max_position_embeddings=8), [[1], [1] * 9], {},
         "sequence 1 has 9 tokens, the model's limit is 8"),
    ],
)  # fmt: skip
def test_what_a_tree_cannot_train_is_refused(model, sequences, options, message):
    trie = TokenTrie(sequences)
    with pytest.raises(ValueError, match=message):
        tree_backward(model, trie, linear_loss, max_tokens=2, **options)
    assert all(p.grad is None for p in model.parameters())
    if not options:
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            tree_scores(model, trie, max_tokens=2)


def test_other_calls_that_cannot_be_are_refused():
    model, trie = TinyModel(), TokenTrie(TWO)
    with pytest.raises(ValueError, match="expected a TokenTrie, got list"):
        tree_backward(model, TWO, linear_loss)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        tree_backward(TinyModel().requires_grad_(False), trie, linear_loss)
    with torch.inference_mode(), pytest.raises(ValueError, match="use tree_scores"):
        tree_backward(model, trie, linear_loss)
    with pytest.raises(ValueError, match="call tree_scores under torch.no_grad"):
        tree_logprobs(model, trie, max_tokens=2)
    for fine in (wrong(drop=nn.Dropout(0.0)), wrong(drop=nn.Dropout(0.1)).eval()):
        tree_backward(fine, trie, linear_loss)  # it drops nothing


# Checkpoints -----------------------------------------------------------------------------------


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
        return tree.check_logprobs(self, states_nM, targets_n, temperature)


@quick
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_reentrant_checkpoint_of_whole_layers_is_refused(recompute):
    """It loses the gradient of keys that chunks below read; where none is below, it is fine."""
    model, sequences = CheckpointedLayers(False), random_forest(0)
    truth = flat(model, sequences)
    options = dict(max_tokens=4, recompute=recompute)
    assert worst(walked(model, sequences, **options), truth) < 1e-10

    model.reentrant = True
    assert worst(walked(model, sequences), truth) < 1e-10
    with pytest.raises(ValueError, match="reentrant checkpoint.*pass use_reentrant=False"):
        walked(model, sequences, **options)
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        tree_scores(model, TokenTrie(sequences), max_tokens=4)  # nobody wants a graph here


# Partition -------------------------------------------------------------------------------------


def contiguous(order, world):
    """Every way to cut the order into `world` stretches, empty ones too."""
    for cuts in itertools.combinations_with_replacement(range(len(order) + 1), world - 1):
        edges = [0, *cuts, len(order)]
        yield [order[a:b] for a, b in itertools.pairwise(edges)]


@quick
@pytest.mark.parametrize("again", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_dfs_partition_is_the_best_of_all_contiguous_ones(seed, again):
    sequences, cost = random_forest(seed, count=9, longest=12), Cost(1.0, 0.05, again)

    def largest(shares):
        return max(modeled_time(TokenTrie([sequences[i] for i in x]), cost) for x in shares)

    order = sum(partition(sequences, 1), [])
    assert order == TokenTrie(sequences).order
    for world in (1, 2, 3, 4):
        shares = partition(sequences, world, cost=cost)
        assert sum(shares, []) == order and len(shares) == world
        best = min(largest(x) for x in contiguous(order, world))
        assert largest(shares) <= best * (1 + 1e-6)


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
    tokens_of = lambda shares: [len(TokenTrie([dealt[i] for i in x])) for x in shares]  # noqa: E731
    for world in (2, 4, 8):
        tokens = tokens_of(partition(dealt, world))
        assert sum(tokens) == len(TokenTrie(dealt))  # no prompt twice
        assert max(tokens) < 1.01 * min(tokens)
        for other in (longest_first(dealt, world), partition(dealt, world, strategy="round_robin")):
            assert max(tokens_of(other)) > 1.2 * max(tokens)


# Commands --------------------------------------------------------------------------------------


def test_check_fails_where_a_gradient_is_wrong(monkeypatch, capsys):
    def slightly_wrong(model, *given, **options):
        result = tree_backward(model, *given, **options)
        next(model.parameters()).grad *= 1 + 1e-8
        return result

    monkeypatch.setattr(tree, "tree_backward", slightly_wrong)
    few = {"forks at the end": forests()["forks at the end"]}
    monkeypatch.setattr(tree, "forests", lambda: few)
    monkeypatch.setitem(sys.modules, "measure_tree", None)  # an ImportError: no families
    assert tree.check() == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if "forks at the end" in x)
    assert line.endswith("FAILED")


@quick
def test_plan_prints_tree_chunks_and_partition(tmp_path, capsys):
    def printed(sequences):
        (tmp_path / "x.json").write_text(json.dumps(sequences))
        argv = ["plan", str(tmp_path / "x.json"), "--max-tokens", "3", "--world", "2"]
        assert tree.main(argv) == 0
        return capsys.readouterr().out

    out = printed([[1, 2, 3], [1, 2, 4], [7]])
    assert "+- 1 2" in out and "tree_tokens 5" in out and "sequences [1, 2]" in out

    # A path of ten in chunks of three: four to list, and one call where the graphs are kept.
    out = printed([list(range(10))])
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

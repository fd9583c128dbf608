"""tree_attention.py on one process: the tree, attention, chunks, the walk, the partition."""

import copy
import functools
import gc
import itertools
import math
import sys

import numpy as np
import pytest
import torch
from conftest import shortened
from oracles import FLASH, LiveBytes, Watch, worst
from oracles import draw as draw_qkv
from torch import nn
from torch.autograd import grad as grad_of
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from check_attention import (
    TinyModel, example_loss, family_rows, forests, outcome, relative, tree_rows,
)  # fmt: skip
from full.attention.attend import WIDTH, attend_short
from full.attention.masks import Mask
from full.tiny import tiny_model
from full.tree.chunks import tree_backward, tree_scores
from full.tree.trie import TokenTrie, partition, partition_tree
from tree_attention import definition

quick = pytest.mark.quick


@pytest.fixture(params=[0, 128], ids=["boxes", "groups"])
def grouped(request, monkeypatch):
    """Whether paths count as short: their tokens attend in groups then, and else in boxes."""
    monkeypatch.setattr("full.attention.attend.SHORT", request.param)
    return request.param > 0


def tree_attention(q, k, v, /, trie, *, scale=None, window=None):
    """Attention of every token of a tree to its ancestors and itself, as a run's layers have it."""
    return attend_short(q, k, v, trie.row_mask(len(trie)).with_window(window), scale=scale)[0]


def random_forest(seed, count=12, longest=9, letters=2):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest + 1, count)
    return [torch.tensor(rng.integers(0, letters, n).tolist()) for n in sizes]


def shape(name):
    return [torch.tensor(x) for x in SHAPES[name]]


STEM = np.random.default_rng(0).integers(0, 10, 150).tolist()
SHAPES = forests() | {
    "nested": [STEM[:n] + [10, n % 10] for n in range(2, 150, 10)],
    "lone": [[3], [3], [4, 5, 6]],
}


def flat(model, sequences, loss_fn=example_loss, **options):
    """The outcome of every sequence by itself."""
    return outcome(model, definition, sequences, loss_fn, **options)


def walked(model, sequences, loss_fn=example_loss, **options):
    """The outcome of a walk."""
    return outcome(model, tree_backward, TokenTrie(sequences), loss_fn, **options)


def tree_logprobs(model, trie, **options):
    return [score[0] for score in tree_scores(model, trie, **options)]


def grads_in(found, model):
    return found[-len([*model.parameters()]) :]


def linear_loss(i, logprobs, entropy):
    """A loss whose gradient is a fixed weight of each token of each sequence, and no entropy."""
    return (torch.cos(torch.arange(len(logprobs)) * 1.0 + i).to(logprobs) * logprobs).sum()


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
        assert torch.equal(trie.row_mask(len(trie)).with_window(window).dense()[0, 0], sees)

    # The order of the input changes nothing, and the input is not changed.
    shuffled = [sequences[i] for i in torch.randperm(len(sequences))]
    again, after = TokenTrie(shuffled), random_forest(seed, letters=1 + seed % 4)
    for name in ("tokens", "positions", "subtree_end", "parent"):
        assert torch.equal(getattr(trie, name), getattr(again, name))
    assert all(torch.equal(x, y) for x, y in zip(sequences, after, strict=True))


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
    finally:
        sys.setrecursionlimit(limit)


class AttentionOnly(nn.Module):
    """A token's q, k, v are the rows of its id; its score is its parent's output, weighted."""

    def __init__(self, q, k, v, weight):
        super().__init__()
        self.qkv = nn.ParameterList(x.detach() for x in (q, k, v))
        self.weight = weight  # (1, H, N, D), by the id of the token that is scored

    def hidden(self, tokens, /, *, positions=None, attention=None):
        q, k, v = (x[:, :, tokens[0]] for x in self.qkv)
        return attention(q, k, v, layer=0, scale=0.3).transpose(1, 2).flatten(2)

    def logprobs(self, states_nM, targets_n, /, *, temperature=1.0):
        weight_nM = self.weight[0].transpose(0, 1)[targets_n].flatten(1)
        logprobs_n = (states_nM * weight_nM).sum(-1)
        return logprobs_n, 0 * logprobs_n


@pytest.mark.parametrize("size", [None, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tree_attention_in_low_precision_is_as_good_as_plain_torch(dtype, grouped, size):
    """Of the whole tree, and of chunks of up to 24 tokens, whose first one has 48 above it."""
    spine = torch.arange(96)
    sequences = [spine, torch.cat([spine[:40], torch.arange(96, 120)])]
    trie = TokenTrie(sequences)
    assert trie.tokens.tolist() == list(range(120))
    leaves, dout = draw_qkv(120, batch=1, groups=4, width=16, dtype=dtype)
    mask = trie.row_mask(len(trie)).dense()

    def gradients(model, attention):
        out = attention(*model.qkv)
        scored = model.weight[:, :, trie.tokens[trie.parent >= 0]]
        return grad_of(out[:, :, trie.parent[trie.parent >= 0]], [*model.qkv], scored)

    def plain(q, k, v):
        return scaled_dot_product_attention(q, k, v, mask, scale=0.3)

    def once(i, logprobs, entropy):  # the two sequences share 40 tokens
        return logprobs[39 * i :].sum()

    model = AttentionOnly(*leaves, dout)
    exact = AttentionOnly(*(x.double() for x in leaves), dout.double())
    truth, theirs = gradients(exact, plain), gradients(model, plain)
    if size is None:
        ours = gradients(model, lambda *x: tree_attention(*x, trie, scale=0.3))
    else:
        tree_backward(model, trie, once, max_tokens=size, recompute=True)
        ours = [x.grad for x in model.qkv]

    # Groups compute in float32; plain torch, like a box, rounds the weights of a bf16 tile.
    most = 0.9 if grouped and dtype != torch.float32 else 1.2
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert a.dtype == dtype and relative(a, c) <= most * relative(b, c)


@quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_keys_are_summed_in_float32_or_better(dtype):
    """Branches of weight 4096, 1, .., 1, -4096 below a prompt: 4096 + 1 is 4096 in both dtypes."""
    branches = 40
    leaves, weight = draw_qkv(3 + 2 * branches, batch=1, dtype=dtype)
    for x in (*leaves, weight):  # the branches are equal but for their ids
        x.data[:, :, 3:] = x.data[:, :, 3:5].repeat(1, 1, branches, 1)
    trie = TokenTrie([[0, 1, 2, 3 + 2 * n, 4 + 2 * n] for n in range(branches)])
    factors = [4096.0, *[1.0] * (branches - 2), -4096.0]

    def of_the_prompt(dtype, size):
        model = AttentionOnly(*(x.to(dtype) for x in leaves), weight.to(dtype))
        loss = lambda i, logprobs, _: factors[i] * logprobs[3]  # noqa: E731
        tree_backward(model, trie, loss, max_tokens=size)
        return [x.grad[:, :, :3] for x in model.qkv[1:]]

    found, truth = of_the_prompt(dtype, 3), of_the_prompt(torch.float64, None)
    assert worst(found, truth) < 0.02


@pytest.mark.parametrize("window", [None, 2])
def test_a_huge_token_reaches_its_own_paths_only(grouped, window):
    """Its own query, and the keys and values that it sees. What is masked has a weight of 0."""
    trie = TokenTrie([[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8]])
    leaves, dout = draw_qkv(len(trie), batch=1, dtype=torch.float32)
    spoilt = int(trie.path(1)[2])  # token 5 sees 1, 2 and itself; itself and 6 see it

    def run(leaves, dout):
        out = tree_attention(*leaves, trie, window=window)
        return out.detach(), *grad_of(out, leaves, dout)

    sees = trie.row_mask(len(trie)).with_window(window).dense()[0, 0]
    keys = [leaves[0], *(x.detach().clone().requires_grad_() for x in leaves[1:])]
    huge = dout.clone()
    for x in (*keys[1:], huge):
        x.data[0, :, spoilt] = 1e30
    own, seen = torch.arange(len(trie)) == spoilt, sees[spoilt]
    clean, found = run(leaves, dout), [run(keys, dout)[0], *run(leaves, huge)[1:]]
    for old, new, reached in zip(clean, found, (sees[:, spoilt], own, seen, seen), strict=True):
        assert not torch.allclose(new[:, :, reached], old[:, :, reached])
        assert relative(new[:, :, ~reached], old[:, :, ~reached]) < 1e-6


def held_tokens(chunks):
    """The most tokens of chunks that are below each other: their graphs are held at once."""
    held = []
    for chunk in chunks:
        above = held[chunk.parent] if chunk.parent >= 0 else 0
        held.append(above + chunk.stop - chunk.start)
    return max(held)


# max_tokens: what the longest paths of chunks of forests 0 to 19 held, in all, when the
# chunks of a path could have subtrees of any fork on it.
HELD = {1: 276, 2: 282, 3: 291, 7: 405, 13: 607, 40: 1303}


@pytest.mark.parametrize("size", HELD)
def test_chunks_hold_each_token_once_and_joined_ones_hold_no_more(size):
    """And a forward pass by chunks is the one by sequences: it reads the paths above."""
    total, model = 0, TinyModel()
    for seed in range(20):
        trie = TokenTrie(random_forest(seed, count=25, longest=14))
        plain = partition_tree(trie, size)
        joined = partition_tree(trie, size, join_only_children=True)
        assert all(0 < chunk.stop - chunk.start <= size for chunk in plain)
        assert held_tokens(joined) == held_tokens(plain)
        total += held_tokens(plain)
        parents = [chunk.parent for chunk in joined if chunk.parent >= 0]
        assert all(parents.count(parent) > 1 for parent in parents)  # none is an only child
        if seed < min(8, 1 + size):
            with torch.no_grad():
                found = tree_logprobs(model, trie, max_tokens=size)
                assert worst(found, tree_logprobs(model, trie)) < 1e-12
    assert total <= HELD[size]


TWO_ENDS = [[1, 2, 3] + [4] * 10, [1, 2, 3, 5, 5]]
CUTS = {  # sequences, max_tokens, and of each chunk its length, its parent, its depth
    "sibling subtrees are packed together": (
        [[1] * 10 + [k] * 5 for k in range(8)], np.int64(20),
        [20, 20, 10], [-1, 0, 0], [0, 10, 10]),
    # Other branches that fill the chunk end a path too: none of the largest branch would fit.
    "others fill the chunk": (TWO_ENDS, 5, [3, 5, 5, 2], [-1, 0, 1, 0], [0, 3, 8, 3]),
    "others leave room": (TWO_ENDS, 6, [6, 6, 3], [-1, 0, 1], [0, 6, 12]),
}  # fmt: skip


@quick
@pytest.mark.parametrize("name", CUTS)
def test_where_a_tree_is_cut(name):
    sequences, size, *expected = CUTS[name]
    trie = TokenTrie(sequences)
    chunks = partition_tree(trie, size)
    depths = trie.positions[[x.start for x in chunks]].tolist()
    lengths = [x.stop - x.start for x in chunks]
    assert [lengths, [x.parent for x in chunks], depths] == expected


class Windowed(TinyModel):
    """All layers have one window."""

    window = None

    def layer_options(self, layer):
        return dict(window=self.window)


@quick
@pytest.mark.parametrize("window", [None, 5, 60])
def test_chunks_of_long_paths_are_the_definition(grouped, window):
    """In groups and in boxes: of 24 queries at depth 40 the first sees 41 keys."""
    model = Windowed()
    model.window = window
    spine = [torch.arange(n) % 7 for n in range(8, 89, 8)]
    sequences = [*spine, torch.cat([spine[7], torch.full((4,), 9)])]
    truth = flat(model, sequences)
    for size in (None, 24, 48):
        with Watch() as watch:
            found = walked(model, sequences, max_tokens=size, recompute=True)
        assert worst(found, truth) < 1e-12
        # Boxes have fewer or more rows than a group.
        assert any(args[0].shape[2] == WIDTH for args, _ in watch.calls(FLASH)) == grouped


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x == "nested" else quick) for x in SHAPES])
def test_each_shape_of_tree_has_the_gradients_of_the_flat_batch(name):
    """Each shape in one graph, and in chunks of each size, kept and run again; zeros would show."""
    ((_, line),) = tree_rows(TinyModel(), {name: SHAPES[name]})
    assert max(line.values()) < 1e-12, line
    truth = grads_in(flat(model := TinyModel(), shape(name)), model)
    assert name == "one token" or all(x.any() for x in truth)


@pytest.mark.slow
def test_every_family_of_models_has_the_gradients_of_the_flat_batch():
    """Some are rows of full/equivalence.py."""
    for kind, line in family_rows().items():
        assert max(line.values()) < 1e-10, kind


@quick
@pytest.mark.parametrize("size, recompute", [(None, False), (4, False), (1, True), (3, True)])
def test_masks_score_what_a_loss_uses_and_nothing_else(size, recompute):
    """Also where a chunk has nothing to score, and only passes on the gradient from below."""
    model, rng = tiny_model("qwen3"), np.random.default_rng(0)
    sequences = random_forest(3) + [torch.tensor([4, 4, 4, 5, 6, n, n]) for n in (1, 2)]
    trie, options = TokenTrie(sequences), dict(max_tokens=size, recompute=recompute)
    masks = [rng.random(len(x) - 1) < 0.4 for x in sequences[:-2]] + [np.arange(6) > 4] * 2

    def loss_fn(i, *scores):
        return linear_loss(i, *(torch.where(torch.from_numpy(masks[i]), x, 0.0) for x in scores))

    truth = walked(model, sequences, loss_fn, **options)
    scored, plain = [], model.logprobs
    model.logprobs = lambda x_nM, *rest, **more: (
        scored.append(len(x_nM)) or plain(x_nM, *rest, **more)
    )
    options["masks"] = masks
    found = walked(model, sequences, loss_fn, **options)
    wanted = {int(n) for i, m in enumerate(masks) for n in trie.path(i)[1:][torch.from_numpy(m)]}
    assert recompute or sum(scored) == len(wanted) < len(trie)
    pairs = zip(grads_in(found, model), grads_in(truth, model), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-12
    with torch.no_grad():
        given = tree_logprobs(model, trie, masks=masks, max_tokens=size), tree_logprobs(model, trie)
    for mask, few, every in zip(masks, *given, strict=True):
        assert (few - every)[torch.from_numpy(mask)].abs().sum() < 1e-10
        assert len(few) == len(mask)


@quick
def test_nothing_is_an_ordinary_case():
    model, trie = TinyModel(), TokenTrie([])
    result = tree_backward(model, trie, example_loss, max_tokens=3)
    assert result.loss == 0 and result.logprobs == []
    assert tree_scores(model, trie) == [] and partition_tree(trie) == []
    assert all(p.grad is None for p in model.parameters())
    assert partition([], 3) == [[], [], []]


@quick
def test_scores_of_a_batch_are_0_beyond_each_sequence():
    seen = []

    def loss(sequences, *scores_BT):
        assert sequences == [0, 1]
        seen.extend(x_BT[1, 1:] for x_BT in scores_BT)
        return scores_BT[0].sum()

    tree_backward(TinyModel(), TokenTrie([[1, 2, 3, 4], [1, 5]]), loss, max_tokens=9, batched=True)
    assert len(seen) == 2 and not torch.stack(seen).any()


def test_bf16_is_as_good_as_flat_bf16():
    """Root mean square over seeds and shapes: one case alone is +-10 % by the roundings' luck."""
    errors = {size: [] for size in ("flat", None, 32)}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        prompt = torch.from_numpy(rng.integers(0, 53, 96))
        star = [torch.cat([prompt, torch.from_numpy(rng.integers(0, 53, 24))]) for _ in range(8)]
        low = tiny_model("qwen3", seed=seed, dtype=torch.bfloat16, hidden_size=64)
        exact = copy.deepcopy(low).float()
        for sequences in (star, [prompt[:n] for n in range(12, 97, 12)]):
            truth = flat(exact, sequences, linear_loss)
            for way, found_of in errors.items():
                found = flat(low, sequences, linear_loss) if way == "flat" else walked(
                    low, sequences, linear_loss, max_tokens=way)  # fmt: skip
                both = (nn.utils.parameters_to_vector(grads_in(x, low)) for x in (found, truth))
                found_of.append(relative(*both))
    flat_norm, *norms = (np.linalg.norm(x) for x in errors.values())
    assert max(norms) <= 1.1 * flat_norm


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


def star(leaves):
    return TokenTrie([np.append(np.arange(200) % 50, [k, *range(31)]) for k in range(leaves)])


@pytest.mark.parametrize("recompute", shortened([False, True], True))
def test_memory_does_not_depend_on_the_number_of_leaves(recompute):
    model = tiny_model("qwen3_moe", dtype=torch.float32, hidden_size=64, vocab_size=101)
    few, many = (peak(model, star(n), max_tokens=32, recompute=recompute) for n in (4, 16))
    assert few <= many < 1.1 * few
    assert peak(model, star(64)) > 4 * many  # all at once, it does
    few, many = (peak_of_scores(model, star(n), max_tokens=32) for n in (4, 16))
    assert 0.9 * few < many < 1.1 * few < 0.5 * peak_of_scores(model, star(64))


def test_a_path_grows_by_its_keys_and_values_and_their_gradients():
    """MEMORY: when the loss is called, by keys and values; a chunk of leaves has no graph.

    Keys and values are a part of a matrix that holds the queries too. A value that kept all of it
    alive would show. At the peak there are their gradients, and sums, and what a kernel makes.
    """
    model, held = Windowed(), {}
    for name in ("qkv", "out"):  # 4 layers instead of 2
        setattr(model, name, nn.Parameter(getattr(model, name).detach().repeat(2, 1, 1)))
    for n in (330, 660):
        trie = TokenTrie([np.append(np.zeros(n, int), k) for k in (1, 2)])
        model.zero_grad()
        with LiveBytes() as live:

            def loss(i, logprobs, entropy):
                held[n] = live.now  # noqa: B023
                return linear_loss(i, logprobs, entropy)

            tree_backward(model, trie, loss, max_tokens=30, recompute=True)
        held["peak", n] = live.peak
    keys_and_values = 330 * 4 * 2 * (2 * 4) * 8
    assert 1.0 < (held[660] - held[330]) / keys_and_values < 1.2
    assert 3.5 < (held["peak", 660] - held["peak", 330]) / keys_and_values < 3.7


def test_a_walk_leaves_nothing_for_the_garbage_collector():
    """MEMORY: what a chunk held is freed when it is done, not when Python looks for cycles."""
    model, trie = tiny_model("gemma3_text"), TokenTrie(random_forest(0))
    tree_backward(model, trie, linear_loss, max_tokens=4)
    gc.collect()
    gc.disable()
    try:
        for recompute in (False, True):
            tree_backward(model, trie, linear_loss, max_tokens=4, recompute=recompute)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            assert not any(isinstance(x, torch.Tensor | Mask) for x in gc.garbage)
            gc.set_debug(0)
            gc.garbage.clear()
    finally:
        gc.set_debug(0)
        gc.enable()


@quick
def test_a_path_in_chunks_makes_two_kernel_calls_a_chunk_and_layer(monkeypatch):
    """Where paths are long: a rectangle of the keys above, and a triangle; no mask in either."""
    monkeypatch.setattr("full.attention.attend.SHORT", 0)
    model = tiny_model("qwen3")
    layers = model.config.num_hidden_layers
    path = TokenTrie([np.arange(n) % 11 for n in range(5, 1025, 5)])
    with Watch() as watch:
        tree_backward(model, path, example_loss, max_tokens=256, recompute=True)
    assert not any(options.get("attn_mask") for _, options in watch.calls(FLASH))

    # Forward: the first chunk has nothing above it. Three chunks run twice, the last one once.
    assert len(watch.calls(FLASH)) == layers * (2 * 1 + 2 * 2 * 2 + 2)

    # The backward cuts a triangle of 256 into one of 128, a square and another triangle.
    assert len(watch.calls(f"{FLASH}_backward")) == layers * (3 + 3 * 4)

    # With all graphs kept, a chunk joins its only child: the path is one call.
    with Watch() as watch:
        tree_backward(model, path, example_loss, max_tokens=256)
    assert len(watch.calls(FLASH)) == layers


@quick
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_reentrant_checkpoint_of_whole_layers_is_refused(recompute):
    """It loses the gradient of keys that chunks below read; where none is below, it is fine.

    So it is around attention alone. The walk's callable runs again then.
    """
    model, sequences = tiny_model("qwen3"), random_forest(0)
    truth, options = flat(model, sequences), dict(max_tokens=4, recompute=recompute)
    hidden, forwards = model.hidden, [layer.forward for layer in model.model.layers]

    def around_attention(tokens, /, *, positions=None, attention=None):
        def again(*qkv, **options):
            run = functools.partial(attention, **options)
            return checkpoint(run, *qkv, use_reentrant=True)

        return hidden(tokens, positions=positions, attention=again)

    model.hidden = around_attention
    assert worst(walked(model, sequences, **options), truth) < 1e-10
    model.hidden = hidden
    for use_reentrant in (False, True):
        for layer, forward in zip(model.model.layers, forwards, strict=True):
            layer.forward = functools.partial(checkpoint, forward, use_reentrant=use_reentrant)
        assert worst(walked(model, sequences), truth) < 1e-10
        if not use_reentrant:
            assert worst(walked(model, sequences, **options), truth) < 1e-10
    with pytest.raises(ValueError, match="reentrant checkpoint.*pass use_reentrant=False"):
        walked(model, sequences, **options)
    with torch.no_grad():
        tree_scores(model, TokenTrie(sequences), max_tokens=4)  # nobody wants a graph here


class LinearAttention(nn.Module):
    pass


def numbered(tokens, /, *, positions=None, attention=None):
    """Both layers call attention with the number 0."""
    zero = lambda *x, layer, **options: attention(*x, layer=0, **options)  # noqa: E731
    return TinyModel().hidden(tokens, positions=positions, attention=zero)


def deaf(tokens, /, *, positions=None, attention=None):
    return TinyModel().hidden(tokens, positions=positions)


WRONG = [  # one thing of a model that a tree cannot have, and what is said of it
    (dict(drop=nn.Dropout(0.1)), "drop drops out with p = 0.1.*model.eval"),
    (dict(mix=nn.Conv1d(1, 1, 3)), "mix is Conv1d: it mixes tokens in another way"),
    (dict(mix=nn.GRU(2, 2)), "mix is GRU"), (dict(mix=LinearAttention()), "mix is LinearAttention"),
    (dict(hidden=deaf), "TinyModel.hidden never called `attention`"),
    (dict(hidden=numbered), "two layers call attention with layer=0"),
]  # fmt: skip


@pytest.mark.parametrize("parts, message", WRONG)
def test_a_model_that_a_tree_cannot_train_is_refused(parts, message):
    model, trie = TinyModel(), TokenTrie([[1, 2, 3], [1, 4, 5]])
    for name, part in parts.items():
        setattr(model, name, part)
    with pytest.raises(ValueError, match=message):
        tree_backward(model, trie, linear_loss, max_tokens=2)
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        tree_scores(model, trie, max_tokens=2)
    if "drop" in parts:  # what drops nothing is fine
        tree_backward(model.eval(), trie, linear_loss)


def contiguous(order, world):
    """Every way to cut the order into `world` stretches, empty ones too."""
    for cuts in itertools.combinations_with_replacement(range(len(order) + 1), world - 1):
        edges = [0, *cuts, len(order)]
        yield [order[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("seed", shortened(range(6), 0, 1))
def test_dfs_partition_is_the_best_of_all_contiguous_ones(seed, monkeypatch):
    sequences = random_forest(seed, count=9, longest=12)
    monkeypatch.setattr("full.tree.trie.TOKEN", 20)

    def largest(shares):
        tries = [TokenTrie([sequences[i] for i in x]) for x in shares]
        return max(len(t) + 0.05 * int((t.positions + 1).sum()) for t in tries)

    order = sum(partition(sequences, 1), [])
    assert order == TokenTrie(sequences).order
    for world in (1, 2, 3, 4):
        shares = partition(sequences, world)
        assert sum(shares, []) == order and len(shares) == world
        best = min(largest(x) for x in contiguous(order, world))
        assert largest(shares) <= best * (1 + 1e-6)

"""Chunks of a tree: only children that join, calls, what they hold, and their attention."""

import functools

import numpy as np
import pytest
import torch
from oracles import FLASH, Watch, worst
from test_tree import SIZES, flat, hang_right, one_graph, outcome, peak, random_forest
from test_tree import small_model, stars, walked
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import models
import tree_attention as tree
from tree_attention import TokenTrie, example_loss, partition_tree, tree_backward, tree_scores

quick = pytest.mark.quick
short_or_not = pytest.mark.parametrize("short", [0, 128])  # in boxes, or in groups


def held_tokens(chunks):
    """The most tokens of chunks that are below each other: their graphs are held at once."""
    held = []
    for chunk in chunks:
        above = held[chunk.parent] if chunk.parent >= 0 else 0
        held.append(above + chunk.stop - chunk.start)
    return max(held)


# What the longest paths of chunks held, in all, when pieces of a path could have subtrees of any
# fork on it in their chunk: forests 0 to 19, by max_tokens.
HELD = {1: 276, 2: 282, 3: 291, 7: 405, 13: 607, 40: 1303}


@quick
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


# A conversation that is trained on at each turn is one path. At a fork the walk goes down the
# largest branch first: chunks of 10, 10, 10, 10 and 2 tokens.
CHAIN = [torch.arange(n) % 11 for n in range(5, 41, 5)]
FORK = [torch.arange(30) % 11, torch.cat([torch.arange(10), torch.full((12,), 5)])]
CALLS = {  # name: (sequences, options of the walk, [(tokens of a call, with a graph or without)])
    "kept, whole": (CHAIN, dict(max_tokens=None), [(40, True)]),
    "kept, 10": (CHAIN, dict(max_tokens=10), [(40, True)]),
    "kept, 3": (CHAIN, dict(max_tokens=3), [(40, True)]),
    # Four chunks: three without a graph, then each with its own, from the last one up.
    "again, 10": (
        CHAIN, dict(max_tokens=10, recompute=True), [(10, False)] * 3 + [(10, True)] * 4),
    "again, 4": (CHAIN, dict(max_tokens=4, recompute=True), [(4, False)] * 9 + [(4, True)] * 10),
    "again, a fork": (
        FORK, dict(max_tokens=10, recompute=True),
        [(10, False), (10, False), (10, True), (10, True),  # down the long branch, and back
         (10, False), (2, True), (10, True),  # the other branch
         (10, True)]),  # the chunk above both
    # A scoring pass has no graph: there a chunk is all that bounds what a call holds.
    "scores": (CHAIN, None, [(10, False)] * 4),
}  # fmt: skip


@quick
@pytest.mark.parametrize("name", CALLS)
def test_a_path_is_one_call_or_chunks_that_run_again_where_others_are_below(name):
    sequences, options, expected = CALLS[name]
    model, calls = models.tiny_model("qwen3"), []
    hidden = model.hidden

    def counted(tokens, /, *, positions, attention):
        calls.append((tokens.shape[1], torch.is_grad_enabled()))
        return hidden(tokens, positions=positions, attention=attention)

    model.hidden = counted
    if options is None:
        with torch.no_grad():
            tree_scores(model, TokenTrie(sequences), max_tokens=10)
    else:
        tree_backward(model, TokenTrie(sequences), example_loss, **options)
    assert calls == expected


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3_text", "critic"])
def test_recomputation_changes_no_gradient_no_score_and_no_count(kind):
    """Long paths in small chunks: a router, windows, values; and masks that want few scores."""
    model = models.tiny_model("qwen3" if kind == "critic" else kind)
    if kind == "critic":
        nn.init.normal_(model.add_value_head().score.weight)
    sequences = [x.tolist() * 2 for x in random_forest(3, count=9, longest=12)]
    options = dict(aux_coef=0.3) if kind == "qwen3_moe" else {}
    options["masks"] = [torch.arange(len(x) - 1) % 3 == 0 for x in sequences]
    given = tree_backward, TokenTrie(sequences), example_loss
    truth, whole = outcome(model, *given, **options)
    for size in (1, 2, 5):
        for recompute in (False, True):
            found, result = outcome(model, *given, max_tokens=size, recompute=recompute, **options)
            assert worst(found, truth) < 1e-10
            assert worst([result.loss, *result.logprobs], [whole.loss, *whole.logprobs]) < 1e-12
            assert abs(result.aux_loss - whole.aux_loss) < 1e-12
            assert result.router_counts.keys() == whole.router_counts.keys()
            counts = whole.router_counts
            assert all(torch.equal(result.router_counts[x], counts[x]) for x in counts)


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


@quick
def test_gradients_of_keys_are_summed_in_float32_or_better():
    """In bf16, 256 + 1 is 256: so many equal branches below a prompt must not be lost."""
    model = models.tiny_model(
        "qwen3", vocab_size=400, num_hidden_layers=1, tie_word_embeddings=False
    )
    embedding = model.model.embed_tokens.weight
    embedding.data[50:] = embedding.data[50].clone()
    trie = TokenTrie([[1, 2, 3, k, 4] for k in range(50, 390)])

    def of_the_prompt(model, size):
        """Only the prompt's chunk has these tokens, so that its keys pass on all of it."""
        model.zero_grad()
        tree_backward(model, trie, lambda i, logprobs, _: logprobs[3], max_tokens=size)
        return embedding.grad[1:4].double()

    truth = of_the_prompt(model.double(), None)
    assert tree.ring.relative(of_the_prompt(model.bfloat16(), 3), truth) < 0.05


# Attention of a chunk --------------------------------------------------------------------------


class Windowed(tree.TinyModel):
    """All layers have one window, and none a softcap."""

    def layer_options(self, layer):
        return dict(window=self.window, softcap=None)


@quick
@pytest.mark.parametrize("window", [None, 5, 60])
@short_or_not
def test_attention_of_a_chunk_is_the_definition(monkeypatch, short, window):
    """In groups and in boxes: of 24 queries at depth 40 the first sees 41 keys."""
    monkeypatch.setattr(tree, "SHORT", short)
    model = Windowed()
    model.window = window
    spine = [torch.arange(n) % 7 for n in range(8, 89, 8)]
    sequences = [*spine, torch.cat([spine[7], torch.full((4,), 9)])]
    truth = flat(model, sequences)
    for size in (24, 32, 40, 48):
        with Watch() as watch:
            found = walked(model, sequences, max_tokens=size, recompute=True)
        assert worst(found, truth) < 1e-12
        rows = {args[0].shape[2] for args, _ in watch.calls(FLASH)}
        assert rows == {tree.WIDTH} if short else rows != {tree.WIDTH}


KEEPING = functools.partial(
    create_selective_checkpoint_contexts, [getattr(torch.ops.aten, FLASH).default]
)
CONTEXTS = {  # around attention, and so around the walk's callable, which runs again
    "recomputed": dict(use_reentrant=False),
    "reentrant": dict(use_reentrant=True),
    "the kernel's results kept": dict(use_reentrant=False, context_fn=KEEPING),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("context", CONTEXTS)
@short_or_not
def test_checkpoints_around_attention_change_no_gradient(monkeypatch, short, context):
    monkeypatch.setattr(tree, "SHORT", short)
    model, sequences = models.tiny_model("qwen3").double(), [*CHAIN, *random_forest(0)]
    truth, hidden = flat(model, sequences), model.hidden

    def checkpointed(tokens, /, *, positions=None, attention=None):
        def again(*qkv, **options):
            return checkpoint(lambda *x: attention(*x, **options), *qkv, **CONTEXTS[context])

        return hidden(tokens, positions=positions, attention=again)

    model.hidden = checkpointed
    for size in (None, 1, 10):
        for recompute in (False, True):
            found = walked(model, sequences, max_tokens=size, recompute=recompute)
            assert worst(found, truth) < 1e-10
    assert worst(outcome(model, one_graph, TokenTrie(sequences))[0], truth) < 1e-10


@quick
def test_a_path_in_chunks_makes_two_kernel_calls_a_chunk_and_layer(monkeypatch):
    """Where paths are long: a rectangle of the keys above, and a triangle; no mask in either."""
    monkeypatch.setattr(tree, "SHORT", 0)
    model = models.tiny_model("qwen3")
    layers = model.config.num_hidden_layers
    path = TokenTrie([np.arange(n) % 11 for n in range(5, 1025, 5)])
    with Watch() as watch:
        tree_backward(model, path, example_loss, max_tokens=256, recompute=True)
    assert not any(options.get("attn_mask") for _, options in watch.calls(FLASH))

    # Forward: the first chunk has nothing above it. Three chunks run twice, the last one once.
    assert len(watch.calls(FLASH)) == layers * (2 * 1 + 2 * 2 * 2 + 2)

    # The backward cuts a triangle of 256 into one of 128, a square and another triangle.
    assert len(watch.calls(f"{FLASH}_backward")) == layers * (3 + 3 * 4)

"""Trees on 2 to 4 gloo ranks, distributed or packed on a ring, against one process in float64."""

import pytest
import torch
import torch.distributed as dist
from test_ranks import ranks

import models
from ring_attention import relative
from tree_attention import (
    TinyModel,
    TokenTrie,
    definition,
    example_loss,
    forests,
    overlay,
    partition_tree,
    redistribute,
    tree_backward,
    tree_logprobs,
    tree_scores,
)


def sequences_of(name):
    return [torch.tensor(x) for x in forests()[name]]


def build(kind):
    return TinyModel() if kind == "tiny" else models.tiny_model(kind)


def flat(model, sequences):
    """Loss, log-probs and gradients of one process, sequence by sequence."""
    loss, logprobs = definition(model, sequences, example_loss, temperature=0.7)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return torch.as_tensor(loss), logprobs, grads


@torch.no_grad()
def sum_gradients(parameters):
    """.grad becomes the sum over the ranks; a rank that has none takes part with zeros."""
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)


def gradient_error(model, truth):
    return max(relative(p.grad, x) for p, x in zip(model.parameters(), truth, strict=True))


def _dealt(rank, kind, name, strategy, holders, max_tokens):
    """Train on this rank's share; the errors of the summed loss and gradient, and the shares."""
    model, sequences = build(kind), sequences_of(name)
    loss, logprobs, grads = flat(model, sequences)
    own = [i for i in range(len(sequences)) if i % holders == rank]
    data = [{"id": i, "logprobs": logprobs[i]} for i in own]  # as old log-probs would travel
    share, data = redistribute([sequences[i] for i in own], data, group=None, strategy=strategy)
    for x, item in zip(share, data, strict=True):
        assert torch.equal(x, sequences[item["id"]])
    result = tree_backward(
        model,
        TokenTrie(share),
        lambda k, *scores: example_loss(data[k]["id"], *scores),
        max_tokens=max_tokens,
        temperature=0.7,
    )
    for found, item in zip(result.logprobs, data, strict=True):
        assert relative(found, item["logprobs"]) < 1e-12
    lone = all(p.grad is None for p in model.parameters())
    sum_gradients(model.parameters())
    total = result.loss.clone()
    dist.all_reduce(total)
    ids = [item["id"] for item in data]
    return gradient_error(model, grads), relative(total, loss), ids, lone


DEALT = [(2, "dfs"), (2, "round_robin"), (4, "dfs")]
DEALT += [pytest.param(4, "round_robin", marks=pytest.mark.slow)]


@pytest.mark.parametrize("world, strategy", DEALT)
def test_the_sum_of_the_ranks_gradients_is_the_gradient(tmp_path, world, strategy):
    for name, holders in (("forest", world), ("prefixes", 1)):
        found = ranks(tmp_path, world, _dealt, "tiny", name, strategy, holders, 3)
        assert max(max(grad, loss) for grad, loss, *_ in found) < 1e-10
        assert sorted(sum((ids for *_, ids, _ in found), [])) == list(range(len(forests()[name])))


def test_redistribute_when_only_rank_0_has_data(tmp_path):
    found = ranks(tmp_path, 4, _dealt, "gemma3_text", "binary", "dfs", 1, None)
    assert max(max(grad, loss) for grad, loss, *_ in found) < 1e-10
    assert all(ids for *_, ids, _ in found)


def test_a_rank_without_a_share_takes_part_with_zeros(tmp_path):
    found = ranks(tmp_path, 4, _dealt, "tiny", "one sequence", "dfs", 1, 2)
    assert max(max(grad, loss) for grad, loss, *_ in found) < 1e-10
    assert [lone for *_, lone in found] == [False, True, True, True]


def _bad(rank, sequences, data):
    with pytest.raises(ValueError) as error:
        redistribute(sequences[rank], data[rank], group=None)
    return str(error.value)


@pytest.mark.parametrize(
    "sequences, data, message",
    [
        ([[[1]], [[1], [2]]], [["a"], ["b"]], "rank 1: 2 sequences, but data for 1; one for each"),
        ([[[1]], [[]]], [["a"], ["b"]], "rank 1: sequence 0: expected 1-D integers"),
        ([[[1]], [[2]]], [None, ["b"]], "rank 0: 'NoneType' object is not iterable"),
    ],
)
def test_one_ranks_mistake_is_an_error_on_every_rank(tmp_path, sequences, data, message):
    first, second = ranks(tmp_path, 2, _bad, sequences, data)
    assert first == second and message in first


def _on_a_ring(rank, kind, name, method, layout):
    """The packed tree over all ranks' ring: errors of log-probs and summed gradients."""
    model, sequences = build(kind), sequences_of(name)
    _, logprobs, grads = flat(model, sequences)
    trie = TokenTrie(sequences)
    across = dict(group=dist.group.WORLD, method=method, layout=layout)
    scores = tree_scores(model, trie, temperature=0.7, **across)
    sum(example_loss(i, *score) for i, score in enumerate(scores)).backward()
    sum_gradients(model.parameters())
    found = tree_logprobs(model, trie, temperature=0.7)  # no group: this process alone
    return [
        gradient_error(model, grads),
        max(relative(a[0], b) for a, b in zip(scores, logprobs, strict=True)),
        max(relative(a, b) for a, b in zip(found, logprobs, strict=True)),
    ]


ON_A_RING = [
    (2, "allgather", "contiguous"), (4, "ring", "zigzag"),
    pytest.param(2, "ring", "zigzag", marks=pytest.mark.slow),
    pytest.param(4, "allgather", "contiguous", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("world, method, layout", ON_A_RING)
def test_a_tree_on_a_ring_is_one_process(tmp_path, world, method, layout):
    for kind, name in (("tiny", "forest"), ("gemma3_text", "binary")):
        found = ranks(tmp_path, world, _on_a_ring, kind, name, method, layout)
        assert max(sum(found, [])) < 1e-10


def test_a_tree_of_fewer_tokens_than_ranks_and_ulysses(tmp_path):
    for name, method in (("one sequence", "ulysses"), ("star", "ulysses"), ("tiny", "ring")):
        found = ranks(tmp_path, 4, _short, name, method)
        assert max(found) < 1e-10


def _short(rank, name, method):
    model = TinyModel()
    sequences = [torch.tensor([3, 1, 2])] if name == "tiny" else sequences_of(name)
    _, logprobs, grads = flat(model, sequences)
    scores = tree_scores(
        model, TokenTrie(sequences), temperature=0.7, group=dist.group.WORLD, method=method
    )
    sum(example_loss(i, *score) for i, score in enumerate(scores)).backward()
    sum_gradients(model.parameters())
    return gradient_error(model, grads)


def _overlaid(rank, max_tokens):
    """Parents of this rank's chunks among all, how many calls, and the error of its gradient."""
    name = ("forest", "nothing", "binary")[rank]
    sequences = [] if name == "nothing" else sequences_of(name)
    trie, model, calls = TokenTrie(sequences), build("qwen3_moe"), []
    own = partition_tree(trie, max_tokens, join_only_children=True)
    chunks = overlay(own, dist.group.WORLD)
    real = [chunk for chunk in chunks if chunk.stop > chunk.start]
    assert [x[:2] for x in real] == [x[:2] for x in own]  # in the same order, all of them
    above = {x.start: own[x.parent][:2] if x.parent >= 0 else None for x in own}
    for b, chunk in enumerate(chunks):
        assert chunk.parent < b
        if chunk.stop > chunk.start:  # what was above a chunk still is
            parent = chunks[chunk.parent][:2] if chunk.parent >= 0 else None
            assert parent == above[chunk.start]
    hidden = model.hidden
    model.hidden = lambda *given, positions, attention, balance=None: (
        calls.append(1) or hidden(*given, positions=positions, attention=attention)
    )
    options = dict(max_tokens=max_tokens, lockstep=dist.group.WORLD, check_finite=False)
    tree_backward(model, trie, example_loss, temperature=0.7, **options)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    model.hidden, grads = hidden, [torch.zeros_like(p) for p in model.parameters()]
    if sequences:
        grads = flat(model, sequences)[2]
    scale = max(x.abs().max() for x in grads) if sequences else 1.0
    worst = max((a - b).abs().max() / scale for a, b in zip(found, grads, strict=True))
    return [chunk.parent for chunk in chunks], len(calls), float(worst)


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_ranks_with_other_trees_make_the_same_calls(tmp_path, max_tokens):
    parents, calls, errors = zip(*ranks(tmp_path, 3, _overlaid, max_tokens), strict=True)
    assert parents[0] == parents[1] == parents[2] and len(set(calls)) == 1
    assert calls[0] == len(parents[0]) and max(errors) < 1e-12

"""Trees on 2 to 4 gloo ranks, distributed or packed on a ring, against one process in float64."""

import pytest
import torch
import torch.distributed as dist
from conftest import complaint_of
from oracles import worst
from test_ranks import ranks

from full.check import TinyModel, example_loss, forests, relative
from full.chunks import redistribute, tree_backward
from full.micro_batches import masked_attention
from full.ring import indices
from full.tiny import tiny_model
from full.trie import TokenTrie
from tree_attention import definition

FORESTS = forests() | {"nothing": [], "short": [[3, 1, 2]]}


def case(kind, name):
    """A model, sequences, and their loss, log-probs and gradients, sequence by sequence."""
    model = TinyModel() if kind == "tiny" else tiny_model(kind)
    sequences = [torch.tensor(x) for x in FORESTS[name]]
    loss, logprobs = definition(model, sequences, example_loss, temperature=0.7)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return model, sequences, (torch.as_tensor(loss), logprobs, grads)


@torch.no_grad()
def summed_gradients(model):
    """The sums over ranks; a rank that has none takes part with zeros."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
    return [p.grad for p in model.parameters()]


def _dealt(rank, kind, name, strategy, holders, max_tokens):
    """Train on this rank's share; the error of the summed loss and gradient, and the share."""
    model, sequences, (loss, logprobs, grads) = case(kind, name)
    own = [i for i in range(len(sequences)) if i % holders == rank]
    data = [{"id": i, "logprobs": logprobs[i]} for i in own]  # as old log-probs would travel
    share, data = redistribute([sequences[i] for i in own], data, group=None, strategy=strategy)
    ids = [item["id"] for item in data]
    assert all(torch.equal(x, sequences[i]) for x, i in zip(share, ids, strict=True))
    options = dict(max_tokens=max_tokens, temperature=0.7)
    loss_fn = lambda k, *scores: example_loss(ids[k], *scores)  # noqa: E731
    result = tree_backward(model, TokenTrie(share), loss_fn, **options)
    for found, item in zip(result.logprobs, data, strict=True):
        assert relative(found, item["logprobs"]) < 1e-12
    lone, total = all(p.grad is None for p in model.parameters()), result.loss.clone()
    dist.all_reduce(total)
    return worst([total, *summed_gradients(model)], [loss, *grads]), ids, lone


DEALT = [
    *((2, "tiny", name, strategy, holders, 3) for strategy in ("dfs", "round_robin")
      for name, holders in (("forest", 2), ("prefixes", 1))),
    (4, "tiny", "forest", "dfs", 4, 3), (4, "tiny", "prefixes", "dfs", 1, 3),
    (4, "gemma3_text", "binary", "dfs", 1, None), (4, "tiny", "one sequence", "dfs", 1, 2),
]  # fmt: skip


@pytest.mark.parametrize("world, kind, name, strategy, holders, size", DEALT)
def test_the_sum_of_the_ranks_gradients_is_the_gradient(
    tmp_path, world, kind, name, strategy, holders, size
):
    """Of shares from all ranks, or from rank 0; a rank without a share takes part with zeros."""
    found = ranks(tmp_path, world, _dealt, kind, name, strategy, holders, size)
    assert max(error for error, *_ in found) < 1e-10
    ids = [ids for _, ids, _ in found]
    assert sorted(sum(ids, [])) == list(range(len(FORESTS[name])))
    # Without a share there are no gradients. A share of one token has none either: no target.
    has_target = [any(len(FORESTS[name][i]) > 1 for i in some) for some in ids]
    assert [lone for *_, lone in found] == [not some for some in has_target]
    assert name != "binary" or all(ids)


def _bad(rank, sequences, data):
    return complaint_of(redistribute, sequences[rank], data[rank], group=None)


@pytest.mark.parametrize(
    "sequences, data, message",
    [
        ([[[1]], [[1], [2]]], [["a"], ["b"]], "rank 1: 2 sequences, but data for 1; one for each"),
        ([[[1]], [[]]], [["a"], ["b"]], "rank 1: sequence 0: expected 1-D integers"),
        ([[[1]], [[2]]], [None, ["b"]], "rank 0: TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_one_ranks_mistake_is_an_error_on_every_rank(tmp_path, sequences, data, message):
    first, second = ranks(tmp_path, 2, _bad, sequences, data)
    assert first == second and message in first


def _on_a_ring(rank, cases, method):
    """The packed tree over all ranks' ring: the worst error of states and summed gradients."""
    errors = []
    for kind, name in cases:
        model, sequences, _ = case(kind, name)
        trie, across = TokenTrie(sequences), dist.group.WORLD
        index = indices(len(trie), rank, dist.get_world_size())
        mask = trie.mask(0, len(trie))
        upstream = torch.randn(len(trie), 16 if kind == "tiny" else 24, dtype=torch.float64,
                               generator=torch.Generator().manual_seed(0))  # fmt: skip

        def hidden(some, attention):
            given = trie.tokens[some][None], trie.positions[some][None]
            out = model.hidden(given[0], positions=given[1], attention=attention)[0]
            parameters = [p for n, p in model.named_parameters() if "lm_head" not in n]
            loss = (out * upstream[some]).sum()
            return out.detach(), torch.autograd.grad(loss, parameters)

        alone, want = hidden(torch.arange(len(trie)), masked_attention(mask, None, method))
        out, grads = hidden(index, masked_attention(mask, across, method))
        for grad in grads:
            dist.all_reduce(grad)
        errors += [worst([out], [alone[index]]), worst(grads, want)]
    return max(errors)


TWO = ("tiny", "forest"), ("gemma3_text", "binary")
FEW = ("tiny", "one sequence"), ("tiny", "star")
ON_A_RING = [
    (2, TWO, "allgather"), (4, TWO, "ring"), pytest.param(2, TWO, "ring", marks=pytest.mark.slow),
    (4, FEW, "ulysses"), (4, [("tiny", "short")], "ring"),
]  # fmt: skip


@pytest.mark.parametrize("world, cases, method", ON_A_RING)
def test_a_tree_on_a_ring_is_one_process(tmp_path, world, cases, method):
    """Also one of fewer tokens than ranks."""
    assert max(ranks(tmp_path, world, _on_a_ring, cases, method)) < 1e-10

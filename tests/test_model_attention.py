"""Any callable of the model's form: interval masks on one process, and on a ring."""

import functools

import pytest
import torch
import torch.distributed as dist
from oracles import worst
from test_ranks import ranks

import models
import ring_attention as ra

LENGTHS = (7, 1, 6, 12, 5)


def run(model_type, make_attention, index=slice(None)):
    """States of the real tokens `index`, and gradients, of packed documents with PAD around them.

    make_attention: makes the callable of document ids (1, S).
    """
    model, gen = models.tiny_model(model_type, seed=5), torch.Generator().manual_seed(0)
    ids = [-1, *(d for d, n in enumerate(LENGTHS) for _ in range(n)), -1]
    ids, places = torch.tensor(ids)[None], [*map(torch.arange, LENGTHS)]
    positions = torch.cat([torch.zeros(1), *places, torch.zeros(1)]).long()[None]
    tokens = torch.randint(53, ids.shape, generator=gen)
    upstream = torch.randn(*ids.shape, 24, generator=gen, dtype=torch.float64)
    attention, real = make_attention(ids), ids[:, index] >= 0
    out = model.hidden(tokens[:, index], positions=positions[:, index], attention=attention)
    parameters = [p for n, p in model.named_parameters() if n != "lm_head.weight"]
    loss = (out * upstream[:, index])[real].sum()
    return out.detach(), real, torch.autograd.grad(loss, parameters)


def by_intervals(attend):
    """Make callables of interval masks from a function like `ring_attention`."""

    def of_documents(ids):
        mask = ra.Mask.documents(doc_ids=ids)

        def attention(q, k, v, /, *, layer, scale, window=None):
            return attend(q, k, v, mask=mask.with_window(window), scale=scale)

        return attention

    return of_documents


def by_packing(ids):
    return models.packed_attention(doc_ids=ids)


@pytest.mark.quick
@pytest.mark.parametrize("model_type", models.TINY)
def test_interval_masks_and_packed_attention_are_one_rule(model_type):
    makers = by_intervals(lambda *qkv, **how: ra.attend(*qkv, **how)[0]), by_packing
    ours, truth = ([out[real], *grads] for out, real, grads in (run(model_type, x) for x in makers))
    assert worst(ours, truth) < 1e-12
    assert min(ra.relative(0 * x, x) for x in truth) == 1  # zeros would not pass


def _ring(rank, model_type, layout, method):
    """The worst error of this rank's states and of the gradients, over all ranks."""
    index = ra.indices(sum(LENGTHS) + 2, rank, dist.get_world_size(), layout)
    over_the_ring = functools.partial(ra.ring_attention, layout=layout, method=method)
    whole, _, want = run(model_type, by_packing)
    out, real, grads = run(model_type, by_intervals(over_the_ring), index)
    grads = [grad.contiguous() for grad in grads]
    for grad in grads:
        dist.all_reduce(grad)
    return worst([out[real], *grads], [whole[:, index][real], *want])


@pytest.mark.parametrize("layout, method", [("zigzag", "ring"), ("contiguous", "ulysses")])
@pytest.mark.parametrize("model_type", models.TINY)
def test_a_model_over_a_ring_has_the_one_process_states_and_gradients(
    tmp_path, model_type, layout, method
):
    assert max(ranks(tmp_path, 2, _ring, model_type, layout, method)) < 1e-10

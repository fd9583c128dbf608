"""Any callable of the model's form: interval masks on one process, and on a ring."""

import pytest
import torch
import torch.distributed as dist
from test_ranks import ranks

import models
import ring_attention as ra
from models import packed_attention, relative_error, tiny_model

LENGTHS = (7, 1, 6, 12, 5)


def packed_case(model_type):
    """A model, tokens (1, S) with PAD at both ends, positions, document ids and an upstream."""
    model = tiny_model(model_type, seed=5)
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([-1, *(d for d, n in enumerate(LENGTHS) for _ in range(n)), -1])[None]
    positions = torch.cat([torch.zeros(1), *map(torch.arange, LENGTHS), torch.zeros(1)]).long()[
        None
    ]
    tokens = torch.randint(53, ids.shape, generator=generator)
    upstream = torch.randn(*ids.shape, 24, generator=generator, dtype=torch.float64)
    return model, tokens, positions, ids, upstream * (ids >= 0)[..., None]


def gradients(model, out, upstream):
    parameters = [p for n, p in model.named_parameters() if n != "lm_head.weight"]
    return torch.autograd.grad((out * upstream).sum(), parameters)


@pytest.mark.quick
@pytest.mark.parametrize("model_type", models.TINY)
def test_interval_masks_and_packed_attention_are_one_rule(model_type):
    model, tokens, positions, ids, upstream = packed_case(model_type)
    mask = ra.Mask.documents(doc_ids=ids)

    def interval(q, k, v, /, *, layer, scale, window=None):
        return ra.attend(q, k, v, mask.with_window(window), scale=scale)[0]

    found = []
    for attention in (interval, packed_attention(doc_ids=ids)):
        out = model.hidden(tokens, positions=positions, attention=attention)
        found.append((out.detach()[ids >= 0], *gradients(model, out, upstream)))
    for a, b in zip(*found):
        assert relative_error(a, b) < 1e-12 < relative_error(0 * a, b)


def _ring(rank, model_type, layout, method):
    world, errors = dist.get_world_size(), []
    model, tokens, positions, ids, upstream = packed_case(model_type)
    truth = model.hidden(tokens, positions=positions, attention=packed_attention(doc_ids=ids))
    want = gradients(model, truth, upstream)
    index, mask = ra.indices(ids.shape[1], rank, world, layout), ra.Mask.documents(doc_ids=ids)

    def ring(q, k, v, /, *, layer, scale, window=None):
        options = dict(layout=layout, method=method, scale=scale)
        return ra.ring_attention(q, k, v, mask=mask.with_window(window), **options)

    out = model.hidden(tokens[:, index], positions=positions[:, index], attention=ring)
    real = ids[:, index] >= 0
    errors.append(relative_error(out.detach()[real], truth.detach()[:, index][real]))
    for ours, theirs in zip(gradients(model, out, upstream[:, index]), want, strict=True):
        ours = ours.contiguous()
        dist.all_reduce(ours)
        errors.append(relative_error(ours, theirs))
    return errors


@pytest.mark.parametrize("layout, method", [("zigzag", "ring"), ("contiguous", "ulysses")])
@pytest.mark.parametrize("model_type", models.TINY)
def test_a_model_over_a_ring_has_the_one_process_states_and_gradients(
    tmp_path, model_type, layout, method
):
    for errors in ranks(tmp_path, 2, _ring, model_type, layout, method):
        assert max(errors) < 1e-10

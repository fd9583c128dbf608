"""Gated DeltaNet: chunks against the recurrence, documents, and transformers' Qwen3.5."""

import pytest
import torch
import torch.nn.functional as F
from oracles import worst

from full.check import relative_error as relative
from full.deltanet import Documents, by_chunk, by_token
from full.tiny import tiny_model
from full.transformer import causal_attention
from models import packed_attention

pytestmark = pytest.mark.quick


def given(S, decay=0.5):
    """q, k, v, log_a, b and a state, all of which want gradients."""
    generator = torch.Generator().manual_seed(S)

    def normal(*shape):
        return torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(S, 6), dim=-1) for _ in range(2))
    log_a, b = -decay * F.softplus(normal(S)), normal(S).sigmoid()
    return [x.requires_grad_() for x in (q, k, normal(S, 4), log_a, b, normal(6, 4))]


@pytest.mark.parametrize("S, size, decay", [
    (1, 64, 0.5), (7, 8, 0.5), (8, 8, 0.5), (65, 64, 0.5), (130, 64, 0.5), (40, 1, 0.5),
    (200, 64, 100.0)])  # fmt: skip
def test_chunks_are_the_recurrence(S, size, decay):
    """Outputs, the last state, and the gradients of all six; with a decay to e^-500 too."""
    x = given(S, decay)
    truth, found = by_token(*x), by_chunk(*x, size=size)
    upstream = [torch.randn_like(y) for y in truth]
    truth, found = ([*y, *torch.autograd.grad(y, x, upstream)] for y in (truth, found))
    assert min(y.norm() for y in truth) > 0 and worst(found, truth) < 1e-12


def test_packed_documents_are_separate_documents():
    """Shorter than the convolution, longer than a chunk, with padding in between."""
    model = tiny_model("qwen3_5_text")
    rows = [[0] * 5 + [1] + [-1] + [2] * 70 + [3] * 4 + [4] * 2,
            [5] * 2 + [6] * 40 + [7] + [8] * 40]
    ids = torch.tensor(rows)
    tokens = torch.randint(53, ids.shape, generator=torch.Generator().manual_seed(0))
    packed = model.hidden(tokens, attention=Documents(packed_attention(ids), ids))
    found = torch.cat([packed[ids == n] for n in range(9)])
    truth = torch.cat([model.hidden(tokens[ids == n][None])[0] for n in range(9)])
    upstream = truth.detach().flip(0)
    weights = [p for name, p in model.named_parameters() if name != "lm_head.weight"]
    found, truth = ([y, *torch.autograd.grad(y, weights, upstream)] for y in (found, truth))
    assert min(y.norm() for y in truth) > 0 and worst(found, truth) < 1e-11


def test_a_bfloat16_model_keeps_float32_states():
    """The recurrence gets float32, and its numbers are those of the rounded inputs."""
    model = tiny_model("qwen3_5_text", dtype=torch.bfloat16)
    seen = []

    class Watched(Documents):
        def recurrence(self, *x, layer):
            seen.extend(y.dtype for y in x)
            return super().recurrence(*x, layer=layer)

    tokens = torch.arange(50)[None]
    found = model(tokens, attention=Watched(causal_attention))
    assert {*seen} == {torch.float32} and found.dtype == torch.bfloat16
    truth = model.to(torch.float64)(tokens)
    assert relative(found.double(), truth) < 0.05


def test_an_attention_without_states_is_refused():
    model = tiny_model("qwen3_5_text")
    with pytest.raises(ValueError, match="layer 0 is a gated DeltaNet: .*got causal_attention"):
        model(torch.arange(5)[None], attention=causal_attention)

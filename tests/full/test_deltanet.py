"""Gated DeltaNet: chunks are the recurrence, and a run is audited.

test_families.py holds a model to its definition, test_transformers.py logits, gradients, files and
decoding to transformers, test_decoding.py the cache: turns, forks and rows that come and go.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from oracles import rms, worst
from test_run import call

from full.model import deltanet
from check_models import relative_error as relative
from full.model.deltanet import Documents, by_chunk, by_token
from full.model.hf import save_hf
from full.model.transformer import Transformer, causal_attention
from full.run.config import Config
from full.run.tasks import make_task
from full.tiny import tiny, tiny_model
from models import packed_attention

quick = pytest.mark.quick


def given(S, decay=0.5):
    """q, k, v, log_a, b and a state, all of which want gradients."""
    generator = torch.Generator().manual_seed(S)

    def normal(*shape):
        return torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(S, 6), dim=-1) for _ in range(2))
    log_a, b = -decay * F.softplus(normal(S)), normal(S).sigmoid()
    return [x.requires_grad_() for x in (q, k, normal(S, 4), log_a, b, normal(6, 4))]


@quick
@pytest.mark.parametrize("S, size, decay", [
    (1, 64, 0.5), (7, 8, 0.5), (8, 8, 0.5), (65, 64, 0.5), (130, 64, 0.5), (40, 1, 0.5),
    (200, 64, 100.0)])  # fmt: skip
def test_chunks_are_the_recurrence(S, size, decay):
    """Outputs, the last state, and the gradients of all six; with a decay to e^-500 too."""
    x = given(S, decay)
    truth, found = by_token(*x), by_chunk(*x, size=size)
    upstream = [y.detach().flip(0) for y in truth]
    truth, found = ([*y, *torch.autograd.grad(y, x, upstream)] for y in (truth, found))
    assert min(y.norm() for y in truth) > 0 and worst(found, truth) < 1e-12


@quick
def test_gradients_of_decays_in_float32():
    """In chunks they are as exact as token by token, where strong decays leave little of them."""
    x = given(60, decay=20.0)
    truth = torch.autograd.grad(by_chunk(*x)[0].sum(), x[3])[0]
    low = [y.detach().float().requires_grad_() for y in x]
    by = [torch.autograd.grad(run(*low)[0].sum(), low[3])[0] for run in (by_chunk, by_token)]
    in_chunks, by_tokens = (relative(y.double(), truth) for y in by)
    assert in_chunks < 4 * by_tokens < 4e-6


@quick
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packed_documents_are_separate_documents(dtype):
    """Shorter than the convolution, longer than a chunk, with padding in between."""
    model = tiny_model("qwen3_5_text", dtype=dtype)
    rows = [[0] * 5 + [1] + [-1] + [2] * 70 + [3] * 4 + [4] * 2,
            [5] * 2 + [6] * 40 + [7] + [8] * 40]
    ids = torch.tensor(rows)
    tokens = torch.randint(53, ids.shape, generator=torch.Generator().manual_seed(0))
    packed = model.hidden(tokens, attention=Documents(packed_attention(ids), ids))
    exact = copy.deepcopy(model).double()
    found = torch.cat([packed[ids == n] for n in range(9)])
    alone, truth = (torch.cat([x.hidden(tokens[ids == n][None])[0] for n in range(9)])
                    for x in (model, exact))  # fmt: skip
    upstream, outs = truth.detach().flip(0).to(dtype), []
    for one, y in ((model, found), (model, alone), (exact, truth)):
        weights = [p for name, p in one.named_parameters() if name != "lm_head.weight"]
        outs.append([y.detach(), *torch.autograd.grad(y, weights, upstream.to(y.dtype))])
    found, alone, truth = outs
    assert min(y.norm() for y in truth) > 0
    if dtype == torch.float64:
        assert worst(found, truth) < 1e-11
    assert rms(found, truth) < max(1e-11, 1.3 * rms(alone, truth))


@quick
def test_a_bfloat16_model_keeps_float32_states():
    """The recurrence gets float32: decays and rates of the products in bfloat16, rounded once."""
    model, seen, products = tiny_model("qwen3_5_text", dtype=torch.bfloat16), [], []
    mixer = model.model.layers[0].linear_attn
    for layer in (mixer.in_proj_a, mixer.in_proj_b):
        layer.register_forward_hook(lambda *given: products.append(given[2].double()))

    class Watched(Documents):
        def recurrence(self, *x, layer):
            seen.append(x)
            return super().recurrence(*x, layer=layer)

    found = model(torch.arange(50)[None], attention=Watched(causal_attention))
    assert {y.dtype for x in seen for y in x} == {torch.float32} and found.dtype == torch.bfloat16
    (*_, log_a_BHS, b_BHS), (a_BSH, b_BSH) = seen[0], products
    decay_BSH = -mixer.A_log.double().exp() * F.softplus(a_BSH + mixer.dt_bias.double())
    assert worst([log_a_BHS.mT, b_BHS.mT], [decay_BSH, b_BSH.sigmoid()]) < 1e-6


@quick
def test_first_weights_let_the_recurrence_learn():
    """Its norm scales by w alone, so w begins at 1, and the other norms' 1 + w at 0."""
    model = Transformer(tiny("qwen3_5_text")).init_weights(0)
    mixer = model.model.layers[0].linear_attn
    assert (mixer.norm.weight == 1).all() and (mixer.dt_bias == 1).all()
    assert 0.01 <= mixer.A_log.exp().min() < mixer.A_log.exp().max() <= 16
    assert not model.model.norm.weight.any()


@quick
def test_an_attention_without_states_is_refused():
    model = tiny_model("qwen3_5_text")
    with pytest.raises(ValueError, match="layer 0 is a gated DeltaNet: .*got causal_attention"):
        model(torch.arange(5)[None], attention=causal_attention)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with a small model for `guess`."""
    task = make_task(Config(size=3, turns=3))
    shape = tiny("qwen3_5_text", vocab_size=task.vocab_size, eos_token_id=tuple(task.end))
    directory = tmp_path_factory.mktemp("hybrid")
    save_hf(Transformer(shape).init_weights(0), directory)
    return directory


RUN = "--size 3 --turns 3 --device cpu --prompts 4 --group 4 --lr 0.01 --lr-warmup 0 --save-every 1"
RUN += " --eval-prompts 4 --kl-coef 0.05 --steps 2 --out run --model"


def forgets(*given, one_chunk=deltanet.one_chunk):
    """A chunk that hands less of the state on to the next one."""
    out, state = one_chunk(*given)
    return out, 0.9 * state


@pytest.mark.parametrize("slip, said", [(None, "ok"), (forgets, "sampling is outside")])
def test_an_audit_passes_an_honest_run_and_finds_a_planted_slip(
    slip, said, checkpoint, tmp_path, monkeypatch, capsys
):
    """The audit reads token by token."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as planted:
        if slip:
            planted.setattr(deltanet, "one_chunk", slip)
        assert call(capsys, *RUN.split(), checkpoint)[0] == 0
    code, out, _ = call(capsys, "audit", "run")
    assert (code, out.splitlines()[-1]) == (int(said != "ok"), f"audit of step 1: {said}")


def test_an_exact_run_of_recurrent_layers_is_refused(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, *RUN.split(), checkpoint, "--exact")
    assert code != 0 and "--exact does not support recurrent layers, and" in err
    assert not (tmp_path / "run").exists()

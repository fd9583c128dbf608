"""Decoding: a step without modules is `extend`'s, for every family that has one and every cache."""

import copy

import pytest
import torch

import models
from models import FULL, SLIDING, PlainStep, Row, extend, generate, prefill, tiny_model

pytestmark = pytest.mark.quick
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3_text": ("gemma3_text", {}),
    "o bias": ("qwen3", dict(o_bias=True, qkv_bias=True)),
    "softcap": ("gemma3_text", dict(final_logit_softcapping=1.5)),
    "sliding qwen": ("qwen2", dict(layer_types=(SLIDING, FULL), sliding_window=3)),
    "one key head": ("qwen3", dict(num_attention_heads=3, num_key_value_heads=1)),
    "dynamic": ("qwen3", dict(max_position_embeddings=8, rope_parameters={
        FULL: dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)})),
}  # fmt: skip
PROMPTS = {
    "one row": [[4]],
    "of one length": [[1, 2, 3], [4, 5, 6]],
    "of unequal lengths": [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]],
}


def model_of(name, dtype=torch.float64):
    model_type, changes = CASES[name]
    model = tiny_model(model_type, seed=3, dtype=dtype, **changes)
    with torch.no_grad():  # biases begin as zeros, and a bias that is left out would not show
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=list(PROMPTS))
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_extend(name, prompts, shared):
    torch.manual_seed(0)
    model = model_of(name)
    step = model.one_token_step()
    assert isinstance(step, PlainStep)
    caches = [prefill(model, prompts)[0] for _ in range(2)]
    if shared:
        for cache in caches:
            cache.share([*range(len(prompts)), 0, 0])
    for n in range(9):
        tokens = torch.randint(53, (len(caches[0].lengths.of_B), 1))
        truth = extend(model, caches[0], tokens)
        assert (step(caches[1], tokens) - truth).abs().max() < 1e-12 * truth.abs().max()
        assert caches[0].lengths.of_B.equal(caches[1].lengths.of_B)
        if n == 4:
            for cache in caches:
                cache.select([0, 0])


def test_in_float32_a_step_is_as_near_to_the_truth_as_extend():
    torch.manual_seed(0)
    exact = model_of("qwen3")
    model = copy.deepcopy(exact).to(torch.float32)
    exact.load_state_dict(model.state_dict())
    caches = [prefill(m, PROMPTS["of unequal lengths"])[0] for m in (exact, model, model)]
    steps = extend_of(exact), extend_of(model), model.one_token_step()
    errors = torch.zeros(2)
    for _ in range(20):
        tokens = torch.randint(53, (3, 1))
        truth, *found = (step(cache, tokens) for step, cache in zip(steps, caches, strict=True))
        errors += torch.stack([(x - truth).norm() / truth.norm() for x in found])
    assert 0 < errors[1] < 2 * errors[0]


def extend_of(model):
    return lambda cache, tokens: extend(model, cache, tokens)


# Models that decode by their modules -------------------------------------------------------------


def _with_hook(model):
    model.model.layers[0].register_forward_hook(lambda *args: None)


def _with_forward(model):
    model.model.layers[0].mlp.forward = lambda x, balance=None: x


def _with_hidden(model):
    model.hidden = model.hidden


def _with_module(model):
    class Other(torch.nn.Linear):
        pass

    model.lm_head.__class__ = Other


def _compiled(model):
    model.model.layers[0].compile(backend="eager")


def _of_two_dtypes(model):
    model.lm_head.to(torch.float32)


def _in_bfloat16(model):
    model.to(torch.bfloat16)


CHANGES = [
    _with_hook, _with_forward, _with_hidden, _with_module, _compiled, _of_two_dtypes, _in_bfloat16,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_decodes_by_its_modules(change):
    model = model_of("qwen2")
    assert isinstance(model.one_token_step(), PlainStep)
    change(model)
    assert not isinstance(model.one_token_step(), PlainStep)


def test_experts_and_large_models_decode_by_their_modules(monkeypatch):
    assert not isinstance(tiny_model("qwen3_moe").one_token_step(), PlainStep)
    model = model_of("qwen2")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    monkeypatch.setattr(models, "COPIED", size - 1)
    assert not isinstance(model.one_token_step(), PlainStep)


def test_new_weights_are_used_by_the_next_call():
    model = model_of("qwen2")
    found = []
    for _ in range(2):
        (row,) = generate(model, [[1, 2]], max_new_tokens=6, temperature=1.0, seed=0)
        logp = model(torch.tensor([row.tokens]))[0].log_softmax(-1)
        for n in range(1, 7):
            assert abs(row.logprobs[n] - logp[n, row.tokens[n + 1]].item()) < 1e-12
        found.append(row.logprobs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert found[0] != found[1]


# Queued tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 53])
@pytest.mark.parametrize("later", [False, True])
def test_a_queued_token_outside_of_the_vocabulary_is_named(token, later):
    row = Row([1])

    def after(row):
        row.queue.extend([3, token])
        return [row]

    if not later:
        after(row)
    every = tuple(range(53))
    with pytest.raises(ValueError, match=rf"queued tokens must be of 0..52, got \[3, {token}\]"):
        generate(model_of("qwen3"), [row], max_new_tokens=9, seed=0, end=every, after=after)

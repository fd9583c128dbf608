"""The action expert: PAD in its prefix, where gradients stop, its equations, its own check."""

import copy
import dataclasses
import json
from unittest import mock

import example_action_expert as example
import pytest
import torch
from conftest import ROOT
from example_action_expert import (
    ActionExpert, Prefix, block_attention, control, control_case, flow_matching_loss, flow_time,
    joint, masked_attention, sample_actions, time_features, velocity_of,
)  # fmt: skip
from oracles import rms
from test_ranks import as_script

from check_attention import relative
from full.tiny import tiny

SCRIPT = ROOT / "tests/example_action_expert.py"


def velocity_after(model, expert, batch, prefix, *, tokens=None, **placed):
    """v(x, tau) of an expert after a prefix of six tokens that are not PAD."""
    tokens = batch["tokens"] if tokens is None else tokens
    model.hidden(tokens, attention=prefix.record, **placed)
    options = dict(positions_B1=torch.full((len(tokens), 1), 6), state=batch["state"])
    return lambda x, tau: expert(x, tau, prefix, **options)


@pytest.mark.quick
def test_padding_in_the_prefix_changes_nothing():
    model, expert, batch = control_case(torch.float64)
    want = velocity_of(model, expert, batch)(batch["noise"], batch["tau"])
    at = torch.tensor([0, 2, 3, 4, 6, 7])  # PAD at 1 and 5
    padded, positions = torch.full((3, 8), 3), torch.zeros(3, 8, dtype=torch.long)
    padded[:, at], positions[:, at] = batch["tokens"], torch.arange(6)
    prefix = Prefix(torch.zeros_like(padded), torch.arange(8).expand(3, 8) % 4 != 1, positions)
    placed = dict(tokens=padded, positions=positions)
    got = velocity_after(model, expert, batch, prefix, **placed)(batch["noise"], batch["tau"])
    assert relative(got, want) < 1e-12


@pytest.mark.quick
def test_padding_gives_zero_not_nan():
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    seen = torch.tensor([[[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]]).bool()
    out = masked_attention(q, k, v, seen, scale=1.0)
    out.sum().backward()
    assert out[:, :, [0, 2]].all() and all(x.grad.isfinite().all() for x in (q, k, v))
    assert not any(x[:, :, [1, 3]].any() for x in (out, q.grad, k.grad, v.grad))


@pytest.mark.quick
@pytest.mark.parametrize("detach", [False, True])
def test_detach_stops_the_gradient_at_the_prefix(detach):
    model, expert, batch = control_case(torch.float64)
    prefix = Prefix(torch.zeros_like(batch["tokens"]), detach=detach)
    out = velocity_after(model, expert, batch, prefix)(batch["noise"], batch["tau"])
    grads = torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True)
    assert any(g is not None and g.any() for g in grads) == (not detach)


@pytest.mark.quick
def test_flow_matching_is_its_equation_and_euler_follows_the_field():
    actions, noise = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    tau = torch.rand(3, dtype=torch.float64)
    got = flow_matching_loss(lambda x, t: 2 * x + t[:, None, None], actions, noise, tau)
    for b in range(3):
        x = tau[b] * actions[b] + (1 - tau[b]) * noise[b]
        assert torch.allclose(got[b], ((2 * x + tau[b] - actions[b] + noise[b]) ** 2).mean())
    seen = []

    def velocity(x, tau):  # the field of one data point: straight to it
        seen.append(tau[0].item())
        return (actions - x) / (1 - tau[:, None, None])

    assert torch.allclose(sample_actions(velocity, noise), actions, atol=1e-12)
    assert seen == pytest.approx([n / 10 for n in range(10)])


def by_one_attention(model, expert, batch):
    """v by its definition, the loss as a norm, and Euler's method: the plain way in any dtype."""
    wide = torch.promote_types(batch["noise"].dtype, torch.float32)

    def velocity(x, tau):
        return joint(model, expert, batch | dict(noise=x, tau=tau))

    def loss_of(velocity, actions, noise, tau):
        at = tau[:, None, None]
        error = velocity(at * actions + (1 - at) * noise, tau) - (actions - noise)
        return torch.linalg.vector_norm(error.to(wide), dim=(1, 2)) ** 2 / error[0].numel()

    @torch.no_grad()
    def sample(velocity, noise, steps):
        x = noise.to(wide)
        for n in range(steps):
            x = x + velocity(x.to(noise), torch.full_like(noise[:, 0, 0], n / steps)) / steps
        return x.to(noise)

    return velocity, loss_of, sample


def results_of(model, expert, batch, velocity, loss_of, sample):
    """v and gradients; and of v = noise, whatever x: a thousand steps, and a loss of 4000 terms."""
    given = batch["actions"], batch["noise"], batch["tau"]
    weights = [*model.parameters(), *expert.parameters()]
    grads = torch.autograd.grad(loss_of(velocity, *given).mean(), weights, materialize_grads=True)
    numbers = torch.randn(2, 8, 500, 8, generator=torch.Generator().manual_seed(0))
    many = numbers.bfloat16().to(given[1])
    return [velocity(*given[1:]).detach(), torch.cat([x.flatten() for x in grads]),
            sample(lambda *_: given[1], given[1], steps=1000),
            loss_of(lambda *_: many[1], *many, given[2])]


@pytest.mark.quick
def test_in_bfloat16_the_expert_is_as_good_as_one_dense_attention():
    """Root mean square over two seeds of the errors of what `results_of` returns."""
    cases = []
    for seed in range(2):
        model, expert, batch = low = control_case(torch.bfloat16, rows=8, seed=seed)
        exact = copy.deepcopy(model).double(), copy.deepcopy(expert).double(), {
            k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
        ours = velocity_of(*low), flow_matching_loss, sample_actions
        ways = (low, ours), (low, by_one_attention(*low)), (exact, by_one_attention(*exact))
        cases.append([results_of(*case, *way) for case, way in ways])
    for found, plain, truth in zip(*(zip(*some, strict=True) for some in zip(*cases, strict=True))):
        assert rms(found, truth) <= 1.3 * rms(plain, truth)


@pytest.mark.quick
def test_flow_times_are_beta_distributed_and_have_features_of_their_periods():
    tau = flow_time((torch.arange(100_000).double() + 0.5) / 100_000)
    s = 1 - tau / 0.999  # Beta(1.5, 1): mean 0.6, P(s < x) = x^1.5
    assert s.mean().item() == pytest.approx(0.6, abs=1e-4)
    assert (s < 0.3).double().mean().item() == pytest.approx(0.3**1.5, abs=1e-4)
    x = time_features(torch.tensor([0.0, 0.004, 1.0], dtype=torch.float64), 8)
    assert torch.allclose(x[:, :4] ** 2 + x[:, 4:] ** 2, torch.ones(3, 4).double())
    assert torch.allclose(x[0], x.new_tensor([0.0] * 4 + [1.0] * 4))
    assert x[1, 0].abs() < 1e-12 and x[1, 4] == pytest.approx(1)  # a whole period of 0.004
    assert x[2, 3] == pytest.approx(1)  # a quarter of 4


@pytest.mark.quick
def test_an_expert_that_does_not_fit_is_named():
    config = tiny("gemma3_text")
    expert = ActionExpert(dataclasses.replace(config, head_dim=12), action_dim=2)
    with pytest.raises(ValueError, match="head_dim is 12 in the expert and 10 in the prefix"):
        expert.require_fits(config)
    given = torch.zeros(1, 2, 2), torch.zeros(1), None
    with pytest.raises(ValueError, match="has no state"):
        expert(*given, positions_B1=None, state=torch.zeros(1, 1))
    with pytest.raises(ValueError, match="dense"):
        ActionExpert(tiny("qwen3_moe"), action_dim=2)


def test_the_check_passes_and_fails(capsys, tmp_path):
    code, out, err = as_script(SCRIPT, "check", cwd=tmp_path)
    assert code == 0 and 0 < float(out.split()[-1]) <= 1e-12, err

    def without_windows(*tokens):
        attention = block_attention(*tokens)
        return lambda q, k, v, /, *, window=None, **options: attention(q, k, v, **options)

    def not_a_number(*tokens):
        return lambda q, k, v, /, **options: torch.full_like(q, torch.nan)

    for fault in (without_windows, not_a_number):
        with mock.patch.object(example, "block_attention", fault):
            assert example.main(["check"]) == 1
    assert example.main([]) == example.main(["check", "control"]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("steps, bound", [
    (130, 0.5), pytest.param(400, 0.15, marks=pytest.mark.slow)])
def test_the_toy_task_is_learnt(capsys, steps, bound):
    code = control(steps)
    lines = capsys.readouterr().out.splitlines()
    first, last = (float(line.split()[-1]) for line in (lines[0], lines[-2]))
    assert last < bound < 1 < first
    assert json.loads(lines[-1])["ok"] == (last < 0.15) == (code == 0)

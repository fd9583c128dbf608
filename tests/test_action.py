"""Test the action expert: two streams are one sequence, flow matching, the toy task, commands."""

import dataclasses
import json
from unittest import mock

import example_action_expert as example
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from example_action_expert import (
    ActionExpert, Prefix, block_attention, control, control_case, flow_matching_loss, flow_time,
    masked_attention, sample_actions, time_features, velocity_of,
)  # fmt: skip
from measure_vla import RingPrefix
from test_ranks import as_script, ranks

import ring_attention as ra
from models import tiny

SCRIPT = ROOT / "tests/example_action_expert.py"


def velocity_after(model, expert, batch, prefix, **placed):
    """v(x, tau) of an expert after a prefix of six tokens that are no PAD.

    placed: tokens and positions of the prefix that differ from the batch's.
    """
    tokens = placed.pop("tokens", batch["tokens"])
    model.hidden(tokens, attention=prefix.record, **placed)
    options = dict(positions_B1=torch.full((len(tokens), 1), 6), state=batch["state"])
    return lambda x, tau: expert(x, tau, prefix, **options)


# The prefix over a ring ------------------------------------------------------------------------


def _ring(rank, layout):
    """Relative errors of the loss and of every gradient on this rank."""
    world = dist.get_world_size()
    model, expert, batch = control_case(torch.float64)
    parameters = [*model.parameters(), *expert.parameters()]
    block = torch.tensor([0, 0, 1, 2, 2, 2]).expand_as(batch["tokens"])

    def loss_and_gradients(prefix, factor, **placed):
        velocity = velocity_after(model, expert, batch, prefix, **placed)
        loss = flow_matching_loss(velocity, batch["actions"], batch["noise"], batch["tau"]).mean()
        return loss, *torch.autograd.grad(loss * factor, parameters, allow_unused=True)

    truth, *want = loss_and_gradients(Prefix(block), 1.0)
    index = ra.indices(6, rank, world, layout)
    placed = dict(tokens=batch["tokens"][:, index], positions=index.expand(len(block), -1))
    scale = ra.loss_scale(world, replicated=True, reduce="sum")
    got, *grads = loss_and_gradients(RingPrefix(block, layout=layout), scale, **placed)
    errors = [abs((got - truth) / truth).item()]
    for ours, theirs in zip(grads, want, strict=True):
        if theirs is not None and theirs.any():
            ours = ours.contiguous()
            dist.all_reduce(ours)
            errors.append(ra.relative(ours, theirs))
    return errors


RINGS = [(2, "zigzag"), (2, "contiguous"), pytest.param(3, "zigzag", marks=pytest.mark.slow)]


@pytest.mark.parametrize("world, layout", RINGS)
def test_a_prefix_on_a_ring_gives_the_one_process_loss_and_gradients(tmp_path, world, layout):
    for errors in ranks(tmp_path, world, _ring, layout):
        assert max(errors) < 1e-10 and len(errors) > 40


# One process -----------------------------------------------------------------------------------


@pytest.mark.quick
def test_padding_in_the_prefix_changes_nothing():
    model, expert, batch = control_case(torch.float64)
    want = velocity_of(model, expert, batch)(batch["noise"], batch["tau"])
    at = torch.tensor([0, 2, 3, 4, 6, 7])  # PAD at 1 and 5
    padded = torch.full((3, 8), 3)
    padded[:, at] = batch["tokens"]
    valid = torch.zeros(3, 8, dtype=torch.bool)
    valid[:, at] = True
    positions = torch.zeros(3, 8, dtype=torch.long)
    positions[:, at] = torch.arange(6)
    prefix = Prefix(torch.zeros_like(padded), valid, positions)
    placed = dict(tokens=padded, positions=positions)
    got = velocity_after(model, expert, batch, prefix, **placed)(batch["noise"], batch["tau"])
    assert ra.relative(got, want) < 1e-12


@pytest.mark.quick
def test_padding_gives_zero_not_nan():
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    seen = torch.tensor([[[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]]).bool()
    out = masked_attention(q, k, v, seen, scale=1.0)
    out.sum().backward()
    assert not out[:, :, [1, 3]].any() and out[:, :, [0, 2]].all()
    assert not q.grad[:, :, [1, 3]].any() and all(x.grad.isfinite().all() for x in (q, k, v))
    assert not k.grad[:, :, [1, 3]].any() and not v.grad[:, :, [1, 3]].any()


@pytest.mark.quick
@pytest.mark.parametrize("skip_pad", [False, True])
def test_block_attention_is_the_rule_in_words(skip_pad):
    block = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3], [0, 1, 1, 1, 2, 2, 2, 2]])
    valid = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0], [1] * 8]).bool()
    at = torch.arange(8).expand(2, 8)
    if skip_pad:
        at = torch.tensor([[0, 1, 1, 2, 3, 4, 5, 5], [*range(8)]])
    q, k, v = (torch.randn(2, h, 8, 4, dtype=torch.float64) for h in (4, 2, 2))
    for window in (None, 3):
        attention = block_attention(block, valid, at)
        got = attention(q, k, v, layer=0, scale=0.5, window=window)
        for b in range(2):
            for i in range(8):
                keys = [j for j in range(8) if valid[b, i] and valid[b, j]
                        and block[b, j] <= block[b, i]
                        and at[b, i] - at[b, j] < (window or 9)]  # fmt: skip
                for h in range(4):
                    score = (k[b, h // 2, keys] @ q[b, h, i] * 0.5).softmax(0)
                    assert torch.allclose(got[b, h, i], score @ v[b, h // 2, keys], atol=1e-14)
        last = attention(q[:, :, -3:], k, v, layer=0, scale=0.5, window=window)
        assert torch.allclose(last, got[:, :, -3:], atol=1e-14)


@pytest.mark.quick
def test_detach_stops_the_gradient_at_the_prefix():
    model, expert, batch = control_case(torch.float64)
    for detach in (False, True):
        prefix = Prefix(torch.zeros_like(batch["tokens"]), detach=detach)
        velocity = velocity_after(model, expert, batch, prefix)
        out = velocity(batch["noise"], batch["tau"])
        grads = torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True)
        assert any(g is not None and g.any() for g in grads) == (not detach)


@pytest.mark.quick
def test_flow_matching_is_its_equation():
    actions, noise = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    tau = torch.rand(3, dtype=torch.float64)
    got = flow_matching_loss(lambda x, t: 2 * x + t[:, None, None], actions, noise, tau)
    for b in range(3):
        x = tau[b] * actions[b] + (1 - tau[b]) * noise[b]
        assert torch.allclose(got[b], ((2 * x + tau[b] - actions[b] + noise[b]) ** 2).mean())


@pytest.mark.quick
def test_euler_follows_the_true_field_to_the_actions():
    actions, noise = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    seen = []

    def velocity(x, tau):  # the field of one data point: straight to it
        seen.append(tau[0].item())
        return (actions - x) / (1 - tau[:, None, None])

    assert torch.allclose(sample_actions(velocity, noise), actions, atol=1e-12)
    assert seen == pytest.approx([n / 10 for n in range(10)])


@pytest.mark.quick
def test_flow_times_are_beta_distributed():
    tau = flow_time((torch.arange(100_000).double() + 0.5) / 100_000)
    s = 1 - tau / 0.999  # Beta(1.5, 1): mean 0.6, P(s < x) = x^1.5
    assert s.mean().item() == pytest.approx(0.6, abs=1e-4)
    assert (s < 0.3).double().mean().item() == pytest.approx(0.3**1.5, abs=1e-4)


@pytest.mark.quick
def test_time_features_have_unit_circles_and_their_periods():
    tau = torch.tensor([0.0, 0.004, 1.0], dtype=torch.float64)
    x = time_features(tau, 8)
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


# The commands ----------------------------------------------------------------------------------


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


def test_the_toy_task_is_being_learnt(capsys):
    """Train a third of the steps. The slow test below trains all of them."""
    control(steps=130)
    lines = capsys.readouterr().out.splitlines()
    first, last = (float(line.split()[-1]) for line in (lines[0], lines[-2]))
    assert last < 0.5 < 1 < first


@pytest.mark.slow
def test_the_toy_task_is_learnt(tmp_path):
    code, out, err = as_script(SCRIPT, "control", cwd=tmp_path)
    assert code == 0, err
    lines = out.splitlines()
    first, last = (float(line.split()[-1]) for line in (lines[0], lines[-2]))
    assert last < 0.15 < 1 < first
    assert json.loads(lines[-1])["ok"]

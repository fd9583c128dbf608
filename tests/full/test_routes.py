"""Experts are balanced in training by the routers' bias."""

import json

import pytest
import torch
from test_ranks import TASK
from test_run import good

from full import equivalence
from full.equivalence import BASE, trainer_of
from full.learn.batches import RolloutQueue
from full.model.experts import RoutingCounts
from full.model.hf import save_hf
from full.ranks.optimizer import persistent_buffers
from full.run.flags import parse_config
from full.tiny import TwoTurns, tiny_model

SHAPE = dict(vocab_size=12, num_experts=8, num_experts_per_tok=2, num_hidden_layers=3,
             sparse_layers=(0, 2), initializer_range=0.2)  # fmt: skip


# That bias (11) and loads are those of one process under every plan is a row of
# full/equivalence.py. Here is what one process counts and skips.


@pytest.mark.quick
def test_a_token_counts_for_each_sequence_that_holds_it():
    one, held = RoutingCounts(torch.tensor([1, 0, 0])), RoutingCounts(torch.tensor([3, 0, 0]))
    for counts in (one, held):
        tiny_model("qwen3_moe", **SHAPE).hidden(torch.tensor([[1, 2, 3]]), on_routing=counts)
    assert [n.sum() for n in one.counts.values()] == [2] * 2
    assert all(held.counts[layer].equal(3 * n) for layer, n in one.counts.items())


@pytest.fixture
def batch(process_group):
    """Trajectories, and two Trainers that balance experts alike."""
    config = parse_config(f"{BASE} {equivalence.RUNS['biased']}".split()).check()
    trainers = [trainer_of(config, "routers") for _ in range(2)]
    played = RolloutQueue(config, TwoTurns(), trainers[0]).get(0)
    trainers[0].prepare(played)
    return played.trained(), *trainers


def votes_of(trainer):
    return torch.stack([*persistent_buffers(trainer.model).values()])  # (layers, experts)


@pytest.mark.quick
def test_two_calls_make_one_step(batch):
    """Gradient and votes are those of one call."""
    batch, whole, parts = batch
    Z = whole.loss_denominator(batch)
    before = votes_of(whole).clone()
    whole.forward_backward(batch, Z)
    for half in (batch[:5], batch[5:]):
        parts.forward_backward(half, Z)
    for a, b in zip(whole.model.parameters(), parts.model.parameters()):
        assert a.grad is b.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-14)
    for trainer in (whole, parts):
        trainer.optim_step(0.0)
    assert votes_of(whole).ne(before).any(1).all() and votes_of(whole).equal(votes_of(parts))


@pytest.mark.quick
def test_a_skipped_step_moves_no_bias(batch):
    """And what it counted is forgotten, as its gradient is: the next step is a first one."""
    batch, trainer, fresh = batch
    trainer.forward_backward(batch[1:], 1.0)
    before = votes_of(trainer).clone()
    next(trainer.model.parameters()).grad[0] = float("nan")
    assert "nonfinite" in trainer.optim_step(0.0)
    assert votes_of(trainer).equal(before)
    for one in (trainer, fresh):
        one.forward_backward(batch[:1], 1.0)
        one.optim_step(0.0)
    assert votes_of(trainer).equal(votes_of(fresh))


@pytest.mark.parametrize("balanced", [True, False])
def test_what_the_checkpoint_was_trained_with_is_said(tmp_path, balanced):
    """And that no OUT/hf is written: its format has no place for a router's bias."""
    model = tmp_path / "model"
    save_hf(tiny_model("qwen3_moe", eos_token_id=(1,), **SHAPE), model)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"router_aux_loss_coef": 0.001}))
    flags = f"{TASK} --model {model} --lr 0.01 --steps 1 --prompts 1 --group 2 --minibatches 1"
    out, err = good(tmp_path, f"{flags} --out run" + " --router-bias-rate 0.05" * balanced)
    assert err.count("router_aux_loss_coef 0.001; here nothing does") == (not balanced)
    assert ("hf is not written" in out) == balanced
    assert (tmp_path / "run/hf").exists() != balanced

"""Experts are balanced in training: the loss (8), the routers' bias (11), the loads as a metric.

That they are those of one process under every plan is a row of full/equivalence.py. Here are what
one process counts, skips and refuses, and the audit of whole runs.
"""

import json

import pytest
import torch
import torch.distributed as dist
from test_ranks import TASK

from full import equivalence
from full.__main__ import main
from full.batches import RolloutQueue
from full.equivalence import BASE, trainer_of
from full.experts import Balance
from full.flags import parse_config
from full.hf import save_hf
from full.optimizer import persistent_buffers
from full.tiny import TwoTurns, tiny, tiny_model
from full.transformer import Transformer

SHAPE = dict(vocab_size=12, num_experts=8, num_experts_per_tok=2, num_hidden_layers=4,
             sparse_layers=(0, 1, 3))  # fmt: skip


def experts():
    return tiny_model("qwen3_moe", seed=3, **SHAPE)


@pytest.mark.quick
def test_by_default_experts_are_only_counted():
    balance = Balance(torch.tensor([0, 0, 1]))
    experts().hidden(torch.tensor([[1, 2, 3]]), on_routing=balance)
    assert balance.losses == {} and [n.sum() for n in balance.counts.values()] == [6] * 3


@pytest.fixture
def batch():
    """Trajectories, and two Trainers that balance experts alike."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = parse_config(f"{BASE} {equivalence.RUNS['balanced']}".split()).check()
    trainers = [trainer_of(config, "routers") for _ in range(2)]
    played = RolloutQueue(config, TwoTurns(), trainers[0]).get(0)
    trainers[0].prepare(played)
    yield played.trained(), *trainers
    dist.destroy_process_group()


def votes_of(trainer):
    return torch.stack([*persistent_buffers(trainer.model).values()])  # (layers, experts)


@pytest.mark.quick
def test_two_calls_make_one_step(batch):
    """`sequences` says how many both have: gradient, metrics and votes are those of one call."""
    batch, whole, parts = batch
    Z = whole.loss_denominator(batch)
    before = votes_of(whole).clone()
    found = whole.forward_backward(batch, Z)
    halves = [parts.forward_backward(half, Z, num_sequences=len(batch))
              for half in (batch[:5], batch[5:])]  # fmt: skip
    for a, b in zip(whole.model.parameters(), parts.model.parameters()):
        assert a.grad is b.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-14)
    assert sum(x["balance/loss"] for x in halves) == pytest.approx(found["balance/loss"], 1e-12)
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


BALANCED = "--balance-coef 0.5 --router-bias-rate 0.05"
@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The directory of a model with experts, as transformers would write it."""
    shape = SHAPE | dict(vocab_size=7, initializer_range=0.2)  # the task has 7 tokens
    config = tiny("qwen3_moe", eos_token_id=(1,), **shape)
    folder = tmp_path_factory.mktemp("mixture")
    save_hf(Transformer(config).double().init_weights(0), folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"router_aux_loss_coef": 0.001}))
    return folder


@pytest.mark.parametrize("balanced", [True, False])
def test_what_the_checkpoint_was_trained_with_is_said(mixture, tmp_path, capfd, balanced):
    """And that no OUT/hf is written: its format has no place for a router's bias."""
    flags = f"{TASK} --lr 0.005 --steps 1 --prompts 1 --group 2 --minibatches 1 --model {mixture}"
    flags += f" {BALANCED}" if balanced else ""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["full"])
        assert main([*flags.split(), "--out", str(out)]) == 0
    text = capfd.readouterr()
    assert text.err.count("router_aux_loss_coef 0.001") == 1
    assert ("--balance-coef 0.5 does" in text.err) == balanced
    assert ("here nothing does" in text.err) != balanced
    assert ("hf is not written" in text.out) == balanced
    assert (out / "hf").exists() != balanced

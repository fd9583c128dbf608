"""PPO's critic: advantages against their definition, values by every route."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import LOOKUP, batch_of

from train_grpo import Config, Trainer, build, collect, demonstrations, gae, make_task

pytestmark = pytest.mark.quick


def defined(rewards, values, mask, gamma, lam):
    """(1) `gae` as a sum over all later sampled tokens."""
    at = [t for t in range(len(mask)) if mask[t]]
    bounds = [*at[1:], len(mask)]
    r = [sum(rewards[a:b]) for a, b in zip(at, bounds, strict=True)]
    V = [*(values[t] for t in at), 0.0]
    delta = [r[k] + gamma * V[k + 1] - V[k] for k in range(len(at))]
    advantages = np.zeros(len(mask))
    for n, t in enumerate(at):
        advantages[t] = sum((gamma * lam) ** (k - n) * delta[k] for k in range(n, len(at)))
    return advantages


@pytest.mark.parametrize("seed", range(10))
def test_advantages_are_their_sum(seed):
    """What the task says is no step, and its reward counts for the sampled token before it."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 20))
    mask, (rewards, values) = rng.random(length) < 0.6, rng.standard_normal((2, length))
    gamma, lam = rng.random(2)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    truth = defined(rewards, values, mask, gamma, lam)
    assert np.abs(advantages - truth).max(initial=0) < 1e-12
    assert np.abs(returns - np.where(mask, truth + values, 0)).max(initial=0) < 1e-12


def start(**changes):
    small = dict(dtype="float64", prompts=4, group=4, hidden=16, layers=2, advantage="gae")
    config = Config(**small, **changes).check()
    task = make_task(config)
    model, generator, _ = build(config, task)
    trainer = Trainer(config, model, generator=generator)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    trainer.push_weights()
    mine, kept, _ = collect(config, task, generator, 0)
    rng = np.random.default_rng(0)
    for t in (t for group in mine.values() for t in group):  # a random policy earns next to nothing
        turns = np.flatnonzero(t.mask)[::2] if not t.truncated else []
        t.turn_rewards = [(int(at), reward) for at, reward in zip(turns, rng.random(9))]
        t.reward = sum(reward for _, reward in t.turn_rewards)
    return config, trainer, [mine[g] for g in kept]


@pytest.mark.parametrize("tree", [{}, dict(tree="sparse"), dict(tree="dta", max_tokens=5)])
def test_values_are_the_heads_of_each_sequence_by_itself(process_group, tree):
    config, trainer, groups = start(**tree)
    batch = [t for group in groups for t in group]
    for t, values in zip(batch, trainer.compute_values(batch), strict=True):
        with torch.no_grad():
            hidden = trainer.model.hidden(torch.tensor([t.tokens]))[0, :-1]
            truth = trainer.model.values(hidden).numpy() * t.mask
        assert np.abs(values - truth).max() < 1e-12 and np.abs(truth).max() > 1e-3


def test_a_turns_reward_stands_at_its_last_token(process_group):
    config = Config(task=LOOKUP, size=3, group=4, prompts=4, hidden=16, layers=1).check()
    task = make_task(config)
    starts = [(g, *task.prompt(np.random.default_rng(g), g, False)) for g in range(4)]
    for t in demonstrations(task, starts, (0,)):
        at = [at for at, _ in t.turn_rewards]
        ends = [n - 1 for n, token in enumerate(t.tokens) if token == task.end[0]]
        assert at == ends and all(t.mask[n] for n in at)
        assert sum(reward for _, reward in t.turn_rewards) == pytest.approx(t.reward)


def test_advantages_are_whitened_over_the_step(process_group):
    config, trainer, groups = start(gae_lambda=1.0)
    metrics = trainer.prepare(batch_of(groups))
    batch = [t for group in groups for t in group]
    A = np.concatenate([t.advantages[t.mask] for t in batch])
    assert abs(A.mean()) < 1e-12 and abs(A.std() - 1) < 1e-6
    for t in batch:  # lambda 1, gamma 1: the return of each token is what is still to come
        first = np.flatnonzero(t.mask)[0]
        assert abs(t.returns[first] - t.reward) < 1e-12
    R = np.concatenate([t.returns[t.mask] for t in batch])
    V = np.concatenate([t.values[t.mask] for t in batch])
    assert abs(metrics["value/explained_variance"] - (1 - (R - V).var() / R.var())) < 1e-9
    assert abs(metrics["value/token_mean"] - V.mean()) < 1e-12


def test_a_truncated_trajectory_ends_with_nothing(process_group):
    config, trainer, groups = start(max_new_tokens=3)
    cut = [t for group in groups for t in group if t.truncated]
    trainer.prepare(batch_of(groups))
    assert cut
    for t in cut:
        assert abs(t.returns[np.flatnonzero(t.mask)[-1]]) < 1e-12


def test_the_critic_learns_and_only_from_its_own_term(process_group):
    config, trainer, groups = start(value_coef=1.0)
    trainer.prepare(batch_of(groups))
    batch = [t for group in groups for t in group]
    trainer.forward_backward(batch, 100.0)
    assert trainer.model.score.weight.grad.abs().max() > 1e-6
    trainer.model.zero_grad()
    trainer.config = dataclasses.replace(config, value_coef=1e-30)
    trainer.forward_backward(batch, 100.0)
    assert trainer.model.score.weight.grad.abs().max() < 1e-20

"""The loss and its denominators, advantages, and the Trainer's gradient and optimizer step.

Oracles: TRL's numbers (trl_loss_golden.json), formulas per token in plain Python, finite
differences, and each sequence alone through the whole model. Everything is float64.
"""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import LOOKUP, batch_of
from torch.autograd.gradcheck import GradcheckError, gradcheck

import models
import train_grpo
from audit import Recorded, definition, rate_by_hand, score_alone
from parallel import pack
from train_grpo import (
    METRICS, Config, Trainer, Trajectory, advantages, branch_advantages, build, demonstrations,
    grpo_loss, loss_denominator, loss_metrics, loss_weight, lr_factor, make_task, mean_metrics,
)  # fmt: skip
from tree_attention import TokenTrie

pytestmark = pytest.mark.quick
GOLDEN = json.loads((Path(__file__).parent / "trl_loss_golden.json").read_text())
CHOICES = {f.name: get_args(f.type) for f in fields(Config)}
COVERED = [c for c in GOLDEN["cases"] if not c["kl_times_ratio"]]  # we have no such option


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


POLICY = (
    "objective", "ratio", "clip_low", "clip_high", "dual_clip", "cispo_low", "cispo_bound",
    "sapo_up", "sapo_down", "dppo_distance", "dppo_cap", "importance", "importance_of",
    "importance_low", "kl", "kl_coef", "kl_in", "entropy_coef",
)  # fmt: skip


def settings(config):
    """The keyword arguments of `grpo_loss` that are about the policy, and flags."""
    return {name: getattr(config, name) for name in POLICY}


def token_losses(lp, old, A, mask, drawn=None, **how):
    """What `grpo_loss` sums up: the loss of each token, and what is measured of each token."""
    if drawn is not None:  # p_old / p_sampler of each token
        how |= dict(sampler_BT=old - drawn.log(), importance_cap=1e9)
    with mock.patch.object(train_grpo, "weighted_sum", lambda l, *rest, **_: (l, rest[-1])):
        return grpo_loss(lp, old, A, mask, **how)


def weight(t, aggregation):
    return loss_weight(torch.from_numpy(t.mask), aggregation).item()


def label(options):
    return "-".join(f"{k}={v}" for k, v in options.items() if v and k not in ("loss", "grad"))


# 1. The loss of given log-probs --------------------------------------------------------------

# TRL's aggregation -> ours, and the Z that TRL divides by: `grpo` counts the sequence without a
# token too, `dapo` and `cispo` are told the number of tokens of the whole batch.
AGGREGATIONS = {
    "grpo": ("sequence_mean", 6), "dr_grpo": ("constant", 6 * GOLDEN["max_len"]),
    "dapo": ("token_mean", GOLDEN["num_items"]), "cispo": ("token_mean", GOLDEN["num_items"]),
}  # fmt: skip


def our_loss_and_gradient(case):
    given = {k: tensor(v) for k, v in GOLDEN.items() if isinstance(v, list) and k != "cases"}
    lp, mask = given["logprobs"].requires_grad_(), given["mask"].bool()
    aggregation, Z = AGGREGATIONS[case["aggregation"]]
    config = Config(
        objective="cispo" if case["aggregation"] == "cispo" else "clip", ratio=case["ratio"],
        kl="k3", kl_coef=case["beta"], dual_clip=case["dual_clip"] or 0.0, entropy_coef=0.0,
        clip_low=GOLDEN["clip"][0], clip_high=GOLDEN["clip"][1], cispo_bound=GOLDEN["cispo_bound"],
    )  # fmt: skip
    l, stats = token_losses(
        lp, given["old_logprobs"] if case["old"] else lp.detach(), given["advantages"][:, None],
        mask, entropy_BT=given["entropy"], ref_BT=given["ref_logprobs"], **settings(config),
        drawn=given["importance_weights"] if case["importance"] else None,
    )  # fmt: skip
    w = loss_weight(mask, aggregation)
    # TRL's bonus is a mean over this batch's sampled tokens, whatever the aggregation; ours stands
    # in l, under w / Z. So l is made without it here, and it is added as TRL does.
    loss = (w * l).sum() / Z - case["entropy_coef"] * stats["entropy"].sum() / mask.sum()
    loss.backward()
    return loss.item(), lp.grad


@pytest.mark.parametrize("case", COVERED, ids=label)
def test_loss_and_gradient_are_trls(case):
    loss, grad = our_loss_and_gradient(case)
    assert abs(loss - case["loss"]) <= 1e-12
    assert (grad - tensor(case["grad"])).abs().max() <= 1e-12


@pytest.mark.parametrize("case", COVERED, ids=label)
def test_grpo_loss_by_keywords_is_trls(case):
    """The same in one call: log-probs in, the loss and the sums of its metrics out."""
    given = {k: tensor(v) for k, v in GOLDEN.items() if isinstance(v, list) and k != "cases"}
    lp, mask = given["logprobs"].requires_grad_(), given["mask"].bool()
    aggregation, Z = AGGREGATIONS[case["aggregation"]]
    old = given["old_logprobs"] if case["old"] else None
    sampler = lp.detach() if old is None else old
    loss, sums = grpo_loss(
        lp, old, given["advantages"][:, None], mask, Z=Z, aggregation=aggregation,
        objective="cispo" if case["aggregation"] == "cispo" else "clip", ratio=case["ratio"],
        clip_low=GOLDEN["clip"][0], clip_high=GOLDEN["clip"][1],
        cispo_bound=GOLDEN["cispo_bound"], dual_clip=case["dual_clip"] or 0.0,
        sampler_BT=sampler - given["importance_weights"].log() if case["importance"] else None,
        importance_cap=1e9 if case["importance"] else 0.0, kl_coef=case["beta"],
        ref_BT=given["ref_logprobs"], entropy_BT=given["entropy"],
    )  # fmt: skip
    loss = loss - case["entropy_coef"] * (given["entropy"] * mask).sum() / mask.sum()
    loss.backward()
    assert abs(loss.item() - case["loss"]) <= 1e-12
    assert (lp.grad - tensor(case["grad"])).abs().max() <= 1e-12
    assert sums["tokens"] == mask.sum() and 0 <= sums["clipped"] <= mask.sum()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_grpo_loss_of_sequences_one_by_one_is_that_of_the_batch(aggregation):
    x = made(5)
    value, old, returns = torch.randn(3, *x.mask.shape, dtype=torch.float64)
    names = dict(ref_BT=x.ref, entropy_BT=x.entropy, value_BT=value, old_value_BT=old)
    names |= dict(return_BT=returns, sampler_BT=x.old + 0.1)
    how = dict(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.2, importance_cap=2.0)
    whole, sums = grpo_loss(x.lp, x.old, x.A, x.mask, **names, **how)
    Z = loss_denominator(x.mask, aggregation=aggregation, max_new_tokens=16)
    parts = []
    for b in range(len(x.mask)):
        row = {name: tensor[b] for name, tensor in names.items()}
        parts.append(grpo_loss(x.lp[b], x.old[b], x.A[b], x.mask[b], Z=Z, **row, **how))
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), abs=1e-13)
    for name in {"tokens"} | {key for key, how, _ in METRICS.values() if how not in ("", "max")}:
        total = sum(some[name].item() for _, some in parts)
        assert total == pytest.approx(sums[name].item(), abs=1e-12), name
    metrics = loss_metrics({name: value.item() for name, value in sums.items()})
    count = x.mask.sum().item()
    assert metrics["entropy/token_mean"] == pytest.approx(x.entropy[x.mask].sum().item() / count)
    gap = (x.lp - x.old - 0.1)[x.mask].abs()
    assert metrics["logprob_gap/max"] == gap.max() and metrics["loss/token_mean"] == whole


def test_masked_tokens_reach_no_gradient_through_the_importance_weight():
    x = made(6)
    for v in (x.lp, x.old):
        v[~x.mask] = math.nan
    lp = x.lp.requires_grad_()
    loss, sums = grpo_loss(lp, x.old, x.A, x.mask, sampler_BT=x.old + 0.1, importance_cap=0.5)
    loss.backward()
    assert loss.isfinite() and not lp.grad[~x.mask].any() and lp.grad[x.mask].any()
    assert all(value.isfinite() for value in sums.values())


def test_every_golden_case_but_kl_times_ratio_is_covered_and_none_is_trivial():
    assert (len(GOLDEN["cases"]), len(COVERED)) == (200, 146)
    assert all(tensor(c["grad"]).norm() > 1e-3 for c in COVERED)


SETTINGS = [
    dict(), dict(dual_clip=3.0), dict(ratio="sequence", clip_low=0.03, clip_high=0.04),
    dict(ratio="sequence", dual_clip=1.3, kl="k1", kl_coef=0.1), dict(kl="k2", kl_coef=0.2),
    dict(kl="k3", kl_coef=0.3), dict(kl="k3", kl_coef=0.3, kl_in="reward", entropy_coef=0.0),
    dict(objective="sapo", sapo_up=0.7, sapo_down=1.4), dict(objective="gspo", dual_clip=1.3),
    dict(objective="gmpo", clip_low=0.3, clip_high=0.2),
    dict(objective="cispo", cispo_bound=1.3, kl_coef=0.1), dict(objective="cispo", cispo_low=0.9),
    dict(objective="reinforce"), dict(objective="dppo", clip_low=0.03, clip_high=0.02),
    dict(objective="dppo", dppo_distance="kl", clip_low=5e-3, clip_high=8e-3, dppo_cap=1.1),
]  # fmt: skip
# The gradient of the others is no derivative of their value.
DERIVATIVES = [options for options in SETTINGS if options.get("objective", "clip") not in (
    "cispo", "reinforce", "dppo")]  # fmt: skip
IMPORTANCES = [
    dict(importance=how, importance_of=what, importance_low=0.7)
    for how in CHOICES["importance"] for what in CHOICES["importance_of"]
]  # fmt: skip
IMPORTANCES += [dict(objective="gmpo"), dict(objective="gspo", importance="mask")]


def made(seed, B=5, T=7):
    """Random inputs of grpo_loss; row 0 has no sampled token."""
    rng = torch.Generator().manual_seed(seed)
    lp, old, ref, A, entropy, weight, mask = torch.randn(7, B, T, generator=rng).double()
    return SimpleNamespace(
        lp=(lp - 2).clamp(max=-0.1), old=(lp - 2 + 0.5 * old).clamp(max=-0.1),
        ref=lp - 2 + 0.5 * ref, A=A[:, :1],
        entropy=entropy.abs(), importance=weight.exp().clamp(max=2),
        mask=(mask < 0.5) & (torch.arange(B) > 0)[:, None],
    )  # fmt: skip



def loss_of(x, config):
    more = dict(entropy_BT=x.entropy, ref_BT=x.ref, drawn=x.importance)
    return token_losses(x.lp, x.old, x.A, x.mask, **settings(config), **more)


def textbook(lp, old, ref, entropy, weight, A, c):
    """The losses of one sequence's sampled tokens, lists; the clip by the sign of A."""
    out, cap, low, high = [], c.dual_clip or math.inf, 1 - c.clip_low, 1 + c.clip_high
    for t, now in enumerate(lp):
        r = math.exp(now - old[t])
        if c.ratio == "sequence" or c.objective == "gspo":  # the geometric mean of the ratios
            r = math.prod(math.exp(a - b) for a, b in zip(lp, old)) ** (1 / len(lp))
        if c.objective == "cispo":
            gain = min(max(r, c.cispo_low), c.cispo_bound) * A * now
        elif c.objective == "reinforce":
            gain = A * now
        elif c.objective == "sapo":
            tau = c.sapo_up if A > 0 else c.sapo_down
            gain = 4 / tau / (1 + math.exp(-tau * (r - 1))) * A
        elif c.objective == "gmpo":
            few = [min(a - b, c.clip_high) if A > 0 else max(a - b, -c.clip_low)
                   for a, b in zip(lp, old)]  # fmt: skip
            gain = math.prod(map(math.exp, few)) ** (1 / len(few)) * A
        elif c.objective == "dppo":
            p, q = math.exp(now), math.exp(old[t])
            far = abs(p - q)
            if c.dppo_distance == "kl":
                far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            too_far = p > q and far > c.clip_high if A > 0 else p < q and far > c.clip_low
            gain = 0.0 if too_far else min(r, c.dppo_cap) * A * now
        elif A >= 0:
            gain = A * min(r, high, cap)
        else:
            gain = A * max(min(r, cap), min(max(r, low), high))
        d = now - ref[t]
        kl = {"k1": d, "k2": 0.5 * d**2, "k3": math.expm1(-d) + d}[c.kl] * (c.kl_in == "loss")
        out.append(-gain * weight[t] + c.kl_coef * kl - c.entropy_coef * entropy[t])
    return out


@pytest.mark.parametrize("options", SETTINGS, ids=label)
def test_every_token_of_the_loss_is_the_textbooks(options):
    x, config = made(0), Config(**options)
    l, _ = loss_of(x, config)
    for b, on in enumerate(x.mask):
        row = [v[b][on].tolist() for v in (x.lp, x.old, x.ref, x.entropy, x.importance)]
        assert l[b][on].tolist() == pytest.approx(textbook(*row, x.A[b].item(), config), abs=1e-12)
        assert not l[b][~on].any()


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("options", SETTINGS + IMPORTANCES, ids=label)
def test_the_slow_definition_gives_the_loss_and_its_gradient(options, critic):
    """Of the whole loss, with the importance weight and the critic, under each aggregation."""
    x, c = made(1), Config(**dict(entropy_coef=0.1, importance_cap=2.0, value_clip=0.3) | options)
    smp, v, v_old, g = x.old - x.importance.log(), *torch.randn(3, *x.lp.shape).double()
    for aggregation in CHOICES["aggregation"]:
        leaves = [y.clone().requires_grad_() for y in (x.lp, x.entropy, v)]
        more = dict(value_BT=leaves[2], old_value_BT=v_old, return_BT=g, value_clip=0.3)
        loss, _ = grpo_loss(
            leaves[0], x.old, x.A, x.mask, Z=17.0, aggregation=aggregation, sampler_BT=smp,
            importance_cap=2.0, ref_BT=x.ref, entropy_BT=leaves[1], **more if critic else {},
            **settings(c),
        )  # fmt: skip
        loss.backward()
        slow = [y.clone().requires_grad_() for y in (x.lp, x.entropy, v)]
        w, rows = loss_weight(x.mask, aggregation)[:, 0].tolist(), []
        for b, on in enumerate(x.mask):
            if not on.any():
                continue
            lp, H, values = (list(y[b][on]) for y in slow)
            old, sampler, ref, A, before, returns = (
                y[b][on].tolist() for y in (x.old, smp, x.ref, x.A.expand(5, 7), v_old, g)
            )
            s = SimpleNamespace(lp=lp, H=H, v=values if critic else None, old=old, smp=sampler)
            s.ref, s.A, s.v_old, s.g, s.w = ref, A, before, returns, w[b]
            rows.append(s)
        found = definition(rows, 17.0, c)
        found.backward()
        assert found.item() == pytest.approx(loss.item(), abs=1e-13)
        parts = [term["part"] for s in rows for term in s.terms]
        assert math.fsum(parts) == pytest.approx(loss.item(), abs=1e-13)
        for ours, theirs in zip(slow, leaves):
            grads = [0 * y if y.grad is None else y.grad for y in (ours, theirs)]
            assert (grads[0] - grads[1]).abs().max() < 1e-13


@pytest.mark.parametrize("options", DERIVATIVES, ids=label)
def test_the_gradient_is_the_finite_difference(options):
    x, config = made(2), Config(**options)
    inputs = x.lp.clone().requires_grad_(), x.entropy.clone().requires_grad_()

    def loss(lp, entropy, scale=1.0):  # scale changes the gradient and not the value
        x.lp, x.entropy = lp * scale + lp.detach() * (1 - scale), entropy
        l = loss_of(x, config)[0]
        # A ratio of a sequence is shared out among its tokens, so only their sum has a derivative.
        is_token = config.ratio == "token" and config.objective in ("clip", "sapo")
        return l if is_token else l.sum(-1)

    assert gradcheck(loss, inputs, eps=1e-6, atol=1e-8)
    with pytest.raises(GradcheckError):
        gradcheck(lambda *both: loss(*both, scale=0.0), inputs, eps=1e-6, atol=1e-8)


def test_cispo_has_the_gradient_of_weighted_log_likelihood():
    x, lp = made(3), made(3).lp.requires_grad_()
    config = Config(objective="cispo", cispo_bound=1.3, entropy_coef=0.0)
    token_losses(lp, x.old, x.A, x.mask, **settings(config))[0].sum().backward()
    weight = torch.exp(x.lp - x.old).minimum(tensor(1.3))
    assert torch.allclose(lp.grad, -weight * x.A * x.mask, rtol=0, atol=1e-13)
    assert ((weight == 1.3) & x.mask).any()  # and such a token keeps a gradient


def test_a_log_ratio_is_clamped_to_ten_before_exp():
    one, config = torch.ones(1, 2).double(), Config(clip_low=0.2, entropy_coef=0.0)
    given = tensor([[500.0, -500.0]]), 0 * one, -one, one.bool()
    l, _ = token_losses(*given, **settings(config))
    assert l.tolist() == [[pytest.approx(math.exp(10)), pytest.approx(0.8)]]


@pytest.mark.parametrize(
    "A, dual, lost", [(1, 0, [0, 0, 1, 1]), (-1, 0, [1, 0, 0, 0]), (-1, 3, [1, 0, 0, 1])]
)
def test_a_token_counts_as_clipped_where_its_ratio_has_no_gradient(A, dual, lost):
    lp, config = tensor([[0.5, 1.1, 1.5, 4.0]]).log().requires_grad_(), Config(dual_clip=dual)
    given = lp, torch.zeros_like(lp), tensor([[A]]), lp < 9
    l, stats = token_losses(*given, **settings(config))
    l.sum().backward()
    assert stats["clipped"][0].tolist() == lost == (lp.grad[0] == 0).tolist()


@pytest.mark.parametrize("options", SETTINGS, ids=label)
def test_masked_tokens_may_hold_anything(options):
    def everything(junk):
        x = made(4)
        for v in (x.lp, x.old, x.ref, x.entropy):
            v[~x.mask] = junk
        x.lp.requires_grad_(), x.entropy.requires_grad_()
        l, stats = loss_of(x, Config(**options))
        (l.sum() + 0 * x.entropy[x.mask].sum()).backward()
        return torch.stack([l.detach(), x.lp.grad, x.entropy.grad, *stats.values()]), ~x.mask

    clean, off = everything(0.0)
    for junk in (-math.inf, math.inf, math.nan, 1e30):
        dirty, _ = everything(junk)
        assert dirty.equal(clean) and dirty.isfinite().all() and not dirty[:, off].any()


# 2. Advantages, weights, denominators --------------------------------------------------------


def test_advantages_are_those_computed_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.5])  # mean .5; squares sum to 1, over 4: std .5
    hand = {"group_mean": 1.0, "group_std": 1 / (0.5 + 1e-4), "leave_one_out": 5 / 4}
    for kind, factor in hand.items():
        assert advantages(rewards, kind) == pytest.approx(factor * (rewards - 0.5), abs=1e-15)
    assert advantages(np.array([3.0, 0.0]), "leave_one_out").tolist() == [3.0, -3.0]
    with pytest.raises(ValueError, match="median"):
        advantages(rewards, "median")


@pytest.mark.parametrize("kind", ["group_mean", "group_std", "leave_one_out"])
def test_a_group_of_equal_rewards_has_no_advantage(kind):
    for reward in (0.0, 1.0, 0.1, 1 / 3):
        assert np.abs(advantages(np.full(7, reward), kind)).max() <= 1e-12


TREE = [  # 0 1 | 2 3 part at token 5, 0 | 1 at token 8; 2 and 3 are one row that ended before
    [(2, 0, 4), (5, 0, 2), (8, 0, 1)], [(2, 0, 4), (5, 0, 2), (8, 1, 1)],
    [(2, 0, 4), (5, 2, 2)], [(2, 0, 4), (5, 2, 2)],
]  # fmt: skip


def test_branch_advantages_of_a_tree_are_those_computed_by_hand():
    marks = branch_advantages(np.array([1.0, 0.0, 0.25, 0.25]), TREE)  # V .375; .5 .25; 1 0
    assert marks[0] == [(1, 0.0), (4, 0.125), (7, 0.5)]
    assert marks[1] == [(1, 0.0), (4, 0.125), (7, -0.5)]
    assert marks[2] == marks[3] == [(1, 0.0), (4, -0.125)]


def test_branch_advantages_without_forks_are_group_mean():
    rewards = np.random.default_rng(0).standard_normal(4)
    marks = branch_advantages(rewards, [[(2, i, 1)] for i in range(4)])
    assert [start for [(start, _)] in marks] == [1] * 4
    assert [a for [(_, a)] in marks] == pytest.approx(advantages(rewards, "group_mean"), abs=1e-15)


def test_weights_and_denominators_count_sampled_tokens():
    rows = [np.array(m, dtype=bool) for m in ([1, 1, 0, 1], [1], [0, 0])]
    batch = [Trajectory(0, [], mask, np.zeros(len(mask))) for mask in rows]
    for aggregation, Z in {"token_mean": 4.0, "sequence_mean": 2.0, "constant": 30.0}.items():
        assert loss_denominator(rows, aggregation=aggregation, max_new_tokens=10) == Z
    assert [weight(t, "sequence_mean") for t in batch] == [1 / 3, 1.0, 1.0]
    assert {weight(t, a) for a in ("token_mean", "constant") for t in batch} == {1.0}


# 3. The Trainer's gradient -------------------------------------------------------------------


def make_trainer(**options):
    config = Config(hidden=16, heads=2, layers=1, dtype="float64", **options)
    model, generator, _ = build(config, make_task(config))
    return Trainer(config, model, generator=generator)


def test_one_process_has_a_plan_and_a_generator_in_the_policys_memory(process_group):
    trainer = make_trainer()
    assert str(trainer.plan) == "d1" and trainer.grid.plan == trainer.plan
    trainer.push_weights()
    both = zip(trainer.model.parameters(), trainer.generator.parameters(), strict=True)
    assert all(p.is_set_to(q) and p.abs().sum() > 0 for p, q in both)


def test_a_generator_that_has_memory_stays_a_copy(process_group):
    config = Config(hidden=16, heads=2, layers=1).check()
    model, generator, _ = build(config, make_task(config))
    own = generator.to_empty(device="cpu").head_weight
    trainer = Trainer(config, model, generator=generator)
    assert trainer.generator.head_weight is own and not own.is_set_to(trainer.model.head_weight)


def test_demonstrations_and_rollouts_in_one_call_are_refused(process_group):
    trainer, batch = make_trainer(), some_batch()
    batch[0].supervised = True
    with pytest.raises(ValueError, match="got both: make two calls"):
        trainer.forward_backward(batch, 9.0)


def test_the_table_says_how_updates_become_one():
    first = {"loss/token_mean": 1.0, "ratio/max": 2.0, "logprob_gap/mean": 3.0}
    second = {"loss/token_mean": 2.0, "ratio/max": 1.0, "logprob_gap/mean": 9.0}
    age = "policy_age/update_mean"
    assert mean_metrics([first | {age: 0, "lr": 0.1}, second | {age: 1, "lr": 0.1}], 0) == {
        "loss/token_mean_first": 1.0, "loss/token_mean": 1.5, "ratio/max_first": 2.0,
        "ratio/max": 2.0, "logprob_gap/mean": 3.0, age: 0.5,
    }  # fmt: skip
    assert mean_metrics([first], 0) == first


def some_batch():
    """Random trajectories of guess's tokens; the third and the last have no sampled token."""
    rng, batch = np.random.default_rng(0), []
    for i, L in enumerate((5, 9, 2, 7, 12, 3, 2)):
        mask = (rng.random(L - 1) < 0.7) & (L > 2)
        smp, old, ref = (np.where(mask, rng.standard_normal(L - 1), 0.0) for _ in range(3))
        some = dict(old_logprobs=smp + 0.1 * old - 2 * mask, ref_logprobs=ref - 2 * mask)
        A, tokens = np.full(L - 1, rng.standard_normal()), rng.integers(11, size=L).tolist()
        batch.append(Trajectory(i, tokens, mask, smp - 2 * mask, advantages=A, **some))
    return batch


def flat_gradient(trainer):
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def gradient(trainer, calls, Z, **how):
    """Loss and gradient of forward_backward over the calls, each a list of trajectories."""
    trainer.model.zero_grad()
    loss = sum(trainer.forward_backward(b, Z, **how)["loss/token_mean"] for b in calls)
    return torch.cat([tensor([loss]), flat_gradient(trainer)])


def alone(trainer, t):
    """(L - 1, V): log-probs of every token at each target of t, from the logits of t alone."""
    logits = trainer.model(torch.tensor([t.tokens]))[0, :-1]
    return (logits / trainer.config.temperature).log_softmax(-1)


def gradient_by_definition(trainer, batch, Z):
    """Loss and gradient by `definition`, each sequence by itself."""
    trainer.model.zero_grad()
    total, c = 0.0, trainer.config
    for t in (t for t in batch if t.mask.any()):
        at = np.flatnonzero(t.mask).tolist()
        smp, A, old, ref = (
            x[at].tolist()
            for x in (t.sampler_logprobs, t.advantages, t.old_logprobs, t.ref_logprobs)
        )
        s = Recorded(t.group, 0, t.tokens, at, smp, [], False, A=A, old=old, ref=ref)
        s.w = 1 / len(at) if c.aggregation == "sequence_mean" else 1.0
        s.lp, s.H, _ = score_alone(trainer.model, s, c.temperature)
        loss = definition([s], Z, c)
        loss.backward()
        total += loss.item()
    return torch.cat([tensor([total]), flat_gradient(trainer)])


AGGREGATED = [
    dict(aggregation="token_mean", temperature=0.7, importance_cap=1.05),
    dict(aggregation="sequence_mean", ratio="sequence", clip_low=0.5, clip_high=0.9, kl_coef=0.1),
    dict(aggregation="constant", objective="cispo", entropy_coef=0.3),
]


@pytest.mark.parametrize("options", AGGREGATED, ids=label)
def test_micro_batches_order_packing_and_calls_do_not_change_the_gradient(process_group, options):
    trainer, batch = make_trainer(**options), some_batch()
    Z = trainer.loss_denominator(batch)
    truth = gradient_by_definition(trainer, batch, Z)
    assert truth[1:].norm() > 1e-3
    for micro_tokens in (1, 8, 13, 10**6):
        trainer.config = replace(trainer.config, micro_tokens=micro_tokens)
        mixed = [batch[i] for i in np.random.default_rng(micro_tokens).permutation(len(batch))]
        for calls in ([batch], [mixed], [mixed[:1], [], mixed[1:5], mixed[5:]]):
            assert (gradient(trainer, calls, Z) - truth).norm() <= 1e-12 * truth.norm()


@pytest.mark.parametrize("family", models.TINY)
def test_every_family_trains_with_the_gradient_of_the_definition(process_group, family):
    trainer, batch = make_trainer(), some_batch()
    trainer = Trainer(trainer.config, models.tiny_model(family, vocab_size=11))
    Z = trainer.loss_denominator(batch)
    truth = gradient_by_definition(trainer, batch, Z)
    assert (gradient(trainer, [batch[:3], batch[3:]], Z) - truth).norm() <= 1e-12 * truth.norm()


@pytest.mark.parametrize("options", AGGREGATED[:2], ids=label)
def test_a_denominator_per_call_would_change_the_gradient(process_group, options):
    trainer, batch = make_trainer(**options), some_batch()
    truth = gradient(trainer, [batch], trainer.loss_denominator(batch))
    parts = batch[:1], batch[1:]
    mean = sum(gradient(trainer, [p], trainer.loss_denominator(p)) for p in parts) / 2
    assert (mean - truth)[1:].norm() > 0.05 * truth[1:].norm()


def test_without_old_logprobs_the_policy_is_its_own_old_policy(process_group):
    trainer, batch = make_trainer(), some_batch()
    given = [replace(t, old_logprobs=lp) for t, lp in zip(batch, trainer.forward_only(batch))]
    own = [replace(t, old_logprobs=None) for t in batch]
    expected = gradient(trainer, [given], 10.0)
    assert (gradient(trainer, [own], 10.0) - expected).norm() <= 1e-12 * expected.norm()


def test_forward_only_gives_each_trajectorys_own_logprobs(process_group):
    trainer, batch = make_trainer(temperature=0.5, micro_tokens=10), some_batch()
    for t, lp in zip(batch, trainer.forward_only(batch), strict=True):
        whole = alone(trainer, t)[np.arange(len(t.mask)), t.tokens[1:]].detach().numpy()
        assert lp == pytest.approx(np.where(t.mask, whole, 0.0), abs=1e-12)


def test_supervised_steps_follow_the_mean_log_likelihood_of_demonstrations(process_group):
    trainer = make_trainer(task=LOOKUP, importance_cap=2.0)  # the policy's loss has no part in it
    task = make_task(trainer.config)
    starts = [(g, *task.prompt(np.random.default_rng(g), g, False)) for g in range(4)]
    batch = demonstrations(task, starts, (0,))
    got = gradient(trainer, [batch], trainer.loss_denominator(batch))
    trainer.model.zero_grad()
    lp = [alone(trainer, t)[np.arange(len(t.mask)), t.tokens[1:]][t.mask] for t in batch]
    loss = -torch.cat(lp).mean()
    loss.backward()
    expected = torch.cat([loss.detach()[None], flat_gradient(trainer)])
    assert (got - expected).norm() <= 1e-12 * expected.norm()


def test_the_filter_takes_every_truncated_rollout_out_of_the_loss(process_group):
    """And no other one. Advantages compare the rewards of all of them: 1, 0, 1, 0."""
    trainer = make_trainer(overlong="filter", advantage="group_mean", group=4)
    group = []
    for cut, reward in [(True, 1.0), (True, 0.0), (False, 1.0), (False, 0.0)]:
        sampled, rewards = np.ones(2, bool), [(1, reward)]
        group.append(Trajectory(0, [1, 2, 3], sampled, -np.ones(2), cut, turn_rewards=rewards))
    trainer.prepare(batch_of([group]))
    assert [t.mask.tolist() for t in group] == [[False] * 2] * 2 + [[True] * 2] * 2
    assert [t.advantages.tolist() for t in group[2:]] == [[0.5] * 2, [-0.5] * 2]


@pytest.mark.parametrize(
    "groups, count, sizes", [(5, 2, [2, 3]), (4, 3, [1, 1, 2]), (1, 2, [0, 1])]
)
def test_minibatches_have_whole_groups_in_order(groups, count, sizes):
    batch = train_grpo.SampledBatch(
        {g: [(g, "a"), (g, "b")] for g in range(groups)}, range(groups), count, sampled_by=0
    )
    found = [*batch.minibatches()]
    assert [len(rollouts) // 2 for rollouts in found] == sizes
    assert sum(found, []) == [(g, name) for g in range(groups) for name in "ab"]


def test_a_denominator_of_0_is_refused(process_group):
    with pytest.raises(ValueError, match="num_global_valid_tokens must be .*, got 0"):
        make_trainer().forward_backward(some_batch(), 0)


# 4. The optimizer step -----------------------------------------------------------------------


def put_gradients(trainer, scale=1.0, seed=0, **spoilt):
    rng = torch.Generator().manual_seed(seed)
    for p in trainer.model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=rng, dtype=torch.float64)
    for name, value in spoilt.items():
        trainer.model.get_parameter(name.replace("__", ".")).grad.view(-1)[3] = value


def all_tensors(trainer):
    states = [trainer.optimizer.state[p] for p in trainer.model.parameters()]
    return [*trainer.model.parameters(), *(x for state in states for x in state.values())]


def gradients_are_zero(trainer):
    return not any(p.grad is not None and p.grad.any() for p in trainer.model.parameters())


def test_optim_step_is_clipped_adamw(process_group):
    trainer = make_trainer(lr=0.01, weight_decay=0.1, beta2=0.8, max_grad_norm=1.0)
    p, m, v = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), 0.0, 0.0
    for t, (scale, lr) in enumerate([(3.0, None), (1e-4, 0.02), (1.0, 0.005)], 1):
        put_gradients(trainer, scale, seed=t)
        g = flat_gradient(trainer)
        norm = g.norm().item()
        metrics, lr = trainer.optim_step(lr), lr or 0.01
        assert metrics == {"grad_norm": pytest.approx(norm), "lr": lr, "policy_version": t}
        assert gradients_are_zero(trainer)
        g = g * min(1.0, 1.0 / norm)
        m, v = 0.9 * m + 0.1 * g, 0.8 * v + 0.2 * g**2
        p = p - lr * (0.1 * p + m / (1 - 0.9**t) / ((v / (1 - 0.8**t)).sqrt() + 1e-8))
        now = torch.cat([q.detach().flatten() for q in trainer.model.parameters()])
        assert (now - p).abs().max() <= 1e-12


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_gradient_skips_the_step_and_is_named(process_group, value):
    trainer = make_trainer()
    put_gradients(trainer)
    trainer.optim_step()
    before = [x.clone() for x in all_tensors(trainer)]
    put_gradients(trainer, model__layers__0__mlp__up_proj__weight=value)
    metrics = trainer.optim_step()
    assert metrics["nonfinite"] == "model.layers.0.mlp.up_proj.weight on rank 0"
    assert all(a.equal(b) for a, b in zip(before, all_tensors(trainer), strict=True))
    assert (trainer.policy_version, trainer.skipped, trainer.skipped_in_a_row) == (1, 1, 1)
    assert gradients_are_zero(trainer)


def test_trees_are_cut_by_their_own_tokens(process_group):
    batch = [[*range(8), *some] for some in ([8], [9, 9], [9, 9, 1], [7])]
    batch += [[0, 1], [5] * 4]  # a prefix, and then nothing in common
    masks = [np.ones(len(tokens) - 1, dtype=bool) for tokens in batch]
    # All together have 8 + 1 + 2 + 1 + 1 + 4 tokens; a longer sequence is alone in a tree.
    for micro_tokens, count in {17: 1, 16: 2, 12: 3, 10: 4, 1: 6}.items():
        run = make_trainer(tree="sparse", micro_tokens=micro_tokens)
        run = run.batches(run.model)
        cuts, rows = run.pack_micro_batches(batch, masks)
        sizes = [len(TokenTrie([batch[i] for i in cut])) for cut in cuts]
        assert sorted(i for cut in cuts for i in cut) == [*range(6)] and len(cuts) == count
        assert all(len(cut) == 1 or n <= micro_tokens for cut, n in zip(cuts, sizes))
        assert run.tokens_run == sum(sizes) == sum(row.tokens_1S.shape[1] for row in rows)
    lengths = [len(tokens) for tokens in batch]
    assert [len(micro) for micro in pack(lengths, 12)] == [1, 1, 1, 2, 1]


@pytest.mark.parametrize("size", [1, 30, 10000])
def test_the_gradient_of_a_tree_does_not_depend_on_its_cut(process_group, size):
    trainer, batch = make_trainer(), some_batch()
    truth = gradient(trainer, [batch], 10.0)
    trees = make_trainer(tree="sparse", micro_tokens=size)
    assert (gradient(trees, [batch], 10.0) - truth).norm() <= 1e-12 * truth.norm()


@pytest.mark.parametrize("tree", [{}, dict(tree="sparse"), dict(tree="dta", max_tokens=5)])
def test_a_nan_in_the_loss_skips_the_step_in_every_tree_mode(process_group, tree):
    trainer, batch = make_trainer(**tree), some_batch()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    batch[1] = replace(batch[1], advantages=batch[1].advantages * math.nan)
    trainer.forward_backward(batch, 10.0)
    assert "on rank 0" in trainer.optim_step()["nonfinite"] and trainer.skipped == 1
    after = trainer.model.parameters()
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))


def test_max_skipped_steps_in_a_row_raise_and_a_finite_one_resets_the_row(process_group, tmp_path):
    """A checkpoint holds the counts, so a resumed run goes on with the row."""
    stopped = make_trainer(max_skipped=2)
    for value in (math.nan, 0.0, math.nan):
        put_gradients(stopped, lm_head__weight=value)
        stopped.optim_step()
    stopped.save_checkpoint(tmp_path / "saved", step=3)
    trainer = make_trainer(max_skipped=2)
    trainer.load_checkpoint(tmp_path / "saved")
    for x in (stopped, trainer):
        assert (x.skipped, x.skipped_in_a_row, x.policy_version) == (2, 1, 1)
    put_gradients(trainer, lm_head__weight=math.inf)
    with pytest.raises(FloatingPointError, match="^2 .*in a row.* lm_head.weight on rank 0"):
        trainer.optim_step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_push_weights_copies_in_the_generators_dtype(process_group, dtype):
    trainer = make_trainer(generator_dtype=dtype)
    put_gradients(trainer)
    trainer.optim_step()
    assert trainer.push_weights() == 1
    for p, q in zip(trainer.model.parameters(), trainer.generator.parameters(), strict=True):
        assert q.dtype == getattr(torch, dtype) and q.equal(p.to(q.dtype))


SCHEDULES = {
    "linear": [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
    "cosine": [0.5, 1, 1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381],
    "constant": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
}


@pytest.mark.parametrize("decay", SCHEDULES)
def test_lr_factor_is_torchtitans_schedule_and_never_zero(decay):
    factors = [lr_factor(step, warmup=2, total=10, decay=decay) for step in range(10)]
    assert factors == pytest.approx(SCHEDULES[decay], abs=5e-5 if decay == "cosine" else 1e-15)


@pytest.mark.parametrize("decay", CHOICES["lr_decay"])
@pytest.mark.parametrize("first, least", [("nonzero", 0.0), ("zero", 0.25), ("nonzero", 1.0)])
def test_the_flags_of_the_rate_are_the_schedule_and_the_rate_by_hand(decay, first, least):
    how = dict(lr=2.0, lr_warmup=2, steps=10, lr_decay=decay, lr_min=least, lr_first_step=first)
    config = Config(**how).check()
    rates = [Trainer.learning_rate(SimpleNamespace(config=config), step) for step in range(10)]
    by_hand = [rate_by_hand(config, step) for step in range(10)]
    assert np.allclose(rates, by_hand, rtol=1e-15)
    assert rates[0] == (1.0 if first == "nonzero" else 0.0) and max(rates) == 2.0
    assert min(rates[2:]) >= 2 * least


@pytest.mark.quick
@pytest.mark.parametrize("decay", CHOICES["lr_decay"])
@pytest.mark.parametrize("warmup", [3, 4, 2**62])
def test_a_warm_up_is_at_most_the_whole_run(decay, warmup):
    config = Config(lr=2.0, steps=4, lr_warmup=warmup, lr_decay=decay).check()
    rates = [Trainer.learning_rate(SimpleNamespace(config=config), step) for step in range(4)]
    assert rates == [rate_by_hand(config, step) for step in range(4)]
    assert rates == pytest.approx([2 / 3, 4 / 3, 2, 2] if warmup == 3 else [0.5, 1, 1.5, 2])

"""The loss and its denominators, advantages, and the Trainer's gradient and optimizer step.

Oracles: TRL's numbers (trl_loss_golden.json), the loops over tokens of audit.py, and each sequence
alone through the whole model. Everything is float64.
"""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from conftest import LOOKUP, batch_of

import models
from audit import Recorded, definition, rate_by_hand, score_alone
from parallel import pack
from train_grpo import (
    LOSS_SETTINGS, METRICS, Config, SampledBatch, Trainer, Trajectory, advantages,
    branch_advantages, build, demonstrations, grpo_loss, loss_denominator, loss_metrics,
    loss_weight, lr_factor, make_task, mean_metrics,
)  # fmt: skip
from tree_attention import TokenTrie

pytestmark = pytest.mark.quick
GOLDEN = json.loads((Path(__file__).parent / "trl_loss_golden.json").read_text())
CHOICES = {f.name: get_args(f.type) for f in fields(Config)}
COVERED = [c for c in GOLDEN["cases"] if not c["kl_times_ratio"]]  # we have no such option


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def settings(config):
    """The keyword arguments of `grpo_loss` that are flags."""
    return {name: getattr(config, name) for name in LOSS_SETTINGS}


def label(options):
    return "-".join(f"{k}={v}" for k, v in options.items() if v and k not in ("loss", "grad"))


# 1. The loss of given log-probs --------------------------------------------------------------

# TRL's aggregation -> ours, and the Z that TRL divides by: `grpo` counts the sequence without a
# token too, `dapo` and `cispo` are told the number of tokens of the whole batch.
AGGREGATIONS = {
    "grpo": ("sequence_mean", 6), "dr_grpo": ("constant", 6 * GOLDEN["max_len"]),
    "dapo": ("token_mean", GOLDEN["num_items"]), "cispo": ("token_mean", GOLDEN["num_items"]),
}  # fmt: skip


@pytest.mark.parametrize("case", COVERED, ids=label)
def test_loss_and_gradient_are_trls(case):
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
    # TRL's bonus is a mean over this batch's sampled tokens, whatever the aggregation; ours stands
    # in l, under w / Z. So the loss is made without it, and it is added as TRL does.
    loss = loss - case["entropy_coef"] * sums["entropy"] / mask.sum()
    loss.backward()
    assert abs(loss.item() - case["loss"]) <= 1e-12
    assert (lp.grad - tensor(case["grad"])).abs().max() <= 1e-12
    assert sums["tokens"] == mask.sum() and 0 <= sums["clipped"] <= mask.sum()


def test_every_golden_case_but_kl_times_ratio_is_covered_and_none_is_trivial():
    assert (len(GOLDEN["cases"]), len(COVERED)) == (200, 146)
    assert all(tensor(c["grad"]).norm() > 1e-3 for c in COVERED)


SETTINGS = [
    dict(), dict(dual_clip=1.5), dict(ratio="sequence", clip_low=0.03, clip_high=0.04),
    dict(ratio="sequence", dual_clip=1.3, kl="k1", kl_coef=0.1), dict(kl="k2", kl_coef=0.2),
    dict(kl="k3", kl_coef=0.3), dict(kl="k3", kl_coef=0.3, kl_in="reward", entropy_coef=0.0),
    dict(objective="sapo", sapo_up=0.7, sapo_down=1.4), dict(objective="gspo", dual_clip=1.3),
    dict(objective="gmpo", clip_low=0.3, clip_high=0.2), dict(value_clip=0.0),
    dict(objective="cispo", cispo_bound=1.3, kl_coef=0.1), dict(objective="cispo", cispo_low=0.9),
    dict(objective="reinforce"), dict(objective="dppo", clip_low=0.03, clip_high=0.02),
    dict(objective="dppo", dppo_distance="kl", clip_low=5e-3, clip_high=8e-3, dppo_cap=1.1),
]  # fmt: skip
SETTINGS += [
    dict(importance=how, importance_of=what, importance_low=0.7)
    for how in CHOICES["importance"] for what in CHOICES["importance_of"]
]  # fmt: skip
SETTINGS += [dict(objective="gmpo"), dict(objective="gspo", importance="mask")]
VECTORS = "ref_BT", "entropy_BT", "sampler_BT", "value_BT", "old_value_BT", "return_BT"


def made(seed, B=5, T=7):
    """Random inputs of grpo_loss by their names; row 0 has no sampled token."""
    rng = torch.Generator().manual_seed(seed)
    lp, old, A, mask, *others = torch.randn(10, B, T, generator=rng).double()
    lp = (lp - 2).clamp(max=-0.1)
    old = (lp + 0.5 * old).clamp(max=-0.1)
    x = SimpleNamespace(lp=lp, old=old, A=A[:, :1], more=dict(zip(VECTORS, others)))
    x.mask = (mask < 0.5) & (torch.arange(B) > 0)[:, None]
    x.more |= dict(ref_BT=lp + 0.5 * others[0], entropy_BT=others[1].abs())
    x.more["sampler_BT"] = old - others[2].clamp(max=0.7)
    return x


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("options", SETTINGS, ids=label)
def test_the_slow_definition_gives_the_loss_its_gradient_and_its_sums(options, critic):
    """Of the whole loss, with the importance weight and the critic, under each aggregation."""
    # Of this seed each clip, also the dual ones, acts on a few tokens.
    x, some = made(4), dict(entropy_coef=0.1, importance_cap=2.0, value_clip=0.3) | options
    for aggregation in CHOICES["aggregation"]:
        c = Config(**some, aggregation=aggregation)
        without = {} if critic else dict(value_BT=None)
        lp, H, v = (y.clone().requires_grad_() for y in (x.lp, *map(x.more.get, VECTORS[1:4:2])))
        more = x.more | dict(entropy_BT=H, value_BT=v) | without
        loss, sums = grpo_loss(lp, x.old, x.A, x.mask, Z=17.0, **settings(c), **more)
        loss.backward()

        # By loops over the sampled tokens of each row.
        slow = [y.detach().clone().requires_grad_() for y in (lp, H, v)]
        w, rows = loss_weight(x.mask, aggregation)[:, 0].tolist(), []
        for b, on in enumerate(x.mask):
            if on.any():
                s = SimpleNamespace(w=w[b], A=x.A.expand(5, 7)[b][on].tolist())
                s.lp, s.H, values = (list(y[b][on]) for y in slow)
                s.v = values if critic else None
                names = dict(ref="ref_BT", smp="sampler_BT", v_old="old_value_BT", g="return_BT")
                vars(s).update({name: x.more[y][b][on].tolist() for name, y in names.items()})
                s.old = x.old[b][on].tolist()
                rows.append(s)
        found = definition(rows, 17.0, c)
        found.backward()
        assert found.item() == pytest.approx(loss.item(), abs=1e-13)
        for ours, theirs in zip(slow, (lp, H, v)):
            grads = [0 * y if y.grad is None else y.grad for y in (ours, theirs)]
            assert (grads[0] - grads[1]).abs().max() < 1e-13
        terms = [term for s in rows for term in s.terms]
        names = dict(part="loss", clips="clipped", H="entropy", k="kl", value="value", r="ratio")
        for name, key in (names | dict(policy="policy")).items():
            total = math.fsum(term[name] for term in terms)
            assert total == pytest.approx(sums[key].item(), abs=1e-12), key
        assert sums["masked"] == sum(term["x"] == 0 for term in terms)


@pytest.mark.parametrize("aggregation", CHOICES["aggregation"])
def test_grpo_loss_of_sequences_one_by_one_is_that_of_the_batch(aggregation):
    x = made(5)
    how = dict(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.2, importance_cap=2.0)
    whole, sums = grpo_loss(x.lp, x.old, x.A, x.mask, **x.more, **how)
    Z = loss_denominator(x.mask, aggregation=aggregation, max_new_tokens=16)
    parts = []
    for b in range(len(x.mask)):
        row = {name: y[b] for name, y in x.more.items()}
        parts.append(grpo_loss(x.lp[b], x.old[b], x.A[b], x.mask[b], Z=Z, **row, **how))
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), abs=1e-13)
    for name in {"tokens"} | {key for key, how, _ in METRICS.values() if how not in ("", "max")}:
        total = sum(some[name].item() for _, some in parts)
        assert total == pytest.approx(sums[name].item(), abs=1e-12), name
    metrics = loss_metrics({name: value.item() for name, value in sums.items()})
    entropy = x.more["entropy_BT"][x.mask].mean().item()
    assert metrics["entropy/token_mean"] == pytest.approx(entropy)
    gap = (x.lp - x.more["sampler_BT"])[x.mask].abs()
    assert metrics["logprob_gap/max"] == gap.max() and metrics["loss/token_mean"] == whole
    assert metrics["logprob_gap/mean"] == pytest.approx(gap.mean().item())


@pytest.mark.parametrize("options", SETTINGS, ids=label)
def test_masked_tokens_may_hold_anything(options):
    config = Config(**dict(entropy_coef=0.1, importance_cap=2.0) | options)

    def everything(junk):
        x = made(4)
        for y in (x.lp, x.old, *x.more.values()):
            y[~x.mask] = junk
        leaves = [y.requires_grad_() for y in (x.lp, x.more["entropy_BT"], x.more["value_BT"])]
        loss, sums = grpo_loss(x.lp, x.old, x.A, x.mask, **settings(config), **x.more)
        (loss + 0 * sum(y[x.mask].sum() for y in leaves)).backward()  # H may be in no term
        numbers = torch.stack([loss.detach(), *sums.values()])
        return numbers, torch.stack([y.grad for y in leaves]), x.mask

    clean = everything(0.0)
    assert clean[1][:, clean[2]].any()
    for junk in (-math.inf, math.inf, math.nan, 1e30):
        numbers, grads, mask = everything(junk)
        assert numbers.equal(clean[0]) and grads.equal(clean[1])
        assert numbers.isfinite().all() and not grads[:, ~mask].any()


def test_a_log_ratio_is_clamped_to_ten_before_exp():
    """And a token beyond has no gradient, whatever its advantage."""
    for d, A, loss in ((500, -1, math.exp(10)), (-500, -1, 0.8), (-10.5, 1, -math.exp(-10))):
        for objective in ("clip", "sapo"):
            lp = tensor([d]).requires_grad_()
            l, _ = grpo_loss(lp, tensor([0]), tensor([A]), lp > -1e9, objective=objective)
            l.backward()
            assert not lp.grad.any()
            assert objective == "sapo" or l.item() == pytest.approx(loss)


@pytest.mark.parametrize(
    "A, dual, lost", [(1, 0, [0, 0, 1, 1]), (-1, 0, [1, 0, 0, 0]), (-1, 3, [1, 0, 0, 1])]
)
def test_a_token_counts_as_clipped_where_its_ratio_has_no_gradient(A, dual, lost):
    for r, is_lost in zip((0.5, 1.1, 1.5, 4.0), lost):
        lp = tensor([r]).log().requires_grad_()
        loss, sums = grpo_loss(lp, tensor([0]), tensor([A]), lp < 9, dual_clip=dual)
        loss.backward()
        assert sums["clipped"] == is_lost == (lp.grad.item() == 0)


# 2. Advantages, weights, denominators --------------------------------------------------------


def test_advantages_are_those_computed_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.5])  # mean .5; squares sum to 1, over 4: std .5
    hand = {"group_mean": 1.0, "group_std": 1 / (0.5 + 1e-4), "leave_one_out": 5 / 4}
    for kind, factor in hand.items():
        assert advantages(rewards, kind) == pytest.approx(factor * (rewards - 0.5), abs=1e-15)
        for reward in (0.0, 1.0, 0.1, 1 / 3):  # of a whole group
            assert np.abs(advantages(np.full(7, reward), kind)).max() <= 1e-12
    assert advantages(np.array([3.0, 0.0]), "leave_one_out").tolist() == [3.0, -3.0]
    with pytest.raises(ValueError, match="median"):
        advantages(rewards, "median")


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
    rows = [torch.tensor(m, dtype=torch.bool) for m in ([1, 1, 0, 1], [1], [0, 0])]
    for aggregation, Z in {"token_mean": 4.0, "sequence_mean": 2.0, "constant": 30.0}.items():
        assert loss_denominator(rows, aggregation=aggregation, max_new_tokens=10) == Z
        weights = [1 / 3, 1.0, 1.0] if aggregation == "sequence_mean" else [1.0] * 3
        assert [loss_weight(mask, aggregation).item() for mask in rows] == weights


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


def test_a_call_that_has_no_loss_is_refused(process_group):
    trainer, batch = make_trainer(), some_batch()
    with pytest.raises(ValueError, match="num_global_valid_tokens must be .*, got 0"):
        trainer.forward_backward(batch, 0)
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
    for size in (1, 30, 10000):  # where trees are cut
        trainer.config = replace(trainer.config, tree="sparse", micro_tokens=size)
        assert (gradient(trainer, [batch], Z) - truth).norm() <= 1e-12 * truth.norm()


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
    batch = SampledBatch(
        {g: [(g, "a"), (g, "b")] for g in range(groups)}, range(groups), count, sampled_by=0
    )
    found = [*batch.minibatches()]
    assert [len(rollouts) // 2 for rollouts in found] == sizes
    assert sum(found, []) == [(g, name) for g in range(groups) for name in "ab"]


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
    # As few trees as can be, of about the same size: 8 and 8 tokens, not 12 and 4.
    run = make_trainer(tree="sparse", micro_tokens=12)
    four = [[n] * 4 for n in range(4)], [np.ones(3, dtype=bool)] * 4
    cuts, _ = run.batches(run.model).pack_micro_batches(*four)
    assert [len(cut) for cut in cuts] == [2, 2]


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


def rates_of(config):
    """The trainer's rates, which are those by hand."""
    rates = [Trainer.learning_rate(SimpleNamespace(config=config), s) for s in range(config.steps)]
    by_hand = [rate_by_hand(config, step) for step in range(config.steps)]
    assert np.allclose(rates, by_hand, rtol=1e-15)
    return rates


@pytest.mark.parametrize("decay", CHOICES["lr_decay"])
def test_the_rates_are_torchtitans_schedule_whose_warm_up_is_at_most_the_whole_run(decay):
    factors = [lr_factor(step, warmup=2, total=10, decay=decay) for step in range(10)]
    assert factors == pytest.approx(SCHEDULES[decay], abs=5e-5 if decay == "cosine" else 1e-15)
    for first, least in (("nonzero", 0.0), ("zero", 0.25), ("nonzero", 1.0)):
        how = dict(lr_warmup=2, lr_decay=decay, lr_min=least, lr_first_step=first)
        rates = rates_of(Config(lr=2.0, steps=10, **how).check())
        assert rates[0] == (1.0 if first == "nonzero" else 0.0) and max(rates) == 2.0
        assert min(rates[2:]) >= 2 * least
    for warmup in (3, 4, 2**62):
        rates = rates_of(Config(lr=2.0, steps=4, lr_warmup=warmup, lr_decay=decay).check())
        assert rates == pytest.approx([2 / 3, 4 / 3, 2, 2] if warmup == 3 else [0.5, 1, 1.5, 2])

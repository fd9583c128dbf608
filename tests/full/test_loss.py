"""The loss and its denominators, critic's advantages, the Trainer's gradient and optimizer step.

Oracles: the loops over tokens of conformance/definition.py, and each sequence alone through the
whole model. Everything is float64. TRL's numbers are in test_trl.py.
"""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import batch_of

from conformance.definition import DEFAULTS, Sequence, definition, learning_rate, scores
from full.audit import audit
from full.learn.advantages import gae
from full.learn.batches import SampledBatch, collect
from full.learn.metrics import METRICS, Metric
from full.learn.objectives import (
    LossSettings, OtherScores, critic_loss, divergence, grpo_loss, loss_denominator,
)  # fmt: skip
from full.learn.rollouts import Trajectory
from full.learn.trainer import Trainer
from full.model.deltanet import TokenByToken
from full.model.transformer import causal_attention
from full.run.build import build
from full.run.config import Config, choices_of
from full.run.tasks import make_task
from full.tiny import TINY, tiny_model
from full.tree.trie import TokenTrie, pack

pytestmark = pytest.mark.quick
CHOICES = {f.name: choices_of(f) for f in fields(Config)}
TREES = [{}, dict(tree="sparse"), dict(tree="dta", chunk_tokens=5)]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def label(options):
    numbers = "loss", "grad", "ours"
    return "-".join(f"{k}={v}" for k, v in options.items() if v and k not in numbers)


# 1. The loss of given log-probs --------------------------------------------------------------

SETTINGS = [
    dict(), dict(dual_clip=1.5), dict(objective="gspo", clip_low=0.03, clip_high=0.04),
    dict(objective="gspo", dual_clip=1.3, kl="k1", kl_coef=0.1), dict(kl="k3", kl_coef=0.3),
    dict(kl="k3", kl_coef=0.3, kl_in="reward", entropy_coef=0.0), dict(objective="sapo"),
    dict(objective="gmpo", clip_low=0.3, clip_high=0.2), dict(objective="gmpo"),
    dict(objective="cispo", cispo_bound=1.3, kl_coef=0.1), dict(objective="reinforce"),
    dict(objective="dppo", clip_low=0.03, clip_high=0.02),
    dict(objective="gspo", importance="mask"),
]  # fmt: skip
SETTINGS += [
    dict(importance=how, importance_of=what, importance_low=0.7)
    for how in CHOICES["importance"] for what in CHOICES["importance_of"]
]  # fmt: skip
LEAVES = "lp", "entropy_BT"


def made():
    """Random arguments of grpo_loss by name, and a critic's; row 0 has no sampled token.

    Of this seed each clip, also the dual ones, acts on a few tokens.
    """
    rng = torch.Generator().manual_seed(4)
    lp, old, A, mask, ref, entropy, x, *values = torch.randn(10, 5, 7, generator=rng).double()
    lp = (lp - 2).clamp(max=-0.1)
    old = (lp + 0.5 * old).clamp(max=-0.1)
    named = dict(zip(("v", "v_old", "g"), values))
    mask = (mask < 0.5) & (torch.arange(5) > 0)[:, None]
    return named | dict(
        lp=lp, old=old, A=A[:, :1].expand(5, 7), mask=mask, ref_BT=lp + 0.5 * ref,
        entropy_BT=entropy.abs(), sampler_BT=old - x.clamp(max=0.7),
    )  # fmt: skip


def config_of(options, **more):
    return Config(**dict(entropy_coef=0.1, importance_cap=2.0) | options, **more)


def with_leaves(x):
    return x | {name: x[name].clone().requires_grad_() for name in LEAVES}


def loss_of(x, config, Z=None):
    """The loss, its sums, and the gradient of each leaf."""
    x = with_leaves(x)
    others = OtherScores(**{name: y for name, y in x.items() if name.endswith("_BT")})
    loss, sums = grpo_loss(x["lp"], x["old"], x["A"], x["mask"], config, others, Z=Z)
    (loss + 0 * sum(x[name][x["mask"]].sum() for name in LEAVES)).backward()
    return loss.item(), sums, torch.stack([x[name].grad for name in LEAVES])


@pytest.mark.parametrize("options", SETTINGS, ids=label)
def test_the_slow_definition_gives_the_loss_its_gradient_and_its_sums(options):
    """Of the whole loss, with the importance weight, under each aggregation."""
    for aggregation in CHOICES["aggregation"]:
        config = config_of(options, aggregation=aggregation)
        loss, sums, grads = loss_of(made(), config, 17.0)

        # By loops over the sampled tokens of each row.
        x, rows, masks = made(), [], []
        names = dict(lp="lp", old="old", A="A", smp="sampler_BT", ref="ref_BT", H="entropy_BT")
        for b in range(1, 5):
            masks.append(x["mask"][b])
            lists = {key: x[name][b][masks[-1]].tolist() for key, name in names.items()}
            rows.append(Sequence(**lists))
        found, by_row = definition(settings(config), rows, 17.0)
        assert found == pytest.approx(loss, abs=1e-13)
        slopes = torch.zeros_like(grads)
        for place, name in enumerate(("dlp", "dH")):
            for b, (mask, terms) in enumerate(zip(masks, by_row), 1):
                slopes[place, b][mask] = tensor([x.share * getattr(x, name) for x in terms])
        assert (slopes - grads).abs().max() < 1e-13
        terms = [term for terms in by_row for term in terms]
        found = {
            "loss/token_mean": [x.share * x.loss for x in terms],
            "loss/policy_token_mean": [x.share * x.policy for x in terms],
            "ratio/clipped_fraction": [x.clips for x in terms],
            "kl/token_mean": [x.k for x in terms],
            "entropy/token_mean": [x.H for x in terms], "ratio/token_mean": [x.r for x in terms],
            "importance/masked_fraction": [x.x == 0 for x in terms],
        }  # fmt: skip
        for key, values in found.items():
            assert math.fsum(values) == pytest.approx(sums[key].item(), abs=1e-12), key


@pytest.mark.parametrize("aggregation", CHOICES["aggregation"])
def test_the_slow_definition_gives_the_critics_loss_its_gradient_and_its_sum(aggregation):
    x = made()
    v, mask = x["v"].requires_grad_(), x["mask"]
    how = dict(aggregation=aggregation, value_coef=Config.value_coef)
    loss, sums = critic_loss(v, x["v_old"], x["g"], mask, Z=17.0, **how)
    loss.backward()
    config, rows = config_of({}, aggregation=aggregation), []
    for b in range(1, 5):
        names = ("lp", "old", "A", "v", "v_old", "g")
        lists = {name: x[name][b][mask[b]].tolist() for name in names}
        rows.append(Sequence(**lists, smp=lists["old"], ref=lists["old"], H=lists["lp"]))
    _, by_row = definition(settings(config), rows, 17.0)
    terms = [term for terms in by_row for term in terms]
    assert math.fsum(t.share * t.critic for t in terms) == pytest.approx(loss.item(), abs=1e-13)
    assert v.grad[mask].tolist() == pytest.approx([t.share * t.dv for t in terms], abs=1e-13)
    assert not v.grad[~mask].any()
    assert math.fsum(t.critic for t in terms) == pytest.approx(sums["value/loss"].item(), abs=1e-12)


@pytest.mark.parametrize("options", SETTINGS, ids=label)
def test_masked_tokens_may_hold_anything(options):
    def everything(junk):
        x = made()
        for name in x.keys() - {"mask", "A"}:
            x[name][~x["mask"]] = junk
        loss, sums, grads = loss_of(x, config_of(options))
        assert not grads[:, ~x["mask"]].any()
        return torch.stack([tensor(loss), *sums.values(), *grads[:, x["mask"]].flatten()])

    clean = everything(0.0)
    assert clean.isfinite().all()
    for junk in (-math.inf, math.inf, math.nan, 1e30):
        assert everything(junk).equal(clean)


def test_a_log_ratio_is_clamped_to_ten_before_exp():
    """And a token beyond has no gradient, whatever its advantage."""
    for d, A, loss in ((500, -1, math.exp(10)), (-500, -1, 0.8), (-10.5, 1, -math.exp(-10))):
        for objective in ("clip", "sapo"):
            lp = tensor([d]).requires_grad_()
            settings = LossSettings(objective=objective)
            l, _ = grpo_loss(lp, tensor([0]), tensor([A]), lp > -1e9, settings)
            l.backward()
            assert not lp.grad.any()
            assert objective == "sapo" or l.item() == pytest.approx(loss)


def test_denominators_count_sampled_tokens():
    rows = [torch.tensor(m, dtype=torch.bool) for m in ([1, 1, 0, 1], [1], [0, 0])]
    for aggregation, Z in {"token_mean": 4.0, "sequence_mean": 2.0, "constant": 30.0}.items():
        assert loss_denominator(rows, aggregation=aggregation, max_new_tokens=10) == Z


# 2. The Trainer's gradient -------------------------------------------------------------------


def make_trainer(**options):
    config = Config(**dict(hidden=16, heads=2, layers=1, dtype="float64") | options)
    model, generator, _ = build(config, make_task(config))
    return Trainer(config, model, generator=generator)


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


def with_gradient(trainer, loss):
    """A vector: the loss, and the gradient that the model has now."""
    return torch.cat([tensor([loss]), *(p.grad.flatten() for p in trainer.model.parameters())])


def gradient(trainer, calls, Z):
    """Loss and gradient of forward_backward over the calls, each a list of trajectories."""
    trainer.model.zero_grad()
    return with_gradient(
        trainer, sum(trainer.forward_backward(batch, Z)["loss/token_mean"] for batch in calls)
    )


def settings(config):
    """The definition's settings that are a Config's."""
    return SimpleNamespace(**DEFAULTS | audit.settings(config))


def alone(trainer, t):
    """A trajectory by itself, as the audit has it: log-probs and entropies from the whole model."""
    at = np.flatnonzero(t.mask).tolist()
    states = trainer.model.hidden(torch.tensor(t.tokens)[None],
                                  attention=TokenByToken(causal_attention))  # fmt: skip
    targets = [t.tokens[place + 1] for place in at]
    lp, H, _ = scores(trainer.model.logits(states[0, at]), targets, trainer.config.temperature)
    names = dict(A=t.advantages, old=t.old_logprobs, ref=t.ref_logprobs, smp=t.sampler_logprobs)
    lists = {name: None if x is None else x[at].tolist() for name, x in names.items()}
    lists |= dict(lp=lp.tolist(), H=H.tolist(), old=lists["old"] or lp.tolist())
    return Sequence(**lists), lp, H


def gradient_by_definition(trainer, batch, Z):
    trainer.model.zero_grad()
    total = 0.0
    for t in [t for t in batch if t.mask.any()]:
        s, *outputs = alone(trainer, t)
        loss, (terms,) = definition(settings(trainer.config), [s], Z)
        slopes = [tensor([x.share * getattr(x, name) for x in terms]) for name in ("dlp", "dH")]
        torch.autograd.backward(outputs, slopes)
        total += loss
    return with_gradient(trainer, total)


OPTIONS = [
    dict(aggregation="token_mean", temperature=0.7, importance_cap=1.05),
    dict(aggregation="sequence_mean", objective="gspo", clip_low=0.5, clip_high=0.9, kl_coef=0.1),
    dict(aggregation="constant", objective="cispo", entropy_coef=0.3),
]


def test_the_defaults_of_the_loss_are_those_of_the_flags():
    flags = {field.name: field.default for field in fields(Config)}
    del flags["entropy_coef"]  # by default one that suits the advantage
    own = {field.name: field.default for field in fields(LossSettings)}
    assert own.pop("entropy_coef") == 0 and own == {name: flags[name] for name in own}


GRADIENTS = [(label(options), options) for options in OPTIONS]
GRADIENTS += [(family, {}) for family in TINY] + [("without old", {})]


@pytest.mark.parametrize("name, options", GRADIENTS, ids=[name for name, _ in GRADIENTS])
def test_micro_batches_order_packing_and_calls_do_not_change_the_gradient(
    process_group, name, options
):
    trainer, batch = make_trainer(**options), some_batch()
    if name in TINY:
        trainer = Trainer(trainer.config, tiny_model(name, vocab_size=11))
    if name == "without old":  # the policy is its own old policy
        batch = [replace(t, old_logprobs=None) for t in batch]
    Z = trainer.loss_denominator(batch)
    truth = gradient_by_definition(trainer, batch, Z)
    assert truth[1:].norm() > 1e-3

    ways = [dict(micro_tokens=n) for n in ((1, 13, 10**6) if options else (8,))]
    ways += [dict(tree="sparse", micro_tokens=n) for n in (1, 30) if options]
    ways += [dict(tree="dta", chunk_tokens=5)] if options else []
    for n, way in enumerate(ways):
        trainer.config = replace(trainer.config, **way)
        mixed = [batch[i] for i in np.random.default_rng(n).permutation(len(batch))]
        for calls in ([batch], [mixed[:1], [], mixed[1:5], mixed[5:]]):
            assert (gradient(trainer, calls, Z) - truth).norm() <= 1e-12 * truth.norm()


def test_a_loss_is_in_the_dtype_of_its_log_probs(process_group, monkeypatch):
    """What numpy holds of a batch is float64. The gap to the sampler is, on purpose."""
    seen = {}

    def watched(t):
        seen.update({k: x.dtype for k, x in vars(t).items() if isinstance(x, torch.Tensor)})
        return t.lp_N

    monkeypatch.setitem(METRICS, "watched", Metric("its dtypes", "mean", "mean", watched))
    make_trainer(dtype="float32", kl_coef=1.0).forward_backward(some_batch(), 10.0)
    assert seen.pop("gap_N") == torch.float64 and "ref_N" in seen
    assert {*seen.values()} == {torch.float32, torch.bool}


def test_without_a_sampler_the_old_policy_has_sampled():
    lp, old, A = torch.randn(3, 2, 5, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    plain, sums = grpo_loss(lp, old, A, mask)
    capped, more = grpo_loss(lp, old, A, mask, LossSettings(importance_cap=1.5))
    assert torch.equal(capped, plain) and sums.items() <= more.items()


def test_a_call_that_has_no_loss_is_refused(process_group):
    trainer, batch = make_trainer(), some_batch()
    with pytest.raises(ValueError, match="num_global_valid_tokens must be .*, got 0"):
        trainer.forward_backward(batch, 0)


@pytest.mark.parametrize(
    "groups, count, sizes", [(5, 2, [2, 3]), (4, 3, [1, 1, 2]), (1, 2, [0, 1])]
)
def test_minibatches_have_whole_groups_in_order(groups, count, sizes):
    rollouts = {g: [(g, "a"), (g, "b")] for g in range(groups)}
    found = [*SampledBatch(rollouts, range(groups), count, sampled_by=0).minibatches()]
    assert [len(rollouts) // 2 for rollouts in found] == sizes
    assert sum(found, []) == [(g, name) for g in range(groups) for name in "ab"]


def test_trees_are_cut_by_their_own_tokens(process_group):
    def cut_up(batch, micro_tokens, tree="sparse"):
        """Sequences of each tree, and its tokens; all of its tokens are run."""
        trainer = make_trainer(tree=tree, micro_tokens=micro_tokens)
        run = trainer.batches(trainer.model)
        masks = [np.ones(len(tokens) - 1, dtype=bool) for tokens in batch]
        cuts, rows = run.pack_micro_batches(batch, masks)
        sizes = [len(TokenTrie([batch[i] for i in cut])) for cut in cuts]
        assert sorted(i for cut in cuts for i in cut) == [*range(len(batch))]
        assert run.tokens_run == sum(sizes) == sum(row.tokens_1S.shape[1] for row in rows)
        return [len(cut) for cut in cuts], sizes

    batch = [[*range(8), *some] for some in ([8], [9, 9], [9, 9, 1], [7])]
    batch += [[0, 1], [5] * 4]  # a prefix, and then nothing in common
    # All together have 8 + 1 + 2 + 1 + 1 + 4 tokens; a longer sequence is alone in a tree.
    for micro_tokens, count in {17: 1, 16: 2, 12: 3, 10: 4, 1: 6}.items():
        counts, sizes = cut_up(batch, micro_tokens)
        assert len(counts) == count
        assert all(n == 1 or size <= micro_tokens for n, size in zip(counts, sizes))
    assert [len(micro) for micro in pack([len(x) for x in batch], 12)] == [1, 1, 1, 2, 1]
    # As few trees, or rows, as can be, of about the same size: 8 and 8 tokens, not 12 and 4.
    for tree in ("sparse", "disabled"):
        assert cut_up([[n] * 4 for n in range(4)], 12, tree)[0] == [2, 2]


# 3. The optimizer step, the generator's weights ----------------------------------------------


def put_gradients(trainer, scale=1.0, seed=0, **spoilt):
    rng = torch.Generator().manual_seed(seed)
    for p in trainer.model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=rng, dtype=torch.float64)
    for name, value in spoilt.items():
        trainer.model.get_parameter(name.replace("__", ".")).grad.view(-1)[3] = value


def all_tensors(trainer):
    states = [trainer.optimizer.state[p] for p in trainer.model.parameters()]
    found = [*trainer.model.parameters(), *(x for state in states for x in state.values())]
    return [x.detach().clone() for x in found]


def gradients_are_zero(trainer):
    return not any(p.grad is not None and p.grad.any() for p in trainer.model.parameters())


@pytest.mark.quick
def test_both_estimates_of_the_kl_have_its_mean_and_k3_is_never_negative():
    """Over all tokens of two distributions, and near the reference k3 varies less."""
    logits, other = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double()
    for distance in (1.0, 0.1):
        ref = (logits + distance * other).log_softmax(0)
        p = logits.log_softmax(0).exp()
        d = p.log() - ref
        kl = torch.nn.functional.kl_div(ref, p, reduction="sum")
        k1, k3 = divergence(d, "k1"), divergence(d, "k3")
        assert abs((p * k1).sum() - kl) < 1e-12 and abs((p * k3).sum() - kl) < 1e-12
        assert k3.min() >= 0 > k1.min()
    assert (p * (k3 - kl) ** 2).sum() < 0.01 * (p * (k1 - kl) ** 2).sum()


def test_optim_step_is_clipped_adamw(process_group):
    trainer = make_trainer(lr=0.01, weight_decay=0.1)
    copies = [p.detach().clone().requires_grad_() for p in trainer.model.parameters()]
    adamw = torch.optim.AdamW(copies, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for t, (scale, lr) in enumerate([(3.0, None), (1e-4, 0.02), (1.0, 0.005)], 1):
        put_gradients(trainer, scale, seed=t)
        for p, q in zip(trainer.model.parameters(), copies):
            q.grad = p.grad.clone()
        norm = torch.cat([q.grad.flatten() for q in copies]).norm().item()
        for q in copies:
            q.grad *= min(1.0, 1.0 / norm)
        adamw.param_groups[0]["lr"] = lr or 0.01
        adamw.step()
        metrics = trainer.optim_step(lr)
        expected = {"grad_norm": pytest.approx(norm), "lr": lr or 0.01, "policy_version": t}
        assert metrics == expected and gradients_are_zero(trainer)
        for p, q in zip(trainer.model.parameters(), copies):
            assert (p - q).abs().max() <= 1e-12


@pytest.mark.parametrize("tree", TREES)
def test_a_nan_in_the_loss_skips_the_step_in_every_tree_mode(process_group, tree):
    trainer, batch = make_trainer(**tree), some_batch()
    before = all_tensors(trainer)
    batch[1] = replace(batch[1], advantages=batch[1].advantages * math.nan)
    trainer.forward_backward(batch, 10.0)
    assert "on rank 0" in trainer.optim_step()["nonfinite"] and trainer.skipped == 1
    assert all(a.equal(b) for a, b in zip(before, all_tensors(trainer), strict=True))


def test_a_nonfinite_gradient_skips_the_step_and_the_third_in_a_row_raises(process_group, tmp_path):
    """A checkpoint holds the counts, so a resumed run goes on with the row."""
    stopped, resumed = make_trainer(), make_trainer()
    put_gradients(stopped)
    stopped.optim_step()
    counts = {math.nan: (1, 1), 0.0: (1, 0), math.inf: (2, 1), -math.inf: (3, 2)}
    for value, count in counts.items():
        before = all_tensors(stopped)
        put_gradients(stopped, model__layers__0__mlp__up_proj__weight=value)
        named = stopped.optim_step().get("nonfinite")
        assert named == (None if value == 0 else "model.layers.0.mlp.up_proj.weight on rank 0")
        assert (stopped.skipped, stopped.skipped_in_a_row) == count and gradients_are_zero(stopped)
        same = [a.equal(b) for a, b in zip(before, all_tensors(stopped), strict=True)]
        assert all(same) == (value != 0)
    stopped.save_checkpoint(tmp_path / "saved", step=3)
    resumed.load_checkpoint(tmp_path / "saved")
    for x in (stopped, resumed):
        assert (x.skipped, x.skipped_in_a_row, x.policy_version) == (3, 2, 2)
    put_gradients(resumed, lm_head__weight=math.inf)
    with pytest.raises(FloatingPointError, match="^3 .*in a row.* lm_head.weight on rank 0"):
        resumed.optim_step()


def test_a_nonfinite_gradient_of_the_critic_skips_the_step_of_the_policy_too(process_group):
    trainer = make_trainer(advantage="gae")
    before = {name: x.detach().clone() for name, x in trainer.training_tensors().items()}
    put_gradients(trainer)
    for p in trainer.critic.parameters():
        p.grad = torch.full_like(p, math.inf if p is trainer.critic.score.weight else 1.0)
    metrics = trainer.optim_step()
    assert metrics["nonfinite"] == "critic.score.weight on rank 0" and trainer.skipped == 1
    assert math.isfinite(metrics["grad_norm"]) and metrics["critic/grad_norm"] == math.inf
    assert all(before[name].equal(x) for name, x in trainer.training_tensors().items())
    assert gradients_are_zero(trainer) and trainer.critic.score.weight.grad is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_push_copies_in_the_generators_dtype_or_shares_memory(process_group, dtype):
    trainer = make_trainer(generator_dtype=dtype)
    assert str(trainer.plan) == "d1" and trainer.grid.plan == trainer.plan
    put_gradients(trainer)
    trainer.optim_step()
    assert trainer.push_weights() == 1
    for p, q in zip(trainer.model.parameters(), trainer.sampler.model.parameters(), strict=True):
        assert q.dtype == getattr(torch, dtype) and q.equal(p.to(q.dtype)) and q.any()
        assert p.is_set_to(q) == (dtype == "float64")


def test_a_generator_that_has_memory_stays_a_copy(process_group):
    config = Config(hidden=16, heads=2, layers=1).check()
    model, generator, _ = build(config, make_task(config))
    own = generator.to_empty(device="cpu").head_weight
    trainer = Trainer(config, model, generator=generator)
    assert trainer.sampler.model.head_weight is own and not own.is_set_to(trainer.model.head_weight)


@pytest.mark.parametrize("decay", CHOICES["lr_decay"])
def test_the_rates_are_torchtitans_schedule_whose_warm_up_is_at_most_the_whole_run(decay):
    def rates(**how):
        """The trainer's rates, which are those by hand."""
        config = Config(lr=2.0, lr_decay=decay, **how).check()
        trainer, steps = SimpleNamespace(config=config), range(config.steps)
        found = [Trainer.learning_rate(trainer, step) for step in steps]
        by_hand = [learning_rate(config, step) for step in steps]
        assert np.allclose(found, by_hand, rtol=1e-15, atol=0)
        return found

    found = rates(steps=10, lr_warmup=2)
    assert found[0] == 1.0 and max(found) == 2.0
    for warmup in (3, 4, 2**62):
        expected = [2 / 3, 4 / 3, 2, 2] if warmup == 3 else [0.5, 1, 1.5, 2]
        assert rates(steps=4, lr_warmup=warmup) == pytest.approx(expected)


# 4. PPO's critic -----------------------------------------------------------------------------


def test_advantages_of_the_critic_are_their_sum():
    """(1) over all later sampled tokens.

    What the task says is no step, and its reward counts for the sampled token before it.
    """
    rng = np.random.default_rng(0)
    for length in rng.integers(1, 20, size=40):
        mask, (rewards, values) = rng.random(length) < 0.6, rng.standard_normal((2, length))
        lam = rng.random()
        at = [t for t in range(length) if mask[t]]
        r = [sum(rewards[a:b]) for a, b in zip(at, [*at[1:], length])]
        V = [*(values[t] for t in at), 0.0]
        delta = [r[k] + V[k + 1] - V[k] for k in range(len(at))]
        truth = np.zeros(length)
        for n, t in enumerate(at):
            truth[t] = sum(lam ** (k - n) * delta[k] for k in range(n, len(at)))
        advantages, returns = gae(rewards, values, mask, lam)
        assert np.abs(advantages - truth).max() < 1e-12
        assert np.abs(returns - np.where(mask, truth + values, 0)).max() < 1e-12


def test_advantages_are_whitened_over_the_step(process_group, monkeypatch):
    """And under lambda 1 a return is what is still to come: nothing where it was cut."""
    small = dict(prompts=4, group=4, layers=2, advantage="gae", max_new_tokens=5)
    monkeypatch.setattr(Config, "gae_lambda", 1.0)
    trainer = make_trainer(**small)
    torch.nn.init.normal_(trainer.critic.score.weight, generator=torch.Generator().manual_seed(1))
    trainer.push_weights()
    task = make_task(trainer.config)
    groups, _, _ = collect(trainer.config, task, trainer.sampler, 0)
    batch, rng = sum(groups.values(), []), np.random.default_rng(0)
    for t in batch:  # rewards of their turns are random: a random policy earns next to nothing
        turns = np.flatnonzero(t.mask)[::2] if not t.truncated else []
        t.turn_rewards = [(int(at), reward) for at, reward in zip(turns, rng.random(9))]
        t.reward = sum(reward for _, reward in t.turn_rewards)
    batch[0].mask[1] = False  # as if the task had said it
    metrics = trainer.prepare(batch_of(groups.values()))
    A, R, V = (
        np.concatenate([getattr(t, name)[t.mask] for t in batch])
        for name in ("advantages", "returns", "values")
    )
    assert abs(A.mean()) < 1e-12 and abs(A.std() - 1) < 1e-6
    assert {t.truncated for t in batch} == {True, False}
    for t in batch:
        assert not any(x[~t.mask].any() for x in (t.advantages, t.returns))
        returns = t.returns[t.mask]
        assert abs(returns[0] - t.reward) < 1e-12
        assert not t.truncated or abs(returns[-1]) < 1e-12
    assert abs(metrics["value/explained_variance"] - (1 - (R - V).var() / R.var())) < 1e-9
    assert abs(metrics["value/token_mean"] - V.mean()) < 1e-12

"""Losses, advantages and weights: the numbers of their sources, and what steps by hand do not show.

golden_objectives.json says for each row which package, version, function and settings gave it, and
which settings of ours are the same. Steps by hand are in test_grpo_matrix.py, TRL's in test_trl.py.
"""

import functools
import json
import math
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, batch_of

from conformance.definition import DEFAULTS, Sequence, definition
from full.audit import audit
from full.learn.advantages import ADVANTAGES, advantages, overlong_penalty
from full.learn.batches import collect
from full.learn.metrics import METRICS, Metric, merged_sums
from full.learn.objectives import (
    AGGREGATIONS, OBJECTIVES, READS, LossSettings, OtherScores, SampledTokens, critic_loss,
    grpo_loss, loss_denominator, sampler_weights,
)  # fmt: skip
from full.learn.rollouts import Trajectory
from full.learn.trainer import Trainer
from full.run.build import build
from full.run.config import Config
from full.run.tasks import make_task
from full.tree.trie import TokenTrie, pack

pytestmark = pytest.mark.quick


# 1. The numbers of the sources ---------------------------------------------------------------

GOLDEN = json.loads((ROOT / "tests" / "golden_objectives.json").read_text())
INPUT = {name: torch.tensor(x, dtype=torch.float64) for name, x in GOLDEN["input"].items()}
MASK = INPUT["mask"].bool()


def rows_of(*sections):
    return [row for name in sections for row in GOLDEN[name] if row["ours"]]


def name_of(row):
    settings = {**row["settings"], **row.get("correction_settings", {})}
    values = "-".join(str(x) for x in settings.values())
    return f"{row['source']}-{row['advantages']}-{row['objective']}-{values}"


def assert_near(found, expected, tolerance):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("row", rows_of("objectives", "weighted"), ids=name_of)
def test_loss_and_gradient_are_the_sources(row, monkeypatch):
    ours = dict(row["ours"])
    constants = ours.pop("constants", {})
    function = functools.partial(OBJECTIVES[ours["objective"]], **constants)
    monkeypatch.setitem(OBJECTIVES, ours["objective"], function)
    lp, A = INPUT["lp"].clone().requires_grad_(), INPUT[f"advantages_{row['advantages']}"]
    settings = LossSettings(aggregation=row["aggregation"], max_new_tokens=6, **ours)
    A = A[:, None] if A.ndim == 1 else A
    loss, _ = grpo_loss(lp, INPUT[row["old"]], A, MASK, settings, OtherScores(INPUT["sampler"]))
    loss.backward()
    tolerance = max(row["tolerance"], 1e-13)
    assert_near(row["factor"] * lp.grad, row["gradient"], tolerance)
    assert_near(row["factor"] * loss.detach(), row["value"], tolerance)


def test_the_golden_rows_have_each_objective_and_each_way_to_weigh():
    assert {row["objective"] for row in rows_of("objectives")} >= {
        "reinforce", "clip", "cispo", "gspo", "sapo", "gmpo", "dppo_tv"}  # fmt: skip
    assert len(rows_of("objectives", "weighted")) > 90
    ways = {(row["ours"]["importance"], row["ours"]["importance_of"])
            for row in rows_of("corrections")}  # fmt: skip
    for what in ("token", "sequence"):
        assert ways >= {("truncate", what), ("mask", what)}


@pytest.mark.parametrize("row", rows_of("corrections"), ids=lambda row: row["source"])
def test_the_weights_of_a_sampler_are_the_sources(row):
    lp = INPUT["lp"].clone().requires_grad_()
    settings = LossSettings(objective="reinforce", **row["ours"])
    given = lp, INPUT["old"], torch.ones_like(lp), MASK, settings, OtherScores(INPUT["sampler"])
    grpo_loss(*given, Z=1)[0].backward()
    expected = torch.tensor(row["mask"], dtype=torch.float64)
    if row["weights"] is not None:
        expected = expected * torch.tensor(row["weights"], dtype=torch.float64)
    assert torch.allclose(-lp.grad, expected * MASK, rtol=1e-12, atol=0)
    tokens = SampledTokens(MASK, torch.float64)
    log_x = (INPUT["old"] - INPUT["sampler"])[MASK]
    x = sampler_weights(SimpleNamespace(**row["ours"]), log_x, tokens)
    assert torch.equal(x == 0, expected[MASK] == 0)


@pytest.mark.parametrize(
    "row", rows_of("advantages"), ids=lambda row: f"{row['source']}-{row['advantage']}"
)
def test_advantages_are_the_sources(row):
    rollouts = GOLDEN["rollouts"]
    rewards = np.array(rollouts["rewards"]).reshape(-1, rollouts["group"])
    tokens = np.array(rollouts["lengths"]).reshape(rewards.shape)
    A = advantages(rewards, **row["ours"], tokens_PG=tokens)
    expected = np.array(row["values"]).reshape(rewards.shape)

    # Sources add different small numbers to the spread, and verl's variance of tokens is unbiased.
    if row["advantage"] == "group_std":
        spread = rewards.std(1, ddof=1, keepdims=True)
        eps = row["settings"].get("epsilon", 1e-4 if row["source"].startswith("trl") else 1e-9)
        expected = expected * (spread + eps) / (spread + 1e-4)
    if row["advantage"] == "none_batch_std_tokens":
        expected = expected * np.sqrt(tokens.sum() / (tokens.sum() - 1))
    assert_near(torch.from_numpy(A), expected, max(row["tolerance"], 1e-12))


def test_rewards_without_spread_have_advantages_of_zero():
    for reward in (0.0, 1.0, 0.1, 1 / 3):
        equal = np.full((2, 7), reward)
        for kind in ADVANTAGES.keys() - {"none"}:
            assert not advantages(equal, kind).any()
        assert advantages(equal, "none").tolist() == equal.tolist()


@pytest.mark.parametrize("row", GOLDEN["overlong"], ids=lambda row: row["source"])
def test_the_punishment_of_long_answers_is_the_sources(row):
    config = Config(max_new_tokens=16, overlong_buffer=4)
    for length, expected in zip(row["lengths"][:16], row["punishment"]):  # none of ours is longer
        t = Trajectory(0, [0] * (3 + length), np.zeros(2 + length, bool), np.zeros(2 + length),
                       prompt=3)  # fmt: skip
        assert -overlong_penalty(config, t) == expected


def test_each_objective_reads_the_flags_that_its_table_says():
    one_N = torch.ones(1)
    for name, objective in OBJECTIVES.items():
        read = set()

        class Watched:
            def __getattr__(self, flag, read=read):
                read.add(flag)
                return getattr(Config, flag)

        objective(Watched(), one_N, one_N, one_N, lambda x_N: x_N)
        assert read == {*READS[name]}


# 2. The loss of given log-probs --------------------------------------------------------------


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def label(options):
    numbers = "loss", "grad", "ours"
    return "-".join(f"{k}={v}" for k, v in options.items() if v and k not in numbers)


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


def test_without_a_sampler_the_old_policy_has_sampled():
    lp, old, A = torch.randn(3, 2, 5, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    plain, sums = grpo_loss(lp, old, A, mask)
    capped, more = grpo_loss(lp, old, A, mask, LossSettings(importance_cap=1.5))
    assert torch.equal(capped, plain) and sums.items() <= more.items()


def test_a_loss_of_no_token_is_zero():
    lp = torch.ones(2, 3).requires_grad_()
    loss, _ = grpo_loss(lp, None, torch.ones(2, 1), lp < 0)
    loss.backward()
    assert loss == 0 and not lp.grad.any()


def test_a_loss_of_log_probs_in_bfloat16_adds_up_in_float32():
    """3001 tokens with a ratio of 1 and an advantage of 1; 3001 in bfloat16 is 3008."""
    lp = torch.zeros(1, 3001, dtype=torch.bfloat16)
    loss, _ = grpo_loss(lp, lp, torch.ones(1), lp == 0, Z=1.0)
    assert loss.dtype == torch.float32 and loss == -3001


def test_denominators_count_sampled_tokens():
    rows = [torch.tensor(m, dtype=torch.bool) for m in ([1, 1, 0, 1], [1], [0, 0])]
    for aggregation, Z in {"token_mean": 4.0, "sequence_mean": 2.0, "constant": 30.0}.items():
        assert loss_denominator(rows, aggregation=aggregation, max_new_tokens=10) == Z


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_slow_definition_gives_the_critics_loss_its_gradient_and_its_sum(aggregation):
    """Of values on both sides of the clip, which those of a short run do not reach."""
    generator = torch.Generator().manual_seed(4)
    v, v_old, g, drawn = torch.randn(4, 5, 7, generator=generator).double()
    mask = (drawn < 0) & (torch.arange(5) > 0)[:, None]  # row 0 has no sampled token
    v.requires_grad_()
    how = dict(aggregation=aggregation, value_coef=Config.value_coef)
    loss, sums = critic_loss(v, v_old, g, mask, Z=17.0, **how)
    loss.backward()

    rows = []
    for b in range(1, 5):
        lists = {name: x[b][mask[b]].tolist() for name, x in dict(v=v, v_old=v_old, g=g).items()}
        policy = dict.fromkeys(("lp", "old", "A", "smp", "ref", "H"), [0.0] * len(lists["v"]))
        rows.append(Sequence(**policy, **lists))
    config = Config(aggregation=aggregation, entropy_coef=0.0)
    _, by_row = definition(SimpleNamespace(**DEFAULTS | audit.settings(config)), rows, 17.0)
    terms = [term for terms in by_row for term in terms]
    assert math.fsum(t.share * t.critic for t in terms) == pytest.approx(loss.item(), abs=1e-13)
    assert v.grad[mask].tolist() == pytest.approx([t.share * t.dv for t in terms], abs=1e-13)
    assert not v.grad[~mask].any()
    assert math.fsum(t.critic for t in terms) == pytest.approx(sums["value/loss"].item(), abs=1e-12)


# 3. The Trainer's gradient -------------------------------------------------------------------


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


def test_the_defaults_of_the_loss_are_those_of_the_flags():
    flags = {field.name: field.default for field in fields(Config)}
    del flags["entropy_coef"]  # by default one that suits the advantage
    own = {field.name: field.default for field in fields(LossSettings)}
    assert own.pop("entropy_coef") == 0 and own == {name: flags[name] for name in own}


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


def test_a_call_that_has_no_loss_is_refused(process_group):
    trainer, batch = make_trainer(), some_batch()
    with pytest.raises(ValueError, match="num_global_valid_tokens must be .*, got 0"):
        trainer.forward_backward(batch, 0)


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


# 4. The optimizer step, the generator's weights ----------------------------------------------


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


# 5. PPO's critic -----------------------------------------------------------------------------


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

    # Rewards far from 0, and the same or nearly: A is the difference, and not rounding.
    with torch.no_grad():
        trainer.critic.score.weight.zero_()
    for step in (0.0, 1e-5):
        batch = [Trajectory(0, [1, 2], np.array([True]), np.zeros(1), turn_rewards=[(0, R)])
                 for R in 1e4 + 0.1 + step * np.arange(7)]  # fmt: skip
        trainer.prepare(batch_of([batch]))
        A = np.concatenate([t.advantages for t in batch])
        assert A == pytest.approx(np.arange(-3, 4) / 2 * (step > 0), rel=2e-3, abs=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("numbers", [[1.0, math.nan], [math.nan, 1.0]])
def test_the_largest_of_numbers_is_nan_if_one_is(numbers):
    assert math.isnan(merged_sums([{"ratio/max": x} for x in numbers])["ratio/max"])
    assert math.isnan(METRICS["ratio/max"].reduce(numbers))

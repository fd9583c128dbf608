"""Objectives, advantages and weights against the numbers that their sources' own code gave.

golden_objectives.json says for each row which package, version, function and settings gave it.
audit.py's `definition` is held to the same loss in test_loss.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import measure_objectives
from train_grpo import (
    Config, Trajectory, advantages, grpo_loss, overlong_penalty, policy_loss, sampler_weights,
)  # fmt: skip

pytestmark = pytest.mark.quick
GOLDEN = json.loads((Path(__file__).parent / "golden_objectives.json").read_text())
INPUT = {name: torch.tensor(x, dtype=torch.float64) for name, x in GOLDEN["input"].items()}
MASK = INPUT["mask"].bool()
NONE = 1e9  # what a source has as a bound that binds nothing


def bounds_of(row):
    """Our names of a row's settings."""
    s = row["settings"]

    def first(*names):
        return next((s[name] for name in names if s.get(name) is not None), None)

    low = first("clip_ratio_low", "clip_eps_low", "epsilon", "cliprange")
    high = first("clip_ratio_high", "clip_eps_high", "epsilon_high")
    found = dict(objective=row["objective"].partition("_")[0])
    if low is not None:
        found |= dict(clip_low=low, clip_high=low if high is None else high)
    if row["objective"] == "clip":
        found["dual_clip"] = first("clip_ratio_c", "delta", "dual_clip") or 0.0
        found["dual_clip"] *= found["dual_clip"] < NONE
    if row["objective"] == "cispo":  # TRL has no lower bound, and the upper one is not 1 + it
        found = dict(objective="cispo", cispo_bound=high if low is None else 1 + high)
        found["cispo_low"] = 0.0 if low is None else max(0.0, 1 - low)
    if row["objective"] == "sapo":
        found["sapo_up"] = first("tau_pos", "sapo_temperature_pos")
        found["sapo_down"] = first("tau_neg", "sapo_temperature_neg")
    if row["objective"].startswith("dppo"):
        found |= dict(dppo_distance=row["objective"][5:], dppo_cap=s["clip_ratio_c"])
    return found


def importance_of(name, settings):
    """Our names of a correction's settings; None for what we do not have."""
    how, _, what = name.partition("_")
    what = {"both": "token", "token_both": "token"}.get(what, what)
    if what not in ("token", "sequence", "geometric"):
        return None
    bounds = next(v for k, v in settings.items() if "threshold" in k or "clip_max" in k)
    if isinstance(bounds, str):
        bounds = [float(x) for x in bounds.split("_")]
    least = settings.get("vllm_importance_sampling_clip_min") or 0.0
    low, high = bounds if isinstance(bounds, list) else (least, bounds)
    if "rollout_rs" in settings:  # verl bounds p_sampler / p_old, the inverse
        low, high = 1 / high, 1 / low
    return dict(importance=how, importance_of=what, importance_low=low, importance_cap=high)


def name_of(row):
    settings = {**row["settings"], **row.get("correction_settings", {})}
    values = "-".join(str(x) for x in settings.values())
    return f"{row['source']}-{row['advantages']}-{row['objective']}-{values}"


def advantages_of(row):
    given = INPUT[f"advantages_{row['advantages']}"]
    return given[:, None].expand(4, 6) if given.ndim == 1 else given


def is_ours(row):
    # verl's GSPO has one advantage for each token; ours has a gradient of the mean, as TRL's has.
    # Of DPPO's authors the variant with two old policies is left out. Where dual clip is below the
    # clip, which Config refuses, verl has it for negative advantages only.
    token_gspo = row["objective"] == "gspo" and row["advantages"] == "token"
    how = bounds_of(row)
    crossed = 0 < how.get("dual_clip", 0) < 1 + how.get("clip_high", 0)
    return not token_gspo and not crossed and row["old"] in INPUT


OBJECTIVES = [row for row in GOLDEN["objectives"] if is_ours(row)]
for row in GOLDEN["weighted"] + GOLDEN["corrections"]:
    row["how"] = importance_of(row["correction"], row.get("correction_settings", row["settings"]))
WEIGHTED = [row for row in GOLDEN["weighted"] if row["how"]]
CORRECTIONS = [row for row in GOLDEN["corrections"] if row["how"]]


def assert_near(found, expected, row):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert (found - expected).abs().max() <= max(row["tolerance"], 1e-13) * expected.abs().max()


@pytest.mark.parametrize("row", OBJECTIVES + WEIGHTED, ids=name_of)
def test_loss_and_gradient_are_the_sources(row):
    lp = INPUT["lp"].clone().requires_grad_()
    how = bounds_of(row) | row.get("how", {})
    loss, _ = grpo_loss(
        lp, INPUT[row["old"]], advantages_of(row), MASK, aggregation=row["aggregation"],
        max_new_tokens=6, sampler_BT=INPUT["sampler"], **how,
    )  # fmt: skip
    loss.backward()
    assert_near(row["factor"] * lp.grad, row["gradient"], row)
    assert_near(row["factor"] * loss.detach(), row["value"], row)


def test_the_golden_rows_have_each_objective_and_each_way_to_weigh():
    assert {row["objective"] for row in OBJECTIVES} >= {
        "reinforce", "clip", "cispo", "gspo", "sapo", "gmpo", "dppo_tv", "dppo_kl"}  # fmt: skip
    assert len(OBJECTIVES) + len(WEIGHTED) > 100
    ways = {(row["how"]["importance"], row["how"]["importance_of"]) for row in CORRECTIONS}
    for what in ("token", "sequence"):
        assert ways >= {("truncate", what), ("mask", what), ("reject", what)}
    assert ("reject", "geometric") in ways


@pytest.mark.parametrize("row", CORRECTIONS, ids=lambda row: row["source"])
def test_the_weights_of_a_sampler_are_the_sources(row):
    lp = INPUT["lp"].clone().requires_grad_()
    x = sampler_weights(INPUT["old"], INPUT["sampler"], MASK, **row["how"])
    l, _ = policy_loss(lp, INPUT["old"], torch.ones_like(lp), MASK, x_BT=x, objective="reinforce")
    l.sum().backward()
    expected = torch.tensor(row["mask"], dtype=torch.float64)
    if row["weights"] is not None:
        expected = expected * torch.tensor(row["weights"], dtype=torch.float64)
    assert torch.allclose(-lp.grad, expected * MASK, rtol=1e-12, atol=0)
    assert torch.equal(x == 0, (expected == 0) | ~MASK)


OURS = {
    "group_std": dict(baseline="group", scale="group"), "group_mean": dict(baseline="group"),
    "leave_one_out": dict(baseline="leave_one_out"),
    "group_mean_batch_std": dict(baseline="group", scale="batch"),
    "none_batch_std_tokens_biased": dict(baseline="none", scale="batch"),
    "none_batch_std_tokens": dict(baseline="none", scale="batch"),
}  # fmt: skip
ADVANTAGES = [row for row in GOLDEN["advantages"] if row["advantage"] in OURS]


@pytest.mark.parametrize("row", ADVANTAGES, ids=lambda row: f"{row['source']}-{row['advantage']}")
def test_advantages_are_the_sources(row):
    rollouts = GOLDEN["rollouts"]
    rewards = np.array(rollouts["rewards"]).reshape(-1, rollouts["group"])
    tokens = np.array(rollouts["lengths"]).reshape(rewards.shape)
    A = advantages(rewards, **OURS[row["advantage"]], tokens_PG=tokens)
    expected = np.array(row["values"]).reshape(rewards.shape)

    # Sources add different small numbers to the spread, and verl's variance of tokens is unbiased.
    if row["advantage"] == "group_std":
        spread = rewards.std(1, ddof=1, keepdims=True)
        eps = row["settings"].get("epsilon", 1e-4 if row["source"].startswith("trl") else 1e-9)
        expected = expected * (spread + eps) / (spread + 1e-4)
    if row["advantage"] == "none_batch_std_tokens":
        expected = expected * np.sqrt(tokens.sum() / (tokens.sum() - 1))
    assert np.abs(A - expected).max() <= max(row["tolerance"], 1e-12) * np.abs(expected).max()


def test_rewards_without_spread_have_advantages_of_zero():
    for reward in (0.0, 1.0, 0.1, 1 / 3):
        equal = np.full((2, 7), reward)
        for kind in ("group_mean", "group_std", "leave_one_out"):
            assert np.abs(advantages(equal, kind)).max() <= 1e-12
        for baseline in ("group", "leave_one_out", "none"):
            assert not advantages(equal, baseline=baseline, scale="batch").any()
        assert advantages(equal, baseline="none", scale="none").tolist() == equal.tolist()
    with pytest.raises(ValueError, match="median"):
        advantages(equal, "median")


@pytest.mark.parametrize("row", GOLDEN["overlong"], ids=lambda row: row["source"])
def test_the_punishment_of_long_answers_is_the_sources(row):
    config = Config(max_new_tokens=16, overlong_buffer=4)
    for length, expected in zip(row["lengths"], row["punishment"]):
        if length <= 16:  # no rollout of ours is longer
            t = Trajectory(0, [0] * (3 + length), np.zeros(2 + length, bool), np.zeros(2 + length),
                           path=[(3, 0, 1)])  # fmt: skip
            assert -overlong_penalty(config, t) == expected


def test_the_curves_are_drawn_of_runs_that_are_there(tmp_path, capsys):
    """The lines of the table of tests/RESULTS.md, of runs of three evaluations."""
    for objective in measure_objectives.OBJECTIVES:
        for seed in range(2):
            run = tmp_path / f"{objective}-{seed}"
            (run / "hf").mkdir(parents=True)
            lines = [{"step": 0, "eval/solved": 0.5}, {"step": 10, "eval/solved": 0.96},
                     {"step": 20, "eval/solved": 1.0 - seed / 10}, {"step": 21}]  # fmt: skip
            (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert measure_objectives.main([f"{tmp_path}", "2"]) == 0
    assert "| clip | 0.950 | 0.900 | 11, 11 |" in capsys.readouterr().out

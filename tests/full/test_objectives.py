"""Objectives, advantages and weights against the numbers that their sources' own code gave.

golden_objectives.json says for each row which package, version, function and settings gave it, and
which settings of ours are the same. audit.py's `definition` is held to the same loss in
test_loss.py.
"""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

from full.learn.advantages import ADVANTAGES, advantages, overlong_penalty
from full.learn.objectives import (
    OBJECTIVES, READS, LossSettings, OtherScores, SampledTokens, grpo_loss, sampler_weights,
)  # fmt: skip
from full.learn.rollouts import Trajectory
from full.run.config import Config

pytestmark = pytest.mark.quick
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

"""audit.py of runs with an engine: the stub is in this process, and the ranks in others.

What an engine draws is its own. Everything else is held to the definition, as in test_audit.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import shortened, slow
from test_audit import assert_right, in_rollout
from test_engine import directory, model_of, server  # noqa: F401, two fixtures
from test_run import good, runs_made_once

import models
from full.audit.audit import audited
from full.model.hf import save_hf

SHAPE = "--size 3 --turns 3 --device cpu --layers 1 --hidden 16 --heads 4 --prompts 2 --group 6 "
SHAPE += "--lr 0.02 --lr-warmup 0 --lr-decay constant --eval-every 2 --eval-prompts 3 --out run "
SHAPE += "--seed 1 --save-every 1 --keep 9 --log-rollouts all --steps"
RUN = f"{SHAPE} 4 --dtype float64 --kl-coef 0.05 --staleness 1 --minibatches 2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, server):  # noqa: F811
    run = runs_made_once(tmp_path_factory)
    return lambda flags, world: run(f"{flags} --engine {server.url}", world)


@pytest.fixture
def run_of(runs, tmp_path):
    """run_of(flags, world): a copy of a run with the engine, which is made once."""
    return lambda flags=RUN, world=1: Path(shutil.copytree(runs(flags, world), tmp_path / "run"))


MORE = [
    ("", 1), ("--plan t2 --staleness 1", 2), ("--dynamic-sampling --entropy-coef 0", 1),
    ("--dtype float64 --forks 2 --fork-turns 1", 1),
    ("--generator-dtype bfloat16 --proximal --importance-cap 2", 1),
]
MORE = slow(*((f"{SHAPE} 3 {flags}", world) for flags, world in MORE))


@pytest.mark.parametrize("flags, world", [(RUN, 1), *MORE])
def test_a_run_with_an_engine_is_audited(run_of, process_group, flags, world):
    report = audited(run_of(flags, world), 2)
    assert_right(report)
    assert "so no draw is compared" in "\n".join(report.intro)
    apart = {row.key: row.difference for row in report.rows}
    assert apart.pop("sampling/surprise") > 0 and {"sampling", "parameters"} < {*apart}
    assert max(apart.values()) < 1e-12 or "float64" not in flags


CHANGES = {  # what is changed, and the first row that must be outside
    "a log-prob": (in_rollout("logprobs"), "sampling"),
    "a token that is not masked": (in_rollout("sampled", lambda x: 0), "rollouts/sampled"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(run_of, process_group, name):
    change, key = CHANGES[name]
    run = run_of()
    change(run)
    assert audited(run, 2).verdict == f"audit of step 2: {key} is outside"


SLIPS = {  # by what the engine multiplies the temperature, and the verdict
    "none": (1.0, "ok"), "greedy": (0.0, "sampling/surprise is outside"),
    "another temperature": (1.15, "sampling/mean is outside"),
}  # fmt: skip


@pytest.mark.parametrize("name", shortened(SLIPS, "none", "greedy"))
def test_a_slip_of_the_engine_is_named(
    server, process_group, tmp_path, monkeypatch, name,  # noqa: F811
):  # fmt: skip
    """With a model that prefers some tokens: an even choice is the same at any temperature."""
    model = model_of(9, num_hidden_layers=1)
    with torch.no_grad():
        model.head_weight.mul_(30)
    save_hf(model, tmp_path / "model")
    factor, verdict = SLIPS[name]
    real = models.sample

    def sample(logits_BV, uniform_B, *, temperature):
        return real(logits_BV, uniform_B, temperature=factor * temperature)

    with monkeypatch.context() as patch:
        patch.setattr(models, "sample", sample)
        good(tmp_path, f"--size 3 --turns 3 --device cpu --prompts 4 --group 6 --steps 1 --out run "
             f"--model model --generator-dtype bfloat16 --engine {server.url}")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert audited("run", 0).verdict == f"audit of step 0: {verdict}"

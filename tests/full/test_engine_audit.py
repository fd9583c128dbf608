"""audit.py of runs with an engine: full.engine's server in this process, and the ranks in others.

What an engine draws is its own. Everything else is held to the definition, as in test_audit.py.
"""

import json
import shutil
from pathlib import Path

import pytest
from conftest import shortened, slow
from test_audit import assert_right, edit_line, in_line, in_rollout
from test_engine import server  # noqa: F401, a fixture
from test_run import runs_made_once

import models
from full.audit import audited
from full.checkpoint import checkpoints

SHAPE = "--size 3 --turns 3 --device cpu --layers 4 --hidden 16 --heads 4 --prompts 4 --group 8 "
SHAPE += "--lr 0.02 --lr-warmup 0 --lr-decay constant --eval-every 2 --eval-prompts 6 --out run "
SHAPE += "--save-every 1 --keep 9 --log-rollouts all"
RUN = f"{SHAPE} --dtype float64 --steps 4 --kl-coef 0.05 --staleness 1 --minibatches 2"


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, server):  # noqa: F811
    """run_of(flags, world): the directory of a run with the engine, made once."""
    run = runs_made_once(tmp_path_factory)
    return lambda flags=RUN, world=1: run(f"{flags} --engine {server.url}", world)


@pytest.fixture
def copied(run_of, tmp_path):
    """copied(flags): a copy of a run, to be changed."""
    return lambda flags=RUN: Path(shutil.copytree(run_of(flags), tmp_path / "run"))


def rows_of(report):
    return {row.key: row for row in report.rows}


def drop_checkpoints(run, *kept):
    for path in checkpoints(run):
        if int(path.name[5:]) not in kept:
            shutil.rmtree(path)


MORE = slow(*((f"{SHAPE} --steps 3 {flags}", world) for flags, world in (
    ("--dtype float64 --forks 2 --fork-turns 1 --advantage per_branch", 1),
    ("", 1), ("--plan t2 --staleness 2", 2), ("--dtype float64 --dynamic-sampling", 1),
    ("--generator-dtype bfloat16 --proximal --importance-cap 2", 1),
)))  # fmt: skip


@pytest.mark.parametrize("flags, world", [(RUN, 1), *MORE])
def test_a_run_with_an_engine_is_audited_with_and_without_its_checkpoints(
    run_of, process_group, tmp_path, flags, world,
):  # fmt: skip
    """At a checkpoint's step, and with the recorded rollouts of the steps on the way to it."""
    run = Path(shutil.copytree(run_of(flags, world), tmp_path / "run"))
    found = []
    for kept in ({1, 2}, {3}):
        drop_checkpoints(run, *kept, 3)
        report = audited(run, 2)
        assert_right(report)
        found.append(rows_of(report))
        assert any("so no draw is compared" in text for text in report.intro)
        replayed = any("2 steps, with the recorded rollouts" in text for text in report.intro)
        assert replayed == (kept == {3})
        assert "parameters" in found[-1] and not {"sampling", "sampling/surprise"} - {*found[-1]}
    if "float64" in flags:
        keys = found[0].keys() - {"sampling/surprise"}
        assert max(rows[key].difference for rows in found for key in keys) < 1e-12


def test_what_cannot_be_replayed_is_refused(copied, process_group):
    run = copied()
    drop_checkpoints(run, 3)
    edit_line(run, 1, "tokens", lambda token: token + 1, "rollouts.jsonl")
    with pytest.raises(ValueError, match="of step 1 is not the one that the task says"):
        audited(run, 3)

    # --log-rollouts sampled, or a torn file.
    lines = (run / "rollouts.jsonl").read_text().splitlines(keepends=True)
    for gone in (1, 3):
        kept = [line for line in lines if json.loads(line)["step"] != gone]
        (run / "rollouts.jsonl").write_text("".join(kept))
        with pytest.raises(ValueError, match=f"of step {gone}, and an engine's .* cannot be drawn"):
            audited(run, 3)


CHANGES = {  # what is changed, and the first row that must be outside
    "a log-prob": (in_rollout("logprobs"), "sampling"),
    "a token that is not masked": (in_rollout("sampled", lambda x: 0), "rollouts/sampled"),
    "an advantage": (in_rollout("advantage"), "rollouts/advantage"),
    "a token": (in_rollout("tokens", lambda x: (x + 1) % 3), "rollouts/tokens"),
    "the loss": (in_line("loss/token_mean"), "loss/token_mean"),
    "the gradient": (in_line("grad_norm"), "grad_norm"),
}


@pytest.mark.parametrize("name", shortened(CHANGES, *list(CHANGES)[:3]))
def test_a_change_is_named(copied, process_group, name):
    change, key = CHANGES[name]
    run = copied()
    change(run)
    assert audited(run, 2).verdict == f"audit of step 2: {key} is outside"


SLIPS = {"greedy": (lambda tau: 0.0, "sampling/surprise"),
         "another temperature": (lambda tau: 1.25 * tau, "sampling/mean")}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_of_the_engine_is_named(run_of, server, process_group, monkeypatch, name):  # noqa: F811
    """After some steps, since a uniform policy is the same at any temperature."""
    change, key = SLIPS[name]
    real = models.sample

    def sample(logits_BV, uniform_B, *, temperature):
        late = int(server.decoder.version.rpartition("-")[2]) >= 5
        return real(logits_BV, uniform_B, temperature=(change if late else float)(temperature))

    with monkeypatch.context() as patch:
        patch.setattr(models, "sample", sample)
        run = run_of(f"{SHAPE} --steps 6 --generator-dtype bfloat16")
    assert audited(run, 4).wrong is None
    report = audited(run, 5)
    print([row for row in report.rows if "sampling" in row.key])
    assert report.verdict == f"audit of step 5: {key} is outside"

"""What happens before the first step: defaults, the evaluation, five lines.

And the line that a run says where it has nothing to learn from.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import LOOKUP
from test_ranks import read_metrics
from test_run import SAVING, TINY, good

from full.api import run
from full.audit.audit import audited
from full.run.config import Config, flag_name
from full.run.flags import parse_config
from full.run.run import lost_to_rounding

FLAGS = f"{SAVING} 2 --task {LOOKUP!r} --size 2"
# Code is never imported from what a run stored, so the task is given again.
RESUME = f"--resume --out run --task {LOOKUP!r}"


# Defaults ------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("given, defaults", [
    ({}, (1e-3, 0.02)), (dict(model="DIR"), (1e-6, 0)),
    (dict(model="DIR", lora_rank=2), (1e-5, 0))])
def test_defaults_depend_on_what_the_run_begins_with(given, defaults):
    """A default is that of the start; a flag wins over it, 0 too where 0 has a meaning."""
    config = Config(**given).check()
    assert (config.lr, config.entropy_coef) == defaults
    flags = [x for name, value in given.items() for x in (flag_name(name), f"{value}")]
    for entropy_coef in (0.5, 0.0):
        more = parse_config([*flags, "--entropy-coef", f"{entropy_coef}", "--lr", "3"]).check()
        assert (more.entropy_coef, more.lr) == (entropy_coef, 3.0)


# The evaluation before the first step ------------------------------------------------------------


def test_what_is_solved_before_the_first_step_is_audited(straight, tmp_path, process_group):
    run = Path(shutil.copytree(straight(FLAGS), tmp_path / "run"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert ["eval/solved_before" in json.loads(line) for line in lines] == [True, False]
    report = audited(run, 0, task=LOOKUP)
    assert report.wrong is None and any("from the first weights" in x for x in report.intro)
    before = [row for row in report.rows if row.key == "eval/solved_before"]
    assert len(before) == 1
    assert "eval/solved_before" not in {row.key for row in audited(run, 1, task=LOOKUP).rows}

    # A changed number is found.
    first = json.loads(lines[0])
    first["eval/solved_before"] += 1 / 6
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    assert audited(run, 0, task=LOOKUP).wrong == "eval/solved_before"


def test_it_is_evaluated_once_and_again_only_with_line_0(straight, tmp_path):
    finished = straight(FLAGS)
    out = (finished.parent / "out").read_text()
    lines = read_metrics(finished)
    (before,) = re.findall(r"^before +(\S+)$", out, re.M)
    assert float(before) == pytest.approx(lines[0]["eval/solved_before"], abs=1e-3)
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    out, _ = good(tmp_path, RESUME)
    assert "before" not in out and read_metrics(run) == lines
    for step in (1, 2):
        shutil.rmtree(run / f"step-{step:08d}")
    out, _ = good(tmp_path, RESUME)
    assert f"before{before:>30}\n" in out and read_metrics(run) == lines


# What is printed --------------------------------------------------------------------------------


def test_settings_that_do_little_are_said(tmp_path, monkeypatch, capsys):
    """Such as weights too coarse for a step: as many as AdamW's first step leaves unchanged."""
    model = torch.nn.Linear(64, 64).bfloat16()
    model.bias.requires_grad_(False)
    first = model.weight.detach().clone()
    for lr in (1e-2, 1e-4, 1e-6):
        model.weight.data.copy_(first)
        model.weight.grad = torch.randn(64, 64).bfloat16()
        torch.optim.AdamW([model.weight], lr, weight_decay=0).step()
        share = (model.weight == first).double().mean().item()
        assert lost_to_rounding(model, lr) == pytest.approx(share, abs=0.01)
        model.weight.data.copy_(first)
    assert lost_to_rounding(model, 1e-6) > 0.99 > lost_to_rounding(model.float(), 1e-6) == 0

    monkeypatch.chdir(tmp_path)
    said = ("--dtype bfloat16 has no finer masters: rounding undoes a step of --lr 1e-05 in 84.5% "
            "of the weights; set --dtype float32 --compute-dtype bfloat16\n")  # fmt: skip
    in_words = ("--kl k1 in the loss has a gradient of mean 0, so it keeps the policy near nothing: "
                "--kl k3, or --kl-in reward\n")  # fmt: skip
    for flags, says in (("--dtype bfloat16", said), ("--compute-dtype bfloat16", ""),
                        ("--kl-coef 0.1 --kl k1", in_words)):  # fmt: skip
        run(parse_config(f"{TINY} --steps 1 --lr 1e-5 {flags}".split()))
        assert capsys.readouterr().err == says


# Nothing to learn from --------------------------------------------------------------------------


def test_a_run_whose_rollouts_are_cut_off_warns_once_and_shows_it(tmp_path):
    out, err = good(tmp_path, f"{TINY} --max-new-tokens 1 --steps 3 --out run")
    shares = [x["tokens/truncated_fraction"] for x in read_metrics(tmp_path / "run")]
    assert all(0.5 < share < 1 for share in shares)  # one token may also be an end
    warning, idle = err.splitlines()
    assert warning.startswith(f"warning: step 0: {shares[0]:.0%} of the rollouts were cut off")
    assert idle.startswith("warning: steps 0 to 2: ")
    lines = [line for line in out.splitlines() if re.match(" +([0-9]+|step) ", line)]
    assert lines[0].split()[:5] == ["step", "reward", "solved", "eval", "truncated"]
    shown = {int(line.split()[0]): line.split()[-6] for line in lines[1:]}
    assert shown == {step: f"{shares[step]:.3g}" for step in shown} and len(shown) == 3

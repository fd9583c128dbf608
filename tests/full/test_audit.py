"""audit.py: honest runs pass, and what is wrong with a run is the first row outside.

One table has honest runs and runs with a fault: a digit of a file is changed, or the fault is
planted in the run's process. The audit must name the row, and the kit the mistake.
"""

import functools
import json
import math
import os
import pkgutil
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, shortened
from oracles import LiveBytes
from safetensors.torch import load_file
from test_rollout import Chat
from test_run import (
    SHARD, _main, begin, contents, end, flip_a_bit, good, runs_made_once,
)  # fmt: skip

from conformance import definition
from full.__main__ import main
from full.audit import models as audit_models
from full.audit.audit import audited
from full.audit.replay import Rollout, RunFiles
from full.ranks.checkpoint import write_checkpoint
from full.run.config import Config
from full.run.directory import RunDirectory

TINY = "--size 3 --turns 3 --device cpu --layers 1 --hidden 16 --heads 2 --prompts 4 --group 4 "
TINY += "--lr 0.02 --lr-warmup 0 --eval-every 3 --eval-prompts 6 --save-every 1 --keep 9 --out run"
RUN = f"{TINY} --steps 4 --kl-coef 0.05 --clip-high 0.02 --clip-low 0.02"
CRITIC = "--size 2 --advantage gae --critic-lr 0.01"  # 2: there are rewards
ONE = f"{RUN} --minibatches 1"  # with one update there is no second one to see what the first did
COARSE = f"{ONE} --compute-dtype bfloat16"


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The directory of a run with these flags, made once for each."""
    run = runs_made_once(tmp_path_factory)
    return lambda flags=RUN, world=1: run(flags, world)


@pytest.fixture
def copied(honest, tmp_path):
    """copied(flags): a copy of an honest run, to be changed."""
    return lambda *run: Path(shutil.copytree(honest(*run), tmp_path / "run"))


def assert_right(report):
    assert report.wrong is None, [row for row in report.rows if not row.ok]

# Changes of a run -------------------------------------------------------------------------------


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_line(run, key, change, name, step=2):
    """Change a number of a step's line of a file, or of a list the first number that is not 0."""
    lines = lines_of(run / name)
    line = next(line for line in lines if line["step"] == step
                and (np.any(line[key]) or not isinstance(line[key], list)))  # fmt: skip
    if isinstance(line[key], list):
        line, key = line[key], next(n for n, x in enumerate(line[key]) if np.any(x))
    line[key] = change(line[key])
    write_lines(run / name, lines)


def digit(x):
    """The same number but for its fourth digit."""
    return x * (1 + 1e-3)


def in_line(key, change=digit, name="metrics.jsonl"):
    return lambda run: edit_line(run, key, change, name)


def in_rollout(key, change=digit):
    return in_line(key, change, "rollouts.jsonl")


def in_tensor(step, name, factor):
    """Another number in a checkpoint, which is sealed again, as somebody who means it would."""
    def change(run):
        path = run / f"step-{step:08d}"
        tensors = load_file(path / SHARD)
        tensors[name].view(-1)[3] *= factor
        state = json.loads((path / "state.json").read_text())
        rest = {key: value for key, value in state.items() if key not in ("files", "seal")}
        write_checkpoint(path, tensors, rest)

    return change


def in_config(key, value):
    """A claim to have had another setting."""
    def change(run):
        stored = json.loads((run / "config.json").read_text())
        assert stored[key] != value
        (run / "config.json").write_text(json.dumps(stored | {key: value}))

    return change


def without_zeros(run):
    """A turn whose reward is missing has reward 0."""
    lines = lines_of(run / "rollouts.jsonl")
    short = [line | {"rewards": [x for x in line["rewards"] if x[1]]} for line in lines]
    assert short != lines
    write_lines(run / "rollouts.jsonl", short)


# Faults in a run's process: the real function, and its arguments.


def _shifted_mask(real, *args, **how):
    groups = real(*args, **how)
    for t in (t for group in groups for t in group):
        t.mask = t.sampled = np.concatenate([[False], t.mask[:-1]])
    return groups


def _doubled_gradient(real, trainer, *args, **how):
    found = real(trainer, *args, **how)
    if dist.get_rank() == dist.get_world_size() - 1:
        for p in trainer.model.parameters():
            if p.grad is not None:
                p.grad *= 2
    return found


def _doubled_loss(real, *args, **how):
    loss, sums = real(*args, **how)
    return 2 * loss, sums


def _swapped_betas(real, optimizer):
    for group in optimizer.inner.param_groups:
        group["betas"] = (0.99, 0.9)
    return real(optimizer)


def _other_reference(real, directory, trainer):
    real(directory, trainer)
    for p in trainer.reference.parameters():
        p.data *= 1.1


def _old_weights(real, trainer):
    return trainer.policy_version if trainer.policy_version > 2 else real(trainer)


def _planted(rank, world, port, cwd, log, flags, fault):
    """`main` with a function replaced."""
    name, change = CASES[fault].fault
    owner, _, function = name.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    real = getattr(owner, function)
    setattr(owner, function, lambda *args, **how: change(real, *args, **how))
    _main(rank, world, port, cwd, log, flags, None)


# The table --------------------------------------------------------------------------------------


class Case(NamedTuple):
    fault: Callable | tuple | None  # a change of the run's files, or (function, its replacement)
    wrong: str | None = None  # the first row outside
    words: str = ""  # of the kit
    flags: str = RUN
    ranks: int = 1
    steps: tuple = (2,)


def passes(flags, ranks=1, last=2):
    """An honest run: its first step, and a later one."""
    return Case(None, flags=f"{TINY} --steps 3 {flags}", ranks=ranks, steps=(0, last))


# With --proximal the first ratios are of two log-probs, which round apart; by hand of one. By how
# much they do depends on the machine's kernels, so the size is written into the file.
PROXIMAL = "--device cpu --layers 2 --hidden 48 --heads 4 --prompts 2 --group 4 --eval-prompts 2 "
PROXIMAL += "--lr-decay constant --lr-warmup 0 --steps 3 --save-every 2 --keep 9 --proximal "
PROXIMAL += "--importance-cap 2 --out run"
METRICS = ("loss/token_mean", "reward/mean", "advantage/token_std", "loss/policy_token_mean",
           "entropy/token_mean", "kl/token_mean", "grad_norm")  # fmt: skip
CASES = {
    # Settings that a file or a precision has a part in; STEPS of full/check.py has all the others.
    "critic": passes(f"{CRITIC} --kl-coef 0.05 --kl-in reward --kl k1 --lr-warmup 9"),
    "forks": passes("--forks 2 --fork-turns 2 --dtype float64"),
    "proximal": passes("--proximal --importance-cap 1.001 --generator-dtype bfloat16 "
                       "--temperature 0.8"),
    "filter": passes("--overlong filter --aggregation constant --max-new-tokens 8 --minibatches 3"),
    "an update without a token": passes(
        "--overlong filter --aggregation constant --max-new-tokens 3 --minibatches 4"),
    "one update": passes("--compute-dtype bfloat16 --minibatches 1", last=1),
    "two ranks": passes("--dtype float64", ranks=2),
    "two updates": passes("--compute-dtype bfloat16", last=1),
    "all bfloat16": passes("--dtype bfloat16"),
    "no reward, entropy alone": passes("--advantage gae --aggregation sequence_mean"),
    "tensor parallel": passes("--plan t2 --heads 4", ranks=2),
    "no rewards of 0": Case(without_zeros),
    "rounding of two forwards": Case(in_line("ratio/max_first", lambda x: 1 + 1.2e-6),
                                     flags=PROXIMAL),
    # A number in a file. A setting that a run ignores is a change of its configuration.
    "more than rounding": Case(in_line("ratio/max_first", lambda x: 1 + 1e-4), "ratio/max_first",
                               flags=PROXIMAL),
    **{name: Case(in_line(name), name) for name in METRICS},
    "clipped": Case(in_line("ratio/clipped_fraction", lambda x: x + 1), "ratio/clipped_fraction"),
    "evaluation": Case(in_line("eval/solved", lambda x: x + 1 / 6), "eval/solved"),
    "a token": Case(in_rollout("tokens", lambda x: (x + 1) % 3), "rollouts/tokens"),
    "a log-prob": Case(in_rollout("logprobs"), "sampling/logprobs", "unexplained log-probs"),
    "an advantage": Case(in_rollout("advantage"), "rollouts/advantage", "unexplained advantages"),
    "a reward": Case(in_rollout("rewards", lambda x: [x[0], x[1] + 0.1]), "rollouts/rewards"),
    "--lr": Case(in_config("lr", 0.021), "lr", "the learning rate is 0.9524 times", ONE),
    "--temperature": Case(in_config("temperature", 1.2), "sampling/logprobs",
                          "log-probs are at temperature 1"),
    "--entropy-coef": Case(in_config("entropy_coef", 0.021), "loss/token_mean_first",
                           "the entropy's coefficient is 0.02, not 0.021"),
    "--clip-low": Case(in_config("clip_low", 0.01), "ratio/clipped_fraction"),
    "--kl": Case(in_config("kl", "k1"), "kl/token_mean_first", "the KL is k3, not k1"),
    "--kl, bfloat16": Case(in_config("kl", "k1"), "kl/token_mean", "the KL is k3, not k1", COARSE),
    "--kl-coef, bfloat16": Case(in_config("kl_coef", 0.1), "loss/token_mean",
                                "the KL's coefficient is 0.0", COARSE),
    "--weight-decay": Case(in_config("weight_decay", 0.1), "parameters", "no weight decays", ONE),
    "--weight-decay, two updates": Case(in_config("weight_decay", 0.1), "ratio/token_mean",
                                        "no weight decays"),
    "a weight": Case(in_tensor(2, "model.lm_head.weight", 1.01), "sampling/logprobs"),
    "a moment": Case(in_tensor(2, "optimizer.lm_head.weight.exp_avg", 1.01), "gradient", "lm_head",
                     ONE),
    "a weight after": Case(in_tensor(3, "model.lm_head.weight", 1.001), "parameters",
                           "lm_head.weight", ONE),
    "a weight after, NaN": Case(in_tensor(3, "model.lm_head.weight", math.nan), "parameters", "",
                                ONE),
    "a moment after, NaN": Case(in_tensor(3, "optimizer.lm_head.weight.exp_avg", math.nan),
                                "gradient", "", ONE),
    # In the run's process.
    "another reference, bfloat16": Case(
        ("full.run.directory.RunDirectory.write_reference", _other_reference), "kl/token_mean", "",
        COARSE),
    "divided by another count": Case(
        ("full.learn.trainer.loss_denominator",
         lambda real, *masks, **how: real(*masks, **how) + 1),
        "loss/policy_token_mean", "the denominator is", ONE),
    "a mask shifted by one": Case(("full.learn.batches.play", _shifted_mask), "rollouts/sampled"),
    "a gradient doubled on one rank": Case(
        ("full.learn.trainer.Trainer.forward_backward", _doubled_gradient), "grad_norm",
        "rank 1 of 2 counts twice", ONE, 2),
    "a doubled loss of the critic": Case(("full.learn.trainer.Trainer.critic_loss", _doubled_loss),
                                         "critic/grad_norm_first", "",
                                         f"{TINY} --steps 3 {CRITIC}"),
    "swapped betas": Case(("full.ranks.optimizer.LocalOptimizer.step", _swapped_betas), "gradient",
                          "the betas are swapped", ONE),
    "old weights in the sampler": Case(  # of another dtype: else it has the policy's own memory
        ("full.learn.trainer.Trainer.push_weights", _old_weights), "sampling", "unexplained tokens",
        f"{RUN} --generator-dtype bfloat16"),
}  # fmt: skip
COMMON = "loss/token_mean", "clipped", "a token", "--lr", "--entropy-coef", "a weight", "a moment"
COMMON += *list(CASES)[:7], *list(CASES)[11:14], *list(CASES)[-6:-1]


@pytest.mark.parametrize("name", shortened(CASES, *COMMON))
def test_what_an_audit_says(honest, copied, tmp_path, process_group, name):
    """An honest run holds. A fault is named. A row that says nothing has a cause."""
    case = CASES[name]
    if isinstance(case.fault, tuple):
        run = tmp_path / "run"
        codes, _, err = end(*begin(tmp_path, case.flags, case.ranks, name, _planted))
        assert codes == [0] * case.ranks, err
    else:
        run = (copied if case.fault else honest)(case.flags, case.ranks)
        (case.fault or print)(run)
    for step in case.steps:
        report = audited(run, step, world=case.ranks)
        assert report.wrong == case.wrong, report.text()
        assert case.words in " ".join(report.findings.values()), report.findings
        rows = {row.key: row for row in report.rows}
        off = [row.difference / max(1.0, abs(row.by_hand)) for row in report.rows]
        assert max(off) < 1e-12 or "float64" not in case.flags
        for row in report.rows:
            size = abs(row.by_hand) if row.size is None else row.size
            assert bool(row.why) != row.is_informative == (row.allowed <= max(1e-12, size / 10))
            assert row.is_informative or f"{row.key} " in report.text() and row.why in report.text()
        silent = sum(row.ok and not row.is_informative for row in report.rows)
        assert report.counts.endswith(f"; {silent} say nothing") or not silent

    # In bfloat16 weights and the gradient's norm say something after one update.
    if name in ("one update", "two updates"):
        assert rows["grad_norm"].is_informative or name == "two updates"
        assert rows["parameters"].is_informative == (name == "one update") and silent > 2


# What honest runs show --------------------------------------------------------------------------


@pytest.mark.quick
def test_the_audit_of_an_honest_run(honest, process_group, capsys):
    """Every metric that the step determines has a row. The verdict counts rows that say nothing."""
    run = honest()
    before = contents(run)
    assert main(["audit", str(run), "--step", "2", "--all"]) == 0
    text, err = capsys.readouterr()
    report = audited(run, 2)
    assert contents(run) == before and text == report.text(True) + "\n"
    assert re.search(r"^step 2: 16 rollouts of \d+ tokens, in float64 and once more in", err, re.M)
    line = lines_of(run / "metrics.jsonl")[2]
    undetermined = {"step", "logprob_gap/identical", "memory/peak"}
    undetermined |= {name for name in line if name.startswith("seconds/")}
    rows = {row.key: row for row in report.rows}
    assert rows.keys() & line.keys() == line.keys() - undetermined
    assert {"gradient", "parameters"} <= rows.keys()

    # The bounds of a float32 run are rounding, and the rows without news are of rounding itself.
    silent = {key for key, row in rows.items() if not row.is_informative}
    assert silent == {"logprob_gap/max", "logprob_gap/mean", "logprob_gap/kl"}
    assert report.counts == f"{len(rows) - 3} of {len(rows)} numbers hold; 3 say nothing"
    assert text.splitlines()[-2:] == [report.counts, "audit of step 2: ok"]
    loss = rows["loss/token_mean"]
    assert abs(loss.by_hand) > 1e-4 and 0 < loss.difference <= loss.allowed < 1e-6
    assert loss.how == f"8 x {loss.distance:.1e} + {loss.floor:.0e}"
    assert rows["grad_norm"].allowed < 2e-5 * rows["grad_norm"].by_hand
    assert rows["ratio/clipped_fraction"].recorded > 0.01 and rows["kl/token_mean"].recorded > 1e-5


@pytest.mark.quick
def test_a_default_run_says_which_steps_can_be_audited(tmp_path, process_group, capsys):
    """The first and the last. Others have no checkpoint before them."""
    flags = TINY.replace("--save-every 1 --keep 9", "").replace("--minibatches 1", "")
    out, _ = good(tmp_path, f"{flags} --steps 4")
    assert "`python -m full audit run` can audit steps 0, 3; for more: --save-every 1" in out
    run = tmp_path / "run"
    for step, number, after in ((None, 3, True), (0, 0, False)):
        report = audited(run, step)
        assert report.verdict == f"audit of step {number}: ok"
        assert any(row.key == "parameters" for row in report.rows) == after
        assert any("no step-00000001" in text for text in report.intro) != after
    capsys.readouterr()
    assert "(0, 3), got 1; save_every 1" in refusal(capsys, run, "--step", 1)


def test_a_run_that_learns_from_a_teacher_is_audited(honest, process_group):
    """Under tensor parallelism A is the teacher's log-prob less the sampler's, too."""
    teacher = honest(f"{TINY} --steps 2 --seed 5 --heads 4") / "hf"
    flags = f"{TINY} --steps 3 --dtype float64 --objective reinforce --minibatches 1 --plan t2"
    run = honest(f"{flags} --heads 4 --lr 5e-3 --entropy-coef 0 --teacher {teacher}", 2)
    report = audited(run, 2)
    assert_right(report)
    assert max(row.difference for row in report.rows) < 1e-10
    first, *_, last = lines_of(run / "metrics.jsonl")
    name = "advantage/token_mean"  # an estimate of -KL(policy, teacher)
    assert abs(last[name]) < abs(first[name])


def test_memory_is_at_most_three_times_the_weights(honest, process_group, monkeypatch):
    """In float64: weights and a gradient, and half of it for the twin. The rest is on disk."""
    monkeypatch.setattr("conformance.computed.SMALL", 0)  # as of a model that keeps no graphs
    few = "--prompts 2 --group 4 --minibatches 2"
    run = honest(f"{TINY} --steps 2 --layers 3 --hidden 256 {few}")
    weights = 8 * sum(x.numel() for x in load_file(run / "hf/model.safetensors").values())
    with LiveBytes() as live:
        assert audited(run, 1).wrong is None
    assert 2 * weights < live.peak < 3 * weights, live.peak / weights


@pytest.mark.quick
@pytest.mark.parametrize("forks, count", [(1, 4), (2, 2)])
def test_the_surprise_of_equal_tokens_is_their_entropy(forks, count):
    """With equal logits each token has -log p = H = log V. Two forks share a turn of two tokens."""
    def model(tokens_1S, at):
        return torch.zeros(1, 4, 11, dtype=torch.float64)[at][None]

    rollouts = [Rollout(0, n, dict(tokens=[1, 2, 3, 4]), at=[1, 3]) for n in range(2)]
    config = SimpleNamespace(forks=forks, fork_turns=forks - 1, temperature=0.7)
    found = audit_models.log_likelihood_test(model, rollouts, config)
    assert found == pytest.approx([count * math.log(11), count * math.log(11), 0], abs=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("recorded, doubt", [(0.5, 0.0), (1.0, 0.5)])
def test_a_play_is_in_doubt_if_rounding_may_turn_a_sampled_token(monkeypatch, recorded, doubt):
    """Of two plays, one has a tie where it sampled, and one where its prompt is."""
    def model(n, tokens_1S, at):
        lead_S = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]][tokens_1S[0, 0]])
        return torch.stack([lead_S + 1e-9 * n, 0 * lead_S], -1)[None][at][None]

    played = [[SimpleNamespace(tokens=[n, 0, 0, 0], sampled=np.array([n == 2, True, True]),
                               reward=n)] for n in range(2)]  # fmt: skip
    monkeypatch.setattr(audit_models, "play_held_out", lambda *_: (None, played))
    monkeypatch.setattr(audit_models, "Sampler", lambda _: None)
    models = SimpleNamespace(config=None, task=None)

    def make_model(n):
        made = functools.partial(model, n)
        made.module = None
        return made

    assert audit_models.solved(models, make_model, recorded) == (0.5, doubt)


def test_what_the_audit_does_not_know_is_said_in_one_line(
    process_group, copied, monkeypatch, capsys
):
    run = copied()
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 2', '{"new/metric": 1.0, "step": 2'))
    report = audited(run, 2)
    assert report.wrong is None and report.intro[-1] == "the audit does not know new/metric"
    config = RunFiles(run).config
    monkeypatch.delitem(definition.OBJECTIVES, config.objective)
    assert main(["audit", str(run), "--step", "2"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"the definition does not know {config.objective!r}: add it to conformance/" in last


@pytest.mark.slow
@pytest.mark.parametrize("number", ["601", "2002"])
def test_a_run_with_random_settings_is_audited(tmp_path, number):
    """By the script that looks for false alarms: three steps of one run, none of them wrong.

    Run 2002 has a KL whose reference is rounded ten times as much as its policy.
    """
    given = str(tmp_path), "1", "--first", number
    done = subprocess.run([sys.executable, ROOT / "tests/bench/honest_runs.py", *given],
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout.endswith("1 runs, 3 audits, 0 false alarms\n"), done.stderr


@pytest.mark.slow
def test_a_signal_ends_the_script_and_the_ranks_of_its_run(tmp_path):
    command = [sys.executable, ROOT / "tests/bench/honest_runs.py", tmp_path, "1", "--first", "624"]
    script = subprocess.Popen(command, start_new_session=True)  # 624 has two ranks
    while not (tmp_path / "run-624").exists() and script.poll() is None:
        time.sleep(0.1)
    script.terminate()
    assert script.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(script.pid, 0)


# What cannot be audited ------------------------------------------------------------------------


def refusal(capsys, *argv):
    assert main(["audit", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("error: ")
    return err


@pytest.mark.parametrize("key, value", [("tokens", [0, 99]), ("logprobs", [0.0]), ("sampled", None),
                                        ("advantage", [0.0]), ("rewards", [[0]]), ("group", [0])])
def test_a_line_that_is_not_a_rollout_is_refused(copied, key, value):
    path = copied() / "rollouts.jsonl"
    write_lines(path, [lines_of(path)[0] | {key: value}])
    with pytest.raises(ValueError, match="line 1 is not a rollout"):
        RunFiles(path.parent).rollouts(0, SimpleNamespace(vocab_size=4))


@pytest.mark.quick
@pytest.mark.parametrize("tokens, differs", [([9], 0), ([9, 4], 1), ([1], 3), ([1, 2, 3, 4], 0)])
def test_tokens_past_the_end_and_missing_tokens_are_counted(tokens, differs):
    """A lone 9 ends a rollout of `Chat`; another one goes on to the limit, here 4 tokens."""
    task = Chat()
    r = Rollout(group=0, number=0, line=dict(tokens=[0, 1, *tokens]))
    r.replay(Config(max_new_tokens=4), task, *task.prompt(None, 1, False))
    assert r.differs == differs


def test_what_cannot_be_audited_says_why(copied, tmp_path, capsys):
    run, step = copied(), ("--step", 2)
    assert "it holds no config.json" in refusal(capsys, tmp_path)
    assert "one of the 4 steps of metrics.jsonl" in refusal(capsys, run, "--step", 4)
    flip_a_bit(run / "step-00000002" / SHARD)
    assert f"step-00000002: {SHARD} is damaged" in refusal(capsys, run, *step)
    (run / "rollouts.jsonl").write_text('{"step": 3, "group": 0, "rollout": 0}\n')
    assert "all rollouts and a checkpoint before it (none)" in refusal(capsys, run, "--step", 3)
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[1:]))
    assert "line 1 of metrics.jsonl is of step 1" in refusal(capsys, run)
    metrics.write_text("")
    assert "checkpoint before it (none)" in refusal(capsys, run)


TASK = """
from pathlib import Path
from train_grpo import Guess
open("imported", "a").close()
class Mine(Guess):
    def reply(self, state, answer):
        if Path("broken").exists():
            raise KeyError("gone")
        return super().reply(state, answer)
"""


def test_no_file_that_the_run_names_is_imported(tmp_path, monkeypatch, capsys):
    """And nothing in the directory is written: it may be read-only, and in use."""
    (tmp_path / "mine.py").write_text(TASK)
    good(tmp_path, f"{TINY} --steps 2 --task mine.py:Mine")
    monkeypatch.chdir(tmp_path)
    Path("imported").unlink()
    assert "give it again, as --task FILE.py:Mine" in refusal(capsys, "run")
    assert not Path("imported").exists()
    modes = {path: path.stat().st_mode for path in [Path("run"), *Path("run").rglob("*")]}
    before = contents(Path("run"))
    with RunDirectory("run").locked():
        for path, mode in modes.items():
            path.chmod(mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
        assert main(["audit", "run", "--task", "mine.py:Mine"]) == 0
        for path, mode in modes.items():
            path.chmod(mode)
    assert contents(Path("run")) == before and Path("imported").exists()

    # What the task raises is named with its line, after the traceback.
    capsys.readouterr()
    Path("broken").touch()
    assert main(["audit", "run", "--task", "mine.py:Mine"]) == 2
    *trace, last = capsys.readouterr().err.splitlines()
    assert trace[0] == "Traceback (most recent call last):" and trace[-1] == "KeyError: 'gone'"
    assert re.fullmatch(r"error: KeyError: 'gone' \(.*mine.py, line 8, in Mine.reply\)", last)

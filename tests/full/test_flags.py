"""Random flags: a run finishes, or all ranks refuse it in the same line; nobody hangs.

    python -m pytest tests/full/test_flags.py                # 9 combinations
    python -m pytest tests/full/test_flags.py -m slow -s     # 1,000; how many end in which way

A combination is a function of its number. Runs with a plan, a tree, recomputed activations or
two ranks, in float64 and with tame numbers, must also have the metrics of one process without them.
"""

import contextlib
import dataclasses
import faulthandler
import math
import re
import shlex
import signal
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from conftest import LOOKUP, SORT, shortened
from full.model.hf import save_hf
from full.model.transformer import Transformer
from full.run.config import Config, choices_of
from full.tiny import tiny
from models import FULL, SLIDING
from test_ranks import join, largest_difference, read_metrics
from test_run import _main, begin

CHOICES = {f.name: choices_of(f) for f in dataclasses.fields(Config)}
SLACK = 1e-8  # of metrics against one process
ROUNDING = 1e-6  # a gradient of a smaller norm, other than 0, is rounding
LIMIT = 60  # seconds after which a run has hung; its own --timeout is shorter, so that it can tell

# What may end a run that was configured well, after its directory was made.
LATE = [
    r"\d+ optimizer steps in a row had a non-finite gradient",
    r"the run ends in steps that were skipped for a non-finite gradient",
    r"step \d+: no finite token",
]
# Lines that a step may print.
SKIPPED = r"step \d+: (skipped, non-finite gradient first in|no update, since) .*"
SKIPPED += r"|warning: steps? \d+( to \d+)?: .*"


class Case(NamedTuple):
    number: int
    world: int
    flags: dict  # flag without its dashes -> value; True for a flag without one
    tame: bool  # numbers are such that rounding stays small

    @property
    def argv(self):
        out = []
        for name, value in self.flags.items():
            out += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return out


HUGE, FAR, NEAR = 2**62, 1e300, 1e-300

# Flags whose size is the run's work get no huge number: nobody can wait for 2**62 steps.
TAME_EXTREMES = {
    "seed": [0, 1, HUGE], "batch-rows": [1, HUGE], "turns": [1],
    "eval-every": [1, HUGE], "eval-prompts": [1], "save-every": [0, 1, HUGE], "keep": [1, HUGE],
    "micro-tokens": [1, HUGE], 
    "minibatches": [1, 2, 3, HUGE], "prompts": [1], "group": [1],
    "timeout": [HUGE, 2**31], "steps": [1],
    "max-new-tokens": [1, HUGE, 300], "size": [1],
    "heads": [1, 3], "hidden": [2, 15, HUGE], "layers": [1],
    "weight-decay": [0.1], "lr-warmup": [0, 1, HUGE], "forks": [1, 2, HUGE],
    "fork-turns": [1, HUGE], "chunk-tokens": [1, 5, HUGE],
    "clip-low": [0.999, 1.0], "clip-high": [FAR, 3.0], "dual-clip": [1.0, 3.0, FAR],
    "cispo-bound": [FAR], "kl-coef": [0.05, NEAR], "entropy-coef": [0.0, NEAR],
    "importance-cap": [FAR, 2.0], "importance-low": [0.5],
    "overlong-buffer": [1, HUGE], "teacher": ["missing"], "device": ["cuda"], "resume": [True],
    "proximal": [True], "dynamic-sampling": [True, 2],
    "out": ["run", "deep/er/run"], "task": ["jsonl", "missing.py:Task", "none"],
    "compute-dtype": ["float64"],
    "model": ["missing"], "generator-dtype": ["float64"], "lr": [NEAR],
    "staleness": [1, 2, 64, 65, HUGE],
}  # fmt: skip
WILD_EXTREMES = {
    "temperature": [NEAR, FAR, 1e-5, 100.0], "clip-low": [NEAR], "clip-high": [NEAR],
    "cispo-bound": [NEAR], "kl-coef": [FAR], "entropy-coef": [FAR], "importance-cap": [NEAR],
    "lr": [FAR, 10.0],
    "weight-decay": [FAR],
    "dtype": ["bfloat16"], "generator-dtype": ["bfloat16", "float32"],
    "compute-dtype": ["bfloat16", "float32"],
}  # fmt: skip
IMPOSSIBLE = ["-1", "nan", "inf", "-inf", "0"]
ONE_PROCESS = (
    "plan", "data-parallel", "pp-schedule", "tree", "chunk-tokens", "ac", "compile", "exact",
)  # fmt: skip
TASKS = {"guess": {"size": 3, "turns": 2}, SORT: {"size": 5}, LOOKUP: {"size": 2}}
ALWAYS = {
    "device": ["cpu"], "timeout": [20], "steps": [2, 2, 3], "prompts": [1, 2, 3],
    "group": [2, 3, 4], "eval-prompts": [1, 2, 3], "lr": [0.01], "lr-warmup": [0, 0, 1],
    "max-new-tokens": [3, 5, 8], "minibatches": [1], "dtype": ["float64"] * 4 + ["float32"],
    "layers": [1, 2], "hidden": [8], "heads": [1, 2, 4], "aggregation": CHOICES["aggregation"],
    "advantage": [x for x in CHOICES["advantage"] if x != "teacher"],
}  # fmt: skip
KL = {"kl-coef": [0.05], "kl": CHOICES["kl"]}
SOMETIMES = [  # how often, and flags. Those that exclude each other are a case that is refused
    (0.05, {"dynamic-sampling": [True, 2], "entropy-coef": [0]}), (0.15, KL),
    # In the first step the policy is the reference: advantages of a group without reward are then
    # rounding, whose sign would decide what a narrow clip counts as clipped.
    (0.15, KL | {"kl-in": ["reward"], "clip-low": [0.9], "clip-high": [9.0]}),
    (0.3, {"objective": CHOICES["objective"]}), (0.1, {"dual-clip": [30]}),
    (0.15, {"proximal": [True], "importance-cap": [2], "importance": CHOICES["importance"],
            "importance-of": CHOICES["importance_of"]}),
    (0.2, {"minibatches": [2]}), (0.2, {"staleness": [1, 2]}), (0.2, {"overlong": ["filter"]}),
    (0.1, {"forks": [2], "fork-turns": [1]}), (0.3, {"lr-decay": CHOICES["lr_decay"]}),
    (0.2, {"save-every": [1], "keep": [1]}), (0.15, {"micro-tokens": [1, 20, 60]}),
    (0.3, {"data-parallel": ["fsdp", "fsdp", "fsdp-offload", *["zero1"] * 3]}),
    (0.2, {"tree": ["sparse"]}), (0.15, {"tree": ["dta"], "chunk-tokens": [1, 4, 16]}),
    (0.2, {"ac": ["full", "full", "op", "op", "layers"]}),
]  # fmt: skip
PLANS = ["d2", "t2", "t2", "c2", "c2", "p2", "p2", "d2e2", "t2e2", "(attn:t2|ffn:t2)"]
NO_PLANS = ["d1", "d4", "x2", "d2+d2", "t3", "c2|t2", "p3", "d0", "d2d2", "e2", "archon:d2"]


def draw(number, models_of) -> Case:
    """Combination `number`. models_of: kind of checkpoint -> its directory."""
    rng = np.random.default_rng([0, number])

    def one(values):
        return values[int(rng.integers(len(values)))]

    def chance(p):
        return rng.random() < p

    world, task, tame = one([1, 2]), one([*TASKS]), True
    flags = {"task": task} | TASKS[task] | {name: one(values) for name, values in ALWAYS.items()}
    for share, some in SOMETIMES:
        if chance(share):
            flags |= {name: one(values) for name, values in some.items()}
    if chance(0.65):
        _draw_plan(flags, world, one, chance)
    if "e2" in flags.get("plan", "") or "ffn" in flags.get("plan", "") or chance(0.1):
        for name in ("layers", "hidden", "heads"):
            del flags[name]
        flags["model"] = models_of["tied" if chance(0.1) else "experts"]

    # Something extreme in a third of them.
    for _ in range(one([0, 0, 0, 0, 1, 2])):
        if chance(0.1):
            numeric = [f for f, v in flags.items() if isinstance(v, int | float) and v is not True]
            flags[one(numeric)] = one(IMPOSSIBLE)
            continue
        wild = chance(0.4)
        source = WILD_EXTREMES if wild else TAME_EXTREMES
        name = one(list(source))
        flags[name] = one(source[name])
        tame = tame and not wild
    return Case(number, world, flags, tame)


def _draw_plan(flags, world, one, chance):
    """A plan, and the shape of a model that it mostly splits."""
    flags["plan"] = plan = one(NO_PLANS) if chance(0.08) else one(PLANS) if world == 2 else "d1"
    if "t2" in plan and chance(0.9):
        flags["heads"] = 4  # two key heads
    if "c2" in plan:
        flags["heads"] = one([2, 4])
    if "p2" in plan:
        flags["pp-schedule"] = one(["1f1b", "interleaved1f1b", "zbv"])
        flags["layers"] = 2 if flags["pp-schedule"] == "1f1b" else 4
        if chance(0.15):
            flags["layers"] = one([1, 2, 3])


@pytest.fixture(scope="module")
def models_of(tmp_path_factory):
    """Checkpoints that plans with experts, and tied weights, are tried on."""
    sizes = dict(vocab_size=12, hidden_size=8, intermediate_size=12, eos_token_id=(1,))
    sizes["num_hidden_layers"] = 4  # as many as the schedules of a pipeline cut stages
    folder = tmp_path_factory.mktemp("models")
    kinds = {
        "experts": tiny(
            "qwen3_moe", num_experts=4, moe_intermediate_size=6, sparse_layers=(0, 2, 3), **sizes
        ),
        "tied": tiny("gemma3_text", layer_types=[SLIDING, FULL] * 2, **sizes),
    }
    for name, config in kinds.items():
        save_hf(Transformer(config).double().init_weights(0), folder / name)
    return {name: str(folder / name) for name in kinds}


# How a case ended --------------------------------------------------------------------------------


class Result(NamedTuple):
    codes: list  # of each rank; -9: it hung, and was killed
    errors: list  # what each wrote to stderr
    files: list  # relative paths of what was written
    metrics: list | None


def _watched(rank, world, port, cwd, log, flags, die):
    faulthandler.dump_traceback_later(LIMIT - 5)  # to stderr, which then tells where it hung
    _main(rank, world, port, cwd, log, flags, die)


def results_of(folder, jobs):
    """Results of pairs (world, argv); two of one rank at a time."""
    results, pending = [], []
    for world, argv in jobs:
        if sum(len(processes) for processes, _, _ in pending) + world > 2:
            results += [ended(*run) for run in pending]
            pending = []
        cwd = Path(tempfile.mkdtemp(dir=folder)) / "case"
        cwd.mkdir()
        pending.append((*begin(cwd, shlex.join(argv), world, main=_watched), cwd))
    return results + [ended(*run) for run in pending]


def ended(processes, log, cwd):
    with contextlib.suppress(AssertionError):  # of a rank that hangs
        join(processes, LIMIT)
    logs = [Path(f"{log}-err-{rank}") for rank in range(len(processes))]
    errors = [path.read_text() if path.exists() else "" for path in logs]
    files = sorted(str(path.relative_to(cwd)) for path in cwd.rglob("*"))
    found = list(cwd.rglob("metrics.jsonl"))
    metrics = read_metrics(found[0].parent) if len(found) == 1 else None
    return Result([process.exitcode for process in processes], errors, files, metrics)


def faults_of(result, case) -> list[str]:
    """What is wrong with how a case ended, a line each."""
    tail = " / ".join(text[-700:] for text in result.errors)
    stuck = [rank for rank, code in enumerate(result.codes) if code == -signal.SIGKILL]
    if stuck:
        return [f"ranks {stuck} hung:\n{result.errors[stuck[0]][-3000:]}"]
    if set(result.codes) == {0}:
        return _faults_of_a_finished_run(result, case)
    if set(result.codes) == {2}:
        return _faults_of_a_refusal(result)
    return [f"exit codes {result.codes}: {tail}"]


def _faults_of_a_finished_run(result, case):
    if result.metrics is None:
        return ["exit 0 without one metrics.jsonl"]
    found, steps = [], int(case.flags["steps"])
    if [line["step"] for line in result.metrics] != list(range(steps)):
        found.append(f"lines of steps {[line['step'] for line in result.metrics]}, not of {steps}")
    skipped = 0
    for line in result.metrics:
        # A skipped step has a norm that is no number, and says that it was skipped.
        told = line["updates/skipped"] > skipped
        skipped = line["updates/skipped"]
        names = [k for k, v in line.items() if v is None or not math.isfinite(v)]
        if names and not told:
            found.append(f"step {line['step']}: {', '.join(names)} not finite")
    if skipped and case.tame:
        found.append(f"{skipped} updates skipped with tame numbers")
    if any(name.endswith(".tmp") for name in result.files):
        found.append(f"something unfinished is left: {result.files}")
    return found


def _faults_of_a_refusal(result):
    found, texts = [], []
    for rank, text in enumerate(result.errors):
        # What is refused before ranks meet, rank 0 alone says.
        lines = [x for x in text.splitlines() if not re.fullmatch(SKIPPED, x)]
        if rank and not text:
            continue
        start = f"rank {rank}: error: " if len(result.errors) > 1 else "error: "
        if len(lines) != 1 or not lines[0].startswith(start):
            return [f"rank {rank} wrote, instead of one line with its error: {text[-1500:]}"]
        texts.append(lines[0].removeprefix(start))
    if len(set(texts)) > 1:
        found.append(f"ranks give different reasons: {texts}")
    if result.files and not any(re.search(late, texts[0]) for late in LATE):
        found.append(f"refused ({texts[0]}), but wrote {result.files[:4]}")
    return found


def norms_of(line):
    return [line[x] for x in ("grad_norm_first", "grad_norm") if line.get(x) is not None]


def lines_before_noise(metrics, truth):
    """How many lines can be compared: all up to the first update by rounding alone.

    AdamW divides a gradient by its own size. So it makes a step of usual size of a gradient that is
    rounding, such as that of a KL between equal weights, and two computations of one run go apart.
    """
    for n, lines in enumerate(zip(metrics, truth)):
        if any(0 < norm < ROUNDING for line in lines for norm in norms_of(line)):
            return n + (len(norms_of(lines[0])) == 1)  # one update: its metrics are from before it
    return len(truth)


def difference_of(result, truth):
    """None if both have the same metrics, else what differs."""
    count = lines_before_noise(result.metrics, truth.metrics)
    # In a small gradient some tensors are near rounding. One run of 1000 is off by 2.2e-8.
    small = any(0 < norm < 0.01 for line in truth.metrics for norm in norms_of(line))
    try:
        assert len(result.metrics) == len(truth.metrics), "another number of steps"
        worst = largest_difference(result.metrics[:count], truth.metrics[:count])
    except (AssertionError, ValueError) as error:
        return f"not the metrics of one process: {error}"
    if worst < (10 * SLACK if small else SLACK):
        return None
    return f"metrics are {worst:.1e} off those of one process"


def plain(case):
    """The arguments of the same run in one process, without plan, tree and recomputation."""
    flags = {name: x for name, x in case.flags.items() if name not in ONE_PROCESS}
    return case._replace(flags=flags).argv


def judge(cases, folder):
    """[(case, how it ended, its faults, whether it was compared)]."""
    results = results_of(folder, [(case.world, case.argv) for case in cases])

    # The truth of each run that finished and can be compared: one process, without the rest.
    compared = []
    for case, result in zip(cases, results, strict=True):
        float64 = {"float64"} == {case.flags["dtype"], case.flags.get("generator-dtype", "float64")}
        other = case.world == 2 or plain(case) != case.argv
        compared.append(case.tame and float64 and other and set(result.codes) == {0})
    truths = results_of(folder, [(1, plain(case)) for case, on in zip(cases, compared) if on])

    judged = []
    for case, result, on in zip(cases, results, compared):
        found = faults_of(result, case)
        if on:
            truth = truths.pop(0)
            differs = difference_of(result, truth)
            if set(truth.codes) != {0}:
                differs = f"one process without a plan fails: {truth.errors[0][-700:]}"
            found += [differs] if differs and not found else []
        how = "finished" if set(result.codes) == {0} else "refused"
        judged.append((case, how, found, on))
    return judged


@pytest.mark.parametrize("count", shortened([9, 1000], 9))
def test_random_flags_finish_or_are_refused_by_all_ranks_alike(tmp_path, models_of, count):
    judged = judge([draw(number, models_of) for number in range(count)], tmp_path)
    ends = [how for _, how, _, _ in judged]
    finished, refused = ends.count("finished"), ends.count("refused")
    compared = sum(on for *_, on in judged)
    lines = [f"{finished} finished, {refused} refused, {compared} compared with one process"]
    print(*lines)
    for case, _, found, _ in judged:
        if found:
            lines += [f"\n#{case.number}  {case.world} ranks: {shlex.join(case.argv)}", *found]
    assert len(lines) == 1, "\n".join(lines)
    # Neither all refused nor all plain: else nothing was tried.
    assert min(finished, 3 * refused, 3 * compared) >= count / 3


LINE = {"step": 0, "loss/token_mean": 0.5, "reward/mean": 0.25, "updates/skipped": 0}
FILES = ["run", "run/metrics.jsonl", "run/step-00000001"]
GOOD = Result([0, 0], ["", ""], FILES, [LINE])
NO = "error: --steps must be positive, got 0\n"
REFUSED = Result([2, 2], [f"rank 0: {NO}", f"rank 1: {NO}"], [], None)
WRONG = [  # how a run ended, and what is said of it
    (GOOD._replace(codes=[0, -9]), r"ranks \[1\] hung"),
    (GOOD._replace(codes=[0, 2]), "exit codes"),
    (GOOD._replace(metrics=[]), "lines of steps"),
    (GOOD._replace(metrics=[LINE | {"loss/token_mean": None}]), "not finite"),
    (GOOD._replace(files=[*FILES, "run/a.tmp"]), "something unfinished"),
    (REFUSED._replace(errors=[f"warning\nrank 0: {NO}"] * 2), "instead of one line"),
    (REFUSED._replace(errors=[f"rank 0: {NO}", "rank 1: error: x"]), "reasons"),
    (REFUSED._replace(files=["runs/guess-0"]), "but wrote"),
]  # fmt: skip


def test_the_judge_sees_each_way_to_fail():
    case = Case(0, 2, {"steps": 1}, True)
    assert not faults_of(GOOD, case) and not faults_of(REFUSED, case)
    assert not faults_of(REFUSED._replace(errors=[f"rank 0: {NO}", ""]), case)
    for result, says in WRONG:
        (fault,) = faults_of(result, case)
        assert re.search(says, fault)
    assert difference_of(GOOD, GOOD) is None
    for change in ({"loss/token_mean": 0.5 + 1e-7}, {"reward/mean": 0.2500001}, {"more": 1.0}):
        assert difference_of(GOOD, GOOD._replace(metrics=[LINE | change])) is not None
    for norm, compared in ((0.0, True), (1e-8, False), (0.5, True)):
        updated = LINE | {"grad_norm": norm}
        runs = [GOOD._replace(metrics=[updated, LINE | {"loss/token_mean": x}]) for x in (1, 2)]
        assert (difference_of(*runs) is not None) == compared

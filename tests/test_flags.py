"""Random flags: a run finishes, or all ranks refuse it in the same line; nobody hangs.

    python -m pytest tests/test_flags.py                    # 15 combinations
    python -m pytest tests/test_flags.py -m slow            # 1,000; FLAGS_SEED=7 draws others
    python tests/test_flags.py --seed 7 --count 1000        # the same, with a line for each failure
    python tests/test_flags.py --seed 7 --only 123          # one of them

A combination is a function of (seed, number). Two workers, processes that import torch once, call
`train_grpo.main` for one combination after the other: each worker alone, or both as the ranks of
one run. What `main` prints goes to files, and `os._exit`, by which it leaves several ranks, is
replaced by an exception, so that the exit code, the lines on stderr and the files of a run are
those that a shell would see, without a start of python for each run.

Runs with a plan, a tree, recomputed activations or two ranks, in float64 and with tame numbers,
must also have the metrics of the run in one process without any of these.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import math
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import LOOKUP, SORT, shortened

import models
import train_grpo
from test_ranks import CONTEXT, largest_difference, read_metrics

CHOICES = {f.name: get_args(f.type) for f in dataclasses.fields(train_grpo.Config)}
SLACK = 1e-8  # of metrics against one process, as in test_plan_run.py
BATCH = 100  # combinations that a worker goes through before it is started anew
LIMIT = 60  # seconds after which a run has hung; its own --timeout is shorter, so that it can tell

# What may end a run that was configured well, after its directory was made.
LATE = [
    r"\d+ optimizer steps in a row had a non-finite gradient",
    r"the run ends in steps that were skipped for a non-finite gradient",
    r"step \d+: no finite token",
]
# What argparse says of a value that is no number: its usual two lines, the same on every rank.
NO_NUMBER = r"usage: train_grpo\.py .*\ntrain_grpo\.py: error: argument .*: (invalid|expected) .*\n"
# Lines that a step may print.
SKIPPED = r"(supervised )?step \d+: (skipped, non-finite gradient first in|no update, since) .*"
SKIPPED += r"|warning: steps \d+ to \d+: .*"


# Drawing -------------------------------------------------------------------------------------


class Case(NamedTuple):
    number: int
    world: int
    flags: dict  # flag without its dashes -> value; True for a flag without one
    tame: bool  # numbers are such that rounding stays small

    @property
    def argv(self):
        return argv_of(self.flags)

    @property
    def command(self):
        start = "python" if self.world == 1 else f"torchrun --nproc-per-node {self.world}"
        return f"{start} train_grpo.py {shlex.join(self.argv)}"


def argv_of(flags):
    out = []
    for name, value in flags.items():
        out += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return out


HUGE, FAR, NEAR = 2**62, 1e300, 1e-300

# Flags whose size is the run's work get no huge number: nobody can wait for 2**62 steps.
TAME_EXTREMES = {
    "seed": [0, 1, HUGE], "target": [0.0, FAR], "batch-rows": [1, HUGE], "turns": [1],
    "eval-every": [1, HUGE], "eval-prompts": [1], "save-every": [0, 1, HUGE], "keep": [1, HUGE],
    "log-every": [1, HUGE], "micro-tokens": [1, HUGE], "max-grad-norm": [FAR, 1e-3],
    "max-skipped": [1, HUGE], "minibatches": [1, 2, 3, HUGE], "prompts": [1], "group": [1],
    "timeout": [HUGE, 2**31], "threads": [2, HUGE, 2**31], "steps": [1],
    "max-new-tokens": [1, HUGE, 32767], "size": [1], "demos": [1, 2],
    "heads": [1, 3], "hidden": [2, 15, HUGE], "layers": [1], "gae-lambda": [0.0, 1.0, 2.0],
    "gamma": [0.9, 2.0], "value-clip": [0.0, FAR], "value-coef": [NEAR], "weight-decay": [0.1],
    "beta2": [0.0, 0.5, 1.0], "lr-warmup": [0, 1, HUGE], "forks": [1, 2, HUGE],
    "fork-turns": [1, HUGE], "max-rounds": [2], "max-tokens": [1, 5, HUGE],
    "clip-low": [0.999, 1.0], "clip-high": [FAR, 3.0], "dual-clip": [1.0, 3.0, FAR],
    "cispo-bound": [FAR], "kl-coef": [0.05, NEAR], "entropy-coef": [0.0, NEAR],
    "importance-cap": [FAR, 2.0], "importance-low": [0.5], "cispo-low": [0.5, NEAR, 6.0],
    "sapo-up": [0.5], "sapo-down": [2.0], "dppo-cap": [1.0, FAR], "overlong-buffer": [1, HUGE],
    "baseline": ["none"], "scale": ["batch", "group"], "teacher": ["missing"],
    "device": ["cuda"], "resume": [True], "overwrite": [True],
    "tensorboard": [True], "recompute": [True], "proximal": [True], "dynamic-sampling": [True],
    "out": ["run", "deep/er/run"], "task": ["jsonl", "missing.py:Task", "none"],
    "compute-dtype": ["float64"],
    "model": ["missing"], "generator-dtype": ["float64"], "lr": [NEAR], "shard-ranks": [1, 2, 3],
    "offload": [True], "lr-min": [0.1, 1.0, 2.0], "lr-first-step": ["zero"],
    "staleness": [1, 2, 64, 65, HUGE],
}  # fmt: skip
WILD_EXTREMES = {
    "temperature": [NEAR, FAR, 1e-5, 100.0], "clip-low": [NEAR], "clip-high": [NEAR],
    "cispo-bound": [NEAR], "kl-coef": [FAR], "entropy-coef": [FAR], "importance-cap": [NEAR],
    "value-coef": [FAR], "gamma": [NEAR], "value-clip": [NEAR], "lr": [FAR, 10.0],
    "weight-decay": [FAR], "beta2": [NEAR, 0.9999999999999999], "max-grad-norm": [NEAR],
    "dtype": ["bfloat16"], "generator-dtype": ["bfloat16", "float32"],
    "compute-dtype": ["bfloat16", "float32"],
}  # fmt: skip
IMPOSSIBLE = ["-1", "nan", "inf", "-inf", "0"]
ONE_PROCESS = ("plan", "data-parallel", "cp-method", "pp-schedule", "tree", "max-tokens",
               "recompute", "ac", "shard-ranks", "offload", "compile")  # fmt: skip
SHAPE = "layers", "hidden", "heads"  # of a model without a checkpoint


def draw(seed, number, models_of) -> Case:
    """Combination `number`. models_of: kind of checkpoint -> its directory."""
    rng = np.random.default_rng([seed, number])

    def one(values):
        return values[int(rng.integers(len(values)))]

    def chance(p):
        return rng.random() < p

    world, tame = one([1, 2]), True
    task = one(["guess", SORT, LOOKUP])
    flags = dict(task=task, device="cpu", timeout=20, steps=one([2, 2, 3]), prompts=one([1, 2, 3]))
    flags |= {"group": one([2, 3, 4]), "eval-prompts": one([1, 2, 3]), "lr": 0.01}
    flags |= {"lr-warmup": one([0, 0, 1]), "max-new-tokens": one([3, 5, 8]), "minibatches": 1}
    flags |= {"guess": {"size": 3, "turns": 2}, SORT: {"size": 5}, LOOKUP: {"size": 2}}[task]
    flags["dtype"] = one(["float64"] * 4 + ["float32"])
    flags |= dict(layers=one([1, 2]), hidden=8, heads=one([1, 2, 4]))

    # The loss. What excludes each other is mostly, and not always, drawn apart.
    flags["advantage"] = one(CHOICES["advantage"])
    flags["aggregation"] = one(CHOICES["aggregation"])
    dynamic = flags["advantage"] != "gae" and chance(0.15)
    if dynamic:
        flags |= {"dynamic-sampling": True, "max-rounds": one([1, 2]), "entropy-coef": 0}
    if chance(0.3) and not dynamic:
        flags |= {"kl-coef": 0.05, "kl": one(["k1", "k2", "k3"]), "kl-in": one(["loss", "reward"])}
        if flags["kl-in"] == "reward":
            # In the first step the policy is the reference: advantages of a group without reward
            # are then rounding, whose sign would decide what a narrow clip counts as clipped.
            flags |= {"clip-low": 0.9, "clip-high": 9.0}
    kind = one(["plain", "plain", "plain", "objective", "sequence", "dual", "stale"])
    if kind == "objective":
        flags["objective"] = one(CHOICES["objective"])
        if flags["objective"] in ("cispo", "reinforce", "sapo"):
            flags.pop("clip-low", None), flags.pop("clip-high", None)
    if kind == "sequence":
        flags["ratio"] = "sequence"
    if kind == "dual":
        flags["dual-clip"] = 30
    if kind == "stale":
        flags |= {"proximal": True, "importance-cap": 2, "importance": one(CHOICES["importance"])}
        flags["importance-of"] = one(CHOICES["importance_of"])
    if flags["advantage"] not in ("gae", "per_branch") and not dynamic and chance(0.3):
        flags |= {"baseline": one(["group", "leave_one_out", "none"])}
        flags["scale"] = one(["none", "batch"])
    if flags["prompts"] > 1 and chance(0.3):
        flags["minibatches"] = 2
    if chance(0.2):
        flags["staleness"] = one([1, 2])
    if chance(0.2):
        flags["overlong"] = "filter"
    if task != SORT and flags["group"] in (2, 4) and chance(0.3):
        flags |= {"forks": 2, "fork-turns": 1}
    if task == LOOKUP and chance(0.3):
        flags["demos"] = one([1, 2])
    if chance(0.3):
        flags["lr-decay"] = one(CHOICES["lr_decay"])
    if chance(0.2):
        flags |= {"save-every": 1, "keep": 1}

    # Who does what.
    if chance(0.65):
        _draw_plan(flags, world, one, chance, models_of)
    elif chance(0.15):
        _take_model(flags, models_of[one(list(models_of))])
    if chance(0.3):
        flags["data-parallel"] = one(["fsdp", "zero1"])
        if flags["data-parallel"] == "fsdp" and chance(0.3):
            flags |= one([{"shard-ranks": 1}, {"shard-ranks": 2}, {"offload": True}])
    if chance(0.08 if "p2" in flags.get("plan", "") else 0.4):
        flags["tree"] = one(["sparse", "dta"])
        if flags.get("data-parallel") == "fsdp" or "c2" in flags.get("plan", ""):
            flags["tree"] = one(["sparse", "sparse", "sparse", "dta"])
        if flags["tree"] == "dta":
            flags["max-tokens"] = one([1, 4, 16])
            if chance(0.5):
                flags["recompute"] = True
    if chance(0.06 if flags.get("tree") == "dta" else 0.3):
        flags["ac"] = one(["full", "layers", "op"])
    if chance(0.15):
        flags["micro-tokens"] = one([1, 20, 60])

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


def extremes():
    """A case for each extreme and impossible value by itself, in a run that is else good."""
    base = {"task": "guess", "size": 3, "turns": 2, "device": "cpu", "timeout": 20, "steps": 2}
    base |= {"prompts": 2, "group": 4, "eval-prompts": 2, "lr": 0.01, "lr-warmup": 0}
    base |= {"max-new-tokens": 5, "minibatches": 1, "dtype": "float64", "advantage": "group_mean"}
    base |= dict(layers=1, hidden=8, heads=2)
    needs = {
        "max-tokens": {"tree": "dta"}, "recompute": {"tree": "dta", "max-tokens": 4},
        "cispo-bound": {"objective": "cispo"}, "cispo-low": {"objective": "cispo"},
        "sapo-up": {"objective": "sapo"}, "sapo-down": {"objective": "sapo"},
        "dppo-cap": {"objective": "dppo"}, "importance-low": {"importance-cap": 2},
        "demos": {"task": LOOKUP, "size": 2},
        "dynamic-sampling": {"entropy-coef": 0},
        "max-rounds": {"dynamic-sampling": True, "entropy-coef": 0},
        "max-new-tokens": {"task": SORT, "size": 5},  # a prompt of five tokens
    }  # fmt: skip
    of_gae = "gae-lambda", "gamma", "value-clip", "value-coef"
    needs |= dict.fromkeys(of_gae, {"advantage": "gae"})
    tables = [(table, table is TAME_EXTREMES) for table in (TAME_EXTREMES, WILD_EXTREMES)]
    drawn = [(name, x, tame) for table, tame in tables for name in table for x in table[name]]
    numbers = [f for f in dataclasses.fields(train_grpo.Config) if f.type in (int, float)]
    drawn += [(f.name.replace("_", "-"), x, False) for f in numbers for x in IMPOSSIBLE]
    cases = []
    for name, x, tame in drawn:
        flags = base | needs.get(name, {}) | {name: x}
        if name == "model":
            flags = {k: v for k, v in flags.items() if k not in SHAPE}
        cases.append(Case(len(cases), 1, flags, tame))
        if isinstance(x, float):  # which may be no number of a smaller dtype
            cases.append(Case(len(cases), 1, flags | {"dtype": "float32"}, False))
    return cases


def _take_model(flags, directory):
    for name in SHAPE:
        del flags[name]
    flags["model"] = directory


def _draw_plan(flags, world, one, chance, models_of):
    plans = ["d2", "t2", "t2", "c2", "c2", "p2", "p2", "d2e2", "t2e2", "(attn:t2|ffn:t2)"]
    odd = ["d1", "d4", "x2", "d2+d2", "t3", "c2|t2", "p3", "d0", "d2d2", "e2", "archon:d2",
           "d2|d2|d2", "d1|d2"]
    if world == 2:
        plans += ["d1+d1"]
    plan = one(odd) if chance(0.08) else one(plans) if world == 2 else "d1"
    if plan in plans and chance(0.3):  # a generator's own, which the model may not fit
        plan = f"{one(['d2', 't2', 'd2e2', 't2e2', '(attn:t2|ffn:t2)'])}|{plan}"
    flags["plan"] = plan
    if "e2" in plan or "ffn" in plan:
        if chance(0.85):  # else the model is dense, and the plan refused
            _take_model(flags, models_of["experts"])
        return
    if "t2" in plan and chance(0.9):
        flags["heads"] = 4  # two key heads
    if "c2" in plan:
        flags["cp-method"] = one(["ring", "allgather", "ulysses"])
        flags["heads"] = one([2, 4])
    if "p2" in plan:
        flags["pp-schedule"] = one(["1f1b", "interleaved1f1b", "zbv"])
        flags["layers"] = 2 if flags["pp-schedule"] == "1f1b" else 4
        if chance(0.15):
            flags["layers"] = one([1, 2, 3])
    if chance(0.2):
        _take_model(flags, models_of[one(["tied", "experts"])])


def make_models(folder):
    """Checkpoints that plans with experts, and tied weights, are tried on."""
    sizes = dict(vocab_size=12, hidden_size=8, intermediate_size=12, eos_token_id=(1,))
    sizes["num_hidden_layers"] = 4  # as many as the schedules of a pipeline cut stages
    kinds = {
        "experts": models.tiny(
            "qwen3_moe", num_experts=4, moe_intermediate_size=6, sparse_layers=(0, 2, 3), **sizes
        ),
        "tied": models.tiny("gemma3_text", layer_types=[models.SLIDING, models.FULL] * 2, **sizes),
    }
    for name, config in kinds.items():
        models.save_hf(models.Transformer(config).double().init_weights(0), folder / name)
    return {name: str(folder / name) for name in kinds}


# Workers -------------------------------------------------------------------------------------


class Left(BaseException):
    """In place of os._exit, which would end the worker."""


def _leave(code):
    raise Left(code)


class Job(NamedTuple):
    cwd: str
    argv: list
    rank: int = 0
    world: int = 1
    port: int = 0
    fault: str = ""  # planted by this file's own tests


def _work(number, pipe):
    """A worker: jobs come through the pipe, and what became of each goes back."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    saved, hook = (os.dup(1), os.dup(2)), sys.excepthook
    while (job := pipe.recv()) is not None:
        os.chdir(job.cwd)
        log = Path(job.cwd).with_suffix("")
        for descriptor, name in ((1, "out"), (2, "err")):
            target = os.open(f"{log}-{name}-{job.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, descriptor)
            os.close(target)
        # A signal of the parent writes the stack to stderr, which then tells where it hung.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        leave, os._exit = os._exit, _leave
        code = _run(job)
        # The worker itself leaves by os._exit too; and each process group wraps the hook anew.
        os._exit, sys.excepthook = leave, hook
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(saved[descriptor - 1], descriptor)
        pipe.send((code, Path(f"{log}-err-{job.rank}").read_text()))


def _run(job):
    """The exit code of main; "traceback" if it let an exception out, which stands in stderr."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if job.world > 1:
        os.environ |= dict(RANK=str(job.rank), LOCAL_RANK=str(job.rank), MASTER_ADDR="127.0.0.1")
        os.environ |= dict(WORLD_SIZE=str(job.world), MASTER_PORT=str(job.port))
    if job.fault == "hangs":
        time.sleep(10 * LIMIT)
    try:
        code = train_grpo.main(list(job.argv))
    except Left as left:
        (code,) = left.args
    except SystemExit as left:  # by argparse
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = "traceback"
    # A rank that leaves closes its connections, so that others see that it is gone.
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    gc.collect()
    return code


class Result(NamedTuple):
    codes: list  # of each rank; None: hung
    errors: list  # what each wrote to stderr
    files: list  # relative paths of what was written
    metrics: list | None


class Workers:
    """Two of them, each alone or both as the ranks of one run."""

    def __init__(self, folder):
        self.folder, self.count = Path(folder), 0
        self.processes, self.pipes = [None, None], [None, None]

    def __enter__(self):
        for number in (0, 1):
            self._start(number)
        return self

    def __exit__(self, *error):
        for number in (0, 1):
            with contextlib.suppress(OSError):
                self.pipes[number].send(None)
            self.processes[number].join(2)
            self._kill(number)

    def _start(self, number):
        self.pipes[number], theirs = CONTEXT.Pipe()
        self.processes[number] = CONTEXT.Process(target=_work, args=(number, theirs), daemon=True)
        self.processes[number].start()
        theirs.close()

    def _kill(self, number):
        self.processes[number].kill()
        self.processes[number].join()
        self.pipes[number].close()

    def renew(self):
        """Start both anew: threads and sockets of process groups that are gone add up."""
        self.__exit__()
        self.__enter__()
        self.count = 0

    def _cwd(self):
        self.count += 1
        cwd = self.folder / f"case-{self.count:05d}"
        cwd.mkdir()
        return str(cwd)

    def _answer(self, number, job, deadline):
        """What a worker says of its job; one that says nothing in time is replaced."""
        if self.pipes[number].poll(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(EOFError, OSError):
                return self.pipes[number].recv()
        log = Path(f"{Path(job.cwd).with_suffix('')}-err-{job.rank}")
        if self.processes[number].is_alive():
            os.kill(self.processes[number].pid, signal.SIGUSR1)
            time.sleep(0.5)
        text = log.read_text() if log.exists() else ""
        self._kill(number)
        self._start(number)
        return None, text

    def alone(self, commands, limit=LIMIT):
        """Results of runs of one rank, two at a time. commands: lists of arguments."""
        results, running, todo = [None] * len(commands), {}, list(enumerate(commands))[::-1]
        while todo or running:
            for number in (0, 1):
                if todo and number not in running:
                    place, argv = todo.pop()
                    job = Job(self._cwd(), argv)
                    self.pipes[number].send(job)
                    running[number] = place, job, time.monotonic() + limit
            first = min(deadline for _, _, deadline in running.values())
            wait([self.pipes[n] for n in running], max(0.0, first - time.monotonic()))
            for number, (place, job, deadline) in list(running.items()):
                if self.pipes[number].poll() or time.monotonic() >= deadline:
                    answer = self._answer(number, job, deadline)
                    results[place] = self._result(job.cwd, [answer])
                    del running[number]
        return results

    def together(self, argv, limit=LIMIT, faults=("", "")):
        """The result of a run of two ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cwd = self._cwd()
        jobs = [Job(cwd, argv, rank, 2, port, faults[rank]) for rank in (0, 1)]
        for pipe, job in zip(self.pipes, jobs, strict=True):
            pipe.send(job)
        deadline = time.monotonic() + limit
        return self._result(cwd, [self._answer(n, job, deadline) for n, job in enumerate(jobs)])

    def _result(self, cwd, answers):
        codes, errors = zip(*answers, strict=True)
        paths = sorted(str(p.relative_to(cwd)) for p in Path(cwd).rglob("*"))
        found = list(Path(cwd).rglob("metrics.jsonl"))
        metrics = read_metrics(found[0].parent) if len(found) == 1 else None
        shutil.rmtree(cwd)
        return Result(list(codes), list(errors), paths, metrics)


# Judging -------------------------------------------------------------------------------------


def faults_of(result, case) -> list[str]:
    """What is wrong with how a case ended, a line each."""
    if None in result.codes:
        stuck = [rank for rank, code in enumerate(result.codes) if code is None]
        return [f"ranks {stuck} hung:\n{result.errors[stuck[0]][-3000:]}"]
    codes = set(result.codes)
    if codes == {0}:
        return _faults_of_a_finished_run(result, case)
    if codes == {2}:
        return _faults_of_a_refusal(result)
    return [f"exit codes {result.codes}: {_tail(result.errors)}"]


def _tail(errors):
    return " / ".join(text[-700:] for text in errors)


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
    every, keep = int(case.flags.get("save-every", 50)), int(case.flags.get("keep", 2))
    saved = [s for s in range(1, steps + 1) if s == steps or every and s % every == 0]
    if int(case.flags.get("demos", 0)):
        saved = [0, *saved]  # behind the supervised steps
    wanted = [f"step-{s:08d}" for s in saved[-keep:]]
    held = [path.rpartition("/")[2] for path in result.files]
    steps_held = [name for name in held if name.startswith("step-")]
    if steps_held != wanted and not skipped:  # none is saved while steps are being skipped
        found.append(f"checkpoints are not {wanted}: {held}")
    if any(name.endswith(".tmp") for name in held):
        found.append(f"something unfinished is left: {held}")
    return found


def _faults_of_a_refusal(result):
    found, texts = [], []
    if len(set(result.errors)) == 1 and re.fullmatch(NO_NUMBER, result.errors[0]):
        return [f"wrote {result.files[:4]}"] if result.files else []
    for rank, text in enumerate(result.errors):
        lines = [x for x in text.splitlines() if not re.fullmatch(SKIPPED, x)]
        start = f"rank {rank}: error: "
        if len(lines) != 1 or not lines[0].startswith(start):
            return [f"rank {rank} wrote, instead of one line with its error: {text[-1500:]}"]
        texts.append(lines[0].removeprefix(start))
    if len(set(texts)) > 1:
        found.append(f"ranks give different reasons: {texts}")
    if result.files and not any(re.search(late, texts[0]) for late in LATE):
        found.append(f"refused ({texts[0]}), but wrote {result.files[:4]}")
    return found


def difference_of(result, truth):
    """None if both have the same metrics, else what differs."""
    try:
        worst = largest_difference(result.metrics, truth.metrics)
    except (AssertionError, ValueError) as error:
        return f"not the metrics of one process: {error}"
    return None if worst < SLACK else f"metrics are {worst:.1e} off those of one process"


def plain(case):
    """The flags of the same run in one process, without plan, tree and recomputation."""
    return {name: value for name, value in case.flags.items() if name not in ONE_PROCESS}


def comparable(case):
    exact = case.flags.get("generator-dtype", "float64") == "float64"
    return case.tame and exact and case.flags["dtype"] == "float64"


def run_cases(cases, workers):
    """[(case, how it ended, its faults, whether it was compared)]."""
    if len(cases) > BATCH:
        parts = [cases[n : n + BATCH] for n in range(0, len(cases), BATCH)]
        return [judged for part in parts for judged in run_cases(part, workers)]
    if workers.count > BATCH:
        workers.renew()
    alone = [case for case in cases if case.world == 1]
    ended = workers.alone([case.argv for case in alone])
    results = {case.number: result for case, result in zip(alone, ended, strict=True)}
    for case in cases:
        if case.world == 2:
            results[case.number] = workers.together(case.argv)

    # The truth of each run that finished and can be compared: one process, without the rest.
    to_compare = [
        case for case in cases
        if comparable(case) and set(results[case.number].codes) == {0}
        and (case.world == 2 or plain(case) != case.flags)
    ]  # fmt: skip
    ended = workers.alone([argv_of(plain(case)) for case in to_compare])
    truths = {case.number: truth for case, truth in zip(to_compare, ended, strict=True)}

    judged = []
    for case in cases:
        result, found = results[case.number], faults_of(results[case.number], case)
        if case.number in truths and not found:
            truth = truths[case.number]
            differs = difference_of(result, truth)
            if set(truth.codes) != {0}:
                differs = f"one process without a plan fails: {_tail(truth.errors)}"
            found += [differs] if differs else []
        ended = "finished" if set(result.codes) == {0} else "refused"
        judged.append((case, ended, found, case.number in truths))
    return judged


def summary(judged):
    ended = [how for _, how, _, _ in judged]
    compared = sum(compared for *_, compared in judged)
    return (f"{len(judged)} combinations: {ended.count('finished')} finished, "
            f"{ended.count('refused')} refused, {compared} compared with one process")  # fmt: skip


def report(judged):
    lines = [summary(judged)]
    for case, _, found, _ in judged:
        if found:
            lines.append(f"\n#{case.number}  {case.command}")
            lines += [f"    {fault}" for fault in found]
    return "\n".join(lines)


# Tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models_of(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    with Workers(tmp_path_factory.mktemp("flags")) as started:
        yield started


@pytest.mark.parametrize("count", shortened([9, 1000], 9))
def test_random_flags_finish_or_are_refused_by_all_ranks_alike(workers, models_of, count):
    seed = int(os.environ.get("FLAGS_SEED", "0"))
    judged = run_cases([draw(seed, number, models_of) for number in range(count)], workers)
    assert not any(found for _, _, found, _ in judged), report(judged)
    # Neither all refused nor all plain: else nothing was tried.
    ended = [how for _, how, _, _ in judged]
    compared = sum(compared for *_, compared in judged)
    assert min(ended.count("finished"), 3 * ended.count("refused"), 3 * compared) >= count / 3


@pytest.mark.slow
def test_every_extreme_number_by_itself_finishes_or_is_refused(workers):
    judged = run_cases(extremes(), workers)
    assert not any(found for _, _, found, _ in judged), report(judged)


def test_a_combination_is_a_function_of_its_seed_and_number(models_of):
    assert draw(5, 17, models_of) == draw(5, 17, models_of) != draw(6, 17, models_of)


LINE = {"step": 0, "loss/token_mean": 0.5, "reward/mean": 0.25, "updates/skipped": 0}
FILES = ["run", "run/metrics.jsonl", "run/step-00000001"]
GOOD = Result([0, 0], ["", ""], FILES, [LINE])
NO = "error: --steps must be positive, got 0\n"
REFUSED = Result([2, 2], [f"rank 0: {NO}", f"rank 1: {NO}"], [], None)
WRONG = {
    "hung": (GOOD._replace(codes=[0, None]), r"ranks \[1\] hung"),
    "codes differ": (GOOD._replace(codes=[0, 2]), "exit codes"),
    "a traceback": (REFUSED._replace(codes=["traceback"] * 2), "exit codes"),
    "no metrics": (GOOD._replace(metrics=None), "without one metrics.jsonl"),
    "a step is missing": (GOOD._replace(metrics=[]), "lines of steps"),
    "no number": (GOOD._replace(metrics=[LINE | {"loss/token_mean": None}]), "not finite"),
    "too many kept": (GOOD._replace(files=[*FILES, "run/step-00000002"]), "checkpoints are not"),
    "unfinished": (GOOD._replace(files=[*FILES, "run/a.tmp"]), "something unfinished"),
    "two lines": (REFUSED._replace(errors=[f"warning\nrank 0: {NO}"] * 2), "instead of one line"),
    "no line": (REFUSED._replace(errors=["", ""]), "instead of one line"),
    "two reasons": (REFUSED._replace(errors=[f"rank 0: {NO}", "rank 1: error: x"]), "reasons"),
    "written": (REFUSED._replace(files=["runs/guess-0"]), "but wrote"),
}  # fmt: skip


def test_what_is_right_has_no_fault():
    case = Case(0, 2, {"steps": 1}, True)
    assert not faults_of(GOOD, case) and not faults_of(REFUSED, case)
    assert difference_of(GOOD, GOOD) is None


@pytest.mark.parametrize("name", WRONG)
def test_each_way_to_fail_is_seen(name):
    result, says = WRONG[name]
    (fault,) = faults_of(result, Case(0, 2, {"steps": 1}, True))
    assert re.search(says, fault)


@pytest.mark.parametrize(
    "change", [{"loss/token_mean": 0.5 + 1e-7}, {"reward/mean": 0.2500001}, {"more": 1.0}]
)
def test_other_metrics_are_seen(change):
    assert difference_of(GOOD, GOOD._replace(metrics=[LINE | change])) is not None


def test_a_rank_that_hangs_is_told_and_the_next_run_is_good(workers, models_of):
    argv = "--device cpu --steps 1 --lr-warmup 0 --prompts 2 --group 2 --size 3 --turns 1".split()
    argv += "--layers 1 --hidden 8 --heads 2 --minibatches 1 --eval-prompts 1 --timeout 20".split()
    case = Case(0, 2, {"steps": 1}, True)
    (fault,) = faults_of(workers.together(argv, limit=3, faults=("", "hangs")), case)
    assert "hung" in fault
    assert not faults_of(workers.together(argv), case)


# As a script ---------------------------------------------------------------------------------


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--extremes", action="store_true", help="each by itself, no draws")
    parser.add_argument("--only", type=int, nargs="*", help="numbers; default: all of --count")
    options = parser.parse_args(argv)
    started, drawn = time.monotonic(), options.only or range(options.count)
    folder = Path(tempfile.mkdtemp(prefix="flags-"))
    models_of, judged, failures = make_models(folder), [], 0
    cases = [draw(options.seed, number, models_of) for number in drawn]
    if options.extremes:
        cases = extremes()
    with Workers(folder) as workers:
        for first in range(0, len(cases), BATCH):
            some = run_cases(cases[first : first + BATCH], workers)
            judged += some
            failures = sum(bool(found) for _, _, found, _ in judged)
            seconds = time.monotonic() - started
            print(f"{seconds:5.0f} s  {summary(judged)}, {failures} failed", flush=True)
            if any(found for _, _, found, _ in some):
                print(report(some), flush=True)
    print(f"{summary(judged)}, {failures} failed; seed {options.seed}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

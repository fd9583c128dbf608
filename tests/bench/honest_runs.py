"""Audit honest runs with random settings: an audit that calls one of them wrong is a false alarm.

    python tests/bench/honest_runs.py FOLDER 40        # 40 runs of 3 steps, each step audited
    python tests/bench/honest_runs.py FOLDER 40 --first 100    # other ones

Each run has settings drawn by its number: objective, advantage, KL, critic, precisions, trees,
factors, staleness and ranks. Prints the nearest row of each audit, the alarms, and the factor that
each precision would have needed: how far a row is off beyond its floor, in distances of the twin.
"""

import argparse
import collections
import contextlib
import io
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from full.__main__ import main as full_main
from full.audit.audit import audited
from full.run.build import one_process

TINY = "--size 3 --turns 3 --device cpu --layers 2 --hidden 16 --heads 4 --prompts 4 --group 4 "
TINY += "--lr-warmup 0 --eval-every 2 --eval-prompts 6 --save-every 1 --keep 9 --steps 3 "
TINY += "--log-rollouts all --seed {seed}"
CHOICES = [  # of each list one entry
    ["--lr 0.02", "--lr 0.003", "--lr 0.02 --weight-decay 0.1", "--lr 0.01 --lr-decay cosine"],
    ["", "--minibatches 1", "--minibatches 3"],
    ["", "--objective gspo --clip-low 0.01 --clip-high 0.02", "--objective sapo",
     "--objective gmpo --aggregation sequence_mean", "--objective dppo --clip-high 0.05",
     "--objective cispo --cispo-bound 1.05 --aggregation constant", "--objective reinforce",
     "--clip-low 0.02 --clip-high 0.02", "--dual-clip 1.5"],
    ["", "--advantage gae", "--advantage group_std",
     "--advantage leave_one_out", "--advantage batch_std", "--advantage none_batch",
     "--advantage group_mean", "--advantage gae --kl-coef 0.1 --kl-in reward --kl k1",
     "--forks 2 --fork-turns 1"],
    ["", "", "--kl-coef 0.1", "--kl-coef 0.05 --kl k1"],
    ["", "", "--compute-dtype bfloat16", "--dtype float64", "--generator-dtype bfloat16",
     "--dtype bfloat16"],
    ["", "", "--tree sparse", "--tree dta --chunk-tokens 9"],
    ["", "", "--staleness 1", "--proximal", "--proximal --importance-cap 1.01"],
    ["", "", "", "--lora-rank 2"],
    ["", "", "--dynamic-sampling 2", "--overlong filter --max-new-tokens 6",
     "--temperature 0.7", "--entropy-coef 0.1"],
]  # fmt: skip
RANKS = [*[""] * 21, "--plan d2", "--plan t2", "--plan c2"]


def made(folder, number):
    """Make run `number`. Return its flags, or None if these flags go against each other."""
    random = np.random.default_rng(number)
    flags = [TINY.format(seed=number), *(str(random.choice(some)) for some in CHOICES)]
    plan = str(random.choice(RANKS))
    line = " ".join([*filter(None, flags), plan])
    given = [*shlex.split(line), "--out", str(folder / f"run-{number}")]
    said = io.StringIO()
    if plan:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node", "2", "-m", "full"]  # fmt: skip
        done = subprocess.run([*start, *given], capture_output=True, text=True, check=False)
        code, text = done.returncode, done.stderr
    else:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = full_main(given)
        text = said.getvalue()
    if code:
        (folder / f"run-{number}.txt").write_text(line + "\n" + text, encoding="utf-8")
        return None
    return line.removeprefix(TINY.format(seed=number)).strip()


def precision_of(flags) -> str:
    """Return the flags of a run that are about precision and factors."""
    words = flags.split()
    names = ("--dtype", "--compute-dtype", "--generator-dtype", "--lora-rank")
    found = [f"{a[2:]} {b}" for a, b in zip(words, words[1:]) if a in names]
    return ", ".join(found) or "float32"


def needed(row) -> float:
    """Return the factor with which a row would just hold."""
    return max(0.0, row.difference - row.floor) / row.distance if row.distance else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    number, runs, audits, alarms = options.first, 0, 0, 0
    table = collections.defaultdict(list)  # precision -> (factor needed, outside, silent rows)
    while runs < options.runs:
        flags = made(options.folder, number)
        run = options.folder / f"run-{number}"
        for step in range(3) if flags is not None else ():
            with one_process("an audit"), contextlib.redirect_stderr(io.StringIO()):
                report = audited(run, step)
            factor, key = max((needed(row), row.key) for row in report.rows)
            outside = [row for row in report.rows if not row.ok]
            silent = sum(not row.is_informative for row in report.rows)
            table[precision_of(flags)].append((factor, bool(outside), silent, len(report.rows)))
            audits, alarms = audits + 1, alarms + bool(outside)
            print(f"{number} {flags}: step {step}, {key} needs {factor:.2f}; {silent} of "
                  f"{len(report.rows)} say nothing{'  OUTSIDE' if outside else ''}", flush=True)
            for row in outside:
                print(f"    {row}", flush=True)
        if flags is not None and not any(x[1] for x in table[precision_of(flags)][-3:]):
            shutil.rmtree(run)
        runs += flags is not None
        number += 1
    print(f"{runs} runs, {audits} audits, {alarms} false alarms")
    for name, found in sorted(table.items()):
        factors, outside, silent, rows = zip(*found)
        print(f"| {name} | {len(found)} | {np.quantile(factors, 0.95):.2f} | {max(factors):.2f} | "
              f"{sum(outside)} | {sum(silent) / sum(rows):.0%} |")  # fmt: skip


if __name__ == "__main__":
    main()

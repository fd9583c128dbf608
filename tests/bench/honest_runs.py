"""Audit honest runs with random settings: an audit that calls one of them wrong is a false alarm.

    python tests/bench/honest_runs.py FOLDER 40        # 40 runs of 3 steps, each step audited
    python tests/bench/honest_runs.py FOLDER 40 --first 100    # other ones

Each run has settings drawn by its number: objective, advantage, KL, critic, precisions, trees,
factors, staleness and ranks. Prints the nearest row of each audit, and the alarms.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from full.audit import audited
from full.export import one_process

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
RANKS = ["", "", "", "--plan d2", "--plan t2", "--plan c2"]


def made(folder, number):
    """Make run `number`. Return its flags, or None if these flags go against each other."""
    random = np.random.default_rng(number)
    flags = [TINY.format(seed=number), *(str(random.choice(some)) for some in CHOICES)]
    plan = str(random.choice(RANKS))
    start = [sys.executable, "-m", "full"]
    if plan:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node", "2", "-m", "full"]  # fmt: skip
    line = " ".join([*filter(None, flags), plan])
    given = [*shlex.split(line), "--out", str(folder / f"run-{number}")]
    done = subprocess.run([*start, *given], capture_output=True, text=True, check=False)
    if done.returncode:
        (folder / f"run-{number}.txt").write_text(line + "\n" + done.stderr, encoding="utf-8")
        return None
    return line.removeprefix(TINY.format(seed=number)).strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    number, runs, audits, alarms = options.first, 0, 0, 0
    while runs < options.runs:
        flags = made(options.folder, number)
        for step in range(3) if flags is not None else ():
            with one_process("an audit"):
                report = audited(options.folder / f"run-{number}", step)
            nearest = max(report.rows, key=lambda row: row.share)
            audits, alarms = audits + 1, alarms + (report.wrong is not None)
            print(f"{number} {flags}: step {step}, {nearest.key} {nearest.share:.2f}"
                  f"{'' if report.wrong is None else '  OUTSIDE'}", flush=True)  # fmt: skip
        runs += flags is not None
        number += 1
    print(f"{runs} runs, {audits} audits, {alarms} false alarms")


if __name__ == "__main__":
    main()

"""Learning curves of every objective on `guess`, with the default run's settings.

    python tests/bench/measure_objectives.py DIR 5           # seeds 0-4: makes runs that DIR lacks

A line of a table is printed for each objective: the mean of what the seeds solved in the end, the
least, and the step at whose evaluation each seed had solved 0.95.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from full.objectives import OBJECTIVES

TARGET = 0.95


def evaluations_of(folder, objective, seed) -> list:
    """Return a run's lines of metrics that have an evaluation. Make the run if it is not there."""
    out = Path(folder) / f"{objective}-{seed}"
    if not (out / "hf").exists():
        flags = f"--objective {objective} --seed {seed} --out {out} --resume"
        command = [sys.executable, "-m", "full", *flags.split()]
        command += ["--log-rollouts", "none", "--save-every", "0"]
        subprocess.run(command, cwd=ROOT, check=True)
    lines = map(json.loads, (out / "metrics.jsonl").open())
    return [line for line in lines if "eval/solved" in line]


def main(argv) -> int:
    folder, seeds = argv
    for objective in OBJECTIVES:
        runs = [evaluations_of(folder, objective, seed) for seed in range(int(seeds))]
        steps = [line["step"] + 1 for line in runs[0]]
        rows = np.array([[line["eval/solved"] for line in run] for run in runs])
        reached = [next((s for s, y in zip(steps, row) if y >= TARGET), None) for row in rows]
        shown = ", ".join(map(str, reached))
        print(f"| {objective} | {rows[:, -1].mean():.3f} | {rows[:, -1].min():.3f} | {shown} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

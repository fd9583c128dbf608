"""Audit honest runs with random settings: an audit that calls one of them wrong is a false alarm.

    python tests/bench/honest_runs.py FOLDER 40        # 40 runs of 3 steps, each step audited
    python tests/bench/honest_runs.py FOLDER 40        # 40 other ones; the table has 80

Each run has settings drawn by its number: objective, advantage, KL, critic, model, precisions,
trees, factors, staleness and ranks. Prints the nearest row of each audit, the alarms, and the
factor that each precision would have needed: how far a row is off beyond its floor, in distances of
the twin. FOLDER/audits.jsonl has all audits so far, and the table is of all of them.
"""

import argparse
import collections
import contextlib
import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import ROOT, print_table

from full.audit.audit import audited
from full.model.hf import save_hf
from full.run.build import one_process
from full.tiny import tiny_model

TINY = "--size 3 --turns 3 --device cpu --prompts 4 --group 4 "
TINY += "--lr-warmup 0 --eval-every 2 --eval-prompts 6 --save-every 1 --keep 9 --steps 3 "
TINY += "--log-rollouts all --seed {seed}"
OWN = "--layers 2 --hidden 16 --heads 4"
FAMILIES = ("qwen3_5_text", "gemma3_text", "qwen3_moe")  # a hybrid, windows, experts
CHOICES = [  # of each list one entry
    [*[OWN] * 6, "--model {folder}/qwen3_5_text", "--model {folder}/qwen3_5_text",
     "--model {folder}/gemma3_text", "--model {folder}/qwen3_moe --router-bias-rate 0.05"],
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
     "--dtype bfloat16", "--dtype bfloat16 --lora-rank 2",
     "--compute-dtype bfloat16 --lora-rank 2"],
    ["", "", "--tree sparse", "--tree dta --chunk-tokens 9"],
    ["", "", "--staleness 1", "--proximal", "--proximal --importance-cap 1.01"],
    ["", "", "", "--lora-rank 2"],
    ["", "", "--dynamic-sampling 2", "--overlong filter --max-new-tokens 6",
     "--temperature 0.7", "--entropy-coef 0.1"],
]  # fmt: skip
RANKS = [*[""] * 21, "--plan d2", "--plan t2", "--plan c2"]


def make_models(folder):
    """Write a tiny checkpoint of each family, with the vocabulary of `guess`."""
    for name in FAMILIES:
        if not (folder / name).exists():
            save_hf(tiny_model(name, vocab_size=7, eos_token_id=(6,)), folder / name)


def made(folder, number):
    """Make run `number`. Return its flags, or None if these flags go against each other."""
    random = np.random.default_rng(number)
    drawn = [str(random.choice(some)) for some in CHOICES]
    plan = str(random.choice(RANKS))
    words = " ".join(dict.fromkeys(filter(None, [*drawn, plan])))
    line = f"{TINY.format(seed=number)} {words.format(folder=folder)}"
    given = [*shlex.split(line), "--out", str(folder / f"run-{number}")]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if plan else []
    command = [sys.executable, *start, "-m", "full", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          cwd=ROOT) as process:  # fmt: skip
        try:
            text, _ = process.communicate()
        finally:
            process.terminate()  # if this process was told to stop; the launcher tells its ranks
    if process.returncode:
        (folder / f"run-{number}.txt").write_text(line + "\n" + text, encoding="utf-8")
    return None if process.returncode else words.format(folder="")


def needed(row) -> float:
    """Return the factor with which a row would just hold."""
    return max(0.0, row.difference - row.floor) / row.distance if row.distance else 0.0


def audit_all(folder, number) -> list:
    """Make a run and audit its steps. Return a dict for each audit, or one without a factor."""
    flags = made(folder, number)
    run, found = folder / f"run-{number}", []
    for step in range(3) if flags is not None else ():
        with one_process("an audit"), contextlib.redirect_stderr(io.StringIO()):
            report = audited(run, step)
        factor, key = max((needed(row), row.key) for row in report.rows)
        outside = [f"{row}" for row in report.rows if not row.ok]
        silent = sum(not row.is_informative for row in report.rows)
        found.append(dict(number=number, flags=flags, step=step, factor=factor, key=key,
                          outside=outside, silent=silent, rows=len(report.rows)))  # fmt: skip
        print(f"{number} {flags}: step {step}, {key} needs {factor:.2f}; {silent} of "
              f"{len(report.rows)} say nothing", *outside, sep="\n    ", flush=True)  # fmt: skip
    if not any(audit["outside"] for audit in found):
        shutil.rmtree(run, ignore_errors=True)
    return found or [dict(number=number)]


def rows_of(audits):
    """Yield a row for each precision."""
    kinds = collections.defaultdict(list)
    for audit in audits:
        found = re.search(r"[a-z-]*dtype \w+", audit["flags"])
        kinds[found[0].strip("-") if found else "float32"].append(audit)
    for kind, some in sorted(kinds.items()):
        factors = [x["factor"] for x in some]
        silent = sum(x["silent"] for x in some) / sum(x["rows"] for x in some)
        yield {"precision": kind, "audits": len(some), "needs, median": f"{np.median(factors):.1f}",
               "needs, at most": f"{max(factors):.1f}",
               "false alarms": sum(bool(x["outside"]) for x in some),
               "rows that say nothing": f"{silent:.0%}"}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder)
    path = folder / "audits.jsonl"
    audits = [json.loads(line) for line in path.open()] if path.exists() else []
    number = max([options.first, *(audit["number"] + 1 for audit in audits)])
    left = options.runs
    while left:
        found = audit_all(folder, number)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(audit) + "\n" for audit in found)
        left, number, audits = left - ("factor" in found[0]), number + 1, audits + found
    done = [audit for audit in audits if "factor" in audit]
    print_table(rows_of(done))
    print(f"{len({x['number'] for x in done})} runs, {len(done)} audits, "
          f"{sum(bool(x['outside']) for x in done)} false alarms")  # fmt: skip


if __name__ == "__main__":
    main()

"""Curves: adds a picture to `train_grpo.Log`, of what runs wrote to metrics.jsonl."""

import argparse
from pathlib import Path

import numpy as np

from full.run.directory import RunDirectory
from full.run.logs import COLUMNS

# The least upper end of the axis of each panel.
LEAST = dict(reward=0.1, solved=0.1, entropy=0.1, gap=1e-6, norm=1e-2)


def plot(argv) -> int:
    """Draw rewards, solved prompts, entropy, the log-prob gap and the gradient's norm by step.

    Writes curve.png into the first run's directory.
    """
    parser = argparse.ArgumentParser("python -m full plot", description=plot.__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="directory of a run")
    runs = [Path(run) for run in parser.parse_args(argv).runs]
    for run in runs:
        if not (run / "metrics.jsonl").exists():
            raise ValueError(f"{run} holds no metrics.jsonl; give the directory of a run")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panels = figure.subplot_mosaic([["reward", "solved", "solved"], ["entropy", "gap", "norm"]])
    dots = {}  # (step, solved) -> numbers of the runs that have this evaluation
    for n, run in enumerate(runs):
        lines = RunDirectory(run).lines(RunDirectory.METRICS)
        for name, axes in panels.items():
            points = [(x["step"] + 1, x[COLUMNS[name]]) for x in lines if COLUMNS[name] in x]
            columns = np.array(points, dtype=float).reshape(-1, 2).T  # there may be no point
            axes.plot(*columns, f"C{n}.-", lw=0.8, markersize=1.5, label=run.name)

        # What a step leaves is drawn after it, and what was solved before the first step at 0.
        found = [(0, x["eval/solved_before"]) for x in lines if "eval/solved_before" in x]
        found += [(x["step"] + 1, x["eval/solved"]) for x in lines if "eval/solved" in x]
        for dot in found:
            dots.setdefault(dot, []).append(n)
    draw_dots(panels["solved"], dots)

    # An axis reaches from 0 to the largest value, so a curve of small rewards is not flat. Negative
    # rewards extend it. It reaches at least to LEAST, because smaller values are mostly noise.
    for name, axes in panels.items():
        axes.update_datalim([(0, 0), (0, LEAST[name])])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.set_title(COLUMNS[name], fontsize="medium")
    panels["solved"].set_title("line: reward/solved   dots: eval/solved", fontsize="medium")

    # Some steps have a hundred times the norm or the gap of others, and with --exact a gap is 0.
    for name in ("gap", "norm"):
        panels[name].set_yscale("symlog", linthresh=LEAST[name] / 10)
    figure.supxlabel("step", fontsize="medium")
    labels = panels["reward"].get_legend_handles_labels()
    figure.legend(*labels, loc="outside upper center", ncols=min(5, len(runs)), frameon=False)
    figure.savefig(runs[0] / "curve.png", dpi=150)
    print(f"wrote {runs[0] / 'curve.png'}")
    return 0


def draw_dots(axes, dots):
    """Draw a dot for each run that has it: equal dots of several runs stand side by side."""
    from matplotlib.transforms import ScaledTranslation

    size = 3.5  # points; an inch has 72
    for (x, y), runs in dots.items():
        for place, n in enumerate(runs):
            # The shift is in inches, not in steps. It comes after plot, which sets the limits.
            (dot,) = axes.plot([x], [y], f"C{n}o", markersize=size)
            inches = size / 72 * (place - (len(runs) - 1) / 2)
            shift = ScaledTranslation(inches, 0, axes.figure.dpi_scale_trans)
            dot.set_transform(axes.transData + shift)

"""What the benches share: ways that are compared take turns, and rows are printed as a table.

Seconds are this process's CPU time, and on CUDA those of the wall between two times at which the
device is idle. A ratio of two ways is the median over pairs of neighbors.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from oracles import LiveBytes


def seconds_of(function, device="cpu"):
    """Return the seconds of a call."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    idle = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    idle()
    start = clock()
    function()
    idle()
    return clock() - start


def alternating(ways, repeats, device="cpu"):
    """Return {way: its seconds}: the ways take turns, forwards and backwards, after a warm-up."""
    for run in ways.values():
        run()
    found = {way: [] for way in ways}
    for n in range(repeats):
        for way in [*ways][:: -1 if n % 2 else 1]:
            found[way].append(seconds_of(ways[way], device))
    return found


def times_as_fast(slow, fast) -> dict:
    """Return the median of the ratios of pairs, the least and the largest."""
    pairs = sorted(a / b for a, b in zip(slow, fast, strict=True))
    return dict(times=statistics.median(pairs), low=pairs[0], high=pairs[-1])


def peak_mb(function, device="cpu"):
    """Return MB of the tensors that are made inside and live at once, at most."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with LiveBytes() as live:
        function()
    return live.peak / 2**20


def print_table(rows) -> list:
    """Print rows, dicts, as Markdown, each when it is there. Return their list.

    The names of the columns precede the first row, and each row that has others.
    """
    done = []
    for row in rows:
        if not done or [*row] != [*done[-1]]:
            print_line(row)
            print("|" + "---|" * len(row))
        print_line(map(cell, row.values()))
        done.append(row)
    return done


def print_line(cells):
    print("|", " | ".join(cells), "|", flush=True)


def cell(x) -> str:
    """Return a text as it is, and a number with three digits."""
    return f"{float(f'{x:.3g}'):g}" if isinstance(x, float) else f"{x}"

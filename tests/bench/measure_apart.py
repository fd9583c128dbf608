"""Who works and who waits, with generators on ranks of their own.

    python tests/bench/measure_apart.py trace                # pictures of five steps of d1+d1
    python tests/bench/measure_apart.py race [--rounds 5]    # wall time: staleness 1, 0, and d2

Two processes of one thread. The settings are such that sampling a batch and training on it cost
about the same, of which `race` prints both. `trace` writes down when each process begins and ends
what it does; clocks are those of one machine.
"""

import argparse
import contextlib
import json
import pkgutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import ring_attention  # noqa: E402
import train_grpo  # noqa: E402
from measure_grpo import leave_launch  # noqa: E402

WIDTH = 96  # columns of the picture
FLAGS = "--device cpu --eval-every 2 --eval-prompts 70 --lr-warmup 0 --prompts 16 --minibatches 1 "
FLAGS += "--entropy-coef 0.02 --log-rollouts none --save-every 0 --hidden 128 --overwrite"

# What is watched: function, the letter in the picture, and the words of its legend. What stands
# further up is drawn over what is below it: a push is inside of an update.
WATCHED = {
    "parallel.Side.wait": (".", "waits"),
    "train_grpo.ApartTrainer.push_weights": ("p", "sends weights"),
    "train_grpo.collect": ("s", "samples a batch"),
    "train_grpo.evaluate": ("e", "evaluates"),
    "train_grpo.Trainer.prepare": ("T", "trains"),
    "train_grpo.Trainer.forward_backward": ("T", "trains"),
    "train_grpo.Trainer.optim_step": ("T", "trains"),
}
LEGEND = dict(WATCHED.values())


def watch(events):
    """Let the functions of WATCHED append (letter, begin, end) to events."""
    for path, (letter, _) in WATCHED.items():
        owner, _, name = path.rpartition(".")
        owner = pkgutil.resolve_name(owner)

        def watched(*args, original=getattr(owner, name), letter=letter, **how):
            start = time.time()
            try:
                return original(*args, **how)
            finally:
                # The thread that receives weights waits too, and is not what is drawn.
                if threading.current_thread() is threading.main_thread():
                    events.append((letter, start, time.time()))

        setattr(owner, name, watched)


def one_rank(port, flags, watching):
    """A process of a run: which side it was on, and its events."""
    leave_launch(port)
    events = []
    if watching:
        watch(events)
    config = train_grpo.parse_config(flags.split()).check()
    with contextlib.redirect_stdout(None), train_grpo.joined(config) as (device, side):
        train_grpo.start_run(config, device, side)
    return side.name if side else "", events


def run(flags, watching=False):
    """A run on two ranks: what `one_rank` returned of each, and the lines of metrics.jsonl."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{FLAGS} --out {folder}/run {flags}"
        ranks = ring_attention.launch(2, one_rank, port, flags, watching)
        with open(f"{folder}/run/metrics.jsonl") as file:
            return ranks, [json.loads(line) for line in file]


def picture(events, first, last) -> str:
    """A line of letters: what a process did in each of WIDTH equal parts of first .. last."""
    step = (last - first) / WIDTH
    line = ""
    for n in range(WIDTH):
        start = first + n * step
        spent = dict.fromkeys(LEGEND, 0.0)
        for letter, begin, end in events:
            spent[letter] += max(0.0, min(end, start + step) - max(begin, start))
        # What takes half of a part stands there.
        line += next((letter for letter in LEGEND if spent[letter] > step / 2), " ")
    return line


def trace(staleness, steps=5) -> str:
    """The picture of so many steps in the middle of a run of d1+d1."""
    flags = f"--plan d1+d1 --staleness {staleness} --steps {steps + 6}"
    sides = dict(run(flags, watching=True)[0])

    # The picture begins where the trainer begins the third step, and ends `steps` later; the first
    # push is the one before step 0.
    pushes = sorted(end for letter, _, end in sides["trainer"] if letter == "p")
    first = pushes[3]
    last = pushes[3 + steps]
    text = f"d1+d1 --staleness {staleness}: {steps} steps in {last - first:.2f} seconds\n"
    for name in sorted(sides):
        text += f"{name:10}{picture(sides[name], first, last)}\n"
    marks = {round((end - first) / (last - first) * WIDTH) for end in pushes if first < end < last}
    ends = "".join("|" if n in marks else " " for n in range(WIDTH))
    legend = ", ".join(f"{letter} {words}" for letter, words in LEGEND.items())
    return f"{text}{'':10}{ends.rstrip()}\n{'':10}{legend}; | a push has ended"


RACERS = {  # name -> flags
    "d1+d1 --staleness 1": "--plan d1+d1 --staleness 1",
    "d1+d1 --staleness 0": "--plan d1+d1 --staleness 0",
    "d2 --staleness 0": "--plan d2",
}


def race(rounds, steps, flags="") -> dict:
    """Seconds of a step of each racer, a list of one for each round; in alternating order."""
    found = {name: [] for name in RACERS}
    costs = []
    for n in range(rounds):
        for name in list(RACERS)[:: 1 if n % 2 else -1]:
            _, lines = run(f"{RACERS[name]} --steps {steps} --eval-every 1000000 {flags}")
            # The first steps warm up, and after the last one there is an evaluation.
            middle = lines[2:-1]
            found[name].append(statistics.fmean(line["seconds/total"] for line in middle))
            if name.endswith("+d1 --staleness 0"):
                pairs = [(x["seconds/rollout"], x["seconds/train"]) for x in middle]
                costs.append([statistics.fmean(x) for x in zip(*pairs, strict=True)])
    sampled, trained = (statistics.median(x) for x in zip(*costs, strict=True))
    print(f"sampling a batch {sampled:.3f} s, training on it {trained:.3f} s, by one rank")
    return found


def main(argv) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("trace", "race"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--more", default="", help="more flags of the race's runs")
    options = parser.parse_args(argv)
    if options.what == "trace":
        for K in (0, 1):
            print(trace(K), flush=True)
        return 0

    found = race(options.rounds, options.steps, options.more)
    base = found["d1+d1 --staleness 0"]
    for name, seconds in found.items():
        gains = sorted(b / a for a, b in zip(seconds, base, strict=True))
        middle = statistics.median(gains)
        print(f"{name:22} {statistics.median(seconds):.3f} s a step, {middle:.2f} times as fast "
              f"({gains[0]:.2f} - {gains[-1]:.2f}) as d1+d1 with 0")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

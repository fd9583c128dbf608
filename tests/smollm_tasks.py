"""Two text tasks for SmolLM2-135M-Instruct and their rewards: sums, and words in reverse order.

    python tests/smollm_tasks.py FOLDER            # writes FOLDER/sums.jsonl and FOLDER/words.jsonl
    python tests/smollm_tasks.py RUN [RUN ..] FILE.png   # draws runs of both (needs matplotlib)
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

WORDS = """
    river table green music apple horse paper stone cloud bread light chair water mouse house night
    plant tiger candle garden school winter summer forest silver orange bridge doctor farmer window
    ocean mountain island desert morning evening teacher sailor baker king letter clock mirror train
    village market city castle kitchen library museum road harbor holiday journey secret story song
    game dream flower grass sand gold glass wood iron cave pencil door lamp piano drum camera shoe
    beach lion bird fish bear snow rain wind fire smile
"""


def sums():
    """Return the lines of sums.jsonl: 600 of the 820 sums of two numbers from 1 to 40."""
    rng = np.random.default_rng(0)
    pairs = [(a, b) for a in range(1, 41) for b in range(a, 41)]
    lines = []
    for n in rng.permutation(len(pairs))[:600]:
        # Each pair comes in one order only, so that no held-out sum is learned as b + a.
        a, b = rng.permutation(pairs[n]).tolist()
        lines.append(dict(question=f"What is {a} + {b}?", answer=f"{a + b}"))
    return lines


def words():
    """Return the lines of words.jsonl: 600 times three different words."""
    rng, lines = np.random.default_rng(1), []
    for _ in range(600):
        three = rng.choice(WORDS.split(), size=3, replace=False).tolist()
        question = f"Write these words in reverse order: {', '.join(three)}"
        lines.append(dict(question=question, answer=", ".join(three[::-1])))
    return lines


def last_number(text, row):
    """Reward 1 if the last number of an answer is the sum: `12 + 7 = 19.` of 19."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == row["answer"])


def reversed_words(text, row):
    """Reward 1 for the three words in reverse order, and 0.2 for each word in its place.

    For apple, river: 1 for "Apple, river.", 0.2 for "The words: apple, river" and its third word.
    """
    # Without a part of the reward, a policy that answers in sentences would seldom see any.
    found = re.findall(r"[a-z]+", text.lower())
    wanted = re.findall(r"[a-z]+", row["answer"])
    return 1.0 if found == wanted else 0.2 * sum(a == b for a, b in zip(found, wanted))


def draw(runs, picture):
    """Draw what runs solve, a panel for each file of data, and print a line for each run."""
    from matplotlib.figure import Figure

    read = [json.loads((Path(run) / "config.json").read_text()) for run in runs]
    names = [*dict.fromkeys(Path(config["data"]).stem for config in read)]
    figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
    panels = dict(zip(names, figure.subplots(1, len(names), squeeze=False)[0]))
    for run, config in zip(runs, read):
        lines = [json.loads(x) for x in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        axes, color = panels[Path(config["data"]).stem], f"C{config['seed']}"

        # A line is what the rollouts of a step solve, a dot greedy decoding of held-out prompts.
        sampled = [line["reward/solved"] for line in lines]
        dots = [(0, line["eval/solved_before"]) for line in lines if "eval/solved_before" in line]
        dots += [(line["step"] + 1, line["eval/solved"]) for line in lines if "eval/solved" in line]
        axes.plot([line["step"] + 1 for line in lines], sampled, color, lw=1, alpha=0.6)
        axes.plot(*zip(*dots), f"{color}o", markersize=5, label=f"seed {config['seed']}")
        greedy = ", ".join(f"{solved:.3f} after {step}" for step, solved in dots)
        print(f"{run}: greedy {greedy}; sampled {sampled[0]:.2f} to {sampled[-1]:.2f}")
    for name, axes in panels.items():
        axes.set(xlabel="step", title=f"{name}: dots greedy, lines sampled", ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=110)


def main(argv) -> int:
    """Write both files, or draw runs."""
    if len(argv) > 1 and argv[-1].endswith(".png"):
        draw(argv[:-1], argv[-1])
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python tests/smollm_tasks.py FOLDER | RUN [RUN ..] FILE.png", file=sys.stderr)
        return 2
    for name, lines in dict(sums=sums(), words=words()).items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (Path(argv[0]) / f"{name}.jsonl").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

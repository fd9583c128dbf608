"""Two text tasks for SmolLM2-135M-Instruct and their rewards: sums, and words in reverse order.

    python tests/smollm_tasks.py FOLDER   # writes FOLDER/sums.jsonl and FOLDER/words.jsonl
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


def main(argv) -> int:
    """Write both files."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python tests/smollm_tasks.py FOLDER", file=sys.stderr)
        return 2
    for name, lines in dict(sums=sums(), words=words()).items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (Path(argv[0]) / f"{name}.jsonl").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

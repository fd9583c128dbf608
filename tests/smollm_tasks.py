"""Two text tasks for SmolLM2-135M-Instruct and their rewards: sums, and answers of three words.

    python tests/smollm_tasks.py FOLDER            # writes FOLDER/sums.jsonl and FOLDER/words.jsonl
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

WAYS = (
    "Describe {} in exactly three words.", "Say three words about {}.",
    "What is {} like? Answer in three words.",
)  # fmt: skip
TOPICS = """
    a river, the sea, a mountain, the desert, a forest, an island, the moon, the sun, a star
    fire, winter, spring, summer, autumn, rain, snow, the wind, a storm, the night
    the morning, ice, fog, a cat, a dog, a horse, a bird, a fish, a lion, an elephant
    a mouse, a bee, a wolf, an owl, a frog, bread, an apple, coffee, tea, chocolate, honey
    soup, cheese, a cake, an orange, milk, salt, rice, a teacher, a doctor, a farmer
    a child, a friend, a king, a sailor, an artist, a poet, a baker, a book, a letter
    a clock, a mirror, a candle, a bridge, a house, a garden, a train, a ship, music, love
    time, silence, hope, a dream, a city, a village, a school, a market, peace, war, a tree
    a flower, grass, a stone, sand, gold, glass, paper, wood, iron, a cloud, the sky, a cave
    a pencil, a table, a chair, a window, a door, a lamp, a piano, a violin, a drum
    a camera, a shoe, a beach, a castle, a library, a hospital, a kitchen, a farm, a museum
    a park, a road, a harbor, football, chess, a holiday, a birthday, a wedding, a journey
    a secret, a story, a song, a game, fear, anger, joy, courage, wisdom, youth, memory
    truth, luck, work, sleep, hunger, a smile
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
    """Return the lines of words.jsonl: each topic in each of three ways to ask."""
    topics = re.split(r"[,\n] *", TOPICS.strip())
    return [dict(question=way.format(topic)) for topic in topics for way in WAYS]


def last_number(text, row):
    """Reward 1 if the last number of an answer is the sum: `12 + 7 = 19.` of 19."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == row["answer"])


def three_words(text, row):
    """Reward 1 for an answer of exactly three different words; the words are not judged.

    Another number of words has 0.6 less 0.2 for each word that is missing or too much.
    """
    # Without a part of the reward, a policy that says whole sentences would seldom see any.
    found = [word.strip(".,;:!?\"'").lower() for word in text.split()]
    plain = all(re.fullmatch(r"[a-z][a-z'-]*", word) for word in found)
    if not plain or len({*found}) < len(found):
        return 0.0
    away = abs(len(found) - 3)
    return 1.0 if away == 0 else max(0.0, 0.6 - 0.2 * away)


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

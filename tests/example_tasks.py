"""Two tasks to read, to run, and to begin a task of your own from: in one turn, and with a tool.

    python -m full --task tests/example_tasks.py:Sort --steps 250
    python -m full --task tests/example_tasks.py:Lookup --size 5 --advantage group_std

Both pay a part of the reward for a part of the answer, so that random weights earn something.
`Task` in full/run/tasks.py says what a task must have. The tokens of both are named by `Symbols`.
"""

import numpy as np

from full.run.tasks import Task, is_held_out
from train_grpo import deal


class Symbols(Task):
    """A task over a few named symbols. The last one ends a turn."""

    threads = False  # replies are arithmetic: a thread would cost more than the reply

    def __init__(self, names):
        self.names = names
        self.vocab_size = len(names)
        self.end = (len(names) - 1,)

    def show(self, tokens):
        return " ".join(self.names[t] if t < len(self.names) else f"<{t}>" for t in tokens)


class Sort(Symbols):
    """Put `length` distinct symbols, of `--size` in all, in order, in one turn.

        s3 s0 s2 s1 ? s0 s1 s2 s3 .

    The reward is 1 for the right answer, and half the share of right places for a wrong answer of
    the right length.
    """

    length = 4  # of a prompt; a subclass may have another length

    def __init__(self, config):
        self.size = config.size
        super().__init__([f"s{n}" for n in range(self.size)] + ["?", "."])
        if self.length > self.size:
            raise ValueError(f"--size {self.size}: expected at least {self.length} symbols to sort")
        for held_out in (False, True):  # raises now, not at the first evaluation
            self.prompt(np.random.default_rng(0), 0, held_out)

    def prompt(self, rng, index, held_out):
        for _ in range(1000):
            items = rng.permutation(self.size)[: self.length].tolist()
            if is_held_out(repr(items).encode()) == held_out:
                return tuple(sorted(items)), items + [self.size]
        raise ValueError(f"--size {self.size}: too few prompts of {self.length} to hold some out")

    def reply(self, state, answer):
        if len(answer) != self.length + 1:
            return state, None, 0.0
        right = len([a for a, b in zip(answer, state) if a == b]) / self.length
        return state, None, 1.0 if right == 1 else 0.5 * right


class Lookup(Symbols):
    """Ask a table of `--size` keys for the value of one key, then answer with the value.

        ? k1 k1 . = v2 v2 .
             ----      ----
             asks      answers

    Each of the two answers earns 0.1 for its form and 0.4 for being right. The table is drawn anew
    for each prompt, so only asking finds the value. Keys and values are dealt from shuffled decks:
    where a batch has more of one key, asking for it blindly pays.
    """

    def __init__(self, config):
        self.size = config.size
        self.seed = config.seed
        keys = [f"k{n}" for n in range(self.size)]
        values = [f"v{n}" for n in range(self.size)]
        super().__init__([*keys, *values, "?", "=", "."])

    def prompt(self, rng, index, held_out):
        key = deal(self.seed, index, self.size)
        table = rng.integers(self.size, size=self.size)
        table[key] = deal(self.seed + 1, index, self.size)
        return (key, tuple(table.tolist()), None), [2 * self.size, key]

    def reply(self, state, answer):
        # `value` is None until the table has been asked; it is then what the second answer should
        # be. Tokens: keys 0 .. size - 1, values size .. 2 size - 1.
        key, table, value = state
        first = 0 if value is None else self.size
        if len(answer) != 2 or not first <= answer[0] < first + self.size:
            return state, None, 0.0
        if value is None:
            value = self.size + table[answer[0]]
            reward = 0.5 if answer[0] == key else 0.1
            return (key, table, value), [2 * self.size + 1, value], reward
        return state, None, 0.5 if answer[0] == value else 0.1

r"""Four tasks to read, to run, and to begin a task of your own from: in one turn, and with a tool.

    python -m full --task tests/example_tasks.py:Sort --steps 250
    python -m full --task tests/example_tasks.py:Lookup --size 5 --demos 20 \
        --advantage group_std --lr 3e-4 --entropy-coef 0.03
    python -m full --task tests/example_tasks.py:Calculator --demos 80 --steps 60
    python -m full --task tests/example_tasks.py:Addition --demos 80 --steps 60 \
        --temperature 0.6

`Sort` needs nothing but its reward. In the other three a policy with random weights never sees a
reward: no sum comes out right by chance, and no question to a table or call of the calculator is
well-formed. So these runs begin with demonstrations (`--demos`), supervised steps on what `demo`
writes, which stop while the policy is still often wrong. From there the reward does the rest. In
`Addition` the demonstrations are right, and the policy becomes more reliable. In `Lookup` they
teach the form alone. In `Calculator` they are often wrong, and the policy becomes better than they
are.

`Task` in train_grpo.py says what a task must have. The tokens of these four are named by `Symbols`.
"""

import numpy as np

from full.tasks import Task, is_held_out
from train_grpo import deal


def spell(number, count):
    """The last `count` decimal digits of a number, as tokens: a digit's token is the digit."""
    return [int(digit) for digit in str(number).zfill(count)[-count:]]


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
    where a batch has more of one key, asking for it blindly pays. Demonstrations are valid play
    with random content: they teach the form, not the answer.
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

    def demo(self, state, rng):
        return [int(rng.integers(self.size)) + (0 if state[2] is None else self.size), *self.end]


class Addition(Symbols):
    """Add two numbers in one turn: a chain of columns from the right, then the answer.

        4 7 + 3 8 = 7 8 0 1 5 , 4 3 1 0 8 , 0 8 5 .
                    ---------   ---------   -----
                    7 + 8 + 0   4 + 3 + 1   answer

    A column is its two digits and the carry into it, then their sum as two digits, the first of
    which is the carry into the next column.
    Reward 1 if what stands behind the last comma is the sum, else 0. The chain earns nothing by
    itself, and a policy that can do without may leave it out.
    """

    digits = 2  # of each number; a subclass with 3 needs --max-new-tokens 23

    def __init__(self, config):
        super().__init__([*"0123456789", "+", "=", ",", "."])
        self.plus, self.equals, self.comma, self.dot = range(10, 14)

    def prompt(self, rng, index, held_out):
        # One problem in ten is held out, by a hash of its text. Rollouts and demonstrations ask
        # with held_out False, so neither ever shows what an evaluation asks.
        problem_is_held_out = None
        while problem_is_held_out != held_out:
            a, b = rng.integers(10**self.digits, size=2).tolist()
            problem_is_held_out = is_held_out(f"{a} + {b}".encode())

        tokens = [*spell(a, self.digits), self.plus, *spell(b, self.digits), self.equals]
        return (a, b), tokens  # the state is all that `reply` and `demo` will know

    def reply(self, state, answer):
        # What is behind the last comma. The last token of an answer is the one that ended it.
        result = []
        for token in answer[:-1]:
            result.append(token)
            if token == self.comma:
                result = []

        right = spell(sum(state), self.digits + 1)
        return state, None, 1.0 if result == right else 0.0  # None: the game is over

    def demo(self, state, rng):
        a, b = state
        chain = []
        carry = 0
        for place in range(self.digits):
            # The column's digits: of 47 and 38 first 7 and 8, then 4 and 3.
            x = a // 10**place % 10
            y = b // 10**place % 10
            column_sum = x + y + carry
            chain += [x, y, carry, *spell(column_sum, 2), self.comma]
            carry = column_sum // 10
        return [*chain, *spell(a + b, self.digits + 1), self.dot]


class Calculator(Symbols):
    """Work out `a + b * c` or `a + b - c` with a calculator that takes one operation a turn.

        2 + 3 * 4 ? 3 * 4 . = 12 2 + 12 . = 14 14 .
                    -------      --------      ----
                    call    reply     call  reply   answer

    A turn of four tokens is a call, and its reply is the result; a turn of two is the answer.
    Reward 1 for the right answer. A malformed turn, and a result that is no number of 0 to 50, end
    the game with 0. Each number is one token, so the policy only has to decide what to ask, and to
    copy what it has heard.

    The demonstrations know how to use the calculator, and not that a product comes before a sum:
    four times in five they begin with the sum. Whoever imitates them solves the problems with a
    minus, and few of those with a product. Only the reward tells which order is right.
    """

    numbers = 51  # 0 .. 50, each a token
    operands = 6  # a, b and c are under it: (5 + 5) * 5 = 50 is the largest number that comes up

    def __init__(self, config):
        super().__init__([*map(str, range(self.numbers)), "+", "-", "*", "?", "=", "."])
        first = self.numbers
        self.plus, self.minus, self.times, self.question, self.equals, self.dot = range(
            first, first + 6
        )

    def compute(self, x, operator, y):
        if operator == self.plus:
            return x + y
        if operator == self.minus:
            return x - y
        return x * y

    def prompt(self, rng, index, held_out):
        # Two problems in three have a product. They are dealt and not drawn, so that no batch is
        # lopsided.
        operator = self.times if index % 3 else self.minus
        problem_is_held_out = None
        right = -1
        while problem_is_held_out != held_out or right < 0:
            a, b, c = rng.integers(self.operands, size=3).tolist()
            right = a + self.compute(b, operator, c)
            problem = (a, self.plus, b, operator, c)
            problem_is_held_out = is_held_out(self.show(problem).encode())

        calls = ()  # the operator and the result of each call so far
        return (problem, right, calls), [*problem, self.question]

    def reply(self, state, answer):
        problem, right, calls = state
        if len(answer) == 2:
            return state, None, 1.0 if answer[0] == right else 0.0  # None: the game is over
        if len(answer) != 4:
            return state, None, 0.0

        # A call: a number, an operator, a number and the dot, which is how a turn ends.
        x, operator, y, _ = answer
        if operator not in (self.plus, self.minus, self.times) or max(x, y) >= self.numbers:
            return state, None, 0.0
        result = self.compute(x, operator, y)
        if not 0 <= result < self.numbers:
            return state, None, 0.0

        # A new state, never the old one changed: rollouts that fork share it.
        calls = (*calls, (operator, result))
        return (problem, right, calls), [self.equals, result], 0.0

    def demo(self, state, rng):
        (a, plus, b, operator, c), _, calls = state
        if len(calls) == 2:
            _, result = calls[1]
            return [result, self.dot]

        # The first call: either of the problem's two operations.
        if not calls:
            if operator == self.times and rng.integers(5) == 0:
                return [b, operator, c, self.dot]
            return [a, plus, b, self.dot]

        # The second call: the other operation, with the first one's result.
        used, result = calls[0]
        if used == self.plus:
            return [result, operator, c, self.dot]
        return [a, plus, result, self.dot]

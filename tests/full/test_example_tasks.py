"""The example tasks: their rewards, and what is held out."""

import numpy as np
import pytest
from example_tasks import Lookup, Sort

from full.learn.rollouts import draw_prompts
from full.run.config import Config


def starts(task, count, held_out=False):
    """(number, state, prompt) of the first `count` problems."""
    draws = [np.random.default_rng([7, index]) for index in range(count)]
    return [(index, *task.prompt(rng, index, held_out)) for index, rng in enumerate(draws)]


def tokens(task, text):
    return [task.names.index(name) for name in text.split()]


def converse(task, state, *answers):
    """What the task says to each answer, as text, and the total reward."""
    total, heard = 0.0, []
    for answer in answers:
        assert None not in heard, "the task had ended"
        before = repr(state)
        after, reply, reward = task.reply(state, tokens(task, answer))
        assert repr(state) == before  # rollouts that fork share a state
        state = after
        total, heard = total + reward, [*heard, reply and task.show(reply)]
    return heard, pytest.approx(total)


class SortThree(Sort):
    length = 3


SORTED = {  # what s3 s0 s2 is sorted to, and its reward
    "s0 s2 s3 .": 1.0, "s0 s3 s2 .": 0.5 / 3, "s2 s3 s0 .": 0.0, "s0 s2 .": 0.0, ".": 0.0,
    "s0 s2 s3 s3 .": 0.0, "s0 s0 s0 .": 0.5 / 3, "s0 s2 ? .": 1 / 3,
}  # fmt: skip
LOOKED_UP = [  # what is said in a game that asks for k1, of the table v1 v2 v0
    (["k1 .", "v2 ."], ["= v2", None], 1.0), (["k1 .", "v0 ."], ["= v2", None], 0.6),
    (["k0 .", "v1 ."], ["= v1", None], 0.6), (["k1 .", "k1 ."], ["= v2", None], 0.5),
    (["v2 ."], [None], 0.0), (["k1 v2 ."], [None], 0.0), (["k1 .", "."], ["= v2", None], 0.5),
    (["."], [None], 0.0),
]  # fmt: skip


def test_rewards_of_sort_and_lookup():
    task = SortThree(Config(size=4))
    drawn = {task.show(prompt): state for _, state, prompt in starts(task, 200)}
    for answer, reward in SORTED.items():
        assert converse(task, drawn["s3 s0 s2 ?"], answer) == ([None], reward)

    task, drawn = Lookup(Config(size=3)), {}
    for _, state, prompt in starts(task, 300):
        replies = [converse(task, state, f"k{n} .")[0][0] for n in range(3)]
        drawn[task.show(prompt), *replies] = state
    for answers, heard, reward in LOOKED_UP:
        assert converse(task, drawn["? k1", "= v1", "= v2", "= v0"], *answers) == (heard, reward)


def test_sort_refuses_sizes_that_leave_nothing_to_sort_or_to_hold_out():
    class Two(Sort):
        length = 2

    for task, message in (Sort, "expected at least 4 symbols"), (Two, "too few prompts of 2 to"):
        with pytest.raises(ValueError, match=f"--size 3: {message}"):
            task(Config(size=3))


def test_held_out_problems_are_never_trained_on(process_group):
    config = Config(size=5)
    task, asked = Sort(config), {True: set(), False: set()}
    for step in range(8):
        for stream, held_out in ((1, False), (2, True)):  # rollouts, evaluation
            options = dict(first=step * 150, held_out=held_out)
            drawn = draw_prompts(config, task, stream, step, range(150), **options)
            asked[held_out] |= {tuple(prompt) for _, _, prompt in drawn}
    assert not asked[True] & asked[False]
    assert len(asked[True] | asked[False]) == 5 * 4 * 3 * 2 and 4 < len(asked[True]) < 24  # all

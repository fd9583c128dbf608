"""The example tasks: their demonstrations, their rewards, and what is held out."""


import numpy as np
import pytest
from example_tasks import Addition, Calculator, Lookup, Sort

from full.config import Config
from full.rollouts import demonstrations, draw_prompts


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


ADDED = {  # what is said to 47 + 38, and its reward; a chain earns nothing, and may be wrong
    "0 8 5 .": 1.0, "1 1 , 0 8 5 .": 1.0, "0 8 5 , .": 0.0, ".": 0.0,
    **{f"7 8 0 1 5 , 4 3 1 0 8 , {wrong} .": 0.0 for wrong in ("0 8 6", "8 5", "0 0 8 5")},
}  # fmt: skip
MALFORMED = "+ .", ".", "3 * 4 4 .", "3 4 * .", "3 * + .", "3 ? 4 .", "2 - 3 .", "3 * 17 ."
CALCULATED = [  # the turns in a game that asks for 2 + 3 * 4, and the reward
    (["3 * 4 .", "2 + 12 .", "14 ."], 1.0), (["3 * 4 .", "12 + 2 .", "14 ."], 1.0),
    (["14 ."], 1.0),  # by heart
    (["1 + 1 .", "7 - 7 .", "6 * 7 .", "14 ."], 1.0),  # any calls
    (["2 + 3 .", "5 * 4 .", "20 ."], 0.0), (["3 * 4 .", "12 ."], 0.0),
    *(([turn], 0.0) for turn in MALFORMED),  # 51 is not a number of the calculator's
]  # fmt: skip


def test_rewards_of_addition_and_the_calculator():
    # The chain of a problem with a carry out of each column.
    chain = tokens(Addition(Config()), "7 8 0 1 5 , 4 9 1 1 4 , 1 4 5 .")
    assert Addition(Config()).demo((47, 98), None) == chain
    assert converse(Addition(Config()), (47, 98), "7 8 0 1 5 , 4 9 1 1 4 , 1 4 5 .") == (
        [None], 1.0)  # fmt: skip
    for answer, reward in ADDED.items():
        assert converse(Addition(Config()), (47, 38), answer) == ([None], reward)
    task = Calculator(Config())
    for turns, reward in CALCULATED:
        state = (tuple(tokens(task, "2 + 3 * 4")), 14, ())
        heard = [f"= {eval(call.rstrip('.'))}" for call in turns[:-1]]
        assert converse(task, state, *turns) == ([*heard, None], reward)


def test_sort_refuses_sizes_that_leave_nothing_to_sort_or_to_hold_out():
    class Two(Sort):
        length = 2

    for task, message in (Sort, "expected at least 4 symbols"), (Two, "too few prompts of 2 to"):
        with pytest.raises(ValueError, match=f"--size 3: {message}"):
            task(Config(size=3))


@pytest.mark.parametrize("Class, least, most", [
    (Lookup, 0.02, 0.1), (Addition, 1, 1), (Calculator, 0.5, 0.9)])  # fmt: skip
def test_demonstrations_are_valid_play_and_only_answers_are_trained(Class, least, most):
    """least, most: the share of them that earn all. Lookup and Calculator begin with any call."""
    task = Class(Config(size=4))
    problems = starts(task, 300)
    played = demonstrations(task, problems, key=(0, 0))
    for (_, state, prompt), t in zip(problems, played, strict=True):
        assert len(t.tokens) - len(prompt) <= Config().max_new_tokens
        said = [name if on else "|" for name, on in zip(task.show(t.tokens).split()[1:], t.mask)]
        turns = [turn.strip() for turn in " ".join(said).split("|") if turn.strip()]
        heard, reward = converse(task, state, *turns)
        assert heard[-1] is None and t.reward == reward and not t.sampler_logprobs.any()
        assert len(t.turn_rewards) == len(turns)
    assert least <= np.mean([t.reward == 1 for t in played]) <= most


@pytest.mark.parametrize("Class", [Sort, Addition, Calculator])
def test_held_out_problems_are_never_trained_on(Class, process_group):
    config = Config(size=5)
    task, asked = Class(config), {True: set(), False: set()}
    for step in range(8 if Class is Sort else 2):
        for stream, held_out in ((1, False), (2, True), (3, False)):  # rollouts, evaluation, demos
            options = dict(first=step * 150, held_out=held_out)
            drawn = draw_prompts(config, task, stream, step, range(150), **options)
            asked[held_out] |= {tuple(prompt) for _, _, prompt in drawn}
    assert not asked[True] & asked[False]
    if Class is Sort:  # all of its prompts
        assert len(asked[True] | asked[False]) == 5 * 4 * 3 * 2 and 4 < len(asked[True]) < 24
    else:
        assert len(asked[True]) > 25 and len(asked[False]) > 200

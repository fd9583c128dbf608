"""The example tasks: their demonstrations, their rewards, what is held out, and a run of each."""

import numpy as np
import pytest
from example_tasks import Addition, Calculator, Sort, spell

from conftest import ROOT, shortened
from test_run import good
from train_grpo import Config, demonstrations, draw_prompts

EXAMPLES = ROOT / "tests/example_tasks.py"
SMALL = "--device cpu --layers 1 --hidden 16 --heads 2 --prompts 4 --group 4 --eval-prompts 4"


def starts(task, count, held_out=False):
    """(number, state, prompt) of the first `count` problems."""
    draws = [np.random.default_rng([7, index]) for index in range(count)]
    return [(index, *task.prompt(rng, index, held_out)) for index, rng in enumerate(draws)]


def tokens(task, text):
    return [task.names.index(name) for name in text.split()]


def test_demonstrations_of_addition_are_right_chains():
    task = Addition(Config())
    played = demonstrations(task, starts(task, 300), key=(0, 0))
    assert {t.reward for t in played} == {1.0}
    assert {int(t.mask.sum()) for t in played} == {Config().max_new_tokens}

    # The chain itself, of a problem with a carry out of each column.
    chain = tokens(task, "7 8 0 1 5 , 4 9 1 1 4 , 1 4 5 .")
    assert task.demo((47, 98), None) == chain
    assert task.reply((47, 98), chain) == ((47, 98), None, 1.0)


@pytest.mark.parametrize("answer, reward", [
    ("0 8 5 .", 1.0), ("1 1 , 0 8 5 .", 1.0),  # a chain earns nothing by itself, and may be wrong
    *((f"7 8 0 1 5 , 4 3 1 0 8 , {wrong} .", 0.0) for wrong in ("0 8 6", "8 5", "0 0 8 5")),
    ("0 8 5 , .", 0.0), (".", 0.0),
])  # fmt: skip
def test_answers_to_an_addition(answer, reward):
    task = Addition(Config())
    assert task.reply((47, 38), tokens(task, answer)) == ((47, 38), None, reward)


def test_addition_of_more_digits():
    class Longer(Addition):
        digits = 3

    task = Longer(Config())
    answer = task.demo((999, 1), None)
    assert len(answer) == 23 and task.reply((999, 1), answer)[2] == 1.0
    assert spell(7, 2) == [0, 7]


def test_sort_refuses_sizes_that_leave_nothing_to_sort_or_to_hold_out():
    class Two(Sort):
        length = 2

    with pytest.raises(ValueError, match="--size 3: expected at least 4 symbols to sort"):
        Sort(Config(size=3))
    with pytest.raises(ValueError, match="--size 3: too few prompts of 2 to hold some out"):
        Two(Config(size=3))


def test_demonstrations_of_the_calculator_are_valid_and_not_always_right():
    task = Calculator(Config())
    problems = starts(task, 600)
    played = demonstrations(task, problems, key=(0, 0))
    rewards = {"minus": set(), "sum first": [], "product first": set()}
    for (_, (problem, right, _), prompt), t in zip(problems, played):
        # Two calls, each of them heard and replied to, and the answer, within the default limit.
        new = t.tokens[len(prompt) :]
        assert len(new) == 14 <= Config().max_new_tokens
        assert [n for n, token in enumerate(new) if token == task.dot] == [3, 9, 13]
        assert new[4] == new[10] == task.equals and new[12] == new[11]
        assert t.reward == float(new[12] == right)
        if problem[3] == task.minus:
            rewards["minus"].add(t.reward)
        elif new[1] == task.plus:
            rewards["sum first"].append(t.reward)
        else:
            rewards["product first"].add(t.reward)

    # The sum first is the wrong order, which gives the right number where a is 0 or c is 1.
    assert rewards["minus"] == rewards["product first"] == {1.0}
    assert 0.1 < np.mean(rewards["sum first"]) < 0.4


@pytest.mark.parametrize("turns, reward", [
    (["3 * 4 .", "2 + 12 .", "14 ."], 1.0), (["3 * 4 .", "12 + 2 .", "14 ."], 1.0),
    (["14 ."], 1.0),  # by heart
    (["1 + 1 .", "7 - 7 .", "6 * 7 .", "14 ."], 1.0),  # any calls
    (["2 + 3 .", "5 * 4 .", "20 ."], 0.0), (["3 * 4 .", "12 ."], 0.0),
    *(([turn], 0.0) for turn in (
        "+ .", ".", "3 * 4 4 .", "3 4 * .", "3 * + .", "3 ? 4 .", "2 - 3 .",
        "3 * 17 .")),  # 51 is not a number of the calculator's
])  # fmt: skip
def test_answers_to_the_calculator(turns, reward):
    task = Calculator(Config())
    state = (tuple(tokens(task, "2 + 3 * 4")), 14, ())
    for turn in turns:
        before = repr(state)
        after, reply, earned = task.reply(state, tokens(task, turn))
        assert repr(state) == before  # rollouts that fork share a state
        state = after
        if turn is not turns[-1]:
            assert reply[0] == task.equals and earned == 0.0
    assert reply is None and earned == reward


@pytest.mark.parametrize("Class", [Addition, Calculator])
def test_held_out_problems_are_never_trained_on(Class, process_group):
    task, config = Class(Config()), Config()
    asked = {True: set(), False: set()}
    for step in range(2):
        for stream, held_out in ((1, False), (2, True), (3, False)):  # rollouts, evaluation, demos
            options = dict(first=step * 150, held_out=held_out)
            drawn = draw_prompts(config, task, stream, step, range(150), **options)
            asked[held_out] |= {tuple(prompt) for _, _, prompt in drawn}
    assert len(asked[True]) > 25 and len(asked[False]) > 200
    assert not asked[True] & asked[False]


@pytest.mark.parametrize("name", shortened(["Addition", "Calculator"], "Calculator"))
def test_a_run_from_the_command_line(tmp_path, name):
    flags = f"--task {EXAMPLES}:{name} --demos 1 --steps 2 --lr-warmup 0 {SMALL} --out run"
    out, _ = good(tmp_path, flags)
    assert "eval/solved" in out
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") == 2

"""Rollouts: what is sampled, what is trained, what is shared, what is refused.

`Script` is a model whose every token is known beforehand; `Chat` a task in which any answer is
heard. Where real weights are needed they are random, tiny and float64.
"""

import itertools
import json
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, installed
from example_tasks import Lookup, Sort

from full.learn import rollouts
from full.learn.batches import collect
from full.learn.objectives import loss_denominator
from full.learn.rollouts import Sampler, draw_prompts, evaluate, play_held_out
from full.learn.trainer import Trainer
from full.model.hf import save_hf
from full.model.transformer import Transformer
from full.ranks.joining import ReplyTimeout
from full.run.config import Config
from full.run.tasks import Task, final_answer, from_file, make_task, same_answer
from full.tiny import TINY, tiny, tiny_model
from train_grpo import uniforms

pytestmark = pytest.mark.quick
END = 9


class Chat(Task):
    """Hears up to three answers, says `8 9` after each (its 9 ends nothing), and stops at once at
    an answer of one token. Reward: tenths of the answer's length."""

    vocab_size, end = 10, (END,)

    def prompt(self, rng, index, held_out):
        return 1, [0, index % 2]

    def reply(self, turn, answer):
        over = turn == 3 or len(answer) == 1
        return turn + 1, None if over else [8, END], len(answer) / 10


class Script:
    """A model without weights: token n of a row is script[n], with probability 1/2; the logits of
    token `broken` are NaN."""

    def __init__(self, script, vocab=10, broken=-1):
        self.broken = broken
        self.config = SimpleNamespace(vocab_size=vocab, max_position_embeddings=99)
        self.head_weight = torch.zeros(vocab, 99, dtype=torch.float64)
        for n, token in enumerate(script[1:]):
            self.head_weight[token, n] = math.log(vocab - 1)

    def hidden(self, tokens, *, positions, attention):
        broken = (positions == self.broken - 1)[..., None]
        return F.one_hot(positions, 99).double().masked_fill(broken, math.nan)

    def logits(self, hidden):
        return F.linear(hidden, self.head_weight)


def random_model(vocab, seed=0):
    shape = tiny("qwen3", vocab_size=vocab, initializer_range=0.1)
    return Transformer(shape).double().init_weights(seed).requires_grad_(False)


def opening(task, groups, held_out=False):
    return [(g, *task.prompt(np.random.default_rng(g), g, held_out)) for g in groups]


def play(task, model=None, groups=range(3), key=(0, 0), **options):
    """Lists of trajectories, one for each of the groups."""
    config = Config(**dict(group=4, max_new_tokens=16, temperature=1.0) | options)
    sampler = Sampler(model or random_model(task.vocab_size))
    return rollouts.play(config, task, sampler, opening(task, groups), key=key)


def task_of(name, **options):
    return make_task(Config(task=name, **options))


def converse(task, state, *answers):
    """What the task says to each answer, as text, and the total reward."""
    total, heard = 0.0, []
    for answer in answers:
        assert None not in heard, "the task had ended"
        before = repr(state)
        after, reply, reward = task.reply(state, [task.names.index(x) for x in answer.split()])
        assert repr(state) == before  # rollouts that fork share a state
        state = after
        total, heard = total + reward, [*heard, reply and task.show(reply)]
    return heard, pytest.approx(total)


class SortThree(Sort):
    length = 3


# 1. What is sampled and what is trained ------------------------------------------------------

SMALL = {
    "guess": task_of("guess", size=2), "sort": SortThree(Config(size=4)),
    "lookup": Lookup(Config(size=2)), "chat": Chat(),
}  # fmt: skip


def by_hand(logp, task, start, number, *, key, room=16, forks=1, fork_turns=0):
    """A rollout by hand, of the log-probs at each of its tokens, as the fields of a Trajectory."""
    group, state, prompt = start
    tokens, mask, logprobs, rewards = list(prompt), [False] * len(prompt), [0.0] * len(prompt), []
    share, turn = forks**fork_turns, len(prompt)
    first, forked, prompt_tokens = number - number % share, 0, turn
    truncated = True
    while (new := len(tokens) - len(prompt)) < room:
        # The first token whose cumulated probability exceeds the draw.
        row = logp[len(tokens) - 1]
        draw = uniforms((*key, group, first), room)[new]
        tokens.append(int((row.exp().cumsum(0) <= draw).sum()))
        mask.append(True)
        logprobs.append(row[tokens[-1]].item())
        if tokens[-1] not in task.end:
            continue

        state, reply, reward = task.reply(state, tokens[turn:])
        rewards.append((len(tokens) - 2, reward))
        if reply is None:
            truncated = False
            break
        turn = len(tokens) + len(reply)
        for token in reply[: room - new - 1]:
            tokens.append(token)
            mask.append(False)
            logprobs.append(0.0)
        if forked < fork_turns:
            share //= forks
            first, forked = number - number % share, forked + 1
    fields = dict(tokens=tokens, mask=mask[1:], prompt=prompt_tokens, turn_rewards=rewards)
    return logprobs[1:], fields | dict(truncated=truncated)


def assert_by_hand(model, task, groups, temperature, *, key=(0, 0), room=16, group=4, **forks):
    """Play groups, and compare each rollout with that by hand. Returns the trajectories."""
    how = dict(max_new_tokens=room, group=group, **forks)
    played = play(task, model, groups, temperature=temperature, key=key, **how)
    for start, group in zip(opening(task, groups), played, strict=True):
        for number, t in enumerate(group):
            # A full forward pass of the whole rollout. Where a token differs, so does the list.
            logp = (model(torch.tensor([t.tokens]))[0] / temperature).log_softmax(-1)
            logprobs, expected = by_hand(logp, task, start, number, key=key, room=room, **forks)
            found = {name: getattr(t, name) for name in expected} | dict(mask=t.mask.tolist())
            assert found == expected
            assert np.abs(t.sampler_logprobs - logprobs).max() <= 1e-12
            assert t.reward == pytest.approx(sum(reward for _, reward in t.turn_rewards))
    return played


CASES = [(name, "") for name in SMALL] + [("chat", family) for family in TINY]


@pytest.mark.parametrize("name, family", CASES)
def test_a_rollout_depends_on_seed_step_group_and_number_only(name, family):
    """Groups in any order; 0 and 4 have the same prompt, and 3 and 7."""
    task = SMALL[name]
    model = random_model(task.vocab_size)
    if family:
        model = tiny_model(family, vocab_size=10).requires_grad_(False)
    size = 4 if family else 16
    groups = assert_by_hand(model, task, [7, 4, 3, 0], 0.7, key=(5, 2), group=size)
    if not family:
        # Replies were played between answers; groups differ, and rollouts within them.
        answers = [(np.diff(t.mask.astype(int), prepend=0) == 1).sum() for t in sum(groups, [])]
        assert max(answers) > 1 or name == "sort"
        assert len({str([t.tokens for t in group]) for group in groups}) == 4
        assert all(group[0].tokens != group[-1].tokens for group in groups)


def test_truncation_keeps_what_was_played_until_then():
    for room in range(1, 13):  # in an answer, at its end, in a reply, at its end, ..
        assert_by_hand(random_model(10), Chat(), range(4), 0.7, room=room, group=4)


# After the prompt 0 0 the model says `1 2 9`, `3 9`, `9`; what it says while Chat speaks is lost.
SCRIPT = [0, 0, 1, 2, 9, 9, 9, 3, 9, 9, 9, 9]


def test_non_finite_sampler_logprobs_leave_the_loss(process_group):
    model, how = Script(SCRIPT, broken=3), dict(group=1, temperature=0, max_new_tokens=3)
    [[t]] = play(Chat(), model, groups=[0], **how)
    assert (t.mask.tolist(), t.sampler_logprobs[2]) == ([False, True, False, True], 0.0)
    for aggregation, Z in {"token_mean": 2, "sequence_mean": 1, "constant": 16}.items():
        config = Config(aggregation=aggregation, entropy_coef=0.0)
        how = dict(aggregation=aggregation, max_new_tokens=16)
        assert loss_denominator([t.mask], **how) == Z
        t.advantages, t.old_logprobs = np.full(4, -1.0), np.where(t.mask, -99.0, 0.0)  # r = e^10
        loss = Trainer(config, random_model(10).requires_grad_(True)).forward_backward([t], Z)
        w = 1 / 2 if aggregation == "sequence_mean" else 1
        assert loss["loss/token_mean"] == pytest.approx(2 * w * math.exp(10) / Z)


class Counted(Chat):
    """Notes the number of each prompt. Rewards of the prompt `unequal` are 0, 1, ..; others 0."""

    end = tuple(range(10))

    def __init__(self, unequal=None):
        self.asked, self.unequal, self.rewards = [], unequal, itertools.count()

    def prompt(self, rng, index, held_out):
        self.asked.append(index)
        return index, super().prompt(rng, index, held_out)[1]

    def reply(self, index, answer):
        return index, None, float(next(self.rewards) if index == self.unequal else 0)


def test_every_step_has_prompts_and_random_numbers_of_its_own(process_group, monkeypatch):
    """Each round of a step has the next prompts. Of all rounds and an evaluation's samples, each
    key of prompts and rollouts is used once. numpy pads a key with zeros to four numbers."""
    keys = []

    def noted(kind, make):
        return lambda key: keys.append((kind, *key)) or make(key)

    for kind, name in (("draws", "SeedSequence"), ("numbers", "default_rng")):
        monkeypatch.setattr(np.random, name, noted(kind, getattr(np.random, name)))
    how = dict(dynamic_sampling=3, entropy_coef=0, eval_prompts=4)
    config, task = Config(seed=1, prompts=2, group=2, max_new_tokens=2, **how), Counted()
    sampler = Sampler(random_model(10))
    for step in range(3):
        assert collect(config, task, sampler, step)[1] == []
    assert task.asked == [*range(18)]
    play_held_out(config, task, sampler, group=3, temperature=1.0)
    padded = {(*key, *[0] * (5 - len(key))) for key in keys}
    assert len(padded) == len(keys) == 18 * (1 + 2) + 4 * (1 + 3)
    kinds = {("draws", 4), ("draws", 5), ("numbers", 4)}
    assert {(kind, len(key)) for kind, *key in keys} == kinds

    # The first prompt is kept, so that one more is missing.
    task = Counted(unequal=0)
    assert collect(config, task, sampler, 0)[1] == [0]
    assert task.asked == [0, 1, 2, 3]


# 2. What is shared ---------------------------------------------------------------------------


def test_batch_rows_bounds_what_is_decoded_at_a_time_and_changes_no_token(monkeypatch):
    task, model, rows, peaks, tokens = Chat(), random_model(10), [], [], []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda x, **how: rows.append(len(x)) or hidden(x, **how))
    for most in (1024, 8, 1):
        groups = play(task, model, range(5), batch_rows=most, max_new_tokens=12)
        tokens.append([[t.tokens for t in group] for group in groups])
        peaks.append(max(rows))
        rows.clear()
    assert tokens[0] == tokens[1] == tokens[2]
    assert peaks[0] > peaks[1] == 8 > peaks[2] == 1  # a group may be divided


def test_a_group_has_all_its_rollouts_even_where_a_row_ended_before_its_forks():
    """Six groups of 8 in two roots, each forked in two at its first two turn boundaries."""
    how = dict(group=8, forks=2, fork_turns=2)
    forked = assert_by_hand(random_model(10), Chat(), range(6), 1.0, **how)
    assert [len(group) for group in forked] == [8] * 6
    equal = {sum(t.tokens == s.tokens for s in group) for group in forked for t in group}
    assert {1, 2, 4} <= equal  # ended after two forks, one, none


def test_evaluation_plays_each_held_out_prompt_once_and_greedily(process_group, monkeypatch):
    config = Config(size=3, turns=2, eval_prompts=7, max_new_tokens=9)
    model = Script([3, 1, 6, 6, 0, 6], vocab=7)  # always `1 .` and then `0 .`: never finds 2
    task, asked = make_task(config), []
    prompt = task.prompt
    monkeypatch.setattr(task, "prompt", lambda *how: asked.append(how[1:]) or prompt(*how))
    solved, shown = evaluate(config, task, Sampler(model))
    assert asked == [(index, True) for index in range(6)]  # 7 would ask one secret once more
    assert solved == pytest.approx(4 / 6)  # secrets 0 1 2 0 1 2
    assert (shown.tokens, shown.reward) == ([3, 1, 6, 5, 0, 6], 1.0)


# 3. Rewards, answers in text ------------------------------------------------------------------


@pytest.mark.parametrize("answers, heard, reward", [
    (["4 ."], [None], 1.0), (["3 .", "5 .", "4 ."], ["higher", "lower", None], 1.0),
    (["3 .", "5 .", "6 ."], ["higher", "lower", None], 0.2 * 2 / 3),  # 6 was ruled out by 5
    (["6 .", "3 .", "5 ."], ["lower", "higher", None], 0.2), (["."], [None], 0.0),
    (["3 .", "4 4 ."], ["higher", None], 0.0), (["3 .", "higher ."], ["higher", None], 0.0),
    (["4 ? ."], [None], 0.0), (["? ."], [None], 0.0),
])  # fmt: skip
def test_guess_rewards(answers, heard, reward):
    task = task_of("guess", size=7, turns=3)
    state, prompt = task.prompt(None, 4, True)  # evaluation asks for 0, 1, 2, ..
    assert task.show(prompt) == "?" and converse(task, state, *answers) == (heard, reward)


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
    drawn = {task.show(prompt): state for _, state, prompt in opening(task, range(200))}
    for answer, reward in SORTED.items():
        assert converse(task, drawn["s3 s0 s2 ?"], answer) == ([None], reward)

    task, drawn = Lookup(Config(size=3)), {}
    for _, state, prompt in opening(task, range(300)):
        replies = [converse(task, state, f"k{n} .")[0][0] for n in range(3)]
        drawn[task.show(prompt), *replies] = state
    for answers, heard, reward in LOOKED_UP:
        assert converse(task, drawn["? k1", "= v1", "= v2", "= v0"], *answers) == (heard, reward)


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


def test_guess_deals_each_number_equally_often_in_an_order_of_the_seed():
    def secrets(seed, decks=6):
        task = task_of("guess", size=5, seed=seed)
        states = [task.prompt(None, index, False)[0] for index in range(5 * decks)]
        found = [[n for n in range(5) if task.reply(s, [n, 8])[2] == 1] for s in states]
        return [[n for [n] in found[5 * d : 5 * d + 5]] for d in range(decks)]

    assert all(sorted(deck) == [0, 1, 2, 3, 4] for deck in secrets(0))
    assert secrets(0) == secrets(0) != secrets(1) and len({str(deck) for deck in secrets(0)}) > 1


FINAL = {
    "6 * 7 = 42\n#### 42": "42", "#### 1\nno:\n####  2 \nso": "2", "42": None, "# 42": None,
    "####42": "42", "####": "", "#### 5 #### 6": "6", "####\nno 5": "", "##### 7": "7",
    "####\u200b Paris \ufeff\n": "Paris",
}  # fmt: skip
SAME = [
    ("1,000", "1000"), ("$1,000.00", "1000"), ("42.", "42"), (".5", "0.50"), ("-$3", "-3.0"),
    ("blue", " blue "), ("1 000", "1000"), ("$ 5", "5 %"), ("-0", "0"),
    ("121932631112635269", "121932631112635269.0"), ("\u22123", "-3"), ("\u2013$3.50", "-3.5"),
    ("**42.**", "42"), ("`-1`", "-1"), ("9{,}500", "9500"), (r"9\,500", "9,500"),
    (r"50\%", r"\$50"), ("\ufeff 1,\u200b000", "1000"), ("\ufeffblue", "blue"),
    ("9\u202f500", "9500"),
]  # fmt: skip
OTHERS = [
    ("3", "-3"), ("42 apples", "42"), ("blue", "red"), ("", "0"), ("1 2", "12"), ("3, 4", "34"),
    ("1,00", "100"), (None, "1"), (None, None), ("nan", "1"), ("1e3", "1000"),
    ("121932631112635268", "121932631112635269"), ("\u22123", "3"), ("4*2", "42"),
    ("3{,}4", "34"), ("5\u20133", "53"), ("\u200b", "0"), ("--3", "-3"), ("**", "**0**"),
]  # fmt: skip


def test_the_final_answer_follows_the_last_mark_and_is_compared_as_a_number_or_as_text():
    assert {text: final_answer(text) for text in FINAL} == FINAL
    for a, b in SAME + OTHERS:
        assert same_answer(a, b) is same_answer(b, a) is ((a, b) in SAME), (a, b)


# 4. Replies in threads, and what is refused --------------------------------------------------


class Meeting(Chat):
    """A task whose reply waits until `parties` replies are asked for at the same time."""

    def __init__(self, parties):
        self.barrier = threading.Barrier(parties, timeout=20)
        self.asked = []

    def reply(self, turn, answer):
        self.asked.append(threading.get_ident())
        self.barrier.wait()
        return super().reply(turn, answer)


@pytest.mark.parametrize("parties", [12, 1])
def test_replies_of_one_decoding_step_are_asked_for_together(parties):
    """12 episodes of one script end their turns together: one by one they would wait for ever.

    A task that is not safe in threads is asked by one.
    """
    task, script = Meeting(parties), dict(groups=range(3), group=4, temperature=0)
    task.threads = parties > 1
    played = play(task, Script(SCRIPT), **script)
    truth = play(Chat(), Script(SCRIPT), **script)
    assert [t.tokens for t in sum(played, [])] == [t.tokens for t in sum(truth, [])]
    assert task.threads or {*task.asked} == {threading.get_ident()}


def test_threads_change_no_token_and_no_order():
    class Slow(Chat):
        """Answers the later the shorter the answer, so replies come back in another order."""

        def reply(self, turn, answer):
            time.sleep(0.002 / len(answer))
            return super().reply(turn, answer)

    model = random_model(10)
    alone, in_threads = Slow(), Slow()
    alone.threads = False
    one, many = (play(task, model, group=8) for task in (alone, in_threads))
    for a, b in zip(sum(one, []), sum(many, []), strict=True):
        assert a.tokens == b.tokens and a.turn_rewards == b.turn_rewards
        assert (a.sampler_logprobs == b.sampler_logprobs).all()


BROKEN = [  # a reply to a turn, how many threads ask for it, and what is said of it
    (lambda turn: {}["no mood"], 4, "no mood"),
    (lambda turn: (turn, None, math.nan), 1, "gave reward nan in group 6, rollout 0.*'1 2 9'"),
    (lambda turn: (turn, [3, 10], 0.0), 1, r"replied \[3, 10\] in group 6, .*: ids end at 9"),
]


@pytest.mark.parametrize("reply, threads, message", BROKEN)
def test_an_error_of_a_reply_is_raised_also_from_a_thread(reply, threads, message):
    task = Chat()
    task.threads = threads > 1
    task.reply = lambda turn, answer: reply(turn)
    with pytest.raises((ValueError, KeyError), match=message):
        play(task, Script(SCRIPT), [6], temperature=0)


@pytest.mark.parametrize("prompt", [[], [3, 10], [-1], [1] * 84])
def test_a_prompt_that_cannot_be_played_is_refused(prompt):
    starts = [(4, 1, [0]), (5, 1, prompt)]
    config = Config(group=2, max_new_tokens=16, temperature=0)
    shape = tiny("qwen3", vocab_size=10, max_position_embeddings=99)
    model = Transformer(shape).init_weights(0)
    with pytest.raises(ValueError, match="prompts: expected|0..9|a prompt of 84 tokens"):
        rollouts.play(config, Chat(), Sampler(model), starts, key=(0, 0))


OWN_TASK = """
from full.run.tasks import Task, from_file

class Echo(Task):
    vocab_size, end = 4, (3,)

    def __init__(self, config):
        self.word = config.size

    def prompt(self, rng, index, held_out):
        return None, [self.word]

    def reply(self, state, answer):
        return state, None, float(answer == [self.word, 3])

class Slotted:
    __slots__ = ()
    vocab_size, end = 4, (3,)
    def __init__(self, config): pass
    def show(self, tokens): return "x"
    def prompt(self, rng, index, held_out): return None, [0]
    def reply(self, state, answer): return state, None, "much"
"""


def test_a_task_in_a_file_of_its_own_is_played_and_may_have_slots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN_TASK)
    task, model = task_of("mine.py:Echo", size=2), Script([2, 2, 3], vocab=4)
    [[t]] = play(task, model, groups=[0], group=1, temperature=0)
    assert (t.tokens, t.reward, task.show(t.tokens)) == ([2, 2, 3], 1.0, "2 2 3")
    with pytest.raises(ValueError, match="Slotted gave reward 'much'"):
        play(task_of("mine.py:Slotted"), model, groups=[0], group=1, temperature=0)


WITH_WORKERS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from helper import GOOD

def work(answer):
    from helper import GOOD  # in the worker
    return GOOD * len(answer)

def reward(text, row):
    with ProcessPoolExecutor(1, multiprocessing.get_context(row["method"])) as pool:
        return pool.submit(work, text).result(60)
"""


def test_a_late_reply_is_named_by_its_line_and_ends_nothing_else(monkeypatch):
    monkeypatch.setattr(rollouts, "LOOK_EVERY", 0.01)
    task, late = Chat(), threading.Event()
    task.where = lambda state: f"questions.jsonl line {state}"
    reply, how = task.reply, dict(groups=[0], group=2, reply_timeout=1, temperature=0)
    task.reply = lambda state, answer: late.wait(30) and reply(state, answer)
    try:
        with pytest.raises(ReplyTimeout) as error:
            play(task, Script([0, 0, 5, END]), **how)
    finally:
        late.set()
    said = str(error.value)
    assert "group 0, rollout 0, questions.jsonl line 1, to the answer '5 9'" in said
    assert error.value.args[1] == 0  # no signal
    [[t, _]] = play(task, Script([0, 0, 5, END]), **how | {"max_new_tokens": 2})
    assert (t.tokens, t.reward) == ([0, 0, 5, END], 0.2)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_function_of_a_file_reaches_its_workers_and_a_file_next_to_it(
    tmp_path, monkeypatch, method
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "helper.py").write_text("GOOD = 0.5")
    (folder / "scores.py").write_text(WITH_WORKERS)
    monkeypatch.chdir(tmp_path)
    reward = from_file("one/scores.py:reward", "function")
    assert reward.__module__ == "scores" and reward("ab", {"method": method}) == 1
    monkeypatch.delitem(sys.modules, "helper")


@pytest.mark.parametrize("name", ["models", "json", "full", "torch", "my.reward", "code-reward"])
def test_a_file_called_like_another_module_hides_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = sys.modules.get(name)
    (tmp_path / f"{name}.py").write_text("def reward(text, row): return 0.5")
    assert from_file(f"{tmp_path}/{name}.py:reward", "function")("", {}) == 0.5
    assert before is None or sys.modules[name] is before
    assert __import__("models").__file__.endswith(str(Path(ROOT.name, "models.py")))
    places = [sys.path.index(f"{x}") for x in (ROOT, tmp_path)]
    assert places == sorted(places)


# 5. A checkpoint and questions, for other files -----------------------------------------------

LINES = [{"question": f"What is {n} and {n}?", "answer": f"It is\n#### {2 * n}"} for n in range(40)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with random weights and a byte-level BPE tokenizer of a few sentences."""
    tokenizers = installed("tokenizers")
    installed("transformers")
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text for line in LINES for text in line.values()], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    shape = tiny(vocab_size=size, eos_token_id=(0,), max_position_embeddings=48)
    save_hf(Transformer(shape).double().init_weights(0), path)
    return path


@pytest.fixture
def folder(checkpoint, tmp_path, monkeypatch):
    """A working directory with what the README's commands call DIR and questions.jsonl."""
    (tmp_path / "DIR").symlink_to(checkpoint)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.chdir(tmp_path)
    return tmp_path

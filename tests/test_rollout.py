"""Rollouts and tasks: what is sampled, what is trained, what is shared, what is refused.

`Script` is a model whose every token is known beforehand; `Chat` a task in which any answer is
heard. Where real weights are needed they are random, tiny and float64.
"""

import json
import math
import re
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import batch_of
from example_tasks import Lookup, Sort

import models
import train_grpo
from models import Transformer
from text import final_answer, same_answer
from train_grpo import (
    Config, Replies, Task, Trainer, demonstrations, evaluate, loss_denominator, make_task, rollout,
    uniforms,
)  # fmt: skip

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
    shape = models.tiny("qwen3", vocab_size=vocab, initializer_range=0.1)
    return Transformer(shape).double().init_weights(seed).requires_grad_(False)


def opening(task, groups, held_out=False):
    return [(g, *task.prompt(np.random.default_rng(g), g, held_out)) for g in groups]


def play(task, model=None, groups=range(3), **options):
    """Lists of trajectories, one for each of the groups."""
    options = dict(group=4, max_new_tokens=16, temperature=1.0, key=(0, 0)) | options
    return rollout(model or random_model(task.vocab_size), task, opening(task, groups), **options)


def task_of(name, **options):
    return make_task(Config(task=name, **options))


class SortThree(Sort):
    length = 3


# 1. What is sampled and what is trained ------------------------------------------------------

SMALL = {
    "guess": task_of("guess", size=2), "sort": SortThree(Config(size=4)),
    "lookup": Lookup(Config(size=2)), "chat": Chat(),
}  # fmt: skip


def by_hand(logp, task, start, number, *, key, room=16, forks=1, fork_turns=0):
    """A rollout by hand, of the log-probs at each of its tokens: tokens, mask, log-probs, path."""
    group, state, prompt = start
    tokens, mask, logprobs = list(prompt), [False] * len(prompt), [0.0] * len(prompt)
    share, turn = forks**fork_turns, len(prompt)
    path = [(turn, number - number % share, share)]
    while (new := len(tokens) - len(prompt)) < room:
        # The first token whose cumulated probability exceeds the draw.
        row = logp[len(tokens) - 1]
        draw = uniforms((*key, group, path[-1][1]), room)[new]
        tokens.append(int((row.exp().cumsum(0) <= draw).sum()))
        mask.append(True)
        logprobs.append(row[tokens[-1]].item())
        if tokens[-1] not in task.end:
            continue

        state, reply, _ = task.reply(state, tokens[turn:])
        if reply is None:
            break
        turn = len(tokens) + len(reply)
        for token in reply[: room - new - 1]:
            tokens.append(token)
            mask.append(False)
            logprobs.append(0.0)
        if len(path) <= fork_turns:
            share //= forks
            path.append((turn, number - number % share, share))
    return tokens, mask[1:], logprobs[1:], path


def assert_by_hand(model, task, groups, temperature, key=(0, 0), forks=1, fork_turns=0, **how):
    """Play groups, and compare each rollout with that by hand. Returns the trajectories."""
    of_fork = dict(forks=forks, fork_turns=fork_turns)
    played = play(task, model, groups, temperature=temperature, key=key, **how, **of_fork)
    for start, group in zip(opening(task, groups), played, strict=True):
        for number, t in enumerate(group):
            # A full forward pass of the whole rollout. Where a token differs, so does the list.
            logp = (model(torch.tensor([t.tokens]))[0] / temperature).log_softmax(-1)
            tokens, mask, logprobs, path = by_hand(logp, task, start, number, key=key, **of_fork)
            assert (t.tokens, t.mask.tolist(), t.path) == (tokens, mask, path)
            assert np.abs(t.sampler_logprobs - logprobs).max() <= 1e-12
    return played


CASES = [(name, "") for name in SMALL] + [("chat", family) for family in models.TINY]


@pytest.mark.parametrize("name, family", CASES)
def test_a_rollout_depends_on_seed_step_group_and_number_only(name, family):
    """Groups in any order; 0 and 4 have the same prompt, and 3 and 7."""
    task = SMALL[name]
    model = random_model(task.vocab_size)
    if family:
        model = models.tiny_model(family, vocab_size=10).requires_grad_(False)
    size = 4 if family else 16
    groups = assert_by_hand(model, task, [7, 4, 3, 0], 0.7, key=(5, 2), group=size)
    if not family:
        # Replies were played between answers; groups differ, and rollouts within them.
        answers = [(np.diff(t.mask.astype(int), prepend=0) == 1).sum() for t in sum(groups, [])]
        assert max(answers) > 1 or name == "sort"
        assert len({str([t.tokens for t in group]) for group in groups}) == 4
        assert all(group[0].tokens != group[-1].tokens for group in groups)


# After the prompt 0 0 the model says `1 2 9`, `3 9`, `9`; what it says while Chat speaks is lost.
SCRIPT = [0, 0, 1, 2, 9, 9, 9, 3, 9, 9, 9, 9]
PLAYED = [0, 0, 1, 2, 9, 8, 9, 3, 9, 8, 9, 9]
MASK = [0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1]


def test_replies_are_never_trained_and_truncation_keeps_what_was_played_until_then():
    for room in range(1, 13):  # in an answer, at its end, in a reply, at its end, ..
        how = dict(group=1, temperature=0, max_new_tokens=room)
        [[t]] = play(Chat(), Script(SCRIPT), groups=[0], **how)
        assert (t.tokens, t.mask.tolist()) == (PLAYED[: 2 + room], MASK[: 1 + room])
        assert t.truncated == (room < 10)
        logprobs = -math.log(2) * np.array(MASK[: 1 + room])
        assert t.sampler_logprobs == pytest.approx(logprobs, abs=1e-15)
    assert t.reward == pytest.approx(0.3 + 0.2 + 0.1)


def test_an_answer_may_be_its_end_token_alone():
    [[t]] = play(Chat(), Script([0, 0, END]), groups=[0], group=1, temperature=0)
    assert (t.tokens, t.mask.tolist(), t.reward) == ([0, 0, END], [False, True], 0.1)
    for name in ("guess", "sort", "lookup"):
        task = SMALL[name]
        state, _ = task.prompt(np.random.default_rng(0), 0, False)
        assert task.reply(state, list(task.end))[1:] == (None, 0.0)


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


# 2. Randomness -------------------------------------------------------------------------------


class Counted(Chat):
    """Notes the number of each prompt and what its generator draws first. All rewards are 0."""

    def __init__(self):
        self.asked = []

    def prompt(self, rng, index, held_out):
        self.asked.append((index, rng.random()))
        return super().prompt(rng, index, held_out)

    def reply(self, turn, answer):
        return turn, None, 0.0


def test_every_step_has_prompts_and_random_numbers_of_its_own(process_group):
    """Without a prompt that is left out: each round of a step has the next ones."""
    config = Config(
        prompts=2, group=2, max_new_tokens=2, dynamic_sampling=True, max_rounds=3, entropy_coef=0
    )
    task = Counted()
    for step in range(3):
        assert train_grpo.collect(config, task, random_model(10), step)[1] == []
    numbers, draws = zip(*task.asked)
    assert numbers == tuple(range(18)) and len({*draws}) == 18


# 3. What is shared ---------------------------------------------------------------------------


def watch(monkeypatch, model, measure):
    """A list that gets measure(tokens) of every batch that the model computes from now on."""
    seen, plain = [], model.hidden

    def hidden(tokens, **how):
        seen.append(measure(tokens))
        return plain(tokens, **how)

    monkeypatch.setattr(model, "hidden", hidden)
    return seen


@pytest.mark.parametrize("name, distinct", [("guess", 1), ("chat", 2), ("sort", 6)])
def test_each_distinct_prompt_and_each_token_after_it_is_computed_once(monkeypatch, name, distinct):
    task = SMALL[name]
    model = random_model(task.vocab_size)
    fed = watch(monkeypatch, model, torch.numel)
    groups = play(task, model, groups=range(6), group=5)
    prompt = len(task.prompt(np.random.default_rng(0), 0, False)[1])
    assert fed[0] == distinct * prompt
    assert sum(fed[1:]) == sum(len(t.tokens) - prompt - 1 for group in groups for t in group)


def test_batch_rows_bounds_what_is_decoded_at_a_time_and_changes_no_token(monkeypatch):
    task, model, tokens, peak = Chat(), random_model(10), {}, {}
    rows = watch(monkeypatch, model, len)
    for most in (1024, 8, 1):
        config = Config(group=4, batch_rows=most, max_new_tokens=12)
        groups = train_grpo.play(config, task, model, opening(task, range(5)), key=(0, 0))
        tokens[most] = [[t.tokens for t in group] for group in groups]
        peak[most] = max(rows)
        rows.clear()
    assert tokens[1024] == tokens[8] == tokens[1]
    assert peak[1] == 1 < peak[8] <= 8 < peak[1024]  # a group may be divided


@pytest.fixture(scope="module")
def forked():
    """Six groups of 8 in two roots, each forked in two at its first two turn boundaries."""
    return assert_by_hand(random_model(10), Chat(), range(6), 1.0, group=8, forks=2, fork_turns=2)


def test_a_group_has_all_its_rollouts_even_where_a_row_ended_before_its_forks(forked):
    assert [len(group) for group in forked] == [8] * 6
    stood_for = Counter(t.path[-1][2] for group in forked for t in group)
    assert set(stood_for) == {1, 2, 4}  # ended after two forks, one, none


def test_per_branch_gives_each_token_the_advantage_of_its_segment(forked, process_group):
    config = Config(advantage="per_branch", group=8, forks=2, fork_turns=2)
    given = SimpleNamespace(config=config, reference=None, teacher=None, device="cpu")
    Trainer.prepare(given, batch_of(forked))
    for group in forked:
        for t in group:
            parent, total = np.mean([u.reward for u in group]), 0.0
            for n, (start, _, _) in enumerate(t.path):
                value = np.mean([u.reward for u in group if u.path[: n + 1] == t.path[: n + 1]])
                end = t.path[n + 1][0] if n + 1 < len(t.path) else len(t.tokens)
                assert t.advantages[start - 1 : end - 1] == pytest.approx(value - parent, abs=1e-14)
                parent, total = value, total + value - parent
            assert total == pytest.approx(t.reward - np.mean([u.reward for u in group]), abs=1e-14)


def test_evaluation_plays_each_held_out_prompt_once_and_greedily(process_group, monkeypatch):
    config = Config(size=3, turns=2, eval_prompts=7, max_new_tokens=9)
    model = Script([3, 1, 6, 6, 0, 6], vocab=7)  # always `1 .` and then `0 .`: never finds 2
    task, asked = make_task(config), []
    prompt = task.prompt
    monkeypatch.setattr(task, "prompt", lambda *how: asked.append(how[1:]) or prompt(*how))
    solved, shown = evaluate(config, task, model)
    assert asked == [(index, True) for index in range(7)]
    assert solved == pytest.approx(5 / 7)  # secrets 0 1 2 0 1 2 0
    assert (shown.tokens, shown.reward) == ([3, 1, 6, 5, 0, 6], 1.0)


# 4. Tasks ------------------------------------------------------------------------------------


def converse(task, state, *answers):
    """What the task says to each answer, as text, and the total reward."""
    total, heard = 0.0, []
    for answer in answers:
        assert None not in heard, "the task had ended"
        tokens = [task.names.index(word) for word in answer.split()]
        state, reply, reward = task.reply(state, tokens)
        total, heard = total + reward, [*heard, reply and task.show(reply)]
    return heard, pytest.approx(total)


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


def test_guess_deals_each_number_equally_often_in_an_order_of_the_seed():
    def secrets(seed, decks=6):
        task = task_of("guess", size=5, seed=seed)
        states = [task.prompt(None, index, False)[0] for index in range(5 * decks)]
        found = [[n for n in range(5) if task.reply(s, [n, 8])[2] == 1] for s in states]
        return [[n for [n] in found[5 * d : 5 * d + 5]] for d in range(decks)]

    assert all(sorted(deck) == [0, 1, 2, 3, 4] for deck in secrets(0))
    assert secrets(0) == secrets(0) != secrets(1) and len({str(deck) for deck in secrets(0)}) > 1


@pytest.mark.parametrize("answer, reward", [
    ("s0 s2 s3 .", 1.0), ("s0 s3 s2 .", 0.5 / 3), ("s2 s3 s0 .", 0.0), ("s0 s2 .", 0.0),
    ("s0 s2 s3 s3 .", 0.0), ("s0 s0 s0 .", 0.5 / 3), ("s0 s2 ? .", 1 / 3), (".", 0.0),
])  # fmt: skip
def test_sort_rewards(answer, reward):
    task = SortThree(Config(size=4))
    drawn = {task.show(prompt): state for _, state, prompt in opening(task, range(200))}
    assert converse(task, drawn["s3 s0 s2 ?"], answer) == ([None], reward)


def test_sort_never_trains_on_a_held_out_prompt():
    task = Sort(Config(size=5))
    drawn = [{task.show(p) for _, _, p in opening(task, range(2000), h)} for h in (False, True)]
    assert len(drawn[0]) + len(drawn[1]) == len(drawn[0] | drawn[1]) == 5 * 4 * 3 * 2
    assert 4 < len(drawn[1]) < 24


@pytest.mark.parametrize("answers, heard, reward", [
    (["k1 .", "v2 ."], ["= v2", None], 1.0), (["k1 .", "v0 ."], ["= v2", None], 0.6),
    (["k0 .", "v1 ."], ["= v1", None], 0.6), (["k1 .", "k1 ."], ["= v2", None], 0.5),
    (["v2 ."], [None], 0.0), (["k1 v2 ."], [None], 0.0), (["k1 .", "."], ["= v2", None], 0.5),
])  # fmt: skip
def test_lookup_rewards(answers, heard, reward):
    task, drawn = Lookup(Config(size=3)), {}
    for _, state, prompt in opening(task, range(300)):
        replies = [converse(task, state, f"k{n} .")[0][0] for n in range(3)]
        drawn[task.show(prompt), *replies] = state
    assert converse(task, drawn["? k1", "= v1", "= v2", "= v0"], *answers) == (heard, reward)


def test_demonstrations_are_valid_play_and_only_answers_are_trained():
    task = Lookup(Config(size=4))
    starts = opening(task, range(20))
    played = demonstrations(task, starts, (0, 4, 1))
    for t, (_, state, _) in zip(played, starts, strict=True):
        said = re.fullmatch(r"\? k\d k(\d) \. = (v\d) v\d \.", task.show(t.tokens))
        assert t.mask.tolist() == [0, 1, 1, 0, 0, 1, 1] and not t.sampler_logprobs.any()
        assert converse(task, state, f"k{said[1]} .")[0] == [f"= {said[2]}"]
    assert len({str(t.tokens[2:]) for t in played}) > 15


@pytest.mark.parametrize("text, found", [
    ("6 * 7 = 42\n#### 42", "42"), ("#### 1\nno:\n####  2 \nso", "2"), ("42", None), ("# 42", None),
    ("####42", "42"), ("####", ""), ("#### 5 #### 6", "6"), ("####\nno 5", ""), ("##### 7", "7"),
])  # fmt: skip
def test_the_final_answer_follows_the_last_mark(text, found):
    assert final_answer(text) == found


@pytest.mark.parametrize("a, b, same", [
    ("1,000", "1000", True), ("$1,000.00", "1000", True), ("42.", "42", True), (".5", "0.50", True),
    ("-3", "-3.0", True), ("-$3", "-3", True), ("3", "-3", False), ("42", "43", False),
    ("42 apples", "42", False), ("blue", " blue ", True), ("blue", "red", False), ("", "0", False),
    ("1 000", "1000", True), ("$ 5", "5 %", True), ("1 2", "12", False), ("3, 4", "34", False),
    ("1,00", "100", False), (None, "1", False), (None, None, False), ("nan", "1", False),
    ("1e3", "1000", False),
])  # fmt: skip
def test_answers_are_equal_as_numbers_or_else_as_text(a, b, same):
    assert same_answer(a, b) is same_answer(b, a) is same


# Replies in threads --------------------------------------------------------------------------


class Meeting(Chat):
    """A task whose reply waits until `parties` replies are asked for at the same time."""

    def __init__(self, parties):
        self.barrier = threading.Barrier(parties, timeout=20)
        self.asked = []

    def reply(self, turn, answer):
        self.asked.append((threading.get_ident(), tuple(answer)))
        self.barrier.wait()
        return super().reply(turn, answer)


def test_replies_of_one_decoding_step_are_asked_for_together():
    """12 episodes of one script end their turns together: one by one they would wait for ever."""
    script = dict(groups=range(3), group=4, temperature=0)
    played = play(Meeting(12), Script(SCRIPT), replies=Replies(Meeting(12), 12), **script)
    assert [t.tokens for t in sum(played, [])] == [
        t.tokens for t in sum(play(Chat(), Script(SCRIPT), **script), [])
    ]


def test_threads_change_no_token_and_no_order():
    class Slow(Chat):
        """Answers the later the shorter the answer, so replies come back in another order."""

        def reply(self, turn, answer):
            time.sleep(0.002 / len(answer))
            return super().reply(turn, answer)

    model = random_model(10)
    one, many = (
        play(Slow(), model, group=8, replies=Replies(Slow(), threads)) for threads in (1, 16)
    )
    for a, b in zip(sum(one, []), sum(many, []), strict=True):
        assert a.tokens == b.tokens and a.turn_rewards == b.turn_rewards
        assert (a.sampler_logprobs == b.sampler_logprobs).all()


def test_a_task_that_is_not_safe_in_threads_is_asked_by_one():
    task = Meeting(1)
    task.threads = False
    play(task, Script(SCRIPT), temperature=0, replies=Replies(task, 16))
    assert {thread for thread, _ in task.asked} == {threading.get_ident()}


class Broken(Chat):
    def __init__(self, reply):
        self.say = reply

    def reply(self, turn, answer):
        return self.say(turn)


BROKEN = [  # a reply to a turn, how many threads ask for it, and what is said of it
    (lambda turn: {}["no mood"], 4, "KeyError: 'no mood' .*, in <lambda>"),
    (lambda turn: (turn, None, math.nan), 1, "gave reward nan in group 6, rollout 0.*'1 2 9'"),
    (lambda turn: (turn, [3, 10], 0.0), 1, r"replied \[3, 10\] in group 6, .*: ids end at 9"),
]


# 5. Errors, files, checkpoints ---------------------------------------------------------------


@pytest.mark.parametrize("reply, threads, message", BROKEN)
def test_an_error_of_a_reply_is_raised_also_from_a_thread(reply, threads, message):
    task = Broken(reply)
    with pytest.raises(ValueError, match=message):
        how = dict(groups=[6], temperature=0, replies=Replies(task, threads))
        play(task, Script(SCRIPT), **how)


@pytest.mark.parametrize("prompt", [[], [3, 10], [-1], [1] * 84])
def test_a_prompt_that_cannot_be_played_is_refused(prompt):
    starts, how = [(4, 1, [0]), (5, 1, prompt)], dict(group=2, max_new_tokens=16, temperature=0)
    shape = models.tiny("qwen3", vocab_size=10, max_position_embeddings=99)
    model = Transformer(shape).init_weights(0)
    with pytest.raises(ValueError, match="prompts: expected|0..9|a prompt of 84 tokens"):
        rollout(model, Chat(), starts, key=(0, 0), **how)


OWN_TASK = """
from train_grpo import Task

class Echo(Task):
    vocab_size, end = 4, (3,)

    def __init__(self, config):
        self.word = config.size

    def prompt(self, rng, index, held_out):
        return None, [self.word]

    def reply(self, state, answer):
        return state, None, float(answer == [self.word, 3])

class Endless(Echo):
    end = (4,)

class Slotted:
    __slots__ = ()
    vocab_size, end = 4, (3,)
    def __init__(self, config): pass
    def show(self, tokens): return "x"
    def prompt(self, rng, index, held_out): return None, [0]
    def reply(self, state, answer): return 3
"""


def test_a_task_in_a_file_of_its_own_is_played_and_may_have_slots(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_TASK)
    task = task_of(f"{tmp_path / 'mine.py'}:Echo", size=2)
    how = dict(groups=[0], group=1, temperature=0)
    [[t]] = play(task, Script([2, 2, 3], vocab=4), **how)
    assert (t.tokens, t.reward, task.show(t.tokens)) == ([2, 2, 3], 1.0, "2 2 3")
    task = task_of(f"{tmp_path / 'mine.py'}:Slotted")
    with pytest.raises(ValueError, match="TypeError: cannot unpack.*mine.py"):
        play(task, Script([2, 2, 3], vocab=4), **how)


@pytest.mark.parametrize("task, message", [
    ("mine.py:Nothing", "mine.py has no class 'Nothing'"), ("mine.py:", "has no class ''"),
    ("mine.py:Endless", r"Endless needs vocab_size and end, .* got 4 and \(4,\)"),
    ("other.py:Echo", "'other.py:Echo' is none of guess, jsonl.* no FILE.py:Class"),
    ("gues", "'gues' is none of guess"),
])  # fmt: skip
def test_a_task_that_cannot_be_had_says_what_is_missing(tmp_path, monkeypatch, task, message):
    (tmp_path / "mine.py").write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        task_of(task)


LINES = [{"question": f"What is {n} and {n}?", "answer": f"It is\n#### {2 * n}"} for n in range(40)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with random weights and a byte-level BPE tokenizer of a few sentences."""
    tokenizers = pytest.importorskip("tokenizers", reason="makes a tokenizer.json")
    pytest.importorskip("transformers", reason="jsonl reads it")
    pytest.importorskip("safetensors", reason="checkpoints are safetensors")
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
    shape = models.tiny(vocab_size=size, eos_token_id=(0,), max_position_embeddings=48)
    models.save_hf(Transformer(shape).double().init_weights(0), path)
    return path


@pytest.fixture
def folder(checkpoint, tmp_path, monkeypatch):
    """A working directory with what the README's commands call DIR and questions.jsonl."""
    (tmp_path / "DIR").symlink_to(checkpoint)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(checkpoint, folder, *extra_lines, **options):
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "\n".join(extra_lines))
    options = dict(model=str(checkpoint), max_new_tokens=16, dtype="float64") | options
    return Config(task="jsonl", data=str(data), **{"template": "{question}\n"} | options)


def test_jsonl_is_played_with_the_checkpoints_tokens_and_holds_a_tenth_out(checkpoint, tmp_path):
    config = jsonl(checkpoint, tmp_path, template="Q: {question} A:")
    task = make_task(config)
    model = models.load_hf(checkpoint, dtype=torch.float64).requires_grad_(False)
    played = sum(assert_by_hand(model, task, range(20), 0.9), [])
    trained, held_out = (
        {task.show(prompt) for _, _, prompt in opening(task, range(400), h)} for h in (False, True)
    )
    assert trained | held_out == {f"Q: {line['question']} A:" for line in LINES}
    assert not trained & held_out and 1 <= len(held_out) <= 8
    assert all(task.show(t.tokens).startswith("Q: What is") for t in played)


def test_jsonl_rewards_the_gold_answer_and_demonstrates_it(checkpoint, tmp_path):
    task = make_task(jsonl(checkpoint, tmp_path))
    (line, _), _ = task.prompt(np.random.default_rng(0), 0, False)

    def reward(gold, text):
        state = line._replace(row={"answer": gold}), ()
        _, reply, reward = task.reply(state, [*task.text.encode(text), 0])
        assert reply is None
        return reward

    answers = {"#### 1234.0": 1.0, "1234": 0.0, "#### 12": 0.0, "#### 1\n#### 1234": 1.0, "": 0.0}
    assert {text: reward("so\n#### 1,234", text) for text in answers} == answers
    assert reward("Paris", "#### Paris ") == 1.0
    for t in demonstrations(task, opening(task, range(3)), (0,)):
        assert (t.reward, t.tokens[-1], t.mask[-1]) == (1.0, 0, True)


@pytest.mark.parametrize("line", [
    "{", '"text"', "[1]", '{"question": "1?"}', '{"question": 1, "answer": "1"}',
    json.dumps({"question": "word " * 40, "answer": "1"}),
])  # fmt: skip
def test_a_bad_line_of_jsonl_is_named_by_its_number(checkpoint, tmp_path, line):
    message = r"data.jsonl line 41:? (it )?(holds no |a prompt of \d+ )"
    with pytest.raises(ValueError, match=message):
        make_task(jsonl(checkpoint, tmp_path, line))


def test_what_jsonl_lacks_is_named(checkpoint, tmp_path):
    def refuses(message, **options):
        with pytest.raises(ValueError, match=message):
            make_task(jsonl(checkpoint, tmp_path, **options))

    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    refuses("tokenizer.json", model=str(tmp_path))
    raw = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    refuses("nothing ends a turn", model=str(tmp_path))
    (tmp_path / "few.jsonl").write_text(json.dumps(LINES[0]))
    with pytest.raises(ValueError, match="too small to hold every tenth prompt out"):
        make_task(Config(task="jsonl", data=str(tmp_path / "few.jsonl"), model=str(checkpoint)))


def test_demonstrations_of_a_task_without_an_end_stop_at_the_limit():
    class Endless(Task):
        vocab_size, end = 3, (2,)

        def reply(self, state, answer):
            return state, [0], 0.0

        def demo(self, state, rng):
            return [1, 2]

    (t,) = demonstrations(Endless(), [(0, None, [0])], (0,), max_new_tokens=7)
    assert len(t.tokens) == 1 + 9 and t.mask.sum() == 6

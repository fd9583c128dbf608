"""Play rollouts that fork, ask slow tasks from threads, and decode with a model that is split.

Without these three it is `train_grpo.Episode` and nothing else: skip it.

Letters:  B trajectories   T positions of their padded log-prob vectors (the targets are tokens[1:],
so a trajectory of L tokens has L - 1)   P groups of G rollouts each
"""

import copy
import dataclasses
import functools
import math
import os
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

import train_grpo
from full.learn.generate import Turns, decode
from full.model.experts import end_together
from full.model.parallelize import copy_weights
from full.ranks.joining import ReplyTimeout, Stop, errors_on_all_ranks, summed
from full.ranks.places import gather_replica
from train_grpo import EVALUATION


def as_reward(x) -> float:
    """Return a task's reward as a float, or NaN if it is not a finite number."""
    try:
        x = x.item() if hasattr(x, "item") else x  # an array of one number
        return float(x) if math.isfinite(x) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


@dataclass
class Trajectory:
    """One rollout. Its vectors have an entry for each of the T targets, which are tokens[1:]."""

    group: int
    tokens: list[int]
    mask: np.ndarray  # bool: sampled by the policy, and counts in the loss
    sampler_logprobs: np.ndarray  # float64, 0 where not sampled
    truncated: bool = False
    prompt: int = 0  # tokens before the policy's first turn
    turn_rewards: list = field(default_factory=list)  # (index of a turn's last target, reward)
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None  # None: the policy's own, detached
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None  # of the critic, before the step
    returns: np.ndarray | None = None

    def __post_init__(self):
        self.sampled = self.mask  # stays when `overlong` takes it out of the loss
        # Added turn by turn: 0.1 + 0.2 + 0.3 is more than 0.3 + 0.3, and two sums may be compared.
        self.reward = 0.0
        for _, reward in self.turn_rewards:
            self.reward += reward

    def to_json(self) -> dict:
        """Return the tokens, log-probs and rewards as JSON values, which keep every bit."""
        return {
            "tokens": list(map(int, self.tokens)), "sampled": self.sampled.astype(int).tolist(),
            "logprobs": self.sampler_logprobs.tolist(), "truncated": bool(self.truncated),
            "rewards": [list(pair) for pair in self.turn_rewards], "prompt": self.prompt,
        }  # fmt: skip

    @classmethod
    def from_json(cls, group, row, shape):
        """Return the trajectory that `to_json` wrote; ValueError if no model can train on it.

        shape: the `ModelConfig` of the model.
        """
        # Anybody may have written the file. An id past the vocabulary would read other memory.
        tokens = row["tokens"]
        if not all(type(t) is int and 0 <= t < shape.vocab_size for t in tokens):
            raise ValueError(f"group {group}: expected token ids under {shape.vocab_size}, got "
                             f"{tokens}")  # fmt: skip
        mask = np.array(row["sampled"], dtype=bool)
        logprobs = np.array(row["logprobs"], dtype=np.float64)
        if mask.shape != (len(tokens) - 1,) or logprobs.shape != mask.shape:
            raise ValueError(f"group {group}: expected a mask and log-probs of {len(tokens) - 1}")
        rewards = [(int(at), float(reward)) for at, reward in row["rewards"]]
        return cls(group, tokens, mask, logprobs, row["truncated"], int(row["prompt"]), rewards)


class ForkingEpisode(train_grpo.Episode):
    """An `Episode` for the rollouts number .. number + count - 1 of its group, until it forks.

    count: int. 1 without tree rollouts. Until it is 1, the episode forks at each end of a turn.
    """

    is_local = True  # False: another rank has the task's state of this episode

    def __init__(self, key, group, number, state, prompt, limit, count=1):
        super().__init__(key, group, number, state, prompt, limit)
        self.key = key
        self.number = number
        self.count = count
        self.prompt = self.turn  # its number of tokens
        self.turn_rewards = []
        self.answer = ()  # the task's new state, reply and reward, after a turn has ended

    def hear(self, state, reply, reward):
        """Take the task's answer to the turn. Return whether the episode continues."""
        # The reward is at the turn's last target, whose index is one less than its token's.
        self.turn_rewards = [*self.turn_rewards, (len(self.tokens) - 2, float(reward))]
        return super().hear(state, reply, reward)

    def fork(self, forks) -> list:
        """Return the episodes that continue in the place of this one: itself, or its children."""
        # An episode for rollouts 4 5 6 7 becomes with forks 2 one for 4 5 and one for 6 7. Each
        # draws by the key of its own first rollout, so its tokens do not depend on its siblings.
        if self.count == 1:
            return [self]
        children = []
        share = self.count // forks
        for first in range(self.number, self.number + self.count, share):
            child = copy.copy(self)
            for name in ("tokens", "mask", "logprobs", "queue"):
                setattr(child, name, getattr(self, name).copy())
            child.draws = train_grpo.uniforms((*self.key, self.group, first), len(self.draws))
            child.number = first
            child.count = share
            children.append(child)
        return children

    def trajectories(self) -> list:
        """Return a Trajectory for each rollout of this episode: equal ones if it never forked."""
        logprobs = np.array(self.logprobs)
        # NUMERICS: a token whose sampler log-prob is not finite has no ratio: it leaves loss and Z.
        # Pinned by tests/full/test_rollout.py::test_non_finite_sampler_logprobs_leave_the_loss.
        mask = np.array(self.mask, dtype=bool) & np.isfinite(logprobs)
        logprobs = np.where(mask, logprobs, 0.0)
        fields = self.group, self.tokens, mask, logprobs, self.truncated, self.prompt
        return [Trajectory(*fields, self.turn_rewards) for _ in range(self.count)]


REPLY_THREADS = 16
LOOK_EVERY = 0.2  # seconds between two checks of pending replies
GRACE = 5  # seconds that replies may still take after a signal


class ReplyPool:
    """Ask a task about episodes whose turn has ended, from several threads.

    A tool may take seconds. The replies are put in the order of the episodes, so threads change no
    result. A task that must not be asked by several threads has the attribute `threads = False`.

    limit: seconds that a reply may take, or 0. After them, and some seconds after a signal, the
        threads are left alone and ReplyTimeout is raised.
    """

    def __init__(self, task, limit=0):
        self.task = task
        self.name = type(task).__name__
        self.limit = limit
        self.began = {}  # id of an episode -> when a thread began to ask about it
        # The replies of `guess`, and of `jsonl` without a function, are arithmetic: a thread would
        # cost more than the reply.
        is_arithmetic = getattr(task, "is_arithmetic", type(task) is train_grpo.Guess)
        has_threads = getattr(task, "threads", True) and not is_arithmetic
        self.threads = ThreadPoolExecutor(REPLY_THREADS) if has_threads else None

    def ask(self, episodes):
        """Set `answer` of each episode."""
        # The run's relative paths would name other files.
        directory = os.getcwd()
        try:
            answers = self.replies(episodes)
            if os.getcwd() != directory:
                raise ValueError(f"expected {self.name} to stay in the working directory "
                                 f"{directory}, got {os.getcwd()} after a reply or reward")
        except (Exception, SystemExit):
            # The threads end with their pool, which a program that keeps the error would keep too.
            if self.threads:
                self.threads.shutdown(wait=False, cancel_futures=True)
            os.chdir(directory)
            raise
        for episode, answer in zip(episodes, answers):
            episode.answer = answer

    def replies(self, episodes) -> list:
        if not self.threads:
            return [self.ask_one(episode) for episode in episodes]
        self.began.clear()
        asked = {self.threads.submit(self.ask_one, episode): episode for episode in episodes}
        pending = asked.keys()
        while pending:
            done, pending = wait(pending, LOOK_EVERY, FIRST_EXCEPTION)
            for future, episode in asked.items():  # in the order of the episodes
                if future in done:
                    future.result()
                elif future in pending:
                    self.require_in_time(episode)
        return [future.result() for future in asked]

    def ask_one(self, episode) -> tuple:
        """Return the task's new state, reply and reward, or raise ValueError if they cannot be."""
        self.began[id(episode)] = time.monotonic()
        task = self.task
        answer = episode.tokens[episode.turn :]
        try:
            state, reply, reward = task.reply(episode.state, answer)
            # A token outside the vocabulary would be read from whatever lies past the embedding.
            is_known = reply is None or all(0 <= token < task.vocab_size for token in reply)
        except StopIteration as error:  # a generator would replace it by an error without a note
            raise RuntimeError(f"StopIteration in {self.name}.reply {self.place_of(episode)}"
                               ) from error  # fmt: skip
        except (Exception, SystemExit) as error:
            error.add_note(self.place_of(episode))
            raise
        number = as_reward(reward)
        if math.isnan(number):
            raise ValueError(f"{self.name} gave reward {reward!r:.80} {self.place_of(episode)}, "
                             f"for the answer {task.show(answer)!r}: rewards must be finite "
                             f"numbers")  # fmt: skip
        if not is_known:
            raise ValueError(f"{self.name} replied {reply} {self.place_of(episode)}: ids end at "
                             f"{task.vocab_size - 1}")  # fmt: skip
        return state, reply, number

    def require_in_time(self, episode):
        now, stop = time.monotonic(), Stop.current
        seconds = now - self.began.get(id(episode), now)
        number = stop.number if stop and stop.number and now > stop.seen_at + GRACE else 0
        if number or 0 < self.limit < seconds:
            answer = self.task.show(episode.tokens[episode.turn :])[:200]
            raise ReplyTimeout(f"{self.name} has not replied after {seconds:.0f} s "
                               f"{self.place_of(episode)}, to the answer {answer!r}", number)

    def place_of(self, episode) -> str:
        line = self.task.where(episode.state) if hasattr(self.task, "where") else ""
        return f"in group {episode.group}, rollout {episode.number}" + (f", {line}" if line else "")


class Sampler:
    """Sample with a model of this process, or of the ranks that its plan splits it over.

    Another sampler needs `push` and `generate`. One that samples while this process trains also has
    `start`, see `at_once`, and `group`: the process group of the functions that it started.
    """

    def __init__(self, model):
        self.model = model

    def push(self, model, optimizer, version):
        """Take a policy's weights, one tensor at a time, in this model's dtype. Collective."""
        # Weights that both models hold in one memory need no copy: see `share_or_allocate`.
        copy_weights(model, self.model, optimizer)

    def generate(self, rows, /, *, max_new_tokens, ending=None, after=None, **options) -> list:
        """Decode this rank's rows. Collective under a plan: they are `ForkingEpisode`s then.

        max_new_tokens, ending, after: as in `Turns`. options: of `decode`.
        """
        part = getattr(self.model, "part", None)
        if part is None or part.plan.world == part.plan.dp:
            return self.decode(rows, Turns(max_new_tokens, ending, after), options)

        # Ranks that decode together decode the rows of all of them. The draws are the rows' own,
        # and the logits are the same on all of these ranks, so they sample the same tokens.
        # NUMERICS: an all-reduce and an all-gather give every rank the same bits, and all that
        # follows is computed identically. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        own = [(row.key, row.group, row.number, None, row.tokens, len(row.draws), row.count)
               for row in rows]  # fmt: skip
        arguments, first = gather_replica(self.model, own)
        together = [ForkingEpisode(*x) for x in arguments]
        for episode in together:
            episode.is_local = False
        together[first : first + len(rows)] = rows
        turns = Turns(max_new_tokens, functools.partial(self.ask_once, ending), after)
        # Each rank keeps its own rows.
        return [row for row in self.decode(together, turns, options) if row.is_local]

    def decode(self, rows, turns, options) -> list:
        """Decode rows, and serve this rank's experts until the other ranks have decoded theirs."""
        try:
            ended = decode(self.model, rows, turns, **options)
        except ReplyTimeout:  # between two model calls, so that the others can go on
            end_together(self.model)
            raise
        end_together(self.model)
        return ended

    def ask_once(self, ask, episodes):
        """Let each rank ask its task about its own episodes, and share the answers. Collective."""
        # A task may be random, or answer by the clock: two ranks that asked by themselves might
        # decode different tokens, and wait for each other for good.
        own = [n for n, episode in enumerate(episodes) if episode.is_local]
        with errors_on_all_ranks(self.model.part.grid.group["pct"]):
            ask([episodes[n] for n in own])

        # COMM: one message of each rank for all turns that a decoding step has ended; states stay.
        # Pinned by tests/full/test_sampler.py::test_a_task_is_asked_once.
        parts, _ = gather_replica(self.model, [{n: episodes[n].answer[1:] for n in own}])
        for answers in parts:
            for n in answers.keys() - {*own}:
                episodes[n].answer = (None, *answers[n])


def at_once(function, *args) -> Future:
    """Call a function that samples, and return a Future that has its result.

    It is the `start` of a sampler in this process: its device cannot train meanwhile. A `start` of
    another sampler returns at once, and calls functions one after another.
    """
    future = Future()
    future.set_result(function(*args))
    return future


def play(config, task, sampler, starts, key) -> list:
    """Play every start `group` times. Return lists of trajectories, by group, in rollout order.

    starts: list of (group number, state, prompt tokens), of this rank.
    sampler: a `Sampler`, or an object with its methods.
    key: (seed, step). Draw t of rollout r of group g is uniforms((seed, step, g, r))[t].

    Collective under a plan.
    """
    # Without forks one episode for each rollout. With them each begins as `share` rollouts: group
    # 4, forks 2, fork_turns 1 begins with episodes 0 and 2, which represent rollouts 0 1 and 2 3.
    share = config.forks**config.fork_turns
    limit = config.max_new_tokens  # of a trajectory after its prompt, the task's replies included
    episodes = [
        ForkingEpisode(key, number, first, state, prompt, limit, share)
        for number, state, prompt in starts for first in range(0, config.group, share)
    ]  # fmt: skip

    # `decode` computes equal prompts once, lets a waiting episode enter where one has ended, and
    # calls `ending` with all whose turn has ended, then `after` with each. An episode that will
    # fork reserves a slot for each rollout, so that a fork finds its parent's keys in the cache.
    def after(episode):
        return episode.fork(config.forks) if episode.hear(*episode.answer) else []

    ended, late = [], None
    try:
        ended = sampler.generate(
            episodes, max_new_tokens=limit, temperature=config.temperature, end=task.end,
            ending=ReplyPool(task, config.reply_timeout).ask, after=after, slots=config.batch_rows,
        )  # fmt: skip
    except ReplyTimeout as error:
        late = error

    # Episodes end in any order; a group's rollouts are put back into theirs.
    groups = {number: [] for number, _, _ in starts}
    for episode in sorted(ended, key=lambda episode: episode.number):
        groups[episode.group] += episode.trajectories()

    # All ranks give the step up together, as all of them have to save. A rollout that a sampler
    # left out would count as one of reward 0.
    with errors_on_all_ranks(getattr(sampler, "group", None)):
        if late is not None:
            raise late
        for number, group in groups.items():
            if len(group) != config.group:
                raise ValueError(f"expected {config.group} rollouts of group {number} from "
                                 f"{type(sampler).__name__}.generate, got {len(group)}")
    return list(groups.values())


def prompt_rng(seed, stream, step, group):
    """Return the generator of one prompt. stream: ROLLOUT or EVALUATION."""
    # numpy pads a key of fewer than four numbers with zeros. So this key may equal another one:
    # [seed, 1, 0, 0] is deck [seed, 1] of `train_grpo.deal`. `guess` deals, but reads no number of
    # its prompts' generators. A task that does both should add a number to the key of its decks.
    return np.random.default_rng([seed, stream, step, group])


def draw_prompts(config, task, stream, step, groups, first=0, held_out=False):
    """Return (group, state, prompt tokens) for each group of a step that this rank plays.

    stream: ROLLOUT or EVALUATION. It and step are part of the generators' keys.
    groups: group numbers of the step, of all ranks.
    first: number of the step's first prompt, counted from the start of the run.
    """
    # Group g is on rank g mod world: rank 1 of 2 plays 1, 3, 5 of six. Its generator is seeded by
    # its number and not by the rank, so any number of ranks plays the same games.
    starts = []
    for group in groups:
        if group % dist.get_world_size() == dist.get_rank():
            rng = prompt_rng(config.seed, stream, step, group)
            state, prompt = task.prompt(rng, first + group, held_out)
            starts.append((group, state, prompt))
    return starts


def prompts_of_evaluation(config, task) -> int:
    """Return how many prompts an evaluation asks: eval_prompts, but each prompt equally often."""
    # With 15 held-out lines, 70 prompts would be ten lines five times and five lines four times.
    # A line is asked once. `guess` has few secrets, and asks each of 7 ten times.
    asked = config.eval_prompts
    if isinstance(task, train_grpo.Guess):
        return asked // task.size * task.size or asked
    return min(asked, getattr(task, "held_out", None) or asked)


def play_held_out(config, task, sampler, *, group=1, temperature=0.0):
    """Play each held-out prompt `group` times, by default once and greedily. Collective.

    Returns the starts of this rank, as of `draw_prompts`, and the lists of trajectories.
    """
    prompts = range(prompts_of_evaluation(config, task))
    starts = draw_prompts(config, task, EVALUATION, 0, prompts, held_out=True)
    # These rollouts are not trained on, so they do not fork.
    plain = dict(forks=1, fork_turns=0)
    config = dataclasses.replace(config, group=group, temperature=temperature, **plain)
    # Samples have random numbers of their own: a key of five numbers, one more than a rollout's,
    # which numpy does not pad.
    return starts, play(config, task, sampler, starts, key=(config.seed, EVALUATION, 0))


def evaluate(config, task, sampler):
    """Return the fraction of held-out prompts solved greedily, and a trajectory to show."""
    _, groups = play_held_out(config, task, sampler)

    # Each rank has played its own prompts; the sum over ranks is of all.
    solved_here = len([group for group in groups if group[0].reward >= 1])
    (solved,) = summed([solved_here])
    return solved / prompts_of_evaluation(config, task), groups[0][0] if groups else None

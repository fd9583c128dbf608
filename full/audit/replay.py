"""Replay a run's step: read what the run recorded, and let the task say each rollout again.

    rollouts.jsonl     the tokens of each rollout, which of them were sampled, log-probs, rewards
    metrics.jsonl      the numbers of each step
    step-NNNNNNNN      the state before that step

The task and the seed determine prompts, replies, rewards and random draws. No model is needed here;
audit.py has the models' part of a step.
"""

import dataclasses
import functools
import itertools
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import train_grpo
from conformance import definition
from conformance.sequences import Sequence, distance, gae
from full.learn.rollouts import Trajectory, as_reward, draw_prompts
from full.learn.trainer import Trainer
from full.ranks.checkpoint import checkpoints
from full.run.build import ONE_PROCESS, build
from full.run.config import resumed_config
from full.run.directory import RunDirectory, auditable_steps, step_of
from train_grpo import ROLLOUT

# What a run has recorded --------------------------------------------------------------------------


class RunFiles:
    """Read a run's directory. No file that the run names is imported: task and reward are given."""

    def __init__(self, run, task="", reward=""):
        self.directory = RunDirectory(run)
        if not self.directory.config.exists():
            raise ValueError(f"expected the directory of a run, got {run}: it holds no config.json")
        given = {name: spec for name, spec in (("task", task), ("reward", reward)) if spec}
        self.stored = resumed_config(self.directory.config, given)

        # One process reads a run, whatever devices, ranks or engines it had. What the run computed
        # because of them is asked of the stored settings.
        alone = dict(device="cpu", engine="", exact=False)
        self.config = dataclasses.replace(self.stored, **alone, **ONE_PROCESS).check()
        self.directory.require_same_digests("base.json", self.stored)
        self.metrics = self.directory.lines(RunDirectory.METRICS)
        for n, line in enumerate(self.metrics):
            if line.get("step") != n:
                raise ValueError(f"line {n + 1} of metrics.jsonl is of step {line.get('step')!r}")
        self.checkpoints = {step_of(path): path for path in checkpoints(self.directory.path)}

    def chosen(self, step) -> tuple:
        """Return the step to audit, and the steps whose checkpoints the policy and sampler had.

        step: Default: the last that can be audited.
        """
        if step is not None and not 0 <= step < len(self.metrics):
            raise ValueError(f"expected one of the {len(self.metrics)} steps of metrics.jsonl, got "
                             f"step {step}")  # fmt: skip
        can = auditable_steps(self.config, self.directory)
        can = {n: before for n, before in can.items() if n < len(self.metrics)}
        if not can or step not in (None, *can):
            there = ", ".join(map(str, sorted(can))) or "none"
            raise ValueError(f"expected a step with all rollouts and a checkpoint before it "
                             f"({there}), got {step}; save_every 1 and keep leave more")
        if step is None:
            step = max(can)
            newest = max(self.checkpoints, default=0) - 1
            if newest > step:
                print(f"step {newest} is left out: its rollouts, metrics or a checkpoint before "
                      f"it are missing or damaged", file=sys.stderr)  # fmt: skip
        return step, *can[step]

    def write_first_weights(self, task, folder):
        """Write the checkpoint before step 0, which seed and model determine."""
        model, generator, reference = build(self.config, task)
        trainer = Trainer(self.config, model, generator=generator, reference=reference)
        self.checkpoints[0] = Path(folder, "step-00000000")
        trainer.save_checkpoint(self.checkpoints[0], step=0)

    def rollouts(self, step, shape) -> dict:
        """Return {group: lines} of a step. ValueError for a line that is not a rollout."""
        groups = {}
        for number, line in enumerate(self.directory.each_line(RunDirectory.ROLLOUTS), 1):
            if line.get("step") != step:
                continue
            try:
                t = Trajectory.from_json(line["group"], line | {"prompt": 0}, shape)
                A = line["advantage"]  # None: the group was not trained on
                if len(t.tokens) < 2 or A is not None and len(A) != len(t.mask):
                    raise ValueError("expected a number for each target")
                groups.setdefault(t.group, {})[int(line["rollout"])] = line
            except (ValueError, TypeError, KeyError) as error:
                text = f"rollouts.jsonl line {number} is not a rollout: {error}"
                raise ValueError(text) from error
        return {n: [groups[n][i] for i in sorted(groups[n])] for n in sorted(groups)}


def settings(config) -> dict:
    """Return the settings of the step kit that are a run's."""
    given = {x: getattr(config, x) for x in definition.DEFAULTS if hasattr(config, x)}
    given |= dict(largest_d=10.0, clip_eps=0.0, critic="separate")
    if config.objective == "cispo":
        given |= dict(clip_low=1.0, clip_high=config.cispo_bound - 1)
    return given


# Rollouts -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Rollout:
    """A line of rollouts.jsonl, and what the task says of it again."""

    group: int
    number: int  # in its group
    line: dict
    at: list = field(default_factory=list)  # places of the sampled tokens
    rewards: list = field(default_factory=list)  # (place of a turn's last token, reward)
    prompt: int = 0  # tokens before the first turn
    differs: int = 0  # wrong or missing tokens in what the task said
    truncated: bool = False

    @property
    def tokens(self):
        return self.line["tokens"]

    @property
    def reward(self):
        # Added as the run adds, since two sums may be compared: 0.1 + 0.2 + 0.3 is more than
        # 0.3 + 0.3.
        return functools.reduce(float.__add__, [reward for _, reward in self.rewards], 0.0)

    def replay(self, config, task, state, prompt):
        """Let the task answer the sampled tokens again.

            ?  3  .  higher  5  .        the prompt, a turn, the reply, a turn
               x  x          x  x        sampled: places 1 2 and 4 5, in `at`
        """
        def expect(tokens, place):
            pairs = zip(tokens, self.tokens[place:])
            self.differs += sum(token != other for token, other in pairs)
            return place + len(tokens)

        self.prompt = place = turn = expect(prompt, 0)
        ended = False
        while place < len(self.tokens) and not ended:
            self.at.append(place)
            place += 1
            if self.tokens[place - 1] not in task.end:
                continue

            # The turn is over. The task's reply follows, as far as there is room.
            state, reply, reward = task.reply(state, self.tokens[turn:place])
            self.rewards.append((place - 1, as_reward(reward)))
            ended = reply is None
            place = turn = expect(reply or (), place)

        # A rollout ends where the task says so, or at the limit. Tokens past its end were never
        # said, and a rollout that neither ended nor met the limit lacks some.
        limit = len(prompt) + config.max_new_tokens
        self.truncated = not ended
        self.differs += abs(len(self.tokens) - (min(place, limit) if ended else limit))

    @property
    def missampled(self):
        """How many tokens are noted as sampled and were not, or the other way round."""
        return len({t + 1 for t, on in enumerate(self.line["sampled"]) if on} ^ {*self.at})

    def compared_rewards(self) -> tuple:
        """Return the recorded sum, the replayed sum, and the largest difference of a turn."""
        recorded, replayed = {at + 1: x for at, x in self.line["rewards"]}, dict(self.rewards)
        differences = [distance(recorded.get(t, 0.0), replayed.get(t, 0.0))
                       for t in {*recorded, *replayed}]  # fmt: skip
        if bool(self.line["truncated"]) != self.truncated:
            differences.append(1.0)
        return sum(recorded.values()), sum(replayed.values()), max(differences, default=0.0)

    def first_sharer(self, config, place) -> int:
        """Return the first rollout of those that share the turn of a place."""
        # With 2 forks at each of 2 turns a prompt is played for 4 rollouts until turn 1 ends, then
        # for 2 until turn 2 ends. Rollout 3 shares turns with rollouts 0 to 3, 2 and 3, and none.
        turn = len([end for end, _ in self.rewards if end < place])
        count = config.forks ** max(0, config.fork_turns - turn)
        return self.number - self.number % count

    def draws(self, config, step) -> list:
        """Return the random number of each place. Rollouts share those of a turn they share."""
        @functools.cache
        def draws_of(first):
            key, count = (config.seed, step, self.group, first), len(self.tokens) - self.prompt
            return [0.0] * self.prompt + train_grpo.uniforms(key, count).tolist()

        return [draws_of(self.first_sharer(config, t))[t] for t in range(len(self.tokens))]

    def sequence(self, place, world=1, **columns) -> Sequence:
        """Return the rollout as a Sequence of the step kit."""
        sampled = {*self.at}
        A = self.line["advantage"]
        T = len(self.tokens)
        columns = dict(
            mask=[t in sampled for t in range(T)], sampled=len(sampled),
            sampler_logprobs=[0.0, *self.line["logprobs"]], width=T, length=T, groups=self.group,
            advantages=None if A is None else [0.0, *A], rank=self.group % world,
        ) | columns  # fmt: skip
        return Sequence(place, self.tokens, **columns)

    def set_rewards(self, c, s):
        """Set a Sequence's rewards, minus the penalties of KL and length, and its returns."""
        ref = s.ref_logprobs or s.tokens  # without a KL, it is not read
        trained = SimpleNamespace(
            smp=[s.sampler_logprobs[t] for t in self.at], ref=[ref[t] for t in self.at])
        lost = definition.penalties(c, trained)
        if lost:
            lost[-1] += definition.overlong_penalty(c, len(self.tokens) - self.prompt)
        s.rewards = self.reward - math.fsum(lost)
        s.token_rewards = [0.0] * len(s.tokens)
        for t, x in zip(self.at, lost):
            s.token_rewards[t] -= x
        for end, reward in self.rewards:
            s.token_rewards[max(t for t in self.at if t <= end)] += reward
        if c.advantage == "gae":
            s.returns = [0.0] * len(s.tokens)
            for t, A in zip(s.at, gae(c, s)):
                s.returns[t] = s.values[t] + A


def replay(config, task, step, lines) -> dict:
    """Return {group: Rollouts} of a step's lines."""
    # The prompts are a function of (seed, step, group).
    first, groups = step * config.prompts * config.max_rounds, {}
    for n, state, prompt in draw_prompts(config, task, ROLLOUT, step, lines, first=first):
        groups[n] = [Rollout(n, i, line) for i, line in enumerate(lines[n])]
        for rollout in groups[n]:
            rollout.replay(config, task, state, prompt)
    return groups


def is_kept(config, group) -> bool:
    """Return whether a group is trained on: dynamic sampling drops groups of equal rewards."""
    return not config.dynamic_sampling or len({r.reward for r in group}) > 1


def groups_played(config, groups) -> int:
    """Return how many groups a step plays: in each round, as many new ones as are missing."""
    played = chosen = 0
    for _ in range(config.max_rounds):
        new = range(played, played + config.prompts - chosen)
        chosen += sum(n not in groups or is_kept(config, groups[n]) for n in new)
        played = new.stop
    return played


def minibatches(config, groups) -> list:
    """Return the rollouts of each optimizer step: lists, in the order of the run."""
    kept, U = [n for n in groups if is_kept(config, groups[n])], config.minibatches
    ends = [n * len(kept) // U for n in range(U + 1)]
    return [[r for n in kept[a:b] for r in groups[n]] for a, b in zip(ends, ends[1:])]


def mean(numbers) -> float:
    return math.fsum(numbers) / max(1, len(numbers))


def rollout_metrics(config, groups) -> dict:
    """Return the metrics of a step's rollouts that no model has a part in."""
    played = list(itertools.chain(*groups.values()))
    R = [[r.reward for r in group] for group in groups.values()]
    every, lengths = [r.reward for r in played], [len(r.at) for r in played]
    compared = [every] if config.advantage in ("gae", "none_batch") else R
    return {
        "reward/mean": mean(every), "reward/solved": mean([x >= 1 for x in every]),
        "reward/groups_none": mean([max(x) < 1 for x in R]),
        "reward/groups_all": mean([min(x) >= 1 for x in R]),
        "reward/groups_equal": mean([min(x) == max(x) for x in compared]),
        "reward/values": len({r.reward for r in played if not r.truncated}),
        "tokens/generated": sum(lengths), "length/max": max(lengths),
        "tokens/truncated_fraction": mean([r.truncated for r in played]),
        "length/rollout_mean": mean(lengths),
    }  # fmt: skip

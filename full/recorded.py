"""What a run has recorded, and the state before a step: adds a reader to `train_grpo.train`.

The files of a run's directory, its rollouts as the task says them again, the models of its
checkpoints. Where a file is missing, the ordinary code fills it in: it goes on from the checkpoint
before. Nothing is written in the directory.
"""

import dataclasses
import functools
import gc
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from conformance import definition
from full.batches import RolloutQueue, SampledBatch, pending_batches
from full.build import build, build_teacher, empty_policy, shape_of
from full.checkpoint import checkpoints, read_checkpoint
from full.config import resumed_config
from full.directory import RunDirectory
from full.export import ONE_PROCESS, policy_in
from full.hf import load_hf
from full.logs import do_step, rollout_line
from full.lora import plain
from full.model_config import ModelConfig
from full.places import set_tensor
from full.rollouts import Trajectory, draw_prompts
from full.tasks import bare
from full.trainer import CRITIC, Trainer, empty_critic, keep_wide
from train_grpo import ROLLOUT


class RunFiles:
    """Read a run's directory: configuration, metrics, rollouts, checkpoints.

    No file that the run names is imported: the auditor gives the run's FILE.py:Class and
    FILE.py:function again, as `task` and `reward`.
    """

    def __init__(self, run, task="", reward=""):
        self.directory = RunDirectory(run)
        if not self.directory.config.exists():
            raise ValueError(f"expected the directory of a run, got {run}: it holds no config.json")
        given = {name: spec for name, spec in (("task", task), ("reward", reward)) if spec}
        config = resumed_config(self.directory.config, given)

        # One process needs no plan and no engine, and its sums have any order. It keeps the run's
        # tree.
        self.engine, self.exact = config.engine, config.exact
        alone = dict(device="cpu", engine="", exact=False)
        self.config = dataclasses.replace(config, **alone, **ONE_PROCESS).check()

        # A line a step, from 0. The last one may be torn, if the run was killed or is alive.
        self.metrics = self.directory.lines(RunDirectory.METRICS)
        for n, line in enumerate(self.metrics):
            if line.get("step") != n:
                raise ValueError(f"line {n + 1} of metrics.jsonl is of step {line.get('step')!r}")
        self.checkpoints = {int(path.name[5:]): path for path in checkpoints(self.directory.path)}

    def chosen_step(self, step) -> int:
        """Return the step to audit. None: the last that a checkpoint's weights sampled, or 0."""
        last = len(self.metrics) - 1
        if step is None:
            sampled = [n + self.config.staleness for n in self.checkpoints]
            step = max([n for n in sampled if n <= last], default=0)
        if not 0 <= step <= last:
            raise ValueError(f"expected one of the {last + 1} steps of metrics.jsonl, from 0 on, "
                             f"got {step}")  # fmt: skip
        return step

    def rollouts(self, step, shape):
        """Return {group: lines} of a step if all its rollouts are there, else None."""
        groups = {}
        for number, line in enumerate(self.directory.lines(RunDirectory.ROLLOUTS), 1):
            if line.get("step") != step:
                continue
            try:
                t = Trajectory.from_json(line["group"], line | {"prompt": 0}, shape)
                groups.setdefault(t.group, {})[line["rollout"]] = line
                A = line["advantage"]  # None: the group was not trained on
                if len(t.tokens) < 2 or (A is not None and np.shape(A) != t.mask.shape):
                    raise ValueError("expected a number for each target")
                np.array(A, dtype=float)
            except (ValueError, TypeError, KeyError) as error:
                text = f"rollouts.jsonl line {number} is not a rollout: {error}"
                raise ValueError(text) from error

        # At an evaluation step only one group is there, and of a torn file the last is not whole.
        whole = all(group.keys() == {*range(self.config.group)} for group in groups.values())
        if not whole or groups.keys() != {*range(max(len(groups), self.config.prompts))}:
            return None
        return {n: [groups[n][i] for i in sorted(groups[n])] for n in sorted(groups)}


# Rollouts ----------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class Recorded(definition.Sequence):
    """A rollout from the run's files, and what the definition's step makes of it.

    Lists and arrays have an entry for each of the N sampled tokens. None: it is not known yet, or
    the run's settings have none.
    """

    group: int
    number: int  # in its group
    tokens: list
    spelled: object = None  # spelled(model, tokens) -> logits: replaces the model's own code

    # What the task says, by `play_again`.
    at: list = field(default_factory=list)  # tokens[at + 1] was sampled, from tokens[: at + 1]
    rewards: list = field(default_factory=list)  # (`at` of a turn's last token, reward)
    reward: float = 0.0  # the sum of `rewards`
    truncated: bool = False
    prompt: int = 0  # number of tokens before the policy's first turn
    differs: int = 0  # wrong or missing tokens in what the task said

    # What byhand.py finds.
    lp: np.ndarray | None = None
    old: np.ndarray | None = None
    A: np.ndarray | None = None
    teacher: np.ndarray | None = None  # log-probs by the model of --teacher
    lost: np.ndarray | None = None  # what each token's reward loses to the KL and the length
    terms: list = field(default_factory=list)  # the definition's, of each sampled token
    T: np.ndarray | None = None  # how far the difference of two logits may be off
    routing: object = None  # the experts of its tokens
    drawn: dict | None = None  # name -> (1 + DRAWS, N): the terms as computed, then of each draw
    parts: dict | None = None  # model -> (1 + DRAWS, N): a token's part of its gradient's norm

    @property
    def targets(self):
        return [self.tokens[at + 1] for at in self.at]


def groups_again(config, task, step, lines) -> dict:
    """Return {group: Recorded rollouts} of lines of rollouts.jsonl."""
    # The prompts are a function of (seed, step, group).
    first = step * config.prompts * config.max_rounds
    groups = {}
    for n, state, prompt in draw_prompts(config, task, ROLLOUT, step, lines, first=first):
        groups[n] = []
        for i, line in enumerate(lines[n]):
            s = Recorded(group=n, number=i, tokens=line["tokens"])
            play_again(config, task, state, prompt, s)
            s.smp = np.array(line["logprobs"], dtype=float)[s.at]
            groups[n].append(s)
    return groups


def play_again(config, task, state, prompt, s):
    """Say the sampled tokens of a recorded rollout to the task again, and fill in `s`.

    The task says which tokens were not sampled, what each turn earns, and where the rollout ends.
    """
    # Where the task spoke, the tokens must be the task's. All others were sampled.
    #
    #     ?  3  .  higher  5  .        the prompt, a turn, the reply, a turn
    #        x  x          x  x        sampled: targets 0 1 and 3 4, in `at`
    tokens = s.tokens

    def hear(said, place):
        """Compare what the task says with the tokens from a place on; return the place after."""
        s.differs += sum(token != other for token, other in zip(said, tokens[place:]))
        return place + len(said)

    s.prompt = place = turn = hear(prompt, 0)
    s.differs += max(0, len(prompt) - len(tokens))
    ended = False
    while place < len(tokens) and not ended:
        s.at.append(place - 1)
        place += 1
        if tokens[place - 1] not in task.end:
            continue

        # The turn is over. The task's reply follows, as far as there is room. Rewards are added as
        # the run adds them, since two sums may be compared: 0.1 + 0.2 + 0.3 is more than 0.3 + 0.3.
        state, reply, reward = task.reply(state, tokens[turn:place])
        s.rewards.append((place - 2, float(bare(reward))))
        s.reward += s.rewards[-1][1]
        ended = reply is None
        place = turn = hear(reply or (), place)

    # A rollout ends where the task says so, or at the limit. Tokens past its end were never said,
    # and a rollout that neither ended nor met the limit lacks some.
    limit = len(prompt) + config.max_new_tokens
    s.truncated = not ended
    s.differs += abs(len(tokens) - (min(place, limit) if ended else limit))


def everyone(groups) -> list:
    """Return all rollouts of groups, in order."""
    return list(itertools.chain.from_iterable(groups))


def trained(config, rollouts) -> list:
    """Return the rollouts that have tokens in the loss: `--overlong filter` leaves some out."""
    return [s for s in rollouts if s.at and not (s.truncated and config.overlong == "filter")]


def teaches(config, group) -> bool:
    """Return whether a group is trained on: dynamic sampling drops groups of equal rewards."""
    return not config.dynamic_sampling or len({s.reward for s in group}) > 1


def shares(config, s, at) -> list:
    """Return for each turn of s up to target `at` which rollouts share it: the first, how many."""
    # With 2 forks at each of 2 turns a prompt is played for 4 rollouts until turn 1 ends, then for
    # 2 until turn 2 ends. Rollout 3 shares its turns with rollouts 0 to 3, with 2 and 3, with none.
    found = []
    for turn in range(1 + len([end for end, _ in s.rewards if end < at])):
        share = config.forks ** max(0, config.fork_turns - turn)
        found.append((s.number - s.number % share, share))
    return found


def trajectory(config, s, line, shape) -> Trajectory:
    """Return a rollout as the trainer had it. ValueError if the task says another one."""
    # A token that was sampled without a finite log-prob is not marked in the line.
    if s.differs or {*np.flatnonzero(line["sampled"]).tolist()} - {*s.at}:
        raise ValueError(f"rollouts.jsonl: rollout {s.number} of group {s.group} of step "
                         f"{line['step']} is not the one that the task says")  # fmt: skip
    told = dict(prompt=s.prompt, rewards=s.rewards, truncated=s.truncated)
    return Trajectory.from_json(s.group, line | told, shape)


# The state before a step -------------------------------------------------------------------------


@dataclass
class Case:
    """A step to audit: its files, and where the state before it is stored."""

    files: RunFiles
    task: object
    step: int
    room: Path  # a directory for the time of the audit
    lines: dict | None = None  # group -> its lines of rollouts.jsonl
    before: Path | None = None  # the checkpoint before the step
    sampler: Path | None = None  # the checkpoint whose weights sampled
    again: int = 0  # steps that were done again on the way to `before`
    say: Callable = print  # gets a sentence for each part of the way

    @property
    def config(self):
        return self.files.config

    @functools.cached_property
    def shape(self) -> ModelConfig:
        """Return the shape of the run's model."""
        return shape_of(self.config, self.task)

    @functools.cached_property
    def groups(self) -> dict:
        """Return the step's {group: Recorded rollouts}, all that were played, in order."""
        return groups_again(self.config, self.task, self.step, self.lines)

    def find_states(self):
        """Find the step's rollouts and the two checkpoints, or make what is missing."""
        # Checkpoint step-M is the state before step M. The sampler's weights are from `staleness`
        # steps before. Without these two, or the lines, the ordinary code has to come along.
        sampled_at = max(0, self.step - self.config.staleness)
        stored = self.files.checkpoints
        self.lines = self.files.rollouts(self.step, self.shape)
        if self.lines is not None and {self.step, sampled_at} <= stored.keys():
            self.before, self.sampler = stored[self.step], stored[sampled_at]
            self.say(f"from {self.before.name}, the state before step {self.step}")
        else:
            self.walk(sampled_at)
            gc.collect()  # the trainer is gone, and its memory is needed
        for path in {self.before, stored.get(self.step + 1, self.before)}:
            counts_in(path)  # a damaged checkpoint is named now, and not after an hour

    def walk(self, sampled_at):
        """Do the steps from the last checkpoint that is early enough, and store what is needed."""
        task, step = self.task, self.step
        config = dataclasses.replace(self.config, exact=self.files.exact)
        model, generator, reference = build(config, task)
        trainer = Trainer(config, model, generator=generator, reference=reference,
                          teacher=build_teacher(config, task))  # fmt: skip
        start = max([n for n in self.files.checkpoints if n <= sampled_at], default=0)
        pending = self.begin(config, trainer, start)
        self.files.directory.read_reference(trainer)

        # On to the step by the ordinary code, in one process, for as long as it makes the run's own
        # rollouts. In float32 rounding makes it draw a different token sooner or later. It does not
        # draw an engine's rollouts again: to it they are batches that were sampled before.
        if step > start:
            self.say(f"on to step {step} by the ordinary code, in one process: {step - start} steps"
                     f"{', with the recorded rollouts' if self.files.engine else ''}")  # fmt: skip
        if self.files.engine:
            more = range(start + len(pending), step + 1)
            pending |= {n: self.recorded_batch(n, trainer) for n in more}
        queue = RolloutQueue(config, task, trainer, start, pending, last=step)
        for n in range(start, step + 1):
            if n in (sampled_at, step):
                made = self.room / f"step-{n:08d}"
                trainer.save_checkpoint(made, step=n)
                self.sampler = made if n == sampled_at else self.sampler
                self.before = self.files.checkpoints.get(n, made)  # the run's own, where it is kept
            if n < step:
                self.require_the_same(n, do_step(config, queue, trainer, n))
        if self.lines is None:
            self.say("rollouts.jsonl does not hold all rollouts of this step: sampled again, by "
                     "the ordinary code")  # fmt: skip
            self.lines = {n: [rollout_line(task, step, i, t) for i, t in enumerate(rollouts)]
                          for n, rollouts in sorted(queue.get(step).groups.items())}  # fmt: skip

    def begin(self, config, trainer, start) -> dict:
        """Give the trainer the state before step `start`; return the batches that wait there."""
        self.again = self.step - start
        path = self.files.checkpoints.get(start)
        if path is not None:
            state = trainer.load_checkpoint(path)
            self.say(f"from {path.name}, the state before step {start}")
            return pending_batches(config, trainer, path, state)

        # Step 0 needs no checkpoint: its weights are drawn from the seed or read from --model.
        self.say("from the first weights, which --seed and --model determine")
        return {}

    def recorded_batch(self, n, trainer) -> SampledBatch:
        """Return the batch of step n as an engine sampled it, from the recorded lines."""
        config, lines = self.config, self.files.rollouts(n, self.shape)
        if lines is None:
            raise ValueError(
                f"rollouts.jsonl does not hold all rollouts of step {n}, and an engine's rollouts "
                f"cannot be drawn again; audit a step right after a checkpoint, or keep more "
                f"(--save-every, --keep), or record all (--log-rollouts all)")
        groups = groups_again(config, self.task, n, lines)
        kept = [k for k, group in groups.items() if teaches(config, group)]
        batch = {k: [trajectory(config, s, lines[k][s.number], self.shape) for s in group]
                 for k, group in groups.items()}  # fmt: skip
        made = everyone(batch.values())
        metrics = {"tokens/generated": sum(int(t.mask.sum()) for t in made),
                   "reward/mean": math.fsum(t.reward for t in made) / len(made)}  # fmt: skip
        return SampledBatch(batch, kept, config.minibatches, trainer.policy_version, metrics)

    def require_the_same(self, n, found):
        """Raise a ValueError if a step on the way has made other rollouts than the run's."""
        for name in ("tokens/generated", "reward/mean"):
            there = self.files.metrics[n].get(name)
            if not isinstance(there, int | float) or abs(found[name] - there) > 1e-9:
                raise ValueError(f"on the way to step {self.step} the rollouts of one process are "
                                 f"not the run's: {name} of step {n} is {found[name]} here, "
                                 f"{there} in metrics.jsonl; audit a step right after a checkpoint")

    # What the checkpoints hold. Each model is read when it is needed, and computes in float64: its
    # weights are rounded as the run rounds them.

    def policy(self, path):
        """Return the model of a checkpoint as the sampler has it, whose weights a push rounds."""
        return widened(policy_in(path, self.config, self.task, self.config.rollout_dtype))

    def reference(self):
        """Return the frozen reference, or None. The reference of factors is their base."""
        if not self.config.kl_coef:
            return None
        if self.config.lora is not None:
            dtype = self.config.compute
            model = plain(policy_in(self.before, self.config, self.task, dtype, merged=False))
            for votes in model.buffers():
                votes.zero_()
            return widened(model)
        reference = build(self.config, self.task)[2].to_empty(device="cpu")
        self.files.directory.read_reference(SimpleNamespace(model=None, reference=reference))
        return widened(reference)

    def teacher(self):
        """Return the model of --teacher, or None."""
        if not self.config.teacher:
            return None
        stored = getattr(torch, self.config.compute)
        teacher = load_hf(self.config.teacher, dtype=stored).requires_grad_(False)
        return widened(keep_wide(self.config, teacher))

    def critic(self, path):
        """Return the critic of a checkpoint, or None."""
        if self.config.advantage != "gae":
            return None
        critic = empty_critic(self.config, self.shape)
        for name, x in self.weights(path, CRITIC).items():
            set_tensor(critic, name, torch.nn.Parameter(x))
        return widened(critic)

    def weights(self, path, prefix="") -> dict:
        """Return {name: tensor} of a checkpoint's trained weights, as the run stores them.

        prefix: "" of the policy, CRITIC of the critic.
        """
        make = empty_critic if prefix else empty_policy
        named = make(self.config, self.shape).named_parameters()
        found = {name: torch.empty_like(p, device="cpu") for name, p in named if p.requires_grad}
        stored = {f"{prefix}model.{name}": x for name, x in found.items()}
        read_checkpoint(path, stored, only=f"{prefix}model.")
        return found

    def moments(self, path, weights, prefix="") -> dict:
        """Return {name: [AdamW's steps, m, v]} of a checkpoint, for these trained weights."""
        found, tensors = {}, {}
        for name, x in weights.items():
            found[name] = [torch.empty(()), torch.empty_like(x), torch.empty_like(x)]
            keys = ("step", "exp_avg", "exp_avg_sq")
            tensors |= zip((f"{prefix}optimizer.{name}.{key}" for key in keys), found[name])
        read_checkpoint(path, tensors, only=f"{prefix}optimizer.")
        return {name: [int(steps), m, v] for name, (steps, m, v) in found.items()}


def counts_in(path) -> dict:
    """Return what a checkpoint counts, such as `policy_version`."""
    return read_checkpoint(path, {}, only=("no tensor",))


def widened(model):
    """Return a model in float64, its states between layers included."""
    if model.residual_dtype is not None:
        model.residual_dtype = torch.float64
    return model.double()

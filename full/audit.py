"""A step of a run again by hand, every number compared: adds runs to `train_grpo.check`.

    python -m full audit runs/guess-0 [--step 20] [--all] [--html page.html]

byhand.py has the arithmetic, expected.py the metrics and the bounds, report.py text and page. This
file trusts the task, and the ordinary code up to a checkpoint.

Equation numbers are those of byhand.py.
"""

import argparse
import copy
import dataclasses
import gc
import math
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from full.batches import Demonstrations, RolloutQueue, pending_batches
from full.byhand import Recorded, State, read_alone, trained
from full.checkpoint import checkpoints, read_checkpoint
from full.config import Config, resumed_config
from full.draws import (
    engine_rows, exact_rows, intervals, route_rows, routings, sampling_row, surprises,
)  # fmt: skip
from full.engine import Engine
from full.expected import (
    ENGINE_ROUNDING, LATER, NOT_BY_HAND, TIMES, UNDECIDED, Audited, Displaced, Exact,
    Rounding, mean_of, metrics_by_hand, order, teaches,
)  # fmt: skip
from full.files import whole_lines
from full.hf import full_definition, load_hf
from full.lora import definition, merge, take_factors
from full.logs import do_step, read_reference, rollout_line
from full.optimizer import persistent_buffers
from full.ranks import quietly
from full.report import as_page, as_text
from full.rollouts import Sampler, Trajectory, at_once, draw_prompts, play_held_out
from full.run import (
    ERRORS, ONE_PROCESS, build, build_teacher, one_process, policy_in, require_base, shape_of,
)  # fmt: skip
from full.tasks import TaskError, asking, bare, names_of
from full.text import make_task
from full.trainer import Trainer, keep_wide
from train_grpo import ROLLOUT


class RunFiles:
    """Read a run's directory: configuration, metrics, rollouts, checkpoints.

    Nothing is written there, nothing is locked, and no file that the run names is imported: the
    auditor gives the run's FILE.py:Class and FILE.py:function again, as `task` and `reward`, and
    its objects, if it was made by full.api.
    """

    def __init__(self, run, task="", reward="", objects=None):
        self.path = Path(run)
        if not (self.path / "config.json").exists():
            raise ValueError("it holds no config.json; give the directory of a run")
        given = {name: spec for name, spec in (("task", task), ("reward", reward)) if spec}
        given |= names_of(objects)
        config = resumed_config(self.path / "config.json", given)

        # One process needs no plan and no engine, and by hand sums have any order. It keeps the
        # run's tree.
        self.engine, self.exact = config.engine, config.exact
        alone = dict(device="cpu", engine="", engine_timeout=Config.engine_timeout, exact=False)
        alone |= ONE_PROCESS
        self.config = dataclasses.replace(config, **alone).check()

        # A line a step, from 0. The last one may be torn, if the run was killed or is alive.
        self.metrics = whole_lines(self.path / "metrics.jsonl")
        for n, line in enumerate(self.metrics):
            if line.get("step") != n:
                raise ValueError(f"line {n + 1} of metrics.jsonl is of step {line.get('step')!r}")
        self.checkpoints = {int(path.name[5:]): path for path in checkpoints(self.path)}

    def chosen_step(self, step) -> int:
        """Return the step to audit. None: the last that a checkpoint's weights sampled, or 0."""
        if not self.metrics:
            raise ValueError("metrics.jsonl holds no whole line")

        # The last steps of a run were sampled with weights that have no line yet.
        last = len(self.metrics) - 1
        if step is None:
            sampled = [n + self.config.staleness for n in self.checkpoints]
            return max([n for n in sampled if n <= last], default=0)
        if not 0 <= step <= last:
            raise ValueError(f"metrics.jsonl has no step {step}: its lines are of 0 to {last}")
        return step

    def rollouts(self, step, shape):
        """Return {group: lines} of a step if all its rollouts are there, else None."""
        groups = {}
        for number, line in enumerate(whole_lines(self.path / "rollouts.jsonl"), 1):
            if line.get("step") != step:
                continue
            try:
                t = Trajectory.from_json(line["group"], line | {"path": []}, shape)
                if self.config.replay_routes and t.routes is None:
                    raise ValueError("expected routes")
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


def groups_again(config, task, step, lines) -> dict:
    """Return {group: Recorded rollouts} of lines of rollouts.jsonl."""
    # The prompts are a function of (seed, step, group).
    first = step * config.prompts * config.max_rounds
    groups = {}
    for n, state, prompt in draw_prompts(config, task, ROLLOUT, step, lines, first=first):
        groups[n] = []
        for i, line in enumerate(lines[n]):
            s = Recorded(n, i, line["tokens"], routes=line.get("routes"))
            play_again(config, task, state, prompt, s)
            s.smp = [line["logprobs"][at] for at in s.at]
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
    s.prompt = place = turn = len(prompt)
    s.differs = max(0, len(prompt) - len(tokens))
    s.differs += len([token for token, said in zip(prompt, tokens) if token != said])
    ended = False
    while place < len(tokens) and not ended:
        s.at.append(place - 1)
        place += 1
        if tokens[place - 1] not in task.end:
            continue

        # The turn is over. The task's reply follows, as far as there is room. Rewards are added as
        # the run adds them, since two sums may be compared: 0.1 + 0.2 + 0.3 is more than 0.3 + 0.3.
        with asking(task):
            state, reply, reward = task.reply(state, tokens[turn:place])
        reward = float(bare(reward))
        s.rewards.append((place - 2, reward))
        s.reward += reward
        ended = reply is None
        reply = reply or ()
        s.differs += len([token for token, said in zip(reply, tokens[place:]) if token != said])
        place = turn = place + len(reply)

    # A rollout ends where the task says so, or at the limit. Tokens past its end were never said,
    # and a rollout that neither ended nor met the limit lacks some.
    limit = len(prompt) + config.max_new_tokens
    s.truncated = not ended
    s.differs += abs(len(tokens) - (min(place, limit) if ended else limit))


class Replay(Engine):
    """An engine that answers each turn with the tokens that rollouts.jsonl holds.

    lines: {step: {group: its lines}}.
    """

    start = staticmethod(at_once)

    def __init__(self, lines):
        self.urls = [""]
        self.group = None
        self.lines = lines

    def push(self, model, optimizer, version):
        """Do nothing, because the recorded tokens need no weights."""

    def turn(self, url, row, limit, temperature, end) -> bool:
        """Append what is queued, then the recorded turn. Return whether an end token ended it."""
        while row.queue and row.new < limit:
            row.append(None, 0.0)
        line = self.lines[row.key[1]][row.group][row.number]
        while row.new < limit:
            at = len(row.tokens) - 1
            if row.tokens != line["tokens"][: at + 1] or at == len(line["sampled"]):
                raise ValueError(f"rollouts.jsonl: rollout {row.number} of group {row.group} of "
                                 f"step {row.key[1]} is not the one that the task says")
            # A token without a finite log-prob was not trained on.
            token = line["tokens"][at + 1]
            row.append(token, line["logprobs"][at] if line["sampled"][at] else -math.inf)
            if token in end:
                return True
        return False


@dataclass
class Case:
    """A step to audit: its files, and where the state before it is stored."""

    files: RunFiles
    task: object
    step: int
    room: Path  # a directory for the time of the audit
    lines: dict | None  # group -> its lines of rollouts.jsonl
    before: Path | None = None  # the checkpoint before the step
    sampler: Path | None = None  # the checkpoint whose weights sampled
    again: int = 0  # steps that were done again on the way to `before`
    groups: dict | None = None  # number -> its Recorded rollouts, as `groups_again` makes them
    watch: object = lambda: None  # noqa: E731, called after each reading of a rollout

    @property
    def config(self):
        return self.files.config

    def find_states(self, say):
        """Find or make the checkpoints, and the lines if they are missing.

        say: a function. It gets a sentence for each part of the way.
        """
        # Checkpoint step-M is the state before step M. The sampler's weights are from `staleness`
        # steps before. Without these two, or the lines, the ordinary code has to come along.
        sampled_at = max(0, self.step - self.config.staleness)
        stored = self.files.checkpoints
        if self.lines is not None and {self.step, sampled_at} <= stored.keys():
            self.before, self.sampler = stored[self.step], stored[sampled_at]
            say(f"from {self.before.name}, the state before step {self.step}")
        else:
            self.walk(sampled_at, say)
            gc.collect()  # the trainer is gone, and its memory is needed

        # A damaged checkpoint is named now, and not after an hour.
        model = build(self.config, self.task)[0]
        for path in {self.before, stored.get(self.step + 1, self.before)}:
            for _ in self.stored(model, path):
                pass

    def walk(self, sampled_at, say):
        """Do the steps from the last checkpoint that is early enough, and store what is needed."""
        task, step = self.task, self.step
        config = dataclasses.replace(self.config, exact=self.files.exact)
        model, generator, reference = build(config, task)
        teacher = build_teacher(config, task)
        generator = Replay({}) if self.files.engine else generator
        trainer = Trainer(config, model, generator=generator, reference=reference, teacher=teacher)
        start = max([n for n in self.files.checkpoints if n <= sampled_at], default=0)
        self.again = step - start
        pending = {}
        if start in self.files.checkpoints:
            path = self.files.checkpoints[start]
            state = trainer.load_checkpoint(path)
            if state["step"] != start:
                raise ValueError(f"{path.name} is of another step")
            pending = pending_batches(config, trainer, path, state)
            say(f"from {path.name}, the state before step {start}")
        else:
            # Step 0 needs none: its weights are drawn from the seed or read from --model. The
            # supervised steps of --demos leave one, which --keep may have deleted.
            source = Demonstrations(config, task, trainer, -config.demos)
            for n in range(-config.demos, 0):
                do_step(config, source, trainer, n)
            trainer.optimizer.state.clear()  # the loop begins with a new optimizer
            self.again += config.demos
            demos = f", after {config.demos} supervised steps" if config.demos else ""
            say(f"from the first weights, which --seed and --model determine{demos}")
        read_reference(self.files.path, trainer)

        # On to the step by the ordinary code, in one process, for as long as it makes the run's own
        # rollouts. In float32 rounding makes it draw a different token sooner or later.
        # An engine's rollouts are read: those that the checkpoint does not have.
        if step > start:
            say(f"on to step {step} by the ordinary code, in one process: {step - start} steps"
                f"{', with the recorded rollouts' if self.files.engine else ''}, for which "
                f"{LATER + 2 * self.again} times as much is allowed")  # fmt: skip
        for n in range(start + len(pending), step + 1) if self.files.engine else ():
            generator.lines[n] = self.files.rollouts(n, trainer.shape)
            if generator.lines[n] is None:
                raise ValueError(
                    f"rollouts.jsonl does not hold all rollouts of step {n}, and an engine's "
                    f"rollouts cannot be drawn again; audit a step right after a checkpoint, or "
                    f"keep more (--save-every, --keep), or record all (--log-rollouts all)"
                )
        queue = RolloutQueue(config, task, trainer, start, pending, last=step)
        for n in range(start, step + 1):
            if n in (sampled_at, step):
                path = self.room / f"step-{n:08d}"
                trainer.save_checkpoint(path, step=n)
                self.sampler = path if n == sampled_at else self.sampler
                self.before = path
            if n < step:
                self.require_the_same(n, do_step(config, queue, trainer, n))
        if self.lines is None:
            say("rollouts.jsonl does not hold all rollouts of this step: sampled again, by the "
                "ordinary code")  # fmt: skip
            self.lines = {n: [rollout_line(task, step, i, t) for i, t in enumerate(rollouts)]
                          for n, rollouts in sorted(queue.get(step).groups.items())}  # fmt: skip

    def require_the_same(self, n, found):
        """Raise a ValueError if a step on the way has made other rollouts than the run's."""
        for name in ("tokens/generated", "reward/mean"):
            there = self.files.metrics[n].get(name)
            if not isinstance(there, int | float) or abs(found[name] - there) > 1e-9:
                raise ValueError(
                    f"on the way to step {self.step} the rollouts of one process are not the "
                    f"run's: {name} of step {n} is {found[name]} here, {there} in metrics.jsonl; "
                    f"audit a step right after a checkpoint"
                )

    # What the checkpoints hold. Memory never holds the trainer's tensors and those of the step by
    # hand: each is read when it is needed.

    def stored(self, model, path=None):
        """Yield of each trained weight (name, weight, AdamW's steps, m, v), of a checkpoint."""
        # Each call reads the whole table of contents, so small tensors are read together.
        together, room = [], 0
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            room -= p.numel()
            if room < 0:
                together.append([])
                room = 2**24 - p.numel()
            together[-1].append(name)
        dtype = getattr(torch, self.config.dtype)
        for names in together:
            tensors = {}
            for name in names:
                shape = model.get_parameter(name).shape
                for key in (f"model.{name}", *(f"optimizer.{name}.{x}" for x in MOMENTS)):
                    tensors[key] = torch.empty(shape, dtype=dtype)
                tensors[f"optimizer.{name}.step"] = torch.empty((), dtype=torch.float32)
            read_checkpoint(path or self.before, tensors, only=tuple(tensors))
            for name in names:
                steps = int(tensors[f"optimizer.{name}.step"])
                means = [tensors.pop(f"optimizer.{name}.{x}") for x in MOMENTS]
                yield name, tensors.pop(f"model.{name}"), steps, *means

    def sampling_model(self, path, dtype):
        """Return the model of a checkpoint as the sampler has it, to compute in `dtype`."""
        # A push rounds the weights. The products are in `dtype`.
        model = policy_in(path, self.config, self.task, self.config.rollout_dtype)
        return widened(model, dtype)

    def reference(self, dtype):
        """Return the frozen reference, if the run has one."""
        if not self.config.kl_coef:
            return None
        if self.config.lora is not None:  # its base
            c = self.config
            model = policy_in(self.before, c, self.task, c.compute, merged=False)
            take_factors(model)
            for votes in model.buffers():
                votes.zero_()
            return widened(model, dtype)
        reference = build(self.config, self.task)[2].to_empty(device="cpu")
        read_reference(self.files.path, SimpleNamespace(model=None, reference=reference))
        return widened(reference, dtype)

    def teacher(self, dtype):
        """Return the model of --teacher, if the run has one."""
        if not self.config.teacher:
            return None
        stored = getattr(torch, self.config.compute)
        teacher = load_hf(self.config.teacher, dtype=stored).requires_grad_(False)
        return widened(keep_wide(self.config, teacher), dtype)

    def state(self, kind, dtype):
        """Return the State before the step, of a kind and in a precision."""
        # In mixed precision what adds up over steps is never coarser than it is in the run.
        config = self.config
        model = policy_in(self.before, config, self.task, str(dtype)[6:], merged=False)
        trained = [name for name, p in build(config, self.task)[0].named_parameters()
                   if p.requires_grad]  # fmt: skip
        weights = {name: model.get_parameter(name).requires_grad_(True) for name in trained}
        wide = dtype
        if config.is_mixed:
            wide = torch.promote_types(dtype, getattr(torch, config.dtype))
            weights = {name: p.detach().to(wide, copy=True) for name, p in weights.items()}
        for name in trained:
            p = model.get_parameter(name)
            p.grad_dtype = wide
            if config.is_mixed:
                p.data.copy_(weights[name].to(getattr(torch, config.compute_dtype)))
        moments = {}
        if kind is Exact:
            for name, _, steps, m, v in self.stored(model):
                moments[name] = [steps, m.to(wide), v.to(wide)]
        counts = counts_in(self.before)
        return kind(model, weights, moments, self.reference(dtype), self.teacher(dtype),
                    counts["policy_version"], counts["skipped"], case=self)  # fmt: skip


MOMENTS = "exp_avg", "exp_avg_sq"


def counts_in(path) -> dict:
    """Return what a checkpoint counts, such as `policy_version`."""
    return read_checkpoint(path, {}, only=("no tensor",))


def widened(model, dtype):
    """Return a model in a precision to compute in, its states between layers included."""
    if model.residual_dtype is not None:
        model.residual_dtype = torch.promote_types(model.residual_dtype, dtype)
    return model.to(dtype)


def as_sampled(config, model, weights):
    """Put the weights of a State into its model, as a push gives them to the sampler."""
    dtype = next(model.parameters()).dtype
    for name, weight in weights.items():
        model.get_parameter(name).data = weight.detach()
    rounded = getattr(torch, config.rollout_dtype)
    model = merge(model, rounded) if config.lora is not None else model.to(rounded)
    return model.to(dtype)


# A step in one precision ------------------------------------------------------------------------
# All that is compared: the draws, the metrics, two evaluations and the weights after the step.


@dataclass
class ByHand:
    """A step by hand in one precision."""

    groups: dict  # number -> its Recorded rollouts
    drawn: np.ndarray  # of each sampled token: `intervals`, or `surprises` if an engine drew it
    routings: tuple | None = None  # `routings` of the sampler, if the run replays its experts
    plays: dict = field(default_factory=dict)  # eval/solved.. -> the greedy rollouts
    found: dict = field(default_factory=dict)  # metric -> Measured
    state: State | None = None  # after the step, without weights in float64
    votes: dict = field(default_factory=dict)  # of routers, after the step


def in_precision(case, dtypes, first=None, spelled=None) -> ByHand:
    """Do all of a step by hand.

    dtypes: to compute in, the trainer's part and the sampler's.
    first: the ByHand in float64, if this is the second precision.
    spelled: the number of a group that is read by `full_definition`.
    """
    config = case.config
    dtype, sampler_dtype = dtypes
    groups = copy.deepcopy(case.groups)
    for s in [s for group in groups.values() for s in group]:
        s.watch = case.watch
        # `full_definition` routes by itself.
        is_spelled = s.group == spelled and not config.replay_routes
        spelled_out = full_definition if config.lora is None else definition
        s.spelled = spelled_out if is_spelled else None

        # With `proximal`, a run has the log-probs `old` and `lp` of its first update from two
        # forwards, of other shapes, which round apart. By hand they would be one number, and a
        # ratio of exactly 1 would tell nothing of rounding. So the second precision takes its `old`
        # from the first.
        if first is not None and config.proximal:
            s.old = first.groups[s.group][s.number].old
    model = case.sampling_model(case.sampler, sampler_dtype)
    drawn = surprises if case.files.engine else intervals
    hand = ByHand(groups, drawn(model, groups, config.temperature))
    hand.routings = routings(model, groups) if config.replay_routes else None

    # An evaluation is of the weights before the step, or of those after it.
    line = case.files.metrics[case.step]
    if "eval/solved_before" in line:
        model = case.sampling_model(case.before, dtype)
        solve(case, hand, "eval/solved_before", model, first)
    del model
    hand.state = state = case.state(Exact if first is None else Displaced, dtype)
    if first is not None:
        state.exact = first.state.updates
    version = counts_in(case.sampler)["policy_version"]
    hand.found |= metrics_by_hand(config, groups, state, case.step, version)
    if first is not None:
        for here, there in zip(state.updates, first.state.updates):
            if math.isfinite(here["norm"]) != math.isfinite(there["norm"]):
                raise ValueError(UNDECIDED)

    # Only what is compared later stays in memory.
    for p in state.model.parameters():
        p.grad = None
    state.moments.clear()
    if "eval/solved" in line:
        model = as_sampled(config, copy.deepcopy(state.model).requires_grad_(False), state.weights)
        solve(case, hand, "eval/solved", model, first)
    hand.votes = persistent_buffers(state.model)
    if first is None:
        state.model, state.weights = None, {}
    return hand


@torch.no_grad()
def solve(case, hand, name, model, first):
    """Measure the fraction of held-out prompts that greedy play solves, into hand.found[name]."""
    # This is the one number that the ordinary sampler has a part in: it plays, in float64, as
    # `evaluate` does. The second precision reads the same plays.
    config = case.config
    if first is None:
        _, groups = play_held_out(config, case.task, Sampler(model))
        hand.plays[name] = [t for (t,) in groups]
    plays = (first or hand).plays[name]

    # A margin says how far the likeliest token was ahead of the next, at the closest choice of a
    # play. If rounding turned that choice around, the run has played a different game.
    margins = []
    for t in plays:
        s = Recorded(t.group, 0, t.tokens, np.flatnonzero(t.sampled).tolist())
        top_N2 = read_alone(model, s, 1.0)[0].double().topk(2).values
        margins.append(float((top_N2[:, 0] - top_N2[:, 1]).min()))
    solved = mean_of([t.reward >= 1 for t in plays])
    hand.found[name] = solved._replace(margins=np.array(margins), each=1 / len(plays))


class Progress:
    """Says before the audit begins how long it will take and how much memory, then how far it is.

    tell: a function that gets a line to print.
    """

    def __init__(self, case, tell):
        self.tell = tell
        self.done = 0
        self.told = self.begun = time.monotonic()
        rollouts = [s for group in case.groups.values() for s in group]
        c = case.config

        # How often each rollout is read: for the draws, the reference, `old` and so on, and with a
        # gradient for an update, which takes three times as long.
        extra = bool(c.kl_coef) + (c.advantage in ("gae", "teacher"))
        self.readings = len(rollouts) * (2 * (2 + extra) + bool(c.proximal))

        # A reading of the first rollout takes as long for its tokens as any other.
        model = case.sampling_model(case.sampler, torch.float64)
        start = time.monotonic()
        with torch.no_grad():
            read_alone(model, rollouts[0], c.temperature)
        each = (time.monotonic() - start) / len(rollouts[0].tokens)
        tokens = sum(len(s.tokens) for s in rollouts)
        seconds = each * tokens * ((4 + extra + bool(c.proximal)) + (4 + extra))

        # Weights, gradient, two moments, masters where they differ; a few copies of the head, which
        # is as large as any tensor, and of the longest rollout's logits; and torch itself.
        numbers = sum(p.numel() for p in model.parameters())
        longest = max(len(s.at) for s in rollouts)
        copies = 3 * model.head_weight.numel() + 8 * longest * len(model.head_weight)
        memory = 8 * (numbers * (5 if c.is_mixed else 4) + copies)
        tell(f"{len(rollouts)} rollouts of {tokens} tokens, by hand in float64 and again in lower "
             f"precision: about {seconds / 60:.1f} minutes and {memory / 1e9 + 0.5:.1f} GB of "
             f"memory")  # fmt: skip

    def watch(self):
        """Count a reading, and say each half minute how many are done."""
        self.done += 1
        if time.monotonic() - self.told > 30:
            self.told = time.monotonic()
            self.tell(f"{min(self.done, self.readings)} of {self.readings} readings done, "
                      f"{(self.told - self.begun) / 60:.1f} minutes")  # fmt: skip


# The table --------------------------------------------------------------------------------------
# A row for each number that the run recorded and the step determines.


@dataclass
class Report:
    """The findings of an audit."""

    run: str
    step: int
    config: object
    rows: list = field(default_factory=list)  # Audited, in `order`
    intro: list = field(default_factory=list)  # sentences
    left_out: list = field(default_factory=list)  # metrics that the step does not determine
    groups: dict = field(default_factory=dict)  # number -> its Recorded rollouts, in float64
    group: int | None = None  # whose tokens are shown
    updates: int = 1  # of the step: the loss is their mean
    show: object = None  # tokens as text

    @property
    def wrong(self):
        """Return the key of the first row that is outside; None if all are ok."""
        return next((row.key for row in self.rows if not row.ok), None)

    @property
    def verdict(self):
        found = "ok" if self.wrong is None else f"{self.wrong} is outside"
        return f"audit of step {self.step}: {found}"

    @property
    def loss(self):
        """Return a sentence: how the parts of all tokens add up."""
        # Each token has a part of the loss of its update, and the loss is the mean of the updates'.
        parts = {}
        for n, group in self.groups.items():
            parts[n] = math.fsum(term["part"] for s in group for term in s.terms) / self.updates
        own = parts.pop(self.group)
        others = math.fsum(parts.values())
        return (f"loss: this group {own:.15g} + the other groups {others:.15g} = "
                f"{own + others:.15g}, loss/token_mean by hand")  # fmt: skip


def audited(
    run, step=None, group=None, task="", reward="", tell=lambda line: None, objects=None
) -> Report:
    """Do a step of a run again by hand, and compare it with the run's files.

    The arguments have the names and meanings of the command line's, see `main`. Without `group`,
    the first group with unequal rewards is shown. Raises ValueError if the step cannot be audited.
    tell: a function. It gets lines that say how far the audit is.
    objects: {field of Config: object}, of a run that full.api has made. Default: none.
    """
    files = RunFiles(run, task, reward, objects)
    config = files.config
    step = files.chosen_step(step)
    require_base(config, run)
    task = make_task(config, objects)
    report = Report(str(run), step, config, show=task.show)
    say = report.intro.append
    with tempfile.TemporaryDirectory() as room:
        lines = files.rollouts(step, shape_of(config, task))
        case = Case(files, task, step, Path(room), lines)
        case.find_states(say)
        if group is not None and config.replay_routes:
            say("--replay-routes: the group is read by the model's own code, not spelled out, for "
                "the definition selects experts by itself")  # fmt: skip
        if group not in (None, *case.lines):
            last = len(case.lines) - 1
            raise ValueError(f"--group {group}: the groups of step {step} are 0 to {last}")

        # The tokens of the rollouts are the run's. Everything else about them is computed again: in
        # float64, and in the precisions that tell what rounding does.
        times = TIMES * (LATER + 2 * case.again) if case.again else TIMES
        rounding, sampling = [Rounding.of(x, times) for x in (config.compute, config.rollout_dtype)]
        scaled = f", times {rounding.scale:.1e}, the ratio of the two units in the last place"
        say(f"by hand in float64; {str(rounding.dtype)[6:]} tells what rounding does"
            f"{scaled if rounding.scale != 1 else ''}")  # fmt: skip
        case.groups = groups_again(config, task, step, case.lines)
        case.watch = Progress(case, tell).watch
        exact = in_precision(case, (torch.float64, torch.float64), spelled=group)
        rounded = in_precision(case, (rounding.dtype, sampling.dtype), first=exact)
        if step + 1 in files.checkpoints:
            tell("comparing the parameters, entry by entry")
        if files.engine:
            draws = engine_rows(case, exact, rounded, rounding, say)
        else:
            draws = [sampling_row(case, exact, rounded, sampling, say)]
        draws += route_rows(case, exact, rounded, sampling, say)
        draws += exact_rows(case, say) if files.exact else []
        rows = [*rollout_rows(case, exact, rounded, rounding), *draws,
                *metric_rows(case, exact, rounded, rounding),
                *after_rows(case, exact, rounded, rounding, say)]  # fmt: skip
    report.rows = sorted(rows, key=lambda row: order().index(row.key))

    # Numbers that are in the line and not by hand: what no step determines, and what is unknown.
    report.left_out = sorted(files.metrics[step].keys() - exact.found.keys() - {"step"})
    unknown = [name for name in report.left_out if not name.startswith(NOT_BY_HAND)]
    if unknown:
        say(f"the audit does not know {', '.join(unknown)}: add the definition to "
            f"`metrics_by_hand` in full/expected.py")  # fmt: skip

    # A group whose rewards are all equal would show nothing but the entropy bonus.
    report.groups = exact.groups
    report.updates = max(1, len(exact.state.updates))
    learning = [n for n in exact.groups if any(any(s.A or []) for s in exact.groups[n])]
    report.group = next(iter(learning), 0) if group is None else group
    return report


def metric_rows(case, exact, rounded, rounding) -> list:
    """Compare the metrics of the step's line."""
    line = case.files.metrics[case.step]
    rows = []
    for key in line.keys() & exact.found.keys():
        recorded = math.nan if line[key] is None else line[key]
        if not isinstance(recorded, int | float):
            raise ValueError(f"{key} of step {case.step} in metrics.jsonl is not a number")
        row = rounding.row(key, recorded, exact.found[key], rounded.found[key])
        if case.files.engine and key.startswith("eval/"):
            # A choice between two tokens is the engine's, if its rounding can turn it around.
            most, _ = ENGINE_ROUNDING[case.config.rollout_dtype]
            near = np.count_nonzero(exact.found[key].margins <= 2 * most)
            row = row._replace(allowed=max(row.allowed, near * exact.found[key].each))
        rows.append(row)
    return rows


def rollout_rows(case, exact, rounded, rounding) -> list:
    """Compare rollouts.jsonl with what the task and the step say."""
    config, lines = case.config, case.lines
    tokens = wrong = unlike = 0
    rewards = []
    advantages = []
    for n, group in exact.groups.items():
        for s, t, line in zip(group, rounded.groups[n], lines[n]):
            # Which tokens are the task's, and which were marked as sampled.
            tokens += len(s.tokens)
            wrong += s.differs
            unlike += len({*np.flatnonzero(line["sampled"]).tolist()} ^ {*s.at})

            # The reward of each turn. A turn that is missing on one side counts as reward 0 there.
            told = dict(map(tuple, line["rewards"]))
            mine = dict(s.rewards)
            rewards += [abs(told.get(at, 0.0) - mine.get(at, 0.0)) for at in {*told, *mine}]
            rewards.append(float(bool(line["truncated"]) != s.truncated))

            # The advantages of the tokens that are trained on.
            if s.A is not None and trained(config, [s]) and line["advantage"] is not None:
                advantages += zip([line["advantage"][at] for at in s.at], s.A, t.A)

    # The rounds of a step play as many new groups as are missing, each time.
    played = chosen = 0
    for _ in range(config.max_rounds):
        new = range(played, played + config.prompts - chosen)
        chosen += len([n for n in new if n not in lines or teaches(config, exact.groups[n])])
        played = new.stop
    recorded, A, A_rounded = np.array(advantages, dtype=np.float64).reshape(-1, 3).T
    return [
        Audited("rollouts/groups", len(lines), played, abs(played - len(lines)), 0),
        Audited("rollouts/tokens", tokens, tokens - wrong, wrong, 0),
        Audited("rollouts/sampled", 0, unlike, unlike, 0),
        rounding.row_of_many("rollouts/rewards", rewards, [1.0], [1.0]),
        rounding.row_of_many("rollouts/advantage", abs(recorded - A), A, A_rounded),
    ]


def after_rows(case, exact, rounded, rounding, say) -> list:
    """Compare parameters and votes with the next checkpoint, if there is one."""
    path = case.files.checkpoints.get(case.step + 1)
    if path is None:
        say(f"parameters after the step: not compared, there is no step-{case.step + 1:08d}")
        return []

    # Each entry is held to its own rounding, and the one furthest from it is shown: AdamW makes
    # steps of one length, so a fault in a small tensor is as large as in a big one.
    # Weights are stored in --dtype, whatever the products are in.
    unit = torch.finfo(getattr(torch, case.config.dtype)).eps
    later = rounding.times / TIMES
    model = rounded.state.model
    rows = {}
    for (name, *before), (_, stored, *_) in zip(case.stored(model), case.stored(model, path)):
        weight, allowed = rounded.state.allowed(name, before, rounding.scale, unit)
        if later > 1:  # the steps on the way to this one have moved other entries by rounding
            allowed.fill_(later * allowed.max())
        differences = weight.sub_(stored).abs_().flatten()
        allowed = allowed.flatten()
        furthest = int((differences / allowed.clamp(min=1e-300)).argmax())
        found = differences[furthest].item()
        rows[name] = Audited("parameters", 0.0, found, found, allowed[furthest].item())
    worst = max(rows, key=lambda name: rows[name].share)
    say(f"parameters after the step: against {path.name}, the worst is {worst}")
    if not case.config.router_bias_rate:
        return [rows[worst]]

    # The routers' biases, in votes. An undecided choice changes the counts of two experts, and by
    # that their votes by two at the most.
    there = {name: torch.empty_like(x) for name, x in exact.votes.items()}
    stored = {f"buffer.{name}": x for name, x in there.items()}
    read_checkpoint(path, stored, only=("buffer.",))
    wrong = sum(int((there[name] - x).abs().sum()) for name, x in exact.votes.items())
    sizes = [sum(int(x.abs().sum()) for x in votes.values()) for votes in (there, exact.votes)]
    loads = [hand.found["experts/load_max"] for hand in (exact, rounded)]
    return [rows[worst], Audited("votes", *sizes, wrong, 4 * rounding.undecided(*loads))]


def main(argv) -> int:
    """Audit a run and return the exit code.

    0: every number is within what rounding allows. 1: one is not. 2: no audit is possible.
    """
    parser = argparse.ArgumentParser("python -m full audit", allow_abbrev=False)
    parser.add_argument("run", help="directory of a run; nothing is written there")
    parser.add_argument("--step", type=int, help="[the last that a checkpoint has sampled, or 0]")
    parser.add_argument("--group", type=int, help="spell this group out, by full_definition")
    parser.add_argument("--all", action="store_true", help="print every row and every token")
    parser.add_argument("--html", metavar="FILE", help="also write it as a page")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--reward", default="", help="the run's FILE.py:function, if it had one")
    options = parser.parse_args(argv)

    def say(text):
        print(text, file=sys.stderr, flush=True)

    # The process group of this one process is left before the findings are printed. The verdict is
    # the exit code.
    def command(o):
        with one_process("an audit"):
            report = audited(o.run, o.step, o.group, o.task, o.reward, tell=say)
        print(as_text(report, o.all, o.all or o.group is not None))
        if o.html:
            Path(o.html).write_text(as_page(report), encoding="utf-8")
            print(f"wrote {o.html}")
        return 0 if report.wrong is None else 1

    try:
        return quietly(command, options)
    except ERRORS as error:
        if isinstance(error, TaskError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"error: {options.run} cannot be audited: {error}", file=sys.stderr, flush=True)
        return 2

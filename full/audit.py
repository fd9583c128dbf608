"""A step of a run again by hand, every number compared: adds runs to `train_grpo.check`.

    python -m full audit runs/guess-0 [--step 20] [--all] [--html page.html]

byhand.py has the arithmetic. This file trusts the task, and the ordinary code up to a checkpoint.
"""

import argparse
import copy
import dataclasses
import gc
import html
import math
import os
import string
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import train_grpo
from full.batches import Demonstrations, RolloutQueue, pending_batches
from full.byhand import (
    FullState, Recorded, State, adamw_of, clip_margins, kept, rate_by_hand, read_alone, shares,
    step_by_hand, sum_of_counts, trained,
)  # fmt: skip
from full.checkpoint import checkpoints, read_checkpoint
from full.config import resumed_config
from full.files import whole_lines
from full.hf import full_definition, load_hf
from full.logs import do_step, read_reference, rollout_line
from full.metrics import METRICS
from full.optimizer import persistent_buffers
from full.ranks import quietly
from full.rollouts import Sampler, Trajectory, draw_prompts, play
from full.run import ERRORS, ONE_PROCESS, build, build_teacher, one_process, policy_in
from full.tasks import TaskError, asking
from full.text import make_task
from full.trainer import Trainer, keep_states_wide
from train_grpo import EVALUATION, ROLLOUT

# What no step determines. A line's other numbers must be found here, or are named as unknown.
NOT_BY_HAND = ("seconds/", "memory/peak", "logprob_gap/identical", "tokens/trained")


def order() -> list:
    """Return the rows of the table, causes before their effects, by METRICS."""
    # The first row that is outside says where to look. The first update's metrics come before those
    # that a change of the weights has a part in.
    of_updates = [name for name, x in METRICS.items() if x.over_updates in ("mean", "max")]
    rows = ["rollouts/groups", "rollouts/tokens", "rollouts/sampled", "sampling",
            "rollouts/rewards"]  # fmt: skip
    for name in METRICS:
        if name == of_updates[0]:
            rows += ["rollouts/advantage", *(f"{name}_first" for name in of_updates)]
        rows.append(name)
    return [*rows, "votes", "parameters"]


class Measured(NamedTuple):
    """A number by hand, and its parts, which say how much rounding changes it.

    terms: numbers of which the value is the sum (norm 1), the length (2) or the largest (inf).
    margins: of yes-or-no decisions that the value counts, how far each is from the other side.
    each: how much the value changes if one decision changes sides.
    """

    # Two metrics of 1000 tokens may agree by luck while their tokens do not: errors of either sign
    # cancel in a sum. The distance of two precisions is therefore taken term by term, by the norm
    # that bounds the difference of the metrics: |sum a - sum b| <= sum |a - b|.
    value: float
    terms: np.ndarray = np.zeros(0)
    norm: float = 1
    margins: np.ndarray = np.zeros(0)
    each: float = 0.0


def sum_of(values) -> Measured:
    return Measured(math.fsum(values), np.array(values, dtype=np.float64))


def mean_of(values) -> Measured:
    return sum_of(np.array(values, dtype=np.float64) / max(1, len(values)))


def largest_of(values) -> Measured:
    terms = np.array(values, dtype=np.float64)
    return Measured(float(abs(terms).max(initial=0.0)), terms, math.inf)


def deviation_of(values) -> Measured:
    """Measure a standard deviation: the length of all deviations over the root of their number."""
    mean = math.fsum(values) / max(1, len(values))
    terms = (np.array(values) - mean) / math.sqrt(max(1, len(values)))
    return Measured(math.sqrt(math.fsum(terms * terms)), terms, 2)


def teaches(config, group) -> bool:
    """Return whether a group is trained on: dynamic sampling drops groups of equal rewards."""
    return not config.dynamic_sampling or len({s.reward for s in group}) > 1


def metrics_by_hand(config, groups, state, step, sampled_by) -> dict:
    """Do a step by hand and return {metric: Measured}; changes `groups` and `state`.

    groups: {number: its Recorded rollouts}, all that were played, in order.
    sampled_by: optimizer steps that the sampler's weights had taken.
    """
    chosen = [group for group in groups.values() if teaches(config, group)]
    lr = rate_by_hand(config, step)
    state.updates = updates = step_by_hand(config, chosen, state, lr)

    # Rewards and lengths are of all groups, dropped ones included. A critic compares the rewards of
    # the whole step. The age is of the sampler's weights, in steps.
    played = [s for group in groups.values() for s in group]
    solved = [[s.reward >= 1 for s in group] for group in groups.values()]
    compared = [played] if config.advantage in ("gae", "none_batch") else groups.values()
    lengths = [len(s.at) for s in played]
    sequences = trained(config, [s for group in chosen for s in group])
    A = [A for s in sequences for A in s.A]
    tokens = sum(len(s.tokens) for u in updates for s in u["batch"])
    age = min(step, config.staleness)
    found = {
        "reward/mean": mean_of([s.reward for s in played]),
        "reward/solved": mean_of([one for row in solved for one in row]),
        "reward/groups_none": mean_of([not any(row) for row in solved]),
        "reward/groups_all": mean_of([all(row) for row in solved]),
        "reward/groups_equal": mean_of([len({s.reward for s in some}) == 1 for some in compared]),
        "tokens/generated": Measured(sum(lengths)),
        "tokens/truncated_fraction": mean_of([s.truncated for s in played]),
        "length/rollout_mean": mean_of(lengths), "length/max": Measured(max(lengths)),
        "advantage/token_mean": mean_of(A), "advantage/token_std": deviation_of(A),
        "lr": Measured(lr), "policy_version": Measured(state.version),
        "updates/skipped": Measured(state.skipped), "tokens/trained_flat": Measured(tokens),
        "policy/age_mean": Measured(age), "policy/age_max": Measured(age),
    }  # fmt: skip

    # How many tokens a tree runs depends on where it is cut, which no equation says.
    if config.tree == "disabled":
        found["tokens/trained"] = Measured(tokens)
    if config.advantage == "gae":
        found |= critic_metrics(sequences)

    # With several updates the line also has the metrics of the first by itself: only that update
    # sees the weights from before the step.
    if len(updates) > 1:
        first = update_metrics(config, updates[:1], sampled_by)
        found |= {f"{name}_first": x for name, x in first.items()
                  if METRICS[name].over_updates in ("mean", "max")}  # fmt: skip
    return found | update_metrics(config, updates, sampled_by) if updates else found


def critic_metrics(sequences) -> dict:
    """Measure the critic's values, and which part of the returns' variance they explain."""
    v = [v for s in sequences for v in s.v_old]
    g = [g for s in sequences for g in s.g]
    a = deviation_of([g - v for g, v in zip(g, v)])
    b = deviation_of(g)
    explained = 1 - a.value**2 / b.value**2 if b.value**2 > 1e-12 else 0.0

    # The change of a^2 / b^2 is 2 a^2 / b^2 times the sum of the relative changes of a and b. The
    # last term is of a size that counts what the run loses by b^2 = mean g^2 - (mean g)^2.
    relative = [one.terms / max(one.value, 1e-300) for one in (a, b)]
    lost = mean_of(np.square(g)).value / max(b.value**2, 1e-300)
    terms = 2 * math.sqrt(2) * (1 - explained) * np.concatenate([*relative, [lost]])
    return {"value/token_mean": mean_of(v),
            "value/explained_variance": Measured(explained, terms, 2)}  # fmt: skip


def update_metrics(c, updates, sampled_by) -> dict:
    """Measure updates: means over them, and the largest of all."""
    U = len(updates)
    batches = [trained(c, u["batch"]) for u in updates]
    sequences = [s for batch in batches for s in batch]
    terms = [term for s in sequences for term in s.terms]
    for term in terms:
        term["masked"] = term["x"] == 0

    def mean(name, per_token=True):
        # A mean over the tokens of an update, whatever the loss is divided by. The parts of the
        # loss are divided by Z already, so they are summed. Then the mean over updates.
        values = []
        for batch in batches:
            count = max(1, sum(len(s.at) for s in batch)) if per_token else 1
            values += [term[name] / count / U for s in batch for term in s.terms]
        return sum_of(values)

    # The gap to the sampler is of the first update alone, where both have the same weights and
    # differ by rounding alone. The mean of the updates' norms is at most the root of the mean of
    # their squares, which is the length of a vector of all gradients. In float64 `off` is 0, in the
    # second precision how far a gradient is from that.
    gaps = np.array([lp - x for s in batches[0] for lp, x in zip(s.lp, s.smp)])
    off = np.array([getattr(u["gradient"], "off", 0.0) for u in updates]) / math.sqrt(U)
    decided = dict(each=1 / max(1, len(terms)))
    margins = np.array([x for s in sequences for x in clip_margins(c, s)])
    found = {
        "logprob_gap/max": largest_of(gaps),
        "logprob_gap/mean": mean_of(abs(gaps))._replace(terms=gaps / max(1, len(gaps))),
        "logprob_gap/kl": mean_of(np.expm1(gaps) - gaps),
        "policy_age/update_mean": mean_of([u["version"] - sampled_by for u in updates]),
        "ratio/token_mean": mean("r"),
        "ratio/max": largest_of([term["r"] for term in terms]),
        "ratio/clipped_fraction": mean("clips")._replace(margins=margins, **decided),
        "entropy/token_mean": mean("H"),
        "loss/policy_token_mean": mean("policy", per_token=False),
        "loss/token_mean": mean("part", per_token=False),
        "grad_norm": Measured(math.fsum(u["norm"] for u in updates) / U, off, 2),
    }  # fmt: skip
    if any(s.ref is not None for s in sequences):
        found["kl/token_mean"] = mean("k")
    if c.advantage == "gae":
        found["value/loss"] = mean("value")
    if c.importance_cap:
        bounds = [c.importance_low, c.importance_cap]
        margins = np.array([term["x"] - bound for term in terms for bound in bounds])
        masked = mean("masked")._replace(margins=margins, **decided)
        found["importance/masked_fraction"] = masked
    return found | expert_metrics(c, updates) if updates[0]["routed"] else found


def expert_metrics(c, updates) -> dict:
    """Measure the largest load of all updates and layers, and the loss of balance."""
    # Two experts may be so near that rounding decides which of them a token goes to. The token is
    # then one more of all tokens of an expert, of which `each` is the fraction of the mean.
    routed = [r for u in updates for r in u["routed"]]
    layers = [n for u in updates for n in sum_of_counts(u["routed"]).values()]
    load = max(float(n.max() / n.mean()) for n in layers)
    each = 1 / min(n.mean() for n in layers)
    loads = Measured(load, margins=np.concatenate([r.margins for r in routed]), each=each)
    if not c.balance_coef:
        return {"experts/load_max": loads}

    # In (8) such a token changes one count, of a sequence of N tokens, by one of K N.
    balance = sum_of([r.balance / len(updates) for r in routed])
    each = max(c.balance_coef / n.mean() / len(u["routed"])
               for u in updates for r in u["routed"] for n in r.counts.values())  # fmt: skip
    balance = balance._replace(margins=loads.margins, each=each)
    return {"experts/load_max": loads, "balance/loss": balance}


# What rounding explains -------------------------------------------------------------------------
# How far a recorded number may be from the one by hand. If you trust the column `allowed`, skip it.

# Everything is done twice: in float64, to be compared with what the run recorded, and in the run's
# precision, to know how much of a difference rounding can explain. A recorded number and the one by
# hand may differ by TIMES the distance of these two and a unit in the last place. After n steps
# that had to be done again on the way, LATER + 2 n times as much is allowed, since each step adds
# its rounding.
TIMES = 8

LATER = 10

UNDECIDED = "rounding decides which updates are finite, so nothing is comparable"


class Audited(NamedTuple):
    """A row of the table. Where there are many numbers, `difference` is their largest."""

    key: str
    recorded: float
    by_hand: float
    difference: float
    allowed: float

    @property
    def ok(self):
        return self.difference == 0 or self.difference <= self.allowed


class Rounding(NamedTuple):
    """A second precision, and what its distance to float64 says about the run."""

    dtype: torch.dtype  # to compute in
    scale: float  # what the distance to float64 is multiplied by
    unit: float  # the run's unit in the last place, relative
    times: float  # TIMES, or LATER times that

    @classmethod
    def of(cls, name, times):
        # For a run in float64 no higher precision is at hand. Rounding is proportional to the unit
        # in the last place, so float32's is measured and scaled by the ratio of the two units.
        run = getattr(torch, name)
        dtype = torch.float32 if run == torch.float64 else run
        unit = torch.finfo(run).eps
        return cls(dtype, unit / torch.finfo(dtype).eps, unit, times)

    def allowed(self, exact, rounded) -> float:
        """Return how far a recorded number may be from `exact`; both are Measured."""
        # The loss of a default run, say: 3000 terms of 1e-5 that mostly cancel. In float32 each is
        # about 1e-11 off, so 8 x 3000 x 1e-11 = 2e-7 is allowed, of a loss of 1e-2.
        if exact.terms.shape != rounded.terms.shape:
            raise ValueError(UNDECIDED)
        size = abs(exact.value) if math.isfinite(exact.value) else 0.0
        apart = 0.0
        if exact.terms.size:
            size = max(size, float(np.linalg.norm(exact.terms, exact.norm)))
            apart = float(np.linalg.norm(exact.terms - rounded.terms, exact.norm))

        # Rewards, counts and rates are computed in float64 in every run.
        if apart == 0 and not exact.margins.size:
            return TIMES * torch.finfo(torch.float64).eps * size
        allowed = self.times * self.scale * apart + self.unit * size
        return allowed + exact.each * self.undecided(exact, rounded)

    def undecided(self, exact, rounded) -> int:
        """Return how many of the margins are so small that rounding can turn them around."""
        if not exact.margins.size or exact.margins.shape != rounded.margins.shape:
            return 0
        slack = self.times * self.scale * np.abs(exact.margins - rounded.margins).max()
        return np.count_nonzero(np.abs(exact.margins) <= slack)

    def row(self, key, recorded, exact, rounded) -> Audited:
        """Compare one number."""
        # JSON has no NaN: what is not finite is written as null.
        difference = abs(recorded - exact.value)
        if math.isnan(difference):
            agree = math.isnan(recorded) and not math.isfinite(exact.value)
            difference = 0.0 if agree else math.inf
        return Audited(key, recorded, exact.value, difference, self.allowed(exact, rounded))

    def row_of_many(self, key, differences, exact, rounded) -> Audited:
        """Show the largest of some differences; exact, rounded: the numbers that are compared."""
        worst = float(np.max(differences, initial=0.0))
        pair = largest_of(exact)._replace(value=0.0), largest_of(rounded)
        return Audited(key, 0.0, worst, worst, self.allowed(*pair))


class Exact(FullState):
    """The State of the step in float64. It keeps its gradients in files."""

    room = None  # the Path of a directory for them

    def keep(self, shrink):
        """Write an update's clipped gradient, for `kept`."""
        folder = self.room / f"gradient-{len([*self.room.glob('gradient-*')])}"
        folder.mkdir()
        for name, p in self.model.named_parameters():
            torch.save(shrink * p.grad, folder / name)


class Gradient(NamedTuple):
    """The rounding of a weight's gradient, in one update."""

    largest: float  # of all entries
    usual: float  # the root of their mean square
    uncertain: torch.Tensor  # for each entry, whether it is anything but 0


class Rounded(NamedTuple):
    """The rounding of an update's gradient: how far off it is, and {name: Gradient}."""

    off: float
    of: dict


class Displaced(FullState):
    """The State of the second precision: it measures the rounding of gradients, and by it weights.

    AdamW divides by the root of v. So where gradients nearly cancel, rounding decides in which
    direction an entry moves by about lr, and where the gradient is large, rounding changes next to
    nothing. How far rounding has moved some entries is therefore no measure of the others. What is
    measured is the rounding of a tensor's gradient; `uncertain` says how far an entry may move by
    it. For the next update the weights are those in float64, each displaced in a random direction
    as far as usual rounding may move it. Its gradients then show the rounding of both updates.

    """

    def follow(self, case, exact):
        """Take the updates of a Case's step that were done in float64. Return the State."""
        self.case = case
        self.exact = exact
        self.kept = []  # the Rounded of each update
        self.done = []  # numbers of the updates that moved the weights
        self.lr = rate_by_hand(case.config, case.step)
        self.generator = torch.Generator().manual_seed(case.config.seed)
        return self

    @torch.no_grad()
    def keep(self, shrink):
        """Measure the rounding of this update's gradients."""
        number = len(self.kept)
        if number == len(self.exact):
            raise ValueError(UNDECIDED)
        off, found = [], {}
        for name, p in self.model.named_parameters():
            # What is 0 in both precisions, as for a token that no sequence has, has no rounding.
            # Clipping hides how long a gradient is, so `off` is of whole ones.
            exact = kept(self.case.room, number, name)
            off.append((exact / self.exact[number]["shrink"] - p.grad).norm().item())
            away = (exact - shrink * p.grad).abs_()
            usual = away.norm().item() / math.sqrt(away.numel())
            found[name] = Gradient(away.max().item(), usual, (exact != 0) | (p.grad != 0))
        self.kept.append(Rounded(math.hypot(*off), found))
        return self.kept[-1]

    @torch.no_grad()
    def adamw(self, c, lr, shrink):
        """Displace the weights by the rounding of the updates so far."""
        self.vote(c)
        self.done.append(len(self.kept) - 1)
        for name, *stored in self.case.stored(self.model):
            # A distance is as good in one direction as in the other.
            p = self.model.get_parameter(name)
            changes = [[self.kept[n].of[name].usual] for n in self.done]
            weight, distance = self.uncertain(name, stored, changes, torch.finfo(p.dtype).eps)
            sign = 2 * torch.randint(0, 2, p.shape, generator=self.generator) - 1
            self.weights[name].copy_(weight + sign * distance)
            p.copy_(self.weights[name])

    def allowed(self, name, stored, scale, unit):
        """Return a weight after the step in float64, and how far a run's may be from it."""
        largest = [scale * self.kept[n].of[name].largest for n in self.done]
        return self.uncertain(name, stored, [[x, TIMES * x] for x in largest], unit)

    def uncertain(self, name, stored, changes, unit):
        """Return a weight after the updates so far, in float64, and how far rounding may move it.

        stored: the weight before the step, and AdamW's steps, m and v.
        changes: for each update, of which sizes a change of its gradient may be.
        unit: of the weights' precision, relative.
        """
        begun, steps, *means = stored
        weight, distance = (torch.empty(begun.shape, dtype=torch.float64) for _ in range(2))
        tensors = [begun, *means, weight, distance]
        for n in self.done:
            tensors += [kept(self.case.room, n, name), self.kept[n].of[name].uncertain]
        for piece in zip(*(x.reshape(-1).split(2**20) for x in tensors)):
            now = [x.double() for x in piece[:3]]
            self.bound(now, steps, piece[3:5], piece[5:], (changes, unit))
        return weight, distance

    def bound(self, begun, steps, results, gradients, rounding):
        """Fill `results`, weight and distance of some entries; see `uncertain`.

        gradients: of each update the gradient, and whether it is uncertain.
        """
        changes, unit = rounding

        def moves(changed=None, by=0.0):
            now, found = begun, []
            for n, g in enumerate(gradients[::2]):
                g = g + by * gradients[2 * n + 1] if n == changed else g
                then = adamw_of(self.case.config, self.lr, steps + 1 + n, *now, g)
                found.append(then[0] - now[0])
                now = then
            return torch.stack(found)

        # An entry moves by its own gradients alone. It may go as far astray as it does if one of
        # them is larger or smaller: near a gradient of 0 by up to 2 lr. The distances of all moves
        # are summed, so that none cancels another. Besides, each update rounds a weight twice, and
        # the length of its step a few times.
        plain = moves()
        weight, distance = results
        weight.copy_(begun[0] + plain.sum(0))
        distance.copy_(len(changes) * unit * (begun[0].abs() + TIMES * self.lr))
        for n, sizes in enumerate(changes):
            found = [(moves(n, by) - plain).abs().sum(0) for x in sizes for by in (x, -x)]
            distance += torch.stack(found).amax(0)


# A run's files ----------------------------------------------------------------------------------
# Settings, metrics, rollouts and checkpoints are read and never written. The trainer's code brings
# a checkpoint into memory. If you look for the arithmetic, skip this.


class RunFiles:
    """Read a run's directory: configuration, metrics, rollouts, checkpoints.

    Nothing is written there, nothing is locked, and no file that the run names is imported: the
    auditor gives the run's FILE.py:Class and FILE.py:function again, as `task` and `reward`.
    """

    def __init__(self, run, task="", reward=""):
        self.path = Path(run)
        if not (self.path / "config.json").exists():
            raise ValueError("it holds no config.json; give the directory of a run")
        given = {name: spec for name, spec in (("task", task), ("reward", reward)) if spec}
        config = resumed_config(self.path / "config.json", given)

        # One process needs no plan. It keeps the run's tree.
        self.config = dataclasses.replace(config, device="cpu", **ONE_PROCESS).check()

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

    def rollouts(self, step, vocab_size):
        """Return {group: lines} of a step if all its rollouts are there, else None."""
        groups = {}
        for number, line in enumerate(whole_lines(self.path / "rollouts.jsonl"), 1):
            if line.get("step") != step:
                continue
            try:
                t = Trajectory.from_json(line["group"], line | {"path": []}, vocab_size)
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
            s = Recorded(n, i, line["tokens"], [], [], [], False)
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
        s.rewards.append((place - 2, float(reward)))
        s.reward += float(reward)
        ended = reply is None
        reply = reply or ()
        s.differs += len([token for token, said in zip(reply, tokens[place:]) if token != said])
        place = turn = place + len(reply)

    # A rollout ends where the task says so, or at the limit. Tokens past its end were never said,
    # and a rollout that neither ended nor met the limit lacks some.
    limit = len(prompt) + config.max_new_tokens
    s.truncated = not ended
    s.differs += abs(len(tokens) - (min(place, limit) if ended else limit))


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
        config, task, step = self.config, self.task, self.step
        model, generator, reference = build(config, task)
        teacher = build_teacher(config, task)
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
            # Step 0 needs none: its weights are drawn from the seed or read from --model.
            # Supervised steps leave one, which --keep may have deleted.
            self.supervise(trainer)
            demos = f", after {config.demos} supervised steps" if config.demos else ""
            say(f"from the first weights, which --seed and --model determine{demos}")
        read_reference(self.files.path, trainer)

        # On to the step by the ordinary code, in one process, for as long as it makes the run's own
        # rollouts. In float32 rounding makes it draw a different token sooner or later.
        if step > start:
            say(f"on to step {step} by the ordinary code, in one process: {step - start} steps, "
                f"for which {LATER + 2 * self.again} times as much is allowed")  # fmt: skip
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

    def supervise(self, trainer):
        """Do the steps of --demos, with which a run begins."""
        demos = self.config.demos
        source = Demonstrations(self.config, self.task, trainer, -demos)
        for n in range(-demos, 0):
            do_step(self.config, source, trainer, n)
        trainer.optimizer.state.clear()  # the loop begins with a new optimizer
        self.again += demos

    def require_the_same(self, n, found):
        """Raise a ValueError if a step on the way has made other rollouts than the run's."""
        for name in ("tokens/generated", "reward/mean"):
            there = self.files.metrics[n].get(name)
            if not isinstance(there, int | float) or abs(found[name] - there) > 1e-9:
                raise ValueError(
                    f"on the way to step {self.step} one process makes other rollouts than the "
                    f"run: {name} of step {n} is {found[name]} here and {there} in metrics.jsonl; "
                    f"audit a step right after a checkpoint"
                )

    # What the checkpoints hold. Memory never holds the trainer's tensors and those of the step by
    # hand: each is read when it is needed.

    def stored(self, model, path=None):
        """Yield of each weight of a model (name, weight, AdamW's steps, m, v), of a checkpoint."""
        # Each call reads the whole table of contents, so small tensors are read together.
        names, numbers = [], 0
        for name, p in model.named_parameters():
            if numbers + p.numel() > 2**24 and names:
                yield from self._stored(model, names, path or self.before)
                names, numbers = [], 0
            names.append(name)
            numbers += p.numel()
        yield from self._stored(model, names, path or self.before)

    def _stored(self, model, names, path):
        dtype = getattr(torch, self.config.dtype)
        tensors = {}
        for name in names:
            shape = model.get_parameter(name).shape
            tensors[f"model.{name}"] = torch.empty(shape, dtype=dtype)
            for key, size in (("step", ()), ("exp_avg", shape), ("exp_avg_sq", shape)):
                kind = dtype if size else torch.float32
                tensors[f"optimizer.{name}.{key}"] = torch.empty(size, dtype=kind)
        read_checkpoint(path, tensors, only=tuple(tensors))
        for name in names:
            weight = tensors.pop(f"model.{name}")
            steps, *means = [tensors.pop(f"optimizer.{name}.{key}")
                             for key in ("step", "exp_avg", "exp_avg_sq")]  # fmt: skip
            yield name, weight, int(steps), *means

    def sampling_model(self, path, dtype):
        """Return the model of a checkpoint as the sampler has it, to compute in `dtype`."""
        # A push rounds the weights. The products are in `dtype`.
        model = policy_in(path, self.config, self.task, self.config.rollout_dtype)
        return widened(model, dtype)

    def reference(self, dtype):
        """Return the frozen reference, if the run has one."""
        if not self.config.kl_coef:
            return None
        reference = build(self.config, self.task)[2].to_empty(device="cpu")
        read_reference(self.files.path, SimpleNamespace(reference=reference))
        return widened(reference, dtype)

    def teacher(self, dtype):
        """Return the model of --teacher, if the run has one."""
        if not self.config.teacher:
            return None
        stored = getattr(torch, self.config.compute)
        teacher = load_hf(self.config.teacher, dtype=stored).requires_grad_(False)
        return widened(keep_states_wide(self.config, teacher), dtype)

    def state(self, kind, dtype):
        """Return the State before the step, of a kind and in a precision."""
        # In mixed precision what adds up over steps is never coarser than it is in the run.
        config = self.config
        model = policy_in(self.before, config, self.task, str(dtype)[6:]).requires_grad_(True)
        weights = dict(model.named_parameters())
        wide = dtype
        if config.is_mixed:
            wide = torch.promote_types(dtype, getattr(torch, config.dtype))
            weights = {name: p.detach().to(wide, copy=True) for name, p in weights.items()}
        for name, p in model.named_parameters():
            p.grad_dtype = wide
            if config.is_mixed:
                p.data.copy_(weights[name].to(getattr(torch, config.compute_dtype)))
        moments = {}
        if kind is Exact:
            for name, _, steps, m, v in self.stored(model):
                moments[name] = [steps, m.to(wide), v.to(wide)]
        counts = read_checkpoint(self.before, {}, only=("no tensor",))
        counts = counts["policy_version"], counts["skipped"]
        state = kind(model, weights, moments, self.reference(dtype), *counts)
        state.teacher = self.teacher(dtype)
        return state


def widened(model, dtype):
    """Return a model in a precision to compute in, its states between layers included."""
    if model.residual_dtype is not None:
        model.residual_dtype = torch.promote_types(model.residual_dtype, dtype)
    return model.to(dtype)


# A step in one precision ------------------------------------------------------------------------
# All that is compared: the draws, the metrics, two evaluations and the weights after the step.


@dataclass
class ByHand:
    """A step by hand in one precision."""

    groups: dict  # number -> its Recorded rollouts
    ends: np.ndarray  # (N, 2): between which two numbers lies one that draws the sampled token
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
        s.spelled = full_definition if s.group == spelled else None

        # With `proximal`, a run has the log-probs `old` and `lp` of its first update from two
        # forwards, of other shapes, which round apart. By hand they would be one number, and a
        # ratio of exactly 1 would tell nothing of rounding. So the second precision takes its `old`
        # from the first.
        if first is not None and config.proximal:
            s.old = first.groups[s.group][s.number].old
    model = case.sampling_model(case.sampler, sampler_dtype)
    hand = ByHand(groups, intervals(model, groups, config.temperature))

    # An evaluation is of the weights before the step, or of those after it.
    line = case.files.metrics[case.step]
    if "eval/solved_before" in line:
        model = case.sampling_model(case.before, dtype)
        solve(case, hand, "eval/solved_before", model, first)
    del model
    if first is None:
        state = first_state = case.state(Exact, dtype)
        state.room = case.room
    else:
        first_state = first.state
        state = case.state(Displaced, dtype).follow(case, first_state.updates)
    version = read_checkpoint(case.sampler, {}, only=("no tensor",))["policy_version"]
    hand.found |= metrics_by_hand(config, groups, state, case.step, version)
    both = [[math.isfinite(u["norm"]) for u in one.updates] for one in (state, first_state)]
    if both[0] != both[1]:
        raise ValueError(UNDECIDED)

    # Only what is compared later stays in memory.
    for p in state.model.parameters():
        p.grad = None
    state.moments.clear()
    if "eval/solved" in line:
        model = copy.deepcopy(state.model).requires_grad_(False)
        for name, p in model.named_parameters():
            p.copy_(state.weights[name].to(getattr(torch, config.rollout_dtype)))
        solve(case, hand, "eval/solved", model, first)
    hand.votes = persistent_buffers(state.model)
    hand.state = state
    if first is None:
        state.model, state.weights = None, {}
    return hand


@torch.no_grad()
def intervals(model, groups, temperature) -> np.ndarray:
    """Return between which numbers lies a draw of each sampled token, (N, 2)."""
    # A draw is a number in [0, 1). Tokens divide [0, 1) into intervals as wide as their
    # probabilities, and the number's interval says which token it draws.
    found = []
    for s in [s for group in groups.values() for s in group]:
        widths = read_alone(model, s, temperature)[0].double().exp()
        targets = torch.tensor([s.tokens[at + 1] for at in s.at])[:, None]
        width = widths.gather(-1, targets)
        end = widths.cumsum(-1).gather(-1, targets)
        found.append(torch.cat([end - width, end], -1).numpy())
    return np.concatenate(found)


@torch.no_grad()
def solve(case, hand, name, model, first):
    """Measure the fraction of held-out prompts that greedy play solves, into hand.found[name]."""
    # This is the one number that the ordinary sampler has a part in: it plays, in float64, as
    # `evaluate` does. The second precision reads the same plays.
    config = case.config
    if first is None:
        prompts = range(config.eval_prompts)
        starts = draw_prompts(config, case.task, EVALUATION, 0, prompts, held_out=True)
        greedy = dataclasses.replace(config, group=1, temperature=0.0, forks=1, fork_turns=0)
        hand.plays[name] = [t for (t,) in play(greedy, case.task, Sampler(model), starts, key=())]
    plays = (first or hand).plays[name]

    # A margin says how far the likeliest token was ahead of the next, at the closest choice of a
    # play. If rounding turned that choice around, the run has played a different game.
    margins = []
    for t in plays:
        s = Recorded(t.group, 0, t.tokens, np.flatnonzero(t.sampled).tolist(), [], [], False)
        top_N2 = read_alone(model, s, 1.0)[0].double().topk(2).values
        margins.append(float((top_N2[:, 0] - top_N2[:, 1]).min()))
    solved = mean_of([t.reward >= 1 for t in plays])
    hand.found[name] = solved._replace(margins=np.array(margins), each=1 / len(plays))


class Progress:
    """Says before the audit begins how long it will take and how much memory, then how far it is.

    tell: a function that prints a line. None: nothing is said.
    """

    def __init__(self, case, tell):
        self.tell = tell
        self.done = 0
        self.told = self.begun = time.monotonic()
        self.bar = None
        rollouts = [s for group in case.groups.values() for s in group]
        c = case.config

        # How often each rollout is read: for the draws, the reference, `old` and so on, and with a
        # gradient for an update, which takes three times as long.
        extra = bool(c.kl_coef) + (c.advantage in ("gae", "teacher"))
        self.readings = len(rollouts) * (2 * (2 + extra) + bool(c.proximal))
        if tell is None:
            return

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
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.readings, unit=" readings", leave=False)

    def watch(self):
        """Count a reading. On a terminal a bar shows it, elsewhere a line each half minute."""
        self.done += 1
        if self.bar is not None:
            self.bar.update()
        elif self.tell and time.monotonic() - self.told > 30:
            self.told = time.monotonic()
            self.tell(f"{min(self.done, self.readings)} of {self.readings} readings done, "
                      f"{(self.told - self.begun) / 60:.1f} minutes")  # fmt: skip

    def close(self):
        if self.bar is not None:
            self.bar.close()


# The table --------------------------------------------------------------------------------------
# A row for each number that the run recorded and the step determines.


@dataclass
class Report:
    """The findings of an audit."""

    run: str
    step: int
    config: object
    intro: list  # sentences
    rows: list  # Audited, in `order`
    left_out: list  # names of metrics that the step does not determine
    group: int  # whose tokens are shown
    sequences: list  # its Recorded rollouts
    loss: str  # how the parts of all tokens add up
    updates: int  # of the step: the loss is their mean
    show: object  # tokens as text

    @property
    def wrong(self):
        """Return the key of the first row that is outside; None if all are ok."""
        return next((row.key for row in self.rows if not row.ok), None)

    @property
    def verdict(self):
        found = "ok" if self.wrong is None else f"{self.wrong} is outside"
        return f"audit of step {self.step}: {found}"


def audited(run, step=None, group=None, task="", reward="", tell=None) -> Report:
    """Do a step of a run again by hand, and compare it with the run's files.

    The arguments have the names and meanings of the command line's, see `main`. Without `group`,
    the first group with unequal rewards is shown. Raises ValueError if the step cannot be audited.
    tell: a function that prints a line, to say how far the audit is.
    """
    files = RunFiles(run, task, reward)
    config = files.config
    step = files.chosen_step(step)
    task = make_task(config)
    intro = []
    with tempfile.TemporaryDirectory() as room:
        case = Case(files, task, step, Path(room), files.rollouts(step, task.vocab_size))
        case.find_states(intro.append)
        if group is not None and group not in case.lines:
            last = len(case.lines) - 1
            raise ValueError(f"--group {group}: the groups of step {step} are 0 to {last}")

        # The tokens of the rollouts are the run's. Everything else about them is computed again: in
        # float64, and in the precisions that tell what rounding does.
        times = TIMES * (LATER + 2 * case.again) if case.again else TIMES
        rounding = Rounding.of(config.compute, times)
        intro.append(f"by hand in float64; {str(rounding.dtype)[6:]} tells what rounding does")
        if rounding.scale != 1:
            intro[-1] += (f", times {rounding.scale:.1e}, the ratio of the two units in the last "
                          f"place")  # fmt: skip
        case.groups = groups_again(config, task, step, case.lines)
        progress = Progress(case, tell)
        case.watch = progress.watch
        exact = in_precision(case, (torch.float64, torch.float64), spelled=group)
        lower = rounding.dtype, Rounding.of(config.rollout_dtype, times).dtype
        rounded = in_precision(case, lower, first=exact)
        progress.close()
        if tell is not None and step + 1 in files.checkpoints:
            tell("comparing the parameters, entry by entry")
        rows = compared_rows(case, exact, rounded, rounding, intro.append)

    # Numbers that are in the line and not by hand: what no step determines, and what is unknown.
    line = files.metrics[step]
    left_out = sorted(line.keys() - exact.found.keys() - {"step"})
    unknown = [name for name in left_out if not name.startswith(NOT_BY_HAND)]
    if unknown:
        intro.append(f"the audit does not know {', '.join(unknown)}: add the definition to "
                     f"`metrics_by_hand` in full/audit.py")  # fmt: skip

    # A group whose rewards are all equal would show nothing but the entropy bonus.
    groups = exact.groups
    if group is None:
        learning = [n for n in groups if any(any(s.A or []) for s in groups[n])]
        group = learning[0] if learning else 0

    # Each token has a part of the loss of its update, and the loss is the mean of the updates'.
    updates = max(1, len(exact.state.updates))
    parts = {}
    for n in groups:
        parts[n] = math.fsum(term["part"] for s in groups[n] for term in s.terms) / updates
    own = parts.pop(group)
    others = math.fsum(parts.values())
    loss = f"loss: this group {own:.15g} + the other groups {others:.15g} "
    loss += f"= {own + others:.15g}, loss/token_mean by hand"
    return Report(
        run=str(run), step=step, config=config, intro=intro,
        rows=sorted(rows, key=lambda row: order().index(row.key)), left_out=left_out, group=group,
        sequences=groups[group], loss=loss, updates=updates, show=task.show,
    )  # fmt: skip


def compared_rows(case, exact, rounded, rounding, say) -> list:
    """Compare the draws, the tokens, their advantages, the metrics of the line, the parameters."""
    line = case.files.metrics[case.step]
    rows = rollout_rows(case, exact, rounded, rounding)
    rows.append(sampling_row(case, exact, rounded, rounding.times, say))
    for key in line.keys() & exact.found.keys():
        recorded = math.nan if line[key] is None else line[key]
        if not isinstance(recorded, int | float):
            raise ValueError(f"{key} of step {case.step} in metrics.jsonl is not a number")
        rows.append(rounding.row(key, recorded, exact.found[key], rounded.found[key]))
    return rows + after_rows(case, exact, rounded, rounding, say)


def sampling_row(case, exact, rounded, times, say) -> Audited:
    """Compare each draw with its token's interval, and say how many lie outside."""
    config = case.config
    rounding = Rounding.of(config.rollout_dtype, times)
    draws = []
    for s in [s for group in exact.groups.values() for s in group]:
        for at in s.at:
            # A rollout has a random number for each place after the prompt. Rollouts that share a
            # turn were played as one, with the numbers of the first of them.
            played, _ = shares(config, s, at)[-1]
            key = config.seed, case.step, s.group, played
            draws.append(train_grpo.uniforms(key, at + 2 - s.prompt)[-1])

    # Rounding moves an end of an interval a little, and a number near it falls on the neighbor.
    misses = np.maximum(exact.ends[:, 0] - draws, draws - exact.ends[:, 1]).clip(0)
    row = rounding.row_of_many("sampling", misses, exact.ends.ravel(), rounded.ends.ravel())
    say(
        f"sampling: {len(misses)} draws, of which {np.count_nonzero(misses)} lie outside their "
        f"token's interval of the definition's distribution, the worst by {row.difference:.1e}; "
        f"rounding in {config.rollout_dtype} explains {row.allowed:.1e}, and "
        f"{np.count_nonzero(misses > row.allowed)} lie further away"
    )
    return row


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
    worst = max(rows, key=lambda name: rows[name].difference / max(rows[name].allowed, 1e-300))
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
    votes = Audited("votes", *sizes, wrong, 4 * rounding.undecided(*loads))
    return [rows[worst], votes]


# The report as text -----------------------------------------------------------------------------
# What is outside, or the whole table, and the tokens of one group with their parts of the loss.


def summary(report, everything) -> str:
    """Return what the report says of the step as a whole: sentences, and the table of rows.

    everything: with all rows. Without, only what is outside and the row that is nearest to it.
    """
    rows = [row for row in report.rows if everything or not row.ok]
    lines = [f"audit of {report.run}, step {report.step}", *report.intro, ""]
    if rows:
        lines.append(f"{'':28}{'recorded':>22}{'by hand':>22}{'difference':>12}{'allowed':>10}")
    for row in rows:
        verdict = "ok" if row.ok else "OUTSIDE"
        lines.append(f"{row.key:28}{row.recorded:22.15g}{row.by_hand:22.15g}"
                     f"{row.difference:12.1e}{row.allowed:10.1e}  {verdict}")  # fmt: skip
    good = [row for row in report.rows if row.ok]
    nearest = max(good, key=lambda row: row.difference and row.difference / row.allowed)
    lines += [
        f"{len(good)} of {len(report.rows)} numbers are within what rounding explains; nearest to "
        f"its bound is {nearest.key}, {nearest.difference:.1e} of {nearest.allowed:.1e}",
        f"not determined by the step: {', '.join(report.left_out) or 'nothing'}",
    ]
    return "\n".join(lines)


def token_rows(report, s) -> list:
    """Return a dict for each token of a rollout; `part` is None where it was not trained on."""
    # Target `at` is token at + 1. Token 0 is not a target.
    place = {at + 1: n for n, at in enumerate(s.at)}
    rows = []
    for index, token in enumerate(s.tokens):
        row = dict(text=report.show([token]), part=None)
        row["why"] = "the prompt" if index < s.prompt else "the task's reply"
        if index in place:
            row["why"] = "sampled, and not trained on"
        if index in place and s.terms:
            n = place[index]
            row |= s.terms[n] | dict(smp=s.smp[n], old=s.old[n], lp=s.lp[n], A=s.A[n])
            row["part"] /= report.updates  # the loss is a mean over updates, and so is its part
        rows.append(row)
    return rows


def print_report(report, everything=True, tokens=True) -> None:
    """Print the summary, and how the tokens of one group add up to their loss."""
    print(summary(report, everything))
    for s in report.sequences if tokens else ():
        print(f"\ngroup {report.group}, rollout {s.number}, reward {s.reward:g}")
        print(f"  {'token':>14}  sampled{'sampler':>11}{'old':>11}{'now':>11}{'ratio':>10}  clip"
              f"{'advantage':>11}{'part of loss':>14}")  # fmt: skip
        for row in token_rows(report, s):
            # A token that is not in the loss has no numbers.
            if row["part"] is None:
                print(f"  {row['text']:>14}  {row['why']}")
                continue
            clip = "yes" if row["clips"] else "no"
            print(f"  {row['text']:>14}{'yes':>9}{row['smp']:11.6f}{row['old']:11.6f}"
                  f"{row['lp']:11.6f}{row['r']:10.6f}{clip:>6}{row['A']:11.6f}"
                  f"{row['part']:14.6e}")  # fmt: skip
    print(report.loss, report.verdict, sep="\n")


# The report as a page ---------------------------------------------------------------------------
# `--html FILE`: one file of HTML, which loads nothing and runs no script. If you do not show a step
# to others, skip this.

# A token is a link. Its numbers are hidden until the link is pointed at (:hover) or named in the
# page's address (:target). No script is needed for that.
PAGE = string.Template("""\
<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>$verdict</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1.5em;
       color: #1c1f23; background: #fff }
h1 { font-size: 1.4em; margin-bottom: .2em } h2 { font-size: 1.1em; margin-top: 2em }
p { margin: .3em 0 } pre, .numbers, table { font: 13px/1.5 ui-monospace, monospace }
pre { white-space: pre-wrap } .ok { color: #1a7f37 } .outside { color: #cf222e }
table { border-spacing: 3px 5px; font-size: 14px; margin-bottom: 12em }
th { text-align: left; font: 13px system-ui, sans-serif; color: #6e7781; padding-right: 1em;
     white-space: nowrap }
td { position: relative; padding: 0 }
.token { display: block; padding: .15em .45em; border-radius: 4px; text-align: center;
         white-space: pre; color: inherit; text-decoration: none; min-width: 1em }
.given { color: #8c959f; font-style: italic } .shared { opacity: .35 }
.clips { text-decoration: underline 3px }
.token:hover, .token:target { outline: 2px solid #57606a; opacity: 1 }
.numbers { display: none; position: absolute; left: 0; top: 1.9em; z-index: 1; padding: .7em 1em;
           background: #fff; border: 1px solid #57606a; border-radius: 6px; white-space: pre;
           box-shadow: 0 4px 14px #0003 }
.token:hover + .numbers, .token:target + .numbers { display: block }
.token:hover + .numbers { z-index: 2 }
</style>
<h1 class="$color">$verdict</h1>
<pre>$summary</pre>
<h2>Group $group</h2>
<p>A row is a rollout, a column a place in it. Green tokens have a positive advantage, \
red ones a negative one; underlined ones are clipped; grey ones were not sampled. What is \
pale is shared with the row above. Point at a token for its part of the loss.</p>
<p>$loss</p>
<table>
$rollouts
</table>
</html>
""")


def page_of(report) -> str:
    """Return the report as one page of HTML."""
    # The names of tasks and directories are text, and not markup.
    return PAGE.substitute(
        verdict=html.escape(report.verdict), color="ok" if report.wrong is None else "outside",
        summary=html.escape(summary(report, True)), group=report.group,
        loss=html.escape(report.loss),
        rollouts="\n".join(rollouts_as_html(report)),
    )  # fmt: skip


def rollouts_as_html(report) -> list:
    """Return the group's rollouts as rows, with rollouts that share a prefix next to each other."""
    # Sorted by their tokens, rollouts are the leaves of the tree of their prefixes from left to
    # right. The prefix that a row shares with the row above is drawn pale.
    largest = max((abs(A) for s in report.sequences for A in s.A or []), default=0.0) or 1.0
    lines = []
    above = []
    for s in sorted(report.sequences, key=lambda s: s.tokens):
        shared = len(os.path.commonprefix([above, s.tokens]))
        above = s.tokens
        cells = [f"<th>rollout {s.number}, reward {s.reward:g}</th>"]
        for place, row in enumerate(token_rows(report, s)):
            kinds = {"token": True, "shared": place < shared, "given": row["part"] is None,
                     "clips": row.get("clips")}  # fmt: skip
            shade = ""
            if not kinds["given"]:
                # Green for tokens that the step makes likelier, red for the others.
                rgb = "46, 160, 67" if row["A"] > 0 else "248, 81, 73"
                shade = f' style="background: rgba({rgb}, {0.75 * abs(row["A"]) / largest:.2f})"'

            # A token links to itself: named in the page's address, it shows its numbers at once.
            name = f"r{s.number}t{place}"
            numbers = "\n".join(equations(report, s, row))
            text = html.escape(row["text"])
            classes = " ".join(kind for kind in kinds if kinds[kind])
            cells.append(
                f'<td><a class="{classes}" id="{name}" href="#{name}"{shade}>{text}</a>'
                f'<div class="numbers">{html.escape(numbers)}</div></td>'
            )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return lines


def equations(report, s, row) -> list:
    """Return the equations for one token with its numbers, without what the settings leave out."""
    c = report.config
    if row["part"] is None:
        return [f"{row['text']}: {row['why']}"]
    is_mean = c.objective == "gspo"
    lines = [
        f"A = {row['A']:.6f}    log-probs: sampler {row['smp']:.6f}, old {row['old']:.6f}, "
        f"now {row['lp']:.6f}",
        f"(2) r = exp({'mean of ' * is_mean}now - old) = {row['r']:.6f}",
    ]

    # l after (3) and (4). The token's `policy` is w l / Z, its share in the loss.
    bounded = f"min(r, {c.dual_clip:g})" if c.dual_clip else "r"
    clip = f"-min({bounded} A, clip(r, {1 - c.clip_low:g}, {1 + c.clip_high:g}) A)"
    tau = 1.0 if row["A"] > 0 else 1.05
    text = {
        "reinforce": "-A now", "clip": clip, "gspo": clip,
        "cispo": f"-min(r, {c.cispo_bound:g}) A now",
        "sapo": f"-4 / {tau:g} sigmoid({tau:g} (r - 1)) A",
        "gmpo": f"-exp(mean of now - old in -{c.clip_low:g} .. {c.clip_high:g}) A",
        "dppo": "-min(r, 20) A now, 0 where clipped",
    }.get(c.objective, c.objective)  # fmt: skip
    if c.importance_cap:
        text += f", times {row['x']:.6f} (4)"
    clipped = ", clipped" if row["clips"] else ""
    lines.append(f"(3) l = {text} = {row['policy'] * s.Z / s.w:.6f}{clipped}")

    # What is added to l, and its share in the loss of its update.
    if s.ref is not None and c.kl_in == "loss":
        lines.append(f"(5) + {c.kl_coef:g} k = {c.kl_coef:g} x {row['k']:.6f}")
    if c.entropy_coef:
        lines.append(f"(5) - {c.entropy_coef:g} H = -{c.entropy_coef:g} x {row['H']:.6f}")
    if s.v is not None:
        lines.append(f"(6) + the critic's {row['value']:.6f}")
    of = f", of {report.updates} updates" if report.updates > 1 else ""
    total = row["part"] * report.updates * s.Z / s.w
    lines.append(f"(7) w l / Z = {s.w:g} x {total:.6f} / {s.Z:g}{of}: {row['part']:.6e}")
    return lines


# The command ------------------------------------------------------------------------------------
# `python -m full audit RUN`, and `python -m full audit RUN`, which calls `main`.


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
        print_report(report, o.all, o.all or o.group is not None)
        if o.html:
            Path(o.html).write_text(page_of(report))
        return 0 if report.wrong is None else 1

    try:
        return quietly(command, options)
    except ERRORS as error:
        if isinstance(error, TaskError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"error: {options.run} cannot be audited: {error}", file=sys.stderr, flush=True)
        return 2

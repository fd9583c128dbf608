"""A step of a run by hand, every number compared: adds runs to `train_grpo.check`.

    python -m full audit runs/guess-0 [--step 20] [--all] [--html page.html]

recorded.py reads what the run has recorded, byhand.py does the step again, rounding.py says how far
two numbers may be apart, and report.py prints them. This file has the table in the middle: a `Row`
for each number that the run recorded and the step determines. It trusts the task, the forward of a
model for one sequence, and the ordinary code up to a checkpoint.
"""

import argparse
import copy
import dataclasses
import functools
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import train_grpo
from full.byhand import OF_UPDATES, Step, metrics_by_hand, read
from full.checkpoint import read_checkpoint
from full.exact import packed_attention, require_exact_kernels
from full.export import one_process, policy_in
from full.hf import full_definition
from full.lora import definition as lora_definition
from full.lora import merge
from full.metrics import METRICS
from full.optimizer import persistent_buffers
from full.questions import make_task
from full.recorded import (
    Case, Recorded, RunFiles, counts_in, everyone, shares, teaches, trained,
)  # fmt: skip
from full.report import as_page, as_text
from full.rollouts import Sampler, play_held_out
from full.rounding import AGAIN, EACH, EXACT, cause, flip, mean, near_choices, tolerance

# How far the log-probs of an engine may be from the definition's, by the dtype of its weights: a
# token's, and the mean over all tokens, which also finds a small change of the temperature. An
# engine's kernels are not at hand. These are a few times what was measured, at most and on average:
#
#     full/generate.py, `guess`           float64     4.4e-16    9.3e-17
#     full/generate.py, SmolLM2-135M      float32     2.8e-5     3.2e-6
#     full/generate.py, SmolLM2-135M      bfloat16    0.21       0.035
#     vLLM 0.32, SmolLM2-135M             float32     6.9e-5     1.2e-5
#     vLLM 0.32, SmolLM2-135M             bfloat16    0.65       0.055
#     the same, each of 14 steps          bfloat16    2.3        0.053
ENGINE = {"float64": (1e-9, 1e-9), "float32": (1e-3, 1e-4), "bfloat16": (4.0, 0.1)}

SURPRISE = 5  # deviations that an engine's sum of -log p may be from the sum of the entropies

# What no step determines. A line's other numbers must be found here, or are named as unknown.
NOT_BY_HAND = ("seconds/", "memory/peak", "logprob_gap/identical", "tokens/trained")


def order() -> list:
    """Return the rows of the table, causes before their effects: the first that is outside says
    where to look."""
    # The first update's metrics come before those that a change of the weights has a part in.
    metrics = [*METRICS]
    place = metrics.index(OF_UPDATES[0])
    return [
        "rollouts/groups", "rollouts/tokens", "rollouts/sampled", "sampling",
        "sampling/tokens", "sampling/bits", "sampling/mean", "sampling/surprise",
        "rollouts/rewards", *metrics[:place], "rollouts/advantage",
        *(f"{name}_first" for name in OF_UPDATES), *metrics[place:], "votes", "parameters",
    ]  # fmt: skip


class Row(NamedTuple):
    """A row of the table. Where there are many numbers, `difference` is their largest."""

    key: str
    recorded: float
    by_hand: float
    difference: float
    allowed: float
    size: float = 1.0  # what the difference is relative to
    why: str = ""  # if the bound is loose: what makes it so

    @property
    def ok(self):
        return self.difference == 0 or self.difference <= self.allowed

    @property
    def share(self):
        """Return the difference as a fraction of what is allowed: the row is outside above 1."""
        return self.difference / max(self.allowed, 1e-300)

    @property
    def is_loose(self):
        """Return whether more than a tenth of the number is allowed."""
        return self.allowed > self.size / 10 and self.allowed > EXACT


def compared(key, recorded, value, allowed=0.0, size=None) -> Row:
    """Compare one number. size: what the difference is relative to. Default: the number."""
    difference = abs(recorded - value)
    if math.isnan(difference):
        agree = math.isnan(recorded) and not math.isfinite(value)
        difference = 0.0 if agree else math.inf
    size = abs(value) if size is None else size
    size = size if 0 < size < math.inf else 1.0
    return Row(key, recorded, value, difference, allowed + EXACT * abs(value), size)


def largest(key, differences, allowed) -> Row:
    """Compare many numbers: show the largest difference."""
    worst = float(np.max(differences, initial=0.0))
    return Row(key, 0.0, worst, worst, allowed)


# The rows of the table ----------------------------------------------------------------------------


def rollout_rows(case, step) -> list:
    """Compare rollouts.jsonl with what the task and the step say."""
    config = case.config
    tokens = wrong = unlike = 0
    rewards, advantages = [], []
    for s in everyone(case.groups.values()):
        # Which tokens are the task's, and which were marked as sampled.
        line = case.lines[s.group][s.number]
        tokens += len(s.tokens)
        wrong += s.differs
        unlike += len({*np.flatnonzero(line["sampled"]).tolist()} ^ {*s.at})

        # The reward of each turn. A turn that is missing on one side counts as reward 0 there.
        told, mine = dict(map(tuple, line["rewards"])), dict(s.rewards)
        rewards += [abs(told.get(at, 0.0) - mine.get(at, 0.0)) for at in {*told, *mine}]
        rewards.append(float(bool(line["truncated"]) != s.truncated))
        if s.A is not None and trained(config, [s]) and line["advantage"] is not None:
            advantages += zip(np.array(line["advantage"])[s.at], s.A)

    # The rounds of a step play as many new groups as are missing, each time.
    played = chosen = 0
    for _ in range(config.max_rounds):
        new = range(played, played + config.prompts - chosen)
        chosen += len([n for n in new if n not in case.lines or teaches(config, case.groups[n])])
        played = new.stop
    size = max((abs(A) for _, A in advantages), default=0.0)
    return [
        Row("rollouts/groups", len(case.lines), played, abs(played - len(case.lines)), 0),
        Row("rollouts/tokens", tokens, tokens - wrong, wrong, 0),
        Row("rollouts/sampled", 0, unlike, unlike, 0),
        largest("rollouts/rewards", rewards, EXACT),
        largest("rollouts/advantage", [abs(x - A) for x, A in advantages],
                step.A_off + EXACT * size),
    ]  # fmt: skip


def draws_of(case, s):
    """Return the random numbers that have drawn a rollout's sampled tokens, (N,)."""
    # A rollout has a random number for each place after the prompt. Rollouts that share a turn were
    # played as one, with the numbers of the first of them.
    config, count = case.config, len(s.tokens) - s.prompt
    firsts = [shares(config, s, at)[-1][0] for at in s.at]
    numbers = {first: train_grpo.uniforms((config.seed, case.step, s.group, first), count)
               for first in {*firsts}}  # fmt: skip
    return np.array([numbers[first][at + 1 - s.prompt] for first, at in zip(firsts, s.at)])


@torch.no_grad()
def sampling_rows(case) -> list:
    """Compare each draw, or an engine's log-probs, with the sampler's distribution by hand."""
    config, model = case.config, case.policy(case.sampler)
    played = everyone(case.groups.values())
    readings = ((s, read(model, s, config.temperature)) for s in played)
    T = tolerance(model.config, config.rollout_dtype, case.again)
    rows = engine_rows(case, readings) if case.files.engine else draw_rows(case, readings, T)
    return rows + exact_rows(case) if case.files.exact else rows


def draw_rows(case, readings, T) -> list:
    """Compare the run's own draws with the intervals of their tokens."""
    # A draw is a number in [0, 1). Tokens divide [0, 1) into intervals as wide as their
    # probabilities, and the number's interval says which token it draws. T moves an end of an
    # interval by T / 4 at the most, for a sum of half of all probability.
    missed, allowed = [], []
    for s, reading in readings:
        at = torch.tensor(s.targets)[:, None]
        ends = reading.logp_NV.exp().cumsum(-1).gather(1, at)[:, 0].numpy()
        draws = draws_of(case, s)
        outside = np.maximum(ends - reading.lp.exp().numpy() - draws, draws - ends).clip(min=0)
        missed += outside.tolist()
        allowed += ((T * reading.scale + flip(reading.routing, T)) / 4).tolist()
    worst = np.divide(missed, allowed).argmax()
    case.say(f"sampling: {np.count_nonzero(missed)} of {len(missed)} draws lie outside their "
             f"token's interval of the definition's distribution")  # fmt: skip
    return [largest("sampling", missed[worst], allowed[worst])]


def engine_rows(case, readings) -> list:
    """Compare the log-probs that an engine told, and by them how it drew its tokens."""
    # The surprise of a token, -log p, is the entropy on average, if the token is drawn by p. It is
    # not if sampling is greedy or truncated.
    off, surprises, entropies, variances = [], [], [], []
    for s, reading in readings:
        off += abs(reading.lp.numpy() - s.smp).tolist()
        # With forks several rollouts share a turn, which was drawn once.
        is_own = [shares(case.config, s, at)[-1][0] == s.number for at in s.at]
        seen_NV = reading.logp_NV.where(reading.logp_NV.isfinite(), 0.0)
        variance_N = (reading.logp_NV.exp() * (seen_NV + reading.H[:, None]) ** 2).sum(-1)
        surprises += (-reading.lp)[is_own].tolist()
        entropies += reading.H[is_own].tolist()
        variances += variance_N[is_own].tolist()

    # If steps were done again on the way, the sampler's weights have the trainer's rounding too.
    bounds = np.array(ENGINE[case.config.rollout_dtype])
    if case.again:
        bounds += tolerance(case.shape, case.config.compute, case.again)
    case.say(f"sampling: {case.files.engine} drew {len(surprises)} tokens by numbers of its own, "
             f"so no draw is compared, but its log-probs, and the sum of -log p of these tokens "
             f"with their entropies")  # fmt: skip

    # The sum of a martingale is rarely beyond SURPRISE times this deviation, however rare some
    # tokens are: with a probability of 2 exp(-25 / 2) at the most (Bercu and Touati, 2008).
    found, expected = np.sum(surprises), np.sum(entropies)
    squares = np.square(np.subtract(surprises, entropies)) + variances
    return [largest("sampling", off, bounds[0]), largest("sampling/mean", np.mean(off), bounds[1]),
            Row("sampling/surprise", found, expected, abs(found - expected),
                SURPRISE * math.sqrt(squares.sum()))]  # fmt: skip


@torch.no_grad()
def exact_rows(case) -> list:
    """Compare tokens and log-probs of an --exact run to the bit, by the trainer's own forward."""
    # This shares the model's forward and the formula of its log-probs with the run. What it shows
    # is that the recorded numbers are those of the trainer: of this model, in this precision, for
    # each rollout alone and whole.
    config = dataclasses.replace(case.config, exact=True)
    model = policy_in(case.sampler, config, case.task, config.rollout_dtype)
    require_exact_kernels(model)
    off, wrong = [], 0
    for s in everyone(case.groups.values()):
        tokens_1S = torch.tensor([s.tokens])
        attention = packed_attention(torch.zeros_like(tokens_1S))
        logits_NV = model.logits(model.hidden(tokens_1S, attention=attention)[0, s.at])
        uniform_N = torch.from_numpy(draws_of(case, s))
        drawn_N, lp_N = model.sample(logits_NV, uniform_N, temperature=config.temperature)
        wrong += np.count_nonzero(drawn_N.numpy() != s.targets)
        off += abs(lp_N.numpy() - s.smp).tolist()
    count, unequal = len(off), np.count_nonzero(off)
    case.say(f"exact: the trainer's forward, which this trusts, draws {count - wrong} of {count} "
             f"tokens as recorded, and {count - unequal} log-probs to the bit")  # fmt: skip
    return [Row("sampling/tokens", count, count - wrong, wrong, 0),
            Row("sampling/bits", count, count - unequal, unequal, 0)]  # fmt: skip


@torch.no_grad()
def solved_row(case, key, recorded, model, off) -> Row:
    """Compare the fraction of held-out prompts that greedy play solves.

    off: by how much the difference of two logits may be off, relative to their spread.
    """
    # This is the one number that the ordinary sampler has a part in: it plays, in float64. If
    # rounding turns the closest choice of a play around, the run has played a different game.
    # Where the numbers agree, no play is read again.
    _, groups = play_held_out(case.config, case.task, Sampler(model))
    plays = [t for (t,) in groups]
    value, exact = mean([t.reward >= 1 for t in plays])
    if abs(recorded - value) <= exact:
        return compared(key, recorded, value, exact, 1.0)
    near = sum(is_close(model, t, off) for t in plays)
    why = f"in {near} of {len(plays)} games a choice is within rounding, and another is played"
    return compared(key, recorded, value, near / len(plays), 1.0)._replace(why=why)


def is_close(model, t, off) -> bool:
    """Return whether rounding may turn one of the choices of a greedy play around."""
    at = np.flatnonzero(t.sampled).tolist()
    reading = read(model, Recorded(group=t.group, number=0, tokens=t.tokens, at=at), 1.0)
    best_N2 = reading.logp_NV.topk(2).values.numpy()
    lead = (best_N2[:, 0] - best_N2[:, 1]) / reading.scale
    return bool(lead.min() <= off + flip(reading.routing, off))


def as_sampled(step):
    """Return the model of a Step's weights as a push gives them to the sampler, in float64."""
    config, model = step.config, copy.deepcopy(step.policy).requires_grad_(False)
    for name, weight in step.of_policy.weights.items():
        model.get_parameter(name).data = weight.detach().double()
    rounded = getattr(torch, config.rollout_dtype)
    return (merge(model, rounded) if config.lora is not None else model.to(rounded)).double()


def after_rows(case, step) -> list:
    """Compare parameters and votes with the next checkpoint, if there is one."""
    path = case.files.checkpoints.get(case.step + 1)
    if path is None:
        case.say(f"parameters after the step: not compared, no step-{case.step + 1:08d} is there")
        return []

    # Each entry is held to its own rounding, and the one furthest from it is shown: AdamW makes
    # steps of one length, so a fault in a small tensor is as large as in a big one.
    rows = {}
    weights = [(prefix, learner, name, stored) for prefix, learner in step.learners.items()
               for name, stored in case.weights(path, prefix).items()]  # fmt: skip
    for prefix, learner, name, stored in weights:
        allowed = learner.slack[name].flatten()
        if case.again:  # the steps on the way to this one have moved other entries by rounding
            allowed = torch.full_like(allowed, (AGAIN + EACH * case.again) * allowed.max())
        differences = (learner.weights[name].double() - stored).abs().flatten()
        furthest = int((differences / allowed.clamp(min=1e-30)).argmax())
        found, most = differences[furthest].item(), allowed[furthest].item()
        name = prefix + name
        rows[name] = Row("parameters", 0.0, found, found, most, learner.lr or 1.0,
                         f"rounding may turn AdamW's step for an entry of {name}")  # fmt: skip
    worst = max(rows, key=lambda name: rows[name].share)
    case.say(f"parameters after the step: against {path.name}, the worst is {worst}")
    if not case.config.router_bias_rate:
        return [rows[worst]]

    # The routers' biases, in votes. An undecided choice changes the counts of two experts, and by
    # that their votes by two at the most.
    votes = persistent_buffers(step.policy)
    there = {name: torch.empty_like(x) for name, x in votes.items()}
    read_checkpoint(path, {f"buffer.{name}": x for name, x in there.items()}, only=("buffer.",))
    wrong = sum(int((there[name] - x).abs().sum()) for name, x in votes.items())
    sizes = [sum(int(x.abs().sum()) for x in some.values()) for some in (there, votes)]
    near = near_choices(step.updates) if step.updates else 0
    return [rows[worst], Row("votes", *sizes, wrong, 4 * near)]


def rows_of(case, line) -> tuple:
    """Return all rows of a step, in `order`, and the Step by hand. line: of metrics.jsonl."""
    # JSON has no NaN: it is written as null.
    line = {key: math.nan if number is None else number for key, number in line.items()}
    rows = sampling_rows(case)
    off = tolerance(case.shape, case.config.rollout_dtype, case.again)
    off = max(off, ENGINE[case.config.rollout_dtype][0]) if case.files.engine else off

    # The evaluation before a step, which only the first line has, is by the weights before it.
    name = "eval/solved_before"
    if name in line:
        rows.append(solved_row(case, name, line[name], case.policy(case.before), off))
    step = Step(case)
    found = metrics_by_hand(case, step, counts_in(case.sampler)["policy_version"])
    rows += [compared(key, line[key], *found[key]) for key in line.keys() & found.keys()]
    rows += rollout_rows(case, step) + after_rows(case, step)
    step.free()
    name = "eval/solved"
    if name in line:
        off += step.of_policy.astray
        rows.append(solved_row(case, name, line[name], as_sampled(step), off))
    rows = [row._replace(why=row.why or cause(step, row.key)) if row.is_loose else row
            for row in rows]  # fmt: skip
    return sorted(rows, key=lambda row: order().index(row.key)), step


# The audit ----------------------------------------------------------------------------------------


@dataclass
class Report:
    """The findings of an audit."""

    run: str
    step: int
    config: object
    show: Callable  # tokens as text
    intro: list  # sentences
    groups: dict  # number -> its Recorded rollouts
    rows: list  # Row, in `order`
    left_out: list  # metrics that the step does not determine
    updates: int  # of the step: the loss is their mean
    group: int  # whose tokens are shown

    @property
    def wrong(self):
        """Return the key of the first row that is outside; None if all are ok."""
        return next((row.key for row in self.rows if not row.ok), None)

    @property
    def verdict(self):
        found = "ok" if self.wrong is None else f"{self.wrong} is outside"
        return f"audit of step {self.step}: {found}"


def audited(
    run, step=None, group=None, task="", reward="", tell=lambda line: None,
    make=make_task
) -> Report:  # fmt: skip
    """Do a step of a run again by hand, and compare it with the run's files.

    The arguments have the names and meanings of the command line's, see `main`. Without `group`,
    the first group with unequal rewards is shown. Raises ValueError if the step cannot be audited.
    tell: a function. It gets lines that say how far the audit is.
    make: a function that makes the task of a Config. Default: of the one that the run names.
    """
    files = RunFiles(run, task, reward)
    config, number, intro = files.config, files.chosen_step(step), []
    files.directory.require_noted("base.json", config)
    task, line = make(config), files.metrics[number]
    files.directory.require_noted("data.json", config, task)
    with tempfile.TemporaryDirectory() as room:
        case = Case(files, task, number, Path(room), say=intro.append)
        case.find_states()
        groups = case.groups
        if group not in (None, *groups):
            raise ValueError(f"expected --group to be 0 to {len(groups) - 1}, the groups of step "
                             f"{number}, got {group}")  # fmt: skip
        for s in groups[group] if group is not None else ():
            s.spelled = full_definition if config.lora is None else lora_definition
        rollouts = everyone(groups.values())
        tell(f"{len(rollouts)} rollouts of {sum(len(s.tokens) for s in rollouts)} tokens, by hand "
             f"in float64")  # fmt: skip
        rows, by_hand = rows_of(case, line)

    # Numbers that the definition does not compute: what no step determines, and what is unknown.
    left_out = sorted(line.keys() - {row.key for row in rows} - {"step"})
    unknown = [name for name in left_out if not name.startswith(NOT_BY_HAND)]
    if unknown:
        intro.append(f"the audit does not know {', '.join(unknown)}: add the definition to "
                     f"`metrics_by_hand` in full/byhand.py")  # fmt: skip

    # A group whose rewards are all equal would show nothing but the entropy bonus.
    learning = [n for n in groups if any(s.A is not None and s.A.any() for s in groups[n])]
    shown = next(iter(learning), 0) if group is None else group
    return Report(str(run), number, config, task.show, intro, groups, rows, left_out,
                  updates=max(1, len(by_hand.updates)), group=shown)  # fmt: skip


def main(argv) -> int:
    """Audit a run. Return 0 if every number is within what rounding allows, else 1."""
    parser = argparse.ArgumentParser("python -m full audit", allow_abbrev=False)
    parser.add_argument("run", help="directory of a run; nothing is written there")
    parser.add_argument("--step", type=int, help="[the last that a checkpoint has sampled, or 0]")
    parser.add_argument("--group", type=int, help="show this group, token by token")
    parser.add_argument("--all", action="store_true", help="print every row and every token")
    parser.add_argument("--html", metavar="FILE", help="also write it as a page")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--reward", default="", help="the run's FILE.py:function, if it had one")
    o = parser.parse_args(argv)

    # The process group of this one process is left before the findings are printed.
    with one_process("an audit"):
        tell = functools.partial(print, file=sys.stderr, flush=True)
        report = audited(o.run, o.step, o.group, o.task, o.reward, tell=tell)
    print(as_text(report, o.all, o.all or o.group is not None))
    if o.html:
        Path(o.html).write_text(as_page(report), encoding="utf-8")
        print(f"wrote {o.html}")
    return 0 if report.wrong is None else 1

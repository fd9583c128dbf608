"""Audit a run's step: hold every recorded number to the definition, by the step kit.

    python -m full audit runs/guess-0 [--step 20] [--all]

replay.py lets the task say the step's rollouts again, and models.py has the models. This file
gives both to the kit in `conformance/`: the sampling, the advantages, and each optimizer step. Each
number is computed in float64, and once more in the run's precision, the twin. A recorded number may
be FACTOR times as far from the definition's as the twin's is, and a floor. Where that is more than
a tenth of the number, the row says nothing, and says why. If a number is outside, the kit looks for
a mistake that explains it.
"""

import argparse
import functools
import itertools
import math
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch

from conformance import checks
from conformance import definition as D
from conformance.computed import EXACT, LEAST, METRICS, TINY, Row, Step
from conformance.mistakes import updates_explained
from full.audit import models as step_models
from full.audit.replay import (
    RunFiles, groups_played, mean, minibatches, replay, rollout_metrics, settings,
)  # fmt: skip
from full.learn.metrics import METRICS as LINE
from full.learn.trainer import CRITIC
from full.run.build import one_process
from full.run.logs import Bar
from full.run.tasks import make_task

# What no step determines. A line's other numbers must be found here, or are named as unknown.
NOT_BY_HAND = ("step", "seconds/", "memory/peak", "logprob_gap/identical", "tokens/trained")


class Audit:
    """The audit of a step: its rows, and what the kit finds.

    Rows are in the order of causes: the first one that is outside says where to look.
    files: RunFiles. models: of models.py. world: the run's ranks.
    """

    def __init__(self, files, models, task, step, world=1):
        self.files, self.models, self.task, self.step, self.world = files, models, task, step, world
        self.config, self.given = files.config, settings(files.config)
        self.c = SimpleNamespace(**D.DEFAULTS | self.given)
        line = files.metrics[step]
        self.line = {key: math.nan if x is None else x for key, x in line.items()}
        self.rows, self.findings, self.intro, self.near = [], {}, [], 0
        self.weights = {}  # of each model after the step
        self.groups = replay(self.config, task, step, files.rollouts(step, models.shape))
        self.played = [r for group in self.groups.values() for r in group]
        self.batches = minibatches(self.config, self.groups)
        self.trained = list(itertools.chain(*self.batches))

    def run(self):
        """Compare all numbers. Return the rows, in order."""
        # The tensors of checkpoints go to the disk before there are models in memory.
        prefixes = ["", CRITIC] if self.config.advantage == "gae" else [""]
        self.kinds = {prefix: [path and self.models.kinds(path, prefix) for path in (
            self.models.before, self.models.after)] for prefix in prefixes}  # fmt: skip
        self.check_rollouts()
        self.check_sampling()
        self.prepare()
        self.check_advantages()
        self.train()
        self.measure_step()
        self.rows = [row._replace(why="" if row.is_informative else self.cause(row))
                     for row in self.rows]  # fmt: skip
        return self.rows

    # What all parts use

    def step_of(self, rows, kinds, numbers, models, dtype) -> Step:
        """Return the kit's Step with its twin. The arguments are pairs: the definition, the twin.
        """
        numbers = numbers | dict(settings=self.given | dict(compute_dtype=""))
        coarse = numbers | dict(settings=self.given | dict(compute_dtype=dtype))
        twin = Step(rows[1], kinds[1], numbers, models[1], precision=getattr(torch, dtype))
        twin.is_nudged = dtype == "float64"
        step = Step(rows[0], kinds[0], coarse, models[0], dtype=getattr(torch, dtype), twin=twin)
        for x in (step, twin):
            x.make, x.most_tokens = self.models.new_kind, self.models.most_tokens
        return step

    def sequences(self, rollouts):
        """Return two lists of Sequences of rollouts: for the definition, and for the twin."""
        return [[r.sequence(n, self.world, scored=r.at if self.models.are_large else None)
                 for n, r in enumerate(rollouts)] for _ in range(2)]  # fmt: skip

    def row(self, key, recorded, by_hand, difference=None, **known):
        """Compare a number. known: other fields of a Row."""
        off = abs(recorded - by_hand) if difference is None else difference
        if math.isnan(off):  # JSON has no NaN: it is written as null
            off = 0.0 if math.isnan(recorded) and not math.isfinite(by_hand) else math.inf
        self.rows.append(Row(key, recorded, by_hand, off, **known))

    def add(self, key, value, distance=0.0, floor=0.0, **known):
        """Compare a number of the run's line, if it is there."""
        if key in self.line:
            self.row(key, self.line[key], value, distance=distance,
                     floor=floor + EXACT * abs(value), **known)  # fmt: skip

    def add_of(self, step, quantity, key, **known):
        """Compare what the kit has measured."""
        self.rows.append(step.measured[quantity]._replace(key=key, **known))

    def add_solved(self, key, make):
        """Compare the part of held-out prompts that is solved. make: see `step_models.solved`."""
        if key in self.line:
            value, doubt = step_models.solved(self.models, make, self.line[key])
            self.add(key, value, floor=doubt, size=1.0, because="plays in doubt" * (doubt > 0))

    def find(self, found, where=""):
        """Note what the kit found: {quantity: (finding, figures)}."""
        self.findings |= {f"{where}{quantity}": f"{finding} ({figures})"
                          for quantity, (finding, figures) in found.items() if finding}  # fmt: skip

    # Rollouts and advantages

    def check_rollouts(self):
        """Compare rollouts.jsonl with what the task says."""
        played = self.played
        count, sampled = (sum(map(len, x)) for x in zip(*((r.tokens, r.at) for r in played)))
        told, mine, off = zip(*(r.compared_rewards() for r in played))
        due = groups_played(self.config, self.groups)
        self.row("rollouts/groups", len(self.groups), due, floor=EXACT * due)
        self.row("rollouts/tokens", count, count - sum(r.differs for r in played))
        self.row("rollouts/sampled", sampled, sampled - sum(r.missampled for r in played))
        self.row("rollouts/rewards", math.fsum(told), math.fsum(mine), max(off), floor=EXACT,
                 size=1.0)  # fmt: skip
        for key, value in rollout_metrics(self.config, self.groups).items():
            self.add(key, value)

    def check_sampling(self):
        """Hold the sampler's log-probs and draws to the weights that sampled."""
        models, rows = self.models.sampler(), self.sequences(self.played)
        if self.files.engine:
            self.check_engine(models[0], rows[0])
        else:
            for r, s, x in zip(self.played, *rows):
                s.draws = x.draws = r.draws(self.config, self.step)
            step = self.step_of(rows, ({}, {}), {}, models, self.config.rollout_dtype)
            self.find(checks.sampling_of(step))
            self.add_of(step, "draws", "sampling", size=1.0)
            self.add_of(step, "sampler_logprobs", "sampling/logprobs", size=1.0)
        if self.files.exact:
            count, *wrong = step_models.exact_numbers(self.models, self.played, self.step)
            for key, x in zip(("sampling/tokens", "sampling/bits"), wrong):
                self.row(key, count, count - x)
        self.add_solved("eval/solved_before", models.__getitem__)

    def check_engine(self, model, rows):
        """Hold an engine's log-probs to the definition's. It drew by numbers of its own."""
        dtype = self.config.rollout_dtype
        most, most_on_average = step_models.ENGINE[dtype]
        numbers = dict(settings=self.given | dict(tolerance=most))
        step = Step(rows, {}, numbers, model, dtype=getattr(torch, dtype))
        step.most_tokens = self.models.most_tokens
        self.find({"sampling": checks.check_logprobs(step, "sampler_logprobs")})
        self.add_of(step, "sampler_logprobs", "sampling", size=1.0)
        off = mean([abs(s.lp[t] - s.sampler_logprobs[t]) for s in rows for t in s.at])
        self.row("sampling/mean", off, 0.0, floor=most_on_average, size=1.0,
                 because="measured engines")  # fmt: skip
        told, due, spread = step_models.surprise(model, self.played, self.config)
        self.row("sampling/surprise", told, due, floor=step_models.SURPRISE * spread,
                 because=f"{step_models.SURPRISE} standard deviations")  # fmt: skip
        self.intro.append(f"sampling: {self.files.engine} drew by numbers of its own, so no draw "
                          f"is compared, but its log-probs, and their sum with the entropies")

    def prepare(self):
        """Read what the updates need of each trained rollout: ref, old, values, rewards."""
        config = self.config
        rows = self.trained_rows = self.sequences(self.trained)
        read = functools.partial(step_models.read, temperature=config.temperature,
                                 most_tokens=self.models.most_tokens)  # fmt: skip
        first = self.models.policy()
        self.pairs = {"": first}
        if config.advantage == "gae":
            self.pairs[CRITIC] = self.models.critic(self.kinds[CRITIC][0]["before"])
            read(self.pairs[CRITIC], rows, "values", of=-1)

        # A reward's KL is against recorded log-probs. The loss compares two forwards, whose errors
        # add up or cancel out: half of the tokens have each.
        half = step_models.half
        read(self.models.reference(), rows, "ref_logprobs",
             mirrored=half if config.kl_in == "loss" else lambda place: False)  # fmt: skip
        read(self.models.teacher(), rows, "teacher_logprobs")
        own = len(self.batches[0]) if config.first_minibatch_uses_current_logprobs else 0
        later = [row[own:] for row in rows]
        if config.proximal:
            read(first, later, "old_logprobs", mirrored=half)
        for s in itertools.chain(*later) if not config.proximal else ():
            s.old_logprobs = s.sampler_logprobs
        for r, *both in zip(self.trained, *rows):
            for s in both:
                r.set_rewards(self.c, s)
                if not self.is_in_loss(r):
                    s.mask = [False] * len(s.mask)

    def is_in_loss(self, r):
        return not (self.config.overlong == "filter" and r.truncated)

    def check_advantages(self):
        """Hold the recorded advantages to the rewards. The recorded ones are used below."""
        rows = self.trained_rows
        if not self.trained:
            return
        step = self.step_of(rows, ({}, {}), {}, self.pairs[""], self.config.compute)
        step.floors["advantages"] = LEAST  # rewards are computed in float64 in every run
        self.find({"advantages": checks.check_advantages(step)})
        A = [s.advantages[t] for s in rows[0] for t in s.at]
        size = max(map(abs, A), default=0.0)
        self.add_of(step, "advantages", "rollouts/advantage", size=size)
        self.add("advantage/token_mean", mean(A), floor=EXACT * size)
        self.add("advantage/token_std", D.spread(A), floor=EXACT * size)

    # The updates

    def train(self):
        """Do the updates of each model by the kit."""
        config, lr = self.config, D.learning_rate(self.config, self.step)
        rates = {"": lr, CRITIC: config.critic_lr * (lr / config.lr)}

        # A minibatch makes no update if Z is 0. Under `constant` filtered rollouts count in Z.
        ends = [0, *itertools.accumulate(map(len, self.batches))]
        self.updates = [slice(*ends[n : n + 2]) for n, batch in enumerate(self.batches)
                        if D.denominator(self.c, [len(r.at) * self.is_in_loss(r) for r in batch])]
        for prefix in self.pairs:
            self.add(f"{prefix.replace('.', '/')}lr", rates[prefix])
            kinds = self.train_model(prefix, rates[prefix])
            self.weights[prefix] = kinds[0]["before"]
            if not prefix and "eval/solved" in self.line:
                self.add_solved("eval/solved", lambda n, kinds=kinds: self.models.as_sampled(
                    self.pairs[""][n].module, kinds[n]["before"]))  # fmt: skip

    def recorded(self, name, n):
        """Return the recorded number of update n, or None if it is not known."""
        first, all_, count = self.line.get(f"{name}_first"), self.line.get(name), len(self.updates)
        if count == 1 or first is None:
            return all_ if count == 1 else None
        # The mean of two updates and the first one give the second one.
        return first if n == 0 else 2 * all_ - first if count == 2 else None

    def train_model(self, prefix, lr):
        """Do the updates of a model, and compare all that is known of each. Return its kinds."""
        models, path, many = self.pairs[prefix], prefix.replace(".", "/"), len(self.updates) > 1
        before, after = self.kinds.pop(prefix)
        done = int(max(x.item() for x in before.pop("step").values()))
        kinds, steps, found, already = [before, before], [], [], {*self.findings}
        del before
        for n, update in enumerate(self.updates):
            h = dict(lr=lr, betas=[0.9, self.config.beta2], eps=1e-8, names=[*kinds[0]["before"]],
                     weight_decay=self.config.weight_decay)  # fmt: skip
            numbers = dict(optimizer=dict(step=done + n + 1, groups=[h]))
            loss = self.recorded("loss/token_mean", n)
            if not self.findings:  # after a finding, later numbers are its effects
                numbers["grad_norm"] = self.recorded(f"{path}grad_norm", n)
                numbers |= {} if prefix or loss is None else dict(loss=loss)
            if not self.findings and after and n + 1 == len(self.updates):
                kinds[0] = {**kinds[0], "after": after["before"], "exp_avg_after": after["exp_avg"]}
            rows = [row[update] for row in self.trained_rows]
            step = self.step_of(rows, kinds, numbers, models, self.config.compute)
            step.updates = n + 1
            self.find(checks.check_gradient(step), f"{prefix}update {n + 1}: " if many else prefix)
            size = max(step.full.norm, TINY)
            found.append(step.metrics() | {f"{path}grad_norm": (
                step.full.norm, step.distances["gradient norm"] * size, step.floor * size)})
            if not prefix and models[0].counts():
                self.route(models, len(rows[0]), found[-1])
            kinds = [x.next_kinds(y) for x, y in (
                (step, step.clip(step.full)), (step.twin, step.shaken))]  # fmt: skip
            steps = [*steps, step] if step.is_small else [step]  # a large one takes gigabytes
        self.compare_updates(prefix, path, found)
        if many and after and not already and self.findings:
            if text := next(updates_explained(steps), ""):
                self.findings = {f"{prefix}updates 1 to {len(steps)}": text}
        for key, name in (("gradient", "gradient"), ("parameters", "weights")):
            if steps and name in steps[-1].measured:
                where = steps[-1].measured[name].where
                self.add_of(steps[-1], name, f"{path}{key}", why=f"furthest in {where}")
        if not prefix and self.models.after and self.config.router_bias_rate:
            *sizes, wrong = self.models.votes_apart(models[0].module)
            self.row("votes", *sizes, wrong, floor=4 * self.near, because="near choices")
        if not after:
            self.intro.append(f"{prefix or 'the policy'}: the weights after the step are not "
                              f"compared, as there is no step-{self.step + 1:08d}")  # fmt: skip
        return kinds

    def route(self, models, count, found):
        """Count the tokens of experts in an update, and move the biases."""
        for model in models:
            model.routed = model.routed[-count:]  # of the forwards with a graph
        counts, near = models[0].counts(), step_models.near_choices(models)
        means = {layer: n_E.mean().item() for layer, n_E in counts.items()}
        load = max(n_E.max().item() / means[layer] for layer, n_E in counts.items())
        found["experts/load_max"] = load, 0.0, near / min(means.values())
        self.near += near
        for model in models if self.config.router_bias_rate else ():
            for layer, n_E in counts.items():
                model.module.model.layers[layer].mlp.votes += D.votes(n_E)

    def compare_updates(self, prefix, path, found):
        """Compare the metrics of a model's updates: the first one's, and of all."""
        # The first update's come before those that a change of the weights has a part in.
        own = (f"{path}grad_norm", "value/loss")
        names = [name for name in (found[0] if found else ())
                 if (name in own if prefix else name != "value/loss")]  # fmt: skip
        for name in names:
            self.add(f"{name}_first", *found[0][name])
        for name in names:
            self.add(name, *(LINE[name].reduce(list(x)) for x in zip(*(by[name] for by in found))))

    def measure_step(self):
        """Compute the metrics of the step that are of no update."""
        before, sampled = (self.models.states[path] for path in (
            self.models.before, self.models.sampled))  # fmt: skip
        U, version = len(self.updates), before["policy_version"]
        age = min(self.step, self.config.staleness)
        tokens = sum(len(r.tokens) for update in self.updates for r in self.trained[update])
        values = {
            "policy_version": version + U, "tokens/trained_flat": tokens,
            "updates/skipped": before["skipped"], "policy/age_mean": age, "policy/age_max": age,
            "policy_age/update_mean": version - sampled["policy_version"] + (U - 1) / 2,
        }  # fmt: skip
        if self.config.tree == "disabled":
            values["tokens/trained"] = tokens
        for key, value in values.items():
            self.add(key, value)
        if self.config.advantage != "gae":
            return
        # g - v is the advantage before it is whitened. A critic that says all has 1.
        (v, g), (v2, g2) = (torch.tensor(
            [(s.values[t], s.returns[t]) for s in row for t in s.at] or [(0.0, 0.0)],
            dtype=torch.float64).T for row in self.trained_rows)  # fmt: skip
        rest, spread = ((x - x.mean()).square().mean().sqrt().item() for x in (g - v, g))
        off = ((g - g2).square().mean() + (v - v2).square().mean()).sqrt().item()
        self.add("value/token_mean", v.mean().item(), (v - v2).abs().mean().item(), 1e-11)
        left = (rest / spread) ** 2 if spread**2 > 1e-12 else 1.0
        self.add("value/explained_variance", 1 - left, 2 * left * off / max(rest, 1e-300), 1e-9)

    def cause(self, row) -> str:
        """Say why a row says nothing."""
        key, dtype = row.key.removesuffix("_first"), self.config.compute
        if key.startswith("logprob_gap"):
            return "the number is the rounding of two forwards itself"
        if row.why:
            why = row.why
        elif key == "experts/load_max" and self.near:
            why = f"{self.near} choices of experts are within rounding"
        elif not row.by_hand:
            return f"the number is 0, and rounding in {dtype} may make it {row.allowed:.0e}"
        elif key in METRICS and METRICS[key][0] in ("clips", "masked"):
            why = "so many tokens are within rounding of a bound"
        elif row.because:
            why = row.because
        elif len(self.updates) > 1 and row.key == key and not key.startswith("sampling"):
            why = ("AdamW makes full steps of rounding, so the weights before the last update are "
                   "known less well")  # fmt: skip
        else:
            why = f"its terms have both signs, or {dtype} is too coarse for it"
        part = f"{row.allowed / abs(row.by_hand):.0%} of it" if row.by_hand else "all of it"
        return f"{part} is allowed: {why}"


# The audit ----------------------------------------------------------------------------------------


class Report(NamedTuple):
    """The findings of an audit."""

    run: str
    step: int
    intro: list  # sentences
    rows: list  # Row, causes before their effects
    findings: dict  # quantity: what is wrong, in the kit's words
    left_out: list  # metrics that the step does not determine

    @property
    def wrong(self):
        """Return the key of the first row that is outside; None if all are ok."""
        return next((row.key for row in self.rows if not row.ok), None)

    @property
    def verdict(self):
        found = "ok" if self.wrong is None else f"{self.wrong} is outside"
        return f"audit of step {self.step}: {found}"

    @property
    def counts(self):
        """Return how many numbers hold, and how many say nothing."""
        hold = sum(row.ok and row.is_informative for row in self.rows)
        silent = sum(row.ok and not row.is_informative for row in self.rows)
        return f"{hold} of {len(self.rows)} numbers hold" + f"; {silent} say nothing" * (silent > 0)

    def text(self, everything=False):
        """Return the rows, or those that are outside or say nothing, and the findings."""
        lines = [f"audit of {self.run}, step {self.step}", *self.intro, f"{'':29}{'recorded':>18}"
                 f"{'definition':>18}{'off by':>9}{'allowed':>9}             how"]  # fmt: skip
        for row in self.rows:
            if everything or not row.ok or not row.is_informative:
                said = "ok" if row.is_informative else "not informative"
                said = said if row.ok else "OUTSIDE"
                lines.append(f"{row.key:29}{row.recorded:18.12g}{row.by_hand:18.12g}"
                             f"{row.difference:9.1e}{row.allowed:9.1e}  {said:15} {row.how}")
            if not row.is_informative:
                lines.append(f"    {row.why}")
        lines += [f"   {quantity}: {why}" for quantity, why in self.findings.items()]
        lines.append(f"not determined by the step: {', '.join(self.left_out) or 'nothing'}")
        return "\n".join([*lines, self.counts, self.verdict])


def audited(run, step=None, task="", reward="", world=1, make: Callable = make_task) -> Report:
    """Hold a step of a run to its definition. ValueError if the step cannot be audited.

    The arguments are the command's. make: a function that makes the task of a Config.
    """
    files = RunFiles(run, task, reward)
    number, *states = files.chosen(step)
    task = make(files.config)
    files.directory.require_same_digests("data.json", files.config, task)
    with tempfile.TemporaryDirectory() as folder, Bar(disable=None, unit=" sequences") as bar:
        if 0 in states and 0 not in files.checkpoints:
            files.write_first_weights(task, folder)
        paths = [files.checkpoints[n] for n in states]
        origin = f"step-{number:08d}, the state before step {number}" if number else (
            "the first weights, which --seed and --model determine")  # fmt: skip
        models = step_models.Models(files, task, *paths, files.checkpoints.get(number + 1),
                                    bar.update)  # fmt: skip
        audit = Audit(files, models, task, number, world)
        audit.intro.append(f"from {origin}")
        played, c = audit.played, files.config
        passes = 2 + bool(c.kl_coef) + c.proximal + 2 * bool(c.teacher) + 4 * (c.advantage == "gae")
        bar.total = 2 * len(played) + passes * len(audit.trained)  # about
        tokens = sum(len(r.tokens) for r in played)
        print(f"step {number}: {len(played)} rollouts of {tokens} tokens, in float64 and once more "
              f"in {c.compute}", file=sys.stderr, flush=True)  # fmt: skip
        rows = audit.run()
    left_out = sorted(audit.line.keys() - {row.key for row in rows} - {"step"})
    unknown = [name for name in left_out if not name.startswith(NOT_BY_HAND)]
    if unknown:
        audit.intro.append(f"the audit does not know {', '.join(unknown)}")
    return Report(str(run), number, audit.intro, rows, audit.findings, left_out)


def main(argv) -> int:
    """Audit a run. Return 0 if every number is within what rounding allows, else 1."""
    parser = argparse.ArgumentParser("python -m full audit", allow_abbrev=False)
    parser.add_argument("run", help="directory of a run; nothing is written there")
    parser.add_argument("--step", type=int, help="[the last that has a checkpoint before it]")
    parser.add_argument("--all", action="store_true", help="print every row")
    parser.add_argument("--ranks", type=int, default=1, help="of the run, to name mistakes of sums")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--reward", default="", help="the run's FILE.py:function, if it had one")
    o = parser.parse_args(argv)

    # The process group of this one process is left before the findings are printed.
    with one_process("an audit"):
        report = audited(o.run, o.step, o.task, o.reward, o.ranks)
    print(report.text(o.all))
    return 0 if report.wrong is None else 1

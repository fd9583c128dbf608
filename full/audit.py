"""Audit a run's step: hold every recorded number to the definition, by the step kit.

    python -m full audit runs/guess-0 [--step 20] [--all]

replay.py lets the task say the step's rollouts again, and step_models.py has the models. This file
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
from conformance.computed import EXACT, LEAST, METRICS, Row, Step, nudge
from conformance.mistakes import updates_explained
from conformance.sequences import gae
from full import step_models
from full.export import one_process
from full.logs import Bar
from full.metrics import METRICS as LINE
from full.questions import make_task
from full.replay import RunFiles, is_kept, mean, minibatches, replay, rollout_metrics
from full.trainer import CRITIC

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
NOT_BY_HAND = ("step", "seconds/", "memory/peak", "logprob_gap/identical", "tokens/trained")


def compared(key, recorded, value, distance=0.0, floor=0.0) -> Row:
    """Compare one number."""
    difference = abs(recorded - value)
    if math.isnan(difference):  # JSON has no NaN: it is written as null
        difference = 0.0 if math.isnan(recorded) and not math.isfinite(value) else math.inf
    return Row(key, recorded, value, difference, distance, floor + EXACT * abs(value))


# A run's settings, as the kit's -------------------------------------------------------------------


def settings(config) -> dict:
    """Return the settings of the kit that are a run's."""
    given = {x: getattr(config, x) for x in D.DEFAULTS if hasattr(config, x)}
    given |= dict(largest_d=10.0, clip_eps=0.0, critic="separate")
    if config.objective == "cispo":
        given |= dict(clip_low=1.0, clip_high=config.cispo_bound - 1)
    return given


class Audit:
    """The audit of a step: its rows, and what the kit finds.

    Rows are in the order of causes: the first one that is outside says where to look.
    files: RunFiles. models: of step_models.py. world: the run's ranks.
    """

    def __init__(self, files, models, task, step, world=1):
        self.files, self.models, self.task, self.step, self.world = files, models, task, step, world
        self.config, self.given = files.config, settings(files.config)
        self.c = SimpleNamespace(**D.DEFAULTS | self.given)
        line = files.metrics[step]
        self.line = {key: math.nan if x is None else x for key, x in line.items()}
        self.rows, self.findings, self.intro, self.causes = [], {}, [], {}
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
        self.rows = [row if row.is_informative else row._replace(why=self.cause(row))
                     for row in self.rows]  # fmt: skip
        return self.rows

    def step_of(self, rows, kinds, numbers, models, dtype) -> Step:
        """Return the kit's Step with its twin. The arguments are pairs: the definition, the twin.
        """
        numbers = numbers | dict(settings=self.given | dict(compute_dtype=""))
        coarse = numbers | dict(settings=self.given | dict(compute_dtype=dtype))
        twin = Step(rows[1], kinds[1], numbers, models[1], precision=getattr(torch, dtype))
        if dtype == "float64":
            nudge(twin.named.values())
        step = Step(rows[0], kinds[0], coarse, models[0], dtype=getattr(torch, dtype), twin=twin)
        for x in (step, twin):
            x.make, x.most_tokens = self.models.new_kind, self.models.most_tokens
        return step

    def find(self, found, where=""):
        """Note what the kit found: {quantity: (finding, figures)}."""
        self.findings |= {f"{where}{quantity}": f"{finding} ({figures})"
                          for quantity, (finding, figures) in found.items() if finding}  # fmt: skip

    def add(self, key, value, *bounds):
        """Compare a number of the run's line, if it is there."""
        if key in self.line:
            self.rows.append(compared(key, self.line[key], value, *bounds))

    def check_rollouts(self):
        """Compare rollouts.jsonl with what the task says."""
        unlike, off, told, mine = 0, 0.0, 0.0, 0.0
        for r in self.played:
            unlike += len({t + 1 for t, on in enumerate(r.line["sampled"]) if on} ^ {*r.at})
            recorded, again = {at + 1: x for at, x in r.line["rewards"]}, dict(r.rewards)
            told, mine = told + sum(recorded.values()), mine + sum(again.values())
            apart = [abs(recorded.get(t, 0.0) - again.get(t, 0.0)) for t in {*recorded, *again}]
            off = max([off, float(bool(r.line["truncated"]) != r.truncated), *apart])

        # The rounds of a step play as many new groups as are missing, each time.
        played = chosen = 0
        for _ in range(self.config.max_rounds):
            new = range(played, played + self.config.prompts - chosen)
            chosen += len([n for n in new if n not in self.groups
                           or is_kept(self.config, self.groups[n])])  # fmt: skip
            played = new.stop
        wrong, count = sum(r.differs for r in self.played), sum(len(r.tokens) for r in self.played)
        sampled = sum(len(r.at) for r in self.played)
        self.rows += [compared("rollouts/groups", len(self.groups), played),
                      Row("rollouts/tokens", count, count - wrong, wrong),
                      Row("rollouts/sampled", sampled, sampled - unlike, unlike),
                      Row("rollouts/rewards", told, mine, off, floor=EXACT, size=1.0)]  # fmt: skip
        for key, value in rollout_metrics(self.config, self.groups).items():
            self.add(key, value)

    def sequences(self, rollouts):
        """Return two lists of Sequences of rollouts: for the definition, and for the twin."""
        return [[r.sequence(n, self.world, scored=r.at if self.models.are_large else None)
                 for n, r in enumerate(rollouts)] for _ in range(2)]  # fmt: skip

    def check_sampling(self):
        """Hold the sampler's log-probs and draws to the weights that sampled."""
        config, engine = self.config, self.files.engine
        models, rows = self.models.sampler(), self.sequences(self.played)
        if engine:
            numbers = dict(settings=self.given | dict(tolerance=ENGINE[config.rollout_dtype][0]))
            step = Step(rows[0], {}, numbers, models[0], dtype=getattr(torch, config.rollout_dtype))
            step.most_tokens = self.models.most_tokens
            self.find({"sampling": checks.check_logprobs(step, "sampler_logprobs")})
            self.rows.append(step.measured["sampler_logprobs"]._replace(key="sampling", size=1.0))
            off = mean([abs(s.lp[t] - s.sampler_logprobs[t]) for s in rows[0] for t in s.at])
            most = ENGINE[config.rollout_dtype][1]
            self.rows.append(Row("sampling/mean", off, 0.0, off, floor=most, size=1.0,
                                 because="measured engines"))  # fmt: skip
            told, due, spread = step_models.surprise(models[0], self.played, config)
            self.rows.append(Row("sampling/surprise", told, due, abs(told - due),
                                 floor=SURPRISE * spread,
                                 because=f"{SURPRISE} standard deviations"))  # fmt: skip
            self.intro.append(f"sampling: {engine} drew by numbers of its own, so no draw is "
                              f"compared, but its log-probs, and their sum with the entropies")
        else:
            for r, s, x in zip(self.played, *rows):
                s.draws = x.draws = r.draws(config, self.step)
            step = self.step_of(rows, ({}, {}), {}, models, config.rollout_dtype)
            self.find(checks.sampling_of(step))
            for key, name in (("sampling", "draws"), ("sampling/logprobs", "sampler_logprobs")):
                self.rows.append(step.measured[name]._replace(key=key, size=1.0))
        if self.files.exact:
            count, tokens, bits = step_models.exact_numbers(self.models, self.played, self.step)
            self.rows += [Row("sampling/tokens", count, count - tokens, tokens),
                          Row("sampling/bits", count, count - bits, bits)]  # fmt: skip
        self.add_solved("eval/solved_before", models.__getitem__)

    def add_solved(self, key, make):
        """Compare the part of held-out prompts that is solved. make: see `step_models.solved`."""
        if key in self.line:
            value, doubt = step_models.solved(self.models, make, self.line[key])
            row = compared(key, self.line[key], value)
            self.rows.append(row._replace(floor=row.floor + doubt, size=1.0,
                                          because="plays in doubt" * (doubt > 0)))  # fmt: skip

    def prepare(self):
        """Read what the updates need of each trained rollout: ref, old, values, rewards."""
        config, T = self.config, self.config.temperature
        rows = self.trained_rows = self.sequences(self.trained)
        read = functools.partial(step_models.read, most_tokens=self.models.most_tokens)
        first = self.models.policy()
        self.pairs = {"": first}
        if config.advantage == "gae":
            self.pairs[CRITIC] = self.models.critic(self.kinds[CRITIC][0]["before"])
            read(self.pairs[CRITIC], rows, T, "values", -1)

        # The twin gets the definition's numbers of other models, and its own only where they have a
        # part in the step without the policy's: then the two of a difference are not off as one.
        for model, column, is_twins in (
            (self.models.reference(), "ref_logprobs", config.kl_in == "reward"),
            (self.models.teacher(), "teacher_logprobs", True),
        ):
            read(model if is_twins else [model[0], None], rows, T, column)
        own = len(self.batches[0]) if config.first_is_its_own_old else 0
        later = [row[own:] for row in rows]
        if config.proximal:
            read(first if config.importance_cap else [first[0], None], later, T, "old_logprobs")
        for s in itertools.chain(*later) if not config.proximal else ():
            s.old_logprobs = s.sampler_logprobs
        for model in itertools.chain(*self.pairs.values()):
            model.routed.clear()

        # What the KL and the length take off the rewards of sampled tokens. A truncated rollout
        # that --overlong filter takes out of the loss still counts in its group's rewards.
        for r, *both in zip(self.trained, *rows):
            for s in both:
                chosen = SimpleNamespace(**{name: [x[t] for t in r.at] for name, x in (
                    ("smp", s.sampler_logprobs), ("ref", s.ref_logprobs or s.tokens))})  # fmt: skip
                lost = D.penalties(self.c, chosen)
                lost[-1:] = [x + D.overlong_penalty(self.c, len(r.tokens) - r.prompt)
                             for x in lost[-1:]]  # fmt: skip
                s.rewards = r.reward - math.fsum(lost)
                s.token_rewards = [0.0] * len(s.tokens)
                for t, x in zip(r.at, lost):
                    s.token_rewards[t] -= x
                for end, reward in r.rewards:
                    s.token_rewards[max(t for t in r.at if t <= end)] += reward
                if config.overlong == "filter" and r.truncated:
                    s.mask = [False] * len(s.mask)
                if config.advantage == "gae":
                    s.returns = [0.0] * len(s.tokens)
                    for t, A in zip(s.at, gae(self.c, s)):
                        s.returns[t] = s.values[t] + A

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
        self.rows.append(step.measured["advantages"]._replace(key="rollouts/advantage", size=size))
        self.add("advantage/token_mean", mean(A), 0.0, EXACT * size)
        self.add("advantage/token_std", D.spread(A), 0.0, EXACT * size)

    # The updates

    def train(self):
        """Do the updates of each model by the kit."""
        config, lr = self.config, D.learning_rate(self.config, self.step)
        rates = {"": lr, CRITIC: config.critic_lr * (lr / config.lr)}
        self.updates = len([batch for batch in self.batches if self.in_loss(batch)])
        for prefix in self.pairs:
            self.add(f"{prefix.replace('.', '/')}lr", rates[prefix])
            kinds = self.train_model(prefix, rates[prefix])
            self.weights[prefix] = kinds[0]["before"]
            if not prefix and "eval/solved" in self.line:
                self.add_solved("eval/solved", lambda n, kinds=kinds: self.models.as_sampled(
                    self.pairs[""][n].module, kinds[n]["before"]))  # fmt: skip

    def in_loss(self, batch):
        return [r for r in batch if not (self.config.overlong == "filter" and r.truncated)]

    def recorded(self, name, n):
        """Return the recorded number of update n, or None if it is not known."""
        first, all_ = self.line.get(f"{name}_first"), self.line.get(name)
        if self.updates == 1 or first is None:
            return all_ if self.updates == 1 else None
        # The mean of two updates and the first one give the second one.
        return first if n == 0 else 2 * all_ - first if self.updates == 2 else None

    def train_model(self, prefix, lr):
        """Do the updates of a model, and compare all that is known of each. Return its kinds."""
        config, models, place, n = self.config, self.pairs[prefix], 0, 0
        before, after = self.kinds[prefix]
        done = int(max(x.item() for x in before.pop("step").values()))
        kinds, steps, found, already = [before, before], [], [], {*self.findings}
        norm, near = f"{prefix.replace('.', '/')}grad_norm", 0
        for batch in self.batches:
            both = [row[place : place + len(batch)] for row in self.trained_rows]
            place += len(batch)
            if not self.in_loss(batch):
                continue
            h = dict(lr=lr, betas=[0.9, config.beta2], eps=1e-8, names=[*before["before"]],
                     weight_decay=config.weight_decay)  # fmt: skip
            numbers = dict(optimizer=dict(step=done + n + 1, groups=[h]))
            # After a finding, later numbers are its effects.
            is_open = not self.findings
            if is_open:
                numbers["grad_norm"] = self.recorded(norm, n)
            loss = self.recorded("loss/token_mean", n)
            if is_open and not prefix and loss is not None:
                numbers["loss"] = loss
            if is_open and after and n + 1 == self.updates:
                kinds[0] = {**kinds[0], "after": after["before"], "exp_avg_after": after["exp_avg"]}
            step = self.step_of(both, kinds, numbers, models, config.compute)
            steps.append(step)
            self.find(checks.check_gradient(step),
                      f"{prefix}update {n + 1}: " if self.updates > 1 else prefix)  # fmt: skip
            g = step.full
            bounds = step.distances["gradient norm"] * g.norm, step.floor * g.norm
            found.append(step.metrics() | {norm: (g.norm, *bounds)})
            if not prefix and models[0].counts():
                near += self.route(models, len(both[0]), found[-1])
            used = step.clip(g), step.shaken
            kinds = [x.next_kinds(y) for x, y in zip((step, step.twin), used)]
            n += 1
        self.compare_updates(prefix, norm, found)
        if steps and after and not already and {*self.findings} and self.updates > 1:
            if text := next(updates_explained(steps), ""):
                self.findings = {f"{prefix}updates 1 to {n}": text}
        for key, name in (("gradient", "gradient"), ("parameters", "weights")):
            if steps and name in steps[-1].measured:
                key = prefix.replace(".", "/") + key
                self.rows.append(steps[-1].measured[name]._replace(key=key))
                self.causes[key] = f"furthest in {steps[-1].measured[name].where}"
        if not prefix and self.models.after and config.router_bias_rate:
            *sizes, wrong = self.models.votes_apart(models[0].module)
            self.rows.append(Row("votes", *sizes, wrong, floor=4 * near, because="near choices"))
        if not after:
            self.intro.append(f"{prefix or 'the policy'}: the weights after the step are not "
                              f"compared, as there is no step-{self.step + 1:08d}")  # fmt: skip
        return kinds

    def route(self, models, count, found):
        """Count the tokens of experts in an update, and move the biases. Return near choices."""
        for model in models:
            model.routed = model.routed[-count:]  # of the forwards with a graph
        counts, near = models[0].counts(), step_models.near_choices(models)
        means = {layer: n_E.mean().item() for layer, n_E in counts.items()}
        load = max(n_E.max().item() / means[layer] for layer, n_E in counts.items())
        found["experts/load_max"] = load, 0.0, near / min(means.values())
        if near:
            self.causes["experts/load_max"] = f"{near} choices of experts are within rounding"
        for model in models if self.config.router_bias_rate else ():
            for layer, n_E in counts.items():
                model.module.model.layers[layer].mlp.votes += D.votes(n_E)
        return near

    def compare_updates(self, prefix, norm, found):
        """Compare the metrics of a model's updates: the first one's, and of all."""
        # The first update's come before those that a change of the weights has a part in.
        names = [name for name in (found[0] if found else ())
                 if (name in (norm, "value/loss") if prefix else name != "value/loss")]
        for name in names:
            self.add(f"{name}_first", *found[0][name])
        for name in names:
            how = LINE[name].reduce
            self.add(name, *(how(list(x)) for x in zip(*(by[name] for by in found))))

    def measure_step(self):
        """Compute the metrics of the step that are of no update."""
        config, S = self.config, self.trained_rows
        states = self.models.states[self.models.before], self.models.states[self.models.sampled]
        counts = [state["policy_version"] for state in states]
        age, U = min(self.step, config.staleness), self.updates
        tokens = sum(len(r.tokens) for batch in self.batches if self.in_loss(batch) for r in batch)
        values = {
            "policy_version": counts[0] + U, "tokens/trained_flat": tokens,
            "updates/skipped": states[0]["skipped"],
            "policy/age_mean": age, "policy/age_max": age,
            "policy_age/update_mean": counts[0] - counts[1] + (U - 1) / 2,
        }  # fmt: skip
        if config.tree == "disabled":
            values["tokens/trained"] = tokens
        for key, value in values.items():
            self.add(key, value)
        if config.advantage != "gae":
            return
        # g - v is the advantage before it is whitened. A critic that says all has 1.
        (v, g), (v2, g2) = (torch.tensor(
            [(s.values[t], s.returns[t]) for s in row for t in s.at], dtype=torch.float64,
        ).view(-1, 2).T for row in S)  # fmt: skip
        rest, spread = ((x - x.mean()).square().mean().sqrt().item() for x in (g - v, g))
        off = ((g - g2).square().mean() + (v - v2).square().mean()).sqrt().item()
        self.add("value/token_mean", v.mean().item(), (v - v2).abs().mean().item(), 1e-11)
        left = (rest / spread) ** 2 if spread**2 > 1e-12 else 1.0
        self.add("value/explained_variance", 1 - left, 2 * left * off / max(rest, 1e-300), 1e-9)

    def cause(self, row) -> str:
        """Say why a row says nothing."""
        key, dtype = row.key.removesuffix("_first"), self.config.compute
        part = f"{row.allowed / abs(row.by_hand):.0%} of it" if row.by_hand else "all of it"
        if key in self.causes:
            return f"{part} is allowed: {self.causes[key]}"
        if key.startswith("logprob_gap"):
            return "the number is the rounding of two forwards itself"
        if not row.by_hand:
            return f"the number is 0, and rounding in {dtype} may make it {row.allowed:.0e}"
        if key in METRICS and METRICS[key][0] in ("clips", "masked"):
            return f"{part} is allowed: so many tokens are within rounding of a bound"
        if self.updates > 1 and row.key == key:
            return (f"{part} is allowed: AdamW makes full steps of rounding, so the weights before "
                    f"the last update are known less well")
        return f"{part} is allowed: its terms have both signs, or {dtype} is too coarse for it"


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
    files.directory.require_noted("data.json", files.config, task)
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
        bar.total = forwards(audit)
        count, tokens = len(audit.played), sum(len(r.tokens) for r in audit.played)
        print(f"step {number}: {count} rollouts of {tokens} tokens, in float64 and once more in "
              f"{files.config.compute}", file=sys.stderr, flush=True)  # fmt: skip
        rows = audit.run()
    left_out = sorted(audit.line.keys() - {row.key for row in rows} - {"step"})
    unknown = [name for name in left_out if not name.startswith(NOT_BY_HAND)]
    if unknown:
        audit.intro.append(f"the audit does not know {', '.join(unknown)}")
    return Report(str(run), number, audit.intro, rows, audit.findings, left_out)


def forwards(audit) -> int:
    """Return about how many forwards an audit makes, for the bar."""
    c, n = audit.config, len(audit.trained)
    passes = 2 + bool(c.kl_coef) + bool(c.proximal) + 2 * bool(c.teacher)
    return 2 * len(audit.played) + n * (passes + 4 * (c.advantage == "gae"))


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

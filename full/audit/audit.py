"""Audit a run's step: hold every recorded number to the definition, by the step kit.

    python -m full audit runs/guess-0 [--step 20] [--all]

replay.py lets the task say the step's rollouts again, and models.py has the models. This file
gives both to the kit in `conformance/`. Each number is computed in float64, and once more in the
run's precision, the twin. A recorded number may be FACTOR times as far from the definition's as the
twin's is, and a floor. Where that is more than a tenth of the number, the row says nothing, and
says why. If a number is outside, the kit looks for a mistake that explains it.
"""

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch

from conformance import checks, definition
from conformance.computed import EXACT, LEAST, TINY, Row, Step
from conformance.mistakes import updates_explained
from conformance.twin import DECISIONS, METRICS, metrics
from full.audit import models as step_models
from full.audit.replay import (
    RunFiles, groups_played, mean, minibatches, replay, rollout_metrics, settings,
)  # fmt: skip
from full.learn.metrics import METRICS as RUN_METRICS
from full.learn.trainer import CRITIC
from full.run.build import one_process
from full.run.logs import Bar
from full.run.tasks import make_task

# What no step determines. A line's other numbers must be found here, or are named as unknown.
NOT_BY_HAND = ("step", "seconds/", "memory/peak", "logprob_gap/identical", "tokens/trained")


@dataclass
class RecordedStep:
    """A step of a run: what the run recorded of it, and its rollouts, replayed. Only read."""

    files: RunFiles
    models: step_models.StepModels
    task: object
    number: int
    world: int = 1  # the run's ranks

    def __post_init__(self):
        self.config = self.files.config
        self.prefixes = ["", CRITIC] if self.config.advantage == "gae" else [""]
        self.settings = settings(self.config)
        self.c = SimpleNamespace(**definition.DEFAULTS | self.settings)
        line = self.files.metrics[self.number]
        self.line = {key: math.nan if x is None else x for key, x in line.items()}
        lines = self.files.rollouts(self.number, self.models.shape)
        self.groups = replay(self.config, self.task, self.number, lines)
        self.played = list(itertools.chain(*self.groups.values()))
        self.batches = minibatches(self.config, self.groups)
        self.trained = list(itertools.chain(*self.batches))

        # A minibatch makes no update if Z is 0. Under `constant` filtered rollouts count in Z.
        ends = [0, *itertools.accumulate(map(len, self.batches))]
        self.updates = [slice(*ends[n : n + 2]) for n, batch in enumerate(self.batches)
                        if definition.denominator(
                            self.c, [len(r.at) * self.is_in_loss(r) for r in batch])]  # fmt: skip

    def is_in_loss(self, r):
        return not (self.config.overlong == "filter" and r.truncated)

    def kit_step(self, rows, kinds, numbers, models, dtype) -> Step:
        """Return the kit's Step with its twin. Arguments are pairs, for the step and the twin."""
        of_step = numbers | dict(settings=self.settings | dict(compute_dtype=dtype))
        of_twin = numbers | dict(settings=self.settings | dict(compute_dtype=""))  # rounded before
        twin = Step(rows[1], kinds[1], of_twin, models[1], precision=getattr(torch, dtype))
        twin.is_nudged = dtype == "float64"
        step = Step(rows[0], kinds[0], of_step, models[0], dtype=getattr(torch, dtype), twin=twin)
        for one in (step, twin):
            one.make, one.most_tokens = self.models.new_kind, self.models.most_tokens
        return step

    def sequences(self, rollouts):
        """Return two lists of Sequences of rollouts: for the definition, and for the twin."""
        return [[r.sequence(n, self.world, scored=r.at if self.models.are_large else None)
                 for n, r in enumerate(rollouts)] for _ in range(2)]  # fmt: skip

    def compare(self, values, **known) -> list:
        """Return the Rows of those numbers that the run's line has. known: other fields of a Row.

        values: {key: number} or {key: (number, distance, floor)}.
        """
        rows = []
        for key in [key for key in values if key in self.line]:
            x = values[key]
            value, distance, floor = x if isinstance(x, tuple) else (x, 0.0, 0.0)
            floor += EXACT * abs(value)
            rows.append(row_of(key, self.line[key], value, distance=distance, floor=floor, **known))
        return rows

    def compare_solved(self, key, make_model) -> list:
        """Return the Row of solved held-out prompts. make_model: see `step_models.solved`."""
        if key not in self.line:
            return []
        value, doubt = step_models.solved(self.models, make_model, self.line[key])
        because = "plays in doubt" if doubt else ""
        return self.compare({key: (value, 0.0, doubt)}, size=1.0, because=because)


def row_of(key, recorded, by_hand, difference=None, **known) -> Row:
    """Compare a number. known: other fields of a Row."""
    off = abs(recorded - by_hand) if difference is None else difference
    if math.isnan(off):  # JSON has no NaN: it is written as null
        off = 0.0 if math.isnan(recorded) and not math.isfinite(by_hand) else math.inf
    return Row(key, recorded, by_hand, off, **known)


def in_words(found, where="") -> dict:
    """Return {quantity: text} of the kit's {quantity: (finding, figures)}."""
    return {f"{where}{quantity}": f"{finding} ({figures})"
            for quantity, (finding, figures) in found.items() if finding}  # fmt: skip


# Rollouts and advantages --------------------------------------------------------------------------


def check_rollouts(data) -> list:
    """Compare rollouts.jsonl with what the task says."""
    played = data.played
    count, sampled = sum(len(r.tokens) for r in played), sum(len(r.at) for r in played)
    recorded, replayed, off = zip(*(r.compared_rewards() for r in played))
    due = groups_played(data.config, data.groups)
    return [
        row_of("rollouts/groups", len(data.groups), due, floor=EXACT * due),
        row_of("rollouts/tokens", count, count - sum(r.differs for r in played)),
        row_of("rollouts/sampled", sampled, sampled - sum(r.missampled for r in played)),
        row_of("rollouts/rewards", math.fsum(recorded), math.fsum(replayed), max(off), floor=EXACT,
               size=1.0),
        *data.compare(rollout_metrics(data.config, data.groups)),
    ]  # fmt: skip


def check_sampling(data) -> tuple:
    """Return rows and findings of the sampler, by the weights that sampled."""
    models, sequences = data.models.sampler(), data.sequences(data.played)
    if data.files.stored.engine:
        rows, findings = check_engine(data, models[0], sequences[0])
    else:
        rows, findings = check_draws(data, models, sequences)
    if data.files.stored.exact:
        count, *wrong = step_models.exact_numbers(data.models, data.played, data.number)
        for key, wrong_count in zip(("sampling/tokens", "sampling/bits"), wrong):
            rows.append(row_of(key, count, count - wrong_count))
    return rows + data.compare_solved("eval/solved_before", models.__getitem__), findings


def check_draws(data, models, sequences) -> tuple:
    """Compare the sampler's log-probs and draws. Models and sequences are pairs."""
    for r, s, twin in zip(data.played, *sequences):
        s.draws = twin.draws = r.draws(data.config, data.number)
    step = data.kit_step(sequences, ({}, {}), {}, models, data.config.rollout_dtype)
    findings = in_words(checks.sampling_of(step))
    keys = {"draws": "sampling", "sampler_logprobs": "sampling/logprobs"}
    rows = [step.measured[x]._replace(key=keys[x], size=1.0) for x in keys]
    return step_models.with_near_choices(models, rows, findings)


def check_engine(data, model, sequences) -> tuple:
    """Compare an engine's log-probs. It drew by numbers of its own."""
    dtype = data.config.rollout_dtype
    most, most_on_average = step_models.ENGINE[dtype]
    numbers = dict(settings=data.settings | dict(tolerance=most))
    step = Step(sequences, {}, numbers, model, dtype=getattr(torch, dtype))
    step.most_tokens = data.models.most_tokens
    findings = in_words({"sampling": checks.check_logprobs(step, "sampler_logprobs")})
    off = mean([abs(s.lp[t] - s.sampler_logprobs[t]) for s in sequences for t in s.at])
    found, due, spread = step_models.log_likelihood_test(model, data.played, data.config)
    most = step_models.MOST_DEVIATIONS
    return [
        step.measured["sampler_logprobs"]._replace(key="sampling", size=1.0),
        row_of("sampling/mean", off, 0.0, floor=most_on_average, size=1.0,
               because="measured engines"),
        row_of("sampling/surprise", found, due, floor=most * spread,
               because=f"{most} standard deviations"),
    ], findings  # fmt: skip


def check_advantages(data, models, sequences) -> tuple:
    """Return rows and findings of the advantages. The updates are of the recorded ones."""
    if not data.trained:
        return [], {}
    step = data.kit_step(sequences, ({}, {}), {}, models, data.config.compute)
    step.floors["advantages"] = LEAST  # rewards are computed in float64 in every run
    findings = in_words({"advantages": checks.check_advantages(step)})
    A = [s.advantages[t] for s in sequences[0] for t in s.at]
    size = max(map(abs, A), default=0.0)
    values = {"advantage/token_mean": (mean(A), 0.0, EXACT * size),
              "advantage/token_std": (definition.spread(A), 0.0, EXACT * size)}  # fmt: skip
    row = step.measured["advantages"]._replace(key="rollouts/advantage", size=size)
    return [row, *data.compare(values)], findings


# The updates --------------------------------------------------------------------------------------


def recorded_numbers(data, prefix, n) -> dict:
    """Return the gradient norm, and of the policy the loss, that are recorded of update n alone."""
    def of_update(name):
        first, mean_of_updates = data.line.get(f"{name}_first"), data.line.get(name)
        count = len(data.updates)
        if count == 1:
            return mean_of_updates
        if first is None or n == 0:
            return first
        return 2 * mean_of_updates - first if count == 2 else None  # of two, the second

    numbers = {"grad_norm": of_update(f"{prefix.replace('.', '/')}grad_norm"),
               "loss": None if prefix else of_update("loss/token_mean")}  # fmt: skip
    return {name: x for name, x in numbers.items() if x is not None}


def train(data, prefix, models, sequences, stored, had_findings) -> tuple:
    """Do the updates of a model by the kit, and compare all that is known of each.

    Return rows, findings, the weights after the updates in both precisions, and how many choices of
    experts rounding may turn.

    prefix: of the names of the critic, or "" for the policy. models, sequences: pairs.
    stored: weights and moments before the step, and after it or None. It is emptied.
    had_findings: whether an earlier check has some. Later numbers are their effects.
    """
    config, path, many = data.config, prefix.replace(".", "/"), len(data.updates) > 1
    lr = definition.learning_rate(config, data.number)
    lr = config.critic_lr * (lr / config.lr) if prefix else lr
    after, before = stored.pop(), stored.pop()
    done = int(max(x.item() for x in before.pop("step").values()))
    kinds, steps, measured, findings, near = [before, before], [], [], {}, 0
    del before
    for n, update in enumerate(data.updates):
        group = dict(lr=lr, betas=[0.9, config.beta2], eps=1e-8, names=[*kinds[0]["before"]],
                     weight_decay=config.weight_decay)  # fmt: skip
        numbers = dict(optimizer=dict(step=done + n + 1, groups=[group]))
        if not (had_findings or findings):
            numbers |= recorded_numbers(data, prefix, n)
            if after and n + 1 == len(data.updates):
                kinds[0] = {**kinds[0], "after": after["before"], "exp_avg_after": after["exp_avg"]}
        step = data.kit_step([row[update] for row in sequences], kinds, numbers, models,
                             config.compute)  # fmt: skip
        step.updates = n + 1
        findings |= in_words(checks.check_gradient(step),
                             f"{prefix}update {n + 1}: " if many else prefix)  # fmt: skip
        size = max(step.full.norm, TINY)
        measured.append(metrics(step) | {f"{path}grad_norm": (
            step.full.norm, step.distances["gradient norm"] * size, step.floor * size)})
        if not prefix and models[0].counts():
            load, more = step_models.route(config, models, len(step.sequences))
            measured[-1]["experts/load_max"], near = load, near + more
        kinds = [one.next_kinds(gradient) for one, gradient in (
            (step, step.clip(step.full)), (step.twin, step.shaken))]  # fmt: skip
        steps = [*steps, step] if step.is_small else [step]  # a large one takes gigabytes

    if many and after and findings and not had_findings:
        if text := next(updates_explained(steps), ""):
            findings = {f"{prefix}updates 1 to {len(steps)}": text}
    rows = data.compare({f"{path}lr": lr}) + check_updates(data, prefix, measured)
    for key, name in (("gradient", "gradient"), ("parameters", "weights")):
        if steps and name in steps[-1].measured:
            row = steps[-1].measured[name]
            rows.append(row._replace(key=f"{path}{key}", why=f"furthest in {row.where}"))
    if not prefix and data.models.after and config.router_bias_rate:
        votes = data.models.votes_apart(models[0].module)
        rows.append(row_of("votes", *votes, floor=4 * near, because="near choices"))
    return rows, findings, [x["before"] for x in kinds], near


def check_updates(data, prefix, measured) -> list:
    """Compare the metrics of a model's updates: the first one's, and of all."""
    # The first update's come before those that a change of the weights has a part in.
    names = [name for by_name in measured[:1] for name in by_name
             if (name in ("critic/grad_norm", "value/loss")) == bool(prefix)]  # fmt: skip
    values = {f"{name}_first": measured[0][name] for name in names}
    values |= {name: tuple(RUN_METRICS[name].reduce(list(x)) for x in zip(
        *(by_name[name] for by_name in measured))) for name in names}  # fmt: skip
    return data.compare(values)


def check_counts(data) -> list:
    """Compare counts and ages of the step."""
    states, U = data.models.states, len(data.updates)
    before, sampled = states[data.models.before], states[data.models.sampled]
    version, age = before["policy_version"], min(data.number, data.config.staleness)
    tokens = sum(len(r.tokens) for update in data.updates for r in data.trained[update])
    values = {
        "policy_version": version + U, "tokens/trained_flat": tokens,
        "updates/skipped": before["skipped"], "policy/age_mean": age, "policy/age_max": age,
        "policy_age/update_mean": version - sampled["policy_version"] + (U - 1) / 2,
    }  # fmt: skip
    if data.config.tree == "disabled":
        values["tokens/trained"] = tokens
    return data.compare(values)


def check_values(data, sequences) -> list:
    """Compare the mean of a critic's values, and which part of the returns they explain."""
    # g - v is the advantage before it is whitened. A critic that explains all has 1.
    (v, g), (twin_v, twin_g) = (torch.tensor(
        [(s.values[t], s.returns[t]) for s in row for t in s.at] or [(0.0, 0.0)],
        dtype=torch.float64).T for row in sequences)  # fmt: skip
    rest, spread = ((x - x.mean()).square().mean().sqrt().item() for x in (g - v, g))
    off_v, off_g = v - twin_v, g - twin_g
    off = (off_g.square().mean() + off_v.square().mean()).sqrt().item()
    left = (rest / spread) ** 2 if spread**2 > 1e-12 else 1.0
    return data.compare({
        "value/token_mean": (v.mean().item(), off_v.abs().mean().item(), 1e-11),
        "value/explained_variance": (1 - left, 2 * left * off / max(rest, TINY), 1e-9),
    })  # fmt: skip


def cause(data, row, near) -> str:
    """Say why a row says nothing. near: choices of experts that rounding may turn."""
    key, dtype = row.key.removesuffix("_first"), data.config.compute
    if key.startswith("logprob_gap"):
        return "the number is the rounding of two forwards itself"
    if row.why:
        why = row.why
    elif key == "experts/load_max" and near:
        why = f"{near} choices of experts are within rounding"
    elif not row.by_hand:
        return f"the number is 0, and rounding in {dtype} may make it {row.allowed:.0e}"
    elif key in METRICS and METRICS[key][0] in DECISIONS:
        why = "so many tokens are within rounding of a bound"
    elif row.because:
        why = row.because
    elif len(data.updates) > 1 and row.key == key and not key.startswith("sampling"):
        why = ("AdamW makes full steps of rounding, so the weights before the last update are "
               "known less well")  # fmt: skip
    else:
        why = f"its terms have both signs, or {dtype} is too coarse for it"
    part = f"{row.allowed / abs(row.by_hand):.0%} of it" if row.by_hand else "all of it"
    return f"{part} is allowed: {why}"


def compare_step(data) -> tuple:
    """Compare all numbers. Return rows, findings, and the weights of each model after the step.

    Rows are in the order of causes: the first one that is outside says where to look.
    """
    # The tensors of checkpoints go to the disk before there are models in memory.
    paths = data.models.before, data.models.after
    stored = {prefix: [path and data.models.weights_and_moments(path, prefix) for path in paths]
              for prefix in data.prefixes}  # fmt: skip
    sampling, findings = check_sampling(data)
    models, sequences = step_models.read_models(data, stored)
    advantages, of_advantages = check_advantages(data, models[""], sequences)
    rows = check_rollouts(data) + sampling + advantages
    findings |= of_advantages
    weights, near = {}, 0
    for prefix in data.prefixes:
        of_model, found, trained, more = train(
            data, prefix, models[prefix], sequences, stored[prefix], bool(findings))
        rows, findings, near = rows + of_model, findings | found, near + more
        weights[prefix] = trained[0]
        if not prefix:
            rows += data.compare_solved("eval/solved", lambda n: data.models.as_sampled(
                models[""][n].module, trained[n]))  # fmt: skip
    rows += check_counts(data)
    if CRITIC in data.prefixes:
        rows += check_values(data, sequences)
    rows = [row._replace(why="" if row.is_informative else cause(data, row, near)) for row in rows]
    return rows, findings, weights


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
        counts = f"{hold} of {len(self.rows)} numbers hold"
        return f"{counts}; {silent} say nothing" if silent else counts

    def text(self, everything=False):
        """Return the rows, or those that are outside or say nothing, and the findings."""
        lines = [f"audit of {self.run}, step {self.step}", *self.intro, f"{'':29}{'recorded':>18}"
                 f"{'definition':>18}{'off by':>9}{'allowed':>9}             how"]  # fmt: skip
        for row in self.rows:
            if everything or not row.ok or not row.is_informative:
                verdict = "ok" if row.is_informative else "not informative"
                verdict = verdict if row.ok else "OUTSIDE"
                lines.append(f"{row.key:29}{row.recorded:18.12g}{row.by_hand:18.12g}"
                             f"{row.difference:9.1e}{row.allowed:9.1e}  {verdict:15} {row.how}")
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
        models = step_models.StepModels(files, task, *paths, files.checkpoints.get(number + 1),
                                        bar.update)  # fmt: skip
        data = RecordedStep(files, models, task, number, world)
        played, c = data.played, files.config
        passes = 2 + bool(c.kl_coef) + c.proximal + 2 * bool(c.teacher) + 4 * (c.advantage == "gae")
        bar.total = 2 * len(played) + passes * len(data.trained)  # about
        tokens = sum(len(r.tokens) for r in played)
        print(f"step {number}: {len(played)} rollouts of {tokens} tokens, in float64 and once more "
              f"in {c.compute}", file=sys.stderr, flush=True)  # fmt: skip
        rows, findings, _ = compare_step(data)
    left_out = sorted(data.line.keys() - {row.key for row in rows} - {"step"})
    return Report(str(run), number, introduction(data, left_out), rows, findings, left_out)


def introduction(data, left_out) -> list:
    """Return sentences: where the weights are from, and what is not compared."""
    origin = "the first weights, which --seed and --model determine"
    if data.number:
        origin = f"step-{data.number:08d}, the state before step {data.number}"
    intro = [f"from {origin}"]
    if data.files.stored.engine:
        intro.append(f"sampling: {data.files.stored.engine} drew by numbers of its own, so no draw "
                     f"is compared, but its log-probs, and their sum with the entropies")
    if not data.models.after:
        intro += [f"{prefix or 'the policy'}: the weights after the step are not compared, as "
                  f"there is no step-{data.number + 1:08d}" for prefix in data.prefixes]
    unknown = [name for name in left_out if not name.startswith(NOT_BY_HAND)]
    return intro + ([f"the audit does not know {', '.join(unknown)}"] if unknown else [])


def main(argv) -> int:
    """Audit a run. Return 0 if every number is within what rounding allows, else 1."""
    parser = argparse.ArgumentParser("python -m full audit", allow_abbrev=False)
    parser.add_argument("run", help="directory of a run; nothing is written there")
    parser.add_argument("--step", type=int, help="[the last that has a checkpoint before it]")
    parser.add_argument("--all", action="store_true", help="print every row")
    parser.add_argument("--ranks", type=int, default=1, help="of the run, to name mistakes of sums")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--reward", default="", help="the run's FILE.py:function, if it had one")
    options = parser.parse_args(argv)

    with one_process("an audit"):
        report = audited(options.run, options.step, options.task, options.reward, options.ranks)
    print(report.text(options.all))
    return 0 if report.wrong is None else 1

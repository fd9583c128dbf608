"""What a run's line should say, and what rounding explains: adds bounds to `train_grpo.check`.

The metrics of a step by hand, each of whose definitions is here a second time, and how far a
recorded number may be from the one by hand. If you trust the column `allowed`, skip the second
half.

Equation numbers are those of byhand.py.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from full.byhand import (
    State, adamw_of, differences, dppo_excess, pieces, rate_by_hand, step_by_hand,
    sum_of_counts, trained,
)  # fmt: skip
from full.metrics import METRICS

# What no step determines. A line's other numbers must be found here, or are named as unknown.
NOT_BY_HAND = ("seconds/", "memory/peak", "logprob_gap/identical", "tokens/trained")

OF_UPDATES = [name for name, x in METRICS.items() if x.over_updates in ("mean", "max")]


def order() -> list:
    """Return the rows of the table, causes before their effects, by METRICS."""
    # The first row that is outside says where to look. The first update's metrics come before those
    # that a change of the weights has a part in.
    rows = ["rollouts/groups", "rollouts/tokens", "rollouts/sampled", "sampling/routes", "sampling",
            "sampling/tokens", "sampling/bits", "sampling/mean", "sampling/surprise",
            "rollouts/rewards"]  # fmt: skip
    for name in METRICS:
        if name == OF_UPDATES[0]:
            rows += ["rollouts/advantage", *(f"{name}_first" for name in OF_UPDATES)]
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
        "reward/values": Measured(len({s.reward for s in played if not s.truncated})),
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
        found |= {f"{name}_first": x for name, x in first.items() if name in OF_UPDATES}
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
    off = np.array([u["off"] for u in updates]) / math.sqrt(U)
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


def clip_margins(c, s) -> list:
    """Return how far each token of a rollout that was trained on is from where it clips."""
    # A margin to each bound, not only to the nearest one: a ratio of 1 is in the middle of 0.8 and
    # 1.2, and rounding would decide which margin is compared.
    if c.objective == "dppo":
        return [dppo_excess(c, *token) for token in zip(s.lp, s.old, s.A)]
    if c.objective == "gmpo":
        return [d - bound for d in differences(s) for bound in (-c.clip_low, c.clip_high)]
    bounds = [1 - c.clip_low, 1 + c.clip_high] + [c.dual_clip] * (c.dual_clip > 0)
    bounds = {"cispo": [c.cispo_bound], "reinforce": [], "sapo": []}.get(c.objective, bounds)
    return [term["r"] - bound for term in s.terms for bound in bounds]


def expert_metrics(c, updates) -> dict:
    """Measure the largest load of all updates and layers, and the loss of balance."""
    # Two experts may be so near that rounding decides which of them a token goes to. The token is
    # then one more of all tokens of an expert, of which `each` is the fraction of the mean.
    routed = [r for u in updates for r in u["routed"]]
    layers = [n for u in updates for n in sum_of_counts(u["routed"]).values()]
    load = max(float(n.max() / n.mean()) for n in layers)
    each = 1 / min(float(n.mean()) for n in layers)
    loads = Measured(load, margins=np.concatenate([r.margins for r in routed]), each=each)
    found = {"experts/load_max": loads}

    # The router by hand selects other experts than the sampler's where the run's router does, but
    # for choices that rounding decides.
    if c.replay_routes:
        totals = [sum(r.replayed for r in u["routed"]) for u in updates]
        changed = [sum(r.changed for r in u["routed"]) for u in updates]
        share = mean_of([x / total for x, total in zip(changed, totals)])
        margins = np.concatenate([r.replay_margins for r in routed])
        each = 1 / min(totals) / len(updates)
        found["experts/replay_changed"] = share._replace(margins=margins, each=each)
    if not c.balance_coef:
        return found

    # In (8) such a token changes one count, of a sequence of N tokens, by one of K N.
    balance = sum_of([r.balance / len(updates) for r in routed])
    each = max(c.balance_coef / float(n.mean()) / len(u["routed"])
               for u in updates for r in u["routed"] for n in r.counts.values())  # fmt: skip
    balance = balance._replace(margins=loads.margins, each=each)
    return found | {"balance/loss": balance}


# What rounding explains -------------------------------------------------------------------------
# Everything is done twice: in float64, to be compared with what the run recorded, and in the run's
# precision, to know how much of a difference rounding can explain. A recorded number and the one by
# hand may differ by TIMES the distance of these two and a unit in the last place. After n steps
# that had to be done again on the way, LATER + 2 n times as much is allowed, since each step adds
# its rounding.
TIMES = 8

LATER = 10

# How far the log-probs of an engine may be from the definition's, by the dtype of its weights: a
# token's, and the mean over all tokens, which also finds a small change of the temperature. An
# engine's kernels are not at hand, so these bounds are not derived. They are a few times the
# differences that were measured, at most and on average:
#
#     full.engine serve, `guess`          float64     4.4e-16    9.3e-17
#     full.engine serve, SmolLM2-135M     float32     2.8e-5     3.2e-6
#     full.engine serve, SmolLM2-135M     bfloat16    0.21       0.035
#     vLLM 0.32, SmolLM2-135M             float32     6.9e-5     1.2e-5
#     vLLM 0.32, SmolLM2-135M             bfloat16    0.65       0.055
#     the same, each of 14 steps          bfloat16    2.3        0.053
#
# The last row is against a trainer in float32, so it has the rounding of the weights too.
ENGINE_ROUNDING = {"float64": (1e-9, 1e-9), "float32": (1e-3, 1e-4), "bfloat16": (4.0, 0.1)}

SURPRISE = 5  # deviations that an engine's sum of -log p may be from the sum of the entropies

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

    @property
    def share(self):
        """Return the difference as a fraction of what is allowed: the row is outside above 1."""
        return self.difference / max(self.allowed, 1e-300)


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


@dataclass
class Exact(State):
    """The State of the step in float64. It keeps its gradients in files of a directory."""

    case: object = None

    def keep(self, shrink):
        """Write an update's clipped gradient, for `kept`."""
        folder = self.case.room / f"gradient-{len([*self.case.room.glob('gradient-*')])}"
        folder.mkdir()
        for name in self.weights:
            torch.save(shrink * self.model.get_parameter(name).grad, folder / name)
        return 0.0


class Gradient(NamedTuple):
    """The rounding of a weight's gradient, in one update."""

    largest: float  # of all entries
    usual: float  # the root of their mean square
    uncertain: torch.Tensor  # for each entry, whether it is anything but 0


@dataclass
class Displaced(State):
    """The State of the second precision: it measures the rounding of gradients, and by it weights.

    AdamW divides by the root of v. So where gradients nearly cancel, rounding decides in which
    direction an entry moves by about lr, and where the gradient is large, rounding changes next to
    nothing. How far rounding has moved some entries is therefore no measure of the others. What is
    measured is the rounding of a tensor's gradient; `after` says how far an entry may move by it.
    For the next update the weights are those in float64, each displaced in a random direction as
    far as usual rounding may move it. Its gradients then show the rounding of both updates.
    """

    case: object = None
    exact: list = ()  # the updates of the step in float64
    roundings: list = field(default_factory=list)  # of each update, {name: Gradient}
    done: list = field(default_factory=list)  # numbers of the updates that moved the weights
    generator: object = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def kept(self, number, name):
        """Return a weight's clipped gradient in an update of the step in float64."""
        return torch.load(self.case.room / f"gradient-{number}" / name, weights_only=True)

    @torch.no_grad()
    def keep(self, shrink):
        """Measure the rounding of this update's gradients. Return how far off they are."""
        number = len(self.roundings)
        off, found = [], {}
        for name in self.weights:
            p = self.model.get_parameter(name)
            # What is 0 in both precisions, as for a token that no sequence has, has no rounding.
            # Clipping hides how long a gradient is, so `off` is of whole ones.
            exact = self.kept(number, name)
            off.append((exact / self.exact[number]["shrink"] - p.grad).norm().item())
            away = (exact - shrink * p.grad).abs_()
            usual = away.norm().item() / math.sqrt(away.numel())
            found[name] = Gradient(away.max().item(), usual, (exact != 0) | (p.grad != 0))
        self.roundings.append(found)
        return math.hypot(*off)

    @torch.no_grad()
    def adamw(self, c, lr, shrink):
        """Displace the weights by the rounding of the updates so far."""
        self.done.append(len(self.roundings) - 1)
        for name, *stored in self.case.stored(self.model):
            # A distance is as good in one direction as in the other.
            p = self.model.get_parameter(name)
            changes = [[self.roundings[n][name].usual] for n in self.done]
            weight, distance = self.after(name, stored, changes, torch.finfo(p.dtype).eps)
            sign = 2 * torch.randint(0, 2, p.shape, generator=self.generator) - 1
            self.weights[name].copy_(weight + sign * distance)
            p.copy_(self.weights[name])

    def allowed(self, name, stored, scale, unit):
        """Return a weight after the step in float64, and how far a run's may be from it."""
        # A larger gradient makes AdamW's step longer, and v larger, which makes it shorter: a size
        # between the smallest and the largest may move an entry furthest.
        largest = [scale * self.roundings[n][name].largest for n in self.done]
        return self.after(name, stored, [[x, 2 * x, 4 * x, TIMES * x] for x in largest], unit)

    def after(self, name, stored, changes, unit):
        """Return a weight after the updates so far, in float64, and how far rounding may move it.

        stored: the weight before the step, and AdamW's steps, m and v.
        changes: for each update, of which sizes a change of its gradient may be.
        unit: of the weights' precision, relative.
        """
        c, lr = self.case.config, rate_by_hand(self.case.config, self.case.step)
        begun, steps, *means = stored
        weight, distance = (torch.empty(begun.shape, dtype=torch.float64) for _ in range(2))
        tensors = [weight, distance, begun, *means]
        for n in self.done:
            tensors += [self.kept(n, name), self.roundings[n][name].uncertain]
        for x, far, *before in pieces(tensors):
            state = [number.double() for number in before[:3]]
            gradients, uncertain = before[3::2], before[4::2]
            moves = moves_of(c, lr, steps, state, gradients)
            x.copy_(state[0] + moves.sum(0))

            # An entry moves by its own gradients alone. It may go as far astray as it does if one
            # of them is larger or smaller: near a gradient of 0 by up to 2 lr. The gradient of an
            # update's longest move may be within reach too, between two of the sizes. The distances
            # of all moves are summed, so that none cancels another. Besides, each update rounds a
            # weight twice, and the length of its step a few times.
            far.copy_(len(changes) * unit * (state[0].abs() + TIMES * lr))
            then = state
            for n, sizes in enumerate(changes):
                astray = torch.zeros_like(far)
                turn = longest_of(c, *then[1:]).sub_(gradients[n]).clamp_(-sizes[-1], sizes[-1])
                for by in [turn, *(by for size in sizes for by in (size, -size))]:
                    changed = [*gradients]
                    changed[n] = changed[n] + by * uncertain[n]
                    other = moves_of(c, lr, steps, state, changed)
                    astray = torch.maximum(astray, (other - moves).abs().sum(0))
                far += astray
                then = adamw_of(c, lr, steps + n + 1, *then, gradients[n])
        return weight, distance


def moves_of(c, lr, steps, state, gradients):
    """Return how far updates with these gradients move a weight: (updates, entries).

    state: the weight, m and v before the first of them, after AdamW's step number `steps`.
    """
    found = []
    for n, g in enumerate(gradients, 1):
        then = adamw_of(c, lr, steps + n, *state, g)
        found.append(then[0] - state[0])
        state = then
    return torch.stack(found)


def longest_of(c, m, v):
    """Return the gradient with which AdamW's next step moves each entry furthest."""
    # With a gradient g the move is as (0.9 m + 0.1 g) / sqrt(b v + (1 - b) g^2), b = beta2. Its
    # derivative is 0 where 0.1 b v = (1 - b) g 0.9 m. If m is 0, the move grows with g.
    g = 0.1 * c.beta2 * v / ((1 - c.beta2) * 0.9 * m)
    return g.masked_fill_(m == 0, math.inf)

"""How far rounding may put the numbers of a step off: adds bounds to the step of byhand.py.

All of them follow from one number, T: the largest error of the difference of two logits, relative
to how widely the token's logits spread. T follows from the model's shape and dtype, and from
nothing that was measured in the run.

    a log-prob      is off by T spread (1 - p) at most, see `errors`
    other numbers   are computed again DRAWS times by the definition, each time from log-probs that
                    are off at random. A recorded number may be as far from the definition's as
                    the furthest of these
    a gradient      is off by some T of its size, tensor by tensor, see `Rounding`
    a weight        moves by AdamW's step, which is taken again with gradients that are off

The letters are those of byhand.py: s is a rollout, N its sampled tokens, u an update.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from conformance import definition

# Each sum on the way to the logits adds UNITS in the last place, and they add up as their root.
# There are layers * width sums, or with bfloat16, which is summed in float32, one a layer.
UNITS = {"float64": 8, "float32": 8, "bfloat16": 3}
AGAIN, EACH = 10, 2  # T grows by AGAIN if steps are done again, and by EACH with each of them
OWN = 8  # units in the last place by which a log-prob itself is rounded
OWN_OF_SLOPE = 4 * OWN  # the same of an entropy's slope, log p + H
LEAST_SPREAD, LEAST_REST = 1e-3, 0.05  # a spread of logits and a 1 - p below these count as these

DRAWS = 32  # a draw is uniform from -T to T, which is three times as wide as the errors are
COMMON = 1 / 16  # of T, which all tokens of a draw have in common: errors need not cancel in a sum

# Where the lead of an expert over the next is below T / 2, rounding may choose the other one: then
# the difference of two logits may be off by this much, in any precision.
FLIP = 1.0

# A gradient's entries are off by this many T of each rollout's largest entry in the tensor. Where
# all of a tensor's gradient is 0, as where each query sees one key, terms cancel that are as large
# as in other tensors, and each is rounded: its entries are off by CANCELED of the other tensors'.
BACKWARD = {"float64": 8, "float32": 8, "bfloat16": 24}
CANCELED = 1 / 8
ZERO = 1e-12  # of the gradient's norm: a tensor's gradient below it is 0

# AdamW's steps have about one length, lr. A weight whose gradient is rounding alone may move
# LOST_STEPS of them the other way, and a critic's value LOST_VALUE of them.
STEP_MARGIN = 1.1  # a step may be this much longer than those that are tried
LONGEST = 4  # lr: the longest step
STORING = 2  # units in the last place by which storing rounds a weight
LOST_STEPS, LOST_VALUE = 3, 8

# After an update, weights are astray by a part of their moves, where gradients have the rounding
# that is usual. Logits are then astray by DRIFT of this part of their own moves: the weights go
# astray in random directions, and move in one.
DRIFT = 1 / 2

# Rewards, counts and rates are computed in float64 in every run: their sums have another order.
EXACT = 8 * torch.finfo(torch.float64).eps


# Log-probs ----------------------------------------------------------------------------------------


def tolerance(shape, dtype, again=0) -> float:
    """Return T for a model's shape and the dtype of its products.

    again: how many steps were done again on the way to the step.
    """
    sums = shape.num_hidden_layers * (1 if dtype == "bfloat16" else shape.hidden_size)
    unit = torch.finfo(getattr(torch, dtype)).eps
    return UNITS[dtype] * unit * math.sqrt(sums) * (AGAIN + EACH * again if again else 1)


def unit_of_loss(dtype) -> float:
    """Return the unit in the last place of the loss, which is never computed below float32."""
    return torch.finfo(torch.promote_types(getattr(torch, dtype), torch.float32)).eps


def errors(lp, T_N, dtype):
    """Return how far each of some log-probs may be off, (N,), if T_N is the error of its logits."""
    # log p is a logit less a mean of all logits, in which the token's own has the weight p: the
    # more probable a token is, the more of its error cancels. In SmolLM2-135M in bfloat16 the
    # errors of 642 tokens, divided by the spread and by 1 - p, are T / 6 on average (root of the
    # mean square), from p = 0.01 to p = 0.999.
    return OWN * unit_of_loss(dtype) - T_N * np.expm1(lp)


def flip(routing, T) -> float:
    """Return by how much more log-probs may be off if rounding decides which experts are chosen."""
    return FLIP if any(x <= T / 2 for x in routing.margins) else 0.0


def near_choices(updates) -> int:
    """Return how many choices of experts rounding decides."""
    T = max(s.T.max() for u in updates for s in u.trained)
    return sum(x <= T for u in updates for r in u.routed for x in r.margins)


# Draws --------------------------------------------------------------------------------------------


def furthest(drawn) -> tuple:
    """Return what is computed by hand, and its distance to the furthest of its draws.

    drawn: (1 + DRAWS, ..). The computed number, or the numbers, come first.
    """
    return drawn[0], abs(drawn[1:] - drawn[0]).max(0)


def mean(values, off=0.0) -> tuple:
    """Return a mean, and how far a recorded one may be from it. off: by what each number may be."""
    values = np.array(values, dtype=np.float64)
    count = max(1, len(values))
    return math.fsum(values) / count, off + EXACT * abs(values).sum() / count


def noise(s, name, *shape):
    """Return random numbers from -1 to 1 for a rollout, with a part that each draw has in common.

    Their shape is (DRAWS, *shape). name: a number. Each of them has draws of its own.
    """
    random = np.random.default_rng([name, s.group, s.number]).uniform(-1, 1, (DRAWS, *shape))
    common = np.linspace(-COMMON, COMMON, DRAWS)
    return random + common.reshape(DRAWS, *[1] * len(shape))


def draw(step, s, found):
    """Draw what rounding may make of a trained rollout's terms, into `s.drawn`.

    found: the Reading that gave the Step the rollout's numbers.
    """
    # How far logits may be off. After the first update weights may be astray, and logits by a part
    # of their way, which is that of the log-prob over 1 - p.
    config, s.routing = step.config, found.routing
    drift = step.of_policy.drift
    way = (abs(s.lp - s.old) / np.maximum(-np.expm1(s.lp), LEAST_REST)).max()
    s.T = step.T * found.scale + drift * way
    s.T += flip(s.routing, s.T.max())
    v_off = step.v_off
    if s.v is not None:
        critic = step.of_values
        is_lost = critic.has_zeros or critic.astray >= 1
        v_off += critic.drift * abs(s.v - s.v_old).max() + LOST_VALUE * critic.lr * is_lost

    # How far each number that the definition reads may be off. An entropy moves by
    # sum p |log p + H| times half of T at most, which is below T H. It is rounded, too.
    before = errors(s.lp, step.T * found.scale, config.compute)
    sizes = dict(lp=errors(s.lp, s.T, config.compute), old=before * config.proximal, ref=before,
                 H=(s.T + OWN * unit_of_loss(config.compute)) * s.H,
                 A=step.A_off, v=v_off, v_old=step.v_off, g=step.g_off)  # fmt: skip
    sizes = {name: size for name, size in sizes.items() if getattr(s, name) is not None}

    # The definition again, from numbers that are off. Where `old` is the log-prob itself, it stays
    # the same number.
    lps, rows = [s.lp], [s.terms]
    for noise_XN in noise(s, 0, len(sizes), len(s.at)):
        lists = {name: (getattr(s, name) + size * x).tolist()
                 for (name, size), x in zip(sizes.items(), noise_XN)}  # fmt: skip
        if s.old is s.lp:
            lists["old"] = lists["lp"]
        lps.append(lists["lp"])
        rows.append(definition.terms_of(step.c, definition.Sequence(smp=s.smp, **lists)))
    s.drawn = {x.name: np.array([[getattr(term, x.name) for term in row] for row in rows], float)
               for x in dataclasses.fields(definition.Term)}  # fmt: skip
    gap = np.array(lps) - s.smp
    s.drawn |= dict(gap=abs(gap), gap_kl=np.expm1(gap) - gap, masked=1.0 * (s.drawn["x"] == 0))
    for name in ("policy", "loss", "dlp", "dH", "dv"):
        s.drawn[name] *= s.terms[0].share


# Gradients and weights ----------------------------------------------------------------------------


@dataclass
class Rounding:
    """How far a tensor's gradient may be off: the sums over an update's rollouts.

    Rounding may put it off in any direction. A slope of the loss that is in doubt, as at the edge
    of the clip, puts it off in a direction of its own.
    """

    entry: float = 0.0  # how far an entry may be off at most, by rounding
    usual: float = 0.0  # the square of how far an entry usually is off
    norm: float = 0.0  # the square of rounding's norm
    common: float = 0.0  # the norm of what rounding has in common for all tokens
    doubt: float = 0.0  # how far an entry may be off by doubts about slopes
    doubts: float = 0.0  # the square of their norm

    def add(self, g, rough, common, dtype):
        """Add a rollout's gradient. rough, common: T of its log-probs, and what they share."""
        norm = g.norm().item()
        self.entry += BACKWARD[dtype] * (rough + common) * g.abs().max().item()
        self.usual += ((rough + common) * norm) ** 2 / g.numel()
        self.norm += (rough * norm) ** 2
        self.common += common * norm

    def add_doubt(self, g):
        """Add the gradient of what a rollout's slopes may be off by."""
        self.doubt += g.abs().max().item()
        self.doubts += g.norm().item() ** 2


class Bound(NamedTuple):
    """How far the entries of a tensor's clipped gradient may be off."""

    most: float  # at most
    usual: float  # usually
    relative: float  # of an entry's size, besides
    has_exact_zeros: bool
    has_no_sign: bool  # all of the gradient may be rounding

    def of(self, g):
        """Return how far each of some entries may be off at most, and how far usually."""
        is_off = (g != 0).double() if self.has_exact_zeros else 1.0
        return [is_off * (x + self.relative * g.abs()) for x in (self.most, self.usual)]


def bound_of(learner, name, g, shrink) -> Bound:
    """Return the Bound of a tensor's gradient g in an update, which the clip multiplies by shrink.
    """
    rounding, highest = learner.rounding[name], g.abs().max().item()
    most, usual = rounding.entry, math.sqrt(rounding.usual)
    is_zero = highest <= ZERO * learner.norm
    if is_zero:
        largest = max(x.entry for x in learner.rounding.values())
        most, usual = CANCELED * largest, CANCELED**2 * largest

    # A 0 is exact, as in the embedding of a token that is not there, unless all of the tensor's
    # gradient is 0. The clip's factor may be off as the norm is.
    most, usual = most + rounding.doubt, usual + rounding.doubt
    relative = learner.off / learner.norm if shrink < 1 else 0.0
    has_exact_zeros = not (learner.flips or is_zero)
    return Bound(shrink * most, shrink * usual, relative, has_exact_zeros, highest <= most)


def error_of_entropy(s, found, T, dtype) -> float:
    """Return how far off an entropy's gradient is for all tokens alike, if T is of the log-probs.
    """
    # The gradient has the factor log p + H, whose rounding is large if all tokens are about as
    # probable, and is often the same for all of them.
    off_N = OWN_OF_SLOPE * unit_of_loss(dtype) * s.H + T
    return (off_N / np.maximum(found.spread, LEAST_SPREAD)).max()


def off_of_norm(roundings, norm) -> float:
    """Return how far the norm of a whole gradient may be off, by the Rounding of each tensor."""
    # A backward rounds each rollout's gradient, in any direction. A doubt across the gradient makes
    # it longer by half the doubt's square. What tokens have in common adds up as it is.
    square, common, doubts = (
        sum(getattr(x, name) for x in roundings) for name in ("norm", "common", "doubts")
    )
    return math.sqrt(square) / 2 + common + doubts / (2 * norm)


def peak(h, m, v, g):
    """Return the gradients for which AdamW's step is longest, with these m and v. Default: g."""
    # AdamW divides by the root of v: where a gradient nearly cancels, rounding may turn a step of
    # lr around, and where it is large, rounding changes next to nothing. A step
    # (a + b g) / root(c + d g^2) has its peak at g = b c / (a d).
    beta1, beta2 = h["betas"]
    return torch.where(m == 0, g, (1 - beta1) * beta2 * v / (beta1 * (1 - beta2) * m))


# Causes -------------------------------------------------------------------------------------------


def cause(step, key) -> str:
    """Return a sentence that says why a number of the step has a loose bound."""
    before = key.endswith("_first") or key.startswith(("logprob_gap", "sampling"))
    of_first = before or len(step.updates) < 2
    updates = step.updates[:1] if of_first else step.updates
    found = [s for u in updates for s in u.trained]
    if not found:
        return ""
    if not of_first and step.is_rounding:
        return "the step's advantages are rounding, so the later updates are not held"
    astray = max(learner.astray for learner in step.learners.values())
    if not of_first and astray > 0.01:
        return (f"after the first update the weights may be off by {min(1.0, astray):.0%} of "
                f"the way that they have moved")  # fmt: skip
    if any(flip(s.routing, s.T.max()) for s in found):
        return f"{near_choices(updates)} choices of experts are within rounding"
    edge = [s.drawn["clips"][1:] != s.drawn["clips"][0] for s in found]
    count, tokens = math.ceil(sum(x.sum() for x in edge) / DRAWS), sum(len(s.at) for s in found)
    if count and key.removesuffix("_first") in ("grad_norm", "ratio/clipped_fraction"):
        most = max(abs(s.parts[""][1:] - s.parts[""][0])[x].max(initial=0.0)
                   for s, x in zip(found, edge) if s.parts is not None)  # fmt: skip
        return (f"rounding may put about {count} of {tokens} tokens on the other side of the "
                f"clip's edge, and one of them is up to {most:.2g} of the gradient's norm")
    off = max(errors(s.lp, s.T, step.config.compute).max() for s in found)
    return f"a log-prob in {step.config.compute} may be off by {off:.1g}"

"""Measure by a step's twin how far rounding may put each recorded number off.

The twin is the same step in the trainer's precision. Where rounding grows faster than the twin's
own errors, the definition gets numbers that are off on purpose: log-probs far from the twin's, the
other side of a clip, a gradient with every entry shifted.
"""

import functools
import math
from dataclasses import replace

import torch

from conformance import definition as D
from conformance.computed import FACTOR, TINY
from conformance.sequences import Gradient, furthest, terms_of

# Metrics of the trained tokens: what of a token, see `token_numbers`, and how it is reduced.
METRICS = {
    "logprob_gap/max": ("gap", "max"), "logprob_gap/mean": ("gap", "mean"),
    "logprob_gap/kl": ("gap_kl", "mean"), "ratio/token_mean": ("r", "mean"),
    "ratio/max": ("r", "max"), "ratio/clipped_fraction": ("clips", "mean"),
    "importance/masked_fraction": ("masked", "mean"), "entropy/token_mean": ("H", "mean"),
    "kl/token_mean": ("k", "mean"), "value/loss": ("critic", "mean"),
    "loss/policy_token_mean": ("policy", "sum"), "loss/token_mean": ("loss", "sum"),
}  # fmt: skip
REDUCE = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}
DECISIONS = ("clips", "masked")  # of the twin's, all are turned that rounding may turn
FARTHEST = 20.0  # a log-prob that is off by more than this says nothing
NAMES = "r", "clips", "x", "policy", "loss", "k", "H", "critic", "share", "dlp", "dH", "dv"
SLOPES = "dlp", "dH", "dv"  # of the loss, in a token's log-prob, entropy and value


def token_numbers(step, rows=None) -> dict:
    """Return {name: (N,)}: numbers of all trained tokens, in order.

    rows: the definition's Sequences. Default: with what the model says.
    """
    rows = [s.trained() for s in step.sequences] if rows is None else rows
    terms = [t for row in terms_of(step.c, step.sequences, rows=rows) for t in row]
    numbers = {name: torch.tensor([float(getattr(t, name)) for t in terms], dtype=torch.float64)
               for name in NAMES}  # fmt: skip
    numbers |= {name: numbers[name] * numbers["share"] for name in ("policy", "loss", *SLOPES)}
    if rows and rows[0].smp is not None:
        gap = torch.tensor([lp - smp for row in rows for lp, smp in zip(row.lp, row.smp)],
                           dtype=torch.float64)  # fmt: skip
        numbers |= dict(gap=gap.abs(), gap_kl=torch.expm1(gap) - gap)
    return numbers | dict(masked=(numbers["x"] == 0).double())


def metrics(step) -> dict:
    """Return {name: (value, the twin's distance, floor)} of METRICS."""
    numbers, result = token_numbers(step), {}
    eps = torch.finfo(torch.promote_types(step.dtype, torch.float32)).eps
    for name, (of, how) in METRICS.items():
        if of not in numbers:
            continue
        x = numbers[of]
        off = step.token_distances[of] if step.twin else torch.zeros_like(x)
        if not len(x):
            x = off = torch.zeros(1).double()
        value, size, off = (REDUCE[how](column).item() for column in (x, x.abs(), off))
        # A difference of log-probs, and a KL, are 0 up to the rounding of 1.
        least = {"k": step.floor / 8, "gap_kl": step.floor / 8, "gap": 2 * eps}.get(of, 0.0)
        result[name] = value, off, step.floor * size + least
    return result


# Tokens -------------------------------------------------------------------------------------------


def moved_rows(step, way) -> list:
    """Return the trained tokens' rows, off by half of FACTOR times what the twin's are off.

    way: 1 or -1, the direction of log-probs. What they are compared with goes the other way.
    """
    def move(way, exact, rounded):
        return exact and [a + way * min(FACTOR / 2 * abs(a - b), FARTHEST)
                          for a, b in zip(exact, rounded)]  # fmt: skip

    ways = dict(lp=way, H=way, v=way, old=-way, ref=-way, v_old=-way, g=-way)
    rows = []
    for s, twin in zip(step.sequences, step.twin.sequences):
        exact, rounded = s.trained(), twin.trained()
        moved = {name: move(way, getattr(exact, name), getattr(rounded, name))
                 for name, way in ways.items()}  # fmt: skip
        if not s.old_logprobs:
            moved["old"] = moved["lp"]
        rows.append(replace(exact, **moved))
    return rows


def token_distances(step) -> dict:
    """Return how far the trained tokens' numbers are off in the twin: {name: (N,)}."""
    # A KL of two equal log-probs is d^2 / 2 of what d is off. If a trainer's d is 4 times as
    # far off as the twin's, its KL is 16 times as far off. So the equations also get the moved
    # rows. Of a line, FACTOR times the twin's distance is more than this.
    rounded = token_numbers(step.twin)
    moved = [token_numbers(step, moved_rows(step, way)) for way in (1, -1)]
    distances = {}
    for name, x in token_numbers(step).items():
        off = [(numbers[name] - x).abs() / FACTOR for numbers in moved]
        direct = (rounded[name] - x).abs()
        distances[name] = torch.stack([direct, *off]).amax(0)
        if name in DECISIONS:
            distances[name] = direct / FACTOR
    return distances


def curvature(step) -> float:
    """Return how much faster than the twin's errors the factors of the gradients grow."""
    # The gradient is a sum over tokens of factors times gradients of log-probs.
    exact, rounded = token_numbers(step), token_numbers(step.twin)
    far = math.hypot(*(step.token_distances[name].norm().item() for name in SLOPES))
    near = math.hypot(*((rounded[name] - exact[name]).norm().item() for name in SLOPES))
    # In float64 the twin may have the very same factors. Their own rounding is the least error.
    size = math.hypot(*(exact[name].norm().item() for name in SLOPES))
    near = max(near, torch.finfo(step.dtype).eps * size)
    return max(1.0, far / near) if near else 1.0


def shifts(step) -> tuple:
    """Return how rounding may move log-probs and old ones: pairs, twice each way."""
    # Half of FACTOR times the root mean square of the twin's distances, of the log-ratio alone,
    # and of both log-probs together.
    pairs = [(s.trained(), twin.trained()) for s, twin in zip(
        step.sequences, step.twin.sequences) if s.lp and twin.lp]  # fmt: skip
    old = [a - b for s, twin in pairs for a, b in zip(s.old, twin.old)]
    ratio = [a - b - (c - d) for s, twin in pairs
             for a, b, c, d in zip(s.lp, s.old, twin.lp, twin.old)]  # fmt: skip
    of_ratio, of_both = (FACTOR / 2 * math.hypot(*x) / math.sqrt(max(1, len(x)))
                         for x in (ratio, old))  # fmt: skip
    return (of_ratio, 0.0), (-of_ratio, 0.0), (of_both, of_both), (-of_both, -of_both)


def turn_decisions(step, c, place, row, terms):
    """Take the other decision in the twin's terms wherever rounding may turn it."""
    # Decisions are the clips of (3) and the masks of (4). With a bound of 1.2, a ratio of 1.199
    # is clipped in no trainer in float64 and in some in bfloat16, and a token's gradient is at
    # stake. So the twin of a token near the bound is on its other side.
    (s,) = (s for s in step.sequences if s.place == place)
    decided = [(t.clips, t.x == 0) for t in D.terms_of(step.c, s.trained())]
    for by, old_by in shifts(step):
        moved = replace(row, lp=[x + by for x in row.lp], old=[x + old_by for x in row.old])
        for n, other in enumerate(D.terms_of(c, moved)):
            if (other.clips, other.x == 0) != decided[n]:
                terms[n] = replace(other, share=terms[n].share)


# The loss, the gradient and the weights -----------------------------------------------------------


def measure(step, g, loss) -> Gradient:
    """Measure what is allowed by the twin. g, loss: the definition's.

    Return the clipped Gradient of the twin, for its update.
    """
    # The twin's gradient is off in a random direction, and so is its update. The sizes of these
    # are what the trainer's own rounding may do.
    twin = step.twin
    twin.c.mistake = functools.partial(turn_decisions, step)
    _, rounded = twin.solve()
    step.token_distances = token_distances(step)
    exact, clipped = step.clip(g), step.clip(rounded)
    times = curvature(step)
    off = {n: times * distance for n, distance in exact.distances(clipped).items()}
    step.distances["gradient norm"] = max(
        math.hypot(*off.values()) / max(exact.norm, TINY),
        times * abs(g.norm - rounded.norm) / max(g.norm, TINY))
    step.distances["gradient"], _ = furthest(off, exact.norms, step.sizes)
    step.floors["gradient"] = step.floor + step.noise
    drift = step.token_distances["loss"].sum().item()
    step.distances["loss"] = drift / max(step.size_of_loss, abs(loss), TINY)

    # AdamW turns a small gradient's rounding into a step of full size. So it is not enough to
    # multiply what the twin's step is off: each entry is put off by half of FACTOR times what
    # the entries of its tensor usually are, and to the side to which the twin's is: rounding has
    # sides that all trainers in this precision share.
    def shake(n):
        x = exact[n]
        is_used = (x != 0) | (clipped[n] != 0)  # by a token of the step
        by = FACTOR / 2 * off[n] / math.sqrt(x.numel())
        return x + by * is_used * (clipped[n] - x).sign()

    shaken = Gradient(step.named, shake)
    if step.can_update():
        step.distances["weights"] = distance_of_weights(step, exact, shaken)
    return shaken


def distance_of_weights(step, exact, shaken) -> float:
    """Return how far two gradients' updates are apart, relative to the update."""
    # If the recorded gradient is known, the weights have no part of its rounding.
    used, twins = (step.gradient or g for g in (exact, shaken))
    off, norms = {}, {}
    for n in step.named:
        after = step.adamw(n, used[n])[0]
        off[n] = (after - step.twin.adamw(n, twins[n])[0]).norm().item()
        norms[n] = (after - step.state("before", n)).norm().item()
    return furthest(off, norms, step.sizes)[0]

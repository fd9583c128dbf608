"""Check the numbers of a recorded step against the definition's.

A check returns a finding and figures. The finding is "" if all is right, words if it is not, and
None if the dump lacks something, which the figures then name. A check of one number also leaves a
Row in `step.measured`. Each check takes the trainer's own numbers of the checks before it, so that
one mistake is one finding.
"""

import itertools
import math

from conformance.computed import FACTOR, TINY
from conformance.mistakes import (
    advantage_mistakes, clip_mistakes, factors_of, fitted_mistakes, join, mistakes_of,
    model_mistakes, updates_explained, wrong_parts,
)  # fmt: skip
from conformance.sequences import advantages, denominator, distance
from conformance.twin import measure, metrics

MOST_SOLVED = 3  # mistakes of a large model that are tried with its gradient: each takes a backward


def fitting_model(step, error, most):
    """Return the mistake in the model's outputs that brings an error down, or "".

    error: function of nothing. The model's outputs are then those with the mistake.
    """
    for text, how in model_mistakes(step):
        step.run_model(*how)
        if error() <= most:
            return text
    step.run_model(step.c.temperature)
    return ""


def check_logprobs(step, name="logprobs"):
    """Compare log-probs, and leave the graph of the ones that the trainer has.

    name: logprobs or sampler_logprobs.
    """
    S, T = step.sequences, step.c.temperature
    step.run_model(T)
    if S and getattr(S[0], name) is None:
        return None, name

    def furthest(recorded=lambda s: getattr(s, name)):
        return max(((distance(recorded(s)[t], s.lp[t]) / (1 + abs(s.lp[t])), s, t)
                    for s in S for t in s.at),
                   key=lambda x: x[0], default=(0.0, None, 0))  # fmt: skip

    if step.twin:
        its = dict(zip((s.place for s in S), step.twin.run_model(T)))
        step.distances[name], *_ = furthest(lambda s: its[s.place])
    off, s, t = furthest()
    recorded, expected = (getattr(s, name)[t], s.lp[t]) if s else (0.0, 0.0)
    where = f"token {t} of sequence {s.place}" if s else ""
    row = step.note(name, off, recorded, expected, 1 + abs(expected), where)
    if row.ok:
        return "", row.figures
    if text := fitting_model(step, lambda: furthest()[0], step.may(name)):
        return f"log-probs are {text}", row.figures
    if furthest(lambda s: [*getattr(s, name)[1:], 0.0])[0] <= step.may(name):
        return "log-probs are recorded in the wrong column", row.figures
    return "unexplained log-probs", f"{where} has {recorded:.6g}, expected {expected:.6g}"


def check_draws(step):
    """Compare each draw with its token's interval. `run_model` has been called.

    Tokens divide [0, 1) into intervals as wide as their probabilities, in the order of their
    numbers. A draw is a number in [0, 1): its interval says which token it draws.
    """
    S = step.sequences
    if not S or S[0].draws is None:
        return None, "draws"

    def outside(by=0):
        found = [(s.ends[t], math.exp(s.lp[t]), s.draws[t + by]) for s in S for t in s.at
                 if 0 <= t + by < len(s.tokens)]  # fmt: skip
        return [(distance(u, max(end - p, min(u, end))), u, end) for end, p, u in found]

    if step.twin:
        pairs = [pair for s, x in zip(S, step.twin.sequences) for pair in zip(s.ends, x.ends)]
        step.distances["draws"] = max((abs(x - y) for x, y in pairs), default=0.0)
    most, found = step.may("draws"), outside()
    row = step.note("draws", *max(found, default=(0.0, 0.0, 0.0)))
    if row.ok:
        return "", row.figures
    count = sum(off > most for off, *_ in found)
    figures = f"{count} of {len(found)} draws are outside, up to {row.difference:.2g}"
    for by in (-1, 1):
        if max(outside(by), default=(1.0,))[0] <= most:
            return f"tokens are drawn by the draw of {by:+d} token", figures
    text = fitting_model(step, lambda: max(outside())[0], most)
    return f"tokens are drawn by probabilities {text}" if text else "unexplained tokens", figures


def check_advantages(step):
    """Compare advantages with the definition's, and fill them in where none were recorded."""
    S, kind = step.sequences, step.c.advantage
    needs = dict(gae=("token_rewards", "values"), teacher=("teacher_logprobs", "sampler_logprobs"))
    needs = needs.get(kind, ("rewards", "groups"))
    if not S or any(getattr(S[0], name) is None for name in needs):
        return None, ", ".join(needs)
    want = advantages(step.c, S)
    if S[0].advantages is None:
        for s in S:
            s.advantages = [0.0] * len(s.mask)
            for t, A in zip(s.at, want[s.place]):
                s.advantages[t] = A
        return None, "advantages"

    def pairs(other):
        return [(s.advantages[t], A) for s in S for t, A in zip(s.at, other[s.place])]

    def error(found):
        size = max((abs(A) for _, A in found), default=0.0)
        return max((distance(x, A) for x, A in found), default=0.0) / max(size, TINY)

    # No model has a part in rewards, unless a KL is taken off them, or a critic compares them.
    right = pairs(want)
    if step.twin:
        its = advantages(step.c, step.twin.sequences)
        step.distances["advantages"] = error(
            [(x, y) for s in S for x, y in zip(its[s.place], want[s.place])])  # fmt: skip
    most = step.may("advantages")
    got, due = max(right, key=lambda pair: distance(*pair), default=(0.0, 0.0))
    size = max((abs(A) for _, A in right), default=0.0)
    row = step.note("advantages", error(right), got, due, max(size, TINY))
    if row.ok:
        return "", row.figures
    found = [text for text, other in advantage_mistakes(step, want) if error(pairs(other)) <= most]
    k = math.fsum(a * b for a, b in right) / max(math.fsum(b * b for _, b in right), TINY)
    if not found and error([(a, k * b) for a, b in right]) <= most:
        found = [f"advantages are {k:.6g} times the definition's"]
    return join(found) or "unexplained advantages", f"{got:.6g}, expected {due:.6g}"


# Loss, gradient, weights ------------------------------------------------------------------------


def explain(step, departs, g):
    """Return {quantity: which mistakes explain it, or ""} for the loss and the gradient.

    departs: some of "loss" and "gradient". g: the definition's Gradient.
    """
    # Two numbers that depart together have one cause, so a mistake that explains the loss and not
    # the gradient is not said. A loss that departs alone was only added up wrongly for the report.
    if departs == {"loss"}:
        plans = wrong_parts(step).items() if step.errors(g) else mistakes_of(step)
        fits = [text for text, plan in plans
                if step.loss_error(step.add_up(plan)[0]) <= step.may("loss")]  # fmt: skip
        return {"loss": join(fits)}

    # One mistake is likelier than two. A mistake in the clip explains the gradient alone.
    single, double = explained_sums(step, departs, g)
    clips = []
    for text, norm, clipped in clip_mistakes(step, g) if step.is_small else ():
        # A rule that changes nothing in this step explains nothing.
        right = step.clip(g)
        changes = math.hypot(*clipped.distances(right).values())
        if changes > step.may("gradient") * right.norm and step.fits(
                g, norm=norm, clipped=clipped):  # fmt: skip
            clips.append(text)
    if "loss" not in departs:
        return {"gradient": join(clips + single or double)}
    return {"loss": join(single or double), "gradient": join(single or clips or double)}


def explained_sums(step, departs, g):
    """Return which mistakes in the sum explain what departs: alone, and with a second one."""
    single, double, solved = [], [], 0
    fitted = dict(fitted_mistakes(step, g, "loss" in departs))
    for text, plan in itertools.chain(mistakes_of(step), fitted.items()):
        tries = {1.0: text}
        if text not in fitted:
            tries |= {k: f"{text}; and {k:.4g} times that: {why}"
                      for k, why in factors_of(step).items()}  # fmt: skip
        if "loss" in departs:
            loss, _ = step.add_up(plan)
            tries = {k: text for k, text in tries.items()
                     if step.loss_error(k * loss) <= step.may("loss")}  # fmt: skip
        if not tries or not (step.is_small or "loss" in departs and solved < MOST_SOLVED):
            continue
        solved += 1
        _, other = step.solve(plan)

        # Two counts that are wrong at once explain any number. So the first of two mistakes must
        # change the direction.
        turns = abs(other.dot(g)) <= (1 - 1e-9) * other.norm * g.norm
        for k, text in tries.items():
            if (k == 1 or turns) and step.fits(other.times(k)):
                (single if k == 1 else double).append(text)
    return single, double


def describe_gradient(step, g):
    """Say by what factor and angle the recorded gradient departs, and in which parameters."""
    text = []
    if step.numbers.get("grad_norm") is not None:
        k, Z = step.numbers["grad_norm"] / max(g.norm, TINY), denominator(step.c, step.sequences)
        as_if = f", as if Z were {Z / k:.6g} and not {Z}" if k else ""
        text.append(f"norm {k:.6g} times the definition's{as_if}")
    if step.gradient is not None:
        got, want = step.gradient, step.clip(g)
        cosine = got.dot(want) / max(got.norm * want.norm, TINY)
        text.append(f"cosine {cosine:.6f}")
        apart = got.distances(want)
        wrong = [n for n in apart if apart[n] > 10 * step.may("gradient") * want.norms[n]]
        if 0 < len(wrong) < len(apart):
            text.append(f"{len(wrong)} of {len(apart)} parameters, first {wrong[0]}")
    return ", ".join(text)


def check_weights(step, g, finding):
    """Compare the new weights with AdamW's, on the gradient that it got if that was recorded.

    finding: what explains the gradient, if nothing but the weights shows it. None: not tried.
    """
    if not step.can_update():
        return None, "after, no moments or no optimizer"
    noisy = step.gradient is None
    used = step.clip(g) if noisy else step.gradient
    error, where, size = step.update_error(used, noisy=noisy)
    moved = math.hypot(*((step.state("after", n) - step.state("before", n)).norm().item()
                         for n in step.named))  # fmt: skip
    row = step.note("weights", error, moved, size, max(size, TINY), where)
    if row.ok:
        return "", f"{row.figures}, of an update of {size:.1e}"
    if names := step.numbers.get("changed"):
        finding = f"something other than the optimizer changed {', '.join(names[:3])} in the step"
    tried = finding is not None or not noisy

    # A gradient that a moment shows is wrong if beta1 is, so the definition's is tried as well.
    tries = [(used, noisy)] + ([] if noisy or step.has("grad") else [(step.clip(g), True)])
    finding = finding or join(itertools.chain(*(updates_explained([step], *x) for x in tries)))
    if not finding and not tried:
        finding = explain(step, {"gradient"}, g)["gradient"]
    figures = f"an update of {moved:.4g}, expected {size:.4g}, off by {error:.3g} of it in {where}"
    return finding or "unexplained weights", figures


def check_gradient(step):
    """Return {quantity: (finding, figures)} of the loss, the gradient and the weights.

    `step.full` is then the definition's gradient before the clip, and `step.shaken` the twin's.
    """
    loss, g = step.solve()
    step.full, step.shaken = g, measure(step, g, loss) if step.twin else None
    errors, numbers = step.errors(g), step.numbers
    if "gradient norm" in errors:
        step.note("gradient norm", errors["gradient norm"][0], numbers["grad_norm"], g.norm,
                  max(g.norm, TINY))  # fmt: skip
    if "gradient" in errors:
        want = step.clip(g)
        step.note("gradient", errors["gradient"][0], step.gradient.norm, want.norm,
                  max(want.norm, TINY), errors["gradient"][1])  # fmt: skip
    wrong = {quantity for quantity, (off, _) in errors.items() if not off <= step.may(quantity)}

    # The weights show the gradient if nothing else does. If its norm holds and they do not, AdamW
    # is looked at first.
    departs = {"gradient"} if wrong and not (wrong == {"weights"} and len(errors) == 2) else set()
    rows = {"loss": (None, "loss"), "gradient norm": (None, "grad_norm"),
            "gradient": (None, "gradient")}  # fmt: skip
    if "loss" in numbers:
        off = step.loss_error(loss)
        size = max(step.size_of_loss, abs(loss), TINY)
        rows["loss"] = "", step.note("loss", off, numbers["loss"], loss, size).figures
        departs |= set() if off <= step.may("loss") else {"loss"}
    found = explain(step, departs, g) if departs else {}
    if "loss" in departs:
        figures = f"the loss is {numbers['loss']:.6g}, expected {loss:.6g}"
        rows["loss"] = found["loss"] or "unexplained", figures
    for quantity in errors.keys() & rows.keys():
        rows[quantity] = "", step.measured[quantity].figures
        if quantity in wrong:
            rows[quantity] = found["gradient"] or "unexplained", describe_gradient(step, g)
    of_gradient = None if step.gradient is not None else found.get("gradient")
    return rows | {"weights": check_weights(step, g, of_gradient)}


def check_metrics(step):
    """Return {name: (finding, figures)} of the metrics that were recorded."""
    found, recorded = metrics(step), step.numbers.get("metrics", {})
    rows = {}
    for name in [name for name in recorded if name in found]:
        value, distance, floor = found[name]
        most, off = FACTOR * distance + floor, abs(recorded[name] - value)
        figures = f"{recorded[name]:.6g}, expected {value:.6g}, allowed {most:.1e}"
        rows[name] = "" if off <= most else "unexplained", figures
    return rows


def sampling_of(step):
    """Return {quantity: (finding, figures)} of the sampler, by the weights before the step."""
    found = {"sampler's log-probs": check_logprobs(step, "sampler_logprobs")}
    return found | {"draws": check_draws(step)}


def findings_of(step):
    """Return {quantity: (finding, figures)} of a step."""
    S, found = step.sequences, {}
    if S[0].sampler_logprobs is not None and not step.c.importance_cap:
        found |= sampling_of(step)
    found |= {"log-probs": check_logprobs(step), "advantages": check_advantages(step)}
    lacking = "" if S[0].advantages is not None else "advantages, and no rewards"
    if step.c.kl_coef and step.c.kl_in == "loss" and S[0].ref_logprobs is None:
        lacking = "ref_logprobs"
    found |= check_gradient(step) if not lacking else dict.fromkeys(
        ("loss", "gradient norm", "gradient", "weights"), (None, lacking))  # fmt: skip
    return found | (check_metrics(step) if not lacking else {})

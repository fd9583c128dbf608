"""Mistakes of a trainer: for each, what its step would be. The kit names those that fit a dump.

A plan is what a trainer adds up: a factor, settings and sequences for each part of the step. The
definition's plan has one part, (1, c, S). A mistake is another plan, with a name. For example, a
mean of two ranks' own means is (1/2, c, rank 0's sequences), (1/2, c, rank 1's). Other lists have
mistakes of the model's log-probs, of advantages, of the clip, and of AdamW.

To add a mistake, add an entry to a list. A mistake whose numbers are not known, such as another
clip bound, is fitted to the recorded numbers and then has to explain all of them.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import torch

from conformance import definition as D
from conformance.computed import CHOICES, Step
from conformance.sequences import (
    Gradient, advantages, definition, denominator, gae, parts_by,
)  # fmt: skip


def join(found):
    """Say which mistakes explain what was found."""
    return " | or: ".join(list(dict.fromkeys(found))[:3])


def changed(c, **changes):
    """Return settings with some of them changed."""
    return SimpleNamespace(**vars(c) | changes)


def with_rows(S, **rows):
    """Return sequences with other rows, each a function of the sequence."""
    return [replace(s, **{name: row(s) for name, row in rows.items()}) for s in S]


# Log-probs and advantages -----------------------------------------------------------------------


def model_mistakes(step):
    """Yield (text, arguments of `run_model`): another temperature, or logits of another token."""
    T = step.c.temperature

    def shifted(by):
        def model(tokens, at=None):
            last = tokens.shape[1] - 1
            rows, places = (0, torch.arange(last + 1)) if at is None else at
            logits = step.model(tokens)
            logits = logits if torch.is_tensor(logits) else logits.logits
            return logits[rows, (places + by).clamp(0, last)][None]

        return model

    yield "at temperature 1", (1.0,)
    yield "divided by the temperature twice", (T * T,)
    yield "of logits that are multiplied by the temperature", (1 / T,)
    yield "shifted: of the logits at the token itself", (T, shifted(1))
    yield "shifted: of the logits two tokens before", (T, shifted(-1))


KINDS = {  # of advantages, as a report says them
    "group_std": "divided by the group's standard deviation",
    "group_mean": "not divided by a standard deviation",
    "batch_std": "divided by the batch's standard deviation",
    "leave_one_out": "the rewards less the mean of the others",
    "none": "the rewards themselves",
}


def advantage_mistakes(step, want):
    """Yield (text, {place: advantages}). want: the definition's."""
    c, S = step.c, step.sequences
    every = [A for row in want.values() for A in row]
    if c.advantage == "gae":
        yield "the advantages' lambda is 1", advantages(changed(c, gae_lambda=1.0), S)
        raw = {s.place: gae(c, s) for s in S}
        flat = [A for row in raw.values() for A in row]
        mean, spread = math.fsum(flat) / max(1, len(flat)), D.spread(flat) + 1e-8
        for text, m, d in (("whitened", 0.0, 1.0), ("divided by their spread", mean, 1.0),
                           ("centered", 0.0, spread)):  # fmt: skip
            yield f"advantages are not {text}", {
                n: [(A - m) / d for A in row] for n, row in raw.items()}  # fmt: skip
    elif c.advantage != "teacher":
        for kind, text in KINDS.items():
            if kind != c.advantage:
                yield f"advantages are {text}: {kind}, not {c.advantage}", advantages(
                    changed(c, advantage=kind), S)  # fmt: skip
        for std, text in (("biased", "a biased"), ("unbiased", "an unbiased")):
            if std != c.std:
                yield f"advantages use {text} standard deviation", advantages(
                    changed(c, std=std), S)  # fmt: skip
        size = len(parts_by(S, "groups")[0])
        for text, group_of in (
            ("advantages are normalized over the step, not over groups", lambda s: 0),
            ("groups are taken as consecutive sequences", lambda s: s.place // size),
        ):
            yield text, advantages(c, with_rows(S, groups=group_of))
    for text, keys in (("rank's", ("rank",)), ("micro-batch's", ("rank", "micro_batch"))):
        own = {}
        for part in parts_by(S, *keys):
            own |= advantages(c, part)
        yield f"advantages are normalized among the {text} own sequences", own
    mean, spread = math.fsum(every) / max(1, len(every)), D.spread(every, free=1) + 1e-8
    yield "advantages are whitened once more over the step", {
        n: [(A - mean) / spread for A in row] for n, row in want.items()}  # fmt: skip
    yield "advantages have the wrong sign", {n: [-A for A in row] for n, row in want.items()}


# The sum --------------------------------------------------------------------------------------


def factors_of(step):
    """Return {factor: what gives a gradient that is this many times too large}."""
    M, R, found = step.micro_batches, step.ranks, {}
    for k, text in (
        (1 / M, f"divided by the number of micro-batches ({M}) twice"),
        (M, f"the sum of micro-batches ({M}) where their mean is due"),
        (1 / R, f"divided by the number of ranks ({R}) twice"),
        (R, f"the sum of ranks ({R}) where their mean is due"),
        (1 / (M * R), f"divided by micro-batches x ranks ({M * R}) twice"),
        (M * R, f"the sum of micro-batches and ranks ({M * R}) where their mean is due"),
        (-1, "the sign is wrong"),
    ):
        if k != 1:
            found[k] = f"{found[k]}, or {text}" if k in found else text
    return found


COUNT_TOKENS = ("token_mean", "sequence_mean")  # the aggregations that divide by tokens


def recounted(c, S, trained, count):
    """Return the plan of sequences that are divided by wrong counts of tokens.

    trained: S with the masks that are trained on. count: a function of a sequence of S.
    """
    counts = [max(count(s), 1) for s in S]
    Z = sum(counts) if c.aggregation == "token_mean" else denominator(c, S)
    own = c.aggregation == "sequence_mean"  # each sequence is divided by a count of its own
    return [(denominator(c, [x]) / Z * (len(x.at) / n if own else 1.0), c, [x])
            for x, n in zip(trained, counts)]  # fmt: skip


def wrong_parts(step):
    """Return {mistake: plan}: sums and means of the wrong parts, or over the wrong counts."""
    c, S, Z = step.c, step.sequences, denominator(step.c, step.sequences)
    ranks, micros = parts_by(S, "rank"), parts_by(S, "rank", "micro_batch")
    by_group = parts_by(S, "groups") if S and S[0].groups is not None else []
    found = {f"{k:.4g} times the definition's: {text}": [(k, c, S)]
             for k, text in factors_of(step).items()}  # fmt: skip

    # The mean of the parts' own means.
    for text, parts in (("micro-batches'", micros), ("ranks'", ranks), ("groups'", by_group)):
        found[f"the mean of the {text} means, not the mean over the step"] = [
            (1 / len(parts), c, part) for part in parts]  # fmt: skip

    # Some parts alone, divided by the step's denominator.
    last = [parts_by(rank, "micro_batch")[-1] for rank in ranks]
    for text, parts in (("the gradients of the ranks are not added up: rank 0's alone", ranks[:1]),
                        ("the last micro-batch alone", last)):  # fmt: skip
        found[text] = [(denominator(c, part) / Z, c, part) for part in parts]

    # A part that counts less or more than the others, or not at all.
    for text, parts in (("rank", ranks), ("micro-batch", micros), ("group", by_group)):
        for n, part in enumerate(parts if len(parts) > 1 else ()):
            for k, how in ((0.0, "is left out"), (0.5, "counts half"), (2.0, "counts twice")):
                extra = (k - 1) * denominator(c, part) / Z
                found[f"{text} {n} of {len(parts)} {how}"] = [(1.0, c, S), (extra, c, part)]

    # Another denominator.
    found["the sum, divided by nothing"] = [(Z, c, S)]
    for text, count in (
        ("the padding too", lambda s: s.width), ("the prompt too", lambda s: s.length),
        ("masked tokens between trained ones too", lambda s: sum(s.span())),
        ("one token more of each sequence", lambda s: len(s.at) + 1),
        ("one token less of each sequence", lambda s: len(s.at) - 1),
    ) if c.aggregation in COUNT_TOKENS else ():  # fmt: skip
        found[f"the denominator counts {text}"] = recounted(c, S, S, count)
    return found


def wrong_settings(step):
    """Return {mistake: settings that make it}."""
    c, found = step.c, {}
    for key, text in (("aggregation", "aggregation"), ("objective", "objective"), ("kl", "KL")):
        now = getattr(c, key)
        found |= {f"the {text} is {x}, not {now}": {key: x} for x in CHOICES[key] if x != now}
    found |= {
        "sequences without a token count in the mean": dict(count_empty=True),
        "sequences without a token do not count": dict(count_empty=False),
        "the clip is missing": dict(clip_low=math.inf, clip_high=math.inf, dual_clip=0.0),
        "the clip's bounds are swapped": dict(clip_low=c.clip_high, clip_high=c.clip_low),
        "the clip's upper bound is the lower one's": dict(clip_high=c.clip_low),
        "the clip's lower bound is the upper one's": dict(clip_low=c.clip_high),
        "dual_clip is missing": dict(dual_clip=0.0),
        "the KL is missing": dict(kl_coef=0.0),
        "the KL is k3 with its arguments swapped": dict(kl="k3", mistake=swapped_k3),
        "the KL is k3 times the sequence's ratio": dict(kl="k3", mistake=k3_times_ratio),
        "the entropy is missing": dict(entropy_coef=0.0),
        "the entropy has the wrong sign": dict(entropy_coef=-c.entropy_coef),
        "the weight of importance is missing": dict(importance_cap=0.0),
        "the value's clip is missing": dict(value_clip=math.inf),
    }
    for k, text in factors_of(step).items():
        text = f"the KL's coefficient is {k:.4g} times kl_coef: {text}"
        found[text] = dict(kl_coef=k * c.kl_coef)
    return found


def swapped_k3(c, place, s, terms):
    """Change the terms' KL to k3 of ref - lp."""
    for term, lp, ref in zip(terms, s.lp, s.ref or s.lp):
        k, slope = D.KLS["k3"](ref - lp, 1.0)
        term.loss += c.kl_coef * (k - term.k)
        term.dlp += c.kl_coef * (-slope - term.dk)


def k3_times_ratio(c, place, s, terms):
    """Multiply the terms' KL by the ratio of the sequence, which each token's log-prob moves."""
    N = max(len(terms), 1)
    ratio = math.exp(sum(lp - old for lp, old in zip(s.lp, s.old)) / N)
    mean = sum(term.k for term in terms) / N
    for term in terms:
        term.loss += c.kl_coef * (ratio - 1) * term.k
        term.dlp += c.kl_coef * (ratio * (term.dk + mean) - term.dk)


def ratio_of_sequence(s):
    """Return old log-probs that give all tokens their sequence's mean ratio."""
    mean = sum(s.lp[t] - (s.old_logprobs or s.lp)[t] for t in s.at) / max(len(s.at), 1)
    return [x - mean for x in s.lp]


WRONG_ROWS = {  # mistake: functions that give a sequence other rows
    "the prompt is trained on": dict(mask=lambda s: s.span(first=1)),
    "the padding is trained on": dict(mask=lambda s: [
        on or s.length <= t < s.width for t, on in enumerate(s.mask)]),
    "prompt and padding are trained on": dict(mask=lambda s: s.span(1, s.width)),
    "masked tokens between trained ones are trained on": dict(mask=lambda s: s.span()),
    "the last token of each sequence is not trained on": dict(mask=lambda s: [
        on and t != s.at[-1] for t, on in enumerate(s.mask)]),
    "the first token of each sequence is not trained on": dict(mask=lambda s: [
        on and t != s.at[0] for t, on in enumerate(s.mask)]),
    "the mask is one token late": dict(mask=lambda s: [False, *s.mask[:-1]]),
    "the mask is one token early": dict(mask=lambda s: [False, *s.mask[2:], False]),
    "the ratio is 1: old_logprobs are the policy's own": dict(old_logprobs=lambda s: None),
    "the ratio is to the reference, not to old_logprobs": dict(
        old_logprobs=lambda s: s.ref_logprobs or s.old_logprobs),
    "the ratio is the sequence's, with the token's gradient": dict(old_logprobs=ratio_of_sequence),
    "the ratio is to the sampler, not to old_logprobs": dict(
        old_logprobs=lambda s: s.sampler_logprobs or s.old_logprobs),
    "the KL is to old_logprobs, not to the reference": dict(
        ref_logprobs=lambda s: s.old_logprobs or s.lp),
}  # fmt: skip


def mistakes_of(step):
    """Yield (text, plan) for each mistake in what is added up."""
    c, S = step.c, step.sequences
    yield from wrong_parts(step).items()
    for text, changes in wrong_settings(step).items():
        yield text, [(1.0, changed(c, **changes), S)]
    for text, rows in WRONG_ROWS.items():
        wrong = with_rows(S, **rows)
        yield text, [(1.0, c, wrong)]
        if c.aggregation in COUNT_TOKENS and "mask" in rows or (
                denominator(c, wrong) != denominator(c, S)):  # fmt: skip
            yield f"{text}, and the denominator is right", recounted(
                c, S, wrong, lambda s: len(s.at))  # fmt: skip
    if c.objective in ("clip", "gspo"):
        # max(r A, clipped r A) is -min of both with -A. So the loss is minus the definition's of
        # -A, and the terms without A change their sign twice.
        minus = changed(c, kl_coef=-c.kl_coef, entropy_coef=-c.entropy_coef, dual_clip=0.0)
        yield "the larger of the two gains is taken: max in place of min", [
            (-1.0, minus, with_rows(S, advantages=lambda s: [-A for A in s.advantages]))]


def fitted_mistakes(step, g, loss_departs):
    """Yield (text, plan) of the numbers that fit the recorded loss or norm best. g: a Gradient."""
    c, S, Z, numbers = step.c, step.sequences, denominator(step.c, step.sequences), step.numbers
    if numbers.get("grad_norm"):
        k = numbers["grad_norm"] / max(g.norm, 1e-300)
        text = f"the denominator is {Z / k:.6g}, not {Z:g}"
        if not loss_departs:
            text = f"the gradient is {k:.6g} times the definition's, and the loss is right"
        yield text, [(k, c, S)]
    if not loss_departs:
        return
    loss, _ = definition(c, S)
    for name, text in (("entropy_coef", "entropy"), ("kl_coef", "KL")):
        now = getattr(c, name)
        slope = definition(changed(c, **{name: now + 1}), S)[0] - loss
        if slope:
            fit = now + (numbers["loss"] - loss) / slope
            yield (f"the {text}'s coefficient is {fit:.4g}, not {now:g}",
                   [(1.0, changed(c, **{name: fit}), S)])  # fmt: skip
    for names, text in ((("clip_low", "clip_high"), "clip's bounds are"),
                        (("clip_high",), "clip's upper bound is"),
                        (("clip_low",), "clip's lower bound is")):  # fmt: skip
        fit = fitted_bound(c, S, names, numbers["loss"])
        now = " and ".join(f"{getattr(c, name):g}" for name in names)
        wrong = changed(c, **dict.fromkeys(names, fit))
        yield f"the {text} {fit:.4g}, not {now}", [(1.0, wrong, S)]


def fitted_bound(c, S, names, loss):
    """Return the value of the clip's bounds with which the loss is nearest to another."""
    # A wider bound never makes a gain smaller, so the loss falls, and halving finds the place.
    low, high = 1e-6, 10.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        is_above = definition(changed(c, **dict.fromkeys(names, middle)), S)[0] > loss
        low, high = (middle, high) if is_above else (low, middle)
    return math.sqrt(low * high)


# The clip and AdamW ---------------------------------------------------------------------------


def added(gradients):
    """Return the sum of Gradients."""
    return Gradient(gradients[0].names, lambda n: sum(g[n] for g in gradients))


def clip_mistakes(step, g):
    """Yield (text, norm that is reported, Gradient that the optimizer gets)."""
    c, R, S, limit = step.c, step.ranks, step.sequences, step.c.max_grad_norm
    if not limit:
        return
    yield "the gradient is not clipped", g.norm, g
    yield "each parameter is clipped by its own norm", g.norm, Gradient(
        g.names, lambda n: g[n] * D.shrink(c, g.norms[n]))  # fmt: skip
    yield "each entry is clipped, not the norm", g.norm, Gradient(
        g.names, lambda n: g[n].clamp(-limit, limit))  # fmt: skip
    for r in range(R if R > 1 else 0):
        local = math.hypot(*(torch.tensor_split(torch.atleast_1d(g[n]), R)[r].norm().item()
                             for n in g.names))  # fmt: skip
        text = f"the norm is of rank {r}'s shard, not of the whole gradient"
        yield text, local, step.clip(g, local)

    # The clip before the sum: of each rank's gradient, of each micro-batch's, or of what the
    # micro-batches have added up to so far. Ranks that take the mean clip a gradient that is R
    # times as large.
    norm, total = step.numbers.get("grad_norm"), None
    for text, keys in (("rank's", ("rank",)), ("micro-batch's", ("rank", "micro_batch"))):
        plan = [(denominator(c, part) / denominator(c, S), c, part) for part in parts_by(S, *keys)]
        parts = [step.solve([part])[1] for part in plan]
        for scale in {1, R if keys == ("rank",) else 1}:
            clipped = added([step.clip(x, x.norm * scale) for x in parts])
            yield f"each {text} gradient is clipped, before they are added", norm, clipped
    for part in parts:
        total = step.clip(part if total is None else added([total, part]))
    yield "the sum so far is clipped after each micro-batch", norm, total


def with_settings(**changes):
    """Return a change of AdamW's arguments: other settings."""
    return lambda a: a | dict(h=a["h"] | changes)


def update_mistakes(step):
    """Return {mistake: change of AdamW's arguments}."""

    def eps_in_root(a):  # sqrt(v + eps) is the root of another v
        beta2, eps = a["h"]["betas"][1], a["h"]["eps"]
        v = a["v"] + eps * (1 - beta2 ** a["count"]) / beta2
        return a | dict(h=a["h"] | dict(eps=0.0), v=v)

    def coupled(a):
        g = a["g"] + a["h"]["weight_decay"] * a["weight"]
        return a | dict(h=a["h"] | dict(weight_decay=0.0), g=g)

    h = step.numbers["optimizer"]["groups"][0]
    return {
        "AdamW's bias correction is missing": lambda a: a | dict(count=math.inf),
        "eps is inside the square root": eps_in_root,
        "the decay is coupled: it is part of the gradient": coupled,
        "norms and biases decay too": step.decaying("all"),
        "norms and biases do not decay": step.decaying("matrices"),
        "no weight decays": with_settings(weight_decay=0.0),
        "AdamW's step count is one too small": lambda a: a | dict(count=a["count"] - 1),
        "AdamW's step count is one too large": lambda a: a | dict(count=a["count"] + 1),
        "the betas are swapped": with_settings(betas=h["betas"][::-1]),
        **{f"eps is {eps:g}": with_settings(eps=eps) for eps in (1e-4, 1e-5, 1e-6, 1e-8, 1e-10)
           if eps != h["eps"]},
    } | {f"the learning rate is {k:.4g} times the recorded one: {text}": with_settings(
        lr=h["lr"] * k) for k, text in factors_of(step).items()}  # fmt: skip


def slope_of(pairs):
    """Return k with which k times y is nearest to x. pairs: of tensors x and y."""
    sums = [((x * y).sum().item(), (y * y).sum().item()) for x, y in pairs]
    return sum(a for a, _ in sums) / max(sum(b for _, b in sums), 1e-300)


def after_updates(steps, change):
    """Return the last of several steps if all updates had a mistake, and whether numbers hold."""
    step, holds = steps[0], True
    for later in steps[1:]:
        kinds = step.next_kinds(step.clip(step.full), change)
        kinds |= {x: later.kinds[x] for x in ("after", "exp_avg_after") if x in later.kinds}
        step = Step([replace(s) for s in later.sequences], kinds, later.numbers, later.model,
                    dtype=later.dtype)  # fmt: skip
        step.floor, step.distances, step.floors = later.floor, later.distances, later.floors
        loss, step.full = step.solve()
        holds = holds and step.fits(step.full) and not (
            "loss" in step.numbers and step.loss_error(loss) > step.may("loss"))  # fmt: skip
    return step, holds


def updates_explained(steps, g=None, noisy=False):
    """Yield the mistakes of AdamW that explain the weights after some updates in a row.

    steps: a Step for each update. What was recorded after the last one is in it.
    g: the clipped Gradient of the last update. Default: the one that the mistake leads to.
    """
    are_small = all(step.is_small for step in steps)
    if not (steps[-1].can_update() and (are_small or len(steps) == 1)):
        return
    h = steps[0].numbers["optimizer"]["groups"][0]
    fitted = (("the learning rate is {:.4g} times the recorded one", "lr", 1.0),
              (f"the weight decay is {{:.4g}}, not {h['weight_decay']:g}", "weight_decay",
               h["weight_decay"]))  # fmt: skip
    tries = [(text, change, "", 0.0) for text, change in update_mistakes(steps[0]).items()]
    is_named = False
    for text, change, name, k in tries + [(text, None, *start) for text, *start in fitted]:
        if name and is_named:  # a decay of 1e-7 fits, too, where no weight decays
            break

        # What is fitted becomes better with each try, as the later gradients move with it.
        for _ in range(5 if name else 1):
            if name:
                change = with_settings(**{name: k * h["lr"] if name == "lr" else k})
            last, holds = after_updates(steps, change)
            used = g or last.gradient or last.clip(last.full)
            if holds and last.update_error(used, change, noisy)[0] <= steps[-1].may("weights"):
                yield text.format(k)
                is_named = True
                break
            if name and math.isfinite(k) and (k or name != "lr"):
                k += slope_of(moves(steps, last, used, change, name, k))


def moves(steps, last, g, change, name, k):
    """Yield for each parameter what is left of the recorded weights, and how a setting moves it."""
    lr = steps[0].numbers["optimizer"]["groups"][0]["lr"]
    for n in last.named:
        first, after = steps[0].state("before", n), last.adamw(n, g[n], change)[0]
        way = (after - first) / k if name == "lr" else -len(steps) * lr * first
        yield last.state("after", n) - after, way

"""Hold anybody's policy loss to its definition: twelve properties, in seconds, on a laptop.

    python conformance/loss.py FILE.py:loss              # or MODULE:loss
    python conformance/loss.py FILE.py:loss objective=cispo clip_high=4   # replaces SETTINGS

The file with your loss in it needs one function of about ten lines, the adapter. It gets a batch,
calls your loss, and returns a scalar with a graph. SETTINGS say what your loss claims to be:

    SETTINGS = dict(objective="clip", clip_low=0.2, clip_high=0.2, aggregation="token_mean")

    def loss(batch):
        ratio = torch.where(batch.mask, batch.lp - batch.old, 0.0).exp()
        gain = ratio * batch.advantage
        clipped_gain = ratio.clamp(0.8, 1.2) * batch.advantage
        return -torch.minimum(gain, clipped_gain)[batch.mask].sum() / batch.Z

batch holds one micro-batch: B sequences, padded on their right to T tokens.
    lp           (B, T), with a graph. Log-probs of the sampled tokens under the policy now.
    old          (B, T). The same, under the policy before the step.
    advantage    (B, T). All tokens of a sequence have the same one: advantage[:, 0] is (B,).
    mask         (B, T), bool. False for padding and for tokens that the policy did not sample.
At padding lp and old are 0, except in property 6, where they are anything. A loss that takes logits
gets a vocabulary of two tokens, the first of which was sampled. Property 6 then varies old only:
    lp = torch.where(batch.mask, batch.lp, -1.0)  # the log-prob of the other one is finite
    logits = torch.stack([lp, torch.log1p(-lp.exp())], -1)
The rest counts everything that one optimizer step sees, in all micro-batches of all ranks.
    Z            The denominator of the settings' aggregation. For token_mean it is `tokens`.
    tokens       Number of tokens whose mask is True.
    sequences    Number of sequences.
    filled       Number of sequences with at least one such token.
    micro_batches, ranks    Number of micro-batches of each rank; number of ranks.
    settings     SETTINGS with all defaults filled in. settings["clip_low"] is a number.

Keys of SETTINGS, with their defaults. Leave KL, entropy and sampler corrections out of the loss.
    objective="clip"           What the weight w is in the gradient -w A d(lp) of a token. With
                               d = lp - old, r = exp(d), s = exp(mean of d over the sequence):
        reinforce   w = 1
        clip        w = r, or 0 if A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low
        cispo       w = r, bounded to 1 - clip_low .. 1 + clip_high
        gspo        w = s, or 0 by the same rule as clip
        sapo        w = 4 sigma (1 - sigma) r, sigma the sigmoid of tau (r - 1)
        gmpo        w = s of the clipped d: at most clip_high for A > 0, at least -clip_low for
                    A < 0. w = 0 where d is clipped
        dppo        w = min(r, ratio_cap), or 0 if A > 0 and the token's probability has risen by
                    more than clip_high, or A < 0 and has fallen by more than clip_low
    clip_low=0.2, clip_high=0.2
    dual_clip=0                For clip and gspo: w = 0 also if A < 0 and r > dual_clip. 0: none.
    tau_pos=1.0, tau_neg=1.05  For sapo: tau where A > 0, and elsewhere.
    divergence="tv"            For dppo: tv as above; kl: KL(old, now) of "this token or not".
    ratio_cap=20.0             For dppo.
    aggregation="token_mean"   Sum over tokens / tokens. sequence_mean: mean over sequences of the
                               mean over a sequence's tokens. constant: sum over tokens /
                               (sequences * max_new_tokens).
    max_new_tokens=16
    count_empty=None           Does a sequence without a token count in the mean over sequences?
                               None: under constant only.
    micro_batches="sum"        What the caller does with the micro-batches' gradients: sum or mean.
    ranks="sum"                The same for ranks. DDP and FSDP take the mean.
    equal_rows=False           True: all micro-batches of a step have equally many sequences.
    skip={}                    {"padding": "sequences are packed"}: properties that do not apply
                               to the loss, and why. An adapter may also raise NotImplementedError.

The definition is in this file, in loops over tokens in float64. The exit status is 1 if a property
failed. A failure is shown with the smallest batch that was found to fail. Properties 1, 2 and 8
compare with the definition. The others compare the loss with itself, so that a loss with a wrong
constant fails the first two only. The twelve, by the names that `skip` takes:
"""

import argparse
import importlib
import importlib.util
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

DEFAULTS = dict(
    objective="clip", clip_low=0.2, clip_high=0.2, dual_clip=0.0, tau_pos=1.0, tau_neg=1.05,
    divergence="tv", ratio_cap=20.0, aggregation="token_mean", max_new_tokens=16, count_empty=None,
    micro_batches="sum", ranks="sum", equal_rows=False, skip={},
)  # fmt: skip
CHOICES = dict(
    objective=("reinforce", "clip", "cispo", "gspo", "sapo", "gmpo", "dppo"),
    aggregation=("token_mean", "sequence_mean", "constant"), divergence=("tv", "kl"),
    micro_batches=("sum", "mean"), ranks=("sum", "mean"),
)  # fmt: skip
TOLERANCE = 1e-6  # relative, in float64: a loss may add 1e-8 to a count, or compute in float32
BUDGET = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8}  # relative; 2**-8 is bfloat16's eps


@dataclass(eq=False)
class Sequence:
    """One sequence: its advantage, and one entry for each token in the other lists."""

    A: float
    lp: list
    old: list
    mask: list

    def take(self, places):
        """Return the sequence of the tokens at some places, in their order."""
        lists = {name: getattr(self, name) for name in ("lp", "old", "mask")}
        return replace(self, **{name: [x[t] for t in places] for name, x in lists.items()})

    def text(self):
        """Return the sequence on one line, as it is printed below a failure."""
        text = f"A {self.A:+g}"
        for name in ("lp", "old", "mask"):
            numbers = [f"{x:g}" for x in getattr(self, name)]
            text += f"   {name} " + " ".join(numbers[:12] + ["..."] * (len(numbers) > 12))
        return text


# The definition -------------------------------------------------------------------------------
# Loops over sequences and tokens, with Python's floats: no tensor, no autograd, no padding. If you
# trust the table at the top of the file, skip this section.


def is_clipped(c, r, A):
    """Return whether a ratio has left its interval in the direction that A asks for."""
    if A > 0:
        return r > 1 + c.clip_high
    return A < 0 and (r < 1 - c.clip_low or bool(c.dual_clip) and r > c.dual_clip)


def gain_of(c, r, A):
    """Return PPO's gain of a token: r A, or the gain at a bound."""
    gain = min(r * A, min(max(r, 1 - c.clip_low), 1 + c.clip_high) * A)
    return max(gain, c.dual_clip * A) if c.dual_clip and A < 0 else gain


def is_too_far(c, lp, old, A):
    """Return whether the token's probability has moved too far towards A, as DPPO measures it."""
    p, q = math.exp(lp), math.exp(old)
    moved = abs(p - q)
    if c.divergence == "kl":
        moved = q * (old - lp) + (1 - q) * math.log((1 - q) / (1 - p))
    return (A > 0 and p > q and moved > c.clip_high) or (A < 0 and p < q and moved > c.clip_low)


def terms_of(c, s):
    """Return (value, gradient in lp) of each trained token of a sequence, before aggregation."""
    A, terms = s.A, []
    tokens = [(lp, old) for lp, old, on in zip(s.lp, s.old, s.mask) if on]
    ratio_of_sequence = math.exp(sum(lp - old for lp, old in tokens) / max(len(tokens), 1))

    # GMPO bounds each token before the mean, and only on the side that A asks for.
    bounded = [min(lp - old, c.clip_high) if A > 0 else lp - old for lp, old in tokens]
    bounded = [max(d, -c.clip_low) if A < 0 else d for d in bounded]
    bounded_ratio = math.exp(sum(bounded) / max(len(tokens), 1))

    # A token's gradient is -w A, whatever the objective. Only w differs.
    for (lp, old), d in zip(tokens, bounded):
        r = math.exp(lp - old)
        if c.objective in ("clip", "gspo"):
            r = ratio_of_sequence if c.objective == "gspo" else r
            w, value = 0.0 if is_clipped(c, r, A) else r, -gain_of(c, r, A)
        elif c.objective == "sapo":
            tau = c.tau_pos if A > 0 else c.tau_neg
            sigma = 1 / (1 + math.exp(-tau * (r - 1)))
            w, value = 4 * sigma * (1 - sigma) * r, -4 / tau * sigma * A
        elif c.objective == "gmpo":
            w, value = bounded_ratio if d == lp - old else 0.0, -bounded_ratio * A
        else:
            w = 1.0  # reinforce
            if c.objective == "cispo":
                w = min(max(r, 1 - c.clip_low), 1 + c.clip_high)
            if c.objective == "dppo":
                w = 0.0 if is_too_far(c, lp, old, A) else min(r, c.ratio_cap)
            value = -w * A * lp
        terms.append((value, -w * A))
    return terms


def denominator(c, sequences):
    """Return Z: what the sum over these sequences is divided by."""
    if c.aggregation == "token_mean":
        return sum(sum(s.mask) for s in sequences)
    counts_empty = c.aggregation == "constant" if c.count_empty is None else c.count_empty
    count = sum(1 for s in sequences if counts_empty or any(s.mask))
    return count * (c.max_new_tokens if c.aggregation == "constant" else 1)


def definition(c, sequences):
    """Return the loss of a step and its gradient, one list for each sequence, as `run` does."""
    # In sequences of 3 and 5 tokens each counts 1/8, or by sequence_mean 1/6 and 1/10.
    Z, loss, gradients = denominator(c, sequences), 0.0, []
    for s in sequences:
        weight = 1 / max(sum(s.mask), 1) if c.aggregation == "sequence_mean" else 1.0
        terms = iter(terms_of(c, s))
        gradients.append([0.0] * len(s.mask))
        for t, on in enumerate(s.mask):
            if on:
                value, gradient = next(terms)
                loss += weight * value / Z
                gradients[-1][t] = weight * gradient / Z
    return loss, [*gradients, [0.0]]


# A step with somebody's loss ------------------------------------------------------------------
# What a training loop does: batches, calls of the loss, the sum of gradients, and a comparison.


def make_batch(c, sequences, step, *, pad=0, fill=(0.0, 0.0), dtype=torch.float64, **counts):
    """Return the batch of some sequences of a step, as the adapter gets it.

    pad: number of tokens of padding, more than the longest sequence needs.
    fill: lp and old of the padding.
    counts: micro_batches and ranks of the step.
    """
    # Lists are padded before they become tensors. All tokens of a sequence have its advantage.
    width = max(len(s.lp) for s in sequences) + pad
    rows = {"lp": [], "old": [], "advantage": [], "mask": []}
    for s in sequences:
        empty = width - len(s.lp)
        rows["lp"].append(s.lp + [fill[0]] * empty)
        rows["old"].append(s.old + [fill[1]] * empty)
        rows["advantage"].append([s.A] * width)
        rows["mask"].append(s.mask + [0] * empty)
    tensors = {name: torch.tensor(x, dtype=torch.float64).to(dtype) for name, x in rows.items()}
    tensors["mask"] = tensors["mask"].bool()
    tensors["lp"].requires_grad_()
    return SimpleNamespace(
        **tensors, Z=float(denominator(c, step)), tokens=sum(sum(s.mask) for s in step),
        sequences=len(step), filled=sum(1 for s in step if any(s.mask)), settings=vars(c), **counts,
    )  # fmt: skip


def call(loss, batch):
    """Return the loss of a batch and its gradient in lp. A loss may come with metrics."""
    value = loss(batch)
    value = value[0] if isinstance(value, tuple) else value
    if not torch.is_tensor(value) or value.numel() != 1:
        raise TypeError(f"expected a scalar tensor, got {value!r}")

    # A loss without a graph has no gradient. check_gradient and check_empty say so.
    gradient = torch.zeros_like(batch.lp)
    if value.requires_grad:
        (found,) = torch.autograd.grad(value.sum(), batch.lp, allow_unused=True)
        gradient = gradient if found is None else found
    return value.detach(), gradient


def run(c, loss, ranks, **options):
    """Return the loss and the gradient of a step as its caller puts them together.

    ranks: for each rank a list of micro-batches, each a list of Sequences.
    options: pad, fill and dtype of `make_batch`.

    The gradient has one list for each sequence, in the order given, and one more for padding.
    """
    step = [s for rank in ranks for micro_batch in rank for s in micro_batch]
    total, gradients, padding = 0.0, [], 0.0
    for rank in ranks:
        # The caller's own factor, from outside of the loss.
        factor = 1 / len(ranks) if c.ranks == "mean" else 1.0
        factor /= len(rank) if c.micro_batches == "mean" else 1
        for sequences in rank:
            counts = dict(micro_batches=len(rank), ranks=len(ranks))
            value, gradient = call(loss, make_batch(c, sequences, step, **counts, **options))
            total += factor * value.item()
            for s, row in zip(sequences, (factor * gradient.double()).tolist()):
                gradients.append(row[: len(s.lp)])
                padding += sum(abs(x) for x in row[len(s.lp) :])
    return total, [*gradients, [padding]]


def difference(got, want, tolerance=TOLERANCE):
    """Say how two results of `run` differ, or return an empty text. A loss of None is any."""
    found, wanted = (np.array([x for row in result[1] for x in row]) for result in (got, want))
    places = [f"of sequence {i}, token {t}" for i, row in enumerate(want[1][:-1])
              for t in range(len(row))] + ["at padding"]  # fmt: skip
    size = abs(wanted).max()
    for at in np.flatnonzero(~np.isfinite(found))[-1:]:
        return f"the gradient {places[at]} is {found[at]:g}"

    # One factor for all tokens is a wrong denominator. It says more than one token's numbers.
    errors = abs(found - wanted)
    if errors.max() > tolerance * size:
        factor = found @ wanted / max(wanted @ wanted, 1e-300)
        if factor and abs(found - factor * wanted).max() <= 10 * tolerance * abs(found).max():
            factor = f"{factor:.3f}" if abs(factor - 1) > 0.01 else f"{factor:.7g}"
            return f"the gradient is {factor} times as large as it should be"
        at = int(errors.argmax())
        return f"the gradient {places[at]} is {found[at]:.6g}, expected {wanted[at]:.6g}"
    if got[0] is not None and not abs(got[0] - want[0]) <= tolerance * max(abs(want[0]), size):
        return f"the loss is {got[0]:.6g}, expected {want[0]:.6g}"
    return ""


def scaled(result, factor):
    """Return a result of `run` times a factor."""
    return result[0] * factor, [[factor * x for x in row] for row in result[1]]


# The twelve properties ------------------------------------------------------------------------
# Each takes settings, a loss and sequences, and returns how the property fails, or an empty text.


def check_value(c, loss, sequences):
    """The loss is the definition's: the objective's own value, not only its gradient."""
    got, want = run(c, loss, [[sequences]])[0], definition(c, sequences)[0]
    size = sum(abs(value) for s in sequences for value, _ in terms_of(c, s))
    wrong = not abs(got - want) <= TOLERANCE * size / denominator(c, sequences)
    return f"the loss is {got:.6g}, expected {want:.6g}" if wrong else ""


def check_gradient(c, loss, sequences):
    """Its gradient is the definition's, at every token."""
    return difference((None, run(c, loss, [[sequences]])[1]), definition(c, sequences))


def splits(c, sequences):
    """Return ways to cut sequences into several parts, most even ones first."""
    ways = [[[s] for s in sequences]]
    for first in (len(sequences) // 2, 1, len(sequences) - 1):
        ways.append([sequences[:first], sequences[first:]])
    ways = [way for way in ways if all(way) and len(way) > 1]
    return [way for way in ways if not c.equal_rows or len({len(part) for part in way}) == 1]


def check_micro_batches(c, loss, sequences):
    """A step has the same loss and gradient in one micro-batch and in several."""
    want = run(c, loss, [[sequences]])
    for parts in splits(c, sequences):
        if found := difference(run(c, loss, [parts]), want):
            return f"in {len(parts)} micro-batches {found}"
    return ""


def check_ranks(c, loss, sequences):
    """Neither the order of sequences matters, nor which rank has which of them."""
    want = run(c, loss, [[sequences]])
    value, (*gradients, padding) = run(c, loss, [[sequences[::-1]]])
    if found := difference((value, [*gradients[::-1], padding]), want):
        return f"in reverse order {found}"
    for parts in splits(c, sequences):
        if found := difference(run(c, loss, [[part] for part in parts]), want):
            return f"on {len(parts)} ranks {found}"
    return ""


def check_padding(c, loss, sequences):
    """More padding changes nothing, and has no gradient."""
    want = run(c, loss, [[sequences]])
    for pad in (1, 5):
        if found := difference(run(c, loss, [[sequences]], pad=pad), want):
            return f"with {pad} more tokens of padding {found}"
    return ""


def check_padding_content(c, loss, sequences):
    """Padding may hold anything, NaN too: it is selected away, not multiplied by zero."""
    # The first three are what a model says of a padding token. exp(2000) is already infinite.
    want, inf, nan = run(c, loss, [[sequences]], pad=1), math.inf, math.nan
    contents = [(-3.0, -1.0), (0.0, -9.0), (-40.0, -40.0), (0.0, -2000.0), (nan, 0.0), (0.0, nan)]
    for n, fill in enumerate([*contents, (-inf, -inf), (-inf, -1.0), (-1.0, -inf)]):
        if found := difference(run(c, loss, [[sequences]], pad=1, fill=fill), want):
            mild = "" if n < 3 else " (contents of usual size pass)"
            return f"with lp {fill[0]:g} and old {fill[1]:g} at padding {found}{mild}"
    return ""


def check_masked(c, loss, sequences):
    """Masked tokens inside a sequence, such as a tool's reply, are as if they were not there."""
    trained = [[t for t, on in enumerate(s.mask) if on] for s in sequences]
    without = [s.take(places) for s, places in zip(sequences, trained)]
    value, gradients = run(c, loss, [[without]])
    rows = [iter(row) for row in gradients]
    gradients = [[next(row) if on else 0.0 for on in s.mask] for row, s in zip(rows, sequences)]
    return difference(run(c, loss, [[sequences]]), (value, [*gradients, [0.0]]))


def check_clip(c, loss, sequences):
    """On both sides of each bound, for A of each sign, w is the definition's."""
    # The first of these sequences of one token has ratio 1 and A 1, and so w = 1 in all objectives.
    # It is the unit of the others, so that a wrong denominator does not fail here.
    gradients = [row[0] for row in run(c, loss, [[sequences]])[1]]
    unit = -gradients[0]
    if not (math.isfinite(unit) and unit > 1e-9):
        return f"for ratio 1 and A +1 the gradient is {-unit:g}, expected a negative number"
    for s, gradient in zip(sequences, gradients):
        got, want = gradient / unit, terms_of(c, s)[0][1]
        if not abs(got - want) <= 1e-5 * max(1, abs(want)):
            where = f"for ratio {math.exp(s.lp[0] - s.old[0]):.5g} and A {s.A:+g}"
            got, want = (-got / (s.A or 1) + 0.0, -want / (s.A or 1) + 0.0)
            return f"{where}, {'w' if s.A else 'w A'} is {got:.5g}, expected {want:.5g}"
    return ""


def check_empty(c, loss, sequences):
    """A sequence without a token adds nothing, and a micro-batch of such sequences has a graph."""
    none = [Sequence(1.0, [-1.0], [-1.5], [0]) for _ in sequences]
    whole = [*sequences, none[0]]
    value, (*gradients, padding) = scaled(
        run(c, loss, [[sequences]]), denominator(c, sequences) / denominator(c, whole)
    )
    if found := difference(run(c, loss, [[whole]]), (value, [*gradients, [0.0], padding])):
        return f"next to a sequence without a token {found}"

    # A rank may have nothing to train on. Its loss is 0, and its backward is called all the same.
    batch = make_batch(c, none, sequences + none, micro_batches=2, ranks=1)
    value, gradient = call(loss, batch)
    if value.item() != 0 or gradient.ne(0).any():
        return f"a micro-batch without a token has the loss {value.item():g}, or a gradient"
    value = loss(batch)
    if not (value[0] if isinstance(value, tuple) else value).requires_grad:
        return "a micro-batch without a token has no graph: its backward() raises an error"
    return ""


def check_count(c, loss, sequences):
    """The denominator counts the whole step: all micro-batches and all ranks."""
    # The rest of the step is three times the same sequences, twice as long.
    rest = [s.take(2 * list(range(len(s.lp)))) for _ in range(3) for s in sequences]
    share = denominator(c, sequences) / denominator(c, sequences + rest)
    alone = run(c, loss, [[sequences]])
    for name, how in (("micro_batches", c.micro_batches), ("ranks", c.ranks)):
        counts = {"micro_batches": 1, "ranks": 1} | {name: 4}
        value, gradient = call(loss, make_batch(c, sequences, sequences + rest, **counts))
        rows = [row[: len(s.lp)] for row, s in zip(gradient.tolist(), sequences)]
        want = scaled(alone, share * (4 if how == "mean" else 1))
        if found := difference((value.item(), [*rows, [0.0]]), want):
            return f"with the rest of the step in 3 other {name.replace('_', '-')} {found}"
    return ""


def check_dtype(c, loss, sequences):
    """Float32 and bfloat16 log-probs lose what their own rounding costs, and no more."""
    for dtype, budget in BUDGET.items():
        # The truth is the loss itself, in float64, for the same rounded numbers.
        rounded = []
        for s in sequences:
            lp, old = (torch.tensor(x).to(dtype).tolist() for x in (s.lp, s.old))
            rounded.append(replace(s, lp=lp, old=old))
        batch = make_batch(c, rounded, rounded, dtype=dtype, micro_batches=1, ranks=1)
        value = call(loss, batch)[0]
        if torch.finfo(value.dtype).eps > torch.finfo(dtype).eps:
            return f"for {dtype} log-probs the loss is {value.dtype}"
        want, got = run(c, loss, [[rounded]]), run(c, loss, [[rounded]], dtype=dtype)
        if found := difference((None, got[1]), want, budget):
            return f"for {dtype} log-probs {found}, within {budget:g}"

        # A sum of terms of both signs may be small, so its error is measured by their sizes.
        size = sum(abs(x) for s in rounded for x, _ in terms_of(c, s)) / denominator(c, rounded)
        if not abs(got[0] - want[0]) <= budget * max(size, abs(want[0])):
            return f"for {dtype} log-probs the loss is {got[0]:.6g}, expected {want[0]:.6g}"
    return ""


def check_second_call(c, loss, sequences):
    """A second call gives the same bits, and a call leaves its arguments as they were."""
    batch = make_batch(c, sequences, sequences, micro_batches=1, ranks=1)
    arguments = {name: getattr(batch, name) for name in ("lp", "old", "advantage", "mask")}
    before = {name: x.detach().clone() for name, x in arguments.items()}
    value, gradient = call(loss, batch)
    for name, x in arguments.items():
        if not torch.equal(x, before[name]):
            return f"the loss changes its argument {name}"
    again, gradient_again = call(loss, batch)
    if not (torch.equal(value, again) and torch.equal(gradient, gradient_again)):
        return f"the second call gives {again.item():.17g}, the first gave {value.item():.17g}"
    return ""


PROPERTIES = {
    "value": check_value,
    "gradient": check_gradient,
    "micro-batches": check_micro_batches,
    "order and ranks": check_ranks,
    "padding": check_padding,
    "padding content": check_padding_content,
    "masked tokens": check_masked,
    "clip edges, signs": check_clip,
    "empty sequence": check_empty,
    "global count": check_count,
    "dtype": check_dtype,
    "second call": check_second_call,
}


# Batches to try, and the smallest that fails ---------------------------------------------------


def sequences_for(name, c):
    """Return the sequences that a property is tried on."""
    if name == "clip edges, signs":
        # The ratios where w jumps or bends. DPPO's bounds are on p - q, so r = 1 + bound / q.
        old = -1.0 if c.objective == "dppo" else -2.5
        bounds = [1 - c.clip_low, 1 + c.clip_high, c.dual_clip]
        if c.objective == "gmpo":
            bounds = [math.exp(-c.clip_low), math.exp(c.clip_high)]
        if c.objective == "dppo":
            bounds = [1 - c.clip_low * math.e, 1 + c.clip_high * math.e, c.ratio_cap]
        ds = [math.log(r) + side for r in bounds if r > 0 for side in (-1e-3, 1e-3)]
        ds = [0.0, *ds, *np.arange(-1.975, 2.5, 0.05).tolist()]
        ds = [round(d, 6) for d in ds if d + old < -0.02]
        return [Sequence(A, [old + d], [old], [1]) for d in ds for A in (1.0, -1.0, 0.0, 0.5)]

    # Ratios below, inside and above the usual bounds for both signs of A, token by token and for a
    # whole sequence. Lengths are unequal, so that a mean over anything but Z is wrong.
    moves = {1.0: [0.8], -0.5: [-0.3, 0.6, -0.9], 1.5: [0.2, -0.7, 0.05, 0.4, -0.25]}
    moves[-2.0] = [-0.5, -0.15]
    if name == "dtype":
        # Inside all bounds, because rounding moves a ratio over a bound. A sum or a count of the
        # long sequence in bfloat16 would be far off.
        moves = {1.0: 100 * [0.03, -0.02, 0.05], -0.5: [0.03, -0.05]}
    old, sequences = [-0.92, -1.31, -1.04, -1.25, -1.17], []
    old = [x - 1 for x in old] if name == "dtype" else old
    for A, ds in moves.items():
        q = [old[t % 5] for t in range(len(ds))]
        sequences.append(Sequence(A, [round(x + d, 2) for x, d in zip(q, ds)], q, [1] * len(ds)))

    # A masked token at each end and in the middle, with a ratio that no trained token has.
    for s in sequences if name == "masked tokens" else []:
        for at in (len(s.lp), len(s.lp) // 2, 0):
            for row, x in ((s.lp, -0.4), (s.old, -2.9), (s.mask, 0)):
                row.insert(at, x)
    return sequences


def attempt(check, c, loss, sequences):
    """Return (whether it is an exception, how the property fails or an empty text)."""
    try:
        return False, check(c, loss, sequences)
    except NotImplementedError:
        raise
    except Exception as error:
        return True, f"{type(error).__name__}: {error}".split("\n")[0]


def smaller(sequences, least):
    """Yield the sequences without one of them, then with one of them shorter."""
    for i in range(least, len(sequences)):
        if len(sequences) > max(least, 1):
            yield sequences[:i] + sequences[i + 1 :]
    for i, s in enumerate(sequences):
        places, half = list(range(len(s.lp))), len(s.lp) // 2
        for kept in [places[:half], places[half:]] + [places[:t] + places[t + 1 :] for t in places]:
            shorter = s.take(kept)
            if len(kept) < len(places) and any(shorter.mask):
                yield sequences[:i] + [shorter] + sequences[i + 1 :]


def try_property(check, c, loss, sequences, least=0):
    """Return how a property fails and the smallest sequences found that fail in the same way.

    least: how many of the first sequences stay in any case.
    """
    failure = attempt(check, c, loss, sequences)
    while failure[1]:
        # The first smaller batch that fails, too, until there is none.
        for few in smaller(sequences, least):
            found = attempt(check, c, loss, few)
            if found[1] and found[0] == failure[0]:
                sequences, failure = few, found
                break
        else:
            break
    return failure[1], sequences


def conformance(loss, settings=None):
    """Return a row for each property: a dict with property, verdict, why, and the example's lines.

    loss: the adapter.
    settings: a dict that replaces some of its SETTINGS.
    """
    c, rows = settings_of(loss, settings or {}), []
    for name, check in PROPERTIES.items():
        verdict, why, example = "not applicable", c.skip.get(name, ""), []
        if not why:
            # The first sequence of `clip edges, signs` is the unit of the others.
            least = int(name == "clip edges, signs")
            try:
                why, example = try_property(check, c, loss, sequences_for(name, c), least)
                verdict = "failed" if why else "passed"
            except NotImplementedError as error:
                why = str(error) or "the adapter raises NotImplementedError"
        example = [s.text() for s in example] if verdict == "failed" else []
        rows.append(dict(property=name, verdict=verdict, why=why, example=example))
    return rows


# The command ----------------------------------------------------------------------------------


def settings_of(loss, given):
    """Return an adapter's settings: its own, or its module's, with some replaced."""
    module = sys.modules.get(getattr(loss, "__module__", ""))
    own = getattr(loss, "SETTINGS", None) or getattr(module, "SETTINGS", {})
    settings = DEFAULTS | own | given
    for name in [*settings, *settings["skip"]]:
        if name not in DEFAULTS and name not in PROPERTIES:
            raise ValueError(f"SETTINGS: expected one of {', '.join(DEFAULTS)}, got {name!r}")
    for name, allowed in CHOICES.items():
        if settings[name] not in allowed:
            raise ValueError(f"{name}: expected {' | '.join(allowed)}, got {settings[name]!r}")
    return SimpleNamespace(**settings)


def load(target):
    """Import MODULE:function or FILE.py:function."""
    file, _, name = target.rpartition(":")
    sys.path[:0] = [str(Path.cwd()), str(Path(file).resolve().parent)]
    if not file.endswith(".py"):
        return getattr(importlib.import_module(file), name)

    # The file is known by its name before it runs, as dataclasses in it ask for their module.
    specification = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(specification)
    sys.modules[Path(file).stem] = module
    specification.loader.exec_module(module)
    return getattr(module, name)


def main(argv):
    """Print the table of one adapter. Return 1 if a property failed."""
    listed = [f"    {name:18}  {check.__doc__}" for name, check in PROPERTIES.items()]
    parser = argparse.ArgumentParser(
        description="\n".join([__doc__.rstrip(), "", *listed]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="FILE.py:function", help="or MODULE:function")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="replaces SETTINGS")
    options = parser.parse_args(argv)
    given = {}
    for name, _, value in (text.partition("=") for text in options.settings):
        is_text = value.replace("_", "a").isalpha() and value not in ("true", "false", "null")
        given[name] = value if is_text else json.loads(value)

    loss = load(options.target)
    rows = conformance(loss, given)
    settings = vars(settings_of(loss, given)).items()
    changed = [f"{k}={v}" for k, v in settings if k != "skip" and v != DEFAULTS[k]]
    print(" ".join([options.target, *changed]))
    for number, row in enumerate(rows, 1):
        print(f"{number:2}  {row['property']:18}  {row['verdict']:15} {row['why']}".rstrip())
        for text in row["example"]:
            print("        " + text)
    count = {x: sum(row["verdict"] == x for row in rows) for x in ("passed", "failed")}
    print(f"{count['passed']} passed, {count['failed']} failed")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

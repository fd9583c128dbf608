"""Hold one optimizer step of anybody's trainer to its definition, and name the term that is wrong.

    python conformance/step.py DUMP --model FILE.py:build                  # or MODULE:build
    python conformance/step.py DUMP --model FILE.py:build temperature=0.7  # replaces a setting

build() returns the model: model(tokens (1, T)) is the logits (1, T, V), or has them as `.logits`.
DUMP is a directory. `record` of recorders.py writes it, in about ten lines of a trainer.

step.safetensors holds B sequences, padded on their right to T tokens. Column t is about token t.
    tokens          (B, T) integers. Required.
    mask            (B, T). True for the tokens that are trained on. Required.
    logprobs        (B, T). Log-prob of token t, given those before it, by the weights before the
                    step, as the trainer computed it. Required. Unmasked entries may be anything.
    old_logprobs    (B, T). Default: the policy itself, so that all ratios are 1.
    ref_logprobs    (B, T). Of the reference model, for the KL.
    advantages      (B,) or (B, T). Default: of the rewards.
    rewards, groups     (B,). A group is the sequences of one prompt.
    rank, micro_batch   (B,). Where a sequence was trained on. Default: 0.
    width           (B,). Tokens of its row with padding, in the trainer. Default: T.
    length          (B,). Tokens of its row without padding. Default: T.
    before.NAME, after.NAME    Weights. Default of `before`: what build() returns.
    grad.NAME       The gradient that the optimizer got, after the clip.
    exp_avg.NAME, exp_avg_sq.NAME    AdamW's moments before the step. Default in step 1: zeros.
step.json holds the rest.
    settings        As below. The command's replace them.
    loss            Of the step, as the trainer adds it up.
    grad_norm       Before the clip.
    optimizer       {"step": count after the step, "groups": [{"lr", "betas", "eps",
                    "weight_decay", "names"}]}
    changed         Names of weights that something other than the optimizer changed in the step.
A quantity that the dump lacks is not checked, and the report says so.

Settings, with their defaults: those of the definition, listed below, and
    micro_batches="sum", ranks="sum"   What the trainer does with the losses that `add` gets: sum or
                               mean.
    decay="groups"             Which weights decay: groups as recorded | matrices | all.
    tolerance=0                Relative. 0: 2e-5, 5e-4 or 3e-2 for float64, float32 and less.

Each check takes the trainer's own numbers of the checks before it, so that one mistake is one
finding. A check that fails is compared with the definition with one mistake in it, for each mistake
in a list. The exit status is 0 if the step holds, 1 if it does not, and 2 after an error.
"""

import functools
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

if __name__ == "__main__":  # a script has its own folder on the path, not the package's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conformance import command
from conformance import definition as D

DEFAULTS = D.LOSS_DEFAULTS | D.STEP_DEFAULTS
DEFAULTS |= dict(micro_batches="sum", ranks="sum", decay="groups", tolerance=0.0)
CHOICES = D.CHOICES | dict(micro_batches=("sum", "mean"), ranks=("sum", "mean"))
CHOICES |= dict(decay=("groups", "matrices", "all"))
TOLERANCE = {torch.float64: 2e-5, torch.float32: 5e-4}

# A step by the definition ---------------------------------------------------------------------
# The arithmetic is definition.py's, in loops over sequences and tokens. Only the model is torch's.


@dataclass(eq=False)
class Sequence:
    """One sequence of the step. Lists have an entry for each token; `lp` is the definition's."""

    place: int
    tokens: list
    mask: list
    logprobs: list
    old_logprobs: list | None
    ref_logprobs: list | None
    advantages: list | None
    rewards: float | None
    groups: int | None
    rank: int
    micro_batch: int
    width: int
    length: int
    lp: list = ()
    H: list = ()

    @property
    def at(self):
        """The places of the tokens that are trained on."""
        return [t for t, on in enumerate(self.mask) if on]

    def span(self, first=None, end=None):
        """Return a mask of the tokens from one place to another, of trained tokens by default."""
        places = self.at or [len(self.mask), -1]
        first, end = places[0] if first is None else first, places[-1] + 1 if end is None else end
        return [first <= t < end for t in range(len(self.mask))]

    def trained(self):
        """Return the definition's Sequence: the tokens that are trained on."""
        lists = dict(lp=self.lp, old=self.old_logprobs or self.lp, A=self.advantages,
                     ref=self.ref_logprobs, H=self.H)  # fmt: skip
        return D.Sequence(**{name: row and [row[t] for t in self.at]
                             for name, row in lists.items()})  # fmt: skip


def score(model, s, temperature):
    """Return the log-prob and the entropy at each token of a sequence, (T,), with a graph."""
    # One forward of one sequence. The logits at token t - 1 predict token t; the first token has
    # no log-prob. Padding follows all tokens, so that no token sees it.
    logits = model(torch.tensor(s.tokens)[None])
    logits = (logits if torch.is_tensor(logits) else logits.logits)[0].double()
    lp, H, _ = D.scores(logits[:-1], s.tokens[1:], temperature)
    return [torch.nn.functional.pad(x, (1, 0)) for x in (lp, H)]


def denominator(c, sequences):
    """Return Z: what the sum over these sequences is divided by."""
    return max(D.denominator(c, [len(s.at) for s in sequences]), 1)


def definition(c, sequences):
    """Return the loss, and its derivative in log-prob and entropy: {(place, t): (dlp, dH)}.

    c.mistake(c, s, terms): changes the terms of a sequence, if a mistake is planted.
    """
    rows, total, slopes = [s.trained() for s in sequences], 0.0, {}
    _, found = D.definition(c, rows, denominator(c, sequences))
    for s, row, terms in zip(sequences, rows, found):
        getattr(c, "mistake", lambda *_: None)(c, row, terms)
        for t, term in zip(s.at, terms):
            total += term.share * term.loss
            slopes[s.place, t] = term.share * term.dlp, term.share * term.dH
    return total, slopes


def advantages(c, sequences):
    """Return {place: the advantage of the sequence from the rewards of its group}."""
    groups = parts_by(sequences, "groups")
    found = D.advantages(c, [[s.rewards for s in group] for group in groups])
    return {s.place: A for group, row in zip(groups, found) for s, A in zip(group, row)}


def clip(c, g, norm):
    """Return the gradient, clipped as if its norm was `norm`."""
    return g * D.shrink(c, norm)


def parts_by(sequences, *keys):
    """Return the sequences in lists: those of one rank, or of one micro-batch of one rank."""
    parts = {}
    for s in sequences:
        parts.setdefault(tuple(getattr(s, key) for key in keys), []).append(s)
    return [parts[key] for key in sorted(parts)]


def lists_of(tensors):
    """Return the Sequences of a dump."""
    for name in ("tokens", "mask", "logprobs"):
        if name not in tensors:
            raise ValueError(f"expected {name} in step.safetensors, got {', '.join(tensors)}")
    B, T = tensors["tokens"].shape
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "advantages"):
        if name in tensors and tensors[name].shape not in ((B, T), (B,)):
            raise ValueError(f"{name}: expected {(B, T)}, got {tuple(tensors[name].shape)}")
    if tensors["mask"][:, 0].any():
        raise ValueError("mask: expected False for a row's first token, which has no log-prob")
    zeros = torch.zeros(B).int()
    rows = dict(rank=zeros, micro_batch=zeros, width=zeros + T, length=zeros + T) | tensors
    rows["mask"] = rows["mask"].bool()
    names = [x for x in Sequence.__dataclass_fields__ if x not in ("place", "lp", "H")]
    sequences = []
    for b in range(B):
        s = {name: rows[name][b].tolist() if name in rows else None for name in names}
        if isinstance(s["advantages"], float):
            s["advantages"] = [s["advantages"]] * T
        sequences.append(Sequence(place=b, **s))
    return sequences


def own_name(name):
    """Return a parameter's name without a wrapper's prefix."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


class Step:
    """What a trainer recorded of a step, and the same by the definition."""

    def __init__(self, directory, model, given):
        self.numbers = json.loads(Path(directory, "step.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(directory, "step.safetensors"))
        given = self.numbers.get("settings", {}) | given
        self.c = SimpleNamespace(**D.DEFAULTS | command.checked(DEFAULTS, CHOICES, given))
        self.sequences = lists_of(tensors)
        self.model, self.graph = model.double().eval(), None

        # {"before": {name: tensor}, "grad": {..}, ..}. The model gets the weights before.
        kinds = {}
        for name, x in tensors.items():
            kind, _, name = name.partition(".")
            kinds.setdefault(kind, {})[own_name(name)] = x
        own = dict(self.model.named_parameters())
        weights = kinds.get("before", {})
        if unknown := [name for name in weights if name not in own]:
            raise ValueError(f"expected weights named {', '.join(own)}, got {', '.join(unknown)}")
        for name, x in weights.items():
            own[name].data.copy_(x)
        self.named = {n: own[n] for n in weights or [n for n in own if own[n].requires_grad]}
        dtypes = [x.dtype for x in [tensors["logprobs"], *weights.values()]]
        self.dtype = max(dtypes, key=lambda x: torch.finfo(x).eps)
        self.tolerance = self.c.tolerance or TOLERANCE.get(self.dtype, 3e-2)

        # Flat vectors hold all parameters in order.
        self.flat = {kind: torch.cat([by[n].double().flatten() for n in self.named])
                     for kind, by in kinds.items() if not set(self.named) - set(by)}  # fmt: skip
        self.flat["before"] = torch.cat([p.detach().flatten() for p in self.named.values()])
        self.ranks = max(s.rank for s in self.sequences) + 1
        self.micro_batches = max(s.micro_batch for s in self.sequences) + 1

    def run_model(self, temperature, model=None):
        """Compute log-probs and entropies with a graph. Return the former, a list of lists."""
        model = model or self.model
        self.graph = [score(model, s, temperature) for s in self.sequences]
        for s, (lp, H) in zip(self.sequences, self.graph):
            s.lp, s.H = lp.tolist(), H.tolist()
        return [s.lp for s in self.sequences]

    def add_up(self, plan):
        """Return the loss of a plan, and its derivatives in log-probs and entropies, two lists."""
        total, lp, H = 0.0, *([torch.zeros_like(x[i]) for x in self.graph] for i in (0, 1))
        for factor, c, sequences in plan:
            loss, slopes = definition(c, sequences)
            total += factor * loss
            for (place, t), (slope, slope_H) in slopes.items():
                lp[place][t] += factor * slope
                H[place][t] += factor * slope_H
        return total, lp + H

    def backward(self, slopes):
        """Return the flat gradient in the weights from the derivatives of `add_up`."""
        outputs = [*(x[0] for x in self.graph), *(x[1] for x in self.graph)]
        found = torch.autograd.grad(outputs, list(self.named.values()), slopes, retain_graph=True,
                                    allow_unused=True, materialize_grads=True)  # fmt: skip
        return torch.cat([g.flatten() for g in found])

    def split(self, flat):
        """Return {name: tensor} of a flat vector."""
        parts = flat.split([p.numel() for p in self.named.values()])
        return {n: x.view_as(p) for (n, p), x in zip(self.named.items(), parts)}

    def update(self, g, change=lambda a: a):
        """Return the weights after AdamW's step with a clipped gradient, flat.

        change: gets and returns the arguments of `adamw` for one parameter: a mistake.
        """
        c, optimizer, result = self.c, self.numbers["optimizer"], []
        groups = {own_name(n): group for group in optimizer["groups"] for n in group["names"]}
        zeros = torch.zeros_like(self.flat["before"])
        m, v = (self.split(self.flat.get(kind, zeros)) for kind in ("exp_avg", "exp_avg_sq"))
        g = self.split(g)
        for name, p in self.split(self.flat["before"]).items():
            a = dict(h=groups[name], count=optimizer["step"], weight=p, m=m[name], v=v[name],
                     g=g[name])  # fmt: skip
            a = a if c.decay == "groups" else self.decaying(c.decay)(a)
            result.append(D.adamw(**change(a))[0].flatten())
        return torch.cat(result)

    def decaying(self, which):
        """Return a `change` of AdamW: which weights decay, all or matrices."""
        largest = max(group["weight_decay"] for group in self.numbers["optimizer"]["groups"])

        def change(a):
            decays = which == "all" or a["weight"].dim() >= 2
            return a | dict(h=a["h"] | dict(weight_decay=largest if decays else 0.0))

        return change

    def can_update(self):
        optimizer = self.numbers.get("optimizer")
        return "after" in self.flat and optimizer and (
            "exp_avg" in self.flat or optimizer["step"] == 1)  # fmt: skip

    def update_error(self, after, g=None):
        """Return how far recorded new weights are from others, relative to the step."""
        # A weight of 1 in float32 has no smaller step than 1e-7. Where the gradient is rounding,
        # AdamW's step has its full size and any sign, unless the recorded gradient was used.
        before = self.flat["before"]
        error = (self.flat["after"] - after).abs() - 4 * torch.finfo(self.dtype).eps * before.abs()
        if g is not None:
            error = error[g.abs() > 1e-5 * g.abs().max()]
        return error.clamp(min=0).norm().item() / max((after - before).norm().item(), 1e-300)

    def errors(self, g, norm=None, clipped=None):
        """Return {quantity: relative error} of what was recorded of a gradient."""
        norm = g.norm().item() if norm is None else norm
        clipped = clip(self.c, g, norm) if clipped is None else clipped
        result = {}
        if self.numbers.get("grad_norm") is not None:
            result["gradient norm"] = abs(self.numbers["grad_norm"] - norm) / max(norm, 1e-300)
        if "grad" in self.flat:
            error = (self.flat["grad"] - clipped).norm().item()
            result["gradient"] = error / max(clipped.norm().item(), 1e-300)
        elif self.can_update():
            result["weights"] = self.update_error(self.update(clipped), clipped)
        return result

    def fits(self, *given, **options):
        return all(error <= self.tolerance for error in self.errors(*given, **options).values())

    @functools.cached_property
    def size_of_loss(self):
        """A tenth of the loss if all terms had one sign. Terms may add up to nearly nothing."""
        terms = [term for s in self.sequences for term in D.terms_of(self.c, s.trained())]
        return sum(abs(term.loss) for term in terms) / denominator(self.c, self.sequences) / 10

    def loss_error(self, loss):
        """Return how far the recorded loss is from another, relative to the terms' sizes."""
        return abs(self.numbers["loss"] - loss) / max(self.size_of_loss, abs(loss), 1e-300)


# Mistakes in the sum --------------------------------------------------------------------------
# A plan is what a trainer adds up: a factor, settings and sequences for each part of the step. The
# definition's plan has one part, (1, c, S). A mistake is another plan, with a name. For example, a
# mean of two ranks' own means is (1/2, c, rank 0's sequences), (1/2, c, rank 1's).


def changed(c, **changes):
    """Return settings with some of them changed."""
    return SimpleNamespace(**vars(c) | changes)


def with_rows(S, **rows):
    """Return sequences with other rows, each a function of the sequence."""
    return [replace(s, **{name: row(s) for name, row in rows.items()}) for s in S]


def recounted(c, S, trained, count):
    """Return the plan of sequences that are divided by wrong counts of tokens.

    trained: S with the masks that are trained on. count: a function of a sequence of S.
    """
    by_sequence = c.aggregation == "sequence_mean"
    counts = [max(count(s), 1) for s in S]
    Z = denominator(c, S) if by_sequence else sum(counts)
    return [(denominator(c, [x]) / Z * (len(x.at) / n if by_sequence else 1.0), c, [x])
            for x, n in zip(trained, counts)]  # fmt: skip


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


def wrong_parts(step):
    """Return {mistake: plan}: sums and means of the wrong parts, or over the wrong counts."""
    c, S, Z = step.c, step.sequences, denominator(step.c, step.sequences)
    ranks, micros = parts_by(S, "rank"), parts_by(S, "rank", "micro_batch")
    found = {f"{k:.4g} times the definition's: {text}": [(k, c, S)]
             for k, text in factors_of(step).items()}  # fmt: skip

    # The mean of the parts' own means.
    for text, parts in (("micro-batches'", micros), ("ranks'", ranks),
                        ("groups'", parts_by(S, "groups"))):  # fmt: skip
        found[f"the mean of the {text} means, not the mean over the step"] = [
            (1 / len(parts), c, part) for part in parts]  # fmt: skip

    # Some parts alone, divided by the step's denominator.
    last = [parts_by(rank, "micro_batch")[-1] for rank in ranks]
    for text, parts in (("the gradients of the ranks are not added up: rank 0's alone", ranks[:1]),
                        ("the last micro-batch alone", last)):  # fmt: skip
        found[text] = [(denominator(c, part) / Z, c, part) for part in parts]

    # Another denominator. That of `constant` counts no tokens.
    found["the sum, divided by nothing"] = [(Z, c, S)]
    for text, count in (
        ("the padding", lambda s: s.width), ("the prompt", lambda s: s.length),
        ("masked tokens between trained ones", lambda s: sum(s.span())),
    ) if c.aggregation != "constant" else ():  # fmt: skip
        found[f"the denominator counts {text} too"] = recounted(c, S, S, count)
    return found


def wrong_settings(step):
    """Return {mistake: settings that make it}."""
    c, factors, found = step.c, factors_of(step), {}
    for key, text in (("aggregation", "aggregation"), ("objective", "objective"), ("kl", "KL")):
        now = getattr(c, key)
        found |= {f"the {text} is {x}, not {now}": {key: x} for x in CHOICES[key] if x != now}
    found |= {
        "sequences without a token count in the mean": dict(count_empty=True),
        "sequences without a token do not count": dict(count_empty=False),
        "the clip is missing": dict(clip_low=math.inf, clip_high=math.inf, dual_clip=0.0),
        "the clip's bounds are swapped": dict(clip_low=c.clip_high, clip_high=c.clip_low),
        "dual_clip is missing": dict(dual_clip=0.0),
        "the KL is missing": dict(kl_coef=0.0),
        "the KL is k3 with its arguments swapped": dict(kl="k3", mistake=swapped_k3),
        "the KL is k3 times the sequence's ratio": dict(kl="k3", mistake=k3_times_ratio),
        "the entropy is missing": dict(entropy_coef=0.0),
        "the entropy has the wrong sign": dict(entropy_coef=-c.entropy_coef),
    }
    for k, text in factors.items():
        text = f"the KL's coefficient is {k:.4g} times kl_coef: {text}"
        found[text] = dict(kl_coef=k * c.kl_coef)
    return found


def swapped_k3(c, s, terms):
    """Change the terms' KL to k3 of ref - lp."""
    for term, lp, ref in zip(terms, s.lp, s.ref or s.lp):
        k, slope = D.KLS["k3"](ref - lp, 1.0)
        term.loss += c.kl_coef * (k - term.k)
        term.dlp += c.kl_coef * (-slope - term.dk)


def k3_times_ratio(c, s, terms):
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
        if "mask" in rows and c.aggregation != "constant":
            yield f"{text}, and the denominator is right", recounted(
                c, S, wrong, lambda s: len(s.at))  # fmt: skip
    if c.objective in ("clip", "gspo"):
        # max(r A, clipped r A) is -min of both with -A. So the loss is minus the definition's of
        # -A, and the terms without A change their sign twice.
        minus = changed(c, kl_coef=-c.kl_coef, entropy_coef=-c.entropy_coef, dual_clip=0.0)
        yield "the larger of the two gains is taken: max in place of min", [
            (-1.0, minus, with_rows(S, advantages=lambda s: [-A for A in s.advantages]))]


# Mistakes of the clip and of AdamW ------------------------------------------------------------


def clip_mistakes(step, g):
    """Yield (text, norm that is reported, gradient that the optimizer gets)."""
    c, R, S, limit, norm = step.c, step.ranks, step.sequences, step.c.max_grad_norm, g.norm().item()
    if not limit:
        return
    yield "the gradient is not clipped", norm, g
    own = torch.cat([clip(c, x, x.norm().item()).flatten() for x in step.split(g).values()])
    yield "each parameter is clipped by its own norm", norm, own
    yield "each entry is clipped, not the norm", norm, g.clamp(-limit, limit)
    for r in range(R if R > 1 else 0):
        shards = [torch.tensor_split(torch.atleast_1d(x), R)[r].flatten()
                  for x in step.split(g).values()]  # fmt: skip
        local = torch.cat(shards).norm().item()
        text = f"the norm is of rank {r}'s shard, not of the whole gradient"
        yield text, local, clip(c, g, local)

    # The clip before the sum: of each rank's gradient, or of each micro-batch's. Ranks that take
    # the mean clip a gradient that is R times as large.
    for text, keys in (("rank's", ("rank",)), ("micro-batch's", ("rank", "micro_batch"))):
        plan = [(denominator(c, part) / denominator(c, S), c, part) for part in parts_by(S, *keys)]
        parts = [step.backward(step.add_up([part])[1]) for part in plan]
        for scale in {1, R if keys == ("rank",) else 1}:
            clipped = sum(clip(c, x, x.norm().item() * scale) for x in parts)
            text = f"each {text} gradient is clipped, before they are added"
            yield text, step.numbers.get("grad_norm"), clipped


def update_mistakes(step):
    """Return {mistake: change of AdamW's arguments}."""

    def settings(**changes):
        return lambda a: a | dict(h=a["h"] | changes)

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
        "no weight decays": settings(weight_decay=0.0),
        "AdamW's step count is one too small": lambda a: a | dict(count=a["count"] - 1),
        "AdamW's step count is one too large": lambda a: a | dict(count=a["count"] + 1),
        "the betas are swapped": settings(betas=h["betas"][::-1]),
    } | {f"the learning rate is {k:.4g} times the recorded one: {text}": settings(lr=h["lr"] * k)
         for k, text in factors_of(step).items()}  # fmt: skip


# The checks -----------------------------------------------------------------------------------
# A check returns a finding and figures. The finding is "" if all is right, and None if the dump
# lacks something, which the figures then name.


def join(found):
    """Say which mistakes explain what was found."""
    return " | or: ".join(list(dict.fromkeys(found))[:3])


def check_logprobs(step):
    """Compare log-probs, and leave the graph of the ones that the trainer has."""
    S, T = step.sequences, step.c.temperature

    def error(lps, recorded=lambda s: s.logprobs):
        return max((abs(recorded(s)[t] - lp[t]) / (1 + abs(lp[t])) for s, lp in zip(S, lps)
                    for t in s.at), default=0.0)  # fmt: skip

    def shifted(by):
        def model(tokens):
            logits = step.model(tokens)
            logits = logits if torch.is_tensor(logits) else logits.logits
            places = torch.arange(tokens.shape[1]) + by
            return logits[:, places.clamp(0, tokens.shape[1] - 1)]

        return model

    first = error(step.run_model(T))
    if first <= step.tolerance:
        return "", f"largest error {first:.1e}"
    for text, *how in (
        ("log-probs are at temperature 1", 1.0),
        ("log-probs are divided by the temperature twice", T * T),
        ("logits are multiplied by the temperature", 1 / T),
        ("log-probs are shifted: of the logits at the token itself", T, shifted(1)),
        ("log-probs are shifted: of the logits two tokens before", T, shifted(-1)),
    ):
        if error(step.run_model(*how)) <= step.tolerance:
            return text, f"largest error {first:.2g}"
    if error(step.run_model(T), lambda s: [*s.logprobs[1:], 0.0]) <= step.tolerance:
        return "log-probs are recorded in the wrong column", f"largest error {first:.2g}"
    s, t = max(((s, t) for s in S for t in s.at),
               key=lambda x: abs(x[0].logprobs[x[1]] - x[0].lp[x[1]]))  # fmt: skip
    figures = f"sequence {s.place}, token {t} has {s.logprobs[t]:.6g}, expected {s.lp[t]:.6g}"
    return "unexplained log-probs", figures


KINDS = {  # of advantages, as a report says them
    "group_std": "divided by the group's standard deviation",
    "group_mean": "not divided by a standard deviation",
    "batch_std": "divided by the batch's standard deviation",
    "leave_one_out": "the rewards less the mean of the others",
    "none": "the rewards themselves",
}


def advantage_mistakes(step, want):
    """Yield (text, {place: advantage}). want: the definition's."""
    c, S = step.c, step.sequences

    def regrouped(group_of):
        return advantages(c, with_rows(S, groups=group_of))

    for kind, text in KINDS.items():
        if kind != c.advantage:
            yield f"advantages are {text}: {kind}, not {c.advantage}", advantages(
                changed(c, advantage=kind), S)  # fmt: skip
    biased = {}
    for s in S:
        R = [x.rewards for x in S if c.advantage == "batch_std" or x.groups == s.groups]
        scale = (D.spread(R, free=1) + c.std_eps) / (D.spread(R) + c.std_eps)
        biased[s.place] = want[s.place] * scale
    yield "advantages use a biased standard deviation", biased
    for text, keys in (("rank's", ("rank",)), ("micro-batch's", ("rank", "micro_batch"))):
        parts = [advantages(c, part) for part in parts_by(S, *keys)]
        own = {place: A for part in parts for place, A in part.items()}
        yield f"advantages are normalized among the {text} own sequences", own
    yield "advantages are normalized over the step, not over groups", regrouped(lambda s: 0)
    size = len(parts_by(S, "groups")[0])
    yield "groups are taken as consecutive sequences", regrouped(lambda s: s.place // size)
    mean, spread = sum(want.values()) / len(S), D.spread([*want.values()], free=1) + 1e-8
    yield "advantages are whitened once more over the step", {
        n: (A - mean) / spread for n, A in want.items()}  # fmt: skip
    yield "advantages have the wrong sign", {n: -A for n, A in want.items()}


def check_advantages(step):
    """Compare advantages with the rewards', and fill them in where none were recorded."""
    S = step.sequences
    if S[0].rewards is None or S[0].groups is None:
        return None, "rewards, groups"
    want = advantages(step.c, S)
    if S[0].advantages is None:
        for s in S:
            s.advantages = [want[s.place]] * len(s.mask)
        return None, "advantages"

    def error(other):
        size = max(max(map(abs, other.values())), 1e-300)
        return max((abs(s.advantages[t] - other[s.place]) / size for s in S for t in s.at),
                   default=0.0)  # fmt: skip

    if error(want) <= step.tolerance:
        return "", f"largest error {error(want):.1e}"
    found = [x for x, other in advantage_mistakes(step, want) if error(other) <= step.tolerance]
    pairs = [(s.advantages[t], want[s.place]) for s in S for t in s.at]
    k = sum(a * b for a, b in pairs) / max(sum(b * b for _, b in pairs), 1e-300)
    if not found and error({n: k * A for n, A in want.items()}) <= step.tolerance:
        found = [f"advantages are {k:.6g} times the definition's"]
    got, due = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return join(found) or "unexplained advantages", f"{got:.6g}, expected {due:.6g}"


def explain(step, departs, g):
    """Return {quantity: which mistakes explain it, or ""} for the loss and the gradient.

    departs: some of "loss" and "gradient". g: the definition's gradient.
    """
    found = []  # (text, whether it is one mistake and not two, what it explains)
    right, of_gradient = clip(step.c, g, g.norm().item()), "gradient" in departs
    for text, norm, clipped in clip_mistakes(step, g) if of_gradient else ():
        # A rule that changes nothing in this step explains nothing.
        changes = (clipped - right).norm() > step.tolerance * right.norm()
        if changes and step.fits(g, norm=norm, clipped=clipped):
            found.append((text, True, {"gradient"}))
    for text, plan in mistakes_of(step):
        loss, slopes = step.add_up(plan)
        other = step.backward(slopes) if of_gradient else g

        # Two counts that are wrong at once explain any number. So the first of two mistakes must
        # change the direction, and a loss alone is never explained by two.
        tries = {1.0: text}
        if abs(other @ g) <= (1 - 1e-9) * other.norm() * g.norm():
            tries |= {k: f"{text}; and {k:.4g} times that: {why}"
                      for k, why in factors_of(step).items()}  # fmt: skip
        for k, text in tries.items():
            fits = {"gradient"} if of_gradient and step.fits(k * other) else set()
            close = "loss" in departs and step.loss_error(k * loss) <= step.tolerance
            fits |= {"loss"} if close and (fits or k == 1) else set()
            found.append((text, k == 1, fits))

    # One mistake that explains both is one finding. One mistake is likelier than two.
    result = {}
    for quantity in departs:
        choices = ([text for text, is_one, fits in found if is_one and fits == departs],
                   [text for text, is_one, fits in found if is_one and quantity in fits],
                   [text for text, _, fits in found if quantity in fits])  # fmt: skip
        result[quantity] = join(next(filter(None, choices), []))
    return result


def describe_gradient(step, g):
    """Say by what factor and angle the recorded gradient departs, and in which parameters."""
    norm, text = g.norm().item(), []
    if step.numbers.get("grad_norm") is not None:
        k, Z = step.numbers["grad_norm"] / norm, denominator(step.c, step.sequences)
        text.append(f"norm {k:.6g} times the definition's, as if Z were {Z / k:.6g} and not {Z}")
    if "grad" in step.flat:
        got, want = step.flat["grad"], clip(step.c, g, norm)
        cosine = (got @ want / (got.norm() * want.norm()).clamp(min=1e-300)).item()
        text.append(f"cosine {cosine:.6f}")
        errors = {n: ((x - y).norm() / y.norm().clamp(min=1e-300)).item() for (n, x), y in
                  zip(step.split(got).items(), step.split(want).values())}  # fmt: skip
        wrong = [n for n, error in errors.items() if error > 10 * step.tolerance]
        if 0 < len(wrong) < len(errors):
            text.append(f"{len(wrong)} of {len(errors)} parameters, first {wrong[0]}")
    return ", ".join(text)


def check_weights(step, g, finding):
    """Compare the new weights with AdamW's, on the gradient that it got if that was recorded.

    finding: what explains the gradient, if nothing but the weights shows it. None: not tried.
    """
    if not step.can_update():
        return None, "after, no moments or no optimizer"
    used = step.flat.get("grad", clip(step.c, g, g.norm().item()))
    noise, want = None if "grad" in step.flat else used, step.update(used)
    error = step.update_error(want, noise)
    if error <= step.tolerance:
        return "", f"error {error:.1e} of the update"
    if names := step.numbers.get("changed"):
        finding = f"something other than the optimizer changed {', '.join(names[:3])} in the step"
    tried = finding is not None or noise is None
    finding = finding or join(
        text for text, change in update_mistakes(step).items()
        if step.update_error(step.update(used, change), noise) <= step.tolerance)  # fmt: skip
    if not finding and not tried:
        finding = explain(step, {"gradient"}, g)["gradient"]
    got, want = (x - step.flat["before"] for x in (step.flat["after"], want))
    k = (got @ want / (want @ want).clamp(min=1e-300)).item()
    figures = f"the update is {k:.4g} times the definition's, and off by {error:.3g} of it"
    return finding or "unexplained weights", figures


def check_gradient(step):
    """Return {quantity: (finding, figures)} of the loss, the gradient and the weights."""
    # The weights show the gradient if nothing else does. If its norm holds and they do not, AdamW
    # is looked at first.
    loss, slopes = step.add_up([(1.0, step.c, step.sequences)])
    g = step.backward(slopes)
    errors = step.errors(g)
    wrong = {quantity for quantity, error in errors.items() if not error <= step.tolerance}
    departs = {"gradient"} if wrong and not (wrong == {"weights"} and len(errors) == 2) else set()
    rows = {"loss": (None, "loss"), "gradient norm": (None, "grad_norm"),
            "gradient": (None, "gradient")}  # fmt: skip
    if "loss" in step.numbers:
        rows["loss"] = "", f"error {step.loss_error(loss):.1e}"
        departs |= set() if step.loss_error(loss) <= step.tolerance else {"loss"}
    found = explain(step, departs, g) if departs else {}
    if "loss" in departs:
        figures = f"the loss is {step.numbers['loss']:.6g}, expected {loss:.6g}"
        rows["loss"] = found["loss"] or "unexplained", figures
    for quantity in errors.keys() & rows.keys():
        rows[quantity] = "", f"error {errors[quantity]:.1e}"
        if quantity in wrong:
            rows[quantity] = found["gradient"] or "unexplained", describe_gradient(step, g)
    of_gradient = None if "grad" in step.flat else found.get("gradient")
    return rows | {"weights": check_weights(step, g, of_gradient)}


def check(directory, model, given=None):
    """Return the rows of the report and the step.

    A row is a dict of quantity, verdict, finding, figures, and why, which is the last two.
    """
    step = Step(directory, model, given or {})
    found = {"log-probs": check_logprobs(step), "advantages": check_advantages(step)}
    lacking = "" if step.sequences[0].advantages is not None else "advantages, and no rewards"
    if step.c.kl_coef and step.sequences[0].ref_logprobs is None:
        lacking = "ref_logprobs"
    found |= check_gradient(step) if not lacking else dict.fromkeys(
        ("loss", "gradient norm", "gradient", "weights"), (None, lacking))  # fmt: skip
    rows = []
    for quantity, (finding, figures) in found.items():
        verdict = "not checked" if finding is None else "departs" if finding else "holds"
        why = {"not checked": f"the dump has no {figures}", "holds": figures,
               "departs": f"{finding} ({figures})"}[verdict]  # fmt: skip
        rows.append(dict(quantity=quantity, verdict=verdict, finding=finding, figures=figures,
                         why=why))  # fmt: skip
    return rows, step


# The command ----------------------------------------------------------------------------------


def lines_of(rows):
    """Yield the lines of a report. Quantities with one finding are one line."""
    lines = {}
    for row in rows:
        lines.setdefault(row["finding"] or row["quantity"], []).append(row)
    for finding, alike in lines.items():
        quantities = ", ".join(row["quantity"] for row in alike)
        figures = "; ".join(dict.fromkeys(row["figures"] for row in alike))
        why = f"{finding} ({figures})" if alike[0]["finding"] else alike[0]["why"]
        yield f"   {quantities:14}  {alike[0]['verdict']:12} {why}"


@command.one_line_errors
def main(argv):
    """Print the report of one dump. Return 1 if a check failed."""
    parser = command.parser(__doc__ + D.LOSS_SETTINGS + D.STEP_SETTINGS)
    parser.add_argument("dump", help="the directory that `record` wrote")
    parser.add_argument("--model", required=True, metavar="FILE.py:build", help="or MODULE:build")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="replaces a setting")
    options = parser.parse_intermixed_args(argv)  # settings may stand after --model
    given, build = command.settings_in(options.settings), command.load(options.model)
    rows, step = check(options.dump, build(), given)
    count = f"{len(step.sequences)} sequences, {step.ranks} ranks"
    count += f", {step.micro_batches} micro-batches"
    print(" ".join([options.dump, *command.changed(DEFAULTS, vars(step.c))]))
    print(f"   {count}, {step.dtype}", *lines_of(rows), sep="\n")
    departs = any(row["verdict"] == "departs" for row in rows)
    print("the step departs from its definition" if departs else "the step holds, where checked")
    return 1 if departs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

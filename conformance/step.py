"""Hold one optimizer step of anybody's trainer to its definition, and name the term that is wrong.

    python conformance/step.py DUMP --model FILE.py:build                  # or MODULE:build
    python conformance/step.py DUMP --model FILE.py:build temperature=0.7  # replaces a setting

build() returns the model: model(tokens (1, T)) is the logits (1, T, V), or has them as `.logits`.
DUMP is a directory. About ten lines in a trainer write it, for the step that they surround:

    with record(DUMP, model.named_parameters(), optimizer, settings=dict(aggregation="token_mean",
                max_grad_norm=1.0, temperature=0.7)) as add:
        for batch in micro_batches:
            logprobs = ...
            loss.backward()
            add(tokens=.., mask=.., logprobs=.., old_logprobs=.., advantages=.., loss=loss)
        add(grad_norm=clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()

Every rank does it, and rank 0 writes. Rows of `add` are sequences. With attention= (B, T), 1 for
tokens and 0 for padding, padding on the left is cut off, and padding on the right is known.

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
A quantity that the dump lacks is not checked, and the report says so.

Settings of the definition, with their defaults. The first two lines are explained in loss.py.
    objective="clip", clip_low=0.2, clip_high=0.2, dual_clip=0, tau_pos=1.0, tau_neg=1.05
    divergence="tv", ratio_cap=20.0, aggregation="token_mean", max_new_tokens=16, count_empty=None
    micro_batches="sum", ranks="sum"   What the trainer does with the losses that `add` gets.
    temperature=1.0            Of the log-probs.
    advantage="group_std"      R - mean, divided by the group's unbiased std + std_eps. Or
                               group_mean | batch_std | leave_one_out | none.
    std_eps=1e-4
    kl="k3", kl_coef=0.0       With d = lp - ref: k1 is d, k2 is d d / 2, k3 is exp(-d) + d - 1,
                               k3_ratio is r k3, with the gradient of r.
    entropy_coef=0.0           The loss has -entropy_coef times the entropy at a token.
    max_grad_norm=1.0          0: no clip.
    decay="groups"             Which weights decay: groups as recorded | matrices | all.
    tolerance=0                Relative. 0: 2e-5, 5e-4 or 3e-2 for float64, float32 and less.

Each check takes the trainer's own numbers of the checks before it, so that one mistake is one
finding. A check that fails is compared with the definition with one mistake in it, for each mistake
in a list. The exit status is 0 if the step holds, 1 if it does not, and 2 after an error.
"""

import argparse
import contextlib
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

try:
    from conformance import definition as D
    from conformance import loss as kit
except ImportError:  # as a script
    import definition as D
    import loss as kit

KEYS = kit.KEYS + " temperature advantage std_eps kl kl_coef entropy_coef max_grad_norm"
DEFAULTS = {key: D.DEFAULTS[key] for key in KEYS.split()}
DEFAULTS |= dict(micro_batches="sum", ranks="sum", decay="groups", tolerance=0.0)
CHOICES = kit.CHOICES | dict(decay=("groups", "matrices", "all"))
PER_TOKEN = "mask", "logprobs", "old_logprobs", "ref_logprobs", "advantages"
TOLERANCE = {torch.float64: 2e-5, torch.float32: 5e-4}

# The recorder ---------------------------------------------------------------------------------


def whole(x):
    """Return a detached copy of a tensor, all of it if it is sharded. Collective for a DTensor."""
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu().clone().contiguous()


@contextlib.contextmanager
def record(directory, named_parameters, optimizer, *, settings=None, step_number=1):
    """Write a dump of the optimizer step inside. Yield `add(**quantities)`. Collective.

    named_parameters: pairs (name, tensor), of the tensors that the optimizer updates.
    optimizer: a torch AdamW.
    step_number: int. Which call of optimizer.step() is the recorded one. Default: the first.
    """
    named = dict(named_parameters)
    state = SimpleNamespace(rows=[], numbers={}, tensors={}, calls=0, optimizer={})

    def add(attention=None, loss=None, **given):
        # One row for each sequence. A call with tokens is one micro-batch.
        micro_batch = len({row["micro_batch"] for row in state.rows})
        for name in [x for x in given if torch.is_tensor(given[x]) and given[x].dim() == 0]:
            given[name] = given[name].item()
        if loss is not None:
            state.numbers.setdefault("loss", []).append(float(torch.as_tensor(loss).detach()))
        if "tokens" not in given:
            state.numbers.update(given)
            return
        for b, tokens in enumerate(given["tokens"]):
            real = torch.ones_like(tokens) if attention is None else attention[b]
            first = int(real.argmax())
            row = dict(micro_batch=micro_batch, width=len(tokens) - first, length=int(real.sum()))
            for name, x in given.items():
                if x is not None:
                    x = torch.as_tensor(x[b]).detach().cpu()
                    row[name] = x[first:] if x.dim() else x.item()
            state.rows.append(row)

    def snapshot(prefix, of):
        state.tensors |= {f"{prefix}.{n}": whole(x) for n, p in named.items()
                          if (x := of(p)) is not None}  # fmt: skip

    def before_step(*_):
        state.calls += 1
        if state.calls == step_number:
            snapshot("before", lambda p: p)
            snapshot("grad", lambda p: p.grad)
            for key in ("exp_avg", "exp_avg_sq"):
                snapshot(key, lambda p, key=key: optimizer.state.get(p, {}).get(key))

    def after_step(*_):
        if state.calls == step_number:
            snapshot("after", lambda p: p)
            keys, names = ("lr", "betas", "eps", "weight_decay"), {id(p): n for n, p in
                                                                   named.items()}
            groups = [{k: g[k] for k in keys} | {"names": [names[id(p)] for p in g["params"]]}
                      for g in optimizer.param_groups]  # fmt: skip
            done = [x["step"] for x in optimizer.state.values()]
            state.optimizer = {"step": int(max(done)), "groups": groups}

    hooks = [optimizer.register_step_pre_hook(before_step),
             optimizer.register_step_post_hook(after_step)]  # fmt: skip
    yield add
    for hook in hooks:
        hook.remove()
    if state.calls < step_number:
        raise RuntimeError(f"expected optimizer step {step_number}, got {state.calls} steps")

    # Rank 0 gets the rows of all ranks. The ranks' own sums of losses are added up as settings say.
    mine, parts = (state.rows, state.numbers), None
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        if dist.get_rank() != 0:
            return
    parts = parts or [mine]
    rows = [{"rank": rank} | row for rank, (rows, _) in enumerate(parts) for row in rows]
    write_dump(directory, rows, state.tensors, state.optimizer, parts, settings or {})


def write_dump(directory, rows, tensors, optimizer, parts, settings):
    """Write step.json and step.safetensors. parts: (rows, numbers) of each rank."""
    T = max(len(row["tokens"]) for row in rows)
    for name in rows[0]:
        columns = [torch.as_tensor(row[name]) for row in rows]
        if columns[0].dim():
            columns = [torch.nn.functional.pad(x, (0, T - len(x))) for x in columns]
        tensors[name] = torch.stack(columns)
    numbers = dict(parts[0][1])
    if "loss" in numbers:
        losses = [part["loss"] for _, part in parts]
        c = SimpleNamespace(**DEFAULTS | settings)
        losses = [sum(x) / (len(x) if c.micro_batches == "mean" else 1) for x in losses]
        numbers["loss"] = sum(losses) / (len(losses) if c.ranks == "mean" else 1)
    Path(directory).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(directory, "step.safetensors"))
    text = json.dumps(numbers | dict(settings=settings, optimizer=optimizer), indent=1)
    Path(directory, "step.json").write_text(text + "\n", encoding="utf-8")


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


def score(model, s, temperature):
    """Return the log-prob and the entropy at each token of a sequence, (T,), with a graph."""
    # One forward of one sequence. The logits at token t - 1 predict token t; the first token has
    # no log-prob. Padding follows all tokens, so that no token sees it.
    logits = model(torch.tensor(s.tokens)[None])
    logits = (logits if torch.is_tensor(logits) else logits.logits)[0].double()
    lp, H, _ = D.scores(logits[:-1], s.tokens[1:], temperature)
    zero = lp.new_zeros(1)
    return torch.cat([zero, lp]), torch.cat([zero, H])


def trained(s):
    """Return the definition's Sequence: the tokens that are trained on."""
    old = s.lp if s.old_logprobs is None else s.old_logprobs
    lists = dict(lp=s.lp, old=old, A=s.advantages, ref=s.ref_logprobs, H=s.H)
    return D.Sequence(**{name: row and [row[t] for t in at(s)] for name, row in lists.items()})


def at(s):
    return [t for t, on in enumerate(s.mask) if on]


def denominator(c, sequences):
    """Return Z: what the sum over these sequences is divided by."""
    return max(D.denominator(c, [sum(s.mask) for s in sequences]), 1)


def definition(c, sequences):
    """Return the loss, and its derivative in log-prob and entropy: {(place, t): (dlp, dH)}.

    c.mistake(c, s, terms): changes the terms of a sequence, if a mistake is planted.
    """
    rows, total, slopes = [trained(s) for s in sequences], 0.0, {}
    _, found = D.definition(c, rows, denominator(c, sequences))
    for s, row, terms in zip(sequences, rows, found):
        getattr(c, "mistake", lambda *_: None)(c, row, terms)
        for t, term in zip(at(s), terms):
            total += term.share * term.loss
            slopes[s.place, t] = term.share * term.dlp, term.share * term.dH
    return total, slopes


def advantages(c, sequences):
    """Return the advantage of each sequence from the rewards of its group."""
    groups = parts_by(sequences, "groups").values()
    found = D.advantages(c, [[s.rewards for s in group] for group in groups])
    by_place = {s.place: A for group, row in zip(groups, found) for s, A in zip(group, row)}
    return [by_place[s.place] for s in sequences]


def clip(c, g, norm):
    """Return the gradient, clipped as if its norm was `norm`."""
    return g * D.shrink(c, norm)


def lists_of(tensors):
    """Return the Sequences of a dump."""
    for name in ("tokens", "mask", "logprobs"):
        if name not in tensors:
            raise ValueError(f"expected {name} in step.safetensors, got {', '.join(tensors)}")
    B, T = tensors["tokens"].shape
    for name in PER_TOKEN[1:]:
        if name in tensors and tensors[name].shape not in ((B, T), (B,)):
            raise ValueError(f"{name}: expected {(B, T)}, got {tuple(tensors[name].shape)}")
    if tensors["mask"][:, 0].any():
        raise ValueError("mask: expected False for a row's first token, which has no log-prob")
    numbers = {"rank": torch.zeros(B).int(), "micro_batch": torch.zeros(B).int(),
               "width": torch.full((B,), T), "length": torch.full((B,), T)} | tensors  # fmt: skip
    sequences = []
    for b in range(B):
        s = {name: numbers[name][b].tolist() if name in numbers else None
             for name in Sequence.__dataclass_fields__
             if name not in ("place", "lp", "H")}  # fmt: skip
        s["mask"] = [bool(x) for x in s["mask"]]
        if isinstance(s["advantages"], float):
            s["advantages"] = [s["advantages"]] * T
        sequences.append(Sequence(place=b, **s))
    return sequences


class Step:
    """What a trainer recorded of a step, and the same by the definition."""

    def __init__(self, directory, model, given):
        self.numbers = json.loads(Path(directory, "step.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(directory, "step.safetensors"))
        self.c = settings_of(self.numbers.get("settings", {}) | given)
        self.sequences = lists_of(tensors)
        self.model = model.double().eval()

        # The dump's names may have a wrapper's prefix. Flat vectors hold all parameters in order.
        kinds = {}
        for name, x in tensors.items():
            kind, _, name = name.partition(".")
            if name:
                name = name.removeprefix("module.").removeprefix("_orig_mod.")
                kinds.setdefault(kind, {})[name] = x
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
        self.flat = {kind: torch.cat([by[n].double().flatten() for n in self.named])
                     for kind, by in kinds.items() if not set(self.named) - set(by)}  # fmt: skip
        self.flat["before"] = torch.cat([p.detach().flatten() for p in self.named.values()])
        self.ranks = max(s.rank for s in self.sequences) + 1
        self.micro_batches = max(s.micro_batch for s in self.sequences) + 1
        self.graph = None

    def run_model(self, temperature, model=None):
        """Compute log-probs and entropies with a graph. Return the former, a list of lists."""
        model = model or self.model
        self.graph = [score(model, s, temperature) for s in self.sequences]
        for s, (lp, H) in zip(self.sequences, self.graph):
            s.lp, s.H = lp.tolist(), H.tolist()
        return [s.lp for s in self.sequences]

    def gradient(self, plan):
        """Return the loss and the gradient of a plan: (factor, settings, sequences) to add up."""
        total, lp, H = 0.0, *([torch.zeros_like(x[i]) for x in self.graph] for i in (0, 1))
        for factor, c, sequences in plan:
            loss, slopes = definition(c, sequences)
            total += factor * loss
            for (place, t), (slope, slope_H) in slopes.items():
                lp[place][t] += factor * slope
                H[place][t] += factor * slope_H
        outputs = [*(x[0] for x in self.graph), *(x[1] for x in self.graph)]
        found = torch.autograd.grad(outputs, list(self.named.values()), lp + H, retain_graph=True,
                                    allow_unused=True)  # fmt: skip
        found = [torch.zeros_like(p) if g is None else g
                 for g, p in zip(found, self.named.values())]  # fmt: skip
        return total, torch.cat([g.flatten() for g in found])

    def split(self, flat):
        """Return {name: tensor} of a flat vector."""
        parts = flat.split([p.numel() for p in self.named.values()])
        return {n: x.view_as(p) for (n, p), x in zip(self.named.items(), parts)}

    def update(self, g, change=lambda a: a):
        """Return the weights after AdamW's step with a clipped gradient, flat.

        change: gets and returns the arguments of `adamw` for one parameter: a mistake.
        """
        c, optimizer, result = self.c, self.numbers["optimizer"], []
        groups = {n.removeprefix("module.").removeprefix("_orig_mod."): group
                  for group in optimizer["groups"] for n in group["names"]}  # fmt: skip
        zeros = torch.zeros_like(self.flat["before"])
        m, v = (self.split(self.flat.get(kind, zeros)) for kind in ("exp_avg", "exp_avg_sq"))
        g = self.split(g)
        for name, p in self.split(self.flat["before"]).items():
            a = dict(h=dict(groups[name]), count=optimizer["step"], weight=p, m=m[name], v=v[name],
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

    def can_update(self):
        optimizer = self.numbers.get("optimizer")
        return "after" in self.flat and optimizer and (
            "exp_avg" in self.flat or optimizer["step"] == 1)  # fmt: skip

    def fits(self, *given, **options):
        return all(error <= self.tolerance for error in self.errors(*given, **options).values())


# Mistakes -------------------------------------------------------------------------------------
# Each is the definition with one change. To add one, add a line.


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
        (1 / R**2, f"divided by the number of ranks ({R}) three times"),
        (-1, "the sign is wrong"),
    ):
        if k != 1:
            found[k] = f"{found[k]}, or {text}" if k in found else text
    return found


def parts_by(sequences, *keys):
    """Return the sequences in lists: those of one rank, or of one micro-batch of one rank."""
    parts = {}
    for s in sequences:
        parts.setdefault(tuple(getattr(s, key) for key in keys), []).append(s)
    return parts


def gradient_mistakes(step):
    """Yield (text, plan): what a trainer may add up instead of the definition's loss."""
    c, S, Z = step.c, step.sequences, denominator(step.c, step.sequences)
    ranks, micros = parts_by(S, "rank"), parts_by(S, "rank", "micro_batch")

    def settings(**changes):
        return [(1.0, SimpleNamespace(**vars(c) | changes), S)]

    def reversed_k3(c, s, terms):
        for term, lp, ref in zip(terms, s.lp, s.ref):
            k, slope = D.KLS["k3"](ref - lp, 1.0)
            term.loss += c.kl_coef * (k - term.k)
            term.dlp += c.kl_coef * (-slope - term.dk)

    def k3_times_sequence_ratio(c, s, terms):
        # The ratio of the sequence has a gradient in each of its tokens.
        N = max(len(terms), 1)
        ratio = math.exp(sum(lp - old for lp, old in zip(s.lp, s.old)) / N)
        mean = sum(term.k for term in terms) / N
        for term in terms:
            term.loss += c.kl_coef * (ratio - 1) * term.k
            term.dlp += c.kl_coef * (ratio * (term.dk + mean) - term.dk)

    def masks(mask_of):
        return [(1.0, c, [replace(s, mask=mask_of(s)) for s in S])]

    def span(s, first, last):
        return [first <= t < last for t in range(len(s.mask))]

    def start(s):
        return s.mask.index(True) if any(s.mask) else len(s.mask)

    def end(s):
        return len(s.mask) - s.mask[::-1].index(True) if any(s.mask) else 0

    def only(parts):
        return [(denominator(c, part) / Z, c, part) for part in parts]

    # Sums and means of the wrong things.
    for text, parts in (("micro-batches'", micros), ("ranks'", ranks),
                        ("groups'", parts_by(S, "groups"))):  # fmt: skip
        plan = [(1 / len(parts), c, part) for part in parts.values()]
        yield f"the mean of the {text} means, not the mean over the step", plan
    plan = [(1 / len(ranks) / len(parts_by(rank, "micro_batch")), c, part) for rank in
            ranks.values() for part in parts_by(rank, "micro_batch").values()]  # fmt: skip
    yield "the mean of the ranks' means of their micro-batches' means", plan
    plan = [(denominator(c, rank) / Z / len(parts_by(rank, "micro_batch")), c, part) for rank in
            ranks.values() for part in parts_by(rank, "micro_batch").values()]  # fmt: skip
    yield "a rank's mean of its micro-batches' means", plan
    yield "the gradients of the ranks are not added up: rank 0's alone", only([ranks[0,]])
    last = [parts_by(rank, "micro_batch") for rank in ranks.values()]
    yield "the last micro-batch alone", only([part[max(part)] for part in last])
    yield "the first micro-batch alone", only([part[min(part)] for part in last])
    yield "the sum, divided by nothing", [(Z, c, S)]
    for name in CHOICES["aggregation"]:
        if name != c.aggregation:
            yield f"the aggregation is {name}", settings(aggregation=name)
    yield "sequences without a token count in the mean", settings(count_empty=True)
    yield "sequences without a token do not count", settings(count_empty=False)
    for text, count in (("padding", "width"), ("prompt", "length")):
        if c.aggregation == "token_mean":
            factor = Z / max(sum(getattr(s, count) for s in S), 1)
            yield f"the denominator counts the {text} too", [(factor, c, S)]
        if c.aggregation == "sequence_mean":
            plan = [(denominator(c, [s]) / Z * sum(s.mask) / getattr(s, count), c, [s]) for s in S]
            yield f"the denominator of a sequence counts the {text} too", plan

    if c.aggregation == "token_mean":
        spans = sum(max(end(s) - start(s), 0) for s in S)
        yield "the denominator counts masked tokens between trained ones", [(Z / spans, c, S)]

    # Masks.
    yield "the prompt is trained on", masks(lambda s: span(s, 1, end(s)))
    yield "the padding is trained on", masks(
        lambda s: [on or s.length <= t < s.width for t, on in enumerate(s.mask)])  # fmt: skip
    yield "prompt and padding are trained on", masks(lambda s: span(s, 1, s.width))
    yield "masked tokens between trained ones are trained on", masks(
        lambda s: span(s, start(s), end(s)))  # fmt: skip
    yield "the last token of each sequence is not trained on", masks(
        lambda s: [on and t != end(s) - 1 for t, on in enumerate(s.mask)])  # fmt: skip
    yield "the first token of each sequence is not trained on", masks(
        lambda s: [on and t != start(s) for t, on in enumerate(s.mask)])  # fmt: skip
    yield "the mask is one token late", masks(lambda s: [False, *s.mask[:-1]])
    yield "the mask is one token early", masks(lambda s: [False, *s.mask[2:], False])

    # The objective.
    for name in CHOICES["objective"]:
        if name != c.objective:
            yield f"the objective is {name}", settings(objective=name)
    yield "the clip is missing", settings(clip_low=math.inf, clip_high=math.inf, dual_clip=0.0)
    yield "the clip's bounds are swapped", settings(clip_low=c.clip_high, clip_high=c.clip_low)
    yield "dual_clip is missing", settings(dual_clip=0.0)
    now = [replace(s, old_logprobs=None) for s in S]
    yield "the ratio is 1: old_logprobs are the policy's own", [(1.0, c, now)]
    if S[0].ref_logprobs is not None:
        old = [replace(s, old_logprobs=s.ref_logprobs) for s in S]
        yield "the ratio is to the reference, not to old_logprobs", [(1.0, c, old)]
    if S[0].old_logprobs is not None:
        means = []
        for s in S:
            on = [s.lp[t] - s.old_logprobs[t] for t in range(len(s.mask)) if s.mask[t]]
            mean = sum(on) / max(len(on), 1)
            means.append(replace(s, old_logprobs=[x - mean for x in s.lp]))
        yield "the ratio is the sequence's, with the token's gradient", [(1.0, c, means)]

    # The KL and the entropy.
    if c.kl_coef and S[0].ref_logprobs is not None:
        for kl in CHOICES["kl"]:
            if kl != c.kl:
                yield f"the KL is {kl}, not {c.kl}", settings(kl=kl)
        for text, mistake in (("k3 with its arguments swapped", reversed_k3),
                              ("k3 times the sequence's ratio", k3_times_sequence_ratio)):
            yield f"the KL is {text}, not {c.kl}", settings(kl="k3", mistake=mistake)
        yield "the KL is missing", settings(kl_coef=0.0)
        yield "the KL is to old_logprobs, not to the reference", [
            (1.0, c, [replace(s, ref_logprobs=s.old_logprobs or s.lp) for s in S])]  # fmt: skip
        none = SimpleNamespace(**vars(c) | dict(kl_coef=0.0))
        for k, text in factors_of(step).items():
            plan = settings(kl_coef=k * c.kl_coef)
            yield f"the KL's coefficient is {k:.4g} times kl_coef: {text}", plan
        plan = [(1 / len(micros), c, part) for part in micros.values()]
        share = [(-1 / len(micros), none, part) for part in micros.values()]
        yield "the KL is the mean of micro-batches' means", [*plan, *share, (1.0, none, S)]
    if c.entropy_coef:
        yield "the entropy is missing", settings(entropy_coef=0.0)
        yield "the entropy has the wrong sign", settings(entropy_coef=-c.entropy_coef)


def clip_mistakes(step):
    """Yield (text, norm or None for any, gradient that the optimizer gets)."""
    c, R, (_, g) = step.c, step.ranks, step.gradient([(1.0, step.c, step.sequences)])
    limit, norm, Z = c.max_grad_norm, g.norm().item(), denominator(step.c, step.sequences)
    if not limit:
        return
    recorded = step.numbers.get("grad_norm")
    yield "the gradient is not clipped", norm, g
    yield "the gradient is scaled to max_grad_norm, even if it is smaller", norm, g * limit / norm
    own = torch.cat([clip(c, x, x.norm().item()).flatten() for x in step.split(g).values()])
    yield "each parameter is clipped by its own norm", norm, own
    yield "each entry is clipped, not the norm", norm, g.clamp(-limit, limit)
    for r in range(R if R > 1 else 0):
        shards = [x.flatten() if not x.dim() else torch.tensor_split(x, R)[r].flatten()
                  for x in step.split(g).values()]  # fmt: skip
        local = torch.cat(shards).norm().item()
        yield f"the norm is of rank {r}'s shard, not of the whole gradient", local, clip(
            c, g, local)  # fmt: skip

    # The clip before the sum: of each rank's gradient, or of each micro-batch's.
    for text, keys in (("rank's", ("rank",)), ("micro-batch's", ("rank", "micro_batch"))):
        parts = [step.gradient([(denominator(c, part) / Z, c, part)])[1]
                 for part in parts_by(step.sequences, *keys).values()]  # fmt: skip
        for scale in {1, R if keys == ("rank",) else 1}:
            clipped = sum(clip(c, x, x.norm().item() * scale) for x in parts)
            yield f"each {text} gradient is clipped, before they are added", recorded, clipped


def update_mistakes(step):
    """Yield (text, change of AdamW's arguments): what AdamW may do otherwise."""

    def settings(**changes):
        return lambda a: a | dict(h=a["h"] | changes)

    def eps_in_root(a):  # sqrt(v + eps) is the root of another v
        beta2, eps = a["h"]["betas"][1], a["h"]["eps"]
        v = a["v"] + eps * (1 - beta2 ** a["count"]) / beta2
        return a | dict(h=a["h"] | dict(eps=0.0), v=v)

    def coupled(a):
        g = a["g"] + a["h"]["weight_decay"] * a["weight"]
        return a | dict(h=a["h"] | dict(weight_decay=0.0), g=g)

    yield "AdamW's bias correction is missing", lambda a: a | dict(count=math.inf)
    yield "eps is inside the square root", eps_in_root
    yield "the decay is coupled: it is part of the gradient", coupled
    yield "norms and biases decay too", step.decaying("all")
    yield "norms and biases do not decay", step.decaying("matrices")
    yield "no weight decays", settings(weight_decay=0.0)
    yield "AdamW's step count is one too small", lambda a: a | dict(count=a["count"] - 1)
    yield "AdamW's step count is one too large", lambda a: a | dict(count=a["count"] + 1)
    h = step.numbers["optimizer"]["groups"][0]
    yield "the betas are swapped", settings(betas=h["betas"][::-1])
    for k, text in factors_of(step).items():
        yield f"the learning rate is {k:.4g} times the recorded one: {text}", settings(
            lr=h["lr"] * k)  # fmt: skip


# The checks -----------------------------------------------------------------------------------


def join(found):
    """Say which mistakes explain what was found."""
    return " | or: ".join(list(dict.fromkeys(found))[:3])


def check_logprobs(step):
    """Compare log-probs, and leave the graph of the ones that the trainer has."""
    c, S = step.c, step.sequences

    def error(lps):
        return max((abs(s.logprobs[t] - lp[t]) / (1 + abs(lp[t])) for s, lp in zip(S, lps)
                    for t in at(s)), default=0.0)  # fmt: skip

    def shifted(by):
        def model(tokens):
            logits = step.model(tokens)
            logits = logits if torch.is_tensor(logits) else logits.logits
            places = torch.arange(tokens.shape[1]) + by
            return logits[:, places.clamp(0, tokens.shape[1] - 1)]

        return model

    first = error(step.run_model(c.temperature))
    if first <= step.tolerance:
        return "", f"largest error {first:.1e}"
    found = [s for s in S if error([s.lp if x is s else x.logprobs for x in S]) > step.tolerance]
    T = c.temperature
    for text, changes in (
        ("log-probs are at temperature 1", dict(temperature=1.0)),
        ("log-probs are divided by the temperature twice", dict(temperature=T * T)),
        ("logits are multiplied by the temperature", dict(temperature=1 / T)),
        ("log-probs are shifted: of the logits at the token itself", dict(model=shifted(1))),
        ("log-probs are shifted: of the logits two tokens before", dict(model=shifted(-1))),
    ):
        if error(step.run_model(**dict(temperature=T) | changes)) <= step.tolerance:
            return text, f"largest error {first:.2g}"
    late = [[0.0, *s.logprobs[:-1]] for s in S]
    step.run_model(T)
    moved = [abs(lp[t + 1] - s.lp[t]) for s, lp in zip(S, late) for t in range(len(s.mask) - 1)
             if s.mask[t] and lp[t + 1]]  # fmt: skip
    if moved and max(moved) <= step.tolerance:
        return "log-probs are recorded in the wrong column", f"largest error {first:.2g}"
    s = found[0] if found else S[0]
    t = max(at(s), key=lambda t: abs(s.logprobs[t] - s.lp[t]))
    return "unexplained", (f"{len(found)} of {len(S)} sequences; sequence {s.place}, token {t} "
                           f"has {s.logprobs[t]:.6g}, expected {s.lp[t]:.6g}")  # fmt: skip


def check_advantages(step):
    """Compare advantages with the rewards', and fill them in where none were recorded."""
    c, S, recorded = step.c, step.sequences, step.sequences[0].advantages
    if S[0].rewards is None or S[0].groups is None:
        return None, "rewards, groups"
    want = advantages(c, S)
    if recorded is None:
        for s, A in zip(S, want):
            s.advantages = [A] * len(s.mask)
        return None, "advantages"

    def error(other):
        size = max(max(map(abs, other)), 1e-300)
        return max((abs(s.advantages[t] - A) / size for s, A in zip(S, other)
                    for t in at(s)), default=0.0)  # fmt: skip

    if error(want) <= step.tolerance:
        return "", f"largest error {error(want):.1e}"

    def other(sequences=S, **changes):
        return advantages(SimpleNamespace(**vars(c) | changes), sequences)

    def biased(s, A):
        compared = S if c.advantage == "batch_std" else parts_by(S, "groups")[s.groups,]
        R = [x.rewards for x in compared]
        return A * (D.spread(R, free=1) + c.std_eps) / (D.spread(R) + c.std_eps)

    size = len(parts_by(S, "groups")[S[0].groups,])
    by_rank = [x for part in parts_by(S, "rank").values() for x in zip(part, other(part))]
    by_micro = [x for p in parts_by(S, "rank", "micro_batch").values() for x in zip(p, other(p))]
    one = [replace(s, groups=0) for s in S]
    rank_one = [x for p in parts_by(S, "rank").values()
                for x in zip(p, other([replace(s, groups=0) for s in p]))]  # fmt: skip
    mean = sum(want) / len(want)
    token = [(sum(s.mask), A) for s, A in zip(S, want)]
    mean_of_tokens = sum(n * A for n, A in token) / max(sum(n for n, _ in token), 1)
    in_order = [A for _, A in sorted(by_rank, key=lambda x: x[0].place)]
    kinds = [(f"advantages are {x}, not {c.advantage}", other(advantage=x))
             for x in CHOICES["advantage"] if x != c.advantage]  # fmt: skip
    found = [text for text, values in (
        ("advantages use a biased standard deviation", [biased(s, A) for s, A in zip(S, want)]),
        ("advantages are not divided by a standard deviation: group_mean, not group_std",
         other(advantage="group_mean") if c.advantage == "group_std" else want),
        ("advantages are divided by the batch's std, not the group's: batch_std, not group_std",
         other(advantage="batch_std") if c.advantage == "group_std" else want), *kinds,
        ("advantages are normalized among the rank's own sequences", in_order),
        ("advantages are normalized among the micro-batch's own sequences",
         [A for _, A in sorted(by_micro, key=lambda x: x[0].place)]),
        ("advantages are normalized over the step, not over groups", other(one)),
        ("advantages are normalized over the rank, not over groups",
         [A for _, A in sorted(rank_one, key=lambda x: x[0].place)]),
        ("groups are taken as consecutive sequences", other([replace(s, groups=i // size)
                                                             for i, s in enumerate(S)])),
        ("groups are taken as every n-th sequence",
         other([replace(s, groups=i % max(len(S) // size, 1)) for i, s in enumerate(S)])),
        ("advantages are whitened once more over the step",
         [(A - mean) / (D.spread(want, free=1) + 1e-8) for A in want]),
        ("advantages are centred once more over the step's tokens",
         [A - mean_of_tokens for A in want]),
        ("advantages have the wrong sign", [-A for A in want]),
    ) if error(values) <= step.tolerance]  # fmt: skip
    pairs = [(s.advantages[t], A) for s, A in zip(S, want) for t in at(s)]
    size = sum(b * b for _, b in pairs)
    k = sum(a * b for a, b in pairs) / max(size, 1e-300)
    if not found and error([k * A for A in want]) <= step.tolerance:
        found = [f"advantages are {k:.6g} times the definition's"]
    got, due = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return join(found) or "unexplained", f"{got:.6g}, expected {due:.6g}"


def explain_gradient(step, g):
    """Return which mistakes give the recorded gradient."""
    found = []
    right = clip(step.c, g, g.norm().item())
    for text, norm, clipped in clip_mistakes(step):
        # A rule that changes nothing in this step explains nothing.
        if (clipped - right).norm() <= step.tolerance * right.norm():
            continue
        if step.fits(g, norm=norm, clipped=clipped):
            found.append(text)
    factors = factors_of(step)
    found += [f"the gradient is {k:.4g} times the definition's: {text}"
              for k, text in factors.items() if step.fits(k * g)]  # fmt: skip
    both = []
    for text, plan in gradient_mistakes(step):
        _, other = step.gradient(plan)
        if not other.isfinite().all():
            continue
        if step.fits(other):
            found.append(text)
        # Two counts that are wrong at once explain any number, so this one changes a direction.
        if abs(other @ g) > (1 - 1e-9) * other.norm() * g.norm():
            continue
        both += [f"{text}; and {k:.4g} times that: {why}" for k, why in factors.items()
                 if not found and step.fits(k * other)]  # fmt: skip
    return join(found or both)


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


def check(directory, model, given=None):
    """Return the rows of the report: dicts with quantity, verdict, why, and the settings."""
    step, rows = Step(directory, model, given or {}), []
    c, S = step.c, step.sequences

    def row(quantity, verdict, why):
        rows.append(dict(quantity=quantity, verdict=verdict, why=why))

    def outcome(quantity, term, why):
        if term is None:
            return row(quantity, "not checked", f"the dump has no {why}")
        row(quantity, "departs" if term else "holds", f"{term} ({why})" if term else why)

    outcome("log-probs", *check_logprobs(step))
    outcome("advantages", *check_advantages(step))
    lacking = [] if S[0].advantages is not None else ["advantages, and no rewards"]
    lacking += ["ref_logprobs"] if c.kl_coef and S[0].ref_logprobs is None else []
    if lacking:
        for quantity in ("loss", "gradient norm", "gradient", "weights"):
            row(quantity, "not checked", f"the dump has no {lacking[0]}")
        return rows, step

    # The gradient. Its norm before the clip is one number, so it is compared first.
    # The definition has no choice here: one plan, of all sequences, once.
    loss, g = step.gradient([(1.0, c, S)])
    errors = step.errors(g)
    gradient_holds = all(error <= step.tolerance for error in errors.values())
    update_alone = set(errors) - {"gradient norm"} == {"weights"} and (
        errors.get("gradient norm", 1.0) <= step.tolerance)  # fmt: skip
    term = ""
    if not gradient_holds and not update_alone:
        term = explain_gradient(step, g)
    if "loss" not in step.numbers:
        row("loss", "not checked", "the dump has no loss")
    else:
        check_loss(step, loss, row)
    for quantity in ("gradient norm", "gradient"):
        if quantity not in errors:
            row(quantity, "not checked", f"the dump has no {quantity.replace('ient n', '_n')}")
        elif errors[quantity] <= step.tolerance:
            row(quantity, "holds", f"error {errors[quantity]:.1e}")
        else:
            row(quantity, "departs", f"{term or 'unexplained'} ({describe_gradient(step, g)})")

    # The weights: AdamW, on the gradient that it got if that was recorded.
    if not step.can_update():
        row("weights", "not checked", "the dump has no after, no moments or no optimizer")
        return rows, step
    used = step.flat.get("grad", clip(c, g, g.norm().item()))
    noise = None if "grad" in step.flat else used
    error = step.update_error(step.update(used), noise)
    if error <= step.tolerance:
        row("weights", "holds", f"error {error:.1e} of the update")
    elif term and "grad" not in step.flat:
        row("weights", "departs", f"{term} (by {error:.3g} of the update)")
    else:
        found = [text for text, change in update_mistakes(step)
                 if step.update_error(step.update(used, change), noise) <= step.tolerance]
        if not found and update_alone:
            found = [explain_gradient(step, g)]
        got, want = (x - step.flat["before"] for x in (step.flat["after"], step.update(used)))
        k = (got @ want / (want @ want).clamp(min=1e-300)).item()
        row("weights", "departs", f"{join(x for x in found if x) or 'unexplained'} (the update is "
            f"{k:.4g} times the definition's, and off by {error:.3g} of it)")  # fmt: skip
    return rows, step


def check_loss(step, loss, row):
    """Compare the loss that the trainer reports."""
    got, plan = step.numbers["loss"], [(1.0, step.c, step.sequences)]
    Z = denominator(step.c, step.sequences)
    size = sum(abs(term.loss) for s in step.sequences
               for term in D.terms_of(step.c, trained(s))) / Z  # fmt: skip
    size = max(size / 10, abs(loss), 1e-300)

    def loss_of(plan):
        return sum(factor * definition(c, sequences)[0] for factor, c, sequences in plan)

    if abs(got - loss) <= step.tolerance * size:
        return row("loss", "holds", f"error {abs(got - loss) / size:.1e}")
    found = [f"the loss is {k:.4g} times the definition's: {text}" for k, text in
             factors_of(step).items() if abs(got - k * loss) <= step.tolerance * abs(k) * size]
    found += [text for text, plan in gradient_mistakes(step)
              if abs(got - loss_of(plan)) <= step.tolerance * size]  # fmt: skip
    row("loss", "departs", f"{join(found) or 'unexplained'} ({got:.6g}, expected {loss:.6g})")


# The command ----------------------------------------------------------------------------------


def settings_of(given):
    """Return the settings with all defaults filled in."""
    return kit.checked(DEFAULTS, CHOICES, given)


def main(argv):
    """Print the report of one dump. Return 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dump", help="the directory that `record` wrote")
    parser.add_argument("--model", required=True, metavar="FILE.py:build", help="or MODULE:build")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="replaces a setting")
    # Settings may stand after --model.
    options = parser.parse_intermixed_args(argv)
    try:
        pairs = [text.partition("=") for text in options.settings]
        given = {name: kit.value_of(value) for name, _, value in pairs}
        rows, step = check(options.dump, kit.load(options.model)(), given)
    except Exception as error:
        said = str(error).split("\n")[0]
        print(f"step.py: error: {type(error).__name__}: {said}", file=sys.stderr)
        return 2
    changed = [f"{k}={getattr(step.c, k)}" for k, v in DEFAULTS.items() if v != getattr(step.c, k)]
    count = f"{len(step.sequences)} sequences, {step.ranks} ranks"
    count += f", {step.micro_batches} micro-batches"
    print(" ".join([options.dump, *changed]), f"   {count}, {step.dtype}", sep="\n")
    for row in rows:
        print(f"   {row['quantity']:14}  {row['verdict']:12} {row['why']}".rstrip())
    departs = any(row["verdict"] == "departs" for row in rows)
    print("the step departs from its definition" if departs else "the step holds, where checked")
    return 1 if departs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

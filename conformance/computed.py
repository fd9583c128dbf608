"""Compute an optimizer step by the definition, from what a trainer recorded of it.

`Step` holds both: the recorded numbers, and the definition's. Weights, moments and gradients are
read one parameter at a time, so a large model never stands in memory a second time.

The twin is the same step once more, in the trainer's precision. twin.py measures by it how far
rounding goes. With the definition's loss 0.1000000, the twin's 0.1000003 and FACTOR 8, a recorded
loss may be off by 2.4e-6 and a floor. Nothing is derived about kernels, models or sums.
"""

import functools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from conformance import command
from conformance import definition as D
from conformance.sequences import (
    Gradient, definition, denominator, furthest, lists_of, nudge, own_name, score, terms_of,
    together, trim_memory,
)  # fmt: skip

DEFAULTS = D.DEFAULTS | dict(
    micro_batches="sum", ranks="sum", decay="groups", tolerance=0.0, compute_dtype="")  # fmt: skip
CHOICES = D.CHOICES | dict(
    micro_batches=("sum", "mean"), ranks=("sum", "mean"), decay=("groups", "matrices", "all"),
    advantage=(*D.CHOICES["advantage"], "none_batch", "gae", "teacher"),
)  # fmt: skip
TOLERANCE = {torch.float64: 2e-5, torch.float32: 5e-4}  # relative, without a twin. Others: 3e-2
FACTOR = 8  # how many times as far as the twin a recorded number may be
EXACT = 1e-12  # relative: rewards, counts and rates, which every trainer computes in float64
LEAST = 1e-10  # of a floor: what sums of thousands of numbers in another order do in float64
TINY = 1e-300  # in place of a size of 0, which numbers are relative to
MOMENTS = ("before", "exp_avg", "exp_avg_sq")  # weight, m, v
PIECE = 2**20  # entries of a tensor in one piece
SMALL = 1e10  # tokens x weights up to which graphs are kept, and mistakes in gradients are tried


class Row(NamedTuple):
    """A number that was recorded, and the definition's. Of many numbers, the worst.

    It may be off by FACTOR times the twin's distance, and by `floor`.
    """

    key: str
    recorded: float
    by_hand: float
    difference: float
    distance: float = 0.0  # of the twin's number from the definition's
    floor: float = 0.0
    size: float | None = None  # what `allowed` is large or small next to. Default: the number
    where: str = ""  # the parameter or the token that is furthest off
    because: str = ""  # how `floor` was found, if it is not rounding
    why: str = ""  # if the row says nothing: the cause

    @property
    def allowed(self):
        return FACTOR * self.distance + self.floor

    @property
    def ok(self):
        return self.difference == 0 or self.difference <= self.allowed and (
            math.isfinite(self.difference))  # fmt: skip

    @property
    def is_informative(self):
        size = abs(self.by_hand) if self.size is None else self.size
        return self.allowed <= max(size / 10, EXACT)

    @property
    def how(self):
        """How `allowed` was found, in words."""
        if self.distance:
            return f"{FACTOR} x {self.distance:.1e} + {self.floor:.0e}"
        return self.because or ("exact" if self.floor <= EXACT * abs(self.by_hand) else "rounding")

    @property
    def figures(self):
        """The distance and what is allowed, in words."""
        where = f", furthest in {self.where}" if self.where else ""
        return f"largest error {self.difference:.1e}, allowed {self.allowed:.1e}{where}"


# The step -------------------------------------------------------------------------------------


class Step:
    """A recorded step, and the same by the definition.

    sequences: list of Sequence.
    kinds: {"before": {name: tensor}, "grad": {..}, ..}. The model gets the weights before.
    numbers: dict. What step.json holds.
    model: module. It is changed to `precision`, and gets the weights before.
    dtype: of the trainer's numbers, if it is coarser than the weights before.
    twin: a Step of the same sequences in the trainer's precision, which measures what is allowed.

    `make` makes a mapping for a tensor of each parameter. A client may replace it by one on a disk.
    `most_tokens` are in one forward. By default it is of one sequence.
    """

    make = dict
    most_tokens = 0
    updates = 1  # since weights were recorded: each rounds the weights once more
    is_nudged = False  # the twin of a float64 trainer
    noise = 0.0  # of a gradient that AdamW's moment shows, relative

    def __init__(self, sequences, kinds, numbers, model, *, dtype=torch.float64,
                 precision=torch.float64, twin=None):  # fmt: skip
        self.sequences, self.kinds, self.numbers, self.twin = sequences, dict(kinds), numbers, twin
        self.c = SimpleNamespace(**command.checked(DEFAULTS, CHOICES, numbers.get("settings", {})))
        if self.c.sample_weights:
            raise ValueError("expected sample_weights=0, got 1: a dump has no such weights")
        self.model, self.graph = model.to(precision).eval(), {}

        # The model's weights may be rounded. The optimizer's are the recorded ones.
        own = {own_name(name): p for name, p in self.model.named_parameters()}
        weights = self.kinds.get("before", {})
        if unknown := [name for name in weights if name not in own]:
            raise ValueError(f"expected weights named {', '.join(own)}, got {', '.join(unknown)}")
        coarse = getattr(torch, self.c.compute_dtype) if self.c.compute_dtype else None
        self.named = {n: own[n].requires_grad_()
                      for n in weights or [n for n in own if own[n].requires_grad]}  # fmt: skip
        dtypes = [dtype, *filter(None, [coarse])]
        self.stored = {n: p.dtype for n, p in self.named.items()}
        for name in weights:
            self.stored[name] = weights[name].dtype
            dtypes.append(self.stored[name])
        for p in self.named.values():
            p.grad = None
            p.grad_dtype = torch.promote_types(p.dtype, torch.float32)  # sequences add up in it
        self.is_lent = bool(weights)  # the weights are also elsewhere
        self.kinds.setdefault("before", {n: p.detach() for n, p in self.named.items()})

        self.dtype = max(dtypes, key=lambda x: torch.finfo(x).eps)
        self.shapes = {n: self.kinds["before"][n].shape for n in self.named}
        self.sizes = {n: shape.numel() for n, shape in self.shapes.items()}
        self.is_small = precision == torch.float64 and SMALL >= sum(self.sizes.values()) * sum(
            len(s.tokens) for s in sequences)  # fmt: skip
        self.ranks = max((s.rank for s in sequences), default=0) + 1
        self.micro_batches = max((s.micro_batch for s in sequences), default=0) + 1

        # What a recorded number may be off: the twin's distance times FACTOR, and a floor.
        self.floor = max(8 * torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps, LEAST)
        if twin is None:
            self.floor = self.c.tolerance or TOLERANCE.get(self.dtype, 3e-2)
        self.distances = {}  # quantity: the twin's relative distance
        self.floors = {}  # quantity: its floor, relative, if it is not `floor`
        self.measured = {}  # quantity: a Row
        self.token_distances = {}  # how far the twin's tokens are off, set by twin.py
        self.gradient = self.recorded_gradient()
        self.empty()

    def fill(self):
        """Put the weights before the step into the model."""
        if not self.is_lent:
            return
        coarse = getattr(torch, self.c.compute_dtype) if self.c.compute_dtype else None
        for name, p in self.named.items():
            x = self.kinds["before"][name]
            p.data = x.to(coarse or x.dtype).to(p.dtype, copy=True)
        if self.is_nudged:
            nudge(self.named.values())

    def empty(self):
        """Take the weights of a large model out of memory, until they are needed again."""
        for p in self.named.values() if self.is_lent and not self.is_small else ():
            p.data = p.data.new_empty(0)
        trim_memory()

    @classmethod
    def read(cls, directory, model, given=None):
        """Return the Step of a dump. given: settings that replace the recorded ones."""
        numbers = json.loads(Path(directory, "step.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(directory, "step.safetensors"))
        kinds = {}
        for name, x in tensors.items():
            kind, dot, name = name.partition(".")
            if dot:
                kinds.setdefault(kind, {})[own_name(name)] = x
        numbers["settings"] = numbers.get("settings", {}) | (given or {})
        sequences = lists_of(tensors)
        return cls(sequences, kinds, numbers, model, dtype=tensors["logprobs"].dtype)

    # Tensors, by name

    def has(self, kind):
        return kind in self.kinds and not self.named.keys() - self.kinds[kind].keys()

    def state(self, kind, name):
        """Return a recorded tensor in float64. Moments that were not recorded are zeros."""
        if kind in self.kinds:
            return self.kinds[kind][name].double()
        return torch.zeros(self.shapes[name], dtype=torch.float64)

    def can_update(self):
        optimizer = self.numbers.get("optimizer")
        return self.has("after") and optimizer and (
            self.has("exp_avg") or optimizer["step"] == 1)  # fmt: skip

    def recorded_gradient(self):
        """Return the clipped Gradient that was recorded, or that AdamW's moment shows, or None."""
        if self.has("grad"):
            return Gradient(self.named, self.kinds["grad"].__getitem__)
        if not (self.has("exp_avg_after") and self.can_update()):
            return None

        # m_after = beta1 m + (1 - beta1) g. With beta1 0.9, m's rounding is 10 times g's. Where the
        # updates before this one have made m, it is off as far as theirs are.
        beta1 = self.numbers["optimizer"]["groups"][0]["betas"][0]
        after = self.kinds["exp_avg_after"]
        g = Gradient(self.named, lambda n: (after[n].double() - beta1 * self.state("exp_avg", n))
                     / (1 - beta1))  # fmt: skip
        eps = max((torch.finfo(after[n].dtype).eps for n in self.named), default=0.0)
        noise = {n: eps * after[n].double().norm().item() / (1 - beta1) for n in self.named}
        if self.twin and self.has("exp_avg"):
            for n in self.named:
                off = (self.state("exp_avg", n) - self.twin.state("exp_avg", n)).norm().item()
                noise[n] += FACTOR * beta1 / (1 - beta1) * off
        # A moment that is NaN shows a wrong gradient, and not an uncertain one.
        self.noise, _ = furthest(noise, g.norms, self.sizes)
        return g if self.noise < 0.1 or self.noise == math.inf else None

    # Forward and backward

    def score(self, sequences, temperature, model=None):
        """Run sequences, and keep their numbers. Return {place: these with a graph}."""
        found = score(model or self.model, sequences, temperature)
        for s, row in zip(sequences, found):
            s.lp, s.H, *values = [x.tolist() for x in row]
            s.v = values[0] if values else None
        return {s.place: row for s, row in zip(sequences, found)}

    def run_model(self, temperature, model=None):
        """Compute log-probs, entropies, values. Return log-probs, a list of lists.

        Graphs are kept if the model is small.
        """
        self.graph = {}
        self.fill()
        with torch.set_grad_enabled(self.is_small):
            for part in together(self.sequences, self.most_tokens):
                graph = self.score(part, temperature, model)
                self.graph |= graph if self.is_small else {}
        self.empty()
        return [s.lp for s in self.sequences]

    def solve(self, plan=None):
        """Return the loss, and its Gradient. plan: what is added up, see mistakes.py."""
        # A large model has memory for the graph of one forward, so its loss is added up forward by
        # forward. A loss with means over the step needs all log-probs first.
        Z, T = denominator(self.c, self.sequences), self.c.temperature
        if self.is_small or self.c.nll_coef or self.c.objective in D.OF_THE_STEP:
            if not self.graph:
                self.run_model(T)
            plan = plan or [(1.0, self.c, self.sequences)]
        loss, slopes = self.add_up(plan or [])
        trim_memory()
        if not self.is_small:
            self.fill()
        for part in together(self.sequences, self.most_tokens):
            graph = {s.place: self.graph[s.place] for s in part} if self.is_small else (
                self.score(part, T))  # fmt: skip
            if plan is None:
                more, slopes = self.add_up([(1.0, self.c, part)], Z)
                loss += more
            pairs = [(x, slope.to(x.dtype)) for place, outputs in graph.items() if place in slopes
                     for x, slope in zip(outputs, slopes[place]) if x.requires_grad]  # fmt: skip
            if pairs:
                torch.autograd.backward(*zip(*pairs), retain_graph=self.is_small)
        parts = self.make()
        for n, p in self.named.items():
            parts[n] = torch.zeros_like(p.detach()) if p.grad is None else p.grad
            p.grad = None
        self.empty()
        return loss, Gradient(self.named, parts.__getitem__)

    def add_up(self, plan, Z=None):
        """Return a plan's loss, and {place: derivatives in log-prob, entropy, value (3, T)}."""
        total, found = 0.0, {}
        for factor, c, sequences in plan:
            loss, slopes = definition(c, sequences, Z)
            total += factor * loss
            for s in sequences:
                found.setdefault(s.place, torch.zeros(3, len(s.tokens), dtype=torch.float64))
            for (place, t), slope in slopes.items():
                found[place][:, t] += factor * torch.tensor(slope, dtype=torch.float64)
        return total, found

    # AdamW

    def adamw(self, name, g, change=None, count=1, dtype=torch.float64):
        """Return the first `count` of weight, m and v of a parameter after AdamW's step.

        g: its clipped gradient. dtype: of the result.
        change: gets and returns the arguments of D.adamw: a mistake.
        """
        optimizer = self.numbers["optimizer"]
        h = next(h for h in optimizer["groups"] if name in map(own_name, h["names"]))
        zeros = torch.zeros((), dtype=torch.float64).expand(g.shape)
        given = [self.kinds[kind][name] if kind in self.kinds else zeros for kind in MOMENTS]
        found = [torch.empty(g.shape, dtype=dtype) for _ in range(count)]

        # In pieces, as the temporary tensors of an embedding would take gigabytes.
        rows = max(1, PIECE * len(torch.atleast_1d(g)) // max(1, g.numel()))
        for part in zip(*(torch.atleast_1d(x).split(rows) for x in (*given, g, *found))):
            weight, m, v, piece = (x.double() for x in part[:4])
            a = dict(h=h, count=optimizer["step"], weight=weight, m=m, v=v, g=piece)
            a = a if self.c.decay == "groups" else self.decaying(self.c.decay)(a)
            for to, x in zip(part[4:], D.adamw(**change(a) if change else a)):
                to.copy_(x)
        return found

    def decaying(self, which):
        """Return a `change` of AdamW: which weights decay, all or matrices."""
        largest = max(group["weight_decay"] for group in self.numbers["optimizer"]["groups"])

        def change(a):
            decays = which == "all" or a["weight"].dim() >= 2
            return a | dict(h=a["h"] | dict(weight_decay=largest if decays else 0.0))

        return change

    def next_kinds(self, g, change=None):
        """Return `kinds` after the step with a clipped gradient, as stored."""
        made = {kind: self.make() for kind in MOMENTS}
        for name in self.named:
            for by, x in zip(made.values(), self.adamw(
                    name, g[name], change, count=3, dtype=self.stored[name])):  # fmt: skip
                by[name] = x
        return made

    # How far recorded numbers are off, relative

    def may(self, quantity):
        """Return the relative tolerance of a quantity. It is finite: no NaN is within it."""
        floor = self.floors.get(quantity, self.floor)
        return min(FACTOR * self.distances.get(quantity, 0.0) + floor, sys.float_info.max)

    def note(self, quantity, off, recorded, by_hand, size=1.0, where=""):
        """Keep the Row of a quantity, and return it. off: relative to `size`."""
        self.measured[quantity] = Row(
            quantity, recorded, by_hand, off * size, self.distances.get(quantity, 0.0) * size,
            self.floors.get(quantity, self.floor) * size, where=where)  # fmt: skip
        return self.measured[quantity]

    def update_error(self, g, change=None, noisy=False):
        """Return how far recorded new weights are from AdamW's, relative, and in which parameter.

        noisy: g is not the gradient that AdamW got. Where it is rounding, AdamW's step has its full
            size and any sign, so these entries are left out.
        """
        off, norms, storing = {}, {}, {}
        for n in self.named:
            before, want = self.state("before", n), self.adamw(n, g[n], change)[0]
            wrong = self.state("after", n) - want
            known = (g[n].abs() > 1e-5 * g.largest) | wrong.isnan()
            wrong = wrong[known] if noisy else wrong
            off[n], norms[n] = wrong.norm().item(), (want - before).norm().item()
            storing[n] = torch.finfo(self.stored[n]).eps * before.norm().item()
        if "weights" not in self.floors:  # a weight of 1 in float32 has no step under 1e-7
            storing, _ = furthest(storing, norms, self.sizes)
            self.floors["weights"] = self.floor + 4 * self.noise + self.updates * storing
        return (*furthest(off, norms, self.sizes), math.hypot(*norms.values()))

    def clip(self, g, norm=None):
        """Return a Gradient, clipped as if its norm was `norm`."""
        return g.times(D.shrink(self.c, g.norm if norm is None else norm))

    def errors(self, g, norm=None, clipped=None):
        """Return {quantity: (relative error, parameter)} of what was recorded of a gradient."""
        norm = g.norm if norm is None else norm
        clipped = self.clip(g, norm) if clipped is None else clipped
        result = {}
        if self.numbers.get("grad_norm") is not None:
            off = abs(self.numbers["grad_norm"] - norm) / max(norm, TINY)
            result["gradient norm"] = off, ""
        if self.gradient is not None:
            distances = clipped.distances(self.gradient)
            result["gradient"] = furthest(distances, clipped.norms, self.sizes)
        elif self.can_update():
            result["weights"] = self.update_error(clipped, noisy=True)[:2]
        return result

    def fits(self, *given, **options):
        return all(error <= self.may(quantity)
                   for quantity, (error, _) in self.errors(*given, **options).items())  # fmt: skip

    @functools.cached_property
    def size_of_loss(self):
        """A tenth of the loss if all terms had one sign. Terms may add up to nearly nothing."""
        terms = [t for row in terms_of(self.c, self.sequences) for t in row]
        return math.fsum(abs(term.share * term.loss) for term in terms) / 10

    def loss_error(self, loss):
        """Return how far the recorded loss is from another, relative to the terms' sizes."""
        return abs(self.numbers["loss"] - loss) / max(self.size_of_loss, abs(loss), TINY)

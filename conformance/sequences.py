"""Sequences and gradients of an optimizer step, and what the definition says of them.

A `Sequence` has what a trainer recorded of one sequence, token by token. The functions after it are
the definition's, of lists of sequences: loss, derivatives, advantages. Only the model is torch's. A
`Gradient` is read one parameter at a time.
"""

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from conformance import definition as D

NUDGE = 2.0**-50  # relative: the twin of a float64 trainer has weights that are so far off


# Sequences ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sequence:
    """One sequence of the step. A list has an entry for each token. step.py --help has the columns.

    scored: the places of the tokens that are scored. Default: all. The model then gets
        model(tokens (B, T), at=(rows (N,), places (N,))) and returns (1, N, V), which saves time
        with a large vocabulary. One forward may take several sequences then.
    sampled: how many tokens were sampled, if not all of them are trained on.
    lp, H, v: the definition's log-probs, entropies and values.
    ends: where each token's interval of [0, 1) ends, if there are draws.
    """

    place: int
    tokens: list
    mask: list
    logprobs: list | None = None
    old_logprobs: list | None = None
    ref_logprobs: list | None = None
    sampler_logprobs: list | None = None
    teacher_logprobs: list | None = None
    draws: list | None = None
    values: list | None = None
    returns: list | None = None
    advantages: list | None = None
    token_rewards: list | None = None
    rewards: float | None = None
    groups: int | None = None
    rank: int = 0
    micro_batch: int = 0
    width: int = 0
    length: int = 0
    scored: list | None = None
    sampled: int | None = None
    lp: list = ()
    H: list = ()
    v: list | None = None
    ends: list = ()

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
        lists = dict(
            lp=self.lp, old=self.old_logprobs or self.lp, A=self.advantages, H=self.H,
            ref=self.ref_logprobs, smp=self.sampler_logprobs, v=self.v if self.returns else None,
            v_old=self.values, g=self.returns)  # fmt: skip
        return D.Sequence(R=self.rewards or 0.0, **{
            name: row and [row[t] for t in self.at] for name, row in lists.items()})  # fmt: skip


MADE_HERE = ("place", "scored", "sampled", "lp", "H", "v", "ends")  # no columns of a dump
LISTS = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs",
         "draws", "values", "returns", "advantages", "token_rewards")  # fmt: skip


def lists_of(tensors):
    """Return the Sequences of a dump."""
    for name in ("tokens", "mask", "logprobs"):
        if name not in tensors:
            raise ValueError(f"expected {name} in step.safetensors, got {', '.join(tensors)}")
    B, T = tensors["tokens"].shape
    for name in LISTS:
        shapes = ((B, T), (B,)) if name == "advantages" else ((B, T),)
        if name in tensors and tensors[name].shape not in shapes:
            raise ValueError(f"{name}: expected {(B, T)}, got {tuple(tensors[name].shape)}")
    if tensors["mask"][:, 0].any():
        raise ValueError("mask: expected False for a row's first token, which has no log-prob")
    zeros = torch.zeros(B).int()
    rows = dict(rank=zeros, micro_batch=zeros, width=zeros + T, length=zeros + T) | tensors
    rows["mask"] = rows["mask"].bool()
    names = [x for x in Sequence.__dataclass_fields__ if x not in MADE_HERE]
    sequences = []
    for b in range(B):
        s = {name: rows[name][b].tolist() if name in rows else None for name in names}
        if isinstance(s["advantages"], float):
            s["advantages"] = [s["advantages"]] * T
        sequences.append(Sequence(place=b, **s))
    return sequences


def parts_by(sequences, *keys):
    """Return the sequences in lists: those of one rank, or of one micro-batch of one rank."""
    parts = {}
    for s in sequences:
        parts.setdefault(tuple(getattr(s, key) for key in keys), []).append(s)
    return [parts[key] for key in sorted(parts)]


# The definition, of sequences -------------------------------------------------------------------


def together(sequences, most):
    """Yield lists of sequences that one forward takes: of `most` tokens with padding, or one."""
    part = []
    for s in sequences:
        longest = max(len(x.tokens) for x in [*part, s])
        if part and longest * (len(part) + 1) > most:
            yield part
            part = []
        part.append(s)
    if part:
        yield part


def score(model, sequences, temperature):
    """Return for each sequence log-probs, entropies and perhaps values: (T,), with a graph.

    One forward takes them all. If they are several, they have `scored`.
    """
    # The logits at token t - 1 predict token t; the first token has no log-prob. Padding follows
    # all tokens, so that no token sees it.
    tokens_BT = pad_sequence([torch.tensor(s.tokens) for s in sequences], batch_first=True)
    at = [torch.arange(1, len(s.tokens)) if s.scored is None else torch.tensor(s.scored).long()
          for s in sequences]  # fmt: skip
    if sequences[0].scored is None:
        out = model(tokens_BT)
    else:
        rows = torch.repeat_interleave(torch.tensor([len(places) for places in at]))
        out = model(tokens_BT, at=(rows, torch.cat(at) - 1))
    # The output of a model of transformers is a dict, whose `values` is a method.
    logits, values = (out, None) if torch.is_tensor(out) else (
        out.logits, getattr(out, "values", None))  # fmt: skip
    values = values if torch.is_tensor(values) else None
    found, first = [], 0
    for s, places in zip(sequences, at):
        mine = slice(first, first + len(places))
        first = mine.stop
        found.append(score_one(s, places, logits if logits is None else logits[0, mine],
                               values if values is None else values[0, mine], temperature))
    return found


def score_one(s, places, logits, values, temperature):
    """Return what `score` does of one sequence, from the model's outputs for its places."""
    N, found = len(places), []
    if logits is not None:  # a critic has none
        targets = [s.tokens[t] for t in places]
        lp, H, logp_NV = D.scores(logits, targets, temperature)
        found = [lp, H]
        if s.draws is not None:
            p_NV = logp_NV.detach().double().exp()
            ends = p_NV.cumsum(-1)[range(N), targets]
            s.ends = torch.zeros(len(s.tokens)).double().index_copy(0, places, ends).tolist()
    found = found or [values.new_zeros(N)] * 2
    found += [] if values is None else [values]
    return [x.new_zeros(len(s.tokens)).index_copy(0, places, x) for x in found]


def denominator(c, sequences):
    """Return Z: what the sum over these sequences is divided by."""
    return max(D.denominator(c, [len(s.at) for s in sequences]), 1)


def terms_of(c, sequences, Z=None, rows=None):
    """Return the Terms of each sequence's trained tokens.

    c.mistake(c, place, row, terms): changes the terms of a sequence, if a mistake is planted.
    Z: the denominator. Default: of these sequences. rows: of `trained`, changed.
    """
    rows = [s.trained() for s in sequences] if rows is None else rows
    _, found = D.definition(c, rows, denominator(c, sequences) if Z is None else Z)
    for s, row, terms in zip(sequences, rows, found):
        getattr(c, "mistake", lambda *_: None)(c, s.place, row, terms)
    return found


def definition(c, sequences, Z=None):
    """Return the loss, and its derivatives {(place, t): of log-prob, entropy and value}."""
    total, slopes = 0.0, {}
    for s, terms in zip(sequences, terms_of(c, sequences, Z)):
        for t, term in zip(s.at, terms):
            total += term.share * term.loss
            slopes[s.place, t] = [term.share * x for x in (term.dlp, term.dH, term.dv)]
    return total, slopes


def gae(c, s):
    """Return the advantages of a sequence's trained tokens from a critic's values, unwhitened."""
    u, v = ([x[t] for t in s.at] for x in (s.token_rewards, s.values))
    return D.gae(c, u, v) if s.at else []


def advantages(c, sequences):
    """Return {place: the advantages of the trained tokens}."""
    if c.advantage == "teacher":
        return {s.place: [s.teacher_logprobs[t] - s.sampler_logprobs[t] for t in s.at]
                for s in sequences}  # fmt: skip
    if c.advantage == "gae":
        rows = D.whiten([gae(c, s) for s in sequences])
        return {s.place: row for s, row in zip(sequences, rows)}
    groups = parts_by(sequences, "groups")
    counts = [[len(s.at) if s.sampled is None else s.sampled for s in group] for group in groups]
    found = D.advantages(c, [[s.rewards for s in group] for group in groups], counts)
    return {s.place: [A] * len(s.at) for group, row in zip(groups, found)
            for s, A in zip(group, row)}  # fmt: skip


# Gradients ------------------------------------------------------------------------------------


class Gradient:
    """A gradient in all weights, which is read one parameter at a time, in float64.

    of: function from a parameter's name to its tensor. factor: what all of it is multiplied by.
    """

    def __init__(self, names, of, factor=1.0):
        self.names, self.of, self.factor = list(names), of, factor

    def __getitem__(self, name):
        return self.of(name).double() * self.factor

    def times(self, factor):
        return Gradient(self.names, self.of, factor * self.factor)

    @functools.cached_property
    def norms(self):
        """{name: the norm of one parameter's part}"""
        return {n: abs(self.factor) * torch.linalg.vector_norm(self.of(n), dtype=torch.float64)
                .item() for n in self.names}  # fmt: skip

    @functools.cached_property
    def norm(self):
        return math.hypot(*self.norms.values())

    @functools.cached_property
    def largest(self):
        return max((self[n].abs().max().item() for n in self.names), default=0.0)

    def dot(self, other):
        return math.fsum((self[n] * other[n]).sum().item() for n in self.names)

    def distances(self, other):
        """Return {name: how far one parameter's parts are apart}."""
        return {n: (self[n] - other[n]).norm().item() for n in self.names}


def furthest(distances, norms, sizes):
    """Return the largest relative distance in a parameter, and the parameter's name.

    Dicts by name. norms: of what it is relative to. sizes: numbers of entries.
    """
    # A gradient of two matrices with norms 3 and 4 has the norm 5. A bias of no gradient has a
    # norm of rounding, so it is held to its share of the 5: the root of its share of the entries.
    whole, N = math.hypot(*norms.values()), max(1, sum(sizes.values()))
    scale = {n: max(norms[n], whole * math.sqrt(sizes[n] / N), 1e-300) for n in distances}
    found = {n: distance(distances[n] / scale[n], 0.0) for n in distances}
    worst = max(found, key=found.get, default="")
    return found.get(worst, 0.0), worst


def distance(x, y):
    """Return |x - y| of numbers: infinity if only one of them, or neither, is a number."""
    # `max` drops a NaN that is not its first argument, and so would a search for the furthest.
    if x == y:
        return 0.0
    return math.inf if math.isnan(x - y) else abs(x - y)


def own_name(name):
    """Return a parameter's name without a wrapper's prefix."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def alternating(x):
    """Return +1 and -1 by turns, in the shape of a tensor."""
    signs = torch.ones(x.numel(), dtype=torch.float64)
    signs[1::2] = -1.0
    return signs.view(x.shape)


def nudge(parameters):
    """Put each weight off by a few units in the last place of float64."""
    for p in parameters:
        p.data.mul_(1 + NUDGE * alternating(p).to(p.dtype))


def trim_memory():
    """Give freed memory back to the system. The C library of Linux keeps it: gigabytes of weights.
    """
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)

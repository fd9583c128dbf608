"""Hold anybody's parallelism to its definition: the same model, on one process, in float64.

    python conformance/parallel.py FILE.py                # on 1, 2 and 4 ranks of this CPU
    python conformance/parallel.py FILE.py --ranks 2
    python conformance/parallel.py FILE.py ranks=mean     # replaces a setting

FILE.py has three functions, for example:

    def build():                    # The whole model and a batch. The kit seeds torch before.
        return nn.Linear(4, 8), torch.randn(8, 4)

    def shard(model, mesh):         # Your parallelism. mesh is a DeviceMesh of all ranks.
        return parallelize_module(model, mesh, ColwiseParallel(output_layouts=Replicate()))

    def loss(model, batch):         # A scalar.
        return model(batch).square().mean()

The definition is `loss` of the whole model and the whole batch on one process, its gradient, its
clip norm and AdamW. The kit runs the same three steps on the ranks, and compares the weights before
the first step, and the loss, every gradient, the clip norm and the weights of each step. It also
compares buffers. Each rank has a launcher's environment: RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. To show that the comparison would see a wrong
gradient, it multiplies the gradient of each parameter on each rank by 1.001, and compares again.

FILE.py may have these too, where its parallelism differs from the default:

    rank_loss(model, batch)      What a rank computes. Default: loss. Data-parallel ranks take their
                                 part of the batch in it, for example batch[dist.get_rank()::2].
                                 If it returns a loss with a graph, the kit calls backward. Without
                                 one, it has run the backward and reduced the gradients itself, as a
                                 pipeline or an accumulation does. None: this rank has no loss.
    gather(model, name, x)       Return a whole tensor from a rank's part x of parameter `name`. All
                                 ranks that have the parameter call it. A tensor or a DTensor of
                                 the definition's shape needs none: the tensor is a replica.
    clip(model, max_norm)        Clip gradients and return their norm before. Default: torch's
                                 clip_grad_norm_.
    optimizer(model, **adamw)    Return an object with step(). Default: torch's AdamW.

SETTINGS, a dict in FILE.py, with its defaults:
    ranks="same"        How the ranks' losses make up the whole loss. same: each rank has the whole
                        loss. mean or sum: their mean or sum is the whole loss.
    mesh={}             {4: dict(dp=2, tp=2)}: the mesh for a number of ranks. For another number,
                        all ranks are on the last dimension. Default: one dimension named "ranks".
    tolerance=1e-9      Largest error allowed, relative to a tensor's largest entry. Raise it if the
                        model computes in float32 inside.

The exit status is 0 if all agree, 1 if something differs or could not be compared, and 2 if a rank
raised an error. Each difference is shown with its parameters, its ranks, and what it looks like.
"""

import copy
import datetime
import itertools
import math
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

if __name__ == "__main__":  # a script has its own folder on the path, not the package's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conformance import command
from conformance import definition as D

STEPS = 3
ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
PLANTED = 1.001
PATIENCE = 60.0  # seconds that a rank waits for another one
WRAPPERS = r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."


def clip(model, max_norm):
    """Clip gradients as torch does. Return the norm before the clip."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def optimizer(model, **adamw):
    """Return torch's AdamW of all parameters."""
    return torch.optim.AdamW(model.parameters(), **adamw)


FUNCTIONS = dict(rank_loss=None, gather=None, clip=clip, optimizer=optimizer)
DEFAULTS = dict(ranks="same", mesh={}, tolerance=1e-9)
CHOICES = dict(ranks=("same", "mean", "sum"))


def subject_of(functions, given=None):
    """Return a subject from a dict of its functions and SETTINGS, with the defaults filled in.

    given: settings that replace its own.
    """
    missing = [name for name in ("build", "shard", "loss") if name not in functions]
    if missing:
        raise ValueError(f"expected the functions build, shard and loss, got no {missing[0]}")
    settings = command.checked(DEFAULTS, CHOICES, functions.get("SETTINGS", {}) | (given or {}))
    settings["mesh"] = {int(world): sizes for world, sizes in settings["mesh"].items()}
    subject = SimpleNamespace(**{**FUNCTIONS, **functions, **settings})
    subject.rank_loss = subject.rank_loss or subject.loss
    return subject


# The definition -------------------------------------------------------------------------------
# One process, no process group. The clip and AdamW are definition.py's, so that nothing of what the
# ranks use is used here but the model and `loss`.


def build(subject):
    """Return the whole model in float64, and the batch, equal on every process."""
    torch.manual_seed(0)
    model, batch = subject.build()
    return model.double(), batch


def names_of(pairs):
    """Return {name: tensor} without the prefixes that wrappers such as DDP put into names."""
    return {re.sub(WRAPPERS, "", name): x for name, x in pairs}


def define(subject, scale=None, steps=STEPS):
    """Train the whole model on the whole batch. Return what each step had, by parameter.

    scale: (pattern, factor). Parameters with this name are multiplied by it first; see
        `name_forward`.
    """
    if not scale:
        require_no_dice(subject)
    model, batch = build(subject)
    parameters = names_of(model.named_parameters())
    for name, p in parameters.items():
        if scale and re.sub(r"\d+", "*", name) == scale[0]:
            p.data *= scale[1]
    moments = {name: 2 * [torch.zeros_like(p.data)] for name, p in parameters.items()}
    order = []  # of the backward: the parameter nearest to the loss comes first
    for name, p in parameters.items():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    truth = dict(before=copies(parameters), steps=[], order=order)
    truth["buffers before"] = copies(names_of(model.named_buffers()))

    for t in range(1, steps + 1):
        loss = subject.loss(model, batch)
        loss.backward()
        gradients = {name: gradient_of(p) for name, p in parameters.items() if p.requires_grad}
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))

        # The clip is active in the first step: max_norm is half of its norm.
        max_norm = truth.setdefault("max_norm", norm / 2)
        c = SimpleNamespace(max_grad_norm=max_norm, clip_eps=D.DEFAULTS["clip_eps"])
        for name, p in parameters.items():
            if p.grad is not None:
                g = D.shrink(c, norm) * gradients[name]
                p.data, *moments[name] = D.adamw(ADAMW, t, p.data, *moments[name], g)
            p.grad = None
        step = dict(loss=loss.item(), gradient=gradients, norm=norm, weights=copies(parameters))
        truth["steps"].append(step)
    truth["buffers after"] = copies(names_of(model.named_buffers()))
    truth["order"] = list(dict.fromkeys(order))
    return truth


def require_no_dice(subject):
    """Raise an error if the loss depends on random numbers, which the ranks draw anew."""
    losses = []
    for seed in (1, 2):
        model, batch = build(subject)
        torch.manual_seed(seed)
        losses.append(subject.loss(model, batch).item())
    if losses[0] != losses[1]:
        raise ValueError(f"expected one loss, got {losses[0]} and {losses[1]}: turn dropout off")


def copies(tensors):
    """Return copies, without a graph, of the tensors of a dict."""
    return {name: x.detach().clone() for name, x in tensors.items()}


def gradient_of(p):
    """Return a copy of a parameter's gradient. A missing one is zero."""
    return torch.zeros_like(p).detach() if p.grad is None else p.grad.detach().clone()


# The ranks ------------------------------------------------------------------------------------
# What one rank does, in the same three steps. All ranks run all collectives in the same order.


def observe(subject, truth, sizes):
    """Train under the parallelism. Return what this rank saw, with tensors brought together.

    truth: what `define` returned. sizes: {name: size} of the dimensions of the mesh.
    """
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model, batch = build(subject)
    own = None
    if subject.ranks != "same":
        own = own_gradient(subject, copy.deepcopy(model), batch)
    model = subject.shard(model, mesh)
    parameters = names_of(model.named_parameters())
    buffers = names_of(model.named_buffers())
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, sorted(parameters))
    check_names({name for names in held for name in names}, truth)

    def whole(tensors, like):
        """Return {name: whole tensor}. Ranks go through the names in the same order."""
        return {x: bring_together(subject, model, x, tensors[x], like[x]) for x in sorted(tensors)}

    record = dict(place=dict(zip(sizes, mesh.get_coordinate())), own=own, steps=[])
    record["before"] = whole(parameters, truth["before"])
    record["buffers before"] = whole(shared(buffers, truth), truth["buffers before"])
    step_of = subject.optimizer(model, **ADAMW).step
    for t, true in enumerate(truth["steps"]):
        loss = subject.rank_loss(model, batch)
        if loss is not None and loss.requires_grad:
            loss.backward()
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        gradients = {name: gradient_of(p) for name, p in trained.items()}
        step = dict(gradient=whole(gradients, true["gradient"]))
        step["loss"] = None if loss is None else plain(loss).item()
        step["local"] = {name: local_part(g) for name, g in gradients.items()}
        if t == 0:
            record["blind"] = plant(subject, model, gradients, step["gradient"], true, held)
        step["norm"] = plain(torch.as_tensor(subject.clip(model, truth["max_norm"]))).item()
        step_of()
        model.zero_grad()
        # ZeRO and FSDP may replace a parameter's tensor in a step, so names are looked up again.
        parameters = names_of(model.named_parameters())
        step["weights"] = whole(parameters, true["weights"])
        record["steps"].append(step)
    buffers = shared(names_of(model.named_buffers()), truth)
    record["buffers after"] = whole(buffers, truth["buffers after"])
    return record


def check_names(found, truth):
    """Raise an error unless the ranks have the definition's parameters, and all of them."""
    for name in sorted(found ^ {*truth["before"]}):
        who = "the ranks'" if name in found else "the definition's"
        raise ValueError(f"expected equal names of parameters, got {name} in {who} model only")


def shared(buffers, truth):
    """Return the buffers that the definition has too. A parallelism may add some of its own."""
    return {name: x for name, x in buffers.items() if name in truth["buffers before"]}


def plain(x):
    """Return a tensor without a graph. A DTensor becomes the whole tensor."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def local_part(x):
    """Return the part of a tensor that this rank has."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def bring_together(subject, model, name, x, like):
    """Return the whole tensor that this rank's tensor is a part of."""
    if x.shape != like.shape:
        if subject.gather is None:
            shapes = f"{tuple(like.shape)}, got {tuple(x.shape)} on rank {dist.get_rank()}"
            raise ValueError(f"{name}: expected {shapes}. Write `gather`, which makes it whole")
        x = subject.gather(model, name, x.detach())
    x = plain(x).clone()
    if x.shape != like.shape:
        raise ValueError(f"{name}: expected {tuple(like.shape)}, got {tuple(x.shape)} gathered")
    return x


def plant(subject, model, gradients, whole, true, held):
    """Return (name, rank) of each gradient whose error on that rank would not be seen on this one.

    A gather that reads one rank only would hide what is wrong on the others, and a part of a
    gradient that is zero hides a wrong factor.
    """
    blind = []
    for name in sorted({name for names in held for name in names}):
        for rank, names in enumerate(held):
            if name not in gradients or name not in names:
                continue
            wrong = gradients[name].clone()
            if rank == dist.get_rank():
                local_part(wrong).mul_(PLANTED)
            found = bring_together(subject, model, name, wrong, true["gradient"][name])
            if error(found, whole[name], noise_size(whole)) <= subject.tolerance:
                blind.append((name, rank))
    return blind


def own_gradient(subject, model, batch):
    """Return the gradient of this rank's own loss with the whole model, or None.

    Data-parallel ranks can compute it. The weights that the ranks' gradients have in the
    definition's then tell a mean of ranks' means from a mean over the batch.
    """
    try:
        loss = subject.rank_loss(model, batch)
        if loss.requires_grad:
            loss.backward()
    except Exception:  # rank_loss may need what only `shard` makes, on all ranks alike
        return None
    return {name: gradient_of(p) for name, p in names_of(model.named_parameters()).items()}


# The comparison -------------------------------------------------------------------------------
# One process has what all ranks saw. A finding is (parameters, ranks, what it looks like).


def noise_size(gradients):
    """Return the size below which the entries of a gradient are taken as rounding.

    A gradient that is zero in exact arithmetic, such as that of the bias of keys without RoPE, is
    rounding of the others. So a difference of 1e-14 of the largest entry of all gradients is none:
    the tolerance, 1e-9, of this size.
    """
    return 1e-5 * max((x.abs().max().item() for x in gradients.values() if x.numel()), default=0.0)


def error(found, want, at_least=0.0):
    """Return the largest error of a tensor, relative to its largest entry. NaN becomes infinity.

    at_least: a size that replaces a smaller largest entry.
    """
    found, want = torch.as_tensor(found).double(), torch.as_tensor(want).double()
    if not want.numel():
        return 0.0
    difference = (found - want).abs().max().item()
    size = max(want.abs().max().item(), at_least)
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else difference


def is_close(found, want, tolerance):
    """Return whether two tensors agree."""
    return error(found, want) <= tolerance


class Judge:
    """The comparison of what the ranks saw with the definition."""

    def __init__(self, subject, truth, records, sizes):
        self.subject, self.truth, self.records, self.sizes = subject, truth, records, sizes
        self.tolerance = subject.tolerance
        self.places = [record["place"] for record in records]

        # The sizes that a wrong factor can have, with a name for each.
        self.counts = {}
        dims = [name for name in sizes if sizes[name] > 1]
        for k in range(1, len(dims) + 1):
            for some in itertools.combinations(dims, k):
                count = math.prod(sizes[name] for name in some)
                self.counts.setdefault(count, []).append(some)

    def rows(self):
        """Return a dict: errors by stage, findings by stage, and what the comparison cannot see."""
        errors, findings = {}, []
        stages = [("weights before", "weights", None), ("buffers before", "buffers", None)]
        for t in range(len(self.truth["steps"])):
            for kind in ("loss", "gradient", "clip norm", "weights"):
                stages.append((f"{kind}, step {t + 1}", kind, t))
        stages.append(("buffers after", "buffers", None))
        for stage, kind, t in stages:
            largest, found = self.compare(stage, kind, t)
            errors[kind] = max(errors.get(kind, 0.0), largest)
            findings += [(stage, *finding) for finding in found]

        # The comparison is blind to a rank's gradient if no rank saw the planted factor.
        blind = [{tuple(x) for x in record["blind"]} for record in self.records]
        holders = {name: [r for r, x in enumerate(self.records) if name in x["before"]]
                   for name in self.truth["before"]}  # fmt: skip
        planted = [(name, r) for name, ranks in holders.items() for r in ranks
                   if self.has_part(name, r)]  # fmt: skip
        hidden = [(name, r) for name, r in planted
                  if all((name, r) in blind[x] for x in holders[name])]  # fmt: skip
        return dict(errors=errors, findings=findings, planted=len(planted), hidden=hidden)

    def has_part(self, name, rank):
        """Return whether a rank has entries of a trained parameter."""
        local = self.records[rank]["steps"][0]["local"]
        return name in local and local[name].numel() > 0

    def compare(self, stage, kind, t):
        """Return the largest error of a stage, and its findings."""
        if kind == "loss":
            return self.compare_loss(t)
        if kind == "clip norm":
            return self.compare_norm(t)
        key = {"weights before": "before"}.get(stage, kind if t is not None else stage)
        pick = (lambda x: x[key]) if t is None else (lambda x: x["steps"][t][key])
        want, wrong, largest = pick(self.truth), {}, 0.0

        # AdamW divides by the size of each entry's gradient, which enlarges small errors.
        tolerance = self.tolerance * (20 if kind == "weights" and t is not None else 1)
        noise = noise_size(want) if kind == "gradient" else 0.0
        for name in want:
            found = {r: pick(x)[name] for r, x in enumerate(self.records) if name in pick(x)}
            errors = {r: error(x, want[name], noise) for r, x in found.items()}
            largest = max([largest, *errors.values()])
            bad = [r for r, e in errors.items() if not e <= tolerance]
            if bad:
                text = self.explain(kind, t, name, found, want[name], bad)
                text, _, numbers = text.partition("|")
                wrong.setdefault((tuple(bad), text), []).append((name, numbers))
        findings = [[[name for name, _ in some], list(ranks), text + some[0][1]]
                    for (ranks, text), some in wrong.items()]  # fmt: skip
        if kind == "gradient" and findings:
            findings = self.name_data(t) or findings + self.first_wrong(findings)
        return largest, findings

    def explain(self, kind, t, name, found, want, bad):
        """Say what a wrong tensor looks like."""
        if kind == "gradient":
            return self.name_gradient(t, name, found, want, bad)
        wrong = next(found[r] for r in bad)
        moved = self.name_shard(found, want, bad)
        differ = not all(is_close(x, wrong, self.tolerance) for x in found.values())
        if kind == "buffers":
            if is_close(wrong, self.truth["buffers before"][name], 0.0):
                return "a stale buffer: it has not been updated"
            return "the ranks' buffers differ" if differ else "not the definition's buffer"
        if t is None:
            other = "not the definition's weights: a different initialization"
            return moved or ("the ranks start from different weights" if differ else other)
        last = self.truth["steps"][t - 1]["weights"] if t else self.truth["before"]
        if is_close(wrong, last[name], 1e-12):
            return "the optimizer did not step this parameter"
        undecayed = want + ADAMW["lr"] * ADAMW["weight_decay"] * last[name]
        if is_close(wrong, undecayed, self.tolerance):
            return "no weight decay"
        return "the ranks' weights differ" if differ else "not the definition's weights"

    # Gradients --------------------------------------------------------------------------------

    def name_gradient(self, t, name, found, want, bad):
        """Say what a wrong gradient looks like, from the ratios of the ranks' to the definition's.

        Two ranks with the gradients 2 and 5 of a definition of 7 have partial gradients. Two ranks
        that both have 14 have added twice.
        """
        zero = [r for r in bad if not found[r].abs().max() > 0]
        if len(zero) == len(bad):
            return "a missing gradient"
        if zero:
            return f"a missing gradient on ranks {zero}"
        factors = {r: self.factor(found[r], want) for r in found}
        if len({None if c is None else round(c, 6) for c in factors.values()}) == 1:
            if factors[bad[0]] is not None:
                return self.name_factor(factors[bad[0]])
        return (
            self.name_partial(found, want, bad) or self.name_shard(found, want, bad)
            or self.name_last_step(t, name, found, want)
            or self.name_ratios(found, want, bad, factors)
        )  # fmt: skip

    def factor(self, found, want):
        """Return c if a tensor is c times the definition's, or None."""
        c = (found * want).sum() / (want * want).sum()
        ok = error(found, c * want) <= max(self.tolerance, 1e-9) and c != 0
        return c.item() if ok else None

    def name_factor(self, c):
        """Name a factor that all entries of a gradient have."""
        for count, dims in self.counts.items():
            over = " or ".join(" and ".join(some) for some in dims)
            if abs(c - count) < 1e-6 * count:
                times = "twice" if count == 2 else f"{count} times"
                return f"summed {times} over {over}: {count} times the definition's"
            if abs(c * count - 1) < 1e-6:
                return f"a mean over {over} where a sum is due: 1/{count} of the definition's"
        for count in range(2, 65):
            if abs(c - count) < 1e-6 * count:
                return f"{count} times the definition's: counted {count} times"
            if abs(c * count - 1) < 1e-6:
                return f"1/{count} of the definition's: divided by {count} once too often"
        return f"{c:.6g} times the definition's"

    def name_partial(self, found, want, bad):
        """Name replicas whose sum or mean over dimensions of the mesh is the definition's."""
        for count, choices in self.counts.items():
            for dims in choices:
                sums = self.sums_over(found, dims)
                over = " and ".join(dims)
                if all(is_close(sums[r], want, self.tolerance) for r in sums):
                    return f"partial over {over}: the ranks' gradients add up to the definition's"
                if all(is_close(sums[r] / count, want, self.tolerance) for r in sums):
                    return f"not reduced over {over}: the ranks' mean is the definition's"
        return ""

    def sums_over(self, found, dims):
        """Return {rank: the sum of the tensors of the ranks that differ from it in dims only}."""
        def group(r):
            return [p for name, p in self.places[r].items() if name not in dims]

        return {r: sum(found[s] for s in found if group(s) == group(r)) for r in found}

    def name_shard(self, found, want, bad):
        """Name whole tensors that consist of the definition's parts, in other places."""
        for axis, count in itertools.product(range(want.dim()), self.counts):
            if want.shape[axis] % count:
                continue
            due = want.chunk(count, axis)
            for r in bad:
                parts = found[r].chunk(count, axis)
                at = [[j for j, x in enumerate(due) if is_close(part, x, self.tolerance)]
                      for part in parts]  # fmt: skip
                moved = [(i, j[0]) for i, j in enumerate(at) if j and i not in j]
                if moved:
                    i, j = moved[0]
                    where = f"part {i} of {count} along dimension {axis}"
                    return f"a wrong rank's shard: {where} is the definition's part {j}"
        return ""

    def name_last_step(self, t, name, found, want):
        """Name gradients that still contain the step before."""
        if not t:
            return ""
        last = self.truth["steps"][t - 1]["gradient"][name]
        left = [self.factor(x - want, last) for x in found.values()]
        return "" if None in left else "the gradient of the step before is still in it"

    def name_ratios(self, found, want, bad, factors):
        """Say how a gradient without a pattern differs. The text before | groups parameters."""
        if None not in factors.values():
            return f"the ranks differ: |{ratios(factors.values())} times the definition's"
        differ = not all(is_close(found[r], found[bad[0]], self.tolerance) for r in found)
        ratio = (found[bad[0]] / want)[want.abs() > 1e-3 * want.abs().max()]
        text = f"|{ratio.min():.3g} to {ratio.max():.3g} times the definition's"
        return ("the ranks differ: " if differ else "no pattern, equal on the ranks: ") + text

    def first_wrong(self, findings):
        """Say where, on the way back from the loss, the gradient becomes wrong."""
        wrong = {name for names, _, _ in findings for name in names}
        order = self.truth["order"]
        right = list(itertools.takewhile(lambda name: name not in wrong, order))
        if not right or len(right) == len(order) or {*order[len(right) :]} - wrong:
            return []
        return [[[order[len(right)]], [], f"the backward is right from the loss to {right[-1]}, "
                 "and wrong from here on: look at the collective between the two"]]  # fmt: skip

    def name_data(self, t):
        """Name what data-parallel ranks did with the batch, from their own gradients."""
        owns = [record["own"] for record in self.records]
        if t or any(own is None for own in owns):
            return []
        names = sorted(self.truth["steps"][0]["gradient"])
        flat = [torch.cat([own[name].flatten() for name in names]) for own in owns]
        want = torch.cat([self.truth["steps"][0]["gradient"][name].flatten() for name in names])
        if not all({*names} <= {*x["steps"][0]["gradient"]} for x in self.records):
            return []
        found = self.records[0]["steps"][0]["gradient"]
        found = torch.cat([found[name].flatten() for name in names])
        ranks = list(range(len(owns)))
        share = 1 / len(owns) if self.subject.ranks == "mean" else 1.0
        if not is_close(found, share * sum(flat), self.tolerance) or self.factor(found, want):
            return []  # the ranks did something else, or one factor says it all
        for a, b in itertools.combinations(ranks, 2):
            if is_close(flat[a], flat[b], self.tolerance):
                text = f"ranks {a} and {b} computed the same part of the batch"
                return [[["every parameter"], ranks, text]]

        # The definition's gradient is a weighted sum of the ranks' gradients. Ranks with 2 and 6 of
        # 8 tokens have the weights 1/4 and 3/4.
        columns = torch.stack(flat, 1)
        weights = torch.linalg.lstsq(columns, want[:, None]).solution[:, 0]
        if is_close(columns @ weights, want, 1e-6):
            text = f"the mean of the ranks' means: in the definition they count {ratios(weights)}"
            if self.subject.ranks == "sum":
                text = f"the ranks' terms count {ratios(weights)} times in the definition"
        else:
            text = "a part of the batch is on no rank, or counted in a wrong way within a rank"
        return [[["every parameter"], ranks, text]]

    # Losses and norms -------------------------------------------------------------------------

    def compare_loss(self, t):
        """Return the error of a step's loss, and its findings."""
        want = self.truth["steps"][t]["loss"]
        losses = {r: x["steps"][t]["loss"] for r, x in enumerate(self.records)}
        losses = {r: x for r, x in losses.items() if x is not None}
        if not losses:
            return math.inf, [[["loss"], [], "no rank returned a loss"]]
        total = sum(losses.values())
        made = {"same": losses, "sum": {0: total}, "mean": {0: total / len(losses)}}
        found = made[self.subject.ranks]
        bad = [r for r, x in found.items() if not is_close(x, want, self.tolerance)]
        if not bad:
            return max(error(x, want) for x in found.values()), []
        value = found[bad[0]]
        text = f"{value:.6g}, expected {want:.6g}"
        for how in {*made} - {self.subject.ranks}:
            if how != "same" and is_close(made[how][0], want, self.tolerance):
                text += f". The ranks' {how} is the definition's. ranks={how} would say so"
        if max(found.values()) - min(found.values()) > self.tolerance * abs(want):
            text += ". The ranks' losses differ"
        elif t == 0 and error(value, want) > 1000 * self.tolerance:
            text += self.name_forward(value)
        return max(error(x, want) for x in found.values()), [[["loss"], bad, text]]

    def name_forward(self, loss):
        """Name a parameter that the ranks' forward uses more than once, or not at all.

        Each of 2 tensor-parallel ranks may add the same bias. So the definition's loss with this
        bias times 2 is what the ranks have.
        """
        right = self.truth["steps"][0]["loss"]
        factors = {count: f"{count} times" for count in self.counts}
        factors |= {1 / count: f"1/{count} times" for count in self.counts} | {0: "not at all"}
        for pattern in dict.fromkeys(re.sub(r"\d+", "*", name) for name in self.truth["before"]):
            for factor, times in factors.items():
                other = define(self.subject, (pattern, factor), steps=1)["steps"][0]["loss"]
                if is_close(other, loss, self.tolerance) and error(other, right) > 1e-6:
                    each = ": every rank adds it" if factor > 1 else ""
                    return f". It is the definition's if {pattern} counts {times}{each}"
        return ""

    def compare_norm(self, t):
        """Return the error of a step's clip norm, and its findings."""
        want = self.truth["steps"][t]["norm"]
        steps = [record["steps"][t] for record in self.records]
        squares = [sum(x.square().sum().item() for x in step["local"].values()) for step in steps]
        wrong, errors = {}, [error(step["norm"], want) for step in steps]
        for r, step in enumerate(steps):
            found = step["norm"]
            if errors[r] <= self.tolerance:
                continue
            text = f"{found:.6g}, expected {want:.6g}"
            if is_close(found, math.sqrt(squares[r]), self.tolerance):
                text = "the norm of this rank's gradients only, without the other ranks' parts"
            elif is_close(found, math.sqrt(sum(squares)), self.tolerance):
                text += ": replicas are counted once for each rank"
            elif is_close(found, sum(map(math.sqrt, squares)), self.tolerance):
                text += ": the ranks' norms were added, and not their squares"
            elif self.factor(torch.tensor(found), torch.tensor(want)):
                text += f", {found / want:.6g} times as large"
            wrong.setdefault(text, []).append(r)
        return max(errors), [[["clip norm"], ranks, text] for text, ranks in wrong.items()]


def ratios(numbers):
    """Return numbers as text, for example "1 and 2"."""
    texts = [f"{x:.4g}" for x in numbers]
    return ", ".join(texts[:-1]) + (" and " if texts[:-1] else "") + texts[-1]


# Processes ------------------------------------------------------------------------------------


def examine(subject, truth, sizes):
    """Run on every rank of a process group. Return the rows of the comparison on rank 0."""
    torch.set_default_dtype(torch.float64)
    record = observe(subject, truth, sizes)
    records = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(record, records)
    return Judge(subject, truth, records, sizes).rows() if records else None


def mesh_of(subject, world):
    """Return {name: size} of the mesh for a number of ranks."""
    if world in subject.mesh:
        return dict(subject.mesh[world])
    names = [*next(iter(subject.mesh.values()), ["ranks"])]
    return {**dict.fromkeys(names, 1), names[-1]: world}


def _process(rank, world, port, folder, target, subject, arguments):
    """Run a function in a process, and write its result or its error into the folder."""
    launcher = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port)  # fmt: skip
    os.environ.update({name: f"{x}" for name, x in launcher.items()})
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        if target is examine:
            wait = datetime.timedelta(seconds=PATIENCE)
            dist.init_process_group("gloo", f"file://{folder}/store", wait, world, rank)
        result = target(subject, *arguments)
        if rank == 0:
            torch.save(result, f"{folder}/result")
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        # Under another name first: the end of another rank may kill this one while it writes.
        unfinished = Path(folder, f"unfinished-{rank}")
        unfinished.write_text(f"{time.time()}\n{traceback.format_exc()}")
        unfinished.rename(Path(folder, f"error-{rank}"))
        raise


def launch(world, target, subject, *arguments):
    """Return what a function returned on rank 0 of so many processes."""
    with socket.socket() as free:  # a port that nobody has
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        given = (world, port, folder, target, subject, arguments)
        try:
            # A forked process has imported torch already, and starts in a few tenths of a second.
            start_processes(_process, given, world, start_method="fork")
        except (ProcessRaisedException, ProcessExitedException) as failure:
            # The rank that failed first says why. The others only say that they lost it.
            errors = [path.read_text().split("\n", 1) for path in Path(folder).glob("error-*")]
            if errors:
                raise RuntimeError(min(errors, key=lambda x: float(x[0]))[1]) from None
            # gloo sometimes aborts a rank at its end, after the results are written.
            if not Path(folder, "result").exists():
                raise RuntimeError(f"a rank died: {failure}") from None
        return torch.load(f"{folder}/result", weights_only=True)


def report(world, sizes, rows):
    """Return the lines of one number of ranks, and whether all is right."""
    right = not rows["findings"] and not rows["hidden"]
    mesh = " ".join(f"{name}{size}" for name, size in sizes.items())
    errors = "  ".join(f"{kind} {x:.0e}" for kind, x in rows["errors"].items())
    seen = f"planted {rows['planted'] - len(rows['hidden'])} of {rows['planted']} seen"
    verdict = "agrees" if right else "DIFFERS" if rows["findings"] else "NOT ALL COMPARED"
    lines = [f"{world} ranks ({mesh}): {verdict}  {errors}  {seen}"]

    # What follows from the first difference says nothing new. The loss and the gradient of a step
    # are shown together.
    stages = list(dict.fromkeys(stage for stage, *_ in rows["findings"]))
    shown = [x for x in stages[:1] + stages[1:2] if x == stages[0] or "loss" in stages[0]]
    for stage, names, ranks, text in rows["findings"]:
        if stage in shown:
            some = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
            where = f" on ranks {' '.join(map(str, ranks))}" if ranks else ""
            lines.append(f"    {stage}: {some}{where}: {text}")
    if len(stages) > len(shown):
        lines.append(f"    {len(stages) - len(shown)} later comparisons differ too, from "
                     f"{stages[len(shown)]} on")  # fmt: skip
    for name in dict.fromkeys(name for name, _ in rows["hidden"]):
        ranks = " ".join(str(rank) for hidden, rank in rows["hidden"] if hidden == name)
        lines.append(f"    not compared: {name} on rank {ranks}. Its gradient times {PLANTED} "
                     "would not be seen. Is it zero there, but for rounding?")  # fmt: skip
    return lines, right


@command.one_line_errors
def main(argv):
    """Print a line for each number of ranks, and the differences. Return the exit status."""
    parser = command.parser(__doc__)
    parser.add_argument("file", metavar="FILE.py", help="or MODULE")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="replaces SETTINGS")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports a large package, once for all ranks
    given = command.settings_in(options.settings)
    subject = subject_of(vars(command.load_module(options.file)), given)
    right = True
    try:
        truth = launch(1, define, subject)
        print(f"{options.file}: {len(truth['before'])} parameters, tolerance {subject.tolerance:g}")
        for world in options.ranks:
            sizes = mesh_of(subject, world)
            rows = launch(world, examine, subject, truth, sizes)
            lines, agrees = report(world, sizes, rows)
            print("\n".join(lines), flush=True)
            right &= agrees
    except RuntimeError as failure:
        print(failure, file=sys.stderr)
        return 2
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

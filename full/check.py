"""Checks that people run on their own ranks: hold the folder to its definitions, in float64.

    python -m full check                  # both subjects, one after the other
    python -m full check parallel         # or grpo
    python -m full check parallel --all   # the slow rows too, of up to 8 ranks

Models, the ring and trees are held to theirs by the tests.
"""

import functools
import json
import math
import subprocess
import sys

import torch

import parallel
from full import equivalence
from full.model.parallelize import MODES, parallelize
from full.ranks.optimizer import LocalOptimizer, clip_grad_norm, reduce_gradients
from full.ranks.places import local
from full.ranks.plans import Grid, Plan
from full.steps import STEPS, step_error
from parallel import ADAMW, PLANS

# Plans ------------------------------------------------------------------------------------------
# The plans of parallel.py by its functions and by those of the folder, and every plan with a whole
# model.


class FullTraining:
    """What `parallel.Training` is, by the functions of the folder. Text: "d2t2 zero1"."""

    def __init__(self, model, text):
        plan, mode = text.split()
        self.grid = Grid(Plan.parse(plan))
        options = dict(attention=lambda: None, mode=mode)  # the check calls the ring of its own
        self.model = parallelize(model, self.grid.plan, device_mesh=self.grid, **options)
        make = functools.partial(torch.optim.AdamW, **ADAMW)
        self.optimizer = LocalOptimizer(self.model, make, zero=mode == "zero1")

    def reduce_and_clip(self, max_norm):
        # The check divides by the norm + 1e-6, as torch does, and the folder by the norm.
        reduce_gradients(self.model)
        norm = clip_grad_norm(self.model, math.inf)
        clip_grad_norm(self.model, (max_norm * norm / (norm + 1e-6)).item())
        return norm

    def parts(self, truth):
        """Yield this rank's entries of each parameter and gradient, and the true ones."""
        for name, p in self.model.named_parameters():
            region = self.model.part.places[name].region
            whole = truth.get_parameter(name)
            yield local(p), whole[region]
            yield local(p.grad), whole.grad[region]


def check_parallel(every=False) -> bool:
    """Compare every plan with one process, print a table of errors, and return whether it is ok.

    every: bool. The slow rows of equivalence.py too, of up to 8 ranks.
    """
    # parallel.py comes first: its ranks are forks, which need a process where autograd has not run.
    model = parallel.check_model()
    minimal = parallel.check_plans(PLANS, parallel.Training, model)
    errors = {f"parallel.py, {name}": x for name, x in minimal.items()}
    plans = {world: [f"{plan} {mode}" for plan in dict.fromkeys(x.split()[0] for x in PLANS[world])
                     for mode in MODES] for world in PLANS}  # fmt: skip
    minimal = parallel.check_plans(plans, FullTraining, model)
    errors |= {f"folder, {name}": x for name, x in minimal.items()}
    for name, error in errors.items():
        print(f"{error:.1e}  {'ok' if error <= 1e-10 else 'FAILED'}  {name}")
    ok = all(error <= 1e-10 for error in errors.values())

    # Then whole runs by every plan, tree and mode. Some must be refused.
    rows = [row for row in equivalence.ROWS if every or row.mark != "slow"]
    found = equivalence.found_of(rows)
    for row in rows:
        is_right = equivalence.is_right(row, found[row.name])
        refused = isinstance(found[row.name], str)
        worst = "refused" if refused else f"{max(found[row.name].values()):.1e}"
        print(f"{worst:7}  {'ok' if is_right else 'FAILED'}  {row.name}")
        ok = ok and is_right
        if not refused and row.bound == equivalence.BOUND:
            errors[row.name] = max(found[row.name].values())
    print(json.dumps({"check": "parallel", "ok": ok, "max_error": max(errors.values())}))
    return ok


def check_grpo() -> bool:
    """Do a step of every kind of setting by hand, print errors, and return whether all are ok."""
    errors = {name: step_error(**changes) for name, changes in STEPS.items()}
    for name, error in errors.items():
        print(f"{error:.1e}  {'ok' if error <= 1e-12 else 'FAILED'}  a step by hand: {name}")
    ok = all(error <= 1e-12 for error in errors.values())
    print(json.dumps({"check": "grpo", "ok": ok, "max_error": max(errors.values())}))
    return ok


# The command ------------------------------------------------------------------------------------

SUBJECTS = {"parallel": check_parallel, "grpo": check_grpo}


def main(argv) -> int:
    """`check [SUBJECT]`, `check parallel --all`: return 1 if an error is over its bound.

    Without a subject each of them is checked, in a process of its own.
    """
    if {"-h", "--help"} & {*argv}:
        print(__doc__)
        return 0
    if not argv:
        codes = [subprocess.run([sys.executable, "-m", "full", "check", subject]).returncode
                 for subject in SUBJECTS]  # fmt: skip
        return max(codes)
    if argv == ["parallel", "--all"]:
        return 0 if check_parallel(every=True) else 1
    subject, *rest = argv
    if subject not in SUBJECTS:
        raise ValueError(f"check {subject!r} is none of {', '.join(SUBJECTS)}")
    if rest:
        raise ValueError(f"check {subject} takes no {rest[-1]!r}")
    return 0 if SUBJECTS[subject]() else 1

"""Checks: hold the folder against the definitions of the five files, in float64.

    python -m full check                  # each of the five subjects, one after the other
    python -m full check ring             # or tree, models, parallel, grpo
    python -m full check parallel --all   # the slow rows too, of up to 8 ranks
    torchrun --nproc-per-node 8 -m full check ring         # on your ranks, with NCCL on CUDA
"""

import functools
import json
import math
import subprocess
import sys

import torch
import torch.nn.functional as F

import models
import parallel
from full import equivalence
from full.check_attention import check_ring, check_tree
from full.deltanet import Documents
from full.generate import forward_with_cache, generate, prefill
from full.hf import full_definition
from full.logprobs import token_logprobs
from full.model_config import LINEAR
from full.optimizer import LocalOptimizer, clip_grad_norm, reduce_gradients
from full.parallelize import MODES, parallelize
from full.places import local
from full.plans import Grid, Plan
from full.steps import STEPS, step_error
from full.tiny import HYBRID, TINY, tiny_model
from models import CHECK_FAMILIES, FULL, SLIDING
from parallel import ADAMW, PLANS

# Models -----------------------------------------------------------------------------------------
# Tiny models of every family, each path against `models.Definition`.

CASES = {
    **{model_type: (model_type, {}) for model_type in TINY | HYBRID},
    "llama biased, tied": ("llama", dict(
        tie_word_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True)),
    "qwen3 tied, slides": ("qwen3", dict(
        tie_word_embeddings=True, layer_types=(FULL, SLIDING), sliding_window=3)),
    "qwen3 linear": ("qwen3", dict(
        rope_parameters={FULL: {"rope_type": "linear", "factor": 3.0}})),
    "qwen3 yarn": ("qwen3", dict(rope_parameters={FULL: {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 2.0}})),
    "llama llama3": ("llama", dict(rope_parameters={FULL: {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}})),
    "qwen3_moe biased": ("qwen3_moe", dict(
        router_bias_rate=0.05, norm_topk_prob=False, sparse_layers=(0, 1))),
}  # fmt: skip


def relative_error(a, b):
    """Return |a - b| / |b|, infinite for a NaN. a may be on another device."""
    error = ((a.cpu().double() - b.double()).norm() / b.double().norm()).item()
    return error if error == error else math.inf


def worst_gradient(mine, got, model, want):
    """Return the largest relative error of a parameter's gradient, under one random upstream.

    got was computed with the model `mine`, want with `model`, which has the same weights.
    """
    upstream = torch.randn_like(want)
    grads = [
        torch.autograd.grad((x * upstream.to(x)).sum(), list(m.parameters()), retain_graph=True)
        for m, x in ((mine, got), (model, want))
    ]
    return max(map(relative_error, *grads))


def check_models(cases=None, more=()) -> bool:
    """Compare each path with the definition, float64; print a table. True if all rows are <= 1e-12.

    cases: some of CASES. Default: all. more: rows (path, error, bound) to show too.
    """
    torch.manual_seed(0)
    minimal = [models.check_family(family, tau).item()
               for family in CHECK_FAMILIES for tau in (0.0, 0.8)]  # fmt: skip
    rows = [("models.py: against itself token by token", torch.tensor(minimal).max().item(), 1e-12)]
    rows += [
        (f"{name}: {path}", error, 1e-12)
        for name, (model_type, changes) in (cases or CASES).items()
        for path, error in path_errors(tiny_model(model_type, **changes))
    ]

    rows += more

    # A table to read, and one line for a program. NaN counts as infinitely wrong.
    print(f"{'path against its definition':55} relative error")
    for name, error, bound in rows:
        print(f"{name:55} {error:.1e}  {'ok' if error <= bound else f'FAILED, above {bound}'}")
    ok = all(error <= bound for _, error, bound in rows)
    exact = max(error for _, error, bound in rows if bound == 1e-12)
    print(json.dumps({"check": "models", "ok": ok, "max_error": exact}))
    return ok


def path_errors(model, mine=None):
    """Yield (path, error) of one model: values, gradients, packing, cache, log-probs, generation.

    mine: the same model on another device, which is then compared with the definition on the CPU.
    """
    mine = mine or model
    device = mine.head_weight.device
    documents = [torch.randint(model.config.vocab_size, (n,)) for n in (7, 6, 1, 12)]
    truth = torch.cat([full_definition(model, d) for d in documents])
    alone = torch.cat([mine(d[None].to(device))[0] for d in documents])
    yield "one at a time", relative_error(alone, truth)
    yield "gradient, worst parameter", worst_gradient(mine, alone, model, truth)

    # Two rows of two documents, one PAD before each.
    with torch.no_grad():
        tokens = torch.cat([F.pad(d, (1, 0)) for d in documents]).view(2, 15)
        positions = torch.cat([torch.arange(-1, len(d)) for d in documents]).view(2, 15)
        ids = torch.where(positions < 0, -1, (positions < 0).cumsum(1))
        tokens, positions, there = (x.to(device) for x in (tokens, positions, ids))
        attention = Documents(models.packed_attention(there), there)
        packed = mine(tokens, positions=positions, attention=attention)
        yield "packed, PAD anywhere", relative_error(packed.cpu()[ids >= 0], truth)
        yield "cache, ragged rows", relative_error(*logits_by_cache(mine, documents, truth))

    # (8) and (9) from the definition's logits, with torch's own softmax.
    logp = (truth / 0.7).log_softmax(-1)
    targets = torch.randint(model.config.vocab_size, (len(truth),))
    hidden = torch.cat([mine.hidden(d[None].to(device))[0] for d in documents])
    options = dict(temperature=0.7, chunk=5)
    got = torch.stack(token_logprobs(hidden, mine.head_weight, targets.to(device), **options))
    want = torch.stack([logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
    yield "log-probs and entropy in chunks", relative_error(got, want)
    yield "gradient in chunks, worst parameter", worst_gradient(mine, got, model, want)

    # Seven rows of three prompts in two slots, against `models.generate` of all at once.
    prompts = [documents[n].tolist() for n in (0, 1, 1, 2, 0, 0, 1)]
    draws = torch.rand(7, 9, dtype=torch.float64).tolist()
    ways = [[models.Row(prompt, u) for prompt, u in zip(prompts, draws)] for _ in range(2)]
    options = dict(max_new_tokens=9, temperature=0.9, end=range(20))
    generate(mine, ways[0], slots=2, **options)
    # The core's cache has no states.
    (generate if LINEAR in model.config.layer_types else models.generate)(model, ways[1], **options)
    same = all(a.tokens == b.tokens for a, b in zip(*ways))
    logprobs = [sum([row.logprobs for row in rows], []) for rows in ways]
    got, want = (torch.tensor(values, dtype=torch.float64) for values in logprobs)
    yield "generation by slots", relative_error(got, want) if same else math.inf


def logits_by_cache(model, documents, truth):
    """Return logits by halves as ragged prompts, then token by token, and the same of `truth`."""
    got = []
    want = []
    # A row: a document, its logits by the definition, and how many of its tokens the cache has.
    parts = zip(documents, truth.split([len(d) for d in documents]))
    rows = [(d, z, (len(d) + 1) // 2) for d, z in parts]
    cache, logits = prefill(model, [d[:n].tolist() for d, _, n in rows])
    while True:
        got += [*logits]
        want += [z[n - 1] for _, z, n in rows]
        keep = [b for b, (d, _, n) in enumerate(rows) if n < len(d)]
        if not keep:
            return torch.stack(got), torch.stack(want)

        # Rows at their end leave the cache, and the others are fed one token more.
        cache.select(keep)
        rows = [(d, z, n + 1) for d, z, n in (rows[b] for b in keep)]
        tokens = torch.stack([d[n - 1 : n] for d, _, n in rows])
        logits = forward_with_cache(model, cache, tokens.to(logits.device))


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

SUBJECTS = {
    "ring": check_ring, "tree": check_tree, "models": check_models, "parallel": check_parallel,
    "grpo": check_grpo,
}  # fmt: skip


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

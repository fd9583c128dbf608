"""Checks: hold the folder against the definitions of the five files, in float64.

    python -m full check                  # each of the four subjects, one after the other
    python -m full check ring             # or tree, models, parallel
    torchrun --nproc-per-node 8 -m full check ring         # on your ranks, with NCCL on CUDA
"""

import functools
import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import models
import parallel
import ring_attention as minimal_ring
import tree_attention as minimal_tree
from full.chunks import tree_backward, tree_scores
from full.generate import forward_with_cache, generate, prefill
from full.hf import full_definition
from full.logprobs import token_logprobs
from full.masks import Mask
from full.optimizer import LocalOptimizer, clip_grad_norm, reduce_gradients
from full.parallelize import MODES, parallelize
from full.places import local
from full.plans import Grid, Plan
from full.ranks import is_rank_0
from full.ring import METHODS, ring_attention, ring_of, shard, unshard
from full.tiny import TINY, tiny_model
from full.trie import TokenTrie
from models import CHECK_FAMILIES, FULL, SLIDING
from parallel import ADAMW, PLANS
from ring_attention import attention_definition, launch, repeat_key_heads
from tree_attention import CheckModel, check_loss, definition


# The ring ---------------------------------------------------------------------------------------
# Every method and mask against `ring_attention.attention_definition`.


def examples(length):
    """Return one mask of every kind for `length` tokens; a batch of 2 where its rows can differ."""
    generator = torch.Generator().manual_seed(0)
    valid_BS = torch.rand(2, length, generator=generator) > 0.3
    valid_BS[1, : length // 2] = False  # a rank of two may hold nothing that is valid
    doc_BS = torch.arange(length) * torch.tensor([[3], [7]]) // max(length, 1)

    # Subtrees of 2 tokens inside subtrees of 6 inside subtrees of 24. Each size divides the next,
    # so that they nest.
    end = np.arange(1, length + 1)
    for size in (2, 6, 24):
        end[::size] = np.minimum(np.arange(0, length, size) + size, length)
    tree = Mask.tree(end)
    return {
        "full": None,
        "causal": Mask.causal(length),
        "documents": Mask.documents(doc_ids=doc_BS.masked_fill(doc_BS == 1, -1)),
        "positions": Mask.documents(position_ids=torch.arange(length) % torch.tensor([[11], [4]])),
        "blocks": Mask.blocks(torch.arange(length).expand(2, -1) // 5, valid_BS),
        "padding": Mask.padding(valid_BS),
        "tree": tree,
        "window": Mask.causal(length, window=5),
        "tree, window": tree.with_window(3),
    }


def relative(found, truth):
    """Return the norm of the error over the norm of the truth: 1 for a wrong zero, inf for NaN."""
    # A norm of the whole tensor: elements near 0 have no relative error that says anything. Where
    # both are -inf, the lse of a query that sees nothing, there is no error.
    both_blind = (found == -math.inf) & (truth == -math.inf)
    error = (found.double() - truth).masked_fill(both_blind, 0.0).norm().item()
    size = truth.masked_fill(both_blind, 0.0).norm().item()
    return error / (size or 1.0) if math.isfinite(error) else math.inf


def compare(
    mask, group, dtype, tokens, device="cpu", *, heads=(12, 2), width=16, attention=None, **options
):  # fmt: skip
    """Return the errors of (out, dq, dk, dv) of `ring_attention`: the worst of all ranks.

    mask, group: as in `ring_attention`. dtype, device: of the inputs. tokens, heads, width: S,
    (H, G) and D. options: of `ring_attention`.
    attention: a function of this rank's q, k, v, and group=, that returns out, to compare instead.

    The truth is the definition in float64, of the same rounded inputs.
    """
    # Every rank draws the same whole sequence, and a random upstream gradient.
    generator = torch.Generator().manual_seed(7)
    h, g = heads
    shapes = [(2, n, tokens, width) for n in (h, g, g, h)]
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    drawn = [x.to(device, dtype) for x in drawn]
    visible = (mask or Mask.full(tokens)).dense().to(device)
    place = dict(dim=2, group=group)
    attention = attention or functools.partial(ring_attention, mask=mask, **options)

    def defined(q, k, v):
        return attention_definition(q, *repeat_key_heads(q, k, v), visible)[0]

    def run(function, q, k, v, upstream):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, upstream)
        return [x.detach().double() for x in (out, *grads)]

    # Each rank computes its tokens. Then all of them see the whole results.
    truth = run(defined, *(x.double() for x in drawn))
    of_shards = functools.partial(attention, group=group)
    found = run(of_shards, *(shard(x, **place) for x in drawn))
    found = [unshard(x, **place, length=tokens) for x in found]
    errors = [relative(a, b) for a, b in zip(found, truth, strict=True)]

    # Every rank returns the largest error of all ranks, so that all of them print the same.
    return np.max(ring_of(group).gather(lambda: errors), axis=0).tolist()


def by_way(group, error):
    """Return {column: error(method=..)} for the ways a group can share 12 heads."""
    # The ring and the all-gather run on any number of ranks.
    methods = METHODS if 12 % ring_of(group).world == 0 else METHODS[:2]
    return {method[:8]: error(method=method) for method in methods}


def rows_of_rank(tokens, device, more=None):
    """Return [(table, row, budget, {column: value})] of the worlds of this rank; rank 0 has all."""
    # A group is made by all ranks, its members or not. Only its members compute.
    rank = dist.get_rank()
    total = dist.get_world_size()
    worlds = [world for world in sorted({1, 2, 3, 4, total}) if world <= total]
    groups = {world: dist.new_group(list(range(world))) for world in worlds if world < total}
    groups[total] = dist.group.WORLD
    rows = []
    for world in worlds:
        if rank >= world:
            continue
        table = f"float64, world {world}"
        for name, mask in examples(tokens).items():
            given = mask, groups[world], torch.float64, tokens, device
            row = by_way(groups[world], lambda **way: max(compare(*given, **way)))  # noqa: B023
            rows.append((table, name, 1e-12, row))

        # ring_attention.py knows the causal mask alone, and shards of one length.
        if 12 % world == 0 and device == "cpu":
            minimal = [minimal_ring.ring_attention, minimal_ring.allgather_attention,
                       minimal_ring.ulysses_attention]  # fmt: skip
            given = Mask.causal(8 * world), groups[world], torch.float64, 8 * world
            row = {way.__name__[:6]: max(compare(*given, attention=way)) for way in minimal}
            rows.append((f"float64, ring_attention.py, world {world}", "causal", 1e-12, row))

    return rows + (more(groups[total], device) if more else [])


def check_ring(more=None) -> bool:
    """Print every error with its budget; return whether all are in it. 4 ranks, or torchrun's.

    more: a function of a group and a device. It returns more rows.
    """
    # 23 tokens divide by no number of ranks, so that shards are unequal.
    if not os.environ.get("RANK"):
        rows = launch(4, rows_of_rank, 23, "cpu", more)[0]
    else:
        # NCCL where there is CUDA, gloo elsewhere.
        device = "cpu"
        backend = "gloo"
        if torch.cuda.is_available():
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            backend = "nccl"
            torch.cuda.set_device(device)
        dist.init_process_group(backend)
        rows = rows_of_rank(23, device, more)
        dist.barrier()
        dist.destroy_process_group()

    # Every rank has the errors of all ranks; the first one prints them.
    if not is_rank_0():
        return True

    # One table per world and dtype, one row per mask, one column per method.
    failed = []
    largest = 0.0  # error in float64: what the README quotes
    for table, rows_of_table in itertools.groupby(rows, lambda row: row[0]):
        for n, (_, name, budget, row) in enumerate(rows_of_table):
            if n == 0:
                columns = "".join(f" {column:>8}" for column in row)
                print(f"\n{table:>24}{columns}   budget")

            # NaN is not below any budget, so it fails too.
            ok = all(value <= budget for value in row.values())
            numbers = "".join(f" {value:8.3g}" for value in row.values())
            print(f"{name:>24}{numbers}   {budget:.3g} {'ok' if ok else 'FAILED'}")
            failed += [] if ok else [name]
            largest = max([largest, *row.values()]) if "float64" in table else largest
    print(json.dumps({"check": "ring", "ok": not failed, "max_error": largest}))
    return not failed


# Trees ------------------------------------------------------------------------------------------
# Every shape of tree, every chunk size, and tree_attention.py by itself.


class TinyModel(CheckModel):
    """`CheckModel` with a window in every second layer, as in Gemma."""

    def __init__(self):
        super().__init__()
        self.forwarded = 0  # tokens that `hidden` was given

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        self.forwarded += tokens_BS.numel()
        attend = attention or self.plain_attention

        def attention_of_layer(q, k, v, /, *, layer, scale, window=None):
            return attend(q, k, v, layer=layer, scale=scale, **self.layer_options(layer))

        return super().hidden(tokens_BS, positions=positions, attention=attention_of_layer)

    def layer_options(self, layer):
        """Return the options of `attention` in addition to those of `CheckModel`."""
        return dict(window=None if layer % 2 else 3)

    @staticmethod
    def plain_attention(q, k, v, /, *, layer, scale, window):
        # One sequence by itself, by the formulas of attention as they stand.
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        visible = (distance >= 0) & (distance < (window or math.inf))
        k, v = repeat_key_heads(q, k, v)
        s = q @ k.mT * scale
        return s.masked_fill(~visible.to(s.device), -math.inf).softmax(-1) @ v


def forests(seed=0):
    """Return {name: sequences}: every shape of a tree that the walk could get wrong."""
    rng = np.random.default_rng(seed)

    def draw(n):
        return rng.integers(0, 11, n).tolist()

    # The dictionary draws in its order, so add a new shape at its end: the others stay.
    stem = draw(7)
    tips = [[t] for t in range(5)]
    return {
        "one token": [[3], [3], [4]],
        "one sequence": [draw(9)],
        "duplicates": [stem, stem, draw(4), stem],
        "prefixes": [stem[:n] for n in (7, 3, 1, 7, 5)],
        "forks at 0": [[t, *draw(3)] for t in range(4)],
        "forks at 1": [[2, t, *draw(3)] for t in range(4)],
        "forks at the end": [stem + tip for tip in tips],
        "caterpillar": [stem[:n] + [9 - stem[n], *draw(2)] for n in range(1, 7)],
        "star": [stem + tip + draw(4) for tip in tips],
        "binary": [[*a, *b, *draw(2)] for a in ([1, 2], [1, 3]) for b in ([4, 5], [6, 5])],
        "forest": [rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(14)],
    }


def example_loss(i, logprobs, entropy, values=None):
    """Return `check_loss` with a term of a critic's values, if there are any."""
    # All of it depends on i, so that a gradient that reaches the wrong sequence shows. Some tokens
    # have no entropy term. No sum over tokens can replace the square of the sum in `check_loss`.
    weights = torch.sin(torch.arange(len(logprobs)) * 7.0 + i).to(logprobs)
    loss = check_loss(i, logprobs, weights.relu() * entropy)
    if values is None:
        return loss
    return loss + ((values - 0.5) * weights).square().sum()


def _outcome(model, way, *given, **options):
    """Return loss, log-probs and every gradient after way(model, ..)."""
    model.zero_grad()
    loss, logprobs, *_ = way(model, *given, temperature=0.7, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [x.cpu() for x in (torch.as_tensor(loss), *logprobs, *grads)]


def _one_graph(model, trie, loss_fn, *, temperature):
    """Pack the whole tree, and run one backward of it."""
    scores = tree_scores(model, trie, temperature=temperature)
    loss = torch.stack([loss_fn(i, *score) for i, score in enumerate(scores)]).sum()
    loss.backward()
    return loss.detach(), [score[0].detach() for score in scores]


def _tree_rows(model, cases, mine=None):
    """Yield (row, {column: the largest relative error of loss, log-probs and every gradient}).

    Columns: one graph; chunk sizes, each the worse of with and without recomputation.
    mine: the same model on another device, to compare with the definition on the CPU.
    """
    mine = model if mine is None else mine
    for name, sequences in cases.items():
        sequences = [torch.tensor(x) for x in sequences]
        trie = TokenTrie(sequences)
        truth = _outcome(model, definition, sequences, example_loss)

        def error(way, trie=trie, truth=truth, **options):
            found = _outcome(mine, way, trie, example_loss, **options)
            return max(relative(a, b) for a, b in zip(found, truth, strict=True))

        # Chunks of 1 token cut every segment and every fork; "path" holds the longest path. A
        # chunk with others below runs twice with recomputation, so both ways are compared.
        line = {"packed": error(_one_graph)}
        sizes = {"1": 1, "2": 2, "3": 3, "5": 5, "path": int(trie.lengths.max()), "all": None}
        for column, size in sizes.items():
            errors = [error(tree_backward, max_tokens=size, recompute=x) for x in (False, True)]
            line[column] = max(errors)

        # Right gradients do not show that a token was computed once; this does.
        if isinstance(model, TinyModel):
            mine.forwarded = 0
            tree_backward(mine, trie, example_loss, max_tokens=2)
            line["twice"] = abs(mine.forwarded - len(trie))
        yield name, line


def check_tree(more=None) -> bool:
    """Print every error with its budget; return whether none is over. more: tables to show too."""
    torch.set_num_threads(1)
    tables = {"by max_tokens": dict(_tree_rows(TinyModel(), forests()))}
    tables["tree_attention.py"] = {"by itself": {"worst": minimal_tree.check()}}
    tables |= more or {}
    worst = 0.0
    for name, rows in tables.items():
        columns = next(iter(rows.values()))
        print(f"\n{name:>28}" + "".join(f" {x:>11}" for x in columns) + "   budget 1e-10")
        for row, line in rows.items():
            # A NaN is smaller than any budget to `max`, so it counts as infinite.
            values = [math.inf if math.isnan(x) else x for x in line.values()]
            worst = max(worst, *values)
            ok = "ok" if max(values) <= 1e-10 else "FAILED"
            print(f"{row:>28}" + "".join(f" {x:11.1e}" for x in values) + f"   {ok}")
    print(json.dumps({"check": "tree", "ok": worst <= 1e-10, "max_error": worst}))
    return worst <= 1e-10


# Models -----------------------------------------------------------------------------------------
# Tiny models of every family, each path against `models.logits_definition`.

CASES = {
    **{model_type: (model_type, {}) for model_type in TINY},
    "llama biased, tied": ("llama", dict(
        tie_word_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True)),
    "qwen3 tied, slides": ("qwen3", dict(
        tie_word_embeddings=True, layer_types=(FULL, SLIDING), sliding_window=3)),
    "qwen3 linear": ("qwen3", dict(
        rope_parameters={FULL: {"rope_type": "linear", "factor": 3.0}})),
    "qwen3_moe biased": ("qwen3_moe", dict(
        router_bias_rate=0.05, norm_topk_prob=False, sparse_layers=(0, 1))),
    "gemma3_text capped": ("gemma3_text", dict(final_logit_softcapping=4.0)),
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
        packed = mine(tokens, positions=positions, attention=models.packed_attention(there))
        yield "packed, PAD anywhere", relative_error(packed.cpu()[ids >= 0], truth)
        yield "cache, ragged rows", relative_error(*logits_by_cache(mine, documents, truth))

    # (8) and (9) from the definition's logits, with torch's own softmax.
    logp = (truth / 0.7).log_softmax(-1)
    targets = torch.randint(model.config.vocab_size, (len(truth),))
    hidden = torch.cat([mine.hidden(d[None].to(device))[0] for d in documents])
    options = dict(temperature=0.7, softcap=model.config.final_logit_softcapping, chunk=5)
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
    models.generate(model, ways[1], **options)
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

    eps = 0.0

    def __init__(self, model, text):
        plan, mode = text.split()
        self.grid = Grid(Plan.parse(plan))
        options = dict(attention=lambda: None, mode=mode)  # here c ranks have rows of their own
        self.model = parallelize(model, self.grid.plan, device_mesh=self.grid, **options)
        make = functools.partial(torch.optim.AdamW, **ADAMW)
        self.optimizer = LocalOptimizer(self.model, make, zero=mode == "zero1")

    def reduce_and_clip(self, max_norm):
        reduce_gradients(self.model)
        return clip_grad_norm(self.model, max_norm)

    def parts(self, truth):
        """Yield this rank's entries of each parameter and gradient, and the true ones."""
        for name, p in self.model.named_parameters():
            region = self.model.part.places[name].region
            whole = truth.get_parameter(name)
            yield local(p), whole[region]
            yield local(p.grad), whole.grad[region]


def check_parallel(more=None) -> bool:
    """Compare every plan with one process, print a table of errors, and return whether it is ok.

    more: a function that returns {name: error} of more cases.
    """
    # parallel.py comes first: its ranks are forks, which need a process where autograd has not run.
    model = parallel.check_model()
    minimal = parallel.check_plans(PLANS, parallel.Training, model)
    errors = {f"parallel.py, {name}": x for name, x in minimal.items()}
    plans = {world: [f"{plan} {mode}" for plan in dict.fromkeys(x.split()[0] for x in PLANS[world])
                     for mode in MODES] for world in PLANS}  # fmt: skip
    minimal = parallel.check_plans(plans, FullTraining, model)
    errors |= {f"folder, {name}": x for name, x in minimal.items()}
    errors |= more() if more else {}
    for name, error in errors.items():
        print(f"{name:36} {error:.1e}  {'ok' if error <= 1e-10 else 'FAILED'}")
    ok = all(error <= 1e-10 for error in errors.values())
    print(json.dumps({"check": "parallel", "ok": ok, "max_error": max(errors.values())}))
    return ok


# The command ------------------------------------------------------------------------------------

SUBJECTS = {
    "ring": check_ring, "tree": check_tree, "models": check_models, "parallel": check_parallel,
}  # fmt: skip


def main(argv) -> int:
    """`check [SUBJECT]`: return 1 if an error is over its bound.

    Without a subject each of them is checked, in a process of its own.
    """
    if not argv:
        codes = [subprocess.run([sys.executable, "-m", "full", "check", subject]).returncode
                 for subject in SUBJECTS]  # fmt: skip
        return max(codes)
    subject, *rest = argv
    if subject not in SUBJECTS:
        raise ValueError(f"check {subject!r} is none of {', '.join(SUBJECTS)}")
    if rest:
        raise ValueError(f"check {subject} takes no {rest[-1]!r}")
    return 0 if SUBJECTS[subject]() else 1

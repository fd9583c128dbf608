"""Print errors in bfloat16 against float64, next to those of the plain way on one process.

    python tests/bench/precision.py              # the table of full/RESULTS.md, on Linux
    python tests/bench/precision.py --seeds 1    # in a third of the time

Weights and inputs are numbers of bfloat16, the same for the truth in float64. An error is the norm
of the difference over the norm of the truth, for gradients the root mean square over the tensors.
Tests hold the folder's attention, trees, packed rows, plans and log-probs to such bounds.
"""

import argparse
import itertools
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.functional import linear, scaled_dot_product_attention

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

import models
import parallel
import ring_attention as ring
import tree_attention as tree
from full.learn import generate as full_generate
from full.model.hf import load_hf
from full.model.parallelize import parallelize
from full.ranks import optimizer, plans
from released import make

HALF, EXACT = torch.bfloat16, torch.float64


def errors(found, plain, truth):
    """Return squared errors (2, 2): of out and of gradients, by `found` and by `plain`.

    found, plain, truth: lists of out and gradients. On ranks, each has a part of them.
    """
    sums = torch.zeros(len(truth), 3, dtype=EXACT)
    for n, (a, b, c) in enumerate(zip(found, plain, truth, strict=True)):
        sums[n] = torch.stack([(x.detach().double() - y).square().sum()
                               for x, y in ((a, c), (b, c), (c, 0))])  # fmt: skip
    if dist.is_initialized():
        dist.all_reduce(sums)
    relative = sums[:, :2] / sums[:, 2:]
    return torch.stack([relative[0], relative[1:].sum(0) / max(1, len(truth) - 1)])


def of_leaves(function, leaves, upstream, dtype=HALF):
    """Return out and the gradient of each leaf of a function."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def attention(folder, factor=1):
    """Yield rows of 512 tokens over 2 ranks, 8 heads and 2 key heads of 64, against SDPA."""
    q, k, v, dout = (torch.randn(1, heads, 512, 64).to(HALF) for heads in (8, 2, 2, 8))
    given = [factor * q, k, v]
    plain = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    expected = [of_leaves(plain, given, dout, dtype) for dtype in (HALF, EXACT)]
    ways = {"ring": ring.ring_attention, "all-gather": ring.allgather_attention,
            "all-to-all": ring.ulysses_attention}  # fmt: skip

    def on_rank():
        own = ring.zigzag_indices(512, dist.get_rank(), 2)
        parts = [[x[:, :, own] for x in xs] for xs in (given, [dout], *expected)]
        return {name: errors(of_leaves(way, parts[0], *parts[1]), *parts[2:])
                for name, way in ways.items()}  # fmt: skip

    for name, error in ring.launch(2, on_rank)[0].items():
        yield f"{name}, queries times {factor}", error


def loss_of(i, logprobs, entropies):
    weights = torch.cos(torch.arange(len(logprobs)) * 3.0 + i).to(logprobs)
    return (weights * logprobs + 0.1 * entropies).sum()


def in_one_graph(scores):
    """Run a backward of the losses of all sequences. Return what `tree.definition` returns."""
    sum(loss_of(i, *score) for i, score in enumerate(scores)).backward()
    return None, [score[0] for score in scores]


def packed(model, sequences, attention):
    """Return the scores of sequences in one row."""
    hidden_NM = model.hidden(torch.cat(sequences)[None], attention=attention)[0]
    parts = zip(hidden_NM.split([len(x) for x in sequences]), sequences)
    return [model.logprobs(h_nM[:-1], x[1:]) for h_nM, x in parts]


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=HALF)


def scores_of_logits(model, tokens):
    """Return log-probs and entropies from transformers' logits."""
    logp_SV = models.widen(model(tokens[None]).logits[0, :-1]).log_softmax(-1)
    logprobs_S = logp_SV.gather(1, tokens[1:, None])[:, 0]
    return logprobs_S, -(logp_SV.exp() * logp_SV).sum(-1)


def whole_model(folder):
    """Yield rows of 4 sequences of 64 tokens that share prefixes. Plain: each one by itself."""
    stem = torch.randint(300, (40,))
    sequences = [torch.cat([stem[:n], torch.randint(300, (64 - n,))]) for n in (40, 32, 40, 32)]

    def run(model, way):
        model.zero_grad()
        out = torch.cat(way(model)[1])
        return [out, *(p.grad for _, p in sorted(model.named_parameters(), key=lambda x: x[0]))]

    ours, plain, exact = (models.load(folder).to(x) for x in (HALF, HALF, EXACT))
    expected = [run(x, lambda x: tree.definition(x, sequences, loss_of)) for x in (plain, exact)]
    theirs = transformers_model(folder)
    found = run(theirs, lambda x: in_one_graph([scores_of_logits(x, y) for y in sequences]))
    yield "models.py, against transformers", errors(expected[0], found, expected[1])

    attention = models.packed_attention(torch.arange(4).repeat_interleave(64)[None])
    for name, way in {
        "tree, packed": lambda x: in_one_graph(tree.tree_logprobs(x, sequences)),
        "tree, depth first": lambda x: tree.tree_backward(x, sequences, loss_of),
        "tree, chunks": lambda x: tree.tree_backward(x, sequences, loss_of, 16),
        "packed row": lambda x: in_one_graph(packed(x, sequences, attention)),
    }.items():
        yield name, errors(run(ours, way), *expected)

    def of_plan(text):
        training = parallel.Training(models.load(folder).to(HALF), text)
        own = [*range(dist.get_rank(), 4, 2)] if "d2" in text else [*range(4)]
        some = [sequences[i] for i in own]
        out = tree.definition(training.model, some, lambda n, *x: loss_of(own[n], *x))[1]
        training.reduce_and_clip(math.inf)
        found, *others = [torch.cat(out)], *([x[0].view(4, -1)[own].flatten()] for x in expected)
        for whole, other in zip((plain, exact), others):
            pairs = [*training.parts(whole)][1::2]  # of gradients
            other += [x for _, x in pairs]
        return errors(found + [x for x, _ in pairs], *others)

    yield from ring.launch(2, lambda: {text: of_plan(text) for text in PLANS})[0].items()


def log_probs(folder):
    """Yield rows of the log-probs of 300 states of width 256 for 2000 vocabulary entries."""
    given = [torch.randn(300, 256).to(HALF), (torch.randn(2000, 256) / 4).to(HALF)]
    targets, upstream = torch.randint(2000, (300,)), torch.randn(300)

    def plain(h, w):
        return models.widen(linear(h, w)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    expected = [of_leaves(plain, given, upstream, dtype) for dtype in (HALF, EXACT)]

    def chunked(h, w):
        return models.Transformer.logprobs(SimpleNamespace(head_weight=w, chunk=64), h, targets)[0]

    def parallel_over_ranks(h, w):
        model, first = SimpleNamespace(head_weight=w), 1000 * dist.get_rank()
        return parallel.vocab_parallel_logprobs(model, first, None, h, targets)[0]

    def on_rank():
        given[1] = parallel.own_chunk(given[1], None)
        parts = [[*x[:2], parallel.own_chunk(x[2], None)] for x in expected]
        return errors(of_leaves(parallel_over_ranks, given, upstream), *parts)

    yield "log-probs, chunked", errors(of_leaves(chunked, given, upstream), *expected)
    yield "log-probs, vocabulary-parallel", ring.launch(2, on_rank)[0]


def adamw(folder):
    """Yield rows of the weights after 300 steps of lr 1e-4, against torch.optim.AdamW."""
    start, mean = torch.randn(2, 64, 64).to(HALF)
    gradients = mean + torch.randn(300, 64, 64).to(HALF)
    make_torch = lambda x: torch.optim.AdamW(x, lr=1e-4)

    def of_folder(model):
        given = dict(device_mesh=plans.Grid(plans.Plan()), compute_dtype=HALF)
        return optimizer.LocalOptimizer(parallelize(model, plans.Plan(), **given), make_torch)

    found = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for dtype, way in (
        (HALF, lambda x: make_torch(x.parameters())), (EXACT, lambda x: make_torch(x.parameters())),
        (HALF, lambda x: parallel.ZeroAdamW(x, parallel.Grid("d1"), lr=1e-4)),
        (torch.float32, of_folder),
    ):  # fmt: skip
        model = torch.nn.Linear(64, 64, bias=False).to(dtype)
        model.weight.data.copy_(start)
        stepping = way(model)
        for gradient in gradients:
            model.weight.grad = gradient.to(model.weight.grad_dtype)
            stepping.step()
        found.append([model.weight])
    yield "AdamW with masters", errors(found[2], *found[:2])
    yield "full AdamW with masters", errors(found[3], *found[:2])
    dist.destroy_process_group()


def generation(folder):
    """Yield rows of the log-probs of 32 sampled tokens of 3 rows, against one forward of theirs."""
    exact, theirs = models.load(folder).to(EXACT), transformers_model(folder)
    ways = {"generation": (models.load(folder).to(HALF), models.generate),
            "full generation": (load_hf(folder), full_generate.generate)}  # fmt: skip
    for name, (model, way) in ways.items():
        rows = [models.Row(torch.randint(300, (n,)).tolist(), torch.rand(32).tolist())
                for n in (5, 17, 30)]  # fmt: skip
        way(model, rows, max_new_tokens=32)
        told = [torch.tensor(row.logprobs)[row.mask] for row in rows]
        rolled_out = [(torch.tensor(row.tokens), row.mask) for row in rows]
        plain = [scores_of_logits(theirs, x)[0][mask] for x, mask in rolled_out]
        truth = [tree.definition(exact, [x], loss_of)[1][0][mask] for x, mask in rolled_out]
        yield name, errors(*([torch.cat(x)] for x in (told, plain, truth)))


PLANS = "t2", "t2 sp", "d2", "d2 fsdp"
SUBJECTS = attention, partial(attention, factor=4), whole_model, log_probs, adamw, generation


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        make("qwen3", folder, layers=4, width=128)
        for seed, subject in itertools.product(seeds, SUBJECTS):
            torch.manual_seed(seed)
            for name, error in subject(folder):
                rows[name] = rows.get(name, 0) + error / len(seeds)
    print("| | out | plain | times | gradients | plain | times |\n|---|---|---|---|---|---|---|")
    for name, error in rows.items():
        cells = [f"{a:.1e} | {b:.1e} | {a / b:.2f}" if b else " | | " for a, b in error.sqrt()]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

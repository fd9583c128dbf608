"""Print errors in bfloat16 against float64, next to those of a plain way in bfloat16.

    python tests/bench/precision.py              # the table of full/RESULTS.md, on Linux
    python tests/bench/precision.py --seeds 1    # in a third of the time

Weights are numbers of bfloat16, the same for the truth in float64. An error is the norm of the
difference over the norm of the truth, the root mean square over tensors and seeds. The five's own
checks print such multiples of attention, trees and plans.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from harness import print_table

import models
import parallel
from full.learn import generate as full_generate
from full.model.hf import load_hf
from full.model.parallelize import parallelize
from full.ranks import optimizer, plans
from released import make
from tree_attention import definition

HALF, EXACT = torch.bfloat16, torch.float64


def squares(found, plain, truth):
    """Return squared errors of two lists of tensors, each the mean over the list."""
    pairs = [[((x.detach().double() - c).norm() / c.norm()) ** 2 for x in (a, b)]
             for a, b, c in zip(found, plain, truth, strict=True)]  # fmt: skip
    return torch.tensor(pairs).mean(0)


def loss_of(i, logprobs, entropies):
    weights = torch.cos(torch.arange(len(logprobs)) * 3.0 + i).to(logprobs)
    return (weights * logprobs + 0.1 * entropies).sum()


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=HALF)


def scores_of_logits(model, tokens):
    """Return log-probs and entropies from transformers' logits."""
    logp_SV = models.widen(model(tokens[None]).logits[0, :-1]).log_softmax(-1)
    logprobs_S = logp_SV.gather(1, tokens[1:, None])[:, 0]
    return logprobs_S, -(logp_SV.exp() * logp_SV).sum(-1)


def training(folder):
    """Yield rows of 4 sequences of 64 tokens, against transformers."""
    sequences = [*torch.randint(300, (4, 64))]
    theirs = transformers_model(folder)
    scores = [scores_of_logits(theirs, tokens) for tokens in sequences]
    sum(loss_of(i, *score) for i, score in enumerate(scores)).backward()
    results = [(theirs, [score[0] for score in scores])]
    for dtype in (HALF, EXACT):
        model = models.load(folder).to(dtype)
        results.append((model, definition(model, sequences, loss_of)[1]))
    plain, ours, truth = ([torch.cat(x)] for _, x in results)
    yield "models.py: log-probs", squares(ours, plain, truth)
    parameters = [dict(model.named_parameters()) for model, _ in results]
    plain, ours, truth = ([x[name].grad for name in parameters[0]] for x in parameters)
    yield "models.py: gradients", squares(ours, plain, truth)


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
    dist.destroy_process_group()
    plain, truth, five, folders = found
    yield "AdamW with masters, parallel.py", squares(five, plain, truth)
    yield "AdamW with masters, full", squares(folders, plain, truth)


def generation(folder):
    """Yield rows of the log-probs of 32 sampled tokens of 3 rows, against one forward of theirs."""
    exact, theirs = models.load(folder).to(EXACT), transformers_model(folder)
    ways = {"models.py": (models.load(folder).to(HALF), models.generate),
            "full": (load_hf(folder), full_generate.generate)}  # fmt: skip
    for name, (model, way) in ways.items():
        rows = [models.Row(torch.randint(300, (n,)).tolist(), torch.rand(32).tolist())
                for n in (5, 17, 30)]  # fmt: skip
        way(model, rows, max_new_tokens=32)
        told = torch.cat([torch.tensor(row.logprobs)[row.mask] for row in rows])
        rolled_out = [(torch.tensor(row.tokens), row.mask) for row in rows]
        plain = torch.cat([scores_of_logits(theirs, x)[0][mask] for x, mask in rolled_out])
        truth = [definition(exact, [x], loss_of)[1][0][mask] for x, mask in rolled_out]
        yield f"log-probs while sampling, {name}", squares([told], [plain], [torch.cat(truth)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        make("qwen3", folder, layers=4, width=128)
        for seed in range(seeds):
            for subject in (training, adamw, generation):
                torch.manual_seed(seed)
                for name, found in subject(folder):
                    rows[name] = rows.get(name, 0) + found / seeds
    rows = {name: found.sqrt().tolist() for name, found in rows.items()}
    print_table(dict(what=name, error=a, plain=b, times=a / b) for name, (a, b) in rows.items())


if __name__ == "__main__":
    main()

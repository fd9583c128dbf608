"""What `--exact` does and costs: `python tests/bench/measure_exact.py [--dtypes bfloat16 ..]`.

A row for each family, dtype and way to sample: the share of sampled tokens whose log-prob has the
trainer's bits, without and with `--exact`, and CPU seconds of sampling and of a forward and
backward of all rollouts.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import models
from full.exact import make_exact, packed_attention, require_exact_kernels
from full.generate import generate
from full.masks import Mask
from full.micro_batches import masked_attention
from full.packing import PackedBatches
from full.tiny import TINY, tiny_model

TAU = 0.7


def ordinary_attention(document_1S):
    return masked_attention(Mask.documents(doc_ids=document_1S), None)


def fork(row):
    """Two rows that go on from this one, unless it is one of them."""
    if hasattr(row, "forked"):
        return []
    children = []
    for n in range(2):
        child = models.Row(row.tokens)
        child.mask, child.logprobs, child.new = row.mask[:], row.logprobs[:], row.new
        child.draws, child.forked = np.roll(row.draws, n), True
        children.append(child)
    return children


WAYS = {"rows": {}, "slots": dict(slots=5), "forks": dict(after=fork)}


def measured(model, is_exact, how, new=60):
    """Return the share of equal bits, and the CPU seconds of sampling and training."""
    rng = np.random.default_rng(0)
    size = model.config.vocab_size
    prompts = [rng.integers(0, size, n).tolist() for n in (1, 3, 3, 17, 30, 90)]
    rows = [models.Row(prompt, rng.random(new)) for prompt in prompts * 4]
    began = time.process_time()
    rows = generate(model, rows, max_new_tokens=new, temperature=TAU, end=(7,), **how)
    sampled = time.process_time()
    attention = packed_attention if is_exact else ordinary_attention
    batches = PackedBatches(model, attention=lambda document, group: attention(document),
                            micro_tokens=2000, temperature=TAU)  # fmt: skip
    equal = []

    def loss(indices, mask_BT, lp_BT, entropy_BT):
        for i, mask_T, lp_T in zip(indices, mask_BT, lp_BT):
            told = torch.tensor(rows[i].logprobs, dtype=torch.float64).to(lp_T)
            is_sampled = torch.tensor(rows[i].mask)
            equal.extend((lp_T[: len(told)] == told)[is_sampled].tolist())
        return (lp_BT * mask_BT).sum()

    batches.forward_backward([row.tokens for row in rows], [row.mask for row in rows], loss)
    model.zero_grad()
    return np.mean(equal), sampled - began, time.process_time() - sampled


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64", "bfloat16"])
    parser.add_argument("--families", nargs="+", default=[*TINY])
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("family, dtype, way: identical without and with --exact; CPU seconds without and with")
    for name in given.families:
        for dtype in given.dtypes:
            for way, how in WAYS.items():
                found = []
                for is_exact in (False, True):
                    model = tiny_model(name, dtype=getattr(torch, dtype))
                    if is_exact:
                        model = make_exact(model)
                        require_exact_kernels(model)
                    found.append(measured(model, is_exact, how))
                (share, *seconds), (exact_share, *exact_seconds) = found
                print(f"{name:12} {dtype:8} {way:5} {share:.3f} {exact_share:.3f}   "
                      f"{sum(seconds):.2f} {sum(exact_seconds):.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])

"""What `--head-dtype float32` does: `python tests/bench/measure_head.py [DIR] [--device cuda]`.

Two tables. Random states in bfloat16 and a vocabulary of 49,152: how far log-probs are from the
exact product of the same states and rows, in float64. And with DIR, a Hugging Face directory, in
bfloat16: the gap between the log-probs of trainer and sampler over what the model has sampled, by
which of the two has the head in float32; memory on CUDA, and seconds.
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
from full.generate import generate
from full.hf import load_hf
from full.logprobs import token_logprobs
from full.masks import Mask
from full.micro_batches import masked_attention
from full.packing import PackedBatches

HEADS = {"bfloat16": None, "float32": torch.float32}


def attention_of(document_1S, group):
    return masked_attention(Mask.documents(doc_ids=document_1S), None)


def spread(gap_N) -> str:
    """A row's figures of |gap|: mean, 90 %, 99 %, largest, and ratios that are off by over 1 %."""
    size_N = abs(gap_N)
    figures = [size_N.mean(), *np.quantile(size_N, [0.9, 0.99]), size_N.max()]
    off = (abs(np.expm1(gap_N)) > 0.01).mean()
    return " ".join(f"{x:.1e}" for x in figures) + f"  {off:6.1%}"


def random_states(device, deviation, N=1024, M=576, V=49152):
    """Print how far log-probs of random states are from exact ones. deviation: of the logits."""
    torch.manual_seed(0)
    hidden_NM = torch.randn(N, M).bfloat16()
    weight_VM = (torch.randn(V, M) * deviation / M**0.5).bfloat16()
    exact_NV = hidden_NM.double().to(device) @ weight_VM.double().to(device).T
    targets_N = exact_NV.softmax(-1).multinomial(1)[:, 0]
    exact_N = exact_NV.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
    del exact_NV
    for name, dtype in HEADS.items():
        wide = dtype or torch.bfloat16
        given = hidden_NM.to(device, wide), weight_VM.to(device, wide), targets_N
        gap_N = token_logprobs(*given)[0].double() - exact_N
        print(f"logits of deviation {deviation:2}, {name:8}  {spread(gap_N.cpu().numpy())}")


def of_directory(directory, device, prompts, count, new):
    """Print the gaps of a model in bfloat16."""
    model = load_hf(directory, dtype=torch.bfloat16).to(device).requires_grad_()
    rng = np.random.default_rng(0)
    size = model.config.vocab_size
    given = [rng.integers(0, size, 20).tolist() for _ in range(prompts)]
    for sampler, head_dtype in HEADS.items():
        model.head_dtype = head_dtype
        rows = [models.Row(given[n % prompts], np.random.default_rng([1, n]).random(new))
                for n in range(count)]  # fmt: skip
        began = time.perf_counter()
        rows = generate(model, rows, max_new_tokens=new)
        sampling = time.perf_counter() - began
        told = np.concatenate([np.array(row.logprobs)[row.mask] for row in rows])
        for trainer, head_dtype in HEADS.items():
            model.head_dtype = head_dtype
            batches = PackedBatches(model, attention=attention_of, micro_tokens=4096)
            found = {}

            def loss(indices, mask_BT, lp_BT, entropy_BT, found=found):
                found.update((i, x[m].detach().double().cpu())
                             for i, x, m in zip(indices, lp_BT, mask_BT))  # fmt: skip
                return lp_BT.sum()

            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            batches.forward_backward([row.tokens for row in rows], [row.mask for row in rows], loss)
            model.zero_grad()
            seconds = time.perf_counter() - began
            gap_N = np.concatenate([found[n] for n in range(count)]) - told
            peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0
            print(f"sampler {sampler:8} trainer {trainer:8}  {spread(gap_N)}  {sampling:6.2f} "
                  f"{seconds:6.2f} {peak:6.0f}", flush=True)  # fmt: skip


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args(argv)
    columns = "mean, 90 %, 99 %, largest |gap|; ratios off by over 1 %"
    print(columns)
    for deviation in (1, 4, 10):
        random_states(given.device, deviation)
    if given.directory:
        print(f"{columns}; seconds of sampling, of training; MiB")
        of_directory(given.directory, given.device, given.prompts, given.rollouts, given.tokens)


if __name__ == "__main__":
    main(sys.argv[1:])

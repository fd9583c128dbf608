"""What `--replay-routes` does: `python tests/bench/measure_routes.py [--shapes ..]`.

A row for each random mixture of experts: the share of choices (a token, a layer) in which the
trainer's router selects other experts than the sampler's did, and the gap between the log-probs of
trainer and sampler over the sampled tokens, without and with replay. Seconds are of the trainer's
forward, without and with.
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
from measure_head import attention_of

from full.generate import generate
from full.packing import PackedBatches
from full.tiny import tiny_model

SHAPES = {  # layers, width, experts, experts of a token, rollouts, their tokens
    "tiny": (3, 32, 8, 2, 24, 60),
    "small": (6, 128, 16, 4, 24, 60),
    "large": (24, 1024, 64, 8, 32, 200),
}


def mixture(name, dtype, device):
    """A random model with experts in each layer, whose states have the size of a trained one's."""
    layers, width, experts, chosen, *_ = SHAPES[name]
    model = tiny_model(
        "qwen3_moe", num_hidden_layers=layers, sparse_layers=tuple(range(layers)),
        hidden_size=width, head_dim=max(8, width // 16), num_attention_heads=16,
        num_key_value_heads=4, num_experts=experts, num_experts_per_tok=chosen,
        moe_intermediate_size=width // 2, vocab_size=1000, max_position_embeddings=512,
        initializer_range=2 / width**0.5,
    )  # fmt: skip
    return model.to(device=device, dtype=dtype).requires_grad_(False)


def measured(name, dtype, device, seed=0):
    """Return {with replay?: (share of changed choices, |gap| (N,), seconds)}."""
    model = mixture(name, dtype, device)
    *_, count, new = SHAPES[name]
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 1000, n).tolist() for n in (3, 17, 40, 90)]
    rows = [models.Row(prompts[n % 4], rng.random(new)) for n in range(count)]
    rows = generate(model, rows, max_new_tokens=new, routes=True)
    told = np.concatenate([np.array(row.logprobs)[row.mask] for row in rows])

    counts = []

    class Watched(PackedBatches):
        """Keeps what the replay of each micro-batch has counted."""

        def micro(self, row, balance=None):
            made = super().micro(row, balance)
            if made.on_routing is not None:
                counts.append(made.on_routing.changed)
            return made

    found = {}
    for routes in (None, [np.stack(row.routes) for row in rows]):
        batches = Watched(model, attention=attention_of, micro_tokens=4000)
        began = time.perf_counter()
        given = [row.tokens for row in rows], [row.mask for row in rows], routes
        scores = batches.forward(*given)
        seconds = time.perf_counter() - began
        lp = [x[torch.tensor(row.mask)].double().numpy() for (x, _), row in zip(scores, rows)]
        sums = sum((x.cpu() for parts in counts for x in parts.values()), torch.zeros(2))
        share = (sums[0] / sums[1]).item() if routes else None
        found[routes is not None] = share, abs(np.concatenate(lp) - told), seconds
    return found


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["tiny", "small"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(argv)
    print("shape, dtype: changed; mean, 99 % and largest gap without, and with replay; seconds")
    for name in given.shapes:
        for dtype in given.dtypes:
            found = measured(name, getattr(torch, dtype), given.device)
            gaps = [f"{gap.mean():.1e} {np.quantile(gap, 0.99):.1e} {gap.max():.1e}"
                    for _, gap, _ in found.values()]  # fmt: skip
            seconds = " ".join(f"{seconds:.2f}" for *_, seconds in found.values())
            print(f"{name:6} {dtype:9} {found[True][0]:8.3%}   {gaps[0]}   {gaps[1]}   {seconds}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])

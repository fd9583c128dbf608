"""Seconds by phase of a training step, tokens a second, what sharing prefixes gains by its bound.

    python tests/bench/measure_grpo.py [--shape NAME ..] [--steps N] [--device cuda]
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measure_models import QWEN3_06B  # noqa: E402
from oracles import LiveBytes  # noqa: E402

from full.batches import SampledBatch, collect  # noqa: E402
from full.config import Config  # noqa: E402
from full.model_config import ModelConfig  # noqa: E402
from full.questions import make_task  # noqa: E402
from full.ranks import connect  # noqa: E402
from full.steps import built  # noqa: E402
from full.tasks import Task  # noqa: E402
from full.trainer import Trainer  # noqa: E402
from full.transformer import Transformer  # noqa: E402
from full.trie import TokenTrie  # noqa: E402


class Work(Task):
    """One turn that never ends, behind a fixed prompt: the end token is outside the vocabulary."""

    def __init__(self, config, vocab_size=256):
        self.vocab_size, self.end = vocab_size, (vocab_size,)
        self.tokens = np.random.default_rng(0).integers(vocab_size, size=config.size).tolist()

    def prompt(self, rng, index, held_out):
        return None, self.tokens


def answers(prompt, completion, group=8, **changes):
    """The settings of `Work`; `size` is the prompt's length."""
    return Config(size=prompt, max_new_tokens=completion, group=group, prompts=1, **changes)


NARROW = dict(hidden=128, layers=4, heads=4, minibatches=1, entropy_coef=0.0, lr=1e-6)
BRANCHING = dict(forks=2, fork_turns=3, advantage="per_branch")
SHAPES = {
    "guess": Config(), "guess branching": Config(**BRANCHING),
    "guess branching, 256": Config(**BRANCHING, hidden=256, layers=4),
    **{f"{n} + 8 x 64": answers(n, 64, **NARROW) for n in (256, 512, 1024, 2048)},
    "4096 + 8 x 1024, 0.6B": answers(4096, 1024, dtype="bfloat16", **NARROW),
    "toy": answers(12, 4, **NARROW | dict(hidden=16, layers=1)),
}  # fmt: skip
SLOW = "4096 + 8 x 1024, 0.6B", "toy"  # asked for by name: for a GPU; to see that bench runs


def made(name, device):
    """Config, task and a trainer of a shape, without a tree."""
    config = dataclasses.replace(SHAPES[name], device=device).check()
    task = make_task(config) if name.startswith("guess") else Work(config)
    model, generator, _ = built(config, task, device)
    if "0.6B" in name:
        task = Work(config, QWEN3_06B["vocab_size"])
        shape = ModelConfig(**QWEN3_06B)
        both = (Transformer(shape).to(device, torch.bfloat16) for _ in range(2))
        model, generator = both
        model.init_weights(0)
        generator.requires_grad_(False)
    return config, task, Trainer(config, model, generator=generator)


def costs(config):
    """FLOPs of a training step: of a token in the layers, of a pair, of a token in the head."""
    c = config
    # forward 2 a weight, backward 4; a pair: two products forward, five backward
    layer = c.hidden_size * (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    layer = 6 * c.num_hidden_layers * (layer + 3 * c.hidden_size * c.intermediate_size)
    pair = 14 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    return layer, pair, 6 * c.vocab_size * c.hidden_size


class Stats(NamedTuple):
    """Tokens and (query, key) pairs of the flat batch and of the tree, and their ratios."""

    flat_tokens: int
    tree_tokens: int
    flat_pairs: int
    tree_pairs: int
    token_bound: float  # how many times faster, if tokens were the only cost
    flop_bound: float | None  # the same of FLOPs; None without their costs


def stats_of(trie, flops_per_token=None, flops_per_pair=None):
    """What sharing saves; the costs are FLOPs of a model per token and per (query, key) pair."""
    lengths = trie.lengths.numpy()
    flat = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
    tree = len(trie), int((trie.positions + 1).sum())
    flop_bound = None
    if flops_per_token is not None and len(trie):
        flops = [n * flops_per_token + pairs * flops_per_pair for n, pairs in (flat, tree)]
        flop_bound = flops[0] / flops[1]
    token_bound = flat[0] / tree[0] if len(trie) else 1.0
    return Stats(flat[0], tree[0], flat[1], tree[1], token_bound, flop_bound)


def flops(shape, trie, masks):
    """FLOPs of a step, (flat, tree): layers and pairs of all tokens, the head of scored ones."""
    (layer, pair, head), stats = costs(shape), stats_of(trie)
    wanted = set()
    for i, mask in enumerate(masks):
        wanted.update(trie.path(i)[1:][torch.from_numpy(mask)].tolist())
    flat = stats.flat_tokens * layer + stats.flat_pairs * pair + sum(map(sum, masks)) * head
    return flat, stats.tree_tokens * layer + stats.tree_pairs * pair + len(wanted) * head


class Clock:
    """Seconds by phase: of this process's CPU time, or on CUDA of the wall, when all is done."""

    def __init__(self, device):
        self.cuda, self.seconds = device == "cuda", {}

    def now(self):
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if self.cuda else time.process_time()

    def time(self, phase, function, *args):
        start = self.now()
        result = function(*args)
        self.seconds.setdefault(phase, []).append(self.now() - start)
        return result


def peak(device, function, *args):
    """MB of the tensors that are made inside and live at once, at most."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(*args)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with LiveBytes() as live:
        function(*args)
    return live.peak / 2**20


def rolled_out(config, task, trainer, clock, step):
    """A step's trajectories, ready for the loss."""
    clock.time("push", trainer.push_weights)
    mine, kept, _ = clock.time("rollout", collect, config, task, trainer.sampler, step)
    batch = SampledBatch(mine, kept, 1, trainer.policy_version)
    rollouts = batch.trained()
    for t in (t for t in rollouts if isinstance(task, Work)):
        t.reward = float(t.tokens[-1] % 3)
    clock.time("prepare", trainer.prepare, batch)
    return rollouts


def measure(name, device, steps, peak_tflops=None):
    """A shape's row. Flat and tree train on the same rollouts, in alternating order."""
    config, task, trainer = made(name, device)
    clock, memory, spent = Clock(device), {}, []
    for step in range(steps + 1):
        batch = rolled_out(config, task, trainer, clock, step)
        Z, tokens = trainer.loss_denominator(batch), sum(len(t.tokens) for t in batch)
        trie = TokenTrie([t.tokens for t in batch])
        spent.append(flops(trainer.model.config, trie, [t.mask for t in batch]))
        for mode in ("flat", "tree")[:: 1 if step % 2 else -1]:
            trainer.config = dataclasses.replace(config, tree=TREE[mode])
            if step == 0:
                memory[mode] = round(peak(device, trainer.forward_backward, batch, Z), 1)
            clock.time(f"train {mode}", trainer.forward_backward, batch, Z)
            clock.time(f"step {mode}", trainer.optim_step, 1e-6)
            trainer.config = config

    # The first step is a warm-up.
    seconds = {phase: statistics.median(x[1:]) for phase, x in clock.seconds.items()}
    flat, tree = (clock.seconds[f"train {mode}"][1:] for mode in TREE)
    gains = sorted(a / b for a, b in zip(flat, tree, strict=True))
    gain, bound = statistics.median(gains), statistics.median(a / b for a, b in spent[1:])
    train = seconds["train tree"]
    row = dict(
        shape=name, seconds=seconds, peak_mb=memory, gain=gain, low=gains[0], high=gains[-1],
        bound=bound, share=gain / bound, tokens_per_second=tokens / train,
        gflops=spent[-1][1] / train / 1e9, gflops_flat=spent[-1][0] / seconds["train flat"] / 1e9,
    )  # fmt: skip
    if peak_tflops:
        row["utilisation"] = row["gflops"] / peak_tflops / 1e3
    print(f"{name:22} {seconds['rollout']:7.3f} {seconds['train flat']:6.3f} {train:6.3f} "
          f"{gain:6.2f} ({gains[0]:.2f} - {gains[-1]:.2f}) {bound:5.2f} "
          f"{gain / bound:5.0%} {tokens / train:9.0f} {memory['flat']:13.1f} "
          f"{memory['tree']:5.1f}", flush=True)  # fmt: skip
    return row


TREE = {"flat": "disabled", "tree": "sparse"}


def bench(argv):
    """A table, and a JSON line, of SHAPES: one process, one thread, or one GPU."""
    parser = argparse.ArgumentParser("measure_grpo.py")
    names = f"of {', '.join(SHAPES)}; default: all but {', '.join(SLOW)}"
    parser.add_argument("--shape", nargs="+", choices=SHAPES, metavar="NAME", help=names)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--peak-tflops", type=float, help="of the device, for its utilisation")
    options, rows = parser.parse_args(argv), []
    has_group = dist.is_initialized()
    if not has_group:
        connect(options.device)
    unit = "wall seconds" if options.device == "cuda" else "CPU seconds, one thread"
    print(f"{unit}, median of {options.steps}; train: forward and backward of a step, flat and by "
          f"the tree\n{'shape':22} rollout   flat   tree   gain (low - high) bound share  tokens/s "
          f"peak MB, flat  tree")  # fmt: skip
    for name in options.shape or [name for name in SHAPES if name not in SLOW]:
        rows.append(measure(name, options.device, options.steps, options.peak_tflops))
    print(json.dumps({"bench": "grpo", "device": options.device, "rows": rows}))
    if not has_group:
        dist.destroy_process_group()
    return 0


def main(argv) -> int:
    return bench(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

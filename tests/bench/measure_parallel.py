"""Tokens a second by plan, and the bytes that ranks hand over.

    python tests/bench/measure_parallel.py [--plans d1 d2 ..]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from plan_training import Batch, Training  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from full.plans import Grid, Plan  # noqa: E402
from full.tiny import tiny_model  # noqa: E402
from ring_attention import launch  # noqa: E402

BENCH = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
             num_key_value_heads=2, intermediate_size=384, vocab_size=2048)  # fmt: skip


class Sent(TorchDispatchMode):
    """Bytes that this rank hands to each collective and each P2P send inside: of a gather its part,
    of a scatter-add and an all-to-all all parts."""

    OPS = "allgather", "reducescatter", "allreduce", "alltoall", "send"

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].replace("_", "")
        op = next((op for op in self.OPS if name.startswith(op)), None)
        if "c10d" in function.namespace and op is not None:
            first = op in ("send", "allreduce") or "functional" in function.namespace
            given = (x for x in tree_leaves(args[0 if first else 1]) if torch.is_tensor(x))
            self.bytes[op] = self.bytes.get(op, 0) + sum(x.nbytes for x in given)
        return function(*args, **(kwargs or {}))


def training_of(plan, model, options, rows, length, micros):
    """A plan's training on rows of random tokens, one document each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (rows, length), generator=generator)
    whole = Batch.of(tokens, torch.ones(rows, length), torch.zeros_like(tokens))
    return Training(model, Grid(plan), whole, micros=micros, **options)


def _timed(plan_text, rows, length, steps):
    """Median seconds of a step of this rank, and the bytes it sent by collective."""
    plan = Plan.parse(plan_text)
    torch.set_num_threads(max(1, 2 // plan.world))
    model = tiny_model("qwen3", dtype=torch.float32, **BENCH)
    training = training_of(plan, model, {}, rows, length, 0)
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        begun = time.perf_counter()
        training.backward()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        training.optimizer.zero_grad()
    with Sent() as sent:
        training.backward()
    return statistics.median(seconds[1:]), sent.bytes


def bench(argv):
    """Tokens a second by plan, against one process with as many threads; bytes sent a step."""
    parser = argparse.ArgumentParser("measure_parallel.py")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plans", nargs="+", default=["d1", "d2", "t2", "c2", "p2"])
    options = parser.parse_args(argv)
    rows, whole = [], None
    print(f"{'plan':>8} {'tokens/s':>9} {'of one process':>15}  kB a rank sends a step")
    for text in options.plans:
        world = Plan.parse(text).world
        found = launch(world, _timed, text, options.rows, options.length, options.steps)
        rate = options.rows * options.length / max(seconds for seconds, _ in found)
        whole = whole or rate
        rows.append(dict(plan=text, tokens_per_s=rate, of_one=rate / whole, bytes=found[0][1]))
        kilo = ", ".join(f"{name} {size / 1000:.0f}" for name, size in found[0][1].items())
        print(f"{text:>8} {rate:9.0f} {rate / whole:15.0%}  {kilo}")
    print(json.dumps({"bench": "parallel", "torch": torch.__version__, "rows": rows}))
    return 0


def main(argv) -> int:
    return bench(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

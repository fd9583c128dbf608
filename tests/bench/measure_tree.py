"""Trees of tokens: `python tests/bench/measure_tree.py [bench | plan FILE]`.

plan: the tree of a list of token lists, its chunks, its partition. bench: training on trees against
the flat batch. One thread, CPU seconds, alternating; a model of models.py from random weights.
Flat: one sequence a call, no padding. Percent of the bound: of the FLOPs that `stats_of`
says sharing saves.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

from measure_grpo import costs, peak, stats_of
from measure_models import QWEN3_06B, seconds_of

from full.chunks import PAIR, partition, partition_tree, tree_backward
from full.tiny import tiny
from full.transformer import Transformer
from full.trie import TokenTrie
from tree_attention import definition


def shapes(seed=0, scale=1.0):
    """{name: sequences} to measure; scale: of all lengths."""
    rng = np.random.default_rng(seed)

    def draw(n):
        return torch.from_numpy(rng.integers(0, 2048, max(1, int(n * scale))))

    prompt, turns = draw(512), [draw(128) for _ in range(8)]
    levels = [[draw(96) for _ in range(2**level)] for level in range(5)]
    root = draw(512)
    return {
        "GRPO 512 + 8 x 128": [torch.cat([prompt, draw(128)]) for _ in range(8)],
        "multi-turn chain, 8 x 128": [torch.cat(turns[: n + 1]) for n in range(8)],
        "binary tree, 5 x 96": [
            torch.cat([levels[k][leaf >> (4 - k)] for k in range(5)]) for leaf in range(16)
        ],
        "star 512 + 64 x 32": [torch.cat([root, draw(32)]) for _ in range(64)],
        "no sharing, 8 x 256": [draw(256) for _ in range(8)],
    }


def grpo_loss(i, logprobs, entropy):
    """A policy gradient with an advantage of the sequence's own; no entropy term."""
    return -(torch.exp(logprobs - logprobs.detach()) * (i % 5 - 2.0)).sum()


def compare(model, sequences, repeats, budgets=(4, 8)):
    """{way: (seconds, peak MB)} and the bound; the ways alternate, medians of the repeats.

    Seconds of CPU, on a GPU of the wall.
    """
    trie, device = TokenTrie(sequences), next(model.parameters()).device.type
    placed = [x.to(device) for x in sequences]
    ways = {"flat": lambda: definition(model, placed, grpo_loss),
            "sparse": lambda: tree_backward(model, TokenTrie(sequences), grpo_loss)}  # fmt: skip
    for part in budgets:
        budget = max(1, -(-len(trie) // part))
        ways[f"dta N/{part}"] = lambda budget=budget: tree_backward(
            model, TokenTrie(sequences), grpo_loss, max_tokens=budget
        )
    seconds, peaks = {name: [] for name in ways}, {}
    for name, way in ways.items():
        model.zero_grad()
        peaks[name] = peak(device, way)
    for _ in range(repeats):
        for name, way in ways.items():
            model.zero_grad()
            seconds[name].append(seconds_of(way, device))
    layer, pair, head = costs(model.config)
    return seconds, peaks, stats_of(trie, layer + head, pair)


def bench(argv):
    """The rows of RESULTS.md."""
    parser = argparse.ArgumentParser("measure_tree.py")
    parser.add_argument("--data", help="a JSON file, a list of lists of token lists: groups")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--only", default="", help="shapes whose name begins so")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--large", action="store_true", help="a Qwen3-0.6B in bf16")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    torch.set_num_threads(1)
    config = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
                  num_key_value_heads=2, intermediate_size=384, vocab_size=2048,
                  max_position_embeddings=1 << 20)  # fmt: skip
    if options.data:
        with open(options.data) as file:
            groups = json.load(file)
        cases = {f"group {n}": [torch.tensor(x) for x in g] for n, g in enumerate(groups)}
        most = max(int(x.max()) for sequences in cases.values() for x in sequences)
        config["vocab_size"] = max(2048, most + 1)
    else:
        cases = shapes(scale=options.scale)
    config |= (QWEN3_06B | dict(max_position_embeddings=1 << 20)) if options.large else {}
    dtype = torch.bfloat16 if options.large else torch.float32
    model = Transformer(tiny("qwen3", **config)).to(options.device, dtype)
    model.init_weights(0)
    print(f"{'':>36} {'way':>8} {'seconds':>8} {'MB':>7} {'speed-up':>9} {'bound':>6} {'of it':>6}")
    rows = []
    for name, sequences in cases.items():
        if not name.startswith(options.only):
            continue
        if options.scale != 1 and not options.data:
            name += f", lengths x {options.scale:g}"
        seconds, peaks, stats = compare(model, sequences, options.repeats)
        for way in seconds:
            pairs = zip(seconds["flat"], seconds[way], strict=True)
            speedup = statistics.median(a / b for a, b in pairs)
            cpu = statistics.median(seconds[way])
            bounds = dict(token_bound=stats.token_bound, flop_bound=stats.flop_bound)
            row = dict(shape=name, way=way, cpu_s=cpu, peak_mb=peaks[way], speedup=speedup)
            rows.append(row | bounds)
            shares = f"{stats.flop_bound:6.2f} {speedup / stats.flop_bound:6.0%}"
            print(f"{name:>36} {way:>8} {cpu:8.3f} {peaks[way]:7.1f} {speedup:9.2f} {shares}")
    print(json.dumps({"bench": "tree", "torch": torch.__version__, "rows": rows}))
    return 0


def modeled_time(trie) -> float:
    """The modeled time of a whole tree, in units of one token."""
    stats = stats_of(trie)
    return stats.tree_tokens + stats.tree_pairs * PAIR


def draw(trie, most=40) -> str:
    """A segment a line: its tokens, how many, and the sequences that end in it."""
    # A segment is a part of a path without a fork. It begins where a path begins, and after a token
    # that has several children. In preorder its tokens follow each other:
    #
    #     5 6 7 8 / 5 6 9      index     0  1  2  3  4      segments 0-1, 2-3 and 4
    #                          children  1  2  1  0  0
    parent = trie.parent.numpy()
    child_count = np.bincount(parent[parent >= 0], minlength=len(trie))
    starts = np.flatnonzero((parent < 0) | (child_count[parent] != 1)).tolist()
    ends = {}
    for i, token in enumerate(trie.ends.tolist()):
        ends.setdefault(token, []).append(i)

    lines = []
    levels = {-1: 0}  # of the segments below the last token of another
    for first, stop in itertools.pairwise([*starts, len(trie)]):
        if len(lines) == most:
            lines.append(f".. {len(starts) - most} segments more")
            break
        text = " ".join(str(x) for x in trie.tokens[first : min(stop, first + 8)].tolist())
        if stop > first + 8:
            text += f" .. ({stop - first} tokens)"
        here = [f"{ends[t]} at {t + 1 - first}" for t in range(first, stop) if t in ends]
        if here:
            text += f"   ends: {', '.join(here)}"
        level = levels[int(parent[first])]
        lines.append(f"{'|  ' * level}+- {text}")
        levels[stop - 1] = level + 1
    return "\n".join(lines)


def describe(argv) -> int:
    """plan FILE.json: the tree of a list of token lists, its chunks, and its partition."""
    parser = argparse.ArgumentParser("measure_tree.py")
    parser.add_argument("file")
    parser.add_argument("--chunk-tokens", type=int)
    parser.add_argument("--world", type=int, default=2)
    options = parser.parse_args(argv)
    sequences = json.loads(Path(options.file).read_text())
    max_tokens, world = options.chunk_tokens, options.world
    trie = TokenTrie(sequences)
    print(draw(trie))
    print("\n".join(f"{name:>12} {value}" for name, value in stats_of(trie)._asdict().items()))
    print(f"\nchunks of at most {max_tokens or 'all'} tokens, depth first:")
    end = trie.subtree_end.numpy()
    for b, (start, stop, parent) in enumerate(partition_tree(trie, max_tokens)):
        where = f"below {parent:>4}, depth {int(trie.positions[start]):>5}"
        read = int((end[start:stop] > stop).sum())
        print(f"{b:>6}: {where}, {stop - start} tokens, {read} of them read by chunks below")
    joined = partition_tree(trie, max_tokens, join_only_children=True)
    longest = max((chunk.stop - chunk.start for chunk in joined), default=0)
    print("training without recompute joins only children to their parents, at no memory: "
          f"{len(joined)} calls of at most {longest} tokens")  # fmt: skip
    print(f"\nover {world} ranks, modeled time in tokens:")
    for rank, share in enumerate(partition(sequences, world)):
        cost = modeled_time(TokenTrie([sequences[i] for i in share]))
        print(f"{rank:>6}: {cost:.0f}  sequences {share}")
    return 0


COMMANDS = {"bench": bench, "plan": describe}


def main(argv) -> int:
    """Run a command, by default `bench`. Return its exit code."""
    name, *rest = argv if argv and argv[0] in COMMANDS else ["bench", *argv]
    return COMMANDS[name](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

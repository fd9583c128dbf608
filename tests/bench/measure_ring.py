"""Attention on a ring: `python tests/bench/measure_ring.py bench | memory | longest | stress`.

The command `check` has the rows of `python -m full check ring`, and lower dtypes against SDPA.
bench: CPU seconds against SDPA. memory: peak by sequence length. longest: the longest sequence that
fits. stress: values at the limits; stress --model: training, see measure_vla.py.
"""

import argparse
import json
import math
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

from oracles import plain_attention

from full.attend import DTYPES, attend
from full.check_attention import by_way, check_ring, compare
from full.masks import CAUSAL, NEVER, Mask, Sizes, boxes
from full.ring import METHODS, indices, ring_attention, ring_of, shard, unshard
from ring_attention import launch

def random_inputs(tokens, dtype=torch.float32, batch=1, heads=8, keys=2, width=64):
    """q, k, v that want gradients, and an upstream gradient."""
    shapes = [(batch, n, tokens, width) for n in (heads, keys, keys, heads)]
    *leaves, dout = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [x.requires_grad_() for x in leaves], dout


def sdpa(q, k, v, dense=None):
    attention = scaled_dot_product_attention
    return attention(q, k, v, attn_mask=dense, is_causal=dense is None, enable_gqa=True)


def multiple_of_sdpa(mask, group, dtype, tokens, device="cpu", **options):
    """The worst error of out, dq, dk, dv as a multiple of SDPA's own at this dtype."""
    dense = mask.dense().to(device)

    def rival(*parts, group):
        # Every rank computes all of it, forward and backward, as one process would.
        whole = [unshard_replicated(x, dim=2, length=tokens, group=group) for x in parts]
        return _ShardOfReplicas.apply(sdpa(*whole, dense), dict(group=group))

    ours = compare(mask, group, dtype, tokens, device, **options)
    options = {name: x for name, x in options.items() if name != "method"}
    theirs = compare(mask, group, dtype, tokens, device, attention=rival, **options)
    return max(a / b for a, b in zip(ours, theirs, strict=True))


def work_of(mask, tile=128):
    """Query-key pairs that the boxes of a mask compute, over the batch; causal boxes count half."""
    total = 0
    for batch, queries, keys, kind in boxes(mask, Sizes(tile, NEVER, NEVER, NEVER, NEVER)):
        rows_of_batch = len(range(mask.shape[0])[batch])
        pairs = (queries.stop - queries.start) * (keys.stop - keys.start) * rows_of_batch
        total += pairs / 2 if kind == CAUSAL else pairs
    return total


def unshard_replicated(x, /, *, dim, group=None, length):
    """`unshard` as it is often written: its gradient is this rank's slice, with no message.

    That is right only where all ranks compute the same loss from the whole and nothing after the
    gather has parameters, or those are averaged and the rest summed: no factor on the loss makes
    both right (the head of OpenTau's model got 2.0 times its gradient on 2 ranks).
    """
    ring = ring_of(group)
    index = indices(length, ring.rank, ring.world).to(x.device)
    whole = unshard(x.detach(), dim=dim, group=group, length=length)
    return whole.index_copy(dim, index, x)


class _ShardOfReplicas(torch.autograd.Function):
    """`shard` of what all ranks hold; its gradient is that of the whole, on every rank."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.place, ctx.length = place, x.shape[2]
        return shard(x, dim=2, **place)

    @staticmethod
    def backward(ctx, grad):
        return unshard(grad, dim=2, **ctx.place, length=ctx.length), None


def check_rows(group, device):
    """[(table, row, budget, {column: value})]: lower dtypes against SDPA, balance."""
    rows, masks = [], {"causal": Mask.causal(160), "window": Mask.causal(160, window=50)}
    for name, mask in masks.items():
        for dtype in DTYPES[1:]:
            given, most = (mask, group, dtype, 160, device), 4.0 if dtype == torch.float32 else 2.0
            row = by_way(group, lambda **way: multiple_of_sdpa(*given, width=32, **way))
            rows.append(("error over SDPA's", f"{str(dtype)[6:]}, {name}", most, row))
    documents = Mask.documents(doc_ids=np.arange(4096) // 300)
    for name, mask, most in (("causal", Mask.causal(4096), 1.05), ("documents", documents, 1.25)):
        parts = (indices(4096, rank, 4).numpy() for rank in range(4))
        work = np.array([work_of(mask.slice(part, slice(None))) for part in parts])
        rows.append(("work of 4 ranks", name, most, {"max/mean": work.max() / work.mean()}))
    return rows


def _peak_rank(way, tokens, layer):
    """MB that one forward and backward add to the peak of this process, above its inputs."""
    weights = [torch.randn(512, n, requires_grad=True) for n in (512, 128, 128, 512, 2048)]

    def attention(q, k, v, length):
        if way == "SDPA":
            return sdpa(q, k, v)
        if way == "SDPA, dense mask":
            return sdpa(q, k, v, Mask.causal(length).dense())
        if way == "attend":
            return attend(q, k, v, Mask.causal(length))[0]
        return ring_attention(q, k, v, mask=Mask.causal(length))

    for length in (64, tokens):  # the first, small one loads what libraries load once
        held = len(indices(length, dist.get_rank(), dist.get_world_size()))
        qkv, dout = random_inputs(held)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if layer:
            x_sD = dout[0].transpose(0, 1).reshape(held, 512)
            split = [(x_sD @ w).view(1, held, -1, 64).transpose(1, 2) for w in weights[:3]]
            out_sD = attention(*split, length)[0].transpose(0, 1).reshape(held, 512) @ weights[3]
            (torch.relu((out_sD + x_sD) @ weights[4]) @ weights[4].T).sum().backward()
        else:
            attention(*qkv, length).backward(dout)
    unit = 1024 if sys.platform == "linux" else 1024**2
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit


def memory(argv):
    """Peak MB above the inputs by sequence length: attention alone, one layer, and the masks."""
    parser = argparse.ArgumentParser("measure_ring.py memory")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    tokens, rows = parser.parse_args(argv).tokens, {}
    print("MB above the inputs, float32, 8 heads, 2 key heads, D 64, causal, forward and backward")
    print(f"{'':>36}" + "".join(f"{n:>9}" for n in tokens))
    ways = {"SDPA": 1, "SDPA, dense mask": 1, "attend": 1}
    ways |= {"ring, each of 2": 2, "ring, each of 4": 4}
    for layer in (False, True):
        for way, world in ways.items():
            row = [max(launch(world, _peak_rank, way, n, layer)) for n in tokens]
            rows[f"{way}{', layer' * layer}"] = row
            numbers = "".join(f"{x:9.1f}" for x in row)
            print(f"{'one layer' if layer else 'attention':>12} {way:>23}{numbers}")
    parts = [(m.keys.start, m.keys.end, m.queries.rows) for m in map(Mask.causal, tokens)]
    intervals = [sum(x.nbytes for x in some) / 2**20 for some in parts]
    dense = [n * n / 2**20 for n in tokens]
    for name, size in (("Mask", intervals), ("dense mask", dense)):
        print(f"{'mask':>12} {name:>23}" + "".join(f"{x:9.2f}" for x in size))
    print(json.dumps({"memory_mb": rows, "tokens": tokens}))
    return 0


def _fits_rank(way, tokens, budget_mb):
    """Run once with budget_mb above what the process holds after a small run of the same."""
    for length in (64, tokens):
        if length == tokens:
            with open("/proc/self/status") as status:
                held_kb = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
            most = held_kb * 1024 + budget_mb * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        qkv, dout = random_inputs(len(indices(length, dist.get_rank(), dist.get_world_size())))
        mask = Mask.causal(length)
        dense = mask.dense() if way == "SDPA, dense mask" else None
        out = ring_attention(*qkv, mask=mask) if way == "ring" else sdpa(*qkv, dense)
        out.backward(dout)


def longest(argv):
    """The longest causal sequence whose forward and backward fit, by bisection in steps of 1/16.

    A rank that runs out of memory fails alone; the parent kills the others, so none hangs.
    """
    parser = argparse.ArgumentParser("measure_ring.py longest")
    parser.add_argument("--budget-mb", type=int, default=300, help="a rank's, inputs included")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4])
    args, found = parser.parse_args(argv), {}
    if sys.platform != "linux":
        raise SystemExit("longest limits memory by RLIMIT_DATA, which only Linux has")

    def fits(way, world, tokens):
        try:
            launch(world, _fits_rank, way, tokens, args.budget_mb)
        except Exception:  # what a rank that ran out of memory raised, or that it died
            return False
        return True

    for way, world in [("SDPA, dense mask", 1), ("SDPA", 1), *(("ring", w) for w in args.world)]:
        low, high = 0, 256
        while fits(way, world, high):
            low, high = high, 2 * high
        while high - low > max(high // 16, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(way, world, middle) else (low, middle)
        found[f"{way}, world {world}"] = low
        who = f"{way:>18}, {world} rank{'s' * (world > 1)}"
        print(f"{who}: {low} tokens in {args.budget_mb} MB each")
    print(json.dumps({"longest": found, "budget_mb": args.budget_mb}))
    return 0


CASES = ("scores of 1e5", "first keys highest", "last keys highest", "NaN and inf in PAD")


def _values_rank():
    """{(case, dtype): (our error, SDPA's)}: scores far beyond exp's range, blocks in either order,
    NaN and inf under the mask. Errors are relative to the largest gradient such inputs can have.
    """
    world, tokens, found = dist.get_world_size(), 64, {}
    valid_S, gen = torch.arange(tokens) % 5 != 0, torch.Generator().manual_seed(0)
    mask, ramp_S = Mask.padding(valid_S[None]), torch.linspace(0, 1000, tokens)
    drawn = torch.randn(4, 2, 4, tokens, 16, generator=gen, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for case in CASES:
            q, k, v, dout = drawn.clone()
            if case == "scores of 1e5":
                q, k = q * 100, k * 400
            elif case.endswith("highest"):  # one direction, shared by all queries, sets the scores
                q[..., 0], k[..., 0] = 40.0, ramp_S if case.startswith("last") else ramp_S.flip(0)
            q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
            exact = [x.double() for x in (q, k, v, dout)]
            truth = _gradients(lambda *x: plain_attention(*x, mask.dense())[0], *exact)
            rival = _gradients(lambda *x: sdpa(*x, mask.dense()), q, k, v, dout)
            if case == "NaN and inf in PAD":
                q, k, v, dout = (x.clone() for x in (q, k, v, dout))
                for x, value in ((q, math.nan), (k, math.inf), (v, math.nan), (dout, math.inf)):
                    x[:, :, ~valid_S] = value
            ours = _gradients(lambda *x: _over_ranks(*x, mask), q, k, v, dout)
            for grad in ours[1:] if world > 1 else ():
                dist.all_reduce(grad)
                grad /= world
            pull = exact[3].norm() * exact[2].abs().max() * q.shape[-1] ** -0.5
            sizes = [truth[0].norm(), pull * exact[1].abs().max(), pull * exact[0].abs().max()]
            sizes = zip(truth, [*sizes, truth[3].norm()], strict=True)
            sizes = [max(a.norm(), b) for a, b in sizes]
            errors = []
            for some in (ours, rival):
                triples = zip(some, truth, sizes, strict=True)
                errors.append(max(((a - b).norm() / n).item() for a, b, n in triples))
            found[case, str(dtype)[6:]] = errors
    return found


def _gradients(attention, q, k, v, dout):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]


def _over_ranks(q, k, v, mask):
    parts = [shard(x, dim=2) for x in (q, k, v)]
    return unshard(ring_attention(*parts, mask=mask), dim=2, length=q.shape[2])


def stress(argv):
    """Values at the limits, and the training of a VLA model; --model: the training alone."""
    parser = argparse.ArgumentParser("measure_ring.py stress")
    parser.add_argument("--model", action="store_true", help="only train: see measure_vla.py")
    if not parser.parse_args(argv).model and _failures_of_values():
        return 1
    return __import__("measure_vla").stress_model()


def _failures_of_values():
    """Print the table of `_values_rank`; return how many errors are too large."""
    bad = 0
    print(f"{'':>43}      ours    SDPA's   (budget: 4 times SDPA's, or 1e-12, 1e-6, 1e-2)")
    for world in (2, 3, 4):
        for (case, dtype), (error, rival) in launch(world, _values_rank)[0].items():
            floor = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 1e-2}[dtype]
            ok = error <= max(floor, 4 * rival if math.isfinite(rival) else 0.0)
            bad += not ok
            errors = f"{error:.1e}   {rival:.1e}   {'ok' if ok else 'FAILED'}"
            print(f"world {world}  {case:>24} {dtype:>9}   {errors}")
    print(json.dumps({"stress": "ring_attention", "ok": not bad}))
    return bad


def _timed_rank(tokens, way):
    """CPU seconds of this rank: (forward, backward)."""
    world = dist.get_world_size()
    held = len(indices(tokens, dist.get_rank(), world))
    mask = Mask.causal(tokens)
    warm, upstream = random_inputs(256)
    sdpa(*warm).backward(upstream)
    (q, k, v), dout = random_inputs(held)
    marks = [time.process_time()]
    out = sdpa(q, k, v) if way == "SDPA" else ring_attention(q, k, v, mask=mask, method=way)
    marks.append(time.process_time())
    out.backward(dout)
    marks.append(time.process_time())
    return marks[1] - marks[0], marks[2] - marks[1]


def bench_kernel(device, tokens, repeats, dtype=torch.bfloat16):
    """One device: `attend` against torch's SDPA, forward and backward, alternating medians.

    SDPA chooses its kernel by itself (cuDNN's, say); "flash" is the one that `attend` calls too.
    """
    def flash(*qkv):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(*qkv)

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    rows = {}
    print(f"{device}, {dtype}, causal, 8 heads, 2 key heads, D 64; seconds of forward + backward")
    for n in tokens:
        (q, k, v), dout = random_inputs(n, dtype)
        q, k, v, dout = (x.detach().to(device).requires_grad_() for x in (q, k, v, dout))
        masks = Mask.causal(n), Mask.documents(doc_ids=torch.arange(n)[None] * 8 // n)
        ways = {
            "SDPA, causal": lambda q=q, k=k, v=v: sdpa(q, k, v),
            "flash, causal": lambda q=q, k=k, v=v: flash(q, k, v),
        }
        for name, mask in zip(("causal", "8 documents"), masks, strict=True):
            ways[f"attend, {name}"] = lambda q=q, k=k, v=v, m=mask: attend(q, k, v, m)[0]
        found = {way: [] for way in ways}
        for _ in range(repeats + 1):  # the first is warm-up
            for way, run in ways.items():
                if device == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                torch.autograd.grad(run(), (q, k, v), dout)
                if device == "cuda":
                    torch.cuda.synchronize()
                found[way].append(time.perf_counter() - start)
        base = np.median(found["SDPA, causal"][1:])
        for way, times in found.items():
            rows[f"{way}, {n}"] = seconds = float(np.median(times[1:]))
            print(f"{n:>7} {way:>20} {seconds:9.5f}  of SDPA's {seconds / base:.3f}")
    print(json.dumps({"bench": rows, "device": device, "torch": torch.__version__}))
    return 0


def bench(argv):
    """CPU seconds of 2 ranks, one thread each, against one process that does the same by SDPA."""
    parser = argparse.ArgumentParser("measure_ring.py")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many, alternating")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="one device's kernel alone")
    args, result = parser.parse_args(argv), {}
    if args.device:
        return bench_kernel(args.device, args.tokens, args.repeats)
    print("CPU seconds per rank: causal, float32, 8 heads, 2 key heads, D 64; ideal: SDPA's / 2")
    for tokens in args.tokens:
        found = {way: [] for way in ("SDPA", *METHODS)}
        for _ in range(args.repeats):
            for way in found:
                ranks = launch(1 if way == "SDPA" else 2, _timed_rank, tokens, way)
                found[way].append(np.max(ranks, axis=0))
        base = np.median(found["SDPA"], axis=0)
        for way, times in found.items():
            forward, backward = np.median(times, axis=0)
            share = (forward + backward) / base.sum()
            ideal = 1.0 if way == "SDPA" else 0.5
            result[f"{way}, {tokens}"] = round(share, 3)
            seconds = f"forward {forward:7.3f}  backward {backward:7.3f}  of SDPA's {share:.3f}"
            print(f"{tokens:>7} {way:>20}  {seconds}  {100 * ideal / share:4.0f} % of the ideal")
    print(json.dumps({"bench": result, "threads_per_rank": 1, "torch": torch.__version__}))
    return 0


def check(argv) -> int:
    """Return 1 if an error is over its budget."""
    return 0 if check_ring(check_rows) else 1


COMMANDS = {command.__name__: command for command in (bench, memory, longest, stress, check)}


def main(argv) -> int:
    """Run a command, by default `bench`. Return its exit code."""
    name, *rest = argv if argv and argv[0] in COMMANDS else ["bench", *argv]
    return COMMANDS[name](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

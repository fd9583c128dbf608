"""Measure one subject: `python tests/bench/measure.py SUBJECT [FOLDER] [--size large] ..`.

    ring, ring-memory                   attention over ranks against torch's SDPA on one process
    kernel                              attention on one device against SDPA and flash
    tree                                training on trees of tokens against the flat batch
    five                                second versions of the folder against the five's
    deltanet                            recurrent layers: chunks, and a group that shares a prompt
    budget                              what --ac memory_budget saves, and what it costs
    models                              generation and training against transformers, if installed
    exact                               log-probs whose bits are the trainer's, and what they cost
    head                                how far log-probs are off by the dtype of the head
    objectives FOLDER                   what runs of every objective solve; makes those that lack

A subject yields rows. They are printed as a table, and at the end as one line of JSON. Ways that
are compared take turns, after a warm-up that does not count; a ratio is the median over pairs of
neighbors. Seconds are this process's CPU time, and on CUDA those of the wall between two times at
which the device is idle. A size sets models and lengths: `default` is for one core, `large` for a
GPU, `toy` shows that a subject runs.
"""

import argparse
import functools
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention, softplus

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from oracles import LiveBytes

import models
import tree_attention
from full.attention.attend import attend
from full.attention.masks import Mask
from full.attention.ring import METHODS, indices, ring_attention
from full.learn.generate import generate
from full.learn.objectives import OBJECTIVES
from full.learn.packing import PackedBatches
from full.model import experts, transformer
from full.model.config import ModelConfig
from full.model.deltanet import by_chunk, by_token
from full.model.exact import make_exact, packed_attention, require_exact_kernels
from full.model.hf import save_hf
from full.model.logprobs import token_logprobs
from full.model.parallelize import parallelize
from full.model.transformer import Transformer
from full.ranks.plans import Grid, Plan
from full.tiny import TINY, tiny, tiny_model
from full.tree.chunks import tree_backward
from full.tree.forest import MaskedAttention, parents_in
from full.tree.trie import TokenTrie
from ring_attention import launch
from tree_attention import definition

SIZES = "default", "large", "toy"
QWEN3_06B = dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip


# The harness ------------------------------------------------------------------------------------


def seconds_of(function, device="cpu"):
    """Seconds of CPU time; on CUDA of the wall, between two times at which the device is idle."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    idle = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    idle()
    start = clock()
    function()
    idle()
    return clock() - start


def alternating(ways, repeats, device="cpu"):
    """Return {way: its seconds}: the ways take turns, forwards and backwards, after a warm-up."""
    for run in ways.values():
        run()
    found = {way: [] for way in ways}
    for n in range(repeats):
        for way in [*ways][:: -1 if n % 2 else 1]:
            found[way].append(seconds_of(ways[way], device))
    return found


def times_as_fast(slow, fast) -> dict:
    """Return the median of the ratios of pairs, the least and the largest."""
    pairs = sorted(a / b for a, b in zip(slow, fast, strict=True))
    return dict(times=statistics.median(pairs), low=pairs[0], high=pairs[-1])


def peak_mb(function, device="cpu"):
    """Return MB of the tensors that are made inside and live at once, at most."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with LiveBytes() as live:
        function()
    return live.peak / 2**20


def show(row, headed):
    """Print a row, and over it the names of its columns, unless the last row had the same."""
    widths = [-28 if isinstance(x, str) else max(11, len(name) + 2) for name, x in row.items()]
    cells = [x if isinstance(x, str) else f"{x:.4g}" for x in row.values()]
    for line in ([*row], cells) if [*row] != headed else (cells,):
        texts = (f"{x:>{w}}" if w > 0 else f"{x:<{-w}}" for x, w in zip(line, widths))
        print("".join(texts).rstrip(), flush=True)
    return [*row]


def main(argv) -> int:
    """Measure a subject and print its rows. Return the exit code."""
    parser = argparse.ArgumentParser("measure.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("folder", nargs="?", help="of the runs of objectives")
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose first column begins so")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda: torch sees no CUDA device here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows, headed = [], None
    for row in SUBJECTS[options.subject](options):
        rows.append(row)
        headed = show(row, headed)
    told = dict(bench=options.subject, size=options.size, device=options.device)
    print(json.dumps(told | dict(torch=torch.__version__, rows=rows)))
    return 0


# Attention --------------------------------------------------------------------------------------


def random_inputs(tokens, dtype=torch.float32, heads=8, keys=2, width=64):
    """Return q, k, v that want gradients, and an upstream gradient."""
    shapes = [(1, n, tokens, width) for n in (heads, keys, keys, heads)]
    *leaves, dout = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [x.requires_grad_() for x in leaves], dout


def sdpa(q, k, v, dense=None):
    attention = scaled_dot_product_attention
    return attention(q, k, v, attn_mask=dense, is_causal=dense is None, enable_gqa=True)


def flash(*qkv):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(*qkv)


def kernel(options):
    """One device, bfloat16, causal: `attend`, SDPA (which chooses its kernel) and flash."""
    lengths = dict(default=[1024, 4096], large=[4096, 16384, 65536], toy=[16])[options.size]
    device = options.device
    for n in lengths:
        (q, k, v), dout = random_inputs(n, torch.bfloat16)
        q, k, v, dout = (x.detach().to(device).requires_grad_() for x in (q, k, v, dout))
        documents = Mask.documents(doc_ids=torch.arange(n)[None] * 8 // n)
        ways = {
            "SDPA, causal": sdpa, "flash, causal": flash,
            "attend, causal": lambda *qkv, n=n: attend(*qkv, Mask.causal(n))[0],
            "attend, 8 documents": lambda *qkv, mask=documents: attend(*qkv, mask)[0],
        }  # fmt: skip
        runs = {way: lambda f=f, x=(q, k, v), up=dout: torch.autograd.grad(f(*x), x, up)
                for way, f in ways.items()}  # fmt: skip
        found = alternating(runs, options.repeats, device)
        base = statistics.median(found["SDPA, causal"])
        for way, seconds in found.items():
            median = statistics.median(seconds)
            yield dict(way=way, tokens=n, seconds=median, of_sdpa=median / base)


def _timed_rank(tokens, way):
    """Return this rank's CPU seconds: (forward, backward)."""
    held = len(indices(tokens, dist.get_rank(), dist.get_world_size()))
    warm, upstream = random_inputs(256)
    sdpa(*warm).backward(upstream)
    (q, k, v), dout = random_inputs(held)
    given = dict(mask=Mask.causal(tokens), method=way)
    out = []
    run = (lambda: sdpa(q, k, v)) if way == "SDPA" else (lambda: ring_attention(q, k, v, **given))
    forward = seconds_of(lambda: out.append(run()))
    return forward, seconds_of(lambda: out[0].backward(dout))


def ring(options):
    """Two ranks of one thread against one process that does the same work by SDPA; the slower."""
    for tokens in dict(default=[8192, 16384], large=[32768], toy=[64])[options.size]:
        found = {way: [] for way in ("SDPA", *METHODS)}
        for _ in range(options.repeats):
            for way in found:
                ranks = launch(1 if way == "SDPA" else 2, _timed_rank, tokens, way)
                found[way].append(np.max(ranks, axis=0))
        base = np.median(found["SDPA"], axis=0).sum()
        for way, times in found.items():
            forward, backward = map(float, np.median(times, axis=0))
            share = (forward + backward) / base
            of_ideal = (1.0 if way == "SDPA" else 0.5) / share
            yield dict(way=way, tokens=tokens, forward=forward, backward=backward, of_sdpa=share,
                       of_ideal=of_ideal)  # fmt: skip


def _peak_rank(way, tokens):
    """Return MB that a forward and backward add to this process's peak, above its inputs."""

    def attention(q, k, v, length):
        if way == "SDPA":
            return sdpa(q, k, v)
        if way == "SDPA, dense mask":
            return sdpa(q, k, v, Mask.causal(length).dense())
        if way == "attend":
            return attend(q, k, v, Mask.causal(length))[0]
        return ring_attention(q, k, v, mask=Mask.causal(length))

    for length in (64, tokens):  # the first, small one loads what libraries load once
        qkv, dout = random_inputs(len(indices(length, dist.get_rank(), dist.get_world_size())))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attention(*qkv, length).backward(dout)
    unit = 1024 if sys.platform == "linux" else 1024**2
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit


def ring_memory(options):
    """MB of a forward and backward of attention above the inputs, float32; and of the masks."""
    tokens = dict(default=8192, large=16384, toy=64)[options.size]
    ways = {"SDPA": 1, "SDPA, dense mask": 1, "attend": 1}
    ways |= {"ring, each of 2": 2, "ring, each of 4": 4}
    for way, world in ways.items():
        yield dict(way=way, tokens=tokens, mb=max(launch(world, _peak_rank, way, tokens)))
    mask = Mask.causal(tokens)
    parts = mask.keys.start, mask.keys.end, mask.queries.rows
    yield dict(way="interval mask itself", tokens=tokens, mb=sum(x.nbytes for x in parts) / 2**20)
    yield dict(way="dense mask itself", tokens=tokens, mb=tokens**2 / 2**20)


# Costs of a step --------------------------------------------------------------------------------


def flops(config, trie, masks=None):
    """FLOPs of training, (flat, tree): layers and pairs of all tokens, the head of scored ones.

    masks: of each sequence, which targets are scored. Default: all.
    """
    # Forward 2 a weight, backward 4. A pair: two products forward, five backward.
    c = config
    layer = c.hidden_size * (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    layer = 6 * c.num_hidden_layers * (layer + 3 * c.hidden_size * c.intermediate_size)
    pair = 14 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    head = 6 * c.vocab_size * c.hidden_size

    lengths, depths = trie.lengths.numpy(), (trie.positions + 1).numpy()
    masks = masks or [np.ones(n - 1, bool) for n in lengths]
    nodes = {int(x) for i, mask in enumerate(masks) for x in trie.path(i)[1:].numpy()[mask]}
    flat = lengths.sum(), (lengths * (lengths + 1) // 2).sum(), sum(map(sum, masks))
    tree = len(depths), depths.sum(), len(nodes)
    return tuple(int(np.dot((layer, pair, head), counts)) for counts in (flat, tree))


# Trees ------------------------------------------------------------------------------------------


def shapes_of_trees(scale):
    """Return {name: sequences} to measure; scale: of all lengths."""
    rng = np.random.default_rng(0)

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


def policy_loss(i, logprobs, entropy):
    """A policy gradient with an advantage of the sequence's own; no entropy term."""
    return -(torch.exp(logprobs - logprobs.detach()) * (i % 5 - 2.0)).sum()


def ways_to_train(model, sequences):
    """Return two functions: forward and backward of each sequence by itself, and of their tree."""
    placed = [x.to(model.head_weight.device) for x in sequences]

    def flat():
        model.zero_grad()
        definition(model, placed, policy_loss)

    def by_tree(**how):
        model.zero_grad()
        tree_backward(model, TokenTrie(sequences), policy_loss, **how)

    return flat, by_tree


def tree(options):
    """Flat (a sequence a call, no padding), one chunk of the tree, chunks of a quarter and eighth.

    A speed-up is that over flat, its bound the ratio of FLOPs.
    """
    scale, shape, dtype = dict(
        default=(1, {}, torch.float32), toy=(0.02, {}, torch.float32),
        large=(8, QWEN3_06B, torch.bfloat16))[options.size]  # fmt: skip
    device = options.device
    config = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
                  num_key_value_heads=2, intermediate_size=384, vocab_size=2048)  # fmt: skip
    config |= shape | dict(max_position_embeddings=1 << 20)
    model = Transformer(tiny("qwen3", **config)).to(device, dtype).init_weights(0)
    for name, sequences in shapes_of_trees(scale).items():
        if not name.startswith(options.only):
            continue
        trie = TokenTrie(sequences)
        flat, by_tree = ways_to_train(model, sequences)
        ways = {"flat": flat, "sparse": by_tree}
        for part in (4, 8):
            most = max(1, -(-len(trie) // part))
            ways[f"dta N/{part}"] = functools.partial(by_tree, max_tokens=most)
        flat_flops, tree_flops = flops(model.config, trie)
        bound = flat_flops / tree_flops
        for row in compared(ways, options):
            yield dict(shape=name) | row | dict(bound=bound, of_bound=row["times"] / bound)


def compared(ways, options):
    """Yield what each way takes, and how many times as fast it is as the first way."""
    peaks = {way: peak_mb(run, options.device) for way, run in ways.items()}
    seconds = alternating(ways, options.repeats, options.device)
    first, *_ = seconds.values()
    for way, found in seconds.items():
        yield dict(way=way, seconds=statistics.median(found), mb=peaks[way],
                   times=times_as_fast(first, found)["times"])  # fmt: skip


def deltanet(options):
    """Tokens a second of the recurrence, and of its chunks; then a group of 8 on a hybrid model."""
    tokens, scale = dict(default=(2048, 1), large=(16384, 8), toy=(70, 0.02))[options.size]
    ways = {"token by token": by_token}
    ways |= {f"chunks of {n}": functools.partial(by_chunk, size=n) for n in (16, 64, 128)}
    for dtype in (torch.float32, torch.float64):
        q, k, v = (torch.randn(1, 8, tokens, 64, dtype=dtype) for _ in range(3))
        log_a, b = torch.randn(1, 8, tokens, dtype=dtype), torch.rand(1, 8, tokens, dtype=dtype)
        given = q, normalize(k, dim=-1), v, -softplus(log_a) / 2, b
        given = [x.to(options.device).requires_grad_() for x in given]
        forward = {way: torch.no_grad()(functools.partial(run, *given))
                   for way, run in ways.items()}  # fmt: skip
        both = {way: (lambda run=run: run(*given)[0].sum().backward()) for way, run in ways.items()}
        found = [alternating(x, options.repeats, options.device) for x in (forward, both)]
        for way in ways:
            forward_s, both_s = (tokens / statistics.median(x[way]) for x in found)
            yield {"recurrence": way, "dtype": f"{dtype}"[6:], "forward/s": forward_s,
                   "and backward/s": both_s}  # fmt: skip

    shape = dict(hidden_size=128, num_attention_heads=4, head_dim=32, linear_key_head_dim=32,
                 linear_value_head_dim=32, intermediate_size=384, vocab_size=2048)  # fmt: skip
    model = Transformer(tiny("qwen3_5_text", **shape)).to(options.device).init_weights(0)
    sequences = shapes_of_trees(scale)["GRPO 512 + 8 x 128"]
    chunk = max(1, int(128 * scale))
    flat, by_tree = ways_to_train(model, sequences)
    ways = {"one by one": flat, "one chunk": by_tree}
    for again in (False, True):
        name = f"dta, chunks of {chunk}{', again' if again else ''}"
        ways[name] = functools.partial(by_tree, max_tokens=chunk, recompute=again)
    yield from compared(ways, options)


# Second versions --------------------------------------------------------------------------------


def repeated(times, function, *given, **named):
    """Return a call that calls a function several times, without a gradient."""
    return torch.no_grad()(lambda: [function(*given, **named) for _ in range(times)])


def trains(function, *given):
    """Return a call of a function, and of its backward."""
    return lambda: function(*given).square().sum().backward()


def answers(function, model, prompt, new):
    """Return a call that samples 8 answers of some tokens to a prompt."""
    draws = torch.rand(8, new, dtype=torch.float64).tolist()
    return lambda: function(model, [models.Row(prompt, u) for u in draws], max_new_tokens=new,
                            temperature=1.0)  # fmt: skip


def second_versions(N):
    """Yield (what, the five's call, ours), for N tokens."""
    shape = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64,
                 num_attention_heads=4, num_key_value_heads=2, vocab_size=4096)  # fmt: skip
    sparse = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128)
    config = tiny("qwen3_moe", **shape | sparse)
    x, few = torch.randn(N, 256, requires_grad=True), torch.randn(8, 256)
    norms = models.RMSNorm(256, config), transformer.RMSNorm(256, config)
    yield "RMSNorm, training", *(trains(norm, x) for norm in norms)
    yield "RMSNorm, 8 rows", *(repeated(500, norm, few) for norm in norms)
    mlps = models.SparseMLP(config), experts.SparseMLP(config)
    mlps[1].load_state_dict(mlps[0].state_dict())
    yield "SparseMLP, training", *(trains(mlp, x[None]) for mlp in mlps)
    routed = x.detach(), torch.full((16,), N // 16)
    yield "Experts, training", *(trains(mlp.experts, *routed) for mlp in mlps)
    for V in (4096, 32768):
        model = models.Transformer(tiny("qwen3", **shape | dict(vocab_size=V)))
        given, weight = (x, torch.randint(V, (N,))), model.head_weight
        yield (f"log-probs, V = {V}, training",
               trains(lambda x, t, m=model: m.logprobs(x, t)[0], *given),
               trains(lambda x, t, w=weight: token_logprobs(x, w, t)[0], *given))  # fmt: skip

    q, k = torch.randn(1, 4, N, 64), torch.randn(1, 2, N, 64)
    for window in (None, N // 8):
        given = dict(layer=0, scale=0.1, window=window)
        yield (f"causal_attention, window {window}",
               *(repeated(1, module.causal_attention, q, k, k, **given)
                 for module in (models, transformer)))  # fmt: skip
    documents = torch.arange(N)[None] // (N // 16)
    packed = models.packed_attention(documents)
    yield (f"16 documents of {N // 16}, attend", repeated(1, packed, q, k, k, layer=0, scale=0.1),
           repeated(1, attend, q, k, k, Mask.documents(doc_ids=documents)))  # fmt: skip

    prompt = torch.randint(1000, (N // 4,))
    sequences = [torch.cat([prompt, torch.randint(1000, (N // 16,))]) for _ in range(64)]
    yield (f"TokenTrie, 64 sequences of {len(sequences[0])}",
           lambda: tree_attention.pack(tree_attention.radix_tree(sequences)),
           lambda: TokenTrie(sequences))  # fmt: skip
    model, prompt = Transformer(tiny("qwen3", **shape)).init_weights(0), prompt[: N // 8].tolist()
    yield (f"generate, 8 answers of {N // 64} to a prompt of {N // 8}",
           *(answers(function, model, prompt, N // 64) for function in (models.generate, generate))
           )  # fmt: skip


def five(options):
    """How many times our CPU seconds the five's version takes, where the folder has a second."""
    for what, theirs, ours in second_versions(dict(default=2048, large=8192, toy=64)[options.size]):
        seconds = alternating(dict(theirs=theirs, ours=ours), options.repeats)
        yield {"second version": what, **times_as_fast(seconds["theirs"], seconds["ours"])}


# Models -----------------------------------------------------------------------------------------

QWEN_SMALL = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16,
)  # fmt: skip
CASES_OF_MODELS = {  # models and dtype; (prompts, samples, length, new); (rows, length, is trained)
    # Small enough for one thread of a CPU; the vocabulary is what weighs in generation.
    "default": (
        [QWEN_SMALL | dict(vocab_size=V) for V in (4096, 32768)], torch.float32,
        [(1, 8, 512, 64), (4, 8, 128, 64), (8, 1, 32, 64)],
        [(4, 256, False), (4, 256, True), (1, 1024, True)]),
    # A released shape, prompts and answers of the lengths that are trained on it.
    "large": (
        [QWEN3_06B], torch.bfloat16,
        [(1, 8, 4096, 128), (32, 8, 512, 128), (8, 1, 128, 128), (1, 1, 128, 128)],
        [(4, 2048, False), (4, 2048, True), (1, 8192, True)]),
    "toy": (
        [QWEN_SMALL | dict(vocab_size=64)], torch.float32, [(1, 2, 8, 2)],
        [(2, 8, False), (2, 8, True)]),
}  # fmt: skip


def transformers_model(model, dtype):
    """Return transformers' model of the same weights, or None if it is not installed."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def generation(model, theirs, prompts, samples, length, new):
    """Sampling at temperature 1: `samples` completions of each of `prompts` prompts."""
    tokens = torch.randint(model.config.vocab_size, (prompts, length)).to(model.head_weight.device)
    rows = [row.tolist() for row in tokens for _ in range(samples)]
    given = dict(max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0)
    given |= dict(num_return_sequences=samples, eos_token_id=None)
    what = f"{prompts} x {samples} x {new} after {length}"
    return what, prompts * samples * new, {
        "ours": lambda: generate(model, rows, max_new_tokens=new, temperature=1.0, seed=0),
        "theirs": lambda: theirs.generate(tokens, **given)}  # fmt: skip


def training(model, theirs, rows, length, is_trained):
    """Forward, and backward, of the mean negative log-prob of the next token."""
    tokens = torch.randint(model.config.vocab_size, (rows, length)).to(model.head_weight.device)

    def our_loss():
        hidden = model.hidden(tokens)[:, :-1].flatten(0, 1)
        return -model.logprobs(hidden, tokens[:, 1:].flatten())[0].mean()

    def run(trained, loss):
        with torch.set_grad_enabled(is_trained):
            trained.zero_grad()
            value = loss()
            if is_trained:
                value.backward()

    what = f"{'train' if is_trained else 'forward'} {rows} x {length}"
    return what, rows * length, {
        "ours": lambda: run(model, our_loss),
        "theirs": lambda: run(theirs, lambda: theirs(tokens, labels=tokens).loss)}  # fmt: skip


def of_models(options):
    """Tokens a second of a random Qwen3, and how many times transformers'."""
    shapes, dtype, generated, trained = CASES_OF_MODELS[options.size]
    device = options.device
    for shape in shapes:
        config = ModelConfig(**shape)
        with torch.device("meta"):
            size = sum(p.numel() for p in Transformer(config).parameters())
        print(f"Qwen3 of {size / 1e6:.2f} M parameters, V {config.vocab_size}")
        model = Transformer(config).to(dtype).init_weights(0)
        theirs = transformers_model(model, dtype)
        model = model.to(device)
        theirs = theirs and theirs.to(device)
        cases = [generation(model, theirs, *case) for case in generated]
        for what, tokens, ways in cases + [training(model, theirs, *case) for case in trained]:
            if theirs is None:
                ways = {"ours": ways["ours"]}
            seconds = alternating(ways, options.repeats, device)
            row = {"work": what, "V": config.vocab_size,
                   "tokens/s": tokens / statistics.median(seconds["ours"])}  # fmt: skip
            yield row | (times_as_fast(seconds["theirs"], seconds["ours"]) if theirs else {})


# Log-probs of sampler and trainer ---------------------------------------------------------------


def ordinary_attention(document_1S, group=None):
    return MaskedAttention(Mask.documents(doc_ids=document_1S), parents_in(document_1S[0]), None)


def rows_of(vocab_size, lengths, count, new):
    """Return rows with random prompts of some lengths, which repeat, and their draws."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in lengths]
    return [models.Row(prompts[n % len(prompts)], rng.random(new)) for n in range(count)]


def told_of(rows):
    """Return the sampler's log-probs of what it has sampled."""
    return np.concatenate([np.array(row.logprobs)[row.mask] for row in rows])


def trained_logprobs(model, rows, attention, temperature=1.0):
    """Return the trainer's, by a forward and backward of all rows in micro-batches."""
    batches = PackedBatches(model, attention=attention, micro_tokens=2000, temperature=temperature)
    found = {}

    def loss(indices, mask_BT, lp_BT, entropy_BT):
        found.update((i, lp_T[mask_T].detach().double().cpu().numpy())
                     for i, lp_T, mask_T in zip(indices, lp_BT, mask_BT))  # fmt: skip
        return (lp_BT * mask_BT).sum()

    batches.forward_backward([row.tokens for row in rows], [row.mask for row in rows], loss)
    model.zero_grad()
    return np.concatenate([found[n] for n in range(len(rows))])


def exact(options):
    """The share of log-probs whose bits are the trainer's, and CPU seconds; without, with --exact.

    Of sampling in slots, and of a forward and backward of all rollouts.
    """
    families, dtypes, new = [*TINY], ("float32", "float64", "bfloat16"), 60
    if options.size == "toy":
        families, dtypes, new = ["qwen3"], ("float32", "bfloat16"), 20
    for family, dtype in itertools.product(families, dtypes):
        shares, seconds = [], []
        for is_exact in (False, True):
            model = tiny_model(family, dtype=getattr(torch, dtype))
            attention = ordinary_attention
            if is_exact:
                model = make_exact(model)
                require_exact_kernels(model)
                attention = lambda document, group: packed_attention(document)  # noqa: E731
            rows = rows_of(model.config.vocab_size, (1, 3, 3, 17, 30, 90), 24, new)
            found = []

            def both(model=model, rows=rows, found=found, attention=attention):
                given = dict(max_new_tokens=new, temperature=0.7, end=(7,), slots=5)
                found.append(generate(model, rows, **given))
                found.append(trained_logprobs(model, found[0], attention, 0.7))

            seconds.append(seconds_of(both))
            told, rounded = told_of(found[0]), np.float64 if dtype == "float64" else np.float32
            shares.append(np.mean(told.astype(rounded) == found[1]).item())
        yield dict(family=family, dtype=dtype, share=shares[0], exact=shares[1],
                   seconds=seconds[0], times=seconds[1] / seconds[0])  # fmt: skip


def head(options):
    """How far log-probs are off by the dtype of the head: bfloat16 states, against float64."""
    N, M, V = (64, 32, 2000) if options.size == "toy" else (1024, 576, 49152)
    for deviation in (1, 4, 10):
        hidden_NM = torch.randn(N, M).bfloat16().to(options.device)
        weight_VM = (torch.randn(V, M) * deviation / M**0.5).bfloat16().to(options.device)
        exact_NV = hidden_NM.double() @ weight_VM.double().T
        targets_N = exact_NV.softmax(-1).multinomial(1)[:, 0]
        exact_N = exact_NV.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
        del exact_NV
        for dtype in (torch.bfloat16, torch.float32):
            given = hidden_NM.to(dtype), weight_VM.to(dtype), targets_N
            gap_N = token_logprobs(*given)[0].double() - exact_N
            off = (torch.expm1(gap_N).abs() > 0.01).double().mean()
            gap_N = gap_N.abs()
            yield {"head": f"{dtype}"[6:], "deviation": deviation, "mean": gap_N.mean().item(),
                   "largest": gap_N.max().item(), "off by 1 %": off.item()}  # fmt: skip


# Budgets of activations -------------------------------------------------------------------------


def _budget_rank(budget, hidden, layers, tokens, repeats):
    """Return MB kept for the backward, MB of this process at the peak, and CPU seconds."""
    model = tiny_model("qwen3", vocab_size=300, num_hidden_layers=layers, hidden_size=hidden,
                       intermediate_size=3 * hidden, head_dim=hidden // 4)  # fmt: skip
    how = dict(compile=True, ac=f"memory_budget={budget}")
    model = parallelize(model, Plan(), device_mesh=Grid(Plan()), **how)
    kept = []

    def run(length):
        tokens_1S = torch.arange(length)[None] % 300
        model.hidden(tokens_1S).square().mean().backward()

    run(64)  # compiles, for any length
    keep = lambda x: kept.append(x.nbytes) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run(tokens)
    Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the peak of the compiler
    seconds = [seconds_of(lambda: run(tokens)) for _ in range(repeats)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return sum(kept) / 2**20, peak, statistics.median(seconds)


def budget(options):
    """Forward and backward of compiled layers, each budget in a process of its own, float32."""
    shape = dict(default=(512, 4, 4096), large=(1024, 8, 16384), toy=(16, 1, 64))[options.size]
    for number in (1, 0.5, 0):
        ((kept, peak, seconds),) = launch(1, _budget_rank, number, *shape, options.repeats)
        yield {"memory_budget": number, "MB kept": kept, "MB peak": peak, "seconds": seconds}


# Whole runs -------------------------------------------------------------------------------------


def evaluations_of(folder, objective, seed) -> list:
    """Return a run's lines of metrics that have an evaluation. Make the run if it is not there."""
    out = Path(folder) / f"{objective}-{seed}"
    if not (out / "hf").exists():
        flags = f"--objective {objective} --seed {seed} --out {out} --resume"
        flags += " --log-rollouts none --save-every 0"
        subprocess.run([sys.executable, "-m", "full", *flags.split()], cwd=ROOT, check=True)
    lines = map(json.loads, (out / "metrics.jsonl").open())
    return [line for line in lines if "eval/solved" in line]


def objectives(options):
    """What runs of `guess` solve in the end, and when they solved 0.95; a step of nan is never."""
    for objective in OBJECTIVES:
        runs = [evaluations_of(options.folder, objective, seed) for seed in range(options.repeats)]
        solved = [run[-1]["eval/solved"] for run in runs]
        row = dict(objective=objective, mean=statistics.mean(solved), least=min(solved))
        for seed, run in enumerate(runs):
            steps = (line["step"] + 1 for line in run if line["eval/solved"] >= 0.95)
            row[f"seed {seed}"] = next(steps, math.nan)
        yield row


SUBJECTS = {
    "ring": ring, "ring-memory": ring_memory, "kernel": kernel, "five": five,
    "tree": tree, "models": of_models, "exact": exact, "head": head,
    "objectives": objectives, "budget": budget, "deltanet": deltanet,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

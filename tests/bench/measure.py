"""Measure one subject: `python tests/bench/measure.py SUBJECT [--size large] ..`.

    ring        attention over ranks against torch's SDPA on one process: seconds and memory
    kernel      attention on one device against SDPA and flash
    tree        training on trees of tokens against the flat batch
    five        second versions of the folder against the first
    models      generation and training against transformers, if installed

The rows are printed as a table, and at the end as one line of JSON. A size sets models and lengths:
`default` is for one core, `large` for a GPU, `toy` shows that a subject runs.
"""

import argparse
import functools
import json
import resource
import statistics
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from harness import alternating, peak_mb, print_table, seconds_of, times_as_fast
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention, softplus

import models
import tree_attention
from full.attention.attend import attend
from full.attention.masks import Mask
from full.attention.ring import indices, ring_attention
from full.learn.generate import generate
from full.model import experts, transformer
from full.model.config import ModelConfig
from full.model.deltanet import by_chunk, by_token
from full.model.hf import save_hf
from full.model.logprobs import token_logprobs
from full.model.transformer import Transformer
from full.tiny import tiny
from full.tree.chunks import tree_backward
from full.tree.trie import TokenTrie
from ring_attention import launch
from tree_attention import definition

QWEN_SMALL = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16,
)  # fmt: skip
QWEN3_06B = dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
OF_TREES = dict(
    hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
    num_key_value_heads=2, intermediate_size=384, vocab_size=2048,
)  # fmt: skip
HYBRID = dict(linear_key_head_dim=32, linear_value_head_dim=32)
SETTINGS = {  # of each subject, by size
    "ring": dict(default=[8192, 16384], large=[32768], toy=[64]),  # tokens
    "kernel": dict(default=[1024, 4096], large=[4096, 16384, 65536], toy=[16]),  # tokens
    "tree": dict(  # factor of all lengths, model, dtype
        default=(1, OF_TREES, torch.float32), toy=(0.02, OF_TREES, torch.float32),
        large=(8, QWEN3_06B, torch.bfloat16)),
    "five": dict(default=2048, large=8192, toy=64),  # tokens
    # Models and dtype; (prompts, samples, length, new); (rows, length, is trained).
    "models": dict(
        # Small enough for one thread of a CPU; the vocabulary is what weighs in generation.
        default=(
            [QWEN_SMALL | dict(vocab_size=V) for V in (4096, 32768)], torch.float32,
            [(1, 8, 512, 64), (4, 8, 128, 64), (8, 1, 32, 64)],
            [(4, 256, False), (4, 256, True), (1, 1024, True)]),
        # A released shape, prompts and answers of the lengths that are trained on it.
        large=(
            [QWEN3_06B], torch.bfloat16,
            [(1, 8, 4096, 128), (32, 8, 512, 128), (8, 1, 128, 128), (1, 1, 128, 128)],
            [(4, 2048, False), (4, 2048, True), (1, 8192, True)]),
        toy=(
            [QWEN_SMALL | dict(vocab_size=64)], torch.float32, [(1, 2, 8, 2)],
            [(2, 8, False), (2, 8, True)])),
}  # fmt: skip


# Attention --------------------------------------------------------------------------------------


def random_inputs(tokens, dtype=torch.float32, heads=8, keys=2, width=64, device="cpu"):
    """Return q, k, v that want gradients, and an upstream gradient."""
    shapes = [(1, n, tokens, width) for n in (heads, keys, keys, heads)]
    *leaves, dout = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    return [x.requires_grad_() for x in leaves], dout


def sdpa(q, k, v, dense=None):
    attention = scaled_dot_product_attention
    return attention(q, k, v, attn_mask=dense, is_causal=dense is None, enable_gqa=True)


def flash(*qkv):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(*qkv)


def kernel(options, lengths):
    """One device, bfloat16, causal: `attend`, SDPA (which chooses its kernel) and flash."""
    for n in lengths:
        qkv, dout = random_inputs(n, torch.bfloat16, device=options.device)
        documents = Mask.documents(doc_ids=torch.arange(n)[None] * 8 // n)
        ways = {
            "SDPA, causal": sdpa, "flash, causal": flash,
            "attend, causal": lambda *qkv, n=n: attend(*qkv, Mask.causal(n))[0],
            "attend, 8 documents": lambda *qkv, mask=documents: attend(*qkv, mask)[0],
        }  # fmt: skip
        runs = {way: lambda f=f, x=qkv, up=dout: torch.autograd.grad(f(*x), x, up)
                for way, f in ways.items()}  # fmt: skip
        found = alternating(runs, options.repeats, options.device)
        base = statistics.median(found["SDPA, causal"])
        for way, seconds in found.items():
            median = statistics.median(seconds)
            yield dict(way=way, tokens=n, seconds=median, of_sdpa=median / base)


def over_ranks(method):
    return lambda q, k, v, n: ring_attention(q, k, v, mask=Mask.causal(n), method=method)


RING = {  # way: ranks, and causal attention on each of them
    "SDPA": (1, lambda q, k, v, n: sdpa(q, k, v)),
    "SDPA, dense mask": (1, lambda q, k, v, n: sdpa(q, k, v, Mask.causal(n).dense())),
    "attend": (1, lambda q, k, v, n: attend(q, k, v, Mask.causal(n))[0]),
    "ring": (2, over_ranks("ring")), "all-gather": (2, over_ranks("allgather")),
    "Ulysses": (2, over_ranks("ulysses")), "ring of 4": (4, over_ranks("ring")),
}  # fmt: skip


def _rank_of_ring(way, tokens):
    """Return a rank's CPU seconds, forward and backward, and the MB that they add to its peak."""
    _, attention = RING[way]
    for length in (64, tokens):  # the first, small one loads what libraries load once
        qkv, dout = random_inputs(len(indices(length, dist.get_rank(), dist.get_world_size())))
        before, out = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
        forward = seconds_of(lambda: out.append(attention(*qkv, length)))
        backward = seconds_of(lambda: out[0].backward(dout))
    unit = 1024 if sys.platform == "linux" else 1024**2
    return forward, backward, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit


def ring(options, lengths):
    """Ranks of one thread against one process that does the same work by SDPA; the slowest rank.

    The ideal is SDPA's time divided by the ranks.
    """
    for tokens in lengths:
        found = {way: [] for way in RING}
        for _ in range(options.repeats):
            for way, (ranks, _) in RING.items():
                found[way].append(np.max(launch(ranks, _rank_of_ring, way, tokens), axis=0))
        base = np.median(found["SDPA"], axis=0)[:2].sum()
        for way, times in found.items():
            forward, backward, mb = map(float, np.median(times, axis=0))
            share = (forward + backward) / base
            yield dict(way=way, ranks=RING[way][0], tokens=tokens, forward=forward,
                       backward=backward, of_sdpa=share, of_ideal=1 / (RING[way][0] * share),
                       mb=mb)  # fmt: skip


# Trees ------------------------------------------------------------------------------------------


def flops(config, trie):
    """Return the FLOPs of training, (flat, tree): of layers, pairs of tokens, and the head."""
    # Forward 2 a weight, backward 4. A pair: two products forward, five backward.
    c = config
    layer = c.hidden_size * (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    layer = 6 * c.num_hidden_layers * (layer + 3 * c.hidden_size * c.intermediate_size)
    pair = 14 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    head = 6 * c.vocab_size * c.hidden_size

    # A token of depth n has n pairs, and all but the first ones are scored.
    lengths, depths = trie.lengths.numpy(), (trie.positions + 1).numpy()
    flat = lengths.sum(), (lengths * (lengths + 1) // 2).sum(), (lengths - 1).sum()
    tree = len(depths), depths.sum(), (depths > 1).sum()
    return tuple(int(np.dot((layer, pair, head), counts)) for counts in (flat, tree))


def shapes_of_trees(scale):
    """Return {name: sequences} to measure; scale: of all lengths."""
    rng = np.random.default_rng(0)

    def draw(n):
        return torch.from_numpy(rng.integers(0, 2048, max(1, int(n * scale))))

    prompt, turns = draw(512), [draw(128) for _ in range(8)]
    levels = [[draw(96) for _ in range(2**level)] for level in range(5)]
    root = draw(512)
    group = [torch.cat([prompt, draw(128)]) for _ in range(8)]
    return {
        "GRPO 512 + 8 x 128": group,
        "multi-turn chain, 8 x 128": [torch.cat(turns[: n + 1]) for n in range(8)],
        "binary tree, 5 x 96": [
            torch.cat([levels[k][leaf >> (4 - k)] for k in range(5)]) for leaf in range(16)
        ],
        "star 512 + 64 x 32": [torch.cat([root, draw(32)]) for _ in range(64)],
        "no sharing, 8 x 256": [draw(256) for _ in range(8)],
        "hybrid, GRPO 512 + 8 x 128": group,
    }


def policy_loss(i, logprobs, entropy):
    """A policy gradient with an advantage of the sequence's own; no entropy term."""
    return -(torch.exp(logprobs - logprobs.detach()) * (i % 5 - 2.0)).sum()


def ways_to_train(model, sequences):
    """Return functions: forward and backward of each sequence by itself, and of their tree.

    The tree is in one chunk, in chunks of a quarter and of an eighth, and "again" recomputed.
    """
    placed = [x.to(model.head_weight.device) for x in sequences]
    trie = TokenTrie(sequences)

    def flat():
        model.zero_grad()
        definition(model, placed, policy_loss)

    def by_tree(part, recompute=False):
        model.zero_grad()
        most = -(-len(trie) // part)
        tree_backward(model, TokenTrie(sequences), policy_loss, max_tokens=most,
                      recompute=recompute)  # fmt: skip

    named = {"sparse": [1], "dta N/4": [4], "dta N/8": [8], "dta N/8, again": [8, True]}
    return dict(flat=flat) | {x: functools.partial(by_tree, *given) for x, given in named.items()}


def tree(options, given):
    """Flat is a sequence a call, without padding. The bound of `times` is the ratio of FLOPs."""
    scale, shape, dtype = given
    for name, sequences in shapes_of_trees(scale).items():
        if not name.startswith(options.only):
            continue
        family, widths = ("qwen3_5_text", HYBRID) if name.startswith("hybrid") else ("qwen3", {})
        config = tiny(family, **shape, **widths, max_position_embeddings=1 << 20)
        model = Transformer(config).to(options.device, dtype).init_weights(0)
        ways = ways_to_train(model, sequences)
        peaks = {way: peak_mb(run, options.device) for way, run in ways.items()}
        seconds = alternating(ways, options.repeats, options.device)
        flat_flops, tree_flops = flops(config, TokenTrie(sequences))
        bound = flat_flops / tree_flops
        for way, found in seconds.items():
            times = times_as_fast(seconds["flat"], found)["times"]
            row = dict(shape=name, way=way, seconds=statistics.median(found), mb=peaks[way],
                       times=times)  # fmt: skip
            if family == "qwen3":  # the recurrent layers of a hybrid model have other FLOPs
                row |= dict(bound=bound, of_bound=times / bound)
            yield row


# Second versions --------------------------------------------------------------------------------


def repeated(times, function, *given, **named):
    """Return a call that calls a function several times, without a gradient."""
    return torch.no_grad()(lambda: [function(*given, **named) for _ in range(times)])


def trains(function, *given):
    """Return a call of a function, and of its backward."""
    return lambda: function(*given).square().sum().backward()


def second_versions(N):
    """Yield (what, the first version's call, the second's), for N tokens."""
    shape = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64,
                 num_attention_heads=4, num_key_value_heads=2, vocab_size=4096)  # fmt: skip
    sparse = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128)
    config = tiny("qwen3_moe", **shape | sparse)
    x, few = torch.randn(N, 256, requires_grad=True), torch.randn(8, 256)
    norms = models.RMSNorm(256, config), transformer.RMSNorm(256, config)
    yield "RMSNorm, 8 rows", *(repeated(500, norm, few) for norm in norms)
    mlps = models.SparseMLP(config), experts.SparseMLP(config)
    mlps[1].load_state_dict(mlps[0].state_dict())
    routed = x.detach(), torch.full((16,), N // 16)
    yield "Experts, training", *(trains(mlp.experts, *routed) for mlp in mlps)
    for V in (4096, 32768):
        model = models.Transformer(tiny("qwen3", **shape | dict(vocab_size=V)))
        given, weight = (x, torch.randint(V, (N,))), model.head_weight
        yield (f"log-probs, V = {V}, training",
               trains(lambda x, t, m=model: m.logprobs(x, t)[0], *given),
               trains(lambda x, t, w=weight: token_logprobs(x, w, t)[0], *given))  # fmt: skip

    q, k, v = (torch.randn(1, heads, N, 64) for heads in (4, 2, 2))
    for window in (None, N // 8):
        given = dict(layer=0, scale=0.1, window=window)
        yield (f"causal_attention, window {window}",
               *(repeated(1, module.causal_attention, q, k, v, **given)
                 for module in (models, transformer)))  # fmt: skip
    documents = torch.arange(N)[None] // (N // 16)
    packed = models.packed_attention(documents)
    yield (f"16 documents of {N // 16}, attend", repeated(1, packed, q, k, v, layer=0, scale=0.1),
           repeated(1, attend, q, k, v, Mask.documents(doc_ids=documents)))  # fmt: skip
    q, k, v = (torch.randn(1, 4, N, 64) for _ in range(3))
    log_decay, beta = -softplus(torch.randn(1, 4, N)) / 2, torch.rand(1, 4, N)
    state = [x.requires_grad_() for x in (q, normalize(k, dim=-1), v, log_decay, beta)]
    yield ("gated DeltaNet, token by token, training",
           *(trains(lambda *x, f=f: f(*x)[0], *state) for f in (by_token, by_chunk)))  # fmt: skip

    prompt = torch.randint(1000, (N // 4,))
    sequences = [torch.cat([prompt, torch.randint(1000, (N // 16,))]) for _ in range(64)]
    yield (f"TokenTrie, 64 sequences of {len(sequences[0])}",
           lambda: tree_attention.pack(tree_attention.radix_tree(sequences)),
           lambda: TokenTrie(sequences))  # fmt: skip
    model, prompt = Transformer(tiny("qwen3", **shape)).init_weights(0), prompt[: N // 8].tolist()
    draws = torch.rand(8, N // 64, dtype=torch.float64).tolist()

    def answers(function):
        rows = [models.Row(prompt, u) for u in draws]
        return function(model, rows, max_new_tokens=N // 64, temperature=1.0)

    yield (f"generate, 8 answers of {N // 64} to a prompt of {N // 8}",
           *(functools.partial(answers, f) for f in (models.generate, generate)))  # fmt: skip


def five(options, tokens):
    """How many times our CPU seconds the first version takes, where the folder has a second."""
    for what, theirs, ours in second_versions(tokens):
        seconds = alternating(dict(theirs=theirs, ours=ours), options.repeats)
        yield {"second version": what, **times_as_fast(seconds["theirs"], seconds["ours"])}


# Models -----------------------------------------------------------------------------------------


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


def of_models(options, given):
    """Tokens a second of a random Qwen3, and how many times transformers'."""
    shapes, dtype, generated, trained = given
    for shape in shapes:
        model = Transformer(ModelConfig(**shape)).to(dtype).init_weights(0)
        theirs = transformers_model(model, dtype)
        model = model.to(options.device)
        theirs = theirs and theirs.to(options.device)
        cases = [generation(model, theirs, *case) for case in generated]
        for what, tokens, ways in cases + [training(model, theirs, *case) for case in trained]:
            if theirs is None:
                ways = {"ours": ways["ours"]}
            seconds = alternating(ways, options.repeats, options.device)
            row = {"work": what, "V": model.config.vocab_size,
                   "tokens/s": tokens / statistics.median(seconds["ours"])}  # fmt: skip
            yield row | (times_as_fast(seconds["theirs"], seconds["ours"]) if theirs else {})


# Main -------------------------------------------------------------------------------------------

SUBJECTS = dict(ring=ring, kernel=kernel, five=five, tree=tree, models=of_models)


def main(argv) -> int:
    """Measure a subject and print its rows. Return the exit code."""
    parser = argparse.ArgumentParser("measure.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--size", choices=("default", "large", "toy"), default="default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="trees whose names begin so")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda: torch sees no CUDA device here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    torch.set_num_threads(1)
    subject, given = SUBJECTS[options.subject], SETTINGS[options.subject][options.size]
    rows = print_table(subject(options, given))
    told = dict(bench=options.subject, size=options.size, device=options.device)
    print(json.dumps(told | dict(torch=torch.__version__, rows=rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

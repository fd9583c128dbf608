"""How many times the CPU seconds the five's own version takes, where the folder has a second one.

python tests/bench/against_the_five.py [tokens]    2048 tokens by default. One thread, seven pairs
that alternate: median, least, most.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import models
import tree_attention
from full.attention.attend import attend
from full.attention.masks import Mask
from full.learn.generate import generate
from full.model import experts, transformer
from full.model.logprobs import token_logprobs
from full.tiny import tiny
from full.tree.trie import TokenTrie

SHAPE = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
    moe_intermediate_size=128, sparse_layers=(0, 1), vocab_size=4096,
)  # fmt: skip


def ratios(theirs, ours):
    """Return the median, least and most of the seconds of `theirs` over those of `ours`."""
    found = []
    for _ in range(8):
        begun = time.process_time()
        theirs()
        between = time.process_time()
        ours()
        found.append((between - begun) / (time.process_time() - between))
    found = found[1:]  # the first pair warms up
    return statistics.median(found), min(found), max(found)


def trains(function, *given):
    """Return a call of a function, and of its backward."""
    return lambda: function(*given).square().sum().backward()


def repeated(call, times):
    """Return a call that calls another one several times, without a gradient."""

    @torch.no_grad()
    def calls():
        for _ in range(times):
            call()

    return calls


def generates(function, model, prompts, new):
    """Return a call that decodes some new tokens after each prompt."""

    def call():
        draws = torch.rand(len(prompts), new, dtype=torch.float64).tolist()
        rows = [models.Row(prompt, u) for prompt, u in zip(prompts, draws)]
        function(model, rows, max_new_tokens=new, temperature=1.0)

    return call


def cases(N):
    """Yield (what, the five's call, ours), for N tokens."""
    x = torch.randn(N, 256, requires_grad=True)
    few = torch.randn(8, 256)
    config = tiny("qwen3_moe", **SHAPE)
    mine, its = transformer.RMSNorm(256, config), models.RMSNorm(256, config)
    yield "RMSNorm, training", trains(its, x), trains(mine, x)
    yield "RMSNorm, 8 rows", repeated(lambda: its(few), 500), repeated(lambda: mine(few), 500)
    mine, its = experts.SparseMLP(config), models.SparseMLP(config)
    mine.load_state_dict(its.state_dict())
    yield "SparseMLP, training", trains(its, x[None]), trains(mine, x[None])
    counts = torch.full((16,), N // 16)
    rows = x.detach()
    yield "Experts, training", trains(its.experts, rows, counts), trains(mine.experts, rows, counts)

    for V in (4096, 32768):
        model = models.Transformer(tiny("qwen3", **SHAPE | dict(vocab_size=V)))
        targets, weight = torch.randint(V, (N,)), model.head_weight
        yield (f"log-probs, V = {V}, training",
               trains(lambda m=model, t=targets: m.logprobs(x, t)[0]),
               trains(lambda w=weight, t=targets: token_logprobs(x, w, t)[0]))  # fmt: skip

    q, k = torch.randn(1, 4, N, 64), torch.randn(1, 2, N, 64)
    for window in (None, N // 8):
        options = dict(layer=0, scale=0.1, window=window)
        yield (f"causal_attention, window {window}", *(
            repeated(lambda f=f, o=options: f(q, k, k, **o), 1)
            for f in (models.causal_attention, transformer.causal_attention)))  # fmt: skip
    documents = torch.arange(N)[None] // (N // 16)
    mask = Mask.documents(doc_ids=documents)
    packed = models.packed_attention(documents)
    yield ("16 documents", repeated(lambda: packed(q, k, k, layer=0, scale=0.1), 1),
           repeated(lambda: attend(q, k, k, mask), 1))  # fmt: skip

    prompt = torch.randint(1000, (N // 4,))
    sequences = [torch.cat([prompt, torch.randint(1000, (N // 16,))]) for _ in range(64)]
    yield ("TokenTrie, 64 sequences",
           lambda: tree_attention.pack(tree_attention.radix_tree(sequences)),
           lambda: TokenTrie(sequences))  # fmt: skip
    model = transformer.Transformer(tiny("qwen3", **SHAPE)).init_weights(0)
    prompts = [torch.randint(4096, (N // 8,)).tolist()] * 8
    yield ("generate, 8 answers to a prompt",
           *(generates(f, model, prompts, N // 64) for f in (models.generate, generate)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for what, theirs, ours in cases(int(sys.argv[1]) if len(sys.argv) > 1 else 2048):
        print("| {} | {:.2f} ({:.2f} - {:.2f}) |".format(what, *ratios(theirs, ours)), flush=True)

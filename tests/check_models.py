"""Hold every path of a model to `models.Definition`, in float64: rows of errors.

Tests and `tests/bench/gpu.py` use them.
"""

import math

import torch
import torch.nn.functional as F

import models
from check_attention import relative as relative_error
from full.learn.generate import generate
from full.model.cache import forward_with_cache, prefill
from full.model.config import LINEAR
from full.model.deltanet import Documents
from full.model.hf import full_definition
from full.model.logprobs import token_logprobs
from full.tiny import HYBRID, TINY
from models import FULL, SLIDING

CASES = {
    **{model_type: (model_type, {}) for model_type in TINY | HYBRID},
    "llama biased, tied": ("llama", dict(
        tie_word_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True)),
    "qwen3 tied, slides": ("qwen3", dict(
        tie_word_embeddings=True, layer_types=(FULL, SLIDING), sliding_window=3)),
    "qwen3 linear": ("qwen3", dict(
        rope_parameters={FULL: {"rope_type": "linear", "factor": 3.0}})),
    "qwen3 yarn": ("qwen3", dict(rope_parameters={FULL: {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 2.0}})),
    "llama llama3": ("llama", dict(rope_parameters={FULL: {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}})),
    "qwen3_moe biased": ("qwen3_moe", dict(
        router_bias_rate=0.05, norm_topk_prob=False, sparse_layers=(0, 1))),
}  # fmt: skip


def worst_gradient(mine, got, model, want):
    """Return the largest relative error of a parameter's gradient, under one random upstream.

    got was computed with the model `mine`, want with `model`, which has the same weights.
    """
    upstream = torch.randn_like(want)
    grads = [
        torch.autograd.grad((x * upstream.to(x)).sum(), list(m.parameters()), retain_graph=True)
        for m, x in ((mine, got), (model, want))
    ]
    return max(map(relative_error, *grads))


def path_errors(model, mine=None):
    """Yield (path, error) of one model: values, gradients, packing, cache, log-probs, generation.

    mine: the same model on another device, which is then compared with the definition on the CPU.
    """
    mine = mine or model
    device = mine.head_weight.device
    documents = [torch.randint(model.config.vocab_size, (n,)) for n in (7, 6, 1, 12)]
    truth = torch.cat([full_definition(model, d) for d in documents])
    alone = torch.cat([mine(d[None].to(device))[0] for d in documents])
    yield "one at a time", relative_error(alone, truth)
    yield "gradient, worst parameter", worst_gradient(mine, alone, model, truth)

    # Two rows of two documents, one PAD before each.
    with torch.no_grad():
        tokens = torch.cat([F.pad(d, (1, 0)) for d in documents]).view(2, 15)
        positions = torch.cat([torch.arange(-1, len(d)) for d in documents]).view(2, 15)
        ids = torch.where(positions < 0, -1, (positions < 0).cumsum(1))
        tokens, positions, there = (x.to(device) for x in (tokens, positions, ids))
        attention = Documents(models.packed_attention(there), there)
        packed = mine(tokens, positions=positions, attention=attention)
        yield "packed, PAD anywhere", relative_error(packed.cpu()[ids >= 0], truth)
        yield "cache, ragged rows", relative_error(*logits_by_cache(mine, documents, truth))

    # (8) and (9) from the definition's logits, with torch's own softmax.
    logp = (truth / 0.7).log_softmax(-1)
    targets = torch.randint(model.config.vocab_size, (len(truth),))
    hidden = torch.cat([mine.hidden(d[None].to(device))[0] for d in documents])
    options = dict(temperature=0.7, chunk=5)
    got = torch.stack(token_logprobs(hidden, mine.head_weight, targets.to(device), **options))
    want = torch.stack([logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
    yield "log-probs and entropy in chunks", relative_error(got, want)
    yield "gradient in chunks, worst parameter", worst_gradient(mine, got, model, want)

    # Seven rows of three prompts in two slots, against `models.generate` of all at once.
    prompts = [documents[n].tolist() for n in (0, 1, 1, 2, 0, 0, 1)]
    draws = torch.rand(7, 9, dtype=torch.float64).tolist()
    ways = [[models.Row(prompt, u) for prompt, u in zip(prompts, draws)] for _ in range(2)]
    options = dict(max_new_tokens=9, temperature=0.9, end=range(20))
    generate(mine, ways[0], slots=2, **options)
    # The core's cache has no states.
    (generate if LINEAR in model.config.layer_types else models.generate)(model, ways[1], **options)
    same = all(a.tokens == b.tokens for a, b in zip(*ways))
    logprobs = [sum([row.logprobs for row in rows], []) for rows in ways]
    got, want = (torch.tensor(values, dtype=torch.float64) for values in logprobs)
    yield "generation by slots", relative_error(got, want) if same else math.inf


def logits_by_cache(model, documents, truth):
    """Return logits by halves as ragged prompts, then token by token, and the same of `truth`."""
    got = []
    want = []
    # A row: a document, its logits by the definition, and how many of its tokens the cache has.
    parts = zip(documents, truth.split([len(d) for d in documents]))
    rows = [(d, z, (len(d) + 1) // 2) for d, z in parts]
    cache, logits = prefill(model, [d[:n].tolist() for d, _, n in rows])
    while True:
        got += [*logits]
        want += [z[n - 1] for _, z, n in rows]
        keep = [b for b, (d, _, n) in enumerate(rows) if n < len(d)]
        if not keep:
            return torch.stack(got), torch.stack(want)

        # Rows at their end leave the cache, and the others are fed one token more.
        cache.select(keep)
        rows = [(d, z, n + 1) for d, z, n in (rows[b] for b in keep)]
        tokens = torch.stack([d[n - 1 : n] for d, _, n in rows])
        logits = forward_with_cache(model, cache, tokens.to(logits.device))

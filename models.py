"""Qwen2, Qwen3, Qwen3-MoE and Gemma 3 with Hugging Face's checkpoints, and an action expert.

There is one Transformer, and it does not know which token sees which. Every layer makes queries,
keys and values and hands them to one function, `attention(q, k, v, layer=, scale=, window=)`, that
the caller chose. Causal attention, packed documents and the KV cache are three such functions
below; a ring over many ranks (`ring_attention.py`) and a tree of shared prefixes
(`tree_attention.py`) are two more. The model's own code stays the same under all of them. `check`
works with this file alone; the other commands need tests/measure_models.py.

    python models.py check          # < 1 min on 2 cores: every path against the definition, float64
    python models.py inspect DIR    # a checkpoint: config, table of tensors, what would be loaded
    python models.py bench          # tokens/s, memory, FLOPs, against transformers if it is there
    python models.py control        # 20 s: trains an action expert on a toy task, prints its error

What it must equal, for tokens t_1..t_S (x a vector of width M, [.] concatenation of heads):

    (1)  x^0_i   = embed[t_i]                                            gemma: times sqrt(M)
    (2)  y_i     = x_i + O [ a_i ]                                       gemma: norm'(O [ a_i ])
         a_i     = sum_j softmax_j( scale q_i . k_j ) v_j, over j <= i, sliding: and i - j < window
         q_i     = rope_i(norm_q(Q norm(x_i))), k_i likewise with K, v_i = V norm(x_i)
         (norm': one more norm, with weights of its own)
    (3)  x'_i    = y_i + ffn(norm(y_i))                                  gemma: norm'(ffn(..))
         ffn(h)  = down( act(gate h) * (up h) )
    (4)  norm(x) = w * x / sqrt(mean(x^2) + eps)                         gemma: (1 + w)
    (5)  rope_p(x) = x cos(p f) + (-x[D/2:], x[:D/2]) sin(p f),  f_n = theta^(-2n/D), n = 0..D/2-1
    (6)  sparse:   ffn(h) = sum_e g_e ffn_e(h) over the K experts e with the largest p_e + b_e,
                   p = softmax(router h), g_e = p_e, or p_e / (sum of the K p) if `norm_topk_prob`
                   (b_e: 0, or a bias that evens out the load of the experts)
    (7)  z_i     = head norm(x^last_i)             gemma: c tanh(z / c), c the final softcap, if any
    (8)  logprob_i(t) = z_it / tau - log sum_u exp(z_iu / tau)         tau the temperature
    (9)  entropy_i    = - sum_u exp(logprob_i(u)) logprob_i(u)

Appendix E adds (10) and (11), the experts' load; appendix I (12) and (13), the flow of actions.

Letters in the names of tensors. A capital is a whole dimension; a small letter is a moving part of
it, such as the n tokens of a chunk, or this rank's share, such as v rows of the V.

    B batch rows    S tokens in a row     M model width (hidden_size)   V vocabulary
    H query heads   G key/value heads     D head_dim                    L padded document length
    N tokens (any subset of B x S)        C tokens in a cache's room    X anything, say H + G heads
    E experts       K experts a token     I width of an expert          U documents in a bucket
    Appendices: J pairs (E); R prompts (H); P prefix and T suffix tokens, A action dimensions (I)

Cost per token: 2 flops forward and 4 backward for each parameter outside the embedding that the
token meets (K of the E experts), and attention's 4 S H D forward per layer, half of which a causal
mask hides. The cache holds 2 G D numbers per token and layer; a sliding layer holds those of the
last `window` tokens. Log-probs never hold a whole (N, V) tensor.

Not here: dropout (no released model has any), quantised weights, the vision tower, shared experts.

References: Qwen2 arXiv:2407.10671; Qwen3 arXiv:2505.09388; Gemma 3 arXiv:2503.19786; RoPE
arXiv:2104.09864 (half-split form); RMSNorm arXiv:1910.07467; GQA arXiv:2305.13245.
"""

import dataclasses
import json
import math
import numbers
import os
import reprlib
import sys
import types
import typing
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# 1. The configuration ------------------------------------------------------------------------

FULL = "full_attention"
SLIDING = "sliding_attention"
ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


@dataclass
class ModelConfig:
    """The shape of a `Transformer`. Field names are Hugging Face's wherever it has one.

    A family is nothing but values of these fields: the comments say who sets them, and the table
    in appendix C has the rest. Values that make no model are a ValueError that names the field.
    """

    vocab_size: int  # V
    hidden_size: int  # M
    intermediate_size: int  # width inside a dense feed-forward
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # G: each group of H / G query heads shares a key head
    head_dim: int  # D, which need not be M / H
    model_type: str = "qwen3"  # a key of FAMILIES
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False  # the head is the embedding
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    rope_parameters: dict = field(default_factory=dict)  # layer type -> {"rope_type", ..}
    layer_types: tuple[str, ...] = ()  # FULL or SLIDING for each layer; default all FULL
    sliding_window: int | None = None
    qk_norm: bool = True  # norm_q and norm_k of (2): all but Qwen2
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False
    hidden_act: str = "silu"  # a key of ACTIVATIONS
    norm_offset: bool = False  # (4) with 1 + w: Gemma
    sandwich_norms: bool = False  # the norms marked ' in (2) and (3): Gemma
    scale_embedding: bool = False  # sqrt(M) in (1): Gemma
    query_pre_attn_scalar: float | None = None  # scale of (2) is its -1/2 power; None: head_dim
    final_logit_softcapping: float | None = None  # c of (7)
    num_experts: int = 0  # E
    num_experts_per_tok: int = 0  # K
    moe_intermediate_size: int = 0  # I
    norm_topk_prob: bool = False
    sparse_layers: tuple[int, ...] = ()  # the indices of the layers with experts
    router_bias_rate: float = 0.0  # the rate of (11); 0: the router has no bias
    value_head: bool = False  # a critic, see `Transformer.values`

    def __post_init__(self):
        complete_and_check_config(self)  # fills in layer_types and rope_parameters

    @classmethod
    def from_hf(cls, raw, /) -> "ModelConfig":
        """Read a Hugging Face config: a directory, a config.json, or the dict itself.

        Absent fields get transformers' defaults. A field that would change the numbers and is
        not implemented is a ValueError that names it.
        """
        return read_config(raw)

    def to_hf(self) -> dict:
        """The config.json that transformers 4 and 5 and `from_hf` read back to this model."""
        return write_config(self)


# 2. The definition ---------------------------------------------------------------------------

SQRT_8_OVER_PI = (8 / math.pi) ** 0.5
DEFINED_ACTIVATIONS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_pytorch_tanh": lambda x: x / (1 + (-(SQRT_8_OVER_PI * (x + 0.044715 * x**3))).exp()),
}


def defined_frequencies(rope, D, length, longest):
    """f_n of (5) and the factor on cos and sin; tests/measure_models.py has the other types."""
    factors = {"default": 1, "linear": rope.get("factor")}
    factor = factors[rope["rope_type"]]
    return [rope["rope_theta"] ** (-2 * n / D) / factor for n in range(D // 2)], 1


def definition(model, tokens, /, frequencies=defined_frequencies):
    """Logits (S, V) of one document (S,), equations (1)-(7) token by token. Slow, float64.

    It takes the model's weights and configuration and none of its code, so that `check` compares
    two independent readings of the equations.
    """
    config = model.config
    D = config.head_dim
    weights = {name: p.double() for name, p in model.named_parameters()}
    activation = DEFINED_ACTIVATIONS[config.hidden_act]
    scale = (config.query_pre_attn_scalar or D) ** -0.5
    buffers = dict(model.named_buffers())  # of routers only: their votes, see (6)

    def norm(x, name):
        weight = weights[name + ".weight"]
        if config.norm_offset:
            weight = 1 + weight
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()  # (4)

    # Queries, keys or values of one token: (heads, D), its heads below each other.
    def project(x, name):
        y = weights[name + "_proj.weight"] @ x + weights.get(name + "_proj.bias", 0)
        y = y.view(-1, D)
        return norm(y, name + "_norm") if name + "_norm.weight" in weights else y

    # RoPE turns the plane of x_n and x_(n + D/2) by the angle p f_n. Two turned vectors have a
    # product that depends on the difference of their positions only.
    def rotated(x, p, kind):
        parameters = config.rope_parameters[kind]
        f, factor = frequencies(parameters, D, len(tokens), config.max_position_embeddings)
        angle = p * torch.tensor(f, dtype=torch.float64)
        cos = factor * angle.cos()
        sin = factor * angle.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)  # (5)

    def swiglu(h, gate, up, down):
        return down @ (activation(gate @ h) * (up @ h))

    def feed_forward(h, layer):
        # A layer without experts has one ffn. One with experts weighs those that its router chose:
        # the bias has a say in who is chosen, and none in the weights.
        name = f"model.layers.{layer}.mlp."
        parts = ("gate_proj", "up_proj", "down_proj")
        if layer not in config.sparse_layers:
            return swiglu(h, *(weights[f"{name}{part}.weight"] for part in parts))
        p = (weights[name + "gate.weight"] @ h).softmax(0)
        bias = config.router_bias_rate * buffers.get(name + "votes", 0)
        chosen = (-p - bias).argsort()[: config.num_experts_per_tok]
        total = p[chosen].sum() if config.norm_topk_prob else 1
        outputs = (swiglu(h, *(weights[f"{name}experts.{part}"][e] for part in parts))
                   for e in chosen)  # fmt: skip
        return sum(p[e] / total * out for e, out in zip(chosen, outputs))  # (6)

    # Query head h reads key head h G / H: with H = 4 and G = 2, heads 0 and 1 read key head 0.
    def attended(i, q, k, v, kind):
        first = max(0, i - config.sliding_window + 1) if kind == SLIDING else 0
        out = []
        for head in range(config.num_attention_heads):
            g = head * config.num_key_value_heads // config.num_attention_heads
            score = torch.stack([q[i][head] @ k[j][g] * scale for j in range(first, i + 1)])
            out.append(sum(p * v[first + j][g] for j, p in enumerate(score.softmax(0))))
        return torch.cat(out)

    embed = weights["model.embed_tokens.weight"]
    embedding_scale = config.hidden_size**0.5 if config.scale_embedding else 1
    xs = [embedding_scale * embed[t] for t in tokens.tolist()]  # (1)
    for layer, kind in enumerate(config.layer_types):
        # All of a layer's q, k and v come before any of its outputs, which replace xs one by one.
        # p is the position of a token, and i the token whose output is computed.
        name = f"model.layers.{layer}."
        attn = name + "self_attn."
        hs = [norm(x, name + "input_layernorm") for x in xs]
        q = [rotated(project(h, attn + "q"), p, kind) for p, h in enumerate(hs)]
        k = [rotated(project(h, attn + "k"), p, kind) for p, h in enumerate(hs)]
        v = [project(h, attn + "v") for h in hs]
        for i, x in enumerate(xs):
            a = attended(i, q, k, v, kind)
            y = weights[attn + "o_proj.weight"] @ a + weights.get(attn + "o_proj.bias", 0)
            if config.sandwich_norms:
                y = x + norm(y, name + "post_attention_layernorm")  # (2), gemma
                h = feed_forward(norm(y, name + "pre_feedforward_layernorm"), layer)
                xs[i] = y + norm(h, name + "post_feedforward_layernorm")  # (3), gemma
            else:
                y = x + y  # (2)
                xs[i] = y + feed_forward(norm(y, name + "post_attention_layernorm"), layer)  # (3)

    # Without a head of its own the model uses the embedding; tanh keeps logits inside -c..c.
    head = weights.get("lm_head.weight", embed)
    z = torch.stack([head @ norm(x, "model.norm") for x in xs])  # (7)
    cap = config.final_logit_softcapping
    return cap * torch.tanh(z / cap) if cap else z


# 3. The model --------------------------------------------------------------------------------

class RMSNorm(nn.Module):
    """(4) over the last dimension: (..., M) -> (..., M)."""

    def __init__(self, width, config):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.offset = config.norm_offset
        self.weight = nn.Parameter(torch.full((width,), 0.0 if self.offset else 1.0))

    def forward(self, x, /):
        # NUMERICS: torch's kernel accumulates the mean square of bf16/fp16 input in float32 and of
        # float64 in float64, and casts once, after w (transformers casts before w too). Pinned by
        # tests/test_models.py::test_rms_norm_accumulates_in_float32.
        if not self.offset:
            # In mixed precision states are wider than weights; what is normalised meets a matrix.
            weight = self.weight.to(x.dtype)
            return rms_norm(x, weight, self.eps).to(self.weight.dtype)  # (4)
        # NUMERICS: in bf16 1 + w drops every w below 2^-8; Gemma adds and multiplies in float32 and
        # casts last. Pinned by tests/test_models.py::test_gemma_norm_keeps_small_weights.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(wide)
        return rms_norm(x.to(wide), weight, self.eps).to(self.weight.dtype)


def rope_frequencies(rope, head_dim, /, *, length, longest):
    """f of (5), (D/2,) float64, and the factor on cos and sin.

    rope: {"rope_type", "rope_theta", ...}. length: of the longest row of this call, which only
    dynamic RoPE asks for; longest: max_position_embeddings.
    """
    # Pair n turns by theta^(-2n/D) radians a token (D = 4, theta = 100: 1 and 0.1). Fast pairs tell
    # neighbours apart, slow ones far from near, where the fast ones have gone round many times.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    if rope["rope_type"] == "default":
        return rope["rope_theta"] ** -exponents, 1.0
    return stretched_rope_frequencies(rope, exponents, length, longest)  # for long contexts


def rope_angles(positions_BS, frequencies, factor=1.0, /, *, dtype):
    """cos and sin of (5) for `rotate`, each (B, S, 1, D), in float32 or better.

    sin comes with the sign of (5): minus in the first half of D, plus in the second.
    """
    # NUMERICS: the angles of position 10^5 need float32; a bf16 position is wrong from 257 on.
    # Pinned by tests/test_models.py::test_bf16_model_keeps_float32_rope_angles.
    dtype = torch.promote_types(dtype, torch.float32)
    angle_BS1D = positions_BS.to(dtype)[:, :, None, None] * frequencies.to(dtype)
    cos_BS1D = angle_BS1D.cos()
    sin_BS1D = angle_BS1D.sin()
    if factor != 1:
        cos_BS1D = cos_BS1D * factor
        sin_BS1D = sin_BS1D * factor
    return torch.cat([cos_BS1D, cos_BS1D], -1), torch.cat([-sin_BS1D, sin_BS1D], -1)


def rotate(x_BSXD, cos_BS1D, sin_BS1D, /):
    """(5), half-split form; (B, S, X, D) -> the same. `rope_angles` made cos and sin."""
    # The halves trade places and are added with sin's signs: (a, b) cos + (-b, a) sin.
    swapped_BSXD = x_BSXD.roll(x_BSXD.shape[-1] // 2, -1)
    return (x_BSXD * cos_BS1D).addcmul_(swapped_BSXD, sin_BS1D).to(x_BSXD.dtype)  # (5)


def causal_attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, softcap=None):
    """The default attention: token i of each row sees tokens 0..i, or the last `window` of them.

    Right padding needs no mask: no token sees what is behind it. With a window it is O(S window).
    """
    if softcap is not None:
        raise ValueError("causal_attention has no softcap; pass ring_attention.attend or the like")
    if window is not None and window < q_BHSD.shape[2]:
        return windowed_causal_attention(q_BHSD, k_BGSD, v_BGSD, scale, window)
    options = dict(is_causal=True, scale=scale, enable_gqa=True)
    return F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, **options)


class Attention(nn.Module):
    """(2) without its residual: projections, norms and RoPE, and the caller's attention. How many
    heads there are is read off the weights: under tensor parallelism a rank holds only some."""

    def __init__(self, config, layer):
        super().__init__()
        M = config.hidden_size
        D = config.head_dim
        H = config.num_attention_heads
        G = config.num_key_value_heads
        self.layer = layer
        self.head_dim = D
        self.kind = config.layer_types[layer]
        self.scale = (config.query_pre_attn_scalar or D) ** -0.5
        self.window = config.sliding_window if self.kind == SLIDING else None

        # Module names here and below are Hugging Face's, so that dense checkpoints need no table.
        self.q_proj = nn.Linear(M, H * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(M, G * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(M, G * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * D, M, bias=config.o_bias)
        self.q_norm = RMSNorm(D, config) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config) if config.qk_norm else nn.Identity()

    def forward(self, x_BSM, ropes, attention, /):
        # (B, S, M) -> (B, S, heads, D). Norms work on single heads and come before RoPE.
        q_BSHD = self.q_norm(self.q_proj(x_BSM).unflatten(-1, (-1, self.head_dim)))
        k_BSGD = self.k_norm(self.k_proj(x_BSM).unflatten(-1, (-1, self.head_dim)))

        # Queries and keys are turned by the same angles.
        q_BHSD = rotate(q_BSHD, *ropes[self.kind]).transpose(1, 2)
        k_BGSD = rotate(k_BSGD, *ropes[self.kind]).transpose(1, 2)
        v_BGSD = self.v_proj(x_BSM).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        # The seam: the function that the caller chose decides who sees whom, and where keys and
        # values live. It also matches the H heads of q with the G of k and v.
        options = dict(layer=self.layer, scale=self.scale, window=self.window)
        out_BHSD = attention(q_BHSD, k_BGSD, v_BGSD, **options)
        return self.o_proj(out_BHSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """ffn of (3). `balance` is there because `SparseMLP`, which has one, can take its place."""

    def __init__(self, config):
        super().__init__()
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSM, balance=None, /):
        # The gate decides, entry by entry, how much of up goes down.
        return self.down_proj(self.act(self.gate_proj(x_BSM)) * self.up_proj(x_BSM))


class Layer(nn.Module):
    """(2) and (3): a residual block, normalised before its parts and, in Gemma, after them too."""

    def __init__(self, config, layer):
        super().__init__()
        self.sandwich = config.sandwich_norms
        self.self_attn = Attention(config, layer)
        self.mlp = SparseMLP(config, layer) if layer in config.sparse_layers else MLP(config)

        # post_attention_layernorm is Hugging Face's name for two things: in Gemma the norm' of
        # (2), in the other families the norm before the feed-forward.
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        if self.sandwich:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config)

    def forward(self, x_BSM, ropes, attention, balance=None, /):
        # The states themselves are never normalised. Each part adds what it makes of their norm,
        # so that the gradient of the last layer reaches the first undiminished.
        h_BSM = self.self_attn(self.input_layernorm(x_BSM), ropes, attention)
        if not self.sandwich:
            x_BSM = x_BSM + h_BSM  # (2)
            return x_BSM + self.mlp(self.post_attention_layernorm(x_BSM), balance)  # (3)
        x_BSM = x_BSM + self.post_attention_layernorm(h_BSM)  # (2), gemma
        h_BSM = self.mlp(self.pre_feedforward_layernorm(x_BSM), balance)
        return x_BSM + self.post_feedforward_layernorm(h_BSM)  # (3), gemma


class Decoder(nn.Module):
    """Everything below the head. A module of its own so that parameter names are Hugging Face's."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config)


class Transformer(nn.Module):
    """A causal language model.

    `forward(tokens)` gives logits (B, S, V). Training calls its two halves: `.hidden(tokens)`
    stops before the head, (B, S, M), and `.logprobs(hidden, targets)` applies the head in chunks
    to what is scored. Tied embeddings are one parameter, `model.embed_tokens.weight`: no `lm_head`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.rope = Rope(config)
        self.attention = causal_attention  # what layers call unless `hidden` is given another
        self.states_dtype = None  # of the states between layers, or None: that of the weights
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.value_head:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def hidden(self, tokens_BS, /, *, positions=None, attention=None, balance=None):
        """Final normalised states (B, S, M) of int64 tokens (B, S), or of embeddings (B, S, M).

        positions: (B, S) int64, for RoPE only; default 0..S-1. attention: the callable that each
        layer calls as attention(q, k, v, layer=, scale=, window=), with q (B, H, S, D), k and v
        (B, G, S, D), returning (B, H, S, D); default `self.attention`. balance: what sparse
        layers tell of their routing to, see `Balance`. ValueError for other shapes or unknown ids.
        """
        # A pipeline's later stages get the states of the stage before in place of tokens. Such
        # embeddings are taken as they are: Gemma's sqrt(M) is not applied to them.
        require_tokens_or_states(tokens_BS)
        x_BSM = tokens_BS if tokens_BS.is_floating_point() else self.embed(tokens_BS)
        x_BSM = x_BSM.to(self.states_dtype or x_BSM.dtype)

        # Positions say how far apart tokens are; which of them see each other is attention's.
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=x_BSM.device)[None]
        ropes = self.rope(positions, x_BSM.dtype)
        for layer in self.model.layers:
            x_BSM = layer(x_BSM, ropes, attention or self.attention, balance)
        return self.model.norm(x_BSM)

    def embed(self, tokens_BS, /):
        """(1): (B, S) -> (B, S, M)."""
        # Ids are checked here and not in embed_tokens, which tensor parallelism replaces: there
        # each rank has some rows, and a token that no rank has would silently become zeros.
        self.require_tokens(tokens_BS)
        x_BSM = self.model.embed_tokens(tokens_BS)  # (1)
        if not self.config.scale_embedding:
            return x_BSM
        # NUMERICS: the checkpoint was trained with sqrt(M) rounded to the weight's dtype: in bf16
        # sqrt(3072) is 55.5. Pinned by tests/test_models.py::test_gemma_scales_by_a_rounded_root.
        return x_BSM * torch.tensor(self.config.hidden_size**0.5, dtype=x_BSM.dtype).item()

    def logits(self, hidden, /):
        """(7): (..., M) -> (..., V), in the model's dtype. `hidden` applied the norm already."""
        weight_vM, rows = self.head_rows()
        z = F.linear(hidden, weight_vM)  # (7)
        cap = self.config.final_logit_softcapping
        z = cap * torch.tanh(z / cap) if cap else z
        return gather_logits(z, rows["group"], self.config.vocab_size) if rows else z

    def forward(self, tokens_BS, /, *, positions=None, attention=None, balance=None):
        """Logits (B, S, V) in the model's dtype; the parameters are those of `hidden`."""
        options = dict(positions=positions, attention=attention, balance=balance)
        return self.logits(self.hidden(tokens_BS, **options))

    def logprobs(self, hidden, targets, /, *, temperature: float = 1.0):
        """(8) and (9) of targets (N,) given hidden (N, M): two (N,) tensors, float32 or better."""
        # Under tensor parallelism a rank has v of the V rows, and the ranks sum what theirs tell.
        weight_vM, options = self.head_rows()
        options |= dict(temperature=temperature, softcap=self.config.final_logit_softcapping)
        options |= dict(vocab_size=self.config.vocab_size)
        return token_logprobs(hidden, weight_vM, targets, **options)

    @property
    def head_weight(self):
        """The (V, M) matrix of (7)."""
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def head_rows(self):
        """This rank's rows of `head_weight`, and which they are. Tensor parallelism replaces it."""
        return self.head_weight, {}

    def values(self, hidden, /):
        """A critic's value of each state, (..., M) -> (...), float32 or better."""
        if not self.config.value_head:
            raise ValueError("this model has no value head; call add_value_head() first")
        value = self.score(hidden)[..., 0]
        return value.to(torch.promote_types(value.dtype, torch.float32))

    def add_value_head(self) -> "Transformer":
        """Give a model that has none a value head of zeros: a critic starts from a policy."""
        return give_value_head(self)

    def init_weights(self, seed: int):
        """Draw all weights from a seed, the same in every dtype; see `draw_weights`."""
        return draw_weights(self, seed)

    def one_token_step(self):
        """The fastest `extend` by a token a row, f(cache, tokens_B1); see `one_token_step`."""
        return one_token_step(self)

    def require_tokens(self, tokens, /) -> None:
        """See `require_tokens_in_vocabulary`: for whoever hands tokens to one stage of many."""
        require_tokens_in_vocabulary(tokens, self.config.vocab_size)


# 4. Mixture of experts -----------------------------------------------------------------------

class SparseMLP(nn.Module):
    """(6): each token goes to K experts. The bias b is rate * votes, and (11) casts the votes."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.top_k = config.num_experts_per_tok
        self.normalised = config.norm_topk_prob
        self.rate = config.router_bias_rate
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        if self.rate:
            # NUMERICS: votes are whole steps of b. b is not stored, so no cast of the model rounds
            # it. Pinned by tests/test_families.py::test_the_router_bias_survives_bfloat16.
            self.register_buffer("votes", torch.zeros(config.num_experts, dtype=torch.int64))

    def forward(self, x_BSM, balance=None, /):
        x_NM = x_BSM.flatten(0, -2)
        scores_NE, chosen_NK, weight_NK = self.route(x_NM)

        # Each token is copied K times, and the copies are sorted by expert, so that an expert's
        # rows lie together. Two tokens with K = 2 of E = 3 experts:
        #
        #     chosen_NK   [[2, 0], [1, 2]]   flattened 2 0 1 2
        #     order       [1, 2, 0, 3]       copy 1 goes to expert 0, copy 2 to 1, 0 and 3 to 2
        #     counts_E    [1, 1, 2]          and order.argsort() = [2, 0, 1, 3] is the way back
        #
        # NUMERICS: permutations and then one sum over K: nothing is added in the order that threads
        # arrive, forward or backward. Pinned by tests/test_families.py::test_moe_is_repeatable.
        order = chosen_NK.flatten().argsort(stable=True)
        counts_E = torch.bincount(chosen_NK.flatten(), minlength=scores_NE.shape[1])
        copies_nM = x_NM[:, None].expand(-1, self.top_k, -1).flatten(0, 1)
        out_nM = self.experts(copies_nM.index_select(0, order), counts_E)
        out_NKM = out_nM.index_select(0, order.argsort()).unflatten(0, (-1, self.top_k))
        out_BSM = (out_NKM * weight_NK[:, :, None]).sum(1).view_as(x_BSM)  # (6)

        # The balance loss (10) is not returned: `AttachLoss` gives back the output as it is, and
        # its backward adds the gradient of the loss, in whichever pipeline stage this layer runs.
        loss = balance(scores_NE, chosen_NK, layer=self.layer) if balance else None
        return out_BSM if loss is None else AttachLoss.apply(out_BSM, loss)

    def route(self, x_NM, /):
        """p (N, E) of (6), the chosen experts (N, K) and their g (N, K) in x's dtype."""
        # NUMERICS: softmax and its sum in float32 or better, g cast back, as the models were
        # trained. Pinned by tests/test_families.py::test_the_router_works_in_float32.
        wide = torch.promote_types(x_NM.dtype, torch.float32)
        scores_NE = self.gate(x_NM).softmax(-1, dtype=wide)

        # The bias decides who is chosen. It is no part of g: it would change what the model says.
        biased_NE = scores_NE + self.rate * self.votes if self.rate else scores_NE
        chosen_NK = biased_NE.topk(self.top_k, dim=-1).indices
        weight_NK = scores_NE.gather(-1, chosen_NK)
        if self.normalised:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return scores_NE, chosen_NK, weight_NK.to(x_NM.dtype)


# 5. Log-probabilities in chunks --------------------------------------------------------------

def token_logprobs(
    hidden_NM, weight_vM, targets_N, /, *, temperature=1.0, softcap=None, chunk=None,
    group=None, vocab_start=0, vocab_size=None,
):  # fmt: skip
    """Log-prob of each target and entropy of each distribution, (8) and (9).

    Returns two (N,) tensors in float32 (float64 for float64), differentiable in hidden and weight.
    No tensor is larger than (chunk, V). ValueError for other shapes and targets outside of 0..V-1.

    hidden_NM (N, M), weight_vM (V, M): of one floating dtype. targets_N: (N,) int64 in 0..V-1.
    temperature: tau of (8).
    softcap: z := c tanh(z / c) before the temperature (Gemma).
    chunk: rows a matmul. Default: 2^22 logits' worth, at least 128, but half of N at the most.
    group: vocabulary-parallel. Every rank of the group calls with the same hidden and targets, and
        with its rows of the weight. Every rank gets the same results, the whole gradient of
        hidden, and its rows' gradient of the weight.
    vocab_start: this rank has the v rows of the vocabulary from there on.
    vocab_size: V, for the ranks of a group; without it a target in nobody's rows gives -inf.
    """
    require_scorable(hidden_NM, weight_vM, targets_N, group, vocab_size, temperature, chunk)
    kept_chunks = 1  # of so many chunks the exponentials are kept, see `TokenLogprobs`
    if chunk is None:
        chunk, kept_chunks = default_chunks(len(targets_N), weight_vM)
    options = LogprobOptions(temperature, softcap, chunk, kept_chunks, group, vocab_start)
    return TokenLogprobs.apply(hidden_NM, weight_vM, targets_N, options)


class TokenLogprobs(torch.autograd.Function):
    """(8) and (9), and d logprob(t)/dz = onehot(t) - p, d entropy/dz = -p (log p + entropy).

    Plain autograd would keep every chunk's logits for the backward, (N, V) in all. Here a chunk's
    logits are dropped and computed again in the backward, for 2 M V flops a token. The exponentials
    of the last chunks stay (by default 2^22); with a softcap none, as its slope needs the logits.
    """

    @staticmethod
    def forward(ctx, hidden_NM, weight_vM, targets_N, options):
        # A chunk's logits z become five numbers a token: the largest, m; the target's; the sums
        # total = sum e^(z - m) and weighted = sum (z - m) e^(z - m); and how many ranks own the
        # target. Both results come from these, and the backward needs only lse and entropy.
        dtype = torch.promote_types(hidden_NM.dtype, torch.float32)
        sums_4N = torch.zeros(4, len(targets_N), dtype=dtype, device=hidden_NM.device)
        largest_N = torch.empty(len(targets_N), dtype=dtype, device=hidden_NM.device)
        ctx.exponentials = {}  # first token of a chunk -> e^(z - m), and its m
        scratch = Scratch()
        for n in range(0, len(targets_N), options.chunk):
            rows = slice(n, n + options.chunk)
            if len(ctx.exponentials) == options.kept_chunks > 0:
                del ctx.exponentials[min(ctx.exponentials)]  # the oldest, before the next is made

            # The target's logit, on the rank that has its row.
            z_nv = scaled_logits(hidden_NM[rows], weight_vM, options, scratch)
            local_n1, owned_n1 = local_targets(targets_N[rows], len(weight_vM), options)
            target_n = torch.where(owned_n1, z_nv.gather(-1, local_n1), 0)[:, 0]

            # In place wherever it can be: z becomes z - m, and that becomes (z - m) e^(z - m).
            largest_N[rows] = z_nv.amax(-1)
            shifted_nv = z_nv.sub_(largest_N[rows, None])
            keep = options.kept_chunks > 0 and options.softcap is None
            e_nv = shifted_nv.exp() if keep else scratch.exp(shifted_nv)
            weighted_n = shifted_nv.mul_(e_nv).sum(-1)
            sums_4N[:, rows] = torch.stack([target_n, e_nv.sum(-1), weighted_n, owned_n1[:, 0]])
            if keep:
                ctx.exponentials[n] = e_nv, largest_N[rows, None]

        # Each rank has summed over its own rows of the vocabulary, around its own m. So the ranks
        # agree on the largest m first. With d = own m - largest m total becomes e^d total, weighted
        # becomes e^d (weighted + d total), and only then are they added.
        if options.group is not None:
            largest_N, sums_4N = combine_over_ranks(largest_N, sums_4N, options.group)

        # log p = z - m - log total, so that -sum p log p = log total - weighted / total. A target
        # that nobody owns has no logit.
        target_N, total_N, weighted_N, owners_N = sums_4N
        lse_N = largest_N + total_N.log()
        logprobs_N = (target_N - lse_N).masked_fill(owners_N == 0, -math.inf)  # (8)
        entropy_N = total_N.log() - weighted_N / total_N  # (9)
        ctx.save_for_backward(hidden_NM, weight_vM, targets_N, lse_N, entropy_N)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, dlogprobs_N, dentropy_N):
        hidden_NM, weight_vM, targets_N, lse_N, entropy_N = ctx.saved_tensors
        options = ctx.options
        # z was divided by the temperature, so what goes back to it is divided too. An output that
        # nobody used has no gradient; for the entropy that saves work.
        dlogprobs_N = torch.zeros_like(lse_N) if dlogprobs_N is None else dlogprobs_N
        dlogprobs_N = dlogprobs_N / options.temperature
        if dentropy_N is not None:
            dentropy_N = dentropy_N / options.temperature

        # NUMERICS: the head's gradient is a sum over chunks, so it is summed in float32 or better.
        # Pinned by tests/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
        dhidden_NM = torch.empty_like(hidden_NM)
        dweight_vM = torch.zeros_like(weight_vM, dtype=lse_N.dtype)
        for n in range(0, len(targets_N), options.chunk):
            rows = slice(n, n + options.chunk)
            entropy = None
            if dentropy_N is not None:
                entropy = dentropy_N[rows, None], entropy_N[rows, None]
            exponentials = ctx.exponentials.pop(n, None)  # used up: a second backward has none
            dz_nv = logits_gradient(
                hidden_NM[rows], weight_vM, targets_N[rows], lse_N[rows, None],
                dlogprobs_N[rows, None], entropy, exponentials, options)  # fmt: skip

            # z = hidden weight^T, so its gradient goes to both. One dtype: add without a copy.
            dhidden_NM[rows] = dz_nv @ weight_vM
            if dweight_vM.dtype == dz_nv.dtype:
                dweight_vM.addmm_(dz_nv.T, hidden_NM[rows])
            else:
                dweight_vM += dz_nv.T @ hidden_NM[rows]
        if options.group is not None:
            dist.all_reduce(dhidden_NM, group=options.group)  # a sum over all rows of the weight
        return dhidden_NM, dweight_vM.to(weight_vM.dtype), None, None


# 6. Packed documents -------------------------------------------------------------------------

def packed_attention(lengths=None, /, *, doc_ids=None, position_ids=None, waste=1.25):
    """Causal attention inside each document of a packed batch: the callable for `hidden`.

    Give one of three. lengths: of documents that lie end to end in one row (1, S). doc_ids (B, S)
    int64: one number per document, -1 for PAD, anywhere. position_ids (B, S) int64: a document
    starts where a position is not the one before plus 1; -1 is PAD. Nothing sees PAD, and its
    output is 0. waste: in a bucket the longest document is at most so many times the shortest.

        lengths 3 2 3:   a a a b b c c c   ->   bucket (2, 3):  a a a    bucket (1, 2):  b b
                                                                c c c
    """
    # A mask over the packed row would cost S^2 work, most of it between documents that do not see
    # each other. Documents of about one length are gathered into a rectangle instead, padded behind
    # their ends by their last token, where no real token looks. Only attention meets this padding.
    doc_BS = document_ids(lengths, doc_ids, position_ids)
    shape = tuple(doc_BS.shape)
    token_N, doc_lengths = documents_in_order(doc_BS)
    buckets = buckets_by_length(token_N, doc_lengths, waste)
    all_one_length = len(set(doc_lengths)) == 1 and len(token_N) == doc_BS.numel()
    on_device = {}  # device -> the buckets there, for all layers

    def attention(q_BHSD, k_BGSD, v_BGSD, /, **options):
        if (q_BHSD.shape[0], q_BHSD.shape[2]) != shape:
            raise ValueError(f"packed for {shape} tokens, got {tuple(q_BHSD.shape)}")

        # Documents of one length and no PAD: cutting the row is all the gathering there is.
        if all_one_length:
            qkv = q_BHSD, k_BGSD, v_BGSD
            return attention_of_equal_documents(qkv, doc_lengths[0], options)

        # For each bucket gather, attend, and keep what is no padding. Each real token is in one
        # bucket once, so that the results put next to each other go back by one copy.
        buckets_here, real_tokens = buckets_on(q_BHSD.device, buckets, on_device)
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q_BHSD, k_BGSD, v_BGSD)]
        results = []
        for token_UL, is_real_UL in buckets_here:
            token_n = token_UL.flatten()
            rows = (x.index_select(0, token_n).unflatten(0, token_UL.shape) for x in flat)
            out_UHLD = causal_attention(*(x.transpose(1, 2) for x in rows), **options)
            results.append(out_UHLD.transpose(1, 2)[is_real_UL])
        out_NHD = torch.zeros_like(flat[0])
        if results:
            out_NHD = out_NHD.index_copy(0, torch.cat(real_tokens), torch.cat(results))
        return out_NHD.unflatten(0, shape).transpose(1, 2)

    return attention


# 7. The cache --------------------------------------------------------------------------------

class KVCache:
    """Keys and values of the tokens so far. Row b holds `lengths.of_B[b]` of them, left-aligned.

        row 0   k k k k . .        lengths 4 2, room for C = 6
        row 1   k k . . . .        the next token of row 1 is written at 2, whatever row 0 does

    `cache.attention` is the callable for `Transformer.hidden`; `extend` feeds tokens and moves the
    lengths on. `select(rows)` repeats, drops and reorders rows: a fork of a conversation, finished
    rows out. Appendix H has two thriftier layouts. A sliding layer keeps its window only, and
    `share(rows)` makes several rows of each prompt, whose keys full layers go on to hold once.
    """

    def __init__(self, rows: int, device=None, slack=0):
        self.slack = slack  # of how many tokens sliding layers can `advance` back
        self.lengths = Lengths(torch.zeros(rows, dtype=torch.long, device=device))
        self.layers = {}  # layer -> k and v (2, B, G, C, D)
        self.counts_B = None  # real tokens a row in this call, for sliding layers; None: all
        self.sliding = set()  # the layers that keep their window only
        self.prompts = None  # `SharedPrompts` after `share`
        # How many tokens of each row `layers` holds: all, but a shared prompt is stored elsewhere.
        self.stored_lengths = self.lengths

    def attention(self, q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, softcap=None):
        """Append k, v of S new tokens a row and attend: query i sees keys 0..lengths[b] + i."""
        if softcap is not None:
            raise ValueError("KVCache has no softcap")
        # A prompt has nothing older to see, and its right padding needs no mask.
        if self.lengths.longest == 0:
            append_to_store(self, layer, k_BGSD, v_BGSD, window)
            return causal_attention(q_BHSD, k_BGSD, v_BGSD, layer=layer, scale=scale, window=window)
        if window is not None:
            return sliding_cache_attention(self, q_BHSD, k_BGSD, v_BGSD, layer, scale, window)

        # Keys of a row lie in the order of their positions, so one comparison is the whole mask:
        # it hides later new tokens, and what stands behind a shorter row. With one new token in
        # each row and rows of equal length there is nothing to hide.
        S = q_BHSD.shape[2]
        room = self.stored_lengths.longest + S
        k_BGCD, v_BGCD = append_to_store(self, layer, k_BGSD, v_BGSD)[:, :, :, :room]
        mask_B1SC = None
        if S > 1 or not self.stored_lengths.even:
            mask_B1SC = keys_up_to(self.stored_lengths, S, room)
        if self.prompts is not None:
            return self.prompts.attention(q_BHSD, k_BGCD, v_BGCD, mask_B1SC, layer, scale)
        return attend_to_stored(q_BHSD, k_BGCD, v_BGCD, mask_B1SC, scale)

    def advance(self, more_B=None, /, *, S=1):
        """Row b now holds more_B[b] tokens more, or fewer; by default S more."""
        self.lengths = self.lengths.plus(more_B, S)
        self.stored_lengths = self.stored_lengths.plus(more_B, S) if self.prompts else self.lengths

    def select(self, rows, /):
        """Keep rows (int64 list or tensor), in that order, repeats allowed."""
        # Indexing copies, so that a row that is kept twice can go on in two ways: a fork.
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.lengths.of_B.device)
        self.lengths = Lengths.measured(self.lengths.of_B[rows])
        self.layers = {layer: kv[:, rows] for layer, kv in self.layers.items()}
        self.stored_lengths = self.lengths
        # Shared prompts: keep those that the kept rows still begin with (appendix H).
        if self.prompts is not None and len(rows):
            self.stored_lengths = self.prompts.give_rows(self.prompts.prompt_B[rows], self.lengths)

    def share(self, rows, /):
        """`select(rows)` of rows that are prompts, whose keys full layers keep once."""
        share_prompts(self, rows)


@torch.no_grad()
def extend(model, cache, tokens_BS, /, counts=None):
    """Feed tokens (B, S), right-padded, of which counts (B,) are real (default S); logits (B, V)
    after the last real token of each row. Positions go on from the cache's lengths."""
    S = tokens_BS.shape[1]
    positions = cache.lengths.of_B[:, None] + torch.arange(S, device=tokens_BS.device)

    # Lengths 4 2, S = 2, counts 2 1: the new tokens have the positions, and their keys the slots,
    # [[4, 5], [2, 3]], and then the lengths are 6 3. So the padding, in slot 3 of row 1, is written
    # too (not by sliding layers). No real query sees it, and the row's next token overwrites it.
    # Every layer reads the same lengths; they move on only when all layers have written.
    cache.counts_B = counts
    x_BSM = model.hidden(tokens_BS, positions=positions, attention=cache.attention)
    cache.advance(counts, S=S)
    if counts is None:
        return model.logits(x_BSM[:, -1])
    return model.logits(x_BSM[torch.arange(len(counts), device=counts.device), counts - 1])


# The idea ends here. What follows makes it fast, strict or connected ---------------------------

# A. Generation -------------------------------------------------------------------------------
# For whoever samples from the model: rollouts, evaluation, chat.
# Skip it if you only train on sequences that somebody else has made. min-p: arXiv:2407.01082.

@torch.no_grad()
def prefill(model, prompts, /, *, slack=0):
    """A cache with one row a prompt (lists of token ids, any lengths); logits (B, V) after each.

    slack: how many tokens a row will ever be asked to give back, see `KVCache.advance`.
    """
    require_prompts(prompts, model.config.vocab_size)
    # One right-padded forward. Prompts of equal length have no padding and need no counts.
    device = model.head_weight.device
    lengths = [len(prompt) for prompt in prompts]
    counts = torch.tensor(lengths, device=device) if len(set(lengths)) > 1 else None
    tokens_BS = nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    cache = KVCache(len(prompts), device=device, slack=slack)
    return cache, extend(model, cache, tokens_BS.to(device), counts)


class Sampled(NamedTuple):
    """Tokens (B,) int64 and two log-probs (B,) of each, in float32 or better."""

    tokens: torch.Tensor
    logprobs: torch.Tensor  # under what was drawn from: after temperature and cuts, summing to 1
    full_logprobs: torch.Tensor  # under softmax(logits / temperature), the whole vocabulary


@torch.no_grad()
def sample(logits_BV, uniform_B, /, *, temperature: float, top_k=None, top_p=None, min_p=None):
    """Draw a token a row: invert the cumulative distribution at uniform_B (B,), float64 in [0, 1).

    temperature 0 takes the likeliest token; both log-probs are then under softmax(logits). top_k
    keeps the k likeliest tokens, top_p of those the fewest that hold so much, min_p what is at
    least so likely relative to the likeliest; in this order, as in transformers. ValueError for
    options that mean nothing. Returns `Sampled`.
    """
    check_sampling(temperature, top_k, top_p, min_p)
    dtype = torch.promote_types(logits_BV.dtype, torch.float32)
    z_BV = logits_BV.to(dtype) if temperature in (0, 1) else logits_BV.to(dtype) / temperature

    # NUMERICS: not log_softmax, whose float32 normaliser adds the terms one by one and loses a long
    # tail (1e-4 at 150 thousand tokens); torch's sum adds in pairs. Pinned by
    # tests/test_models.py::test_the_samplers_logprobs_are_the_trainers.
    largest_B1 = z_BV.amax(-1, keepdim=True)
    e_BV = (z_BV - largest_B1).exp_()

    # The randomness is an argument. A draw depends on its own row and its own uniform number,
    # never on which rows share the batch: a run can be repeated one row at a time.
    kept_BV = e_BV
    if temperature == 0:
        tokens_B1 = z_BV.argmax(-1, keepdim=True)
    elif uniform_B.dtype != torch.float64:
        raise ValueError(f"uniform must be float64 (float32 rounds up to 1), got {uniform_B.dtype}")
    else:
        if top_k or min_p or top_p not in (None, 1):
            kept_BV = e_BV * likeliest_tokens(e_BV, top_k, top_p, min_p)
        tokens_B1 = invert_distribution(kept_BV, uniform_B)

    # (8) twice: relative to all tokens, which is what the trainer computes, and to the kept ones.
    score_B = (z_BV.gather(-1, tokens_B1) - largest_B1)[:, 0]
    full_B = score_B - e_BV.sum(-1).log()
    cut_B = full_B if kept_BV is e_BV else score_B - kept_BV.sum(-1).log()
    return Sampled(tokens_B1[:, 0], cut_B, full_B)


@torch.inference_mode()
def generate(
    model, rows, /, *, max_new_tokens, temperature=1.0, top_k=None, top_p=None, min_p=None,
    end=(), ending=None, after=None, seed=None, look_every=None,
):  # fmt: skip
    """Decode rows (prompts of any lengths) until each has ended; returns them, in their order.

    rows: `Row`s, or lists of token ids, of which Rows are made.
    max_new_tokens: a row with so many tokens behind its prompt ends, with `truncated` set.
    temperature, top_k, top_p, min_p: those of `sample`. 0 is greedy and needs no draws.
    end: the stop tokens. A sampled one calls `after`.
    ending: called with the rows that have ended since it was called last, all at once, before
        `after` is called with each: a task that lives elsewhere is asked once.
    after: after(row) -> the rows that go on in its place. None, the default, ends it; itself with
        tokens in its queue is the next turn of a conversation; several are a fork. With `after`,
        rows are returned by their number of new tokens, and forks of one row in their order.
    seed: makes the draws of rows that have none. ValueError if such a row gets no seed.
    look_every: so many tokens of each row are drawn before Python looks at them; what a row drew
        behind its end is dropped. It changes no result. Default: 1, and 8 on a GPU, which would
        have to wait for each look.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    check_sampling(**options)
    rows = rows_with_draws(rows, max_new_tokens if temperature > 0 else 0, seed)
    require_queues(rows, model.config.vocab_size)
    if not rows:
        return []

    # Equal prompts are computed once: GRPO samples a group of answers to each.
    given = rows
    prompts = list(dict.fromkeys(tuple(row.tokens) for row in rows))
    longest = max(map(len, prompts))
    room = model.config.max_position_embeddings
    if longest + max_new_tokens > room:
        raise ValueError(f"a prompt of {longest} tokens and max_new_tokens {max_new_tokens} exceed "
                         f"the model's {room} positions; shorten one of them")  # fmt: skip
    look_every = checked_look_every(look_every, model)
    cache, logits_BV = prefill(model, prompts, slack=look_every - 1)

    # From prompts to rows: [a, a, b] has the prompts [a, b] and prompt_of_row [0, 0, 1].
    number = {prompt: n for n, prompt in enumerate(prompts)}
    prompt_of_row = [number[tuple(row.tokens)] for row in rows]
    logits_BV = logits_BV[prompt_of_row]
    if len(rows) > len(prompts):
        cache.share(prompt_of_row)

    # A model may know a faster way than its `hidden` to take one token a row. What it is fed are
    # sampled tokens, and queued ones, which are checked.
    if hasattr(model, "one_token_step"):
        step = model.one_token_step()
    else:
        step = extend_one_token(model)

    # The place of a row among all: its number, and at each end of a turn that of the fork.
    places = [(n,) for n in range(len(rows))]
    done = []
    while rows:
        # The model goes on by what it draws, a few tokens ahead of Python.
        ahead = min(look_every, max_new_tokens - min(row.new for row in rows))
        drawn = draw_ahead(step, cache, logits_BV, rows, ahead, max_new_tokens, options)

        # Each row takes its tokens, up to the end of its turn or its limit.
        ended = set()
        taken = []
        for b, row in enumerate(rows):
            count = 0
            while count < ahead and row.new < max_new_tokens and b not in ended:
                token, logprob, full_logprob = drawn[count][b]
                if row.append(int(token), logprob, full_logprob) and token in end:
                    ended.add(b)
                count += 1
            taken.append(count)
        if ending and ended:
            ending([rows[b] for b in sorted(ended)])

        # What goes on may be nothing, the row itself, or several forks; origin says from which row
        # of the batch each of them comes.
        going = []
        origin = []
        places_going = []
        for b, row in enumerate(rows):
            followers = [row]
            if b in ended:
                followers = after(row) if after else []
                require_queues(followers, model.config.vocab_size)
            if not followers:
                done.append((row.new, places[b], row))
            for n, follower in enumerate(followers):
                place = (*places[b], n) if b in ended else places[b]
                follower.truncated = follower.new >= max_new_tokens
                if follower.truncated:
                    done.append((follower.new, place, follower))
                else:
                    going.append(follower)
                    origin.append(b)
                    places_going.append(place)

        # The cache holds all tokens of a row but the last, and no dropped ones. Ended rows leave
        # the batch, forks get a row each, and the rest needs no copy.
        if going:
            dropped = [count - ahead for count in taken]
            if any(dropped):
                cache.advance(torch.tensor(dropped, device=logits_BV.device))
            if origin != list(range(len(rows))):
                cache.select(origin)
            last_B1 = torch.tensor([[row.tokens[-1]] for row in going], device=logits_BV.device)
            logits_BV = step(cache, last_B1)
        rows = going
        places = places_going
    if not after:
        return given
    return [row for _, _, row in sorted(done, key=lambda entry: entry[:2])]


def checked_look_every(look_every, model):
    """`look_every` of `generate`, or what it is by default."""
    if look_every is not None and look_every < 1:
        raise ValueError(f"look_every must be at least 1, got {look_every}")

    # Frequencies of dynamic RoPE depend on the longest row, and a row that is ahead of Python may
    # be longer than it will be: here the look is at each token.
    ropes = getattr(model.config, "rope_parameters", {}).values()
    if any(rope["rope_type"] == "dynamic" for rope in ropes):
        return 1
    if look_every is None:
        look_every = 1 if model.head_weight.device.type == "cpu" else 8
    return look_every


def draw_ahead(step, cache, logits_BV, rows, ahead, max_new_tokens, options):
    """What each row draws next, `ahead` times: lists of (token, log-prob, full log-prob), a row
    each. The cache then holds ahead - 1 tokens more.

    step: the model's, see `generate`. logits_BV: after the rows' last tokens.
    max_new_tokens, options: what `generate` was given, and those of `sample`.
    """
    # Each row's draws, as far ahead. Behind its limit it has none, and what it draws is dropped.
    device = logits_BV.device
    uniform_nB = [None] * ahead
    if options["temperature"] > 0:
        table = []
        for row in rows:
            own = min(ahead, max_new_tokens - row.new)
            table.append([row.draws[row.new + n] for n in range(own)] + [0.0] * (ahead - own))
        uniform_nB = torch.tensor(table, dtype=torch.float64, device=device).T

    # A queued token takes the place of the drawn one; -1 where none is queued.
    queued_nB = None
    if ahead > 1 and any(row.queue for row in rows):
        table = []
        for row in rows:
            own = list(row.queue)[:ahead]
            table.append(own + [-1] * (ahead - len(own)))
        queued_nB = torch.tensor(table, device=device).T

    # No number goes to Python before the last token is drawn, and then all of them in one go.
    drawn = []
    for n in range(ahead):
        if n > 0:
            logits_BV = step(cache, token_B[:, None])
        found = sample(logits_BV, uniform_nB[n], **options)
        drawn.append(torch.stack([x.double() for x in found], -1))
        token_B = found.tokens
        if queued_nB is not None:
            token_B = torch.where(queued_nB[n] < 0, token_B, queued_nB[n])
    return torch.stack(drawn).tolist()


def extend_one_token(model):
    """`extend` as what a model's `one_token_step` returns: f(cache, tokens_B1) -> logits (B, V)."""

    def step(cache, tokens_B1):
        return extend(model, cache, tokens_B1)

    return step


class Row:
    """A sequence under way: it takes its next queued token or, with none queued, the sampled one.

    mask says which tokens were sampled; logprobs and full_logprobs are those of `Sampled` (0 where
    queued); all three have one entry per target, tokens[1:]. draws[n] in [0, 1) decides the n-th
    token behind the prompt.
    """

    def __init__(self, prompt, draws=()):
        self.tokens = list(prompt)
        self.draws = draws
        self.queue = deque()  # tokens that come next whatever is sampled: a tool's answer
        self.new = 0  # tokens behind the prompt
        self.truncated = False  # ended by the limit
        targets = max(len(prompt) - 1, 0)
        self.mask = [False] * targets
        self.logprobs = [0.0] * targets
        self.full_logprobs = [0.0] * targets

    def append(self, token, logprob, full_logprob=0.0) -> bool:
        """Take one token; True if it was the sampled one."""
        sampled = not self.queue
        self.tokens.append(token if sampled else self.queue.popleft())
        self.mask.append(sampled)
        self.logprobs.append(logprob if sampled else 0.0)
        self.full_logprobs.append(full_logprob if sampled else 0.0)
        self.new += 1
        return sampled


def rows_with_draws(rows, needed, seed):
    """Rows from rows or lists of tokens, each with at least `needed` draws."""
    rows = [row if isinstance(row, Row) else Row(row) for row in rows]

    # The generator draws for every row, also for one that has draws of its own: what a row gets
    # depends on its place, and not on what the rows before it brought along.
    if seed is not None and needed:
        generator = torch.Generator().manual_seed(seed)
        for row in rows:
            made = torch.rand(needed, generator=generator, dtype=torch.float64).tolist()
            row.draws = row.draws if len(row.draws) else made
    if any(len(row.draws) < needed for row in rows):
        raise ValueError(f"each row needs {needed} draws, one for each new token, or give a seed")
    return rows


def require_queues(rows, vocab_size) -> None:
    """ValueError unless all tokens that wait in the rows' queues are in the vocabulary."""
    for row in rows:
        if row.queue and not 0 <= min(row.queue) <= max(row.queue) < vocab_size:
            raise ValueError(f"queued tokens must be of 0..{vocab_size - 1}, got {[*row.queue]}")


def likeliest_tokens(e_BV, top_k, top_p, min_p):
    """Which tokens top-k, top-p and min-p leave, (B, V) bool: always the likeliest."""
    sorted_BV, order_BV = e_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if top_k:
        keep_BV &= sorted_BV >= sorted_BV[:, min(int(top_k), sorted_BV.shape[1]) - 1, None]

    # A token stays if the likelier ones before it do not hold top_p yet. With 0.5 0.3 0.2 and
    # top_p 0.7 they hold 0 0.5 0.8: two tokens stay, the fewest that hold 0.7.
    if top_p is not None:
        left_BV = (sorted_BV * keep_BV).double()
        before_BV = left_BV.cumsum(-1) - left_BV
        keep_BV &= before_BV < top_p * left_BV.sum(-1, keepdim=True)
    if min_p:
        keep_BV &= sorted_BV >= min_p * sorted_BV[:, :1]
    keep_BV[:, 0] = True
    return torch.zeros_like(keep_BV).scatter_(-1, order_BV, keep_BV)


def invert_distribution(p_BV, uniform_B):
    """The token (B, 1) at which the running sum of p, of any total, reaches uniform times it."""
    # NUMERICS: in float32 a running sum over 150 thousand tokens is off by more than the tail's
    # probabilities; in float64 it is not. Pinned by
    # tests/test_models.py::test_tokens_of_a_long_tail_are_drawn_at_their_own_uniforms.
    B, V = p_BV.shape

    # So many numbers are float64 at a time: what a core's cache holds; on a GPU, half a gigabyte.
    held = 2**16 if p_BV.device.type == "cpu" else 2**26
    some = max(1, held // V)
    invert = invert_by_running_sum if V <= 2**15 else invert_by_blocks
    if B <= some:
        return invert(p_BV, uniform_B)
    pieces = zip(p_BV.split(some), uniform_B.split(some))
    return torch.cat([invert(p_bV, uniform_b) for p_bV, uniform_b in pieces])


def invert_by_running_sum(p_BV, uniform_B):
    """`invert_distribution` for a few thousand tokens."""
    ends_BV = p_BV.cumsum(-1, dtype=torch.float64)
    return first_beyond(ends_BV, uniform_B[:, None] * ends_BV[:, -1:])


def invert_by_blocks(p_BV, uniform_B):
    """`invert_distribution`: first over blocks of 128 tokens, then inside one."""
    # A running sum is slow, as each term waits for the one before it; the sums of the blocks are
    # not, and only one block in a thousand needs its running sum.
    V = p_BV.shape[1]
    p_BV = F.pad(p_BV, (0, -V % 128))
    blocks_Bnv = p_BV.unflatten(-1, (-1, 128))
    sums_Bn = blocks_Bnv.sum(-1, dtype=torch.float64)
    ends_Bn = sums_Bn.cumsum(-1)
    at_B1 = uniform_B[:, None] * ends_Bn[:, -1:]
    block_B1 = first_beyond(ends_Bn, at_B1)

    # What is left of the target in that block: rounding must not make it negative.
    left_B1 = at_B1 - (ends_Bn.gather(-1, block_B1) - sums_Bn.gather(-1, block_B1))
    inside_Bv = blocks_Bnv.take_along_dim(block_B1[:, :, None], 1)[:, 0]
    inside_Bv = inside_Bv.cumsum(-1, dtype=torch.float64)
    token_B1 = block_B1 * 128 + first_beyond(inside_Bv, left_B1.clamp(min=0))
    return token_B1.clamp(max=V - 1)  # behind it is padding, where only a NaN can lead


def first_beyond(ends_Bn, at_B1):
    """The first place (B, 1) at which running sums exceed `at`, which is not negative."""
    # So something was added there, and a token of probability 0 is never drawn. Rounding may have
    # carried `at` up to the total, which nothing exceeds: then it is the last such place.
    total_B1 = ends_Bn[:, -1:]
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    place_B1 = torch.searchsorted(ends_Bn, at_B1.minimum(below_B1), right=True)

    # Nothing exceeds a NaN either. Any token will do: its log-prob is NaN, which the caller sees.
    return place_B1.clamp(max=ends_Bn.shape[1] - 1)


# B. Guards -----------------------------------------------------------------------------------
# For what others hand us: wrong configurations, token ids and options are refused by name.
# Skip it if you trust them. The only line that computes is the default of `layer_types`.

ROPE_NEEDS = {  # rope_type -> the keys that it cannot do without
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
ROPE_KEYS = {  # every key that is known, and what it may hold
    "rope_type": str, "type": str, "rope_theta": float, "factor": float | None,
    "original_max_position_embeddings": int | None, "attention_factor": float | None,
    "beta_fast": float | None, "beta_slow": float | None, "mscale": float | None,
    "mscale_all_dim": float | None, "truncate": bool, "low_freq_factor": float | None,
    "high_freq_factor": float | None, "partial_rotary_factor": float | None,
}  # fmt: skip

# What a number in a configuration may be, by name, both ends included. The ceilings are several
# times what any released model has. They are there so that a damaged config.json can be compared
# with the tensors beside it, on the meta device, instead of failing in the middle of building a
# model of 10^9 layers: with them no parameter has more than 2^59 bytes, and the list of layers
# ends. What is merely another model's size is then an ordinary complaint about a tensor's shape.
WIDEST = 2**22  # of a matrix, in rows or columns
MOST = 2**12  # layers, and experts of a layer
LONGEST = 2**53  # positions: float64 counts no further
POSITIVE = sys.float_info.min
RANGES = {
    "vocab_size": (1, WIDEST), "hidden_size": (1, WIDEST), "intermediate_size": (1, WIDEST),
    "moe_intermediate_size": (0, WIDEST), "num_hidden_layers": (1, MOST),
    "num_attention_heads": (1, WIDEST), "num_key_value_heads": (1, WIDEST),
    "head_dim": (1, WIDEST), "num_experts": (0, MOST), "num_local_experts": (0, MOST),
    "num_experts_per_tok": (0, MOST), "max_position_embeddings": (1, LONGEST),
    "original_max_position_embeddings": (1, LONGEST), "decoder_sparse_step": (1, LONGEST),
    "sliding_window_pattern": (1, LONGEST), "_sliding_window_pattern": (1, LONGEST),
    "eos_token_id": (0, LONGEST), "rms_norm_eps": (0, math.inf), "initializer_range": (0, math.inf),
    "router_bias_rate": (0, math.inf), "rope_theta": (POSITIVE, math.inf),
    "rope_local_base_freq": (POSITIVE, math.inf), "factor": (POSITIVE, math.inf),
    "query_pre_attn_scalar": (POSITIVE, math.inf),
    "final_logit_softcapping": (POSITIVE, math.inf),
}  # fmt: skip


def require_field(name, value, kind, /) -> None:
    """ValueError that names the field, unless `value` is of the annotated kind and in its range.

    kind: an annotation, such as int | None or tuple[str, ...]. Every field of `ModelConfig` and
    every field of a config.json that a reader uses comes through here before it is used, so that
    no reader has to ask what it was given.
    """
    if not _is_of_kind(value, kind):
        raise ValueError(f"{name} must be {_in_words(kind)}, got {reprlib.repr(value)}")

    # The range goes by the last part of a dotted name: rope_parameters.factor has that of factor.
    # A list is in range if each of its numbers is.
    low, high = RANGES.get(name.rpartition(".")[2], (-math.inf, math.inf))
    entries = value if isinstance(value, list | tuple) else [value]
    for number in entries:
        if isinstance(number, numbers.Real) and not low <= number <= high:
            expected = "positive" if low == POSITIVE else f"at least {low}"
            if high < math.inf:
                expected += f" and at most {high}"
            raise ValueError(f"{name} must be {expected}, got {reprlib.repr(value)}")


def _is_of_kind(value, kind) -> bool:
    """Whether a value is of an annotated kind. JSON's true is no 1, and its NaN no number."""
    if isinstance(kind, types.UnionType):
        return any(_is_of_kind(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) in (tuple, list):  # JSON has one kind of list
        inside = typing.get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_is_of_kind(x, inside) for x in value)
    if kind is int:  # of 64 bits, as torch wants it; numpy's integers are integers too
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return whole and -(2**63) <= value < 2**63
    if kind is float:  # an integer will do, if float64 reaches so far
        if isinstance(value, numbers.Integral):
            return not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return isinstance(value, numbers.Real) and math.isfinite(value)
    return isinstance(value, kind)


def _in_words(kind) -> str:
    """An annotation in the words of an error message."""
    if isinstance(kind, types.UnionType):
        return " or ".join(_in_words(one) for one in typing.get_args(kind))
    if typing.get_origin(kind) in (tuple, list):
        return f"a list, each {_in_words(typing.get_args(kind)[0])}"
    words = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string",
             dict: "an object", types.NoneType: "null"}  # fmt: skip
    return words[kind]


def complete_and_check_config(config) -> None:
    """Fill in what a new `ModelConfig` left out; ValueError if it describes no model."""
    # Types and ranges first: all that follows may rely on them.
    for f in dataclasses.fields(config):
        require_field(f.name, getattr(config, f.name), f.type)
    for kind, rope in config.rope_parameters.items():
        require_field(f"rope_parameters.{kind}", rope, dict)

    # One type for each layer; without a list, every layer sees everything before it.
    config.layer_types = tuple(config.layer_types) or (FULL,) * config.num_hidden_layers
    kinds = set(config.layer_types)
    if kinds - {FULL, SLIDING} or len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(f"layer_types must be {config.num_hidden_layers} of {FULL}, {SLIDING}; "
                         f"got {reprlib.repr(list(config.layer_types))}")  # fmt: skip

    # RoPE for each type of layer that there is, and for no other.
    given = config.rope_parameters
    default = {"rope_type": "default", "rope_theta": 10000.0}
    if set(given) - {FULL, SLIDING}:
        raise ValueError(f"rope_parameters go by layer type, got {given}")
    config.rope_parameters = {kind: default | given.get(kind, {}) for kind in sorted(kinds)}
    for wrong, complaint in _config_mistakes(config):
        if wrong:
            raise ValueError(complaint)
    for rope in config.rope_parameters.values():
        _check_rope(rope, config.max_position_embeddings, config.head_dim)


def _config_mistakes(config):
    """(whether it is made, what to say), so ordered that later questions can be asked."""
    if config.sparse_layers:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            found = getattr(config, name)
            yield found < 1, f"{name} must be at least 1 in sparse layers, got {found}"
    H = config.num_attention_heads
    G = config.num_key_value_heads
    D = config.head_dim
    yield H % G, f"num_attention_heads {H} must divide by num_key_value_heads {G}"
    yield H * D > WIDEST, f"num_attention_heads {H} times head_dim {D} exceeds {WIDEST}"
    yield D % 2, f"head_dim must be even for half-split RoPE, got {D}"

    # The router cannot choose more experts than there are; a window of no tokens sees nothing.
    yield config.num_experts_per_tok > config.num_experts, (
        f"num_experts_per_tok {config.num_experts_per_tok} exceeds {config.num_experts} experts")
    yield SLIDING in config.layer_types and not (config.sliding_window or 0) > 0, (
        f"sliding layers need a sliding_window, got {config.sliding_window}")
    yield config.hidden_act not in ACTIVATIONS, (
        f"hidden_act (or hidden_activation) {config.hidden_act!r} is none of {[*ACTIVATIONS]}")
    yield any(not 0 <= n < config.num_hidden_layers for n in config.sparse_layers), (
        f"sparse_layers {config.sparse_layers} are not layers of this model")


def require_same_numbers(config, other, where) -> None:
    """ValueError if a model of the other configuration would compute something else."""
    for f in dataclasses.fields(config):
        mine = getattr(config, f.name)
        theirs = getattr(other, f.name)
        if f.name not in ("initializer_range", "eos_token_id") and mine != theirs:
            raise ValueError(f"{where} has {f.name} {mine}, the model {theirs}")


def _check_rope(rope, max_position_embeddings, head_dim):
    """Fill in what transformers takes for granted; ValueError for what (5) does not cover."""
    for name in rope.keys() & ROPE_KEYS.keys():
        require_field(f"rope_parameters.{name}", rope[name], ROPE_KEYS[name])
    kind = rope["rope_type"]
    if kind not in ROPE_NEEDS:
        raise ValueError(f"rope_type {kind!r} is not implemented; there are {list(ROPE_NEEDS)}")
    if kind in ("yarn", "llama3") and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = max_position_embeddings

    # A key that we do not know may change the angles, so it is refused and not ignored.
    unknown = sorted(rope.keys() - ROPE_KEYS.keys())
    missing = [key for key in ROPE_NEEDS[kind] if rope.get(key) is None]
    if unknown or missing:
        raise ValueError(f"rope_parameters of rope_type {kind}: unknown {unknown}, "
                         f"missing {missing}")  # fmt: skip
    if rope.pop("partial_rotary_factor", None) not in (None, 1):
        raise ValueError("partial_rotary_factor other than 1 is not implemented")

    # Numbers that are each possible may still divide by zero together, or have no logarithm.
    # Computing f once, beyond the length that dynamic RoPE waits for, is the test of them all.
    longest = max_position_embeddings
    try:
        with torch.device("cpu"):
            options = dict(length=2 * longest, longest=longest)
            f, factor = rope_frequencies(rope, min(head_dim, 256), **options)
            finite = bool(f.isfinite().all()) and math.isfinite(factor)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"rope_parameters {rope} give no angles: {error}") from error
    if not finite:
        raise ValueError(f"rope_parameters {rope} give angles that are not finite")


def require_tokens_or_states(tokens, /) -> None:
    """ValueError unless this is (B, S) integers, or (B, S, M) of a floating dtype."""
    if tokens.dim() != (3 if tokens.is_floating_point() else 2):
        found = tuple(tokens.shape)
        raise ValueError(f"tokens must be (B, S), or embeddings (B, S, M); got {found}")


def require_tokens_in_vocabulary(tokens, vocab_size, /, *, what="token") -> None:
    """Refuse token ids that are not in 0..vocab_size - 1.

    On the CPU a ValueError names the first one and its place. On a GPU an assertion of the device
    ends the process at some later call: to look at the ids here, the CPU would have to wait for
    the GPU in each forward.
    """
    if not tokens.numel():
        return
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        inside = (tokens >= 0) & (tokens < vocab_size)
        torch._assert_async(inside.all(), f"a {what} id is outside of 0..{vocab_size - 1}")
        return

    # One pass over the ids as a rule. Which of them it is, is asked only when one is wrong.
    low, high = torch.aminmax(tokens)
    if low >= 0 and high < vocab_size:
        return
    place = ((tokens < 0) | (tokens >= vocab_size)).nonzero()[0].tolist()
    names = ("row", "column") if len(place) == 2 else ("place", "dimension 1", "dimension 2")
    where = ", ".join(f"{name} {n}" for name, n in zip(names, place))
    raise ValueError(f"{what} id {tokens[tuple(place)].item()} at {where} is not in the vocabulary "
                     f"of {vocab_size}: ids are 0..{vocab_size - 1}")  # fmt: skip


def require_prompts(prompts, vocab_size) -> None:
    """ValueError unless every prompt has tokens, and all of them are in the vocabulary."""
    for prompt in prompts:
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"a prompt needs tokens, all of 0..{vocab_size - 1}, got {prompt}")


def require_scorable(hidden, weight, targets, group, vocab_size, temperature, chunk) -> None:
    """ValueError for what `token_logprobs` cannot take; the names are its own."""
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        found = f"{tuple(hidden.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"hidden must be (N, M) and targets (N,), got {found}")
    # Only a rank of a group that was not told V cannot know which targets there are.
    if vocab_size is None and group is None:
        vocab_size = len(weight)
    if vocab_size is not None:
        require_tokens_in_vocabulary(targets, vocab_size, what="target")
    if not temperature > 0 or chunk is not None and chunk < 1:
        raise ValueError(f"temperature and chunk must be positive, got {temperature} and {chunk}")


def check_sampling(temperature, top_k, top_p, min_p):
    """ValueError for options of `sample` that mean nothing."""
    if temperature < 0 or not math.isfinite(temperature):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if top_k is not None and (top_k != int(top_k) or top_k < 0):
        raise ValueError(f"top_k must be a number of tokens, 0 or None for all; got {top_k}")
    if top_p is not None and not 0 < top_p <= 1 or min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1]; got {top_p} and {min_p}")


# C. Hugging Face's configurations ------------------------------------------------------------
# For models that come from or go to Hugging Face: from a config.json to `ModelConfig` and back.
# Skip it if you build a `ModelConfig` yourself, but for the table of families in `Family`.

class Family(NamedTuple):
    """What transformers fixes for one model_type: a row of this table.

    |                   | qwen2     | qwen3            | qwen3_moe         | gemma3_text           |
    | q, k, v bias      | yes       | `attention_bias` | `attention_bias`  | `attention_bias`      |
    | o bias            | no        | `attention_bias` | `attention_bias`  | `attention_bias`      |
    | q/k norm per head | no        | before RoPE      | before RoPE       | before RoPE           |
    | head_dim, absent  | M / heads | 128              | M / heads         | 256                   |
    | norm weight (4)   | w         | w                | w                 | 1 + w, in float32     |
    | norms a layer     | 2         | 2                | 2                 | 4: before, after both |
    | activation        | silu      | silu             | silu              | gelu, tanh form       |
    | embedding scale   | -         | -                | -                 | sqrt(M), embed's dtype|
    | attention scale   | D^-1/2    | D^-1/2           | D^-1/2            | (a)                   |
    | feed-forward      | dense     | dense            | experts, or dense | dense                 |
    | sliding layers    | (b)       | (b)              | all or none       | `layer_types`, or (c) |
    | RoPE theta        | one       | one              | one               | 1e6; 1e4 where sliding|
    | tied              | by config | by config        | by config         | yes, if not said      |

    (a) query_pre_attn_scalar^-1/2. (b) `layer_types`, else with `use_sliding_window` the layers
    from `max_window_layers` on. (c) all but each `sliding_window_pattern`-th. RoPE types: default,
    linear, dynamic, yarn, llama3. Gemma's `attn_logit_softcapping` is read by nobody, transformers
    included. A multimodal Gemma 3 checkpoint gives its text model. The embedding of Gemma's PAD
    token has a gradient here; transformers' `padding_idx` takes it away.

    To add a family, write a row of FAMILIES and a reader, nothing else. The reader takes a config
    with its defaults filled in, and gives the fields of `ModelConfig` that need a rule;
    `read_layers` and `read_rope` know both spellings of theirs. If a difference is none of
    ModelConfig's fields, it is a field more, an equation more in the module's docstring, and a
    line in `definition`. The test `test_a_new_family_is_a_row_and_a_reader` adds one. Saving needs
    nothing: `to_hf` writes what the reader reads back, or refuses.
    """

    architecture: str
    read: Callable  # raw config, defaults filled in -> ModelConfig fields that need a rule
    fixed: dict  # ModelConfig fields that no config changes
    defaults: dict  # config fields that transformers fills in
    act_key: str = "hidden_act"
    rope_per_type: bool = False


# What a config that leaves a field out gets from transformers, if its family says nothing else.
COMMON = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=32768,
    rms_norm_eps=1e-6, tie_word_embeddings=False, initializer_range=0.02,
)  # fmt: skip
QWEN = dict(
    rope_theta=10000.0, use_sliding_window=False, sliding_window=4096, max_window_layers=28,
    attention_bias=False, hidden_act="silu",
)  # fmt: skip
MOE = "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"

# What the fields of a config.json that are read here may hold. Others are let be, whatever they
# hold: nobody looks at them.
RAW_FIELDS = {f.name: f.type for f in dataclasses.fields(ModelConfig) if f.name in COMMON} | {
    "num_key_value_heads": int | None, "head_dim": int | None, "hidden_act": str,
    "hidden_activation": str, "attention_bias": bool, "attention_dropout": float | None,
    "use_sliding_window": bool | None, "sliding_window": int | None, "max_window_layers": int,
    "layer_types": list[str] | None, "sliding_window_pattern": int | None,
    "_sliding_window_pattern": int | None, "use_bidirectional_attention": bool | None,
    "query_pre_attn_scalar": float | None, "final_logit_softcapping": float | None,
    "rope_theta": float | None, "rope_local_base_freq": float, "rope_scaling": dict | None,
    "rope_parameters": dict | None, "partial_rotary_factor": float | None,
    "original_max_position_embeddings": int | None, "eos_token_id": int | list[int | None] | None,
    "num_experts": int, "num_local_experts": int | None, "num_experts_per_tok": int,
    "moe_intermediate_size": int, "norm_topk_prob": bool, "decoder_sparse_step": int,
    "mlp_only_layers": list[int] | None, "value_head": bool,
}  # fmt: skip


def read_config(raw) -> ModelConfig:
    """`ModelConfig.from_hf`."""
    if isinstance(raw, dict):
        return _config_of_dict(raw)
    path = Path(raw)
    if path.is_dir():
        path = path / "config.json"
    raw = read_json(path, what="the config of a Hugging Face checkpoint directory")
    try:
        return _config_of_dict(raw)
    except ValueError as error:  # whatever is wrong with the fields, say in which file
        raise ValueError(f"{path}: {error}") from error


def _config_of_dict(raw) -> ModelConfig:
    raw = _text_config(raw)
    if raw["model_type"] not in FAMILIES:
        raise ValueError(f"model_type {raw['model_type']!r} is not implemented; "
                         f"implemented: {', '.join(FAMILIES)}")  # fmt: skip

    # The config wins over its family's defaults, and these over what all families share.
    family = FAMILIES[raw["model_type"]]
    raw = COMMON | family.defaults | raw
    for name in raw.keys() & RAW_FIELDS.keys():
        require_field(name, raw[name], RAW_FIELDS[name])
    _refuse_unimplemented(raw)

    # Fields whose name and meaning are the same in all families; the reader adds the others.
    fields = {name: raw[name] for name in COMMON}
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    eos = raw.get("eos_token_id")
    eos = eos if isinstance(eos, list | tuple) else [eos]
    fields["eos_token_id"] = tuple(token for token in eos if token is not None)
    fields["value_head"] = raw.get("value_head", False)
    return ModelConfig(model_type=raw["model_type"], **fields | family.read(raw) | family.fixed)


def write_config(config) -> dict:
    """`ModelConfig.to_hf`."""
    family = FAMILIES[config.model_type]
    raw = {name: getattr(config, name) for name in COMMON} | {
        "architectures": [family.architecture], "model_type": config.model_type,
        "head_dim": config.head_dim, "attention_bias": config.o_bias, "attention_dropout": 0.0,
        "layer_types": list(config.layer_types),
        "use_sliding_window": SLIDING in config.layer_types,
        "eos_token_id": list(config.eos_token_id) or None, family.act_key: config.hidden_act,
    }  # fmt: skip
    optional = ["sliding_window", "query_pre_attn_scalar", "final_logit_softcapping", "value_head"]
    if config.num_experts:
        optional = [*MOE, *optional]
    raw |= {name: getattr(config, name) for name in optional if getattr(config, name)}
    if config.num_experts:
        dense = sorted(set(range(config.num_hidden_layers)) - set(config.sparse_layers))
        raw |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    raw |= _write_rope(config.rope_parameters, family)

    # Written is right if it reads back: a family's reader cannot say every ModelConfig.
    back = ModelConfig.from_hf(raw)
    without_bias = dataclasses.replace(config, router_bias_rate=0.0)
    require_same_numbers(back, without_bias, f"a {config.model_type} config cannot say this: it")
    return raw


def _text_config(raw) -> dict:
    """The text model's part of a config: all of it, or of a multimodal one the inner object."""
    inner = raw.get("text_config")
    require_field("text_config", inner, dict | None)
    if inner is not None:
        # What the inner object lacks may stand outside. The ends of turns stand there in any case:
        # the inner object of what transformers 5 has saved names its class's default, 1, instead.
        outer = raw
        raw = {"model_type": f"{outer.get('model_type')}_text"} | inner
        if "tie_word_embeddings" in outer:
            raw.setdefault("tie_word_embeddings", outer["tie_word_embeddings"])
        if outer.get("eos_token_id") is not None:
            raw["eos_token_id"] = outer["eos_token_id"]
    require_field("model_type", raw.get("model_type"), str)
    return raw


def _refuse_unimplemented(raw):
    """Raise for each field that changes the numbers and that this file does not implement."""
    # A field that is there and says "off" is fine: most released configs write them all.
    refused = {
        "attention_dropout > 0": (raw.get("attention_dropout") or 0) > 0,
        "use_bidirectional_attention": raw.get("use_bidirectional_attention"),
        "partial_rotary_factor": raw.get("partial_rotary_factor") not in (None, 1),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    found = [name for name, present in refused.items() if present]
    if found:
        raise ValueError(f"config asks for {', '.join(found)}: not implemented in models.py")


def read_layers(raw, default, /) -> dict:
    """layer_types and sliding_window; default(layer) -> bool: slides, where no list says so."""
    slides = map(default, range(raw["num_hidden_layers"]))
    kinds = raw.get("layer_types") or [SLIDING if slide else FULL for slide in slides]
    window = raw["sliding_window"] if SLIDING in kinds else None
    return {"layer_types": tuple(kinds), "sliding_window": window}


def read_rope(raw, kinds, sliding_theta=None, /) -> dict:
    """layer type -> RoPE parameters, from both spellings.

    transformers 4: rope_theta, rope_scaling and, where sliding layers have a theta of their own,
    rope_local_base_freq, which is never scaled. transformers 5: rope_parameters, one dict, or with
    sliding_theta one per layer type; rope_scaling, if it stands beside it, wins.
    """
    scaling = raw.get("rope_scaling") or {}
    new = raw.get("rope_parameters") or {}
    by_type = [key for key, value in (new | scaling).items() if isinstance(value, dict)]
    if by_type and sliding_theta is None:
        raise ValueError(f"rope_parameters.{by_type[0]} is an object: RoPE per layer type in "
                         f"{raw['model_type']}: transformers has none")  # fmt: skip
    out = {}
    for kind in sorted(set(kinds)):
        # Where the parameters of this type of layer stand. Only full layers are stretched if
        # sliding ones have a theta of their own: a window is short in any context.
        theta = raw.get("rope_theta")
        if sliding_theta:
            require_field(f"rope_parameters.{kind}", new.get(kind), dict | None)
            rope = dict(new.get(kind) or {})
        else:
            rope = dict(scaling or new)
        if sliding_theta and kind == SLIDING:
            theta = raw.get("rope_local_base_freq", sliding_theta)
        elif sliding_theta:
            rope |= scaling

        # Older files say type for rope_type, and put what yarn and llama3 need beside the dict.
        rope.setdefault("rope_theta", theta)
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        for name in ("rope_theta", "rope_type"):
            require_field(name, rope[name], ROPE_KEYS[name])
        rope["rope_theta"] = float(rope["rope_theta"])
        if raw.get("original_max_position_embeddings") and rope["rope_type"] in ("yarn", "llama3"):
            rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        out[kind] = rope
    return out


def _write_rope(ropes, family) -> dict:
    """Both spellings of `ropes`, as far as the older one can say it."""
    full = ropes.get(FULL) or next(iter(ropes.values()))
    if not family.rope_per_type:
        scaling = None if full["rope_type"] == "default" else full
        return {"rope_parameters": full, "rope_theta": full["rope_theta"], "rope_scaling": scaling}
    names = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    return {"rope_parameters": ropes} | {names[k]: rope["rope_theta"] for k, rope in ropes.items()}


def read_qwen(raw, /) -> dict:
    """Qwen2 and Qwen3: the fields of ModelConfig that need a rule."""
    slides = raw["use_sliding_window"] and raw["sliding_window"] is not None
    layers = read_layers(raw, lambda layer: slides and layer >= raw["max_window_layers"])
    return {
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "qkv_bias": raw["attention_bias"], "o_bias": raw["attention_bias"],
        "hidden_act": raw["hidden_act"], "rope_parameters": read_rope(raw, layers["layer_types"]),
    } | layers  # fmt: skip


def read_qwen_moe(raw, /) -> dict:
    """Qwen3-MoE. Its window, where there is one, is every layer's, whatever `max_window_layers`."""
    fields = read_qwen(raw | {"max_window_layers": 0})
    if len(set(fields["layer_types"])) > 1:
        raise ValueError(f"layer_types {raw['layer_types']} in qwen3_moe: transformers has no mix")
    fields |= {name: raw[name] for name in MOE}
    fields["num_experts"] = raw.get("num_local_experts") or raw["num_experts"]

    # Every step-th layer has experts, from layer step - 1 on, unless it is listed as dense.
    dense = raw["mlp_only_layers"] or ()
    step = raw["decoder_sparse_step"]
    layers = range(raw["num_hidden_layers"] if fields["num_experts"] else 0)
    sparse = tuple(n for n in layers if n not in dense and (n + 1) % step == 0)
    return fields | {"sparse_layers": sparse}


def read_gemma(raw, /) -> dict:
    """Gemma 3's text model."""
    # Without a list, every 6th layer is full, the others slide; files spell the 6 in two ways.
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    layers = read_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    return {
        "head_dim": raw["head_dim"], "qkv_bias": raw["attention_bias"],
        "o_bias": raw["attention_bias"], "hidden_act": raw["hidden_activation"],
        "query_pre_attn_scalar": raw["query_pre_attn_scalar"],
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
        "rope_parameters": read_rope(raw, layers["layer_types"], 10000.0),
    } | layers  # fmt: skip


FAMILIES = {
    "qwen2": Family(
        "Qwen2ForCausalLM", read_qwen, dict(qk_norm=False, qkv_bias=True, o_bias=False), QWEN),
    "qwen3": Family("Qwen3ForCausalLM", read_qwen, dict(qk_norm=True), QWEN | dict(head_dim=128)),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", read_qwen_moe, dict(qk_norm=True),
        QWEN | dict(
            hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4,
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
            norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=None)),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", read_gemma,
        dict(qk_norm=True, norm_offset=True, sandwich_norms=True, scale_embedding=True),
        dict(
            vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
            num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096,
            max_position_embeddings=131072, tie_word_embeddings=True, rope_theta=1e6,
            attention_bias=False, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
            eos_token_id=1),
        act_key="hidden_activation", rope_per_type=True),
}  # fmt: skip


# D. Long contexts, windows, first weights -----------------------------------------------------
# For models with stretched RoPE or sliding layers, and for those that start from a seed.
# Skip it for a full-attention model from a checkpoint. YaRN arXiv:2309.00071; Llama 3
# arXiv:2407.21783.

class Rope:
    """positions (B, S) -> {layer type: (cos, sin)} for `rotate`, once a forward for all layers."""

    def __init__(self, config):
        self.config = config
        self.known = {}  # (layer type, device) -> frequencies and their factor

    def __call__(self, positions_BS, dtype, /):
        out = {}
        for kind, rope in self.config.rope_parameters.items():
            # Frequencies are fixed by the configuration. Those of dynamic RoPE depend on the
            # longest position too, and read a number back from the device at every call.
            key = kind, positions_BS.device
            dynamic = rope["rope_type"] == "dynamic"
            if dynamic or key not in self.known:
                length = int(positions_BS.max()) + 1 if dynamic and positions_BS.numel() else 0
                options = dict(length=length, longest=self.config.max_position_embeddings)
                f, factor = rope_frequencies(rope, self.config.head_dim, **options)
                self.known[key] = f.to(positions_BS.device), factor
            out[kind] = rope_angles(positions_BS, *self.known[key], dtype=dtype)
        return out


def stretched_rope_frequencies(rope, exponents, length, longest):
    """f of (5) and the factor on cos and sin for the RoPE types that reach beyond the training.

    exponents: 2n / D of (5), (D/2,) float64.

    Deviates: dynamic RoPE depends on the longest position of this call, not of earlier calls.
    Under it a packed batch is not the same as separate documents, and a cache keeps the angles
    with which its tokens were written.
    """
    kind = rope["rope_type"]
    theta = rope["rope_theta"]
    factor = rope.get("factor")
    head_dim = 2 * len(exponents)
    # Dynamic: a call that is longer than the training turns everything more slowly, by a larger
    # theta. Linear: every angle is divided by the factor.
    if kind == "dynamic":
        stretch = factor * max(length, longest) / longest - (factor - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    f = theta**-exponents
    if kind == "linear":
        return f / factor, 1.0

    # Llama 3: what turns often over the trained length stays as it is, what turns seldom is
    # divided by the factor, and between the two it is mixed.
    if kind == "llama3":
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * f / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return torch.lerp(f / factor, f, keep), 1.0

    # YaRN: the same with a ramp that is linear in n, between the n that turn beta times.
    if kind == "yarn":
        trained = rope["original_max_position_embeddings"] / (2 * math.pi)
        betas = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        low, high = (head_dim * math.log(trained / b) / (2 * math.log(theta)) for b in betas)
        if rope.get("truncate", True):
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2).double() - low) / ((high - low) or 0.001)
        return torch.lerp(f, f / factor, ramp.clamp(0, 1)), _yarn_attention_factor(rope)
    return f, 1.0


def _yarn_attention_factor(rope):
    """YaRN's factor on cos and sin, so that attention is as sharp as before the stretching."""

    def grown(weight):
        return 0.1 * weight * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1)


def windowed_causal_attention(q_BHSD, k_BGSD, v_BGSD, scale, window, /):
    """Causal attention to the last `window` tokens, (B, H, S, D), in O(S window)."""
    # Blocks of queries against the keys that they can see. With window 2 and blocks of 3 queries:
    #
    #     queries 0 1 2   keys 0 1 2          (at least 128 in truth: a kernel call a block)
    #     queries 3 4 5   keys 2 3 4 5        the first query sees window - 1 keys before it
    S = q_BHSD.shape[2]
    out = []
    block = max(window, 128)
    for start in range(0, S, block):
        first = max(0, start - window + 1)
        stop = min(S, start + block)
        i = torch.arange(start, stop, device=q_BHSD.device)[:, None]
        j = torch.arange(first, stop, device=q_BHSD.device)
        mask = (j <= i) & (i - j < window)
        qkv = q_BHSD[:, :, start:stop], k_BGSD[:, :, first:stop], v_BGSD[:, :, first:stop]
        options = dict(attn_mask=mask, scale=scale, enable_gqa=True)
        out.append(F.scaled_dot_product_attention(*qkv, **options))
    return torch.cat(out, 2)


@torch.no_grad()
def draw_weights(model, seed: int, whole=None):
    """Normal(0, initializer_range) matrices, unit norms, zero biases; equal in every dtype.

    A value head starts at zero, so that the first values are 0. The parameters of `model` may be
    DTensors, and it may lack some: whole, as of `load_hf`, has the shapes of all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    own = dict(model.named_parameters())
    for name, shaped in (whole or model).named_parameters():
        # One whole tensor at a time, also of parameters that are not here: the draws of a tensor
        # follow those of the one before it, so every rank of every plan has the same weights. Drawn
        # in float32 on the CPU, so that dtype and device do not change the draw.
        draw = None
        if not name.endswith(("norm.weight", "bias")) and name != "score.weight":
            draw = torch.randn(shaped.shape, generator=generator, dtype=torch.float32)
            draw *= model.config.initializer_range
        if name not in own:
            continue

        # The part of it that is here.
        here = own[name].to_local() if hasattr(own[name], "to_local") else own[name]
        if draw is not None:
            here.copy_(draw[tuple(slice(*cut) for cut in _local_ranges(own[name]))])
        elif name.endswith("norm.weight"):
            here.fill_(0 if model.config.norm_offset else 1)
        else:
            here.zero_()
    for buffer in model.buffers():
        buffer.zero_()
    return model


def give_value_head(model) -> Transformer:
    """`Transformer.add_value_head`."""
    if not model.config.value_head:
        model.config = dataclasses.replace(model.config, value_head=True)
        weight = model.head_weight
        model.score = nn.Linear(weight.shape[1], 1, False, weight.device, weight.dtype)
        nn.init.zeros_(model.score.weight)
    return model


def give_router_bias(model, rate: float) -> Transformer:
    """Give a model that has none the bias b of (6), which is 0 until (11) moves it."""
    model.config = dataclasses.replace(model.config, router_bias_rate=rate)
    for module in model.modules():
        if isinstance(module, SparseMLP):
            module.rate = rate
            votes_E = torch.zeros(model.config.num_experts, dtype=torch.int64)
            module.register_buffer("votes", votes_E.to(module.gate.weight.device))
    return model


# E. Experts: their product and their balance --------------------------------------------------
# For training mixtures of experts: (6)'s matrices, the balance loss (10), the router's bias (11).
# Skip it for dense models. DeepSeek-V3 arXiv:2412.19437 eq. 16-20; the bias arXiv:2408.15664.
#
#   (10) balance = coef sum_s E / (K T_s^2) sum_e n_se sum_(i in s) p_ie sequences s of T_s tokens,
#                  n_se of whose T_s K choices fell on e (a constant for the gradient)
#   (11) b_e     = rate * (steps in which e had less than the mean load - steps it had more)
#
# b of (11) lives in the state dict, but in no Hugging Face checkpoint: `save_hf` refuses it unless
# it is zero.

class Experts(nn.Module):
    """ffn_e of (6) for rows that are sorted by expert: (N, M), counts (E,) -> (N, M)."""

    def __init__(self, config):
        super().__init__()
        E = config.num_experts
        M = config.hidden_size
        INNER = config.moe_intermediate_size
        self.act = ACTIVATIONS[config.hidden_act]
        # One tensor for all experts of a kind: the checkpoint has one for each, see `_pieces`.
        self.gate_proj = nn.Parameter(torch.empty(E, INNER, M))
        self.up_proj = nn.Parameter(torch.empty(E, INNER, M))
        self.down_proj = nn.Parameter(torch.empty(E, M, INNER))
        for weight in self.parameters():
            nn.init.normal_(weight, std=config.initializer_range)

    def forward(self, x_NM, counts_E, /):
        gate_NI = grouped_linear(x_NM, self.gate_proj, counts_E)
        up_NI = grouped_linear(x_NM, self.up_proj, counts_E)
        return grouped_linear(self.act(gate_NI) * up_NI, self.down_proj, counts_E)


def grouped_linear(x_NM, weight_EIM, counts_E, /):
    """x[n] @ weight[e(n)].T, (N, I): the first counts[0] rows go to expert 0, and so on.

    counts_E: (E,) int64, sums to N; zeros are fine.
    """
    # torch has this as one kernel for some dtypes and sizes; the loop is its definition.
    if can_group(x_NM, weight_EIM):
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_NM, weight_EIM.transpose(1, 2), offs=offsets_E)
    parts = zip(x_NM.split(counts_E.tolist()), weight_EIM, strict=True)
    return torch.cat([F.linear(x_nM, weight_IM) for x_nM, weight_IM in parts])


def can_group(x_NM, weight_EIM, /) -> bool:
    """Whether F.grouped_mm takes these: dtypes that it has, rows of 16 bytes, not 0 rows."""
    dtypes = [torch.bfloat16]
    if x_NM.device.type == "cpu":
        dtypes += [torch.float32, torch.float16]
    aligned = all(size * x_NM.element_size() % 16 == 0 for size in weight_EIM.shape[1:])
    return x_NM.dtype == weight_EIM.dtype and x_NM.dtype in dtypes and aligned and len(x_NM) > 0


class AttachLoss(torch.autograd.Function):
    """x, with a loss hung on it: the backward that reaches x adds the loss's gradient, once.

    A layer can so add its own loss wherever it runs, in a pipeline stage too.
    """

    @staticmethod
    def forward(ctx, x, loss):
        ctx.one = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.one


class Balance:
    """(10) over the sparse layers of one forward pass: `hidden(..., balance=Balance(...))`.

    sequence_J, token_J: (J,) int64: sequence sequence_J[j] holds the forward's token token_J[j],
    counted over its B x S. A token that several sequences share stands once for each of them and
    counts so often; PAD stands in none. Default of token_J: token j. coef: (10)'s.

    The layers attach the loss to what they return: whatever backward comes adds its gradient. A
    sum over sequences, so micro-batches and ranks add up. After the forward, losses[layer] is (10),
    detached, and counts[layer] (E,) the tokens that each expert got, for `update_router_bias`.

    Where ranks share out the tokens of each sequence, a rank gives the pairs of its own tokens.
    groups: the process groups whose ranks do, one for each way of sharing; sequences: how many
    sequences all of them hold together. Loss and counts are then terms of a sum over the ranks.
    """

    def __init__(self, sequence_J, /, token_J=None, *, coef=0.0, sequences=None, groups=()):
        if token_J is None:
            token_J = torch.arange(len(sequence_J), device=sequence_J.device)
        if sequence_J.shape != token_J.shape or sequence_J.dim() != 1:
            found = f"{tuple(sequence_J.shape)} and {tuple(token_J.shape)}"
            raise ValueError(f"sequences and tokens must be (J,) alike, got {found}")
        if sequences is None:
            sequences = int(sequence_J.max()) + 1 if len(sequence_J) else 0
        self.sequence_J = sequence_J
        self.token_J = token_J
        self.coef = coef
        self.sequences = sequences
        self.groups = groups
        self.losses = {}  # by layer: a layer that is computed again overwrites its own
        self.counts = {}

    @classmethod
    def documents(cls, doc_ids_BS, /, *, coef=0.0):
        """One sequence per document of a packed batch; doc_ids as in `packed_attention`."""
        # Ids count within a row: document 0 of row 0 and that of row 1 are two sequences.
        token_J = (doc_ids_BS.flatten() >= 0).nonzero()[:, 0]
        row_J = token_J // doc_ids_BS.shape[1]
        pairs_J2 = torch.stack([row_J, doc_ids_BS.flatten()[token_J]], 1)
        return cls(pairs_J2.unique(dim=0, return_inverse=True)[1], token_J, coef=coef)

    @torch.compiler.disable  # each forward has an object of its own: none is compiled for it
    def __call__(self, scores_NE, chosen_NK, /, *, layer):
        # n_se of (10): each pair (sequence, token) adds the token's K choices to its sequence.
        N, E = scores_NE.shape
        K = chosen_NK.shape[1]
        chosen_NE = scores_NE.new_zeros(N, E).scatter_(1, chosen_NK, 1)
        n_SE = scores_NE.new_zeros(self.sequences, E)
        n_SE.index_add_(0, self.sequence_J, chosen_NE[self.token_J])
        self.counts[layer] = n_SE.sum(0)
        if not self.coef or not self.sequences:
            return None

        # COMM: n is about whole sequences, and this rank has seen some tokens of them. All ranks of
        # a group run the same layers of the same micro-batches, and a layer that is computed again
        # is so on all of them: each sum meets its like. p needs no message, as each rank attaches
        # the loss of its own tokens. Pinned by tests/test_balance.py::test_a_rank_sees_some_tokens.
        for group in self.groups:
            dist.all_reduce(n_SE, group=group)

        # All but p is a constant: collect it for each token and expert, then one product with p.
        length_S1 = n_SE.sum(1, keepdim=True) / K
        factor_SE = self.coef * E / K * n_SE / length_S1.square().clamp(min=1)
        factor_NE = torch.zeros_like(chosen_NE)
        factor_NE.index_add_(0, self.token_J, factor_SE[self.sequence_J])
        loss = (factor_NE * scores_NE).sum()  # (10)
        self.losses[layer] = loss.detach()
        return loss


@torch.no_grad()
def update_router_bias(model, counts, /):
    """(11), after an optimiser step. counts: {layer: (E,)} of the whole step, over all ranks."""
    # By the numbers of the layers: a stage of a pipeline has some of them only.
    routers = {module.layer: module for module in model.modules() if hasattr(module, "votes")}
    for layer, counts_E in counts.items():
        if layer not in routers:
            raise ValueError(f"layer {layer} has no router bias; set config.router_bias_rate")
        counts_E = counts_E.double()
        routers[layer].votes += (counts_E.mean() - counts_E).sign().long()  # (11)


# F. Log-probs: one chunk, and a vocabulary that is split ---------------------------------------
# For the loops of `TokenLogprobs`: a chunk's logits, their gradient, sums over ranks.
# Skip it if the formulas in its docstring are enough for you.

LOGITS = 2**22  # held at a time by default: 16 MiB in float32
CACHED_LOGITS = 2**19  # 2 MiB in float32


class LogprobOptions(NamedTuple):
    """What `token_logprobs` tells its forward and backward."""

    temperature: float
    softcap: float | None
    chunk: int  # rows of hidden at a time
    kept_chunks: int  # of how many the exponentials stay for the backward
    group: object  # None, or the ranks that share the vocabulary's rows
    vocab_start: int


def default_chunks(N, weight_vM):
    """Rows of a chunk, and of how many chunks the exponentials stay for the backward."""
    # At least two chunks, so that what is held is less than all. On a CPU a chunk's logits are to
    # stay in the core's cache while they are passed over, unless the vocabulary is too large.
    v = len(weight_vM)
    held = CACHED_LOGITS if weight_vM.device.type == "cpu" else LOGITS
    chunk = max(1, min((N + 1) // 2, max(128, held // v)))

    # Kept are so many exponentials as fit into 2^22 numbers; with V = 151936 that is one chunk of
    # 128 rows. Without a backward to come there is nothing to keep.
    if not torch.is_grad_enabled():
        return chunk, 0
    return chunk, max(1, LOGITS // (chunk * v))


class Scratch:
    """Memory for one chunk after the other: new pages would cost as much as what fills them."""

    def __init__(self):
        self.memory = {}

    def like(self, name, shape, x, /):
        """A tensor of this shape, of x's dtype and device. Its content is undefined."""
        if name not in self.memory:
            self.memory[name] = x.new_empty(shape)  # the first chunk is the longest
        return self.memory[name][: shape[0]]

    def product(self, hidden_NM, weight_vM):
        """hidden weight^T, valid until the next one is asked for."""
        shape = len(hidden_NM), len(weight_vM)
        return torch.mm(hidden_NM, weight_vM.T, out=self.like("product", shape, hidden_NM))

    def exp(self, x_Nv):
        """e^x, valid until the next one is asked for."""
        return torch.exp(x_Nv, out=self.like("exp", x_Nv.shape, x_Nv))


def scaled_logits(hidden_NM, weight_vM, options, scratch=None):
    """z / tau of (8), capped, (N, v). They may be overwritten."""
    # NUMERICS: the product is in the model's dtype, everything after it in float32 or better.
    # Pinned by tests/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
    if scratch is None:
        z_Nv = F.linear(hidden_NM, weight_vM)
    else:
        z_Nv = scratch.product(hidden_NM, weight_vM)
    z_Nv = z_Nv.to(torch.promote_types(z_Nv.dtype, torch.float32))
    if options.softcap is not None:
        z_Nv = options.softcap * torch.tanh(z_Nv / options.softcap)
    return z_Nv if options.temperature == 1 else z_Nv / options.temperature


def local_targets(targets_N, rows, options):
    """Target ids relative to this rank's vocabulary rows, and a mask of those it owns, (N, 1).

    Foreign targets become 0 so that gather stays in range.
    """
    local_N1 = targets_N[:, None] - options.vocab_start
    if options.group is None:  # all of them: others were refused
        return local_N1, torch.ones_like(local_N1, dtype=torch.bool)
    owned_N1 = (local_N1 >= 0) & (local_N1 < rows)
    return torch.where(owned_N1, local_N1, 0), owned_N1


def logits_gradient(
    hidden_NM, weight_vM, targets_N, lse_N1, dlogprob_N1, entropy, exponentials, options
):
    """The gradient of one chunk's logits z, (N, v), in hidden's dtype.

    hidden_NM, weight_vM, targets_N: as in `token_logprobs`.
    lse_N1: the log of the sum in (8).
    dlogprob_N1: the gradient of the log-probs over the temperature.
    entropy: None if nobody used it, else its gradient over the temperature and its value, (N, 1).
    exponentials: None, or the exponentials e^(z - m) of the forward and m; they are overwritten.
    options: `LogprobOptions`.
    """
    # p is e^(z - m) times e^(m - lse): with the exponentials at hand, one product gives the part
    # -dlogprob p. The entropy's part needs log p, so the logits are computed again.
    slope_Nv = None
    if exponentials is not None and entropy is None:
        e_Nv, largest_N1 = exponentials
        dz_Nv = e_Nv.mul_(-dlogprob_N1 * (largest_N1 - lse_N1).exp())
    else:
        z_Nv = scaled_logits(hidden_NM, weight_vM, options)
        if options.softcap is not None:  # c tanh(z / c) has the slope 1 - tanh^2
            slope_Nv = 1 - (z_Nv * options.temperature / options.softcap).square()
        logp_Nv = z_Nv.sub_(lse_N1)
        factor = -dlogprob_N1
        if entropy is not None:
            dentropy_N1, entropy_N1 = entropy
            factor = logp_Nv * -dentropy_N1 - (dlogprob_N1 + dentropy_N1 * entropy_N1)
        dz_Nv = logp_Nv.exp_().mul_(factor)

    # onehot(t) adds the log-prob's gradient at the target, on the rank that has it.
    local_N1, owned_N1 = local_targets(targets_N, len(weight_vM), options)
    dz_Nv.scatter_add_(-1, local_N1, torch.where(owned_N1, dlogprob_N1, 0))
    if slope_Nv is not None:
        dz_Nv.mul_(slope_Nv)
    return dz_Nv.to(hidden_NM.dtype)


def combine_over_ranks(largest_N, sums_4N, group):
    """The largest logit and the sums around it, of the vocabulary's rows of all ranks."""
    # COMM: two messages whatever the chunks, which may differ: shards of a vocabulary are uneven.
    # Pinned by tests/test_checkpoints.py::test_vocabulary_parallel_equals_one_process.
    all_N = largest_N.clone()
    dist.all_reduce(all_N, dist.ReduceOp.MAX, group)

    # Sums around this rank's largest logit m become sums around everybody's m': each term shrinks
    # by e^(m - m'), and (z - m') is (z - m) + (m - m').
    target_N, total_N, weighted_N, owners_N = sums_4N
    lower_N = largest_N - all_N
    weighted_N = weighted_N + lower_N * total_N
    shrink_N = lower_N.exp()
    sums_4N = torch.stack([target_N, total_N * shrink_N, weighted_N * shrink_N, owners_N])
    dist.all_reduce(sums_4N, group=group)
    return all_N, sums_4N


def gather_logits(z_Xv, group, vocab_size):
    """The logits (..., V) of all rows of the head, on every rank; each has brought its own (.., v).

    Without a gradient, for sampling: training asks for log-probs, which need no whole row.
    """
    if z_Xv.requires_grad:
        raise ValueError("logits of a split vocabulary have no gradient; `logprobs` have one")
    # Ranks have ceil(V / t) rows each and the last ones what is left, which is padded for the way.
    # COMM: an all-gather of equal parts. Pinned by
    # tests/test_generator_plan.py::test_every_generator_plan_samples_the_tokens_of_one_process.
    world = dist.get_world_size(group)
    v = -(-vocab_size // world)
    own_Xv = F.pad(z_Xv, (0, v - z_Xv.shape[-1])).contiguous()
    parts = [torch.empty_like(own_Xv) for _ in range(world)]
    dist.all_gather(parts, own_Xv, group)
    return torch.cat(parts, -1)[..., :vocab_size]


# G. Packing: who lies where; block masks --------------------------------------------------------
# For `packed_attention`: from ids or positions to buckets. For prefix-LM: attention by a mask.
# Skip it if the picture in `packed_attention` is enough for you.

def packed_positions(lengths, /):
    """(1, S) int64: 0..n-1 for each document, the positions that go with `packed_attention`."""
    return torch.cat([torch.arange(int(n)) for n in lengths])[None]


def packed_logprobs(model, sequences, mask_BT, /, *, temperature=1.0):
    """Log-probs and entropies of many sequences' targets in one packed forward.

    sequences: B lists of token ids; sequence b's targets are its tokens 1.., T = the longest of
    them. mask_BT (B, T) bool: which targets to score; the head is applied to those alone. Returns
    two (B, T) tensors, 0 where mask is off, differentiable; of a critic also its values.
    """
    device = mask_BT.device
    lengths = [len(s) for s in sequences]
    tokens_S = torch.tensor([token for s in sequences for token in s], device=device)
    row_N, column_N = mask_BT.nonzero(as_tuple=True)
    length_B = torch.tensor(lengths, device=device)
    if (column_N >= length_B[row_N] - 1).any():
        raise ValueError(f"mask reaches beyond a sequence's targets; lengths {lengths}")

    # Where the token stands in the packed row that predicts each target. Lengths 3 2: sequence 1
    # starts at 3, so its target 0, which is its token 1, is predicted by packed token 3.
    start_B = length_B.cumsum(0) - length_B
    at_N = start_B[row_N] + column_N
    positions_1S = packed_positions(lengths).to(device)
    x_1SM = model.hidden(
        tokens_S[None], positions=positions_1S, attention=packed_attention(lengths))
    scores = model.logprobs(x_1SM[0, at_N], tokens_S[at_N + 1], temperature=temperature)
    if model.config.value_head:
        scores = *scores, model.values(x_1SM[0, at_N])
    return tuple(x_N.new_zeros(mask_BT.shape).index_put((row_N, column_N), x_N) for x_N in scores)


def document_ids(lengths, doc_ids, position_ids):
    """doc_ids (B, S) int64 on the CPU from whichever of the three was given."""
    given = [x for x in (lengths, doc_ids, position_ids) if x is not None]
    if len(given) != 1:
        raise ValueError(f"give one of lengths, doc_ids, position_ids; got {len(given)} of them")
    if lengths is not None:
        lengths = torch.tensor([int(n) for n in lengths], dtype=torch.long)
        if not len(lengths) or lengths.min() < 1:
            raise ValueError(f"documents need at least one token each, got {lengths.tolist()}")
        return torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    ids_BS = torch.as_tensor(given[0]).cpu()
    if ids_BS.dim() != 2 or ids_BS.is_floating_point():
        raise ValueError(f"doc_ids and position_ids must be (B, S) integers, got {ids_BS.shape}")
    if doc_ids is not None:
        return ids_BS.long()

    # A jump is where a position is not the one before plus 1, or a row begins:
    #
    #     positions   0 1 2 0 1 -1        jumps  1 0 0 1 0 1        documents  1 1 1 2 2 -1
    before_B1 = torch.full_like(ids_BS[:, :1], -2)
    jump_BS = torch.diff(ids_BS, dim=1, prepend=before_B1) != 1
    return torch.where(ids_BS < 0, -1, jump_BS.cumsum(1))


def documents_in_order(doc_BS):
    """The places of all tokens but PAD in the flattened batch, (N,), and how many tokens each
    document has, in the order in which they lie."""
    token_N = (doc_BS.flatten() >= 0).nonzero()[:, 0]
    pairs_N2 = torch.stack([token_N // doc_BS.shape[1], doc_BS.flatten()[token_N]], 1)
    runs, lengths = pairs_N2.unique_consecutive(dim=0, return_counts=True)
    if len(runs.unique(dim=0)) < len(runs):
        raise ValueError("a document id comes back after another one; give each its own number")
    return token_N, lengths.tolist()


def buckets_by_length(token_N, lengths, waste):
    """[(index (U, L) of the tokens of U documents, which of them are no padding)], by length."""
    # From the shortest document on, a bucket takes documents until one is too long for its first.
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    buckets = []
    for d in order:
        if not buckets or lengths[d] > waste * lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(d)

    # Padding repeats a document's last token, which is after every real query, so that no real row
    # sees it and its gradient is exactly zero. Lengths 4 2 5, the bucket of the first and the last:
    #
    #     starts   0, 6          index    [[0, 1, 2, 3, 3],      real   [[1, 1, 1, 1, 0],
    #     lengths  4, 5                    [6, 7, 8, 9, 10]]             [1, 1, 1, 1, 1]]
    length_D = torch.tensor(lengths, dtype=torch.long)
    end_D = length_D.cumsum(0)
    found = []
    for bucket in buckets:
        length_U1 = length_D[bucket, None]
        end_U1 = end_D[bucket, None]
        column_L = torch.arange(lengths[bucket[-1]])
        at_UL = end_U1 - length_U1 + column_L.minimum(length_U1 - 1)
        found.append((token_N[at_UL], column_L < length_U1))
    return found


def buckets_on(device, buckets, on_device):
    """The buckets on a device, and the tokens of each that are no padding, (n,).

    buckets: as `buckets_by_length` gives them. on_device: device -> what this returned for it; the
    first layer moves the indices there, and the others find them.
    """
    if device not in on_device:
        moved = [(token_UL.to(device), is_real_UL.to(device)) for token_UL, is_real_UL in buckets]
        on_device[device] = moved, [token_UL[is_real_UL] for token_UL, is_real_UL in moved]
    return on_device[device]


def attention_of_equal_documents(qkv, length, options):
    """Causal attention in rows that are full of documents of one length: no index, only views."""
    # (B, H, S, D) -> (B S / L, H, L, D): a row is cut in its documents, and they become rows.
    B = len(qkv[0])
    cut = (x.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1) for x in qkv)
    out_UHLD = causal_attention(*cut, **options)
    return out_UHLD.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)


def block_attention(block_BS, valid_BS=None, /):
    """Prefix-LM (pi0): a token sees its own block, both ways, and all blocks before it.

    block_BS (B, S) integers, ascending along S; valid_BS off for PAD, whose output is 0.
    """
    valid_BS = torch.ones_like(block_BS, dtype=torch.bool) if valid_BS is None else valid_BS.bool()
    seen_BSS = (block_BS[:, None] <= block_BS[:, :, None]) & valid_BS[:, None]

    def attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, softcap=None):
        place_S = torch.arange(q_BHSD.shape[2], device=q_BHSD.device)
        near_SS = place_S[:, None] - place_S < (window or len(place_S))
        now_BSS = seen_BSS & near_SS & valid_BS[:, :, None]
        return masked_attention(q_BHSD, k_BGSD, v_BGSD, now_BSS, scale=scale, softcap=softcap)

    return attention


def masked_attention(q_BHSD, k_BGkD, v_BGkD, seen_BSk, /, *, scale, softcap=None):
    """Attention by a dense mask (B, S, k); a row that sees nothing gives 0."""
    if softcap is not None:
        raise ValueError("masked_attention has no softcap; pass ring_attention.attend or the like")
    # NUMERICS: kernels differ in what they give for a row that sees nothing (0 or NaN); it sees all
    # here and is zeroed after. Pinned by tests/test_models.py::test_padding_gives_zero_not_nan.
    alive_BS1 = seen_BSk.any(-1, keepdim=True)
    options = dict(attn_mask=(seen_BSk | ~alive_BS1)[:, None], scale=scale, enable_gqa=True)
    out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BGkD, v_BGkD, **options)
    return torch.where(alive_BS1[:, None], out_BHSD, 0)


# H. The cache's other layouts ------------------------------------------------------------------
# For `KVCache`: where new keys are written, windows of sliding layers, prompts that rows share.
# Skip it if you have full layers and one row a prompt: `append_to_store` and what is above it do.

class Lengths(NamedTuple):
    """How many tokens each row holds, and what Python must know of it: no sync in every layer."""

    of_B: torch.Tensor
    longest: int = 0
    even: bool = True  # all rows hold the same number

    @classmethod
    def measured(cls, lengths_B):
        """What Python must know, read from the device in one go."""
        if not len(lengths_B):
            return cls(lengths_B)
        low, high = torch.stack([lengths_B.min(), lengths_B.max()]).tolist()
        return cls(lengths_B, high, low == high)

    def plus(self, counts_B, steps):
        """The lengths after counts_B[b] more tokens in row b, or after `steps` in each row."""
        if counts_B is not None:
            return Lengths.measured(self.of_B + counts_B)
        return Lengths(self.of_B + steps, self.longest + steps, self.even)


def keys_up_to(lengths, S, room, /):
    """The mask (B, 1, S, room) by which new token i of row b sees the slots 0..lengths[b] + i."""
    last_BS = lengths.of_B[:, None] + torch.arange(S, device=lengths.of_B.device)
    slot_C = torch.arange(room, device=lengths.of_B.device)
    return (slot_C <= last_BS[:, :, None])[:, None]


def attend_to_stored(q_BHSD, k_BGCD, v_BGCD, mask_B1SC, scale, /):
    """Attention of S new tokens to the keys of a cache, (B, H, S, D)."""
    # For one token a row, the H / G heads that share a key head are so many queries of one head,
    # so that one product for each key head serves them all.
    queries = q_BHSD
    single = q_BHSD.shape[2] == 1
    if single:
        queries = q_BHSD.reshape(len(q_BHSD), k_BGCD.shape[1], -1, q_BHSD.shape[3])
    options = dict(attn_mask=mask_B1SC, scale=scale, enable_gqa=not single)
    return F.scaled_dot_product_attention(queries, k_BGCD, v_BGCD, **options).reshape(q_BHSD.shape)


def append_to_store(cache, layer, k_BGSD, v_BGSD, window=None, /):
    """Put new k and v behind each row's old ones; the layer's whole store (2, B, G, C, D)."""
    if window is not None:
        return _write_in_window(cache, layer, k_BGSD, v_BGSD, window)
    B, _, S, _ = k_BGSD.shape
    lengths = cache.stored_lengths
    new_2BGSD = torch.stack([k_BGSD, v_BGSD])
    all_2BGCD = _with_room(cache.layers, layer, new_2BGSD, lengths.longest + S)
    if lengths.even:
        all_2BGCD[:, :, :, lengths.longest : lengths.longest + S] = new_2BGSD
        return all_2BGCD

    # Each row at its own place. Lengths 4 2 and S = 2: slots [[4, 5], [2, 3]]. Padding that is
    # written behind a row's real tokens is overwritten by the next ones.
    slot_BS = lengths.of_B[:, None] + torch.arange(S, device=k_BGSD.device)
    row_BS = torch.arange(B, device=k_BGSD.device)[:, None].expand(B, S)
    all_2BGCD.permute(1, 3, 0, 2, 4)[row_BS, slot_BS] = new_2BGSD.permute(1, 3, 0, 2, 4)
    return all_2BGCD


def _with_room(layers, layer, new_2BGSD, need, most=math.inf):
    """The layer's store, grown if it has no room for `need` tokens a row."""
    old = layers.get(layer)
    if old is None or old.shape[3] < need:
        # By half, at least 32: copies stay rare. A window never needs more than `most`.
        _, B, G, _, D = new_2BGSD.shape
        room = min(max(need + 32, need * 3 // 2), most)
        layers[layer] = new_2BGSD.new_zeros(2, B, G, room, D)
        if old is not None:
            layers[layer][:, :, :, : old.shape[3]] = old
    return layers[layer]


def sliding_cache_attention(cache, q_BHSD, k_BGSD, v_BGSD, layer, scale, window, /):
    """`KVCache.attention` in a sliding layer, whose store is a ring: position p is at p % window.

        window 4, 6 tokens so far     slot       0  1  2  3
                                      position   4  5  2  3      the next token, 6, replaces 2

    A cache with slack has so many slots more. Tokens that a row gives back have then replaced none
    that it still sees.
    """
    S = q_BHSD.shape[2]
    if S > 1:
        return _several_in_window(cache, q_BHSD, k_BGSD, v_BGSD, layer, scale, window)

    # One new token: once it is written, all that a ring without slack holds is in its window, and
    # the order of keys is nothing to a softmax. Only slots that a short row has not reached are
    # hidden. With slack, so is what is older than the window, or was given back: the new token, at
    # `last`, is as many tokens behind a slot's token as it has slots before it.
    lengths = cache.lengths
    ring = window + cache.slack
    room = min(lengths.longest + 1, ring)
    k_BGCD, v_BGCD = _write_in_window(cache, layer, k_BGSD, v_BGSD, window)[:, :, :, :room]
    mask_B1SC = None
    if not lengths.even or room > window:
        last_B1 = lengths.of_B[:, None]
        behind_BC = (last_B1 - torch.arange(room, device=q_BHSD.device)) % ring
        mask_B1SC = ((behind_BC < window) & (behind_BC <= last_B1))[:, None, None]
    return attend_to_stored(q_BHSD, k_BGCD, v_BGCD, mask_B1SC, scale)


def _several_in_window(cache, q_BHSD, k_BGSD, v_BGSD, layer, scale, window, /):
    """Several new tokens in a sliding layer: they see the old window and each other."""
    # They are written only afterwards: the last of them would replace keys that the first one sees.
    # Which position stands in each slot of the ring: with window 4 and last position 5, slots
    # 0 1 2 3 are (5 - slot) % 4 = 1 0 3 2 behind it, so they hold 4 5 2 3; less than 0 is nothing.
    lengths = cache.lengths
    ring = window + cache.slack
    room = min(lengths.longest, ring)
    slot_C = torch.arange(room, device=q_BHSD.device)
    last_B1 = lengths.of_B[:, None] - 1
    old_BC = last_B1 - (last_B1 - slot_C) % ring

    # Then the mask is by positions, as in (2).
    query_BS = lengths.of_B[:, None] + torch.arange(q_BHSD.shape[2], device=q_BHSD.device)
    key_Bk = torch.cat([old_BC, query_BS], 1)
    ahead_BSk = query_BS[:, :, None] - key_Bk[:, None]
    seen_BSk = (ahead_BSk >= 0) & (ahead_BSk < window) & (key_Bk >= 0)[:, None]
    new_2BGSD = torch.stack([k_BGSD, v_BGSD])
    k_BGkD, v_BGkD = torch.cat([cache.layers[layer][:, :, :, :room], new_2BGSD], 3)
    out_BHSD = masked_attention(q_BHSD, k_BGkD, v_BGkD, seen_BSk, scale=scale)
    _write_in_window(cache, layer, k_BGSD, v_BGSD, window)
    return out_BHSD


def _write_in_window(cache, layer, k_BGSD, v_BGSD, window):
    """Put new k and v into a sliding layer's ring; the ring, (2, B, G, C, D)."""
    B, _, S, _ = k_BGSD.shape
    lengths = cache.lengths
    cache.sliding.add(layer)
    ring = window + cache.slack
    need = min(lengths.longest + S, ring)
    new_2BGSD = torch.stack([k_BGSD, v_BGSD])
    all_2BGCD = _with_room(cache.layers, layer, new_2BGSD, need, most=ring)

    # Rows of one length whose new tokens do not wrap around are one slice.
    if lengths.even and (S == 1 or need < ring):
        slot = lengths.longest % ring
        all_2BGCD[:, :, :, slot : slot + S] = new_2BGSD
        return all_2BGCD

    # One new token in each row: all are written, and no mask has to be read from the device.
    position_BS = lengths.of_B[:, None] + torch.arange(S, device=k_BGSD.device)
    row_BS = torch.arange(B, device=k_BGSD.device)[:, None].expand(B, S)
    ring_BC2GD = all_2BGCD.permute(1, 3, 0, 2, 4)
    new_BS2GD = new_2BGSD.permute(1, 3, 0, 2, 4)
    if S == 1 and cache.counts_B is None:
        ring_BC2GD[row_BS, position_BS % ring] = new_BS2GD
        return all_2BGCD

    # Of each row's new tokens only the last `window` real ones: padding and older ones would
    # land on slots that hold what is still seen.
    end_B = lengths.of_B + (S if cache.counts_B is None else cache.counts_B)
    keep_BS = (position_BS < end_B[:, None]) & (position_BS >= end_B[:, None] - window)
    ring_BC2GD[row_BS[keep_BS], position_BS[keep_BS] % ring] = new_BS2GD[keep_BS]
    return all_2BGCD


def share_prompts(cache, rows, /) -> None:
    """`KVCache.share`."""
    if cache.prompts is not None:
        raise ValueError("the prompts of this cache are shared already")

    # What full layers hold is taken out before the rows are made, so that it is not copied.
    lengths = cache.lengths
    full = cache.layers.keys() - cache.sliding
    prompts = {layer: cache.layers.pop(layer)[:, :, :, : lengths.longest] for layer in full}
    cache.select(rows)
    if prompts:
        prompt_B = torch.as_tensor(rows, dtype=torch.long, device=lengths.of_B.device)
        cache.prompts = SharedPrompts(prompts, lengths)
        cache.stored_lengths = cache.prompts.give_rows(prompt_B, cache.lengths)


class SharedPrompts:
    """The keys of R prompts, held once for all the rows of a `KVCache` that begin with them.

        prompt 0   k k k k k     rows 0, 2 and 3 of the cache hold only what comes behind it
        prompt 1   k k           row 1
    """

    def __init__(self, layers, lengths):
        self.layers = layers  # layer -> k and v (2, R, G, L, D)
        self.lengths = lengths  # of the R prompts
        self.prompt_B = None  # each row's prompt
        self.rows_Rn = None  # each prompt's rows, padded to the largest group
        self.place_B = None  # each row's place in that table, flattened
        self.in_order = False  # the places are 0, 1, 2, ..

    def give_rows(self, prompt_B, row_lengths):
        """Row b begins with prompt prompt_B[b]; the `Lengths` of the rows behind their prompts."""
        # Prompts without a row are dropped, and the padding of those that were the longest.
        used_R, prompt_B = prompt_B.unique(return_inverse=True)
        if len(used_R) < len(self.lengths.of_B):
            self.lengths = Lengths.measured(self.lengths.of_B[used_R])
            longest = self.lengths.longest
            self.layers = {n: kv[:, used_R, :, :longest] for n, kv in self.layers.items()}

        # Which rows belong to each prompt, padded to the largest group, and the way back:
        #
        #     prompt of each row   [0, 1, 0, 0]
        #     earlier rows of it   [0, 0, 1, 2]
        #     rows of each prompt  [[0, 2, 3],      row 1 is prompt 1's only row;
        #                           [1, 0, 0]]      the two zeros are padding
        #     place of each row    [0, 3, 1, 2]     row 1 lies at 1 * 3 + 0 of the flattened table
        earlier_B = (prompt_B[:, None] == prompt_B).tril(-1).sum(1)
        n = int(earlier_B.max()) + 1
        row_B = torch.arange(len(prompt_B), device=prompt_B.device)
        self.rows_Rn = row_B.new_zeros(len(used_R), n)
        self.rows_Rn[prompt_B, earlier_B] = row_B
        self.place_B = prompt_B * n + earlier_B
        self.prompt_B = prompt_B

        # Equally many rows of each prompt, one prompt after the other: the table is the rows.
        self.in_order = self.rows_Rn.numel() == len(row_B) and self.place_B.equal(row_B)
        return Lengths.measured(row_lengths.of_B - self.lengths.of_B[prompt_B])

    def attention(self, q_BHSD, k_BGCD, v_BGCD, mask_B1SC, layer, scale):
        """One softmax over a prompt's keys, read once for all its rows, and a row's own.

        q_BHSD: the queries of S new tokens.
        k_BGCD, v_BGCD: the row's own keys and values, behind its prompt.
        mask_B1SC: which of them a query sees; None: all.
        layer, scale: as in `KVCache.attention`.
        """
        k_RGLD, v_RGLD = self.layers[layer]
        B, G, C, D = k_BGCD.shape
        S = q_BHSD.shape[2]
        L = k_RGLD.shape[2]
        # NUMERICS: scores and sums in float32 or better, keys and values cast up for it. Pinned by
        # tests/test_models.py::test_shared_prompts_change_nothing.
        wide = torch.promote_types(q_BHSD.dtype, torch.float32)
        q_BGhD = q_BHSD.reshape(B, G, -1, D).to(wide)  # h: the heads of a key times the S tokens

        # Scores of the row's own keys, masked as ever.
        own_BGhC = q_BGhD @ k_BGCD.to(wide).mT
        if mask_B1SC is not None:
            hidden_B11SC = ~mask_B1SC[:, :, None]
            own_BGhSC = own_BGhC.unflatten(2, (-1, S)).masked_fill(hidden_B11SC, -math.inf)
            own_BGhC = own_BGhSC.flatten(2, 3)

        # Scores of the prompt's keys: the queries of all its rows stand side by side, so that each
        # key is read once. Shorter prompts have padding to hide.
        shared_BGhL = self._per_row(self._per_prompt(q_BGhD) @ k_RGLD.to(wide).mT)
        if not self.lengths.even:
            beyond_RL = torch.arange(L, device=q_BHSD.device) >= self.lengths.of_B[:, None]
            beyond_BL = beyond_RL[self.prompt_B]
            shared_BGhL = shared_BGhL.masked_fill(beyond_BL[:, None, None], -math.inf)

        # One softmax over both, and each part of it weighs its own values.
        p_BGhk = (torch.cat([shared_BGhL, own_BGhC], -1) * scale).softmax(-1)
        p_BGhL, p_BGhC = p_BGhk.split([L, C], -1)
        shared_BGhD = self._per_row(self._per_prompt(p_BGhL) @ v_RGLD.to(wide))
        out_BGhD = shared_BGhD + p_BGhC @ v_BGCD.to(wide)
        return out_BGhD.to(q_BHSD.dtype).reshape(q_BHSD.shape)

    def _per_prompt(self, x_BGhX):
        """The rows of each prompt side by side: (B, G, h, X) -> (R, G, n h, X)."""
        if self.in_order:
            x_RnGhX = x_BGhX.unflatten(0, self.rows_Rn.shape)
        else:
            x_RnGhX = x_BGhX[self.rows_Rn]
        return x_RnGhX.transpose(1, 2).flatten(2, 3)

    def _per_row(self, x_RGmX):
        """The way back from `_per_prompt`: (R, G, n h, X) -> (B, G, h, X)."""
        x_RnGhX = x_RGmX.unflatten(2, (self.rows_Rn.shape[1], -1)).transpose(1, 2)
        table = x_RnGhX.flatten(0, 1)
        return table if self.in_order else table[self.place_B]


# I. An action expert --------------------------------------------------------------------------
# For robots (pi0, pi0.7): a second, narrower stream that reads a prefix's keys and writes actions.
# Skip it for language models. pi0 arXiv:2410.24164; stopped gradient arXiv:2505.23705.
#
#   (12) flow    = mean |v(x_tau, tau) - (a - eps)|^2,  x_tau = tau a + (1 - tau) eps
#                  a the actions, eps noise, v what the expert gives
#   (13) x_(tau + 1/n) = x_tau + v(x_tau, tau) / n,  from x_0 = eps to x_1, the actions
#
# (12) has pi0's path from noise at 0 to actions at 1, and the sign that integrates it forward.

class Prefix:
    """A prefix's keys and values by layer, and the attention of the suffix that follows it.

        prefix = Prefix(block_attention(block_BP))
        model.hidden(tokens_BP, attention=prefix.record)
        v = expert(actions, tau, prefix, positions_B1=first)

    attention: how the prefix attends to itself, any callable of the model's form. A suffix token
    sees all of the prefix but PAD (off in valid_BP), in sliding layers what is less than `window`
    positions back, and the suffix tokens of its own block (blocks_T, ascending) and of earlier
    ones. positions_BP: default 0..P-1. detach: no gradient goes back into the prefix, which keeps
    a pretrained model from the expert's noise (knowledge insulation).
    """

    def __init__(self, attention=None, *, valid_BP=None, positions_BP=None, detach=False):
        self.attention = attention or causal_attention
        self.valid_BP = valid_BP
        self.positions_BP = positions_BP
        self.detach = detach
        self.layers = {}  # layer -> k and v, each (B, G, P, D)

    def record(self, q_BHPD, k_BGPD, v_BGPD, /, *, layer, **options):
        """The callable for the prefix: it attends as it would, and leaves its keys behind."""
        self.layers[layer] = tuple(x.detach() if self.detach else x for x in (k_BGPD, v_BGPD))
        return self.attention(q_BHPD, k_BGPD, v_BGPD, layer=layer, **options)

    def after(self, positions_BT, blocks_T=None, /):
        """The callable of a suffix at these positions; blocks_T: default all one block."""

        def suffix(q_BHTD, k_BGTD, v_BGTD, /, *, layer, scale, window=None, softcap=None):
            # Queries are the suffix; keys are the prefix and then the suffix, k = P + T of them.
            k_BGPD, v_BGPD = self.layers[layer]
            B, _, P, _ = k_BGPD.shape
            T = q_BHTD.shape[2]
            seen_BTk = torch.ones(B, T, P + T, dtype=torch.bool, device=q_BHTD.device)
            if self.valid_BP is not None:
                seen_BTk[:, :, :P] &= self.valid_BP[:, None].bool()
            if blocks_T is not None:
                seen_BTk[:, :, P:] &= blocks_T <= blocks_T[:, None]

            # A window goes by positions, which PAD in the prefix may have moved.
            if window is not None:
                at_BP = torch.arange(P, device=q_BHTD.device)[None]
                at_BP = at_BP if self.positions_BP is None else self.positions_BP
                key_Bk = torch.cat([at_BP.expand(B, P), positions_BT.expand(B, T)], 1)
                seen_BTk &= positions_BT[:, :, None] - key_Bk[:, None] < window
            k_BGkD = torch.cat([k_BGPD, k_BGTD], 2)
            v_BGkD = torch.cat([v_BGPD, v_BGTD], 2)
            return masked_attention(q_BHTD, k_BGkD, v_BGkD, seen_BTk, scale=scale, softcap=softcap)

        return suffix


class ActionExpert(nn.Module):
    """v of (12): a second, narrower stream of layers that reads a prefix's keys and values.

    config: its own hidden_size and intermediate_size; layers, head_dim and num_key_value_heads must
    be the prefix model's. action_dim A; state_dim: a state (B, state_dim) becomes one token before
    the actions, in a block of its own. Each action token is made of its noisy action and of tau, as
    in pi0: w_out silu(w_in [action, sines of tau]). Module names are openpi's.
    """

    def __init__(self, config: ModelConfig, *, action_dim: int, state_dim: int = 0):
        super().__init__()
        M = config.hidden_size
        if config.sparse_layers or M % 2:
            raise ValueError(f"an action expert is dense and of even width, got {config}")
        self.config = config
        self.rope = Rope(config)
        self.action_dim = action_dim

        # From actions and their time to tokens, and back; then layers like the prefix model's.
        self.action_in_proj = nn.Linear(action_dim, M)
        self.action_time_mlp_in = nn.Linear(2 * M, M)
        self.action_time_mlp_out = nn.Linear(M, M)
        self.action_out_proj = nn.Linear(M, action_dim)
        self.state_proj = nn.Linear(state_dim, M) if state_dim else None
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(M, config)

    def init_weights(self, seed: int):
        """Draw all weights from a seed, the same in every dtype; see `draw_weights`."""
        return draw_weights(self, seed)

    def require_fits(self, prefix_config) -> None:
        """ValueError if the prefix's keys and values cannot be attended to."""
        for name in ("num_hidden_layers", "head_dim", "num_key_value_heads", "layer_types"):
            mine = getattr(self.config, name)
            theirs = getattr(prefix_config, name)
            if mine != theirs:
                raise ValueError(f"{name} is {mine} in the expert and {theirs} in the prefix")

    def forward(self, actions_BTA, tau_B, /, prefix, *, positions_B1, state=None):
        """v (B, T, A) of noisy actions at tau in [0, 1], (12).

        prefix: a `Prefix` that has recorded, or any object whose after(positions, blocks) gives
        the suffix's attention. positions_B1 (B, 1) int64: of the first suffix token, the prefix's
        length as a rule.
        """
        if (self.state_proj is None) != (state is None):
            raise ValueError(f"this expert {'needs a' if self.state_proj else 'has no'} state")

        # Each action token hears of its noisy action and of the time.
        T = actions_BTA.shape[1]
        time_BM = time_features(tau_B, self.config.hidden_size).to(actions_BTA.dtype)
        time_BTM = time_BM[:, None].expand(-1, T, -1)
        x_BsM = torch.cat([self.action_in_proj(actions_BTA), time_BTM], -1)
        x_BsM = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(x_BsM)))
        if state is not None:
            x_BsM = torch.cat([self.state_proj(state)[:, None], x_BsM], 1)

        # The state's token is block 0 and does not see the actions; they are block 1, see it and
        # each other: the expert plans all of them at once.
        place_s = torch.arange(x_BsM.shape[1], device=x_BsM.device)
        positions_Bs = positions_B1 + place_s
        blocks_s = (place_s > 0).long() if state is not None else None
        ropes = self.rope(positions_Bs, x_BsM.dtype)
        attention = prefix.after(positions_Bs, blocks_s)
        for layer in self.layers:
            x_BsM = layer(x_BsM, ropes, attention)
        return self.action_out_proj(self.norm(x_BsM)[:, -T:])


def time_features(tau_B, width, /):
    """Sines and cosines of tau, (B, width), of periods from 0.004 to 4, as in pi0."""
    wide = torch.promote_types(tau_B.dtype, torch.float32)
    fraction = torch.linspace(0, 1, width // 2, dtype=wide, device=tau_B.device)
    angle_Bm = 2 * math.pi * tau_B.to(wide)[:, None] / (0.004 * 1000**fraction)
    return torch.cat([angle_Bm.sin(), angle_Bm.cos()], -1)


def flow_time(uniform, /):
    """tau of (12) from a uniform draw: 1 - tau is Beta(1.5, 1), up to 0.999. Noisy times are
    likelier, since there the actions still have to be chosen (pi0, appendix B)."""
    return 0.999 * (1 - uniform ** (2 / 3))


def flow_matching_loss(velocity, actions_BTA, noise_BTA, tau_B, /):
    """(12) for each row, (B,), float32 or better. velocity(x (B, T, A), tau (B,)) -> (B, T, A)."""
    # A straight path from noise to actions has the same velocity at every tau: their difference.
    tau_B11 = tau_B[:, None, None]
    x_BTA = tau_B11 * actions_BTA + (1 - tau_B11) * noise_BTA
    error_BTA = velocity(x_BTA, tau_B) - (actions_BTA - noise_BTA)
    wide = torch.promote_types(error_BTA.dtype, torch.float32)
    return error_BTA.to(wide).square().mean((1, 2))  # (12)


@torch.no_grad()
def sample_actions(velocity, noise_BTA, /, *, steps=10):
    """(13): `steps` Euler steps from noise to actions (B, T, A)."""
    x_BTA = noise_BTA
    for n in range(steps):
        tau_B = x_BTA.new_full(x_BTA.shape[:1], n / steps)
        x_BTA = x_BTA + velocity(x_BTA, tau_B) / steps  # (13)
    return x_BTA


# J. Checkpoints -------------------------------------------------------------------------------
# For weights on disk: Hugging Face's directories both ways, whole or into a sharded model; JSON.
# Skip it unless a checkpoint is refused, or you write one of another form.

def _safetensors():
    """The library, with its submodule for torch: only checkpoints need it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install safetensors") from error
    return safetensors


def read_json(path, /, *, what="a JSON file") -> dict:
    """The object that a JSON file holds.

    what: what the file should be, for the message if it is missing. Whatever is wrong with the file
    is a ValueError of one line that names it: that it is missing, a directory or not to be read,
    not UTF-8, not JSON, nested too deeply, no object. NaN and Infinity, which Python's reader takes
    and JSON does not have, numbers that float64 does not have, and strings that UTF-8 does not have
    (lone surrogates, written as \\ud800) are refused too: each would fail far from here.
    """
    return _parse_object(_read_bytes(path, what), str(path))


def read_json_lines(path, /, *, what="a file of JSON lines", skip_torn_last=False) -> list:
    """[(line number from 1, object)] of a file with one JSON object a line; empty lines are none.

    Each line is held to what `read_json` asks of a file, and the ValueError names file and line.
    skip_torn_last: leave out the last line if it is damaged and no newline ends it, as a kill or a
    full disk leaves a file that is appended to. A damaged line anywhere else is still refused.
    """
    found = []
    lines = _read_bytes(path, what).split(b"\n")  # by newlines alone: JSON strings may hold U+2028
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            where = f"{path} line {number} holds no JSON object: it"
            found.append((number, _parse_object(line, where)))
        except ValueError:
            # Behind the last newline split leaves an empty piece, so that a last piece which is
            # not empty is a line that nobody has finished.
            if not skip_torn_last or number < len(lines):
                raise
    return found


def _read_bytes(path, what) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"no {path}; expected {what}") from error
    except OSError as error:  # a directory, no permission, a loop of links, a broken disk
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _parse_object(data, where) -> dict:
    """The one JSON object in `data`; ValueError of one line that begins with `where`."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
        if "\\u" in text:  # the only way to write a lone surrogate; encoding finds it
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        # Errors of decoding and encoding, json's own, and ours from below are all ValueErrors.
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"{where} is JSON of another kind: it must hold an object, got a {kind}")
    return value


def _refuse_constant(text):
    raise ValueError(f"{text} is no number of JSON")


def _finite_float(text):
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is beyond float64")
    return number


def _open_shard(path):
    """A reader of one safetensors file; the library checks header, dtypes and offsets at once."""
    module = _safetensors()
    try:
        return module.safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ValueError(f"shard {path} is missing") from error
    except (module.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error


def _weight_map(index) -> dict:
    """Tensor name -> file name from an index. Files beside the index only."""
    listed = read_json(index, what="the index of a checkpoint in several files").get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: weight_map must be an object that names each tensor's file, "
                         f"got {reprlib.repr(listed)}")  # fmt: skip

    # A checkpoint comes from somebody else: a name that leads out of its directory would have us
    # read any file of this machine. A link inside the directory, as Hugging Face's cache makes
    # them, is its owner's doing, and fine.
    for name, file in listed.items():
        plain = isinstance(file, str) and file not in ("", ".", "..")
        if not plain or any(character in file for character in "/\\:\0"):
            raise ValueError(f"{index}: weight_map has {name} in {reprlib.repr(file)}; expected "
                             f"the name of a file in the same directory")  # fmt: skip
    return listed


class Stored(NamedTuple):
    """A tensor in a safetensors file, read when asked for."""

    path: Path
    name: str  # in the file
    part: object  # safetensors' slice: get_shape(), get_dtype(), [ranges]


def _open_checkpoint(directory) -> tuple[dict[str, Stored], int]:
    """By tensor name, every shard open; the index, if any, must agree with the shards.

    Multimodal Gemma 3 has its language model under `language_model.` or, newer,
    `model.language_model.`: that alone, under text-only names, and the number of other tensors.
    """
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if not index.exists() and not single.exists():
        raise ValueError(f"no model.safetensors and no index in {directory}")

    # Which tensors the index promises in which file, and which the files have.
    listed = _weight_map(index) if index.exists() else {}
    named = {name: directory / file for name, file in listed.items()}
    readers = {path: _open_shard(path) for path in sorted({*named.values()}) or [single]}
    found = {name: path for path, reader in readers.items() for name in reader.keys()}
    wrong = sorted(n for n in named.keys() | found.keys() if named.get(n) != found.get(n))
    if listed and wrong:
        raise ValueError(f"{index} and its shards disagree about {', '.join(wrong[:4])}")
    tensors = {n: Stored(path, n, readers[path].get_slice(n)) for n, path in found.items()}
    if not any(".language_model." in f".{name}" for name in tensors):
        return tensors, 0

    # The text model's tensors lose their prefix; the vision tower's are left out.
    head = "lm_head.weight"
    renamed = {"model.language_model.": "model.", "language_model.": "", head: head}
    text = {}
    for old, new in renamed.items():
        text |= {new + n.removeprefix(old): x for n, x in tensors.items() if n.startswith(old)}
    return text, len(tensors) - len(text)


class Piece(NamedTuple):
    """Where a part of one of our parameters stands in a checkpoint."""

    name: str
    shape: tuple  # of the stored tensor
    expert: int | None = None  # the part is [expert]; None: all of the parameter
    row: int = 0  # first row, counted in the tensor's second to last dimension


def _pieces(name, shape, stored) -> list[Piece]:
    """The stored tensors that make parameter `name`: itself, or for experts one each or fused."""
    # We keep the experts of a layer in one parameter. Checkpoints of transformers 4 have one
    # tensor for each expert; later ones stack the experts, with gate and up behind each other.
    path, _, leaf = name.rpartition(".")
    if not path.endswith(".experts") or leaf == "down_proj" and name in stored:
        return [Piece(name, shape)]
    E, rows, M = shape
    if f"{path}.gate_up_proj" in stored and leaf != "down_proj":
        first = rows if leaf == "up_proj" else 0
        return [Piece(f"{path}.gate_up_proj", (E, 2 * rows, M), None, first)]
    return [Piece(f"{path}.{e}.{leaf}.weight", (rows, M), e) for e in range(E)]


def _local_ranges(parameter) -> list[tuple[int, int]]:
    """This rank's part of a parameter, a [start, stop) per dimension: all, if it is no DTensor."""
    ranges = [(0, n) for n in parameter.shape]
    cuts = enumerate(getattr(parameter, "placements", ()))
    # FSDP's cut of what TP cut already comes last, though its mesh dimension is the first. 10 rows
    # over 4 ranks are cut after 3, 6 and 9: the last shard is shorter, and may be empty.
    for mesh_dim, placement in sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor")):
        if placement.is_replicate():
            continue
        start, stop = ranges[placement.dim]
        ranks = parameter.device_mesh.size(mesh_dim)
        size = -(-(stop - start) // ranks)
        first = min(start + size * parameter.device_mesh.get_local_rank(mesh_dim), stop)
        ranges[placement.dim] = first, min(first + size, stop)

    # PyTorch decides what a shard is; if it decided otherwise, the weights would be wrong.
    local = list(parameter.to_local().shape) if hasattr(parameter, "to_local") else None
    if local is not None and local != [stop - start for start, stop in ranges]:
        raise ValueError(f"cannot cut {parameter.placements}: {ranges} against a shard of {local}")
    return ranges


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_hf(directory, *, model=None, dtype=None, device=None, whole=None) -> Transformer:
    """Load a Hugging Face checkpoint directory, strictly: every tensor has a place and the reverse.

    Names, shapes and dtypes (F64, F32, F16, BF16) are checked before anything is allocated or
    copied; then one tensor at a time is read. dtype and device: default the checkpoint's own dtype,
    on the CPU; or model: fill this one as it is.

    Weights that are NaN or infinite, also for being too large for the model's dtype, are refused.
    That is seen only while they are read, and they are read once: after such a refusal, as after a
    disk that fails in the middle, the weights of a given `model` are undefined, some old and some
    new. After every other refusal they are untouched.

    The parameters of `model` may be DTensors (FSDP, TP): each rank then reads its own part. All
    ranks must call, since they tell each other at the end whether all went well: what one rank
    found wrong in its part, all raise. A `model` that is a stage of a pipeline has some of the
    parameters only: whole, a model on the meta device, then says which ones there are.

    A value head that the checkpoint does not have is filled with zeros.
    """
    if model is not None and (dtype or device):
        raise ValueError("give load_hf a model to fill, or dtype and device of a new one, not both")
    problem = None
    try:
        loaded = _load(Path(directory), model, dtype, device, whole)
    except Exception as error:  # raised below, after the other ranks have heard of it
        problem = error
    _raise_on_all_ranks(problem, model, whole)
    return loaded


def _load(directory, model, dtype, device, whole) -> Transformer:
    """`load_hf` on this rank."""
    config = ModelConfig.from_hf(directory)
    tensors, _ = _open_checkpoint(directory)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some writers store the tied matrix twice

    # A model on the meta device has shapes and no memory: whatever sizes a damaged config asks for,
    # they meet the stored tensors' shapes before anything is allocated.
    new = model is None
    if new:
        with torch.device("meta"):
            model = Transformer(config)
    as_stored = dict(router_bias_rate=0.0, value_head=config.value_head)
    require_same_numbers(config, dataclasses.replace(model.config, **as_stored), directory)
    shapes = {name: p.shape for name, p in (whole or model).named_parameters()}
    new_head = model.config.value_head and not config.value_head
    if new_head:
        shapes.pop("score.weight", None)  # of a critic that begins from a policy
    pieces = {name: _pieces(name, shape, tensors) for name, shape in shapes.items()}
    _require_stored(directory, tensors, pieces)

    # Now it fits: allocate, and read one tensor at a time.
    if new:
        stored = DTYPES[next(iter(tensors.values())).part.get_dtype()]
        model = model.to(dtype or stored).to_empty(device=device or "cpu")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parts in pieces.items():
            if name in parameters:
                _copy_in(parameters[name], parts, tensors)
        if new_head and "score.weight" in parameters:
            parameters["score.weight"].zero_()
        for buffer in model.buffers():
            buffer.zero_()
    return model


def _require_stored(directory, tensors, pieces) -> None:
    """ValueError unless the stored tensors are those that the pieces ask for, of dtypes we read."""
    wanted = {piece.name: piece.shape for parts in pieces.values() for piece in parts}
    missing = sorted(wanted.keys() - tensors)
    unexpected = sorted(tensors.keys() - wanted)
    if missing or unexpected:
        raise ValueError(f"{directory}: missing tensors {_first_of(missing)}, "
                         f"unexpected tensors {_first_of(unexpected)}")  # fmt: skip
    for name, shape in wanted.items():
        path, stored, part = tensors[name]
        if part.get_shape() != list(shape):
            raise ValueError(f"{path}: {stored} has shape {part.get_shape()}, config asks for "
                             f"{list(shape)}")  # fmt: skip
        # Quantised weights mean something only together with their scales; integers and truth
        # values are no weights at all. A cast would train them all the same.
        if part.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: {stored} is stored as {part.get_dtype()}; weights must be "
                             f"one of {', '.join(DTYPES)}: convert the checkpoint")  # fmt: skip


def _first_of(names) -> str:
    """The first of many names, and how many more there are: a message is one line."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{names[:8]}{more}"


def _copy_in(parameter, parts, tensors):
    """Copy this rank's region of a parameter, and read no more of each stored tensor."""
    region = _local_ranges(parameter)
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    for piece in parts:
        # What to read of this piece, and where it goes. A piece that is one expert goes into that
        # expert's slice, if it is here; one that is fused begins at a row of its own.
        cut = list(region)
        into = local
        if piece.expert is not None:
            (first, stop), *cut = region
            if not first <= piece.expert < stop:
                continue
            into = local[piece.expert - first]
        if piece.row:
            cut[-2] = cut[-2][0] + piece.row, cut[-2][1] + piece.row
        if into.numel():
            stored = tensors[piece.name]
            into.copy_(stored.part[tuple(slice(start, stop) for start, stop in cut)])
            # NUMERICS: extremes pass NaN and infinity on, and need no memory. Taken of what was
            # copied, so that a weight which the model's dtype cannot hold is seen as well. Pinned
            # by tests/test_checkpoints.py::test_weights_that_are_not_finite_are_refused_by_name.
            extremes = torch.stack(torch.aminmax(into))
            if not extremes.isfinite().all():
                raise ValueError(f"{stored.path}: {stored.name} has weights that are NaN, or not "
                                 f"finite in {into.dtype}")  # fmt: skip


def _raise_on_all_ranks(problem, model, whole=None) -> None:
    """Raise this rank's problem, if it has one; of a split model, on all ranks the first's.

    Of a model whose parameters are not cut, every rank is on its own, and no message is sent.
    """
    parameters = [] if model is None else list(model.parameters())
    split = whole is not None or any(hasattr(p, "placements") for p in parameters)
    if not (split and dist.is_initialized()):
        if problem is not None:
            raise problem
        return
    # COMM: each rank comes here once, whatever it met before: a rank that raised on its own would
    # leave the others waiting for it. One flag as a rule; the texts only if there is one. Pinned by
    # tests/test_checkpoints.py::test_what_one_rank_finds_all_ranks_raise.
    failed = torch.tensor(int(problem is not None), device=parameters[0].device)
    dist.all_reduce(failed)
    if not failed:
        return
    texts = [None] * dist.get_world_size()
    kind = OSError if isinstance(problem, OSError) else ValueError
    dist.all_gather_object(texts, None if problem is None else (kind, f"{problem}"))
    rank = next(rank for rank, found in enumerate(texts) if found is not None)
    kind, text = texts[rank]
    raise kind(f"rank {rank}: {text}") from problem


def save_hf(model, directory, *, max_shard_bytes=5 * 10**9) -> None:
    """Write a checkpoint, in the model's own dtype, for transformers and load_hf.

    Experts are written one by one. More than max_shard_bytes go into several files with an index;
    at most one file's tensors are in memory. Of a sharded model (DTensors), every rank must call:
    each tensor is gathered, and the first rank writes. What stood in the directory is replaced,
    once all the new files are written: if the disk is full before, an OSError on all ranks names
    the file, and what stood there is as it was.
    """
    if any(buffer.any() for buffer in model.buffers()):
        raise ValueError("no Hugging Face checkpoint holds a router bias: save the state dict")
    raw = model.config.to_hf() | {"dtype": str(model.head_weight.dtype).removeprefix("torch.")}
    directory = Path(directory)
    sharded = any(hasattr(p, "placements") for p in model.parameters())
    writes = not sharded or dist.get_rank() == 0
    plan = _plan_shards(model, max_shard_bytes)
    parameters = dict(model.named_parameters())
    weight_map = {}  # tensor name -> file name
    written = []
    problem = None

    # The rank that writes goes on to gather after a failed write: the others are waiting for it.
    for n, names in enumerate(plan):
        place = f"-{n + 1:05}-of-{len(plan):05}" if len(plan) > 1 else ""
        file = f"model{place}.safetensors"
        tensors = {}
        for name in names:
            whole = parameters[name].detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            if writes and problem is None:
                tensors |= _tensors_of(name, whole)
        if writes and problem is None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                written.append(directory / f"{file}.partial")
                _write_tensors(tensors, written[-1])
            except OSError as error:
                problem = error
            weight_map |= dict.fromkeys(tensors, file)

    # Config and index last, and only then are the files moved over the old ones.
    if writes and problem is None:
        try:
            written += _write_config(directory, raw, weight_map, model)
            _replace_checkpoint(directory, written)
        except OSError as error:
            problem = error
    if problem is not None:
        for path in written:
            path.unlink(missing_ok=True)
    _raise_on_all_ranks(problem, model)


def _tensors_of(name, whole) -> dict:
    """The tensors of a file that hold a parameter, on the CPU, under their names there."""
    tensors = {}
    for piece in _pieces(name, whole.shape, ()):
        part = whole if piece.expert is None else whole[piece.expert].clone()
        tensors[piece.name] = part.cpu().contiguous()
    return tensors


def _write_tensors(tensors, path) -> None:
    """One safetensors file; OSError that names it if the disk does not take it."""
    module = _safetensors()
    try:
        module.torch.save_file(tensors, path, metadata={"format": "pt"})
    except module.SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def _plan_shards(model, max_bytes) -> list[list[str]]:
    """Names of parameters, file by file."""
    plan = [[]]
    size = 0  # of the file under way; one parameter alone may be larger than max_bytes
    for name, p in model.named_parameters():
        size += p.numel() * p.element_size()
        if size > max_bytes and plan[-1]:
            plan.append([])
            size = p.numel() * p.element_size()
        plan[-1].append(name)
    return plan


def _write_config(directory, raw, weight_map, model) -> list[Path]:
    """Write the config and, for several files, their index, both under names of no checkpoint."""
    texts = {"config.json": raw}
    if len(set(weight_map.values())) > 1:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        texts["model.safetensors.index.json"] = index

    # Nobody else knows of these files yet, so whoever fails removes them.
    written = [directory / f"{name}.partial" for name in texts]
    for path, value in zip(written, texts.values(), strict=True):
        try:
            path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            for started in written:
                started.unlink(missing_ok=True)
            raise OSError(f"cannot write {path}: {error}") from error
    return written


def _replace_checkpoint(directory, written):
    """Move the new files over the old ones, and remove old ones that would be read with them."""
    new = [path.with_suffix("") for path in written]  # without .partial
    # The index goes first and comes last: a kill between two of these moves leaves files that
    # nobody reads, or an index that disagrees with them, but never old weights under new names.
    index = directory / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    for old in directory.glob("model*.safetensors"):
        if old not in new:
            old.unlink()
    for path, name in zip(written, new, strict=True):
        os.replace(path, name)


# K. Text: tokenizer, chat template, ends of turns ----------------------------------------------
# For whoever talks to a checkpoint: its words as tokens, and how a conversation is written down.
# Skip it if your rows are token ids already.

# What a checkpoint has beside its weights and their config.json: all that text needs, and how its
# authors sample. Some of these say the same in an older form.
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


class Text:
    """The text side of a checkpoint directory: its tokenizer, its chat template, the ends of turns.

    A conversation is a list of messages, {"role": "system" | "user" | "assistant", "content": ..}.
    Its tokens are those of transformers' `apply_chat_template`. Files that are damaged are a
    ValueError of one line that names the file; so is a directory in which nothing ends a turn.

    tokenizer: the `tokenizers` Tokenizer of tokenizer.json.
    vocab_size: how many ids the model has, by config.json: more than the tokenizer where the
        model's rows are rounded up (Qwen), one less where the tokenizer alone knows the place of an
        image (Gemma 3 1B).
    template: the source of the chat template; None where the directory has none.
    special_tokens: what the template may name: {"bos_token": "<bos>", ..}.
    bos: the id that raw text begins with; None if the checkpoint wants none.
    end: the ids that end a turn. The mark that the template itself writes behind an answer comes
        first, then those of generation_config.json, then those of config.json.
    """

    def __init__(self, directory):
        self.directory = Path(directory)
        self.tokenizer = load_tokenizer(directory)
        # A tokenizer.json may still say how its last user cut and padded rows. Ours are whole.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        config = ModelConfig.from_hf(self.directory)
        self.vocab_size = config.vocab_size

        # Raw text needs BOS alone; conversations need the template and what it may name.
        settings = _optional_json(self.directory / "tokenizer_config.json")
        self.special_tokens = _special_tokens(self.directory, settings)
        self.bos = self._find_bos(settings)
        self.template, self._template_file = _chat_template(self.directory, settings)
        self._compiled = None
        if self.template is not None:
            self._compiled = _compile_template(self.template, self._template_file)

        # Last, since the template is asked too.
        self.end = self._find_ends(config)

    def encode(self, text, *, bos=False) -> list[int]:
        """The tokens of a text as it stands: marks in it become their ids, and nothing is added.

        bos: begin with BOS, if the checkpoint wants one and the text does not begin with it.
        """
        # What comes from a pipe or a command line may hold bytes that are no UTF-8, which Python
        # passes on as lone surrogates.
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            near = text[max(0, error.start - 20) : error.end]
            raise ValueError(f"{near!r} is no text in UTF-8") from error

        # "special tokens" are here those that the tokenizer would put around the text. Marks that
        # stand in the text are found in any case.
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        if bos and self.bos is not None and tokens[:1] != [self.bos]:
            tokens = [self.bos, *tokens]
        return tokens

    def decode(self, tokens, *, special=False) -> str:
        """The text of tokens. special: with the marks, such as <|im_end|>, which it leaves out."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=not special)

    def render(self, messages, *, add_generation_prompt=True) -> str:
        """The conversation as text, in the words of the checkpoint's template.

        add_generation_prompt: end with what stands before an answer of the assistant.
        ValueError without a template, or with what the template has to complain of.
        """
        if self._compiled is None:
            raise ValueError(f"{self.directory} has no chat template, neither chat_template.jinja "
                             f"nor chat_template in tokenizer_config.json")  # fmt: skip
        if not messages or not all(isinstance(message, dict) for message in messages):
            got = reprlib.repr(messages)
            raise ValueError(f"messages must be objects, at least one, got {got}")

        # Many programs write a field that they do not use as null; a template asks whether it is
        # there, and would write the word None.
        messages = [{name: value for name, value in message.items() if value is not None}
                    for message in messages]  # fmt: skip
        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None,
                documents=None, **self.special_tokens,
            )  # fmt: skip
        except Exception as error:  # its own complaint, the sandbox's, or any of a wrong program
            raise ValueError(_template_complaint(self._template_file, error)) from error

    def prompt(self, messages) -> list[int]:
        """The tokens of a conversation, up to where the assistant answers.

        Whether BOS is among them is the template's affair: Gemma's writes it, Qwen has none.
        """
        return self.encode(self.render(messages))

    def next_turn(self, messages, end_token) -> list[int]:
        """The tokens between an answer that was sampled and the answer to what is said next.

        messages[-2] is an answer of the policy, whose tokens stand in a row already, end_token
        last; messages[-1] is what is said to it. The result goes behind end_token:

            row so far   .. <|im_start|>assistant, line break, 12. <|im_end|>
            next_turn    line break, <|im_start|>user, line break, And 7? <|im_end|>,
                         line break, <|im_start|>assistant, line break

        Nothing that was sampled is decoded and encoded again: BPE is no bijection, and the tokens
        of a row must stay those that were drawn. Hence the row can differ from the rendering of
        the whole conversation where a template rewrites history. Qwen3's leaves the thoughts of
        earlier turns out; here they stay. Gemma's trims the spaces around an answer; here not.
        """
        if len(messages) < 2 or messages[-2].get("role") != "assistant":
            raise ValueError("next_turn needs an answer of the assistant and what is said to it")
        tokens = self.encode(self._text_behind(messages, -2, add_generation_prompt=True))
        # The mark behind the answer is encoded with the rest, since some marks take the spaces
        # that follow. It is the token that the policy sampled, unless that ended in another way.
        if tokens[:1] == [end_token]:
            tokens = tokens[1:]
        return tokens

    def _text_behind(self, messages, turn, *, add_generation_prompt) -> str:
        """What the template writes behind the content of messages[turn], to the end."""
        # A template is a program. What it writes behind an answer is seen by running it with an
        # answer that can be found again: plain words, which no template trims, splits or escapes.
        # If somebody has said these very words, others are taken.
        marker = "here the answer stands"
        while marker in str(messages):
            marker += " again"
        messages = list(messages)
        messages[turn] = {"role": messages[turn]["role"], "content": marker}

        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        if text.count(marker) != 1:
            raise ValueError(f"{self._template_file} writes an answer {text.count(marker)} times, "
                             f"not once: what follows it cannot be told")  # fmt: skip
        return text.partition(marker)[2]

    def _find_bos(self, settings):
        """The id of BOS if raw text begins with it, else None."""
        # DEVIATES: from transformers 5, which reads `add_bos_token` only where there is no
        # tokenizer.json. Whoever wrote the field meant it; released checkpoints say the same in
        # both files. Pinned by tests/test_text.py::test_bos_is_what_the_checkpoint_says.
        path = self.directory / "tokenizer_config.json"
        said = _field_of_file(path, settings, "add_bos_token", bool | None)
        if said is None:
            # The tokenizer's post-processor puts it in front of any text, or nothing does.
            bare = self.tokenizer.encode("a", add_special_tokens=False).ids
            whole = self.tokenizer.encode("a", add_special_tokens=True).ids
            return whole[0] if whole[:1] != bare[:1] else None
        if not said:
            return None
        bos = self.tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))
        if bos is None:
            raise ValueError(f"{path} has add_bos_token, but no bos_token that tokenizer.json "
                             f"knows")  # fmt: skip
        return bos

    def _find_ends(self, config):
        """The ids that end a turn, each once."""
        ends = []
        mark = self._template_mark()
        if mark is not None:
            ends.append(mark)

        # A chat model's config.json often names one end alone, that of a turn or of a document;
        # generation_config.json has both.
        path = self.directory / "generation_config.json"
        said = _field_of_file(path, _optional_json(path), "eos_token_id", int | list[int] | None)
        if said is not None:
            ends += said if isinstance(said, list) else [said]
        ends += config.eos_token_id

        if not ends:
            raise ValueError(f"{self.directory}: nothing ends a turn. Neither generation_config."
                             f"json nor config.json has an eos_token_id, and no chat template "
                             f"writes a mark behind an answer")  # fmt: skip
        return tuple(dict.fromkeys(ends))

    def _template_mark(self):
        """The id of the mark that the template writes behind an answer, None without one."""
        if self.template is None:
            return None
        conversation = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant"}]
        try:
            behind = self._text_behind(conversation, -1, add_generation_prompt=False)
        except ValueError:
            return None  # it takes other conversations, or none: `render` will say so

        # It is a mark if it is a token of its own. Gemma has such tokens for line breaks too.
        tokens = self.encode(behind)
        added = self.tokenizer.get_added_tokens_decoder()
        if not tokens or tokens[0] not in added or added[tokens[0]].content.isspace():
            return None
        return tokens[0]


def load_tokenizer(directory):
    """The `tokenizers` Tokenizer of a checkpoint directory."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError("text needs tokenizers: pip install tokenizers") from error
    path = Path(directory) / "tokenizer.json"
    if not Path(directory).is_dir():
        raise ValueError(f"{directory} is no directory here; a checkpoint is a local directory")
    if not path.exists():
        raise ValueError(f"{directory} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower, whatever is wrong
        raise ValueError(f"{path} is no tokenizer that can be read: {error}") from error


def copy_text_files(source, target) -> list[str]:
    """Make a checkpoint's text files those of another one; the names of the files copied.

    As `save_hf` does with weights: what stood in `target` under these names is replaced, or
    removed where `source` has none, so that no template of another model is left beside them.
    """
    source = Path(source)
    target = Path(target)
    present = [name for name in TEXT_FILES if (source / name).is_file()]
    target.mkdir(parents=True, exist_ok=True)
    if source.resolve() == target.resolve():
        return present  # nothing to do, and nothing to lose

    for name in TEXT_FILES:
        if name not in present:
            (target / name).unlink(missing_ok=True)
            continue
        # Under another name first: after a kill each file is the old one or the new one, whole.
        partial = target / f"{name}.partial"
        partial.write_bytes((source / name).read_bytes())
        os.replace(partial, target / name)
    return present


def _compile_template(source, where):
    """A chat template, ready for `render`, with what transformers gives templates at hand.

    where: the file, for the ValueError if its syntax is wrong.
    """
    from importlib.metadata import version

    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("chat templates need jinja2: pip install jinja2") from error
    if torch.torch_version.TorchVersion(version("jinja2")) < "3.1.6":
        raise ImportError("the sandbox of jinja2 before 3.1.6 has holes: pip install -U jinja2")

    class Generation(jinja2.ext.Extension):
        """{% generation %} .. {% endgeneration %}, around answers; their text is written as is."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    # A checkpoint comes from somebody else, and its template is a program. The sandbox keeps it
    # from Python's internals, from changing what it is given, and from ranges beyond 100,000.
    # The two switches are part of the language: without them every {% .. %} would leave a line.
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation],
    )  # fmt: skip
    sandbox.filters["tojson"] = _template_json  # jinja2's own escapes <, > and &
    sandbox.globals["raise_exception"] = _template_exception
    sandbox.globals["strftime_now"] = _template_date
    try:
        return sandbox.from_string(source)
    except Exception as error:  # a wrong syntax, or one that is nested too deeply for the compiler
        raise ValueError(_template_complaint(where, error)) from error


# What transformers gives templates, by the names of the sandbox above.

def _template_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _template_exception(message):
    raise ValueError(message)


def _template_date(form):
    from datetime import datetime

    return datetime.now().strftime(form)


def _template_complaint(where, error):
    """One line, whatever the error says; the name of its class where it is not the template's."""
    said = " ".join(f"{error}".split())
    if type(error) is not ValueError:
        said = f"{type(error).__name__}: {said}"
    return f"the chat template in {where} fails: {said}"


def _chat_template(directory, settings):
    """The source of a directory's chat template and the file it stands in; (None, None) if none."""
    # The file is the newer form, and wins, as in transformers.
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return _read_bytes(path, "a chat template").decode("utf-8"), path
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text: {error}") from error

    path = directory / "tokenizer_config.json"
    source = settings.get("chat_template")
    if source is None:
        return None, None
    if isinstance(source, list):  # [{"name": "default", "template": ..}, ..]
        named = {x.get("name"): x.get("template") for x in source if isinstance(x, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise ValueError(f"{path}: chat_template must be a string, or a list of named ones with a "
                         f"default, got {reprlib.repr(settings['chat_template'])}")  # fmt: skip
    return source, path


def _special_tokens(directory, settings) -> dict[str, str]:
    """The tokens that have a role, by its name: bos_token, eos_token, pad_token and so on."""
    # Checkpoints from before `added_tokens_decoder` have these tokens in a file of their own. As in
    # transformers, it wins there, and is not looked at elsewhere.
    path = directory / "tokenizer_config.json"
    if "added_tokens_decoder" not in settings:
        path = directory / "special_tokens_map.json"
        settings = settings | _optional_json(path)

    found = {}
    for name in settings:
        if not name.endswith("_token") or isinstance(settings[name], bool):
            continue  # add_bos_token and its like are no tokens
        token = _field_of_file(path, settings, name, str | dict | None)
        if isinstance(token, dict):  # with how it is matched: {"content": "<bos>", "lstrip": ..}
            token = _field_of_file(path, token, "content", str)
        # A token that is null is not there: a template that asks for it finds nothing.
        if token is not None:
            found[name] = token
    return found


def _field_of_file(path, found, name, kind):
    """found[name], or None; ValueError that names the file, unless it is of the annotated kind."""
    try:
        require_field(name, found.get(name), kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found.get(name)


def _optional_json(path) -> dict:
    """The object that a JSON file holds, which is empty where there is no file."""
    return read_json(path) if path.exists() else {}


# L. One token a row, without modules -------------------------------------------------------------
# For `generate` on a CPU: for a few rows, calling modules takes longer than what they compute.
# Skip it: `extend` gives the same logits for every model, and here for those that are not plain.

COPIED = 2**26  # bytes of weights at most, in all, that are copied for one call of `generate`
PLAIN_MODULES = (
    Transformer, Decoder, Layer, Attention, MLP, RMSNorm, nn.Linear, nn.Embedding, nn.Identity,
    nn.ModuleList,
)  # fmt: skip


def one_token_step(model, /):
    """`Transformer.one_token_step`: f(cache, tokens_B1) -> logits (B, V), as `extend` gives them.

    It is of the weights as they are now: make it again when they have changed.
    """
    if is_plain(model):
        return PlainStep(model)
    return extend_one_token(model)


def is_plain(model, /) -> bool:
    """Whether `PlainStep` computes what this model's modules would, and takes less time."""
    # A model that is split, compiled, hooked or changed by hand has other modules or methods than
    # those above. Routers choose among experts, which is no product of all rows: not here.
    for module in model.modules():
        replaced = vars(module).keys() & {"forward", "hidden", "embed", "logits", "head_rows"}
        hooks = module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl
        if type(module) not in PLAIN_MODULES or replaced or hooks:
            return False

    # The products are faster on the CPU and in these dtypes alone, and copies cost memory.
    weights = list(model.parameters())
    dtype = weights[0].dtype
    alike = all(type(p) is nn.Parameter and p.dtype == dtype for p in weights)
    on_cpu = all(p.device.type == "cpu" for p in weights)
    size = sum(p.numel() * p.element_size() for p in weights)
    return alike and on_cpu and dtype in (torch.float32, torch.float64) and size <= COPIED


class PlainNorm(NamedTuple):
    """An `RMSNorm` for `normalised`: vectors of width M are multiplied by sqrt(M) w / hypot."""

    weight: torch.Tensor  # sqrt(M) w; gemma: sqrt(M) (1 + w)
    least: torch.Tensor  # sqrt(M eps), a number


class PlainLayer(NamedTuple):
    """What `PlainStep` needs of a `Layer`; None where a family has none. N: heads times D."""

    kind: str
    options: dict  # of the cache's attention: layer, scale, window
    least: torch.Tensor  # of the norm before attention, whose weight is in qkv_MN
    qkv_MN: torch.Tensor
    qkv_bias_N: torch.Tensor | None
    qk_norm: PlainNorm | None
    o_NM: torch.Tensor
    o_bias_M: torch.Tensor | None
    attention_norm: PlainNorm | None  # norm' of (2)
    ffn_least: torch.Tensor  # of the norm before the ffn, whose weight is in gate_up_MN
    gate_up_MN: torch.Tensor
    act: Callable
    down_NM: torch.Tensor
    after_ffn_norm: PlainNorm | None  # norm' of (3)


class PlainStep:
    """`extend` by one token a row, spelled out over copies of a model's weights.

    In the copies q, k and v are one matrix, and so are gate and up, multiplied by the weight of the
    norm before them. They are transposed: a product of a few rows with an (in, out) matrix takes
    half as long as with Hugging Face's (out, in).
    """

    def __init__(self, model):
        config = model.config
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        self.embed_tokens = model.model.embed_tokens.weight
        self.embedding_scale = 1.0
        if config.scale_embedding:  # rounded as in `Transformer.embed`
            root = torch.tensor(config.hidden_size**0.5, dtype=self.embed_tokens.dtype)
            self.embedding_scale = root.item()
        self.rope = model.rope
        self.angles = {}  # those of the positions from `first` on: layer type -> cos, sin
        self.first = None
        self.layers = [plain_layer(layer) for layer in model.model.layers]
        norm = plain_norm(model.model.norm)
        self.least = norm.least
        self.head_MV = transposed([model.head_weight], norm)
        self.softcap = config.final_logit_softcapping

    @torch.no_grad()
    def __call__(self, cache, tokens_B1, /):
        """Feed tokens (B, 1), which the caller has checked; logits (B, V) after them."""
        # What does not depend on the layer: the states of a token, and the angles of its position.
        x_BM = F.embedding(tokens_B1[:, 0], self.embed_tokens)  # (1)
        if self.embedding_scale != 1:
            x_BM = x_BM * self.embedding_scale
        ropes = self.angles_at(cache.lengths, x_BM.dtype)

        cache.counts_B = None
        for layer in self.layers:
            h_BN = self.attended(unit_length(x_BM, layer.least), layer, ropes[layer.kind], cache)
            x_BM = added(x_BM, h_BN, layer.o_NM, layer.o_bias_M, layer.attention_norm)  # (2)

            # Gate and up stand side by side; the activation's result is nobody else's, so that it
            # may be overwritten.
            h_BN = unit_length(x_BM, layer.ffn_least) @ layer.gate_up_MN
            gate_BI, up_BI = h_BN.chunk(2, -1)
            h_BI = layer.act(gate_BI).mul_(up_BI)
            x_BM = added(x_BM, h_BI, layer.down_NM, None, layer.after_ffn_norm)  # (3)
        cache.advance()

        # The head is the largest matrix of a small model, and gains most from its copy.
        z_BV = unit_length(x_BM, self.least) @ self.head_MV  # (7)
        if self.softcap:
            z_BV = self.softcap * torch.tanh(z_BV / self.softcap)
        return z_BV

    def angles_at(self, lengths, dtype, /):
        """What `Rope` gives for the next position of each row."""
        # Rows of one length share a position: angles are made for 64 of them at a time. Dynamic
        # RoPE makes them anew for each.
        ropes = self.rope.config.rope_parameters.values()
        if not lengths.even or any(rope["rope_type"] == "dynamic" for rope in ropes):
            return self.rope(lengths.of_B[:, None], dtype)
        n = lengths.longest % 64
        if self.first != lengths.longest - n:
            self.first = lengths.longest - n
            self.angles = self.rope(self.first + torch.arange(64)[None], dtype)
        return {kind: (cos[:, n : n + 1], sin[:, n : n + 1])
                for kind, (cos, sin) in self.angles.items()}  # fmt: skip

    def attended(self, x_BM, layer, rope, cache, /):
        """`Attention.forward` of one token a row, up to what o is multiplied with."""
        qkv_BN = x_BM @ layer.qkv_MN
        if layer.qkv_bias_N is not None:
            qkv_BN = qkv_BN + layer.qkv_bias_N

        # The heads of q, k and v lie behind each other, Y in all. The X of q and k are normalised
        # and turned together.
        H = self.heads
        G = self.key_heads
        qkv_B1YD = qkv_BN.view(len(x_BM), 1, H + 2 * G, -1)
        qk_B1XD = qkv_B1YD[:, :, : H + G]
        if layer.qk_norm is not None:
            qk_B1XD = normalised(qk_B1XD, layer.qk_norm)
        q_BH1D, k_BG1D = rotate(qk_B1XD, *rope).transpose(1, 2).split([H, G], 1)
        v_BG1D = qkv_B1YD[:, :, H + G :].transpose(1, 2)

        return cache.attention(q_BH1D, k_BG1D, v_BG1D, **layer.options).flatten(1)


def unit_length(x, least, /):
    """x / hypot(|x|, sqrt(M eps)) over the last dimension: (4) but for its factor w sqrt(M)."""
    # NUMERICS: both kernels add squares in x's own float32 or float64; the results differ by what
    # rounding makes of another order. Pinned by tests/test_decoding.py::test_a_step_is_extend.
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), least)


def normalised(x, norm, /):
    """(4) over the last dimension."""
    return unit_length(x, norm.least).mul_(norm.weight)  # (4)


def added(x_BM, h_BN, matrix_NM, bias_M, norm, /):
    """x + norm'(h W + b) of (2) and (3), in one call where there is neither norm' nor b."""
    if bias_M is None and norm is None:
        return torch.addmm(x_BM, h_BN, matrix_NM)
    h_BM = h_BN @ matrix_NM
    if bias_M is not None:
        h_BM = h_BM + bias_M
    if norm is not None:
        h_BM = normalised(h_BM, norm)
    return x_BM + h_BM


def plain_norm(norm, /) -> PlainNorm:
    """What `normalised` needs of an `RMSNorm`."""
    weight = norm.weight.detach()
    if norm.offset:
        weight = 1 + weight
    least = torch.tensor((len(weight) * norm.eps) ** 0.5, dtype=weight.dtype)
    return PlainNorm(weight * len(weight) ** 0.5, least)


def plain_layer(layer, /) -> PlainLayer:
    """What `PlainStep` needs of a `Layer`."""
    # q's and k's heads are normalised together, so each head has its weight in a row of its own.
    attn = layer.self_attn
    heads = [part.weight.shape[0] // attn.head_dim for part in (attn.q_proj, attn.k_proj)]
    qk_norm = None
    if isinstance(attn.q_norm, RMSNorm):
        norms = plain_norm(attn.q_norm), plain_norm(attn.k_norm)
        rows = [norm.weight.expand(n, -1) for norm, n in zip(norms, heads)]
        qk_norm = PlainNorm(torch.cat(rows), norms[0].least)

    # Hugging Face's name for norm' of (2) is in other families that of the norm before the ffn.
    attention_norm = None
    after_ffn_norm = None
    ffn_norm = layer.post_attention_layernorm
    if layer.sandwich:
        attention_norm = plain_norm(layer.post_attention_layernorm)
        ffn_norm = layer.pre_feedforward_layernorm
        after_ffn_norm = plain_norm(layer.post_feedforward_layernorm)

    # Matrices that are applied to the same states become one, with those states' norm in it.
    qkv = attn.q_proj, attn.k_proj, attn.v_proj
    norm = plain_norm(layer.input_layernorm)
    ffn_norm = plain_norm(ffn_norm)
    return PlainLayer(
        kind=attn.kind,
        options=dict(layer=attn.layer, scale=attn.scale, window=attn.window),
        least=norm.least,
        qkv_MN=transposed([part.weight for part in qkv], norm),
        qkv_bias_N=None if qkv[0].bias is None else torch.cat([part.bias for part in qkv]),
        qk_norm=qk_norm,
        o_NM=transposed([attn.o_proj.weight]),
        o_bias_M=attn.o_proj.bias,
        attention_norm=attention_norm,
        ffn_least=ffn_norm.least,
        gate_up_MN=transposed([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight], ffn_norm),
        act=layer.mlp.act,
        down_NM=transposed([layer.mlp.down_proj.weight]),
        after_ffn_norm=after_ffn_norm,
    )


def transposed(weights, norm=None, /):
    """(out, in) matrices below each other as one (in, out) matrix, a copy.

    norm: a PlainNorm of what the matrix is multiplied with, whose factor its rows take along.
    """
    matrix = torch.cat(weights).detach().T.contiguous()
    if norm is not None:
        matrix.mul_(norm.weight[:, None])
    return matrix


# M. A norm in few passes -----------------------------------------------------------------------
# For speed on a CPU: `F.rms_norm` is several operations there, and each reads and writes all rows.
# Skip it if you take it that the gradient is that of `F.rms_norm`.

def rms_norm(x, weight, eps, /):
    """(4) over the last dimension, in the dtype of x, which the weight has too. On a CPU it has no
    second derivative."""
    # On CUDA torch has one kernel for it, and in a graph that is compiled there will be one.
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)

    # NUMERICS: bf16 and fp16 are torch's, which computes in float32 and rounds once. Pinned by
    # tests/test_models.py::test_rms_norm_accumulates_in_float32.
    if x.dtype not in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return NormInFewPasses.apply(x, weight, eps)


class NormInFewPasses(torch.autograd.Function):
    """y = w r x with r = 1 / sqrt(mean(x^2) + eps), a number a row. Only x and r are kept.

    As dr/dx = -r^3 x / M, the gradient is

        dx = r (w dy - x r / M sum(w x r dy))  over the row,      dw = sum x r dy  over all rows.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():  # so it is in a backward only under create_graph=True
            raise NotImplementedError("a norm has no second derivative here: no create_graph=True")

        # x r dy is overwritten by dx in the end: memory that is new costs as much as a pass.
        x, weight, r = ctx.saved_tensors
        product = (dy * x).mul_(r)

        # NUMERICS: a sum over thousands of rows by torch.sum, which adds pairwise; a product with r
        # would be 10 times less exact. Pinned by
        # tests/test_models.py::test_the_norm_on_a_cpu_has_the_gradient_of_torchs.
        dweight = product.reshape(-1, len(weight)).sum(0)
        slope = (product @ weight)[..., None].mul_(r)
        dx = torch.mul(dy, weight, out=product).addcmul_(x, slope, value=-1 / len(weight)).mul_(r)
        return dx, dweight, None


# N. check -------------------------------------------------------------------------------------
# For `python models.py check`: tiny models of every family, each path against the definition.
# Skip it unless a row fails, or you add a path. Tests use `tiny` and `tiny_model` too.

TINY = {  # what a tiny model of each family needs beyond the sizes
    "qwen2": dict(qk_norm=False, qkv_bias=True),
    "qwen3": dict(),
    "qwen3_moe": dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, sparse_layers=(1,),
        norm_topk_prob=True,
    ),
    "gemma3_text": dict(
        norm_offset=True, sandwich_norms=True, scale_embedding=True, sliding_window=4,
        layer_types=(SLIDING, FULL), hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=12,
        tie_word_embeddings=True, rope_parameters={
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}  # fmt: skip
CASES = {
    **{name: (name, {}) for name in TINY},
    "qwen3 tied, slides": ("qwen3", dict(
        tie_word_embeddings=True, layer_types=(FULL, SLIDING), sliding_window=3)),
    "qwen3 linear": ("qwen3", dict(
        rope_parameters={FULL: {"rope_type": "linear", "factor": 3.0}})),
    "qwen3_moe biased": ("qwen3_moe", dict(
        router_bias_rate=0.05, norm_topk_prob=False, sparse_layers=(0, 1))),
    "gemma3_text capped": ("gemma3_text", dict(final_logit_softcapping=4.0)),
}  # fmt: skip


def tiny(model_type="qwen3", **changes) -> ModelConfig:
    """A small configuration with grouped heads and nothing square, for tests."""
    base = dict(
        vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=10,
        num_attention_heads=4, num_key_value_heads=2, model_type=model_type, initializer_range=0.3,
    )  # fmt: skip
    return ModelConfig(**base | TINY[model_type] | changes)


def tiny_model(model_type="qwen3", seed=1, dtype=torch.float64, **changes) -> Transformer:
    """A `tiny` model whose norms, biases and votes are away from their neutral values."""
    model = Transformer(tiny(model_type, **changes)).to(dtype).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator).to(dtype)
        for votes in model.buffers():
            votes.copy_(torch.randint(-9, 9, votes.shape, generator=generator))
    return model


def _relative(a, b):
    """|a - b| / |b|, infinite for a NaN. a may be on another device."""
    error = ((a.cpu().double() - b.double()).norm() / b.double().norm()).item()
    return error if error == error else math.inf


def _worst_gradient(mine, got, model, want):
    """The largest relative error of a parameter's gradient, under one random upstream gradient.

    got was computed with the model `mine`, want with `model`, which has the same weights.
    """
    upstream = torch.randn_like(want)
    grads = [
        torch.autograd.grad((x * upstream.to(x)).sum(), list(m.parameters()), retain_graph=True)
        for m, x in ((mine, got), (model, want))
    ]
    return max(map(_relative, *grads))


def check(cases=None, transformers=True) -> bool:
    """Each path against `definition` in float64; prints a table, True if every row is <= 1e-12.

    cases: some of CASES, default all. With tests/measure_models.py beside this file, experts and
    the other RoPE types too, and, if transformers is installed, logits and gradients against it in
    float32, <= 1e-5.
    """
    torch.manual_seed(0)
    rows = [
        (f"{name}: {path}", error, 1e-12)
        for name, (model_type, changes) in (cases or CASES).items()
        for path, error in _path_errors(tiny_model(model_type, **changes))
    ]

    # The rows that need other files. With this one alone it says what is not shown.
    try:
        rows += _measuring_file().rows(cases, transformers)
    except ImportError as missing:
        print(f"SKIP ({missing}): RoPE types dynamic, yarn, llama3; the experts' grouped product "
              "and balance loss; the action expert as one stream; logits and gradients against "
              "transformers")  # fmt: skip

    # A table to read, and one line for a program. NaN counts as infinitely wrong.
    print(f"{'path against its definition':55} relative error")
    for name, error, bound in rows:
        print(f"{name:55} {error:.1e}  {'ok' if error <= bound else f'FAILED, above {bound}'}")
    ok = all(error <= bound for _, error, bound in rows)
    exact = max(error for _, error, bound in rows if bound == 1e-12)
    print(json.dumps({"check": "models", "ok": ok, "max_error": exact}))
    return ok


def _path_errors(model, frequencies=defined_frequencies, mine=None):
    """(path, error) of one model: values, gradients, packing, the cache, log-probs.

    mine: the same model on another device, which is then held against the definition on the CPU.
    """
    if mine is None:
        mine = model
    device = mine.head_weight.device
    documents = [torch.randint(model.config.vocab_size, (n,)) for n in (7, 6, 1, 12)]
    truth = torch.cat([definition(model, d, frequencies) for d in documents])
    alone = torch.cat([mine(d[None].to(device))[0] for d in documents])
    yield "one at a time", _relative(alone, truth)
    yield "gradient, worst parameter", _worst_gradient(mine, alone, model, truth)

    # Two rows of two documents, one PAD before each.
    with torch.no_grad():
        tokens = torch.cat([F.pad(d, (1, 0)) for d in documents]).view(2, 15)
        positions = torch.cat([torch.arange(-1, len(d)) for d in documents]).view(2, 15)
        ids = torch.where(positions < 0, -1, (positions < 0).cumsum(1))
        tokens, positions, there = (x.to(device) for x in (tokens, positions, ids))
        packed = mine(tokens, positions=positions, attention=packed_attention(doc_ids=there))
        yield "packed, PAD anywhere", _relative(packed.cpu()[ids >= 0], truth)
        yield "cache, ragged rows", _relative(*_logits_by_cache(mine, documents, truth))

    # (8) and (9) from the definition's logits, with torch's own softmax.
    logp = (truth / 0.7).log_softmax(-1)
    targets = torch.randint(model.config.vocab_size, (len(truth),))
    hidden = torch.cat([mine.hidden(d[None].to(device))[0] for d in documents])
    options = dict(temperature=0.7, softcap=model.config.final_logit_softcapping, chunk=5)
    got = torch.stack(token_logprobs(hidden, mine.head_weight, targets.to(device), **options))
    want = torch.stack([logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
    yield "log-probs and entropy in chunks", _relative(got, want)
    yield "gradient in chunks, worst parameter", _worst_gradient(mine, got, model, want)


def _logits_by_cache(model, documents, truth):
    """Logits by halves as a ragged batch of prompts, then token by token, and the same of truth."""
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
        logits = extend(model, cache, tokens.to(logits.device))


# O. main --------------------------------------------------------------------------------------
# For the command line: which command is here, which in tests/measure_models.py, the exit code.
# Skip it unless a command does not start.

def _measuring_file(name="measure_models"):
    """A file of tests/; ImportError where it, or a file that it needs, is missing."""
    sys.path.append(str(Path(__file__).resolve().parent / "tests"))
    return __import__(name)


def main(argv) -> int:
    """check is here; inspect, bench and control in tests/measure_models.py. The exit code."""
    return quietly(_run_command, argv)


def quietly(command, argv) -> int:
    """The exit code of a command whose output may go to `| head`."""
    try:
        code = command(argv)
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`). What is still buffered would fail once
        # more as Python ends, so it goes nowhere; 141 is what a shell gives for such an end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run_command(argv) -> int:
    if argv == ["check"]:
        return 0 if check() else 1

    # The other commands are long, need what only tests need, and are imported when asked for.
    inspects = argv[:1] == ["inspect"] and len(argv) == 2
    if inspects or argv[:1] in (["bench"], ["control"]) or argv[:2] == ["check", "--device"]:
        try:
            if argv[0] == "check":
                return _measuring_file("measure_gpu").check("models", argv[1:])
            return _measuring_file().main(argv)
        except ModuleNotFoundError as missing:
            print(f"{argv[0]} needs the tests beside this file: {missing}", file=sys.stderr)
        except ValueError as error:
            if not inspects:
                raise
            print(error, file=sys.stderr)  # what is wrong with the checkpoint, in one line
            return 1
    usage = "usage: python models.py check [--device cuda] | inspect DIR | bench | control"
    print(usage, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Qwen2 and Qwen3 (dense): the Hugging Face checkpoints, with attention as an argument.

The model knows nothing of masks, rings, trees or caches. Every layer calls one function,
`attention(q, k, v, layer=, scale=, ...)`, that the caller made; packed documents and the KV cache
below are two such functions, and a file that you write can be a third. The model therefore never
changes when attention does, and what it computes can be read in 100 lines.

    python models.py check          # seconds: every path against the slow definition, in float64
    python models.py inspect DIR    # what a checkpoint holds: config, parameter count, bytes

What it must equal, for tokens t_1..t_S (x a vector of width M, [.] concatenation of heads):

    (1)  x^0_i   = embed[t_i]
    (2)  y_i     = x_i + O [ attention(q, k, v) ]_i
         q_i     = rope_i(norm_q(Q norm(x_i))), k_i likewise with K, v_i = V norm(x_i)
    (3)  x'_i    = y_i + down( silu(gate norm(y_i)) * (up norm(y_i)) )
    (4)  norm(x) = w * x / sqrt(mean(x^2) + eps)
    (5)  rope_p(x) = x cos(p f) + (-x[D/2:], x[:D/2]) sin(p f),  f_n = theta^(-2n/D), n = 0..D/2-1
    (6)  z_i     = head norm(x^L_i)                                      logits, over the vocabulary
    (7)  logprob_i(t) = z_it / T - log sum_u exp(z_iu / T)               T the temperature
    (8)  entropy_i    = - sum_u exp(logprob_i(u)) logprob_i(u)

`definition` below computes (1)-(8) with Python loops; `check` compares everything with it.

The families, as rows (a new family is a row of FAMILIES and a reader of its config):

    |                     | qwen2                   | qwen3              |
    | q, k, v bias        | yes                     | `attention_bias`   |
    | o bias              | no                      | `attention_bias`   |
    | q/k norm per head   | no                      | yes, before RoPE   |
    | head_dim if absent  | hidden_size / heads     | 128                |

Letters (a small letter would be one rank's share; this file has one rank):

    B batch rows    S tokens in a row     M model width (hidden_size)   V vocabulary
    H query heads   G key/value heads     D head_dim                    L padded document length
    N scored tokens (any subset of B x S) C tokens that a cache has room for
    E documents in a bucket

Cost per token, P parameters outside the embedding: 2 P flops forward and 4 P backward, plus
attention's 4 S H D forward per layer (half of it is masked out). The cache holds 2 G D numbers per
token and layer. Log-probs never hold a whole (N, V) tensor: chunks, whose logits the backward
computes again (one more head product, 2 M V flops a scored token).

Not here: MoE, Gemma, sliding windows, RoPE scaling (refused by name), dropout (none of the
released models has any), quantised weights.

References: Qwen2 arXiv:2407.10671; Qwen3 arXiv:2505.09388; RoPE arXiv:2104.09864 (half-split form,
as in Hugging Face); RMSNorm arXiv:1910.07467; GQA arXiv:2305.13245.
"""

import dataclasses
import json
import math
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


# 1. The configuration ------------------------------------------------------------------------

# What a family fixes, and the class defaults that transformers gives a field absent from the file.
FAMILIES = {
    "qwen2": dict(qk_norm=False, qkv_bias=True, o_bias=False, head_dim=None),
    "qwen3": dict(qk_norm=True, qkv_bias="attention_bias", o_bias="attention_bias", head_dim=128),
}
HF_DEFAULTS = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=32768,
    rms_norm_eps=1e-6, tie_word_embeddings=False, initializer_range=0.02,
)  # fmt: skip


@dataclass
class ModelConfig:
    """The shape of a `Transformer`. Field names are Hugging Face's wherever it has one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "qwen3"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                     "num_attention_heads", "num_key_value_heads", "head_dim"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must divide by "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for half-split RoPE, got {self.head_dim}")

    @classmethod
    def from_hf(cls, source, /) -> "ModelConfig":
        """Read a Hugging Face config: a directory, a config.json, or the dict itself.

        Both spellings are read (transformers 4 and 5). Anything that would change the numbers and
        is not implemented is a ValueError that names it.
        """
        if not isinstance(source, dict):
            path = Path(source)
            source = _read_json(path / "config.json" if path.is_dir() else path)
        raw = source
        family = FAMILIES.get(raw.get("model_type"))
        if family is None:
            raise ValueError(
                f"model_type {raw.get('model_type')!r} is not implemented; implemented: "
                + ", ".join(FAMILIES)
            )
        _refuse_unimplemented(raw)
        fields = {name: raw.get(name, default) for name, default in HF_DEFAULTS.items()}
        if fields["num_key_value_heads"] is None:
            fields["num_key_value_heads"] = fields["num_attention_heads"]
        empty = [name for name, value in fields.items() if value is None]
        if empty:
            raise ValueError(f"config leaves {', '.join(empty)} null")
        for name in ("qk_norm", "qkv_bias", "o_bias"):
            rule = family[name]
            fields[name] = raw.get(rule, False) if isinstance(rule, str) else rule
        head_dim = raw.get("head_dim") or family["head_dim"]
        fields["head_dim"] = head_dim or fields["hidden_size"] // fields["num_attention_heads"]
        rope = raw.get("rope_parameters") or {}
        fields["rope_theta"] = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
        eos = raw.get("eos_token_id")
        eos = eos if isinstance(eos, list) else [eos]
        fields["eos_token_id"] = tuple(token for token in eos if token is not None)
        return cls(model_type=raw["model_type"], **fields)

    def require_same_numbers(self, other, where) -> None:
        """ValueError if a model of the other configuration would compute something else."""
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name not in ("initializer_range", "eos_token_id") and mine != theirs:
                raise ValueError(f"{where} has {f.name} {mine}, the model {theirs}")

    def to_hf(self) -> dict:
        """The config.json that both transformers 4 and 5 read back to this model."""
        for name, rule in FAMILIES[self.model_type].items():
            if isinstance(rule, bool) and getattr(self, name) != rule:
                raise ValueError(f"{self.model_type} has {name}={rule}, this model not")
        if self.model_type == "qwen3" and self.qkv_bias != self.o_bias:
            raise ValueError("qwen3 has one attention_bias: qkv_bias and o_bias must be equal")
        raw = {name: getattr(self, name) for name in HF_DEFAULTS}
        raw |= {
            "architectures": [self.model_type.capitalize() + "ForCausalLM"],
            "model_type": self.model_type, "head_dim": self.head_dim, "hidden_act": "silu",
            "rope_theta": self.rope_theta, "attention_dropout": 0.0, "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "eos_token_id": list(self.eos_token_id) or None,
        }  # fmt: skip
        if self.model_type == "qwen3":
            raw["attention_bias"] = self.qkv_bias
        return raw


def _refuse_unimplemented(raw):
    """Raise for each field that changes the numbers and that this file does not implement."""
    ropes = [raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)]
    types = [rope.get("rope_type", rope.get("type", "default")) for rope in ropes]
    partial = [x.get("partial_rotary_factor") for x in (raw, *ropes)]
    layers, layer_types = raw.get("num_hidden_layers", 32), raw.get("layer_types")
    sliding = raw.get("use_sliding_window") and raw.get("sliding_window") is not None
    known = {"full_attention", "sliding_attention"}
    late = sliding and layer_types is None and raw.get("max_window_layers", 28) < layers
    refused = {
        f"rope_type {types}": any(kind != "default" for kind in types),
        "RoPE per layer type": any(isinstance(v, dict) for rope in ropes for v in rope.values()),
        "partial_rotary_factor": any(factor not in (None, 1) for factor in partial),
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "attention_dropout > 0": (raw.get("attention_dropout") or 0) > 0,
        "sliding-window layers": late or "sliding_attention" in (layer_types or ()),
        f"layer_types {layer_types}": layer_types and (
            len(layer_types) != layers or not known.issuperset(layer_types)
        ),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    found = [name for name, present in refused.items() if present]
    if found:
        raise ValueError(f"config asks for {', '.join(found)}: not implemented in models.py")


# 2. The definition ---------------------------------------------------------------------------


def definition(model, tokens, /):
    """Logits (S, V) of one document (S,), equations (1)-(6) token by token. Slow, float64."""
    config, D = model.config, model.config.head_dim
    w = {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(x, weight):  # (4)
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def heads(x, prefix):  # project and split in heads: (heads, D)
        return (w[prefix + "_proj.weight"] @ x + w.get(prefix + "_proj.bias", 0)).view(-1, D)

    def rotated(x, prefix, p):  # the same, normalised and rotated to position p
        y = heads(x, prefix)
        y = norm(y, w[prefix + "_norm.weight"]) if prefix + "_norm.weight" in w else y
        angle = p * config.rope_theta ** (-torch.arange(0, D, 2).double() / D)
        a, b = y.chunk(2, -1)  # (5)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    xs = [w["model.embed_tokens.weight"][t] for t in tokens.tolist()]  # (1)
    for n in range(config.num_hidden_layers):
        at = f"model.layers.{n}.self_attn."
        hs = [norm(x, w[f"model.layers.{n}.input_layernorm.weight"]) for x in xs]
        q, k = ([rotated(h, at + s, p) for p, h in enumerate(hs)] for s in "qk")
        v = [heads(h, at + "v") for h in hs]
        for i, x in enumerate(xs):
            out = []
            for head in range(config.num_attention_heads):
                g = head * config.num_key_value_heads // config.num_attention_heads
                score = torch.stack([q[i][head] @ k[j][g] for j in range(i + 1)]) / D**0.5
                out.append(sum(p * v[j][g] for j, p in enumerate(score.softmax(0))))
            y = x + w[at + "o_proj.weight"] @ torch.cat(out) + w.get(at + "o_proj.bias", 0)  # (2)
            h = norm(y, w[f"model.layers.{n}.post_attention_layernorm.weight"])
            mlp = f"model.layers.{n}.mlp."
            gate, up, down = (w[f"{mlp}{s}_proj.weight"] for s in ("gate", "up", "down"))
            xs[i] = y + down @ (F.silu(gate @ h) * (up @ h))  # (3); later i never read xs[i] again
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return torch.stack([head @ norm(x, w["model.norm.weight"]) for x in xs])  # (6)


# 3. The model --------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """(4). (..., M) -> (..., M)."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x, /):
        # NUMERICS: torch's kernel accumulates the mean square of bf16/fp16 input in float32 and of
        # float64 in float64. Pinned by tests/test_models.py::test_rms_norm_accumulates_in_float32.
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_angles(positions_BS, /, *, head_dim, theta, dtype):
    """cos and sin of (5), each (B, 1, S, D/2), in float32 or better."""
    # NUMERICS: the angles of position 10^5 need float32; a bf16 position is wrong from 257 on.
    # Pinned by tests/test_models.py::test_bf16_model_keeps_float32_rope_angles.
    dtype = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=positions_BS.device) / head_dim
    angle_B1SD = positions_BS.to(dtype)[:, None, :, None] * theta**-exponent
    return angle_B1SD.cos(), angle_B1SD.sin()


def rotate(x_BHSD, cos_B1SD, sin_B1SD, /):
    """(5), half-split form; (B, H, S, D) -> the same. The D of cos and sin is half of x's."""
    a_BHSD, b_BHSD = x_BHSD.chunk(2, -1)
    out_BHSD = torch.cat(
        [a_BHSD * cos_B1SD - b_BHSD * sin_B1SD, b_BHSD * cos_B1SD + a_BHSD * sin_B1SD], -1
    )
    return out_BHSD.to(x_BHSD.dtype)


def causal_attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, softcap=None):
    """The default attention: token i of each row sees tokens 0..i. Right padding needs no mask."""
    if window is not None or softcap is not None:
        raise ValueError("causal_attention has no window and no softcap; pass another attention")
    return F.scaled_dot_product_attention(
        q_BHSD, k_BGSD, v_BGSD, is_causal=True, scale=scale, enable_gqa=True
    )


class Attention(nn.Module):
    """(2) without its residual. The heads that exist are read off the weights, not the config."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width, D = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, width, bias=config.o_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BSM, cos_B1SD, sin_B1SD, attention, /):
        def heads(x_BSM):
            return x_BSM.unflatten(-1, (-1, self.head_dim))

        q_BHSD = self.q_norm(heads(self.q_proj(x_BSM))).transpose(1, 2)
        k_BGSD = self.k_norm(heads(self.k_proj(x_BSM))).transpose(1, 2)
        v_BGSD = heads(self.v_proj(x_BSM)).transpose(1, 2)
        q_BHSD, k_BGSD = rotate(q_BHSD, cos_B1SD, sin_B1SD), rotate(k_BGSD, cos_B1SD, sin_B1SD)
        out_BHSD = attention(q_BHSD, k_BGSD, v_BGSD, layer=self.layer, scale=self.head_dim**-0.5)
        return self.o_proj(out_BHSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """(3) without its residual."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSM, /):
        return self.down_proj(F.silu(self.gate_proj(x_BSM)) * self.up_proj(x_BSM))


class Layer(nn.Module):
    """(2) and (3): pre-norm residual block."""

    def __init__(self, config, layer):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSM, cos_B1SD, sin_B1SD, attention, /):
        x_BSM = x_BSM + self.self_attn(self.input_layernorm(x_BSM), cos_B1SD, sin_B1SD, attention)
        return x_BSM + self.mlp(self.post_attention_layernorm(x_BSM))


class Decoder(nn.Module):
    """Everything below the head. A module of its own so that parameter names are Hugging Face's."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """A causal language model.

    `forward(tokens)` gives logits (B, S, V); `.hidden(tokens)` stops before the head, (B, S, M);
    `.logprobs(hidden, targets)` applies the head to the positions that are scored, in chunks.
    Tied embeddings are one parameter, `model.embed_tokens.weight`; there is then no `lm_head`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self):
        """The (V, M) matrix of (6)."""
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> "Transformer":
        """Normal(0, initializer_range) matrices, unit norms, zero biases; equal in every dtype."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith("bias"):
                parameter.zero_()
            else:  # drawn in float32 on the CPU, so that dtype and device do not change the draw
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.copy_(draw * self.config.initializer_range)
        return self

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        """Final normalised states (B, S, M) of int64 tokens (B, S).

        positions: (B, S) int64, for RoPE only; default 0..S-1. attention: the callable that each
        layer calls as attention(q, k, v, layer=, scale=), q (B, H, S, D), k and v (B, G, S, D),
        returning (B, H, S, D); default `causal_attention`.
        """
        if tokens_BS.dim() != 2:
            raise ValueError(f"tokens must be (B, S), got shape {tuple(tokens_BS.shape)}")
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
        x_BSM, config = self.model.embed_tokens(tokens_BS), self.config  # (1)
        cos_B1SD, sin_B1SD = rope_angles(
            positions, head_dim=config.head_dim, theta=config.rope_theta, dtype=x_BSM.dtype
        )
        for layer in self.model.layers:
            x_BSM = layer(x_BSM, cos_B1SD, sin_B1SD, attention or causal_attention)
        return self.model.norm(x_BSM)

    def forward(self, tokens_BS, /, *, positions=None, attention=None):
        """Logits (B, S, V), (6), in the model's dtype. Training wants `.logprobs` instead."""
        x_BSM = self.hidden(tokens_BS, positions=positions, attention=attention)
        return F.linear(x_BSM, self.head_weight)

    def logprobs(self, hidden, targets, /, *, temperature: float = 1.0):
        """(7) and (8) of targets (N,) given hidden (N, M): two (N,) tensors, float32 or better."""
        return token_logprobs(hidden, self.head_weight, targets, temperature=temperature)


# 4. Log-probabilities in chunks --------------------------------------------------------------


def token_logprobs(
    hidden_NM, weight_VM, targets_N, /, *, temperature=1.0, softcap=None, chunk=1024
):
    """Log-prob of each target and entropy of each distribution, (7) and (8).

    hidden_NM (N, M) and weight_VM (V, M) of one floating dtype, targets_N (N,) int64 in 0..V-1.
    softcap: z := c tanh(z / c) before the temperature (Gemma 2). Returns two (N,) tensors in
    float32 (float64 for float64), differentiable in hidden and weight. At most (chunk, V) logits
    exist at a time, forward and backward.
    """
    if hidden_NM.dim() != 2 or targets_N.shape != hidden_NM.shape[:1]:
        raise ValueError(
            f"hidden must be (N, M) and targets (N,), got {tuple(hidden_NM.shape)} and "
            f"{tuple(targets_N.shape)}"
        )
    if not temperature > 0 or chunk < 1:
        raise ValueError(f"temperature and chunk must be positive, got {temperature} and {chunk}")
    return _TokenLogprobs.apply(hidden_NM, weight_VM, targets_N, temperature, softcap, chunk)


def _scaled_logits(hidden_NM, weight_VM, temperature, softcap):
    # NUMERICS: the product is in the model's dtype, everything after it in float32 or better.
    # Pinned by tests/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
    z_NV = F.linear(hidden_NM, weight_VM)
    z_NV = z_NV.to(torch.promote_types(z_NV.dtype, torch.float32))
    if softcap is not None:
        z_NV = softcap * torch.tanh(z_NV / softcap)
    return z_NV if temperature == 1 else z_NV / temperature


class _TokenLogprobs(torch.autograd.Function):
    """p = exp(logprob); d logprob(t)/dz = onehot(t) - p, d entropy/dz = -p (log p + entropy)."""

    @staticmethod
    def forward(ctx, hidden_NM, weight_VM, targets_N, temperature, softcap, chunk):
        ctx.save_for_backward(hidden_NM, weight_VM, targets_N)
        ctx.options = temperature, softcap, chunk
        dtype = torch.promote_types(hidden_NM.dtype, torch.float32)
        logprobs_N = torch.empty(targets_N.shape, dtype=dtype, device=hidden_NM.device)
        entropy_N = torch.empty_like(logprobs_N)
        for n in range(0, len(targets_N), chunk):
            rows = slice(n, n + chunk)
            z_NV = _scaled_logits(hidden_NM[rows], weight_VM, temperature, softcap)
            lse_N = z_NV.logsumexp(-1)
            logprobs_N[rows] = z_NV.gather(-1, targets_N[rows, None])[:, 0] - lse_N  # (7)
            entropy_N[rows] = lse_N - ((z_NV - lse_N[:, None]).exp() * z_NV).sum(-1)  # (8)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, dlogprobs_N, dentropy_N):
        hidden_NM, weight_VM, targets_N = ctx.saved_tensors
        temperature, softcap, chunk = ctx.options
        dhidden_NM = torch.empty_like(hidden_NM)
        # NUMERICS: the head's gradient is a sum over chunks, so it is summed in float32 or better.
        # Pinned by tests/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
        dweight_VM = torch.zeros_like(weight_VM, dtype=dlogprobs_N.dtype)
        for n in range(0, len(targets_N), chunk):
            rows = slice(n, n + chunk)
            z_NV = _scaled_logits(hidden_NM[rows], weight_VM, temperature, softcap)
            logp_NV = z_NV.log_softmax(-1)
            p_NV = logp_NV.exp()
            entropy_N1 = -(p_NV * logp_NV).sum(-1, keepdim=True)
            dlogprobs_N1, dentropy_N1 = dlogprobs_N[rows, None], dentropy_N[rows, None]
            dz_NV = -p_NV * (dlogprobs_N1 + dentropy_N1 * (logp_NV + entropy_N1))
            dz_NV.scatter_add_(-1, targets_N[rows, None], dlogprobs_N1)
            dz_NV = dz_NV / temperature
            if softcap is not None:
                dz_NV = dz_NV * (1 - (z_NV * temperature / softcap).square())
            dz_NV = dz_NV.to(hidden_NM.dtype)
            dhidden_NM[rows] = dz_NV @ weight_VM
            dweight_VM += dz_NV.T @ hidden_NM[rows]
        return dhidden_NM, dweight_VM.to(weight_VM.dtype), None, None, None, None


# 5. Attention callables: packed documents and the cache --------------------------------------


def packed_attention(lengths, /, *, waste=1.25):
    """Causal attention inside each of the documents that lie end to end in one row (1, S).

    lengths: the documents' lengths in order, summing to S. Documents of similar length are
    gathered into padded buckets (the longest at most `waste` times the shortest), so the
    projections and the MLP see no padding and attention sees little.

        lengths 3 2 3:   a a a b b c c c   ->   bucket (2, 3):  a a a    bucket (1, 2):  b b
                                                                c c c
    """
    lengths = [int(n) for n in lengths]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"packed_attention needs documents of at least one token, got {lengths}")
    starts = [0]
    for n in lengths[:-1]:
        starts.append(starts[-1] + n)
    order = sorted(range(len(lengths)), key=lambda d: (lengths[d], d))
    buckets = [[]]
    for d in order:
        if buckets[-1] and lengths[d] > waste * lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(d)

    # One gather index a bucket: padding repeats a document's last token, which is after every real
    # query, so that no real row sees it and its gradient is exactly zero.
    index = []
    for bucket in buckets:
        start, length = (torch.tensor([x[d] for d in bucket]) for x in (starts, lengths))
        column = torch.arange(int(length.max()))
        real = column < length[:, None]
        index.append((start[:, None] + column.minimum(length[:, None] - 1), real))
    back = torch.cat([i[real] for i, real in index]).argsort()  # bucket order -> row order
    on_device = {}

    def attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, softcap=None):
        if q_BHSD.shape[0] != 1 or q_BHSD.shape[2] != len(back):
            raise ValueError(f"packed for (1, {len(back)}) tokens, got {tuple(q_BHSD.shape)}")
        if q_BHSD.device not in on_device:
            on_device[q_BHSD.device] = (
                [(i.to(q_BHSD.device), real.to(q_BHSD.device)) for i, real in index],
                back.to(q_BHSD.device),
            )
        parts, order_S = on_device[q_BHSD.device]
        options = dict(layer=layer, scale=scale, window=window, softcap=softcap)
        out, whole = [], (q_BHSD, k_BGSD, v_BGSD)
        if len(set(lengths)) == 1:  # views instead of gathers
            rows = (x[0].unflatten(1, (-1, lengths[0])).transpose(0, 1) for x in whole)
            return causal_attention(*rows, **options).transpose(0, 1).flatten(1, 2)[None]
        for index_EL, real_EL in parts:
            rows = (x[0][:, index_EL].transpose(0, 1) for x in whole)
            out_EHLD = causal_attention(*rows, **options)
            out.append(out_EHLD.transpose(1, 2)[real_EL])
        return torch.cat(out)[order_S].transpose(0, 1)[None]

    return attention


def packed_positions(lengths, /):
    """(1, S) int64: 0..n-1 for each document, the positions that go with `packed_attention`."""
    return torch.cat([torch.arange(int(n)) for n in lengths])[None]


def packed_logprobs(model, sequences, mask_BT, /, *, temperature=1.0):
    """Log-probs and entropies of many sequences' targets in one packed forward.

    sequences: B lists of token ids; sequence b's targets are its tokens 1.., T = the longest of
    them. mask_BT (B, T) bool: which targets to score; the head is applied to those alone. Returns
    two (B, T) tensors, 0 where mask is off, differentiable.
    """
    device, lengths = mask_BT.device, [len(s) for s in sequences]
    tokens_S = torch.tensor([token for s in sequences for token in s], device=device)
    row_N, column_N = mask_BT.nonzero(as_tuple=True)
    length_B = torch.tensor(lengths, device=device)
    if (column_N >= length_B[row_N] - 1).any():
        raise ValueError(f"mask reaches beyond a sequence's targets; lengths {lengths}")
    at_N = (length_B.cumsum(0) - length_B)[row_N] + column_N  # the token that predicts the target
    positions_1S, attention = packed_positions(lengths).to(device), packed_attention(lengths)
    x_1SM = model.hidden(tokens_S[None], positions=positions_1S, attention=attention)
    scores = model.logprobs(x_1SM[0, at_N], tokens_S[at_N + 1], temperature=temperature)
    return tuple(x_N.new_zeros(mask_BT.shape).index_put((row_N, column_N), x_N) for x_N in scores)


class KVCache:
    """Keys and values of the tokens so far; row b holds `lengths_B[b]` of them, left-aligned.

        row 0   k k k k . .        lengths 4 2, room for C = 6
        row 1   k k . . . .        the next token of row 1 is written at 2, whatever row 0 does

    `cache.attention` is the callable for `Transformer.hidden`; `extend` feeds tokens and moves the
    lengths. `select(rows)` repeats, drops and reorders rows: one prompt for a whole group, a fork
    of a conversation, finished rows out.
    """

    def __init__(self, rows: int, device=None):
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest, self.even = 0, True  # of lengths_B, as Python values: no sync in every layer
        self.layers = {}  # layer -> k, v, each (B, G, C, D)

    def attention(self, q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, softcap=None):
        """Append k, v of S new tokens a row and attend: query i sees keys 0..lengths[b] + i."""
        S, past = q_BHSD.shape[2], self.longest
        k_BGCD, v_BGCD = self._write(layer, k_BGSD, v_BGSD)
        if past == 0:  # a prompt: nothing older to see, and right padding needs no mask
            return causal_attention(
                q_BHSD, k_BGSD, v_BGSD, layer=layer, scale=scale, window=window, softcap=softcap
            )
        if window is not None or softcap is not None:
            raise ValueError("KVCache has no window and no softcap")
        mask = None
        if S > 1 or not self.even:
            last_BS = self.lengths_B[:, None] + torch.arange(S, device=q_BHSD.device)
            key_C = torch.arange(past + S, device=q_BHSD.device)
            mask = (key_C <= last_BS[:, :, None])[:, None]
        return F.scaled_dot_product_attention(
            q_BHSD, k_BGCD[:, :, : past + S], v_BGCD[:, :, : past + S],
            attn_mask=mask, scale=scale, enable_gqa=True,
        )  # fmt: skip

    def _write(self, layer, k_BGSD, v_BGSD):
        B, G, S, D = k_BGSD.shape
        need = self.longest + S
        old = self.layers.get(layer)
        if old is None or old[0].shape[2] < need:  # grow by half, at least 32: no room before need
            new = k_BGSD.new_zeros(2, B, G, max(need + 32, need * 3 // 2), D)
            if old is not None:
                new[0, :, :, : self.longest] = old[0][:, :, : self.longest]
                new[1, :, :, : self.longest] = old[1][:, :, : self.longest]
            self.layers[layer] = new[0], new[1]
        k_BGCD, v_BGCD = self.layers[layer]
        if self.even:
            k_BGCD[:, :, self.longest : need], v_BGCD[:, :, self.longest : need] = k_BGSD, v_BGSD
        else:
            row_B1 = torch.arange(B, device=k_BGSD.device)[:, None]
            slot_BS = self.lengths_B[:, None] + torch.arange(S, device=k_BGSD.device)
            k_BGCD[row_B1, :, slot_BS] = k_BGSD.transpose(1, 2)
            v_BGCD[row_B1, :, slot_BS] = v_BGSD.transpose(1, 2)
        return k_BGCD, v_BGCD

    def advance(self, counts_B, /):
        """Row b now holds counts_B[b] tokens more; what was written behind them is written over."""
        self._set_lengths(self.lengths_B + counts_B)

    def select(self, rows, /):
        """Keep rows (int64 list or tensor), in that order, repeats allowed."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.lengths_B.device)
        self._set_lengths(self.lengths_B[rows])
        for layer, (k_BGCD, v_BGCD) in self.layers.items():
            self.layers[layer] = k_BGCD[rows], v_BGCD[rows]

    def _set_lengths(self, lengths_B):
        self.lengths_B = lengths_B
        if len(lengths_B):
            low, high = torch.stack([lengths_B.min(), lengths_B.max()]).tolist()
            self.longest, self.even = high, low == high


@torch.no_grad()
def extend(model, cache, tokens_BS, /, counts=None):
    """Feed tokens (B, S), right-padded, of which counts (B,) are real (default S); logits (B, V)
    after the last real token of each row. Positions go on from the cache's lengths."""
    B, S = tokens_BS.shape
    if counts is None:
        counts = torch.full((B,), S, device=tokens_BS.device)
    positions = cache.lengths_B[:, None] + torch.arange(S, device=tokens_BS.device)
    x_BSM = model.hidden(tokens_BS, positions=positions, attention=cache.attention)
    cache.advance(counts)
    last_BM = x_BSM[torch.arange(B, device=counts.device), counts - 1]
    return F.linear(last_BM, model.head_weight)


@torch.no_grad()
def prefill(model, prompts, /):
    """A cache with one row a prompt (lists of token ids, any lengths); logits (B, V) after each."""
    device, vocab_size = model.head_weight.device, model.config.vocab_size
    for prompt in prompts:
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"a prompt needs tokens, all of 0..{vocab_size - 1}, got {prompt}")
    counts = torch.tensor([len(p) for p in prompts], device=device)
    tokens_BS = nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    cache = KVCache(len(prompts), device=device)
    return cache, extend(model, cache, tokens_BS.to(device), counts)


@torch.no_grad()
def sample(logits_BV, uniform_B, /, *, temperature: float):
    """Draw a token a row: invert the cumulative distribution at uniform_B (B,), float64 in [0, 1).

    The randomness is an argument, so a draw depends on its own row only, never on which rows share
    the batch. temperature 0 takes the likeliest token. Returns tokens (B,) int64 and their
    log-probs (B,) under softmax(logits / temperature); under softmax(logits) for temperature 0.
    """
    dtype = torch.promote_types(logits_BV.dtype, torch.float32)
    logp_BV = (logits_BV.to(dtype) / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        tokens_B = logp_BV.argmax(-1)
    elif uniform_B.dtype != torch.float64:
        raise ValueError(f"uniform must be float64 (float32 rounds up to 1), got {uniform_B.dtype}")
    else:
        # NUMERICS: in float32 a cumulative sum over 150 thousand tokens is off by more than the
        # tail's probabilities; float64 is not. Tokens of probability 0 are never drawn.
        # Pinned by tests/test_models.py::test_sampling_follows_the_distribution.
        cdf_BV = logp_BV.double().exp().cumsum(-1)
        at_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
        found_B = torch.searchsorted(cdf_BV, at_B1, right=True)[:, 0]
        tokens_B = found_B.clamp(max=cdf_BV.shape[1] - 1)
    return tokens_B, logp_BV.gather(-1, tokens_B[:, None])[:, 0]


class Row:
    """A sequence under way: it takes its next queued token or, with none queued, the sampled one.

    mask says which tokens were sampled, logprobs what the sampler gave them (0 where queued); both
    have one entry per target, tokens[1:]. draws[n] in [0, 1) decides the n-th token behind the
    prompt.
    """

    def __init__(self, prompt, draws=()):
        self.tokens, self.draws, self.queue = list(prompt), draws, deque()
        self.new, self.truncated = 0, False  # tokens behind the prompt; ended by the limit
        self.mask, self.logprobs = [False] * (len(prompt) - 1), [0.0] * (len(prompt) - 1)

    def append(self, token, logprob) -> bool:
        """Take one token; True if it was the sampled one."""
        sampled = not self.queue
        self.tokens.append(token if sampled else self.queue.popleft())
        self.mask.append(sampled)
        self.logprobs.append(logprob if sampled else 0.0)
        self.new += 1
        return sampled


@torch.no_grad()
def generate(model, rows, /, *, max_new_tokens, temperature, end=(), after=None):
    """Decode rows (of one model, any prompts) until each has ended; they are returned as they end.

    A sampled token in `end` calls after(row) -> rows that go on in its place: none ends it, itself
    with tokens in its queue is the next turn of a conversation, several are a fork. A row of
    max_new_tokens tokens behind its prompt ends with truncated set. temperature 0 is greedy and
    needs no draws. Equal prompts are computed once; an ended row leaves the batch.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not rows:
        return []
    if temperature > 0 and min(len(row.draws) for row in rows) < max_new_tokens:
        raise ValueError(f"each row needs {max_new_tokens} draws, one for each new token")
    distinct = dict.fromkeys(tuple(row.tokens) for row in rows)
    distinct = {prompt: n for n, prompt in enumerate(distinct)}
    _check_positions(model.config, distinct, max_new_tokens)
    cache, logits_BV = prefill(model, list(distinct))
    batch, done = [distinct[tuple(row.tokens)] for row in rows], []
    cache.select(batch)
    logits_BV = logits_BV[batch]
    while rows:
        uniform_B = None
        if temperature > 0:
            draws = [row.draws[row.new] for row in rows]
            uniform_B = torch.tensor(draws, dtype=torch.float64, device=logits_BV.device)
        drawn = [x.tolist() for x in sample(logits_BV, uniform_B, temperature=temperature)]
        going = []  # (place in the batch, row after this token)
        for b, (row, token, logprob) in enumerate(zip(rows, *drawn)):
            ended = row.append(token, logprob) and token in end
            followers = (after(row) if after else []) if ended else [row]
            done += [] if followers else [row]
            for follower in followers:
                follower.truncated = follower.new >= max_new_tokens
                if follower.truncated:
                    done.append(follower)
                else:
                    going.append((b, follower))
        if going:
            if [b for b, _ in going] != list(range(len(rows))):
                cache.select([b for b, _ in going])
            last_B1 = torch.tensor([[row.tokens[-1]] for _, row in going], device=logits_BV.device)
            logits_BV = extend(model, cache, last_B1)
        rows = [row for _, row in going]
    return done


def _check_positions(config, prompts, max_new_tokens):
    longest = max(map(len, prompts))
    if longest + max_new_tokens > config.max_position_embeddings:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens {max_new_tokens} exceed the model's "
            f"{config.max_position_embeddings} positions; shorten one of them"
        )


# 6. Checkpoints ------------------------------------------------------------------------------


def _safetensors():
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install safetensors") from error
    return safetensors


def load_tokenizer(directory):
    """The `tokenizers` Tokenizer of a checkpoint directory."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError("text needs tokenizers: pip install tokenizers") from error
    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{directory} has no tokenizer.json")
    return Tokenizer.from_file(str(path))


def _read_json(path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"no {path}; give a Hugging Face checkpoint directory") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold an object, got a {type(value).__name__}")
    return value


def _open_shard(path):
    """A reader of one safetensors file; the library checks header, dtypes and offsets at once."""
    module = _safetensors()
    try:
        return module.safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ValueError(f"shard {path} is missing") from error
    except (module.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error


def _open_checkpoint(directory) -> dict:
    """tensor name -> (file, reader), every shard open; the index, if any, must agree with them."""
    directory = Path(directory)
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.exists() and not single.exists():
        raise ValueError(f"no model.safetensors and no index in {directory}")
    listed = _read_json(index).get("weight_map", {}) if index.exists() else {}
    paths = sorted({directory / file for file in listed.values()}) or [single]
    readers = {path: _open_shard(path) for path in paths}
    found = {name: path for path, reader in readers.items() for name in reader.keys()}
    named = {name: directory / file for name, file in listed.items()}
    wrong = sorted(n for n in named.keys() | found.keys() if named.get(n) != found.get(n))
    if listed and wrong:
        raise ValueError(f"{index} and its shards disagree about {', '.join(wrong[:4])}")
    return {name: (path, readers[path]) for name, path in found.items()}


def load_hf(directory, *, model=None, dtype=None, device=None) -> Transformer:
    """Load a Hugging Face checkpoint directory, strictly: every tensor has a place and the reverse.

    Everything is checked before anything is copied; then one tensor at a time is read. dtype and
    device: default the checkpoint's own dtype, on the CPU; or model: fill this one as it is.
    """
    config, tensors = ModelConfig.from_hf(directory), _open_checkpoint(directory)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some writers store the tied matrix twice
    if model is None:
        names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        name, (_, reader) = next(iter(tensors.items()))
        stored = reader.get_slice(name).get_dtype()
        if dtype is None and stored not in names:
            raise ValueError(f"{directory} stores dtype {stored}; pass dtype= to convert")
        with torch.device("meta"):
            model = Transformer(config)
        model.to(dtype or getattr(torch, names[stored])).to_empty(device=device or "cpu")
    elif dtype or device:
        raise ValueError("give load_hf a model to fill, or dtype and device of a new one, not both")
    config.require_same_numbers(model.config, directory)
    have = dict(model.named_parameters())
    missing, unexpected = sorted(have.keys() - tensors.keys()), sorted(tensors.keys() - have.keys())
    if missing or unexpected:
        raise ValueError(f"{directory}: missing tensors {missing}, unexpected tensors {unexpected}")
    for name, (path, reader) in tensors.items():
        shape, wanted = reader.get_slice(name).get_shape(), list(have[name].shape)
        if shape != wanted:
            raise ValueError(f"{path}: {name} has shape {shape}, config asks for {wanted}")
    with torch.no_grad():
        for name, (_, reader) in tensors.items():
            have[name].copy_(reader.get_tensor(name))
    return model


def save_hf(model, directory) -> None:
    """Write config.json and model.safetensors, in its own dtype, for transformers and load_hf."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    raw = model.config.to_hf() | {"dtype": str(model.head_weight.dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    path, metadata = directory / "model.safetensors", {"format": "pt"}
    _safetensors().torch.save_file(tensors, path, metadata=metadata)


# 7. check and inspect ------------------------------------------------------------------------


def tiny(model_type="qwen3", **changes) -> ModelConfig:
    """A small configuration with grouped heads and nothing square, for tests."""
    family = FAMILIES[model_type]
    base = dict(
        vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=10,
        num_attention_heads=4, num_key_value_heads=2, model_type=model_type, initializer_range=0.3,
        qk_norm=family["qk_norm"], qkv_bias=family["qkv_bias"] is True, o_bias=False,
    )  # fmt: skip
    return ModelConfig(**base | changes)


def _relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check() -> bool:
    """Each path against `definition` in float64; prints a table, True if every row is <= 1e-12."""
    torch.manual_seed(0)
    rows = []
    for model_type in FAMILIES:
        for tied in (False, True):
            config = tiny(model_type, tie_word_embeddings=tied)
            model = Transformer(config).double().init_weights(1)
            for p in model.parameters():
                p.data += 0.1 * torch.randn_like(p)  # biases and norms away from 0 and 1
            name = f"{model_type}{' tied' if tied else ''}"
            rows += [(f"{name}: {path}", error) for path, error in _errors(model)]
    print(f"{'path against the definition, float64':55} relative error")
    for name, error in rows:
        print(f"{name:55} {error:.1e}  {'ok' if error <= 1e-12 else 'FAILED'}")
    ok = all(error <= 1e-12 for _, error in rows)
    print(json.dumps({"check": "models", "ok": ok, "max_error": max(e for _, e in rows)}))
    return ok


@torch.no_grad()
def _errors(model):
    documents = [torch.randint(model.config.vocab_size, (n,)) for n in (7, 1, 6, 12)]
    lengths = [len(d) for d in documents]
    truth = torch.cat([definition(model, d) for d in documents])
    yield "one at a time", _relative(torch.cat([model(d[None])[0] for d in documents]), truth)
    tokens_1S = torch.cat(documents)[None]
    packed = dict(positions=packed_positions(lengths), attention=packed_attention(lengths))
    yield "packed", _relative(model(tokens_1S, **packed)[0], truth)
    yield "cache, ragged rows", _relative(torch.cat(_by_cache(model, documents)), truth)
    logp = (truth / 0.7).log_softmax(-1)
    targets = torch.randint(model.config.vocab_size, (len(truth),))
    hidden = model.hidden(tokens_1S, **packed)[0]
    got = token_logprobs(hidden, model.head_weight, targets, temperature=0.7, chunk=5)
    yield "log-probs in chunks", _relative(got[0], logp.gather(-1, targets[:, None])[:, 0])
    yield "entropy in chunks", _relative(got[1], -(logp.exp() * logp).sum(-1))
    yield "gradient in chunks", _chunked_gradient(hidden, model.head_weight.detach(), targets)


@torch.enable_grad()
def _chunked_gradient(hidden_NM, weight_VM, targets_N):
    """The gradient of log-probs and entropies against autograd of the plain log_softmax."""
    upstream = torch.randn(2, len(targets_N), dtype=torch.float64)
    grads = []
    for chunked in (True, False):
        h_NM, w_VM = hidden_NM.clone().requires_grad_(), weight_VM.clone().requires_grad_()
        if chunked:
            out = token_logprobs(h_NM, w_VM, targets_N, temperature=0.7, chunk=5)
        else:
            logp_NV = (h_NM @ w_VM.T / 0.7).log_softmax(-1)
            out = logp_NV.gather(-1, targets_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)
        (torch.stack(out) * upstream).sum().backward()
        grads.append(torch.cat([h_NM.grad.flatten(), w_VM.grad.flatten()]))
    return _relative(*grads)


def _by_cache(model, documents):
    """Logits of each document, its first half as a ragged prompt batch, then token by token."""
    half = [(len(d) + 1) // 2 for d in documents]
    out = [[model(d[None, :h])[0, :-1]] for d, h in zip(documents, half)]
    prompts = nn.utils.rnn.pad_sequence([d[:h] for d, h in zip(documents, half)], batch_first=True)
    cache, rows = KVCache(len(documents)), list(range(len(documents)))
    logits = extend(model, cache, prompts, counts=torch.tensor(half))
    for step in range(max(map(len, documents))):
        for b, row in enumerate(rows):
            out[row].append(logits[b : b + 1])
        keep = [b for b, row in enumerate(rows) if half[row] + step < len(documents[row])]
        if not keep:
            break
        cache.select(keep)
        rows = [rows[b] for b in keep]
        tokens = torch.stack([documents[row][half[row] + step] for row in rows])
        logits = extend(model, cache, tokens[:, None])
    return [torch.cat(parts) for parts in out]


def inspect(directory):
    config = ModelConfig.from_hf(directory)
    with torch.device("meta"):
        model = Transformer(config)
    print(json.dumps(dataclasses.asdict(config), indent=2))
    tensors = _open_checkpoint(directory)
    for name, (path, reader) in sorted(tensors.items()):
        part = reader.get_slice(name)
        print(f"{name:60} {part.get_dtype():5} {part.get_shape()}  {path.name}")
    count = sum(math.prod(p.shape) for p in model.parameters())
    known = {name for name, _ in model.named_parameters()}
    print(f"{count / 1e6:.2f} M parameters; missing {sorted(known - tensors.keys())}, "
          f"not loaded {sorted(tensors.keys() - known)}")  # fmt: skip


# 8. main -------------------------------------------------------------------------------------


def main(argv) -> int:
    if argv == ["check"]:
        return 0 if check() else 1
    if len(argv) == 2 and argv[0] == "inspect":
        return inspect(argv[1]) or 0
    print("usage: python models.py check | inspect DIR", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Qwen2, Qwen3, Qwen3-MoE and Gemma 3 with Hugging Face's checkpoints, and an action expert.

One Transformer; the families differ in a row of a table. The model knows nothing of masks, rings,
trees or caches: every layer calls one function, `attention(q, k, v, layer=, scale=, window=)`, that
the caller made. Packed documents and the KV cache below are two such functions, `ring_attention`
and `tree_attention` close over two more. What a model computes can so be read in 150 lines.

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
                   p = softmax(R h), g_e = p_e, or p_e / (sum of the K p's) if `norm_topk_prob`
    (7)  z_i     = head norm(x^L_i)                gemma: c tanh(z / c), c the final softcap, if any
    (8)  logprob_i(t) = z_it / T - log sum_u exp(z_iu / T)               T the temperature
    (9)  entropy_i    = - sum_u exp(logprob_i(u)) logprob_i(u)
    (10) balance = coef sum_s E / (K T_s^2) sum_e n_se sum_(i in s) p_ie sequences s of T_s tokens,
                   n_se of whose T_s K choices fell on e (a constant for the gradient)
    (11) b_e     = rate * (steps in which e had less than the mean load - steps it had more)
    (12) flow    = mean |v(x_tau, tau) - (a - eps)|^2,  x_tau = tau a + (1 - tau) eps
                   a the actions, eps noise, v what the expert gives
    (13) x_(tau + 1/n) = x_tau + v(x_tau, tau) / n,  from x_0 = eps to x_1, the actions

`definition` below computes (1)-(7) with Python loops; `check` compares everything with it. With
this file alone it prints what it skips; the other commands need tests/measure_models.py.

The families:

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

(a) query_pre_attn_scalar^-1/2. (b) `layer_types`, else with `use_sliding_window` the layers from
`max_window_layers` on. (c) all but each `sliding_window_pattern`-th. RoPE types: default, linear,
dynamic, yarn, llama3. Gemma's `attn_logit_softcapping` is read by nobody, transformers included. A
multimodal Gemma 3 checkpoint gives its text model. What else would change the numbers is refused.

To add a family, write a row of FAMILIES and a reader, nothing else: the row has the architecture's
name, the `ModelConfig` fields that no config changes, and transformers' defaults of absent fields;
the reader takes a config, defaults filled in, and gives the fields that need a rule. `read_layers`
and `read_rope` know both spellings. If a difference is none of ModelConfig's fields, it is a field
more, an equation more above, and a line in `definition`. The test
`test_a_new_family_is_a_row_and_a_reader` adds one; saving needs nothing: `to_hf` writes what the
reader reads back, or refuses.

Letters:

    B batch rows    S tokens in a row     M model width (hidden_size)   V vocabulary
    H query heads   G key/value heads     D head_dim                    L padded document length
    N tokens (any subset of B x S)        C tokens that a cache has room for
    E experts       K experts a token     I width of an expert          P prefix tokens
    T suffix tokens A action dimensions   U documents in a bucket       R the H + G heads with RoPE
    J (sequence, token) pairs of `Balance`; in KVCache P prompts of at most J tokens

Small: a moving part, such as the n tokens of a chunk, or this rank's share: v rows of the V.

Cost per token, with W the parameters that a token meets outside the embedding (K of E experts):
2 W flops forward, 4 W backward, and attention's 4 S H D forward per layer (half is masked out). The
cache holds 2 G D numbers per token and layer, of `window` tokens in a sliding layer. Log-probs
never hold a whole (N, V) tensor: chunks, whose logits the backward computes again (2 M V flops a
token) where more than 2^22 of them would have to be held.

A checkpoint comes from somebody else. Its JSON, its config's fields, its tensors' names, shapes,
dtypes and values, and the file names in its index are all held to what they should be before they
are used, and refused by name: a ValueError of one line. So are token ids outside the vocabulary.

Deviates: dynamic RoPE depends on the longest position of this call, not of earlier ones; under it,
packed is not separate, and a cache keeps the angles that its tokens were written with. (12) has
pi0's path from noise at 0 to action at 1, and the sign that integrates it forward. b of (11) lives
in the state dict, but in no Hugging Face checkpoint: `save_hf` refuses it unless it is zero.

Not here: dropout (no released model has any), quantised weights, the vision tower, shared experts.

References: Qwen2 arXiv:2407.10671; Qwen3 arXiv:2505.09388; Gemma 3 arXiv:2503.19786; RoPE
arXiv:2104.09864 (half-split form); YaRN arXiv:2309.00071; Llama 3 arXiv:2407.21783; RMSNorm
arXiv:1910.07467; GQA arXiv:2305.13245; (10), (11) DeepSeek-V3 arXiv:2412.19437 eq. 16-20 and
arXiv:2408.15664; (12), (13) pi0 arXiv:2410.24164; stopped gradient arXiv:2505.23705; min-p
arXiv:2407.01082.
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

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip
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
    no reader has to ask what it was given. The range goes by the last part of a dotted name.
    """
    if not _is_of_kind(value, kind):
        raise ValueError(f"{name} must be {_in_words(kind)}, got {reprlib.repr(value)}")
    low, high = RANGES.get(name.rpartition(".")[2], (-math.inf, math.inf))
    for number in value if isinstance(value, list | tuple) else [value]:
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


@dataclass
class ModelConfig:
    """The shape of a `Transformer`. Field names are Hugging Face's wherever it has one.

    layer_types, one per layer, default all "full_attention". rope_parameters: layer type ->
    {"rope_type", "rope_theta", ...}. sparse_layers: the indices of the layers with experts.
    router_bias_rate: the rate of (11); 0, the default: no such bias. value_head: see
    `Transformer.values`.
    """

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
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    rope_parameters: dict = field(default_factory=dict)
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    hidden_act: str = "silu"
    norm_offset: bool = False  # (4) with 1 + w
    sandwich_norms: bool = False  # the norms marked ' in (2) and (3)
    scale_embedding: bool = False
    query_pre_attn_scalar: float | None = None  # None: head_dim
    final_logit_softcapping: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: tuple[int, ...] = ()
    router_bias_rate: float = 0.0
    value_head: bool = False

    def __post_init__(self):
        # Types and ranges first: all that follows may rely on them.
        for f in dataclasses.fields(self):
            require_field(f.name, getattr(self, f.name), f.type)
        for kind, rope in self.rope_parameters.items():
            require_field(f"rope_parameters.{kind}", rope, dict)
        self.layer_types = tuple(self.layer_types) or (FULL,) * self.num_hidden_layers
        kinds = set(self.layer_types)
        if kinds - {FULL, SLIDING} or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types must be {self.num_hidden_layers} of {FULL}, {SLIDING}; "
                             f"got {reprlib.repr(list(self.layer_types))}")  # fmt: skip
        given, default = self.rope_parameters, {"rope_type": "default", "rope_theta": 10000.0}
        if set(given) - {FULL, SLIDING}:
            raise ValueError(f"rope_parameters go by layer type, got {given}")
        self.rope_parameters = {kind: default | given.get(kind, {}) for kind in sorted(kinds)}
        for wrong, complaint in self._mistakes():
            if wrong:
                raise ValueError(complaint)
        for rope in self.rope_parameters.values():
            _check_rope(rope, self.max_position_embeddings, self.head_dim)

    def _mistakes(self):
        """(whether it is made, what to say), so ordered that later questions can be asked."""
        if self.sparse_layers:
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
                found = getattr(self, name)
                yield found < 1, f"{name} must be at least 1 in sparse layers, got {found}"
        H, G, kinds = self.num_attention_heads, self.num_key_value_heads, self.layer_types
        yield H % G, f"num_attention_heads {H} must divide by num_key_value_heads {G}"
        yield H * self.head_dim > WIDEST, (
            f"num_attention_heads {H} times head_dim {self.head_dim} exceeds {WIDEST}")
        yield self.head_dim % 2, f"head_dim must be even for half-split RoPE, got {self.head_dim}"
        yield self.num_experts_per_tok > self.num_experts, (
            f"num_experts_per_tok {self.num_experts_per_tok} exceeds {self.num_experts} experts")
        yield SLIDING in kinds and not (self.sliding_window or 0) > 0, (
            f"sliding layers need a sliding_window, got {self.sliding_window}")
        yield self.hidden_act not in ACTIVATIONS, (
            f"hidden_act (or hidden_activation) {self.hidden_act!r} is none of {[*ACTIVATIONS]}")
        yield any(not 0 <= n < self.num_hidden_layers for n in self.sparse_layers), (
            f"sparse_layers {self.sparse_layers} are not layers of this model")

    @classmethod
    def from_hf(cls, raw, /) -> "ModelConfig":
        """Read a Hugging Face config: a directory, a config.json, or the dict itself.

        Both spellings are read (transformers 4 and 5), absent fields have transformers' defaults.
        Anything that would change the numbers and is not implemented is a ValueError that names it.
        """
        if isinstance(raw, dict):
            return cls._from_dict(raw)
        path = Path(raw)
        if path.is_dir():
            path = path / "config.json"
        raw = read_json(path, what="the config of a Hugging Face checkpoint directory")
        try:
            return cls._from_dict(raw)
        except ValueError as error:  # whatever is wrong with the fields, say in which file
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _from_dict(cls, raw):
        raw = _text_config(raw)
        if raw["model_type"] not in FAMILIES:
            raise ValueError(f"model_type {raw['model_type']!r} is not implemented; "
                             f"implemented: {', '.join(FAMILIES)}")  # fmt: skip
        family = FAMILIES[raw["model_type"]]
        raw = COMMON | family.defaults | raw
        for name in raw.keys() & RAW_FIELDS.keys():
            require_field(name, raw[name], RAW_FIELDS[name])
        _refuse_unimplemented(raw)

        fields = {name: raw[name] for name in COMMON}
        if fields["num_key_value_heads"] is None:
            fields["num_key_value_heads"] = fields["num_attention_heads"]
        eos = raw.get("eos_token_id")
        eos = eos if isinstance(eos, list | tuple) else [eos]
        fields["eos_token_id"] = tuple(token for token in eos if token is not None)
        fields["value_head"] = raw.get("value_head", False)
        return cls(model_type=raw["model_type"], **fields | family.read(raw) | family.fixed)

    def require_same_numbers(self, other, where) -> None:
        """ValueError if a model of the other configuration would compute something else."""
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name not in ("initializer_range", "eos_token_id") and mine != theirs:
                raise ValueError(f"{where} has {f.name} {mine}, the model {theirs}")

    def to_hf(self) -> dict:
        """The config.json that transformers 4 and 5 and `from_hf` read back to this model."""
        family = FAMILIES[self.model_type]
        raw = {name: getattr(self, name) for name in COMMON} | {
            "architectures": [family.architecture], "model_type": self.model_type,
            "head_dim": self.head_dim, "attention_bias": self.o_bias, "attention_dropout": 0.0,
            "layer_types": list(self.layer_types),
            "use_sliding_window": SLIDING in self.layer_types,
            "eos_token_id": list(self.eos_token_id) or None, family.act_key: self.hidden_act,
        }  # fmt: skip
        optional = [*(MOE if self.num_experts else ()), "sliding_window", "query_pre_attn_scalar",
                    "final_logit_softcapping", "value_head"]  # fmt: skip
        raw |= {name: getattr(self, name) for name in optional if getattr(self, name)}
        if self.num_experts:
            dense = sorted(set(range(self.num_hidden_layers)) - set(self.sparse_layers))
            raw |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        raw |= _write_rope(self.rope_parameters, family)
        back, self_hf = ModelConfig.from_hf(raw), dataclasses.replace(self, router_bias_rate=0.0)
        back.require_same_numbers(self_hf, f"a {self.model_type} config cannot say this: it")
        return raw


def _text_config(raw) -> dict:
    """The text model's part of a config: all of it, or of a multimodal one the inner object."""
    inner = raw.get("text_config")
    require_field("text_config", inner, dict | None)
    if inner is not None:  # what it lacks may stand outside
        outside = {k: raw[k] for k in ("eos_token_id", "tie_word_embeddings") if k in raw}
        raw = {"model_type": f"{raw.get('model_type')}_text"} | outside | inner
    require_field("model_type", raw.get("model_type"), str)
    return raw


def _check_rope(rope, max_position_embeddings, head_dim):
    """Fill in what transformers takes for granted; ValueError for what (5) does not cover."""
    for name in rope.keys() & ROPE_KEYS.keys():
        require_field(f"rope_parameters.{name}", rope[name], ROPE_KEYS[name])
    kind = rope["rope_type"]
    if kind not in ROPE_NEEDS:
        raise ValueError(f"rope_type {kind!r} is not implemented; there are {list(ROPE_NEEDS)}")
    if kind in ("yarn", "llama3") and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = max_position_embeddings
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


def _refuse_unimplemented(raw):
    """Raise for each field that changes the numbers and that this file does not implement."""
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
    scaling, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    by_type = [key for key, value in (new | scaling).items() if isinstance(value, dict)]
    if by_type and sliding_theta is None:
        raise ValueError(f"rope_parameters.{by_type[0]} is an object: RoPE per layer type in "
                         f"{raw['model_type']}: transformers has none")  # fmt: skip
    out = {}
    for kind in sorted(set(kinds)):
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
    dense, step = raw["mlp_only_layers"] or (), raw["decoder_sparse_step"]
    layers = range(raw["num_hidden_layers"] if fields["num_experts"] else 0)
    sparse = tuple(n for n in layers if n not in dense and (n + 1) % step == 0)
    return fields | {"sparse_layers": sparse}


def read_gemma(raw, /) -> dict:
    """Gemma 3's text model."""
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    layers = read_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    return {
        "head_dim": raw["head_dim"], "qkv_bias": raw["attention_bias"],
        "o_bias": raw["attention_bias"], "hidden_act": raw["hidden_activation"],
        "query_pre_attn_scalar": raw["query_pre_attn_scalar"],
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
        "rope_parameters": read_rope(raw, layers["layer_types"], 10000.0),
    } | layers  # fmt: skip


class Family(NamedTuple):
    """A row of the table above: what transformers fixes for one model_type."""

    architecture: str
    read: Callable  # raw config, defaults filled in -> ModelConfig fields that need a rule
    fixed: dict  # ModelConfig fields that no config changes
    defaults: dict  # config fields that transformers fills in
    act_key: str = "hidden_act"
    rope_per_type: bool = False


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


# 2. The definition ---------------------------------------------------------------------------

ROOT = (8 / math.pi) ** 0.5
DEFINED_ACTIVATIONS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_pytorch_tanh": lambda x: x / (1 + (-(ROOT * (x + 0.044715 * x**3))).exp()),
}


def defined_frequencies(rope, D, length, longest):
    """f_n of (5) as floats, and the factor on cos and sin: RoPE types that stretch by none or by
    one factor. tests/measure_models.py defines the others."""
    factor = {"default": 1, "linear": rope.get("factor")}[rope["rope_type"]]
    return [rope["rope_theta"] ** (-2 * n / D) / factor for n in range(D // 2)], 1


def definition(model, tokens, /, frequencies=defined_frequencies):
    """Logits (S, V) of one document (S,), equations (1)-(7) token by token. Slow, float64."""
    c, D, layers = model.config, model.config.head_dim, "model.layers."
    w = {name: p.double() for name, p in model.named_parameters()}
    bias = {name[:-5]: c.router_bias_rate * b for name, b in model.named_buffers()}
    act, scale = DEFINED_ACTIVATIONS[c.hidden_act], (c.query_pre_attn_scalar or D) ** -0.5

    def norm(x, name):  # (4)
        weight = w[name + ".weight"] + (1 if c.norm_offset else 0)
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()

    def heads(x, name, p=None):  # project, split in heads (H, D), normalise, rotate to position p
        y = (w[name + "_proj.weight"] @ x + w.get(name + "_proj.bias", 0)).view(-1, D)
        y = norm(y, name + "_norm") if name + "_norm.weight" in w else y
        if p is None:
            return y
        rope = c.rope_parameters[c.layer_types[int(name.split(".")[2])]]
        f, grow = frequencies(rope, D, len(tokens), c.max_position_embeddings)
        a, b = y.chunk(2, -1)  # (5)
        angle = p * torch.tensor(f, dtype=torch.float64)
        cos, sin = grow * angle.cos(), grow * angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def swiglu(h, gate, up, down):  # (3)
        return down @ (act(gate @ h) * (up @ h))

    def ffn(h, n):
        name, parts = f"{layers}{n}.mlp.", ("gate_proj", "up_proj", "down_proj")
        if n not in c.sparse_layers:
            return swiglu(h, *(w[f"{name}{part}.weight"] for part in parts))
        p = (w[name + "gate.weight"] @ h).softmax(0)  # (6)
        order = (-p - bias.get(name, 0)).argsort()[: c.num_experts_per_tok]
        total = p[order].sum() if c.norm_topk_prob else 1
        each = (swiglu(h, *(w[f"{name}experts.{part}"][e] for part in parts)) for e in order)
        return sum(p[e] / total * out for e, out in zip(order, each))

    embed = w["model.embed_tokens.weight"]
    grow = c.hidden_size**0.5 if c.scale_embedding else 1
    xs = [grow * embed[t] for t in tokens.tolist()]  # (1)
    for n, kind in enumerate(c.layer_types):
        at, pre = f"{layers}{n}.self_attn.", f"{layers}{n}."
        hs = [norm(x, pre + "input_layernorm") for x in xs]
        q, k = ([heads(h, at + s, p) for p, h in enumerate(hs)] for s in "qk")
        v = [heads(h, at + "v") for h in hs]
        for i, x in enumerate(xs):
            first, out = max(0, i - c.sliding_window + 1) if kind == SLIDING else 0, []
            for head in range(c.num_attention_heads):
                g = head * c.num_key_value_heads // c.num_attention_heads
                score = torch.stack([q[i][head] @ k[j][g] * scale for j in range(first, i + 1)])
                out.append(sum(p * v[first + j][g] for j, p in enumerate(score.softmax(0))))
            y = w[at + "o_proj.weight"] @ torch.cat(out) + w.get(at + "o_proj.bias", 0)  # (2)
            if c.sandwich_norms:
                y = x + norm(y, pre + "post_attention_layernorm")
                h = ffn(norm(y, pre + "pre_feedforward_layernorm"), n)
                xs[i] = y + norm(h, pre + "post_feedforward_layernorm")
            else:  # later i never read xs[i] again: q, k, v of all tokens were made before
                xs[i] = x + y + ffn(norm(x + y, pre + "post_attention_layernorm"), n)
    z = torch.stack([w.get("lm_head.weight", embed) @ norm(x, "model.norm") for x in xs])  # (7)
    cap = c.final_logit_softcapping
    return cap * torch.tanh(z / cap) if cap else z


# 3. The model --------------------------------------------------------------------------------

class RMSNorm(nn.Module):
    """(4). (..., M) -> (..., M)."""

    def __init__(self, width, config):
        super().__init__()
        self.eps, self.offset = config.rms_norm_eps, config.norm_offset
        self.weight = nn.Parameter(torch.full((width,), 0.0 if self.offset else 1.0))

    def forward(self, x, /):
        # NUMERICS: torch's kernel accumulates the mean square of bf16/fp16 input in float32 and of
        # float64 in float64, and casts once, after w (transformers casts before w too). Pinned by
        # tests/test_models.py::test_rms_norm_accumulates_in_float32.
        if not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # NUMERICS: in bf16 1 + w drops every w below 2^-8; Gemma adds and multiplies in float32 and
        # casts last. Pinned by tests/test_models.py::test_gemma_norm_keeps_small_weights.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)


def _yarn_attention_factor(rope):
    """YaRN's factor on cos and sin, so that attention is as sharp as before the stretching."""

    def grown(weight):
        return 0.1 * weight * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1)


def rope_frequencies(rope, head_dim, /, *, length, longest):
    """f of (5), (D/2,) float64, and the factor on cos and sin.

    rope: {"rope_type", "rope_theta", ...}. length: of the longest row of this call, which only
    dynamic RoPE asks for; longest: max_position_embeddings.
    """
    n = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor")
    if kind == "dynamic":
        stretch = factor * max(length, longest) / longest - (factor - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    f = theta**-n
    if kind == "linear":
        return f / factor, 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * f / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return torch.lerp(f / factor, f, keep), 1.0
    if kind == "yarn":
        length = rope["original_max_position_embeddings"] / (2 * math.pi)
        betas = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        low, high = (head_dim * math.log(length / b) / (2 * math.log(theta)) for b in betas)
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2).double() - low) / ((high - low) or 0.001)
        return torch.lerp(f, f / factor, ramp.clamp(0, 1)), _yarn_attention_factor(rope)
    return f, 1.0


def rope_angles(positions_BS, frequencies, factor=1.0, /, *, dtype):
    """cos and sin of (5) for `rotate`, each (B, S, 1, D), in float32 or better."""
    # NUMERICS: the angles of position 10^5 need float32; a bf16 position is wrong from 257 on.
    # Pinned by tests/test_models.py::test_bf16_model_keeps_float32_rope_angles.
    dtype = torch.promote_types(dtype, torch.float32)
    angle_BS1D = positions_BS.to(dtype)[:, :, None, None] * frequencies.to(dtype)
    cos_BS1D, sin_BS1D = angle_BS1D.cos(), angle_BS1D.sin()
    if factor != 1:
        cos_BS1D, sin_BS1D = cos_BS1D * factor, sin_BS1D * factor
    return torch.cat([cos_BS1D, cos_BS1D], -1), torch.cat([-sin_BS1D, sin_BS1D], -1)


def rotate(x_BSRD, cos_BS1D, sin_BS1D, /):
    """(5), half-split form; (B, S, R, D) -> the same. sin has its sign: minus in the first half."""
    a_BSRd, b_BSRd = x_BSRD.chunk(2, -1)
    out_BSRD = torch.addcmul(x_BSRD * cos_BS1D, torch.cat([b_BSRd, a_BSRd], -1), sin_BS1D)
    return out_BSRD.to(x_BSRD.dtype)


def causal_attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, softcap=None):
    """The default attention: token i of each row sees tokens 0..i, or the last `window` of them.

    Right padding needs no mask. With a window, blocks of queries against the keys that they can
    see: O(S window) work and memory.
    """
    if softcap is not None:
        raise ValueError("causal_attention has no softcap; pass ring_attention.attend or the like")
    S, options = q_BHSD.shape[2], dict(scale=scale, enable_gqa=True)
    if window is None or window >= S:
        return F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, **options)
    out, block = [], max(window, 128)
    for start in range(0, S, block):
        first, stop = max(0, start - window + 1), min(S, start + block)
        i, j = (torch.arange(at, stop, device=q_BHSD.device) for at in (start, first))
        mask = (j <= i[:, None]) & (i[:, None] - j < window)
        qkv = q_BHSD[:, :, start:stop], k_BGSD[:, :, first:stop], v_BGSD[:, :, first:stop]
        out.append(F.scaled_dot_product_attention(*qkv, attn_mask=mask, **options))
    return torch.cat(out, 2)


class Attention(nn.Module):
    """(2) without its residual. The heads that exist are read off the weights, not the config."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim, self.kind = layer, config.head_dim, config.layer_types[layer]
        self.scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        self.window = config.sliding_window if self.kind == SLIDING else None
        M, D = config.hidden_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(M, H * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(M, G * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(M, G * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * D, M, bias=config.o_bias)
        self.q_norm = RMSNorm(D, config) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config) if config.qk_norm else nn.Identity()

    def forward(self, x_BSM, ropes, attention, /):
        def heads(x_BSM):
            return x_BSM.unflatten(-1, (-1, self.head_dim))

        q_BSHD = self.q_norm(heads(self.q_proj(x_BSM)))
        k_BSGD = self.k_norm(heads(self.k_proj(x_BSM)))
        H, G = q_BSHD.shape[2], k_BSGD.shape[2]
        qk_BSRD = rotate(torch.cat([q_BSHD, k_BSGD], 2), *ropes[self.kind])  # one call for both
        q_BHSD, k_BGSD = qk_BSRD.transpose(1, 2).split([H, G], 1)
        v_BGSD = heads(self.v_proj(x_BSM)).transpose(1, 2)
        options = dict(layer=self.layer, scale=self.scale, window=self.window)
        out_BHSD = attention(q_BHSD, k_BGSD, v_BGSD, **options)
        return self.o_proj(out_BHSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """ffn of (3)."""

    def __init__(self, config):
        super().__init__()
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSM, balance=None, /):
        return self.down_proj(self.act(self.gate_proj(x_BSM)) * self.up_proj(x_BSM))


class Layer(nn.Module):
    """(2) and (3): a residual block, normalised before its parts and, in Gemma, after them too."""

    def __init__(self, config, layer):
        super().__init__()
        self.self_attn, self.sandwich = Attention(config, layer), config.sandwich_norms
        self.mlp = SparseMLP(config, layer) if layer in config.sparse_layers else MLP(config)
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in names:
            self.add_module(name, RMSNorm(config.hidden_size, config))

    def forward(self, x_BSM, ropes, attention, balance=None, /):
        h_BSM = self.self_attn(self.input_layernorm(x_BSM), ropes, attention)
        if not self.sandwich:
            x_BSM = x_BSM + h_BSM
            return x_BSM + self.mlp(self.post_attention_layernorm(x_BSM), balance)
        x_BSM = x_BSM + self.post_attention_layernorm(h_BSM)
        h_BSM = self.mlp(self.pre_feedforward_layernorm(x_BSM), balance)
        return x_BSM + self.post_feedforward_layernorm(h_BSM)


class Decoder(nn.Module):
    """Everything below the head. A module of its own so that parameter names are Hugging Face's."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config)


class Rope:
    """positions (B, S) -> {layer type: (cos, sin)} for `rotate`; computes frequencies once."""

    def __init__(self, config):
        self.config, self.known = config, {}

    def __call__(self, positions_BS, dtype, /):
        out = {}
        for kind, rope in self.config.rope_parameters.items():
            moving = rope["rope_type"] == "dynamic"
            key = kind, positions_BS.device
            if moving or key not in self.known:
                length = int(positions_BS.max()) + 1 if moving and positions_BS.numel() else 0
                options = dict(length=length, longest=self.config.max_position_embeddings)
                f, factor = rope_frequencies(rope, self.config.head_dim, **options)
                self.known[key] = f.to(positions_BS.device), factor
            out[kind] = rope_angles(positions_BS, *self.known[key], dtype=dtype)
        return out


class Seeded(nn.Module):
    """A module whose weights a seed decides."""

    @torch.no_grad()
    def init_weights(self, seed: int):
        """Normal(0, initializer_range) matrices, unit norms, zero biases; equal in every dtype.

        A value head starts at zero, so that the first values are 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(0 if self.config.norm_offset else 1)
            elif name.endswith("bias") or name == "score.weight":
                parameter.zero_()
            else:  # drawn in float32 on the CPU, so that dtype and device do not change the draw
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.copy_(draw * self.config.initializer_range)
        for buffer in self.buffers():
            buffer.zero_()
        return self


def require_tokens_in_vocabulary(tokens, vocab_size, /, *, what="token") -> None:
    """Refuse token ids that are not in 0..vocab_size - 1.

    On the CPU a ValueError that names the first one and its place. On a GPU an assertion of the
    device, which ends the process at some later call: to look at the ids here, the CPU would have
    to wait for the GPU in each forward.
    """
    if not tokens.numel():
        return
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        inside = (tokens >= 0) & (tokens < vocab_size)
        torch._assert_async(inside.all(), f"a {what} id is outside of 0..{vocab_size - 1}")
        return
    low, high = torch.aminmax(tokens)
    if low >= 0 and high < vocab_size:
        return
    place = ((tokens < 0) | (tokens >= vocab_size)).nonzero()[0].tolist()
    names = ("row", "column") if len(place) == 2 else ("place", "dimension 1", "dimension 2")
    where = ", ".join(f"{name} {n}" for name, n in zip(names, place))
    raise ValueError(f"{what} id {tokens[tuple(place)].item()} at {where} is not in the vocabulary "
                     f"of {vocab_size}: ids are 0..{vocab_size - 1}")  # fmt: skip


class Transformer(Seeded):
    """A causal language model.

    `forward(tokens)` gives logits (B, S, V); `.hidden(tokens)` stops before the head, (B, S, M);
    `.logprobs(hidden, targets)` applies the head to the positions that are scored, in chunks.
    Tied embeddings are one parameter, `model.embed_tokens.weight`; there is then no `lm_head`.
    With config.value_head, `score` (1, M) is a critic's head, see `values`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.rope = config, Rope(config)
        self.attention = causal_attention  # what layers call unless `hidden` is given another
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.value_head:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)

    @property
    def head_weight(self):
        """The (V, M) matrix of (7)."""
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def add_value_head(self) -> "Transformer":
        """Give a model that has none a value head of zeros: a critic starts from a policy."""
        if not self.config.value_head:
            self.config = dataclasses.replace(self.config, value_head=True)
            weight = self.head_weight
            self.score = nn.Linear(weight.shape[1], 1, False, weight.device, weight.dtype)
            nn.init.zeros_(self.score.weight)
        return self

    def hidden(self, tokens_BS, /, *, positions=None, attention=None, balance=None):
        """Final normalised states (B, S, M) of int64 tokens (B, S), or of embeddings (B, S, M).

        positions: (B, S) int64, for RoPE only; default 0..S-1. attention: the callable that each
        layer calls as attention(q, k, v, layer=, scale=, window=), with q (B, H, S, D), k and v
        (B, G, S, D), returning (B, H, S, D); default `self.attention`. balance: what sparse
        layers tell of their routing to, see `Balance`. Embeddings are taken as they are: Gemma's
        sqrt(M) is not applied to them.
        """
        given = tokens_BS.is_floating_point()
        if tokens_BS.dim() != 2 + given:
            found = tuple(tokens_BS.shape)
            raise ValueError(f"tokens must be (B, S), or embeddings (B, S, M); got {found}")
        x_BSM = tokens_BS if given else self.embed(tokens_BS)
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=x_BSM.device)[None]
        ropes = self.rope(positions, x_BSM.dtype)
        for layer in self.model.layers:
            x_BSM = layer(x_BSM, ropes, attention or self.attention, balance)
        return self.model.norm(x_BSM)

    def embed(self, tokens_BS, /):
        """(1)."""
        # Here and not in embed_tokens, which tensor parallelism replaces: there a token that no
        # rank has would be a zero in silence.
        self.require_tokens(tokens_BS)
        x_BSM = self.model.embed_tokens(tokens_BS)
        if not self.config.scale_embedding:
            return x_BSM
        # NUMERICS: the checkpoint was trained with sqrt(M) rounded to the weight's dtype: in bf16
        # sqrt(3072) is 55.5. Pinned by tests/test_models.py::test_gemma_scales_by_a_rounded_root.
        return x_BSM * torch.tensor(self.config.hidden_size**0.5, dtype=x_BSM.dtype).item()

    def require_tokens(self, tokens, /) -> None:
        """See `require_tokens_in_vocabulary`: for whoever hands tokens to one stage of many."""
        require_tokens_in_vocabulary(tokens, self.config.vocab_size)

    def logits(self, hidden, /):
        """(7): (..., M) -> (..., V), in the model's dtype."""
        z = F.linear(hidden, self.head_weight)
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(z / cap) if cap else z

    def forward(self, tokens_BS, /, *, positions=None, attention=None, balance=None):
        """Logits (B, S, V), (7), in the model's dtype. Training wants `.logprobs` instead."""
        options = dict(positions=positions, attention=attention, balance=balance)
        return self.logits(self.hidden(tokens_BS, **options))

    def logprobs(self, hidden, targets, /, *, temperature: float = 1.0):
        """(8) and (9) of targets (N,) given hidden (N, M): two (N,) tensors, float32 or better."""
        weight_vM, options = self.head_rows()
        options |= dict(temperature=temperature, softcap=self.config.final_logit_softcapping)
        options |= dict(vocab_size=self.config.vocab_size)
        return token_logprobs(hidden, weight_vM, targets, **options)

    def head_rows(self):
        """The rows of `head_weight` that are here, and how `token_logprobs` finds the others."""
        return self.head_weight, {}

    def values(self, hidden, /):
        """A critic's value of each state, (..., M) -> (...), float32 or better."""
        if not self.config.value_head:
            raise ValueError("this model has no value head; call add_value_head() first")
        value = self.score(hidden)[..., 0]
        return value.to(torch.promote_types(value.dtype, torch.float32))


# 4. Mixture of experts -----------------------------------------------------------------------

def grouped_linear(x_NM, weight_EIM, counts_E, /):
    """x[n] @ weight[e(n)].T, (N, I): the first counts[0] rows go to expert 0, and so on.

    counts_E: (E,) int64, sums to N; zeros are fine. torch's grouped product where it can, else one
    product an expert, which is the definition.
    """
    if can_group(x_NM, weight_EIM):
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_NM, weight_EIM.transpose(1, 2), offs=offsets_E)
    parts = zip(x_NM.split(counts_E.tolist()), weight_EIM, strict=True)
    return torch.cat([F.linear(x_nM, weight_IM) for x_nM, weight_IM in parts])


def can_group(x_NM, weight_EIM, /) -> bool:
    """Whether F.grouped_mm takes these: dtypes that it has, rows of 16 bytes, not 0 rows."""
    dtypes = torch.bfloat16, *((torch.float32, torch.float16) if x_NM.device.type == "cpu" else ())
    aligned = all(size * x_NM.element_size() % 16 == 0 for size in weight_EIM.shape[1:])
    return x_NM.dtype == weight_EIM.dtype and x_NM.dtype in dtypes and aligned and len(x_NM) > 0


class Experts(nn.Module):
    """ffn_e of (6) for rows that are sorted by expert: (N, M), counts (E,) -> (N, M)."""

    def __init__(self, config):
        super().__init__()
        E, INNER, M = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Parameter(torch.empty(E, INNER, M))
        self.up_proj = nn.Parameter(torch.empty(E, INNER, M))
        self.down_proj = nn.Parameter(torch.empty(E, M, INNER))
        for weight in self.parameters():
            nn.init.normal_(weight, std=config.initializer_range)

    def forward(self, x_NM, counts_E, /):
        gate_NI = grouped_linear(x_NM, self.gate_proj, counts_E)
        up_NI = grouped_linear(x_NM, self.up_proj, counts_E)
        return grouped_linear(self.act(gate_NI) * up_NI, self.down_proj, counts_E)


class SparseMLP(nn.Module):
    """(6): each token goes to its K likeliest experts. `votes` (E,) is b of (11) over its rate."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.top_k = layer, config.num_experts_per_tok
        self.normalised, self.rate = config.norm_topk_prob, config.router_bias_rate
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        if self.rate:
            # NUMERICS: whole steps, not their product with the rate, so that no cast of the model
            # rounds b. Pinned by tests/test_families.py::test_the_router_bias_survives_bfloat16.
            self.register_buffer("votes", torch.zeros(config.num_experts, dtype=torch.int64))

    def forward(self, x_BSM, balance=None, /):
        x_NM = x_BSM.flatten(0, -2)
        scores_NE, chosen_NK, weight_NK = self.route(x_NM)
        # NUMERICS: K copies of each row, sorted by expert and back by permutations, then one sum
        # over K: nothing is added in the order that threads arrive, forward or backward. Pinned by
        # tests/test_families.py::test_moe_is_repeatable.
        order = chosen_NK.flatten().argsort(stable=True)
        counts_E = torch.bincount(chosen_NK.flatten(), minlength=scores_NE.shape[1])
        copies_nM = x_NM[:, None].expand(-1, self.top_k, -1).flatten(0, 1)
        out_nM = self.experts(copies_nM.index_select(0, order), counts_E)
        out_NKM = out_nM.index_select(0, order.argsort()).unflatten(0, (-1, self.top_k))
        out_BSM = (out_NKM * weight_NK[:, :, None]).sum(1).view_as(x_BSM)
        loss = balance(scores_NE, chosen_NK, layer=self.layer) if balance else None
        return out_BSM if loss is None else _Attach.apply(out_BSM, loss)

    def route(self, x_NM, /):
        """p (N, E) of (6), the chosen experts (N, K) and their g (N, K) in x's dtype."""
        # NUMERICS: softmax and its sum in float32 or better, g cast back, as the models were
        # trained. Pinned by tests/test_families.py::test_the_router_works_in_float32.
        wide = torch.promote_types(x_NM.dtype, torch.float32)
        scores_NE = self.gate(x_NM).softmax(-1, dtype=wide)
        biased_NE = scores_NE + self.rate * self.votes if self.rate else scores_NE
        chosen_NK = biased_NE.topk(self.top_k, dim=-1).indices
        weight_NK = scores_NE.gather(-1, chosen_NK)
        if self.normalised:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return scores_NE, chosen_NK, weight_NK.to(x_NM.dtype)


class _Attach(torch.autograd.Function):
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
    """

    def __init__(self, sequence_J, /, token_J=None, *, coef=0.0):
        if token_J is None:
            token_J = torch.arange(len(sequence_J), device=sequence_J.device)
        if sequence_J.shape != token_J.shape or sequence_J.dim() != 1:
            found = f"{tuple(sequence_J.shape)} and {tuple(token_J.shape)}"
            raise ValueError(f"sequences and tokens must be (J,) alike, got {found}")
        self.sequence_J, self.token_J, self.coef = sequence_J, token_J, coef
        self.losses, self.counts = {}, {}  # by layer: a recomputed layer overwrites its own

    @classmethod
    def documents(cls, doc_ids_BS, /, *, coef=0.0):
        """One sequence per document of a packed batch; doc_ids as in `packed_attention`."""
        token_J = (doc_ids_BS.flatten() >= 0).nonzero()[:, 0]
        row_J = token_J // doc_ids_BS.shape[1]
        pairs_J2 = torch.stack([row_J, doc_ids_BS.flatten()[token_J]], 1)
        return cls(pairs_J2.unique(dim=0, return_inverse=True)[1], token_J, coef=coef)

    def __call__(self, scores_NE, chosen_NK, /, *, layer):
        (N, E), K = scores_NE.shape, chosen_NK.shape[1]
        sequences = int(self.sequence_J.max()) + 1 if len(self.sequence_J) else 0
        chosen_NE = scores_NE.new_zeros(N, E).scatter_(1, chosen_NK, 1)
        n_SE = scores_NE.new_zeros(sequences, E)
        n_SE.index_add_(0, self.sequence_J, chosen_NE[self.token_J])
        self.counts[layer] = n_SE.sum(0)
        if not self.coef:
            return None
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
    for layer, counts_E in counts.items():
        mlp = model.model.layers[layer].mlp
        if not getattr(mlp, "rate", 0):
            raise ValueError(f"layer {layer} has no router bias; set config.router_bias_rate")
        counts_E = counts_E.double()
        mlp.votes += (counts_E.mean() - counts_E).sign().long()


# 5. Log-probabilities in chunks --------------------------------------------------------------

LOGITS = 2**22  # held at a time by default: 16 MiB in float32


def token_logprobs(
    hidden_NM, weight_vM, targets_N, /, *, temperature=1.0, softcap=None, chunk=None,
    group=None, vocab_start=0, vocab_size=None,
):  # fmt: skip
    """Log-prob of each target and entropy of each distribution, (8) and (9).

    hidden_NM (N, M) and weight_vM (V, M) of one floating dtype, targets_N (N,) int64 in 0..V-1.
    softcap: z := c tanh(z / c) before the temperature (Gemma). Returns two (N,) tensors in float32
    (float64 for float64), differentiable in hidden and weight. No tensor is larger than (chunk, V),
    by default 2^22 logits or 128 rows, and at least two chunks, so that what is held is less than
    all. The last chunks' exponentials, 2^22 numbers or one chunk, stay for the backward; the logits
    of earlier chunks are computed again there.

    Vocabulary-parallel: every rank of `group` calls with the same hidden and targets, and the rows
    vocab_start .. vocab_start + v of the weight. Every rank gets the same results, the whole
    gradient of hidden and its rows' gradient of the weight.

    vocab_size: V, which a rank of a group cannot know by itself; without a group it is the rows of
    the weight. A target outside of it is refused by `require_tokens_in_vocabulary`; in a group that
    was not told V, a target in nobody's rows gives -inf.
    """
    if hidden_NM.dim() != 2 or targets_N.shape != hidden_NM.shape[:1]:
        found = f"{tuple(hidden_NM.shape)} and {tuple(targets_N.shape)}"
        raise ValueError(f"hidden must be (N, M) and targets (N,), got {found}")
    (N, _), v, held = hidden_NM.shape, len(weight_vM), 1
    if vocab_size is None and group is None:
        vocab_size = v
    if vocab_size is not None:
        require_tokens_in_vocabulary(targets_N, vocab_size, what="target")
    if chunk is None:
        chunk = max(1, min((N + 1) // 2, max(128, LOGITS // v)))
        held = max(1, LOGITS // (chunk * v))
    if not temperature > 0 or chunk < 1:
        raise ValueError(f"temperature and chunk must be positive, got {temperature} and {chunk}")
    options = temperature, softcap, chunk, held, group, vocab_start
    return _TokenLogprobs.apply(hidden_NM, weight_vM, targets_N, options)


def _scaled_logits(hidden_NM, weight_vM, temperature, softcap):
    # NUMERICS: the product is in the model's dtype, everything after it in float32 or better.
    # Pinned by tests/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
    z_Nv = F.linear(hidden_NM, weight_vM)
    z_Nv = z_Nv.to(torch.promote_types(z_Nv.dtype, torch.float32))
    if softcap is not None:
        z_Nv = softcap * torch.tanh(z_Nv / softcap)
    return z_Nv if temperature == 1 else z_Nv / temperature


def _local_targets(targets_N, rows, group, vocab_start):
    """Targets from this rank's first row on, others' at 0; which are its own, both (N, 1)."""
    local_N1 = targets_N[:, None] - vocab_start
    if group is None:  # all of them: others were refused
        return local_N1, torch.ones_like(local_N1, dtype=torch.bool)
    own_N1 = (local_N1 >= 0) & (local_N1 < rows)
    return torch.where(own_N1, local_N1, 0), own_N1


def _over_ranks(largest_N, found_4N, group):
    """The largest logit and the sums around it, of the vocabulary's rows of all ranks."""
    # COMM: two messages whatever the chunks, which may differ: shards of a vocabulary are uneven.
    # Pinned by tests/test_checkpoints.py::test_vocabulary_parallel_equals_one_process.
    all_N = largest_N.clone()
    dist.all_reduce(all_N, dist.ReduceOp.MAX, group)
    target_N, total_N, weighted_N, owners_N = found_4N
    lower_N = largest_N - all_N
    weighted_N, shrink_N = weighted_N + lower_N * total_N, lower_N.exp()
    found_4N = torch.stack([target_N, total_N * shrink_N, weighted_N * shrink_N, owners_N])
    dist.all_reduce(found_4N, group=group)
    return all_N, found_4N


class _TokenLogprobs(torch.autograd.Function):
    """p = exp(logprob); d logprob(t)/dz = onehot(t) - p, d entropy/dz = -p (log p + entropy)."""

    @staticmethod
    def forward(ctx, hidden_NM, weight_vM, targets_N, options):
        temperature, softcap, chunk, held, group, vocab_start = options
        dtype = torch.promote_types(hidden_NM.dtype, torch.float32)
        found_4N = torch.zeros(4, len(targets_N), dtype=dtype, device=hidden_NM.device)
        largest_N = torch.empty(len(targets_N), dtype=dtype, device=hidden_NM.device)
        ctx.kept = {}  # first token of a chunk -> its exponentials, what they are relative to
        for n in range(0, len(targets_N), chunk):
            rows = slice(n, n + chunk)
            if len(ctx.kept) == held:
                del ctx.kept[min(ctx.kept)]
            z_nv = _scaled_logits(hidden_NM[rows], weight_vM, temperature, softcap)
            at_n1, own_n1 = _local_targets(targets_N[rows], len(weight_vM), group, vocab_start)
            target_N = torch.where(own_n1, z_nv.gather(-1, at_n1), 0)[:, 0]
            largest_N[rows] = z_nv.amax(-1)
            shifted_nv = z_nv.sub_(largest_N[rows, None])
            e_nv = shifted_nv.exp()
            weighted_N = shifted_nv.mul_(e_nv).sum(-1)
            found_4N[:, rows] = torch.stack([target_N, e_nv.sum(-1), weighted_N, own_n1[:, 0]])
            if softcap is None:
                ctx.kept[n] = e_nv, largest_N[rows, None]
        if group is not None:
            largest_N, found_4N = _over_ranks(largest_N, found_4N, group)
        target_N, total_N, weighted_N, owners_N = found_4N
        lse_N = largest_N + total_N.log()
        entropy_N = total_N.log() - weighted_N / total_N  # (9), around the largest logit
        logprobs_N = (target_N - lse_N).masked_fill(owners_N == 0, -math.inf)  # (8)
        ctx.save_for_backward(hidden_NM, weight_vM, targets_N, lse_N, entropy_N)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, dlogprobs_N, dentropy_N):
        hidden_NM, weight_vM, targets_N, lse_N, entropy_N = ctx.saved_tensors
        temperature, softcap, chunk, _, group, vocab_start = ctx.options
        # z was divided by the temperature: so is what goes back
        dlogprobs_N = torch.zeros_like(lse_N) if dlogprobs_N is None else dlogprobs_N / temperature
        dentropy_N = None if dentropy_N is None else dentropy_N / temperature
        dhidden_NM = torch.empty_like(hidden_NM)
        # NUMERICS: the head's gradient is a sum over chunks, so it is summed in float32 or better.
        # Pinned by tests/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
        dweight_vM = torch.zeros_like(weight_vM, dtype=lse_N.dtype)
        kept, ctx.kept = ctx.kept, {}  # used up here: another backward computes them again
        for n in range(0, len(targets_N), chunk):
            rows = slice(n, n + chunk)
            g_n1, lse_n1, slope_nv = dlogprobs_N[rows, None], lse_N[rows, None], None
            e_nv, largest_n1 = kept.pop(n, (None, None))
            if e_nv is not None and dentropy_N is None:
                dz_nv = e_nv.mul_(-g_n1 * (largest_n1 - lse_n1).exp())
            else:
                z_nv = _scaled_logits(hidden_NM[rows], weight_vM, temperature, softcap)
                if softcap is not None:
                    slope_nv = 1 - (z_nv * temperature / softcap).square()
                logp_nv, upstream_nv = z_nv.sub_(lse_n1), -g_n1
                if dentropy_N is not None:
                    h_n1 = dentropy_N[rows, None]
                    upstream_nv = logp_nv * -h_n1 - (g_n1 + h_n1 * entropy_N[rows, None])
                dz_nv = logp_nv.exp_().mul_(upstream_nv)
            at_n1, own_n1 = _local_targets(targets_N[rows], len(weight_vM), group, vocab_start)
            dz_nv.scatter_add_(-1, at_n1, torch.where(own_n1, g_n1, 0))
            if slope_nv is not None:
                dz_nv.mul_(slope_nv)
            dz_nv = dz_nv.to(hidden_NM.dtype)
            dhidden_NM[rows] = dz_nv @ weight_vM
            if dweight_vM.dtype == dz_nv.dtype:
                dweight_vM.addmm_(dz_nv.T, hidden_NM[rows])
            else:
                dweight_vM += dz_nv.T @ hidden_NM[rows]
        if group is not None:
            dist.all_reduce(dhidden_NM, group=group)
        return dhidden_NM, dweight_vM.to(weight_vM.dtype), None, None


# 6. Attention callables: packed documents, blocks, the cache ---------------------------------

def packed_attention(lengths=None, /, *, doc_ids=None, position_ids=None, waste=1.25):
    """Causal attention inside each document of a packed batch: the callable for `hidden`.

    One of: lengths, of documents that lie end to end in one row (1, S). doc_ids (B, S) int64, one
    number per document, -1 for PAD, anywhere. position_ids (B, S): a document starts where a
    position is not the one before plus 1; -1 is PAD. PAD's output is 0 and nothing sees it.

    Documents of similar length are gathered into padded buckets (the longest at most `waste` times
    the shortest), so the projections and the MLP see no padding and attention sees little.

        lengths 3 2 3:   a a a b b c c c   ->   bucket (2, 3):  a a a    bucket (1, 2):  b b
                                                                c c c
    """
    doc_BS = _documents(lengths, doc_ids, position_ids)
    token_N = (doc_BS.flatten() >= 0).nonzero()[:, 0]
    pairs_N2 = torch.stack([token_N // doc_BS.shape[1], doc_BS.flatten()[token_N]], 1)
    runs, lengths = pairs_N2.unique_consecutive(dim=0, return_counts=True)
    if len(runs.unique(dim=0)) < len(runs):
        raise ValueError("a document id comes back after another one; give each its own number")
    index, lengths = _buckets(token_N, lengths, waste), lengths.tolist()
    shape, equal = tuple(doc_BS.shape), len(set(lengths)) == 1 and len(token_N) == doc_BS.numel()
    on_device = {}

    def attention(q_BHSD, k_BGSD, v_BGSD, /, **options):
        if (q_BHSD.shape[0], q_BHSD.shape[2]) != shape:
            raise ValueError(f"packed for {shape} tokens, got {tuple(q_BHSD.shape)}")
        whole = q_BHSD, k_BGSD, v_BGSD
        if equal:  # views instead of gathers
            rows = (x.unflatten(2, (-1, lengths[0])).transpose(1, 2).flatten(0, 1) for x in whole)
            out_UHLD = causal_attention(*rows, **options)
            return out_UHLD.unflatten(0, (shape[0], -1)).transpose(1, 2).flatten(2, 3)
        device = q_BHSD.device
        if device not in on_device:
            parts = [(i_UL.to(device), real_UL.to(device)) for i_UL, real_UL in index]
            on_device[device] = parts, [i_UL[real_UL] for i_UL, real_UL in parts]
        parts, back = on_device[device]
        flat, out = [x.transpose(1, 2).flatten(0, 1) for x in whole], []
        for index_UL, real_UL in parts:
            shape_UL = index_UL.shape
            rows = (x.index_select(0, index_UL.flatten()).unflatten(0, shape_UL) for x in flat)
            out_UHLD = causal_attention(*(x.transpose(1, 2) for x in rows), **options)
            out.append(out_UHLD.transpose(1, 2)[real_UL])
        out_NHD = torch.zeros_like(flat[0])
        if out:
            out_NHD = out_NHD.index_copy(0, torch.cat(back), torch.cat(out))
        return out_NHD.unflatten(0, shape).transpose(1, 2)

    return attention


def _buckets(token_N, length_D, waste):
    """[(index (U, L) of the tokens of U documents, which of them are no padding)], by length.

    Padding repeats a document's last token, which is after every real query, so that no real row
    sees it and its gradient is exactly zero.
    """
    lengths, buckets, index = length_D.tolist(), [], []
    for d in length_D.argsort(stable=True).tolist():
        if not buckets or lengths[d] > waste * lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(d)
    for bucket in buckets:
        length_U1, end_U1 = length_D[bucket, None], length_D.cumsum(0)[bucket, None]
        column_L = torch.arange(lengths[bucket[-1]])
        at_UL = end_U1 - length_U1 + column_L.minimum(length_U1 - 1)
        index.append((token_N[at_UL], column_L < length_U1))
    return index


def _documents(lengths, doc_ids, position_ids):
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
    first_B1 = torch.full_like(ids_BS[:, :1], -2)
    jump_BS = torch.diff(ids_BS, dim=1, prepend=first_B1) != 1
    return torch.where(ids_BS < 0, -1, jump_BS.cumsum(1))


def packed_positions(lengths, /):
    """(1, S) int64: 0..n-1 for each document, the positions that go with `packed_attention`."""
    return torch.cat([torch.arange(int(n)) for n in lengths])[None]


def packed_logprobs(model, sequences, mask_BT, /, *, temperature=1.0):
    """Log-probs and entropies of many sequences' targets in one packed forward.

    sequences: B lists of token ids; sequence b's targets are its tokens 1.., T = the longest of
    them. mask_BT (B, T) bool: which targets to score; the head is applied to those alone. Returns
    two (B, T) tensors, 0 where mask is off, differentiable; of a critic also its values.
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
    if model.config.value_head:
        scores = *scores, model.values(x_1SM[0, at_N])
    return tuple(x_N.new_zeros(mask_BT.shape).index_put((row_N, column_N), x_N) for x_N in scores)


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


class Lengths(NamedTuple):
    """How many tokens each row holds, and what Python must know of it: no sync in every layer."""

    of_B: torch.Tensor
    longest: int = 0
    even: bool = True

    @classmethod
    def measured(cls, lengths_B):
        if not len(lengths_B):
            return cls(lengths_B)
        low, high = torch.stack([lengths_B.min(), lengths_B.max()]).tolist()
        return cls(lengths_B, high, low == high)

    def plus(self, counts_B, steps):
        if counts_B is not None:
            return Lengths.measured(self.of_B + counts_B)
        return Lengths(self.of_B + steps, self.longest + steps, self.even)


class KVCache:
    """Keys and values of the tokens so far; row b holds `lengths.of_B[b]` of them, left-aligned.

        row 0   k k k k . .        lengths 4 2, room for C = 6
        row 1   k k . . . .        the next token of row 1 is written at 2, whatever row 0 does

    A sliding layer has room for its window only: the token at position p stands at p % window.
    `cache.attention` is the callable for `Transformer.hidden`; `extend` feeds tokens and moves the
    lengths. `select(rows)` repeats, drops and reorders rows: a fork of a conversation, finished
    rows out. `share(rows)` makes several rows of each prompt: full layers go on to hold its keys
    once, sliding layers copy theirs, a few; `own` counts what a row holds behind its prompt.
    """

    def __init__(self, rows: int, device=None):
        self.lengths = self.own = Lengths(torch.zeros(rows, dtype=torch.long, device=device))
        self.layers, self.sliding = {}, set()  # layer -> k and v (2, B, G, C, D); which slide
        self.counts_B = None  # real tokens a row of the call under way; None: all of them
        self.prompts = {}  # of `share`: layer -> k and v (2, P, G, J, D), P prompts
        self.prompt_lengths = None  # of the P prompts
        self.prompt_B = self.rows_Pn = self.place_B = None  # a row's prompt; a prompt's rows, and
        # a row's place in that padded table

    def attention(self, q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, softcap=None):
        """Append k, v of S new tokens a row and attend: query i sees keys 0..lengths[b] + i."""
        S, at = q_BHSD.shape[2], self.own if window is None else self.lengths
        options = dict(layer=layer, scale=scale, window=window, softcap=softcap)
        if self.lengths.longest == 0:  # a prompt: nothing older to see; right padding needs no mask
            self._write(layer, k_BGSD, v_BGSD, window)
            return causal_attention(q_BHSD, k_BGSD, v_BGSD, **options)
        if softcap is not None:
            raise ValueError("KVCache has no softcap")
        if window is not None and S > 1:
            return self._windowed(q_BHSD, k_BGSD, v_BGSD, layer, scale, window)
        room, mask_B1SC = min(at.longest + S, window or at.longest + S), None
        k_BGCD, v_BGCD = self._write(layer, k_BGSD, v_BGSD, window)[:, :, :, :room]
        if S > 1 or not at.even:
            last_BS = at.of_B[:, None] + torch.arange(S, device=q_BHSD.device)
            key_C = torch.arange(room, device=q_BHSD.device)
            mask_B1SC = (key_C <= last_BS[:, :, None])[:, None]
        if window is None and self.prompts:
            return self._behind_prompts(q_BHSD, k_BGCD, v_BGCD, mask_B1SC, layer, scale)
        queries = q_BHSD
        if S == 1:  # one token: the heads that share a key are so many queries of one head
            queries = q_BHSD.reshape(len(q_BHSD), k_BGCD.shape[1], -1, q_BHSD.shape[3])
        options = dict(attn_mask=mask_B1SC, scale=scale, enable_gqa=S > 1)
        out = F.scaled_dot_product_attention(queries, k_BGCD, v_BGCD, **options)
        return out.reshape(q_BHSD.shape)

    def _behind_prompts(self, q_BHSD, k_BGCD, v_BGCD, mask_B1SC, layer, scale):
        """One softmax over a prompt's keys, read once for all its rows, and a row's own."""
        k_PGJD, v_PGJD = self.prompts[layer]
        (B, G, C, D), S, J = k_BGCD.shape, q_BHSD.shape[2], k_PGJD.shape[2]
        # NUMERICS: scores and sums in float32 or better, keys and values cast up for it. Pinned by
        # tests/test_models.py::test_shared_prompts_change_nothing.
        wide = torch.promote_types(q_BHSD.dtype, torch.float32)
        q_BGhD = q_BHSD.reshape(B, G, -1, D).to(wide)  # h: the heads of a key times the S tokens
        own_BGhC = q_BGhD @ k_BGCD.to(wide).mT
        if mask_B1SC is not None:
            hidden_B11SC = ~mask_B1SC[:, :, None]
            own_BGhSC = own_BGhC.unflatten(2, (-1, S)).masked_fill(hidden_B11SC, -math.inf)
            own_BGhC = own_BGhSC.flatten(2, 3)
        shared_BGhJ = self._per_row(self._per_prompt(q_BGhD) @ k_PGJD.to(wide).mT)
        if not self.prompt_lengths.even:
            beyond_PJ = torch.arange(J, device=q_BHSD.device) >= self.prompt_lengths.of_B[:, None]
            beyond_BJ = beyond_PJ[self.prompt_B]
            shared_BGhJ = shared_BGhJ.masked_fill(beyond_BJ[:, None, None], -math.inf)
        p_BGhk = (torch.cat([shared_BGhJ, own_BGhC], -1) * scale).softmax(-1)
        p_BGhJ, p_BGhC = p_BGhk.split([J, C], -1)
        out = self._per_row(self._per_prompt(p_BGhJ) @ v_PGJD.to(wide)) + p_BGhC @ v_BGCD.to(wide)
        return out.to(q_BHSD.dtype).reshape(q_BHSD.shape)

    def _per_prompt(self, x_BGhX):
        """The rows of each prompt side by side: (B, G, h, X) -> (P, G, n h, X)."""
        return x_BGhX[self.rows_Pn].transpose(1, 2).flatten(2, 3)

    def _per_row(self, x_PGmX):
        """The way back."""
        rows = x_PGmX.unflatten(2, (self.rows_Pn.shape[1], -1)).transpose(1, 2)
        return rows.flatten(0, 1)[self.place_B]

    def _windowed(self, q_BHSD, k_BGSD, v_BGSD, layer, scale, window):
        """Several new tokens in a sliding layer: they see the old window and each other."""
        S, room, at = q_BHSD.shape[2], min(self.lengths.longest, window), self.lengths
        slot_C, new_S = (torch.arange(n, device=q_BHSD.device) for n in (room, S))
        last_B1 = at.of_B[:, None] - 1
        old_BC = last_B1 - (last_B1 - slot_C) % window  # the position that stands in each slot
        query_BS = at.of_B[:, None] + new_S
        key_Bk = torch.cat([old_BC, query_BS], 1)
        ahead_BSk = query_BS[:, :, None] - key_Bk[:, None]
        seen_BSk = (ahead_BSk >= 0) & (ahead_BSk < window) & (key_Bk >= 0)[:, None]
        new_2BGSD = torch.stack([k_BGSD, v_BGSD])
        both = torch.cat([self.layers[layer][:, :, :, :room], new_2BGSD], 3)
        out_BHSD = masked_attention(q_BHSD, *both, seen_BSk, scale=scale)
        self._write(layer, k_BGSD, v_BGSD, window)
        return out_BHSD

    def _write(self, layer, k_BGSD, v_BGSD, window):
        """Put k and v of new tokens behind each row's old ones; all that the layer has room for."""
        (B, G, S, D), at = k_BGSD.shape, self.own if window is None else self.lengths
        need, old, new_2BGSD = at.longest + S, self.layers.get(layer), torch.stack([k_BGSD, v_BGSD])
        if window is not None:
            need = min(need, window)
            self.sliding.add(layer)
        if old is None or old.shape[3] < need:  # grow by half, at least 32: no room before need
            room = min(max(need + 32, need * 3 // 2), window or math.inf)
            self.layers[layer] = k_BGSD.new_zeros(2, B, G, room, D)
            if old is not None:
                self.layers[layer][:, :, :, : old.shape[3]] = old
        all_2BGCD = self.layers[layer]
        if at.even and (window is None or S == 1 or need < window):
            slot = at.longest if window is None else at.longest % window
            all_2BGCD[:, :, :, slot : slot + S] = new_2BGSD
            return all_2BGCD
        slot_BS = at.of_B[:, None] + torch.arange(S, device=k_BGSD.device)
        row_BS = torch.arange(B, device=k_BGSD.device)[:, None].expand(B, S)
        all_BC2GD, new_BS2GD = (x.permute(1, 3, 0, 2, 4) for x in (all_2BGCD, new_2BGSD))
        if window is None:
            all_BC2GD[row_BS, slot_BS] = new_BS2GD
            return all_2BGCD
        # Of each row's new tokens only the last `window` real ones: padding and older ones would
        # land on slots that hold what is still seen.
        end_B = at.of_B + (S if self.counts_B is None else self.counts_B)
        keep_BS = (slot_BS < end_B[:, None]) & (slot_BS >= end_B[:, None] - window)
        all_BC2GD[row_BS[keep_BS], slot_BS[keep_BS] % window] = new_BS2GD[keep_BS]
        return all_2BGCD

    def advance(self, counts_B=None, /, *, steps=1):
        """Row b now holds counts_B[b] tokens more, by default `steps`; the next go behind them."""
        shared, self.lengths = bool(self.prompts), self.lengths.plus(counts_B, steps)
        self.own = self.own.plus(counts_B, steps) if shared else self.lengths

    def select(self, rows, /):
        """Keep rows (int64 list or tensor), in that order, repeats allowed."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.lengths.of_B.device)
        self.lengths = self.own = Lengths.measured(self.lengths.of_B[rows])
        self.layers = {layer: kv[:, rows] for layer, kv in self.layers.items()}
        if self.prompts and len(rows):
            self._group(self.prompt_B[rows])

    def share(self, rows, /):
        """`select(rows)` of rows that are prompts: full layers keep these once, and sliding layers
        copy their few keys."""
        if self.prompts:
            raise ValueError("the prompts of this cache are shared already")
        self.prompt_lengths, longest = self.lengths, self.lengths.longest
        full = self.layers.keys() - self.sliding
        prompts = {layer: self.layers.pop(layer)[:, :, :, :longest] for layer in full}
        self.select(rows)
        self.prompts = prompts
        self._group(torch.as_tensor(rows, dtype=torch.long, device=self.lengths.of_B.device))

    def _group(self, prompt_B):
        """Which rows are each prompt's: prompts without one are dropped, short groups padded."""
        used_P, self.prompt_B = prompt_B.unique(return_inverse=True)
        if len(used_P) < len(self.prompt_lengths.of_B):
            self.prompt_lengths = Lengths.measured(self.prompt_lengths.of_B[used_P])
            longest = self.prompt_lengths.longest  # without padding that no mask would hide
            self.prompts = {n: kv[:, used_P, :, :longest] for n, kv in self.prompts.items()}
        earlier_B = (self.prompt_B[:, None] == self.prompt_B).tril(-1).sum(1)  # of its own prompt
        n, row_B = int(earlier_B.max()) + 1, torch.arange(len(prompt_B), device=prompt_B.device)
        self.place_B = self.prompt_B * n + earlier_B
        self.rows_Pn = row_B.new_zeros(len(used_P), n)
        self.rows_Pn[self.prompt_B, earlier_B] = row_B
        self.own = Lengths.measured(self.lengths.of_B - self.prompt_lengths.of_B[self.prompt_B])


@torch.no_grad()
def extend(model, cache, tokens_BS, /, counts=None):
    """Feed tokens (B, S), right-padded, of which counts (B,) are real (default S); logits (B, V)
    after the last real token of each row. Positions go on from the cache's lengths."""
    B, S = tokens_BS.shape
    positions = cache.lengths.of_B[:, None]
    if S > 1:
        positions = positions + torch.arange(S, device=tokens_BS.device)
    cache.counts_B = counts
    x_BSM = model.hidden(tokens_BS, positions=positions, attention=cache.attention)
    cache.advance(counts, steps=S)
    if counts is None:
        return model.logits(x_BSM[:, -1])
    return model.logits(x_BSM[torch.arange(B, device=counts.device), counts - 1])


@torch.no_grad()
def prefill(model, prompts, /):
    """A cache with one row a prompt (lists of token ids, any lengths); logits (B, V) after each."""
    device, vocab_size = model.head_weight.device, model.config.vocab_size
    for prompt in prompts:
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"a prompt needs tokens, all of 0..{vocab_size - 1}, got {prompt}")
    lengths = [len(p) for p in prompts]
    counts = torch.tensor(lengths, device=device) if len(set(lengths)) > 1 else None
    tokens_BS = nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    cache = KVCache(len(prompts), device=device)
    return cache, extend(model, cache, tokens_BS.to(device), counts)


# 7. Generation -------------------------------------------------------------------------------

class Sampled(NamedTuple):
    """Tokens (B,) int64 and two log-probs (B,) of each, in float32 or better.

    logprobs: under the distribution that was sampled: temperature, then top-k, top-p, min-p, and
    what is left sums to 1. full_logprobs: under softmax(logits / temperature) over the whole
    vocabulary. Temperature 0 samples nothing: both are then under softmax(logits).
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    full_logprobs: torch.Tensor


@torch.no_grad()
def sample(logits_BV, uniform_B, /, *, temperature: float, top_k=None, top_p=None, min_p=None):
    """Draw a token a row: invert the cumulative distribution at uniform_B (B,), float64 in [0, 1).

    The randomness is an argument, so a draw depends on its own row only, never on which rows share
    the batch. temperature 0 takes the likeliest token. top_k keeps the k likeliest tokens, top_p
    of those the fewest that hold so much, min_p what is at least so likely relative to the
    likeliest; in this order, as in transformers. Returns `Sampled`.
    """
    _check_sampling(temperature, top_k, top_p, min_p)
    dtype = torch.promote_types(logits_BV.dtype, torch.float32)
    z_BV = logits_BV.to(dtype) if temperature in (0, 1) else logits_BV.to(dtype) / temperature
    # NUMERICS: not log_softmax, whose float32 normaliser adds the terms one by one and loses a long
    # tail (1e-4 at 150 thousand tokens); torch's sum adds in pairs. Pinned by
    # tests/test_models.py::test_the_samplers_logprobs_are_the_trainers.
    largest_B1 = z_BV.amax(-1, keepdim=True)
    e_BV = (z_BV - largest_B1).exp()
    kept_BV = e_BV
    if temperature == 0:
        tokens_B1 = z_BV.argmax(-1, keepdim=True)
    elif uniform_B.dtype != torch.float64:
        raise ValueError(f"uniform must be float64 (float32 rounds up to 1), got {uniform_B.dtype}")
    else:
        if top_k or min_p or top_p not in (None, 1):
            kept_BV = e_BV * _kept(e_BV, top_k, top_p, min_p)
        tokens_B1 = _invert(kept_BV, uniform_B)
    score_B = (z_BV.gather(-1, tokens_B1) - largest_B1)[:, 0]
    full_B = score_B - e_BV.sum(-1).log()
    cut_B = full_B if kept_BV is e_BV else score_B - kept_BV.sum(-1).log()
    return Sampled(tokens_B1[:, 0], cut_B, full_B)


def _check_sampling(temperature, top_k, top_p, min_p):
    if temperature < 0 or not math.isfinite(temperature):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if top_k is not None and (top_k != int(top_k) or top_k < 0):
        raise ValueError(f"top_k must be a number of tokens, 0 or None for all; got {top_k}")
    if top_p is not None and not 0 < top_p <= 1 or min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1]; got {top_p} and {min_p}")


def _kept(e_BV, top_k, top_p, min_p):
    """Which tokens top-k, top-p and min-p leave, (B, V) bool: always the likeliest."""
    sorted_BV, order_BV = e_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if top_k:
        keep_BV &= sorted_BV >= sorted_BV[:, min(int(top_k), sorted_BV.shape[1]) - 1, None]
    if top_p is not None:
        left_BV = (sorted_BV * keep_BV).double()
        before_BV = left_BV.cumsum(-1) - left_BV
        keep_BV &= before_BV < top_p * left_BV.sum(-1, keepdim=True)  # not enough without it
    if min_p:
        keep_BV &= sorted_BV >= min_p * sorted_BV[:, :1]
    keep_BV[:, 0] = True
    return torch.zeros_like(keep_BV).scatter_(-1, order_BV, keep_BV)


def _invert(p_BV, uniform_B):
    """The token (B, 1) at which the running sum of p, of any total, reaches uniform times it."""
    # NUMERICS: in float32 a running sum over 150 thousand tokens is off by more than the tail's
    # probabilities; in float64 it is not. First over blocks of 128 tokens, then inside one: a
    # running sum of V numbers is slow, and so is a float64 copy of p. A token of probability 0 is
    # never drawn. Pinned by
    # tests/test_models.py::test_tokens_of_a_long_tail_are_drawn_at_their_own_uniforms.
    p_BV = F.pad(p_BV, (0, -p_BV.shape[1] % 128)) if p_BV.shape[1] % 128 else p_BV
    blocks_BnW = p_BV.unflatten(-1, (-1, 128))
    some = blocks_BnW.split(max(1, 512 // len(p_BV)), 1)  # so many blocks of float64 at a time
    ends_Bn = torch.cat([x_BnW.sum(-1, dtype=torch.float64) for x_BnW in some], 1).cumsum(-1)
    at_B1 = uniform_B[:, None] * ends_Bn[:, -1:]
    block_B1 = torch.searchsorted(ends_Bn, at_B1, right=True).clamp(max=ends_Bn.shape[1] - 1)
    inside_BW = blocks_BnW[torch.arange(len(p_BV), device=p_BV.device), block_B1[:, 0]].double()
    left_B1 = at_B1 - (ends_Bn.gather(-1, block_B1) - inside_BW.sum(-1, keepdim=True))
    place_B1 = torch.searchsorted(inside_BW.cumsum(-1), left_B1, right=True)
    # Rounding may carry the rest past the block's last token: take the last that can be drawn.
    column_W = torch.arange(128, device=p_BV.device)
    last_B1 = torch.where(inside_BW > 0, column_W, 0).amax(-1, keepdim=True)
    return block_B1 * 128 + place_B1.minimum(last_B1)


class Row:
    """A sequence under way: it takes its next queued token or, with none queued, the sampled one.

    mask says which tokens were sampled; logprobs and full_logprobs are those of `Sampled` (0 where
    queued); all three have one entry per target, tokens[1:]. draws[n] in [0, 1) decides the n-th
    token behind the prompt.
    """

    def __init__(self, prompt, draws=()):
        self.tokens, self.draws, self.queue = list(prompt), draws, deque()
        self.new, self.truncated = 0, False  # tokens behind the prompt; ended by the limit
        known = max(len(prompt) - 1, 0)
        self.mask, self.logprobs, self.full_logprobs = [False] * known, [0.0] * known, [0.0] * known

    def append(self, token, logprob, full_logprob=0.0) -> bool:
        """Take one token; True if it was the sampled one."""
        sampled = not self.queue
        self.tokens.append(token if sampled else self.queue.popleft())
        self.mask.append(sampled)
        self.logprobs.append(logprob if sampled else 0.0)
        self.full_logprobs.append(full_logprob if sampled else 0.0)
        self.new += 1
        return sampled


@torch.inference_mode()
def generate(
    model, rows, /, *, max_new_tokens, temperature=1.0, top_k=None, top_p=None, min_p=None,
    end=(), after=None, seed=None,
):  # fmt: skip
    """Decode rows (prompts of any lengths) until each has ended; returns them, in their order.

    rows: `Row`s, or lists of token ids, of which Rows are made. A row without draws needs `seed`,
    which makes them. A sampled token in `end` (the stop tokens) calls after(row) -> rows that go on
    in its place: none, the default, ends it; itself with tokens in its queue is the next turn of a
    conversation; several are a fork (with `after`, rows are returned as they end). A row of
    max_new_tokens tokens behind its prompt ends with truncated set. temperature 0 is greedy and
    needs no draws; the others are those of `sample`. Equal prompts are computed and stored once; an
    ended row leaves the batch.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    _check_sampling(*options.values())
    rows = _with_draws(rows, max_new_tokens if temperature > 0 else 0, seed)
    if not rows:
        return []
    given, distinct = rows, dict.fromkeys(tuple(row.tokens) for row in rows)
    distinct = {prompt: n for n, prompt in enumerate(distinct)}
    longest, room = max(map(len, distinct)), model.config.max_position_embeddings
    if longest + max_new_tokens > room:
        raise ValueError(f"a prompt of {longest} tokens and max_new_tokens {max_new_tokens} exceed "
                         f"the model's {room} positions; shorten one of them")  # fmt: skip
    cache, logits_BV = prefill(model, list(distinct))
    batch, done = [distinct[tuple(row.tokens)] for row in rows], []
    logits_BV = logits_BV[batch]
    if len(batch) > len(distinct):
        cache.share(batch)
    while rows:
        uniform_B = None
        if temperature > 0:
            draws = [row.draws[row.new] for row in rows]
            uniform_B = torch.tensor(draws, dtype=torch.float64, device=logits_BV.device)
        drawn = [x.tolist() for x in sample(logits_BV, uniform_B, **options)]
        going = []  # (place in the batch, row after this token)
        for b, (row, token, *logprobs) in enumerate(zip(rows, *drawn)):
            ended = row.append(token, *logprobs) and token in end
            followers = (after(row) if after else []) if ended else [row]
            for follower in followers:
                follower.truncated = follower.new >= max_new_tokens
            done += [x for x in followers if x.truncated] if followers else [row]
            going += [(b, x) for x in followers if not x.truncated]
        if going:
            if [b for b, _ in going] != list(range(len(rows))):
                cache.select([b for b, _ in going])
            last_B1 = torch.tensor([[row.tokens[-1]] for _, row in going], device=logits_BV.device)
            logits_BV = extend(model, cache, last_B1)
        rows = [row for _, row in going]
    return done if after else given


def _with_draws(rows, needed, seed):
    """Rows from rows or lists of tokens, each with at least `needed` draws."""
    rows = [row if isinstance(row, Row) else Row(row) for row in rows]
    if seed is not None and needed:
        generator = torch.Generator().manual_seed(seed)
        for row in rows:
            made = torch.rand(needed, generator=generator, dtype=torch.float64).tolist()
            row.draws = row.draws if len(row.draws) else made
    if any(len(row.draws) < needed for row in rows):
        raise ValueError(f"each row needs {needed} draws, one for each new token, or give a seed")
    return rows


# 8. An action expert -------------------------------------------------------------------------

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
        self.attention, self.detach = attention or causal_attention, detach
        self.valid_BP, self.positions_BP, self.layers = valid_BP, positions_BP, {}

    def record(self, q_BHPD, k_BGPD, v_BGPD, /, *, layer, **options):
        self.layers[layer] = tuple(x.detach() if self.detach else x for x in (k_BGPD, v_BGPD))
        return self.attention(q_BHPD, k_BGPD, v_BGPD, layer=layer, **options)

    def after(self, positions_BT, blocks_T=None, /):
        """The callable of a suffix at these positions; blocks_T: default all one block."""

        def suffix(q_BHTD, k_BGTD, v_BGTD, /, *, layer, scale, window=None, softcap=None):
            k_BGPD, v_BGPD = self.layers[layer]
            (B, _, P, _), T = k_BGPD.shape, q_BHTD.shape[2]
            seen_BTk = torch.ones(B, T, P + T, dtype=torch.bool, device=q_BHTD.device)
            if self.valid_BP is not None:
                seen_BTk[:, :, :P] &= self.valid_BP[:, None].bool()
            if blocks_T is not None:
                seen_BTk[:, :, P:] &= blocks_T <= blocks_T[:, None]
            if window is not None:
                at_BP = torch.arange(P, device=q_BHTD.device)[None]
                at_BP = at_BP if self.positions_BP is None else self.positions_BP
                key_Bk = torch.cat([at_BP.expand(B, P), positions_BT.expand(B, T)], 1)
                seen_BTk &= positions_BT[:, :, None] - key_Bk[:, None] < window
            k_BGkD, v_BGkD = torch.cat([k_BGPD, k_BGTD], 2), torch.cat([v_BGPD, v_BGTD], 2)
            return masked_attention(q_BHTD, k_BGkD, v_BGkD, seen_BTk, scale=scale, softcap=softcap)

        return suffix


class ActionExpert(Seeded):
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
        self.config, self.rope, self.action_dim = config, Rope(config), action_dim
        self.action_in_proj = nn.Linear(action_dim, M)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * M, M), nn.Linear(M, M)
        self.action_out_proj = nn.Linear(M, action_dim)
        self.state_proj = nn.Linear(state_dim, M) if state_dim else None
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(M, config)

    def require_fits(self, prefix_config) -> None:
        """ValueError if the prefix's keys and values cannot be attended to."""
        for name in ("num_hidden_layers", "head_dim", "num_key_value_heads", "layer_types"):
            mine, theirs = getattr(self.config, name), getattr(prefix_config, name)
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
        width = self.config.hidden_size
        time_BM = time_features(tau_B, width).to(actions_BTA.dtype)
        time_BTM = time_BM[:, None].expand(-1, actions_BTA.shape[1], -1)
        x_BsM = torch.cat([self.action_in_proj(actions_BTA), time_BTM], -1)
        x_BsM = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(x_BsM)))
        if state is not None:
            x_BsM = torch.cat([self.state_proj(state)[:, None], x_BsM], 1)
        place_s = torch.arange(x_BsM.shape[1], device=x_BsM.device)
        positions_Bs = positions_B1 + place_s
        blocks_s = (place_s > 0).long() if state is not None else None
        ropes = self.rope(positions_Bs, x_BsM.dtype)
        attention = prefix.after(positions_Bs, blocks_s)
        for layer in self.layers:
            x_BsM = layer(x_BsM, ropes, attention)
        return self.action_out_proj(self.norm(x_BsM)[:, -actions_BTA.shape[1] :])


def time_features(tau_B, width, /):
    """Sines and cosines of tau, (B, width), of periods from 0.004 to 4, as in pi0."""
    wide = torch.promote_types(tau_B.dtype, torch.float32)
    fraction = torch.linspace(0, 1, width // 2, dtype=wide, device=tau_B.device)
    angle_BW = 2 * math.pi * tau_B.to(wide)[:, None] / (0.004 * 1000**fraction)
    return torch.cat([angle_BW.sin(), angle_BW.cos()], -1)


def flow_time(uniform, /):
    """tau of (12) from a uniform draw: 1 - tau is Beta(1.5, 1), up to 0.999. Noisy times are
    likelier, since there the actions still have to be chosen (pi0, appendix B)."""
    return 0.999 * (1 - uniform ** (2 / 3))


def flow_matching_loss(velocity, actions_BTA, noise_BTA, tau_B, /):
    """(12) for each row, (B,), float32 or better. velocity(x (B, T, A), tau (B,)) -> (B, T, A)."""
    tau_B11 = tau_B[:, None, None]
    x_BTA = tau_B11 * actions_BTA + (1 - tau_B11) * noise_BTA
    error_BTA = velocity(x_BTA, tau_B) - (actions_BTA - noise_BTA)
    return error_BTA.to(torch.promote_types(error_BTA.dtype, torch.float32)).square().mean((1, 2))


@torch.no_grad()
def sample_actions(velocity, noise_BTA, /, *, steps=10):
    """(13): `steps` Euler steps from noise to actions (B, T, A)."""
    x_BTA = noise_BTA
    for n in range(steps):
        x_BTA = x_BTA + velocity(x_BTA, x_BTA.new_full(x_BTA.shape[:1], n / steps)) / steps
    return x_BTA


# 9. Checkpoints ------------------------------------------------------------------------------

def _safetensors():
    """The library, with its submodule for torch: only checkpoints need it."""
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
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower, whatever is wrong
        raise ValueError(f"{path} is no tokenizer that can be read: {error}") from error


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
    """Tensor name -> file name from an index. Files beside the index only.

    A checkpoint comes from somebody else: a name that leads out of its directory would have us read
    any file of this machine. A link inside the directory, as Hugging Face's cache makes them, is
    its owner's doing, and fine.
    """
    listed = read_json(index, what="the index of a checkpoint in several files").get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: weight_map must be an object that names each tensor's file, "
                         f"got {reprlib.repr(listed)}")  # fmt: skip
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
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.exists() and not single.exists():
        raise ValueError(f"no model.safetensors and no index in {directory}")
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
    text, head = {}, "lm_head.weight"
    for old, new in ("model.language_model.", "model."), ("language_model.", ""), (head, head):
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
    path, _, leaf = name.rpartition(".")
    if not path.endswith(".experts") or leaf == "down_proj" and name in stored:
        return [Piece(name, shape)]
    E, rows, M = shape
    if f"{path}.gate_up_proj" in stored and leaf != "down_proj":
        first = rows if leaf == "up_proj" else 0
        return [Piece(f"{path}.gate_up_proj", (E, 2 * rows, M), None, first)]
    return [Piece(f"{path}.{e}.{leaf}.weight", (rows, M), e) for e in range(E)]


def _region(parameter) -> list[tuple[int, int]]:
    """This rank's part of a parameter, a [start, stop) per dimension: all, if it is no DTensor."""
    ranges = [(0, n) for n in parameter.shape]
    cuts = enumerate(getattr(parameter, "placements", ()))
    # FSDP's cut of what TP cut already comes last, though its mesh dimension is the first
    for mesh_dim, placement in sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor")):
        if placement.is_replicate():
            continue
        (a, b), ranks = ranges[placement.dim], parameter.device_mesh.size(mesh_dim)
        size = -(-(b - a) // ranks)
        a = min(a + size * parameter.device_mesh.get_local_rank(mesh_dim), b)
        ranges[placement.dim] = a, min(a + size, b)
    local = list(parameter.to_local().shape) if hasattr(parameter, "to_local") else None
    if local is not None and local != [b - a for a, b in ranges]:
        raise ValueError(f"cannot cut {parameter.placements}: {ranges} against a shard of {local}")
    return ranges


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_hf(directory, *, model=None, dtype=None, device=None) -> Transformer:
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
    found wrong in its part, all raise.
    """
    if model is not None and (dtype or device):
        raise ValueError("give load_hf a model to fill, or dtype and device of a new one, not both")
    problem = None
    try:
        loaded = _load(Path(directory), model, dtype, device)
    except Exception as error:  # raised below, after the other ranks have heard of it
        problem = error
    _raise_on_all_ranks(problem, model)
    return loaded


def _load(directory, model, dtype, device) -> Transformer:
    """`load_hf` on this rank."""
    config, (tensors, _) = ModelConfig.from_hf(directory), _open_checkpoint(directory)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some writers store the tied matrix twice

    # A model on the meta device has shapes and no memory: whatever sizes a damaged config asks for,
    # they meet the stored tensors' shapes before anything is allocated.
    new = model is None
    if new:
        with torch.device("meta"):
            model = Transformer(config)
    lost = dataclasses.replace(model.config, router_bias_rate=0.0)
    config.require_same_numbers(lost, directory)
    pieces = {name: _pieces(name, p.shape, tensors) for name, p in model.named_parameters()}
    _require_fits(directory, tensors, pieces)

    if new:
        stored = DTYPES[next(iter(tensors.values())).part.get_dtype()]
        model = model.to(dtype or stored).to_empty(device=device or "cpu")
    have = dict(model.named_parameters())
    with torch.no_grad():
        for name, parts in pieces.items():
            _fill(have[name], parts, tensors)
        for buffer in model.buffers():
            buffer.zero_()
    return model


def _require_fits(directory, tensors, pieces) -> None:
    """ValueError unless the stored tensors are those that the pieces ask for, of dtypes we read."""
    wanted = {piece.name: piece.shape for parts in pieces.values() for piece in parts}
    missing, unexpected = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted)
    if missing or unexpected:
        raise ValueError(f"{directory}: missing tensors {_some(missing)}, "
                         f"unexpected tensors {_some(unexpected)}")  # fmt: skip
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


def _some(names) -> str:
    """The first of many names, and how many more there are: a message is one line."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{names[:8]}{more}"


def _fill(parameter, parts, tensors):
    """Copy this rank's region of a parameter, and read no more of each stored tensor."""
    region = _region(parameter)
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    for piece in parts:
        cut, into = list(region), local
        if piece.expert is not None:
            (first, stop), *cut = region
            if not first <= piece.expert < stop:
                continue
            into = local[piece.expert - first]
        if piece.row:
            cut[-2] = cut[-2][0] + piece.row, cut[-2][1] + piece.row
        if into.numel():
            stored = tensors[piece.name]
            into.copy_(stored.part[tuple(slice(a, b) for a, b in cut)])
            # NUMERICS: extremes pass NaN and infinity on, and need no memory. Taken of what was
            # copied, so that a weight which the model's dtype cannot hold is seen as well. Pinned
            # by tests/test_checkpoints.py::test_weights_that_are_not_finite_are_refused_by_name.
            extremes = torch.stack(torch.aminmax(into))
            if not extremes.isfinite().all():
                raise ValueError(f"{stored.path}: {stored.name} has weights that are NaN, or not "
                                 f"finite in {into.dtype}")  # fmt: skip


def _raise_on_all_ranks(problem, model) -> None:
    """Raise this rank's problem, if it has one; of a sharded model, on all ranks the first's.

    Of a model whose parameters are not cut, every rank is on its own, and no message is sent.
    """
    cut = [] if model is None else [p for p in model.parameters() if hasattr(p, "placements")]
    if not cut:
        if problem is not None:
            raise problem
        return
    # COMM: each rank comes here once, whatever it met before: a rank that raised on its own would
    # leave the others waiting for it. One flag as a rule; the texts only if there is one. Pinned by
    # tests/test_checkpoints.py::test_what_one_rank_finds_all_ranks_raise.
    failed = torch.tensor(int(problem is not None), device=cut[0].device_mesh.device_type)
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
    cut = [p for p in model.parameters() if hasattr(p, "placements")]
    writes = not cut or dist.get_rank() == 0
    plan = _plan_shards(model, max_shard_bytes)
    parameters = dict(model.named_parameters())
    weight_map, written, problem = {}, [], None

    # The rank that writes goes on to gather after a failed write: the others are waiting for it.
    for n, names in enumerate(plan):
        place = f"-{n + 1:05}-of-{len(plan):05}" if len(plan) > 1 else ""
        file, tensors = f"model{place}.safetensors", {}
        for name in names:
            whole = parameters[name].detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            if not writes or problem is not None:
                continue
            for piece in _pieces(name, whole.shape, ()):
                part = whole if piece.expert is None else whole[piece.expert].clone()
                tensors[piece.name] = part.cpu().contiguous()
        if writes and problem is None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                written.append(directory / f"{file}.partial")
                _write_tensors(tensors, written[-1])
            except OSError as error:
                problem = error
            weight_map |= dict.fromkeys(tensors, file)
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


def _write_tensors(tensors, path) -> None:
    """One safetensors file; OSError that names it if the disk does not take it."""
    module = _safetensors()
    try:
        module.torch.save_file(tensors, path, metadata={"format": "pt"})
    except module.SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def _plan_shards(model, max_bytes) -> list[list[str]]:
    """Names of parameters, file by file."""
    plan, size = [[]], 0
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


# 10. check -----------------------------------------------------------------------------------

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
    """|a - b| / |b|, infinite for a NaN."""
    error = ((a.double() - b.double()).norm() / b.double().norm()).item()
    return error if error == error else math.inf


def _worst_gradient(model, got, want):
    """The largest relative error of a parameter's gradient, under one random upstream gradient."""
    upstream, parameters = torch.randn_like(want), list(model.parameters())
    grads = [torch.autograd.grad((x * upstream).sum(), parameters, retain_graph=True)
             for x in (got, want)]  # fmt: skip
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
        for path, error in _errors(tiny_model(model_type, **changes))
    ]
    try:
        rows += _measure().rows(cases, transformers)
    except ImportError as missing:
        print(f"SKIP ({missing}): RoPE types dynamic, yarn, llama3; the experts' grouped product "
              "and balance loss; the action expert as one stream; logits and gradients against "
              "transformers")  # fmt: skip
    print(f"{'path against its definition':55} relative error")
    for name, error, bound in rows:
        print(f"{name:55} {error:.1e}  {'ok' if error <= bound else f'FAILED, above {bound}'}")
    ok = all(error <= bound for _, error, bound in rows)
    exact = max(error for _, error, bound in rows if bound == 1e-12)
    print(json.dumps({"check": "models", "ok": ok, "max_error": exact}))
    return ok


def _errors(model, frequencies=defined_frequencies):
    """(path, error) of one model: values, gradients, packing, the cache, log-probs."""
    documents = [torch.randint(model.config.vocab_size, (n,)) for n in (7, 6, 1, 12)]
    truth = torch.cat([definition(model, d, frequencies) for d in documents])
    alone = torch.cat([model(d[None])[0] for d in documents])
    yield "one at a time", _relative(alone, truth)
    yield "gradient, worst parameter", _worst_gradient(model, alone, truth)
    with torch.no_grad():
        # two rows of two documents, one PAD before each
        tokens = torch.cat([F.pad(d, (1, 0)) for d in documents]).view(2, 15)
        positions = torch.cat([torch.arange(-1, len(d)) for d in documents]).view(2, 15)
        ids = torch.where(positions < 0, -1, (positions < 0).cumsum(1))
        packed = model(tokens, positions=positions, attention=packed_attention(doc_ids=ids))
        yield "packed, PAD anywhere", _relative(packed[ids >= 0], truth)
        yield "cache, ragged rows", _relative(*_by_cache(model, documents, truth))
    logp = (truth / 0.7).log_softmax(-1)
    targets = torch.randint(model.config.vocab_size, (len(truth),))
    hidden = torch.cat([model.hidden(d[None])[0] for d in documents])
    options = dict(temperature=0.7, softcap=model.config.final_logit_softcapping, chunk=5)
    got = torch.stack(token_logprobs(hidden, model.head_weight, targets, **options))
    want = torch.stack([logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
    yield "log-probs and entropy in chunks", _relative(got, want)
    yield "gradient in chunks, worst parameter", _worst_gradient(model, got, want)


def _by_cache(model, documents, truth):
    """Logits by halves as a ragged batch of prompts, then token by token, and the same of truth."""
    got, want = [], []
    parts = zip(documents, truth.split([len(d) for d in documents]))
    rows = [(d, z, (len(d) + 1) // 2) for d, z in parts]
    cache, logits = prefill(model, [d[:n].tolist() for d, _, n in rows])
    while True:
        got, want = [*got, *logits], [*want, *(z[n - 1] for _, z, n in rows)]
        keep = [b for b, (d, _, n) in enumerate(rows) if n < len(d)]
        if not keep:
            return torch.stack(got), torch.stack(want)
        cache.select(keep)
        rows = [(d, z, n + 1) for d, z, n in (rows[b] for b in keep)]
        logits = extend(model, cache, torch.stack([d[n - 1 : n] for d, _, n in rows]))


# 11. main ------------------------------------------------------------------------------------

def _measure():
    """tests/measure_models.py, if it is there."""
    folder = str(Path(__file__).resolve().parent / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    return __import__("measure_models")


def main(argv) -> int:
    """check is here; inspect, bench and control in tests/measure_models.py. The exit code."""
    try:
        code = _command(argv)
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`). What is still buffered would fail once
        # more as Python ends, so it goes nowhere; 141 is what a shell gives for such an end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _command(argv) -> int:
    if argv == ["check"]:
        return 0 if check() else 1
    inspects = argv[:1] == ["inspect"] and len(argv) == 2
    if inspects or argv[:1] in (["bench"], ["control"]):
        try:
            return _measure().main(argv)
        except ModuleNotFoundError as missing:
            print(f"{argv[0]} needs tests/measure_models.py: {missing}", file=sys.stderr)
        except ValueError as error:
            if not inspects:
                raise
            print(error, file=sys.stderr)  # what is wrong with the checkpoint, in one line
            return 1
    print("usage: python models.py check | inspect DIR | bench | control", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

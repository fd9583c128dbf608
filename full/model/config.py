"""Read a model's shape from a config.json, write it back, and refuse values that fit no model.

To add a family, write a row of FAMILIES, and its rules into `config_from`. A difference that no
field of ModelConfig can express needs a field, an equation and a line in `models.Definition` or
`hf.full_definition`.

Equation (5) is in models.py, (11) in experts.py.

Letters:  D width of a head, d half of it

References: Llama arXiv:2407.21783; Mistral arXiv:2310.06825; Qwen2 arXiv:2407.10671; Qwen3
arXiv:2505.09388; Gemma 3 arXiv:2503.19786; YaRN arXiv:2309.00071.
"""

import dataclasses
import json
import math
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import models
from models import ACTIVATIONS, FULL, SLIDING

LINEAR = "linear_attention"  # a type of layer: gated DeltaNet, see deltanet.py

LORA_ALPHA = 32.0  # of every run: with AdamW, to change it is nearly to change the learning rate


class Lora(NamedTuple):
    """Store the size and place of a model's factors: `model.lora`, see lora.py."""

    rank: int  # r
    alpha: float
    targets: tuple  # last names of the matrices, such as "q_proj"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass
class ModelConfig(models.ModelConfig):
    """Store the shape of a `Transformer`. ValueError for values that describe no model.

    Field names are Hugging Face's wherever it has one. A family is a set of values: see FAMILIES.
    """

    model_type: str = "qwen3"  # a key of FAMILIES
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    router_bias_rate: float = 0.0  # the rate of (11). 0: the router has no bias
    partial_rotary_factor: float = 1.0  # the part of a head that RoPE turns
    attn_output_gate: bool = False  # of softmax layers: deltanet.GatedAttention
    linear_conv_kernel_dim: int = 0  # tokens of a convolution; this and the rest in LINEAR layers
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0

    def __post_init__(self):
        for name in (*models.SIZES, "head_dim"):
            require_size(name, getattr(self, name))
        ropes = self.rope_parameters
        super().__post_init__()
        self.rope_parameters.pop(LINEAR, None)

        kinds = {*self.layer_types}
        key_heads, value_heads = self.linear_num_key_heads, self.linear_num_value_heads
        linear = (key_heads, value_heads, self.linear_key_head_dim, self.linear_value_head_dim,
                  self.linear_conv_kernel_dim)  # fmt: skip
        experts = self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size
        is_wrong = {  # field -> has it a value that fits no model?
            "layer_types": len(self.layer_types) != self.num_hidden_layers
                or not (kinds <= {FULL, SLIDING} or kinds == {FULL, LINEAR}),
            "attn_output_gate": self.attn_output_gate and SLIDING in kinds,
            "linear_num_value_heads":
                LINEAR in kinds and (min(linear) < 1 or value_heads % key_heads > 0),
            "partial_rotary_factor":  # only gated attention turns a part of a head
                not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2
                or not (self.attn_output_gate or self.rotary_dim == self.head_dim),
            "num_key_value_heads": self.num_attention_heads % self.num_key_value_heads,
            "head_dim": self.head_dim % 2,
            "hidden_act": self.hidden_act not in ACTIVATIONS,
            "sliding_window": SLIDING in kinds and (self.sliding_window or 0) < 1,
            "sparse_layers": {*self.sparse_layers} - {*range(self.num_hidden_layers)},
            "num_experts": self.sparse_layers and min(experts) < 1,
            "num_experts_per_tok": self.num_experts_per_tok > self.num_experts,
            "query_pre_attn_scalar":
                self.query_pre_attn_scalar is not None and self.query_pre_attn_scalar <= 0,
            "rope_parameters": ropes.keys() - {FULL, SLIDING},
        }  # fmt: skip
        not_negative = "rms_norm_eps", "initializer_range", "router_bias_rate"
        is_wrong |= {name: getattr(self, name) < 0 for name in not_negative}
        got = [f"{name} {getattr(self, name)}" for name in is_wrong if is_wrong[name]]
        if got:
            raise ValueError(f"expected a {self.model_type} model, got {', '.join(got)}")
        for kind, rope in self.rope_parameters.items():
            rope = complete_rope(rope, self.rotary_dim, self.max_position_embeddings)
            self.rope_parameters[kind] = rope

            # YaRN is for positions up to factor x original, whatever length a file repeats.
            if rope["rope_type"] == "yarn":
                reach = min(rope["factor"] * rope["original_max_position_embeddings"], 2**28)
                self.max_position_embeddings = max(self.max_position_embeddings, int(reach))

    @classmethod
    def from_hf(cls, raw, /) -> "ModelConfig":
        """Read a Hugging Face config: a directory, a config.json, or the dict itself.

        Absent fields get transformers' defaults. A field that would change the numbers and is not
        implemented is a ValueError that names it.
        """
        where = ""
        if not isinstance(raw, dict):
            path = Path(raw) / "config.json" if Path(raw).is_dir() else Path(raw)
            raw = read_json(path, what="the config of a Hugging Face checkpoint directory")
            where = f"{path}: "
        try:
            return config_from(raw)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{where}{error}") from error

    def frequencies(self, kind):
        """Return the scaled frequencies of (5) in a type of layer, one for every two entries."""
        return rope_frequencies(self.rope_parameters[kind], self.rotary_dim)[0]

    @property
    def rotary_dim(self) -> int:
        """Return the number of entries of a head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    def to_hf(self) -> dict:
        """Return the config.json that transformers 4 and 5 and `from_hf` read back to this."""
        name, _, defaults = FAMILIES[self.model_type]
        ropes = {kind: dict(rope) for kind, rope in self.rope_parameters.items()}
        full = ropes.get(FULL) or ropes[SLIDING]
        # The fields that transformers' class reads. Some have another form, which is added below.
        added = "layer_types", "partial_rotary_factor", "rope_parameters", "sliding_window"
        raw = {name: x for name, x in vars(self).items() if name in defaults and name not in added}
        raw |= dict(
            model_type=self.model_type, architectures=[name], attention_bias=self.o_bias,
            attention_dropout=0.0, initializer_range=self.initializer_range,
            eos_token_id=list(self.eos_token_id) or None,
            rope_parameters=full, rope_theta=full["rope_theta"],
            rope_scaling=None if full["rope_type"] == "default" else full,
        )  # fmt: skip
        if self.model_type == "gemma3_text":
            raw |= dict(hidden_activation=raw.pop("hidden_act"), rope_parameters=ropes)
            raw.pop("rope_scaling")
            if SLIDING in ropes:
                raw |= dict(rope_local_base_freq=ropes[SLIDING]["rope_theta"])
        if self.model_type == "qwen3_5_text":
            part = dict(partial_rotary_factor=self.partial_rotary_factor)
            raw |= dict(rope_parameters=full | part, rope_scaling=None)
        if self.sliding_window or self.model_type == "mistral":  # where an absent one means 4096
            raw |= dict(sliding_window=self.sliding_window)
        if self.model_type not in ("llama", "mistral"):  # these would be read as other families
            raw |= dict(layer_types=list(self.layer_types))
            raw |= dict(use_sliding_window=SLIDING in self.layer_types)
        if self.num_experts:
            dense = sorted({*range(self.num_hidden_layers)} - {*self.sparse_layers})
            raw |= dict(mlp_only_layers=dense, decoder_sparse_step=1)

        # Read it back: a family's config cannot express every ModelConfig.
        without_bias = dataclasses.replace(self, router_bias_rate=0.0)
        where = f"a {self.model_type} config cannot say this: it"
        require_same_numbers(config_from(raw), without_bias, where)
        return raw


def require_size(name, size) -> None:
    """Raise a ValueError unless a size of a model is a positive integer, and not absurd."""
    if type(size) is not int or size < 1:
        raise ValueError(f"{name}: expected a positive integer, got {reprlib.repr(size)}")

    # Bytes of a matrix must fit into 63 bits, and RoPE allocates head_dim / 2 frequencies.
    most = 2**16 if name in ("num_hidden_layers", "head_dim") else 2**28
    if size > most:
        raise ValueError(f"{name}: expected at most {most}, got {size}")


# transformers' defaults for what a config.json may leave out, of most families.
QWEN = models.COMMON | dict(zip(models.SIZES, models.FAMILIES["qwen2"][1]))


def base_family(family):
    """Return how the equations of a family of models.py differ, and its defaults."""
    differs, sizes, own = models.FAMILIES[family]
    return differs, models.COMMON | dict(zip(models.SIZES, sizes)) | own


FAMILIES = {  # model_type -> (transformers' class, what differs in its equations, defaults)
    # Biases of q, k, v and o, and of the MLP, by the config. RoPE of type llama3.
    "llama": ("LlamaForCausalLM", *base_family("llama")),
    # No biases. A window in every layer, or none.
    "mistral": ("MistralForCausalLM", *base_family("mistral")),
    # Biases of q, k and v.
    "qwen2": ("Qwen2ForCausalLM", *base_family("qwen2")),
    # Norms of q and k, a width of heads of its own.
    "qwen3": ("Qwen3ForCausalLM", *base_family("qwen3")),
    # And experts, in all layers or in some.
    "qwen3_moe": ("Qwen3MoeForCausalLM", *base_family("qwen3_moe")),
    # Norms with 1 + w, four of them a layer, sqrt(M), two RoPE bases: layers slide, but every 6th.
    "gemma3_text": ("Gemma3ForCausalLM", *base_family("gemma3_text")),
    # Recurrent layers, but every 4th. Norms with 1 + w, gated attention, RoPE on a part of a head.
    "qwen3_5_text": ("Qwen3_5ForCausalLM", dict(norm_offset=True), QWEN | dict(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, attn_output_gate=True,
        partial_rotary_factor=0.25, full_attention_interval=4, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
        linear_num_value_heads=32, layer_types=[])),
}  # fmt: skip

ENDS = {"llama": 2, "mistral": 2, "gemma3_text": 1}  # the defaults of eos_token_id


IN_WORDS = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string",
            list: "a list of layers", dict: "an object"}  # fmt: skip


def typed_settings(raw, defaults) -> dict:
    """Return the settings of a config.json that have defaults; ValueError for another type."""
    # As in `models.read_config`, the type is the default's, or an integer if that is None.
    settings = {name: raw.get(name, default) for name, default in defaults.items()}
    for name, value in settings.items():
        default = defaults[name]
        kind = int if default is None else type(default)
        is_nullable = name in ("num_key_value_heads", "sliding_window") or default in (None, [], {})
        if value is None and is_nullable:
            continue
        # Python takes true for the number 1. A list holds the names of layers, or their numbers.
        fits = type(value) is kind or (type(value), kind) == (int, float)
        if fits and kind is list:
            fits = {*map(type, value)} <= {str if name == "layer_types" else int}
        if not fits or kind is float and not abs(value) <= sys.float_info.max:
            raise ValueError(f"{name}: expected {IN_WORDS[kind]}, got {reprlib.repr(value)}")
    return settings


def text_config(raw) -> dict:
    """Return the language model's part of a multimodal config.json, or a text model's as it is."""
    inner = typed_settings(raw, {"text_config": {}})["text_config"]
    if not inner:
        return raw
    # The ends of turns, and tying, may stand outside.
    outer = {name: raw[name] for name in ("eos_token_id", "tie_word_embeddings")
             if raw.get(name) is not None}  # fmt: skip
    return {"model_type": f"{raw.get('model_type')}_text"} | inner | outer


def config_from(raw) -> ModelConfig:
    """Return the `ModelConfig` of a config.json's dict, in either spelling of transformers."""
    raw = text_config(raw)
    family = raw.get("model_type")
    if family not in [*FAMILIES]:
        raise ValueError(f"model_type: expected one of {', '.join(FAMILIES)}, got {family!r}")
    _, differs, defaults = FAMILIES[family]
    settings = typed_settings(raw, defaults | dict(initializer_range=0.02))
    for name in ("num_hidden_layers", "num_attention_heads", "decoder_sparse_step",
                 "full_attention_interval"):  # these are computed with below
        require_size(name, settings.get(name, 1))
    require_implemented(raw, family, settings)
    ends = end_tokens(raw, family)

    # Most fields are computed as in models.py.
    every = settings.get("full_attention_interval")
    if every and not settings["layer_types"]:
        layers = range(settings["num_hidden_layers"])
        settings["layer_types"] = [LINEAR if (n + 1) % every else FULL for n in layers]
    fields = models.config_fields(settings, differs)
    kinds = {*fields["layer_types"]}
    ropes = {kind: rope_from(fields["rope_parameters"][kind], raw, family)
             for kind in kinds & {FULL, SLIDING}}  # fmt: skip

    # The part that RoPE turns may stand at the top or among the parameters of RoPE.
    parts = [raw.get("partial_rotary_factor", settings.get("partial_rotary_factor"))]
    parts += [rope.pop("partial_rotary_factor", None) for rope in ropes.values()]
    own = {x.name: settings[x.name] for x in dataclasses.fields(ModelConfig) if x.name in settings}
    return ModelConfig(**own | fields | dict(
        model_type=family, partial_rotary_factor=[1.0, *(x for x in parts if x is not None)][-1],
        sliding_window=fields["sliding_window"] if SLIDING in kinds else None,
        rope_parameters=ropes, eos_token_id=ends,
    ))  # fmt: skip


def require_implemented(raw, family, settings) -> None:
    """Raise a ValueError for a setting that would change the numbers and has no equation here."""
    unsupported = {name: raw.get(name) for name in models.NOT_HERE} | dict(
        is_causal=raw.get("is_causal") is False,
        attn_output_gate=not settings.get("attn_output_gate", True))  # fmt: skip
    for name in filter(unsupported.get, unsupported):
        raise ValueError(f"{name} {reprlib.repr(raw[name])}: not implemented here")
    layer_types = raw.get("layer_types") or ()
    if family in ("mistral", "qwen3_moe") and len({*layer_types}) > 1:
        raise ValueError(f"layer_types {layer_types} in {family}: transformers has no mix")
    if family == "gemma3_text" and settings["sliding_window"] is None:
        raise ValueError("sliding_window: expected an integer, got None")


def end_tokens(raw, family) -> tuple:
    """Return the ids that end a turn: one, a list, or the family's default."""
    ends = raw.get("eos_token_id", ENDS.get(family))
    ends = [x for x in (ends if isinstance(ends, list) else [ends]) if x is not None]
    if any(type(x) is not int for x in ends):
        raise ValueError(f"eos_token_id: expected integers, got {ends}")
    return tuple(ends)


def rope_from(rope, raw, family) -> dict:
    """Return RoPE's parameters of a type of layer, in today's spelling. rope: as the file has it.
    """
    words = {"type": "rope_type"}  # older files
    rope = {words.get(key, key): x for key, x in rope.items()}
    if family == "qwen3_5_text":
        # M-RoPE has three positions a token. In text they are equal: its sections turn identically.
        rope = {key: x for key, x in rope.items() if not key.startswith("mrope_")}
    trained = raw.get("original_max_position_embeddings")
    if trained and rope.get("rope_type") in ("yarn", "llama3"):  # outside, in older files
        rope["original_max_position_embeddings"] = trained
    return rope


ROPE_TYPES = {  # rope_type -> the keys that it needs, and those that it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor",
                "original_max_position_embeddings"), ()),
    "yarn": (("factor", "original_max_position_embeddings"),
             ("attention_factor", "beta_fast", "beta_slow")),
}  # fmt: skip


def complete_rope(rope, head_dim, max_positions) -> dict:
    """Return RoPE parameters with their defaults; ValueError for what (5) does not cover.

    max_positions: int. The positions of the training, where the parameters do not say them.
    """
    rope = {"rope_type": "default"} | rope
    kind = rope["rope_type"]
    if kind not in [*ROPE_TYPES]:
        raise ValueError(f"rope_type: expected one of {[*ROPE_TYPES]}, got {kind!r}")
    needed, optional = ROPE_TYPES[kind]
    if "original_max_position_embeddings" in needed:
        rope.setdefault("original_max_position_embeddings", max_positions)

    # A key that is not known here may change the angles, so it is refused and not ignored.
    unknown = sorted(rope.keys() - {"rope_type", "rope_theta", *needed, *optional})
    missing = [key for key in needed if rope.get(key) is None]
    if unknown or missing:
        raise ValueError(f"rope_parameters of rope_type {kind}: expected {['rope_theta', *needed]},"
                         f" unknown {unknown}, missing {missing}")  # fmt: skip

    # Numbers that are possible one by one may still divide by zero together.
    try:
        f_d, factor = rope_frequencies(rope, head_dim)
        if not (f_d.isfinite().all() and math.isfinite(factor)):
            raise ValueError("they are not finite")
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"rope_parameters {rope} give no angles: {error}") from error
    return rope | {"rope_theta": float(rope["rope_theta"])}


def rope_frequencies(rope, head_dim, /):
    """Return f of (5), (D/2,) float64 on the CPU, and a factor for cos and sin.

    rope: {"rope_type", "rope_theta", ..}. The types other than default reach beyond the lengths of
        the training, by turning more slowly.
    """
    with torch.device("cpu"):
        n_d = torch.arange(head_dim // 2, dtype=torch.float64)
    f_d = rope["rope_theta"] ** (-2 * n_d / head_dim)
    factor = rope.get("factor")
    if rope["rope_type"] == "linear":
        return f_d / factor, 1.0

    # Llama 3: pairs that turn often over the trained length stay as they are, pairs that turn
    # seldom are divided by the factor, and in between the two are mixed.
    if rope["rope_type"] == "llama3":
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        turns_d = rope["original_max_position_embeddings"] * f_d / (2 * math.pi)
        keep_d = ((turns_d - low) / (high - low)).clamp(0, 1)
        return torch.lerp(f_d / factor, f_d, keep_d), 1.0

    # YaRN: the same with a ramp that is linear in n, between the n that turn beta times. The factor
    # on cos and sin keeps attention as sharp as before the stretching.
    if rope["rope_type"] == "yarn":
        trained = rope["original_max_position_embeddings"] / (2 * math.pi)
        scale = head_dim / (2 * math.log(rope["rope_theta"]))
        low = max(math.floor(scale * math.log(trained / (rope.get("beta_fast") or 32))), 0)
        high = math.ceil(scale * math.log(trained / (rope.get("beta_slow") or 1)))
        high = min(high, head_dim - 1)
        stretched_d = ((n_d - low) / ((high - low) or 0.001)).clamp(0, 1)
        grown = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return torch.lerp(f_d, f_d / factor, stretched_d), rope.get("attention_factor") or grown
    return f_d, 1.0


NOT_COMPUTED_WITH = "initializer_range", "eos_token_id"  # fields of no trained model's equations


def require_same_numbers(config, other, where) -> None:
    """Raise a ValueError if a model of the other configuration would compute something else."""
    for f in dataclasses.fields(config):
        value, other_value = getattr(config, f.name), getattr(other, f.name)
        if f.name not in NOT_COMPUTED_WITH and value != other_value:
            raise ValueError(f"{where} has {f.name} {value}, the model {other_value}")


def read_json(path, /, *, what="a JSON file") -> dict:
    """Return the object in a JSON file. Whatever is wrong with it is a ValueError that names it.

    what: what the file should be, for the message.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"no {path}; expected {what}") from error
    except OSError as error:  # a directory, no permission, a broken disk
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{path} is JSON of another kind: expected an object, got a {kind}")
    return content

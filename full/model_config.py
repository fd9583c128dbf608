"""The shape of a model: adds config.json and RoPE for long contexts to `models.ModelConfig`.

`ModelConfig` adds to `models.ModelConfig` what checkpoints, critics and balanced routers need, and
refuses values that make no model. To add a family, write a row of FAMILIES, and its rules into
`read_config`. A difference that no field of ModelConfig can say needs a field, an equation and a
line in `models.logits_definition` or `hf.full_definition`.

Equation (5) is in models.py, (7') in logprobs.py, (11) in experts.py.

Letters:  D width of a head   X any number

References: Llama arXiv:2407.21783; Mistral arXiv:2310.06825; Qwen2 arXiv:2407.10671; Qwen3
arXiv:2505.09388; Gemma 3 arXiv:2503.19786; YaRN arXiv:2309.00071.
"""

import dataclasses
import json
import math
import reprlib
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType

import torch

import models
from models import ACTIVATIONS, FULL, SLIDING


@dataclass
class ModelConfig(models.ModelConfig):
    """The shape of a `Transformer`. ValueError for values that describe no model.

    Field names are Hugging Face's wherever it has one. A family is a set of values: see FAMILIES.
    """

    model_type: str = "qwen3"  # a key of FAMILIES
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    final_logit_softcapping: float | None = None  # c of (7')
    router_bias_rate: float = 0.0  # the rate of (11). 0: the router has no bias
    value_head: bool = False  # a critic, see `Transformer.values`

    def __post_init__(self):
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
            "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            require_size(name, getattr(self, name))
        given = self.rope_parameters
        super().__post_init__()

        # What is needed -> is it met?
        layers = range(self.num_hidden_layers)
        kinds = set(self.layer_types)
        experts = (self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size)
        needs = {
            f"layer_types: {len(layers)} of {FULL} or {SLIDING}":
                len(self.layer_types) == len(layers) and kinds <= {FULL, SLIDING},
            "num_attention_heads: a multiple of num_key_value_heads":
                self.num_attention_heads % self.num_key_value_heads == 0,
            "head_dim: an even number, for RoPE": self.head_dim % 2 == 0,
            f"hidden_act (or hidden_activation): one of {[*ACTIVATIONS]}":
                self.hidden_act in ACTIVATIONS,
            "sliding_window: a positive number, for sliding layers":
                SLIDING not in kinds or (self.sliding_window or 0) > 0,
            "sparse_layers: numbers of layers": set(self.sparse_layers) <= set(layers),
            "num_experts, num_experts_per_tok, moe_intermediate_size: positive in sparse layers":
                not self.sparse_layers or min(experts) > 0,
            "num_experts_per_tok: at most num_experts":
                self.num_experts_per_tok <= self.num_experts,
            "rms_norm_eps, initializer_range, router_bias_rate: not negative":
                min(self.rms_norm_eps, self.initializer_range, self.router_bias_rate) >= 0,
            "query_pre_attn_scalar, final_logit_softcapping: positive, or null":
                all(x is None or x > 0
                    for x in (self.query_pre_attn_scalar, self.final_logit_softcapping)),
            "eos_token_id: integers": all(isinstance(token, int) for token in self.eos_token_id),
            f"rope_parameters: for {FULL} or {SLIDING} layers": set(given) <= {FULL, SLIDING},
        }  # fmt: skip
        wrong = [need for need, met in needs.items() if not met]
        if wrong:
            raise ValueError(f"a {self.model_type} config needs {'; '.join(wrong)}; got {self}")
        for kind, rope in self.rope_parameters.items():
            self.rope_parameters[kind] = rope = self._complete_rope(rope)

            # YaRN is for positions up to factor x original, whatever length a file repeats.
            if rope["rope_type"] == "yarn":
                reach = min(rope["factor"] * rope["original_max_position_embeddings"], 2**28)
                self.max_position_embeddings = max(self.max_position_embeddings, int(reach))

    def _complete_rope(self, rope):
        """Return RoPE parameters with their defaults; ValueError for what (5) does not cover."""
        rope = {"rope_type": "default"} | rope
        kind = rope["rope_type"]
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type: expected one of {[*ROPE_TYPES]}, got {kind!r}")
        needed, optional = ROPE_TYPES[kind]
        if "original_max_position_embeddings" in needed:
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)

        # A key that is not known here may change the angles, so it is refused and not ignored.
        unknown = sorted(rope.keys() - {"rope_type", "rope_theta", *needed, *optional})
        missing = [key for key in needed if rope.get(key) is None]
        if unknown or missing:
            raise ValueError(
                f"rope_parameters of rope_type {kind}: expected {['rope_theta', *needed]}, unknown "
                f"{unknown}, missing {missing}"
            )

        # Numbers that are possible one by one may still divide by zero together.
        try:
            f_d, factor = rope_frequencies(rope, self.head_dim)
            if not (f_d.isfinite().all() and math.isfinite(factor)):
                raise ValueError("they are not finite")
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(f"rope_parameters {rope} give no angles: {error}") from error
        return rope

    @classmethod
    def from_hf(cls, raw, /) -> "ModelConfig":
        """Read a Hugging Face config: a directory, a config.json, or the dict itself.

        Absent fields get transformers' defaults. A field that would change the numbers and is not
        implemented is a ValueError that names it.
        """
        if isinstance(raw, dict):
            return read_config(raw)
        path = Path(raw) / "config.json" if Path(raw).is_dir() else Path(raw)
        raw = read_json(path, what="the config of a Hugging Face checkpoint directory")
        try:
            return read_config(raw)
        except ValueError as error:  # whatever is wrong with a field, say in which file
            raise ValueError(f"{path}: {error}") from error

    def frequencies(self, kind):
        """Return the D / 2 frequencies of (5), scaled, in a type of layer."""
        return rope_frequencies(self.rope_parameters[kind], self.head_dim)[0]

    def to_hf(self) -> dict:
        """Return the config.json that transformers 4 and 5 and `from_hf` read back to this."""
        return write_config(self)


def require_size(name, size) -> None:
    """Raise a ValueError unless a size of a model is a positive integer, and not absurd."""
    if not is_a(size, int) or size < 1:
        raise ValueError(f"{name}: expected a positive integer, got {reprlib.repr(size)}")

    # Bytes of a matrix must fit into 63 bits, and RoPE allocates head_dim / 2 frequencies.
    most = 2**16 if name in ("num_hidden_layers", "head_dim") else 2**28
    if size > most:
        raise ValueError(f"{name}: expected at most {most}, got {size}")


ROPE_TYPES = {  # rope_type -> the keys that it needs, and those that it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor",
                "original_max_position_embeddings"), ()),
    "yarn": (("factor", "original_max_position_embeddings"),
             ("attention_factor", "beta_fast", "beta_slow")),
}  # fmt: skip


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


class Rope:
    """positions (B, S) -> {layer type: (cos, sin)}, once a forward for all layers."""

    def __init__(self, config):
        ropes = config.rope_parameters.items()
        self.frequencies = {kind: rope_frequencies(rope, config.head_dim) for kind, rope in ropes}
        self.moved = {}  # (device, layer type) -> f of (5) there, as each copy waits for the device

    def __call__(self, positions_BS, dtype, /):
        # NUMERICS: the angles of position 10^5 need float32; a bf16 position is wrong from 257 on.
        # Pinned by tests/full/test_models.py::test_bf16_model_keeps_float32_rope_angles.
        wide = torch.promote_types(dtype, torch.float32)
        ropes = {}
        for kind, (f_d, factor) in self.frequencies.items():
            at = positions_BS.device, kind
            if at not in self.moved:
                self.moved[at] = f_d.to(positions_BS.device)
            cos_BS1D, sin_BS1D = models.cos_and_sin(positions_BS.to(wide), self.moved[at].to(wide))
            ropes[kind] = cos_BS1D * factor, sin_BS1D * factor
        return ropes


QWEN = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=32768,
    rms_norm_eps=1e-6, tie_word_embeddings=False, initializer_range=0.02, rope_theta=10000.0,
    sliding_window=4096, max_window_layers=28, attention_bias=False, hidden_act="silu",
)  # fmt: skip

LLAMA = QWEN | dict(
    vocab_size=32000, intermediate_size=11008, num_key_value_heads=None,
    max_position_embeddings=2048, eos_token_id=2,
)  # fmt: skip

FAMILIES = {  # model_type -> (transformers' class, what differs in its equations, defaults)
    # Biases of q, k, v and o, and of the MLP, by the config. RoPE of type llama3.
    "llama": ("LlamaForCausalLM", models.FAMILIES["llama"], LLAMA | dict(mlp_bias=False)),
    # No biases. A window in every layer, or none.
    "mistral": ("MistralForCausalLM", models.FAMILIES["mistral"], LLAMA | dict(
        intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072)),
    # Biases of q, k and v.
    "qwen2": ("Qwen2ForCausalLM", models.FAMILIES["qwen2"], QWEN),
    # Norms of q and k, a width of heads of its own.
    "qwen3": ("Qwen3ForCausalLM", models.FAMILIES["qwen3"], QWEN | dict(head_dim=128)),
    # And experts, in all layers or in some.
    "qwen3_moe": ("Qwen3MoeForCausalLM", models.FAMILIES["qwen3_moe"], QWEN | dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False,
        decoder_sparse_step=1)),
    # Norms with 1 + w, four of them a layer, sqrt(M), two RoPE bases: layers slide, but every 6th.
    "gemma3_text": (
        "Gemma3ForCausalLM",
        models.FAMILIES["gemma3_text"],
        QWEN | dict(
            vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
            num_attention_heads=8, num_key_value_heads=4, head_dim=256, rope_theta=1e6,
            max_position_embeddings=131072, tie_word_embeddings=True, eos_token_id=1,
            hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
            final_logit_softcapping=None)),
}  # fmt: skip

SAME = (  # of one name and meaning in config.json and in ModelConfig
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "initializer_range",
)  # fmt: skip

MAYBE = (  # the same, in families whose defaults have them; ignored in others, as by transformers
    "query_pre_attn_scalar", "final_logit_softcapping", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "norm_topk_prob", "mlp_bias", "value_head",
)  # fmt: skip

REFUSED = "attention_dropout", "use_bidirectional_attention", "quantization_config"


# The types of config.json's fields. ModelConfig's annotations say the types of the fields that mean
# the same there. ModelConfig has the fields of this list in another form, or not at all.
FILE_TYPES = typing.get_type_hints(ModelConfig) | dict(
    head_dim=int | None, num_key_value_heads=int | None, eos_token_id=int | list[int] | None,
    text_config=dict | None, dtype=str | None, torch_dtype=str | None, hidden_act=str | None,
    hidden_activation=str | None, attention_bias=bool, layer_types=list[str] | None,
    use_sliding_window=bool | None, max_window_layers=int, sliding_window_pattern=int | None,
    _sliding_window_pattern=int | None, num_local_experts=int | None, decoder_sparse_step=int,
    mlp_only_layers=list[int] | None, rope_theta=float, rope_local_base_freq=float,
    rope_scaling=dict | None, rope_parameters=dict | None, partial_rotary_factor=float | None,
    original_max_position_embeddings=int | None, attention_dropout=float | None,
    use_bidirectional_attention=bool | None, quantization_config=dict | None,
)  # fmt: skip

# And of the fields of rope_scaling and rope_parameters, which may hold an object for each type of
# layer. The other fields are numbers.
ROPE_FIELDS = {
    **{name: float | None for pair in ROPE_TYPES.values() for names in pair for name in names},
    FULL: dict | None, SLIDING: dict | None, "partial_rotary_factor": float | None,
    "rope_theta": float, "rope_type": str, "type": str,
}  # fmt: skip

TYPE_NAMES = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false",
              dict: "an object", NoneType: "null"}  # fmt: skip


def is_a(value, kind) -> bool:
    """Return whether a value of a JSON file has the type of an annotation."""
    # true is not the number 1, and 2.0 is not an integer, but 2 is a float.
    args = typing.get_args(kind)
    if isinstance(kind, UnionType):
        return any(is_a(value, one) for one in args)
    if args:
        return isinstance(value, list | tuple) and all(is_a(x, args[0]) for x in value)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind


def name_of_type(kind) -> str:
    """Return an annotation as a reader of a JSON file knows it."""
    args = typing.get_args(kind)
    if isinstance(kind, UnionType):
        return " or ".join(map(name_of_type, args))
    return f"a list (each {name_of_type(args[0])})" if args else TYPE_NAMES[kind]


def require_types(raw, kinds, where="") -> None:
    """Raise a ValueError that names the first field of another type than `kinds`, {field: type}."""
    for name, value in raw.items():
        if name in kinds and not is_a(value, kinds[name]):
            raise ValueError(f"{where}{name}: expected {name_of_type(kinds[name])}, got "
                             f"{reprlib.repr(value)}")  # fmt: skip


def read_config(raw) -> ModelConfig:
    """Return the `ModelConfig` of a config.json's dict, in either spelling of transformers."""
    # Multimodal: the language model's part. The ends of turns, and tying, may stand outside.
    outer = {key: raw[key] for key in ("eos_token_id", "tie_word_embeddings", "text_config")
             if raw.get(key) is not None}  # fmt: skip
    require_types(outer, FILE_TYPES)
    if inner := outer.pop("text_config", None):
        raw = {"model_type": f"{raw.get('model_type')}_text"} | inner | outer
    require_types(raw, {"model_type": str})
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type: expected one of {', '.join(FAMILIES)}, got {family!r}")
    _, differs, defaults = FAMILIES[family]
    raw = defaults | raw
    # A field of another family may have any value, as transformers does not read it either.
    foreign = {*MAYBE, "decoder_sparse_step"} - {"value_head", *defaults}
    foreign |= {"num_local_experts"} if "num_experts" in foreign else set()
    foreign |= {"layer_types"} if family == "llama" else set()
    require_types(raw, {name: FILE_TYPES[name] for name in FILE_TYPES.keys() - foreign})
    for name in ("rope_scaling", "rope_parameters"):
        ropes = raw.get(name) or {}
        require_types(ropes, ROPE_FIELDS, f"{name}.")
        for kind in (FULL, SLIDING):
            require_types(ropes.get(kind) or {}, ROPE_FIELDS, f"{name}.{kind}.")
    # The five compute with these.
    for name in ("num_hidden_layers", "num_attention_heads", "decoder_sparse_step"):
        require_size(name, raw.get(name, 1) if name not in foreign else 1)
    asked = [name for name in REFUSED if raw.get(name)]
    if asked:
        raise ValueError(f"config asks for {', '.join(asked)}: not implemented here")

    # Most fields are those of the five. Where no list says which layers slide, Gemma has a window.
    window = raw["sliding_window"]
    if family == "gemma3_text" and window is None:
        raise ValueError("sliding_window: expected a positive integer, got None")
    known = {name: x for name, x in raw.items() if name not in foreign}
    fields = models.config_fields(known, differs)
    kinds = tuple(fields["layer_types"])
    listed = raw.get("layer_types") or kinds
    if family in ("llama", "mistral", "qwen3_moe") and len(set(listed)) > 1:
        raise ValueError(f"layer_types {list(listed)} in {family}: transformers has no mix")

    eos = raw.get("eos_token_id")
    ends = eos if isinstance(eos, list | tuple) else [eos]
    more = (name for name in (*SAME, *MAYBE) if name not in foreign and raw.get(name) is not None)
    fields = {name: raw[name] for name in more} | fields | dict(
        sliding_window=window if SLIDING in kinds else None,
        rope_parameters={kind: read_rope(raw, kind) for kind in set(kinds)},
        eos_token_id=tuple(token for token in ends if token is not None),
    )  # fmt: skip
    return ModelConfig(**fields)


def read_rope(raw, kind) -> dict:
    """Return the RoPE parameters of a type of layer.

    transformers 4: rope_theta and rope_scaling. transformers 5: rope_parameters, and in Gemma one
    such dict for each type of layer; rope_scaling, if it is there too, wins. Sliding layers of
    Gemma have rope_local_base_freq and are never scaled.
    """
    scaling = raw.get("rope_scaling") or {}
    new = raw.get("rope_parameters") or {}
    theta = raw["rope_theta"]
    if raw["model_type"] == "gemma3_text":
        theta = raw.get("rope_local_base_freq", 10000.0) if kind == SLIDING else theta
        rope = (new.get(kind) or {}) | (scaling if kind == FULL else {})
    else:
        rope = scaling or new
    rope = {("rope_type" if key == "type" else key): value for key, value in rope.items()}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope_parameters per layer type in {raw['model_type']}: transformers has "
                         f"none, got {rope}")  # fmt: skip
    rope = {"rope_theta": theta, "rope_type": "default"} | rope
    partial_factors = rope.pop("partial_rotary_factor", None), raw.get("partial_rotary_factor")
    if any(factor not in (None, 1) for factor in partial_factors):
        raise ValueError("partial_rotary_factor other than 1: not implemented here")
    trained = raw.get("original_max_position_embeddings")
    if trained and rope["rope_type"] in ("yarn", "llama3"):  # outside the dict in older files
        rope["original_max_position_embeddings"] = trained
    return rope | {"rope_theta": float(rope["rope_theta"])}


def write_config(config) -> dict:
    """Return the config.json of a `ModelConfig`, in both spellings of transformers."""
    ropes = {kind: dict(rope) for kind, rope in config.rope_parameters.items()}
    full = ropes.get(FULL) or ropes[SLIDING]
    raw = {name: getattr(config, name) for name in SAME}
    raw |= {name: getattr(config, name) for name in MAYBE if getattr(config, name)}
    raw |= dict(
        architectures=[FAMILIES[config.model_type][0]], head_dim=config.head_dim,
        num_key_value_heads=config.num_key_value_heads, attention_bias=config.o_bias,
        attention_dropout=0.0, hidden_act=config.hidden_act,
        eos_token_id=list(config.eos_token_id) or None,
        rope_parameters=full, rope_theta=full["rope_theta"],
        rope_scaling=None if full["rope_type"] == "default" else full,
    )  # fmt: skip
    if config.model_type == "gemma3_text":
        raw |= dict(hidden_activation=raw.pop("hidden_act"), rope_parameters=ropes)
        raw |= dict(rope_local_base_freq=ropes[SLIDING]["rope_theta"]) if SLIDING in ropes else {}
        raw.pop("rope_scaling")
    if config.sliding_window or config.model_type == "mistral":  # where an absent one means 4096
        raw |= dict(sliding_window=config.sliding_window)
    if config.model_type not in ("llama", "mistral"):  # transformers takes these for others then
        raw |= dict(layer_types=list(config.layer_types))
        raw |= dict(use_sliding_window=SLIDING in config.layer_types)
    if config.num_experts:
        dense = sorted({*range(config.num_hidden_layers)} - {*config.sparse_layers})
        raw |= dict(mlp_only_layers=dense, decoder_sparse_step=1)

    # Written is right if it reads back: a family's config cannot say every ModelConfig.
    without_bias = dataclasses.replace(config, router_bias_rate=0.0)
    require_same_numbers(
        read_config(raw), without_bias, f"a {config.model_type} config cannot say this: it"
    )
    return raw


def require_same_numbers(config, other, where) -> None:
    """Raise a ValueError if a model of the other configuration would compute something else."""
    for f in dataclasses.fields(config):
        mine = getattr(config, f.name)
        theirs = getattr(other, f.name)
        if f.name not in ("initializer_range", "eos_token_id") and mine != theirs:
            raise ValueError(f"{where} has {f.name} {mine}, the model {theirs}")


def read_json(path, /, *, what="a JSON file") -> dict:
    """Return the object in a JSON file. Whatever is wrong with it is a ValueError that names it.

    what: what the file should be, for the message.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"no {path}; expected {what}") from error
    except OSError as error:  # a directory, no permission, a broken disk
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path} is JSON of another kind: expected an object, got a {kind}")
    return found

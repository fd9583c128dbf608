"""RoPE for long contexts: adds scaled frequencies to equation (5) of `models.py`.

A model that reads beyond the lengths of its training turns more slowly; skip that unless a
config.json has a rope_type. `Rope` computes cos and sin once a forward, for all layers.

Letters:  B rows   S tokens   D width of a head, d half of it

References: Llama 3 arXiv:2407.21783; YaRN arXiv:2309.00071.
"""

import math

import torch

import models

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
    if kind not in ROPE_TYPES:
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
    return rope


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
        self.frequencies = {kind: rope_frequencies(rope, config.rotary_dim) for kind, rope in ropes}
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
            f_d = self.moved[at].to(wide)
            cos_BS1D, sin_BS1D = models.cos_and_sin(positions_BS.to(wide), f_d, wide)
            ropes[kind] = cos_BS1D * factor, sin_BS1D * factor
        return ropes

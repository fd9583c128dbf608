"""Make tiny models of every family, with every option, and a task that needs no skill.

Checks and tests compare these models with their definitions in milliseconds. If you only train,
skip this file.
"""

import torch

from full.model.config import LINEAR, ModelConfig
from full.model.transformer import Transformer
from full.run.tasks import Task
from models import FULL, SLIDING

TINY = {  # what a tiny model of each family needs in addition to the sizes
    "llama": dict(qk_norm=False),
    "mistral": dict(qk_norm=False, layer_types=(SLIDING, SLIDING), sliding_window=5),
    "qwen2": dict(qk_norm=False, qkv_bias=True),
    "qwen3": dict(),
    "qwen3_moe": dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, sparse_layers=(1,),
        norm_topk_prob=True,
    ),
    "gemma3_text": dict(
        norm_offset=True, post_norms=True, scale_embedding=True, sliding_window=4,
        layer_types=(SLIDING, FULL), hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=12,
        tie_word_embeddings=True, rope_parameters={
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}  # fmt: skip
HYBRID = {  # and of a family with recurrent layers, whose gradients a small eps would magnify
    "qwen3_5_text": dict(
        norm_offset=True, attn_output_gate=True, partial_rotary_factor=0.4, rms_norm_eps=1e-2,
        num_hidden_layers=4, layer_types=(LINEAR, LINEAR, FULL, LINEAR), linear_conv_kernel_dim=4,
        linear_key_head_dim=6, linear_value_head_dim=5, linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
}  # fmt: skip


def tiny(model_type="qwen3", **changes) -> ModelConfig:
    """Return a small configuration with grouped heads and nothing square, for tests."""
    base = dict(
        vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=10,
        num_attention_heads=4, num_key_value_heads=2, model_type=model_type, initializer_range=0.3,
    )  # fmt: skip
    return ModelConfig(**base | (TINY | HYBRID)[model_type] | changes)


def tiny_model(model_type="qwen3", seed=1, dtype=torch.float64, **changes) -> Transformer:
    """Return a `tiny` model whose norms and biases differ from their neutral values."""
    model = Transformer(tiny(model_type, **changes)).to(dtype).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator).to(dtype)
        for bias in model.buffers():  # of routers, in steps
            bias.copy_(torch.randint(-9, 9, bias.shape, generator=generator))
    return model


class TwoTurns(Task):
    """A task of two turns, in which any tokens will do and almost all rewards differ."""

    vocab_size, end = 13, (1,)

    def prompt(self, rng, index, held_out):
        return (0, index), rng.integers(2, 13, size=1 + index % 3).tolist()

    def reply(self, state, answer):
        # Every fourth group has equal rewards, which dynamic sampling drops.
        turn, index = state
        checksum = sum(n * token for n, token in enumerate(answer, 1)) % 7
        reward = 0.0 if index % 4 == 3 else checksum / 7
        return (turn + 1, index), None if turn else [5, 6], reward

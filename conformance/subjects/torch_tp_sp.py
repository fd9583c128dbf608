"""torch's `parallelize_module`, tensor and sequence parallelism, for a tiny Llama of transformers.

    python conformance/parallel.py conformance/subjects/torch_tp_sp.py

The plan is the one of torch's tutorial. The norms and the residual stream are split by tokens.
"""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
)  # fmt: skip
from transformers import LlamaConfig, LlamaForCausalLM

# The norms of transformers compute in float32.
SETTINGS = dict(mesh={1: dict(tp=1)}, tolerance=1e-5)
LAYER = {
    "input_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts=dict(hidden_states=Shard(1)),
        desired_input_kwarg_layouts=dict(hidden_states=Replicate())),
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "post_attention_layernorm": SequenceParallel(),
    "mlp": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
}  # fmt: skip
MODEL = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def build():
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    return LlamaForCausalLM(config), torch.randint(12, (4, 8))


def shard(model, mesh):
    layers = {f"model.layers.{n}.{name}": x for n in range(2) for name, x in LAYER.items()}
    return parallelize_module(model, mesh, {**MODEL, **layers})


def loss(model, batch):
    # The model would count positions in a rank's own tokens, and so gets them.
    positions = torch.arange(batch.shape[1])[None]
    return model(batch, labels=batch, position_ids=positions, use_cache=False).loss

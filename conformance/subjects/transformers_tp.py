"""The tensor parallelism that transformers gives a model by its `tp_plan`, for a tiny Llama.

    python conformance/parallel.py conformance/subjects/transformers_tp.py
    MODEL=apertus python conformance/parallel.py conformance/subjects/transformers_tp.py

MODEL is another model_type of transformers. MICRO_BATCHES is the number of backward passes a step.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer
from transformers.distributed.configuration_utils import DistributedConfig

# The norms of transformers compute in float32.
SETTINGS = dict(mesh={1: dict(tp=1)}, tolerance=1e-5)
transformers.logging.disable_progress_bar()
MODEL = os.environ.get("MODEL", "llama")
MICRO_BATCHES = int(os.environ.get("MICRO_BATCHES", 1))
EXPERTS = "eager"  # the other implementations have no float64
TINY = dict(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=4, tie_word_embeddings=False, pad_token_id=None,
    initializer_range=0.2,
)  # fmt: skip


def build():
    config = AutoConfig.for_model(MODEL, **TINY)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=EXPERTS)
    return model.eval(), torch.randint(12, (4, 8))  # without dropout


def shard(model, mesh):
    # Rank 0 saves the model, and all ranks load it as a user does.
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        model.save_pretrained(names[0], is_main_process=dist.get_rank() == 0)
        dist.barrier()
        config = DistributedConfig(tp_size=mesh.size())
        model = AutoModelForCausalLM.from_pretrained(
            names[0], distributed_config=config, dtype=torch.float64,
            experts_implementation=EXPERTS,
        )  # fmt: skip
        dist.barrier()
    return model.eval()


def clip(model, max_norm):
    # torch's clip_grad_norm_ refuses DTensors next to plain tensors. The Trainer calls this one.
    return Trainer._mixed_mesh_grad_norm(None, model, max_norm)


def loss(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def rank_loss(model, batch):
    # Equally many tokens in each micro-batch, so the loss is the mean of theirs.
    total = 0
    for part in batch.chunk(MICRO_BATCHES):
        value = loss(model, part) / MICRO_BATCHES
        value.backward()
        total += value.detach()
    return total

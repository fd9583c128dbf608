"""transformers' Trainer under DDP, for a tiny Mixtral with its auxiliary loss of load balancing.

    python conformance/parallel.py conformance/subjects/trainer_moe.py
    MICRO_BATCHES=2 AUXILIARY=0 python conformance/parallel.py conformance/subjects/trainer_moe.py

MICRO_BATCHES is gradient_accumulation_steps, AUXILIARY is router_aux_loss_coef. All rows are equal.
So the auxiliary loss of a part of the batch is the one of the whole batch, and the number of ranks
and micro-batches must not change the gradient.
"""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM, Trainer

SETTINGS = dict(ranks="mean", tolerance=1e-5)  # transformers has norms in float32
MICRO_BATCHES = int(os.environ.get("MICRO_BATCHES", 1))
AUXILIARY = float(os.environ.get("AUXILIARY", 0.1))


def build():
    config = MixtralConfig(
        vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, initializer_range=0.2,
        output_router_logits=True, router_aux_loss_coef=AUXILIARY, experts_implementation="eager",
    )  # fmt: skip
    return MixtralForCausalLM(config), torch.randint(12, (1, 8)).expand(8, 8).contiguous()


def shard(model, mesh):
    return DistributedDataParallel(model)


def loss(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def rank_loss(model, batch):
    # The fields that compute_loss reads, for the defaults of TrainingArguments. training_step does
    # not divide by the number of micro-batches, because the loss is divided by all tokens.
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = SimpleNamespace(
        args=SimpleNamespace(average_tokens_across_devices=True, n_gpu=1), label_smoother=None,
        compute_loss_func=None, model_accepts_loss_kwargs=True, get_tp_size=lambda: 1,
        accelerator=SimpleNamespace(num_processes=world, parallelism_config=None),
    )  # fmt: skip
    tokens, total = torch.tensor(batch[:, 1:].numel()), 0
    for part in batch.chunk(world)[rank].chunk(MICRO_BATCHES):
        inputs = dict(input_ids=part, labels=part, use_cache=False)
        value = Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=tokens)
        value.backward()
        total += value.detach()
    return total

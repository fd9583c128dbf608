"""accelerate: its recipe of gradient accumulation for language models, with a Llama under DDP.

    FIRST=1 python conformance/parallel.py conformance/subjects/accelerate_accumulation.py
    FIRST=0 python conformance/parallel.py conformance/subjects/accelerate_accumulation.py

The lines are those of examples/by_feature/gradient_accumulation_for_autoregressive_models.py. FIRST
gives the first token of each row a label, as in pre-training. Else a prompt of 2 tokens has none.
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

SETTINGS = dict(ranks="mean", tolerance=1e-5)  # transformers has norms in float32
FIRST, STEPS = os.environ.get("FIRST", "1") == "1", 2
CONFIG = LlamaConfig(vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                     num_attention_heads=2, initializer_range=0.2)  # fmt: skip


def build():
    ids = torch.randint(12, (8, 7))
    labels = ids.clone()
    for b in range(8):  # 0 to 3 tokens of padding
        labels[b, 7 - b % 4 :] = -100
    if not FIRST:
        labels[:, :2] = -100
    return LlamaForCausalLM(CONFIG), (ids, labels)


def shard(model, mesh):
    accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    model = accelerator.prepare(model)
    model.accelerator_of_it = [accelerator]
    return model


def loss(model, batch):
    """The mean over all tokens that are predicted."""
    ids, labels = batch
    logits = model(input_ids=ids).logits[:, :-1].double().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


def rank_loss(model, batch):
    accelerator, world, total = model.accelerator_of_it[0], dist.get_world_size(), 0
    ids, labels = (x.chunk(world)[dist.get_rank()] for x in batch)
    parts = [dict(input_ids=i, labels=y) for i, y in zip(ids.chunk(STEPS), labels.chunk(STEPS))]
    count = sum(part["labels"].ne(-100).sum() for part in parts)
    count = accelerator.gather(count).sum().item()
    for part in parts:
        value = model(**part, use_cache=False, num_items_in_batch=count).loss
        value = value * STEPS * accelerator.num_processes
        accelerator.backward(value)
        total += value.detach() / STEPS
    return total

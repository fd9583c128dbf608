"""TRL's GKDTrainer under DDP: a tiny Llama learns from another one, with equal micro-batches.

    python conformance/parallel.py conformance/subjects/trl_gkd.py
    GENERATED=4 python conformance/parallel.py conformance/subjects/trl_gkd.py --ranks 1

GENERATED is the length of the completions that the student generated in place of those in the data
set, which have 6 tokens. The trainer does that with the probability `lmbda`.
"""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from trl.experimental.gkd import GKDTrainer

SETTINGS = dict(ranks="mean", tolerance=1e-5)  # transformers has norms in float32
IN_DATA_SET = 6
GENERATED = int(os.environ.get("GENERATED", IN_DATA_SET))
PROMPT = 2
CONFIG = LlamaConfig(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=2, initializer_range=0.2,
)  # fmt: skip


def build():
    teacher = LlamaForCausalLM(CONFIG).double().requires_grad_(False)
    student = LlamaForCausalLM(CONFIG)
    student.teacher_of_it = [teacher]  # in a list: the student's parameters stay as they are
    return student, torch.randint(12, (8, PROMPT + GENERATED))


def shard(model, mesh):
    return DistributedDataParallel(model)


def compute_loss(model, batch, count):
    """Call GKDTrainer's compute_loss. count: num_items_in_batch, or None for the batch's mean."""
    labels = batch.clone()
    labels[:, :PROMPT] = -100
    inputs = dict(input_ids=batch, labels=labels, attention_mask=torch.ones_like(batch))
    student = getattr(model, "module", model)
    trainer = SimpleNamespace(
        teacher_model=student.teacher_of_it[0], beta=0.5,
        generalized_jsd_loss=GKDTrainer.generalized_jsd_loss,
    )  # fmt: skip
    return GKDTrainer.compute_loss(trainer, model, inputs, num_items_in_batch=count)


def loss(model, batch):
    return compute_loss(model, batch, None)


def rank_loss(model, batch):
    # transformers counts the labels of the data set on all ranks, before the student generates.
    # Two micro-batches a step: training_step does not divide the sum by their number.
    count, total = torch.tensor(len(batch) * IN_DATA_SET), 0
    for part in batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(2):
        value = compute_loss(model, part, count)
        value.backward()
        total += value.detach()
    return total

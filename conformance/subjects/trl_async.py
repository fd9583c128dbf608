"""TRL's experimental AsyncGRPOTrainer: compute_loss on one row of packed tokens.

    python conformance/loss.py conformance/subjects/trl_async.py:loss
"""

import time
from collections import defaultdict
from types import SimpleNamespace

import torch
from take import Anything, take

A = take("trl:experimental/async_grpo/async_grpo_trainer.py", "compute_loss", time=time,
         nanmin=torch.min, nanmax=torch.max)  # fmt: skip
SETTINGS = dict(clip_low=0.2, clip_high=0.28, ranks="mean")


def loss(batch):
    """Call the loss. global_n_tokens counts one micro-batch's tokens on all ranks."""
    c, on = batch.settings, batch.mask.flatten()
    index = torch.where(on, torch.arange(len(on)), -1)[None]
    ones = dict.fromkeys(("global_n_forward_tokens", "mean_seq_len"), torch.ones(1))
    indices = dict.fromkeys(("input_ids", "position_ids", "shift_labels", "token_index",
                             "tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), index)
    inputs = ones | indices | dict(
        attention_mask=torch.ones_like(index), segment_id=torch.zeros_like(index),
        old_log_probs=batch.old.flatten()[None], tree_max_seqlens=torch.ones(1, 2),
        advantages=batch.advantage.flatten()[None],
        global_n_tokens=torch.tensor([float(batch.micro_step_tokens)]))  # fmt: skip
    counters = ("_step_forward_tokens", "_step_trained_tokens", "_step_seq_len_weighted",
                "_step_samples", "_step_forward_s")  # fmt: skip
    trainer = SimpleNamespace(
        **dict.fromkeys(counters, 0), aux_loss_enabled=False, state=Anything(), args=Anything(),
        epsilon_low=c["clip_low"], epsilon_high=c["clip_high"],
        current_gradient_accumulation_steps=batch.micro_batches,
        accelerator=SimpleNamespace(num_processes=batch.ranks, reduce=lambda x, **_: x,
                                    gather=lambda x: x),
        _metrics=defaultdict(lambda: defaultdict(list)))  # fmt: skip

    def model(**_):
        return SimpleNamespace(log_probs=batch.lp, entropy=torch.zeros_like(batch.lp))

    return A.compute_loss(trainer, model, inputs)

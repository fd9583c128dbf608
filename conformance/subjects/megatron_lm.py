"""Megatron-LM: calculate_grpo_loss, and loss_func of train_rl.py.

    SOURCES=DIR python conformance/loss.py conformance/subjects/megatron_lm.py:loss
    SOURCES=DIR MEAN=1 python conformance/loss.py conformance/subjects/megatron_lm.py:loss

The first is calculate_per_token_loss: sums and counts of all micro-batches and ranks. MEAN divides
by the micro-batch's own count and then by the number of micro-batches, and takes the mean of ranks.
"""

import logging
import os
from types import SimpleNamespace

import torch
from take import take

MEAN = bool(os.environ.get("MEAN"))
G = take("Megatron-LM/megatron/rl/rl_utils.py", "calculate_grpo_loss", logger=None, logging=logging,
         log_single_rank=lambda *_: None)  # fmt: skip
T = take("Megatron-LM/train_rl.py", "loss_func", get_rerun_state_machine=lambda: None,
         get_args=lambda: SimpleNamespace(check_for_nan_in_loss_and_grad=False,
                                          check_for_spiky_loss=False))  # fmt: skip
SETTINGS = dict(clip_low=0.2, clip_high=0.28)
SETTINGS |= dict(micro_batches="mean", ranks="mean", equal_rows=True) if MEAN else {}
torch.Tensor.cuda = lambda self, *_, **__: self  # its counts are made on a GPU


def loss(batch):
    """Return the loss's numerator and count, as Megatron's schedule gets them."""
    c = batch.settings
    ref = batch.old if batch.ref is None else batch.ref
    terms, *rest = G.calculate_grpo_loss(
        batch.lp, batch.old, ref, batch.advantage[:, 0], c["clip_low"], c["clip_high"],
        c["kl_coef"], 0.0)  # fmt: skip
    value, count, _ = T.loss_func(batch.mask, *rest, terms)
    return value / count if MEAN else (value, count)

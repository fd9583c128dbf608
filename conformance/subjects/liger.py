"""Liger-Kernel: LigerFusedLinearGRPOLoss, with log-probs of two tokens as its hidden states.

    pip install --no-deps --target DIR liger-kernel
    PYTHONPATH=DIR python conformance/loss.py conformance/subjects/liger.py:loss
    PYTHONPATH=DIR python conformance/loss.py conformance/subjects/liger.py:loss KEY=VALUE ..

aggregation=sequence_sum is its `luspo`; objective=gspo gives it the sequence's ratio.
TRL passes num_items_in_batch, the tokens of the step. Liger divides it by the number of ranks.
"""

import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

SETTINGS = dict(clip_low=0.2, clip_high=0.28, ranks="mean", equal_rows=True, count_empty=True)
KINDS = dict(token_mean="dapo", sequence_mean="grpo", constant="dr_grpo", sequence_sum="luspo")


def loss(batch):
    """Call the loss as TRL's compute_liger_loss does."""
    c = batch.settings
    kind = KINDS[c["aggregation"]]
    kind = c["objective"] if c["objective"] in ("cispo", "sapo") else kind
    lp = torch.where(batch.mask, batch.lp, -1.0)
    logits = torch.stack([lp, torch.log1p(-lp.exp())], -1)
    function = LigerFusedLinearGRPOLoss(
        beta=c["kl_coef"], compiled=False, use_ref_model=False, loss_type=kind,
        epsilon_low=c["clip_low"], epsilon_high=c["clip_high"] + (kind == "cispo"),
        max_completion_length=c["max_new_tokens"], delta=c["dual_clip"] or None,
        importance_sampling_level="sequence" if c["objective"] == "gspo" else "token",
        sapo_temperature_pos=c["tau_pos"], sapo_temperature_neg=c["tau_neg"])  # fmt: skip
    # There is no process group here, so that Liger's own number of ranks is 1.
    value = function(
        logits, torch.eye(2, dtype=logits.dtype), torch.zeros_like(batch.mask).long(),
        batch.mask.long(), batch.advantage[:, 0], old_per_token_logps=batch.old,
        ref_per_token_logps=batch.ref, num_items_in_batch=batch.tokens / batch.ranks)[0]
    return value if kind in ("dapo", "cispo") else value / batch.micro_batches

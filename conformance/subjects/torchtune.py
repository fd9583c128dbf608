"""torchtune: the losses of dev/grpo. FSDP2 takes the mean over ranks.

    SOURCES=DIR KIND=GRPOLoss python conformance/loss.py conformance/subjects/torchtune.py:loss

KIND may also be GRPOSimpleLoss and GRPOCompletionLoss.
"""

import os

import torch
from take import take

KIND = os.environ.get("KIND", "GRPOLoss")
M = take("torchtune/torchtune/rlhf/rewards.py", "masked_mean", "masked_sum")
L = take("torchtune/torchtune/dev/grpo/loss.py", KIND, rlhf=M, masked_sum=M.masked_sum)
SETTINGS = dict(ranks="mean", micro_batches="mean", equal_rows=True)
if KIND == "GRPOSimpleLoss":
    SETTINGS |= dict(objective="reinforce", aggregation="sequence_mean", count_empty=True)


def loss(batch):
    """Call the loss with log-probs 1 at padding, as the recipe does."""
    old, now = (torch.where(batch.mask, x, 1.0) for x in (batch.old, batch.lp))
    function = getattr(L, KIND)(epsilon=batch.settings["clip_low"], kl_coeff=0.0)
    return function(old, now, old, batch.advantage[:, 0], padding_masks=batch.mask)[0]

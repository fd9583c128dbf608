"""open-instruct: compute_grpo_loss and masked_mean of grpo_fast. DeepSpeed means over ranks.

    SOURCES=DIR python conformance/loss.py conformance/subjects/open_instruct.py:loss
    SOURCES=DIR python conformance/loss.py conformance/subjects/open_instruct.py:loss KEY=VALUE ..

A denominator of its own is aggregation=number loss_denominator=50.
"""

import enum
from types import SimpleNamespace

import torch
from take import take

K = take("open-instruct/open_instruct/model_utils.py", "estimate_kl")
G = take(
    "open-instruct/open_instruct/grpo_utils.py", "GRPOLossType", "mask_logprobs",
    "compute_grpo_loss", enum=enum, INVALID_LOGPROB=1.0, model_utils=K,
)  # fmt: skip
R = take("open-instruct/open_instruct/rl_utils.py", "masked_mean")
ESTIMATORS = dict(k1=0, k2=1, k3=2, k3_ratio=3)
SETTINGS = dict(clip_low=0.2, clip_high=0.272, ranks="mean")


def loss(batch):
    """Call the loss as the learner does, and divide by the step's count."""
    c = batch.settings
    kinds = dict(clip="dapo", cispo="cispo")
    if c["objective"] not in kinds or c["kl"] not in ESTIMATORS:
        raise NotImplementedError("open-instruct has clip and cispo")
    config = SimpleNamespace(
        loss_fn=kinds[c["objective"]], clip_lower=c["clip_low"], clip_higher=c["clip_high"],
        kl_estimator=ESTIMATORS[c["kl"]])  # fmt: skip
    new, old = (G.mask_logprobs(x, batch.mask) for x in (batch.lp, batch.old))
    ref = None if batch.ref is None else G.mask_logprobs(batch.ref, batch.mask)
    weights = batch.mask.to(batch.lp.dtype)
    ratio, A = torch.exp(new - old), batch.advantage
    terms, _, kl = G.compute_grpo_loss(new, ratio, A, ref, config, weights)
    total = terms + c["kl_coef"] * kl
    return R.masked_mean(total, batch.mask, None, batch.Z) * batch.ranks

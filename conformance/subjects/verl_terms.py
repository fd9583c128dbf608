"""verl: clip_cov and kl_cov, its critic's loss, and its advantages with a KL in the reward.

    SOURCES=DIR python conformance/loss.py conformance/subjects/verl_terms.py:kl_cov
    SOURCES=DIR python conformance/loss.py conformance/subjects/verl_terms.py:clip_cov
    SOURCES=DIR python conformance/loss.py conformance/subjects/verl_terms.py:value_loss
    SOURCES=DIR python conformance/advantages.py conformance/subjects/verl_terms.py:advantages

clip_cov has cov_share=1, so that no token is drawn at random.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from take import Anything, take

T = take("verl/verl/utils/torch_functional.py", "masked_mean", "masked_sum", "clip_by_value")
FILE = "verl/verl/trainer/ppo/core_algos.py"
C = take(FILE, "agg_loss", "compute_policy_loss_kl_cov", "compute_policy_loss_clip_cov",
         "compute_value_loss", "compute_grpo_outcome_advantage", "kl_penalty", "kl_penalty_forward",
         verl_F=T, AlgoConfig=type(None), ActorConfig=object, defaultdict=defaultdict,
         np=Anything())  # fmt: skip
P = take("verl/verl/trainer/ppo/ray_trainer.py", "apply_kl_penalty", core_algos=C,
         masked_mean=lambda x, mask, axis: T.masked_mean(x, mask, axis))  # fmt: skip
MODES = dict(token_mean="token-mean", sequence_mean="seq-mean-token-mean",
             sequence_sum="seq-mean-token-sum")  # fmt: skip
SETTINGS = dict(objective="kl_cov", cov_low=0.1, cov_share=0.3, ranks="mean", count_empty=True)


def kl_cov(batch):
    """Call the loss with the counts of the whole mini-batch."""
    c = batch.settings
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=c["clip_low"], clip_ratio_high=c["clip_high"],
        policy_loss=SimpleNamespace(
            clip_cov_ratio=c["cov_share"], clip_cov_lb=c["cov_low"], clip_cov_ub=c["cov_high"],
            kl_cov_ratio=c["cov_share"], ppo_kl_coef=c["cov_coef"]),
        global_batch_info=dict(dp_size=batch.ranks, batch_num_tokens=batch.tokens,
                               global_batch_size=batch.sequences))  # fmt: skip
    function = getattr(C, f"compute_policy_loss_{c['objective']}")
    return function(batch.old, batch.lp, batch.advantage, batch.mask,
                    loss_agg_mode=MODES[c["aggregation"]], config=config)[0]  # fmt: skip


def clip_cov(batch):
    """The same, of clip_cov."""
    return kl_cov(batch)


clip_cov.SETTINGS = SETTINGS | dict(objective="clip_cov", cov_share=1.0)


def value_loss(batch):
    """The critic's loss is a mean over a micro-batch, as its worker takes it."""
    return C.compute_value_loss(batch.value, batch.returns, batch.old_value, batch.mask,
                                batch.settings["value_clip"] or 1e9)[0]  # fmt: skip


value_loss.SETTINGS = dict(objective="none", value_coef=1.0, value_clip=0.2, micro_batches="mean",
                           ranks="mean", equal_rows=True)  # fmt: skip
ADVANTAGES = dict(std_eps=1e-6, kl_in="reward", kl_coef=0.1, kl="k3")


def advantages(batch):
    """Take the KL off the rewards as the trainer does, and normalize."""
    c, last = batch.settings, batch.mask.long().cumsum(1).argmax(1)
    scores = torch.zeros_like(batch.smp)
    scores[torch.arange(len(scores)), last] = batch.rewards
    fields = dict(response_mask=batch.mask.long(), token_level_scores=scores,
                  old_log_probs=batch.smp, ref_log_prob=batch.ref)  # fmt: skip

    class Batch(dict):
        batch_size = (len(scores),)

    control = SimpleNamespace(value=c["kl_coef"], update=lambda **_: None)
    data = SimpleNamespace(batch=Batch(fields))
    if c["kl_in"] == "reward":
        P.apply_kl_penalty(data, control, c["kl"])
    rewards = data.batch.get("token_level_rewards", scores)
    return C.compute_grpo_outcome_advantage(
        rewards, batch.mask, batch.group.tolist(), 1e-6, c["advantage"] == "group_std")[0]

"""ROLL: the policy loss of its RLVR worker, and agg_loss. Ranks are added up by `dp_size`.

    SOURCES=DIR python conformance/loss.py conformance/subjects/roll.py:loss
    SOURCES=DIR python conformance/loss.py conformance/subjects/roll.py:loss sample_weights=1
    SOURCES=DIR FILTER=1 python conformance/loss.py conformance/subjects/roll.py:loss

FILTER leaves the advantages of masked tokens as they are, as after the trainer's own filter of
train_infer_correction. Without it they are 0 there.
"""

import os
from types import SimpleNamespace

import torch
from take import shifted, take

NAMES = ("agg_loss", "masked_mean", "masked_sum", "compute_approx_kl")
R = take("ROLL/roll/utils/functionals.py", *NAMES)
W = take("ROLL/roll/pipeline/rlvr/actor_worker.py", "loss_func", DataProto=object,
         agg_loss=R.agg_loss, masked_mean=R.masked_mean,
         compute_approx_kl=R.compute_approx_kl)  # fmt: skip
MODES = dict(token_mean="token-mean", sequence_mean="seq-mean-token-mean",
             sequence_sum="seq-mean-token-sum")  # fmt: skip
SETTINGS = dict(clip_low=0.2, clip_high=0.28, ranks="mean")
FILTER = os.environ.get("FILTER")


def loss(batch):
    """Call loss_func as the worker does, with the counts of the whole step."""
    c = batch.settings
    if c["aggregation"] not in MODES or c["objective"] not in ("clip", "gspo"):
        raise NotImplementedError("a divisor of ROLL's seq-mean-token-sum-norm is the padded width")
    pipeline = SimpleNamespace(
        enable_old_logprobs_recompute=True, loss_agg_mode=MODES[c["aggregation"]],
        use_pg_clip_range=True, pg_clip=c["dual_clip"] / 2 - 0.5, pg_clip_low=c["clip_low"],
        pg_clip_high=c["clip_high"], dual_clip_loss=bool(c["dual_clip"]), rl_loss_coef=1.0,
        use_kl_loss=bool(c["kl_coef"]), kl_loss_coef=c["kl_coef"],
        importance_sampling="seq" if c["objective"] == "gspo" else "token",
        entropy_loss_coef=c["entropy_coef"], train_infer_correction=SimpleNamespace(
            is_weight=SimpleNamespace(enabled=bool(c["importance_cap"]))))  # fmt: skip
    ones = torch.ones(len(batch.mask), dtype=batch.lp.dtype)
    worker = SimpleNamespace(
        pipeline_config=pipeline, get_old_log_probs_with_cache=lambda *_: batch.old,
        compute_sample_weights=lambda *_: ones if batch.weight is None else batch.weight,
        strategy=SimpleNamespace(op_compute_log_probs=lambda **_: batch.lp,
                                 op_compute_entropy=lambda **_: batch.entropy))  # fmt: skip
    weight = None  # the worker gets it from compute_train_infer_correction: truncated, by token
    if batch.smp is not None:
        weight = (batch.old - batch.smp).exp().clamp(c["importance_low"], c["importance_cap"])
    data = SimpleNamespace(
        batch=dict(
            response_mask=shifted(batch.mask.long()), train_infer_is_weight=weight, input_ids=None,
            ref_log_probs=batch.old if batch.ref is None else batch.ref,
            advantages=batch.advantage * (1 if FILTER else batch.mask)),
        meta_info=dict(batch_num_tokens=dict(response_mask=batch.tokens),
                       global_valid_samples=dict(response_mask=batch.filled)),
        non_tensor_batch={})  # fmt: skip
    return W.loss_func(worker, data, None)[0] * batch.ranks

"""NeMo-RL: ClippedPGLossFn. The worker adds micro-batches up and multiplies by the data ranks.

    SOURCES=DIR python conformance/loss.py conformance/subjects/nemo_rl.py:loss
    SOURCES=DIR python conformance/loss.py conformance/subjects/nemo_rl.py:loss importance_cap=2
    SOURCES=DIR python conformance/loss.py conformance/subjects/nemo_rl.py:loss nll_coef=0.1

NeMo-RL adds the gradient of its samples' probability to a KL. So its k3 has the gradient of k2.
"""

from types import SimpleNamespace

import torch
from take import Anything, shifted, take

U = take("RL/nemo_rl/algorithms/utils.py", "masked_mean", "calculate_kl")
L = take(
    "RL/nemo_rl/algorithms/loss/loss_functions.py", "ClippedPGLossFn", LossFunction=object,
    LossType=SimpleNamespace(TOKEN_LEVEL=1, SEQUENCE_LEVEL=2), BatchedDataDict=Anything(),
    LossInputType=Anything(), MetricNormalizer=Anything(), masked_mean=U.masked_mean,
    calculate_kl=U.calculate_kl,
)  # fmt: skip
SETTINGS = dict(clip_low=0.2, clip_high=0.28, ranks="mean", count_empty=True, kl="k3_k2")


def loss(batch):
    """Call the loss with the counts of the whole step."""
    c, kind = batch.settings, batch.settings["objective"]
    if kind not in ("clip", "gspo", "cispo", "reinforce") or c["importance_of"] == "geometric":
        raise NotImplementedError("NeMo-RL has clip, gspo, cispo and reinforce")
    if c["importance_cap"] and (kind == "gspo") != (c["importance_of"] == "sequence"):
        raise NotImplementedError("the weight is of the sequence with gspo, else of the token")
    kinds = dict(truncate="tis", mask="icepop") if c["importance_cap"] else {}
    config = SimpleNamespace(
        disable_ppo_ratio=kind == "reinforce", ratio_clip_min=c["clip_low"],
        ratio_clip_max=c["clip_high"], ratio_clip_c=c["dual_clip"] or None,
        reference_policy_kl_penalty=c["kl_coef"], use_kl_in_reward=False,
        reference_policy_kl_type=c["kl"][:2], kl_input_clamp_value=20.0, kl_output_clamp_value=10.0,
        use_importance_sampling_correction=bool(c["importance_cap"]),
        truncated_importance_sampling_type=kinds.get(c["importance"]),
        truncated_importance_sampling_ratio=c["importance_cap"] or None,
        truncated_importance_sampling_ratio_min=c["importance_low"],
        use_on_policy_kl_approximation=False, force_on_policy_ratio=False,
        use_cispo=kind == "cispo", sequence_level_importance_ratios=kind == "gspo",
        token_level_loss=c["aggregation"] == "token_mean",
        positive_example_nll_weight=c["nll_coef"],
    )  # fmt: skip
    data = dict(
        token_mask=shifted(batch.mask.to(batch.lp.dtype)), advantages=shifted(batch.advantage),
        sample_mask=torch.ones(len(batch.mask), dtype=batch.lp.dtype),
        prev_logprobs=shifted(batch.old), rewards=batch.reward,
        generation_logprobs=shifted(batch.old if batch.smp is None else batch.smp),
        reference_policy_logprobs=None if batch.ref is None else shifted(batch.ref),
    )  # fmt: skip
    counts = (torch.tensor(float(n)) for n in (batch.sequences, batch.tokens))
    return batch.ranks * L.ClippedPGLossFn(config)(batch.lp, data, *counts)[0]

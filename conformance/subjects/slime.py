"""slime: loss_function with Megatron's own scaling, its critic's loss, its advantages.

    SOURCES=DIR python conformance/loss.py conformance/subjects/slime.py:loss
    SOURCES=DIR PER_TOKEN=1 python conformance/loss.py conformance/subjects/slime.py:loss
    SOURCES=DIR python conformance/loss.py conformance/subjects/slime.py:value_loss
    SOURCES=DIR python conformance/advantages.py conformance/subjects/slime.py:advantages

Megatron divides each micro-batch by their number, and takes the mean over ranks. PER_TOKEN sets
calculate_per_token_loss: it then adds up micro-batches and ranks, and divides by the sum of counts.
"""

import os
from types import SimpleNamespace

import torch
from take import Anything, take

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
RANKS, OUTPUT = [1], {}
MPU = SimpleNamespace(
    get_context_parallel_world_size=lambda: 1, get_context_parallel_rank=lambda: 0,
    get_data_parallel_world_size=lambda **_: RANKS[0], get_context_parallel_group=lambda: None)
FOLDER = "slime/slime/backends/megatron_utils/"
LOSSES = ("compute_policy_loss", "compute_cispo_loss", "compute_gspo_kl", "compute_approx_kl")
U = take("slime/slime/utils/ppo_utils.py", *LOSSES)
C = take(FOLDER + "cp_utils.py", "get_sum_of_sample_mean", "all_gather_with_cp", mpu=MPU)
L = take(
    FOLDER + "loss.py", "policy_loss_function", "value_loss_function", "loss_function",
    "vanilla_tis_function", "icepop_function", mpu=MPU, all_gather_with_cp=C.all_gather_with_cp,
    get_sum_of_sample_mean=C.get_sum_of_sample_mean, **{x: getattr(U, x) for x in LOSSES},
    get_log_probs_and_entropy=lambda *_, **__: (None, OUTPUT), load_function=lambda path: path,
    get_values=lambda *_, **__: (None, OUTPUT), get_rollout_top_p_logprob_kwargs=lambda *_: {},
    _maybe_capture_log_probs=lambda *_: None,
)  # fmt: skip
PER_TOKEN = bool(os.environ.get("PER_TOKEN"))
SETTINGS = dict(clip_low=0.2, clip_high=0.28, aggregation="token_mean") if PER_TOKEN else dict(
    clip_low=0.2, clip_high=0.28, aggregation="sequence_mean", micro_batches="mean", ranks="mean",
    count_empty=True)  # fmt: skip


def rows(x):
    return None if x is None else [*x.unbind(0)]


def call(batch, kind, **output):
    """Call loss_function on a micro-batch. Return (numerator, count) under PER_TOKEN."""
    c, lengths = batch.settings, [batch.mask.shape[1]] * len(batch.mask)
    masks = rows(batch.mask.to(batch.lp.dtype))
    OUTPUT.clear()
    OUTPUT.update(output)
    RANKS[0] = batch.ranks
    args = SimpleNamespace(
        use_rollout_logprobs=False, use_opsm=False, advantage_estimator=c["objective"],
        eps_clip=c["clip_low"], eps_clip_high=c["clip_high"], eps_clip_c=c["dual_clip"] or None,
        get_mismatch_metrics=False, use_tis=bool(c["importance_cap"]), loss_type=kind,
        tis_clip=c["importance_cap"], tis_clip_low=c["importance_low"],
        custom_tis_function_path=L.icepop_function if c["importance"] == "mask" else None,
        calculate_per_token_loss=PER_TOKEN, entropy_coef=c["entropy_coef"],
        use_kl_loss=bool(c["kl_coef"]), kl_loss_coef=c["kl_coef"], kl_loss_type=c["kl"][:2],
        use_unbiased_kl=c["kl"] == "k3_ratio", value_clip=c["value_clip"] or 1e9,
        recompute_loss_function=False, allgather_cp=False,
    )  # fmt: skip
    data = dict(
        advantages=rows(batch.advantage), log_probs=rows(batch.old), response_lengths=lengths,
        total_lengths=lengths, unconcat_tokens=None, loss_masks=masks, values=rows(batch.old_value),
        rollout_log_probs=rows(batch.smp), ref_log_probs=rows(batch.ref),
        returns=rows(batch.returns), rollout_mask_sums=[mask.sum() for mask in masks],
    )  # fmt: skip
    value, count, _ = L.loss_function(args, data, batch.micro_batches, batch.sequences, batch.lp)
    return (value, count) if PER_TOKEN else value


def loss(batch):
    """The policy's loss, with KL, entropy and the sampler's weights if SETTINGS have them."""
    if batch.settings["objective"] not in ("clip", "gspo", "cispo"):
        raise NotImplementedError("slime has clip, gspo and cispo")
    entropy = torch.zeros_like(batch.lp) if batch.entropy is None else batch.entropy
    return call(batch, "policy_loss", log_probs=rows(batch.lp), entropy=rows(entropy))


def value_loss(batch):
    """The critic's loss. slime does not halve the square."""
    return call(batch, "value_loss", values=[x[:, None] for x in rows(batch.value)])


value_loss.SETTINGS = SETTINGS | dict(objective="none", value_coef=2.0, value_clip=0.2)

S = take("slime/slime/ray/rollout.py", "_post_process_rewards", Sample=Anything())
FILTER = take(
    "slime/slime/rollout/filter_hub/dynamic_sampling_filters.py", "check_reward_nonzero_std",
    Sample=Anything(), DynamicFilterOutput=SimpleNamespace)  # fmt: skip
ADVANTAGES = dict(
    std_eps=1e-6, equal_groups="left_out", skip=dict(order="a group is consecutive samples"))


def advantages(batch):
    """Normalize rewards as the rollout does, and filter groups as its dynamic sampling does."""
    samples = [SimpleNamespace(get_reward_value=lambda _, R=R: R) for R in batch.rewards.tolist()]
    kinds = dict(group_std=True, group_mean=False)
    args = SimpleNamespace(
        advantage_estimator="grpo", rewards_normalization=True, n_samples_per_prompt=4,
        rollout_batch_size=len(samples) // 4,
        grpo_std_normalization=kinds[batch.settings["advantage"]])  # fmt: skip
    worker = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    found = torch.tensor(S._post_process_rewards(worker, samples)[1])
    if batch.settings["equal_groups"] == "kept":
        return found
    kept = [FILTER.check_reward_nonzero_std(args, samples[n : n + 4]).keep
            for n in range(0, len(samples), 4)]  # fmt: skip
    return found, torch.stack(kept).repeat_interleave(4)

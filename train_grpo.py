"""GRPO on multi-turn tasks: rollouts, advantages, one loss, one training loop, any number of ranks.

A policy answers a prompt several times; answers that beat their group's mean become likelier. Two
rules carry the file. **Every loss is a sum over sampled tokens**, sum(w * l) / Z, with w and Z made
from the global batch of one optimiser step before any micro-batch is cut, and gradients are summed
over ranks: so micro-batches, ranks, packing and order cannot change it. **Data and randomness are
functions of (seed, step, group, rollout)**, never of a generator's state: so the number of ranks,
a kill and a resume cannot change them either. Two ranks make the run of one process: in float64
to rounding, at every step; in float32 until rounding draws another token (step 12 of the default
run), and then they are two runs that learn alike. A resumed run repeats every bit.

    python train_grpo.py                                      # guess: 1.00 solved, 40 s
    torchrun --nproc-per-node 2 train_grpo.py                 # the same on two processes
    python train_grpo.py --help                               # every flag, its default, its meaning
    python train_grpo.py plot runs/guess-0 [runs/guess-1 ..]  # reward curves, PNG or text
    python train_grpo.py audit runs/guess-0 [--step N]        # a step again, by hand; is it so?
    python train_grpo.py eval | chat | export runs/guess-0 .. # pass@k; talk; for Hugging Face
    python train_grpo.py check [--all] | bench    # plans, trees, families: 3e-14 | seconds

What it must equal. For rollout i of a group of G with reward R_i, sampled tokens t, log-probs under
softmax(logits / temperature): lp of the policy now, old of the policy before this step's first
update, ref of the frozen reference, smp of the sampler; H_t the entropy, sg: no gradient:

    (1)  A_i = (R_i - mean R) / (std R + 1e-4)    `group_std` (GRPO; std with G - 1)
             = R_i - mean R                       `group_mean` (Dr.GRPO)
             = (R_i - mean R) G / (G - 1)         `leave_one_out` (RLOO)
             = V(segment) - V(its parent)         `per_branch`: V = mean reward of rollouts below
         A_t = sum_n (gamma lambda)^n (u_(t+n) + gamma v_(t+n+1) - v_(t+n))      `gae` (PPO)
             then (A_t - mean A) / (std A + 1e-8) over the step's sampled tokens; u the rewards,
             v the critic's values; t + 1 is the next sampled token, whatever stands in between
         with kl_in `reward`, sampled token t first takes kl_coef k(smp_t - ref_t) off the reward
    (2)  r_t = exp(lp_t - old_t)                  `token`
             = exp(mean_t(lp_t - old_t))          `sequence` (GSPO)
    (3)  l_t = -min(min(r, c) A, clip(r, 1 - low, 1 + high) A)     `clip`; c: dual clip, if any
             = -sg(min(r, bound)) A lp_t                            `cispo`
    (4)  l_t <- sg(min(exp(old_t - smp_t), C)) l_t                  importance_cap C (TIS), if any
    (5)  l_t <- l_t + kl_coef k(d) - entropy_coef H_t               d = lp_t - ref_t
             k1: d (its gradient has mean 0: for the reward)  k2: d^2 / 2  k3: exp(-d) + d - 1
    (6)  l_t <- l_t + value_coef max((v - g)^2, (clip(v, v_old +- value_clip) - g)^2) / 2
             with `gae`: v a head on the policy's states, g_t = v_old_t + A_t before whitening
    (7)  loss = sum_i sum_t w_i l_it / Z          over all ranks and micro-batches of the step
             token_mean     w_i = 1               Z = sampled tokens
             sequence_mean  w_i = 1 / tokens_i    Z = sequences with a sampled token
             constant       w_i = 1               Z = sequences * max_new_tokens
    (8)  beside it, with experts: balance_coef mean_i b_i     b_i: (10) of models.py with coef 1

Letters: B trajectories; T positions of their padded log-prob vectors (the targets are tokens[1:],
so a trajectory of L tokens has L - 1); P groups of G rollouts each; N sampled tokens; K sums.
In the appendices S packed tokens, M the model's width; small letters are one rank's share.

Metrics (metrics.jsonl, one line a step; every normaliser is global). loss, kl, entropy, ratio,
value/loss, balance and grad_norm are plain means over a step's updates (see `update`):

    reward/mean, reward/solved   over the step's rollouts; solved: reward of at least 1
    reward/groups_none, _all     fraction of groups in which no, every rollout is solved
    reward/groups_equal          fraction of groups of equal rewards; gae: 1 if all the step's are
    eval/solved                  greedy, held-out prompts; at evaluation steps and in the last line
    eval/solved_before           the same before the first step, behind any --demos; in line 0
    length/rollout_mean, length/max   sampled tokens of a rollout
    advantage/token_mean, _std   A of (1) over the sampled tokens that are trained on
    loss/token_mean              (7) under any `--aggregation`, so over its Z; mean of updates
    loss/policy_token_mean       the same of (3) and (4) alone: without (5) and (6)
    kl/token_mean, entropy/token_mean   k of (5), where there is a reference; H at `temperature`
    value/token_mean, value/loss   with gae: v before the step; what (6) adds per sampled token
    value/explained_variance     with gae: 1 - Var(g - v) / Var(g) over the step's sampled tokens
    ratio/clipped_fraction       of sampled tokens; mean of updates, as is the next
    ratio/token_mean, ratio/max  r of (2); max: the largest of all updates
    logprob_gap/max, /mean       |trainer - sampler|, first minibatch; with --staleness K of K steps
    logprob_gap/identical        fraction of its tokens whose two log-probs are the same bits
    balance/loss, experts/load_max   (8); an expert's tokens / their mean, at most: layers, updates
    grad_norm                    before clipping, global, mean of updates; lr  that the step used
    policy_version, updates/skipped   optimiser steps taken; steps skipped for a non-finite gradient
    policy_age/update_mean       optimiser steps between the sampler's weights and an update's
    policy/age_mean, _max        steps of the loop between the sampler's weights and the batch's
    tokens/generated, tokens/truncated_fraction   sampled; of rollouts that met max_new_tokens
    tokens/trained, tokens/trained_flat   with gradients: of a tree its own tokens; without a tree
    NAME_first                   what is a mean of updates, of the first alone if there are several
    memory/peak, seconds/rollout, /train, /eval, /total   megabytes, see `peak_memory`; seconds
    seconds/wait_rollout, /wait_train   training stood still for the batch; sampling for weights

How it deviates: group_std uses TRL's Bessel std and 1e-4 (the paper gives neither); old is the
current policy itself where a step has one update and its weights sampled, so that rounding cannot
clip; the log-ratio of (2) is clamped to +-10 before exp; PPO's critic shares the policy's trunk,
and a truncated trajectory ends with value 0. Not here: top-p, which biases every ratio.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import html
import importlib.util
import inspect
import json
import math
import numbers
import os
import re
import shutil
import signal
import sys
import time
import traceback
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import models
import parallel
import ring_attention
from models import ModelConfig, Row, Transformer, generate
from parallel import (
    Grid, LocalOptimizer, PackedBatches, Plan, Stop, agree, clip_grad_norm, connect, copy_weights,
    gather_replica, local, lr_factor, newest_checkpoint, parallelize, part_of, read_checkpoint,
    read_newest, read_training, reduce_gradients, summed, training_tensors, write_checkpoint,
)  # fmt: skip
from tree_attention import Cost, TokenTrie, partition, redistribute, tree_backward, tree_scores


# 1. The definition: the loss, token by token --------------------------------------------------


def definition(sequences, Z, c):
    """The loss of a batch, slowly: (2) to (7) as they stand above. A 0-d tensor.

    sequences   for each rollout lists over its sampled tokens: lp, H and v of 0-d tensors, old,
                smp, A, ref, v_old and g of numbers (v and ref may be None); and its weight w
    Z, c        the denominator; the settings, a Config

    Each sequence is given `terms`, what is measured of each token and its `part` of the loss.
    `step_by_hand` (appendix J) makes a whole step of it, for `check`, tests and `audit`.
    """
    loss = torch.zeros(())
    for s in sequences:
        s.terms = []
        log_ratios = [lp - old for lp, old in zip(s.lp, s.old)]
        if c.ratio == "sequence":
            log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
        for t, (lp, A) in enumerate(zip(s.lp, s.A)):
            # How much likelier the token has become since the step began.
            r = log_ratios[t].clamp(-10, 10).exp()  # (2)

            # The gain is r A. The clip takes the worse of the gain and the gain at the clipped
            # ratio: once a token has moved far enough in the direction that A asks for, its gain
            # is a constant, and its gradient is zero. A move the wrong way is never clipped.
            if c.objective == "cispo":
                clips = r > c.cispo_bound
                l = -min(r.item(), c.cispo_bound) * A * lp  # (3)
            else:
                gain = min(r, c.dual_clip or math.inf) * A
                clipped_gain = min(max(r, 1 - c.clip_low), 1 + c.clip_high) * A
                clips = clipped_gain < gain or r > (c.dual_clip or math.inf)
                l = -min(gain, clipped_gain)  # (3)

            # The sampler may be another program. Then closeness, randomness and the critic.
            if c.importance_cap:
                l = min(math.exp(s.old[t] - s.smp[t]), c.importance_cap) * l  # (4)
            term = dict(r=r, clips=clips, policy=s.w * l / Z, k=0.0, value=0.0)
            if s.ref is not None:
                d = lp - s.ref[t]
                term["k"] = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() + d - 1}[c.kl]
            if c.kl_in == "loss":
                l = l + c.kl_coef * term["k"]  # (5)
            l = l - c.entropy_coef * s.H[t]  # (5)
            if s.v is not None:
                bound = c.value_clip or math.inf
                near = s.v_old[t] + (s.v[t] - s.v_old[t]).clamp(-bound, bound)
                square = max((s.v[t] - s.g[t]) ** 2, (near - s.g[t]) ** 2)
                term["value"] = c.value_coef * square / 2
                l = l + term["value"]  # (6)
            term["part"] = s.w * l / Z
            loss = loss + term["part"]  # (7)
            s.terms.append(dict(zip(term, numbers_of(term.values()))))
    return loss


# 2. Advantages: which rollouts were better than expected --------------------------------------


def advantages(rewards_G, /, kind):
    """(1) for the float64 rewards (G,) of one group: an array (G,).

    The group's own mean is the baseline, so nothing has to be learned to have one. kind:
    `group_std`, `group_mean` or `leave_one_out`; ValueError for another one. (`per_branch` and
    `gae` give one trajectory several advantages: appendices C and D.)
    """
    # Equal rewards say nothing. The advantage is then exactly 0, which rewards - mean would miss
    # by rounding; `group_std` would blow that rounding up to numbers that look like a signal.
    if (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)

    centred_G = rewards_G - rewards_G.mean()
    if kind == "group_std":
        # Hard and easy prompts count alike: each group is scaled to a spread of one.
        return centred_G / (rewards_G.std(ddof=1) + 1e-4)  # (1)
    if kind == "leave_one_out":
        # The same as subtracting from each reward the mean of the other G - 1.
        return centred_G * len(rewards_G) / (len(rewards_G) - 1)  # (1)
    if kind == "group_mean":
        return centred_G  # (1)
    raise ValueError(f"unknown advantage {kind!r}")


# 3. The loss: equations (2) to (7), in this order ---------------------------------------------
#
# Pure functions of tensors (B, T), a row for each sequence and a column for each target, or of (T,)
# for one sequence. mask says which targets the policy sampled. The others were shown to it, prompts
# and replies of the task, or are padding: log-probs there may be anything, even NaN.


def divergence(d, /, kind):
    """k of (5), an estimate of KL(p, reference) from d = log p - log reference (Schulman 2020).

    d is taken at tokens drawn from p. All three have the KL as their mean, or for k2 nearly so.
    """
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.exp(-d) + d - 1  # never negative, with less noise than k1
    raise ValueError(f"unknown kl {kind!r}")


def policy_loss(
    lp_BT, old_BT, advantage_BT, mask_BT, /, *, objective, ratio, clip_low, clip_high, dual_clip,
    cispo_bound, kl, kl_coef, kl_in, entropy_coef, entropy_BT=None, ref_BT=None, importance_BT=None,
):  # fmt: skip
    """(2)-(5) of each token: l_BT, and a dict of detached statistics, all 0 where mask is off.

    lp_BT, old_BT, ref_BT         log-probs of the policy now, before the step, of the reference
    advantage_BT, importance_BT   A of (1), and the factor of (4); whatever broadcasts
    mask_BT, entropy_BT           bool, was sampled; H of (5)
    objective .. entropy_coef     settings of `grpo_loss`, which explains them

    What is None has no part in the loss. The statistics are `ratio`, `clipped` (0 or 1), `policy`,
    which is l of (3) and (4), and `kl` and `entropy` where those were given.
    """
    # NUMERICS: masked entries may be anything, -inf too: selected away before exp, not multiplied.
    # Pinned by tests/test_loss.py::test_masked_tokens_may_hold_anything.
    zero = lp_BT.new_zeros(())
    log_ratio_BT = torch.where(mask_BT, lp_BT - old_BT, zero)

    # GSPO: one ratio for a whole sequence, the geometric mean of its tokens' ratios. A reward is
    # for a sequence, and a product over hundreds of tokens would be too noisy to use.
    if ratio == "sequence":
        count_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(-1, keepdim=True) / count_B1).expand_as(lp_BT)

    # NUMERICS: +-10 keeps a ratio finite where a policy has moved far from a stale one. Pinned by
    # tests/test_loss.py::test_a_log_ratio_is_clamped_to_ten_before_exp.
    ratio_BT = log_ratio_BT.clamp(-10, 10).exp()  # (2)

    if objective == "cispo":
        # The ratio is a weight without gradient, so that a bounded token still learns: PPO's clip
        # below would drop it from the gradient.
        clipped_BT = ratio_BT > cispo_bound
        l_BT = -ratio_BT.clamp(max=cispo_bound).detach() * advantage_BT * lp_BT  # (3)
    else:
        # For A < 0 the minimum has no lower end: a large ratio gives a huge loss. Dual clip bounds
        # the ratio there; for A > 0 the second gain is the smaller one anyway.
        bounded_BT = ratio_BT
        if dual_clip:
            bounded_BT = ratio_BT.clamp(max=dual_clip)
        gain_BT = bounded_BT * advantage_BT
        clipped_gain_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantage_BT
        clipped_BT = (clipped_gain_BT < gain_BT) | (ratio_BT > bounded_BT)
        l_BT = -torch.minimum(gain_BT, clipped_gain_BT)  # (3)

    # The sampler drew the tokens, but (2) measures from `old`, the same policy by the trainer's
    # program and dtype: the weight corrects for tokens drawn more or less often than `old` says.
    if importance_BT is not None:
        l_BT = l_BT * importance_BT  # (4)

    # Closeness to the reference and randomness are wanted for their own sake, whatever the reward.
    stats = {"ratio": ratio_BT, "clipped": clipped_BT.to(lp_BT.dtype), "policy": l_BT}
    stats = {name: torch.where(mask_BT, x_BT.detach(), zero) for name, x_BT in stats.items()}
    if ref_BT is not None:
        kl_BT = divergence(torch.where(mask_BT, lp_BT - ref_BT, zero), kl)
        stats["kl"] = kl_BT.detach()
        if kl_in == "loss":  # else the rewards were lowered by it, before (1)
            l_BT = l_BT + kl_coef * kl_BT  # (5)
    if entropy_BT is not None:
        stats["entropy"] = torch.where(mask_BT, entropy_BT.detach(), zero)
        if entropy_coef:
            l_BT = l_BT - entropy_coef * entropy_BT  # (5)
    return torch.where(mask_BT, l_BT, zero), stats


def loss_weight(mask_BT, aggregation):
    """w of (7), float64, (B, 1) for a mask (B, T): known of each sequence without any other."""
    # Two sequences, of one sampled token with loss a and of three with losses b, c, d, sum to
    #
    #     token_mean     (a + b + c + d) / 4
    #     sequence_mean  (a + (b + c + d) / 3) / 2             a token of a long answer weighs less
    #     constant       (a + b + c + d) / (2 max_new_tokens)  Z does not depend on what was sampled
    #
    # A sequence without a sampled token has only zeros to weigh; 1 keeps its weight finite.
    count_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1).double()
    if aggregation == "sequence_mean":
        return 1.0 / count_B1
    return torch.ones_like(count_B1)


def normaliser(masks, /, *, aggregation, max_new_tokens) -> float:
    """A term of Z of (7), from the masks of some sequences: `denominator` is that of a rank's, and
    num_global_valid_tokens is Z, the sum over ranks. A sequence without a sampled token, such as
    one that was filtered out, counts under `constant` only."""
    sampled = [int(mask.sum()) for mask in masks]
    if aggregation == "token_mean":
        return float(sum(sampled))
    if aggregation == "constant":
        return float(len(sampled) * max_new_tokens)
    return float(len([count for count in sampled if count > 0]))


def grpo_loss(
    lp_BT, old_BT, advantage_BT, mask_BT, /, *, Z=None, aggregation="token_mean", max_new_tokens=16,
    objective="clip", ratio="token", clip_low=0.2, clip_high=0.28, dual_clip=0.0, cispo_bound=5.0,
    sampler_BT=None, importance_cap=0.0, ref_BT=None, kl="k3", kl_coef=0.0, kl_in="loss",
    entropy_BT=None, entropy_coef=0.0, value_BT=None, old_value_BT=None, return_BT=None,
    value_coef=0.5, value_clip=0.2,
):  # fmt: skip
    """The whole loss, (2)-(7): a scalar, and a dict of detached sums over the sampled tokens.

    lp_BT            log-probs of the policy now, with a graph: (B, T), or (T,) for one sequence
    old_BT           those before the step's first update; None: lp itself, so that every ratio is 1
    advantage_BT     A of (1), whatever broadcasts
    mask_BT          bool: which tokens the policy sampled
    Z                of (7), summed over everything that one optimiser step sees; None: of these
    aggregation      token_mean | sequence_mean | constant: w and Z of (7)
    max_new_tokens   the most tokens that a sequence may have; for the Z of `constant`
    objective        clip | cispo, (3)
    ratio            token | sequence, (2)
    clip_low/high    the ratio is clipped to 1 - low .. 1 + high
    dual_clip        c of (3); 0: none
    cispo_bound      bound of (3) with cispo
    sampler_BT       log-probs of the program that drew the tokens; None: old
    importance_cap   C of (4); 0: no weight
    ref_BT           log-probs of the frozen reference; None: no KL
    kl, kl_coef      which k of (5), and its weight; kl_in "reward" measures it and adds nothing
    entropy_BT       H of (5), with the weight entropy_coef
    value_BT         the critic's values now; None: no critic. With old_value_BT and return_BT, the
                     values before the step and g, and value_coef and value_clip: (6)

    `loss_metrics` makes a step's metrics from the sums; tests compare both with TRL's numbers.
    """
    if old_BT is None:
        old_BT = lp_BT.detach()
    if sampler_BT is None:
        sampler_BT = old_BT

    # One weight a token, p_old / p_sampler. Under the sampler its mean is 1, but its tail is long.
    importance_BT = None
    if importance_cap:
        log_weight_BT = torch.where(mask_BT, old_BT - sampler_BT, 0.0)
        importance_BT = log_weight_BT.exp().clamp(max=importance_cap)
    l_BT, stats = policy_loss(
        lp_BT, old_BT, advantage_BT, mask_BT, objective=objective, ratio=ratio, clip_low=clip_low,
        clip_high=clip_high, dual_clip=dual_clip, cispo_bound=cispo_bound, kl=kl, kl_coef=kl_coef,
        kl_in=kl_in, entropy_coef=entropy_coef, entropy_BT=entropy_BT, ref_BT=ref_BT,
        importance_BT=importance_BT,
    )  # fmt: skip

    # A critic is one more head on the same states, so its error is one more term of the same sum.
    if value_BT is not None:
        critic_BT = value_coef * value_loss(value_BT, old_value_BT, return_BT, mask_BT, value_clip)
        l_BT = l_BT + critic_BT  # (6)
        stats["value"] = critic_BT.detach()

    # Z is the whole step's, never that of this micro-batch or this rank. A mean of micro-batch
    # means weighs a token more where its micro-batch is small; a sum over one Z does not.
    if Z is None:
        masks = torch.atleast_2d(mask_BT)
        Z = normaliser(masks, aggregation=aggregation, max_new_tokens=max_new_tokens)
    return weighted_sum(l_BT, lp_BT, mask_BT, sampler_BT, stats, aggregation=aggregation, Z=Z)


def weighted_sum(l_BT, lp_BT, mask_BT, sampler_BT, stats, /, *, aggregation, Z):
    """(7) of these tokens: the loss, and the dict of sums that `loss_metrics` is made of.

    l_BT and stats are each token's, by `policy_loss`; the others are as in `grpo_loss`.
    """
    weight_B1 = loss_weight(mask_BT, aggregation).to(lp_BT.dtype)
    loss = (weight_B1 * l_BT).sum() / Z  # (7)

    # How far trainer and sampler are apart on the same tokens: with one set of weights it should be
    # rounding, and it is the first thing to look at when a run does not learn.
    gap_N = (lp_BT.detach() - sampler_BT)[mask_BT].abs().double()
    zero = gap_N.new_zeros(())
    sums = {
        "loss": loss.detach(), "tokens": mask_BT.sum(), "gap": gap_N.sum(),
        "identical": (gap_N == 0).sum(), "gap_max": torch.cat([gap_N, zero[None]]).max(),
    }  # fmt: skip
    for name in ("ratio", "clipped", "entropy", "kl", "value"):
        sums[name] = stats[name].sum() if name in stats else zero
    sums["policy"] = (weight_B1 * stats.get("policy", zero)).sum() / Z
    ratio_N = stats.get("ratio", zero).double().flatten()
    sums["ratio_max"] = torch.cat([ratio_N, zero[None]]).max()
    return loss, sums


def loss_metrics(totals) -> dict:
    """Metrics by their names, from the sums (and the two maxima) of a whole batch, all numbers."""
    # The loss is divided by Z already. The others are means over sampled tokens, not over
    # sequences, micro-batches or ranks, whatever the aggregation; the loss keeps its name in all.
    count = max(totals["tokens"], 1.0)
    return {
        "loss/token_mean": totals["loss"], "loss/policy_token_mean": totals["policy"],
        "entropy/token_mean": totals["entropy"] / count,
        "ratio/token_mean": totals["ratio"] / count,
        "ratio/max": totals["ratio_max"],
        "ratio/clipped_fraction": totals["clipped"] / count,
        "logprob_gap/max": totals["gap_max"],
        "logprob_gap/mean": totals["gap"] / count,
        "logprob_gap/identical": totals["identical"] / count,
        "kl/token_mean": totals["kl"] / count,
        "value/loss": totals["value"] / count,
    }  # fmt: skip


# 4. The loop: rollouts, advantages, updates ---------------------------------------------------
#
# A step is one batch of rollouts and a few optimiser steps on it. `config` is the command line
# (appendix A), by default 28 `prompts`, a `group` of 16, 2 `minibatches` and no `proximal`; `task`
# makes prompts and replies (appendix E). What the parts of a step hand on are lists of these:


@dataclass
class Trajectory:
    """One rollout. Vectors have one entry per target, tokens[1:], so L - 1 for L tokens."""

    group: int
    tokens: list[int]
    mask: np.ndarray  # bool: was sampled by the policy, and counts in the loss
    sampler_logprobs: np.ndarray  # float64, 0 where not sampled
    reward: float = 0.0
    truncated: bool = False
    path: list = field(default_factory=list)  # see branch_advantages
    turn_rewards: list = field(default_factory=list)  # (index of a turn's last target, reward)
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None  # None: the policy's own, detached
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None  # of the critic, before the step
    returns: np.ndarray | None = None

    def __post_init__(self):
        self.sampled = self.mask  # stays when `--overlong filter` takes it out of the loss


def train_step(config, trainer, queue, log, step):
    """One step of the run; the held-out fraction solved if this step evaluates, else None."""
    seconds = {}
    solved = None
    with timed(seconds, "total"), peak_memory(seconds, trainer.device):
        # Sampled by `collect`, with the generator: a copy of the policy as the last push left it,
        # or under --staleness an earlier one (appendix M).
        with timed(seconds, "wait_rollout"):
            rollouts, chosen, sampled_by, metrics = queue.take(step)

        # Everything in (1)-(7) that has no gradient is computed once, before the first update.
        # From then on the policy moves and these numbers do not.
        with timed(seconds, "train"):
            metrics |= prepare(config, trainer, [rollouts[g] for g in chosen if g in rollouts])
            metrics |= update(config, trainer, rollouts, chosen, step, sampled_by)
        log.rollouts(step, rollouts, chosen)

        # `update` has pushed the new weights, so this is the policy as the step leaves it.
        if evaluates(config, step):
            with timed(seconds, "eval"):
                solved, shown = queue.evaluate()
            metrics["eval/solved"] = solved
            log.sample(step, shown)

    log.step(step, metrics | seconds)
    return solved


def collect(config, task, generator, step):
    """The rollouts of a step, and how they went.

    Returns this rank's {group: list of trajectories}, the groups of all ranks that are chosen to be
    trained on, in order, and metrics. Collective.
    """
    rollouts = {}
    chosen = []
    # Rewards, sampled tokens and truncation of all ranks, a row for each group played so far.
    table_3PG = np.zeros((3, 0, config.group))
    first_prompt = step * config.prompts * config.max_rounds
    for _ in range(config.max_rounds):
        # As many new groups as are missing, from the stretch of the data that is this step's alone:
        # max_rounds times as many prompts as it wants. With dynamic sampling, of 4 groups wanted:
        #
        #     round 1   groups 0 1 2 3   chosen 0 2        (1 and 3 had equal rewards)
        #     round 2   groups 4 5       chosen 0 2 4 5
        missing = config.prompts - len(chosen)
        groups = range(table_3PG.shape[1], table_3PG.shape[1] + missing)
        starts = draw_prompts(config, task, ROLLOUT, step, groups, first=first_prompt)
        played = play(config, task, generator, starts, key=(config.seed, step))

        # `draw_prompts` gave rank r the groups r, r + world, r + 2 world, ... Each rank fills in
        # its own rows and leaves zeros elsewhere: the sum over ranks is the whole table on every
        # rank, and all ranks drop the same groups.
        round_3PG = np.zeros((3, len(groups), config.group))
        for (group, _, _), trajectories in zip(starts, played):
            rollouts[group] = trajectories
            cells = [(t.reward, t.mask.sum(), t.truncated) for t in trajectories]
            round_3PG[:, group - groups[0]] = np.array(cells).T
        round_3PG = np.array(summed(round_3PG.tolist(), generator.head_weight.device))
        table_3PG = np.concatenate([table_3PG, round_3PG], axis=1)

        # DAPO's dynamic sampling: rewards that are all equal have advantage 0, hence no gradient.
        for group, rewards_G in zip(groups, round_3PG[0]):
            equal = (rewards_G == rewards_G[0]).all()
            if not (config.dynamic_sampling and equal):
                chosen.append(group)
        if len(chosen) == config.prompts:
            break

    rewards_PG, lengths_PG, truncated_PG = table_3PG
    require_finite_tokens(config, step, lengths_PG.sum())

    # The metrics are of every group that was played, dropped ones too: they say how the policy is.
    solved_PG = rewards_PG >= 1
    return rollouts, chosen, {
        "reward/mean": rewards_PG.mean(), "reward/solved": solved_PG.mean(),
        "reward/groups_none": (~solved_PG).all(1).mean(),
        "reward/groups_all": solved_PG.all(1).mean(),
        "reward/groups_equal": equal_rewards(config, rewards_PG),
        "length/rollout_mean": lengths_PG.mean(), "length/max": int(lengths_PG.max()),
        "tokens/generated": int(lengths_PG.sum()),
        "tokens/truncated_fraction": truncated_PG.mean(),
    }  # fmt: skip


def prepare(config, trainer, groups) -> dict:
    """Fill in what the loss needs of each trajectory: reference and old log-probs, advantages, the
    final mask. Returns their metrics. Collective, each rank with its own groups."""
    # The frozen reference scores what the policy has sampled: a KL compares the two on one token.
    everyone = [t for group in groups for t in group]
    if trainer.reference is not None:
        for t, ref in zip(everyone, trainer.forward_only(everyone, trainer.reference)):
            t.ref_logprobs = ref

    # Three sources of `old`. `proximal`: a forward pass of the trainer, which leaves the sampler's
    # rounding out of the ratio. Else, with several updates, or older weights that sampled: what the
    # sampler recorded; old is smp then, and the weight (4) would be 1. Else None: the policy is its
    # own old policy, so every ratio is exactly 1 and rounding cannot clip a token.
    if config.proximal:
        for t, old in zip(everyone, trainer.forward_only(everyone)):
            t.old_logprobs = old
    elif config.minibatches > 1 or config.staleness:
        for t in everyone:
            t.old_logprobs = t.sampler_logprobs

    # A group's advantages count its truncated rollouts, which have rewards; the filter comes after
    # and takes them out of the loss only. The critic's are whitened over what is left, so after it.
    if config.advantage != "gae":
        for group in groups:
            group_advantages(config, group)
    for t in everyone:
        if t.truncated and config.overlong == "filter":
            t.mask = np.zeros_like(t.mask)
    critic = critic_advantages(config, trainer, everyone) if config.advantage == "gae" else {}
    return critic | advantage_metrics(trainer, everyone)


def update(config, trainer, rollouts, chosen, step, sampled_by):
    """The optimiser steps of a batch that policy version sampled_by made; the push; metrics."""
    # The schedule counts steps of the loop, not optimiser steps: a step's updates share one rate.
    lr = learning_rate(config, step)

    # Whole groups, in order: 5 groups in 2 minibatches are groups 0 1 and 2 3 4.
    cuts = [m * len(chosen) // config.minibatches for m in range(config.minibatches + 1)]
    updates = []
    for first, last in zip(cuts, cuts[1:]):
        batch = [t for g in chosen[first:last] if g in rollouts for t in rollouts[g]]

        # Z is summed over ranks before any forward. It is the same on all ranks, so all skip an
        # empty minibatch together (dynamic sampling or the filter can leave nothing).
        (Z,) = summed([denominator(batch, config)], trainer.device)
        if Z > 0:
            age = {"policy_age/update_mean": trainer.policy_version - sampled_by}
            updates.append(trainer.forward_backward(batch, Z) | trainer.optim_step(lr) | age)
            warn_if_skipped(step, updates[-1])

    # The next rollouts are drawn with the new weights: on-policy but for minibatches and staleness.
    # Each update's metrics count once in the mean, whatever its Z. logprob_gap is the first one's:
    # the others' weights have moved on. Both are in `mean_metrics`; tokens are summed here.
    trainer.push_weights()
    return mean_metrics(updates, step) | {
        "tokens/trained": sum(metrics["tokens/trained"] for metrics in updates),
        "tokens/trained_flat": sum(metrics["tokens/trained_flat"] for metrics in updates),
        "lr": lr, "policy_version": trainer.policy_version, "updates/skipped": trainer.skipped,
    }  # fmt: skip


# 5. The trainer: policy, optimiser and generator ----------------------------------------------


class Trainer:
    """Policy, optimiser and generator behind the few calls that a training loop needs.

    `forward_backward` may be called any number of times before `optim_step`: gradients add up over
    calls and ranks, without an average, as every loss is divided by Z, which the caller has found.
    Every method is collective: all ranks call it, with whatever share of the batch, none included.
    """

    COUNTS = "policy_version", "skipped", "skipped_in_a_row"

    def __init__(self, config, model, *, generator=None, reference=None):
        """model is trained, generator samples, reference is what the KL is measured against."""
        self.config = config
        self.policy_version = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.device = device_of(model)

        # Without a plan every rank has the whole model, and plan and grid are None (appendix B).
        self.model, self.plan, self.grid = split_over_ranks(config, model, self.device)
        self.optimizer = adamw(config, self.model)
        self.generator = split_generator(self, generator)
        self.reference = like_the_policy(self, reference)
        self.experts = ExpertLoads(config, self.model, self.device)

    def batches(self, model=None) -> PackedBatches:
        """The policy, or another model, as what runs micro-batches of sequences."""
        # A micro-batch is a row of sequences end to end, and each attends to itself only. A row is
        # filled in order, up to micro_tokens: lengths 6 3 5 2 and micro_tokens 10 give [6 3] [5 2].
        # The head, the dearest matrix, runs where a token was sampled; plans are for parallel.py.
        config = self.config
        return PackedBatches(
            self.model if model is None else model,
            attention=document_attention(config.cp_method), indices=ring_attention.indices,
            balance=self.experts.balance, micro_tokens=config.micro_tokens,
            temperature=config.temperature,
        )  # fmt: skip

    def forward_backward(self, batch, num_global_valid_tokens, *, sequences=None, supervised=False):
        """Add the gradient of (7) for this rank's trajectories; metrics of all ranks' batch.

        num_global_valid_tokens: Z, the sum of `denominator` over ranks and over all the calls that
        precede one `optim_step`; whatever its name says, under sequence_mean it counts sequences.
        sequences: those calls' trajectories, for (8); None: this call's. supervised: l_t = -lp_t
        instead of (2)-(6), and a Z of tokens. ValueError for Z <= 0.
        """
        if not num_global_valid_tokens > 0:
            raise ValueError(f"num_global_valid_tokens must be > 0, got {num_global_valid_tokens}")
        Z = num_global_valid_tokens
        measured = []

        def loss_of(micro, mask_BT, lp_BT, entropy_BT, value_BT=None):
            # The part of (7) of one micro-batch: its trajectories, and what the model has given for
            # their targets. `metrics_of_all_ranks` makes metrics of the sums left in `measured`.
            if supervised:
                loss, sums = likelihood_loss(micro, mask_BT, lp_BT, entropy_BT, Z)
            else:
                old_BT, advantage_BT, options = loss_inputs(self.config, micro, lp_BT)
                options["entropy_BT"] = entropy_BT
                if self.config.advantage == "gae":
                    options["value_BT"] = value_BT
                loss, sums = grpo_loss(lp_BT, old_BT, advantage_BT, mask_BT, Z=Z, **options)
            measured.append(sums)
            return loss

        # Ranks that run one forward together first get what all of them have played. On one device
        # that is the batch itself. Each layer of experts will attach its part of (8) as it runs.
        together, _ = gather_replica(self.model, batch)
        self.experts.begin(batch, sequences)
        if self.config.tree != "disabled":
            tree_tokens = backward_by_trees(self, together, loss_of)
            return metrics_of_all_ranks(self, measured, batch, tree_tokens)

        # Forward, loss, backward, one micro-batch after the other. Losses are parts of one sum, so
        # their gradients only have to be added, which is what backward() does to .grad.
        def loss_of_rows(indices, *scores):  # PackedBatches knows sequences by their index
            return loss_of([together[i] for i in indices], *scores)

        tokens = [t.tokens for t in together]
        masks = [t.mask for t in together]
        self.batches().forward_backward(tokens, masks, loss_of_rows)
        return metrics_of_all_ranks(self, measured, batch)

    def forward_only(self, batch, model=None) -> list:
        """Log-probs of the sampled tokens: a numpy vector of L - 1 each, 0 where not sampled."""
        return score_batch(self, batch, model or self.model, "logprobs")

    def compute_values(self, batch) -> list:
        """A critic's values, as `forward_only`: V of the state that each token was sampled in."""
        return score_batch(self, batch, self.model, "values")

    def optim_step(self, lr: float | None = None) -> dict:
        """Reduce, clip by the global norm, step, zero the gradients, version + 1.

        A non-finite norm skips the step on every rank, since every rank has the same norm, and
        `max_skipped` of those in a row raise FloatingPointError.
        """
        # Only here do ranks add up their gradients, once a step, however many micro-batches it had.
        # The sum needs no division: Z was global. The norm is of the sum, never of a rank's part.
        suspect = reduce_gradients(self.model)
        norm = clip_grad_norm(self.model, self.config.max_grad_norm)
        lr = self.config.lr if lr is None else lr
        metrics = {"grad_norm": norm.item(), "lr": lr}

        # One NaN would stay in the weights and in AdamW's moments for good.
        if norm.isfinite():
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.experts.update_bias(self.model)
            self.policy_version += 1
            self.skipped_in_a_row = 0
        else:
            metrics["nonfinite"] = skip_step(self, suspect)
        self.optimizer.zero_grad()
        self.experts.reset()
        return metrics | {"policy_version": self.policy_version}

    def push_weights(self) -> int:
        """Copy the weights into the generator, one tensor at a time, in its dtype; the version."""
        # What the two models hold in one memory needs no copy: see `split_generator`.
        copy_weights(self.model, self.generator, self.optimizer)
        return self.policy_version

    def save_checkpoint(self, path, **extra) -> None:
        """Write weights, optimiser and `extra` (JSON values) to the directory `path`, or none."""
        state = {name: getattr(self, name) for name in self.COUNTS} | extra
        write_checkpoint(path, training_tensors(self.model, self.optimizer), state)

    def load_checkpoint(self, path) -> dict:
        """Restore what save_checkpoint wrote, on any number of ranks; returns its JSON values."""
        state = read_training(path, self.model, self.optimizer, counts=("step", *self.COUNTS))
        for name in self.COUNTS:
            setattr(self, name, state[name])
        return state


# 6. Rollouts: what is sampled, and with which random numbers ----------------------------------


def uniforms(key, count):
    """count numbers in [0, 1) that depend on the key (non-negative integers) alone."""
    # A counter-based generator: no state is carried from one rollout, step or run to the next.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


class Play(Row):
    """A trajectory under way: the row that `generate` decodes, and the task's state beside it.

    key             (seed, step); its random numbers are those of (*key, group, first)
    group, state    the number of its group, and what the task remembers
    prompt, limit   the tokens to begin with, and how many can be drawn behind them
    first, count    it stands for rollouts first .. first + count - 1 of its group: one, but for
                    tree rollouts (appendix C), which are played once until they fork
    forks_left      turn boundaries at which it will still fork: 0 without tree rollouts
    """

    def __init__(self, key, group, state, prompt, limit, *, first=0, count=1, forks_left=0):
        # The draws are made here, all at once, from the rollout's own key. Which batch it is
        # decoded in, on which rank and beside whom, can therefore change no token.
        super().__init__(prompt, uniforms((*key, group, first), limit))
        self.key = key
        self.group = group
        self.state = state
        self.reward = 0.0
        self.first = first
        self.count = count
        self.forks_left = forks_left
        self.turn = len(prompt)  # index of the turn's first token
        self.path = [(self.turn, first, count)]
        self.turn_rewards = []

    def end_turn(self, task, forks=1):
        """Give the finished turn to the task: the plays that go on, none at the end."""
        #     ?  3  .  higher  5  .            one trajectory of `guess`; `.` ends a turn
        #        x  x          x  x            sampled, and trained on
        #              queued                  the task's reply: seen by the policy, not trained on
        answer = self.tokens[self.turn :]
        self.state, reply, reward = ask_reply(task, self, answer)

        # The reward stands at the turn's last target, which is one less than its last token.
        self.reward += float(reward)
        self.turn_rewards = [*self.turn_rewards, (len(self.tokens) - 2, float(reward))]
        if reply is None:
            return []

        # Queued tokens are fed to the model instead of sampled ones, so a conversation goes on in
        # the same row and the same cache, and nothing is ever decoded to text and encoded again.
        self.queue.extend(reply)
        self.turn = len(self.tokens) + len(reply)
        return fork(self, forks) if self.forks_left else [self]

    def trajectories(self):
        """One for each rollout that it stands for: all alike, where it ended before it forked."""
        logprobs = np.array(self.logprobs)
        # NUMERICS: a token whose sampler log-prob is not finite has no ratio: it leaves loss and Z.
        # Pinned by tests/test_rollout.py::test_non_finite_sampler_logprobs_leave_the_loss.
        mask = np.array(self.mask, dtype=bool) & np.isfinite(logprobs)
        logprobs = np.where(mask, logprobs, 0.0)
        made = (self.group, self.tokens, mask, logprobs, self.reward, self.truncated, self.path,
                self.turn_rewards)  # fmt: skip
        return [Trajectory(*made) for _ in range(self.count)]


def rollout(
    model, task, starts, /, *, group, max_new_tokens, temperature, key, forks=1, fork_turns=0,
    ending=None, slots=None,
):  # fmt: skip
    """Play every start `group` times; lists of trajectories, by group, in rollout order.

    starts          list of (group number, state, prompt tokens)
    group           rollouts of each start
    max_new_tokens  of a trajectory behind its prompt, the task's replies included
    temperature     of sampling; 0 is greedy
    key             (seed, step); draw t of rollout r of group g is uniforms((seed, step, g, r))[t]
    forks           children of a trajectory at each of its first fork_turns turn boundaries
    ending          called with the plays whose turn has ended, see `SharedTask`
    slots           rollouts that are decoded at a time; when one ends, the next one takes its slot
    """
    # Without forks a play for each rollout. With them each play begins as `share` rollouts: group
    # 4, forks 2, fork_turns 1 begins with plays 0 and 2, which stand for rollouts 0 1 and 2 3.
    share = forks**fork_turns
    plays = []
    for number, state, prompt in starts:
        for first in range(0, group, share):
            how = dict(first=first, count=share, forks_left=fork_turns)
            plays.append(Play(key, number, state, prompt, max_new_tokens, **how))

    # `generate` computes equal prompts once, lets a waiting play in where one has ended, and calls
    # end_turn wherever a token of task.end was sampled. A play that will fork reserves a slot for
    # each rollout, so that a fork finds its parent's keys in the cache.
    ended = generate(
        model, plays, max_new_tokens=max_new_tokens, temperature=temperature, end=task.end,
        ending=ending, after=lambda play: play.end_turn(task, forks), slots=slots,
        branches=lambda play: play.count,
    )  # fmt: skip

    # Plays end in any order; a group's rollouts are put back into theirs.
    groups = {number: [] for number, _, _ in starts}
    for play in sorted(ended, key=lambda play: play.first):
        groups[play.group] += play.trajectories()
    return list(groups.values())


# =============================================================================================
# The idea ends here; what follows makes it fast, strict or connected.
# =============================================================================================


# A. Settings: flags, their help, what cannot be combined --------------------------------------
# For whoever looks up a flag, or adds one. Who knows what a setting means can skip everything but
# the fields of Config, and the table of papers.

# Paper -> settings (the rest stays at its default; every paper has learning rates of its own):
#
#     GRPO     arXiv:2402.03300  --advantage group_std --aggregation sequence_mean --clip-high 0.2
#                                --kl-coef 0.04 --entropy-coef 0
#     Dr.GRPO  arXiv:2503.20783  --aggregation constant --clip-high 0.2 --entropy-coef 0
#     RLOO     arXiv:2402.14740  --advantage leave_one_out --kl-coef 0.05 --kl k1 --kl-in reward
#                                --minibatches 1 --entropy-coef 0
#     DAPO     arXiv:2503.14476  --advantage group_std --dynamic-sampling --max-rounds 3
#                                --overlong filter --entropy-coef 0
#     GSPO     arXiv:2507.18071  --advantage group_std --ratio sequence --aggregation sequence_mean
#                                --clip-low 3e-4 --clip-high 4e-4 --entropy-coef 0
#     CISPO    arXiv:2506.13585  --advantage group_std --objective cispo --entropy-coef 0
#     TIS, decoupled PPO (arXiv:2110.00641)    --proximal --importance-cap 2
#     dual clip (arXiv:1912.09729)             --dual-clip 3
#     PPO      arXiv:1707.06347, 1506.02438    --advantage gae --clip-high 0.2 --entropy-coef 0
#     tree rollouts (after arXiv:2506.11902)   --forks 2 --fork-turns 2 --advantage per_branch


@dataclass
class Config:
    """The command line: a field is a flag, its comment the help."""

    # the run
    task: str = "guess"  # guess | sort | lookup | jsonl | FILE.py:Class
    out: str = ""  # directory of the run; empty: the first free runs/TASK-N
    resume: bool = False  # go on from the newest complete checkpoint in --out
    resume_or_start: bool = False  # --resume if --out holds a run, else begin one
    overwrite: bool = False  # delete the run that --out holds
    seed: int = 0  # of weights, data and sampling
    steps: int = 150  # rollout batches
    target: float = 0.95  # eval/solved that the run says it met or missed
    # the task
    size: int = 7  # guess: numbers; sort: symbols; lookup: keys, and values
    turns: int = 4  # guess: answers allowed
    length: int = 4  # sort: symbols to sort
    data: str = ""  # jsonl: file of lines, {"question", "answer"} or {"messages", "answer"}
    template: str = ""  # jsonl: chat (its own) | raw | text with {question}; empty: chat, else raw
    instruction: str = "End with '#### ' and the answer."  # jsonl: a line behind each question
    system: str = ""  # jsonl: the system's message, in a chat template
    reward: str = ""  # jsonl: FILE.py:function of (text, row); empty: what follows ####
    demos: int = 0  # supervised steps on the task's demonstrations before the loop (demos.jsonl)
    demo_data: str = ""  # jsonl: file of demonstrations, lines as of --data; empty: --data's own
    demo_lr: float = None  # AdamW, in the supervised steps; after --lr-warmup it stays constant
    # the model
    model: str = ""  # Hugging Face checkpoint directory; empty: random weights of the shape below
    layers: int = 3  # decoder layers
    hidden: int = 96  # model width
    heads: int = 4  # query heads; half as many key heads
    dtype: str = "float32"  # of the trainer's weights: float32 | float64 | bfloat16
    compute_dtype: str = ""  # of products, coarser: then --dtype is of the masters; empty: the same
    generator_dtype: str = ""  # of the generator's weights; empty: the same
    device: str = ""  # cpu | cuda; empty: cuda where there is one
    # rollouts
    prompts: int = 28  # groups a step, over all ranks
    group: int = 16  # rollouts of one prompt
    staleness: int = 0  # K: batch b is sampled with the weights of step b - K; 0: on-policy
    batch_rows: int = 1024  # rollouts that a rank decodes at a time; a new one enters as one ends
    max_new_tokens: int = 16  # a trajectory's limit after its prompt, the task's replies included
    temperature: float = 1.0  # of sampling and of every log-prob
    forks: int = 1  # children of a trajectory at a turn boundary (tree rollouts)
    fork_turns: int = 0  # turn boundaries that fork; group must divide by forks ** fork_turns
    dynamic_sampling: bool = False  # drop groups whose rewards are all equal (DAPO)
    max_rounds: int = 1  # rounds of rollouts to replace dropped groups; 1: only drop
    overlong: str = "keep"  # truncated trajectories: keep | filter (out of the loss)
    # the loss
    advantage: str = "group_mean"  # group_std | group_mean | leave_one_out | per_branch | gae
    aggregation: str = "token_mean"  # token_mean | sequence_mean | constant
    objective: str = "clip"  # clip | cispo
    ratio: str = "token"  # token | sequence (GSPO)
    clip_low: float = 0.2  # ratio clip below 1
    clip_high: float = 0.28  # ratio clip above 1
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative; 0: none
    cispo_bound: float = 5.0  # absolute bound of the ratio in cispo
    kl: str = "k3"  # k1 | k2 | k3
    kl_coef: float = 0.0  # weight of the KL to the frozen reference; 0: no reference is kept
    kl_in: str = "loss"  # loss | reward
    entropy_coef: float = None  # weight of the entropy bonus
    proximal: bool = False  # old log-probs from a trainer pass; otherwise the sampler's
    importance_cap: float = 0.0  # C of truncated importance sampling; 0: none
    gamma: float = 1.0  # gae: discount of a sampled token
    gae_lambda: float = 0.95  # gae: 0: one step and the critic; 1: rewards to the end
    value_coef: float = 0.5  # gae: weight of the critic's loss
    value_clip: float = 0.2  # gae: how far a value may go from its old one; 0: any
    balance_coef: float = 0.0  # experts: weight of the loss that balances their loads; 0: none
    router_bias_rate: float = 0.0  # experts: step of the routers' bias after an update; 0: no bias
    # the optimiser
    lr: float = None  # AdamW
    lr_warmup: int = 5  # steps of linear warm-up, at most --steps; 0: none
    lr_first_step: str = "nonzero"  # the first step of a warm-up of 5 uses: nonzero 1/5 | zero 0
    lr_decay: str = "linear"  # from there to the last step: constant | linear | cosine
    lr_min: float = 0.0  # share of lr that the decay ends at
    weight_decay: float = 0.0  # AdamW, decoupled
    beta2: float = 0.99  # AdamW
    minibatches: int = 2  # optimiser steps a rollout batch
    max_grad_norm: float = 1.0  # clip the global norm
    max_skipped: int = 3  # stop after so many non-finite gradients in a row
    micro_tokens: int = 16384  # tokens a forward, of a tree's with sparse; a longer sequence alone
    data_parallel: str = "ddp"  # ddp (full copies) | fsdp (shards) | zero1 (ddp, moments sharded)
    shard_ranks: int = 0  # fsdp: how many ranks share one copy of the weights (HSDP); 0: all of d
    offload: bool = False  # fsdp: shards, gradients and optimiser stay on the CPU
    compile: bool = False  # torch.compile each layer (needs a C++ compiler on a CPU)
    ac: str = "none"  # activations computed again: none | full | layers (every second) | op
    plan: str = ""  # d2t2, p2c2, archon:d2; A|B: generator A, trainer B; A+B: on other ranks
    cp_method: str = "ring"  # the plan's c: ring | allgather | ulysses | usp
    pp_schedule: str = "1f1b"  # the plan's p: 1f1b | interleaved1f1b | zbv
    tree: str = "disabled"  # share prefixes: disabled | sparse (packed) | dta (block by block)
    max_tokens: int = 0  # of a block with --tree dta
    recompute: bool = False  # with --tree dta: blocks above are run forward twice, not kept
    # output
    eval_every: int = 10  # steps between evaluations; the last step always evaluates
    eval_prompts: int = 70  # held-out prompts of one evaluation
    save_every: int = 50  # steps between checkpoints, and the last; 0: only the last
    keep: int = 2  # newest checkpoints kept
    log_every: int = 5  # steps between lines of the table
    log_rollouts: str = "some"  # to rollouts.jsonl: all | some (what `audit` needs) | none
    tensorboard: bool = False  # also write TensorBoard events (needs tensorboard)
    timeout: int = 60  # seconds that a rank waits for another before the run ends
    threads: int = 1  # CPU threads of each rank

    # Defaults that depend on what the loop begins with: random weights, weights that demonstrations
    # have taught, or a checkpoint's. Random weights need long steps, and a bonus for still trying
    # everything; the same would undo in a few steps what the other two know (tests/RESULTS.md).
    # A field of this table is None until __post_init__ has looked here.
    BY_START = dict(
        lr=dict(random=1e-3, demos=1e-4, model=1e-6),
        entropy_coef=dict(random=0.02, demos=0.0, model=0.0),
        demo_lr=dict(random=1e-3, demos=1e-3, model=1e-5),
    )

    CHOICES = dict(
        dtype=("float32", "float64", "bfloat16"), data_parallel=("ddp", "fsdp", "zero1"),
        ac=("none", "full", "layers", "op"),
        cp_method=("ring", "allgather", "ulysses", "usp"),
        pp_schedule=("1f1b", "interleaved1f1b", "zbv"), tree=("disabled", "sparse", "dta"),
        generator_dtype=("", "float32", "float64", "bfloat16"),
        compute_dtype=("", "float32", "float64", "bfloat16"), device=("", "cpu", "cuda"),
        advantage=("group_std", "group_mean", "leave_one_out", "per_branch", "gae"),
        aggregation=("token_mean", "sequence_mean", "constant"), objective=("clip", "cispo"),
        ratio=("token", "sequence"), lr_decay=("constant", "linear", "cosine"),
        lr_first_step=("nonzero", "zero"),
        kl=("k1", "k2", "k3"), kl_in=("loss", "reward"), overlong=("keep", "filter"),
        log_rollouts=("all", "some", "none"),
    )  # fmt: skip

    # What a resumed run may change: none of it enters the steps that follow, beyond rounding.
    FREE = (
        "out", "resume", "resume_or_start", "overwrite", "steps", "eval_every", "save_every",
        "keep", "log_every", "log_rollouts",
        "target", "tensorboard", "timeout", "threads", "micro_tokens", "batch_rows", "device",
        "plan", "data_parallel", "cp_method", "pp_schedule", "tree", "max_tokens", "recompute",
        "ac", "shard_ranks", "offload", "compile",
    )  # fmt: skip

    # Flags that older runs do not have in their config.json.
    ADDED = (
        "resume_or_start", "log_rollouts", "shard_ranks", "offload", "compile", "lr_first_step",
        "lr_min", "instruction", "system", "reward", "demo_data", "demo_lr", "balance_coef",
        "router_bias_rate", "staleness", "compute_dtype",
    )  # fmt: skip

    YEAR = 365 * 24 * 3600  # of seconds: --timeout counts in C++, which knows an end of time
    # Numbers meet float32 tensors, and int64 ones: what those cannot hold is refused here.
    LARGEST = {int: 2**63 - 1, float: torch.finfo(torch.float32).max / 2}
    ZERO = "target", "lr_warmup", "gae_lambda", "value_clip", "save_every"  # may be 0

    def __post_init__(self):
        # A checkpoint that demonstrations have taught more is still a checkpoint. From here on the
        # fields are numbers, also in config.json: a resumed run has those that it began with.
        start = "demos" if self.demos else "random"
        if self.model:
            start = "model"
        for name, defaults in self.BY_START.items():
            if getattr(self, name) is None:
                setattr(self, name, defaults[start])

    def check(self) -> "Config":
        """Raise ValueError for anything that cannot run, before anything is built or written."""
        # Each value by itself first: what the combinations compute with must be numbers.
        wrong = []
        for f in dataclasses.fields(self):
            flag = _flag(f.name)
            value = getattr(self, f.name)
            defaults = self.BY_START.get(f.name, {"always": f.default}).values()
            if f.type is float and type(value) is int:
                setattr(self, f.name, float(value))
            elif type(value) is not f.type:
                wrong.append(f"{flag} must be {f.type.__name__}, got {value!r}")
            elif f.name in self.CHOICES and value not in self.CHOICES[f.name]:
                allowed = ", ".join(filter(None, self.CHOICES[f.name]))
                wrong.append(f"{flag} must be one of {allowed}, got {value!r}")
            elif f.type in (int, float) and not 0 <= value <= self.LARGEST[f.type]:
                wrong.append(f"{flag} must be finite and at least 0, got {value}")
            elif value == 0 and all(defaults) and f.name not in self.ZERO:
                wrong.append(f"{flag} must be positive, got 0")

        wrong = wrong or [text for bad, text in self._combinations() if bad]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _combinations(self):
        """(whether it is wrong, what to say then) for settings that do not go together."""
        leaves = self.forks ** min(self.fork_turns, 64)  # beyond any group, and quickly computed
        own_shape = not self.model
        gae = self.advantage == "gae"

        # Advantages and the loss.
        yield self.group == 1 and not gae, (
            "--group 1 has no baseline, so every advantage is 0: use 2 or more, or --advantage gae")
        yield gae and max(self.gamma, self.gae_lambda) > 1, "--gamma and --gae-lambda are at most 1"
        yield gae and self.dynamic_sampling, "--dynamic-sampling drops groups that gae learns from"
        yield self.group % leaves, f"--group {self.group} must divide by forks^fork_turns {leaves}"
        yield (self.forks > 1) != (self.fork_turns > 0), "--forks and --fork-turns go together"
        yield self.clip_low >= 1, f"--clip-low must be under 1, got {self.clip_low}"
        yield self.beta2 >= 1, f"--beta2 must be under 1, got {self.beta2}"
        yield 0 < self.dual_clip <= 1 + self.clip_high, (
            f"--dual-clip must be over 1 + clip_high (papers: 3), got {self.dual_clip}")
        yield self.objective == "cispo" and (self.dual_clip or self.ratio == "sequence"), (
            "--objective cispo has its own bound: drop --dual-clip and --ratio sequence")
        yield self.dynamic_sampling and (self.entropy_coef or self.kl_coef), (
            "--dynamic-sampling drops groups of advantage 0, but they have entropy and KL terms: "
            "set --entropy-coef 0 and --kl-coef 0")
        yield self.timeout > self.YEAR, f"--timeout must be at most a year, got {self.timeout} s"
        yield self.max_rounds > 1 and not self.dynamic_sampling, (
            "--max-rounds is for --dynamic-sampling")
        old_is_sampler = (self.minibatches > 1 or self.staleness > 0) and not self.proximal
        yield self.importance_cap and old_is_sampler, (
            "--importance-cap needs --proximal, or --minibatches 1 and no --staleness: else old is "
            "the sampler itself")
        yield self.staleness > MOST_UNDER_WAY, (
            f"--staleness {self.staleness}: so many batches are kept in memory, and in each "
            f"checkpoint; at most {MOST_UNDER_WAY}")
        yield self.lr_min > 1, f"--lr-min is a share of --lr, at most 1, got {self.lr_min}"
        yield self.lr_first_step == "zero" and (self.lr_warmup == 0 or self.steps == 1), (
            "--lr-first-step zero begins a warm-up with a step that changes no weight: it needs "
            "--lr-warmup, and --steps 2 or more")
        yield self.minibatches > self.prompts, (
            f"--minibatches {self.minibatches} is over --prompts {self.prompts}; one is empty")

        # Plans and trees. A plan's own mistakes are named by Plan.parse, here before anything runs.
        sides = parallel.Allocation.parse(self.plan or "d1").groups
        yield len(sides) > 2 or (len(sides) == 2 and sum(map(len, sides)) > 2), (
            f"--plan {self.plan}: A+B has two plans, the generator's and the trainer's, and "
            f"neither has a |")
        yield len(sides[0]) > 2, (
            f"--plan {self.plan}: A|B has two plans, the generator's and the trainer's")
        plan = sides[-1][-1]

        # A plan may name an engine. archon is AReaL's engine in plain torch, and it is accepted
        # because this project is in plain torch too. Other names promise engines that do not run.
        engines = [one.backend for side in sides for one in side]
        absent = [engine for engine in engines if engine not in (None, "archon")]
        same = re.sub(rf"({'|'.join(parallel.BACKENDS)})(\[\w+\])?:", "", self.plan)
        if plan.backend == "fsdp":
            same += " --data-parallel fsdp"
        yield absent, (
            f"--plan {self.plan}: only the engine archon runs here, got {' and '.join(absent)}; "
            f"write {same}")
        if sides[0][0] is not plan:
            parallel.require_generator_plan(sides[0][0])
        yield self.cp_method != "ring" and plan.cp == 1, "--cp-method needs a --plan with c"
        yield self.pp_schedule != "1f1b" and plan.pp == 1, "--pp-schedule needs a --plan with p"
        yield self.tree == "dta" and self.max_tokens < 1, "--tree dta needs --max-tokens, a block's"
        yield self.tree != "dta" and (self.max_tokens or self.recompute), (
            "--max-tokens and --recompute are for --tree dta")
        yield self.tree == "dta" and plan.pp > 1, (
            "--tree dta has no p: a schedule runs forward and backward of microbatches in an order "
            "of its own, and blocks need theirs; --tree sparse")
        yield self.tree == "dta" and self.data_parallel == "fsdp", (
            "--tree dta has no fsdp: FSDP2 gathers and reduces once a step, not once a block; "
            "use --data-parallel zero1, or --tree sparse")
        yield self.tree == "dta" and self.ac != "none", (
            "--tree dta has its own --recompute, of blocks; --ac none")
        yield self.tree == "dta" and plan.cp > 1, (
            "--tree dta has no c: a block's keys come from the stack of one rank; --tree sparse")
        for name in ("shard_ranks", "offload"):
            yield getattr(self, name) and self.data_parallel != "fsdp", (
                f"{_flag(name)} is about shards of weights: it needs --data-parallel fsdp")
        yield self.tree == "dta" and self.compile, (
            "--tree dta has no --compile: each block would be a shape of its own; --tree sparse")
        yield self.pp_schedule == "zbv" and self.data_parallel == "fsdp", (
            "--pp-schedule zbv cannot be with --data-parallel fsdp; use zero1")

        # The run, its model and its task.
        yield is_finer(products(self), self.dtype), (
            f"--compute-dtype {self.compute_dtype} is finer than --dtype {self.dtype}, that of the "
            f"weights: products would be of what the weights have lost")
        yield self.resume and self.overwrite, "--resume goes on with a run, --overwrite deletes it"
        yield self.resume_or_start and self.overwrite, (
            "--resume-or-start goes on with a run, --overwrite deletes it")
        yield self.resume and not self.out, "--resume needs --out DIR, the run to go on with"
        yield self.resume_or_start and not self.out, (
            "--resume-or-start needs --out DIR, where the run is or will be")
        yield own_shape and (self.hidden % self.heads or self.hidden // self.heads % 2), (
            f"--hidden {self.hidden} must divide by --heads {self.heads} into an even head_dim")
        yield own_shape and self.heads % 2 and self.heads > 1, (
            f"--heads must be 1 or even, got {self.heads}")
        yield self.task == "jsonl" and not (self.data and self.model), (
            "--task jsonl needs --data FILE.jsonl and --model DIR with a tokenizer.json")

        # Text. A task from a file may read these flags too; those of this file but one do not.
        given = [name for name in TEXT_FLAGS if getattr(self, name) != getattr(Config, name)]
        yield self.task in TASKS and self.task != "jsonl" and given, (
            f"{' and '.join(map(_flag, given))}: for --task jsonl, not {self.task}")
        whole = self.template not in ("", "chat", "raw")
        yield whole and "{question}" not in self.template, (
            f"--template must be chat, raw or a text with {{question}}, got {self.template!r}")
        yield whole and (self.system or self.instruction not in ("", Config.instruction)), (
            "--template with {question} is the whole prompt: write --instruction, --system there")
        yield self.system and self.template == "raw", "--system is for --template chat, not raw"
        yield not self.demos and self.demo_lr not in self.BY_START["demo_lr"].values(), (
            "--demo-lr is of supervised steps: it needs --demos, their number")
        yield self.demo_data and not self.demos, (
            "--demo-data needs --demos N, the number of supervised steps")
        yield self.task == "sort" and self.length > self.size, (
            f"--length {self.length} distinct symbols need --size of as many, got {self.size}")
        yield self.device == "cuda" and not torch.cuda.is_available(), (
            "--device cuda: torch sees no CUDA device here")


# The keyword arguments of `grpo_loss` that are flags.
LOSS_SETTINGS = (
    "aggregation", "objective", "ratio", "clip_low", "clip_high", "dual_clip", "cispo_bound",
    "importance_cap", "kl", "kl_coef", "kl_in", "entropy_coef", "value_coef", "value_clip",
)  # fmt: skip

# The flags that only `Jsonl` reads.
TEXT_FLAGS = "data", "template", "instruction", "system", "reward", "demo_data"


def _flag(name):
    """A field's name as it is typed."""
    return "--" + name.replace("_", "-")


@functools.cache
def _help_texts():
    """Field of Config -> the comment behind it, which is its help: so it cannot say something else.

    Kept, because inspect parses this whole file to find the class, a tenth of a second.
    """
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))


def _default_text(f):
    """A field's default, as --help shows it."""
    if f.name not in Config.BY_START:
        return f"{f.default!r}"
    by_start = Config.BY_START[f.name]
    return (f"{by_start['random']!r}; with --demos {by_start['demos']!r}; "
            f"with --model {by_start['model']!r}")  # fmt: skip


def add_flags(parser, fields):
    """Fields of Config as flags of a parser. One that is not typed is absent from what it finds."""
    for f in fields:
        text = _help_texts()[f.name].replace("%", "%%")
        how = dict(type=f.type, metavar=f.type.__name__, help=f"{text} [{_default_text(f)}]")
        if f.type is bool:
            how = dict(action=argparse.BooleanOptionalAction, help=text)
        parser.add_argument(_flag(f.name), default=argparse.SUPPRESS, **how)


def parse_config(argv) -> Config:
    """Flags from the fields of Config; with --resume, what the run stored is the default."""
    parser = argparse.ArgumentParser(
        prog="train_grpo.py", description=__doc__.split("\n")[0], allow_abbrev=False,
        usage="%(prog)s [--FLAG VALUE ...] | check [--all] | bench | plot RUN .. | audit RUN"
        " | eval RUN_OR_DIR | chat RUN_OR_DIR | export RUN DIR  (or --help)",
    )  # fmt: skip
    add_flags(parser, dataclasses.fields(Config))

    # Flags that were not typed are absent from `given`: a resumed run has its own values for them.
    given = vars(parser.parse_args(argv))
    path = Path(given.get("out", "")) / "config.json"
    if given.get("resume_or_start") and given.get("out"):
        given["resume"] = path.exists()
    if not (given.get("resume") and given.get("out") and path.exists()):
        return Config(**given)
    return resumed_config(path, given)


def resumed_config(path, given) -> Config:
    """What the run stored at `path`, with what the command line may change of it; ValueError for
    a change that would make it another run."""
    stored = models.read_json(path, what="the configuration of a run")
    # A run that began before a flag existed had that flag's default.
    defaults = {f.name: f.default for f in dataclasses.fields(Config)}
    names = defaults.keys()
    if "instruction" not in stored and stored.get("task") != "jsonl":
        stored["template"] = ""  # it was another flag, which only jsonl read
    stored = {name: defaults[name] for name in Config.ADDED} | stored
    if stored.keys() != names:
        raise ValueError(f"{path} is not of this version of Config: start a new run")

    # A task's file is code, and so is a reward's. The run's directory may have come from somebody
    # else, so a file that it names is never imported: whoever goes on with the run names it.
    for field in ("task", "reward"):
        spec = str(stored[field])
        if spec == "" or (field == "task" and spec in TASKS):
            continue
        name = spec.rpartition(":")[2]
        if given.get(field, "").rpartition(":")[2] != name:
            raise ValueError(
                f"the {field} of this run is a file's; give it again, as --{field} "
                f"FILE.py:{name} (the run had {spec!r})"
            )
        stored[field] = given[field]

    # `steps` is not free if the rates depend on the last step. They do if they decay, and if the
    # old or the new number of steps is shorter than the warm-up, which then ends with the run.
    free = set(Config.FREE)
    # Stored values may be of any type. `check` refuses them by name.
    are_counts = all(type(stored[name]) is int for name in ("steps", "lr_warmup"))
    fewest = min(given["steps"], stored["steps"]) if "steps" in given and are_counts else math.inf
    if stored["lr_decay"] != "constant" or (are_counts and fewest < stored["lr_warmup"]):
        free.remove("steps")
    changed = [
        f"{_flag(name)} {value!r} (the run has {stored[name]!r})"
        for name, value in given.items()
        if name not in free and value != stored[name]
    ]
    if changed:
        why = ""
        if "steps" not in free and "steps" in given and given["steps"] != stored["steps"]:
            why = (f"; with --lr-decay {stored['lr_decay']} and --lr-warmup {stored['lr_warmup']} "
                   f"the rates depend on the last step")  # fmt: skip
        raise ValueError(
            f"--resume cannot change {', '.join(changed)}{why}; start a new run instead")
    return Config(**(stored | given))


# B. A batch on many ranks: shards, plans, and metrics of all ranks ----------------------------
# How the Trainer's few calls reach other ranks. Packed batches under a plan are parallel.py's, its
# section 18. On one device, or with whole copies (DDP), all of it does nothing: skip it.


def products(config) -> str:
    """The precision in which the trainer computes."""
    return config.compute_dtype or config.dtype


def is_finer(a, b) -> bool:
    """Whether of two precisions, by name, the first has the smaller unit in the last place."""
    return torch.finfo(getattr(torch, a)).eps < torch.finfo(getattr(torch, b)).eps


def is_mixed(config) -> bool:
    """Whether the weights that the optimiser updates are finer than those that compute."""
    return products(config) != config.dtype


def of_sampler(config) -> str:
    """The precision of the generator's weights, to which a push rounds the trainer's."""
    return config.generator_dtype or products(config)


def keep_states_wide(config, model):
    """In mixed precision a model's states between layers stay in --dtype, the generator's too."""
    if is_mixed(config):
        own = next(model.parameters()).dtype
        model.residual_dtype = torch.promote_types(own, getattr(torch, config.dtype))
    return model


def splits(config) -> bool:
    """Whether a rank's part of the model is less than the model, or more than plain modules."""
    # Whole copies need no plan: their gradients are summed before the optimiser's step.
    special = config.shard_ranks or config.offload or config.compile or config.ac != "none"
    special = special or is_mixed(config)
    return bool(config.plan or config.data_parallel != "ddp" or special)


def plans_of(config):
    """The generator's and the trainer's Plan that --plan gives; None for one that it does not.

    A|B: both have the same ranks. A+B: each has its own. B alone is the trainer's.
    """
    if not config.plan:
        return None, None
    groups = parallel.Allocation.parse(config.plan).groups
    *generator, trainer = [plan for plans in groups for plan in plans]
    return generator[0] if generator else None, trainer


def generator_plan(config) -> Plan:
    """The generator's plan: A of --plan A|B or A+B, else the trainer's t and e, with which every
    other rank is a replica."""
    own, trainer = plans_of(config)
    if own is not None:
        return own
    trainer = trainer or Plan()
    replicas = dist.get_world_size() // trainer.tp
    return Plan(dp=replicas, tp=trainer.tp, ep=trainer.ep, etp=trainer.etp)


def device_of(model):
    """Where a model is, or will be: of one on the meta device the device of this rank."""
    if not on_meta(model):
        return next(model.parameters()).device
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def split_generator(trainer, generator):
    """This rank's part of the generator. Weights of the trainer's dtype and layout are its own, in
    the same memory. A model that has memory already stays as it is: a whole copy."""
    if generator is None or not on_meta(generator):
        return generator
    plan = generator_plan(trainer.config)
    if plan.tp > 1 or plan.ep > 1:
        # A plan of the same degrees has the same ranks in the same groups.
        grid = trainer.grid
        if grid is None or grid.plan.shapes != plan.shapes:
            grid = Grid.make(plan, trainer.device.type)
        parallel.split_for_decoding(generator, plan, device_mesh=grid)
    parallel.share_or_allocate(trainer.model, generator, trainer.device)
    return generator


def split_over_ranks(config, model, device):
    """The model as this rank holds it, the Plan and the Grid; both None where there is no plan.

    A model on the meta device is split before it has any memory, and then gets its first weights.
    """
    if not splits(config):
        return model, None, None
    keep_states_wide(config, model)

    # The shapes of the whole are kept for the filling: a stage of a pipeline has but some tensors.
    whole = copy.deepcopy(model) if on_meta(model) else None
    plan = plans_of(config)[1] or Plan(dp=dist.get_world_size())
    grid = Grid.make(plan, device.type, shard=config.shard_ranks or None)
    compute_dtype = getattr(torch, products(config)) if is_mixed(config) else None
    model = split_by(config, model, plan, grid, compute_dtype=compute_dtype)
    if whole is not None:
        parallel.materialise(model)
        first_weights(config, model, whole)
    return model, plan, grid


def split_by(config, model, plan, grid, compute_dtype=None):
    """This rank's part of a whole model."""
    # Each micro-batch brings an attention of its own; the one given here stands in until then.
    return parallelize(
        model, plan, device_mesh=grid, mode=config.data_parallel,
        attention=models.causal_attention, schedule=config.pp_schedule, ac=config.ac,
        compile=config.compile, offload=config.offload, compute_dtype=compute_dtype,
    )  # fmt: skip


def on_meta(model) -> bool:
    """Whether a model has shapes alone, and no memory."""
    return next(model.parameters()).is_meta


def first_weights(config, model, whole):
    """Fill a model with the checkpoint's weights, or with random ones that the seed alone decides.

    whole: on the meta device, it has the shapes of all tensors, of which the model may have parts.
    """
    for stage in part_of(model).stages:
        if config.model:
            models.load_hf(config.model, model=stage, whole=whole)
        else:
            models.draw_weights(stage, config.seed, whole)


def like_the_policy(trainer, reference):
    """The reference, split as the policy is; its weights come later, see `keep_reference`."""
    if reference is None or not on_meta(reference):
        return reference
    reference = split_by(trainer.config, reference, trainer.plan, trainer.grid)
    parallel.materialise(reference)
    return reference


@torch.no_grad()
def copy_part(source, target):
    """Copy what this rank has of a model into one that is split in the same way; sends nothing."""
    part_of(source).reshard()
    into = parallel.tensors_of(target)
    for name, x in parallel.tensors_of(source).items():
        local(into[name]).copy_(local(x))


def learning_rate(config, step) -> float:
    """AdamW's rate in a step of the loop."""
    warmup = min(config.lr_warmup, config.steps)
    return config.lr * lr_factor(
        step, warmup=warmup, total=config.steps, decay=config.lr_decay,
        min_ratio=config.lr_min, first_step=config.lr_first_step,
    )  # fmt: skip


def adamw(config, model):
    """The optimiser of this rank's parameters; `zero1` keeps a share of the moments."""

    def make(parameters):
        return torch.optim.AdamW(
            parameters, lr=config.lr, betas=(0.9, config.beta2),
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip

    return LocalOptimizer(model, make, zero=config.data_parallel == "zero1")


def padded(vectors, like):
    """Ragged numpy vectors -> one (B, T) tensor of `like`'s dtype and device, zero where short."""
    lengths_B = np.array([len(vector) for vector in vectors])
    out_BT = np.zeros((len(vectors), lengths_B.max()))
    out_BT[np.arange(out_BT.shape[1]) < lengths_B[:, None]] = np.concatenate(vectors)
    return torch.from_numpy(out_BT).to(like)


def loss_inputs(config, micro, lp_BT):
    """What `grpo_loss` takes of some trajectories: old log-probs, advantages, keyword arguments."""

    def column(name):
        return padded([getattr(t, name) for t in micro], lp_BT)

    # `prepare` gives old and reference log-probs to all trajectories of a step or to none.
    options = {name: getattr(config, name) for name in LOSS_SETTINGS}
    options["sampler_BT"] = column("sampler_logprobs")
    old_BT = None if micro[0].old_logprobs is None else column("old_logprobs")
    if micro[0].ref_logprobs is not None:
        options["ref_BT"] = column("ref_logprobs")
    if config.advantage == "gae":
        options["old_value_BT"] = column("values")
        options["return_BT"] = column("returns")
    return old_BT, column("advantages"), options


def denominator(batch, config) -> float:
    """This rank's share of Z of (7); the sum over ranks is `num_global_valid_tokens`."""
    masks = [t.mask for t in batch]
    return normaliser(masks, aggregation=config.aggregation, max_new_tokens=config.max_new_tokens)


def document_attention(method):
    """For `PackedBatches`: makes the causal attention of each document of a row.

    method: of a ring, where the row's tokens are spread over the ranks of a context.
    """

    def attention_of_row(document_1S, group):
        # The block-diagonal mask of the whole row. Tiles between documents cost nothing, and a ring
        # cuts the mask to what each pair of ranks needs.
        mask = ring_attention.Mask.documents(doc_ids=document_1S)
        return masked_attention(mask, group, method)

    return attention_of_row


def masked_attention(mask, group, method):
    """What a layer calls: attention under a mask of the whole row, here or on the group's ring."""

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        # A layer with a window narrows the mask further.
        options = dict(mask=mask.with_window(window), scale=scale, softcap=softcap)
        if group is None:
            return ring_attention.attend(q, k, v, **options)[0]
        return ring_attention.ring_attention(q, k, v, group=group, method=method, **options)

    return attention


def score_batch(trainer, batch, model, kind) -> list:
    """A numpy vector (L - 1,) for each trajectory; kind: logprobs, entropies or values."""
    # A model under a plan is run by all ranks of a replica, on what all of them hold; this rank's
    # trajectories begin at `first`. The reference is split as the policy is.
    together, first = gather_replica(model, batch)
    if trainer.config.tree == "disabled":
        sequences = [t.tokens for t in together]
        masks = [t.mask for t in together]
        scores = trainer.batches(model).forward(sequences, masks)
    else:
        scores = scores_by_trees(trainer, model, together)
    column = ("logprobs", "entropies", "values").index(kind)
    of_this_rank = scores[first : first + len(batch)]
    return [columns[column].double().cpu().numpy() for columns in of_this_rank]


SUMS = (
    "loss", "policy", "tokens", "gap", "identical", "ratio", "clipped", "entropy", "kl", "value",
)  # fmt: skip
MAXIMA = "gap_max", "ratio_max"


def metrics_of_all_ranks(trainer, measured, batch, tree_tokens=0) -> dict:
    """`loss_metrics` of all ranks' micro-batches, and how many tokens were trained on.

    measured: the sums of `grpo_loss`, one dict for each of this rank's micro-batches. tree_tokens:
    those that this rank has run, where a tree makes them fewer.
    """
    # Of this rank: sums in float64, since a step may have millions of tokens, and the largest.
    totals_K = torch.zeros(len(SUMS), dtype=torch.float64, device=trainer.device)
    maxima_K = totals_K.new_zeros(len(MAXIMA))
    for sums in measured:
        totals_K += torch.stack([sums[name].double() for name in SUMS])
        maxima_K = torch.maximum(maxima_K, torch.stack([sums[name] for name in MAXIMA]))

    # Sums of sums: ranks hold unequal shares, so no rank's mean may enter. Ranks that work
    # together on the same trajectories have the same sums, and one of them speaks for all.
    numbers = [*totals_K.tolist(), tree_tokens]
    if not parallel.speaks_for_replica(trainer.model):
        numbers = [0.0] * len(numbers)
    flat_tokens = sum(len(t.tokens) for t in batch)
    dist.all_reduce(maxima_K, op=dist.ReduceOp.MAX)
    *totals, tree_tokens, flat_tokens = summed([*numbers, flat_tokens], trainer.device)

    # A metric that this run does not have is left out of its lines, not written as 0.
    totals = dict(zip(SUMS + MAXIMA, totals + maxima_K.tolist()))
    metrics = loss_metrics(totals)
    if trainer.reference is None:
        del metrics["kl/token_mean"]
    if trainer.config.advantage != "gae":
        del metrics["value/loss"]
    trained = flat_tokens if trainer.config.tree == "disabled" else tree_tokens
    metrics |= {"tokens/trained": int(trained), "tokens/trained_flat": int(flat_tokens)}
    return metrics | trainer.experts.end()


class ExpertLoads:
    """Which experts the tokens of a step go to: (8), the loads as a metric, the routers' bias.

    Between `begin` and `end` lies one forward_backward, between two calls of `reset` one optimiser
    step. A token that several trajectories share in a tree counts once for each of them, as it does
    without the tree. For a model without experts all of it does nothing.
    """

    def __init__(self, config, model, device):
        # L layers with experts, E experts in each.
        self.device = device
        self.coef = config.balance_coef
        self.rate = config.router_bias_rate
        self.layers = list(model.config.sparse_layers)
        self.counts_LE = torch.zeros(len(self.layers), model.config.num_experts).double()
        self.coef_of_one = 0.0
        self.parts = []

    @property
    def balance(self):
        """For `PackedBatches`; None where there are no experts."""
        return self.balance_of_row if self.layers else None

    def begin(self, batch, sequences=None):
        """A forward_backward begins. batch: this rank's. sequences: of the step, over all ranks."""
        # The mean of (8) is over the whole step, as Z of (7) is: so nothing depends on the cut.
        self.parts = []
        if self.coef and self.layers:
            if sequences is None:
                (sequences,) = summed([len(batch)], self.device)
            self.coef_of_one = self.coef / max(1, sequences)  # (8)

    def balance_of_row(self, sequence_j, token_j, *, sequences, groups):
        """What the sparse layers of one micro-batch are given; see `balance_of_rank`."""
        how = dict(coef=self.coef_of_one, sequences=sequences, groups=groups)
        balance = models.Balance(sequence_j, token_j, **how)
        # The layers fill these two in as they run. One that is computed again fills in the same.
        self.parts.append((balance.losses, balance.counts))
        return balance

    def end(self) -> dict:
        """The metrics of a forward_backward. Collective."""
        if not self.layers:
            return {}

        # Parts of a rank are of its own tokens, and of the layers that it has: their sum over all
        # ranks is the whole. A number of tokens is exact in float64, so all ranks cast one vote.
        loss = torch.zeros(1, dtype=torch.float64, device=self.device)
        counts_LE = torch.zeros_like(self.counts_LE, device=self.device)
        for losses, counts in self.parts:
            for loss_of_layer in losses.values():
                loss += loss_of_layer
            for layer, counts_E in counts.items():
                counts_LE[self.layers.index(layer)] += counts_E
        flat = torch.cat([loss, counts_LE.flatten()])
        dist.all_reduce(flat)
        counts_LE = flat[1:].view_as(counts_LE).cpu()
        self.counts_LE += counts_LE

        # 1: all experts of a layer got as many tokens; E / K: every token chose the same ones.
        load_L = counts_LE.amax(1) / counts_LE.mean(1).clamp(min=1 / counts_LE.shape[1])
        metrics = {"experts/load_max": load_L.max().item()}
        if self.coef:
            metrics["balance/loss"] = flat[0].item()
        return metrics

    def update_bias(self, model):
        """(11) of models.py: the optimiser has made its step with gradients of these counts."""
        if not self.rate:
            return
        for stage in part_of(model).stages:
            has = [module.layer for module in stage.modules() if hasattr(module, "votes")]
            counts = {layer: self.counts_LE[self.layers.index(layer)] for layer in has}
            models.update_router_bias(stage, counts)

    def reset(self):
        """An optimiser step is done, or was skipped: the next one counts from nothing."""
        self.counts_LE.zero_()


def skip_step(trainer, suspect):
    """Count a skipped step; which rank and parameter had it first, same text on all ranks."""
    trainer.skipped += 1
    trainer.skipped_in_a_row += 1
    text = parallel.name_suspects(trainer.model, suspect)

    # Several in a row are no accident: the weights or the data are broken.
    if trainer.skipped_in_a_row >= trainer.config.max_skipped:
        raise FloatingPointError(
            f"{trainer.skipped_in_a_row} optimiser steps in a row had a non-finite gradient, "
            f"first in {text}; lower --lr or look at that tensor's inputs"
        )
    return text


# C. Trees: forked rollouts, and prefixes that are run once ------------------------------------
# Two uses of one shape: rollouts that fork at turn boundaries (--forks), and training on shared
# prefixes at the cost of their distinct tokens (--tree). Without those flags, skip it.


def fork(play, forks):
    """Plays that share this one's past, its reply included, and divide its rollouts."""
    # A play for rollouts 4 5 6 7 becomes with forks 2 one for 4 5 and one for 6 7. Each child draws
    # by the key of its own first rollout, so what it samples does not depend on its siblings.
    children = []
    share = play.count // forks
    for first in range(play.first, play.first + play.count, share):
        child = copy.copy(play)
        for name in ("tokens", "mask", "logprobs", "queue"):
            setattr(child, name, getattr(play, name).copy())
        child.draws = uniforms((*play.key, play.group, first), len(play.draws))
        child.first = first
        child.count = share
        child.forks_left = play.forks_left - 1
        child.path = play.path + [(play.turn, first, share)]
        children.append(child)
    return children


def group_advantages(config, group):
    """Give the trajectories of one group their advantages (1), one for each target."""
    # What each rollout has earned, less what it pays for its distance to the reference, if it does.
    rewards_G = np.array([t.reward - kl_penalties(config, t).sum() for t in group])
    if config.advantage == "per_branch":
        marked = branch_advantages(rewards_G, [t.path for t in group])
    else:
        marked = [[(0, advantage)] for advantage in advantages(rewards_G, config.advantage)]

    # A mark says from which target on an advantage holds; the next mark overwrites the rest.
    #
    #     marks [(1, 0.1), (3, 0.5)] of five targets   ->   0  0.1  0.1  0.5  0.5
    for t, marks in zip(group, marked):
        t.advantages = np.zeros(len(t.mask))
        for start, advantage in marks:
            t.advantages[start:] = advantage


def branch_advantages(rewards_G, paths, /):
    """(1) `per_branch` of one group: for each rollout a list of (first target index, advantage).

    paths[i] is rollout i's way from the root of the group's tree down to itself, one
    (first token index, first rollout, number of rollouts) for each segment: the segment begins at
    that token, and those consecutive rollouts share it.
    """
    # A segment is worth the mean reward of the rollouts that pass through it, and its advantage is
    # what it is worth beyond its parent. Four rollouts with rewards 1, 0, 1/4, 1/4, of which 0 and
    # 1 share everything up to token 5, as 2 and 3 do (each rollout's last segment is its own):
    #
    #     rollout 0:   whole group   tokens 5..7 (0, 1)   from token 8 (0 alone)
    #     value        3/8           1/2                  1
    #     advantage                  +1/8                 +1/2       they sum to R_0 - mean R
    marked = []
    for path in paths:
        parent_value = rewards_G.mean()
        marks = []
        for start, first, count in path:
            value = rewards_G[first : first + count].mean()
            # Token `start` is target `start - 1`, for targets are tokens[1:].
            marks.append((start - 1, value - parent_value))  # (1)
            parent_value = value
        marked.append(marks)
    return marked


def shared_prefix(a, b) -> int:
    """How many tokens two lists have in common before they differ."""
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


NOTHING = np.zeros(0)
FILLER = Trajectory(  # one token, no target: a rank without data runs it so that others can go on
    -1, [0], NOTHING.astype(bool), NOTHING, advantages=NOTHING, values=NOTHING, returns=NOTHING
)


def batches_of_trees(trainer, model, batch) -> list:
    """Cut a batch into lists of trajectories, each for one tree, as many as other ranks need."""
    if trainer.config.tree == "dta":  # its blocks are cut by --max-tokens
        return [batch or [FILLER]]
    # A batch that fits into one tree even without sharing is not compared. (A pipeline cuts its
    # batches smaller, however much room there is.)
    lengths = [len(t.tokens) for t in batch]
    is_pipelined = trainer.plan is not None and trainer.plan.pp > 1
    shared = None
    if is_pipelined or sum(lengths) > trainer.config.micro_tokens:
        shared = shared_with_previous(batch)
    cuts = parallel.cut_into_micro_batches(model, lengths, trainer.config.micro_tokens, shared)
    return [[batch[i] for i in indices] or [FILLER] for indices in cuts]


def shared_with_previous(batch) -> list:
    """How many tokens each trajectory has in common with the one before it."""
    shared = []
    previous = []
    for t in batch:
        shared.append(shared_prefix(previous, t.tokens))
        previous = t.tokens
    return shared


def prefix_tree(batch):
    """The tree of a batch's prefixes."""
    return TokenTrie([t.tokens for t in batch])


def tokens_of(trie, batch) -> int:
    """How many tokens of a tree are run. What fills up a rank counts for nothing."""
    return 0 if batch[0] is FILLER else len(trie.tokens)


def deal_trees(trainer, batch):
    """This rank's share of the data-parallel ranks' batch: prefixes together, equal times."""
    # Context ranks share one tree's tokens.
    plan = trainer.plan or Plan(dp=dist.get_world_size())
    if plan.cp > 1 or plan.dp == 1:
        return batch
    cost = Cost(recomputed=1 / 3 if trainer.config.recompute else 0.0)
    group = None if trainer.plan is None else trainer.grid.data
    sequences = [t.tokens for t in batch]
    _, share = redistribute(sequences, batch, group=group, cost=cost)
    return share


def tree_options(trainer, model, batch):
    """The model and the options that functions of trees are called with for a batch."""
    config = trainer.config
    plan = trainer.plan or Plan()
    options = dict(temperature=config.temperature, masks=[t.mask for t in batch])
    if config.tree == "dta":
        # COMM: experts are on other ranks, which have other trees: as many calls on all.
        # Pinned by tests/test_plan_run.py::test_experts_train_alike_under_a_plan.
        lockstep = dist.group.WORLD if plan.ep > 1 else None
        options.update(max_tokens=config.max_tokens, lockstep=lockstep)
    elif plan.cp > 1:
        options.update(group=trainer.grid.context, method=config.cp_method)
    if plan.tp > 1:
        # The engine of `dta` asks of the routers what they say of all tokens of a block.
        model = parallel.PaddedTokens(model, plan.tp, whole_routing=config.tree == "dta")
    return model, options


def score_tree(trainer, model, micro, trie, balance=None):
    """Log-probs, entropies and, of a critic, values (B, T) by the tree of trajectories."""
    model, options = tree_options(trainer, model, micro)
    return tree_scores(model, trie, padded=True, balance=balance, **options)


def tokens_of_sequences(trie):
    """(J,) each: every sequence of a tree holds the tokens of its path, one pair for each token."""
    paths = [trie.path(i) for i in range(len(trie.lengths))]
    return torch.arange(len(paths)).repeat_interleave(trie.lengths), torch.cat(paths)


def balance_of_tree(trainer, micro, trie):
    """What the sparse layers are given in training on the packed tree of trajectories, or None."""
    if trainer.experts.balance is None:
        return None
    sequence_J, token_J = tokens_of_sequences(trie)
    if micro[0] is FILLER:
        sequence_J = token_J = torch.zeros(0, dtype=torch.int64)

    # Which of the tokens this rank of a context is given, as `tree_scores` deals them.
    local_s = torch.arange(len(trie))
    if trainer.plan is not None and trainer.plan.cp > 1:
        rank = dist.get_rank(trainer.grid.context)
        local_s = ring_attention.indices(len(trie), rank, trainer.plan.cp)
    balance = trainer.experts.balance
    return parallel.balance_of_rank(trainer.model, sequence_J, token_J, local_s, balance)


class TreeBatches(PackedBatches):
    """`PackedBatches` for a pipeline: each micro-batch is the packed tree of some sequences."""

    def pack_micro_batches(self, sequences, masks):
        """The sequences of each tree, as lists of indices, and the `PackedRow` of each tree."""
        # All trees are padded to the longest, so they should cost the same. `partition` cuts the
        # sorted sequences into stretches, and prefixes stay together as far as the cuts allow.
        parallel.require_batch(self.model, sequences, masks)
        needed = trees_needed(sequences, self.micro_tokens)
        count = parallel.agreed_micro_batches(self.model, needed)
        micros = partition(sequences, count)

        # A tree without a sequence is one token that nothing is asked of.
        tries = [TokenTrie([sequences[i] for i in indices] or [[0]]) for indices in micros]
        lengths = parallel.row_lengths(self.plan, list(map(len, tries)))
        rows = []
        for indices, trie, length in zip(micros, tries, lengths, strict=True):
            row = tree_row(trie, [masks[i] for i in indices] or [[]], length)
            rows.append(row if indices else row.without_sequences())
        return micros, rows


def trees_needed(sequences, micro_tokens) -> int:
    """Into how many trees of at most micro_tokens tokens sequences are cut; a longer one alone."""
    count = 1
    while count < len(sequences):
        shares = [[sequences[i] for i in indices] for indices in partition(sequences, count)]
        # Prefixes that a cut divides are in two trees, so the sizes are only known afterwards.
        sizes = [len(TokenTrie(share)) for share in shares if len(share) > 1]
        excess = max(sizes, default=0) / micro_tokens
        if excess <= 1:
            break
        count = min(len(sequences), max(count + 1, int(count * excess)))
    return count


def tree_row(trie, masks, length) -> parallel.PackedRow:
    """A tree as a row of `length` places. masks: for each sequence, which of tokens[1:] count."""
    # Behind the tree stands padding, tokens of which each is a tree of its own.
    #
    #     5 6 7 / 5 9 in 6 places     tokens 5 6 7 9 0 0    subtree_end 4 3 3 4 5 6
    N = len(trie)
    padding_P = torch.zeros(length - N, dtype=torch.int64)
    positions_S = torch.cat([trie.positions, padding_P])
    end_S = torch.cat([trie.subtree_end, torch.arange(N, length) + 1])
    tokens_S = torch.cat([trie.tokens, padding_P])

    # Targets of different sequences may be one token of the tree: it is scored once, at the token
    # before it, and each of them is told by `entries` which of the scored ones it is.
    mask_BT = np.zeros((len(masks), int(trie.lengths.max()) - 1), dtype=bool)
    scored = [np.zeros(0, dtype=np.int64)]
    for b, mask in enumerate(masks):
        mask_BT[b, : len(mask)] = mask
        scored.append(trie.path(b)[1:].numpy()[np.asarray(mask, dtype=bool)])
    edges_N, entries_K = np.unique(np.concatenate(scored), return_inverse=True)
    return parallel.PackedRow(
        tokens_S[None], positions_S[None], ring_attention.Mask.tree(end_S, positions_S),
        torch.from_numpy(mask_BT), trie.parent[edges_N], trie.tokens[edges_N],
        torch.from_numpy(entries_K), *tokens_of_sequences(trie),
    )  # fmt: skip


def tree_batches(trainer, model) -> TreeBatches:
    """A model of a plan with p as what runs micro-batches of trees."""
    config = trainer.config

    def attention_of_row(mask, group):
        return masked_attention(mask, group, config.cp_method)

    return TreeBatches(
        model, attention=attention_of_row, indices=ring_attention.indices,
        balance=trainer.experts.balance, micro_tokens=config.micro_tokens,
        temperature=config.temperature,
    )  # fmt: skip


@torch.no_grad()
def scores_by_trees(trainer, model, batch) -> list:
    """`PackedBatches.forward` by trees: a tuple of (L - 1,) tensors for each trajectory."""
    if isinstance(model, parallel.Pipeline):
        sequences = [t.tokens for t in batch]
        return tree_batches(trainer, model).forward(sequences, [t.mask for t in batch])
    # Scores come back a row for each sequence of a tree, padded to the longest. A filler stands for
    # a rank without sequences, and has none.
    found = []
    for micro in batches_of_trees(trainer, model, batch):
        columns = score_tree(trainer, model, micro, prefix_tree(micro))
        for b, t in enumerate(micro):
            if t is not FILLER:
                found.append(tuple(x_BT[b, : len(t.mask)] for x_BT in columns))
    part_of(model).reshard()  # without a backward FSDP would keep the gathered weights
    return found


def backward_by_trees(trainer, batch, loss_of) -> int:
    """The gradient of a replica's batch by its trees; how many tokens this rank has run."""
    # Sequences may go to other ranks first, so that equal beginnings meet in one tree.
    batch = deal_trees(trainer, batch)
    if isinstance(trainer.model, parallel.Pipeline):
        return backward_by_pipeline(trainer, batch, loss_of)
    tree_tokens = 0
    for micro in batches_of_trees(trainer, trainer.model, batch):
        trie = prefix_tree(micro)
        tree_tokens += tokens_of(trie, micro)
        # One tree has one graph under `sparse`; `dta` makes and drops the graphs of its blocks.
        if trainer.config.tree == "dta":
            backward_by_blocks(trainer, micro, trie, loss_of)
        else:
            balance = balance_of_tree(trainer, micro, trie)
            scores = score_tree(trainer, trainer.model, micro, trie, balance)
            loss_of(micro, mask_of(micro, scores[0]), *scores).backward()
    return tree_tokens


def backward_by_pipeline(trainer, batch, loss_of) -> int:
    """`--tree sparse` under a plan with p: trees of about equal cost are its micro-batches."""
    batches = tree_batches(trainer, trainer.model)
    tree_tokens = 0

    # Only the last stage is asked for losses, so only there are the trees' tokens counted: it is
    # the rank that speaks for its replica.
    def loss_of_tree(indices, *scores):
        # Called once for each tree, on the last stage alone.
        nonlocal tree_tokens
        micro = [batch[i] for i in indices]
        tree_tokens += len(prefix_tree(micro))
        return loss_of(micro, *scores)

    batches.forward_backward([t.tokens for t in batch], [t.mask for t in batch], loss_of_tree)
    return tree_tokens


def backward_by_blocks(trainer, batch, trie, loss_of):
    """`--tree dta`: the gradient of a batch, block by block of its tree."""

    def loss_of_block(ended, *scores):
        # The trajectories that end in this block, by their index in the batch.
        micro = [batch[i] for i in ended]
        return loss_of(micro, mask_of(micro, scores[0]), *scores)

    model, options = tree_options(trainer, trainer.model, batch)
    experts = trainer.experts
    is_filler = batch[0] is FILLER
    # check_finite=False: a NaN is optim_step's to find, on all ranks at once.
    result = tree_backward(
        model, trie, loss_of_block, recompute=trainer.config.recompute, batched=True,
        check_finite=False, aux_coef=0.0 if is_filler else experts.coef_of_one, **options,
    )  # fmt: skip

    # Tensor ranks have walked the same tree and found the same: one of them says it.
    if parallel.speaks_for_replica(trainer.model) and not is_filler:
        experts.parts.append(({"tree": result.aux_loss}, result.router_counts))


def mask_of(micro, like):
    """Which targets of trajectories were sampled, (B, T) bool, on the device of `like`."""
    return padded([t.mask for t in micro], like).bool()


# D. PPO's critic, and the KL in the reward ----------------------------------------------------
# Advantages of single tokens, from a value head on the policy's states, and rewards that pay for
# the distance to the reference. For --advantage gae and --kl-in reward; GRPO needs neither.


def kl_penalties(config, trajectory):
    """What each sampled token loses of its reward to the reference: (L - 1,)."""
    if not config.kl_coef or config.kl_in != "reward":
        return np.zeros(len(trajectory.mask))
    d = np.where(trajectory.mask, trajectory.sampler_logprobs - trajectory.ref_logprobs, 0.0)
    return config.kl_coef * divergence(torch.from_numpy(d), config.kl).numpy()


def gae(rewards, values, mask, /, gamma, lam):
    """(1) `gae` of one trajectory: advantages and returns, two arrays (L - 1,), 0 off the mask.

    rewards, values: (L - 1,), one per target. mask: which targets the policy sampled. Only those
    are actions and follow each other; what the task says in between is part of the environment.
    """
    # A turn's reward may lie on a token of the task: it belongs to the sampled token before it.
    #
    #     target     0    1    2    3    4        gamma = lam = 1 and all values 0
    #     sampled    yes  yes  -    -    yes
    #     reward     0    0    0    2    1        the 2 counts for target 1
    #     advantage  3    3    0    0    1
    advantages = np.zeros(len(mask))
    returns = np.zeros(len(mask))

    # From the last token to the first: (1) needs the next sampled token's value and advantage.
    next_value = 0.0
    next_advantage = 0.0
    pending = 0.0  # rewards that no sampled token has taken yet
    for t in reversed(range(len(mask))):
        pending += rewards[t]
        if not mask[t]:
            continue

        # delta is the surprise of this one action. The sum over n in (1) is a recursion.
        delta = pending + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage  # (1)
        returns[t] = advantages[t] + values[t]  # g of (6): what the critic should have said

        next_value = values[t]
        next_advantage = advantages[t]
        pending = 0.0
    return advantages, returns


def value_loss(value_BT, old_BT, return_BT, mask_BT, /, bound):
    """The maximum of two squares in (6), halved, per token; 0 where mask is off.

    bound: how far a value may move from its old one before the move stops counting; 0: any.
    """
    # Selected before the square, so that a NaN off the mask reaches neither loss nor gradient.
    square_BT = torch.where(mask_BT, value_BT - return_BT, 0.0).square()
    if not bound:
        return square_BT / 2

    # As for the policy: a value that has moved `bound` towards its return gets no more gradient.
    near_BT = old_BT + (value_BT - old_BT).clamp(-bound, bound)
    near_square_BT = torch.where(mask_BT, near_BT - return_BT, 0.0).square()
    return torch.maximum(square_BT, near_square_BT) / 2


def critic_advantages(config, trainer, batch) -> dict:
    """Give all ranks' trajectories the advantages (1) `gae`, whitened together, and the returns g.

    Returns the critic's metrics. Collective.
    """
    sums = np.zeros(6)  # of 1, A, A^2, g, g^2, v over this rank's sampled tokens
    for t, values in zip(batch, trainer.compute_values(batch)):
        rewards = -kl_penalties(config, t)
        for at, reward in t.turn_rewards:
            rewards[at] += reward
        t.values = values
        t.advantages, t.returns = gae(rewards, values, t.mask, config.gamma, config.gae_lambda)
        A = t.advantages[t.mask]
        g = t.returns[t.mask]
        sums += len(A), A.sum(), (A**2).sum(), g.sum(), (g**2).sum(), values[t.mask].sum()

    count, *totals = summed(sums.tolist(), trainer.device)
    A, AA, g, gg, v = (total / max(1.0, count) for total in totals)
    spread = math.sqrt(max(0.0, AA - A * A))
    # NUMERICS: the mean and spread are of all ranks' tokens, so that no cut of the batch enters;
    # 1e-8 only keeps a step without any spread finite. Pinned by
    # tests/test_critic.py::test_advantages_are_whitened_over_the_step.
    for t in batch:
        t.advantages = np.where(t.mask, (t.advantages - A) / (spread + 1e-8), 0.0)  # (1)

    # g - v is A before whitening, so the variance that is left is spread^2.
    explained = 0.0
    if gg - g * g > 1e-12:
        explained = 1 - spread**2 / (gg - g * g)
    return {"value/token_mean": v, "value/explained_variance": explained}


# E. Tasks -------------------------------------------------------------------------------------
# What is played: the interface of a task, four tasks, and how a task's file is loaded. Who brings a
# task of their own reads `Task` and `Guess`; everybody else can skip it.


class Task:
    """What a task provides. Tokens go in and come out; nothing is ever decoded and encoded again.

    A state is a plain value and `reply` returns a new one, so forked trajectories can share it.
    Rewards of the turns add up; a trajectory of total reward 1 or more counts as solved.
    """

    vocab_size: int
    end: tuple[int, ...]  # tokens that end a turn

    def __init__(self, config=None):
        """Tasks are made as Class(config)."""

    def prompt(self, rng, index: int, held_out: bool):
        """Begin a group: returns (state, prompt tokens).

        rng is a numpy Generator of this (seed, step, group). index counts the prompts of the run,
        or from 0 those of an evaluation (held_out).
        """
        raise NotImplementedError

    def reply(self, state, answer: list[int]):
        """Hear a turn: returns (new state, reply tokens, reward); None for the reply ends it.

        answer: the turn's tokens, its end token last. One cut off by max_new_tokens never comes
        here.
        """
        raise NotImplementedError

    def demo_prompt(self, rng, index: int):
        """Begin a demonstration, as `prompt` begins a group. index counts those of the run."""
        return self.prompt(rng, index, False)

    def demo(self, state, rng) -> list[int]:
        """A valid answer to train on before the first rollout (--demos)."""
        raise ValueError(f"{type(self).__name__} has no demonstrations; use --demos 0")

    def show(self, tokens: list[int]) -> str:
        """Tokens as a person reads them, for samples.jsonl and errors."""
        return " ".join(map(str, tokens))


class TaskError(ValueError):
    """What a task's own code raised, with its file and line."""


@contextlib.contextmanager
def naming_the_task(file):
    """Turn whatever the code in a task's file raises into an error that names file and line.

    Left alone, a RuntimeError about a task's own connection would read as a lost rank, and
    sys.exit(0) would end the run with 0 and without a word. A ValueError keeps its message, for it
    is meant for the reader; of anything else `main` prints the traceback too.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        # The innermost line of the task's own file: what it called may have raised elsewhere.
        where = Path(file).name
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).resolve() == Path(file).resolve():
                where = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
        if isinstance(error, ValueError):
            raise TaskError(f"{error} ({where})") from None
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = f"the task called sys.exit({error.code!r})"
        raise TaskError(f"{reason} ({where})") from error


def asking(task):
    """The guard around every call of a task's methods; those of this file need none."""
    module = sys.modules[type(task).__module__]
    if module is sys.modules[__name__]:
        return contextlib.nullcontext()
    return naming_the_task(module.__file__)


class Symbols(Task):
    """A task over a few named symbols; the last one ends a turn."""

    def __init__(self, names):
        self.names = names
        self.vocab_size = len(names)
        self.end = (len(names) - 1,)

    def show(self, tokens):
        return " ".join(self.names[t] if t < len(self.names) else f"<{t}>" for t in tokens)


def deal(seed, index, size) -> int:
    """Card `index` of an endless row of shuffled decks of 0..size-1: no batch is lopsided."""
    # size 3: cards 0 1 2 are deck 0, cards 3 4 5 deck 1; each deck is shuffled by its own number.
    deck, place = divmod(index, size)
    return int(np.random.default_rng([seed, deck]).permutation(size)[place])


def is_held_out(data: bytes) -> bool:
    """One prompt in ten is kept for evaluation, by a hash, so that training never draws it."""
    return zlib.crc32(data) % 10 == 0


class Guess(Symbols):
    """Find a hidden number: answer `number .`, hear `higher` or `lower`, up to `turns` answers.

        ? 3 . higher 5 . lower 4 .

    Reward 1 for finding it. An attempt that used all its turns well-formed but in vain gets 0.2
    times the share of its answers that agreed with what it had heard; anything malformed gets 0.
    Secrets are dealt from shuffled decks. Every secret has the same prompt, so evaluation asks for
    all of them instead of unseen ones.
    """

    def __init__(self, config):
        self.size = config.size
        self.turns = config.turns
        self.seed = config.seed
        super().__init__([str(n) for n in range(self.size)] + ["?", "higher", "lower", "."])

    def prompt(self, rng, index, held_out):
        secret = index % self.size if held_out else deal(self.seed, index, self.size)
        return (secret, 1, 0, self.size - 1, 0), [self.size]  # secret, turn, range left, agreeing

    def reply(self, state, answer):
        # low .. high is what the replies so far have left possible.
        secret, turn, low, high, agreeing = state
        if len(answer) != 2 or answer[0] >= self.size:
            return state, None, 0.0
        number = answer[0]
        if low <= number <= high:
            agreeing += 1

        if number == secret:
            return state, None, 1.0
        if turn == self.turns:
            return state, None, 0.2 * agreeing / self.turns
        if number < secret:
            return (secret, turn + 1, max(low, number + 1), high, agreeing), [self.size + 1], 0.0
        return (secret, turn + 1, low, min(high, number - 1), agreeing), [self.size + 2], 0.0


class Sort(Symbols):
    """Put `length` distinct symbols in order, in one turn: `c a b ? a b c .`

    The reward is 1 for the right answer, and half the share of right places for another one of the
    right length.
    """

    def __init__(self, config):
        self.size = config.size
        self.length = config.length
        super().__init__([f"s{n}" for n in range(self.size)] + ["?", "."])
        for held_out in (False, True):  # raises now, not at the first evaluation
            self.prompt(np.random.default_rng(0), 0, held_out)

    def prompt(self, rng, index, held_out):
        for _ in range(1000):
            items = rng.permutation(self.size)[: self.length].tolist()
            if is_held_out(repr(items).encode()) == held_out:
                return tuple(sorted(items)), items + [self.size]
        raise ValueError(f"--size {self.size} --length {self.length}: too few to hold prompts out")

    def reply(self, state, answer):
        if len(answer) != self.length + 1:
            return state, None, 0.0
        right = len([a for a, b in zip(answer, state) if a == b]) / self.length
        return state, None, 1.0 if right == 1 else 0.5 * right


class Lookup(Symbols):
    """Use a tool: `? key`, answer `key .`, the table replies `= value`, answer `value .`

    Each of the two answers earns 0.1 for its form and 0.4 for being right. The table is drawn anew
    for each prompt, so only asking finds the value. Keys and values are dealt from shuffled decks:
    where a batch has more of one key, asking for it blindly pays. Demonstrations are valid play
    with random content: they teach the form, not the answer.
    """

    def __init__(self, config):
        self.size = config.size
        self.seed = config.seed
        keys = [f"k{n}" for n in range(self.size)]
        values = [f"v{n}" for n in range(self.size)]
        super().__init__([*keys, *values, "?", "=", "."])

    def prompt(self, rng, index, held_out):
        key = deal(self.seed, index, self.size)
        table = rng.integers(self.size, size=self.size)
        table[key] = deal(self.seed + 1, index, self.size)
        return (key, tuple(table.tolist()), None), [2 * self.size, key]

    def reply(self, state, answer):
        # `value` is None until the table has been asked; it is then what the second answer should
        # be. Tokens: keys 0 .. size - 1, values size .. 2 size - 1.
        key, table, value = state
        first = 0 if value is None else self.size
        if len(answer) != 2 or not first <= answer[0] < first + self.size:
            return state, None, 0.0
        if value is None:
            value = self.size + table[answer[0]]
            reward = 0.5 if answer[0] == key else 0.1
            return (key, table, value), [2 * self.size + 1, value], reward
        return state, None, 0.5 if answer[0] == value else 0.1

    def demo(self, state, rng):
        return [int(rng.integers(self.size)) + (0 if state[2] is None else self.size), *self.end]


class Line(NamedTuple):
    """A line of --data or --demo-data, as `Jsonl` plays it."""

    where: str  # FILE.jsonl line N, for errors
    row: dict  # as it stands in the file, for the reward
    shown: str  # what is asked in it; its hash decides whether it is held out
    messages: list  # what the prompt is rendered from; none without a chat template
    prompt: list  # its tokens
    later: list  # the user's messages that are said to the policy's first, second, .. answer
    demo: list  # texts of the policy's answers, to be learnt; none where there is no demonstration
    rewarded: bool  # lines of --demo-data are learnt, and nobody asks what they are worth


class Jsonl(Task):
    """Questions and conversations from a file of JSON lines, in the checkpoint's own words.

        {"question": "What is 3 + 4?", "answer": "3 and 4 make\\n#### 7"}        GSM8K's form
        {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}

    --template says how a question is put. `chat`: the user's turn, in the checkpoint's own chat
    template, is the question and on the next line --instruction; --system stands before it. `raw`:
    the same two lines as plain text. A text with {question}: that is the whole prompt.

    Messages are said as they stand, in the chat template. The policy answers the last of them, and
    where two of the user's follow each other, the first of the two; the second is then said to it:

        system  user  assistant  user  [the policy]  user  [the policy]

    An assistant's message at the end is a demonstration (--demos), and is not shown. Rewards are
    asked once, about the last answer. --reward names a function(text, row); without it the reward
    is 1 for an answer that ends in `####` and a number or text equal to what follows `####` in the
    line's answer (to all of that, if nothing does), so the prompt has to ask for it. An answer that
    --max-new-tokens cuts off has reward 0. Every tenth prompt, by its hash, is held out; all_lines:
    all are, for the evaluation of a file of its own.

    A state is (line, texts of the policy's answers so far).
    """

    def __init__(self, config, all_lines=False):
        self.config = config
        self.text = models.Text(config.model)
        self.end = self.text.end
        self.vocab_size = self.text.vocab_size
        self.positions = ModelConfig.from_hf(config.model).max_position_embeddings
        self.template = self._template()
        notes = []
        if not config.template and self.template == "raw":
            notes.append(
                f"{config.model} has no chat template: prompts are plain text (--template raw), "
                f"the question, --instruction on the next line, and a newline"
            )
        if config.reward:
            if not names_code(config.reward):
                raise ValueError(f"--reward {config.reward!r} is no FILE.py:function")
            self.reward_file, self.reward = from_file(config.reward, "function")
            require_two_arguments(self.reward, config.reward)

        # Every line is encoded and checked now, so that a bad one is named before the run starts.
        self.rows = {False: [], True: []}  # by held out
        lines = self._read(config.data)
        count = len(lines)
        for line in lines:
            self.rows[is_held_out(line.shown.encode())].append(line)
        if all_lines:  # for an evaluation, which trains on none
            every = self.rows[True] + self.rows[False]
            self.rows = dict.fromkeys(self.rows, every)
        if not all(self.rows.values()):
            raise ValueError(
                f"{config.data} is too small to hold every tenth prompt out: by a hash of what it "
                f"asks, {len(self.rows[True])} of {count} lines are; give it more that ask "
                f"something else"
            )

        asks = any("messages" not in line.row for line in self.rows[False] + self.rows[True])
        if config.instruction != Config.instruction and not asks:
            raise ValueError(f"--instruction goes behind a question; {config.data} asks none")

        # What is to be learnt: the answers of the training lines, or those of a file of their own.
        # The two files may have prompts in common, and of those none that is held out is learnt.
        self.demos = self.rows[False]
        if config.demo_data:
            held_out = {asked for line in self.rows[True] for asked in what_is_asked(line)}
            found = self._read(config.demo_data, learnt=True)
            self.demos = [line for line in found if held_out.isdisjoint(what_is_asked(line))]
            if not self.demos:
                raise ValueError(f"{config.demo_data} holds no line that is not held out")
            if len(self.demos) < len(found):
                notes.append(
                    f"{len(found) - len(self.demos)} of {len(found)} lines of {config.demo_data} "
                    f"are held out for evaluation, and not learnt"
                )
        if config.demos:
            for line in self.demos:
                self._require_demonstration(line)
        self.note = "; ".join(notes)

    def prompt(self, rng, index, held_out):
        rows = self.rows[held_out]
        line = rows[index % len(rows) if held_out else int(rng.integers(len(rows)))]
        return (line, ()), line.prompt

    def reply(self, state, answer):
        # The last token ends the turn; everything before it is what the policy has said.
        line, answers = state
        text = self.text.decode(answer[:-1])
        answers = (*answers, text)
        if len(answers) <= len(line.later):
            return (line, answers), self._said_next(line, answers, answer[-1]), 0.0
        return (line, answers), None, self._reward(line, text)

    def demo_prompt(self, rng, index):
        # The training lines are drawn, as in a rollout. A file of demonstrations is dealt: each of
        # its lines is learnt as often as the others.
        if not self.config.demo_data:
            return self.prompt(rng, index, False)
        line = self.demos[deal(self.config.seed, index, len(self.demos))]
        return (line, ()), line.prompt

    def demo(self, state, rng):
        # A line may hold none: then the task begins without, and only --demos asks for it.
        line, answers = state
        if not line.demo:
            raise ValueError(
                f"{line.where}: it holds no demonstration, neither an answer to its question nor "
                f"an assistant's message that is the policy's only one; --demo-data can bring some"
            )
        try:
            return self._spoken(conversation(line, answers), line.demo[len(answers)])
        except ValueError as error:
            raise ValueError(f"{line.where}: {error}") from error

    def show(self, tokens):
        return self.text.decode(tokens, special=True)

    # How a line becomes a Line.

    def _template(self):
        """What --template is for this checkpoint: chat, raw, or a text with {question}."""
        # Unless somebody wants it otherwise, the checkpoint is spoken to as it has learnt to be: a
        # model that is trained on other marks than its own has to unlearn those first.
        config = self.config
        has_own = self.text.template is not None
        template = config.template or ("chat" if has_own else "raw")
        if template == "chat" and not has_own:
            raise ValueError(
                f"--template chat: {config.model} has no chat template, neither as "
                f"chat_template.jinja nor in tokenizer_config.json; --template raw has none"
            )
        if template != "chat" and config.system:
            raise ValueError(f"--system: {config.model} has no chat template to put it in")
        return template

    def _read(self, file, learnt=False):
        """The Lines of a file. learnt: it is that of --demo-data. ValueError names a bad line."""
        lines = []
        for number, row in read_json_lines(file):
            where = f"{file} line {number}"
            try:
                how = self._messages if "messages" in row else self._question
                line = Line(where=where, row=row, rewarded=not learnt, **how(row, learnt))
                self._require_room(line)
            except ValueError as error:  # of the chat template, too, which may refuse a role
                raise ValueError(f"{where}: {error}") from error
            lines.append(line)
        return lines

    def _question(self, row, learnt) -> dict:
        """What a {"question", "answer"} row says of its Line."""
        # A reward's function may do without an answer; what is learnt, or is right, is one.
        question = row.get("question")
        answer = row.get("answer")
        needed = learnt or not self.config.reward
        if not isinstance(question, str) or (needed and not isinstance(answer, str)):
            strings = "question and answer, two strings" if needed else "question, a string"
            got = {name: type(value).__name__ for name, value in row.items()}
            raise ValueError(f"it holds no {strings}, and no messages; it has {got}")
        if not (learnt or self.config.reward):
            require_gold(answer)

        # Marks of turns are the chat template's business. Plain text begins with BOS if this
        # checkpoint's texts do; a chat template says so itself.
        messages = []
        if self.template == "chat":
            asked = with_instruction(self.config, question)
            messages = self._behind_system([{"role": "user", "content": asked}])
            prompt = self.text.prompt(messages)
        else:
            prompt = self.text.encode(plain_prompt(self.config, question), bos=True)
        demo = [answer] if isinstance(answer, str) else []
        return dict(shown=question, messages=messages, prompt=prompt, later=[], demo=demo)

    def _messages(self, row, learnt) -> dict:
        """What a {"messages", "answer"} row says of its Line."""
        messages = row["messages"]
        if "question" in row:
            raise ValueError("it holds both a question and messages: one of them would be dropped")
        require_messages(messages)
        if self.template != "chat":
            raise ValueError("it holds messages, which only --template chat can say")
        if not (learnt or self.config.reward or isinstance(row.get("answer"), str)):
            raise ValueError("it holds no answer, a string, and without --reward nothing else says "
                             "what is right")  # fmt: skip
        if not (learnt or self.config.reward):
            require_gold(row["answer"])

        # Demonstrations of a file of their own are learnt from the first answer on. Of other lines
        # only an answer at the end is one, and what stands before it is shown, whoever said it.
        shown = messages
        if messages[-1]["role"] == "assistant":
            shown = messages[:-1]
        if learnt:
            first, later, demo = learnt_turns(messages)
        else:
            first, later = played_turns(shown)
            demo = []
            if shown is not messages and not later:  # else earlier answers are missing
                demo = [messages[-1]["content"]]
        first = self._behind_system(first)
        return dict(
            shown=json.dumps(shown, sort_keys=True), messages=first, later=later, demo=demo,
            prompt=self.text.prompt(first),
        )  # fmt: skip

    def _behind_system(self, messages) -> list:
        """Messages behind --system, unless they bring a system's message of their own."""
        if not self.config.system or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.config.system}, *messages]

    # What is said, as tokens, and what it must leave room for.

    def _said_next(self, line, answers, end_token) -> list:
        """The user's next message, behind the policy's last answer, which end_token has ended."""
        return self.text.next_turn(conversation(line, answers), end_token)

    def _require_known(self, tokens):
        """ValueError if the model has no row for one of the tokens."""
        for token in tokens:
            if token >= self.vocab_size:
                raise ValueError(
                    f"it holds token {token}, {self.show([token])!r}; those of the model end at "
                    f"{self.vocab_size - 1}"
                )

    def _spoken(self, messages, answer) -> list:
        """The tokens of an answer, its end included, as the policy should say it to messages."""
        tokens = self.text.encode(answer)
        self._require_known(tokens)
        if any(token in self.end for token in tokens):
            raise ValueError(f"the demonstration {answer!r} holds a mark that would end it")
        if self.template != "chat":
            return [*tokens, self.end[0]]

        # As the chat template writes it: Gemma's strips blanks around it, and Qwen3's puts an empty
        # block of thoughts before it. What the template adds behind the end is not the policy's. A
        # template that asks for answers in one form and writes them in another (DeepSeek-R1's, with
        # its thoughts) gives no text that follows the prompt: then the answer stands by itself.
        before = self.text.render(messages)
        answered = [*messages, {"role": "assistant", "content": answer}]
        whole = self.text.render(answered, add_generation_prompt=False)
        if whole.startswith(before):
            tokens = self.text.encode(whole[len(before) :])
        for n, token in enumerate(tokens):
            if token in self.end:
                return tokens[: n + 1]
        return [*tokens, self.end[0]]

    def _require_room(self, line):
        """ValueError if the model has too few positions for a prompt and an answer."""
        limit = self.config.max_new_tokens
        self._require_known(line.prompt)
        if len(line.prompt) + limit > self.positions:
            raise ValueError(
                f"a prompt of {len(line.prompt)} tokens; the model's positions less "
                f"--max-new-tokens leave {self.positions - limit}"
            )

        # What the user says later counts among the new tokens, and so does each answer's end.
        answers = [""] * len(line.later)
        said = 0
        for n in range(len(line.later)):
            tokens = self._said_next(line, answers[: n + 1], self.end[0])
            self._require_known(tokens)
            said += len(tokens)
        if said + len(line.later) + 1 > limit:
            raise ValueError(
                f"{said} tokens are said after the policy's answers, which leaves no room for "
                f"those in --max-new-tokens {limit}"
            )

    def _require_demonstration(self, line):
        """ValueError if a line has nothing to be learnt, or more than --max-new-tokens of it."""
        # Said as in a rollout, turn by turn: a limit that cut it would leave its end unlearnt.
        answers = ()
        count = 0
        for n in range(len(line.later) + 1):
            tokens = self.demo((line, answers), None)
            answers = (*answers, line.demo[n])
            count += len(tokens)
            if n < len(line.later):
                count += len(self._said_next(line, answers, tokens[-1]))
        if count > self.config.max_new_tokens:
            raise ValueError(
                f"{line.where}: a demonstration of {count} tokens is over --max-new-tokens "
                f"{self.config.max_new_tokens}"
            )

    def _reward(self, line, text) -> float:
        """What a last answer is worth; ValueError that names the line where that is no number."""
        if not line.rewarded:
            return 0.0
        if not self.config.reward:
            gold = line.row["answer"]
            return float(same_answer(final_answer(text), final_answer(gold) or gold))

        # The function gets a copy: what it changes there would be another row for the next answer.
        try:
            with naming_the_task(self.reward_file):
                reward = self.reward(text, copy.deepcopy(line.row))
        except TaskError as error:
            where = f"for the answer {text[:200]!r} to {line.where}"
            raise TaskError(f"{error}, {where}") from error.__cause__
        if not is_finite_number(reward):
            raise ValueError(
                f"--reward {self.config.reward} gave {reward!r} for the answer {text[:200]!r} to "
                f"{line.where}: rewards must be finite numbers"
            )
        return float(reward)


def require_two_arguments(function, spec):
    """ValueError for a --reward that cannot be called as function(text, row)."""
    # Found out at the start: answers that are cut off are never shown to it, so that in a run which
    # only has such answers nobody would notice.
    try:
        inspect.signature(function).bind("text", {})
    except TypeError as error:
        raise ValueError(f"--reward {spec} cannot be called with (text, row): {error}") from error
    except ValueError:
        pass  # some built-in functions do not tell what they take


def with_instruction(config, question) -> str:
    """A question and, on the next line, --instruction."""
    return f"{question}\n{config.instruction}" if config.instruction else question


def plain_prompt(config, question) -> str:
    """What is said without a chat template: a text with {question}, else as --template raw."""
    if "{question}" in config.template:
        return config.template.replace("{question}", question)
    return with_instruction(config, question) + "\n"


def conversation(line, answers) -> list:
    """The messages of a line up to here: those of its prompt, each answer, what is said to it."""
    messages = list(line.messages)
    for n, answer in enumerate(answers):
        messages.append({"role": "assistant", "content": answer})
        messages += line.later[n : n + 1]  # none behind the last answer
    return messages


def what_is_asked(line) -> set:
    """Two lines that have one of these in common ask the same: the question, or all that the user
    says, message by message."""
    # A file of demonstrations may bring as messages what --data brings as a question, with or
    # without --instruction; and where --data has the user's messages alone, it has answers between.
    said = [*line.messages, *line.later]
    users = tuple(message["content"] for message in said if message["role"] == "user")
    return {(line.shown,), users or (line.shown,)}


def require_messages(messages):
    """ValueError for what is no conversation of a user and an assistant."""
    # Templates take any role and write it down, "asistant" too: what is no role is refused here.
    if not isinstance(messages, list) or not messages:
        raise ValueError("it holds no messages, a list of objects")
    for n, message in enumerate(messages):
        good = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not good or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(
                f"message {n + 1} has no role (system, user or assistant) and content, a string"
            )
        if message["role"] == "system" and n > 0:
            raise ValueError(f"message {n + 1} is the system's, which can only be the first")


def played_turns(messages):
    """(messages of the prompt, later ones of the user) of a conversation that is to be played."""
    # Where the user speaks twice in a row, the policy answers in between: there the prompt ends.
    # What the assistant has said before that is history.
    #
    #     user  assistant  user | user | user      the prompt, and two later messages
    roles = [message["role"] for message in messages]
    if roles[-1:] != ["user"]:
        raise ValueError("the messages end with no user's, which the policy could answer")
    cut = len(messages)
    for n in range(1, len(messages)):
        if roles[n - 1] == roles[n] == "user":
            cut = n
            break
    later = messages[cut:]
    if "assistant" in roles[cut:]:
        raise ValueError(
            f"message {roles.index('assistant', cut) + 1} is the assistant's, behind an answer "
            f"that the policy has to give: two messages of the user stand in a row before it"
        )
    return messages[:cut], later


def learnt_turns(messages):
    """(messages of the prompt, later ones of the user, answers) of a demonstration."""
    # Behind the user's first message all that the assistant says is learnt.
    #
    #     user | assistant | user | assistant      the prompt, an answer, a later message, an answer
    roles = [message["role"] for message in messages]
    if "user" not in roles or roles[-1] != "assistant":
        raise ValueError("a demonstration needs a user's message, and an assistant's at its end")
    first = roles.index("user") + 1
    behind = messages[first:]
    for n, role in enumerate(roles[first:]):
        wanted = "user" if n % 2 else "assistant"
        if role != wanted:
            where = f"message {first + n + 1}"
            raise ValueError(f"{where} is the {role}'s; a demonstration needs the {wanted}'s there")
    answers = [message["content"] for message in behind[::2]]
    return messages[:first], behind[1::2], answers


def final_answer(text):
    """What follows the last `####`, to the end of its line; None without one."""
    _, mark, rest = text.rpartition("####")
    return rest.split("\n")[0].strip() if mark else None


def require_gold(answer):
    """ValueError for an answer that says nothing: only a bare `####` could equal it."""
    final = final_answer(answer)
    if not (answer if final is None else final).strip():
        raise ValueError("its answer is empty, so nothing says what is right")


def same_answer(a, b):
    """Equal as numbers (1,000 = 1000.0 = $1000) or, where one is no number, as stripped text."""

    # A number, or None. Commas and blanks belong to it only between groups of three digits: `3, 4`
    # is no 34. float() would also take nan, inf and 1e3, which nobody writes as an answer.
    def number(text):
        plain = re.sub(r"[$%]", "", text).strip().rstrip(".")
        if re.fullmatch(r"[-+]?\d{1,3}([,\s]\d{3})+(\.\d*)?", plain):
            plain = re.sub(r"[,\s]", "", plain)
        return float(plain) if re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)", plain) else None

    if a is None or b is None:
        return False
    x = number(a)
    y = number(b)
    if x is None or y is None:
        return a.strip() == b.strip()
    return x == y


TASKS = {"guess": Guess, "sort": Sort, "lookup": Lookup, "jsonl": Jsonl}


def names_code(spec) -> bool:
    """Whether spec is FILE.py:NAME of a file that is there."""
    file = spec.rpartition(":")[0]
    return file.endswith(".py") and Path(file).is_file()


def from_file(spec, kind):
    """(file, what it calls NAME) for spec FILE.py:NAME. kind: class or function, for the error."""
    file, _, name = spec.rpartition(":")
    # Run as a script, this file is the module __main__; a task file that imports train_grpo would
    # get a second copy of it, whose Task is another class than this one.
    sys.modules.setdefault("train_grpo", sys.modules[__name__])
    found = importlib.util.spec_from_file_location(f"task_{Path(file).stem}", file)
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    with naming_the_task(file):
        found.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{file} has no {kind} {name!r}")
    return file, getattr(module, name)


def make_task(config) -> Task:
    """The task of `--task`: one of TASKS, or a class from a file; ValueError for neither."""
    if config.task in TASKS:
        return TASKS[config.task](config)
    if not names_code(config.task):
        raise ValueError(
            f"--task {config.task!r} is none of {', '.join(TASKS)}, no FILE.py:Class")
    file, make = from_file(config.task, "class")
    with naming_the_task(file):
        task = make(config)

    # A class in a file need not derive from Task, so nothing can be taken for granted.
    name = type(task).__name__
    size = getattr(task, "vocab_size", 0)
    end = getattr(task, "end", ())
    if not isinstance(end, (tuple, list)) or not end or not all(0 <= t < size for t in end):
        raise ValueError(f"{name} needs vocab_size and end, ids under it; got {size} and {end}")
    return task


# F. Prompts, evaluation, demonstrations -------------------------------------------------------
# Which prompts a step and an evaluation play, and the supervised steps before the first rollout.
# Who believes that all of it is a function of (seed, step, group) can skip it.


# The first part of every random stream's key after the seed, so that no two streams are the same.
ROLLOUT = 1
EVALUATION = 2
DEMO_PROMPT = 3
DEMO_PLAY = 4


def draw_prompts(config, task, stream, step, groups, first=0, held_out=False):
    """(group, state, prompt tokens) for those of the groups that are this rank's.

    config, task  of the run
    stream        which of the random streams above
    step          of the run, part of the random generators' keys
    groups        group numbers of the step, of all ranks
    first         number of the step's first prompt, counted from the start of the run
    held_out      whether they are for evaluation
    """
    # Group g is rank g mod world's: rank 1 of 2 plays 1, 3, 5 of six. Its generator is seeded by
    # its number and not by the rank, so any number of ranks plays the same games.
    starts = []
    for group in groups:
        if group % dist.get_world_size() == dist.get_rank():
            rng = np.random.default_rng([config.seed, stream, step, group])
            with asking(task):
                # A task from a file need not derive from Task, and may lack `demo_prompt`.
                if stream == DEMO_PROMPT and hasattr(task, "demo_prompt"):
                    state, prompt = task.demo_prompt(rng, first + group)
                else:
                    state, prompt = task.prompt(rng, first + group, held_out)
            starts.append((group, state, prompt))
    return starts


def play(config, task, generator, starts, key):
    """`rollout` by the configuration, in `batch_rows` slots. Collective under a plan."""
    # Ranks that decode together play the prompts of all of them. The draws are the plays' own, and
    # the logits are alike on all of these ranks, so they sample the same tokens without a word.
    # NUMERICS: an all-reduce and an all-gather give every rank the same bits, and all that follows
    # is computed alike. Pinned by
    # tests/test_generator_plan.py::test_every_generator_plan_samples_the_tokens_of_one_process.
    own = starts
    first = 0
    ending = None
    plan = parallel.plan_of(generator)
    if plan.world > plan.dp:  # other ranks decode the same sequences
        prompts, first = gather_replica(generator, [(n, prompt) for n, _, prompt in own])
        starts = [(n, ELSEWHERE, prompt) for n, prompt in prompts]
        starts[first : first + len(own)] = own
        task = SharedTask(task, generator)
        ending = task.ask

    groups = rollout(
        generator, task, starts, group=config.group, key=key, forks=config.forks,
        max_new_tokens=config.max_new_tokens, temperature=config.temperature,
        fork_turns=config.fork_turns, ending=ending, slots=config.batch_rows,
    )  # fmt: skip
    parallel.end_together(generator)

    # What has been played together is shared out again: each rank goes on with its own groups.
    return groups[first : first + len(own)]


ELSEWHERE = "another rank has the task's state of this play"


class SharedTask:
    """A task, for ranks that decode the same plays: of each play one rank asks it, the one that has
    drawn the prompt, and tells the others.

    A task may be slow, or random, or answer by the clock. If each rank asked by itself, two of them
    might hear different replies, decode different tokens, and wait for each other for good.
    """

    def __init__(self, task, generator):
        self.task = task
        self.generator = generator
        self.heard = {}  # id of a play -> the task's new state, reply and reward

    def __getattr__(self, name):
        return getattr(self.task, name)

    def ask(self, plays):
        """Ask for the turns that have ended: these plays', the same ones on all of the ranks."""
        answers = {}
        states = {}
        problem = None
        try:
            for n, play in enumerate(plays):
                if play.state is not ELSEWHERE:
                    answer = play.tokens[play.turn :]
                    states[n], reply, reward = ask_reply(self.task, play, answer)
                    answers[n] = reply, float(reward)
        except Exception as error:  # raised below, after the other ranks have heard of it
            problem = error

        # COMM: one message of each rank for all turns that a decoding step has ended; states stay.
        # Pinned by tests/test_generator_plan.py::test_a_task_is_asked_once.
        text = "" if problem is None else f"{problem}"
        parts, _ = gather_replica(self.generator, [(answers, text)])
        if problem is not None:
            raise problem
        # Every rank has every answer now. A state is the task's own business and stays where it is.
        self.heard = {}
        for answers, text in parts:
            if text:
                raise ValueError(f"on a rank that decodes the same plays: {text}")
            for n, (reply, reward) in answers.items():
                self.heard[id(plays[n])] = states.get(n, ELSEWHERE), reply, reward


def ask_reply(task, play, answer):
    """The task's new state, reply and reward; ValueError for what could not be trained on."""
    if isinstance(task, SharedTask):
        return task.heard[id(play)]
    with asking(task):
        state, reply, reward = task.reply(play.state, answer)
    name = type(task).__name__
    if not is_finite_number(reward):
        raise ValueError(
            f"{name} gave reward {reward} in group {play.group}, rollout "
            f"{play.first}, for the answer {task.show(answer)!r}: rewards must be finite"
        )

    # A token outside the vocabulary would be read from whatever lies behind the embedding.
    if reply is not None and not all(0 <= token < task.vocab_size for token in reply):
        last = task.vocab_size - 1
        raise ValueError(f"{name} replied {reply} in group {play.group}: ids end at {last}")
    return state, reply, reward


def is_finite_number(x) -> bool:
    """Whether x, which may be anything that a task has returned, is a number or a tensor of one."""
    if isinstance(x, torch.Tensor):
        return x.numel() == 1 and bool(x.isfinite())
    if isinstance(x, (np.generic, np.ndarray)):  # np.bool_ too, which is no number for Python
        return np.size(x) == 1 and x.dtype.kind in "biuf" and bool(np.isfinite(x).all())
    return isinstance(x, numbers.Real) and math.isfinite(x)


def require_finite_tokens(config, step, sampled):
    """FloatingPointError if no sampled token of a step counts. Every rollout samples one, and those
    with a finite log-prob are counted: so none was finite."""
    if sampled == 0:
        raise FloatingPointError(
            f"step {step}: no finite token: every sampled token's log-prob is NaN or infinite, so "
            f"nothing can be trained; the weights are not finite or too large, or --temperature "
            f"{config.temperature} is too small"
        )


def equal_rewards(config, rewards_PG) -> float:
    """The fraction of groups that teach nothing, because all their rewards are equal."""
    # A critic compares the rewards of the whole step.
    compared = rewards_PG.reshape(1, -1) if config.advantage == "gae" else rewards_PG
    return (compared == compared[:, :1]).all(1).mean()


def evaluates(config, step) -> bool:
    """Whether the line of a step has an evaluation."""
    return step + 1 == config.steps or (step + 1) % config.eval_every == 0


def evaluate(config, task, generator):
    """Fraction of held-out prompts solved by greedy decoding, and a trajectory to show."""
    # One rollout of each prompt, and no random draw: the key is empty.
    prompts = range(config.eval_prompts)
    starts = draw_prompts(config, task, EVALUATION, 0, prompts, held_out=True)
    greedy = dataclasses.replace(config, group=1, temperature=0.0, forks=1, fork_turns=0)
    groups = play(greedy, task, generator, starts, key=())

    # Each rank has played its own prompts; the sum over ranks is of all.
    solved_here = len([group for group in groups if group[0].reward >= 1])
    (solved,) = summed([solved_here], generator.head_weight.device)
    shown = groups[0][0] if groups else None
    return solved / config.eval_prompts, shown


def demonstrations(task, starts, key, max_new_tokens=4096):
    """Valid play by `task.demo`, one trajectory a start; the mask is where `demo` spoke. A play
    ends at the turn that reaches max_new_tokens."""
    # What `demo` draws depends on the key and the group alone, so any number of ranks plays alike.
    trajectories = []
    for group, state, prompt in starts:
        rng = np.random.default_rng([*key, group])
        play = Play(key, group, state, prompt, 0)
        going = True
        while going and play.new < max_new_tokens:
            with asking(task):
                answer = [int(token) for token in task.demo(play.state, rng)]
            for token in answer:
                play.append(token, 0.0)

            # The reply is queued, as in a rollout; here nobody decodes, so it is taken at once.
            going = play.end_turn(task)
            while play.queue:
                play.append(None, 0.0)
        trajectories += play.trajectories()
    return trajectories


def likelihood_loss(micro, mask_BT, lp_BT, entropy_BT, Z):
    """(7) with l_t = -lp_t, maximum likelihood; its sums as those of `grpo_loss`.

    micro                         the trajectories
    mask_BT, lp_BT, entropy_BT    of their tokens, as `PackedBatches` gives them
    Z                             tokens of all ranks' demonstrations: the loss is their mean
    """
    sampler_BT = padded([t.sampler_logprobs for t in micro], lp_BT)
    stats = {"entropy": entropy_BT.detach()}
    how = dict(aggregation="token_mean", Z=Z)
    return weighted_sum(-lp_BT, lp_BT, mask_BT, sampler_BT, stats, **how)


# A line of demos.jsonl: these metrics of the docstring, and seconds/total. loss/token_mean is here
# the mean negative log-likelihood of a token, whatever --aggregation says of the loop.
DEMO_METRICS = (
    "loss/token_mean", "entropy/token_mean", "grad_norm", "lr", "tokens/trained",
    "tokens/trained_flat", "policy_version", "updates/skipped",
)  # fmt: skip


def supervised_step(config, task, trainer, step):
    """One step on demonstrations, before the first rollout: its metrics. Collective."""
    seconds = {}
    with timed(seconds, "total"):
        # As many demonstrations as a step of the loop has rollouts, and each time other ones. What
        # they are depends on (seed, step, number) alone, like everything that is drawn.
        count = config.prompts * config.group
        starts = draw_prompts(config, task, DEMO_PROMPT, step, range(count), first=step * count)
        key = config.seed, DEMO_PLAY, step
        batch = demonstrations(task, starts, key, config.max_new_tokens)

        # The same two calls as in `update`: Z is summed over ranks before any forward.
        (Z,) = summed([sum(int(t.mask.sum()) for t in batch)], trainer.device)
        warmup = min(config.lr_warmup, config.demos)
        factor = lr_factor(step, warmup=warmup, total=config.demos, decay="constant")
        metrics = trainer.forward_backward(batch, Z, supervised=True)
        metrics |= trainer.optim_step(config.demo_lr * factor)
        warn_if_skipped(step, metrics, "supervised step")

    metrics |= {"updates/skipped": trainer.skipped} | seconds
    return {name: metrics[name] for name in (*DEMO_METRICS, "seconds/total")}


def end_demonstrations(trainer):
    """Make the optimiser new behind the last supervised step."""
    # The second moments of a converged supervised fit are tiny: kept, they would make the first
    # policy-gradient steps ten times too long.
    trainer.optimizer.state.clear()


# G. The run: models, checkpoints, log ---------------------------------------------------------
# What surrounds the loop of part one so that it can be killed, resumed, watched and trusted. Who
# wants the algorithm can skip it; who wants to know what a run writes reads `run` and `Log`.


MEANS = "loss", "kl", "entropy", "ratio", "value", "balance", "experts", "grad_norm", "policy_age"
MOST = "ratio/max", "experts/load_max"  # the largest of all updates


def mean_metrics(updates, step) -> dict:
    """The metrics of a step from those of its updates, a list of dicts; warns where it is empty."""
    if not updates:
        text = "no update, since nothing was left to train on: every group was dropped, or every"
        warn(f"step {step}: {text} rollout was truncated and filtered")
        return {}

    # Means over the updates, but for the gap to the sampler: only the first update sees the weights
    # that sampled, so only there is the gap rounding and not learning. What the first update saw
    # is known by itself too: an audit can then tell a wrong loss from what it did to the weights.
    out = {}
    for name in updates[0]:
        if name.startswith(MEANS) and name != "policy_age/update_mean" and len(updates) > 1:
            out[f"{name}_first"] = updates[0][name]
        if name in MOST:
            out[name] = max(metrics[name] for metrics in updates)
        elif name.startswith(MEANS):
            out[name] = float(np.mean([metrics[name] for metrics in updates]))
        elif name.startswith("logprob_gap"):
            out[name] = updates[0][name]
    return out


def advantage_metrics(trainer, batch) -> dict:
    """Mean and standard deviation of the advantages of all ranks' trajectories. Collective."""
    # The mean is known before the first square is taken: a difference of two large sums would
    # leave rounding where all advantages are nearly the same.
    A_N = np.concatenate([t.advantages[t.mask] for t in batch] or [np.zeros(0)])
    count, total = summed([len(A_N), A_N.sum()], trainer.device)
    mean = total / max(1.0, count)
    (squares,) = summed([((A_N - mean) ** 2).sum()], trainer.device)
    spread = math.sqrt(squares / max(1.0, count))
    return {"advantage/token_mean": mean, "advantage/token_std": spread}


def warn_if_skipped(step, metrics, kind="step"):
    """Say so at once, since the next update may end the run."""
    if "nonfinite" in metrics:
        warn(f"{kind} {step}: skipped, non-finite gradient first in {metrics['nonfinite']}")


def warn(text):
    """One line on standard error, of rank 0 alone."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr)


def own_shape(config, task) -> ModelConfig:
    """The shape of a model that begins with random weights: the flags', with the task's tokens."""
    return ModelConfig(
        vocab_size=task.vocab_size, eos_token_id=tuple(task.end),
        num_hidden_layers=config.layers, hidden_size=config.hidden,
        intermediate_size=3 * config.hidden, head_dim=config.hidden // config.heads,
        num_attention_heads=config.heads, num_key_value_heads=max(1, config.heads // 2),
    )  # fmt: skip


def require_rows(task, shape, source):
    """ValueError if the task has tokens for which a model of the directory source has none."""
    rows = shape.vocab_size
    if task.vocab_size > rows:
        raise ValueError(f"the task has {task.vocab_size} tokens, {source} {rows}")


def shape_of(config, task) -> ModelConfig:
    """The shape of the run's model; ValueError if it does not fit the task or the settings."""
    shape = ModelConfig.from_hf(config.model) if config.model else own_shape(config, task)
    require_rows(task, shape, config.model)
    require_experts(config, shape)
    return shape


def empty_model(config, shape, dtype) -> Transformer:
    """A model on the meta device, with what the settings add to it."""
    with torch.device("meta"):
        model = Transformer(shape).to(getattr(torch, dtype))
        if config.advantage == "gae":
            model.add_value_head()
        if config.router_bias_rate:
            models.give_router_bias(model, config.router_bias_rate)
    return keep_states_wide(config, model)


def build(config, task, device):
    """Policy, generator and (where there is a KL) reference, on this rank."""
    # Models are made without memory. One that is to be split stays so: only parts of it will ever
    # be allocated, by the Trainer. The others are allocated here.
    shape = shape_of(config, task)

    def made(dtype, allocated):
        model = empty_model(config, shape, dtype)
        return model.to_empty(device=device) if allocated else model

    whole = not splits(config)
    model = made(config.dtype, whole)
    if whole:
        first_weights(config, model, None)

    # Their weights are replaced before use, by the first push and by `keep_reference`. The Trainer
    # gives the generator memory, by a plan of its own: `split_generator`.
    generator = made(of_sampler(config), False).requires_grad_(False)
    if not config.kl_coef:
        return model, generator, None
    # A reference never changes, so it needs no masters: it is what the policy computed with.
    return model, generator, made(products(config), whole).requires_grad_(False)


def train(config, device, side=None) -> int:
    """The run: set up, loop, save. Returns the exit code: 0, or 128 + the signal that ended it.

    side: of a run whose generators have ranks of their own (appendix N).
    """
    task = make_task(config)
    if config.demos and getattr(type(task), "demo", Task.demo) is Task.demo:
        raise ValueError(f"{type(task).__name__} has no demonstrations; use --demos 0")
    if config.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise ImportError("--tensorboard: pip install tensorboard")
    # What only the task, a package or the model can tell is asked before anything is written, alike
    # on all ranks; under A+B both sides ask about both plans.
    require_plans(config, shape_of(config, task), side)
    if side is not None and side.name == parallel.GENERATOR:
        return generate_apart(config, task, device, side)
    model, generator, reference = build(config, task, device)
    tell_of_router_loss(config, model)
    require_room(config, task, model.config.max_position_embeddings)

    with contextlib.ExitStack() as stack:  # the lock on the run's directory
        with parallel.naming_lost_ranks(lambda: "setting up", "look at its error"):
            make = Trainer
            if side is not None:
                make = functools.partial(ApartTrainer, side)
            trainer = make(config, model, generator=generator, reference=reference)
            # All that can be refused has been: only now is a directory claimed.
            out = agree(lambda: prepare_out(config, stack))
        return run(config, task, trainer, out)


def require_plans(config, shape, side):
    """ValueError for a plan that does not fit the model's shape, or the number of ranks.

    side: as in `train`. Each side has a world of its own; A|B have one.
    """
    if not config.plan:
        return

    # A side that asked about its own plan alone would learn too late that the other one refuses:
    # the trainer would have claimed the directory by then, and --overwrite deletes what is there.
    generator, trainer = plans_of(config)
    worlds = dict.fromkeys((parallel.GENERATOR, parallel.TRAINER), dist.get_world_size())
    if side is not None:
        worlds = side.sizes
    ulysses = config.cp_method == "ulysses"
    trainer.require_fits(world=worlds[parallel.TRAINER], config=shape, ulysses=ulysses)
    generator = generator or generator_plan(config)
    generator.require_fits(world=worlds[parallel.GENERATOR], config=shape)


def require_experts(config, shape):
    """ValueError for settings about experts, where a model of this shape has none."""
    for name in ("balance_coef", "router_bias_rate"):
        if getattr(config, name) and not shape.sparse_layers:
            where = config.model or "the model of --layers and --hidden"
            raise ValueError(f"{_flag(name)} is about experts, and {where} has none: leave it 0")


def tell_of_router_loss(config, model):
    """One line for a checkpoint whose experts were balanced by a loss in its training."""
    if not (config.model and model.config.sparse_layers):
        return
    # transformers' loss is of a whole batch, so it depends on how a batch is cut; (8) does not.
    raw = models.read_json(Path(config.model) / "config.json")
    coef = raw.get("router_aux_loss_coef")
    if coef:
        does = f"--balance-coef {config.balance_coef:g} does that here, for each sequence"
        if not config.balance_coef:
            does = "here nothing does: --balance-coef, a loss for each sequence, is 0"
        warn(f"the experts of {config.model} were balanced by router_aux_loss_coef {coef}; {does}")


def require_room(config, task, positions):
    """ValueError if a prompt and an answer are longer than the model has positions.

    Every rank looks at the same first prompts, one to train on and one held out, so that all refuse
    alike; prompts of other lengths are `generate`'s to refuse when they come.
    """
    # `generate` would refuse them too, but on one rank in the middle of a step.
    for stream, held_out in ((ROLLOUT, False), (EVALUATION, True)):
        rng = np.random.default_rng([config.seed, stream, 0, 0])
        with asking(task):
            _, prompt = task.prompt(rng, 0, held_out)
        if len(prompt) + config.max_new_tokens > positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and --max-new-tokens {config.max_new_tokens} "
                f"exceed the {positions} positions of the model"
            )


def run(config, task, trainer, out) -> int:
    """`train`, from the moment that the directory `out` is this run's."""
    # Where the generators have ranks of their own, lines wait for their evaluations, and a signal
    # may come to either side. All that follows is the same.
    is_apart = apart(config)
    if is_apart:
        log = LateLog(config, out, task, trainer)
        stop = StopOnBothSides(trainer.side)
        trainer.side.where = lambda: f"step {step}"
        trainer.side.advice = log.advice
    else:
        log = Log(config, out, task)
        stop = Stop()
    step = 0
    solved = None
    under_way = []
    with parallel.naming_lost_ranks(lambda: f"step {step}", log.advice):
        # From the newest checkpoint, or from the start.
        found, state = None, None
        if config.resume:
            found, state = read_newest(out, trainer.load_checkpoint)
        if found:
            step = state["step"]
            under_way = batches_under_way(config, trainer, found, state)
            keep_reference(out, trainer, resumed=True)
            log.begin(trainer, f"the weights of {found}", step, config.demos)
        else:
            signalled = supervised_start(config, task, trainer, log, stop, out)
            if signalled:
                return leave_run(trainer, 128 + signalled, out)
        # The first push: a generator has no weights of its own. On other ranks it is the first
        # order too, so the queue must know by then which batches are under way.
        make = ApartQueue if is_apart else RolloutQueue
        queue = make(config, task, trainer, step, under_way)
        trainer.push_weights()

        # A curve needs a start: what is solved before the first step, on the prompts of all later
        # evaluations. Line 0 of metrics.jsonl has it.
        log.table(Log.COLUMNS, config.steps, step)
        if step == 0:
            log.before(queue.evaluate()[0])

        # A signal is only looked at between steps, by all ranks together: they save the same step.
        while step < config.steps:
            solved = train_step(config, trainer, queue, log, step)
            step += 1
            last = step == config.steps
            signalled = stop.agreed(trainer.device)
            if last or signalled or (config.save_every and step % config.save_every == 0):
                # A resumed run cuts its files behind the checkpoint: by then each line is there.
                log.settle()
                saved = save(config, trainer, out, step, under_way=queue.stored())
                require_saved(saved or not last, out)
            if signalled and not last:
                log.say_interrupted(signalled, saved, f"{step} steps")
                return leave_run(trainer, 128 + signalled, out)

        if solved is None:  # resumed at its last step, or still being evaluated
            solved, _ = queue.evaluate()
        if config.router_bias_rate:
            log.say(f"{out}/hf is not written: its format has no --router-bias-rate")
        elif not is_apart:
            export(config, task, trainer.generator, out, log)
        log.end(solved)
        return leave_run(trainer, 0, out, export=not config.router_bias_rate)


def leave_run(trainer, code, out, export=False) -> int:
    """The exit code of the run; generators on ranks of their own are told that it is over.
    export: whether they write OUT/hf."""
    if isinstance(trainer, ApartTrainer):
        trainer.dismiss(code, out, export)
    return code


def supervised_start(config, task, trainer, log, stop, out) -> int:
    """Bring the trainer before step 0 of a run: the first weights, and --demos supervised steps.

    They are saved, stopped and resumed like the steps of the loop, in checkpoints demos-NNNNNNNN of
    their own; when they are done, step-00000000 takes the place of these. Returns the signal that
    ended them, or 0.
    """
    # Where the weights come from: a supervised start that was interrupted, or the very beginning.
    found, state = None, None
    if config.resume:
        found, state = read_newest(out, trainer.load_checkpoint, "demos")
    step = 0
    origin = f"the weights of {config.model}" if config.model else f"random of seed {config.seed}"
    if found:
        step = state["step"]
        origin = f"the weights of {found}"
    elif config.resume:
        log.say(f"no checkpoint in {out} yet: from the start")
    log.begin(trainer, origin, 0, step)
    if not config.demos:
        keep_reference(out, trainer, resumed=False)
        return 0

    # The steps, as in the loop of `run`: a signal is looked at between two of them.
    signalled = 0
    log.table(Log.DEMO_COLUMNS, config.demos, step)
    with parallel.naming_lost_ranks(lambda: f"supervised step {step}", log.advice):
        while step < config.demos and not signalled:
            log.demo(step, supervised_step(config, task, trainer, step))
            step += 1
            last = step == config.demos
            signalled = stop.agreed(trainer.device)

            # The reference is written before the checkpoint that a resume needs it for.
            if last:
                end_demonstrations(trainer)
                keep_reference(out, trainer, resumed=False)
                saved = save(config, trainer, out, 0)
                require_saved(saved, out)
            elif signalled or (config.save_every and step % config.save_every == 0):
                saved = save(config, trainer, out, step, "demos")
    if signalled:
        log.say_interrupted(signalled, saved, f"{step} supervised steps")
    return signalled


def save(config, trainer, out, step, kind="step", under_way=()) -> bool:
    """Write the checkpoint of `step` and delete what it supersedes. False if nothing was written.
    under_way: the batches that are sampled and not yet trained, see `RolloutQueue.stored`.

    A run whose last gradients were not finite is about to go wrong: its checkpoints would push the
    good ones out. And ranks that should hold the same bits are compared first, because a bit that
    flipped in one of them is seen by nothing else.
    """
    if trainer.skipped_in_a_row:
        return False

    # Collective, and so before anything is written by anybody.
    difference = parallel.replica_difference(trainer.model, trainer.optimizer)
    if difference:
        raise FloatingPointError(
            f"{difference}; nothing is saved: look at that rank's memory, and go on with --resume "
            f"--out {out}"
        )
    extra = {"under_way": under_way} if under_way else {}
    trainer.save_checkpoint(f"{out}/{kind}-{step:08d}", step=step, **extra)

    # Once the loop has a checkpoint, those of the supervised start are of no use.
    def outdated():
        finished = parallel.checkpoints(out, "demos") if kind == "step" else []
        return parallel.superseded(out, step, config.keep, kind) + finished

    for old in agree(outdated):
        shutil.rmtree(old, ignore_errors=True)
    return True


def require_saved(saved, out):
    """FloatingPointError if the last state of the run, or of its supervised start, is not saved."""
    if not saved:
        raise FloatingPointError(
            f"the run ends in steps that were skipped for a non-finite gradient, so its last state "
            f"is not saved; {newest_good(out)}"
        )


def newest_good(out) -> str:
    """Which checkpoint a run that could not save its last state can go on from."""
    newest = agree(lambda: newest_checkpoint(out) or newest_checkpoint(out, "demos"))
    return f"the newest checkpoint is {newest}" if newest else f"{out} holds no checkpoint"


def export(config, task, generator, out, log):
    """OUT/hf: the last weights as a Hugging Face directory, for transformers, `chat`, --model.

    Collective. The weights are the generator's, in its own dtype; in mixed precision the masters.
    """
    # Nothing but this needs the package, and the run is over: its checkpoint holds the weights.
    if not agree(lambda: importlib.util.find_spec("safetensors") is not None):
        log.say(f"{out}/hf not written: pip install safetensors, and then "
                f"python train_grpo.py export {out} {out}/hf")  # fmt: skip
        return
    directory = f"{out}/hf"
    texts = dict(source=config.model, names=token_names(task))

    def write():
        # Masters have more to say than the generator, and the last checkpoint holds them.
        model = generator
        if is_mixed(config):
            model = policy_in(newest_checkpoint(out), config, task, config.dtype, alone=True)
        with writing(directory, log.advice):
            write_hf(model, directory, **texts)

    def complete():
        with writing(directory, log.advice):
            complete_hf(directory, **texts)

    # A generator that is whole is written by rank 0. Of one that is split every rank gives its
    # parts, one tensor at a time, and rank 0 writes them.
    if is_mixed(config) or not any(place.cuts for place in part_of(generator).places.values()):
        agree(write)
        return
    agree(lambda: shutil.rmtree(beside(directory), ignore_errors=True))
    with writing(directory, log.advice):
        models.save_hf(generator, beside(directory))
    agree(complete)


@contextlib.contextmanager
def timed(seconds, phase):
    start = time.perf_counter()
    yield
    seconds[f"seconds/{phase}"] = time.perf_counter() - start


@contextlib.contextmanager
def peak_memory(metrics, device):
    """Add memory/peak: the most megabytes at any moment inside, of the rank that had most.

    On CUDA those of its tensors, on a CPU those of the process. Collective.
    """
    # Linux forgets a process's peak when a 5 is written here. Where it does not, what is reported
    # is the peak since the process began: a bound, and no step's own.
    if "cuda" in str(device):
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    yield

    if "cuda" in str(device):
        peak = torch.cuda.max_memory_allocated(device) / 1e6
    else:
        peak = resident_peak()
    most = torch.tensor(peak, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    metrics["memory/peak"] = most.item()


def resident_peak() -> float:
    """The most megabytes that this process has had in memory; 0 where nobody tells."""
    # Linux says it in kB, other systems in a unit of their own.
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
        return peaks[0] * 1024 / 1e6 if peaks else 0.0
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return 0.0


def keep_reference(out, trainer, resumed):
    """The frozen reference is the policy at the first step; it is stored, so that resume has it."""
    # Without it a resumed run would measure its KL against the weights that it resumes with.
    if trainer.reference is not None:
        tensors = {name: p.detach() for name, p in trainer.reference.named_parameters()}
        tensors |= parallel.persistent_buffers(trainer.reference)
        if resumed:
            try:
                read_checkpoint(f"{out}/reference", tensors)
            except ValueError as error:
                advice = "put a copy of it back, or begin again with --overwrite"
                raise ValueError(f"{error}; {advice}") from error
        else:
            copy_part(trainer.model, trainer.reference)
            write_checkpoint(f"{out}/reference", tensors, {})


class Log:
    """What a run prints and writes; silent on every rank but 0."""

    COLUMNS = dict(
        reward="reward/mean", solved="reward/solved", eval="eval/solved", norm="grad_norm",
        entropy="entropy/token_mean", clipped="ratio/clipped_fraction", gap="logprob_gap/max",
    )  # fmt: skip
    DEMO_COLUMNS = dict(loss="loss/token_mean", entropy="entropy/token_mean", norm="grad_norm")
    IDLE = 3  # steps in a row with nothing to learn from, after which the run warns

    def __init__(self, config, out, task):
        self.config = config
        self.out = Path(out)
        self.task = task
        self.on = dist.get_rank() == 0  # everything else is for rank 0 alone
        self.started = time.perf_counter()
        self.start = 0  # the first step of this process
        self.solved_before = None  # known in the process that does step 0
        self.idle = 0  # steps in a row with nothing to learn from, up to now
        self.events = None
        self.text = None
        self.advice = f"go on with --resume --out {out}"
        if config.tensorboard and self.on:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(out)

    def say(self, text):
        if self.on:
            tqdm.write(text)

    def say_interrupted(self, signalled, saved, done):
        """done: how far the run is, in words. Collective."""
        state = f"saved after {done}" if saved else newest_good(self.out)
        self.say(f"{signal.Signals(signalled).name}: {state}; {self.advice}")

    def begin(self, trainer, origin, start, demo_start):
        """Say in three lines what is trained, how and where; cut files back to where it goes on.

        origin             where the weights come from, in words
        start, demo_start  the first step of the loop, and of the supervised start, that are to do
        """
        # Three lines, and one more where the task has something to say. All settings are in
        # config.json.
        self.start = start
        if not self.on:
            return
        c = self.config
        count = sum(p.numel() for p in trainer.generator.parameters())
        if demo_start < c.demos:
            origin += f", first {c.demos - demo_start} supervised steps"
        world = dist.get_world_size()
        plan = c.plan or f"d{world}"
        if apart(c):
            world = parallel.Allocation.parse(plan).world
        dtype = f"{c.dtype}, computes in {products(c)}" if is_mixed(c) else c.dtype
        self.say(f"{c.task}: {count:,} parameters, {origin}")
        self.say(f"from step {start} of {c.steps}: {c.prompts} groups of {c.group} a step, "
                 f"{world} rank(s), plan {plan}, {c.data_parallel}, "
                 f"{trainer.device.type}, {dtype}")  # fmt: skip
        self.say(f"out {self.out}: `plot {self.out}` draws it; Ctrl-C saves, --resume --out "
                 f"{self.out} goes on")  # fmt: skip
        if getattr(self.task, "note", ""):  # what a task has decided, such as a template
            self.say(self.task.note)

        # Lines behind the checkpoint belong to steps that are now done again.
        firsts = dict.fromkeys(("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"), start)
        if c.demos:
            firsts["demos.jsonl"] = demo_start
        for name, first in firsts.items():
            with writing(self.out / name, self.advice):
                cut_lines(self.out / name, first)

    def table(self, columns, total, done):
        """Begin a table, of the supervised start or of the loop, and its bar."""
        if self.on:
            self.columns = columns
            self.say("  step" + "".join(f"{name:>10}" for name in columns) + "  tokens/s")
            self.bar = tqdm(total=total, initial=done, disable=None, unit="step")

    def row(self, label, metrics):
        """A line of the table. It has one now and then, and the files have one for each step."""
        shown = [metrics.get(name) for name in self.columns.values()]
        cells = [" " * 10 if x is None else f"{x:10.3g}" for x in shown]
        if "seconds/total" in metrics:
            tokens = metrics.get("tokens/generated", 0) + metrics["tokens/trained_flat"]
            cells.append(f"{tokens / metrics['seconds/total']:10.0f}")
        self.say(f"{label:>6}{''.join(cells)}".rstrip())

    def advance(self, name, step, metrics, progress):
        """Write a step's line to the file `name`, and move the bar on; progress: shown beside."""
        self.write(name, {"step": step} | metrics)
        self.bar.set_postfix_str(progress, refresh=False)
        self.bar.update()
        if self.events:
            prefix = "demos/" if name == "demos.jsonl" else ""
            for key, value in metrics.items():
                self.events.add_scalar(prefix + key, value, step)

    def demo(self, step, metrics):
        """A step of the supervised start."""
        if not self.on:
            return
        progress = f"loss {metrics['loss/token_mean']:.3f}"
        self.advance("demos.jsonl", step, metrics, progress)

        # The last line of the table and its bar stay above those of the loop.
        last = step + 1 == self.config.demos
        if step % self.config.log_every == 0 or last:
            self.row(step, metrics)
        if last:
            self.bar.close()

    def before(self, solved):
        """What was solved before step 0, whose line will say so."""
        self.solved_before = solved
        if self.on:
            self.row("before", {"eval/solved": solved})

    def step(self, step, metrics):
        if not self.on:
            return
        if step == 0:
            metrics = {"eval/solved_before": self.solved_before} | metrics
        self.advance("metrics.jsonl", step, metrics, f"reward {metrics['reward/mean']:.3f}")
        if step % self.config.log_every == 0 or "eval/solved" in metrics:
            self.row(step, metrics)
        self.warn_if_idle(step, metrics)

    def warn_if_idle(self, step, metrics):
        """Say it, once, if some steps in a row had no two rewards to compare."""
        if metrics["reward/groups_equal"] < 1:
            self.idle = 0
            return
        self.idle += 1
        if self.idle != self.IDLE:
            return

        # What helps depends on which reward it is that all of them have.
        text = "in each group all rewards are equal, so nothing is learned: raise --group"
        if metrics["reward/groups_none"] == 1:
            text = (
                "no rollout is solved and no reward is better than another in its group, so "
                "nothing is learned: read samples.jsonl; begin with --demos, reward parts of an "
                "answer, or raise --group, --max-new-tokens or --temperature"
            )
        if metrics["reward/groups_all"] == 1:
            text = (
                "every rollout is solved, so nothing more is learned: stop here, or give harder "
                "prompts"
            )
        warn(f"warning: steps {step - self.IDLE + 1} to {step}: {text}")

    def write(self, name, *lines):
        with writing(self.out / name, self.advice), (self.out / name).open("a") as file:
            for line in lines:
                for key, value in line.items():
                    if isinstance(value, float) and not math.isfinite(value):
                        line = line | {key: None}  # JSON has no NaN
                file.write(json.dumps(line) + "\n")

    def sample(self, step, trajectory):
        if self.on and trajectory:
            reward = trajectory.reward
            with asking(self.task):
                self.text = self.task.show(trajectory.tokens)
            self.write("samples.jsonl", {"step": step, "reward": reward, "text": self.text})

    def rollouts(self, step, rollouts, chosen):
        """Write rollouts.jsonl, a line a rollout, for the steps that `--log-rollouts` says.

        rollouts, chosen: of `collect`, after `prepare`. Vectors have an entry for each of tokens
        1, 2, ..; `rewards` are (index of a turn's last target, reward); a group that was dropped
        has no advantage. Collective.
        """
        # A step whose sampler had a checkpoint's weights can be audited from that checkpoint: it is
        # logged whole, and so is the first of a run and of a resumed one. An evaluation shows one
        # group.
        c = self.config
        sampled_at = step - c.staleness
        behind = sampled_at >= 0 and c.save_every > 0 and sampled_at % c.save_every == 0
        behind = behind or step == 0 or sampled_at == self.start
        groups = rollouts.keys()
        wanted = c.log_rollouts == "all" or behind or evaluates(c, step)
        if c.log_rollouts == "none" or not wanted:
            return
        if c.log_rollouts == "some" and not behind:
            groups = groups & {chosen[0] if chosen else 0}

        # Ranks have played groups of their own, and rank 0 writes: in the order of their numbers,
        # so that the file does not tell how many ranks there were.
        # COMM: what decides above is the same on all ranks, so all come here or none does.
        # Pinned by tests/test_audit.py::test_runs_of_several_ranks_are_audited_by_one.
        parts = [None] * dist.get_world_size() if self.on else None
        dist.gather_object({group: rollouts[group] for group in groups}, parts)
        if self.on:
            together = {group: played for part in parts for group, played in part.items()}
            for group in sorted(together):
                lines = [
                    rollout_line(self.task, step, number, trajectory)
                    for number, trajectory in enumerate(together[group])
                ]
                self.write("rollouts.jsonl", *lines)

    def settle(self):
        """Nothing of a step that is done is still to be written."""

    def end(self, solved):
        if not self.on:
            return
        self.bar.close()
        if self.text is not None:  # a run that was resumed at its last step has played nothing
            self.say(f"sample: {self.text}")
        verb = "met" if solved >= self.config.target else "MISSED"
        seconds = time.perf_counter() - self.started
        verb = f"target {self.config.target} {verb} after {self.config.steps} steps"
        self.say(f"eval/solved {solved:.3f}: {verb}, {seconds:.0f} s")


def rollout_line(task, step, number, t) -> dict:
    """A line of rollouts.jsonl: rollout `number` of its group, a Trajectory."""
    # Vectors as they are, of all targets, so that a line can be read without the run.
    with asking(task):
        text = task.show(t.tokens)
    return {
        "step": step, "group": t.group, "rollout": number, "tokens": list(map(int, t.tokens)),
        "sampled": t.sampled.astype(int).tolist(), "logprobs": t.sampler_logprobs.tolist(),
        "text": text, "rewards": [list(pair) for pair in t.turn_rewards],
        "advantage": None if t.advantages is None else t.advantages.tolist(),
        "truncated": bool(t.truncated),
    }  # fmt: skip


@contextlib.contextmanager
def writing(path, advice):
    """Say of an OSError what it kept from being written, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} not written ({error}): make room or mend the directory, then {advice}"
        ) from error


def read_json_lines(path, *, skip_torn_last=False) -> list:
    """[(line number from 1, object)] of a file with one JSON object a line; empty lines are none.

    ValueError names file and line of what is not an object. skip_torn_last: leave out the last line
    if it is damaged and no newline ends it, as a kill or a full disk leaves a file.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")  # JSON strings may hold other line breaks
    except FileNotFoundError as error:
        raise ValueError(f"no {path}; expected a file of JSON lines") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        problem = None
        try:
            value = json.loads(line.decode("utf-8")) if line.strip() else {}
            if not isinstance(value, dict):
                problem = f"it is a {type(value).__name__}"
        except (ValueError, RecursionError) as error:
            problem = error
        # After the last newline split leaves an empty piece, so a last piece that is not empty is a
        # line that nobody has finished.
        if problem is not None and not (skip_torn_last and number == len(lines)):
            raise ValueError(f"{path} line {number} holds no JSON object: {problem}")
        if problem is None and line.strip():
            found.append((number, value))
    return found


def whole_lines(path) -> list[dict]:
    """The JSON objects in a run's file of lines, without a last one that a kill has torn."""
    if not path.exists():
        return []
    return [line for _, line in read_json_lines(path, skip_torn_last=True)]


def cut_lines(path, step):
    """Drop the lines of `step` and later, and torn ones; the file is replaced whole."""
    # A kill between the two last lines leaves the old file and a .tmp that nobody reads.
    partial = path.with_suffix(".tmp")
    lines = []
    for line in whole_lines(path):
        if not isinstance(line.get("step"), int):
            raise ValueError(f"{path} has a line without a step: {json.dumps(line)[:60]}")
        if line["step"] < step:
            lines.append(json.dumps(line) + "\n")
    partial.write_text("".join(lines))
    partial.replace(path)


# H. Curves ------------------------------------------------------------------------------------
# `train_grpo.py plot`, a PNG or text of what runs wrote to metrics.jsonl. Everybody can skip it who
# draws with other means.


def plot(runs) -> None:
    """reward/mean and eval/solved by step: curve.png in the first run; text if no matplotlib."""
    # All runs are read before anything is drawn, so that a mistake in the last is named at once.
    curves = {}
    for run in runs:
        path = Path(run) / "metrics.jsonl"
        if not path.exists():
            raise ValueError(f"{run} holds no metrics.jsonl; give the directory of a run")
        curves[run] = whole_lines(path)
        for number, line in enumerate(curves[run], 1):
            if not {"step", "reward/mean"} <= line.keys():
                raise ValueError(f"{path} line {number} has no step and reward/mean")

    try:
        from matplotlib.figure import Figure
    except ImportError:
        for run, lines in curves.items():
            print(f"{run}: reward/mean (pip install matplotlib for a PNG)")
            for x in lines[:: max(1, len(lines) // 20)]:
                reward = x["reward/mean"]
                print(f"{x['step']:6d} {reward:7.3f} {'#' * int(50 * max(0, reward))}")
        return
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for n, (run, lines) in enumerate(curves.items()):
        rewards = [x["reward/mean"] for x in lines]
        axes.plot([x["step"] + 1 for x in lines], rewards, f"C{n}", label=Path(run).name)
        # What a step leaves is drawn behind it, and what was solved before the first one at 0.
        dots = [(0, x["eval/solved_before"]) for x in lines if "eval/solved_before" in x]
        dots += [(x["step"] + 1, x["eval/solved"]) for x in lines if "eval/solved" in x]
        axes.plot([x for x, _ in dots], [y for _, y in dots], f"C{n}o", markersize=4)
    axes.set(xlabel="step", ylabel="line: reward/mean   dots: eval/solved", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(runs[0]) / "curve.png", dpi=120)
    print(f"wrote {Path(runs[0]) / 'curve.png'}")


# I. A model that one can talk to: eval, chat, export ------------------------------------------
# What becomes of a run's weights: figures with their intervals, a conversation, a directory that
# other programs load. Who only trains can skip it.


# One process reads a run without its plan, which is another way to compute the same.
ONE_PROCESS = dict(
    plan="", data_parallel="ddp", ac="none", cp_method="ring", pp_schedule="1f1b", shard_ranks=0,
    offload=False, compile=False,
)  # fmt: skip

# Flags that may name a file of Python, which is code: see `resumed_config`.
CODE = "task", "reward"

# Flags of a run that an evaluation has too. All others would change nothing, and are refused.
EVAL_FLAGS = (
    "task", "data", "template", "instruction", "system", "reward", "size", "turns", "length",
    "eval_prompts", "max_new_tokens", "temperature", "batch_rows", "seed", "device", "dtype",
    "threads",
)  # fmt: skip

NORMAL_95 = 1.959964  # a normal number is within so many deviations 95 % of the time


@contextlib.contextmanager
def one_process(command, device="cpu", threads=1):
    """A process group of this process alone, which is all that the ordinary code asks for; yields
    the device. A group that is there already is used, and stays."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"{command} is one process: start it without torchrun")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")

    # Checkpoints, prompts and sums ask for their rank and for the number of ranks: 0 and 1.
    if dist.is_initialized():
        yield "cpu"
        return
    device = connect(device, threads=threads)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def is_run(directory) -> bool:
    """Whether a directory is a run's, else a checkpoint's: both hold a config.json."""
    path = Path(directory) / "config.json"
    what = "the directory of a run, or of a checkpoint in Hugging Face's format"
    return "advantage" in models.read_json(path, what=what)


def settings_of_run(run, imported=()) -> Config:
    """What a run was started with.

    imported: of the flags in CODE those whose file the caller goes on to import. Where the run had
    a file, ValueError asks for it: none is imported because a directory names it.
    """
    # `resumed_config` wants all of them again. Those that nobody imports are given as they stand.
    path = Path(run) / "config.json"
    stored = models.read_json(path, what="the configuration of a run")
    again = {name: f"{stored[name]}" for name in CODE if name in stored and name not in imported}
    return resumed_config(path, again)


def task_of_run(run, config, spec) -> Task | None:
    """The task whose tokens are the model's; None for a run with --model, which has its own.

    spec: the run's FILE.py:Class, given again, or nothing.
    """
    if spec and (config.model or config.task in TASKS):
        raise ValueError(f"--task is for a run with a task from a file: {run} needs none here")
    if config.model:
        return None

    # A file that only the run's directory names is asked for and not imported.
    if spec:
        config = dataclasses.replace(config, task=spec)
    else:
        settings_of_run(run, imported=("task",))
    return make_task(config)


def policy_of_run(run, step, task, dtype=""):
    """The policy in a run's checkpoint, whole and on the CPU, and the checkpoint's name.

    step    of the checkpoint; None: the newest that is undamaged
    task    a run without --model has its task's tokens
    dtype   default: the generator's, in which the run evaluates
    """
    config = settings_of_run(run)
    found = parallel.checkpoints(run)
    if step is not None:
        found = [path for path in found if path.name == f"step-{step:08d}"]
    elif not found and parallel.checkpoints(run, "demos"):
        raise ValueError(f"{run} is still in its supervised start: its first checkpoint of the "
                         f"loop, step-00000000, comes at the end of that")  # fmt: skip
    if not found:
        steps = ", ".join(f"{int(path.name[5:])}" for path in parallel.checkpoints(run)) or "none"
        raise ValueError(f"{run} holds no such checkpoint; those that it holds are of: {steps}")

    # The shape is not in the checkpoint: it is that of --model, or what the flags say. Tensors of
    # another shape are refused by `read_checkpoint`, by name.
    if config.model and not Path(config.model).is_dir():
        raise ValueError(
            f"the shape and the text of this run's model are those of its --model "
            f"{config.model}, which is gone: put it back"
        )

    def read(path):
        return policy_in(path, config, task, dtype or of_sampler(config))

    if step is not None:
        return read(found[0]), found[0].name
    path, policy = read_newest(run, read)
    return policy, Path(path).name


def policy_in(path, config, task, dtype, alone=False):
    """The policy in the checkpoint `path` of a run, whole and on the CPU, in a dtype. alone: no
    other rank calls it."""
    shape = ModelConfig.from_hf(config.model) if config.model else own_shape(config, task)
    model = Transformer(shape).to(getattr(torch, config.dtype))
    if config.advantage == "gae":
        model.add_value_head()
    if config.router_bias_rate:
        models.give_router_bias(model, config.router_bias_rate)

    # The weights alone: AdamW's two moments of each are twice as much again, and stay on the disk.
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    weights |= {f"buffer.{name}": x for name, x in parallel.persistent_buffers(model).items()}
    read_checkpoint(path, weights, only=("model.", "buffer."), alone=alone)
    model = model.to(getattr(torch, dtype)).requires_grad_(False)
    return keep_states_wide(config, model)


def load_policy(source, step, task, dtype, device):
    """The model of a run or of a Hugging Face directory, and how it is called in one line."""
    if is_run(source):
        model, checkpoint = policy_of_run(source, step, task, dtype)
        return model.to(device), f"{source}, {checkpoint}"
    if step is not None:
        raise ValueError(f"--step is of a run, and {source} is a checkpoint in another format")
    stored = getattr(torch, dtype) if dtype else None
    return models.load_hf(source, dtype=stored, device=device).requires_grad_(False), f"{source}"


# An evaluation asks two things of the same held-out prompts. Greedy play says how many the policy
# solves at its best; several samples of each say how likely one answer solves it (pass@1), and how
# often one of k does (pass@k). Figures that are far apart promise that training can still help.


def pass_at_k(solved, count, k) -> float:
    """The chance that one of k samples solves a prompt, from `count` samples of which some solved.

    Chen et al. 2021, arXiv:2107.03374: 1 - C(count - solved, k) / C(count, k). It has no bias, and
    1 - (1 - solved / count)^k has one: with 1 of 2 solved it says 3/4 for k = 2, where it was 1.
    """
    # Of all ways to choose k of the samples, those that choose only failures.
    return 1 - math.comb(count - solved, k) / math.comb(count, k)


def wilson(mean, count):
    """Wilson's 95 % interval for a chance of which `count` prompts gave this mean."""
    # The interval holds every chance p whose own spread, sqrt(p (1 - p) / count), reaches to the
    # mean. So 7 of 7 gives 0.65 to 1, where mean +- 2 deviations would give 1 to 1.
    #
    # That is for prompts that count 0 or 1. pass@1 counts c / n, pass@k a number between 0 and 1
    # too; of all of those with mean p, 0 and 1 spread the most: x^2 <= x, so that the variance
    # mean(x^2) - p^2 is at most p - p^2. For them the interval is right or wider than it must be.
    z2 = NORMAL_95**2 / count
    centre = (mean + z2 / 2) / (1 + z2)
    half = math.sqrt(mean * (1 - mean) * z2 + z2 * z2 / 4) / (1 + z2)

    # Rounding may leave an end just beyond 0 or 1, or the mean of 1 just outside.
    low = max(0.0, centre - half)
    high = min(1.0, centre + half)
    return min(low, mean), max(high, mean)


class Evaluation(NamedTuple):
    """What an evaluation has found."""

    figures: dict  # name -> (value, low, high)
    prompts: int  # different ones
    shown: list  # (prompt, answer, reward) of some samples, as text


def evaluated(config, task, model, samples) -> Evaluation:
    """Play each held-out prompt greedily and `samples` times at the temperature. Collective."""
    # Greedy play is what a run does every `eval_every` steps, by the same call: of the same
    # weights it is the same figure, if seed, prompts and limits are the run's.
    solved, _ = evaluate(config, task, model)
    prompts = range(config.eval_prompts)
    starts = draw_prompts(config, task, EVALUATION, 0, prompts, held_out=True)

    # The samples, by random numbers of their own: a key of one number more than a rollout's. They
    # are no rollouts of training, which fork where --forks says so, and are `group` in number.
    several = dataclasses.replace(config, group=samples, forks=1, fork_turns=0)
    groups = play(several, task, model, starts, key=(config.seed, EVALUATION, 0))
    counts = [len([t for t in group if t.reward >= 1]) for group in groups]

    # A prompt that comes twice is no second one: `guess` has 7, and is asked each of them 10 times.
    different = len({(repr(state), tuple(prompt)) for _, state, prompt in starts})
    values = {"solved": solved}
    powers = [2**n for n in range(samples.bit_length())]  # 1 2 4 of 6 samples, and 6 itself
    for k in sorted({*powers, samples}):
        values[f"pass@{k}"] = float(np.mean([pass_at_k(c, samples, k) for c in counts]))
    figures = {name: (value, *wilson(value, different)) for name, value in values.items()}

    # The first sample of the first prompts, to see what the figures are of.
    shown = []
    for (_, _, prompt), group in zip(starts[:3], groups):
        tokens = group[0].tokens
        with asking(task):
            texts = task.show(tokens[: len(prompt)]), task.show(tokens[len(prompt) :])
        shown.append((*texts, group[0].reward))
    return Evaluation(figures, different, shown)


def settings_of_evaluation(source, given) -> Config:
    """The run's own settings, or the defaults for a Hugging Face directory, and what was given."""
    # A run's device may not be here, nor what it began with; its plan needs other processes.
    if is_run(source):
        missing = [name for name in CODE if name not in given]
        config = settings_of_run(source, imported=missing)
        elsewhere = ONE_PROCESS | {"device": "", "demos": 0, "demo_data": "", "demo_lr": None}
        elsewhere["compute_dtype"] = ""  # `policy_of_run` reads what the run had
        return dataclasses.replace(config, **elsewhere | given).check()
    if "task" not in given:
        raise ValueError(f"{source} is a checkpoint, so say what to ask it: --task NAME, with "
                         f"--data FILE for --task jsonl")  # fmt: skip
    return Config(**given | {"model": f"{source}"}).check()


def evaluation(argv) -> int:
    """`eval`: how many held-out prompts a policy solves, greedily and in several samples."""
    parser = argparse.ArgumentParser("train_grpo.py eval", allow_abbrev=False)
    parser.add_argument("source", metavar="RUN_OR_DIR", help="a run, or a Hugging Face directory")
    parser.add_argument("--step", type=int, help="of the run's checkpoint [the newest]")
    parser.add_argument("--samples", type=int, default=8, metavar="K", help="of each prompt [8]")
    parser.add_argument(
        "--all-lines", action="store_true", help="jsonl: every line of --data, a file of its own, "
        "in place of the tenth that is held out")  # fmt: skip
    fields = [f for f in dataclasses.fields(Config) if f.name in EVAL_FLAGS]
    flags = parser.add_argument_group("flags", "default: the run's own; of a directory [these]")
    add_flags(flags, fields)
    options = parser.parse_args(argv)
    if options.samples < 1:
        raise ValueError(f"--samples must be positive, got {options.samples}")

    # Everything that is wrong with the flags is said before a model is read. `given` are those that
    # were typed: the others are the run's own.
    given = {f.name: getattr(options, f.name) for f in fields if hasattr(options, f.name)}
    config = settings_of_evaluation(options.source, given)
    if options.all_lines and config.task != "jsonl":
        raise ValueError(f"--all-lines is for --task jsonl, not {config.task}")
    with one_process("an evaluation", config.device, config.threads) as device:
        if options.all_lines:
            task = Jsonl(config, all_lines=True)
            config = dataclasses.replace(config, eval_prompts=len(task.rows[True]))
        else:
            task = make_task(config)
        dtype = given.get("dtype", "")
        model, name = load_policy(options.source, options.step, task, dtype, device)
        require_rows(task, model.config, options.source)
        require_room(config, task, model.config.max_position_embeddings)
        found = evaluated(config, task, model, options.samples)

    # What the task has decided by itself, such as a template. Then a table for a reader, samples,
    # and one line of JSON for a program.
    if getattr(task, "note", ""):
        print(task.note)
    which = "prompts" if options.all_lines else "held-out prompts"
    print(f"{name}: {config.task}, {config.eval_prompts} {which}, {found.prompts} "
          f"different; {options.samples} samples each at temperature {config.temperature:g}, "
          f"seed {config.seed}")  # fmt: skip
    print(f"{'':16}{'':>8}   95 % interval over prompts")
    for name, (value, low, high) in found.figures.items():
        label = f"{name} (greedy)" if name == "solved" else name
        print(f"{label:16}{value:8.3f}   {low:.3f} - {high:.3f}")
    for prompt, answer, reward in found.shown:
        print(f"\nprompt: {prompt}\nanswer: {answer}\nreward: {reward:g}")
    print(f"\n{json.dumps(found.figures)}")
    return 0


# A conversation is one growing row of tokens. What the user says is encoded and put behind it, the
# answer is sampled behind that, and its tokens stay as they are: nothing is encoded twice. Every
# turn runs the row from its beginning, which is simple, and quick for what a person can type.


class Words:
    """The text side of a model whose tokens are named symbols: words with spaces between them.

    What `chat` asks of a `models.Text`, for tasks like `guess`; it needs no package.
    """

    template = None

    def __init__(self, names, end):
        self.names = names
        self.end = end
        self.numbers = {name: number for number, name in enumerate(names)}

    def encode(self, text, *, bos=False):
        for word in text.split():
            if word not in self.numbers:
                raise ValueError(f"{word!r} is none of the symbols: {' '.join(self.names)}")
        return [self.numbers[word] for word in text.split()]

    def decode(self, tokens):
        return Symbols(self.names).show(tokens)


def words_of(directory):
    """The names of a directory's symbols, if its tokenizer is one that `write_hf` makes of words;
    else None."""
    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        return None

    # The vocabulary in its order makes the same file again, or somebody else has made this one.
    stored = models.read_json(path)
    model = stored.get("model")
    if not isinstance(model, dict) or model.get("type") != "WordLevel":
        return None
    names = list(model.get("vocab", {}))
    return names if stored == word_tokenizer(names)["tokenizer.json"] else None


def text_side(source, config, task):
    """The text side of a run (config, task) or of a Hugging Face directory (None, None)."""
    # Of a task of symbols the tokenizer is the list of their names; of all else it is a file.
    if config is None:
        names = words_of(source)
        if names is None:
            return models.Text(source)
        return Words(names, ModelConfig.from_hf(source).eos_token_id)
    if config.model:
        return models.Text(config.model)
    if not token_names(task):
        raise ValueError(f"the tokens of {type(task).__name__} have no names, so nobody can talk")
    return Words(token_names(task), task.end)


class Answer(Row):
    """An answer under way, printed while it is sampled."""

    def __init__(self, tokens, draws, text):
        super().__init__(tokens, draws)
        self.text = text
        self.start = len(tokens)
        self.printed = ""

    def append(self, token, logprob):
        sampled = super().append(token, logprob)
        self.print_whole()
        return sampled

    def print_whole(self, ended=False):
        """Print what is new, up to the last whole character; all once the answer has ended."""
        # A character may be the bytes of several tokens. Until the last of them is there, decoding
        # ends in U+FFFD; it is shown only if no more will come.
        text = self.text.decode(self.tokens[self.start :])
        if ended or not text.endswith("\ufffd"):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text


class Conversation:
    """What was said, as messages and as the one row of tokens that the model sees."""

    def __init__(self, model, text, options, plain=None):
        """plain: what becomes of a line where no chat template is used; None: it stays as it is."""
        # The messages are for the chat template, and the tokens for the model; both begin empty,
        # but for the system's message.
        self.model = model
        self.text = text
        self.options = options
        self.plain = plain
        self.tokens = []
        self.turns = 0
        self.messages = []
        if options.system:
            self.messages.append({"role": "system", "content": options.system})

    def hear(self, said):
        """Put what the user says into the row; ValueError, and nothing, if it has no tokens."""
        # Tokens of answers stay as they were sampled: only what is new is encoded.
        messages = [*self.messages, {"role": "user", "content": said}]
        if self.plain is not None or self.text.template is None:
            said = said if self.plain is None else self.plain(said)
            new = self.text.encode(said, bos=self.turns == 0)
        elif self.turns == 0:
            new = self.text.prompt(messages)
        else:
            new = self.text.next_turn(messages, self.tokens[-1])
        self.tokens = self.tokens + new
        self.messages = messages

    def answer(self):
        """Sample the answer and print it meanwhile; ValueError where the model has no room left."""
        positions = self.model.config.max_position_embeddings
        room = min(self.options.max_new_tokens, positions - len(self.tokens))
        if room < 1:
            raise ValueError(
                f"the conversation has {len(self.tokens)} tokens, and the model has {positions} "
                f"positions, so it cannot go on: begin another"
            )

        # The draws are a function of the seed and the turn, so that a conversation from a pipe can
        # be repeated, and a second turn is not drawn by the numbers of the first.
        draws = uniforms((self.options.seed, self.turns), room)
        row = Answer(self.tokens, draws, self.text)
        generate(
            self.model, [row], max_new_tokens=room, temperature=self.options.temperature,
            end=self.text.end,
        )  # fmt: skip
        row.print_whole(ended=True)
        print(flush=True)
        if row.truncated:
            print(f"(cut off after {room} tokens)", file=sys.stderr)

        self.messages.append({"role": "assistant", "content": row.printed})
        self.tokens = row.tokens
        self.turns += 1


def lines_said(at_terminal):
    """What is typed, or comes through a pipe, line by line to the end of the input."""
    while True:
        if at_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()

        # Even an empty line has its newline: nothing at all is the end, Ctrl-D at a terminal.
        if not line:
            if at_terminal:
                print()
            return
        if line.strip():
            yield line.rstrip("\n")


def converse(conversation):
    """Answer every line. At a terminal a line that has no tokens is named, and asked for again."""
    # A mistyped symbol does not end a conversation. In a pipe nobody would see that it was skipped.
    at_terminal = sys.stdin.isatty()
    for said in lines_said(at_terminal):
        try:
            conversation.hear(said)
        except ValueError as error:
            if not at_terminal:
                raise
            print(error, file=sys.stderr)
            continue
        conversation.answer()


def chat(argv) -> int:
    """`chat`: a conversation, streamed, until the input ends or somebody presses Ctrl-C."""
    # Answers are drawn from the policy's own distribution at the temperature, as rollouts are: no
    # top-k, top-p or penalty of generation_config.json, so what one sees is what was trained.
    parser = argparse.ArgumentParser("train_grpo.py chat", allow_abbrev=False)
    parser.add_argument("source", metavar="RUN_OR_DIR", help="a run, or a Hugging Face directory")
    parser.add_argument("--step", type=int, help="of the run's checkpoint [the newest]")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--system", help="the system's message, in a chat template [the run's]")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy [0.7]")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer [512]")
    parser.add_argument("--seed", type=int, default=0, help="of sampling [0]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="[cuda, if there]")
    parser.add_argument("--dtype", choices=Config.CHOICES["dtype"], default="", help="[as stored]")
    options = parser.parse_args(argv)
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be positive, got {options.max_new_tokens}")

    # A directory in Hugging Face's format needs no task, and has no settings.
    config = task = None
    if is_run(options.source):
        config = settings_of_run(options.source)
        task = task_of_run(options.source, config, options.task)
        if options.system is None:
            options.system = config.system
    elif options.task:
        raise ValueError("--task is for a run with a task from a file")

    try:
        with one_process("a chat", options.device, torch.get_num_threads()) as device:
            text = text_side(options.source, config, task)
            if options.system and text.template is None:
                raise ValueError(f"--system needs a chat template, and {options.source} has none")
            model, name = load_policy(options.source, options.step, task, options.dtype, device)

            # How one talks to it. Answers alone go to standard output, for whoever reads a pipe.
            how = "its own chat template"
            plain = None
            asked = config is not None and config.task == "jsonl"
            if asked and config.template not in ("", "chat"):
                plain = functools.partial(plain_prompt, config)
                how = f"each line is put into the run's prompt, --template {config.template!r}"
            elif isinstance(text, Words):
                how = f"symbols, with spaces between them: {' '.join(text.names)}"
            elif text.template is None:
                how = "no chat template, so each line is plain text that the model goes on with"
            print(f"{name}: {how}", file=sys.stderr)
            converse(Conversation(model, text, options, plain))
    except KeyboardInterrupt:
        print(flush=True)  # one leaves by Ctrl-C, or by Ctrl-D, which ends the input
    return 0


# Hugging Face's directory is what other programs load: weights and shape by `models.save_hf`, and a
# text side, without which AutoTokenizer makes up one of five tokens and says nothing. It is the
# --model directory's, as it stands. A task of symbols has none, so one of words is written for it.


def token_names(task) -> list:
    """A task's tokens as words that a tokenizer can tell apart; an empty list if they are none."""
    names = task.names if isinstance(task, Symbols) else []
    words = [name for name in names if isinstance(name, str) and name.split() == [name]]
    whole = len(set(words)) == len(names) == task.vocab_size
    return words if whole else []


def word_tokenizer(names) -> dict:
    """{file: its JSON}: a tokenizer of words, which the package tokenizers and transformers read.

    Word n of names has the id n. A word that is none of them is an error there, as it is here.
    """
    model = {"type": "WordLevel", "vocab": {name: n for n, name in enumerate(names)}}
    # An unknown word would become this one, if it were in the vocabulary.
    model["unk_token"] = "<unknown>"
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    tokenizer = {"version": "1.0", "added_tokens": [], **dict.fromkeys(parts)}
    tokenizer |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}

    # Without this file transformers takes the model's family for the tokenizer's, in silence.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["clean_up_tokenization_spaces"] = False
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def write_hf(model, directory, *, source="", names=()):
    """Write a model as a Hugging Face directory, all of it or nothing; what stood there goes.

    source   the --model directory, whose tokenizer, template and ends of turns are copied, or none
    names    without a source: the names of the tokens, for a tokenizer of words, or none
    """
    shutil.rmtree(beside(directory), ignore_errors=True)
    try:
        models.save_hf(model, beside(directory))
    except OSError:
        shutil.rmtree(beside(directory), ignore_errors=True)  # what was cut short takes room
        raise
    complete_hf(directory, source=source, names=names)


def beside(directory) -> Path:
    """Where a directory is first written. A kill leaves it there, and the next try deletes it."""
    return Path(f"{Path(directory).absolute()}.tmp")


def complete_hf(directory, *, source="", names=()):
    """`write_hf`, from the moment that the weights and the config lie `beside` their place."""
    partial = beside(directory)
    try:
        if source and not Path(source).is_dir():
            raise FileNotFoundError(f"the text files of --model {source} are gone")
        if source:
            models.copy_text_files(source, partial)
        elif names:
            for name, value in word_tokenizer(names).items():
                text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
                (partial / name).write_text(text, encoding="utf-8")
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise

    # Between these two lines there is no directory, and never half of one. A directory cannot be
    # renamed to one that holds files, so the old one has to go first.
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def export_command(argv) -> int:
    """`export`: a run's checkpoint as the directory that the run itself would write to OUT/hf."""
    parser = argparse.ArgumentParser("train_grpo.py export", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    parser.add_argument("directory", metavar="DIR", help="to write; not there yet, or empty")
    parser.add_argument("--step", type=int, help="of the run's checkpoint [the newest]")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    options = parser.parse_args(argv)

    # Nothing is deleted for this but an empty directory.
    directory = Path(options.directory)
    partial = beside(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is not empty: give a directory that is, or a new one")
    if partial.exists():
        raise ValueError(f"{partial} is there, where the files are first written: remove it")
    if not is_run(options.run):
        raise ValueError(f"{options.run} is no run: it is in Hugging Face's format already")

    config = settings_of_run(options.run)
    with one_process("an export"):
        task = task_of_run(options.run, config, options.task)
        dtype = config.dtype if is_mixed(config) else of_sampler(config)  # as `export`
        model, checkpoint = policy_of_run(options.run, options.step, task, dtype)
        names = token_names(task) if task else []
        write_hf(model, directory, source=config.model, names=names)
    print(f"wrote {directory}: {options.run}, {checkpoint}")
    return 0


# J. A step by hand ----------------------------------------------------------------------------
# The definition of a whole step: each sequence by itself, plain loops, (1) to (7), clip and AdamW.
# `check`, the tests and `audit` hold steps against it; who only trains can skip it.

# It shares no code with the step that it defines but the task, the random numbers and the model: no
# batch, no padding, no packing, no cache, no tree, no plan, no sum over ranks. Numbers that need no
# gradient are Python's floats. The precision is that of the model which it is given, so that the
# same lines say what a step is, in float64, and what rounding makes of it, in the run's.


@dataclass
class Recorded:
    """A rollout as it was written down, and what the step by hand finds out about it.

    Lists have an entry for each sampled token; `at` is the index of its target, among tokens[1:].
    """

    # What was written down; all but the tokens and smp is found out again from the task.
    group: int
    number: int  # in its group
    tokens: list
    at: list
    smp: list  # log-probs by the sampler
    rewards: list  # (index of a turn's last target, reward)
    truncated: bool
    prompt: int = 0  # so many tokens were not the policy's first turn's
    differs: int = 0  # tokens that are not those that the task says, missing ones too
    filtered: bool = False  # out of the loss, by `--overlong filter`

    # What `definition` takes, by its names. None: the settings have no part for it.
    A: list | None = None
    old: list | None = None
    ref: list | None = None
    v_old: list | None = None
    g: list | None = None
    lp: list | None = None  # these three are of the update that trained on it
    H: list | None = None
    v: list | None = None
    w: float = 1.0
    Z: float = 1.0
    terms: list = field(default_factory=list)  # of `definition`

    @property
    def reward(self):
        # Added turn by turn, as a rollout's is, for whether two sums are equal is a question of
        # their last bits: 0.1 + 0.2 + 0.3 is more than 0.3 + 0.3.
        total = 0.0
        for _, reward in self.rewards:
            total += reward
        return total


def play_again(config, task, start, group, number, tokens, logprobs) -> Recorded:
    """A recorded rollout, its sampled tokens said to the task again.

    start: (state, prompt tokens). tokens, logprobs: as rollouts.jsonl has them. The task says what
    is no sampled token, what each turn earns and where the rollout ends.
    """
    # Tokens that the task has said must be the task's, and be there; all others were sampled.
    #
    #     ?  3  .  higher  5  .        the prompt, a turn, the reply, a turn
    #        x  x          x  x        sampled: targets 0 1 and 3 4, in `at`
    state, prompt = start
    s = Recorded(group, number, tokens, [], [], [], False, prompt=len(prompt))
    s.differs = max(0, len(prompt) - len(tokens))
    s.differs += len([token for token, said in zip(prompt, tokens) if token != said])
    place = turn = len(prompt)
    ended = False
    while place < len(tokens) and not ended:
        s.at.append(place - 1)
        place += 1
        if tokens[place - 1] not in task.end:
            continue

        # The turn is over. What the task replies stands next, as far as there is room.
        with asking(task):
            state, reply, reward = task.reply(state, tokens[turn:place])
        s.rewards.append((place - 2, float(reward)))
        ended = reply is None
        said = tokens[place : place + len(reply or ())]
        s.differs += len([token for token, here in zip(reply or (), said) if token != here])
        place = turn = place + len(reply or ())

    # A rollout ends where the task says so, or at the limit: tokens behind its end were never said,
    # and one that neither ended nor met the limit lacks some.
    limit = len(prompt) + config.max_new_tokens
    s.truncated = not ended
    s.differs += abs(len(tokens) - (min(place, limit) if ended else limit))
    s.smp = [logprobs[at] for at in s.at]
    return s


def first_rollout(config, s, at) -> int:
    """The rollout whose random number drew target `at` of s; its own where nothing forks."""
    # The root of a tree stands for forks^turns rollouts, and each turn boundary divides them.
    passed = len([end for end, _ in s.rewards if end < at])
    share = config.forks ** max(0, config.fork_turns - passed)
    return s.number - s.number % share


class Measured(NamedTuple):
    """A metric by hand, and what it is made of, by which the rounding of two precisions is told.

    terms: numbers of which the metric is the sum (norm 1), the length (2) or the largest (inf).
    margins: of what is counted or not, how far each is from the other side; reach: how far the
    metric goes if all of them change sides.
    """

    # Two metrics of 1000 tokens may agree by luck while their tokens do not: errors of either sign
    # cancel in a sum. The distance of two precisions is therefore taken term by term, by the norm
    # that bounds the difference of the metrics: |sum a - sum b| <= sum |a - b|.
    value: float
    terms: np.ndarray = np.zeros(0)
    norm: float = 1
    margins: np.ndarray = np.zeros(0)
    reach: float = 1


def distance(a, b) -> float:
    """How far two precisions are apart in a metric: term by term, so that errors cannot cancel."""
    if a.terms.shape != b.terms.shape:
        raise ValueError("rounding decides which updates are finite, so nothing can be compared")
    return float(np.linalg.norm(a.terms - b.terms, a.norm)) if a.terms.size else 0.0


def read_alone(model, s, temperature, spelled_out=False):
    """One sequence by itself: log-probs of all tokens at its sampled targets, a row for each, and
    their values or None. spelled_out: by `models.full_definition`, not by the model's code.
    """
    # The state of the token before a target predicts it: target `at` is tokens[at + 1].
    tokens = torch.tensor(s.tokens)
    states = model.hidden(tokens[None])[0, s.at]
    logits = models.full_definition(model, tokens)[s.at] if spelled_out else model.logits(states)
    values = model.values(states) if model.config.value_head else None

    # Log-probs are in float32 at least, as the trainer's and the sampler's are.
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide) / temperature).log_softmax(-1), values


def score_alone(model, s, temperature, spelled_out=False):
    """log-prob, entropy and value of each sampled token: lists of 0-d tensors, with a graph."""
    # The entropy is of the whole distribution, at the temperature that the log-probs have too.
    logprobs, values = read_alone(model, s, temperature, spelled_out)
    targets = [s.tokens[at + 1] for at in s.at]
    lp = list(logprobs[range(len(targets)), targets])
    H = list(-(logprobs.exp() * logprobs).sum(-1))
    return lp, H, None if values is None else list(values)


class Routed(NamedTuple):
    """What the routers did with one sequence by itself."""

    balance: object  # the sequence's part of (8), a 0-d tensor with a graph; a number later
    counts: dict  # layer -> how many of its tokens went to each expert
    margins: list  # for each layer and token, by how much the last expert chosen was ahead


def routed_alone(config, model, s, sequences) -> Routed:
    """A sequence by itself, of so many that the step trains on; all its tokens, sampled or not."""
    found = Routed(torch.zeros(()), {}, [])
    parts = []

    def look(p_NE, chosen_NK, /, *, layer):
        # How many tokens chose each expert, times how likely it was to all of them.
        N, E = p_NE.shape
        K = chosen_NK.shape[1]
        counts = [0] * E
        for chosen in chosen_NK.tolist():
            for e in chosen:
                counts[e] += 1
        b = sum(counts[e] * p_NE[:, e].sum() for e in range(E)) * E / (K * N * N)
        parts.append(config.balance_coef * b / sequences)  # (8)
        found.counts[layer] = counts

        # The order that decides is that of p and the bias.
        mlp = model.model.layers[layer].mlp
        biased_NE = p_NE.detach()
        if mlp.rate:
            biased_NE = biased_NE + mlp.rate * mlp.votes
        if K < E:
            best = biased_NE.sort(-1, descending=True).values
            found.margins.extend((best[:, K - 1] - best[:, K]).tolist())

    model.hidden(torch.tensor(s.tokens)[None], balance=look)
    return found._replace(balance=torch.stack(parts).sum())


def balance_by_hand(config, model, batch):
    """Adds the gradient of (8); a Routed for each sequence, and {layer: tokens of each expert}."""
    routed = []
    counts = {layer: [0] * model.config.num_experts for layer in model.config.sparse_layers}
    if not counts:
        return routed, counts  # a dense model

    for s in batch:
        found = routed_alone(config, model, s, len(batch))
        if config.balance_coef:
            found.balance.backward()  # (8)
        for layer, of_experts in found.counts.items():
            counts[layer] = [a + b for a, b in zip(counts[layer], of_experts)]
        # The graph of one sequence at a time: the number is kept without it.
        routed.append(found._replace(balance=float(found.balance.detach())))
    return routed, counts


@torch.no_grad()
def vote_by_hand(model, counts):
    """(11) of models.py. counts: layer -> how many tokens of the step went to each expert."""
    for layer, of_experts in counts.items():
        mean = sum(of_experts) / len(of_experts)
        votes = model.model.layers[layer].mlp.votes
        for e, count in enumerate(of_experts):
            # An expert with too few tokens becomes likelier to be chosen, one with too many less.
            if count != mean:
                votes[e] += 1 if count < mean else -1


def numbers_of(values) -> list:
    """Python's floats, of numbers and of 0-d tensors, without their graph."""
    return [float(x.detach()) if torch.is_tensor(x) else float(x) for x in values]


def penalties(config, s) -> list:
    """What each sampled token loses of its reward, with --kl-in reward."""
    if config.kl_in != "reward" or not config.kl_coef:
        return [0.0] * len(s.at)
    # The three estimates of (5), of numbers and not of tensors.
    ds = [smp - ref for smp, ref in zip(s.smp, s.ref)]
    k = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) + d - 1}
    return [config.kl_coef * k[config.kl](d) for d in ds]


def group_advantages_by_hand(config, group):
    """(1) of a group, all kinds but `gae`, into the A of its rollouts."""
    # Truncated rollouts count in their group's mean: they have rewards.
    R = [s.reward - math.fsum(penalties(config, s)) for s in group]
    G = len(R)
    mean = math.fsum(R) / G

    # Equal rewards teach nothing, whatever rounding makes of r - mean.
    centred = [r - mean for r in R]
    if min(R) == max(R):
        centred = [0.0] * G
    scale = 1.0
    if config.advantage == "group_std":
        scale = 1 / (math.sqrt(math.fsum(x * x for x in centred) / (G - 1)) + 1e-4)
    if config.advantage == "leave_one_out":
        scale = G / (G - 1)
    for s, x in zip(group, centred):
        s.A = [x * scale] * len(s.at)  # (1)
    if config.advantage != "per_branch":
        return

    # A token's segment is worth the mean reward of the rollouts that share it, and its advantage
    # is what it is worth beyond the segment before it; the root's is the whole group's.
    def worth(s, passed):
        share = config.forks ** max(0, config.fork_turns - passed)
        first = s.number - s.number % share
        return math.fsum(R[first : first + share]) / share

    # Before the first boundary a token is of the root; behind the last fork, its rollout's own.
    for s in group:
        for n, at in enumerate(s.at):
            passed = min(len([end for end, _ in s.rewards if end < at]), config.fork_turns)
            before = worth(s, passed - 1) if passed else mean
            s.A[n] = worth(s, passed) - before  # (1)


def gae_by_hand(config, sequences):
    """(1) `gae` of all sequences, into A and g; returns the A's before they are whitened."""
    # The sum over n as it stands, for each token anew, where `gae` has a recursion.
    decay = config.gamma * config.gae_lambda
    raw = []
    for s in sequences:
        # A turn's reward belongs to the last token that was sampled up to it.
        u = [-penalty for penalty in penalties(config, s)]
        for end, reward in s.rewards:
            u[max(n for n, at in enumerate(s.at) if at <= end)] += reward

        # Behind the last token nothing more is expected.
        next_v = [*s.v_old[1:], 0.0]
        deltas = [u[t] + config.gamma * next_v[t] - v for t, v in enumerate(s.v_old)]
        s.A = []
        for t in range(len(deltas)):
            terms = [decay**n * delta for n, delta in enumerate(deltas[t:])]
            s.A.append(math.fsum(terms))  # (1)
        s.g = [v + A for v, A in zip(s.v_old, s.A)]
        raw += s.A

    # Whitened over all tokens of the step, whatever trajectory they are of.
    mean = math.fsum(raw) / max(1, len(raw))
    spread = math.sqrt(math.fsum((A - mean) ** 2 for A in raw) / max(1, len(raw)))
    for s in sequences:
        s.A = [(A - mean) / (spread + 1e-8) for A in s.A]  # (1)
    return raw


def weigh(config, batch) -> float:
    """w and Z of (7), of each sequence of an update; returns Z."""
    # What is filtered out has no tokens to count; `constant` counts it as a sequence all the same.
    trained = [s for s in batch if s.at and not s.filtered]
    Z = sum(len(s.at) for s in trained)
    if config.aggregation == "sequence_mean":
        Z = len(trained)
    if config.aggregation == "constant":
        Z = len(batch) * config.max_new_tokens
    for s in trained:
        s.w = 1 / len(s.at) if config.aggregation == "sequence_mean" else 1.0
        s.Z = Z
    return Z


def rate_by_hand(config, step) -> float:
    """The learning rate of a step: a linear rise, then `--lr-decay` to the last step."""
    # Warm-up 2 of 10 steps: .5 1 of --lr, then 1 .875 .75 .. down to .125 where it is linear. With
    # --lr-first-step zero the warm-up is 0 .5; with --lr-min 0.2 the last one is .3.
    # The warm-up is at most the whole run: the default 5 is 2 under --steps 2, .5 1 of --lr.
    warmup = min(config.lr_warmup, config.steps)
    if step < warmup:
        begun = 1 if config.lr_first_step == "nonzero" else 0
        return config.lr * (step + begun) / warmup
    done = (step - warmup) / (config.steps - warmup)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return config.lr * (config.lr_min + (1 - config.lr_min) * left[config.lr_decay])


@torch.no_grad()
def adamw_by_hand(config, model, moments, lr, shrink, masters):
    """One AdamW step of the gradients times `shrink`, in place. moments: {name: [steps, m, v]}."""
    # Numbers are stored in the weights' precision, and computed with in float32 at least. In mixed
    # precision the weights are the masters, and the model gets their rounding.
    for name, p in model.named_parameters():
        weight = masters.get(name, p)
        wide = torch.promote_types(weight.dtype, torch.float32)
        steps, m, v = moments[name]
        steps += 1

        # Means of the gradient and of its square, that forget; both begin at 0, which is corrected
        # by what they have not yet seen. Weight decay is apart from the gradient.
        g = shrink * p.grad.to(wide)
        m = 0.9 * m.to(wide) + 0.1 * g
        v = config.beta2 * v.to(wide) + (1 - config.beta2) * g * g
        size = (v / (1 - config.beta2**steps)).sqrt() + 1e-8
        kept = (1 - lr * config.weight_decay) * weight.to(wide)
        weight.copy_(kept - lr * m / (1 - 0.9**steps) / size)
        moments[name] = [steps, m.to(weight.dtype), v.to(weight.dtype)]
        if masters:
            p.copy_(weight.to(getattr(torch, products(config))))


# What is measured in each update, causes before their effects.
FIRST = (
    "ratio/token_mean", "ratio/max", "ratio/clipped_fraction", "entropy/token_mean",
    "kl/token_mean", "value/loss", "loss/policy_token_mean", "loss/token_mean",
    "experts/load_max", "balance/loss", "grad_norm",
)  # fmt: skip


class Update(NamedTuple):
    """One optimiser step by hand."""

    sequences: list  # Recorded, those that have tokens in its loss
    gradient: np.ndarray  # all of it, one vector
    norm: float  # its length, before clipping
    version: int  # optimiser steps taken before
    tokens: int  # of all its rollouts
    routed: list  # of all its rollouts, a Routed each; empty without experts
    counts: dict  # layer -> how many of their tokens went to each expert


def step_by_hand(
    config, groups, model, moments, step, *, reference=None, version=0, skipped=0, sampled_by=None,
    spelled_out=(), masters=None,
):  # fmt: skip
    """A whole step by (1) to (7): {metric: Measured}. The model and moments become those behind it.

    groups            {number: its Recorded rollouts}, all that were played, in order
    model, moments    the policy before the step, in the precision to compute in; of AdamW
    masters           in mixed precision {name: the weight that the model has rounded}
    reference         of the KL, in that precision; None: there is none
    version, skipped  optimiser steps taken and skipped before the step
    sampled_by        optimiser steps that the sampler's weights had taken; None: version
    spelled_out       numbers of groups that are read by `models.full_definition`
    """
    # Rewards and lengths are of all that was played. Groups whose rewards are all equal may be
    # left out of the training.
    c = config
    found = rollout_metrics(c, groups)
    chosen = [n for n, group in groups.items() if not c.dynamic_sampling or not equal(group)]
    everyone = [s for n in chosen for s in groups[n]]

    # What has no gradient is known before the first update: the reference's log-probs, and those
    # of the policy as it is now, or the sampler's. None: the policy is its own old policy.
    for s in everyone:
        s.ref = s.old = s.v_old = None
        with torch.no_grad():
            if reference is not None:
                s.ref = numbers_of(score_alone(reference, s, c.temperature)[0])
            if c.proximal or c.advantage == "gae":
                lp, _, values = score_alone(model, s, c.temperature, s.group in spelled_out)
                if c.proximal:
                    s.old = numbers_of(lp)
                if values is not None:
                    s.v_old = numbers_of(values)
        if (c.minibatches > 1 or c.staleness) and not c.proximal:
            s.old = s.smp
        s.filtered = s.truncated and c.overlong == "filter"

    # Advantages: of each group by itself, or of all tokens that are trained on by a critic.
    trained = [s for s in everyone if s.at and not s.filtered]
    if c.advantage == "gae":
        found |= critic_metrics(trained, gae_by_hand(c, trained))
    else:
        for n in chosen:
            group_advantages_by_hand(c, groups[n])
    found |= advantage_metrics_by_hand(trained)

    # The updates: whole groups, in order. Five groups in two updates are 0 1 and 2 3 4.
    lr = rate_by_hand(c, step)
    updates = []
    sampled_by = version if sampled_by is None else sampled_by
    for m in range(c.minibatches):
        first = m * len(chosen) // c.minibatches
        last = (m + 1) * len(chosen) // c.minibatches
        batch = [s for n in chosen[first:last] for s in groups[n]]
        Z = weigh(c, batch)
        trained = [s for s in batch if s.at and not s.filtered]
        if Z == 0:
            continue

        # The gradient of a sum is the sum of the sequences' gradients, and only the graph of one
        # sequence is held at a time. Then the numbers are kept without it, to be looked at.
        model.zero_grad()
        for s in trained:
            s.lp, s.H, s.v = score_alone(model, s, c.temperature, s.group in spelled_out)
            if s.old is None:
                s.old = numbers_of(s.lp)
            definition([s], Z, c).backward()
            s.lp = numbers_of(s.lp)
            s.H = numbers_of(s.H)
            if s.v is not None:
                s.v = numbers_of(s.v)

        # Experts are balanced over all rollouts, also those without a token in (7).
        routed, counts = balance_by_hand(c, model, batch)

        # Clip by the norm of all of it, then AdamW. A gradient that is not finite changes nothing,
        # and is counted.
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()]).numpy()
        norm = float(np.linalg.norm(gradient))
        tokens = sum(len(s.tokens) for s in batch)
        updates.append(Update(trained, gradient, norm, version, tokens, routed, counts))
        if math.isfinite(norm):
            shrink = c.max_grad_norm / norm if norm > c.max_grad_norm else 1.0
            adamw_by_hand(c, model, moments, lr, shrink, masters or {})
            if c.router_bias_rate:
                vote_by_hand(model, counts)
            version += 1
        else:
            skipped += 1

    # With several updates the first is told by itself: only it sees the weights before the step.
    if len(updates) > 1:
        first = update_metrics(c, updates[:1], reference is not None, sampled_by)
        found |= {f"{name}_first": first[name] for name in FIRST if name in first}
    if updates:
        found |= update_metrics(c, updates, reference is not None, sampled_by)

    # How many tokens a tree runs depends on where it is cut, which no equation says.
    counts = {"lr": lr, "policy_version": version, "updates/skipped": skipped}
    for name in ("policy/age_mean", "policy/age_max"):
        counts[name] = min(step, c.staleness)
    counts["tokens/trained_flat"] = sum(update.tokens for update in updates)
    if c.tree == "disabled":
        counts["tokens/trained"] = counts["tokens/trained_flat"]
    return found | {name: Measured(x) for name, x in counts.items()}


def equal(group) -> bool:
    """Whether all rewards of a group are the same, so that it teaches nothing."""
    return len({s.reward for s in group}) == 1


def mean_of(values) -> Measured:
    """Their mean; its terms are divided by their number already."""
    terms = np.array(numbers_of(values)) / max(1, len(values))
    return Measured(math.fsum(terms), terms)


def rollout_metrics(config, groups) -> dict:
    """Rewards and lengths of all that was played."""
    # A row for each group. What was dropped later counts too: it says how the policy is. A critic
    # compares the rewards of the whole step.
    solved = [[s.reward >= 1 for s in group] for group in groups.values()]
    played = [s for group in groups.values() for s in group]
    compared = [played] if config.advantage == "gae" else groups.values()
    lengths = [len(s.at) for s in played]
    return {
        "reward/mean": mean_of([s.reward for s in played]),
        "reward/solved": mean_of([one for row in solved for one in row]),
        "reward/groups_none": mean_of([not any(row) for row in solved]),
        "reward/groups_all": mean_of([all(row) for row in solved]),
        "reward/groups_equal": mean_of([equal(some) for some in compared]),
        "tokens/generated": Measured(sum(lengths)),
        "tokens/truncated_fraction": mean_of([s.truncated for s in played]),
        "length/rollout_mean": mean_of(lengths), "length/max": Measured(max(lengths)),
    }  # fmt: skip


def deviation(values):
    """Standard deviation, and the deviations of which it is the length."""
    # The length of the vector of deviations, each divided by the root of their number.
    values = np.array(numbers_of(values))
    mean = math.fsum(values) / max(1, len(values))
    terms = (values - mean) / math.sqrt(max(1, len(values)))
    return math.sqrt(math.fsum(terms * terms)), terms


def advantage_metrics_by_hand(sequences) -> dict:
    """Of the tokens that are trained on."""
    A = [A for s in sequences for A in s.A]
    spread, terms = deviation(A)
    return {"advantage/token_mean": mean_of(A), "advantage/token_std": Measured(spread, terms, 2)}


def critic_metrics(sequences, surprises) -> dict:
    """surprises: g - v of each token, which is A before it is whitened."""
    v = [v for s in sequences for v in s.v_old]
    a, a_terms = deviation(surprises)
    b, b_terms = deviation([g for s in sequences for g in s.g])
    explained = 1 - a * a / (b * b) if b * b > 1e-12 else 0.0

    # The change of a^2 / b^2 is 2 a^2 / b^2 times the sum of the relative changes of a and b. The
    # last term is of a size that counts what the run loses by b^2 = mean g^2 - (mean g)^2.
    slope = 2 * (1 - explained)
    parts = [slope * a_terms / max(a, 1e-300), slope * b_terms / max(b, 1e-300)]
    lost = slope * math.fsum(g * g for s in sequences for g in s.g) / max(1, len(v))
    terms = [*parts[0], *parts[1], lost / max(b * b, 1e-300)]
    share = Measured(explained, np.array(terms) * math.sqrt(2), 2)
    return {"value/token_mean": mean_of(v), "value/explained_variance": share}


def update_metrics(config, updates, has_reference, sampled_by) -> dict:
    """What an Update measures, as means over them. sampled_by: the sampler's policy version."""
    c = config
    U = len(updates)

    def over_updates(of_sequence, per_token=True):
        # A sum over the tokens of an update; the loss is divided by Z already, everything else is
        # by their number, whatever the aggregation of the loss. Then the mean over updates.
        terms = []
        for update in updates:
            count = max(1, sum(len(s.at) for s in update.sequences)) if per_token else 1
            terms += [x / count / U for s in update.sequences for x in of_sequence(s)]
        return Measured(math.fsum(terms), np.array(terms))

    def column(name):
        return lambda s: [term[name] for term in s.terms]

    # Where a ratio stands to the bounds beyond which it would clip, whichever is nearest.
    def margins(s):
        bounds = [1 - c.clip_low, 1 + c.clip_high, c.dual_clip or math.inf]
        if c.objective == "cispo":
            bounds = [c.cispo_bound]
        return [min((x["r"] - b for b in bounds), key=abs) for x in s.terms]

    # The largest ratio is of all updates. The gap to the sampler is of the first alone, where both
    # have the same weights and rounding is all that is between them.
    clipped = over_updates(column("clips"))
    trained = [s for update in updates for s in update.sequences]
    near = np.array([x for s in trained for x in margins(s)])
    ratios = np.array([term["r"] for s in trained for term in s.terms])
    gaps = np.array([lp - x for s in updates[0].sequences for lp, x in zip(s.lp, s.smp)])

    # The mean of norms is at most the root of the mean of their squares: this vector's length.
    gradients = np.concatenate([update.gradient for update in updates]) / math.sqrt(U)
    norms = [update.norm for update in updates]
    ages = [update.version - sampled_by for update in updates]
    found = {
        "loss/token_mean": over_updates(column("part"), per_token=False),
        "loss/policy_token_mean": over_updates(column("policy"), per_token=False),
        "entropy/token_mean": over_updates(lambda s: s.H),
        "ratio/token_mean": over_updates(column("r")),
        "ratio/max": Measured(max(ratios, default=0.0), ratios, math.inf),
        "ratio/clipped_fraction": clipped._replace(margins=near),
        "logprob_gap/max": Measured(max(abs(gaps), default=0.0), gaps, math.inf),
        "logprob_gap/mean": mean_of(abs(gaps))._replace(terms=gaps / max(1, len(gaps))),
        "grad_norm": Measured(math.fsum(norms) / U, gradients, 2),
        "policy_age/update_mean": mean_of(ages),
    }
    if has_reference:
        found["kl/token_mean"] = over_updates(column("k"))
    if c.advantage == "gae":
        found["value/loss"] = over_updates(column("value"))
    if updates[0].counts:
        found |= expert_metrics(c, updates)
    return found


def expert_metrics(config, updates) -> dict:
    """The balance loss, and the largest load of all updates and layers."""
    loads = []
    for update in updates:
        for counts in update.counts.values():
            loads.append(max(counts) * len(counts) / sum(counts))

    # Two experts may be so near that rounding decides which one a token goes to. A token more is
    # then one more of all those of an expert, of which this is the fraction of the mean.
    routed = [r for update in updates for r in update.routed]
    near = np.array([margin for r in routed for margin in r.margins])
    tokens = min(sum(counts) for update in updates for counts in update.counts.values())
    experts = len(next(iter(updates[0].counts.values())))
    top = Measured(max(loads), margins=near, reach=len(near) * experts / tokens)
    found = {"experts/load_max": top}
    if config.balance_coef:
        # In (8) such a token changes one count, of a sequence of N tokens, by one of K N.
        terms = np.array(numbers_of(r.balance for r in routed)) / len(updates)
        choices = [len(u.routed) * sum(n) for u in updates for r in u.routed
                   for n in r.counts.values()]  # fmt: skip
        reach = len(near) * config.balance_coef * experts / min(choices)
        found["balance/loss"] = Measured(math.fsum(terms), terms, margins=near, reach=reach)
    return found


# K. The audit: any step of a run, again by hand -----------------------------------------------
# `train_grpo.py audit RUN`: one process, whatever made the run, reads it and writes nothing there.
# For whoever wants to know where a number of metrics.jsonl came from; everybody else can skip it.

# The run's tokens, its weights before the step and its settings go in. Everything else comes out
# again, twice: in float64, to be compared with what the run wrote down, and in the run's precision,
# to know how much of a difference rounding can explain. A recorded number and the one by hand may
# be apart by TIMES the distance of these two and a unit in the last place; behind n steps that had
# to be done again on the way, LATER and 2 n times as far, since each adds to what it has found.
TIMES = 8
LATER = 10

# Rows of the table, causes before their effects: the first that is outside says where to look.
ORDER = (
    "rollouts/groups", "rollouts/tokens", "rollouts/sampled", "sampling", "rollouts/rewards",
    "reward/mean", "reward/solved", "reward/groups_none", "reward/groups_all",
    "reward/groups_equal", "tokens/generated", "tokens/truncated_fraction", "length/rollout_mean",
    "length/max", "eval/solved_before", "logprob_gap/max", "logprob_gap/mean", "value/token_mean",
    "value/explained_variance", "advantage/token_mean", "advantage/token_std",
    "rollouts/advantage", "lr", "policy_age/update_mean", "policy/age_mean", "policy/age_max",
    *(f"{name}_first" for name in FIRST), *FIRST, "policy_version", "updates/skipped",
    "tokens/trained", "tokens/trained_flat", "votes", "eval/solved", "parameters",
)  # fmt: skip


class Audited(NamedTuple):
    """A row of the table. Where there are many numbers, `difference` is the largest of theirs."""

    key: str
    recorded: float
    by_hand: float
    difference: float
    allowed: float

    @property
    def ok(self):
        return self.difference == 0 or self.difference <= self.allowed


class Rounding(NamedTuple):
    """What rounding can explain, told by the step by hand in a second precision."""

    dtype: torch.dtype  # to compute in
    scale: float  # what the distance to float64 is multiplied by
    unit: float  # the run's unit in the last place, relative
    times: float  # TIMES, or LATER times that

    @classmethod
    def of(cls, name, times):
        # Of a run in float64 nothing higher is at hand. Rounding is proportional to the unit in the
        # last place: that of float32 is told, and made smaller by the ratio of the two units.
        run = getattr(torch, name)
        unit = torch.finfo(run).eps
        if run == torch.float64:
            return cls(torch.float32, unit / torch.finfo(torch.float32).eps, unit, times)
        return cls(run, 1.0, unit, times)

    def allowed(self, exact, rounded) -> float:
        """How far a recorded number may be from `exact`; both are Measured."""
        # The loss of a default run, say: 3000 terms of 1e-5 that mostly cancel. In float32 each is
        # about 1e-11 off, so 8 x 3000 x 1e-11 = 2e-7 is allowed, of a loss of 1e-2.
        size = abs(exact.value) if math.isfinite(exact.value) else 0.0
        if exact.terms.size:
            size = max(size, float(np.linalg.norm(exact.terms, exact.norm)))

        # Rewards, counts and rates are float64's in every run: no tensor has a part in them.
        apart = self.times * self.scale * distance(exact, rounded)
        if apart == 0 and not exact.margins.size:
            return TIMES * torch.finfo(torch.float64).eps * size
        allowed = apart + self.unit * size

        # A token that is so near to where it would clip that rounding decides counts either way.
        if exact.margins.size:
            allowed += exact.reach * self.undecided(exact, rounded) / len(exact.margins)
        return allowed

    def undecided(self, exact, rounded) -> int:
        """How many of the margins are so small that rounding can turn them around."""
        if not exact.margins.size or exact.margins.shape != rounded.margins.shape:
            return 0
        slack = self.times * self.scale * np.abs(exact.margins - rounded.margins).max()
        return np.count_nonzero(np.abs(exact.margins) <= slack)

    def row(self, key, recorded, exact, rounded) -> Audited:
        """A row about one number."""
        difference = abs(recorded - exact.value)
        if math.isnan(recorded) and not math.isfinite(exact.value):
            difference = 0.0  # JSON has no NaN: what is not finite is written as null
        if math.isnan(difference):
            difference = math.inf
        allowed = self.allowed(exact, rounded)

        # By hand the log-probs before and after are one number, and their ratio is exactly 1. A
        # run has them from two forwards, in batches of other shapes, which may round apart.
        if key.startswith("ratio/"):
            allowed = max(allowed, TIMES * self.unit)
        return Audited(key, recorded, exact.value, difference, allowed)

    def row_of_many(self, key, differences, exact, rounded) -> Audited:
        """A row about the largest of some differences; exact, rounded: the numbers in question."""
        worst = max(map(float, differences), default=0.0)
        pair = [Measured(0.0, np.array(numbers_of(x)), math.inf) for x in (exact, rounded)]
        return Audited(key, 0.0, worst, worst, self.allowed(*pair))


class RunFiles:
    """A run's directory, read: configuration, metrics, rollouts, checkpoints.

    Nothing is written there, nothing is locked, and no file that it names is imported: task and
    reward are the run's FILE.py:Class and FILE.py:function, given again by whoever audits.
    """

    def __init__(self, run, task="", reward=""):
        self.path = Path(run)
        if not (self.path / "config.json").exists():
            raise ValueError("it holds no config.json; give the directory of a run")
        given = {"task": task, "reward": reward}
        given = {name: spec for name, spec in given.items() if spec}
        config = resumed_config(self.path / "config.json", given)

        # One process needs no plan. The run's tree stays, for one process can have it.
        self.config = dataclasses.replace(config, device="cpu", **ONE_PROCESS).check()

        # A line a step, from 0. The last one may be torn, in a run that was killed or is alive.
        self.metrics = whole_lines(self.path / "metrics.jsonl")
        for number, line in enumerate(self.metrics):
            if line.get("step") != number:
                found = line.get("step")
                raise ValueError(f"line {number + 1} of metrics.jsonl is of step {found!r}")
        self.checkpoints = {int(path.name[5:]): path for path in parallel.checkpoints(self.path)}

    def chosen_step(self, step) -> int:
        """The step to audit: the one that was asked for, or the last one that a checkpoint's
        weights have sampled; 0 where there is none."""
        if not self.metrics:
            raise ValueError("metrics.jsonl holds no whole line")

        # The last steps of a run were sampled with weights that have no line yet.
        if step is None:
            behind = [n + self.config.staleness for n in self.checkpoints]
            return max([n for n in behind if n < len(self.metrics)], default=0)
        if not 0 <= step < len(self.metrics):
            last = len(self.metrics) - 1
            raise ValueError(f"metrics.jsonl has no step {step}: its lines are of 0 to {last}")
        return step

    def rollouts(self, step):
        """{group: lines} of a step, if all that was played is there; else None."""
        path = self.path / "rollouts.jsonl"
        groups = {}
        for number, line in enumerate(whole_lines(path), 1):
            if line.get("step") == step:
                require_rollout(line, f"{path.name} line {number}")
                groups.setdefault(line["group"], {})[line["rollout"]] = line

        # At an evaluation step only one group is there, and of a torn file the last is not whole.
        numbers = set(range(self.config.group))
        whole = all(group.keys() == numbers for group in groups.values())
        if not whole or groups.keys() != set(range(max(len(groups), self.config.prompts))):
            return None
        return {n: [groups[n][i] for i in sorted(groups[n])] for n in sorted(groups)}


def require_rollout(line, where):
    """ValueError for a line of rollouts.jsonl that is not what `rollout_line` writes."""

    def number(x):
        return isinstance(x, int | float) and not isinstance(x, bool)

    def count(x):
        return type(x) is int and x >= 0

    def numbers(x, length):
        return isinstance(x, list) and len(x) == length and all(map(number, x))

    # The file may come from anybody, and what is computed with it below trusts its form. True is an
    # int in Python, and no number here.
    tokens = line.get("tokens")
    rewards = line.get("rewards")
    good = count(line.get("group")) and count(line.get("rollout"))
    good = good and isinstance(tokens, list) and len(tokens) > 1 and all(map(count, tokens))
    for name in ("sampled", "logprobs", "advantage"):
        dropped = name == "advantage" and line.get(name) is None
        good = good and (dropped or numbers(line.get(name), len(tokens) - 1))
    good = good and isinstance(rewards, list) and all(numbers(pair, 2) for pair in rewards)
    if not good:
        raise ValueError(f"{where} is no rollout")


class Before(NamedTuple):
    """What `state_before` finds."""

    trainer: Trainer  # stands before the step
    again: int  # steps that it had to do for that
    sampler: Transformer  # the policy that sampled the step's rollouts
    version: int  # of that policy
    queue: object  # RolloutQueue: has the step's rollouts, or the weights that sample them


def state_before(files, task, step, say) -> Before:
    """A Trainer that stands before the step, and the policy that sampled the step's rollouts.

    say: called with each sentence that tells how it came there.
    """
    # Checkpoint step-M is the state before step M. Step 0 needs none: its weights are drawn from
    # the seed or are those of --model. Supervised steps leave one, which may be gone (--keep).
    # The sampler's weights are those of `staleness` steps before, so the way begins there.
    config = files.config
    sampled_at = max(0, step - config.staleness)
    model, generator, reference = build(config, task, "cpu")
    trainer = Trainer(config, model, generator=generator, reference=reference)
    start = max([n for n in files.checkpoints if n <= sampled_at], default=0)
    again = step - start
    under_way = []
    if start in files.checkpoints:
        path = files.checkpoints[start]
        state = trainer.load_checkpoint(path)
        if state["step"] != start:
            raise ValueError(f"{path.name} is of another step")
        under_way = batches_under_way(config, trainer, path, state)
        say(f"from {path.name}, the state before step {start}")
    else:
        for n in range(config.demos):
            supervised_step(config, task, trainer, n)
        end_demonstrations(trainer)
        again += config.demos
        demos = f", behind {config.demos} supervised steps" if config.demos else ""
        say(f"from the first weights, which --seed and --model say{demos}")
    keep_reference(files.path, trainer, resumed=True)
    trainer.push_weights()

    # On to the step by the ordinary code, in one process, for as long as it makes the run's own
    # rollouts. In float32 rounding draws another token sooner or later, and then it does not.
    if step > start:
        say(f"on to step {step} by the ordinary code, in one process: {step - start} steps, "
            f"for which {LATER + 2 * again} times as much is allowed")  # fmt: skip
    queue = RolloutQueue(config, task, trainer, start, under_way, last=step)
    for n in range(start, step):
        if n == sampled_at:
            sampler = finest_policy(trainer)
            version = trainer.policy_version
        rollouts, chosen, sampled_by, metrics = queue.take(n)
        for name in ("tokens/generated", "reward/mean"):
            here = metrics[name]
            there = files.metrics[n].get(name)
            if not isinstance(there, int | float) or abs(here - there) > 1e-9:
                raise ValueError(
                    f"on the way from step {start} to step {step} one process makes other rollouts "
                    f"than the run: {name} of step {n} is {here} here and {there} in "
                    f"metrics.jsonl; audit a step right behind a checkpoint"
                )
        prepare(config, trainer, [rollouts[g] for g in chosen])
        update(config, trainer, rollouts, chosen, n, sampled_by)
    if sampled_at == step:  # without staleness
        sampler = finest_policy(trainer)
        version = trainer.policy_version
    return Before(trainer, again, sampler, version, queue)


def unsplit_copy(model, dtype):
    """A copy in a precision of a model that is whole, though `parallelize` may have seen it."""
    # A part has process groups, which cannot be copied. Without one a model is whole.
    part = getattr(model, "part", None)
    copied = copy.deepcopy(model, {id(part): None}).to(dtype)
    for p in copied.parameters():
        p.grad_dtype = dtype
    if copied.residual_dtype is not None:
        copied.residual_dtype = torch.promote_types(copied.residual_dtype, dtype)
    return copied


def copy_of_state(trainer, dtype):
    """The policy in a precision, AdamW's moments and the reference, for the step by hand."""
    model = unsplit_copy(trainer.model, dtype)
    reference = trainer.reference
    if reference is not None:
        reference = unsplit_copy(reference, dtype)

    # What adds up over steps is never coarser than it is in the run.
    stored = finest_weights(trainer)
    kept = dtype
    if is_mixed(trainer.config):
        kept = torch.promote_types(dtype, getattr(torch, trainer.config.dtype))
        for p in model.parameters():
            p.grad_dtype = kept

    # Before its first step torch's optimiser has no moments yet; they begin at 0.
    moments = {}
    for name, p in trainer.model.named_parameters():
        state = parallel.state_of(trainer.optimizer, name, p)
        zero = torch.zeros_like(stored[name])
        m = state.get("exp_avg", zero).detach().to(kept, copy=True)
        v = state.get("exp_avg_sq", zero).detach().to(kept, copy=True)
        moments[name] = [int(state.get("step", 0)), m, v]
    return model, moments, reference


def finest_weights(trainer) -> dict:
    """Name -> weight of a whole policy as a checkpoint has it: in mixed precision the master."""
    return parallel.weights_to_store(trainer.model, trainer.optimizer)


def masters_of_state(trainer, dtype) -> dict:
    """For the step by hand in a precision: copies of the masters; none without mixed precision."""
    if not is_mixed(trainer.config):
        return {}
    kept = torch.promote_types(dtype, getattr(torch, trainer.config.dtype))
    return {name: x.to(kept, copy=True) for name, x in finest_weights(trainer).items()}


def finest_policy(trainer):
    """A copy of the policy, with the weights that a push rounds for the sampler."""
    dtype = getattr(torch, trainer.config.dtype)
    return holding(unsplit_copy(trainer.model, dtype), masters_of_state(trainer, dtype))


def holding(model, masters):
    """The model with its masters in place of their roundings, where there are any."""
    if not masters:
        return model
    model = unsplit_copy(model, next(iter(masters.values())).dtype)
    for name, p in model.named_parameters():
        p.data.copy_(masters[name])
    return model


def groups_again(config, task, step, lines) -> dict:
    """{group: Recorded rollouts}: the lines of rollouts.jsonl, said to the task again."""
    groups = {}
    for n, group in lines.items():
        # The prompt is a function of (seed, step, group), as everything that is drawn.
        rng = np.random.default_rng([config.seed, ROLLOUT, step, n])
        with asking(task):
            start = task.prompt(rng, step * config.prompts * config.max_rounds + n, False)
        groups[n] = []
        for i, line in enumerate(group):
            if max(line["tokens"]) >= task.vocab_size:
                last = task.vocab_size - 1
                raise ValueError(f"group {n}, rollout {i} of rollouts.jsonl: ids end at {last}")
            said = line["tokens"], line["logprobs"]
            groups[n].append(play_again(config, task, start, n, i, *said))
    return groups


def in_the_samplers_precision(config, model, dtype):
    """A model with the weights that a push gives the sampler, to compute with in `dtype`."""
    # A cast there and back rounds the weights, once; what is computed with them is not rounded so.
    own = getattr(torch, of_sampler(config))
    pushed = copy.deepcopy(model).requires_grad_(False).to(own)
    return unsplit_copy(pushed, dtype)


@torch.no_grad()
def draw_intervals(config, model, s):
    """For each sampled token of s, between which two numbers one must lie that draws it."""
    # Tokens lie side by side on [0, 1), each as wide as it is likely; a number draws the token
    # that it falls on.
    widths = read_alone(model, s, config.temperature)[0].double().exp()
    ends = widths.cumsum(-1)
    targets = [s.tokens[at + 1] for at in s.at]
    here = range(len(targets)), targets
    return torch.stack([ends[here] - widths[here], ends[here]], -1).numpy()


def sampling(config, groups, step, model, times):
    """Whether each token is the one that its random number draws: the row, and a sentence.

    model: the policy that sampled. The sampler holds its weights in a precision of its own.
    """
    own = of_sampler(config)
    rounding = Rounding.of(own, times)
    exact = in_the_samplers_precision(config, model, torch.float64)
    rounded = in_the_samplers_precision(config, model, rounding.dtype)
    misses = []
    errors = [0.0]
    for s in (s for group in groups.values() for s in group):
        ends = draw_intervals(config, exact, s)
        errors.append(np.abs(ends - draw_intervals(config, rounded, s)).max(initial=0.0))
        for (low, high), at in zip(ends, s.at):
            # Of the rollout's own numbers the one that stood at this place behind the prompt.
            key = config.seed, step, s.group, first_rollout(config, s, at)
            draw = uniforms(key, at + 2 - s.prompt)[-1]
            misses.append(max(low - draw, draw - high, 0.0))

    # Rounding moves an end of an interval a little, and a number that lies there falls beside it.
    allowed = float(times * rounding.scale * max(errors) + rounding.unit)
    outside = len([x for x in misses if x > 0])
    beyond = len([x for x in misses if x > allowed])
    worst = float(max(misses, default=0.0))
    text = (
        f"sampling: {len(misses)} draws, of which {outside} lie outside their token's interval of "
        f"the definition's distribution, the worst by {worst:.1e}; rounding in {own} explains "
        f"{allowed:.1e}, and {beyond} lie further away"
    )
    return Audited("sampling", 0.0, worst, worst, allowed), text


def rollout_rows(config, groups, rounded_groups, lines, rounding) -> list:
    """Rows about rollouts.jsonl itself: what it says, and what the task and the step say."""
    tokens = wrong = unlike = 0
    rewards = []
    advantages = []
    exact = []
    rounded = []
    for n in groups:
        for s, t, line in zip(groups[n], rounded_groups[n], lines[n]):
            # Which tokens are the task's, and which were marked as sampled.
            tokens += len(s.tokens)
            wrong += s.differs
            sampled = set(np.flatnonzero(line["sampled"]).tolist())
            unlike += len(sampled ^ set(s.at))

            # The reward of each turn; a turn that one of the two does not know has none.
            told = dict(map(tuple, line["rewards"]))
            mine = dict(s.rewards)
            rewards += [abs(told.get(at, 0.0) - mine.get(at, 0.0)) for at in {*told, *mine}]
            rewards.append(float(bool(line.get("truncated")) != s.truncated))

            # The advantages, of what was trained on.
            if s.A is not None and not s.filtered and line["advantage"] is not None:
                told = [line["advantage"][at] for at in s.at]
                advantages += [abs(a - b) for a, b in zip(told, s.A)]
                exact += s.A
                rounded += t.A
    count = groups_played(config, groups)
    trained = sum(len(group) for group in groups.values())
    return [
        Audited("rollouts/groups", len(groups), count, abs(count - len(groups)), 0),
        Audited("rollouts/tokens", tokens, tokens - wrong, wrong, 0),
        Audited("rollouts/sampled", 0, unlike, unlike, 0),
        rounding.row_of_many("rollouts/rewards", rewards, [1.0] * trained, [1.0] * trained),
        rounding.row_of_many("rollouts/advantage", advantages, exact, rounded),
    ]


def groups_played(config, groups) -> int:
    """How many groups the rounds of a step play, by which of them are dropped."""
    # As in `collect`: each round plays as many new groups as are missing.
    played = chosen = 0
    for _ in range(config.max_rounds):
        missing = config.prompts - chosen
        for n in range(played, played + missing):
            if not (n in groups and config.dynamic_sampling and equal(groups[n])):
                chosen += 1
        played += missing
    return played


@torch.no_grad()
def solved_by_hand(config, task, model, lower, dtype):
    """eval/solved of the policy behind the step, in float64 and in a lower precision."""
    # The same held-out prompts, and the likeliest token each time, as `evaluate` does it. This is
    # the one number that the ordinary sampler has a part in: it plays, with float64's choices.
    exact = in_the_samplers_precision(config, model, torch.float64)
    rounded = in_the_samplers_precision(config, lower, dtype)
    prompts = range(config.eval_prompts)
    starts = draw_prompts(config, task, EVALUATION, 0, prompts, held_out=True)
    greedy = dataclasses.replace(config, group=1, temperature=0.0, forks=1, fork_turns=0)
    solved = []
    margins = []
    for (t,) in play(greedy, task, exact, starts, key=()):
        solved.append(t.reward >= 1)

        # How far the likeliest token was ahead of the next, at the closest choice of this play: a
        # run whose rounding turned it around may have played another game.
        s = Recorded(t.group, 0, t.tokens, np.flatnonzero(t.sampled).tolist(), [], [], False)
        ahead = []
        for reader in (exact, rounded):
            top_N2 = read_alone(reader, s, 1.0)[0].double().topk(2).values
            ahead.append((top_N2[:, 0] - top_N2[:, 1]).numpy())
        closest = int(ahead[0].argmin())
        margins.append([ahead[0][closest], ahead[1][closest]])
    terms = np.array(numbers_of(solved)) / len(solved)
    return [Measured(math.fsum(terms), terms, margins=x) for x in np.array(margins).T]


def parameters_row(files, step, trainer, exact, rounded, rounding):
    """The parameters behind the step against the next checkpoint: the row or None, and a sentence.

    exact, rounded: {name: weight} that the step by hand has left.
    """
    path = files.checkpoints.get(step + 1)
    if path is None:
        return None, f"parameters after the step: not compared, there is no step-{step + 1:08d}"

    # Each tensor is held to its own rounding, and the one that is furthest from it is shown: AdamW
    # makes steps of one length, so what is wrong with a small tensor is no smaller.
    # AdamW divides by the root of v: where a gradient has nearly cancelled, it is the rounding that
    # is made as long as a step, and the largest of many such entries scatters more than a sum does.
    # Weights are stored in --dtype, whatever the products are in.
    unit = torch.finfo(getattr(torch, files.config.dtype)).eps
    rounding = rounding._replace(times=4 * rounding.times, unit=unit)
    trainer.load_checkpoint(path)
    stored = finest_weights(trainer)
    rows = {}
    for name, p in exact.items():
        vectors = [x.detach().double().flatten().numpy() for x in (stored[name], p, rounded[name])]
        differences = np.abs(vectors[0] - vectors[1])
        rows[name] = rounding.row_of_many("parameters", differences, *vectors[1:])
    worst = max(rows, key=lambda name: rows[name].difference / max(rows[name].allowed, 1e-300))
    return rows[worst], f"parameters after the step: against {path.name}, the worst is {worst}"


def votes_row(trainer, exact, undecided) -> Audited:
    """The routers' biases behind the step, in votes, against those of the next checkpoint.

    trainer: holds that checkpoint. exact: the model that the step by hand has left. undecided: so
    many choices of experts could have been others.
    """
    stored = parallel.persistent_buffers(trainer.model)
    by_hand = parallel.persistent_buffers(exact)
    wrong = sum(int((stored[name] - by_hand[name]).abs().sum()) for name in by_hand)
    sizes = []
    for votes in (stored, by_hand):
        sizes.append(sum(int(votes_E.abs().sum()) for votes_E in votes.values()))
    # A choice changes the counts of two experts, and by that their votes by two at the most.
    return Audited("votes", *sizes, wrong, 4 * undecided)


@dataclass
class Report:
    """What an audit has found."""

    run: str
    step: int
    config: Config
    intro: list  # sentences
    rows: list  # Audited, in ORDER
    left_out: list  # names of metrics that the step does not determine
    outro: str
    group: int  # whose tokens are shown
    sequences: list  # its Recorded rollouts
    others: float  # what the other groups add to the loss
    updates: int  # of the step: the loss is their mean
    show: object  # tokens as text

    @property
    def wrong(self):
        """The first row that is outside; None if all are ok."""
        return next((row.key for row in self.rows if not row.ok), None)

    @property
    def verdict(self):
        if self.wrong is None:
            return f"audit of step {self.step}: ok"
        return f"audit of step {self.step}: {self.wrong} is outside"


def audited(run, step=None, group=None, task="", reward="") -> Report:
    """Do a step of a run again by hand, and compare; ValueError if that cannot be.

    run           its directory
    step, group   None: the last step that a checkpoint's weights have sampled, or 0; the first
                  group that it learns from
    task, reward  the run's FILE.py:Class and FILE.py:function, if it had them
    """
    # The state before the step, and the line to be held against it.
    files = RunFiles(run, task, reward)
    config = files.config
    step = files.chosen_step(step)
    line = files.metrics[step]
    task = make_task(config)
    intro = []
    trainer, again, sampler, sampled_by, queue = state_before(files, task, step, intro.append)
    times = TIMES
    if again:
        times *= LATER + 2 * again
    rounding = Rounding.of(products(config), times)
    text = f"by hand in float64; rounding is told by {str(rounding.dtype)[6:]}"
    if rounding.scale != 1:
        text += f", times {rounding.scale:.1e}, the ratio of the two units in the last place"
    intro.append(text)

    # The rollouts: their tokens are the run's, everything else about them is found out again.
    lines = files.rollouts(step)
    if lines is None:
        intro.append("rollouts.jsonl does not hold all rollouts of this step: sampled again, by "
                     "the ordinary code")  # fmt: skip
        rollouts = queue.take(step).rollouts
        lines = {}
        for n in sorted(rollouts):
            lines[n] = [rollout_line(task, step, i, t) for i, t in enumerate(rollouts[n])]
    if group is not None and group not in lines:
        raise ValueError(f"--group {group}: the groups of step {step} are 0 to {len(lines) - 1}")

    ropes = {rope["rope_type"] for rope in trainer.model.config.rope_parameters.values()}
    if group is not None and not ropes <= {"default", "linear"}:
        raise ValueError(f"--group: the definition has no rope of {', '.join(sorted(ropes))}")

    # The step by hand, in float64 and in the precision that tells of rounding.
    before = dict(version=trainer.policy_version, skipped=trainer.skipped, sampled_by=sampled_by)
    groups = groups_again(config, task, step, lines)
    if "eval/solved_before" in line:  # of the weights that the step by hand is about to change
        model = unsplit_copy(trainer.model, torch.float64)
        lower = unsplit_copy(trainer.model, rounding.dtype)
        masters = masters_of_state(trainer, torch.float64)
        model = holding(model, masters)
        lower = holding(lower, masters)
        solved_before = solved_by_hand(config, task, model, lower, rounding.dtype)
    model, moments, reference = copy_of_state(trainer, torch.float64)
    masters = masters_of_state(trainer, torch.float64)
    exact = step_by_hand(
        config, groups, model, moments, step, reference=reference, masters=masters,
        spelled_out=[] if group is None else [group], **before,
    )  # fmt: skip
    others = groups_again(config, task, step, lines)
    lower, moments, reference = copy_of_state(trainer, rounding.dtype)
    before["masters"] = masters_of_state(trainer, rounding.dtype)
    rounded = step_by_hand(config, others, lower, moments, step, reference=reference, **before)
    finest = holding(model, masters)
    finest_rounded = holding(lower, before["masters"])
    if "eval/solved" in line:
        pair = solved_by_hand(config, task, finest, finest_rounded, rounding.dtype)
        exact["eval/solved"], rounded["eval/solved"] = pair
    if "eval/solved_before" in line:
        exact["eval/solved_before"], rounded["eval/solved_before"] = solved_before

    # The rows: every metric that is both in the line and determined by the step, and what is known
    # besides of the tokens, their advantages and the parameters. A run of an older version of this
    # file lacks some metrics; of the others each must be right.
    row, text = sampling(config, groups, step, sampler, rounding.times)
    rows = [row, *rollout_rows(config, groups, others, lines, rounding)]
    intro.append(text)
    for key in exact.keys() & line.keys():
        recorded = math.nan if line[key] is None else line[key]
        if not isinstance(recorded, int | float):
            raise ValueError(f"{key} of step {step} in metrics.jsonl is no number")
        rows.append(rounding.row(key, recorded, exact[key], rounded[key]))
    weights = [dict(x.named_parameters()) for x in (finest, finest_rounded)]
    row, outro = parameters_row(files, step, trainer, *weights, rounding)
    rows += [row] if row else []
    if row and config.router_bias_rate:
        loads = exact["experts/load_max"], rounded["experts/load_max"]
        rows.append(votes_row(trainer, model, rounding.undecided(*loads)))
    rows.sort(key=lambda row: ORDER.index(row.key))

    # The tokens of one group, and what all others add to the loss. A group whose rewards are all
    # equal would show nothing but the entropy bonus.
    if group is None:
        learning = [n for n in groups if any(any(s.A or []) for s in groups[n])]
        group = learning[0] if learning else 0
    done = exact["policy_version"].value + exact["updates/skipped"].value
    updates = max(1, done - before["version"] - before["skipped"])
    rest = [group_part(groups[n]) for n in groups if n != group]
    return Report(
        run=str(run), step=step, config=config, intro=intro, rows=rows, outro=outro,
        left_out=sorted(line.keys() - exact.keys() - {"step"}), group=group,
        sequences=groups[group], others=math.fsum(rest) / updates, updates=updates,
        show=task.show,
    )  # fmt: skip


def group_part(group) -> float:
    """What a group's tokens add to the loss of its update."""
    return math.fsum(term["part"] for s in group for term in s.terms)


def loss_sentence(report) -> str:
    """That the parts of all tokens are the loss."""
    # The mean over updates, of which each group is in one.
    own = group_part(report.sequences) / report.updates
    return (
        f"loss: this group {own:.15g} + the other groups {report.others:.15g} "
        f"= {own + report.others:.15g}, loss/token_mean by hand"
    )


def token_rows(report) -> list:
    """For each rollout of the group a dict for each of its tokens."""
    found = []
    for s in report.sequences:
        # Target `at` is token at + 1; token 0 is nobody's target.
        place = {at + 1: n for n, at in enumerate(s.at)}
        rows = []
        for index, token in enumerate(s.tokens):
            n = place.get(index)
            row = dict(text=report.show([token]), part=None, why="the prompt")
            if index >= s.prompt:
                row["why"] = "the task's reply"
            if n is not None:
                row["why"] = "sampled, and not trained on"

            # What was trained on has terms. The loss is a mean over updates, and so is its part.
            if n is not None and s.terms:
                row |= s.terms[n]
                row |= dict(smp=s.smp[n], old=s.old[n], lp=s.lp[n], A=s.A[n], H=s.H[n])
                row["part"] /= report.updates
            rows.append(row)
        found.append(rows)
    return found


def print_report(report) -> None:
    """The audit as text."""
    print(f"audit of {report.run}, step {report.step}")
    for text in report.intro:
        print(text)

    # The table, causes before their effects.
    print(f"\n{'':28}{'recorded':>22}{'by hand':>22}{'difference':>12}{'allowed':>10}")
    for row in report.rows:
        verdict = "ok" if row.ok else "OUTSIDE"
        print(f"{row.key:28}{row.recorded:22.15g}{row.by_hand:22.15g}{row.difference:12.1e}"
              f"{row.allowed:10.1e}  {verdict}")  # fmt: skip
    print(f"not determined by the step: {', '.join(report.left_out) or 'nothing'}")
    print(report.outro)

    # The tokens of one group, and the loss that they and all others add up to.
    print(f"\ngroup {report.group}: {len(report.sequences)} rollouts")
    for s, rows in zip(report.sequences, token_rows(report)):
        print(f"rollout {s.number}, reward {s.reward:g}")
        print(f"  {'token':>14}  sampled{'sampler':>11}{'old':>11}{'now':>11}{'ratio':>10}  clip"
              f"{'advantage':>11}{'part of loss':>14}")  # fmt: skip
        for row in rows:
            if row["part"] is None:
                print(f"  {row['text']:>14}  {row['why']}")
                continue
            clip = "yes" if row["clips"] else "no"
            print(f"  {row['text']:>14}{'yes':>9}{row['smp']:11.6f}{row['old']:11.6f}"
                  f"{row['lp']:11.6f}{row['r']:10.6f}{clip:>6}{row['A']:11.6f}"
                  f"{row['part']:14.6e}")  # fmt: skip
    print(loss_sentence(report))
    print(report.verdict)


def audit(argv) -> int:
    """0: every number is within what rounding allows. 1: one is not. 2 (raised): no audit."""
    parser = argparse.ArgumentParser("train_grpo.py audit", allow_abbrev=False)
    parser.add_argument("run", help="directory of a run; nothing is written there")
    parser.add_argument("--step", type=int, help="[the last that a checkpoint has sampled, or 0]")
    parser.add_argument("--group", type=int, help="spell this group out, by models.full_definition")
    parser.add_argument("--html", metavar="FILE", help="also write it as a page")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--reward", default="", help="the run's FILE.py:function, if it had one")
    options = parser.parse_args(argv)

    # The group of this one process is left again before anything is printed.
    with one_process("an audit"):
        try:
            report = audited(
                options.run, options.step, options.group, options.task, options.reward
            )
        except ValueError as error:
            raise ValueError(f"{options.run} cannot be audited: {error}") from error

    # What was found is said in full whatever the verdict is; the verdict is the exit status.
    print_report(report)
    if options.html:
        Path(options.html).write_text(page_of(report))
    return 0 if report.wrong is None else 1


# L. The audit as a page -----------------------------------------------------------------------
# `train_grpo.py audit RUN --html FILE`: one file of HTML, which loads nothing and runs no script.
# For whoever shows a step to others; everybody else can skip it.

# A token is a link whose numbers stand behind it, hidden until it is pointed at (:hover) or named
# in the page's address (:target). No script is needed for that.
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1.5em;
       color: #1c1f23; background: #fff }
h1 { font-size: 1.4em; margin-bottom: .2em } h2 { font-size: 1.1em; margin-top: 2em }
p { margin: .3em 0 } .ok { color: #1a7f37 } .outside { color: #cf222e; font-weight: bold }
table.metrics { border-collapse: collapse; font: 13px/1.5 ui-monospace, monospace }
table.metrics td, table.metrics th { padding: 0 1.2em 0 0; text-align: right; font-weight: normal }
table.metrics td:first-child { text-align: left } table.metrics th { color: #6e7781 }
table.tree { border-spacing: 3px 5px; font: 14px ui-monospace, monospace; margin-bottom: 12em }
table.tree th { text-align: left; font: 13px system-ui, sans-serif; color: #6e7781;
                padding-right: 1em; white-space: nowrap }
table.tree td { position: relative; padding: 0 }
.token { display: block; padding: .15em .45em; border-radius: 4px; text-align: center;
         white-space: pre; color: inherit; text-decoration: none; min-width: 1em }
.given { color: #8c959f; font-style: italic } .shared { opacity: .35 }
.clips { text-decoration: underline 3px } .token:hover, .token:target { outline: 2px solid #57606a;
         opacity: 1 }
.numbers { display: none; position: absolute; left: 0; top: 1.9em; z-index: 1; padding: .7em 1em;
           background: #fff; border: 1px solid #57606a; border-radius: 6px; white-space: pre;
           font: 13px/1.5 ui-monospace, monospace; box-shadow: 0 4px 14px #0003 }
.token:hover + .numbers, .token:target + .numbers { display: block }
.token:hover + .numbers { z-index: 2 }
"""


def page_of(report) -> str:
    """The report as one page of HTML."""
    # What a task or a directory's name says is text, and not markup.
    escaped = html.escape
    color = "ok" if report.wrong is None else "outside"
    lines = [
        "<!DOCTYPE html>", '<html lang="en"><meta charset="utf-8">',
        f"<title>{escaped(report.verdict)}</title><style>{STYLE}</style>",
        f"<h1>{escaped(report.run)}, step {report.step}</h1>",
        f'<p class="{color}">{escaped(report.verdict)}</p>',
        *(f"<p>{escaped(text)}</p>" for text in (*report.intro, report.outro)),
        '<h2>Metrics</h2><table class="metrics">',
        "<tr><th></th><th>recorded</th><th>by hand</th><th>difference</th><th>allowed</th></tr>",
    ]  # fmt: skip

    # The table as it is printed, a row for each number.
    for row in report.rows:
        verdict = '<td class="ok">ok' if row.ok else '<td class="outside">OUTSIDE'
        lines.append(
            f"<tr><td>{row.key}</td><td>{row.recorded:.12g}</td><td>{row.by_hand:.12g}</td>"
            f"<td>{row.difference:.1e}</td><td>{row.allowed:.1e}</td>{verdict}</td></tr>"
        )

    # And the tokens of one group.
    lines += ["</table>", f"<h2>Group {report.group}</h2>"]
    lines.append(
        "<p>A row is a rollout, a column a place in it. Green tokens have a positive advantage, "
        "red ones a negative one; underlined ones are clipped; grey ones were not sampled. What is "
        "pale is shared with the row above. Point at a token for its part of the loss.</p>"
    )
    lines += [f"<p>{escaped(loss_sentence(report))}</p>", *tree_of(report), "</html>"]
    return "\n".join(lines) + "\n"


def tree_of(report) -> list:
    """The rollouts of the group below each other, those that share a prefix next to each other."""
    # Sorted by their tokens, rollouts are the leaves of the tree of their prefixes from left to
    # right, as in `TokenTrie`; what a row shares with the one above is drawn pale.
    pairs = sorted(zip(report.sequences, token_rows(report)), key=lambda pair: pair[0].tokens)
    largest = max((abs(A) for s, _ in pairs for A in s.A or []), default=0.0) or 1.0
    lines = ['<table class="tree">']
    above = []
    for s, rows in pairs:
        shared = shared_prefix(above, s.tokens)
        above = s.tokens
        cells = [f"<th>rollout {s.number}, reward {s.reward:g}</th>"]
        for place, row in enumerate(rows):
            kinds = ["token"]
            shade = ""
            if place < shared:
                kinds.append("shared")
            if row["part"] is None:
                kinds.append("given")
            else:
                # Green for tokens that became likelier than they were, red for the others.
                rgb = "46, 160, 67" if row["A"] > 0 else "248, 81, 73"
                shade = f' style="background: rgba({rgb}, {0.75 * abs(row["A"]) / largest:.2f})"'
                if row["clips"]:
                    kinds.append("clips")

            # A link to itself: in the page's address it shows this token's numbers from the start.
            name = f"r{s.number}t{place}"
            numbers = "\n".join(equations(report, s, row))
            text = html.escape(row["text"])
            cells.append(
                f'<td><a class="{" ".join(kinds)}" id="{name}" href="#{name}"{shade}>{text}</a>'
                f'<div class="numbers">{html.escape(numbers)}</div></td>'
            )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return [*lines, "</table>"]


def equations(report, s, row) -> list:
    """The equations of the docstring for one token, with its numbers."""
    # Only what this run's settings leave of each equation is shown.
    c = report.config
    if row["part"] is None:
        return [f"{row['text']}: {row['why']}"]
    r = row["r"]
    A = row["A"]
    lines = [f"A = {A:.6f}    log-probs: sampler {row['smp']:.6f}, old {row['old']:.6f}, "
             f"now {row['lp']:.6f}"]  # fmt: skip
    mean = "mean of " if c.ratio == "sequence" else ""
    lines.append(f"(2) r = exp({mean}now - old) = {r:.6f}")

    # What (3) and (4) made of it. The term has its share in the loss, w l / Z; here l is shown.
    l = row["policy"] * s.Z / s.w
    factor = ""
    if c.importance_cap:
        ratio = min(math.exp(row["old"] - row["smp"]), c.importance_cap)
        factor = f", times min(exp(old - sampler), {c.importance_cap:g}) = {ratio:.6f} (4)"
    if c.objective == "cispo":
        lines.append(f"(3) l = -min(r, {c.cispo_bound:g}) A now{factor} = {l:.6f}")
    else:
        bounded = f"min(r, {c.dual_clip:g})" if c.dual_clip else "r"
        low = 1 - c.clip_low
        high = 1 + c.clip_high
        lines.append(f"(3) l = -min({bounded} A, clip(r, {low:g}, {high:g}) A){factor} = {l:.6f}"
                     + (", clipped" if row["clips"] else ""))  # fmt: skip

    # Then what is added to it, and its share in the loss of its update.
    if s.ref is not None and c.kl_in == "loss":
        lines.append(f"(5) + {c.kl_coef:g} k = {c.kl_coef:g} x {row['k']:.6f}")
    if c.entropy_coef:
        lines.append(f"(5) - {c.entropy_coef:g} H = -{c.entropy_coef:g} x {row['H']:.6f}")
    if s.v is not None:
        lines.append(f"(6) + the critic's {row['value']:.6f}")
    of = f", of {report.updates} updates" if report.updates > 1 else ""
    total = row["part"] * report.updates * s.Z / s.w
    lines.append(f"(7) w l / Z = {s.w:g} x {total:.6f} / {s.Z:g}{of}: {row['part']:.6e}")
    return lines


# M. Batches under way: --staleness ------------------------------------------------------------
# Which weights sample which batch, and how a checkpoint keeps batches that are sampled and not yet
# trained. At --staleness 0, the default, it is one call of `collect` a step: skip it.

# Batch b is sampled with the weights that max(0, b - K) steps have made, and trained in step b. So
# a step begins by sampling the batch that is trained K steps later:
#
#     K = 2      step 0           step 1       step 2       step 3
#     samples    batches 0 1 2    batch 3      batch 4      batch 5
#     trains     batch 0          batch 1      batch 2      batch 3
#
# This says which numbers come out, and not who computes when: the run is a function of its seed.
# An evaluation in line s is of the weights behind step s, whatever K is.

MOST_UNDER_WAY = 64  # far more than learning bears


class Batch(NamedTuple):
    """What `collect` has found, and the policy version that it was sampled with."""

    rollouts: dict  # of this rank: group -> trajectories
    chosen: list  # groups of all ranks that are trained on
    sampled_by: int
    metrics: dict


class RolloutQueue:
    """Samples the batches of a run, each with the weights that the schedule says.

    start      the first step that will be trained
    under_way  (number, Batch) of those from `start` on that a checkpoint held
    last       the last batch that anybody will ask for; None: there is no such
    """

    def __init__(self, config, task, trainer, start=0, under_way=(), last=None):
        self.config = config
        self.task = task
        self.trainer = trainer
        self.waiting = dict(under_way)  # number -> Batch
        self.next = start + len(self.waiting)
        self.last = math.inf if last is None else last
        self.idle_since = time.perf_counter()

    def take(self, step) -> Batch:
        """The batch of a step that begins now; its metrics are the caller's. Collective."""
        while self.next <= min(step + self.config.staleness, self.last):
            self.waiting[self.next] = self.sample(self.next)
            self.next += 1
        return self.waiting.pop(step)

    def sample(self, number) -> Batch:
        """A batch by the weights that the generator has now."""
        # On ranks that train too, sampling has stood still since it or an evaluation last ended.
        seconds = {"seconds/wait_train": time.perf_counter() - self.idle_since}
        with timed(seconds, "rollout"):
            generator = self.trainer.generator
            rollouts, chosen, metrics = collect(self.config, self.task, generator, number)
        self.idle_since = time.perf_counter()

        # All rollouts of a batch are by the same weights, so the mean age is the largest one.
        age = min(number, self.config.staleness)
        metrics |= {"policy/age_mean": float(age), "policy/age_max": age} | seconds
        return Batch(rollouts, chosen, self.trainer.policy_version, metrics)

    def evaluate(self):
        """`evaluate` of the weights behind the step that has just been done."""
        found = evaluate(self.config, self.task, self.trainer.generator)
        self.idle_since = time.perf_counter()
        return found

    def stored(self) -> list:
        """The batches under way as JSON values, for a checkpoint; on rank 0 alone. Collective."""
        # COMM: how many wait is a function of the step, so every rank comes to each gather.
        # Pinned by tests/test_staleness.py::test_ranks_and_a_resume_make_the_run_of_one_process.
        found = []
        for number in sorted(self.waiting):
            batch = self.waiting[number]
            parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(batch.rollouts, parts)
            groups = {}
            for part in parts or []:
                groups |= part
            found.append(
                {
                    "batch": number, "sampled_by": batch.sampled_by, "chosen": batch.chosen,
                    "metrics": batch.metrics, "groups": groups_as_json(groups),
                }
            )  # fmt: skip
        return found


def groups_as_json(groups) -> list:
    """[group, its rollouts] of each group; a rollout is what `trajectory_of` makes one of."""
    # JSON's floats are read as they were written, bit for bit.
    found = []
    for group in sorted(groups):
        rows = []
        for t in groups[group]:
            row = (
                list(map(int, t.tokens)), t.mask.astype(int).tolist(), t.sampler_logprobs.tolist(),
                float(t.reward), bool(t.truncated), t.path, t.turn_rewards,
            )  # fmt: skip
            rows.append(row)
        found.append([group, rows])
    return found


def batches_under_way(config, trainer, path, state) -> list:
    """(number, Batch) of the batches that the checkpoint `path` holds; this rank has its groups.

    state: the JSON of the checkpoint. ValueError for anything but the batches that belong there.
    """
    # Behind step s > 0 the batches s .. s + K - 1 are under way, whatever --steps was.
    step = state["step"]
    expected = list(range(step, step + config.staleness)) if step else []
    found = []
    try:
        # A checkpoint of another staleness, or one that somebody has edited, is named as such.
        stored = state.get("under_way", [])
        if [entry["batch"] for entry in stored] != expected:
            raise ValueError(f"not those of {expected}")
        # Each rank looks at all of it, so that all refuse alike, and keeps the groups that it would
        # have sampled: the run may go on on another number of ranks.
        for entry in stored:
            rollouts = {}
            for group, rows in entry["groups"]:
                if len(rows) != config.group:
                    raise ValueError(f"group {group} has {len(rows)} rollouts")
                made = [trajectory_of(trainer.generator, group, row) for row in rows]
                if group % dist.get_world_size() == dist.get_rank():
                    rollouts[group] = made
            numbers = {group for group, _ in entry["groups"]}
            if not numbers >= set(entry["chosen"]):
                raise ValueError("groups are missing")
            batch = Batch(rollouts, entry["chosen"], entry["sampled_by"], entry["metrics"])
            found.append((entry["batch"], batch))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__} {error}"
        raise ValueError(f"checkpoint {path}: its batches under way are none: {reason}") from error
    return found


def trajectory_of(model, group, row) -> Trajectory:
    """A rollout of `groups_as_json`; ValueError for one that the model could not train on."""
    # What stands in a file is looked at before a model, an index or a sum meets it.
    tokens, mask, logprobs, reward, truncated, path, turn_rewards = row
    if not all(type(t) is int and 0 <= t < model.config.vocab_size for t in tokens):
        raise ValueError(f"group {group} has tokens that the model has not")
    mask = np.array(mask, dtype=bool)
    logprobs = np.array(logprobs, dtype=np.float64)
    if mask.shape != (len(tokens) - 1,) or logprobs.shape != mask.shape:
        raise ValueError(f"group {group} has {len(tokens)} tokens and {logprobs.shape} log-probs")
    path = [tuple(fork) for fork in path]
    turn_rewards = [tuple(pair) for pair in turn_rewards]
    return Trajectory(group, tokens, mask, logprobs, reward, truncated, path, turn_rewards)


# N. Generators on ranks of their own: --plan A+B ----------------------------------------------
# The first ranks of a run generate, by plan A, and the others train, by plan B, both at the same
# time. They make the run of appendix M. Who gives all ranks one plan can skip it.

# The trainer has the loop, the log and the checkpoints. Behind each push it gives the generators an
# order, which batches to sample with these weights and whether to evaluate them; they send answers.
#
#     trainer    push 0            train batch 0    push 1      train batch 1    push 2   ..
#     generator          batches 0 1                      batch 2     evaluation       batch 3
#
# (K = 1, an evaluation behind each step.) Batches and evaluations go through torchrun's store as
# JSON, a key for each group of answers; weights by broadcast. See "Two sides" in parallel.py.


def apart(config) -> bool:
    """Whether the generators have ranks of their own."""
    return "+" in config.plan


@contextlib.contextmanager
def joined(config):
    """Join the other ranks: yields this rank's device and, of a run with A+B, its Side."""
    how = dict(timeout=config.timeout, threads=config.threads)
    if not apart(config):
        yield connect(config.device, **how), None
        return

    # The two plans say how many ranks each side has. An error on one side ends the other.
    generator, trainer = plans_of(config)
    sizes = {parallel.GENERATOR: generator.world, parallel.TRAINER: trainer.world}
    side = parallel.connect_side(config.device, sizes, **how)
    with side.leaving_word():
        yield side.device, side
        side.finish()


class ApartTrainer(Trainer):
    """A Trainer whose generator is on other ranks: a push is an order to them.

    generator: on the meta device, for its names, shapes and dtype.
    """

    def __init__(self, side, config, model, *, generator, reference=None):
        super().__init__(config, model, reference=reference)
        self.generator = generator
        self.side = side
        self.sender = parallel.WeightSender(side, self.model, self.optimizer, generator)
        self.queue = None  # the ApartQueue of the run

    def push_weights(self) -> int:
        """Send the weights, one tensor at a time, in the generator's dtype; the version."""
        self.sender.send(self.queue.next_order())
        return self.policy_version

    def dismiss(self, code, out, export):
        """The last order: the run is over. export: whether the generator writes OUT/hf."""
        self.sender.send({"code": code, "out": out, "export": export}, weights=False)


class ApartQueue(RolloutQueue):
    """`RolloutQueue` on the trainer's ranks: orders batches, and waits for them."""

    def __init__(self, config, task, trainer, start=0, under_way=()):
        super().__init__(config, task, trainer, start, under_way)
        self.side = trainer.side
        self.pushes = start  # steps whose weights were pushed before
        self.start = start
        self.trained = start  # batches that were taken
        trainer.queue = self

    def next_order(self) -> dict:
        """What the generators do with the weights that are sent now."""
        # The same batches that `RolloutQueue.take` samples in the step that follows.
        step = self.pushes
        self.pushes += 1
        numbers = []
        if step < self.config.steps:
            numbers = list(range(self.next, step + self.config.staleness + 1))
            self.next += len(numbers)

        # Before step 0, and where a line has an evaluation. A run that is resumed at its last step
        # has none to come, and asks for the last one again.
        due = step == 0 or step == self.config.steps
        if step > self.start:
            due = due or evaluates(self.config, step - 1)
        version = self.trainer.policy_version
        return {"step": step, "version": version, "sample": numbers, "evaluate": due}

    def take(self, step) -> Batch:
        self.fetch(step)
        self.trained = step + 1
        return self.waiting.pop(step)

    def fetch(self, number):
        """Wait for a batch. Each rank reads the groups that are its own, as everywhere."""
        if number in self.waiting:
            return
        # The head says which groups there are. `read` waits for each of them: those of another
        # generator may come a moment later.
        side = self.side
        name = f"batch/{number}"
        head = side.read(name)
        rollouts = {}
        for group in head["groups"]:
            if group % side.sizes[side.name] == side.rank:
                rows = side.read(f"{name}/group/{group}")
                side.delete(f"{name}/group/{group}")
                model = self.trainer.generator
                rollouts[group] = [trajectory_of(model, group, row) for row in rows]
        batch = Batch(rollouts, head["chosen"], head["sampled_by"], head["metrics"])
        self.waiting[number] = batch

        # The last to have read it deletes it.
        if side.store.add(f"{name}/readers", 1) == side.sizes[side.name]:
            side.delete(name)
            side.store.delete_key(f"{name}/readers")

    def evaluate(self):
        """The evaluation comes later, see `LateLog`."""
        return None, None

    def stored(self) -> list:
        # What one process has sampled by now is on its way.
        for number in range(self.trained, self.trained + self.config.staleness):
            self.fetch(number)
        return super().stored()


class LateLog(Log):
    """A Log whose evaluations come from other ranks: a line is written when it is whole, and so are
    those behind it, in their order."""

    def __init__(self, config, out, task, trainer):
        super().__init__(config, out, task)
        self.side = trainer.side
        self.model = trainer.generator
        self.waiting = []  # (step, metrics) of lines that are not written
        self.expected = -1  # the last step count whose evaluation a line waits for
        self.solved = None

    def before(self, solved):
        """Comes with the line of step 0."""

    def step(self, step, metrics):
        if "eval/solved" in metrics:
            self.expected = step + 1
        elif step == 0:
            self.expected = 0
        self.waiting.append((step, metrics))
        self.write_whole_lines()

    def write_whole_lines(self):
        """Write every line up to the first whose evaluation has not come."""
        # A line waits for the evaluation of the weights behind its step, line 0 also for that of
        # the weights before it. They come in this order.
        while self.on and self.waiting:
            step, metrics = self.waiting[0]
            last = step + 1 if "eval/solved" in metrics else 0
            if (step == 0 or last > 0) and self.evaluated() < last:
                return
            self.waiting.pop(0)
            if step == 0:
                super().before(self.evaluation(0)[0])
            if last > 0:
                self.solved, seconds, shown = self.evaluation(last)
                late = {"eval/solved": self.solved, "seconds/eval": seconds}
                metrics = metrics | late
                super().sample(step, shown)
            super().step(step, metrics)

    def evaluated(self) -> int:
        """Of how many steps the newest evaluation is; -1 before the first."""
        found = self.side.store.check(["evaluated"])
        return int(self.side.store.get("evaluated")) if found else -1

    def evaluation(self, count):
        """(solved, seconds, a trajectory or None) of the weights that so many steps have made."""
        found = self.side.read(f"evaluation/{count}")
        self.side.delete(f"evaluation/{count}")
        shown = None
        if found["shown"]:
            ((group, (row,)),) = found["shown"]
            shown = trajectory_of(self.model, group, row)
        return found["solved"], found["seconds"], shown

    def settle(self):
        """Wait until the line of every step that is done is written. All trainer ranks come here,
        for those that have nothing to write would wait in a collective, and for too long."""
        self.side.wait(lambda: self.evaluated() >= self.expected)
        self.write_whole_lines()

    def end(self, solved):
        # A run that was resumed at its last step has no line to come.
        self.expected = self.config.steps
        self.settle()
        if self.on and self.solved is None:
            self.solved, _, _ = self.evaluation(self.config.steps)
        super().end(self.solved)


class StopOnBothSides(Stop):
    """A Stop that hears of signals that the ranks of the other side have seen."""

    def __init__(self, side):
        super().__init__()
        self.side = side
        side.stop = self

    def agreed(self, device) -> int:
        heard = self.side.signal()
        if heard and not self.number:  # it counts as this side's first one
            self._remember(heard)
        return super().agreed(device)


def build_generator(config, task, device):
    """The generator of a rank that trains nothing; its weights come with the first push."""
    shape = shape_of(config, task)
    require_room(config, task, shape.max_position_embeddings)
    generator = empty_model(config, shape, of_sampler(config)).requires_grad_(False)

    # Its plan is that of its side, and only this rank's part is ever allocated.
    plan = generator_plan(config)
    plan.require_fits(world=dist.get_world_size(), config=shape)
    if plan.tp > 1 or plan.ep > 1:
        grid = Grid.make(plan, torch.device(device).type)
        parallel.split_for_decoding(generator, plan, device_mesh=grid)
    parallel.share_or_allocate(None, generator, device)
    return generator


class Sampler(NamedTuple):
    """What `RolloutQueue` needs of a Trainer, on ranks that only generate."""

    generator: Transformer
    policy_version: int


def generate_apart(config, task, device, side) -> int:
    """The run of a rank that generates: it serves until it is dismissed. Returns the exit code."""
    # The same model, task and checks as the trainer's. The directory of the run is the trainer's.
    generator = build_generator(config, task, device)
    receiver = parallel.WeightReceiver(side, generator)
    StopOnBothSides(side)  # a signal is told to the trainer, which ends the run
    queue = RolloutQueue(config, task, Sampler(generator, 0))
    step = 0
    side.where = lambda: f"generating behind step {step}"
    side.advice = "go on with --resume, and the run's --out"
    with parallel.naming_lost_ranks(side.where, side.advice):
        order = receiver.next()
        while "code" not in order:
            # First what the trainer may be waiting for, then what only its log waits for.
            step = order["step"]
            queue.trainer = Sampler(generator, order["version"])
            for number in order["sample"]:
                send_batch(side, number, queue.sample(number))
            if order["evaluate"]:
                send_evaluation(side, step, queue)
            order = receiver.next()

        # The weights of the last push are those of the last step, so the generators write OUT/hf.
        if order["export"]:
            out = order["out"]
            log = Log(dataclasses.replace(config, tensorboard=False), out, task)
            export(config, task, generator, out, log)
    return order["code"]


def send_batch(side, number, batch):
    """Leave a batch in the store. Collective over the generators, each with its own groups."""
    # A key for each group, so that a trainer rank reads only what is its own; and the head, from
    # which it learns which groups there are.
    numbers = [None] * side.sizes[side.name]
    dist.all_gather_object(numbers, list(batch.rollouts))
    for group, rows in groups_as_json(batch.rollouts):
        side.post(f"batch/{number}/group/{group}", rows)
    if side.rank == 0:
        groups = sorted(group for part in numbers for group in part)
        head = {"groups": groups, "chosen": batch.chosen, "sampled_by": batch.sampled_by}
        side.post(f"batch/{number}", head | {"metrics": batch.metrics})


def send_evaluation(side, step, queue):
    """Evaluate the weights that `step` steps have made, and leave the figures in the store."""
    seconds = {}
    with timed(seconds, "eval"):
        solved, shown = queue.evaluate()
    if side.rank == 0:
        shown = groups_as_json({shown.group: [shown]}) if shown else None
        found = {"solved": solved, "seconds": seconds["seconds/eval"], "shown": shown}
        side.post(f"evaluation/{step}", found)
        side.store.set("evaluated", str(step))


# O. Commands: the run's directory, main -------------------------------------------------------
# Who may write where, how an error ends the process, and which command was meant. To run the file
# nothing of it has to be read.


@contextlib.contextmanager
def locked(out):
    """Hold a run's directory for as long as the run lives, so that no other run writes there.

    The lock is the kernel's, on the file OUT/lock: it ends with its process, however that ends, and
    the file stays empty.
    """
    # "a" makes the file where there is none and changes nothing in it. LOCK_NB: refuse at once if
    # another process has it, and do not wait for that process to end.
    path = Path(out) / "lock"
    with path.open("a") as file:
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{out} is in use by {holder_of(path)}: wait for it to end, or choose another --out"
            ) from error
        except (ImportError, OSError) as error:
            text = f"warning: {out} cannot be locked ({error}): let no other run write there"
            print(text, file=sys.stderr)
        yield


def holder_of(path) -> str:
    """Who has a file open: found in /proc, which shows the processes of this machine."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # processes of others, and those that have just ended
            pid = link.parts[2]
            if int(pid) != os.getpid() and link.readlink() == path.resolve():
                command = (link.parents[1] / "cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {pid} ({command.decode(errors='replace').strip()[:80]})"
    return "another process, perhaps on another machine"


def refuse_directory(config, out):
    """ValueError if this run may not have the directory: nothing is overwritten unasked."""
    config_json = out / "config.json"  # Hugging Face checkpoints have one too
    holds_run = config_json.exists() and '"advantage"' in config_json.read_text()
    if holds_run and not (config.resume or config.overwrite):
        raise ValueError(f"{out} holds a run: --resume to go on with it, --overwrite to delete it")
    # A start that was killed, or that is being made beside this one, has left no more than these.
    begun = {"config.tmp", "lock"}
    if not holds_run and out.exists() and any(p.name not in begun for p in out.iterdir()):
        raise ValueError(f"{out} holds files that are no run; choose another --out")
    if config.resume and not holds_run:
        raise ValueError(f"--resume: {out} holds no run")


def first_free_directory(config):
    """Make the first of runs/TASK-0, runs/TASK-1, .. that nobody has made yet."""
    name = config.task if config.task in TASKS else config.task.rpartition(":")[2]
    for n in range(10**6):
        out = Path("runs") / f"{name}-{n}"
        # Making it is the claim: of two runs that start in one instant, one gets this error.
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out


def note_data(config, out):
    """Write down what the data files hold; on --resume ValueError where that is something else."""
    # A step draws lines by their number. With other lines a resumed run would go on as if nothing
    # had happened, and neither be the run that began nor one that anybody could repeat.
    sums = {}
    for name in ("data", "demo_data"):
        if config.task == "jsonl" and getattr(config, name):
            sums[name] = zlib.crc32(Path(getattr(config, name)).read_bytes())
    path = out / "data.json"
    if config.resume and path.exists():
        begun = models.read_json(path)
        for name, checksum in sums.items():
            if begun.get(name, checksum) != checksum:
                raise ValueError(
                    f"{getattr(config, name)} ({_flag(name)}) is not what it was when {out} began: "
                    f"put the old lines back, or start a new run"
                )
    elif sums:
        path.write_text(json.dumps(sums) + "\n")


def prepare_out(config, stack) -> str:
    """Rank 0: choose, lock and fill the run's directory, or say why not.

    stack: an ExitStack, which keeps the lock until it is closed.
    """
    # A directory is looked at twice: once before the lock's file is written into it, which a
    # stranger's directory must not get, and once behind the lock, since only then nobody else can
    # change what was seen.
    out = Path(config.out or "runs")
    with writing(out, "start again; or choose another --out"):
        if not config.out:
            out = first_free_directory(config)
        elif not (out / "lock").exists():
            refuse_directory(config, out)
            out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(out))
        refuse_directory(config, out)

        # Only what a run writes is deleted, by name: notes that somebody has put there stay.
        if config.overwrite:
            number = "[0-9]" * 8
            names = ["metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "demos.jsonl"]
            names += ["data.json", "curve.png", "events.out.*", "reference", "reference.tmp"]
            names += ["hf", "hf.tmp"]
            names += [f"step-{number}", f"step-{number}.tmp"]
            names += [f"demos-{number}", f"demos-{number}.tmp", "config.json"]
            for path in (path for name in names for path in out.glob(name)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        note_data(config, out)

        # The settings last, and whole or not at all: a directory that has them is a run's.
        stored = dataclasses.asdict(config)
        stored |= {"resume": False, "resume_or_start": False, "overwrite": False, "out": str(out)}
        partial = out / "config.tmp"
        partial.write_text(json.dumps(stored, indent=2) + "\n")
        partial.replace(out / "config.json")
    return str(out)


def _measuring_file(name="measure_grpo"):
    """tests/measure_grpo.py: check, the matrix of plans, trees and families; and bench."""
    sys.path.append(str(Path(__file__).resolve().parent / "tests"))
    if not importlib.util.find_spec(name):
        raise ImportError(f"check and bench need tests/{name}.py in this file's folder")
    return __import__(name)


def main(argv) -> int:
    """0: done, target met or not. 1: an audit that disagrees. 2: an error, named on stderr.
    130, 143: saved after Ctrl-C, SIGTERM.

    argv: flags of a run, or first a command, which has a function of its own and flags of its own.
    """
    try:
        # Commands read a run, or measure. They are one process, and none of them trains.
        if argv[:1] == ["plot"] and len(argv) > 1:
            return plot(argv[1:]) or 0
        commands = dict(audit=audit, eval=evaluation, chat=chat, export=export_command)
        if argv and argv[0] in commands:
            return models.quietly(commands[argv[0]], argv[1:])
        if argv[:2] == ["check", "--device"]:
            return _measuring_file("measure_gpu").check("train_grpo", argv[1:])
        if argv in (["check"], ["check", "--all"]) or argv[:1] == ["bench"]:
            return _measuring_file().main(argv)

        # A run. The settings are checked before a rank waits for another, and at the end all ranks
        # wait for each other, so that none tears down what another still needs.
        config = parse_config(argv).check()
        with joined(config) as (device, side):
            code = train(config, device, side)
            with parallel.naming_lost_ranks(lambda: "finished", "what the run saved is whole"):
                dist.barrier()
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        if isinstance(error, TaskError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"rank {os.environ.get('RANK', 0)}: error: {error}", file=sys.stderr, flush=True)
        return leave(2)  # a clean teardown would wait for ranks that may be gone or stuck
    except KeyboardInterrupt:  # from here on Stop has it: a Ctrl-C before the first step
        print("interrupted, with nothing to save", file=sys.stderr, flush=True)
        return leave(128 + signal.SIGINT)
    dist.destroy_process_group()
    return leave(code)


def leave(code) -> int:
    """The exit code; among several ranks the process ends here, without Python's teardown.

    gloo's threads now and then abort the interpreter's own teardown.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

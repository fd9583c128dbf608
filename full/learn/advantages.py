"""Compute how much better than others a rollout was, (1), or a token by a critic or a teacher.

  (1)  A_i = R_i - mean R of the group    `group_mean` (Dr.GRPO); the next three scale it
           / (std R of the group + 1e-4)  `group_std` (GRPO)
           / (std R of the step + 1e-4)   `batch_std` (LitePPO)
           * G / (G - 1)                  `leave_one_out` (RLOO)
       A_i = R_i                          `none` (REINFORCE), or `none_batch` (REINFORCE++):
             (R_i - mean R) / (std R + 1e-8) over the step's sampled tokens
       A_t = sum_n lambda^n (u_(t+n) + v_(t+n+1) - v_(t+n))    `gae` (PPO) of discount 1, then
             (A_t - mean A) / (std A + 1e-8) over the step's sampled tokens; u the rewards, v the
             critic's values; t + 1 is the next sampled token, after any reply in between
       A_t = tch_t - smp_t                `teacher`: tch is its log-prob (distillation)
       with kl_in `reward`, sampled token t first takes kl_coef k(smp_t - ref_t) off the reward

If you know GRPO's advantage, read the tables and skip the rest.

Letters:  P groups of G rollouts each   T positions of a padded trajectory   N sampled tokens
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

import train_grpo
from full.learn.objectives import divergence
from full.ranks.joining import errors_on_all_ranks, summed

# DEVIATES: group_std uses TRL's Bessel std and 1e-4 (the paper gives neither); a truncated
# trajectory ends with value 0; `none_batch` has a biased variance (verl: unbiased). Pinned by
# tests/full/test_loss.py::test_loss_and_gradient_are_the_sources.

# Each of these takes the float64 rewards (P, G) of the P groups of a step, and the number of
# sampled tokens of each rollout. Rewards 1 0 0 1 and 0 0 0 1 of two groups:
#
#     group_mean     .5 -.5 -.5 .5    -.25 -.25 -.25 .75     Dr.GRPO
#     group_std      divided by .577  divided by .5          GRPO
#     batch_std      both divided by .518                    LitePPO
#     leave_one_out  times 4/3        times 4/3              RLOO
#     none           the rewards                             REINFORCE
#     none_batch     R - 3/8, divided by .484                REINFORCE++


def group_mean(rewards_PG, tokens_PG):
    # A group of equal rewards teaches nothing: its advantages are exactly 0.
    return np.apply_along_axis(train_grpo.advantages, -1, rewards_PG)  # (1)


def group_std(rewards_PG, tokens_PG):
    # Hard and easy prompts count the same if each group is scaled to a spread of one.
    spread_PG = rewards_PG.std(-1, ddof=1, keepdims=True)
    return group_mean(rewards_PG, tokens_PG) / (spread_PG + 1e-4)  # (1)


def batch_std(rewards_PG, tokens_PG):
    # The spread of a few rollouts is noisy. The spread of the whole step is less noisy, and keeps
    # the groups' proportions.
    return group_mean(rewards_PG, tokens_PG) / (rewards_PG.std(ddof=1) + 1e-4)  # (1)


def leave_one_out(rewards_PG, tokens_PG):
    # The same as subtracting from each reward the mean of the other G - 1 rewards.
    G = rewards_PG.shape[-1]
    return group_mean(rewards_PG, tokens_PG) * G / (G - 1)  # (1)


def none(rewards_PG, tokens_PG):
    return rewards_PG  # (1)


def none_batch(rewards_PG, tokens_PG):
    # Without a baseline the mean of the step takes its place. As in PPO, mean and spread are of
    # tokens, so a long rollout counts more.
    if np.ptp(rewards_PG) == 0:
        return np.zeros_like(rewards_PG)
    share_PG = tokens_PG / tokens_PG.mean()
    A_PG = rewards_PG - (share_PG * rewards_PG).mean()
    return A_PG / (np.sqrt((share_PG * A_PG**2).mean()) + 1e-8)  # (1)


class Advantage(NamedTuple):
    """A function that computes (1) from rewards, and which rewards it compares."""

    compute: Callable  # compute(rewards_PG, tokens_PG) returns A_PG
    compares: str = "group"  # rewards of a group | of the whole step | nothing


# To add an advantage, write its function and its name here, or in
# TOKEN_ADVANTAGES if tokens of a rollout have different ones.
ADVANTAGES = {
    "group_mean": Advantage(group_mean), "group_std": Advantage(group_std),
    "batch_std": Advantage(batch_std), "leave_one_out": Advantage(leave_one_out),
    "none": Advantage(none, compares="nothing"),
    "none_batch": Advantage(none_batch, compares="step"),
}  # fmt: skip


def advantages(rewards_PG, /, kind="group_mean", *, tokens_PG=None):
    """Return A of (1) for float64 rewards (G,) of one group, or (P, G) of the P groups of a step.

    kind: of ADVANTAGES.
    tokens_PG: sampled tokens of each rollout, for none_batch. None: equally many.
    """
    tokens_PG = np.ones_like(rewards_PG) if tokens_PG is None else tokens_PG
    return ADVANTAGES[kind].compute(rewards_PG, tokens_PG)


def kl_penalties(config, trajectory):
    """Return the KL that is subtracted from the reward at each sampled token: (T,)."""
    if not config.kl_coef or config.kl_in != "reward":
        return np.zeros(len(trajectory.mask))
    d = trajectory.sampler_logprobs - trajectory.ref_logprobs
    d = torch.from_numpy(np.where(trajectory.sampled, d, 0.0))
    return config.kl_coef * divergence(d, config.kl).numpy()


def overlong_penalty(config, t) -> float:
    """Return DAPO's soft punishment (eq. 13): 0, or up to 1 in the last `overlong_buffer` tokens.

    Of 16 new tokens with a buffer of 4: 0 for up to 12, 1/4 for 13, 1 for 16.
    """
    if not config.overlong_buffer:
        return 0.0
    free = config.max_new_tokens - config.overlong_buffer
    return max(0, len(t.tokens) - t.prompt - free) / config.overlong_buffer


def table_of_groups(numbers, groups, group_size, columns, cells_of, group=None):
    """Return numbers of all ranks' trajectories, (X, P, G), on every rank. Collective.

    numbers: P group numbers, of all ranks. groups: {number: trajectories} of this rank.
    columns: X, how many numbers cells_of(trajectory) returns.
    group: of `summed`.
    """
    # Each rank fills in its own groups and leaves zeros elsewhere: the sum over ranks is the whole
    # table, with the same bits on every rank.
    table_XPG = np.zeros((columns, len(numbers), group_size))
    for row, number in enumerate(numbers):
        for n, t in enumerate(groups.get(number, [])):
            table_XPG[:, row, n] = cells_of(t)
    return np.array(summed(table_XPG.tolist(), group))


def reward_advantages(config, batch) -> dict:
    """Set the advantages of a step's trajectories from their rewards, by ADVANTAGES."""
    if not batch.kept:
        return {}

    def cells_of(t):
        reward = t.reward - kl_penalties(config, t).sum() - overlong_penalty(config, t)
        return reward, t.sampled.sum()

    table = table_of_groups(batch.kept, batch.groups, config.group, 2, cells_of)
    rewards_PG, tokens_PG = table
    A_PG = advantages(rewards_PG, config.advantage, tokens_PG=tokens_PG)
    for A_G, number in zip(A_PG, batch.kept):
        for A, t in zip(A_G, batch.groups.get(number, [])):
            t.advantages = np.full(len(t.mask), A)
    return {}


def require_positions(config, trajectories, positions):
    """Raise ValueError on all ranks if a rollout is longer than what the teacher can read."""
    longest = max((len(t.tokens) for t in trajectories), default=0)
    with errors_on_all_ranks():
        if longest > positions:
            raise ValueError(f"a rollout of {longest} tokens exceeds the {positions} positions of "
                             f"the teacher {config.teacher}")  # fmt: skip


def teacher_advantages(config, trajectories, logprobs) -> dict:
    """Set each token's advantage to the gain of its log-prob: on-policy distillation."""
    # A token that the teacher gives a higher log-prob than the sampler did should become likelier.
    # The mean of A is -KL(sampler, teacher).
    for t, teacher in zip(trajectories, logprobs):
        t.advantages = np.where(t.sampled, teacher - t.sampler_logprobs, 0.0)  # (1)
    return {}


def gae(rewards, values, mask, /, lam):
    """Return (1) `gae` of one trajectory: advantages and returns (T,), 0 off the mask.

    rewards, values: (T,). Only sampled tokens, where mask is on, are actions and follow each
    other; the task's replies are part of the environment.
    """
    # A turn's reward may be at a token of the task: it counts for the sampled token before it.
    #
    #     target     0    1    2    3    4        lam = 1 and all values 0
    #     sampled    yes  yes  -    -    yes
    #     reward     0    0    0    2    1        the 2 counts for target 1
    #     advantage  3    3    0    0    1
    advantages, returns = np.zeros((2, len(mask)))

    # From the last token to the first: (1) needs the next sampled token's value and advantage.
    next_value = 0.0
    next_advantage = 0.0
    pending = 0.0  # rewards after the next sampled token
    for t in reversed(range(len(mask))):
        pending += rewards[t]
        if mask[t]:
            # delta is the TD error of this action. The sum over n in (1) is a recursion.
            delta = pending + next_value - values[t]
            advantages[t] = delta + lam * next_advantage  # (1)
            returns[t] = advantages[t] + values[t]  # g of (6): the critic's target
            next_value = values[t]
            next_advantage = advantages[t]
            pending = 0.0
    return advantages, returns


def mean_and_spread(x_N) -> tuple:
    """Return the mean and the standard deviation of all ranks' numbers. Collective."""
    # NUMERICS: the mean is known before the first square is taken: a difference of two large sums
    # would leave rounding where all numbers are nearly the same. The second sum has what rounding
    # took from the first mean, so equal numbers have exactly their mean, and the spread 0. Pinned
    # by tests/full/test_loss.py::test_advantages_are_whitened_over_the_step.
    count, total = summed([len(x_N), x_N.sum()])
    count = max(1.0, count)
    mean = total / count
    rest, squares = summed([(x_N - mean).sum(), ((x_N - mean) ** 2).sum()])
    rest /= count
    return mean + rest, math.sqrt(max(0.0, squares / count - rest**2))


def at_tokens(trajectories, name):
    """Return a column of this rank's trajectories at the tokens of their masks, (N,)."""
    return np.concatenate([np.zeros(0), *(getattr(t, name)[t.mask] for t in trajectories)])


def critic_advantages(config, trajectories, values) -> dict:
    """Set all trajectories' whitened advantages (1) `gae` and returns g. Return metrics."""
    for t, t.values in zip(trajectories, values):
        rewards = -kl_penalties(config, t)
        for at, reward in t.turn_rewards:
            rewards[at] += reward
        rewards[-1] -= overlong_penalty(config, t)
        t.advantages, t.returns = gae(rewards, t.values, t.mask, config.gae_lambda)

    # The mean and spread are of all ranks' tokens, so that they do not depend on the cut of the
    # batch. 1e-8 only keeps a step without any spread finite.
    A, spread = mean_and_spread(at_tokens(trajectories, "advantages"))
    for t in trajectories:
        t.advantages = np.where(t.mask, (t.advantages - A) / (spread + 1e-8), 0.0)  # (1)

    # g - v is A before whitening, so the variance that is left is spread^2.
    _, g_spread = mean_and_spread(at_tokens(trajectories, "returns"))
    v, _ = mean_and_spread(at_tokens(trajectories, "values"))
    explained = 1 - (spread / g_spread) ** 2 if g_spread**2 > 1e-12 else 0.0
    return {"value/token_mean": v, "value/explained_variance": explained}


def advantage_metrics(trajectories) -> dict:
    """Return mean and standard deviation of all ranks' advantages. Collective."""
    mean, spread = mean_and_spread(at_tokens(trajectories, "advantages"))
    return {"advantage/token_mean": mean, "advantage/token_std": spread}


class TokenAdvantage(NamedTuple):
    """A collective function that sets advantages of single tokens, and which rewards it compares.

    assign: assign(config, trajectories, scores) returns metrics. scores: of the trainer's critic or
        teacher, for the sampled tokens of this rank's trajectories.
    """

    assign: Callable
    compares: str


TOKEN_ADVANTAGES = {
    "gae": TokenAdvantage(critic_advantages, compares="step"),
    "teacher": TokenAdvantage(teacher_advantages, compares="nothing"),
}


def compared_by(kind) -> str:
    """Return which rewards an advantage compares: group, step or nothing."""
    return (ADVANTAGES | TOKEN_ADVANTAGES)[kind].compares

"""Compute the loss of any objective, with a KL, an entropy bonus and importance weights.

For rollout i of a group of G with reward R_i, sampled tokens t, log-probs of softmax(logits /
temperature): lp of the policy now, old of the policy before this step's first update, ref of the
frozen reference, smp of the sampler; H_t the entropy, sg: no gradient:

  (2)  d_t = lp_t - old_t   r_t = exp(d_t)   s = exp(mean of d_t over the sequence)
  (3)  l_t, an `objective`:
           reinforce  -A lp
           clip       -min(min(r, dual_clip) A, clip(r, 1 - low, 1 + high) A)
           gspo       the same of s
           cispo      -sg(min(r, cispo_bound)) A lp
           sapo       -4 f A / tau            f = sigmoid(tau (r - 1)), tau 1 if A > 0, else 1.05
           gmpo       -s A                    s of d, clipped on the side to which A moves it
           dppo       -sg(b) A lp             b = min(r, 20) where the token's probability has
                                              moved little, else 0
  (4)  l_t <- sg(x_t) l_t      x = exp(old - smp) of the token or sequence, truncated or masked
  (5)  l_t <- l_t + kl_coef k(d) - entropy_coef H_t               d = lp_t - ref_t
           k1: d (its gradient has mean 0: for the reward)   k3: exp(-d) + d - 1
  (6)  with `gae`, l_t of the critic, a model of its own, which gives v:
           value_coef max((v - g)^2, (clip(v, v_old +- 0.2) - g)^2) / 2
           g_t = v_old_t + A_t before whitening
  (7)  loss = sum_i sum_t w_i l_it / Z          over all ranks and micro-batches of the step
           token_mean     w_i = 1               Z = sampled tokens
           sequence_mean  w_i = 1 / tokens_i    Z = sequences with a sampled token
           constant       w_i = 1               Z = sequences * max_new_tokens

Pure functions. (1) is in advantages.py. An objective and an aggregation are each one entry of a
table. Arrays of N hold one number for each sampled token of a micro-batch, sequence after sequence.

Letters:  N sampled tokens   B sequences   T positions
"""

import dataclasses
import math
from typing import NamedTuple

import torch

from full.learn.metrics import measured

# DEVIATES: without `proximal` old is smp. In the first update old is the policy itself where
# rounding could clip: with `proximal` if sampler and trainer round apart, and if a step has one
# update and its weights sampled. The log-ratio of (2) is clamped to +-10 before exp. Not here:
# top-p, which biases every ratio. Pinned by
# tests/full/test_trl.py::test_loss_and_gradient_are_trls. A ratio of a sequence has one gradient
# for all its tokens (verl: each its own, which is another sum if A or x differ); a token that (4)
# masks stays in Z (verl's rejection takes it out). Pinned by
# tests/full/test_loss.py::test_loss_and_gradient_are_the_sources.


def ratio_of(d_N):
    """Return r of (2) for log-ratios d."""
    # NUMERICS: +-10 keeps a ratio finite where a policy has moved far from a stale one. Beyond, the
    # ratio is a constant, and has no gradient. Pinned by
    # tests/full/test_loss.py::test_a_log_ratio_is_clamped_to_ten_before_exp.
    return d_N.clamp(-10, 10).exp()  # (2)


# Each objective is equation (3): it returns l of each token, with a graph, and which tokens have
# lost their gradient. c: the settings of the loss. d_N: log-ratios, lp - old. A_N: advantages.
# lp_N: log-probs now. mean_of_sequence(x_N): gives each token the mean of x over its sequence. A
# paper's constants are default arguments of its function.


def reinforce(c, d_N, A_N, lp_N, mean_of_sequence):
    """Return the policy gradient's l, which does not use a ratio."""
    return -A_N * lp_N, torch.zeros_like(lp_N, dtype=torch.bool)  # (3)


def clip(c, d_N, A_N, lp_N, mean_of_sequence):
    """Return PPO's l: the worse of the gain r A and the gain at the clipped ratio."""
    # For A < 0 the minimum has no lower end: a large ratio gives a huge loss. Dual clip bounds the
    # ratio there. For A > 0 the second gain is the smaller one anyway.
    r_N = ratio_of(d_N)
    bounded_N = r_N.clamp(max=c.dual_clip or math.inf)
    gain_N = bounded_N * A_N
    clipped_gain_N = r_N.clamp(1 - c.clip_low, 1 + c.clip_high) * A_N
    clipped_N = (clipped_gain_N < gain_N) | (r_N > bounded_N) | (d_N.abs() > 10)
    return -torch.minimum(gain_N, clipped_gain_N), clipped_N  # (3)


def gspo(c, d_N, A_N, lp_N, mean_of_sequence):
    """Return GSPO's l: PPO's, of one ratio for a whole sequence."""
    # The geometric mean of the tokens' ratios. A reward is for a sequence, and a product over
    # hundreds of tokens would be too noisy to use.
    return clip(c, mean_of_sequence(d_N), A_N, lp_N, mean_of_sequence)  # (3)


def cispo(c, d_N, A_N, lp_N, mean_of_sequence, low=0.0):
    """Return CISPO's l: a token past the bound still learns, where PPO drops its gradient."""
    r_N = ratio_of(d_N.detach())
    weight_N = r_N.clamp(low, c.cispo_bound)
    return -weight_N * A_N * lp_N, weight_N != r_N  # (3)


def sapo(c, d_N, A_N, lp_N, mean_of_sequence, up=1.0, down=1.05):
    """Return SAPO's l: a soft clip, with tau `up` where A > 0 and `down` elsewhere."""
    # The weight of a token is 1 at r = 1, and falls smoothly on both sides.
    tau_N = torch.where(A_N > 0, lp_N.new_tensor(up), down)
    gate_N = torch.sigmoid(tau_N * (ratio_of(d_N) - 1))
    return -4 / tau_N * gate_N * A_N, torch.zeros_like(lp_N, dtype=torch.bool)  # (3)


def gmpo(c, d_N, A_N, lp_N, mean_of_sequence):
    """Return GMPO's l: GSPO's mean, of log-ratios that are each clipped first."""
    # Only the side to which A leads a log-ratio is clipped. A clipped one is a constant.
    near_N = torch.where(A_N > 0, d_N.clamp(max=c.clip_high), d_N.clamp(min=-c.clip_low))
    return -ratio_of(mean_of_sequence(near_N)) * A_N, near_N != d_N  # (3)


def dppo(c, d_N, A_N, lp_N, mean_of_sequence, cap=20.0):
    """Return DPPO's l: a token learns until its probability has moved too far towards A."""
    # A ratio of 2 is a large move at p = .4, and a tiny one at p = 1e-6: so the trust region bounds
    # probabilities. Only a move in the direction of A ends a token's learning.
    d_N = d_N.detach()
    now_N = lp_N.detach()
    moved_N = now_N.exp() - (now_N - d_N).exp()
    bound_N = torch.where(A_N > 0, lp_N.new_tensor(c.clip_high), c.clip_low)
    clipped_N = (moved_N.abs() > bound_N) & ((moved_N > 0) == (A_N > 0))
    weight_N = ratio_of(d_N).clamp(max=cap) * ~clipped_N
    return -weight_N * A_N * lp_N, clipped_N  # (3)


# To add an objective, write its function and its name here.
OBJECTIVES = {
    "reinforce": reinforce, "clip": clip, "cispo": cispo, "gspo": gspo, "sapo": sapo, "gmpo": gmpo,
    "dppo": dppo,
}  # fmt: skip


# Which of these settings each objective reads. A run refuses the others, because it would ignore
# them. An objective that is not listed may read them all.
OF_OBJECTIVES = "clip_low", "clip_high", "dual_clip", "cispo_bound"
READS = {
    "reinforce": (), "clip": ("clip_low", "clip_high", "dual_clip"), "cispo": ("cispo_bound",),
    "gspo": ("clip_low", "clip_high", "dual_clip"), "sapo": (), "gmpo": ("clip_low", "clip_high"),
    "dppo": ("clip_low", "clip_high"),
}  # fmt: skip


# Aggregations are w and Z of (7). Of sequences with count_B sampled tokens, each returns the weight
# of a token of each sequence, and each sequence's term of Z. Two sequences, one of one token with
# loss a and one of three with losses b, c, d, sum to
#
#     token_mean     (a + b + c + d) / 4
#     sequence_mean  (a + (b + c + d) / 3) / 2             a token of a long answer weighs less
#     constant       (a + b + c + d) / (2 max_new_tokens)  Z does not depend on what was sampled


def token_mean(count_B, max_new_tokens):
    return torch.ones_like(count_B), count_B


def sequence_mean(count_B, max_new_tokens):
    # A sequence without a sampled token has no token to weigh; 1 keeps its weight finite.
    return 1 / count_B.clamp(min=1), (count_B > 0).to(count_B)


def constant(count_B, max_new_tokens):
    return torch.ones_like(count_B), torch.full_like(count_B, max_new_tokens)


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "constant": constant}


def loss_denominator(masks, /, *, aggregation, max_new_tokens) -> float:
    """Return these sequences' term of Z of (7), from their masks of sampled tokens.

    The sum over all ranks is Z, the trainer's num_global_valid_tokens. A sequence without a sampled
    token, such as a filtered one, counts under `constant` only.
    """
    count_B = torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.float64)
    _, term_B = AGGREGATIONS[aggregation](count_B, max_new_tokens)
    return term_B.sum().item()


def divergence(d, /, kind):
    """Return k of (5), an estimate of KL(p, reference) from d = log p - log reference.

    d is taken at tokens drawn from p. The KL is the mean of both kinds (Schulman 2020). k3 is never
    negative, and has less noise than k1 while p is near the reference.
    """
    return d if kind == "k1" else torch.exp(-d) + d - 1


class SampledTokens:
    """The sampled tokens of padded rows, in order: token n is of sequence row_N[n]."""

    def __init__(self, mask_BT, dtype):
        # NUMERICS: in float32 at least, since gspo sums over a sequence. Pinned by
        # tests/full/test_conformance.py::test_a_right_loss_passes_all.
        self.mask_BT = torch.atleast_2d(mask_BT)
        self.row_N, self.column_N = self.mask_BT.nonzero(as_tuple=True)
        self.count_B = self.mask_BT.sum(-1).double()
        self.dtype = torch.promote_types(dtype, torch.float32)

    def pick(self, x_BT, default=None):
        """Return x (N,) for anything that broadcasts to the rows; `default` for None."""
        if x_BT is None:
            return default
        B = len(self.mask_BT)
        if x_BT.dim() == 1 and B > 1:  # of B rows of B tokens it would fit the tokens
            raise ValueError(f"expected a number for each of {B} sequences as ({B}, 1), got "
                             f"{tuple(x_BT.shape)}")  # fmt: skip
        return x_BT.expand(self.mask_BT.shape)[self.row_N, self.column_N].to(self.dtype)

    def sum_of_sequence(self, x_N):
        """Return for each token the sum of x over its sequence."""
        return x_N.new_zeros(len(self.mask_BT)).index_add(0, self.row_N, x_N)[self.row_N]

    def mean_of_sequence(self, x_N):
        """Return for each token the mean of x over its sequence."""
        return self.sum_of_sequence(x_N) / self.count_B[self.row_N].to(x_N)


def sampler_weights(c, log_x_N, tokens):
    """Return x of (4) for each token: p_old / p_sampler within its bounds. log_x_N: old - sampler.

    c.importance: what happens to an x outside importance_low .. importance_cap. `truncate` moves it
        to the bound, and `mask` makes it 0. With bounds 0.5 and 2 a 3 becomes 2, or 0.
    c.importance_of: `token`: each token has its own x. `sequence`: the product of the x of all
        tokens of its sequence. `geometric`: their geometric mean.
    """
    # The sampler drew the tokens, but (2) measures from `old`, the same policy by the trainer's
    # program and dtype. So x corrects for tokens drawn more or less often than `old` predicts.
    # Under the sampler the mean of x is 1, but its tail is long, hence the bounds.
    if c.importance_of == "sequence":
        log_x_N = tokens.sum_of_sequence(log_x_N)
    if c.importance_of == "geometric":
        log_x_N = tokens.mean_of_sequence(log_x_N)
    x_N = log_x_N.exp()
    near_N = x_N.clamp(c.importance_low, c.importance_cap)
    return near_N if c.importance == "truncate" else torch.where(near_N == x_N, x_N, 0.0)


VALUE_CLIP = 0.2  # of (6), as in PPO: a value that moved this far to its return stops learning


def critic_loss(value_BT, old_BT, return_BT, mask_BT, /, *, Z, aggregation, value_coef):
    """Return the loss of a critic, (6) and (7), and its sum over sampled tokens.

    value_BT       the critic's values now, with a graph
    old_BT         its values before the step's first update; return_BT: g
    mask_BT, Z, aggregation: as in `grpo_loss`
    """
    tokens = SampledTokens(mask_BT, value_BT.dtype)
    value_N, old_N, return_N = map(tokens.pick, (value_BT, old_BT, return_BT))
    near_N = old_N + (value_N - old_N).clamp(-VALUE_CLIP, VALUE_CLIP)
    error_N = torch.maximum((value_N - return_N).square(), (near_N - return_N).square()) / 2
    critic_N = value_coef * error_N  # (6)
    w_B, _ = AGGREGATIONS[aggregation](tokens.count_B, 0)
    loss = (w_B[tokens.row_N].to(critic_N) * critic_N).sum() / Z  # (7)
    return loss, {"value/loss": critic_N.detach().double().sum()}


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The settings that `grpo_loss` reads. The `Config` of a run has all of them, too."""

    aggregation: str = "token_mean"  # of AGGREGATIONS: w and Z of (7)
    max_new_tokens: int = 16  # for the Z of `constant`
    objective: str = "clip"  # of OBJECTIVES, which read the next four settings
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    cispo_bound: float = 5.0
    importance: str = "truncate"  # with the next three: (4), see `sampler_weights`
    importance_of: str = "token"
    importance_low: float = 0.0
    importance_cap: float = 0.0  # 0: no (4)
    kl: str = "k3"  # which k of (5)
    kl_coef: float = 0.0
    kl_in: str = "loss"  # "reward": the KL is measured here, and adds nothing
    entropy_coef: float = 0.0


class OtherScores(NamedTuple):
    """Scores of the sampled tokens, (B, T), besides the policy's log-probs now and before."""

    sampler_BT: torch.Tensor | None = None  # of the program that sampled the tokens; None: old
    ref_BT: torch.Tensor | None = None  # of the frozen reference; None: no KL
    entropy_BT: torch.Tensor | None = None  # H of (5), with a graph


@dataclasses.dataclass
class TokenTerms:
    """The terms of the loss at the N sampled tokens, for METRICS. None: a term it does not have."""

    lp_N: torch.Tensor
    old_N: torch.Tensor
    smp_N: torch.Tensor
    ref_N: torch.Tensor | None
    A_N: torch.Tensor
    gap_N: torch.Tensor  # lp - smp: rounding, if the weights are equal
    ratio_N: torch.Tensor  # (2)
    clipped_N: torch.Tensor  # bool: (3) has no gradient
    x_N: torch.Tensor | None  # (4)
    kl_N: torch.Tensor | None  # k of (5)
    entropy_N: torch.Tensor | None  # H of (5)
    policy_part_N: torch.Tensor  # the term of (7) without (5)
    part_N: torch.Tensor  # the term of (7)


def grpo_loss(
    lp_BT, old_BT, advantage_BT, mask_BT, /, settings=LossSettings(), others=OtherScores(), *,
    Z=None,
):  # fmt: skip
    """Return the policy's loss, (2)-(5) and (7), and a dict of detached sums over sampled tokens.

    lp_BT            log-probs of the policy now, with a graph: (B, T), or (T,) for one sequence
    old_BT           log-probs before the step's first update; None: lp, so that every ratio is 1
    advantage_BT     A of (1), of a shape that broadcasts: (B, 1) for a number of each sequence
    mask_BT          bool: which tokens the policy sampled. Others may hold anything, even NaN
    settings         LossSettings, or the Config of a run
    others           OtherScores. Without its scores a term is not in the loss
    Z                of (7), of all sequences of one optimizer step; None: of these sequences

    The sums have the names of METRICS. `loss_metrics` makes a step's metrics of them.
    """
    c = settings
    tokens = SampledTokens(mask_BT, lp_BT.dtype)
    lp_N, A_N = tokens.pick(lp_BT), tokens.pick(advantage_BT)
    old_N = tokens.pick(old_BT, lp_N.detach())
    smp_N = tokens.pick(others.sampler_BT, old_N)
    ref_N, entropy_N = tokens.pick(others.ref_BT), tokens.pick(others.entropy_BT)
    kl_N = None if ref_N is None else divergence(lp_N - ref_N, c.kl)

    # The policy's term.
    d_N = lp_N - old_N
    mean = tokens.mean_of_sequence
    ratio_N = ratio_of(mean(d_N) if c.objective == "gspo" else d_N)  # (2)
    l_N, clipped_N = OBJECTIVES[c.objective](c, d_N, A_N, lp_N, mean)  # (3)
    if not l_N.shape == clipped_N.shape == d_N.shape:  # another shape may broadcast
        raise ValueError(f"objective {c.objective}: expected (l_N, clipped_N) of shape "
                         f"{tuple(d_N.shape)}, got {tuple(l_N.shape)}, {tuple(clipped_N.shape)}")
    x_N = None
    if c.importance_cap:
        x_N = sampler_weights(c, old_N - smp_N, tokens)
        l_N = l_N * x_N  # (4)
    policy_N = l_N

    # Closeness to the reference and randomness are wanted for their own sake, whatever the reward.
    # With kl_in `reward` the rewards were lowered by the KL, before (1).
    if kl_N is not None and c.kl_in == "loss":
        l_N = l_N + c.kl_coef * kl_N  # (5)
    if entropy_N is not None and c.entropy_coef:
        l_N = l_N - c.entropy_coef * entropy_N  # (5)

    # Z is the whole step's, never the count of this micro-batch or this rank. A mean of micro-batch
    # means weighs a token more where its micro-batch is small; a sum over one Z does not.
    w_B, term_B = AGGREGATIONS[c.aggregation](tokens.count_B, c.max_new_tokens)
    w_N = w_B[tokens.row_N].to(l_N)
    if Z is None:
        Z = term_B.sum().item() or 1.0  # without a token the loss is 0
    loss = (w_N * l_N).sum() / Z  # (7)
    return loss, measured(TokenTerms(
        lp_N=lp_N, old_N=old_N, smp_N=smp_N, ref_N=ref_N, A_N=A_N,
        gap_N=(lp_N - smp_N).detach().double(), ratio_N=ratio_N, clipped_N=clipped_N, x_N=x_N,
        kl_N=kl_N, entropy_N=entropy_N,
        policy_part_N=w_N * policy_N / Z, part_N=w_N * l_N / Z,
    ))  # fmt: skip

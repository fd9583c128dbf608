"""Do one step of a run of train_grpo.py again by hand, and compare every number with the run's.

This file is for an auditor who does not trust the trainer. It reads a run's files and shares no
arithmetic with the trainer: no batch, padding, packing, cache, tree, plan or sum over ranks. Above
the ruler is the whole of GRPO for one step, by loops over sequences and tokens. It needs torch and
numpy, and nothing else of this project. Below the ruler are settings that few runs use, the
metrics, the comparison with the run's files, and the report.

    python audit.py runs/guess-0                   # the newest step that a checkpoint has sampled
    python audit.py runs/guess-0 --step 20 --group 3 --html page.html

For token t of rollout i with reward R_i: lp, old, ref and smp are its log-probs under the policy
now, the policy before the step, the reference and the sampler. H is the entropy, v the value that
a critic predicts, g the return that it should have predicted. c holds the run's settings.

    (1)  A = (R_i - mean R) * scale       of its group
    (2)  r = exp(lp - old)                `sequence`: of the mean of lp - old over the rollout
    (3)  l = -min(r A, clip(r, 1 - low, 1 + high) A)         `cispo`: -min(r, bound) A lp
    (4)  l <- min(exp(old - smp), importance_cap) l
    (5)  l <- l + kl_coef k(lp - ref) - entropy_coef H
    (6)  l <- l + value_coef max((v - g)^2, (clip(v, v_old +- value_clip) - g)^2) / 2
    (7)  loss = sum over all sampled tokens of w l / Z
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch


# 1. A sequence by itself ----------------------------------------------------------------------
# What is known of a rollout, and the log-probs that a model gives its tokens. If you know how a
# causal language model scores a text, skip the two functions.


@dataclass
class Recorded:
    """A rollout from the run's files. Its lists have one entry for each sampled token."""

    group: int
    number: int  # in its group
    tokens: list
    at: list  # where the sampled tokens are: tokens[at + 1] is predicted from tokens[: at + 1]
    smp: list  # log-probs by the sampler, as the run recorded them
    rewards: list  # (`at` of a turn's last token, reward)
    truncated: bool
    reward: float = 0.0  # the sum of `rewards`
    prompt: int = 0  # number of tokens before the policy's first turn
    differs: int = 0  # wrong or missing tokens in what the task said
    spelled: object = None  # spelled(model, tokens) -> logits: replaces the model's own code

    # The input of `definition`. lp, H and v are of the update that trained on the rollout.
    lp: list | None = None
    old: list | None = None
    ref: list | None = None
    A: list | None = None
    H: list | None = None
    v: list | None = None
    v_old: list | None = None
    g: list | None = None
    w: float = 1.0
    Z: float = 1.0
    terms: list = field(default_factory=list)  # its output: a dict for each sampled token


def numbers_of(values):
    """Convert numbers and 0-d tensors into Python's floats, without their graph. None stays."""
    if values is None:
        return None
    return [float(x.detach()) if torch.is_tensor(x) else float(x) for x in values]


def read_alone(model, s, temperature):
    """Return the log-probs of all tokens at each sampled target, (N, V), and values or None."""
    # The state of the token before a target predicts the target.
    tokens = torch.tensor(s.tokens)
    states = model.hidden(tokens[None])[0, s.at]
    logits = model.logits(states) if s.spelled is None else s.spelled(model, tokens)[s.at]
    values = model.values(states) if model.config.value_head else None

    # Log-probs are in float32 at least, as they are in the trainer and the sampler.
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide) / temperature).log_softmax(-1), values


def score_alone(model, s, temperature):
    """Return log-prob, entropy and value of each sampled token: lists of tensors with a graph."""
    # The entropy is of the whole distribution, at the temperature of the log-probs.
    logprobs, values = read_alone(model, s, temperature)
    targets = [s.tokens[at + 1] for at in s.at]
    lp = list(logprobs[range(len(targets)), targets])
    H = list(-(logprobs.exp() * logprobs).sum(-1))
    return lp, H, None if values is None else list(values)


# 2. Advantages --------------------------------------------------------------------------------
# How much better a rollout was than its group, (1). If you know GRPO's advantage, skip this.


def group_advantages(c, group, R):
    """Set the A of a group's rollouts by (1). R holds their rewards."""
    # Truncated rollouts count in the mean: they have rewards. Equal rewards teach nothing, whatever
    # rounding makes of r - mean.
    G = len(R)
    mean = math.fsum(R) / G
    centered = [r - mean for r in R]
    if min(R) == max(R):
        centered = [0.0] * G

    # Rewards 1 0 0 0 have the mean 0.25, so A is 0.75 -0.25 -0.25 -0.25. `group_std` divides by
    # 0.5, `leave_one_out` by 3/4: the mean of the others is 0, so the first is 1 better.
    scale = 1.0
    if c.advantage == "group_std":
        scale = 1 / (math.sqrt(math.fsum(x * x for x in centered) / (G - 1)) + 1e-4)
    if c.advantage == "leave_one_out":
        scale = G / (G - 1)
    for s, x in zip(group, centered):
        s.A = [x * scale] * len(s.at)  # (1)


# 3. The loss ----------------------------------------------------------------------------------
# Equations (2) to (7), token by token. They are also what train_grpo.py's tests compare with.


def definition(sequences, Z, c):
    """Return the loss of a batch, (2) to (7), a 0-d tensor. Set the `terms` of each sequence.

    sequences: lp, H and v hold 0-d tensors, all other lists numbers. v and ref may be None.
    Z: the denominator.
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

            # The sampler may be another program, so the token may have been drawn too often.
            if c.importance_cap:
                l = min(math.exp(s.old[t] - s.smp[t]), c.importance_cap) * l  # (4)
            term = dict(r=r, clips=clips, H=s.H[t], policy=s.w * l / Z, k=0.0, value=0.0)

            # The policy is kept close to the reference, and random. A critic learns g.
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


def trained(c, rollouts) -> list:
    """Return the rollouts that have tokens in the loss: `--overlong filter` leaves some out."""
    return [s for s in rollouts if s.at and not (s.truncated and c.overlong == "filter")]


def weigh(c, batch) -> float:
    """Set w and Z of (7) in each trained rollout of an update, and return Z."""
    # In rollouts of 3 and 5 tokens each counts 1/8, or by `sequence_mean` 1/6 and 1/10. `constant`
    # divides by the room for tokens, which a filtered rollout has, too.
    sequences = trained(c, batch)
    Z = sum(len(s.at) for s in sequences)
    if c.aggregation == "sequence_mean":
        Z = len(sequences)
    if c.aggregation == "constant":
        Z = len(batch) * c.max_new_tokens
    for s in sequences:
        s.w = 1 / len(s.at) if c.aggregation == "sequence_mean" else 1.0
        s.Z = Z
    return Z


# 4. A step ------------------------------------------------------------------------------------
# The policy's weights with AdamW, and the step itself: all of the above is for `step_by_hand`.


@dataclass
class State:
    """A policy with its optimizer. A step turns the state before it into the state after it."""

    model: object
    weights: dict  # name -> what AdamW moves: a parameter, or in mixed precision its master
    moments: dict  # name -> [steps, m, v] of AdamW
    reference: object = None  # the model that the KL is measured against
    version: int = 0  # optimizer steps taken
    skipped: int = 0  # optimizer steps skipped, because a gradient was not finite

    def set_advantages(self, c, groups):
        """Set the A of all rollouts of the step. FullState adds a critic and forks."""
        for group in groups:
            group_advantages(c, group, [s.reward for s in group])

    def add_balance(self, c, batch) -> list:
        """Add the gradient of an update's other losses. FullState adds the loss of experts."""
        return []

    @torch.no_grad()
    def adamw(self, c, lr, shrink):
        """Take one AdamW step with the gradients times `shrink`, in place."""
        # Numbers are stored in the weights' precision, and computed in float32 at least.
        for name, p in self.model.named_parameters():
            weight = self.weights[name]
            wide = torch.promote_types(weight.dtype, torch.float32)
            steps, m, v = self.moments[name]
            steps += 1

            # Decaying means of the gradient and of its square. Both begin at 0, so they are divided
            # by the share that they have seen. Weight decay does not go through the gradient.
            g = shrink * p.grad.to(wide)
            m = 0.9 * m.to(wide) + 0.1 * g
            v = c.beta2 * v.to(wide) + (1 - c.beta2) * g * g
            size = (v / (1 - c.beta2**steps)).sqrt() + 1e-8
            kept = (1 - lr * c.weight_decay) * weight.to(wide)
            weight.copy_(kept - lr * m / (1 - 0.9**steps) / size)
            self.moments[name] = [steps, m.to(weight.dtype), v.to(weight.dtype)]
            if weight is not p:
                p.copy_(weight.to(getattr(torch, c.compute_dtype)))


def step_by_hand(c, groups, state, lr) -> list:
    """Do a whole step by (1) to (7), in place. Return a dict for each optimizer step.

    groups: lists of Recorded rollouts, the groups that the step trains on, in order.
    state: the State before the step, in the precision to compute in.
    lr: the learning rate.
    """
    # What has no gradient is known before the first update: the log-probs of the reference, and
    # `old`, which is the policy's own as it is now, or the sampler's. None: each update compares
    # the policy with itself, and every ratio is 1. An `old` that is set stays; see `in_precision`.
    for s in [s for group in groups for s in group]:
        with torch.no_grad():
            if state.reference is not None:
                s.ref = numbers_of(score_alone(state.reference, s, c.temperature)[0])
            if c.proximal and s.old is None:
                s.old = numbers_of(score_alone(state.model, s, c.temperature)[0])
        if (c.minibatches > 1 or c.staleness) and not c.proximal:
            s.old = s.smp
    state.set_advantages(c, groups)

    # The updates train on whole groups, in order. Five groups in two updates are 0 1 and 2 3 4.
    updates = []
    ends = [m * len(groups) // c.minibatches for m in range(c.minibatches + 1)]
    for first, last in zip(ends, ends[1:]):
        batch = [s for group in groups[first:last] for s in group]
        Z = weigh(c, batch)
        if Z == 0:
            continue

        # The gradient of a sum is the sum of the sequences' gradients, so memory holds one graph at
        # a time. Afterwards only the numbers are kept.
        parameters = list(state.model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        for s in trained(c, batch):
            s.lp, s.H, s.v = score_alone(state.model, s, c.temperature)
            if s.old is None:
                s.old = numbers_of(s.lp)
            definition([s], Z, c).backward()
            s.lp, s.H, s.v = numbers_of(s.lp), numbers_of(s.H), numbers_of(s.v)
        routed = state.add_balance(c, batch)

        # Clip the whole gradient by its norm, then AdamW. If it is not finite, it is only counted.
        gradient = torch.cat([p.grad.flatten().double() for p in parameters]).numpy()
        norm = float(np.linalg.norm(gradient))
        update = dict(batch=batch, gradient=gradient, norm=norm, routed=routed)
        updates.append(update | dict(version=state.version))
        if not math.isfinite(norm):
            state.skipped += 1
            continue
        state.adamw(c, lr, c.max_grad_norm / norm if norm > c.max_grad_norm else 1.0)
        state.version += 1
    return updates


# =============================================================================================
# The step by hand ends here. What follows measures it and compares it with a run's files.
# =============================================================================================

import argparse  # noqa: E402
import copy  # noqa: E402
import dataclasses  # noqa: E402
import html  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import NamedTuple  # noqa: E402

import models  # noqa: E402
import parallel  # noqa: E402
from train_grpo import (  # noqa: E402
    EVALUATION, ONE_PROCESS, ROLLOUT, RolloutQueue, Trainer, Trajectory, asking, build, do_step,
    draw_prompts, make_task, one_process, pending_batches, play, read_reference, resumed_config,
    rollout_line, uniforms, whole_lines,
)  # fmt: skip


# 5. Settings that few runs use ----------------------------------------------------------------
# What FullState adds to a step: KL in the reward, tree rollouts, a critic, experts. If the run has
# none of them, skip this.
#
#     (1)  A = sum over n of (gamma gae_lambda)^n delta_(t+n), whitened               `gae`
#     (1)  A = the mean reward of the rollouts that share a segment, minus the one    `per_branch`
#              of the segment before
#     (8)  balance = balance_coef * mean over sequences of E / (K N^2) sum_e counts_e sum_n p_ne
#     (11) votes_e <- votes_e + sign(mean of counts - counts_e)   the bias of router's choice
#
# Of E experts, the router chooses K for each of a sequence's N tokens; p are its probabilities.


class FullState(State):
    """A State for all settings."""

    routed = ()  # of the update in progress, a Routed for each rollout

    def set_advantages(self, c, groups):
        """Add a critic, tree rollouts, and the KL that each token loses of its reward."""
        if c.advantage == "gae":
            critic_advantages(c, self.model, trained(c, [s for group in groups for s in group]))
            return
        for group in groups:
            R = [s.reward - math.fsum(penalties(c, s)) for s in group]
            group_advantages(c, group, R)
            if c.advantage == "per_branch":
                branch_advantages(c, group, R)

    def add_balance(self, c, batch):
        """Add the gradient of (8), of all rollouts of an update; return a Routed for each."""
        self.routed = []
        if self.model.config.sparse_layers:
            self.routed = [route_alone(c, self.model, s, len(batch)) for s in batch]
        return self.routed

    @torch.no_grad()
    def adamw(self, c, lr, shrink):
        """Also move the votes of each router by (11)."""
        super().adamw(c, lr, shrink)
        if not c.router_bias_rate:
            return
        for layer, counts in sum_of_counts(self.routed).items():
            mean = sum(counts) / len(counts)
            votes = self.model.model.layers[layer].mlp.votes
            for e, count in enumerate(counts):
                # An expert with too few tokens becomes likelier to be chosen.
                if count != mean:
                    votes[e] += 1 if count < mean else -1  # (11)


def penalties(c, s) -> list:
    """Return how much of its reward each sampled token loses by `--kl-in reward`."""
    if c.kl_in != "reward" or not c.kl_coef:
        return [0.0] * len(s.at)
    ds = [smp - ref for smp, ref in zip(s.smp, s.ref)]
    k = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) + d - 1}
    return [c.kl_coef * k[c.kl](d) for d in ds]


def branch_advantages(c, group, R):
    """Set the A of a group's rollouts by (1), `per_branch`; R: their rewards."""
    # With 2 forks at each of 2 turns and rewards 1 0 0 0, the root is worth 1/4, the segment of the
    # first two rollouts 1/2, and the rest of the first 1. So its A is 0, then 1/4, then 1/2.
    for s in group:
        for n, at in enumerate(s.at):
            worth = [math.fsum(R) / len(R)]
            for turns in range(min(turns_before(s, at), c.fork_turns) + 1):
                first, share = shared_by(c, s, turns)
                worth.append(math.fsum(R[first : first + share]) / share)
            s.A[n] = worth[-1] - worth[-2]  # (1)


def turns_before(s, at) -> int:
    return len([end for end, _ in s.rewards if end < at])


def shared_by(c, s, turns):
    """Return the first rollout, and the number of rollouts, that share s after `turns` turns."""
    # With 2 forks at each of 2 turns a prompt is played for 4 rollouts until turn 1 ends, then for
    # 2 until turn 2 ends. Rollout 3 shares its second turn with rollout 2.
    share = c.forks ** max(0, c.fork_turns - turns)
    return s.number - s.number % share, share


def critic_advantages(c, model, sequences):
    """Set v_old, A and g of all sequences of a step by (1), `gae`."""
    # The definition sums over all tokens that follow; a trainer has a recursion.
    decay = c.gamma * c.gae_lambda
    raw = []
    for s in sequences:
        with torch.no_grad():
            s.v_old = numbers_of(score_alone(model, s, c.temperature)[2])

        # A turn's reward belongs to the last token that was sampled in it. After the last token
        # nothing more is expected.
        u = [-penalty for penalty in penalties(c, s)]
        for end, reward in s.rewards:
            u[max(n for n, at in enumerate(s.at) if at <= end)] += reward
        next_v = [*s.v_old[1:], 0.0]
        deltas = [u[t] + c.gamma * next_v[t] - v for t, v in enumerate(s.v_old)]
        s.A = []
        for t in range(len(deltas)):
            s.A.append(math.fsum(decay**n * delta for n, delta in enumerate(deltas[t:])))  # (1)
        s.g = [v + A for v, A in zip(s.v_old, s.A)]
        raw += s.A

    # A is whitened over all trained tokens of the step.
    mean = math.fsum(raw) / max(1, len(raw))
    spread = math.sqrt(math.fsum((A - mean) ** 2 for A in raw) / max(1, len(raw)))
    for s in sequences:
        s.A = [(A - mean) / (spread + 1e-8) for A in s.A]  # (1)


class Routed(NamedTuple):
    """How the routers routed one sequence by itself."""

    balance: float  # the sequence's part of (8)
    counts: dict  # layer -> how many of its tokens went to each expert
    margins: list  # for each layer and token, the lead of the last chosen expert over the next


def route_alone(c, model, s, sequences) -> Routed:
    """Route all tokens of a sequence, sampled or not, and add the gradient of its part of (8).

    sequences: how many sequences the update trains on.
    """
    parts = [torch.zeros(())]
    found = Routed(0.0, {}, [])

    def look(p_NE, chosen_NK, /, *, layer):
        # How many tokens chose each expert, times how likely it was to all of them.
        N, E = p_NE.shape
        K = chosen_NK.shape[1]
        counts = [chosen_NK.flatten().tolist().count(e) for e in range(E)]
        b = sum(counts[e] * p_NE[:, e].sum() for e in range(E)) * E / (K * N * N)
        parts.append(c.balance_coef * b / sequences)  # (8)
        found.counts[layer] = counts

        # Experts are chosen by p plus the bias.
        mlp = model.model.layers[layer].mlp
        biased_NE = p_NE.detach()
        if mlp.rate:
            biased_NE = biased_NE + mlp.rate * mlp.votes
        if K < E:
            best = biased_NE.sort(-1, descending=True).values
            found.margins.extend((best[:, K - 1] - best[:, K]).tolist())

    model.hidden(torch.tensor(s.tokens)[None], balance=look)
    balance = sum(parts)
    if c.balance_coef:
        balance.backward()
    return found._replace(balance=float(balance.detach()))


def sum_of_counts(routed) -> dict:
    """Return layer -> how many tokens of these sequences went to each expert."""
    total = {}
    for one in routed:
        for layer, counts in one.counts.items():
            total[layer] = [a + b for a, b in zip(counts, total.get(layer, [0] * len(counts)))]
    return total


def rate_by_hand(config, step) -> float:
    """Return the learning rate of a step: a linear rise, then `--lr-decay` to the last step."""
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


# 6. The metrics of a step ---------------------------------------------------------------------
# The numbers of a line of metrics.jsonl, from the rollouts and updates of a step by hand. Each
# metric's definition is here.

# The metrics of each update, causes before their effects.
FIRST = (
    "ratio/token_mean", "ratio/max", "ratio/clipped_fraction", "entropy/token_mean",
    "kl/token_mean", "value/loss", "loss/policy_token_mean", "loss/token_mean",
    "experts/load_max", "balance/loss", "grad_norm",
)  # fmt: skip

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


class Measured(NamedTuple):
    """A number by hand, and its parts, which say how much rounding changes it.

    terms: numbers of which the value is the sum (norm 1), the length (2) or the largest (inf).
    margins: of yes-or-no decisions that the value counts, how far each is from the other side.
    each: how much the value changes if one decision changes sides.
    """

    # Two metrics of 1000 tokens may agree by luck while their tokens do not: errors of either sign
    # cancel in a sum. The distance of two precisions is therefore taken term by term, by the norm
    # that bounds the difference of the metrics: |sum a - sum b| <= sum |a - b|.
    value: float
    terms: np.ndarray = np.zeros(0)
    norm: float = 1
    margins: np.ndarray = np.zeros(0)
    each: float = 0.0


def mean_of(values) -> Measured:
    terms = np.array(values, dtype=np.float64) / max(1, len(values))
    return Measured(math.fsum(terms), terms)


def largest_of(values) -> Measured:
    terms = np.array(values, dtype=np.float64)
    return Measured(float(abs(terms).max(initial=0.0)), terms, math.inf)


def deviation_of(values) -> Measured:
    """Measure a standard deviation: the length of all deviations over the root of their number."""
    values = np.array(values, dtype=np.float64)
    terms = values - math.fsum(values) / max(1, len(values))
    terms = terms / math.sqrt(max(1, len(values)))
    return Measured(math.sqrt(math.fsum(terms * terms)), terms, 2)


def teaches(config, group) -> bool:
    """Return whether a group is trained on: dynamic sampling drops groups of equal rewards."""
    return not config.dynamic_sampling or len({s.reward for s in group}) > 1


def metrics_by_hand(config, groups, state, step, sampled_by=None) -> dict:
    """Do a step by hand and return {metric: Measured}; changes `groups` and `state`.

    groups: {number: its Recorded rollouts}, all that were played, in order.
    sampled_by: optimizer steps that the sampler's weights had taken. Default: state.version.
    """
    sampled_by = state.version if sampled_by is None else sampled_by
    chosen = [group for group in groups.values() if teaches(config, group)]
    lr = rate_by_hand(config, step)
    updates = step_by_hand(config, chosen, state, lr)

    # Rewards and lengths are of all groups, dropped ones included. A critic compares the rewards of
    # the whole step.
    played = [s for group in groups.values() for s in group]
    solved = [[s.reward >= 1 for s in group] for group in groups.values()]
    compared = [played] if config.advantage == "gae" else groups.values()
    lengths = [len(s.at) for s in played]
    sequences = trained(config, [s for group in chosen for s in group])
    A = [A for s in sequences for A in s.A]
    found = {
        "reward/mean": mean_of([s.reward for s in played]),
        "reward/solved": mean_of([one for row in solved for one in row]),
        "reward/groups_none": mean_of([not any(row) for row in solved]),
        "reward/groups_all": mean_of([all(row) for row in solved]),
        "reward/groups_equal": mean_of([len({s.reward for s in some}) == 1 for some in compared]),
        "tokens/generated": Measured(sum(lengths)),
        "tokens/truncated_fraction": mean_of([s.truncated for s in played]),
        "length/rollout_mean": mean_of(lengths), "length/max": Measured(max(lengths)),
        "advantage/token_mean": mean_of(A), "advantage/token_std": deviation_of(A),
    }  # fmt: skip
    if config.advantage == "gae":
        found |= critic_metrics(sequences)

    # With several updates the line also has the metrics of the first by itself: only that update
    # sees the weights from before the step.
    if updates:
        found |= update_metrics(config, updates, sampled_by)
    if len(updates) > 1:
        first = update_metrics(config, updates[:1], sampled_by)
        found |= {f"{name}_first": first[name] for name in FIRST if name in first}

    # How many tokens a tree runs depends on where it is cut, which no equation says.
    tokens = sum(len(s.tokens) for u in updates for s in u["batch"])
    age = min(step, config.staleness)
    counts = {
        "lr": lr, "policy_version": state.version, "updates/skipped": state.skipped,
        "tokens/trained_flat": tokens, "policy/age_mean": age, "policy/age_max": age,
    }  # fmt: skip
    if config.tree == "disabled":
        counts["tokens/trained"] = tokens
    return found | {name: Measured(x) for name, x in counts.items()}


def critic_metrics(sequences) -> dict:
    """Measure the critic's values, and which part of the returns' variance they explain."""
    v = [v for s in sequences for v in s.v_old]
    g = [g for s in sequences for g in s.g]
    a = deviation_of([g - v for g, v in zip(g, v)])
    b = deviation_of(g)
    explained = 1 - a.value**2 / b.value**2 if b.value**2 > 1e-12 else 0.0

    # The change of a^2 / b^2 is 2 a^2 / b^2 times the sum of the relative changes of a and b. The
    # last term is of a size that counts what the run loses by b^2 = mean g^2 - (mean g)^2.
    slope = 2 * (1 - explained)
    lost = slope * math.fsum(x * x for x in g) / max(1, len(g))
    terms = [*(slope * a.terms / max(a.value, 1e-300)), *(slope * b.terms / max(b.value, 1e-300))]
    terms = np.array([*terms, lost / max(b.value**2, 1e-300)]) * math.sqrt(2)
    return {"value/token_mean": mean_of(v),
            "value/explained_variance": Measured(explained, terms, 2)}  # fmt: skip


def update_metrics(c, updates, sampled_by) -> dict:
    """Measure updates: means over them, and the largest of all."""
    U = len(updates)
    batches = [trained(c, u["batch"]) for u in updates]

    def mean_over_updates(name, per_token=True):
        # A mean over the tokens of an update, whatever the loss is divided by. The parts of the
        # loss are divided by Z already, so they are summed. Then the mean over updates.
        terms = []
        for batch in batches:
            count = max(1, sum(len(s.at) for s in batch)) if per_token else 1
            terms += [term[name] / count / U for s in batch for term in s.terms]
        return Measured(math.fsum(terms), np.array(terms))

    # A ratio has a margin to each bound past which it clips, not only to the nearest one: a ratio
    # of 1 is in the middle of 0.8 and 1.2, and rounding would decide which margin is compared.
    bounds = [1 - c.clip_low, 1 + c.clip_high]
    if c.dual_clip:
        bounds.append(c.dual_clip)
    if c.objective == "cispo":
        bounds = [c.cispo_bound]
    ratios = [term["r"] for batch in batches for s in batch for term in s.terms]
    margins = np.array([r - bound for r in ratios for bound in bounds])
    clipped = mean_over_updates("clips")

    # The gap to the sampler is of the first update alone, where both have the same weights and
    # differ by rounding alone. The mean of the updates' norms is at most the root of the mean of
    # their squares, which is the length of the vector `gradient`.
    gaps = np.array([lp - x for s in batches[0] for lp, x in zip(s.lp, s.smp)])
    gradient = np.concatenate([u["gradient"] for u in updates]) / math.sqrt(U)
    norm = math.fsum(u["norm"] for u in updates) / U
    found = {
        "loss/token_mean": mean_over_updates("part", per_token=False),
        "loss/policy_token_mean": mean_over_updates("policy", per_token=False),
        "entropy/token_mean": mean_over_updates("H"),
        "ratio/token_mean": mean_over_updates("r"),
        "ratio/max": largest_of(ratios),
        "ratio/clipped_fraction": clipped._replace(margins=margins, each=1 / max(1, len(ratios))),
        "logprob_gap/max": largest_of(gaps),
        "logprob_gap/mean": mean_of(abs(gaps))._replace(terms=gaps / max(1, len(gaps))),
        "grad_norm": Measured(norm, gradient, 2),
        "policy_age/update_mean": mean_of([u["version"] - sampled_by for u in updates]),
    }
    if any(s.ref is not None for batch in batches for s in batch):
        found["kl/token_mean"] = mean_over_updates("k")
    if c.advantage == "gae":
        found["value/loss"] = mean_over_updates("value")
    routed = [r for u in updates for r in u["routed"]]
    if not routed:
        return found

    # The largest load of all updates and layers. Two experts may be so near that rounding decides
    # which of them a token goes to. The token is then one more of all tokens of an expert, of which
    # `each` is the fraction of the mean.
    layers = [n for u in updates for n in sum_of_counts(u["routed"]).values()]
    load = max(max(counts) * len(counts) / sum(counts) for counts in layers)
    margins = np.array([margin for r in routed for margin in r.margins])
    each = len(layers[0]) / min(sum(counts) for counts in layers)
    found["experts/load_max"] = Measured(load, margins=margins, each=each)
    if c.balance_coef:
        # In (8) such a token changes one count, of a sequence of N tokens, by one of K N.
        terms = np.array([r.balance for r in routed]) / U
        choices = [len(u["routed"]) * sum(n) for u in updates for r in u["routed"]
                   for n in r.counts.values()]  # fmt: skip
        each = c.balance_coef * len(layers[0]) / min(choices)
        found["balance/loss"] = Measured(math.fsum(terms), terms, margins=margins, each=each)
    return found


# 7. What rounding explains --------------------------------------------------------------------
# How far a recorded number may be from the one by hand. If you trust the column `allowed`, skip it.

# Everything is done twice: in float64, to be compared with what the run recorded, and in the run's
# precision, to know how much of a difference rounding can explain. A recorded number and the one by
# hand may differ by TIMES the distance of these two and a unit in the last place. After n steps
# that had to be done again on the way, LATER + 2 n times as much is allowed, since each step adds
# its rounding.
TIMES = 8
LATER = 10


class Audited(NamedTuple):
    """A row of the table. Where there are many numbers, `difference` is their largest."""

    key: str
    recorded: float
    by_hand: float
    difference: float
    allowed: float

    @property
    def ok(self):
        return self.difference == 0 or self.difference <= self.allowed


class Rounding(NamedTuple):
    """A second precision, and what its distance to float64 says about the run."""

    dtype: torch.dtype  # to compute in
    scale: float  # what the distance to float64 is multiplied by
    unit: float  # the run's unit in the last place, relative
    times: float  # TIMES, or LATER times that

    @classmethod
    def of(cls, name, times):
        # For a run in float64 no higher precision is at hand. Rounding is proportional to the unit
        # in the last place, so float32's is measured and scaled by the ratio of the two units.
        run = getattr(torch, name)
        dtype = torch.float32 if run == torch.float64 else run
        unit = torch.finfo(run).eps
        return cls(dtype, unit / torch.finfo(dtype).eps, unit, times)

    def allowed(self, exact, rounded) -> float:
        """Return how far a recorded number may be from `exact`; both are Measured."""
        # The loss of a default run, say: 3000 terms of 1e-5 that mostly cancel. In float32 each is
        # about 1e-11 off, so 8 x 3000 x 1e-11 = 2e-7 is allowed, of a loss of 1e-2.
        if exact.terms.shape != rounded.terms.shape:
            raise ValueError("rounding decides which updates are finite, so nothing is comparable")
        size = abs(exact.value) if math.isfinite(exact.value) else 0.0
        apart = 0.0
        if exact.terms.size:
            size = max(size, float(np.linalg.norm(exact.terms, exact.norm)))
            apart = float(np.linalg.norm(exact.terms - rounded.terms, exact.norm))

        # Rewards, counts and rates are computed in float64 in every run.
        if apart == 0 and not exact.margins.size:
            return TIMES * torch.finfo(torch.float64).eps * size
        allowed = self.times * self.scale * apart + self.unit * size
        return allowed + exact.each * self.undecided(exact, rounded)

    def undecided(self, exact, rounded) -> int:
        """Return how many of the margins are so small that rounding can turn them around."""
        if not exact.margins.size or exact.margins.shape != rounded.margins.shape:
            return 0
        slack = self.times * self.scale * np.abs(exact.margins - rounded.margins).max()
        return np.count_nonzero(np.abs(exact.margins) <= slack)

    def row(self, key, recorded, exact, rounded) -> Audited:
        """Compare one number."""
        difference = abs(recorded - exact.value)
        if math.isnan(recorded) and not math.isfinite(exact.value):
            difference = 0.0  # JSON has no NaN: what is not finite is written as null
        if math.isnan(difference):
            difference = math.inf
        return Audited(key, recorded, exact.value, difference, self.allowed(exact, rounded))

    def row_of_many(self, key, differences, exact, rounded) -> Audited:
        """Show the largest of some differences; exact, rounded: the numbers that are compared."""
        worst = float(np.max(differences, initial=0.0))
        pair = largest_of(exact)._replace(value=0.0), largest_of(rounded)
        return Audited(key, 0.0, worst, worst, self.allowed(*pair))


# 8. A run's files -----------------------------------------------------------------------------
# Settings, metrics, rollouts and checkpoints are read and never written. The trainer's code brings
# a checkpoint into memory. If you look for the arithmetic, skip this.


class RunFiles:
    """Read a run's directory: configuration, metrics, rollouts, checkpoints.

    Nothing is written there, nothing is locked, and no file that the run names is imported: the
    auditor gives the run's FILE.py:Class and FILE.py:function again, as `task` and `reward`.
    """

    def __init__(self, run, task="", reward=""):
        self.path = Path(run)
        if not (self.path / "config.json").exists():
            raise ValueError("it holds no config.json; give the directory of a run")
        given = {"task": task, "reward": reward}
        given = {name: spec for name, spec in given.items() if spec}
        config = resumed_config(self.path / "config.json", given)

        # One process needs no plan. It keeps the run's tree.
        self.config = dataclasses.replace(config, device="cpu", **ONE_PROCESS).check()

        # A line a step, from 0. The last one may be torn, if the run was killed or is alive.
        self.metrics = whole_lines(self.path / "metrics.jsonl")
        for number, line in enumerate(self.metrics):
            if line.get("step") != number:
                found = line.get("step")
                raise ValueError(f"line {number + 1} of metrics.jsonl is of step {found!r}")
        self.checkpoints = {int(path.name[5:]): path for path in parallel.checkpoints(self.path)}

    def chosen_step(self, step) -> int:
        """Return the step to audit. None: the last that a checkpoint's weights sampled, or 0."""
        if not self.metrics:
            raise ValueError("metrics.jsonl holds no whole line")

        # The last steps of a run were sampled with weights that have no line yet.
        if step is None:
            sampled = [n + self.config.staleness for n in self.checkpoints]
            return max([n for n in sampled if n < len(self.metrics)], default=0)
        if not 0 <= step < len(self.metrics):
            last = len(self.metrics) - 1
            raise ValueError(f"metrics.jsonl has no step {step}: its lines are of 0 to {last}")
        return step

    def rollouts(self, step, vocab_size):
        """Return {group: lines} of a step if all its rollouts are there, else None."""
        groups = {}
        for number, line in enumerate(whole_lines(self.path / "rollouts.jsonl"), 1):
            if line.get("step") != step:
                continue
            try:
                t = Trajectory.from_json(line["group"], line | {"path": []}, vocab_size)
                groups.setdefault(t.group, {})[line["rollout"]] = line
                dropped = line["advantage"] is None
                A = t.sampler_logprobs if dropped else np.array(line["advantage"], dtype=float)
                if A.shape != t.mask.shape or len(t.tokens) < 2:
                    raise ValueError("expected a number for each target")
            except (ValueError, TypeError, KeyError) as error:
                text = f"rollouts.jsonl line {number} is not a rollout: {error}"
                raise ValueError(text) from error

        # At an evaluation step only one group is there, and of a torn file the last is not whole.
        numbers = set(range(self.config.group))
        whole = all(group.keys() == numbers for group in groups.values())
        if not whole or groups.keys() != set(range(max(len(groups), self.config.prompts))):
            return None
        return {n: [groups[n][i] for i in sorted(groups[n])] for n in sorted(groups)}


def groups_again(config, task, step, lines, spelled=None) -> dict:
    """Return {group: Recorded rollouts} of lines of rollouts.jsonl; spelled: a group's number."""
    # The prompts are a function of (seed, step, group).
    first = step * config.prompts * config.max_rounds
    groups = {}
    for n, state, prompt in draw_prompts(config, task, ROLLOUT, step, lines, first=first):
        groups[n] = []
        for i, line in enumerate(lines[n]):
            s = Recorded(n, i, line["tokens"], [], [], [], False)
            s.spelled = models.full_definition if n == spelled else None
            play_again(config, task, state, prompt, s)
            s.smp = [line["logprobs"][at] for at in s.at]
            groups[n].append(s)
    return groups


def play_again(config, task, state, prompt, s):
    """Say the sampled tokens of a recorded rollout to the task again, and fill in `s`.

    The task says which tokens were not sampled, what each turn earns, and where the rollout ends.
    """
    # Where the task spoke, the tokens must be the task's. All others were sampled.
    #
    #     ?  3  .  higher  5  .        the prompt, a turn, the reply, a turn
    #        x  x          x  x        sampled: targets 0 1 and 3 4, in `at`
    tokens = s.tokens
    s.prompt = len(prompt)
    s.differs = max(0, len(prompt) - len(tokens))
    s.differs += len([token for token, said in zip(prompt, tokens) if token != said])
    place = turn = len(prompt)
    ended = False
    while place < len(tokens) and not ended:
        s.at.append(place - 1)
        place += 1
        if tokens[place - 1] not in task.end:
            continue

        # The turn is over. The task's reply follows, as far as there is room. Rewards are added as
        # the run adds them, since two sums may be compared: 0.1 + 0.2 + 0.3 is more than 0.3 + 0.3.
        with asking(task):
            state, reply, reward = task.reply(state, tokens[turn:place])
        s.rewards.append((place - 2, float(reward)))
        s.reward += float(reward)
        ended = reply is None
        said = tokens[place : place + len(reply or ())]
        s.differs += len([token for token, here in zip(reply or (), said) if token != here])
        place = turn = place + len(reply or ())

    # A rollout ends where the task says so, or at the limit. Tokens past its end were never said,
    # and a rollout that neither ended nor met the limit lacks some.
    limit = len(prompt) + config.max_new_tokens
    s.truncated = not ended
    s.differs += abs(len(tokens) - (min(place, limit) if ended else limit))


def copy_in(model, dtype):
    """Return a copy of a model that is whole, on the CPU and in a precision."""
    # `parallelize` may have seen the model: its part has process groups, which cannot be copied.
    part = getattr(model, "part", None)
    copied = copy.deepcopy(model, {id(part): None}).to("cpu", dtype)
    for p in copied.parameters():
        p.grad_dtype = dtype
    if copied.residual_dtype is not None:
        copied.residual_dtype = torch.promote_types(copied.residual_dtype, dtype)
    return copied


def copy_of_state(trainer, dtype) -> FullState:
    """Return a copy of what a Trainer holds, for the step by hand in a precision."""
    config = trainer.config
    model = copy_in(trainer.model, dtype)
    stored = parallel.weights_to_store(trainer.model, trainer.optimizer)

    # In mixed precision what adds up over steps is never coarser than it is in the run.
    weights = dict(model.named_parameters())
    kept = dtype
    if config.is_mixed:
        kept = torch.promote_types(dtype, getattr(torch, config.dtype))
        weights |= {name: x.to("cpu", kept, copy=True) for name, x in stored.items()}
        for p in model.parameters():
            p.grad_dtype = kept

    # Before its first step torch's optimizer has no moments yet; they begin at 0.
    moments = {}
    for name, p in trainer.model.named_parameters():
        found = parallel.state_of(trainer.optimizer, name, p)
        zero = torch.zeros_like(stored[name])
        means = [found.get(key, zero).detach() for key in ("exp_avg", "exp_avg_sq")]
        moments[name] = [int(found.get("step", 0)), *(x.to("cpu", kept, copy=True) for x in means)]
    reference = trainer.reference and copy_in(trainer.reference, dtype)
    counts = trainer.policy_version, trainer.skipped
    return FullState(model, weights, moments, reference, *counts)


def state_before(files, task, step, say):
    """Return a Trainer as it is before the step, and what sampled the step's rollouts.

    say: a function. It gets a sentence for each part of the way to that state.

    Returns the Trainer, how many steps it had to do for that, the State that sampled, and the
    RolloutQueue, which has the step's rollouts or the weights that sample them.
    """
    # Checkpoint step-M is the state before step M. Step 0 needs none: its weights are drawn from
    # the seed or read from --model. Supervised steps leave one, which --keep may have deleted.
    # The sampler's weights are from `staleness` steps before, so the way begins there.
    config = files.config
    sampled_at = max(0, step - config.staleness)
    model, generator, reference = build(config, task)
    trainer = Trainer(config, model, generator=generator, reference=reference)
    start = max([n for n in files.checkpoints if n <= sampled_at], default=0)
    again = step - start
    pending = {}
    if start in files.checkpoints:
        path = files.checkpoints[start]
        state = trainer.load_checkpoint(path)
        if state["step"] != start:
            raise ValueError(f"{path.name} is of another step")
        pending = pending_batches(config, trainer, path, state)
        say(f"from {path.name}, the state before step {start}")
    else:
        supervised = RolloutQueue(config, task, trainer, -config.demos)
        for n in range(-config.demos, 0):
            do_step(config, supervised, trainer, n)
        trainer.optimizer.state.clear()  # the loop begins with a new optimizer
        again += config.demos
        demos = f", after {config.demos} supervised steps" if config.demos else ""
        say(f"from the first weights, which --seed and --model determine{demos}")
    read_reference(files.path, trainer)
    trainer.push_weights()

    # On to the step by the ordinary code, in one process, for as long as it makes the run's own
    # rollouts. In float32 rounding makes it draw a different token sooner or later.
    if step > start:
        say(f"on to step {step} by the ordinary code, in one process: {step - start} steps, "
            f"for which {LATER + 2 * again} times as much is allowed")  # fmt: skip
    queue = RolloutQueue(config, task, trainer, start, pending, last=step)
    stored = getattr(torch, config.dtype)
    for n in range(start, step):
        if n == sampled_at:
            sampler = copy_of_state(trainer, stored)
        batch = queue.get(n)
        for name in ("tokens/generated", "reward/mean"):
            here = batch.metrics[name]
            there = files.metrics[n].get(name)
            if not isinstance(there, int | float) or abs(here - there) > 1e-9:
                raise ValueError(
                    f"on the way from step {start} to step {step} one process makes other rollouts "
                    f"than the run: {name} of step {n} is {here} here and {there} in "
                    f"metrics.jsonl; audit a step right after a checkpoint"
                )
        do_step(config, SimpleNamespace(get=lambda step, batch=batch: batch), trainer, n)
    if sampled_at == step:  # without staleness
        sampler = copy_of_state(trainer, stored)
    return trainer, again, sampler, queue


# 9. A step in one precision -------------------------------------------------------------------
# All that is compared: the draws, the metrics, two evaluations and the weights after the step.


@dataclass
class ByHand:
    """A step by hand in one precision."""

    groups: dict  # number -> its Recorded rollouts
    state: State  # after the step
    plays: dict  # eval/solved.. -> the greedy rollouts
    found: dict  # metric -> Measured
    ends: np.ndarray  # (N, 2): between which two numbers lies one that draws the sampled token


def in_precision(files, task, before, lines, step, dtypes, first=None, spelled=None) -> ByHand:
    """Do all of a step by hand.

    before: the Trainer before the step, and the State that sampled.
    dtypes: to compute in, the trainer's part and the sampler's.
    first: the ByHand in float64, if this is the second precision.
    spelled: the number of a group that is read by `models.full_definition`.
    """
    config = files.config
    dtype, sampler_dtype = dtypes
    trainer, sampled_by = before
    groups = groups_again(config, task, step, lines, spelled)

    # A draw is a number in [0, 1). Tokens divide [0, 1) into intervals as wide as their
    # probabilities, and the number's interval says which token it draws.
    sampler = sampler_of(config, sampled_by, sampler_dtype)
    intervals = []
    for s in [s for group in groups.values() for s in group]:
        widths = read_alone(sampler, s, config.temperature)[0].double().exp()
        ends = widths.cumsum(-1)
        here = range(len(s.at)), [s.tokens[at + 1] for at in s.at]
        intervals.append(torch.stack([ends[here] - widths[here], ends[here]], -1).numpy())
    hand = ByHand(groups, copy_of_state(trainer, dtype), {}, {}, np.concatenate(intervals))

    # With `proximal`, a run has the log-probs `old` and `lp` of its first update from two forwards,
    # of other shapes, which round apart. By hand they would be one number, and a ratio of exactly 1
    # would tell nothing of rounding. So the second precision takes its `old` from the first.
    if first is not None and config.proximal:
        for n, group in groups.items():
            for s, exact in zip(group, first.groups[n]):
                s.old = exact.old

    # An evaluation is of the weights before the step, or of those after it.
    line = files.metrics[step]
    if "eval/solved_before" in line:
        solve(config, task, hand, "eval/solved_before", dtype, first)
    hand.found |= metrics_by_hand(config, groups, hand.state, step, sampled_by.version)
    if "eval/solved" in line:
        solve(config, task, hand, "eval/solved", dtype, first)
    return hand


@torch.no_grad()
def sampler_of(config, state, dtype):
    """Return the sampler's model, to compute in `dtype`: weights as a push rounds them."""
    # A cast there and back rounds the weights. The products are in `dtype`.
    model = copy_in(state.model, dtype).requires_grad_(False)
    for name, p in model.named_parameters():
        p.copy_(state.weights[name].to(getattr(torch, config.rollout_dtype)))
    return model


@torch.no_grad()
def solve(config, task, hand, name, dtype, first):
    """Measure the fraction of held-out prompts that greedy play solves, into hand.found[name]."""
    # This is the one number that the ordinary sampler has a part in: it plays, in float64, as
    # `evaluate` does. The second precision reads the same plays.
    model = sampler_of(config, hand.state, dtype)
    if first is None:
        prompts = range(config.eval_prompts)
        starts = draw_prompts(config, task, EVALUATION, 0, prompts, held_out=True)
        greedy = dataclasses.replace(config, group=1, temperature=0.0, forks=1, fork_turns=0)
        hand.plays[name] = [t for (t,) in play(greedy, task, model, starts, key=())]
    plays = hand.plays[name] if first is None else first.plays[name]

    # A margin says how far the likeliest token was ahead of the next, at the closest choice of a
    # play. If rounding turned that choice around, the run has played a different game.
    margins = []
    for t in plays:
        s = Recorded(t.group, 0, t.tokens, np.flatnonzero(t.sampled).tolist(), [], [], False)
        top_N2 = read_alone(model, s, 1.0)[0].double().topk(2).values
        margins.append(float((top_N2[:, 0] - top_N2[:, 1]).min()))
    solved = mean_of([t.reward >= 1 for t in plays])
    hand.found[name] = solved._replace(margins=np.array(margins), each=1 / len(plays))


# 10. The table --------------------------------------------------------------------------------
# A row for each number that the run recorded and the step determines.


@dataclass
class Report:
    """The findings of an audit."""

    run: str
    step: int
    config: object
    intro: list  # sentences
    rows: list  # Audited, in ORDER
    left_out: list  # names of metrics that the step does not determine
    outro: str
    group: int  # whose tokens are shown
    sequences: list  # its Recorded rollouts
    loss: str  # how the parts of all tokens add up
    updates: int  # of the step: the loss is their mean
    show: object  # tokens as text

    @property
    def wrong(self):
        """Return the key of the first row that is outside; None if all are ok."""
        return next((row.key for row in self.rows if not row.ok), None)

    @property
    def verdict(self):
        found = "ok" if self.wrong is None else f"{self.wrong} is outside"
        return f"audit of step {self.step}: {found}"


def audited(run, step=None, group=None, task="", reward="") -> Report:
    """Do a step of a run again by hand, and compare it with the run's files.

    run: its directory.
    step: default the last step that a checkpoint's weights have sampled, or 0.
    group: to be spelled out. Default: none; the first that teaches something is shown.
    task, reward: the run's FILE.py:Class and FILE.py:function, if it had them.

    Raises ValueError if the step cannot be audited.
    """
    files = RunFiles(run, task, reward)
    config = files.config
    step = files.chosen_step(step)
    line = files.metrics[step]
    task = make_task(config)
    intro = []
    trainer, again, sampler, queue = state_before(files, task, step, intro.append)
    times = TIMES * (LATER + 2 * again) if again else TIMES
    rounding = Rounding.of(config.compute, times)
    text = f"by hand in float64; {str(rounding.dtype)[6:]} tells what rounding does"
    if rounding.scale != 1:
        text += f", times {rounding.scale:.1e}, the ratio of the two units in the last place"
    intro.append(text)

    # The tokens of the rollouts are the run's. Everything else about them is computed again.
    lines = files.rollouts(step, task.vocab_size)
    if lines is None:
        intro.append("rollouts.jsonl does not hold all rollouts of this step: sampled again, by "
                     "the ordinary code")  # fmt: skip
        rollouts = queue.get(step).groups
        lines = {}
        for n in sorted(rollouts):
            lines[n] = [rollout_line(task, step, i, t) for i, t in enumerate(rollouts[n])]
    if group is not None and group not in lines:
        raise ValueError(f"--group {group}: the groups of step {step} are 0 to {len(lines) - 1}")

    # The step in float64, and in the precisions that tell what rounding does.
    given = files, task, (trainer, sampler), lines, step
    exact = in_precision(*given, (torch.float64, torch.float64), spelled=group)
    lower = rounding.dtype, Rounding.of(config.rollout_dtype, times).dtype
    rounded = in_precision(*given, lower, first=exact)

    # The rows: the draws, the tokens, their advantages and the parameters, and every metric that is
    # both in the line and determined by the step.
    rows = rollout_rows(config, exact, rounded, lines, rounding)
    rows.append(sampling_row(config, step, exact, rounded, times, intro.append))
    for key in exact.found.keys() & line.keys():
        recorded = math.nan if line[key] is None else line[key]
        if not isinstance(recorded, int | float):
            raise ValueError(f"{key} of step {step} in metrics.jsonl is not a number")
        rows.append(rounding.row(key, recorded, exact.found[key], rounded.found[key]))
    done = exact.state.version + exact.state.skipped - trainer.policy_version - trainer.skipped
    outro = f"parameters after the step: not compared, there is no step-{step + 1:08d}"
    if step + 1 in files.checkpoints:
        more, outro = after_rows(files, step, trainer, exact, rounded, rounding)
        rows += more

    # A group whose rewards are all equal would show nothing but the entropy bonus.
    groups = exact.groups
    if group is None:
        learning = [n for n in groups if any(any(s.A or []) for s in groups[n])]
        group = learning[0] if learning else 0

    # Each token has a part of the loss of its update, and the loss is the mean of the updates'.
    updates = max(1, done)
    parts = {}
    for n in groups:
        parts[n] = math.fsum(term["part"] for s in groups[n] for term in s.terms)
    own = parts.pop(group) / updates
    others = math.fsum(parts.values()) / updates
    loss = f"loss: this group {own:.15g} + the other groups {others:.15g} "
    loss += f"= {own + others:.15g}, loss/token_mean by hand"
    return Report(
        run=str(run), step=step, config=config, intro=intro, outro=outro,
        rows=sorted(rows, key=lambda row: ORDER.index(row.key)),
        left_out=sorted(line.keys() - exact.found.keys() - {"step"}), group=group,
        sequences=groups[group], loss=loss, updates=updates, show=task.show,
    )  # fmt: skip


def sampling_row(config, step, exact, rounded, times, say) -> Audited:
    """Compare each draw with its token's interval, and say how many lie outside."""
    rounding = Rounding.of(config.rollout_dtype, times)
    draws = []
    for s in [s for group in exact.groups.values() for s in group]:
        for at in s.at:
            # A rollout has a random number for each place after the prompt. Rollouts that share a
            # turn were played as one, with the numbers of the first of them.
            played, _ = shared_by(config, s, turns_before(s, at))
            key = config.seed, step, s.group, played
            draws.append(uniforms(key, at + 2 - s.prompt)[-1])

    # Rounding moves an end of an interval a little, and a number near it falls on the neighbor.
    misses = np.maximum(exact.ends[:, 0] - draws, draws - exact.ends[:, 1]).clip(0)
    row = rounding.row_of_many("sampling", misses, exact.ends.ravel(), rounded.ends.ravel())
    say(
        f"sampling: {len(misses)} draws, of which {np.count_nonzero(misses)} lie outside their "
        f"token's interval of the definition's distribution, the worst by {row.difference:.1e}; "
        f"rounding in {config.rollout_dtype} explains {row.allowed:.1e}, and "
        f"{np.count_nonzero(misses > row.allowed)} lie further away"
    )
    return row


def rollout_rows(config, exact, rounded, lines, rounding) -> list:
    """Compare rollouts.jsonl with what the task and the step say."""
    tokens = wrong = unlike = 0
    rewards = []
    advantages = []
    A = []
    A_rounded = []
    for n, group in exact.groups.items():
        for s, t, line in zip(group, rounded.groups[n], lines[n]):
            # Which tokens are the task's, and which were marked as sampled.
            tokens += len(s.tokens)
            wrong += s.differs
            unlike += len(set(np.flatnonzero(line["sampled"]).tolist()) ^ set(s.at))

            # The reward of each turn. A turn that is missing on one side counts as reward 0 there.
            told = dict(map(tuple, line["rewards"]))
            mine = dict(s.rewards)
            rewards += [abs(told.get(at, 0.0) - mine.get(at, 0.0)) for at in {*told, *mine}]
            rewards.append(float(bool(line["truncated"]) != s.truncated))

            # The advantages of the tokens that are trained on.
            if s.A is not None and trained(config, [s]) and line["advantage"] is not None:
                advantages += [abs(line["advantage"][at] - x) for at, x in zip(s.at, s.A)]
                A += s.A
                A_rounded += t.A

    # The rounds of a step play as many new groups as are missing, each time.
    played = chosen = 0
    for _ in range(config.max_rounds):
        new = range(played, played + config.prompts - chosen)
        chosen += len([n for n in new if n not in lines or teaches(config, exact.groups[n])])
        played = new.stop
    return [
        Audited("rollouts/groups", len(lines), played, abs(played - len(lines)), 0),
        Audited("rollouts/tokens", tokens, tokens - wrong, wrong, 0),
        Audited("rollouts/sampled", 0, unlike, unlike, 0),
        rounding.row_of_many("rollouts/rewards", rewards, [1.0], [1.0]),
        rounding.row_of_many("rollouts/advantage", advantages, A, A_rounded),
    ]


def after_rows(files, step, trainer, exact, rounded, rounding):
    """Compare parameters and votes with the next checkpoint: return the rows, and a sentence."""
    # Each tensor is held to its own rounding, and the tensor furthest from it is shown: AdamW makes
    # steps of one length, so a fault in a small tensor is as large as in a big one.
    # AdamW divides by the root of v. Where a gradient has nearly cancelled, its rounding becomes as
    # long as a step, and the largest of many such entries scatters more than a sum does: 4 times.
    # Weights are stored in --dtype, whatever the products are in.
    path = files.checkpoints[step + 1]
    unit = torch.finfo(getattr(torch, files.config.dtype)).eps
    wider = rounding._replace(times=4 * rounding.times, unit=unit)
    trainer.load_checkpoint(path)
    stored = parallel.weights_to_store(trainer.model, trainer.optimizer)
    rows = {}
    for name, p in exact.state.weights.items():
        three = stored[name], p, rounded.state.weights[name]
        vectors = [x.detach().double().flatten().numpy() for x in three]
        differences = np.abs(vectors[0] - vectors[1])
        rows[name] = wider.row_of_many("parameters", differences, *vectors[1:])
    worst = max(rows, key=lambda name: rows[name].difference / max(rows[name].allowed, 1e-300))
    text = f"parameters after the step: against {path.name}, the worst is {worst}"
    if not files.config.router_bias_rate:
        return [rows[worst]], text

    # The routers' biases, in votes. An undecided choice changes the counts of two experts, and by
    # that their votes by two at the most.
    there, here = (parallel.persistent_buffers(x) for x in (trainer.model, exact.state.model))
    wrong = sum(int((there[name] - here[name]).abs().sum()) for name in here)
    sizes = [sum(int(x.abs().sum()) for x in votes.values()) for votes in (there, here)]
    loads = [hand.found["experts/load_max"] for hand in (exact, rounded)]
    votes = Audited("votes", *sizes, wrong, 4 * rounding.undecided(*loads))
    return [rows[worst], votes], text


# 11. The report as text -----------------------------------------------------------------------
# The table, and the tokens of one group with their parts of the loss.


def token_rows(report, s) -> list:
    """Return a dict for each token of a rollout; `part` is None where it was not trained on."""
    # Target `at` is token at + 1. Token 0 is not a target.
    place = {at + 1: n for n, at in enumerate(s.at)}
    rows = []
    for index, token in enumerate(s.tokens):
        row = dict(text=report.show([token]), part=None)
        row["why"] = "the prompt" if index < s.prompt else "the task's reply"
        if index in place:
            row["why"] = "sampled, and not trained on"
        if index in place and s.terms:
            n = place[index]
            row |= s.terms[n] | dict(smp=s.smp[n], old=s.old[n], lp=s.lp[n], A=s.A[n])
            row["part"] /= report.updates  # the loss is a mean over updates, and so is its part
        rows.append(row)
    return rows


def print_report(report) -> None:
    """Print the audit."""
    print(f"audit of {report.run}, step {report.step}")
    for text in report.intro:
        print(text)
    print(f"\n{'':28}{'recorded':>22}{'by hand':>22}{'difference':>12}{'allowed':>10}")
    for row in report.rows:
        verdict = "ok" if row.ok else "OUTSIDE"
        print(f"{row.key:28}{row.recorded:22.15g}{row.by_hand:22.15g}{row.difference:12.1e}"
              f"{row.allowed:10.1e}  {verdict}")  # fmt: skip
    print(f"not determined by the step: {', '.join(report.left_out) or 'nothing'}")
    print(report.outro)

    # The tokens of one group, and the loss that they and all others add up to.
    print(f"\ngroup {report.group}: {len(report.sequences)} rollouts")
    for s in report.sequences:
        print(f"rollout {s.number}, reward {s.reward:g}")
        print(f"  {'token':>14}  sampled{'sampler':>11}{'old':>11}{'now':>11}{'ratio':>10}  clip"
              f"{'advantage':>11}{'part of loss':>14}")  # fmt: skip
        for row in token_rows(report, s):
            if row["part"] is None:
                print(f"  {row['text']:>14}  {row['why']}")
                continue
            clip = "yes" if row["clips"] else "no"
            print(f"  {row['text']:>14}{'yes':>9}{row['smp']:11.6f}{row['old']:11.6f}"
                  f"{row['lp']:11.6f}{row['r']:10.6f}{clip:>6}{row['A']:11.6f}"
                  f"{row['part']:14.6e}")  # fmt: skip
    print(report.loss)
    print(report.verdict)


# 12. The report as a page ---------------------------------------------------------------------
# `--html FILE`: one file of HTML, which loads nothing and runs no script. If you do not show a step
# to others, skip this.

# A token is a link. Its numbers are hidden until the link is pointed at (:hover) or named in the
# page's address (:target). No script is needed for that.
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
    """Return the report as one page of HTML."""
    # The names of tasks and directories are text, and not markup.
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
    for row in report.rows:
        verdict = '<td class="ok">ok' if row.ok else '<td class="outside">OUTSIDE'
        lines.append(
            f"<tr><td>{row.key}</td><td>{row.recorded:.12g}</td><td>{row.by_hand:.12g}</td>"
            f"<td>{row.difference:.1e}</td><td>{row.allowed:.1e}</td>{verdict}</td></tr>"
        )
    lines += ["</table>", f"<h2>Group {report.group}</h2>"]
    lines.append(
        "<p>A row is a rollout, a column a place in it. Green tokens have a positive advantage, "
        "red ones a negative one; underlined ones are clipped; grey ones were not sampled. What is "
        "pale is shared with the row above. Point at a token for its part of the loss.</p>"
    )
    lines += [f"<p>{escaped(report.loss)}</p>", *tree_of(report), "</html>"]
    return "\n".join(lines) + "\n"


def tree_of(report) -> list:
    """Return the group's rollouts as rows, with rollouts that share a prefix next to each other."""
    # Sorted by their tokens, rollouts are the leaves of the tree of their prefixes from left to
    # right. The prefix that a row shares with the row above is drawn pale.
    largest = max((abs(A) for s in report.sequences for A in s.A or []), default=0.0) or 1.0
    lines = ['<table class="tree">']
    above = []
    for s in sorted(report.sequences, key=lambda s: s.tokens):
        shared = len(os.path.commonprefix([above, s.tokens]))
        above = s.tokens
        cells = [f"<th>rollout {s.number}, reward {s.reward:g}</th>"]
        for place, row in enumerate(token_rows(report, s)):
            kinds = ["token"]
            shade = ""
            if place < shared:
                kinds.append("shared")
            if row["part"] is None:
                kinds.append("given")
            else:
                # Green for tokens that the step makes likelier, red for the others.
                rgb = "46, 160, 67" if row["A"] > 0 else "248, 81, 73"
                shade = f' style="background: rgba({rgb}, {0.75 * abs(row["A"]) / largest:.2f})"'
                if row["clips"]:
                    kinds.append("clips")

            # A token links to itself: named in the page's address, it shows its numbers at once.
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
    """Return the equations for one token with its numbers, without what the settings leave out."""
    c = report.config
    if row["part"] is None:
        return [f"{row['text']}: {row['why']}"]
    lines = [f"A = {row['A']:.6f}    log-probs: sampler {row['smp']:.6f}, old {row['old']:.6f}, "
             f"now {row['lp']:.6f}"]  # fmt: skip
    mean = "mean of " if c.ratio == "sequence" else ""
    lines.append(f"(2) r = exp({mean}now - old) = {row['r']:.6f}")

    # l after (3) and (4). The token's `policy` is w l / Z, its share in the loss.
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

    # What is added to l, and its share in the loss of its update.
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


# 13. The command ------------------------------------------------------------------------------
# `python audit.py RUN`, and `python train_grpo.py audit RUN`, which calls `main`.


def main(argv) -> int:
    """Audit a run and return the exit code.

    0: every number is within what rounding allows. 1: one is not. 2: no audit is possible.
    """
    parser = argparse.ArgumentParser("audit.py", allow_abbrev=False)
    parser.add_argument("run", help="directory of a run; nothing is written there")
    parser.add_argument("--step", type=int, help="[the last that a checkpoint has sampled, or 0]")
    parser.add_argument("--group", type=int, help="spell this group out, by models.full_definition")
    parser.add_argument("--html", metavar="FILE", help="also write it as a page")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--reward", default="", help="the run's FILE.py:function, if it had one")
    options = parser.parse_args(argv)

    # The process group of this one process is left before anything is printed. The findings are
    # printed in full whatever the verdict is; the verdict is the exit code.
    def command(options):
        with one_process("an audit"):
            report = audited(
                options.run, options.step, options.group, options.task, options.reward
            )
        print_report(report)
        if options.html:
            Path(options.html).write_text(page_of(report))
        return 0 if report.wrong is None else 1

    try:
        return models.quietly(command, options)
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        print(f"error: {options.run} cannot be audited: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

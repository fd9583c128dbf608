"""One step of GRPO by loops over tokens: adds other settings to `train_grpo.plain_step`.

This file is for an auditor who does not trust the trainer: no batch, padding, packing, cache, tree,
plan, sum over ranks, backward or optimizer. It shares no arithmetic with it, and needs torch and
numpy alone. It trusts the forward of a model for one sequence at a time.

For token t of rollout i with reward R_i: lp, old, ref and smp are its log-probs under the policy
now, the policy before the step, the reference and the sampler. H is the entropy, v a critic's
value, g the return that it should have predicted. c holds the run's settings.

    (1)  A = (R_i - mean R) * scale       of its group
    (2)  r = exp(lp - old)
    (3)  l = -min(r A, clip(r, 1 - low, 1 + high) A)         or that of another objective
    (4)  l <- x l                         x = exp(old - smp), truncated or masked
    (5)  l <- l + kl_coef k(lp - ref) - entropy_coef H
    (6)  l <- l + value_coef max((v - g)^2, (clip(v, v_old +- 0.2) - g)^2) / 2
    (7)  loss = sum over all sampled tokens of w l / Z
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch


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
    watch: object = lambda: None  # noqa: E731, called when a model has read the tokens

    # The input of `loss_definition`. lp, H and v are of the update that trained on the rollout.
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
    s.watch()

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


def entry(table, name, title):
    """Return an entry of a table. ValueError, for a setting that this file does not know."""
    if name not in table:
        raise ValueError(f"the audit does not know {name!r}: add it to {title} in full/byhand.py")
    return table[name]


# Advantages -------------------------------------------------------------------------------------
# How much better a rollout was than its group, (1). If you know GRPO's advantage, skip this.


def group_advantages(kind, group, R):
    """Set the A of a group's rollouts by (1). R holds their rewards."""
    # Truncated rollouts count. Equal rewards teach nothing, whatever rounding makes of r - mean.
    G = len(R)
    mean = math.fsum(R) / G
    centered = [r - mean if min(R) < max(R) else 0.0 for r in R]

    # Rewards 1 0 0 0 have the mean 0.25, so A is 0.75 -0.25 -0.25 -0.25. group_std divides by 0.5,
    # leave_one_out by 3/4: the mean of the others is 0, so the first is 1 better.
    spread = math.sqrt(math.fsum(x * x for x in centered) / max(1, G - 1)) + 1e-4
    scales = {"group_mean": 1.0, "group_std": 1 / spread, "leave_one_out": G / max(1, G - 1)}
    scale = entry(scales, kind, "`group_advantages` or ADVANTAGES")
    for s, x in zip(group, centered):
        s.A = [x * scale] * len(s.at)  # (1)


# The loss ---------------------------------------------------------------------------------------
# Equations (2) to (7), token by token. They are also what the trainer's tests compare with.


def clip_terms(c, s):
    """Return (r, whether the clip acts, l) of each sampled token, by (2) and (3)."""
    found = []
    for lp, old, A in zip(s.lp, s.old, s.A):
        # The gain is r A. The clip takes the worse of the gain and the gain at the clipped ratio:
        # once a token has moved far enough in the direction that A asks for, its gain is a
        # constant, and its gradient is zero. A move the wrong way is never clipped.
        r = (lp - old).clamp(-10, 10).exp()  # (2)
        gain = min(r, c.dual_clip or math.inf) * A
        clipped_gain = min(max(r, 1 - c.clip_low), 1 + c.clip_high) * A
        clips = clipped_gain < gain or r > (c.dual_clip or math.inf) or abs(lp - old) > 10
        found.append((r, clips, -min(gain, clipped_gain)))  # (3)
    return found


OBJECTIVES = {"clip": clip_terms}  # the others are below the ruler,

IMPORTANCE = {}  # and so is x of (4): how much too rarely the sampler has drawn a token


def loss_definition(sequences, Z, c):
    """Return the loss of a batch, (2) to (7), a 0-d tensor. Set the `terms` of each sequence.

    sequences: lp, H and v hold 0-d tensors, all other lists numbers. v and ref may be None.
    """
    loss = torch.zeros(())
    for s in sequences:
        s.terms = []
        x = [1] * len(s.lp)
        if c.importance_cap:
            x = entry(IMPORTANCE, (c.importance, c.importance_of), "IMPORTANCE")(c, s)
        for t, (r, clips, l) in enumerate(entry(OBJECTIVES, c.objective, "OBJECTIVES")(c, s)):
            l = x[t] * l  # (4)
            term = dict(r=r, clips=clips, x=x[t], H=s.H[t], policy=s.w * l / Z, k=0.0, value=0.0)
            if s.ref is not None:
                d = s.lp[t] - s.ref[t]
                term["k"] = {"k1": d, "k3": (-d).exp() + d - 1}[c.kl]
            if c.kl_in == "loss":
                l = l + c.kl_coef * term["k"]  # (5)
            l = l - c.entropy_coef * s.H[t]  # (5)
            if s.v is not None:
                near = s.v_old[t] + (s.v[t] - s.v_old[t]).clamp(-0.2, 0.2)
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
    counts = dict(token_mean=sum(len(s.at) for s in sequences), sequence_mean=len(sequences),
                  constant=len(batch) * c.max_new_tokens)  # fmt: skip
    Z = entry(counts, c.aggregation, "`weigh`")
    for s in sequences:
        s.w, s.Z = 1 / len(s.at) if c.aggregation == "sequence_mean" else 1.0, Z
    return Z


# A step -----------------------------------------------------------------------------------------
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
        """Set the A of all rollouts of the step. FullState knows all."""
        for group in groups:
            group_advantages(c.advantage, group, [s.reward for s in group])

    def add_balance(self, c, batch) -> list:
        """Add the gradient of an update's other losses. FullState adds the loss of experts."""
        return []

    def keep(self, shrink):
        """Return what stays of an update's gradient, here all of it."""
        return {name: p.grad for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def adamw(self, c, lr, shrink):
        """Take one AdamW step with the gradients times `shrink`, in place, in float32 at least."""
        for name, p in self.model.named_parameters():
            weight = self.weights[name]
            wide = torch.promote_types(weight.dtype, torch.float32)
            self.moments[name][0] += 1
            steps, *means = self.moments[name]
            tensors = weight.detach(), *means, p.grad
            for piece in zip(*(x.view(-1).split(2**20) for x in tensors)):  # some are large
                *now, g = [x.to(wide) for x in piece]
                for x, new in zip(piece, adamw_of(c, lr, steps, *now, shrink * g)):
                    x.copy_(new)
            if weight is not p:
                p.copy_(weight.to(getattr(torch, c.compute_dtype)))


def adamw_of(c, lr, steps, weight, m, v, g):
    """Return the weight, m and v after AdamW's step number `steps`, with the clipped gradient g."""
    # The decaying means of g and g^2 begin at 0, so they are divided by the share that they have
    # seen. Weight decay does not go through the gradient.
    m = 0.9 * m + 0.1 * g
    v = c.beta2 * v + (1 - c.beta2) * g * g
    size = (v / (1 - c.beta2**steps)).sqrt() + 1e-8
    return (1 - lr * c.weight_decay) * weight - lr * m / (1 - 0.9**steps) / size, m, v


def step_by_hand(c, groups, state, lr) -> list:
    """Do a whole step by (1) to (7), in place. Return a dict for each optimizer step.

    groups: lists of Recorded rollouts, the groups that the step trains on, in order.
    state: the State before the step, in the precision to compute in. lr: the learning rate.
    """
    # Before the first update: the reference's log-probs, and `old`, by the policy or the sampler.
    # None: every ratio is 1. An `old` that is set stays; see `in_precision`.
    for s in [s for group in groups for s in group]:
        with torch.no_grad():
            if state.reference is not None:
                s.ref = numbers_of(score_alone(state.reference, s, c.temperature)[0])
            if c.proximal and s.old is None:
                s.old = numbers_of(score_alone(state.model, s, c.temperature)[0])
        if (c.minibatches > 1 or c.staleness) and not c.proximal:
            s.old = s.smp
    state.set_advantages(c, groups)
    state.reference = None  # its memory is the gradient's

    # The updates train on whole groups, in order. Five groups in two updates are 0 1 and 2 3 4.
    updates = []
    ends = [m * len(groups) // c.minibatches for m in range(c.minibatches + 1)]
    for first, last in zip(ends, ends[1:]):
        batch = [s for group in groups[first:last] for s in group]
        Z = weigh(c, batch)
        if Z == 0:
            continue

        # The gradient of a sum is the sum of gradients, so memory holds one graph at a time.
        for p in state.model.parameters():
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        for s in trained(c, batch):
            s.lp, s.H, s.v = score_alone(state.model, s, c.temperature)
            if s.old is None:
                s.old = numbers_of(s.lp)
            loss_definition([s], Z, c).backward()
            s.lp, s.H, s.v = numbers_of(s.lp), numbers_of(s.H), numbers_of(s.v)
        routed = state.add_balance(c, batch)

        # Clip the whole gradient by its norm, then AdamW. If it is not finite, it is only counted.
        norms = [p.grad.norm(dtype=torch.float64).item() for p in state.model.parameters()]
        norm = math.hypot(*norms)
        shrink = c.max_grad_norm / norm if norm > c.max_grad_norm else 1.0
        updates.append(dict(batch=batch, version=state.version, norm=norm, shrink=shrink,
                            gradient=state.keep(shrink), routed=routed))  # fmt: skip
        if math.isfinite(norm):
            state.adamw(c, lr, shrink)
        state.version += math.isfinite(norm)
        state.skipped += not math.isfinite(norm)
    return updates


# Settings that few runs use ---------------------------------------------------------------------
# The other entries of the tables, a critic, tree rollouts, experts. Like the step by hand this
# needs torch and numpy alone. If the run has none of them, skip it.
#
#     (1)  A = sum over n of gae_lambda^n delta_(t+n), whitened                       `gae`
#     (1)  A = the mean reward of the rollouts that share a segment, minus the one    `per_branch`
#              of the segment before
#     (8)  balance = balance_coef * mean over sequences of E / (K N^2) sum_e counts_e sum_n p_ne
#     (11) votes_e <- votes_e + sign(mean of counts - counts_e)   the bias of router's choice
#
# Of E experts, the router chooses K for each of a sequence's N tokens; p are its probabilities.


class FullState(State):
    """A State for all settings."""

    routed = ()  # of the update in progress, a Routed for each rollout
    updates = ()  # what `step_by_hand` has returned
    teacher = None  # the model of --teacher

    def set_advantages(self, c, groups):
        """Set the A of all rollouts by --advantage, with what lowers a reward."""
        returns = [[s.reward - math.fsum(penalties(c, s)) - overlong_penalty(c, s) for s in group]
                   for group in groups]  # fmt: skip
        if c.advantage in ADVANTAGES:
            ADVANTAGES[c.advantage](c, self, groups, returns)
        else:
            for group, R in zip(groups, returns):
                group_advantages(c.advantage, group, R)
        self.teacher = None  # its memory is the gradient's

    def add_balance(self, c, batch):
        """Add the gradient of (8), of all rollouts of an update; return a Routed for each."""
        self.routed = []
        if self.model.config.sparse_layers:
            self.routed = [route_alone(c, self.model, s, len(batch)) for s in batch]
        return self.routed

    @torch.no_grad()
    def adamw(self, c, lr, shrink):
        """Also move the votes of each router."""
        super().adamw(c, lr, shrink)
        self.vote(c)

    def vote(self, c):
        """Move the votes of each router by (11): experts with too few tokens become likelier."""
        if c.router_bias_rate:
            for layer, counts in sum_of_counts(self.routed).items():
                votes = np.sign(counts.mean() - counts).astype(int)  # (11)
                self.model.model.layers[layer].mlp.votes += torch.from_numpy(votes)


def penalties(c, s):
    """Return how much of its reward each sampled token loses by `--kl-in reward`."""
    if c.kl_in != "reward" or not c.kl_coef:
        return np.zeros(len(s.at))
    d = np.subtract(s.smp, s.ref)
    return c.kl_coef * {"k1": d, "k3": np.exp(-d) + d - 1}[c.kl]


def overlong_penalty(c, s) -> float:
    """Return what `--overlong-buffer` takes off a reward: new tokens in the buffer / its size."""
    if not c.overlong_buffer:
        return 0.0
    new = len(s.tokens) - s.prompt
    return max(0, new - c.max_new_tokens + c.overlong_buffer) / c.overlong_buffer


def rewards_alone(c, state, groups, returns):
    """Set A to the reward, without a baseline; `none_batch` whitens it over the step's tokens."""
    for s, reward in zip(sum(groups, []), sum(returns, [])):
        s.A = [reward] * len(s.at)  # (1)
    if c.advantage == "none_batch":
        whiten(sum(groups, []))
        leave_equal_ones(groups, returns)


def by_batch_spread(c, state, groups, returns):
    """Divide what a rollout has more than its group by the spread of all rewards of the step."""
    spread = float(np.std(sum(returns, []), ddof=1)) + 1e-4
    for group, R in zip(groups, returns):
        group_advantages("group_mean", group, R)
        for s in group:
            s.A = [A / spread for A in s.A]  # (1)
    leave_equal_ones(groups, returns)


def leave_equal_ones(groups, returns):
    """Teach nothing where all rewards of a step are equal."""
    if len({*sum(returns, [])}) == 1:
        for s in sum(groups, []):
            s.A = [0.0] * len(s.at)


def whiten(sequences):
    """Give the A of all sampled tokens of these sequences the mean 0 and the spread 1."""
    raw = [A for s in sequences for A in s.A]
    mean = math.fsum(raw) / max(1, len(raw))
    spread = math.sqrt(math.fsum((A - mean) ** 2 for A in raw) / max(1, len(raw)))
    for s in sequences:
        s.A = [(A - mean) / (spread + 1e-8) for A in s.A]  # (1)


def of_branches(c, state, groups, returns):
    """Compare the segments of tree rollouts with the segments that they are children of."""
    # With 2 forks at each of 2 turns and rewards 1 0 0 0, the root is worth 1/4, the segment of the
    # first two rollouts 1/2, and the rest of the first 1. So its A is 0, then 1/4, then 1/2.
    for group, R in zip(groups, returns):
        for s in group:
            s.A = []
            for at in s.at:
                worth = [math.fsum(R) / len(R)]
                for first, share in shares(c, s, at)[: c.fork_turns + 1]:
                    worth.append(math.fsum(R[first : first + share]) / share)
                s.A.append(worth[-1] - worth[-2])  # (1)


def shares(c, s, at) -> list:
    """Return for each turn of s up to target `at` which rollouts share it: the first, how many."""
    # With 2 forks at each of 2 turns a prompt is played for 4 rollouts until turn 1 ends, then for
    # 2 until turn 2 ends. Rollout 3 shares its turns with rollouts 0 to 3, with 2 and 3, with none.
    found = []
    for turn in range(1 + len([end for end, _ in s.rewards if end < at])):
        share = c.forks ** max(0, c.fork_turns - turn)
        found.append((s.number - s.number % share, share))
    return found


def of_a_critic(c, state, groups, returns):
    """Set v_old, A and g of all sequences of a step by (1), `gae`."""
    # The definition sums over all tokens that follow; a trainer has a recursion.
    sequences = trained(c, sum(groups, []))
    for s in sequences:
        with torch.no_grad():
            s.v_old = numbers_of(score_alone(state.model, s, c.temperature)[2])

        # A turn's reward belongs to the last token that was sampled in it. After the last token
        # nothing more is expected.
        u = -penalties(c, s)
        for end, reward in s.rewards:
            u[max(n for n, at in enumerate(s.at) if at <= end)] += reward
        u[-1] -= overlong_penalty(c, s)
        deltas = [u[t] + after - s.v_old[t] for t, after in enumerate([*s.v_old[1:], 0.0])]
        s.A = []
        for t in range(len(deltas)):
            later = [c.gae_lambda**n * delta for n, delta in enumerate(deltas[t:])]
            s.A.append(math.fsum(later))  # (1)
        s.g = [v + A for v, A in zip(s.v_old, s.A)]
    whiten(sequences)


def of_a_teacher(c, state, groups, returns):
    """Set A to the teacher's log-prob less the sampler's."""
    for s in sum(groups, []):
        with torch.no_grad():
            scores = numbers_of(score_alone(state.teacher, s, c.temperature)[0])
        s.A = [score - smp for score, smp in zip(scores, s.smp)]  # (1)


ADVANTAGES = {
    "none": rewards_alone, "none_batch": rewards_alone, "batch_std": by_batch_spread,
    "per_branch": of_branches, "gae": of_a_critic, "teacher": of_a_teacher,
}  # fmt: skip


def gspo_terms(c, s):
    """GSPO: the clip of the geometric mean of a rollout's ratios."""
    n = len(s.lp)
    mean = sum(lp - old for lp, old in zip(s.lp, s.old)) / n
    return clip_terms(c, SimpleNamespace(lp=[mean] * n, old=[0.0] * n, A=s.A))


def reinforce_terms(c, s):
    """REINFORCE: -A lp."""
    return [(r, False, -A * lp) for (r, _, _), A, lp in zip(clip_terms(c, s), s.A, s.lp)]


def cispo_terms(c, s):
    """CISPO: the ratio is a bounded number."""
    found = []
    for (r, _, _), A, lp in zip(clip_terms(c, s), s.A, s.lp):
        bounded = min(r.item(), c.cispo_bound)
        found.append((r, bounded != r.item(), -bounded * A * lp))  # (3)
    return found


def sapo_terms(c, s):
    """SAPO: a sigmoid in place of the clip."""
    found = []
    for (r, _, _), A in zip(clip_terms(c, s), s.A):
        tau = 1.0 if A > 0 else 1.05
        found.append((r, False, -4 / tau * torch.sigmoid(tau * (r - 1)) * A))  # (3)
    return found


def gmpo_terms(c, s):
    """GMPO: the geometric mean of ratios, of which each is clipped by the sign of A."""
    # A bound is a number, so a clipped token has no gradient.
    ds = [lp - old for lp, old in zip(s.lp, s.old)]
    kept = [min(d, c.clip_high) if A > 0 else max(d, -c.clip_low) for d, A in zip(ds, s.A)]
    mean_ratio = (sum(kept) / len(kept) + s.lp[0] * 0).clamp(-10, 10).exp()
    return [(r, bool(d != bounded), -mean_ratio * A)  # (3)
            for (r, _, _), d, bounded, A in zip(clip_terms(c, s), ds, kept, s.A)]  # fmt: skip


def dppo_excess(c, lp, old, A) -> float:
    """Return how far a token's probability is past the bound on its move from exp(old)."""
    return abs(math.exp(lp) - math.exp(old)) - (c.clip_high if A > 0 else c.clip_low)


def dppo_terms(c, s):
    """DPPO: a token learns until its probability has moved too far in the direction of A."""
    found = []
    for (r, _, _), lp, old, A in zip(clip_terms(c, s), s.lp, s.old, s.A):
        clips = dppo_excess(c, lp.item(), old, A) > 0 and (lp.item() > old) == (A > 0)
        weight = 0.0 if clips else min(r.item(), 20.0)
        found.append((r, clips, -weight * A * lp))  # (3)
    return found


OBJECTIVES = OBJECTIVES | {
    "reinforce": reinforce_terms, "cispo": cispo_terms, "gspo": gspo_terms, "sapo": sapo_terms,
    "gmpo": gmpo_terms, "dppo": dppo_terms,
}  # fmt: skip


def clip_margins(c, s) -> list:
    """Return how far each token of a rollout that was trained on is from where it clips."""
    # A margin to each bound, not only to the nearest one: a ratio of 1 is in the middle of 0.8 and
    # 1.2, and rounding would decide which margin is compared.
    if c.objective == "dppo":
        return [dppo_excess(c, *token) for token in zip(s.lp, s.old, s.A)]
    if c.objective == "gmpo":
        ds = [lp - old for lp, old in zip(s.lp, s.old)]
        return [d - bound for d in ds for bound in (-c.clip_low, c.clip_high)]
    bounds = [1 - c.clip_low, 1 + c.clip_high] + [c.dual_clip] * (c.dual_clip > 0)
    bounds = {"cispo": [c.cispo_bound], "reinforce": [], "sapo": []}.get(c.objective, bounds)
    return [term["r"] - bound for term in s.terms for bound in bounds]


def weights_of(c, s) -> list:
    """Return x of (4) for each sampled token: of the token, its sequence, or their mean."""
    log_x = [old - smp for old, smp in zip(s.old, s.smp)]
    if c.importance_of != "token":
        share = len(log_x) if c.importance_of == "geometric" else 1
        log_x = [math.fsum(log_x) / share] * len(log_x)

    # Bounds 0.5 and 2: `truncate` makes 3 a 2, `mask` a 0; both keep 1.5.
    low, high = c.importance_low, c.importance_cap
    x = [math.exp(y) for y in log_x]
    if c.importance == "truncate":
        return [min(max(y, low), high) for y in x]  # (4)
    return [y if low <= y <= high else 0.0 for y in x]  # (4)


IMPORTANCE = IMPORTANCE | {
    (how, what): weights_of
    for how in ("truncate", "mask") for what in ("token", "sequence", "geometric")
}  # fmt: skip


class Routed(NamedTuple):
    """How the routers routed one sequence by itself."""

    balance: float  # the sequence's part of (8)
    counts: dict  # layer -> array, how many of its tokens went to each expert
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
        counts = np.bincount(chosen_NK.flatten(), minlength=E)
        b = (torch.from_numpy(counts) * p_NE.sum(0)).sum() * E / (K * N * N)
        parts.append(c.balance_coef * b / sequences)  # (8)
        found.counts[layer] = counts

        # Experts are chosen by p plus the bias.
        mlp = model.model.layers[layer].mlp
        biased_NE = p_NE.detach() + (mlp.rate * mlp.votes if mlp.rate else 0)
        if K < E:
            best = biased_NE.topk(K + 1).values
            found.margins.extend((best[:, K - 1] - best[:, K]).tolist())

    model.hidden(torch.tensor(s.tokens)[None], on_routing=look)
    balance = sum(parts)
    if c.balance_coef:
        balance.backward()
    return found._replace(balance=float(balance.detach()))


def sum_of_counts(routed) -> dict:
    """Return layer -> how many tokens of these sequences went to each expert."""
    return {layer: sum(one.counts[layer] for one in routed) for layer in routed[0].counts}


def rate_by_hand(config, step) -> float:
    """Return the learning rate of a step: a linear rise, then `--lr-decay` to the last step."""
    # Warm-up 2 of 10 steps: .5 1 of --lr, then 1 .875 .75 .. down to .125 where it is linear. With
    # --lr-first-step zero the warm-up is 0 .5.
    # The warm-up is at most the whole run: the default 5 is 2 under --steps 2, .5 1 of --lr.
    warmup = min(config.lr_warmup, config.steps)
    if step < warmup:
        begun = 1 if config.lr_first_step == "nonzero" else 0
        return config.lr * (step + begun) / warmup
    done = (step - warmup) / (config.steps - warmup)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return config.lr * left[config.lr_decay]


def kept(room, number, name):
    """Return a weight's clipped gradient in an update of the step in float64."""
    return torch.load(room / f"gradient-{number}" / name, weights_only=True)

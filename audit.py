"""Do one step of a run of train_grpo.py again by hand, and compare every number with the run's.

    python audit.py runs/guess-0 [--step 20] [--all] [--html page.html]

This file is for an auditor who does not trust the trainer: no batch, padding, packing, cache, tree,
plan, sum over ranks, backward or optimizer. It shares no arithmetic with it. It trusts the forward
of models.py for one sequence at a time, the task, and the ordinary code up to a checkpoint. Above
the ruler is the whole of a step, by loops over tokens, and it needs torch alone. Below it the
numbers are compared with a run's files.

For token t of rollout i with reward R_i: lp, old, ref and smp are its log-probs under the policy
now, the policy before the step, the reference and the sampler. H is the entropy, v a critic's
value, g the return that it should have predicted. c holds the run's settings.

    (1)  A = (R_i - mean R) * scale       of its group, or another of ADVANTAGES
    (2)  r = exp(lp - old)
    (3)  l = -min(r A, clip(r, 1 - low, 1 + high) A)         or another of OBJECTIVES
    (4)  l <- x l                         x = exp(old - smp), truncated or masked
    (5)  l <- l + kl_coef k(lp - ref) - entropy_coef H
    (6)  l <- l + value_coef max((v - g)^2, (clip(v, v_old +- 0.2) - g)^2) / 2
    (7)  loss = sum over all sampled tokens of w l / Z
    (8)  balance = balance_coef * mean over sequences of E / (K N^2) sum_e counts_e sum_n p_ne
    (11) votes_e <- votes_e + sign(mean of counts - counts_e)    the bias of the router's choice

Of E experts, the router chooses K for each of a sequence's N tokens; p are its probabilities.
"""

import math
from dataclasses import dataclass, field

import torch


# 1. A sequence by itself ----------------------------------------------------------------------
# What is known of a rollout, and the log-probs that a causal language model gives its tokens.


@dataclass
class Recorded:
    """A rollout from the run's files. Its lists have one entry for each sampled token."""

    group: int
    number: int  # in its group
    tokens: list
    # Where the sampled tokens are: tokens[at + 1] is predicted from tokens[: at + 1].
    at: list = field(default_factory=list)
    smp: list = field(default_factory=list)  # log-probs by the sampler, as the run recorded them
    rewards: list = field(default_factory=list)  # (`at` of a turn's last token, reward)
    truncated: bool = False
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


@torch.no_grad()
def numbers_alone(model, s, temperature):
    """Return the log-probs and the values of `score_alone` as numbers."""
    lp, _, v = score_alone(model, s, temperature)
    return numbers_of(lp), numbers_of(v)


def entry(table, name, title):
    """Return an entry of a table. ValueError, for a setting that this file does not know."""
    if name not in table:
        raise ValueError(f"audit.py does not know {name!r}: add it to {title} in audit.py")
    return table[name]


# 2. Advantages --------------------------------------------------------------------------------
# Equation (1): how much better a rollout was than its group, and the other choices of --advantage.


def divergence(c, d):
    """Return k of (5) for differences of log-probs, a tensor."""
    return entry({"k1": d, "k3": (-d).exp() + d - 1}, c.kl, "`divergence`")


def penalties(c, s) -> list:
    """Return how much of its reward each sampled token loses by `--kl-in reward`."""
    if c.kl_in != "reward" or not c.kl_coef:
        return [0.0] * len(s.at)
    d = torch.tensor(s.smp, dtype=torch.float64) - torch.tensor(s.ref, dtype=torch.float64)
    return (c.kl_coef * divergence(c, d)).tolist()


def overlong_penalty(c, s) -> float:
    """Return what `--overlong-buffer` takes off a reward: new tokens in the buffer / its size."""
    if not c.overlong_buffer:
        return 0.0
    new = len(s.tokens) - s.prompt
    return max(0, new - c.max_new_tokens + c.overlong_buffer) / c.overlong_buffer


def lowered_rewards(c, group) -> list:
    """Return the rewards of a group's rollouts, less what lowers them."""
    return [s.reward - math.fsum(penalties(c, s)) - overlong_penalty(c, s) for s in group]


def spread_of(numbers, free=0) -> float:
    """Return a standard deviation. free: 1 for the estimate of a larger whole, by G - 1 of G."""
    mean = math.fsum(numbers) / max(1, len(numbers))
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / max(1, len(numbers) - free))


def whiten(sequences):
    """Give the A of all sampled tokens of these sequences the mean 0 and the spread 1."""
    raw = [A for s in sequences for A in s.A]
    mean = math.fsum(raw) / max(1, len(raw))
    spread = spread_of(raw)
    for s in sequences:
        s.A = [(A - mean) / (spread + 1e-8) for A in s.A]  # (1)


def against_the_group(c, state, groups):
    """Set A to what a rollout's reward is above the mean of its group, times a scale."""
    # Rewards 1 0 0 0 have the mean 0.25, so A is 0.75 -0.25 -0.25 -0.25. group_std divides by 0.5,
    # leave_one_out by 3/4: the mean of the others is 0, so the first is 1 better. batch_std divides
    # by the spread of all groups. Truncated rollouts count.
    all_R = [lowered_rewards(c, group) for group in groups]
    for group, R in zip(groups, all_R):
        G = len(R)
        spread = spread_of(sum(all_R, []) if c.advantage == "batch_std" else R, free=1)
        scale = {"group_mean": 1.0, "leave_one_out": G / max(1, G - 1)}
        for s, r in zip(group, R):
            # Equal rewards teach nothing, whatever rounding makes of r - mean.
            centered = r - math.fsum(R) / G if min(R) < max(R) else 0.0
            s.A = [centered * scale.get(c.advantage, 1 / (spread + 1e-4))] * len(s.at)  # (1)


def without_baseline(c, state, groups):
    """Set A to the reward; `none_batch` whitens it over the step's tokens."""
    R = [lowered_rewards(c, group) for group in groups]
    for s, reward in zip(sum(groups, []), sum(R, [])):
        s.A = [reward] * len(s.at)  # (1)
    if c.advantage == "none_batch":
        whiten(sum(groups, []))
        for s in sum(groups, []) if len({*sum(R, [])}) == 1 else ():
            s.A = [0.0] * len(s.at)  # equal rewards


def of_branches(c, state, groups):
    """Set A to the mean reward of the rollouts that share a segment, less its parent's."""
    # With 2 forks at each of 2 turns and rewards 1 0 0 0, the root is worth 1/4, the segment of the
    # first two rollouts 1/2, and the rest of the first 1. So its A is 0, then 1/4, then 1/2.
    for group in groups:
        R = lowered_rewards(c, group)
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


def of_a_critic(c, state, groups):
    """Set v_old, A and g: A is the sum over n of gae_lambda^n delta_(t+n), whitened."""
    # The definition sums over all tokens that follow; a trainer has a recursion.
    sequences = trained(c, sum(groups, []))
    for s in sequences:
        _, s.v_old = numbers_alone(state.model, s, c.temperature)

        # A turn's reward belongs to the last token that was sampled in it. After the last token
        # nothing more is expected.
        u = [-penalty for penalty in penalties(c, s)]
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


def of_a_teacher(c, state, groups):
    """Set A to the teacher's log-prob less the sampler's."""
    for s in sum(groups, []):
        scores, _ = numbers_alone(state.teacher, s, c.temperature)
        s.A = [score - smp for score, smp in zip(scores, s.smp)]  # (1)


ADVANTAGES = {  # name -> f(c, the State before the step, groups), which sets A of all rollouts
    "group_mean": against_the_group, "group_std": against_the_group,
    "leave_one_out": against_the_group, "batch_std": against_the_group,
    "none": without_baseline, "none_batch": without_baseline,
    "per_branch": of_branches, "gae": of_a_critic, "teacher": of_a_teacher,
}  # fmt: skip


# 3. The loss ----------------------------------------------------------------------------------
# Equations (2) to (7), token by token. They are also what train_grpo.py's tests compare with.
# The terms of an objective are (r, whether it clips, l) for each sampled token. The page of
# `--html` takes the equation from the docstring.


def ratio(d):
    """Return r for a difference of log-probs, a 0-d tensor."""
    return d.clamp(-10, 10).exp()  # (2)


def differences(s) -> list:
    """Return lp - old of each sampled token."""
    return [lp - old for lp, old in zip(s.lp, s.old)]


def clip_terms(c, s, ds=None):
    """Return the terms of l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""
    # The gain is r A. The clip takes the worse of the gain and the gain at the clipped ratio: once
    # a token has moved far enough in the direction that A asks for, its gain is a constant, and its
    # gradient is zero. A move the wrong way is never clipped. A dual clip bounds the r of the gain.
    found = []
    most = c.dual_clip or math.inf
    for d, A in zip(ds or differences(s), s.A):
        r = ratio(d)
        gain = min(r, most) * A
        clipped_gain = min(max(r, 1 - c.clip_low), 1 + c.clip_high) * A
        clips = clipped_gain < gain or r > most or abs(d) > 10
        found.append((r, clips, -min(gain, clipped_gain)))  # (3)
    return found


def gspo_terms(c, s):
    """Return the terms of l = -min(r A, clip(r, ..) A), r = exp(mean of lp - old)."""
    ds = differences(s)
    return clip_terms(c, s, [sum(ds) / len(ds)] * len(ds))


def reinforce_terms(c, s):
    """Return the terms of l = -A lp."""
    return [(ratio(d), False, -A * lp) for d, A, lp in zip(differences(s), s.A, s.lp)]  # (3)


def cispo_terms(c, s):
    """Return the terms of l = -min(r, cispo_bound) A lp, where min(r, ..) is a number."""
    found = []
    for d, A, lp in zip(differences(s), s.A, s.lp):
        r = ratio(d)
        bounded = min(r.item(), c.cispo_bound)
        found.append((r, bounded != r.item(), -bounded * A * lp))  # (3)
    return found


def sapo_terms(c, s):
    """Return the terms of l = -4 / tau sigmoid(tau (r - 1)) A, tau 1 if A > 0 else 1.05."""
    found = []
    for d, A in zip(differences(s), s.A):
        r, tau = ratio(d), 1.0 if A > 0 else 1.05
        found.append((r, False, -4 / tau * torch.sigmoid(tau * (r - 1)) * A))  # (3)
    return found


def gmpo_terms(c, s):
    """Return the terms of l = -exp(mean of clipped lp - old) A, clipped by the sign of A."""
    # A bound is a number, so a clipped token has no gradient.
    ds = differences(s)
    kept = [min(d, c.clip_high) if A > 0 else max(d, -c.clip_low) for d, A in zip(ds, s.A)]
    mean_ratio = ratio(sum(kept) / len(kept) + s.lp[0] * 0)
    return [(ratio(d), bool(d != bounded), -mean_ratio * A)  # (3)
            for d, bounded, A in zip(ds, kept, s.A)]  # fmt: skip


def dppo_excess(c, lp, old, A) -> float:
    """Return how far a token's probability is past the bound on its move from exp(old)."""
    return abs(math.exp(lp) - math.exp(old)) - (c.clip_high if A > 0 else c.clip_low)


def dppo_terms(c, s):
    """Return the terms of l = -min(r, 20) A lp, 0 where the probability has moved too far."""
    found = []
    for lp, old, A in zip(s.lp, s.old, s.A):
        r = ratio(lp - old)
        clips = dppo_excess(c, lp.item(), old, A) > 0 and (lp.item() > old) == (A > 0)
        weight = 0.0 if clips else min(r.item(), 20.0)
        found.append((r, clips, -weight * A * lp))  # (3)
    return found


OBJECTIVES = {
    "clip": clip_terms, "gspo": gspo_terms, "reinforce": reinforce_terms, "cispo": cispo_terms,
    "sapo": sapo_terms, "gmpo": gmpo_terms, "dppo": dppo_terms,
}  # fmt: skip


def sampler_weights(c, s) -> list:
    """Return x of (4) for each sampled token: how much too rarely the sampler has drawn it."""
    if not c.importance_cap:
        return [1] * len(s.lp)

    # The weight is of the token, of its sequence, or of the mean of its sequence.
    log_x = [old - smp for old, smp in zip(s.old, s.smp)]
    N, total = len(log_x), math.fsum(log_x)
    choices = {"token": log_x, "sequence": [total] * N, "geometric": [total / N] * N}
    x = [math.exp(y) for y in entry(choices, c.importance_of, "`sampler_weights`")]

    # Bounds 0.5 and 2: `truncate` makes 3 a 2, `mask` a 0; both keep 1.5.
    low, high = c.importance_low, c.importance_cap
    choices = {"truncate": [min(max(y, low), high) for y in x],  # (4)
               "mask": [y if low <= y <= high else 0.0 for y in x]}  # fmt: skip
    return entry(choices, c.importance, "`sampler_weights`")


def loss_definition(sequences, Z, c):
    """Return the loss of a batch, (2) to (7), a 0-d tensor. Set the `terms` of each sequence.

    sequences: lp, H and v hold 0-d tensors, all other lists numbers. v and ref may be None.
    """
    loss = torch.zeros(())
    objective = entry(OBJECTIVES, c.objective, "OBJECTIVES")
    for s in sequences:
        s.terms = []
        x = sampler_weights(c, s)
        for t, (r, clips, l) in enumerate(objective(c, s)):
            l = x[t] * l  # (4)
            term = dict(r=r, clips=clips, x=x[t], H=s.H[t], policy=s.w * l / Z, k=0.0, value=0.0)
            if s.ref is not None:
                term["k"] = divergence(c, s.lp[t] - s.ref[t])
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


# 4. Experts -----------------------------------------------------------------------------------
# The loss that balances experts, and the bias of their choice. If the model has none, skip it.


@dataclass
class Routed:
    """How the routers routed one sequence by itself."""

    balance: float  # the sequence's part of (8)
    counts: dict  # layer -> tensor, how many of its tokens went to each expert
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
        counts = torch.bincount(chosen_NK.flatten(), minlength=E)
        b = (counts * p_NE.sum(0)).sum() * E / (K * N * N)
        parts.append(c.balance_coef * b / sequences)  # (8)
        found.counts[layer] = counts.double()

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
    found.balance = float(balance.detach())
    return found


def sum_of_counts(routed) -> dict:
    """Return layer -> how many tokens of these sequences went to each expert."""
    return {layer: sum(one.counts[layer] for one in routed) for layer in routed[0].counts}


def move_votes(model, routed):
    """Move the votes of each router by (11): experts with too few tokens become likelier."""
    for layer, counts in sum_of_counts(routed).items():
        votes = (counts.mean() - counts).sign().long()  # (11)
        model.model.layers[layer].mlp.votes += votes


# 5. A step ------------------------------------------------------------------------------------
# The policy's weights with AdamW, and the step itself: all of the above is for `step_by_hand`.


@dataclass
class State:
    """A policy with its optimizer. A step turns the state before it into the state after it."""

    model: object
    weights: dict  # name -> what AdamW moves: a parameter, or in mixed precision its master
    moments: dict  # name -> [steps, m, v] of AdamW
    reference: object = None  # the model that the KL is measured against
    teacher: object = None  # the model of --teacher
    version: int = 0  # optimizer steps taken
    skipped: int = 0  # optimizer steps skipped, because a gradient was not finite
    updates: list = field(default_factory=list)  # of the step, as `step_by_hand` returns them

    def keep(self, shrink):
        """Keep an update's gradient if it is needed later. Return how far rounding makes it off."""
        return 0.0

    @torch.no_grad()
    def adamw(self, c, lr, shrink):
        """Take one AdamW step with the gradients times `shrink`, in place, in float32 at least."""
        for name, p in self.model.named_parameters():
            weight = self.weights[name]
            wide = torch.promote_types(weight.dtype, torch.float32)
            self.moments[name][0] += 1
            steps, *means = self.moments[name]
            for tensors in pieces([weight.detach(), *means, p.grad]):
                *now, g = [x.to(wide) for x in tensors]
                for x, new in zip(tensors, adamw_of(c, lr, steps, *now, shrink * g)):
                    x.copy_(new)
            if weight is not p:
                p.copy_(weight.to(getattr(torch, c.compute_dtype)))


def pieces(tensors):
    """Cut flat views of tensors of one size, some of which are large, into short pieces."""
    return zip(*(x.view(-1).split(2**20) for x in tensors))


def adamw_of(c, lr, steps, weight, m, v, g):
    """Return the weight, m and v after AdamW's step number `steps`, with the clipped gradient g."""
    # The decaying means of g and g^2 begin at 0, so they are divided by the share that they have
    # seen. Weight decay does not go through the gradient.
    m = 0.9 * m + 0.1 * g
    v = c.beta2 * v + (1 - c.beta2) * g * g
    size = (v / (1 - c.beta2**steps)).sqrt() + 1e-8
    return (1 - lr * c.weight_decay) * weight - lr * m / (1 - 0.9**steps) / size, m, v


def rate_by_hand(c, step) -> float:
    """Return the learning rate of a step: a linear rise, then `--lr-decay` to the last step."""
    # Warm-up 2 of 10 steps: .5 1 of --lr, then 1 .875 .75 .. down to .125 where it is linear. With
    # --lr-first-step zero the warm-up is 0 .5.
    # The warm-up is at most the whole run: the default 5 is 2 under --steps 2, .5 1 of --lr.
    warmup = min(c.lr_warmup, c.steps)
    if step < warmup:
        begun = 1 if c.lr_first_step == "nonzero" else 0
        return c.lr * (step + begun) / warmup
    done = (step - warmup) / (c.steps - warmup)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return c.lr * entry(left, c.lr_decay, "`rate_by_hand`")


def step_by_hand(c, groups, state, lr) -> list:
    """Do a whole step by (1) to (11), in place. Return a dict for each optimizer step.

    groups: lists of Recorded rollouts, the groups that the step trains on, in order.
    state: the State before the step, in the precision to compute in. lr: the learning rate.
    """
    # Before the first update: the reference's log-probs, and `old`, by the policy or the sampler.
    # None: every ratio is 1. An `old` that is set stays; see `in_precision`.
    for s in [s for group in groups for s in group]:
        if state.reference is not None:
            s.ref, _ = numbers_alone(state.reference, s, c.temperature)
        if c.proximal and s.old is None:
            s.old, _ = numbers_alone(state.model, s, c.temperature)
        if (c.minibatches > 1 or c.staleness) and not c.proximal:
            s.old = s.smp
    entry(ADVANTAGES, c.advantage, "ADVANTAGES")(c, state, groups)
    state.reference = state.teacher = None  # their memory is the gradient's

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
        routed = []
        if state.model.config.sparse_layers:
            routed = [route_alone(c, state.model, s, len(batch)) for s in batch]

        # Clip the whole gradient by its norm, then AdamW. If it is not finite, it is only counted.
        norms = [p.grad.norm(dtype=torch.float64).item() for p in state.model.parameters()]
        norm = math.hypot(*norms)
        shrink = c.max_grad_norm / norm if norm > c.max_grad_norm else 1.0
        updates.append(dict(batch=batch, version=state.version, norm=norm, shrink=shrink,
                            off=state.keep(shrink), routed=routed))  # fmt: skip
        if math.isfinite(norm):
            state.adamw(c, lr, shrink)
            if c.router_bias_rate:
                move_votes(state.model, routed)
            state.version += 1
        else:
            state.skipped += 1
    return updates


# =============================================================================================
# The step by hand ends here. What follows measures it and compares it with a run's files.
# =============================================================================================

import argparse  # noqa: E402
import copy  # noqa: E402
import dataclasses  # noqa: E402
import gc  # noqa: E402
import html  # noqa: E402
import os  # noqa: E402
import string  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import NamedTuple  # noqa: E402

import numpy as np  # noqa: E402

import models  # noqa: E402
import parallel  # noqa: E402
from train_grpo import (  # noqa: E402
    ERRORS, EVALUATION, METRICS, ONE_PROCESS, ROLLOUT, Demonstrations, RolloutQueue, Sampler,
    TaskError, Trainer, Trajectory, asking, build, build_teacher, do_step, draw_prompts,
    keep_states_wide, make_task, one_process, pending_batches, play, policy_in, read_reference,
    resumed_config, rollout_line, uniforms, whole_lines,
)  # fmt: skip


# 6. The metrics of a step ---------------------------------------------------------------------
# The numbers of a line of metrics.jsonl, from the rollouts and updates of a step by hand. Each
# metric's definition is here, a second time.

# What no step determines. A line's other numbers must be found here, or are named as unknown.
NOT_BY_HAND = ("seconds/", "memory/peak", "logprob_gap/identical", "tokens/trained")
OF_UPDATES = [name for name, x in METRICS.items() if x.over_updates in ("mean", "max")]


def order() -> list:
    """Return the rows of the table, causes before their effects, by train_grpo.py's METRICS."""
    # The first row that is outside says where to look. The first update's metrics come before those
    # that a change of the weights has a part in.
    rows = ["rollouts/groups", "rollouts/tokens", "rollouts/sampled", "sampling",
            "rollouts/rewards"]  # fmt: skip
    for name in METRICS:
        if name == OF_UPDATES[0]:
            rows += ["rollouts/advantage", *(f"{name}_first" for name in OF_UPDATES)]
        rows.append(name)
    return [*rows, "votes", "parameters"]


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


def sum_of(values) -> Measured:
    return Measured(math.fsum(values), np.array(values, dtype=np.float64))


def mean_of(values) -> Measured:
    return sum_of(np.array(values, dtype=np.float64) / max(1, len(values)))


def largest_of(values) -> Measured:
    terms = np.array(values, dtype=np.float64)
    return Measured(float(abs(terms).max(initial=0.0)), terms, math.inf)


def deviation_of(values) -> Measured:
    """Measure a standard deviation: the length of all deviations over the root of their number."""
    mean = math.fsum(values) / max(1, len(values))
    terms = (np.array(values) - mean) / math.sqrt(max(1, len(values)))
    return Measured(math.sqrt(math.fsum(terms * terms)), terms, 2)


def teaches(config, group) -> bool:
    """Return whether a group is trained on: dynamic sampling drops groups of equal rewards."""
    return not config.dynamic_sampling or len({s.reward for s in group}) > 1


def metrics_by_hand(config, groups, state, step, sampled_by) -> dict:
    """Do a step by hand and return {metric: Measured}; changes `groups` and `state`.

    groups: {number: its Recorded rollouts}, all that were played, in order.
    sampled_by: optimizer steps that the sampler's weights had taken.
    """
    chosen = [group for group in groups.values() if teaches(config, group)]
    lr = rate_by_hand(config, step)
    state.updates = updates = step_by_hand(config, chosen, state, lr)

    # Rewards and lengths are of all groups, dropped ones included. A critic compares the rewards of
    # the whole step. The age is of the sampler's weights, in steps.
    played = [s for group in groups.values() for s in group]
    solved = [[s.reward >= 1 for s in group] for group in groups.values()]
    compared = [played] if config.advantage in ("gae", "none_batch") else groups.values()
    lengths = [len(s.at) for s in played]
    sequences = trained(config, [s for group in chosen for s in group])
    A = [A for s in sequences for A in s.A]
    tokens = sum(len(s.tokens) for u in updates for s in u["batch"])
    age = min(step, config.staleness)
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
        "lr": Measured(lr), "policy_version": Measured(state.version),
        "updates/skipped": Measured(state.skipped), "tokens/trained_flat": Measured(tokens),
        "policy/age_mean": Measured(age), "policy/age_max": Measured(age),
    }  # fmt: skip

    # How many tokens a tree runs depends on where it is cut, which no equation says.
    if config.tree == "disabled":
        found["tokens/trained"] = Measured(tokens)
    if config.advantage == "gae":
        found |= critic_metrics(sequences)

    # With several updates the line also has the metrics of the first by itself: only that update
    # sees the weights from before the step.
    if len(updates) > 1:
        first = update_metrics(config, updates[:1], sampled_by)
        found |= {f"{name}_first": x for name, x in first.items() if name in OF_UPDATES}
    return found | update_metrics(config, updates, sampled_by) if updates else found


def critic_metrics(sequences) -> dict:
    """Measure the critic's values, and which part of the returns' variance they explain."""
    v = [v for s in sequences for v in s.v_old]
    g = [g for s in sequences for g in s.g]
    a = deviation_of([g - v for g, v in zip(g, v)])
    b = deviation_of(g)
    explained = 1 - a.value**2 / b.value**2 if b.value**2 > 1e-12 else 0.0

    # The change of a^2 / b^2 is 2 a^2 / b^2 times the sum of the relative changes of a and b. The
    # last term is of a size that counts what the run loses by b^2 = mean g^2 - (mean g)^2.
    relative = [one.terms / max(one.value, 1e-300) for one in (a, b)]
    lost = mean_of(np.square(g)).value / max(b.value**2, 1e-300)
    terms = 2 * math.sqrt(2) * (1 - explained) * np.concatenate([*relative, [lost]])
    return {"value/token_mean": mean_of(v),
            "value/explained_variance": Measured(explained, terms, 2)}  # fmt: skip


def update_metrics(c, updates, sampled_by) -> dict:
    """Measure updates: means over them, and the largest of all."""
    U = len(updates)
    batches = [trained(c, u["batch"]) for u in updates]
    sequences = [s for batch in batches for s in batch]
    terms = [term for s in sequences for term in s.terms]
    for term in terms:
        term["masked"] = term["x"] == 0

    def mean(name, per_token=True):
        # A mean over the tokens of an update, whatever the loss is divided by. The parts of the
        # loss are divided by Z already, so they are summed. Then the mean over updates.
        values = []
        for batch in batches:
            count = max(1, sum(len(s.at) for s in batch)) if per_token else 1
            values += [term[name] / count / U for s in batch for term in s.terms]
        return sum_of(values)

    # The gap to the sampler is of the first update alone, where both have the same weights and
    # differ by rounding alone. The mean of the updates' norms is at most the root of the mean of
    # their squares, which is the length of a vector of all gradients. In float64 `off` is 0, in the
    # second precision how far a gradient is from that.
    gaps = np.array([lp - x for s in batches[0] for lp, x in zip(s.lp, s.smp)])
    off = np.array([u["off"] for u in updates]) / math.sqrt(U)
    decided = dict(each=1 / max(1, len(terms)))
    margins = np.array([x for s in sequences for x in clip_margins(c, s)])
    found = {
        "logprob_gap/max": largest_of(gaps),
        "logprob_gap/mean": mean_of(abs(gaps))._replace(terms=gaps / max(1, len(gaps))),
        "logprob_gap/kl": mean_of(np.expm1(gaps) - gaps),
        "policy_age/update_mean": mean_of([u["version"] - sampled_by for u in updates]),
        "ratio/token_mean": mean("r"),
        "ratio/max": largest_of([term["r"] for term in terms]),
        "ratio/clipped_fraction": mean("clips")._replace(margins=margins, **decided),
        "entropy/token_mean": mean("H"),
        "loss/policy_token_mean": mean("policy", per_token=False),
        "loss/token_mean": mean("part", per_token=False),
        "grad_norm": Measured(math.fsum(u["norm"] for u in updates) / U, off, 2),
    }  # fmt: skip
    if any(s.ref is not None for s in sequences):
        found["kl/token_mean"] = mean("k")
    if c.advantage == "gae":
        found["value/loss"] = mean("value")
    if c.importance_cap:
        bounds = [c.importance_low, c.importance_cap]
        margins = np.array([term["x"] - bound for term in terms for bound in bounds])
        masked = mean("masked")._replace(margins=margins, **decided)
        found["importance/masked_fraction"] = masked
    return found | expert_metrics(c, updates) if updates[0]["routed"] else found


def clip_margins(c, s) -> list:
    """Return how far each token of a rollout that was trained on is from where it clips."""
    # A margin to each bound, not only to the nearest one: a ratio of 1 is in the middle of 0.8 and
    # 1.2, and rounding would decide which margin is compared.
    if c.objective == "dppo":
        return [dppo_excess(c, *token) for token in zip(s.lp, s.old, s.A)]
    if c.objective == "gmpo":
        return [d - bound for d in differences(s) for bound in (-c.clip_low, c.clip_high)]
    bounds = [1 - c.clip_low, 1 + c.clip_high] + [c.dual_clip] * (c.dual_clip > 0)
    bounds = {"cispo": [c.cispo_bound], "reinforce": [], "sapo": []}.get(c.objective, bounds)
    return [term["r"] - bound for term in s.terms for bound in bounds]


def expert_metrics(c, updates) -> dict:
    """Measure the largest load of all updates and layers, and the loss of balance."""
    # Two experts may be so near that rounding decides which of them a token goes to. The token is
    # then one more of all tokens of an expert, of which `each` is the fraction of the mean.
    routed = [r for u in updates for r in u["routed"]]
    layers = [n for u in updates for n in sum_of_counts(u["routed"]).values()]
    load = max(float(n.max() / n.mean()) for n in layers)
    each = 1 / min(float(n.mean()) for n in layers)
    loads = Measured(load, margins=np.concatenate([r.margins for r in routed]), each=each)
    if not c.balance_coef:
        return {"experts/load_max": loads}

    # In (8) such a token changes one count, of a sequence of N tokens, by one of K N.
    balance = sum_of([r.balance / len(updates) for r in routed])
    each = max(c.balance_coef / float(n.mean()) / len(u["routed"])
               for u in updates for r in u["routed"] for n in r.counts.values())  # fmt: skip
    balance = balance._replace(margins=loads.margins, each=each)
    return {"experts/load_max": loads, "balance/loss": balance}


# 7. What rounding explains --------------------------------------------------------------------
# How far a recorded number may be from the one by hand. If you trust the column `allowed`, skip it.

# Everything is done twice: in float64, to be compared with what the run recorded, and in the run's
# precision, to know how much of a difference rounding can explain. A recorded number and the one by
# hand may differ by TIMES the distance of these two and a unit in the last place. After n steps
# that had to be done again on the way, LATER + 2 n times as much is allowed, since each step adds
# its rounding.
TIMES = 8
LATER = 10
UNDECIDED = "rounding decides which updates are finite, so nothing is comparable"


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

    @property
    def share(self):
        """Return the difference as a fraction of what is allowed: the row is outside above 1."""
        return self.difference / max(self.allowed, 1e-300)


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
            raise ValueError(UNDECIDED)
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
        # JSON has no NaN: what is not finite is written as null.
        difference = abs(recorded - exact.value)
        if math.isnan(difference):
            agree = math.isnan(recorded) and not math.isfinite(exact.value)
            difference = 0.0 if agree else math.inf
        return Audited(key, recorded, exact.value, difference, self.allowed(exact, rounded))

    def row_of_many(self, key, differences, exact, rounded) -> Audited:
        """Show the largest of some differences; exact, rounded: the numbers that are compared."""
        worst = float(np.max(differences, initial=0.0))
        pair = largest_of(exact)._replace(value=0.0), largest_of(rounded)
        return Audited(key, 0.0, worst, worst, self.allowed(*pair))


@dataclass
class Exact(State):
    """The State of the step in float64. It keeps its gradients in files of a directory."""

    case: object = None

    def keep(self, shrink):
        """Write an update's clipped gradient, for `kept`."""
        folder = self.case.room / f"gradient-{len([*self.case.room.glob('gradient-*')])}"
        folder.mkdir()
        for name, p in self.model.named_parameters():
            torch.save(shrink * p.grad, folder / name)
        return 0.0


class Gradient(NamedTuple):
    """The rounding of a weight's gradient, in one update."""

    largest: float  # of all entries
    usual: float  # the root of their mean square
    uncertain: torch.Tensor  # for each entry, whether it is anything but 0


@dataclass
class Displaced(State):
    """The State of the second precision: it measures the rounding of gradients, and by it weights.

    AdamW divides by the root of v. So where gradients nearly cancel, rounding decides in which
    direction an entry moves by about lr, and where the gradient is large, rounding changes next to
    nothing. How far rounding has moved some entries is therefore no measure of the others. What is
    measured is the rounding of a tensor's gradient; `after` says how far an entry may move by it.
    For the next update the weights are those in float64, each displaced in a random direction as
    far as usual rounding may move it. Its gradients then show the rounding of both updates.
    """

    case: object = None
    exact: list = ()  # the updates of the step in float64
    roundings: list = field(default_factory=list)  # of each update, {name: Gradient}
    done: list = field(default_factory=list)  # numbers of the updates that moved the weights
    generator: object = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def kept(self, number, name):
        """Return a weight's clipped gradient in an update of the step in float64."""
        return torch.load(self.case.room / f"gradient-{number}" / name, weights_only=True)

    @torch.no_grad()
    def keep(self, shrink):
        """Measure the rounding of this update's gradients. Return how far off they are."""
        number = len(self.roundings)
        off, found = [], {}
        for name, p in self.model.named_parameters():
            # What is 0 in both precisions, as for a token that no sequence has, has no rounding.
            # Clipping hides how long a gradient is, so `off` is of whole ones.
            exact = self.kept(number, name)
            off.append((exact / self.exact[number]["shrink"] - p.grad).norm().item())
            away = (exact - shrink * p.grad).abs_()
            usual = away.norm().item() / math.sqrt(away.numel())
            found[name] = Gradient(away.max().item(), usual, (exact != 0) | (p.grad != 0))
        self.roundings.append(found)
        return math.hypot(*off)

    @torch.no_grad()
    def adamw(self, c, lr, shrink):
        """Displace the weights by the rounding of the updates so far."""
        self.done.append(len(self.roundings) - 1)
        for name, *stored in self.case.stored(self.model):
            # A distance is as good in one direction as in the other.
            p = self.model.get_parameter(name)
            changes = [[self.roundings[n][name].usual] for n in self.done]
            weight, distance = self.after(name, stored, changes, torch.finfo(p.dtype).eps)
            sign = 2 * torch.randint(0, 2, p.shape, generator=self.generator) - 1
            self.weights[name].copy_(weight + sign * distance)
            p.copy_(self.weights[name])

    def allowed(self, name, stored, scale, unit):
        """Return a weight after the step in float64, and how far a run's may be from it."""
        largest = [scale * self.roundings[n][name].largest for n in self.done]
        return self.after(name, stored, [[x, TIMES * x] for x in largest], unit)

    def after(self, name, stored, changes, unit):
        """Return a weight after the updates so far, in float64, and how far rounding may move it.

        stored: the weight before the step, and AdamW's steps, m and v.
        changes: for each update, of which sizes a change of its gradient may be.
        unit: of the weights' precision, relative.
        """
        c, lr = self.case.config, rate_by_hand(self.case.config, self.case.step)
        begun, steps, *means = stored
        weight, distance = (torch.empty(begun.shape, dtype=torch.float64) for _ in range(2))
        tensors = [weight, distance, begun, *means]
        for n in self.done:
            tensors += [self.kept(n, name), self.roundings[n][name].uncertain]
        for x, far, *before in pieces(tensors):
            state = [number.double() for number in before[:3]]
            gradients, uncertain = before[3::2], before[4::2]
            moves = moves_of(c, lr, steps, state, gradients)
            x.copy_(state[0] + moves.sum(0))

            # An entry moves by its own gradients alone. It may go as far astray as it does if one
            # of them is larger or smaller: near a gradient of 0 by up to 2 lr. The distances of all
            # moves are summed, so that none cancels another. Besides, each update rounds a weight
            # twice, and the length of its step a few times.
            far.copy_(len(changes) * unit * (state[0].abs() + TIMES * lr))
            for n, sizes in enumerate(changes):
                astray = []
                for by in [by for size in sizes for by in (size, -size)]:
                    changed = [*gradients]
                    changed[n] = changed[n] + by * uncertain[n]
                    other = moves_of(c, lr, steps, state, changed)
                    astray.append((other - moves).abs().sum(0))
                far += torch.stack(astray).amax(0)
        return weight, distance


def moves_of(c, lr, steps, state, gradients):
    """Return how far updates with these gradients move a weight: (updates, entries).

    state: the weight, m and v before the first of them, after AdamW's step number `steps`.
    """
    found = []
    for n, g in enumerate(gradients, 1):
        then = adamw_of(c, lr, steps + n, *state, g)
        found.append(then[0] - state[0])
        state = then
    return torch.stack(found)


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
        given = {name: spec for name, spec in (("task", task), ("reward", reward)) if spec}
        config = resumed_config(self.path / "config.json", given)

        # One process needs no plan. It keeps the run's tree.
        self.config = dataclasses.replace(config, device="cpu", **ONE_PROCESS).check()

        # A line a step, from 0. The last one may be torn, if the run was killed or is alive.
        self.metrics = whole_lines(self.path / "metrics.jsonl")
        for n, line in enumerate(self.metrics):
            if line.get("step") != n:
                raise ValueError(f"line {n + 1} of metrics.jsonl is of step {line.get('step')!r}")
        self.checkpoints = {int(path.name[5:]): path for path in parallel.checkpoints(self.path)}

    def chosen_step(self, step) -> int:
        """Return the step to audit. None: the last that a checkpoint's weights sampled, or 0."""
        if not self.metrics:
            raise ValueError("metrics.jsonl holds no whole line")

        # The last steps of a run were sampled with weights that have no line yet.
        last = len(self.metrics) - 1
        if step is None:
            sampled = [n + self.config.staleness for n in self.checkpoints]
            return max([n for n in sampled if n <= last], default=0)
        if not 0 <= step <= last:
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
                A = line["advantage"]  # None: the group was not trained on
                if len(t.tokens) < 2 or (A is not None and np.shape(A) != t.mask.shape):
                    raise ValueError("expected a number for each target")
                np.array(A, dtype=float)
            except (ValueError, TypeError, KeyError) as error:
                text = f"rollouts.jsonl line {number} is not a rollout: {error}"
                raise ValueError(text) from error

        # At an evaluation step only one group is there, and of a torn file the last is not whole.
        whole = all(group.keys() == {*range(self.config.group)} for group in groups.values())
        if not whole or groups.keys() != {*range(max(len(groups), self.config.prompts))}:
            return None
        return {n: [groups[n][i] for i in sorted(groups[n])] for n in sorted(groups)}


def groups_again(config, task, step, lines) -> dict:
    """Return {group: Recorded rollouts} of lines of rollouts.jsonl."""
    # The prompts are a function of (seed, step, group).
    first = step * config.prompts * config.max_rounds
    groups = {}
    for n, state, prompt in draw_prompts(config, task, ROLLOUT, step, lines, first=first):
        groups[n] = []
        for i, line in enumerate(lines[n]):
            s = Recorded(n, i, line["tokens"])
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
    s.prompt = place = turn = len(prompt)
    s.differs = max(0, len(prompt) - len(tokens))
    s.differs += len([token for token, said in zip(prompt, tokens) if token != said])
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
        reply = reply or ()
        s.differs += len([token for token, said in zip(reply, tokens[place:]) if token != said])
        place = turn = place + len(reply)

    # A rollout ends where the task says so, or at the limit. Tokens past its end were never said,
    # and a rollout that neither ended nor met the limit lacks some.
    limit = len(prompt) + config.max_new_tokens
    s.truncated = not ended
    s.differs += abs(len(tokens) - (min(place, limit) if ended else limit))


@dataclass
class Case:
    """A step to audit: its files, and where the state before it is stored."""

    files: RunFiles
    task: object
    step: int
    room: Path  # a directory for the time of the audit
    lines: dict | None  # group -> its lines of rollouts.jsonl
    before: Path | None = None  # the checkpoint before the step
    sampler: Path | None = None  # the checkpoint whose weights sampled
    again: int = 0  # steps that were done again on the way to `before`
    groups: dict | None = None  # number -> its Recorded rollouts, as `groups_again` makes them
    watch: object = lambda: None  # noqa: E731, called after each reading of a rollout

    @property
    def config(self):
        return self.files.config

    def find_states(self, say):
        """Find or make the checkpoints, and the lines if they are missing.

        say: a function. It gets a sentence for each part of the way.
        """
        # Checkpoint step-M is the state before step M. The sampler's weights are from `staleness`
        # steps before. Without these two, or the lines, the ordinary code has to come along.
        sampled_at = max(0, self.step - self.config.staleness)
        stored = self.files.checkpoints
        if self.lines is not None and {self.step, sampled_at} <= stored.keys():
            self.before, self.sampler = stored[self.step], stored[sampled_at]
            say(f"from {self.before.name}, the state before step {self.step}")
        else:
            self.walk(sampled_at, say)
            gc.collect()  # the trainer is gone, and its memory is needed

        # A damaged checkpoint is named now, and not after an hour.
        model = build(self.config, self.task)[0]
        for path in {self.before, stored.get(self.step + 1, self.before)}:
            for _ in self.stored(model, path):
                pass

    def walk(self, sampled_at, say):
        """Do the steps from the last checkpoint that is early enough, and store what is needed."""
        config, task, step = self.config, self.task, self.step
        model, generator, reference = build(config, task)
        teacher = build_teacher(config, task)
        trainer = Trainer(config, model, generator=generator, reference=reference, teacher=teacher)
        start = max([n for n in self.files.checkpoints if n <= sampled_at], default=0)
        self.again = step - start
        pending = {}
        if start in self.files.checkpoints:
            path = self.files.checkpoints[start]
            state = trainer.load_checkpoint(path)
            if state["step"] != start:
                raise ValueError(f"{path.name} is of another step")
            pending = pending_batches(config, trainer, path, state)
            say(f"from {path.name}, the state before step {start}")
        else:
            # Step 0 needs none: its weights are drawn from the seed or read from --model. The
            # supervised steps of --demos leave one, which --keep may have deleted.
            source = Demonstrations(config, task, trainer, -config.demos)
            for n in range(-config.demos, 0):
                do_step(config, source, trainer, n)
            trainer.optimizer.state.clear()  # the loop begins with a new optimizer
            self.again += config.demos
            demos = f", after {config.demos} supervised steps" if config.demos else ""
            say(f"from the first weights, which --seed and --model determine{demos}")
        read_reference(self.files.path, trainer)
        trainer.push_weights()

        # On to the step by the ordinary code, in one process, for as long as it makes the run's own
        # rollouts. In float32 rounding makes it draw a different token sooner or later.
        if step > start:
            say(f"on to step {step} by the ordinary code, in one process: {step - start} steps, "
                f"for which {LATER + 2 * self.again} times as much is allowed")  # fmt: skip
        queue = RolloutQueue(config, task, trainer, start, pending, last=step)
        for n in range(start, step + 1):
            if n in (sampled_at, step):
                path = self.room / f"step-{n:08d}"
                trainer.save_checkpoint(path, step=n)
                self.sampler = path if n == sampled_at else self.sampler
                self.before = path
            if n < step:
                self.require_the_same(n, do_step(config, queue, trainer, n))
        if self.lines is None:
            say("rollouts.jsonl does not hold all rollouts of this step: sampled again, by the "
                "ordinary code")  # fmt: skip
            self.lines = {n: [rollout_line(task, step, i, t) for i, t in enumerate(rollouts)]
                          for n, rollouts in sorted(queue.get(step).groups.items())}  # fmt: skip

    def require_the_same(self, n, found):
        """Raise a ValueError if a step on the way has made other rollouts than the run's."""
        for name in ("tokens/generated", "reward/mean"):
            there = self.files.metrics[n].get(name)
            if not isinstance(there, int | float) or abs(found[name] - there) > 1e-9:
                raise ValueError(
                    f"on the way to step {self.step} one process makes other rollouts than the "
                    f"run: {name} of step {n} is {found[name]} here and {there} in metrics.jsonl; "
                    f"audit a step right after a checkpoint"
                )

    # What the checkpoints hold. Memory never holds the trainer's tensors and those of the step by
    # hand: each is read when it is needed.

    def stored(self, model, path=None):
        """Yield of each weight of a model (name, weight, AdamW's steps, m, v), of a checkpoint."""
        # Each call reads the whole table of contents, so small tensors are read together.
        together, room = [], 0
        for name, p in model.named_parameters():
            room -= p.numel()
            if room < 0:
                together.append([])
                room = 2**24 - p.numel()
            together[-1].append(name)
        dtype = getattr(torch, self.config.dtype)
        for names in together:
            tensors = {}
            for name in names:
                shape = model.get_parameter(name).shape
                for key in (f"model.{name}", *(f"optimizer.{name}.{x}" for x in MOMENTS)):
                    tensors[key] = torch.empty(shape, dtype=dtype)
                tensors[f"optimizer.{name}.step"] = torch.empty((), dtype=torch.float32)
            parallel.read_checkpoint(path or self.before, tensors, only=tuple(tensors))
            for name in names:
                steps = int(tensors[f"optimizer.{name}.step"])
                means = [tensors.pop(f"optimizer.{name}.{x}") for x in MOMENTS]
                yield name, tensors.pop(f"model.{name}"), steps, *means

    def sampling_model(self, path, dtype):
        """Return the model of a checkpoint as the sampler has it, to compute in `dtype`."""
        # A push rounds the weights. The products are in `dtype`.
        model = policy_in(path, self.config, self.task, self.config.rollout_dtype)
        return widened(model, dtype)

    def reference(self, dtype):
        """Return the frozen reference, if the run has one."""
        if not self.config.kl_coef:
            return None
        reference = build(self.config, self.task)[2].to_empty(device="cpu")
        read_reference(self.files.path, SimpleNamespace(reference=reference))
        return widened(reference, dtype)

    def teacher(self, dtype):
        """Return the model of --teacher, if the run has one."""
        if not self.config.teacher:
            return None
        stored = getattr(torch, self.config.compute)
        teacher = models.load_hf(self.config.teacher, dtype=stored).requires_grad_(False)
        return widened(keep_states_wide(self.config, teacher), dtype)

    def state(self, kind, dtype):
        """Return the State before the step, of a kind and in a precision."""
        # In mixed precision what adds up over steps is never coarser than it is in the run.
        config = self.config
        model = policy_in(self.before, config, self.task, str(dtype)[6:]).requires_grad_(True)
        weights = dict(model.named_parameters())
        wide = dtype
        if config.is_mixed:
            wide = torch.promote_types(dtype, getattr(torch, config.dtype))
            weights = {name: p.detach().to(wide, copy=True) for name, p in weights.items()}
        for name, p in model.named_parameters():
            p.grad_dtype = wide
            if config.is_mixed:
                p.data.copy_(weights[name].to(getattr(torch, config.compute_dtype)))
        moments = {}
        if kind is Exact:
            for name, _, steps, m, v in self.stored(model):
                moments[name] = [steps, m.to(wide), v.to(wide)]
        counts = counts_in(self.before)
        return kind(model, weights, moments, self.reference(dtype), self.teacher(dtype),
                    counts["policy_version"], counts["skipped"], case=self)  # fmt: skip


MOMENTS = "exp_avg", "exp_avg_sq"


def counts_in(path) -> dict:
    """Return what a checkpoint counts, such as `policy_version`."""
    return parallel.read_checkpoint(path, {}, only=("no tensor",))


def widened(model, dtype):
    """Return a model in a precision to compute in, its states between layers included."""
    if model.residual_dtype is not None:
        model.residual_dtype = torch.promote_types(model.residual_dtype, dtype)
    return model.to(dtype)


# 9. A step in one precision -------------------------------------------------------------------
# All that is compared: the draws, the metrics, two evaluations and the weights after the step.


@dataclass
class ByHand:
    """A step by hand in one precision."""

    groups: dict  # number -> its Recorded rollouts
    ends: np.ndarray  # (N, 2): between which two numbers lies one that draws the sampled token
    plays: dict = field(default_factory=dict)  # eval/solved.. -> the greedy rollouts
    found: dict = field(default_factory=dict)  # metric -> Measured
    state: State | None = None  # after the step, without weights in float64
    votes: dict = field(default_factory=dict)  # of routers, after the step


def in_precision(case, dtypes, first=None, spelled=None) -> ByHand:
    """Do all of a step by hand.

    dtypes: to compute in, the trainer's part and the sampler's.
    first: the ByHand in float64, if this is the second precision.
    spelled: the number of a group that is read by `models.full_definition`.
    """
    config = case.config
    dtype, sampler_dtype = dtypes
    groups = copy.deepcopy(case.groups)
    for s in [s for group in groups.values() for s in group]:
        s.watch = case.watch
        s.spelled = models.full_definition if s.group == spelled else None

        # With `proximal`, a run has the log-probs `old` and `lp` of its first update from two
        # forwards, of other shapes, which round apart. By hand they would be one number, and a
        # ratio of exactly 1 would tell nothing of rounding. So the second precision takes its `old`
        # from the first.
        if first is not None and config.proximal:
            s.old = first.groups[s.group][s.number].old
    model = case.sampling_model(case.sampler, sampler_dtype)
    hand = ByHand(groups, intervals(model, groups, config.temperature))

    # An evaluation is of the weights before the step, or of those after it.
    line = case.files.metrics[case.step]
    if "eval/solved_before" in line:
        model = case.sampling_model(case.before, dtype)
        solve(case, hand, "eval/solved_before", model, first)
    del model
    hand.state = state = case.state(Exact if first is None else Displaced, dtype)
    if first is not None:
        state.exact = first.state.updates
    version = counts_in(case.sampler)["policy_version"]
    hand.found |= metrics_by_hand(config, groups, state, case.step, version)
    if first is not None:
        for here, there in zip(state.updates, first.state.updates):
            if math.isfinite(here["norm"]) != math.isfinite(there["norm"]):
                raise ValueError(UNDECIDED)

    # Only what is compared later stays in memory.
    for p in state.model.parameters():
        p.grad = None
    state.moments.clear()
    if "eval/solved" in line:
        model = copy.deepcopy(state.model).requires_grad_(False)
        for name, p in model.named_parameters():
            p.copy_(state.weights[name].to(getattr(torch, config.rollout_dtype)))
        solve(case, hand, "eval/solved", model, first)
    hand.votes = parallel.persistent_buffers(state.model)
    if first is None:
        state.model, state.weights = None, {}
    return hand


@torch.no_grad()
def intervals(model, groups, temperature) -> np.ndarray:
    """Return between which numbers lies a draw of each sampled token, (N, 2)."""
    # A draw is a number in [0, 1). Tokens divide [0, 1) into intervals as wide as their
    # probabilities, and the number's interval says which token it draws.
    found = []
    for s in [s for group in groups.values() for s in group]:
        widths = read_alone(model, s, temperature)[0].double().exp()
        targets = torch.tensor([s.tokens[at + 1] for at in s.at])[:, None]
        width = widths.gather(-1, targets)
        end = widths.cumsum(-1).gather(-1, targets)
        found.append(torch.cat([end - width, end], -1).numpy())
    return np.concatenate(found)


@torch.no_grad()
def solve(case, hand, name, model, first):
    """Measure the fraction of held-out prompts that greedy play solves, into hand.found[name]."""
    # This is the one number that the ordinary sampler has a part in: it plays, in float64, as
    # `evaluate` does. The second precision reads the same plays.
    config = case.config
    if first is None:
        prompts = range(config.eval_prompts)
        starts = draw_prompts(config, case.task, EVALUATION, 0, prompts, held_out=True)
        greedy = dataclasses.replace(config, group=1, temperature=0.0, forks=1, fork_turns=0)
        hand.plays[name] = [t for (t,) in play(greedy, case.task, Sampler(model), starts, key=())]
    plays = (first or hand).plays[name]

    # A margin says how far the likeliest token was ahead of the next, at the closest choice of a
    # play. If rounding turned that choice around, the run has played a different game.
    margins = []
    for t in plays:
        s = Recorded(t.group, 0, t.tokens, np.flatnonzero(t.sampled).tolist())
        top_N2 = read_alone(model, s, 1.0)[0].double().topk(2).values
        margins.append(float((top_N2[:, 0] - top_N2[:, 1]).min()))
    solved = mean_of([t.reward >= 1 for t in plays])
    hand.found[name] = solved._replace(margins=np.array(margins), each=1 / len(plays))


class Progress:
    """Says before the audit begins how long it will take and how much memory, then how far it is.

    tell: a function that gets a line to print.
    """

    def __init__(self, case, tell):
        self.tell = tell
        self.done = 0
        self.told = self.begun = time.monotonic()
        rollouts = [s for group in case.groups.values() for s in group]
        c = case.config

        # How often each rollout is read: for the draws, the reference, `old` and so on, and with a
        # gradient for an update, which takes three times as long.
        extra = bool(c.kl_coef) + (c.advantage in ("gae", "teacher"))
        self.readings = len(rollouts) * (2 * (2 + extra) + bool(c.proximal))

        # A reading of the first rollout takes as long for its tokens as any other.
        model = case.sampling_model(case.sampler, torch.float64)
        start = time.monotonic()
        with torch.no_grad():
            read_alone(model, rollouts[0], c.temperature)
        each = (time.monotonic() - start) / len(rollouts[0].tokens)
        tokens = sum(len(s.tokens) for s in rollouts)
        seconds = each * tokens * ((4 + extra + bool(c.proximal)) + (4 + extra))

        # Weights, gradient, two moments, masters where they differ; a few copies of the head, which
        # is as large as any tensor, and of the longest rollout's logits; and torch itself.
        numbers = sum(p.numel() for p in model.parameters())
        longest = max(len(s.at) for s in rollouts)
        copies = 3 * model.head_weight.numel() + 8 * longest * len(model.head_weight)
        memory = 8 * (numbers * (5 if c.is_mixed else 4) + copies)
        tell(f"{len(rollouts)} rollouts of {tokens} tokens, by hand in float64 and again in lower "
             f"precision: about {seconds / 60:.1f} minutes and {memory / 1e9 + 0.5:.1f} GB of "
             f"memory")  # fmt: skip

    def watch(self):
        """Count a reading, and say each half minute how many are done."""
        self.done += 1
        if time.monotonic() - self.told > 30:
            self.told = time.monotonic()
            self.tell(f"{min(self.done, self.readings)} of {self.readings} readings done, "
                      f"{(self.told - self.begun) / 60:.1f} minutes")  # fmt: skip


# 10. The table --------------------------------------------------------------------------------
# A row for each number that the run recorded and the step determines.


@dataclass
class Report:
    """The findings of an audit."""

    run: str
    step: int
    config: object
    rows: list = field(default_factory=list)  # Audited, in `order`
    intro: list = field(default_factory=list)  # sentences
    left_out: list = field(default_factory=list)  # metrics that the step does not determine
    groups: dict = field(default_factory=dict)  # number -> its Recorded rollouts, in float64
    group: int | None = None  # whose tokens are shown
    updates: int = 1  # of the step: the loss is their mean
    show: object = None  # tokens as text

    @property
    def wrong(self):
        """Return the key of the first row that is outside; None if all are ok."""
        return next((row.key for row in self.rows if not row.ok), None)

    @property
    def verdict(self):
        found = "ok" if self.wrong is None else f"{self.wrong} is outside"
        return f"audit of step {self.step}: {found}"

    @property
    def loss(self):
        """Return a sentence: how the parts of all tokens add up."""
        # Each token has a part of the loss of its update, and the loss is the mean of the updates'.
        parts = {}
        for n, group in self.groups.items():
            parts[n] = math.fsum(term["part"] for s in group for term in s.terms) / self.updates
        own = parts.pop(self.group)
        others = math.fsum(parts.values())
        return (f"loss: this group {own:.15g} + the other groups {others:.15g} = "
                f"{own + others:.15g}, loss/token_mean by hand")  # fmt: skip


def audited(run, step=None, group=None, task="", reward="", tell=lambda line: None) -> Report:
    """Do a step of a run again by hand, and compare it with the run's files.

    The arguments have the names and meanings of the command line's, see `main`. Without `group`,
    the first group with unequal rewards is shown. Raises ValueError if the step cannot be audited.
    tell: a function. It gets lines that say how far the audit is.
    """
    files = RunFiles(run, task, reward)
    config = files.config
    step = files.chosen_step(step)
    task = make_task(config)
    report = Report(str(run), step, config, show=task.show)
    say = report.intro.append
    with tempfile.TemporaryDirectory() as room:
        case = Case(files, task, step, Path(room), files.rollouts(step, task.vocab_size))
        case.find_states(say)
        if group not in (None, *case.lines):
            last = len(case.lines) - 1
            raise ValueError(f"--group {group}: the groups of step {step} are 0 to {last}")

        # The tokens of the rollouts are the run's. Everything else about them is computed again: in
        # float64, and in the precisions that tell what rounding does.
        times = TIMES * (LATER + 2 * case.again) if case.again else TIMES
        rounding, sampling = [Rounding.of(x, times) for x in (config.compute, config.rollout_dtype)]
        scaled = f", times {rounding.scale:.1e}, the ratio of the two units in the last place"
        say(f"by hand in float64; {str(rounding.dtype)[6:]} tells what rounding does"
            f"{scaled if rounding.scale != 1 else ''}")  # fmt: skip
        case.groups = groups_again(config, task, step, case.lines)
        case.watch = Progress(case, tell).watch
        exact = in_precision(case, (torch.float64, torch.float64), spelled=group)
        rounded = in_precision(case, (rounding.dtype, sampling.dtype), first=exact)
        if step + 1 in files.checkpoints:
            tell("comparing the parameters, entry by entry")
        rows = [*rollout_rows(case, exact, rounded, rounding),
                sampling_row(case, exact, rounded, sampling, say),
                *metric_rows(case, exact, rounded, rounding),
                *after_rows(case, exact, rounded, rounding, say)]  # fmt: skip
    report.rows = sorted(rows, key=lambda row: order().index(row.key))

    # Numbers that are in the line and not by hand: what no step determines, and what is unknown.
    report.left_out = sorted(files.metrics[step].keys() - exact.found.keys() - {"step"})
    unknown = [name for name in report.left_out if not name.startswith(NOT_BY_HAND)]
    if unknown:
        say(f"audit.py does not know {', '.join(unknown)}: add the definition to "
            f"`metrics_by_hand` in audit.py")  # fmt: skip

    # A group whose rewards are all equal would show nothing but the entropy bonus.
    report.groups = exact.groups
    report.updates = max(1, len(exact.state.updates))
    learning = [n for n in exact.groups if any(any(s.A or []) for s in exact.groups[n])]
    report.group = next(iter(learning), 0) if group is None else group
    return report


def metric_rows(case, exact, rounded, rounding) -> list:
    """Compare the metrics of the step's line."""
    line = case.files.metrics[case.step]
    rows = []
    for key in line.keys() & exact.found.keys():
        recorded = math.nan if line[key] is None else line[key]
        if not isinstance(recorded, int | float):
            raise ValueError(f"{key} of step {case.step} in metrics.jsonl is not a number")
        rows.append(rounding.row(key, recorded, exact.found[key], rounded.found[key]))
    return rows


def sampling_row(case, exact, rounded, rounding, say) -> Audited:
    """Compare each draw with its token's interval, and say how many lie outside."""
    config = case.config
    draws = []
    for s in [s for group in exact.groups.values() for s in group]:
        for at in s.at:
            # A rollout has a random number for each place after the prompt. Rollouts that share a
            # turn were played as one, with the numbers of the first of them.
            played, _ = shares(config, s, at)[-1]
            key = config.seed, case.step, s.group, played
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


def rollout_rows(case, exact, rounded, rounding) -> list:
    """Compare rollouts.jsonl with what the task and the step say."""
    config, lines = case.config, case.lines
    tokens = wrong = unlike = 0
    rewards = []
    advantages = []
    for n, group in exact.groups.items():
        for s, t, line in zip(group, rounded.groups[n], lines[n]):
            # Which tokens are the task's, and which were marked as sampled.
            tokens += len(s.tokens)
            wrong += s.differs
            unlike += len({*np.flatnonzero(line["sampled"]).tolist()} ^ {*s.at})

            # The reward of each turn. A turn that is missing on one side counts as reward 0 there.
            told = dict(map(tuple, line["rewards"]))
            mine = dict(s.rewards)
            rewards += [abs(told.get(at, 0.0) - mine.get(at, 0.0)) for at in {*told, *mine}]
            rewards.append(float(bool(line["truncated"]) != s.truncated))

            # The advantages of the tokens that are trained on.
            if s.A is not None and trained(config, [s]) and line["advantage"] is not None:
                advantages += zip([line["advantage"][at] for at in s.at], s.A, t.A)

    # The rounds of a step play as many new groups as are missing, each time.
    played = chosen = 0
    for _ in range(config.max_rounds):
        new = range(played, played + config.prompts - chosen)
        chosen += len([n for n in new if n not in lines or teaches(config, exact.groups[n])])
        played = new.stop
    recorded, A, A_rounded = np.array(advantages, dtype=np.float64).reshape(-1, 3).T
    return [
        Audited("rollouts/groups", len(lines), played, abs(played - len(lines)), 0),
        Audited("rollouts/tokens", tokens, tokens - wrong, wrong, 0),
        Audited("rollouts/sampled", 0, unlike, unlike, 0),
        rounding.row_of_many("rollouts/rewards", rewards, [1.0], [1.0]),
        rounding.row_of_many("rollouts/advantage", abs(recorded - A), A, A_rounded),
    ]


def after_rows(case, exact, rounded, rounding, say) -> list:
    """Compare parameters and votes with the next checkpoint, if there is one."""
    path = case.files.checkpoints.get(case.step + 1)
    if path is None:
        say(f"parameters after the step: not compared, there is no step-{case.step + 1:08d}")
        return []

    # Each entry is held to its own rounding, and the one furthest from it is shown: AdamW makes
    # steps of one length, so a fault in a small tensor is as large as in a big one.
    # Weights are stored in --dtype, whatever the products are in.
    unit = torch.finfo(getattr(torch, case.config.dtype)).eps
    later = rounding.times / TIMES
    model = rounded.state.model
    rows = {}
    for (name, *before), (_, stored, *_) in zip(case.stored(model), case.stored(model, path)):
        weight, allowed = rounded.state.allowed(name, before, rounding.scale, unit)
        if later > 1:  # the steps on the way to this one have moved other entries by rounding
            allowed.fill_(later * allowed.max())
        differences = weight.sub_(stored).abs_().flatten()
        allowed = allowed.flatten()
        furthest = int((differences / allowed.clamp(min=1e-300)).argmax())
        found = differences[furthest].item()
        rows[name] = Audited("parameters", 0.0, found, found, allowed[furthest].item())
    worst = max(rows, key=lambda name: rows[name].share)
    say(f"parameters after the step: against {path.name}, the worst is {worst}")
    if not case.config.router_bias_rate:
        return [rows[worst]]

    # The routers' biases, in votes. An undecided choice changes the counts of two experts, and by
    # that their votes by two at the most.
    there = {name: torch.empty_like(x) for name, x in exact.votes.items()}
    stored = {f"buffer.{name}": x for name, x in there.items()}
    parallel.read_checkpoint(path, stored, only=("buffer.",))
    wrong = sum(int((there[name] - x).abs().sum()) for name, x in exact.votes.items())
    sizes = [sum(int(x.abs().sum()) for x in votes.values()) for votes in (there, exact.votes)]
    loads = [hand.found["experts/load_max"] for hand in (exact, rounded)]
    return [rows[worst], Audited("votes", *sizes, wrong, 4 * rounding.undecided(*loads))]


# 11. The report -------------------------------------------------------------------------------
# What is outside, or the whole table, and the tokens of one group with their parts of the loss: as
# text, and as a page.


def summary(report, everything) -> str:
    """Return what the report says of the step as a whole: sentences, and the table of rows.

    everything: with all rows. Without, only what is outside and the row that is nearest to it.
    """
    rows = [row for row in report.rows if everything or not row.ok]
    lines = [f"audit of {report.run}, step {report.step}", *report.intro, ""]
    if rows:
        lines.append(f"{'':28}{'recorded':>22}{'by hand':>22}{'difference':>12}{'allowed':>10}")
    for row in rows:
        verdict = "ok" if row.ok else "OUTSIDE"
        lines.append(f"{row.key:28}{row.recorded:22.15g}{row.by_hand:22.15g}"
                     f"{row.difference:12.1e}{row.allowed:10.1e}  {verdict}")  # fmt: skip
    good = [row for row in report.rows if row.ok]
    nearest = max(good, key=lambda row: row.share)
    lines += [
        f"{len(good)} of {len(report.rows)} numbers are within what rounding explains; nearest to "
        f"its bound is {nearest.key}, {nearest.difference:.1e} of {nearest.allowed:.1e}",
        f"not determined by the step: {', '.join(report.left_out) or 'nothing'}",
    ]
    return "\n".join(lines)


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


def as_text(report, everything=True, tokens=True) -> str:
    """Return the summary, and how the tokens of one group add up to their loss."""
    lines = [summary(report, everything)]
    for s in report.groups[report.group] if tokens else ():
        lines.append(f"\ngroup {report.group}, rollout {s.number}, reward {s.reward:g}")
        lines.append(f"  {'token':>14}  sampled{'sampler':>11}{'old':>11}{'now':>11}{'ratio':>10}"
                     f"  clip{'advantage':>11}{'part of loss':>14}")  # fmt: skip
        for row in token_rows(report, s):
            # A token that is not in the loss has no numbers.
            if row["part"] is None:
                lines.append(f"  {row['text']:>14}  {row['why']}")
                continue
            clip = "yes" if row["clips"] else "no"
            lines.append(f"  {row['text']:>14}{'yes':>9}{row['smp']:11.6f}{row['old']:11.6f}"
                         f"{row['lp']:11.6f}{row['r']:10.6f}{clip:>6}{row['A']:11.6f}"
                         f"{row['part']:14.6e}")  # fmt: skip
    return "\n".join([*lines, report.loss, report.verdict])


# `--html FILE`: one file of HTML, which loads nothing and runs no script. A token is a link. Its
# numbers are hidden until the link is pointed at (:hover) or named in the page's address (:target).
PAGE = string.Template("""\
<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>$verdict</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1.5em;
       color: #1c1f23; background: #fff }
h1 { font-size: 1.4em; margin-bottom: .2em } h2 { font-size: 1.1em; margin-top: 2em }
p { margin: .3em 0 } pre, .numbers, table { font: 13px/1.5 ui-monospace, monospace }
pre { white-space: pre-wrap } .ok { color: #1a7f37 } .outside { color: #cf222e }
table { border-spacing: 3px 5px; font-size: 14px; margin-bottom: 12em }
th { text-align: left; font: 13px system-ui, sans-serif; color: #6e7781; padding-right: 1em;
     white-space: nowrap }
td { position: relative; padding: 0 }
.token { display: block; padding: .15em .45em; border-radius: 4px; text-align: center;
         white-space: pre; color: inherit; text-decoration: none; min-width: 1em }
.given { color: #8c959f; font-style: italic } .shared { opacity: .35 }
.clips { text-decoration: underline 3px }
.token:hover, .token:target { outline: 2px solid #57606a; opacity: 1 }
.numbers { display: none; position: absolute; left: 0; top: 1.9em; z-index: 1; padding: .7em 1em;
           background: #fff; border: 1px solid #57606a; border-radius: 6px; white-space: pre;
           box-shadow: 0 4px 14px #0003 }
.token:hover + .numbers, .token:target + .numbers { display: block }
.token:hover + .numbers { z-index: 2 }
</style>
<h1 class="$color">$verdict</h1>
<pre>$summary</pre>
<h2>Group $group</h2>
<p>A row is a rollout, a column a place in it. Green tokens have a positive advantage, \
red ones a negative one; underlined ones are clipped; grey ones were not sampled. What is \
pale is shared with the row above. Point at a token for its part of the loss.</p>
<p>$loss</p>
<table>
$rollouts
</table>
</html>
""")


def as_page(report) -> str:
    """Return the report as one page of HTML."""
    # Sorted by their tokens, rollouts are the leaves of the tree of their prefixes from left to
    # right. The prefix that a row shares with the row above is drawn pale.
    sequences = sorted(report.groups[report.group], key=lambda s: s.tokens)
    largest = max((abs(A) for s in sequences for A in s.A or []), default=0.0) or 1.0
    lines = []
    above = []
    for s in sequences:
        shared = len(os.path.commonprefix([above, s.tokens]))
        above = s.tokens
        cells = [f"<th>rollout {s.number}, reward {s.reward:g}</th>"]
        for place, row in enumerate(token_rows(report, s)):
            kinds = {"token": True, "shared": place < shared, "given": row["part"] is None,
                     "clips": row.get("clips")}  # fmt: skip
            classes = " ".join(kind for kind in kinds if kinds[kind])
            shade = ""
            if not kinds["given"]:
                # Green for tokens that the step makes likelier, red for the others.
                rgb = "46, 160, 67" if row["A"] > 0 else "248, 81, 73"
                shade = f' style="background: rgba({rgb}, {0.75 * abs(row["A"]) / largest:.2f})"'

            # A token links to itself: named in the page's address, it shows its numbers at once.
            name = f"r{s.number}t{place}"
            text, numbers = map(html.escape, (row["text"], "\n".join(equations(report, s, row))))
            cells.append(
                f'<td><a class="{classes}" id="{name}" href="#{name}"{shade}>{text}</a>'
                f'<div class="numbers">{numbers}</div></td>'
            )
        lines.append(f"<tr>{''.join(cells)}</tr>")

    # The names of tasks and directories are text, and not markup.
    return PAGE.substitute(
        verdict=html.escape(report.verdict), color="ok" if report.wrong is None else "outside",
        summary=html.escape(summary(report, True)), group=report.group,
        loss=html.escape(report.loss), rollouts="\n".join(lines),
    )  # fmt: skip


def equations(report, s, row) -> list:
    """Return the equations for one token with its numbers, without what the settings leave out."""
    c = report.config
    if row["part"] is None:
        return [f"{row['text']}: {row['why']}"]
    is_mean = c.objective == "gspo"
    lines = [
        f"A = {row['A']:.6f}    log-probs: sampler {row['smp']:.6f}, old {row['old']:.6f}, "
        f"now {row['lp']:.6f}",
        f"(2) r = exp({'mean of ' * is_mean}now - old) = {row['r']:.6f}",
    ]

    # l after (3) and (4). The token's `policy` is w l / Z, its share in the loss. The equation is
    # the objective's own, from its docstring, with the values of the settings.
    said = OBJECTIVES[c.objective].__doc__.removeprefix("Return the terms of ").removesuffix(".")
    for name in ("clip_low", "clip_high", "cispo_bound"):
        said = said.replace(name, f"{getattr(c, name):g}")
    weight = f", times {row['x']:.6f} (4)" if c.importance_cap else ""
    clipped = ", clipped" if row["clips"] else ""
    lines.append(f"(3) {said}{weight}: {row['policy'] * s.Z / s.w:.6f}{clipped}")

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


# 12. The command ------------------------------------------------------------------------------
# `python audit.py RUN`, and `python train_grpo.py audit RUN`, which calls `main`.


def main(argv) -> int:
    """Audit a run and return the exit code.

    0: every number is within what rounding allows. 1: one is not. 2: no audit is possible.
    """
    parser = argparse.ArgumentParser("audit.py", allow_abbrev=False)
    parser.add_argument("run", help="directory of a run; nothing is written there")
    parser.add_argument("--step", type=int, help="[the last that a checkpoint has sampled, or 0]")
    parser.add_argument("--group", type=int, help="spell this group out, by models.full_definition")
    parser.add_argument("--all", action="store_true", help="print every row and every token")
    parser.add_argument("--html", metavar="FILE", help="also write it as a page")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--reward", default="", help="the run's FILE.py:function, if it had one")
    options = parser.parse_args(argv)

    def say(text):
        print(text, file=sys.stderr, flush=True)

    # The process group of this one process is left before the findings are printed. The verdict is
    # the exit code.
    def command(o):
        with one_process("an audit"):
            report = audited(o.run, o.step, o.group, o.task, o.reward, tell=say)
        print(as_text(report, o.all, o.all or o.group is not None))
        if o.html:
            Path(o.html).write_text(as_page(report))
        return 0 if report.wrong is None else 1

    try:
        return models.quietly(command, options)
    except ERRORS as error:
        if isinstance(error, TaskError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"error: {options.run} cannot be audited: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One step of GRPO by loops over tokens: adds other settings to `train_grpo.plain_step`.

This file is for an auditor who does not trust the trainer: no batch, padding, packing, cache, tree,
plan, sum over ranks, backward or optimizer. It shares no arithmetic with it, and needs torch
alone. It trusts the forward of a model for one sequence at a time.

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
    (8)  loss <- loss + balance_coef mean_i b_i     b_i: (10) of experts.py with coef 1
   (11)  b_e  = rate * votes_e                      a router's bias: see experts.py
"""

import math
from dataclasses import dataclass, field

import torch


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
    routes: list | None = None  # [token][layer] -> the sampler's experts, of all tokens but one
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


class Routes:
    """A callback of `hidden` by which the experts of a rollout's tokens are the recorded ones.

    look: look(p (N, E), ids (N, K), layer=), called with the router's own ids.
    """

    def __init__(self, model, s, look=lambda p_NE, own_NK, *, layer: None):
        self.layers = list(model.config.sparse_layers)
        self.routes = s.routes
        self.look = look

    def choose(self, own_NK, /, *, layer):
        # The last token was never given to the sampler's model, so its router selects.
        self.own_NK = own_NK
        n = self.layers.index(layer)
        recorded = [of_layers[n] for of_layers in self.routes]
        return torch.cat([torch.tensor(recorded).long().view(-1, own_NK.shape[1]), own_NK[-1:]])

    def __call__(self, p_NE, used_NK, /, *, layer):
        self.look(p_NE, self.own_NK, layer=layer)


def read_alone(model, s, temperature, *, replays=True):
    """Return the log-probs of all tokens at each sampled target, (N, V), and values or None.

    replays: use the recorded experts if there are any. Not for a reference or a teacher.
    """
    # The state of the token before a target predicts the target.
    tokens = torch.tensor(s.tokens)
    options = {"on_routing": Routes(model, s)} if replays and s.routes is not None else {}
    states = model.hidden(tokens[None], **options)[0, s.at]
    logits = model.logits(states) if s.spelled is None else s.spelled(model, tokens)[s.at]
    values = model.values(states) if model.config.value_head else None
    s.watch()

    # Log-probs are in float32 at least, as they are in the trainer and the sampler.
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide) / temperature).log_softmax(-1), values


def score_alone(model, s, temperature, *, replays=True):
    """Return log-prob, entropy and value of each sampled token: lists of tensors with a graph."""
    # The entropy is of the whole distribution, at the temperature of the log-probs.
    logprobs, values = read_alone(model, s, temperature, replays=replays)
    targets = [s.tokens[at + 1] for at in s.at]
    lp = list(logprobs[range(len(targets)), targets])
    H = list(-(logprobs.exp() * logprobs).sum(-1))
    return lp, H, None if values is None else list(values)


@torch.no_grad()
def numbers_alone(model, s, temperature, *, replays=True):
    """Return the log-probs and the values of `score_alone` as numbers."""
    lp, _, v = score_alone(model, s, temperature, replays=replays)
    return numbers_of(lp), numbers_of(v)


def entry(table, name, title):
    """Return an entry of a table. ValueError, for a setting that this file does not know."""
    if name not in table:
        raise ValueError(f"the audit does not know {name!r}: add it to {title} in full/byhand.py")
    return table[name]


# Advantages -------------------------------------------------------------------------------------
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
        scores, _ = numbers_alone(state.teacher, s, c.temperature, replays=False)
        s.A = [score - smp for score, smp in zip(scores, s.smp)]  # (1)


ADVANTAGES = {  # name -> f(c, the State before the step, groups), which sets A of all rollouts
    "group_mean": against_the_group, "group_std": against_the_group,
    "leave_one_out": against_the_group, "batch_std": against_the_group,
    "none": without_baseline, "none_batch": without_baseline,
    "per_branch": of_branches, "gae": of_a_critic, "teacher": of_a_teacher,
}  # fmt: skip


# The loss ---------------------------------------------------------------------------------------
# Equations (2) to (7), token by token. They are also what the trainer's tests compare with.
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


# Experts ----------------------------------------------------------------------------------------
# The loss that balances experts, and the bias of their choice. If the model has none, skip it.


@dataclass
class Routed:
    """How the routers routed one sequence by itself."""

    balance: float  # the sequence's part of (8)
    counts: dict  # layer -> tensor, how many of its tokens went to each expert
    margins: list  # for each layer and token, the lead of the last chosen expert over the next
    replayed: int = 0  # tokens and layers with recorded experts
    changed: int = 0  # of these, where the router would have selected others
    replay_margins: list = field(default_factory=list)  # `margins` of these


def route_alone(c, model, s, sequences) -> Routed:
    """Route all tokens of a sequence, sampled or not, and add the gradient of its part of (8).

    sequences: how many sequences the update trains on.
    """
    parts = [torch.zeros(())]
    found = Routed(0.0, {}, [])

    def look(p_NE, own_NK, /, *, layer):
        # How many tokens chose each expert, times how likely it was to all of them.
        N, E = p_NE.shape
        K = own_NK.shape[1]
        chosen_NK = own_NK
        if s.routes is not None:
            chosen_NK = routes.choose(own_NK, layer=layer)
            pairs = [*zip(chosen_NK[:-1].tolist(), own_NK.tolist())]
            found.replayed += len(pairs)
            found.changed += len([1 for used, own in pairs if {*used} != {*own}])
        counts = torch.bincount(chosen_NK.flatten(), minlength=E)
        b = (counts * p_NE.sum(0)).sum() * E / (K * N * N)
        parts.append(c.balance_coef * b / sequences)  # (8)
        found.counts[layer] = counts.double()

        # Experts are chosen by p plus the bias.
        mlp = model.model.layers[layer].mlp
        biased_NE = p_NE.detach() + (mlp.rate * mlp.votes if mlp.rate else 0)
        if K < E:
            best = biased_NE.topk(K + 1).values
            margins = (best[:, K - 1] - best[:, K]).tolist()
            found.margins.extend(margins if s.routes is None else margins[-1:])
            found.replay_margins.extend([] if s.routes is None else margins[:-1])

    routes = look if s.routes is None else Routes(model, s, look)
    model.hidden(torch.tensor(s.tokens)[None], on_routing=routes)
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


# A step -----------------------------------------------------------------------------------------
# The policy's weights with AdamW, and the step itself: all of the above is for `step_by_hand`.


@dataclass
class State:
    """A policy with its optimizer. A step turns the state before it into the state after it."""

    model: object
    weights: dict  # name -> what AdamW moves: a parameter that is trained, or its wider master
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
        for name, weight in self.weights.items():
            p = self.model.get_parameter(name)
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
    """Do a whole step by (1) to (8) and (11), in place. Return a dict for each optimizer step.

    groups: lists of Recorded rollouts, the groups that the step trains on, in order.
    state: the State before the step, in the precision to compute in. lr: the learning rate.
    """
    # Before the first update: the reference's log-probs, and `old`, by the policy or the sampler.
    # None: every ratio is 1. An `old` that is set stays; see `in_precision`.
    for s in [s for group in groups for s in group]:
        if state.reference is not None:
            s.ref, _ = numbers_alone(state.reference, s, c.temperature, replays=False)
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
        moving = [p for p in state.model.parameters() if p.requires_grad]
        for p in moving:
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
        norms = [p.grad.norm(dtype=torch.float64).item() for p in moving]
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

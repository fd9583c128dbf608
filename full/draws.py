"""How a run has drawn its tokens: adds engines and exact runs to `train_grpo.check`.

By hand, with the sampler's weights: each token's interval of random numbers, or, if an engine drew
it by numbers of its own, its log-prob; of an exact run both, to the bit.

Equation numbers are those of byhand.py.
"""

import dataclasses
import math

import numpy as np
import torch

import train_grpo
from full.byhand import Routes, read_alone, shares
from full.exact import packed_attention, require_exact_kernels
from full.expected import ENGINE_ROUNDING, SURPRISE, Audited
from full.run import policy_in


def number_of(case, s, at) -> float:
    """Return the random number that has drawn the target at `at` of a rollout."""
    # A rollout has a random number for each place after the prompt. Rollouts that share a turn were
    # played as one, with the numbers of the first of them.
    played, _ = shares(case.config, s, at)[-1]
    key = case.config.seed, case.step, s.group, played
    return train_grpo.uniforms(key, at + 2 - s.prompt)[-1]


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
def surprises(model, groups, temperature) -> np.ndarray:
    """Return each sampled token's log-prob, and mean and variance of -log p there, (N, 3)."""
    found = []
    for s in [s for group in groups.values() for s in group]:
        logprobs = read_alone(model, s, temperature)[0].double()
        targets = torch.tensor([s.tokens[at + 1] for at in s.at])[:, None]
        drawn = logprobs.gather(-1, targets)
        p = logprobs.exp()
        logprobs = logprobs.masked_fill(p == 0, 0.0)  # 0 log 0 is 0
        mean = -(p * logprobs).sum(-1, keepdim=True)
        variance = (p * (logprobs + mean) ** 2).sum(-1, keepdim=True)
        found.append(torch.cat([drawn, mean, variance], -1).numpy())
    return np.concatenate(found)


@torch.no_grad()
def routings(model, groups) -> tuple:
    """Return how far each recorded expert is below the best, (N,), and all probabilities, (X,).

    The distance is the probability of the K-th best expert minus the probability of the recorded
    one, both with the router's bias. It is 0 if the recorded expert is one of the K best.
    """
    misses, decides = [], []

    def look(p_NE, own_NK, /, *, layer):
        mlp = model.model.layers[layer].mlp
        biased_NE = p_NE + (mlp.rate * mlp.votes if mlp.rate else 0)
        lowest_N1 = biased_NE.gather(-1, own_NK).amin(-1, keepdim=True)
        used_NK = routes.choose(own_NK, layer=layer)
        misses.append((lowest_N1 - biased_NE.gather(-1, used_NK)).clamp(min=0).double().flatten())
        decides.append(biased_NE.double().flatten())

    for s in [s for group in groups.values() for s in group]:
        routes = Routes(model, s, look)
        model.hidden(torch.tensor(s.tokens)[None], on_routing=routes)
    return torch.cat(misses).numpy(), torch.cat(decides).numpy()


def route_rows(case, exact, rounded, rounding, say) -> list:
    """Compare the experts that a run recorded with those that the sampler's routers select."""
    if exact.routings is None:
        return []
    misses, decides = exact.routings
    row = rounding.row_of_many("sampling/routes", misses, decides, rounded.routings[1])
    say(
        f"sampling: {np.count_nonzero(misses)} of {len(misses)} recorded experts are not among the "
        f"K best by hand, the worst by a probability of {row.difference:.1e}; rounding in "
        f"{case.config.rollout_dtype} explains {row.allowed:.1e}"
    )
    return [row]


def sampling_row(case, exact, rounded, rounding, say) -> Audited:
    """Compare each draw with its token's interval, and say how many lie outside."""
    config = case.config
    draws = []
    for s in [s for group in exact.groups.values() for s in group]:
        draws += [number_of(case, s, at) for at in s.at]

    # Rounding moves an end of an interval a little, and a number near it falls on the neighbor.
    misses = np.maximum(exact.drawn[:, 0] - draws, draws - exact.drawn[:, 1]).clip(0)
    row = rounding.row_of_many("sampling", misses, exact.drawn.ravel(), rounded.drawn.ravel())
    say(
        f"sampling: {len(misses)} draws, of which {np.count_nonzero(misses)} lie outside their "
        f"token's interval of the definition's distribution, the worst by {row.difference:.1e}; "
        f"rounding in {config.rollout_dtype} explains {row.allowed:.1e}, and "
        f"{np.count_nonzero(misses > row.allowed)} lie further away"
    )
    return row


def engine_rows(case, exact, rounded, rounding, say) -> list:
    """Compare the log-probs that an engine told, and by them how it drew its tokens."""
    # With forks several rollouts share a turn, which was drawn once. rounding: the trainer's.
    config = case.config
    told, is_own, apart = [], [], []
    for n, group in exact.groups.items():
        for s, other in zip(group, rounded.groups[n]):
            told += s.smp
            is_own += [shares(config, s, at)[-1][0] == s.number for at in s.at]
            apart += [abs(x - y) for x, y in zip(s.lp or (), other.lp or ())]
    lp, mean, variance = exact.drawn.T
    found = [f(abs(told - lp)) for f in (np.max, np.mean)]
    by_hand = [f(abs(rounded.drawn[:, 0] - lp)) for f in (np.max, np.mean)]

    # If steps were done again on the way, the sampler's weights have the trainer's rounding too.
    bounds = np.array(ENGINE_ROUNDING[config.rollout_dtype])
    if case.again and apart:
        bounds += rounding.times * rounding.scale * np.array([np.max(apart), np.mean(apart)])

    # The surprise of a token, -log p, is the entropy on average, if the token is drawn by p. It is
    # not if sampling is greedy or truncated. The sum of a martingale is rarely beyond SURPRISE
    # times this deviation, however rare some tokens are: with a probability of 2 exp(-25 / 2) at
    # the most (Bercu and Touati, 2008).
    surprise = (-lp - mean)[is_own]
    deviation = math.sqrt((surprise**2 + variance[is_own]).sum())
    sums = -lp[is_own].sum(), mean[is_own].sum()
    say(
        f"sampling: {case.files.engine} drew {len(surprise)} tokens by numbers of its own, so no "
        f"draw is compared; its log-probs are off by {found[0]:.1e} at most and {found[1]:.1e} on "
        f"average, and lower precision by hand is off by {by_hand[0]:.1e} and {by_hand[1]:.1e}; "
        f"the tokens' surprises sum to {sums[0]:.4g}, and the entropies to {sums[1]:.4g}"
    )
    return [
        *(Audited(key, 0.0, x, x, most)
          for key, x, most in zip(("sampling", "sampling/mean"), found, bounds)),
        Audited("sampling/surprise", *sums, abs(surprise.sum()), SURPRISE * deviation),
    ]  # fmt: skip


@torch.no_grad()
def exact_rows(case, say) -> list:
    """Compare tokens and log-probs of an --exact run to the bit, by the trainer's own forward."""
    # This shares the model's forward and the formula of its log-probs with the run. What it shows
    # is that the recorded numbers are those of the trainer: of this model, in this precision, for
    # each rollout alone and whole.
    config = dataclasses.replace(case.config, exact=True)
    model = policy_in(case.sampler, config, case.task, config.rollout_dtype)
    require_exact_kernels(model)
    count = wrong = unequal = 0
    worst = 0.0
    for s in [s for group in case.groups.values() for s in group if s.at]:
        tokens_1S = torch.tensor([s.tokens])
        attention = packed_attention(torch.zeros_like(tokens_1S))
        logits_NV = model.logits(model.hidden(tokens_1S, attention=attention)[0, s.at])
        uniform_N = torch.tensor([number_of(case, s, at) for at in s.at], dtype=torch.float64)
        drawn_N, lp_N = model.sample(logits_NV, uniform_N, temperature=config.temperature)
        targets_N = tokens_1S[0, 1:][s.at]
        count += len(s.at)
        wrong += int((drawn_N != targets_N).sum())
        off_N = (lp_N - torch.tensor(s.smp, dtype=torch.float64)).abs()
        unequal += int((~(off_N == 0)).sum())  # NaN too
        worst = max(worst, off_N.max().item())
    say(
        f"exact: the trainer's forward, which this trusts, draws {count - wrong} of {count} tokens "
        f"as recorded, with {count - unequal} of their log-probs to the bit, and the largest "
        f"difference is {worst:.1e}; none is allowed"
    )
    return [Audited("sampling/tokens", count, count - wrong, wrong, 0),
            Audited("sampling/bits", count, count - unequal, unequal, 0)]  # fmt: skip

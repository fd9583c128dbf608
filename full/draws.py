"""How a run has drawn its tokens, by an audit: adds recorded log-probs to `train_grpo.check`.

Equation numbers are those of byhand.py.
"""

import dataclasses

import torch

import train_grpo
from full.byhand import shares
from full.exact import packed_attention
from full.expected import Audited
from full.run import policy_in


def number_of(case, s, at) -> float:
    """Return the random number that has drawn the target at `at` of a rollout."""
    # A rollout has a random number for each place after the prompt. Rollouts that share a turn were
    # played as one, with the numbers of the first of them.
    played, _ = shares(case.config, s, at)[-1]
    key = case.config.seed, case.step, s.group, played
    return train_grpo.uniforms(key, at + 2 - s.prompt)[-1]


@torch.no_grad()
def exact_rows(case, say) -> list:
    """Compare tokens and log-probs of an --exact run to the bit, by the trainer's own forward."""
    # This shares the model's forward and the formula of its log-probs with the run. What it shows
    # is that the recorded numbers are those of the trainer: of this model, in this precision, for
    # each rollout alone and whole.
    config = dataclasses.replace(case.config, exact=True)
    model = policy_in(case.sampler, config, case.task, config.rollout_dtype)
    count = wrong = 0
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
        worst = max(worst, (lp_N - torch.tensor(s.smp, dtype=torch.float64)).abs().max().item())
    say(
        f"exact: the trainer's forward, which this trusts, draws {count - wrong} of {count} tokens "
        f"as recorded, and the largest difference of a log-prob is {worst:.1e}; none is allowed"
    )
    return [Audited("sampling/tokens", count, count - wrong, wrong, 0),
            Audited("sampling/bits", 0.0, worst, worst, 0.0)]  # fmt: skip

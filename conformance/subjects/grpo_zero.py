"""GRPO-Zero: the lines of its loss, its advantages, and its whole step, recorded.

    SOURCES=DIR python conformance/loss.py conformance/subjects/grpo_zero.py:loss
    SOURCES=DIR python conformance/advantages.py conformance/subjects/grpo_zero.py:advantages
    SOURCES=DIR python conformance/subjects/grpo_zero.py DUMP
    python conformance/step.py DUMP --model conformance/plain_loop.py:build
"""

import dataclasses
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from take import lines, take

sys.path.insert(0, f"{Path(__file__).resolve().parents[2]}")
from conformance import plain_loop
from conformance.recorders import record, watch

FIRST = "obj = log_probs * batch_advantages[:, None]"
CODE = lines("GRPO-Zero/grpo.py", FIRST, "loss.backward()")
G = take("GRPO-Zero/grpo.py", "normalize_rewards_per_group", "compute_entropy", "update_policy",
         np=np, defaultdict=defaultdict, dataclasses=dataclasses)  # fmt: skip
SETTINGS = dict(objective="reinforce")
ADVANTAGES = dict(advantage="group_std", std="biased")


@dataclasses.dataclass
class Episode:
    prefix: str
    prefix_token_ids: list
    generated_token_ids: list
    reward: float


def loss(batch):
    """Run the lines."""
    space = dict(log_probs=batch.lp, batch_advantages=batch.advantage[:, 0],
                 target_masks=batch.mask, num_target_tokens=batch.tokens)  # fmt: skip
    exec(CODE, space)
    return space["loss"]


def advantages(batch):
    """Normalize rewards. The function returns its episodes group by group."""
    pairs = zip(batch.group.tolist(), batch.rewards.tolist())
    episodes = [Episode(f"{g:03}", [], [b], R) for b, (g, R) in enumerate(pairs)]
    found = {e.generated_token_ids[0]: e.reward for e in G.normalize_rewards_per_group(episodes)}
    return [found[b] for b in range(len(episodes))]


def main(directory):
    """Run update_policy on a tiny model, and record its step."""
    torch.manual_seed(1)
    draw = [torch.randint(1, 13, (n,)).tolist() for n in (7, 3, 5, 2, 6, 4, 7, 1)]
    prompts, rewards = [[5, 1, 9], [2, 7]], [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.5]
    episodes = [Episode(f"{i // 4}", prompts[i // 4], answer, R)
                for i, (answer, R) in enumerate(zip(draw, rewards))]  # fmt: skip
    model, device = plain_loop.build(), torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = dict(objective="reinforce", **ADVANTAGES)

    # The recording. The function sorts its episodes, and its model sees all tokens but the last.
    sequences = [dict(tokens=e.prefix_token_ids + e.generated_token_ids, rewards=raw.reward,
                      prompt=len(e.prefix_token_ids), advantages=e.reward, groups=int(e.prefix))
                 for e, raw in zip(G.normalize_rewards_per_group(episodes), episodes)]  # fmt: skip
    with record(directory, model.named_parameters(), optimizer, settings=settings) as add:
        with watch(model, add, sequences):
            done = G.update_policy(model, optimizer, episodes, 4, 0, 1.0, device, torch.float32)
        add(grad_norm=done["grad_norm"])


if __name__ == "__main__":
    main(sys.argv[1])

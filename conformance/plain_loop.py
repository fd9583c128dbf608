"""Train for one step in a plain loop, and record it: an example of a recorder.

    python conformance/plain_loop.py DUMP
    python conformance/step.py DUMP --model conformance/plain_loop.py:build
"""

import sys
from pathlib import Path

import torch

if __name__ == "__main__":  # a script has its own folder on the path, not the package's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conformance.recorders import record


class Tiny(torch.nn.Module):
    """A causal model: the mean of the embeddings so far, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(13, 8), torch.nn.LayerNorm(8)
        self.mix, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 13, bias=False)

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        count_T1 = torch.arange(1, tokens_BT.shape[1] + 1)[:, None]
        x_BTD = x_BTD + torch.tanh(self.mix(x_BTD.cumsum(1) / count_T1))
        return self.head(self.norm(x_BTD))


def build():
    """Return the model with its first weights."""
    torch.manual_seed(0)
    return Tiny()


def train(directory, model, steps=1):
    """Take steps of GRPO on random tokens, two micro-batches each. Record the first one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = dict(advantage="group_mean", aggregation="token_mean", temperature=0.7)
    with record(directory, model.named_parameters(), optimizer, settings=settings) as add:
        for _ in range(steps):
            # Two groups of four sequences, 3 tokens of prompt, at most 7 sampled.
            tokens_BT = torch.randint(13, (8, 10))
            groups_B = torch.arange(8) // 4
            last_B = torch.tensor([10, 6, 8, 5, 9, 10, 4, 7])
            mask_BT = (torch.arange(10) >= 3) & (torch.arange(10) < last_B[:, None])
            rewards_B = (tokens_BT * mask_BT).sum(1) % 3 / 2
            advantages_B = rewards_B - rewards_B.view(2, 4).mean(1)[groups_B]

            # Each micro-batch has four sequences. Z counts the tokens of both.
            Z = mask_BT.sum()
            for rows in (slice(0, 4), slice(4, 8)):
                logits_BTV = model(tokens_BT[rows])[:, :-1] / settings["temperature"]
                picked_BT = logits_BTV.log_softmax(-1).gather(2, tokens_BT[rows, 1:, None])[..., 0]
                lp_BT = torch.nn.functional.pad(picked_BT, (1, 0))
                gain_BT = (lp_BT - lp_BT.detach()).exp() * advantages_B[rows, None]
                loss = -gain_BT[mask_BT[rows]].sum() / Z
                loss.backward()
                add(tokens=tokens_BT[rows], mask=mask_BT[rows], logprobs=lp_BT, loss=loss,
                    advantages=advantages_B[rows], rewards=rewards_B[rows],
                    groups=groups_B[rows])  # fmt: skip
            add(grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    train(sys.argv[1], build())

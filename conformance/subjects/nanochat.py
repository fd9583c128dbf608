"""nanochat: the lines of scripts/chat_rl.py from the log-probs to the backward.

    SOURCES=DIR python conformance/loss.py conformance/subjects/nanochat.py:loss
"""

import torch
from take import lines

FIRST = "# Calculate log probabilities. Note that the loss calculates NLL = -logp, so we negate"
CODE = lines("nanochat/scripts/chat_rl.py", FIRST, "loss.backward()")
SETTINGS = dict(objective="reinforce", ranks="mean", equal_rows=True)


def loss(batch):
    """Run the lines. One micro-batch is one pass."""
    targets = torch.where(batch.mask, 0, -1)
    space = dict(
        model=lambda *_, **__: torch.where(batch.mask, -batch.lp, 0.0), inputs=targets,
        targets=targets, advantages=batch.advantage[:, 0], num_passes=batch.micro_batches,
        examples_per_rank=1)  # fmt: skip
    exec(CODE, space)
    return space["loss"]

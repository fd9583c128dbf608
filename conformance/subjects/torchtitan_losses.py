"""torchtitan's DAPOLoss, of its experiment with reinforcement learning.

    pip install --no-deps --target DIR torchtitan
    PYTHONPATH=DIR python conformance/loss.py conformance/subjects/torchtitan_losses.py:loss
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import torch

SETTINGS = dict(clip_low=0.2, clip_high=0.28)


def dapo_loss():
    """Return torchtitan's class, without what it imports from a newer torch than ours."""
    root = Path(importlib.util.find_spec("torchtitan").submodule_search_locations[0])
    for name in ("torchtitan", "torchtitan.experiments", "torchtitan.experiments.rl"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(Path(root, *name.split(".")[1:]))]
    losses = MagicMock()
    losses.BaseLoss = type("BaseLoss", (), dict(Config=object))
    # The logits of `loss` below are log-probs already.
    losses.compute_logprobs = lambda logits, labels, **_: (logits, torch.zeros_like(logits))
    sys.modules["torchtitan.components.loss"] = losses
    sys.modules["torchtitan.config"] = MagicMock()
    from torchtitan.experiments.rl.losses import DAPOLoss

    return DAPOLoss


DAPO = dapo_loss()


def loss(batch):
    """Call DAPOLoss as the trainer does. FSDP does not divide gradients there: ranks add up."""
    c = batch.settings
    if c["aggregation"] != "token_mean" or c["objective"] != "clip" or c["dual_clip"]:
        raise NotImplementedError("torchtitan has clip, with a token mean")
    config = DAPO.Config(ratio_clip_low=c["clip_low"], ratio_clip_high=c["clip_high"])
    return DAPO(config)(
        batch.lp, None, batch.tokens, generator_logprobs=batch.old,
        advantages=batch.advantage, loss_mask=batch.mask,
    )  # fmt: skip

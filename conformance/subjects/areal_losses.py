"""The actor's loss of AReaL, with the weights that its engine gives micro-batches.

    pip install --no-deps --target DIR areal
    PYTHONPATH=DIR python conformance/loss.py conformance/subjects/areal_losses.py:loss
    M2PO=0.04 PYTHONPATH=DIR python conformance/loss.py conformance/subjects/areal_losses.py:loss

M2PO is the threshold of AReaL's option m2_threshold. It drops tokens where the rollout engine's
log-probs are far from the proximal policy's. Properties 3, 4 and 10 compare the loss with itself.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import torch

SETTINGS = dict(clip_low=0.2, clip_high=0.28, ranks="mean")
M2PO = float(os.environ.get("M2PO", 0)) or None
MOCKS = "api api.cli_args infra infra.platforms infra.rpc infra.rpc.serialization experimental " \
    "experimental.training_service experimental.training_service.controller trainer.ppo.stats " \
    "experimental.training_service.controller.controller utils.data utils.perf_tracer " \
    "utils.stats_tracker utils.logging"


def losses():
    """Return AReaL's module of the actor, without the packages that the loss does not use."""
    root = Path(importlib.util.find_spec("areal").submodule_search_locations[0])
    for name in ("areal", "areal.trainer", "areal.trainer.ppo", "areal.utils"):
        sys.modules[name] = ModuleType(name)  # its __init__ imports engines, and is not run
        sys.modules[name].__path__ = [str(Path(root, *name.split(".")[1:]))]
    for name in MOCKS.split():
        sys.modules["areal." + name] = MagicMock()
    sys.modules["areal.utils.perf_tracer"].trace_perf = lambda *_, **__: lambda function: function
    from areal.trainer.ppo import actor

    return actor


AREAL = losses()


def loss(batch):
    """Call grpo_loss_fn, and scale its value as `_compute_logprobs_and_loss` of the engine does."""
    c = batch.settings
    if c["aggregation"] != "token_mean" or c["objective"] not in ("clip", "gspo", "sapo"):
        raise NotImplementedError("AReaL has clip, gspo and sapo, with a token mean")

    # The policy before the step is the proximal one. The rollout engine's log-probs are near to
    # its log-probs, at some distance that depends on the token. Only M2PO reads them.
    distance = 0.5 * torch.sin(3 * batch.old + 5 * batch.lp.detach())
    rollout = torch.where(batch.mask, batch.old + distance, 0.0)
    is_sapo = c["objective"] == "sapo"
    data = dict(
        logprobs=batch.old if is_sapo else rollout, prox_logp=batch.old,
        advantages=batch.advantage, loss_mask=batch.mask.double(),
    )  # fmt: skip
    value = AREAL.grpo_loss_fn(
        batch.lp, torch.zeros_like(batch.lp), data, c["clip_low"], c["clip_high"],
        c["dual_clip"] or None, m2_threshold=M2PO, use_sapo_loss=is_sapo,
        importance_sampling_level="sequence" if c["objective"] == "gspo" else "token",
        sapo_tau_pos=c["tau_pos"], sapo_tau_neg=c["tau_neg"],
    )  # fmt: skip

    # The weight of a micro-batch is its share of the whole step's tokens. FSDP takes the mean over
    # ranks, which loss_multiplier undoes.
    return value * data["loss_mask"].count_nonzero() / batch.tokens * batch.ranks

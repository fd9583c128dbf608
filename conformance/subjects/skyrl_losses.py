"""The policy losses of SkyRL, with the advantages that its trainer scales first.

    pip install --no-deps --target DIR skyrl jaxtyping loguru wadler-lindig
    PYTHONPATH=DIR python conformance/loss.py conformance/subjects/skyrl_losses.py:loss
    COV=clip_cov PYTHONPATH=DIR python conformance/loss.py conformance/subjects/skyrl_losses.py:loss

COV takes SkyRL's clip_cov or kl_cov instead of the clip loss. The kit has no such objective, so
hold them to the clip loss. They must differ from it.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch

SETTINGS = dict(clip_low=0.2, clip_high=0.28, count_empty=True, ranks="mean")
COV = os.environ.get("COV")
NAMES = {"clip": "regular", **{name: name for name in ("gspo", "cispo", "sapo", "dppo")}}
REDUCTIONS = {"constant": "seq_mean_token_sum_norm"}  # the other names are the kit's
THRESHOLDS = "tis_ratio_type sequence_mask_metric outlier_token_is_threshold_low " \
    "outlier_token_is_threshold_high token_mask_is_threshold_low token_mask_is_threshold_high"
NO_CORRECTION = SimpleNamespace(**dict.fromkeys(THRESHOLDS.split()))


def losses():
    """Return SkyRL's module of losses, without the packages that the losses do not use."""
    root = Path(importlib.util.find_spec("skyrl").submodule_search_locations[0])
    for name in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.train"):
        sys.modules[name] = ModuleType(name)  # its __init__ imports ray, and is not run
        sys.modules[name].__path__ = [str(Path(root, *name.split(".")[1:]))]
    for name in ("ray", "omegaconf", "skyrl.train.config"):
        sys.modules.setdefault(name, MagicMock())
    sys.modules["ray"].is_initialized.return_value = False
    from skyrl.backends.skyrl_train.utils import ppo_utils

    return ppo_utils


SKYRL = losses()


def loss(batch):
    """Scale advantages as RayPPOTrainer does, and call the loss as the policy worker does."""
    c, (B, T) = batch.settings, batch.mask.shape
    kind = COV or ("dual_clip" if c["dual_clip"] else NAMES[c["objective"]])
    how = REDUCTIONS.get(c["aggregation"], c["aggregation"])
    bounds = dict(delta_low=c["clip_low"], delta_high=c["clip_high"])
    config = SimpleNamespace(
        policy_loss_type=kind, loss_reduction=how, off_policy_correction=NO_CORRECTION,
        eps_clip_low=c["clip_low"], eps_clip_high=c["clip_high"], clip_ratio_c=c["dual_clip"],
        cispo=SimpleNamespace(cispo_eps_clip_low=c["clip_low"], cispo_eps_clip_high=c["clip_high"]),
        sapo=SimpleNamespace(tau_pos=c["tau_pos"], tau_neg=c["tau_neg"]),
        dppo=SimpleNamespace(dppo_type="binary_" + c["divergence"], **bounds),
        clip_cov=SimpleNamespace(clip_ratio=0.2, clip_cov_lb=1.0, clip_cov_ub=5.0),
        kl_cov=SimpleNamespace(kl_cov_frac=1.0, ppo_kl_coef=1.0),
    )  # fmt: skip

    # The trainer scales advantages over the whole mini-batch, before it is split. So the rest of
    # the step is here too: one row has all of its tokens.
    mask = torch.zeros(batch.sequences, max(T, batch.tokens), dtype=batch.lp.dtype)
    mask[:B, :T] = batch.mask
    mask[B : B + 1, : batch.tokens - int(batch.mask.sum())] = 1
    advantages = torch.zeros_like(mask)
    advantages[:B, :T] = batch.advantage
    scaled = SKYRL.apply_loss_reduction_to_advantages_minibatch(
        advantages, mask, how, micro_batch_size=B, max_seq_len=c["max_new_tokens"]
    )

    # The worker multiplies by the number of ranks, since FSDP takes the mean over ranks.
    function = SKYRL.PolicyLossRegistry.get(kind)
    value, _ = function(batch.lp, batch.old, scaled[:B, :T], config, loss_mask=mask[:B, :T])
    return batch.ranks * value

"""The losses of ms-swift's GRPOTrainer.

    pip install --no-deps --target DIR ms-swift; export PYTHONPATH=DIR
    python conformance/loss.py conformance/subjects/ms_swift_losses.py:loss
    GENERATION=2 python conformance/loss.py conformance/subjects/ms_swift_losses.py:loss

GENERATION is steps_per_generation divided by gradient_accumulation_steps: the number of optimizer
steps for which the trainer generates at once.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch

SETTINGS = dict(clip_low=0.2, clip_high=0.28, count_empty=True, ranks="mean", equal_rows=True,
                micro_batches="mean")  # fmt: skip
GENERATION = int(os.environ.get("GENERATION", 1))
MOCKS = "trl trl.models trl.trainer trl.trainer.grpo_trainer trl.trainer.utils swift.dataset " \
    "swift.rewards swift.rl_core swift.rl_core.advantage swift.rl_core.data " \
    "swift.rl_core.grpo_algorithm swift.rlhf_trainers.gkd_helpers swift.sequence_parallel " \
    "swift.template swift.trainers swift.utils swift.rlhf_trainers.arguments " \
    "swift.rlhf_trainers.rollout_mixin swift.rlhf_trainers.utils"


def trainer_class():
    """Return ms-swift's GRPOTrainer with empty base classes. Its own methods compute the loss."""
    root = Path(importlib.util.find_spec("swift").submodule_search_locations[0])
    for name in ("swift", "swift.rlhf_trainers"):
        sys.modules[name] = ModuleType(name)  # its __init__ imports modelscope, and is not run
        sys.modules[name].__path__ = [str(Path(root, *name.split(".")[1:]))]
    mocks = {name: MagicMock() for name in MOCKS.split()}
    mocks["trl"].GRPOTrainer = type("GRPOTrainer", (), dict(__init__=None, log=None))
    mocks["swift.trainers"].SwiftMixin = type("SwiftMixin", (), {})
    mocks["swift.rlhf_trainers.rollout_mixin"].RolloutTrainerMixin = type("Mixin", (), {})
    mocks["swift.utils"].is_wandb_available.return_value = False
    mocks["swift.utils"].is_swanlab_available.return_value = False
    for name in ("profiling_decorator", "patch_save_last_checkpoint"):
        setattr(mocks["swift.rlhf_trainers.utils"], name, lambda function: function)

    # Only while the module is imported: other code of this process may want the real packages.
    kept = {name: sys.modules.get(name) for name in mocks}
    sys.modules.update(mocks)
    trainer = importlib.import_module("swift.rlhf_trainers.grpo_trainer").GRPOTrainer
    for name, module in kept.items():
        sys.modules.pop(name) if module is None else sys.modules.update({name: module})
    return trainer


TRAINER = trainer_class()


class Accelerator:
    """What the loss asks of accelerate, on one of several ranks."""

    def __init__(self, ranks):
        self.num_processes = ranks

    def gather_for_metrics(self, x):
        return x


def loss(batch):
    """Call `_compute_loss_and_metrics` on an object with the fields that it reads."""
    c = batch.settings
    kinds = dict(token_mean="dapo", sequence_mean="grpo", constant="dr_grpo")
    kind = c["objective"] if c["objective"] in ("cispo", "sapo") else kinds[c["aggregation"]]
    fields = dict(
        loss_type=kind, beta=0.0, compute_entropy=False, overlong_filter=False, kl_in_reward=False,
        rollout_importance_sampling_mode=None, log_rollout_offpolicy_metrics=False,
        disable_rollout_importance_sampling=True, _has_teacher=False, sdar_loss_coef=0,
        off_policy_sequence_mask_delta=None, chord_sft_iterator=None, compute_loss_func=None,
        model_accepts_loss_kwargs=False, epsilon_low=c["clip_low"],
        epsilon_high=c["clip_high"] + (c["objective"] == "cispo"), tau_pos=c["tau_pos"],
        tau_neg=c["tau_neg"], max_completion_length=c["max_new_tokens"],
        importance_sampling_level="sequence" if c["objective"] == "gspo" else "token",
        current_gradient_accumulation_steps=batch.micro_batches,
        model=SimpleNamespace(training=True), accelerator=Accelerator(batch.ranks),
        args=SimpleNamespace(
            delta=c["dual_clip"] or None, gradient_accumulation_steps=batch.micro_batches),
    )  # fmt: skip
    trainer = object.__new__(TRAINER)
    trainer.__dict__.update(fields)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.lp, None)

    # `_prepare_batch_inputs` counts the tokens of all that was generated at once.
    data = SimpleNamespace(
        completion_mask=batch.mask, truncated_mask=torch.zeros(len(batch.mask), dtype=torch.bool),
        advantages=batch.advantage, old_per_token_logps=batch.old, rollout_per_token_logps=None,
        ref_per_token_logps=None, num_items_in_batch=torch.tensor(GENERATION * batch.tokens),
    )  # fmt: skip
    return trainer._compute_loss_and_metrics(trainer.model, {}, data)[0]

"""Adapters of conformance/loss.py: this project's loss, and the losses of verl, TRL and OpenRLHF.

    python conformance/loss.py tests/adapters.py:ours objective=gspo aggregation=sequence_mean
    python conformance/loss.py tests/adapters.py:verl objective=gmpo   # needs verl
    python tests/adapters.py table          # the rows of full/RESULTS.md

Each adapter calls the package's own function with what the package's trainer gives it.
"""

import functools
import importlib.util
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

# As a script, this file finds tests/full under the name `full`, unless the root comes first.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conformance import loss as kit
from full.learn.objectives import OBJECTIVES, LossSettings, grpo_loss

CLIP = dict(clip_low=0.2, clip_high=0.28)
DROPPED = dict(clip_low=0.15, clip_high=0.15)  # DPPO's bounds


def ours(batch):
    """train_grpo.grpo_loss: the caller divides by Z of the whole step, and adds everything up."""
    # The constants of an objective are defaults at its function.
    c = batch.settings
    if c["divergence"] == "kl":
        raise NotImplementedError("DPPO's trust region is of total variation")
    constants = dict(
        cispo=dict(low=1 - c["clip_low"]), sapo=dict(up=c["tau_pos"], down=c["tau_neg"]),
        dppo=dict(cap=c["ratio_cap"]),
    ).get(c["objective"], {})  # fmt: skip
    function = functools.partial(OBJECTIVES[c["objective"]], **constants)
    settings = LossSettings(
        aggregation=c["aggregation"], objective="as claimed", clip_low=c["clip_low"],
        clip_high=c["clip_high"], dual_clip=c["dual_clip"], cispo_bound=1 + c["clip_high"],
    )  # fmt: skip
    with mock.patch.dict(OBJECTIVES, {"as claimed": function}):
        return grpo_loss(batch.lp, batch.old, batch.advantage, batch.mask, settings, Z=batch.Z)


ours.SETTINGS = dict(objective="clip", **CLIP)


# verl ------------------------------------------------------------------------------------------
# The engine gives the counts of the whole mini-batch, adds micro-batches up, and FSDP takes the
# mean over ranks, which `dp_size` undoes. Sequences without a token are in global_batch_size.

VERL_MODES = {
    "reinforce": "gpg", "clip": "vanilla", "cispo": "cispo", "gspo": "gspo", "sapo": "sapo",
    "gmpo": "geo_mean", "dppo": "dppo_tv",
}  # fmt: skip
VERL_AGGREGATIONS = {
    "token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}  # fmt: skip


def verl(batch):
    """verl's registered policy losses, with the counts that its ppo_loss puts into the config."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    c = batch.settings
    mode = VERL_MODES[c["objective"]]
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=c["clip_low"],
        clip_ratio_high=c["clip_high"], tau_pos=c["tau_pos"], tau_neg=c["tau_neg"],
        clip_ratio_c=c["ratio_cap"] if mode == "dppo_tv" else c["dual_clip"] or 1e9,
    )  # fmt: skip
    config.global_batch_info.update(
        dp_size=batch.ranks, batch_num_tokens=batch.tokens, global_batch_size=batch.sequences,
        loss_scale_factor=c["max_new_tokens"],
    )  # fmt: skip
    how = VERL_AGGREGATIONS[c["aggregation"]]
    loss = get_policy_loss_fn(mode)
    return loss(batch.old, batch.lp, batch.advantage, batch.mask, loss_agg_mode=how, config=config)


verl.SETTINGS = dict(objective="clip", **CLIP, ranks="mean", count_empty=True)


# TRL -------------------------------------------------------------------------------------------
# The loss divides by the number of accumulation steps itself, so that micro-batches are added up
# (the trainer sets `loss_is_scaled_for_ga`). DDP takes the mean over ranks. Each micro-batch has
# per_device_train_batch_size sequences, with or without a token.


class Accelerator:
    """What `_compute_loss` asks of accelerate, on one of several ranks."""

    device, process_index, sync_gradients = torch.device("cpu"), 0, True

    def __init__(self, ranks):
        self.num_processes = ranks

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def trl(batch):
    """GRPOTrainer._compute_loss or GMPOTrainer's, on an object with the fields that it reads."""
    c = batch.settings
    if c["objective"] == "gmpo":
        from trl.experimental.gmpo import GMPOTrainer as Trainer
    else:
        from trl.trainer.grpo_trainer import GRPOTrainer as Trainer

    loss_type = dict(token_mean="dapo", sequence_mean="grpo", constant="dr_grpo")[c["aggregation"]]
    loss_type = c["objective"] if c["objective"] in ("cispo", "sapo") else loss_type
    args = SimpleNamespace(
        delta=c["dual_clip"] or None, sapo_temperature_pos=c["tau_pos"],
        sapo_temperature_neg=c["tau_neg"], steps_per_generation=batch.micro_batches,
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args, model=SimpleNamespace(training=True), accelerator=Accelerator(batch.ranks),
        current_gradient_accumulation_steps=batch.micro_batches, loss_type=loss_type,
        importance_sampling_level="sequence" if c["objective"] == "gspo" else "token",
        epsilon_low=c["clip_low"], epsilon_high=c["clip_high"] + (c["objective"] == "cispo"),
        max_completion_length=c["max_new_tokens"], beta=0.0, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
        aux_loss_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip

    # The forward is replaced by its log-probs. num_items_in_batch counts the tokens of all ranks
    # in a generation batch, which by default is the batch of one optimizer step.
    entropy, mask = torch.zeros_like(batch.lp), batch.mask.long()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.lp, entropy, None)
    inputs = dict(
        prompt_ids=mask[:, :1], prompt_mask=mask[:, :1], completion_ids=mask, completion_mask=mask,
        advantages=batch.advantage[:, 0], old_per_token_logps=batch.old,
        num_items_in_batch=torch.tensor(batch.tokens),
    )  # fmt: skip
    return Trainer._compute_loss(trainer, trainer.model, inputs)


trl.SETTINGS = dict(objective="clip", **CLIP, ranks="mean", equal_rows=True, count_empty=True)


# OpenRLHF --------------------------------------------------------------------------------------
# DeepSpeed divides the loss of each micro-batch by their number, which the counts below undo, and
# takes the mean over ranks. Sequences without a token are not counted.


def openrlhf(batch):
    """PolicyLoss with the counts of `iter_grad_accum_global_norm`, after the actor's masking."""
    # The packages' __init__ import deepspeed, ray and vllm, which the loss does not use.
    if "openrlhf" not in sys.modules:
        root = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0])
        for name in ("openrlhf", "openrlhf.models", "openrlhf.utils"):
            package = ModuleType(name)
            package.__path__ = [str(Path(root, *name.split(".")[1:]))]
            sys.modules[name] = package
        sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))
    from openrlhf.models.loss import PolicyLoss

    c = batch.settings
    loss = PolicyLoss(
        clip_eps_low=c["clip_low"], clip_eps_high=c["clip_high"], dual_clip=c["dual_clip"] or None,
        token_level_loss=c["aggregation"] == "token_mean",
        policy_loss_type="gspo" if c["objective"] == "gspo" else "ppo",
    )  # fmt: skip

    # The actor's forward multiplies all log-probs by the mask, before they reach the loss.
    counts = [torch.tensor(float(n)) / batch.micro_batches for n in (batch.tokens, batch.filled)]
    lp, old = batch.lp * batch.mask.float(), batch.old * batch.mask.float()
    return loss(
        lp, old, batch.advantage, action_mask=batch.mask, dp_size=batch.ranks,
        batch_num_tokens=counts[0], global_batch_size=counts[1],
    )[0]  # fmt: skip


openrlhf.SETTINGS = dict(objective="clip", **CLIP, micro_batches="mean", ranks="mean")


# The table of full/RESULTS.md -----------------------------------------------------------------

SEQUENCES, CONSTANT = dict(aggregation="sequence_mean"), dict(aggregation="constant")
CASES = {
    verl: [{}, dict(dual_clip=3.0), SEQUENCES, CONSTANT, dict(objective="reinforce"),
           dict(objective="cispo"), dict(objective="gspo", **SEQUENCES),
           dict(objective="sapo", **SEQUENCES), dict(objective="gmpo", **SEQUENCES),
           dict(objective="dppo", **DROPPED)],
    trl: [{}, dict(dual_clip=3.0), SEQUENCES, CONSTANT,
          dict(objective="cispo", clip_low=1.0, clip_high=4.0), dict(objective="gspo", **SEQUENCES),
          dict(objective="sapo", **SEQUENCES), dict(objective="gmpo", **SEQUENCES)],
    openrlhf: [{}, dict(dual_clip=3.0), SEQUENCES, dict(objective="gspo", **SEQUENCES)],
}  # fmt: skip


def outcome(adapter, settings):
    """Return (number of properties passed, those that failed and why) of one row of the table."""
    rows = kit.conformance(adapter, settings)
    failed = {row["property"]: row["why"] for row in rows if row["verdict"] == "failed"}
    return sum(row["verdict"] == "passed" for row in rows), failed


def table():
    """Print a row for each case of each package that is installed."""
    print("| package | objective, aggregation | passed | failed |")
    print("|---|---|---|---|")
    for adapter, cases in CASES.items():
        name = adapter.__name__
        if not importlib.util.find_spec(name):
            continue
        for settings in cases:
            passed, failed = outcome(adapter, settings)
            c = kit.DEFAULTS | adapter.SETTINGS | settings
            what = "dual clip" if c["dual_clip"] else c["objective"]
            why = "; ".join(f"{key}: {text}" for key, text in failed.items())
            package = f"{name} {version(name)}"
            print(f"| {package} | {what}, {c['aggregation']} | {passed} | {why} |")


if __name__ == "__main__" and sys.argv[1:] == ["table"]:
    table()

"""Adapters of tests/conformance.py: this project's loss, and verl's.

    python tests/conformance.py tests/adapters.py:ours objective=gspo aggregation=sequence_mean
    python tests/conformance.py tests/adapters.py:verl objective=gmpo   # needs verl
    python tests/adapters.py table          # the rows of tests/RESULTS.md
"""

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path

import conformance

CLIP = dict(clip_low=0.2, clip_high=0.28)
DROPPED = dict(clip_low=0.15, clip_high=0.15)  # DPPO's bounds


def ours(batch):
    """train_grpo.grpo_loss: the caller divides by Z of the whole step, and adds everything up."""
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    import train_grpo

    c = batch.settings
    return train_grpo.grpo_loss(
        batch.lp, batch.old, batch.advantage, batch.mask, Z=batch.Z, aggregation=c["aggregation"],
        objective=c["objective"], clip_low=c["clip_low"], clip_high=c["clip_high"],
        dual_clip=c["dual_clip"], cispo_low=1 - c["clip_low"], cispo_bound=1 + c["clip_high"],
        sapo_up=c["tau_pos"], sapo_down=c["tau_neg"], dppo_distance=c["divergence"],
        dppo_cap=c["ratio_cap"],
    )  # fmt: skip


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


# The table of tests/RESULTS.md -----------------------------------------------------------------

SEQUENCES, CONSTANT = dict(aggregation="sequence_mean"), dict(aggregation="constant")
CASES = {
    verl: [{}, dict(dual_clip=3.0), SEQUENCES, CONSTANT, dict(objective="reinforce"),
           dict(objective="cispo"), dict(objective="gspo", **SEQUENCES),
           dict(objective="sapo", **SEQUENCES), dict(objective="gmpo", **SEQUENCES),
           dict(objective="dppo", **DROPPED)],
}  # fmt: skip
ISSUES = {("verl", "gmpo"): "verl 7913"}


def outcome(adapter, settings):
    """Return (number of properties passed, those that failed and why) of one row of the table."""
    rows = conformance.conformance(adapter, settings)
    failed = {row["property"]: row["why"] for row in rows if row["verdict"] == "failed"}
    return sum(row["verdict"] == "passed" for row in rows), failed


def table():
    """Print a row for each case of each package that is installed."""
    print("| package | objective, aggregation | passed | failed | known as |")
    print("|---|---|---|---|---|")
    for adapter, cases in CASES.items():
        name = adapter.__name__
        if not importlib.util.find_spec(name):
            continue
        for settings in cases:
            passed, failed = outcome(adapter, settings)
            c = conformance.DEFAULTS | adapter.SETTINGS | settings
            what = "dual clip" if c["dual_clip"] else c["objective"]
            why = "; ".join(f"{key}: {text}" for key, text in failed.items())
            known = ISSUES.get((name, what), "")
            package = f"{name} {version(name)}"
            print(f"| {package} | {what}, {c['aggregation']} | {passed} | {why} | {known} |")


if __name__ == "__main__" and sys.argv[1:] == ["table"]:
    table()

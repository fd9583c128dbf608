"""Check plans and steps against their definitions, in float64.

    python -m full check                  # both subjects, one after the other
    python -m full check parallel         # or grpo
    python -m full check parallel --all   # the slow rows too, of up to 8 ranks

Tests hold models, the ring and trees to their definitions.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

import train_grpo
from full import equivalence
from full.audit.audit import NOT_BY_HAND, RecordedStep, compare_step
from full.audit.models import StepModels
from full.learn.batches import RolloutQueue
from full.learn.trainer import Trainer, first_weights
from full.model.hf import save_hf
from full.model.lora import draw_factors
from full.model.transformer import Transformer, draw_weights
from full.ranks.joining import connect
from full.run.build import ONE_PROCESS, build, build_teacher, own_shape
from full.run.config import Config
from full.run.directory import RunDirectory
from full.run.logs import rollout_line, step_metrics
from full.run.tasks import make_task
from full.tiny import tiny_model

# Plans ------------------------------------------------------------------------------------------


def check_parallel(every=False) -> bool:
    """Compare runs by every plan, tree and mode with one process, and return whether all agree.

    every: bool. The slow rows of equivalence.py too, of up to 8 ranks.
    """
    rows = [row for row in equivalence.ROWS if every or row.mark != "slow"]
    outcomes = equivalence.run_rows(rows)
    errors = []
    ok = True
    for row in rows:
        outcome = outcomes[row.name]
        is_right = equivalence.is_right(row, outcome)
        is_refused = isinstance(outcome, str)  # some rows must be
        error = "refused" if is_refused else f"{max(outcome.values()):.1e}"
        print(f"{error:7}  {'ok' if is_right else 'FAILED'}  {row.name}")
        ok = ok and is_right
        if not is_refused and row.bound == equivalence.BOUND:
            errors.append(max(outcome.values()))
    print(json.dumps({"check": "parallel", "ok": ok, "max_error": max(errors)}))
    return ok


# Steps ------------------------------------------------------------------------------------------
# Each kind of setting is a run of two steps. The second step is repeated from its definition, in
# float64, and must have the same metrics and weights.

SMALL = dict(dtype="float64", prompts=4, group=4, hidden=32, minibatches=1, forks=2, fork_turns=1)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, sparse_layers=(0, 1))
STEPS = {  # together these settings reach every line of conformance/definition.py
    "group_mean, 2 updates": dict(minibatches=2),
    "group_std, GSPO, KL": dict(
        advantage="group_std", objective="gspo", aggregation="sequence_mean", kl_coef=0.1,
        clip_low=3e-4, clip_high=4e-4, minibatches=2),
    "CISPO, TIS": dict(
        objective="cispo", cispo_bound=1.001, aggregation="constant",
        proximal=True, importance_cap=1.0, minibatches=2),
    "gae, KL in the reward": dict(
        advantage="gae", kl_coef=0.1, kl_in="reward", kl="k1", minibatches=2, lr_decay="cosine",
        overlong_buffer=3, max_new_tokens=8),
    "gae, the critic's rate, 2 updates": dict(
        advantage="gae", critic_lr=0.02, minibatches=2, weight_decay=0.1,
        kl_coef=0.1),
    "gae by trees": dict(advantage="gae", aggregation="constant", tree="dta", chunk_tokens=8),
    "leave_one_out, dual clip, filter": dict(
        advantage="leave_one_out", dual_clip=1.5, overlong="filter", max_new_tokens=8,
        temperature=0.8, weight_decay=0.1, minibatches=2),
    "constant, filter": dict(
        aggregation="constant", overlong="filter", max_new_tokens=8, kl_coef=0.1),
    "balanced experts, filter": dict(
        router_bias_rate=0.05, overlong="filter", max_new_tokens=8,
        minibatches=2),
    "dynamic sampling, 3 updates": dict(
        dynamic_sampling=3, entropy_coef=0.0, minibatches=3, group=8, size=3),
    "staleness 1, TIS": dict(staleness=1, minibatches=2, proximal=True, importance_cap=1.0),
    "staleness 1, the sampler's old": dict(staleness=1),
    "REINFORCE++, geometric mask": dict(
        objective="reinforce", advantage="none_batch", staleness=1, minibatches=2,
        proximal=True, importance="mask", importance_of="geometric", importance_low=0.99,
        importance_cap=1.01),
    "GMPO, sequence mask": dict(
        objective="gmpo", clip_low=1e-3, clip_high=2e-3, aggregation="sequence_mean", staleness=1,
        minibatches=2, proximal=True, importance="mask", importance_of="sequence",
        importance_low=0.95, importance_cap=1.02),
    "SAPO, LitePPO, soft overlong, IcePop": dict(
        objective="sapo", advantage="batch_std", overlong_buffer=3, max_new_tokens=8, minibatches=2,
        staleness=1, proximal=True, importance="mask", importance_low=0.98, importance_cap=1.01),
    "DPPO by trees": dict(
        objective="dppo", clip_low=1e-4, clip_high=2e-4, minibatches=2, tree="sparse",
        micro_tokens=60),
    "DPPO, leave_one_out": dict(
        objective="dppo", clip_low=1e-7, clip_high=2e-7, minibatches=2,
        advantage="leave_one_out"),
    "router bias, 2 updates": dict(
        generator_dtype="bfloat16", router_bias_rate=0.05,
        kl_coef=0.1, proximal=True, minibatches=2),
    "LoRA, KL, 2 updates": dict(lora_rank=3, kl_coef=0.1, minibatches=2),
    "LoRA of experts, router and head": dict(
        lora_rank=2, lora_targets="k_proj,o_proj,gate_proj,down_proj,gate,lm_head", kl_coef=0.1,
        router_bias_rate=0.05, advantage="gae", proximal=True, minibatches=2),
    "GSPO, a teacher": dict(objective="gspo", clip_low=1e-3, clip_high=1e-3, teacher="tiny"),
}  # fmt: skip


def step_error(device="cpu", **changes) -> float:
    """Do two steps of a run, and the second one by hand. Return the largest difference.

    device: of the run's steps. The step by hand is done on the CPU.
    changes: settings that differ from SMALL.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        config, task, trainer = small_run(folder, device, changes)
        batch, metrics = two_steps(config, task, trainer, folder)
        recorded = second_step(config, task, batch, metrics, folder)
        rows, _, weights = compare_step(recorded)

    # A row in which nothing happened could not fail.
    truncated = [t for group in batch.groups.values() for t in group if t.truncated]
    assert trainer.policy_version > 1 and (config.overlong != "filter" or truncated)
    keys = {row.key for row in rows}
    unknown = [name for name in metrics.keys() - keys if not name.startswith(NOT_BY_HAND)]
    if unknown:
        print(f"the definition does not know {', '.join(sorted(unknown))}")
    return largest_difference(rows, weights, trainer)


def small_run(folder, device, changes):
    """Return the settings, task and trainer of a small run. Its checkpoints go to folder/hf."""
    config = Config(**SMALL | dict(lr=0.01, lr_warmup=0) | changes).check()
    if not dist.is_initialized():
        connect(device)
    task = make_task(config)
    if config.router_bias_rate:  # experts are from a checkpoint, with the task's vocabulary
        shape = EXPERTS | dict(vocab_size=task.vocab_size, eos_token_id=tuple(task.end))
        save_hf(tiny_model("qwen3_moe", seed=2, **shape), folder / "hf")
        config = dataclasses.replace(config, model=f"{folder}/hf")
    if config.teacher:
        teacher = Transformer(own_shape(dataclasses.replace(config, hidden=16), task))
        draw_weights(teacher.double(), 5)
        save_hf(teacher, folder / "hf")
        config = dataclasses.replace(config, teacher=f"{folder}/hf")

    model, generator, reference = build(config, task)
    first_weights(model.to_empty(device=device), config.model, config.seed)
    if config.lora_rank:
        draw_factors(model, config.seed)
    trainer = Trainer(config, model, generator=generator, reference=reference,
                      teacher=build_teacher(config))  # fmt: skip
    return config, task, trainer


def two_steps(config, task, trainer, folder):
    """Do two steps, with a checkpoint around each. Return the second one's batch and metrics."""
    RunDirectory(folder).write_reference(trainer)
    trainer.push_weights()
    trainer.save_checkpoint(checkpoint(folder, 0), step=0)
    queue = RolloutQueue(config, task, trainer)
    do_step(config, queue, trainer, 0)
    trainer.save_checkpoint(checkpoint(folder, 1), step=1)
    batch = queue.get(1)
    metrics = do_step(config, SimpleNamespace(get=lambda step: batch), trainer, 1)
    trainer.save_checkpoint(checkpoint(folder, 2), step=2)
    return batch, metrics


def checkpoint(folder, step) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / f"step-{step:08d}"


def do_step(config, source, trainer, step) -> dict:
    """Do one step of the loop without evaluation or log, and return its metrics."""
    line = {}

    def keep(step, batch, metrics, updates, solved):
        line.update(step_metrics(trainer, batch, metrics, updates, step))

    unevaluated = SimpleNamespace(get=source.get, evaluate=lambda: None)
    only = dataclasses.replace(config, steps=step + 1)
    train_grpo.train(only, unevaluated, trainer, keep, first_step=step)
    return line


def second_step(config, task, batch, metrics, folder) -> RecordedStep:
    """Return step 1 as the audit of a run gets it: it begins at its checkpoint."""
    lines = {n: [rollout_line(task, 1, i, t) for i, t in enumerate(group)]
             for n, group in batch.groups.items()}  # with the advantages
    alone = dataclasses.replace(config, device="cpu", **ONE_PROCESS)
    files = SimpleNamespace(directory=RunDirectory(folder), config=alone, stored=config,
                            metrics=[{}, metrics], rollouts=lambda *_: lines)  # fmt: skip
    sampled = checkpoint(folder, 0 if config.staleness else 1)
    models = StepModels(files, task, checkpoint(folder, 1), sampled, checkpoint(folder, 2))
    return RecordedStep(files, models, task, 1)


def largest_difference(rows, weights, trainer) -> float:
    """Return the largest difference of metrics and of trained weights."""
    # A sampler of less precision has draws and log-probs of its own. Weights are compared entry by
    # entry, without the rounding of small gradients that a row relative to a tensor shows.
    left_out = ("sampling", "gradient", "parameters", "critic/gradient", "critic/parameters")
    differences = [row.difference / max(1.0, abs(row.by_hand)) for row in rows
                   if not row.key.startswith(left_out)]  # fmt: skip
    for model, _, prefix in trainer.learners:
        differences += [(p.detach().cpu() - weights[prefix][name]).abs().max().item()
                        for name, p in model.named_parameters() if p.requires_grad]  # fmt: skip
    return float(max(differences))


def check_grpo() -> bool:
    """Do a step of every kind of setting by hand, and return whether all errors are small."""
    errors = {name: step_error(**changes) for name, changes in STEPS.items()}
    for name, error in errors.items():
        print(f"{error:.1e}  {'ok' if error <= 1e-12 else 'FAILED'}  a step by hand: {name}")
    ok = all(error <= 1e-12 for error in errors.values())
    print(json.dumps({"check": "grpo", "ok": ok, "max_error": max(errors.values())}))
    return ok


# The command ------------------------------------------------------------------------------------

SUBJECTS = {"parallel": check_parallel, "grpo": check_grpo}


def main(argv) -> int:
    """`check [SUBJECT]`, `check parallel --all`: return 1 if an error is over its bound.

    Without a subject all are checked, each in its own process.
    """
    parser = argparse.ArgumentParser("python -m full check", description=main.__doc__)
    parser.add_argument("subject", nargs="?", choices=SUBJECTS, help="default: all")
    parser.add_argument("--all", action="store_true", help="parallel: the slow rows too")
    options = parser.parse_args(argv)
    if options.all and options.subject != "parallel":
        parser.error("--all is for check parallel")
    if options.subject is None:
        # The code is negative if a signal has ended a check.
        codes = [subprocess.run([sys.executable, "-m", "full", "check", subject]).returncode
                 for subject in SUBJECTS]  # fmt: skip
        return int(any(codes))
    arguments = dict(every=True) if options.all else {}
    return 0 if SUBJECTS[options.subject](**arguments) else 1

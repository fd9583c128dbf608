"""Check plans and steps against their definitions, in float64, on ranks of one's own.

    python -m full check                  # both subjects, one after the other
    python -m full check parallel         # or grpo
    python -m full check parallel --all   # the slow rows too, of up to 8 ranks

Models, the ring and trees are held to theirs by the tests.
"""

import argparse
import dataclasses
import functools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import parallel
from full import equivalence
from full.audit.audit import NOT_BY_HAND, RecordedStep, compare_step
from full.audit.models import StepModels
from full.learn.batches import RolloutQueue
from full.learn.trainer import Trainer, first_weights
from full.model.hf import save_hf
from full.model.lora import draw_factors
from full.model.parallelize import MODES, parallelize
from full.model.transformer import Transformer, draw_weights
from full.ranks.joining import connect
from full.ranks.optimizer import LocalOptimizer, clip_grad_norm, reduce_gradients
from full.ranks.places import local
from full.ranks.plans import Grid, Plan
from full.run.build import ONE_PROCESS, build, build_teacher, own_shape
from full.run.config import Config
from full.run.directory import RunDirectory
from full.run.logs import do_step, rollout_line
from full.run.tasks import make_task
from full.tiny import tiny_model
from parallel import ADAMW, PLANS

# Plans ------------------------------------------------------------------------------------------
# The plans of parallel.py by the folder's functions, and whole runs by every plan. `parallel.py`
# checks its own.


class FullTraining:
    """What `parallel.Training` is, by the functions of the folder. Text: "d2t2 zero1"."""

    def __init__(self, model, text):
        plan, mode = text.split()
        self.grid = Grid(Plan.parse(plan))
        options = dict(attention=lambda: None, mode=mode)  # the check calls the ring of its own
        self.model = parallelize(model, self.grid.plan, device_mesh=self.grid, **options)
        make = functools.partial(torch.optim.AdamW, **ADAMW)
        self.optimizer = LocalOptimizer(self.model, make, zero=mode == "zero1")

    def reduce_and_clip(self, max_norm):
        # The check divides by the norm + 1e-6, as torch does, and the folder by the norm.
        reduce_gradients(self.model)
        norm = clip_grad_norm(self.model, math.inf)
        clip_grad_norm(self.model, (max_norm * norm / (norm + 1e-6)).item())
        return norm

    def parts(self, truth):
        """Yield this rank's entries of each parameter and gradient, and the true ones."""
        for name, p in self.model.named_parameters():
            region = self.model.part.places[name].region
            whole = truth.get_parameter(name)
            yield local(p), whole[region]
            yield local(p.grad), whole.grad[region]


def check_parallel(every=False) -> bool:
    """Compare every plan with one process, print a table of errors, and return whether it is ok.

    every: bool. The slow rows of equivalence.py too, of up to 8 ranks.
    """
    # These ranks are forks, which need a process where autograd has not run, so they come first.
    plans = {world: [f"{plan} {mode}" for plan in dict.fromkeys(x.split()[0] for x in PLANS[world])
                     for mode in MODES] for world in PLANS}  # fmt: skip
    errors = parallel.check_plans(plans, FullTraining, parallel.check_model())
    for name, error in errors.items():
        print(f"{error:.1e}  {'ok' if error <= 1e-10 else 'FAILED'}  {name}")
    ok = all(error <= 1e-10 for error in errors.values())

    # Then whole runs by every plan, tree and mode. Some must be refused.
    rows = [row for row in equivalence.ROWS if every or row.mark != "slow"]
    found = equivalence.run_rows(rows)
    for row in rows:
        is_right = equivalence.is_right(row, found[row.name])
        refused = isinstance(found[row.name], str)
        worst = "refused" if refused else f"{max(found[row.name].values()):.1e}"
        print(f"{worst:7}  {'ok' if is_right else 'FAILED'}  {row.name}")
        ok = ok and is_right
        if not refused and row.bound == equivalence.BOUND:
            errors[row.name] = max(found[row.name].values())
    print(json.dumps({"check": "parallel", "ok": ok, "max_error": max(errors.values())}))
    return ok


# Steps ------------------------------------------------------------------------------------------
# Each kind of setting is a run of two steps in memory. The second is done again from its
# definition, in float64, and must have the same metrics and weights.

SMALL = dict(dtype="float64", prompts=4, group=4, hidden=32, minibatches=1, forks=2, fork_turns=1)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, sparse_layers=(0, 1))
STEPS = {  # settings that between them reach every line of conformance/definition.py
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
    """Do two steps of a run with some settings, and the second one by hand.

    Returns the largest difference of metrics and parameters. The run's steps are done on the
    device, the step by hand on the CPU.
    """
    config = Config(**SMALL | dict(lr=0.01, lr_warmup=0) | changes).check()
    if not dist.is_initialized():
        connect(device)
    task = make_task(config)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if config.router_bias_rate:  # experts are those of a checkpoint, with the task's vocabulary
            shape = EXPERTS | dict(vocab_size=task.vocab_size, eos_token_id=tuple(task.end))
            experts = tiny_model("qwen3_moe", seed=2, **shape)
            save_hf(experts, folder / "hf")
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
        directory = RunDirectory(folder)
        directory.write_reference(trainer)
        trainer.push_weights()
        paths = {n: folder / f"step-{n:08d}" for n in range(3)}
        trainer.save_checkpoint(paths[0], step=0)
        queue = RolloutQueue(config, task, trainer)
        do_step(config, queue, trainer, 0)

        # The state before step 1 goes through a checkpoint, as in an audit.
        trainer.save_checkpoint(paths[1], step=1)
        batch = queue.get(1)
        found = do_step(config, SimpleNamespace(get=lambda step: batch), trainer, 1)
        trainer.save_checkpoint(paths[2], step=2)
        lines = {n: [rollout_line(task, 1, i, t) for i, t in enumerate(batch.groups[n])]
                 for n in batch.groups}  # with the advantages
        alone = dataclasses.replace(config, device="cpu", **ONE_PROCESS)
        files = SimpleNamespace(directory=directory, config=alone, engine="", exact=False,
                                metrics=[{}, found], rollouts=lambda *_: lines)  # fmt: skip
        sampled = paths[0 if config.staleness else 1]
        models = StepModels(files, task, paths[1], sampled, paths[2])
        rows, _, weights = compare_step(RecordedStep(files, models, task, 1))
    unknown = [x for x in found.keys() - {row.key for row in rows} if not x.startswith(NOT_BY_HAND)]
    if unknown:
        print(f"the definition does not know {', '.join(sorted(unknown))}")
    truncated = [t for group in batch.groups.values() for t in group if t.truncated]
    assert trainer.policy_version > 1 and (config.overlong != "filter" or truncated)
    # A sampler of less precision has draws and log-probs of its own. Weights are compared entry by
    # entry, without the rounding of small gradients that a row relative to a tensor shows.
    left_out = ("sampling", "gradient", "parameters", "critic/gradient", "critic/parameters")
    worst = [row.difference / max(1.0, abs(row.by_hand)) for row in rows
             if not row.key.startswith(left_out)]  # fmt: skip
    for model, _, prefix in trainer.learners:
        worst += [(p.detach().cpu() - weights[prefix][name]).abs().max().item()
                  for name, p in model.named_parameters() if p.requires_grad]  # fmt: skip
    return float(max(worst))


def check_grpo() -> bool:
    """Do a step of every kind of setting by hand, print errors, and return whether all are ok."""
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

    Without a subject each of them is checked, in a process of its own.
    """
    parser = argparse.ArgumentParser("python -m full check", description=main.__doc__)
    parser.add_argument("subject", nargs="?", choices=SUBJECTS, help="default: all")
    parser.add_argument("--all", action="store_true", help="parallel: the slow rows too")
    options = parser.parse_args(argv)
    if options.all and options.subject != "parallel":
        parser.error("--all is for check parallel")
    if options.subject is None:
        return max(subprocess.run([sys.executable, "-m", "full", "check", subject]).returncode
                   for subject in SUBJECTS)  # fmt: skip
    given = dict(every=True) if options.all else {}
    return 0 if SUBJECTS[options.subject](**given) else 1

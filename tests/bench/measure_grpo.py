"""Whole steps: `python tests/bench/measure_grpo.py [bench | check [--all]]`.

check: whole steps against byhand.py, the gradient's invariances, and the matrix: every plan, tree
mode and family of models against one process that trains without trees, in float64. Cells that say
`mixed` compute in float32, with masters in float64, and are off by what float32 products are.
bench: seconds by phase, tokens a second, and what sharing prefixes gains against its bound.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

from oracles import LiveBytes
from measure_models import QWEN3_06B

import ring_attention as ring
from full.batches import RolloutQueue, SampledBatch, collect
from full.build import build, build_teacher, own_shape
from full.byhand import Step, metrics_by_hand
from full.checkpoint import write_checkpoint
from full.config import LORA_TARGETS, Config
from full.directory import RunDirectory
from full.export import ONE_PROCESS
from full.hf import save_hf
from full.logs import do_step, rollout_line
from full.lora import add_factors, draw_factors, is_factor
from full.model_config import ModelConfig
from full.optimizer import clip_grad_norm, persistent_buffers, tensors_of, weights_to_store
from full.places import full
from full.plans import Plan
from full.questions import make_task
from full.ranks import connect
from full.recorded import Case
from full.tasks import Task
from full.tiny import tiny_model
from full.trainer import Trainer, first_weights
from full.transformer import Transformer, draw_weights
from full.trie import TokenTrie
from full.weights import copy_weights
# check ------------------------------------------------------------------------------------------

SMALL = dict(dtype="float64", prompts=4, group=4, hidden=32, minibatches=1, forks=2, fork_turns=1)
BOUND = 1e-10


def built(config, task, device):
    """Policy, generator and reference of `build`, the policy in memory: on any device."""
    model, generator, reference = build(config, task)
    first_weights(model.to_empty(device=device), config.model, config.seed)
    if config.lora_rank:
        draw_factors(model, config.seed)
    return model, generator, reference


def rollouts(config, device="cpu"):
    """Trajectories of one step, with an old policy and advantages of their own; forks share."""
    task = make_task(config)
    model, generator, _ = built(config, task, device)
    trainer = Trainer(config, model, generator=generator)
    trainer.push_weights()
    mine, kept, _ = collect(config, task, trainer.sampler, 0)
    batch, rng = [t for g in kept for t in mine[g]], np.random.default_rng(0)
    for t in batch:  # so that ratios and clips matter, and the critic has something to learn
        noise = 0.3 * rng.standard_normal((3, len(t.mask))) * t.mask
        t.old_logprobs, t.values, t.returns = t.sampler_logprobs + noise[0], noise[1], noise[2]
        t.advantages = np.full(len(t.mask), rng.standard_normal())
    return trainer, batch


STEPS = {  # settings that between them reach every line of `loss_definition` and `step_by_hand`
    "group_mean, 2 updates": dict(minibatches=2),
    "group_std, GSPO, KL": dict(
        advantage="group_std", objective="gspo", aggregation="sequence_mean", kl_coef=0.1,
        clip_low=3e-4, clip_high=4e-4, minibatches=2),
    "per_branch, CISPO, TIS": dict(
        advantage="per_branch", objective="cispo", cispo_bound=1.001,
        aggregation="constant", proximal=True, importance_cap=1.0, minibatches=2),
    "gae, KL in the reward": dict(
        advantage="gae", kl_coef=0.1, kl_in="reward", kl="k1", minibatches=2, lr_decay="cosine"),
    "gae by trees": dict(advantage="gae", aggregation="constant", tree="dta", chunk_tokens=8),
    "leave_one_out, dual clip, filter": dict(
        advantage="leave_one_out", dual_clip=1.5, overlong="filter", max_new_tokens=8,
        temperature=0.8, weight_decay=0.1, minibatches=2),
    "constant, filter": dict(
        aggregation="constant", overlong="filter", max_new_tokens=8, kl_coef=0.1),
    "balanced experts, filter": dict(
        balance_coef=0.5, router_bias_rate=0.05, overlong="filter", max_new_tokens=8,
        minibatches=2),
    "dynamic sampling, 3 updates": dict(
        dynamic_sampling=True, max_rounds=3, entropy_coef=0.0, minibatches=3, group=8, size=3),
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
    "replayed routes, 2 updates": dict(
        replay_routes=True, generator_dtype="bfloat16", balance_coef=0.5, router_bias_rate=0.05,
        kl_coef=0.1, proximal=True, minibatches=2),
    "LoRA, KL, 2 updates": dict(lora_rank=3, kl_coef=0.1, minibatches=2),
    "LoRA of experts, router and head": dict(
        lora_rank=2, lora_targets="k_proj,o_proj,gate_proj,down_proj,gate,lm_head", kl_coef=0.1,
        router_bias_rate=0.05, balance_coef=0.5, advantage="gae", proximal=True, minibatches=2),
    "GSPO, a teacher": dict(objective="gspo", clip_low=1e-3, clip_high=1e-3, teacher="tiny"),
}  # fmt: skip


def has_truncated(batch):
    return any(t.truncated for group in batch.groups.values() for t in group)


def step_error(device="cpu", **changes) -> float:
    """The second step of a run against byhand.py: the worst of metrics and parameters.

    The run's step is done on the device, the step by hand on the CPU.
    """
    config = Config(**SMALL | dict(lr=0.01, lr_warmup=0) | changes).check()
    if not dist.is_initialized():
        connect(device)
    task = make_task(config)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if config.router_bias_rate:  # experts are those of a checkpoint, with the task's vocabulary
            shape = FAMILIES["balanced moe"] | dict(vocab_size=task.vocab_size, router_bias_rate=0)
            experts = tiny_model(eos_token_id=tuple(task.end), **shape)
            save_hf(experts, folder / "hf")
            config = dataclasses.replace(config, model=f"{folder}/hf")
        if config.teacher:
            teacher = Transformer(own_shape(dataclasses.replace(config, hidden=16), task))
            draw_weights(teacher.double(), 5)
            save_hf(teacher, folder / "hf")
            config = dataclasses.replace(config, teacher=f"{folder}/hf")
        model, generator, reference = built(config, task, device)
        trainer = Trainer(config, model, generator=generator, reference=reference,
                          teacher=build_teacher(config, task))  # fmt: skip
        if reference is not None:
            copy_weights(model, reference)
            write_checkpoint(folder / "reference", tensors_of(reference), {})
        trainer.push_weights()
        queue = RolloutQueue(config, task, trainer)
        found = do_step(config, queue, trainer, 0)

        # The state before step 1 goes through a checkpoint, as in an audit.
        trainer.save_checkpoint(folder / "step-00000001", step=1)
        batch = queue.get(1)
        lines = {n: [rollout_line(task, 1, i, t) for i, t in enumerate(batch.groups[n])]
                 for n in batch.groups}  # fmt: skip
        source = SimpleNamespace(get=lambda step: batch)
        found = do_step(config, source, trainer, 1)
        alone = dataclasses.replace(config, device="cpu", **ONE_PROCESS)
        files = SimpleNamespace(directory=RunDirectory(folder), config=alone)
        case = Case(files, task, 1, folder, lines, before=folder / "step-00000001")
        step = Step(case)
        truth = metrics_by_hand(case, step, batch.sampled_by)
    missing = found.keys() ^ truth.keys()
    not_by_hand = {"logprob_gap/identical", "seconds/rollout", "seconds/wait_train"}
    if config.tree != "disabled":
        not_by_hand.add("tokens/trained")
    assert missing <= not_by_hand, missing
    assert trainer.policy_version > 1 and (config.overlong != "filter" or has_truncated(batch))
    worst = [abs(found[name] - x) / max(1.0, abs(x)) for name, (x, *_) in truth.items()]
    hand = step.weights | persistent_buffers(step.policy)
    tensors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors |= persistent_buffers(model)
    worst += [(x.cpu() - hand[name]).abs().max().item() for name, x in tensors.items()]
    return float(max(worst))


def invariances(device="cpu", steps=STEPS):
    """{row: error}: steps against the step by hand, the gradient however the batch is cut."""
    rows = {f"a step by hand: {name}": step_error(device, **how) for name, how in steps.items()}
    config = Config(**SMALL).check()
    trainer, batch = rollouts(config, device)
    Z, model = trainer.loss_denominator(batch), trainer.model

    def gradient(batch, **changes):
        trainer.config = dataclasses.replace(config, **changes)
        model.zero_grad()
        loss = trainer.forward_backward(batch, Z)["loss/token_mean"]
        loss = torch.tensor([loss], dtype=torch.float64)
        return torch.cat([loss, *(p.grad.flatten().cpu() for p in model.parameters())])

    whole = gradient(batch)
    for name, other in {
        "gradient, one sequence a micro-batch": gradient(batch, micro_tokens=1),
        "gradient, 40 tokens a micro-batch": gradient(batch, micro_tokens=40),
        "gradient, reversed order": gradient(batch[::-1]),
        "gradient, by the tree of prefixes": gradient(batch, tree="sparse"),
        "gradient, by its chunks of 9": gradient(batch, tree="dta", chunk_tokens=9),
    }.items():
        rows[name] = ((other - whole).norm() / whole.norm()).item()
    return rows


FAMILIES = {
    "qwen2": dict(vocab_size=12),
    "qwen3": dict(vocab_size=12),
    "qwen3_moe": dict(vocab_size=12, num_experts=4),
    "gemma3_text": dict(vocab_size=12),
    "balanced moe": dict(
        model_type="qwen3_moe", vocab_size=12, num_experts=8, num_experts_per_tok=2,
        num_hidden_layers=2, sparse_layers=(0, 1), router_bias_rate=0.05),
}  # fmt: skip
FAMILIES["biased moe"] = FAMILIES["replayed moe"] = FAMILIES["balanced moe"]
FAMILIES["adapted moe"] = FAMILIES["balanced moe"]
FAMILIES["adapted gemma"] = dict(model_type="gemma3_text", vocab_size=12)
BALANCED = {  # their settings; a tree has no balance loss
    "balanced moe": dict(balance_coef=0.5, router_bias_rate=0.05),
    "biased moe": dict(router_bias_rate=0.05),
    "replayed moe": dict(router_bias_rate=0.05, replay_routes=True),
    "adapted moe": dict(
        router_bias_rate=0.05, lora_rank=3, lora_targets=f"{LORA_TARGETS},gate,lm_head"),
    "adapted gemma": dict(lora_rank=2, lora_targets="q_proj,down_proj"),
}  # fmt: skip
PLANS = {  # name -> ranks, flags
    "d1": (1, {}),
    "2 ranks": (2, {}),
    "2 ranks fsdp ac": (2, dict(data_parallel="fsdp", ac="full")),
    "d2 zero1": (2, dict(plan="d2", data_parallel="zero1")),
    "t2": (2, dict(plan="t2")),
    "t2 ac": (2, dict(plan="t2", ac="op")),
    "c2": (2, dict(plan="c2")),
    "p2": (2, dict(plan="p2")),
    "d2e2": (2, dict(plan="d2e2")),
    "d2t2": (4, dict(plan="d2t2")),
    "d2c2 fsdp": (4, dict(plan="d2c2", data_parallel="fsdp")),
    "t2c2": (4, dict(plan="t2c2")),
    "d2p2 zero1": (4, dict(plan="d2p2", data_parallel="zero1")),
    "d2t2e4": (4, dict(plan="d2t2e4")),
    "d2 fsdp offload": (2, dict(plan="d2", data_parallel="fsdp-offload")),
    "c4": (4, dict(plan="c4")),
}
MIXED = {  # the same, in mixed precision
    f"{name} mixed": (PLANS[name][0], PLANS[name][1] | dict(compute_dtype="float32"))
    for name in PLANS
}
CELLS = PLANS | MIXED
MIXED_BOUND = 1e-4
TREES = {
    "disabled": {},
    "sparse": dict(tree="sparse", micro_tokens=40),
    "dta": dict(tree="dta", chunk_tokens=9),
    "dta again": dict(tree="dta", chunk_tokens=5, ac="full"),
}


def model_of(family):
    """The same random critic on every rank."""
    shape = dict(model_type=family) | FAMILIES[family]
    model = tiny_model(seed=2, **shape).add_value_head()
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(model.score.weight, generator=generator)
    lora = setting(**BALANCED.get(family, {})).lora
    if lora is not None:
        model = add_factors(model, lora, torch.float64)
        for name, p in model.named_parameters():
            if is_factor(name):
                torch.nn.init.normal_(p, std=0.2, generator=generator)
    return model


def with_routes(batch, shape) -> list:
    """A batch with random experts, which no router would select; equal prefixes have equal ones.

    But for every third trajectory, so that a tree forks at its first token.
    """
    size = len(shape["sparse_layers"]), shape["num_experts_per_tok"]
    made = []
    for n, t in enumerate(batch):
        routes = []
        for stop in range(1, len(t.tokens)):
            rng = np.random.default_rng([n % 3 == 0, *t.tokens[:stop]])
            drawn = [rng.permutation(shape["num_experts"])[: size[1]] for _ in range(size[0])]
            routes.append(np.array(drawn, dtype=np.int16))
        made.append(dataclasses.replace(t, routes=np.array(routes)))
    return made


def three_steps(config, family, batch, device="cpu"):
    """[(loss, gradients, norm)] of three steps on this rank's share, and the parameters then."""
    batch = with_routes(batch, FAMILIES[family]) if config.replay_routes else batch
    trainer, found, seen = Trainer(config, model_of(family).to(device)), [], {}
    mine = [t for t in batch if t.group % dist.get_world_size() == dist.get_rank()]

    def watched(model, most):  # the gradients are whole then, and gone after the step
        places = model.part.places
        seen["grads"] = {name: full(p.grad, places[name]).clone()
                         for name, p in model.named_parameters() if p.requires_grad}  # fmt: skip
        return clip_grad_norm(model, most)

    with mock.patch("full.trainer.clip_grad_norm", watched):
        for _ in range(3):
            metrics = trainer.forward_backward(mine, trainer.loss_denominator(batch))
            names = "loss/token_mean", "balance/loss", "experts/load_max", "experts/replay_changed"
            loss = sum(metrics.get(name, 0.0) for name in names)
            norm = trainer.optim_step(lr=0.01)["grad_norm"]
            found.append((loss, seen["grads"], norm))
    weights = weights_to_store(trainer.model, trainer.optimizer)
    parameters = {name: full(p) for name, p in weights.items()}
    return found, parameters | persistent_buffers(trainer.model)


def tensors_apart(found, truth):
    """The largest difference over all tensors that are here, relative to the largest entry."""
    worst = max((found[name].cpu() - truth[name]).abs().max().item() for name in found)
    return worst / max(x.abs().max().item() for x in truth.values())


def errors(found, truth):
    """The worst of loss, gradients, norm and parameters."""
    (steps, parameters), (true_steps, true_parameters) = found, truth
    worst = [tensors_apart(parameters, true_parameters)]
    for (loss, grads, norm), (true_loss, true_grads, true_norm) in zip(
        steps, true_steps, strict=True
    ):
        worst += [abs(loss / true_loss - 1), abs(norm / true_norm - 1)]
        worst.append(tensors_apart(grads, true_grads))
    return max(worst)


def setting(**changes):
    return Config(**SMALL, advantage="gae", **changes)


def refused(config, family, world):
    """Whether it says so by itself, before anything runs; or compares what is not comparable."""
    # The base of factors is stored in the dtype of products, so no float64 process has the same.
    if config.is_mixed and config.lora is not None:
        return True
    try:
        config.check()
        if config.plan:
            Plan.parse(config.plan).require_fits(world=world, config=model_of(family).config)
    except ValueError:
        return True
    return False


def cell_setting(cell):
    plan, tree, family = cell
    return setting(**CELLS[plan][1], **TREES[tree], **BALANCED.get(family, {}))


def all_cells(names=tuple(PLANS), trees=tuple(TREES), families=tuple(FAMILIES)) -> list:
    """Every (plan, tree, family)."""
    return list(itertools.product(names, trees, families))


def some_cells() -> list:
    """Of all cells those that run in a few minutes: each pair of a plan and a tree, of a plan and a
    family, of a tree and a family is in one of them, if it is in any that is not refused."""
    # One cell after the other is taken, always one that shows the most pairs that none has shown.
    left = {}
    for cell in all_cells():
        plan, tree, family = cell
        if not refused(cell_setting(cell), family, PLANS[plan][0]):
            left[cell] = {(plan, tree), (plan, family), (tree, family)}
    wanted = set().union(*left.values())
    taken = []
    while wanted:
        best = max(left, key=lambda cell: len(left[cell] & wanted))
        wanted -= left.pop(best)
        taken.append(best)
    return taken


def mixed_cells() -> list:
    """Of the cells in mixed precision some that show each way to hold masters, and each family."""
    return [
        ("d1 mixed", "disabled", "qwen3_moe"), ("2 ranks fsdp ac mixed", "sparse", "gemma3_text"),
        ("d2 zero1 mixed", "dta", "qwen2"), ("t2 mixed", "dta again", "qwen3_moe"),
        ("c2 mixed", "sparse", "qwen3"), ("p2 mixed", "sparse", "qwen3"),
        ("d2e2 mixed", "disabled", "balanced moe"), ("d2p2 zero1 mixed", "disabled", "gemma3_text"),
    ]  # fmt: skip


def run_cells(world, cells, truths, batch):
    """{(plan, tree, family): error or "refused"} of those of `world` ranks, on each of them."""
    found = {}
    for cell in cells:
        plan, _, family = cell
        config = cell_setting(cell)
        if CELLS[plan][0] != world:
            continue
        if refused(config, family, world):
            found[cell] = "refused"
        else:
            found[cell] = errors(three_steps(config, family, batch), truths[family])
    return found


def truths(families):
    """{family: what one process without trees does}, and the batch."""
    _, batch = rollouts(setting().check())
    found = {}
    for name in families:
        config = setting(**BALANCED.get(name, {})).check()
        found[name] = three_steps(config, name, batch)
    return found, batch


def matrix(cells):
    """{(plan, tree, family): the worst rank's error, or "refused"}. Forks: nothing has run yet."""
    ((true, batch),) = ring.launch(1, truths, sorted({family for _, _, family in cells}))
    found = {}
    for world in sorted({CELLS[plan][0] for plan, _, _ in cells}):
        parts = ring.launch(world, run_cells, world, cells, true, batch)
        for cell, first in parts[0].items():
            found[cell] = first if isinstance(first, str) else max(part[cell] for part in parts)
    return found


def leave_launch(port):
    """Leave the group of `launch`, and be the same rank of a run that is about to begin."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    dist.barrier()  # the other ranks may still be connecting
    dist.destroy_process_group()
    os.environ |= dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world}")
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")


def check(every=False) -> bool:
    """Print the rows and the matrix, of some cells or of every one; whether all are in bounds."""
    mixed = all_cells(tuple(MIXED)) if every else mixed_cells()
    found = matrix((all_cells() if every else some_cells()) + mixed)

    # Last, because it makes a process group here, and the others begin processes of their own.
    rows = invariances()
    for name, error in rows.items():
        print(f"{name:48} {error:.1e}  {'ok' if error <= 1e-12 else 'FAILED'}")
    print("against one process without trees: the worst of loss, gradients, clip norm, and of the "
          f"parameters after 3 steps; bound {BOUND}")  # fmt: skip
    if not every:
        print("each plan with each tree and each family, each tree with each family; --all has "
              "every cell")  # fmt: skip
    print(f"`mixed`: products in float32, masters in float64; bound {MIXED_BOUND}")
    print(f"{'plan, tree':34}" + "".join(f"{family:>13}" for family in FAMILIES))
    for row in itertools.product(CELLS, TREES):
        shown = [found.get((*row, family), "") for family in FAMILIES]
        texts = (x if isinstance(x, str) else f"{x:.1e}" for x in shown)
        if any(x != "" for x in shown):
            print(f"{' '.join(row):34}" + "".join(f"{text:>13}" for text in texts))

    # A NaN is in no bound.
    numbers = {cell: x for cell, x in found.items() if not isinstance(x, str)}
    lower = [x for cell, x in numbers.items() if cell[0] in MIXED]
    exact = [x for cell, x in numbers.items() if cell[0] not in MIXED]
    ok = all(x <= BOUND for x in exact) and all(x <= MIXED_BOUND for x in lower)
    ok = ok and all(x <= 1e-12 for x in rows.values())
    print(f"{len(exact)} cells, worst {max(exact):.1e}; mixed {len(lower)}, worst "
          f"{max(lower):.1e}; refused: {len(found) - len(numbers)}")  # fmt: skip
    line = {"check": "grpo", "ok": ok, "cells": len(numbers), "mixed_error": max(lower)}
    print(json.dumps(line | {"max_error": max(*rows.values(), *exact)}))
    return ok


# bench ------------------------------------------------------------------------------------------


class Work(Task):
    """One turn that never ends, behind a fixed prompt: the end token is outside the vocabulary."""

    def __init__(self, config, vocab_size=256):
        self.vocab_size, self.end = vocab_size, (vocab_size,)
        self.tokens = np.random.default_rng(0).integers(vocab_size, size=config.size).tolist()

    def prompt(self, rng, index, held_out):
        return None, self.tokens


def answers(prompt, completion, group=8, **changes):
    """The settings of `Work`; `size` is the prompt's length."""
    return Config(size=prompt, max_new_tokens=completion, group=group, prompts=1, **changes)


NARROW = dict(hidden=128, layers=4, heads=4, minibatches=1, entropy_coef=0.0, lr=1e-6)
BRANCHING = dict(forks=2, fork_turns=3, advantage="per_branch")
SHAPES = {
    "guess": Config(), "guess branching": Config(**BRANCHING),
    "guess branching, 256": Config(**BRANCHING, hidden=256, layers=4),
    **{f"{n} + 8 x 64": answers(n, 64, **NARROW) for n in (256, 512, 1024, 2048)},
    "4096 + 8 x 1024, 0.6B": answers(4096, 1024, dtype="bfloat16", **NARROW),
    "toy": answers(12, 4, **NARROW | dict(hidden=16, layers=1)),
}  # fmt: skip
SLOW = "4096 + 8 x 1024, 0.6B", "toy"  # asked for by name: for a GPU; to see that bench runs


def made(name, device):
    """Config, task and a trainer of a shape, without a tree."""
    config = dataclasses.replace(SHAPES[name], device=device).check()
    task = make_task(config) if name.startswith("guess") else Work(config)
    model, generator, _ = built(config, task, device)
    if "0.6B" in name:
        task = Work(config, QWEN3_06B["vocab_size"])
        shape = ModelConfig(**QWEN3_06B)
        both = (Transformer(shape).to(device, torch.bfloat16) for _ in range(2))
        model, generator = both
        model.init_weights(0)
        generator.requires_grad_(False)
    return config, task, Trainer(config, model, generator=generator)


def costs(config):
    """FLOPs of a training step: of a token in the layers, of a pair, of a token in the head."""
    c = config
    # forward 2 a weight, backward 4; a pair: two products forward, five backward
    layer = c.hidden_size * (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    layer = 6 * c.num_hidden_layers * (layer + 3 * c.hidden_size * c.intermediate_size)
    pair = 14 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    return layer, pair, 6 * c.vocab_size * c.hidden_size


class Stats(NamedTuple):
    """Tokens and (query, key) pairs of the flat batch and of the tree, and their ratios."""

    flat_tokens: int
    tree_tokens: int
    flat_pairs: int
    tree_pairs: int
    token_bound: float  # how many times faster, if tokens were the only cost
    flop_bound: float | None  # the same of FLOPs; None without their costs


def stats_of(trie, flops_per_token=None, flops_per_pair=None):
    """What sharing saves; the costs are FLOPs of a model per token and per (query, key) pair."""
    lengths = trie.lengths.numpy()
    flat = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
    tree = len(trie), int((trie.positions + 1).sum())
    flop_bound = None
    if flops_per_token is not None and len(trie):
        flops = [n * flops_per_token + pairs * flops_per_pair for n, pairs in (flat, tree)]
        flop_bound = flops[0] / flops[1]
    token_bound = flat[0] / tree[0] if len(trie) else 1.0
    return Stats(flat[0], tree[0], flat[1], tree[1], token_bound, flop_bound)


def flops(shape, trie, masks):
    """FLOPs of a step, (flat, tree): layers and pairs of all tokens, the head of scored ones."""
    (layer, pair, head), stats = costs(shape), stats_of(trie)
    wanted = set()
    for i, mask in enumerate(masks):
        wanted.update(trie.path(i)[1:][torch.from_numpy(mask)].tolist())
    flat = stats.flat_tokens * layer + stats.flat_pairs * pair + sum(map(sum, masks)) * head
    return flat, stats.tree_tokens * layer + stats.tree_pairs * pair + len(wanted) * head


class Clock:
    """Seconds by phase: of this process's CPU time, or on CUDA of the wall, when all is done."""

    def __init__(self, device):
        self.cuda, self.seconds = device == "cuda", {}

    def now(self):
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if self.cuda else time.process_time()

    def time(self, phase, function, *args):
        start = self.now()
        result = function(*args)
        self.seconds.setdefault(phase, []).append(self.now() - start)
        return result


def peak(device, function, *args):
    """MB of the tensors that are made inside and live at once, at most."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(*args)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with LiveBytes() as live:
        function(*args)
    return live.peak / 2**20


def rolled_out(config, task, trainer, clock, step):
    """A step's trajectories, ready for the loss."""
    clock.time("push", trainer.push_weights)
    mine, kept, _ = clock.time("rollout", collect, config, task, trainer.sampler, step)
    batch = SampledBatch(mine, kept, 1, trainer.policy_version)
    rollouts = batch.trained()
    for t in (t for t in rollouts if isinstance(task, Work)):
        t.reward = float(t.tokens[-1] % 3)
    clock.time("prepare", trainer.prepare, batch)
    return rollouts


def measure(name, device, steps, peak_tflops=None):
    """A shape's row. Flat and tree train on the same rollouts, in alternating order."""
    config, task, trainer = made(name, device)
    clock, memory, spent = Clock(device), {}, []
    for step in range(steps + 1):
        batch = rolled_out(config, task, trainer, clock, step)
        Z, tokens = trainer.loss_denominator(batch), sum(len(t.tokens) for t in batch)
        trie = TokenTrie([t.tokens for t in batch])
        spent.append(flops(trainer.model.config, trie, [t.mask for t in batch]))
        for mode in ("flat", "tree")[:: 1 if step % 2 else -1]:
            trainer.config = dataclasses.replace(config, tree=TREE[mode])
            if step == 0:
                memory[mode] = round(peak(device, trainer.forward_backward, batch, Z), 1)
            clock.time(f"train {mode}", trainer.forward_backward, batch, Z)
            clock.time(f"step {mode}", trainer.optim_step, 1e-6)
            trainer.config = config

    # The first step is a warm-up.
    seconds = {phase: statistics.median(x[1:]) for phase, x in clock.seconds.items()}
    flat, tree = (clock.seconds[f"train {mode}"][1:] for mode in TREE)
    gains = sorted(a / b for a, b in zip(flat, tree, strict=True))
    gain, bound = statistics.median(gains), statistics.median(a / b for a, b in spent[1:])
    train = seconds["train tree"]
    row = dict(
        shape=name, seconds=seconds, peak_mb=memory, gain=gain, low=gains[0], high=gains[-1],
        bound=bound, share=gain / bound, tokens_per_second=tokens / train,
        gflops=spent[-1][1] / train / 1e9, gflops_flat=spent[-1][0] / seconds["train flat"] / 1e9,
    )  # fmt: skip
    if peak_tflops:
        row["utilisation"] = row["gflops"] / peak_tflops / 1e3
    print(f"{name:22} {seconds['rollout']:7.3f} {seconds['train flat']:6.3f} {train:6.3f} "
          f"{gain:6.2f} ({gains[0]:.2f} - {gains[-1]:.2f}) {bound:5.2f} "
          f"{gain / bound:5.0%} {tokens / train:9.0f} {memory['flat']:13.1f} "
          f"{memory['tree']:5.1f}", flush=True)  # fmt: skip
    return row


TREE = {"flat": "disabled", "tree": "sparse"}


def bench(argv):
    """A table, and a JSON line, of SHAPES: one process, one thread, or one GPU."""
    parser = argparse.ArgumentParser("measure_grpo.py")
    names = f"of {', '.join(SHAPES)}; default: all but {', '.join(SLOW)}"
    parser.add_argument("--shape", nargs="+", choices=SHAPES, metavar="NAME", help=names)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--peak-tflops", type=float, help="of the device, for its utilisation")
    options, rows = parser.parse_args(argv), []
    has_group = dist.is_initialized()
    if not has_group:
        connect(options.device)
    unit = "wall seconds" if options.device == "cuda" else "CPU seconds, one thread"
    print(f"{unit}, median of {options.steps}; train: forward and backward of a step, flat and by "
          f"the tree\n{'shape':22} rollout   flat   tree   gain (low - high) bound share  tokens/s "
          f"peak MB, flat  tree")  # fmt: skip
    for name in options.shape or [name for name in SHAPES if name not in SLOW]:
        rows.append(measure(name, options.device, options.steps, options.peak_tflops))
    print(json.dumps({"bench": "grpo", "device": options.device, "rows": rows}))
    if not has_group:
        dist.destroy_process_group()
    return 0


COMMANDS = {"bench": bench, "check": lambda argv: 0 if check(every="--all" in argv) else 1}


def main(argv) -> int:
    """Run a command, by default `bench`. Return its exit code."""
    name, *rest = argv if argv and argv[0] in COMMANDS else ["bench", *argv]
    return COMMANDS[name](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

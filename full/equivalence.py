"""Check that no plan, tree, mode or precision changes a number, on one table of tiny runs.

A row is a run in memory: two steps of two updates, from the first push of the weights to the last
evaluation. Its flags choose a plan, a tree, a mode or a precision of products. One process does the
same run without these flags, in float64. Every sampled token, metric, gradient, weight, moment and
buffer is compared. In mixed precision the bound is the error of float32 products.

A mistake in a collective, a place, a schedule, a push or a draw changes one of these numbers.
tests/full/test_equivalence.py plants such mistakes for the rows to find. If you only train, skip
this file.
"""

import dataclasses
import functools
import itertools
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import train_grpo
from full.learn.batches import RolloutQueue, pending_batches
from full.learn.trainer import Trainer
from full.ranks.joining import all_gather_objects
from full.ranks.optimizer import persistent_buffers
from full.ranks.places import full
from full.run.build import build
from full.run.config import LORA_TARGETS
from full.run.flags import parse_config
from full.run.logs import step_metrics
from full.tiny import TwoTurns, tiny
from models import FULL, SLIDING
from ring_attention import launch

# The table --------------------------------------------------------------------------------------

BASE = """
    --dtype float64 --device cpu --prompts 3 --group 4 --max-new-tokens 9 --minibatches 2
    --micro-tokens 40 --lr 0.01 --lr-warmup 0 --lr-decay constant --steps 2 --eval-every 2
    --eval-prompts 3
"""
LORA = "--lora-rank 3 --kl-coef 0.05 --lora-targets"
RUNS = {  # what one process does too
    "plain": "",
    "old": "--kl-coef 0.05 --proximal",
    "critic": "--advantage gae --critic-lr 0.002 --aggregation sequence_mean --staleness 1 "
              "--proximal --weight-decay 0.1 --lr 0.001",
    "reward": "--kl-coef 0.1 --kl k1 --kl-in reward --advantage none_batch",
    "sequences": "--objective gspo --aggregation sequence_mean --clip-low 0.01 --clip-high 0.01",
    "filtered": "--aggregation constant --overlong filter",
    "dynamic": "--dynamic-sampling 3 --entropy-coef 0 --minibatches 1",
    "forks": "--forks 2 --fork-turns 1",
    "stale": "--staleness 1 --proximal --importance-cap 0.9 --temperature 0.7",
    "lone": "--prompts 1 --minibatches 1",  # most ranks have nothing
    "biased": "--router-bias-rate 0.05 --kl-coef 0.05",
    "rounded": "--lr 0.001 --kl-coef 0.05 --proximal --advantage gae",  # for mixed precision
    "lora": f"{LORA} {LORA_TARGETS}",
    "lora-all": f"{LORA} {LORA_TARGETS},gate,lm_head --router-bias-rate 0.05",
    "lora-head": f"{LORA} lm_head,q_proj",
    "lora-linear": f"--lr 0.001 {LORA} in_proj_qkv,in_proj_z,in_proj_b,in_proj_a,out_proj,o_proj",
}
FAMILIES = {  # a vocabulary of 13 divides by nothing
    "dense": ("qwen3", {}),
    "biases": ("llama", dict(qkv_bias=True, o_bias=True, mlp_bias=True)),
    "tied": ("gemma3_text", {}),
    "deep": ("qwen3", dict(num_hidden_layers=4)),
    "deep-tied": ("gemma3_text", dict(num_hidden_layers=4, layer_types=2 * (SLIDING, FULL))),
    "experts": ("qwen3_moe", dict(num_experts=4)),
    "routers": ("qwen3_moe", dict(num_experts=8, num_experts_per_tok=2, sparse_layers=(0, 1))),
    "hybrid": ("qwen3_5_text", {}),
}
MIXED = "--compute-dtype float32"
BOUND, MIXED_BOUND = 1e-10, 3e-4


class Row(NamedTuple):
    """A run, and the flags that must change nothing in it."""

    mark: str  # quick, ordinary or slow
    ranks: int
    family: str
    run: str  # of RUNS
    flags: str  # " then ": save after the first step, and go on under the flags that follow
    refused: str = ""  # words of the error, if the flags must be refused

    @property
    def name(self):
        return f"{self.family} {self.run}: {self.ranks} ranks {self.flags}"

    @property
    def bound(self):
        return MIXED_BOUND if MIXED in self.flags else BOUND


def combine(mark, ranks, families, runs, *flags, refused="") -> list:
    """Return a Row for each combination of a family, a run and flags."""
    return [Row(mark, ranks, *names, refused)
            for names in itertools.product(families.split(), runs.split(), flags)]  # fmt: skip


quick, ordinary, slow = (functools.partial(combine, x) for x in ("quick", "ordinary", "slow"))
ROWS = [
    *quick(2, "dense", "old", "--plan d2 --data-parallel zero1"),
    *quick(2, "biases", "old", "--plan t2"),
    *quick(2, "tied", "forks", "--plan c2 --tree sparse"),
    *quick(2, "tied", "critic", "--plan p2"),
    *quick(2, "routers", "biased", "--plan d2e2"),
    *quick(2, "dense", "critic", "--plan d2 --data-parallel zero1"),
    *quick(2, "hybrid", "forks", "--plan c2 --tree sparse"),
    *ordinary(1, "dense", "critic", "--tree dta --chunk-tokens 9 --recompute", "--micro-tokens 1"),
    *ordinary(1, "dense", "lora-head", "--tree dta --chunk-tokens 9 --recompute"),
    *ordinary(1, "tied", "forks", "--tree sparse", "--data-parallel fsdp"),
    *ordinary(1, "tied routers", "old", "--exact"),
    *ordinary(1, "tied", "critic", "--exact"),
    *ordinary(2, "dense", "dynamic lone stale filtered reward", "--plan d2"),
    *ordinary(2, "dense", "stale", "--plan d2 --data-parallel zero1 then --plan p2"),
    *ordinary(2, "routers", "lone", "--tree sparse --plan d2e2"),
    *ordinary(2, "tied", "old", "--plan c2 --cp-method ulysses", "--plan c2 --cp-method allgather"),
    *ordinary(2, "tied", "forks", "--tree dta --chunk-tokens 16", "--plan p2 --tree sparse"),
    *ordinary(2, "tied", "sequences", "--data-parallel fsdp-offload --ac full"),
    *ordinary(2, "deep-tied", "critic", "--plan p2 --pp-schedule zbv",
              "--plan p2 --pp-schedule interleaved1f1b"),
    *ordinary(2, "deep", "lora-head", "--plan p2 --pp-schedule zbv"),
    *ordinary(1, "hybrid", "old", "--tree dta --chunk-tokens 9 --recompute"),
    *ordinary(2, "hybrid", "lora-linear", "--plan t2", "--plan c2"),
    *ordinary(2, "hybrid", "forks", "--plan t2 --tree dta --chunk-tokens 9"),
    *ordinary(2, "dense", "critic", "--plan p2 then --plan t2 --tree dta --chunk-tokens 9"),
    *ordinary(2, "routers", "critic", "--plan d2e2 --tree sparse"),
    *ordinary(2, "experts", "biased", "--plan t2 --ac op", "--plan (attn:t2|ffn:t2)"),
    *ordinary(2, "experts", "biased",
              "--plan t2 --data-parallel fsdp then --plan c2 --tree sparse"),
    *ordinary(2, "routers", "biased", "--plan d2", "--plan p2", "--plan d2e2 --data-parallel fsdp"),
    *ordinary(2, "routers", "biased", "--plan c2", "--plan t2e2"),
    *ordinary(2, "tied", "forks", "--plan t2 --batch-rows 8"),
    *ordinary(2, "routers", "biased", "--plan t2 --tree dta --chunk-tokens 9 --recompute"),
    *ordinary(2, "routers", "lora-all", "--plan t2", "--data-parallel fsdp",
              "--plan t2 then --plan d2e2"),
    *ordinary(2, "biases", "lora", "--plan t2"),
    *ordinary(2, "tied", "rounded", "--compute-dtype float32 --data-parallel fsdp --tree sparse"),
    *ordinary(2, "deep", "rounded", "--compute-dtype float32 --plan p2 --pp-schedule zbv"),
    *ordinary(2, "biases", "rounded", "--compute-dtype float32 --plan d2 --data-parallel zero1"),
    *ordinary(2, "experts", "rounded", "--compute-dtype float32 --plan t2"),
    *ordinary(2, "routers", "rounded", "--compute-dtype float32 --plan d2e2 --ac full"),
    *ordinary(4, "dense", "lone", "--plan c4 --tree sparse"),
    *ordinary(4, "tied", "critic", "--plan c2p2", "--plan p2t2"),
    *ordinary(4, "routers", "biased", "--plan d2t2e4 --data-parallel zero1"),
    *ordinary(4, "routers", "biased",
              "--data-parallel fsdp --shard-ranks 2 then --data-parallel fsdp"),
    *ordinary(4, "dense", "old", "--plan d2t2 --data-parallel fsdp --shard-ranks 4",
              refused="must divide d = 2"),
    *ordinary(2, "dense", "old", "--plan d2e2", refused="expected a model with experts"),
    *ordinary(2, "dense", "old", "--tree dta --chunk-tokens 9 --plan c2",
              refused="--tree dta does not support c"),
    *slow(1, "dense tied experts", "old", "--data-parallel fsdp-offload", "--ac full", "--ac op"),
    *slow(2, "dense", "old rounded", "--plan d2 --compile",
          "--data-parallel fsdp --compile --ac full"),
    *slow(2, "dense", "critic", "--plan p2", "--exact --plan d2 --data-parallel zero1"),
    *slow(2, "tied experts", "old", "--plan t2 --tree dta --chunk-tokens 5 --recompute",
          "--plan t2 --compile"),
    *slow(2, "deep deep-tied", "forks sequences lora",
          "--plan p2 --pp-schedule interleaved1f1b --tree sparse"),
    *slow(2, "dense biases", "lora lora-head", "--plan c2 --tree sparse",
          "--data-parallel fsdp-offload --ac full"),
    *slow(2, "hybrid", "old forks", "--plan d2 --data-parallel zero1", "--plan t2 --ac full",
          "--plan t2 --ac op"),
    *slow(2, "hybrid", "old forks", "--plan c2 --cp-method ulysses",
          "--plan c2 --cp-method allgather --ac op"),
    *slow(2, "hybrid", "plain", "--plan p2 --pp-schedule zbv",
          "--plan p2 --pp-schedule interleaved1f1b"),
    *slow(2, "hybrid", "rounded",
          "--compute-dtype float32 --plan t2 --tree dta --chunk-tokens 5 --recompute"),
    *slow(4, "hybrid", "old", "--plan c4 --tree sparse",
          "--plan d2c2 --data-parallel fsdp --tree sparse"),
    *slow(4, "dense tied", "old forks critic", "--plan t2c2", "--plan t2c2 --cp-method ulysses"),
    *slow(4, "deep deep-tied", "old stale",
          "--plan d2p2 --data-parallel fsdp --pp-schedule interleaved1f1b"),
    *slow(4, "deep-tied", "old critic", "--plan p2t2 --pp-schedule zbv",
          "--plan c2t2 --tree sparse"),
    *slow(4, "routers", "biased lora",
          "--plan d2t2 --tree dta --chunk-tokens 16 --data-parallel zero1"),
    *slow(4, "experts routers", "biased", "--plan (attn:d2t2|ffn:e2t2) --data-parallel fsdp"),
    *slow(4, "tied", "critic",
          "--plan d2t2 --data-parallel fsdp-offload --shard-ranks 1 --tree sparse"),
    *slow(4, "routers", "biased", "--plan d4 --data-parallel fsdp --shard-ranks 2 --ac op"),
    *slow(4, "routers", "lora-all", "--plan d2t2e2 --data-parallel fsdp --shard-ranks 1 --ac full"),
    *slow(4, "dense", "old", "--data-parallel fsdp --shard-ranks 1 then --plan d2t2"),
    *slow(4, "deep", "old", "--plan p4", "--plan d4 --data-parallel zero1"),
    *slow(4, "routers", "biased", "--plan c2d2e2", "--plan p2d2"),
    *slow(8, "dense tied", "old forks", "--plan p2d2t2 --data-parallel fsdp",
          "--plan d2t2c2 --data-parallel zero1"),
    *slow(8, "routers", "biased lora", "--plan (attn:p2d2t2|ffn:p2e2t2)", "--plan d2t2c2e4"),
]  # fmt: skip


# A run ------------------------------------------------------------------------------------------


@torch.no_grad()
def fill_randomly(model, seed, device):
    """Allocate a meta model and fill it with random, non-neutral numbers."""
    model = model.to_empty(device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        is_scale = "norm" in name and not model.config.norm_offset
        is_scale |= "linear_attn.norm" in name  # it has no 1 + w in any family
        p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + is_scale)
    for bias in persistent_buffers(model).values():  # of routers, in steps
        bias.copy_(torch.randint(-9, 9, bias.shape, generator=generator))
    return model


def trainer_of(config, family, device="cpu") -> Trainer:
    """Return a trainer of a family's model, with a generator and, for a KL, a reference."""
    model_type, changes = FAMILIES[family]
    shape = tiny(model_type, vocab_size=TwoTurns.vocab_size, eos_token_id=(1,), **changes)
    shape = dataclasses.replace(shape, router_bias_rate=config.router_bias_rate)
    policy, generator, reference = build(config, TwoTurns(), shape)
    if reference is not None:
        fill_randomly(reference, 2, device)
    fill_randomly(policy, 1, device)
    return Trainer(config, policy, generator=generator, reference=reference)


@dataclass
class Outcome:
    """What must be equal. A rank of a plan may have only some of the keys of each part."""

    tokens: dict = field(default_factory=dict)  # (step, group) -> the tokens of each rollout
    metrics: dict = field(default_factory=dict)  # (step, name) -> number
    gradients: dict = field(default_factory=dict)  # (update, name) -> tensor
    tensors: dict = field(default_factory=dict)  # name -> weight, moment or buffer, at the end


def run_row(row, folder, device="cpu") -> Outcome:
    """Do a row's run on these ranks. folder: where its checkpoint goes."""
    outcome = Outcome()
    legs = row.flags.split(" then ")
    for n, flags in enumerate(legs):
        config = parse_config(f"{BASE} {RUNS[row.run]} {flags}".split()).check()
        trainer = trainer_of(config, row.family, device)
        pending = {}
        if n > 0:
            state = trainer.load_checkpoint(folder)
            pending = pending_batches(config, trainer, state)
        queue = RolloutQueue(config, TwoTurns(), trainer, n, pending)
        do_steps(config, queue, trainer, outcome, last=len(legs) == n + 1)
        if len(legs) > n + 1:
            trainer.save_checkpoint(folder, step=n + 1, pending=queue.stored())
    stored = trainer.training_tensors()
    outcome.tensors = {name: full(x).cpu().clone() for name, x in stored.items()}
    return outcome


def do_steps(config, queue, trainer, outcome, last):
    """Do one step, or all that are left if this is the last leg, and record its outcome."""
    def record_gradients(*_):
        # The gradients of all models have been summed and clipped, and are not used yet.
        update = len({n for n, _ in outcome.gradients})
        for model, _, prefix in trainer.learners:
            for name, p in model.named_parameters():
                if p.grad is not None:
                    whole = full(p.grad, model.part.places[name])
                    outcome.gradients[update, prefix + name] = whole.cpu().clone()

    def log(step, batch, metrics, updates, solved):
        line = step_metrics(trainer, batch, metrics, updates, step)
        if step + 1 == config.steps:
            line["eval/solved"] = solved
        if config.tree != "disabled":  # a tree trains each shared token once
            line["tokens/trained"] = line["tokens/trained_flat"]
        # Clocks differ from run to run, and the gap is rounding itself.
        differ = "seconds/", "memory/", "logprob_gap/"
        names = [name for name in line if not name.startswith(differ)]
        outcome.metrics |= {(step, name): line[name] for name in names}
        for n, group in batch.groups.items():
            outcome.tokens[step, n] = [t.tokens for t in group]
        if solved is not None and dist.get_rank() == 0:
            outcome.tokens["evaluated"] = queue.shown.tokens

    trainer.optimizer.inner.register_step_pre_hook(record_gradients)
    only = config if last else dataclasses.replace(config, steps=queue.first_step + 1)
    train_grpo.train(only, queue, trainer, log, queue.first_step)


# Comparison -------------------------------------------------------------------------------------


def relative_error(tensors, truth) -> float:
    """Return the largest difference of some tensors, relative to the largest entry of all."""
    scale = max(x.abs().max() for x in truth.values())
    differences = [(x - truth[name]).abs().max() for name, x in tensors.items()]
    return (torch.stack(differences).max() / scale).item() if differences else 0.0


def errors(outcome, truth) -> dict:
    """Return the largest error of each part of a rank's Outcome. A NaN remains a NaN."""
    same = all(x == truth.tokens[key] for key, x in outcome.tokens.items())
    pairs = ((x, truth.metrics[key]) for key, x in outcome.metrics.items())
    return {
        "tokens": 0.0 if same else math.inf,
        "metrics": np.max([abs(x - true) / max(1.0, abs(true)) for x, true in pairs]).item(),
        "gradients": relative_error(outcome.gradients, truth.gradients),
        "tensors": relative_error(outcome.tensors, truth.tensors),
    }


def row_errors(row, truth, device="cpu") -> dict | str:
    """Do a row. Return {part: largest error of all ranks}, or the error that refused it."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(all_gather_objects(own)[0]) / "step-00000001"
        try:
            outcome = run_row(row, folder, device)
        except ValueError as error:
            return f"{error}"
        except Exception as error:
            error.add_note(f"in the row {row.name}")
            raise
        keys = set().union(*all_gather_objects(keys_of(outcome)))
    if keys != keys_of(truth):
        return {"names": math.inf}
    by_rank = all_gather_objects(errors(outcome, truth))
    return {part: np.max([each[part] for each in by_rank]).item() for part in by_rank[0]}


def keys_of(outcome) -> set:
    """Return the (part, key) pairs of an Outcome."""
    return {(part, key) for part, entries in vars(outcome).items() for key in entries}


def references(rows) -> dict:
    """Return {(family, run): the Outcome of one process} for the rows."""
    pairs = dict.fromkeys((row.family, row.run) for row in rows if not row.refused)
    return {pair: run_row(Row("", 1, *pair, ""), None) for pair in pairs}


def rows_of_this_world(rows, true) -> dict:
    """Return {row's name: `row_errors`} of the rows for this number of ranks."""
    rows = [row for row in rows if row.ranks == dist.get_world_size()]
    return {row.name: row_errors(row, true.get((row.family, row.run))) for row in rows}


def is_right(row, result) -> bool:
    """Return whether `row_errors` are within the bound, or a refusal is the expected one."""
    if isinstance(result, str):
        return bool(row.refused) and row.refused in result
    return not row.refused and all(x <= row.bound for x in result.values())


def run_rows(rows) -> dict:
    """Return {row's name: `row_errors`}. Each number of ranks starts new processes once."""
    (true,) = launch(1, references, rows)
    errors_of = {}
    for world in sorted({row.ranks for row in rows}):
        errors_of |= launch(world, rows_of_this_world, rows, true)[0]
    return errors_of

"""GRPO on multi-turn tasks: rollouts, advantages, one loss, one training loop, any number of ranks.

A policy answers a prompt several times; answers that beat their group's mean become likelier. Two
rules carry the file. **Every loss is a sum over sampled tokens**, sum(w * l) / Z, with w and Z made
from the global batch of one optimiser step before any micro-batch is cut, and gradients are summed
over ranks: so micro-batches, ranks, packing and order cannot change it. **Data and randomness are
functions of (seed, step, group, rollout)**, never of a generator's state: so the number of ranks,
a kill and a resume cannot change them either. Two ranks make the run of one process: in float64
to rounding, at every step. In float32 rounding differs from the start, and since a sampled token is
either this one or that one, two such runs draw other tokens sooner or later (step 12 of the default
run), and are then different runs that learn alike. A resumed run repeats every bit.

    python train_grpo.py                                      # guess: 1.00 solved, 40 s
    torchrun --nproc-per-node 2 train_grpo.py                 # the same on two processes
    python train_grpo.py --help                               # every flag, its default, its meaning
    python train_grpo.py plot runs/guess-0 [runs/guess-1 ..]  # reward curves, PNG or text
    python train_grpo.py check    # plans x trees x families against one process: 3e-14, 4 minutes
    python train_grpo.py bench    # seconds by phase, tokens a second, share of the FLOP bound

What it must equal. For rollout i of a group of G with reward R_i, sampled tokens t, log-probs under
softmax(logits / temperature): lp of the policy now, old of the policy before this step's first
update, ref of the frozen reference, smp of the sampler; H_t the entropy, sg: no gradient:

    (1)  A_i = (R_i - mean R) / (std R + 1e-4)    `group_std` (GRPO; std with G - 1)
             = R_i - mean R                       `group_mean` (Dr.GRPO)
             = (R_i - mean R) G / (G - 1)         `leave_one_out` (RLOO)
             = V(segment) - V(its parent)         `per_branch`: V = mean reward of rollouts below
         A_t = sum_n (gamma lambda)^n (u_t+n + gamma v_t+n+1 - v_t+n)      `gae` (PPO)
             then (A_t - mean A) / (std A + 1e-8) over the step's sampled tokens; u the rewards,
             v the critic's values; t + 1 is the next sampled token, whatever stands in between
         with kl_in reward each sampled token first loses kl_coef k(smp_t - ref_t) of its reward
    (2)  r_t = exp(lp_t - old_t)                  `token`
             = exp(mean_t(lp_t - old_t))          `sequence` (GSPO)
    (3)  l_t = -min(min(r, c) A, clip(r, 1 - low, 1 + high) A)     `clip`; c: dual clip, if any
             = -sg(min(r, bound)) A lp_t                            `cispo`
    (4)  l_t <- sg(min(exp(old_t - smp_t), C)) l_t                  importance_cap C (TIS), if any
    (5)  l_t <- l_t + kl_coef k(d) - entropy_coef H_t               d = lp_t - ref_t
             k1: d (its gradient has mean 0: for the reward)  k2: d^2 / 2  k3: exp(-d) + d - 1
    (6)  l_t <- l_t + value_coef max((v - g)^2, (clip(v, v_old +- value_clip) - g)^2) / 2
             with `gae`: v a head on the policy's states, g_t = v_old_t + A_t before whitening
    (7)  loss = sum_i sum_t w_i l_it / Z          over all ranks and micro-batches of the step
             token_mean     w_i = 1               Z = sampled tokens
             sequence_mean  w_i = 1 / tokens_i    Z = sequences with a sampled token
             constant       w_i = 1               Z = sequences * max_new_tokens

Paper -> settings (the rest stays at its default; every paper has learning rates of its own):

    GRPO     arXiv:2402.03300  --advantage group_std --aggregation sequence_mean --clip-high 0.2
                               --kl-coef 0.04 --entropy-coef 0
    Dr.GRPO  arXiv:2503.20783  --aggregation constant --clip-high 0.2 --entropy-coef 0
    RLOO     arXiv:2402.14740  --advantage leave_one_out --kl-coef 0.05 --kl k1 --kl-in reward
                               --minibatches 1 --entropy-coef 0
    DAPO     arXiv:2503.14476  --advantage group_std --dynamic-sampling --max-rounds 3
                               --overlong filter --entropy-coef 0
    GSPO     arXiv:2507.18071  --advantage group_std --ratio sequence --aggregation sequence_mean
                               --clip-low 3e-4 --clip-high 4e-4 --entropy-coef 0
    CISPO    arXiv:2506.13585  --advantage group_std --objective cispo --entropy-coef 0
    TIS, decoupled PPO (arXiv:2110.00641)    --proximal --importance-cap 2
    dual clip (arXiv:1912.09729)             --dual-clip 3
    PPO      arXiv:1707.06347, 1506.02438    --advantage gae --clip-high 0.2 --entropy-coef 0
    tree rollouts (after arXiv:2506.11902)   --forks 2 --fork-turns 2 --advantage per_branch

Letters: B trajectories, T positions of their padded log-prob vectors (targets tokens[1:], so a
trajectory of L tokens has L - 1), V vocabulary, S packed tokens, N scored tokens, M model width.
Capital: this rank's whole. Small: a share, n of the N scored, s of the S tokens, under a plan's c.

Metrics (metrics.jsonl, one line a step; every normaliser is global):

    reward/mean, reward/solved   over the step's rollouts; solved: reward of at least 1
    reward/groups_none, _all     fraction of groups in which no, every rollout is solved
    eval/solved                  greedy, held-out prompts; at evaluation steps and in the last line
    loss/token_mean              (7), divided by the aggregation's own Z; mean of updates
    kl/token_mean                k of `--kl` against the reference, where there is one
    entropy/token_mean           (9) of models.py, at `temperature`
    value/token_mean             with gae: v before the step
    value/loss                   with gae: what (6) adds, per sampled token; mean of updates
    value/explained_variance     with gae: 1 - Var(g - v) / Var(g) over the step's sampled tokens
    ratio/clipped_fraction       of sampled tokens
    logprob_gap/max, /mean       |trainer - sampler| over the first minibatch, before any update
    logprob_gap/identical        fraction of its tokens whose two log-probs are the same bits
    grad_norm                    before clipping, global, mean of updates; lr  that the step used
    policy_version, updates/skipped   optimiser steps taken; steps skipped for a non-finite gradient
    tokens/generated             sampled
    tokens/trained               forwarded by the trainer with gradients; of a tree its own tokens
    tokens/trained_flat          the same without a tree: every token of every trajectory
    tokens/truncated_fraction    of rollouts that met max_new_tokens
    seconds/rollout, /train, /eval, /total

How it deviates: group_std uses TRL's Bessel std and 1e-4 (the paper gives neither); old is the
current policy itself where a step has one update, so that rounding cannot clip; the log-ratio of
(2) is clamped to +-10 before exp; PPO's critic shares the policy's trunk, and a truncated
trajectory ends with value 0. Not here: asynchronous generation, top-p (it would bias every ratio
unless scored under the same cut).
"""

import argparse
import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import json
import math
import numbers
import os
import re
import shutil
import signal
import sys
import time
import traceback
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import models
import ring_attention
from models import ModelConfig, Row, Transformer, generate
from parallel import (
    Grid, LocalOptimizer, Micro, Pipeline, Plan, add_terms, parallelize,
    Stop, agree, clip_grad_norm, connect, copy_weights, lr_factor, name_suspects, naming_lost_ranks,
    newest_checkpoint, persistent_buffers, read_checkpoint, reduce_gradients, replica_difference,
    reshard, shard,
    sharded, summed,
    superseded, training_tensors, write_checkpoint,
)  # fmt: skip
from tree_attention import (
    Cost, TokenTrie, redistribute, tree_backward, tree_scores,
)  # fmt: skip


# 1. Configuration ----------------------------------------------------------------------------


@dataclass
class Config:
    """The command line: a field is a flag, its comment the help."""

    # the run
    task: str = "guess"  # guess | sort | lookup | jsonl | FILE.py:Class
    out: str = ""  # directory of the run; empty: the first free runs/TASK-N
    resume: bool = False  # go on from the newest complete checkpoint in --out
    resume_or_start: bool = False  # --resume if --out holds a run, else begin one
    overwrite: bool = False  # delete the run that --out holds
    seed: int = 0  # of weights, data and sampling
    steps: int = 150  # rollout batches
    target: float = 0.95  # eval/solved that the run says it met or missed
    # the task
    size: int = 7  # guess: numbers; sort: symbols; lookup: keys, and values
    turns: int = 4  # guess: answers allowed
    length: int = 4  # sort: symbols to sort
    data: str = ""  # jsonl: file of {"question", "answer"} lines
    template: str = "{question}\nEnd with '#### ' and the answer.\n"  # jsonl: the user's turn
    demos: int = 0  # supervised steps on the task's demonstrations before the first rollout
    # the model
    model: str = ""  # Hugging Face checkpoint directory; empty: random weights of the shape below
    layers: int = 3  # decoder layers
    hidden: int = 96  # model width
    heads: int = 4  # query heads; half as many key heads
    dtype: str = "float32"  # of the trainer's weights: float32 | float64 | bfloat16
    generator_dtype: str = ""  # of the generator's weights; empty: the same
    device: str = ""  # cpu | cuda; empty: cuda where there is one
    # rollouts
    prompts: int = 28  # groups a step, over all ranks
    group: int = 16  # rollouts of one prompt
    batch_rows: int = 1024  # rollouts that a rank decodes at a time, in whole groups
    max_new_tokens: int = 16  # a trajectory's limit after its prompt, the task's replies included
    temperature: float = 1.0  # of sampling and of every log-prob
    forks: int = 1  # children of a trajectory at a turn boundary (tree rollouts)
    fork_turns: int = 0  # turn boundaries that fork; group must divide by forks ** fork_turns
    dynamic_sampling: bool = False  # drop groups whose rewards are all equal (DAPO)
    max_rounds: int = 1  # rounds of rollouts to replace dropped groups; 1: only drop
    overlong: str = "keep"  # truncated trajectories: keep | filter (out of the loss)
    # the loss
    advantage: str = "group_mean"  # group_std | group_mean | leave_one_out | per_branch | gae
    aggregation: str = "token_mean"  # token_mean | sequence_mean | constant
    objective: str = "clip"  # clip | cispo
    ratio: str = "token"  # token | sequence (GSPO)
    clip_low: float = 0.2  # ratio clip below 1
    clip_high: float = 0.28  # ratio clip above 1
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative; 0: none
    cispo_bound: float = 5.0  # absolute bound of the ratio in cispo
    kl: str = "k3"  # k1 | k2 | k3
    kl_coef: float = 0.0  # weight of the KL to the frozen reference; 0: no reference is kept
    kl_in: str = "loss"  # loss | reward
    entropy_coef: float = 0.02  # weight of the entropy bonus
    proximal: bool = False  # old log-probs from a trainer pass; otherwise the sampler's
    importance_cap: float = 0.0  # C of truncated importance sampling; 0: none
    gamma: float = 1.0  # gae: discount of a sampled token
    gae_lambda: float = 0.95  # gae: 0: one step and the critic; 1: rewards to the end
    value_coef: float = 0.5  # gae: weight of the critic's loss
    value_clip: float = 0.2  # gae: how far a value may go from its old one; 0: any
    # the optimiser
    lr: float = 1e-3  # AdamW
    lr_warmup: int = 5  # steps of linear warm-up
    lr_decay: str = "linear"  # from there to the last step: constant | linear | cosine
    weight_decay: float = 0.0  # AdamW, decoupled
    beta2: float = 0.99  # AdamW
    minibatches: int = 2  # optimiser steps a rollout batch
    max_grad_norm: float = 1.0  # clip the global norm
    max_skipped: int = 3  # stop after so many non-finite gradients in a row
    micro_tokens: int = 16384  # tokens a forward, of a tree's with sparse; a longer sequence alone
    data_parallel: str = "ddp"  # ddp (full copies) | fsdp (shards) | zero1 (ddp, moments sharded)
    ac: str = "none"  # activations computed again in backward: none | full | op, see parallel.py
    plan: str = ""  # which ranks do what, such as d2t2 or p2c2, see parallel.py; default: all data
    cp_method: str = "ring"  # the plan's c: ring | allgather | ulysses
    pp_schedule: str = "1f1b"  # the plan's p: 1f1b | interleaved1f1b | zbv
    tree: str = "disabled"  # share prefixes: disabled | sparse (packed) | dta (block by block)
    max_tokens: int = 0  # of a block with --tree dta
    recompute: bool = False  # with --tree dta: blocks above are run forward twice, not kept
    # output
    eval_every: int = 10  # steps between evaluations; the last step always evaluates
    eval_prompts: int = 70  # held-out prompts of one evaluation
    save_every: int = 50  # steps between checkpoints, and the last; 0: only the last
    keep: int = 2  # newest checkpoints kept
    log_every: int = 5  # steps between lines of the table
    tensorboard: bool = False  # also write TensorBoard events (needs tensorboard)
    timeout: int = 60  # seconds that a rank waits for another before the run ends
    threads: int = 1  # CPU threads of each rank

    CHOICES = dict(
        dtype=("float32", "float64", "bfloat16"), data_parallel=("ddp", "fsdp", "zero1"),
        ac=("none", "full", "op"),
        cp_method=("ring", "allgather", "ulysses"),
        pp_schedule=("1f1b", "interleaved1f1b", "zbv"), tree=("disabled", "sparse", "dta"),
        generator_dtype=("", "float32", "float64", "bfloat16"), device=("", "cpu", "cuda"),
        advantage=("group_std", "group_mean", "leave_one_out", "per_branch", "gae"),
        aggregation=("token_mean", "sequence_mean", "constant"), objective=("clip", "cispo"),
        ratio=("token", "sequence"), lr_decay=("constant", "linear", "cosine"),
        kl=("k1", "k2", "k3"), kl_in=("loss", "reward"), overlong=("keep", "filter"),
    )  # fmt: skip
    # What a resumed run may change: none of it enters the steps that follow, beyond rounding.
    FREE = (
        "out", "resume", "resume_or_start", "overwrite", "steps", "eval_every", "save_every",
        "keep", "log_every",
        "target", "tensorboard", "timeout", "threads", "micro_tokens", "batch_rows", "device",
        "plan", "data_parallel", "cp_method", "pp_schedule", "tree", "max_tokens", "recompute",
        "ac",
    )  # fmt: skip

    YEAR = 365 * 24 * 3600  # of seconds: --timeout counts in C++, which knows an end of time
    # Numbers meet float32 tensors, and int64 ones: what those cannot hold is refused here.
    LARGEST = {int: 2**63 - 1, float: torch.finfo(torch.float32).max / 2}
    ZERO = "target", "entropy_coef", "lr_warmup", "gae_lambda", "value_clip"  # may be 0

    def check(self) -> "Config":
        """Raise ValueError for anything that cannot run, before anything is built or written."""
        wrong = []
        for f in dataclasses.fields(self):
            flag, value = _flag(f.name), getattr(self, f.name)
            if f.type is float and type(value) is int:
                setattr(self, f.name, float(value))
            elif type(value) is not f.type:
                wrong.append(f"{flag} must be {f.type.__name__}, got {value!r}")
            elif f.name in self.CHOICES and value not in self.CHOICES[f.name]:
                allowed = ", ".join(filter(None, self.CHOICES[f.name]))
                wrong.append(f"{flag} must be one of {allowed}, got {value!r}")
            elif f.type in (int, float) and not 0 <= value <= self.LARGEST[f.type]:
                wrong.append(f"{flag} must be finite and at least 0, got {value}")
            elif value == 0 and f.default and f.name not in self.ZERO:
                wrong.append(f"{flag} must be positive, got 0")
        wrong = wrong or [text for bad, text in self._combinations() if bad]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _combinations(self):
        leaves, own_shape = self.forks ** min(self.fork_turns, 64), not self.model
        gae = self.advantage == "gae"
        yield self.group == 1 and not gae, (
            "--group 1 has no baseline, so every advantage is 0: use 2 or more, or --advantage gae")
        yield gae and max(self.gamma, self.gae_lambda) > 1, "--gamma and --gae-lambda are at most 1"
        yield gae and self.dynamic_sampling, "--dynamic-sampling drops groups that gae learns from"
        yield self.group % leaves, f"--group {self.group} must divide by forks^fork_turns {leaves}"
        yield (self.forks > 1) != (self.fork_turns > 0), "--forks and --fork-turns go together"
        yield self.clip_low >= 1, f"--clip-low must be under 1, got {self.clip_low}"
        yield self.beta2 >= 1, f"--beta2 must be under 1, got {self.beta2}"
        yield 0 < self.dual_clip <= 1 + self.clip_high, (
            f"--dual-clip must be over 1 + clip_high (papers: 3), got {self.dual_clip}")
        yield self.objective == "cispo" and (self.dual_clip or self.ratio == "sequence"), (
            "--objective cispo has its own bound: drop --dual-clip and --ratio sequence")
        yield self.dynamic_sampling and (self.entropy_coef or self.kl_coef), (
            "--dynamic-sampling drops groups of advantage 0, but they have entropy and KL terms: "
            "set --entropy-coef 0 and --kl-coef 0")
        yield self.timeout > self.YEAR, f"--timeout must be at most a year, got {self.timeout} s"
        yield self.max_rounds > 1 and not self.dynamic_sampling, (
            "--max-rounds is for --dynamic-sampling")
        yield self.importance_cap and self.minibatches > 1 and not self.proximal, (
            "--importance-cap needs --proximal or --minibatches 1: else old is the sampler itself")
        yield self.minibatches > self.prompts, (
            f"--minibatches {self.minibatches} is over --prompts {self.prompts}; one is empty")
        yield self.lr_warmup >= self.steps, (
            f"--lr-warmup {self.lr_warmup} must be under --steps {self.steps}; 0 has no warm-up")
        apart = "+" in self.plan or "|" in self.plan.replace("|ffn", "")
        yield apart, (
            f"--plan {self.plan}: generator and trainer share all ranks, and groups are dealt over "
            f"them; give the trainer's plan alone")
        plan = Plan() if apart else Plan.parse(self.plan or "d1")
        yield self.cp_method != "ring" and plan.cp == 1, "--cp-method needs a --plan with c"
        yield self.pp_schedule != "1f1b" and plan.pp == 1, "--pp-schedule needs a --plan with p"
        yield self.tree == "dta" and self.max_tokens < 1, "--tree dta needs --max-tokens, a block's"
        yield self.tree != "dta" and (self.max_tokens or self.recompute), (
            "--max-tokens and --recompute are for --tree dta")
        yield self.tree != "disabled" and plan.pp > 1, (
            f"--tree {self.tree} has no p: a pipeline needs microbatches of one length, and trees "
            f"are not cut to one; --tree disabled packs microbatches")
        yield self.tree == "dta" and self.data_parallel == "fsdp", (
            "--tree dta has no fsdp: FSDP2 gathers and reduces once a step, not once a block; "
            "use --data-parallel zero1, or --tree sparse")
        yield self.tree == "dta" and self.ac != "none", (
            "--tree dta has its own --recompute, of blocks; --ac none")
        yield self.tree == "dta" and plan.cp > 1, (
            "--tree dta has no c: a block's keys come from the stack of one rank; --tree sparse")
        yield self.pp_schedule == "zbv" and self.data_parallel == "fsdp", (
            "--pp-schedule zbv cannot be with --data-parallel fsdp; use zero1")
        yield self.resume and self.overwrite, "--resume goes on with a run, --overwrite deletes it"
        yield self.resume_or_start and self.overwrite, (
            "--resume-or-start goes on with a run, --overwrite deletes it")
        yield self.resume and not self.out, "--resume needs --out DIR, the run to go on with"
        yield self.resume_or_start and not self.out, (
            "--resume-or-start needs --out DIR, where the run is or will be")
        yield own_shape and (self.hidden % self.heads or self.hidden // self.heads % 2), (
            f"--hidden {self.hidden} must divide by --heads {self.heads} into an even head_dim")
        yield own_shape and self.heads % 2 and self.heads > 1, (
            f"--heads must be 1 or even, got {self.heads}")
        yield self.task == "jsonl" and not (self.data and self.model), (
            "--task jsonl needs --data FILE.jsonl and --model DIR with a tokenizer.json")
        yield self.task == "sort" and self.length > self.size, (
            f"--length {self.length} distinct symbols need --size of as many, got {self.size}")
        yield self.device == "cuda" and not torch.cuda.is_available(), (
            "--device cuda: torch sees no CUDA device here")


def _flag(name):
    return "--" + name.replace("_", "-")


def parse_config(argv) -> Config:
    """Flags from the fields of Config; with --resume, what the run stored is the default."""
    source = inspect.getsource(Config)
    parser = argparse.ArgumentParser(
        prog="train_grpo.py", description=__doc__.split("\n")[0], allow_abbrev=False,
        usage="%(prog)s [--FLAG VALUE ...] | check | bench | plot RUN ..   (--help: every flag)",
    )  # fmt: skip
    for f in dataclasses.fields(Config):
        text = re.search(rf"^    {f.name}: .*?  # (.*)$", source, re.M)[1].replace("%", "%%")
        how = dict(type=f.type, metavar=f.type.__name__, help=f"{text} [{f.default!r}]")
        if f.type is bool:
            how = dict(action=argparse.BooleanOptionalAction, help=text)
        parser.add_argument(_flag(f.name), default=argparse.SUPPRESS, **how)
    given = vars(parser.parse_args(argv))
    path = Path(given.get("out", "")) / "config.json"
    if given.get("resume_or_start") and given.get("out"):
        given["resume"] = path.exists()
    if not (given.get("resume") and given.get("out") and path.exists()):
        return Config(**given)
    return resumed_config(path, given)


def resumed_config(path, given) -> Config:
    """What the run stored at `path`, with what the command line may change of it."""
    stored = models.read_json(path, what="the configuration of a run")
    # A run that began before a flag existed had that flag's default.
    names = {f.name for f in dataclasses.fields(Config)}
    stored = {"resume_or_start": False} | stored
    if stored.keys() != names:
        raise ValueError(f"{path} is not of this version of Config: start a new run")

    # A task's file is code. The run's directory may have come from somebody else, so the file that
    # it names is never imported: whoever goes on with the run names one.
    task = str(stored["task"])
    if task not in TASKS:
        name = task.rpartition(":")[2]
        if given.get("task", "").rpartition(":")[2] != name:
            raise ValueError(
                f"--resume: the task of this run is a file's; give it again, as --task "
                f"FILE.py:{name} (the run had {task!r})"
            )
        stored["task"] = given["task"]

    free = set(Config.FREE)
    if stored["lr_decay"] != "constant":
        free.remove("steps")
    changed = [
        f"{_flag(name)} {value!r} (the run has {stored[name]!r})"
        for name, value in given.items()
        if name not in free and value != stored[name]
    ]
    if changed:
        raise ValueError(f"--resume cannot change {', '.join(changed)}; start a new run instead")
    return Config(**(stored | given))


# 2. Advantages and the loss: pure functions --------------------------------------------------


def definition(lp, old, A, w, Z, clip_low, clip_high):
    """(2) `token`, (3) `clip` and (7), for lists of lists of sampled tokens, by Python's floats."""
    total = 0.0
    for i in range(len(lp)):
        for t in range(len(lp[i])):
            r = math.exp(lp[i][t] - old[i][t])
            clipped = min(max(r, 1 - clip_low), 1 + clip_high)
            total += w[i] * -min(r * A[i], clipped * A[i])
    return total / Z


def advantages(rewards, /, kind):
    """(1) for the float64 rewards (G,) of one group: (G,). `per_branch` is `branch_advantages`."""
    if (rewards == rewards[0]).all():  # exactly 0, which rewards - mean would miss by rounding
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if kind == "group_std":
        return centred / (rewards.std(ddof=1) + 1e-4)
    if kind == "leave_one_out":
        return centred * len(rewards) / (len(rewards) - 1)
    if kind == "group_mean":
        return centred
    raise ValueError(f"unknown advantage {kind!r}")


def branch_advantages(rewards, branches, /):
    """(1) `per_branch` of one group: for each rollout a list of (first target index, advantage).

    branches[i] is rollout i's path: [(first token index, first rollout, rollouts below), ...], the
    root segments first. V of a segment is the mean reward of the rollouts below it; V of the root's
    parent is the group's mean. The advantages along a path sum to R_i - mean R.
    """
    out = []
    for path in branches:
        parent, marks = rewards.mean(), []
        for start, first, count in path:
            value = rewards[first : first + count].mean()
            marks.append((start - 1, value - parent))
            parent = value
        out.append(marks)
    return out


def gae(rewards, values, mask, /, gamma, lam):
    """(1) `gae` of one trajectory: advantages and returns, both (L - 1,) and 0 off the mask.

    rewards, values: (L - 1,) by target; mask: was sampled. Only those follow each other: what the
    task says in between is no action. A reward on another token counts for the last sampled one.
    """
    at, out = np.flatnonzero(mask), np.zeros((2, len(mask)))
    after, ahead = 0.0, 0.0  # V of the next sampled token, and its advantage
    for t, end in zip(at[::-1], [len(mask), *at[:0:-1]]):
        delta = rewards[t:end].sum() + gamma * after - values[t]
        ahead, after = delta + gamma * lam * ahead, values[t]
        out[:, t] = ahead, ahead + values[t]
    return out


def value_loss(value_BT, old_BT, return_BT, mask_BT, /, bound):
    """The square of (6) per token, 0 where mask is off."""
    far_BT = torch.where(mask_BT, value_BT - return_BT, 0.0).square()
    if not bound:
        return far_BT / 2
    near_BT = old_BT + (value_BT - old_BT).clamp(-bound, bound)
    near_BT = torch.where(mask_BT, near_BT - return_BT, 0.0).square()
    return torch.maximum(far_BT, near_BT) / 2


def divergence(d, /, kind):
    """k1, k2, k3 of (5), d = log p - log reference at tokens drawn from p (Schulman 2020)."""
    return {"k1": d, "k2": d.square() / 2, "k3": torch.exp(-d) + d - 1}[kind]


def policy_loss(
    lp_BT, old_BT, advantage_BT, mask_BT, /, config, *,
    entropy_BT=None, ref_BT=None, importance_BT=None,
):  # fmt: skip
    """(2)-(5) per token: l_BT, and a dict of detached (B, T) statistics, all 0 where mask is off.

    Log-probs (B, T) float, mask_BT bool (was sampled), advantage_BT, importance_BT broadcastable.
    Any leading shape works, (T,) too: a row is one sequence, which is all that `sequence` needs.
    """
    zero = lp_BT.new_zeros(())
    # NUMERICS: masked entries may be anything, -inf too: selected away before exp, not multiplied.
    # Pinned by tests/test_loss.py::test_masked_tokens_may_hold_anything.
    log_ratio_BT = torch.where(mask_BT, lp_BT - old_BT, zero)
    if config.ratio == "sequence":
        count_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(-1, keepdim=True) / count_B1).expand_as(lp_BT)
    # NUMERICS: +-10 keeps a ratio finite where a policy has moved far from a stale one. Pinned by
    # tests/test_loss.py::test_a_log_ratio_is_clamped_to_ten_before_exp.
    ratio_BT = log_ratio_BT.clamp(-10, 10).exp()  # (2)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.objective == "cispo":
        clipped_BT = ratio_BT > config.cispo_bound
        l_BT = -ratio_BT.clamp(max=config.cispo_bound).detach() * advantage_BT * lp_BT  # (3)
    else:
        bounded_BT = ratio_BT.clamp(max=config.dual_clip) if config.dual_clip else ratio_BT
        first_BT, second_BT = bounded_BT * advantage_BT, ratio_BT.clamp(low, high) * advantage_BT
        clipped_BT = (second_BT < first_BT) | (ratio_BT > bounded_BT)
        l_BT = -torch.minimum(first_BT, second_BT)  # (3)
    if importance_BT is not None:
        l_BT = l_BT * importance_BT  # (4)
    stats = {"clipped": torch.where(mask_BT, clipped_BT.to(lp_BT.dtype), zero)}
    if ref_BT is not None:
        kl_BT = divergence(torch.where(mask_BT, lp_BT - ref_BT, zero), config.kl)
        stats["kl"] = kl_BT.detach()
        if config.kl_in == "loss":
            l_BT = l_BT + config.kl_coef * kl_BT  # (5)
    if entropy_BT is not None:
        stats["entropy"] = torch.where(mask_BT, entropy_BT.detach(), zero)
        if config.entropy_coef:
            l_BT = l_BT - config.entropy_coef * entropy_BT  # (5)
    return torch.where(mask_BT, l_BT, zero), stats


# 3. Tasks ------------------------------------------------------------------------------------


class Task:
    """What a task provides. Tokens go in and come out; nothing is ever decoded and encoded again.

    A state is a plain value and `reply` returns a new one, so forked trajectories can share it.
    Rewards of the turns add up; a trajectory of total reward 1 or more counts as solved.
    """

    vocab_size: int
    end: tuple[int, ...]  # tokens that end a turn

    def __init__(self, config=None):
        """Tasks are made as Class(config)."""

    def prompt(self, rng, index: int, held_out: bool):
        """-> (state, prompt tokens). rng: numpy Generator of this (seed, step, group); index counts
        the prompts of the run, or from 0 those of an evaluation (held_out)."""
        raise NotImplementedError

    def reply(self, state, answer: list[int]):
        """answer: a turn's tokens, its end token last -> (state, reply tokens, reward); None for
        the reply ends the trajectory. An answer cut off by max_new_tokens is never shown."""
        raise NotImplementedError

    def demo(self, state, rng) -> list[int]:
        """A valid answer to train on before the first rollout (--demos)."""
        raise ValueError(f"{type(self).__name__} has no demonstrations; use --demos 0")

    def show(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class TaskError(ValueError):
    """What a task's own code raised, with its file and line."""


@contextlib.contextmanager
def naming_the_task(file):
    """Turn whatever the code in a task's file raises into an error that names file and line.

    Left alone, a RuntimeError about a task's own connection would read as a lost rank, and
    sys.exit(0) would end the run with 0 and without a word. A ValueError keeps its message, for it
    is meant for the reader; of anything else `main` prints the traceback too.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        where = Path(file).name
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).resolve() == Path(file).resolve():
                where = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
        if isinstance(error, ValueError):
            raise TaskError(f"{error} ({where})") from None
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = f"the task called sys.exit({error.code!r})"
        raise TaskError(f"{reason} ({where})") from error


def asking(task):
    """The guard around every call of a task's methods; those of this file need none."""
    module = sys.modules[type(task).__module__]
    if module is sys.modules[__name__]:
        return contextlib.nullcontext()
    return naming_the_task(module.__file__)


class Symbols(Task):
    """A task over a few named symbols; the last one ends a turn."""

    def __init__(self, names):
        self.names, self.vocab_size, self.end = names, len(names), (len(names) - 1,)

    def show(self, tokens):
        return " ".join(self.names[t] if t < len(self.names) else f"<{t}>" for t in tokens)


def deal(seed, index, size) -> int:
    """Card `index` of an endless row of shuffled decks of 0..size-1: no batch is lopsided."""
    deck, place = divmod(index, size)
    return int(np.random.default_rng([seed, deck]).permutation(size)[place])


def is_held_out(data: bytes) -> bool:
    """One prompt in ten is kept for evaluation, by a hash, so that training never draws it."""
    return zlib.crc32(data) % 10 == 0


class Guess(Symbols):
    """Find a hidden number: answer `number .`, hear `higher` or `lower`, up to `turns` answers.

        ? 3 . higher 5 . lower 4 .

    Reward 1 for finding it. An attempt that used all its turns well-formed but in vain gets 0.2
    times the share of its answers that agreed with what it had heard; anything malformed gets 0.
    Secrets are dealt from shuffled decks. Every secret has the same prompt, so evaluation asks for
    all of them instead of unseen ones.
    """

    def __init__(self, config):
        self.size, self.turns, self.seed = config.size, config.turns, config.seed
        super().__init__([str(n) for n in range(self.size)] + ["?", "higher", "lower", "."])

    def prompt(self, rng, index, held_out):
        secret = index % self.size if held_out else deal(self.seed, index, self.size)
        return (secret, 1, 0, self.size - 1, 0), [self.size]  # secret, turn, range left, agreeing

    def reply(self, state, answer):
        secret, turn, low, high, agreeing = state
        if len(answer) != 2 or answer[0] >= self.size:
            return state, None, 0.0
        number = answer[0]
        agreeing += low <= number <= high
        if number == secret:
            return state, None, 1.0
        if turn == self.turns:
            return state, None, 0.2 * agreeing / self.turns
        if number < secret:
            return (secret, turn + 1, max(low, number + 1), high, agreeing), [self.size + 1], 0.0
        return (secret, turn + 1, low, min(high, number - 1), agreeing), [self.size + 2], 0.0


class Sort(Symbols):
    """Put `length` distinct symbols in order, in one turn: `c a b ? a b c .` Reward 1 for the right
    answer, half the share of right places for another one of the right length."""

    def __init__(self, config):
        self.size, self.length = config.size, config.length
        super().__init__([f"s{n}" for n in range(self.size)] + ["?", "."])
        for held_out in (False, True):  # raises now, not at the first evaluation
            self.prompt(np.random.default_rng(0), 0, held_out)

    def prompt(self, rng, index, held_out):
        for _ in range(1000):
            items = rng.permutation(self.size)[: self.length].tolist()
            if is_held_out(repr(items).encode()) == held_out:
                return tuple(sorted(items)), items + [self.size]
        raise ValueError(f"--size {self.size} --length {self.length}: too few to hold prompts out")

    def reply(self, state, answer):
        if len(answer) != self.length + 1:
            return state, None, 0.0
        right = sum(a == b for a, b in zip(answer, state)) / self.length
        return state, None, 1.0 if right == 1 else 0.5 * right


class Lookup(Symbols):
    """Use a tool: `? key`, answer `key .`, the table replies `= value`, answer `value .`

    Each of the two answers earns 0.1 for its form and 0.4 for being right. The table is drawn anew
    for each prompt, so only asking finds the value. Keys and values are dealt from shuffled decks:
    where a batch has more of one key, asking for it blindly pays. Demonstrations are valid play
    with random content: they teach the form, not the answer.
    """

    def __init__(self, config):
        self.size, self.seed, names = config.size, config.seed, range(config.size)
        super().__init__([f"k{n}" for n in names] + [f"v{n}" for n in names] + ["?", "=", "."])

    def prompt(self, rng, index, held_out):
        key, table = deal(self.seed, index, self.size), rng.integers(self.size, size=self.size)
        table[key] = deal(self.seed + 1, index, self.size)
        return (key, tuple(table.tolist()), None), [2 * self.size, key]

    def reply(self, state, answer):
        key, table, value = state
        first = 0 if value is None else self.size
        if len(answer) != 2 or not first <= answer[0] < first + self.size:
            return state, None, 0.0
        if value is None:
            value = self.size + table[answer[0]]
            return (key, table, value), [2 * self.size + 1, value], 0.5 if answer[0] == key else 0.1
        return state, None, 0.5 if answer[0] == value else 0.1

    def demo(self, state, rng):
        return [int(rng.integers(self.size)) + (0 if state[2] is None else self.size), *self.end]


class Jsonl(Task):
    """Questions from a file of {"question", "answer"} lines, GSM8K's format: the gold answer is
    what follows `####` (the whole answer, if nothing does). Reward 1 for an answer that ends in
    `####` and an equal number or text; so the template has to ask for it.
    Every tenth question, by its hash, is held out. Needs the checkpoint's tokenizer.json."""

    def __init__(self, config):
        self.tokenizer = models.load_tokenizer(config.model)
        shape = ModelConfig.from_hf(config.model)
        self.vocab_size, self.end = self.tokenizer.get_vocab_size(), shape.eos_token_id
        if not self.end:
            raise ValueError(f"{config.model}/config.json has no eos_token_id: no answer could end")
        template, close = config.template, self.tokenizer.token_to_id("<|im_end|>")
        if "{question}" not in template:
            raise ValueError(f"--template must contain {{question}}, got {template!r}")
        if close is not None:  # ChatML; base checkpoints do not name its end in config.json
            template = f"<|im_start|>user\n{template}<|im_end|>\n<|im_start|>assistant\n"
            self.end = tuple({*self.end, close})
        room = shape.max_position_embeddings - config.max_new_tokens
        self.rows = {False: [], True: []}  # by held out: (answer, prompt tokens)
        for number, row in models.read_json_lines(config.data):
            where = f"{config.data} line {number}"
            question, answer = row.get("question"), row.get("answer")
            if not isinstance(question, str) or not isinstance(answer, str):
                raise ValueError(f"{where} holds no question and answer, two strings")
            tokens = self._encode(template.replace("{question}", question))
            self.rows[is_held_out(question.encode())].append((answer, tokens))
            if len(tokens) > room:
                raise ValueError(
                    f"{where}: a prompt of {len(tokens)} tokens; the model's positions less "
                    f"--max-new-tokens leave {room}"
                )
        if not all(self.rows.values()):
            raise ValueError(f"{config.data} is too small to hold every tenth question out")

    def _encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, rng, index, held_out):
        rows = self.rows[held_out]
        return rows[index % len(rows) if held_out else int(rng.integers(len(rows)))]

    def reply(self, state, answer):
        text = self.tokenizer.decode([t for t in answer if t not in self.end])
        return state, None, float(same_answer(final_answer(text), final_answer(state) or state))

    def demo(self, state, rng):
        return self._encode(state) + [self.end[0]]

    def show(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def final_answer(text):
    """What follows the last `####`, to the end of its line; None without one."""
    _, mark, rest = text.rpartition("####")
    return rest.split("\n")[0].strip() if mark else None


def same_answer(a, b):
    """Equal as numbers (1,000 = 1000.0 = $1000) or, where one is no number, as stripped text."""

    def number(text):
        plain = re.sub(r"[,$%\s]", "", text).rstrip(".")
        return float(plain) if re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)", plain) else None

    if a is None or b is None:
        return False
    x, y = number(a), number(b)
    return a.strip() == b.strip() if x is None or y is None else x == y


TASKS = {"guess": Guess, "sort": Sort, "lookup": Lookup, "jsonl": Jsonl}


def make_task(config) -> Task:
    if config.task in TASKS:
        return TASKS[config.task](config)
    file, _, name = config.task.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ValueError(f"--task {config.task!r} is none of {', '.join(TASKS)}, no FILE.py:Class")
    # Run as a script, this file is the module __main__; a task file that imports train_grpo would
    # get a second copy of it, whose Task is another class than this one.
    sys.modules.setdefault("train_grpo", sys.modules[__name__])
    spec = importlib.util.spec_from_file_location(f"task_{Path(file).stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with naming_the_task(file):
        spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{file} has no class {name!r}")
    with naming_the_task(file):
        task = getattr(module, name)(config)
    size, end = getattr(task, "vocab_size", 0), getattr(task, "end", ())
    if not isinstance(end, (tuple, list)) or not end or not all(0 <= t < size for t in end):
        raise ValueError(f"{name} needs vocab_size and end, ids under it; got {size} and {end}")
    return task


# 4. Rollouts ---------------------------------------------------------------------------------


@dataclass
class Trajectory:
    """One rollout. Vectors have one entry per target, tokens[1:], so L - 1 for L tokens."""

    group: int
    tokens: list[int]
    mask: np.ndarray  # bool: was sampled by the policy, and counts in the loss
    sampler_logprobs: np.ndarray  # float64, 0 where not sampled
    reward: float = 0.0
    truncated: bool = False
    path: list = field(default_factory=list)  # see branch_advantages
    turn_rewards: list = field(default_factory=list)  # (index of a turn's last target, reward)
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None  # None: the policy's own, detached
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None  # of the critic, before the step
    returns: np.ndarray | None = None


class Play(Row):
    """A trajectory under way. Until its forks are used up it stands for `count` rollouts."""

    def __init__(self, key, group, state, prompt, limit, *, first=0, count=1, forks_left=0):
        super().__init__(prompt, uniforms((*key, group, first), limit))
        self.key, self.group, self.state, self.reward = key, group, state, 0.0
        self.first, self.count, self.forks_left = first, count, forks_left
        self.turn = len(prompt)  # where the turn began
        self.path, self.turn_rewards = [(self.turn, first, count)], []

    def end_turn(self, task, forks=1):
        """Give the finished turn to the task: the plays that go on, none at the end."""
        answer = self.tokens[self.turn :]
        with asking(task):
            self.state, reply, reward = task.reply(self.state, answer)
        if not isinstance(reward, (numbers.Real, torch.Tensor)) or not math.isfinite(reward):
            raise ValueError(
                f"{type(task).__name__} gave reward {reward} in group {self.group}, rollout "
                f"{self.first}, for the answer {task.show(answer)!r}: rewards must be finite"
            )
        self.reward += float(reward)
        self.turn_rewards = [*self.turn_rewards, (len(self.tokens) - 2, float(reward))]
        if reply is None:
            return []
        if not all(0 <= token < task.vocab_size for token in reply):
            name, size = type(task).__name__, task.vocab_size
            raise ValueError(f"{name} replied {reply} in group {self.group}: ids end at {size - 1}")
        self.queue.extend(reply)
        self.turn = len(self.tokens) + len(reply)
        return self.fork(forks) if self.forks_left else [self]

    def fork(self, forks):
        """Plays that share this one's past, its reply included, and divide its rollouts."""
        children, share = [], self.count // forks
        for first in range(self.first, self.first + self.count, share):
            child = copy.copy(self)
            for name in ("tokens", "mask", "logprobs", "full_logprobs", "queue"):
                setattr(child, name, getattr(self, name).copy())
            child.draws = uniforms((*self.key, self.group, first), len(self.draws))
            child.first, child.count, child.forks_left = first, share, self.forks_left - 1
            child.path = self.path + [(self.turn, first, share)]
            children.append(child)
        return children

    def trajectories(self):
        """One for each rollout that this play still stands for."""
        logprobs = np.array(self.logprobs)
        # NUMERICS: a token whose sampler log-prob is not finite has no ratio: it leaves loss and Z.
        # Pinned by tests/test_rollout.py::test_non_finite_sampler_logprobs_leave_the_loss.
        mask = np.array(self.mask, dtype=bool) & np.isfinite(logprobs)
        logprobs = np.where(mask, logprobs, 0.0)
        made = (self.group, self.tokens, mask, logprobs, self.reward, self.truncated, self.path,
                self.turn_rewards)  # fmt: skip
        return [Trajectory(*made) for _ in range(self.count)]


def uniforms(key, count):
    """count numbers in [0, 1) that depend on the key (non-negative integers) alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


def rollout(
    model, task, starts, /, *, group, max_new_tokens, temperature, key, forks=1, fork_turns=0
):
    """Play every start `group` times; lists of trajectories, by group, in rollout order.

    starts: list of (group index, state, prompt tokens). key: (seed, step); draw t of rollout r of
    group g is uniforms((seed, step, g, r))[t]. temperature 0 is greedy.
    """
    if not starts:
        return []
    share = forks**fork_turns
    plays = [
        Play(key, g, state, prompt, max_new_tokens, first=first, count=share, forks_left=fork_turns)
        for g, state, prompt in starts for first in range(0, group, share)
    ]  # fmt: skip
    ended = generate(
        model, plays, max_new_tokens=max_new_tokens, temperature=temperature, end=task.end,
        after=lambda play: play.end_turn(task, forks),
    )  # fmt: skip
    groups = {g: [] for g, _, _ in starts}
    for play in sorted(ended, key=lambda play: play.first):
        groups[play.group] += play.trajectories()
    return list(groups.values())


def demonstrations(task, starts, key, max_new_tokens=4096):
    """Valid play by `task.demo`, one trajectory a start; the mask is where `demo` spoke. A play
    ends at the turn that reaches max_new_tokens."""
    out = []
    for g, state, prompt in starts:
        rng, play, going = np.random.default_rng([*key, g]), Play(key, g, state, prompt, 0), True
        while going and play.new < max_new_tokens:
            with asking(task):
                answer = [int(token) for token in task.demo(play.state, rng)]
            for token in answer:
                play.append(token, 0.0)
            going = play.end_turn(task)
            while play.queue:
                play.append(None, 0.0)
        out += play.trajectories()
    return out


# 5. The trainer: the only place that communicates --------------------------------------------


def loss_weight(trajectory, aggregation):
    """w of (7): a number per trajectory, known without any other."""
    return 1.0 / max(1, trajectory.mask.sum()) if aggregation == "sequence_mean" else 1.0


def denominator(batch, config) -> float:
    """This rank's share of Z of (7); summed over ranks it is `num_global_valid_tokens`."""
    if config.aggregation == "token_mean":
        return float(sum(t.mask.sum() for t in batch))
    if config.aggregation == "constant":
        return float(len(batch) * config.max_new_tokens)
    return float(sum(bool(t.mask.any()) for t in batch))


def pack(batch, micro_tokens, *, tree=False):
    """Cut a batch into micro-batches of at most micro_tokens tokens, in order; long ones alone.

    tree: what a trajectory shares with the one before it counts once.
    """
    micros, room, before = [], 0, []
    for trajectory in batch:
        new = count = len(trajectory.tokens)
        if tree:
            pairs = enumerate(zip(before, trajectory.tokens))
            new -= next((n for n, (a, b) in pairs if a != b), min(len(before), count))
            before = trajectory.tokens
        if not micros or new > room:
            micros.append([])
            new, room = count, micro_tokens
        micros[-1].append(trajectory)
        room -= new
    return micros


def padded(vectors, like):
    """Ragged numpy vectors -> one (B, T) tensor of `like`'s dtype and device, zero where short."""
    out_BT = np.zeros((len(vectors), max(map(len, vectors))))
    for b, vector in enumerate(vectors):
        out_BT[b, : len(vector)] = vector
    return torch.from_numpy(out_BT).to(like)


NOTHING = np.zeros(0)
FILLER = Trajectory(  # what a rank without data adds to messages of all
    -1, [0], NOTHING.astype(bool), NOTHING, advantages=NOTHING, values=NOTHING, returns=NOTHING
)


class Tally:
    """(7) of one piece of a batch after the other, and what is measured on the way."""

    NAMES = "clipped", "entropy", "kl", "value"

    def __init__(self, trainer, num_global_valid_tokens, supervised):
        self.trainer, self.Z, self.supervised = trainer, num_global_valid_tokens, supervised
        self.forwarded = 0  # tokens that this rank ran, where a tree makes them fewer
        size = 4 + len(self.NAMES)
        self.sums = torch.zeros(size, dtype=torch.float64, device=trainer.device)
        self.worst = self.sums.new_zeros(())

    def count(self, micro, trie):
        """Count the tokens of a tree that is about to be trained on; a FILLER's is none."""
        if trie is not None and micro[0].group != FILLER.group:
            self.forwarded += len(trie.tokens)

    def loss(self, micro, mask_BT, lp_BT, entropy_BT, value_BT=None):
        """This piece's part of (7)."""
        sampler_BT = padded([t.sampler_logprobs for t in micro], lp_BT)
        if self.supervised:
            l_BT, stats = -lp_BT, {"entropy": entropy_BT.detach()}
        else:
            given = mask_BT, lp_BT, entropy_BT, value_BT, sampler_BT
            l_BT, stats = self.trainer._loss(micro, *given)
        weights = [[loss_weight(t, self.trainer.config.aggregation)] for t in micro]
        loss = (padded(weights, lp_BT) * l_BT).sum() / self.Z  # (7)
        gap_N = (lp_BT.detach() - sampler_BT)[mask_BT].abs().double()
        self.worst = torch.cat([gap_N, self.worst[None]]).max()
        parts = [loss.detach(), mask_BT.sum(), gap_N.sum(), (gap_N == 0).sum()]
        parts += [stats[k].sum() if k in stats else gap_N.new_zeros(()) for k in self.NAMES]
        self.sums += torch.stack([x.double() for x in parts])
        return loss

    def metrics(self, flat) -> dict:
        """Collective: of all ranks' batch. flat: tokens of this rank's trajectories."""
        trainer = self.trainer
        dist.all_reduce(self.worst, op=dist.ReduceOp.MAX)
        # Ranks that work on the same sequences sum the same numbers: one of them reports.
        own = [*self.sums.tolist(), self.forwarded]
        if not trainer.reports:
            own = [0.0] * len(own)
        sums = summed([*own, flat], trainer.device)
        loss, n, gap, same, clipped, entropy, kl, value, forwarded, flat = sums
        trained = flat if trainer.config.tree == "disabled" else forwarded
        n = max(n, 1.0)
        metrics = {
            "loss/token_mean": loss, "entropy/token_mean": entropy / n,
            "ratio/clipped_fraction": clipped / n, "logprob_gap/max": self.worst.item(),
            "logprob_gap/mean": gap / n, "logprob_gap/identical": same / n,
            "tokens/trained": int(trained), "tokens/trained_flat": int(flat),
        }  # fmt: skip
        metrics |= {"kl/token_mean": kl / n} if trainer.reference is not None else {}
        return metrics | ({"value/loss": value / n} if trainer.config.advantage == "gae" else {})


class Layout(NamedTuple):
    """A packed micro-batch under a plan: whole on every rank, which runs the tokens `take_s`."""

    tokens_1S: torch.Tensor
    positions_1S: torch.Tensor
    take_s: torch.Tensor  # the tokens of this rank of the context group, ascending
    at_N: torch.Tensor  # the token that predicts each scored one
    mask_BT: torch.Tensor
    attention: object

    @classmethod
    def of(cls, micro, length, trainer):
        """length: padded to; PAD tokens are in no document and at position 0."""
        device, (rank, world) = trainer.device, (0, 1)
        lengths = [len(t.tokens) for t in micro]
        pad = length - sum(lengths)
        tokens = [token for t in micro for token in t.tokens] + [0] * pad
        documents = np.repeat([*range(len(micro)), -1], [*lengths, pad])[None]
        positions = [n for size in lengths for n in range(size)] + [0] * pad
        mask_BT = padded([t.mask for t in micro], torch.empty(0, device=device).bool())
        row_N, column_N = mask_BT.nonzero(as_tuple=True)
        starts = torch.tensor(np.cumsum([0, *lengths[:-1]]), device=device)
        attention = models.packed_attention(doc_ids=torch.from_numpy(documents))
        if trainer.plan.cp > 1:
            group, method = trainer.grid.context, trainer.config.cp_method
            rank, world = dist.get_rank(group), trainer.plan.cp
            mask = ring_attention.Mask.documents(doc_ids=documents)

            def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
                return ring_attention.ring_attention(
                    q, k, v, group=group, mask=mask.with_window(window), method=method,
                    scale=scale, softcap=softcap,
                )  # fmt: skip

        take_s = ring_attention.indices(length, rank, world).to(device)
        whole = (torch.tensor([x], device=device) for x in (tokens, positions))
        return cls(*whole, take_s, starts[row_N] + column_N, mask_BT, attention)

    def micro(self) -> dict:
        """What `parallel.Micro` wants, this rank's tokens."""
        tokens_1s, positions_1s = (x[:, self.take_s] for x in (self.tokens_1S, self.positions_1S))
        return dict(tokens=tokens_1s, positions=positions_1s, attention=self.attention)


class Even:
    """A policy under t, for trees: their tokens are padded to a multiple of t, as sequence
    parallelism needs, attention does not see the padding, and the states come without it."""

    def __init__(self, model, multiple):
        self.model, self.multiple = model, multiple

    def __getattr__(self, name):
        return getattr(self.model, name)

    def hidden(self, tokens_1S, /, *, positions, attention):
        length = tokens_1S.shape[1]
        pad = -max(1, length) % self.multiple + (not length)

        def of_tokens(q, k, v, /, **options):
            out = attention(*(x[:, :, :length] for x in (q, k, v)), **options)
            return F.pad(out, (0, 0, 0, pad))

        tokens_1S, positions = (F.pad(x, (0, pad)) for x in (tokens_1S, positions))
        x_1SM = self.model.hidden(tokens_1S, positions=positions, attention=of_tokens)
        return x_1SM[:, :length]


class Trainer:
    """Policy, optimiser and generator behind the few calls that a training loop needs.

    `forward_backward` may be called any number of times before `optim_step`; gradients add up over
    calls and ranks, and nothing is averaged, because every loss is divided by the global
    `num_global_valid_tokens` that the caller reduced beforehand. Every method is collective: all
    ranks call it, with whatever share of the batch they hold, none included.
    """

    COUNTS = "policy_version", "skipped", "skipped_in_a_row"

    def __init__(self, config: Config, model: Transformer, *, generator=None, reference=None):
        self.config, self.model = config, model
        self.generator, self.reference = generator, reference
        self.policy_version = self.skipped = self.skipped_in_a_row = 0
        self.device, self.plan, self.grid = next(model.parameters()).device, None, None
        if config.plan or config.data_parallel == "zero1" or config.ac != "none":
            self._split(model)
        elif config.data_parallel == "fsdp":
            shard(model)

        def adamw(parameters):
            return torch.optim.AdamW(
                parameters, lr=config.lr, betas=(0.9, config.beta2),
                weight_decay=config.weight_decay, fused=True,
            )  # fmt: skip

        if self.plan is None:
            self.optimizer = adamw(model.parameters())
        else:
            zero = config.data_parallel == "zero1"
            self.optimizer = LocalOptimizer(self.model, adamw, zero=zero)

    def _split(self, model):
        """Keep this rank's part of the plan."""
        self.plan = Plan.parse(self.config.plan or f"d{dist.get_world_size()}")
        self.grid = Grid.make(self.plan, self.device.type)
        self.model = parallelize(
            model, self.plan, device_mesh=self.grid, mode=self.config.data_parallel,
            attention=models.causal_attention, schedule=self.config.pp_schedule, ac=self.config.ac,
        )  # each micro-batch brings an attention of its own  # fmt: skip

    @property
    def reports(self) -> bool:
        """Whether this rank speaks for the ranks that work on the same sequences."""
        if self.plan is None:
            return True
        firsts = [{ranks[0] for ranks in self.plan.groups(kind)} for kind in ("tp", "cp")]
        return self._last is not None and dist.get_rank() in set.intersection(*firsts)

    @property
    def _last(self):
        """The model, or the part of it that has the head; None where another stage has it."""
        return self.model.last if isinstance(self.model, Pipeline) else self.model

    def _shared(self, batch):
        """The trajectories of all ranks that work on the same sequences, and where ours begin."""
        if self.plan is None or self.plan.world == self.plan.dp:
            return batch, 0
        parts = [None] * dist.get_world_size(self.grid.replica)
        dist.all_gather_object(parts, batch, group=self.grid.replica)
        first = sum(len(part) for part in parts[: dist.get_rank(self.grid.replica)])
        return [t for part in parts for t in part], first

    def micro_batches(self, batch):
        tree = self.config.tree
        if tree == "dta":  # its blocks are of --max-tokens
            return [batch or [FILLER]]
        size, count, p = self.config.micro_tokens, 0, self.plan.pp if self.plan else 1
        if p > 1:  # at least 2 p, of about one size, as all are padded to the longest
            lengths = [len(t.tokens) for t in batch]
            size = min(size, sum(lengths) // (2 * p) + max(lengths, default=0))
        micros = pack(batch, size, tree=tree == "sparse")
        if p > 1:  # a multiple of its ranks, for any schedule
            count = max(2 * p, -(-len(micros) // p) * p)
        if sharded(self.model) or (self.plan and self.plan.ep > 1):
            # COMM: a sharded forward gathers weights from all, and tokens go to all ranks' experts,
            # so ranks agree on their number and fill up with empty ones.
            # Pinned by tests/test_ranks.py::test_a_rank_without_data_takes_part.
            count = torch.tensor(max(count, len(micros)), device=self.device)
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return micros + [[FILLER]] * (int(count) - len(micros))

    def lay_out(self, micros) -> list:
        """How a plan's ranks see micro-batches: padded so that tokens can be shared out."""
        plan, unit = self.plan, self.plan.tp * (2 * self.plan.cp if self.plan.cp > 1 else 1)
        lengths = [[len(t.tokens) for t in micro] for micro in micros]
        most = max(sum(some) for some in lengths)
        sizes = [most if plan.pp > 1 else sum(some) for some in lengths]
        pairs = zip(micros, (-(-size // unit) * unit for size in sizes), strict=True)
        return [Layout.of(micro, size, self) for micro, size in pairs]

    def scores(self, hidden_1sM, layout):
        """A laid-out micro-batch's mask of sampled tokens, and their log-probs, entropies and, of
        a critic, values; all (B, T)."""
        here_N, model = torch.isin(layout.at_N, layout.take_s), self._last
        x_nM = hidden_1sM[0, torch.searchsorted(layout.take_s, layout.at_N[here_N])]
        targets_n = layout.tokens_1S[0, layout.at_N[here_N] + 1]
        found = model.logprobs(x_nM, targets_n, temperature=self.config.temperature)
        if model.config.value_head:
            found = *found, model.values(x_nM)
        shape, out = layout.mask_BT.shape, [layout.mask_BT]
        rows_n, columns_n = (x_N[here_N] for x_N in layout.mask_BT.nonzero(as_tuple=True))
        for x_n in found:
            x_BT = x_n.new_zeros(shape).index_put((rows_n, columns_n), x_n)
            out.append(add_terms(x_BT, self.grid.context) if self.plan.cp > 1 else x_BT)
        return out

    def trie_of(self, batch):
        """The tree of a batch's prefixes; None where `--tree` is off."""
        if self.config.tree == "disabled":
            return None
        return TokenTrie([t.tokens for t in batch])

    def score(self, model, micro, trie):
        """The same of a micro-batch; of `--tree`, by the tree of its prefixes, `trie_of` it."""
        if self.plan is not None and model is self.model and self.config.tree == "disabled":
            (layout,) = self.lay_out([micro])
            options = layout.micro()
            return self.scores(model.hidden(options.pop("tokens"), **options), layout)
        mask_BT = padded([t.mask for t in micro], torch.empty(0, device=self.device).bool())
        if trie is not None:
            model, options = self._tree_options(model, micro)
            return mask_BT, *tree_scores(model, trie, padded=True, **options)
        sequences, temperature = [t.tokens for t in micro], self.config.temperature
        return mask_BT, *models.packed_logprobs(model, sequences, mask_BT, temperature=temperature)

    def forward_backward(self, batch, num_global_valid_tokens: float, *, supervised=False) -> dict:
        """Add the gradient of (7) for this rank's trajectories; metrics of all ranks' batch.

        num_global_valid_tokens: Z, the sum of `denominator` over ranks and over all the calls that
        precede one `optim_step`. supervised: l_t = -lp_t instead of (2)-(5).
        """
        if not num_global_valid_tokens > 0:
            raise ValueError(f"num_global_valid_tokens must be > 0, got {num_global_valid_tokens}")
        tally = Tally(self, num_global_valid_tokens, supervised)
        shared = self._deal(self._shared(batch)[0])
        if self.config.tree == "dta":
            self._tree_backward(shared, tally)
        elif isinstance(self.model, Pipeline):
            micros = self.micro_batches(shared)
            layouts = self.lay_out(micros)
            self.model.forward_backward(
                [Micro(**layout.micro()) for layout in layouts],
                lambda k, hidden: tally.loss(micros[k], *self.scores(hidden, layouts[k])),
            )
        else:
            for micro in self.micro_batches(shared):
                trie = self.trie_of(micro)
                tally.count(micro, trie)
                tally.loss(micro, *self.score(self.model, micro, trie)).backward()
        return tally.metrics(sum(len(t.tokens) for t in batch))

    def _deal(self, batch):
        """This rank's share of the data-parallel ranks' batch: prefixes together, equal times."""
        plan = self.plan or Plan(dp=dist.get_world_size())
        if self.config.tree == "disabled" or plan.cp > 1 or plan.dp == 1:
            return batch
        cost, group = Cost(again=1 / 3 if self.config.recompute else 0.0), None
        if self.plan is not None:
            group = self.grid.data
        return redistribute([t.tokens for t in batch], batch, group=group, cost=cost)[1]

    def _tree_options(self, model, batch):
        """What the functions of trees take besides a tree: a model, and options."""
        own, plan = model is self.model, self.plan or Plan()
        options = dict(temperature=self.config.temperature, masks=[t.mask for t in batch])
        if self.config.tree == "dta":
            # COMM: experts are on other ranks, which have other trees: as many calls on all.
            # Pinned by tests/test_plan_run.py::test_experts_train_alike_under_a_plan.
            lockstep = dist.group.WORLD if own and plan.ep > 1 else None
            options.update(max_tokens=self.config.max_tokens, lockstep=lockstep)
        elif own and plan.cp > 1:
            options.update(group=self.grid.context, method=self.config.cp_method)
        model = Even(model, plan.tp) if own and plan.tp > 1 else model
        return model, options

    def _tree_backward(self, batch, tally):
        """`--tree dta`: the gradient block by block."""

        def loss_of(some, *scores):
            micro = [batch[i] for i in some]
            mask_BT = padded([t.mask for t in micro], scores[0]).bool()
            return tally.loss(micro, mask_BT, *scores)

        trie = self.trie_of(batch)
        tally.count(batch, trie)
        model, options = self._tree_options(self.model, batch)
        tree_backward(  # a NaN is optim_step's to find, on all ranks
            model, trie, loss_of, recompute=self.config.recompute, batched=True, check_finite=False,
            **options,
        )  # fmt: skip

    def _loss(self, micro, mask_BT, lp_BT, entropy_BT, value_BT, sampler_BT):
        def column(name):
            return padded([getattr(t, name) for t in micro], lp_BT)

        old_BT = lp_BT.detach() if micro[0].old_logprobs is None else column("old_logprobs")
        cap, coef = self.config.importance_cap, self.config.value_coef
        l_BT, stats = policy_loss(
            lp_BT, old_BT, column("advantages"), mask_BT, self.config, entropy_BT=entropy_BT,
            ref_BT=None if micro[0].ref_logprobs is None else column("ref_logprobs"),
            importance_BT=(old_BT - sampler_BT).exp().clamp(max=cap) if cap else None,
        )  # fmt: skip
        if self.config.advantage == "gae":
            past = column("values"), column("returns")
            square_BT = value_loss(value_BT, *past, mask_BT, self.config.value_clip)
            l_BT, stats["value"] = l_BT + coef * square_BT, coef * square_BT.detach()  # (6)
        return l_BT, stats

    def forward_only(self, batch, model=None) -> list:
        """Log-probs of the sampled tokens: a numpy vector of L - 1 each, 0 where not sampled."""
        return self._forward(batch, model or self.model, 0)

    def compute_values(self, batch) -> list:
        """A critic's values, as `forward_only`: V of the state that each token was sampled in."""
        return self._forward(batch, self.model, 2)

    @torch.no_grad()
    def _forward(self, batch, model, which) -> list:
        every, first = self._shared(batch) if model is self.model else (batch, 0)
        micros, found = self.micro_batches(every), []
        if isinstance(model, Pipeline):
            layouts = self.lay_out(micros)
            states = model.forward([Micro(**layout.micro()) for layout in layouts])
            scored = [self.scores(*pair) for pair in zip(states or (), layouts)]
        else:
            scored = [self.score(model, micro, self.trie_of(micro)) for micro in micros]
        for micro, (_, *columns) in zip(micros, scored):
            rows_BT = columns[which].double().cpu().numpy()
            found += [x_T[: len(t.mask)] for x_T, t in zip(rows_BT, micro)]
        if isinstance(model, Pipeline):  # the last stage tells the others
            parts = [None] * dist.get_world_size(self.grid.replica)
            dist.all_gather_object(parts, found, group=self.grid.replica)
            found = next(part for part in parts if part)
        reshard(self.model)
        return found[first : first + len(batch)]

    def optim_step(self, lr: float | None = None) -> dict:
        """Reduce, clip by the global norm, step, zero the gradients, version + 1.

        A non-finite norm skips the step on every rank, since every rank has the same norm, and
        `max_skipped` of those in a row raise FloatingPointError.
        """
        suspect = reduce_gradients(self.model)
        norm = clip_grad_norm(self.model, self.config.max_grad_norm)
        lr = self.config.lr if lr is None else lr
        metrics = {"grad_norm": norm.item(), "lr": lr}
        if norm.isfinite():
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.policy_version += 1
            self.skipped_in_a_row = 0
        else:
            metrics["nonfinite"] = self._skip(suspect)
        self.optimizer.zero_grad()
        return metrics | {"policy_version": self.policy_version}

    def _skip(self, suspect):
        """Count a skipped step; which rank and parameter had it first, same text on all ranks."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        text = name_suspects(self.model, suspect)
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} optimiser steps in a row had a non-finite gradient, "
                f"first in {text}; lower --lr or look at that tensor's inputs"
            )
        return text

    def push_weights(self) -> int:
        """Copy the weights into the generator, one tensor at a time, in its dtype; the version."""
        copy_weights(self.model, self.generator)
        return self.policy_version

    def save_checkpoint(self, path, **extra) -> None:
        """Write weights, optimiser and `extra` (JSON values) to the directory `path`, or none."""
        state = {name: getattr(self, name) for name in self.COUNTS} | extra
        write_checkpoint(path, training_tensors(self.model, self.optimizer), state)

    def load_checkpoint(self, path) -> dict:
        """Restore what save_checkpoint wrote, on any number of ranks; returns its JSON values."""
        tensors = training_tensors(self.model, self.optimizer)
        state = read_checkpoint(path, tensors, counts=("step", *self.COUNTS))
        for name in self.COUNTS:
            setattr(self, name, state[name])
        return state


# 6. The loop ---------------------------------------------------------------------------------


ROLLOUT, EVALUATION, DEMO_PROMPT, DEMO_PLAY = 1, 2, 3, 4  # of a random stream's key: none is shared


def starts_of(config, task, stream, step, indices, first=0, held_out=False):
    """(group, state, prompt) of the indices that are this rank's: index % world == rank."""
    mine = [g for g in indices if g % dist.get_world_size() == dist.get_rank()]
    rngs = [np.random.default_rng([config.seed, stream, step, g]) for g in mine]
    starts = []
    for g, rng in zip(mine, rngs):
        with asking(task):
            state, prompt = task.prompt(rng, first + g, held_out)
        starts.append((g, state, prompt))
    return starts


def play(config, task, generator, starts, key):
    """`rollout` by the configuration, `batch_rows` rollouts at a time."""
    groups, size = [], max(1, config.batch_rows // config.group)
    for n in range(0, len(starts), size):
        groups += rollout(
            generator, task, starts[n : n + size], group=config.group, key=key, forks=config.forks,
            max_new_tokens=config.max_new_tokens, temperature=config.temperature,
            fork_turns=config.fork_turns,
        )  # fmt: skip
    return groups


def collect(config, task, generator, step):
    """The rollouts of a step: this rank's {group: trajectories}, the kept groups of all ranks in
    order, and metrics."""
    mine, kept, rewards, counts = {}, [], np.zeros((0, config.group)), np.zeros(2)
    for _ in range(config.max_rounds):
        indices = range(len(rewards), len(rewards) + config.prompts - len(kept))
        first = step * config.prompts * config.max_rounds
        starts = starts_of(config, task, ROLLOUT, step, indices, first=first)
        groups = play(config, task, generator, starts, key=(config.seed, step))
        table = np.zeros((len(indices), config.group))
        for (g, _, _), group in zip(starts, groups):
            mine[g], table[g - indices[0]] = group, [t.reward for t in group]
            counts += sum(t.mask.sum() for t in group), sum(t.truncated for t in group)
        table = np.array(summed(table.tolist(), generator.head_weight.device))
        dropped = (table == table[:, :1]).all(1) & config.dynamic_sampling
        kept += [g for g, drop in zip(indices, dropped) if not drop]
        rewards = np.concatenate([rewards, table])
        if len(kept) == config.prompts:
            break
    sampled, truncated = summed(counts.tolist(), generator.head_weight.device)
    if sampled == 0:  # every rollout samples a token, and those with a finite log-prob are counted
        raise FloatingPointError(
            f"step {step}: no finite token: every sampled token's log-prob is NaN or infinite, so "
            f"nothing can be trained; the weights are not finite or too large, or --temperature "
            f"{config.temperature} is too small"
        )
    solved = rewards >= 1
    return mine, kept, {
        "reward/mean": rewards.mean(), "reward/solved": solved.mean(),
        "reward/groups_none": (~solved).all(1).mean(), "reward/groups_all": solved.all(1).mean(),
        "tokens/generated": int(sampled), "tokens/truncated_fraction": truncated / rewards.size,
    }  # fmt: skip


def prepare(config, trainer, groups) -> dict:
    """Give this rank's trajectories reference and old log-probs, advantages, a final mask; metrics
    of the critic."""
    everyone, metrics = [t for group in groups for t in group], {}
    if trainer.reference is not None:
        for t, ref in zip(everyone, trainer.forward_only(everyone, trainer.reference)):
            t.ref_logprobs = ref
    if config.proximal:
        for t, old in zip(everyone, trainer.forward_only(everyone)):
            t.old_logprobs = old
    elif config.minibatches > 1:  # with a single update, the policy is its own old policy
        for t in everyone:
            t.old_logprobs = t.sampler_logprobs
    if config.advantage != "gae":
        for group in groups:
            compare(config, group)
    for t in everyone:
        if t.truncated and config.overlong == "filter":
            t.mask = np.zeros_like(t.mask)
    if config.advantage == "gae":  # whitened over what counts
        metrics = criticise(config, trainer, everyone)
    return metrics


def penalties(config, trajectory):
    """What each sampled token loses of its reward to the reference: (L - 1,)."""
    if not config.kl_coef or config.kl_in != "reward":
        return np.zeros(len(trajectory.mask))
    d = np.where(trajectory.mask, trajectory.sampler_logprobs - trajectory.ref_logprobs, 0.0)
    return config.kl_coef * divergence(torch.from_numpy(d), config.kl).numpy()


def compare(config, group):
    """Advantages (1) of one group's trajectories among themselves."""
    rewards = np.array([t.reward - penalties(config, t).sum() for t in group])
    if config.advantage == "per_branch":
        marks = branch_advantages(rewards, [t.path for t in group])
    else:
        marks = [[(0, a)] for a in advantages(rewards, config.advantage)]
    for t, path in zip(group, marks):
        t.advantages = np.zeros(len(t.mask))
        for start, advantage in path:
            t.advantages[start:] = advantage


def criticise(config, trainer, batch) -> dict:
    """Advantages (1) `gae` of all ranks' trajectories, whitened together. Collective."""
    sums = np.zeros(6)
    for t, values in zip(batch, trainer.compute_values(batch)):
        rewards, t.values = -penalties(config, t), values
        for at, reward in t.turn_rewards:
            rewards[at] += reward
        t.advantages, t.returns = gae(rewards, values, t.mask, config.gamma, config.gae_lambda)
        A, R, V = (x[t.mask] for x in (t.advantages, t.returns, values))
        sums += len(A), A.sum(), (A**2).sum(), R.sum(), (R**2).sum(), V.sum()
    n, *rest = summed(sums.tolist(), trainer.device)
    A, AA, R, RR, V = (x / max(1.0, n) for x in rest)
    spread = math.sqrt(max(0.0, AA - A * A))
    # NUMERICS: the mean and spread are of all ranks' tokens, so that no cut of the batch enters;
    # 1e-8 only keeps a step without any spread finite. Pinned by
    # tests/test_critic.py::test_advantages_are_whitened_over_the_step.
    for t in batch:
        t.advantages = np.where(t.mask, (t.advantages - A) / (spread + 1e-8), 0.0)
    explained = 1 - spread**2 / (RR - R * R) if RR - R * R > 1e-12 else 0.0  # R - V is A
    return {"value/token_mean": V, "value/explained_variance": explained}


def update(config, trainer, mine, kept, step):
    """The optimiser steps of one rollout batch, and the push; metrics as means over the steps."""
    factor = lr_factor(step, warmup=config.lr_warmup, total=config.steps, decay=config.lr_decay)
    seen, cuts = [], [m * len(kept) // config.minibatches for m in range(config.minibatches + 1)]
    for first, last in zip(cuts, cuts[1:]):
        batch = [t for g in kept[first:last] if g in mine for t in mine[g]]
        (Z,) = summed([denominator(batch, config)], trainer.device)
        if Z > 0:  # the same on all ranks; 0 when dynamic sampling or the filter left nothing
            seen.append(trainer.forward_backward(batch, Z) | trainer.optim_step(config.lr * factor))
            if "nonfinite" in seen[-1] and dist.get_rank() == 0:
                text = seen[-1]["nonfinite"]
                print(f"step {step}: skipped, non-finite gradient first in {text}", file=sys.stderr)
    trainer.push_weights()
    if not seen and dist.get_rank() == 0:
        text = "no update, since nothing was left to train on: every group was dropped, or every"
        print(f"step {step}: {text} rollout was truncated and filtered", file=sys.stderr)
    first, out = seen[0] if seen else {}, {}
    for name in first:
        if name.startswith(("loss", "kl", "entropy", "ratio", "value", "grad_norm")):
            out[name] = float(np.mean([metrics[name] for metrics in seen]))
        elif name.startswith("logprob_gap"):
            out[name] = first[name]
    return out | {
        "tokens/trained": sum(metrics["tokens/trained"] for metrics in seen),
        "tokens/trained_flat": sum(metrics["tokens/trained_flat"] for metrics in seen),
        "lr": config.lr * factor, "policy_version": trainer.policy_version,
        "updates/skipped": trainer.skipped,
    }  # fmt: skip


def evaluate(config, task, generator):
    """Fraction of held-out prompts solved by greedy decoding, and a trajectory to show."""
    starts = starts_of(config, task, EVALUATION, 0, range(config.eval_prompts), held_out=True)
    greedy = dataclasses.replace(config, group=1, temperature=0.0, forks=1, fork_turns=0)
    groups = play(greedy, task, generator, starts, key=())
    (solved,) = summed([sum(t.reward >= 1 for (t,) in groups)], generator.head_weight.device)
    return solved / config.eval_prompts, groups[0][0] if groups else None


def warm_start(config, task, trainer):
    """`demos` supervised steps on the task's demonstrations, in the same Trainer."""
    for step in range(config.demos):
        starts = starts_of(config, task, DEMO_PROMPT, step, range(config.prompts * config.group))
        key = config.seed, DEMO_PLAY, step
        batch = demonstrations(task, starts, key, config.max_new_tokens)
        (Z,) = summed([denominator(batch, config)], trainer.device)
        trainer.forward_backward(batch, Z, supervised=True)
        trainer.optim_step()
    # The second moments of a converged supervised fit are tiny: kept, they would make the first
    # policy-gradient steps ten times too long.
    trainer.optimizer.state.clear()


def build(config, task, device):
    """Policy, generator and (where there is a KL) reference, on this rank."""
    if config.model:
        model = models.load_hf(config.model, dtype=getattr(torch, config.dtype), device=device)
        if task.vocab_size > model.config.vocab_size:
            raise ValueError(
                f"the task has {task.vocab_size} tokens, {config.model} {model.config.vocab_size}"
            )
    else:
        shape = ModelConfig(
            vocab_size=task.vocab_size, eos_token_id=tuple(task.end),
            num_hidden_layers=config.layers, hidden_size=config.hidden,
            intermediate_size=3 * config.hidden, head_dim=config.hidden // config.heads,
            num_attention_heads=config.heads, num_key_value_heads=max(1, config.heads // 2),
        )  # fmt: skip
        model = Transformer(shape).to(device, getattr(torch, config.dtype))
        model.init_weights(config.seed)
    if config.advantage == "gae":
        model.add_value_head()

    def frozen(dtype):
        return Transformer(model.config).to(device, getattr(torch, dtype)).requires_grad_(False)

    generator = frozen(config.generator_dtype or config.dtype)
    return model, generator, frozen(config.dtype) if config.kl_coef else None


def train(config, device) -> int:
    """The run: set up, loop, save. Returns the exit code: 0, or 128 + the signal that ended it."""
    task = make_task(config)
    if config.demos and getattr(type(task), "demo", Task.demo) is Task.demo:
        raise ValueError(f"{type(task).__name__} has no demonstrations; use --demos 0")
    if config.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise ImportError("--tensorboard: pip install tensorboard")
    model, generator, reference = build(config, task, device)
    require_room(config, task, model.config.max_position_embeddings)
    if config.plan:
        ulysses = config.cp_method == "ulysses"
        plan, world = Plan.parse(config.plan), dist.get_world_size()
        plan.require_fits(world=world, config=model.config, ulysses=ulysses)

    with contextlib.ExitStack() as held:  # the lock on the run's directory
        with naming_lost_ranks(lambda: "setting up", "look at its error"):
            trainer = Trainer(config, model, generator=generator, reference=reference)
            # All that can be refused has been: only now is a directory claimed.
            out = agree(lambda: prepare_out(config, held))
        return run(config, task, trainer, out)


def require_room(config, task, positions):
    """ValueError if a prompt and an answer are longer than the model has positions.

    Every rank looks at the same first prompts, one to train on and one held out, so that all refuse
    alike; prompts of other lengths are `generate`'s to refuse when they come.
    """
    for stream, held_out in ((ROLLOUT, False), (EVALUATION, True)):
        rng = np.random.default_rng([config.seed, stream, 0, 0])
        with asking(task):
            _, prompt = task.prompt(rng, 0, held_out)
        if len(prompt) + config.max_new_tokens > positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and --max-new-tokens {config.max_new_tokens} "
                f"exceed the {positions} positions of the model"
            )


def run(config, task, trainer, out) -> int:
    """`train`, from the moment that the directory `out` is this run's."""
    log, step, stop, solved = Log(config, out, task), 0, Stop(), None
    generator = trainer.generator
    with naming_lost_ranks(lambda: f"step {step}", f"go on with --resume --out {out}"):
        found = agree(lambda: newest_checkpoint(out) if config.resume else None)
        if found:
            step = trainer.load_checkpoint(found)["step"]
        else:
            if config.resume:
                log.say(f"no checkpoint in {out} yet: from the start")
            warm_start(config, task, trainer)
        keep_reference(out, trainer, resumed=bool(found))
        trainer.push_weights()
        log.begin(step, generator)
        while step < config.steps:
            solved = train_step(config, task, trainer, log, step)
            step += 1
            last, signalled = step == config.steps, stop.agreed(trainer.device)
            if last or signalled or (config.save_every and step % config.save_every == 0):
                saved = save(config, trainer, out, step)
                if last and not saved:
                    raise FloatingPointError(
                        f"the run ends in steps that were skipped for a non-finite gradient, so "
                        f"its last state is not saved; {newest_good(out)}"
                    )
            if signalled and not last:
                name = signal.Signals(signalled).name
                state = f"saved after {step} steps" if saved else newest_good(out)
                log.say(f"{name}: {state}; go on with --resume --out {out}")
                return 128 + signalled
        if solved is None:  # resumed at its last step
            solved, _ = evaluate(config, task, generator)
        if config.model:  # the generator holds the last weights whole, in its own dtype
            agree(lambda: export(generator, out, log.advice))
    log.end(solved)
    return 0


def save(config, trainer, out, step) -> bool:
    """Write the checkpoint of `step` and delete what it supersedes. False if nothing was written.

    A run whose last gradients were not finite is about to go wrong: its checkpoints would push the
    good ones out. And ranks that should hold the same bits are compared first, because a bit that
    flipped in one of them is seen by nothing else.
    """
    if trainer.skipped_in_a_row:
        return False
    difference = replica_difference(trainer.model, trainer.optimizer)
    if difference:
        raise FloatingPointError(
            f"{difference}; nothing is saved: look at that rank's memory, and go on with --resume "
            f"--out {out}"
        )
    trainer.save_checkpoint(f"{out}/step-{step:08d}", step=step)
    for old in agree(lambda: superseded(out, step, config.keep)):
        shutil.rmtree(old, ignore_errors=True)
    return True


def newest_good(out) -> str:
    """Which checkpoint a run that could not save its last state can go on from."""
    newest = agree(lambda: newest_checkpoint(out))
    return f"the newest checkpoint is {newest}" if newest else f"{out} holds no checkpoint"


def export(generator, out, advice):
    """The last weights as a Hugging Face checkpoint, for transformers and for --model."""
    with writing(f"{out}/hf", advice):
        models.save_hf(generator, f"{out}/hf")


def train_step(config, task, trainer, log, step):
    """One turn of the loop; the held-out fraction solved if this step evaluates, else None."""
    seconds, solved = {}, None
    with timed(seconds, "total"):
        with timed(seconds, "rollout"):
            mine, kept, metrics = collect(config, task, trainer.generator, step)
        with timed(seconds, "train"):
            metrics |= prepare(config, trainer, [mine[g] for g in kept if g in mine])
            metrics |= update(config, trainer, mine, kept, step)
        if step + 1 == config.steps or (step + 1) % config.eval_every == 0:
            with timed(seconds, "eval"):
                solved, shown = evaluate(config, task, trainer.generator)
            metrics["eval/solved"] = solved
            log.sample(step, shown)
    log.step(step, metrics | seconds)
    return solved


@contextlib.contextmanager
def timed(seconds, phase):
    start = time.perf_counter()
    yield
    seconds[f"seconds/{phase}"] = time.perf_counter() - start


def keep_reference(out, trainer, resumed):
    """The frozen reference is the policy at the first step; it is stored, so that resume has it."""
    if trainer.reference is not None:
        tensors = {name: p.detach() for name, p in trainer.reference.named_parameters()}
        tensors |= persistent_buffers(trainer.reference)
        if resumed:
            try:
                read_checkpoint(f"{out}/reference", tensors)
            except ValueError as error:
                advice = "put a copy of it back, or begin again with --overwrite"
                raise ValueError(f"{error}; {advice}") from error
        else:
            copy_weights(trainer.model, trainer.reference)
            write_checkpoint(f"{out}/reference", tensors, {})


class Log:
    """What a run prints and writes; silent on every rank but 0."""

    COLUMNS = dict(
        reward="reward/mean", solved="reward/solved", eval="eval/solved", norm="grad_norm",
        entropy="entropy/token_mean", clipped="ratio/clipped_fraction", gap="logprob_gap/max",
    )  # fmt: skip

    def __init__(self, config, out, task):
        self.config, self.out, self.task, self.on = config, Path(out), task, dist.get_rank() == 0
        self.started, self.events, self.text = time.perf_counter(), None, None
        self.advice = f"go on with --resume --out {out}"
        if config.tensorboard and self.on:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(out)

    def say(self, text):
        if self.on:
            tqdm.write(text)

    def begin(self, start, model):
        if not self.on:
            return
        c, count = self.config, sum(p.numel() for p in model.parameters())
        self.say(json.dumps(dataclasses.asdict(c)))
        self.say(f"{c.task}: {count:,} parameters, {c.prompts} groups of {c.group} a step, "
                 f"{dist.get_world_size()} rank(s), from step {start}, out {self.out}")  # fmt: skip
        for name in ("metrics.jsonl", "samples.jsonl"):
            with writing(self.out / name, self.advice):
                cut_lines(self.out / name, start)
        self.bar = tqdm(total=c.steps, initial=start, disable=None, unit="step")
        self.say("  step" + "".join(f"{name:>10}" for name in self.COLUMNS) + "  tokens/s")

    def step(self, step, metrics):
        if not self.on:
            return
        metrics = {"step": step} | metrics
        self.write("metrics.jsonl", metrics)
        self.bar.set_postfix_str(f"reward {metrics['reward/mean']:.3f}", refresh=False)
        self.bar.update()
        for name, value in metrics.items() if self.events else ():
            self.events.add_scalar(name, value, step)
        if step % self.config.log_every == 0 or "eval/solved" in metrics:
            shown = [metrics.get(name) for name in self.COLUMNS.values()]
            cells = [" " * 10 if x is None else f"{x:10.3g}" for x in shown]
            tokens = metrics["tokens/generated"] + metrics["tokens/trained_flat"]
            self.say(f"{step:6d}{''.join(cells)}{tokens / metrics['seconds/total']:10.0f}")

    def write(self, name, line):
        for key, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                line = line | {key: None}  # JSON has no NaN
        with writing(self.out / name, self.advice), (self.out / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def sample(self, step, trajectory):
        if self.on and trajectory:
            reward = trajectory.reward
            with asking(self.task):
                self.text = self.task.show(trajectory.tokens)
            self.write("samples.jsonl", {"step": step, "reward": reward, "text": self.text})

    def end(self, solved):
        if not self.on:
            return
        self.bar.close()
        self.say(f"sample: {self.text}")
        verb = "met" if solved >= self.config.target else "MISSED"
        seconds = time.perf_counter() - self.started
        verb = f"target {self.config.target} {verb} after {self.config.steps} steps"
        self.say(f"eval/solved {solved:.3f}: {verb}, {seconds:.0f} s")


@contextlib.contextmanager
def writing(path, advice):
    """Say of an OSError what it kept from being written, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} not written ({error}): make room or mend the directory, then {advice}"
        ) from error


def whole_lines(path) -> list[dict]:
    """The JSON objects in a run's file of lines, without a last one that a kill has torn."""
    if not path.exists():
        return []
    return [line for _, line in models.read_json_lines(path, skip_torn_last=True)]


def cut_lines(path, step):
    """Drop the lines of `step` and later, and torn ones; the file is replaced whole."""
    partial = path.with_suffix(".tmp")
    kept = []
    for line in whole_lines(path):
        if not isinstance(line.get("step"), int):
            raise ValueError(f"{path} has a line without a step: {json.dumps(line)[:60]}")
        if line["step"] < step:
            kept.append(json.dumps(line) + "\n")
    partial.write_text("".join(kept))
    partial.replace(path)


# 7. plot ------------------------------------------------------------------------------------


def plot(runs) -> None:
    """reward/mean and eval/solved by step: curve.png in the first run; text if no matplotlib."""
    curves = {}
    for run in runs:
        path = Path(run) / "metrics.jsonl"
        if not path.exists():
            raise ValueError(f"{run} holds no metrics.jsonl; give the directory of a run")
        curves[run] = whole_lines(path)
        for number, line in enumerate(curves[run], 1):
            if not {"step", "reward/mean"} <= line.keys():
                raise ValueError(f"{path} line {number} has no step and reward/mean")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        for run, lines in curves.items():
            print(f"{run}: reward/mean (pip install matplotlib for a PNG)")
            for x in lines[:: max(1, len(lines) // 20)]:
                reward = x["reward/mean"]
                print(f"{x['step']:6d} {reward:7.3f} {'#' * int(50 * max(0, reward))}")
        return
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for n, (run, lines) in enumerate(curves.items()):
        rewards = [x["reward/mean"] for x in lines]
        axes.plot([x["step"] + 1 for x in lines], rewards, f"C{n}", label=Path(run).name)
        evals = [x for x in lines if "eval/solved" in x]
        solved = [x["eval/solved"] for x in evals]
        axes.plot([x["step"] + 1 for x in evals], solved, f"C{n}o", markersize=4)
    axes.set(xlabel="step", ylabel="line: reward/mean   dots: eval/solved", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(runs[0]) / "curve.png", dpi=120)
    print(f"wrote {Path(runs[0]) / 'curve.png'}")


# 8. main -------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(out):
    """Hold a run's directory for as long as the run lives, so that no other run writes there.

    The lock is the kernel's, on the file OUT/lock: it ends with its process, however that ends, and
    the file stays empty.
    """
    path = Path(out) / "lock"
    with path.open("a") as file:
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{out} is in use by {holder_of(path)}: wait for it to end, or choose another --out"
            ) from error
        except (ImportError, OSError) as error:
            text = f"warning: {out} cannot be locked ({error}): let no other run write there"
            print(text, file=sys.stderr)
        yield


def holder_of(path) -> str:
    """Who has a file open: found in /proc, which shows the processes of this machine."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # processes of others, and those that have just ended
            pid = link.parts[2]
            if int(pid) != os.getpid() and link.readlink() == path.resolve():
                command = (link.parents[1] / "cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {pid} ({command.decode(errors='replace').strip()[:80]})"
    return "another process, perhaps on another machine"


def refuse_directory(config, out):
    """ValueError if this run may not have the directory: nothing is overwritten unasked."""
    config_json = out / "config.json"  # Hugging Face checkpoints have one too
    holds_run = config_json.exists() and '"advantage"' in config_json.read_text()
    if holds_run and not (config.resume or config.overwrite):
        raise ValueError(f"{out} holds a run: --resume to go on with it, --overwrite to delete it")
    # A start that was killed, or that is being made beside this one, has left no more than these.
    begun = {"config.tmp", "lock"}
    if not holds_run and out.exists() and any(p.name not in begun for p in out.iterdir()):
        raise ValueError(f"{out} holds files that are no run; choose another --out")
    if config.resume and not holds_run:
        raise ValueError(f"--resume: {out} holds no run")


def first_free_directory(config):
    """Make the first of runs/TASK-0, runs/TASK-1, .. that nobody has made yet."""
    name = config.task if config.task in TASKS else config.task.rpartition(":")[2]
    for n in range(10**6):
        out = Path("runs") / f"{name}-{n}"
        # Making it is the claim: of two runs that start in one instant, one gets this error.
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out


def prepare_out(config, held) -> str:
    """Rank 0: choose, lock and fill the run's directory, or say why not.

    held: an ExitStack, which keeps the lock until it is closed.
    """
    out = Path(config.out or "runs")
    with writing(out, "start again; or choose another --out"):
        if not config.out:
            out = first_free_directory(config)
        elif not (out / "lock").exists():
            refuse_directory(config, out)  # before anything is written there
            out.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(out))
        refuse_directory(config, out)  # now that nobody else writes there
        if config.overwrite:
            number = "[0-9]" * 8
            names = ["metrics.jsonl", "samples.jsonl", "curve.png", "events.out.*", "reference"]
            names += ["reference.tmp", f"step-{number}", f"step-{number}.tmp", "hf", "config.json"]
            for path in (path for name in names for path in out.glob(name)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        stored = dataclasses.asdict(config)
        stored |= {"resume": False, "resume_or_start": False, "overwrite": False, "out": str(out)}
        partial = out / "config.tmp"
        partial.write_text(json.dumps(stored, indent=2) + "\n")
        partial.replace(out / "config.json")
    return str(out)


def _measure():
    """tests/measure_grpo.py: check, the matrix of plans, trees and families; and bench."""
    sys.path.append(str(Path(__file__).resolve().parent / "tests"))
    if not importlib.util.find_spec("measure_grpo"):
        raise ImportError("check and bench need tests/measure_grpo.py in this file's folder")
    return __import__("measure_grpo")


def main(argv) -> int:
    """0: done, target met or not. 2: an error, named on stderr. 130, 143: saved after Ctrl-C,
    SIGTERM."""
    try:
        if argv[:1] == ["plot"] and len(argv) > 1:
            return plot(argv[1:]) or 0
        if argv == ["check"] or argv[:1] == ["bench"]:
            return _measure().main(argv)
        config = parse_config(argv).check()
        device = connect(config.device, timeout=config.timeout, threads=config.threads)
        code = train(config, device)
        with naming_lost_ranks(lambda: "finished", "what the run saved is whole"):
            dist.barrier()
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        if isinstance(error, TaskError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"rank {os.environ.get('RANK', 0)}: error: {error}", file=sys.stderr, flush=True)
        return leave(2)  # a clean teardown would wait for ranks that may be gone or stuck
    except KeyboardInterrupt:  # from here on Stop has it: a Ctrl-C before the first step
        print("interrupted before the first step: nothing to save", file=sys.stderr, flush=True)
        return leave(128 + signal.SIGINT)
    dist.destroy_process_group()
    return leave(code)


def leave(code) -> int:
    """The exit code; among several ranks the process ends here, without Python's teardown.

    gloo's threads now and then abort the interpreter's own teardown.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

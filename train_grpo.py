"""GRPO on multi-turn tasks: rollouts, advantages, one loss, one training loop, on any number of ranks.

A policy answers a prompt several times; answers that beat their group's mean become likelier. Two
rules carry the file. **Every loss is a sum over sampled tokens**, sum(w * l) / Z, with w and Z made
from the global batch of one optimiser step before any micro-batch is cut, and gradients are summed
over ranks: so micro-batches, ranks, packing and order cannot change it. **Data and randomness are
functions of (seed, step, group, rollout)**, never of a generator's state: so the number of ranks,
a kill and a resume cannot change them either.

    python train_grpo.py                                      # guess: 0.95 solved, about a minute
    torchrun --nproc-per-node 2 train_grpo.py                 # the same run on two processes
    python train_grpo.py --help                               # every flag, its default, its meaning
    python train_grpo.py plot runs/guess-0 [runs/guess-1 ..]  # reward curves, PNG or text

What it must equal. For rollout i of a group of G with reward R_i, sampled tokens t, log-probs under
softmax(logits / temperature): lp of the policy now, old of the policy before this step's first
update, ref of the frozen reference, smp of the sampler:

    (1)  A_i = (R_i - mean R) / (std R + 1e-4)    `group_std` (GRPO; std with G - 1)
             = R_i - mean R                       `group_mean` (Dr.GRPO)
             = (R_i - mean R) G / (G - 1)         `leave_one_out` (RLOO)
             = V(segment) - V(its parent)         `per_branch`: V = mean reward of the rollouts below
    (2)  r_t = exp(lp_t - old_t)                  `token`;   exp(mean_t(lp_t - old_t))  `sequence` (GSPO)
    (3)  l_t = -min(min(r, c) A, clip(r, 1 - low, 1 + high) A)     `clip`; c: dual clip, if any
             = -sg(min(r, bound)) A lp_t                            `cispo`
    (4)  l_t <- sg(min(exp(old_t - smp_t), C)) l_t                  importance_cap C (TIS), if any
    (5)  l_t <- l_t + kl_coef k(lp_t - ref_t) - entropy_coef H_t    k1 d, k2 d^2/2, k3 exp(-d) + d - 1
    (6)  loss = sum_i sum_t w_i l_it / Z          over all ranks and micro-batches of the step
             token_mean     w_i = 1               Z = sampled tokens
             sequence_mean  w_i = 1 / tokens_i    Z = sequences with a sampled token
             constant       w_i = 1               Z = sequences * max_new_tokens

Paper -> settings (the rest at its default; `--kl-coef`, clip values and lr are the papers' own):

    GRPO     arXiv:2402.03300  --aggregation sequence_mean --kl-coef 0.04 --kl k3 --clip-high 0.2
    Dr.GRPO  arXiv:2503.20783  --aggregation constant --advantage group_mean --clip-high 0.2
    RLOO     arXiv:2402.14740  --advantage leave_one_out --kl-coef 0.05 --kl k1 --kl-in reward
    DAPO     arXiv:2503.14476  --dynamic-sampling --max-rounds 3 --overlong filter --entropy-coef 0
    GSPO     arXiv:2507.18071  --ratio sequence --aggregation sequence_mean --clip-low 3e-4 --clip-high 4e-4
    CISPO    arXiv:2506.13585  --objective cispo --cispo-bound 5
    TIS, decoupled PPO (arXiv:2110.00641)  --proximal --importance-cap 2
    dual clip (arXiv:1912.09729)           --dual-clip 3
    tree rollouts (arXiv:2506.11902)       --forks 2 --fork-turns 2 --advantage per_branch

Letters: B trajectories, T positions of their padded log-prob vectors (targets tokens[1:], so a
trajectory of L tokens has L - 1), V vocabulary, S packed tokens, N scored tokens, M model width.
Capital: this rank's whole; nothing here is sharded within a sequence.

Metrics (metrics.jsonl, one line a step; every normaliser is global and in the name):

    reward/mean, reward/solved   over the step's rollouts; solved: reward of at least 1
    reward/groups_none, _all     fraction of groups in which no, every rollout is solved
    eval/solved                  greedy, held-out prompts; at evaluation steps and in the last line
    loss/token_mean              (6), whatever the aggregation: divided by its own Z; mean of updates
    kl/token_mean                k of `--kl` against the reference, where there is one
    entropy/token_mean           (8) of models.py at `temperature`; ratio/clipped_fraction  of tokens
    logprob_gap/max, /mean       |trainer - sampler| over the first minibatch, before any update
    logprob_gap/identical        fraction of its tokens whose two log-probs are the same bits
    grad_norm                    before clipping, global, mean of updates; lr  that the step used
    policy_version, updates/skipped   optimiser steps taken; steps skipped for a non-finite gradient
    tokens/generated             sampled; tokens/trained  forwarded by the trainer with gradients
    tokens/truncated_fraction    of rollouts that met max_new_tokens
    seconds/rollout, /train, /eval, /total

How it deviates: group_std uses TRL's Bessel std and 1e-4 (the paper gives neither); old is the
current policy itself where a step has one update, so that rounding cannot clip; log-ratios are
clamped to +-10 before exp. Not here yet: a critic, asynchronous generation, top-p (it would bias
every ratio unless scored under the same cut), tensor, context and pipeline parallelism.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import inspect
import json
import math
import os
import pickle
import re
import shutil
import signal
import sys
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from tqdm import tqdm

import models
from models import KVCache, ModelConfig, Transformer, extend, sample


# 1. Configuration ----------------------------------------------------------------------------


@dataclass
class Config:
    """The command line: a field is a flag, its comment the help."""

    # the run
    task: str = "guess"  # guess | sort | lookup | jsonl | FILE.py:Class
    out: str = ""  # directory of the run; empty: the first free runs/TASK-N
    resume: bool = False  # go on from the newest complete checkpoint in --out
    overwrite: bool = False  # delete the run that --out holds
    seed: int = 0  # of weights, data and sampling
    steps: int = 60  # rollout batches
    target: float = 0.95  # eval/solved that the run says it met or missed
    # the task
    size: int = 7  # guess: numbers; sort: symbols; lookup: keys, and values
    turns: int = 4  # guess: answers allowed
    length: int = 4  # sort: symbols to sort
    data: str = ""  # jsonl: file of {"question", "answer"} lines
    template: str = "{question}\n"  # jsonl: prompt; a ChatML tokenizer gets its own turns instead
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
    max_new_tokens: int = 16  # a trajectory's limit after its prompt, replies of the task included
    temperature: float = 1.0  # of sampling and of every log-prob
    forks: int = 1  # children of a trajectory at a turn boundary (tree rollouts)
    fork_turns: int = 0  # number of turn boundaries that fork; group must divide by forks ** fork_turns
    dynamic_sampling: bool = False  # drop groups whose rewards are all equal (DAPO)
    max_rounds: int = 1  # rounds of rollouts to replace dropped groups; 1: only drop
    overlong: str = "keep"  # truncated trajectories: keep | filter (out of the loss)
    # the loss
    advantage: str = "group_std"  # group_std | group_mean | leave_one_out | per_branch
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
    # the optimiser
    lr: float = 1.5e-3  # AdamW
    lr_warmup: int = 0  # steps of linear warm-up
    lr_decay: str = "linear"  # from the end of the warm-up to the last step: constant | linear | cosine
    weight_decay: float = 0.0  # AdamW, decoupled
    beta2: float = 0.99  # AdamW
    minibatches: int = 2  # optimiser steps a rollout batch
    max_grad_norm: float = 1.0  # clip the global norm
    max_skipped: int = 3  # stop after so many non-finite gradients in a row
    micro_tokens: int = 16384  # packed tokens a forward; a longer sequence goes alone
    data_parallel: str = "ddp"  # ddp (full copies, one reduction a step) | fsdp (FSDP2 shards)
    # output
    eval_every: int = 10  # steps between evaluations; the last step always evaluates
    eval_prompts: int = 70  # held-out prompts of one evaluation
    save_every: int = 0  # steps between checkpoints; 0: only the last step
    keep: int = 2  # newest checkpoints kept
    log_every: int = 5  # steps between lines of the table and samples
    tensorboard: bool = False  # also write TensorBoard events (needs tensorboard)
    timeout: int = 60  # seconds that a rank waits for another before the run ends
    threads: int = 1  # CPU threads of each rank

    CHOICES = dict(
        dtype=("float32", "float64", "bfloat16"), overlong=("keep", "filter"), kl=("k1", "k2", "k3"),
        advantage=("group_std", "group_mean", "leave_one_out", "per_branch"),
        aggregation=("token_mean", "sequence_mean", "constant"), objective=("clip", "cispo"),
        ratio=("token", "sequence"), kl_in=("loss", "reward"), data_parallel=("ddp", "fsdp"),
        lr_decay=("constant", "linear", "cosine"), device=("", "cpu", "cuda"),
        generator_dtype=("", "float32", "float64", "bfloat16"),
    )  # fmt: skip
    POSITIVE = (
        "steps", "size", "turns", "length", "layers", "hidden", "heads", "prompts", "group", "forks",
        "max_new_tokens", "temperature", "max_rounds", "cispo_bound", "lr", "minibatches",
        "max_grad_norm", "max_skipped", "micro_tokens", "eval_every", "eval_prompts", "keep",
        "log_every", "timeout", "threads", "clip_low", "clip_high",
    )  # fmt: skip
    NONNEGATIVE = (
        "seed", "demos", "fork_turns", "dual_clip", "kl_coef", "entropy_coef", "importance_cap",
        "lr_warmup", "weight_decay", "save_every", "target",
    )  # fmt: skip
    # What a resumed run may change: none of it enters the steps that follow, beyond rounding.
    FREE = (
        "out", "resume", "overwrite", "steps", "eval_every", "save_every", "keep", "log_every", "target",
        "tensorboard", "timeout", "threads", "micro_tokens", "device",
    )  # fmt: skip

    def check(self, world: int = 1) -> "Config":
        """Raise ValueError for anything that cannot run, before anything is built or written."""
        wrong = []
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), f.type if isinstance(f.type, type) else type(f.default)
            if kind is float and type(value) is int:
                setattr(self, f.name, value := float(value))
            if type(value) is not kind:
                wrong.append(f"{_flag(f.name)} must be {kind.__name__}, got {value!r}")
            elif kind is float and not math.isfinite(value):
                wrong.append(f"{_flag(f.name)} must be finite, got {value}")
        if wrong:
            raise ValueError("; ".join(wrong))
        say = wrong.append
        for name, allowed in self.CHOICES.items():
            if getattr(self, name) not in allowed:
                say(f"{_flag(name)} must be one of {', '.join(filter(None, allowed))}, got {getattr(self, name)!r}")
        for names, bound, word in ((self.POSITIVE, 0, "positive"), (self.NONNEGATIVE, -1e-300, "at least 0")):
            wrong += [f"{_flag(n)} must be {word}, got {getattr(self, n)}" for n in names if getattr(self, n) <= bound]
        self._check_combinations(say, world)
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _check_combinations(self, say, world):
        if self.group == 1 and self.advantage != "per_branch":
            say(f"--group 1 has no baseline for --advantage {self.advantage}: its advantages are all 0; use --group 2 or more")
        if self.group == 1 and self.advantage == "per_branch":
            say("--advantage per_branch needs --group 2 or more")
        leaves = self.forks**self.fork_turns if self.forks > 0 and self.fork_turns < 64 else 0
        if leaves < 1 or self.group % leaves:
            say(f"--group {self.group} must divide by forks ** fork_turns = {leaves}")
        if (self.forks > 1) != (self.fork_turns > 0):
            say("--forks and --fork-turns go together: --forks 2 --fork-turns 2, or neither")
        if self.clip_low >= 1:
            say(f"--clip-low must be under 1, got {self.clip_low}")
        if 0 < self.dual_clip <= 1 + self.clip_high:
            say(f"--dual-clip {self.dual_clip} must be over 1 + clip_high = {1 + self.clip_high:.3g}; papers use 3")
        if self.objective == "cispo" and (self.dual_clip or self.ratio == "sequence"):
            say("--objective cispo has its own bound: drop --dual-clip and --ratio sequence")
        if self.dynamic_sampling and (self.entropy_coef or (self.kl_coef and self.kl_in == "loss")):
            say("--dynamic-sampling drops groups of advantage 0, which still have entropy and KL terms: set --entropy-coef 0 and --kl-coef 0")
        if self.max_rounds > 1 and not self.dynamic_sampling:
            say("--max-rounds is for --dynamic-sampling")
        if self.importance_cap and self.minibatches > 1 and not self.proximal:
            say("--importance-cap with --minibatches over 1 needs --proximal: without it old is the sampler and the weight is 1")
        if self.minibatches > self.prompts:
            say(f"--minibatches {self.minibatches} is more than --prompts {self.prompts}: some would be empty")
        if self.resume and self.overwrite:
            say("--resume goes on with a run and --overwrite deletes it: choose one")
        if self.resume and not self.out:
            say("--resume needs --out DIR, the run to go on with")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            say(f"--hidden {self.hidden} must divide by --heads {self.heads} into an even head_dim")
        if self.heads % 2 and self.heads > 1:
            say(f"--heads must be 1 or even (half as many key heads), got {self.heads}")
        if self.task == "jsonl" and not (self.data and self.model):
            say("--task jsonl needs --data FILE.jsonl and --model DIR with a tokenizer.json")
        if self.task == "sort" and self.length > self.size:
            say(f"--length {self.length} distinct symbols need --size of at least as many, got {self.size}")
        if self.device == "cuda" and not torch.cuda.is_available():
            say("--device cuda: torch sees no CUDA device here")


def _flag(name):
    return "--" + name.replace("_", "-")


def parse_config(argv) -> Config:
    """Flags from the fields of Config; with --resume, what the run stored is the default."""
    source = inspect.getsource(Config)
    parser = argparse.ArgumentParser(
        prog="train_grpo.py", description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="also: train_grpo.py check | plot RUN [RUN ...]",
    )  # fmt: skip
    for f in dataclasses.fields(Config):
        comment = re.search(rf"^    {f.name}: .*?#\s*(.*)$", source, re.M).group(1).replace("%", "%%")
        kind = type(f.default)
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else dict(type=kind, metavar=kind.__name__)
        text = comment if kind is bool else f"{comment} [{f.default!r}]"
        parser.add_argument(_flag(f.name), default=argparse.SUPPRESS, help=text, **how)
    given = vars(parser.parse_args(argv))
    stored_at = Path(given.get("out", "")) / "config.json"
    if given.get("resume") and given.get("out") and stored_at.exists():
        stored = json.loads(stored_at.read_text())
        changed = [
            f"{_flag(k)} {v!r} (the run has {stored[k]!r})"
            for k, v in given.items() if k not in Config.FREE and k in stored and stored[k] != v
        ]  # fmt: skip
        if given.get("steps", stored["steps"]) != stored["steps"] and stored["lr_decay"] != "constant":
            changed.append(f"--steps, since --lr-decay {stored['lr_decay']} depends on it")
        if changed:
            raise ValueError(f"--resume cannot change {', '.join(changed)}; start a new run instead")
        unknown = stored.keys() - {f.name for f in dataclasses.fields(Config)}
        if unknown:
            raise ValueError(f"{stored_at} has fields that this version does not know: {sorted(unknown)}")
        given = stored | {"overwrite": False} | given
    return Config(**given)


# 2. Advantages and the loss: pure functions --------------------------------------------------


def definition(lp, old, A, w, Z, clip_low, clip_high):
    """(2), (3), (6) for lists of lists of sampled tokens, with Python floats. Slow and obvious."""
    total = 0.0
    for i in range(len(lp)):
        for t in range(len(lp[i])):
            r = math.exp(lp[i][t] - old[i][t])
            clipped = min(max(r, 1 - clip_low), 1 + clip_high)
            total += w[i] * -min(r * A[i], clipped * A[i])
    return total / Z


def advantages(rewards, /, kind):
    """(1) for the float64 rewards (G,) of one group: (G,). `per_branch` is `branch_advantages`."""
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


def divergence(d, /, kind):
    """k1, k2, k3 of (5), d = log p - log reference at tokens drawn from p (Schulman 2020)."""
    if kind == "k1":
        return d
    return d.square() / 2 if kind == "k2" else torch.exp(-d) + d - 1


def policy_loss(lp_BT, old_BT, advantage_BT, mask_BT, /, config, *, entropy_BT=None, ref_BT=None, importance_BT=None):
    """(2)-(5) per token: l_BT, and a dict of detached (B, T) statistics, all 0 where mask is off.

    Log-probs (B, T) float, mask_BT bool (was sampled), advantage_BT and importance_BT broadcastable.
    Any leading shape works, (T,) too: a row is one sequence, which is all that `sequence` needs.
    """
    zero = lp_BT.new_zeros(())
    # NUMERICS: masked entries may be anything, -inf too: selected away before exp, not multiplied.
    # Pinned by tests/test_loss.py::test_masked_tokens_may_hold_anything.
    log_ratio_BT = torch.where(mask_BT, lp_BT - old_BT, zero)
    if config.ratio == "sequence":
        count_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(-1, keepdim=True) / count_B1).expand_as(lp_BT)
    ratio_BT = log_ratio_BT.clamp(-10, 10).exp()  # (2)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.objective == "cispo":
        clipped_BT = ratio_BT > config.cispo_bound
        l_BT = -ratio_BT.clamp(max=config.cispo_bound).detach() * advantage_BT * lp_BT
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


def lr_factor(step, /, *, warmup, total, decay):
    """The multiple of lr that step 0..total-1 uses: never 0, 1 at the end of the warm-up.

    warmup 2, total 10, linear: .5 1 1 .875 .75 .625 .5 .375 .25 .125
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[decay]


# 3. Tasks ------------------------------------------------------------------------------------


class Task:
    """What a task provides. Tokens go in and come out; nothing is ever decoded and encoded again.

    A state is a plain value and `reply` returns a new one, so that a forked trajectory can share it.
    Rewards of the turns add up; a trajectory of total reward 1 or more counts as solved.
    """

    vocab_size: int
    end: tuple[int, ...]  # tokens that end a turn

    def prompt(self, rng, index: int, held_out: bool):
        """-> (state, prompt tokens). rng: numpy Generator of this (seed, step, group)."""
        raise NotImplementedError

    def reply(self, state, answer: list[int]):
        """answer: the tokens of one turn, its end token last. -> (state, reply tokens or None, reward)."""
        raise NotImplementedError

    def demo(self, state, rng) -> list[int]:
        """A valid answer to train on before the first rollout (--demos)."""
        raise ValueError(f"{type(self).__name__} has no demonstrations; use --demos 0")

    def show(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class Symbols(Task):
    """A task over a few named symbols; the last one ends a turn."""

    def __init__(self, names):
        self.names = names
        self.vocab_size, self.end = len(names), (len(names) - 1,)

    def show(self, tokens):
        return " ".join(self.names[t] for t in tokens)


def is_held_out(tokens):
    """One prompt in ten is kept for evaluation, by a hash, so that training never draws it."""
    return zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes()) % 10 == 0


class Guess(Symbols):
    """Find a hidden number: answer `number .`, hear `higher` or `lower`, up to `turns` answers.

        ? 3 . higher 5 . lower 4 .          reward 1; all answers well-formed but wrong: 0.1; else 0

    Secrets come from a shuffled deck, so that each batch holds each number equally often. Every
    secret has the same prompt, so evaluation asks for all of them instead of unseen ones.
    """

    def __init__(self, config):
        self.size, self.turns = config.size, config.turns
        self.seed = config.seed
        super().__init__([str(n) for n in range(self.size)] + ["?", "higher", "lower", "."])

    def prompt(self, rng, index, held_out):
        deck, place = divmod(index, self.size)
        order = np.random.default_rng([self.seed, 7, deck]).permutation(self.size)
        secret = place if held_out else int(order[place])
        return (secret, 1), [self.size]

    def reply(self, state, answer):
        secret, turn = state
        if len(answer) != 2 or answer[0] >= self.size:
            return state, None, 0.0
        if answer[0] == secret:
            return state, None, 1.0
        if turn == self.turns:
            return state, None, 0.1
        return (secret, turn + 1), [self.size + 1 if answer[0] < secret else self.size + 2], 0.0


class Sort(Symbols):
    """Put `length` distinct symbols in order, in one turn: `c a b ? a b c .` Reward: the share of
    right places if the answer has the right length, doubled in weight by being all right."""

    def __init__(self, config):
        self.size, self.length = config.size, config.length
        super().__init__([chr(97 + n) if n < 26 else f"s{n}" for n in range(self.size)] + ["?", "."])

    def prompt(self, rng, index, held_out):
        while True:
            items = rng.permutation(self.size)[: self.length].tolist()
            if is_held_out(items) == held_out:
                return tuple(sorted(items)), items + [self.size]

    def reply(self, state, answer):
        if len(answer) != self.length + 1:
            return state, None, 0.0
        right = sum(a == b for a, b in zip(answer, state)) / self.length
        return state, None, 1.0 if right == 1 else 0.5 * right

    def demo(self, state, rng):
        return rng.permutation(self.size)[: self.length].tolist() + list(self.end)


class Lookup(Symbols):
    """Use a tool: `? key`, answer `key .`, the table replies `= value`, answer `value .`

    The value is drawn anew for each prompt, so only asking for the right key finds it. Demonstrations
    are valid play with random content: they teach the form, not the answer.
    """

    def __init__(self, config):
        self.size = config.size
        keys = [f"k{n}" for n in range(self.size)]
        super().__init__(keys + [f"v{n}" for n in range(self.size)] + ["?", "=", "."])

    def prompt(self, rng, index, held_out):
        key, table = int(rng.integers(self.size)), tuple(rng.integers(self.size, size=self.size).tolist())
        return (key, table, None), [2 * self.size, key]

    def reply(self, state, answer):
        key, table, value = state
        query = value is None
        if len(answer) != 2 or not (answer[0] < self.size if query else self.size <= answer[0] < 2 * self.size):
            return state, None, 0.0
        if query:
            value = self.size + table[answer[0]]
            return (key, table, value), [2 * self.size + 1, value], 0.5 * (answer[0] == key)
        return state, None, 0.5 * (answer[0] == value)

    def demo(self, state, rng):
        offset = 0 if state[2] is None else self.size
        return [offset + int(rng.integers(self.size)), *self.end]


class Jsonl(Task):
    """Questions from a file of {"question", "answer"} lines, GSM8K's format: the gold answer is what
    follows `####` (the whole answer, if nothing does). Reward 1 for an equal number or equal text.

    Every tenth line, by a hash of the question, is held out. Needs the checkpoint's tokenizer.json.
    """

    def __init__(self, config):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("--task jsonl needs tokenizers: pip install tokenizers") from error
        path = Path(config.model) / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"--task jsonl needs {path}")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.vocab_size = self.tokenizer.get_vocab_size()
        shape = ModelConfig.from_hf(config.model)
        self.end, self.room = shape.eos_token_id, shape.max_position_embeddings - config.max_new_tokens
        if not self.end:
            raise ValueError(f"{config.model}/config.json has no eos_token_id, so no answer could end")
        chat = self.tokenizer.token_to_id("<|im_start|>") is not None
        self.template = (
            "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" if chat else config.template
        )
        if "{question}" not in self.template:
            raise ValueError(f"--template must contain {{question}}, got {self.template!r}")
        self.rows = {False: [], True: []}
        for number, line in enumerate(Path(config.data).read_text().splitlines(), 1):
            if line.strip():
                question, answer = self._parse(line, f"{config.data} line {number}")
                self.rows[zlib.crc32(question.encode()) % 10 == 0].append((answer, self._encode(question, number)))
        if not all(self.rows.values()):
            raise ValueError(f"{config.data} is too small to hold every tenth question out")

    @staticmethod
    def _parse(line, where):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("question", "answer")):
            raise ValueError(f"{where} must be an object with strings question and answer")
        return row["question"], row["answer"]

    def _encode(self, question, number):
        text = self.template.replace("{question}", question)
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) > self.room:
            raise ValueError(
                f"line {number}: a prompt of {len(tokens)} tokens leaves no room for --max-new-tokens within "
                f"the model's positions ({self.room} tokens at most)"
            )
        return tokens

    def prompt(self, rng, index, held_out):
        rows = self.rows[held_out]
        return rows[index % len(rows) if held_out else int(rng.integers(len(rows)))]

    def reply(self, state, answer):
        text = self.tokenizer.decode([t for t in answer if t not in self.end])
        return state, None, float(same_answer(final_answer(text), final_answer(state) or state))

    def demo(self, state, rng):
        return self.tokenizer.encode(state, add_special_tokens=False).ids + [self.end[0]]

    def show(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def final_answer(text):
    """What follows the last `####`, to the end of its line; None without one."""
    found = re.findall(r"####\s*([^\n]*)", text)
    return found[-1].strip() if found else None


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
        raise ValueError(f"--task {config.task!r} is none of {', '.join(TASKS)} and no FILE.py:Class")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{file} has no class {name!r}")
    task = getattr(module, name)(config)
    if not task.end or not all(0 <= t < task.vocab_size for t in task.end):
        raise ValueError(f"{name}.end must be token ids under its vocab_size {task.vocab_size}, got {task.end}")
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
    path: list = field(default_factory=list)  # branch_advantages' path
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None  # None: the policy's own, detached
    ref_logprobs: np.ndarray | None = None


class Row:
    """A trajectory under way: the token queue, the turn, and the rollouts it stands for."""

    def __init__(self, group, state, prompt, first, count, forks_left):
        self.group, self.state, self.first, self.count, self.forks_left = group, state, first, count, forks_left
        self.tokens, self.mask, self.logprobs = list(prompt), [False] * (len(prompt) - 1), [0.0] * (len(prompt) - 1)
        self.queue, self.turn, self.reward, self.new = deque(), [], 0.0, 0
        self.path = [(len(prompt), first, count)]

    def append(self, token, logprob):
        """Take the next queued token, or else the sampled one. True if that one was sampled."""
        sampled = not self.queue
        self.tokens.append(token if sampled else self.queue.popleft())
        self.mask.append(sampled)
        self.logprobs.append(logprob if sampled else 0.0)
        self.new += 1
        if sampled:
            self.turn.append(token)
        return sampled

    def fork(self, forks):
        """The rows that go on from a turn boundary: this one, and copies that share its past."""
        if not self.forks_left:
            return [self]
        share, children = self.count // forks, []
        for child in range(forks):
            row = Row.__new__(Row)
            row.__dict__ = self.__dict__ | {
                "tokens": list(self.tokens), "mask": list(self.mask), "logprobs": list(self.logprobs),
                "queue": deque(self.queue), "turn": [], "forks_left": self.forks_left - 1,
                "first": self.first + child * share, "count": share,
            }  # fmt: skip
            start = len(self.tokens) + len(self.queue)  # the reply belongs to the parent segment
            row.path = self.path + [(start, row.first, share)]
            children.append(row)
        return children

    def finish(self, truncated):
        """One Trajectory for each rollout that this row still stands for."""
        logprobs = np.array(self.logprobs)
        # NUMERICS: a token whose sampler log-prob is not finite has no ratio; it leaves the loss and Z.
        # Pinned by tests/test_rollout.py::test_non_finite_sampler_logprobs_leave_loss_and_denominator.
        mask = np.array(self.mask) & np.isfinite(logprobs)
        made = dict(tokens=self.tokens, mask=mask, sampler_logprobs=np.where(mask, logprobs, 0.0))
        return [
            Trajectory(self.group, reward=self.reward, truncated=truncated, path=self.path, **made)
            for _ in range(self.count)
        ]


def uniforms(key, count):
    """count numbers in [0, 1) that depend on the key (non-negative integers) alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


@torch.no_grad()
def rollout(model, task, starts, /, *, group, max_new_tokens, temperature, key, forks=1, fork_turns=0):
    """Play every start `group` times; lists of trajectories, by group, in rollout order.

    starts: list of (group index, state, prompt tokens). key: (seed, step); draw t of rollout r of
    group g is uniforms((seed, step, g, r))[t]. A distinct prompt is computed once, whatever the
    number of rollouts; a finished row leaves the batch.
    """
    if not starts:
        return []
    _check_prompts(model.config, task, starts, max_new_tokens)
    device = model.head_weight.device
    distinct = {}  # prompt -> its row in the prompt batch
    for _, _, prompt in starts:
        distinct.setdefault(tuple(prompt), len(distinct))
    counts = torch.tensor([len(p) for p in distinct], device=device)
    padded = torch.zeros(len(distinct), int(counts.max()), dtype=torch.long, device=device)
    for b, prompt in enumerate(distinct):
        padded[b, : len(prompt)] = torch.tensor(prompt)
    cache = KVCache(len(distinct), device=device)
    logits = extend(model, cache, padded, counts)

    share = forks**fork_turns
    rows = [
        Row(g, state, prompt, first, share, fork_turns)
        for g, state, prompt in starts for first in range(0, group, share)
    ]  # fmt: skip
    at = [distinct[tuple(row.tokens)] for row in rows]
    cache.select(at)
    logits, draws, done = logits[at], {}, {g: {} for g, _, _ in starts}
    while rows:
        tokens, logprobs = _draw(logits, rows, draws, key, max_new_tokens, temperature)
        going = []  # (batch row, row after this token)
        for b, row in enumerate(rows):
            ended = row.append(tokens[b], logprobs[b]) and tokens[b] in task.end
            after = _turn(row, task, forks) if ended else [row]
            if not after:
                done[row.group][row.first] = row.finish(truncated=False)
            for next_row in after:
                if next_row.new >= max_new_tokens:
                    done[row.group][next_row.first] = next_row.finish(truncated=True)
                else:
                    going.append((b, next_row))
        keep, everyone = [b for b, _ in going], list(range(len(rows)))
        rows = [row for _, row in going]
        if rows:
            if keep != everyone:
                cache.select(keep)
            last = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
            logits = extend(model, cache, last)
    return [[t for first in sorted(done[g]) for t in done[g][first]] for g, _, _ in starts]


def _draw(logits, rows, draws, key, max_new_tokens, temperature):
    """One token and log-prob for each row, as lists; a row with a queue ignores its own."""
    uniform = None
    if temperature > 0:
        for row in rows:
            if (row.group, row.first) not in draws:
                draws[row.group, row.first] = uniforms((*key, row.group, row.first), max_new_tokens)
        uniform = torch.tensor([draws[r.group, r.first][r.new] for r in rows], device=logits.device)
    tokens, logprobs = sample(logits, uniform, temperature=temperature)
    return tokens.tolist(), logprobs.tolist()


def _turn(row, task, forks):
    """Give a finished turn to the task: the rows that go on, none at the end."""
    state, reply, reward = task.reply(row.state, row.turn)
    if not math.isfinite(reward):
        raise ValueError(
            f"task {type(task).__name__} gave reward {reward} in group {row.group}, rollout {row.first}, "
            f"for the answer {task.show(row.turn)!r}: rewards must be finite"
        )
    row.state, row.turn, row.reward = state, [], row.reward + reward
    if reply is None:
        return []
    row.queue.extend(reply)
    return row.fork(forks)


def _check_prompts(model_config, task, starts, max_new_tokens):
    limit = model_config.max_position_embeddings
    for g, _, prompt in starts:
        if not prompt:
            raise ValueError(f"group {g}: the task gave an empty prompt; it needs at least one token")
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"group {g}: a prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed "
                f"the model's {limit} positions; shorten one of them"
            )
        if min(prompt) < 0 or max(prompt) >= model_config.vocab_size:
            raise ValueError(f"group {g}: prompt token outside 0..{model_config.vocab_size - 1}")


def demonstrations(task, starts, key):
    """Valid play by `task.demo`, as trajectories of reward 1: the policy gradient of a reward of 1
    on somebody else's tokens is the gradient of supervised learning."""
    out = []
    for g, state, prompt in starts:
        rng = np.random.default_rng([*key, g])
        row, going = Row(g, state, prompt, 0, 1, 0), [True]
        while going:
            for token in task.demo(row.state, rng):
                row.append(token, 0.0)
            going = _turn(row, task, 1)
            while row.queue:
                row.append(0, 0.0)
        trajectory = row.finish(truncated=False)[0]
        trajectory.advantages = np.where(trajectory.mask, 1.0, 0.0)
        out.append(trajectory)
    return out


# 5. The trainer: the only place that communicates --------------------------------------------


def loss_weight(trajectory, aggregation):
    """w of (6): a number per trajectory, known without any other."""
    return 1.0 / max(1, trajectory.mask.sum()) if aggregation == "sequence_mean" else 1.0


def denominator(batch, config):
    """This rank's share of Z of (6), a float; summed over ranks it is `num_global_valid_tokens`."""
    if config.aggregation == "token_mean":
        return float(sum(t.mask.sum() for t in batch))
    scored = sum(bool(t.mask.any()) for t in batch)
    return float(scored * (config.max_new_tokens if config.aggregation == "constant" else 1))


def pack(batch, micro_tokens):
    """Cut a batch into micro-batches of at most micro_tokens tokens, in order; a longer one alone."""
    micros, room = [], 0
    for trajectory in batch:
        if not micros or len(trajectory.tokens) > room:
            micros.append([])
            room = micro_tokens
        micros[-1].append(trajectory)
        room -= len(trajectory.tokens)
    return micros


def padded(vectors, like):
    """Ragged numpy vectors -> one (B, T) tensor of `like`'s dtype and device, zero where short."""
    out_BT = np.zeros((len(vectors), max(map(len, vectors))))
    for b, vector in enumerate(vectors):
        out_BT[b, : len(vector)] = vector
    return torch.from_numpy(out_BT).to(like)


class Trainer:
    """Policy, optimiser and generator behind the few calls that a training loop needs.

    `forward_backward` may be called any number of times before `optim_step`; gradients add up over
    calls and ranks, and nothing is averaged, because every loss is divided by the global
    `num_global_valid_tokens` that the caller reduced beforehand. Every method is collective: all
    ranks call it, with whatever share of the batch they hold, none included.
    """

    def __init__(self, config: Config, model: Transformer, *, generator=None, reference=None):
        self.config, self.model, self.generator, self.reference = config, model, generator, reference
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.policy_version = self.skipped = self.skipped_in_a_row = 0
        self.sharded = config.data_parallel == "fsdp"
        if self.sharded:
            self._shard()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=(0.9, config.beta2), eps=1e-8,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
        self.device = next(model.parameters()).device

    def _shard(self):
        for module in (*self.model.model.layers, self.model):
            fully_shard(module)
            # NUMERICS: FSDP2 averages gradients by default; the losses here are parts of a sum.
            # Pinned by tests/test_ranks.py::test_ranks_and_sharding_give_the_one_process_run.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(self.model, "hidden")

    def micro_batches(self, batch):
        micros = pack(batch, self.config.micro_tokens)
        if self.sharded:  # COMM: each forward gathers parameters, so ranks must agree on their number.
            # Pinned by tests/test_ranks.py::test_a_rank_without_data_takes_part.
            count = torch.tensor(len(micros), device=self.device)
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
            filler = Trajectory(-1, [0], np.zeros(0, dtype=bool), np.zeros(0), advantages=np.zeros(0))
            micros += [[filler]] * (int(count) - len(micros))
        return micros

    def score(self, model, micro):
        """Log-probs and entropy (B, T) of a micro-batch's sampled tokens, 0 elsewhere, and the mask."""
        lengths = [len(t.tokens) for t in micro]
        tokens_1S = torch.tensor([x for t in micro for x in t.tokens], device=self.device)[None]
        positions_1S = models.packed_positions(lengths).to(self.device)
        mask_BT = padded([t.mask for t in micro], tokens_1S).bool()
        row_N, column_N = mask_BT.nonzero(as_tuple=True)
        ends = torch.tensor(lengths, device=self.device).cumsum(0)
        index_N = (ends - torch.tensor(lengths, device=self.device))[row_N] + column_N
        x_1SM = model.hidden(tokens_1S, positions=positions_1S, attention=models.packed_attention(lengths))
        lp_N, entropy_N = model.logprobs(
            x_1SM[0, index_N], tokens_1S[0, index_N + 1], temperature=self.config.temperature
        )
        at = row_N, column_N
        lp_BT = lp_N.new_zeros(mask_BT.shape).index_put(at, lp_N)
        return lp_BT, entropy_N.new_zeros(mask_BT.shape).index_put(at, entropy_N), mask_BT

    def forward_backward(self, batch, num_global_valid_tokens: float) -> dict:
        """Add the gradient of (6) for this rank's trajectories; metrics of the whole batch, all ranks'.

        num_global_valid_tokens: Z, the sum of `denominator` over ranks and over all the calls that
        precede one `optim_step`.
        """
        if not num_global_valid_tokens > 0:
            raise ValueError(f"num_global_valid_tokens must be positive, got {num_global_valid_tokens}")
        sums = torch.zeros(8, dtype=torch.float64, device=self.device)
        largest_gap = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in self.micro_batches(batch):
            lp_BT, entropy_BT, mask_BT = self.score(self.model, micro)
            sampler_BT = padded([t.sampler_logprobs for t in micro], lp_BT)
            l_BT, stats = self._loss(micro, lp_BT, entropy_BT, mask_BT, sampler_BT)
            w_B1 = padded([[loss_weight(t, self.config.aggregation)] for t in micro], lp_BT)
            loss = (w_B1 * l_BT).sum() / num_global_valid_tokens  # (6)
            loss.backward()
            gap_BT = torch.where(mask_BT, lp_BT.detach() - sampler_BT, 0).abs()
            largest_gap = torch.maximum(largest_gap, gap_BT.max().double() if gap_BT.numel() else largest_gap)
            parts = (
                loss.detach(), mask_BT.sum(), stats["clipped"].sum(), stats["entropy"].sum(),
                stats["kl"].sum() if "kl" in stats else loss.new_zeros(()), gap_BT.sum(),
                (mask_BT & (gap_BT == 0)).sum(), torch.tensor(sum(len(t.tokens) for t in micro)),
            )  # fmt: skip
            sums += torch.stack([x.double().to(self.device) for x in parts])
        dist.all_reduce(sums)
        dist.all_reduce(largest_gap, op=dist.ReduceOp.MAX)
        loss, n, clipped, entropy, kl, gap, identical, trained = sums.tolist()
        n = max(n, 1.0)
        metrics = {
            "loss/token_mean": loss, "entropy/token_mean": entropy / n, "ratio/clipped_fraction": clipped / n,
            "logprob_gap/max": largest_gap.item(), "logprob_gap/mean": gap / n,
            "logprob_gap/identical": identical / n, "tokens/trained": int(trained),
        }  # fmt: skip
        return metrics | ({"kl/token_mean": kl / n} if self.reference is not None else {})

    def _loss(self, micro, lp_BT, entropy_BT, mask_BT, sampler_BT):
        def column(name):
            return padded([getattr(t, name) for t in micro], lp_BT)

        own = micro[0].old_logprobs is None
        old_BT = lp_BT.detach() if own else column("old_logprobs")
        cap = self.config.importance_cap
        return policy_loss(
            lp_BT, old_BT, column("advantages"), mask_BT, self.config, entropy_BT=entropy_BT,
            ref_BT=column("ref_logprobs") if micro[0].ref_logprobs is not None else None,
            importance_BT=(old_BT - sampler_BT).exp().clamp(max=cap) if cap else None,
        )  # fmt: skip

    @torch.no_grad()
    def forward_only(self, batch, model=None) -> list:
        """Log-probs of each trajectory's sampled tokens: numpy vectors of L - 1, 0 where not sampled."""
        model, out = model or self.model, []
        for micro in self.micro_batches(batch):
            lp_BT, _, _ = self.score(model, micro)
            out += [lp[: len(t.mask)].double().cpu().numpy() for lp, t in zip(lp_BT, micro)]
        if self.sharded:
            self.model.reshard()
        return out[: len(batch)]

    def optim_step(self, lr: float | None = None) -> dict:
        """Reduce (ddp), clip by the global norm, step, zero the gradients, version + 1.

        A non-finite norm skips the step on every rank, since every rank has the same norm, and
        `max_skipped` of those in a row raise FloatingPointError.
        """
        suspect = self._reduce_gradients()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        lr = self.config.lr if lr is None else lr
        finite = bool(norm.isfinite())
        if finite:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.policy_version += 1
            self.skipped_in_a_row = 0
        self.optimizer.zero_grad()
        metrics = {"grad_norm": norm.item(), "lr": lr, "policy_version": self.policy_version}
        return metrics if finite else metrics | {"nonfinite": self._skip(suspect)}

    def _reduce_gradients(self):
        """Sum gradients over ranks (FSDP has done it in backward). Returns the index, in the order in
        which backward reaches them, of this rank's first non-finite parameter gradient, or -1."""
        suspect, backwards = -1, list(self.model.parameters())[::-1]
        for n, p in enumerate(backwards):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            local = p.grad.to_local() if self.sharded else p.grad
            if suspect < 0 and not local.isfinite().all():
                suspect = n
        if not self.sharded and self.world > 1:
            for n in range(0, len(backwards), 64):  # one message for 64 tensors
                grads = [p.grad for p in backwards[n : n + 64]]
                flat = torch.cat([g.reshape(-1) for g in grads])
                dist.all_reduce(flat)
                for g, part in zip(grads, flat.split([g.numel() for g in grads])):
                    g.copy_(part.view_as(g))
        return suspect

    def _skip(self, suspect):
        """Count a skipped step; which rank and parameter had it first, the same text on every rank."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        found = torch.full((self.world,), -1, dtype=torch.long, device=self.device)
        found[self.rank] = suspect
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        names = [name for name, _ in self.model.named_parameters()][::-1]
        text = ", ".join(f"{names[n]} on rank {r}" for r, n in enumerate(found.tolist()) if n >= 0)
        text = text or "no single gradient: the norm itself overflowed"
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} optimiser steps in a row had a non-finite gradient, first in {text}; "
                "lower --lr or look at that tensor's inputs"
            )
        return text

    @torch.no_grad()
    def push_weights(self) -> int:
        """Copy the weights into the generator, one tensor at a time, in its dtype; the version."""
        copy_weights(self.model, self.generator)
        return self.policy_version

    def _state(self):
        """Every tensor that a resumed run needs, under flat names; AdamW's states made if absent."""
        tensors = {}
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=self.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            tensors |= {f"optimizer.{name}.{k}": v for k, v in state.items()} | {f"model.{name}": p.detach()}
        return tensors

    def save_checkpoint(self, path, **extra) -> None:
        """Write weights, optimiser and `extra` (JSON values) to the directory `path`, all or nothing."""
        counts = dict(policy_version=self.policy_version, skipped=self.skipped, in_a_row=self.skipped_in_a_row)
        write_checkpoint(path, self._state(), counts | extra)

    def load_checkpoint(self, path) -> dict:
        """Restore what save_checkpoint wrote, under any number of ranks; returns its JSON values."""
        state = read_checkpoint(path, self._state())
        self.policy_version, self.skipped = state["policy_version"], state["skipped"]
        self.skipped_in_a_row = state["in_a_row"]
        return state


@torch.no_grad()
def copy_weights(source, target):
    """target's parameters := source's, gathered if sharded, one tensor at a time."""
    for (name, p), (other, q) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        if name != other:
            raise ValueError(f"models differ: {name} against {other}")
        q.copy_(p.full_tensor() if hasattr(p, "full_tensor") else p)


# 6. Checkpoints on disk ----------------------------------------------------------------------


def write_checkpoint(path, tensors, state):
    """Collective. A temporary directory, renamed once every byte and its checksum are on disk."""
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")
    if dist.get_rank() == 0:
        for stale in (partial, path):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial))
    if dist.get_rank() == 0:
        files = {f.name: [f.stat().st_size, _crc32(f)] for f in sorted(partial.iterdir())}
        with (partial / "state.json").open("w") as file:
            json.dump(state | {"files": files}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    dist.barrier()


def _crc32(path):
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def verify_checkpoint(path) -> dict:
    """The JSON state of a checkpoint whose every file has its size and checksum; else ValueError."""
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text())
        for name, (size, crc) in state["files"].items():
            if (path / name).stat().st_size != size or _crc32(path / name) != crc:
                raise ValueError(f"checkpoint {path}: {name} is damaged (size or checksum differs)")
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"checkpoint {path} is incomplete or unreadable: {error}") from error
    return state


class _MetadataUnpickler(pickle.Unpickler):
    """DCP pickles its table of contents; this reads that table and refuses everything else."""

    ALLOWED = {
        "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int64"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "pathlib": {"PosixPath", "PurePosixPath", "Path", "WindowsPath"},
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        },
    }  # fmt: skip

    def find_class(self, module, name):
        if name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"checkpoint metadata asks for {module}.{name}, which is not on the allow-list")


class SafeReader(dcp.FileSystemReader):
    """A DCP reader that cannot run code: allow-listed metadata, tensors only (`weights_only`)."""

    def read_metadata(self, *args, **kwargs):
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"checkpoint entry {name} is no tensor; refusing to unpickle it")
        return metadata


def read_checkpoint(path, tensors) -> dict:
    """Collective. Fill `tensors` in place from a verified checkpoint; returns its JSON state."""
    state = agree(lambda: verify_checkpoint(path))
    saved = SafeReader(path).read_metadata().state_dict_metadata
    wrong = sorted(
        name for name in saved.keys() | tensors.keys()
        if name not in saved or name not in tensors or saved[name].size != tensors[name].shape
    )  # fmt: skip
    if wrong:
        raise ValueError(f"checkpoint {path} is of another model; first difference: {wrong[0]}")
    dcp.load(tensors, storage_reader=SafeReader(path))
    return state


def newest_checkpoint(out):
    """The newest step-N that verifies, or None; damaged ones are named and passed over."""
    for path in sorted(Path(out).glob("step-*"), reverse=True):
        if re.fullmatch(r"step-\d{8}", path.name):
            try:
                verify_checkpoint(path)
                return str(path)
            except ValueError as error:
                print(f"warning: {error}; trying an older one", file=sys.stderr)
    return None


def agree(function):
    """Rank 0 calls function(); every rank returns its value, or raises the ValueError it raised."""
    box = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except (ValueError, OSError) as error:
            box[1] = str(error)
    # COMM: broadcast from global rank 0, always, whatever happened there: no rank waits for a failure.
    # Pinned by tests/test_run.py::test_an_output_directory_that_holds_a_run_is_refused.
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ValueError(box[1])
    return box[0]


# 7. The loop ---------------------------------------------------------------------------------


class Signal:
    """SIGTERM sets a flag; nothing is saved from inside a handler, where a collective could hang."""

    def __init__(self):
        self.seen = False
        with contextlib.suppress(ValueError):  # only the main thread may install handlers
            signal.signal(signal.SIGTERM, self._set)

    def _set(self, number, frame):
        self.seen = True


class Clock:
    """Seconds by phase of one step."""

    def __init__(self):
        self.start, self.phases = time.perf_counter(), {}

    @contextlib.contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        self.phases[f"seconds/{phase}"] = self.phases.get(f"seconds/{phase}", 0) + time.perf_counter() - start

    def metrics(self):
        return self.phases | {"seconds/total": time.perf_counter() - self.start}


@contextlib.contextmanager
def naming_lost_ranks(where, out):
    """Turn a collective that fails because a rank is gone into an error that says what to do."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or re.search(r"gloo|NCCL|[Cc]onnection|[Tt]imed out", str(error))
        if dist.get_world_size() == 1 or not lost:
            raise
        # No save here: it would need the ranks that are gone. The last checkpoint is whole.
        raise ConnectionError(
            f"{where()}: another rank is gone or silent for too long ({str(error).splitlines()[0][:160]}); "
            f"this rank leaves without saving; go on with --resume --out {out}"
        ) from error


def collect(config, task, generator, step):
    """The rollouts of a step: {group index: trajectories} of this rank, the kept groups of all ranks
    in order, and metrics. Group g is played by rank g % world."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), generator.head_weight.device
    mine, kept, tables, counts = {}, [], [], torch.zeros(3, dtype=torch.float64, device=device)
    for _ in range(config.max_rounds):
        base = sum(map(len, tables))
        indices = range(base, base + config.prompts - len(kept))
        starts = [
            (g, *task.prompt(np.random.default_rng([config.seed, 1, step, g]), step * config.prompts + g, False))
            for g in indices if g % world == rank
        ]  # fmt: skip
        groups = rollout(
            generator, task, starts, group=config.group, max_new_tokens=config.max_new_tokens, key=(config.seed, step),
            temperature=config.temperature, forks=config.forks, fork_turns=config.fork_turns,
        )  # fmt: skip
        table = torch.zeros(len(indices), config.group, dtype=torch.float64, device=device)
        for (g, _, _), group in zip(starts, groups):
            mine[g] = group
            table[g - base] = torch.tensor([t.reward for t in group])
            counts += torch.tensor([sum(sum(t.mask) for t in group), sum(t.truncated for t in group), 0], device=device)
        dist.all_reduce(table)
        tables.append(table.cpu().numpy())
        for g, rewards in zip(indices, tables[-1]):
            if not (config.dynamic_sampling and (rewards == rewards[0]).all()):
                kept.append(g)
        if len(kept) == config.prompts:
            break
    dist.all_reduce(counts)
    rewards = np.concatenate(tables)
    solved = rewards >= 1
    return mine, kept, {
        "reward/mean": rewards.mean(), "reward/solved": solved.mean(),
        "reward/groups_none": (~solved).all(1).mean(), "reward/groups_all": solved.all(1).mean(),
        "tokens/generated": int(counts[0]), "tokens/truncated_fraction": counts[1].item() / rewards.size,
    }  # fmt: skip


def prepare(config, trainer, groups):
    """Give every trajectory of this rank its reference and old log-probs, advantages and final mask."""
    everyone = [t for group in groups for t in group]
    if trainer.reference is not None:
        for t, ref in zip(everyone, trainer.forward_only(everyone, trainer.reference)):
            t.ref_logprobs = ref
    if config.proximal:
        for t, old in zip(everyone, trainer.forward_only(everyone)):
            t.old_logprobs = old
    elif config.minibatches > 1:  # with a single update, the policy is its own old policy
        for t in everyone:
            t.old_logprobs = t.sampler_logprobs
    for group in groups:
        rewards = np.array([t.reward for t in group])
        if config.kl_coef and config.kl_in == "reward":
            for i, t in enumerate(group):
                d = torch.from_numpy(np.where(t.mask, t.sampler_logprobs - t.ref_logprobs, 0.0))
                rewards[i] -= config.kl_coef * divergence(d, config.kl).sum().item()
        if config.advantage == "per_branch":
            marks = branch_advantages(rewards, [t.path for t in group])
        else:
            marks = [[(0, a)] for a in advantages(rewards, config.advantage)]
        for t, path in zip(group, marks):
            t.advantages = np.zeros(len(t.mask))
            for start, advantage in path:
                t.advantages[start:] = advantage
            if t.truncated and config.overlong == "filter":
                t.mask = np.zeros_like(t.mask)


def update(config, trainer, mine, kept, step):
    """The optimiser steps of one rollout batch; metrics as means over them."""
    factor = lr_factor(step, warmup=config.lr_warmup, total=config.steps, decay=config.lr_decay)
    seen, lr = [], config.lr * factor
    for m in range(config.minibatches):
        part = kept[m * len(kept) // config.minibatches : (m + 1) * len(kept) // config.minibatches]
        batch = [t for g in part if g in mine for t in mine[g]]
        Z = torch.tensor(denominator(batch, config), dtype=torch.float64, device=trainer.device)
        dist.all_reduce(Z)
        if Z > 0:  # the same on all ranks; 0 when dynamic sampling or the filter left nothing
            metrics = trainer.forward_backward(batch, Z.item())
            seen.append(metrics | trainer.optim_step(lr))
            if "nonfinite" in seen[-1] and trainer.rank == 0:
                print(f"step {step}: skipped, non-finite gradient in {seen[-1]['nonfinite']}", file=sys.stderr)
    trainer.push_weights()
    means = ("loss/token_mean", "kl/token_mean", "entropy/token_mean", "ratio/clipped_fraction", "grad_norm")
    out = {k: float(np.mean([s[k] for s in seen])) for k in means if seen and k in seen[0]}
    out |= {k: v for k, v in seen[0].items() if k.startswith("logprob_gap")} if seen else {}
    return out | {
        "lr": lr, "policy_version": trainer.policy_version, "updates/skipped": trainer.skipped,
        "tokens/trained": sum(s["tokens/trained"] for s in seen),
    }  # fmt: skip


def evaluate(config, task, generator):
    """Fraction of held-out prompts solved by greedy decoding, and one trajectory to show."""
    rank, world = dist.get_rank(), dist.get_world_size()
    starts = [
        (i, *task.prompt(np.random.default_rng([config.seed, 2, i]), i, True))
        for i in range(config.eval_prompts) if i % world == rank
    ]  # fmt: skip
    groups = rollout(
        generator, task, starts, group=1, max_new_tokens=config.max_new_tokens, temperature=0, key=(config.seed,)
    )
    solved = torch.tensor(
        float(sum(g[0].reward >= 1 for g in groups)), dtype=torch.float64, device=generator.head_weight.device
    )
    dist.all_reduce(solved)
    return solved.item() / config.eval_prompts, groups[0][0] if groups else None


def warm_start(config, task, trainer):
    """`demos` supervised steps on the task's demonstrations, in the same Trainer."""
    for step in range(config.demos):
        starts = [
            (g, *task.prompt(np.random.default_rng([config.seed, 3, step, g]), step * config.prompts + g, False))
            for g in range(trainer.rank, config.prompts * config.group, trainer.world)
        ]
        batch = demonstrations(task, starts, (config.seed, 4, step))
        Z = torch.tensor(denominator(batch, config), dtype=torch.float64, device=trainer.device)
        dist.all_reduce(Z)
        trainer.forward_backward(batch, Z.item())
        trainer.optim_step()


def build(config, task, device):
    """Policy, generator and (where there is a KL) reference, on this rank."""
    if config.model:
        model = models.load_hf(config.model, dtype=getattr(torch, config.dtype), device=device)
        if task.vocab_size > model.config.vocab_size:
            raise ValueError(f"the task has {task.vocab_size} tokens and {config.model} {model.config.vocab_size}")
    else:
        kv_heads = max(1, config.heads // 2)
        shape = ModelConfig(
            vocab_size=task.vocab_size, hidden_size=config.hidden, intermediate_size=3 * config.hidden,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=kv_heads,
            head_dim=config.hidden // config.heads, tie_word_embeddings=False, eos_token_id=tuple(task.end),
        )  # fmt: skip
        model = Transformer(shape).to(device, getattr(torch, config.dtype)).init_weights(config.seed)

    def frozen(dtype):
        return Transformer(model.config).to(device, getattr(torch, dtype)).requires_grad_(False).eval()

    generator = frozen(config.generator_dtype or config.dtype)
    return model, generator, frozen(config.dtype) if config.kl_coef else None


def train(config, device) -> float:
    """The run: set up, loop, save. Returns the last eval/solved."""
    task = make_task(config)
    model, generator, reference = build(config, task, device)
    out = agree(lambda: prepare_out(config))  # claimed only now that everything else was found good
    trainer, log = Trainer(config, model, generator=generator, reference=reference), Log(config, out, task)
    step = 0
    with naming_lost_ranks(lambda: f"step {step}", out):
        found = agree(lambda: newest_checkpoint(out) if config.resume else None)
        if found:
            step = trainer.load_checkpoint(found)["step"]
        else:
            warm_start(config, task, trainer)
        keep_reference(out, trainer, resumed=bool(found))
        trainer.push_weights()
        term, solved = Signal(), None
        log.begin(step, sum(p.numel() for p in generator.parameters()))
        while step < config.steps:
            solved = train_step(config, task, trainer, log, step)
            step += 1
            stop = torch.tensor(float(term.seen), device=device)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)  # one rank's SIGTERM stops all at one step
            last = step == config.steps
            if last or stop or (config.save_every and step % config.save_every == 0):
                save(config, trainer, out, step)
            if stop and not last:
                log.say(f"SIGTERM: saved after {step} steps; go on with --resume --out {out}")
                raise SystemExit(143)
        if solved is None:  # resumed at its last step
            solved = evaluate(config, task, generator)[0]
    log.end(solved)
    return solved


def train_step(config, task, trainer, log, step):
    """One turn of the loop; the held-out fraction solved if this step evaluates, else None."""
    clock, solved = Clock(), None
    with clock("rollout"):
        mine, kept, metrics = collect(config, task, trainer.generator, step)
    with clock("train"):
        prepare(config, trainer, [mine[g] for g in kept if g in mine])
        metrics |= update(config, trainer, mine, kept, step)
    if step + 1 == config.steps or (step + 1) % config.eval_every == 0:
        with clock("eval"):
            solved, shown = evaluate(config, task, trainer.generator)
        metrics["eval/solved"] = solved
        log.sample(step, shown)
    log.step(step, metrics | clock.metrics())
    return solved


def save(config, trainer, out, step):
    trainer.save_checkpoint(Path(out) / f"step-{step:08d}", step=step)
    if dist.get_rank() == 0:
        for old in sorted(Path(out).glob("step-????????"))[: -config.keep]:
            shutil.rmtree(old, ignore_errors=True)


def keep_reference(out, trainer, resumed):
    """The frozen reference is the policy at the first step; it is stored, so that resume has it."""
    if trainer.reference is None:
        return
    path = Path(out) / "reference"
    if not resumed:
        copy_weights(trainer.model, trainer.reference)
        write_checkpoint(path, dict(trainer.reference.named_parameters()), {})
    read_checkpoint(path, {k: p.data for k, p in trainer.reference.named_parameters()})


class Log:
    """What a run prints and writes; silent on every rank but 0."""

    COLUMNS = ("reward/mean", "reward/solved", "eval/solved", "entropy/token_mean", "logprob_gap/max", "grad_norm")

    def __init__(self, config, out, task):
        self.config, self.out, self.task, self.on = config, Path(out), task, dist.get_rank() == 0
        self.started = time.perf_counter()

    def say(self, text):
        if self.on:
            tqdm.write(text)

    def begin(self, start, parameters):
        c = self.config
        self.say(json.dumps({k: v for k, v in dataclasses.asdict(c).items() if v not in ("", 0, False)}))
        self.say(
            f"{c.task}: {parameters:,} parameters, {c.prompts} groups of {c.group} a step, "
            f"{dist.get_world_size()} rank(s), out {self.out}" + (f", resumed at step {start}" if start else "")
        )
        if not self.on:
            return
        cut_lines(self.out / "metrics.jsonl", start)
        cut_lines(self.out / "samples.jsonl", start)
        self.file = (self.out / "metrics.jsonl").open("a")
        self.bar = tqdm(total=c.steps, initial=start, disable=None, unit="step")
        self.events = _tensorboard(self.out) if c.tensorboard else None
        self.say("step   " + "".join(f"{name.split('/')[0] + ' ' + name.split('/')[-1]:>17.16}" for name in self.COLUMNS) + "     tokens/s")

    def step(self, step, metrics):
        if not self.on:
            return
        metrics = {"step": step} | {k: v.item() if hasattr(v, "item") else v for k, v in metrics.items()}
        self.file.write(json.dumps(metrics) + "\n")
        self.file.flush()
        self.bar.set_postfix_str(f"reward {metrics['reward/mean']:.3f}", refresh=False)
        self.bar.update()
        if self.events:
            for name, value in metrics.items():
                self.events.add_scalar(name, value, step)
        if step % self.config.log_every == 0 or "eval/solved" in metrics:
            row = "".join(f"{metrics[n]:17.4g}" if n in metrics else " " * 17 for n in self.COLUMNS)
            rate = (metrics["tokens/generated"] + metrics["tokens/trained"]) / metrics["seconds/total"]
            self.say(f"{step:5d}  {row} {rate:12.0f}")

    def sample(self, step, trajectory):
        if self.on and trajectory:
            text = self.task.show(trajectory.tokens)
            with (self.out / "samples.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "reward": trajectory.reward, "text": text}) + "\n")

    def end(self, solved):
        if self.on:
            self.bar.close()
            self.file.close()
            samples = self.out / "samples.jsonl"
            if samples.exists():
                self.say(f"sample: {json.loads(samples.read_text().splitlines()[-1])['text']}")
        verb = "met" if solved >= self.config.target else "MISSED"
        self.say(
            f"eval/solved {solved:.3f}: target {self.config.target} {verb} after {self.config.steps} steps, "
            f"{time.perf_counter() - self.started:.0f} s"
        )


def _tensorboard(out):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs tensorboard: pip install tensorboard") from error
    return SummaryWriter(out)


def cut_lines(path, step):
    """Drop the lines of `step` and later, and a line torn by a kill; the file is replaced whole."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] >= step:
                break
        except json.JSONDecodeError:
            break
        kept.append(line)
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(kept))
    partial.replace(path)


# 8. check and plot ---------------------------------------------------------------------------


def check() -> bool:
    """The loss against `definition`, and the gradient's invariances, in float64; prints the table."""
    config = Config(dtype="float64", prompts=4, group=4, hidden=32, minibatches=1, entropy_coef=0.01).check()
    task = make_task(config)
    model, generator, _ = build(config, task, "cpu")
    trainer = Trainer(config, model, generator=generator)
    trainer.push_weights()
    mine, kept, _ = collect(config, task, generator, 0)
    prepare(config, trainer, [mine[g] for g in kept])
    batch, rng = [t for g in kept for t in mine[g]], np.random.default_rng(0)
    for t in batch:  # an old policy and advantages of their own, so that ratios and clips matter
        t.old_logprobs = np.where(t.mask, t.sampler_logprobs + 0.3 * rng.standard_normal(len(t.mask)), 0)
        t.advantages = np.full(len(t.mask), rng.standard_normal())

    def gradient(batch, **changes):
        trainer.config = dataclasses.replace(config, **changes)
        model.zero_grad()
        loss = trainer.forward_backward(batch, Z)["loss/token_mean"]
        return torch.cat([torch.tensor([loss], dtype=torch.float64), *(p.grad.flatten() for p in model.parameters())])

    Z = denominator(batch, config)
    lists = [[v[t.mask].tolist() for v in (t.sampler_logprobs, t.old_logprobs)] for t in batch]
    slow = definition(
        [x for x, _ in lists], [x for _, x in lists], [t.advantages[0] for t in batch], [1.0] * len(batch), Z,
        config.clip_low, config.clip_high,
    )  # fmt: skip
    whole = gradient(batch)
    model.zero_grad()
    rows = {"loss against the definition": abs(gradient(batch, entropy_coef=0.0)[0].item() - slow) / abs(slow)}
    others = {
        "one sequence a micro-batch": gradient(batch, micro_tokens=1),
        "40 tokens a micro-batch": gradient(batch, micro_tokens=40),
        "reversed order": gradient(batch[::-1]),
    }
    rows |= {k: ((v - whole).norm() / whole.norm()).item() for k, v in others.items()}
    for name, error in rows.items():
        print(f"{name:40} {error:.1e}  {'ok' if error <= 1e-12 else 'FAILED'}")
    ok = all(error <= 1e-12 for error in rows.values())
    print(json.dumps({"check": "train_grpo", "ok": ok, "max_error": max(rows.values())}))
    return ok


def plot(runs) -> None:
    """reward/mean and eval/solved by step: RUN/curve.png of the first run, or text without matplotlib."""
    curves = {}
    for run in runs:
        path = Path(run) / "metrics.jsonl"
        if not path.exists():
            raise ValueError(f"{run} holds no metrics.jsonl; give the directory of a run")
        curves[run] = [json.loads(line) for line in path.read_text().splitlines()]
    try:
        import matplotlib
    except ImportError:
        for run, lines in curves.items():
            print(f"{run}: reward/mean (pip install matplotlib for a PNG)")
            for line in lines[:: max(1, len(lines) // 20)]:
                print(f"{line['step']:6d} {line['reward/mean']:7.3f} {'#' * int(50 * max(0, line['reward/mean']))}")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), constrained_layout=True)
    for n, (run, lines) in enumerate(curves.items()):
        axes.plot([x["step"] + 1 for x in lines], [x["reward/mean"] for x in lines], color=f"C{n}", label=Path(run).name)
        evals = [x for x in lines if "eval/solved" in x]
        axes.plot([x["step"] + 1 for x in evals], [x["eval/solved"] for x in evals], "o", color=f"C{n}", markersize=4)
    axes.set(xlabel="step", ylabel="line: reward/mean   dots: eval/solved", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    target = Path(runs[0]) / "curve.png"
    figure.savefig(target, dpi=120)
    print(f"wrote {target}")


# 9. main -------------------------------------------------------------------------------------

RUN_FILES = ("config.json", "metrics.jsonl", "samples.jsonl", "curve.png", "reference", "reference.tmp")


def prepare_out(config) -> str:
    """Rank 0: choose and claim the run's directory, or say why not. Nothing is overwritten unasked."""
    if config.out:
        out = Path(config.out)
    else:
        name = config.task if config.task in TASKS else config.task.rpartition(":")[2]
        out = next(p for n in range(10**6) if not (p := Path("runs") / f"{name}-{n}").exists())
    holds_run = (out / "config.json").exists()
    if holds_run and not (config.resume or config.overwrite):
        raise ValueError(f"{out} holds a run already: add --resume to go on with it, --overwrite to delete it")
    if not holds_run and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds files that are no run; choose another --out")
    if config.resume and not holds_run:
        raise ValueError(f"--resume: {out} holds no run")
    if config.overwrite and holds_run:
        for path in (*(out / n for n in RUN_FILES), *out.glob("step-????????*"), *out.glob("events.out.tfevents.*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    stored = dataclasses.asdict(config) | {"resume": False, "overwrite": False, "out": str(out)}
    (out / "config.json").write_text(json.dumps(stored, indent=2) + "\n")
    return str(out)


def connect(config) -> str:
    """Join the process group (of one, without torchrun); returns this rank's device."""
    torch.set_num_threads(config.threads)
    cuda = config.device != "cpu" and torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=config.timeout), **alone
    )
    return device


def run(argv) -> int:
    """Train to the end, whether or not the target was met: 0. (Errors: 2; stopped by SIGTERM: 143.)"""
    config = parse_config(argv).check(int(os.environ.get("WORLD_SIZE", 1)))
    train(config, connect(config))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main(argv) -> int:
    rank = int(os.environ.get("RANK", 0))
    try:
        if argv[:1] == ["plot"] and len(argv) > 1:
            return plot(argv[1:]) or 0
        if argv == ["check"]:
            connect(Config(device="cpu"))
            return 0 if check() else 1
        return run(argv)
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        print(f"rank {rank}: error: {error}", file=sys.stderr, flush=True)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            os._exit(2)  # a clean teardown would wait for ranks that may be gone or stuck
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

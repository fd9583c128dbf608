"""Settings: adds every flag, its help and what cannot be combined to `train_grpo.Config`.

Read it to look up a flag or to add one. If you know what a setting means, skip all of it but the
fields of Config and the table of papers.
"""

import argparse
import dataclasses
import datetime
import difflib
import functools
import inspect
import itertools
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch

import train_grpo
from full.advantages import ADVANTAGES, TOKEN_ADVANTAGES, compared_by
from full.lora import Lora
from full.metrics import glossary
from full.model_config import read_json
from full.objectives import AGGREGATIONS, OBJECTIVES
from full.plans import Plan, letters_table
from full.ranks import MAY_BE_OBJECTS, OBJECT, is_rank_0

# What --help ends with. full/RECIPES.md has the settings of other code bases that mean the same.
PAPERS = """\
Papers and their settings. The rest stays at its default, and each paper has its own learning rates.

  GRPO         2402.03300  --advantage group_std --aggregation sequence_mean --clip-high 0.2
                           --kl-coef 0.04 --entropy-coef 0
  Dr.GRPO      2503.20783  --aggregation constant --clip-high 0.2 --entropy-coef 0
  RLOO         2402.14740  --advantage leave_one_out --kl-coef 0.05 --kl k1 --kl-in reward
                           --minibatches 1 --entropy-coef 0
  REINFORCE++  2501.03262  --advantage none_batch --kl-coef 0.01 --kl k1 --kl-in reward
                           --clip-high 0.2 --entropy-coef 0
  LitePPO      2508.08221  --advantage batch_std --clip-high 0.2 --entropy-coef 0
  PPO          1707.06347  --advantage gae --clip-high 0.2 --entropy-coef 0
  dual clip    1912.09729  --dual-clip 3
  DAPO         2503.14476  --advantage group_std --dynamic-sampling --max-rounds 3
                           --overlong filter --overlong-buffer 4 --entropy-coef 0
  CISPO        2506.13585  --objective cispo --advantage group_std --entropy-coef 0
  GSPO         2507.18071  --objective gspo --advantage group_std --aggregation sequence_mean
                           --clip-low 3e-4 --clip-high 4e-4 --entropy-coef 0
  GMPO         2507.20673  --objective gmpo --advantage group_std --aggregation sequence_mean
                           --clip-low 0.4 --clip-high 0.4 --entropy-coef 0
  SAPO         2511.20347  --objective sapo --advantage group_std --aggregation sequence_mean
                           --entropy-coef 0
  DPPO         2602.04879  --objective dppo --clip-low 0.15 --clip-high 0.15
                           --advantage group_std --entropy-coef 0
  decoupled PPO  2110.00641  --proximal --importance-cap 2: truncated importance sampling
  IcePop         2510.18855  --proximal --importance mask --importance-low 0.5 --importance-cap 5
  sequence mask  TRL         --proximal --importance mask --importance-of sequence
                             --importance-cap 3
  tree rollouts  2506.11902  --forks 2 --fork-turns 2 --advantage per_branch
  distillation, on-policy    --teacher DIR --objective reinforce --minibatches 1
"""

TASKS = "guess", "jsonl"  # values of --task that name no file: `make_task` of questions.py
MAX_STALENESS = 64  # steps, far more than training tolerates

# Choices that several fields share, or that are too long for the line of a field.
Dtype = Literal["float32", "float64", "bfloat16"]

Schedule = Literal["1f1b", "interleaved1f1b", "zbv"]


# The matrices of attention and of MLPs, experts' included.
LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@dataclass
class Config(train_grpo.Config):
    """The command line: a field is a flag, and the comment after it is the flag's help.

    The comment above a group of fields is the group's title in --help. A Literal lists the values
    that a flag may have. "" is the default that the help explains as "empty".
    """

    # the run
    out: str = ""  # directory of the run; empty: the first free runs/TASK-N
    resume: bool = False  # go on from the newest checkpoint in --out; begin a run if there is none
    # the task and data
    task: str = "guess"  # guess | jsonl | FILE.py:Class
    data: str = ""  # jsonl: file of lines, {"question", "answer"} or {"messages", "answer"}
    template: str = ""  # jsonl: chat (its own) | raw | text with {question}; empty: chat, else raw
    instruction: str = "End with '#### ' and the answer."  # jsonl: a line after each question
    system: str = ""  # jsonl: the system's message, in a chat template
    template_args: str = ""  # jsonl: JSON object of a chat template's arguments; empty: none
    date: str = ""  # jsonl: of strftime_now in a chat template; empty: when the run begins
    reward: str = ""  # jsonl: FILE.py:function of (text, row); empty: what follows ####
    demos: int = 0  # supervised steps on the task's demonstrations before the loop (demos.jsonl)
    # the model
    model: str = ""  # Hugging Face checkpoint directory; empty: random weights of the shape below
    dtype: Dtype = "float32"  # of the trainer's weights
    compute_dtype: Literal["", Dtype] = ""  # of matrix products, coarser than --dtype; empty: same
    generator_dtype: Literal["", Dtype] = ""  # of the generator's weights; empty: --compute-dtype
    head_dtype: Literal["", "float32"] = ""  # of the head's product; empty: as others
    lora_rank: int = 0  # LoRA: r of the trained factors beside frozen matrices; 0: all is trained
    lora_alpha: float = 32.0  # LoRA: the factors' product is multiplied by this / rank
    lora_targets: str = LORA_TARGETS  # LoRA: names of matrices; also gate, the router, and lm_head
    lora_from: str = ""  # LoRA: directory of PEFT's with the first factors; empty: random ones
    # rollouts
    reply_timeout: int = 0  # seconds that a task or a reward may take for an answer; 0: no limit
    engine: str = ""  # URL[,URL..] of vLLM or SGLang; empty: this process
    engine_timeout: int = 600  # seconds that an engine may be silent, or loading, before a run ends
    staleness: int = 0  # K: batch b is sampled with the weights of step b - K; 0: on-policy
    exact: bool = False  # the sampler's log-probs are the trainer's, bit for bit; slower
    replay_routes: bool = False  # experts: the trainer uses those that the sampler chose (R3)
    forks: int = 1  # children of a trajectory at a turn boundary (tree rollouts)
    fork_turns: int = 0  # turn boundaries that fork; group must divide by forks ** fork_turns
    dynamic_sampling: bool = False  # drop groups whose rewards are all equal (DAPO)
    max_rounds: int = 1  # rounds of rollouts to replace dropped groups; 1: only drop
    overlong: Literal["keep", "filter"] = "keep"  # truncated trajectories; filter: not in the loss
    overlong_buffer: int = 0  # last tokens of max_new_tokens, over which the reward falls by 1
    # the loss
    advantage: str = None  # (1) of full/advantages.py; gae is PPO's, with a critic
    teacher: str = ""  # checkpoint directory: each token's advantage is its log-prob's gain there
    aggregation: str = "token_mean"  # w and Z of (7) of full/objectives.py
    objective: str = "clip"  # (3) of full/objectives.py
    dual_clip: float = 0.0  # clip, gspo: bound of the ratio where A is negative; 0: none
    cispo_bound: float = 5.0  # cispo: the largest weight
    kl: Literal["k1", "k3"] = "k3"  # estimator of the KL, (5) of full/objectives.py
    kl_coef: float = 0.0  # weight of the KL to the frozen reference; 0: no reference is kept
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL enters
    entropy_coef: float = None  # weight of the entropy bonus
    proximal: bool = None  # old log-probs of the trainer; otherwise the sampler's
    importance: Literal["truncate", "mask"] = "truncate"  # (4) of full/objectives.py
    importance_of: Literal["token", "sequence", "geometric"] = "token"  # whose p_old / p_sampler
    importance_low: float = 0.0  # lower bound of p_old / p_sampler
    importance_cap: float = 0.0  # upper bound of p_old / p_sampler; 0: no weights
    gae_lambda: float = 0.95  # gae: 0: one step and the critic; 1: rewards to the end
    value_coef: float = 0.5  # gae: weight of the critic's loss
    balance_coef: float = 0.0  # experts: weight of the loss that balances them; not with --tree
    router_bias_rate: float = 0.0  # experts: step of the routers' bias after an update; 0: no bias
    # the optimizer
    lr: float = None  # AdamW
    lr_first_step: Literal["nonzero", "zero"] = "nonzero"  # a warm-up of 5 begins with 1/5, or 0
    lr_decay: Literal["constant", "linear", "cosine"] = "linear"  # from there to the last step
    weight_decay: float = 0.0  # AdamW, decoupled
    # parallelism
    plan: str = ""  # d2t2, p2c2; empty: all ranks are data parallel
    data_parallel: Literal["ddp", "fsdp", "zero1"] = "ddp"  # zero1: ddp with its moments sharded
    shard_ranks: int = 0  # fsdp: how many ranks share one copy of the weights (HSDP); 0: all of d
    cp_method: Literal["ring", "allgather", "ulysses"] = "ring"  # of the c ranks of --plan
    pp_schedule: Schedule = "1f1b"  # of the p ranks of --plan
    debug: bool = False  # the plan's c: raise where ranks' inputs differ or are not finite; slow
    timeout: int = 60  # seconds that a rank waits for another before the run ends
    # memory and speed
    tree: Literal["disabled", "sparse", "dta"] = "disabled"  # share prefixes; dta: chunk by chunk
    chunk_tokens: int = 0  # tokens of a chunk, with --tree dta
    recompute: bool = False  # with --tree dta: run the chunks of a path again, not keep them
    micro_tokens: int = 16384  # tokens of a micro-batch, or of its tree; a longer one runs alone
    rows: ClassVar[int] = 0  # not a flag here: micro_tokens limits what train_grpo's rows limits
    save: ClassVar[None] = None  # not a flag here: `export` writes the weights
    batch_rows: int = 1024  # rollouts that a rank decodes at a time; a new one enters as one ends
    ac: Literal["none", "full", "op"] = "none"  # recompute activations; op: not products, messages
    offload: bool = False  # fsdp: shards, gradients and optimizer stay on the CPU
    compile: bool = False  # torch.compile each layer (needs a C++ compiler on a CPU)
    device: Literal["", "cpu", "cuda"] = ""  # empty: cuda where there is one
    threads: int = 1  # CPU threads of each rank
    # evaluation
    eval_data: str = ""  # jsonl: file of held-out lines; empty: every tenth line of --data
    # output
    save_every: int = 50  # steps between checkpoints, and the last; 0: only the last
    keep: int = 2  # newest checkpoints kept
    log_rollouts: Literal["all", "some", "none"] = "some"  # to rollouts.jsonl; `audit` needs some
    tensorboard: bool = False  # also write TensorBoard events (needs tensorboard)

    # Defaults that depend on what the loop begins with: random weights, weights that demonstrations
    # have taught, or a checkpoint's. Random weights need long steps, and a bonus for still trying
    # everything. The same would undo in a few steps what the other two know (full/RESULTS.md).
    # A field of this table is None until __post_init__ has looked it up.
    BY_START = dict(
        lr=dict(random=1e-3, demos=1e-4, model=1e-6, lora=1e-5),
        entropy_coef=dict(random=0.02, demos=0.0, model=0.0, lora=0.0),
    )

    # What a resumed run may change: none of it enters the steps that follow, beyond rounding.
    FREE = (
        "out", "resume", "steps", "eval_every", "save_every", "keep", "log_rollouts", "tensorboard",
        "timeout", "threads", "engine_timeout", "reply_timeout", "micro_tokens",
        "batch_rows", "device", "plan", "data_parallel",
        "cp_method", "debug", "pp_schedule", "tree", "chunk_tokens", "recompute", "ac",
        "shard_ranks", "offload", "compile",
    )  # fmt: skip

    # Numbers meet float32 tensors and int64 tensors, which cannot hold anything larger.
    LARGEST = {int: 2**63 - 1, float: torch.finfo(torch.float32).max / 2}
    YEAR = 365 * 24 * 3600  # in seconds: --timeout goes to a clock in C++ that overflows later
    ZERO = "lr_warmup", "gae_lambda", "save_every"  # may be 0

    def __new__(cls, *args, **given):
        """Remember the names that were given, for `given`."""
        self = super().__new__(cls)
        self._named = frozenset(given)
        return self

    def __post_init__(self):
        # A checkpoint that demonstrations have taught more is still a checkpoint. From here on the
        # fields are numbers, also in config.json: a resumed run has those that it began with.
        start = "demos" if self.demos and not self.model else self.first_weights
        for name, defaults in self.BY_START.items():
            if getattr(self, name) is None:
                setattr(self, name, defaults[start])
        if self.advantage is None:
            self.advantage = "teacher" if self.teacher else "group_mean"
        # Where rounding alone would move a ratio past the clip. With one update a batch the policy
        # is its own old policy. With older weights the sampler's log-probs correct for their age.
        if self.proximal is None:
            self.proximal = self.rounds_apart and self.minibatches > 1 and not self.staleness

    @classmethod
    def from_file(cls, path, **given) -> "Config":
        """Return the Config of a file of settings, as --config reads it, under the given fields."""
        return cls(**read_settings(path, given) | given)

    # What several fields decide together, said once. None of these is a flag.

    @property
    def first_weights(self) -> str:
        """Return which kind of weights the optimizer's first step changes: a key of DEMO_LR."""
        if not self.model:
            return "random"
        return "lora" if self.lora_rank else "model"

    @property
    def lora(self) -> Lora | None:
        """Return what factors the policy has."""
        targets = tuple(self.lora_targets.split(","))
        return Lora(self.lora_rank, self.lora_alpha, targets) if self.lora_rank else None

    @property
    def reads_text(self) -> bool:
        """Return whether the task may read TEXT_FLAGS: `jsonl` does, and one from a file may."""
        return self.task == "jsonl" or self.task not in TASKS

    @property
    def has_whole_template(self) -> bool:
        """Return whether --template is the text of a whole prompt."""
        return self.template not in ("", "chat", "raw")

    @property
    def compute(self) -> str:
        """Return the name of the dtype in which the trainer computes."""
        return self.compute_dtype or self.dtype

    @property
    def is_mixed(self) -> bool:
        """Return whether the optimizer updates master weights finer than the model's weights."""
        return self.compute != self.dtype

    @property
    def rollout_dtype(self) -> str:
        """Return the name of the dtype of the generator's weights, to which a push rounds."""
        return self.generator_dtype or self.compute

    @property
    def rounds_apart(self) -> bool:
        """Return whether sampler and trainer differ by more than the rounding of float32."""
        is_coarse = "bfloat16" in (self.compute, self.rollout_dtype)
        return not self.exact and (is_coarse or bool(self.engine))

    @property
    def first_is_its_own_old(self) -> bool:
        """Return whether the first minibatch's `old` of (2) is its own log-probs, detached."""
        if self.proximal:
            return self.rounds_apart
        return self.minibatches == 1 and not self.staleness

    def given(self) -> dict:
        """Return {field: value} of what was given to Config(..), or assigned since."""
        # A command line knows which flags were typed. To --resume, all others are the run's own.
        first = Config(**{name: getattr(self, name) for name in self._named})
        return {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self)
            if f.name in self._named or getattr(self, f.name) != getattr(first, f.name)
        }  # fmt: skip

    def check(self) -> "Config":
        """Raise ValueError for settings that cannot run, before anything is built or written."""
        # Values first: the combinations compute with them.
        wrong = self._wrong_values()
        if not wrong:
            read_arguments(self.template_args)
            read_date(self.date)
            wrong = [*self._ignored_flags(), *self._wrong_plans()]
            wrong += [text for is_wrong, text in self._wrong_combinations() if is_wrong]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _defaults(self, name):
        """Return the defaults of a field: one, or one for each start."""
        return self.BY_START.get(name, {"always": getattr(Config, name)}).values()

    def _wrong_values(self) -> list[str]:
        """Return an error for each field whose value is wrong whatever the other fields are."""
        # One error a field: the type first, since the comparisons need numbers. An int given for a
        # float is stored as a float.
        wrong = []
        at_most = dict(gae_lambda=1, timeout=self.YEAR, staleness=MAX_STALENESS)
        at_most |= dict(engine_timeout=self.YEAR, reply_timeout=self.YEAR)
        for f in dataclasses.fields(self):
            flag = _flag(f.name)
            value = getattr(self, f.name)
            choices = choices_of(f)
            if f.type is float and type(value) is int:
                setattr(self, f.name, float(value))
            elif choices and value not in choices:
                wrong.append(f"{flag} must be one of {_shown(choices)}, got {value!r}")
            elif not choices and type(value) is not f.type:
                wrong.append(f"{flag} must be {f.type.__name__}, got {value!r}")
            elif f.type in (int, float) and not 0 <= value <= self.LARGEST[f.type]:
                wrong.append(f"{flag} must be finite and at least 0, got {value}")
            elif value == 0 and all(self._defaults(f.name)) and f.name not in self.ZERO:
                wrong.append(f"{flag} must be positive, got 0")
            elif value > at_most.get(f.name, value):
                wrong.append(f"{flag} must be at most {at_most[f.name]}, got {value}")
        return wrong

    def _ignored_flags(self) -> list[str]:
        """Return an error for each flag that was given and that the run does not use."""
        plan = Plan.parse(self.plan or "d1")
        dta = self.tree == "dta"
        fsdp = self.data_parallel == "fsdp"
        old_is_own = self.proximal or (self.minibatches == 1 and not self.staleness)

        # What is needed -> (is it there?, the flags that would be ignored without it).
        needs = {
            "--dynamic-sampling": (self.dynamic_sampling, "max_rounds"),
            "--engine URL": (self.engine, "engine_timeout"),
            "--fork-turns": (self.fork_turns, "forks"),
            "--forks 2 or more": (self.forks > 1, "fork_turns"),
            "--importance-cap":
                (self.importance_cap, "importance", "importance_of", "importance_low"),
            "--advantage teacher": (self.advantage == "teacher", "teacher"),
            "--advantage gae": (self.advantage == "gae", "gae_lambda", "value_coef"),
            "--kl-coef": (self.kl_coef, "kl", "kl_in"),
            "--lora-rank": (self.lora_rank, "lora_alpha", "lora_targets", "lora_from"),
            "products in bfloat16":
                ("bfloat16" in (self.compute, self.rollout_dtype), "head_dtype"),
            "an --advantage of rewards": (self.advantage != "teacher", "overlong_buffer"),
            "--proximal, or --minibatches 1 and no --staleness: else old is the sampler itself":
                (old_is_own, "importance_cap"),
            "--lr-warmup and --steps 2 or more":
                (self.lr_warmup and self.steps > 1, "lr_first_step"),
            "a --plan with c": (plan.cp > 1, "cp_method", "debug"),
            "a --plan with p": (plan.pp > 1, "pp_schedule"),
            "--tree dta": (dta, "chunk_tokens", "recompute"),
            "--data-parallel fsdp": (fsdp, "shard_ranks", "offload"),
            "--task jsonl": (self.reads_text, *TEXT_FLAGS),
            "--task jsonl or FILE.py:Class": (self.task != "guess", "reply_timeout"),
            "--template chat": (self.template in ("", "chat"), "system", "template_args"),
            "a --template without {question}":
                (not (self.has_whole_template and self.instruction), "instruction"),
            "--out DIR": (self.out, "resume"),
        }  # fmt: skip

        # What an objective reads, its function says.
        for name in ("clip_low", "clip_high", "dual_clip", "cispo_bound"):
            if getattr(self, name) != getattr(Config, name):
                readers = [x for x in OBJECTIVES if name in flags_of(x)]
                what = f"--objective {' or '.join(readers)}"
                _, *names = needs.get(what, (None,))
                needs[what] = self.objective in readers, *names, name
        return [
            f"{_flag(name)} needs {what}" for what, (is_there, *names) in needs.items()
            for name in names
            if not is_there and getattr(self, name) not in self._defaults(name)
        ]  # fmt: skip

    def _wrong_plans(self) -> list[str]:
        """Return an error for each way to share the work that does not go with the others."""
        # --tree dta runs chunks forward and backward in an order of its own. A pipeline's schedule
        # has another order, FSDP2 gathers once a step and not once a chunk, a chunk's keys come
        # from the stack of one rank, ranks of e have other trees and so other numbers of calls,
        # --recompute takes the place of --ac, and each chunk would be
        # compiled for a shape of its own.
        plan = Plan.parse(self.plan or "d1")
        unfit = {
            "p": plan.pp > 1, "c": plan.cp > 1, "e": plan.ep > 1,
            "fsdp": self.data_parallel == "fsdp",
            "--ac": self.ac != "none", "--compile": self.compile,
        }  # fmt: skip
        wrong = []
        if self.tree == "dta":
            wrong += [f"--tree dta has no {x}; use --tree sparse" for x in unfit if unfit[x]]
            if not self.chunk_tokens:
                wrong.append("--tree dta needs --chunk-tokens, the size of a chunk")

        # What sums in an order of its own is not exact: other ranks, packed trees, compiled layers,
        # another program.
        degrees = dict(t=plan.tp, c=plan.cp, p=plan.pp, e=plan.ep)
        sums = {f"{letter} in --plan": degree > 1 for letter, degree in degrees.items()} | {
            "--tree": self.tree != "disabled",
            "--data-parallel fsdp": self.data_parallel == "fsdp",
            "--engine": self.engine, "--compile": self.compile,
            "--threads 2 or more": self.threads > 1,
            "--generator-dtype of its own": self.rollout_dtype != self.compute,
            "--head-dtype, for it has no gap": self.head_dtype,
            "--lora-rank, for its sampler has merged weights": self.lora_rank,
        }  # fmt: skip
        if self.exact:
            wrong += [f"--exact has no {x}" for x in sums if sums[x]]

        # The ranks of c share a sequence, and an engine does not tell which experts it used.
        if self.replay_routes:
            lacks = {"c in --plan": plan.cp > 1, "--engine": self.engine}
            wrong += [f"--replay-routes has no {x}" for x in lacks if lacks[x]]

        if self.engine and self.router_bias_rate:
            wrong.append("--engine has no --router-bias-rate: its format has no such bias")
        return wrong

    def _wrong_combinations(self) -> list[tuple]:
        """Return (is it wrong?, the error) for what would train something else, or fail late."""
        leaves = self.forks ** min(self.fork_turns, 64)  # beyond any group, and quickly computed
        compares_group = compared_by(self.advantage) == "group"
        return [
            (self.advantage == "teacher" and not self.teacher,
             "--advantage teacher needs --teacher DIR"),
            (self.group == 1 and compares_group,
             "--group 1 has no baseline, so advantages are 0: use 2 or more, or --advantage gae"),
            (self.dynamic_sampling and not compares_group, "--dynamic-sampling drops groups of "
             f"equal rewards, from which --advantage {self.advantage} learns"),
            (self.importance_low > self.importance_cap > 0,
             f"--importance-low {self.importance_low} is over --importance-cap"),
            (self.overlong_buffer >= self.max_new_tokens,
             f"--overlong-buffer {self.overlong_buffer} must be less than --max-new-tokens"),
            (self.lora_rank and self.kl_coef and self.demos,
             "--lora-rank has its base as the reference of --kl-coef, and --demos would want the "
             "model that they have taught: leave one of the two out"),
            (self.teacher and self.kl_in == "reward", "--teacher has no reward: --kl-in loss"),
            (self.dynamic_sampling and (self.entropy_coef or self.kl_coef),
             "--dynamic-sampling drops groups of advantage 0, but they have entropy and KL terms: "
             "set --entropy-coef 0 and --kl-coef 0"),
            (self.group % leaves, f"--group {self.group} must divide by forks^fork_turns {leaves}"),
            (self.clip_low >= 1, f"--clip-low must be less than 1, got {self.clip_low}"),
            (self.beta2 >= 1, f"--beta2 must be less than 1, got {self.beta2}"),
            (0 < self.dual_clip <= 1 + self.clip_high,
             f"--dual-clip must be over 1 + clip_high (papers: 3), got {self.dual_clip}"),
            (self.minibatches > self.prompts,
             f"--minibatches {self.minibatches} is over --prompts {self.prompts}, so one would be "
             f"empty: lower --minibatches or raise --prompts"),
            (self.balance_coef and self.tree != "disabled",
             "--tree has no --balance-coef, a loss of each sequence by itself; use "
             "--router-bias-rate, or leave --tree out"),
            (has_smaller_eps(self.compute, self.dtype),
             f"--compute-dtype {self.compute} is finer than --dtype {self.dtype} of the weights"),
            (not self.model and self.hidden % (2 * self.heads),
             f"--hidden {self.hidden} must divide by --heads {self.heads} into an even head_dim"),
            (not self.model and self.heads % 2 and self.heads > 1,
             f"--heads must be 1 or even, got {self.heads}"),
            (self.task == "jsonl" and not (self.data and self.model),
             "--task jsonl needs " + " and ".join(
                 ["--data FILE.jsonl"] * (not self.data)
                 + ["--model DIR with a tokenizer.json"] * (not self.model))),
            (self.has_whole_template and "{question}" not in self.template,
             f"--template must be chat, raw or a text with {{question}}, got {self.template!r}"),
        ]  # fmt: skip


# The learning rate of supervised steps, which is constant after --lr-warmup, by `first_weights`.
DEMO_LR = dict(random=1e-3, model=1e-5, lora=1e-4)

# The keyword arguments of `grpo_loss` that are flags.
LOSS_SETTINGS = (
    "aggregation", "objective", "clip_low", "clip_high", "dual_clip", "cispo_bound", "importance",
    "importance_of", "importance_low", "importance_cap", "kl", "kl_coef", "kl_in", "entropy_coef",
    "value_coef",
)  # fmt: skip

# The flags that only `Jsonl` reads.
TEXT_FLAGS = (
    "data", "eval_data", "template", "instruction", "system", "template_args", "date", "reward",
)  # fmt: skip

# Titles of train_grpo.Config, and the titles that --help gives to the same fields.
CORE_TITLES = {"the task": "the task and data", "output": "evaluation"}


# The flags whose values are the names of a table.
TABLES = {
    "objective": (OBJECTIVES,), "aggregation": (AGGREGATIONS,),
    "advantage": (ADVANTAGES, TOKEN_ADVANTAGES),
}  # fmt: skip


def read_arguments(text) -> dict:
    """Return the arguments of --template-args; ValueError unless they are a JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"expected --template-args to be a JSON object, such as "
                         f"{{\"enable_thinking\": false}}, got {text!r}")  # fmt: skip
    return found


def read_date(text) -> datetime.datetime:
    """Return the date and time of --date, or of this moment if it is empty. ValueError for others.

    A date without a time is midnight's.
    """
    try:
        return datetime.datetime.fromisoformat(text) if text else datetime.datetime.now()
    except ValueError as error:
        raise ValueError(f"expected --date YYYY-MM-DD or YYYY-MM-DDTHH:MM:SS, got "
                         f"{text!r}") from error


def choices_of(f) -> tuple:
    """Return the values that a field of Config may have, or () if any will do."""
    tables = TABLES.get(f.name)
    return tuple(itertools.chain(*tables)) if tables else get_args(f.type)


def flags_of(objective) -> set:
    """Return the settings that an objective reads, found by calling it with one token."""
    read = set()

    class Watched:
        def __getattr__(self, name):
            read.add(name)
            return getattr(Config, name)

    one_N = torch.ones(1)
    OBJECTIVES[objective](Watched(), one_N, one_N, one_N, lambda x_N: x_N)
    return read


def has_smaller_eps(a, b) -> bool:
    """Return whether dtype a, by its name, has a smaller unit in the last place than b."""
    return torch.finfo(getattr(torch, a)).eps < torch.finfo(getattr(torch, b)).eps


def _flag(name):
    """Return a field's name as it is typed."""
    return "--" + name.replace("_", "-")


def _shown(choices, separator=", "):
    """Return a field's choices as text, without the empty default."""
    return separator.join(filter(None, choices))


@functools.cache
def _help_texts():
    """Return {field: (title of its group, help)}, from the comments of Config and of its bases.

    The result is cached, because inspect parses this whole file to find a class.
    """
    # A comment on a line of its own is the title of the fields below it.
    found = {}
    for cls in filter(dataclasses.is_dataclass, reversed(Config.__mro__)):
        title = None
        for line in inspect.getsource(cls).splitlines():
            heading = re.fullmatch(r"    # (.*)", line)
            flag = re.match(r"    (\w+): .*?  # (.*)", line)
            if heading:
                title = heading[1] if cls is Config else CORE_TITLES.get(heading[1], heading[1])
            if flag:
                found[flag[1]] = title, flag[2]
    return found


def add_flags(parser, fields):
    """Add fields of Config to a parser. A flag that is not typed is absent from the result."""
    for f in fields:
        _, text = _help_texts()[f.name]
        how = dict(type=f.type, metavar=getattr(f.type, "__name__", ""))
        if choices := choices_of(f):
            how = dict(choices=choices, metavar=_shown(choices, "|"))

        # What a default depends on is said. A bool is --FLAG or --no-FLAG, and off by default.
        default = f"{f.default!r}"
        if f.name in Config.BY_START:
            default = ("{random!r}; with --demos {demos!r}; with --model {model!r}, and with "
                       "--lora-rank too {lora!r}").format(
                **Config.BY_START[f.name])
        if f.name == "advantage":
            default = "'group_mean'; with --teacher 'teacher'"
        if f.name == "proximal":
            default = "on with bfloat16 or --engine, but not with --staleness"
        text = text.replace("%", "%%") + f" [{default}]"
        if f.type is bool:
            how = dict(action=argparse.BooleanOptionalAction)
            text = text.removesuffix(" [False]")
        parser.add_argument(_flag(f.name), default=argparse.SUPPRESS, help=text, **how)


COMMANDS = "audit", "bench", "chat", "check", "eval", "export", "inspect", "plan", "plot"

# Flags of TRL and other trainers whose names are not near ours. Each has one counterpart.
OTHER_NAMES = {
    "learning-rate": "--lr", "max-steps": "--steps", "num-generations": "--group",
    "group-size": "--group", "beta": "--kl-coef", "output-dir": "--out",
    "max-completion-length": "--max-new-tokens", "model-name-or-path": "--model",
    "dataset": "--data", "resume-from-checkpoint": "--resume with --out",
    "warmup-steps": "--lr-warmup",
    "batch-size": "--prompts, the questions of a step, and --group, the answers to each",
    "wandb": "the argument `log` of full.api.run",
}  # fmt: skip


def about_unknown(word) -> str:
    """Return the error about a word that is no flag and no command, with the nearest that is."""
    flags = ["--config", *(_flag(f.name) for f in dataclasses.fields(Config))]
    what, names = ("flag", flags) if word.startswith("-") else ("command", COMMANDS)
    bare_word = word.strip("-").partition("=")[0].replace("_", "-")
    if what == "flag" and bare_word in OTHER_NAMES:
        here = OTHER_NAMES[bare_word]
        return f"expected a {what} that --help lists, got {word}; its name here is {here}"

    # Without the dashes, which all flags share: `--log` is not near `--lr`.
    bare = {name.strip("-"): name for name in names}
    advice = advice_on(word.strip("-").partition("=")[0], bare)
    if what == "command" and not advice:
        advice = "; without a command, `python -m full` trains"
    return f"expected a {what} that --help lists, got {word}{advice}"


def advice_on(word, names) -> str:
    """Return `; did you mean X?` with the name that is nearest to a word, or "" if none is near.

    names: {name as it is compared: name as it is shown}.
    """
    near = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def refuse(reason):
    """Raise the error of a command line, where argparse would print its usage and exit."""
    raise ValueError(reason)


def parse_config(argv) -> Config:
    """Return the Config of a command line; with --resume, what the run stored is the default."""
    parser = argparse.ArgumentParser(
        prog="python -m full", description="GRPO and its relatives, by any plan.",
        allow_abbrev=False,
        epilog=f"{PAPERS}\n{glossary()}\nThe letters of --plan\n\n{letters_table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--FLAG VALUE ...] | plot RUN .. | audit RUN | eval RUN_OR_DIR"
        " | chat RUN_OR_DIR | export RUN DIR | inspect DIR | plan PLAN | check | bench | --help",
    )  # fmt: skip

    # Fields of one title stand together in --help, also where a base class has some of them.
    groups = {}
    for f in dataclasses.fields(Config):
        title, _ = _help_texts()[f.name]
        groups.setdefault(title, []).append(f)
    for title, fields in groups.items():
        group = parser.add_argument_group(title)
        if title == "the run":
            group.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
        add_flags(group, fields)

    # Flags that were not typed are absent from `given`: a resumed run has its own values for them.
    parser.error = refuse
    if not is_rank_0():
        parser.print_help = lambda: None  # rank 0 prints it for all
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse(about_unknown(unknown[0]))
    given = vars(known)
    file = given.pop("config")
    if file is not None:
        given = read_settings(file, given) | given
    path = Path(given.get("out", "")) / "config.json"
    if not (given.get("resume") and given.get("out") and path.exists()):
        return Config(**given)
    return resumed_config(path, given)


CONFIG_HELP = "settings: a run's config.json, or JSON or .toml of its fields; flags win"


def read_settings(path, given=()) -> dict:
    """Return {field: value} of a file of settings: TOML if its name ends in .toml, else JSON.

    given: names of the fields that the caller sets. The file's values of these do not count.

    ValueError for a file that is not there, a key that is not a field, or a value of another type.
    """
    path = Path(path)
    if not path.is_file():
        # The nearest is the file of a run whose directory was given, or a neighbor's name.
        inside = {path.name: f"{path / 'config.json'}"} if (path / "config.json").is_file() else {}
        near = inside or {x.name: f"{x}" for x in path.parent.glob("*") if x.is_file()}
        raise ValueError(f"--config {path}: no such file{advice_on(path.name, near)}")
    found = read_toml(path) if path.suffix == ".toml" else read_json(path)

    # Every key that is wrong is named. What a number may be, `Config.check` says later.
    fields = {f.name: f for f in dataclasses.fields(Config)}
    shown = {name: name for name in fields}
    wrong = []
    for name, value in found.items():
        if name not in fields:
            here = OTHER_NAMES.get(name.replace("_", "-"))
            advice = f"; as a flag, it is {here}" if here else advice_on(name, shown)
            wrong.append(f"expected a field of Config, got {name}{advice}")
            continue
        kind, choices = fields[name].type, choices_of(fields[name])
        is_number = kind is float and type(value) is int and value <= Config.LARGEST[float]
        if choices and value not in choices:
            wrong.append(f"{name}: expected one of {_shown(choices)}, got {value!r}")
        elif not choices and type(value) is not kind and not is_number:
            wrong.append(f"{name}: expected {kind.__name__}, got {value!r}")
    if wrong:
        raise ValueError(f"--config {path}: {'; '.join(wrong)}")

    # A task's file is code, and so is a reward's. The settings may be a stranger's, so a file that
    # they name is never imported, as in `resumed_config`.
    for name in ("task", "reward"):
        file, _, called = found.get(name, "").rpartition(":")
        if name not in given and file.endswith(".py"):
            raise ValueError(f"the {name} of {path} is a file's; give it again, as --{name} "
                             f"FILE.py:{called} ({path} has {found[name]!r})")  # fmt: skip

    # A run's config.json names the run's own directory, in which no second run may begin.
    if path.name == "config.json" and found.get("resume") is False:
        found.pop("out", None)
        del found["resume"]
    return found


def read_toml(path) -> dict:
    """Return what a TOML file holds. Whatever is wrong with it is a ValueError that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def resumed_config(path, given) -> Config:
    """Return a run's stored settings under the flags that were given.

    path: the run's config.json.
    given: {field: value}. ValueError for a value that would make the run another run.
    """
    stored = read_json(path, what="the configuration of a run")
    if stored.keys() != {f.name for f in dataclasses.fields(Config)}:
        raise ValueError(f"{path} is not of this version of Config: start a new run")

    # A task's file is code, and so is a reward's. The run's directory may be a stranger's, so a
    # file that it names is never imported. To go on with the run, name the file again. What was an
    # object of a Python program is nowhere, so it must be given again too.
    for name in MAY_BE_OBJECTS:
        spec = str(stored.get(name, ""))
        called = spec.rpartition(":")[2]
        is_again = given.get(name, "").rpartition(":")[2] == called
        if spec.startswith(OBJECT) and not is_again:
            raise ValueError(f"the {name} of this run is {spec}, an object of a Python program: "
                             f"use full.api, and give the object again")  # fmt: skip
        is_code = name in ("task", "reward") and spec != ""
        is_code = is_code and not (name == "task" and spec in TASKS)
        if is_code and not is_again:
            raise ValueError(f"the {name} of this run is a file's; give it again, as --{name} "
                             f"FILE.py:{called} (the run had {spec!r})")  # fmt: skip
        if is_code:
            stored[name] = given[name]
    if wrong := Config(**stored)._wrong_values():
        raise ValueError(f"{path}: {'; '.join(wrong)}")

    # The rates depend on the last step if they decay, or if the old or the new number of steps is
    # shorter than the warm-up, which then ends with the run. `steps` is free only if they do not.
    # An engine may have moved, but this process draws other numbers than an engine does.
    free = set(Config.FREE)
    if stored["engine"] and given.get("engine"):
        free.add("engine")
    fewest = min(stored["steps"], given.get("steps", stored["steps"]))
    if stored["lr_decay"] != "constant" or fewest < stored["lr_warmup"]:
        free.remove("steps")
    # An empty date is today's for a new run, and its own for a resumed one.
    given = {name: x for name, x in given.items() if name != "date" or x}
    changed = [name for name in given if name not in free and given[name] != stored[name]]
    if changed:
        told = ", ".join(f"{_flag(x)} {given[x]!r} (the run has {stored[x]!r})" for x in changed)
        if "steps" in changed:
            told += ("; with this --lr-decay and --lr-warmup the rates depend on the last step, "
                     "which they do not with --lr-decay constant and --steps above --lr-warmup")
        raise ValueError(f"--resume cannot change {told}; start a new run instead")
    return Config(**(stored | given))

"""Declare every setting of a run with its help, check settings, and read stored ones.

Read the fields of Config to look up a flag or to add one. flags.py reads a command line, and
conflicts.py says what cannot be combined.
"""

import dataclasses
import datetime
import difflib
import itertools
import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch

import train_grpo
from full.learn.advantages import ADVANTAGES, TOKEN_ADVANTAGES
from full.learn.objectives import AGGREGATIONS, OBJECTIVES
from full.model.config import LORA_ALPHA, Lora, read_json
from full.ranks.joining import PYTHON
from full.ranks.plans import SCHEDULES, Plan
from full.run.conflicts import conflicts, flag_name

Dtype = Literal["float32", "float64", "bfloat16"]
AnyDtype = Literal["", Dtype]
Overlong = Literal["keep", "filter"]
Ratio = Literal["token", "sequence", "geometric"]
Decay = Literal["constant", "linear", "cosine"]
Mode = Literal["ddp", "zero1", "fsdp", "fsdp-offload"]
Schedule = Literal[tuple(SCHEDULES)]
Tree = Literal["disabled", "sparse", "dta"]
Logged = Literal["all", "some", "none"]

TASKS = "guess", "jsonl"  # values of --task that name no file
INSTRUCTION = "End with '#### ' and the answer."

# The matrices of attention and of MLPs, experts' included.
LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"

CORE = train_grpo.Config  # many defaults are from here


def flag(default, text, title="", alone=None):
    """Return a field of Config.

    text: its help. title: of the group that it begins in --help. alone: its value if the flag is
        typed without one.
    """
    metadata = {"help": text, "title": title, "alone": alone}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Config(train_grpo.Config):
    """All settings of a run. Each field is a flag, with a default and a help text.

    A Literal lists the values that a flag may have. "" is the default that a help calls "empty".
    """

    seed: int = flag(CORE.seed, "of weights, data and sampling", "the run")
    steps: int = flag(CORE.steps, "batches of rollouts")
    out: str = flag("", "directory of the run; empty: the first free runs/TASK-N")
    resume: bool = flag(False, "go on from the newest checkpoint in --out; begin without one")

    size: int = flag(CORE.size, "guess: numbers", "the task and data")
    turns: int = flag(CORE.turns, "guess: answers allowed")
    task: str = flag("guess", "guess | jsonl | FILE.py:Class")
    data: str = flag("", 'jsonl: lines, {"question", "answer"} or {"messages", "answer"}')
    template: str = flag("", "jsonl: chat | raw | text with {question}; empty: chat, else raw")
    instruction: str = flag(INSTRUCTION, "jsonl: a line after each question")
    template_args: str = flag(
        "", "jsonl: what a chat template gets besides messages: a JSON object of its variables, "
        "and of system, the system's message; empty: nothing")  # fmt: skip
    date: str = flag("", "jsonl: today, for a chat template; empty: when the run begins")
    reward: str = flag("", "jsonl: FILE.py:function of (text, row); empty: what follows ####")

    layers: int = flag(CORE.layers, "decoder layers", "the model")
    hidden: int = flag(CORE.hidden, "model width")
    heads: int = flag(CORE.heads, "query heads; half as many key heads")
    model: str = flag("", "Hugging Face directory; empty: a random one as above")
    dtype: Dtype = flag("float32", "of the trainer's weights")
    compute_dtype: AnyDtype = flag("", "of matrix products, coarser than --dtype; empty: same")
    generator_dtype: AnyDtype = flag("", "of the generator's weights; empty: --compute-dtype")
    head_dtype: Literal["", "float32"] = flag("", "of the head's product; empty: as others")
    lora_rank: int = flag(0, "LoRA: r of the factors beside frozen matrices; 0: all is trained")
    lora_targets: str = flag(LORA_TARGETS, "LoRA: matrices; also gate, the router, and lm_head")

    prompts: int = flag(CORE.prompts, "groups of a step, over all ranks", "rollouts")
    group: int = flag(CORE.group, "rollouts of one prompt")
    max_new_tokens: int = flag(CORE.max_new_tokens, "limit of a rollout, the replies included")
    temperature: float = flag(CORE.temperature, "of sampling and of every log-prob")
    reply_timeout: int = flag(0, "seconds that a task or a reward may take; 0: no limit")
    engine: str = flag("", "URL[,URL..] of vLLM or SGLang; empty: this process")
    staleness: int = flag(0, "K: batch b is sampled with weights of step b - K; 0: on-policy")
    exact: bool = flag(False, "the sampler's log-probs are the trainer's, bit for bit; slower")
    forks: int = flag(1, "children of a trajectory at a turn boundary (tree rollouts)")
    fork_turns: int = flag(0, "turn boundaries that fork; forks ** fork_turns divides group")
    dynamic_sampling: int = flag(
        0, "N: drop groups of equal rewards, and play up to N rounds to replace them (DAPO); 1, or "
        "no number: only drop; 0: keep all", alone=1)  # fmt: skip
    overlong: Overlong = flag("keep", "truncated trajectories; filter: not in the loss")
    overlong_buffer: int = flag(0, "last tokens of max_new_tokens, where the reward falls by 1")

    clip_low: float = flag(CORE.clip_low, "ratio clip below 1", "the loss")
    clip_high: float = flag(CORE.clip_high, "ratio clip above 1; 0.28 is DAPO's")
    advantage: str = flag(None, "(1) of full/learn/advantages.py; gae: PPO, with a critic")
    teacher: str = flag("", "checkpoint: a token's advantage is its log-prob's gain there")
    aggregation: str = flag("token_mean", "w and Z of (7) of full/learn/objectives.py")
    objective: str = flag("clip", "(3) of full/learn/objectives.py")
    dual_clip: float = flag(0.0, "clip, gspo: bound of the ratio where A is negative; 0: none")
    cispo_bound: float = flag(5.0, "cispo: the largest weight")
    kl: Literal["k1", "k3"] = flag("k3", "estimator of the KL, (5) of full/learn/objectives.py")
    kl_coef: float = flag(0.0, "weight of the KL to the frozen reference; 0: none is kept")
    kl_in: Literal["loss", "reward"] = flag("loss", "where the KL enters")
    entropy_coef: float = flag(None, "weight of the entropy bonus")
    proximal: bool = flag(None, "old log-probs of the trainer; otherwise the sampler's")
    importance: Literal["truncate", "mask"] = flag("truncate", "(4) of full/learn/objectives.py")
    importance_of: Ratio = flag("token", "whose p_old / p_sampler")
    importance_low: float = flag(0.0, "lower bound of p_old / p_sampler")
    importance_cap: float = flag(0.0, "upper bound of p_old / p_sampler; 0: no weights")
    router_bias_rate: float = flag(0.0, "experts: step of the routers' bias at updates; 0: no bias")

    minibatches: int = flag(CORE.minibatches, "optimizer steps of a batch", "the optimizer")
    lr: float = flag(None, "AdamW")
    critic_lr: float = flag(None, "the same of the critic, with --advantage gae")
    lr_warmup: int = flag(CORE.lr_warmup, "steps of linear warm-up, at most --steps; 0: none")
    lr_decay: Decay = flag("linear", "from there to the last step")
    weight_decay: float = flag(0.0, "AdamW, decoupled")

    plan: str = flag("", "the letters below, such as d2t2 or p2c2", "parallelism")
    data_parallel: Mode = flag("ddp", "zero1: sharded moments; fsdp-offload: shards on the CPU")
    shard_ranks: int = flag(0, "fsdp: how many of the d ranks share the weights (HSDP); 0: all")
    cp_method: Literal["ring", "allgather", "ulysses"] = flag("ring", "of the c ranks of --plan")
    pp_schedule: Schedule = flag("1f1b", "of the p ranks of --plan")
    timeout: int = flag(60, "seconds that a rank waits for another; for an engine ten times")

    tree: Tree = flag("disabled", "share prefixes; dta: chunk by chunk", "memory and speed")
    chunk_tokens: int = flag(0, "tokens of a chunk, with --tree dta")
    recompute: bool = flag(False, "with --tree dta: run the chunks of a path again, not keep them")
    micro_tokens: int = flag(16384, "tokens of a micro-batch; a longer sequence runs alone")
    batch_rows: int = flag(1024, "rollouts that a rank decodes at a time; as one ends, one enters")
    ac: str = flag("none", "recompute: none, full, op (not products), or memory_budget=0.5")
    compile: bool = flag(False, "torch.compile each layer (needs a C++ compiler on a CPU)")
    device: Literal["", "cpu", "cuda"] = flag("", "empty: cuda where there is one")

    eval_every: int = flag(CORE.eval_every, "steps between evaluations, and the last", "evaluation")
    eval_prompts: int = flag(CORE.eval_prompts, "most prompts of one; each is asked equally often")
    eval_data: str = flag("", "jsonl: file of held-out lines; empty: every tenth line of --data")

    save_every: int = flag(50, "steps between checkpoints; 0: only the last", "output")
    keep: int = flag(2, "newest checkpoints kept")
    log_rollouts: Logged = flag("some", "to rollouts.jsonl; `audit` needs some")

    # These are not flags. micro_tokens replaces `rows` of train_grpo.py, `export` writes the
    # weights, and a run's directory has its metrics. The rest are constants of the definition.
    rows: ClassVar[int] = 0
    save: ClassVar[None] = None
    metrics: ClassVar[None] = None
    beta2: ClassVar[float] = CORE.beta2
    max_grad_norm: ClassVar[float] = CORE.max_grad_norm
    gae_lambda: ClassVar[float] = 0.95
    value_coef: ClassVar[float] = 0.5

    # Defaults that depend on the first weights. Random weights need large steps, and a bonus for
    # exploration. Both would destroy in a few steps what a checkpoint has learned. A field of this
    # table is None until __post_init__ has looked it up.
    BY_START = dict(
        lr=dict(random=1e-3, model=1e-6, lora=1e-5),
        critic_lr=dict(random=1e-3, model=1e-5, lora=1e-5),
        entropy_coef=dict(random=0.02, model=0.0, lora=0.0),
    )

    # What a resumed run may change: it changes no later step by more than rounding.
    FREE = (
        "out", "resume", "steps", "eval_every", "save_every", "keep", "log_rollouts", "timeout",
        "reply_timeout", "micro_tokens", "batch_rows", "device", "plan", "data_parallel",
        "shard_ranks", "cp_method", "pp_schedule", "tree", "chunk_tokens", "recompute", "ac",
        "compile",
    )  # fmt: skip

    # Settings are put into int64 and float32 tensors, which cannot hold anything larger.
    LARGEST = {int: 2**63 - 1, float: torch.finfo(torch.float32).max / 2}
    YEAR = 365 * 24 * 3600  # in seconds: a much longer --timeout would overflow a clock in C++
    AT_MOST = dict(timeout=YEAR, reply_timeout=YEAR, staleness=64)  # far more than is useful
    ZERO = "lr_warmup", "save_every"  # may be 0

    def __new__(cls, *args, **given):
        """Remember the names of the fields given. ValueError if one is not a field."""
        if wrong := not_fields(given):
            raise ValueError("; ".join(wrong))
        self = super().__new__(cls)
        self._names_given = frozenset(given)
        return self

    def __post_init__(self):
        # The numbers, and not None, are stored in config.json, so a resumed run keeps them.
        start = "random"
        if self.model:
            start = "lora" if self.lora_rank else "model"
        for name, defaults in self.BY_START.items():
            if getattr(self, name) is None:
                setattr(self, name, defaults[start])
        if self.advantage is None:
            self.advantage = "teacher" if self.teacher else "group_mean"
        # Recompute old log-probs where rounding alone would move a ratio past the clip. With one
        # update per batch the policy is its own old policy. With staleness the sampler's log-probs
        # are wanted, since they correct for the age of its weights.
        if self.proximal is None:
            is_fresh = self.minibatches > 1 and not self.staleness
            self.proximal = self.sampler_rounds_differently and is_fresh
        chosen = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if choices_of(f)}
        if wrong := wrong_values(chosen):
            raise ValueError("; ".join(wrong))

    @classmethod
    def from_file(cls, path, **given) -> "Config":
        """Return the Config of a --config file, with the given fields in place of the file's."""
        return cls(**read_settings(path, given) | given)

    @classmethod
    def of(cls, given, first=None) -> "Config":
        """Return the Config of a new run, or of the run that is resumed in `out`.

        given: {field: value}.
        first: the Config of a new run. Default: Config(**given).
        """
        path = Path(f"{given.get('out', '')}") / "config.json"
        if given.get("resume") and given.get("out") and path.exists():
            return resumed_config(path, given)
        return first or cls(**given)

    # Properties that follow from several fields. They are not flags.

    @property
    def trainer_plan(self) -> Plan:
        """Return the Plan of --plan, or d1 if it is empty. ValueError if it is not a plan."""
        return Plan.parse(self.plan or "d1")

    @property
    def lora(self) -> Lora | None:
        """Return the settings of the policy's LoRA factors, or None without factors."""
        targets = tuple(self.lora_targets.split(","))
        return Lora(self.lora_rank, LORA_ALPHA, targets) if self.lora_rank else None

    @property
    def reads_text(self) -> bool:
        """Return whether the task may read settings of text: jsonl, or a task from a file."""
        return self.task == "jsonl" or self.task not in TASKS

    @property
    def has_whole_template(self) -> bool:
        """Return whether --template is the text of a whole prompt."""
        return self.template not in ("", "chat", "raw")

    @property
    def max_rounds(self) -> int:
        """Return how many rounds of rollouts a step may have."""
        return max(1, self.dynamic_sampling)

    @property
    def system(self) -> str:
        """Return the system's message of --template-args, or ""."""
        return read_arguments(self.template_args).get("system", "")

    @property
    def mode(self) -> str:
        """Return the data-parallel mode, as `parallelize` calls it."""
        return self.data_parallel.removesuffix("-offload")

    @property
    def offload(self) -> bool:
        """Return whether shards, their gradients and the optimizer stay on the CPU."""
        return self.data_parallel == "fsdp-offload"

    @property
    def threads(self) -> int:
        """Return how many CPU threads a rank has: OMP_NUM_THREADS, as torchrun sets it, or 1."""
        # OpenMP allows a list, as 4,2: the first number is that of threads outside of any other.
        text = os.environ.get("OMP_NUM_THREADS") or "1"
        first = text.partition(",")[0].strip()
        if not first.isdecimal() or int(first) == 0:
            raise ValueError(f"expected a positive OMP_NUM_THREADS, got {text!r}")
        return int(first)

    @property
    def engine_timeout(self) -> int:
        """Return how many seconds a run waits for an engine that is silent or loading."""
        return 10 * self.timeout

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
    def sampler_rounds_differently(self) -> bool:
        """Return whether sampler and trainer differ by more than the rounding of float32."""
        is_coarse = "bfloat16" in (self.compute, self.rollout_dtype)
        return not self.exact and (is_coarse or bool(self.engine))

    @property
    def first_minibatch_uses_current_logprobs(self) -> bool:
        """Return whether the first minibatch's `old` of (2) is its own log-probs, detached."""
        if self.proximal:
            return self.sampler_rounds_differently
        return self.minibatches == 1 and not self.staleness

    def given(self) -> dict:
        """Return {field: value} of the fields given to Config(..), or assigned since."""
        # A resumed run takes all other fields from its stored settings.
        first = Config(**{name: getattr(self, name) for name in self._names_given})
        return {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self)
            if f.name in self._names_given or getattr(self, f.name) != getattr(first, f.name)
        }  # fmt: skip

    def check(self) -> "Config":
        """Raise ValueError for settings that cannot run, before anything is built or written."""
        # Values first, because `conflicts` computes with them. Names too, because an assignment may
        # have misspelled a field.
        values = {name: x for name, x in vars(self).items() if name != "_names_given"}
        if wrong := not_fields(values) or wrong_values(values):
            raise ValueError("; ".join(wrong))
        for f in dataclasses.fields(self):
            if f.type is float:  # an int becomes one
                setattr(self, f.name, float(values[f.name]))
        if wrong := [text for is_wrong, text in conflicts(self) if is_wrong]:
            raise ValueError("; ".join(wrong))
        return self

    @classmethod
    def defaults_of(cls, name):
        """Return the defaults of a field: one, or one for each start."""
        return cls.BY_START.get(name, {"always": getattr(cls, name)}).values()


def not_fields(names) -> list[str]:
    """Return an error for each name that is not a field of Config, with the nearest field."""
    fields = [f.name for f in dataclasses.fields(Config)]
    return [f"expected a field of Config, got {name}{nearest(name, fields)}"
            for name in names if name not in fields]  # fmt: skip


# The flags whose values are the names of a table.
TABLES = {
    "objective": (OBJECTIVES,), "aggregation": (AGGREGATIONS,),
    "advantage": (ADVANTAGES, TOKEN_ADVANTAGES),
}  # fmt: skip


def choices_of(f) -> tuple:
    """Return the values that a field of Config may have, or () if it is not a choice."""
    tables = TABLES.get(f.name)
    return tuple(itertools.chain(*tables)) if tables else get_args(f.type)


def joined_choices(choices, separator=", "):
    """Join a field's choices, without the empty default."""
    return separator.join(filter(None, choices))


def wrong_values(values) -> list[str]:
    """Return an error for each field whose value is wrong by itself. values: {field: value}."""
    # The type is checked first, since the comparisons need numbers.
    wrong = []
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for name, value in values.items():
        kind, choices = fields[name].type, choices_of(fields[name])
        kinds = (int, float) if kind is float else (kind,)
        problem = ""
        if choices and value not in choices:
            problem = f"one of {joined_choices(choices)}"
        elif not choices and type(value) not in kinds:
            problem = kind.__name__
        elif kind in (int, float) and not 0 <= value <= Config.LARGEST[kind]:
            problem = f"finite, at least 0 and at most {Config.LARGEST[kind]}"
        elif value == 0 and all(Config.defaults_of(name)) and name not in Config.ZERO:
            problem = "positive"
        elif value > Config.AT_MOST.get(name, value):
            problem = f"at most {Config.AT_MOST[name]}"
        if problem:
            wrong.append(f"{flag_name(name)} must be {problem}, got {value!r}")
    return wrong


def nearest(word, names, shown=str) -> str:
    """Return "; did you mean X?" with the name that is nearest to a word, or ""."""
    near = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {shown(near[0])}?" if near else ""


def read_settings(path, given=()) -> dict:
    """Return {field: value} of a file of settings: TOML if its name ends in .toml, else JSON.

    given: {field: value}. Fields that replace the file's.

    ValueError for a key that is not a field, or a value of another type.
    """
    path = Path(path)
    try:
        is_toml = path.suffix == ".toml"
        settings = tomllib.loads(path.read_text(encoding="utf-8")) if is_toml else read_json(path)
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error

    if wrong := not_fields(settings) or wrong_values(settings):
        raise ValueError(f"--config {path}: {'; '.join(wrong)}")

    named_files({name: x for name, x in settings.items() if name not in given}, {}, path)
    # A run's config.json names the run's own directory, in which no second run may begin.
    if path.name == "config.json" and settings.get("resume") is False:
        settings.pop("out", None)
        del settings["resume"]
    return settings


def named_files(stored, given, path) -> dict:
    """Return the task and reward files that the caller names again, {field: FILE.py:NAME}.

    A file is code, and stored settings may be a stranger's. So no file is imported because stored
    settings name it: ValueError unless the caller names it too.
    """
    files = {}
    for field in ("task", "reward"):
        spec = f"{stored.get(field, '')}"
        name = spec.rpartition(":")[2]
        if spec in ("", *TASKS):
            continue
        if given.get(field, "").rpartition(":")[2] != name:
            raise ValueError(f"the {field} of {path} is a file's; give it again, as --{field} "
                             f"FILE.py:{name} ({path} has {spec!r})")  # fmt: skip
        files[field] = given[field]
    return files


# A task of questions. Rows are compared by their contents, see `RunDirectory.require_same_digests`,
# so a resumed run may read them from another file, or from a program's objects.
TASKS_OF_ROWS = {"jsonl", f"{PYTHON}jsonl"}


def resumed_config(path, given) -> Config:
    """Return a run's stored settings, changed by the given ones.

    path: the run's config.json.
    given: {field: value}. ValueError for a value that would make the run another run.
    """
    stored = read_json(path, what="the configuration of a run")
    if stored.keys() != {f.name for f in dataclasses.fields(Config)}:
        raise ValueError(f"{path} is not of this version of Config: start a new run")
    if {f"{stored['task']}", given.get("task")} <= TASKS_OF_ROWS:
        stored["task"] = given["task"]
    # Objects of a Python program are not stored: only the program can give them again.
    if f"{stored['task']}".startswith(PYTHON) and given.get("task") != stored["task"]:
        raise ValueError(f"the task of this run is {stored['task']}: full.api has made it with "
                         f"objects of a Python program, which has to give them again")  # fmt: skip
    stored |= named_files(stored, given, path)
    if wrong := wrong_values(stored):
        raise ValueError(f"{path}: {'; '.join(wrong)}")

    # An empty date means today for a new run, and no change for a resumed one.
    given = {name: x for name, x in given.items() if name != "date" or x}
    free = free_fields(stored, given)
    changed = [name for name in given if name not in free and given[name] != stored[name]]
    if changed:
        changes = (f"{flag_name(x)} {given[x]!r} (the run has {stored[x]!r})" for x in changed)
        text = ", ".join(changes)
        if "steps" in changed:
            text += ("; with this --lr-decay and --lr-warmup the rates depend on the last step, "
                     "which they do not with --lr-decay constant and --steps above --lr-warmup")
        raise ValueError(f"--resume cannot change {text}; start a new run instead")
    return Config(**(stored | given))


def free_fields(stored, given) -> set:
    """Return the names of the fields that a resumed run may change."""
    free = {*Config.FREE, "teacher"}  # a teacher is compared by its contents
    if stored["task"] in TASKS_OF_ROWS:
        free |= {"data", "eval_data"}
    # An engine may have moved. This process would draw other numbers than an engine does.
    if stored["engine"] and given.get("engine"):
        free.add("engine")
    # The rates depend on the last step if they decay, or if the old or the new number of steps is
    # less than the warm-up, which then ends with the run.
    fewest = min(stored["steps"], given.get("steps", stored["steps"]))
    if stored["lr_decay"] != "constant" or fewest < stored["lr_warmup"]:
        free.remove("steps")
    return free


def read_arguments(text) -> dict:
    """Return the arguments of --template-args; ValueError unless they are a JSON object."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"expected --template-args to be a JSON object, such as "
                         f"{{\"enable_thinking\": false}}, got {text!r}")  # fmt: skip
    return arguments


def read_date(text) -> datetime.datetime:
    """Return the date and time of --date, or the present if it is empty.

    A date without a time means midnight.
    """
    try:
        return datetime.datetime.fromisoformat(text) if text else datetime.datetime.now()
    except ValueError as error:
        raise ValueError(f"expected --date YYYY-MM-DD or YYYY-MM-DDTHH:MM:SS, got "
                         f"{text!r}") from error

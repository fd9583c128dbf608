"""Refuse settings that exclude one another, or that would have no effect.

All conflicts are listed here, so that no file below knows the command line. What a model, a plan or
a file refuses by itself is not repeated. If no command of yours was refused, skip this file.
"""

import math

from full.learn.advantages import compared_by
from full.learn.objectives import OF_OBJECTIVES, READS
from full.model.config import LINEAR
from full.ranks.joining import PYTHON

# Only the task jsonl reads these.
OF_TEXT = (
    "data", "eval_data", "template", "instruction", "template_args", "date", "reward",
)  # fmt: skip


def flag_name(name) -> str:
    """Return the flag of a setting: --lr-decay of lr_decay."""
    return "--" + name.replace("_", "-")


def unused(c, *names, unless, needs) -> list:
    """Return a conflict for each setting that was given, but has no effect.

    unless: whether the settings do have an effect. needs: what they need for it, in words.
    """
    return [(not unless and getattr(c, name) not in c.defaults_of(name),
             f"{flag_name(name)} needs {needs}") for name in names]  # fmt: skip


def conflicts(c) -> list:
    """Return (is it wrong?, error) pairs for a Config whose single values are right."""
    return precision(c) + rewards(c) + loss(c) + ranks(c) + tasks(c)


def precision(c) -> list:
    """Return the pairs about the model and its precision."""
    plan, is_random = c.trainer_plan, not c.model
    # A sum in another order is not exact.
    not_exact = {
        "t in --plan": plan.tp > 1, "c in --plan": plan.cp > 1, "p in --plan": plan.pp > 1,
        "e in --plan": plan.ep > 1, "--tree": c.tree != "disabled",
        "--data-parallel fsdp": c.mode == "fsdp", "--engine": c.engine, "--compile": c.compile,
        "OMP_NUM_THREADS above 1": c.threads > 1,
        "--generator-dtype of its own": c.rollout_dtype != c.compute,
        "--head-dtype: there is no gap": c.head_dtype,
        "--lora-rank: its sampler has merged weights": c.lora_rank,
    }  # fmt: skip
    has_bfloat16 = "bfloat16" in (c.compute, c.rollout_dtype)
    return [
        *unused(c, "lora_targets", unless=c.lora_rank, needs="--lora-rank"),
        *unused(c, "head_dtype", unless=has_bfloat16, needs="products in bfloat16"),
        (is_random and c.hidden % (2 * c.heads),
         f"--hidden {c.hidden} must divide by --heads {c.heads} into an even head_dim"),
        (is_random and c.heads % 2 and c.heads > 1, f"--heads must be 1 or even, got {c.heads}"),
        *((c.exact and wrong, f"--exact does not support {x}") for x, wrong in not_exact.items()),
    ]  # fmt: skip


def rewards(c) -> list:
    """Return the pairs about advantages and rewards."""
    has_teacher = c.advantage == "teacher"
    compares_group = compared_by(c.advantage) == "group"
    return [
        *unused(c, "critic_lr", unless=c.advantage == "gae", needs="--advantage gae"),
        *unused(c, "teacher", unless=has_teacher, needs="--advantage teacher"),
        *unused(c, "overlong_buffer", unless=not has_teacher, needs="an --advantage of rewards"),
        (has_teacher and not c.teacher, "--advantage teacher needs --teacher DIR"),
        (c.teacher and c.kl_in == "reward", "--teacher has no reward: --kl-in loss"),
        (c.group == 1 and compares_group,
         "--group 1 has no baseline, so advantages are 0: use 2 or more, or --advantage gae"),
        (c.dynamic_sampling and not compares_group, "--dynamic-sampling drops groups of equal "
         f"rewards, from which --advantage {c.advantage} learns"),
        (c.dynamic_sampling and (c.entropy_coef or c.kl_coef),
         "--dynamic-sampling drops groups of advantage 0, but they have entropy and KL terms: set "
         "--entropy-coef 0 and --kl-coef 0"),
        (c.overlong_buffer >= c.max_new_tokens,
         f"--overlong-buffer {c.overlong_buffer} must be less than --max-new-tokens"),
    ]  # fmt: skip


def loss(c) -> list:
    """Return the pairs about the loss and its updates."""
    # A user's own objective may read all flags. The error names only the objectives of READS.
    of_objective = []
    for name in OF_OBJECTIVES:
        readers = [objective for objective in READS if name in READS[objective]]
        is_read = c.objective in readers or c.objective not in READS
        of_objective += unused(
            c, name, unless=is_read, needs=f"--objective {' or '.join(readers)}")
    old_is_own = c.proximal or (c.minibatches == 1 and not c.staleness)
    return [
        *of_objective,
        *unused(c, "kl", "kl_in", unless=c.kl_coef, needs="--kl-coef"),
        *unused(c, "importance", "importance_of", "importance_low", unless=c.importance_cap,
                needs="--importance-cap"),
        *unused(c, "importance_cap", unless=old_is_own, needs="--proximal, or --minibatches 1 and "
                "no --staleness: else old is the sampler itself"),
        (c.importance_low > c.importance_cap > 0,
         f"--importance-low {c.importance_low} is over --importance-cap"),
        # Where sampler and trainer agree, a weight is 1 up to rounding.
        (c.importance == "mask" and not c.importance_low < 1 < (c.importance_cap or math.inf),
         f"--importance mask needs a 1 between its bounds, got --importance-low {c.importance_low} "
         f"and --importance-cap {c.importance_cap}: rounding would mask tokens"),
        (c.clip_low >= 1, f"--clip-low must be less than 1, got {c.clip_low}"),
        (0 < c.dual_clip <= 1 + c.clip_high,
         f"--dual-clip must be over 1 + clip_high (papers: 3), got {c.dual_clip}"),
        (c.minibatches > c.prompts,
         f"--minibatches {c.minibatches} is over --prompts {c.prompts}, so one would be empty: "
         f"lower --minibatches or raise --prompts"),
    ]  # fmt: skip


def ranks(c) -> list:
    """Return the pairs about ranks, trees and the sampler."""
    plan, is_dta = c.trainer_plan, c.tree == "dta"
    # Chunks run forward and backward in their own order. A pipeline's schedule has another order.
    # FSDP2 gathers once a step and not once a chunk. A chunk's keys come from the stack of one
    # rank. Ranks of e have other trees and so other numbers of calls. Each chunk would be compiled
    # for its own shape. --recompute takes the place of --ac.
    not_by_chunks = {
        "p": plan.pp > 1, "c": plan.cp > 1, "e": plan.ep > 1,
        "fsdp": c.mode == "fsdp", "--ac": c.ac != "none", "--compile": c.compile,
    }  # fmt: skip
    leaves = c.forks ** min(c.fork_turns, 64)  # larger than any group, and quickly computed
    return [
        *unused(c, "shard_ranks", unless=c.mode == "fsdp", needs="--data-parallel fsdp"),
        *unused(c, "cp_method", unless=plan.cp > 1, needs="a --plan with c"),
        *unused(c, "pp_schedule", unless=plan.pp > 1, needs="a --plan with p"),
        *unused(c, "chunk_tokens", "recompute", unless=is_dta, needs="--tree dta"),
        (is_dta and not c.chunk_tokens, "--tree dta needs --chunk-tokens, the size of a chunk"),
        *((is_dta and wrong, f"--tree dta does not support {x}; use --tree sparse")
          for x, wrong in not_by_chunks.items()),
        *unused(c, "forks", unless=c.fork_turns, needs="--fork-turns"),
        *unused(c, "fork_turns", unless=c.forks > 1, needs="--forks 2 or more"),
        (c.group % leaves, f"--group {c.group} must divide by forks^fork_turns {leaves}"),
        (c.engine and c.router_bias_rate,
         "--engine has no --router-bias-rate: its format has no such bias"),
    ]  # fmt: skip


def tasks(c) -> list:
    """Return the pairs about tasks and data."""
    is_jsonl = c.task.removeprefix(PYTHON) == "jsonl"
    missing = [] if c.data else ["--data FILE.jsonl"]
    missing += [] if c.model else ["--model DIR with a tokenizer.json"]
    takes_instruction = not (c.has_whole_template and c.instruction)
    return [
        *unused(c, "resume", unless=c.out, needs="--out DIR"),
        *unused(c, *OF_TEXT, unless=c.reads_text, needs="--task jsonl"),
        *unused(c, "reply_timeout", unless=c.reward or not (is_jsonl or c.task == "guess"),
                needs="--reward FILE.py:function or --task FILE.py:Class"),
        *unused(c, "template_args", unless=c.template in ("", "chat"), needs="--template chat"),
        *unused(c, "instruction", unless=takes_instruction,
                needs="a --template without {question}"),
        (not isinstance(c.system, str),
         f"--template-args: expected a text as system, got {c.system!r}"),
        (is_jsonl and missing, f"--task jsonl needs {' and '.join(missing)}"),
        (c.has_whole_template and "{question}" not in c.template,
         f"--template must be chat, raw or a text with {{question}}, got {c.template!r}"),
    ]  # fmt: skip


def of_parts(c, task, shape) -> list:
    """Return the pairs that depend on a run's task and on its model's shape, a ModelConfig."""
    model = c.model or "the model of --layers and --hidden"
    split = c.trainer_plan.tp * c.trainer_plan.cp
    return [
        (c.router_bias_rate and not shape.sparse_layers,
         f"--router-bias-rate is about experts, and {model} has none: leave it out"),
        (c.exact and LINEAR in shape.layer_types,
         f"--exact does not support recurrent layers, and {model} has some: leave it out"),
        (c.cp_method == "ulysses" and shape.num_attention_heads % split,
         f"--cp-method ulysses divides the {shape.num_attention_heads} query heads of {model} over "
         f"t * c = {split} ranks: use ring"),
        (c.reply_timeout and not getattr(task, "threads", True),
         f"--reply-timeout: {type(task).__name__} has threads = False, so its replies are waited "
         f"for by no other thread: leave one of the two out"),
    ]  # fmt: skip

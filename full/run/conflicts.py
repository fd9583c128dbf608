"""Refuse settings that exclude one another, or that would do nothing.

One list for all settings, so that no file below knows how a flag is typed. What a model, a plan or
a file refuses by itself is not repeated. If no command of yours was refused, skip this file.
"""

from full.learn.advantages import compared_by
from full.learn.objectives import OF_OBJECTIVES, READS
from full.model.config import LINEAR
from full.ranks.joining import PYTHON

# What only the task jsonl reads.
OF_TEXT = (
    "data", "eval_data", "template", "instruction", "template_args", "date", "reward",
)  # fmt: skip


def flag_name(name) -> str:
    """Return the flag of a setting: --lr-decay of lr_decay."""
    return "--" + name.replace("_", "-")


def needs(c, is_there, what, *names) -> list:
    """Return a conflict for each setting that was given, and that does nothing without `what`."""
    return [
        (not is_there and getattr(c, name) not in c.defaults_of(name),
         f"{flag_name(name)} needs {what}")
        for name in names
    ]  # fmt: skip


def conflicts(c) -> list:
    """Return (is it wrong?, the error) pairs for settings, a Config of values that are right."""
    plan, is_dta, is_random = c.trainer_plan, c.tree == "dta", not c.model
    compares_group = compared_by(c.advantage) == "group"
    old_is_own = c.proximal or (c.minibatches == 1 and not c.staleness)
    leaves = c.forks ** min(c.fork_turns, 64)  # beyond any group, and quickly computed
    is_jsonl = c.task.removeprefix(PYTHON) == "jsonl"
    lacks = ["--data FILE.jsonl"] * (not c.data)
    lacks += ["--model DIR with a tokenizer.json"] * is_random

    # Chunks run forward and backward in an order of their own. A pipeline's schedule has another
    # order, FSDP2 gathers once a step and not once a chunk, a chunk's keys come from the stack of
    # one rank, ranks of e have other trees and so other numbers of calls, and each chunk would be
    # compiled for a shape of its own. --recompute takes the place of --ac.
    not_by_chunks = {
        "p": plan.pp > 1, "c": plan.cp > 1, "e": plan.ep > 1,
        "fsdp": c.mode == "fsdp", "--ac": c.ac != "none", "--compile": c.compile,
    }  # fmt: skip
    # What sums in an order of its own is not exact.
    not_exact = {
        "t in --plan": plan.tp > 1, "c in --plan": plan.cp > 1, "p in --plan": plan.pp > 1,
        "e in --plan": plan.ep > 1, "--tree": c.tree != "disabled",
        "--data-parallel fsdp": c.mode == "fsdp", "--engine": c.engine, "--compile": c.compile,
        "OMP_NUM_THREADS above 1": c.threads > 1,
        "--generator-dtype of its own": c.rollout_dtype != c.compute,
        "--head-dtype: there is no gap": c.head_dtype,
        "--lora-rank: its sampler has merged weights": c.lora_rank,
    }  # fmt: skip
    # An objective of your own may read all flags. No sentence names it for those of others.
    readers = {name: [x for x in READS if name in READS[x]] for name in OF_OBJECTIVES}
    of_objective = [pair for name, some in readers.items() for pair in needs(
        c, c.objective in some or c.objective not in READS, f"--objective {' or '.join(some)}", name
    )]  # fmt: skip
    return [
        # The model and precision.
        *needs(c, c.lora_rank, "--lora-rank", "lora_targets"),
        *needs(c, "bfloat16" in (c.compute, c.rollout_dtype), "products in bfloat16", "head_dtype"),
        (is_random and c.hidden % (2 * c.heads),
         f"--hidden {c.hidden} must divide by --heads {c.heads} into an even head_dim"),
        (is_random and c.heads % 2 and c.heads > 1, f"--heads must be 1 or even, got {c.heads}"),
        *((c.exact and wrong, f"--exact does not support {x}") for x, wrong in not_exact.items()),
        # Advantages and rewards.
        *needs(c, c.advantage == "gae", "--advantage gae", "critic_lr"),
        *needs(c, c.advantage == "teacher", "--advantage teacher", "teacher"),
        *needs(c, c.advantage != "teacher", "an --advantage of rewards", "overlong_buffer"),
        (c.advantage == "teacher" and not c.teacher, "--advantage teacher needs --teacher DIR"),
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
        # The loss and its updates.
        *of_objective,
        *needs(c, c.kl_coef, "--kl-coef", "kl", "kl_in"),
        *needs(c, c.importance_cap, "--importance-cap",
               "importance", "importance_of", "importance_low"),
        *needs(c, old_is_own, "--proximal, or --minibatches 1 and no --staleness: else old is the "
               "sampler itself", "importance_cap"),
        (c.importance_low > c.importance_cap > 0,
         f"--importance-low {c.importance_low} is over --importance-cap"),
        (c.clip_low >= 1, f"--clip-low must be less than 1, got {c.clip_low}"),
        (0 < c.dual_clip <= 1 + c.clip_high,
         f"--dual-clip must be over 1 + clip_high (papers: 3), got {c.dual_clip}"),
        (c.minibatches > c.prompts,
         f"--minibatches {c.minibatches} is over --prompts {c.prompts}, so one would be empty: "
         f"lower --minibatches or raise --prompts"),
        # Ranks, trees and the sampler.
        *needs(c, c.mode == "fsdp", "--data-parallel fsdp", "shard_ranks"),
        *needs(c, plan.cp > 1, "a --plan with c", "cp_method"),
        *needs(c, plan.pp > 1, "a --plan with p", "pp_schedule"),
        *needs(c, is_dta, "--tree dta", "chunk_tokens", "recompute"),
        (is_dta and not c.chunk_tokens, "--tree dta needs --chunk-tokens, the size of a chunk"),
        *((is_dta and wrong, f"--tree dta does not support {x}; use --tree sparse")
          for x, wrong in not_by_chunks.items()),
        *needs(c, c.fork_turns, "--fork-turns", "forks"),
        *needs(c, c.forks > 1, "--forks 2 or more", "fork_turns"),
        (c.group % leaves, f"--group {c.group} must divide by forks^fork_turns {leaves}"),
        (c.engine and c.router_bias_rate,
         "--engine has no --router-bias-rate: its format has no such bias"),
        # Tasks and data.
        *needs(c, c.out, "--out DIR", "resume"),
        *needs(c, c.reads_text, "--task jsonl", *OF_TEXT),
        *needs(c, c.task != "guess", "--task jsonl or FILE.py:Class", "reply_timeout"),
        *needs(c, c.template in ("", "chat"), "--template chat", "template_args"),
        *needs(c, not (c.has_whole_template and c.instruction),
               "a --template without {question}", "instruction"),
        (not isinstance(c.system, str),
         f"--template-args: expected a text as system, got {c.system!r}"),
        (is_jsonl and lacks, f"--task jsonl needs {' and '.join(lacks)}"),
        (c.has_whole_template and "{question}" not in c.template,
         f"--template must be chat, raw or a text with {{question}}, got {c.template!r}"),
    ]  # fmt: skip


def of_parts(c, task, shape) -> list:
    """Return the pairs that a run's task and model decide. shape: the ModelConfig of the model."""
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

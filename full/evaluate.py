"""Evaluate and export what a run has trained: the commands `eval` and `export`.

    python -m full eval RUN_OR_DIR     # pass@k on held-out prompts, with intervals
    python -m full export RUN DIR      # a checkpoint as a Hugging Face directory
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import torch

from full.learn.rollouts import Sampler, evaluate, play_held_out, prompts_of_evaluation
from full.model.config import read_json
from full.model.hf import load_hf, save_factors
from full.ranks.checkpoint import checkpoints
from full.run.build import (
    ONE_PROCESS, export_dtypes, one_process, partial_name, policy_in, require_room, write_hf,
)  # fmt: skip
from full.run.config import TASKS, Config, resumed_config
from full.run.directory import RunDirectory, step_of
from full.run.flags import add_flags
from full.run.tasks import Jsonl, make_task
from full.run.text import text_of


def settings_of_run(run, given=None, imported=()) -> Config:
    """Return a run's settings, overridden by `given`, {field: value}.

    imported: names of `task` and `reward`, if the caller imports their files. The caller has to
        give a file that the run had: no file is imported because a directory names it.
    """
    # `resumed_config` requires both fields again. One that is not imported is repeated as stored.
    given = given or {}
    path = Path(run) / "config.json"
    stored = read_json(path, what="the configuration of a run")
    names = [name for name in ("task", "reward") if name in given or name not in imported]
    repeated = {name: f"{stored[name]}" for name in names if name in stored}
    return dataclasses.replace(resumed_config(path, repeated), **given)


def load_policy(source, task=None, *, step=None, dtype="", device="cpu", merged=True, base=""):
    """Load the whole policy of a run or of a Hugging Face directory. Return the model and a name.

    task: the task of a run without --model, which determines the vocabulary.
    step: int. The checkpoint of a run. Default: the newest undamaged one.
    dtype: str. Default: for a run its generator's, for a directory as stored.
    merged: bool. Add the factors of --lora-rank to their matrices.
    base: str. The dtype of these matrices. Default: as in the run.
    """
    if not RunDirectory(source).holds_run:
        if step is not None:
            raise ValueError(f"--step is of a run, and {source} is a checkpoint in another format")
        stored = getattr(torch, dtype) if dtype else None
        model = load_hf(source, dtype=stored, device=device)
        return model.requires_grad_(False), f"{source}"

    # Which checkpoint. Steps are checked before anything large is read.
    config = settings_of_run(source)
    steps = {step_of(path): path for path in checkpoints(source)}
    if not steps or step not in (None, *steps):
        stored = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{source} holds no such checkpoint; those that it holds are of: {stored}")

    # The model's shape is from --model or the flags. `read_checkpoint` names a tensor of another
    # shape.
    RunDirectory(source).require_same_digests("base.json", config)

    def read(path):
        return policy_in(
            path, config, task, dtype or config.rollout_dtype, merged=merged, base=base)

    if step is None:
        path, model = RunDirectory(source).read_newest(read)
    else:
        path, model = steps[step], read(steps[step])
    return model.to(device), f"{source}, {Path(path).name}"


# eval -------------------------------------------------------------------------------------------
# An evaluation measures two things on the same held-out prompts. Greedy decoding shows how many
# the policy solves at its best. Several samples of each prompt estimate how likely one answer
# solves it (pass@1), and one of k answers (pass@k). If the figures differ much, training can help.


# The flags of a run that change an evaluation. All others are refused.
EVAL_FLAGS = (
    "task", "data", "eval_data", "template", "instruction", "template_args", "date", "reward",
    "size", "turns", "eval_prompts", "max_new_tokens", "temperature", "batch_rows", "seed",
    "device",
)  # fmt: skip

NORMAL_95 = 1.959964  # a normal number is within so many deviations 95 % of the time


def pass_at_k(solved, count, k) -> float:
    """Estimate the chance that one of k samples solves a prompt, if `solved` of `count` did.

    Chen et al. 2021, arXiv:2107.03374: 1 - C(count - solved, k) / C(count, k), without bias. The
    simpler 1 - (1 - solved / count)^k is biased: with 1 of 2 solved it is 3/4 for k = 2, and not 1.
    """
    # Of all ways to choose k of the samples, the share that chooses only failures.
    return 1 - math.comb(count - solved, k) / math.comb(count, k)


def wilson(mean, count):
    """Return Wilson's 95 % interval for a chance, given the mean of `count` prompts."""
    # The interval holds every chance p from which the mean is at most 1.96 of p's own deviations,
    # sqrt(p (1 - p) / count), away. So 7 of 7 gives 0.65 to 1, and mean +- 2 deviations 1 to 1.
    #
    # This is for prompts that count 0 or 1. pass@1 and pass@k count a number between 0 and 1. Of
    # all such numbers with mean p, 0 and 1 have the largest variance: x^2 <= x, so the variance
    # mean(x^2) - p^2 is at most p - p^2. For pass@k the interval is right or too wide.
    z2 = NORMAL_95**2 / count
    center = (mean + z2 / 2) / (1 + z2)
    half = math.sqrt(mean * (1 - mean) * z2 + z2 * z2 / 4) / (1 + z2)

    # Rounding may leave an end just beyond 0 or 1, or the mean of 1 just outside.
    return min(max(0.0, center - half), mean), max(min(1.0, center + half), mean)


def evaluated(config, task, sampler, samples):
    """Play each held-out prompt greedily and `samples` times at the temperature. Collective.

    sampler: a Sampler, or an object with its methods.

    Returns figures, name -> (value, low, high); the number of different prompts; and some samples
    as (prompt, answer, reward).
    """
    # The same call as every `eval_every` steps of a run, so the same weights give the same figure
    # if seed, prompts and limits are the run's.
    values = {"solved": evaluate(config, task, sampler)[0]}

    starts, groups = play_held_out(
        config, task, sampler, group=samples, temperature=config.temperature)
    counts = [sum(t.reward >= 1 for t in group) for group in groups]
    powers = [2**n for n in range(samples.bit_length())]  # 1 2 4 of 6 samples, and 6 itself
    for k in sorted({*powers, samples}):
        values[f"pass@{k}"] = float(np.mean([pass_at_k(c, samples, k) for c in counts]))

    # A prompt that is drawn twice counts once: `guess` has 7 prompts, and draws each 10 times.
    different = len({(repr(state), tuple(prompt)) for _, state, prompt in starts})
    figures = {name: (value, *wilson(value, different)) for name, value in values.items()}

    # The first sample of the first prompts, as examples.
    shown = []
    for (_, _, prompt), (t, *_) in zip(starts[:3], groups):
        texts = task.show(t.tokens[: len(prompt)]), task.show(t.tokens[len(prompt) :])
        shown.append((*texts, t.reward))
    return figures, different, shown


def settings_of_evaluation(source, given) -> Config:
    """Return a run's settings, or the defaults for a directory, overridden by `given`."""
    # A given --data replaces both files of the run.
    if "data" in given:
        given = {"eval_data": ""} | given

    # A run's device may be gone, and its plan needs several processes.
    if RunDirectory(source).holds_run:
        given = ONE_PROCESS | {"device": ""} | given
        return settings_of_run(source, given, imported=("task", "reward")).check()
    if "task" not in given:
        raise ValueError(f"{source} is not a run, so say what to ask it: --task NAME, with --data "
                         f"FILE for --task jsonl")  # fmt: skip
    if "eval_data" in given:  # an evaluation trains on no line, so one file is enough
        given = {"data": given["eval_data"]} | given
    return Config(**given | {"model": f"{source}"}).check()


def evaluation(argv) -> int:
    """`eval`: print how many held-out prompts a policy solves, greedily and in several samples."""
    parser = argparse.ArgumentParser("python -m full eval", allow_abbrev=False)
    parser.add_argument("source", metavar="RUN_OR_DIR", help="a run, or a Hugging Face directory")
    parser.add_argument("--step", type=int, help="of the run's checkpoint [the newest]")
    parser.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16"), default="",
        help="of the model's weights [of a run: its generator's; of a directory: as stored]",
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=8, metavar="K", help="of each prompt [8]")
    parser.add_argument(
        "--all-lines", action="store_true", help="jsonl: every line of --eval-data, or of --data, "
        "a file of its own, in place of the tenth that is held out")  # fmt: skip
    fields = [f for f in dataclasses.fields(Config) if f.name in EVAL_FLAGS]
    add_flags(parser.add_argument_group("flags", "default: the run's own; of a directory [these]"),
              fields)  # fmt: skip
    options = parser.parse_args(argv)
    if options.samples < 1:
        raise ValueError(f"--samples must be positive, got {options.samples}")

    # Check all flags before a model is read. The flags that were not typed are the run's.
    given = {f.name: getattr(options, f.name) for f in fields if hasattr(options, f.name)}
    config = settings_of_evaluation(options.source, given)
    if options.all_lines and config.task != "jsonl":
        raise ValueError(f"--all-lines is for --task jsonl, not {config.task}")
    with one_process("an evaluation", config.device, config.threads) as device:
        task = Jsonl(config, all_lines=True) if options.all_lines else make_task(config)
        prompts = len(task.rows[True]) if options.all_lines else prompts_of_evaluation(config, task)
        config = dataclasses.replace(config, eval_prompts=prompts)
        model, name = load_policy(options.source, task, step=options.step, dtype=options.dtype,
                                  device=device)  # fmt: skip
        require_room(config, task, model.config, options.source)
        figures, different, examples = evaluated(config, task, Sampler(model), options.samples)
    if getattr(task, "note", ""):  # what the task has chosen, such as a template
        print(task.note)
    kind = "prompts" if options.all_lines else "held-out prompts"
    print(f"{name}: {config.task}, {prompts_of_evaluation(config, task)} {kind}, "
          f"{different} different; "
          f"{options.samples} samples each at temperature {config.temperature:g}, "
          f"seed {config.seed}")  # fmt: skip
    print_figures(figures, examples)
    return 0


def print_figures(figures, examples):
    """Print figures and examples of `evaluated` for a reader, and a line of JSON for a program."""
    print(f"{'':24}   95 % interval over prompts")
    for name, (value, low, high) in figures.items():
        label = f"{name} (greedy)" if name == "solved" else name
        print(f"{label:16}{value:8.3f}   {low:.3f} - {high:.3f}")
    for prompt, answer, reward in examples:
        print(f"\nprompt: {prompt}\nanswer: {answer}\nreward: {reward:g}")
    print(f"\n{json.dumps(figures)}")


# export -----------------------------------------------------------------------------------------
# A run writes its last weights to OUT/hf. `export` does the same with any checkpoint.


def export(argv) -> int:
    """`export`: write a run's checkpoint as the directory that the run itself writes to OUT/hf."""
    parser = argparse.ArgumentParser("python -m full export", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    parser.add_argument("directory", metavar="DIR", help="to write; not there yet, or empty")
    parser.add_argument("--step", type=int, help="of the run's checkpoint [the newest]")
    parser.add_argument("--task", default="", help="the run's FILE.py:Class, if it had one")
    parser.add_argument("--adapters", action="store_true", help="only the factors of --lora-rank, "
                        "for PEFT")  # fmt: skip
    options = parser.parse_args(argv)

    # An export deletes at most an empty directory.
    directory = Path(options.directory)
    partial = partial_name(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is not empty: give a directory that is, or a new one")
    if partial.exists():
        raise ValueError(f"{partial} is there, where the files are first written: remove it")
    if not RunDirectory(options.run).holds_run:
        raise ValueError(f"expected the directory of a run, got {options.run}")

    # Without --model the shape depends on the task's tokens. A file that only the run's directory
    # names is not imported: the user has to give it.
    config = settings_of_run(options.run)
    if options.adapters and config.lora is None:
        raise ValueError(f"--adapters: {options.run} has none, because it began without "
                         f"--lora-rank")  # fmt: skip
    if options.task and (config.model or config.task in TASKS):
        raise ValueError(f"--task is for a run with a task from a file: {options.run} needs none")
    task = None
    if not config.model:
        given = {"task": options.task} if options.task else {}
        task = make_task(settings_of_run(options.run, given, imported=("task",)))
    with one_process("an export"):
        if options.adapters:  # factors are written in the dtype in which they were trained
            model, name = load_policy(options.run, task, step=options.step, dtype=config.dtype,
                                      merged=False)  # fmt: skip
            save_factors(model, directory, config.model)
        else:
            model, name = load_policy(
                options.run, task, step=options.step, **export_dtypes(config))
            write_hf(model, directory, config.model)
    print(f"wrote {directory}: {name}")
    if config.task == "jsonl" and (words := text_of(config).settings_in_words):
        print(words)
    return 0

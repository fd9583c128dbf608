"""Make the models of a run, read them from its checkpoints, and export them.

A run and all commands make policy, sampler, reference and teacher here, on the meta device. What
does not fit a model is refused before anything is written. `eval`, `export` and `audit` read a
checkpoint's policy in one process, whatever the plan of the run was.
"""

import contextlib
import dataclasses
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from full.learn.engine import Engine
from full.learn.rollouts import prompt_rng
from full.learn.trainer import first_weights, plan_of, set_wide_dtypes
from full.model.config import ModelConfig, read_json
from full.model.exact import ExactTransformer
from full.model.hf import copy_text_files, save_hf
from full.model.lora import add_factors, merge
from full.model.transformer import Transformer
from full.ranks.checkpoint import read_checkpoint, replace_directory
from full.ranks.joining import connection, is_one_of_several, say, warn
from full.ranks.optimizer import persistent_buffers
from full.run.conflicts import of_parts
from full.run.directory import writing
from full.run.tasks import Jsonl, make_task
from train_grpo import EVALUATION, ROLLOUT

# Models on the meta device ----------------------------------------------------------------------

def own_shape(config, task) -> ModelConfig:
    """Return the shape of a model with random weights, from the settings and the task's tokens."""
    return ModelConfig(
        vocab_size=task.vocab_size, eos_token_id=tuple(task.end),
        num_hidden_layers=config.layers, hidden_size=config.hidden,
        intermediate_size=3 * config.hidden, head_dim=config.hidden // config.heads,
        num_attention_heads=config.heads, num_key_value_heads=max(1, config.heads // 2),
    )  # fmt: skip


def shape_of(config, task) -> ModelConfig:
    """Return the shape of the run's model, from its directory or from the settings."""
    shape = ModelConfig.from_hf(config.model) if config.model else own_shape(config, task)
    return dataclasses.replace(shape, router_bias_rate=config.router_bias_rate)


def empty_model(config, shape, dtype) -> Transformer:
    """Make a model on the meta device."""
    with torch.device("meta"):
        model = (ExactTransformer if config.exact else Transformer)(shape)
    return set_wide_dtypes(config, model.to(getattr(torch, dtype)))


def empty_policy(config, shape, base="") -> Transformer:
    """Make the trained model on the meta device. With LoRA it is a base with factors.

    base: str. The dtype of the base. Default: the dtype of products.
    """
    if config.lora is None:
        return empty_model(config, shape, config.dtype)
    # A base never changes, so it needs no masters.
    model = empty_model(config, shape, base or config.compute)
    return add_factors(model, config.lora, getattr(torch, config.dtype))


def build(config, task, shape=None):
    """Make policy, generator and, for a KL, a reference, all on the meta device. Collective.

    shape: ModelConfig. Default: `shape_of` the run.

    The Trainer shards them, allocates this rank's parts, and gives the policy its first weights.
    The first push fills the generator, and `RunDirectory.write_reference` fills the reference. The
    generator may be an `Engine`, which has asked its servers for their names.
    """
    # A reference never changes, so it needs no masters, and has the policy's compute dtype.
    shape = shape or shape_of(config, task)
    model = empty_policy(config, shape)
    generator = empty_model(config, shape, config.rollout_dtype).requires_grad_(False)
    if config.engine:
        generator = Engine(config, generator)
    reference = None
    if config.kl_coef and config.lora is None:
        reference = empty_model(config, shape, config.compute).requires_grad_(False)
    return model, generator, reference


def build_teacher(config):
    """Make the teacher, if there is one, on the meta device in the compute dtype.

    `prepare` compares its tokenizer with the policy's, where the task is `jsonl`.
    """
    if not config.teacher:
        return None
    shape = ModelConfig.from_hf(config.teacher)
    return empty_model(config, shape, config.compute).requires_grad_(False)


def prepare(config, make=make_task):
    """Make the run's task and teacher. ValueError for settings that do not fit task or model.

    make: function from a Config to the task.
    """
    task = make(config)
    shape = shape_of(config, task)
    for is_wrong, text in of_parts(config, task, shape):
        if is_wrong:
            raise ValueError(text)
    # `Grid` and `parallelize` check this too. Here one line names it for all ranks.
    ranks = dict(world=dist.get_world_size(), shard=config.shard_ranks or None)
    plan_of(config).require_fits(config=shape, **ranks)
    # A teacher scores the run's prompts and answers, so it must have room for them as well.
    teacher = build_teacher(config)
    require_room(config, task, shape, config.model)
    if teacher is not None:
        require_room(config, task, teacher.config, config.teacher)
        if isinstance(task, Jsonl):
            task.text.require_same_tokens(config.teacher)

    # A checkpoint's experts may have been balanced by a loss when it was trained.
    raw = read_json(Path(config.model) / "config.json") if config.model else {}
    coef = raw.get("router_aux_loss_coef") if shape.sparse_layers else None
    if coef and not config.router_bias_rate:
        warn(f"the experts of {config.model} were balanced by router_aux_loss_coef {coef}; here "
             f"nothing does that without router_bias_rate")  # fmt: skip
    return task, teacher


def require_room(config, task, shape, source, positions=None):
    """Raise ValueError if a model has too few tokens for the task, or too few positions.

    shape: ModelConfig.
    source: str. The model's directory, or another name for errors.
    positions: number, or infinity. Default: those of the shape.
    """
    if task.vocab_size > shape.vocab_size:
        raise ValueError(f"the task has {task.vocab_size} tokens, {source} {shape.vocab_size}")
    # `generate` refuses this too, but in the middle of a step. A task may know its longest prompt.
    # If it does not, look at the first prompts, one to train on and one held out.
    longest, positions = getattr(task, "longest", 0), positions or shape.max_position_embeddings
    for stream, held_out in ((ROLLOUT, False), (EVALUATION, True)):
        _, prompt = task.prompt(prompt_rng(config.seed, stream, 0, 0), 0, held_out)
        longest = max(longest, len(prompt))
    if longest + config.max_new_tokens > positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {config.max_new_tokens} max_new_tokens exceed the "
            f"{positions} positions of {source or 'the model'}")


# The weights of a run in one process ------------------------------------------------------------

# Settings with which one process computes the same as the run's plan.
ONE_PROCESS = dict(
    plan="", data_parallel="ddp", shard_ranks=0, cp_method="ring", pp_schedule="1f1b", ac="none",
    compile=False,
)  # fmt: skip


@contextlib.contextmanager
def one_process(command, device="cpu", threads=1):
    """Make a process group of this process alone, unless there is one. Yield the device."""
    if (dist.get_world_size() > 1) if dist.is_initialized() else is_one_of_several():
        raise ValueError(f"{command} is one process: start it without torchrun")
    # Checkpoints, prompts and sums need a rank and a number of ranks: 0 and 1.
    if dist.is_initialized():
        yield "cpu"
        return
    with connection(device, threads=threads) as device:
        yield device


def policy_in(path, config, task, dtype, alone=False, merged=True, base=""):
    """Return the whole policy of a checkpoint on the CPU, without gradients.

    alone: bool. No other rank calls it.
    merged: bool. Add the factors of --lora-rank to their matrices.
    base: str. The dtype of the frozen base of these factors. Default: as in the run.
    """
    model = empty_policy(config, shape_of(config, task), base).to_empty(device="cpu")
    if config.lora is not None:  # a checkpoint has the factors, and not their frozen base
        first_weights(model, config.model, config.seed)

    # Read the weights alone: AdamW's two moments are twice as large.
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()
               if p.requires_grad}  # fmt: skip
    weights |= {f"buffer.{name}": x for name, x in persistent_buffers(model).items()}
    read_checkpoint(path, weights, only=("model.", "buffer."), alone=alone)
    dtype = getattr(torch, dtype)
    if config.lora is not None and merged:
        model = merge(model, dtype)
    return set_wide_dtypes(config, model.to(dtype).requires_grad_(False))


def export_dtypes(config) -> dict:
    """Return the dtypes of an exported policy, as keyword arguments of `policy_in`."""
    # The generator's dtype, or in mixed precision the masters', which is finer. Factors were
    # trained with a base that --compute-dtype had rounded. They are added to the base as it is
    # stored, or the export would contain the rounding as if it had been trained.
    dtype = config.dtype if config.is_mixed else config.rollout_dtype
    return dict(dtype=dtype, base=config.dtype)


def export_last(config, task, directory):
    """Write the last weights to OUT/hf for transformers and --model, on rank 0 alone."""
    if config.router_bias_rate:
        say(f"{directory.hf} is not written: its format has no --router-bias-rate")
        return

    model = policy_in(directory.newest(), config, task, alone=True, **export_dtypes(config))
    with writing(directory.hf, directory.advice):
        write_hf(model, directory.hf, config.model)


def partial_name(directory) -> Path:
    """Return the name under which a directory is written first."""
    return Path(f"{Path(directory).absolute()}.tmp")


def write_hf(model, directory, source):
    """Write a complete Hugging Face directory of a model, or nothing. An old one is replaced.

    source: the --model directory whose text files are copied, or "".
    """
    partial = partial_name(directory)
    shutil.rmtree(partial, ignore_errors=True)
    save_hf(model, partial)
    if source and not Path(source).is_dir():
        raise FileNotFoundError(f"the text files of --model {source} are gone")
    if source:
        copy_text_files(source, partial)
    replace_directory(partial, Path(directory))

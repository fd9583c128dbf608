"""A run's weights in one process: adds a reader of its checkpoints to `train_grpo.main`.

What `eval`, `export` and `audit` read, whatever the plan of the run was, and the directory
for transformers that a run leaves at its end.
"""

import contextlib
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from full.learn.trainer import keep_wide
from full.model.hf import copy_text_files, load_hf, save_hf
from full.model.lora import add_factors, merge
from full.model.transformer import draw_weights
from full.ranks.checkpoint import read_checkpoint
from full.ranks.joining import is_one_of_several, joined, say
from full.ranks.optimizer import persistent_buffers
from full.run.build import empty_model, empty_policy, shape_of
from full.run.directory import writing

# One process reads a run without its plan, which is another way to compute the same.
ONE_PROCESS = dict(
    plan="", data_parallel="ddp", shard_ranks=0, ac="none", pp_schedule="1f1b", compile=False
)  # fmt: skip


@contextlib.contextmanager
def one_process(command, device="cpu", threads=1):
    """Make a process group of this process alone, unless there is one; yield the device."""
    require_one_process(command)
    # Checkpoints, prompts and sums ask for their rank and for the number of ranks: 0 and 1.
    if dist.is_initialized():
        yield "cpu"
        return
    with joined(device, threads=threads) as device:
        yield device


def require_one_process(command):
    """Raise ValueError if this process is one of several ranks."""
    if (dist.get_world_size() > 1) if dist.is_initialized() else is_one_of_several():
        raise ValueError(f"{command} is one process: start it without torchrun")


def policy_in(path, config, task, dtype, alone=False, merged=True, base=""):
    """Return the policy of a checkpoint, whole, on the CPU, without gradients.

    alone: no other rank calls it. merged: as one model, if --lora-rank trains factors of it.
    base: str. The dtype of the frozen base of these factors. Default: the one it had in the run.
    """
    # The run has checked that the task fits. Where the model is from a directory, there may be no
    # task here.
    shape = shape_of(config, task)
    if config.lora is None:
        model = empty_policy(config, shape).to_empty(device="cpu")
    else:
        model = empty_model(config, shape, base or config.compute).to_empty(device="cpu")
        if config.model:
            load_hf(config.model, model=model)
        else:
            draw_weights(model, config.seed)
        model = add_factors(model, config.lora, getattr(torch, config.dtype))

    # The weights alone: AdamW's two moments of each are twice as much again, and stay on the disk.
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()
               if p.requires_grad}  # fmt: skip
    weights |= {f"buffer.{name}": x for name, x in persistent_buffers(model).items()}
    read_checkpoint(path, weights, only=("model.", "buffer."), alone=alone)
    dtype = getattr(torch, dtype)
    if config.lora is not None and merged:
        model = merge(model, dtype)
    return keep_wide(config, model.to(dtype).requires_grad_(False))


def of_export(config) -> dict:
    """Return the dtypes of an exported policy, as keyword arguments of `policy_in`."""
    # The generator's dtype, or in mixed precision the masters', which is finer. Factors were
    # trained beside a base that --compute-dtype had rounded. They are exported on the base as it is
    # stored: a rounded one would write its rounding down as if it had been trained.
    dtype = config.dtype if config.is_mixed else config.rollout_dtype
    return dict(dtype=dtype, base=config.dtype)


def export_last(config, task, directory):
    """Write the last weights to OUT/hf for transformers and --model, on rank 0 alone."""
    if config.router_bias_rate:
        say(f"{directory.hf} is not written: its format has no --router-bias-rate")
        return

    model = policy_in(directory.newest(), config, task, alone=True, **of_export(config))
    with writing(directory.hf, directory.advice):
        write_hf(model, directory.hf, config.model)


def beside(directory) -> Path:
    """Return where a directory is first written. A kill leaves it, and the next try deletes it."""
    return Path(f"{Path(directory).absolute()}.tmp")


def write_hf(model, directory, source):
    """Write a model as a Hugging Face directory, all of it or nothing. An old one is replaced.

    source: the --model directory whose text files are copied, or "".
    """
    partial = beside(directory)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        save_hf(model, partial)
        if source and not Path(source).is_dir():
            raise FileNotFoundError(f"the text files of --model {source} are gone")
        if source:
            copy_text_files(source, partial)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # half of a checkpoint would only take room
        raise

    # Between these two lines there is no directory, and never half of one. A directory cannot be
    # renamed to one that holds files, so the old one has to go first.
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)

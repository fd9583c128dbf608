"""The models of a run: adds what settings ask for to `models.Transformer`.

Shapes from settings or from a checkpoint's directory; policy, sampler, reference and teacher on the
meta device; and what does not fit a model, refused before anything is written.
"""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from full.learn.engine import Engine
from full.learn.rollouts import prompt_rng
from full.learn.trainer import keep_wide, plan_of
from full.model.config import ModelConfig, read_json
from full.model.exact import ExactTransformer
from full.model.lora import add_factors
from full.model.transformer import Transformer
from full.ranks.joining import warn
from full.run.conflicts import of_parts, require
from full.run.questions import make_task
from train_grpo import EVALUATION, ROLLOUT


def own_shape(config, task) -> ModelConfig:
    """Return the shape of a model with random weights: the settings', with the task's tokens."""
    return ModelConfig(
        vocab_size=task.vocab_size, eos_token_id=tuple(task.end),
        num_hidden_layers=config.layers, hidden_size=config.hidden,
        intermediate_size=3 * config.hidden, head_dim=config.hidden // config.heads,
        num_attention_heads=config.heads, num_key_value_heads=max(1, config.heads // 2),
    )  # fmt: skip


def shape_of(config, task) -> ModelConfig:
    """Return the shape of the run's model: of a directory or of the settings, with their bias."""
    shape = ModelConfig.from_hf(config.model) if config.model else own_shape(config, task)
    return dataclasses.replace(shape, router_bias_rate=config.router_bias_rate)


def empty_model(config, shape, dtype) -> Transformer:
    """Make a model on the meta device."""
    with torch.device("meta"):
        model = (ExactTransformer if config.exact else Transformer)(shape)
    return keep_wide(config, model.to(getattr(torch, dtype)))


def empty_policy(config, shape) -> Transformer:
    """Make the model that is trained, on the meta device: with LoRA a base and factors."""
    if config.lora is None:
        return empty_model(config, shape, config.dtype)
    # A base never changes, so it needs no masters: it has the precision of the products.
    model = empty_model(config, shape, config.compute)
    return add_factors(model, config.lora, getattr(torch, config.dtype))


def build(config, task):
    """Make policy, generator and, where there is a KL, a reference, all on the meta device.

    The Trainer shards them, allocates this rank's parts, and gives the policy its first weights.
    The first push fills the generator, and `RunDirectory.write_reference` the reference. The
    generator may be an `Engine`, which has asked its servers who they are. Collective.
    """
    # A reference never changes, so it needs no masters: it has the precision in which the policy
    # computes.
    shape = shape_of(config, task)
    model = empty_policy(config, shape)
    generator = empty_model(config, shape, config.rollout_dtype).requires_grad_(False)
    if config.engine:
        generator = Engine(config, generator)
    reference = None
    if config.kl_coef and config.lora is None:
        reference = empty_model(config, shape, config.compute).requires_grad_(False)
    return model, generator, reference


def build_teacher(config, task):
    """Make the teacher, if there is one, on the meta device in the compute dtype.

    That its tokens mean the same is for the user to know: two tokenizers may differ in much.
    """
    if not config.teacher:
        return None
    shape = ModelConfig.from_hf(config.teacher)
    return empty_model(config, shape, config.compute).requires_grad_(False)


def prepare(config, make=make_task):
    """Make the run's task and teacher. ValueError for what does not fit task or model.

    It is what only a task, a package or a model can tell, before anything is written.
    make: a function that makes the task of a Config.
    """
    task = make(config)
    shape = shape_of(config, task)
    require(of_parts(config, task, shape))
    # `Grid` and `parallelize` ask this of everybody. Here one line says it for all ranks.
    ranks = dict(world=dist.get_world_size(), shard=config.shard_ranks or None)
    plan_of(config).require_fits(config=shape, **ranks)
    # A teacher scores the run's prompts and answers, so it must have room for them as well.
    teacher = build_teacher(config, task)
    require_room(config, task, shape, config.model)
    if teacher is not None:
        require_room(config, task, teacher.config, config.teacher)
    tell_of_router_loss(config, shape)
    return task, teacher


def tell_of_router_loss(config, shape):
    """Say in one line if a checkpoint's experts were balanced by a loss in its training."""
    raw = read_json(Path(config.model) / "config.json") if config.model else {}
    coef = raw.get("router_aux_loss_coef") if shape.sparse_layers else None
    if coef and not config.router_bias_rate:
        warn(f"the experts of {config.model} were balanced by router_aux_loss_coef {coef}; here "
             f"nothing does that without router_bias_rate")  # fmt: skip


def require_room(config, task, shape, source):
    """Raise ValueError if a model has no row for a token, or too few positions for an answer.

    source: str. Where the model is from.
    """
    if task.vocab_size > shape.vocab_size:
        raise ValueError(f"the task has {task.vocab_size} tokens, {source} {shape.vocab_size}")
    # `generate` refuses too, but in the middle of a step. A task may know its longest prompt. These
    # are the first prompts, one to train on and one held out.
    longest, positions = getattr(task, "longest", 0), shape.max_position_embeddings
    for stream, held_out in ((ROLLOUT, False), (EVALUATION, True)):
        _, prompt = task.prompt(prompt_rng(config.seed, stream, 0, 0), 0, held_out)
        longest = max(longest, len(prompt))
    if longest + config.max_new_tokens > positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {config.max_new_tokens} max_new_tokens exceed the "
            f"{positions} positions of {source or 'the model'}")

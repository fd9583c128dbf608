"""A run: adds resume, saving and refusals to the program of `train_grpo.py`.

What a run is made of: the shapes and models that its settings ask for, and what is refused before a
directory is touched. Then what surrounds `train_grpo.train` so that it can be killed, resumed,
watched and trusted. If you only want the algorithm, skip this file; `run` here and `Log` in logs.py
say what a run writes.

Equation numbers are those of objectives.py.
"""

import contextlib
import dataclasses
import datetime
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import train_grpo
from full.batches import Demonstrations, RolloutQueue, pending_batches
from full.checkpoint import newest_checkpoint, read_checkpoint, read_newest, sums_of_share
from full.config import _flag, read_date
from full.engine import Engine
from full.exact import ExactTransformer, require_exact_kernels
from full.files import beside, cut_lines, writing
from full.hf import copy_text_files, load_hf, save_hf
from full.logs import (
    Checkpointer, IdleWarning, Log, Logs, RewardWarning, RolloutLog, TruncationWarning,
    read_reference, write_reference,
)  # fmt: skip
from full.lora import add_factors, merge
from full.model_config import ModelConfig, read_json
from full.optimizer import persistent_buffers
from full.questions import make_task
from full.ranks import (
    OBJECT, Interrupted, Progress, Stop, advice_of, agree, current_device, flags_to_resume,
    is_error_of_rank_0, is_one_of_several, is_rank_0, joined, raise_on_all_ranks, say, warn,
)  # fmt: skip
from full.rollouts import Unheard
from full.tasks import Task, TaskError, asking
from full.trainer import Trainer, keep_wide, plan_of
from full.transformer import Transformer, draw_weights
from train_grpo import EVALUATION, ROLLOUT


def own_shape(config, task) -> ModelConfig:
    """Return the shape of a model with random weights: the flags', with the task's tokens."""
    return ModelConfig(
        vocab_size=task.vocab_size, eos_token_id=tuple(task.end),
        num_hidden_layers=config.layers, hidden_size=config.hidden,
        intermediate_size=3 * config.hidden, head_dim=config.hidden // config.heads,
        num_attention_heads=config.heads, num_key_value_heads=max(1, config.heads // 2),
    )  # fmt: skip


def require_rows(task, shape, source):
    """Raise ValueError if the task has tokens that the model of a directory does not have."""
    if task.vocab_size > shape.vocab_size:
        raise ValueError(f"the task has {task.vocab_size} tokens, {source} {shape.vocab_size}")


def shape_of(config, task) -> ModelConfig:
    """Return the shape of the run's model; ValueError if it does not fit task or settings."""
    shape = ModelConfig.from_hf(config.model) if config.model else own_shape(config, task)
    require_rows(task, shape, config.model)
    for name in ("balance_coef", "router_bias_rate", "replay_routes"):
        if getattr(config, name) and not shape.sparse_layers:
            where = config.model or "the model of --layers and --hidden"
            raise ValueError(f"{_flag(name)} is about experts, and {where} has none: leave it out")
    return shape


def empty_model(config, shape, dtype, *, is_teacher=False) -> Transformer:
    """Make a model on the meta device, with what the settings add to all but a teacher."""
    if not is_teacher:
        value_head = shape.value_head or config.advantage == "gae"
        more = dict(value_head=value_head, router_bias_rate=config.router_bias_rate)
        shape = dataclasses.replace(shape, **more)
    with torch.device("meta"):
        model = (ExactTransformer if config.exact else Transformer)(shape)
    return keep_wide(config, model.to(getattr(torch, dtype)))


def empty_policy(config, shape) -> Transformer:
    """Make the model that is trained, on the meta device: with --lora-rank a base and factors."""
    if config.lora is None:
        return empty_model(config, shape, config.dtype)
    # A base never changes, so it needs no masters: it has the precision of the products.
    model = empty_model(config, shape, config.compute)
    return add_factors(model, config.lora, getattr(torch, config.dtype))


def build(config, task):
    """Make policy, generator and, where there is a KL, a reference, all on the meta device.

    The Trainer shards them, allocates this rank's parts, and gives the policy its first weights.
    The first push fills the generator, and `write_reference` the reference. With --engine the
    generator is an `Engine`, which has asked its servers who they are. Collective.
    """
    # A reference never changes, so it needs no masters: it has the precision in which the policy
    # computes.
    shape = shape_of(config, task)
    model = empty_policy(config, shape)
    if config.engine:  # a critic stays with the trainer
        generator = empty_model(config, shape, config.rollout_dtype, is_teacher=True)
        generator = Engine(config, generator)
    else:
        generator = empty_model(config, shape, config.rollout_dtype).requires_grad_(False)
    reference = None
    if config.kl_coef and config.lora is None:
        reference = empty_model(config, shape, config.compute).requires_grad_(False)
    return model, generator, reference


def build_teacher(config, task):
    """Make the model of --teacher, if there is one, on the meta device in the compute dtype.

    That its tokens mean the same is for the user to know: two tokenizers may differ in much.
    """
    if not config.teacher:
        return None
    shape = ModelConfig.from_hf(config.teacher)
    require_rows(task, shape, f"the model of --teacher {config.teacher}")
    return empty_model(config, shape, config.compute, is_teacher=True).requires_grad_(False)


class Ended(NamedTuple):
    """How a run ended."""

    out: str  # its directory
    solved: float | None  # by the last evaluation; None: a signal ended it
    signal: int = 0  # the number of this signal


def start_run(config, progress=None, *, objects=None, log=None, goes_on=False) -> Ended:
    """Set up a run and do it.

    progress: of `naming_lost_ranks`.
    objects: {field of Config: the object that its value names}, of full.api. Default: none.
    log: a function that gets each line of metrics.jsonl, a dict, on rank 0. Default: none.
    goes_on: bool. The process goes on after the run. Then signals get back their handlers, and all
        ranks return when rank 0 has written everything. Otherwise they leave before.
    """
    progress = progress or Progress()
    progress.where = lambda: "setting up"
    # A chat template may write the date. It is the run's, also after midnight and in an audit.
    if config.reads_text and not config.date:
        date = agree(lambda: read_date("").isoformat())
        config = dataclasses.replace(config, date=date)
    task = make_task(config, objects)
    # A task that does not derive from Task has demonstrations if it has a method `demo`.
    if config.demos and getattr(type(task), "demo", Task.demo) is Task.demo:
        raise ValueError(f"{type(task).__name__} has no demonstrations; use --demos 0")
    if config.reply_timeout and not getattr(task, "threads", True):
        raise ValueError(f"--reply-timeout: {type(task).__name__} has threads = False, so its "
                         f"replies are waited for by no other thread: leave one of the two out")
    if config.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise ImportError("--tensorboard: pip install tensorboard")
    # What only the task, a package or the model can tell is asked before anything is written, the
    # same on all ranks.
    shape = shape_of(config, task)
    teacher = build_teacher(config, task)
    shapes = [shape] if teacher is None else [shape, teacher.config]
    for one in shapes:
        require_plan(config, one)
        require_room(config, task, one.max_position_embeddings)
    tell_of_router_loss(config, shape)

    with contextlib.ExitStack() as stack:  # the lock on the run's directory
        model, generator, reference = build(config, task)
        if config.exact:
            require_exact(generator)
        if config.engine:
            require_room(config, task, generator.positions, "the engine")
        trainer = Trainer(config, model, generator=generator, reference=reference, teacher=teacher)
        # All that can be refused has been: only now is a directory claimed.
        out = agree(lambda: prepare_out(config, stack, objects))
        if config.engine:
            generator.begin(f"{out}/engine")
            stack.callback(generator.worker.shutdown, wait=False, cancel_futures=True)
        stop = Stop(goes_on)
        if goes_on:
            stack.callback(stop.close)
        ended = run(config, task, trainer, out, progress, stop, log)

        # COMM: ranks wait for each other for the last time. Then no rank needs another one: rank 0
        # may write for longer than --timeout, and the others leave. Pinned by
        # tests/full/test_faults.py::test_no_rank_waits_for_the_last_export.
        progress.where = lambda: "finished"
        progress.advice = "what the run saved is whole"
        dist.barrier()

        def finish():
            if not ended.signal:
                export(config, task, out)

        if goes_on:
            # COMM: ranks that go on wait for rank 0, in a group without a limit of its own. Pinned
            # by tests/full/test_api.py::test_ranks_return_when_the_export_is_written.
            year = datetime.timedelta(seconds=config.YEAR)
            agree(finish, dist.new_group(backend="gloo", timeout=year))

            # A signal in or after the last step ends nothing here. It is the program's then.
            stop.close()
            if stop.number and not ended.signal:
                signal.raise_signal(stop.number)
        elif dist.get_rank() == 0:
            finish()
        return ended


def require_exact(model):
    """Raise ValueError on all ranks if the machine of one has no exact kernels for a model."""
    problem = None
    try:
        require_exact_kernels(model, current_device())
    except ValueError as error:
        problem = error
    raise_on_all_ranks(problem)


def require_plan(config, shape):
    """Raise ValueError for a plan that does not fit the model's shape or the number of ranks."""
    plan_of(config).require_fits(
        config=shape, world=dist.get_world_size(), ulysses=config.cp_method == "ulysses",
        shard=config.shard_ranks or None,
    )  # fmt: skip


def tell_of_router_loss(config, shape):
    """Say in one line if a checkpoint's experts were balanced by a loss in its training."""
    # transformers' loss is of a whole batch, so it depends on how a batch is cut; (8) does not.
    raw = read_json(Path(config.model) / "config.json") if config.model else {}
    coef = raw.get("router_aux_loss_coef") if shape.sparse_layers else None
    if coef:
        does = f"--balance-coef {config.balance_coef:g} does that here, for each sequence"
        if not config.balance_coef:
            does = "here nothing does: --balance-coef, a loss for each sequence, is 0"
        warn(f"the experts of {config.model} were balanced by router_aux_loss_coef {coef}; {does}")


def require_room(config, task, positions, what="the model"):
    """Raise ValueError if a prompt and an answer are longer than a model or an engine can take."""
    # `generate` refuses too, but on one rank in the middle of a step. Here every rank looks at the
    # same first prompts, one to train on and one held out, so that all refuse together.
    for stream, held_out in ((ROLLOUT, False), (EVALUATION, True)):
        rng = np.random.default_rng([config.seed, stream, 0, 0])
        with asking(task):
            _, prompt = task.prompt(rng, 0, held_out)
        if len(prompt) + config.max_new_tokens > positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and --max-new-tokens {config.max_new_tokens} "
                f"exceed the {positions} positions of {what}"
            )


# The run: resume, export, and reading it again --------------------------------------------------


def run(config, task, trainer, out, progress, stop, tell=None) -> Ended:
    """Do the run in the directory `out`. stop: a Stop. tell: of `Log`, for the loop."""
    began = time.perf_counter()
    progress.where = lambda: trainer.where
    progress.advice = advice_of(out)
    first_step, origin, pending = restore(config, trainer, out)
    introduce(config, task, trainer, out, first_step, origin)
    queue = None  # of the loop, which demonstrations may come before
    try:
        if first_step < 0:
            source = Demonstrations(config, task, trainer, first_step)
            checkpointer = Checkpointer(config, trainer, source, out, stop)
            # The table and its bar stay on the screen.
            with contextlib.closing(Log(config, trainer, source, out)) as log:
                supervised = dataclasses.replace(config, steps=0)
                logs = Logs(log, checkpointer)
                train_grpo.train(supervised, source, trainer, logs.step, first_step)

            # The loop begins with its own reference and optimizer. The second moments of a
            # converged supervised fit are tiny: kept, they would make the first
            # policy-gradient steps ten times too long.
            trainer.optimizer.state.clear()
            write_reference(out, trainer)
            checkpointer.save(0)

        queue = RolloutQueue(config, task, trainer, max(0, first_step), pending)
        with contextlib.closing(Log(config, trainer, queue, out, tell)) as log:
            if first_step <= 0:
                log.before(queue.evaluate())
            rollouts = RolloutLog(config, task, queue, out)
            checkpointer = Checkpointer(config, trainer, queue, out, stop)
            # `log` is first: it reads the clock, and a step's seconds are without writing rollouts.
            warnings = [kind(config) for kind in (TruncationWarning, RewardWarning, IdleWarning)]
            logs = Logs(log, rollouts, *warnings, checkpointer)
            solved = train_grpo.train(config, queue, trainer, logs.step, queue.first_step)
            if solved is None:  # resumed at its last step
                solved = queue.evaluate()
    except Interrupted as interrupted:
        return Ended(out, None, interrupted.args[0])
    except Unheard as unheard:
        text, number = unheard.args
        state = Checkpointer(config, trainer, queue, out, stop).rescue()
        if not number:
            raise ValueError(f"{text}: {state}; {advice_of(out)}") from unheard
        say(f"{signal.Signals(number).name}: {text}: {state}; {advice_of(out)}")
        return Ended(out, None, number)

    if rollouts.text is not None:  # a run that was resumed at its last step has played nothing
        say(f"sample: {rollouts.text}")
    seconds = time.perf_counter() - began
    say(f"eval/solved {solved:.3f} after {config.steps} steps, {seconds:.0f} s")
    return Ended(out, solved)


def introduce(config, task, trainer, out, first_step, origin):
    """Say what is trained, how and where, and cut files to that step. Collective."""
    # All settings are in config.json.
    c = config
    world = dist.get_world_size()
    if first_step < 0:
        origin += f", first {-first_step} supervised steps"
    dtype = f"{c.dtype}, computes in {c.compute}" if c.is_mixed else c.dtype
    trained = f" ({trainer.trained:,} trained)" if c.lora_rank else ""
    say(f"{c.task}: {trainer.size:,} parameters{trained}, {origin}")
    say(f"from step {max(0, first_step)} of {c.steps}: {c.prompts} groups of {c.group} a step, "
        f"{world} rank(s), plan {c.plan or f'd{world}'}, {c.data_parallel}, "
        f"{trainer.device.type}, {dtype}")  # fmt: skip
    say(f"out {out}: `python -m full plot {out}` draws it; Ctrl-C saves, {flags_to_resume(out)} "
        f"goes on")  # fmt: skip
    if c.proximal and c.rounds_apart:
        say("old log-probs are the trainer's, since the sampler rounds otherwise; --no-proximal "
            "takes the sampler's")  # fmt: skip
    if getattr(task, "note", ""):  # what a task has decided, such as a template
        say(task.note)

    # Lines after the checkpoint belong to steps that are now done again.
    firsts = dict.fromkeys(("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"), max(0, first_step))
    if c.demos:
        firsts["demos.jsonl"] = c.demos + min(0, first_step)

    def cut():
        for name, step in firsts.items():
            with writing(Path(out, name), advice_of(out)):
                cut_lines(Path(out, name), step)

    agree(cut)


def restore(config, trainer, out):
    """Bring a trainer to where its run goes on. Collective.

    Returns the first step to do, the source of the weights in words, and the pending batches.

    Supervised steps are the steps -K .. -1 of a run with --demos K, in checkpoints demos-NNNNNNNN
    of their own, which count from 0. When they are done, step-00000000 takes the place of these.
    """
    # The newest checkpoint of the loop, then of the supervised steps, then the very beginning.
    if config.resume:
        path, state = read_newest(out, trainer.load_checkpoint)
        if path:
            pending = pending_batches(config, trainer, path, state)
            read_reference(out, trainer)
            return state["step"], f"the weights of {path}", pending
        path, state = read_newest(out, trainer.load_checkpoint, "demos")
        if path:
            return state["step"] - config.demos, f"the weights of {path}", {}
    origin = f"the weights of {config.model}" if config.model else f"random of seed {config.seed}"
    if config.resume:
        origin += f" (no checkpoint in {out} yet)"
    if not config.demos:
        write_reference(out, trainer)
    return -config.demos, origin, {}


def export(config, task, out):
    """Write the last weights to OUT/hf for transformers, `chat` and --model, on rank 0 alone."""
    # Only this needs the package, and the run is over: its checkpoint holds the weights.
    directory = f"{out}/hf"
    if config.router_bias_rate:
        say(f"{directory} is not written: its format has no --router-bias-rate")
        return
    if importlib.util.find_spec("safetensors") is None:
        words = ["export", out, directory]
        if ":" in config.task and not config.model:  # else the shape is --model's
            words += ["--task", config.task]
        how = f"python -m full {shlex.join(words)}"
        if config.task.startswith(OBJECT):
            how = flags_to_resume(out)
        say(f"{directory} not written: pip install safetensors, and then {how}")
        return

    # The weights of the last checkpoint in the generator's dtype, or in mixed precision the
    # masters, which are finer.
    dtype = config.dtype if config.is_mixed else config.rollout_dtype
    model = policy_in(newest_checkpoint(out), config, task, dtype, alone=True)
    with writing(directory, advice_of(out)):
        write_hf(model, directory, config.model)


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


# One process reads a run without its plan, which is another way to compute the same.
ONE_PROCESS = dict(
    plan="", data_parallel="ddp", ac="none", cp_method="ring", pp_schedule="1f1b", shard_ranks=0,
    offload=False, compile=False,
)  # fmt: skip


@contextlib.contextmanager
def one_process(command, device="cpu", threads=1):
    """Make a process group of this process alone, unless there is one; yield the device."""
    require_one_process(command)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")

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


def policy_in(path, config, task, dtype, alone=False, merged=True):
    """Return the policy of a checkpoint, whole, on the CPU, without gradients.

    alone: no other rank calls it. merged: as one model, if --lora-rank trains factors of it.
    """
    # The run has checked that the task fits. With --model there may be no task here.
    shape = ModelConfig.from_hf(config.model) if config.model else own_shape(config, task)
    if config.lora is None:
        model = empty_policy(config, shape).to_empty(device="cpu")
    else:
        model = empty_model(config, shape, config.compute).to_empty(device="cpu")
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


# The run's directory -----------------------------------------------------------------------------
# Who may write where, and how an error ends the process.


@contextlib.contextmanager
def locked(out):
    """Hold a run's directory by the kernel's lock on OUT/lock, which ends with its process."""
    # "a" makes the file where there is none and changes nothing in it. LOCK_NB: refuse at once if
    # another process has it, and do not wait for that process to end.
    with (Path(out) / "lock").open("a", encoding="utf-8") as file:
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{out} is in use by another process: wait for it to end, or choose "
                             f"another --out") from error  # fmt: skip
        except (ImportError, OSError) as error:
            text = f"warning: {out} cannot be locked ({error}): let no other run write there"
            print(text, file=sys.stderr)
        yield


def refuse_directory(config, out):
    """Raise ValueError if this run may not have the directory: nothing is overwritten unasked."""
    config_json = out / "config.json"  # Hugging Face checkpoints have one too
    holds_run = config_json.exists() and b'"advantage"' in config_json.read_bytes()
    # A start that was killed, or that is in flight, has left no more than these files.
    found = {path.name for path in out.iterdir()} if out.exists() else set()
    known = {"config.tmp", "lock"}
    if "config.tmp" in found:
        known |= {"data.json", "base.json"}
    if holds_run and not config.resume:
        raise ValueError(f"{out} holds a run: --resume to go on with it, or choose another --out")
    if not holds_run and found - known:
        raise ValueError(f"{out} holds files that are not a run's; choose another --out")


def first_free_directory(config):
    """Make and return the first of runs/TASK-0, runs/TASK-1, .. that does not exist yet."""
    name = config.task.rpartition(":")[2]  # of FILE.py:Class the class
    for n in itertools.count():
        out = Path("runs") / f"{name}-{n}"
        # Making it is the claim: of two runs that start in one instant, one gets this error.
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out


def note_data(config, out, objects=None):
    """Store the checksums of the data files; on --resume, raise ValueError if one differs."""
    # A step draws lines by their number. With other lines a resumed run would go on as if nothing
    # had happened: neither the run that began, nor a run that anybody could repeat.
    if config.task != "jsonl":
        return
    files = {name: getattr(config, name) for name in ("data", "eval_data")}
    sums = {name: zlib.crc32(content_of(name, x, objects)) for name, x in files.items() if x}
    path = out / "data.json"
    if not (config.resume and path.exists()):
        path.write_text(json.dumps(sums) + "\n", encoding="utf-8")
        return
    stored = read_json(path)
    for name, checksum in sums.items():
        if stored.get(name) != checksum:
            raise ValueError(f"{files[name]} ({_flag(name)}) is not what it was when {out} began: "
                             f"put the old lines back, or start a new run")  # fmt: skip


def content_of(field, path, objects) -> bytes:
    """Return the bytes of a data file, or the bytes that an object's rows would be in a file."""
    if field in (objects or {}):
        return "".join(json.dumps(row) + "\n" for row in objects[field]).encode()
    return Path(path).read_bytes()


def note_base(config, out):
    """Store the checksums of the frozen base; on --resume, raise ValueError if they differ."""
    if config.lora is None or not config.model:  # a base of random weights is drawn by the seed
        return
    out = Path(out)
    if config.resume and (out / "config.json").exists():
        require_base(config, out)
    else:
        text = json.dumps(sums_of_base(config)) + "\n"
        (out / "base.json").write_text(text, encoding="utf-8")


def sums_of_base(config) -> dict:
    """Return {name: [size, checksum]} of the files that say what a base computes."""
    # Two bases of the same weights differ if their config.json has another epsilon, for example.
    files = sorted(file.name for file in Path(config.model).glob("*.safetensors"))
    return sums_of_share(config.model, ["config.json", *files], alone=True)


def require_base(config, out):
    """Raise ValueError if --model is not what it was when the run began."""
    # A checkpoint of factors means nothing without the very base that they were trained beside.
    path = Path(out) / "base.json"
    has_files = config.lora is not None and config.model
    if has_files and read_json(path, what="the checksums of a base") != sums_of_base(config):
        raise ValueError(f"{config.model} (--model) is not what it was when {out} began, and its "
                         f"factors are of that base: put the old files back")  # fmt: skip


def prepare_out(config, stack, objects=None) -> str:
    """Choose, lock (until `stack` is closed) and fill the run's directory on rank 0, or refuse."""
    # A directory is looked at twice: before the lock's file is written into it, because a
    # stranger's directory must not get that file, and under the lock, because only then no other
    # run can change what was seen.
    out = Path(config.out or "runs")
    with writing(out, "start again; or choose another --out"):
        if not config.out:
            out = first_free_directory(config)
        elif not (out / "lock").exists():
            refuse_directory(config, out)
            out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(out))
        refuse_directory(config, out)
        if config.resume and not (out / "config.json").exists():
            say(f"{out} holds no run to resume: one begins")

        # The settings get their name last, and whole or not at all: a directory that has them is a
        # run's. Until then config.tmp says that the checksums are a start's, and not a stranger's.
        stored = dataclasses.asdict(config)
        stored |= {"resume": False, "out": str(out)}
        partial = out / "config.tmp"
        partial.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        try:
            note_data(config, out, objects)
            note_base(config, out)
        except ValueError:  # a run that goes on, with other files
            partial.unlink()
            raise
        partial.replace(out / "config.json")
    return str(out)


# What a command may raise: something is wrong with flags, files, packages or numbers.
ERRORS = ValueError, ImportError, OSError, FloatingPointError


PATIENCE = 30  # seconds; torchrun ends the other ranks as soon as rank 0 has ended


def report(error, alike=False) -> int:
    """Name an error in one line on stderr, of a task's own code with its traceback. Return 2.

    alike: all ranks have this error. Ranks that have met find it out. Then only rank 0 names it.
    """
    # torchrun ends all ranks when one ends, so the others leave rank 0 the time to print.
    alike = alike or is_error_of_rank_0(error)
    if alike and not is_rank_0():
        time.sleep(PATIENCE)
        return leave(2)
    if isinstance(error, TaskError) and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    # One write, so that the lines of two ranks do not run into each other.
    who = f"rank {os.environ['RANK']}: " if os.environ.get("RANK") else ""
    sys.stderr.write(f"{who}error: {error}\n")
    sys.stderr.flush()
    return leave(2)  # a clean teardown would wait for ranks that may be gone or stuck


def leave(code, at_once=False) -> int:
    """Return the exit code. Of several ranks, or at_once, exit here: gloo may abort at an end."""
    if at_once or is_one_of_several():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code

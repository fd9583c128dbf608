"""Do a run: set it up, resume it, do its steps, save it, and end it.

This file surrounds `train_grpo.train`, so that a run can be killed, resumed, watched and audited.
If you only want the algorithm, skip it.
"""

import contextlib
import dataclasses
import datetime
import signal
import time
from typing import NamedTuple

import torch.distributed as dist

import train_grpo
from full.learn.batches import RolloutQueue, pending_batches
from full.learn.rollouts import Sampler
from full.learn.trainer import Trainer
from full.model.exact import require_exact_kernels
from full.ranks.joining import (
    Interrupted, Progress, ReplyTimeout, Stop, agree, current_device, errors_on_all_ranks, say,
    warn,
)  # fmt: skip
from full.ranks.places import local
from full.run.build import build, export_last, prepare, require_room
from full.run.config import read_date
from full.run.directory import Checkpointer, RunDirectory, audits_in_words
from full.run.logs import Log, RolloutLog
from full.run.tasks import make_task


class Ended(NamedTuple):
    """How a run ended."""

    directory: RunDirectory
    solved: float | None  # by the last evaluation; None: a signal ended it
    signal: int = 0  # the number of this signal


def start_run(config, progress=None, *, make=make_task, log=None, returns_to_caller=False) -> Ended:
    """Set up a run and do it.

    progress: of `naming_lost_ranks`.
    make: function from a Config to the task. Default: makes the task that --task names.
    log: function of each line of metrics.jsonl, a dict, on rank 0. Default: none.
    returns_to_caller: bool. The process continues after the run. Then signals get their handlers
        back, and process groups are destroyed.
    """
    progress = progress or Progress()
    progress.where = lambda: "setting up"
    # A chat template may write the date. A run keeps its date, after midnight and in an audit.
    if config.reads_text and not config.date:
        date = agree(lambda: read_date("").isoformat())
        config = dataclasses.replace(config, date=date)

    with contextlib.ExitStack() as stack:
        task, trainer = set_up(config, make)
        # Everything that can be refused has been checked, so a directory is claimed only now. Rank
        # 0 claims it and holds its lock until the stack closes. The other ranks get the path.
        directory = RunDirectory(agree(lambda: RunDirectory.claim(config, stack, task).path))
        if config.engine:
            engine = trainer.sampler
            engine.begin(directory.engine)
            stack.callback(engine.worker.shutdown, wait=False, cancel_futures=True)
        stop = Stop(returns_to_caller)
        if returns_to_caller:
            stack.callback(stop.close)
            stack.callback(close_groups, trainer)
        ended = run(config, task, trainer, directory, progress, stop, log)
        export_on_all_ranks(config, task, ended, progress)
        if returns_to_caller:  # a signal during or after the last step is for the program
            stop.close()
            if stop.number and not ended.signal:
                signal.raise_signal(stop.number)
        return ended


def set_up(config, make):
    """Make the task and the trainer of a run, or raise what is wrong on all ranks. Collective."""
    with errors_on_all_ranks():
        task, teacher = prepare(config, make)
    model, generator, reference = build(config, task)
    if config.exact:
        with errors_on_all_ranks():
            require_exact_kernels(generator, current_device())
    if config.engine:
        shape = dataclasses.replace(model.config, max_position_embeddings=generator.positions)
        require_room(config, task, shape, "the engine")
    trainer = Trainer(config, model, generator=generator, reference=reference, teacher=teacher)
    return task, trainer


def export_on_all_ranks(config, task, ended, progress):
    """Export the last weights on rank 0, unless a signal ended the run. The other ranks wait."""
    # COMM: the last wait of all ranks. Their group has its own limit, because an export may take
    # longer than --timeout. Pinned by
    # tests/full/test_api.py::test_ranks_return_when_the_export_is_written.
    progress.where = lambda: "finished"
    progress.advice = "what the run saved is whole"
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=config.YEAR))
    agree(lambda: None if ended.signal else export_last(config, task, ended.directory), group)
    dist.destroy_process_group(group)


def close_groups(trainer):
    """Destroy the process groups of a trainer and its sampler."""
    sampler = trainer.sampler
    groups = {*trainer.grid.made.values(), getattr(sampler, "group", None)}
    if isinstance(sampler, Sampler):
        groups |= {*sampler.model.part.grid.made.values()}
    for group in groups - {None, dist.group.WORLD}:  # None: a group of other ranks
        dist.destroy_process_group(group)


def run(config, task, trainer, directory, progress, stop, callback=None) -> Ended:
    """Do the run in its directory. stop: a Stop. callback: of `Log`."""
    began = time.perf_counter()
    progress.where = lambda: trainer.where
    progress.advice = directory.advice
    first_step, origin, pending = restore(config, trainer, directory)
    introduce(config, task, trainer, directory, first_step, origin)
    # Lines after the checkpoint belong to steps that are now done again.
    agree(lambda: directory.cut(first_step))
    queue = RolloutQueue(config, task, trainer, first_step, pending)
    rollouts = RolloutLog(config, task, queue, directory)
    saves = Checkpointer(config, trainer, queue, directory, stop)

    def after_step(*results):
        # `log` is first: it reads the clock, so that a step's seconds exclude writing rollouts.
        for each in (log, rollouts, saves):
            each.step(*results)

    try:
        with contextlib.closing(Log(config, trainer, queue, directory, callback)) as log:
            if first_step == 0:
                log.before(queue.evaluate())
            solved = train_grpo.train(config, queue, trainer, after_step, first_step)
            if solved is None:  # resumed after its last step
                solved = queue.evaluate()
    # A signal ends the loop after a step that all ranks have saved.
    except Interrupted as interrupted:
        return Ended(directory, None, interrupted.args[0])
    # A reply did not come. The state before the step is saved, and the batch is lost. Either a
    # signal ended the wait, or --reply-timeout, which is an error.
    except ReplyTimeout as timeout:
        text, number = timeout.args
        message = f"{text}: {saves.rescue()}; {directory.advice}"
        if not number:
            raise ValueError(message) from timeout
        say(f"{signal.Signals(number).name}: {message}")
        return Ended(directory, None, number)

    if rollouts.text is not None:  # a run resumed after its last step has played nothing
        say(f"sample: {rollouts.text}")
    say(agree(lambda: audits_in_words(config, directory)))
    seconds = time.perf_counter() - began
    say(f"eval/solved {solved:.3f} after {config.steps} steps, {seconds:.0f} s")
    return Ended(directory, solved)


def introduce(config, task, trainer, directory, first_step, origin):
    """Print what is trained, how and where. config.json has all settings."""
    c = config
    world = dist.get_world_size()
    dtype = f"{c.dtype}, computes in {c.compute}" if c.is_mixed else c.dtype
    trained = f" ({trainer.trained:,} trained)" if c.lora_rank else ""
    say(f"{c.task}: {trainer.size:,} parameters{trained}, {origin}")
    say(f"from step {first_step} of {c.steps}: {c.prompts} groups of {c.group} a step, "
        f"{world} rank(s), plan {c.plan or f'd{world}'}, {c.data_parallel}, "
        f"{trainer.device.type}, {dtype}")  # fmt: skip
    say(f"out {directory}: `python -m full plot {directory}` draws it; Ctrl-C saves, "
        f"{directory.flags_to_resume} goes on")  # fmt: skip
    share = lost_to_rounding(trainer.model, c.lr) if c.dtype == "bfloat16" else 0.0
    if share > 0.001:
        warn(f"--dtype bfloat16 has no finer masters: rounding undoes a step of --lr {c.lr:g} in "
             f"{share:.1%} of the weights; set --dtype float32 --compute-dtype bfloat16")
    if c.kl_coef and (c.kl, c.kl_in) == ("k1", "loss"):
        warn("--kl k1 in the loss has a gradient of mean 0, so it keeps the policy near nothing: "
             "--kl k3, or --kl-in reward")  # fmt: skip
    if c.proximal and c.sampler_rounds_differently:
        say("old log-probs are the trainer's, since the sampler rounds otherwise; --no-proximal "
            "takes the sampler's")  # fmt: skip
    if getattr(task, "note", ""):  # what a task has chosen, such as a template
        say(task.note)


def lost_to_rounding(model, step) -> float:
    """Return the fraction of this rank's trained weights that a step leaves unchanged."""
    # AdamW's steps are about as large as the learning rate. A bfloat16 number near 0.02 has no
    # neighbor within 6e-5, so a rate of 1e-6 never changes it.
    weights = [local(p.detach()) for p in model.parameters() if p.requires_grad]
    unchanged = sum(int(((p + step == p) & (p - step == p)).sum()) for p in weights)
    return unchanged / max(1, sum(p.numel() for p in weights))


def restore(config, trainer, directory):
    """Load the newest checkpoint of a resumed run, or begin a run. Collective.

    Returns the first step to do, the source of the weights in words, and the pending batches.
    """
    if config.resume:
        path, state = directory.read_newest(trainer.load_checkpoint)
        if path:
            pending = pending_batches(config, trainer, state)
            directory.read_reference(trainer)
            return state["step"], f"the weights of {path}", pending
    origin = f"the weights of {config.model}" if config.model else f"random of seed {config.seed}"
    if config.resume:
        origin += f" (no checkpoint in {directory} yet)"
    directory.write_reference(trainer)
    return 0, origin, {}

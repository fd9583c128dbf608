"""Runs from Python: adds objects, results and exceptions to the program of `train_grpo.py`.

    from full.api import Config, audit, run

    result = run(Config(steps=20), task=MyTask(), log=print)
    print(result.solved, audit(result, task=MyTask()).verdict)

A run is the command line's: the same settings, directory, metrics and resume, bit for bit, in one
process, in a notebook, or in a script under torchrun. Every rank gives objects where a flag names a
file. A wrong setting is a ValueError, an error in a task is a TaskError, and no call ends the
process. After a call, signal handlers, threads and process groups are as they were before.
"""

import dataclasses
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from full.audit import Report, audited
from full.config import Config, resumed_config
from full.exits import replacing_characters
from full.export import require_one_process
from full.questions import require_task
from full.ranks import Interrupted, Progress, agree, joined, naming_lost_ranks
from full.run import start_run
from full.tasks import Task, TaskError, names_of

__all__ = "Config", "Interrupted", "Report", "Result", "Task", "TaskError", "audit", "run"


@dataclass(frozen=True)
class Result:
    """What a run has left. A function that takes a path takes it as the run's directory.

    out: Path. The run's directory. Its folder hf has the last weights for transformers.
    solved: float. Which part of the held-out prompts the last weights solve.
    metrics: list of dict. The lines of metrics.jsonl, one a step, of a resumed run from step 0 on.
    checkpoint: Path. The newest checkpoint.
    """

    out: Path
    solved: float
    metrics: list = dataclasses.field(repr=False)
    checkpoint: Path

    def __fspath__(self):
        return os.fspath(self.out)


@replacing_characters()
def run(
    config, *, task=None, reward=None, dataset=None, eval_dataset=None, log=None
) -> Result:  # fmt: skip
    """Do a run. Return its Result on every rank. Collective under torchrun.

    config: Config. Its fields are the flags of the command line. With resume=True the fields that
        were not given are the stored run's.
    task: an object with the methods of `Task`. Default: the task that config.task names.
    reward: function (text, row) -> number. For the task jsonl, in place of its --reward.
    dataset: rows, each a dict like a line of --data. The task is then jsonl, which needs --model.
    eval_dataset: rows to evaluate on. Default: the tenth of the dataset that is held out.
    log: function of a step's metrics, a dict: a line of metrics.jsonl. Rank 0 calls it.

    A process does one run at a time. A process group that is on is used and kept. Ctrl-C ends the
    run after the step: it saves, and KeyboardInterrupt is raised. A second Ctrl-C raises it at
    once. SIGTERM saves too, and `Interrupted` is raised. Only the main thread sees signals.
    """
    if not isinstance(config, Config):
        raise ValueError(f"expected a Config of full.api, got {config!r}")
    if log is not None and not callable(log):
        raise ValueError(f"expected log to be a function of a step's metrics, got {log!r}")
    objects = objects_of(task, reward, dataset, eval_dataset)
    config = settings_of(config, objects)
    if "task" not in objects:
        require_task(config)

    progress = Progress()
    how = dict(timeout=config.timeout, threads=config.threads)
    with naming_lost_ranks(progress), joined(config.device, **how):
        ended = start_run(config, progress, objects=objects, log=log, goes_on=True)
        found = ended.directory
        metrics, checkpoint = agree(lambda: (found.lines(found.METRICS), found.newest()))
    if ended.signal:
        text = f"full.api.run(Config(out={str(found)!r}, resume=True), ..) goes on"
        if ended.signal == signal.SIGINT:
            raise KeyboardInterrupt(text)
        raise Interrupted(ended.signal, text)
    return Result(found.path, ended.solved, metrics, checkpoint)


def audit(
    run, *, task=None, reward=None, dataset=None, eval_dataset=None, step=None, group=None,
    tell=lambda line: None,
) -> Report:  # fmt: skip
    """Repeat a step of a run from its definition. Return the Report of full/audit.py.

    run: a Result, or the directory of a run.
    task, reward, dataset, eval_dataset: the objects that the run had, as in `run`. task and reward
        may also be the FILE.py:Class and the FILE.py:function of a run of the command line.
    step: int. Default: the last that a checkpoint's weights sampled, or 0.
    group: int. The group to show, spelled out. Default: the first with unequal rewards.
    tell: function of a line that says how far the audit is.

    `Report.verdict` says it in a line, and `as_text` of full/report.py in a table. ValueError if
    the step cannot be audited.
    """
    files = {name: spec for name, spec in (("task", task), ("reward", reward))
             if isinstance(spec, str)}  # fmt: skip
    task, reward = (None if isinstance(thing, str) else thing for thing in (task, reward))
    objects = objects_of(task, reward, dataset, eval_dataset)
    require_one_process("an audit")
    with joined("cpu"):
        return audited(Path(run), step, group, **files, tell=tell, objects=objects)


def objects_of(task, reward, dataset, eval_dataset) -> dict:
    """Return {field of Config: object} of what was given; ValueError for an object of no use."""
    objects = dict(task=task, reward=reward, data=dataset, eval_data=eval_dataset)
    objects = {name: thing for name, thing in objects.items() if thing is not None}
    if "task" in objects:
        if isinstance(task, type):
            raise ValueError(f"expected a task, got its class {task.__name__}: make an object")
        lacks = [x for x in ("prompt", "reply") if not callable(getattr(task, x, None))]
        if lacks:
            raise ValueError(f"expected a task with vocab_size, end, prompt and reply, got "
                             f"{task!r} without {' and '.join(lacks)}")  # fmt: skip
    if "task" in objects and len(objects) > 1:
        raise ValueError("a task gives its own prompts and rewards: reward, dataset and "
                         "eval_dataset are for the task jsonl")  # fmt: skip
    if "reward" in objects and not callable(reward):
        raise ValueError(f"expected reward to be a function (text, row) -> number, got {reward!r}")
    for field, name in (("data", "dataset"), ("eval_data", "eval_dataset")):
        if field in objects:
            objects[field] = rows_of(objects[field], name)
    return objects


def rows_of(dataset, name) -> list:
    """Return the rows of a dataset as they would be read from a file of JSON lines."""
    if isinstance(dataset, str | Path) or not hasattr(dataset, "__iter__"):
        raise ValueError(f"expected {name} to be rows, each a dict, got {dataset!r}")
    rows = []
    for number, row in enumerate(dataset, 1):
        try:
            row = json.loads(json.dumps(row))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} row {number} cannot be a line of JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"expected {name} row {number} to be a dict, got {row!r}")
        rows.append(row)
    return rows


def settings_of(config, objects) -> Config:
    """Return the checked settings of a run: a field whose object was given holds its name.

    With resume=True the fields that were not given to Config are those of the run in config.out.
    """
    names = names_of(objects)
    for field in names:
        value = getattr(config, field)
        if value not in (getattr(Config, field), names[field]):
            raise ValueError(f"expected one {field}, got Config({field}={value!r}) and an object")
    if {"data", "eval_data"} & {*names} and config.task == Config.task:
        names["task"] = "jsonl"  # a dataset is nothing else

    # A program may give a file as a Path. What else a value must not be, `check` says.
    given = config.given()
    names |= {name: f"{x}" for name, x in given.items() if isinstance(x, Path)}
    path = Path(f"{config.out}") / "config.json"
    if config.resume and config.out and path.exists():
        settings = resumed_config(path, given | names)
    else:
        settings = dataclasses.replace(config, **names)
    if {"reward", "data", "eval_data"} & {*objects} and settings.task != "jsonl":
        raise ValueError(f"reward, dataset and eval_dataset are for the task jsonl, and the task "
                         f"is {settings.task}")  # fmt: skip
    return settings.check()

"""Run and audit from Python, with objects where the command line has files.

    from full.api import Config, audit, run

    result = run(Config(steps=20), task=MyTask(), log=print)
    print(result.solved, audit(result, task=MyTask()).verdict)

A run is the command line's: the same settings, directory and metrics, bit for bit, in one process,
in a notebook, or in a script under torchrun. Every rank gives objects where a flag names a file. A
run that was given objects can be resumed or audited only from Python; the task in its config.json
is `python:MyTask`. A wrong setting is a ValueError. An error in a task or a reward is raised as it
is, with a note of the rollout. No call ends the process. After it, signal handlers, threads and
process groups are as before.
"""

import contextlib
import dataclasses
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from full.audit.audit import Report, audited
from full.ranks.joining import PYTHON, Interrupted, Progress, agree, joined, naming_lost_ranks
from full.run.build import one_process
from full.run.config import Config
from full.run.logs import replacing_characters
from full.run.run import start_run
from full.run.tasks import Jsonl, Task, make_task, require_task, require_usable
from full.run.text import naming

__all__ = "Config", "Interrupted", "Report", "Result", "Task", "audit", "run"


@contextlib.contextmanager
def refusing_exits():
    """Turn a user's sys.exit into an error: a run that it ends has not done its steps."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"a task or a reward called sys.exit({error.code!r})") from error


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


@refusing_exits()
@replacing_characters()
def run(
    config, *, task=None, reward=None, dataset=None, eval_dataset=None, log=None
) -> Result:  # fmt: skip
    """Do a run. Return its Result on every rank. Collective under torchrun.

    config: Config. Its fields are the flags of the command line. With resume=True the fields that
        were not given are the stored run's, and the objects have to be given again.
    task: an object with the methods of `Task`. Default: the task that config.task names.
    reward: function (text, row) -> number. For the task jsonl, in place of its --reward.
    dataset: rows, each a dict like a line of --data. The task is then jsonl, which needs --model.
    eval_dataset: rows to evaluate on. Default: the tenth of the dataset that is held out.
    log: function of a step's metrics, a dict: a line of metrics.jsonl. Rank 0 calls it.

    A process does one run at a time. A process group that is on is used and kept. Ctrl-C ends the
    run after the step: it saves, and KeyboardInterrupt is raised. A second Ctrl-C raises it at
    once. SIGTERM saves too, and `Interrupted` is raised. Only the main thread sees signals.
    """
    names, make = objects_of(task, reward, dataset, eval_dataset)
    config = settings_of(config, names)
    if not names:
        require_task(config)

    progress = Progress()
    how = dict(timeout=config.timeout, threads=config.threads)
    with naming_lost_ranks(progress), joined(config.device, **how):
        ended = start_run(config, progress, make=make, log=log, returns_to_caller=True)
        found = ended.directory
        metrics, checkpoint = agree(lambda: (found.lines(found.METRICS), found.newest()))
    if ended.signal:
        text = f"full.api.run(Config(out={str(found)!r}, resume=True), ..) goes on"
        if ended.signal == signal.SIGINT:
            raise KeyboardInterrupt(text)
        raise Interrupted(ended.signal, text)
    return Result(found.path, ended.solved, metrics, checkpoint)


@refusing_exits()
def audit(
    run, *, task=None, reward=None, dataset=None, eval_dataset=None, step=None,
) -> Report:  # fmt: skip
    """Repeat a step of a run from its definition. Return the Report of full/audit/audit.py.

    run: a Result, or the directory of a run.
    task, reward, dataset, eval_dataset: the objects that the run had, as in `run`. task and reward
        may also be the FILE.py:Class and the FILE.py:function of a run of the command line.
    step: int. Default: the last that has a checkpoint before it.

    `Report.verdict` says it in a line, and `Report.text` in a table. ValueError if the step cannot
    be audited.
    """
    files = {name: spec for name, spec in (("task", task), ("reward", reward))
             if isinstance(spec, str)}  # fmt: skip
    task, reward = (None if isinstance(thing, str) else thing for thing in (task, reward))
    names, make = objects_of(task, reward, dataset, eval_dataset)
    given = {name: names[name] for name in ("task", "reward") if name in names} | files
    with one_process("an audit"):
        return audited(Path(run), step, **given, make=make)


def objects_of(task, reward, dataset, eval_dataset):
    """Return {field of Config: name} of the objects that were given, and what makes the task.

    What makes it is a function of the run's Config. ValueError for an object of no use.
    """
    rows = dict(data=dataset, eval_data=eval_dataset)
    rows = {name: rows_of(found, f"{name}set") for name, found in rows.items() if found is not None}
    if task is not None and (rows or reward is not None):
        raise ValueError("a task gives its own prompts and rewards: reward, dataset and "
                         "eval_dataset are for the task jsonl")  # fmt: skip
    if task is not None:
        return {"task": f"{PYTHON}{type(task).__name__}"}, lambda config: require_usable(task)
    names = {name: f"{name}set" for name in rows}
    if reward is not None:
        names["reward"] = getattr(reward, "__name__", type(reward).__name__)
    if not names:
        return {}, make_task
    return {"task": f"{PYTHON}jsonl"} | names, lambda config: Jsonl(config, reward=reward, **rows)


def rows_of(dataset, name) -> list:
    """Return the rows of a dataset as they would be read from a file of JSON lines."""
    rows = []
    for number, row in enumerate(dataset, 1):
        with naming(f"{name} row {number}", Exception):
            row = json.loads(json.dumps(row))
        if not isinstance(row, dict):
            raise ValueError(f"expected {name} row {number} to be a dict, got {row!r}")
        rows.append(row)
    return rows


def settings_of(config, names) -> Config:
    """Return the checked settings of a run. names: of the objects that take the place of fields.

    With resume=True the fields that were not given to Config are those of the run in config.out.
    """
    for field, name in names.items():
        value = getattr(config, field)
        is_rows = field == "task" and name == f"{PYTHON}jsonl"
        if value not in (getattr(Config, field), name, *["jsonl"] * is_rows):
            raise ValueError(f"expected one {field}, got Config({field}={value!r}) and an object")

    # A program may give a file as a Path. What else a value must not be, `check` says.
    given = config.given()
    names = names | {name: f"{x}" for name, x in given.items() if isinstance(x, Path)}
    return Config.of(given | names, dataclasses.replace(config, **names)).check()

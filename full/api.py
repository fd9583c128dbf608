"""Run and audit from Python, with objects in place of the command line's files.

    from full.api import Config, audit, run

    result = run(Config(steps=20), task=MyTask(), log=print)
    print(result.solved, audit(result, task=MyTask()).verdict)

A run has the same settings, directory and metrics as on the command line, bit for bit: in one
process, in a notebook, or in a script under torchrun, where every rank gives the objects. A run
with objects can be resumed or audited only from Python. Its task is `python:MyTask` in config.json.
A wrong setting is a ValueError. An error in a task or a reward is raised unchanged, with a note of
the rollout. No call ends the process. A call restores signal handlers, threads and process groups.
"""

import contextlib
import dataclasses
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from full.audit.audit import Report, audited
from full.ranks.joining import PYTHON, Interrupted, Progress, agree, connection, naming_lost_ranks
from full.run.build import one_process
from full.run.config import Config
from full.run.logs import replacing_characters
from full.run.run import start_run
from full.run.tasks import Jsonl, Task, make_task, require_task, require_usable
from full.run.text import naming

__all__ = "Config", "Interrupted", "Report", "Result", "Task", "audit", "run"


@contextlib.contextmanager
def refusing_exits():
    """Turn a user's sys.exit into an error, because the run has not done its steps."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"a task or a reward called sys.exit({error.code!r})") from error


@dataclass(frozen=True)
class Result:
    """The result of a run. As a path, it is the run's directory.

    out: Path. The run's directory. Its folder hf has the last weights for transformers.
    solved: float. The fraction of the held-out prompts that the last weights solve.
    metrics: list of dict. The lines of metrics.jsonl, one per step, from step 0 on.
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

    config: Config. Its fields are the flags of the command line. With resume=True the other fields
        are the stored run's, and the objects have to be given again.
    task: an object with the methods of `Task`. Default: the task that config.task names.
    reward: function (text, row) -> number. For the task jsonl, in place of its --reward.
    dataset: rows, each a dict like a line of --data. The task is then jsonl, which needs --model.
    eval_dataset: rows to evaluate on. Default: the tenth of the dataset that is held out.
    log: function of a step's metrics, a dict: a line of metrics.jsonl. Rank 0 calls it.

    A process does one run at a time. An existing process group is used and kept. Ctrl-C saves the
    run after the step and raises KeyboardInterrupt. A second Ctrl-C raises it at once. SIGTERM
    saves too and raises `Interrupted`. Only the main thread sees signals.
    """
    objects = given_objects(task, reward, dataset, eval_dataset)
    names = config_names(objects)
    config = settings_of(config, names)
    if not names:
        require_task(config)

    progress = Progress()
    ranks = connection(config.device, timeout=config.timeout, threads=config.threads)
    with naming_lost_ranks(progress), ranks:
        ended = start_run(
            config, progress, make=maker_of(objects), log=log, returns_to_caller=True)
        out = ended.directory
        metrics, checkpoint = agree(lambda: (out.lines(out.METRICS), out.newest()))
    if ended.signal:
        text = f"full.api.run(Config(out={str(out)!r}, resume=True), ..) goes on"
        if ended.signal == signal.SIGINT:
            raise KeyboardInterrupt(text)
        raise Interrupted(ended.signal, text)
    return Result(out.path, ended.solved, metrics, checkpoint)


@refusing_exits()
def audit(
    run, *, task=None, reward=None, dataset=None, eval_dataset=None, step=None,
) -> Report:  # fmt: skip
    """Repeat a step of a run from its definition. Return the Report of full/audit/audit.py.

    run: a Result, or the directory of a run.
    task, reward, dataset, eval_dataset: the objects that the run had, as in `run`. task and reward
        may also be the FILE.py:Class and the FILE.py:function of a run of the command line.
    step: int. Default: the last that has a checkpoint before it.

    `Report.verdict` is the result in a line, and `Report.text` in a table. ValueError if the step
    cannot be audited.
    """
    files = {name: spec for name, spec in (("task", task), ("reward", reward))
             if isinstance(spec, str)}  # fmt: skip
    task, reward = (None if isinstance(x, str) else x for x in (task, reward))
    objects = given_objects(task, reward, dataset, eval_dataset)
    names = config_names(objects)
    code = {name: names[name] for name in ("task", "reward") if name in names} | files
    with one_process("an audit"):
        return audited(Path(run), step, **code, make=maker_of(objects))


def given_objects(task, reward, dataset, eval_dataset) -> dict:
    """Return {field of Config: object} of the objects that are not None. Datasets become rows."""
    objects = dict(task=task, reward=reward)
    for field, dataset in (("data", dataset), ("eval_data", eval_dataset)):
        objects[field] = None if dataset is None else rows_of(dataset, f"{field}set")
    objects = {field: x for field, x in objects.items() if x is not None}
    if task is not None and len(objects) > 1:
        raise ValueError("a task gives its own prompts and rewards: reward, dataset and "
                         "eval_dataset are for the task jsonl")  # fmt: skip
    return objects


def config_names(objects) -> dict:
    """Return {field of Config: the name that stands for an object}."""
    if not objects:
        return {}
    names = {"task": PYTHON + (type(objects["task"]).__name__ if "task" in objects else "jsonl")}
    names |= {field: f"{field}set" for field in ("data", "eval_data") if field in objects}
    if "reward" in objects:
        reward = objects["reward"]
        names["reward"] = getattr(reward, "__name__", type(reward).__name__)
    return names


def maker_of(objects):
    """Return the function that makes the task of a Config with these objects."""
    if not objects:
        return make_task
    if "task" in objects:
        return lambda config: require_usable(objects["task"])
    return lambda config: Jsonl(config, **objects)


def rows_of(dataset, name) -> list:
    """Return the rows of a dataset as a file of JSON lines would have them."""
    rows = []
    for number, row in enumerate(dataset, 1):
        with naming(f"{name} row {number}", Exception):
            row = json.loads(json.dumps(row))
        if not isinstance(row, dict):
            raise ValueError(f"expected {name} row {number} to be a dict, got {row!r}")
        rows.append(row)
    return rows


def settings_of(config, names) -> Config:
    """Return the checked settings of a run. names: of `config_names`.

    With resume=True the fields that were not given to Config are from the run in config.out.
    """
    for field, name in names.items():
        value = getattr(config, field)
        allowed = [getattr(Config, field), name]
        if name == f"{PYTHON}jsonl":
            allowed.append("jsonl")
        if value not in allowed:
            raise ValueError(f"expected one {field}, got Config({field}={value!r}) and an object")

    # A program may give a file as a Path. `check` refuses other wrong types.
    given = config.given()
    names = names | {name: f"{x}" for name, x in given.items() if isinstance(x, Path)}
    return Config.of(given | names, dataclasses.replace(config, **names)).check()

"""full.api: a run from Python is the command line's, and leaves the process as it was.

Runs are made in this process, and compared bit for bit with runs of the command line.
"""

import contextlib
import dataclasses
import gc
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock, call as mock_call

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, SORT, complaint_of, installed
from example_tasks import Lookup, Sort
from pages import Page
from test_ranks import join, ranks, start
from test_run import TINY, as_torchrun, at, contents, free_port, json_lines, same_run

from full.__main__ import main
from full.api import Config, Interrupted, audit, run, settings_of
from full.ranks import joining as ranks_py
from full.ranks.checkpoint import checkpoints
from full.run.flags import parse_config

STEPS = f"{TINY} --out run --save-every 2 --steps 4"


def config_of(flags, **more):
    """The Config of a command line, as a program gives it: with the fields that were typed."""
    return Config(**parse_config(shlex.split(flags)).given() | more)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Python's own handler of Ctrl-C, too: a shell's background job begins with SIGINT ignored."""
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def state_of_the_process():
    """What a run must leave as it was."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return dict(
        handlers=[signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        wakeup=wakeup, threads={*threading.enumerate()}, torch_threads=torch.get_num_threads(),
        dtype=torch.get_default_dtype(), random=torch.get_rng_state().tolist(),
        numpy=np.random.get_state()[1].tolist(), grad=torch.is_grad_enabled(), cwd=os.getcwd(),
        environment={**os.environ}, groups={*dist.distributed_c10d._world.pg_map},
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@contextlib.contextmanager
def left_as_it_was():
    """The body leaves the process as it was."""
    torch.set_num_threads(2)  # a run has 1
    before = state_of_the_process()
    try:
        yield
    finally:
        deadline = time.monotonic() + 20  # threads end soon after their pool
        while {*threading.enumerate()} != before["threads"] and time.monotonic() < deadline:
            time.sleep(0.01)
        after = state_of_the_process()
        torch.set_num_threads(1)
    assert {name for name in before if before[name] != after[name]} == set()


# A run is the command line's -----------------------------------------------------------------


def test_a_run_is_the_command_lines_and_the_second_is_the_run_alone(straight):
    """Another run, by another model and task, is between the two."""
    truth = straight(STEPS)
    seen, open_files = [], []
    with left_as_it_was():
        for out in ("run", "again"):
            result = run(config_of(STEPS, out=out), log=seen.append)
            same_run(Path(out), truth)
            last = json_lines(Path(out, "metrics.jsonl"))[-1]
            assert result.metrics == seen == json_lines(Path(out, "metrics.jsonl"))
            assert (result.out, result.solved) == (Path(out), last["eval/solved"])
            assert result.checkpoint == checkpoints(out)[-1] and len(seen) == 4
            stored = json.loads(Path(out, "config.json").read_text())
            assert stored | {"out": "run"} == json.loads((truth / "config.json").read_text())
            assert Path(out, "hf", "config.json").exists()
            seen.clear()
            other = config_of(STEPS, out=f"{out} other", size=6, dtype="float64", steps=1)
            run(other, task=Sort(other))
            gc.collect()
            open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[0] == open_files[1]


def _runs_of_a_rank(rank, world, port, flags):
    """Two runs on ranks as torchrun starts them; a result is the same on each.

    Rank 0 exports for longer than --timeout; both ranks have the export when they go on.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    as_torchrun(rank, world, port)
    seen = []
    if rank == 0:
        at("full.run.build.save_hf", 2, lambda *args: time.sleep(4))
    for out in ("run", "again"):
        config = config_of(flags, out=out, timeout=3)
        result = run(config, task=Sort(config), log=seen.append)
        assert Path(out, "hf", "model.safetensors").exists() and not dist.is_initialized()
        steps = 0 if rank else config.steps  # rank 0 alone has a logger
        assert len(seen) == steps and len(result.metrics) == config.steps
        seen.clear()
    Path(f"solved-{rank}").write_text(f"{result.solved}")


SIX = f"{STEPS} --size 6 --data-parallel fsdp"


def test_ranks_return_when_the_export_is_written(straight):
    truth = straight(f"{SIX} --task {SORT!r}", 2)
    assert join(start(2, _runs_of_a_rank, 2, free_port(), SIX)) == [0, 0]
    assert Path("solved-0").read_text() == Path("solved-1").read_text()
    for out in ("run", "again"):
        same_run(Path(out), truth)


def _kept(rank, flags):
    """A run in a process group of the program's own, of two ranks: the groups that stay."""
    before = {*dist.distributed_c10d._world.pg_map}
    config = config_of(flags)
    with pytest.warns(UserWarning, match="is used as it is"):
        run(config, task=Sort(config))
    dist.barrier()
    return {*dist.distributed_c10d._world.pg_map} == before and dist.get_world_size()


def test_a_process_group_of_the_program_is_used_and_kept(tmp_path, straight):
    assert ranks(tmp_path, 2, _kept, SIX) == [2, 2]
    same_run(tmp_path / "run", straight(f"{SIX} --task {SORT!r}", 2))


# Signals -------------------------------------------------------------------------------------


def strike(number, step=1):
    """A logger that sends this process a signal after a step, and waits until it is seen."""
    def log(line):
        if line["step"] == step:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    return log


@pytest.mark.parametrize("number, step, error", [
    (signal.SIGINT, 1, KeyboardInterrupt), (signal.SIGTERM, 1, Interrupted),
    (signal.SIGINT, 3, KeyboardInterrupt)])  # in the last step, when all is written
def test_a_signal_saves_and_raises_and_the_run_goes_on(straight, number, step, error):
    config = config_of(f"{STEPS} --size 6")
    with left_as_it_was(), pytest.raises(error) as caught:
        run(config, task=Sort(config), log=strike(number, step))
    assert checkpoints("run")[-1].name == f"step-0000000{step + 1}"
    assert Path("run/hf/model.safetensors").exists() == (step == 3)
    goes_on = "full.api.run(Config(out='run', resume=True), ..) goes on"
    assert (goes_on in str(caught.value)) == (step == 1)
    result = run(Config(out="run", resume=True), task=Sort(config))
    same_run(result.out, straight(f"{STEPS} --size 6 --task {SORT!r}"))
    assert len(result.metrics) == 4


def test_a_second_ctrl_c_raises_at_once(monkeypatch):
    monkeypatch.setattr(ranks_py.Stop, "SAME_KEY_PRESS", 0.0)

    def log(line):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        pytest.fail("the second Ctrl-C was not raised")

    with left_as_it_was(), pytest.raises(KeyboardInterrupt):
        run(config_of(STEPS), log=log)
    assert not checkpoints("run") and not dist.is_initialized()


def test_a_thread_may_run_and_takes_no_signals(straight):
    found = []

    def runs():
        handlers = [signal.getsignal(number) for number in ranks_py.Stop.SIGNALS]
        log = lambda line: found.append(  # noqa: E731
            handlers == [signal.getsignal(number) for number in ranks_py.Stop.SIGNALS])
        found.append(run(config_of(STEPS), log=log))

    with left_as_it_was():
        thread = threading.Thread(target=runs)
        thread.start()
        thread.join()
    assert found[:-1] == [True] * 4
    same_run(found[-1].out, straight(STEPS))


# Resume, and what commands do with a run of objects ------------------------------------------


def test_a_run_with_objects_goes_on_from_python_alone(capsys, straight):
    config = config_of(f"{STEPS} --size 6")
    run(config, task=Sort(config))
    said = capsys.readouterr().out
    assert "full.api.run(Config(out='run', resume=True), ..) goes on" in said
    before = contents(Path("run"))
    for command in ("--out run --resume", f"--out run --resume --task {SORT!r}", "audit run",
                    f"audit run --task {SORT!r}", "eval run", "export run hf"):  # fmt: skip
        assert main(shlex.split(command)) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "python:Sort: full.api has made it" in said, command
    for options in ({}, dict(task=Lookup(config))):
        resumed = Config(out="run", resume=True)
        assert "has to give them again" in complaint_of(run, resumed, **options)
        assert "python:Sort" in complaint_of(audit, "run", **options)
    with left_as_it_was():
        report = audit("run", task=Sort(config), step=3)
    assert report.verdict == "audit of step 3: ok" and "numbers hold" in report.text()
    assert contents(Path("run")) == before

    # More steps: what was given wins, and all else is the run's own; also of a command line's run.
    shutil.copytree(straight(f"{STEPS} --size 6 --task {SORT!r}"), "theirs")
    for out in (Path("run"), "theirs"):
        again = Config(out=out, resume=True, steps=6)
        assert "layers" not in again.given() and run(again, task=Sort(config)).metrics[5]
        same_run(Path(out), straight(f"{STEPS} --steps 6 --size 6 --task {SORT!r}"))


@pytest.mark.quick
def test_what_was_given_is_known():
    config = Config(steps=150, model="DIR")
    assert config.given() == {"steps": 150, "model": "DIR"}
    config.lr = 0.5
    config.seed = 3
    assert config.given() == {"steps": 150, "model": "DIR", "lr": 0.5, "seed": 3}
    copied = dataclasses.replace(config, prompts=1)
    assert copied.given() == dataclasses.asdict(copied)

    # A field that is assigned leaves the others as they are, with resume where no run is, too.
    for given in ({}, dict(resume=True, out="new")):
        config = Config(**given)
        config.model = "DIR"
        assert settings_of(config, {}).lr == config.lr != Config(model="DIR").lr


# Errors --------------------------------------------------------------------------------------


class Failing(Sort):
    """Its reply calls a function, which fails."""

    def __init__(self, config, fails):
        super().__init__(config)
        self.fails = fails

    def reply(self, state, answer):
        self.fails()


def fails(line):
    raise LookupError("the logger is gone")


CONFIG = config_of(f"{STEPS} --size 6")
LATER = [  # a run that raises in its steps
    (KeyError, "nothing", dict(task=Failing(CONFIG, lambda: {}["nothing"]))),
    (RuntimeError, r"called sys.exit\(0\)", dict(task=Failing(CONFIG, lambda: sys.exit(0)))),
    (LookupError, "the logger is gone", dict(task=Sort(CONFIG), log=fails)),
]  # fmt: skip


@pytest.mark.parametrize("error, text, options", LATER)
def test_what_fails_in_a_step_is_raised_and_the_run_goes_on(error, text, options, straight):
    with left_as_it_was(), pytest.raises(error, match=text):
        run(CONFIG, **options)
    if error is LookupError:  # its directory is that of a run of Sort
        result = run(dataclasses.replace(CONFIG, resume=True), task=Sort(CONFIG))
        same_run(result.out, straight(f"{STEPS} --size 6 --task {SORT!r}"))


# Datasets and rewards ------------------------------------------------------------------------

QUESTIONS = [{"question": f"{n} + {n}?", "answer": f"{2 * n}"} for n in range(40)]
HELD_OUT = [{"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(4)]


def share(text, row):
    row["answer"] += "!"  # the row is this call's own
    return len(text) / 100 + len(row["answer"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a checkpoint whose answers end by chance."""
    installed("transformers", "trl")
    import released

    path = released.make("qwen2", tmp_path_factory.mktemp("model") / "DIR", layers=1, width=16)
    ends = {"eos_token_id": [*range(0, 3000, 9)]}
    (path / "generation_config.json").write_text(json.dumps(ends))
    return path


def test_a_dataset_and_a_reward_give_the_run_of_their_files(model, capsys):
    shutil.copytree(model, "DIR")
    for name, rows in (("rows", QUESTIONS), ("held", HELD_OUT)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(inspect.getsource(share))
    flags = f"{TINY} --model DIR --max-new-tokens 12 --prompts 2 --group 2 --save-every 1"
    files = "--task jsonl --data rows.jsonl --eval-data held.jsonl --reward rewards.py:share"
    given = dict(reward=share, dataset=QUESTIONS, eval_dataset=HELD_OUT)
    with left_as_it_was():
        config = config_of(f"{flags} --out run", steps=2)
        result = run(config, **given | dict(eval_dataset=iter(HELD_OUT)))
    assert main(f"{flags} {files} --out files --steps 2".split()) == 0
    same_run(result.out, Path("files"))
    assert {line["reward/mean"] for line in result.metrics} != {0}
    assert given["dataset"][3] == {"question": "3 + 3?", "answer": "6"}

    # It goes on and is audited with the same rows.
    longer, changed = Config(out="run", resume=True, steps=3), "is not what it was when run began"
    other = given | dict(dataset=[*QUESTIONS[1:], QUESTIONS[0]])
    assert "has to give them again" in complaint_of(run, longer)
    assert f"--data 'dataset' {changed}: give the old contents again" in complaint_of(
        run, longer, **other)
    assert f"--eval-data 'eval_dataset' {changed}" in complaint_of(
        run, longer, **given | dict(eval_dataset=HELD_OUT[:3]))
    run(longer, **given)
    assert audit("run", **given).wrong is None
    assert f"--data 'dataset' {changed}" in complaint_of(audit, "run", **other)
    capsys.readouterr()
    assert main("--out run --resume --reward rewards.py:share".split()) == 2
    assert "python:jsonl: full.api has made it" in capsys.readouterr().err

    # The rows of a file and of an object are one thing, so each may go on with the other.
    run(Config(out="files", resume=True, steps=3), **given)
    same_run(Path("run"), Path("files"))
    assert main(f"--out run --resume {files} --steps 4".split()) == 0
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS[1:]))
    config = Config(out="files", resume=True, steps=4, task="jsonl", data="rows.jsonl",
                    reward="rewards.py:share", eval_data="held.jsonl")  # fmt: skip
    assert "--data 'rows.jsonl' is not what it was when files began" in complaint_of(run, config)


def test_a_reward_that_fails_ends_the_run(model):
    config = config_of(f"{TINY} --max-new-tokens 12 --steps 1 --out run", model=model)
    bad = [*QUESTIONS[:-1], {"answer": "2"}]
    with left_as_it_was():
        said = complaint_of(run, config, dataset=bad)
        assert said.startswith("dataset line 40: expected a string 'question'")
        with pytest.raises(KeyError, match="gold") as raised:
            run(config, dataset=QUESTIONS, reward=lambda text, row: row["gold"])
        assert re.fullmatch("in group .*, rollout .*, dataset line .*", raised.value.__notes__[0])

        said = complaint_of(run, config, dataset=QUESTIONS, reward=lambda text: 1.0)
        assert said.startswith("expected <lambda>(text, row), got <lambda>(text): too many pos")

        # A relative --out would name another directory.
        here = os.getcwd()
        other = dataclasses.replace(config, out="moved")
        said = complaint_of(run, other, dataset=QUESTIONS, reward=lambda *_: os.chdir("/") or 0.0)
        assert said.startswith(f"expected Jsonl to stay in the working directory {here}, got /")
        assert os.getcwd() == here


# The manual's loggers, and the notebook ------------------------------------------------------

SECTION = Page("full/README.md").text.split("## From Python")[1].split("\n## ")[0]
CODE = re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)
BLOCKS = dict(zip(("run", "wandb", "tensorboard"), CODE, strict=True))


def test_the_loggers_of_the_manual_get_each_step(monkeypatch):
    wandb, torch_tensorboard = Mock(), Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", torch_tensorboard)
    config = config_of(STEPS)
    lines = []
    for name in ("wandb", "tensorboard"):
        assert BLOCKS[name].count("\n") == 3
        exec(BLOCKS[name], dict(run=run, config=config))
        lines.append(json_lines(Path("run/metrics.jsonl")))
        shutil.rmtree("run")
    wandb.init.assert_called_once_with(project="guess", config=config.given())
    assert wandb.log.mock_calls == [mock_call(line, step=n) for n, line in enumerate(lines[0])]
    assert all(isinstance(x, int | float) for line in lines[0] for x in line.values())
    torch_tensorboard.SummaryWriter.assert_called_once_with("runs/events")
    add_scalar = torch_tensorboard.SummaryWriter().add_scalar
    assert add_scalar.mock_calls == [
        mock_call(name, x, n) for n, line in enumerate(lines[1]) for name, x in line.items()]


def test_the_example_of_the_manual_runs(capsys):
    space = {}
    exec(Page("full/README.md").code("python")[0], space)
    small = "steps=2, layers=1, hidden=16, heads=2, prompts=2, group=4, eval_prompts=4"
    text = BLOCKS["run"].replace("steps=20", small)
    assert text != BLOCKS["run"]
    exec(text, space)
    assert "audit of step 1: ok" in capsys.readouterr().out
    assert space["result"].out == Path("runs/Majority-0")


NOTEBOOK = ROOT / "assets" / "first_run.ipynb"


@pytest.mark.parametrize("steps", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_the_cells_of_the_notebook_run_and_print_what_it_shows(steps, capsys):
    """In two steps the same lines of tables, and in all of its steps what was learned."""
    plt = installed("matplotlib.pyplot")
    plt.switch_backend("agg")
    cells = [x for x in json.loads(NOTEBOOK.read_text())["cells"] if x["cell_type"] == "code"]
    space, pictures, stored = {"__name__": "a notebook"}, [], ""
    for cell in cells:
        source = "".join(cell["source"])
        if steps:
            source = re.sub(r"\bsteps=\d+", f"steps={steps}", source)
            source = re.sub(r"\bgroup=\d+", "group=4", source)
        exec(compile(source, f"<cell {cell['execution_count']}>", "exec"), space)
        shown = [data for output in cell["outputs"] for data in output.get("data", ())]
        pictures.append((len(plt.get_fignums()), shown.count("image/png")))
        plt.close("all")
        stored += "".join("".join(output.get("text", ())) for output in cell["outputs"])
    out = capsys.readouterr().out
    for pattern in (r"^ *step  .*", r"^audit of step \d+: .*$", r"^\S+: [\d,]+ parameters, .*"):
        found, there = (re.findall(pattern, text, re.M) for text in (out, stored))
        if steps:
            found, there = (re.sub(r"\d+", "N", f"{x}") for x in (found, there))
        assert found == there
    for text in (stored, stored if steps else out):
        solved = [float(x) for x in re.findall(r"^eval/solved (\S+) after", text, re.M)]
        assert solved and min(solved) >= 0.95
    assert all(drawn == shown for drawn, shown in pictures) and sum(x for x, _ in pictures) == 2
    assert NOTEBOOK.stat().st_size < 150_000
    assert space["report"].wrong is None and space["other"].wrong == "rollouts/rewards"
    assert re.search(r"^audit of step \d+: ok$", stored, re.M)

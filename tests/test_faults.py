"""Faults: kills, full disks, read-only directories, damaged checkpoints, NaNs, late ranks.

In each, two ranks either go on bit for bit, or both end in the stated time with a message that
says what happened and what to do; and what was saved stays whole. Faults are planted by a driver
in the ranks' processes, right before a call of a function, and are real: SIGKILL, the kernel's
/dev/full and RLIMIT_FSIZE, permission bits (root drops its capabilities, so that they hold).

    python -m pytest tests/test_faults.py                  # the short form
    python -m pytest tests/test_faults.py -m slow          # every fault; each rank killed 20 times
"""

import ctypes
import functools
import os
import random
import re
import resource
import shutil
import struct
import time
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
from test_ranks import read_metrics
from test_run import KL, TINY, _main, at, begin, contents, end, good

from parallel import checkpoints, newest_checkpoint, verify_checkpoint
from train_grpo import whole_lines

RUN = f"{TINY} --out run --save-every 2 --timeout 20"
STEPS, MANY, MOMENTS = 6, 100, 20  # steps of a run, of one that is killed often; kills of a rank
MARGIN = 40  # seconds beyond the timeout that a loaded machine may need
GONE = r"(starting|setting up|step \d+): another rank is gone or silent.*; "
GONE += r"(go on with --resume --out run|look at its error)\n"


# The driver ----------------------------------------------------------------------------------


def _faulty(rank, world, port, cwd, log, flags, faults):
    """A rank of a run. faults: (rank, function, which call, what happens before it, arguments)."""
    for culprit, where, count, act, *args in faults:
        if culprit == rank:
            at(where, count, functools.partial(act, *args))
    _main(rank, world, port, cwd, log, flags, None)


def run(cwd, flags, *faults, seconds=200):
    return end(*begin(cwd, flags, 2, faults, _faulty), seconds)


def kill(*call, **options):
    os.kill(os.getpid(), SIGKILL)


def sleep(seconds, *call, **options):
    Path("late").write_text(str(time.time()))
    time.sleep(seconds)


def full(name, tensors, storage_writer):
    """The file of this name in a checkpoint is on a device that is full."""
    (storage_writer.path / name).symlink_to("/dev/full")


def full_below(state, file):
    """The file that is open already is."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())


def fills_up(path, more, *call, **options):
    """No file may grow beyond the size of path, if any, and so many bytes: a write is cut short."""
    size = more + (os.path.getsize(path) if path else 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def read_only(path, *call, **options):
    """To everyone: this process drops what lets root write regardless."""
    capset = ctypes.CDLL(None, use_errno=True).capset
    assert capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0, os.strerror(ctypes.get_errno())
    os.chmod(path, 0o555)
    with pytest.raises(PermissionError):
        Path(path, "probe").touch()


def nan(trainer, batch, Z):
    assert batch, "this rank has nothing to plant a NaN in"
    for t in batch:
        t.advantages = np.full(len(t.advantages), np.nan)


# What stays ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """steps -> the directory of an uninterrupted run that keeps every checkpoint; made once."""
    made = {}

    def directory(steps):
        if steps not in made:
            made[steps] = tmp_path_factory.mktemp("truth")
            good(made[steps], f"{RUN} --keep 1000 --steps {steps}", 2)
        return made[steps] / "run"

    return directory


def lines_of(run):
    lines = whole_lines(run / "metrics.jsonl")
    return [{k: v for k, v in x.items() if not k.startswith("seconds/")} for x in lines]


def intact(run, truth, least=0):
    """The step of the newest checkpoint: whole, that of the true run, and at least so far."""
    found = newest_checkpoint(run) if run.exists() else None
    if found is None:
        assert least == 0
        return 0
    assert found == str(checkpoints(run)[-1])
    files, true = (verify_checkpoint(x / Path(found).name)["files"] for x in (run, truth))
    ranks = [f"__{rank}_0.distcp" for rank in range(2)]
    assert [files[name] for name in ranks] == [true[name] for name in ranks]
    step = int(found[-8:])
    assert step >= least and lines_of(run)[:step] == lines_of(truth)[:step]
    return step


def go_on(cwd, steps):
    """The flags that go on with a run, or that start it where none was begun."""
    if (cwd / "run" / "config.json").exists():
        return f"--resume --out run --steps {steps}"
    return f"{RUN} --steps {steps}"


def finishes(cwd, truth, steps=STEPS):
    """The run goes on to its end, and is the true one bit for bit."""
    good(cwd, go_on(cwd, steps), 2)
    finished(cwd, truth, steps)


def finished(cwd, truth, steps=STEPS):
    assert intact(cwd / "run", truth) == steps and not list((cwd / "run").glob("*.tmp"))
    assert read_metrics(cwd / "run") == read_metrics(truth)


# Killed --------------------------------------------------------------------------------------

START = 2.0  # seconds in which a kill before the first step falls: about what a start takes


def wait_for(cwd, lines, old):
    """Until metrics.jsonl, where it is not the file of before the start, has so many lines."""
    deadline, path = time.monotonic() + 120, cwd / "run" / "metrics.jsonl"
    while not path.exists() or path.stat().st_ino == old or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, f"no {lines} lines in {path}"
        time.sleep(0.005)


def strike(cwd, truth, victim, moment, steps):
    """Begin or go on, SIGKILL a rank, and look at what is left; the newest checkpoint's step.

    moment: steps done in this start, and the part of two steps' seconds, or of START, after them.
    """
    saved, path = intact(cwd / "run", truth), cwd / "run" / "metrics.jsonl"
    old = path.stat().st_ino if path.exists() else None
    processes, log = begin(cwd, go_on(cwd, steps), 2, (), _faulty)
    pause = START
    if moment >= 1:
        wait_for(cwd, saved + int(moment), old)
        pause = 2 * np.mean([x["seconds/total"] for x in whole_lines(path)])
    time.sleep(moment % 1 * pause)
    processes[victim].kill()
    for stream in ("out", "err"):  # a victim of the first moment has none
        Path(f"{log}-{stream}-{victim}").touch()
    codes, _, err = end(processes, log, seconds=20 + MARGIN)
    assert codes[victim] == -SIGKILL and codes[1 - victim] == 2, err[1 - victim]
    assert re.search(rf"rank {1 - victim}: error: {GONE}", err[1 - victim])
    return intact(cwd / "run", truth, least=saved)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_twenty_moments_costs_nothing(tmp_path, truth, victim):
    draw, saved = random.Random(victim), 0
    for _ in range(MOMENTS):
        saved = strike(tmp_path, truth(MANY), victim, draw.uniform(0, 6), MANY)
    assert 0 < saved < MANY
    finishes(tmp_path, truth(MANY), MANY)


ENDS = [("torch.distributed.barrier", 1), ("pathlib.Path.replace", 1)]  # the last call; config.json


@pytest.mark.slow
@pytest.mark.parametrize("where, count", ENDS)
def test_a_kill_at_either_end_of_a_run_costs_nothing(tmp_path, truth, where, count):
    codes, _, err = run(tmp_path, go_on(tmp_path, STEPS), (0, where, count, kill))
    assert codes == [-SIGKILL, 2] and re.search(r"rank 1: error: .*another rank is gone", err[1])
    finishes(tmp_path, truth(STEPS))


# Where it cannot write -----------------------------------------------------------------------

SAVE, DCP = "train_grpo.Trainer.save_checkpoint", "torch.distributed.checkpoint.save"
ROOM = r"checkpoint run/step-\d+ not written .*older ones are whole.*--resume --out run"
LOG = r"run/metrics.jsonl not written .*--resume --out run"
# name -> the rank, where and when, what happens; what that rank says, and what the other
STORAGE = {
    "a full disk, rank 0": ((0, DCP, 2, full, "__0_0.distcp"), ROOM, ROOM),
    "a full disk, rank 1": ((1, DCP, 2, full, "__1_0.distcp"), ROOM, ROOM),
    "a disk that fills up, rank 0": ((0, DCP, 2, fills_up, None, 30000), ROOM, ROOM),
    "a disk that fills up, rank 1": ((1, DCP, 2, fills_up, None, 30000), ROOM, ROOM),
    "a full disk, contents": ((0, DCP, 2, full, ".metadata.tmp"), ROOM, ROOM),
    "a full disk, state": ((0, "json.dump", 2, full_below), ROOM, ROOM),
    "a full disk, metrics": (
        (0, "train_grpo.Log.step", 4, fills_up, "run/metrics.jsonl", 99), LOG, GONE),
    "a directory that turns read-only": ((0, SAVE, 2, read_only, "run"), ROOM, ROOM),
}  # fmt: skip


def cannot_write(cwd, truth, name, least=2):
    """Begin or go on under this fault; both ranks end and say so, and nothing saved is lost."""
    fault, own, other = STORAGE[name]
    codes, out, err = run(cwd, go_on(cwd, STEPS), fault)
    assert codes == [2, 2], "\n".join(err)
    assert "2 rank(s), from step" in out[0], "what was printed before is lost"
    for rank, text in enumerate(err):
        assert re.search(f"rank {rank}: error: {own if rank == fault[0] else other}", text), text
    (cwd / "run").chmod(0o755)
    assert intact(cwd / "run", truth, least) < STEPS
    assert not list((cwd / "run").glob("step-*.tmp")), "what was cut short still takes room"


@pytest.mark.slow
@pytest.mark.parametrize("name", STORAGE)
def test_a_run_that_cannot_write_says_so_and_loses_nothing(tmp_path, truth, name):
    cannot_write(tmp_path, truth(STEPS), name)
    finishes(tmp_path, truth(STEPS))


def test_one_run_survives_fault_after_fault(tmp_path, truth):
    """The short form: a full disk, a kill, and a rank that is 1 s late to the next checkpoint."""
    cannot_write(tmp_path, truth(STEPS), "a full disk, rank 1")
    strike(tmp_path, truth(STEPS), 0, random.Random(2).uniform(1, 3), STEPS)
    codes, _, err = run(tmp_path, go_on(tmp_path, STEPS), (1, SAVE, 1, sleep, 1))
    assert codes == [0, 0] and (tmp_path / "late").exists(), "\n".join(err)
    finished(tmp_path, truth(STEPS))


FULL_START = (("train_grpo.prepare_out", 1, fills_up, None, 999), "File too large.*--out")
START_FAULTS = [  # the fault of rank 0 at the start of a run; what both ranks say
    (("train_grpo.prepare_out", 1, read_only, "."), "Permission denied.*--out"),
    pytest.param(*FULL_START, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fault, text", START_FAULTS, ids=["read-only", "full"])
def test_an_output_directory_that_cannot_be_written_is_refused(tmp_path, truth, fault, text):
    codes, out, err = run(tmp_path, go_on(tmp_path, STEPS), (0, *fault))
    assert codes == [2, 2] and out == ["", ""]
    assert all(re.fullmatch(f"rank {r}: error: run.*{text}.*\n", e) for r, e in enumerate(err))
    tmp_path.chmod(0o755)
    assert not checkpoints(tmp_path / "run")
    if "large" in text:
        finishes(tmp_path, truth(STEPS))


# Damaged checkpoints -------------------------------------------------------------------------


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_named(tmp_path, truth):
    whole, draw = checkpoints(truth(STEPS))[0], random.Random(0)
    copy, state = shutil.copytree(whole, tmp_path / "copy"), verify_checkpoint(whole)
    for file in sorted(copy.iterdir()):
        size = file.stat().st_size
        some = [0, size - 1, *draw.choices(range(size), k=5)]
        for place in range(size) if file.name == "state.json" else some:
            flip(file, place)
            try:
                assert verify_checkpoint(copy) == state, f"{place} of {file.name} is not seen"
            except ValueError as error:
                assert file.name in str(error)
            flip(file, place)
    assert verify_checkpoint(copy) == state


def _damage(step, name, how):
    file = step / name
    if how == "flipped":
        flip(file, file.stat().st_size // 2)
    elif how == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()


DAMAGES = [("__1_0.distcp", "flipped"), ("__1_0.distcp", "truncated"), ("__0_0.distcp", "missing")]
DAMAGES += [("state.json", "flipped"), (".metadata", "missing")]


@pytest.fixture
def unfinished(tmp_path, truth):
    """A copy of the true run with checkpoints at 2 and 4 only."""
    copy = shutil.copytree(truth(STEPS), tmp_path / "run")
    for step in checkpoints(copy)[2:]:
        shutil.rmtree(step)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("name, how", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used(unfinished, truth, name, how):
    _damage(unfinished / "step-00000004", name, how)
    _, err = good(unfinished.parent, go_on(unfinished.parent, STEPS), 2)
    assert re.search(rf"warning: checkpoint run/step-00000004.*{name}.*trying an older", err)
    finishes(unfinished.parent, truth(STEPS))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again(unfinished):
    for step, (name, how) in zip(checkpoints(unfinished), DAMAGES, strict=False):
        _damage(step, name, how)
    before = contents(unfinished)
    codes, _, err = run(unfinished.parent, go_on(unfinished.parent, STEPS))
    assert codes == [2, 2] and before.keys() == contents(unfinished).keys()
    assert before["metrics.jsonl"] == contents(unfinished)["metrics.jsonl"]
    for text in err:
        assert re.search(r"error: no checkpoint in run is whole.*copy.*--overwrite", text), text
    for step in checkpoints(unfinished):
        assert re.search(rf"warning: checkpoint run/{step.name}: __1_0.distcp is damaged", err[0])


@pytest.mark.slow
def test_a_damaged_reference_is_refused_by_name(tmp_path):
    good(tmp_path, f"{RUN} {KL} --steps 2", 2)
    _damage(tmp_path / "run" / "reference", "__0_0.distcp", "flipped")
    before = contents(tmp_path / "run")
    codes, _, err = run(tmp_path, go_on(tmp_path, 4))
    assert codes == [2, 2] and contents(tmp_path / "run").keys() == before.keys()
    for text in err:
        assert re.search("checkpoint run/reference: __0_0.distcp is damaged.*copy", text), text


# A NaN, and a late rank ----------------------------------------------------------------------

BATCH = "train_grpo.Trainer.forward_backward"
ONE_UPDATE = f"{RUN} --minibatches 1"  # call n of BATCH is in step n - 1


def test_a_nan_in_one_ranks_batch_is_skipped_by_all_and_named(tmp_path):
    flags = f"{ONE_UPDATE} --max-skipped 2 --steps {STEPS}"
    codes, _, err = run(tmp_path, flags, *((1, BATCH, call, nan) for call in (2, 5, 6)))
    name = r"first in .*lm_head.weight on rank 1"
    assert codes == [2, 2] and re.findall(r"step (\d): skipped, .*" + name, err[0]) == ["1", "4"]
    for rank, text in enumerate(err):
        last = rf"rank {rank}: error: .*2 optimiser steps in a row.*{name}.*--lr"
        assert re.search(last, text), text
    lines = lines_of(tmp_path / "run")
    assert [line["policy_version"] for line in lines] == [1, 1, 2, 3, 3]
    assert [line["updates/skipped"] for line in lines] == [0, 1, 1, 1, 2]
    assert newest_checkpoint(tmp_path / "run").endswith("step-00000004")


@pytest.mark.slow
def test_it_does_not_matter_which_rank_a_nan_was_on(tmp_path):
    runs = []
    for culprit in range(2):
        (tmp_path / f"{culprit}").mkdir()
        flags = f"{ONE_UPDATE} --steps {STEPS}"
        codes, _, err = run(tmp_path / f"{culprit}", flags, (culprit, BATCH, 4, nan))
        assert codes == [0, 0] and f"on rank {culprit}" in err[0]
        runs.append(tmp_path / f"{culprit}" / "run")
    assert intact(*runs) == STEPS and lines_of(runs[0]) == lines_of(runs[1])
    assert [line["policy_version"] for line in lines_of(runs[0])] == [1, 2, 3, 3, 4, 5]


JOIN, STEP = "torch.distributed.init_process_group", "train_grpo.train_step"
LATE = [(0, STEP, 4), (1, STEP, 4), (0, DCP, 2), (1, DCP, 2), (0, JOIN, 1), (1, JOIN, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("rank, where, count", LATE)
def test_a_rank_that_is_30_s_late_is_waited_for(tmp_path, truth, rank, where, count):
    flags = f"{go_on(tmp_path, STEPS)} --timeout 60"
    codes, _, err = run(tmp_path, flags, (rank, where, count, sleep, 30))
    assert codes == [0, 0] and (tmp_path / "late").exists(), "\n".join(err)
    finished(tmp_path, truth(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("rank, where, count", LATE)
def test_a_rank_that_is_late_beyond_the_timeout_ends_the_run(tmp_path, truth, rank, where, count):
    flags = f"{go_on(tmp_path, STEPS)} --timeout 5"
    processes, log = begin(tmp_path, flags, 2, [(rank, where, count, sleep, 30)], _faulty)
    processes[1 - rank].join(60)
    ended = time.time()
    codes, _, err = end(processes, log, seconds=30 + 5 + MARGIN)
    assert ended - float((tmp_path / "late").read_text()) < 29, "it waited for the late rank"
    assert codes == [2, 2], "\n".join(err)
    for rank, text in enumerate(err):
        assert re.search(f"rank {rank}: error: {GONE}", text), text
    intact(tmp_path / "run", truth(STEPS))
    finishes(tmp_path, truth(STEPS))

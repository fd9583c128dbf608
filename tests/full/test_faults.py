"""Faults: kills, full disks, hostile files, NaNs, late and stopped ranks, two runs at once.

In each, two ranks either go on bit for bit, or both end in the stated time with a message that
says what happened and what to do; and what was saved stays whole. Faults are planted by a driver
in the ranks' processes, right before a call of a function, and are real: SIGKILL, the kernel's
/dev/full and RLIMIT_FSIZE, permission bits (root drops its capabilities, so that they hold).

    python -m pytest tests/full/test_faults.py             # the short form
    python -m pytest tests/full/test_faults.py -m slow     # every fault; each rank killed 20 times
"""

import ctypes
import functools
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import shortened, slow
from test_ranks import UNEQUAL, as_script, join, ranks, read_metrics, start
from test_run import (
    FLAGS, FROM_ROOT, FULL, GET, KL, TINY, _main, _task, as_torchrun, at, begin, contents, end,
    flip_a_bit,
    SHARD, free_port, good, refused, runs_made_once, same_tensors, struck, until, verified,
    wait_for_steps,
)  # fmt: skip

from full import rollouts
from full.__main__ import main
from full.checkpoint import Damaged, checkpoints, read_checkpoint
from full.directory import RunDirectory
from full.exits import leave
from full.export import require_one_process
from full.plans import Grid, Plan
from full.ranks import Stop, agree, connect, is_lost_rank, own_device, store_of_this_attempt

RUN = f"{TINY} --out run --save-every 2 --timeout 20"
STEPS, MANY, MOMENTS = 6, 100, 20  # steps of a run, of one that is killed often; kills of a rank
MARGIN = 40  # seconds beyond the timeout that a loaded machine may need
GONE = r"(starting|setting up|step \d+): another rank is gone or silent.*; "
GONE += r"(go on with --resume --out run|look at its error)\n"


def _faulty(rank, world, port, cwd, log, flags, faults):
    """A rank of a run. faults: (rank, function, which call, what happens before it, arguments)."""
    # A shell that starts tests in the background has them ignore Ctrl-C, and ranks inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for culprit, where, count, act, *args in faults:
        if culprit == rank:
            at(where, count, functools.partial(act, *args))
    _main(rank, world, port, cwd, log, flags, None)


def run(cwd, flags, *faults, seconds=200):
    return end(*begin(cwd, flags, 2, faults, _faulty), seconds)


def fails(done, *said, codes=(2, 2)):
    """The ranks have ended with these codes, and say this: a pattern each, or one for all.

    An error of all ranks may be named by rank 0 alone, but each rank says that it has lost another.
    """
    found, _, err = done
    assert found == [*codes], "\n".join(err)
    for rank, text in enumerate(err):
        pattern = said[rank % len(said)]
        if pattern not in (None, GONE) and len(said) == 1 and f"rank {rank}: error" not in text:
            assert rank > 0 and text.count("error: ") == 0
            continue
        assert pattern is None or re.search(f"rank {rank}: error: {pattern}", text), text


def kill(*call, **options):
    os.kill(os.getpid(), SIGKILL)


def sleep(seconds, *call, **options):
    Path("late").write_text(str(time.time()))
    time.sleep(seconds)


def stop(*call, **options):
    """This process stands still until somebody sends it SIGCONT."""
    Path("stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def is_there(path, *call):
    until(path.exists, f"no {path}")


def full(name, tensors, storage_writer, **options):
    """The file of this name in a checkpoint is on a device that is full."""
    Path(storage_writer.path, name).symlink_to("/dev/full")


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


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """steps -> the directory of an uninterrupted run that keeps every checkpoint."""
    straight = runs_made_once(tmp_path_factory)
    return lambda steps: straight(f"{RUN} --keep 1000 --steps {steps}", 2)


def lines_of(run):
    lines = RunDirectory(run).lines("metrics.jsonl")
    return [{k: v for k, v in x.items() if not k.startswith(UNEQUAL)} for x in lines]


def intact(run, truth, least=0):
    """The step of the newest checkpoint: whole, that of the true run, and at least so far."""
    found = RunDirectory(run).newest() if run.exists() else None
    if found is None:
        assert least == 0
        return 0
    same_tensors(found, truth / found.name)
    step = int(found.name[-8:])
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


START = 2.0  # seconds in which a kill before the first step falls: about what a start takes


def strike(cwd, truth, victim, moment, steps):
    """Begin or go on, SIGKILL a rank, and look at what is left; the newest checkpoint's step.

    moment: steps done in this start, and the part of two steps' seconds, or of START, after them.
    """
    saved, path = intact(cwd / "run", truth), cwd / "run" / "metrics.jsonl"
    old = path.stat().st_ino if path.exists() else None
    processes, log = begin(cwd, go_on(cwd, steps), 2, (), _faulty)
    pause = START
    if moment >= 1:
        wait_for_steps(cwd / "run", saved + int(moment), old)
        lines = RunDirectory(cwd / "run").lines(path.name)
        pause = 2 * np.mean([line["seconds/total"] for line in lines])
    time.sleep(moment % 1 * pause)
    processes[victim].kill()
    for stream in ("out", "err"):  # a victim of the first moment has none
        Path(f"{log}-{stream}-{victim}").touch()
    codes, said = [2, 2], [GONE, GONE]
    codes[victim], said[victim] = -SIGKILL, None
    fails(end(processes, log, seconds=20 + MARGIN), *said, codes=codes)
    return intact(cwd / "run", truth, least=saved)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_twenty_moments_costs_nothing(tmp_path, truth, victim):
    draw, saved = random.Random(victim), 0
    for _ in range(MOMENTS):
        saved = strike(tmp_path, truth(MANY), victim, draw.uniform(0, 6), MANY)
    assert 0 < saved < MANY
    finishes(tmp_path, truth(MANY), MANY)


ENDS = ["torch.distributed.barrier", "pathlib.Path.replace"]  # the last call; config.json


@pytest.mark.slow
@pytest.mark.parametrize("where", ENDS)
def test_a_kill_at_either_end_of_a_run_costs_nothing(tmp_path, truth, where):
    done = run(tmp_path, go_on(tmp_path, STEPS), (0, where, 1, kill))
    fails(done, None, ".*another rank is gone", codes=[-SIGKILL, 2])
    finishes(tmp_path, truth(STEPS))


SHARDS = [SHARD, SHARD.replace("1-model", "2-model")]  # of rank 0, of rank 1
SAVE, DCP = "full.trainer.Trainer.save_checkpoint", "torch.distributed.checkpoint.save"
OUT, BATCH = "full.directory.RunDirectory.claim", "full.trainer.Trainer.forward_backward"
ONE_UPDATE = "--minibatches 1"  # call n of BATCH is in step n - 1
ROOM = r"checkpoint run/step-\d+ not written .*older ones are whole.*--resume --out run"
LOG = r"run/(metrics|rollouts).jsonl not written .*--resume --out run"


def nans(*calls):
    return [(1, BATCH, call, nan) for call in calls]


def flipped(model, optimizer):
    """A bit of one weight, as a cosmic ray would: the value stays finite."""
    p = next(iter(model.parameters()))
    p.data.view(torch.int32)[0, 0] ^= 1 << 12


# Right before the second comparison, since zero1 sends each row from its one owner to all at every
# update: a bit that flips in between is either mended or everybody's.
FLIP = [(1, "full.saves.replica_difference", 2, flipped)]
DIFFER = "replicas differ in .*model.embed_tokens.weight: rank 0 / rank 1 hold other"
DIFFER += ".*nothing is saved"
# name -> more flags; (rank, where, when, what happens) ..; what ranks say; the steps that are saved
FAULTS = {
    "a full disk, rank 0": ("", [(0, DCP, 2, full, SHARD)], [ROOM], [2]),
    "a full disk, rank 1": ("", [(1, DCP, 2, full, SHARDS[1])], [ROOM], [2]),
    "a disk that fills up, rank 0": ("", [(0, DCP, 2, fills_up, None, 9999)], [ROOM], [2]),
    "a disk that fills up, rank 1": ("", [(1, DCP, 2, fills_up, None, 9999)], [ROOM], [2]),
    "a full disk, state": ("", [(0, "json.dump", 2, full_below)], [ROOM], [2]),
    "a full disk, metrics": (
        "", [(0, "full.logs.Log.step", 4, fills_up, "run/metrics.jsonl", 99)], [LOG, GONE], [2]),
    "a directory that turns read-only": ("", [(0, SAVE, 2, read_only, "run")], [ROOM], [2]),
    "read-only from the start": (
        "", [(0, OUT, 1, read_only, ".")], [r"run.*Permission denied.*--out.*\n\Z"], []),
    "full from the start": (
        "", [(0, OUT, 1, fills_up, None, 999)], [r"run.*File too large.*--out.*\n\Z"], []),
    "a flipped bit": ("--plan d2", FLIP, [DIFFER], [2]),
    "a flipped bit, zero1": ("--plan d2 --data-parallel zero1", FLIP, [DIFFER], [2]),
    "steps that are skipped": (
        f"{ONE_UPDATE} --save-every 1 --keep 2", nans(5, 6),
        [".*the newest checkpoint is run/step-00000004"], [3, 4]),
}  # fmt: skip
DEFAULT = "read-only from the start", "a flipped bit", "steps that are skipped"


def fails_and_keeps(cwd, truth, name):
    """Begin under this fault; both ranks end and say so, and nothing saved is lost."""
    more, faults, said, saved = FAULTS[name]
    done = run(cwd, f"{RUN} --steps {STEPS} {more}", *faults)
    fails(done, *said)
    if saved:
        assert "2 rank(s), plan d2" in done[1][0], "what was printed before is lost"
    else:
        assert done[1] == ["", ""] and {text.count("\n") for text in done[2]} <= {0, 1}
    for folder in (cwd, cwd / "run"):
        if folder.exists():
            folder.chmod(0o755)
    assert [int(path.name[-8:]) for path in checkpoints(cwd / "run")] == saved
    assert not list(cwd.glob("run/step-*.tmp")), "what was cut short still takes room"
    assert more or intact(cwd / "run", truth) == (saved or [0])[-1]


@pytest.mark.parametrize("name", shortened(FAULTS, *DEFAULT))
def test_a_fault_ends_both_ranks_by_name_and_nothing_saved_is_lost(tmp_path, truth, name):
    fails_and_keeps(tmp_path, truth(STEPS), name)
    if not FAULTS[name][0] and name not in DEFAULT:
        finishes(tmp_path, truth(STEPS))


def test_a_full_disk_at_the_first_save_says_that_nothing_was_saved(tmp_path):
    processes = begin(tmp_path, f"{RUN} --steps 2", 1, [(0, DCP, 1, full, SHARD)], _faulty)
    codes, _, err = end(*processes)
    assert codes == [2] and err[0].count("\n") == 1
    assert "checkpoint run/step-00000002 not written (" in err[0] and "No space left" in err[0]
    assert "nothing was saved yet: make room" in err[0] and not checkpoints(tmp_path / "run")
    assert err[0].endswith(", then begin again with --resume --out run\n")
    good(tmp_path, "--resume --out run")


def test_one_run_survives_fault_after_fault(tmp_path, truth):
    """A full disk, a kill, and ranks that are 1 s late to the start, a step and a checkpoint."""
    fails_and_keeps(tmp_path, truth(STEPS), "a full disk, rank 1")
    strike(tmp_path, truth(STEPS), 0, 1.5, STEPS)
    late = [(1, JOIN, 1, sleep, 1), (0, GET, 2, sleep, 1), (1, SAVE, 1, sleep, 1)]
    codes, _, err = run(tmp_path, go_on(tmp_path, STEPS), *late)
    assert codes == [0, 0] and (tmp_path / "late").exists(), "\n".join(err)
    finished(tmp_path, truth(STEPS))


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_named(tmp_path, truth, process_group):
    whole, draw = checkpoints(truth(STEPS))[0], random.Random(0)
    copy, state = shutil.copytree(whole, tmp_path / "copy"), verified(whole)
    for file in sorted(copy.iterdir()):
        size = file.stat().st_size
        some = [0, size - 1, *draw.choices(range(size), k=5)]
        for place in range(size) if file.name == "state.json" else some:
            flip_a_bit(file, place)
            try:
                read_checkpoint(copy, {}, only="none of its names")
                raise AssertionError(f"{place} of {file.name} is not seen")
            except ValueError as error:
                assert isinstance(error, Damaged) and file.name in str(error)
            flip_a_bit(file, place)
        assert read_checkpoint(copy, {}, only="none of its names") == state


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again(tmp_path, truth):
    copy = shutil.copytree(truth(STEPS), tmp_path / "run")
    first, second, last = (path / SHARDS[1] for path in checkpoints(copy))
    flip_a_bit(first)
    os.truncate(second, second.stat().st_size // 2)
    last.unlink()
    before = contents(copy)
    done = run(tmp_path, go_on(tmp_path, STEPS))
    fails(done, r"no checkpoint in run is whole.*copy.*--out")
    assert before.keys() == contents(copy).keys()
    assert before["metrics.jsonl"] == contents(copy)["metrics.jsonl"]
    for step in checkpoints(copy):
        warning = rf"warning: .*checkpoint run/{step.name}: {SHARDS[1]} is (damaged|missing)"
        assert re.search(warning, done[2][0])


@pytest.mark.slow
def test_a_damaged_reference_is_refused_by_name(tmp_path):
    good(tmp_path, f"{RUN} {KL} --steps 2", 2)
    flip_a_bit(tmp_path / "run" / "reference" / SHARD)
    before = contents(tmp_path / "run")
    done = run(tmp_path, go_on(tmp_path, 4))
    fails(done, f"checkpoint run/reference: {SHARD} is damaged.*copy")
    assert contents(tmp_path / "run").keys() == before.keys()


def test_a_nan_in_one_ranks_batch_is_skipped_by_all_and_named(tmp_path):
    flags = f"{go_on(tmp_path, STEPS)} {ONE_UPDATE} --save-every 1"
    done = run(tmp_path, flags, *nans(2, 4, 5, 6))
    name = r"first in .*lm_head.weight on rank 1"
    fails(done, rf".*3 optimizer steps in a row.*{name}.*--lr")
    assert re.findall(r"step (\d): skipped, .*" + name, done[2][0]) == ["1", "3", "4"]
    lines = lines_of(tmp_path / "run")
    assert [line["policy_version"] for line in lines] == [1, 1, 2, 2, 2]
    assert [line["updates/skipped"] for line in lines] == [0, 1, 1, 2, 3]
    assert RunDirectory(tmp_path / "run").newest().name == "step-00000003"


JOIN = "torch.distributed.init_process_group"
PLACES = {  # where rank 1 is stopped: the function, and before which call
    "a step": (GET, 3),
    "a gradient": (BATCH, 3),
    "an update": ("full.trainer.Trainer.optim_step", 3),
    "a push": ("full.trainer.Trainer.push_weights", 3),
    "a save": (DCP, 1),
    "the start": (JOIN, 1),
    "its groups": ("torch.distributed.new_subgroups_by_enumeration", 1),
}
UNDER = {
    "d2": "--plan d2", "zero1": "--plan d2 --data-parallel zero1", "c2": "--plan c2",
    "p2": "--plan p2 --layers 2",
    "sparse": "--plan d2 --tree sparse", "t2": "--plan t2 --heads 4",
}  # fmt: skip
STOPS = [f"{plan}: {place}" for plan in UNDER for place in PLACES]


@pytest.mark.parametrize("name", shortened(STOPS, "c2: a gradient"))
def test_a_stopped_rank_is_waited_for_no_longer_than_the_timeout(tmp_path, name):
    """And when it wakes, long after, it ends by itself with the same message."""
    plan, place = name.split(": ")
    flags = f"{TINY} --out run --timeout 5 --steps {STEPS} {UNDER[plan]}"
    processes, log = begin(tmp_path, flags, 2, [(1, *PLACES[place], stop)], _faulty)
    is_there(tmp_path / "stopped")
    processes[0].join(5 + MARGIN)
    waited = processes[0].is_alive()
    os.kill(processes[1].pid, signal.SIGCONT)
    done = end(processes, log, seconds=5 + MARGIN)
    assert not waited, "rank 0 still waited"
    fails(done, GONE)


def _arrive(rank, store, start, late):
    """What this rank hears from the other one by the store of this start."""
    time.sleep(0.3 * late)  # the other rank finds what older starts have left
    mine = store_of_this_attempt(store, rank, 2, timeout=20)
    mine.set(f"from {rank}", start)
    return mine.get(f"from {1 - rank}").decode()


@pytest.mark.parametrize("later", [0, 1])
def test_ranks_that_start_again_find_each_other_and_no_older_start(later):
    """By one store, as torchrun gives it to every start of its ranks."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    store.set("attempt", "died early")  # by a start whose rank 0 died before it had answered
    for begun in ("0", "1"):
        with ThreadPoolExecutor() as pool:
            heard = [pool.submit(_arrive, rank, store, begun, rank == later) for rank in (0, 1)]
        assert [x.result() for x in heard] == [begun] * 2


def test_a_rank_0_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set("attempt", "died early")
    with pytest.raises(dist.DistStoreError, match="rank 0 did not answer within 1 seconds"):
        store_of_this_attempt(store, 1, 2, timeout=1)


ENVIRONMENTS = {  # what the environment says, and what `python -m full` says of it
    "a port in use": (dict(RANK="0", WORLD_SIZE="1"), "expected a free port at 127.0.0.1:"),
    "no number of ranks": (dict(RANK="0", WORLD_SIZE=""), "WORLD_SIZE: expected a number, .* ''"),
    "a word": (dict(RANK="0", WORLD_SIZE="two"), "WORLD_SIZE: expected a number, .* 'two'"),
    "no rank": (dict(RANK="x", WORLD_SIZE="2"), "RANK: expected a number, .* 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_an_environment_that_is_wrong_is_one_line(tmp_path, case):
    environment, text = ENVIRONMENTS[case]
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{held.getsockname()[1]}")
        flags = ("--device", "cpu", "--timeout", "3")
        code, _, said = as_script("full", *flags, cwd=tmp_path, **environment | where)
    assert code == 2 and re.search(text, said) and said.count("\n") == 1, said


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_an_empty_variable_is_an_absent_one(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setenv(name, "")
    assert main(["export", f"{tmp_path}", f"{tmp_path / 'new'}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no ") and said.count("\n") == 1
    require_one_process("a test")


def _joins(rank, world, port, folder, late, name):
    """Exit with 0 if the late rank has made as many groups as this one, each a second later."""
    as_torchrun(rank, world, port)
    made, calls, make = folder / "made", [], getattr(dist, name)

    def counted(*args, **kwargs):
        group = make(*args, **kwargs)
        calls.append(name)
        if rank == late:
            time.sleep(1)
            made.write_text(f"{len(calls)}")
        return group

    setattr(dist, name, counted)
    connect("cpu")
    if name == "new_subgroups_by_enumeration":
        Grid(Plan.parse(f"d{world}"))
    os._exit(0 if made.read_text() == f"{len(calls)}" else 1)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", ["init_process_group", "new_subgroups_by_enumeration"])
def test_no_rank_leaves_while_another_joins(tmp_path, late, name):
    """A refusal closes connections, by which the late rank may still join a group."""
    processes = start(2, _joins, 2, free_port(), tmp_path, late, name)
    assert join(processes) == [0, 0]


def test_no_rank_leaves_while_another_ends_its_run(tmp_path):
    hold = [(1, "torch.distributed.barrier", 1, is_there, tmp_path / "let go")]
    processes, log = begin(tmp_path, f"{FLAGS} 1", 2, hold, _faulty)
    wait_for_steps(tmp_path / "run", 1)
    processes[0].join(2)
    waits = processes[0].is_alive()
    (tmp_path / "let go").touch()
    assert end(processes, log)[0] == [0, 0] and waits


def is_started_again(cwd, machines, victim, flags, lines):
    """So many torchruns share two ranks; one is killed after so many lines, and the run ends well.

    Each torchrun may start its ranks again.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
    launch += ["--nnodes", f"{machines}", "--nproc-per-node", f"{2 // machines}", "--rdzv-id", "1"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    launch += [*FULL, *flags.split(), "--resume"]
    logs = [cwd / f"log-{machine}" for machine in range(machines)]
    how = dict(cwd=cwd, env=FROM_ROOT, stderr=subprocess.STDOUT)
    started = [subprocess.Popen(launch, stdout=log.open("w"), **how) for log in logs]
    wait_for_steps(cwd / "run", lines)
    pids = []
    for pid in (torchrun.pid for torchrun in started):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pids += [x for x in children if "full" in Path(f"/proc/{x}/cmdline").read_text()]
    os.kill(sorted(map(int, pids))[victim], SIGKILL)
    codes = [torchrun.wait(300) for torchrun in started]
    texts = [path.read_text() for path in logs]
    assert codes == [0] * machines, "\n".join(texts)
    assert sum(text.count("rank(s), plan") for text in texts) >= 2, "it was never started again"


@pytest.mark.slow
@pytest.mark.parametrize("machines, victim", [(1, 1), (2, 1), (2, 0)])
def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path, truth, machines, victim):
    """With the bits of the run that nobody killed; `test_ranks_that_start_again_..` is quick."""
    lines = random.Random(machines).randint(5, 15)
    is_started_again(tmp_path, machines, victim, f"{RUN} --steps {MANY}", lines)
    finished(tmp_path, truth(MANY), MANY)


def test_resume_begins_a_run_where_there_is_none_and_goes_on_with_it(tmp_path, truth):
    flags = f"{RUN} --resume --steps"
    out, _ = good(tmp_path, f"{flags} 2", 2)
    assert "run holds no run to resume: one begins" in out
    out, _ = good(tmp_path, f"{flags} {STEPS}", 2)
    assert f"run/step-00000002\nfrom step 2 of {STEPS}" in out
    finished(tmp_path, truth(STEPS))
    refused(tmp_path, f"{TINY} --resume --steps 2", "--resume needs --out")


@pytest.mark.parametrize("world", shortened([1, 2], 2))
def test_ctrl_c_saves_and_a_second_one_ends_at_once(tmp_path, world):
    codes, out, err = struck(tmp_path, RUN, world, -1, signal.SIGINT)
    assert codes == [130] * world and "Traceback" not in "".join(err)
    said = re.search(r"SIGINT: saved after (\d+) steps; go on with --resume --out run", out[0])
    assert RunDirectory(tmp_path / "run").newest().name == f"step-{int(said[1]):08d}"

    hang = [(world - 1, GET, 2, sleep, 100)]
    processes, log = begin(tmp_path, "--resume --out run --timeout 200", world, hang, _faulty)
    is_there(tmp_path / "late")
    time.sleep(1)  # by now the other rank is inside a collective, where Python runs no handler
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
    time.sleep(1.2)  # longer than a key press that torchrun repeats
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
    codes, _, err = end(processes, log, seconds=MARGIN)
    # A rank inside a collective ends because the other one has ended.
    assert codes[-1] == 130 and {*codes} <= {130, 2} and "Traceback" not in "".join(err)


HANGS = """if RANK == '0' and self.asked > 30:
            if not Path('resumed').exists():
                Path('hangs').touch(); time.sleep(99)
        self.asked += 1"""


def _left(*args):
    """A rank that ends as `python -m full` does. Its thread would be waited for otherwise."""
    rollouts.GRACE = 1
    try:
        _main(*args)
    except SystemExit as ended:
        leave(ended.code, at_once=dist.is_initialized())


@pytest.mark.parametrize("how, world", [
    ("limit", 1), ("limit", 2), ("SIGTERM", 1), *slow(("SIGTERM", 2), ("SIGINT", 1), ("SIGINT", 2))
])  # fmt: skip
def test_a_reply_that_never_comes_ends_the_run_saved(tmp_path, how, world):
    top = "import os, time\nfrom pathlib import Path\nRANK = os.environ.get('RANK', '0')"
    flags = _task(tmp_path, top=top, init="self.asked = 0", reply=HANGS)
    flags = flags.replace("--steps 2", "--steps 9")
    more = " --reply-timeout 1" if how == "limit" else ""
    processes, log = begin(tmp_path, flags + more, world, None, _left)
    is_there(tmp_path / "hangs")
    if how != "limit":
        for process in processes:
            os.kill(process.pid, getattr(signal, how))
    codes, out, err = end(processes, log, seconds=MARGIN)
    want = 2 if how == "limit" else 128 + getattr(signal, how)
    assert codes == [want] * world, err
    said = err[0] if how == "limit" else out[0]
    steps = len(read_metrics(tmp_path / "run"))
    text = r"Mine has not replied after .* in group \d+, rollout \d+, to the answer .*"
    text += f": saved after {steps} steps; go on with --resume"
    assert re.search(text, said), (out, err)
    (tmp_path / "resumed").touch()
    codes, _, err = end(*begin(tmp_path, f"{flags} --resume", world), seconds=MARGIN)
    assert codes == [0] * world, err
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [*range(9)]


def test_ctrl_c_before_the_first_step_leaves_no_traceback(tmp_path):
    hang = [(0, "full.run.build", 1, sleep, 99)]
    processes, log = begin(tmp_path, f"{RUN} --steps 9", 1, hang, _faulty)
    is_there(tmp_path / "late")
    os.kill(processes[0].pid, signal.SIGINT)
    codes, _, err = end(processes, log)
    assert codes == [130] and err[0].count("\n") == 1 and "interrupted" in err[0]


def _forks(rank):
    """The signal that ends a child of this process, and those that this process has seen."""
    seen = Stop()
    child = os.fork()
    if not child:
        time.sleep(60)
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    ended_by = os.waitpid(child, 0)[1]
    before = seen.number
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    return ended_by, before, seen.number


def test_a_process_that_a_reward_forks_ends_by_its_own_signals(tmp_path):
    assert ranks(tmp_path, 1, _forks) == [(signal.SIGTERM, 0, signal.SIGTERM)]


@pytest.mark.quick
def test_a_lost_rank_is_known_by_where_the_error_was_raised():
    said = "Connection closed by peer"
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = dist.DistNetworkError("reset")
    for lost in (RuntimeError(f"[/build/gloo/gloo/transport/tcp/pair.cc:553] {said}"),
                 dist.DistBackendError("anything"), wrapped):  # fmt: skip
        assert is_lost_rank(lost)
    try:
        raise RuntimeError(f"{said}: timed out")
    except RuntimeError as error:
        assert not is_lost_rank(error)


def _agreed(rank, error):
    """The text of what `agree` raises on this rank, and how long it took."""
    def fails():
        raise error

    began = time.monotonic()
    with pytest.raises(Exception) as caught:
        agree(fails)
    return f"{caught.type.__name__}: {caught.value}", time.monotonic() - began


FAILURES = [  # raised on rank 0, and what rank 0 and rank 1 say
    (ValueError("no run"), "ValueError: no run", "ValueError: no run"),
    (FileNotFoundError("no file"), *["FileNotFoundError: no file"] * 2),
    (KeyError("x"), "KeyError: 'x'", "RuntimeError: rank 0 ended with KeyError: 'x'"),
]


@pytest.mark.parametrize("error, first, other", FAILURES)
def test_any_error_of_rank_0_reaches_all_ranks_at_once(tmp_path, error, first, other):
    texts, seconds = zip(*ranks(tmp_path, 2, _agreed, error))
    assert texts == (first, other) and max(seconds) < 10


@pytest.mark.quick
def test_a_process_takes_the_device_of_its_local_rank_if_it_is_there(monkeypatch):
    taken = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = [own_device(name) for name in ("cpu", "", "cuda")]
    assert chosen == ["cpu", "cuda:3", "cuda:3"]
    assert taken == ["cuda:3"] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device("") == "cpu"

    # One that is not there is refused before ranks meet.
    before = dist.is_initialized()
    for device in ("cuda", "cdua", "cuda:0", "CPU"):
        with pytest.raises(ValueError, match=f"expected .*got '{device}'"):
            connect(device)
    assert dist.is_initialized() == before and len(taken) == 2


def test_resume_imports_no_file_that_the_run_names(tmp_path):
    good(tmp_path, _task(tmp_path))
    evil = "from pathlib import Path\nPath('executed').touch()\n"
    (tmp_path / "run" / "evil.py").write_text(evil + (tmp_path / "task.py").read_text())
    config = tmp_path / "run" / "config.json"
    for named in ("run/evil.py:Mine", "task.py:Mine"):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"task": named}))
        text = "give it again, as --task FILE.py:Mine"
        refused(tmp_path, "--resume --out run --steps 3", text)
    good(tmp_path, "--resume --out run --steps 3 --task task.py:Mine")
    assert len(read_metrics(tmp_path / "run")) == 3 and not (tmp_path / "executed").exists()


ONCE = f"{FLAGS} 4 --save-every 2"
PAIRS = {"--out": ONCE, "--resume": "--resume --out run --steps 8"}


@pytest.mark.parametrize("name", shortened(PAIRS, "--out"))
def test_of_two_runs_in_one_directory_the_second_is_refused(tmp_path, name):
    if name != "--out":
        good(tmp_path, ONCE)
    # The one that has the directory waits there until the other has ended.
    hold = [(0, "full.run.run", 1, is_there, tmp_path / "let go")]
    runs = [begin(tmp_path, PAIRS[name], 1, hold, _faulty) for _ in range(2)]
    until(lambda: not all(processes[0].is_alive() for processes, _ in runs), "both have it")
    (tmp_path / "let go").touch()
    ends = sorted(end(*run) for run in runs)
    assert [codes for codes, _, _ in ends] == [[0], [2]], [err for _, _, err in ends]
    assert "error: run is in use by another process: wait" in ends[1][2][0]
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [*range(len(lines))]
    assert (tmp_path / "run" / "lock").read_bytes() == b""


@pytest.mark.quick
def test_where_there_is_no_flock_it_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def no_locks(*call):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with RunDirectory(tmp_path).locked():
        assert f"{tmp_path} cannot be locked ([Errno 38]" in capsys.readouterr().err


HOSTILE = {  # the file of a run, its text, what a resume must say
    "config.json": ('{"advantage": [[' + "[" * 9999, "run/config.json"),
    "metrics.jsonl": ("5\n", "run/metrics.jsonl line 1"),
    "samples.jsonl": ("{}\n", "run/samples.jsonl"),
}


@pytest.mark.parametrize("name", shortened(HOSTILE, "metrics.jsonl"))
def test_a_hostile_file_of_a_run_is_named_in_one_line(tmp_path, truth, name):
    run, (text, says) = shutil.copytree(truth(STEPS), tmp_path / "run"), HOSTILE[name]
    (run / name).write_text(text)
    refused(tmp_path, f"--resume --out run --steps {STEPS + 1}", says)


def test_a_full_disk_in_the_last_export_says_what_it_says_elsewhere(tmp_path):
    flags = f"{FLAGS} 2 --heads 4 --plan t2"
    done = run(tmp_path, flags, (0, "full.export.save_hf", 1, fills_up, None, 3000))
    said = ".*run/hf not written .*File too large.*make room.*--resume --out run"
    fails(done, said, None, codes=(2, 0))
    good(tmp_path, "--resume --out run", 2)
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


def test_no_rank_waits_for_the_last_export(tmp_path):
    late = (0, "full.export.save_hf", 1, sleep, 5)
    codes, _, err = run(tmp_path, f"{FLAGS} 2 --timeout 3", late)
    assert codes == [0, 0], err
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


def test_a_run_that_trains_nothing_says_so(tmp_path):
    done = run(tmp_path, f"{FLAGS} 3 --temperature 1e-320")
    fails(done, ".*step 0: no finite token.*--temperature")
    flags = f"{TINY} --out other --steps 2 --dynamic-sampling --entropy-coef 0 --max-new-tokens 1"
    _, err = good(tmp_path, flags)
    assert err.count("no update, since nothing was left to train on") == 2


def test_a_refusal_leaves_the_directory_free(tmp_path):
    """What only a task, a package or a split model can tell is found before a directory is made."""
    flags = _task(tmp_path)
    text = (tmp_path / "task.py").read_text()
    derived = text.replace("class Mine:", "from full.tasks import Task\nclass Mine(Task):")
    (tmp_path / "task.py").write_text(derived)
    code, _, err = as_script("full", *flags.split(), "--demos", "1", cwd=tmp_path)
    assert code == 2 and "Mine has no demonstrations" in err, err
    if not importlib.util.find_spec("tensorboard"):
        refused(tmp_path, f"{flags} --tensorboard", "--tensorboard: pip install")
    refused(tmp_path, f"{FLAGS} 2 --plan p2 --pp-schedule zbv", "layers", 2)
    refused(tmp_path, f"{FLAGS} 2 --clip-high 1e300", "--clip-high must be finite")
    assert not (tmp_path / "run").exists()

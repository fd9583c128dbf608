"""Faults: one matrix of what happens, and when, and what must hold; and all that resumes.

A row of FAULTS plants real faults in the ranks of a run, right before a call of a function:
SIGKILL, a full disk, permission bits. The ranks end in time, with the exit codes of the row
and a message that says what happened and what to do. The row's checkpoints stand, whole. The run
goes on to its end, bit for bit the run to which nothing happened.

    python -m pytest tests/full/test_faults.py             # the short form
    python -m pytest tests/full/test_faults.py -m slow     # every fault
"""

import ctypes
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import shortened
from test_ranks import join, ranks, read_metrics, start
from test_run import (
    FROM_ROOT, FULL, GET, KL, SAVING, SHARD, TINY, _main, _task, as_torchrun,
    begin, call, contents, end, flip_a_bit, free_port, good, kill, killed, same_run,
    until, verified, wait_for_steps,
)  # fmt: skip

from full.__main__ import leave
from full.learn import rollouts
from full.model.hf import save_hf
from full.ranks.checkpoint import Damaged, checkpoints, read_checkpoint, sealed
from full.ranks.joining import Stop, agree, connect, is_lost_rank, own_device, store_of_this_attempt
from full.ranks.plans import Grid, Plan
from full.run.directory import RunDirectory
from full.tiny import tiny_model

STEPS, MANY = 6, 100  # steps of a run, and of one that is started again
RUN = f"{TINY} --out run --save-every 2 --timeout 20 --keep 9"
MARGIN = 40  # seconds beyond the timeout that a loaded machine may need
GONE = r"(starting|setting up|step \d+): another rank is gone or silent.*; "
GONE += r"(go on with --resume --out run|look at its error)\n"


def run(cwd, flags, *faults, world=2, seconds=200):
    return end(*begin(cwd, flags, world, faults), seconds)


def fails(done, *said, codes=(2, 2)):
    """The ranks have ended with these codes, and say this: a pattern each, or one for all.

    Of codes 2 it is an error. An error of all ranks may be named by rank 0 alone, but each rank
    says that it has lost another.
    """
    found, outs, errs = done
    assert found == [*codes], "\n".join(errs)
    assert not any("Traceback" in text for rank, text in enumerate(errs) if codes[rank] >= 128)
    for rank, text in enumerate(errs):
        pattern, prefix = said[rank % len(said)], f"rank {rank}: " if len(codes) > 1 else ""
        is_error = codes[rank] == 2
        if is_error and rank and pattern != GONE and len(said) == 1 and "error: " not in text:
            continue
        text, prefix = (text, f"{prefix}error: ") if is_error else (outs[rank] + text, "")
        assert pattern is None or re.search(prefix + pattern, text), text


# What happens ------------------------------------------------------------------------------------


def send(number, *call, **options):
    os.kill(os.getpid(), number)


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


def nan_in(name, trainer, *call):
    """In one entry of this parameter's gradient."""
    dict(trainer.model.named_parameters())[name].grad.view(-1)[3] = np.nan


# The matrix --------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """What happens to a run, and what must hold."""

    faults: list  # (rank or None for all, function, which call, what happens before it, ..)
    says: list = []  # a pattern for each rank, None for nothing; or one for all: see `fails`
    saved: str = ""  # the numbers of the steps whose checkpoints stand
    flags: str = ""
    codes: tuple = (2, 2)
    task: dict = {}  # lines of a task of the run's own: see _task
    goes_on: bool = True


DIES, BOTH, ONE = (-SIGKILL, 2), (-SIGKILL, -SIGKILL), (-SIGKILL,)
SHARDS = [SHARD, SHARD.replace("1-model", "2-model")]  # of rank 0, of rank 1
JOIN, BUILD = "torch.distributed.init_process_group", "full.run.run.build"
SAVE, DCP = "full.learn.trainer.Trainer.save_checkpoint", "torch.distributed.checkpoint.save"
OUT, BATCH = "full.run.directory.RunDirectory.claim", "full.learn.trainer.Trainer.forward_backward"
UPDATE, RENAME = "full.learn.trainer.Trainer.optim_step", "pathlib.Path.rename"
GROUPS = "torch.distributed.new_subgroups_by_enumeration"
PUSH = "full.learn.trainer.Trainer.push_weights"
EXPORT = "full.run.build.save_hf"
EVALUATE, RMTREE = "full.learn.batches.evaluate", "shutil.rmtree"
ROOM = r".*checkpoint run/step-\d+ not written .*older ones are whole.*--resume --out run"
LOG = r".*run/(metrics|rollouts).jsonl not written .*--resume --out run"
NANS = "--minibatches 1 --save-every 1"  # call n of BATCH is in step n - 1
UP = "model.layers.0.mlp.up_proj.weight"
PLACE = r"\((in group \d+, rollout \d+; )?.*task\.py, line \d+, in Mine.reply\)\n\Z"


OWN_ERROR = """
class Own(ValueError):  # which pickle cannot make again, since it takes two arguments
    def __init__(self, text, number):
        super().__init__(f"{text} {number}")
"""


def on_rank_1(line):
    return f"if RANK == '1': {line}"


# when, and what -> the row
FAULTS = {
    "start: Ctrl-C": Fault([(0, BUILD, 1, send, SIGINT)], ["interrupted"], codes=(130,),
                           goes_on=False),
    "start: read-only": Fault([(0, OUT, 1, read_only, ".")],
                              [r"run.*Permission denied.*--out.*\n\Z"], goes_on=False),
    "start: a task's file ends one rank": Fault(
        [], [None, r"SystemExit: only here \(.*task\.py, line \d+, in <module>\)\n\Z"],
        goes_on=False,
        task=dict(top=on_rank_1("raise SystemExit('only here')"))),
    "start: a task of one rank": Fault(
        [], [None, r"only here 7 \(.*task\.py, line \d+, in Mine.__init__\)\n\Z"], goes_on=False,
        task=dict(top=OWN_ERROR, init=on_rank_1("raise Own('only here', 7)"))),
    "sampling: killed": Fault([(None, GET, 4, kill)], saved="2", flags=KL, codes=ONE),
    "sampling: both ranks killed, masters of zero1, a critic": Fault(
        [(None, GET, 4, kill)], saved="2", codes=BOTH,
        flags="--data-parallel zero1 --compute-dtype bfloat16 --advantage gae"),
    "sampling: one rank killed": Fault([(0, GET, 4, kill)], [None, GONE], "2", codes=DIES),
    "sampling: SIGTERM to one rank": Fault(
        [(1, GET, 4, send, SIGTERM)],
        ["SIGTERM: saved after 4 steps; go on with --resume --out run", None], "2 4",
        codes=(143, 143)),
    "sampling: Ctrl-C": Fault([(0, GET, 3, send, SIGINT)],
                              ["SIGINT: saved after 3 steps; go on with --resume --out run"],
                              "2 3", codes=(130,)),
    "sampling: late ranks": Fault([(1, JOIN, 1, sleep, 1), (0, GET, 2, sleep, 1),
                                   (1, SAVE, 1, sleep, 1)], saved="2 4 5 6", codes=(0, 0)),
    "sampling: a reply exits": Fault([], [".*another rank is gone", rf"SystemExit: 0 {PLACE}"],
                                     task=dict(reply=on_rank_1("import sys; sys.exit(0)"))),
    "update: NaN of a batch, fsdp": Fault(
        [(1, BATCH, n, nan) for n in (5, 6)], [".*the newest checkpoint is run/step-00000004"],
        "1 2 3 4", f"{NANS} --data-parallel fsdp", goes_on=False),
    "update: a rank hangs": Fault([(1, BATCH, 3, stop)], [GONE], "", "--plan c2 --timeout 3"),
    "log: full disk": Fault([(0, "full.run.logs.Log.step", 4, fills_up, "run/metrics.jsonl", 99)],
                            [LOG, GONE], "2"),
    "save: the first finds a full disk": Fault(
        [(0, DCP, 1, full, SHARD)],
        [r"checkpoint run/step-00000002 not written \(.*No space left.*nothing was saved yet: free "
         r"disk.*, then go on with --resume --out run\n\Z"], codes=(2,)),
    "save: full disk, rank 1": Fault([(1, DCP, 2, full, SHARDS[1])], [ROOM], "2"),
    "save: one rank killed": Fault([(0, "os.fsync", 3, kill)], [None, GONE], flags=KL, codes=DIES),
    "save: killed before its name": Fault([(None, RENAME, 2, kill)], saved="2", codes=ONE),
    "end: killed before the export's name": Fault([(None, RENAME, 5, kill)], saved="2 4 5 6",
                                                  codes=ONE),
    "start: a plan that its model cannot have": Fault(
        [], [".*layers"], flags="--plan p2 --pp-schedule zbv", goes_on=False),
    "end: full disk in the export": Fault(
        [(0, EXPORT, 1, fills_up, None, 3000)],
        [".*run/hf not written .*File too large.*free disk space.*--resume --out run"], "2 4 5 6",
        "--heads 4 --plan t2"),
    "end: a late export": Fault([(0, EXPORT, 1, sleep, 4)], saved="2 4 5 6", flags="--timeout 3",
                                codes=(0, 0)),
}  # fmt: skip
SLOW = {  # more moments of the same
    **{f"sampling: masters, {flags}": Fault(
        [(None, GET, 4, kill)], saved="2", codes=BOTH, flags=f"{flags} --compute-dtype bfloat16")
       for flags in ("--data-parallel fsdp", "--plan t2 --heads 4")},
    "start: full disk": Fault([(0, OUT, 1, fills_up, None, 999)],
                              [r"run.*File too large.*--out.*\n\Z"]),
    "start: killed before config.json": Fault([(0, "pathlib.Path.replace", 1, kill)],
                                              [None, ".*another rank is gone"], codes=DIES),
    "sampling: killed in the first step": Fault([(None, GET, 1, kill)], codes=ONE),
    "update: killed": Fault([(None, UPDATE, 7, kill)], saved="2", codes=ONE),
    "log: killed": Fault([(None, "full.run.logs.Log.step", 5, kill)], saved="2 4", codes=ONE),
    "save: full disk, state": Fault([(0, "json.dump", 2, full_below)], [ROOM], "2"),
    "save: read-only": Fault([(0, SAVE, 2, read_only, "run")], [ROOM], "2"),
    "save: killed as an old one goes": Fault([(None, RMTREE, 4, kill)], flags="--keep 1",
                                             saved="2", codes=ONE),
    "evaluation: killed": Fault([(None, EVALUATE, 2, kill)], saved="", codes=ONE),
    # A stopped rank is waited for no longer than the timeout, wherever it is.
    **{f"{where}: a rank hangs": Fault([(1, where, count, stop)], [GONE], saved, "--timeout 3")
       for where, count, saved in [
        (GET, 3, "2"), (DCP, 1, ""), (JOIN, 1, ""), (PUSH, 3, ""), (GROUPS, 1, "")]},
}  # fmt: skip


@pytest.fixture(scope="module")
def truth(straight):
    """(steps, world, flags) -> the directory of an uninterrupted run."""
    return lambda steps=STEPS, world=2, flags="": straight(f"{RUN} --steps {steps} {flags}", world)


def standing(run):
    """The checkpoints of a run, in words, each of which is whole."""
    found = sorted(path for path in run.glob("*-0*/state.json") if ".tmp" not in f"{path}")
    for path in found:
        verified(path.parent)
    names = [path.parent.name.replace("step-", "") for path in found]
    return " ".join(re.sub("0+(?=.)", "", name) for name in names)


def wakes(processes):
    """Whether the other rank has ended by the time that the stopped one goes on, long after."""
    processes[0].join(5 + MARGIN)
    ended = not processes[0].is_alive()
    os.kill(processes[1].pid, signal.SIGCONT)
    return ended


def go_on(cwd, steps=STEPS, flags=""):
    """The flags that go on with a run, or that start it where none was begun."""
    if (cwd / "run" / "config.json").exists():
        return f"--resume --out run --steps {steps}"
    return f"{RUN} --steps {steps} {flags}"


@pytest.mark.parametrize("name", shortened(FAULTS | SLOW, *FAULTS))
def test_a_fault_ends_a_run_as_its_row_says(tmp_path, truth, name):
    row = (FAULTS | SLOW)[name]
    world, flags = len(row.codes), f"{RUN} --steps {STEPS} {row.flags}"
    if row.task:
        flags = _task(tmp_path, **row.task)
    processes, log = begin(tmp_path, flags, world, row.faults)
    hangs = any(fault[3] is stop for fault in row.faults)
    if hangs:
        is_there(tmp_path / "stopped")
        assert wakes(processes), "rank 0 still waited"
    done = end(processes, log, seconds=20 + MARGIN)
    fails(done, *(row.says or [None]), codes=row.codes)
    for folder in (tmp_path, tmp_path / "run"):
        if folder.exists():
            folder.chmod(0o755)
    assert standing(tmp_path / "run") == row.saved
    assert not row.saved or "rank(s), plan" in done[1][0] or row.codes[0] < 0, "prints are lost"
    if -SIGKILL not in row.codes and not hangs:
        assert not list(tmp_path.glob("run/step-*.tmp")), "what was cut short still takes room"
    if row.goes_on and not row.task:
        good(tmp_path, go_on(tmp_path, flags=row.flags), world)
        true = truth(STEPS, world, row.flags)
        same_run(tmp_path / "run", true)
        assert contents(tmp_path / "run" / "hf") == contents(true / "hf")
        assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_nan_on_one_rank_is_skipped_by_all_and_named(tmp_path):
    nans = [(1, UPDATE, n, nan_in, UP) for n in (2, 4, 5, 6)]
    done = run(tmp_path, f"{go_on(tmp_path)} {NANS}", *nans)
    name = rf"first in {UP} on rank 1"
    fails(done, rf".*3 optimizer steps in a row.*{name}.*lower lr")
    assert re.findall(r"step (\d): skipped, .*" + name, done[2][0]) == ["1", "3", "4"]
    lines = read_metrics(tmp_path / "run")
    assert [line["policy_version"] for line in lines] == [1, 1, 2, 2, 2]
    assert [line["updates/skipped"] for line in lines] == [0, 1, 1, 2, 3]
    assert standing(tmp_path / "run") == "1 3"


@pytest.mark.slow
@pytest.mark.parametrize("machines, victim", [(1, 1), (2, 1), (2, 0)])
def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path, truth, machines, victim):
    """So many torchruns share two ranks, and each may start its ranks again."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
    launch += ["--nnodes", f"{machines}", "--nproc-per-node", f"{2 // machines}", "--rdzv-id", "1"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    launch += [*FULL, *f"{RUN} --steps {MANY} --resume".split()]
    logs = [tmp_path / f"log-{machine}" for machine in range(machines)]
    how = dict(cwd=tmp_path, env=FROM_ROOT, stderr=subprocess.STDOUT)
    started = [subprocess.Popen(launch, stdout=log.open("w"), **how) for log in logs]
    wait_for_steps(tmp_path / "run", 10)
    pids = []
    for pid in (torchrun.pid for torchrun in started):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pids += [x for x in children if "full" in Path(f"/proc/{x}/cmdline").read_text()]
    os.kill(sorted(map(int, pids))[victim], SIGKILL)
    codes = [torchrun.wait(300) for torchrun in started]
    texts = [path.read_text() for path in logs]
    assert codes == [0] * machines, "\n".join(texts)
    assert sum(text.count("rank(s), plan") for text in texts) >= 2, "it was never started again"
    same_run(tmp_path / "run", truth(MANY))


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    hang = [(1, GET, 2, sleep, 100)]
    processes, log = begin(tmp_path, f"{RUN} --steps 9 --timeout 200", 2, hang)
    is_there(tmp_path / "late")
    time.sleep(1)  # by now the other rank is inside a collective, where Python runs no handler
    for pause in (1.2, 0):  # longer than a key press that torchrun repeats
        for process in processes:
            os.kill(process.pid, SIGINT)
        time.sleep(pause)
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


@pytest.mark.parametrize("how, world, of_plan", [("limit", 2, "--plan d2e2 --model experts"),
                                                 ("SIGTERM", 1, "")])  # fmt: skip
def test_a_reply_that_never_comes_ends_the_run_saved(tmp_path, how, world, of_plan):
    """Meanwhile the other rank still needs the experts of the rank that waits."""
    top = "import os, time\nfrom pathlib import Path\nRANK = os.environ.get('RANK', '0')"
    flags = _task(tmp_path, top=top, init="self.asked = 0", reply=HANGS)
    shape = dict(vocab_size=5, num_experts=2, num_experts_per_tok=1, sparse_layers=(0,))
    save_hf(tiny_model("qwen3_moe", eos_token_id=(4,), **shape), tmp_path / "experts")
    flags = flags.replace("--steps 2", f"--steps 9 {of_plan}")
    more = " --reply-timeout 1" if how == "limit" else ""
    processes, log = begin(tmp_path, flags + more, world, None, _left)
    is_there(tmp_path / "hangs")
    if how != "limit":
        os.kill(processes[0].pid, SIGTERM)
    codes, out, err = end(processes, log, seconds=MARGIN)
    assert codes == [2 if how == "limit" else 128 + SIGTERM] * world, err
    text = r"Mine has not replied after .* in group \d+, rollout \d+, to the answer .*"
    text += f": saved after {len(read_metrics(tmp_path / 'run'))} steps; go on with --resume"
    assert re.search(text, err[0] if how == "limit" else out[0]), (out, err)
    (tmp_path / "resumed").touch()
    good(tmp_path, f"{flags} --resume", world)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [*range(9)]


# Files of a run that are damaged, or torn, or somebody else's ------------------------------------


@pytest.fixture
def finished(straight, tmp_path, monkeypatch):
    """A copy of a run of 4 steps with checkpoints at 2 and 4, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(straight(f"{SAVING} 4"), tmp_path / "run")


NEWEST, STATE = "step-00000004", "step-00000004/state.json"


def cut_in_half(path):
    os.truncate(path, path.stat().st_size // 2)


def unfinished(path):
    path.rename(path.with_name(f"{path.name}.tmp"))


def replaced(path, raw):
    """By a file that is not ours, whose checksum agrees."""
    path.write_bytes(raw)
    state = json.loads((path.parent / "state.json").read_text())
    state["files"][path.name] = [len(raw), zlib.crc32(raw)]
    (path.parent / "state.json").write_text(json.dumps(sealed(state)))


def torn(path, text):
    """The last checkpoint is gone, and this is at the end of the lines."""
    shutil.rmtree(path.parent / NEWEST)
    path.write_text(path.read_text() + text)


def lost(path):
    """Three lines are left, of which the last has lost its newline."""
    shutil.rmtree(path.parent / NEWEST)
    path.write_text("\n".join(path.read_text().splitlines()[:3]))


def doubled(path):
    """The first line is there twice, as after an edit."""
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, first, *others]))


PASSED_OVER, UNREADABLE = f"warning: .*{NEWEST}", f"error: checkpoint run/{NEWEST} cannot be read"
DAMAGES = [  # a file of the run, what becomes of it, and what a resume says: it goes on, or not
    (NEWEST, (unfinished,), ""),
    (f"{NEWEST}/{SHARD}", (cut_in_half,), PASSED_OVER),
    (f"{NEWEST}/{SHARD}", (flip_a_bit,), PASSED_OVER),
    (f"{NEWEST}/{SHARD}", (os.unlink,), PASSED_OVER),
    (STATE, (os.unlink,), PASSED_OVER),
    *[(STATE, (Path.write_text, text), PASSED_OVER) for text in ("{", "[]", "{}", "\0\0")],
    *[(f"{NEWEST}/{SHARD}", (replaced, raw), UNREADABLE)  # and no older one is taken
      for raw in (b"", b"garbage")],
    *[(name, (torn, '{"step": 9}\n{"step": 2'), "")
      for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")],
    *[("metrics.jsonl", (torn, text), "") for text in ("\0\0", "\n\n")],
    ("metrics.jsonl", (lost,), ""),
    ("config.json", (Path.write_text, '{"advantage": [[' + "[" * 9999), "error: .*config.json"),
    ("metrics.jsonl", (Path.write_text, "5\n"), "error: run/metrics.jsonl line 1"),
    ("metrics.jsonl", (doubled,), "error: .*each of steps 0 to 3, got .0, 0, 1, 2, 3.: put"),
    ("samples.jsonl", (Path.write_text, "{}\n"), "error: run/samples.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize("name, damage, says", DAMAGES)
def test_a_damaged_file_of_a_run_is_passed_over_or_refused_by_name(
    straight, finished, capsys, name, damage, says
):
    act, *args = damage
    act(finished / name, *args)
    before, is_error = contents(finished), says.startswith("error")
    code, _, err = call(capsys, f"--resume --out run --steps {5 if is_error else 4}")
    assert re.search(says, err), err
    if is_error:
        after = contents(finished)
        assert (code, err.count("\n")) == (2, 1)
        assert before | {"config.json": None} == after | {"config.json": None}
        return
    assert code == 0 and (says or not err)
    same_run(finished, truth := straight(f"{SAVING} 4"))
    for name in ("samples.jsonl", "rollouts.jsonl"):
        assert (finished / name).read_text() == (truth / name).read_text()


def test_a_damaged_checkpoint_does_not_displace_a_good_one(finished):
    flip_a_bit(finished / NEWEST / SHARD)
    killed(finished.parent, "--resume --out run --keep 1 --save-every 1 --steps 5", GET, 2)
    assert standing(finished) == "4"


def test_a_checkpoint_with_damaged_weights_is_not_exported(finished, capsys):
    assert call(capsys, "export run before --step 3")[0] == 0
    flip_a_bit(finished / NEWEST / SHARD)
    _, _, err = call(capsys, "export run after")
    assert "warning" in err and f"{NEWEST}: {SHARD} is damaged" in err
    written = [finished.parent / name / "model.safetensors" for name in ("before", "after")]
    assert written[0].read_bytes() == written[1].read_bytes()
    code, _, err = call(capsys, "export run none --step 4")
    assert code == 2 and f"{NEWEST}: {SHARD} is damaged" in err


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_named(tmp_path, truth):
    whole, draw = checkpoints(truth())[0], random.Random(0)
    copy, state = shutil.copytree(whole, tmp_path / "copy"), verified(whole)
    for file in sorted(copy.iterdir()):
        size = file.stat().st_size
        some = [0, size - 1, *draw.choices(range(size), k=5)]
        for place in range(size) if file.name == "state.json" else some:
            flip_a_bit(file, place)
            with pytest.raises(Damaged, match=re.escape(file.name)):
                read_checkpoint(copy, {}, only="none of its names", alone=True)
            flip_a_bit(file, place)
        assert read_checkpoint(copy, {}, only="none of its names", alone=True) == state


@pytest.mark.parametrize("reference", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_without_a_whole_checkpoint_or_reference_is_not_begun_again(
    tmp_path, truth, reference
):
    copy = shutil.copytree(truth(flags=KL if reference else ""), tmp_path / "run")
    *older, second, last = (path / SHARDS[1] for path in checkpoints(copy))
    says = r"no checkpoint in run is whole.*copy.*--out"
    if reference:
        flip_a_bit(copy / "reference" / SHARD)
        says = f"checkpoint run/reference: {SHARD} is damaged.*copy"
    else:
        for path in older:
            flip_a_bit(path)
        cut_in_half(second)
        last.unlink()
    before = contents(copy)
    done = run(tmp_path, go_on(tmp_path, STEPS + 1))
    fails(done, says)
    assert before.keys() == contents(copy).keys()
    assert before["metrics.jsonl"] == contents(copy)["metrics.jsonl"]
    for step in () if reference else checkpoints(copy):
        warning = rf"warning: .*checkpoint run/{step.name}: {SHARDS[1]} is (damaged|missing)"
        assert re.search(warning, done[2][0])


def test_a_finished_run_resumes_to_its_end(finished, capsys):
    before = contents(finished)
    code, out, _ = call(capsys, "--resume --out run")
    assert code == 0 and "eval/solved" in out and contents(finished) == before


def test_resume_begins_a_run_where_there_is_none_and_goes_on_with_it(tmp_path, truth):
    flags = f"{RUN} --resume --steps"
    out, _ = good(tmp_path, f"{flags} 2", 2)
    assert "run holds no run to resume: one begins" in out
    out, _ = good(tmp_path, f"{flags} {STEPS}", 2)
    assert f"run/step-00000002\nfrom step 2 of {STEPS}" in out
    same_run(tmp_path / "run", truth())


def test_no_command_imports_a_file_that_the_run_names(tmp_path, monkeypatch, capsys):
    """Only one that the command names."""
    monkeypatch.chdir(tmp_path)
    good(tmp_path, _task(tmp_path))
    text = (tmp_path / "task.py").read_text()
    for path in ("task.py", "run/evil.py"):
        Path(path).write_text(f"{text}\nopen('imported', 'w').close()\n")
    config = json.loads(Path("run/config.json").read_text())
    for named in ("run/evil.py:Mine", "task.py:Mine"):
        Path("run/config.json").write_text(json.dumps(config | {"task": named}))
        for command in ("--resume --out run --steps 3", "eval run", "export run new"):
            code, _, err = call(capsys, command)
            assert code == 2 and "give it again, as --task FILE.py:Mine" in err, err
        call(capsys, "eval run/hf --task guess --size 1")
    assert not Path("imported").exists() and not Path("new").exists()

    code, out, err = call(capsys, "eval run --task task.py:Mine --samples 4")
    assert code == 0 and Path("imported").exists() and "prompt: [0]\n" in out, err
    assert json.loads(out.splitlines()[-1]).keys() == {"solved", "pass@1", "pass@2", "pass@4"}
    assert call(capsys, "export run new --task task.py:Mine")[0] == 0
    assert contents(Path("new")) == contents(Path("run/hf"))
    assert call(capsys, "--resume --out run --steps 3 --task task.py:Mine")[0] == 0
    assert len(read_metrics(tmp_path / "run")) == 3


def test_of_two_runs_in_one_directory_the_second_is_refused(tmp_path):
    # The one that has the directory waits there until the other has ended.
    hold = [(0, "full.run.run.run", 1, is_there, tmp_path / "let go")]
    runs = [begin(tmp_path, f"{SAVING} 4", 1, hold) for _ in range(2)]
    until(lambda: not all(processes[0].is_alive() for processes, _ in runs), "both have it")
    (tmp_path / "let go").touch()
    ends = sorted(end(*run) for run in runs)
    assert [codes for codes, _, _ in ends] == [[0], [2]], [err for _, _, err in ends]
    assert "error: run is in use by another process: wait" in ends[1][2][0]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [*range(4)]
    assert (tmp_path / "run" / "lock").read_bytes() == b""


@pytest.mark.quick
def test_where_there_is_no_flock_it_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def no_locks(*call):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with RunDirectory(tmp_path).locked():
        assert f"{tmp_path} cannot be locked ([Errno 38]" in capsys.readouterr().err


# Ranks that meet, agree and leave ----------------------------------------------------------------


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


@pytest.mark.parametrize("name, late", [("init_process_group", 1), ("init_process_group", 0),
                                        ("new_subgroups_by_enumeration", 1)])
def test_no_rank_leaves_while_another_joins(tmp_path, name, late):
    """A refusal closes connections, by which the late rank may still join a group."""
    processes = start(2, _joins, 2, free_port(), tmp_path, late, name)
    assert join(processes) == [0, 0]


def test_no_rank_leaves_while_another_ends_its_run(tmp_path):
    hold = [(0, "full.run.run.export_last", 1, is_there, tmp_path / "let go")]
    processes, log = begin(tmp_path, f"{TINY} --out run --steps 1", 2, hold)
    wait_for_steps(tmp_path / "run", 1)
    processes[1].join(2)
    waits = processes[1].is_alive()
    (tmp_path / "let go").touch()
    assert end(processes, log)[0] == [0, 0] and waits


def _forks(rank):
    seen = Stop()
    child = os.fork()
    if not child:
        time.sleep(60)
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM and seen.number == 0
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert seen.number == signal.SIGTERM


def test_a_process_that_a_reward_forks_ends_by_its_own_signals(tmp_path):
    ranks(tmp_path, 1, _forks)


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


FAILURES = [  # raised on rank 0, and what rank 0 and rank 1 say
    (ValueError("no run"), "ValueError: no run", "ValueError: no run"),
    (FileNotFoundError("no file"), *["FileNotFoundError: no file"] * 2),
    (KeyError("x"), "KeyError: 'x'", "RuntimeError: rank 0 ended with KeyError: 'x'"),
]


def _agreed(rank):
    began = time.monotonic()
    for error, *says in FAILURES:
        function = Mock(side_effect=error)
        with pytest.raises(Exception) as caught:
            agree(function)
        assert function.called == (rank == 0)
        assert f"{caught.type.__name__}: {caught.value}" == says[rank]
    assert time.monotonic() - began < 10


def test_any_error_of_rank_0_reaches_all_ranks_at_once(tmp_path):
    ranks(tmp_path, 2, _agreed)


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

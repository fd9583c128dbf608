"""The command line: a run is killed, resumed, refused, and never lies about it.

Most runs are `main` in processes forked from a server that has imported torch (see test_ranks.py),
with their own working directory and files for their output.
"""

import dataclasses
import json
import os
import pickle
import pkgutil
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from conftest import LOOKUP, ROOT, SORT, shortened, slow

import train_grpo
from full import __main__
from full.checkpoint import checkpoints, sealed
from full.config import Config, choices_of
from full.flags import parse_config
from full.metrics import METRICS
from test_ranks import join, read_metrics, start

FULL = ["-m", "full"]  # a program, as python and torchrun name it
FROM_ROOT = os.environ | {"PYTHONPATH": str(ROOT)}  # the environment that finds it anywhere
TINY = "--size 3 --turns 3 --device cpu --layers 1 --hidden 16 --heads 2 --prompts 3 --group 4 "
TINY += "--lr 0.01 --lr-warmup 0 --lr-decay constant --eval-every 2 --eval-prompts 6"
FLAGS = f"{TINY} --out run --steps"
SAVING = f"{TINY} --out run --save-every 2 --steps"
SHARD = "shard-00001-model-00001-of-00001.safetensors"  # of rank 0, in a checkpoint
KL = "--kl-coef 0.1"
DEMOS = f"{KL} --task {LOOKUP!r} --size 2 --demos 10 --entropy-coef 0.02 --save-every 4 --keep 9"


def as_torchrun(rank, world, port):
    """Set what torchrun tells a rank."""
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _main(rank, world, port, cwd, log, flags, die):
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}-{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if world > 1:
        as_torchrun(rank, world, port)
    if die:
        at(*die, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    sys.exit(__main__.main(shlex.split(flags)))


def at(where, count, act):
    """Call act, with its arguments, right before the count-th call of the function `where`."""
    owner, _, name = where.rpartition(".")
    owner, calls = pkgutil.resolve_name(owner), []
    original = getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(name)
        if len(calls) == count:
            act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def begin(cwd, flags, world=1, die=None, main=_main):
    """The processes of one run, and where they write their output."""
    log = cwd.parent / f"{cwd.name}-log-{time.monotonic_ns()}"
    return start(world, main, world, free_port(), cwd, log, flags, die), log


def end(processes, log, seconds=300):
    """(exit codes, standard outputs, standard errors), one of each a rank."""
    codes = join(processes, seconds)
    count = range(len(codes))
    return codes, *([Path(f"{log}-{s}-{r}").read_text() for r in count] for s in ("out", "err"))


def cli(cwd, flags, world=1, die=None, seconds=300, main=_main):
    return end(*begin(cwd, flags, world, die, main), seconds)


def good(cwd, flags, world=1):
    codes, out, err = cli(cwd, flags, world)
    assert codes == [0] * world, "\n".join(err)
    return out[0], err[0]


def refused(cwd, flags, text, world=1):
    """All ranks exit with 2. Rank 0 says the text in its one line, the others too, or nothing."""
    codes, out, err = cli(cwd, flags, world, seconds=60)
    assert codes == [2] * world, err
    for said in err[:1] + list(filter(None, err[1:])):
        # Torch has a line of its own where a rank leaves before another has connected to it.
        lines = [line for line in said.splitlines() if not line.startswith("[rank")]
        assert len(lines) == 1 and text in lines[0] and "error: " in lines[0], said
    return out


def killed(cwd, flags, where, count, world=1):
    """A run whose ranks are killed right before a call of a function."""
    codes, _, _ = cli(cwd, flags, world, die=(where, count))
    assert -signal.SIGKILL in codes


def until(condition, text, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, text
        time.sleep(0.005)


def wait_for_steps(run, count, old=None):
    """Until metrics.jsonl, if its inode is not the old one, has so many lines."""
    path = run / "metrics.jsonl"

    def has_them():
        new = path.exists() and path.stat().st_ino != old
        return new and path.read_text().count("\n") >= count

    until(has_them, f"no {count} lines in {path}")


def struck(cwd, flags, world, victim, number):
    """A run of many steps, of which one rank gets a signal after three: as `end` has it."""
    processes, log = begin(cwd, f"{flags} --steps 100000", world)
    wait_for_steps(cwd / "run", 3)
    os.kill(processes[victim].pid, number)
    return end(processes, log, seconds=60)


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def verified(path):
    """The JSON state of a checkpoint, whose seal and checksums all hold."""
    state = json.loads((path / "state.json").read_text())
    assert state == sealed(state)
    for name, sums in state["files"].items():
        raw = (path / name).read_bytes()
        assert sums == [len(raw), zlib.crc32(raw)], name
    return state


def same_tensors(path, truth):
    """Two checkpoints, whose seals and checksums hold, have equal tensors in files of one name.

    Their bytes differ: safetensors writes its header in a random order.
    """
    files = [verified(folder)["files"].keys() for folder in (path, truth)]
    assert files[0] == files[1]
    for name in files[0]:
        tensors, true = (safetensors.torch.load_file(folder / name) for folder in (path, truth))
        assert tensors and tensors.keys() == true.keys()
        assert all(torch.equal(x, true[key]) for key, x in tensors.items())


def same_run(run, truth):
    """Metrics bit for bit but for seconds, and the tensors of the newest checkpoint.

    Of a run with demonstrations also their lines, and the names of what the run has left.
    """
    same_tensors(*(checkpoints(path)[-1] for path in (run, truth)))
    assert read_metrics(run) == read_metrics(truth)
    if (truth / "demos.jsonl").exists():
        assert read_metrics(run, "demos.jsonl") == read_metrics(truth, "demos.jsonl")
        assert {path.name for path in run.iterdir()} == {path.name for path in truth.iterdir()}


def runs_made_once(tmp_path_factory):
    """run(flags, world): the directory of the uninterrupted run of these flags, made once.

    Beside it is `out`, which holds what the run has printed.
    """
    made = {}

    def run(flags, world=1):
        if (flags, world) not in made:
            folder = made[flags, world] = tmp_path_factory.mktemp("straight")
            (folder / "out").write_text(good(folder, flags, world)[0])
        return made[flags, world] / "run"

    return run


@pytest.fixture
def finished(straight, tmp_path):
    """A copy of a run of 4 steps with checkpoints at 2 and 4."""
    return shutil.copytree(straight(f"{SAVING} 4"), tmp_path / "run")


GET, RENAME = "full.batches.RolloutQueue.get", "pathlib.Path.rename"
SUPERVISED, WRITE = "full.batches.Demonstrations.get", "full.saves.Checkpointer.write"
KILLS = [  # ranks, flags, and the call in which every rank that makes it dies
    (1, "", GET, 1), (1, "", RENAME, 2), (1, KL, GET, 4), (2, KL, "os.fsync", 3),
    (1, DEMOS, SUPERVISED, 6),
]  # fmt: skip
KILLS += slow(  # a rename is the last of a save
    (1, "", "full.batches.evaluate", 2), (1, KL, RENAME, 2), (1, DEMOS, WRITE, 3),
    (1, "", GET, 4), (1, "", "full.logs.Log.step", 5), (1, "", RENAME, 1), (1, "", RENAME, 3),
    (1, "", "os.fsync", 2), (1, "--keep 1", "shutil.rmtree", 4), (2, "", GET, 4),
    (1, DEMOS, GET, 6), (1, DEMOS, "full.logs.Log.step", 3),
    (1, DEMOS, "full.directory.RunDirectory.write_reference", 1), (1, DEMOS, "shutil.rmtree", 9),
    (1, DEMOS, "full.batches.evaluate", 1), (2, DEMOS, SUPERVISED, 6), (2, DEMOS, WRITE, 3),
)  # fmt: skip


@pytest.mark.parametrize("world, flags, where, count", KILLS)
def test_a_killed_run_resumes_bit_for_bit(straight, tmp_path, world, flags, where, count):
    killed(tmp_path, f"{SAVING} 6 {flags}", where, count, world)
    task = f"--task {LOOKUP!r}" if flags == DEMOS else ""  # a task from a file is named again
    out, _ = good(tmp_path, f"--resume --out run {task}", world)
    told = "the weights of run/demos-00000004, first 6 supervised steps"
    assert where != SUPERVISED or told in out
    same_run(tmp_path / "run", straight(f"{SAVING} 6 {flags}", world))
    assert not list((tmp_path / "run").glob("*.tmp"))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launch", shortened([[], TORCHRUN], []))
def test_sigterm_to_one_rank_saves_on_all_and_says_how_to_go_on(straight, tmp_path, launch):
    if launch:
        pipes = dict(stdout=subprocess.PIPE, text=True)
        command = [*launch, *FULL, *f"{FLAGS} 100000".split()]
        torchrun = subprocess.Popen(command, cwd=tmp_path, env=FROM_ROOT, **pipes)
        wait_for_steps(tmp_path / "run", 3)
        ranks = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGTERM)
        out, _ = torchrun.communicate(timeout=60)
        assert torchrun.returncode == 1  # its own code
    else:
        codes, (out, _), _ = struck(tmp_path, f"{TINY} --out run", 2, 1, signal.SIGTERM)
        assert codes == [143, 143]
    done = re.search(r"SIGTERM: saved after (\d+) steps.*--resume --out run", out)[1]
    steps = int(done) + 3
    good(tmp_path, f"--resume --out run --steps {steps}", 2)
    same_run(tmp_path / "run", straight(f"{FLAGS} {steps}", 2))


def test_a_finished_run_resumes_to_its_end_and_goes_on_if_asked(straight, finished):
    before = contents(finished)
    out, _ = good(finished.parent, "--resume --out run")
    assert "eval/solved" in out and contents(finished) == before
    good(finished.parent, "--resume --out run --steps 6")
    same_run(finished, straight(f"{SAVING} 6"))


def flip_a_bit(path, place=None):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 if place is None else place] ^= 1
    path.write_bytes(raw)


def _damage(newest, how):
    data = newest / SHARD
    if how == "unfinished":
        newest.rename(newest.with_name(newest.name + ".tmp"))
    elif how == "truncated":
        os.truncate(data, data.stat().st_size // 2)
    elif how == "one bit":
        flip_a_bit(data)
    elif (newest / how).is_file():
        (newest / how).unlink()
    else:
        (newest / "state.json").write_text(how)


HOW = ["unfinished", "truncated", "one bit", "state.json", SHARD, "{", "[]", "{}", "\x00\x00"]


@pytest.mark.parametrize("how", shortened(HOW, *HOW[:5], HOW[-1]))
def test_a_damaged_newest_checkpoint_is_passed_over_by_name(straight, finished, how):
    _damage(finished / "step-00000004", how)
    _, err = good(finished.parent, "--resume --out run")
    assert how == "unfinished" or ("warning" in err and "step-00000004" in err)
    same_run(finished, straight(f"{SAVING} 4"))


def test_a_damaged_checkpoint_does_not_displace_a_good_one(finished):
    _damage(finished / "step-00000004", "one bit")
    killed(finished.parent, "--resume --out run --keep 1 --save-every 1", GET, 2)
    verified(finished / "step-00000003")
    assert not (finished / "step-00000004").exists()


def test_a_checkpoint_with_damaged_weights_is_not_exported(finished):
    pytest.importorskip("safetensors")
    good(finished.parent, "export run before --step 2")
    newest = finished / "step-00000004"
    flip_a_bit(newest / SHARD)
    _, err = good(finished.parent, "export run after")
    assert "warning" in err and f"step-00000004: {SHARD} is damaged" in err
    written = [finished.parent / name / "model.safetensors" for name in ("before", "after")]
    assert written[0].read_bytes() == written[1].read_bytes()
    refused(finished.parent, "export run none --step 4", f"step-00000004: {SHARD} is damaged")


def test_without_save_every_only_the_last_step_is_saved(tmp_path):
    good(tmp_path, f"{TINY} --out run --save-every 0 --keep 2 --steps 5")
    assert [path.name[-1] for path in checkpoints(tmp_path / "run")] == ["5"]


@pytest.mark.parametrize("raw", [b"", b"garbage", pickle.dumps(Path("x"))])
def test_tensors_that_are_not_ours_are_refused_by_name(finished, raw):
    """Their checksums agree: an error, and no older checkpoint is taken in their place."""
    newest = finished / "step-00000004"
    (newest / SHARD).write_bytes(raw)
    state = json.loads((newest / "state.json").read_text())
    state["files"][SHARD] = [len(raw), zlib.crc32(raw)]
    (newest / "state.json").write_text(json.dumps(sealed(state)))
    refused(finished.parent, "--resume --out run", "checkpoint run/step-00000004 cannot be read")


TORN = ['{"step": 2, "rew', '{"step": 9}\n{"step": 2', "\x00\x00", "\n\n", None]


@pytest.mark.parametrize("torn", TORN)
def test_lines_are_cut_back_to_the_checkpoint(straight, finished, torn):
    """After what was torn. None: two lines, of which the last has lost its newline."""
    shutil.rmtree(finished / "step-00000004")
    for name in ("metrics.jsonl", "samples.jsonl"):
        text = (finished / name).read_text()
        if torn is not None:
            (finished / name).write_text(text + torn)
        elif name == "metrics.jsonl":
            (finished / name).write_text("\n".join(text.splitlines()[:2]))
    good(finished.parent, "--resume --out run")
    same_run(finished, truth := straight(f"{SAVING} 4"))
    assert (finished / "samples.jsonl").read_text() == (truth / "samples.jsonl").read_text()


@pytest.mark.parametrize("world", [1, 2])
def test_an_output_directory_that_holds_a_run_is_refused(finished, world):
    before = contents(finished)
    says = "error: run holds a run: --resume to go on with it, or choose another --out"
    refused(finished.parent, f"{FLAGS} 2", says, world)
    assert contents(finished) == before


@pytest.mark.parametrize("flag", ["", "--resume"])
@pytest.mark.parametrize("name", ["thesis.tex", "config.json"])
def test_a_directory_of_other_files_is_refused_and_untouched(tmp_path, name, flag):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text('{"model_type": "qwen3"}')  # as Hugging Face has it
    before = contents(tmp_path / "run")
    refused(tmp_path, f"{FLAGS} 2 {flag}", "run")
    assert contents(tmp_path / "run") == before


def test_without_out_runs_at_once_take_the_first_free_directories(tmp_path):
    (tmp_path / "runs" / "guess-1").mkdir(parents=True)
    runs = [begin(tmp_path, f"{TINY} --steps 2", world) for world in (1, 2)]
    assert [set(end(*run)[0]) for run in runs] == [{0}, {0}]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"guess-{n}" for n in range(3)}
    for n in (0, 2):
        assert [x["step"] for x in read_metrics(tmp_path / "runs" / f"guess-{n}")] == [0, 1]


# flags -> what the one line must say
REFUSED = {
    "--nonsense 3": "--nonsense", "--steps many": "--steps", "--lr": "--lr",
    "--steps 0": "--steps must", "--lr nan": "--lr must be finite", "--lr 0": "--lr must be",
    "--seed -1": "--seed", "--seed 99999999999999999999": "--seed",
    "--heads 0": "--heads must be positive",
    "--temperature -1": "--temperature", "--kl k4": "argument --kl: invalid choice: 'k4'",
    "--group 1": "--group 1",
    "--group 4 --forks 3 --fork-turns 1": "--group 4", "--forks 2": "--fork-turns",
    "--fork-turns 2": "--forks", "--clip-low 1": "--clip-low",
    "--dual-clip 1.1": "--dual-clip", "--objective cispo --dual-clip 3": "--dual-clip",
    "--objective ppo2": "--objective", "--max-rounds 2": "--dynamic-sampling",
    "--cispo-bound 3": "--cispo-bound needs --objective cispo",
    "--objective sapo --clip-low 0.1": "--clip-low needs --objective clip or gspo or gmpo or dppo",
    "--teacher DIR --advantage gae": "--teacher needs --advantage teacher",
    "--advantage teacher": "--advantage teacher needs --teacher",
    "--dynamic-sampling": "--entropy-coef 0", "--importance-cap 2": "--proximal",
    "--dynamic-sampling --entropy-coef 0 --kl-coef 1": "--kl-coef 0",
    "--prompts 2 --minibatches 3": "--minibatches 3",
    "--hidden 6": "--hidden 6",
    "--heads 3 --hidden 12": "--heads must", "--task jsonl": "--data",
    "--plan sglang:d1": "expected a plan such as d2t2 or (attn:d2t2|ffn:e2t2), got 'sglang:d1'",
    "--plan d2d2": "expected letters of d t p c e, each at most once, got 'd2d2'",
    "--plan d1 --pp-schedule zbv": "--pp-schedule needs a --plan with p",
    "--tree dta": "--tree dta needs --chunk-tokens",
    "--tree sparse --chunk-tokens 9": "--chunk-tokens needs --tree dta",
    "--tree dta --chunk-tokens 9 --plan p2": "--tree dta has no p; use --tree sparse",
    "--tree dta --chunk-tokens 9 --data-parallel fsdp": "--tree dta has no fsdp",
    "--tree dta --chunk-tokens 9 --plan c2": "--tree dta has no c",
    "--tree dta --chunk-tokens 9 --plan d2e2": "--tree dta has no e; use --tree sparse",
    "--tree dta --chunk-tokens 9 --ac op": "--tree dta has no --ac op",
    "--tree dta --chunk-tokens 9 --compile": "--tree dta has no --compile",
    "--ac most": "argument --ac: invalid choice: 'most' (choose from",
    "--advantage gae --dynamic-sampling --entropy-coef 0": "from which --advantage gae",
    "--staleness 1 --importance-cap 2 --minibatches 1": "--importance-cap needs --proximal",
    "--staleness 65": "at most 64", "--staleness -1": "at least 0",
    "--stpes 3": "expected a flag that --help lists, got --stpes; did you mean --steps?",
    "--log_rolouts=all": "got --log_rolouts=all; did you mean --log-rollouts?",
    "--xyz": "expected a flag that --help lists, got --xyz\n", "--step 3": "mean --steps?",
    "--learning-rate 3": "got --learning-rate; its name here is --lr\n",
    "--num_generations=4": "its name here is --group\n",
    "--task jsonl": "needs --data FILE.jsonl and --model DIR",
    "--task jsonl --data FILE": "--task jsonl needs --model DIR", "--minibatches 3 --prompts 2":
    "--minibatches 3 is over --prompts 2, so one would be empty: lower --minibatches",
    "train": "expected a command that --help lists, got train; without a command, `python -m full`",
    "adit": "expected a command that --help lists, got adit; did you mean audit?",
    "--task nonsense": "expected --task guess, jsonl or FILE.py:Class, got 'nonsense'",
    "--task gone.py:Task": "--task gone.py:Task: gone.py: no such file", "--task ../gone": "gone",
}  # fmt: skip
REFUSED_LATER = {  # only when ranks meet, or a task or a model is made
    "--plan t2": "plan t2: expected p * d * c * t = 2 ranks, got 1",
    "--device cuda": "got 'cuda'", "--model gone": "gone",
    "--task jsonl --data gone --model gone": "gone", "--demos 2": "--demos 0",
    "--max-new-tokens 40000": "40000", f"--task {SORT!r}": "--size 3",
}  # fmt: skip


def refusal(capsys, flags):
    """What this process says on stderr of flags that it refuses."""
    try:
        code = __main__.main(shlex.split(flags))
    except SystemExit as exit:  # argparse
        code = exit.code
    assert code == 2 and not dist.is_initialized()
    return capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize("flags", REFUSED)
def test_a_mistake_is_one_clear_line_before_anything_starts(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    err = refusal(capsys, f"{FLAGS} 2 {flags}")
    assert REFUSED[flags] in err and "error: " in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


TOML = """
steps = 3
lr = 1
kl = "k1"
kl_coef = 0.5  # not typed
exact = false
"""
WRONG_FILES = {  # a file of settings, its text, and what is said of it
    ("a.toml", "stpes = 3"): "expected a field of Config, got stpes; did you mean steps?",
    ("a.toml", "lr-decay = 'constant'"): "got lr-decay; did you mean lr_decay?",
    ("a.toml", "zzz = 1"): "expected a field of Config, got zzz",
    ("a.toml", "learning_rate = 1"): "got learning_rate; as a flag, it is --lr",
    ("a.toml", "steps = '3'\nlr = true"):
        "--config a.toml: steps: expected int, got '3'; lr: expected float, got True",
    ("a.toml", "steps = 3.0"): "steps: expected int, got 3.0",
    ("a.toml", f"lr = 1{400 * '0'}"): "lr: expected float, got 1000",
    ("a.toml", "lr = nan"): "--lr must be finite and at least 0, got nan",
    ("a.toml", "exact = 1"): "exact: expected bool, got 1",
    ("a.toml", "kl = 'k4'"): "kl: expected one of k1, k3, got 'k4'",
    ("a.toml", "[model]\nlayers = 1"): "model: expected str, got {'layers': 1}",
    ("a.toml", "steps = 0"): "--steps must be positive, got 0",
    ("a.toml", "pp_schedule = 'zbv'"): "--pp-schedule needs a --plan with p",
    ("a.toml", "steps ="): "a.toml is not TOML: Invalid value",
    ("a.toml", "task = 'gone.py:Task'"):
        "the task of a.toml is a file's; give it again, as --task FILE.py:Task (a.toml has 'gone.p",
    ("a.json", '{"reward": "gone.py:f"}'): "the reward of a.json is a file's; give it again",
    ("a.json", '{"lr": null}'): "lr: expected float, got None",
    ("a.json", '{"layer": 1}'): "got layer; did you mean layers?",
    ("a.json", "[1]"): "a.json is JSON of another kind: expected an object, got a list",
    ("a.json", TOML): "a.json is not JSON", ("a.tml", TOML): "a.tml is not JSON",
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name, text", WRONG_FILES)
def test_wrong_settings_of_a_file_are_one_clear_line(tmp_path, monkeypatch, capsys, name, text):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    err = refusal(capsys, f"--config {name}")
    assert WRONG_FILES[name, text] in err and err.startswith("error: ") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.quick
def test_a_file_of_settings_that_is_not_there_is_named_with_its_neighbor(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for path in ("settings.toml", "run/config.json"):
        Path(path).write_text("")
    for name, says in {"setings.toml": "; did you mean settings.toml?", "other": "",
                       "run": "; did you mean run/config.json?",
                       "run/confg.json": "; did you mean run/config.json?"}.items():  # fmt: skip
        err = refusal(capsys, f"--config {name}")
        assert err == f"error: --config {name}: no such file{says}\n"
    assert "did you mean --config?" in refusal(capsys, "--confg settings.toml")


@pytest.mark.quick
def test_flags_win_over_a_file_of_settings(tmp_path):
    """Before it and after it. The rest is as if typed."""
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    typed = parse_config("--steps 3 --lr 1 --kl k1 --kl-coef 0.5".split()).check()
    assert parse_config(["--config", f"{path}"]).check() == typed
    for flags in (["--config", f"{path}", "--lr", "2"], ["--lr", "2", "--config", f"{path}"]):
        assert parse_config(flags) == dataclasses.replace(typed, lr=2.0)
    path.write_text(f"task = '{SORT}'")
    assert parse_config(["--config", f"{path}", "--task", "guess"]) == Config()
    assert Config.from_file(path, task=SORT, steps=9) == Config(task=SORT, steps=9)
    with pytest.raises(ValueError, match="the task of .*mine.toml is a file's; give it again"):
        Config.from_file(path)


def test_the_settings_of_a_run_begin_another_or_go_on_with_it(
    straight, finished, monkeypatch, capsys
):
    """Another run has a directory of its own. With --resume the settings are as if typed."""
    folder = finished.parent
    good(folder, "--config run/config.json")
    same_run(folder / "runs" / "guess-0", finished)
    stored = [json.loads((path / "config.json").read_text()) for path in
              (finished, folder / "runs" / "guess-0")]  # fmt: skip
    assert stored[0] | {"out": "runs/guess-0"} == stored[1]

    shutil.copy(finished / "config.json", folder / "mine.json")  # under this name `out` stands
    refused(folder, "--config mine.json", "run holds a run: --resume to go on with it")
    (folder / "more.toml").write_text("steps = 6\nresume = true\nout = 'run'")
    good(folder, "--config more.toml")
    same_run(finished, straight(f"{SAVING} 6"))
    (folder / "more.toml").write_text("group = 8")
    flags = "--config more.toml --resume --out run"
    monkeypatch.chdir(folder)
    assert "--resume cannot change --group 8 (the run has 4)" in refusal(capsys, flags)
    assert parse_config(f"{flags} --group 4".split()).steps == 6


@pytest.mark.parametrize("flags", REFUSED_LATER)
def test_a_later_mistake_is_one_clear_line_and_nothing_is_written(tmp_path, flags):
    (tmp_path / "here").mkdir()
    assert refused(tmp_path / "here", f"{FLAGS} 2 {flags}", REFUSED_LATER[flags]) == [""]
    assert not list((tmp_path / "here").iterdir())


OTHER_FLAGS = {
    "--resume": "--resume needs --out", "--resume --out run --seed 1": "--seed 1 (the run has 0)",
    "--resume --out run --staleness 1": "--resume cannot change --staleness 1 (the run has 0)",
    "--resume --out run --compute-dtype bfloat16": "--resume cannot change --compute-dtype",
    "--resume --out run --group 8 --kl-coef 1": "--group 8 (the run has 4), --kl-coef 1.0",
}


def test_resume_without_a_directory_or_with_other_flags_is_refused(finished, monkeypatch, capsys):
    before = contents(finished)
    monkeypatch.chdir(finished.parent)
    for flags, text in OTHER_FLAGS.items():
        err = refusal(capsys, flags)
        assert text in err and err.count("\n") == 1
    assert contents(finished) == before


def stored(flags, **changes):
    """What config.json holds of a run of these flags."""
    config = parse_config(["--lr-decay", "constant", *flags.split()])
    return json.dumps(dataclasses.asdict(config) | changes)


FIXED = "--resume cannot change --steps [48] .*the rates depend on the last step"
STORED = [  # what config.json holds, the steps of a resume, and how it is refused, if it is
    (stored("--steps 9 --lr-decay linear"), 8, FIXED),
    (stored("--steps 2"), 4, FIXED),  # a warm-up of 2 would become one of 4
    (stored("--steps 9"), 4, FIXED),  # a warm-up of 5 would become one of 4
    (stored("--steps 9"), 5, None),
    (stored("--steps 2"), 2, None),
    (stored("--steps 2 --lr-warmup 0"), 1, None),
    (stored("", steps="9"), 8, "config.json: --steps must be"),
    (stored("", lr_decay="never"), 8, "config.json: --lr-decay must be"),
    (stored("", lr_warmup=None), 8, "config.json: --lr-warmup must be"),
    (stored("", length=4), 8, "is not of this version of Config"),
    (stored("").replace('"staleness": 0, ', ""), 8, "is not of this version of Config"),
    ("{", 8, "config.json is"), ("[]", 8, "config.json is"), ('{"task": "x"}', 8, "config.json is"),
]  # fmt: skip


@pytest.mark.quick
def test_a_resume_with_other_steps_or_of_a_damaged_configuration_is_refused(tmp_path, capsys):
    """Steps are free while the rates do not depend on them."""
    for text, steps, says in STORED:
        (tmp_path / "config.json").write_text(text)
        flags = f"--out {tmp_path} --resume --steps {steps}"
        if says is None:
            assert parse_config(flags.split()).check().steps == steps
        else:
            assert re.search(says, refusal(capsys, flags)), text


TASK = """
import os
RANK = os.environ.get("RANK")
{top}
class Mine:
    vocab_size, end = 5, (4,)
    def __init__(self, config):
        {init}
    def prompt(self, rng, index, held_out):
        return {state}, [0]
    def reply(self, state, answer):
        {reply}
        return state, None, 0.5
    def show(self, tokens):
        return str(tokens)
"""


def _task(folder, **parts):
    text = TASK.format(**dict(top="", init="pass", state="0", reply="pass") | parts)
    (folder / "task.py").write_text("from __future__ import annotations\n" + text)
    return f"{FLAGS} 2 --timeout 10 --task task.py:Mine"


LOST = "raise RuntimeError('connection to my database timed out')"
PLACE = r".*task\.py, line \d+, in Mine.reply\)\n\Z"
BROKEN = [  # a line of the task, the rank that runs it (2: both), and what that rank says
    ("reply", "return state, None, float('nan')", 2, "Mine gave reward nan"),
    ("top", "raise RuntimeError('in the file')", 2, "in the file"),
    ("top", "raise SystemExit('only here')", 1, "only here"),
    ("reply", "raise ValueError('only here')", 1, "rank 1: error: only here"),
    ("reply", "raise KeyError('only here')", 1, "KeyError: 'only here'"),
    ("init", "raise ValueError('only here')", 1,
     r"rank 1: error: only here \(.*task\.py, line \d+, in Mine.__init__\)\n"),
    ("init", "del type(self).prompt", 2,
     r"rank 0: error: AttributeError: 'Mine' object has .* 'prompt' \(.*task\.py:Mine\)\n"),
    ("init", "raise KeyError('only here')", 0, "KeyError: 'only here'"),
    ("reply", LOST, 1, f"rank 1: error: RuntimeError: connection to my database timed out{PLACE}"),
    ("reply", "import sys; sys.exit(0)", 1,
     rf"rank 1: error: the task called sys.exit\(0\){PLACE}"),
]  # fmt: skip


@pytest.mark.parametrize("where, line, culprit, text", BROKEN)
def test_what_a_task_raises_is_its_own_error_with_file_and_line(
    tmp_path, where, line, culprit, text
):
    if culprit < 2:
        line = f"if RANK == '{culprit}': {line}"
    codes, _, err = cli(tmp_path, _task(tmp_path, **{where: line}), world=2, seconds=30)
    assert 0 not in codes
    assert re.search(text, "".join(err) if culprit == 2 else err[culprit]), err
    # What a rank finds before the first step is named by that rank for all.
    if culprit < 2 and where == "reply":
        assert "another rank is gone" in err[1 - culprit]
    elif culprit < 2:
        assert err[1 - culprit] == "" and codes == [2, 2]
    assert "rank 1: error" not in text or codes == [2, 2]


def test_a_limit_of_replies_needs_threads(tmp_path):
    flags = _task(tmp_path, init="self.threads = False")
    refused(tmp_path, f"{flags} --reply-timeout 3", "--reply-timeout: Mine has threads = False")
    refused(tmp_path, f"{FLAGS} 2 --reply-timeout 3", "--reply-timeout needs --task jsonl or FILE")


def test_a_reward_may_be_any_real_number_and_a_state_a_dataclass(tmp_path):
    top = "import dataclasses, numpy\n@dataclasses.dataclass\nclass State:\n    index: int"
    reply = "return state, None, numpy.float32(1)"
    good(tmp_path, _task(tmp_path, top=top, state="State(index)", reply=reply))
    assert read_metrics(tmp_path / "run")[-1]["eval/solved"] > 0


def test_every_metric_is_in_the_glossary_and_the_reverse(straight):
    run = straight(f"{SAVING} 6 {KL}")
    lines, samples = (json_lines(run / f"{name}.jsonl") for name in ("metrics", "samples"))
    critic = straight(f"{SAVING} 6 --advantage gae --proximal --importance-cap 2")
    seen = {name for line in lines + json_lines(critic / "metrics.jsonl") for name in line}
    first = {name for name in seen if name.endswith("_first")}
    assert len(first) >= 9 and {name.removesuffix("_first") for name in first} <= seen
    seen -= {"step", *first}  # NAME_first, as the glossary says
    seen |= {"balance/loss", "experts/load_max"}  # of experts: see test_balance.py, test_routes.py
    seen.add("experts/replay_changed")
    assert seen == METRICS.keys()
    assert [line["step"] for line in lines] == list(range(6)) and "eval/solved" in lines[-1]
    assert [sample["step"] for sample in samples] == [1, 3, 5]
    assert all(sample["text"].startswith("? ") for sample in samples)


@pytest.mark.quick
def test_help_shows_every_field_with_its_help_under_its_title(capsys):
    """Fields of the core's configuration stand in the groups of the others."""
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    places = [shown.index(text) for text in (
        "the run: --config FILE settings", "--seed int", "the task and data: --size", "--task str",
        "the model: --layers", "--heads int query heads; half as many key heads [4]", "--model str",
        "rollouts: --prompts", "the loss: --clip-low", "the optimizer: --minibatches",
        "parallelism: --plan", "memory and speed: --tree", "evaluation: --eval-every",
        "--eval-data str", "output: --save-every")]  # fmt: skip
    assert places == sorted(places)
    for name, row in Config.BY_START.items():  # the default of each start
        numbers = f"[{row['random']}; with --demos {row['demos']}; with --model {row['model']}, "
        numbers += f"and with --lora-rank too {row['lora']}]"
        flag = name.replace("_", "-")
        assert re.search(rf"--{flag} float [^\[]*{re.escape(numbers)}", shown), name

    shown = shown.replace(" ", "")
    for field in dataclasses.fields(Config):
        flag = field.name.replace("_", "-")
        text = re.sub(r"\s", "", field.metadata["help"])
        choices = choices_of(field)
        kind = "|".join(filter(None, choices)) or field.type.__name__
        if field.type is bool:
            kind = f",--no-{flag}"
        assert f"--{flag}{kind}{text}" in shown


def test_plot_is_a_png_or_says_what_to_install(straight, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(straight(f"{SAVING} 6"), tmp_path / "run")
    with monkeypatch.context() as without:
        for name in ("matplotlib", "matplotlib.figure"):
            without.setitem(sys.modules, name, None)
        assert __main__.main(["plot", str(run)]) == 2
    told = capsys.readouterr()
    assert told.err.endswith("error: plot needs matplotlib: pip install matplotlib\n")
    assert not told.out and not (run / "curve.png").exists()
    assert __main__.main(["plot", str(run), str(tmp_path)]) == 2
    assert f"{tmp_path} holds no metrics.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["plot"])
    assert "usage: python -m full plot [-h] RUN [RUN ...]" in capsys.readouterr().err
    figure = pytest.importorskip("matplotlib.figure", reason="draws a PNG").Figure
    assert __main__.main(["plot", str(run), str(run)]) == 0
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")

    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))

    # A run that was killed early. Its one point is seen, and so is a negative reward.
    metrics = run / "metrics.jsonl"
    line = json.loads(metrics.read_text().splitlines()[0]) | {"reward/mean": -2.0}
    metrics.write_text(json.dumps(line) + '\n{"step": 1, "rew')
    assert __main__.main(["plot", str(run)]) == 0
    for axes in drawn[0].axes:
        assert [*axes.lines[0].get_xdata()] == [1] and axes.lines[0].get_marker() == "."
    reward, solved, *others = drawn[0].axes
    titles = ["entropy/token_mean", "logprob_gap/max", "grad_norm"]
    assert [axes.get_title() for axes in others] == titles
    assert [*solved.lines[1].get_xdata()] == [0]  # what was solved before the first step
    assert reward.get_ylim()[0] < -2 and 0 < reward.get_ylim()[1] < 1


SMALL = "--size 3 --turns 3 --layers 1 --hidden 32 --heads 2 --prompts 12 --eval-prompts 6"
SMALL += " --lr 0.01 --steps 60"


@pytest.mark.parametrize("flags", shortened(["", SMALL], SMALL))
def test_a_run_learns(tmp_path, flags):
    codes, _, err = cli(tmp_path, f"--device cpu --out run {flags}", seconds=1200)
    assert codes == [0], err[0]
    run = read_metrics(tmp_path / "run")
    rewards = [line["reward/mean"] for line in run]
    assert rewards[0] < 0.3 and sum(rewards[-5:]) / 5 >= 0.9 and run[-1]["eval/solved"] >= 0.95

"""The command line: settings, directories, metrics, help, plots; what precedes the first step.

Most runs are `main` in processes forked from a server that has imported torch (see test_ranks.py),
with their own working directory and files for their output.
"""

import dataclasses
import functools
import json
import os
import pkgutil
import re
import shlex
import shutil
import signal
import socket
import sys
import time
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from conftest import LOOKUP, ROOT, SORT, installed, shortened

from full import __main__, api
from full.audit.audit import audited
from full.learn.metrics import METRICS
from full.ranks.checkpoint import checkpoints, sealed
from full.run.config import Config, flag_name
from full.run.flags import parse_config
from full.run.run import lost_to_rounding
from test_ranks import join, read_metrics, start

FULL = ["-m", "full"]  # a program, as python and torchrun name it
FROM_ROOT = os.environ | {"PYTHONPATH": str(ROOT)}  # the environment that finds it anywhere
TINY = "--size 3 --turns 3 --device cpu --layers 1 --hidden 16 --heads 2 --prompts 3 --group 4 "
TINY += "--lr 0.01 --lr-warmup 0 --lr-decay constant --eval-every 2 --eval-prompts 6"
FLAGS = f"{TINY} --out run --steps"
SAVING = f"{TINY} --out run --save-every 2 --steps"
SHARD = "shard-00001-model-00001-of-00001.safetensors"  # of rank 0, in a checkpoint
KL = "--kl-coef 0.1"


def as_torchrun(rank, world, port):
    """Set what torchrun tells a rank."""
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _main(rank, world, port, cwd, log, flags, faults):
    """A rank of a run. faults: (rank, function, which call, what happens before it, arguments).

    Of all ranks, if the rank is None.
    """
    # A shell that starts tests in the background has them ignore Ctrl-C, and ranks inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}-{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if world > 1:
        as_torchrun(rank, world, port)
    for culprit, where, count, act, *args in faults or ():
        if culprit in (None, rank):
            at(where, count, functools.partial(act, *args))
    sys.exit(__main__.main(shlex.split(flags)))


def kill(*call, **options):
    os.kill(os.getpid(), signal.SIGKILL)


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


def begin(cwd, flags, world=1, faults=(), main=_main):
    """The processes of one run, and where they write their output."""
    log = cwd.parent / f"{cwd.name}-log-{time.monotonic_ns()}"
    return start(world, main, world, free_port(), cwd, log, flags, faults), log


def end(processes, log, seconds=300):
    """(exit codes, standard outputs, standard errors), one of each a rank."""
    codes = join(processes, seconds)
    count = range(len(codes))
    return codes, *([Path(f"{log}-{s}-{r}").read_text() for r in count] for s in ("out", "err"))


def cli(cwd, flags, world=1, faults=(), seconds=300, main=_main):
    return end(*begin(cwd, flags, world, faults, main), seconds)


def good(cwd, flags, world=1):
    codes, out, err = cli(cwd, flags, world)
    assert codes == [0] * world, "\n".join(err)
    return out[0], err[0]


def call(capsys, *words):
    """Code, stdout and stderr of a command, one text or its words, called in this process."""
    capsys.readouterr()
    had_group = dist.is_initialized()
    try:
        argv = shlex.split(words[0]) if len(words) == 1 else [str(word) for word in words]
        code = __main__.main(argv)
    except SystemExit as ended:  # argparse
        code = ended.code
    if dist.is_initialized() and not had_group:  # a process that ends leaves it as it is
        dist.destroy_process_group()
    return code, *capsys.readouterr()


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
    codes, _, _ = cli(cwd, flags, world, [(None, where, count, kill)])
    assert -signal.SIGKILL in codes


def until(condition, text, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, text
        time.sleep(0.005)


def wait_for_steps(run, count):
    """Until metrics.jsonl has so many lines."""
    path = run / "metrics.jsonl"
    until(lambda: path.exists() and path.read_text().count("\n") >= count, f"no {count} lines")


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
    """Metrics bit for bit but for seconds, and the tensors of the newest checkpoint."""
    same_tensors(*(checkpoints(path)[-1] for path in (run, truth)))
    assert read_metrics(run) == read_metrics(truth)


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


GET = "full.learn.batches.RolloutQueue.get"


def flip_a_bit(path, place=None):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 if place is None else place] ^= 1
    path.write_bytes(raw)


def test_without_save_every_only_the_last_step_is_saved(tmp_path):
    good(tmp_path, f"{TINY} --out run --save-every 0 --keep 2 --steps 5")
    assert [path.name[-1] for path in checkpoints(tmp_path / "run")] == ["5"]


def test_without_out_runs_at_once_take_the_first_free_directories(tmp_path):
    (tmp_path / "runs" / "guess-1").mkdir(parents=True)
    runs = [begin(tmp_path, f"{TINY} --steps 2", world) for world in (1, 2)]
    assert [set(end(*run)[0]) for run in runs] == [{0}, {0}]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"guess-{n}" for n in range(3)}
    for n in (0, 2):
        assert [x["step"] for x in read_metrics(tmp_path / "runs" / f"guess-{n}")] == [0, 1]


TOML = """
steps = 3
lr = 1
kl = "k1"
kl_coef = 0.5  # not typed
exact = false
"""


def test_rollouts_are_logged_all_or_none_or_some(tmp_path_factory):
    run = runs_made_once(tmp_path_factory)

    def counts(flags):
        lines = (run(f"{FLAGS} 4 --prompts 4 {flags}") / "rollouts.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        return {step: steps.count(step) for step in steps}

    assert counts("") == {0: 16, 1: 4, 3: 16}
    assert counts("--log-rollouts all") == {0: 16, 1: 16, 2: 16, 3: 16}
    assert counts("--log-rollouts none") == {}


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


def test_the_settings_of_a_run_begin_another_or_go_on_with_it(straight, tmp_path):
    """Another run has a directory of its own. With --resume the settings are as if typed."""
    run = shutil.copytree(straight(f"{SAVING} 4"), tmp_path / "run")
    again = tmp_path / "runs" / "guess-0"
    good(tmp_path, "--config run/config.json")
    same_run(again, run)
    stored = [json.loads((path / "config.json").read_text()) for path in (run, again)]
    assert stored[0] | {"out": "runs/guess-0"} == stored[1]
    more = tmp_path / "more.toml"
    more.write_text(f"steps = 6\nresume = true\nout = '{run}'")
    good(tmp_path, "--config more.toml")
    same_run(run, straight(f"{SAVING} 6"))
    more.write_text("group = 8")
    flags = f"--config {more} --resume --out {run} --group 4"
    assert parse_config(flags.split()).steps == 6


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


def test_a_reward_may_be_any_real_number_and_a_state_a_dataclass(tmp_path):
    top = "import dataclasses, numpy\n@dataclasses.dataclass\nclass State:\n    index: int"
    reply = "return state, None, numpy.float32(1)"
    good(tmp_path, _task(tmp_path, top=top, state="State(index)", reply=reply))
    assert read_metrics(tmp_path / "run")[-1]["eval/solved"] > 0


def test_every_metric_is_in_the_glossary_and_the_reverse(straight):
    run = straight(f"{SAVING} 6 {KL}")
    lines, samples = (json_lines(run / f"{name}.jsonl") for name in ("metrics", "samples"))
    flags = "--advantage gae --proximal --importance-cap 2"
    critic = straight(f"{SAVING} 6 {flags}")
    seen = {name for line in lines + json_lines(critic / "metrics.jsonl") for name in line}
    first = {name for name in seen if name.endswith("_first")}
    assert len(first) >= 9 and {name.removesuffix("_first") for name in first} <= seen
    seen -= {"step", *first}  # NAME_first, as the glossary says
    seen.add("experts/load_max")  # of experts: see test_routes.py
    assert seen == METRICS.keys()
    assert [line["step"] for line in lines] == list(range(6)) and "eval/solved" in lines[-1]
    assert [sample["step"] for sample in samples] == [1, 3, 5]
    assert all(sample["text"].startswith("? ") for sample in samples)


@pytest.mark.quick
def test_help_shows_every_field_with_its_help_and_its_defaults(capsys):
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, row in Config.BY_START.items():  # the default of each start
        numbers = f"[{row['random']}; with --model {row['model']}, "
        numbers += f"and with --lora-rank too {row['lora']}]"
        flag = name.replace("_", "-")
        assert re.search(rf"--{flag} float [^\[]*{re.escape(numbers)}", shown), name
    shown = shown.replace(" ", "")
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert re.sub(r"\s", "", field.metadata["help"]) in shown


def test_plot_is_a_png_or_says_what_to_install(straight, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(straight(f"{SAVING} 6"), tmp_path / "run")
    with monkeypatch.context() as without:
        for name in ("matplotlib", "matplotlib.figure"):
            without.setitem(sys.modules, name, None)
        assert __main__.main(["plot", str(run)]) == 2
    told = capsys.readouterr()
    assert told.err.endswith("error: plot needs matplotlib: pip install matplotlib\n")
    assert not told.out and not (run / "curve.png").exists()
    installed("matplotlib.figure")
    assert __main__.main(["plot", str(run), str(run)]) == 0
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")

    # A run that was killed early: its last line is torn.
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + '\n{"step": 1, "rew')
    assert __main__.main(["plot", str(run)]) == 0


SMALL = "--size 3 --turns 3 --layers 1 --hidden 32 --heads 2 --prompts 12 --eval-prompts 6"
SMALL += " --lr 0.01 --steps 60"


@pytest.mark.parametrize("flags", shortened(["", SMALL], SMALL))
def test_a_run_learns(tmp_path, flags):
    codes, _, err = cli(tmp_path, f"--device cpu --out run {flags}", seconds=1200)
    assert codes == [0], err[0]
    run = read_metrics(tmp_path / "run")
    rewards = [line["reward/mean"] for line in run]
    assert rewards[0] < 0.3 and sum(rewards[-5:]) / 5 >= 0.9 and run[-1]["eval/solved"] >= 0.95


# What precedes step 0, and what a run says -------------------------------------------------------

LOOKUPS = f"{SAVING} 2 --task {LOOKUP!r} --size 2"
# Code is never imported from what a run stored, so the task is given again.
RESUME = f"--resume --out run --task {LOOKUP!r}"


@pytest.mark.quick
@pytest.mark.parametrize("given, defaults", [
    ({}, (1e-3, 0.02)), (dict(model="DIR"), (1e-6, 0)),
    (dict(model="DIR", lora_rank=2), (1e-5, 0))])
def test_defaults_depend_on_what_the_run_begins_with(given, defaults):
    """A default is that of the start; a flag wins over it, 0 too where 0 has a meaning."""
    config = Config(**given).check()
    assert (config.lr, config.entropy_coef) == defaults
    flags = [x for name, value in given.items() for x in (flag_name(name), f"{value}")]
    for entropy_coef in (0.5, 0.0):
        more = parse_config([*flags, "--entropy-coef", f"{entropy_coef}", "--lr", "3"]).check()
        assert (more.entropy_coef, more.lr) == (entropy_coef, 3.0)


def test_what_is_solved_before_the_first_step_is_audited(straight, tmp_path, process_group):
    run = Path(shutil.copytree(straight(LOOKUPS), tmp_path / "run"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert ["eval/solved_before" in json.loads(line) for line in lines] == [True, False]
    report = audited(run, 0, task=LOOKUP)
    assert report.wrong is None and any("from the first weights" in x for x in report.intro)
    before = [row for row in report.rows if row.key == "eval/solved_before"]
    assert len(before) == 1
    assert "eval/solved_before" not in {row.key for row in audited(run, 1, task=LOOKUP).rows}

    # A changed number is found.
    first = json.loads(lines[0])
    first["eval/solved_before"] += 1 / 6
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    assert audited(run, 0, task=LOOKUP).wrong == "eval/solved_before"


def test_it_is_evaluated_once_and_again_only_with_line_0(straight, tmp_path):
    finished = straight(LOOKUPS)
    out = (finished.parent / "out").read_text()
    lines = read_metrics(finished)
    (before,) = re.findall(r"^before +(\S+)$", out, re.M)
    assert float(before) == pytest.approx(lines[0]["eval/solved_before"], abs=1e-3)
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    out, _ = good(tmp_path, RESUME)
    assert "before" not in out and read_metrics(run) == lines
    for step in (1, 2):
        shutil.rmtree(run / f"step-{step:08d}")
    out, _ = good(tmp_path, RESUME)
    assert f"before{before:>30}\n" in out and read_metrics(run) == lines


def test_settings_that_do_little_are_said(tmp_path, monkeypatch, capsys):
    """Such as weights too coarse for a step: as many as AdamW's first step leaves unchanged."""
    model = torch.nn.Linear(64, 64).bfloat16()
    model.bias.requires_grad_(False)
    first = model.weight.detach().clone()
    for lr in (1e-2, 1e-4, 1e-6):
        model.weight.data.copy_(first)
        model.weight.grad = torch.randn(64, 64).bfloat16()
        torch.optim.AdamW([model.weight], lr, weight_decay=0).step()
        share = (model.weight == first).double().mean().item()
        assert lost_to_rounding(model, lr) == pytest.approx(share, abs=0.01)
        model.weight.data.copy_(first)
    assert lost_to_rounding(model, 1e-6) > 0.99 > lost_to_rounding(model.float(), 1e-6) == 0

    monkeypatch.chdir(tmp_path)
    said = ("--dtype bfloat16 has no finer masters: rounding undoes a step of --lr 1e-05 in 84.5% "
            "of the weights; set --dtype float32 --compute-dtype bfloat16\n")  # fmt: skip
    for n, (flags, says) in enumerate({
        "--dtype bfloat16 --lr 1e-5": said, "--dtype bfloat16": "",  # with a rate of 0.01
        "--compute-dtype bfloat16 --lr 1e-5": "", "--kl-coef 0.1 --kl k1 --kl-in reward": "",
        "--kl-coef 0.1 --kl k1": "--kl k1 in the loss has a gradient of mean 0, so it keeps the "
                                 "policy near nothing: --kl k3, or --kl-in reward\n",
    }.items()):  # fmt: skip
        api.run(parse_config(f"{TINY} --out {n} --steps 1 {flags}".split()))
        assert capsys.readouterr().err == says


def test_a_run_whose_rollouts_are_cut_off_warns_once_and_shows_it(tmp_path):
    out, err = good(tmp_path, f"{TINY} --max-new-tokens 1 --steps 3 --out run")
    shares = [x["tokens/truncated_fraction"] for x in read_metrics(tmp_path / "run")]
    assert all(0.5 < share < 1 for share in shares)  # one token may also be an end
    warning, idle = err.splitlines()
    assert warning.startswith(f"warning: step 0: {shares[0]:.0%} of the rollouts were cut off")
    assert idle.startswith("warning: steps 0 to 2: ")
    more = "--max-new-tokens 1 --steps 3 --kl-coef 1 --kl-in reward --out two"
    assert len(good(tmp_path, f"{TINY} {more}")[1].splitlines()) == 1  # a KL is learned from
    lines = [line for line in out.splitlines() if re.match(" +([0-9]+|step) ", line)]
    assert lines[0].split()[:5] == ["step", "reward", "solved", "eval", "truncated"]
    shown = {int(line.split()[0]): line.split()[-6] for line in lines[1:]}
    assert shown == {step: f"{shares[step]:.3g}" for step in shown} and len(shown) == 3

"""Ranks: any number of them, sharded or not, give the run of one process, and fail together.

A rank is a process forked from a server that has imported torch and the project once (0.03 s
each, see rank_server.py), so that no threads, process group or CUDA context of the test process
reach it, and nothing that a test changed in one rank reaches another. What ranks return is judged
apart from how they exit.
"""

import contextlib
import json
import math
import multiprocessing
import os
import pickle
import runpy
import shlex
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from full.ranks.optimizer import clip_grad_norm
from full.run.flags import parse_config
from full.run.run import start_run

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rank_server"])
# The project's own files. An environment may be in the same folder.
OWN = [ROOT.glob(x) for x in ("*.py", "full/**/*.py", "tests/**/*.py", "conformance/**/*.py")]
OWN = {str(path) for paths in OWN for path in paths}
TASK = "--size 3 --turns 3 --dtype float64 --device cpu --prompts 5 --group 8"
TASK += " --lr-warmup 0 --lr-decay constant"
TINY = f"{TASK} --layers 2 --hidden 16 --heads 2 --lr 0.01"
SHAPE = f"{TASK} --layers 4 --hidden 16 --heads 4 --lr 0.005"  # of which p has stages


# The harness ---------------------------------------------------------------------------------


def serve():
    """Start the server, unless it runs. Python 3.11 does not give it this process's sys.path."""
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT / "tests")):
        forkserver.ensure_running()


def start(world, function, *args):
    """Processes that run function(rank, *args)."""
    serve()
    processes = [CONTEXT.Process(target=function, args=(rank, *args)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def join(processes, seconds=300):
    """Exit codes; what still runs after so long is killed, and fails the test as hung."""
    for process in processes:
        process.join(seconds)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} hung"
    return [process.exitcode for process in processes]


def _rank(rank, world, folder, function, args):
    torch.set_num_threads(1)
    meet = dict(init_method=f"file://{folder}/store", timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", rank=rank, world_size=world, **meet)
    try:
        result = function(rank, *args)
    except BaseException:
        (folder / f"failed-{rank}").write_text(traceback.format_exc())
        raise
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def ranks(tmp_path, world, function, *args):
    """What function(rank, *args) returned on each rank of a process group of so many."""
    folder = tmp_path / f"ranks-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    codes = join(start(world, _rank, world, folder, function, args))
    failed = [path.read_text() for path in sorted(folder.glob("failed-*"))]
    assert not failed, "\n".join(failed)
    results = [folder / f"result-{rank}" for rank in range(world)]
    assert all(path.exists() for path in results), f"a rank died: exit codes {codes}"
    return [pickle.loads(path.read_bytes()) for path in results]


def _script(rank, file, argv, cwd, log, environment):
    # As Python would start it: nobody's modules but the libraries', and paths of its own.
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}-{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(environment)
    for path in sys.path[:]:
        if Path(path).resolve() in (ROOT, ROOT / "tests", ROOT / "tests" / "full"):
            sys.path.remove(path)
    for name, module in [*sys.modules.items()]:
        if getattr(module, "__file__", None) in OWN:
            del sys.modules[name]
    sys.argv = [file, *argv]
    if file == "full":
        sys.path.insert(0, str(ROOT))
        runpy.run_module(file, run_name="__main__", alter_sys=True)
    sys.path.insert(0, str(Path(file).resolve().parent))
    runpy.run_path(file, run_name="__main__")


def as_script(file, *argv, cwd, **environment):
    """`python FILE ARGV` in a process that has imported the libraries: its code, stdout, stderr.

    file: relative to cwd, or whole. "full": `python -m full ARGV`. The project's own files are
        imported anew, from the folder of the file.
    """
    log = Path(tempfile.mkdtemp(dir=cwd.parent)) / "script"
    (code,) = join(start(1, _script, str(file), argv, cwd, log, environment))
    out, err = (Path(f"{log}-{name}").read_text() for name in ("out", "err"))
    return code, out, err


UNEQUAL = "seconds/", "memory/"  # metrics that cannot be equal in two runs


def read_metrics(out, name="metrics.jsonl"):
    """The lines of metrics.jsonl, or of a file like it, without what differs between runs."""
    lines = [json.loads(line) for line in (Path(out) / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(UNEQUAL)} for line in lines]


# Whole runs ----------------------------------------------------------------------------------


def _train(rank, flags, out):
    with contextlib.redirect_stdout(None):
        start_run(parse_config([*shlex.split(flags), "--out", str(out)]).check())


def trained(tmp_path, world, flags):
    out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    ranks(tmp_path, world, _train, flags, out)
    return read_metrics(out)


def largest_difference(run, truth):
    """Over all metrics of all steps, relative to 1 or more; counts and rewards must be equal.

    The gap to the sampler is left out: it is rounding itself.
    """
    worst = 0.0
    for line, true in zip(run, truth, strict=True):
        assert line.keys() == true.keys()
        names = [k for k in line if not k.startswith("logprob_gap")]
        # A tree has fewer tokens of its own than the batch; the flat count is the batch's.
        if line.get("tokens/trained", 0) < line.get("tokens/trained_flat", 0):
            names.remove("tokens/trained")
        for name in names:
            if name.startswith(("reward/", "tokens/", "eval/")):
                assert line[name] == true[name], f"{name} at step {line['step']}"
            worst = max(worst, abs(line[name] - true[name]) / max(1.0, abs(true[name])))
    return worst


def learns_something(run):
    norms = [line["grad_norm"] for line in run if "grad_norm" in line]  # none if all was dropped
    return len({line["reward/mean"] for line in run}) > 1 and norms and min(norms) > 1e-4


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """flags -> the metrics of one process, made once."""
    made = {}

    def run(flags):
        if flags not in made:
            made[flags] = trained(tmp_path_factory.mktemp("truth"), 1, flags)
        return made[flags]

    return run


# The clip ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_the_clip_is_exactly_the_ratio_of_norms(bound):
    model = torch.nn.Linear(3, 2).double()
    for n, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, n + 1.0)
    before = [p.grad.clone() for p in model.parameters()]
    norm = math.sqrt(sum(g.square().sum().item() for g in before))
    assert clip_grad_norm(model, bound).item() == pytest.approx(norm, rel=1e-15)
    for p, g in zip(model.parameters(), before):
        assert torch.allclose(p.grad, g * min(1.0, bound / norm), rtol=1e-15, atol=0)


def test_the_norm_of_many_float32_entries_is_that_of_float64():
    """Summed in float32, the squares of an embedding's gradient were off by 1e-5."""
    model = torch.nn.Embedding(4096, 32)
    model.weight.grad = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    norm = model.weight.grad.double().square().sum().sqrt().item()
    assert clip_grad_norm(model, 1e9).item() == pytest.approx(norm, rel=1e-12)

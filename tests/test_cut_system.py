"""The five files alone, in an empty folder, are a system that learns."""

import functools
import os
import re
import subprocess
import sys

import pytest
from conftest import slow
from test_cores import copy_the_five
from test_run import FROM_ROOT, json_lines

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("five")
    copy_the_five(folder)
    return folder


def run(folder, ranks, *words, **environment):
    """Run its train_grpo.py. ranks: of torchrun; 0: as a plain process."""
    left_out = ("RANK", "WORLD_SIZE", "PYTHONPATH")
    environment = {key: x for key, x in os.environ.items() if key not in left_out} | environment
    # Without `--`, the argparse of Python 3.11 takes --log for one of torchrun's own flags.
    start = (*TORCHRUN, str(ranks), "--") if ranks else ()
    command = [sys.executable, *start, "train_grpo.py", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@functools.cache
def logged(folder, ranks, words):
    """The losses and norms of five steps in float64, as the --log of a run says."""
    # The file exists already: a run writes it anew.
    file = folder / "log.jsonl"
    file.write_text("of an older run\n")
    done = run(folder, ranks, *words, "--steps", "5", "--dtype", "float64", "--log", file.name)
    assert done.returncode == 0, done.stderr
    assert re.search(r"(^|\n)solved [01]\.\d\d\n$", done.stdout), done.stdout
    assert [line["step"] for line in json_lines(file)] == list(range(5))
    return [line[name] for line in json_lines(file) for name in ("loss", "grad_norm")]


CASES = [(1, ()), (2, ()), (1, ("--tree",)), (2, ("--tree",)), (3, ()), (4, ("--plan", "c4"))]
CASES += [(2, ("--plan", plan)) for plan in ("t2", "c2")]


# The README's test has d2, and the file's own check the tree.
@pytest.mark.slow
@pytest.mark.parametrize("ranks, words", CASES)
def test_a_plan_and_a_tree_log_the_losses_and_norms_of_one_process(folder, ranks, words):
    expected = logged(folder, 0, ())
    assert logged(folder, ranks, words) == pytest.approx(expected, rel=0, abs=1e-9)
    assert all(norm > 0 for norm in expected[1::2])


REFUSED = [(2, "--tree --plan c2"), (1, "--plan p1")]
REFUSED += slow(
    (1, "--tree --plan t2"), (2, "--tree --plan t2"), (1, "--plan d2"), (3, "--plan d2"),
    (4, "--plan t4"), (15, ""), (1, "--dtype float16"), (1, "--steps 0"), (1, "--unknown"),
)  # fmt: skip


@pytest.mark.parametrize("world, words", REFUSED)
def test_what_cannot_run_is_refused_in_one_line_before_ranks_meet(folder, world, words):
    """Only rank 0 is there, and it ends all the same."""
    done = run(folder, 0, *words.split(), WORLD_SIZE=str(world), RANK="0")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("train_grpo.py: error: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_torchrun_ends_with_the_line_of_rank_0(folder):
    done = run(folder, 2, "--plan", "t3")
    assert done.returncode != 0 and done.stderr.count("train_grpo.py: error: expected") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks, seed", [(2, seed) for seed in range(5)] + [(0, 0)])
def test_guess_is_learned(folder, ranks, seed):
    done = run(folder, ranks, "--seed", str(seed))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1].removeprefix("solved ")) >= 0.9


@pytest.mark.slow
def test_the_folder_makes_the_run_of_the_five(folder, tmp_path):
    """The same weights, tokens and updates, to the last digits of float64."""
    words = "--dtype float64 --steps 5 --out run".split()
    command = [sys.executable, "-m", "full", *words]
    subprocess.run(command, cwd=tmp_path, env=FROM_ROOT, check=True, capture_output=True)
    lines = json_lines(tmp_path / "run" / "metrics.jsonl")
    losses = [2 * line["loss/token_mean"] for line in lines]  # the mean of two minibatches
    assert logged(folder, 0, ())[::2] == pytest.approx(losses, rel=0, abs=1e-12)

"""Each core runs by itself, in a folder with nothing but cores, and notices a slip."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT
from test_house import CORES, core_of
from test_ranks import as_script

WORDS = {"train_grpo": ("--steps", "1")}  # after its check it trains


@pytest.fixture(scope="module")
def folder_of_cores(tmp_path_factory):
    """A folder with the cut files and nothing else."""
    folder = tmp_path_factory.mktemp("cores")
    cut_into(folder)
    return folder


def cut_into(folder):
    """Write the cut files, and nothing else, into a folder."""
    tail = 'if __name__ == "__main__":\n    import sys\n\n    core_main(sys.argv[1:])\n'
    for path in CORES:
        (folder / path.name).write_text(core_of(path) + tail)


def run_core(folder, name, *words):
    environment = {key: x for key, x in os.environ.items() if key not in ("RANK", "PYTHONPATH")}
    command = [sys.executable, name, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", CORES, ids=lambda path: path.stem)
def test_a_core_runs_alone_and_prints_its_largest_error(path, folder_of_cores):
    done = run_core(folder_of_cores, path.name, *WORDS.get(path.stem, ()))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("\n")[0].split()[-1]) <= 1e-10


# The core of parallel.py takes longest, and `python parallel.py check` runs it too: test_readme.py.
SLOW = [pytest.param(x, marks=pytest.mark.slow) if x.stem == "parallel" else x for x in CORES]


@pytest.mark.parametrize("path", SLOW, ids=lambda path: path.stem)
def test_the_whole_file_runs_its_core_too(path, tmp_path):
    words = WORDS.get(path.stem, ())
    code, out, err = as_script(ROOT / path.name, "core", *words, cwd=tmp_path)
    lines = 3 if path.stem == "train_grpo" else 1  # its core trains: a step, and what is solved
    assert code == 0 and out.count("\n") == lines, err


SLIPS = [  # a line of a core, and a wrong one
    ("ring_attention", "    return ds_BHqk @ k_BHkD,", "    return 2 * ds_BHqk @ k_BHkD,"),
    ("models", "weight_NK / weight_NK.sum(-1", "weight_NK / weight_NK.sum(0"),
    ("parallel", 'layout(name, grid)["partial"]', 'layout(name, grid)["replicas"]'),
    ("tree_attention", "visit(child, state, path)", "visit(child, None, path)"),
    ("train_grpo", "tokens[:, positions_s + 1]", "tokens[:, positions_s]"),
    ("train_grpo", "len(self.tokens) + len(reply)", "len(self.tokens)"),
    ("train_grpo", "torch.minimum(ratio_N", "torch.maximum(ratio_N"),
    ("train_grpo", "optim_step(trainer.learning_rate(step))", "optim_step(trainer.config.lr)"),
]
SOME = {path.stem for path in CORES}


SOME_SLIPS = [
    pytest.param(*slip, marks=[pytest.mark.slow] if n > 5 else [])
    for n, slip in enumerate(SLIPS) if slip[0] in SOME
]  # fmt: skip


@pytest.mark.parametrize("stem, old, new", SOME_SLIPS)
def test_a_core_with_a_slip_exits_with_one(stem, old, new, folder_of_cores, tmp_path):
    text = (folder_of_cores / f"{stem}.py").read_text()
    assert text.count(old) == 1
    for other in CORES:
        (tmp_path / other.name).write_text((folder_of_cores / other.name).read_text())
    (tmp_path / f"{stem}.py").write_text(text.replace(old, new))
    code, out, _ = as_script(f"{stem}.py", *WORDS.get(stem, ()), cwd=tmp_path)
    assert code == 1 and "solved" not in out

"""Each core runs by itself, in a folder with nothing but cores, and notices a slip."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT
from test_house import CORES, core_of


@pytest.fixture(scope="module")
def folder_of_cores(tmp_path_factory):
    """A folder with the cut files and nothing else."""
    folder = tmp_path_factory.mktemp("cores")
    tail = 'if __name__ == "__main__":\n    import sys\n\n    core_main(sys.argv[1:])\n'
    for path in CORES:
        (folder / path.name).write_text(core_of(path) + tail)
    return folder


def run_core(folder, name, *words):
    environment = {key: x for key, x in os.environ.items() if key not in ("RANK", "PYTHONPATH")}
    command = [sys.executable, name, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", CORES, ids=lambda path: path.stem)
def test_a_core_runs_alone_and_prints_its_largest_error(path, folder_of_cores):
    done = run_core(folder_of_cores, path.name)
    assert done.returncode == 0, done.stderr
    if path.stem != "train_grpo":  # its core trains
        assert float(done.stdout.split()[-1]) <= 1e-10


# The core of parallel.py takes longest, and `python parallel.py check` runs it too: test_readme.py.
SLOW = [pytest.param(x, marks=pytest.mark.slow) if x.stem == "parallel" else x for x in CORES]


@pytest.mark.parametrize("path", SLOW, ids=lambda path: path.stem)
def test_the_whole_file_runs_its_core_too(path):
    done = run_core(ROOT, path.name, "core")
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr


SLIPS = {  # a line of each core, and a wrong one
    "ring_attention": ("    return ds_BHqk @ k_BHkD,", "    return 2 * ds_BHqk @ k_BHkD,"),
    "models": ("weight_NK / weight_NK.sum(-1", "weight_NK / weight_NK.sum(0"),
    "parallel": ('layout(name, grid)["partial"]', 'layout(name, grid)["replicas"]'),
    "tree_attention": ("visit(child, state, path)", "visit(child, None, path)"),
}


@pytest.mark.parametrize("path", CORES, ids=lambda path: path.stem)
def test_a_core_with_a_slip_exits_with_one(path, folder_of_cores, tmp_path):
    old, new = SLIPS[path.stem]
    text = (folder_of_cores / path.name).read_text()
    assert text.count(old) == 1
    for other in CORES:
        (tmp_path / other.name).write_text((folder_of_cores / other.name).read_text())
    (tmp_path / path.name).write_text(text.replace(old, new))
    assert run_core(tmp_path, path.name).returncode == 1

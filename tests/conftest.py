"""Markers, one thread, two cores, and the project's files on the path."""

import itertools
import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every subprocess
ROOT = Path(__file__).resolve().parent.parent
SORT = f"{ROOT}/tests/example_tasks.py:Sort"  # for --task; in a line of flags, {SORT!r}
LOOKUP = f"{ROOT}/tests/example_tasks.py:Lookup"
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("bench", "full"))]

WORKERS = 4  # at most: each holds torch, transformers and a server of ranks, 1.5 GB
MARKERS = {
    "quick": "part of `python -m pytest -m quick`",
    "slow": "left out unless asked for: `python -m pytest -m slow`",
}


def shortened(names, *kept):
    """Cases for `parametrize`: the default suite keeps a few of them, `-m slow` has the others."""
    cases = []
    for name in names:
        marks = [] if name in kept else [pytest.mark.slow]
        cases.append(pytest.param(name, marks=marks, id=f"{name}"))
    return cases


def slow(*cases):
    """Cases for `parametrize`, each a tuple of arguments, that only `-m slow` has."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def diagonal(*axes):
    """Cases for `parametrize`: all combinations, most of which only `-m slow` has.

    The default suite keeps as many as the longest axis has values. Each value of an axis is in one.
    """
    kept = {tuple(n % len(axis) for axis in axes) for n in range(max(map(len, axes)))}
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[n] for axis, n in zip(axes, places, strict=True)]
        cases.append(pytest.param(*values, marks=[] if places in kept else [pytest.mark.slow]))
    return cases


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Share whole folders of tests among the cores: what `-n` and `--dist` of pytest-xdist do.

    A few chosen tests are quicker without: each worker imports and collects by itself. Without
    pytest-xdist, or with -n 0, the same tests run one after the other. The workers begin at
    different places of the list, so that a fixture of a file is seldom made by two of them, and
    the first to finish takes over half of what another has left.
    """
    given = config.option
    chosen = given.keyword or any(Path(arg.split("::")[0]).is_file() for arg in config.args)
    watched = given.usepdb or given.capture == "no" or given.collectonly
    worker = hasattr(config, "workerinput")  # a worker of pytest-xdist comes here too
    if worker or not config.pluginmanager.hasplugin("xdist") or chosen or watched:
        return
    if given.numprocesses is None and given.dist == "no" and not given.tx:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        if cores > 1:
            given.numprocesses, given.dist = min(cores, WORKERS), "worksteal"


def pytest_configure(config):
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(config, items):
    """Leave slow rows out. They are no skips, which name what is missing on this machine."""
    if config.getoption("-m") in ("", "quick"):
        slow = {item for item in items if item.get_closest_marker("slow")}
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=[*slow])


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("-m") in ("", "quick"):
        terminalreporter.write_line(f"slow rows are {MARKERS['slow']}")


def installed(*packages):
    """Import packages. The test, or the file, is skipped if one is missing, and says why."""
    reason = "{0} is not installed: pip install -r tests/requirements.txt"
    found = [pytest.importorskip(x, reason=reason.format(x.split(".")[0])) for x in packages]
    return found[0] if len(found) == 1 else found


def batch_of(groups):
    """Groups of trajectories as a batch of one minibatch, which policy version 0 has sampled."""
    from full.learn.batches import SampledBatch

    return SampledBatch(dict(enumerate(groups)), range(len(groups)), 1, sampled_by=0)


def complaint_of(function, *args, error=ValueError, **options):
    """The one line of the error that a call must raise."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    said = str(caught.value)
    assert said and "\n" not in said
    return said


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """straight(flags, world): the directory of the uninterrupted run of these flags."""
    from test_run import runs_made_once

    return runs_made_once(tmp_path_factory)


@pytest.fixture(scope="module")
def process_group():
    """A group of this one process: what a Trainer and an evaluation ask for."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

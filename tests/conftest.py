"""Markers, one thread, and the project's files on the path."""

import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every subprocess
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MARKERS = {
    "quick": "part of `python -m pytest -m quick`, under 60 s in all",
    "slow": "left out unless asked for: `python -m pytest -m slow`",
}


def pytest_configure(config):
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("-m"):
        skip = pytest.mark.skip(reason=MARKERS["slow"])
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="module")
def process_group():
    """A group of this one process: what a Trainer and an evaluation ask for."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

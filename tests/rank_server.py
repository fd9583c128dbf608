"""What the server has imported before it forks a rank (see `start` in test_ranks.py).

A rank then starts in a few hundredths of a second: it finds torch, the project's files and the
functions of the tests in its memory.
"""

import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ.pop("PYTHONPATH", None)  # which only let the server find this file
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "bench"), str(HERE / "full")]

import numpy.ma  # noqa: E402, F401
import pytest  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed.checkpoint  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.pipelining  # noqa: E402, F401
import tqdm  # noqa: E402, F401

from full.run.flags import parse_config

# The files whose functions run in ranks. One that cannot be imported is the test process's to
# report, and a rank's that asks for it.
for path in sorted(HERE.glob("**/test_*.py")):
    if path.stem == "test_ranks" or "from test_r" in path.read_text():
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(path.stem)
parse_config([])  # fills the cache of regular expressions
gc.collect()
gc.freeze()  # a collection in a rank does not write to, and so copy, the memory that they share

"""The comparison with TRL measures the same work: its script runs, its own parity check holds."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bench_trl.py")


@pytest.mark.skipif(not find_spec("trl"), reason="tests/requirements.txt is not installed")
def test_trl_gives_our_loss_and_gradient_on_its_own_batch():
    size = "--prompt 24 --completion 6 --group 4 --rounds 1".split()
    command = [sys.executable, SCRIPT, *size]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["ok"] and summary["gradient"] < 1e-5 and abs(summary["loss"]) < 1e-5

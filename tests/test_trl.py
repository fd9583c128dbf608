"""The comparison with TRL measures the same work: its script runs, its own parity check holds."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_ranks import as_script

SCRIPT = Path(__file__).with_name("bench_trl.py")


@pytest.mark.skipif(not find_spec("trl"), reason="tests/requirements.txt is not installed")
def test_trl_gives_our_loss_and_gradient_on_its_own_batch(tmp_path):
    size = "--prompt 24 --completion 6 --group 4 --rounds 1".split()
    code, out, err = as_script(SCRIPT, *size, cwd=tmp_path)
    assert code == 0, err[-2000:]
    summary = json.loads(out.splitlines()[-1])
    assert summary["ok"] and summary["gradient"] < 1e-5 and abs(summary["loss"]) < 1e-5

"""The comparison with TRL measures the same work: its script runs, its own parity check holds."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_ranks import as_script
from test_rollout import checkpoint  # noqa: F401, a fixture

SCRIPT = Path(__file__).with_name("bench_trl.py")
pytestmark = pytest.mark.skipif(not find_spec("trl"), reason="tests/requirements.txt")


def summary_of(*words, cwd):
    """The last line of a run that ended well."""
    code, out, err = as_script(SCRIPT, *words, cwd=cwd)
    assert code == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


def test_trl_gives_our_loss_and_gradient_on_its_own_batch(tmp_path):
    size = "--prompt 24 --completion 6 --group 4 --rounds 1".split()
    summary = summary_of(*size, cwd=tmp_path)
    assert summary["ok"] and summary["gradient"] < 1e-5 and abs(summary["loss"]) < 1e-5


def test_a_checkpoint_is_measured_on_its_own_prompts(checkpoint, tmp_path):  # noqa: F811
    """Several prompts a step, and memory: at least weights and moments, ours with two copies."""
    directory = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    template = "{{ messages[0]['content'] }} answer:"
    (directory / "tokenizer_config.json").write_text(json.dumps(dict(chat_template=template)))
    size = "--prompts 3 --completion 4 --group 2 --rounds 1".split()
    summary = summary_of("--model", f"{directory}", *size, cwd=tmp_path)
    assert summary["ok"] and summary["prompts"] == 3 and summary["prompt"] > len("answer:") / 2

    # In float32; a checkpoint has the weights in float64.
    weights = (directory / "model.safetensors").stat().st_size / 2 / 2**20
    for ours, theirs in summary["memory"].values():
        assert ours > 4 * weights and theirs > 3 * weights

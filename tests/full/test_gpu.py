"""tests/gpu.sh, dry: what it asks for, what is kept, what the page then says."""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import gpu
import measure
import other_device
import pytest
import torch
from conftest import ROOT, shortened
from test_ranks import join, ranks, start

NAMES = [*gpu.COMMANDS]


def test_the_script_lists_its_commands_and_names_what_is_wrong(capsys):
    given = os.environ | dict(PYTHON=sys.executable, DEVICE="cuda")
    done = subprocess.run(["sh", f"{ROOT}/tests/gpu.sh"], env=given, capture_output=True, text=True)
    assert done.returncode == 0 and "\ntree-star: " in done.stdout
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["rings"])
    assert "invalid choice: 'rings'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert gpu.main(["ring"]) == 2
        assert "DEVICE=cpu SIZE=toy is the dry run" in capsys.readouterr().err


def _main(rank, words, log):
    with open(log, "w") as out, contextlib.redirect_stdout(out):
        program = {"gpu.py": gpu, "measure.py": measure}[Path(words[0]).name]
        sys.exit(program.main(words[1:]))


@pytest.mark.parametrize("name", shortened(NAMES, "check-tree", "check-parallel"))
def test_each_command_runs(name, tmp_path):
    """At toy size, in a process that has imported torch; its rows are numbers in the section."""
    words = gpu.words_of(name, "cpu", "toy")
    assert join(start(1, _main, words, tmp_path / "log")) == [0]
    lines = (tmp_path / "log").read_text().splitlines()
    kept = dict(code=0, seconds=1.0, printed=lines, result=json.loads(lines[-1]))
    text = gpu.section({name: kept | gpu.machine("cpu")}, NAMES)
    assert len(lines) > 1 and f"{name}`" in text.split("Not run:")[0]
    assert not re.search(r"\b(nan|inf)\b|Failed", text)


def _on_another_device(rank, subject):
    with other_device.present():
        return [*gpu.CHECKS[subject](other_device.NAME, True)]


@pytest.mark.parametrize("subject", shortened(gpu.CHECKS, "parallel"))
def test_each_check_runs_on_a_device_that_is_not_the_cpu(subject, tmp_path):
    """Where a tensor is made or moved wrongly on a GPU, it is so on this device, and an error."""
    (rows,) = ranks(tmp_path, 1, _on_another_device, subject)
    assert len(rows) > 1 and all(error <= bound for _, error, bound in rows), rows


def _mistakes(rank):
    with other_device.present():
        there = torch.ones(2, 3, device="other")
        for call, text in (
            (lambda: there + torch.ones(2, 3), "tensors of the CPU, [[2, 3]]"),
            (lambda: there.numpy(), "numpy"),
            (lambda: torch.randn(2, device="other", generator=torch.Generator()),
             "a generator of the CPU"),
        ):  # fmt: skip
            with pytest.raises((RuntimeError, TypeError)) as error:
                call()
            assert text in str(error.value)
        right = (there * 2 + there.sum())[[0]]
    return right.device.type, right.tolist()


def test_the_other_device_is_as_strict_as_cuda(tmp_path):
    assert ranks(tmp_path, 1, _mistakes) == [("other", [[8.0, 8.0, 8.0]])]


@pytest.mark.quick
def test_a_check_shows_what_is_wrong(capsys):
    """A row over its bound, a NaN."""
    rows = [("right", 1e-15, 1e-12), ("in bfloat16", 1e-3, 2e-3)]
    assert gpu.show_rows("models", "cpu", rows)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["max_error"] == 1e-15
    for wrong in (1e-3, math.nan):
        assert not gpu.show_rows("models", "cpu", [*rows, ("wrong", wrong, 1e-12)])
        out = capsys.readouterr().out
        assert f"| wrong | {wrong:g} | 1e-12 | FAILED |" in out
        assert f'"max_error": {json.dumps(wrong)}}}' in out


@pytest.mark.quick
def test_what_is_printed_is_kept_and_shown_also_of_a_failure(tmp_path, capfd):
    """A late command is ended; the page has the records of one machine."""
    options = Namespace(out=tmp_path, device="cpu", size="toy")

    def record(code, **how):
        ended = gpu.record("ring", [sys.executable, "-c", code], options, **how)
        kept = json.loads((tmp_path / "ring.json").read_text())
        return ended, kept, (kept["code"], kept["printed"], kept["result"])

    ended, good, said = record("print('| a row |'); print('{\"seconds\": 2}')")
    assert ended == 0 and said == (0, ["| a row |", '{"seconds": 2}'], {"seconds": 2})
    assert capfd.readouterr().out == '| a row |\n{"seconds": 2}\n'
    assert record("print('as far'); raise SystemExit(3)")[2] == (3, ["as far"], None)
    late = "import time; print('on', flush=True); time.sleep(60)"
    ended, failed, said = record(late, limit=1)
    assert ended == 124 and said == (124, ["on"], None)
    with pytest.raises(ValueError, match="JSON|Expecting"):
        record("print('no JSON')")

    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu.BEGIN}\nold\n{gpu.END}\nafter\n")
    checked = good | dict(name="check-ring", result=dict(max_error=2e-15), seconds=3.0)
    found = {"ring": failed, "check-ring": checked}
    gpu.write_results(page, page, found, ["check-ring", "ring", "tree-star"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| `check-ring` | 2e-15 | 3 s |" in text and "Not run: `tree-star`." in text
    assert "Failed: `ring` (exit code 124)." in text
    assert "\n| a row |" in gpu.section({"ring": good}, ["ring"])
    gpu.write_results(page, page, {}, ["ring"])
    assert "Not run on a GPU yet: `ring`." in page.read_text()
    with pytest.raises(ValueError, match="different"):
        gpu.section(found | dict(step=good | dict(machine="another")), ["ring", "step"])

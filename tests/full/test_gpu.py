"""tests/gpu.sh, dry: what it lists and asks for, what is kept, what the page then says."""

import contextlib
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import measure_gpu
import other_device
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, shortened
from test_ranks import join, ranks, start

from full.__main__ import main

SCRIPT = ROOT / "tests" / "gpu.sh"


def shell(*argv, **environment):
    """`sh tests/gpu.sh ARGV`: exit code, stdout, stderr."""
    given = os.environ | dict(PYTHON=sys.executable) | environment
    done = subprocess.run(["sh", str(SCRIPT), *argv], env=given, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


LISTED = [line.split(": ", 1) for line in shell()[1].splitlines()]
NAMES = [name for name, _ in LISTED]
# Whose toys take more than a few seconds, or do what another's does.
COSTLY = "check-models", "check-ring", "check-grpo", "tree-chain", "memory-0.6b"


def words_of(name, folder, code=0, **environment):
    """What gpu.sh gives to measure_gpu.py, by a Python that prints what it is given and ends."""
    fake = folder / "python"
    fake.write_text(f'#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\nexit {code}\n')
    fake.chmod(0o755)
    ended, out, err = shell(name, PYTHON=str(fake), **environment)
    assert ended == code, err
    script, *words = out.splitlines()
    assert script == str(ROOT / "tests/bench/measure_gpu.py")
    return words


def asked(name, folder, **environment):
    """What gpu.sh gives to `record` and to Python."""
    what, given, *words = words_of(name, folder, **environment)
    assert (what, given) == ("record", name)
    at = words.index("--")
    return words[:at], words[at + 2 :]  # without the interpreter


@pytest.mark.quick
def test_the_list_names_each_command(tmp_path):
    """Every case says in a line what it asks; at full size device and size arrive."""
    text = SCRIPT.read_text()
    cases = text[text.index("\ncase $name in") :]
    assert all(line for _, line in LISTED)
    assert len(set(NAMES)) == len(NAMES) == cases.count(";;") - 3  # list, results, all others
    for name in NAMES:
        mine, (file, *words) = asked(name, tmp_path, DEVICE="", SIZE="", OUT="")
        assert mine == ["--out", "gpu-results", "--device", "cuda", "--size", "full"]
        assert Path(file).exists() or (file, words[0]) == ("-m", "full")
        assert words[words.index("--device") + 1] == "cuda", shlex.join(words)


def test_without_a_gpu_and_under_a_wrong_name_it_says_so(tmp_path, capsys):
    words = words_of("ring", tmp_path, code=2, OUT=str(tmp_path / "out"), DEVICE="cuda")
    if not torch.cuda.is_available():
        assert measure_gpu.main(words) == 2
        assert "DEVICE=cpu SIZE=toy is the dry run" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    code, out, err = shell("rings")
    assert code == 2 and "no command is called rings" in err


def _main(rank, file, words, log):
    with open(log, "w") as out, contextlib.redirect_stdout(out):
        if file == "-m":  # python -m full ..
            sys.exit(main(words[1:]))
        sys.exit(importlib.import_module(Path(file).stem).main(words))


@pytest.mark.parametrize("name", shortened(NAMES, *(name for name in NAMES if name not in COSTLY)))
def test_each_command_runs(name, tmp_path):
    """At toy size, in a process that has imported torch; its rows are numbers in the section."""
    _, (file, *words) = asked(name, tmp_path, DEVICE="cpu", SIZE="toy")
    assert join(start(1, _main, file, words, tmp_path / "log")) == [0]
    lines = (tmp_path / "log").read_text().splitlines()
    kept = dict(code=0, seconds=1.0, printed=lines, result=measure_gpu.last_json(lines))
    text = measure_gpu.section({name: kept | measure_gpu.machine("cpu")}, NAMES)
    assert len(lines) > 1 and f"{name}`" in text.split("Not run:")[0]
    assert not re.search(r"\b(nan|inf)\b|Failed", text)


@pytest.mark.slow
def test_whole_runs_on_a_device_are_the_cpus():
    """All ways of them, at least from one process to the next."""
    rows = list(measure_gpu.run_rows("cpu", few=False))
    assert len(rows) == 4 and all(error <= bound for _, error, bound in rows), rows


@pytest.mark.quick
@pytest.mark.parametrize("name, on_the_host", [("0.6b", ()), ("8b", measure_gpu.ON_THE_HOST)])
def test_what_memory_trains_fits_on_80_gb_by_the_plan(name, on_the_host):
    """And the 8B model does not without fsdp-offload, which is why it is there."""
    shape, settings = measure_gpu.memory_case(name, "full")
    parts = measure_gpu.planned(shape, settings)
    assert 5e9 < sum(x for part, x in parts.items() if part not in on_the_host) < 70e9
    assert (settings.get("data_parallel") == "fsdp-offload") == (sum(parts.values()) > 80e9)


# A device that is none ------------------------------------------------------------------------


def _on_another_device(rank, subject):
    measure_gpu.CHECKS["grpo"] = (measure_gpu.grpo_rows,)  # whole runs need a real one
    with other_device.present():
        world, cpu = dist.group.WORLD, torch.device("cpu")
        kind, gloo = dist.ProcessGroup.BackendType.GLOO, world._get_backend(cpu)
        world._register_backend(torch.device(other_device.NAME), kind, gloo)
        return measure_gpu.rows_of_check(subject, other_device.NAME, few=True)


@pytest.mark.parametrize("subject", shortened(measure_gpu.CHECKS, "parallel"))
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
def test_a_check_on_a_device_shows_what_is_wrong(capsys):
    """A row over its bound, a NaN, a device that is not there."""
    rows = [("right", 1e-15, 1e-12), ("in bfloat16", 1e-3, 2e-3)]
    assert measure_gpu.show_rows("models", "cpu", rows)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["max_error"] == 1e-15
    for wrong in (1e-3, math.nan):
        assert not measure_gpu.show_rows("models", "cpu", [*rows, ("wrong", wrong, 1e-12)])
        assert "FAILED, above 1e-12" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert measure_gpu.check("models", ["--device", "cuda"]) == 2
        assert "no CUDA device here" in capsys.readouterr().err


# Records and the page -------------------------------------------------------------------------


def record(folder, code, **options):
    """Records of a Python text."""
    command = [sys.executable, "-c", code]
    return measure_gpu.record("ring", command, folder, "cpu", "toy", **options)


@pytest.mark.quick
def test_what_is_printed_is_kept_also_of_a_failure_and_a_late_command_is_ended(tmp_path, capfd):
    assert record(tmp_path, "print('a row'); print('{\"seconds\": 2}')") == 0
    assert capfd.readouterr().out == 'a row\n{"seconds": 2}\n'
    assert record(tmp_path, "print('as far as this'); raise SystemExit(3)") == 3
    assert record(tmp_path, "import time; print('on', flush=True); time.sleep(60)", limit=1) == 124
    assert "took more than 1 s" in capfd.readouterr().err
    with pytest.raises(ValueError, match="no measurement"):
        record(tmp_path, "print('no JSON')")
    records = [json.loads(x) for x in (tmp_path / "ring.jsonl").read_text().splitlines()]
    assert [(x["code"], x["device"], x["size"], x["printed"], x["result"]) for x in records] == [
        (0, "cpu", "toy", ["a row", '{"seconds": 2}'], {"seconds": 2}),
        (3, "cpu", "toy", ["as far as this"], None), (124, "cpu", "toy", ["on"], None),
    ]  # fmt: skip
    assert "Failed: `ring` (exit code 124)." in measure_gpu.section({"ring": records[2]}, NAMES)


@pytest.mark.quick
def test_results_shows_what_was_run_and_names_what_was_not(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{measure_gpu.BEGIN}\nold\n{measure_gpu.END}\nafter\n")
    old = dict(name="ring", size="full", code=0, seconds=3.0, printed=["a row of old", "{}"])
    old |= dict(device="cuda", machine="a GPU", torch="2.11.0", cuda="12.8", result=dict(bench=1))
    new, toy = old | dict(printed=["16 tokens", "{}"]), old | dict(size="toy", printed=["4", "{}"])
    check = old | dict(name="check-ring", result=dict(max_error=2e-15))
    for name, records in (("ring", [old, new, toy]), ("check-ring", [check])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")

    names = ["check-ring", "ring", "step"]
    found = measure_gpu.newest(tmp_path, "cuda", "full")
    measure_gpu.write_results(page, page, found, names)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "\n16 tokens\n" in text and "\n4\n" not in text
    assert "| `check-ring` | 2e-15 | 3 s |" in text
    assert "a GPU, torch 2.11.0, CUDA 12.8." in text and "Not run: `step`." in text

    # Again with nothing: the page has forgotten, and says so.
    measure_gpu.write_results(page, page, {}, names)
    assert "Not run on a GPU yet: `check-ring`, `ring`, `step`." in page.read_text()
    other = dict(step=found["ring"] | dict(name="step", machine="another GPU"))
    for text, records, names, message in (
        (text, found | other, names, "different machines"),
        (text, found, ["step"], "no command of"),
        ("nothing", found, names, "has no lines"),
    ):
        page.write_text(text)
        with pytest.raises(ValueError, match=message):
            measure_gpu.write_results(page, page, records, names)


def test_the_page_has_the_section_of_what_lies_in_the_repository(tmp_path, capsys):
    """Without records `results` gives the text that stands there; a dry run leaves it alone."""
    page = ROOT / "full" / "RESULTS.md"
    before = page.read_text()
    words = words_of("results", tmp_path, OUT=str(tmp_path), DEVICE="cpu", SIZE="toy")
    assert measure_gpu.main(words) == 0
    assert str(tmp_path / "RESULTS.md") in capsys.readouterr().out
    assert page.read_text() == before
    if "Not run on a GPU yet" in before:
        assert (tmp_path / "RESULTS.md").read_text() == before

"""tests/mutate.py: its slips are programs, reproducible, caught by a test or listed."""

import os
import shutil
import subprocess
import sys

import mutate
import pytest
from conftest import ROOT

# before, after, kind
SLIPS = [
    ("a + b", "a - b", "sign"), ("-a", "a", "sign"), ("x[a - 2]", "x[a - 3]", "offset or axis"),
    ("x.sum(1)", "x.sum(0)", "offset or axis"), ("x.sum(dim=-1)", "x.sum()", "dropped keyword"),
    ("a / b", "a", "divisor"), ("a // b", "(-(-a // b))", "divisor"),
    ("a * b", "a", "missing scale"), ("(a, b, c)", "(a, c)", "stale key"),
    ("x.to(a)", "x", "dtype"), ("torch.float64", "torch.float32", "dtype"),
    ("torch.promote_types(a, b)", "a", "dtype"), ("a < b", "a <= b", "comparison"),
    ("a is None", "a is not None", "comparison"), ("min(a, b)", "max(a, b)", "min/max"),
    ("f(a, b)", "f(b, a)", "swapped argument"), ("k_BD + a", "v_BD + a", "sibling"),
    ("dist.send(x, dst=a)", "dist.send(x, dst=0)", "source rank"),
    ("dist.get_global_rank(a, b)", "b", "source rank"), ("a and b", "a or b", "and/or"),
    ("not a", "a", "and/or"), ("torch.where(a, b, c)", "b", "mask"), ("0.5", "4.0", "bound"),
    ("a if b else c", "c", "condition"),
]  # fmt: skip
FUNCTION = "def f(a, b, c, x, k_BD, v_BD):\n    y = {}\n    return y\n"


@pytest.mark.quick
@pytest.mark.parametrize("before, after, kind", SLIPS, ids=[before for before, *_ in SLIPS])
def test_kinds(before, after, kind):
    found = mutate.slips(FUNCTION.format(before), "a.py")
    assert (kind, f"    y = {after}") in {(slip.kind, slip.after) for slip in found}


@pytest.mark.quick
def test_statements_and_checks_are_skipped_and_texts_stay():
    text = 'def f(a: int = 7):\n    "1 + 1"\n    if a:\n        raise E(f"{a + 1}")\n    g.wait()\n'
    found = {(slip.line, slip.after.strip()) for slip in mutate.slips(text + "    print(3)\n", "a")}
    assert found == {(1, 'def f(a: int = 8):'), (3, "if False:"), (5, "pass")}


TINY = """
def doubled(x):
    return x + x


def shifted(x):
    return x - 1


def unseen(x):
    return x / 3
"""
TESTS = """
import os, subprocess, sys
sys.path.insert(0, ".")
import tiny

def test_doubled():
    code = "import tiny; assert tiny.doubled(3) == 6"
    env = os.environ | {"PYTHONPATH": "tests:."}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)

def test_shifted():
    assert tiny.shifted(3) > 0
"""


def mutated(root):
    """Exit code and stdout of mutate.py for tiny.py, with its record in the folder around root."""
    # In a process of its own: mutate forks, and a fork of this one may inherit a lock that a thread
    # of an earlier test held.
    code = "import sys, pathlib, mutate\nroot = pathlib.Path(sys.argv[1])\n"
    code += "sys.exit(mutate.main(['tiny.py', '--jobs', '1'], root=root))"
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "TMPDIR": str(root.parent)}
    command = [sys.executable, "-c", code, root]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_slip_is_caught_or_listed(tmp_path):
    """The sum is tested in another process, the difference too weakly, the quotient not at all."""
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "tiny.py").write_text(TINY)
    (root / "tests" / "test_tiny.py").write_text(TESTS)
    shutil.copy(ROOT / "tests" / "blocks.py", root / "tests")
    shutil.copy(ROOT / ".gitignore", root)
    code, out = mutated(root)
    assert code == 1
    assert "tests run 2 of 3 blocks" in out
    assert "tiny.py:3 sign: tests/test_tiny.py::test_doubled" in out
    assert "tiny.py:7  " in out and "    - return x - 1" in out
    assert "    passed: 1 of tests/test_tiny.py" in out
    assert "    - return x / 3" in out and "    no test runs it" in out
    assert "3 slips, 1 caught, seed 0" in out

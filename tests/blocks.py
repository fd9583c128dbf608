"""Which tests run which block of code: a record for tests/mutate.py.

A block is the body of a function, a loop or a branch. `record` runs tests in a copy of the project
in which every block calls `seen`, which notes the block and the test that is running. Ranks and
commands of a test are other processes, so the name of the test is in a file, too.
"""

import ast
import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SAID = {"print", "warn", "write", "add_argument", "ArgumentParser"}  # calls whose words are texts


def walk(node, place="", counter=None, name=""):
    """Yield (node, place) for the code of a syntax tree: `Mask.slice:2` is its third block.

    Outside of functions a place is ''.
    """
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        name = f"{name}.{node.name}".lstrip(".")
        counter = itertools.count() if isinstance(node, ast.FunctionDef) else None
        place = f"{name}:0" if counter else ""
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if field in ("annotation", "returns", "decorator_list") or not children:
            continue
        is_elif = field == "orelse" and type(node) is type(children[0]) is ast.If
        starts = counter and isinstance(children[0], ast.stmt) and not is_elif
        here = f"{name}:{next(counter)}" if starts else place
        for child in children:
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not is_text:
                yield child, here
                if not isinstance(child, ast.Raise | ast.JoinedStr) and called(child) not in SAID:
                    yield from walk(child, here, counter, name)


def called(node):
    """Return the last part of the name of the function that a call calls; '' for other nodes."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


# In the copy -------------------------------------------------------------------------------------
# This file lies next to the record then. pytest has loaded it as a plugin, and blocks import it.

FOLDER = Path(__file__).resolve().parent
CURRENT = FOLDER / f"test-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
STATE = {"test": None, "seen": set()}


def seen(place):
    """Note that the test runs a block, once a test and process."""
    if place not in STATE["seen"]:
        STATE["seen"].add(place)
        if STATE["test"] is None and CURRENT.exists():
            STATE["test"] = CURRENT.read_text()
        if STATE["test"] is not None:
            note(place)


def note(*words):
    # One write a line, so that lines of processes do not mix. A killed rank leaves its lines.
    # A test may limit how long the files of a rank become.
    with contextlib.suppress(OSError), (FOLDER / "lines").open("ab", buffering=0) as file:
        file.write("\t".join([STATE["test"], *words]).encode() + b"\n")


def begin(test=None):
    STATE.update(test=test, seen=set())


os.register_at_fork(after_in_child=begin)


def pytest_runtest_logstart(nodeid, location):
    begin(nodeid)
    CURRENT.write_text(nodeid)


def pytest_runtest_logreport(report):
    if not hasattr(report, "node"):  # of a worker of pytest-xdist, who has noted it
        note(f"{report.when} {report.outcome}", str(report.duration))


# The record --------------------------------------------------------------------------------------

QUIET = ["-q", "--tb=no", "-p", "no:cacheprovider", "--rootdir=."]


def instrumented(text, file, folder):
    """Return a file's text with a call of `seen` at the beginning of every block."""
    lines, first = text.split("\n"), {}
    for node, place in walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            first.setdefault(place, node)
    for place, node in sorted(first.items(), key=lambda item: -item[1].lineno):
        at = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))]) - 1
        call = f"_seen({f'{file}:{place}'!r})"
        if not place:
            # The beginning of the file. A rank's path may have tests/ with its own blocks.py.
            call = f"import sys; sys.path.insert(0, {str(folder)!r})"
            call += "; from blocks import seen as _seen"
        lines.insert(at, " " * node.col_offset + call)
    return "\n".join(lines)


def ignored(root):
    """Return the patterns of names that git ignores: environments, runs, results and caches."""
    lines = (root / ".gitignore").read_text().splitlines()
    return {".git", *(line.rstrip("/") for line in lines)}


def copied(root, folder):
    """Copy the project into a folder, without what git ignores."""
    left_out = shutil.ignore_patterns(*ignored(root))
    return Path(shutil.copytree(root, folder, ignore=left_out, dirs_exist_ok=True))


def modules_of(root):
    """Return the files that slips are planted in: the five, and the folder's."""
    return sorted(root.glob("*.py")) + sorted(root.glob("full/**/*.py"))


def record(root, folder, jobs, anew=False):
    """Return {test: (seconds, places)} of all tests that pass.

    Test files that are new or have changed are run; the folder has the record of the others.
    """
    store = folder / "default.json"
    known = json.loads(store.read_text()) if store.exists() and not anew else {}
    paths = root.glob("tests/**/test_*.py")
    now = {f"{path.relative_to(root)}": path.read_bytes() for path in paths}
    now = {file: hashlib.sha256(text).hexdigest() for file, text in sorted(now.items())}
    known = {file: entry for file, entry in known.items() if entry["hash"] == now.get(file)}
    missing = [file for file in now if file not in known]
    if missing:
        print(f"recording the tests of {len(missing)} files", flush=True)
        project = copied(root, folder / "recorded")
        for path in modules_of(project):
            name = f"{path.relative_to(project)}"
            path.write_text(instrumented(path.read_text(), name, folder))
        shutil.copy(__file__, folder)
        (folder / "lines").write_text("")
        shared = len(missing) > 1 and importlib.util.find_spec("xdist")
        options = ["-n", str(jobs), "--dist", "worksteal"] if shared else []
        command = [sys.executable, "-m", "pytest", *QUIET, "-p", "blocks", *options, *missing]
        env = os.environ | {"PYTHONPATH": str(folder)}
        subprocess.run(command, cwd=project, env=env, stdout=subprocess.DEVNULL)
        known |= {file: {"hash": now[file], "tests": {}} for file in missing}
        for line in (folder / "lines").read_text().splitlines():
            test, what, *seconds = line.split("\t")
            entry = known[test.split("::")[0]]["tests"].setdefault(test, [0.0, [], []])
            entry[0] += float(*seconds) if seconds else 0.0
            entry[2 if seconds else 1].append(what)
        store.write_text(json.dumps(known))

    # A test that failed is of no use: it may read the text of the code.
    tests = {test: entry for file in known.values() for test, entry in file["tests"].items()}
    good = ["setup passed", "call passed", "teardown passed"]
    return {test: (time, {*places}) for test, (time, places, ends) in tests.items() if ends == good}

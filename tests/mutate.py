"""Plant random slips of one line in copies of the project, and list those that no test notices.

    python tests/mutate.py                      60 slips over all files
    python tests/mutate.py models.py --seed 1   other slips, in one file

`slips_of` lists the kinds of slips. What errors and prints say is left alone. The first call runs
the suite once, to record which tests run which block of code (see blocks.py). The record is kept in
the temporary folder. A test file that has changed is recorded again, on the next call. If code has
moved to other blocks, use --record. Each slip is judged by tests that run its block, until their
recorded seconds reach --seconds: first those that a comment near the line names, then from each
test file in turn the test that runs the fewest blocks.
Exit code: 0 if every slip is caught, else 1.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict, namedtuple
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from blocks import QUIET, SAID, called, copied, modules_of, record, walk

# Slips -------------------------------------------------------------------------------------------

OTHER = {"min": "max", "amin": "amax", "any": "all", "floor": "ceil", "zeros": "ones", "sin": "cos"}
OTHER |= {"argmin": "argmax", "minimum": "maximum", ast.And: ast.Or, ast.Add: ast.Sub}
OTHER |= {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
OTHER |= {b: a for a, b in OTHER.items()}
DTYPES = {"float64": "float32", "float32": "bfloat16", "int64": "int32"}
FACTORS = {ast.Mult: "missing scale", ast.Div: "divisor", ast.Mod: "divisor"}

# places: the blocks of code that hold the line, or that use what it binds; see blocks.py.
# pinned: the tests that comments near the line name.
Slip = namedtuple("Slip", "kind file line places pinned before after")


def changed(node, **fields):
    """Return a copy of a syntax node with other fields."""
    return type(node)(**dict(ast.iter_fields(node)) | fields)


def slips_of(node, siblings):
    """Yield (kind, a node to replace, the new node) for every slip that fits a syntax node.

    siblings: names that the same function binds and that a reader could take for this one.
    """
    op = type(getattr(node, "op", None))
    if op in OTHER:
        yield "and/or" if op in (ast.And, ast.Or) else "sign", node, changed(node, op=OTHER[op]())
    if isinstance(node, ast.UnaryOp):
        yield "and/or" if op is ast.Not else "sign", node, node.operand
    if isinstance(node, ast.BinOp) and op in FACTORS:
        yield FACTORS[op], node, node.left
    if isinstance(node, ast.BinOp) and op is ast.FloorDiv:  # rounded up
        low = changed(node, left=ast.UnaryOp(ast.USub(), node.left))
        yield "divisor", node, ast.UnaryOp(ast.USub(), low)
    if isinstance(node, ast.Compare):
        ops = [OTHER[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", node, changed(node, ops=ops)
    if isinstance(node, ast.IfExp):
        yield "condition", node, node.body
        yield "condition", node, node.orelse
    if isinstance(node, ast.If) and not node.orelse:
        yield "skipped check", node.test, ast.Constant(False)
    statement = called(node.value) not in {"", *SAID} if isinstance(node, ast.Expr) else None
    if statement or isinstance(node, ast.AugAssign):
        yield "skipped statement", node, ast.Pass()
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        n = node.value
        if type(n) is int:
            yield "offset or axis", node, ast.Constant(0 if n == 1 else n + 1)
        else:
            yield "bound", node, ast.Constant(n * 8 or 1.0)
    if isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load):
        for n in range(len(node.elts) if len(node.elts) > 1 else 0):
            yield "stale key", node, changed(node, elts=node.elts[:n] + node.elts[n + 1 :])
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for name in siblings:
            yield "sibling", node, changed(node, id=name)
    for field in {"id", "attr"} & {*node._fields}:
        name = getattr(node, field)
        if name in OTHER or name in DTYPES:
            new = OTHER.get(name) or DTYPES[name]
            yield "min/max" if name in OTHER else "dtype", node, changed(node, **{field: new})
    if isinstance(node, ast.Call):
        yield from slips_of_call(node)


def slips_of_call(node):
    """Yield the slips of a call: its arguments, its keywords, and functions of known meaning."""
    name, args, keywords = called(node), node.args, node.keywords
    for n, (a, b) in enumerate(itertools.pairwise(args)):
        fixed = isinstance(a, ast.Constant | ast.Starred) or isinstance(b, ast.Starred)
        if not fixed and ast.dump(a) != ast.dump(b):
            yield "swapped argument", node, changed(node, args=[*args[:n], b, a, *args[n + 2 :]])
    for n, word in enumerate(keywords):
        if word.arg not in (None, "help", "metavar"):
            rest = keywords[:n] + keywords[n + 1 :]
            yield "dropped keyword", node, changed(node, keywords=rest)
        if word.arg in ("src", "dst"):
            yield "source rank", word.value, ast.Constant(0)
    if name in ("to", "double") and isinstance(node.func, ast.Attribute):
        yield "dtype", node, node.func.value
    if name == "promote_types":
        yield "dtype", node, args[0]
    if name == "get_global_rank":
        yield "source rank", node, args[1]
    if name == "where" and len(args) == 3:
        yield "mask", node, args[1]


def related(a, b):
    """Say whether a reader could take a name for another: one tensor suffix, or one stem."""
    (stem, _, suffix), (other, _, other_suffix) = (x.rpartition("_") for x in (a, b))
    shaped = suffix == other_suffix != suffix.lower()
    return a != b and (shaped or stem == other != "" or a.rstrip("012") == b.rstrip("012"))


def slips(text, file):
    """Return every slip of a file's text that fits in one line."""
    lines, nodes = text.encode().split(b"\n"), [*walk(ast.parse(text))]
    found, names, users, owners, outside = {}, defaultdict(set), defaultdict(set), [], 1
    for node, place in nodes:
        # The owner is a function, or the line of a statement that is outside of functions. names
        # are what it binds, and users are the blocks that mention a name.
        outside = node.lineno if isinstance(node, ast.stmt) and not place else outside
        owners.append(place.split(":")[0] or outside)
        name = getattr(node, "arg", getattr(node, "attr", getattr(node, "id", None)))
        users[name] |= {f"{file}:{place}"} if place else set()
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if is_stored or isinstance(node, ast.arg):
            names[owners[-1]].add(name)

    for (node, place), owner in zip(nodes, owners, strict=True):
        is_local = isinstance(node, ast.Name) and place
        alike = sorted(name for name in names[owner] if is_local and related(name, node.id))
        for kind, old, new in slips_of(node, alike):
            at = old.lineno
            used = {f"{file}:{place}"} if place else set().union(*(users[x] for x in names[owner]))
            if at < old.end_lineno or not used:  # a type, say, which no block names
                continue
            simple = isinstance(new, ast.Name | ast.Constant | ast.Call | ast.Pass | type(old))
            after = ast.unparse(new) if simple else f"({ast.unparse(new)})"
            line = lines[at - 1]
            after = line[: old.col_offset] + after.encode() + line[old.end_col_offset :]
            near = b" ".join(lines[max(at - 12, 0) : at + 12]).decode()
            pinned = frozenset(re.findall(r"::(test_\w+)", near))
            before, after = line.decode(), after.decode()
            if ast.dump(old) != ast.dump(new):
                found[at, after] = Slip(kind, file, at, frozenset(used), pinned, before, after)
    return [*found.values()]


def planted(slip, text):
    """Return a file's text with the slip, or None if that is not a program."""
    lines = text.split("\n")
    lines[slip.line - 1] = slip.after
    with contextlib.suppress(SyntaxError):
        compile("\n".join(lines), slip.file, "exec")
        return "\n".join(lines)


def draw(texts, count, seed):
    """Draw slips of {file: text}: each kind with the same probability, one slip a line at most."""
    rng, kinds, drawn = random.Random(seed), defaultdict(list), {}
    for slip in itertools.chain(*(slips(text, file) for file, text in texts.items())):
        kinds[slip.kind].append(slip)
    while kinds and len(drawn) < count:
        kind = rng.choice(sorted(kinds))
        slip = kinds[kind].pop(rng.randrange(len(kinds[kind])))
        if (slip.file, slip.line) not in drawn and planted(slip, texts[slip.file]):
            drawn[slip.file, slip.line] = slip
        kinds = {name: left for name, left in kinds.items() if left}
    return [*drawn.values()]


# Which slips are caught --------------------------------------------------------------------------


def judges(slip, tests, seconds):
    """Return the tests that judge a slip, the likeliest first, with their recorded seconds."""
    of_file, pinned, chosen, total = defaultdict(list), [], {}, 0.0
    for test, (_, places) in sorted(tests.items(), key=lambda item: len(item[1][1])):
        if not places.isdisjoint(slip.places):
            of_file[test.split("::")[0]].append(test)
            if test.split("::")[1].split("[")[0] in slip.pinned:
                pinned.append(test)
    for test in [*pinned, *itertools.chain(*itertools.zip_longest(*of_file.values()))]:
        if test and test not in chosen and (not chosen or total + tests[test][0] <= seconds):
            chosen[test] = tests[test][0]
            total += chosen[test]
    return chosen


def run_tests(project, tests, seconds):
    """Return pytest's exit code, None if it takes longer, and what it printed.

    In a fork of this process, which finds torch and transformers in its memory.
    """
    with tempfile.TemporaryFile("w+") as out:
        pid = os.fork()
        if pid == 0:
            os.setsid()  # ranks that wait for each other are killed together
            for number in (1, 2):
                os.dup2(out.fileno(), number)
            sys.stdout = sys.stderr = os.fdopen(1, "w")
            os.chdir(project)
            here = Path(__file__).resolve().parent
            sys.path[:] = ["", *(path for path in sys.path if Path(path).resolve() != here)]
            code = pytest.main([*QUIET, "-x", *tests])
            sys.stdout.flush()
            os._exit(code)
        end, code = time.monotonic() + seconds, None
        while code is None and time.monotonic() < end:
            time.sleep(0.05)
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if code is None:
            os.waitpid(pid, 0)
        out.seek(0)
        return code, out.read()


def verdict(given):
    """Plant a slip in a copy, and return the test that catches it; None if no test does.

    given: (the slip, the project's folder, what `judges` returns).
    """
    slip, root, chosen = given
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        project = copied(root, f"{folder}/slip")
        (project / slip.file).write_text(planted(slip, (root / slip.file).read_text()))
        # Most slips are caught in ten seconds. A file's fixtures are made once in each part.
        totals = dict(zip(chosen, itertools.accumulate(chosen.values()), strict=True))
        first = {test for test in chosen if totals[test] <= 10}
        for part in (first, {*chosen} - first):
            while part:
                seconds = 120 + 10 * sum(map(chosen.get, part))
                code, out = run_tests(project, sorted(part), seconds)
                if code is None:
                    return "a test that did not end"
                if code == 0:
                    break
                found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out, re.M)
                test = found[1] if found else f"pytest's exit code {code}"
                # A test of chance or of time may fail without the slip, too. It is no judge then.
                if test not in part:  # a file that cannot be imported
                    return test
                clean = copied(root, f"{folder}/clean")
                if run_tests(clean, [test], seconds)[0] == 0:
                    return test
                part -= {test}


def main(argv, root=Path(__file__).resolve().parent.parent):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", help="modules to plant slips in; default: all")
    parser.add_argument("--count", type=int, default=60, help="how many slips")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=200, help="of tests for each slip")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="slips at a time")
    parser.add_argument("--record", action="store_true", help="record all tests again")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    texts = {f"{path.relative_to(root)}": path.read_text() for path in modules_of(root)}
    files = [f"{Path(file)}" for file in args.files] or [*texts]
    if {*files} - {*texts}:
        parser.error(f"expected some of {' '.join(texts)}, got {' '.join(files)}")

    folder = Path(tempfile.gettempdir(), "mutate-" + hashlib.sha256(bytes(root)).hexdigest()[:12])
    folder.mkdir(exist_ok=True)
    tests = record(root, folder, args.jobs, args.record)
    blocks = {f"{file}:{place}" for file in files for _, place in walk(ast.parse(texts[file]))}
    blocks -= {f"{file}:" for file in files}
    ran = len(blocks & set().union(*(places for _, places in tests.values())))
    print(f"tests run {ran} of {len(blocks)} blocks", flush=True)
    drawn = draw({file: texts[file] for file in files}, args.count, args.seed)

    for name in ("torch._dynamo", "torch.distributed.fsdp", "transformers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    survivors, given = [], [(slip, root, judges(slip, tests, args.seconds)) for slip in drawn]
    # Processes that fork have no threads, and may have children, unlike those of a Pool.
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        for (slip, _, chosen), caught in zip(given, pool.map(verdict, given), strict=True):
            print(f"{slip.file}:{slip.line} {slip.kind}: {caught or 'SURVIVED'}", flush=True)
            if not caught:
                ran = Counter(test.split("::")[0] for test in chosen).items()
                told = "passed: " + ", ".join(f"{count} of {file}" for file, count in ran)
                survivors.append((slip, told if chosen else "no test runs it"))
    for slip, told in survivors:
        print(f"\n{slip.file}:{slip.line}  {slip.kind}\n    - {slip.before.strip()}")
        print(f"    + {slip.after.strip()}\n    {told}")
    print(f"\n{len(drawn)} slips, {len(drawn) - len(survivors)} caught, seed {args.seed}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

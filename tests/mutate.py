"""Plant random slips of one line in a copy of the project, and list those that no test notices.

    python tests/mutate.py                      60 slips over all files
    python tests/mutate.py models.py --seed 1   other slips, in one file
    python tests/mutate.py --slow --count 200   the slow tests judge, too

A slip is a wrong sign, an offset by one, a skipped check: `slips_of` has the list. Texts, errors,
prints and type hints are left alone. The first call records which test runs which block of code.
It runs the suite once, in a copy in which every block reports itself, in forked ranks and commands
too. The record is kept in the temporary folder. A test file that has changed is recorded again, on
the next call. Code that has changed is not: `--record` begins anew.
Each slip is then judged by the tests that run its block, the most specific ones first, until their
recorded seconds reach --seconds. Exit code: 0 if every slip is caught, else 1.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# The slips ---------------------------------------------------------------------------------------

OTHER = {"min": "max", "amin": "amax", "any": "all", "floor": "ceil", "zeros": "ones", "sin": "cos"}
OTHER |= {"argmin": "argmax", "minimum": "maximum", "zeros_like": "ones_like"}
OTHER |= {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
OTHER |= {ast.Add: ast.Sub, ast.And: ast.Or}
OTHER |= {b: a for a, b in OTHER.items()}
DTYPES = {"float64": "float32", "float32": "bfloat16", "int64": "int32"}
FACTORS = {ast.Mult: "missing scale", ast.Div: "divisor", ast.Mod: "divisor"}
SAID = {"print", "warn", "write", "add_argument", "set_description"}  # calls whose words are texts
WORDS = {"help", "metavar", "description", "title", "file", "flush"}
ALONG = "sum mean cat stack split flatten unflatten transpose softmax cumsum gather amax logsumexp"
ALONG = {"dim", "axis", "amin", "narrow", "chunk", "squeeze", "unsqueeze", *ALONG.split()}


@dataclass(frozen=True)
class Slip:
    """One changed line of a file. place: the block of code, as `models.py:KVCache.keep:2`."""

    kind: str
    file: str
    line: int
    place: str
    before: str
    after: str


def walk(node, place="", counter=None, name=""):
    """Yield (node, place) for the code of a syntax tree; `Mask.slice:2` is a third block.

    Outside of functions a place is ''. Docstrings, type hints, decorators and what is said in
    errors and prints are left out.
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


def changed(node, **fields):
    """Return a copy of a syntax node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def without(items):
    return [items[:n] + items[n + 1 :] for n in range(len(items))]


def slips_of(node, siblings):
    """Yield (kind, a node to replace, the new node) for every slip that fits a syntax node.

    siblings: names that the same function binds and that a reader could take for this one.
    """
    op = type(getattr(node, "op", None))
    if op in OTHER:
        yield "and/or" if op in (ast.And, ast.Or) else "sign", node, changed(node, op=OTHER[op]())
    if op in FACTORS and isinstance(node, ast.BinOp):
        yield FACTORS[op], node, node.left
    if op is ast.FloorDiv and isinstance(node, ast.BinOp):  # rounded up
        low = changed(node, left=ast.UnaryOp(ast.USub(), node.left))
        yield "divisor", node, ast.UnaryOp(ast.USub(), low)
    if isinstance(node, ast.UnaryOp):
        yield "and/or" if op is ast.Not else "sign", node, node.operand
    if isinstance(node, ast.Compare):
        other = OTHER[type(node.ops[0])]()
        yield "comparison", node, changed(node, ops=[other, *node.ops[1:]])
    if isinstance(node, ast.IfExp):
        yield "condition", node, node.body
        yield "condition", node, node.orelse
    if isinstance(node, ast.If) and not node.orelse:
        yield "skipped check", node.test, ast.Constant(False)
    if isinstance(node, ast.AugAssign) or isinstance(node, ast.Expr) and called(node.value):
        yield "skipped statement", node, ast.Pass()
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "offset", node, ast.Constant(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is float:
        yield "bound", node, ast.Constant(node.value * 10)
    if isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load):
        for rest in without(node.elts) if len(node.elts) > 1 else ():
            yield "stale key", node, changed(node, elts=rest)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for name in siblings:
            yield "sibling", node, changed(node, id=name)
    for field in {"id", "attr"} & {*node._fields}:
        name = getattr(node, field)
        if name in OTHER or name in DTYPES:
            kind, new = ("min/max", OTHER[name]) if name in OTHER else ("dtype", DTYPES[name])
            yield kind, node, changed(node, **{field: new})
    if isinstance(node, ast.Call):
        yield from slips_of_call(node)


def slips_of_call(node):
    """Yield the slips of a call: its arguments, its keywords, and functions of known meaning."""
    name, args, keywords = called(node), node.args, node.keywords
    fixed = ast.Constant | ast.Starred
    for n, (a, b) in enumerate(itertools.pairwise(args)):
        if not isinstance(a, fixed) and not isinstance(b, fixed) and ast.dump(a) != ast.dump(b):
            yield "swapped argument", node, changed(node, args=[*args[:n], b, a, *args[n + 2 :]])
    for word, rest in zip(keywords, without(keywords)):
        if word.arg and word.arg not in WORDS:
            yield "dropped keyword", node, changed(node, keywords=rest)
        if word.arg in ("src", "dst"):
            yield "source rank", word.value, ast.Constant(0)
    if name in ("to", "double") and isinstance(node.func, ast.Attribute):
        yield "dtype", node, node.func.value
    if name in ("promote_types", "get_global_rank") and len(args) == 2:
        promotes = name == "promote_types"
        yield "dtype" if promotes else "source rank", node, args[0 if promotes else 1]
    if name == "where" and len(args) == 3:
        yield "mask", node, args[1]
    along = [x for x in args if name in ALONG] + [x.value for x in keywords if x.arg in ALONG]
    for x in along:
        with contextlib.suppress(ValueError):
            yield "axis", x, ast.Constant(0 if int(ast.unparse(x)) else 1)


def related(a, b):
    """Say whether a reader could take a name for another: one tensor suffix, or one stem."""
    (stem, _, suffix), (other_stem, _, other_suffix) = (x.rpartition("_") for x in (a, b))
    shaped = suffix == other_suffix != suffix.lower()
    return a != b and (shaped or stem and stem == other_stem or a.rstrip("012") == b.rstrip("012"))


def slips(text, file):
    """Return every slip of a file's text that fits in one line."""
    lines = text.encode().split(b"\n")
    found, names, nodes = {}, defaultdict(set), [*walk(ast.parse(text))]
    for node, place in nodes:  # the names that each function binds
        if isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store):
            names[place.split(":")[0]].add(getattr(node, "arg", getattr(node, "id", "")))
    for node, place in nodes:
        own = names[place.split(":")[0]] if isinstance(node, ast.Name) else ()
        alike = sorted(name for name in own if related(name, node.id))
        for kind, old, new in slips_of(node, alike):
            if old.lineno < old.end_lineno:
                continue
            simple = isinstance(new, ast.Name | ast.Constant | ast.Call | ast.Pass | type(old))
            after = ast.unparse(new) if simple else f"({ast.unparse(new)})"
            before = lines[old.lineno - 1]
            after = before[: old.col_offset] + after.encode() + before[old.end_col_offset :]
            slip = Slip(kind, file, old.lineno, f"{file}:{place}", before.decode(), after.decode())
            found[slip.line, slip.after] = slip
    return [*found.values()]


def planted(slip, text):
    """Return a file's text with the slip; None if it is not a program, or the same program."""
    lines = text.split("\n")
    lines[slip.line - 1] = slip.after
    with contextlib.suppress(SyntaxError):
        slipped = "\n".join(lines)
        return slipped if ast.dump(ast.parse(slipped)) != ast.dump(ast.parse(text)) else None


def draw(texts, count, seed):
    """Draw slips of {file: text}: each kind with the same probability, one slip a line at most."""
    rng, kinds, drawn = random.Random(seed), defaultdict(list), {}
    for file, text in texts.items():
        for slip in slips(text, file):
            kinds[slip.kind].append(slip)
    while kinds and len(drawn) < count:
        kind = rng.choice(sorted(kinds))
        slip = kinds[kind].pop(rng.randrange(len(kinds[kind])))
        if (slip.file, slip.line) not in drawn and planted(slip, texts[slip.file]):
            drawn[slip.file, slip.line] = slip
        kinds = {name: left for name, left in kinds.items() if left}
    return [*drawn.values()]


# Which tests run which block ---------------------------------------------------------------------

# Blocks report to this module. As a plugin of pytest it leaves the name of the test in a file, for
# the processes that the test starts or has a server fork.
PROBE = """
import os
FOLDER, WORKER, TEST, SEEN = {folder!r}, os.environ.get("PYTEST_XDIST_WORKER", "main"), None, set()

def note(*words):
    file = os.open(FOLDER + "/lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, "\\t".join([TEST, *words]).encode() + b"\\n")
    os.close(file)

def seen(place):
    global TEST
    if place not in SEEN:
        SEEN.add(place)
        if TEST is None and os.path.exists(FOLDER + "/" + WORKER):
            TEST = open(FOLDER + "/" + WORKER).read()
        if TEST is not None:
            note(place)

def begin(test=None):
    global TEST
    TEST = test
    SEEN.clear()

os.register_at_fork(after_in_child=begin)

def pytest_runtest_logstart(nodeid, location):
    begin(nodeid)
    open(FOLDER + "/" + WORKER, "w").write(nodeid)

def pytest_runtest_logreport(report):
    if WORKER != "main" or not hasattr(report, "node"):
        note(report.when + " " + report.outcome, str(report.duration))
"""


def instrumented(text, file, folder):
    """Return a file's text with a call of `seen` at the beginning of every block of a function."""
    lines, first = text.split("\n"), {}
    for node, place in walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            first.setdefault(place, node)
    for place, node in sorted(first.items(), key=lambda x: -x[1].lineno):
        at = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))]) - 1
        probe = f"_seen({f'{file}:{place}'!r})"
        if not place:  # the beginning of the file
            probe = f"import sys; sys.path.append({folder!r}); from probe import seen as _seen"
        lines.insert(at, " " * node.col_offset + probe)
    return "\n".join(lines)

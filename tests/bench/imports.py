"""Draw which file imports which, as text: `python tests/bench/imports.py`. Exit with 1 on a circle.

A line has the lines of a file, its name, and what it imports: only files on lines below its own.
A name that begins with a dot is a file of the folder: `.run.text`. Imports inside functions are
left out: what only a check needs, as that of parallel.py needs models.py, is not needed to use it.
"""

import ast
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("full/**/*.py"))]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}


def imported(path):
    """Return the modules of this project that a file imports."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & {*FILES}


def graph():
    """Return {module: the modules that it imports}, each module after all that import it."""
    needs = {name: imported(path) for name, path in FILES.items()}
    below = {}
    while len(below) < len(needs):
        ready = [name for name in needs if name not in below and needs[name] <= {*below}]
        if not ready:
            sys.exit(f"a circle among {', '.join({*needs} - {*below})}")
        below[ready[0]] = needs[ready[0]]
    return dict(reversed(below.items()))


if __name__ == "__main__":
    for name, needs in graph().items():
        lines = len(FILES[name].read_text().splitlines())
        line = f"{lines:5}  {name:20} {' '.join(sorted(needs)).replace('full.', '.')}"
        print(textwrap.fill(line, 112, subsequent_indent=" " * 28))

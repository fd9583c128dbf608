"""Draw which file imports which, as text: a file imports only files on lines below its own.

    python tests/bench/imports.py            # lines of each file, its name, and what it imports
    python tests/bench/imports.py copying    # the manual's table: what a copied file needs with it
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [*ROOT.glob("*.py"), *ROOT.glob("full/*.py")]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}


def imported(path):
    """Return the project's modules that a file imports: full.masks for `from full import masks`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return sorted(names & {*FILES} - {"full"})


def ordered(needs):
    """Return the modules in an order in which each is imported only by modules before it."""
    found = []
    while len(found) < len(needs):
        ready = [name for name in sorted(needs) if name not in found and {*needs[name]} <= {*found}]
        if not ready:
            sys.exit(f"a circle among {', '.join({*needs} - {*found})}")
        found += ready
    return found[::-1]


def all_below(name, needs):
    """Return all modules that a module imports, directly or through others."""
    return set(needs[name]).union(*(all_below(below, needs) for below in needs[name]))


def main(argv):
    """Print the graph, or the table."""
    needs = {name: imported(path) for name, path in FILES.items() if name != "full"}
    for name in ordered(needs):
        if argv == ["copying"]:
            below = [file for file in ordered(needs) if file in all_below(name, needs)]
            print(f"| `{name}` | {' '.join(below)} |")
        else:
            lines = FILES[name].read_text().count("\n")
            print(f"{lines:5} {name:20} {' '.join(needs[name])}")


if __name__ == "__main__":
    main(sys.argv[1:])

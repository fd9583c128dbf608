"""What the README says of copying: files that are alone check themselves, functions are whole."""

import ast
import re
import shutil

import pytest
from conftest import ROOT, slow
from pages import FIVE
from test_ranks import as_script
from test_readme import ERROR_BOUND, README

SECTION = " ".join(README.text.split("## Copying")[1].split("\n## ")[0].split())
NEEDED = {"parallel": ["models"]}  # what the check of a file imports
CLAUSES = SECTION.split("To copy one function, take ")[1].split(";")
NEEDS = {}  # function -> what to copy with it
for functions, _, needs in (clause.partition(" with ") for clause in CLAUSES):
    NEEDS |= {name: re.findall(r"`(\w+)`", needs) for name in re.findall(r"`(\w+)`", functions)}


# Plans that have each mechanism of parallel.py, in a third of the ranks of its own list.
FEWER = """PLANS = {
    2: ("t2", "d2 fsdp"),
    4: ("d2t2e2 sp", "p2t2 sp", "p4", "c2d2e2"),
}
"""
CHECKED = [(name, "") for name in ("models", "ring_attention", "tree_attention")]
CHECKED += [("parallel", FEWER), *slow(("parallel", ""))]


@pytest.mark.parametrize("name, plans", CHECKED)
def test_a_file_alone_checks_itself_or_says_what_its_check_needs(name, plans, tmp_path):
    text = (ROOT / f"{name}.py").read_text()
    (tmp_path / f"{name}.py").write_text(
        re.sub(r"^PLANS = .*?^}\n", plans, text, flags=re.M | re.S) if plans else text)
    code, out, err = as_script(f"{name}.py", cwd=tmp_path)
    if name in NEEDED:
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert all(other in err for other in NEEDED[name]), err
        for other in NEEDED[name]:
            shutil.copy(ROOT / f"{other}.py", tmp_path)
        code, out, err = as_script(f"{name}.py", cwd=tmp_path)
    assert code == 0 and out.count("\n") == 1, err
    assert 0 < float(out.split()[-1]) < ERROR_BOUND  # a machine rounds as it likes


def definitions_of(name):
    """Return {name: its syntax node} of what a file defines at its top level."""
    found = {}
    for node in ast.parse((ROOT / f"{name}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.Assign):
            names = [x.id for x in ast.walk(node.targets[0]) if isinstance(x, ast.Name)]
            found |= dict.fromkeys(names, node)
    return found


def needed(name, definitions):
    """Return the names of its file that a function uses, directly or through others."""
    found, waiting = {name}, [name]
    while waiting:
        nodes = ast.walk(definitions[waiting.pop()])
        used = {x.id for x in nodes if isinstance(x, ast.Name) and x.id in definitions}
        waiting += used - found
        found |= used
    return found - {name}


@pytest.mark.quick
@pytest.mark.parametrize("name", NEEDS)
def test_a_function_needs_what_the_page_says_and_nothing_else(name):
    (definitions,) = [found for found in map(definitions_of, FIVE) if name in found]
    assert needed(name, definitions) == {*NEEDS[name]}


@pytest.mark.quick
def test_the_page_has_what_people_copy_most():
    assert {"merge", "sample", "run_1f1b", "clip_grad_norm", "grpo_loss"} <= {*NEEDS}

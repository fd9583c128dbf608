"""The rules of the house that a program can check: files, imports, sizes, pinned tests."""

import ast
import functools
import re
import subprocess
import sys

import pytest
from blocks import ignored
from conftest import ROOT

pytestmark = pytest.mark.quick
IMPORTS = {"models": set(), "parallel": {"models"}, "ring_attention": set()}
IMPORTS |= {"tree_attention": set()}
IMPORTS |= {"train_grpo": {*IMPORTS}}
FIVE = [ROOT / f"{name}.py" for name in IMPORTS]
FOLDER = sorted(ROOT.glob("full/*.py"))
MODULES = FIVE + FOLDER
EVERY = MODULES + sorted(ROOT.glob("tests/**/*.py")) + sorted(ROOT.glob("conformance/**/*.py"))
TAG = r"# .*(NUMERICS|COMM|DEVIATES):|Pinned"
TOP = {*(path.name for path in FIVE), "full", "README.md", "requirements.txt", "tests", ".ci"}
TOP |= {"conformance"}
NOT_RUN = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
MOST_LINES = {"ring_attention": 443, "tree_attention": 452, "models": 795, "parallel": 716}
MOST_LINES |= {"train_grpo": 806}
MOST_LINES_OF_FOLDER = 900
OPTIONAL = {"fcntl", "jinja2", "matplotlib", "resource", "safetensors", "tensorboard"}
OPTIONAL |= {"tokenizers", "torch", "transformers"}  # of torch what takes seconds to import
IN_THE_MODULES = {
    "float64 becomes float32": r"\.float\(\)",
    "masked is -math.inf": r"nan_to_num|finfo\(.*\)\.min|-1e\+?([4-9]|\d\d)|float\(['\"]-",
    "runs code": r"(?<![.\w])(eval|exec)\(|pickle\.load"
    r"|torch\.load\((?!.*weights_only=True|file, weights_only=False\) for)",  # of launch's ranks
    "hides what it caught": r"except:",
}
IN_THE_FOLDER = {  # a run's files are the same wherever it runs
    "text in the locale's encoding": r"(read|write)_text\((?!.*encoding=\"utf-8\")"
    r"|\bopen\(\"[awr]\"\)",
}
ANYWHERE = {
    "to be done": r"TOD[O]|FIXM[E]|XX[X]",
    "a path of one machine": r"['\"\s=(`]/(tmp|home|root|usr|work|mnt)\b",
    "over 100 columns": r".{101}",
}


@functools.cache
def tree_of(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def imported(node):
    """The names of the modules that a syntax node imports."""
    if isinstance(node, ast.ImportFrom):
        of_folder = [f"full.{x.name}" for x in node.names] if node.module == "full" else []
        return of_folder or [node.module]
    return [x.name for x in node.names] if isinstance(node, ast.Import) else []


each_module = pytest.mark.parametrize("path", MODULES, ids=lambda x: f"{x.relative_to(ROOT)}")
each_of_five = pytest.mark.parametrize("path", FIVE, ids=lambda x: x.stem)


@pytest.mark.parametrize("rules, files", [
    (IN_THE_MODULES, MODULES), (IN_THE_FOLDER, FOLDER), (ANYWHERE, EVERY)])
def test_no_line_breaks_a_rule(rules, files):
    lines = [(f"{x.name}:{n}", line) for x in files for n, line in enumerate(x.open(), 1)]
    assert not [(at, why) for at, line in lines for why in rules if re.search(rules[why], line)]


def test_nothing_else_stands_at_the_top():
    names = {path.name for path in ROOT.iterdir()} - ignored(ROOT)
    if (ROOT / ".git").exists():  # what is not committed is nobody's
        files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")
        names = {file.split("/")[0] for file in files if file}
    assert names - {"LICENSE", ".gitignore", "assets"} == TOP


def is_last(node):
    """Whether a statement is the last of a program."""
    program = r"if __name__ == '__main__':\n    (sys\.exit\()?main\(sys\.argv\[1:\]\)\)?"
    return re.fullmatch(program, ast.unparse(node))


@each_module
def test_nothing_runs_on_import(path):
    for top in tree_of(path).body[1:]:
        if path.name == "__main__.py" and isinstance(top, ast.If):
            continue  # a program, and where it is to be started
        constant = isinstance(top, ast.Assign) and isinstance(top.targets[0], ast.Name | ast.Tuple)
        constant &= not re.search(r"print\(|\.set_|manual_seed|environ", ast.unparse(top))
        assert constant or is_last(top) or isinstance(top, NOT_RUN), ast.unparse(top)


@each_of_five
def test_the_five_import_each_other_as_the_design_says_and_never_the_folder(path):
    names = {name for x in ast.walk(tree_of(path)) for name in imported(x)}
    assert names & {*IMPORTS} <= IMPORTS[path.stem]
    assert not [name for name in names if name.split(".")[0] == "full"]
    assert is_last(tree_of(path).body[-1])


def test_imports_of_the_folder_go_downwards():
    """There is an order in which each file imports only files before it."""
    needs = {}
    for path in FOLDER:
        names = {name for x in ast.walk(tree_of(path)) for name in imported(x)}
        needs[f"full.{path.stem}"] = {name for name in names if name.startswith("full.")}
    while needs:
        ready = [name for name, below in needs.items() if not below & {*needs}]
        assert ready, f"a circle: {needs}"
        for name in ready:
            del needs[name]


@each_module
def test_only_optional_packages_are_imported_inside_a_function(path):
    for top in tree_of(path).body:
        if not isinstance(top, ast.Import | ast.ImportFrom):
            names = {name.split(".")[0] for x in ast.walk(top) for name in imported(x)}
            if getattr(top, "name", "") == "check_model":  # the rest of parallel.py works alone
                names -= {"models"}
            assert not names - OPTIONAL - {*sys.builtin_module_names}, names
        elif path.stem == "parallel":
            assert "models" not in imported(top)


@each_module
def test_every_tag_ends_in_a_test_that_exists(path):
    """In the five a tag is one line, and what argues for it and pins it is in the folder."""
    named = [(file, x.name) for file in EVERY for x in tree_of(file).body if hasattr(x, "name")]
    tests = {f"{file.relative_to(ROOT)}::{name}" for file, name in named}
    if path in FIVE:
        assert not re.findall(rf"(?:{TAG}).*[^.]\n", path.read_text()), "a tag goes on"
        return
    for block in re.sub(r"\n *# ", " # ", path.read_text()).split("\n"):
        tagged, comment = re.search(TAG, block), block.replace(" # ", " ")
        assert {*re.findall(r"Pinned by (\S+)\.(?!py)", comment)} <= tests, comment
        ending = r"Pinned by tests/(full/)?\w+\.py::test_\w+\.$"
        assert not tagged or re.search(ending, comment), comment


@pytest.mark.parametrize("path", [*FIVE, ROOT / "conformance/definition.py"], ids=lambda x: x.stem)
def test_every_equation_of_a_docstring_has_a_line_of_code(path):
    """In a docstring an equation begins a line as (n); the line that computes it names (n)."""
    numbered = set(re.findall(r"^ +\((\d+)\)", ast.get_docstring(tree_of(path), clean=False), re.M))
    comments = re.findall(r"#.*", path.read_text())
    named = {number for text in comments for number in re.findall(r"\((\d+)\)", text)}
    assert numbered and numbered <= named, sorted(numbered - named)


@each_module
def test_a_file_is_short_and_begins_with_what_it_is_for(path):
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES.get(path.stem, MOST_LINES_OF_FOLDER)
    first = ast.get_docstring(tree_of(path)).split("\n")[0]
    assert first.endswith(".")
    if path in FIVE:
        functions = [x for x in ast.walk(tree_of(path)) if isinstance(x, NOT_RUN)]
        first = min(x.lineno for x in functions if not isinstance(x, ast.Import | ast.ImportFrom))
        imports = [x for x in functions if isinstance(x, ast.Import | ast.ImportFrom)]
        assert imports[0].lineno <= 33 and first < 60


@each_of_five
def test_functions_take_few_arguments(path):
    for x in ast.walk(tree_of(path)):
        if isinstance(x, ast.FunctionDef):
            names = [y.arg for y in x.args.posonlyargs + x.args.args + x.args.kwonlyargs]
            assert len({*names} - {"self"}) <= 8, x.name


@each_module
def test_no_top_level_name_is_bound_twice(path):
    names = []
    for x in tree_of(path).body:
        names += [x.name] if hasattr(x, "name") else []
        targets = x.targets if isinstance(x, ast.Assign) else []
        names += [y.id for y in targets if isinstance(y, ast.Name)]
    assert len(names) == len({*names}), sorted({x for x in names if names.count(x) > 1})


SENDS = (
    r"dist\.(all_|reduce_scatter|broadcast|send|recv|batch_|barrier|new_)|\.full_tensor\("
    r"|weights\.broadcast\("
)
SENDERS = "plans places parallelize pipeline optimizer packing weights ranks checkpoint"


@pytest.mark.parametrize("name", SENDERS.split())
def test_every_message_of_a_plan_has_its_note(name):
    """As the manual says: `grep COMM` lists every message between ranks."""
    path = ROOT / "full" / f"{name}.py"
    lines = path.read_text().split("\n")
    methods = [x for top in tree_of(path).body if isinstance(top, ast.ClassDef) for x in top.body]
    functions = [x for x in [*tree_of(path).body, *methods] if isinstance(x, ast.FunctionDef)]
    for x in functions:
        source = "\n".join(lines[x.lineno - 1 : x.end_lineno])
        if re.search(SENDS, source):
            assert "COMM: " in source, x.name

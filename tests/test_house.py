"""The rules of the house that a program can check: lines, imports, sizes, tags, equations."""

import ast
import functools
import re
import tokenize

import pytest
from conftest import ROOT

pytestmark = pytest.mark.quick
IMPORTS = {"models": set(), "parallel": {"models", "ring_attention"}, "ring_attention": set()}
IMPORTS |= {"tree_attention": set()}
IMPORTS |= {"train_grpo": {*IMPORTS}}
FIVE = [ROOT / f"{name}.py" for name in IMPORTS]
FOLDER = sorted(ROOT.glob("full/**/*.py"))
MODULES = FIVE + FOLDER
EVERY = MODULES + sorted(ROOT.glob("tests/**/*.py")) + sorted(ROOT.glob("conformance/**/*.py"))
TAG = r"# .*(NUMERICS|COMM|DEVIATES):|Pinned"
MOST_LINES = {"ring_attention": 480, "tree_attention": 480, "models": 800, "parallel": 748}
MOST_LINES |= {"train_grpo": 780}
MOST_LINES_OF_FOLDER = 900
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
    "a method replaced on an object": r"^ +(?!self\.)\w+(\.\w+)*\.(forward|hidden|logits|__class__)"
    r" = (?!functools\.partial\(checkpoint)",  # recomputation, as in parallel.py
}
# The rooms of the folder. Each imports of those before it, and the commands beside them of all.
ROOMS = "ranks", "attention", "model", "tree", "learn", "run", "audit"
# Only what a person who types a command reads from knows a word of the command line.
BELOW = [path for path in FOLDER if path.parent.name in ROOMS[:5]]
IN_FILES_BELOW = {
    "a word of the command line": r"(?<!torchrun )(?<!-)--(?!enable-|hf-overrides|logprobs-mode"
    r"|model-path)[a-z]",  # of engines
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


def imported(path):
    """The names of all modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
        names |= {x.name for x in node.names} if isinstance(node, ast.Import) else set()
    return names


each_module = pytest.mark.parametrize("path", MODULES, ids=lambda x: f"{x.relative_to(ROOT)}")


@pytest.mark.parametrize("rules, files", [
    (IN_THE_MODULES, MODULES), (IN_THE_FOLDER, FOLDER), (IN_FILES_BELOW, BELOW),
    (ANYWHERE, EVERY)])  # fmt: skip
def test_no_line_breaks_a_rule(rules, files):
    lines = [(f"{x.name}:{n}", line) for x in files for n, line in enumerate(x.open(), 1)]
    assert not [(at, why) for at, line in lines for why in rules if re.search(rules[why], line)]


def module_of(path):
    """The name by which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_go_down_and_the_five_know_nothing_of_the_folder():
    """Those inside functions too, and from room to room."""
    needs = {module_of(path): imported(path) for path in FOLDER}
    while needs:
        ready = [name for name, below in needs.items() if not below & {*needs}]
        assert ready, f"a circle: {needs}"
        for name in ready:
            del needs[name]
    for path in FOLDER:
        room = path.parent.name
        above = ROOMS[ROOMS.index(room) + 1 :] if room in ROOMS else ()
        rooms = {".".join(name.split(".")[:2]) for name in imported(path)}
        assert not rooms & {f"full.{name}" for name in above}, path
        commands = {module_of(x) for x in FOLDER if x.parent.name == "full"} - {"full"}
        assert room == "full" or not rooms & commands, path
    for path in FIVE:
        assert imported(path) & {*IMPORTS} <= IMPORTS[path.stem]
        assert not [name for name in imported(path) if name.split(".")[0] == "full"]


@functools.cache
def names_in_files():
    """FILE::NAME of whatever a file defines at its top level."""
    named = [(file, x.name) for file in EVERY for x in tree_of(file).body if hasattr(x, "name")]
    return {f"{file.relative_to(ROOT)}::{name}" for file, name in named}


@each_module
def test_every_tag_ends_in_a_test_that_exists(path):
    """In the five a tag is one line, and what argues for it and pins it is in the folder."""
    tests = names_in_files()
    if path in FIVE:
        assert not re.findall(rf"(?:{TAG}).*[^.]\n", path.read_text()), "a tag goes on"
        return
    for block in re.sub(r"\n *# ", " # ", path.read_text()).split("\n"):
        tagged, comment = re.search(TAG, block), block.replace(" # ", " ")
        assert {*re.findall(r"Pinned by (\S+)\.(?!py)", comment)} <= tests, comment
        ending = r"Pinned by tests/(full/)?\w+\.py::test_\w+\.$"
        assert not tagged or re.search(ending, comment), comment


def words_of(tree):
    """The names that code has, and the words of its texts."""
    words = set()
    for node in ast.walk(tree):
        words |= {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")}
        if isinstance(node, ast.Constant) and "\n" not in f"{node.value}":
            words |= {*re.findall(r"\w+", f"{node.value}")}
    return {word.split(".")[-1] for word in words if isinstance(word, str)}


@functools.cache
def names_of_owners():
    """{module or class: the names that it has}. Of two modules of one name, those of both."""
    owners = {}
    for path in MODULES:
        top = owners.setdefault(path.stem, set())
        for x in tree_of(path).body:
            top |= {y.asname or y.name for y in getattr(x, "names", ())} | {getattr(x, "name", "")}
            top |= {y.id for y in ast.walk(x) if isinstance(y, ast.Name) and hasattr(x, "value")}
            if isinstance(x, ast.ClassDef):
                owners.setdefault(x.name, set()).update(words_of(x))
    return owners


def prose_of(path):
    """The docstrings of a file, and its blocks of comments, each in one line."""
    owners = [x for x in ast.walk(tree_of(path))
              if isinstance(x, ast.Module | ast.ClassDef | ast.FunctionDef)]  # fmt: skip
    found = [ast.get_docstring(x) or "" for x in owners]
    with path.open("rb") as file:
        tokens = [x for x in tokenize.tokenize(file.readline) if x.type != tokenize.NL]
    for before, token in zip(tokens, tokens[1:]):
        if token.type == tokenize.COMMENT:
            found += [] if before.type == tokenize.COMMENT else [""]
            found[-1] += token.string.removeprefix("#")
    return [" ".join(text.split()) for text in found]


@functools.cache
def words_of_files():
    """{FILE.py: its words}, and the words of all files."""
    files = {f"{x.stem}.py": words_of(tree_of(x)) for x in reversed(MODULES)}
    return files, {"py"}.union(*files.values(), (x.stem for x in MODULES))


@each_module
def test_every_name_in_backticks_is_there(path):
    """`name`, `module.name` or `Class.name`; `name` of FILE.py is in this file."""
    files, every = words_of_files()
    name = r"`(?:(\w+)\.)?(?:\w+\.)*([A-Za-z_]\w*)(?:\([^`]*\))?`(?: (?:of|in) (\w+\.py))?"
    missing = [
        f"{owner}.{last} {file}" for text in prose_of(path)
        for owner, last, file in re.findall(name, text)
        if last not in files.get(file, every) & names_of_owners().get(owner, every) | {"py"}
    ]  # fmt: skip
    assert not missing


@pytest.mark.parametrize("path", [*FIVE, ROOT / "conformance/definition.py"], ids=lambda x: x.stem)
def test_every_equation_of_a_docstring_has_a_line_of_code(path):
    """In a docstring an equation begins a line as (n); the line that computes it names (n)."""
    numbered = set(re.findall(r"^ +\((\d+)\)", ast.get_docstring(tree_of(path), clean=False), re.M))
    comments = re.findall(r"#.*", path.read_text())
    named = {number for text in comments for number in re.findall(r"\((\d+)\)", text)}
    assert numbered and numbered <= named, sorted(numbered - named)


@each_module
def test_a_file_is_short_and_its_functions_take_few_arguments(path):
    assert path.read_text().count("\n") <= MOST_LINES.get(path.stem, MOST_LINES_OF_FOLDER)
    for x in ast.walk(tree_of(path)) if path in FIVE else ():
        if isinstance(x, ast.FunctionDef):
            names = [y.arg for y in x.args.posonlyargs + x.args.args + x.args.kwonlyargs]
            assert len({*names} - {"self"}) <= 8, x.name


def test_no_top_level_name_is_bound_twice():
    """The second of two tests of one name would hide the first."""
    for path in EVERY:
        names = [x.name for x in tree_of(path).body if hasattr(x, "name")]
        assert len(names) == len({*names}), (path, {x for x in names if names.count(x) > 1})


SENDS = (
    r"dist\.(all_|reduce_scatter|broadcast|send|recv|batch_|barrier|new_)|\.full_tensor\("
    r"|weights\.broadcast\("
)
SENDERS = """ranks/plans ranks/places ranks/joining ranks/optimizer ranks/checkpoint
    model/parallelize learn/packing"""


@pytest.mark.parametrize("name", SENDERS.split())
def test_every_message_of_a_plan_has_its_note(name):
    """As the manual says: `grep COMM` lists every message between ranks."""
    path = ROOT / "full" / f"{name}.py"
    lines = path.read_text().split("\n")
    methods = [x for top in tree_of(path).body if isinstance(top, ast.ClassDef) for x in top.body]
    for x in [*tree_of(path).body, *methods]:
        source = "\n".join(lines[x.lineno - 1 : x.end_lineno])
        if isinstance(x, ast.FunctionDef) and re.search(SENDS, source):
            assert "COMM: " in source, x.name

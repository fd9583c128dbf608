"""What a page says, for test_readme.py and test_manual.py: its commands, code and names."""

import ast
import re

from conftest import ROOT

FIVE = ("train_grpo", "models", "parallel", "ring_attention", "tree_attention")
STARTS = r"(python3?|pip|torchrun|grep|sh) "  # a name in backticks that begins so is a command
INSTALLED = {  # a command, and the line of tests/requirements.txt that replaces it
    "pip install transformers": "\ntransformers>=",
    "pip install trl": "\ntrl>=",
}


class Page:
    """One file of Markdown or several.

    blocks: (language, text) of each block. spans: what stands in backticks. commands: the lines of
    blocks without a language, and the spans that are commands; parts that && joins are several.
    """

    def __init__(self, *files):
        self.text = "\n".join((ROOT / file).read_text() for file in files)
        self.blocks = re.findall(r"^```(\w*)\n(.*?)^```$", self.text, flags=re.S | re.M)
        self.prose = re.sub(r"^```.*?^```$", "", self.text, flags=re.S | re.M)
        self.spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.prose)]
        texts = [text for language, text in self.blocks if not language]
        texts += [span for span in self.spans if re.match(STARTS, span)]
        self.commands = {command for text in texts for command in commands_of(text)}

    def code(self, language):
        """Return the blocks of a language, in order."""
        return [text for name, text in self.blocks if name == language]


def lines_of(block):
    """Return the lines of a block of shell commands, those that end in a backslash joined."""
    return [" ".join(line.split()) for line in block.replace("\\\n", "").splitlines()]


def commands_of(block):
    """Return the commands of a block: its lines, those that && joins one by one."""
    return [command for line in lines_of(block) for command in line.split(" && ")]


def require_whole_table(commands, table):
    """A table has every command of a page, and each test that it names exists.

    table: {command: FILE::NAME of a test, tests/test_FILE.py::test_NAME, or more flags for it}.
    What CI runs, and what its environment has, needs no test.
    """
    by_ci = {command for command in commands if command.startswith("python -m pytest")}
    by_ci |= {*INSTALLED} | commands_of_ci()
    assert commands - by_ci == {*table} - by_ci
    for file, name in {tuple(how.split("::")) for how in table.values() if "::" in how}:
        (path,) = ROOT.glob(f"tests/**/test_{file}.py")
        assert re.search(rf"^def test_{name}\(", path.read_text(), re.M), (file, name)
    for path in re.findall(r"\btests/[\w/]+\.(?:py|sh)", " ".join(commands)):
        assert (ROOT / path).exists(), path

    installed = (ROOT / "tests/requirements.txt").read_text()
    assert [x for x in commands & {*INSTALLED} if INSTALLED[x] not in installed] == []


def commands_of_ci():
    """Return the commands that .ci/run takes from the README: those of its first two blocks."""
    blocks = [text for language, text in Page("README.md").blocks if not language]
    return {command for text in blocks[:2] for command in commands_of(text)}


def require_names_exist(page, folder, elsewhere):
    """What a page has in backticks is a file, a test or a name of the code; its links lead on.

    folder: where the page lies. elsewhere: names that other programs define.
    """
    paths = [*ROOT.glob("*.py"), *ROOT.glob("full/*.py"), ROOT / "tests" / "example_tasks.py"]
    code = "\n".join(path.read_text() for path in paths)
    tests = "\n".join(path.read_text() for path in sorted(ROOT.glob("tests/**/test_*.py")))
    for span in page.spans:
        if span in elsewhere:
            continue
        if re.match(r"(tests|assets|full|conformance|\.ci)/|\w+\.py$", span) and "*" not in span:
            assert (ROOT / span.split("::")[0]).exists(), span
        elif re.match(r"test_\w+$", span):
            assert re.search(rf"^def {span}\(", tests, re.M), span
        elif re.match(r"[A-Za-z_][\w./]*(\(.*\))?$", span):
            name = re.match(r"[\w./]*", span)[0].split(".")[-1]
            assert re.search(rf"\b{name}\b", code), span
    for link in re.findall(r"\]\(([^):]+)\)", page.prose):
        assert (folder / link).exists(), link


def letters_of(name):
    """Return the capital letters of shapes in the names of a file: B, H, S and D of q_BHSD."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        name = getattr(node, "id", getattr(node, "arg", getattr(node, "attr", None)))
        suffix = re.match(r"[a-z]\w*_([A-Za-z0-9]*[A-Z][A-Za-z0-9]*)$", name or "")
        found |= {letter for letter in suffix[1] if letter.isupper()} if suffix else set()
    return found

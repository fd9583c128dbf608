"""The README's table of what one copies: each function with what the table says it needs, and run.

A script gets the imports of the file, the functions of one row, the pieces that the row asks for,
and nothing else. Names that it lacks are found without running it; then it runs, in float64, and
gives the bits of the file's own functions, which other tests hold against oracles.
"""

import ast
import functools
import importlib
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from test_house import unbound_names
from torch.utils._pytree import tree_leaves

from full.check import tiny_model

FILES = ("ring_attention.py", "models.py", "tree_attention.py", "parallel.py", "train_grpo.py")
SIBLINGS = {file.removesuffix(".py") for file in FILES}


def rows_of_table():
    """[(functions, what they need, as the README says it)] of the table whose head says "needs"."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "README.md").read_text(), re.M):
        head, _, *lines = table.splitlines()
        if "needs" in head:
            cells = [line.strip("| ").split(" | ", 1) for line in lines]
            rows += [(re.findall(r"`(\w+)`", functions), needs) for functions, needs in cells]
    return rows


ROWS = rows_of_table()


class Source:
    """A file: its imports from outside, where each definition stands, and in which section."""

    def __init__(self, file):
        self.lines = (ROOT / file).read_text().splitlines()
        self.imports = []  # (statement, the names that it makes)
        self.span = {}  # name -> first and last line
        for node in ast.parse("\n".join(self.lines)).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                made = {(x.asname or x.name).split(".")[0] for x in node.names}
                if not SIBLINGS & {getattr(node, "module", None), *(x.name for x in node.names)}:
                    self.imports.append((ast.unparse(node), made))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                self.span[node.name] = first, node.end_lineno
            elif isinstance(node, ast.Assign):
                names = [x.id for x in ast.walk(node.targets[0]) if isinstance(x, ast.Name)]
                self.span |= dict.fromkeys(names, (node.lineno, node.end_lineno))

    def section_of(self, name):
        rulers = [re.match(r"# (?:Appendix )?(\w+)\. .*-----$", x) for x in self.lines]
        above = [found[1] for found in rulers[: self.span[name][0]] if found]
        return above[-1] if above else None

    def needed(self, text):
        """The names that a cell of the table asks for: in backticks, or by their section."""
        if "take the file" in text:
            return set(self.span)
        listed = re.findall(r"[Ss]ections? (\w+(?:(?:, | and )\w+)*)", text)
        sections = set(re.findall(r"\w+", " ".join(listed))) - {"and"}
        by_section = {name for name in self.span if sections and self.section_of(name) in sections}
        return by_section | set(re.findall(r"`(\w+)`", text)) & set(self.span)

    def script(self, names):
        """A script of these definitions, in the order of the file, after the imports they use."""
        spans = sorted({self.span[name] for name in names})
        pieces = "\n\n".join("\n".join(self.lines[a - 1 : b]) for a, b in spans)
        used = unbound_names(pieces)
        return "\n".join([text for text, made in self.imports if made & used] + [pieces])


@functools.cache
def source_of(function):
    """The one file that defines a function, as (module, Source)."""
    defined = re.compile(rf"^(?:def|class) {function}\b", re.M)
    (file,) = [file for file in FILES if defined.search((ROOT / file).read_text())]
    return importlib.import_module(file.removesuffix(".py")), Source(file)


def names_left_out(script):
    return unbound_names(script) - {"__file__", "ring"}  # ring_attention, imported as ring


# Runs --------------------------------------------------------------------------------------------

LOSS = "sampler_BT", "ref_BT", "entropy_BT", "value_BT", "old_value_BT", "return_BT"
PATHS = [[(6, 0, 2), (9, i, 1)] for i in (0, 1)] + [[(6, 2, 2), (9, i, 1)] for i in (2, 3)]


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def run_generate(generate):
    """Greedy and drawn answers, to a prompt that two rows share and to one of another length."""
    model, prompts = tiny_model("gemma3_text"), [[1, 2, 3, 4, 5], [7, 8], [1, 2, 3, 4, 5]]
    ways = dict(temperature=0), dict(temperature=1.0, seed=3)
    rows = [row for way in ways for row in generate(model, prompts, max_new_tokens=6, **way)]
    return [(row.tokens, row.logprobs) for row in rows]


def run_TokenTrie(TokenTrie):
    trie = TokenTrie([[5, 6, 7], [5, 6, 8], [5, 9], [5, 6, 7], [5], [2]])
    found = trie.tokens, trie.positions, trie.parent, trie.subtree_end, *map(trie.path, range(6))
    return *found, trie.stats().tree_tokens


def run_clip_grad_norm(clip_grad_norm):
    model = torch.nn.Linear(3, 4)
    model(torch.ones(2, 3)).sum().backward()
    return clip_grad_norm(model, 0.5), [p.grad for p in model.parameters()]


RUNS = {
    "merge": lambda f: f(randn(3, 5, 2), randn(3, 5), randn(3, 5, 2), randn(3, 5)),
    "grpo_loss": lambda f: f(
        *randn(3, 3, 4), randn(3, 4) > 0, importance_cap=1.1, kl_coef=0.1, entropy_coef=0.02,
        **dict(zip(LOSS, randn(6, 3, 4)))),
    "token_logprobs": lambda f: f(
        randn(7, 5), randn(11, 5), torch.arange(7), temperature=0.7, softcap=3.0, chunk=3),
    "advantages": lambda f: f(np.array([1.0, 0.0, 0.0, 0.25]), "leave_one_out"),
    "gae": lambda f: f(np.arange(4.0), np.ones(4), np.array([True, True, False, True]), 0.8),
    "branch_advantages": lambda f: f(np.array([1.0, 0.0, 0.25, 0.25]), PATHS),
    "generate": run_generate, "TokenTrie": run_TokenTrie, "clip_grad_norm": run_clip_grad_norm,
}  # fmt: skip


def result_of(name, function):
    torch.manual_seed(0)
    leaves = tree_leaves(RUNS[name](function))
    return [x.detach().numpy() if torch.is_tensor(x) else np.asarray(x) for x in leaves]


@pytest.mark.quick
def test_the_table_has_what_people_copy_most():
    assert {*RUNS, "KVCache"} <= {name for functions, _ in ROWS for name in functions}


@pytest.mark.parametrize("functions, needs", ROWS, ids=[functions[0] for functions, _ in ROWS])
def test_a_row_of_the_table_runs_by_itself(functions, needs):
    own, source = source_of(functions[0])
    names = source.needed(needs) | {*functions}
    missing = names_left_out(source.script(names))
    assert not missing, f"{functions}: the table leaves out {sorted(missing)}"

    # What the table names one by one must be needed by something else in the script.
    for name in set(re.findall(r"`(\w+)`", needs)) & set(source.span) - {*functions}:
        without = source.script(names - {name})
        assert name in names_left_out(without), f"{functions} do not need {name}"

    copied = {"__name__": "copied"}
    exec(compile(source.script(names), "copied", "exec"), copied)
    for name in {*functions} & {*RUNS}:
        found = result_of(name, copied[name])
        np.testing.assert_equal(found, result_of(name, getattr(own, name)))
        assert any(np.any(x) for x in found)

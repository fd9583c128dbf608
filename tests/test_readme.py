"""README.md: its commands run, its names exist, its code and its numbers are those of the files."""

import ast
import inspect
import re
import shutil
import subprocess

import pytest
from conftest import ROOT
from pages import FIVE, Page, letters_of, require_names_exist, require_whole_table
from test_cores import copy_the_five
from test_ranks import as_script

import train_grpo

README = Page("README.md")
BLOCKS = [text for language, text in README.blocks if not language]
LOOP, ADAPTER, TASK = README.code("python")
ERROR_BOUND = float(re.search(r"the largest error, below (1e-\d+)\.", README.text)[1])
RUN = "torchrun --nproc-per-node 2 train_grpo.py"
KITS = "step_kit::the_first_use_of_the_readme_runs_as_written"
SMOLLM = "smollm::the_commands_of_the_pages_run"
TABLE = {
    RUN: "cut_system::guess_is_learned",
    "python FILE.py": "copying::a_file_alone_checks_itself_or_says_what_its_check_needs",
    "python tests/mutate.py": "mutate::a_slip_is_caught_or_listed",
    **{line: SMOLLM for line in README.commands if "smollm" in line},
    **{line: KITS for line in README.commands if line.startswith("python conformance/")},
}  # fmt: skip
ELSEWHERE = {"torchrun", "tp_plan"}  # torch's and transformers'
ELSEWHERE |= {"my_loss.py", "Majority()"}  # which the page shows
NUMBER = r"\d+(\.\d+)?(e-?\d+)?"


@pytest.mark.quick
def test_it_is_one_page():
    assert README.text.count("\n") <= 140 and len(README.text.split()) <= 1200
    tables_and_commands = ("|", "python", "pip ")
    lines = [x for x in README.text.split("\n") if not x.startswith(tables_and_commands)]
    assert max(map(len, lines)) <= 128


@pytest.mark.quick
def test_every_command_is_run_by_a_test():
    require_whole_table(README.commands, TABLE)
    assert len(BLOCKS) == 4 and BLOCKS[0].endswith(f"&& {RUN}\n")
    assert BLOCKS[1].endswith("&& python -m pytest\n")


CI = """
```text
A text.
```
```
echo first && echo first again{broken}
```

```
{second}
```
"""


@pytest.mark.quick
@pytest.mark.parametrize("page, code, out", [
    (CI.format(broken="", second="echo second"), 0, "first\nfirst again --steps 2\nsecond\n"),
    (CI.format(broken=" && false", second="echo second"), 1, "first\nfirst again\n"),
    (CI.format(broken="", second="false && echo second"), 1, "first\nfirst again --steps 2\n"),
    (CI.split("\n\n")[0], 1, ""),
])  # fmt: skip
def test_ci_runs_the_first_two_blocks_of_commands(tmp_path, page, code, out):
    """And it fails if a command of theirs fails, or if a block is gone."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "README.md").write_text(page)
    done = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, out), done.stderr


@pytest.mark.quick
def test_its_names_exist():
    require_names_exist(README, ROOT, ELSEWHERE)


@pytest.mark.quick
def test_its_loop_and_loss_are_those_of_the_file():
    """Two functions of train_grpo.py, without docstrings, comments and blank lines."""
    functions = []
    for function in (train_grpo.train, train_grpo.grpo_loss):
        text = inspect.getsource(function).replace(f'"""{function.__doc__}"""', "")
        lines = [x for x in text.splitlines() if not re.match(r"\s*(#|$)", x)]
        functions.append("\n".join(lines))
    assert LOOP == "\n\n".join(functions) + "\n" and LOOP.count("\n") <= 25


@pytest.mark.quick
def test_its_adapter_is_the_one_of_the_kits_page():
    """Which test_step_kit.py runs. This page has fewer blank lines."""
    (same,) = Page("conformance/README.md").code("python")
    assert ast.dump(ast.parse(ADAPTER)) == ast.dump(ast.parse(same))


@pytest.mark.quick
def test_it_says_of_each_file_what_to_read_first():
    """Of the five in order, with names that the file defines, and pictures."""
    section = README.text.split("## The five files")[1].split("\n## ")[0]
    items = re.findall(r"^\d\. (.*(?:\n   .*)*)", section, flags=re.M)
    assert [item.split("`")[1] for item in items] == [f"{name}.py" for name in FIVE]
    for item in items:
        file, *names = re.findall(r"`([^`]+)`", item)
        for name in names:
            assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(), re.M), name
    assert [file for file, item in zip(FIVE, items) if "](assets/" not in item] == ["models"]


@pytest.mark.quick
@pytest.mark.parametrize("name", FIVE)
def test_a_docstring_says_what_the_letters_of_its_file_mean(name):
    text = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()))
    said = set(re.findall(r"\b[A-Z]\b", text.split("\n\n")[-1]))
    assert letters_of(name) - said == set()


@pytest.mark.quick
def test_the_files_are_as_long_as_it_says():
    lines = sum((ROOT / f"{name}.py").read_text().count("\n") for name in FIVE)
    assert f"Five flat Python files of {round(lines, -2):,} lines" in README.text


@pytest.mark.quick
def test_the_model_of_the_main_job_is_as_large_as_it_says():
    config = train_grpo.Config()
    model = train_grpo.build_policy(config, train_grpo.Guess(config))
    thousands = sum(weight.numel() for weight in model.parameters()) / 1000
    assert f"A random model of {thousands:.0f} thousand parameters" in README.text


def test_the_main_job_prints_what_it_shows(tmp_path):
    """Its lines, but for the numbers of one step. The bar is for a terminal, a sample for any."""
    copy_the_five(tmp_path)
    code, out, err = as_script("train_grpo.py", "--steps", "1", cwd=tmp_path)
    assert code == 0, err
    shown, printed = shapes_of(README.code("text")[0]), shapes_of(out)
    assert [shape for shape in shown if "%" not in shape] == printed
    assert 0 < float(re.search(r"error (\S+)", out)[1]) < ERROR_BOUND


def shapes_of(text):
    """Return the lines of a text, each kind once: 0 is any number, `sample:` any sample."""
    lines = re.sub(r"sample: .*", "sample:", re.sub(NUMBER, "0", text)).splitlines()
    return list(dict.fromkeys(" ".join(line.split()) for line in lines))


@pytest.mark.parametrize("steps", [1, pytest.param(150, marks=pytest.mark.slow)])
def test_its_task_is_learned_where_it_says(tmp_path, steps):
    """A class below `Guess`, and an object of it in `main`."""
    copy_the_five(tmp_path)
    file, at = tmp_path / "train_grpo.py", "\n# 3. Rollouts"
    head, main = file.read_text().replace(at, f"\n{TASK}\n{at}").split("\ndef main(")
    assert head.count("class Majority:") == main.count("Guess(config)") == 1
    file.write_text(f"{head}\ndef main({main.replace('Guess(config)', 'Majority()')}")
    code, out, err = as_script(file, "--steps", str(steps), cwd=tmp_path)
    assert code == 0, err
    assert steps == 1 or float(out.splitlines()[-1].removeprefix("solved ")) >= 0.95

"""README.md: its code and commands run, alone in a folder where it says so; CI runs its blocks."""

import ast
import inspect
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, slow
from pages import Page
from test_cores import copy_the_five
from test_ranks import as_script

import train_grpo

README = Page("README.md")
LOOP, ADAPTER, TASK = README.code("python")
ERROR_BOUND = float(re.search(r"the largest error, below (1e-\d+)\.", README.text)[1])

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
    first, second, *_ = [text for language, text in README.blocks if not language]
    assert first.endswith("&& torchrun --nproc-per-node 2 train_grpo.py\n")
    assert second.endswith("&& python -m pytest\n")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "README.md").write_text(page)
    done = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, out), done.stderr


@pytest.mark.quick
def test_its_code_is_that_of_the_files():
    """Two functions of train_grpo.py without comments, and the adapter that the kits' tests run."""
    functions = []
    for function in (train_grpo.train, train_grpo.grpo_loss):
        text = inspect.getsource(function).replace(f'"""{function.__doc__}"""', "")
        lines = [x for x in text.splitlines() if not re.match(r"\s*(#|$)", x)]
        functions.append("\n".join(lines))
    assert LOOP == "\n\n".join(functions) + "\n"
    (same,) = Page("conformance/README.md").code("python")
    assert ast.dump(ast.parse(ADAPTER)) == ast.dump(ast.parse(same))


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
    assert 0 < float(re.search(r"error (\S+)", out)[1]) < ERROR_BOUND
    assert steps == 1 or float(out.splitlines()[-1].removeprefix("solved ")) >= 0.95


# Plans that have each mechanism of parallel.py, in a third of the ranks of its own list.
FEWER = """PLANS = {
    4: ("d2t2e2 sp", "p2t2", "p2t2 sp", "d4 fsdp", "c2d2e2"),
}
"""
ALONE = [(name, "") for name in ("models", "ring_attention", "tree_attention")]


@pytest.mark.parametrize("name, plans", [*ALONE, ("parallel", FEWER), *slow(("parallel", ""))])
def test_a_file_alone_checks_itself_or_says_what_its_check_needs(name, plans, tmp_path):
    text = (ROOT / f"{name}.py").read_text()
    (tmp_path / f"{name}.py").write_text(
        re.sub(r"^PLANS = .*?^}\n", plans, text, flags=re.M | re.S) if plans else text)
    code, out, err = as_script(f"{name}.py", cwd=tmp_path)
    for needed in ("models", "ring_attention") if name == "parallel" else ():  # by its check
        assert (code, out, err.count("\n")) == (2, "", 1) and f"{needed}.py" in err
        shutil.copy(ROOT / f"{needed}.py", tmp_path)
        code, out, err = as_script(f"{name}.py", cwd=tmp_path)
    assert code == 0 and out.count("\n") == 1, err
    assert 0 < float(out.split()[-1]) < ERROR_BOUND  # a machine rounds as it likes

"""Exercises and planted bugs: each file judges them as EXERCISES.md promises."""

import ast
import dataclasses
import re
from pathlib import Path

import exercise
import pytest
from exercise_data import BUGS, EXERCISES
from pages import Page
from test_ranks import as_script

import parallel

PAGE = Page("tests/EXERCISES.md")


def some_quick(names, *chosen):
    """Cases for `parametrize`, of which a few are quick."""
    return [pytest.param(x, marks=[pytest.mark.quick] * (x in chosen), id=f"{x}") for x in names]


def run(file, judge=""):
    """Run a copy's check, or its judge. Return the exit code and what stderr has."""
    script, *words = exercise.check_of(file.name, judge).split()
    code, _, err = as_script(script, *words, cwd=file.parent)
    return code, err


def put_back(name, text):
    """Return an exercise's file with the original bodies in place of what raises."""
    of_file = exercise.original(EXERCISES[name].file)
    for function in EXERCISES[name].functions:
        (first, last), stub = (exercise.body_lines(x, function) for x in (of_file, text))
        lines = text.split("\n")
        lines[stub[0] - 1 : stub[1]] = of_file.split("\n")[first - 1 : last]
        text = "\n".join(lines)
    return text, of_file


@pytest.mark.parametrize("name", some_quick(EXERCISES, "merge"))
def test_an_exercise_fails_until_the_original_body_is_back(name, tmp_path, capsys):
    """With the body back, the file is the original: other tests run its check."""
    task = EXERCISES[name]
    assert exercise.main(["--home", f"{tmp_path}", "start", name]) == 0
    said, own = capsys.readouterr().out, tmp_path / name / task.file
    numbers = re.findall(r"\(\d+\)", task.equation)
    assert re.findall(r"^ {4}(\(\d+\))", said, re.M) == numbers and "\n\n\n" not in said
    assert all(f"write   {function} at" in said for function in task.functions)
    code, err = run(own)
    assert code == 1 and f"NotImplementedError: {task.equation}\n" in err

    text, of_file = put_back(name, own.read_text())
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(of_file))
    assert (text == of_file) == (not task.comments)  # the copy lacks these comments
    assert not [comment for comment in task.comments if comment in own.read_text()]
    own.write_text(of_file)
    assert exercise.main(["--home", f"{tmp_path}", "solution", name]) == 0
    assert capsys.readouterr().out == "\n"  # no difference
    assert (f"judge.py {name}" in said) == bool(task.slips)
    assert not task.slips or run(own, name)[0] == 0
    for right, wrong in task.slips:
        assert of_file.count(right) == 1
        own.write_text(of_file.replace(right, wrong))
        assert run(own, name)[0] == 1, wrong


@pytest.mark.parametrize("number", some_quick(BUGS, 3))
def test_a_bug_is_found_by_the_check_that_its_answer_names(number, tmp_path, capsys):
    bug = BUGS[number]
    assert exercise.main(["--home", f"{tmp_path}", "bug", f"{number}"]) == 0
    file = tmp_path / f"bug-{number}" / bug.file
    assert bug.symptom in capsys.readouterr().out
    pairs = zip(file.read_text().split("\n"), exercise.original(bug.file).split("\n"))
    line = next(n for n, (found, right) in enumerate(pairs, 1) if found != right)
    for at, code in ((line, 0), (line - 2, 1)):
        given = f"{file}:{at}" if code else f"{bug.file}:{at}"
        assert exercise.main(["bug", f"{number}", "--answer", given]) == code
        said = capsys.readouterr().out
        assert (bug.why in said and exercise.check_of(bug.file, bug.judge) in said) == (code == 0)

    if bug.plan:
        world = next(n for n, plans in parallel.PLANS.items() if bug.plan in plans)
        plans = f"PLANS = {{{world}: {(bug.plan,)}}}\n"
        file.write_text(re.sub(r"^PLANS = .*?^}\n", plans, file.read_text(), flags=re.M | re.S))
    code, err = run(file, bug.judge)
    assert code == 1 and not re.search("(Name|Attribute|Type|Import|Syntax)Error", err), err
    assert err or bug.judge  # the last line says what was expected


def refused(argv, capsys):
    """Return the exit code of a command, and the last line that it printed."""
    try:
        code = exercise.main(argv)
    except SystemExit as ended:
        code = ended.code
    return code, "".join(capsys.readouterr()).strip().split("\n")[-1]


WRONG = [  # a command, its exit code, and what it says
    ("start gone", 2, "invalid choice: 'gone'"), ("bug 0", 2, "invalid choice: 0"),
    ("solution merge", 2, "start the exercise first"),
    *((f"bug 1 --answer {text}", 2, "expected FILE:LINE such as models.py:99")
      for text in ("models.py", "12", "models.py:x", "models.py:-1", "a.py:1234567890")),
    ("bug 1 --answer train_grpo.py:1", 1, "Another file"),
    ("bug 1 --answer models.py:0", 1, "Another line"),
    ("bug 1 --answer models.py:99999", 1, "Another line"),
]  # fmt: skip


@pytest.mark.parametrize("command, code, said", WRONG)
def test_a_command_that_cannot_be_done_says_so(command, code, said, tmp_path, capsys):
    found, line = refused(["--home", f"{tmp_path}", *command.split()], capsys)
    assert found == code and said in line


def test_a_folder_that_is_there_stays(tmp_path, monkeypatch, capsys):
    """And paths are relative to the folder of the caller."""
    monkeypatch.chdir(tmp_path)
    for command, file in (("start merge", "merge/ring_attention.py"), ("bug 2", "bug-2/models.py")):
        assert refused(["--home", "here", *command.split()], capsys)[0] == 0
        Path("here", file).write_text("mine")
        code, line = refused(["--home", "here", *command.split()], capsys)
        assert (code, Path("here", file).read_text()) == (2, "mine")
        assert f"here/{file.split('/')[0]} is there already" in line


def test_a_text_that_is_gone_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(BUGS, 1, dataclasses.replace(BUGS[1], right="gone"))
    clip = dataclasses.replace(EXERCISES["clip"], comments=("# gone",))
    monkeypatch.setitem(EXERCISES, "clip", clip)
    for command in ("bug 1", "bug 1 --answer models.py:1", "start clip"):
        code, line = refused(["--home", f"{tmp_path}/here", *command.split()], capsys)
        assert code == 2 and "gone'" in line and "the file has changed" in line
    assert not (tmp_path / "here").exists()


def test_every_line_of_a_wrong_statement_is_a_right_answer():
    assert [len(exercise.wrong_lines(n)) for n in (5, 14, 15, 24)] == [1, 2, 2, 3]


def test_the_page_lists_every_exercise_and_every_bug():
    in_one_line = " ".join(PAGE.text.split())
    for name, x in EXERCISES.items():  # each is in the lecture of its file
        lecture = rf"\*\*`{x.file}`, [^*]+\*\*[^*]* {name} \({x.minutes}\)"
        assert re.search(lecture, in_one_line), name
    for number, bug in BUGS.items():
        assert f"\n{number}. {bug.file[:-3]}: {bug.symptom}\n" in PAGE.text
    for file in exercise.FILES:
        seconds = re.findall(r"(\d+) CPU seconds", exercise.original(file))
        assert seconds in ([], [f"{exercise.SECONDS[file]}"])
    assert len(PAGE.text.split()) <= 900

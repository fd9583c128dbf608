"""Write a function of the five files, or find a planted bug: the files correct their student.

    python tests/exercise.py                                # list the exercises and the bugs
    python tests/exercise.py start merge                    # copy files, with merge taken out
    python exercise/merge/ring_attention.py                 # judge the function in its place
    python tests/exercise.py hint merge                     # print a hint; hint merge 2: another
    python tests/exercise.py solution merge                 # compare it with the original
    python tests/exercise.py bug 7                          # copy files, with bug 7 planted
    python tests/exercise.py bug 7 --answer parallel.py:99  # is it that line?

exercise_data.py has the texts and the answers, EXERCISES.md the course. Exit code: 0, or 1 for a
wrong answer, or 2 for a command that cannot be done.
"""

import argparse
import ast
import difflib
import os
import re
import shutil
import sys
from pathlib import Path

from exercise_data import BUGS, EXERCISES

ROOT = Path(__file__).resolve().parent.parent
ME = f"python {os.path.relpath(__file__)}"

# What a file's check imports, the file itself included.
FILES = {
    "models.py": ["models.py"],
    "ring_attention.py": ["ring_attention.py"],
    "tree_attention.py": ["tree_attention.py"],
    "parallel.py": ["parallel.py", "models.py", "ring_attention.py"],
    "train_grpo.py": ["train_grpo.py", "models.py", "parallel.py", "ring_attention.py",
                      "tree_attention.py"],
}  # fmt: skip
# CPU seconds of each check with one thread, as in the files' docstrings. judge.py: the slowest.
SECONDS = {"models.py": 3, "ring_attention.py": 3, "tree_attention.py": 2, "parallel.py": 18,
           "train_grpo.py": 4, "judge.py": 3}  # fmt: skip


def refuse(reason):
    """End the program with one line: the command cannot be done."""
    print(f"exercise.py: {reason}", file=sys.stderr)
    sys.exit(2)


def original(file):
    """Return the text of one of the five files. Lines end in a newline alone, whatever git did."""
    return (ROOT / file).read_text("utf-8")


# What is taken out, and what is planted ---------------------------------------------------------


def body_lines(text, name):
    """Return (first, last), the lines of a function's body after its docstring, counted from 1.

    name: of a function, or of a method as "Class.method".
    """
    scope = ast.parse(text)
    for part in name.split("."):
        scope = next(node for node in scope.body if getattr(node, "name", None) == part)
    # Comments before the first statement belong to the body. Without a docstring, it begins after
    # the signature, which has one line.
    before = scope.body[0].end_lineno if ast.get_docstring(scope) else scope.lineno
    return before + 1, scope.end_lineno


def without_comments(text, beginnings):
    """Remove comments, each with the lines of comment that follow its first line.

    beginnings: how each begins, as "# The first two lines". A comment after code is removed alone.
    """
    for beginning in beginnings:
        comment = rf"(\n *)? *{re.escape(beginning)}.*(?(1)(\n *#.*)*)"
        text, count = re.subn(comment, "", text)
        if count != 1:
            refuse(f"expected one comment {beginning!r}, got {count}: the file has changed")
    return text


def taken_out(name):
    """Return the text of an exercise's file, without the bodies that the student writes."""
    exercise = EXERCISES[name]
    text = original(exercise.file)
    for function in exercise.functions:
        first, last = body_lines(text, function)
        lines = text.split("\n")
        indent = " " * (4 + 4 * function.count("."))
        lines[first - 1 : last] = [f'{indent}raise NotImplementedError("{exercise.equation}")']
        text = "\n".join(lines)
    return without_comments(text, exercise.comments)


def planted(number):
    """Return the text of a bug's file, with the bug."""
    bug = BUGS[number]
    text = original(bug.file)
    if text.count(bug.right) != 1:
        refuse(f"expected {bug.right!r} once in {bug.file}: the file has changed")
    return text.replace(bug.right, bug.wrong)


def wrong_lines(number):
    """Return the set of lines that answer a bug: those of the statements that it changed."""
    right, wrong = original(BUGS[number].file).split("\n"), planted(number).split("\n")
    head = len(os.path.commonprefix([right, wrong]))
    tail = len(os.path.commonprefix([right[head:][::-1], wrong[head:][::-1]]))
    # If a line is missing, the lines before and after it are right answers.
    lines = {*range(head + 1, len(wrong) - tail + 1)} or {head, head + 1}
    for node in ast.walk(ast.parse("\n".join(wrong))):
        if isinstance(node, ast.stmt):
            # Of a loop or a branch, its first line alone.
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            statement = {*range(node.lineno, last + 1)}
            lines |= statement if statement & lines else set()
    return lines


def equations(name):
    """Return an empty line and an exercise's equations, or ''. The file's docstring has them."""
    exercise = EXERCISES[name]
    docstring = ast.get_docstring(ast.parse(original(exercise.file)), clean=False)
    numbers = re.findall(r"\((\d+)\)", exercise.equation)
    found = (re.search(rf"^    \({n}\).*\n( {{9}}.*\n)*", docstring, re.M) for n in numbers)
    return "\n" * bool(numbers) + "".join(equation[0] for equation in found)


# The commands -----------------------------------------------------------------------------------


def copy_files(folder, file, text):
    """Make a folder of a file with another text, and of the files that its check imports."""
    if folder.exists():
        refuse(f"{os.path.relpath(folder)} is there already: delete it to begin again")
    folder.mkdir(parents=True)
    for neighbor in FILES[file]:
        shutil.copy(ROOT / neighbor, folder)
    shutil.copy(Path(__file__).parent / "exercise_judge.py", folder / "judge.py")
    (folder / file).write_text(text, "utf-8")


def check_of(file, judge):
    """Return the command that checks a copy, without its folder. judge: '', or of judge.py."""
    steps = " --steps 1" if file == "train_grpo.py" else ""  # after its check it trains
    return f"judge.py {judge}" if judge else f"{file}{steps}"


def start(name, home):
    """Copy the files of an exercise without the functions that the student writes."""
    exercise = EXERCISES[name]
    copy_files(home / name, exercise.file, taken_out(name))
    where = os.path.relpath(home / name)
    print(f"{exercise.task}\n\n{exercise.equation} in {exercise.file}\n{equations(name)}")
    text = (home / name / exercise.file).read_text("utf-8").split("\n")
    lines = [n for n, line in enumerate(text, 1) if "raise NotImplementedError" in line]
    for function, line in zip(exercise.functions, lines):
        print(f"write   {function} at {where}/{exercise.file}:{line}")
    print(f"        in about {exercise.minutes} minutes in all; two hints: {ME} hint {name}")
    for judge in ("", name) if exercise.slips else ("",):
        check = check_of(exercise.file, judge)
        print(f"judge   python {where}/{check:24} # {SECONDS[check.split()[0]]} CPU seconds")


def solution(name, home):
    """Print the difference from the student's file to the original."""
    file = EXERCISES[name].file
    own = home / name / file
    if not own.exists():
        refuse(f"expected {os.path.relpath(own)}: start the exercise first")
    texts = own.read_text("utf-8").split("\n"), original(file).split("\n")
    print("\n".join(difflib.unified_diff(*texts, f"yours/{file}", file, lineterm="")))


def plant(number, home):
    """Copy the files of a bug, with the bug."""
    bug, folder = BUGS[number], home / f"bug-{number}"
    copy_files(folder, bug.file, planted(number))
    where = f"{os.path.relpath(folder)}/{bug.file}"
    print(f"{bug.symptom}\n\nread    {where}: one statement is wrong or missing")
    print(f"answer  {ME} bug {number} --answer {bug.file}:LINE")


def answer(number, text, home):
    """Say whether FILE:LINE is a line of a bug. Return the exit code."""
    bug = BUGS[number]
    given = re.fullmatch(r"(?:.*[/\\])?(\w+\.py):(\d{1,9})", text)
    if not given:
        refuse(f"expected FILE:LINE such as {bug.file}:99, got {text!r}")
    if given[1] != bug.file or int(given[2]) not in wrong_lines(number):
        print(f"No. Another {'line' if given[1] == bug.file else 'file'} is wrong.")
        return 1
    texts = planted(number).split("\n"), original(bug.file).split("\n")
    _, _, *changed = difflib.unified_diff(*texts, n=0, lineterm="")
    print("\n".join([f"Yes. {bug.why}\n", *(x for x in changed if x[0] != "@"), ""]))
    where, check = os.path.relpath(home / f"bug-{number}"), check_of(bug.file, bug.judge)
    print(f"python {where}/{check} finds it{bug.plan and f' under the plan {bug.plan}'}.")
    return 0


def listing():
    """Print the table of exercises and of bugs."""
    print(f"{'exercise':14} {'file':18} {'write':48} minutes")
    for name, x in EXERCISES.items():
        print(f"{name:14} {x.file:18} {', '.join(x.functions):48} {x.minutes:7}")
    print(f"\nbug {'file':18} what somebody has noticed")
    for number, bug in BUGS.items():
        print(f"{number:3} {bug.file:18} {bug.symptom}")


def main(argv):
    """Run a command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--home", type=Path, default=ROOT / "exercise", help="folder of the copies")
    commands = parser.add_subparsers(dest="command", metavar="{start,hint,solution,bug}")
    start_, hint_, solution_ = (commands.add_parser(x) for x in ("start", "hint", "solution"))
    for of_exercise in (start_, hint_, solution_):
        of_exercise.add_argument("name", choices=EXERCISES, metavar="EXERCISE")
    hint_.add_argument("number", type=int, choices=(1, 2), nargs="?", default=1)
    bug_ = commands.add_parser("bug")
    bug_.add_argument("number", type=int, choices=BUGS, metavar="NUMBER")
    bug_.add_argument("--answer", metavar="FILE:LINE")
    given = parser.parse_args(argv)
    if given.command is None:
        listing()
    elif given.command == "start":
        start(given.name, given.home)
    elif given.command == "hint":
        print(EXERCISES[given.name].hints[given.number - 1])
    elif given.command == "solution":
        solution(given.name, given.home)
    elif given.answer is None:
        plant(given.number, given.home)
    else:
        return answer(given.number, given.answer, given.home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

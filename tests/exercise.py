"""Write a function of the five files, or find a planted bug: the files correct their student.

    python tests/exercise.py                                # list the exercises and the bugs
    python tests/exercise.py start merge                    # copy files, with merge taken out
    python exercise/merge/ring_attention.py                 # judge the function in its place
    python tests/exercise.py hint merge [2]                 # print a first, or a second hint
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

# What a file's check imports, the file itself included, and its seconds on a laptop.
FILES = {
    "models.py": ["models.py"],
    "ring_attention.py": ["ring_attention.py"],
    "tree_attention.py": ["tree_attention.py"],
    "parallel.py": ["parallel.py", "models.py", "ring_attention.py"],
    "train_grpo.py": ["train_grpo.py", "models.py", "parallel.py", "ring_attention.py",
                      "tree_attention.py"],
}  # fmt: skip
SECONDS = {"models.py": 4, "ring_attention.py": 4, "tree_attention.py": 3, "parallel.py": 30,
           "train_grpo.py": 5, "judge.py": 5}  # fmt: skip


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
    if ast.get_docstring(scope):
        return scope.body[0].end_lineno + 1, scope.end_lineno

    # Without a docstring, the body begins after the signature. Its comments belong to the body.
    lines = text.split("\n")
    first = scope.lineno
    while not lines[first - 1].endswith(":"):
        first += 1
    return first + 1, scope.end_lineno


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
    """Return the equations of an exercise, as the docstring of its file has them."""
    exercise = EXERCISES[name]
    docstring = ast.get_docstring(ast.parse(original(exercise.file)), clean=False)
    found = {}
    for text, number in re.findall(r"^(    \((\d+)\).*\n(?: {9}.*\n)*)", docstring, re.M):
        found.setdefault(number, text)
    return "".join(found[number] for number in re.findall(r"\((\d+)\)", exercise.equation))


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
    """Return the command that checks a copy, without its folder. judge: if not '', of judge.py."""
    steps = " --steps 1" if file == "train_grpo.py" else ""  # after its check it trains
    return f"judge.py {judge}" if judge else f"{file}{steps}"


def start(name, home):
    """Copy the files of an exercise without the functions that the student writes."""
    exercise = EXERCISES[name]
    folder = home / name
    copy_files(folder, exercise.file, taken_out(name))
    print(f"{exercise.task}\n\n{exercise.equation} in {exercise.file}\n\n{equations(name)}")
    file, stub = folder / exercise.file, "raise NotImplementedError"
    lines = [n for n, line in enumerate(file.read_text("utf-8").split("\n"), 1) if stub in line]
    for function, line in zip(exercise.functions, lines):
        print(f"write   {function} at {os.path.relpath(file)}:{line}")
    print(f"        in about {exercise.minutes} minutes; two hints: {ME} hint {name}")
    for judge in ("", name) if exercise.slip else ("",):
        check = check_of(exercise.file, judge)
        where, seconds = os.path.relpath(folder), SECONDS[check.split()[0]]
        print(f"judge   python {where}/{check:24} # {seconds} s")


def hint(name, number):
    """Print the first or the second hint of an exercise."""
    print(EXERCISES[name].hints[number - 1])
    if number == 1:
        print(f"\nFor a second hint: {ME} hint {name} 2")


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
    print(f"One statement of {os.path.relpath(folder)}/{bug.file} is wrong.\n\n{bug.symptom}\n")
    print(f"answer  {ME} bug {number} --answer {bug.file}:LINE")
    print("Read it, and do not compare it with the original.")


def answer(number, text, home):
    """Say whether FILE:LINE is a line of a bug. Return the exit code."""
    bug = BUGS[number]
    given = re.fullmatch(r"(?:.*[/\\])?(\w+\.py):(\d+)", text)
    if not given:
        refuse(f"expected FILE:LINE such as {bug.file}:99, got {text!r}")
    file, line = given[1], int(given[2])
    if file != bug.file:
        print(f"No. The bug is in {bug.file}.")
        return 1
    if line not in wrong_lines(number):
        print("No. Another line is wrong.")
        return 1
    texts = planted(number).split("\n"), original(file).split("\n")
    _, _, *changed = difflib.unified_diff(*texts, n=0, lineterm="")
    print("\n".join([f"Yes. {bug.why}\n", *(x for x in changed if x[0] != "@"), ""]))
    where = os.path.relpath(home / f"bug-{number}")
    under = f" under the plan {bug.plan}" if bug.plan else ""
    print(f"python {where}/{check_of(bug.file, bug.judge)} finds it{under}.")
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
    for command in ("start", "hint", "solution"):
        of_command = commands.add_parser(command)
        of_command.add_argument("name", choices=EXERCISES, metavar="EXERCISE")
        if command == "hint":
            of_command.add_argument("number", type=int, choices=(1, 2), nargs="?", default=1)
    of_bug = commands.add_parser("bug")
    of_bug.add_argument("number", type=int, choices=BUGS, metavar="NUMBER")
    of_bug.add_argument("--answer", metavar="FILE:LINE")
    given = parser.parse_args(argv)
    if given.command is None:
        listing()
    elif given.command == "start":
        start(given.name, given.home)
    elif given.command == "hint":
        hint(given.name, given.number)
    elif given.command == "solution":
        solution(given.name, given.home)
    elif given.answer is not None:
        return answer(given.number, given.answer, given.home)
    else:
        plant(given.number, given.home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Files of JSON lines, whole or cut: adds to `train_grpo.Log` what runs that are killed need.

Reading names the line that is wrong. Writing and cutting say what the disk said.
"""

import contextlib
import json
import math
from pathlib import Path

from full.ranks import advice_of


def append_lines(path, lines):
    """Append lines of JSON to a file of a run. JSON has no NaN: such a number becomes null."""
    with writing(path, advice_of(path.parent)), path.open("a", encoding="utf-8") as file:
        for line in lines:
            for key, value in line.items():
                if isinstance(value, float) and not math.isfinite(value):
                    line = line | {key: None}
            file.write(json.dumps(line) + "\n")


def beside(directory) -> Path:
    """Return where a directory is first written. A kill leaves it, and the next try deletes it."""
    return Path(f"{Path(directory).absolute()}.tmp")


@contextlib.contextmanager
def writing(path, advice):
    """Name in an OSError the file that was not written, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} not written ({error}): make room or mend the directory, then {advice}"
        ) from error


def read_json_lines(path, *, skip_torn_last=False) -> list:
    """Return [(line number from 1, object)] of a file with a JSON object a line or nothing.

    ValueError names a line that holds anything else. skip_torn_last: leave out the last line if it
    is damaged and no newline ends it, as a kill or a full disk leaves a file.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")  # JSON strings may hold other line breaks
    except FileNotFoundError as error:
        raise ValueError(f"no {path}; expected a file of JSON lines") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
            problem = None if isinstance(value, dict) else f"it is a {type(value).__name__}"
        except (ValueError, RecursionError) as error:
            problem = error
        # The last piece is empty if the last line ends, so else it is an unfinished line.
        if problem is None:
            found.append((number, value))
        elif not (skip_torn_last and number == len(lines)):
            raise ValueError(f"{path} line {number} holds no JSON object: {problem}")
    return found


def whole_lines(path) -> list[dict]:
    """Return the JSON objects of a run's file of lines, but not a last line that is torn."""
    if not path.exists():
        return []
    return [line for _, line in read_json_lines(path, skip_torn_last=True)]


def cut_lines(path, step):
    """Drop the lines of `step` and later, and torn ones; the file is replaced whole."""
    lines = whole_lines(path)
    for line in lines:
        if not isinstance(line.get("step"), int):
            raise ValueError(f"{path} has a line without a step: {json.dumps(line)[:60]}")
    # A kill between the two last lines leaves the old file and a .tmp that is never read.
    partial = path.with_suffix(".tmp")
    kept = "".join(json.dumps(x) + "\n" for x in lines if x["step"] < step)
    partial.write_text(kept, encoding="utf-8")
    partial.replace(path)

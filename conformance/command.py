"""What the commands of the three kits share: settings KEY=VALUE, a user's file, errors of one line.

All kits take settings in the same way: defaults, replaced by the settings of the user's file or of
the dump, replaced by KEY=VALUE of the command. A wrong name or value is an error.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path

from conformance.definition import CANNOT_SAY


def parser(text):
    """Return a parser of arguments that prints a text as it is for --help."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def checked(defaults, choices, given):
    """Return given settings with all defaults filled in, a dict. ValueError for a wrong one."""
    for name, value in given.items():
        if name not in defaults:
            raise ValueError(f"expected a setting of {', '.join(defaults)}, got {name!r}")
        if name in choices and value not in choices[name]:
            wanted = " | ".join(map(str, choices[name]))
            reason = f": {CANNOT_SAY[value]}" if value in CANNOT_SAY else ""
            raise ValueError(f"{name}: expected {wanted}, got {value!r}{reason}")
        of_numbers = isinstance(defaults[name], int | float)
        if of_numbers and not isinstance(value, int | float):
            raise ValueError(f"{name}: expected a number, got {value!r}")
    return defaults | given


def changed(defaults, settings):
    """Return KEY=VALUE of the settings that are not the defaults."""
    return [f"{name}={settings[name]}" for name in defaults if settings[name] != defaults[name]]


def settings_in(words):
    """Return the settings that words KEY=VALUE give. A value is JSON, or else a name."""
    given = {}
    for word in words:
        key, _, text = word.partition("=")
        if not key or not text:
            raise ValueError(f"expected KEY=VALUE, got {word!r}")
        try:
            given[key] = json.loads(text)
        except ValueError:
            given[key] = text
    return given


def load_module(target):
    """Import MODULE or FILE.py. It finds the files next to it, and in the current directory."""
    sys.path[:0] = [str(Path.cwd()), str(Path(target).resolve().parent)]
    if not target.endswith(".py"):
        return importlib.import_module(target)
    if not Path(target).is_file():
        raise ValueError(f"expected a file, got {target!r}, which does not exist")

    # The file is known by its name before it runs, as dataclasses in it ask for their module.
    specification = importlib.util.spec_from_file_location(Path(target).stem, target)
    module = importlib.util.module_from_spec(specification)
    sys.modules[Path(target).stem] = module
    specification.loader.exec_module(module)
    return module


def load(target):
    """Import MODULE:function or FILE.py:function."""
    file, _, name = target.rpartition(":")
    if not file:
        raise ValueError(f"expected FILE.py:function or MODULE:function, got {target!r}")
    module = load_module(file)
    if not callable(getattr(module, name, None)):
        own = [x for x, f in vars(module).items()
               if getattr(f, "__module__", "") == module.__name__]  # fmt: skip
        raise ValueError(f"expected a function of {file} ({', '.join(own)}), got {name!r}")
    return getattr(module, name)


def one_line_errors(main):
    """Return a command whose errors are one line each, with the exit status 2."""

    @functools.wraps(main)
    def command(argv):
        try:
            return main(argv)
        except Exception as error:
            # The kits' own errors say what was expected. Others need their place.
            text = next(iter(f"{error}".splitlines()), "")
            if not isinstance(error, ValueError):
                last = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(last.filename).name}, line {last.lineno}"
                text = f"{type(error).__name__}: {text} ({place})"
            print(f"{Path(main.__code__.co_filename).name}: error: {text}", file=sys.stderr)
            return 2

    return command

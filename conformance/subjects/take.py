"""Take named functions and classes out of a project's source file, without its imports.

The subjects that begin with `take(..)` need SOURCES, a folder with clones of public repositories.
Which commits were checked is in the table of conformance/README.md. A definition is compiled as it
stands in the file; what it imports is given by name, or is an `Anything`.
"""

import ast
import dataclasses
import importlib.util
import math
import os
import typing
from pathlib import Path
from types import SimpleNamespace

import torch


class Anything:
    """What annotations, decorators and metrics may be in place of a module that is not imported."""

    def __getattr__(self, name):
        return Anything()

    def __getitem__(self, key):
        return Anything()

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __or__(self, other):
        return Anything()

    def __ror__(self, other):
        return Anything()


def source(file):
    """Return the path of SOURCES/file, or of a file of an installed package: package:file."""
    package, _, inside = file.partition(":")
    if inside:
        found = importlib.util.find_spec(package)
        if found is None:
            raise ValueError(f"expected the package {package} on the Python path")
        return Path(found.submodule_search_locations[0], inside)
    if "SOURCES" not in os.environ:
        raise ValueError(f"expected SOURCES, a folder with clones of repositories, for {file}")
    return Path(os.environ["SOURCES"], file)


def take(file, *names, **given):
    """Return a namespace with the definitions of these names. given: what their code refers to."""
    wanted = dict.fromkeys(names)
    for node in ast.walk(ast.parse(source(file).read_text(encoding="utf-8"))):
        is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_definition and wanted.get(node.name, node) is None:
            wanted[node.name] = node
    if missing := [name for name, node in wanted.items() if node is None]:
        raise ValueError(f"expected the definitions {', '.join(names)} in {file}, got no {missing}")
    for node in wanted.values():
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    space = dict(
        torch=torch, math=math, F=torch.nn.functional, nn=torch.nn, Tensor=torch.Tensor,
        dist=torch.distributed, Optional=typing.Optional, Any=typing.Any, Union=typing.Union,
        Callable=typing.Callable, dataclass=dataclasses.dataclass, field=dataclasses.field,
    )  # fmt: skip
    space |= given
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.Module(body=[future, *wanted.values()], type_ignores=[])
    exec(compile(ast.fix_missing_locations(module), file, "exec"), space)
    return SimpleNamespace(**space)


def lines(file, first, end):
    """Compile the lines of a script from one line to another, which is left out."""
    text = [line.strip() for line in source(file).read_text(encoding="utf-8").splitlines()]
    return compile("\n".join(text[text.index(first) : text.index(end)]), file, "exec")


def shifted(x):
    """Return (B, T) as (B, T + 1): the first token of a row has no log-prob."""
    return torch.nn.functional.pad(x, (1, 0))

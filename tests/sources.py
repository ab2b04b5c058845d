"""The package's own files, each read and parsed once."""

import ast
from functools import cache
from pathlib import Path

import cordee

PACKAGE = Path(cordee.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(parsed(path)))


def room(path: Path) -> str:
    return str(path.relative_to(PACKAGE))

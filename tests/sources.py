"""The package's own files, each read and parsed once."""

import ast
import gc
from functools import cache
from pathlib import Path

import cordee

PACKAGE = Path(cordee.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _package() -> dict[Path, tuple[ast.AST, ...]]:
    """Return the nodes of the whole package. They live as long as the tests: the collector never looks at them."""
    gc.disable()
    try:
        found = {path: tuple(ast.walk(parsed(path))) for path in SOURCES}
        gc.freeze()
    finally:
        gc.enable()
    return found


def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, in the order of `ast.walk`."""
    return _package()[path] if path.is_relative_to(PACKAGE) else tuple(ast.walk(parsed(path)))


def room(path: Path) -> str:
    return str(path.relative_to(PACKAGE))

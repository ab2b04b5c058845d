"""The rules of the house that no linter knows: sizes of files and functions, exit codes, a light import."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cordee
from cordee import errors

PACKAGE = Path(cordee.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_and_no_function_wants_to_be_two(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= FILE_LINES_MAX, f"{path} has {lines} lines: divide it"
    too_long = [
        f"{node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert not too_long, f"{path}: functions over {FUNCTION_LINES_MAX} lines: {', '.join(too_long)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), f"{path} has no module docstring"


def _tree(cls: type[errors.CordeeError]) -> list[type[errors.CordeeError]]:
    return [cls] + [leaf for sub in cls.__subclasses__() for leaf in _tree(sub)]


def test_every_error_has_its_own_exit_code_and_is_drawn() -> None:
    tree = [cls for cls in _tree(errors.CordeeError) if cls.__module__ == "cordee.errors"]
    codes = [cls.exit_code for cls in tree]
    assert len(set(codes)) == len(codes)
    assert errors.EXIT_CHECKPOINTED not in codes
    assert errors.__doc__ is not None
    for cls in tree:
        line = next((line for line in errors.__doc__.splitlines() if f" {cls.__name__} " in line + " "), None)
        assert line is not None, f"{cls.__name__} is not drawn"
        assert str(cls.exit_code) in line.split()


def test_errors_of_the_product_live_in_one_place() -> None:
    for path in SOURCES:
        if path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert "CordeeError" not in bases, f"{path}: {node.name} belongs in errors.py"


@pytest.mark.parametrize("command", ["import cordee", "import cordee.client", "import cordee.cli.main"])
def test_imports_are_light(command: str) -> None:
    heavy = "{'torch', 'ray', 'fastapi', 'sqlalchemy', 'uvicorn'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {command}; print({heavy} or '')"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ},
    )
    assert done.stdout.strip() == ""

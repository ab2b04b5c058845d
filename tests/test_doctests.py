"""The examples in docstrings hold."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import cordee

PACKAGE = Path(cordee.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_hold(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0

"""Rules that no linter knows: sizes of files, functions and classes, unused names, exit codes, a light import."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from cordee import errors
from sources import PACKAGE, SOURCES, nodes, parsed

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
ATTRIBUTES_MAX = 15
RECORDS = {
    "AttemptRow": "one row of the ledger",
    "AuditRecord": "one row of the audit log",
    "AuditRecordView": "the same as an answer of the API",
    "ChipEfficiency": "one entry of efficiency.toml",
    "Estimate": "the plan's answer for a job",
    "Gpu": "one entry of gpus.toml",
    "Job": "the scheduler's part of a JobSpec",
    "JobSpec": "the keys of a job file",
    "JobView": "one answer of the API",
    "Layout": "the axes of a layout, as its text names them",
    "LayoutWanted": "the axes of a layout, each of them open or given",
    "LiveJobView": "one answer of the API",
    "ModelShape": "the keys of a config.json",
    "Node": "one machine, as its agent describes it",
    "NodeView": "one answer of the API",
    "Settings": "the flags of `cordee plan` that a training has",
    "ServingGiven": "the flags of `cordee serve plan`",
    "SettingsGiven": "the fields of Settings that a notebook gives",
    "Question": "the JSON that a trace is asked with",
    "Policy": "one value for each question that schedulers answer differently",
    "DryRunView": "one answer of the API",
    "ServiceSpec": "the section `service` of a job file",
    "ServiceView": "one answer of the API",
    "SweepView": "one answer of the API",
    "VersionView": "one answer of the API",
    "Summary": "one row of a simulation's table",
    "Survival": "one section of a plan",
    "TraceJob": "one row of a trace of jobs",
}
"""Frozen records that mirror a file or a text key by key; nesting them would only hide a name."""


def test_no_file_and_no_function_wants_to_be_two() -> None:
    too_long = []
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > FILE_LINES_MAX:
            too_long.append(f"{path} has {lines} lines of at most {FILE_LINES_MAX}: divide it")
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    too_long.append(
                        f"{path}:{node.lineno}: {node.name} has {lines} lines of at most {FUNCTION_LINES_MAX}"
                    )
    assert not too_long, "\n".join(too_long)


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path) for path in SOURCES if parsed(path).body and not ast.get_docstring(parsed(path))]
    assert not silent, "without a module docstring:\n" + "\n".join(silent)


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the fields of a dataclass or model, and what methods assign on `self`."""
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return fields | assigned


def test_no_class_wants_to_be_two() -> None:
    too_many = []
    for path in SOURCES:
        if path.name.endswith("document.py"):  # pydantic models: the keys of a JSON document
            continue
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and node.name not in RECORDS:
                count = len(_attributes(node))
                if count > ATTRIBUTES_MAX:
                    too_many.append(
                        f"{path}:{node.lineno}: {node.name} has {count} of at most {ATTRIBUTES_MAX} attributes"
                    )
    assert not too_many, "\n".join(too_many)


_CALLED_BY_OTHERS = {"down_revision", "Protect", "protect"}
# asyncio and httptools call a connection.
_CALLED_BY_OTHERS |= {"connection_made", "connection_lost", "data_received"}
_CALLED_BY_OTHERS |= {"on_header", "on_headers_complete", "on_body", "on_message_complete"}
# io, fsspec and the elastic sampler call a dataset.
_CALLED_BY_OTHERS |= {"seekable", "readinto", "ls", "cat_file"}
# torch asks a dispatch mode.
_CALLED_BY_OTHERS |= {"is_infra_mode"}
"""Names that alembic or the user's own code looks up."""
_FRAMEWORKS = ("Callback", "TrainerCallback", "Sampler", "BaseModel", "NodeVisitor", "HTMLParser")
_PLAIN_DECORATORS = {"property", "cached_property", "staticmethod", "classmethod", "cache", "contextmanager"}


def _public(body: list[ast.stmt], owner: ast.ClassDef | None = None) -> Iterator[tuple[str, int]]:
    """Yield public functions, classes, constants and methods; not those that a framework calls."""
    foreign = owner is not None and any(ast.unparse(base).split("[")[0].endswith(_FRAMEWORKS) for base in owner.bases)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            registered = any(ast.unparse(each) not in _PLAIN_DECORATORS for each in node.decorator_list)
            is_class = isinstance(node, ast.ClassDef)
            if not node.name.startswith("_") and not foreign and (is_class or not registered):
                yield node.name, node.lineno
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, node)
        elif owner is None and isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and not target.id.startswith("_"):
                    yield target.id, node.lineno


def test_every_public_name_has_a_user_outside_its_tests() -> None:
    used = set(_CALLED_BY_OTHERS)
    folder = PACKAGE.parent.parent
    for path in (*SOURCES, *(folder / "benchmarks").rglob("*.py"), *(folder / "examples").rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                used.add(node.value)  # `getattr`, `__all__`, `__getattr__`
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (folder / "docs").rglob("*.md"))
    unused = [
        f"{path}:{line}: {name}"
        for path in SOURCES
        for name, line in _public(parsed(path).body)
        if name not in used and not re.search(rf"\.{name}\b", pages)
    ]
    assert not unused, "\n".join(unused)


def _imported(body: list[ast.stmt], modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that a module imports as it is loaded, or for its types."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{each.name}" for each in node.names)
            yield from (name if name in modules else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from _imported(
                [each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)], modules
            )


def test_no_modules_import_each_other_not_even_for_types() -> None:
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCES
    }
    graph = {
        name: {each for each in _imported(parsed(path).body, modules) if each in modules and each != name}
        for name, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # a CycleError has the modules


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
        for node in nodes(path):
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

"""Each extra installed alone: its verbs work without the packages that the other extras bring.

Those packages are hidden from a subprocess, and from every process that it starts in turn.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cordee.cli.main import GROUPS
from cordee.errors import MissingExtraError

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = ("", "server", "train", "remote", "profile", "exact")
HIDE = """
import json, os, sys
hidden = frozenset(json.loads(os.environ["HIDDEN_PACKAGES"]))
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
HELP = """
from cordee.cli.main import main
for verb in {verbs}:
    try:
        main([verb, "--help"])
    except SystemExit as end:
        print("left:", verb, end.code or 0)
"""
NEEDS = {
    "artifact": ["artifacts"],
    "profile": ["profile"],
    "checkpoint": ["train", "server"],
    "admin": ["server"],
    "audit": ["server"],
}
"""The verbs whose help needs one of some extras; without it they name the first."""

Run = Callable[..., str]


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def brought(extra: str) -> set[str]:
    """Return the distributions that `pip install cordee[extra]` brings."""
    todo = [
        Requirement(each)
        for each in [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    ]
    found: set[str] = set()
    while todo:
        name = normal((requirement := todo.pop()).name)
        if name in found:
            continue
        found.add(name)
        for inner in map(Requirement, metadata.requires(name) or ()):
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": each}) for each in ("", *requirement.extras)
            ):
                todo.append(inner)
    return found


def hidden(extra: str) -> list[str]:
    """Return the modules that are installed here and that the extra does not bring."""
    names = brought(extra) | {"cordee"}
    return sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if not names & {normal(owner) for owner in owners}
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs Python with one extra only, and returns its output."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)

    def call(extra: str, *words: str, code: int = 0) -> str:
        env = {**os.environ, "HIDDEN_PACKAGES": json.dumps(hidden(extra)), "PYTHONPATH": str(tmp_path)}
        env |= {"CORDEE_HOME": str(tmp_path / "home"), "NO_COLOR": "1"}
        argv = [sys.executable, *words]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=200, check=False, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def test_an_extra_hides_the_others() -> None:
    assert {"obstore", "msgspec", "torch", "scipy"} <= set(hidden("server"))
    assert not {"fastapi", "sqlalchemy", "starlette", "numpy", "pydantic_core"} & set(hidden("server"))
    assert "fastapi" in hidden("train") and "xxhash" not in hidden("train")
    assert set(EXTRAS[1:]) <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("extra", ["", "server", *(pytest.param(each, marks=pytest.mark.soak) for each in EXTRAS[2:])])
def test_every_verb_shows_its_help_or_names_its_extra(run: Run, extra: str) -> None:
    verbs = [verb for group in GROUPS.values() for verb in group]
    said = run(extra, "-c", HELP.format(verbs=verbs))
    for verb in verbs:
        missing = verb in NEEDS and extra not in NEEDS[verb]
        assert f"left: {verb} {MissingExtraError.exit_code if missing else 0}\n" in said
        assert not missing or f"pip install 'cordee[{NEEDS[verb][0]}]'" in said.replace('"', "'")


def test_without_an_extra_a_layout_is_planned(run: Run) -> None:
    assert json.loads(run("", "-m", "cordee", "plan", "llama-3-8b", "--gpus", "8xH100", "--json"))
    assert "pip install 'cordee[server]'" in run("", "-m", "cordee", "up", code=MissingExtraError.exit_code)


@pytest.mark.soak
def test_with_the_server_alone_a_job_runs_and_is_listed(run: Run) -> None:
    try:
        run("server", "-m", "cordee", "up", "--slots", "1")
        said = run("server", "-m", "cordee", "run", "--gpus", "1", "--name", "one", "--follow", "--", "echo", "well")
        assert "well" in said
        for verb in (["jobs"], ["why", "one"], ["nodes"], ["queues"], ["cost"]):
            assert run("server", "-m", "cordee", *verb)
    finally:
        run("server", "-m", "cordee", "down", "--yes")


@pytest.mark.parametrize(
    ("extra", "module"),
    [("train", "cordee.storage.generations"), ("train", "cordee.train.settings"), ("server", "cordee.control.server")],
)
def test_the_rooms_of_an_extra_are_imported(run: Run, extra: str, module: str) -> None:
    run(extra, "-c", f"import {module}")

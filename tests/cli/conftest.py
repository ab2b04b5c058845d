"""Fixtures of the tests that call verbs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from verbs import Verb, code_of


@pytest.fixture
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide prices in the home of the person who runs the tests."""
    monkeypatch.setenv("CORDEE_HOME", str(tmp_path_factory.getbasetemp() / "no-home"))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Submit from an empty folder: jobs shall not get a copy of this repository."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("server") / "home"
    assert code_of("up", "--home", str(home), "--slots", "2", "--price-as", "H100") == 0
    yield home
    assert code_of("down", "--home", str(home)) == 0


@pytest.fixture
def verb(home: Path, capsys: pytest.CaptureFixture[str], elsewhere: None) -> Verb:
    def call(*words: str) -> str:
        own = words[: words.index("--")] if "--" in words else words
        code = code_of(*own, "--home", str(home), *words[len(own) :])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    return call

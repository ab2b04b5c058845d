"""Fixtures of the tests that call verbs."""

import pytest


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

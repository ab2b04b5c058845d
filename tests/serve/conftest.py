"""The tiny model and one server of llama.cpp, each made once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines_world import RunningEngine, running_llama

from cordee.demo import tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder with the tiny model, and `tiny.gguf` in it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.build(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """Return a server of llama.cpp that serves the tiny model as `tiny`."""
    with running_llama(tiny_folder / "tiny.gguf", tmp_path_factory.mktemp("slots")) as engine:
        yield engine

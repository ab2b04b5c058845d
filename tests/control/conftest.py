"""Fixtures of the control plane's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_scene import Api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path)
    yield api
    api.close()

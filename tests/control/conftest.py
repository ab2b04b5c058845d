"""Fixtures of the control plane's tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_bench import Bench
from api_scene import Api
from services_world import World


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path)
    yield api
    api.close()


@pytest.fixture
def world(api: Api) -> World:
    return World(api)


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", folder], check=False)
    if mounted.returncode != 0:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()

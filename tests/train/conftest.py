"""Fixtures of several files."""

import os
import subprocess

import pytest

from cordee.train.checkpoint.checkpointer import Checkpointer


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 32 MiB of its own."""
    at = tmp_path / "disk"
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(at)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small file system needs root and mount()")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.fixture
def make(tmp_path):
    """Checkpointers on one destination, closed at the end."""
    made = []

    def one(**options) -> Checkpointer:
        made.append(Checkpointer(str(tmp_path), rank=0, world_size=1, **options))
        return made[-1]

    yield one
    for checkpointer in made:
        checkpointer.close()

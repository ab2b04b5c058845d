"""What several of the tests here need."""

import os
import subprocess

import pytest


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

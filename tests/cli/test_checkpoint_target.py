"""Destinations of checkpoints are checked when a job is submitted."""

import os
import shutil
from pathlib import Path

import pytest

from cordee.cli.checkpoint_target import check_target
from cordee.errors import SpecError
from cordee.workload.spec import JobSpec


def spec(to: str, **more: object) -> JobSpec:
    return JobSpec.model_validate({"run": "true", "gpus": 1, "checkpoint": {"to": to}} | more)


def test_a_destination_must_be_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for to in ("new/deep", str(tmp_path), "s3://bucket/run", "/no/such/mount/of/this/machine"):
        check_target(spec(to), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="is a file, not a folder"):
        check_target(spec("file/run"), tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SpecError, match="cannot be written"):
        check_target(spec("new"), tmp_path)


def test_a_destination_needs_room_for_two_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=150_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    check_target(spec("run"), tmp_path)
    check_target(spec("run", model={"name": "no-such-model"}), tmp_path)
    with pytest.raises(SpecError, match=r"150 GB free, and two generations of .* need"):
        check_target(spec("run", model={"name": "llama-3.1-8b"}), tmp_path)

"""`cordee rehearse` on a real server with real ranks: one rank, a gang, and what goes wrong."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_story import Nursery, left_behind

from cordee.cli.main import main
from cordee.client import Client
from cordee.errors import NoServerError
from cordee.workload.spec import JobSpec

SCRIPT = Path(__file__).parents[1] / "train" / "rehearsed_script.py"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    nursery, folder = Nursery(), tmp_path / "home"
    pid = nursery.ask(home=str(folder), slots=2, env={}, kill_after_s=None)["pid"]
    yield folder
    try:
        with Client(folder) as client:
            client.down()
        nursery.ask(wait=pid)
    except NoServerError:
        pass
    nursery.close()
    for process in left_behind(tmp_path):
        process.kill()


def rehearsed(home: Path, fault: str, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Return the exit code of `cordee rehearse --json` and its answer."""
    to = str(home.parent / "checkpoints")
    command = [sys.executable, str(SCRIPT), fault]
    with pytest.raises(SystemExit) as left:
        main(["rehearse", "--home", str(home), "--checkpoint-to", to, "--json", "--live", *flags, "--", *command])
    assert isinstance(left.value.code, int)
    return left.value.code, json.loads(capsys.readouterr().out)


@pytest.mark.soak
def test_a_rehearsal_passes_to_the_bit_and_leaves_nothing_behind(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = rehearsed(home, "none", "--gpus", "1", "--steps", "2", "--replay", "2", capsys=capsys)
    assert (code, found["passed"], found["steps"]) == (0, True, 2), found
    assert found["why"] == "2 steps after the resume have the same losses to the bit" and found["notes"] == []
    assert min(found[name] for name in ("peak_bytes", "step_us", "save_us", "restart_us")) > 0
    assert not (home.parent / "checkpoints").exists()
    spec = JobSpec.from_flags(run=[sys.executable, str(SCRIPT), "none"], gpus="1").model_dump(mode="json")
    with Client(home) as client:
        assert [each.job_id for each in client.rehearsals()] == [found["job_id"]]
        seen = client.dry_run(spec | {"cwd": str(home.parent)})
        assert seen.estimate is not None and seen.estimate.save_us == found["save_us"]


@pytest.mark.soak
def test_a_gang_passes_and_each_fault_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = rehearsed(home, "gang", "--gpus", "2", capsys=capsys)
    assert (code, found["gpus"]) == (0, 2) and "same losses" in found["why"], found
    code, found = rehearsed(home, "gang forgets", "--gpus", "2", capsys=capsys)
    assert code == 1 and "another loss in step" in found["why"], found
    code, found = rehearsed(home, "ignores", "--gpus", "1", "--limit", "60s", capsys=capsys)
    assert code == 1 and "ignored: it did not leave within its grace period of 15 s" in found["why"], found
    assert not (home.parent / "checkpoints").exists()

"""Checkpoints of real torch ranks: bitwise resume, another world size, and deaths while saving."""

import json
import os
import sys
from pathlib import Path

import pytest

from cordee.telemetry.host import free_port
from forks import run

SCRIPT = Path(__file__).with_name("checkpoint_rank.py")
TIMEOUT_S = 200


def gang(world: int, folder: Path, act: str, env: dict[int, dict[str, str]] | None = None) -> list[tuple[int, list]]:
    """Run the ranks; exit code and the JSON lines of each."""
    port = free_port()
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    envs = [
        {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {}).get(rank, {})}
        for rank in range(world)
    ]
    results = []
    for code, out, err in run([[sys.executable, str(SCRIPT), str(folder), act]] * world, envs, TIMEOUT_S):
        sys.stderr.write(err[-3000:])
        results.append((code, [json.loads(line) for line in out.splitlines() if line[:1] == "{"]))
    return results


@pytest.mark.gang
def test_resume_is_bitwise_on_the_same_world_and_reshards_on_another(tmp_path: Path) -> None:
    first = gang(4, tmp_path, "uninterrupted")
    assert [code for code, _ in first] == [0] * 4
    whole = first[0][1][-1]
    assert all(lines[-1]["final"] == whole["final"] for _, lines in first)

    again = gang(4, tmp_path, "resume")
    assert [code for code, _ in again] == [0] * 4
    for _, lines in again:
        assert lines[-1]["step"] == 3 and lines[-1]["seen"] == 24
        assert lines[-1]["at_load"] == whole["at_save"]
        assert lines[-1]["final"] == whole["final"], "a resumed run ends with other weights"

    smaller = gang(2, tmp_path, "resume")
    assert [code for code, _ in smaller] == [0] * 2
    for _, lines in smaller:
        assert lines[-1]["world"] == 4 and lines[-1]["at_load"] == whole["at_save"]
        assert lines[-1]["back"] == [[0, [3], whole["at_start"]]] * 2, "one rank's damage takes all of them back"


@pytest.mark.gang
def test_a_death_while_saving_leaves_the_old_generation_for_all_ranks(tmp_path: Path) -> None:
    fault = gang(4, tmp_path, "faults", {2: {"CORDEE_TEST_KILL_AT": "part.before:2"}})
    assert [code for code, _ in fault] == [0, 0, 0, -9]
    told = fault[0][1][0]
    assert [step for step, _ in told["failures"]] == [2], "only the save whose uploader died may fail"
    assert [step for step, _ in fault[0][1][-1]["failures"]] == [2, 4]
    assert "signal 9" in fault[2][1][0]["failures"][0][1]

    again = gang(4, tmp_path, "resume")
    assert [code for code, _ in again] == [0] * 4
    for _, lines in again:
        assert lines[-1]["step"] == 3 and lines[-1]["at_load"] == told["digests"]["3"]

"""Two real ranks of torch.distributed, each a node of its own, measure links and storage together."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cordee.telemetry.host import free_port

pytest.importorskip("torch")

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
RANKS = 2


def start(port: int, rank: int, folder: Path, local: int) -> subprocess.Popen[str]:
    """Start one rank as torchrun does: by its environment."""
    where = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank % local)}
    there = where | {"LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = [sys.executable, "-m", "cordee.train.calibration", "together", "--to", str(folder), "--bytes", "65536"]
    return subprocess.Popen(argv, env=os.environ | there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def together(folder: Path, local: int) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each rank."""
    port = free_port()
    started = [start(port, rank, folder, local) for rank in range(RANKS)]
    said = [each.communicate(timeout=240) for each in started]
    return [(each.returncode, *words) for each, words in zip(started, said, strict=True)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("storage")
    (code, first, errors), (other_code, other, other_errors) = together(folder, local=1)
    assert code == other_code == 0, errors + other_errors
    assert not other and "Warning" not in errors, "the first rank speaks for all"
    return folder, [json.loads(line) for line in first.splitlines()]


def test_every_collective_is_timed_by_nodes_and_size(nodes: tuple[Path, list[dict[str, Any]]]) -> None:
    samples = [each for each in nodes[1] if "table" in each]
    assert {each["table"] for each in samples} == {f"{name} nodes" for name in OPERATIONS}
    for name in OPERATIONS:
        mine: list[Mapping[str, Any]] = [each for each in samples if each["table"] == f"{name} nodes"]
        assert [each["at"] for each in mine] == [[2.0, float(1 << power)] for power in (13, 16, 18, 20, 22, 24)]
        assert all(0 < each["p25_s"] <= each["seconds"] <= each["p75_s"] for each in mine)
        assert mine[-1]["seconds"] > mine[0]["seconds"], "16 MiB take longer than 8 KiB"


def test_what_is_hidden_and_storage_by_all_at_once_are_numbers(nodes: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = nodes
    numbers = {each["number"]: each["value"] for each in found if "number" in each}
    assert (numbers["ranks_together"], numbers["nodes_together"]) == (2, 2)
    assert 0 <= numbers["exposed_fraction"] <= 1
    for way in ("write", "read"):
        assert 0 < numbers[f"node_{way}_p95_bytes_per_s"] <= numbers[f"node_{way}_bytes_per_s"]
    assert not list(folder.iterdir()), "each rank removes its file"


def test_a_folder_that_a_rank_cannot_write_ends_all_ranks_with_the_reason(tmp_path: Path) -> None:
    from cordee.errors import InputError

    for code, out, errors in together(tmp_path / "nowhere", local=2):
        assert code == InputError.exit_code and not out
        assert errors.strip().splitlines()[-1].endswith("No such file or directory"), errors

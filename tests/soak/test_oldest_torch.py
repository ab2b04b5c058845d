"""The oldest torch that `needs.py` names: import, save, load, and a resume to the bit, in an environment of its own.

It downloads that torch (3 GB on Linux, with what it needs to be imported); CORDEE_OLD_PYTHON names a Python with one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cordee.telemetry.host import free_port
from cordee.train.torch_version import TORCH_MIN

ROOT = Path(__file__).parent.parent.parent
SCRIPT = str(ROOT / "tests" / "train" / "job_script.py")
WANTED = ".".join(map(str, TORCH_MIN))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if named := os.environ.get("CORDEE_OLD_PYTHON"):
        return named
    here = tmp_path_factory.mktemp("old")
    subprocess.run([sys.executable, "-m", "venv", str(here)], check=True)
    pip = [str(here / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch~={WANTED}.0", "-e", f"{ROOT}[train]"], check=True)
    return pip[0]


def run(python: str, out: Path, *args: str, world: int = 1) -> None:
    out.mkdir(exist_ok=True)
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("CORDEE_", "SLURM_"))}
    port = str(free_port())
    env = {**outside, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    command = [python, SCRIPT, "--out", str(out), *args]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world)
    ]
    assert [rank.wait(300) for rank in ranks] == [0] * world


def test_it_is_the_torch_that_is_named(python: str) -> None:
    said = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith(f"{WANTED}.")


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_resumed_ends_as_what_was_not(python: str, tmp_path: Path, world: int) -> None:
    whole, out, to = tmp_path / "whole", tmp_path / "out", str(tmp_path / "to")
    run(python, whole, world=world)
    run(python, out, "--to", to, "--steps", "31", "--every", "10", world=world)
    run(python, out, "--to", to, world=world)
    for rank in range(world):
        end, expected = (json.loads((folder / f"end{rank}.json").read_text()) for folder in (out, whole))
        varied = {"losses", "buffers"} if world > 1 else {"losses"}  # of a buffer rank 0's is kept, as in DDP
        assert {name: end[name] for name in end.keys() - varied} == {
            name: expected[name] for name in end.keys() - varied
        }
        assert len(end["losses"]) == 29 and end["losses"] == expected["losses"][31:]

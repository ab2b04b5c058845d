"""`benchmarks/checkpoint.py`, very small: every way gives the state back, and an adapter costs its own bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_way_gives_the_state_back_and_frozen_weights_are_stored_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "checkpoint.py", "--gb", "0.02", "--repeat", "1", "--ranks", "1", "--json"),
            *("--only", "memcpy,O_DIRECT and fsync,torch.save,dcp.save,dcp.async_save,cordee", "--folder", tmp_path),
        ],
        cwd=BENCHMARKS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (world,) = told["worlds"]
    assert world["bytes"] > 15e6
    for name, row in world["rows"].items():
        assert all(len(values) == 1 and values[0] >= 0 for values in row.values()), name
        assert {"stall_s", "durable_s", "cpu_s", "cold_load_s", "warm_load_s"} <= set(row), name
    assert world["lora"]["second_bytes"] < 0.05 * world["lora"]["first_bytes"]
    assert {each["what"].partition(":")[0] for each in told["targets"]} == {"1 rank", "LoRA"}

"""A small share of `benchmarks/faults.py`: what no other test injects, once each, with real processes and disks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# A zombie, a stale partial save, a power cut, two ranks that are killed before their deadline.
DATA = (6, 12, 23, 25)
# Clocks, a death in a replacement, shapes, late mutation.
MORE = (15, 16, 19, 21)
NEED_ROOT = {23}


@pytest.mark.gang
@pytest.mark.parametrize(
    "scenes", [pytest.param(DATA, id="data"), pytest.param(MORE, id="more", marks=pytest.mark.soak)]
)
def test_faults_leave_no_wrong_data_and_a_job_that_goes_on(tmp_path: Path, scenes: tuple[int, ...]) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "faults.py", "--json", "--times", "1", "--products", "cordee"),
            *("--only", ",".join(map(str, scenes)), "--folder", tmp_path),
        ],
        cwd=BENCHMARKS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # Its lines replay what failed.
    rows = {each["fault"]: each for each in json.loads(done.stdout)}
    assert set(rows) == set(scenes)
    for number, each in rows.items():
        if each["runs"] == 0:
            assert number in NEED_ROOT and "root" in each["reason"], each
        else:
            assert each["survived"] == each["runs"] == 1 and not each["wrong"], each

"""The limit that the system keeps: a cgroup that is ours alone, else RLIMIT_DATA."""

import subprocess
import sys
from pathlib import Path

import pytest

from cordee.serve.rag.enforce import limit_cgroup

LIMITED = """
import sys
from cordee.serve.rag.enforce import limit_data
limit_data(50_000_000)
kept = bytearray(10_000_000)
try:
    bytearray(200_000_000)
except MemoryError:
    print("refused")
"""


def world(folder: Path, *, inside: str, controller: bool = True) -> tuple[Path, Path]:
    (folder / "proc").mkdir()
    (folder / "proc" / "cgroup").write_text("4:memory:/old\n0::/service\n")
    (folder / "root" / "service").mkdir(parents=True)
    (folder / "root" / "service" / "cgroup.procs").write_text(inside)
    if controller:
        (folder / "root" / "service" / "memory.max").write_text("max\n")
    return folder / "root", folder / "proc"


def test_a_cgroup_that_is_ours_alone_is_limited(tmp_path: Path) -> None:
    root, proc = world(tmp_path, inside="7\n8\n")
    assert limit_cgroup(10**9, [7, 8, 9], root, proc) == ""
    assert (root / "service" / "memory.max").read_text() == "1000000000"


@pytest.mark.parametrize(
    ("inside", "controller", "why"),
    [("7\n8\n9\n", True, "1 other processes"), ("7\n", False, "no memory controller")],
)
def test_a_cgroup_of_others_is_left_alone(tmp_path: Path, inside: str, controller: bool, why: str) -> None:
    root, proc = world(tmp_path, inside=inside, controller=controller)
    assert why in limit_cgroup(10**9, [7, 8], root, proc)
    if controller:
        assert (root / "service" / "memory.max").read_text() == "max\n"
    (proc / "cgroup").write_text("4:memory:/old\n")
    assert "no cgroups" in limit_cgroup(10**9, [7, 8], root, proc)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_process_gets_no_more_than_its_limit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    words = [sys.executable, "-m", "cordee.serve.rag.limited", "300000000", sys.executable, "-c"]
    fails = subprocess.run([*words, "bytearray(500_000_000)"], capture_output=True, text=True, check=False)
    assert fails.returncode == 1 and "MemoryError" in fails.stderr
    assert subprocess.run([*words, "bytearray(50_000_000)"], check=False).returncode == 0

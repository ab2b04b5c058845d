"""The limit that the system keeps: a cgroup that is ours alone, else RLIMIT_DATA."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rag_world import numbered

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

SERVING = """
import asyncio, sys
from pathlib import Path
from cordee.serve.policy.rag_forecast import MemoryPlan
from cordee.serve.rag.index import RagIndex
from cordee.serve.rag.setup import RagOptions, running

async def work():
    index, said = RagIndex(Path(sys.argv[1])), []
    size = max(each.size_bytes for each in index.catalog.partitions())
    options = RagOptions("http://127.0.0.1:9", memory_bytes=10**9)
    plan = MemoryPlan(1, 0, 2 * size, 0, 0.0, ())
    async with running(index, options, plan, None, "kb", lambda *change: said.append(change)) as rag:
        print(said[0][0], said[0][3])
        await rag.retrieve("v 3", 1)
        try:
            bytearray(2_000_000_000)
        except MemoryError:
            print("refused")
        found = await rag.retrieve("v 7", 1)
        print(found.passages[0][0].text)

asyncio.run(work())
"""
"""A process with a knowledge base that has reserved too much, and answers the next question."""


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


def test_beside_version_1_there_is_no_controller_to_limit_with(tmp_path: Path) -> None:
    root, proc = world(tmp_path, inside="7\n", controller=False)
    (root / "unified").mkdir()
    (root / "service").rename(root / "unified" / "service")
    assert "no memory controller" in limit_cgroup(10**9, [7], root, proc)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_knowledge_base_that_wants_too_much_is_refused_memory_and_serves_on(tmp_path: Path) -> None:
    index, here = numbered(tmp_path), Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SERVING, str(index.folder)], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith(("limit RLIMIT_DATA keeps this process", "limit the cgroup keeps"))
    assert (second, third) == ("refused", "passage v 7")


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_process_gets_no_more_than_its_limit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    words = [sys.executable, "-m", "cordee.serve.rag.limited", "300000000", sys.executable, "-c"]
    fails = subprocess.run([*words, "bytearray(500_000_000)"], capture_output=True, text=True, check=False)
    assert fails.returncode == 1 and "MemoryError" in fails.stderr
    assert subprocess.run([*words, "bytearray(50_000_000)"], check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_an_engine_does_not_outlive_a_server_that_is_killed() -> None:
    script = """
import subprocess, sys
words = [sys.executable, "-m", "cordee.serve.rag.limited", "0", sys.executable, "-c"]
child = subprocess.Popen([*words, "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    end = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.02)

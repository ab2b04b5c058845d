"""CPU and memory of this process, read from folders laid out as the kernel documents them."""

import os
from pathlib import Path

import pytest

from cordee.telemetry import host

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    write(tmp_path / "proc/meminfo", f"MemTotal:  {512 * GIB // 1024} kB\nMemFree: 1 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limits(machine: Path) -> tuple[int, int | None]:
    folders = machine / "proc", machine / "cgroup"
    return host.cpu_milli(*folders), host.memory_bytes(*folders)


def test_without_limits_it_is_the_machine(machine: Path) -> None:
    assert limits(machine) == (64_000, 512 * GIB)
    write(machine / "proc/self/cgroup", "0::/user.slice/me\n")
    write(machine / "cgroup/user.slice/me/cpu.max", "max 100000\n")
    write(machine / "cgroup/user.slice/me/memory.max", "max\n")
    assert limits(machine) == (64_000, 512 * GIB)


def test_the_lowest_limit_of_the_groups_above_holds(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/user.slice/me\n")
    write(machine / "cgroup/user.slice/cpu.max", "650000 100000\n")
    write(machine / "cgroup/user.slice/me/cpu.max", "800000 100000\n")
    write(machine / "cgroup/user.slice/me/memory.max", f"{64 * GIB}\n")
    write(machine / "cgroup/user.slice/memory.max", f"{128 * GIB}\n")
    assert limits(machine) == (6_500, 64 * GIB)


def test_a_container_sees_its_own_part_at_the_root(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/kubepods/pod1/c1\n")
    write(machine / "cgroup/cpu.max", "1600000 100000\n")
    write(machine / "cgroup/memory.max", f"{96 * GIB}\n")
    assert limits(machine) == (16_000, 96 * GIB)


def test_version_1_has_a_tree_for_each_controller(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "5:memory:/job\n3:cpu,cpuacct:/job\n0::/\n")
    write(machine / "cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "250000\n")
    write(machine / "cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    write(machine / "cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write(machine / "cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    write(machine / "cgroup/memory/job/memory.limit_in_bytes", f"{8 * GIB}\n")
    write(machine / "cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert limits(machine) == (2_500, 8 * GIB)


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert host.cpu_milli(tmp_path, tmp_path) == 1000 * len(os.sched_getaffinity(0))
    assert host.memory_bytes(tmp_path, tmp_path) is None

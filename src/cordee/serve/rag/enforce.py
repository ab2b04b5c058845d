"""The limit of memory that the system keeps: the process's own cgroup, or RLIMIT_DATA where that is not ours to set.

A cgroup counts all memory of its processes, mapped files too. It is set only if no other process is in it: a limit for
strangers is none of our business. RLIMIT_DATA counts anonymous memory of one process; partitions are mapped files, and
are counted by `memory.py` itself.
"""

import os
import resource
from collections.abc import Collection
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
HEADROOM = 1.25
"""Anonymous memory that a process may have, over what it was planned with."""


def limit_cgroup(budget_bytes: int, own: Collection[int], root: Path = CGROUPS, proc: Path = Path("/proc/self")) -> str:
    """Limit our own cgroup (version 2); return why not, "": it is done.

    Args:
        budget_bytes: of all processes together.
        own: ids of this process and of those that it has started.
        root: where cgroups are mounted.
        proc: this process's folder in /proc.
    """
    try:
        path = next(line[3:] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return "this system has no cgroups of version 2"
    # Beside version 1, version 2 is mounted one folder below.
    tree = root / "unified" if (root / "unified").is_dir() else root
    folder = tree / path.lstrip("/")
    try:
        inside = {int(line) for line in (folder / "cgroup.procs").read_text().split()}
        if strangers := inside - set(own):
            return f"{len(strangers)} other processes are in the cgroup {path}"
        if not (folder / "memory.max").exists():
            return f"the cgroup {path} has no memory controller"
        (folder / "memory.max").write_text(str(budget_bytes))
    except (OSError, ValueError) as error:
        return f"the cgroup {path} cannot be limited: {error}"
    return ""


def limit_data(more_bytes: int) -> int:
    """Limit this process's anonymous memory to what it has now and `more_bytes`; return the limit."""
    limit = data_bytes() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


def data_bytes(pid: int | None = None) -> int:
    """Return what RLIMIT_DATA counts of a process, used or not; 0: this system does not say."""
    return _status("VmData", pid)


def resident_bytes(pid: int | None = None) -> int:
    """Return the anonymous memory that a process really has; 0: this system does not say."""
    return _status("RssAnon", pid)


def process_cpu_s(pid: int) -> float:
    """Return the processor's seconds that a process has used; 0: this system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def available_bytes() -> int:
    """Return the memory that new processes of this machine can have."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _status(name: str, pid: int | None) -> int:
    try:
        for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0

"""CPU and memory that this process may use: the machine's, within its affinity and its control groups. A free port."""

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Below the ephemeral range, so that no outgoing connection of another program takes the port before it is used.
_PORTS, _TRIES = range(20_000, 30_000), 100
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a huge number where no limit is set


def cpu_milli(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the thousandths of CPU cores that this process may use."""
    quotas = [quota for folder in _folders("cpu", proc, cgroups) if (quota := _quota_milli(folder)) is not None]
    return min([1000 * len(os.sched_getaffinity(0)), *quotas])


def memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the host memory that this process may use; None if the system does not say."""
    limits = [
        int(text)
        for folder in _folders("memory", proc, cgroups)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name)).isdecimal() and int(text) < _UNLIMITED_BYTES
    ]
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(1024 * int(line.split()[1]))
    return min(limits, default=None)


def free_port(host: str = "") -> int:
    """Return a port at which a process may listen soon.

    Raises:
        OSError: none was found.
    """
    for _ in range(_TRIES):
        port = random.choice(_PORTS)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among {_TRIES} tries in {_PORTS.start}-{_PORTS.stop - 1}")


def _folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders whose limits hold for this process: its control group's, and those above it.

    Version 2 has one tree, whose line begins with `0::`; version 1 has a tree for each controller. A container often
    sees only its own part of the tree, at the root, while the line names its place in the whole tree.
    """
    for line in _text(proc / "self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            root = cgroups
        elif controller in names.split(","):
            root = next((each for each in (cgroups / names, cgroups / controller) if each.is_dir()), cgroups)
        else:
            continue
        inner = root / path.strip("/")
        while inner != root and inner.is_relative_to(root):
            yield inner
            inner = inner.parent
        yield root


def _quota_milli(folder: Path) -> int | None:
    """Return the quota of one control group, in thousandths of a core; None without one."""
    words = _text(folder / "cpu.max").split() or [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None  # "max", or -1 in version 1
    return max(1, 1000 * int(words[0]) // int(words[1]))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

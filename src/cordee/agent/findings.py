"""Findings of a node's examination: of its host here, of its GPUs in `gpus.py`, of both at work in `probes.py`."""

import ctypes
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cordee.units import US_PER_S, format_bytes, format_latency

State = Literal["ok", "warn", "bad"]

GIB = 1 << 30
FILES_MIN, FILES_WARN = 1024, 65_536
SHM_MIN, SHM_WARN = 64 << 20, GIB  # 64 MiB is what a container has by default: too little for NCCL and data loaders
DISK_MIN, DISK_WARN = GIB, 10 * GIB
MEMLOCK_WARN = GIB  # RDMA pins its buffers
CLOCK_WARN_US = 100_000
WRITE_WARN = 200_000_000  # bytes a second of a checkpoint's destination
PROBE_BYTES = 64 << 20
KERNEL_LOG = Path("/dev/kmsg")
XIDS = {
    48: "double-bit memory error", 62: "micro-controller halted", 63: "row remapped", 64: "row remapper failed",
    74: "NVLink error", 79: "fallen off the bus", 92: "many single-bit errors", 94: "contained memory error",
    95: "uncontained memory error", 119: "GSP does not answer", 120: "GSP error", 140: "unrecovered ECC error",
}  # fmt: skip
"""Xids that name the machine; those that a program causes (13, 31, 43, 45) are left out."""

_XID = re.compile(r"NVRM: Xid \(PCI:[0-9a-f]+:([0-9a-f]+)[:.0-9a-f]*\): (\d+)", re.IGNORECASE)
_ERROR = 5  # adjtimex: the clock is not synchronised
_PACK = 208  # bytes of the kernel's struct timex, rounded up


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of an examination.

    Attributes:
        check: what was looked at.
        figure: what was found.
        expected: what should have been.
        hint: what to do, where the state is not ok.
    """

    check: str
    state: State
    figure: str
    expected: str = ""
    hint: str = ""


def host_findings(folder: Path) -> Iterator[Finding]:
    """Yield the findings of the host: limits, shared memory, the disk of a folder, the clock."""
    yield limit("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES_MIN, FILES_WARN, "nofile", str)
    yield limit(
        "locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], 0, MEMLOCK_WARN, "memlock", format_bytes
    )
    yield room("/dev/shm", Path("/dev/shm"), SHM_MIN, SHM_WARN, "docker run --shm-size 16g, or a larger tmpfs")
    yield room(f"disk of {folder}", folder, DISK_MIN, DISK_WARN, "free some space, or name another folder: --to")
    yield clock()


def limit(name: str, soft: int, least: int, enough: int, ulimit: str, text: Callable[[int], str]) -> Finding:
    """Return the finding of one of the process's limits."""
    figure = "unlimited" if soft == resource.RLIM_INFINITY else text(soft)
    state: State = "ok" if soft == resource.RLIM_INFINITY or soft >= enough else "warn" if soft >= least else "bad"
    hint = f"raise {ulimit} in /etc/security/limits.conf, or LimitNOFILE= and LimitMEMLOCK= of the unit"
    return Finding(name, state, figure, f"{text(enough)} or more", "" if state == "ok" else hint)


def room(name: str, folder: Path, least: int, enough: int, hint: str) -> Finding:
    """Return the finding of the free bytes below a folder."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(name, "bad", f"cannot be read: {error.strerror}", hint=hint)
    state: State = "ok" if free >= enough else "warn" if free >= least else "bad"
    return Finding(
        name, state, f"{format_bytes(free)} free", f"{format_bytes(enough)} or more", hint if state != "ok" else ""
    )


def clock() -> Finding:
    """Return whether the kernel's clock is synchronised, and the largest error that it claims."""
    hint = "start chronyd or systemd-timesyncd: leases and times of reports rest on it"
    timex = ctypes.create_string_buffer(_PACK)
    try:
        code = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        return Finding("clock", "warn", "unknown on this system", "synchronised", hint)
    error_us = int.from_bytes(timex.raw[24:32], "little", signed=True)
    if code in (-1, _ERROR):
        return Finding("clock", "warn", "not synchronised, says the kernel", "synchronised", hint)
    state: State = "ok" if error_us < CLOCK_WARN_US else "warn"
    figure = f"synchronised within {format_latency(error_us / US_PER_S)}"
    return Finding("clock", state, figure, format_latency(CLOCK_WARN_US / US_PER_S), "" if state == "ok" else hint)


def write_speed(folder: Path, size: int = PROBE_BYTES) -> Finding:
    """Write, sync and delete a file in a folder; return the finding of its speed."""
    name = f"checkpoints to {folder}"
    path = folder / f".cordee-doctor.{os.getpid()}"
    block = os.urandom(1 << 20)  # a file system that compresses gains nothing from it
    try:
        folder.mkdir(parents=True, exist_ok=True)
        start_s = time.monotonic()
        with path.open("wb", buffering=0) as file:
            for _ in range(size // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        rate = size / max(1e-6, time.monotonic() - start_s)
    except OSError as error:
        hint = "give a folder that this user can write to: --to"
        return Finding(name, "bad", f"cannot be written: {error.strerror}", hint=hint)
    finally:
        with suppress(OSError):
            path.unlink()
    state: State = "ok" if rate >= WRITE_WARN else "warn"
    hint = "" if state == "ok" else "a save takes its size over this: use a nearer level, or fewer checkpoints"
    figure = f"{format_bytes(rate)}/s, {format_bytes(size)} written and synced"
    return Finding(name, state, figure, f"{format_bytes(WRITE_WARN)}/s or more", hint)


def xids(buses: Iterable[int], kernel_log: Path = KERNEL_LOG) -> dict[int, tuple[int, int]] | None:
    """Return the last Xid that names the machine and their number, by PCI bus; None if the kernel's log is closed."""
    try:
        fd = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: dict[int, tuple[int, int]] = {}
    try:
        for line in _lines(fd):
            match = _XID.search(line)
            if match and int(match[2]) in XIDS:
                bus = int(match[1], 16)
                found[bus] = int(match[2]), found.get(bus, (0, 0))[1] + 1
    finally:
        os.close(fd)
    return {bus: each for bus, each in found.items() if bus in set(buses)}


def _lines(fd: int) -> Iterator[str]:
    """Yield the records that the kernel's log has now."""
    while True:
        try:
            record = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            continue  # EPIPE: records were overwritten meanwhile
        if not record:
            return
        yield from record.decode(errors="replace").splitlines()


def by_gpu(found: Iterable[tuple[int, Finding]]) -> Iterator[Finding]:
    """Yield findings of single GPUs, equal ones in one line."""
    indices: dict[Finding, list[int]] = {}
    for index, finding in found:
        indices.setdefault(finding, []).append(index)
    for finding, gpus in indices.items():
        names = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {', '.join(map(str, gpus))}"
        yield replace(finding, check=f"{finding.check} of {names}")

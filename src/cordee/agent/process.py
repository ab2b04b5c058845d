"""Processes of an attempt: start them, find all of them by their tag, and signal exactly these.

The tag is CORDEE_ATTEMPT in the environment, which children inherit. torchrun puts its workers in sessions of
their own, so groups and sessions do not help; the agent is a child subreaper, so that no double fork escapes it.
"""

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

TAG = "CORDEE_ATTEMPT"
NODE = "CORDEE_NODE"
PROC = Path("/proc") if Path("/proc/self/environ").exists() else None

_PR_SET_CHILD_SUBREAPER = 36
_PF_KTHREAD = 0x00200000
_EXEC_LOOKS, _EXEC_PAUSE_S = 50, 0.002
pause = time.sleep
"""Between two looks at a process that begins a program."""
_SHELLS = {"sh", "dash", "bash", "zsh", "ksh", "ash", "busybox"}


class Process(NamedTuple):
    """A process, distinguished from a later one with the same pid by its start time (in the system's unit)."""

    pid: int
    started: float


class _Entry(NamedTuple):
    process: Process
    parent: int
    running: bool
    worked: float  # processor time of all its threads, in the system's unit


class Child(Protocol):
    """A process that this one has started (`subprocess.Popen`, or a test's)."""

    pid: int
    returncode: int | None


class Processes(Protocol):
    """The processes of a machine: this module, or a test's table."""

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, output: int) -> Child:
        """Start a process."""
        ...

    def reap(self) -> list[tuple[int, int]]:
        """Return the pids and exit codes of children that have exited."""
        ...

    def find(self, tag: str, known: Iterable[Process] = (), *, node: str | None = None) -> set[Process]:
        """Return the running processes of an attempt."""
        ...

    def identify(self, pid: int) -> Process | None:
        """Return the process that has this pid now."""
        ...

    def has(self, process: Process, name: str) -> bool:
        """Return whether a variable of this name is in the environment of a process."""
        ...

    def worked(self, process: Process) -> float:
        """Return the processor time that a process has used."""
        ...

    def send(self, process: Process, number: signal.Signals) -> bool:
        """Signal a process; return False if it is gone."""
        ...

    def notice_targets(self, pid: int) -> set[Process]:
        """Return the processes that get a direct child's SIGTERM."""
        ...


def become_subreaper() -> bool:
    """Make this process the parent of orphaned descendants; return False if the system does not support it."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def spawn(argv: Sequence[str], *, env: Mapping[str, str], cwd: str, output: int) -> "subprocess.Popen[bytes]":
    """Start a process in its own session. The caller reaps it, and must keep the object until then.

    Raises:
        OSError: the program or the folder does not exist, or may not be executed.
    """
    return subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )


def reap() -> list[tuple[int, int]]:
    """Return the pids and exit codes (negative: the signal) of the children that have exited since the last call."""
    exits: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exits
        if pid == 0:
            return exits
        exits.append((pid, os.waitstatus_to_exitcode(status)))


def find(tag: str, known: Iterable[Process] = (), *, node: str | None = None) -> set[Process]:
    """Return every running process with the tag, the `known` ones that still run, and all their descendants.

    A program may overwrite its environment (setproctitle does): it is then found by `known` or by descent.

    Args:
        tag: the tag of an attempt.
        known: processes of the attempt whose environment is not checked.
        node: find only processes of this node; the attempt's other nodes may be on the same machine.
    """
    entries = {entry.process.pid: entry for entry in _table()}
    mine = {p.pid for p in known if p.pid in entries and entries[p.pid].process == p}
    mine |= {pid for pid in entries if pid not in mine and _is_tagged(pid, tag, node)}
    children = _children(entries.values())
    stack = list(mine)
    while stack:
        for child in children.get(stack.pop(), ()):
            if child not in mine:
                mine.add(child)
                stack.append(child)
    mine.discard(os.getpid())
    return {entries[pid].process for pid in mine if entries[pid].running}


def identify(pid: int) -> Process | None:
    """Return the process that has this pid now."""
    if PROC is None:
        return next((entry.process for entry in _table() if entry.process.pid == pid), None)
    entry = _stat(pid)
    return entry.process if entry else None


def has(process: Process, name: str) -> bool:
    """Return whether a variable of this name is in the environment of a process."""
    return any(each.startswith(f"{name}=".encode()) for each in _environ(process.pid))


def worked(process: Process) -> float:
    """Return the processor time that a process has used, in the system's unit."""
    entry = _stat(process.pid) if PROC else next((each for each in _table() if each.process == process), None)
    return entry.worked if entry else 0.0


def send(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this process; return False if it is gone."""
    try:
        if PROC is None or not hasattr(os, "pidfd_open"):
            if identify(process.pid) != process:
                return False
            os.kill(process.pid, number)
            return True
        handle = os.pidfd_open(process.pid)
        try:
            # A pidfd refers to one process only, so a check after opening it still holds when the signal is sent.
            if identify(process.pid) != process:
                return False
            signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
    except ProcessLookupError:
        return False
    return True


def notice_targets(pid: int) -> set[Process]:
    """Return the processes that get a direct child's SIGTERM: the child itself, or the program that its shell runs.

    A shell without a trap for SIGTERM would die and leave its program without notice, so its children get the signal
    instead; the shell then ends with its program's exit code. In a pipeline only processes that handle SIGTERM
    get it, if there are any: `tee` shall stay until the program's last line.
    """
    entries = {entry.process.pid: entry for entry in _table()}
    children = _children(entry for entry in entries.values() if entry.running)
    leaves: list[int] = []
    stack = [pid]
    while stack:
        each = stack.pop()
        if children.get(each) and _is_shell(each) and not _handles_sigterm(each):
            stack += children[each]
        elif each in entries:
            leaves.append(each)
    handling = [leaf for leaf in leaves if _handles_sigterm(leaf)]
    return {entries[leaf].process for leaf in handling or leaves}


def _children(entries: Iterable[_Entry]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in entries:
        children.setdefault(entry.parent, []).append(entry.process.pid)
    return children


def _is_shell(pid: int) -> bool:
    if PROC is None:
        return False
    try:
        return (PROC / str(pid) / "comm").read_text().strip() in _SHELLS
    except OSError:
        return False


def _handles_sigterm(pid: int) -> bool:
    if PROC is None:
        return False
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _table() -> Iterable[_Entry]:
    if PROC is None:
        return _portable_table()
    pids = (int(name) for name in os.listdir(PROC) if name.isdigit())  # noqa: PTH208
    return [entry for entry in map(_stat, pids) if entry is not None]


def _stat(pid: int) -> _Entry | None:
    assert PROC is not None
    try:
        # The name in parentheses may contain any character; only numbers follow the last parenthesis (proc(5)).
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20:
        return None
    worked = float(fields[11]) + float(fields[12])
    return _Entry(Process(pid, float(fields[19])), int(fields[1]), fields[0] not in (b"Z", b"X"), worked)


def _is_tagged(pid: int, tag: str, node: str | None) -> bool:
    environ = _environ(pid)
    return f"{TAG}={tag}".encode() in environ and (node is None or f"{NODE}={node}".encode() in environ)


def _environ(pid: int) -> list[bytes]:
    if PROC is None:
        return _portable_environ(pid)
    for look in range(_EXEC_LOOKS):
        try:
            found = (PROC / str(pid) / "environ").read_bytes()
        except OSError:
            return []
        if found or not _begins_program(pid):
            break
        if look + 1 < _EXEC_LOOKS:
            pause(_EXEC_PAUSE_S)
    return found.split(b"\0")


def _begins_program(pid: int) -> bool:
    """Return whether a process is inside exec(2): for a moment it has neither arguments nor an environment to show.

    A thread of the kernel and a dead process never have, and a program without an environment has arguments.
    """
    assert PROC is not None
    try:
        state, *fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return (
            state not in (b"Z", b"X")
            and not int(fields[5]) & _PF_KTHREAD
            and not (PROC / str(pid) / "cmdline").read_bytes()
        )
    except (OSError, ValueError, IndexError):
        return False


def _psutil() -> Any:
    return importlib.import_module("psutil")  # needed only on systems without /proc


def _portable_table() -> Iterable[_Entry]:
    psutil = _psutil()
    for each in psutil.process_iter(["pid", "ppid", "create_time", "status", "cpu_times"]):
        info = each.info
        running = info["status"] != psutil.STATUS_ZOMBIE
        worked = sum(info["cpu_times"][:2]) if info["cpu_times"] else 0.0
        yield _Entry(Process(info["pid"], info["create_time"] or 0.0), info["ppid"] or 0, running, worked)


def _portable_environ(pid: int) -> list[bytes]:
    psutil = _psutil()
    try:
        return [f"{name}={value}".encode() for name, value in psutil.Process(pid).environ().items()]
    except (psutil.Error, OSError):
        return []

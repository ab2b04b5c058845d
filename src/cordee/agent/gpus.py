"""GPUs as NVML reports them, or CPU slots in their place; marks those that other processes use.

A GPU is unavailable if a process that is not Cordee's uses it, if another server's agent has locked it, or if this
agent's own CUDA_VISIBLE_DEVICES leaves it out.
"""

import ctypes
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from cordee.errors import MissingExtraError

SLOT = "slot"
LOOK_S = 2.0  # between two checks of the processes on the GPUs


class Devices:
    """The GPUs or slots of this node.

    Attributes:
        gpu_name: the driver's name of the GPUs, or `slot`.
        count: the number of GPUs or slots.
        says: one sentence that names their source.
        real: whether they are GPUs, not slots.
        next_s: monotonic time of the next `look`, since other processes may take and release them.
    """

    def __init__(self, gpu_name: str, count: int, says: str) -> None:
        self.gpu_name = gpu_name
        self.count = count
        self.says = says
        self.real = False
        self.next_s = 0.0
        self._seen: tuple[int, ...] | None = None  # the unavailable ones at the last look

    def unavailable(self, is_ours: Callable[[int], bool]) -> tuple[int, ...]:
        """Return the indices of GPUs in use by others; `is_ours` says whether this agent started a pid."""
        return ()

    def release(self) -> None:
        """Release the locks that `unavailable` took."""

    def look(self, ours: Container[int]) -> tuple[int, ...] | None:
        """Return the indices of unavailable GPUs, or None if they have not changed; `ours` are the agent's own pids."""
        self.next_s = time.monotonic() + LOOK_S
        before, self._seen = self._seen, self.unavailable(ours.__contains__)
        return None if before == self._seen else self._seen


class _NvmlDevices(Devices):
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]
        self._names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in self._handles]
        self._locks: dict[str, int] = {}
        self._visible = _visible(os.environ.get("CUDA_VISIBLE_DEVICES"), self._uuids)
        common = Counter(self._names).most_common(1)[0][0]
        super().__init__(common, len(self._handles), f"{len(self._handles)} GPUs ({common}), from NVML")
        self.real = True

    def unavailable(self, is_ours: Callable[[int], bool]) -> tuple[int, ...]:
        return tuple(index for index in range(self.count) if not self._free(index, is_ours))

    def _free(self, index: int, is_ours: Callable[[int], bool]) -> bool:
        # A node has one GPU name: estimates would not hold for other models in the same machine.
        if index not in self._visible or self._names[index] != self.gpu_name:
            return False
        if not self._locked(self._uuids[index]):
            return False
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[index])
        except self._nvml.NVMLError_NotSupported:
            return True
        except self._nvml.NVMLError:
            return False  # for instance a lost GPU
        return all(is_ours(process.pid) for process in running)

    def release(self) -> None:
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _locked(self, uuid: str) -> bool:
        if uuid not in self._locks:
            lock = lock_file(Path(os.environ.get("TMPDIR", "/tmp")) / f"cordee-gpu-{uuid}.lock")
            if lock is None:
                return False
            self._locks[uuid] = lock
        return True


def _visible(wanted: str | None, uuids: list[str]) -> frozenset[int]:
    """Return the indices that CUDA_VISIBLE_DEVICES names, by index or by the prefix of a UUID; all if it is unset."""
    if wanted is None:
        return frozenset(range(len(uuids)))
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    named = {int(word) for word in words if word.isdecimal()}
    return frozenset(i for i, uuid in enumerate(uuids) if i in named or uuid.startswith(tuple(set(words) - {"GPU-"})))


def lock_file(path: Path) -> int | None:
    """Take an exclusive lock that lasts as long as this process; return None if another process has it.

    Returns:
        A file descriptor to keep.
    """
    try:
        # O_CREAT fails on another user's file in a sticky /tmp; a lock needs no write permission.
        fd = os.open(path, os.O_RDONLY if path.exists() else os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def discover(slots: int | None) -> Devices:
    """Return this node's GPUs, or `slots` CPU slots; without either, one slot per core.

    Raises:
        MissingExtraError: there is a driver, but no library to query it.
    """
    if slots is not None:
        return Devices(SLOT, slots, f"{slots} CPU slots, as asked for")
    nvml = _nvml()
    if nvml is not None and nvml.nvmlDeviceGetCount() > 0:
        return _NvmlDevices(nvml)
    cores = os.cpu_count() or 1
    return Devices(SLOT, cores, f"{cores} CPU slots, one per core: no NVIDIA driver was found")


def _nvml() -> Any | None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # cheaper than importing the binding where there is no driver
    except OSError:
        return None
    try:
        import pynvml
    except ImportError as error:
        raise MissingExtraError(
            "this machine has an NVIDIA driver, but nvidia-ml-py is not installed",
            hint="pip install 'cordee[server]', or give --slots N to use CPU slots",
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

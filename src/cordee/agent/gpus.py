"""GPUs as NVML reports them, or CPU slots in their place; marks those that other processes use.

A GPU is unavailable if it is sick (`health.py`), if a process that is not Cordee's uses it, if another server's agent
has locked it, or if this agent's own CUDA_VISIBLE_DEVICES leaves it out.
"""

import ctypes
import fcntl
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cordee.agent.clock import monotonic_s
from cordee.agent.findings import KERNEL_LOG, XIDS, Finding, by_gpu, xids
from cordee.agent.health import sickness, slow_clocks
from cordee.agent.mig import MigDevices, MigForbiddenError, MigMode
from cordee.agent.nvlink import fabric_of, island_gpus
from cordee.errors import MissingExtraError
from cordee.events import Lease, MigGpus
from cordee.units import format_bytes, plural

SLOT = "slot"
LOOK_S = 2.0  # between two checks of the processes on the GPUs
MEMORY_IN_USE = 2 << 30  # bytes; the driver itself keeps less
HEALTH_S = 30.0  # between two checks of their health: a change is an event in the log, and temperatures flap


class GpuSample(NamedTuple):
    """The state of one GPU by its driver; a counter that it does not have is 0. Energy is since the driver's load."""

    busy: float  # fraction of the last moments in which a kernel ran: NVML's "utilisation"
    memory_bytes: int
    power_mw: int
    energy_mj: int


class Devices:
    """The GPUs or slots of this node.

    Attributes:
        gpu_name: the driver's name of the GPUs, or `slot`.
        count: the number of GPUs or slots.
        says: one sentence that names their source.
        real: whether they are GPUs, not slots.
        islands: GPUs of one NVLink island; 0: all of them.
        fabric: identity of an island that spans nodes; "" without one.
        driver: the driver's version; "" for slots.
        next_s: monotonic time of the next `look`, since other processes may take and release them.
        others: GPUs that could not be leased when they were last looked at.
        mig_mode: what an operator lets the agent do with MIG instances.
        failed: why GPUs failed a preflight, by index; they are not offered until the agent starts again.
    """

    def __init__(self, gpu_name: str, count: int, says: str) -> None:
        self.gpu_name = gpu_name
        self.count = count
        self.says = says
        self.real = False
        self.islands = 0
        self.fabric = ""
        self.driver = ""
        self.next_s = 0.0
        self.others: frozenset[int] = frozenset()
        self.mig_mode: MigMode = "fixed"
        self.failed: dict[int, str] = {}

    def mig(self) -> MigGpus | None:
        """Return the GPUs whose MIG instances may be leased."""
        return None

    def visible(self, lease: Lease) -> str:
        """Return CUDA_VISIBLE_DEVICES of a lease; a MIG instance is made if need be.

        Raises:
            MigError: the instance cannot be had.
        """
        return ",".join(map(str, lease.gpus)) if self.real else ""

    def unavailable(self, is_ours: Callable[[int], bool]) -> dict[int, str]:
        """Return why GPUs cannot be leased, by index; `is_ours` says whether this agent started a pid."""
        return {}

    def release(self) -> None:
        """Release the locks that `unavailable` took."""

    def findings(self, kernel_log: Path = KERNEL_LOG) -> Iterator[Finding]:
        """Yield what the driver says of each GPU: health, Xids in the kernel's log, clocks, memory in use."""
        yield Finding("driver", "ok", self.says)

    def preflight(self, gpus: Sequence[int]) -> str:
        """Return why ranks should not start on one of these GPUs; "" if they can. It takes no noticeable time."""
        return ""

    def crowded(self, gpus: Sequence[int]) -> dict[int, str]:
        """Return why GPUs that ranks are to have for themselves are not free, by index."""
        return {}

    def sample(self, gpus: Sequence[int]) -> dict[int, GpuSample]:
        """Return what the driver says of these GPUs, by index; nothing for slots, and for a GPU that is lost."""
        return {}

    def look(self, ours: Container[int]) -> dict[int, str]:
        """Return why GPUs cannot be leased, by index; `ours` are the agent's own pids."""
        self.next_s = monotonic_s() + LOOK_S
        found = self.failed | self.unavailable(ours.__contains__)
        self.others = frozenset(found)
        return found


class _NvmlDevices(Devices):
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]
        self._names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in self._handles]
        self._locks: dict[str, int] = {}
        self._visible = _visible(os.environ.get("CUDA_VISIBLE_DEVICES"), self._uuids)
        self._sick: dict[int, str] = {}
        self._health_s = 0.0  # monotonic time of the next check
        common = Counter(self._names).most_common(1)[0][0]
        super().__init__(common, len(self._handles), f"{len(self._handles)} GPUs ({common}), from NVML")
        self.real = True
        self.islands, self.fabric = island_gpus(nvml, self._handles), fabric_of(nvml, self._handles)
        self.driver = _text(nvml.nvmlSystemGetDriverVersion())
        self._cut = MigDevices(nvml, self._handles)

    def mig(self) -> MigGpus | None:
        return self._cut.seen(self.mig_mode)

    def visible(self, lease: Lease) -> str:
        if lease.instance is not None:
            try:
                return self._cut.device_of(lease.gpus[0], lease.instance, self.mig_mode)
            except MigForbiddenError:
                self.mig_mode = "fixed"  # the next report offers what is there
                raise
        if self.mig_mode == "switched":
            self._cut.make_whole(lease.gpus)
        return super().visible(lease)

    def unavailable(self, is_ours: Callable[[int], bool]) -> dict[int, str]:
        if monotonic_s() >= self._health_s:
            self._health_s = monotonic_s() + HEALTH_S
            found = [(index, sickness(self._nvml, handle)) for index, handle in enumerate(self._handles)]
            self._sick = {index: why for index, why in found if why is not None}
        reasons = ((index, self._reason(index, is_ours)) for index in range(self.count))
        return {index: why for index, why in reasons if why is not None}

    def _reason(self, index: int, is_ours: Callable[[int], bool]) -> str | None:
        """Return why a GPU cannot be leased; None if it can."""
        # A node has one GPU name: estimates would not hold for other models in the same machine.
        if self._names[index] != self.gpu_name:
            return f"of another kind: {self._names[index]}"
        if index not in self._visible:
            return "left out by the agent's CUDA_VISIBLE_DEVICES"
        if index in self._sick:
            return self._sick[index]
        if self.mig_mode == "off" and self._cut.is_on(index):
            return "in MIG mode, and the node's label is mig=off"
        if not self._locked(self._uuids[index]):
            return "offered by another server's agent"
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[index])
        except self._nvml.NVMLError_NotSupported:
            return None
        except self._nvml.NVMLError as error:
            return f"its processes cannot be read: {error}"  # for instance a lost GPU
        return None if all(is_ours(process.pid) for process in running) else "in use by a process that is not Cordee's"

    def preflight(self, gpus: Sequence[int]) -> str:
        found = [(index, sickness(self._nvml, self._handles[index])) for index in gpus]
        sick = {index: why for index, why in found if why is not None}
        self._sick |= sick
        return "; ".join(f"GPU {index} is sick: {why}" for index, why in sick.items())

    def crowded(self, gpus: Sequence[int]) -> dict[int, str]:
        seen = self.sample(gpus)
        return {
            index: f"{format_bytes(each.memory_bytes)} in use before its ranks start"
            for index, each in seen.items()
            if each.memory_bytes > MEMORY_IN_USE
        }

    def sample(self, gpus: Sequence[int]) -> dict[int, GpuSample]:
        found = ((index, self._sample(self._handles[index])) for index in gpus)
        return {index: each for index, each in found if each is not None}

    def _sample(self, handle: Any) -> GpuSample | None:
        nvml = self._nvml
        try:
            memory_bytes = nvml.nvmlDeviceGetMemoryInfo(handle).used
        except nvml.NVMLError:
            return None

        def ask(question: Callable[[Any], Any]) -> Any:
            try:
                return question(handle)
            except nvml.NVMLError:
                return None

        rates = ask(nvml.nvmlDeviceGetUtilizationRates)
        power_mw, energy_mj = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        return GpuSample(rates.gpu / 100 if rates else 0.0, memory_bytes, power_mw or 0, energy_mj or 0)

    def findings(self, kernel_log: Path = KERNEL_LOG) -> Iterator[Finding]:
        yield Finding("driver", "ok", f"{self.driver}, {self.says}")
        yield from by_gpu((index, each) for index in range(self.count) for each in self._findings(index))
        buses = {self._nvml.nvmlDeviceGetPciInfo(handle).bus: index for index, handle in enumerate(self._handles)}
        found = xids(buses, kernel_log)
        if found is None:
            yield Finding("Xid", "warn", f"{kernel_log} cannot be read", "none since the start", "run it as root")
        elif not found:
            yield Finding("Xid", "ok", "none in the kernel's log", "none since the start")
        for bus, (xid, count) in (found or {}).items():
            figure = f"{xid} ({XIDS[xid]}), {count} in the kernel's log"
            hint = "drain the node and reset the GPU; replace it if the Xid comes back"
            yield Finding(f"Xid of GPU {buses[bus]}", "bad", figure, "none since the start", hint)

    def _findings(self, index: int) -> Iterator[Finding]:
        """Yield the findings of one GPU, without its number."""
        handle, nvml = self._handles[index], self._nvml
        why = sickness(nvml, handle)
        if why is not None:
            yield Finding(
                "health", "bad", why, "no uncorrectable error", f"cordee nodes cordon NODE --why {why[:30]!r}"
            )
            return
        yield Finding("health", "ok", "no uncorrectable error")
        slow = slow_clocks(nvml, handle)
        hint = "check cooling and power: every step waits for the slowest GPU" if slow else ""
        yield Finding("clocks", "warn" if slow else "ok", slow or "not lowered", "not lowered", hint)
        try:
            used = nvml.nvmlDeviceGetMemoryInfo(handle).used
            holders = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except nvml.NVMLError:
            return
        if used > MEMORY_IN_USE and not holders:
            figure = f"{format_bytes(used)} in use by no process that the driver names"
            yield Finding("memory", "warn", figure, "free", "end stale processes, or reset it: nvidia-smi --gpu-reset")
        else:
            yield Finding("memory", "ok", f"in use by {plural(holders, 'process', 'processes')}" if holders else "free")

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
    nvml = nvml_library()
    if nvml is not None and nvml.nvmlDeviceGetCount() > 0:
        return _NvmlDevices(nvml)
    cores = os.cpu_count() or 1
    return Devices(SLOT, cores, f"{cores} CPU slots, one per core: no NVIDIA driver was found")


def nvml_library() -> Any | None:
    """Return NVML's binding, initialised; None where there is no NVIDIA driver.

    Raises:
        MissingExtraError: there is a driver, but no library to query it.
    """
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

"""MIG through NVML: the profiles of this node's GPUs, their instances, and the one that a job runs on.

An operator says with the node's label `mig` what the agent may do: `off` nothing; `fixed` (the default) lease the
instances that are there on GPUs in MIG mode; `dynamic` make and destroy instances on them; `switched` also turn MIG
mode on and off. Making takes the rights of root. An instance stays after its job, for the next one of its profile; it
is destroyed when another is needed in its place. The driver refuses to destroy an instance that a process uses.
"""

import logging
from collections.abc import Iterator, Sequence
from ctypes import byref, c_uint
from typing import Any, Literal, NamedTuple, get_args

from cordee.agent.clock import monotonic_s
from cordee.events import MigGpus, MigInstance, MigProfile

MigMode = Literal["off", "fixed", "dynamic", "switched"]
"""The values of the label `mig`."""

MODES: tuple[MigMode, ...] = get_args(MigMode)

_LOOK_S = 30.0  # between two looks at instances that others may make

_log = logging.getLogger("cordee.agent")


class MigError(Exception):
    """An instance cannot be had; the message says why."""


class MigForbiddenError(MigError):
    """The agent has no right to make or destroy instances."""


class _Profile(NamedTuple):
    """A profile as NVML states it, with the number by which it is asked for."""

    number: int
    placed: MigProfile


class _There(NamedTuple):
    """A GPU instance that is on a GPU."""

    instance: MigInstance
    number: int  # its id on the GPU
    handle: Any


class MigDevices:
    """The GPUs of this node as far as they can be cut.

    Args:
        nvml: the binding, initialised.
        handles: of the GPUs, by index.
    """

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._profiles: dict[int, tuple[_Profile, ...]] = {}
        self._seen: tuple[float, MigMode, MigGpus | None] | None = None  # until this monotonic time, in this mode

    # -- what there is ---------------------------------------------------------------------------------------

    def is_on(self, gpu: int) -> bool | None:
        """Return whether a GPU is in MIG mode; None if it cannot be cut."""
        nvml = self._nvml
        try:
            return bool(nvml.nvmlDeviceGetMigMode(self._handles[gpu])[0] == nvml.NVML_DEVICE_MIG_ENABLE)
        except nvml.NVMLError:
            return None

    def seen(self, mode: MigMode) -> MigGpus | None:
        """Return what is offered in a mode, looked at twice a minute."""
        now_s = monotonic_s()
        if self._seen is None or now_s >= self._seen[0] or self._seen[1] != mode:
            self._seen = now_s + _LOOK_S, mode, self.offered(mode)
        return self._seen[2]

    def offered(self, mode: MigMode) -> MigGpus | None:
        """Return the GPUs whose instances may be leased; None if there are none.

        GPUs with other profiles than the first are left out: a node has one kind of GPU.
        """
        if mode == "off":
            return None
        able = [gpu for gpu in range(len(self._handles)) if self.is_on(gpu) or (mode == "switched" and self._able(gpu))]
        if not able:
            return None
        profiles = tuple(each.placed for each in self._of(able[0]))
        same = tuple(gpu for gpu in able if tuple(each.placed for each in self._of(gpu)) == profiles)
        if not profiles:
            return None
        fixed = None
        if mode == "fixed":
            fixed = tuple(
                (gpu, each.instance.start, each.instance.size, each.instance.profile)
                for gpu in same
                for each in sorted(self._there(gpu), key=lambda each: each.instance.start)
            )
        return MigGpus(
            gpus=same,
            profiles=profiles,
            slices=max(start + each.size for each in profiles for start in each.starts),
            compute=max(each.compute for each in profiles),
            fixed=fixed,
            switched=mode == "switched",
        )

    def _able(self, gpu: int) -> bool:
        return self.is_on(gpu) is not None

    def _of(self, gpu: int) -> tuple[_Profile, ...]:
        """Return the profiles of a GPU, the smallest first; they do not change while the driver runs."""
        if gpu not in self._profiles:
            found: dict[str, _Profile] = {}
            for each in self._asked(gpu):
                found.setdefault(each.placed.name, each)
            by_size = sorted(found.values(), key=lambda each: (each.placed.size, each.placed.compute, each.placed.name))
            self._profiles[gpu] = tuple(by_size)
        return self._profiles[gpu]

    def _asked(self, gpu: int) -> Iterator[_Profile]:
        nvml, handle = self._nvml, self._handles[gpu]
        for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
                placements = self._placements(handle, info.id)
            except nvml.NVMLError:  # the GPU has no such profile
                continue
            name = _text(info.name).removeprefix("MIG ")
            if placements and name:
                placed = MigProfile(
                    name=name,
                    size=placements[0][1],
                    compute=info.sliceCount,
                    starts=tuple(sorted(start for start, _ in placements)),
                    instances=info.instanceCount,
                )
                yield _Profile(info.id, placed)

    def _placements(self, handle: Any, number: int) -> list[tuple[int, int]]:
        nvml, count = self._nvml, c_uint()
        nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, number, None, byref(count))
        if not count.value:
            return []
        there = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
        nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, number, there, byref(count))
        return [(each.start, each.size) for each in there[: count.value]]

    def _there(self, gpu: int) -> Iterator[_There]:
        """Yield the GPU instances of a GPU."""
        nvml, handle = self._nvml, self._handles[gpu]
        for number, placed in self._of(gpu):
            found = (nvml.c_nvmlGpuInstance_t * placed.instances)()
            count = c_uint(placed.instances)
            try:
                nvml.nvmlDeviceGetGpuInstances(handle, number, found, byref(count))
                for each in found[: count.value]:
                    info = nvml.nvmlGpuInstanceGetInfo(each)
                    place = info.placement
                    yield _There(MigInstance(profile=placed.name, start=place.start, size=place.size), info.id, each)
            except nvml.NVMLError:  # MIG mode is off
                continue

    # -- the device of a job ---------------------------------------------------------------------------------

    def device_of(self, gpu: int, wanted: MigInstance, mode: MigMode) -> str:
        """Return the UUID of the MIG device on an instance, which is made if need be and the mode allows it.

        Raises:
            MigError: it is not there, and may not or cannot be made.
        """
        there = list(self._there(gpu))
        found = next((each for each in there if each.instance == wanted), None)
        name = f"{wanted.profile} at {wanted.start} of GPU {gpu}"
        try:
            if found is None:
                if mode not in ("dynamic", "switched"):
                    raise MigError(f"{name} is not there, and the node's label mig={mode} lets nobody make it")
                found = self._make(gpu, wanted, there, mode)
            return self._uuid(gpu, found)
        except self._nvml.NVMLError_NoPermission as error:
            hint = "run the agent as root, or label the node mig=fixed"
            raise MigForbiddenError(f"{name} cannot be made: {error}; hint: {hint}") from error
        except self._nvml.NVMLError as error:
            raise MigError(f"{name} cannot be had: {error}") from error

    def make_whole(self, gpus: Sequence[int]) -> None:
        """Turn MIG off on GPUs that a job has whole.

        Raises:
            MigError: one of its instances is in use, or the driver refuses.
        """
        for gpu in gpus:
            if not self.is_on(gpu):
                continue
            try:
                for each in list(self._there(gpu)):
                    self._destroy(gpu, each)
                self._switch(gpu, on=False)
            except self._nvml.NVMLError as error:
                raise MigError(f"MIG cannot be turned off on GPU {gpu}: {error}") from error

    def _make(self, gpu: int, wanted: MigInstance, there: Sequence[_There], mode: MigMode) -> _There:
        nvml, handle = self._nvml, self._handles[gpu]
        number = next((each.number for each in self._of(gpu) if each.placed.name == wanted.profile), None)
        if number is None:
            raise MigError(f"GPU {gpu} has no profile {wanted.profile}")
        if mode == "switched" and not self.is_on(gpu):
            self._switch(gpu, on=True)
        end = wanted.start + wanted.size
        for each in there:
            if each.instance.start < end and wanted.start < each.instance.start + each.instance.size:
                self._destroy(gpu, each)
        place = nvml.c_nvmlGpuInstancePlacement_t(wanted.start, wanted.size)
        made = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, number, byref(place))
        _log.info("made %s at %d of GPU %d", wanted.profile, wanted.start, gpu)
        return _There(wanted, nvml.nvmlGpuInstanceGetInfo(made).id, made)

    def _destroy(self, gpu: int, there: _There) -> None:
        """Destroy an instance with its compute instances; NVML refuses if a process uses it."""
        nvml = self._nvml
        for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            for each in self._compute(there, number):
                nvml.nvmlComputeInstanceDestroy(each)
        nvml.nvmlGpuInstanceDestroy(there.handle)
        _log.info("destroyed %s at %d of GPU %d", there.instance.profile, there.instance.start, gpu)

    def _compute(self, there: _There, number: int) -> list[Any]:
        """Return the compute instances of one profile on a GPU instance."""
        nvml = self._nvml
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(there.handle, number, 0)
            found = (nvml.c_nvmlComputeInstance_t * info.instanceCount)()
            count = c_uint(info.instanceCount)
            nvml.nvmlGpuInstanceGetComputeInstances(there.handle, info.id, found, byref(count))
        except nvml.NVMLError:  # the instance has no such profile
            return []
        return list(found[: count.value])

    def _uuid(self, gpu: int, there: _There) -> str:
        """Return the UUID of the MIG device on a GPU instance; one with all its slices is made if none is there."""
        found = self._device(gpu, there)
        if found is None:
            nvml = self._nvml
            infos = []
            for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
                try:
                    infos.append(nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(there.handle, number, 0))
                except nvml.NVMLError:
                    continue
            if not infos:
                raise MigError(f"{there.instance.profile} of GPU {gpu} offers no compute instance")
            nvml.nvmlGpuInstanceCreateComputeInstance(there.handle, max(infos, key=lambda each: each.sliceCount).id)
            found = self._device(gpu, there)
        if found is None:
            raise MigError(f"the driver shows no device for {there.instance.profile} of GPU {gpu}")
        return found

    def _device(self, gpu: int, there: _There) -> str | None:
        nvml, handle = self._nvml, self._handles[gpu]
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                if nvml.nvmlDeviceGetGpuInstanceId(device) == there.number:
                    return _text(nvml.nvmlDeviceGetUUID(device))
            except nvml.NVMLError_NotFound:
                continue
        return None

    def _switch(self, gpu: int, *, on: bool) -> None:
        nvml, handle = self._nvml, self._handles[gpu]
        status = nvml.nvmlDeviceSetMigMode(handle, nvml.NVML_DEVICE_MIG_ENABLE if on else nvml.NVML_DEVICE_MIG_DISABLE)
        if status or self.is_on(gpu) != on:
            raise MigError(
                f"MIG mode of GPU {gpu} turns {'on' if on else 'off'} only after a reset; "
                "label the node mig=dynamic, and reset it once: nvidia-smi --gpu-reset"
            )
        _log.info("turned MIG %s on GPU %d", "on" if on else "off", gpu)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

"""Islands of GPUs joined by NVLink, as the driver sees its links and its fabric."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

FABRIC_GPUS = 72  # of an NVL72; the driver does not report the size of its fabric
_SWITCH = -1  # the node of the graph that stands for all switches


def island_gpus(nvml: Any, handles: Sequence[Any]) -> int:
    """Return the number of these GPUs in one island; 0 if they are one island, or if none has a link."""
    return island_size(len(handles), list(_pairs(nvml, handles)))


def island_size(count: int, pairs: Sequence[tuple[int, int]]) -> int:
    """Return the size of the islands of `count` GPUs; 0 if they are one island, or if none is linked.

    The scheduler takes islands as runs of equal length in the order of the GPUs, so each GPU is one of its own where
    the links join others.

    >>> island_size(4, [(0, 1), (2, 3)]), island_size(4, [(0, 1), (1, 2), (2, 3)]), island_size(4, [])
    (2, 0, 0)
    >>> island_size(4, [(0, 2), (1, 3)]), island_size(4, [(0, -1), (1, -1), (2, 3)])
    (1, 2)
    """
    island = {gpu: gpu for gpu in (_SWITCH, *range(count))}
    for one, other in pairs:
        old, new = island[other], island[one]
        island = {gpu: new if each == old else each for gpu, each in island.items()}
    if not pairs or len({island[gpu] for gpu in range(count)}) == 1:
        return 0
    sizes = [size for size in range(1, count) if count % size == 0]
    runs = (
        size
        for size in reversed(sizes)
        if all(len({island[gpu] for gpu in range(at, at + size)}) == 1 for at in range(0, count, size))
    )
    return next(runs)


def _pairs(nvml: Any, handles: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield the active links as pairs of indices; a link to something that is not one of the GPUs goes to a switch."""
    places = {_place(nvml.nvmlDeviceGetPciInfo(handle)): index for index, handle in enumerate(handles)}
    for index, handle in enumerate(handles):
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    continue
                if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU:
                    continue  # a link to the CPU
                yield index, places.get(_place(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)), _SWITCH)
            except nvml.NVMLError_InvalidArgument:
                break  # the GPU has no more links
            except nvml.NVMLError:
                continue


def _place(pci: Any) -> tuple[int, int, int]:
    return pci.domain, pci.bus, pci.device


def fabric_of(nvml: Any, handles: Sequence[Any]) -> str:
    """Return the identity of the fabric over nodes that all the GPUs belong to; "" without one.

    A single node with switches of its own has a fabric as well, with a UUID of zeros.
    """
    found = set()
    for handle in handles:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        try:
            nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        except nvml.NVMLError:
            return ""
        uuid = bytes(info.clusterUuid)
        if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status or not any(uuid):
            return ""
        found.add(f"{uuid.hex()}.{info.cliqueId}")
    return found.pop() if len(found) == 1 else ""

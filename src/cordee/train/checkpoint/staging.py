"""Staging memory: shared buffers of one rank, kept between saves, that the trainer fills and its uploader reads.

Memory that is newly allocated for a save costs 7 times as much as a copy into existing memory (measured; page faults),
and with CUDA also the pinning. So a buffer only grows, and is allocated before it is needed if possible. The second
buffer is for captures that stay in memory, and takes no memory before the first of them.
"""

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Collection, Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from cordee.train.checkpoint.capture_marks import BUFFERS, CaptureMarks
from cordee.units import MiB


class StagingBuffer:
    """Anonymous shared memory behind a descriptor."""

    def __init__(self) -> None:
        self.fd = _memory("cordee-staging")
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._used_bytes = 0

    def grow(self, size_bytes: int) -> bool:
        """Make room for at least this many bytes and touch every page; return whether the mapping is new."""
        if size_bytes <= self.bytes.numel():
            return False
        whole = -(-size_bytes // MiB) * MiB
        self._unpin()
        os.posix_fallocate(self.fd, 0, whole) if hasattr(os, "posix_fallocate") else os.ftruncate(self.fd, whole)
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, whole, flags=mmap.MAP_SHARED), dtype=torch.uint8)
        # By torch, not by MAP_POPULATE: this runs during training and must release Python's lock.
        self.bytes[:: mmap.PAGESIZE].bitwise_or_(0)
        return True

    def clear(self) -> None:
        """Zero all bytes that were ever written; new memory is zero."""
        self.bytes[: self._used_bytes].zero_()

    def fill(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy sources into targets (views of `bytes`), and wait until they are there."""
        self._used_bytes = self.bytes.numel()
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        self.pin()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        side.synchronize()

    def pin(self) -> None:
        """Pin the pages, so that the GPU can copy asynchronously."""
        if not self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))
            self._pinned = True

    def close(self) -> None:
        """Free the memory; the uploader's own mapping lives on."""
        if self.fd < 0:
            return
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)
        self.fd = -1

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr()))
            self._pinned = False


class StagingBuffers:
    """The staging buffers of one rank, and the capture in each."""

    def __init__(self) -> None:
        self.buffers = [StagingBuffer() for _ in range(BUFFERS)]
        self.marks_fd = _memory("cordee-marks")
        os.ftruncate(self.marks_fd, mmap.PAGESIZE)
        self.marks = CaptureMarks(self.marks_fd)
        self.memory_step: int | None = None  # step of the newest capture that stays in memory
        self._memory_slot: int | None = None
        self._count = 1
        self._warming: threading.Thread | None = None

    @property
    def fds(self) -> list[int]:
        """Return the buffers' descriptors, for the uploader."""
        return [staging.fd for staging in self.buffers]

    def slots(self, *, in_memory: bool) -> range:
        """Return the buffers that may be used: the second one from the first capture that stays in memory."""
        self._count = BUFFERS if in_memory else self._count
        return range(self._count)

    def pick(self, reading: Collection[int], *, in_memory: bool) -> int | None:
        """Return a buffer that the uploader does not read, if possible not that of the newest capture in memory."""
        free = [slot for slot in self.slots(in_memory=in_memory) if slot not in reading]
        return min(free, key=lambda slot: (slot == self._memory_slot, slot), default=None)

    def filling(self, slot: int) -> None:
        """Mark the buffer as being written: it holds no capture."""
        self.marks.set(slot, 0)
        if slot == self._memory_slot:
            self._memory_slot = self.memory_step = None

    def filled(self, slot: int, save: int, step: int, *, in_memory: bool) -> None:
        """Mark the capture as whole."""
        self.marks.set(slot, save)
        if in_memory:
            self._memory_slot, self.memory_step = slot, step

    def forget(self) -> None:
        """Drop the capture in memory: the uploader that knew of it has died."""
        self._memory_slot = self.memory_step = None

    def warm(self, size_bytes: int, *, both: bool, device: torch.device | None) -> None:
        """Allocate memory while training runs, before the first capture; `device`: the GPU to pin it for."""

        def make() -> None:
            # Each thread has its own current device. The first capture reports a failure here.
            on = contextlib.nullcontext() if device is None else torch.cuda.device(device)
            with contextlib.suppress(OSError, RuntimeError), on:
                for staging in self.buffers if both else self.buffers[:1]:
                    staging.grow(size_bytes)
                    if device is not None:
                        staging.pin()

        self.settle()
        self._warming = threading.Thread(target=make, name="cordee-staging", daemon=True)
        self._warming.start()

    def settle(self) -> None:
        """Wait until `warm` is done."""
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def close(self) -> None:
        """Free the memory; the uploader's mappings live on."""
        self.settle()
        for staging in self.buffers:
            staging.close()
        if self.marks_fd >= 0:
            os.close(self.marks_fd)
            self.marks_fd = -1


def _memory(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def local_bytes(tensors: Iterable[torch.Tensor], world_size: int) -> int:
    """Estimate the bytes of this rank's captures: its shards, and its part of the replicated tensors."""
    shards = (each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes // world_size for each in tensors)
    return sum(shards)

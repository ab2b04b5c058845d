"""Staging memory: shared buffers of one rank, kept between saves, that the trainer fills and its drain reads.

Memory that is made anew for each save costs 7 times a copy into memory that is there (our measurement: page faults),
and with CUDA the pinning besides; so a buffer only grows, and is made before it is needed where that is possible. The
second one is for captures that are held: it takes no memory before the first of these.
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
        """Make it hold at least this much, every page of it touched; True if it is a new mapping."""
        if size_bytes <= self.bytes.numel():
            return False
        whole = -(-size_bytes // MiB) * MiB
        self._unpin()
        os.posix_fallocate(self.fd, 0, whole) if hasattr(os, "posix_fallocate") else os.ftruncate(self.fd, whole)
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, whole, flags=mmap.MAP_SHARED), dtype=torch.uint8)
        # By torch and not by MAP_POPULATE: beside the training this must not hold Python's lock.
        self.bytes[:: mmap.PAGESIZE].bitwise_or_(0)
        return True

    def clear(self) -> None:
        """Zero what was ever written; new memory is zero."""
        self.bytes[: self._used_bytes].zero_()

    def fill(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy sources into targets (views of `bytes`); they are there when this returns."""
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
        """Let the GPU copy into it by itself."""
        if not self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))
            self._pinned = True

    def close(self) -> None:
        """Give the memory back; the drain's own mapping lives on."""
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
    """The staging buffers of one rank, and which of them holds what."""

    def __init__(self) -> None:
        self.stagings = [StagingBuffer() for _ in range(BUFFERS)]
        self.marks_fd = _memory("cordee-seals")
        os.ftruncate(self.marks_fd, mmap.PAGESIZE)
        self.seals = CaptureMarks(self.marks_fd)
        self.held_step: int | None = None  # of the newest capture that is in memory only
        self._held_in: int | None = None
        self._count = 1
        self._warming: threading.Thread | None = None

    @property
    def fds(self) -> list[int]:
        """For the drain."""
        return [staging.fd for staging in self.stagings]

    def slots(self, *, hold: bool) -> range:
        """The buffers that may be used: the second one from the first capture that is held."""
        self._count = BUFFERS if hold else self._count
        return range(self._count)

    def pick(self, reading: Collection[int], *, hold: bool) -> int | None:
        """Where the next capture goes: what the drain does not read, and rather not over the newest one held."""
        free = [slot for slot in self.slots(hold=hold) if slot not in reading]
        return min(free, key=lambda slot: (slot == self._held_in, slot), default=None)

    def filling(self, slot: int) -> None:
        """From here on the buffer is written; nobody may take it for a capture."""
        self.seals.clear(slot)
        if slot == self._held_in:
            self._held_in = self.held_step = None

    def filled(self, slot: int, save: int, step: int, *, hold: bool) -> None:
        """The capture is whole."""
        self.seals.set(slot, save)
        if hold:
            self._held_in, self.held_step = slot, step

    def forget(self) -> None:
        """The drain that knew of the capture that is held has died: nobody would bring it."""
        self._held_in = self.held_step = None

    def warm(self, size_bytes: int, *, both: bool, device: torch.device | None) -> None:
        """Make the memory beside the training, before the first capture needs it; `device`: the GPU to pin it for."""

        def make() -> None:
            # A thread has a current device of its own. What fails here the first capture tells.
            on = contextlib.nullcontext() if device is None else torch.cuda.device(device)
            with contextlib.suppress(OSError, RuntimeError), on:
                for staging in self.stagings if both else self.stagings[:1]:
                    staging.grow(size_bytes)
                    if device is not None:
                        staging.pin()

        self.settle()
        self._warming = threading.Thread(target=make, name="cordee-staging", daemon=True)
        self._warming.start()

    def settle(self) -> None:
        """Wait until nobody else makes memory."""
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def close(self) -> None:
        """Give the memory back; what the drain holds lives on."""
        self.settle()
        for staging in self.stagings:
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
    """About what this rank will capture: its shards, and its part of what all ranks hold whole."""
    shards = (each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes // world_size for each in tensors)
    return sum(shards)

"""Every tensor's storage from its birth to its death, as events in order: a dispatch mode under which a step runs.

The storages are those of fake tensors, or of real ones: nothing here asks which. Which class a tensor belongs to is
decided afterwards (`classes.py`), when its whole life is known.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from cordee.train.trace_memory.events import Birth, Death, Event, Segment

# Namespaces of operators that move states between ranks, or pack them for that. What tensor parallelism moves
# (`_c10d_functional`) are activations.
_COMMUNICATION = ("fsdp", "c10d")


@dataclass(slots=True)
class _Alive:
    """A storage that has been seen and has not died: its number, and the bytes that it has now."""

    number: int
    held_bytes: int
    ref: weakref.ref[Any]
    has_lived: bool = False


@dataclass(slots=True)
class StorageTracker:
    """Collects events. `segment` is where the step stands; `sent` are the storages that went into a collective."""

    segment: Segment
    events: list[Event] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)
    elements: dict[int, int] = field(default_factory=dict)
    _alive: dict[int, _Alive] = field(default_factory=dict)
    _count: int = 0

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage in the events; None if it was never seen."""
        found = self._alive.get(id(_storages(tensor)[0]))
        return None if found is None else found.number

    def see(self, tensor: torch.Tensor) -> None:
        """Note the storages of a tensor that are new."""
        for storage in _storages(tensor):
            key = id(storage)
            if key in self._alive:
                continue
            self._count += 1
            self._alive[key] = _Alive(self._count, 0, weakref.ref(storage, self._on_death(key)))
            self.elements[self._count] = tensor.numel()
            self._resize(key, storage.nbytes())

    def seen_in_collective(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember that these storages are buffers of a collective."""
        for tensor in tensors:
            for storage in _storages(tensor):
                found = self._alive.get(id(storage))
                if found is not None:
                    self.sent.add(found.number)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that was given other bytes: FSDP2 empties and fills those of gathered weights."""
        found = self._alive.get(id(storage))
        if found is not None:
            self._resize(id(storage), storage.nbytes())

    def _resize(self, key: int, now_bytes: int) -> None:
        alive = self._alive[key]
        if alive.held_bytes:
            self.events.append(Death(alive.number, self.segment))
        if now_bytes and alive.has_lived:  # a second life is another tensor to the allocator
            self._count += 1
            self.elements[self._count] = self.elements[alive.number]
            alive.number = self._count
        alive.held_bytes = now_bytes
        alive.has_lived |= now_bytes > 0
        if now_bytes:
            self.events.append(Birth(alive.number, now_bytes, _stream(), self.segment))

    def _on_death(self, key: int) -> Any:
        def died(_: Any) -> None:
            alive = self._alive.pop(key, None)
            if alive is not None and alive.held_bytes:
                self.events.append(Death(alive.number, self.segment))

        return died


class TrackingMode(TorchDispatchMode):
    """Hands each operator's results to a tracker, but for those that are `hidden`."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.hidden = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch.compile that compiled code may run under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; a DTensor first becomes the operators on its local part."""
        if any(issubclass(each, DTensor) or each.__name__ == "AsyncCollectiveTensor" for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # a fake one is another tensor, where a real one is the same
        for tensor in _tensors(result) if not self.hidden else ():
            self.tracker.see(tensor)
        if func.namespace in _COMMUNICATION:
            self.tracker.seen_in_collective(_tensors((args, kwargs or {}, result)))
        return result


@contextmanager
def tracking(tracker: StorageTracker) -> Iterator[None]:
    """Track all that is allocated inside."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_tell
    try:
        with TrackingMode(tracker):
            yield
    finally:
        torch.UntypedStorage.resize_ = resize


@contextmanager
def unseen() -> Iterator[None]:
    """Keep whatever tracks from seeing what is made inside."""
    modes = [each for each in _get_current_dispatch_mode_stack() if isinstance(each, TrackingMode)]
    for mode in modes:
        mode.hidden = True
    try:
        yield
    finally:
        for mode in modes:
            mode.hidden = False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [storage for each in inner if isinstance(each, torch.Tensor) for storage in _storages(each)]
    return [tensor.untyped_storage()]


def _stream() -> int:
    """Return a number for the stream in which FSDP2 believes to be; 0 is the default one."""
    current = torch.cpu.current_stream()
    return 0 if current is torch.cpu._default_cpu_stream else id(current)

"""From events to an answer: the class of each storage by its whole life, the bytes at each moment, and the peak.

No torch: what comes in are numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cordee.plan.allocator import ROUND_BYTES, CachingAllocator, needed_bytes
from cordee.train.trace_memory.events import PHASES, Birth, Event, Phase

CLASSES = ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "temporaries")


@dataclass(frozen=True, slots=True)
class TracedMoment:
    """The fullest moment of one phase of the step: bytes by class."""

    phase: Phase
    parts: Mapping[str, int]

    @property
    def allocated_bytes(self) -> int:
        """All classes together."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Known:
    """Storages whose class follows from what holds them, by number; `wide` are tensors of logits."""

    weights: frozenset[int]
    optimizer: frozenset[int]
    gradients: frozenset[int]
    sent: frozenset[int]
    wide: frozenset[int]


def classify(events: Iterable[Event], known: Known) -> dict[int, str]:
    """Return the class of each storage.

    A tensor of the forward pass that is alive when the loss goes backward is an activation: the backward pass waits for
    it. What is left is temporary.
    """
    events = list(events)
    born: dict[int, Birth] = {}
    kept: set[int] = set()
    waiting: set[int] = set()
    for event in events:
        if isinstance(event, Birth):
            born[event.number] = event
            if event.segment.phase == "forward":
                waiting.add(event.number)
        elif event.number in waiting:
            waiting.discard(event.number)
            if event.segment.phase != "forward":
                kept.add(event.number)
    kept |= waiting
    classes = {}
    for number in born:
        if number in known.weights:
            classes[number] = "weights"
        elif number in known.optimizer:
            classes[number] = "optimizer"
        elif number in known.gradients:
            classes[number] = "gradients"
        elif number in known.sent:
            classes[number] = "buffers"
        elif number in known.wide:
            classes[number] = "loss"
        else:
            classes[number] = "activations" if number in kept else "temporaries"
    return classes


def rounded(size_bytes: int) -> int:
    """Return the bytes that torch counts for a tensor."""
    return max(ROUND_BYTES, -(-size_bytes // ROUND_BYTES) * ROUND_BYTES)


def moments(events: Iterable[Event], classes: Mapping[int, str], standing_bytes: int = 0) -> tuple[TracedMoment, ...]:
    """Return the fullest moment of each phase, in the order of a step; `standing_bytes` are buffers in all of them."""
    now = dict.fromkeys(CLASSES, 0) | {"buffers": standing_bytes}
    sizes: dict[int, int] = {}
    fullest: dict[Phase, tuple[int, dict[str, int]]] = {}
    total = standing_bytes
    for event in events:
        if event.segment.phase == "step" and "step" not in fullest:
            fullest["step"] = (
                total,
                dict(now),
            )  # the optimizer finds all gradients, and the first thing is to free one
        if isinstance(event, Birth):
            sizes[event.number] = rounded(event.size_bytes)
            total += sizes[event.number]
            now[classes[event.number]] += sizes[event.number]
        else:
            total -= sizes[event.number]
            now[classes[event.number]] -= sizes[event.number]
        phase = event.segment.phase
        if phase not in fullest or total > fullest[phase][0]:
            fullest[phase] = (total, dict(now))
    return tuple(TracedMoment(phase, fullest[phase][1]) for phase in PHASES if phase in fullest)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Segments that torch's allocator takes from the driver: as many as it likes to, and as few as will do."""

    reserved_bytes: int
    needed_bytes: int


def reserve(events: Iterable[Event], standing_bytes: int = 0) -> Reserve:
    """Return what torch's allocator reserves for steps like this one, beside a buffer that stands."""
    free, needed = needed_bytes(_Replay(list(events), standing_bytes).run)
    return Reserve(free.reserved_bytes_peak, needed)


class _Replay:
    """The states once, then the same step twice: the second one finds the segments of the first."""

    def __init__(self, events: list[Event], standing_bytes: int) -> None:
        births = {event.number: event for event in events if isinstance(event, Birth)}
        states = {number for number, birth in births.items() if birth.segment.phase == "states"}
        self.states = [births[number].size_bytes for number in births if number in states]
        self.states += [standing_bytes] if standing_bytes else []
        self.step = [event for event in events if event.number not in states]

    def run(self, limit_bytes: int | None) -> CachingAllocator:
        """Return the allocator after two steps.

        Raises:
            OutOfMemoryError: the limit does not hold them.
        """
        allocator = CachingAllocator(limit_bytes)
        for index, size in enumerate(self.states):
            allocator.allocate(-1 - index - 2**62, size)
        left: set[int] = set()
        for _ in range(2):
            for number in left:
                allocator.free(number)
            left = set()
            for event in self.step:
                if isinstance(event, Birth):
                    allocator.allocate(event.number, event.size_bytes, event.stream)
                    left.add(event.number)
                elif event.number in left:
                    allocator.free(event.number)
                    left.discard(event.number)
        return allocator

"""A trace of a deep model from a trace of six layers: one of them is repeated, with all that it makes and frees.

Layers 0, 1 and 5 stand for the ends, where FSDP2 gathers other things ahead; layer 3 stands for all between. That holds
only if it and its neighbours allocate the same in the same order, which is checked. No torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from cordee.train.trace_memory.events import Birth, Death, Event, Segment

TRACED = 6
MIDDLE = 3
_INNER = (MIDDLE - 1, MIDDLE, MIDDLE + 1)


class IrregularError(Exception):
    """Layers differ, so that none stands for the others."""


def stretch(events: Sequence[Event], layers: int) -> list[Event]:
    """Return the events of so many layers.

    Raises:
        IrregularError: the inner layers do not allocate alike.
    """
    assert layers >= TRACED, "a shallower model is traced whole"
    return list(_Stretched(events, layers - TRACED).events())


class _Stretched:
    """Copy 0 is the middle layer itself, copy `more` the last one before the layer that follows it."""

    def __init__(self, events: Sequence[Event], more: int) -> None:
        self.more = more
        self.runs = [(segment, list(run)) for segment, run in groupby(events, key=lambda event: event.segment)]
        self.born: dict[int, tuple[Segment, int]] = {}
        self.by_place: dict[tuple[Segment, int], int] = {}
        sizes: dict[Segment, list[tuple[int, int]]] = {}
        for event in events:
            if isinstance(event, Birth):
                of_segment = sizes.setdefault(event.segment, [])
                self.born[event.number] = (event.segment, len(of_segment))
                self.by_place[event.segment, len(of_segment)] = event.number
                of_segment.append((event.size_bytes, event.stream))
        for segment, found in sizes.items():
            inner = _INNER if segment.layer in _INNER else ()
            if any(sizes.get(segment._replace(layer=other)) != found for other in inner):
                raise IrregularError(f"inner layers differ in the {segment.phase} pass")

    def events(self) -> Iterator[Event]:
        """Yield all events in order."""
        for segment, run in self.runs:
            if segment.layer != MIDDLE:
                yield from self._outside(segment, run)
                continue
            copies: Iterable[int] = range(self.more + 1)
            ascending = segment.phase in ("states", "forward")
            first = 0 if ascending else self.more
            for copy in copies if ascending else reversed(range(self.more + 1)):
                yield from self._copy(segment, run, copy, first)

    def _outside(self, segment: Segment, run: Sequence[Event]) -> Iterator[Event]:
        for event in run:
            if isinstance(event, Birth) or self.born[event.number][0].layer != MIDDLE:
                yield event
            elif segment.layer is None:
                # What holds the middle layer's tensor holds those of its copies.
                yield from (Death(self._number(event.number, copy), segment) for copy in range(self.more + 1))
            else:
                yield Death(self._number(event.number, self.more if segment.layer > MIDDLE else 0), segment)

    def _copy(self, segment: Segment, run: Sequence[Event], copy: int, first: int) -> Iterator[Event]:
        for event in run:
            if isinstance(event, Birth):
                yield Birth(self._number(event.number, copy), event.size_bytes, event.stream, segment)
                continue
            birth, place = self.born[event.number]
            if birth.layer == MIDDLE:
                yield Death(self._number(event.number, copy), segment)
            elif birth.layer in _INNER:
                # A neighbour's tensor: for the copies that have a copy beside them, that one's.
                beside = copy + (birth.layer - MIDDLE)
                if 0 <= beside <= self.more:
                    own = self.by_place[birth._replace(layer=MIDDLE), place]
                    yield Death(self._number(own, beside), segment)
                else:
                    yield event
            elif copy == first:
                yield event

    def _number(self, number: int, copy: int) -> int:
        """Return the number of a copy's tensor; negative ones are of copies, so that none is taken twice."""
        return number if copy == 0 else -(number * (self.more + 1) + copy)


def original(number: int, layers: int) -> int:
    """Return the traced tensor that a number of a stretched trace is a copy of."""
    return number if number >= 0 else -number // (layers - TRACED + 1)

"""The time of one replica as segments, each of one class.

    placed ── loading ── ready │ serving and idle held, as the gateways report │ notice ── draining ── GPUs free

Its rank reports when it is ready and when it is not; a gateway reports for how long it had a request open. Reports may
come late, twice, out of order and from several gateways: busy time is the union of what they report, each counted from
the start of its stretch, while the replica is ready.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from cordee.account.energy import AttemptEnergy
from cordee.account.split import Class
from cordee.account.timeline import Conclusion, Segment
from cordee.events import Outcome

_TIMES_MAX = 256
"""Times of changes that are kept apart: an hour of one gateway's reports. Older time is folded into sums."""

_LEAVES_BY_ITSELF = frozenset({None, Outcome.FINISHED, Outcome.CHECKPOINTED})


class ReplicaTimeline:
    """The phases of one replica, and the time in which it had requests open.

    Attributes:
        placed_us: when it got its GPUs.
        tokens: input and output tokens that it served.
        energy: of its GPUs; None: nothing was counted.
    """

    placed_us: int
    tokens: int
    energy: AttemptEnergy | None
    _phases: dict[int, Class]  # loading or idle held, from this time on
    _draining_us: int | None
    _busy: list[tuple[int, int]]  # in order; they neither overlap nor touch
    _folded: dict[Class, int]
    _folded_until_us: int
    _details: list[Segment] | None

    def __init__(self, placed_us: int, *, detailed: bool = False) -> None:
        self.placed_us = self._folded_until_us = placed_us
        self.tokens, self.energy = 0, None
        self._phases, self._draining_us = {placed_us: Class.LOADING}, None
        self._busy, self._folded = [], {}
        self._details = [] if detailed else None

    def ready(self, at_us: int) -> None:
        """Let it be ready from then on."""
        self._phases[max(at_us, self._folded_until_us)] = Class.IDLE_HELD

    def unready(self, at_us: int) -> None:
        """Let it load from then on: its engine starts again."""
        self._phases[max(at_us, self._folded_until_us)] = Class.LOADING

    def leave(self, at_us: int) -> None:
        """Let it drain from then on, whatever is reported."""
        at_us = max(at_us, self._folded_until_us)
        self._draining_us = at_us if self._draining_us is None else min(at_us, self._draining_us)

    def serve(self, from_us: int, busy_us: int) -> None:
        """Count the busy time of a stretch that began at `from_us`."""
        from_us, to_us = max(from_us, self._folded_until_us), from_us + busy_us
        if from_us < to_us:
            self._busy = list(_joined(sorted((*self._busy, (from_us, to_us)))))

    def fold(self, until_us: int) -> None:
        """Keep sums of old time if there are many changes; no lease of the attempt may end before `until_us`."""
        if len(self._phases) + 2 * len(self._busy) <= _TIMES_MAX:
            return
        times = self._times()
        cut_us = times[len(times) // 2]
        if cut_us > until_us:
            return
        for segment in self._segments([*times[: len(times) // 2], cut_us], None):
            self._folded[segment.cls] = self._folded.get(segment.cls, 0) + segment.to_us - segment.from_us
            if self._details is not None:
                self._details.append(segment)
            if self.energy is not None:
                self.energy.fold(segment.cls, segment.to_us)
        starts = sorted(self._phases)
        phase = self._phases[starts[bisect_right(starts, cut_us) - 1]]
        self._phases = {cut_us: phase} | {at_us: cls for at_us, cls in self._phases.items() if at_us > cut_us}
        self._busy = [(max(from_us, cut_us), to_us) for from_us, to_us in self._busy if to_us > cut_us]
        self._folded_until_us = cut_us

    def conclude(self, outcome: Outcome | None) -> Conclusion:
        """Return its time as it counts if it ends like this; the outcome is None while it is live."""
        times = self._times()
        *rest, tail = self._segments([*times, times[-1] + 1], outcome)
        return Conclusion(
            folded=self._folded,
            folded_until_us=self._folded_until_us,
            details=self._details or (),
            rest=rest,
            tail=tail.cls,
            tokens=self.tokens,
            energy=self.energy,
        )

    def _times(self) -> list[int]:
        """Return the times at which its class may change, in order; the first one is the end of the folded time."""
        draining = () if self._draining_us is None else (self._draining_us,)
        return sorted({self._folded_until_us, *self._phases, *chain.from_iterable(self._busy), *draining})

    def _segments(self, times: list[int], outcome: Outcome | None) -> Iterator[Segment]:
        """Yield the time between these times, each stretch in its class."""
        starts, busy_from = sorted(self._phases), [from_us for from_us, _ in self._busy]
        draining_us = times[-1] if self._draining_us is None else self._draining_us
        last_us = starts[max(0, bisect_left(starts, draining_us) - 1)]
        is_lost = outcome not in _LEAVES_BY_ITSELF and self._phases[last_us] is Class.LOADING
        for from_us, to_us in pairwise(times):
            cls = self._phases[starts[bisect_right(starts, from_us) - 1]]
            block = bisect_right(busy_from, from_us) - 1
            if self._draining_us is not None and from_us >= self._draining_us:
                cls = Class.DRAINING
            elif cls is Class.LOADING:
                cls = Class.LOST if is_lost and from_us >= last_us else cls
            elif block >= 0 and from_us < self._busy[block][1]:
                cls = Class.SERVING
            yield Segment(cls, from_us, to_us)


def _joined(blocks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the union of stretches that are sorted by their start."""
    at: tuple[int, int] | None = None
    for from_us, to_us in blocks:
        if at is None or from_us > at[1]:
            if at is not None:
                yield at
            at = (from_us, to_us)
        else:
            at = (at[0], max(at[1], to_us))
    if at is not None:
        yield at

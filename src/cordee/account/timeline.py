"""The time of one attempt as segments, each of one class, from the spans that one of its ranks reported.

    placed ── restart ── first span │ spans, and stall in the gaps between them │ last span ── tail ── GPUs free

Reports can be garbled, and the segments still cover the whole without a gap: a span is cut to the time it adds after
the span before it; one that begins inside the span before it ends that one there; one that adds nothing is ignored,
steps and all. The ledger sums the segments, and the picture draws them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cordee.account.energy import AttemptEnergy
from cordee.account.split import Class
from cordee.events import CheckpointCommitted, Outcome, Reported, RolledBack, SpanClass
from cordee.units import US_PER_S

_MERGED_US = 60 * US_PER_S


_CLASS = {span: Class(span.value) for span in SpanClass}


class Segment(NamedTuple):
    """A stretch of an attempt's time in one class; its steps are `first_step` up to `first_step + steps`."""

    cls: Class
    from_us: int
    to_us: int
    first_step: int = 0
    steps: int = 0
    tokens: int = 0


class Conclusion(NamedTuple):
    """An attempt's time under one outcome. Its leases may end at different times, and each is cut at its own end."""

    folded: Mapping[Class, int]  # microseconds by class until `folded_until_us`
    folded_until_us: int
    details: Sequence[Segment]  # what `folded` sums, if the timeline keeps it
    rest: Sequence[Segment]  # after `folded_until_us`, without a gap
    tail: Class  # after the last report
    tokens: int  # of steps that are not lost
    energy: AttemptEnergy | None  # None: nothing was counted

    def split(self, end_us: int) -> dict[Class, int]:
        """Return the microseconds from placed to `end_us` by class."""
        parts = dict(self.folded)
        for segment in self._until(end_us):
            parts[segment.cls] = parts.get(segment.cls, 0) + segment.to_us - segment.from_us
        return parts

    def energy_mj(self, end_us: int) -> dict[Class, int]:
        """Return the millijoules by class of an attempt whose last lease ends at `end_us`."""
        if self.energy is None:
            return {}
        return self.energy.by_class(((each.cls, each.to_us) for each in self._until(end_us)), self.tail)

    def segments(self, end_us: int) -> tuple[Segment, ...]:
        """Return the segments from placed to `end_us`; only of a timeline that keeps its details."""
        return (*self.details, *self._until(end_us))

    def _until(self, end_us: int) -> Sequence[Segment]:
        last_us = self.rest[-1].to_us if self.rest else self.folded_until_us
        if last_us < end_us:
            return [*self.rest, Segment(self.tail, last_us, end_us)]
        if last_us == end_us:
            return self.rest
        return [each._replace(to_us=min(each.to_us, end_us)) for each in self.rest if each.from_us < end_us]


class Timeline:
    """The spans of one attempt. They are merged, and durable ones folded into sums: a long attempt stays small.

    With `detailed`, folded segments are kept as well.
    """

    placed_us: int
    rolled_back: bool  # whether steps were undone
    reports: bool  # whether the script has reported anything
    restored_us: int | None
    steps: int
    energy: AttemptEnergy | None
    _segments: list[Segment]
    _details: list[Segment] | None
    _folded: dict[Class, int]
    _folded_tokens: int
    _folded_until_us: int
    _committed_step: int
    _captured_us: int | None

    def __init__(self, placed_us: int, *, detailed: bool = False) -> None:
        self.placed_us = self._folded_until_us = placed_us
        self.reports = self.rolled_back = False
        self.energy = None
        self.restored_us = self._captured_us = None
        self.steps = self._committed_step = self._folded_tokens = 0
        self._segments, self._folded = [], {}
        self._details = [] if detailed else None

    def report(self, event: Reported) -> Segment | None:
        """Accept a span and return it as it counts; None if it adds no time."""
        self.reports = True
        last = self._segments[-1] if self._segments else None
        from_us = max(event.from_us, self._folded_until_us)
        if last is not None:
            if last.from_us < from_us < last.to_us and event.at_us > from_us:
                self._segments[-1] = last._replace(to_us=from_us)
            from_us = max(from_us, self._segments[-1].to_us)
        if event.at_us <= from_us:
            return None
        cls, useful = _CLASS[event.span], event.span is SpanClass.USEFUL
        steps = max(0, event.steps) if useful else 0
        segment = Segment(cls, from_us, event.at_us, event.first_step, steps, max(0, event.tokens) if useful else 0)
        if len(self._segments) > 1:
            self._merge_last_two()
        self._segments.append(segment)
        self.steps += steps
        return segment

    def roll_back(self, event: RolledBack) -> None:
        """Count the steps from `event.to_step` on as lost, as far as they are not folded."""
        self.rolled_back = True
        self._committed_step = min(self._committed_step, event.to_step)
        found: list[Segment] = []
        for segment in self._segments:
            beyond = segment.cls is Class.USEFUL and segment.first_step + segment.steps > event.to_step
            if not beyond or not segment.steps:
                found.append(segment)
                continue
            whole_us = segment.to_us - segment.from_us
            kept_us = segment.from_us + whole_us * self._durable_steps(segment) // segment.steps
            found += self._divided(segment, kept_us)
        self._segments = found

    def commit(self, event: CheckpointCommitted, *, fold_until_us: int) -> None:
        """Make steps below `event.step` durable, and fold the durable segments that end by `fold_until_us`.

        No lease of the attempt may end before that time.
        """
        self.reports = True
        self._committed_step = max(self._committed_step, event.step)
        self._captured_us = max(self._captured_us or 0, event.at_us - event.upload_us)
        while len(self._segments) > 1:
            segment = self._segments[0]
            if segment.to_us > fold_until_us or self._durable_until_us(segment) < segment.to_us:
                return
            self._fold(segment)

    def conclude(self, outcome: Outcome | None) -> Conclusion:
        """Return the attempt's time as it counts if it ends like this; the outcome is None while it is live."""
        rest = list(self._concluded(outcome))
        return Conclusion(
            folded=self._folded,
            folded_until_us=self._folded_until_us,
            details=self._details or (),
            rest=rest,
            tail=self._tail(outcome),
            tokens=self._folded_tokens + sum(each.tokens for each in rest if each.cls is Class.USEFUL),
            energy=self.energy,
        )

    def _concluded(self, outcome: Outcome | None) -> Iterator[Segment]:
        """Yield the segments that are not folded, without the tail: one after the other, with no gap."""
        at_us, gap = self._folded_until_us, Class.STALL if self._folded else Class.RESTART
        keeps_all = outcome is None or outcome is Outcome.FINISHED
        for segment in self._segments:
            if segment.from_us > at_us:
                yield Segment(gap, at_us, segment.from_us)
            at_us, gap = segment.to_us, Class.STALL
            kept_us = segment.to_us if keeps_all else self._kept_until_us(segment, outcome)
            if kept_us == segment.to_us:
                yield segment
            else:
                yield from self._divided(segment, kept_us)
        if self.restored_us is not None and gap is Class.RESTART and self.restored_us > at_us:
            yield Segment(gap, at_us, self.restored_us)

    def _divided(self, segment: Segment, kept_us: int) -> Iterator[Segment]:
        steps = self._durable_steps(segment)
        tokens = segment.tokens * steps // segment.steps if segment.steps else 0
        if kept_us > segment.from_us:
            yield segment._replace(to_us=kept_us, steps=steps, tokens=tokens)
        yield Segment(
            Class.LOST,
            kept_us,
            segment.to_us,
            segment.first_step + steps,
            segment.steps - steps,
            segment.tokens - tokens,
        )

    def _merge_last_two(self) -> None:
        """Merge spans of a second each into one of a minute, within which steps are taken to be equally long."""
        before, last = self._segments[-2:]
        goes_on = before.first_step + before.steps == last.first_step and before.steps > 0 and last.steps > 0
        if (
            before.cls is last.cls
            and (goes_on or last.cls is not Class.USEFUL)
            and before.to_us == last.from_us
            and last.to_us - before.from_us <= _MERGED_US
        ):
            steps, tokens = before.steps + last.steps, before.tokens + last.tokens
            self._segments[-2:] = [before._replace(to_us=last.to_us, steps=steps, tokens=tokens)]

    def _tail(self, outcome: Outcome | None) -> Class:
        if outcome is None:
            return Class.UNREPORTED
        if outcome not in (Outcome.FINISHED, Outcome.CHECKPOINTED):
            return Class.LOST
        if self._segments or self._folded:
            return Class.RESTART
        return Class.UNREPORTED if outcome is Outcome.FINISHED or self.reports else Class.LOST

    def _durable_steps(self, segment: Segment) -> int:
        return min(segment.steps, max(0, self._committed_step - segment.first_step))

    def _kept_until_us(self, segment: Segment, outcome: Outcome | None) -> int:
        """Return until when this end keeps a segment: an attempt that left at the durable step began no other."""
        at_durable_step = segment.steps == 0 and 0 < segment.first_step == self._committed_step
        if outcome is Outcome.CHECKPOINTED and at_durable_step:
            return segment.to_us
        return self._durable_until_us(segment)

    def _durable_until_us(self, segment: Segment) -> int:
        """Return until when a segment is durable: a useful one by its steps, or by its time if it reported none."""
        if segment.cls is not Class.USEFUL:
            return segment.to_us
        if segment.steps == 0:
            return segment.to_us if segment.to_us <= (self._captured_us or 0) else segment.from_us
        whole_us = segment.to_us - segment.from_us
        return segment.from_us + whole_us * self._durable_steps(segment) // segment.steps

    def _fold(self, segment: Segment) -> None:
        gap = Segment(Class.STALL if self._folded else Class.RESTART, self._folded_until_us, segment.from_us)
        for each in (gap, segment):
            self._folded[each.cls] = self._folded.get(each.cls, 0) + each.to_us - each.from_us
            if self._details is not None and each.to_us > each.from_us:
                self._details.append(each)
            if self.energy is not None:
                self.energy.fold(each.cls, each.to_us)
        self._folded_tokens += segment.tokens
        self._folded_until_us = segment.to_us
        del self._segments[0]

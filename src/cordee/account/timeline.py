"""How the time of one attempt divides into classes, from what one of its ranks told.

    placed ── restart ── first span │ spans, and stall in the gaps between them │ last span ── tail ── GPUs free

Reports can be garbled and the parts still fill the whole: a span is cut to the time it adds after the span before it;
one that begins inside the span before it ends that one there; one that adds nothing is ignored, steps and all.
"""

from typing import NamedTuple

from cordee.account.split import Class
from cordee.events import CheckpointCommitted, Outcome, Reported, SpanClass
from cordee.units import US_PER_S

_MERGED_US = 60 * US_PER_S


_CLASS = {span: Class(span.value) for span in SpanClass}


class Segment(NamedTuple):
    """A span as it was accepted."""

    cls: Class
    from_us: int
    to_us: int
    first_step: int
    steps: int
    tokens: int


class Timeline:
    """Of one attempt. Spans are merged, and durable ones folded into sums, so that a long attempt stays small."""

    def __init__(self, placed_us: int) -> None:
        self.placed_us = placed_us
        self.reports = False  # whether the script has told anything
        self.restored_us: int | None = None
        self.steps = 0
        self._segments: list[Segment] = []
        self._folded: dict[Class, int] = {}
        self._folded_tokens = 0
        self._folded_until_us = placed_us
        self._any_folded = False
        self._committed_step = 0
        self._captured_us: int | None = None

    def tell(self, event: Reported) -> Segment | None:
        """Accept a span; None if it adds no time."""
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

    def commit(self, event: CheckpointCommitted, *, fold_until_us: int) -> None:
        """Steps below `event.step` are durable; what they and others took until `fold_until_us` needs no more detail.

        No lease of the attempt may end before that time.
        """
        self.reports = True
        self._committed_step = max(self._committed_step, event.step)
        self._captured_us = max(self._captured_us or 0, event.at_us - event.upload_us)
        while len(self._segments) > 1:
            segment = self._segments[0]
            if segment.to_us > fold_until_us or self._durable(segment) < segment.to_us:
                return
            self._fold(segment)

    def split(self, end_us: int, outcome: Outcome | None) -> dict[Class, int]:
        """Microseconds by class from placed to `end_us`; the outcome is None while the attempt is live."""
        parts = dict(self._folded)
        cursor = self._folded_until_us

        def add(cls: Class, until_us: int) -> None:
            nonlocal cursor
            until_us = min(until_us, end_us)
            if until_us > cursor:
                parts[cls] = parts.get(cls, 0) + until_us - cursor
                cursor = until_us

        for number, segment in enumerate(self._segments):
            add(Class.STALL if number or self._any_folded else Class.RESTART, segment.from_us)
            if segment.cls is Class.USEFUL and outcome not in (None, Outcome.FINISHED):
                add(Class.USEFUL, self._kept(segment, outcome))
                add(Class.LOST, segment.to_us)
            else:
                add(segment.cls, segment.to_us)
        if self.restored_us is not None and not self._segments and not self._any_folded:
            add(Class.RESTART, self.restored_us)
        add(self._tail(outcome), end_us)
        return parts

    def tokens_kept(self, outcome: Outcome | None) -> int:
        """Tokens of steps that are not lost."""
        kept = self._folded_tokens
        for segment in self._segments:
            if outcome in (None, Outcome.FINISHED):
                kept += segment.tokens
            elif segment.steps:
                kept += segment.tokens * self._durable_steps(segment) // segment.steps
            elif self._kept(segment, outcome) == segment.to_us:
                kept += segment.tokens
        return kept

    def _merge_last_two(self) -> None:
        """Spans of a second each become one of a minute, within which steps are taken to be equally long."""
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
        if self._segments or self._any_folded:
            return Class.RESTART
        return Class.UNREPORTED if outcome is Outcome.FINISHED or self.reports else Class.LOST

    def _durable_steps(self, segment: Segment) -> int:
        return min(segment.steps, max(0, self._committed_step - segment.first_step))

    def _kept(self, segment: Segment, outcome: Outcome | None) -> int:
        """Until when a segment is not lost by this end: whoever leaves at the durable step has begun no other."""
        at_durable_step = segment.steps == 0 and 0 < segment.first_step == self._committed_step
        if outcome is Outcome.CHECKPOINTED and at_durable_step:
            return segment.to_us
        return self._durable(segment)

    def _durable(self, segment: Segment) -> int:
        """Until when a segment is durable: of a useful one by its steps, or by its time if it told no steps."""
        if segment.cls is not Class.USEFUL:
            return segment.to_us
        if segment.steps == 0:
            return segment.to_us if segment.to_us <= (self._captured_us or 0) else segment.from_us
        whole_us = segment.to_us - segment.from_us
        return segment.from_us + whole_us * self._durable_steps(segment) // segment.steps

    def _fold(self, segment: Segment) -> None:
        gap = Class.STALL if self._any_folded else Class.RESTART
        self._folded[gap] = self._folded.get(gap, 0) + segment.from_us - self._folded_until_us
        self._folded[segment.cls] = self._folded.get(segment.cls, 0) + segment.to_us - segment.from_us
        self._folded_tokens += segment.tokens
        self._folded_until_us, self._any_folded = segment.to_us, True
        del self._segments[0]

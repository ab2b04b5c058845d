"""Measured over planned step times of past attempts, by kind of GPU and week: whether machines have changed.

A fold over the log. A plan is off by a constant where its tables are; machines have changed where that constant has.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from cordee.account.measured import Measurements
from cordee.events import AttemptPlaced, Event, NodeUp
from cordee.ids import JobId
from cordee.units import US_PER_S

WEEK_US = 7 * 24 * 3600 * US_PER_S
CHANGED = 0.15
"""The fraction by which a week's step times leave those of the weeks before it, so that machines have changed."""
ENOUGH = 3
"""Attempts in a week, and in all weeks before it, from which a change is told."""
_MONDAY_US = 4 * 24 * 3600 * US_PER_S  # 1 January 1970 was a Thursday


@dataclass(frozen=True, slots=True)
class WeekOfSteps:
    """Attempts of one week on one kind of GPU.

    Attributes:
        gpu_name: as the agents report it; attempts on two kinds count for neither.
        from_us: the week's first moment, a Monday in UTC.
        attempts: that had a planned step time and measured one after their first steps.
        over_plan: the median of measured over planned step times.
        changed_by: `over_plan` over that of all weeks before, less 1; None where either has too few attempts.
    """

    gpu_name: str
    from_us: int
    attempts: int
    over_plan: float
    changed_by: float | None

    @property
    def is_change(self) -> bool:
        """Return whether machines have changed, rather than steps differ."""
        return self.changed_by is not None and abs(self.changed_by) > CHANGED


def weeks_of_steps(events: Iterable[Event]) -> tuple[WeekOfSteps, ...]:
    """Return the weeks in which attempts were placed, by kind of GPU, oldest first."""
    fold, kind_of, placed = Measurements(), dict[str, str](), dict[tuple[JobId, int], str]()
    for event in events:
        fold.apply(event)
        if isinstance(event, NodeUp):
            kind_of[event.node.name] = event.node.gpu_name
        elif isinstance(event, AttemptPlaced):
            kinds = {kind_of.get(lease.node, "") for lease in event.leases}
            placed[event.job_id, event.epoch] = kinds.pop() if len(kinds) == 1 else ""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (job_id, epoch), kind in placed.items():
        attempt = fold.of(job_id, epoch)
        plan = None if attempt is None else attempt.estimate
        if attempt is None or plan is None or not (kind and plan.step_us and attempt.step_us and attempt.is_steady):
            continue
        week_us = (attempt.placed_us - _MONDAY_US) // WEEK_US * WEEK_US + _MONDAY_US
        found[kind][week_us].append(attempt.step_us / plan.step_us)
    return tuple(week for kind in sorted(found) for week in _weeks(kind, found[kind]))


def _weeks(kind: str, by_week: dict[int, list[float]]) -> Iterable[WeekOfSteps]:
    before: list[float] = []
    for week_us, ratios in sorted(by_week.items()):
        known = min(len(before), len(ratios)) >= ENOUGH
        changed_by = median(ratios) / median(before) - 1 if known else None
        yield WeekOfSteps(kind, week_us, len(ratios), median(ratios), changed_by)
        before += ratios

"""Decide a live cluster's log again: first by its own policy, record for record, then by another one.

`audit` compares the log with the scheduler: before each decision it builds the state from the log so far, and calls
`decide` at that time. Nothing in that is random, so every decision must come out as it is in the log; a difference is
one between two versions, or a fault. `replay` runs the world that the log shows under a policy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cordee.account.ledger import Ledger
from cordee.control.patience import policy_of
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    JobEnded,
    KillOrdered,
    NoticeGiven,
    ServerUp,
)
from cordee.schedule import decide
from cordee.schedule.policy import Policy
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply
from cordee.simulate.metrics import Metrics, Summary
from cordee.simulate.observed import ObservedLog
from cordee.simulate.run import run

_DECISIONS = (AttemptPlaced, NoticeGiven, KillOrdered, AttemptEnded, JobEnded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A moment at which the logged decision differs from the one that is made now."""

    number: int  # of the log's first record there
    logged: tuple[Event, ...]
    decided: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The moments of the log with decisions, and those that come out differently."""

    moments: int
    decisions: int
    differences: tuple[Difference, ...]


def audit(log: Sequence[Event], policy: Policy) -> Audit:
    """Decide every moment of the log again, each from the log up to it, with the patience that the log says."""
    state = State(policy)
    moments = decisions = 0
    differences = []
    for number, group in _groups(log):
        if isinstance(group[0], _DECISIONS):
            moments, decisions = moments + 1, decisions + len(group)
            decided = decide(state, group[0].at_us).events
            if tuple(group) != decided:
                differences.append(Difference(number=number, logged=tuple(group), decided=decided))
        for event in group:
            apply(state, event)
            if isinstance(event, ServerUp):
                state.use(policy_of(event, policy))
    return Audit(moments=moments, decisions=decisions, differences=tuple(differences))


def _groups(log: Sequence[Event]) -> Iterator[tuple[int, list[Event]]]:
    """Yield runs of decisions of one moment, and every other event by itself."""
    group: list[Event] = []
    for number, event in enumerate(log, start=1):
        if isinstance(event, _DECISIONS):
            if group and group[0].at_us != event.at_us:
                yield number - len(group), group
                group = []
            group.append(event)
            continue
        if group:
            yield number - len(group), group
            group = []
        yield number, [event]
    if group:
        yield len(log) + 1 - len(group), group


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a world under a policy. `waits_us` is by job, of those that started."""

    summary: Summary
    waits_us: dict[str, int]
    events: int
    errors: int = 0


def measure_log(observed: ObservedLog) -> Replayed:
    """Measure the log itself as a simulated one is."""
    return _measured(observed.log, (observed.ledger, observed.end_us), 0)


def replay(observed: ObservedLog, policy: Policy, *, estimates: bool = False) -> Replayed:
    """Run the same arrivals, the same work and the same nodes, until the log's end."""
    log: list[Event] = []
    done = run(
        [node for _, node in observed.nodes],
        observed.submissions(estimates=estimates),
        observed.outages,
        policy=policy,
        queues=observed.queues[-1].queues if observed.queues else (),
        start_us=observed.start_us,
        until_us=observed.end_us,
        sink=log.append,
    )
    return _measured(log, (done.ledger, done.at_us), done.errors)


def _measured(log: Sequence[Event], account: tuple[Ledger, int], errors: int) -> Replayed:
    metrics, waits = Metrics(), dict[str, int]()
    for event in log:
        started = len(metrics.wait_us)
        metrics.apply(event)
        if isinstance(event, AttemptPlaced) and len(metrics.wait_us) > started:
            waits[event.job_id] = metrics.wait_us[-1]
    return Replayed(summary=metrics.summary(account), waits_us=waits, events=len(log), errors=errors)

"""A second cycle at the same moment, on crowded clusters where jobs take turns (docs/design/schedule.md).

After few cycles in a thousand it would decide more; that is left to the next cycle, and does no harm.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from cordee.control import tick
from cordee.events import Event, KillOrdered, NoticeGiven
from cordee.schedule import Decision, Policy, State, decide, enact
from cordee.simulate.cluster import cluster
from cordee.simulate.metrics import Metrics, Summary
from cordee.simulate.run import run
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import Tally
from cordee.simulate.workload import Costs, submissions

SIZES = ((1, 50), (2, 10), (4, 20), (8, 15), (16, 5))
SEEDS = (1, 2, 3)


@dataclass
class Cycles:
    """Takes the place of `enact`: looks a second time after each cycle, and `acts` on it or only keeps it."""

    acts: bool = False
    looks: list[tuple[bool, tuple[Event, ...]]] = field(default_factory=list)  # whether a victim leaves, and what more

    def __call__(self, state: State, now_us: int, policy: Policy | None, write: Any) -> Decision:
        sleeps = state.idle is not None and state.idle.holds(state.changes, now_us)
        first = enact(state, now_us, policy, write)
        if sleeps:  # turns change at whole minutes, and the next one is known
            return first
        idle, state.idle = state.idle, None  # as if it had not decided yet
        second = (enact if self.acts else decide)(state, now_us, policy, *((write,) if self.acts else ()))
        leaves = any(attempt.leaving for attempt in state.attempts.values())
        self.looks.append((leaves, second.events))
        if not self.acts:
            state.idle = idle
            return first
        return second._replace(events=(*first.events, *second.events), errors=(*first.errors, *second.errors))


def crowd(seed: int, cycles: Cycles, monkeypatch: pytest.MonkeyPatch) -> Summary:
    """Return the figures of 400 jobs that ask for 1.2 times what 6 nodes have."""
    monkeypatch.setattr(tick, "enact", cycles)
    nodes, metrics = cluster("6x8"), Metrics()
    drawn = Synthetic(jobs=400, median_s=3000, sizes=SIZES).at_load(48, 1.2, seed)
    jobs = submissions(drawn.draw(seed), nodes, Tally("x"), costs=Costs())
    done = run(nodes, jobs, defer_reports=True, sink=metrics.apply)
    assert done.errors == 0
    return metrics.summary((done.ledger, done.at_us))


def test_a_second_look_decides_more_after_notices_alone_and_acting_on_it_changes_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, acted = Cycles(), Cycles(acts=True)
    pairs = [(crowd(seed, left, monkeypatch), crowd(seed, acted, monkeypatch)) for seed in SEEDS]
    more = [(leaves, second) for leaves, second in left.looks if second]
    assert 0 < len(more) < len(left.looks) / 100, "these worlds have such cycles, and they are few"
    for leaves, second in more:
        assert leaves, "GPUs are being vacated, and the next cycle comes with them"
        assert all(isinstance(event, NoticeGiven | KillOrdered) for event in second), "nothing starts or ends late"
    for one, other in pairs:
        assert one.jct_s is not None and other.jct_s is not None and one.away_s is not None and other.away_s is not None
        assert other.jct_s.mean == pytest.approx(one.jct_s.mean, rel=0.01)
        assert other.away_s.max == pytest.approx(one.away_s.max, rel=0.05)
        assert other.lost_gpu_hours == pytest.approx(one.lost_gpu_hours, rel=0.05)

"""Policies on the same trace and cluster, one after the other: what each run is told, and what is kept of it.

A run is a pure function of trace, cluster, policy and seed.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from cordee.events import Event, Node, Queue
from cordee.simulate.cluster import Chance, by_chance, merged
from cordee.simulate.gantt import Gantt
from cordee.simulate.metrics import Metrics, Summary
from cordee.simulate.policies import Named
from cordee.simulate.run import run
from cordee.simulate.traces.job import Tally, TraceJob
from cordee.simulate.workload import Costs, submissions
from cordee.simulate.world import Outage

Jobs = Callable[[Tally], Iterable[TraceJob]]
"""The trace's jobs, from their beginning each time; what is no job is counted."""


class Kept:
    """Jobs that are read once and kept, unless there are very many: each policy needs them again."""

    def __init__(self, read: Jobs, most: int = 500_000) -> None:
        self._read, self._most = read, most
        self._jobs: list[TraceJob] | None = None
        self._seen: Tally | None = None

    def __call__(self, tally: Tally) -> Iterator[TraceJob]:
        """The jobs, from their beginning."""
        if self._jobs is None or self._seen is None or tally.strict:
            jobs: list[TraceJob] = []
            for job in self._read(tally):
                if len(jobs) < self._most:
                    jobs.append(job)
                yield job
            if len(jobs) < self._most:
                self._jobs, self._seen = jobs, replace(tally, kinds=dict(tally.kinds), first=dict(tally.first))
            return
        for kind, count in self._seen.kinds.items():
            tally.kinds[kind] = tally.kinds.get(kind, 0) + count
            tally.first.setdefault(kind, self._seen.first.get(kind, 0))
        tally.jobs += len(self._jobs)
        yield from self._jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a run is told but the policy.

    Attributes:
        jobs: of the trace.
        name: of the trace, for people.
        nodes: of the cluster; with `vcs` one virtual cluster's nodes are cut from it, in order.
        vcs: nodes of each virtual cluster, each a cluster of its own.
        chances: of nodes going.
        outages: when nodes are away, as a series tells it.
        tiers: shares in a hundred of production, standard and preemptible, drawn by seed; empty: as the trace says.
    """

    jobs: Jobs
    name: str
    nodes: tuple[Node, ...]
    seed: int = 0
    costs: Costs = field(default_factory=Costs)
    vcs: tuple[tuple[str, int], ...] = ()
    chances: tuple[Chance, ...] = ()
    outages: tuple[Outage, ...] = ()
    queues: tuple[Queue, ...] = ()
    tiers: tuple[int, ...] = ()
    limit: int | None = None
    window_us: tuple[int, int | None] = (0, None)
    until_us: int | None = None
    strict: bool = False

    def tally(self) -> Tally:
        """A new count."""
        return Tally(self.name, self.strict)

    def parts(self) -> Iterator[tuple[str | None, tuple[Node, ...]]]:
        """The clusters, and whose jobs each takes; None: everybody's."""
        if not self.vcs:
            yield None, self.nodes
            return
        first = 0
        for name, count in self.vcs:
            yield name, self.nodes[first : first + count]
            first += count

    def given(self, tally: Tally) -> Iterator[TraceJob]:
        """The jobs with their tiers."""
        if not self.tiers:
            yield from self.jobs(tally)
            return
        dice = random.Random(f"{self.seed}/tiers")
        for job in self.jobs(tally):
            yield replace(job, tier=dice.choices(("production", "standard", "preemptible"), self.tiers)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One policy's run."""

    named: Named
    summary: Summary
    metrics: Metrics
    gantt: Gantt
    events: int
    errors: int


def check(scenario: Scenario) -> tuple[Tally, int]:
    """Read the whole trace once: what is left out of it, and how many jobs will be simulated.

    Raises:
        TraceError: it cannot be read, or a row is bad and it is to be strict.
    """
    known = {name for name, _ in scenario.vcs}
    whole, total = scenario.tally(), 0
    read = list(scenario.given(whole)) if known else scenario.given(whole)
    for vc, nodes in scenario.parts():
        total += sum(1 for _ in submissions(_of(vc, read), nodes, whole, costs=scenario.costs, **_cut(scenario)))
    strangers = sum(job.vc not in known for job in read) if known else 0
    if strangers:
        whole.kinds["of a virtual cluster that has no nodes"] = strangers
    return whole, total


def simulate(scenario: Scenario, named: Named, progress: Callable[[int], None] | None = None) -> Result:
    """Run one policy; `progress` is told how many jobs have ended."""
    metrics: Metrics | None = None
    gantt = Gantt(node.name for node in scenario.nodes)
    ledgers, events, errors = [], 0, 0
    for vc, nodes in scenario.parts():
        tally = replace(scenario.tally(), strict=False)
        part = Metrics()
        watch = _Watch(part, gantt, progress, 0 if metrics is None else len(metrics.jct_us))
        done = run(
            nodes,
            submissions(
                _of(vc, scenario.given(tally)),
                nodes,
                tally,
                costs=scenario.costs,
                estimates=named.estimates,
                **_cut(scenario),
            ),
            _outages(scenario, nodes),
            policy=named.policy,
            queues=scenario.queues,
            start_us=scenario.window_us[0],
            until_us=scenario.until_us,
            defer_reports=True,
            sink=watch.apply,
        )
        ledgers.append((done.ledger, done.at_us))
        events, errors = events + watch.events, errors + done.errors
        if metrics is None:
            metrics = part
        else:
            metrics.add(part)
    assert metrics is not None, "a scenario has at least one cluster"
    return Result(
        named=named,
        summary=metrics.summary(*ledgers),
        metrics=metrics,
        gantt=gantt,
        events=events,
        errors=errors,
    )


class _Watch:
    """Whoever wants to see the log as it grows."""

    def __init__(self, metrics: Metrics, gantt: Gantt, progress: Callable[[int], None] | None, before: int) -> None:
        self.events = 0
        self._apply, self._draw, self._progress, self._before = metrics.apply, gantt.apply, progress, before
        self._jct = metrics.jct_us

    def apply(self, event: Event) -> None:
        """Pass it on."""
        self._apply(event)
        self._draw(event)
        self.events += 1
        if self._progress is not None and self.events % 4096 == 0:
            self._progress(self._before + len(self._jct))


def _of(vc: str | None, jobs: Iterable[TraceJob]) -> Iterable[TraceJob]:
    return jobs if vc is None else (job for job in jobs if job.vc == vc)


class _Cut(TypedDict):
    limit: int | None
    window_us: tuple[int, int | None]


def _cut(scenario: Scenario) -> _Cut:
    return {"limit": scenario.limit, "window_us": scenario.window_us}


def _outages(scenario: Scenario, nodes: Sequence[Node]) -> Iterator[Outage]:
    here = {node.name for node in nodes}
    told = (each for each in scenario.outages if set(each.nodes) <= here)
    drawn = (by_chance(nodes, each, scenario.seed, scenario.window_us[0]) for each in scenario.chances)
    return merged(told, *drawn)

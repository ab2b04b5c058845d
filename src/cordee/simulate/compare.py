"""Policies on the same trace and cluster, one after the other: the scenario of each run, and its result.

A run is a pure function of trace, cluster, policy and seed.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypedDict

from cordee.events import Event, Node, Queue
from cordee.simulate.cluster import OutageRate, SpotSeries, merged, random_outages
from cordee.simulate.gantt import DRAWN, Gantt
from cordee.simulate.metrics import Metrics, Summary
from cordee.simulate.policies import NamedPolicy
from cordee.simulate.run import run
from cordee.simulate.traces.job import Tally, TraceJob
from cordee.simulate.workload import Costs, fitting, submissions
from cordee.simulate.world import Outage

Jobs = Callable[[Tally], Iterable[TraceJob]]
"""Reads the trace's jobs from the beginning, and counts rows that are no job."""


class CachedJobs:
    """Jobs that are read once and cached, unless there are very many: each policy needs them again."""

    def __init__(self, read: Jobs, most: int = 500_000) -> None:
        self._read, self._most = read, most
        self._jobs: list[TraceJob] | None = None
        self._counted: Tally | None = None

    def __call__(self, tally: Tally) -> Iterator[TraceJob]:
        """Yield the jobs from the beginning."""
        if self._jobs is None or self._counted is None or tally.strict:
            jobs: list[TraceJob] = []
            for job in self._read(tally):
                if len(jobs) < self._most:
                    jobs.append(job)
                yield job
            if len(jobs) < self._most:
                self._jobs, self._counted = jobs, deepcopy(tally)
            return
        for mine, counted in ((tally.kinds, self._counted.kinds), (tally.changes, self._counted.changes)):
            for kind, count in counted.items():
                mine[kind] = mine.get(kind, 0) + count
                tally.first.setdefault(kind, self._counted.first.get(kind, 0))
        tally.jobs += len(self._jobs)
        yield from self._jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The inputs of a run, but for the policy.

    Attributes:
        jobs: of the trace.
        name: of the trace, for messages.
        nodes: of the cluster; with `vcs` each virtual cluster takes its nodes from them, in order.
        vcs: the number of nodes of each virtual cluster, each a cluster of its own.
        outage_rates: random outages.
        outages: outages at known times.
        spot: spot nodes that come and go.
        tiers: percentages of production, standard and preemptible jobs, drawn by seed; empty: the trace's own.
    """

    jobs: Jobs
    name: str
    nodes: tuple[Node, ...]
    seed: int = 0
    costs: Costs = field(default_factory=Costs)
    vcs: tuple[tuple[str, int], ...] = ()
    outage_rates: tuple[OutageRate, ...] = ()
    outages: tuple[Outage, ...] = ()
    spot: SpotSeries | None = None
    queues: tuple[Queue, ...] = ()
    tiers: tuple[int, ...] = ()
    limit: int | None = None
    window_us: tuple[int, int | None] = (0, None)
    until_us: int | None = None
    strict: bool = False

    def tally(self) -> Tally:
        """Return a new count."""
        return Tally(self.name, self.strict)

    def clusters(self) -> Iterator[tuple[str | None, tuple[Node, ...]]]:
        """Yield the clusters with the name whose jobs each takes; None: all jobs."""
        if not self.vcs:
            yield None, self.nodes
            return
        first = 0
        for name, count in self.vcs:
            yield name, self.nodes[first : first + count]
            first += count

    def tiered_jobs(self, tally: Tally) -> Iterator[TraceJob]:
        """Yield the jobs with their tiers."""
        if not self.tiers:
            yield from self.jobs(tally)
            return
        rng = random.Random(f"{self.seed}/tiers")
        for job in self.jobs(tally):
            yield replace(job, tier=rng.choices(("production", "standard", "preemptible"), self.tiers)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The run of one policy."""

    policy: NamedPolicy
    summary: Summary
    metrics: Metrics
    gantt: Gantt
    events: int
    errors: int


def count_jobs(scenario: Scenario) -> tuple[Tally, int]:
    """Read the whole trace once; return the rows that are left out, and the number of jobs to simulate.

    Raises:
        TraceError: it cannot be read, or a row is bad and the scenario is strict.
    """
    known = {name for name, _ in scenario.vcs}
    whole, total = scenario.tally(), 0
    read = list(scenario.tiered_jobs(whole)) if known else scenario.tiered_jobs(whole)
    limits = _limits(scenario)
    for vc, nodes in scenario.clusters():
        cut = _cut(scenario, limits, vc)
        total += sum(1 for _ in submissions(_of(vc, read), nodes, whole, costs=scenario.costs, **cut))
    unknown = sum(job.vc not in known for job in read) if known else 0
    if unknown:
        whole.kinds["of a virtual cluster that has no nodes"] = unknown
    return whole, total


def simulate(scenario: Scenario, named: NamedPolicy, progress: Callable[[int], None] | None = None) -> Result:
    """Run one policy; `progress` gets the number of jobs that have ended."""
    metrics: Metrics | None = None
    gantt = Gantt(node.name for node in scenario.nodes)
    ledgers, events, errors = [], 0, 0
    limits = _limits(scenario)
    for vc, nodes in scenario.clusters():
        tally = replace(scenario.tally(), strict=False)
        part = Metrics()
        watch = _Fold(part, gantt, progress, 0 if metrics is None else len(metrics.jct_us))
        done = run(
            nodes,
            submissions(
                _of(vc, scenario.tiered_jobs(tally)),
                nodes,
                tally,
                costs=scenario.costs,
                estimates=named.estimates,
                **_cut(scenario, limits, vc),
            ),
            outages_of(scenario, nodes),
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
        policy=named,
        summary=metrics.summary(*ledgers),
        metrics=metrics,
        gantt=gantt,
        events=events,
        errors=errors,
    )


class _Fold:
    """Metrics, drawing and progress over the log as it grows."""

    def __init__(self, metrics: Metrics, gantt: Gantt, progress: Callable[[int], None] | None, before: int) -> None:
        self.events = 0
        self._apply, self._draw, self._progress, self._before = metrics.apply, gantt.apply, progress, before
        self._jct = metrics.jct_us

    def apply(self, event: Event) -> None:
        """Fold one event."""
        self._apply(event)
        if type(event) in DRAWN:
            self._draw(event)
        self.events += 1
        if self._progress is not None and self.events % 4096 == 0:
            self._progress(self._before + len(self._jct))


def _of(vc: str | None, jobs: Iterable[TraceJob]) -> Iterable[TraceJob]:
    return jobs if vc is None else (job for job in jobs if job.vc == vc)


class _Cut(TypedDict):
    limit: int | None
    window_us: tuple[int, int | None]


def _cut(scenario: Scenario, limits: Mapping[str | None, int], vc: str | None) -> _Cut:
    limit = scenario.limit if vc is None or scenario.limit is None else limits[vc]
    return {"limit": limit, "window_us": scenario.window_us}


def taken(scenario: Scenario) -> list[TraceJob]:
    """Return the jobs that are simulated, in order: the first ones that their clusters can hold."""
    tally = replace(scenario.tally(), strict=False)
    read = list(scenario.tiered_jobs(tally))
    parts = [
        fitting(_of(vc, read), nodes, tally, limit=scenario.limit, window_us=scenario.window_us)
        for vc, nodes in scenario.clusters()
    ]
    merged_jobs = heapq.merge(*parts, key=lambda each: (each[0].submit_us, each[0].line))
    return [job for job, _ in islice(merged_jobs, scenario.limit)]


def _limits(scenario: Scenario) -> Counter[str | None]:
    """Return how many jobs each virtual cluster takes, of a number of jobs in all."""
    return Counter(job.vc for job in taken(scenario)) if scenario.vcs and scenario.limit is not None else Counter()


def outages_of(scenario: Scenario, nodes: Sequence[Node]) -> Iterator[Outage]:
    """Return the outages of these nodes: those at known times, and those of a series and random ones without end."""
    here, start_us = {node.name for node in nodes}, scenario.window_us[0]
    listed = (each for each in scenario.outages if set(each.nodes) <= here)
    series = iter(()) if scenario.spot is None else scenario.spot.outages(nodes, start_us)
    drawn = (random_outages(nodes, each, scenario.seed, start_us) for each in scenario.outage_rates)
    return merged(listed, series, *drawn)

"""The order of jobs studied in a bare pool of GPUs: mean JCT against the bound on waiting, over many clusters.

python benchmarks/order_frontier.py [TRACES_FOLDER] [--jobs 1500] [--only NAME,...] [--clusters PART]
    [--svg FILE] [--json]

A pool of GPUs without nodes; gangs start as a whole and may be preempted (30 s to save, 60 s to restart). Clusters are
synthetic (jobs of minutes or of days, light and heavy tails, 8 to 512 GPUs, load 0.5 to 2), and every CSV file of a
folder of traces, by virtual cluster, on as many GPUs as make the load 0.8 and 1.2. FIFO, EASY, SJF and SRSF know the
run times; the others know of a job only what it has received. Times are CPU seconds.
"""

import argparse
import heapq
import json
import math
import random
import sys
import time
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cordee.view.chart import Axis, ChartLine, Mark, chart_svg
from trace_clusters import folder_of_traces, virtual_clusters

FIRST_S, FIRST_JOBS = 150_000.0, 7
SAVE_S, RESTART_S, SHORT_S = 30.0, 60.0, 60.0
"""The history that is there before any job ended; a notice, a restart, and the least run time of a slowdown."""
ROUND_S, COMPUTED_S = 360.0, 1_920.0
"""Gavel's rounds, and the least time between two computations of its optimum."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One order of jobs.

    Attributes:
        order: `fifo`, `sjf`, `srsf`, `levels`, or `gavel`: in rounds of six minutes the jobs go first whose allotted
            part of the time, over what they had since it was computed last, is largest (Narayanan et al., OSDI 2020).
            Allotted is what gives each job as many GPUs on average, none more than it asks for: max-min fairness by
            water filling, on GPUs of one kind. Unlike theirs, free GPUs are filled between rounds.
        levels: GPU-seconds received at which a job moves down.
        patience: the wait after which a job is overdue; None: never.
        unit: of `patience`: `s`, the `mean` run time of ended jobs, or that of the `long` ones: weighted by run time.
        lag: the further wait for each second that a job has run.
        fraction: of the GPUs that overdue jobs may hold where nothing waits.
        promote: a job goes back to the first level once it has waited for as many times its run time, both since it was
            promoted last: Tiresias' PROMOTEKNOB; None: never.
    """

    order: str = "levels"
    backfill: str = "fit"
    levels: tuple[float, ...] = ()
    patience: float | None = None
    unit: str = "s"
    lag: float = 0.0
    fraction: float = 0.6
    promote: float | None = None
    after_s: float = 90.0
    slice_s: float = 1800.0


LEVELS = tuple(3600.0 * 16**level for level in range(6))
CLOSER = tuple(3600.0 * 8**level for level in range(8))
KNOB = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
RULES = {
    "fifo": Rule(order="fifo", backfill="none"),
    "easy": Rule(order="fifo", backfill="easy"),
    "sjf": Rule(order="sjf"),
    "srsf": Rule(order="srsf", after_s=0, slice_s=0),
    "2d-las": Rule(levels=(3250.0,), after_s=0, slice_s=0),
    "promote 8": Rule(levels=(3250.0,), promote=8.0, after_s=0, slice_s=0),
    "promote 1": Rule(levels=(3250.0,), promote=1.0, after_s=0, slice_s=0),
    "gavel": Rule(order="gavel"),
    "before": Rule(levels=tuple(hours * 3600.0 for hours in (1, 16, 64, 256)), patience=150_000.0),
    **{f"patience {each:g}": Rule(levels=LEVELS, patience=each, unit="long") for each in KNOB},
    "levels by 8": Rule(levels=CLOSER, patience=0.5, unit="long"),
    "mean 14": Rule(levels=LEVELS, patience=14, unit="mean"),
    "lag 5": Rule(levels=LEVELS, patience=5, unit="mean", lag=1.0),
    "never": Rule(levels=LEVELS),
}


@dataclass(slots=True)
class Job:
    """A job of a trace, and what became of it."""

    at_s: float
    gpus: int
    run_s: float
    number: int
    left_s: float = 0.0
    ran_s: float = 0.0
    since_s: float = 0.0  # it waits, or runs, since then
    waited_s: float = 0.0
    ended_s: float = 0.0
    level: int = 0
    attempt: int = 0
    overdue: bool = False
    key: tuple[float, ...] = ()
    overhead_s: float = 0.0
    promoted_s: float = 0.0  # what it had run when it was promoted last
    allotted: float = 1.0  # Gavel's optimum: the part of the time in which it runs
    computed_s: float = 0.0  # what it had run when that was computed

    @property
    def counted_gpu_s(self) -> float:
        """What it has received that counts for its level."""
        return (self.ran_s - self.promoted_s) * self.gpus


class Pool:
    """One run of one rule."""

    def __init__(self, rule: Rule, jobs: list[tuple[float, int, float]], gpus: int) -> None:
        self.rule, self.gpus, self.free, self.now = rule, gpus, gpus, 0.0
        self.jobs = [Job(at, min(size, gpus), max(1.0, run), number) for number, (at, size, run) in enumerate(jobs)]
        self.lines: dict[int, list[tuple[tuple[float, ...], int]]] = defaultdict(list)
        self.ages: list[tuple[float, int]] = []  # (submission and run time: the wait is now minus it, number)
        self.running: dict[int, Job] = {}
        self.at_level = [0] * (len(rule.levels) + 1)
        self.heap: list[tuple[float, int, int, int]] = []
        self.asked = self.held = self.preempted = 0
        self.lost_gpu_s = 0.0
        self.ended, self.sum_s, self.sum_s2 = 0, 0.0, 0.0
        self.computed_s = -math.inf

    def patience_s(self) -> float:
        """Return the wait after which a job is overdue."""
        if self.rule.patience is None:
            return math.inf
        if self.rule.unit == "mean":
            return self.rule.patience * self.sum_s / self.ended if self.ended >= 20 else FIRST_S
        first_s = FIRST_S * FIRST_JOBS
        long_s = (self.sum_s2 + first_s * FIRST_S) / (self.sum_s + first_s)
        return self.rule.patience * (1.0 if self.rule.unit == "s" else long_s)

    # -- the loop

    def run(self) -> dict[str, float]:
        """Run to the end; return the figures."""
        for job in self.jobs:
            heapq.heappush(self.heap, (job.at_s, 0, job.number, 0))
        round_s = ROUND_S if self.rule.order == "gavel" else 0.0
        ticking = False
        while self.heap:
            self.now = self.heap[0][0]
            while self.heap and self.heap[0][0] <= self.now:
                _, kind, number, attempt = heapq.heappop(self.heap)
                if kind == 3:
                    ticking = False
                    self.round()
                    continue
                job = self.jobs[number]
                if kind == 0:
                    job.left_s, job.since_s = job.run_s, job.at_s
                    self.queue(job)
                    if self.rule.after_s:
                        self.wake(self.now + self.rule.after_s)
                    if self.rule.patience is not None and self.patience_s() < math.inf:
                        self.wake(self.now + self.patience_s())
                elif attempt == job.attempt:
                    self.turn(kind, job)
            if round_s:
                self.fill()
                if not ticking and (self.lines_count() or self.running):
                    heapq.heappush(self.heap, ((self.now // round_s + 1) * round_s, 3, 0, 0))
                    ticking = True
            else:
                self.schedule()
        return self.figures()

    def turn(self, kind: int, job: Job) -> None:
        """End a job that runs, change its level, or promote one that waits."""
        if job.number not in self.running:
            if kind == 4:
                self.unqueue(job)
                job.promoted_s = job.ran_s
                self.queue(job)
        elif kind == 1:
            self.stop(job, ended=True)
        elif kind == 2:
            self.relevel(job)

    def lines_count(self) -> int:
        return sum(map(len, self.lines.values()))

    def wake(self, at_s: float) -> None:
        """Look again then."""
        heapq.heappush(self.heap, (math.ceil(at_s / 60.0) * 60.0, 2, 0, -1))

    def key(self, job: Job) -> tuple[float, ...]:
        """The smaller, the sooner; jobs of one size stand in one line."""
        order = self.rule.order
        if order == "fifo":
            return (job.at_s,)
        if order == "sjf":
            return (job.run_s, job.at_s)
        if order == "srsf":
            return (job.left_s * job.gpus, job.at_s)
        if order == "gavel":
            return (-self.priority(job), job.at_s)
        job.level = bisect_right(self.rule.levels, job.counted_gpu_s)
        return (job.level, job.at_s)

    def queue(self, job: Job) -> None:
        job.key = self.key(job)
        insort(self.lines[job.gpus], (job.key, job.number))
        if self.rule.patience is not None:
            insort(self.ages, (job.at_s + job.ran_s, job.number))
        self.asked += job.gpus

    def unqueue(self, job: Job) -> None:
        line = self.lines[job.gpus]
        line.pop(bisect_right(line, (job.key, job.number)) - 1)
        if self.rule.patience is not None:
            self.ages.pop(bisect_right(self.ages, (job.at_s + job.ran_s, job.number)) - 1)
        self.asked -= job.gpus

    def start(self, job: Job, *, overdue: bool = False) -> None:
        self.unqueue(job)
        away = self.now - job.since_s
        job.waited_s += away
        job.overhead_s = RESTART_S if job.attempt else 0.0
        job.attempt += 1
        job.since_s, job.overdue = self.now, overdue
        self.free -= job.gpus
        self.held += job.gpus if overdue else 0
        self.running[job.number] = job
        self.at_level[min(job.level, len(self.at_level) - 1)] += job.gpus
        heapq.heappush(self.heap, (self.now + job.overhead_s + job.left_s, 1, job.number, job.attempt))
        if self.rule.order == "levels":
            if job.attempt > 1 and self.rule.slice_s:
                self.wake(self.now + self.rule.slice_s)
            self.next_level(job)

    def next_level(self, job: Job) -> None:
        marks = self.rule.levels
        if job.level < len(marks) and marks[job.level] < math.inf:
            ran = max(0.0, self.now - job.since_s - job.overhead_s)
            at = self.now + (marks[job.level] - job.counted_gpu_s) / job.gpus - ran
            at += max(0.0, job.since_s + job.overhead_s - self.now)
            heapq.heappush(self.heap, (max(self.now + 1, math.ceil(at / 60) * 60.0), 2, job.number, job.attempt))

    def relevel(self, job: Job) -> None:
        ran = max(0.0, self.now - job.since_s - job.overhead_s)
        level = bisect_right(self.rule.levels, job.counted_gpu_s + ran * job.gpus)
        if level != job.level:
            self.at_level[job.level] -= job.gpus
            self.at_level[level] += job.gpus
            job.level = level
        self.next_level(job)

    def stop(self, job: Job, *, ended: bool = False) -> None:
        del self.running[job.number]
        self.at_level[min(job.level, len(self.at_level) - 1)] -= job.gpus
        self.free += job.gpus
        self.held -= job.gpus if job.overdue else 0
        ran = min(job.left_s, max(0.0, self.now - job.since_s - job.overhead_s))
        job.left_s -= ran
        job.ran_s += ran
        if ended:
            job.ended_s, job.left_s = self.now, 0.0
            self.ended, self.sum_s, self.sum_s2 = self.ended + 1, self.sum_s + job.run_s, self.sum_s2 + job.run_s**2
            return
        self.preempted += 1
        self.lost_gpu_s += SAVE_S * job.gpus
        job.left_s += SAVE_S  # its GPUs are held while it saves
        job.since_s = self.now
        self.queue(job)
        if self.rule.promote is not None:
            at = self.now + self.rule.promote * (job.ran_s - job.promoted_s)
            heapq.heappush(self.heap, (at, 4, job.number, job.attempt))

    # -- one decision

    def schedule(self) -> None:
        """Overdue jobs, then the heads of all lines in the order of their keys."""
        if not self.asked:
            return
        if self.rule.patience is not None:
            self.overdue()
        heads = [(line[0], size, 0) for size, line in self.lines.items() if line]
        heapq.heapify(heads)
        preempts = self.rule.order in ("levels", "srsf")
        while heads:
            (key, number), size, at = heads[0]
            job, line = self.jobs[number], self.lines[size]
            if size <= self.free or (preempts and self.room(job, key)):
                self.start(job)
            elif preempts and self.now - job.since_s < self.rule.after_s and at < 8:
                at += 1  # those behind it may have waited for longer
            else:
                if self.rule.backfill == "none":
                    return
                if self.rule.backfill == "easy":
                    self.easy(job)
                    return
                heapq.heappop(heads)
                continue
            if at < len(line):
                heapq.heapreplace(heads, (line[at], size, at))
            else:
                heapq.heappop(heads)

    def room(self, job: Job, key: tuple[float, ...]) -> bool:
        """Preempt running jobs of worse standing, the worst first."""
        if self.now - job.since_s < self.rule.after_s:
            return False
        found, need = [], job.gpus - self.free
        if self.rule.order == "levels":
            if sum(self.at_level[job.level + 1 :]) < need:
                return False
            for each in self.running.values():
                if each.level > job.level and not each.overdue and self.slice_over(each):
                    found.append(((-each.level, -each.gpus * each.ran_s, -each.since_s), each))
        else:
            for each in self.running.values():
                left = (each.left_s - max(0.0, self.now - each.since_s - each.overhead_s)) * each.gpus
                if left > key[0]:
                    found.append(((-left, 0.0, 0.0), each))
        return self.evict(found, need)

    def slice_over(self, job: Job) -> bool:
        return job.attempt == 1 or self.now - job.since_s >= self.rule.slice_s

    def evict(self, found: list[Any], need: int) -> bool:
        """Stop the first of these that make enough room, less those that are not needed."""
        if sum(each.gpus for _, each in found) < need:
            return False
        chosen: list[Job] = []
        for _, each in sorted(found, key=lambda pair: pair[0]):
            if need <= 0:
                break
            chosen.append(each)
            need -= each.gpus
        for each in sorted(chosen, key=lambda each: each.gpus):
            if each.gpus <= -need:
                need += each.gpus
                chosen.remove(each)
        for each in chosen:
            self.stop(each)
        return True

    def overdue(self) -> None:
        """Those who have waited longest get the allowance first, and may preempt all that are not overdue."""
        allowance = self.rule.fraction * self.gpus**2 / max(self.gpus, self.gpus - self.free + self.asked)
        if self.held >= allowance:
            return
        patience = self.patience_s()
        due = bisect_right(self.ages, (self.now - patience, 1 << 60))
        for age, number in self.ages[:due]:
            if self.held >= allowance:
                return
            job = self.jobs[number]
            late = max(1.0, job.gpus / allowance) * patience + self.rule.lag * job.ran_s
            if self.now - age < late:
                continue
            fits = job.gpus <= self.free
            if not fits:
                found = [
                    ((-each.level, -each.gpus * each.ran_s, -each.since_s), each)
                    for each in self.running.values()
                    if not each.overdue
                ]
                fits = self.evict(found, job.gpus - self.free)
            if fits:
                self.start(job, overdue=True)

    def easy(self, first: Job) -> None:
        """Backfill what ends before the first job's reservation, or fits beside it."""
        ends = sorted((each.since_s + each.overhead_s + each.left_s, each.gpus) for each in self.running.values())
        free, at = self.free, self.now
        for end, size in ends:
            free, at = free + size, end
            if free >= first.gpus:
                break
        spare = free - first.gpus
        for number in [number for _, number in heapq.merge(*self.lines.values())]:
            if not self.free:
                return
            job = self.jobs[number]
            if job is first or job.gpus > self.free:
                continue
            if self.now + job.left_s <= at:
                self.start(job)
            elif job.gpus <= spare:
                spare -= job.gpus
                self.start(job)

    def fill(self) -> None:
        """Start what fits, in the order of priority."""
        if self.free:
            for number in [number for _, number in heapq.merge(*self.lines.values())]:
                if self.jobs[number].gpus <= self.free:
                    self.start(self.jobs[number])
                if not self.free:
                    return

    def round(self) -> None:
        """A round of Gavel's: the jobs of the highest priority run, and of these no job stops that runs already."""
        waiting = [self.jobs[number] for line in self.lines.values() for _, number in line]
        if not waiting:
            return
        jobs = [*waiting, *self.running.values()]
        if self.now - self.computed_s >= COMPUTED_S:
            self.allot(jobs)
        free, chosen = self.gpus, set()
        for job in sorted(jobs, key=lambda job: (-self.priority(job), job.number)):
            if job.gpus <= free:
                free -= job.gpus
                chosen.add(job.number)
        for job in [job for job in self.running.values() if job.number not in chosen]:
            self.stop(job)
        for job in waiting:
            if job.number in chosen:
                self.start(job)

    def allot(self, jobs: list[Job]) -> None:
        """Allot each job as many GPUs on average, at most what it asks for, and count what it runs from now on."""
        self.computed_s, left, smallest = self.now, float(self.gpus), sorted(jobs, key=lambda job: job.gpus)
        for index, job in enumerate(smallest):
            gpus = min(job.gpus, left / (len(smallest) - index))
            left -= gpus
            job.allotted, job.computed_s = gpus / job.gpus, self.ran_s(job)

    def priority(self, job: Job) -> float:
        """Return what the job is allotted over what it had since then; each begins with half a round."""
        return job.allotted / (self.ran_s(job) - job.computed_s + ROUND_S / 2)

    def ran_s(self, job: Job) -> float:
        """Return the time for which a job has held its GPUs."""
        return job.ran_s + (self.now - job.since_s if job.number in self.running else 0.0)

    def figures(self) -> dict[str, float]:
        jct = np.array([job.ended_s - job.at_s for job in self.jobs])
        slow = jct / np.maximum(SHORT_S, [job.run_s for job in self.jobs])
        restarts = sum((job.attempt - 1) * job.gpus for job in self.jobs) * RESTART_S
        return {
            "jct_s": float(jct.mean()),
            "slowdown_p99": float(np.quantile(np.maximum(1, slow), 0.99)),
            "away_s": max(job.waited_s for job in self.jobs),
            "lost_gpu_h": (self.lost_gpu_s + restarts) / 3600,
            "preemptions": self.preempted,
        }


def synthetic(jobs: int) -> Iterator[tuple[str, list[tuple[float, int, float]], int]]:
    """Yield jobs of minutes and of hours on small and large clusters, with light and heavy tails, over loads."""
    for median_s, sigma, gpus in ((120, 1.0, 8), (120, 2.2, 64), (1800, 2.2, 64), (7200, 1.5, 128), (600, 2.8, 512)):
        for load in (0.5, 0.8, 1.0, 1.3, 2.0):
            rng = random.Random(f"{median_s}/{sigma}/{gpus}")
            sizes = [size for size in (1, 1, 1, 1, 1, 2, 4, 8, 8, 16, 32, 64) if size <= gpus // 2]
            runs = [min(30 * 86400.0, rng.lognormvariate(math.log(median_s), sigma)) for _ in range(jobs)]
            rows = [(rng.choice(sizes), run) for run in runs]
            every_s = sum(size * run for size, run in rows) / jobs / gpus / load
            at, drawn = 0.0, []
            for size, run in rows:
                at += rng.expovariate(1 / every_s)
                drawn.append((at, size, run))
            yield f"{median_s}s/{sigma}/{gpus} load {load}", drawn, gpus


def traced(folder: Path, jobs: int) -> Iterator[tuple[str, list[tuple[float, int, float]], int]]:
    """Yield the virtual clusters of each trace in a folder, on as many GPUs as make the load 0.8 and 1.2."""
    for each in virtual_clusters(folder, jobs):
        rows = [(job.submit_us / 1e6, job.gpus, job.duration_us / 1e6) for job in each.jobs]
        for load in (0.8, 1.2):
            gpus = each.gpus(load)
            yield f"{each.name} {each.asked_gpus / gpus:.2f}", rows, gpus


def main() -> None:
    """Print a table for each cluster and one of ratios, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=folder_of_traces, nargs="?")
    parser.add_argument("--jobs", type=int, default=1500, help="of a cluster at most")
    parser.add_argument("--only", default=",".join(RULES))
    parser.add_argument("--clusters", default="", help="those whose names hold this")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    clusters = [*synthetic(args.jobs), *(traced(args.traces, args.jobs) if args.traces else ())]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, jobs, gpus in clusters:
        if args.clusters not in name:
            continue
        begin = time.process_time()
        found[name] = {rule: Pool(RULES[rule], jobs, gpus).run() for rule in args.only.split(",")}
        if not args.json:
            show(f"{name}: {len(jobs):,} jobs, {gpus} GPUs, {time.process_time() - begin:.1f} CPU s", found[name])
    if args.json:
        json.dump(found, sys.stdout, indent=1)
        return
    summary(found)
    if args.svg:
        args.svg.write_text(picture(found))


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print one cluster."""
    heads = (("mean JCT s", 12), ("p99 slowdown", 14), ("away max h", 12), ("lost GPU-h", 12), ("preempted", 11))
    print(f"\n{title}\n{'rule':<14}" + "".join(f"{head:>{width}}" for head, width in heads))
    for rule, row in rows.items():
        print(
            f"{rule:<14}{row['jct_s']:>12,.0f}{row['slowdown_p99']:>14,.1f}{row['away_s'] / 3600:>12,.1f}"
            f"{row['lost_gpu_h']:>12,.1f}{row['preemptions']:>11,.0f}"
        )


def ratios(found: dict[str, dict[str, dict[str, float]]], rule: str, figure: str) -> list[float]:
    """Return a rule's figure over that of 2D-LAS on each cluster."""
    floor = {"away_s": 600.0, "lost_gpu_h": 1.0}.get(figure, 0.0)  # nothing to compare with below
    pairs = [(rows[rule][figure], rows["2d-las"][figure]) for rows in found.values()]
    return [max(1e-2, own / its) for own, its in pairs if its > floor]


def summary(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print each rule over 2D-LAS: geometric means and the worst cluster."""
    if not all("2d-las" in rows for rows in found.values()):
        return
    print(f"\nover 2D-LAS, {len(found)} clusters: geometric mean, 90th percentile and most")
    print(f"{'rule':<14}{'mean JCT':>24} {'p99 slowdown':>24} {'away max':>24} {'lost GPU-h':>24}")
    for rule in next(iter(found.values())):
        cells = []
        for figure in ("jct_s", "slowdown_p99", "away_s", "lost_gpu_h"):
            values = np.array(ratios(found, rule, figure))
            cells.append(f"{np.exp(np.log(values).mean()):8.2f}{np.quantile(values, 0.9):8.2f}{values.max():8.2f}")
        print(f"{rule:<14}" + " ".join(cells))


def picture(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the frontier: mean JCT and longest time away, over 2D-LAS, geometric means over all clusters."""
    mean = lambda rule, figure: float(np.exp(np.log(ratios(found, rule, figure)).mean()))  # noqa: E731
    refused = ("fifo", "levels by 8", "mean 14", "lag 5")  # in the table: one is far off, the others lie upon the line
    rules = [rule for rule in next(iter(found.values())) if rule not in refused]
    points = {rule: (mean(rule, "away_s"), mean(rule, "jct_s")) for rule in rules}
    knob = [rule for rule in rules if rule.startswith("patience")]
    marks = [Mark(*points[rule], rule.removeprefix("patience ")) for rule in rules]
    write = lambda value: f"{value:.2g}"  # noqa: E731
    line = ChartLine("patience", [points[rule] for rule in knob])
    others = [ChartLine(rule, [points[rule]]) for rule in rules if rule not in knob]
    x = Axis("longest time away, over 2D-LAS", write, log=True, ticks=(0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4))
    y = Axis("mean JCT, over 2D-LAS", write, log=True, ticks=(0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4))
    return chart_svg([line, *others], x, y, marks, label="The frontier of orders")


if __name__ == "__main__":
    main()

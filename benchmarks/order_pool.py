"""Two orders that Cordee does not have, in a bare pool of GPUs, and 2D-LAS there to compare with.

Gangs start as a whole and may be preempted: their GPUs are held for 30 s while they save, and for 60 s at a restart.
A job is known only by what it has received.

- 2D-LAS: jobs that received less than 3,250 GPU-seconds first (Gu et al., NSDI 2019).
- PROMOTEKNOB, of the same: a job goes back to the first level once it has waited for as many times its run time, both
  since it was promoted last.
- Gavel (Narayanan et al., OSDI 2020), on GPUs of one kind: in rounds of six minutes the jobs go first whose allotted
  part of the time, over what they had since it was computed last, is largest. Allotted is what gives each job as many
  GPUs on average, none more than it asks for: max-min fairness by water filling. Unlike theirs, free GPUs are filled
  between rounds.
"""

import heapq
import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SAVE_S, RESTART_S, SHORT_S = 30.0, 60.0, 10.0
"""A notice, a restart, and the least run time of a slowdown, as `cordee simulate` has it."""
LEVEL_GPU_S = 3_250.0
ROUND_S, COMPUTED_S = 360.0, 1_920.0
"""Gavel's rounds, and the least time between two computations of its optimum."""

SUBMIT, END, RELEVEL, PROMOTE, ROUND = range(5)


@dataclass(slots=True)
class Job:
    """A job, and what became of it."""

    number: int
    at_s: float
    gpus: int
    run_s: float
    left_s: float = 0.0
    ran_s: float = 0.0
    since_s: float = 0.0  # it waits, or runs, since then
    waited_s: float = 0.0
    ended_s: float = 0.0
    level: int = 0
    attempt: int = 0
    key: tuple[float, ...] = ()
    overhead_s: float = 0.0
    promoted_s: float = 0.0  # what it had run when it was promoted last
    allotted: float = 1.0  # Gavel's optimum: the part of the time in which it runs
    computed_s: float = 0.0  # what it had run when that was computed


class Pool:
    """One run of 2D-LAS; with `promote` by PROMOTEKNOB."""

    def __init__(self, jobs: Sequence[tuple[float, int, float]], gpus: int, promote: float | None = None) -> None:
        self.gpus, self.free, self.now, self.promote = gpus, gpus, 0.0, promote
        self.jobs = [Job(number, at, size, max(1.0, run)) for number, (at, size, run) in enumerate(jobs)]
        self.lines: dict[int, list[tuple[tuple[float, ...], int]]] = defaultdict(list)
        self.running: dict[int, Job] = {}
        self.at_level = [0, 0]
        self.heap = [(job.at_s, SUBMIT, job.number, 0) for job in self.jobs]
        self.lost_gpu_s = 0.0

    def run(self) -> dict[str, float]:
        """Run to the end; return the figures."""
        heapq.heapify(self.heap)
        while self.heap:
            self.now = self.heap[0][0]
            while self.heap and self.heap[0][0] <= self.now:
                _, kind, number, attempt = heapq.heappop(self.heap)
                self.turn(kind, self.jobs[number], attempt)
            self.schedule()
        jct = np.array([job.ended_s - job.at_s for job in self.jobs])
        slow = np.maximum(1, jct / np.maximum(SHORT_S, [job.run_s for job in self.jobs]))
        return {
            "jct_s": float(jct.mean()),
            "slowdown_p99": float(np.quantile(slow, 0.99)),
            "away_s_max": max(job.waited_s for job in self.jobs),
            "lost_gpu_hours": self.lost_gpu_s / 3600,
        }

    def turn(self, kind: int, job: Job, attempt: int) -> None:
        """Submit a job, end one that runs, change its level, or promote one that waits."""
        if kind == SUBMIT:
            job.left_s, job.since_s = job.run_s, job.at_s
            self.queue(job)
        elif attempt != job.attempt:
            return
        elif job.number not in self.running:
            if kind == PROMOTE:
                self.unqueue(job)
                job.promoted_s = job.ran_s
                self.queue(job)
        elif kind == END:
            self.stop(job, ended=True)
        elif kind == RELEVEL:
            self.relevel(job)

    def key(self, job: Job) -> tuple[float, ...]:
        """The smaller, the sooner; jobs of one size stand in one line."""
        job.level = int((job.ran_s - job.promoted_s) * job.gpus >= LEVEL_GPU_S)
        return (job.level, job.at_s)

    def queue(self, job: Job) -> None:
        job.key = self.key(job)
        insort(self.lines[job.gpus], (job.key, job.number))

    def unqueue(self, job: Job) -> None:
        line = self.lines[job.gpus]
        line.pop(bisect_right(line, (job.key, job.number)) - 1)

    def start(self, job: Job) -> None:
        self.unqueue(job)
        job.waited_s += self.now - job.since_s
        job.overhead_s = RESTART_S if job.attempt else 0.0
        job.attempt += 1
        job.since_s = self.now
        self.free -= job.gpus
        self.running[job.number] = job
        self.at_level[job.level] += job.gpus
        heapq.heappush(self.heap, (self.now + job.overhead_s + job.left_s, END, job.number, job.attempt))
        if not job.level:
            left_s = LEVEL_GPU_S / job.gpus - (job.ran_s - job.promoted_s)
            self.look_again(job, self.now + job.overhead_s + left_s)

    def look_again(self, job: Job, at_s: float) -> None:
        """Look at its level then, at the next whole minute."""
        at_s = max(self.now + 1, math.ceil(at_s / 60) * 60.0)
        heapq.heappush(self.heap, (at_s, RELEVEL, job.number, job.attempt))

    def relevel(self, job: Job) -> None:
        received_gpu_s = (job.ran_s - job.promoted_s + self.trained_s(job)) * job.gpus
        if not job.level and received_gpu_s >= LEVEL_GPU_S:
            self.at_level[0] -= job.gpus
            self.at_level[1] += job.gpus
            job.level = 1

    def trained_s(self, job: Job) -> float:
        """Return how long its running attempt has trained."""
        return max(0.0, self.now - job.since_s - job.overhead_s)

    def stop(self, job: Job, *, ended: bool = False) -> None:
        del self.running[job.number]
        self.at_level[job.level] -= job.gpus
        self.free += job.gpus
        ran_s = min(job.left_s, self.trained_s(job))
        job.left_s -= ran_s
        job.ran_s += ran_s
        if ended:
            job.ended_s, job.left_s = self.now, 0.0
            return
        self.lost_gpu_s += SAVE_S * job.gpus
        job.left_s += SAVE_S  # its GPUs are held while it saves
        job.since_s = self.now
        self.queue(job)
        if self.promote is not None:
            at_s = self.now + self.promote * (job.ran_s - job.promoted_s)
            heapq.heappush(self.heap, (at_s, PROMOTE, job.number, job.attempt))

    def schedule(self) -> None:
        """Start the heads of all lines in the order of their keys, each where it fits or preempts."""
        heads = [(line[0], size) for size, line in self.lines.items() if line]
        heapq.heapify(heads)
        while heads:
            (_, number), size = heads[0]
            job, line = self.jobs[number], self.lines[size]
            started = size <= self.free or self.preempts(job)
            if started:
                self.start(job)
            if started and line:
                heapq.heapreplace(heads, (line[0], size))
            else:
                heapq.heappop(heads)

    def preempts(self, job: Job) -> bool:
        """Stop running jobs of the second level, those first that received most, less those that are not needed."""
        need = job.gpus - self.free
        if job.level or self.at_level[1] < need:
            return False
        found = [each for each in self.running.values() if each.level]
        chosen: list[Job] = []
        for each in sorted(found, key=lambda each: (-each.gpus * each.ran_s, -each.since_s)):
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


class Gavel(Pool):
    """One run by Gavel's rounds."""

    def __init__(self, jobs: Sequence[tuple[float, int, float]], gpus: int) -> None:
        super().__init__(jobs, gpus)
        self.computed_at_s, self.round_at_s = -math.inf, -math.inf

    def turn(self, kind: int, job: Job, attempt: int) -> None:
        """Hold a round, submit a job, or end one."""
        if kind == ROUND:
            self.round()
        elif kind != RELEVEL:
            super().turn(kind, job, attempt)

    def key(self, job: Job) -> tuple[float, ...]:
        """The highest priority first."""
        return (-self.priority(job), job.at_s)

    def schedule(self) -> None:
        """Start what fits, in the order of priority; the next round is at a multiple of its length."""
        if self.free:
            for number in [number for _, number in heapq.merge(*self.lines.values())]:
                if self.jobs[number].gpus <= self.free:
                    self.start(self.jobs[number])
        if self.round_at_s <= self.now and (self.running or any(self.lines.values())):
            self.round_at_s = (self.now // ROUND_S + 1) * ROUND_S
            heapq.heappush(self.heap, (self.round_at_s, ROUND, 0, 0))

    def round(self) -> None:
        """The jobs of the highest priority run, and of these no job stops that runs already."""
        waiting = [self.jobs[number] for line in self.lines.values() for _, number in line]
        if not waiting:
            return
        jobs = [*waiting, *self.running.values()]
        if self.now - self.computed_at_s >= COMPUTED_S:
            self.allot(jobs)
        free, chosen = self.gpus, set[int]()
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
        self.computed_at_s, left, smallest = self.now, float(self.gpus), sorted(jobs, key=lambda job: job.gpus)
        for index, job in enumerate(smallest):
            gpus = min(job.gpus, left / (len(smallest) - index))
            left -= gpus
            job.allotted, job.computed_s = gpus / job.gpus, self.held_s(job)

    def priority(self, job: Job) -> float:
        """Return what the job is allotted over what it had since then; each begins with half a round."""
        return job.allotted / (self.held_s(job) - job.computed_s + ROUND_S / 2)

    def held_s(self, job: Job) -> float:
        """Return the time for which a job has held its GPUs."""
        return job.ran_s + (self.now - job.since_s if job.number in self.running else 0.0)


POOLS: dict[str, Callable[[Sequence[tuple[float, int, float]], int], Pool]] = {
    "2d-las": Pool,
    "promote 8": lambda jobs, gpus: Pool(jobs, gpus, promote=8.0),
    "promote 1": lambda jobs, gpus: Pool(jobs, gpus, promote=1.0),
    "gavel": Gavel,
}
"""Each order by its name."""

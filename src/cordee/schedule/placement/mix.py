"""The mix of jobs submitted so far: their shapes, and the free GPUs of a node that each of them could use.

Fragmentation Gradient Descent (Weng et al., USENIX ATC'23, section 4.2): the fragmentation of a node is the
part of its free GPUs that a job drawn from the workload could not use, because the node lacks CPU, memory or GPUs for
it, or because a GPU has less left than the job's fraction. The workload here is the set of submitted jobs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cordee.events import Job
from cordee.hardware.arrays import Floats, Ints
from cordee.schedule.placement.entry import host_request

Ask = tuple[int, int, int, int]
"""Milli-cores and bytes for each GPU (in total for a job without GPUs), GPUs, thousandths of each."""

_SHAPES_MAX = 128
_FIRST, _GROWTH = 16, 1.5

Learnt = tuple[tuple[Ask, int], ...]
"""Shapes with the number of jobs of each, the most frequent first."""


def ask_of(job: Job) -> Ask:
    """Return the shape of a job."""
    return (*host_request(job, 1), job.gpus, job.gpu_milli)


@dataclass(frozen=True, slots=True)
class _Before:
    ask: Ask
    total: int
    at_us: int
    learnt: Learnt
    again: int


class Mix:
    """The counts of submitted jobs by shape, and by the GPUs that they ask for.

    `learnt` is renewed when the total has grown by half. It then holds the jobs submitted before the present moment, so
    that the order of reports within a moment does not matter.
    """

    counts: dict[Ask, int]
    gangs: dict[int, int]
    total: int
    learnt: Learnt
    _at_us: int
    _again: int

    def __init__(self) -> None:
        self.counts, self.gangs = {}, {}
        self.total = 0
        self.learnt = ()
        self._at_us = 0
        self._again = _FIRST  # the total at which it is renewed

    def seen(self, job: Job, at_us: int) -> _Before:
        """Count a job that was submitted; `unseen` undoes it with the result.

        >>> from cordee.ids import JobId
        >>> mix = Mix()
        >>> for at_us in range(17): _ = mix.seen(Job(job_id=JobId("a"), name="a", owner="me", gpus=2), at_us)
        >>> mix.learnt
        (((0, 0, 2, 1000), 16),)
        """
        ask = ask_of(job)
        before = _Before(ask, self.total, self._at_us, self.learnt, self._again)
        if at_us > self._at_us:
            if self.total >= self._again:
                self._again = int(self.total * _GROWTH)
                self.learnt = ranked(self.counts.items())
            self._at_us = at_us
        self.counts[ask] = self.counts.get(ask, 0) + 1
        self.gangs[job.gpus] = self.gangs.get(job.gpus, 0) + 1
        self.total += 1
        return before

    def unseen(self, before: _Before) -> None:
        """Take the newest `seen` back."""
        self.counts[before.ask] -= 1
        if not self.counts[before.ask]:
            del self.counts[before.ask]
        gpus = before.ask[2]
        self.gangs[gpus] -= 1
        if not self.gangs[gpus]:
            del self.gangs[gpus]
        self.total, self._at_us = before.total, before.at_us
        self.learnt, self._again = before.learnt, before.again

    def largest(self, gpus: float) -> int:
        """Return the GPUs of the largest gang that so many GPUs could hold; 0 if none was submitted."""
        return max((each for each in self.gangs if each <= gpus), default=0)

    def value(self) -> object:
        """Return a copy, to compare."""
        return dict(self.counts), dict(self.gangs), self.total, self._at_us, self.learnt, self._again


def ranked(counts: Iterable[tuple[Ask, int]]) -> Learnt:
    """Return the most frequent shapes that need a GPU."""
    return tuple(sorted((item for item in counts if item[0][2]), key=lambda item: (-item[1], item[0]))[:_SHAPES_MAX])


class Table:
    """The fraction of the mix for which the free CPU and memory of a node are enough, by GPUs asked for."""

    def __init__(self, learnt: Learnt, node_gpus: int) -> None:
        """Build the table for nodes of at most `node_gpus` GPUs; a larger gang asks for whole nodes."""
        total = sum(jobs for _, jobs in learnt)
        asks = [(cpu, memory, min(gpus, node_gpus), milli, jobs / total) for (cpu, memory, gpus, milli), jobs in learnt]
        groups = sorted({(gpus, milli) for _, _, gpus, milli, _ in asks})
        self.gpus = np.array([gpus for gpus, _ in groups])
        self.milli = np.array([float(milli) for _, milli in groups])
        self._cpu = np.array(sorted({cpu * gpus for cpu, _, gpus, _, _ in asks}))
        self._memory = np.array(sorted({memory * gpus for _, memory, gpus, _, _ in asks}))
        fraction = np.zeros((len(self._cpu) + 1, len(self._memory) + 1, len(groups)))
        for cpu, memory, gpus, milli, part in asks:
            row, column = np.searchsorted(self._cpu, cpu * gpus), np.searchsorted(self._memory, memory * gpus)
            fraction[row + 1, column + 1, groups.index((gpus, milli))] += part
        self._fraction = fraction.cumsum(axis=0).cumsum(axis=1)

    def enough(self, cpu: Floats, memory: Floats) -> Floats:
        """Return the fraction of the mix, by group, for which this CPU and memory is enough: (nodes, groups)."""
        return self._fraction[self._cpu.searchsorted(cpu, "right"), self._memory.searchsorted(memory, "right")]

    def usable(self, left: Floats) -> tuple[Ints, Floats]:
        """Return the GPUs that each group could use, with their thousandths; `left` is (nodes, GPUs)."""
        large = left[:, None, :] >= self.milli[:, None]
        return large.sum(axis=2), (large * left[:, None, :]).sum(axis=2)

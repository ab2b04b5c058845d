"""Random workloads from a seed, one job at a time: a million of them take no more memory than ten.

Arrivals are Poisson, optionally faster by day than by night; run times are log-normal, as the tails of public traces
are; sizes are drawn by weight.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cordee.simulate.traces.job import TraceJob
from cordee.units import US_PER_S

_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """The distributions of a workload.

    Attributes:
        jobs: the number of jobs.
        per_hour: arrivals, on average.
        diurnal: the swing of the rate over a day, from 0 (constant) to 1 (no arrivals at night).
        median_s: of the run time.
        sigma: of its logarithm; 2 gives a mean of 7.4 medians.
        longest_s: where the tail is cut.
        sizes: numbers of GPUs with their weights.
        users: the number of users; a few of them submit most jobs.
        tiers: percentages of production, standard and preemptible jobs.
    """

    jobs: int
    per_hour: float = 60.0
    diurnal: float = 0.0
    median_s: float = 600.0
    sigma: float = 2.0
    longest_s: float = 30 * 86_400.0
    sizes: tuple[tuple[int, int], ...] = ((1, 70), (2, 8), (4, 8), (8, 9), (16, 3), (32, 1), (64, 1))
    users: int = 100
    tiers: tuple[int, int, int] = (0, 100, 0)

    def at_load(self, gpus: int, load: float, seed: int) -> "Synthetic":
        """Return it for `gpus` GPUs: without larger jobs, at the rate at which this seed's jobs request `load` of them.

        Most GPU time is that of few long jobs, so that a rate by the mean would give one draw half of the load and
        another one twice as much: the jobs are drawn once to add up what they request.
        """
        fitting = replace(self, sizes=tuple(each for each in self.sizes if each[0] <= gpus) or ((1, 1),))
        rng = random.Random(seed)
        requested_s = sum(job.gpus * job.duration_us for job in fitting._jobs(rng)) / US_PER_S
        return replace(fitting, per_hour=load * gpus * 3600 * self.jobs / requested_s)

    def draw(self, seed: int) -> Iterator[TraceJob]:
        """Draw the jobs in the order of submission."""
        arrivals = random.Random(f"arrivals {seed}")  # their own: the jobs are the same at every rate
        at_s = 0.0
        peak_per_s = self.per_hour * (1 + self.diurnal) / 3600
        for job in self._jobs(random.Random(seed)):
            while True:  # thinning: draw at the rate of the peak, and take some
                at_s += arrivals.expovariate(peak_per_s)
                if not self.diurnal or arrivals.random() * (1 + self.diurnal) < self._rate(at_s):
                    break
            yield replace(job, submit_us=round(at_s * US_PER_S))

    def _jobs(self, rng: random.Random) -> Iterator[TraceJob]:
        """Draw the jobs without the times at which they are submitted."""
        sizes, weights = zip(*self.sizes, strict=True)
        for number in range(1, self.jobs + 1):
            yield TraceJob(
                job_id=f"job-{number}",
                submit_us=0,
                gpus=rng.choices(sizes, weights)[0],
                duration_us=max(1, round(self._run_s(rng))) * US_PER_S,
                line=number,
                user=f"user-{min(self.users, int(rng.paretovariate(1.0)))}",
                tier=rng.choices(("production", "standard", "preemptible"), self.tiers)[0],
            )

    def _run_s(self, rng: random.Random) -> float:
        return min(self.longest_s, math.exp(rng.gauss(math.log(self.median_s), self.sigma)))

    def _rate(self, at_s: float) -> float:
        """Return the arrival rate over its mean at a time of day; noon has the highest."""
        return 1 - self.diurnal * math.cos(2 * math.pi * at_s / _DAY_S)

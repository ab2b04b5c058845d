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

    def at_load(self, gpus: int, load: float) -> "Synthetic":
        """Return it for `gpus` GPUs: without larger jobs, at the rate at which jobs request `load` of their time.

        A draw of few jobs may request much less or more: most GPU time is that of few long jobs.
        """
        sizes = tuple(each for each in self.sizes if each[0] <= gpus) or ((1, 1),)
        rng = random.Random(0)
        run_s = sum(self._run_s(rng) for _ in range(20_000)) / 20_000
        size = sum(each * weight for each, weight in sizes) / sum(weight for _, weight in sizes)
        return replace(self, sizes=sizes, per_hour=load * gpus * 3600 / (run_s * size))

    def draw(self, seed: int) -> Iterator[TraceJob]:
        """Draw the jobs in the order of submission."""
        rng = random.Random(seed)
        sizes, weights = zip(*self.sizes, strict=True)
        at_s = 0.0
        peak_per_s = self.per_hour * (1 + self.diurnal) / 3600
        for number in range(1, self.jobs + 1):
            while True:  # thinning: draw at the rate of the peak, and take some
                at_s += rng.expovariate(peak_per_s)
                if not self.diurnal or rng.random() * (1 + self.diurnal) < self._rate(at_s):
                    break
            yield TraceJob(
                job_id=f"job-{number}",
                submit_us=round(at_s * US_PER_S),
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

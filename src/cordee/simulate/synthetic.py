"""Workloads by chance, from a seed, one job at a time: a million of them take no more memory than ten.

Arrivals are Poisson, if so wished faster by day than by night; run times are log-normal, which is what the tails of
public traces look like; sizes are drawn from given shares.
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
    """What is drawn from.

    Attributes:
        jobs: how many.
        per_hour: arrivals, on average.
        diurnal: how far the rate swings over a day, from 0 (none) to 1 (none at all at night).
        median_s: of the run time.
        sigma: of its logarithm; 2 gives a mean of 7.4 medians.
        longest_s: where the tail is cut.
        sizes: GPUs, and how many in so many jobs ask for that.
        users: over whom they are spread, unevenly.
        tiers: shares in a hundred of production, standard and preemptible jobs.
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
        """Arriving so fast that the jobs ask for this share of so many GPUs."""
        dice = random.Random(0)
        run_s = sum(self._run_s(dice) for _ in range(20_000)) / 20_000
        size = sum(each * share for each, share in self.sizes) / sum(share for _, share in self.sizes)
        return replace(self, per_hour=load * gpus * 3600 / (run_s * size))

    def draw(self, seed: int) -> Iterator[TraceJob]:
        """The jobs, in order."""
        dice = random.Random(seed)
        sizes, shares = zip(*self.sizes, strict=True)
        at_s = 0.0
        peak_per_s = self.per_hour * (1 + self.diurnal) / 3600
        for number in range(1, self.jobs + 1):
            while True:  # thinned: the rate of the peak, and not all of them are taken
                at_s += dice.expovariate(peak_per_s)
                if not self.diurnal or dice.random() * (1 + self.diurnal) < self._rate(at_s):
                    break
            yield TraceJob(
                job_id=f"job-{number}",
                submit_us=round(at_s * US_PER_S),
                gpus=dice.choices(sizes, shares)[0],
                duration_us=max(1, round(self._run_s(dice))) * US_PER_S,
                line=number,
                user=f"user-{min(self.users, int(dice.paretovariate(1.0)))}",
                tier=dice.choices(("production", "standard", "preemptible"), self.tiers)[0],
            )

    def _run_s(self, dice: random.Random) -> float:
        return min(self.longest_s, math.exp(dice.gauss(math.log(self.median_s), self.sigma)))

    def _rate(self, at_s: float) -> float:
        """Of the mean, at a time of day; noon has most."""
        return 1 - self.diurnal * math.cos(2 * math.pi * at_s / _DAY_S)

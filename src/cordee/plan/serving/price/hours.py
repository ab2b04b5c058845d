"""Replicas by the hour: the load's profile over a day or a week, and which replicas to reserve or to rent by the hour.

A profile is a tuple of relative loads with mean 1, one for each hour (24 or 168). The i-th replica of the fleet is
needed in the hours that need i or more; each is bought the cheapest way, and the sum is the cheapest fleet.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cordee.errors import SpecError
from cordee.plan.serving.price.price import HOUR_S
from cordee.plan.survive import Interruptions, lost_fraction

DAY_HOURS = 24


def hour_profile(arrivals: Iterable[tuple[float, float]], hours: int = DAY_HOURS) -> tuple[float, ...]:
    """Return the relative load of each hour, with mean 1, from (arrival in seconds, work) of requests.

    `work` is anything that adds up: 1 a request, its tokens, its seconds on a replica. An hour that the requests
    cover in part counts by the covered part; one that they do not cover takes the mean.

    >>> [round(load, 3) for load in hour_profile([(0, 1.0), (3600, 3.0), (7200, 2.0), (9000, 0.0)])[:4]]
    [0.375, 1.125, 1.5, 1.0]

    Raises:
        SpecError: no request, or no work.
    """
    rows = sorted(arrivals)
    if not rows or not any(work > 0 for _, work in rows):
        raise SpecError("an hour profile needs requests with work", hint="give a file of requests that is not empty")
    first_s, last_s = rows[0][0], rows[-1][0]
    work_by_hour, covered_s = [0.0] * hours, [0.0] * hours
    for arrival_s, work in rows:
        work_by_hour[int(arrival_s // HOUR_S) % hours] += work
    for hour in range(int(first_s // HOUR_S), int(last_s // HOUR_S) + 1):
        covered_s[hour % hours] += min(last_s, (hour + 1) * HOUR_S) - max(first_s, hour * HOUR_S)
    loads = [work / max(seconds, 1.0) for work, seconds in zip(work_by_hour, covered_s, strict=True)]
    known = [load for load, seconds in zip(loads, covered_s, strict=True) if seconds > 0] or [max(loads)]
    mean = sum(known) / len(known)
    return tuple(load / mean if seconds > 0 else 1.0 for load, seconds in zip(loads, covered_s, strict=True))


def replicas_by_hour(
    profile: Sequence[float], replica_s_per_day: float, busy_fraction_max: float, at_least: int = 1
) -> tuple[int, ...]:
    """Return the replicas of each hour so that none is busy for more than this fraction of the time.

    >>> replicas_by_hour((0.5, 1.5) * 12, replica_s_per_day=10 * 86_400, busy_fraction_max=0.8)[:2]
    (7, 19)

    Raises:
        SpecError: a profile without load, or a fraction outside 0 to 1.
    """
    if min(profile, default=-1) < 0 or sum(profile) <= 0:
        raise SpecError("an hour profile needs loads that are not negative", hint="give 24 or 168 relative loads")
    if not 0 < busy_fraction_max <= 1:
        raise SpecError(f"replicas cannot be busy {busy_fraction_max:g} of the time", hint="give a fraction up to 1")
    mean = sum(profile) / len(profile)
    busy = replica_s_per_day / (DAY_HOURS * HOUR_S) / busy_fraction_max
    # A trillionth less, so that a load that fills its replicas exactly does not take one more by rounding.
    return tuple(max(at_least, math.ceil(busy * load / mean * (1 - 1e-12))) for load in profile)


@dataclass(frozen=True, slots=True)
class SpotReplicas:
    """Spot replicas and what their reclaims cost.

    Attributes:
        usd_per_gpu_hour: the spot price.
        reclaim_mtbi_s: mean time between two reclaims of one replica.
        grace_s: notice of a reclaim; requests that end within it lose nothing.
        start_s: from a reclaim until the replacement serves: the node, the weights, the warm-up. It is paid for.
        request_s: a request's mean time on a replica; one that is cut off has run half of it and starts again.
        fraction_max: the fraction of each hour's replicas that may be spot: a reclaim of all does not end service.
    """

    usd_per_gpu_hour: float
    reclaim_mtbi_s: float
    grace_s: float = 30.0
    start_s: float = 180.0
    request_s: float = 20.0
    fraction_max: float = 0.5

    @property
    def useful_fraction(self) -> float:
        """The fraction of paid time that serves requests which end."""
        stops = Interruptions(None, self.reclaim_mtbi_s, self.grace_s)
        times = {"restart_s": self.start_s, "stall_s": 0.0, "upload_s": 0.0, "leave_s": self.request_s}
        return 1 / (1 + lost_fraction(self.request_s, stops, **times))

    @property
    def useful_usd_per_gpu_hour(self) -> float:
        """Dollars of an hour of useful time."""
        return self.usd_per_gpu_hour / self.useful_fraction


@dataclass(frozen=True, slots=True)
class Renting:
    """The ways to pay for GPUs. A reserved one is paid for in every hour; None: it is not offered."""

    on_demand_usd_per_gpu_hour: float
    reserved_usd_per_gpu_hour: float | None = None
    spot: SpotReplicas | None = None


@dataclass(frozen=True, slots=True)
class ReplicaHours:
    """Replica-hours of one period of the profile by the way they are paid, and their dollars."""

    replicas: tuple[int, ...]
    reserved: int
    on_demand_hours: float
    spot_hours: float
    usd: float

    @property
    def usd_per_day(self) -> float:
        """Dollars of a mean day."""
        return self.usd * DAY_HOURS / len(self.replicas)

    def busy_fraction(self, replica_s_per_day: float) -> float:
        """Return the fraction of the needed replica-hours in which a replica works."""
        return replica_s_per_day * len(self.replicas) / DAY_HOURS / (sum(self.replicas) * HOUR_S)


def cheapest_hours(replicas: Sequence[int], gpus_per_replica: int, renting: Renting) -> ReplicaHours:
    """Return the cheapest way to have these replicas in these hours.

    The i-th replica is reserved where all hours of the reserved price cost less than its own hours at the price of
    replicas by the hour. On spot runs at most `fraction_max` of what an hour needs beyond the reserved ones.

    >>> rent = Renting(on_demand_usd_per_gpu_hour=3.0, reserved_usd_per_gpu_hour=2.0)
    >>> day = cheapest_hours((1,) * 16 + (3,) * 8, 8, rent)
    >>> day.reserved, day.on_demand_hours, day.usd
    (1, 16.0, 768.0)
    """
    spot = renting.spot
    fraction = 0.0
    hourly = renting.on_demand_usd_per_gpu_hour
    if spot is not None and spot.useful_usd_per_gpu_hour < hourly:
        fraction = spot.fraction_max
        hourly = fraction * spot.useful_usd_per_gpu_hour + (1 - fraction) * hourly
    reserved = 0
    reserved_usd = renting.reserved_usd_per_gpu_hour
    if reserved_usd is not None:
        while sum(need > reserved for need in replicas) * hourly > len(replicas) * reserved_usd:
            reserved += 1
    by_hour = float(sum(max(0, need - reserved) for need in replicas))
    usd = by_hour * hourly + reserved * len(replicas) * (reserved_usd or 0.0)
    useful = spot.useful_fraction if spot is not None else 1.0
    return ReplicaHours(
        replicas=tuple(replicas),
        reserved=reserved,
        on_demand_hours=by_hour * (1 - fraction),
        spot_hours=by_hour * fraction / useful,
        usd=usd * gpus_per_replica,
    )

"""Prices by the hour of a day, and replicas rented by the hour: reserved, on demand and on spot capacity."""

from collections.abc import Iterator
from dataclasses import dataclass

from cordee.plan.expect import DEFAULTS
from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.levers.lever import Lever
from cordee.plan.serving.price.hours import (
    DAY_HOURS,
    Renting,
    SpotReplicas,
    cheapest_hours,
    hour_profile,
    replicas_by_hour,
)
from cordee.plan.serving.price.price import DAY_S, HOUR_S, MTOK
from cordee.plan.serving.request import ServingRequest


def hour_loads(request: ServingRequest) -> tuple[float, ...]:
    """Return the load of each hour of a day over that of the busiest: as given, else of a trace of a day or more.

    Nothing where neither is known. The last request of a day's trace arrives a little before the day ends.
    """
    given, traced = request.pricing.busy_fractions, request.traffic.requests
    if len(given) >= DAY_HOURS:
        return tuple(load / max(given) for load in given)
    if not traced or traced[-1].arrival_s - traced[0].arrival_s < DAY_S - HOUR_S:
        return ()
    profile = hour_profile((each.arrival_s, each.input_tokens + each.output_tokens) for each in traced)
    return tuple(load / max(profile) for load in profile)


def renting(request: ServingRequest) -> Renting | None:
    """Return the ways to pay for the request's GPUs that have a price; None without one on demand."""
    reserved, spot = (request.pricing.find(request.gpu, each) for each in ("reserved", "spot"))
    on_demand = request.pricing.find(request.gpu, "on-demand")
    if on_demand is None:
        return None
    return Renting(
        on_demand_usd_per_gpu_hour=on_demand.usd_per_gpu_hour,
        reserved_usd_per_gpu_hour=None if reserved is None else reserved.usd_per_gpu_hour,
        spot=None if spot is None else SpotReplicas(spot.usd_per_gpu_hour, DEFAULTS.reclaim_mtbi_s),
    )


@dataclass(frozen=True, slots=True)
class HourPrice:
    """One hour of the day.

    Attributes:
        hour: from 0.
        load: over that of the busiest hour.
        replicas: those that this load needs.
        usd_per_mtok: dollars of a million tokens with all replicas paid for; None in an hour without load.
        rented_usd_per_mtok: the same with `replicas` paid for, at the price of the plan's capacity.
    """

    hour: int
    load: float
    replicas: int
    usd_per_mtok: float | None
    rented_usd_per_mtok: float | None


@dataclass(frozen=True, slots=True)
class _Day:
    """A candidate's replicas over the hours of a day."""

    loads: tuple[float, ...]
    replicas: tuple[int, ...]
    busy_s: float
    tokens_per_s: float


def _day(candidate: ServingCandidate) -> _Day | None:
    """Return the replicas that each hour needs; None without loads by hour.

    Given loads are those of a day whose busiest hour was judged; a trace was judged as a whole, so its mean is known.
    """
    loads, found = hour_loads(candidate.request), candidate.performance
    if not loads or found is None:
        return None
    mean = sum(loads) / len(loads)
    tokens_per_s, busiest = found.requests_per_s * found.mix.tokens, candidate.busy_fraction
    if candidate.request.traffic.requests:
        tokens_per_s, busiest = tokens_per_s / mean, min(1.0, busiest / mean)
    busy_s = busiest * candidate.replicas * DAY_S * mean
    return _Day(loads, replicas_by_hour(loads, busy_s, busiest), busy_s, tokens_per_s)


def hour_prices(candidate: ServingCandidate) -> tuple[HourPrice, ...]:
    """Return the price of a token in each hour of the day; nothing without loads by hour, or without a price."""
    day, usd_per_hour = _day(candidate), candidate.usd_per_hour
    if day is None or usd_per_hour is None:
        return ()
    rows = []
    for hour, (load, replicas) in enumerate(zip(day.loads, day.replicas, strict=True)):
        mtok = day.tokens_per_s * load * HOUR_S / MTOK
        usd = usd_per_hour / mtok if mtok else None
        rows.append(HourPrice(hour, load, replicas, usd, usd and usd * replicas / candidate.replicas))
    return tuple(rows)


def hours_lever(candidate: ServingCandidate) -> Iterator[Lever]:
    """Yield the lever of renting replicas by the hour of the day, the cheapest way for each."""
    day, ways = _day(candidate), renting(candidate.request)
    if day is None or ways is None or candidate.usd_per_hour is None:
        return
    found = cheapest_hours(day.replicas, candidate.case.layout.gpus, ways)
    factor = found.usd_per_day / (candidate.usd_per_hour * DAY_HOURS)
    reserved = f"{found.reserved} reserved" if ways.reserved_usd_per_gpu_hour is not None else "no reserved price"
    bought = f"{found.on_demand_hours:,.0f} on-demand and {found.spot_hours:,.0f} spot replica-hours a day"
    few, many = min(day.replicas), max(day.replicas)
    yield Lever("hours", f"{few} to {many} replicas", None, factor, f"{bought}, {reserved}")

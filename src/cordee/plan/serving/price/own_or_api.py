"""Break-even against an API's price list: the requests a day from which replicas of one's own cost less.

An API costs the same for each request. Replicas come whole: a fleet costs the same until an hour needs one more, so the
answer has two numbers, the first day on which the fleet is cheaper and the load beyond which it always is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.plan.serving.price.hours import Renting, cheapest_hours, replicas_by_hour
from cordee.plan.serving.price.price import DAY_S, PhaseRates, TokenMix, TokenPrices, replica_s
from cordee.units import format_digits_usd

LARGE_FLEET = 10_000
STEPS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Requests a day from which self-hosting is cheaper; None: never.

    `own_usd_per_request` is of a fleet so large that whole replicas do not matter.
    """

    first_per_day: float | None
    always_per_day: float | None
    own_usd_per_request: float
    api_usd_per_request: float

    def __str__(self) -> str:
        own, api = map(format_digits_usd, (self.own_usd_per_request, self.api_usd_per_request))
        prices = f"{own} of one's own against {api} by the API"
        if self.first_per_day is None:
            return f"the API is cheaper at any load: a request costs {prices}"
        always = "" if self.always_per_day is None else f", always from {self.always_per_day:,.0f}"
        return f"cheaper from {self.first_per_day:,.0f} requests a day{always}: at scale a request costs {prices}"


@dataclass(frozen=True, slots=True)
class OwnReplicas:
    """A fleet of one's own: speed of a replica, its GPUs, how they are paid for, and when the load comes."""

    rates: PhaseRates
    gpus: int
    renting: Renting
    profile: Sequence[float] = (1.0,) * 24
    busy_fraction_max: float = 0.8
    at_least: int = 1

    def usd_per_day(self, mix: TokenMix, requests_per_day: float) -> float:
        """Return the dollars of a day with so many requests of this mix."""
        needed_s = replica_s(self.rates, mix) * requests_per_day
        replicas = replicas_by_hour(self.profile, needed_s, self.busy_fraction_max, self.at_least)
        return cheapest_hours(replicas, self.gpus, self.renting).usd_per_day


def break_even(own: OwnReplicas, api: TokenPrices, mix: TokenMix) -> BreakEven:
    """Return the requests a day from which `own` costs less than the API at this mix of tokens a request.

    The fleet's cost only rises where an hour needs one more replica, so it suffices to look at those loads.
    """
    api_usd = api.usd(mix)
    per_replica = own.busy_fraction_max * DAY_S / replica_s(own.rates, mix)
    mean = sum(own.profile) / len(own.profile)
    large = LARGE_FLEET * per_replica
    own_usd = own.usd_per_day(mix, large) / large
    first: float | None = None
    always: float | None = None
    begin = 0.0
    loads = {load / mean for load in own.profile if load > 0}
    ends = sorted(per_replica * count / load for load in loads for count in range(1, STEPS_MAX // len(loads) + 1))
    for end in ends[: STEPS_MAX // len(loads)]:
        if end < begin * (1 + 1e-9):  # two hours that need one more at the same load
            continue
        cost = own.usd_per_day(mix, (begin + end) / 2)
        meets = max(begin, cost / api_usd)
        if meets < end:
            first = meets if first is None else first
            always = meets if always is None or meets > begin else always
        else:
            always = None
        begin = end
    return BreakEven(first, always if own_usd < api_usd else None, own_usd, api_usd)

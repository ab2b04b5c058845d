"""Tensor parallel or more replicas, and which GPU for which phase: choices among speeds of replicas.

More GPUs in a replica shorten each step, by less than their number; more replicas add throughput one for one. So the
cheapest fleet has the fewest GPUs a replica that keep the latencies, unless memory is what limits the batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cordee.errors import SpecError
from cordee.plan.serving.price.price import HOUR_S, MTOK, PhaseRates, TokenMix
from cordee.units import plural


@dataclass(frozen=True, slots=True)
class ReplicaPoint:
    """One replica at one load.

    Attributes:
        layout: its name, as `tp2`.
        requests_per_s: that it answers at this load.
        ttft_s: seconds to the first token.
        tpot_s: seconds between two tokens.
    """

    layout: str
    gpus: int
    requests_per_s: float
    ttft_s: float
    tpot_s: float

    def excess(self, ttft_s: float, tpot_s: float) -> float:
        """Return how many times the worse of both latencies is its limit."""
        return max(self.ttft_s / ttft_s, self.tpot_s / tpot_s)


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """Replicas of one layout for a rate."""

    point: ReplicaPoint
    replicas: int

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.point.gpus

    def __str__(self) -> str:
        return f"{plural(self.replicas, 'replica')} of {self.point.layout} on {plural(self.gpus, 'GPU')}"


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """The best fleet at a rate within latencies, and the best of each other layout.

    Attributes:
        keeps_slo: `best` keeps the latencies; otherwise it is the one that misses them least.
        others: of the other layouts, the fewest GPUs first; those that miss the latencies last.
    """

    best: FleetChoice
    keeps_slo: bool
    others: tuple[tuple[FleetChoice, float], ...]

    def __str__(self) -> str:
        if not self.keeps_slo:
            return f"no layout keeps the latencies; {self.best} is nearest"
        reasons = [
            f"{each.point.layout} misses them by {excess:.2f} times"
            if excess > 1
            else f"{each.point.layout} needs {plural(each.gpus, 'GPU')}"
            for each, excess in self.others
        ]
        return "; ".join([str(self.best), *reasons])


def choose_layout(
    points: Sequence[ReplicaPoint],
    requests_per_s: float,
    *,
    ttft_s: float = math.inf,
    tpot_s: float = math.inf,
    busy_fraction_max: float = 1.0,
) -> FleetAnswer:
    """Return the layout with the fewest GPUs for this rate among those that keep the latencies.

    Args:
        points: layouts of a replica, each at several loads.
        requests_per_s: to be answered by all replicas together.
        ttft_s: limit of the time to first token.
        tpot_s: limit of the time per output token.
        busy_fraction_max: of a point's throughput that a replica is given, so that queues stay short.

    Raises:
        SpecError: no points.
    """
    if not points:
        raise SpecError("no layout to choose from", hint="give the speed of at least one layout")
    by_layout: dict[str, tuple[tuple[float, ...], FleetChoice, float]] = {}
    for point in points:
        replicas = max(1, math.ceil(requests_per_s / (point.requests_per_s * busy_fraction_max) * (1 - 1e-12)))
        choice, excess = FleetChoice(point, replicas), point.excess(ttft_s, tpot_s)
        key = (0.0, choice.gpus, excess) if excess <= 1 else (1.0, excess, choice.gpus)
        if point.layout not in by_layout or key < by_layout[point.layout][0]:
            by_layout[point.layout] = (key, choice, excess)
    ranked = sorted(by_layout.values(), key=lambda each: each[0])
    (_, best, excess), *others = ranked
    return FleetAnswer(best, excess <= 1, tuple((choice, over) for _, choice, over in others))


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Dollars of a million tokens of each phase on one kind of GPU."""

    gpu: str
    prefill_usd: float
    decode_usd: float

    def usd(self, mix: TokenMix) -> float:
        """Return the dollars of these tokens, both phases on this GPU."""
        return (mix.computed_tokens * self.prefill_usd + mix.output_tokens * self.decode_usd) / MTOK


@dataclass(frozen=True, slots=True)
class PhaseSplit:
    """The cheapest GPU of each phase against the cheapest for both.

    Attributes:
        prefill: where prompts cost least.
        decode: where answers cost least.
        together: where both phases on one kind cost least.
        split_usd: of the mix on two kinds, with the transfer of the KV cache.
        together_usd: of the mix on one kind.
    """

    costs: tuple[PhaseCost, ...]
    prefill: PhaseCost
    decode: PhaseCost
    together: PhaseCost
    split_usd: float
    together_usd: float

    @property
    def pays(self) -> bool:
        """Return whether two kinds of GPU cost less than one."""
        return self.prefill.gpu != self.decode.gpu and self.split_usd < self.together_usd

    def __str__(self) -> str:
        if self.pays:
            less = 1 - self.split_usd / self.together_usd
            return (
                f"prefill on {self.prefill.gpu}, decode on {self.decode.gpu}: {less:.0%} less than {self.together.gpu}"
            )
        return f"both phases on {self.together.gpu}"


def phase_costs(
    rates: Mapping[str, PhaseRates], gpus: Mapping[str, int], usd_per_gpu_hour: Mapping[str, float]
) -> tuple[PhaseCost, ...]:
    """Return the dollars of each phase by GPU, from a replica's rates, its GPUs and their price."""
    found = []
    for name, rate in rates.items():
        usd_per_s = gpus[name] * usd_per_gpu_hour[name] / HOUR_S
        found.append(
            PhaseCost(name, usd_per_s / rate.prefill_tokens_per_s * MTOK, usd_per_s / rate.decode_tokens_per_s * MTOK)
        )
    return tuple(found)


def split_phases(
    costs: Sequence[PhaseCost], mix: TokenMix, *, kv_bytes: float = 0.0, usd_per_gb_sent: float = 0.0
) -> PhaseSplit:
    """Return which GPU should prefill and which should decode this mix.

    Args:
        costs: of the GPUs to choose from.
        mix: tokens of a request.
        kv_bytes: KV cache that travels from one to the other for a request.
        usd_per_gb_sent: dollars of sending 10^9 bytes: 0 within a data centre.

    Raises:
        SpecError: no GPU.
    """
    if not costs:
        raise SpecError("no GPU to choose from", hint="name GPUs that have a price")
    prefill = min(costs, key=lambda each: each.prefill_usd)
    decode = min(costs, key=lambda each: each.decode_usd)
    together = min(costs, key=lambda each: each.usd(mix))
    computed = PhaseCost("", prefill.prefill_usd, decode.decode_usd).usd(mix)
    split_usd = computed + kv_bytes / 1e9 * usd_per_gb_sent
    return PhaseSplit(tuple(costs), prefill, decode, together, split_usd, together.usd(mix))

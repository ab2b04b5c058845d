"""The number of replicas that a service wants: by open requests, KV cache and SLO, with hysteresis and a price.

More are wanted at once; fewer only when no moment of a window wanted more (the stabilisation window of Kubernetes'
horizontal autoscaler), so a noisy load does not flap. The caller keeps the state that `decide` returns.
"""

from dataclasses import dataclass, field
from math import ceil

SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class ScaleRules:
    """The rules of one service.

    Attributes:
        min_replicas, max_replicas: bounds; 0 as the least lets it scale to zero.
        ttft_us, tpot_us: the SLO at p99; None: none.
        target: fraction of slots and of KV tokens in use that is aimed at.
        tolerance: change of the wanted number, as a fraction, below which nothing happens.
        window_us: fewer replicas only if nothing in this time wanted more.
        idle_us: time without any request after which a service with a least of 0 scales to zero.
        usd_per_replica_hour: price of one replica.
        usd_per_hour_max: what all may cost; None: any.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    ttft_us: int | None = None
    tpot_us: int | None = None
    target: float = 0.8
    tolerance: float = 0.1
    window_us: int = 300 * SECOND_US
    idle_us: int = 300 * SECOND_US
    usd_per_replica_hour: float = 0.0
    usd_per_hour_max: float | None = None


@dataclass(frozen=True, slots=True)
class ScaleInput:
    """What the gateways report of a service, summed.

    Attributes:
        ready: replicas that take requests.
        starting: replicas that are placed or load their model.
        queued, running: requests that wait in the gateways; that are open at replicas.
        oldest_wait_us: of the queued ones.
        kv_fraction: KV tokens reserved over those of the ready replicas.
        slots: requests at a time of one replica; None: unknown.
        ttft_p99_us, tpot_p99_us: measured lately; None: no request ended.
    """

    ready: int = 0
    starting: int = 0
    queued: int = 0
    running: int = 0
    oldest_wait_us: int = 0
    kv_fraction: float = 0.0
    slots: int | None = None
    ttft_p99_us: int | None = None
    tpot_p99_us: int | None = None


@dataclass(frozen=True, slots=True)
class ScaleState:
    """What `decide` remembers: the number wanted, the numbers recommended in the window, the last request."""

    wanted: int = 0
    recommended: tuple[tuple[int, int], ...] = ()
    busy_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The replicas wanted, the reason when the number changes, and the state for the next time."""

    replicas: int
    why: str
    state: ScaleState = field(default_factory=ScaleState)


def decide(now_us: int, state: ScaleState, seen: ScaleInput, rules: ScaleRules) -> Decision:
    """Return the number of replicas to have from now on."""
    busy_at_us = now_us if seen.queued or seen.running or state.busy_at_us is None else state.busy_at_us
    wish, why = _wish(seen, rules)
    least, most = rules.min_replicas, _affordable(rules)
    if least == 0 and wish == 0 and now_us - busy_at_us < rules.idle_us:
        wish, why = min(1, state.wanted), "idle"
    wish = max(least, min(most, wish))
    window = [(at, each) for at, each in state.recommended if at > now_us - rules.window_us and each > wish]
    window.append((now_us, wish))
    wanted = state.wanted
    if wish > wanted:
        wanted = wish
    else:
        highest = max(each for _, each in window)
        idle = wish == 0 and now_us - busy_at_us >= rules.idle_us
        lower = 0 if idle else highest
        wanted = min(wanted, lower)
    wanted = max(least, min(most, wanted))
    reason = "" if wanted == state.wanted else why
    return Decision(wanted, reason, ScaleState(wanted, tuple(window), busy_at_us))


def _affordable(rules: ScaleRules) -> int:
    if rules.usd_per_hour_max is None or rules.usd_per_replica_hour <= 0:
        return rules.max_replicas
    return max(rules.min_replicas, min(rules.max_replicas, int(rules.usd_per_hour_max / rules.usd_per_replica_hour)))


def _wish(seen: ScaleInput, rules: ScaleRules) -> tuple[int, str]:
    """Return the replicas that the load of this moment asks for, and the strongest reason."""
    open_requests = seen.queued + seen.running
    if not open_requests:
        return 0, "no request is open"
    wishes = [(1, f"{open_requests} requests are open")]
    if seen.slots:
        wishes.append((ceil(open_requests / (seen.slots * rules.target)), f"{open_requests} requests are open"))
    if seen.ready:
        wishes.append((ceil(seen.ready * seen.kv_fraction / rules.target), f"{seen.kv_fraction:.0%} of the KV is used"))
    return max(wishes, key=lambda each: each[0])

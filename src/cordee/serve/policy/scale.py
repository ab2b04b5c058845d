"""The number of replicas that a service wants: by open requests, KV cache and SLO, with hysteresis and a price.

More are wanted at once; fewer only when no moment of a window wanted more (the stabilisation window of Kubernetes'
horizontal autoscaler), so a noisy load does not flap. The caller keeps the state that `decide` returns.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import TypeVar

from cordee.units import format_micro_usd, plural

Name = TypeVar("Name")

SECOND_US = 1_000_000
NEAR = 0.7
"""The part of an SLO from which a latency keeps the replicas that there are."""


@dataclass(frozen=True, slots=True)
class ScaleRules:
    """The rules of one service.

    Attributes:
        min_replicas, max_replicas: bounds; 0 as the least lets it scale to zero.
        ttft_us, tpot_us: the SLO at p99; None: none.
        target: fraction of slots and of KV tokens in use that is aimed at.
        tolerance: change of the wanted number, as a fraction, below which nothing happens.
        window_us: fewer replicas only if nothing in this time wanted more.
        settle_us: time after a raise in which latencies, which are measured over a while, raise no more.
        idle_us: time without any request after which a service with a least of 0 scales to zero.
        micro_usd_per_hour: price of one replica; 0: none is known.
        max_micro_usd_per_hour: price of all replicas beyond the least ones, at most; None: any.
        standby: replicas in reserve, which are paid as well.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    ttft_us: int | None = None
    tpot_us: int | None = None
    target: float = 0.8
    tolerance: float = 0.1
    window_us: int = 300 * SECOND_US
    settle_us: int = 60 * SECOND_US
    idle_us: int = 300 * SECOND_US
    micro_usd_per_hour: int = 0
    max_micro_usd_per_hour: int | None = None
    standby: int = 0


@dataclass(frozen=True, slots=True)
class ScaleInput:
    """The sums of the gateways' reports about a service.

    Attributes:
        ready: replicas that take requests.
        starting: replicas that are placed or load their model.
        queued, running: requests that wait in the gateways; that are open at replicas.
        oldest_wait_us: of the queued ones.
        kv_fraction: KV tokens reserved over those of the ready replicas.
        slots: requests at a time of one replica (`usable_slots`); None: unknown.
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
    """The memory of `decide`: the number wanted, those wanted by each moment of the window, the times of the last
    request and of the last raise.
    """

    wanted: int = 0
    recommended: tuple[tuple[int, int], ...] = ()
    busy_at_us: int | None = None
    raised_us: int = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Decision:
    """The replicas wanted, the reason when the number changes, and the state for the next time.

    Attributes:
        limit: the price that keeps it from more replicas, which it wants at this moment; "": none does.
    """

    replicas: int
    why: str
    limit: str = ""
    state: ScaleState = field(default_factory=ScaleState)


def decide(now_us: int, state: ScaleState, seen: ScaleInput, rules: ScaleRules) -> Decision:
    """Return the number of replicas to have from now on."""
    is_open = bool(seen.queued or seen.running)
    busy_at_us = now_us if is_open or state.busy_at_us is None else state.busy_at_us
    least, most = rules.min_replicas, _affordable(rules)
    wish, why = _wish(now_us, seen, rules, state)
    idle = least == 0 and not is_open and now_us - busy_at_us >= rules.idle_us
    if not idle:
        wish = max(wish, min(1, state.wanted))
    limit = _limit(min(wish, rules.max_replicas), most, rules)
    wish = max(least, min(most, wish))
    # Without a memory, as after a change of servers, the replicas of now stay for a window.
    recommended = state.recommended or ((now_us, state.wanted),)
    # A number that a later and higher one follows can never be the highest again.
    window = [(at, each) for at, each in recommended if at > now_us - rules.window_us and each > wish]
    window.append((now_us, wish))
    if wish > state.wanted:
        wanted = wish
    elif idle:
        wanted, why = 0, f"no request for {(now_us - busy_at_us) / SECOND_US:.0f} s"
    else:
        wanted = max(least, min(most, state.wanted, max(each for _, each in window)))
        why = f"at most {wanted} were wanted in the last {rules.window_us / SECOND_US:.0f} s"
    if least <= state.wanted <= most and wanted == state.wanted:
        why = ""
    raised_us = now_us if wanted > state.wanted else state.raised_us
    return Decision(wanted, why, limit, ScaleState(wanted, tuple(window), busy_at_us, raised_us))


def usable_slots(engine: int | None, within_slo: int | None) -> int | None:
    """Return the requests at a time of one replica: those of its engine, or fewer if the plan's SLO holds for fewer.

    >>> usable_slots(256, 40), usable_slots(8, 40), usable_slots(None, 40), usable_slots(8, None)
    (40, 8, 40, 8)
    """
    known = [each for each in (engine, within_slo) if each is not None]
    return max(1, min(known)) if known else None


def leaving_order(replicas: Mapping[Name, str], held_milli: Mapping[str, int], each_milli: int) -> list[Name]:
    """Return replicas in the order in which they leave, so that whole nodes get free.

    Nodes on which others hold the least come first, then those with the fewest of these replicas.

    Args:
        replicas: the node of each, those first that leave first if all else is equal.
        held_milli: thousandths of GPUs that are held on each node, these replicas included.
        each_milli: thousandths of GPUs that each replica holds.

    >>> leaving_order({"d": "n2", "c": "n2", "b": "n1", "a": "n0"}, {"n0": 8000, "n1": 1000, "n2": 2000}, 1000)
    ['b', 'd', 'c', 'a']
    """
    on = Counter(replicas.values())
    places = list(replicas.values())

    def rank(node: str) -> tuple[int, int, int]:
        return held_milli.get(node, 0) - on[node] * each_milli, on[node], places.index(node)

    return sorted(replicas, key=lambda name: rank(replicas[name]))


def _affordable(rules: ScaleRules) -> int:
    if rules.max_micro_usd_per_hour is None or rules.micro_usd_per_hour <= 0:
        return rules.max_replicas
    paid = rules.max_micro_usd_per_hour // rules.micro_usd_per_hour - rules.standby
    return max(rules.min_replicas, min(rules.max_replicas, paid))


def _limit(wish: int, most: int, rules: ScaleRules) -> str:
    if wish <= most or rules.max_micro_usd_per_hour is None:
        return ""
    price = (wish + rules.standby) * rules.micro_usd_per_hour
    most_usd = format_micro_usd(rules.max_micro_usd_per_hour)
    return f"{plural(wish, 'replica')} would cost {format_micro_usd(price)} an hour, and {most_usd} is the most"


def _wish(now_us: int, seen: ScaleInput, rules: ScaleRules, state: ScaleState) -> tuple[int, str]:
    """Return the replicas that the load of this moment asks for, and the strongest reason."""
    requests = seen.queued + seen.running
    if not requests:
        return 0, "no request is open"
    wishes = [(1, f"{requests} requests are open")]
    if seen.slots:
        wishes.append(
            _needed(requests / seen.slots, state.wanted, rules, f"{requests} requests for {seen.slots} slots each")
        )
    if seen.ready:
        used = f"{seen.kv_fraction:.0%} of the KV cache is used"
        wishes.append(_needed(seen.ready * seen.kv_fraction, state.wanted, rules, used))
    wishes.extend(_latency(now_us, seen, rules, state))
    return max(wishes, key=lambda each: each[0])


def _needed(full_replicas: float, wanted: int, rules: ScaleRules, why: str) -> tuple[int, str]:
    """Return the replicas that carry this load at the target; those of now within the tolerance."""
    exact = full_replicas / rules.target
    if wanted and abs(exact / wanted - 1) <= rules.tolerance:
        return wanted, why
    return ceil(exact), why


def _latency(now_us: int, seen: ScaleInput, rules: ScaleRules, state: ScaleState) -> list[tuple[int, str]]:
    """Return half as many replicas more for a latency beyond its SLO, those of now for one near it."""
    first_us = max(seen.ttft_p99_us or 0, seen.oldest_wait_us if seen.queued else 0)
    pairs = (("time to first token", first_us, rules.ttft_us), ("time per token", seen.tpot_p99_us, rules.tpot_us))
    # What loads now was not there when these times were measured.
    settled = not seen.starting and seen.ready >= state.wanted and now_us - state.raised_us >= rules.settle_us
    wishes = []
    for name, measured_us, slo_us in pairs:
        if measured_us and slo_us and seen.ready:
            late = measured_us > slo_us * (1 + rules.tolerance) and settled
            near = measured_us > slo_us * NEAR
            wish = seen.ready + max(1, seen.ready // 2) if late else state.wanted if near else 0
            wishes.append((wish, f"p99 of the {name} is {measured_us / 1000:.0f} ms for {slo_us / 1000:.0f} ms"))
    return wishes

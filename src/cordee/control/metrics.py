"""The server's metrics in the text format of Prometheus; names of tokens and requests are as vLLM's.

Latencies are those that the gateways report of the last 30 seconds; their own /metrics has them as histograms.
Tokens only grow. Dollars by tenant and GPU time by class are gauges: those of a day may move until it is over.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cordee.account.sums import CostRow, Totals
from cordee.account.usage import CostLine, TokenCost, Tokens
from cordee.answers.queues import BudgetView
from cordee.answers.services import ServiceView, TenantView
from cordee.control.cluster_counts import ClusterCounts
from cordee.control.ticks import BOUNDS_S, Ticks
from cordee.units import MICRO_USD, US_PER_S
from cordee.view.markup import CLASSES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The values that the metrics are made of, all of one time.

    Attributes:
        jobs: sums of replicas by service; "" are jobs that are no replicas.
        totals: held and idle time.
        lines: tokens and dollars of services.
        services: as the API answers them.
        tenants: as the API answers them.
        cluster: GPUs, nodes, jobs and queues.
        ticks: of the control loop.
        budgets: as the API answers them.
    """

    jobs: Sequence[CostRow]
    totals: Totals
    lines: Sequence[CostLine]
    services: Sequence[ServiceView]
    tenants: Sequence[TenantView]
    cluster: ClusterCounts
    ticks: Ticks
    budgets: Sequence[BudgetView] = ()


def metrics_text(measures: Measures) -> str:
    """Return the metrics, one value a line."""
    parts = (
        _tokens(measures.lines),
        _services(measures.services),
        _money(measures),
        _cluster(measures.cluster),
        _ticks(measures.ticks),
        _budgets(measures.budgets),
    )
    return "".join(line for part in parts for line in part)


def _tokens(lines: Iterable[CostLine]) -> Iterator[str]:
    sums: dict[tuple[str, str, str], tuple[Tokens, TokenCost]] = {}
    for line in lines:
        key = (line.key.service, line.key.tenant, line.key.model)
        tokens, cost = sums.get(key, (Tokens(), TokenCost()))
        sums[key] = tokens + line.tokens, cost + line.micro_usd
    found = [(dict(zip(("service", "tenant", "model"), key, strict=True)), *sums[key]) for key in sorted(sums)]
    served = [(labels, tokens) for labels, tokens, _ in found if tokens.requests]
    for name, about, field in (
        ("requests_total", "Requests that ended.", "requests"),
        ("requests_failed_total", "Requests without a whole answer.", "failed"),
        ("prompt_tokens_total", "Input tokens, cached ones as well.", "input"),
        ("prompt_tokens_cached_total", "Input tokens that were found in a prefix cache.", "cached"),
        ("generation_tokens_total", "Output tokens.", "output"),
    ):
        yield from _family(name, about, "counter", [(labels, getattr(tokens, field)) for labels, tokens in served])
    kinds = ("computed", "cached", "output", "unused")
    costs = [({**labels, "kind": kind}, getattr(cost, kind) / MICRO_USD) for labels, _, cost in found for kind in kinds]
    about = "Dollars of replicas by the tokens that they served; unused: of days without any."
    yield from _family("token_cost_dollars", about, "gauge", [each for each in costs if each[1]])


def _services(services: Sequence[ServiceView]) -> Iterator[str]:
    states: dict[tuple[str, str], int] = {}
    for service in services:
        for replica in service.replicas:
            key = (service.name, replica.state)
            states[key] = states.get(key, 0) + 1
    counts = [({"service": service, "state": state}, count) for (service, state), count in sorted(states.items())]
    yield from _family("replicas", "Replicas by state.", "gauge", counts)
    wanted = [({"service": each.name}, each.wanted) for each in services]
    yield from _family("replicas_wanted", "Replicas that the service wants.", "gauge", wanted)
    for name, about, field, unit in (
        ("num_requests_running", "Requests at a replica.", "running", 1),
        ("num_requests_waiting", "Requests without a replica.", "queued", 1),
        ("request_rate", "Requests a second.", "requests_per_s", 1),
        ("token_rate", "Tokens a second.", "tokens_per_s", 1),
        ("kv_cache_usage_perc", "Fraction of the KV cache in use; 1 is all of it.", "kv_fraction", 1),
        ("time_to_first_token_p99_seconds", "Time to first token, the worst gateway's p99.", "ttft_p99_us", US_PER_S),
        ("time_per_output_token_p99_seconds", "Time per output token, so too.", "tpot_p99_us", US_PER_S),
    ):
        values = [({"service": each.name}, getattr(each.measured, field)) for each in services]
        yield from _family(
            name, about, "gauge", [(labels, value / unit) for labels, value in values if value is not None]
        )


def _money(measures: Measures) -> Iterator[str]:
    by_class = [
        ({"service": row.key, "class": cls}, getattr(row.gpu_us, cls) / US_PER_S)
        for row in measures.jobs
        for cls in CLASSES
        if getattr(row.gpu_us, cls)
    ]
    yield from _family(
        "gpu_seconds", 'GPU time held, by class; service "": jobs that are no replicas.', "gauge", by_class
    )
    dollars = [({"service": row.key}, row.micro_usd.held / MICRO_USD) for row in measures.jobs]
    yield from _family("cost_dollars_total", "Dollars of GPU time held.", "counter", dollars)
    totals = measures.totals
    yield from _family(
        "idle_gpu_seconds_total", "GPU time that no job held.", "counter", [({}, totals.idle_gpu_us / US_PER_S)]
    )
    yield from _family("idle_cost_dollars_total", "Its dollars.", "counter", [({}, totals.idle_micro_usd / MICRO_USD)])
    spent = [({"tenant": each.name}, each.spent_micro_usd / MICRO_USD) for each in measures.tenants]
    yield from _family("tenant_spent_dollars", "Dollars of this day or month of its budget.", "gauge", spent)
    budgets = [
        ({"tenant": each.name}, each.budget_micro_usd / MICRO_USD)
        for each in measures.tenants
        if each.budget_micro_usd is not None
    ]
    yield from _family("tenant_budget_dollars", "Budget of a day or month.", "gauge", budgets)


def _cluster(cluster: ClusterCounts) -> Iterator[str]:
    for name, about, counts in (
        ("gpus", "GPUs by state; free ones are those that a job may get.", cluster.gpus),
        ("nodes", "Nodes by state; a silent one is up, and its agent does not answer.", cluster.nodes),
        ("jobs", "Jobs that have not ended, by state.", cluster.jobs),
    ):
        yield from _family(name, about, "gauge", [({"state": state}, count) for state, count in counts.items()])
    for name, about, field, unit in (
        ("queue_quota_gpus", "GPUs that a queue is guaranteed.", "quota_gpus", 1),
        ("queue_held_gpus", "GPUs that a queue and those below it hold.", "held_gpu_milli", 1000),
        ("queue_borrowed_gpus", "GPUs that it holds above its quota.", "borrowed_gpu_milli", 1000),
        ("queue_waiting_gpus", "GPUs that its waiting jobs ask for.", "waiting_gpu_milli", 1000),
        ("queue_waiting_jobs", "Its waiting jobs.", "waiting_jobs", 1),
        ("queue_running_jobs", "Its jobs that run.", "running_jobs", 1),
    ):
        values = [({"queue": each.name}, getattr(each, field) / unit) for each in cluster.queues]
        yield from _family(name, about, "gauge", values)
    rates = cluster.held_micro_usd_per_hour / MICRO_USD, cluster.idle_micro_usd_per_hour / MICRO_USD
    oldest_s = cluster.oldest_wait_us / US_PER_S
    for name, about, kind, value in (
        ("oldest_wait_seconds", "Age of the job that waits since longest; 0: none waits.", "gauge", oldest_s),
        ("held_dollars_per_hour", "The price of the GPUs that are held.", "gauge", rates[0]),
        ("idle_dollars_per_hour", "The price of GPUs that are up and held by nobody.", "gauge", rates[1]),
        ("control_loop_works", "1, or 0 after a tick that failed, as with a full disk.", "gauge", int(cluster.works)),
        ("log_events_total", "Events in the log.", "counter", cluster.log_number),
    ):
        yield from _family(name, about, kind, [({}, value)])


def _ticks(ticks: Ticks) -> Iterator[str]:
    name, about = "control_loop_tick_seconds", "A tick of the control loop: reports, decision, commit, orders."
    yield f"# HELP cordee_{name} {about}\n# TYPE cordee_{name} histogram\n"
    bounds = [*(f"{each:g}" for each in BOUNDS_S), "+Inf"]
    sums = list(accumulate(ticks.counts))
    yield from _lines(f"{name}_bucket", [({"le": each}, sums[at]) for at, each in enumerate(bounds)])
    yield f"cordee_{name}_sum {ticks.sum_s:.15g}\ncordee_{name}_count {sums[-1]}\n"


def _budgets(budgets: Sequence[BudgetView]) -> Iterator[str]:
    for name, about, field, unit in (
        ("budget_dollars", "The budget of a queue or a user; an empty label stands for all.", "micro_usd", MICRO_USD),
        ("budget_spent_dollars", "What is spent of it.", "spent_micro_usd", MICRO_USD),
        ("budget_ahead_dollars", "What will be at the end of the month, at this rate.", "ahead_micro_usd", MICRO_USD),
        ("budget_gpu_seconds", "The budget of GPU time.", "gpu_us", US_PER_S),
        ("budget_spent_gpu_seconds", "What is spent of it.", "spent_gpu_us", US_PER_S),
    ):
        limit = "gpu_us" if "gpu" in name else "micro_usd"
        values = [
            ({"queue": each.queue or "", "user": each.user or "", "per": each.per}, getattr(each, field) / unit)
            for each in budgets
            if getattr(each, limit) is not None and getattr(each, field) is not None
        ]
        yield from _family(name, about, "gauge", values)


def _family(name: str, about: str, kind: str, values: Sequence[tuple[Labels, float]]) -> Iterator[str]:
    """Yield the lines of one metric; none without values."""
    if values:
        yield f"# HELP cordee_{name} {about}\n# TYPE cordee_{name} {kind}\n"
    yield from _lines(name, values)


def _lines(name: str, values: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    for labels, value in values:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"cordee_{name}{{{inner}}} {value:.15g}\n" if inner else f"cordee_{name} {value:.15g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

"""The newest report of each gateway about its requests, in memory, and the sum of them for a service."""

from collections.abc import Iterable, Iterator

from cordee.answers.services import GatewayReport, GatewayStatus, ServedView
from cordee.control.directory import Service
from cordee.ids import attempt_name
from cordee.units import US_PER_S

STALE_US = 15 * US_PER_S


class Gateways:
    """The newest report of each gateway; one that is silent for 15 s counts as gone."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[int, GatewayReport]] = {}

    def put(self, name: str, report: GatewayReport, now_us: int) -> None:
        """Keep a report in place of the gateway's last one."""
        self._reports[name] = (now_us, report)
        for old in [each for each, (at_us, _) in self._reports.items() if now_us - at_us > STALE_US]:
            del self._reports[old]

    def _fresh(self, now_us: int) -> Iterator[GatewayReport]:
        return (report for at_us, report in list(self._reports.values()) if now_us - at_us <= STALE_US)

    def urls(self, now_us: int) -> list[str]:
        """Return the URLs of the gateways that report now."""
        return sorted({report.url for report in self._fresh(now_us) if report.url})

    def of(self, service: Service, now_us: int) -> list[GatewayStatus]:
        """Return the gateways' statuses of a service."""
        return [each for report in self._fresh(now_us) for each in report.status if each.service == service.name]


def served(service: Service, statuses: Iterable[GatewayStatus]) -> ServedView:
    """Return the sum of the gateways' statuses; of latencies the worst."""
    found = list(statuses)
    ready = {
        attempt_name(each.job_id, each.epoch): each.ready
        for each in service.replicas.values()
        if each.is_ready and each.ready is not None
    }
    # One that drains keeps its tokens, but neither its tokens nor its room count for those that take requests.
    used = [tokens for status in found for name, tokens in status.kv_used.items() if name in ready]
    held = sum(each.kv_tokens or 0 for each in ready.values())
    return ServedView(
        queued=sum(status.queued for status in found),
        running=sum(status.running for status in found),
        ttft_p99_us=max((status.ttft_p99_us for status in found if status.ttft_p99_us is not None), default=None),
        tpot_p99_us=max((status.tpot_p99_us for status in found if status.tpot_p99_us is not None), default=None),
        requests_per_s=_sum(status.requests_per_s for status in found),
        tokens_per_s=_sum(status.tokens_per_s for status in found),
        kv_fraction=sum(used) / held if held and found else None,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

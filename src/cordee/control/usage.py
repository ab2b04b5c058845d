"""Tokens and dollars of services as answers of the API, and as metrics for Prometheus."""

from collections.abc import Iterable

from cordee.account.ledger import Ledger
from cordee.account.split import Split
from cordee.account.sums import CostRow
from cordee.account.usage import CostLine, UsageBy, UsageRow, usage_rows
from cordee.answers.cost import SplitView
from cordee.answers.services import (
    CostLinesView,
    CostLineView,
    TokenCostView,
    TokenCountsView,
    TokenPrices,
    UsageRowView,
    UsageView,
)


def usage_view(ledger: Ledger, by: UsageBy, now_us: int) -> UsageView:
    """Return tokens and cost by service, tenant, key or model, beside the cost of all other jobs."""
    lines, jobs = ledger.usage(now_us), {row.key: row for row in ledger.cost("service", now_us)}
    training = jobs.pop("", None)
    tenants = {line.key.key: line.key.tenant for line in lines} if by == "key" else {}
    rows = {row.key: row for row in usage_rows(lines, by)}
    empty = Split()
    return UsageView(
        by=by,
        at_us=now_us,
        rows=[_row(row, jobs.get(row.key) if by == "service" else None, tenants.get(row.key)) for row in rows.values()],
        training_gpu_us=SplitView.of(training.gpu_us if training else empty),
        training_micro_usd=SplitView.of(training.micro_usd if training else empty),
        micro_usd=ledger.totals(now_us).micro_usd.held,
    )


def _row(row: UsageRow, job: CostRow | None, tenant: str | None) -> UsageRowView:
    return UsageRowView(
        key=row.key,
        tenant=tenant,
        tokens=TokenCountsView.of(row.tokens),
        micro_usd=TokenCostView.of(row.micro_usd),
        micro_usd_per_million=TokenPrices(**row.micro_usd_per_million),
        gpu_us=None if job is None else SplitView.of(job.gpu_us),
        micro_usd_by_class=None if job is None else SplitView.of(job.micro_usd),
    )


def lines_view(lines: Iterable[CostLine], now_us: int, from_us: int, to_us: int | None) -> CostLinesView:
    """Return the cost lines that begin within a stretch of time."""
    wanted = (each for each in lines if each.from_us >= from_us and (to_us is None or each.from_us < to_us))
    views = [
        CostLineView.of(
            line,
            **line.key._asdict(),
            tokens=TokenCountsView.of(line.tokens),
            micro_usd=TokenCostView.of(line.micro_usd),
        )
        for line in wanted
    ]
    return CostLinesView(at_us=now_us, lines=views)

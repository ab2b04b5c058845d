"""The chargeback of a month as an answer and as CSV: who used what, who lost it for whom, and what nobody held."""

import csv
import io
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from fastapi import Depends, Query
from fastapi.responses import Response
from starlette.requests import Request

from cordee.account.chargeback import IDLE, ChargeLine
from cordee.account.split import Class
from cordee.answers.cost import AmountView, ChargebackView, ChargeLineView, SplitView
from cordee.control.access import HIDDEN_USER, Access
from cordee.control.api_route import user_router
from cordee.control.dependencies import Asked, By
from cordee.control.months import Books
from cordee.control.questions import Costly
from cordee.control.roles import Action
from cordee.reports import COUNT_MAX
from cordee.units import MICRO_USD, US_PER_S, format_month

Idle = Literal["apart", "by-use"]
Moment = Annotated[int, Query(ge=0, le=COUNT_MAX)]

router = user_router("/v1")


def lines_of(
    books: Books, by: Access, now_us: int, *, from_us: int = 0, to_us: int | None = None, idle: Idle = "apart"
) -> list[ChargeLine]:
    """Return the lines that may be seen, of the months that begin within a stretch of time."""
    lines = books.charge_lines(now_us, divides_idle=idle == "by-use")
    return [
        _hidden(line, by)
        for line in lines
        if from_us <= line.key.month_us < (now_us + 1 if to_us is None else to_us)
        and (line.key.user == IDLE or by.may(Action.SEE, line.key.user, line.key.queue))
    ]


def _hidden(line: ChargeLine, by: Access) -> ChargeLine:
    """Return a line in which payers whose jobs may not be seen have no name."""
    payers = ((user if by.may(Action.SEE, user, queue) else HIDDEN_USER, queue) for user, queue in line.payers)
    return line if by.sees_all else replace(line, payers=frozenset(payers))


class _Answered(NamedTuple):
    at_us: int
    lines: list[ChargeLine]


async def _answered(
    operations: Asked,
    request: Request,
    costly: Costly,
    by: By,
    from_us: Moment = 0,
    to_us: Moment | None = None,
    idle: Idle = "apart",
) -> _Answered:
    now_us, books = operations.clock.now_us(), request.app.state.pages.books
    found = await costly.answer(request, lambda _: lines_of(books, by, now_us, from_us=from_us, to_us=to_us, idle=idle))
    return _Answered(now_us, found)


Answered = Annotated[_Answered, Depends(_answered)]


@router.get("/chargeback")
async def chargeback(found: Answered) -> ChargebackView:
    """Return the chargeback by month, user, queue, project and model: its lines sum to the ledger."""
    return ChargebackView(at_us=found.at_us, lines=[_view(line) for line in found.lines])


@router.get("/chargeback.csv", response_class=Response)
async def chargeback_csv(found: Answered) -> Response:
    """Return the same as CSV: seconds and dollars with all six digits."""
    return Response(csv_of(found.lines), media_type="text/csv; charset=utf-8")


def _view(line: ChargeLine) -> ChargeLineView:
    key = line.key
    return ChargeLineView(
        month=format_month(key.month_us),
        user=key.user,
        queue=key.queue,
        project=key.project,
        model=key.model,
        jobs=len(line.jobs),
        gpu_us=SplitView.of(line.gpu_us),
        micro_usd=SplitView.of(line.micro_usd),
        passed_on=AmountView.of(line.passed_on),
        passed_on_to=[f"{user} in {queue}" for user, queue in sorted(line.payers)],
        charged=AmountView.of(line.charged),
        idle=AmountView.of(line.idle),
        billed=AmountView.of(line.billed),
        micro_usd_per_gpu_hour=line.micro_usd_per_gpu_hour,
        price_sources=sorted(line.sources),
    )


_AMOUNTS = ("held_total", *Class, "passed_on", "charged", "idle", "billed")
COLUMNS = (
    "month", "user", "queue", "project", "model", "jobs", "billed_usd", "usd_per_gpu_hour", "price_sources",
    "passed_on_to", *(f"{name}_gpu_seconds" for name in _AMOUNTS), *(f"{name}_usd" for name in _AMOUNTS[:-1]),
)  # fmt: skip
"""Columns of the CSV. Of losses that others pay for, `passed_on` is this line's, `charged` what others lost for it."""


def csv_of(lines: Iterable[ChargeLine]) -> str:
    """Return the lines as CSV. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in lines:
        parts = (line.passed_on, line.charged, line.idle, line.billed)
        gpu_us = [line.gpu_us.held, *(getattr(line.gpu_us, each) for each in Class), *(each.gpu_us for each in parts)]
        money = [
            line.micro_usd.held,
            *(getattr(line.micro_usd, each) for each in Class),
            *(each.micro_usd for each in parts),
        ]
        price = line.micro_usd_per_gpu_hour
        texts = [format_month(line.key.month_us), *line.key[1:]]
        payers = "; ".join(f"{user} in {queue}" for user, queue in sorted(line.payers))
        writer.writerow(
            [
                *map(_safe, texts),
                len(line.jobs),
                _decimal(line.billed.micro_usd, MICRO_USD),
                "" if price is None else _decimal(price, MICRO_USD),
                _safe("; ".join(sorted(line.sources))),
                _safe(payers),
                *(_decimal(each, US_PER_S) for each in gpu_us),
                *(_decimal(each, MICRO_USD) for each in money[:-1]),
            ]
        )
    return out.getvalue()


def _safe(text: str) -> str:
    return f"'{text}" if text[:1] in "=+-@\t\r" else text


def _decimal(amount: int, unit: int) -> str:
    """Return an amount with all its digits.

    >>> _decimal(1_500_000, 1_000_000)
    '1.500000'
    """
    whole, rest = divmod(amount, unit)
    return f"{whole}.{rest:06}"

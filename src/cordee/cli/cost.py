"""`cordee cost`: GPU time by class, tokens, and what they cost."""

import csv
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cordee.answers.cost import CostView
from cordee.answers.services import CostLinesView, CostLineView, UsageView
from cordee.cli import measured, terminal
from cordee.cli.cost_elsewhere import (
    Asked,
    ClusterOfExport,
    From,
    PolicyOption,
    PriceAs,
    SavedEvery,
    WhatIfOption,
    Zone,
    show_other_cost,
)
from cordee.cli.cost_storage import GbEgress, GbMonth, Storage, show_storage
from cordee.cli.cost_text import (
    class_table,
    cost_table,
    epoch_table,
    job_remarks,
    line_table,
    remarks,
    retrieval_lines,
    token_table,
)
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import InputError
from cordee.near import did_you_mean
from cordee.units import MICRO_USD, US_PER_S

BY = ("job", "user", "queue", "epoch")
OF_SERVICES = ("service", "tenant", "key", "model")

Since = Annotated[
    str | None,
    typer.Option(
        metavar="DATE", help="With --usage or --from: from this day or month of UTC on, 2026-11-30 or 2026-11."
    ),
]
Until = Annotated[str | None, typer.Option(metavar="DATE", help="With --usage or --from: before this day or month.")]
Usage = Annotated[bool, typer.Option("--usage", help="Print the tokens and cost of each tenant, key and model by day.")]
Job = Annotated[str | None, typer.Argument(help="Show this job: cost by epoch of its data, and of a million tokens.")]
By = Annotated[
    str | None,
    typer.Option(
        help="Group by job, user, queue or epoch (attempt); by service, tenant, key or model with tokens; "
        "with --from by user, account, partition or job.",
        show_default="job; user with --from",
    ),
]
AsCsv = Annotated[
    bool,
    typer.Option("--csv", help="Print the chargeback of each month as CSV; or --usage (names of FOCUS), or --from."),
]
Idle = Annotated[
    str, typer.Option(metavar="apart|by-use", help="With --csv: list idle time apart, or divide it by use.")
]
ChromeTrace = Annotated[
    Path | None, typer.Option(help="Write GPU time as a Chrome trace, for Perfetto and `cordee profile`.")
]


def cost(
    job: Job = None,
    *,
    by: By = None,
    usage: Usage = False,
    as_csv: AsCsv = False,
    idle: Idle = "apart",
    from_: From = None,
    cluster: ClusterOfExport = None,
    checkpoint_every: SavedEvery = None,
    price_as: PriceAs = None,
    timezone: Zone = "UTC",
    what_if: WhatIfOption = False,
    policy: PolicyOption = "cordee,easy",
    storage: Storage = False,
    gb_month: GbMonth = None,
    gb_egress: GbEgress = None,
    since: Since = None,
    until: Until = None,
    chrome_trace: ChromeTrace = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show GPU time by class and its cost; for services also tokens; for a cluster under Slurm the work that was lost.

    With --from no server is needed: the file holds accounting that `sacct` printed.
    """
    if storage or gb_month or gb_egress:
        alone = not (job or by or from_ or usage or as_csv or what_if or chrome_trace or since or until)
        show_storage(home, gb_month, gb_egress, alone=alone and storage, as_json=as_json)
        return
    if job is not None:
        _refuse_with_job(by or from_ or usage or as_csv or what_if or chrome_trace or since or until)
        _show_job(job, home, as_json=as_json)
        return
    if from_ is not None:
        window_us = (_day_us(since), _day_us(until))
        asked = Asked(by or "user", window_us, cluster, checkpoint_every, price_as, timezone)
        show_other_cost(from_, asked, policy=policy if what_if else None, as_csv=as_csv, as_json=as_json)
        return
    if what_if or cluster or checkpoint_every or price_as:
        hint = "add --from sacct.txt"
        raise InputError("--what-if, --cluster, --checkpoint-every and --price-as need an export", hint=hint)
    by = by or "job"
    _check_log(by, usage, as_csv, since or until)
    from_us, to_us = _day_us(since) or 0, _day_us(until)
    if as_csv and not usage:
        _print_chargeback(home, from_us, to_us, idle, as_json=as_json)
        return
    with terminal.connect(home) as client:
        if chrome_trace is not None:
            _write_chrome_trace(client, chrome_trace)
        found = (
            client.usage_lines(from_us, to_us) if usage else client.usage(by) if by in OF_SERVICES else client.cost(by)
        )
    if as_json:
        terminal.print_json(found)
    elif isinstance(found, CostLinesView):
        _print_lines(found, as_csv=as_csv)
    elif isinstance(found, UsageView):
        _print_usage(found)
    else:
        _print_cost(found)


def _print_chargeback(home: Path | None, from_us: int, to_us: int | None, idle: str, *, as_json: bool) -> None:
    if idle not in ("apart", "by-use"):
        raise InputError(f"unknown --idle {idle!r}", hint="use apart or by-use")
    with terminal.connect(home) as client:
        if as_json:
            terminal.print_json(client.money.chargeback(from_us, to_us, idle))
        else:
            sys.stdout.write(client.money.chargeback_csv(from_us, to_us, idle))


def _check_log(by: str, usage: bool, as_csv: bool, of_lines: object) -> None:
    if by not in BY + OF_SERVICES:
        raise InputError(f"unknown --by {by!r}", hint=did_you_mean(by, BY + OF_SERVICES))
    if of_lines and not (usage or as_csv):
        raise InputError("--since and --until are for usage lines and for chargeback", hint="add --usage or --csv")


def _refuse_with_job(other: object) -> None:
    if other:
        raise InputError("the cost of one job takes no other option", hint="cordee cost JOB, or cordee cost --by epoch")


def _show_job(job: str, home: Path | None, *, as_json: bool) -> None:
    with terminal.connect(home) as client:
        found = client.job_cost(job)
    if as_json:
        terminal.print_json(found)
        return
    console = terminal.stdout()
    view = CostView(
        by="job",
        at_us=found.at_us,
        rows=[found.row],
        gpu_us=found.row.gpu_us,
        micro_usd=found.row.micro_usd,
        idle_gpu_us=0,
        idle_micro_usd=0,
        energy_mj=found.row.energy_mj,
        idle_energy_mj=0,
        integrated_mj=0,
        electricity=found.electricity,
    )
    console.print(cost_table(view, console.width))
    if found.epochs:
        console.print(epoch_table(found))
    for line in (*remarks(view), *job_remarks(found)):
        console.print(line, highlight=False, markup=False)


def _write_chrome_trace(client: Client, path: Path) -> None:
    from cordee.account.ledger import attempt_segments
    from cordee.cli.plan_more import write_page
    from cordee.view.chrome import chrome_trace_text
    from cordee.view.chrome_log import log_slices

    events = [event for _, event in client.events()]
    slices, flows = log_slices(events, attempt_segments(events))
    write_page(path, chrome_trace_text(slices, flows, {"traceName": path.name}))


def _print_cost(found: CostView) -> None:
    if not found.rows:
        print("no job has run yet")
        return
    console = terminal.stdout()
    console.print(cost_table(found, console.width))
    for line in remarks(found):
        console.print(line, highlight=False, markup=False)
    both = [(row.key, each) for row in found.rows for each in row.measured if each.off_by is not None]
    if both:
        console.print(measured.comparisons_by_key(found.by, both))


def _print_usage(found: UsageView) -> None:
    if not found.rows:
        print("no service has run yet; `cordee cost` shows other jobs")
        return
    console = terminal.stdout()
    if found.by == "service":
        console.print(class_table(found, console.width))
    console.print(token_table(found, console.width))
    for line in retrieval_lines(found):
        console.print(line, highlight=False, markup=False)


def _print_lines(found: CostLinesView, *, as_csv: bool) -> None:
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(csv_row, found.lines))
    elif found.lines:
        console = terminal.stdout()
        console.print(line_table(found.lines, console.width))
    else:
        print("no service held a GPU or served a token in this time")


COLUMNS = (
    "ChargePeriodStart", "ChargePeriodEnd", "ChargeCategory", "ServiceName", "SubAccountId", "ResourceId", "SkuId",
    "BillingCurrency", "BilledCost", "x_Requests", "x_FailedRequests", "x_InputTokens", "x_CachedTokens",
    "x_OutputTokens", "x_InputCost", "x_CachedCost", "x_OutputCost", "x_UnusedCost",
)  # fmt: skip
"""Columns of FOCUS 1.2: tenants are sub-accounts, keys resources, models SKUs. Columns of one's own begin with x_."""


def csv_row(line: CostLineView) -> Sequence[str | int]:
    """Return a cost line in the order of `COLUMNS`; dollars to the micro-dollar."""
    tokens, cost = line.tokens, line.micro_usd
    dollars = [f"{each // MICRO_USD}.{each % MICRO_USD:06d}" for each in (cost.computed, cost.cached, cost.output)]
    return (
        f"{_time(line.from_us):%Y-%m-%dT%H:%M:%SZ}", f"{_time(line.to_us):%Y-%m-%dT%H:%M:%SZ}", "Usage",
        line.service, line.tenant, line.key, line.model, "USD",
        f"{cost.total // MICRO_USD}.{cost.total % MICRO_USD:06d}", tokens.requests, tokens.failed, tokens.input,
        tokens.cached, tokens.output, *dollars, f"{cost.unused // MICRO_USD}.{cost.unused % MICRO_USD:06d}",
    )  # fmt: skip


def _time(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us // US_PER_S, UTC)


def _day_us(text: str | None) -> int | None:
    """Return the start of a day or month of UTC."""
    if text is None:
        return None
    try:
        day = datetime.fromisoformat(f"{text}T00+00:00" if text.count("-") > 1 else f"{text}-01T00+00:00")
    except ValueError:
        raise InputError(f"{text!r} is not a day or month", hint="write 2026-11-30 or 2026-11") from None
    return round(day.timestamp()) * US_PER_S

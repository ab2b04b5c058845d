"""The verbs of maintenance: book a node for a time, list the bookings, cancel one."""

from pathlib import Path
from typing import Annotated

import typer

from cordee.answers.nodes import MaintenanceView
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.errors import InputError
from cordee.units import US_PER_S, parse_duration_s
from cordee.workload.times import in_utc, parse_time_us


def book(node: str | None, why: str, begin: str | None, lasts: str | None, home: Path | None, as_json: bool) -> None:
    """Book a node for maintenance, and print the booking."""
    if node is None or not why.strip() or begin is None or lasts is None:
        hint = "cordee nodes drain node7 --why 'new firmware' --from +2h --for 4h"
        raise InputError("maintenance needs a node, --why, --from and --for", hint=hint)
    from_us = parse_time_us(terminal.moment(begin))
    until_us = from_us + round(parse_duration_s(lasts) * US_PER_S)
    with terminal.connect(home) as client:
        found = client.book_maintenance(node, from_us=from_us, until_us=until_us, why=why)
    if as_json:
        terminal.print_json(found)
    else:
        print(f"{found.booking}: {found.node} from {in_utc(found.from_us)} to {in_utc(found.until_us)}")


def show(*, home: Home = None, as_json: Json = False) -> None:
    """List maintenance that is booked or under way."""
    with terminal.connect(home) as client:
        found = client.maintenance()
    if as_json:
        terminal.print_json(found)
    elif not found:
        print("no maintenance is booked: cordee nodes drain NODE --why TEXT --from +2h --for 4h")
    else:
        rows = terminal.table("ID", "NODE", "FROM", "UNTIL", "BY", "WHY", folds=("WHY",))
        for each in found:
            rows.add_row(each.booking, each.node, in_utc(each.from_us), in_utc(each.until_us), each.by, _why(each))
        terminal.stdout().print(rows)


def _why(booking: MaintenanceView) -> str:
    return f"{booking.why} (nothing starts there any more)" if booking.began else booking.why


def cancel(
    booking: Annotated[str, typer.Argument(help="Id of the booking.")], *, home: Home = None, as_json: Json = False
) -> None:
    """Cancel maintenance; if it has begun, its node is put back into use."""
    with terminal.connect(home) as client:
        found = client.cancel_maintenance(booking)
    if as_json:
        terminal.print_json(found)
    else:
        print(f"{found.booking} of {found.node} is cancelled")

"""The verb `reserve`: keep nodes for the jobs of a queue or a user for a time; list and cancel reservations."""

from typing import Annotated

import typer

from cordee.answers.nodes import ReservationView
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.errors import InputError
from cordee.units import US_PER_S, parse_duration_s
from cordee.workload.times import in_utc, parse_time_us

reserve = typer.Typer(add_completion=False)

_EXAMPLE = "cordee reserve --nodes n1,n2 --from +2h --for 4h --queue eval"


@reserve.callback(invoke_without_command=True)
def make(
    context: typer.Context,
    nodes: Annotated[str | None, typer.Option(help="The nodes: n1,n2.", show_default=False)] = None,
    gpus: Annotated[
        int, typer.Option(help="Instead of --nodes: whole nodes with this many GPUs, those whose jobs lose least.")
    ] = 0,
    begin: Annotated[
        str | None, typer.Option("--from", help="When it begins: +2h or '2026-11-24 06:00' (UTC, or +01:00).")
    ] = None,
    lasts: Annotated[str | None, typer.Option("--for", help="How long: 4h.", show_default=False)] = None,
    queue: Annotated[str | None, typer.Option(help="For jobs of this queue.", show_default=False)] = None,
    user: Annotated[
        str | None, typer.Option(help="For jobs of this user. Without --queue and --user: for yours.")
    ] = None,
    why: Annotated[str, typer.Option(help="A remark for the log.", show_default=False)] = "",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Reserve nodes for the jobs of a queue or a user; others there save and leave in time."""
    if context.invoked_subcommand is not None:
        return
    if begin is None or lasts is None or bool(nodes) == bool(gpus):
        raise InputError("a reservation needs --from, --for, and either --nodes or --gpus", hint=_EXAMPLE)
    from_us = parse_time_us(terminal.moment(begin))
    names = [name.strip() for name in (nodes or "").split(",") if name.strip()]
    order = {
        "nodes": names, "gpus": gpus, "from_us": from_us,
        "until_us": from_us + round(parse_duration_s(lasts) * US_PER_S), "queue": queue, "user": user, "why": why,
    }  # fmt: skip
    with terminal.connect(home) as client:
        found = client.reserve(**order)
    if as_json:
        terminal.print_json(found)
    else:
        print(
            f"{found.reservation}: {', '.join(found.nodes)} reserved for {_whom(found)} "
            f"from {in_utc(found.from_us)} to {in_utc(found.until_us)}"
        )


@reserve.command("list")
def show(*, home: Home = None, as_json: Json = False) -> None:
    """List current and future reservations."""
    with terminal.connect(home) as client:
        found = client.reservations()
    if as_json:
        terminal.print_json(found)
    elif not found:
        print(f"no node is reserved: {_EXAMPLE}")
    else:
        rows = terminal.table("ID", "NODES", "FOR", "FROM", "UNTIL", "BY", "WHY", folds=("NODES", "WHY"))
        for each in found:
            times = (in_utc(each.from_us), in_utc(each.until_us))
            rows.add_row(each.reservation, ", ".join(each.nodes), _whom(each), *times, each.by, each.why or "–")
        terminal.stdout().print(rows)


@reserve.command()
def cancel(
    reservation: Annotated[str, typer.Argument(help="Id of a reservation.")],
    *,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Cancel a reservation; one that has begun ends."""
    with terminal.connect(home) as client:
        found = client.cancel_reservation(reservation)
    if as_json:
        terminal.print_json(found)
    else:
        print(f"{found.reservation} of {', '.join(found.nodes)} is cancelled")


def _whom(found: ReservationView) -> str:
    return f"user {found.user}" if found.queue is None else f"queue {found.queue}"

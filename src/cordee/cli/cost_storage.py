"""`cordee cost --storage`: storage a month by owner, the egress that caches have saved, and what may be deleted."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cordee.account.storage import (
    MICRO_USD_PER_GB_EGRESS,
    MICRO_USD_PER_GB_MONTH,
    Generations,
    StorageCost,
    storage_cost,
)
from cordee.cli import terminal
from cordee.errors import CordeeError, InputError
from cordee.units import format_bytes, format_micro_usd, parse_micro_usd, plural
from cordee.workload.keep import Keep

_LISTED = 10
_READ_MAX = 200  # jobs whose checkpoints are looked at: each is some requests to its store

Storage = Annotated[
    bool,
    typer.Option("--storage", help="Show the cost of storage a month, the egress saved, and data that may be deleted."),
]
GbMonth = Annotated[
    str | None, typer.Option(metavar="PRICE", help="With --storage: price of a GB and month.", show_default="$0.023")
]
GbEgress = Annotated[
    str | None,
    typer.Option(metavar="PRICE", help="With --storage: price of a GB that leaves the store.", show_default="$0.09"),
]


def show_storage(home: Path | None, gb_month: str | None, gb_egress: str | None, *, alone: bool, as_json: bool) -> None:
    """Print it, at these prices or at list prices; `alone`: with no option for anything else."""
    if not alone:
        hint = "cordee cost --storage [--gb-month $0.02] [--gb-egress $0.05]"
        raise InputError("--storage shows all jobs as they are now, and takes no option but its prices", hint=hint)
    month = MICRO_USD_PER_GB_MONTH if gb_month is None else parse_micro_usd(gb_month)
    egress = MICRO_USD_PER_GB_EGRESS if gb_egress is None else parse_micro_usd(gb_egress)
    with terminal.connect(home) as client:
        events = [event for _, event in client.events()]
    found = storage_cost(
        events,
        _now_us(),
        generations=_generations(),
        micro_usd_per_gb_month=month,
        micro_usd_per_gb_egress=egress,
    )
    if as_json:
        terminal.print_json(found)
    else:
        print_storage(found)


def _now_us() -> int:
    return time.time_ns() // 1000


def _generations() -> Callable[[str], Generations | None]:
    """Return what reads which generations are there, and whether `gc` would retire them."""
    from cordee.storage.destination import open_existing
    from cordee.storage.generations import kept_of
    from cordee.storage.log import live_commits, read_entries

    left = _READ_MAX

    def read(to: str) -> Generations | None:
        nonlocal left
        left -= 1
        if left < 0:
            return None
        try:
            entries = read_entries(open_existing(to))
        except (CordeeError, OSError):  # on a disk of another machine, or without its credentials
            return None
        live = live_commits(entries)
        staying = {entry.index for entry in kept_of(entries, live, Keep())}
        return {entry.index: entry.index not in staying for entry in live}

    return read


def print_storage(found: StorageCost) -> None:
    """Print the tables, and the commands that delete."""
    console = terminal.stdout()
    if not found.rows and not found.cached:
        print("nothing is stored: no checkpoint, no artifact, and no job has named a dataset")
        return
    if found.rows:
        table = _table("OWNER", "CHECKPOINTS", "ARTIFACTS", "A MONTH")
        for row in found.rows:
            checkpoints, artifacts = format_bytes(row.checkpoint_bytes), format_bytes(row.artifact_bytes)
            table.add_row(row.owner, checkpoints, artifacts, format_micro_usd(row.micro_usd_per_month))
        console.print(table)
        print(
            f"at {format_micro_usd(found.micro_usd_per_gb_month)} a GB and month; checkpoints at most, since "
            "generations share chunks"
        )
    if found.cached:
        table = _table("DATASET IN CACHES", "NODES", "HELD", "FOUND", "GIVEN", "FETCHED", "SAVED")
        for each in found.cached:
            sizes = map(format_bytes, (each.held_bytes, each.found_bytes, each.given_bytes, each.fetched_bytes))
            table.add_row(each.url, str(each.nodes), *sizes, format_micro_usd(each.saved_micro_usd))
        console.print(table)
        egress = format_micro_usd(found.micro_usd_per_gb_egress)
        print(f"at {egress} a GB that a prefetch found on its node, or that other nodes gave")
    if found.deletions:
        total = sum(each.micro_usd_per_month for each in found.deletions)
        print(f"may be deleted, unused for 30 days, {format_micro_usd(total)} a month:")
    unread = sum(not each.checked for each in found.deletions)
    for deletion in found.deletions[:_LISTED]:
        size, cost = format_bytes(deletion.size_bytes), format_micro_usd(deletion.micro_usd_per_month)
        print(f"  {deletion.owner}: {deletion.what}, {size}, {cost} a month\n    {deletion.command}")
    if len(found.deletions) > _LISTED:
        print(f"  and {len(found.deletions) - _LISTED} more: --json lists all")
    if unread:
        print(f"{plural(unread, 'folder')} of checkpoints cannot be read from here: some may have gone already")


def _table(first: str, *others: str) -> Table:
    return terminal.table(first, *others, right=others, folds=[first])

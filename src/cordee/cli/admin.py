"""The verbs `cordee admin`: back a server's home up, restore it, and check its log."""

import getpass
import time
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.errors import MissingExtraError
from cordee.units import format_bytes, plural

try:
    from cordee.control.acts import Act, carried_out
    from cordee.control.backup import back_up, check_backup, database_of
    from cordee.control.backup import check as check_database
    from cordee.control.backup import restore as restore_backup
    from cordee.control.notify.channels import deliver
    from cordee.control.notify.destinations import FILE, read_destinations
    from cordee.control.notify.messages import Message
    from cordee.control.store.sessions import SessionRows
    from cordee.control.store.sql import SqlStore
except ImportError as error:
    raise MissingExtraError(
        f"a server needs the library {error.name}, which is not installed", hint="pip install 'cordee[server]'"
    ) from error

admin = typer.Typer(no_args_is_help=True, add_completion=False)

Database = Annotated[str | None, typer.Option(help="URL of the server's PostgreSQL; default: that of the home.")]


@admin.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The file to write, such as cordee.tar.gz.")],
    *,
    home: Home = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Write the log, the tables and the home's files to one file, while the server works. It holds secrets."""
    folder = terminal.folder(home)
    made = back_up(folder, database or database_of(folder), file)
    if as_json:
        terminal.print_json(made)
        return
    size, files = format_bytes(made.size_bytes), plural(made.files, "file")
    terminal.stdout().print(f"{file}: {plural(made.number, 'event')}, {files}, {size}", highlight=False, markup=False)


@admin.command()
def restore(
    file: Annotated[Path, typer.Argument(help="A backup.")], *, home: Home = None, database: Database = None
) -> None:
    """Restore a backup into an empty home; `cordee up` starts it. With --database, into that empty PostgreSQL."""
    folder = terminal.folder(home)
    made = restore_backup(file, folder, database)
    terminal.stdout().print(
        f"{folder}: {plural(made.number, 'event')}, {plural(made.files, 'file')}; start it: cordee up --home {folder}",
        highlight=False,
        markup=False,
    )


@admin.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="A backup; default: the home.")] = None,
    *,
    home: Home = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Check numbers, hashes, the snapshot against a replay, and the tables against the log; exit with 1 on a fault."""
    if file is not None:
        number, faults = check_backup(file)
    else:
        number, faults = check_database(database or database_of(terminal.folder(home)))
    if as_json:
        terminal.print_json({"number": number, "faults": faults})
    else:
        console = terminal.stdout()
        for line in faults or [f"{plural(number, 'event')}: no fault found"]:
            console.print(line, highlight=False, markup=False)
        if faults:
            console.print("hint: restore the newest backup without a fault: cordee admin restore", highlight=False)
    if faults:
        raise typer.Exit(1)


@admin.command()
def notify(
    name: Annotated[str | None, typer.Argument(help="Send it a test message.")] = None,
    *,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List the destinations of notifications in the home's notify.toml, or send one of them a test message."""
    folder, console = terminal.folder(home), terminal.stdout()
    destinations = read_destinations(folder)
    if name is not None:
        destinations.check([name])
        at_us = time.time_ns() // 1000
        text = f"a test message of the server in {folder}"
        deliver(destinations.by_name[name], Message(f"test/{at_us}", "end", at_us, "", "", getpass.getuser(), text))
    rows = {each.name: each.kind for each in destinations.by_name.values()}
    if as_json:
        terminal.print_json({"destinations": rows, "sent": name})
    elif name is not None:
        console.print(f"{name} ({rows[name]}) took a test message", highlight=False, markup=False)
    else:
        for each, kind in rows.items():
            console.print(f"{each}: {kind}", highlight=False, markup=False)
        if not rows:
            console.print(f"no destination: {folder / FILE} has none", highlight=False, markup=False)


@admin.command()
def logout(
    name: Annotated[str, typer.Argument(help="The person.")], *, home: Home = None, database: Database = None
) -> None:
    """End all browser sessions of a person, within two seconds; tokens, and logins at the provider, stay valid."""
    store = SqlStore(database or database_of(terminal.folder(home)))
    act = Act(time.time_ns() // 1000, named="admin logout", who=getpass.getuser(), object=name)
    try:
        with carried_out(act):
            ended = SessionRows(store).end_all(name)
    finally:
        store.close()
    print(f"{plural(ended, 'session')} of {name} ended")

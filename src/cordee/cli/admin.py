"""The verbs `cordee admin`: back a server's home up, restore it, and check its log."""

from pathlib import Path
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.errors import MissingExtraError
from cordee.units import format_bytes, plural

try:
    from cordee.control.backup import back_up, check_backup, database_of
    from cordee.control.backup import check as check_database
    from cordee.control.backup import restore as restore_backup
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
    """Check numbers, hashes, the snapshot against a replay, and the tables against the log; 1 if there is a fault."""
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

"""The verbs `cordee audit`: list the records of the audit log, check its chain of hashes, and copy it to a file."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cordee.answers.audit import AuditView
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.errors import ForbiddenError, InputError, MissingExtraError
from cordee.units import US_PER_S, parse_duration_s, plural
from cordee.workload.times import parse_time_us

try:
    from cordee.control.backup import database_of
    from cordee.control.store.audit import PAGE, AuditFilter, AuditHead, AuditRecord, fault, record_of
    from cordee.control.store.sql import SqlStore
except ImportError as error:
    raise MissingExtraError(
        f"the audit log needs the library {error.name}, which is not installed", hint="pip install 'cordee[server]'"
    ) from error

audit = typer.Typer(no_args_is_help=True, add_completion=False)

Offline = Annotated[bool, typer.Option("--offline", help="Read the home's database; the server need not run.")]
Database = Annotated[str | None, typer.Option(help="With --offline: URL of the server's PostgreSQL.")]
_HEAD_EXAMPLE = "cordee audit verify --head 1204:9f86d081..."


@audit.command("ls", epilog="Example: cordee audit ls --queue research --since 7d")
def list_records(
    *,
    user: Annotated[str | None, typer.Option(help="Only requests of this user.")] = None,
    queue: Annotated[str | None, typer.Option(help="Only in this queue.")] = None,
    about: Annotated[str | None, typer.Option(help="Only about this job, node or other object.")] = None,
    since: Annotated[str | None, typer.Option(help="From this time on: 7d, 2h, or '2026-11-24 06:00'.")] = None,
    until: Annotated[str | None, typer.Option(help="Before this time.")] = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, max=PAGE, help="The number of records.")] = 40,
    home: Home = None,
    offline: Offline = False,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """List the newest records: user, request and outcome; only your own, unless you administer queues."""
    from_us, until_us = _moment(since) or 0, _moment(until)
    wanted = AuditFilter(who=user, object=about, queue=queue, from_us=from_us, until_us=until_us)
    with _log(home, offline, database) as log:
        found = log.newest(wanted, last)
    if as_json:
        terminal.print_json([asdict(each) for each in found])
        return
    heads = ("RECORD", "AT (UTC)", "USER", "FROM", "OPERATION", "ABOUT", "OUTCOME")
    table = terminal.table(*heads, right=("RECORD",), folds=("USER", "OPERATION", "ABOUT"))
    for each in found:
        times = f" × {each.count:,}" if each.count > 1 else ""
        at = datetime.fromtimestamp(each.at_us / US_PER_S, UTC)
        about = each.object + (f" ({each.detail})" if each.detail else "")
        table.add_row(
            f"{each.number}",
            f"{at:%Y-%m-%d %H:%M:%S}",
            each.who or "–",
            each.address or "–",
            each.operation + times,
            about or "–",
            each.outcome,
        )
    terminal.stdout().print(table)


@audit.command("verify", epilog="Example: cordee audit verify --head 1204:9f86d081884c7d65")
def verify(
    file: Annotated[Path | None, typer.Argument(help="An export; default: the server's log.")] = None,
    *,
    head: Annotated[
        list[str] | None, typer.Option(help="NUMBER:HASH of a record, kept elsewhere, that must be there.")
    ] = None,
    copy: Annotated[Path | None, typer.Option(help="An earlier export, whose last record must be there.")] = None,
    home: Home = None,
    offline: Offline = False,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Check that no record was changed, removed, added or moved; if one was, name the first and exit with 1."""
    known = [_head(text) for text in head or []]
    if copy is not None:
        *_, last = _read(copy)
        known.append(AuditHead(last.number, last.hash))
    if file is not None:
        found = list(_read(file))
        wrong = fault(found, known)
    else:
        with _log(home, offline, database) as log:
            before = log.head()
            found = list(log.records())
            wrong = fault(found, [before, *known], log.head)
    newest = AuditHead(found[-1].number, found[-1].hash) if found else AuditHead()
    if as_json:
        terminal.print_json({"records": len(found), "head": str(newest), "fault": wrong})
    elif wrong is None:
        print(f"{plural(len(found), 'record')}: no fault found")
        print(f"keep this elsewhere, to prove later that the log was not written anew: {newest}")
    else:
        print(wrong)
    if wrong is not None:
        raise typer.Exit(1)


@audit.command("export", epilog="Example: cordee audit export audit-2026-11.jsonl")
def export(
    file: Annotated[Path, typer.Argument(help="The file to write: a record a line, as JSON.")],
    *,
    home: Home = None,
    offline: Offline = False,
    database: Database = None,
) -> None:
    """Copy all records to a new file; `verify --copy FILE` later proves that the server's log still has them."""
    if file.exists():
        raise InputError(f"{file} exists already", hint="name a new file")
    with _log(home, offline, database) as log:
        log.head()  # raises an error unless all records may be seen
        records = list(log.records())
    file.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in records))
    print(f"{file}: {plural(len(records), 'record')}")


class _Remote:
    """The audit log, read from the server."""

    def __init__(self, home: Path | None) -> None:
        self._client = terminal.connect(home)

    def close(self) -> None:
        self._client.close()

    def head(self) -> AuditHead:
        found = self._ask(limit=1)
        if not found.whole:
            raise ForbiddenError(
                "only an administrator of the whole cluster sees all records",
                hint="on the server's machine: cordee audit verify --offline",
            )
        return _head(found.head)

    def newest(self, wanted: AuditFilter, limit: int) -> list[AuditRecord]:
        given = {"user": wanted.who, "about": wanted.object, "queue": wanted.queue, "until_us": wanted.until_us}
        found = self._ask(newest=True, limit=limit, from_us=wanted.from_us, **given)
        return [record_of(each.model_dump()) for each in reversed(found.records)]

    def records(self) -> Iterator[AuditRecord]:
        after = 0
        while found := self._ask(after=after).records:
            yield from (record_of(each.model_dump()) for each in found)
            after = found[-1].number

    def _ask(self, **params: object) -> AuditView:
        given = {name: each for name, each in params.items() if each is not None}
        return self._client.ask(AuditView, "GET", "/v1/audit", params=given)


class _Offline:
    """The audit log, read from the database."""

    def __init__(self, url: str) -> None:
        self._store = SqlStore(url)

    def close(self) -> None:
        self._store.close()

    def head(self) -> AuditHead:
        return self._store.audit.head()

    def newest(self, wanted: AuditFilter, limit: int) -> list[AuditRecord]:
        return self._store.audit.newest(wanted, limit)

    def records(self) -> Iterator[AuditRecord]:
        return self._store.audit.records()


@contextmanager
def _log(home: Path | None, offline: bool, database: str | None) -> Iterator["_Remote | _Offline"]:
    if database is not None and not offline:
        raise InputError("--database is read without the server", hint="add --offline")
    log = _Offline(database or database_of(terminal.folder(home))) if offline else _Remote(home)
    try:
        yield log
    finally:
        log.close()


def _read(file: Path) -> Iterator[AuditRecord]:
    """Yield the records of an export.

    Raises:
        InputError: it is none.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}", hint="cordee audit export writes one") from error
    if not lines:
        raise InputError(f"{file} has no record", hint="cordee audit export writes one")
    for at, line in enumerate(lines, start=1):
        try:
            yield record_of(json.loads(line))
        except (ValueError, TypeError):
            raise InputError(f"{file}, line {at}: not a record", hint="cordee audit export writes one") from None


def _head(text: str) -> AuditHead:
    number, colon, digest = text.partition(":")
    if not colon or not number.isdecimal():
        raise InputError(f"{text!r} is not NUMBER:HASH", hint=_HEAD_EXAMPLE)
    return AuditHead(int(number), digest)


def _moment(text: str | None) -> int | None:
    if text is None:
        return None
    if text[:1].isdigit() and text[-1:].isalpha():
        return time.time_ns() // 1000 - round(parse_duration_s(text) * US_PER_S)
    return parse_time_us(text)

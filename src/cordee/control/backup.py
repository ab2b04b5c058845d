"""Backups of a server's home: a consistent copy of its database and its other files in one archive, and its check.

    backup.tar.gz    manifest.json    the release, the log's last number, and the hash of each other file
                     cordee.db        all tables, in SQLite, whatever database the server has
                     home/...         tokens, certificate, settings, secrets and files of jobs

A backup is made while the server works. Output of jobs and the folders of agents are left out.
"""

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

import cordee
from cordee.control.fold import Fold
from cordee.control.home import SQLITE, Home
from cordee.control.snapshot import Snapshot, SnapshotError, decoded_jobs, loaded, taken, version
from cordee.control.store import tables
from cordee.control.store.credential_tables import metadata
from cordee.control.store.sql import SqlStore
from cordee.errors import HomeUnsuitableError, InputError, StoreError, first_line
from cordee.events import Event
from cordee.schedule.policy import Policy
from cordee.units import plural

DATABASE = "cordee.db"
_ROWS = 1_000  # copied at once
_LEFT_OUT = {
    "attempts",
    "nodes",
    "server.json",
    "server.lock",
    "server.log",
    DATABASE,
    f"{DATABASE}-wal",
    f"{DATABASE}-shm",
}
_OF_SERVERS = {"leader", "servers"}  # tables of the processes that run now


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A backup: its log's last number, its files besides the database, and its bytes."""

    number: int
    files: int
    size_bytes: int


def database_of(home: Path) -> str:
    """Return the URL of the home's database: the PostgreSQL of its last `up`, else its own file.

    Raises:
        InputError: there is none.
    """
    if (home / "settings.json").is_file() and (url := Home(home).settings().get("database", SQLITE)) != SQLITE:
        return url
    if not (home / DATABASE).is_file():
        raise InputError(f"{home} holds no database {DATABASE}", hint="name the folder of a server with --home")
    return f"sqlite:///{home / DATABASE}"


def back_up(home: Path, database: str, target: Path) -> Backup:
    """Write a backup of a home, and of its database, to a new file.

    Raises:
        InputError: the file exists already.
        StoreError: the database cannot be read.
    """
    if target.exists():
        raise InputError(f"{target} exists already", hint="name a new file")
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".backup-") as folder:
        copied = Path(folder) / DATABASE
        number = copy_database(database, f"sqlite:///{copied}")
        files = {f"home/{path.relative_to(home)}": path for path in sorted(home.rglob("*")) if _is_kept(path, home)}
        hashes = {DATABASE: _hash(copied)} | {name: _hash(path) for name, path in files.items()}
        manifest = {"cordee": cordee.__version__, "number": number, "hashes": hashes}
        (Path(folder) / "manifest.json").write_text(json.dumps(manifest, indent=1))
        packed = Path(folder) / "packed"
        packed.touch(mode=0o600)
        with tarfile.open(packed, "w:gz", compresslevel=4) as archive:
            for name in ("manifest.json", DATABASE):
                archive.add(Path(folder) / name, name)
            for name, path in files.items():
                archive.add(path, name)
        packed.rename(target)
    return Backup(number=number, files=len(files), size_bytes=target.stat().st_size)


def restore(source: Path, home: Path, database: str | None = None) -> Backup:
    """Restore a backup into an empty home, or its database into another, empty one.

    Raises:
        HomeInUseError: a server runs on the home.
        HomeUnsuitableError: the home is not empty.
        StoreError: the database is not empty.
        InputError: the file is no backup, or is damaged.
    """
    held = Home(home)
    held.lock()
    try:
        made = _restored(source, home, database)
        # The settings are those of the home that was backed up, whose database must stay untouched.
        if database is not None or "database" in held.settings():
            held.keep_settings({"database": database or SQLITE})
        return made
    finally:
        held.unlock()


def _restored(source: Path, home: Path, database: str | None) -> Backup:
    found = sorted(path.name for path in home.iterdir() if path.name != "server.lock")
    if found:
        raise HomeUnsuitableError(
            f"{home} is not empty: it holds {plural(len(found), 'file')}, such as {found[0]}",
            hint="restore into a new folder with --home, then start it with cordee up --home",
        )
    with tempfile.TemporaryDirectory(dir=home, prefix=".restore-") as folder:
        number = _unpack(source, Path(folder))
        if database is not None:
            copy_database(f"sqlite:///{Path(folder) / DATABASE}", database)
        else:
            (Path(folder) / DATABASE).rename(home / DATABASE)
        kept = Path(folder) / "home"
        files = [path for path in sorted(kept.rglob("*")) if path.is_file()]
        for path in files:
            place = home / path.relative_to(kept)
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.rename(place)
    return Backup(number=number, files=len(files), size_bytes=source.stat().st_size)


def check_backup(source: Path) -> tuple[int, list[str]]:
    """Return the last number of a backup's log, and a sentence for each fault that was found in it."""
    with tempfile.TemporaryDirectory() as folder:
        _unpack(source, Path(folder))
        return check(f"sqlite:///{Path(folder) / DATABASE}")


def check(database: str) -> tuple[int, list[str]]:
    """Check a copy of a database: numbers, hashes, the snapshot against a replay, the tables against the log.

    Returns:
        The log's last number, and a sentence for each fault that was found.
    """
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / DATABASE}"
        copy_database(database, url)
        copied, again = SqlStore(url), SqlStore(f"sqlite:///{Path(folder) / 'again.db'}")
        try:
            return _checked(copied, again)
        finally:
            copied.close()
            again.close()


def _checked(store: SqlStore, again: SqlStore) -> tuple[int, list[str]]:
    faults: list[str] = []
    fold, whole = Fold(Policy()), store.archive.log_number()
    snapshot = store.archive.snapshot()
    if snapshot is not None and snapshot.version != version(Policy()):
        snapshot = None  # of an earlier version's code: no server of this one uses it, and the next one replaces it
    try:
        for page in _pages(store.events()):
            if page[0][0] != fold.number + 1:
                break
            again.commit([event for _, event in page])
            part = 0
            if snapshot is not None and fold.number < snapshot.number <= page[-1][0]:
                part = snapshot.number - fold.number
                fold.apply(page[:part])
                faults += _snapshot_faults(store, snapshot, fold)
            fold.apply(page[part:])
    except (StoreError, ValueError) as error:
        faults.append(f"after event {fold.number}: {first_line(error)}")
    if fold.number != whole:
        return whole, [*faults, f"the log's last number is {whole}, and it can be read up to {fold.number}"]
    for table in (tables.jobs, tables.attempts):
        faults += _differences(store, again, table)
    return whole, faults


def _pages(numbered: Iterator[tuple[int, Event]]) -> Iterator[list[tuple[int, Event]]]:
    """Yield pages of events with numbers that follow each other; before an error, the events before it."""
    page: list[tuple[int, Event]] = []
    try:
        for number, event in numbered:
            if page and (len(page) == _ROWS or number != page[-1][0] + 1):
                yield page
                page = []
            page.append((number, event))
    except (StoreError, ValueError):
        if page:
            yield page
        raise
    if page:
        yield page


def _snapshot_faults(store: SqlStore, snapshot: Snapshot, fold: Fold) -> list[str]:
    """Compare the snapshot with a fold of the log up to its number, in which the same jobs are retired."""
    replayed = loaded(taken(fold), Policy(), fold.number)
    jobs = {job.record.job.job_id: job for job in decoded_jobs(store.archive.retired().values())}
    try:
        kept = loaded(snapshot, Policy(), fold.number)
    except SnapshotError as error:
        return [f"the snapshot of event {snapshot.number} is not used: {error}"]
    gone = replayed.retire(job_id for job_id in list(replayed.state.jobs) if job_id not in kept.state.jobs)
    faults = [f"{job_id} is in neither the snapshot nor the table `retired`" for job_id in gone if job_id not in jobs]
    if taken(replayed).body != taken(kept).body:
        faults.append(f"the snapshot of event {snapshot.number} differs from a replay of the log up to it")
    return faults


def _differences(store: SqlStore, again: SqlStore, table: sa.Table) -> list[str]:
    keys = [column.name for column in table.primary_key]
    found = {tuple(row[key] for key in keys): row for row in store.read(sa.select(table))}
    derived = {tuple(row[key] for key in keys): row for row in again.read(sa.select(table))}
    wrong = sorted(key for key in found.keys() | derived.keys() if found.get(key) != derived.get(key))
    if not wrong:
        return []
    example = " ".join(map(str, wrong[0]))
    return [f"{plural(len(wrong), 'row')} of the table `{table.name}` differ from the log, such as {example}"]


def copy_database(source: str, target: str) -> int:
    """Copy all tables in one consistent read into an empty database; return the log's last number.

    Raises:
        StoreError: a database cannot be used, or the target is not empty.
    """
    old, new = SqlStore(source), SqlStore(target)
    try:
        if new.archive.log_number():
            raise StoreError(
                f"the database is not empty: its log ends at number {new.archive.log_number()}",
                hint="restore into a new one",
            )
        with old.reading() as reader, new.writing() as writer:
            for table in metadata.sorted_tables:
                if table.name not in _OF_SERVERS:
                    writer.execute(table.delete())  # the schema's steps leave a row
                    rows = reader.execution_options(stream_results=True).execute(sa.select(table)).mappings()
                    for part in rows.partitions(_ROWS):
                        writer.execute(table.insert(), [dict(row) for row in part])
        return new.archive.log_number()
    finally:
        old.close()
        new.close()


def _unpack(source: Path, folder: Path) -> int:
    """Unpack a backup and verify its hashes; return its log's last number."""
    try:
        with tarfile.open(source, "r:gz") as archive:
            archive.extractall(folder, filter="data")
        manifest = json.loads((folder / "manifest.json").read_text())
        hashes, number = dict(manifest["hashes"]), int(manifest["number"])
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{source} is no backup: {error}", hint="cordee admin backup writes one") from error
    for name, expected in hashes.items():
        if not (folder / name).is_file() or _hash(folder / name) != expected:
            raise InputError(f"{source} is damaged: its file {name} does not have its hash", hint="use another backup")
    return number


def _is_kept(path: Path, home: Path) -> bool:
    first = path.relative_to(home).parts[0]
    return path.is_file() and not path.is_symlink() and first not in _LEFT_OUT and not first.startswith(".")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()

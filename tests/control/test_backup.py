"""Backups: made of a server that works, restored into an empty home only, and checked."""

import json
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from stage import GPT, JOB, URGENT, Scene

from cordee.control.backup import DATABASE, back_up, check, check_backup, database_of, restore
from cordee.control.home import Home
from cordee.control.snapshots import make
from cordee.control.store.sql import SqlStore
from cordee.errors import HomeInUseError, HomeUnsuitableError, InputError, StoreError
from cordee.events import Outcome
from postgres import Postgres


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose jobs have ended, run and wait, with a snapshot, a retired job, segments and some files."""
    home = tmp_path / "home"
    home.mkdir()
    scene = Scene(home)
    scene.control.submit(JOB, '{"name": "gpt"}')
    scene.control.tick()
    scene.ended(GPT, 1, Outcome.FINISHED)
    scene.control.tick()
    make(scene.url, scene.control.number, scene.control.fold.ended_jobs())
    scene.control.submit(URGENT, "{}")
    scene.control.tick()
    scene.store.archive.move(4, segment=2)
    scene.store.close()
    for name in ("token", "secrets/KEY", "attempts/gpt/1/out.log", "server.json", ".part"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    return home


def damaged(home: Path, statement: str) -> list[str]:
    connection = sqlite3.connect(home / DATABASE)
    connection.execute(statement)
    connection.commit()
    connection.close()
    return check(database_of(home))[1]


def test_a_backup_is_restored_with_log_tables_and_files(home: Path, tmp_path: Path) -> None:
    made = back_up(home, database_of(home), tmp_path / "a.tar.gz")
    assert (tmp_path / "a.tar.gz").stat().st_mode & 0o077 == 0, "it holds secrets"
    new = tmp_path / "new"
    assert restore(tmp_path / "a.tar.gz", new) == made
    assert made.files == 2
    assert sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()) == [
        "cordee.db",
        "secrets/KEY",
        "server.lock",
        "token",
    ]
    old, again = SqlStore(database_of(home)), SqlStore(database_of(new))
    assert list(old.events()) == list(again.events())
    assert (old.jobs(), old.pending(), old.archive.retired()) == (
        again.jobs(),
        again.pending(),
        again.archive.retired(),
    )
    old.close()
    again.close()
    assert check(database_of(new)) == check_backup(tmp_path / "a.tar.gz") == (made.number, [])


def test_a_backup_moves_a_log_between_databases(home: Path, tmp_path: Path, postgres: Postgres) -> None:
    there, back = postgres.database(), tmp_path / "back.tar.gz"
    made = back_up(home, database_of(home), tmp_path / "a.tar.gz")
    restore(tmp_path / "a.tar.gz", tmp_path / "new", there)
    assert not (tmp_path / "new" / DATABASE).exists()
    assert check(there) == (made.number, [])
    assert back_up(tmp_path / "new", there, back).number == made.number
    assert check_backup(back) == (made.number, [])


def test_a_restored_home_has_its_own_database(home: Path, tmp_path: Path, postgres: Postgres) -> None:
    there, new, again = postgres.database(), tmp_path / "new", tmp_path / "again"
    back_up(home, database_of(home), tmp_path / "a.tar.gz")
    restore(tmp_path / "a.tar.gz", new, there)
    assert database_of(new) == there  # so that the next `cordee up` and `cordee admin backup` find it
    back_up(new, database_of(new), tmp_path / "b.tar.gz")
    restore(tmp_path / "b.tar.gz", again)
    assert database_of(again) == f"sqlite:///{again / DATABASE}"


def test_a_home_with_jobs_keeps_its_database(home: Path) -> None:
    argv = [sys.executable, "-m", "cordee.control", "--home", str(home), "--database", "postgresql://nowhere/x"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == HomeUnsuitableError.exit_code
    assert "cordee.db has the log of 2 jobs, which another database would hide" in done.stdout
    assert database_of(home) == f"sqlite:///{home / DATABASE}"


def test_a_backup_is_made_while_the_log_grows(home: Path, tmp_path: Path) -> None:
    store = SqlStore(database_of(home))
    number = store.archive.log_number()
    with store.reading():
        made = back_up(home, database_of(home), tmp_path / "a.tar.gz")
    store.commit([event for _, event in store.events()][:1])
    assert made.number == number == store.archive.log_number() - 1
    store.close()


def test_a_home_that_is_in_use_or_not_empty_is_left_alone(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.tar.gz"
    back_up(home, database_of(home), file)
    with pytest.raises(InputError, match="exists already"):
        back_up(home, database_of(home), file)
    with pytest.raises(HomeUnsuitableError, match=r"is not empty: it holds \d+ files, such as .*\nhint: restore into"):
        restore(file, home)
    used = Home(tmp_path / "used")
    used.lock()
    with pytest.raises(HomeInUseError, match="a server already runs"):
        restore(file, tmp_path / "used")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["server.lock"]
    with pytest.raises(StoreError, match=r"the database is not empty: its log ends at number \d+"):
        restore(file, tmp_path / "third", database_of(home))


def test_a_backup_that_is_damaged_is_refused(home: Path, tmp_path: Path) -> None:
    file, broken = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    back_up(home, database_of(home), file)
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    (tmp_path / "out" / "home" / "token").write_text("another")
    with tarfile.open(broken, "w:gz") as archive:
        archive.add(tmp_path / "out", ".")
    with pytest.raises(InputError, match=r"is damaged: its file home/token does not have its hash"):
        restore(broken, tmp_path / "new")
    broken.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(InputError, match=r"is no backup.*\nhint: cordee admin backup writes one"):
        check_backup(broken)
    with pytest.raises(InputError, match="holds no database"):
        database_of(tmp_path)


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        (
            "update log set body = '{}' where number = 7",
            "event 7 of the log is damaged: unknown kind of event",
        ),
        ("delete from log where number = 7", "the log's last number is 9, and it can be read up to 6"),
        ("update segments set body = x'00' where first = 3", "the segment of events 3 to 4 is damaged"),
        ("update jobs set state = 'failed'", "2 rows of the table `jobs` differ from the log, such as gpt-abcdef"),
        ("delete from attempts", "2 rows of the table `attempts` differ from the log, such as gpt-abcdef 1"),
        ("delete from retired", "gpt-abcdef is in neither the snapshot nor the table `retired`"),
        ("update snapshots set hash = ''", "the snapshot of event 7 is not used: its "),
    ],
)
def test_each_fault_is_named(home: Path, statement: str, fault: str) -> None:
    found = damaged(home, statement)
    assert any(fault in line for line in found), found


def test_a_snapshot_that_differs_from_the_log_is_found(home: Path) -> None:
    connection = sqlite3.connect(home / DATABASE)
    [(body,)] = connection.execute("select body from log where number = 6").fetchall()
    event = json.loads(body)
    connection.execute("update log set body = ? where number = 6", [json.dumps(event | {"at_us": event["at_us"] + 5})])
    connection.commit()
    connection.close()
    assert any("differs from a replay" in line for line in check(database_of(home))[1])

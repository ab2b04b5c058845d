"""A database that fills its disk or is restarted: what was refused has not happened, and nothing is lost."""

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from stage import JOB, NODE, Scene

from cordee.control.tick import Control
from cordee.errors import StoreError
from cordee.events import Event, JobSubmitted, NodeUp
from cordee.ids import JobId
from postgres import Postgres


@contextmanager
def _disk(folder: Path, mib: int) -> Iterator[None]:
    """Mount a small disk."""
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0777", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(argv, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk can only be mounted by root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(folder: Path) -> Path:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65_536)
        except OSError:
            return filler


def _submit(scene: Scene, number: int) -> None:
    name = f"job{number}"
    job = replace(JOB, job_id=JobId(f"{name}-abcdef"), name=name)
    scene.control.submit(job, f'{{"run": "{"x" * 100_000}"}}')  # each soon needs a page of its own


def _check(scene: Scene) -> None:
    """The log has no gap, and the state is what a replay of it gives."""
    numbers = [number for number, _ in scene.store.events()]
    assert numbers == list(range(1, len(numbers) + 1))
    replayed = Control(clock=scene.time, store=scene.store, executor=scene.agents)
    assert replayed.number == scene.control.number == len(numbers)
    assert replayed.state.jobs.keys() == scene.control.state.jobs.keys()
    assert replayed.ledger.totals(scene.time.us) == scene.control.ledger.totals(scene.time.us)


def _play_full_disk(scene: Scene, disk: Path) -> None:
    _submit(scene, 0)
    filler = _fill(disk)
    submitted = 1
    with pytest.raises(StoreError, match=r"(disk is full|No space left on device)"):
        while submitted < 500:
            _submit(scene, submitted)
            submitted += 1
    scene.agents.report(NodeUp(at_us=scene.time.us, node=replace(NODE, name="other")), source="node/other/1")
    before = scene.control.number
    filler.unlink()
    scene.control.tick()
    assert scene.control.number > before and "other" in scene.control.state.nodes.records
    _submit(scene, submitted)
    assert len(scene.of(JobSubmitted)) == submitted + 1
    _check(scene)
    scene.store.close()


def test_sqlite_on_a_full_disk(tmp_path: Path) -> None:
    with _disk(tmp_path / "disk", 4):
        _play_full_disk(Scene(tmp_path / "disk"), tmp_path / "disk")


def test_postgresql_on_a_full_disk(tmp_path: Path, postgres: Postgres) -> None:
    disk = postgres.folder / "disk"
    with _disk(disk, 4):
        (space := disk / "space").mkdir(mode=0o700)
        if postgres.user is not None:
            os.chown(space, *postgres.user)
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute(f"create tablespace small location '{space}'")  # type: ignore[call-overload]
        scene = Scene(tmp_path, postgres.database() + "%20-cdefault_tablespace%3Dsmall")
        _play_full_disk(scene, disk)
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute(f"drop schema {scene.url.split('search_path%3D')[1].split('%20')[0]} cascade")  # type: ignore[call-overload]
            connection.execute("drop tablespace small")


def test_postgresql_is_restarted_under_load(tmp_path: Path, postgres: Postgres) -> None:
    """A restart cuts commits at any point, some after PostgreSQL made them and before it said so."""
    scene = Scene(tmp_path, postgres.database())
    count, refused, some = 60, 0, threading.Event()

    def submit() -> None:
        nonlocal refused
        for number in range(count):
            job = replace(JOB, job_id=JobId(f"job{number}-abcdef"), name=f"job{number}")
            while job.job_id not in scene.control.state.jobs:  # as the server does when a client asks again
                try:
                    scene.control.submit(job, "{}")
                except StoreError:
                    refused += 1
                    some.wait(0.05)
            if number % 20 == 10:
                some.set()

    load = threading.Thread(target=submit)
    load.start()
    for mode in ("immediate", "fast"):
        assert some.wait(30)
        postgres.stop(mode)
        some.clear()
        postgres.start()
    load.join()
    assert refused
    scene.control.tick()
    events: list[Event] = scene.of(JobSubmitted)
    assert Counter(event.job.job_id for event in events if isinstance(event, JobSubmitted)).most_common(1)[0][1] == 1
    assert len(events) == count
    _check(scene)
    scene.store.close()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda log: log[:100] + b"\xa5" * (len(log) - 100), "(malformed|not a database)"),
        (lambda log: b"\xa5" * len(log), "not a database"),
        (lambda log: log.replace(b'"JobSubmitted"', b'"JobSubmittef"'), "event 3 of the log is damaged"),
        (lambda log: log.replace(b'"JobSubmitted"', b"'JobSubmitted'"), "event 3 of the log is damaged"),
    ],
    ids=["pages", "file", "word", "json"],
)
def test_sqlite_that_is_damaged_is_named_and_left_as_it_is(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    scene = Scene(tmp_path)
    scene.control.submit(JOB, "{}")
    scene.store.close()
    path = tmp_path / "cordee.db"
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match=says):
        scene.restart()
    scene.store.close()
    assert path.read_bytes() == damaged

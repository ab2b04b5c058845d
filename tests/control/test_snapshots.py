"""Snapshots and segments in a database: a start from them equals a full replay, and one that is unfit is not used."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from api_scene import Api
from stage import GPT, JOB, PROD, URGENT, Scene
from structlog.testing import capture_logs

from cordee.account.chargeback import IDLE, ChargeLine
from cordee.answers.submissions import Submission
from cordee.control import snapshots
from cordee.control.fold import Fold
from cordee.control.months import Books
from cordee.control.snapshot import taken
from cordee.control.snapshots import Snapshots, make, newest_fold
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.errors import InputError, StoreError
from cordee.events import AttemptPlaced, Event, Outcome, RanksStarted, ServerUp
from cordee.schedule import Policy
from world import World, job, node


@pytest.fixture(scope="module")
def events() -> list[Event]:
    """A log in which jobs have run, run and wait."""
    world = World(node("n1"), node("n2"), *(job(f"j{number}", 2 + number % 7) for number in range(24)))
    log = world.play(until_s=450).log
    assert len(log) > 80 and world.state.attempts and len(world.state.waiting)
    return log


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'cordee.db'}"
    database: str = request.getfixturevalue("postgres").database()
    return database


@pytest.fixture
def store(url: str, events: list[Event]) -> Iterator[SqlStore]:
    store = SqlStore(url)
    store.commit(events)
    yield store
    store.close()


def write(store: SqlStore, statement: str) -> None:
    with store.writing() as connection:
        connection.execute(sa.text(statement))


def replayed(events: list[Event]) -> Fold:
    fold = Fold(Policy())
    fold.apply(enumerate(events, start=1))
    return fold


def test_a_start_from_a_snapshot_equals_a_full_replay(url: str, store: SqlStore, events: list[Event]) -> None:
    through = len(events) - 20
    ended = replayed(events[:through]).ended_jobs()
    counts = make(url, through, ended)
    assert (counts["number"], counts["events"], counts["retired"]) == (through, through, len(ended))
    assert ended, "some jobs had ended"
    fold = newest_fold(store, Policy())
    assert fold.number == through
    fold.apply(store.events(fold.number))
    whole = replayed(events)
    whole.retire(ended)
    assert taken(fold).body == taken(whole).body
    assert store.archive.retired().keys() == set(ended)


def test_a_snapshot_keeps_the_patience_of_the_server(url: str, store: SqlStore) -> None:
    store.commit([ServerUp(at_us=10**15, patience=2.0)])
    number = store.archive.log_number()
    make(url, number, [])
    fold = newest_fold(store, Policy())
    assert fold.number == number and fold.state.policy == replace(Policy(), patience=2.0)
    fold.apply([(number + 1, ServerUp(at_us=10**15))])
    assert fold.state.policy == Policy()


def test_the_next_snapshot_starts_from_the_newest(url: str, store: SqlStore, events: list[Event]) -> None:
    make(url, 30, [])
    assert make(url, 50, [])["events"] == 20
    assert taken(newest_fold(store, Policy())).body == taken(replayed(events[:50])).body
    make(url, 40, [])  # of a server that was replaced meanwhile
    assert newest_fold(store, Policy()).number == 50


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("update snapshots set hash = '0'", "do not have its hash"),
        ("update snapshots set version = '0.0.1-abc'", "it is of version 0.0.1-abc, and this is "),
        ("update snapshots set number = 100000", r"it is of number 100000, and the log ends at \d+"),
        ("update snapshots set number = number - 1", r"it holds number 50, and says 49"),
    ],
)
def test_a_snapshot_that_is_unfit_is_not_used_and_replaced(
    url: str, store: SqlStore, events: list[Event], damage: str, why: str
) -> None:
    make(url, 50, [])
    write(store, damage)
    with capture_logs() as lines:
        assert newest_fold(store, Policy()).number == 0
    assert [line["event"] for line in lines] == ["the snapshot is not used, and the whole log is replayed"]
    assert re.search(why, lines[0]["why"])
    make(url, 50, [])
    assert newest_fold(store, Policy()).number == 50


def test_events_are_read_from_segments_and_from_the_log(url: str, store: SqlStore, events: list[Event]) -> None:
    assert store.archive.move(len(events) - 15, segment=10) == (len(events) - 15) // 10
    assert list(store.events()) == list(enumerate(events, start=1))
    for after in (0, 1, 9, 10, 11, len(events) - 16, len(events) - 1, len(events), len(events) + 5):
        assert list(store.events(after)) == list(enumerate(events, start=1))[after:]
    store.commit([ServerUp(at_us=10**12)])
    assert list(store.events(len(events))) == [(len(events) + 1, ServerUp(at_us=10**12))]


def test_events_that_move_into_a_segment_while_they_are_read(store: SqlStore, events: list[Event], monkeypatch) -> None:
    monkeypatch.setattr("cordee.control.store.sql._PAGE", 7)
    found = []
    for number, event in store.events():
        found.append((number, event))
        store.archive.move(min(number + 9, len(events) - 5), segment=4)
    assert found == list(enumerate(events, start=1))


def test_a_damaged_segment_is_named(store: SqlStore) -> None:
    store.archive.move(30, segment=10)
    write(store, "update segments set hash = '0' where first = 11")
    with pytest.raises(StoreError, match=r"the segment of events 11 to 20 is damaged.*\nhint: restore the newest"):
        list(store.events())


def test_a_command_that_waits_keeps_its_event_in_the_log(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.agents.answers = False
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    [placed] = [number for number, event in scene.store.events() if isinstance(event, AttemptPlaced)]
    scene.store.commit([ServerUp(at_us=scene.time.us)] * 10)
    scene.store.archive.move(placed + 8, segment=1)
    assert [pending.number for pending in scene.store.pending()] == [placed]
    scene.store.close()


def test_a_server_makes_snapshots_in_a_process_beside_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY", 1)
    scene = Scene(tmp_path)
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    scene.ended(GPT, 1, Outcome.FINISHED)
    scene.control.submit(URGENT, "{}")
    scene.control.tick()
    keeper = Snapshots(scene.store, scene.url, Fold(Policy()))
    assert GPT in scene.control.state.jobs
    before = scene.control.number
    deadline = time.monotonic() + 60
    with capture_logs() as lines:
        while GPT in scene.control.state.jobs:
            keeper.step(scene.control)
            assert time.monotonic() < deadline, lines
            time.sleep(0.01)
    assert [(line["event"], line["number"], line["retired"]) for line in lines] == [("snapshot", before, 1)]
    assert PROD in scene.control.state.jobs
    again = Control(clock=scene.time, store=scene.store, executor=scene.agents, fold=newest_fold(scene.store, Policy()))
    assert taken(again.fold).body == taken(scene.control.fold).body
    scene.store.close()


def test_a_job_that_a_snapshot_retires_is_not_requeued_meanwhile(api: Api, monkeypatch) -> None:
    scene, client = api.scene, api.client
    monkeypatch.setattr(snapshots, "EVERY", 1)
    scene.control.submit(JOB, '{"name": "gpt", "run": "true", "gpus": 2}')
    scene.control.tick()
    scene.ended(GPT, 1, Outcome.FINISHED)
    scene.control.tick()
    keeper = Snapshots(scene.store, f"sqlite:///{scene.url}/none.db", Fold(Policy()))
    keeper.step(scene.control)
    with pytest.raises(InputError, match=r"(?s)moves it to its archive at this moment.*in a minute"):
        client.requeue(GPT)
    deadline = time.monotonic() + 60
    while scene.control.retiring:
        monkeypatch.setattr(snapshots, "EVERY", 10**9)
        keeper.step(scene.control)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client.requeue(GPT)  # the snapshot failed
    assert scene.control.fold.retire([GPT]) == {} and GPT in scene.control.state.jobs, "it has not ended"
    scene.control.tick()
    assert client.job(GPT).state == "running"


def test_a_snapshot_that_fails_is_tried_again_and_ends_nothing(tmp_path: Path, monkeypatch) -> None:
    scene = Scene(tmp_path)
    keeper = Snapshots(scene.store, f"sqlite:///{tmp_path}/none/cordee.db", Fold(Policy()))
    monkeypatch.setattr(snapshots, "EVERY", 1)
    deadline = time.monotonic() + 60
    with capture_logs() as lines:
        while not lines:
            keeper.step(scene.control)
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert lines[0]["event"] == "the snapshot failed; the next one is tried later"
    assert "unable to open database file" in lines[0]["why"]
    keeper.end(scene.control)
    scene.store.close()


def test_a_server_that_ends_makes_a_snapshot_if_there_is_enough_to_save(tmp_path: Path, monkeypatch) -> None:
    scene = Scene(tmp_path)
    keeper = Snapshots(scene.store, scene.url, Fold(Policy()))
    keeper.end(scene.control)
    assert newest_fold(scene.store, Policy()).number == 0
    monkeypatch.setattr(snapshots, "_AT_END", 1)
    keeper.end(scene.control)
    assert newest_fold(scene.store, Policy()).number == scene.control.number
    scene.store.close()


def test_a_job_that_was_retired_is_answered_like_before(api: Api) -> None:
    scene, client = api.scene, api.client
    scene.control.submit(JOB, '{"name": "gpt"}')
    scene.control.tick()
    scene.agents.report(RanksStarted(at_us=scene.time.us, job_id=GPT, epoch=1, node="local"))
    scene.ended(GPT, 1, Outcome.FINISHED)
    scene.control.tick()
    books, now_us = Books(api.operations), scene.time.us

    def charged(books: Books = books) -> list[ChargeLine]:
        return [line for line in books.charge_lines(now_us) if line.key.user != IDLE]

    asked = {
        "chargeback": charged,
        "job": lambda: client.job("gpt"),
        "why": lambda: client.why("gpt").text,
        "stop": lambda: client.stop("gpt"),
        "costs": lambda: [client.cost(by).rows for by in ("job", "user", "queue", "epoch")],
        "gpu time": lambda: client.cost("user").model_dump(exclude={"at_us", "idle_gpu_us", "idle_micro_usd"}),
    }
    before = {name: ask() for name, ask in asked.items()}
    ended = scene.control.fold.ended_jobs()
    assert ended == [GPT]
    make(scene.url, scene.control.number, ended)
    assert charged() == before["chargeback"] != [], "it is in the state and among the retired jobs"
    scene.control.retire(ended)
    assert GPT not in scene.control.state.jobs
    for _ in range(2):  # what was summed once is not summed again
        assert {name: ask() for name, ask in asked.items()} == before
    assert charged(Books(api.operations)) == before["chargeback"]
    number = scene.control.number
    spec = {"run": ["true"], "gpus": 4, "name": "gpt"}
    again = api.operations.submit(Submission(spec=spec, job_id=GPT, unprotected=True), "ada")
    assert again.job.state == "done"
    assert scene.control.number == number, "it is not run again"

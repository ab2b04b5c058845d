"""Which levels a checkpoint goes to, and when a capture is due: tables, with a given clock."""

import pytest

from cordee.errors import DestinationError, InputError
from cordee.events import Estimate
from cordee.storage.destination import below, level_urls, parse_levels
from cordee.storage.history import LEFT, PastAttempt, past_attempts
from cordee.storage.log import LogEntry, LogRecord
from cordee.train.checkpoint.auto_interval import AutoInterval
from cordee.train.checkpoint.cadence import MEMORY, Cadence, LevelSchedule
from cordee.train.settings import Every, parse_every, parse_ram, settings


def reaches(to: str, times_s: list[float], failing: tuple[int, ...] = ()) -> list[int]:
    """How far each checkpoint goes; those named fail and arrive nowhere."""
    schedule, found = LevelSchedule(parse_levels(to)), []
    for number, now_s in enumerate(times_s):
        found.append(schedule.reach(now_s))
        schedule.captured()
        if number not in failing:
            schedule.arrived(found[-1], now_s)
    return found


@pytest.mark.parametrize(
    ("to", "times_s", "failing", "expected"),
    [
        ("/a", [0, 1, 2], (), [1, 1, 1]),
        ("/a,/b", [0, 1, 2], (), [2, 2, 2]),
        ("/a,/b every 3", [0, 1, 2, 3, 4, 5, 6], (), [2, 1, 1, 2, 1, 1, 2]),
        ("/a,/b every 3", [0, 1, 2, 3, 4], (0,), [2, 2, 1, 1, 2]),
        ("/a,/b every 3", [0, 1, 2, 3, 4, 5], (3,), [2, 1, 1, 2, 2, 1]),  # until one arrives, each is due
        ("/a,/b every 10s", [0, 4, 9, 10, 15, 25], (), [2, 1, 1, 2, 1, 2]),
        ("/a,/b every 2,/c every 4", [0, 1, 2, 3, 4], (), [3, 1, 2, 1, 3]),
        ("/a,/b every 5,/c every 2", [0, 1, 2, 3, 4], (), [3, 1, 3, 1, 3]),  # what goes farther goes to all nearer
    ],
)
def test_level_schedule_reaches_the_levels_that_are_due(to, times_s, failing, expected) -> None:
    assert reaches(to, times_s, failing) == expected


def test_level_intervals_are_parsed_and_refused() -> None:
    assert level_urls("/a, s3://b/c every 30m") == ("/a", "s3://b/c")
    assert below("/a,/b every 10", "job") == "/a/job,/b/job every 10"
    assert [str(place) for place in parse_levels("/a,/b every 1,/c every 90s")] == ["/a", "/b", "/c every 90s"]
    for to in ("/a every 10", "/a,/b every now", "/a,/b every 0", "/a,,/b"):
        with pytest.raises(DestinationError):
            parse_levels(to)


def due(cadence: Cadence, until_s: int, *, upload_s: float = 0.0) -> list[tuple[int, int]]:
    """(second since the beginning, reach) of each capture that is made by time."""
    began_s = 1000  # as of a clock that has run before
    cadence.begin(began_s)
    found, busy_until_s = [], -1.0
    for now_s in range(began_s, began_s + until_s):
        reach = cadence.now(now_s, uploading=now_s < busy_until_s)
        if reach is not None:
            found.append((now_s - began_s, reach))
            cadence.captured(reach, now_s)
            busy_until_s = now_s + upload_s if reach else busy_until_s
    return found


def test_by_time() -> None:
    assert due(Cadence(parse_every("10s"), None, first_s=5), 35) == [(10, 1), (20, 1), (30, 1)]
    held = due(Cadence(parse_every("10s"), parse_ram("4s"), first_s=5), 25)
    assert held == [(4, MEMORY), (8, MEMORY), (10, 1), (14, MEMORY), (18, MEMORY), (20, 1), (24, MEMORY)]
    slow = due(Cadence(parse_every("10s"), parse_ram("5s"), first_s=5), 40, upload_s=16)
    assert slow == [(5, MEMORY), (10, 1), (15, MEMORY), (20, MEMORY), (25, MEMORY), (26, 1), (31, MEMORY), (36, MEMORY)]
    assert due(Cadence(Every(), Every(), first_s=5), 12) == [(5, 1), (10, 1)], "nothing is held before it is estimated"


def test_by_steps() -> None:
    cadence = Cadence(parse_every(10), parse_ram(4), first_s=5)
    assert [(step, cadence.at_step(step)) for step in range(1, 21) if cadence.at_step(step) is not None] == [
        (4, MEMORY),
        (8, MEMORY),
        (10, 1),
        (12, MEMORY),
        (16, MEMORY),
        (20, 1),
    ]
    assert cadence.wait_s(0.0, uploading=False) is None and cadence.now(1e9, uploading=False) is None
    assert cadence.estimates == (False, False) and cadence.captures_in_memory


def test_a_hint_makes_a_checkpoint_due_at_once() -> None:
    cadence = Cadence(parse_every("1h"), None, first_s=5)
    assert cadence.wait_s(10.0, uploading=False) == 3590.0
    cadence.hasten()
    assert cadence.now(10.0, uploading=False) == 1 and cadence.wait_s(10.0, uploading=True) > 0
    cadence.captured(1, 10.0)
    assert cadence.now(11.0, uploading=False) is None


@pytest.mark.parametrize(
    ("env", "ram", "expected"),
    [
        ({}, None, Every()),
        ({}, "off", None),
        ({}, 5, Every(steps=5)),
        ({"CORDEE_CHECKPOINT_RAM": "auto"}, "30s", Every(seconds=30)),
        ({"CORDEE_CHECKPOINT_RAM": "15"}, "off", Every(seconds=15)),
        ({"CORDEE_CHECKPOINT_RAM": "off"}, "30s", None),
    ],
)
def test_settings_of_captures_in_memory(env, ram, expected) -> None:
    assert settings(env, ram=ram).ram == expected


def test_a_time_without_a_unit_is_refused() -> None:
    with pytest.raises(InputError):
        settings({}, ram="30")


def log_of(*records: tuple) -> list[LogEntry]:
    made = [LogRecord(kind, 1, nonce, fields) for kind, nonce, fields in records]
    return [LogEntry(index, record) for index, record in enumerate(made)]


def test_past_attempts_are_read_from_the_log() -> None:
    s = 10**6
    entries = log_of(
        ("open", "old", {}),  # by an older Cordee
        ("open", "a", {"at_us": 10 * s, "world_size": 4}),
        ("commit", "a", {"at_us": 70 * s}),
        ("commit", "a", {"at_us": 100 * s, "ending": LEFT}),
        ("open", "b", {"at_us": 200 * s, "world_size": 2}),
        ("commit", "b", {"at_us": 230 * s}),
        ("open", "c", {"at_us": 300 * s, "world_size": 2}),
        ("open", "now", {"at_us": 400 * s, "world_size": 2}),
        ("commit", "now", {"at_us": 500 * s}),
    )
    expected = [PastAttempt(4, 90.0, left=True), PastAttempt(2, 30.0, left=False), PastAttempt(2, 0.0, left=False)]
    assert past_attempts(entries) == expected


def test_before_any_save_was_measured_its_plan_says_how_long_one_takes() -> None:
    """Storage that is away is not tried more often than a save would take."""
    planned = Estimate(layout="", peak_bytes=0, gpu_memory_bytes=0, save_us=900_000_000, restart_us=60_000_000)
    seconds = {}
    for estimate in (None, planned):
        cadence = Cadence(Every(), None, first_s=5.0)
        auto = AutoInterval(cadence, Every(), 8, lambda: [], estimate)
        auto.captured(0.001, 5.0, in_memory=False)
        assert auto.failed()
        seconds[estimate] = cadence.save_s
        assert auto.restart_s == (60.0 if estimate else 0.0)
    assert seconds[None] < 899 <= seconds[planned]

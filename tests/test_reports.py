"""What a rank may report: everything that the SDK writes, and nothing that could harm others."""

import json
import math
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.event_json import decode, encode
from cordee.events import (
    Behind,
    CheckpointCommitted,
    Measured,
    MetricsLogged,
    RankBehind,
    RankEvent,
    RankLeft,
    ReplicaReady,
    ReplicaUnready,
    Reported,
    Restored,
    SpanClass,
)
from cordee.ids import JobId
from cordee.reports import COUNT_MAX, SKEW_US, ReportError, ReportScope, check_report, parse_stream, read_report

A = JobId("gpt-abcdef")
SINCE, NOW = 10**15, 10**15 + 10**9
SCOPE = ReportScope(job_id=A, epoch=2, gpus=4, since_us=SINCE, rank=1)
OF = {"job_id": A, "epoch": 2}

GOOD: list[RankEvent] = [
    Restored(at_us=SINCE, **OF, step=0, generation=None),
    Restored(at_us=NOW, **OF, step=100, generation=3),
    Reported(at_us=NOW, **OF, span=SpanClass.USEFUL, from_us=SINCE, first_step=3, steps=9, tokens=10**12, loss=2.5),
    Reported(at_us=NOW, **OF, span=SpanClass.STALL, from_us=SINCE - SKEW_US),
    Measured(at_us=NOW, **OF, rank=1, step=3, peak_bytes=80 * 10**9, step_us=10**6, tokens_per_s=1e6, mfu=0.4),
    Measured(at_us=NOW, **OF, rank=1, step=3, peak_bytes=0),
    CheckpointCommitted(at_us=NOW, **OF, step=COUNT_MAX, generation=1, size_bytes=10**13, stall_us=5, upload_us=10**9),
    RankLeft(at_us=NOW, **OF, rank=1, how="finished", step=7),
    RankBehind(
        at_us=NOW, **OF, rank=63, how=Behind.SLOW, step=2, since_us=SINCE, waited=0.4, where="é:8", stack=("a", "b")
    ),
    ReplicaReady(at_us=NOW, **OF, rank=1, address="http://10.0.0.7:8000", engine="vllm", model="tiny", kv_tokens=9000),
    ReplicaReady(at_us=NOW, **OF, rank=1, address="http://[fe80::1]:8000", engine="llama.cpp", model="tiny", slots=4),
    ReplicaUnready(at_us=NOW, **OF, rank=1, why="it drains", draining=True),
    MetricsLogged(at_us=NOW, **OF, rank=1, step=3, names=("val/loss", "acc"), values=(-1.5, None)),
    MetricsLogged(at_us=NOW, **OF, rank=1, step=3, names=("a", "b", "a"), values=(1.0, 2.0, None), steps=(1, 2, 3)),
]

COMMIT = encode(GOOD[6])
BEHIND = encode(GOOD[8])
SPAN = encode(GOOD[2])
LEFT = encode(GOOD[7])
READY = encode(GOOD[9])
UNREADY = encode(GOOD[11])
METRICS = encode(GOOD[12])

BAD = [
    (COMMIT | {"step": 10**30}, r"CheckpointCommitted: step 10\^30 is out of range"),
    (COMMIT | {"step": -1}, "CheckpointCommitted: step -1 is out of range"),
    (COMMIT | {"step": 2**53}, "CheckpointCommitted: step 9007199254740992 is out of range"),
    (COMMIT | {"size_bytes": True}, "CheckpointCommitted: size_bytes True is not a whole number"),
    (COMMIT | {"upload_us": 1e300}, "CheckpointCommitted: upload_us 1e.300 is not a whole number"),
    (COMMIT | {"job_id": "other-abcdef"}, "CheckpointCommitted: it is about another attempt than gpt-abcdef.2"),
    (COMMIT | {"epoch": 1}, "CheckpointCommitted: it is about another attempt than gpt-abcdef.2"),
    (COMMIT | {"epoch": [2]}, "CheckpointCommitted: it is about another attempt than gpt-abcdef.2"),
    (COMMIT | {"at_us": SINCE - SKEW_US - 1}, "CheckpointCommitted: at_us .* is outside the attempt's time"),
    (COMMIT | {"at_us": NOW + SKEW_US + 1}, "CheckpointCommitted: at_us .* is outside the attempt's time"),
    (COMMIT | {"at_us": None}, "CheckpointCommitted: at_us None is not a time"),
    (COMMIT | {"colour": 1}, "CheckpointCommitted has no field 'colour'"),
    (SPAN | {"at_us": -(10**30)}, r"Reported: at_us -10\^30 is outside the attempt's time"),
    (SPAN | {"from_us": -5}, "Reported: from_us -5 is outside the attempt's time"),
    (SPAN | {"span": "lost"}, "'lost' is not a valid SpanClass"),
    (SPAN | {"loss": "low"}, "Reported: loss 'low' is not a number"),
    (SPAN | {"loss": [[]]}, "Reported: loss of type list is not a number"),
    (BEHIND | {"where": "\ud800"}, r"RankBehind: where '.ud800' holds a character that cannot be stored"),
    (BEHIND | {"where": "a\0b"}, "RankBehind: where .* holds a character that cannot be stored"),
    (BEHIND | {"where": "x" * 10_001}, "RankBehind: where 'x.* is longer than 10000 characters"),
    (BEHIND | {"stack": ["\udfff"]}, "RankBehind: stack of type tuple holds a character"),
    (BEHIND | {"stack": ["x"] * 257}, "RankBehind: stack of type tuple has more than 256 items"),
    (BEHIND | {"stack": 5}, "RankBehind: 'int' object is not iterable"),
    (BEHIND | {"rank": 64}, "RankBehind: rank 64 is not a rank of this gang"),
    (BEHIND | {"waited": math.inf}, "RankBehind: waited inf is not a finite number"),
    (BEHIND | {"waited": 10**400}, "RankBehind: waited 10.400 is out of range"),
    (BEHIND | {"how": "angry"}, "'angry' is not a valid Behind"),
    (LEFT | {"rank": 0}, "RankLeft: it is about another rank than 1"),
    (READY | {"rank": 0}, "ReplicaReady: it is about another rank than 1"),
    (READY | {"address": "10.0.0.7:8000"}, "ReplicaReady: address '10.0.0.7:8000' is not http://HOST:PORT"),
    (READY | {"address": "http://host:8000/v1"}, "ReplicaReady: address .* is not http://HOST:PORT"),
    (READY | {"address": 8000}, "ReplicaReady: address 8000 is not http://HOST:PORT"),
    (READY | {"kv_tokens": -1}, "ReplicaReady: kv_tokens -1 is out of range"),
    (METRICS | {"rank": 0}, "MetricsLogged: it is about another rank than 1"),
    (METRICS | {"names": ["acc"]}, "MetricsLogged: 1 names have 2 values"),
    (METRICS | {"names": ["a", "a"]}, "MetricsLogged: a name stands twice, without steps"),
    (METRICS | {"steps": [3]}, "MetricsLogged: 2 names have 1 steps"),
    (METRICS | {"steps": [3, -1]}, "MetricsLogged: steps of type tuple is out of range"),
    (METRICS | {"names": ["a", "b c"]}, "MetricsLogged: names of type tuple holds what is no name of a metric"),
    (METRICS | {"names": [f"m{at}" for at in range(65)]}, "MetricsLogged: names of type tuple has more than 64 names"),
    (METRICS | {"values": [1, math.nan]}, "MetricsLogged: values of type tuple holds what is no finite number"),
    (METRICS | {"values": [1, 10**400]}, "MetricsLogged: values of type tuple holds what is no finite number"),
    (METRICS | {"values": [1, "low"]}, "MetricsLogged: values of type tuple holds what is no finite number"),
    (UNREADY | {"draining": 1}, "ReplicaUnready: draining 1 is neither true nor false"),
    (
        {"kind": "RanksEnded", "at_us": NOW, **OF, "node": "n", "outcome": "lost"},
        "RanksEnded: a rank may not report it",
    ),
    ({"kind": "JobEnded", "at_us": NOW, "job_id": A, "state": "done", "why": ""}, "JobEnded: a rank may not report it"),
    ({"kind": "NodeUp", "at_us": NOW, "node": 5}, "Node is not an object"),
    ({"kind": [], "at_us": NOW}, r"unknown kind of event: \[\]"),
    ({}, "unknown kind of event: None"),
]


@pytest.mark.parametrize("event", GOOD, ids=lambda event: type(event).__name__)
def test_reports_of_the_sdk_pass_unchanged(event: RankEvent) -> None:
    assert read_report(json.loads(json.dumps(encode(event))), SCOPE, NOW) == event


@pytest.mark.parametrize(("data", "why"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_reports_say_why(data: dict[str, object], why: str) -> None:
    with pytest.raises(ReportError, match=why) as refused:
        read_report(data, SCOPE, NOW)
    assert len(str(refused.value)) <= 300
    str(refused.value).encode("ascii")


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_left_out_and_its_time_counts(loss: float) -> None:
    checked = read_report(SPAN | {"loss": loss}, SCOPE, NOW)
    assert isinstance(checked, Reported)
    assert (checked.loss, checked.steps) == (None, 9)


NUMBERS = st.integers() | st.floats() | st.sampled_from([2**53, 2**63, -(2**63), 10**30, 10**4000, 1e308, -1.0])
TEXTS = st.text(st.characters(codec=None), max_size=20) | st.just("\ud800") | st.just("x" * 20_000)
VALUES = st.recursive(
    NUMBERS | TEXTS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ALMOST = st.builds(
    lambda event, name, value: {**encode(event), (name or "colour"): value},
    st.sampled_from(GOOD),
    st.sampled_from(sorted({name for event in GOOD for name in encode(event)} | {""})),
    VALUES,
)


@given(ALMOST | st.dictionaries(TEXTS | st.just("kind"), VALUES, max_size=6))
def test_any_record_is_refused_or_can_be_stored(data: dict[str, object]) -> None:
    try:
        event = read_report(data, SCOPE, NOW)
    except ReportError as error:
        str(error).encode("ascii")
        return
    assert (event.job_id, event.epoch) == (A, 2)
    text = json.dumps(encode(event), allow_nan=False)
    assert decode(json.loads(text)) == event
    row = {name: value for name, value in encode(event).items() if isinstance(value, int | float | str)}
    connection = sqlite3.connect(":memory:")
    connection.execute(f"select {', '.join('?' for _ in row)}", list(row.values()))
    connection.close()


def test_a_report_that_was_decoded_elsewhere_is_checked_again() -> None:
    event = CheckpointCommitted(at_us=NOW, **OF, step=10**30, generation=1, size_bytes=1, stall_us=1, upload_us=1)
    with pytest.raises(ReportError, match=r"step 10\^30"):
        check_report(event, SCOPE, NOW)


@pytest.mark.parametrize(
    "name", ["", "node/local/3", "gpt.1/rank", "gpt.0/rank0", "gpt.1/rank01", "gpt.1/rank-1", "/rank0"]
)
def test_other_streams_are_no_ranks(name: str) -> None:
    assert parse_stream(name) is None

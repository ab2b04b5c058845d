"""Every kind of event survives its own JSON, is produced by the package, and loads as earlier versions wrote it."""

import ast
import dataclasses
import json
import types
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import cordee
from cordee.event_json import decode, encode
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Behind,
    Capacity,
    CheckpointCommitted,
    Event,
    Failure,
    Job,
    JobSubmitted,
    Lease,
    Node,
    NodeCordoned,
    NodeUncordoned,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankBehind,
    RanksEnded,
    Reported,
    ServerShuttingDown,
    ServerUp,
    SpanClass,
    Tier,
)
from cordee.ids import JobId

KINDS: tuple[type[Any], ...] = get_args(Event)
SRC = Path(cordee.__file__).parent
OLD_LOG = Path(__file__).parent / "data" / "events_0_1.jsonl"

A = JobId("gpt-abcdef")
EVENTS: list[Event] = [
    ServerUp(at_us=1),
    JobSubmitted(at_us=2, job=Job(job_id=A, name="gpt", owner="ada", gpus=4, tier=Tier.PREEMPTIBLE), spec='{"a": 1}'),
    NodeUp(at_us=3, node=Node(name="n", epoch=1, gpu_name="H100", gpus=8, capacity=Capacity.SPOT, domain=("b", "r"))),
    AttemptPlaced(at_us=4, job_id=A, epoch=1, leases=(Lease(node="n", gpus=(0, 1)), Lease(node="m", gpus=(3,)))),
    NoticeGiven(at_us=5, job_id=A, epoch=1, reason=NoticeReason.PREEMPT, deadline_us=9, for_job=JobId("b-abcdef")),
    Reported(at_us=6, job_id=A, epoch=1, span=SpanClass.USEFUL, from_us=5, first_step=0, steps=3, loss=1.5),
    RankBehind(
        at_us=7, job_id=A, epoch=1, rank=3, how=Behind.STUCK, step=2, since_us=6, where="train.py:8", stack=("a", "b")
    ),
    AttemptEnded(
        at_us=8,
        job_id=A,
        epoch=1,
        outcome=Outcome.FAILED,
        why="rank 1 exited with 2",
        failure=Failure(rank=1, exit_code=2, signal=None, tail=("Traceback", "boom")),
    ),
]


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field, by its type."""
    if get_origin(hint) in (types.UnionType, Union):
        return st.one_of([values(each) for each in get_args(hint)])
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: values(each) for name, each in get_type_hints(hint).items()})
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return {
        types.NoneType: st.none(), bool: st.booleans(), str: st.text(), int: st.integers(),
        float: st.floats(allow_nan=False), JobId: st.text().map(JobId),
    }[hint]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_json(event: Event) -> None:
    again = decode(json.loads(json.dumps(encode(event))))
    assert again == event
    assert hash(again) == hash(event)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_survives_json_with_any_values(kind: type[Any]) -> None:
    @seed(11)
    @settings(max_examples=30, database=None)
    @given(values(kind))
    def survives(event: Event) -> None:
        again = decode(json.loads(json.dumps(encode(event))))
        assert again == event
        assert hash(again) == hash(event)

    survives()


def produced(path: Path) -> set[str]:
    """Return the kinds of events that a file makes: it calls one, or hands one to a function that calls it."""
    text = path.read_text()
    if "from cordee.events import" not in text:
        return set()
    tree = ast.parse(text)
    imported = {
        alias.name
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "cordee.events"
        for alias in node.names
    }  # fmt: skip
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id == "isinstance"):
            found |= {each.id for each in (node.func, *node.args) if isinstance(each, ast.Name)}
    return found & imported


def test_every_kind_has_a_producer_outside_the_simulation() -> None:
    simulated = {SRC / "simulate", SRC / "schedule" / "forecast"}
    made = {
        name for path in SRC.rglob("*.py") if not simulated & set(path.parents) for name in produced(path)
    }  # fmt: skip
    missing = {kind for kind in KINDS if kind.__name__ not in made}
    assert not missing


def old_events() -> list[tuple[dict[str, Any], Event]]:
    """Return each line of the file that version 0.1.0 wrote, and what it loads as."""
    lines = [json.loads(line) for line in OLD_LOG.read_text().splitlines()]
    return [(line, decode(line)) for line in lines]


def test_events_of_version_0_1_load() -> None:
    """The file holds one event of each of its 21 kinds with every field filled, and a notice of each reason of then."""
    assert len({line["kind"] for line, _ in old_events()}) == 21
    assert len({type(event) for _, event in old_events()}) == 22, "`NodeDraining` became two kinds"
    later = {NoticeReason.PAUSE, NoticeReason.REQUEUE, NoticeReason.WINDOW, NoticeReason.REHEARSAL}
    assert {event.reason for _, event in old_events() if isinstance(event, NoticeGiven)} == set(NoticeReason) - later


RENAMED = {
    "ShareEnded": {"kind"},
    "ServerDraining": {"kind"},
    "NodeDraining": {"kind", "evict", "over"},
    "NoticeGiven": {"reason"},
    "CheckpointCommitted": {"drain_us"},
}
"""Fields of version 0.1 that have another name or value today."""


@pytest.mark.parametrize(("line", "event"), old_events(), ids=lambda each: type(each).__name__)
def test_an_event_of_version_0_1_keeps_what_it_says(line: dict[str, Any], event: Event) -> None:
    again = json.loads(json.dumps(encode(event)))
    assert decode(again) == event
    for name in line.keys() - RENAMED.get(line["kind"], set()):
        assert_within(line[name], again[name])


def assert_within(old: Any, new: Any) -> None:
    """Fields may have been added to a value since."""
    if isinstance(old, dict):
        for name, value in old.items():
            assert_within(value, new[name])
    else:
        assert old == new


def test_what_version_0_1_said_by_other_names_keeps_its_meaning() -> None:
    found = {kind: [(line, event) for line, event in old_events() if isinstance(event, kind)] for kind in KINDS}
    assert [event.drain for _, event in found[NodeCordoned]] == [True]
    assert [line["over"] for line, _ in found[NodeUncordoned]] == [True]
    for line, event in found[CheckpointCommitted]:
        assert event.upload_us == line["drain_us"]
    for line, event in found[NoticeGiven]:
        assert event.reason == {"share": "time-slice"}.get(line["reason"], line["reason"])
    assert len(found[RanksEnded]) == len(found[ServerShuttingDown]) == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"kind": "Nonsense", "at_us": 1}, "unknown kind of event: 'Nonsense'"),
        ({"kind": "ServerUp"}, "at_us"),
        ({"kind": "ServerUp", "at_us": 1, "colour": 2}, "ServerUp has no field 'colour'"),
        ({"kind": "NodeUp", "at_us": 1, "node": {"name": "n", "tail": 1}}, "Node has no field 'tail'"),
    ],
)
def test_what_is_no_event_is_refused(data: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode(data)

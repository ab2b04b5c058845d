"""Every GPU-microsecond of a replica is in one class, whatever ranks and gateways report, in whatever order."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_events import ended, ledger_of, notice, placed, ready, served, unready, us

from cordee.account import Class, Ledger, Split
from cordee.account.ledger import SETTLE_US, SavedLedger
from cordee.control.codec import codec
from cordee.events import AttemptEnded, CheckpointCommitted, Outcome, RanksEnded, Reported, SpanClass
from cordee.ids import JobId
from world import HOUR, PRICE, S, job

CASES = {
    # events -> seconds of each class of the attempt, which is held from 100 s until 200 s
    "never ready": (ended(200), {"loading": 100}),
    "failed before it was ready": (ended(200, "failed"), {"lost": 100}),
    "killed while it loaded, after a notice": ([notice(150), *ended(200, "killed")], {"lost": 50, "draining": 50}),
    "idle": ([ready(110), *ended(200)], {"loading": 10, "idle_held": 90}),
    "idle, then its node is lost": ([ready(110), *ended(200, "lost")], {"loading": 10, "idle_held": 90}),
    "serving": (
        [ready(110), served(120, 20), served(150, 10), *ended(200)], {"loading": 10, "serving": 30, "idle_held": 60}
    ),
    "drained by notice, with requests open": (
        [ready(110), served(120, 20), notice(180), served(170, 20), *ended(190)],
        {"loading": 10, "serving": 30, "idle_held": 40, "draining": 10},
    ),
    "drains by itself, reported after its notice": (
        [ready(110), notice(180), unready(170, draining=True), *ended(200, "checkpointed")],
        {"loading": 10, "idle_held": 60, "draining": 30},
    ),
    "its engine is started again": (
        [ready(110), served(110, 40), unready(140), ready(160), served(160, 10), *ended(200)],
        {"loading": 30, "serving": 40, "idle_held": 30},
    ),
    "its engine does not start again": (
        [ready(110), served(110, 30), unready(140), *ended(200, "failed")],
        {"loading": 10, "serving": 30, "lost": 60},
    ),
    "two gateways, the second one late": (
        [ready(110), served(120, 20), served(150, 10), served(130, 20, gateway="h"), *ended(200)],
        {"loading": 10, "serving": 40, "idle_held": 50},
    ),
    "reported twice": (
        [ready(110), served(120, 20), served(120, 20), *ended(200)], {"loading": 10, "serving": 20, "idle_held": 70}
    ),
    "ready is reported after requests": (
        [served(120, 20), ready(110), *ended(200)], {"loading": 10, "serving": 20, "idle_held": 70}
    ),
    "reported after its end": (
        [ready(110), *ended(200), served(150, 50, at_s=230)], {"loading": 10, "serving": 50, "idle_held": 40}
    ),
    "reported too late": (
        [ready(110), *ended(200), served(150, 50, at_s=200 + SETTLE_US / S)], {"loading": 10, "idle_held": 90}
    ),
    "of another epoch": ([ready(110, epoch=2), served(120, 20, epoch=2), *ended(200)], {"loading": 100}),
    "before it was placed": ([ready(50), served(60, 60), *ended(200)], {"serving": 20, "idle_held": 80}),
    "longer than it was held": ([ready(110), served(190, 10**6, at_s=195), *ended(200)],
                                {"loading": 10, "serving": 10, "idle_held": 80}),
    "spans of training do not count": (
        [ready(110), Reported(at_us=us(150), from_us=us(120), span=SpanClass.USEFUL, job_id=JobId("r"), epoch=1),
         *ended(200)],
        {"loading": 10, "idle_held": 90},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_classes(case):
    events, seconds = CASES[case]
    (row,) = ledger_of(*events).rows(0)
    assert row.gpu_us == Split(**{cls: 2 * amount * S for cls, amount in seconds.items()})
    assert row.micro_usd.held == 2 * sum(seconds.values()) * PRICE * S // HOUR
    assert row.service == "chat" and row.cause == ("stop" if case.startswith("killed") else row.cause)


def test_a_live_replica_is_ready_until_now():
    ledger = ledger_of(ready(110), served(120, 20))
    (row,) = ledger.rows(us(200))
    assert row.gpu_us == Split(loading=20 * S, serving=40 * S, idle_held=140 * S)
    assert ledger_of().rows(us(200))[0].gpu_us == Split(loading=200 * S)


def test_ranks_of_a_job_that_is_no_replica_cannot_serve():
    ledger = ledger_of()
    for event in (job("a", 1), placed(100, "a", nodes=("n0",)), ready(110, "a"), served(120, 20, name="a")):
        ledger.apply(event)
    row = next(row for row in ledger.rows(us(200)) if row.job_id == "a")
    assert row.gpu_us == Split(unreported=100 * S) and row.service == ""


def test_a_long_replica_stays_small_and_a_late_gateway_counts():
    ledger = ledger_of(ready(100))
    for minute in range(5000):
        ledger.apply(served(100 + 60 * minute, 15))
        if minute % 2 and minute > 10:
            ledger.apply(served(100 + 60 * (minute - 10), 30, at_s=100 + 60 * minute, gateway="h"))
    (attempt,) = ledger._open.values()
    assert attempt.replica is not None and len(attempt.replica._busy) <= 130
    (row,) = ledger.rows(us(100 + 300_000))
    assert row.gpu_us.held == 2 * 300_000 * S
    assert row.gpu_us.serving == 2 * (5000 * 15 + len(range(11, 5000, 2)) * 15) * S


def test_a_flapping_replica_stays_small():
    ledger = ledger_of()
    for minute in range(2000):
        ledger.apply(ready(100 + 60 * minute))
        ledger.apply(served(100 + 60 * minute, 6))
        ledger.apply(unready(145 + 60 * minute))
    (attempt,) = ledger._open.values()
    assert attempt.replica is not None and len(attempt.replica._phases) <= 260
    (row,) = ledger.rows(us(100 + 120_000))
    assert row.gpu_us == Split(serving=2 * 12_000 * S, idle_held=2 * 78_000 * S, loading=2 * 30_000 * S)


times = st.integers(-50, 400)
who = {"job_id": JobId("r"), "epoch": 1}
garbled = st.lists(
    st.one_of(
        st.builds(ready, times),
        st.builds(unready, times, draining=st.booleans()),
        st.builds(notice, times),
        st.builds(served, times, st.integers(-10, 300), at_s=times, gateway=st.sampled_from("gh")),
        st.builds(lambda at_s: CheckpointCommitted(at_us=us(at_s), step=1, generation=1, size_bytes=1, stall_us=0,
                                                   upload_us=0, **who), times),
        st.builds(lambda name, at_s: RanksEnded(at_us=us(at_s), node=name, outcome=Outcome.LOST, **who),
                  st.sampled_from(["n0", "n1", "n2"]), times),
        st.just(None),  # a restart of the server
    ),
    max_size=25,
)  # fmt: skip


def reloaded(ledger: Ledger) -> Ledger:
    saved = codec(SavedLedger)
    return Ledger.restored(saved.decode(json.loads(json.dumps(saved.encode(ledger.saved())))))


@settings(max_examples=50)
@given(events=garbled, more=garbled, outcome=st.sampled_from(Outcome), end_s=times, price=st.integers(0, 10**7))
def test_the_parts_are_the_whole_whatever_is_reported(events, more, outcome, end_s, price):
    ledger, whole, freed_us, clock_us = ledger_of(price=price), ledger_of(price=price), dict[str, int](), us(100)
    end = [RanksEnded(at_us=us(end_s), node=name, outcome=outcome, **who) for name in ("n0", "n1")]
    over = AttemptEnded(at_us=us(end_s), outcome=outcome, why="", **who)
    for event in (*events, None, *end, over, None, *more):
        if event is None:
            ledger = reloaded(ledger)
            continue
        ledger.apply(event)
        whole.apply(event)
        clock_us = whole.at_us
        if isinstance(event, RanksEnded) and event.node in ("n0", "n1"):
            freed_us.setdefault(event.node, clock_us)
        (row,) = ledger.rows(us(500))
        assert row.gpu_us.held == sum(freed_us.get(name, us(500)) - us(100) for name in ("n0", "n1"))
        assert row.micro_usd.held == row.gpu_us.held * price // HOUR
    (row,) = ledger.rows(0)
    assert ledger.rows(0) == whole.rows(0) and ledger.totals(10**12) == whole.totals(10**12)
    amounts = {cls: getattr(row.gpu_us, cls.value) for cls in Class}
    assert min(amounts.values()) >= 0
    assert not any(amounts[cls] for cls in (Class.USEFUL, Class.CHECKPOINT, Class.RESTART, Class.STALL))
    assert amounts[Class.LOST] == 0 or outcome in (Outcome.FAILED, Outcome.LOST, Outcome.KILLED)
    by_service = ledger.cost("service", 0)
    assert [each.key for each in by_service] == ["chat"] and by_service[0].micro_usd == row.micro_usd


@settings(max_examples=50)
@given(events=garbled, outcome=st.sampled_from(Outcome))
def test_the_drawn_segments_sum_to_the_ledger(events, outcome):
    ledger = ledger_of(*(event for event in events if event and type(event) is not RanksEnded), detailed=True)
    for event in ended(400, outcome.value):
        ledger.apply(event)
    (row,), segments = ledger.rows(0), ledger.segments(0)[JobId("r"), 1]
    assert all(before.to_us == after.from_us for before, after in pairwise(segments))
    for cls in Class:
        drawn_us = 2 * sum(each.to_us - each.from_us for each in segments if each.cls is cls)
        assert drawn_us == getattr(row.gpu_us, cls.value), cls

"""Every GPU-microsecond in exactly one class; the parts sum to the whole, whatever the ranks report."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.account import Class, Ledger, Split
from cordee.account.split import rounded
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Lease,
    NodeDown,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankLeft,
    RanksEnded,
    Reported,
    Restored,
    SpanClass,
    StopRequested,
)
from cordee.ids import JobId
from cordee.view.timeline import joined, tracks
from world import HOUR, PRICE, S, World, job, node

A = JobId("a")
WHO = {"job_id": A, "epoch": 1}


def ledger_of(*events, gpus=4, price=PRICE, nodes=1) -> Ledger:
    """`a` holds `gpus` GPUs on each node from 100 s; then these."""
    ledger = Ledger()
    names = [f"n{number}" for number in range(nodes)]
    for name in names:
        ledger.apply(node(name, micro_usd_per_gpu_hour=price, price_source="list"))
    ledger.apply(job("a", gpus * nodes, queue="research"))
    leases = tuple(Lease(node=name, gpus=tuple(range(gpus))) for name in names)
    ledger.apply(AttemptPlaced(at_us=100 * S, leases=leases, **WHO))
    for event in events:
        ledger.apply(event)
    return ledger


def span(cls: str, from_s: float, to_s: float, first=0, steps=0, tokens=0) -> Reported:
    return Reported(
        at_us=round(to_s * S), from_us=round(from_s * S), span=SpanClass(cls),
        first_step=first, steps=steps, tokens=tokens, **WHO,
    )  # fmt: skip


def commit(at_s: float, step: int, drain_s: float = 0) -> CheckpointCommitted:
    more = {"generation": step, "size_bytes": 1, "stall_us": 0, "upload_us": round(drain_s * S)}
    return CheckpointCommitted(at_us=round(at_s * S), step=step, **more, **WHO)


def ended(at_s: float, outcome: str, *names: str):
    """The shares end, and with them the attempt."""
    at_us = round(at_s * S)
    return (
        *(RanksEnded(at_us=at_us, node=name, outcome=Outcome(outcome), **WHO) for name in names or ("n0",)),
        AttemptEnded(at_us=at_us, outcome=Outcome(outcome), why="", **WHO),
    )


def notice(reason: str, for_job: str | None = None) -> NoticeGiven:
    gainer = JobId(for_job) if for_job else None
    return NoticeGiven(at_us=150 * S, reason=NoticeReason(reason), deadline_us=0, for_job=gainer, **WHO)


U, C, R, T = (lambda *a: span("useful", *a)), "checkpoint", "restart", "stall"

CASES = {
    # events -> seconds of each class of the attempt, which is held from 100 s until 200 s
    "finished": ([U(110, 190, 0, 80), *ended(200, "finished")], {"restart": 20, "useful": 80}),
    "gaps are stall": (
        [U(110, 120, 0, 10), U(130, 150, 10, 20), *ended(200, "finished")],
        {"restart": 60, "useful": 30, "stall": 10},
    ),
    "as reported": (
        [span(R, 100, 110), U(110, 150, 0, 4), span(C, 150, 160), span(T, 160, 170), *ended(200, "finished")],
        {"restart": 40, "useful": 40, "checkpoint": 10, "stall": 10},
    ),
    "checkpointed, all committed": (
        [U(110, 190, 0, 80), commit(195, 80), *ended(200, "checkpointed")],
        {"restart": 20, "useful": 80},
    ),
    "checkpointed, and a moment more at that step": (
        [U(110, 190, 0, 80), span(C, 190, 192), U(192, 193, 80), span(C, 193, 195), commit(195, 80, 4),
         *ended(200, "checkpointed")],
        {"restart": 15, "useful": 81, "checkpoint": 4},
    ),
    "killed a moment after that step": (
        [U(110, 190, 0, 80), span(C, 190, 192), U(192, 193, 80), commit(195, 80, 4), *ended(200, "killed")],
        {"restart": 10, "useful": 80, "checkpoint": 2, "lost": 8},
    ),
    "half committed": (
        [U(110, 150, 0, 40), commit(150, 40), U(150, 190, 40, 40), *ended(200, "lost")],
        {"restart": 10, "useful": 40, "lost": 50},
    ),
    "a span is committed in part, by its steps": (
        [U(110, 190, 0, 80), commit(190, 20), *ended(200, "failed")],
        {"restart": 10, "useful": 20, "lost": 70},
    ),
    "useful without steps counts by its time": (
        [U(110, 150), U(150, 190), commit(190, 5, 40), *ended(200, "killed")],
        {"restart": 10, "useful": 40, "lost": 50},
    ),
    "nothing committed": ([U(110, 190, 0, 80), *ended(200, "killed")], {"restart": 10, "lost": 90}),
    "silent and finished": ([*ended(200, "finished")], {"unreported": 100}),
    "silent and cut short": ([*ended(200, "lost")], {"lost": 100}),
    "restored, no span yet, killed": ([Restored(at_us=120 * S, step=0, generation=None, **WHO), *ended(200, "killed")],
                                      {"restart": 20, "lost": 80}),
    "left before its first span": ([RankLeft(at_us=190 * S, rank=0, how="checkpointed", step=0, **WHO),
                                    *ended(200, "checkpointed")], {"unreported": 100}),
    "folded on the way": (
        [job("other", 1, at_us=160 * S), U(110, 120, 0, 10), U(130, 140, 10, 10), span(C, 150, 155), commit(156, 20),
         *ended(200, "finished")],
        {"restart": 55, "useful": 20, "stall": 20, "checkpoint": 5},
    ),
    # garbled
    "backwards within the span before": ([U(110, 190, 0, 80), span(C, 150, 140), *ended(200, "finished")],
                                         {"restart": 20, "useful": 80}),
    "twice": ([U(110, 190, 0, 80), U(110, 190, 0, 80), *ended(200, "finished")], {"restart": 20, "useful": 80}),
    "before it was held": ([U(50, 90, 0, 9), U(90, 130, 0, 3), U(130, 200, 3, 1), *ended(200, "finished")],
                                     {"useful": 100}),
    "overlapping: the later span ends the earlier": (
        [U(110, 160, 0, 5), span(C, 150, 190), *ended(200, "finished")],
        {"restart": 20, "useful": 40, "checkpoint": 40},
    ),
    "backwards": ([U(180, 120, 0, 5), *ended(200, "finished")], {"unreported": 100}),
    "of another epoch": ([Reported(at_us=190 * S, from_us=110 * S, span=SpanClass.USEFUL, job_id=A, epoch=2),
                          *ended(200, "finished")], {"unreported": 100}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gpus", [1, 4])
def test_classes(case, gpus):
    events, seconds = CASES[case]
    (row,) = ledger_of(*events, gpus=gpus).rows(10**15)
    assert row.gpu_us == Split(**{cls: amount * gpus * S for cls, amount in seconds.items()})
    assert row.micro_usd == Split(**{cls: amount * gpus * PRICE * S // HOUR for cls, amount in seconds.items()})


def test_a_live_attempt_is_provisional():
    ledger = ledger_of(U(110, 150, 0, 40))
    (row,) = ledger.rows(170 * S)
    assert row.ended_us is None and row.cause is None
    assert row.gpu_us == Split(restart=40 * S, useful=160 * S, unreported=80 * S)


def test_shares_that_end_at_different_times_are_held_for_different_times():
    events = [*ended(150, "finished", "n0")[:1], U(110, 190, 0, 80), *ended(200, "finished", "n1")]
    (row,) = ledger_of(*events, nodes=2).rows(0)
    assert row.gpu_us == Split(restart=(10 + 20) * 4 * S, useful=(40 + 80) * 4 * S)


@pytest.mark.parametrize(
    ("events", "cause", "for_job"),
    [
        ([notice("preempt", "p"), *ended(200, "killed")], "preempt", "p"),
        ([notice("reclaim"), *ended(200, "lost")], "reclaim", None),
        ([*ended(200, "failed")], "failure", None),
        ([*ended(200, "lost")], "infrastructure", None),
        ([StopRequested(at_us=150 * S, job_id=A, by="x", now=True), *ended(200, "killed")], "stop", None),
        ([*ended(200, "finished")], None, None),
    ],
)
def test_lost_time_has_a_cause_and_someone_who_gained(events, cause, for_job):
    (row,) = ledger_of(*events).rows(0)
    assert (row.cause, row.for_job) == (cause, for_job)


def test_the_gainer_is_charged():
    ledger = ledger_of(notice("preempt", "p"))
    ledger.apply(job("p", 4, owner="bob", queue="serving"))
    for event in ended(200, "killed"):
        ledger.apply(event)
    lost = 400 * PRICE * S // HOUR
    for by, loser, gainer in (("job", "a", "p"), ("user", "ann", "bob"), ("queue", "research", "serving")):
        rows = {row.key: row for row in ledger.cost(by, 0)}
        assert rows[loser].lost_by_cause == (("preempt", 400 * S, lost, 0),)
        assert (rows[loser].charged_micro_usd, rows[gainer].charged_micro_usd) == (0, lost)
        assert rows[gainer].charged_gpu_us == 400 * S and rows[gainer].attempts == 0
    assert [row.key for row in ledger.cost("epoch", 0)] == ["a.1"]


def test_steps_repeated_and_tokens_kept():
    ledger = ledger_of(U(110, 150, 0, 40, 400), commit(151, 30), *ended(200, "lost"))
    who = {"job_id": A, "epoch": 2}
    ledger.apply(AttemptPlaced(at_us=200 * S, leases=(Lease(node="n0", gpus=(0,)),), **who))
    again = {"span": SpanClass.USEFUL, "from_us": 210 * S, "first_step": 30, "steps": 20, "tokens": 200}
    ledger.apply(Reported(at_us=230 * S, **again, **who))
    ledger.apply(RanksEnded(at_us=231 * S, node="n0", outcome=Outcome.FINISHED, **who))
    ledger.apply(AttemptEnded(at_us=231 * S, outcome=Outcome.FINISHED, why="", **who))
    first, second = ledger.rows(0)
    assert (first.steps, first.steps_repeated, first.tokens) == (40, 0, 300)
    assert (second.steps, second.steps_repeated, second.tokens) == (20, 10, 200)
    (row,) = ledger.cost("job", 0)
    assert row.tokens == 500
    assert row.micro_usd_per_million_tokens == row.micro_usd.held * 2000
    assert ledger_of(*ended(200, "finished")).cost("job", 0)[0].micro_usd_per_million_tokens is None
    assert row.price_sources == ("list",)


def test_capacity_is_held_and_idle():
    ledger = ledger_of()  # n0 is up from 0 s, 4 of its 8 GPUs are held from 100 s
    ledger.apply(NodeDown(at_us=150 * S, node="n0", epoch=1, why=""))
    totals = ledger.totals(300 * S)  # what is held stays held, what was idle is no capacity while the node is down
    assert totals.idle_gpu_us == (8 * 100 + 4 * 50) * S
    assert totals.gpu_us.held == 4 * 200 * S
    assert totals.idle_micro_usd == 1000 * PRICE * S // HOUR
    ledger.apply(node("n0", epoch=2, at_us=300 * S, unavailable=(0, 6, 7)))
    assert ledger.totals(310 * S).idle_gpu_us == totals.idle_gpu_us + 2 * 10 * S


def test_stale_reports_change_nothing():
    events = [U(110, 190, 0, 80), notice("preempt", "p"), *ended(200, "killed")]
    ledger, again = ledger_of(*events), ledger_of(*events[:2], notice("stop"), *events[2:], *events, commit(100, 5))
    again.apply(AttemptPlaced(at_us=200 * S, leases=(Lease(node="n0", gpus=(0,)),), **WHO))
    again.apply(node("n0", 1, epoch=0))
    again.apply(NodeDown(at_us=0, node="n0", epoch=0, why=""))
    assert again.rows(0) == ledger.rows(0)
    assert again.totals(10**12) == ledger.totals(10**12)


@given(
    numerators=st.dictionaries(st.sampled_from(Class), st.integers(0, 10**20)), denominator=st.integers(1, 10**10)
)  # fmt: skip
def test_rounded_parts_sum_to_the_whole_and_are_off_by_less_than_one(numerators, denominator):
    split = rounded(numerators, denominator)
    assert split.held == sum(numerators.values()) // denominator
    for cls, numerator in numerators.items():
        assert abs(getattr(split, cls.value) * denominator - numerator) < denominator


times = st.integers(-50, 400)
garbled = st.lists(
    st.one_of(
        st.builds(span, st.sampled_from(SpanClass), times, times, st.integers(-5, 60), st.integers(-2, 30),
                  st.integers(-5, 100)),
        st.builds(commit, times, st.integers(0, 60), st.integers(0, 50)),
        st.builds(lambda at_s: Restored(at_us=at_s * S, step=0, generation=None, **WHO), times),
        st.builds(lambda at_s: RankLeft(at_us=at_s * S, rank=0, how="finished", step=0, **WHO), times),
        st.builds(lambda name, at_s: ended(at_s, "lost", name)[0], st.sampled_from(["n0", "n1", "n2"]), times),
        st.builds(lambda name, at_s, epoch: node(name, 8, at_us=at_s * S, epoch=epoch), st.sampled_from(["n0", "n3"]),
                  times, st.integers(0, 3)),
        st.builds(lambda at_s: NodeDown(at_us=at_s * S, node="n0", epoch=1, why=""), times),
        st.builds(lambda: notice("preempt", "p")),
    ),
    max_size=25,
)  # fmt: skip


@given(
    events=garbled,
    more=garbled,
    outcome=st.sampled_from(Outcome),
    end_s=times,
    gpus=st.integers(1, 8),
    price=st.integers(0, 10**7),
)
def test_the_parts_are_the_whole_to_the_microsecond_whatever_is_reported(events, more, outcome, end_s, gpus, price):
    ledger = ledger_of(*events, gpus=gpus, price=price, nodes=2)
    freed_us = {}
    clock_us = 100 * S
    for event in events:
        if not isinstance(event, Reported | Restored | CheckpointCommitted | RankLeft):
            clock_us = max(clock_us, event.at_us)
        if isinstance(event, RanksEnded) and event.node in ("n0", "n1"):
            freed_us.setdefault(event.node, clock_us)
    (live,) = ledger.rows(500 * S)
    held_us = sum(freed_us.get(name, 500 * S) - 100 * S for name in ("n0", "n1"))
    assert live.gpu_us.held == held_us * gpus
    for event in ended(end_s, outcome.value, "n0", "n1"):
        ledger.apply(event)
    for name in ("n0", "n1"):
        freed_us.setdefault(name, max(clock_us, end_s * S))
    for event in more:
        ledger.apply(event)
    (row,) = ledger.rows(0)
    held_us = sum(freed_us.values()) - 200 * S
    assert row.gpu_us.held == held_us * gpus
    assert row.micro_usd.held == held_us * gpus * price // HOUR
    amounts = [getattr(split, cls.value) for split in (row.gpu_us, row.micro_usd) for cls in Class]
    assert min(amounts) >= 0
    if outcome is Outcome.FINISHED:
        assert row.gpu_us.lost == 0
    sums = [sum(each.micro_usd.held for each in ledger.cost(by, 0)) for by in ("job", "user", "epoch")]
    assert sums == [row.micro_usd.held] * 3


@given(events=garbled, outcome=st.sampled_from(Outcome), end_s=times)
def test_the_drawn_segments_sum_to_the_ledger_in_each_class(events, outcome, end_s):
    """Both leases are of one GPU; the first may end earlier, and the ledger cuts the segments there."""
    log = [node("n0"), node("n1"), job("a", 2)]
    log.append(AttemptPlaced(at_us=100 * S, leases=(Lease(node="n0", gpus=(0,)), Lease(node="n1", gpus=(0,))), **WHO))
    log += [*events, *ended(end_s, outcome.value, "n0", "n1")]
    ledger, freed_us = Ledger(detailed=True), {}
    for event in log:
        ledger.apply(event)
        if isinstance(event, RanksEnded) and event.node in ("n0", "n1"):
            freed_us.setdefault(event.node, ledger.at_us)
    (row,) = ledger.rows(0)
    segments = ledger.segments(0)
    (lane,) = tracks(log, segments)
    drawn = lane.attempts[0].spans
    assert drawn == joined(segments[A, 1])
    assert all(before.to_us == after.from_us for before, after in pairwise(drawn))
    for name in Class:
        cut_us = [
            max(0, min(each.to_us, end_us) - each.from_us)
            for end_us in freed_us.values() for each in drawn if each.name == name
        ]  # fmt: skip
        assert sum(cut_us) == getattr(row.gpu_us, name), name
    assert sum(each.to_us - each.from_us for each in drawn) == max(freed_us.values()) - 100 * S


def test_a_killed_attempt_loses_all_its_time_since_the_last_step_that_counts():
    """What it called useful in the 21 s before it was killed ended no step that a checkpoint covers."""
    log = [U(101, 117, 0, 16), commit(117, 16), U(117, 137, 16, 0), *ended(138, "killed")]
    ledger = Ledger(detailed=True)
    for event in (node("n0"), job("a", 1), AttemptPlaced(at_us=100 * S, leases=(Lease(node="n0", gpus=(0,)),), **WHO)):
        ledger.apply(event)
    for event in log:
        ledger.apply(event)
    (row,) = ledger.rows(0)
    assert row.gpu_us == Split(restart=S, useful=16 * S, lost=21 * S)
    assert [(each.cls, each.from_us // S, each.to_us // S) for each in ledger.segments(0)[A, 1]] == [
        ("restart", 100, 101), ("useful", 101, 117), ("lost", 117, 137), ("lost", 137, 138),
    ]  # fmt: skip


def test_a_rank_whose_clock_is_ahead_moves_no_other_time():
    ahead = (U(110, 150, 0, 40), span(C, 150, 10**6), span(R, 10**6, 2 * 10**6), commit(10**6, 40))
    ledger = ledger_of(*ahead, *ended(200, "finished"))
    (row,) = ledger.rows(0)
    assert row.gpu_us.held == 400 * S and row.gpu_us.useful == 160 * S
    assert ledger.totals(200 * S).idle_gpu_us == (8 * 100 + 4 * 100) * S


@pytest.mark.parametrize(("committed", "clock_s", "segments"), [(True, 10**4, 3), (True, 0, 90), (False, 0, 90)])
def test_a_long_attempt_stays_small(committed, clock_s, segments):
    ledger = ledger_of()
    ledger.apply(job("other", 1, at_us=clock_s * S))
    for number in range(5000):
        ledger.apply(U(110 + number, 111 + number, number, 1))
        if committed:
            ledger.apply(commit(111 + number, number + 1))
    (attempt,) = ledger._open.values()
    assert len(attempt.timeline._segments) < segments
    (row,) = ledger.rows(10**4 * S)
    assert row.gpu_us == Split(restart=40 * S, useful=20000 * S, unreported=4 * 4890 * S)
    assert row.steps == 5000


def test_what_an_ideal_world_costs():
    """A preemption with a save within the grace loses nothing; without one, all work since the start."""
    for protected in (True, False):
        world = World(node("n1"), job("a", 8, "preemptible", protected=protected), work={"a": 500})
        world.later(job("p", 8, "production", at_us=100 * S)).play()
        rows = {row.key: row for row in world.ledger.cost("job", world.now_us)}
        totals = world.ledger.totals(world.now_us)
        assert sum(row.gpu_us.held for row in rows.values()) == totals.gpu_us.held
        assert totals.gpu_us.held + totals.idle_gpu_us == 8 * world.now_us
        assert rows["p"].charged_gpu_us == rows["a"].gpu_us.lost
        # Placed at 0 s, restarted at 60 s, given notice at 100 s, killed at 130.1 s.
        assert rows["a"].gpu_us.lost == (0 if protected else 8 * 130.1 * S - 8 * 60 * S)

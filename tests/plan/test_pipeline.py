"""Pipeline schedules: published figures, valid tables, the bound against every order, the planner's prices."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from cordee.errors import LayoutError, SpecError
from cordee.plan.pipeline import (
    SCHEDULES,
    Action,
    Cell,
    MemoryLimit,
    PassTimes,
    ScheduleTable,
    StagePlacement,
    best_order,
    build,
    compare,
    find_schedule,
    makespan_bound_s,
    overlap_break_even,
    table_csv,
    table_of,
    timeline,
    timing_violations,
    violations,
)
from cordee.plan.pipeline.price import bubble_s, micro_batches_in_flight
from cordee.plan.pipeline.table import cell_of, cell_text

EQUAL = PassTimes(1.0, 1.0, 1.0)
# arXiv:2412.19437, table 2, and the README of deepseek-ai/DualPipe, with F = 1, B = 2 of which W = 1: bubbles, and
# activations of the fullest rank.
PUBLISHED = [
    (8, 20, "1f1b", None, 21.0, 8), (8, 20, "zb-h1", None, 7.0, 8),
    (8, 20, "dualpipe", 3.0, 6.0, 9), (8, 20, "dualpipe", 2.6, 4.8, 9),
    (16, 32, "1f1b", None, 45.0, 16), (16, 32, "zb-h1", None, 15.0, 16),
    (16, 32, "dualpipe", 3.0, 14.0, 17), (16, 32, "dualpipe", 2.6, 11.2, 17),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "count", "schedule", "both_s", "bubble", "peak"), PUBLISHED)
def test_published_bubbles_and_peaks(
    ranks: int, count: int, schedule: str, both_s: float | None, bubble: float, peak: int
) -> None:
    run = timeline(build(schedule, ranks, count), replace(EQUAL, overlapped_s=both_s))
    assert run.bubble_s == pytest.approx(bubble)
    assert run.peak == peak


def test_every_named_schedule_is_valid_wherever_it_exists() -> None:
    rng = random.Random(7)
    checked = 0
    for schedule, ranks, count in itertools.product(SCHEDULES, (1, 2, 3, 4, 5, 8), (1, 2, 3, 7, 8, 13, 16, 20)):
        chunks = rng.choice((2, 3))
        if find_schedule(schedule).misfit(ranks, count, chunks):
            continue
        costs = _random_costs(rng, ranks)
        table = build(schedule, ranks, count, chunks)
        run = timeline(table, costs)
        assert violations(table, costs, memory=run.peak) == (), (schedule, ranks, count)
        assert timing_violations(run, costs) == (), (schedule, ranks, count)
        assert makespan_bound_s(table.placement, count, costs, run.peak + 1e-6) <= run.makespan_s + 1e-9
        assert run.period_s <= run.makespan_s + 1e-9
        checked += 1
    assert checked > 250


def _random_costs(rng: random.Random, ranks: int) -> PassTimes:
    forward_s, inner_s, weight_s = (rng.uniform(0.5, 2.0) for _ in range(3))
    low, high = max(forward_s, inner_s + weight_s), forward_s + inner_s + weight_s
    return PassTimes(
        forward_s, inner_s, weight_s, rng.choice((None, rng.uniform(low, high))), rng.choice((0.0, 0.3)),
        rng.choice(((), tuple(rng.uniform(0.5, 1.5) for _ in range(ranks)))),
    )  # fmt: skip


def _sizes(schedule: str) -> list[tuple[int, int, int]]:
    """Ranks, micro-batches and chunks, before the pipeline is full and long after."""
    record = find_schedule(schedule)
    found = []
    for ranks, chunks in itertools.product((2, 3, 4, 6, 8), (2, 3) if record.chunks is None else (1,)):
        for count in sorted({1, 2, 3, ranks - 1, ranks, ranks + 2, 2 * ranks - 1, 2 * ranks, 3 * ranks, 6 * ranks}):
            if not record.misfit(ranks, count, chunks) and not (record.rounds and count % ranks):
                found.append((ranks, count, chunks))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_planner_prices_a_schedule_as_its_table_does(schedule: str) -> None:
    """The bubble at random ratios of the passes, and the micro-batches in flight on each rank."""
    rng = random.Random(schedule)
    record = find_schedule(schedule)
    for ranks, count, chunks in _sizes(schedule):
        table = build(schedule, ranks, count, chunks)
        kinds = {action.kind for row in table.cells for cell in row for action in cell}
        assert ("W" in kinds) == record.splits_backward
        held = [peak / table.placement.copies for peak in timeline(table, EQUAL).peaks]
        found = [micro_batches_in_flight(schedule, ranks, rank, chunks, count) for rank in range(ranks)]
        assert found == pytest.approx(held), (ranks, count, chunks)
        for _ in range(3):
            costs = PassTimes(rng.uniform(0.2, 2.0), rng.uniform(0.2, 2.0), rng.uniform(0.2, 2.0))
            run = timeline(table, costs)
            priced = bubble_s(
                schedule, ranks, chunks, count,
                forward_s=costs.forward_s, inner_s=costs.inner_s, weight_s=costs.weight_s,
            )  # fmt: skip
            assert priced == pytest.approx(run.bubble_s if record.barrier else run.bubble_without_barrier_s), (
                ranks,
                count,
                costs,
            )


def test_many_candidates_are_priced_as_each_alone() -> None:
    counts, forward_s = np.array([2, 4, 9, 40]), np.array([1.0, 1.3, 1.1, 2.0])
    for schedule in ("1f1b", "zb-h1", "zb-v"):
        together = bubble_s(schedule, 4, 1, counts, forward_s=forward_s, inner_s=1.2, weight_s=0.9)
        alone = [
            float(bubble_s(schedule, 4, 1, int(count), forward_s=float(each), inner_s=1.2, weight_s=0.9))
            for count, each in zip(counts, forward_s, strict=True)
        ]
        assert np.asarray(together).tolist() == pytest.approx(alone)


def test_without_a_barrier_zb_h2_and_zb_v_have_no_bubble() -> None:
    for schedule in ("zb-h2", "zb-v"):
        run = timeline(build(schedule, 8, 20), EQUAL)
        assert run.bubble_without_barrier_s == 0
        assert run.bubble_s > 0
    assert timeline(build("1f1b", 8, 20), EQUAL).bubble_without_barrier_s == 21


def test_latency_and_a_large_last_stage_cost_what_they_must() -> None:
    assert timeline(build("1f1b", 4, 8), replace(EQUAL, latency_s=0.5)).makespan_s > 33 + 3
    uneven = timeline(build("1f1b", 4, 8), replace(EQUAL, depth=(1, 1, 1, 2)))
    assert uneven.busy_s == (24, 24, 24, 48)
    assert uneven.makespan_s == 3 + 48 + 3 * 2
    halves = PassTimes(1, 1, 1, depth=(1, 1, 1, 3))
    assert [halves.size(StagePlacement("v", 2, 2), stage) for stage in range(4)] == [0.5, 0.5, 0.5, 1.5]


# --- The bound ---


def _orders(stages: tuple[int, ...], count: int) -> list[tuple[Cell, ...]]:
    """Every order of a rank's passes; micro-batches are alike, so each pass takes them in turn."""
    found: list[tuple[Cell, ...]] = []

    def extend(cells: tuple[Cell, ...], done: dict[tuple[int, str], int]) -> None:
        if len(cells) == 3 * count * len(stages):
            found.append(cells)
        for stage in stages:
            for kind, before in (("F", None), ("I", "F"), ("W", "I")):
                number = done.get((stage, kind), 0)
                if number < (count if before is None else done.get((stage, before), 0)):
                    action = Action(stage, kind, number)  # type: ignore[arg-type]
                    extend((*cells, (action,)), {**done, (stage, kind): number + 1})

    extend((), {})
    return found


@pytest.mark.parametrize(("placement", "count"), [
    (StagePlacement("line", 2), 3), (StagePlacement("line", 3), 2), (StagePlacement("v", 2, 2), 1),
    (StagePlacement("loop", 2, 2), 1), (StagePlacement("bidirectional", 2, 2), 2),
])  # fmt: skip
def test_no_order_beats_the_bound_and_the_search_finds_the_best(placement: StagePlacement, count: int) -> None:
    rng = random.Random(11)
    per_rank = [_orders(placement.stages_of(rank), count // placement.copies) for rank in range(placement.ranks)]
    tables = [ScheduleTable("any", placement, count, rows) for rows in itertools.product(*per_rank)]
    found_best = 0
    # The search keeps a place for each of two models.
    limits = (None, 2.0, 3.0) if placement.copies == 2 else (None, 1.0, 2.0)
    for memory in limits:
        costs = replace(_random_costs(rng, placement.ranks), overlapped_s=None, depth=())
        runs = []
        for table in tables:
            if not violations(table, memory=memory):
                runs.append(timeline(table, costs).makespan_s)
        optimum = min(runs)
        bound_s = makespan_bound_s(placement, count, costs, memory)
        found = best_order(placement, count, costs, memory)
        assert bound_s <= optimum + 1e-9, (placement, memory)
        assert found is not None
        assert found.timeline.makespan_s >= optimum - 1e-9
        assert violations(found.timeline.table, costs, memory) == ()
        found_best += found.timeline.makespan_s <= optimum + 1e-9
    assert found_best == len(limits)


@pytest.mark.parametrize(("schedule", "costs"), [
    ("zb-h1", EQUAL), ("zb-h1", PassTimes(1, 1.2, 0.8)), ("zb-h1", PassTimes(1, 1, 1, latency_s=0.2)),
    ("zb-h2", PassTimes(1, 1.2, 0.8)), ("zb-v", EQUAL),
])  # fmt: skip
def test_these_are_the_best_that_their_memory_allows(schedule: str, costs: PassTimes) -> None:
    run = timeline(build(schedule, 8, 20), costs)
    assert run.makespan_s == pytest.approx(makespan_bound_s(run.table.placement, 20, costs, run.peak))


def test_less_memory_never_lowers_the_bound_and_found_orders_keep_the_limit() -> None:
    rng = random.Random(5)
    for _ in range(4):
        costs = replace(_random_costs(rng, 4), overlapped_s=None)
        place = rng.choice((StagePlacement("line", 4), StagePlacement("v", 4, 2), StagePlacement("loop", 4, 2)))
        last = 0.0
        for memory in (12.0, 6.0, 4.0, 3.0):
            bound_s = makespan_bound_s(place, 8, costs, memory)
            assert bound_s >= last - 1e-9
            last = bound_s
            found = best_order(place, 8, costs, memory)
            if found is not None:
                assert violations(found.timeline.table, costs, memory) == ()
                assert found.timeline.makespan_s >= bound_s - 1e-9


def test_the_search_betters_dualpipe_and_proves_it() -> None:
    found = best_order(StagePlacement("bidirectional", 8, 2), 20, EQUAL, 9.0)
    assert found is not None
    assert found.optimal
    assert found.timeline.makespan_s == pytest.approx(63)  # DualPipe takes 66
    assert found.timeline.peak <= 9


# --- What is wrong with a table ---


def _changed(table: ScheduleTable, rank: int, change: object) -> ScheduleTable:
    rows = [list(row) for row in table.cells]
    change(rows[rank])  # type: ignore[operator]
    return replace(table, cells=tuple(tuple(row) for row in rows))


def test_faults_are_named() -> None:
    table = build("zb-h1", 4, 8)
    assert "stage 1 runs micro-batch 0: F 0 times" in violations(_changed(table, 1, lambda row: row.pop(0)))[0]
    early = _changed(table, 2, lambda row: row.insert(0, row.pop()))
    assert violations(early) == ("rank 2 runs 2W7 before 2I7",)
    assert "does not hold stage 0" in violations(_changed(table, 3, lambda row: row.append((Action(0, "F", 0),))))[0]
    assert "only a forward and a backward overlap" in " ".join(
        violations(_changed(table, 3, lambda row: row.__setitem__(slice(0, 2), [row[0] + row[1]])))
    )
    over = violations(build("gpipe", 4, 8), EQUAL, memory=4)
    assert over[0] == "rank 0 holds 8 activations, 4 over its limit of 4"
    late = table_of("crossed", [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    assert violations(late) == ("rank 0 waits for ever before 0B0", "rank 1 waits for ever before 1F1")
    with pytest.raises(LayoutError, match="rank 1 waits before 1F1, its cell 1 of 4"):
        timeline(late, EQUAL)


def test_wrong_times_are_named() -> None:
    run = timeline(build("1f1b", 2, 4), EQUAL)
    moved = replace(run.spans[1][2], start_s=0.5, end_s=1.5)
    broken = replace(run, spans=(run.spans[0], (*run.spans[1][:2], moved, *run.spans[1][3:])))
    said = timing_violations(broken, EQUAL)
    assert "rank 1 runs 1F1 before 1B0 has ended" in said
    assert "rank 1 runs 1F1 before 0F1 is there" in said


def test_tables_are_written_and_read_as_torch_writes_them() -> None:
    for schedule in ("zb-h1", "interleaved", "zb-v", "dualpipev"):
        table = build(schedule, 4, 8)
        again = table_of(schedule, [line.split(",") for line in table_csv(table).splitlines()])
        assert again == table
    assert cell_text(cell_of(" (3F1;3B0)OVERLAP_F_B ")) == "(3F1;3B0)OVERLAP_F_B"
    for wrong in ("3X0", "(3F1;3I0)OVERLAP_F_B", "(3F1)OVERLAP_F_B", "F0", "3F0;3B0"):
        with pytest.raises(SpecError):
            cell_of(wrong)
    with pytest.raises(SpecError, match="stage 0 is on rank 0 and on rank 1"):
        table_of("bad", [["0F0", "0B0"], ["0F1", "0B1"]])
    with pytest.raises(SpecError, match="neither a line"):
        table_of("bad", [["1F0", "1B0"], ["0F0", "0B0"]])


# --- Side by side ---


def test_the_comparison_chooses_and_says_why_not() -> None:
    plain = compare(8, 20, EQUAL)
    assert plain.choice is not None
    assert plain.choice.schedule == "zb-v"
    assert plain.break_even == pytest.approx(0.0778, abs=1e-4)
    gaps = {row.schedule: row.gap for row in plain.rows}
    assert gaps["zb-v"] == pytest.approx(0)
    assert gaps["dualpipe"] == pytest.approx(66 / 63 - 1)
    assert gaps["1f1b"] == pytest.approx(81 / 67 - 1)
    overlap = compare(8, 20, replace(EQUAL, overlapped_s=2.4), search=False)
    assert overlap.choice is not None
    assert overlap.choice.schedule == "dualpipe"
    tight = compare(8, 20, EQUAL, room=MemoryLimit(8.0), search=False)
    assert {row.schedule for row in tight.rows if row.fits} == {"1f1b", "zb-h1", "zb-v"}
    # A second copy of the weights takes the room of three activations.
    doubled = compare(8, 20, EQUAL, room=MemoryLimit(11.0, copy=3.0), search=False)
    assert not next(row for row in doubled.rows if row.schedule == "dualpipe").fits
    odd = compare(5, 8, EQUAL, search=False)
    assert {row.schedule: row.misfit for row in odd.rows}["dualpipe"] == "needs an even number of ranks, not 5"
    assert odd.break_even is None


def test_overlap_must_save_more_than_this_for_dualpipev() -> None:
    for ranks, count, share in ((4, 16, 0.0385), (8, 20, 0.0778), (8, 32, 0.0432), (16, 64, 0.0455)):
        assert overlap_break_even(ranks, count, EQUAL) == pytest.approx(share, abs=5e-5)
    both_s = (1 - 0.078) * 3
    times = [
        timeline(build(name, 8, 20), replace(EQUAL, overlapped_s=both_s)).makespan_s for name in ("dualpipev", "zb-v")
    ]
    assert times[0] < times[1]


@pytest.mark.parametrize(("wrong", "says"), [
    (lambda: compare(0, 8, EQUAL), "0 ranks"),
    (lambda: compare(8, 5000, EQUAL), "5000 micro-batches"),
    (lambda: compare(200, 400, EQUAL), "200 ranks x 400 micro-batches are over 40,000"),
    (lambda: compare(8, 20, EQUAL, room=MemoryLimit(-1.0)), "holds -1 activations"),
    (lambda: PassTimes(0, 1, 1), "forward_s is 0"),
    (lambda: PassTimes(1, float("nan"), 1), "inner_s is nan"),
    (lambda: PassTimes(1, 1, 1, overlapped_s=1.5), "must be from 2 to 3"),
    (lambda: PassTimes(1, 1, 1, depth=(1, 0)), "a slice of the model has size 0"),
    (lambda: build("dualpipe", 8, 12), "at least 2 x 8 ranks = 16"),
    (lambda: build("zb-x", 8, 12), "unknown schedule 'zb-x'"),
])  # fmt: skip
def test_bad_numbers_are_refused_with_the_numbers(wrong: object, says: str) -> None:
    with pytest.raises(LayoutError) as refused:
        wrong()  # type: ignore[operator]
    assert says in str(refused.value)

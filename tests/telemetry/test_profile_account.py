"""What became of the time: by hand, against a count of every microsecond, and on profiles that torch itself writes."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from cordee.errors import CatalogueError
from cordee.telemetry.profile import RankReport, account, compare, efficiency, load_kernels, read_profile, skew
from kineto import ADD, GEMM, HOST, NOTIFY, REDUCE, Kineto, expert_step

TABLE = load_kernels()
KERNELS = {"compute": GEMM, "transfer": REDUCE, "waiting": NOTIFY, "memory": "Memset (Device)"}


def _reports(made: Kineto, folder: Path, order: int = 0) -> list[RankReport]:
    return account(read_profile(made.write(folder / f"t{order}.json"), TABLE.categories), TABLE, order)


def test_a_step_by_hand(tmp_path: Path) -> None:
    (report,) = _reports(expert_step(), tmp_path)
    time = report.time
    assert (time.span_us, time.busy_us, time.idle_us) == (905, 905, 0)
    assert (time.compute_us, time.communication_us, time.memory_us) == (875, 400, 10)
    assert (time.hidden_us, time.exposed_transfer_us, time.exposed_waiting_us) == (370, 20, 10)
    assert time.hidden_fraction == 0.925
    assert (report.kernels_us, report.communication_kernels_us, report.waiting_kernels_us) == (1380, 400, 100)
    by_class = {row.kernel_class.name: (row.count, row.total_us, row.exposed_us) for row in report.classes}
    assert by_class == {
        "GEMM": (2, 500, 0), "attention": (1, 290, 0), "elementwise": (1, 180, 0), "DeepEP notify": (1, 100, 10),
        "DeepEP dispatch": (1, 150, 0), "DeepEP combine": (1, 150, 20), "device copy, fill": (1, 10, 0),
    }  # fmt: skip
    assert {row.name: row.busy_us for row in report.streams} == {
        "stream 7": 870, "stream 27": 400, "stream 23": 100, "stream 24": 10,
    }  # fmt: skip
    assert [(step.number, step.time) for step in report.steps] == [(4, time)]
    assert report.defects == ()


@pytest.mark.parametrize("seed", range(20))
def test_every_figure_is_what_counting_microseconds_gives(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    made, length = Kineto(), 400
    runs: list[tuple[str, set[int]]] = []
    for stream in range(rng.randrange(1, 5)):
        at = rng.randrange(20)
        while at < length:
            kind, lasts = rng.choice(list(KERNELS)), rng.randrange(0, 40)
            made.kernel(KERNELS[kind], at, lasts, stream=stream)
            runs.append((kind, set(range(at, at + lasts))))
            at += lasts + rng.randrange(0, 30)
    (report,) = _reports(made, tmp_path)
    ticks = {kind: set().union(*(own for each, own in runs if each == kind)) for kind in KERNELS}
    work, talk = ticks["compute"] | ticks["memory"], ticks["transfer"] | ticks["waiting"]
    starts = [event["ts"] for event in made.events if event["cat"] == "kernel"]
    ends = [event["ts"] + event["dur"] for event in made.events if event["cat"] == "kernel"]
    time = report.time
    told = (time.span_us, time.busy_us, time.compute_us, time.communication_us, time.hidden_us, time.exposed_us)
    by_hand = (max(ends) - min(starts), len(work | talk), len(work), len(talk), len(work & talk), len(talk - work))
    assert told == by_hand, f"seed {seed}"
    assert time.exposed_transfer_us == len(ticks["transfer"] - work), f"seed {seed}"
    exposed = sum(len(own - work) for kind, own in runs if kind in ("transfer", "waiting"))
    assert sum(row.exposed_us for row in report.classes) == pytest.approx(exposed), f"seed {seed}"
    parts = time.alone_us + time.hidden_us + time.exposed_us + time.idle_us
    assert parts == pytest.approx(time.span_us), f"seed {seed}"
    gaps = report.idle
    assert gaps.host_us + gaps.queued_us + gaps.unknown_us == pytest.approx(time.idle_us), f"seed {seed}"


def test_a_gap_is_the_hosts_if_the_launch_came_into_it(tmp_path: Path) -> None:
    made = Kineto().kernel(GEMM, 0, 100, ahead=50).kernel(GEMM, 130, 100, ahead=20).kernel(GEMM, 240, 100, ahead=200)
    made.kernel(ADD, 350, 10, ahead=None).operator("aten::item", 95, 40)
    made.add(ph="X", cat="cuda_runtime", name="cudaStreamSynchronize", pid=HOST, tid=HOST, ts=60, dur=48, args={})
    (report,) = _reports(made, tmp_path)
    told = report.idle
    assert (told.gaps, told.host_us, told.queued_us, told.unknown_us) == (3, 30, 10, 10)
    longest = told.longest[0]
    assert (longest.start_us, longest.length_us, longest.cause, longest.host) == (100, 30, "host", "aten::item")
    assert [(gap.length_us, gap.cause) for gap in told.longest[1:]] == [(10, "queued"), (10, "unknown")]
    assert told.launched == 3


def test_a_stretch_in_which_launches_set_the_pace(tmp_path: Path) -> None:
    made = Kineto().kernel(GEMM, 0, 1000, ahead=100)
    for at in range(10):
        made.kernel(ADD, 1020 + at * 30, 5, ahead=8)
    made.kernel(GEMM, 1400, 1000, ahead=600).kernel(GEMM, 2400, 1000, ahead=1500)
    (report,) = _reports(made, tmp_path)
    (stretch,) = report.idle.stretches
    # From the big kernel that nothing was queued behind to the end of the tenth small one: ten gaps.
    assert (stretch.operations, stretch.idle_us) == (10, 20 + 9 * 25)
    assert report.idle.launch_bound_us == 245


def test_a_traces_overlaps_on_one_stream_are_named(tmp_path: Path) -> None:
    (report,) = _reports(Kineto().kernel(GEMM, 0, 100).kernel(ADD, 60, 100), tmp_path)
    (defect,) = report.defects
    assert (defect.kind, defect.count) == ("overlapping durations", 1)
    assert "starts 40 us too early" in defect.example
    assert report.time.busy_us == 160


def _rank(number: int, arrives: Sequence[int]) -> Kineto:
    """A rank whose compute takes so long in each step; the collective of a step ends at 900 everywhere."""
    made = Kineto(rank=number)
    for step, compute in enumerate(arrives):
        base = 1000 * step
        made.step(step, base - 40, 990).kernel(GEMM, base, compute, ahead=20)
        ranks = {"Collective name": "allreduce", "Process Group Ranks": "[0, 1, 2]"}
        made.kernel(REDUCE, base + compute, 900 - compute, stream=20, ahead=15, **ranks)
    return made


def test_who_came_last_and_who_waited_for_whom(tmp_path: Path) -> None:
    computes = [(100, 300, 200), (400, 300, 250), (150, 500, 300)]
    reports = [each for at, own in enumerate(computes) for each in _reports(_rank(at, own), tmp_path, at)]
    found = skew(reports)
    assert found is not None
    assert (found.matched, found.unmatched) == (3, ())
    waited = [300 + 200 + 100, 0 + 200 + 50, 250 + 0 + 0]
    assert [each.waited_us for each in found.ranks] == waited
    # Rank 1 comes last in the first step, rank 2 in the other two.
    assert [(each.last, each.caused_us) for each in found.ranks] == [(0, 0), (1, 550), (2, 400 + 150)]
    worst = found.worst[0]
    assert (worst.step, worst.last, worst.longest, worst.longest_us, worst.total_us) == (
        0,
        "rank 1",
        "rank 0",
        300,
        550,
    )
    assert [step.straggler for step in found.steps] == ["rank 1", "rank 2", "rank 2"]
    assert [step.compute_us for step in found.steps] == list(zip(*computes, strict=True))


def test_collectives_that_do_not_pair_up_are_named(tmp_path: Path) -> None:
    reports = _reports(_rank(0, (100, 200)), tmp_path) + _reports(_rank(1, (100, 200, 300)), tmp_path, 1)
    found = skew(reports)
    assert found is not None
    assert found.matched == 0
    assert found.unmatched == ("allreduce of [0, 1, 2]: 2 on rank 0, 3 on rank 1",)
    assert skew(reports[:1]) is None


def test_two_devices_in_one_file_are_two_ranks(tmp_path: Path) -> None:
    made = Kineto().kernel(GEMM, 0, 100, device=0).kernel(GEMM, 50, 100, device=1)
    assert [(each.rank, each.time.span_us) for each in _reports(made, tmp_path)] == [(0, 100), (1, 100)]


def test_what_changed_between_two_traces(tmp_path: Path) -> None:
    before, after = _reports(_rank(0, (100, 300)), tmp_path), _reports(_rank(0, (200, 400, 300)), tmp_path, 1)
    found = compare(before, after)
    assert found.per == "step"
    assert {delta.name: (delta.before_us, delta.after_us) for delta in found.times}["compute"] == (200, 300)
    assert {delta.name: delta.change_us for delta in found.classes} == {"GEMM": 100, "NCCL": -100}
    assert [delta.name for delta in found.kernels] == sorted([GEMM, REDUCE])


def test_mfu_stands_beside_what_is_busy(tmp_path: Path) -> None:
    (report,) = _reports(_rank(0, (450, 450)), tmp_path)
    # Two steps in 1,900 us at a peak of 1 TFLOP/s: room for 1.9 GFLOP.
    found = efficiency(report, 0.19e9, 1e12, None)
    assert (found.steps, found.mfu) == (2, pytest.approx(0.2))
    assert found.busy_fraction == pytest.approx(1800 / 1900)
    assert found.compute_fraction == pytest.approx(900 / 1900)
    assert efficiency(report, 0.19e9, 1e12, 4).mfu == pytest.approx(0.4)
    assert efficiency(report, None, 1e12, None).mfu is None


def test_a_trace_without_a_gpu_is_told_by_its_threads(tmp_path: Path) -> None:
    made = Kineto(gpu=None).operator("aten::linear", 0, 100).operator("aten::addmm", 10, 60)
    made.operator("aten::copy_", 20, 10).operator("gloo:all_reduce", 50, 100, thread=88)
    (report,) = _reports(made, tmp_path)
    assert report.side == "host"
    assert {row.name: row.total_us for row in report.kernels} == {
        "aten::linear": 40, "aten::addmm": 50, "aten::copy_": 10, "gloo:all_reduce": 100,
    }  # fmt: skip
    assert (report.time.span_us, report.time.compute_us, report.time.exposed_us) == (150, 100, 50)


def test_an_operator_that_outlasts_its_parent_is_cut_and_named(tmp_path: Path) -> None:
    (report,) = _reports(Kineto().operator("aten::linear", 0, 100).operator("aten::addmm", 90, 60), tmp_path)
    assert {row.name: row.total_us for row in report.kernels} == {"aten::linear": 90, "aten::addmm": 10}
    assert [(defect.kind, defect.count) for defect in report.defects] == [("overlapping durations", 1)]


def test_a_trace_that_torch_wrote(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    left, right = torch.ones(64, 64), torch.ones(64, 64)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, record_function("a block"):
        for _ in range(5):
            left = (left @ right).relu()
    path = tmp_path / "torch.json.gz"
    profiler.export_chrome_trace(str(path))
    read = read_profile(path, TABLE.categories)
    assert read.defects == ()
    (report,) = account(read, TABLE)
    assert report.side == "host"
    counts = {average.key: average.count for average in profiler.key_averages()}
    totals = {average.key: average.self_cpu_time_total for average in profiler.key_averages()}
    assert counts["aten::mm"] == 5
    for row in report.kernels:
        assert row.count >= counts[row.name], "an operator is at least one piece"
        assert row.total_us == pytest.approx(totals[row.name], abs=1.0 + 0.01 * counts[row.name])


def test_the_example_in_the_hint_is_a_table_that_can_be_read(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("{")
    with pytest.raises(CatalogueError) as refused:
        load_kernels(own)
    own.write_text(str(refused.value.hint).removeprefix("write TOML such as "))
    assert load_kernels(own).of("acme::my_a2a_v2").name == "my all-to-all"

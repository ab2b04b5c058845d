"""Every schedule on real ranks: gradients and losses of the model without a pipeline, in the order of the table."""

import pytest

from cordee.errors import LayoutError, ScriptError
from cordee.plan.pipeline import SCHEDULES, PassTimes, ScheduleTable, StagePlacement, best_order, build
from cordee.plan.pipeline.measured import measure, median_passes, overheads, predicted
from cordee.train.pipeline.rehearse import RehearsalResult, StageModel, rehearse

pytestmark = pytest.mark.gang
# Sums of micro-batches in another order differ in the last bit of double precision.
SAME = 1e-14


def _order(one: RehearsalResult, rank: int) -> list[str]:
    return [f"{stage}{kind}{each}" for stage, kind, each, _, _ in one.steps[0][rank]]


def _cells(table: ScheduleTable, rank: int) -> list[str]:
    return [str(action) for cell in table.cells[rank] for action in cell]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_all_schedules_give_the_gradients_of_the_unpipelined_model(ranks: int) -> None:
    count = 2 * ranks
    line, loop, vee = StagePlacement("line", ranks), StagePlacement("loop", ranks, 2), StagePlacement("v", ranks, 2)
    searched = [
        best_order(place, count, PassTimes(1, 1.3, 0.6), 1.25 * ranks)
        for place in (line, vee, StagePlacement("bidirectional", ranks, 2))
    ]
    tables = [build(schedule, ranks, count) for schedule in SCHEDULES]
    tables += [found.timeline.table for found in searched if found is not None]
    names = [("GPipe", line, count), ("1F1B", line, count), ("LoopedBFS", loop, count),
             ("Interleaved1F1B", loop, count), ("InterleavedZeroBubble", loop, count), ("ZBVZeroBubble", vee, count),
             ("DualPipeV", vee, count)]  # fmt: skip
    ran = rehearse(tables, ranks=ranks, torch_names=names)
    assert [one.name for one in ran] == [*(table.name for table in tables), *(name for name, _, _ in names)]
    for one in ran:
        assert one.gradient_error <= SAME, one.name
        assert one.loss_error <= SAME, one.name
    for table, one in zip(tables, ran, strict=False):
        for rank in range(ranks):
            assert _order(one, rank) == _cells(table, rank), (table.name, rank)
    # Where torch has a class of its own, it runs the same passes in the same order.
    torchs = {one.name: one for one in ran[len(tables) :]}
    ours = {table.name: table for table in tables}
    for schedule, name in (("gpipe", "GPipe"), ("1f1b", "1F1B"), ("zb-v", "ZBVZeroBubble"), ("dualpipev", "DualPipeV"),
                           ("interleaved", "Interleaved1F1B")):  # fmt: skip
        for rank in range(ranks):
            assert _order(torchs[name], rank) == _cells(ours[schedule], rank), (name, rank)


def test_a_step_is_laid_over_its_prediction_and_a_failing_rank_is_heard() -> None:
    table = build("zb-h1", 2, 4)
    one = rehearse([table], ranks=2, stage_model=StageModel("waits", 0.002, 0.002, 0.002), steps=2)[0]
    over = overheads(table.placement, one.steps)
    said, ran = predicted(table, median_passes(one.steps), over), measure(one.steps[1], over)
    assert one.gradient_error <= SAME
    assert said.table is table
    assert said.bubble_s > 0
    assert ran.makespan_s >= max(ran.busy_s)
    # Torch defers the whole backward of the first stage to its weights.
    passes = median_passes(one.steps)
    assert passes[0, "I"] < passes[1, "I"]
    wrong = ScheduleTable("cut", table.placement, 4, (table.cells[0][:-1], table.cells[1]))
    with pytest.raises(ScriptError, match="cut is not a valid schedule: stage 0 runs micro-batch 3"):
        rehearse([wrong], ranks=2)


def test_a_table_needs_its_ranks_and_its_stages() -> None:
    torch = pytest.importorskip("torch")
    from cordee.train.pipeline.runtime import TablePipeline, with_sends

    table = build("dualpipe", 2, 4)
    sent = with_sends(table)
    for rank in (0, 1):
        posted = [each for row in sent for each in row if "RECV" in each]
        given = [each for row in sent for each in row if "SEND" in each]
        assert len(posted) == len(given)
        assert [each for each in sent[rank] if "_" not in each.split("(")[0]] == [
            str(cell[0]) if len(cell) == 1 else f"({cell[0]};{cell[1]})OVERLAP_F_B" for cell in table.cells[rank]
        ]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LayoutError, match="the table is for 2 ranks, but 1 run"):
            TablePipeline(table, {}, torch.nn.functional.mse_loss, torch.device("cpu"))
        with pytest.raises(LayoutError, match="rank 0 holds the stages 0, but has modules for 3"):
            TablePipeline(
                build("1f1b", 1, 2), {3: torch.nn.Linear(1, 1)}, torch.nn.functional.mse_loss, torch.device("cpu")
            )
    finally:
        torch.distributed.destroy_process_group()

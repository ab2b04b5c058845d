"""The pipeline schedules, each a record: what it needs, where its stages lie, its order, its memory and its bubble.

A new schedule is one more record, with its order in `orders.py`. The planner's search, the launch settings, the memory
timeline and `cordee pipeline` read nothing else. Memory and bubble are those of the table; a test compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from cordee.errors import LayoutError
from cordee.near import did_you_mean
from cordee.plan.pipeline import orders
from cordee.plan.pipeline.table import Cell, PlacementShape, ScheduleTable, StagePlacement

Form = tuple[float, float, float]
"""A time as a sum: so many forward, input-gradient and weight-gradient passes over 1/p of the depth."""
Line = tuple[float, float]
"""A number of micro-batches as slope and offset over those of the step."""
ALL: Line = (1.0, 0.0)
Misfit = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """The properties of one schedule for p ranks.

    Args:
        name: as layouts and flags have it.
        source: where it was published.
        order: the cells of a rank, from the rank, the placement and the micro-batches that pass each stage.
        in_flight: the least of these lines is what a rank holds at once, in micro-batches of all its layers; from
            ranks, rank and chunks.
        shape: how the stages lie on the ranks.
        chunks: stages on a rank; None: as many as are asked for, at least 2.
        splits_backward: the gradient of the weights is a pass of its own.
        barrier: all ranks meet after each step; without, a rank begins the next step when its own is done.
        even: ranks and micro-batches must be even.
        fills: it needs 2p micro-batches.
        rounds: training frameworks run it in rounds of p micro-batches.
        steady_from: from so many micro-batches on the bubble does not change; from ranks.
        bubble: the largest of these forms is the bubble, from ranks, chunks and micro-batches up to `steady_from`; none
            where only the table has it.
        torch: torch's class without `Schedule`, where torchtitan has it.
        megatron: Megatron-LM runs it.
    """

    name: str
    source: str
    order: Callable[[int, StagePlacement, int], list[Cell]]
    in_flight: Callable[[int, int, int], tuple[Line, ...]]
    shape: PlacementShape = "line"
    chunks: int | None = 1
    splits_backward: bool = False
    barrier: bool = True
    even: bool = False
    fills: bool = False
    rounds: bool = False
    steady_from: Callable[[int], int] = lambda ranks: 1
    bubble: Callable[[int, int, int], tuple[Form, ...]] = lambda ranks, chunks, micro_batches: ()
    torch: str | None = None
    megatron: bool = False

    def placement(self, ranks: int, chunks: int = 1) -> StagePlacement:
        """Return where its stages lie; `chunks` counts where the schedule leaves them open."""
        return StagePlacement(self.shape, ranks, self.chunks or chunks)

    def misfit(self, ranks: int, micro_batches: int, chunks: int = 1) -> Misfit | None:
        """Return why its table does not exist for these numbers and what to do, or None."""
        if self.chunks is None and chunks < 2:
            return f"needs 2 chunks on a rank or more, not {chunks}", "use vpp of 2 or more, or 1f1b"
        if self.even and ranks % 2:
            return f"needs an even number of ranks, not {ranks}", "use dualpipev"
        if self.fills and micro_batches < 2 * ranks:
            message = f"needs at least 2 x {ranks} ranks = {2 * ranks} micro-batches, not {micro_batches}"
            return message, "use a larger global batch or a smaller micro-batch"
        if self.even and micro_batches % 2:
            return f"needs an even number of micro-batches, not {micro_batches}", "use dualpipev"
        return None

    def table(self, ranks: int, micro_batches: int, chunks: int = 2) -> ScheduleTable:
        """Return its table; `chunks` counts where the schedule leaves them open.

        Raises:
            LayoutError: it does not exist for these numbers.
        """
        if ranks < 1 or micro_batches < 1:
            raise LayoutError(f"{ranks} ranks and {micro_batches} micro-batches: both must be at least 1")
        misfit = self.misfit(ranks, micro_batches, chunks)
        if misfit is not None:
            raise LayoutError(f"{self.name} {misfit[0]}", hint=misfit[1])
        placement = self.placement(ranks, chunks)
        count = micro_batches // placement.copies
        rows = tuple(tuple(self.order(rank, placement, count)) for rank in range(ranks))
        return ScheduleTable(self.name, placement, micro_batches, rows)


def _zb_h1(p: int, _chunks: int, m: int) -> tuple[Form, ...]:
    return (p - 1, p - 1, 1 - m), (p - 1, 0.0, 0.0), (p - m, p - 1, 0.0)


def _zb_h2(p: int, _chunks: int, m: int) -> tuple[Form, ...]:
    less, more = (2 * p - 1 - m) // 2, (2 * p - m) // 2
    return (p - 1, p - 1, 1 - m), (p - m, p - 1, 0.0), (less, more, 0.0), (more, more, less - more)


def _zb_v(p: int, _chunks: int, m: int) -> tuple[Form, ...]:
    one, half, more = p - 1, (p - 1) / 2, (m - 1) / 2
    if m <= p:
        return (one - more, one - more, 0.0), (one, one - 3 * more, -more), (one, p - m, 1 - m), (p - m, one, 0.0)
    if m < 2 * p - 1:
        return ()
    return (
        (0.0, one, -one), (-half, half, 0.0), (one, -half, -half), (one, 0.0, -one - 0.5), (one - 0.5, 0.5, -one),
        (half - 0.5, 0.5 - half, 0.0), (-half, 0.5, half - 0.5), (0.5 - half, 0.0, half - 0.5),
    )  # fmt: skip


def _dualpipe(p: int, _chunks: int, _m: int) -> tuple[Form, ...]:
    two, one = p - 2, p / 2 - 1
    return (two, one, -one), (two, 0.0, 0.0), (one - 1, two, -one), (one - 1, one, 0.0), (0.0, 0.0, 0.0)


def _dualpipev(p: int, _chunks: int, _m: int) -> tuple[Form, ...]:
    two, one = p - 1, (p - 1) / 2
    return (two, one, -one), (two, 0.0, 0.0), (one - 0.5, two, -one), (one - 0.5, one, 0.0)


_1F1B = "arXiv:2104.04473, section 2.2"
_ZERO_BUBBLE = "arXiv:2401.10241, section 2"
_DUALPIPE = "arXiv:2412.19437, section 3.2.1; its order in deepseek-ai/DualPipe"
RECORDS: tuple[PipelineSchedule, ...] = (
    PipelineSchedule(
        "1f1b", _1F1B, orders.one_forward_one_backward, lambda p, rank, v: (ALL, (0.0, p - rank)),
        bubble=lambda p, v, m: ((p - 1, p - 1, p - 1),), torch="1F1B", megatron=True,
    ),
    PipelineSchedule(
        "gpipe", "arXiv:1811.06965", orders.gpipe, lambda p, rank, v: (ALL,),
        bubble=lambda p, v, m: ((p - 1, p - 1, p - 1),), torch="GPipe",
    ),
    PipelineSchedule(
        "interleaved", f"{_1F1B}; Megatron-LM's warm-up", orders.interleaved,
        lambda p, rank, v: (ALL, (0.0, (2 * (p - rank - 1) + (v - 1) * p + 1) / v)),
        shape="loop", chunks=None, rounds=True,
        bubble=lambda p, v, m: (((p - 1) / v, (p - 1) / v, (p - 1) / v),), torch="Interleaved1F1B", megatron=True,
    ),
    PipelineSchedule(
        "zb-h1", _ZERO_BUBBLE, orders.zb_h1, lambda p, rank, v: (ALL, (0.0, p)), splits_backward=True,
        steady_from=lambda p: p, bubble=_zb_h1,
    ),
    PipelineSchedule(
        "zb-h2", _ZERO_BUBBLE, orders.zb_h2, lambda p, rank, v: (ALL, (0.0, 2 * p - 1)), splits_backward=True,
        barrier=False, steady_from=lambda p: 2 * p - 1, bubble=_zb_h2,
    ),
    PipelineSchedule(
        "zb-v", "arXiv:2401.10241, section 6", orders.zb_v,
        # The last rank has the turn of the V, and is first to be full.
        lambda p, rank, v: (ALL, (0.0, p), (0.5, (rank + 1) / 2)),
        shape="v", chunks=2, splits_backward=True, barrier=False,
        steady_from=lambda p: 2 * p - 1, bubble=_zb_v, torch="ZBVZeroBubble",
    ),
    PipelineSchedule(
        "dualpipe", _DUALPIPE, orders.dualpipe, lambda p, rank, v: (ALL, (0.0, (p + 1) / 2)),
        shape="bidirectional", chunks=2, splits_backward=True, even=True, fills=True, bubble=_dualpipe,
    ),
    PipelineSchedule(
        "dualpipev", f"{_DUALPIPE}, cut in half", orders.dualpipe, lambda p, rank, v: (ALL, (0.0, p + 0.5)),
        shape="v", chunks=2, splits_backward=True, fills=True, bubble=_dualpipev, torch="DualPipeV",
    ),
)  # fmt: skip
SCHEDULES: dict[str, PipelineSchedule] = {record.name: record for record in RECORDS}


def find_schedule(name: str) -> PipelineSchedule:
    """Return the schedule of this name.

    Raises:
        LayoutError: no schedule has it.
    """
    if name not in SCHEDULES:
        raise LayoutError(f"unknown schedule {name!r}", hint=did_you_mean(name, SCHEDULES))
    return SCHEDULES[name]


@lru_cache(maxsize=256)
def build(name: str, ranks: int, micro_batches: int, chunks: int = 2) -> ScheduleTable:
    """Return the table of a schedule.

    Raises:
        LayoutError: an unknown name, or the schedule does not exist for these numbers.
    """
    return find_schedule(name).table(ranks, micro_batches, chunks)

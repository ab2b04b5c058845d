"""The schedules that have a name, each as a table.

GPipe arXiv:1811.06965; 1F1B and interleaved 1F1B arXiv:2104.04473, section 2.2; ZB-H1 and ZB-H2 arXiv:2401.10241,
section 2; ZB-V the same paper, section 6; DualPipe arXiv:2412.19437, section 3.2.1, its order in deepseek-ai/DualPipe;
DualPipeV is DualPipe cut in half (its README).
"""

from collections import deque
from collections.abc import Callable

from cordee.errors import LayoutError
from cordee.plan.layout import SCHEDULES, Schedule
from cordee.plan.pipeline.table import Action, Cell, Kind, Placement, Table

__all__ = ["build", "refusal"]


def refusal(schedule: Schedule, ranks: int, micro_batches: int, chunks: int = 2) -> str | None:
    """Why the schedule does not exist for these numbers, or None."""
    if schedule == "interleaved" and chunks < 2:
        return f"needs 2 chunks on a rank or more, not {chunks}"
    if schedule == "dualpipe":
        if ranks % 2:
            return f"needs an even number of ranks, not {ranks}"
        if micro_batches % 2 or micro_batches < 2 * ranks:
            return f"needs an even number of micro-batches, at least 2 x {ranks} ranks = {2 * ranks}: {micro_batches}"
    if schedule == "dualpipev" and micro_batches < 2 * ranks:
        return f"needs at least 2 x {ranks} ranks = {2 * ranks} micro-batches, not {micro_batches}"
    return None


def build(schedule: Schedule, ranks: int, micro_batches: int, chunks: int = 2) -> Table:
    """The table of a named schedule; `chunks` is of interleaved 1F1B alone.

    Raises:
        LayoutError: it does not exist for these numbers.
    """
    if schedule not in SCHEDULES:
        raise LayoutError(f"unknown schedule {schedule!r}", hint="known are " + ", ".join(SCHEDULES))
    if ranks < 1 or micro_batches < 1:
        raise LayoutError(f"{ranks} ranks and {micro_batches} micro-batches: both must be at least 1")
    why = refusal(schedule, ranks, micro_batches, chunks)
    if why is not None:
        raise LayoutError(f"{schedule} {why}")
    if schedule in ("dualpipe", "dualpipev"):
        return _dualpipe(schedule, ranks, micro_batches)
    if schedule == "interleaved":
        placement = Placement("loop", ranks, chunks)
        rows = [_interleaved(rank, placement, micro_batches) for rank in range(ranks)]
    elif schedule == "zb-v":
        placement = Placement("vee", ranks, 2)
        rows = [_zb_v(rank, ranks, micro_batches) for rank in range(ranks)]
    else:
        placement = Placement("line", ranks)
        rows = [_LINES[schedule](rank, ranks, micro_batches) for rank in range(ranks)]
    return Table(schedule, placement, micro_batches, tuple(tuple(row) for row in rows))


def _gpipe(rank: int, _ranks: int, count: int) -> list[Cell]:
    return [(Action(rank, kind, each),) for kind in ("F", "B") for each in range(count)]


def _1f1b(rank: int, ranks: int, count: int) -> list[Cell]:
    ahead = min(count, ranks - 1 - rank)
    cells: list[Cell] = [(Action(rank, "F", each),) for each in range(ahead)]
    for each in range(count):
        if ahead + each < count:
            cells.append((Action(rank, "F", ahead + each),))
        cells.append((Action(rank, "B", each),))
    return cells


def _interleaved(rank: int, placement: Placement, count: int) -> list[Cell]:
    """Groups of p micro-batches pass chunk after chunk; backward in the same order, from the last chunk.

    Where p does not divide them, groups are the smallest equal ones of at least p.
    """
    ranks, chunks = placement.ranks, placement.chunks
    group = count // max(groups for groups in range(1, max(1, count // ranks) + 1) if count % groups == 0)
    order = [
        (chunk, each)
        for first in range(0, count, group)
        for chunk in range(chunks)
        for each in range(first, first + group)
    ]
    forward = [Action(chunk * ranks + rank, "F", each) for chunk, each in order]
    backward = [Action((chunks - 1 - chunk) * ranks + rank, "B", each) for chunk, each in order]
    ahead = min(len(order), 2 * (ranks - 1 - rank) + (chunks - 1) * group)
    cells: list[Cell] = [(action,) for action in forward[:ahead]]
    for index, action in enumerate(backward):
        if ahead + index < len(forward):
            cells.append((forward[ahead + index],))
        cells.append((action,))
    return cells


def _zero_bubble(rank: int, count: int, *, ahead: int, most: int) -> list[Cell]:
    """`ahead` forwards first; weights wait until `most` micro-batches are in flight, or no forward is left."""
    forwards, held = min(ahead, count), min(ahead, count)
    cells: list[Cell] = [(Action(rank, "F", each),) for each in range(forwards)]
    weights = 0
    for each in range(count):
        cells.append((Action(rank, "I", each),))
        if held == most or forwards == count:
            cells.append((Action(rank, "W", weights),))
            weights, held = weights + 1, held - 1
        if forwards < count:
            cells.append((Action(rank, "F", forwards),))
            forwards, held = forwards + 1, held + 1
    return cells + [(Action(rank, "W", each),) for each in range(weights, count)]


def _zb_h1(rank: int, ranks: int, count: int) -> list[Cell]:
    return _zero_bubble(rank, count, ahead=ranks - rank, most=ranks)


def _zb_h2(rank: int, ranks: int, count: int) -> list[Cell]:
    return _zero_bubble(rank, count, ahead=2 * (ranks - rank) - 1, most=2 * ranks - 1)


_LINES: dict[str, Callable[[int, int, int], list[Cell]]] = {
    "gpipe": _gpipe, "1f1b": _1f1b, "zb-h1": _zb_h1, "zb-h2": _zb_h2,
}  # fmt: skip


class _Rank:
    """The cells of a rank with two stages, written in order; each pass takes the next micro-batch of its stage."""

    def __init__(self, first: int, second: int) -> None:
        self.stages = (first, second)
        self.cells: list[Cell] = []
        self._next: dict[tuple[int, str], int] = {}
        self._waiting: deque[Action] = deque()

    def _take(self, kind: Kind, half: int) -> Action:
        counted = "I" if kind == "B" else kind
        number = self._next.get((half, counted), 0)
        self._next[half, counted] = number + 1
        return Action(self.stages[half], kind, number)

    def run(self, kind: Kind, half: int) -> None:
        """One pass; the weights of an I wait for `weights`."""
        action = self._take(kind, half)
        self.cells.append((action,))
        if kind == "I":
            self._waiting.append(Action(action.stage, "W", action.micro_batch))

    def overlap(self, forward: int, backward: int) -> None:
        """A forward of one half with a backward of the other."""
        self.cells.append((self._take("F", forward), self._take("B", backward)))

    def weights(self) -> None:
        """The weights that have waited longest."""
        if self._waiting:
            self.cells.append((self._waiting.popleft(),))

    def counted(self, kind: Kind, half: int) -> int:
        """Passes so far."""
        return self._next.get((half, kind), 0)


def _zb_v(rank: int, ranks: int, count: int) -> list[Cell]:
    """The order of equal passes; a step too short for it is a longer one from which the rest is left out."""
    least = max(count, 2 * ranks - 1)
    row = _Rank(rank, 2 * ranks - 1 - rank)
    for _ in range(2 * (ranks - rank) - 1):
        row.run("F", 0)
    for _ in range(rank):
        row.run("F", 1)
        row.run("F", 0)
    for _ in range(ranks - rank):
        row.run("F", 1)
        row.run("I", 1)
        row.weights()
    while row.counted("F", 1) < least:
        if row.counted("F", 0) < least:
            row.run("F", 0)
        row.run("I", 0)
        row.weights()
        row.run("F", 1)
        row.run("I", 1)
        row.weights()
    cells = row.cells
    done = [row.counted("I", half) for half in (0, 1)]
    rest: list[list[Cell]] = [[(Action(row.stages[half], "W", each),) for each in range(done[half], least)]
                              for half in (0, 1)]  # fmt: skip
    left = deque((half, each) for each in range(rank) for half in (0, 1))
    while left:
        half, each = left.popleft()
        cells.append((Action(row.stages[half], "I", done[half] + each),))
    for each in range(done[0] + rank, least):
        cells.append((Action(row.stages[0], "I", each),))
        cells.append(rest[0].pop(0))
    cells += rest[1] + rest[0]
    return [cell for cell in cells if cell[0].micro_batch < count]


def _dualpipe(schedule: Schedule, ranks: int, micro_batches: int) -> Table:
    two_way = schedule == "dualpipe"
    placement = Placement("two-way" if two_way else "vee", ranks, 2)
    half = ranks // 2 if two_way else ranks
    rows = []
    for rank in range(ranks):
        near, far = placement.held_by(rank)
        if two_way and rank >= half:
            near, far = far, near
        depth = min(rank, ranks - 1 - rank) if two_way else rank
        rows.append(tuple(_dualpipe_rank(_Rank(near, far), half, depth, micro_batches // placement.chains)))
    return Table(schedule, placement, micro_batches, tuple(rows))


def _dualpipe_rank(row: _Rank, half: int, depth: int, count: int) -> list[Cell]:
    """The eight steps of a rank at this depth; half 0 is the stage that micro-batches reach first."""
    outer = half - depth - 1
    for _ in range(2 * outer):
        row.run("F", 0)
    for _ in range(depth + 1):
        row.run("F", 0)
        row.run("F", 1)
    for _ in range(outer):
        row.run("I", 1)
        row.weights()
        row.run("F", 1)
    for index in range(count - 2 * half + depth + 1):
        if index == 0 and outer == 0:
            # The rank in the middle has nothing to overlap with yet: its first backward is awaited by all others.
            row.run("F", 0)
            row.run("B", 1)
        else:
            row.overlap(0, 1)
        row.overlap(1, 0)
    for _ in range(outer):
        row.run("B", 1)
        row.overlap(1, 0)
    # From the middle of this step on the weights wait.
    split = False
    for index in range(depth + 1):
        split = split or (index == (depth + 1) // 2 and depth % 2 == 1)
        row.run("I" if split else "B", 1)
        split = split or (index == (depth + 1) // 2 and depth % 2 == 0)
        row.run("I" if split else "B", 0)
    for _ in range(outer):
        row.weights()
        row.run("I" if split else "B", 0)
    for _ in range(depth + 1):
        row.weights()
    return row.cells

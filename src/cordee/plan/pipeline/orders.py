"""The orders of the schedules: the cells of a rank, from the rank, the placement and the micro-batches of each stage.

The other properties of a schedule are in its record in `schedules.py`.
"""

from collections import deque

from cordee.plan.pipeline.table import Action, Cell, PassKind, StagePlacement


def gpipe(rank: int, _placement: StagePlacement, count: int) -> list[Cell]:
    """Return all forward passes, then all backward passes."""
    return [(Action(rank, kind, each),) for kind in ("F", "B") for each in range(count)]


def one_forward_one_backward(rank: int, placement: StagePlacement, count: int) -> list[Cell]:
    """Return the warm-up of forward passes, then a forward and a backward pass in turn, then the cool-down."""
    ahead = min(count, placement.ranks - 1 - rank)
    cells: list[Cell] = [(Action(rank, "F", each),) for each in range(ahead)]
    for each in range(count):
        if ahead + each < count:
            cells.append((Action(rank, "F", ahead + each),))
        cells.append((Action(rank, "B", each),))
    return cells


def interleaved(rank: int, placement: StagePlacement, count: int) -> list[Cell]:
    """Return 1F1B over chunks: groups of p micro-batches pass chunk after chunk, backwards from the last chunk.

    Where p does not divide the micro-batches, the groups are the smallest equal ones of at least p.
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
    """Return `ahead` forwards first; weight passes wait until `most` are in flight or no forward is left."""
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


def zb_h1(rank: int, placement: StagePlacement, count: int) -> list[Cell]:
    """Return 1F1B with weight passes in the bubble, in 1F1B's memory."""
    return _zero_bubble(rank, count, ahead=placement.ranks - rank, most=placement.ranks)


def zb_h2(rank: int, placement: StagePlacement, count: int) -> list[Cell]:
    """Return the order without a bubble, in twice 1F1B's memory."""
    ranks = placement.ranks
    return _zero_bubble(rank, count, ahead=2 * (ranks - rank) - 1, most=2 * ranks - 1)


class _Rank:
    """The cells of a rank with two stages, in order; each pass takes the next micro-batch of its stage."""

    def __init__(self, first: int, second: int) -> None:
        self.stages = (first, second)
        self.cells: list[Cell] = []
        self._next: dict[tuple[int, str], int] = {}
        self._waiting: deque[Action] = deque()

    def _take(self, kind: PassKind, half: int) -> Action:
        counted = "I" if kind == "B" else kind
        number = self._next.get((half, counted), 0)
        self._next[half, counted] = number + 1
        return Action(self.stages[half], kind, number)

    def run(self, kind: PassKind, half: int) -> None:
        """Append one pass; the weight pass of an I waits for `weights`."""
        action = self._take(kind, half)
        self.cells.append((action,))
        if kind == "I":
            self._waiting.append(Action(action.stage, "W", action.micro_batch))

    def overlap(self, forward: int, backward: int) -> None:
        """Append a forward of one half overlapped with a backward of the other."""
        self.cells.append((self._take("F", forward), self._take("B", backward)))

    def weights(self) -> None:
        """Append the weight pass that has waited longest."""
        if self._waiting:
            self.cells.append((self._waiting.popleft(),))

    def counted(self, kind: PassKind, half: int) -> int:
        """Return the number of passes so far."""
        return self._next.get((half, kind), 0)


def zb_v(rank: int, placement: StagePlacement, count: int) -> list[Cell]:
    """Return the order for equal passes; one of few micro-batches is a longer one from which the rest is left out."""
    ranks = placement.ranks
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


def dualpipe(rank: int, placement: StagePlacement, count: int) -> list[Cell]:
    """Return DualPipe's eight phases, for two models run from both ends or for one folded into a V."""
    ranks, bidirectional = placement.ranks, placement.shape == "bidirectional"
    near, far = placement.stages_of(rank)
    if bidirectional and rank >= ranks // 2:
        near, far = far, near
    depth = min(rank, ranks - 1 - rank) if bidirectional else rank
    return _phases(_Rank(near, far), ranks // 2 if bidirectional else ranks, depth, count)


def _phases(row: _Rank, half: int, depth: int, count: int) -> list[Cell]:
    """Return the eight phases of a rank at this depth; half 0 is the stage that micro-batches reach first."""
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
            # The rank in the middle has nothing to overlap yet, and all others wait for its first backward.
            row.run("F", 0)
            row.run("B", 1)
        else:
            row.overlap(0, 1)
        row.overlap(1, 0)
    for _ in range(outer):
        row.run("B", 1)
        row.overlap(1, 0)
    # From the middle of this phase on, weight passes are separate and wait.
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

"""What can still be made durable before a deadline, and how far: a pure function of measured figures.

No clock and no store here: `leaving.py` measures, asks, and does what is decided. All ranks have to do the same, which
`stop.py` sees to: a rank that would rather not save says so, and then none does.
"""

from dataclasses import dataclass
from enum import StrEnum

from cordee.units import format_bytes

# What a save takes differs from one to the next: a shared disk, a network, a neighbour. A new capture is only made when
# there is this many times what the last one took, as long as there is another capture to fall back to.
ROOM = 1.25


class Choice(StrEnum):
    """What to do with the time that is left."""

    DURABLE = "durable"  # nothing: this very step is durable already
    SAVE = "save"  # a new capture at the boundary where the ranks meet
    FINISH = "finish"  # no new one: bring the newest capture that is in memory
    TRY = "try"  # a new one will hardly make it, and there is nothing else that could


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """A capture is durable in the stores up to this one, the nearest first, so long after its drain has begun."""

    name: str
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when a notice comes.

    Attributes:
        left_s: until this process has to be gone.
        step: at whose boundary the ranks meet.
        boundary_s: until they do, as far as can be told: what is left of the step that runs.
        step_s: what a step takes; None: none was measured.
        stall_s: what a capture takes.
        size_bytes: of a capture.
        reaches: nearest first, the one that lasts at the end; empty: no save was measured.
        busy_s: until the drain is done with what it has.
        captured_step: of the newest capture in memory that is not durable; None: there is none.
        held: it lies in memory and waits; else it is what the drain has.
        durable_step: what a new attempt would start with now.
        machine_stays: what lies on its own disks will still be there.
    """

    left_s: float
    step: int
    boundary_s: float = 0.0
    step_s: float | None = None
    stall_s: float = 0.0
    size_bytes: int = 0
    reaches: tuple[Reach, ...] = ()
    busy_s: float = 0.0
    captured_step: int | None = None
    held: bool = False
    durable_step: int = 0
    machine_stays: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do.

    Attributes:
        lacks: so many of the farthest stores are left out.
        needs_s: what it takes, from now on, by the figures.
        turn_s: with less than this left the boundary is not waited for any longer: what is held has to go now.
        says: the decision with its numbers.
    """

    choice: Choice
    lacks: int
    needs_s: float
    turn_s: float
    says: str


def plan(now: Situation) -> Plan:
    """Choose what loses the fewest steps; of what loses the same, what reaches farthest."""
    if now.durable_step == now.step:
        return _plan(now, Choice.DURABLE, 0, 0.0)
    useful = _useful(now)
    for lacks in useful:
        if _room(now, _save_s(now, lacks)) <= now.left_s:
            return _plan(now, Choice.SAVE, lacks, _save_s(now, lacks))
    if now.captured_step is not None and now.captured_step > now.durable_step:
        for lacks in useful:
            if _finish_s(now, lacks) <= now.left_s:
                return _plan(now, Choice.FINISH, lacks, _finish_s(now, lacks))
    return _plan(now, Choice.TRY, useful[-1], _save_s(now, useful[-1]))


def _useful(now: Situation) -> range:
    """How many of the farthest stores may be left out, none first."""
    return range(len(now.reaches) if now.machine_stays and now.reaches else 1)


def _drain_s(now: Situation, lacks: int) -> float:
    return now.reaches[-1 - lacks].drain_s if now.reaches else 0.0


def _save_s(now: Situation, lacks: int) -> float:
    """A new capture begins at the boundary, and when the drain has done what it has."""
    return max(now.boundary_s, now.busy_s) + now.stall_s + _drain_s(now, lacks)


def _room(now: Situation, needs_s: float) -> float:
    waits_s = max(now.boundary_s, now.busy_s)
    return waits_s + ROOM * (needs_s - waits_s)


def _finish_s(now: Situation, lacks: int) -> float:
    return now.busy_s + (_drain_s(now, lacks) if now.held else 0.0)


def _plan(now: Situation, choice: Choice, lacks: int, needs_s: float) -> Plan:
    held = now.held and now.captured_step is not None and now.captured_step > now.durable_step
    turn_s = now.busy_s + ROOM * _drain_s(now, _useful(now)[-1]) if held else 0.0
    return Plan(choice=choice, lacks=lacks, needs_s=needs_s, turn_s=turn_s, says=_says(now, choice, lacks, needs_s))


def _says(now: Situation, choice: Choice, lacks: int, needs_s: float) -> str:
    figures = [f"{now.left_s:.1f} s left"]
    if choice is Choice.DURABLE:
        return f"{figures[0]}: step {now.step} is durable already"
    if now.step_s is not None:
        figures.append(f"step {now.step_s:.1f} s")
    if now.busy_s:
        figures.append(f"the drain is busy for {now.busy_s:.1f} s")
    if now.reaches:
        reach = now.reaches[-1 - lacks]
        rate = f" at {format_bytes(now.size_bytes / reach.drain_s)}/s" if reach.drain_s > 0 else ""
        figures.append(
            f"capture {now.stall_s:.1f} s, drain {format_bytes(now.size_bytes)}{rate} = {reach.drain_s:.1f} s"
        )
    else:
        figures.append("no save was measured yet")
    what = {
        Choice.SAVE: f"saving at step {now.step}",
        Choice.FINISH: f"no new capture; the one of step {now.captured_step} needs {needs_s:.1f} s",
        Choice.TRY: f"saving at step {now.step} needs {needs_s:.1f} s; trying, since nothing is lost by it",
    }[choice]
    where = f", to {now.reaches[-1 - lacks].name} only" if lacks else ""
    return f"{'; '.join(figures)}: {what}{where}"

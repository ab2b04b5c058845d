"""What can still be made durable before a deadline, and how far: a pure function of measured figures.

No clock and no store here: `rank_exit.py` measures, asks, and does what is decided. All ranks have to do the same, as
`agreement.py` sees to: a rank that would rather not save says so, and then none does.
"""

from dataclasses import dataclass
from enum import StrEnum

from cordee.units import format_bytes

# What a save takes differs from one to the next: a shared disk, a network, a neighbour. A new capture is only made when
# there is this many times what the last one took, as long as there is another capture to fall back to.
ROOM = 1.25
# Before the drains bring what is held, all ranks hear that they leave, and each drain looks what the others hold.
RESCUE_S = 1.0


class Choice(StrEnum):
    """What to do with the time that is left."""

    DURABLE = "durable"  # nothing: this very step is durable already
    SAVE = "save"  # a new capture at the boundary where the ranks meet
    FINISH = "finish"  # no new one: bring the newest capture that is in memory
    TRY = "try"  # a new one will hardly make it, and there is nothing else that could


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTiming:
    """One of the places of the job's checkpoints.

    Attributes:
        name: as the job calls it.
        upload_s: from a capture until it is durable in this one and all nearer ones; None: not measured.
    """

    name: str
    upload_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when a notice comes.

    Attributes:
        left_s: until this process has to be gone.
        step: at whose boundary the ranks meet.
        boundary_s: until they do, as far as can be told: what is left of the step that runs.
        step_s: what a step takes; None: none was measured.
        stall_s: what a capture takes.
        size_bytes: of a capture, all ranks together.
        stores: nearest first, the one that lasts at the end.
        busy_s: until the drain is done with what it has.
        uploading_step: of the capture that the drain has; None: it has none.
        held_step: of the newest capture that only lies in memory.
        durable_step: of the newest checkpoint in all stores.
        near_step: of the newest checkpoint in some of them.
        machine_stays: what lies on the machine's own disks is there afterwards.
    """

    left_s: float
    step: int
    stores: tuple[LevelTiming, ...]
    boundary_s: float = 0.0
    step_s: float | None = None
    stall_s: float = 0.0
    size_bytes: int = 0
    busy_s: float = 0.0
    uploading_step: int | None = None
    held_step: int | None = None
    durable_step: int = 0
    near_step: int = 0
    machine_stays: bool = True

    @property
    def kept_step(self) -> int:
        """What a new attempt would start with."""
        return max(self.durable_step, self.near_step) if self.machine_stays else self.durable_step


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitPlan:
    """What to do.

    Attributes:
        reach: to how many stores, the nearest first.
        needs_s: what it takes, from now on, by the figures.
        turn_s: with less than this left the boundary is waited for no longer: what is held has to go now.
        says: the decision with its numbers.
    """

    choice: Choice
    reach: int
    needs_s: float
    turn_s: float
    says: str


def plan(now: Situation) -> ExitPlan:
    """Choose what loses the fewest steps; of what loses the same, what reaches farthest."""
    if now.durable_step == now.step:
        return _plan(now, Choice.DURABLE, len(now.stores), 0.0)
    if reach := next((each for each in reaches(now) if fits(now, each)), 0):
        return _plan(now, Choice.SAVE, reach, save_s(now, reach))
    if now.kept_step == now.step:
        return _plan(now, Choice.DURABLE, len(now.stores) - 1, 0.0)
    if (needs_s := finish_s(now)) is not None:
        return _plan(now, Choice.FINISH, len(now.stores), needs_s)
    nearest = reaches(now)[-1]
    return _plan(now, Choice.TRY, nearest, save_s(now, nearest))


def reaches(now: Situation) -> list[int]:
    """To how many stores a save may go and be worth something, all of them first."""
    nearest = 1 if now.machine_stays else len(now.stores)
    farther = range(len(now.stores), nearest - 1, -1)
    return [reach for reach in farther if reach == len(now.stores) or now.kept_step < now.step]


def fits(now: Situation, reach: int) -> bool:
    """Whether a new capture can be brought so far. Without any measure nothing speaks against it."""
    if now.stores[reach - 1].upload_s is None and any(store.upload_s is not None for store in now.stores):
        return False
    waits_s = max(now.boundary_s, now.busy_s)
    return waits_s + ROOM * (save_s(now, reach) - waits_s) <= now.left_s


def save_s(now: Situation, reach: int) -> float:
    """A new capture begins at the boundary, and when the drain has done what it has."""
    return max(now.boundary_s, now.busy_s) + now.stall_s + (now.stores[reach - 1].upload_s or 0.0)


def finish_s(now: Situation) -> float | None:
    """Until the newest capture in memory that can make it has made it; None: there is none."""
    held = now.held_step is not None and now.held_step > max(now.kept_step, now.uploading_step or 0)
    if held and (needs_s := now.busy_s + _held_s(now)) <= now.left_s:
        return needs_s
    if now.uploading_step is not None and now.uploading_step > now.kept_step and now.busy_s <= now.left_s:
        return now.busy_s
    return None


def _held_s(now: Situation) -> float:
    """What is held goes to all stores."""
    return now.stores[-1].upload_s or 0.0


def _plan(now: Situation, choice: Choice, reach: int, needs_s: float) -> ExitPlan:
    held = now.held_step is not None and now.held_step > max(now.kept_step, now.uploading_step or 0)
    turn_s = now.busy_s + RESCUE_S + ROOM * _held_s(now) if held else 0.0
    return ExitPlan(choice=choice, reach=reach, needs_s=needs_s, turn_s=turn_s, says=_says(now, choice, reach, needs_s))


def _says(now: Situation, choice: Choice, reach: int, needs_s: float) -> str:
    figures = [f"{now.left_s:.1f} s left"]
    where = f", to {now.stores[reach - 1].name} only" if 0 < reach < len(now.stores) else ""
    if choice is Choice.DURABLE:
        return f"{figures[0]}: step {now.step} is durable already" + (" in the nearer stores" if where else "")
    if now.step_s is not None:
        figures.append(f"step {now.step_s:.1f} s")
    if now.busy_s:
        figures.append(f"the drain is busy for {now.busy_s:.1f} s")
    if (upload_s := now.stores[reach - 1].upload_s) is not None:
        rate = f" at {format_bytes(now.size_bytes / upload_s)}/s" if upload_s > 0 else ""
        figures.append(f"capture {now.stall_s:.1f} s, drain {format_bytes(now.size_bytes)}{rate} = {upload_s:.1f} s")
    else:
        figures.append("no save was measured yet")
    captured = max(now.held_step or 0, now.uploading_step or 0)
    what = {
        Choice.SAVE: f"saving at step {now.step}",
        Choice.FINISH: f"no new capture; the one of step {captured} needs {needs_s:.1f} s",
        Choice.TRY: f"saving at step {now.step} needs {needs_s:.1f} s; trying, since nothing is lost by it",
    }[choice]
    return f"{'; '.join(figures)}: {what}{where}"

"""Choose the last save before a deadline, and its levels: a pure function of measured figures.

`rank_exit.py` measures, calls this, and carries the decision out. All ranks have to do the same, and `agreement.py`
ensures it: if one rank vetoes a save, no rank makes it.
"""

from dataclasses import dataclass
from enum import StrEnum

from cordee.units import format_bytes

# The time of a save varies with disks, networks and neighbours. While an older capture can be uploaded instead, a new
# one is made only if this many times the duration of the last save is left.
MARGIN = 1.25
# Time before the uploaders begin a rescue: all ranks learn that they leave, and each uploader reads the others' lists.
RESCUE_S = 1.0


class Choice(StrEnum):
    """The choice of the last save before the deadline."""

    DURABLE = "durable"  # do nothing: this very step is durable
    SAVE = "save"  # make a new capture at the boundary where the ranks meet
    FINISH = "finish"  # make no new one, and upload the newest capture in memory
    TRY = "try"  # make a new one, though it will hardly be in time: there is no other


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTiming:
    """One storage level of the job's checkpoints.

    Attributes:
        name: as in `to`.
        upload_s: from a capture until it is durable in this level and all nearer ones; None: not measured.
    """

    name: str
    upload_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The measured figures when a notice comes.

    Attributes:
        left_s: until this process has to have ended.
        step: at whose boundary the ranks meet.
        levels: nearest first; the last one survives the machine.
        boundary_s: until they meet, as far as can be estimated: the rest of the step that runs.
        step_s: median time of a step; None: none was measured.
        stall_s: time of a capture.
        planned_save_s: time of a save in all levels, by the job's plan; None: it has none.
        size_bytes: of a capture, all ranks together.
        busy_s: until the uploader is done with its save.
        uploading_step: of the capture that the uploader has; None: it has none.
        memory_step: of the newest capture that is only in memory.
        durable_step: of the newest checkpoint in all levels.
        near_step: of the newest checkpoint in some of them.
        machine_stays: the machine's own disks can be read afterwards.
    """

    left_s: float
    step: int
    levels: tuple[LevelTiming, ...]
    boundary_s: float = 0.0
    step_s: float | None = None
    stall_s: float = 0.0
    planned_save_s: float | None = None
    size_bytes: int = 0
    busy_s: float = 0.0
    uploading_step: int | None = None
    memory_step: int | None = None
    durable_step: int = 0
    near_step: int = 0
    machine_stays: bool = True

    @property
    def kept_step(self) -> int:
        """Return the step that a new attempt would start with."""
        return max(self.durable_step, self.near_step) if self.machine_stays else self.durable_step

    @property
    def has_newer_in_memory(self) -> bool:
        """Return whether a capture in memory is newer than storage and the uploads."""
        return self.memory_step is not None and self.memory_step > max(self.kept_step, self.uploading_step or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitPlan:
    """The decision.

    Attributes:
        reach: number of levels, nearest first.
        needs_s: estimated time, from now on.
        turn_s: with less time left than this, the boundary is not awaited any longer: captures in memory have to be
            uploaded now. 0: there are none.
        text: the decision with its numbers.
    """

    choice: Choice
    reach: int
    needs_s: float
    turn_s: float
    text: str


def plan(now: Situation) -> ExitPlan:
    """Choose what loses the fewest steps; among equals, what reaches the farthest level."""
    if now.durable_step == now.step:
        return _plan(now, Choice.DURABLE, len(now.levels), 0.0)
    if reach := next((each for each in reaches(now) if fits(now, each)), 0):
        return _plan(now, Choice.SAVE, reach, save_s(now, reach))
    if now.kept_step == now.step:
        return _plan(now, Choice.DURABLE, len(now.levels) - 1, 0.0)
    if (needs_s := finish_s(now)) is not None:
        return _plan(now, Choice.FINISH, len(now.levels), needs_s)
    nearest = reaches(now)[-1]
    return _plan(now, Choice.TRY, nearest, save_s(now, nearest))


def reaches(now: Situation) -> list[int]:
    """Return the reaches with which a save would keep a step that is not kept yet; all levels first."""
    nearest = 1 if now.machine_stays else len(now.levels)
    farther = range(len(now.levels), nearest - 1, -1)
    return [reach for reach in farther if reach == len(now.levels) or now.kept_step < now.step]


def fits(now: Situation, reach: int) -> bool:
    """Return whether a new capture can be uploaded that far in time. Without any figure, assume that it can."""
    if now.levels[reach - 1].upload_s is None and any(level.upload_s is not None for level in now.levels):
        return False
    waits_s = max(now.boundary_s, now.busy_s)
    return waits_s + MARGIN * (save_s(now, reach) - waits_s) <= now.left_s


def save_s(now: Situation, reach: int) -> float:
    """Return the time of a new save, which begins at the boundary, once the uploader is done with its save."""
    return max(now.boundary_s, now.busy_s) + now.stall_s + _upload_s(now, reach)


def finish_s(now: Situation) -> float | None:
    """Return the time until the newest capture in memory that can be durable in time is; None: there is none."""
    if now.has_newer_in_memory and (needs_s := now.busy_s + _upload_s(now, len(now.levels))) <= now.left_s:
        return needs_s
    if now.uploading_step is not None and now.uploading_step > now.kept_step and now.busy_s <= now.left_s:
        return now.busy_s
    return None


def _upload_s(now: Situation, reach: int) -> float:
    """Return the time of an upload that far: as measured; before any save, to all levels as planned; else 0."""
    measured_s = now.levels[reach - 1].upload_s
    if measured_s is None and reach == len(now.levels) and all(level.upload_s is None for level in now.levels):
        return now.planned_save_s or 0.0
    return measured_s or 0.0


def _plan(now: Situation, choice: Choice, reach: int, needs_s: float) -> ExitPlan:
    turn_s = 0.0
    if now.has_newer_in_memory:  # it goes to all levels
        turn_s = now.busy_s + RESCUE_S + MARGIN * _upload_s(now, len(now.levels))
    return ExitPlan(choice=choice, reach=reach, needs_s=needs_s, turn_s=turn_s, text=_text(now, choice, reach, needs_s))


def _text(now: Situation, choice: Choice, reach: int, needs_s: float) -> str:
    figures = [f"{now.left_s:.1f} s left"]
    where = f", to {now.levels[reach - 1].name} only" if 0 < reach < len(now.levels) else ""
    if choice is Choice.DURABLE:
        return f"{figures[0]}: step {now.step} is durable already" + (" in the nearer levels" if where else "")
    if now.step_s is not None:
        figures.append(f"step {now.step_s:.1f} s")
    if now.busy_s:
        figures.append(f"the uploader is busy for {now.busy_s:.1f} s")
    if (upload_s := now.levels[reach - 1].upload_s) is not None:
        rate = f" at {format_bytes(now.size_bytes / upload_s)}/s" if upload_s > 0 else ""
        figures.append(f"capture {now.stall_s:.1f} s, upload {format_bytes(now.size_bytes)}{rate} = {upload_s:.1f} s")
    else:
        planned = f", its plan expects {now.planned_save_s:.1f} s" if now.planned_save_s is not None else ""
        figures.append(f"no save was measured yet{planned}")
    captured = max(now.memory_step or 0, now.uploading_step or 0)
    what = {
        Choice.SAVE: f"saving at step {now.step}",
        Choice.FINISH: f"no new capture; that of step {captured} needs {needs_s:.1f} s",
        Choice.TRY: f"saving at step {now.step} needs {needs_s:.1f} s; trying, since nothing is lost by it",
    }[choice]
    return f"{'; '.join(figures)}: {what}{where}"

"""The verdict on a rehearsal: it passed, or the reason why it did not, with ranks and numbers. Pure."""

import re
from typing import NamedTuple

from cordee.control.rehearsed.fold import AttemptSeen, Rehearsing
from cordee.events import Failure, Outcome, StepsRehearsed
from cordee.units import US_PER_S, plural

TOLERANCE = 1e-4
"""The largest difference between a loss and that of the same step after the resume, as a fraction of the larger one.

Sums on a GPU, and in buckets that change after a resume, are rounded otherwise; another order of the samples, or an
optimizer without its state, changes more.
"""

_MEMORY = ("outofmemoryerror", "out of memory", "cannot allocate memory", "memoryerror", "std::bad_alloc")


_UNSAVED = re.compile(r"\bno checkpoint of step \d+: |\bstep \d+ is not durable: ")


class Verdict(NamedTuple):
    """The answer to whether a rehearsal passed, the reason, and what else is to be known."""

    passed: bool
    why: str
    notes: tuple[str, ...] = ()


def early_verdict(found: Rehearsing) -> Verdict | None:
    """Return the verdict of a rehearsal whose attempt has failed at its notice, though its job would go on."""
    noticed = found.noticed
    if noticed is None or noticed.outcome is None:
        return None
    return _at_notice(noticed, noticed.outcome)


def verdict(found: Rehearsing) -> Verdict:
    """Return the verdict of a rehearsal whose job has ended."""
    noticed, newest = found.noticed, found.newest
    if newest is None:
        return Verdict(False, f"it never started: {found.why}")
    if (early := early_verdict(found)) is not None:
        return early
    if found.ended != "done":
        return Verdict(False, _failed(found, newest))
    if not any(each.entered for each in found.attempts.values()):
        return Verdict(False, "the script never entered cordee.job(), so nothing of it survives a notice")
    if noticed is None:
        return Verdict(
            False, f"the script ended by itself before step {found.steps} and its notice: give it more steps"
        )
    if not newest.ranks:
        return Verdict(False, "the resumed run ended before it had repeated the steps")
    return compare(noticed.ranks, newest.ranks)


def compare(first: dict[int, StepsRehearsed], again: dict[int, StepsRehearsed]) -> Verdict:
    """Compare the steps that ranks ran on past the save with the same steps after the resume."""
    missing = sorted(first.keys() - again.keys())
    if not first or missing or any(first[rank].first_step != again[rank].first_step for rank in first):
        who = f"{_ranks(missing)} reported nothing" if first else "no rank reported its steps before it left"
        return Verdict(False, f"the steps before and after the resume cannot be compared: {who}" if missing or not first
                       else "the resumed run began with another step than the save")  # fmt: skip
    moved = sorted(rank for rank in first if _data(first[rank]) != _data(again[rank]))
    off = {rank: _worst(first[rank], again[rank]) for rank in first}
    rank, worst = max(off.items(), key=lambda each: each[1].off)
    beyond = sorted(rank for rank in off if off[rank].off > TOLERANCE)
    data = f"the position in the data differs ({_names(first, again, moved)} on {_ranks(moved)})" if moved else ""
    if beyond:
        others = f"; {_ranks(beyond)} of {len(first)} differ" if len(first) > 1 else ""
        why = f"the resumed run has another {worst.of}: {worst.again:.6g} instead of {worst.first:.6g} on rank {rank}"
        return Verdict(False, why + others + (f"; {data}" if data else ""))
    if moved:
        return Verdict(False, f"after the resume {data}")
    return Verdict(True, _same(first, worst), _notes(first, again))


class _Difference(NamedTuple):
    """The largest difference of a rank; infinite where only one of two values is there."""

    off: float
    of: str
    first: float
    again: float


def _worst(first: StepsRehearsed, again: StepsRehearsed) -> _Difference:
    """Return the largest difference of the losses; of the weights, if no loss was logged."""
    pairs = [
        (f"loss in step {first.first_step + number}", one, other)
        for number, (one, other) in enumerate(zip(first.losses, again.losses, strict=False))
        if one is not None or other is not None
    ]
    pairs.append(("norm of the weights", first.weights, again.weights))
    return max((_difference(*each) for each in pairs), key=lambda each: each.off)


def _difference(of: str, first: float | None, again: float | None) -> _Difference:
    if first is None and again is None:
        return _Difference(0.0, of, 0.0, 0.0)
    if first is None or again is None:
        return _Difference(float("inf"), of, float("nan") if first is None else first, float("nan"))
    largest = max(abs(first), abs(again))
    return _Difference(abs(first - again) / largest if largest else 0.0, of, first, again)


def _same(first: dict[int, StepsRehearsed], worst: _Difference) -> str:
    steps = max(len(each.losses) for each in first.values())
    has_loss = any(loss is not None for each in first.values() for loss in each.losses)
    what = "losses" if has_loss else "weights"
    exactly = "to the bit" if worst.off == 0 else f"within {worst.off:.1e} (tolerance {TOLERANCE:g})"
    return f"{plural(steps, 'step')} after the resume have the same {what} {exactly}"


def _notes(first: dict[int, StepsRehearsed], again: dict[int, StepsRehearsed]) -> tuple[str, ...]:
    notes = []
    reported = list(first.values())
    if not any(loss is not None for each in reported for loss in each.losses):
        notes.append("no loss was logged, so the weights were compared: job.log(loss=loss) shows more")
    if not any(entry.startswith("data ") for each in reported for entry in each.state):
        notes.append("no sampler or data loader is in the state: its position in the data is the script's affair")
    differ = sorted(rank for rank in first if first[rank].state != again[rank].state)
    if differ:
        notes.append(f"{_names(first, again, differ)} differed after the resume, without another loss so far")
    return tuple(notes)


def _data(reported: StepsRehearsed) -> list[str]:
    return sorted(entry for entry in reported.state if entry.startswith("data "))


def _names(first: dict[int, StepsRehearsed], again: dict[int, StepsRehearsed], ranks: list[int]) -> str:
    """Return the names of the objects that differ on these ranks."""
    entries = {entry for rank in ranks for entry in {*first[rank].state} ^ {*again[rank].state}}
    return ", ".join(sorted({entry.partition(" ")[2].rpartition(" ")[0] for entry in entries}))


def _ranks(ranks: list[int]) -> str:
    """Return ranks in words.

    >>> _ranks([1]), _ranks([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _at_notice(attempt: AttemptSeen, outcome: Outcome) -> Verdict | None:
    """Return the failure of the attempt that got the notice; None: it left as it should."""
    if outcome is Outcome.CHECKPOINTED and attempt.saved_step is not None:
        return None
    if outcome is Outcome.KILLED and "did not leave" in attempt.why:
        return Verdict(False, f"the notice was ignored: it {attempt.why.removeprefix('it ')}")
    if outcome in (Outcome.FAILED, Outcome.LOST) and attempt.failure is not None:
        return Verdict(False, f"it failed at its notice: {_how(attempt.failure, attempt.why)}")
    if attempt.saved_step is None:
        why = _unsaved(attempt.failure) or attempt.why
        return Verdict(False, f"no checkpoint was durable when it had left after its notice: {why}")
    return Verdict(False, f"it left after its notice as {outcome.value}: {attempt.why}")


def _unsaved(failure: Failure | None) -> str | None:
    """Return the line in which a rank said why it could not save; None: there is none."""
    lines = [] if failure is None else [line.strip() for line in failure.tail]
    return next((line.removeprefix("cordee: ")[:300] for line in reversed(lines) if _UNSAVED.search(line)), None)


def _failed(found: Rehearsing, newest: AttemptSeen) -> str:
    after = "after the resume, " if found.noticed is not None and found.noticed is not newest else ""
    if newest.failure is not None:
        return after + _how(newest.failure, newest.why)
    return after + (found.why or newest.why)


def _how(failure: Failure, why: str) -> str:
    """Return how a rank failed, with the line that says why."""
    rank = "a rank" if failure.rank is None else f"rank {failure.rank}"
    lines = [line.strip() for line in failure.tail if line.strip()]
    memory = next((line for line in reversed(lines) if any(word in line.lower() for word in _MEMORY)), None)
    if memory is not None or (failure.signal == 9 and "out of memory" in why):
        return f"{rank} ran out of memory: {(memory or why)[:300]}"
    last = next((line for line in reversed(lines) if not line.startswith("hint:")), "")
    how = f"exit code {failure.exit_code}" if failure.signal is None else f"signal {failure.signal}"
    return f"{rank} failed ({how})" + (f": {last[:300]}" if last else "")


def grace_s(save_us: int, step_us: int | None) -> float:
    """Return the grace period of a job whose save was measured: one and a half saves, once the step that runs is over.

    >>> grace_s(20_000_000, 4_000_000), grace_s(200_000, None)
    (34.0, 5.0)
    """
    return max(GRACE_S_MIN, (1.5 * save_us + (step_us or 0)) / US_PER_S)


GRACE_S_MIN = 5.0

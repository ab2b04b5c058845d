"""MIG instances in the words of an explanation: what is free, what is in the way, and which moves would make room."""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from cordee.events import Job, Lease
from cordee.ids import JobId
from cordee.schedule.placement.defragment import Cut, Gpu, Moves, fewest_moves
from cordee.schedule.placement.entry import Entry
from cordee.schedule.placement.mig import busy_of, geometry_of, has_room, spots
from cordee.schedule.placement.view import Pool
from cordee.schedule.state.state import State
from cordee.units import plural


class InTheWay(NamedTuple):
    """The state of the GPU that is nearest to holding one more instance.

    Attributes:
        text: one clause with the numbers.
        blocking: the jobs whose instances are in the way.
        free: whether enough memory slices are free there, though not together.
    """

    text: str
    blocking: tuple[JobId, ...]
    free: bool


def cuts_of(entries: Iterable[Entry], pool: Collection[object], movable: Collection[tuple[str, int, int]]) -> list[Cut]:
    """Return the GPUs of a pool that are cut; of their instances those in `movable` (node, GPU, start) may move."""
    found = []
    for entry in entries:
        if entry.kind not in pool or entry.node.mig is None:
            continue
        name = entry.node.name
        for gpu, taken in entry.mig:
            pinned = frozenset(each[0] for each in taken if (name, gpu, each[0]) not in movable)
            found.append(Cut((name, gpu), geometry_of(entry.node.mig, gpu), taken, pinned))
    return sorted(found, key=lambda each: each.gpu)


def place_of(lease: Lease) -> tuple[str, int, int]:
    """Return node, GPU and start of the instance of a lease."""
    assert lease.instance is not None, "the lease has no instance"
    return lease.node, lease.gpus[0], lease.instance.start


def in_the_way(state: State, job: Job, candidates: Iterable[Pool]) -> InTheWay:
    """Describe the GPU with the fewest instances in the way of a job's, of those the one with most slices free."""
    kinds = {kind for pool in candidates for kind in pool}
    profile = job.mig or ""
    entries = [each for each in state.nodes.free.entries.values() if has_room(each, job)]
    holders = _holders(state)
    best: tuple[tuple[int, int, Gpu, int], Cut, tuple[int, ...]] | None = None
    for cut in cuts_of(entries, kinds, holders):
        free = cut.geometry.slices - busy_of(cut.taken).bit_count()
        for spot in spots(cut.geometry, (), profile):
            end = spot.start + spot.size
            over = tuple(each[0] for each in cut.taken if each[0] < end and spot.start < each[0] + each[1])
            key = (len(over), -free, cut.gpu, spot.start)
            if best is None or key < best[0]:
                best = key, cut, over
    if best is None:
        return InTheWay("no GPU that is cut has the CPU and host memory that it takes along", (), False)
    (_, minus_free, (node, gpu), _), cut, over = best
    if cut.geometry.fixed is not None:
        count = sum(
            profile in {each[2] for each in (other.geometry.fixed or ())} for other in cuts_of(entries, kinds, ())
        )
        there = (
            f"the {profile} that are there, on {plural(count, 'GPU')}, are leased, and their agents may make no others"
        )
        return InTheWay(there, tuple(holders.values())[:10], False)
    names = [each[2] for each in cut.taken if each[0] in over]
    blocking = tuple(holders[node, gpu, start] for start in over if (node, gpu, start) in holders)
    stand = " and ".join(f"{_a(name)} stands at {start}" for name, start in zip(names, over, strict=True))
    size = next(spot.size for spot in spots(cut.geometry, (), profile))
    text = f"{-minus_free} of {cut.geometry.slices} memory slices of GPU {gpu} of {node} are free, "
    if -minus_free >= size:
        text += f"no {profile}: {stand}{_starts(cut, profile)}"
        return InTheWay(text + _advice(state, job, kinds, holders), blocking, True)
    return InTheWay(text + f"and it takes {size}", tuple(holders.values())[:10], False)


def _starts(cut: Cut, profile: str) -> str:
    """Return where a profile may begin, if that is not everywhere."""
    starts = [str(spot.start) for spot in spots(cut.geometry, (), profile)]
    return f", and it begins at {' or '.join(starts)} only"


def _advice(state: State, job: Job, kinds: Collection[object], holders: dict[tuple[str, int, int], JobId]) -> str:
    """Return a clause with the fewest moves that make room; "" if there are none."""
    cuts = cuts_of(state.nodes.free.entries.values(), kinds, holders)
    found = fewest_moves(cuts, job.mig or "")
    return "" if found is None or not found.moved else f"; room is made by {_moves(found, holders)}"


def _moves(found: Moves, holders: dict[tuple[str, int, int], JobId]) -> str:
    parts = []
    for each in found.moved:
        there = f"slice {each.to_start}" + (f" of GPU {each.to[1]}" if each.to != each.gpu else "")
        there += f" of {each.to[0]}" if each.to[0] != each.gpu[0] else ""
        parts.append(f"moving {holders[*each.gpu, each.start]} to {there}")
    return " and ".join(parts)


def _holders(state: State) -> dict[tuple[str, int, int], JobId]:
    """Return the job of each instance, the oldest first."""
    return dict(_held(state))


def _held(state: State) -> Iterator[tuple[tuple[str, int, int], JobId]]:
    for attempt in sorted(state.attempts.values(), key=lambda each: (each.placed_us, each.job.job_id)):
        for lease in attempt.held:
            if lease.instance is not None:
                yield place_of(lease), attempt.job.job_id


def _a(name: str) -> str:
    """Return a profile with its article.

    >>> _a("1g.10gb"), _a("8g.10gb")
    ('a 1g.10gb', 'an 8g.10gb')
    """
    return f"{'an' if name.startswith('8') else 'a'} {name}"

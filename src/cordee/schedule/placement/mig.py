"""MIG instances: where a profile may begin on a GPU that is cut, and which of the places harms later instances least.

A **board** is a GPU's geometry and its leased instances; GPUs with equal boards are interchangeable, and a pool has few
boards, so a search looks at boards, not at GPUs. Two instances never overlap, an instance begins only where its
profile may (`MigProfile.starts`), and compute slices never exceed those of the GPU.

The **worth** of a board is, summed over the profiles, the part of the GPU that instances of this one profile could
still fill. Of all places the one that costs the least worth is taken, so a 1g goes where no 4g or 3g can begin any
more, and into the slice that only a 1g can use. A GPU without instances is cut only if no other has a place.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from typing import NamedTuple

from cordee.events import Job, Lease, MigGpus, MigInstance, MigProfile
from cordee.schedule.placement.entry import Entry, Taken, host_request


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """All that decides where instances may begin on a GPU; `geometry_of` returns one object for equal ones."""

    profiles: tuple[MigProfile, ...]
    slices: int
    compute: int
    fixed: tuple[tuple[int, int, str], ...] | None  # (start, size, profile), if there are these instances alone


Board = tuple[Geometry, Taken]


def geometry_of(cuts: MigGpus, gpu: int) -> Geometry:
    """Return the geometry of one GPU of a node."""
    there = cuts.fixed
    fixed = None if there is None else tuple(sorted(each[1:] for each in there if each[0] == gpu))
    return _geometry(cuts.profiles, cuts.slices, cuts.compute, fixed)


@cache
def _geometry(
    profiles: tuple[MigProfile, ...], slices: int, compute: int, fixed: tuple[tuple[int, int, str], ...] | None
) -> Geometry:
    return Geometry(profiles, slices, compute, fixed)


class Spot(NamedTuple):
    """A legal place of an instance on a board."""

    start: int
    size: int


@lru_cache(maxsize=1 << 16)
def spots(geometry: Geometry, taken: Taken, profile: str) -> tuple[Spot, ...]:
    """Return the legal places of one more instance of a profile.

    >>> four = MigProfile(name="4g.40gb", size=4, compute=4, starts=(0,), instances=1)
    >>> one = MigProfile(name="1g.10gb", size=1, compute=1, starts=(0, 1, 2, 3, 4, 5, 6), instances=7)
    >>> here = geometry_of(MigGpus(gpus=(0,), profiles=(four, one)), 0)
    >>> spots(here, ((1, 1, "1g.10gb"),), "4g.40gb")
    ()
    >>> [each.start for each in spots(here, ((0, 4, "4g.40gb"),), "1g.10gb")]
    [4, 5, 6]
    """
    found = next((each for each in geometry.profiles if each.name == profile), None)
    if geometry.fixed is not None:
        return tuple(Spot(each[0], each[1]) for each in geometry.fixed if each[2] == profile and each not in taken)
    if found is None or sum(each[2] == profile for each in taken) >= found.instances:
        return ()
    compute = {each.name: each.compute for each in geometry.profiles}
    if sum(compute.get(each[2], 0) for each in taken) + found.compute > geometry.compute:
        return ()
    busy = busy_of(taken)
    wide = (1 << found.size) - 1
    return tuple(Spot(start, found.size) for start in found.starts if not busy & wide << start)


def busy_of(taken: Taken) -> int:
    """Return the mask of the memory slices of instances."""
    busy = 0
    for start, size, _ in taken:
        busy |= (1 << size) - 1 << start
    return busy


def with_one(taken: Taken, spot: Spot, profile: str) -> Taken:
    """Return the instances with one more."""
    return tuple(sorted((*taken, (spot.start, spot.size, profile))))


@lru_cache(maxsize=1 << 16)
def worth(geometry: Geometry, taken: Taken) -> int:
    """Return the thousandths of the GPU that instances of one profile could still fill, summed over the profiles."""
    if geometry.fixed is not None:
        return sum(1000 * each[1] // geometry.slices for each in geometry.fixed if each not in taken)
    total = 0
    for each in geometry.profiles:
        count, now = 0, taken
        for start in each.starts:
            spot = Spot(start, each.size)
            if spot in spots(geometry, now, each.name):
                count, now = count + 1, with_one(now, spot, each.name)
        total += 1000 * count * each.size // geometry.slices
    return total


@lru_cache(maxsize=1 << 16)
def best(geometry: Geometry, taken: Taken, profile: str) -> tuple[int, Spot] | None:
    """Return the place of a profile that costs least worth, with that cost; None if it has none."""
    there = spots(geometry, taken, profile)
    if not there:
        return None
    before = worth(geometry, taken)
    # A later start among equals keeps slice 0, where the largest profiles begin.
    return min(
        ((before - worth(geometry, with_one(taken, each, profile)), each) for each in there),
        key=lambda each: (each[0], -each[1].start),
    )


class Boards:
    """The GPUs of one kind on which instances may be placed, by board."""

    __slots__ = ("by_board",)

    def __init__(self) -> None:
        self.by_board: dict[Board, list[tuple[str, int]]] = {}

    def count(self, entry: Entry, sign: int) -> None:
        """Add the GPUs of an entry, or take them out."""
        name, cuts = entry.node.name, entry.node.mig
        assert cuts is not None, f"{name} has instances and no MIG GPUs"
        for gpu, taken in entry.mig:
            board = (geometry_of(cuts, gpu), taken)
            if sign > 0:
                insort(self.by_board.setdefault(board, []), (name, gpu))
                continue
            there = self.by_board[board]
            del there[bisect_left(there, (name, gpu))]
            if not there:
                del self.by_board[board]

    def find(self, job: Job, entries: Mapping[str, Entry]) -> tuple[tuple[object, ...], Lease] | None:
        """Return the best place for a job's instance with its rank, the least is the best; None if there is none.

        GPUs that have instances go first, then the least cost; on equal boards the node with the fewest free GPUs.
        """
        profile = job.mig
        assert profile is not None, f"{job.job_id} needs no instance"
        found = []
        for board in self.by_board:
            place = best(*board, profile)
            if place is not None and 1000 * place[1].size // board[0].slices == job.gpu_milli:
                found.append(((not board[1], place[0]), board, place[1]))
        for rank, equal in groupby(sorted(found, key=lambda each: each[0]), key=lambda each: each[0]):
            there = (
                (entry.node.micro_usd_per_gpu_hour, entry.free.bit_count(), name, gpu, spot)
                for _, board, spot in equal
                for name, gpu in self.by_board[board]
                if has_room(entry := entries[name], job)
            )
            chosen = min(there, default=None)
            if chosen is not None:
                price, free, name, gpu, spot = chosen
                return (price, *rank, free, name, gpu), lease_on(entries[name], gpu, spot, profile)
        return None

    def value(self) -> object:
        """Return a copy, to compare."""
        return {board: tuple(each) for board, each in self.by_board.items()}


def has_room(entry: Entry, job: Job) -> bool:
    """Return whether a node has the CPU and memory that a job takes along."""
    cpu_milli, memory_bytes = host_request(job, 1)
    return (entry.cpu_milli is None or entry.cpu_milli >= cpu_milli) and (
        entry.memory_bytes is None or entry.memory_bytes >= memory_bytes
    )


def lease_on(entry: Entry, gpu: int, spot: Spot, profile: str) -> Lease:
    """Return the lease of an instance."""
    cuts = entry.node.mig
    assert cuts is not None, f"{entry.node.name} has no MIG GPUs"
    instance = MigInstance(profile=profile, start=spot.start, size=spot.size)
    return Lease(node=entry.node.name, gpus=(gpu,), milli=cuts.milli(spot.size), instance=instance)


def first_on(entry: Entry, job: Job) -> Lease | None:
    """Return the lease of a job's instance on the first GPU of a node that is free as a whole; None if it has none."""
    cuts, profile = entry.node.mig, job.mig
    for gpu, taken in entry.mig:
        if cuts is not None and profile is not None and not taken and entry.free >> gpu & 1:
            place = best(geometry_of(cuts, gpu), (), profile)
            if place is not None and cuts.milli(place[1].size) == job.gpu_milli:
                return lease_on(entry, gpu, place[1], profile)
    return None


def could_ever(entry: Entry, job: Job) -> bool:
    """Return whether a node could hold the job's instance if nothing were leased on it."""
    cuts, profile = entry.node.mig, job.mig
    if cuts is None or profile is None:
        return False
    gpus = (gpu for gpu in cuts.gpus if gpu not in entry.node.unavailable)
    places = (spot for gpu in gpus for spot in spots(geometry_of(cuts, gpu), (), profile))
    return any(cuts.milli(spot.size) == job.gpu_milli for spot in places) and has_room(
        entry._replace(cpu_milli=entry.node.cpu_milli, memory_bytes=entry.node.memory_bytes), job
    )

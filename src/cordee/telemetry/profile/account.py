"""The time of each rank by what it was spent on: compute, communication, exposed, idle; by class, kernel, stream, step.

It turns the columns of a profile into plain values to print, compare and write as JSON. A profile without a device is
accounted by the self times of its threads, with the same figures.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cordee.telemetry.profile.defects import Defect, Defects
from cordee.telemetry.profile.host import NOT_LAUNCHED, IdleGaps, idle, launches_of, self_times
from cordee.telemetry.profile.kernels import KernelClass, KernelTable, Kind
from cordee.telemetry.profile.read import NONE, Ops, Profile, track_label
from cordee.telemetry.profile.sweep import BIT, US, Breakdown, Sweep, sweep

Side = Literal["device", "host", "tracks"]
LONGEST = 5
# Kineto rounds times to the ticks of its clock, old files to whole microseconds.
OVERLAP_NS_MIN = 1_000
_STEP = re.compile(r"ProfilerStep#(\d+)")


@dataclass(frozen=True, slots=True)
class ClassRow:
    """Kernels of one class: the sum of their times, and the exposed part of it."""

    kernel_class: KernelClass
    count: int
    total_us: float
    exposed_us: float


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Kernels of one name."""

    name: str
    kernel_class: KernelClass
    count: int
    total_us: float
    longest_us: float
    exposed_us: float


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One stream or thread: its busy time, by kind; `strip` is drawn in the picture."""

    name: str
    count: int
    busy_us: float
    kinds_us: dict[Kind, float]
    strip: Sweep


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """One step of the profiler on the device: from its first operation to that of the next step."""

    number: int
    start_us: float
    time: Breakdown


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives of one rank: their keys, which are the same on all ranks, their lengths and steps."""

    key: tuple[tuple[str, int], ...]
    length_us: tuple[float, ...]
    step: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank. Sums count kernels that run side by side twice; `time` counts no moment twice."""

    label: str
    rank: int
    source: str
    side: Side
    gpu: str | None
    time: Breakdown
    classes: tuple[ClassRow, ...]
    kernels: tuple[KernelRow, ...]
    streams: tuple[StreamRow, ...]
    idle: IdleGaps
    steps: tuple[ProfiledStep, ...]
    collectives: Collectives
    swept: Sweep
    defects: tuple[Defect, ...]

    @property
    def kernels_us(self) -> float:
        """The sum over all kernels."""
        return sum(row.total_us for row in self.classes)

    @property
    def communication_kernels_us(self) -> float:
        """The sum over kernels that communicate."""
        return sum(row.total_us for row in self.classes if row.kernel_class.communicates)

    @property
    def waiting_kernels_us(self) -> float:
        """The sum over kernels that only wait."""
        return sum(row.total_us for row in self.classes if row.kernel_class.kind == "waiting")


def account(profile: Profile, table: KernelTable, order: int = 0) -> list[RankReport]:
    """Return a report for each rank of a file, none if nothing ran; `order` is the rank where the file has none."""
    defects = Defects()
    for defect in profile.defects:
        defects.note(defect.kind, defect.example, defect.count)
    classes = [table.of(name.text, name.category) for name in profile.names]
    texts = np.array([name.text for name in profile.names], object)
    side: Side = "tracks" if profile.plain else "device"
    ops = profile.device
    if not len(ops) and len(profile.host):
        side, ops = "host", self_times(profile.host, texts, defects)
    if not len(ops):
        return []
    place = [track.pid for track in profile.tracks]
    owners = sorted({place[track] for track in np.unique(ops.track).tolist()}, key=lambda each: (str(type(each)), each))
    reports = []
    for number, owner in enumerate(owners):
        tracks = [track for track, pid in enumerate(place) if pid == owner]
        own = ops.where(np.isin(ops.track, tracks))
        rank = _rank(profile, order, number, owner, alone=len(owners) == 1)
        own_defects = defects if not number else Defects()  # The file's defects belong to its first rank.
        reports.append(_report(profile, own, classes, own_defects, side=side, rank=rank, owner=owner))
    return reports


def _rank(profile: Profile, order: int, number: int, owner: int | str, *, alone: bool) -> int:
    if alone:
        return order if profile.about.rank is None else profile.about.rank
    return owner if isinstance(owner, int) and profile.plain else number


def _report(
    profile: Profile, ops: Ops, classes: list[KernelClass], defects: Defects, *, side: Side, rank: int, owner: int | str
) -> RankReport:
    _note_overlaps(profile, ops, defects)
    bit = np.array([BIT[each.kind] for each in classes], np.uint8)[ops.name]
    # Tracks of one file share its clock: a rank is idle before its first and after its last operation.
    whole = (int(profile.device.start_ns.min()), int(profile.device.end_ns.max())) if side == "tracks" else None
    swept = sweep(ops, bit, whole)
    exposed = swept.exposed_ns(ops)
    origin = int(swept.edge_ns[0])
    talks = np.array([each.communicates for each in classes])[ops.name]
    exposed = np.where(talks, exposed, 0.0)
    windows = _windows(profile, ops, swept) if side == "device" else []
    label = profile.process_names.get(owner, f"rank {rank}") if side == "tracks" else f"rank {rank}"
    gpu = None
    if side == "device" and (gpus := profile.about.gpus):
        gpu = gpus[owner] if isinstance(owner, int) and 0 <= owner < len(gpus) else gpus[0]
    kernels = _kernel_rows(profile, ops, classes, exposed)
    return RankReport(
        label=label, rank=rank, source=profile.path.name, side=side, gpu=gpu, time=swept.time(),
        classes=_class_rows(kernels), kernels=kernels, streams=_stream_rows(profile, ops, bit, whole),
        idle=idle(profile, ops, swept, LONGEST),
        steps=tuple(
            ProfiledStep(number, (start - origin) / US, swept.time(start, end)) for number, start, end in windows
        ),
        collectives=_collectives(profile, ops, classes, windows), swept=swept, defects=defects.found(),
    )  # fmt: skip


def _note_overlaps(profile: Profile, ops: Ops, defects: Defects) -> None:
    """Note operations that overlap on one stream, whose times are wrong: a stream runs one at a time."""
    for track in np.unique(ops.track).tolist():
        own = ops.where(ops.track == track)
        over = np.maximum.accumulate(own.end_ns)[:-1] - own.start_ns[1:]
        wrong = np.flatnonzero((over > OVERLAP_NS_MIN) & (own.length_ns[1:] > 0))
        if len(wrong):
            name = profile.names[own.name[wrong[0] + 1]].text
            example = f"{name!r} on {track_label(profile, track)} starts {over[wrong[0]] / US:g} us too early"
            defects.note("overlapping durations", example, len(wrong))


def _kernel_rows(
    profile: Profile, ops: Ops, classes: list[KernelClass], exposed_ns: NDArray[np.float64]
) -> tuple[KernelRow, ...]:
    size = len(profile.names)
    count = np.bincount(ops.name, minlength=size)
    total = np.bincount(ops.name, ops.length_ns, minlength=size) / US
    bare = np.bincount(ops.name, exposed_ns, minlength=size) / US
    longest = np.zeros(size, np.int64)
    np.maximum.at(longest, ops.name, ops.length_ns)
    rows = [
        KernelRow(
            profile.names[at].text, classes[at], int(count[at]), float(total[at]), float(longest[at]) / US,
            float(bare[at]),
        )
        for at in np.flatnonzero(count).tolist()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.total_us, row.name)))


def _class_rows(kernels: tuple[KernelRow, ...]) -> tuple[ClassRow, ...]:
    found: dict[KernelClass, ClassRow] = {}
    for row in kernels:
        before = found.get(row.kernel_class, ClassRow(row.kernel_class, 0, 0.0, 0.0))
        total_us, exposed_us = before.total_us + row.total_us, before.exposed_us + row.exposed_us
        found[row.kernel_class] = ClassRow(row.kernel_class, before.count + row.count, total_us, exposed_us)
    return tuple(sorted(found.values(), key=lambda row: (-row.total_us, row.kernel_class.name)))


def _stream_rows(
    profile: Profile, ops: Ops, bit: NDArray[np.uint8], whole: tuple[int, int] | None
) -> tuple[StreamRow, ...]:
    rows = []
    for track in np.unique(ops.track).tolist():
        chosen = ops.track == track
        own, bits = ops.where(chosen), bit[chosen]
        strip = sweep(own, bits, whole)
        kinds = {kind: float(own.length_ns[bits == each].sum()) / US for kind, each in BIT.items()}
        rows.append(StreamRow(track_label(profile, track), len(own), strip.time().busy_us, kinds, strip))
    return tuple(sorted(rows, key=lambda row: (-row.busy_us, row.name)))


def _windows(profile: Profile, ops: Ops, swept: Sweep) -> list[tuple[int, int, int]]:
    """Return the profiler's steps on the device: number, start, end. The launch decides on the step."""
    marks = [
        (int(found[1]), int(profile.marks.start_ns[row]), int(profile.marks.end_ns[row]))
        for row, name in enumerate(profile.marks.name.tolist())
        if (found := _STEP.fullmatch(profile.names[name].text))
    ]
    begin, _ = launches_of(ops, profile.launches)
    by = np.where(begin == NOT_LAUNCHED, ops.start_ns, begin)
    firsts = []
    for number, start, end in marks:
        own = ops.start_ns[(by >= start) & (by < end)]
        if len(own):
            firsts.append((int(own[0]), number))
    if not firsts:
        return []
    firsts.sort()
    ends = [*(start for start, _ in firsts[1:]), int(swept.edge_ns[-1])]
    return [(number, start, end) for (start, number), end in zip(firsts, ends, strict=True)]


def _collectives(
    profile: Profile, ops: Ops, classes: list[KernelClass], windows: list[tuple[int, int, int]]
) -> Collectives:
    """Return the collectives of matched classes; the key is the kind and the number of those before it."""
    matched = np.array([each.communicates and each.matched for each in classes])[ops.name]
    own = ops.where(matched)
    starts = np.array([start for _, start, _ in windows], np.int64)
    at = np.searchsorted(starts, own.start_ns, side="right") - 1
    seen: dict[str, int] = {}
    keys = []
    for name, group in zip(own.name.tolist(), own.group.tolist(), strict=True):
        what = profile.groups[group] if group != NONE else short_name(profile.names[name].text)
        number = seen.get(what, 0)
        seen[what] = number + 1
        keys.append((what, number))
    steps = tuple(windows[each][0] if each >= 0 else None for each in at.tolist())
    return Collectives(tuple(keys), tuple((own.length_ns / US).tolist()), steps)


def short_name(name: str) -> str:
    """Return a kernel's name without its parameters, which may differ between ranks.

    >>> short_name("void deep_ep::internode::combine<false, 8>(int4*, float*)")
    'deep_ep::internode::combine'
    """
    bare = re.sub(r"^void\s+", "", name)
    while (less := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = less
    return bare.split("(")[0].strip() or name

"""The time of each rank by what it was spent on: compute, communication, exposed, idle; by class, kernel, stream, step.

Columns of a profile come in, plain values that can be printed, compared and written as JSON go out. A profile without a
device is accounted by the self times of its threads, with the same figures.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cordee.telemetry.profile.faults import Fault, Faults
from cordee.telemetry.profile.host import NOT_LAUNCHED, Idle, idle, launches_of, self_times
from cordee.telemetry.profile.kernels import Class, KernelTable, Kind
from cordee.telemetry.profile.read import NONE, Ops, Profile, lane_label
from cordee.telemetry.profile.sweep import BIT, US, Sweep, Time, sweep

Side = Literal["device", "host", "lanes"]
LONGEST = 5
# Kineto rounds times to its clock's ticks; old files to whole microseconds.
OVERLAP_NS_MIN = 1_000
_STEP = re.compile(r"ProfilerStep#(\d+)")


@dataclass(frozen=True, slots=True)
class ClassRow:
    """Kernels of one class: the sum of their times, and how much of it nothing hid."""

    belongs: Class
    count: int
    total_us: float
    exposed_us: float


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Kernels of one name."""

    name: str
    belongs: Class
    count: int
    total_us: float
    longest_us: float
    exposed_us: float


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One stream, or one thread: how long something ran on it, and of what kind; `strip` is for drawing."""

    name: str
    count: int
    busy_us: float
    kinds_us: dict[Kind, float]
    strip: Sweep


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the profiler, on the device: from its first operation to that of the next step."""

    number: int
    start_us: float
    time: Time


@dataclass(frozen=True, slots=True)
class Collectives:
    """Communication that peers take part in too: which it is, how long it took here, in which step."""

    key: tuple[tuple[str, int], ...]
    length_us: tuple[float, ...]
    step: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank. Sums count kernels side by side twice; `time` counts none twice."""

    label: str
    rank: int
    source: str
    side: Side
    gpu: str | None
    time: Time
    kernels_us: float
    communication_kernels_us: float
    waiting_kernels_us: float
    classes: tuple[ClassRow, ...]
    kernels: tuple[KernelRow, ...]
    streams: tuple[StreamRow, ...]
    idle: Idle
    steps: tuple[Step, ...]
    collectives: Collectives
    swept: Sweep
    faults: tuple[Fault, ...]


def account(profile: Profile, table: KernelTable, order: int = 0) -> list[RankReport]:
    """A report for each rank of a profile, none if nothing ran; `order` counts files that do not tell their rank."""
    faults = Faults()
    for fault in profile.faults:
        faults.note(fault.kind, fault.example, fault.count)
    classes = [table.of(name.text, name.category) for name in profile.names]
    texts = np.array([name.text for name in profile.names], object)
    side: Side = "lanes" if profile.plain else "device"
    ops = profile.device
    if not len(ops) and len(profile.host):
        side, ops = "host", self_times(profile.host, texts, faults)
    if not len(ops):
        return []
    place = [lane.pid for lane in profile.lanes]
    owners = sorted({place[lane] for lane in np.unique(ops.lane).tolist()}, key=lambda each: (str(type(each)), each))
    reports = []
    for number, owner in enumerate(owners):
        lanes = [lane for lane, pid in enumerate(place) if pid == owner]
        own = ops.where(np.isin(ops.lane, lanes))
        rank = _rank(profile, order, number, owner, alone=len(owners) == 1)
        told = faults if not number else Faults()  # Those of the file go with its first rank.
        reports.append(_report(profile, own, classes, told, side=side, rank=rank, owner=owner))
    return reports


def _rank(profile: Profile, order: int, number: int, owner: int | str, *, alone: bool) -> int:
    if alone:
        return order if profile.rank is None else profile.rank
    return owner if isinstance(owner, int) and profile.plain else number


def _report(
    profile: Profile, ops: Ops, classes: list[Class], faults: Faults, *, side: Side, rank: int, owner: int | str
) -> RankReport:
    _note_overlaps(profile, ops, faults)
    bit = np.array([BIT[each.kind] for each in classes], np.uint8)[ops.name]
    # Lanes of one file share its clock: a rank that has not begun, or is done, stands idle.
    whole = (int(profile.device.start_ns.min()), int(profile.device.end_ns.max())) if side == "lanes" else None
    swept = sweep(ops, bit, whole)
    exposed = swept.exposed_ns(ops)
    origin = int(swept.edge_ns[0])
    talks = np.array([each.communicates for each in classes])[ops.name]
    exposed = np.where(talks, exposed, 0.0)
    windows = _windows(profile, ops, swept) if side == "device" else []
    label = profile.process_names.get(owner, f"rank {rank}") if side == "lanes" else f"rank {rank}"
    gpu = None
    if side == "device" and profile.gpus:
        gpu = profile.gpus[owner] if isinstance(owner, int) and 0 <= owner < len(profile.gpus) else profile.gpus[0]
    kernels = _kernels(profile, ops, classes, exposed)
    return RankReport(
        label=label, rank=rank, source=profile.path.name, side=side, gpu=gpu, time=swept.time(),
        kernels_us=float(ops.length_ns.sum()) / US,
        communication_kernels_us=float(ops.length_ns[talks].sum()) / US,
        waiting_kernels_us=float(ops.length_ns[bit == BIT["waiting"]].sum()) / US,
        classes=_by_class(kernels), kernels=kernels, streams=_streams(profile, ops, bit, whole),
        idle=idle(profile, ops, swept, LONGEST),
        steps=tuple(Step(number, (start - origin) / US, swept.time(start, end)) for number, start, end in windows),
        collectives=_collectives(profile, ops, classes, windows), swept=swept, faults=faults.noted(),
    )  # fmt: skip


def _note_overlaps(profile: Profile, ops: Ops, faults: Faults) -> None:
    """Streams do one thing at a time: where they seem not to, somebody's times are wrong."""
    for lane in np.unique(ops.lane).tolist():
        own = ops.where(ops.lane == lane)
        over = np.maximum.accumulate(own.end_ns)[:-1] - own.start_ns[1:]
        wrong = np.flatnonzero((over > OVERLAP_NS_MIN) & (own.length_ns[1:] > 0))
        if len(wrong):
            name = profile.names[own.name[wrong[0] + 1]].text
            told = f"{name!r} on {lane_label(profile, lane)} begins {over[wrong[0]] / US:g} us before its turn"
            faults.note("overlapping durations", told, len(wrong))


def _kernels(
    profile: Profile, ops: Ops, classes: list[Class], exposed_ns: NDArray[np.float64]
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


def _by_class(kernels: tuple[KernelRow, ...]) -> tuple[ClassRow, ...]:
    found: dict[Class, ClassRow] = {}
    for row in kernels:
        before = found.get(row.belongs, ClassRow(row.belongs, 0, 0.0, 0.0))
        found[row.belongs] = ClassRow(
            row.belongs, before.count + row.count, before.total_us + row.total_us, before.exposed_us + row.exposed_us
        )
    return tuple(sorted(found.values(), key=lambda row: (-row.total_us, row.belongs.name)))


def _streams(
    profile: Profile, ops: Ops, bit: NDArray[np.uint8], whole: tuple[int, int] | None
) -> tuple[StreamRow, ...]:
    rows = []
    for lane in np.unique(ops.lane).tolist():
        chosen = ops.lane == lane
        own, bits = ops.where(chosen), bit[chosen]
        strip = sweep(own, bits, whole)
        kinds = {kind: float(own.length_ns[bits == each].sum()) / US for kind, each in BIT.items()}
        rows.append(StreamRow(lane_label(profile, lane), len(own), strip.time().busy_us, kinds, strip))
    return tuple(sorted(rows, key=lambda row: (-row.busy_us, row.name)))


def _windows(profile: Profile, ops: Ops, swept: Sweep) -> list[tuple[int, int, int]]:
    """The profiler's steps on the device: number, start, end. An operation belongs to the step that launched it."""
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


def _collectives(profile: Profile, ops: Ops, classes: list[Class], windows: list[tuple[int, int, int]]) -> Collectives:
    """Those of matched classes, each known by what it is and how many of the kind came before it."""
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
    """A kernel's name without its parameters, which may differ between ranks.

    >>> short_name("void deep_ep::internode::combine<false, 8>(int4*, float*)")
    'deep_ep::internode::combine'
    """
    bare = re.sub(r"^void\s+", "", name)
    while (less := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = less
    return bare.split("(")[0].strip() or name

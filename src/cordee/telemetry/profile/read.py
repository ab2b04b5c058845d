"""Profiles in, as PyTorch's profiler (Kineto) and Cordee write them: a stream of bytes to columns of numbers.

A file of hundreds of megabytes is never whole in memory: batches of events are decoded as they come, and a few numbers
of each event are kept. Whatever cannot be read is named, counted and left out; the rest is read. The meaning of events
is not known here.
"""

import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cordee.errors import ProfileError
from cordee.telemetry.profile.batches import Arg, Batches, Event
from cordee.telemetry.profile.faults import Fault, Faults
from cordee.telemetry.profile.kernels import Categories

Longs = NDArray[np.int64]
Indices = NDArray[np.int32]

BLOCK_BYTES, PACKED_BYTES = 4 << 20, 16 << 10
# Phases that hold no durations, or whose work other events tell: metadata, flows, instants, counters, objects, marks.
QUIET_PHASES = frozenset("MstfiICPNODR(),v")
NONE = -1
# Microseconds; more since 1970, or of one operation, is an error of whoever wrote it, and 64 bits would not hold it.
MOST_US = 4e15


@dataclass(frozen=True, slots=True)
class Lane:
    """The process and the thread of an event, as the file names them; on a GPU they are the device and the stream."""

    pid: int | str
    tid: int | str


@dataclass(frozen=True, slots=True)
class Name:
    """What an event is called, and its category."""

    text: str
    category: str


@dataclass(frozen=True, slots=True)
class Ops:
    """Events as columns, in the order of their start; `name`, `lane` and `group` index the profile's lists."""

    start_ns: Longs
    length_ns: Longs
    name: Indices
    lane: Indices
    correlation: Longs
    group: Indices

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Longs:
        """When each ended."""
        return self.start_ns + self.length_ns

    def where(self, chosen: Any) -> "Ops":
        """Those that a mask or a list of indices chooses."""
        return Ops(*(getattr(self, column)[chosen] for column in self.__slots__))


@dataclass(frozen=True, slots=True)
class Profile:
    """One file. Times are nanoseconds after its first event."""

    path: Path
    device: Ops
    launches: Ops
    host: Ops
    marks: Ops
    names: tuple[Name, ...]
    lanes: tuple[Lane, ...]
    lane_names: dict[Lane, str]
    process_names: dict[int | str, str]
    groups: tuple[str, ...]
    faults: tuple[Fault, ...]
    events: int
    bytes_read: int
    rank: int | None
    world_size: int | None
    gpus: tuple[str, ...]
    plain: bool
    """No profiler wrote it: whatever ran on a lane counts as an operation of that lane's process."""


def read_profile(path: Path, categories: Categories, progress: Callable[[int], None] | None = None) -> Profile:
    """Read one profile, packed or not.

    Args:
        path: JSON, or JSON packed by gzip.
        categories: which of a profiler's categories are device operations, launches, host operations, marks.
        progress: told how many bytes of the file are behind.

    Raises:
        ProfileError: no such file, or no profile is in it.
    """
    faults = Faults()
    columns = _Columns(categories, faults)
    try:
        with path.open("rb") as file:
            batches = Batches(_blocks(file, faults, progress), faults)
            for batch in batches:
                columns.take(batch)
    except OSError as error:
        raise ProfileError(
            f"{path} cannot be read: {error.strerror}", hint="give a profile file, .json or .gz"
        ) from None
    if batches.not_a_profile:
        hint = "a profile is an object with traceEvents, or a list of events; torch.profiler's export_chrome_trace"
        raise ProfileError(f"{path} is no profile: {batches.not_a_profile}", hint=hint)
    return columns.profile(path, batches)


def _blocks(file: BinaryIO, faults: Faults, progress: Callable[[int], None] | None) -> Iterator[bytes]:
    """The text in blocks; a packed file that breaks off gives what comes before."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    for block in _unpacked(file, faults) if packed else iter(lambda: file.read(BLOCK_BYTES), b""):
        if progress is not None:
            progress(file.tell())
        yield block


def _unpacked(file: BinaryIO, faults: Faults) -> Iterator[bytes]:
    """One packed stream after the other. The pieces are small: where one is damaged, all of it is lost."""
    inflate = None
    raw = b""
    while raw := raw or file.read(PACKED_BYTES):
        inflate = inflate or zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            block = inflate.decompress(raw, BLOCK_BYTES)
        except zlib.error as error:
            faults.note("truncated", f"the packed file is damaged before byte {file.tell():,}: {error}")
            return
        if block:
            yield block
        raw = inflate.unconsumed_tail or inflate.unused_data
        if inflate.eof:
            inflate = None
    if inflate is not None:
        faults.note("truncated", f"the packed file breaks off at byte {file.tell():,}")


@dataclass(slots=True)
class _Table:
    """Columns that grow."""

    start_us: "array[float]" = field(default_factory=lambda: array("d"))
    length_us: "array[float]" = field(default_factory=lambda: array("d"))
    name: "array[int]" = field(default_factory=lambda: array("i"))
    lane: "array[int]" = field(default_factory=lambda: array("i"))
    correlation: "array[int]" = field(default_factory=lambda: array("q"))
    group: "array[int]" = field(default_factory=lambda: array("i"))

    def ops(self) -> Ops:
        """In the order of start; where two start together, the longer first: it contains the other."""
        start, length = (
            np.rint(np.frombuffer(each, np.float64) * 1000).astype(np.int64) for each in (self.start_us, self.length_us)
        )
        name, lane, group = (np.frombuffer(each, np.int32) for each in (self.name, self.lane, self.group))
        correlation = np.frombuffer(self.correlation, np.int64)
        order = np.lexsort((lane, -length, start))
        return Ops(start[order], length[order], name[order], lane[order], correlation[order], group[order])


class _Columns:
    """Takes events and keeps the few numbers of each that are asked for later."""

    def __init__(self, categories: Categories, faults: Faults) -> None:
        self._faults = faults
        self._device, self._launches, self._host, self._marks, self._other = (_Table() for _ in range(5))
        self._table_of: dict[str, _Table | None] = dict.fromkeys(categories.ignored)
        self._table_of |= dict.fromkeys(categories.device, self._device) | dict.fromkeys(categories.host, self._host)
        self._table_of |= dict.fromkeys(categories.launch, self._launches)
        self._table_of |= dict.fromkeys(categories.mark, self._marks)
        self._names: dict[tuple[str, str | None], int] = {}
        self._lanes: dict[tuple[int | str, int | str], int] = {}
        self._groups: dict[str, int] = {}
        self._lane_names: dict[Lane, str] = {}
        self._process_names: dict[int | str, str] = {}
        self._base_us: float | None = None
        self.events = 0

    def take(self, batch: list[Event]) -> None:
        """Keep what matters of a batch."""
        self.events += len(batch)
        names, lanes, table_of, other = self._names, self._lanes, self._table_of, self._other
        for event in batch:
            if event.ph != "X":
                self._apart(event)
                continue
            category = event.cat
            table = table_of.get(category, other) if category is not None else other
            if table is None:
                continue
            start_us, length_us = event.ts, event.dur
            if start_us is None or length_us is None or not 0 <= length_us < MOST_US or abs(start_us) > MOST_US:
                self._unusable(event)
                continue
            if self._base_us is None:
                self._base_us = start_us
            named = (event.name, category)
            name = names.get(named)
            if name is None:
                name = names.setdefault(named, len(names))
            place = (event.pid, event.tid)
            lane = lanes.get(place)
            if lane is None:
                lane = lanes.setdefault(place, len(lanes))
            args = event.args
            table.start_us.append(start_us - self._base_us)
            table.length_us.append(length_us)
            table.name.append(name)
            table.lane.append(lane)
            table.correlation.append(NONE if args is None else args.correlation)
            table.group.append(NONE if args is None or args.collective is None else self._group(args))

    def _group(self, args: Arg) -> int:
        """Which collective on which ranks: what its peers call it too."""
        told = f"{args.collective} of {args.ranks or args.process_group or 'all'}"
        return self._groups.setdefault(told, len(self._groups))

    def _unusable(self, event: Event) -> None:
        if event.ts is None:
            self._faults.note("without a start", f"{event.name!r}")
        elif event.dur is None:
            self._faults.note("without a duration", f"{event.name!r} at {event.ts:.0f} us")
        elif event.dur >= MOST_US or abs(event.ts) > MOST_US:
            self._faults.note("times beyond a century", f"{event.name!r} at {event.ts:g} us lasts {event.dur:g} us")
        else:
            self._faults.note("negative duration", f"{event.name!r} at {event.ts:.0f} us lasts {event.dur:g} us")

    def _apart(self, event: Event) -> None:
        """Names of lanes, and phases that are not read."""
        if event.ph == "M":
            told = event.args.name if event.args is not None else None
            if not isinstance(told, str) or not told:
                return
            if event.name == "thread_name":
                self._lane_names[Lane(event.pid, event.tid)] = told
            elif event.name == "process_name":
                self._process_names[event.pid] = told
        elif event.ph in ("B", "E", "b", "e", "n", "S", "T", "p", "F"):
            self._faults.note(f"phase {event.ph!r}, which is not read", f"{event.name!r}")
        elif event.ph not in QUIET_PHASES:
            self._faults.note(f"unknown phase {event.ph!r}", f"{event.name!r}")

    def profile(self, path: Path, batches: Batches) -> Profile:
        """All that was taken."""
        plain = not len(self._device.name) and not len(self._host.name) and bool(len(self._other.name))
        if not plain:
            for category, count in self._strangers():
                self._faults.note(f"category {category!r}, which is not in the table", "its events are left out", count)
        device = self._other if plain else self._device
        about = batches.about()
        return Profile(
            path=path, device=device.ops(), launches=self._launches.ops(), host=self._host.ops(),
            marks=self._marks.ops(), names=tuple(Name(text, category or "") for text, category in self._names),
            lanes=tuple(Lane(*each) for each in self._lanes), lane_names=self._lane_names,
            process_names=self._process_names, groups=tuple(self._groups), faults=self._faults.noted(),
            events=self.events, bytes_read=batches.bytes_read, rank=about.rank, world_size=about.world_size,
            gpus=about.gpus, plain=plain,
        )  # fmt: skip

    def _strangers(self) -> list[tuple[str, int]]:
        """Categories that the table does not know, with their events."""
        by_name = np.bincount(np.frombuffer(self._other.name, np.int32)) if len(self._other.name) else np.zeros(0, int)
        found: dict[str, int] = {}
        for (_, category), count in zip(self._names, by_name.tolist(), strict=False):
            if count:
                found[category or ""] = found.get(category or "", 0) + count
        return sorted(found.items())


def lane_label(profile: Profile, lane: int) -> str:
    """A lane in few words: `stream 7`, or what its profile calls it.

    Kineto calls a stream's thread `stream 7 7`: the number is there twice.
    """
    place = profile.lanes[lane]
    told = profile.lane_names.get(place)
    if told is None:
        return f"{place.tid}" if isinstance(place.tid, str) else f"{'line' if profile.plain else 'stream'} {place.tid}"
    return re.sub(r"^(stream (\S+)) \2\s*$", r"\1", told.strip())

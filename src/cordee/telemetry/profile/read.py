"""Read profiles, as PyTorch's profiler (Kineto) and Cordee write them: a stream of bytes becomes columns of numbers.

A file of hundreds of megabytes is never whole in memory: batches of events are decoded as they come, and a few numbers
of each event are kept. Parts that cannot be read are named, counted and left out. This file does not interpret events.
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
from cordee.telemetry.profile.batches import About, Arg, Batches, Event
from cordee.telemetry.profile.defects import Defect, Defects
from cordee.telemetry.profile.kernels import Categories

Longs = NDArray[np.int64]
Indices = NDArray[np.int32]

BLOCK_BYTES, PACKED_BYTES = 4 << 20, 16 << 10
# Phases without durations, or with those of other events: metadata, flows, instants, counters, objects, marks.
QUIET_PHASES = frozenset("MstfiICPNODR(),v")
NONE = -1
# Microseconds. A later time since 1970, or a longer operation, is an error: it does not fit 64 bits of nanoseconds.
MOST_US = 4e15


@dataclass(frozen=True, slots=True)
class ProfileTrack:
    """The process and the thread of an event, as the file names them; on a GPU they are the device and the stream."""

    pid: int | str
    tid: int | str


@dataclass(frozen=True, slots=True)
class Name:
    """The name and the category of an event."""

    text: str
    category: str


@dataclass(frozen=True, slots=True)
class Ops:
    """Events as columns, in the order of their start; `name`, `track` and `group` index the profile's lists."""

    start_ns: Longs
    length_ns: Longs
    name: Indices
    track: Indices
    correlation: Longs
    group: Indices

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Longs:
        """The end of each event."""
        return self.start_ns + self.length_ns

    def where(self, chosen: Any) -> "Ops":
        """Return the events that a mask or a list of indices chooses."""
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
    tracks: tuple[ProfileTrack, ...]
    track_names: dict[ProfileTrack, str]
    process_names: dict[int | str, str]
    groups: tuple[str, ...]
    defects: tuple[Defect, ...]
    events: int
    bytes_read: int
    about: About
    plain: bool
    """No profiler wrote it: every event counts as an operation of its process."""


def read_profile(path: Path, categories: Categories, progress: Callable[[int], None] | None = None) -> Profile:
    """Read one profile, packed or not.

    Args:
        path: JSON, or JSON packed by gzip.
        categories: which of a profiler's categories are device operations, launches, host operations, marks.
        progress: called with the number of bytes that were read.

    Raises:
        ProfileError: the file does not exist, or is not a profile.
    """
    defects = Defects()
    columns = _Columns(categories, defects)
    try:
        with path.open("rb") as file:
            batches = Batches(_blocks(file, defects, progress), defects)
            for batch in batches:
                columns.take(batch)
    except OSError as error:
        raise ProfileError(
            f"{path} cannot be read: {error.strerror}", hint="give a profile file, .json or .gz"
        ) from None
    if batches.not_a_profile:
        hint = "a profile is an object with traceEvents, or a list of events; torch.profiler's export_chrome_trace"
        raise ProfileError(f"{path} is not a profile: {batches.not_a_profile}", hint=hint)
    return columns.profile(path, batches)


def _blocks(file: BinaryIO, defects: Defects, progress: Callable[[int], None] | None) -> Iterator[bytes]:
    """Yield the text in blocks; a truncated packed file gives what comes before its end."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    for block in _unpacked(file, defects) if packed else iter(lambda: file.read(BLOCK_BYTES), b""):
        if progress is not None:
            progress(file.tell())
        yield block


def _unpacked(file: BinaryIO, defects: Defects) -> Iterator[bytes]:
    """Unpack gzip streams one by one, in small pieces, since a damaged piece is lost whole."""
    inflate = None
    raw = b""
    while raw := raw or file.read(PACKED_BYTES):
        inflate = inflate or zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            block = inflate.decompress(raw, BLOCK_BYTES)
        except zlib.error as error:
            defects.note("truncated", f"the packed file is damaged before byte {file.tell():,}: {error}")
            return
        if block:
            yield block
        raw = inflate.unconsumed_tail or inflate.unused_data
        if inflate.eof:
            inflate = None
    if inflate is not None:
        defects.note("truncated", f"the packed file ends at byte {file.tell():,}")


@dataclass(slots=True)
class _Table:
    """Growing columns."""

    start_us: "array[float]" = field(default_factory=lambda: array("d"))
    length_us: "array[float]" = field(default_factory=lambda: array("d"))
    name: "array[int]" = field(default_factory=lambda: array("i"))
    track: "array[int]" = field(default_factory=lambda: array("i"))
    correlation: "array[int]" = field(default_factory=lambda: array("q"))
    group: "array[int]" = field(default_factory=lambda: array("i"))

    def ops(self) -> Ops:
        """Return the events by start; if two start together, the longer one first, since it contains the other."""
        start, length = (
            np.rint(np.frombuffer(each, np.float64) * 1000).astype(np.int64) for each in (self.start_us, self.length_us)
        )
        name, track, group = (np.frombuffer(each, np.int32) for each in (self.name, self.track, self.group))
        correlation = np.frombuffer(self.correlation, np.int64)
        order = np.lexsort((track, -length, start))
        return Ops(start[order], length[order], name[order], track[order], correlation[order], group[order])


class _Columns:
    """The columns of a file while it is read."""

    def __init__(self, categories: Categories, defects: Defects) -> None:
        self._defects = defects
        self._device, self._launches, self._host, self._marks, self._other = (_Table() for _ in range(5))
        self._table_of: dict[str, _Table | None] = dict.fromkeys(categories.ignored)
        self._table_of |= dict.fromkeys(categories.device, self._device) | dict.fromkeys(categories.host, self._host)
        self._table_of |= dict.fromkeys(categories.launch, self._launches)
        self._table_of |= dict.fromkeys(categories.mark, self._marks)
        self._names: dict[tuple[str, str | None], int] = {}
        self._tracks: dict[tuple[int | str, int | str], int] = {}
        self._groups: dict[str, int] = {}
        self._track_names: dict[ProfileTrack, str] = {}
        self._process_names: dict[int | str, str] = {}
        self._base_us: float | None = None
        self.events = 0

    def take(self, batch: list[Event]) -> None:
        """Keep the numbers of a batch that are needed later."""
        self.events += len(batch)
        names, tracks, table_of, other = self._names, self._tracks, self._table_of, self._other
        for event in batch:
            if event.ph != "X":
                self._take_metadata(event)
                continue
            category = event.cat
            table = table_of.get(category, other) if category is not None else other
            if table is None:
                continue
            start_us, length_us = event.ts, event.dur
            if start_us is None or length_us is None or not 0 <= length_us < MOST_US or abs(start_us) > MOST_US:
                self._leave_out(event)
                continue
            if self._base_us is None:
                self._base_us = start_us
            named = (event.name, category)
            name = names.get(named)
            if name is None:
                name = names.setdefault(named, len(names))
            place = (event.pid, event.tid)
            track = tracks.get(place)
            if track is None:
                track = tracks.setdefault(place, len(tracks))
            args = event.args
            table.start_us.append(start_us - self._base_us)
            table.length_us.append(length_us)
            table.name.append(name)
            table.track.append(track)
            table.correlation.append(NONE if args is None else args.correlation)
            table.group.append(NONE if args is None or args.collective is None else self._group(args))

    def _group(self, args: Arg) -> int:
        """Return the number of a collective on its ranks; its name is the same on all of them."""
        name = f"{args.collective} of {args.ranks or args.process_group or 'all'}"
        return self._groups.setdefault(name, len(self._groups))

    def _leave_out(self, event: Event) -> None:
        if event.ts is None:
            self._defects.note("without a start", f"{event.name!r}")
        elif event.dur is None:
            self._defects.note("without a duration", f"{event.name!r} at {event.ts:.0f} us")
        elif event.dur >= MOST_US or abs(event.ts) > MOST_US:
            self._defects.note("times beyond a century", f"{event.name!r} at {event.ts:g} us lasts {event.dur:g} us")
        else:
            self._defects.note("negative duration", f"{event.name!r} at {event.ts:.0f} us lasts {event.dur:g} us")

    def _take_metadata(self, event: Event) -> None:
        """Take the names of tracks, and count phases that are not read."""
        if event.ph == "M":
            name = event.args.name if event.args is not None else None
            if not isinstance(name, str) or not name:
                return
            if event.name == "thread_name":
                self._track_names[ProfileTrack(event.pid, event.tid)] = name
            elif event.name == "process_name":
                self._process_names[event.pid] = name
        elif event.ph in ("B", "E", "b", "e", "n", "S", "T", "p", "F"):
            self._defects.note(f"phase {event.ph!r}, which is not read", f"{event.name!r}")
        elif event.ph not in QUIET_PHASES:
            self._defects.note(f"unknown phase {event.ph!r}", f"{event.name!r}")

    def profile(self, path: Path, batches: Batches) -> Profile:
        """Return the profile."""
        plain = not len(self._device.name) and not len(self._host.name) and bool(len(self._other.name))
        if not plain:
            for category, count in self._unknown_categories():
                kind = f"category {category!r}, which is not in the table"
                self._defects.note(kind, "its events are left out", count)
        device = self._other if plain else self._device
        return Profile(
            path=path, device=device.ops(), launches=self._launches.ops(), host=self._host.ops(),
            marks=self._marks.ops(), names=tuple(Name(text, category or "") for text, category in self._names),
            tracks=tuple(ProfileTrack(*each) for each in self._tracks), track_names=self._track_names,
            process_names=self._process_names, groups=tuple(self._groups), defects=self._defects.found(),
            events=self.events, bytes_read=batches.bytes_read, about=batches.about(), plain=plain,
        )  # fmt: skip

    def _unknown_categories(self) -> list[tuple[str, int]]:
        """Return the categories that the table does not have, with the number of their events."""
        by_name = np.bincount(np.frombuffer(self._other.name, np.int32)) if len(self._other.name) else np.zeros(0, int)
        found: dict[str, int] = {}
        for (_, category), count in zip(self._names, by_name.tolist(), strict=False):
            if count:
                found[category or ""] = found.get(category or "", 0) + count
        return sorted(found.items())


def track_label(profile: Profile, track: int) -> str:
    """Return the label of a track: `stream 7`, or its name in the profile.

    Kineto names the thread of a stream `stream 7 7`, with the number twice.
    """
    place = profile.tracks[track]
    name = profile.track_names.get(place)
    if name is None:
        return f"{place.tid}" if isinstance(place.tid, str) else f"{'line' if profile.plain else 'stream'} {place.tid}"
    return re.sub(r"^(stream (\S+)) \2\s*$", r"\1", name.strip())

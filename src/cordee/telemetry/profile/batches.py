"""The text of a profile as batches of decoded events, within bounded memory.

A batch is cut where one event ends and the next begins. Whether a cut is right the decoder itself says: only a
sequence of whole events, in brackets, is a JSON list. Where it finds none, as in a damaged file, events are taken one
by one and those that are no JSON are counted. Nothing here knows what an event means.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cordee.errors import MissingExtraError
from cordee.telemetry.profile.faults import Faults

try:
    import msgspec
except ModuleNotFoundError:
    raise MissingExtraError("profiles are read with msgspec", hint='pip install "cordee[profile]"') from None

# Without a cut in so much text, something is broken: no single event is that long.
RESCUE_BYTES = 16 << 20
HEAD_BYTES_MAX = 64 << 20
TRIES = 16
# An event that is broken inside takes at most so many of its neighbours' starts for its own parts.
PIECES_MAX = 6

_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_CLOSE = re.compile(rb"(\}\s*),?\s*\]")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# What C++ prints of numbers that JSON does not have, and old profilers left in.
_NO_NUMBER = re.compile(rb":\s*-?(?:[nN]a[nN]|[iI]nf(?:inity)?)(?=\s*[,}])")


class Arg(msgspec.Struct, gc=False):
    """Of an event's arguments, those that are asked for; all others are skipped while decoding."""

    correlation: int = -1
    collective: str | None = msgspec.field(name="Collective name", default=None)
    process_group: str | int | None = msgspec.field(name="Process Group Name", default=None)
    ranks: str | list[int] | None = msgspec.field(name="Process Group Ranks", default=None)
    name: Any = None


class Event(msgspec.Struct, gc=False):
    """One event as written."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float | None = None
    dur: float | None = None
    args: Arg | None = None


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None


class _Device(msgspec.Struct):
    name: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """What the file says of itself, outside its events."""

    rank: int | None = None
    world_size: int | None = None
    gpus: tuple[str, ...] = ()


@dataclass(slots=True)
class Batches:
    """Iterate over it once for the events; then `about()` knows the rest."""

    blocks: Iterator[bytes]
    faults: Faults
    bytes_read: int = 0
    not_a_profile: str = ""
    _outside: dict[str, bytes] = field(default_factory=dict)
    _decoder: msgspec.json.Decoder[list[Event]] = field(default_factory=lambda: msgspec.json.Decoder(list[Event]))
    _raws: msgspec.json.Decoder[list[msgspec.Raw]] = field(
        default_factory=lambda: msgspec.json.Decoder(list[msgspec.Raw])
    )
    _one: msgspec.json.Decoder[Event] = field(default_factory=lambda: msgspec.json.Decoder(Event))

    def __iter__(self) -> Iterator[list[Event]]:
        blocks = self._counted()
        buffer, listed = self._to_first_event(blocks)
        if self.not_a_profile:
            return
        wait = 0
        for block in blocks:
            buffer += block
            if len(buffer) < wait:
                continue
            batch, buffer = self._whole_events(buffer)
            if not batch:
                buffer, count = _NO_NUMBER.subn(b":null", buffer)
                if count:
                    self.faults.note("nan or inf, read as nothing", "JSON has no such numbers", count)
                    batch, buffer = self._whole_events(buffer)
            if batch:
                yield batch
            elif len(buffer) > RESCUE_BYTES:
                closed, buffer, done = self._closed(buffer)
                if done:
                    yield closed
                    self._tail(buffer + b"".join(blocks), listed)
                    return
                batch, buffer, _ = self._rescued(buffer, last=False)
                yield batch
            # Text without a cut is not tried again before it has doubled.
            wait = 0 if batch else 2 * len(buffer)
        yield from self._last(buffer, listed)

    def about(self) -> About:
        """What stands before and after the events; a part that is not as expected counts as absent."""
        rank = world = None
        names: tuple[str, ...] = ()
        try:
            told = msgspec.json.decode(self._outside.get("distributedInfo", b"{}"), type=_Distributed)
            rank, world = told.rank, told.world_size
        except msgspec.DecodeError:
            self.faults.note("distributedInfo is not as expected", "the rank is taken from the order of the files")
        try:
            gpus = msgspec.json.decode(self._outside.get("deviceProperties", b"[]"), type=list[_Device])
            names = tuple(gpu.name for gpu in gpus if gpu.name)
        except msgspec.DecodeError:
            self.faults.note("deviceProperties is not as expected", "the GPU's name is not known")
        return About(rank, world, names)

    def _counted(self) -> Iterator[bytes]:
        for block in self.blocks:
            self.bytes_read += len(block)
            yield block

    def _to_first_event(self, blocks: Iterator[bytes]) -> tuple[bytes, bool]:
        """The text from the first event on, and whether the file is a bare list of events."""
        buffer = b""
        for block in blocks:
            buffer = (buffer + block).removeprefix(b"\xef\xbb\xbf").lstrip()
            if buffer.startswith(b"["):
                return buffer[1:].lstrip(), True
            found = _EVENTS.search(buffer)
            if found:
                self._keep_outside(buffer[: found.start()] + b'"traceEvents":[]}')
                return buffer[found.end() :].lstrip(), False
            if buffer and not buffer.startswith(b"{"):
                break
            if len(buffer) > HEAD_BYTES_MAX:
                break
        if not buffer:
            self.not_a_profile = "it is empty"
        elif buffer.startswith(b"{"):
            self.not_a_profile = f"{len(buffer):,} bytes of it hold no traceEvents"
        else:
            self.not_a_profile = f"it begins with {buffer[:16]!r}"
        return b"", False

    def _keep_outside(self, text: bytes) -> None:
        try:
            self._outside |= {
                key: bytes(raw) for key, raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items()
            }
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.faults.note("what the file says of itself cannot be read", str(error))

    def _whole_events(self, buffer: bytes) -> tuple[list[Event], bytes]:
        """The events up to the last cut that proves right, and the text after it."""
        at, tries = len(buffer), 0
        while tries < TRIES:
            at = buffer.rfind(b"}", 0, at)
            if at < 0:
                break
            between = _BETWEEN.match(buffer, at)
            if between is None:
                continue
            tries += 1
            batch = self._decoded(buffer[: at + 1])
            if batch is not None:
                return batch, buffer[between.end() - 1 :]
        return [], buffer

    def _decoded(self, text: bytes) -> list[Event] | None:
        """The events, or None where the text is not whole events one after the other."""
        whole = b"[" + text + b"]"
        try:
            return self._decoder.decode(whole)
        except msgspec.ValidationError:
            pass  # JSON so far, but an event has a field of another kind: each is looked at by itself.
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        try:
            raws = self._raws.decode(whole)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return [event for raw in raws if (event := self._single(bytes(raw))) is not None]

    def _single(self, text: bytes) -> Event | None:
        """One event whose JSON is sound, or None if its fields are not what a profile has."""
        try:
            return self._one.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.faults.note("fields of another kind", f"{error}: {_quoted(text)}")
            return None

    def _closed(self, buffer: bytes) -> tuple[list[Event], bytes, bool]:
        """The last events and the text after their list, if it is closed in here."""
        if buffer.startswith(b"]"):
            return [], buffer[1:], True
        for found in list(_CLOSE.finditer(buffer))[: -TRIES - 1 : -1]:
            batch = self._decoded(buffer[: found.end(1)])
            if batch is not None:
                return batch, buffer[found.end() :], True
        return [], buffer, False

    def _last(self, buffer: bytes, listed: bool) -> Iterator[list[Event]]:
        """What is left at the end of the file."""
        batch, rest, closed = self._closed(buffer)
        if not closed:
            # A bare list may lack its end; a file that breaks off has whole events before the break.
            whole = self._decoded(buffer.rstrip().removesuffix(b","))
            if whole is not None:
                batch, rest = whole, b""
            else:
                batch, rest, closed = self._rescued(buffer, last=True)
        if batch:
            yield batch
        if closed:
            self._tail(rest, listed)
        elif rest.strip() or not listed:
            end = f"after {_quoted(rest[-60:])}" if rest.strip() else "between two events"
            self.faults.note("truncated", f"the file ends {end}, at byte {self.bytes_read:,}")

    def _tail(self, text: bytes, listed: bool) -> None:
        """What stands after the events: keys of the same object."""
        text = text.strip()
        if listed:
            return
        if text.startswith(b","):
            self._keep_outside(b"{" + text[1:])
        elif text != b"}":
            self.faults.note("truncated", "the file ends before its last brace")

    def _rescued(self, buffer: bytes, *, last: bool) -> tuple[list[Event], bytes, bool]:
        """Events one by one out of damaged text, the text after them, and whether their list is closed before it.

        The last piece is kept for what follows, unless nothing does.
        """
        ends = [found.start() + 1 for found in _BETWEEN.finditer(buffer)]
        starts = [0, *(buffer.index(b"{", end) for end in ends)]
        close = _CLOSE.search(buffer, starts[-1]) if last else None
        if close is not None:
            ends.append(close.end(1))
        events: list[Event] = []
        at = 0
        while at < len(ends):
            for to in range(at, min(at + PIECES_MAX, len(ends))):
                batch = self._repaired(buffer[starts[at] : ends[to]])
                if batch is not None:
                    events += batch
                    at = to + 1
                    break
            else:
                self.faults.note("no JSON", _quoted(buffer[starts[at] : ends[at]]))
                at += 1
        if close is not None:
            return events, buffer[close.end() :], True
        return events, buffer[starts[-1] :], False

    def _repaired(self, text: bytes) -> list[Event] | None:
        """One event's text, read despite numbers that JSON does not have and bytes that are no UTF-8."""
        batch = self._decoded(text)
        if batch is not None:
            return batch
        fixed, count = _NO_NUMBER.subn(b":null", text)
        plain = fixed.decode("utf-8", "replace").encode()
        batch = None if plain == text else self._decoded(plain)
        if batch is not None and count:
            self.faults.note("nan or inf, read as nothing", _quoted(text), count)
        if batch is not None and plain != fixed:
            self.faults.note("bytes that are no UTF-8, replaced", _quoted(text))
        return batch


def _quoted(text: bytes) -> str:
    """A piece of the file for people, on one line."""
    line = " ".join(text.decode("utf-8", "replace").split())
    return line if len(line) <= 90 else f"{line[:60]} ... {line[-24:]}"

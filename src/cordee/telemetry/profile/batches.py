"""The text of a profile as batches of decoded events, within bounded memory.

A batch is cut between two events. The decoder proves the cut: only a sequence of whole events, in brackets, is a JSON
list. In a damaged file no cut is proven; then events are decoded one by one, and those that are not JSON are counted.
This file does not interpret events.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cordee.errors import MissingExtraError
from cordee.telemetry.profile.defects import Defects

try:
    import msgspec
except ModuleNotFoundError:
    raise MissingExtraError("profiles are read with msgspec", hint='pip install "cordee[profile]"') from None

# Text of this length without a cut is damaged, since no single event is that long.
SALVAGE_BYTES = 16 << 20
HEAD_BYTES_MAX = 64 << 20
TRIES = 16
# A damaged event is tried together with at most this many pieces after it.
PIECES_MAX = 6

_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_CLOSE = re.compile(rb"(\}\s*),?\s*\]")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# Numbers that JSON does not have, as C++ prints them and old profilers wrote them.
_NO_NUMBER = re.compile(rb":\s*-?(?:[nN]a[nN]|[iI]nf(?:inity)?)(?=\s*[,}])")


class Arg(msgspec.Struct, gc=False):
    """The arguments of an event that are needed; the decoder skips all others."""

    correlation: int = -1
    collective: str | None = msgspec.field(name="Collective name", default=None)
    process_group: str | int | None = msgspec.field(name="Process Group Name", default=None)
    ranks: str | list[int] | None = msgspec.field(name="Process Group Ranks", default=None)
    name: Any = None


class Event(msgspec.Struct, gc=False):
    """One event as it is in the file."""

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
    """The file's metadata, which stands outside its events."""

    rank: int | None = None
    world_size: int | None = None
    gpus: tuple[str, ...] = ()


@dataclass(slots=True)
class Batches:
    """The events of a file; iterate once, then call `about()` for the rest."""

    blocks: Iterator[bytes]
    defects: Defects
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
            batch, buffer = self._cut(buffer)
            if not batch:
                buffer, count = _NO_NUMBER.subn(b":null", buffer)
                if count:
                    self.defects.note("nan or inf, read as nothing", "JSON has no such numbers", count)
                    batch, buffer = self._cut(buffer)
            if batch:
                yield batch
            elif len(buffer) > SALVAGE_BYTES:
                closed, buffer, done = self._cut_at_end(buffer)
                if done:
                    yield closed
                    self._tail(buffer + b"".join(blocks), listed)
                    return
                batch, buffer, _ = self._salvage(buffer, last=False)
                yield batch
            # Text without a cut is tried again when it has doubled.
            wait = 0 if batch else 2 * len(buffer)
        yield from self._last(buffer, listed)

    def about(self) -> About:
        """Return the metadata before and after the events; a part in another form counts as absent."""
        rank = world = None
        names: tuple[str, ...] = ()
        try:
            info = msgspec.json.decode(self._outside.get("distributedInfo", b"{}"), type=_Distributed)
            rank, world = info.rank, info.world_size
        except msgspec.DecodeError:
            self.defects.note("distributedInfo is not as expected", "the rank is taken from the order of the files")
        try:
            gpus = msgspec.json.decode(self._outside.get("deviceProperties", b"[]"), type=list[_Device])
            names = tuple(gpu.name for gpu in gpus if gpu.name)
        except msgspec.DecodeError:
            self.defects.note("deviceProperties is not as expected", "the GPU's name is not known")
        return About(rank, world, names)

    def _counted(self) -> Iterator[bytes]:
        for block in self.blocks:
            self.bytes_read += len(block)
            yield block

    def _to_first_event(self, blocks: Iterator[bytes]) -> tuple[bytes, bool]:
        """Return the text from the first event on, and whether the file is a bare list of events."""
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
            self.defects.note("the part outside the events cannot be read", str(error))

    def _cut(self, buffer: bytes) -> tuple[list[Event], bytes]:
        """Return the events up to the last proven cut, and the text after it."""
        at, tries = len(buffer), 0
        while tries < TRIES:
            at = buffer.rfind(b"}", 0, at)
            if at < 0:
                break
            between = _BETWEEN.match(buffer, at)
            if between is None:
                continue
            tries += 1
            batch = self._decode(buffer[: at + 1])
            if batch is not None:
                return batch, buffer[between.end() - 1 :]
        return [], buffer

    def _decode(self, text: bytes) -> list[Event] | None:
        """Return the events, or None where the text is not a sequence of whole events."""
        whole = b"[" + text + b"]"
        try:
            return self._decoder.decode(whole)
        except msgspec.ValidationError:
            pass  # JSON, but an event has a field of another type: decode one by one.
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        try:
            raws = self._raws.decode(whole)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return [event for raw in raws if (event := self._decode_one(bytes(raw))) is not None]

    def _decode_one(self, text: bytes) -> Event | None:
        """Return one event, or None if its fields have other types."""
        try:
            return self._one.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.defects.note("fields of another type", f"{error}: {_quoted(text)}")
            return None

    def _cut_at_end(self, buffer: bytes) -> tuple[list[Event], bytes, bool]:
        """Return the last events and the text after their list, and whether the list ends in this text."""
        if buffer.startswith(b"]"):
            return [], buffer[1:], True
        for found in list(_CLOSE.finditer(buffer))[: -TRIES - 1 : -1]:
            batch = self._decode(buffer[: found.end(1)])
            if batch is not None:
                return batch, buffer[found.end() :], True
        return [], buffer, False

    def _last(self, buffer: bytes, listed: bool) -> Iterator[list[Event]]:
        """Yield the events at the end of the file."""
        batch, rest, closed = self._cut_at_end(buffer)
        if not closed:
            # A bare list may lack its bracket, and a truncated file has whole events before its end.
            whole = self._decode(buffer.rstrip().removesuffix(b","))
            if whole is not None:
                batch, rest = whole, b""
            else:
                batch, rest, closed = self._salvage(buffer, last=True)
        if batch:
            yield batch
        if closed:
            self._tail(rest, listed)
        elif rest.strip() or not listed:
            end = f"after {_quoted(rest[-60:])}" if rest.strip() else "between two events"
            self.defects.note("truncated", f"the file ends {end}, at byte {self.bytes_read:,}")

    def _tail(self, text: bytes, listed: bool) -> None:
        """Keep the text after the events: keys of the same object."""
        text = text.strip()
        if listed:
            return
        if text.startswith(b","):
            self._keep_outside(b"{" + text[1:])
        elif text != b"}":
            self.defects.note("truncated", "the file ends before its last brace")

    def _salvage(self, buffer: bytes, *, last: bool) -> tuple[list[Event], bytes, bool]:
        """Return the events of damaged text, the text after them, and whether their list ends before it.

        The last piece is kept for the text that follows, unless this is the last.
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
                batch = self._repair(buffer[starts[at] : ends[to]])
                if batch is not None:
                    events += batch
                    at = to + 1
                    break
            else:
                self.defects.note("no JSON", _quoted(buffer[starts[at] : ends[at]]))
                at += 1
        if close is not None:
            return events, buffer[close.end() :], True
        return events, buffer[starts[-1] :], False

    def _repair(self, text: bytes) -> list[Event] | None:
        """Decode one event despite numbers that JSON does not have and bytes that are not UTF-8."""
        batch = self._decode(text)
        if batch is not None:
            return batch
        fixed, count = _NO_NUMBER.subn(b":null", text)
        plain = fixed.decode("utf-8", "replace").encode()
        batch = None if plain == text else self._decode(plain)
        if batch is not None and count:
            self.defects.note("nan or inf, read as nothing", _quoted(text), count)
        if batch is not None and plain != fixed:
            self.defects.note("bytes that are no UTF-8, replaced", _quoted(text))
        return batch


def _quoted(text: bytes) -> str:
    """Return a piece of the file on one line."""
    line = " ".join(text.decode("utf-8", "replace").split())
    return line if len(line) <= 90 else f"{line[:60]} ... {line[-24:]}"

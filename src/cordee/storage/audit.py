"""Inspect a destination: list its generations, verify every copy, and compare two of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cordee.errors import InputError
from cordee.storage.base_destination import is_of_base
from cordee.storage.chunks import Chunk, check_chunk, read_chunk, written_by
from cordee.storage.files import Blobs
from cordee.storage.generations import Commit, commit_of, is_verified, missing_levels_of
from cordee.storage.levels import without_farthest
from cordee.storage.log import LogEntry, live_commits, pins
from cordee.storage.manifest import Manifest, Tensor, read_manifest
from cordee.storage.sealed import Damaged
from cordee.storage.transfer import read_tensor

_THREADS = 8


@dataclass(frozen=True)
class Generation:
    """One line of the list. `stored_bytes` are those it added to storage; None: its manifest cannot be read."""

    commit: Commit
    world_size: int
    at_us: int | None
    verified: bool
    pin: str | None
    stored_bytes: int | None


@dataclass(frozen=True)
class Verification:
    """The state of one generation: `bad` copies as (level, problem); `lost`: why it cannot be read, or None."""

    commit: Commit
    chunks: int
    bytes: int
    bad: tuple[tuple[str, str], ...]
    lost: str | None


@dataclass(frozen=True)
class CheckpointDiff:
    """The difference of two generations: tensors by name, and bytes that both have."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[str, ...]
    same: int
    shared_bytes: int
    second_bytes: int


def generations(blobs: Blobs, entries: list[LogEntry]) -> list[Generation]:
    """Return all live generations, oldest first."""
    pinned = pins(entries)
    found = []
    for entry in live_commits(entries):
        commit = commit_of(entry)
        try:
            whole = read_manifest(blobs, commit.manifest)
            own = {chunk.key for chunk in whole.chunks if _written_in(chunk, whole)}
            stored = sum(chunk.length_bytes for chunk in whole.chunks if chunk.key in own)
        except Damaged:
            stored = None
        at_us, name = entry.fields.get("at_us"), pinned.get(entry.index)
        verified = stored is not None and is_verified(blobs, entry)
        found.append(Generation(commit, entry.fields["world_size"], at_us, verified, name, stored))
    return found


def _written_in(chunk: Chunk, whole: Manifest) -> bool:
    return written_by(chunk.key) == (whole.epoch, whole.save) and not is_of_base(chunk.key)


def find(entries: list[LogEntry], which: str | None, blobs: Blobs) -> LogEntry:
    """Return the newest generation of a step (`40`), a generation by number (`g7`), by its pin's name, or the newest.

    Generations meant for this store come before others.

    Raises:
        InputError: there is none.
    """
    live = live_commits(entries)
    if not live:
        raise InputError("there is no checkpoint", hint="give the job's `to`, with the job's id under a server")
    if which is None:
        return (meant_for(blobs, live) or live)[-1]
    names = pins(entries)
    for entry in reversed(live):
        if which in (str(entry.fields["step"]), f"g{entry.index}", names.get(entry.index)):
            return entry
    steps = [str(entry.fields["step"]) for entry in live]
    raise InputError(
        f"there is no checkpoint {which!r}",
        hint=f"steps: {', '.join(steps[-8:])}; g{live[-1].index} is the newest generation; or the name of a pin",
    )


def meant_for(blobs: Blobs, entries: list[LogEntry]) -> list[LogEntry]:
    """Leave out the generations that were meant only for nearer levels."""
    return [entry for entry in entries if missing_levels_of(entry) < len(blobs.levels)]


def verify(
    blobs: Blobs, entry: LogEntry, *, repair: bool = False, on_bytes: Callable[[int], None] = lambda n: None
) -> Verification:
    """Read every copy of every chunk of a generation; `repair` writes a bad copy again from an intact one.

    Skip levels that were not meant to have the chunks. Call `on_bytes` with the size of each chunk.
    """
    commit = commit_of(entry)
    if commit.missing_levels >= len(blobs.levels):
        why = f"its chunks were not meant to be in {blobs}: they are in a nearer destination of the job"
        return Verification(commit, 0, 0, (), why)
    bad: list[tuple[str, str]] = []
    lost: str | None = None
    whole: Manifest | None = None
    for level in blobs.levels:
        try:
            whole = read_manifest(level, commit.manifest)
        except Damaged as damage:
            bad.append((str(level), str(damage)))
    if whole is None:
        return Verification(commit, 0, 0, tuple(bad), bad[0][1])
    if bad and repair:
        read_manifest(blobs, commit.manifest)

    holding = without_farthest(blobs, commit.missing_levels).levels

    def check(chunk: Chunk) -> list[tuple[str, str]]:
        found = []
        for level in holding:
            try:
                check_chunk(level, chunk)
            except Damaged as damage:
                found.append((str(level), str(damage)))
        if found and repair and len(found) < len(holding):
            read_chunk(blobs, chunk)
        on_bytes(chunk.length_bytes)
        return found

    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(check, whole.chunks):
            bad += found
            if len(found) == len(holding):
                lost = lost or found[0][1]
    return Verification(commit, len(whole.chunks), sum(chunk.length_bytes for chunk in whole.chunks), tuple(bad), lost)


def diff(blobs: Blobs, first: Manifest, second: Manifest) -> CheckpointDiff:
    """Compare by content: by addresses if both are cut alike, else by reading both."""
    one, two = first.tensors, second.tensors
    both = sorted(one.keys() & two.keys())
    changed = tuple(name for name in both if not _is_equal(blobs, first, one[name], second, two[name]))
    known = {chunk.xxh3 for chunk in first.chunks}
    return CheckpointDiff(
        tuple(sorted(one.keys() - two.keys())),
        tuple(sorted(two.keys() - one.keys())),
        changed,
        len(both) - len(changed),
        sum(chunk.length_bytes for chunk in second.chunks if chunk.xxh3 in known),
        sum(chunk.length_bytes for chunk in second.chunks),
    )


def _is_equal(blobs: Blobs, first: Manifest, a: Tensor, second: Manifest, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if _addresses(first, a) == _addresses(second, b):
        return True
    return bool(read_tensor(blobs, first, a) == read_tensor(blobs, second, b))


def _addresses(whole: Manifest, tensor: Tensor) -> set[object]:
    return {
        (
            shard.offsets,
            shard.sizes,
            tuple((whole.chunks[p.chunk].xxh3, p.offset, p.length_bytes) for p in shard.pieces),
        )
        for shard in tensor.shards
    }

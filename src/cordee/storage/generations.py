"""Generations of a job's checkpoint: which one loads, which ones stay, which ones go.

A generation is the index of its commit record. Nothing is removed before a gc record names it, and the newest two
generations that verify are never named.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from blake3 import blake3

from cordee.points import point
from cordee.storage import chunks, manifest
from cordee.storage.chunks import Chunk, read_chunk, written_by
from cordee.storage.files import Blobs
from cordee.storage.log import Entry, Log, live_commits, unfinished_gcs
from cordee.storage.manifest import Manifest, parts_prefix, read_manifest, verified_key
from cordee.storage.sealed import FORMAT, Damaged, seal, unseal

KEEP_MIN = 2
GC_FOLDER = "gc"
_THREADS = 4


@dataclass(frozen=True)
class Commit:
    """One committed generation. `stall_us` and `drained_us` are those of the slowest rank."""

    step: int
    epoch: int
    generation: int
    manifest: str
    bytes: int
    stall_us: int
    drained_us: int


def commit_of(entry: Entry) -> Commit:
    """The commit that a commit record announces."""
    record = entry.record
    assert record is not None and record.kind == "commit", "only a commit record makes a commit"
    names = ("manifest", "bytes", "stall_us", "drained_us")
    return Commit(record.fields["step"], record.epoch, entry.index, *(record.fields[name] for name in names))


def check_chunks(blobs: Blobs, wanted: Iterable[Chunk]) -> str | None:
    """Read and verify chunks; what is wrong with the first bad one, or None."""

    def problem(chunk: Chunk) -> str | None:
        try:
            read_chunk(blobs, chunk)
        except Damaged as damage:
            return str(damage)
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        return next((found for found in pool.map(problem, wanted) if found), None)


def check_generation(blobs: Blobs, name: str, *, rank: int = 0, world_size: int = 1) -> str | None:
    """Verify one rank's share of a generation (every `world_size`-th chunk); what is wrong, or None."""
    try:
        whole = read_manifest(blobs, name)
    except Damaged as damage:
        return str(damage)
    return check_chunks(blobs, whole.chunks[rank::world_size])


def known_chunks(blobs: Blobs, entries: list[Entry], whole: Manifest) -> dict[str, Chunk]:
    """Chunks of a verified generation that a new save may use again, by blake3.

    What an unfinished gc record names counts as absent: a late delete may still take it.

    Raises:
        Damaged: what such a record names cannot be read, so no chunk is safe to use again.
    """
    going = {key for entry in unfinished_gcs(entries) for key in _doomed_by(blobs, entry)}
    return {chunk.blake3: chunk for chunk in whole.chunks if chunk.key not in going}


def is_verified(blobs: Blobs, entry: Entry) -> bool:
    """Did every rank read its chunks of this generation back from the store?"""
    record = entry.record
    assert record is not None, "a commit has a record"
    prefix = parts_prefix(record.epoch, record.nonce, record.fields["save"])
    return all(blobs.size(verified_key(prefix, rank)) is not None for rank in range(record.fields["world_size"]))


def collect(
    log: Log, blobs: Blobs, *, keep: int, save: int, verified: set[int], damaged: frozenset[int] = frozenset()
) -> list[int]:
    """Retire all but the newest `keep` verified generations, and remove what no live one needs; the retired ones.

    Only what older attempts and this one's saves up to `save` have written is touched: a save that runs beside it is
    safe. `verified` are generations known to verify besides those whose ranks say so, and `damaged` those that did when
    they were written and do not any more.
    """
    live = live_commits(log.entries)
    good = [
        entry for entry in live if entry.index not in damaged and (entry.index in verified or is_verified(blobs, entry))
    ]
    if len(good) < max(keep, KEEP_MIN):
        return []
    oldest_kept = good[-max(keep, KEEP_MIN)].index
    kept = [entry for entry in live if entry.index >= oldest_kept]
    retired = [entry.index for entry in live if entry.index < oldest_kept]
    try:
        doomed = _unneeded(log, blobs, kept, save)
    except Damaged:
        return []  # What a kept manifest needs is not known, so nothing may go.
    if not (retired or doomed):
        return []
    data = seal({"format": FORMAT, "keys": doomed})
    digest = str(blake3(data).hexdigest())
    blobs.put_if_absent(f"{GC_FOLDER}/{digest}", data)
    point("gc.before")
    begun = log.append("gc", retired=retired, doomed=digest)
    point("gc.begun")
    for key in doomed:
        blobs.delete(key)
        point("gc.deleting")
    log.append("gc", ends=begun)
    blobs.delete(f"{GC_FOLDER}/{digest}")
    return retired


def _unneeded(log: Log, blobs: Blobs, kept: list[Entry], save: int) -> list[str]:
    needed: set[str] = set()
    prefixes = []
    for entry in kept:
        record = entry.record
        assert record is not None, "a commit has a record"
        needed.add(f"{manifest.FOLDER}/{record.fields['manifest']}")
        needed |= {chunk.key for chunk in read_manifest(blobs, record.fields["manifest"]).chunks}
        prefixes.append(parts_prefix(record.epoch, record.nonce, record.fields["save"]) + ".")
    doomed = [
        key
        for folder in (chunks.FOLDER, manifest.FOLDER)
        for key in blobs.list(folder)
        if key not in needed and (by := written_by(key)) is not None and by <= (log.epoch, save)
    ]
    running = parts_prefix(log.epoch, log.nonce, save)
    mine = running.rsplit("/", 1)[0] + "/"
    for key in blobs.list("parts"):
        later = key.startswith(mine) and key.split(".")[0] > running
        if not later and not key.startswith(tuple(prefixes)):
            doomed.append(key)
    return doomed


def _doomed_by(blobs: Blobs, entry: Entry) -> list[str]:
    assert entry.record is not None, "a gc entry has a record"
    key = f"{GC_FOLDER}/{entry.record.fields['doomed']}"
    data = blobs.get(key)
    if data is None:
        raise Damaged(f"{key} is missing")
    return list(unseal(data)["keys"])

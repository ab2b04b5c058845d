"""Generations of a job's checkpoints: commit, verify, keep and collect them.

A generation is the index of its commit record. A gc record names what is removed before it goes, and never names one
of the newest two generations that verify.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from blake3 import blake3

from cordee.errors import CheckpointError
from cordee.points import point
from cordee.storage import chunks, manifest
from cordee.storage.base_destination import remember
from cordee.storage.chunks import Chunk, check_chunk, written_by
from cordee.storage.destination import open_existing
from cordee.storage.files import Blobs
from cordee.storage.log import Log, LogEntry, live_commits, of_kind, pins, read_entries, unfinished_gcs
from cordee.storage.manifest import Manifest, parts_prefix, read_manifest, verified_key
from cordee.storage.sealed import FORMAT, Damaged, seal, unseal
from cordee.units import US_PER_S
from cordee.workload.keep import Keep

BEST = "best"
"""The name of the pin of the checkpoint that a script keeps as its best."""

GC_FOLDER = "gc"
_THREADS = 4


@dataclass(frozen=True)
class Commit:
    """One committed generation. `stall_us` and `uploaded_us` are those of the slowest rank.

    `missing_levels`: number of storage levels, counted from the farthest, that do not have its chunks.
    """

    step: int
    epoch: int
    generation: int
    manifest: str
    bytes: int
    stall_us: int
    uploaded_us: int
    missing_levels: int = 0


def commit_fields(
    name: str, whole: Manifest, *, at_us: int, missing_levels: int = 0, ending: str | None = None
) -> dict[str, Any]:
    """Return the fields of a manifest's commit record; `ending`: how the attempt ends, if this is its last save."""
    optional = {"missing_levels": missing_levels, "ending": ending}
    return {
        **{name: value for name, value in optional.items() if value},
        "save": whole.save,
        "step": whole.step,
        "world_size": whole.world_size,
        "manifest": name,
        "bytes": sum(rank.captured_bytes for rank in whole.ranks),
        "stall_us": max((rank.stall_us for rank in whole.ranks), default=0),
        "uploaded_us": max((rank.uploaded_us for rank in whole.ranks), default=0),
        "at_us": at_us,
    }


def commit_of(entry: LogEntry) -> Commit:
    """Return the commit of a commit record."""
    record = entry.record
    assert record is not None and record.kind == "commit", "only a commit record makes a commit"
    names = ("step", "manifest", "bytes", "stall_us", "uploaded_us")
    fields = {name: record.fields[name] for name in names}
    return Commit(epoch=record.epoch, generation=entry.index, missing_levels=missing_levels_of(entry), **fields)


def missing_levels_of(entry: LogEntry) -> int:
    """Return the number of farthest levels that do not have the chunks of this generation."""
    return int(entry.fields.get("missing_levels", 0))


def check_chunks(blobs: Blobs, wanted: Iterable[Chunk]) -> None:
    """Read and verify chunks.

    Raises:
        Damaged: one is bad; the message is of the first one.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(partial(check_chunk, blobs), wanted))


def check_generation(blobs: Blobs, name: str) -> str | None:
    """Verify a generation, and return what is wrong, or None."""
    try:
        check_chunks(blobs, read_manifest(blobs, name).chunks)
    except Damaged as damage:
        return str(damage)
    return None


def known_chunks(blobs: Blobs, entries: list[LogEntry], whole: Manifest) -> dict[str, Chunk]:
    """Return the chunks of a verified generation that a new save may use again, by xxh3.

    Leave out chunks that an unfinished gc record names: a late delete may still remove them.

    Raises:
        Damaged: the list of such a record cannot be read, so no chunk is safe to use again.
    """
    going = {key for entry in unfinished_gcs(entries) for key in _doomed_by(blobs, entry)}
    return {chunk.xxh3: chunk for chunk in whole.chunks if chunk.key not in going}


def base_chunks(blobs: Blobs, to: str) -> dict[str, Chunk]:
    """Return the chunks of the newest pinned generation of another destination, by xxh3, under their keys here.

    Raises:
        CheckpointError: nothing is pinned there, or it cannot be read.
    """
    base = open_existing(to)
    entries = read_entries(base)
    pinned = [entry for entry in live_commits(entries) if entry.index in pins(entries)]
    if not pinned:
        raise CheckpointError(
            f"nothing is pinned in {to}",
            hint=f"cordee checkpoint pin {to}: a base must be pinned, or it may be retired",
        )
    try:
        whole = read_manifest(base, pinned[-1].fields["manifest"])
    except Damaged as damage:
        raise CheckpointError(f"the base in {to} cannot be read: {damage}") from damage
    prefix = remember(blobs, to)
    return {chunk.xxh3: replace(chunk, key=prefix + chunk.key) for chunk in whole.chunks}


def sweep_near(log: Log, blobs: Blobs, save: int) -> None:
    """Remove the blobs that no live generation needs from this node's own levels, which only it can reach."""
    near = blobs.levels[:-1]
    if near:
        with contextlib.suppress(Damaged):  # The needed blobs are not known then.
            for key in _unneeded(blobs, live_commits(log.entries), _front(log, save), near):
                for level in near:
                    level.delete(key)


def is_verified(blobs: Blobs, entry: LogEntry) -> bool:
    """Return whether every rank has read its chunks of this generation back from storage."""
    record = entry.record
    assert record is not None, "a commit has a record"
    prefix = parts_prefix(record.epoch, record.nonce, record.fields["save"])
    return all(blobs.size(verified_key(prefix, rank)) is not None for rank in range(record.fields["world_size"]))


class _Nothing(Exception):
    """A collection has nothing to remove."""


class _TooFew(Exception):
    """Too few generations verify to retire any."""


@dataclass(frozen=True)
class Collected:
    """The result of a collection: retired generations by index, and the number of deleted blobs."""

    retired: list[int]
    deleted: int


def collect(
    log: Log,
    blobs: Blobs,
    *,
    keep: Keep | None,
    save: int | None = None,
    verified: Set[int] = frozenset(),
    damaged: frozenset[int] = frozenset(),
) -> Collected:
    """Retire the generations that neither `keep` nor a pin keeps, and remove the blobs that no live one needs.

    Without `keep` no generation is retired.

    It touches only blobs of older attempts, and of this one up to `save` (without `save`: up to the newest commit), so
    a concurrent save is safe. `verified` are generations known to verify besides those that their ranks declared, and
    `damaged` those that no longer verify.
    """
    made: list[tuple[list[int], list[str], str]] = []

    def fields() -> dict[str, object]:
        retired, doomed = _plan(log, blobs, keep, save, lambda entry: _verifies(blobs, entry, verified, damaged))
        if not (retired or doomed):
            raise _Nothing
        data = seal({"format": FORMAT, "keys": doomed})
        digest = str(blake3(data).hexdigest())
        blobs.put_if_absent(f"{GC_FOLDER}/{digest}", data)
        made.append((retired, doomed, digest))
        point("gc.before")
        return {"retired": retired, "doomed": digest}

    try:
        log.append("gc", fields)
        point("gc.begun")
    except (Damaged, _TooFew):
        return Collected([], 0)  # Damaged: the blobs that a kept manifest needs are not known.
    except _Nothing:
        made.append(([], [], ""))
    retired, doomed, digest = made[-1]
    for key in doomed:
        blobs.delete(key)
        point("gc.deleting")
    # The list above includes the blobs of killed collections, so their records end too.
    for entry in unfinished_gcs(log.entries):
        log.append("gc", ends=entry.index)
        blobs.delete(f"{GC_FOLDER}/{entry.fields['doomed']}")
    for _, _, unused in made[:-1]:
        if unused != digest:
            blobs.delete(f"{GC_FOLDER}/{unused}")
    return Collected(retired, len(doomed))


def kept_of(entries: list[LogEntry], good: list[LogEntry], keep: Keep) -> list[LogEntry]:
    """Return the live generations to keep, given those that verify, oldest first.

    Each level keeps equally many: the newest ones may be on disks that are lost when they are needed.
    """
    live = live_commits(entries)
    verifies = {entry.index for entry in good}
    commits = [entry for entry in of_kind(entries, "commit") if not missing_levels_of(entry)]
    nth = {entry.index: number for number, entry in enumerate(commits)}
    staying = set(pins(entries))
    for missing_levels in {missing_levels_of(entry) for entry in live} | {0}:
        reach = [entry for entry in good if missing_levels_of(entry) <= missing_levels]
        oldest = reach[-keep.last].index if len(reach) >= keep.last else -1
        staying |= {
            entry.index for entry in live if missing_levels_of(entry) <= missing_levels and entry.index >= oldest
        }
    home = [entry for entry in good if not missing_levels_of(entry)]
    newest_us = _at_us(home[-1]) if home else 0

    def stays(entry: LogEntry) -> bool:
        if entry.index in staying:
            return True
        if entry.index not in verifies or missing_levels_of(entry):
            return False
        recent = keep.within_s is not None and newest_us - _at_us(entry) <= keep.within_s * US_PER_S
        return recent or (keep.every is not None and nth[entry.index] % keep.every == 0)

    return [entry for entry in live if stays(entry)]


def _at_us(entry: LogEntry) -> int:
    """Return the time of the commit by its record, since file times change when files are copied."""
    return int(entry.fields.get("at_us", 0))


def would_collect(log: Log, blobs: Blobs, *, keep: Keep | None) -> tuple[list[int], list[str]]:
    """Return the generations and keys that `collect` by a visitor would remove now.

    Raises:
        Damaged: the manifest of a generation that stays cannot be read, so nothing would be removed.
    """
    try:
        return _plan(log, blobs, keep, None, lambda entry: is_verified(blobs, entry))
    except _TooFew:
        return [], []


def _verifies(blobs: Blobs, entry: LogEntry, verified: Set[int], damaged: Set[int]) -> bool:
    return entry.index not in damaged and (entry.index in verified or is_verified(blobs, entry))


def _plan(
    log: Log, blobs: Blobs, keep: Keep | None, save: int | None, verifies: Callable[[LogEntry], bool]
) -> tuple[list[int], list[str]]:
    """Return the generations to retire and the keys to remove."""
    live = live_commits(log.entries)
    kept = live
    if keep is not None:
        good = [entry for entry in live if verifies(entry)]
        if len(good) < keep.last:
            raise _TooFew
        kept = kept_of(log.entries, good, keep)
    staying = {entry.index for entry in kept}
    return [entry.index for entry in live if entry.index not in staying], _unneeded(blobs, kept, _front(log, save))


def best_of(entries: list[LogEntry]) -> tuple[int, float] | None:
    """Return generation and value of the checkpoint that a script keeps as its best; None: there is none."""
    found = {each.fields["generation"]: each.fields for each in of_kind(entries, "pin")}
    best = [(at, fields["value"]) for at, fields in found.items() if fields["name"] == BEST and "value" in fields]
    return min(best, key=lambda each: each[1], default=None)


def pin(log: Log, generation: int, name: str | None, value: float | None = None) -> None:
    """Pin a generation under this name, so that it is never retired; None: remove the pin. `value`: what it is best by.

    Raises:
        CheckpointError: the generation is retired already.
    """

    def fields() -> dict[str, object]:
        if generation not in {entry.index for entry in live_commits(log.entries)}:
            raise CheckpointError(
                f"generation {generation} is retired", hint="cordee checkpoint ls lists those that are not"
            )
        return {"generation": generation, "name": name, **({} if value is None else {"value": value})}

    log.append("pin", fields)


def _front(log: Log, save: int | None) -> tuple[int, str, int]:
    """Return (epoch, nonce, save) of the newest save that cannot still be running."""
    if save is not None:
        return log.epoch, log.nonce, save
    epoch, nonce, newest = 0, "", 0
    for entry in log.entries:
        if entry.record and entry.record.kind == "open":
            epoch, nonce, newest = entry.record.epoch, entry.record.nonce, 0
        elif entry.record and entry.record.kind == "commit" and entry.record.nonce == nonce:
            newest = entry.record.fields["save"]
    return epoch, nonce, newest


def _unneeded(
    blobs: Blobs, kept: list[LogEntry], front: tuple[int, str, int], within: Sequence[Blobs] = ()
) -> list[str]:
    """Return the keys in the store, or in these levels of it, that no kept generation needs."""
    epoch, nonce, save = front
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
        for level in within or (blobs,)
        for key in level.list(folder)
        if key not in needed and (by := written_by(key)) is not None and by <= (epoch, save)
    ]
    running = parts_prefix(epoch, nonce, save)
    mine = running.rsplit("/", 1)[0] + "/"
    for key in () if within else blobs.list("parts"):
        later = key.startswith(mine) and key.split(".")[0] > running
        if not later and not key.startswith(tuple(prefixes)):
            doomed.append(key)
    return doomed


def _doomed_by(blobs: Blobs, entry: LogEntry) -> list[str]:
    key = f"{GC_FOLDER}/{entry.fields['doomed']}"
    data = blobs.get(key)
    if data is None:
        raise Damaged(f"{key} is missing")
    return list(unseal(data)["keys"])

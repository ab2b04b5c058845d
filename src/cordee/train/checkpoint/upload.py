"""Upload captures one by one: write chunks, join the ranks' parts, commit, read back, collect.

Without torch and collectives: the uploaders of a gang meet in storage, by the parts that each writes for a save.
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cordee.errors import CheckpointError, CordeeError, DestinationError, FencedError
from cordee.ids import JobId
from cordee.points import point
from cordee.storage import rescue
from cordee.storage.chunks import Chunk, check_chunk, write_chunk, written_by
from cordee.storage.destination import is_remote, level_urls
from cordee.storage.files import Blobs
from cordee.storage.generations import Commit, collect, commit_fields, commit_of, sweep_near
from cordee.storage.history import RESCUED
from cordee.storage.levels import without_farthest
from cordee.storage.log import Log
from cordee.storage.manifest import (
    join_parts,
    parts_prefix,
    read_failed,
    read_part,
    verified_key,
    write_failed,
    write_manifest,
    write_part,
)
from cordee.storage.sealed import Damaged, seal
from cordee.train.checkpoint.reuse import ReusableChunks
from cordee.workload.keep import parse_keep

logger = logging.getLogger("cordee.train")

THREADS = 4
POLL_S_MIN, POLL_S_MAX = 0.002, 0.05
# An object store charges for each request, and all ranks poll.
POLL_REMOTE_S_MAX = 1.0
REPORT_AGAIN_S = 1.0  # between two tries to report a failure to the other ranks


@dataclass(frozen=True)
class UploaderSetup:
    """The setup of an uploader: the first line on its standard input.

    Attributes:
        fds: descriptors of the staging buffers.
        marks_fd: descriptor of the page with the marks of complete captures.
        verified: the generation that this attempt has loaded, and so verified.
        saves_before: number of saves handed to earlier uploaders of this rank.
        damaged: generations that this attempt has skipped.
        base: a destination whose pinned generation may be built upon.
    """

    to: str
    rank: int
    world_size: int
    epoch: int
    nonce: str
    keep: str | int
    grace_s: float
    fds: list[int]
    marks_fd: int
    verified: int | None
    saves_before: int
    damaged: list[int]
    base: str | None = None


@dataclass(frozen=True)
class _Uploaded:
    """A commit, its chunks, and those of them that are new."""

    commit: Commit
    chunks: list[Chunk]
    written: list[Chunk]


class Uploader:
    """The uploads of one rank, one by one.

    Args:
        emit: called with each event for the trainer.
        memory: returns the content of a staging buffer, by its number and size in bytes.
        is_busy: returns whether the next save waits already.
        on_settled: called with a save when neither it nor any before it needs an upload any more.
    """

    def __init__(
        self,
        setup: UploaderSetup,
        blobs: Blobs,
        emit: Callable[[dict[str, object]], None],
        memory: Callable[[int, int], memoryview],
        *,
        is_busy: Callable[[], bool] = lambda: False,
        on_settled: Callable[[float], None] = lambda save: None,
    ) -> None:
        self.setup = setup
        self.blobs = blobs
        self.emit = emit
        self.memory = memory
        self.is_busy = is_busy
        self.on_settled = on_settled
        self.log = Log.join(blobs, epoch=setup.epoch, nonce=setup.nonce)
        self.verified: set[int] = set() if setup.verified is None else {setup.verified}
        self.reusable = ReusableChunks(blobs, setup.base)
        self.reusable.load(self.log, setup.verified)
        self._poll_s_max = POLL_REMOTE_S_MAX if is_remote(level_urls(setup.to)[-1]) else POLL_S_MAX
        self._pool = ThreadPoolExecutor(THREADS)  # Kept, since each thread has its own memory to read into.
        self._unreported: dict[int, str] = {}  # by save: the reason of a failure that the other ranks do not know yet

    @property
    def has_unreported(self) -> bool:
        """Return whether the other ranks do not know of a failure yet."""
        return bool(self._unreported)

    def save(self, command: dict[str, Any]) -> None:
        """Upload and commit one capture; emit one event with the outcome."""
        if uploaded := self._upload(command):
            self.on_settled(command["save"])
            self._follow_up(command, uploaded)

    def _upload(self, command: dict[str, Any]) -> _Uploaded | None:
        """Return the committed upload; None: it failed, and the failure was reported."""
        number = command["save"]
        self.report_failures()  # A rank that still waits for a failed save would not take this one.
        try:
            uploaded = self._save(command, self._prefix(number))
        except (CordeeError, Damaged) as error:
            self._report_failed(number, error_event(error)["message"])
            self.emit({**error_event(error), "save": number})
            return None
        self.emit({"event": "committed", "save": number, **asdict(uploaded.commit)})
        return uploaded

    def _follow_up(self, command: dict[str, Any], done: _Uploaded) -> None:
        """Verify a committed save and collect garbage; only the next save waits for it."""
        number, prefix = command["save"], self._prefix(command["save"])
        levels = without_farthest(self.blobs, done.commit.missing_levels).levels
        self.reusable.forget()
        try:
            self._read_back(prefix, done, levels)
            self.reusable.learn(done.commit.generation, done.chunks)
            if self.setup.rank == 0:
                self._collect(prefix, number, done.commit.generation)
            elif os.environ.get("LOCAL_RANK", "0") == "0":
                sweep_near(self.log, self.blobs, number)
            if not command.get("ending"):  # After the last save of an attempt no next save repairs chunks.
                self.reusable.reread(levels, done.chunks, done.written, self._pool, self.is_busy)
        except (CordeeError, Damaged) as error:
            self.emit({**error_event(error), "save": number})

    def abandon(self, number: int) -> None:
        """Report to the other ranks that this trainer died before it captured this save."""
        self._report_failed(number, "its process ended before it captured this save")

    def report_failures(self) -> None:
        """Report the failed saves that could not be written to storage so far."""
        with contextlib.suppress(CordeeError):  # Storage still fails.
            for number, reason in list(self._unreported.items()):
                write_failed(self.blobs, self._prefix(number), f"rank {self.setup.rank}: {reason}")
                del self._unreported[number]

    def _report_failed(self, number: int, reason: str) -> None:
        self._unreported[number] = reason
        self.report_failures()

    def _prefix(self, number: int) -> str:
        return parts_prefix(self.setup.epoch, self.setup.nonce, number)

    # -- the trainer has ended -----------------------------------------------------------------------------

    def rescue(self, in_memory: dict[int, dict[str, object]], *, died: bool) -> None:
        """Commit the newest capture that all ranks have in memory, if nothing newer is durable.

        Args:
            in_memory: commands of the captures that are whole in this rank's memory, by save.
            died: the trainer did not close its uploader. If it did, and has no capture in memory, no other rank needs
                to know.
        """
        rescued = None
        try:
            rescued = self._rescue(in_memory, died=died)
        except (CordeeError, Damaged) as error:  # Storage fails, or a newer attempt runs; durable generations stay.
            self.emit({**error_event(error), "save": None})
        self.on_settled(math.inf)
        if rescued is not None:
            self._follow_up(*rescued)

    def _rescue(
        self, in_memory: dict[int, dict[str, object]], *, died: bool
    ) -> tuple[dict[str, object], _Uploaded] | None:
        setup = self.setup
        self.report_failures()
        self.log.refresh()
        records = [entry.record for entry in self.log.commits() if entry.record]
        durable = max((each.fields["save"] for each in records if each.nonce == setup.nonce), default=0)
        newer = {save: command for save, command in in_memory.items() if save > durable}
        if newer or (died and setup.world_size > 1):
            self._report_in_memory(newer)
        if not newer:
            return None
        point("rescue.held")
        save = rescue.newest_of_all(
            self.blobs,
            setup.epoch,
            setup.nonce,
            setup.world_size,
            lambda done: _poll(done, setup.grace_s, self._poll_s_max),
        )
        command = {**newer[save], "ending": RESCUED} if save is not None else {}
        done = self._upload(command) if command else None
        if done:
            _report_commit(setup.rank, self.log, command)
        rescue.write_rescued(self.blobs, setup.epoch, setup.nonce, save if done else None)
        return (command, done) if done else None

    def _report_in_memory(self, saves: Collection[int]) -> None:
        """Write which saves this rank has in memory; on a full disk, retry until there is room.

        A rank without any gives up earlier.
        """
        setup = self.setup
        problem: list[DestinationError] = []

        def written() -> bool:
            try:
                rescue.write_held(self.blobs, setup.epoch, setup.nonce, setup.rank, saves)
            except DestinationError as error:
                problem[:] = [error]
                return False
            return True

        if not _poll(written, rescue.RESCUE_S_MAX if saves else setup.grace_s, REPORT_AGAIN_S):
            raise problem[0]

    # -- the steps of an upload ----------------------------------------------------------------------------

    def _save(self, command: dict[str, Any], prefix: str) -> _Uploaded:
        started_s = time.monotonic()
        missing_levels = min(command.get("missing_levels", 0), len(self.blobs.levels) - 1)
        chunks, written = self._write_chunks(command, without_farthest(self.blobs, missing_levels))
        point("part.before")
        write_part(self.blobs, prefix, self.setup.rank, self._part(command, chunks, written, started_s))
        self.emit({"event": "written", "save": command["save"]})
        patience_s = max(self.setup.grace_s, 2 * (time.monotonic() - started_s))
        if self.setup.rank == 0:
            says = {"missing_levels": missing_levels, "ending": command.get("ending")}
            commit = self._commit(prefix, command["save"], started_s, patience_s, says)
        else:
            commit = self._await_commit(prefix, command["save"], 2 * patience_s)
        return _Uploaded(commit, chunks, written)

    def _write_chunks(self, command: dict[str, Any], blobs: Blobs) -> tuple[list[Chunk], list[Chunk]]:
        """Store the capture durably; return its chunks, and those of them that are new."""
        memory = self.memory(command["slot"], command["total_bytes"])
        point("chunks.before")

        def write(cut: list[int]) -> tuple[Chunk, bool]:
            done = write_chunk(
                blobs,
                memory[cut[0] : cut[0] + cut[1]],
                save=command["save"],
                epoch=self.setup.epoch,
                known=self.reusable.known,
                durable=False,
                decayed_copies=self.reusable.decayed,
            )
            point("chunks.one")
            return done

        results = list(self._pool.map(write, command["cuts"]))
        memory.release()
        written = [chunk for chunk, new in results if new]
        blobs.sync(chunk.key for chunk in written)  # The part record promises that they are durable.
        return [chunk for chunk, _ in results], written

    def _part(
        self, command: dict[str, Any], chunks: list[Chunk], written: list[Chunk], started_s: float
    ) -> dict[str, object]:
        """Return this rank's part record."""
        this = (self.setup.epoch, command["save"])
        reuses = any(written_by(chunk.key) != this for chunk in chunks)
        return {
            **{name: command[name] for name in ("save", "step", "plan", "shards", "values", "extras", "stall_us")},
            "world_size": self.setup.world_size,
            "since": self.reusable.since if reuses else None,
            "chunks": [[chunk.key, chunk.length_bytes, chunk.xxh3] for chunk in chunks],
            "captured_bytes": sum(length for _, length in command["cuts"]),
            "written_bytes": sum(chunk.length_bytes for chunk in written),
            "uploaded_us": _us_since(started_s),
        }

    def _commit(self, prefix: str, save: int, started_s: float, patience_s: float, says: dict[str, Any]) -> Commit:
        """Join the parts of all ranks and append the commit record, on rank 0."""
        parts = self._await_parts(prefix, save, patience_s)
        whole = join_parts([parts[rank] for rank in sorted(parts)], epoch=self.setup.epoch, save=save)
        point("manifest.before")
        name = write_manifest(self.blobs, whole)
        point("commit.before")

        def fields() -> dict[str, object]:
            live = {entry.index for entry in self.log.commits()}
            for rank, part in parts.items():
                if part["since"] is not None and part["since"] not in live:
                    raise CheckpointError(f"rank {rank} used chunks of generation {part['since']}, which is retired")
            return {
                **commit_fields(name, whole, at_us=time.time_ns() // 1000, **says),
                "uploaded_us": max(_us_since(started_s), *(rank.uploaded_us for rank in whole.ranks)),
            }

        index = self.log.append("commit", fields)
        point("commit.after")
        return commit_of(self.log.entries[index])

    def _await_parts(self, prefix: str, save: int, patience_s: float) -> dict[int, dict[str, object]]:
        parts: dict[int, dict[str, object]] = {}

        def all_there() -> bool:
            self._raise_if_failed(prefix)
            for rank in range(self.setup.world_size):
                if rank not in parts and (part := read_part(self.blobs, prefix, rank)) is not None:
                    parts[rank] = part
            return len(parts) == self.setup.world_size

        if not _poll(all_there, patience_s, self._poll_s_max):
            missing = [rank for rank in range(self.setup.world_size) if rank not in parts]
            raise CheckpointError(
                f"no part of ranks {missing} after {patience_s:.1f} s, so save {save} is not committed",
                hint="the previous generation is intact; see the logs of these ranks",
            )
        return parts

    def _await_commit(self, prefix: str, save: int, patience_s: float) -> Commit:
        found: list[Commit] = []

        def committed() -> bool:
            for entry in self.log.refresh():
                record = entry.record
                if record is None or record.kind != "commit" or record.nonce != self.setup.nonce:
                    continue
                if record.fields["save"] == save:
                    found.append(commit_of(entry))
            if not found:
                self._raise_if_failed(prefix)
            return bool(found)

        if not _poll(committed, patience_s, self._poll_s_max):
            raise CheckpointError(
                f"rank 0 has not committed save {save} after {patience_s:.1f} s",
                hint="the previous generation is intact; see the log of rank 0",
            )
        return found[0]

    def _raise_if_failed(self, prefix: str) -> None:
        reason = read_failed(self.blobs, prefix)
        if reason is not None:
            raise CheckpointError(reason, hint="the previous generation is intact, and the next save may succeed")

    def _read_back(self, prefix: str, done: _Uploaded, levels: Collection[Blobs]) -> None:
        """Verify the new chunks from the disk, not from the page cache, and record that they verify."""
        for level in levels:  # Each on its own: an intact copy does not prove the others.
            list(self._pool.map(partial(check_chunk, level, from_disk=True), done.written))
        self.blobs.put_if_absent(verified_key(prefix, self.setup.rank), seal({"format": 1, "chunks": len(done.chunks)}))

    def _collect(self, prefix: str, save: int, generation: int) -> None:
        """Retire generations once all ranks have read theirs back, or when the next save waits."""

        def verified() -> bool:
            ranks = range(self.setup.world_size)
            there = all(self.blobs.size(verified_key(prefix, rank)) is not None for rank in ranks)
            if there:
                self.verified.add(generation)  # Not looked up again at each save.
            return there or self.is_busy()

        _poll(verified, self.setup.grace_s, self._poll_s_max)
        collected = collect(
            self.log,
            self.blobs,
            keep=parse_keep(self.setup.keep),
            save=save,
            verified=self.verified,
            damaged=frozenset(self.setup.damaged),
        )
        self.emit({"event": "collected", "save": save, "retired": collected.retired})


def error_event(error: CordeeError | Damaged) -> dict[str, Any]:
    """Return the event that reports an error to the trainer."""
    if isinstance(error, CordeeError):
        kind = "fenced" if isinstance(error, FencedError) else "failed"
        return {"event": kind, "message": error.message, "hint": error.hint}
    return {"event": "failed", "message": str(error), "hint": None}


def _report_commit(rank: int, log: Log, command: dict[str, Any]) -> None:
    """Report a commit to the agent in the uploader's own stream, since the trainer cannot."""
    spool, job, epoch = (os.environ.get(f"CORDEE_{name}") for name in ("SPOOL", "JOB", "EPOCH"))
    entry = log.commits()[-1] if log.commits() else None
    record = entry.record if entry else None
    if not (rank == 0 and spool and job and epoch and entry and record):
        return
    if (record.nonce, record.fields["save"]) != (log.nonce, command["save"]):
        return  # it was not committed
    from cordee.events import CheckpointCommitted  # half of an uploader's start, and few need it
    from cordee.telemetry.stream import StreamWriter

    now_us = time.time_ns() // 1000
    event = CheckpointCommitted(
        at_us=now_us,
        job_id=JobId(job),
        epoch=int(epoch),
        step=record.fields["step"],
        generation=entry.index,
        size_bytes=record.fields["bytes"],
        stall_us=record.fields["stall_us"],
        upload_us=max(0, now_us - command["captured_us"]),  # so that time since the capture counts as lost
    )
    with contextlib.suppress(OSError):
        StreamWriter(Path(spool) / f"rank{rank}-uploader.jsonl").append(event)


def _poll(done: Callable[[], bool], patience_s: float, wait_s_max: float) -> bool:
    deadline_s = time.monotonic() + patience_s
    wait_s = POLL_S_MIN
    while not done():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, wait_s_max)
    return True


def _us_since(started_s: float) -> int:
    return round((time.monotonic() - started_s) * 1_000_000)

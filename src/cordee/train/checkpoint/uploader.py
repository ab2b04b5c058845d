"""The drain: a process beside each rank that brings captures from shared memory to the store, and commits them.

Started as `python -m cordee.train.checkpoint.uploader` with the staging memory's descriptor. It imports no torch, takes
part in no collective, ignores the signals that end the trainer, and ends when its standard input closes and its work is
done.
It is also what outlives the trainer: captures that are held in memory are its own to bring, once the trainer is gone.
"""

import contextlib
import itertools
import json
import logging
import math
import mmap
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cordee.errors import CheckpointError, CordeeError, DestinationError, FencedError
from cordee.events import CheckpointCommitted
from cordee.ids import JobId
from cordee.points import point
from cordee.storage import rescue
from cordee.storage.base_destination import owner_of
from cordee.storage.chunks import Chunk, check_chunk, has_decayed, write_chunk, written_by
from cordee.storage.destination import is_remote, open_blobs, places
from cordee.storage.files import Blobs
from cordee.storage.generations import Commit, base_chunks, collect, commit_fields, commit_of, known_chunks, sweep_near
from cordee.storage.history import RESCUED
from cordee.storage.levels import without_farthest
from cordee.storage.log import Log
from cordee.storage.manifest import (
    join_parts,
    parts_prefix,
    read_failed,
    read_manifest,
    read_part,
    verified_key,
    write_failed,
    write_manifest,
    write_part,
)
from cordee.storage.sealed import Damaged, seal
from cordee.telemetry.stream import StreamWriter
from cordee.train.checkpoint.capture_marks import CaptureMarks
from cordee.workload.keep import parse_keep

logger = logging.getLogger("cordee.train")

THREADS = 4
POLL_S_MIN, POLL_S_MAX = 0.002, 0.05
# An object store bills each look, and all ranks look at once.
POLL_REMOTE_S_MAX = 1.0
# Each chunk that is used again is read again, in each store, once in so many saves that reach the store: what decays
# would decay for whoever uses it.
REREAD_SAVES = 16
SAY_AGAIN_S = 1.0  # between two tries to tell of a failure


@dataclass(frozen=True)
class UploaderSetup:
    """What a drain has to know before its first save; the first line on its standard input."""

    to: str
    rank: int
    world_size: int
    epoch: int
    nonce: str
    keep: str | int
    grace_s: float
    fds: list[int]  # of the staging buffers
    marks_fd: int
    verified: int | None  # the generation that this attempt has loaded, which is known to verify
    saves_before: int  # saves that an earlier drain of this rank was given
    damaged: list[int]  # generations that this attempt has stepped over
    base: str | None = None  # a destination whose pinned generation may be rested on


Brought = tuple[Commit, list[Chunk], list[Chunk]]  # a commit, its chunks, and those of them that are new


class Uploader:
    """Handles one save after the other."""

    def __init__(
        self,
        setup: UploaderSetup,
        blobs: Blobs,
        emit: Callable[[dict[str, Any]], None],
        memory: Callable[[int, int], memoryview],
        *,
        busy: Callable[[], bool] = lambda: False,
        settled: Callable[[float], None] = lambda save: None,
    ) -> None:
        self.setup = setup
        self.blobs = blobs
        self.emit = emit
        self.memory = memory  # (buffer, bytes)
        self.busy = busy  # Does the next save wait already?
        self.settled = settled  # told which captures are not to be brought any more: those up to this one
        self.poll_s_max = POLL_REMOTE_S_MAX if is_remote(places(setup.to)[-1]) else POLL_S_MAX
        self.log = Log.join(blobs, epoch=setup.epoch, nonce=setup.nonce)
        self.verified: set[int] = set() if setup.verified is None else {setup.verified}
        self.base = {} if setup.base is None else base_chunks(blobs, setup.base)
        self.known: dict[str, Chunk] = dict(self.base)
        self.known_since = setup.verified
        # By level. Anywhere: a drain that dies often must not begin alike each time.
        self.turns = [secrets.randbelow(REREAD_SAVES) for _ in blobs.levels]
        self.rotten: set[tuple[Blobs, str]] = set()  # level and key, until a save that reaches it has mended it
        self.pool = ThreadPoolExecutor(THREADS)  # Kept: each thread has memory of its own to read into.
        self.unsaid: dict[int, str] = {}  # by save: why it failed, which the others have not been told yet
        for entry in self.log.commits():
            if entry.index == setup.verified and entry.record:
                with contextlib.suppress(Damaged):  # Since then something happened to it: then it is no base.
                    whole = read_manifest(blobs, entry.record.fields["manifest"])
                    self.known |= known_chunks(blobs, self.log.entries, whole)

    def save(self, command: dict[str, Any]) -> None:
        """Bring one capture to the store and see it committed; every outcome is one event."""
        if brought := self._bring(command):
            self.settled(command["save"])
            self._look_after(command, *brought)

    def _bring(self, command: dict[str, Any]) -> Brought | None:
        """What was committed; None: it failed, and that was told."""
        number = command["save"]
        self.say_failures()  # Else a rank may still wait for a save that failed, and not take this one.
        try:
            brought = self._save(command, self._prefix(number))
        except (CordeeError, Damaged) as error:
            self._say_failed(number, _plain(error)["message"])
            self.emit({**_plain(error), "save": number})
            return None
        self.emit({"event": "committed", "save": number, **asdict(brought[0])})
        return brought

    def _look_after(self, command: dict[str, Any], commit: Commit, chunks: list[Chunk], written: list[Chunk]) -> None:
        """What is done behind a commit: nobody waits for it but the next save."""
        number, prefix = command["save"], self._prefix(command["save"])
        self.known = dict(self.base)
        try:
            self._read_back(prefix, chunks, written, commit.missing_levels)
            self.known |= {chunk.xxh3: chunk for chunk in chunks}
            self.known_since = commit.generation
            if self.setup.rank == 0:
                self._collect(prefix, number, commit.generation)
            elif os.environ.get("LOCAL_RANK", "0") == "0":
                sweep_near(self.log, self.blobs, number)
            if not command.get("ending"):
                self._reread(chunks, written, commit.missing_levels)
        except (CordeeError, Damaged) as error:
            self.emit({**_plain(error), "save": number})

    def abandon(self, number: int) -> None:
        """The trainer has died without a word: tell the other ranks that it will not capture this save."""
        self._say_failed(number, "its process ended before it captured this save")

    def say_failures(self) -> None:
        """Tell the other ranks of saves that failed when the store took no word of it."""
        with contextlib.suppress(CordeeError):  # It is still away.
            for number, reason in list(self.unsaid.items()):
                write_failed(self.blobs, self._prefix(number), f"rank {self.setup.rank}: {reason}")
                del self.unsaid[number]

    def _say_failed(self, number: int, reason: str) -> None:
        self.unsaid[number] = reason
        self.say_failures()

    def _prefix(self, number: int) -> str:
        return parts_prefix(self.setup.epoch, self.setup.nonce, number)

    def rescue(self, held: dict[int, dict[str, Any]], *, died: bool) -> None:
        """The trainer has gone: commit the newest capture that all ranks hold, if nothing newer is durable.

        `held` are the captures that are whole in this rank's memory, by save. Of a trainer that went in order and left
        nothing behind no other rank needs to hear.
        """
        brought = None
        try:
            brought = self._rescue(held, died=died)
        except (CordeeError, Damaged) as error:  # The store is away, or a newer attempt runs: what is durable stands.
            self.emit({**_plain(error), "save": None})
        self.settled(math.inf)
        if brought is not None:
            command, done = brought
            self._look_after(command, *done)

    def _rescue(self, held: dict[int, dict[str, Any]], *, died: bool) -> tuple[dict[str, Any], Brought] | None:
        setup = self.setup
        self.say_failures()
        self.log.refresh()
        own = [entry.record for entry in self.log.commits() if entry.record]
        durable = max((each.fields["save"] for each in own if each.nonce == setup.nonce), default=0)
        mine = {save: command for save, command in held.items() if save > durable}
        if mine or (died and setup.world_size > 1):
            self._say_held(mine)
        if not mine:
            return None
        point("rescue.held")
        save = rescue.newest_of_all(
            self.blobs,
            setup.epoch,
            setup.nonce,
            setup.world_size,
            lambda done: _poll(done, setup.grace_s, self.poll_s_max),
        )
        command = {**mine[save], "ending": RESCUED} if save is not None else {}
        done = self._bring(command) if command else None
        if done:
            _report(setup.rank, self.log, command)
        rescue.write_rescued(self.blobs, setup.epoch, setup.nonce, save if done else None)
        return (command, done) if done else None

    def _say_held(self, saves: Collection[int]) -> None:
        """Also on a disk that is full, as soon as there is room; who holds nothing is not waited for any longer."""
        setup = self.setup
        problem: list[DestinationError] = []

        def said() -> bool:
            try:
                rescue.write_held(self.blobs, setup.epoch, setup.nonce, setup.rank, saves)
            except DestinationError as error:
                problem[:] = [error]
                return False
            return True

        if not _poll(said, rescue.RESCUE_S_MAX if saves else setup.grace_s, SAY_AGAIN_S):
            raise problem[0]

    def _save(self, command: dict[str, Any], prefix: str) -> Brought:
        started_s = time.monotonic()
        memory = self.memory(command["slot"], command["total_bytes"])
        missing_levels = min(command.get("missing_levels", 0), len(self.blobs.levels) - 1)
        blobs = without_farthest(self.blobs, missing_levels)
        point("chunks.before")

        def write(cut: list[int]) -> tuple[Chunk, bool]:
            done = write_chunk(
                blobs,
                memory[cut[0] : cut[0] + cut[1]],
                save=command["save"],
                epoch=self.setup.epoch,
                known=self.known,
                durable=False,
                rotten=self.rotten,
            )
            point("chunks.one")
            return done

        results = list(self.pool.map(write, command["cuts"]))
        memory.release()
        chunks = [chunk for chunk, _ in results]
        written = [chunk for chunk, new in results if new]
        blobs.sync(chunk.key for chunk in written)  # The part says that they are durable.
        point("part.before")
        body = {name: command[name] for name in ("save", "step", "plan", "shards", "values", "extras", "stall_us")}
        this = (self.setup.epoch, command["save"])
        reuses = any(written_by(chunk.key) != this for chunk in chunks)
        body |= {
            "world_size": self.setup.world_size,
            "since": self.known_since if reuses else None,
            "chunks": [[chunk.key, chunk.length_bytes, chunk.xxh3] for chunk in chunks],
            "captured_bytes": sum(length for _, length in command["cuts"]),
            "written_bytes": sum(chunk.length_bytes for chunk in written),
            "uploaded_us": _us_since(started_s),
        }
        write_part(self.blobs, prefix, self.setup.rank, body)
        self.emit({"event": "written", "save": command["save"]})
        patience_s = max(self.setup.grace_s, 2 * (time.monotonic() - started_s))
        if self.setup.rank == 0:
            says = {"missing_levels": missing_levels, "ending": command.get("ending")}
            commit = self._commit(prefix, command["save"], started_s, patience_s, says)
        else:
            commit = self._await_commit(prefix, command["save"], 2 * patience_s)
        return commit, chunks, written

    def _commit(self, prefix: str, save: int, started_s: float, patience_s: float, says: dict[str, Any]) -> Commit:
        parts: dict[int, dict[str, Any]] = {}

        def all_there() -> bool:
            self._raise_if_failed(prefix)
            for rank in range(self.setup.world_size):
                if rank not in parts and (part := read_part(self.blobs, prefix, rank)) is not None:
                    parts[rank] = part
            return len(parts) == self.setup.world_size

        if not _poll(all_there, patience_s, self.poll_s_max):
            missing = [rank for rank in range(self.setup.world_size) if rank not in parts]
            raise CheckpointError(
                f"no part of ranks {missing} after {patience_s:.1f} s, so save {save} is not committed",
                hint="the previous generation is intact; look at the logs of these ranks",
            )
        whole = join_parts([parts[rank] for rank in sorted(parts)], epoch=self.setup.epoch, save=save)
        point("manifest.before")
        name = write_manifest(self.blobs, whole)
        point("commit.before")

        def fields() -> dict[str, Any]:
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

    def _await_commit(self, prefix: str, save: int, patience_s: float) -> Commit:
        found: list[Commit] = []

        def committed() -> bool:
            for entry in self.log.refresh():
                record = entry.record
                own = record is not None and record.kind == "commit" and record.nonce == self.setup.nonce
                if own and record is not None and record.fields["save"] == save:
                    found.append(commit_of(entry))
            if not found:
                self._raise_if_failed(prefix)
            return bool(found)

        if not _poll(committed, patience_s, self.poll_s_max):
            raise CheckpointError(
                f"rank 0 has not committed save {save} after {patience_s:.1f} s",
                hint="the previous generation is intact; look at the log of rank 0",
            )
        return found[0]

    def _raise_if_failed(self, prefix: str) -> None:
        reason = read_failed(self.blobs, prefix)
        if reason is not None:
            raise CheckpointError(reason, hint="the previous generation is intact, and the next save may succeed")

    def _read_back(self, prefix: str, chunks: list[Chunk], written: list[Chunk], missing_levels: int) -> None:
        """Verify what this save wrote from the disk, not from the page cache; then say so."""
        for level in without_farthest(
            self.blobs, missing_levels
        ).levels:  # Each by itself: one intact copy says nothing of the others.
            list(self.pool.map(partial(check_chunk, level, from_disk=True), written))
        self.blobs.put_if_absent(verified_key(prefix, self.setup.rank), seal({"format": 1, "chunks": len(chunks)}))

    def _reread(self, chunks: list[Chunk], written: list[Chunk], missing_levels: int) -> None:
        """Read what is due of what was used again; what has decayed the next save mends, which has it in memory.

        Not while that one waits, nor behind the last of an attempt. A base, which is no level of ours, is read
        where any level is due.
        """
        levels = without_farthest(self.blobs, missing_levels).levels
        self.turns = [turn + (at < len(levels)) for at, turn in enumerate(self.turns)]
        new = {chunk.key for chunk in written}

        def look(number: int, chunk: Chunk) -> None:
            due = [level for at, level in enumerate(levels) if (number + self.turns[at]) % REREAD_SAVES == 0]
            if chunk.key in new or not due or self.busy():
                return
            owner, key = owner_of(self.blobs, chunk.key)
            for level in due if owner is self.blobs else owner.levels:
                if has_decayed(level, chunk, key):
                    logger.warning("%s has decayed in %s", key, level)
                    self.rotten.add((level, key))

        list(self.pool.map(look, itertools.count(), chunks))

    def _collect(self, prefix: str, save: int, generation: int) -> None:
        """Retention, once all ranks have read back; at the latest when the next save waits."""

        def settled() -> bool:
            ranks = range(self.setup.world_size)
            there = all(self.blobs.size(verified_key(prefix, rank)) is not None for rank in ranks)
            if there:
                self.verified.add(generation)  # Known from now on: it is not looked up again at each save.
            return there or self.busy()

        _poll(settled, self.setup.grace_s, self.poll_s_max)
        collected = collect(
            self.log,
            self.blobs,
            keep=parse_keep(self.setup.keep),
            save=save,
            verified=self.verified,
            damaged=frozenset(self.setup.damaged),
        )
        self.emit({"event": "collected", "save": save, "retired": collected.retired})


def _report(rank: int, log: Log, command: dict[str, Any]) -> None:
    """Tell the agent of a commit whose trainer cannot, in a stream of its own."""
    spool, job, epoch = (os.environ.get(f"CORDEE_{name}") for name in ("SPOOL", "JOB", "EPOCH"))
    entry = log.commits()[-1] if log.commits() else None
    record = entry.record if entry else None
    if not (rank == 0 and spool and job and epoch and entry and record):
        return
    if (record.nonce, record.fields["save"]) != (log.nonce, command["save"]):
        return  # it was not committed
    now_us = time.time_ns() // 1000
    event = CheckpointCommitted(
        at_us=now_us,
        job_id=JobId(job),
        epoch=int(epoch),
        step=record.fields["step"],
        generation=entry.index,
        size_bytes=record.fields["bytes"],
        stall_us=record.fields["stall_us"],
        upload_us=max(0, now_us - command["captured_us"]),  # so that what ran since the capture counts as lost
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


def _plain(error: CordeeError | Damaged) -> dict[str, Any]:
    """The event that tells of an error."""
    if isinstance(error, CordeeError):
        kind = "fenced" if isinstance(error, FencedError) else "failed"
        return {"event": kind, "message": error.message, "hint": error.hint}
    return {"event": "failed", "message": str(error), "hint": None}


def _us_since(started_s: float) -> int:
    return round((time.monotonic() - started_s) * 1_000_000)


def _serve(
    drain: Uploader, commands: "queue.SimpleQueue[dict[str, Any] | None]", newest: int, seals: CaptureMarks
) -> None:
    """One command after the other until there are none, then what the trainer has left behind; `newest`: its save."""
    layout: dict[str, Any] = {}
    held: dict[int, dict[str, Any]] = {}  # by buffer
    closed = False
    while True:
        try:
            command = commands.get(timeout=SAY_AGAIN_S if drain.unsaid else None)
        except queue.Empty:
            drain.say_failures()
            continue
        if command is None:
            break
        if command["do"] == "layout":
            layout = command
        elif command["do"] == "close":
            closed = True
        else:
            newest = command["save"]
            held[command["slot"]] = {**layout, **command}
            if command["do"] == "save":
                drain.save(held.pop(command["slot"]))
    if not closed:
        drain.abandon(newest + 1)
    whole = [each for slot, each in held.items() if seals.read(slot) == each["save"]]
    drain.rescue({each["save"]: each for each in whole}, died=not closed)


def main() -> None:
    """Serve one trainer: commands as JSON lines on standard input, events as JSON lines on standard output."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    trainer_left = threading.Event()
    captured = [0]  # the newest

    def read() -> None:
        try:
            for line in sys.stdin:
                if line.endswith("\n"):  # Half a line is a trainer that died writing it: no capture.
                    command = json.loads(line)
                    captured[0] = command.get("save", captured[0])
                    commands.put(command)
        finally:  # Whatever it was that came last: what was handed over is brought, and held captures too.
            trainer_left.set()
            commands.put(None)

    def emit(event: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # The trainer has gone; the log still tells what came of it.
            print(json.dumps(event), flush=True)

    threading.Thread(target=read, daemon=True).start()
    first = commands.get()
    if first is None:
        return
    setup = UploaderSetup(**first)

    mapped: dict[int, mmap.mmap] = {}

    def memory(slot: int, total_bytes: int) -> memoryview:
        if slot not in mapped or len(mapped[slot]) < total_bytes:  # Kept: each new mapping costs a fault per page.
            mapped[slot] = mmap.mmap(setup.fds[slot], 0, prot=mmap.PROT_READ)
        return memoryview(mapped[slot])

    def busy() -> bool:
        return trainer_left.is_set() or not commands.empty()

    try:
        blobs = open_blobs(setup.to)
        living = rescue.SignsOfLife(
            blobs, setup.epoch, setup.nonce, setup.rank, left=trainer_left, captured=lambda: captured[0]
        )
        drain = Uploader(setup, blobs, emit, memory, busy=busy, settled=living.settled)
    except (CordeeError, Damaged) as error:
        emit({**_plain(error), "save": None})
        return
    _serve(drain, commands, first["saves_before"], CaptureMarks(setup.marks_fd))
    living.end()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(0)  # The reader thread may hold standard input; nothing is left to do.


if __name__ == "__main__":
    main()

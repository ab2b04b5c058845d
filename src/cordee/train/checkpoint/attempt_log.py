"""This attempt's place in the commit log: fence earlier attempts, and find the newest generation that verifies."""

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cordee.errors import CheckpointError, CorruptError
from cordee.storage import rescue, writer
from cordee.storage.destination import open_blobs
from cordee.storage.generations import Commit, base_chunks, best_of, commit_of
from cordee.storage.history import PastAttempt, past_attempts
from cordee.storage.log import Log, read_entries
from cordee.storage.manifest import parts_prefix, write_failed
from cordee.storage.sealed import Damaged
from cordee.train.checkpoint.consensus import Consensus

logger = logging.getLogger("cordee.train")


@dataclass(frozen=True)
class Skipped:
    """A generation (or a damaged log record, without a step) that could not be used, and why."""

    generation: int
    step: int | None
    reason: str


class AttemptLog:
    """One rank's view of its attempt in the log.

    Args:
        to: the destination.
        consensus: of the ranks; rank 0 alone writes to the log.
        epoch: the server's number of this attempt; None: the newest in the log plus one.
        base: a destination whose pinned generation may be built upon.

    Attributes:
        skipped: unusable generations and records, newest first.
        past: the earlier attempts, on rank 0 only.
        opened: the generation that was found; None: there is none.
        best: generation and value of the checkpoint that is pinned as the best; None: there is none.
    """

    def __init__(self, to: str, consensus: Consensus, *, epoch: int | None, base: str | None) -> None:
        self.to, self.base = to, base
        self.blobs = open_blobs(to)
        self.has_server = epoch is not None
        self.nonce = ""
        self.skipped: list[Skipped] = []
        self.past: list[PastAttempt] = []
        self.opened: Commit | None = None
        self.best: tuple[int, float] | None = None
        self._consensus = consensus
        self._epoch = epoch

    @property
    def epoch(self) -> int:
        """The epoch of this attempt; known once it has begun."""
        assert self._epoch is not None, "call resume() first"
        return self._epoch

    def report_failed(self, number: int, reason: object) -> None:
        """Report to the other ranks that this save cannot succeed."""
        with suppress(CheckpointError):  # The deadline of the other ranks ends the save anyway.
            write_failed(
                self.blobs, parts_prefix(self.epoch, self.nonce, number), f"rank {self._consensus.rank}: {reason}"
            )

    def find(self, take: Callable[[Commit], None], on_read: Callable[[Commit | None], None]) -> Commit | None:
        """Begin the attempt, and return the newest generation that can be taken; None: nothing was ever committed.

        Args:
            take: raises Damaged, on all ranks equally, for a generation that cannot be used.
            on_read: called with the generation that is read next, and with None if it is damaged.

        Raises:
            InUseError: another process of this machine writes there.
            FencedError: a newer attempt owns the log.
            CorruptError: there are generations, and none verifies.
        """
        self._await_rescue()
        self._epoch, self.nonce, self.best, candidates, damaged = self._consensus.from_rank0(self._begin)
        self.skipped = []
        for commit in candidates:
            on_read(commit)
            try:
                take(commit)
            except Damaged as damage:
                on_read(None)
                where = "; it was only meant to be in nearer levels" if commit.missing_levels else ""
                self.skipped.append(Skipped(commit.generation, commit.step, f"{damage}{where}"))
                continue
            self.opened = commit
            break
        oldest = self.opened.generation if self.opened else -1
        self.skipped += [Skipped(at, None, f"log record {at}: {reason}") for at, reason in damaged if at > oldest]
        self._report_skipped()
        if self.opened is None and self.skipped:
            newest = self.skipped[0]
            raise CorruptError(
                f"none of {len(self.skipped)} generations in {self.to} verifies; the newest, {newest.generation}: "
                f"{newest.reason}",
                hint="restore the folder from a copy, or move it away to start again from step 0",
            )
        return self.opened

    def commits_before(self, step: int) -> list[Commit]:
        """Return the generations of earlier steps, the newest first; on all ranks."""

        def read() -> list[Commit]:
            log = Log.visit(self.blobs, nonce=secrets.token_hex(8))
            return [found for entry in reversed(log.commits()) if (found := commit_of(entry)).step < step]

        return self._consensus.from_rank0(read)

    def close(self) -> None:
        """Let another process write here."""
        if self._consensus.rank == 0 and not self.has_server and self.nonce:
            writer.withdraw(self.blobs, self.nonce)

    def _report_skipped(self) -> None:
        for skipped in self.skipped if self._consensus.rank == 0 else ():
            what = f"step {skipped.step}" if skipped.step is not None else "a record"
            logger.warning("skipping generation %d (%s): %s", skipped.generation, what, skipped.reason)

    def _begin(self) -> tuple[int, str, tuple[int, float] | None, list[Commit], list[tuple[int, str]]]:
        """Open the log, on rank 0; epoch, nonce, the best, the commits from the newest on, and damaged records."""
        if not self.has_server:
            writer.check_free(self.blobs, min(writer.ENDING_S, self._consensus.grace_s / 2))
        nonce = secrets.token_hex(8)
        at_us = time.time_ns() // 1000
        log = Log.open(self.blobs, nonce=nonce, epoch=self._epoch, at_us=at_us, world_size=self._consensus.world_size)
        if not self.has_server:
            writer.announce(self.blobs, nonce, at_us)
        self.past = past_attempts(log.entries)
        self.blobs.sweep_tmp()
        if self.base is not None:
            base_chunks(self.blobs, self.base)  # Raises its errors now, not during the first save.
        commits = [commit_of(entry) for entry in reversed(log.commits())]
        damaged = [(entry.index, entry.damage) for entry in log.entries if entry.record is None]
        return log.epoch, nonce, best_of(log.entries), commits, damaged

    def _await_rescue(self) -> None:
        """Without a server, wait for the uploaders of the attempt before, which this attempt will fence."""
        if self.has_server:
            return
        from_rank0 = self._consensus.from_rank0
        before = from_rank0(lambda: rescue.newest_attempt(read_entries(self.blobs)))
        if before is None:
            return
        uploaders = rescue.EarlierUploaders(self.blobs, *before)
        deadline_s = time.monotonic() + rescue.RESCUE_S_MAX
        announced = self._consensus.rank != 0
        while working := from_rank0(lambda: self._still_working(uploaders)):
            if from_rank0(lambda: time.monotonic() >= deadline_s):
                if self._consensus.rank == 0:
                    logger.warning(
                        "going on after %.0f s, though an uploader still works: %s", rescue.RESCUE_S_MAX, working
                    )
                return
            if not announced:
                logger.info(
                    "waiting up to %.0f s for the uploaders of the previous attempt to finish: %s",
                    rescue.RESCUE_S_MAX,
                    working,
                )
            announced = True
        if uploaders.silent and self._consensus.rank == 0:
            silent = ", ".join(sorted(uploaders.silent)[:3])
            logger.warning("no sign of life from an uploader for %.0f s, going on: %s", rescue.SILENT_S_MAX, silent)

    def _still_working(self, uploaders: rescue.EarlierUploaders) -> str | None:
        """Look for a second, or for half the time that the other ranks wait, if that is less."""
        until_s = time.monotonic() + min(rescue.LOOK_S_MAX, self._consensus.grace_s / 2)
        while (found := uploaders.working(max(0.0, until_s - time.monotonic()))) and time.monotonic() < until_s:
            time.sleep(max(0.0, min(0.1, until_s - time.monotonic())))
        return found

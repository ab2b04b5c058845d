"""Checkpoints from inside the training process: capture in memory, upload beside it, one commit for all ranks.

A save costs the trainer one copy into staging memory; the uploader does the rest. A resume reads the newest generation
once, verifies every byte, reshards to any world size, and goes back past damaged generations.

    Checkpointer ── AttemptLog     the log: fences, and finds the newest generation
                 ├─ Captures       staging buffers, shared with the uploader
                 ├─ UploaderLink   the uploader process
                 ├─ SaveRecord     outcomes of saves, from the uploader's events
                 └─ Consensus      collectives of the ranks
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from cordee.errors import CheckpointError, CorruptError
from cordee.storage.destination import parse_levels
from cordee.storage.files import Blobs
from cordee.storage.generations import Commit, check_chunks
from cordee.storage.history import LEFT, PastAttempt
from cordee.storage.manifest import read_manifest
from cordee.storage.sealed import Damaged, canonical
from cordee.train.checkpoint.attempt_log import AttemptLog, Skipped
from cordee.train.checkpoint.cadence import LOOK_S, MEMORY, LevelSchedule, SaveStatus
from cordee.train.checkpoint.captures import Captures
from cordee.train.checkpoint.consensus import Consensus
from cordee.train.checkpoint.dcp import RankPlan, fingerprint, make_plan
from cordee.train.checkpoint.link import UploaderLink
from cordee.train.checkpoint.restore import Loaded, restore
from cordee.train.checkpoint.save_record import SaveRecord
from cordee.train.checkpoint.state import encode, gather
from cordee.train.checkpoint.upload import UploaderSetup
from cordee.workload.keep import KEEP_MIN, Keep, parse_keep

T = TypeVar("T")
logger = logging.getLogger("cordee.train")


@dataclass(frozen=True)
class Save:
    """A complete capture.

    Attributes:
        reach: number of storage levels that it goes to, nearest first; 0: it stays in memory.
        previous_failure: the failure of an earlier save, if no save has reported it yet.
    """

    number: int
    step: int
    bytes: int
    stall_us: int
    reach: int
    previous_failure: CheckpointError | None


class Checkpointer:
    """One rank's access to its job's checkpoints.

    All ranks make one, and call `resume` (or `open` and `load`) and `save` in the same order; a world of one needs no
    process group. A capture is committed even if the trainer dies, also one that stays in memory. `wait` waits for the
    commit, `close` for the end of the uploader.
    """

    def __init__(
        self,
        to: str,
        *,
        rank: int,
        world_size: int,
        epoch: int | None = None,
        keep: str | int | Keep = KEEP_MIN,
        base: str | None = None,
        grace_s: float = 30.0,
        on_commit: Callable[[Commit], None] | None = None,
        on_failure: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        self.to = to
        self.rank = rank
        self.world_size = world_size
        self.keep = parse_keep(keep)
        self.grace_s = grace_s
        self._consensus = Consensus(rank, world_size, grace_s)
        self._attempt = AttemptLog(to, self._consensus, epoch=epoch, base=base)
        self._captures = Captures(rank, world_size)
        self._schedule = LevelSchedule(parse_levels(to))
        self._record = SaveRecord(self._schedule, len(self._attempt.blobs.levels), on_commit, on_failure)
        self._link: UploaderLink | None = None
        self._plan: RankPlan | None = None
        self._sent_plan: tuple[UploaderLink, RankPlan] | None = None
        self._number = 0  # of captures

    @property
    def epoch(self) -> int:
        """The epoch of this attempt; known after `resume`."""
        return self._attempt.epoch

    @property
    def blobs(self) -> Blobs:
        """The store of the destination."""
        return self._attempt.blobs

    @property
    def best(self) -> tuple[int, float] | None:
        """Generation and value of the checkpoint that earlier attempts kept as the best; known after `resume`."""
        return self._attempt.best

    @property
    def skipped(self) -> list[Skipped]:
        """Generations and log records that `resume` could not use, newest first."""
        return self._attempt.skipped

    @property
    def past(self) -> list[PastAttempt]:
        """Earlier attempts of the job; on rank 0, after `resume`."""
        return self._attempt.past

    def resume(self, state: dict[str, Any]) -> Loaded | None:
        """Fence older attempts and put the newest generation that verifies into the state, in one pass over its bytes.

        Return None, and leave the state as it is, if nothing was ever committed.

        Raises:
            FencedError: a newer attempt owns the log.
            CheckpointError: the state does not fit.
            CorruptError: there are generations, and none verifies; the state may be half loaded.
        """
        found: list[Loaded] = []
        load = partial(restore, state, blobs=self._attempt.blobs, consensus=self._consensus)
        if self._find(lambda commit: found.append(load(commit))) is None:
            return None
        self._start_uploader(saves_before=0)  # Not earlier: its start would slow the load down.
        return found[-1]

    def open(self) -> Commit | None:
        """Do as `resume`, but leave the state as it is, for a caller that needs the step before it has a state.

        A later `load` reads the generation again.
        """

        def check(commit: Commit) -> None:
            whole = read_manifest(self._attempt.blobs, commit.manifest)
            check_chunks(self._attempt.blobs, whole.chunks[self.rank :: self.world_size])

        return self._find(lambda commit: self._consensus.on_all(lambda: check(commit), f"read step {commit.step}"))

    def load(self, state: dict[str, Any], commit: Commit) -> Loaded:
        """Put a generation that `open` has found, or that this attempt has committed, into the state.

        Raises:
            CheckpointError: the state does not fit.
            CorruptError: a chunk no longer verifies; the state may be half loaded.
        """
        try:
            loaded = restore(state, commit, blobs=self._attempt.blobs, consensus=self._consensus, is_verified=True)
        except Damaged as damage:
            raise CorruptError(
                f"generation {commit.generation} (step {commit.step}): {damage}",
                hint="start the job again: it goes back to the newest generation that verifies",
            ) from damage
        if self._link is None:
            self._start_uploader(saves_before=0)
        return loaded

    def prepare(self, state: dict[str, Any], *, in_memory: bool = False) -> None:
        """Allocate memory for captures while training runs; `in_memory`: also for those that stay in memory.

        Call it once the optimizer has its state, well before the first save. No rank waits for another.
        """
        self._captures.prepare(state, in_memory=in_memory)

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        extras: dict[str, object],
        problem: CheckpointError | None = None,
        reach: int | None = None,
        last: bool = False,
    ) -> Save:
        """Capture the state; when this returns the trainer may change it. The uploader does the rest.

        Args:
            state: as in `load`.
            step: the same on all ranks.
            extras: state of this rank alone.
            problem: the reason why this rank can save nothing, for the other ranks.
            reach: number of levels, nearest first; 0 keeps the capture in memory, where it is committed only if the
                trainer dies before a newer one is. None: rank 0 decides by the frequencies in `to`. The largest reach
                that any rank asks for counts.
            last: the attempt ends with this save, not by a failure.

        Raises:
            FencedError: a newer attempt owns the log: stop writing.
            CheckpointError: nothing was captured; earlier generations are intact, and a later save may succeed.
        """
        started_s = time.monotonic()
        assert self._attempt.nonce, "call resume() before save()"
        link = self._link or self._start_uploader(saves_before=0)  # The caller may not have loaded the generation.
        self._number += 1
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, object] = {}
        encoded = b""
        problem = self._record.fenced or problem
        try:
            tensors, values = gather(state)
            encoded = canonical(encode(extras, "extras"))
            decided = reach is not None or self.rank == 0  # Else rank 0 may still ask for any buffer.
            link = self._ready_link(self._captures.usable(in_memory=reach == MEMORY if decided else None))
        except CheckpointError as error:
            problem = problem or error
        plan, reach = self._agree(state, tensors, step=step, problem=problem, reach=reach, started_s=started_s)
        slot = self._capture(link, plan, tensors, encoded, step, in_memory=reach == MEMORY)
        command = self._captures.command(slot, step, len(encoded), started_s)
        command |= {"values": values if plan.writes_values else None, "ending": LEFT if last else None}
        self._hand_over(link, plan, command, reach, started_s)
        size_bytes = sum(length for _, length in command["cuts"])
        return Save(self._number, step, size_bytes, command["stall_us"], reach, self._record.take_unreported())

    def wait(self, timeout_s: float) -> Commit:
        """Wait until the newest save that goes to storage is durable and committed.

        Raises:
            CheckpointError: it failed, or the time ran out.
        """
        return self._record.wait(timeout_s)

    def has_failed(self) -> bool:
        """Return whether the newest save failed, as far as this rank knows."""
        return self._record.has_failed()

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; a collective."""
        return self._consensus.any_rank([flag])[0]

    def of_all_ranks(self, value: T) -> list[T]:
        """Return the values of all ranks; a collective."""
        return self._consensus.of_all(value)

    def go_back(self, state: dict[str, Any], before: int) -> tuple[Commit, Loaded] | None:
        """Put the newest generation of an earlier step that verifies into the state; None: there is none. All ranks.

        Raises:
            CheckpointError: the state does not fit, or a rank does not answer.
        """
        for commit in self._attempt.commits_before(before):
            try:
                return commit, restore(state, commit, blobs=self._attempt.blobs, consensus=self._consensus)
            except Damaged as damage:
                logger.warning("skipping generation %d (step %d): %s", commit.generation, commit.step, damage)
        return None

    def newest(self) -> Commit | None:
        """Return the newest generation that this attempt has loaded or committed, or is reading."""
        return self._record.newest

    def status(self) -> SaveStatus:
        """Return the costs of a save, and the newest captures."""
        has_uploader = (
            self._link is not None and self._link.alive
        )  # A capture in memory counts only while an uploader runs.
        return self._record.status(self._captures.buffers.memory_step if has_uploader else None)

    def leave(self, left_s: Callable[[], float]) -> None:
        """Let the uploader upload the captures in memory, since this process is about to be killed.

        Safe on a thread other than the loop's; no new capture begins.
        """
        self._captures.end()
        if (link := self._link) is not None:
            while not link.close(min(LOOK_S, left_s()), in_order=False) and left_s() > 0:
                pass

    def close(self, *, failed: bool = False) -> None:
        """Wait for the uploader for at most the grace period; after that it goes on alone.

        After a failure the uploaders may have to wait for those of ranks that still hang. Under an agent this rank does
        not wait: the agent ends the other ranks only after this one, and lets the uploaders finish.
        """
        patience_s = 0.0 if failed and self._attempt.has_server and self.world_size > 1 else self.grace_s
        if self._link is not None and not self._link.close(patience_s) and patience_s:
            logger.warning("the uploader is still busy after %.0f s and goes on alone", patience_s)
        self._link = None
        self._captures.close()
        self._attempt.close()

    def _find(self, take: Callable[[Commit], None]) -> Commit | None:
        opened = self._attempt.find(take, self._record.read)
        if opened is None:
            self._start_uploader(saves_before=0)
        else:
            self._record.opened(opened)
        return opened

    # -- the steps of a save -------------------------------------------------------------------------------

    def _agree(
        self,
        state: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        *,
        step: int,
        problem: CheckpointError | None,
        reach: int | None,
        started_s: float,
    ) -> tuple[RankPlan, int]:
        """Agree on the reach, and plan again if the tensors of any rank have changed; collective."""
        mark = fingerprint(tensors)
        changed = self._plan is None or self._plan.fingerprint != mark
        asked = self._schedule.reach(started_s) if reach is None and self.rank == 0 else reach or MEMORY
        changed, agreed = self._consensus.agree(step, problem, changed=changed, reach=asked)
        if changed:
            self._plan = None  # If this save fails, the next one plans again.
            self._plan = self._consensus.call(lambda: make_plan(state, tensors, mark, self._consensus))
        assert self._plan is not None, "the first save always plans"
        return self._plan, agreed

    def _capture(
        self,
        link: UploaderLink,
        plan: RankPlan,
        tensors: dict[str, torch.Tensor],
        extras: bytes,
        step: int,
        *,
        in_memory: bool,
    ) -> int:
        """Fill a free buffer, and return its number."""
        captures = self._captures
        try:
            self._await_read(link, captures.usable(in_memory=in_memory))
        except CheckpointError as error:
            raise self._give_up(step, error) from error
        slot = captures.pick(link.reading, in_memory=in_memory)
        try:
            captures.fill(slot, plan, tensors, extras)
        except (OSError, RuntimeError) as error:  # Staging memory is exhausted, or a device failed.
            raise self._give_up(step, error) from error
        captures.buffers.filled(slot, self._number, step, in_memory=in_memory)
        return slot

    def _give_up(self, step: int, error: Exception) -> CheckpointError:
        """Report to the other ranks that this one has not captured the step; return the error to raise."""
        self._attempt.report_failed(self._number, error)
        return CheckpointError(f"step {step} could not be captured: {error}", hint="the previous generation is intact")

    def _ready_link(self, slots: Collection[int]) -> UploaderLink:
        """Return a running uploader that does not read one of these buffers."""
        assert self._link is not None, "save() has started one"
        self._captures.buffers.settle()
        self._await_read(self._link, slots)
        return self._link if self._link.alive else self._start_uploader(self._number - 1)

    def _await_read(self, link: UploaderLink, slots: Collection[int]) -> None:
        if not link.wait_until_read(self.grace_s, slots):
            raise CheckpointError(
                f"the uploader still reads the previous save after {self.grace_s:.1f} s",
                hint="storage is slower than the interval between saves: save less often",
            )

    def _start_uploader(self, saves_before: int) -> UploaderLink:
        attempt, buffers = self._attempt, self._captures.buffers
        setup = UploaderSetup(
            to=self.to,
            rank=self.rank,
            world_size=self.world_size,
            epoch=attempt.epoch,
            nonce=attempt.nonce,
            keep=str(self.keep),
            grace_s=self.grace_s,
            fds=buffers.fds,
            marks_fd=buffers.marks_fd,
            verified=attempt.opened.generation if attempt.opened else None,
            saves_before=saves_before,
            damaged=[skipped.generation for skipped in attempt.skipped],
            base=attempt.base,
        )
        buffers.forget()
        self._link = UploaderLink(setup, self._record.committed, self._failed)
        return self._link

    def _hand_over(
        self, link: UploaderLink, plan: RankPlan, command: dict[str, Any], reach: int, started_s: float
    ) -> None:
        if self._sent_plan != (link, plan):
            link.send_layout({"plan": plan.name, "shards": self._captures.shards(command["slot"], plan)})
            self._sent_plan = (link, plan)
        if reach == MEMORY:
            link.send_in_memory(self._number, command)
            return
        self._record.handed_over(self._number, command["step"], reach, started_s)
        link.send_save(self._number, {**command, "missing_levels": len(self._attempt.blobs.levels) - reach})

    def _failed(self, number: int | None, error: CheckpointError) -> None:
        """Record a failure; called on the uploader's listener."""
        self._record.report(error)
        if number is not None:
            # An uploader that died could not report to the other ranks, even if a new one runs by now.
            self._attempt.report_failed(number, error.message)
        self._record.failed(number, error)

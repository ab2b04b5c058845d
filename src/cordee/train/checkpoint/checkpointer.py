"""Checkpoints from inside the training process: capture in memory, drain beside, one commit for all ranks.

A save costs the trainer one copy into memory that is kept; everything after that happens in the drain. A resume reads
the newest generation once, verifies every byte, reshards to any world size, and steps back over those that are damaged.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from cordee.errors import CheckpointError, CorruptError, FencedError
from cordee.storage import rescue
from cordee.storage.chunks import lay_out
from cordee.storage.destination import open_blobs, parse_levels
from cordee.storage.generations import Commit, base_chunks, check_chunks, commit_of
from cordee.storage.history import LEFT, PastAttempt, past_attempts
from cordee.storage.log import Log, read_entries
from cordee.storage.manifest import parts_prefix, read_manifest, write_failed
from cordee.storage.sealed import Damaged, canonical
from cordee.train.checkpoint.cadence import LOOK_S, MEMORY, LevelSchedule, SaveStatus
from cordee.train.checkpoint.capture_marks import BUFFERS
from cordee.train.checkpoint.consensus import Consensus
from cordee.train.checkpoint.dcp import CaptureWriter, RankPlan, fingerprint, make_plan, planner_for
from cordee.train.checkpoint.link import UploaderLink
from cordee.train.checkpoint.restore import Loaded, restore
from cordee.train.checkpoint.staging import StagingBuffers, local_bytes
from cordee.train.checkpoint.state import encode, gather
from cordee.train.checkpoint.uploader import UploaderSetup
from cordee.units import MiB
from cordee.workload.keep import KEEP_MIN, Keep, parse_keep

logger = logging.getLogger("cordee.train")
T = TypeVar("T")
_ROOM_BYTES = 2 * MiB  # for the extras and what lies between tensors, where memory is made beforehand


@dataclass(frozen=True)
class Save:
    """A capture that is complete. `previous_failure` is a save before it that failed and was not reported yet.

    `reach`: to how many places it goes, the nearest first; 0: it is held in memory.
    """

    number: int
    step: int
    bytes: int
    stall_us: int
    reach: int
    previous_failure: CheckpointError | None


@dataclass(frozen=True)
class Skipped:
    """A generation (or a damaged log record, without a step) that could not be used, and why."""

    generation: int
    step: int | None
    reason: str


class Checkpointer:
    """One rank's access to its job's checkpoints.

    All ranks make one, and call `resume` (or `open` and `load`) and `save` in the same order; a world of one needs no
    group. What `save` has captured is committed even if the trainer dies, also what is held in memory; `wait` tells
    when, `close` waits for the drain to end.
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
        self.base = base
        self.grace_s = grace_s
        self.skipped: list[Skipped] = []
        self.past: list[PastAttempt] = []  # on rank 0, after `resume`
        self._epoch = epoch
        self._told_epoch = epoch is not None  # by a server, which runs one attempt at a time
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._blobs = open_blobs(to)
        self._together = Consensus(rank, world_size, grace_s)
        self._buffers = StagingBuffers()
        self._writers = [CaptureWriter(staging) for staging in self._buffers.stagings]
        self._laid_out: list[RankPlan | None] = [None] * len(self._writers)
        self._outward = LevelSchedule(parse_levels(to))
        self._nonce = ""
        self._link: UploaderLink | None = None
        self._plan: RankPlan | None = None
        self._sent_plan: tuple[UploaderLink, RankPlan] | None = None
        self._number = 0  # of captures
        self._awaited = 0  # the newest of them that is on its way to the store, or was
        self._way: dict[int, tuple[int, int, float]] = {}  # of those on their way: step, reach, captured at
        self._upload_s: list[float | None] = [None] * len(self._blobs.levels)
        self._changed = threading.Condition()
        self._filling = threading.Lock()
        self._leaving = False  # nothing is captured any more
        self._outcomes: dict[int, Commit | CheckpointError] = {}
        self._unreported: CheckpointError | None = None
        self._fenced: FencedError | None = None
        self._opened: Commit | None = None
        self._newest: Commit | None = None

    @property
    def epoch(self) -> int:
        """The epoch of this attempt; known after `resume`."""
        assert self._epoch is not None, "call resume() first"
        return self._epoch

    def resume(self, state: dict[str, Any]) -> Loaded | None:
        """Fence older attempts and put the newest generation that verifies into the state, in one pass over its bytes.

        None if nothing was ever committed; then the state is as it was.

        Raises:
            FencedError: a newer attempt owns the log.
            CheckpointError: the state does not fit.
            CorruptError: there are generations, and none verifies; the state may be half loaded.
        """
        found: list[Loaded] = []
        load = partial(restore, state, blobs=self._blobs, together=self._together)
        if self._find(lambda commit: found.append(load(commit))) is None:
            return None
        self._start_uploader(saves_before=0)  # Not before: its start would take the processor from the load.
        return found[-1]

    def open(self) -> Commit | None:
        """As `resume`, but the state stays as it is: for who must know the step before there is a state.

        Who loads it then reads it twice.
        """

        def check(commit: Commit) -> None:
            whole = read_manifest(self._blobs, commit.manifest)
            check_chunks(self._blobs, whole.chunks[self.rank :: self.world_size])

        return self._find(lambda commit: self._together.on_all(lambda: check(commit), f"read step {commit.step}"))

    def load(self, state: dict[str, Any], commit: Commit) -> Loaded:
        """Put a generation that `open` has found, or that this attempt has committed, into the state.

        Raises:
            CheckpointError: the state does not fit.
            CorruptError: a chunk no longer verifies; the state may be half loaded.
        """
        try:
            loaded = restore(state, commit, blobs=self._blobs, together=self._together, is_verified=True)
        except Damaged as damage:
            raise CorruptError(
                f"generation {commit.generation} (step {commit.step}): {damage}",
                hint="start the job again: it goes back to the newest generation that verifies",
            ) from damage
        if self._link is None:
            self._start_uploader(saves_before=0)
        return loaded

    def prepare(self, state: dict[str, Any], *, hold: bool = False) -> None:
        """Make the memory for the captures beside the training; `hold`: also for those that are held.

        Best called once the optimizer has its state, a while before the first save. No rank waits for another one.
        """
        with contextlib.suppress(CheckpointError):  # What is wrong with the state the first save tells.
            tensors, _ = gather(state)
            device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
            size_bytes = local_bytes(tensors.values(), self.world_size) + _ROOM_BYTES
            self._buffers.warm(size_bytes, both=hold, device=device)

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        extras: dict[str, Any],
        problem: CheckpointError | None = None,
        reach: int | None = None,
        last: bool = False,
    ) -> Save:
        """Capture the state; when this returns the trainer may change it. The drain does the rest.

        Args:
            state: as in `load`.
            step: the same on all ranks.
            extras: what is this rank's own.
            problem: why this rank can save nothing; the others hear of it here.
            reach: to how many places it goes, the nearest first; 0 holds it in memory, where it is committed only if
                the trainer dies before a newer one is. None: rank 0 says, by what `to` says of each place. The
                farthest that a rank asks for counts.
            last: the attempt ends with it, so it is not counted as stopped by a failure.

        Raises:
            FencedError: a newer attempt owns the log: stop writing.
            CheckpointError: nothing was captured; the generations before are intact, and a later save may succeed.
        """
        started_s = time.monotonic()
        assert self._nonce, "call resume() before save()"
        if self._link is None:
            self._start_uploader(saves_before=0)  # What was found was not loaded.
        assert self._link is not None, "it was just started"
        self._number += 1
        link = self._link
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        problem = self._fenced or problem
        try:
            tensors, values = gather(state)
            encoded = canonical(encode(extras, "extras"))
            # Rank 0 may ask for either: then this rank waits for what it surely needs, until it knows.
            told = reach is not None or self.rank == 0
            link = self._ready_link(self._buffers.slots(hold=reach == MEMORY) if told else range(BUFFERS))
        except CheckpointError as error:
            problem = problem or error
        mark = fingerprint(tensors)
        changed = self._plan is None or self._plan.fingerprint != mark
        asked = self._outward.reach(started_s) if reach is None and self.rank == 0 else reach or MEMORY
        changed, reach = self._together.agree(step, problem, changed=changed, reach=asked)
        if changed:
            self._plan = None  # Until there is a new one: a save that fails on the way must plan again.
            self._plan = self._together.call(lambda: make_plan(state, tensors, mark, self._together))
        assert self._plan is not None, "the first save always plans"
        slot = self._free_slot(link, step, hold=reach == MEMORY)
        try:
            self._capture(slot, self._plan, tensors, encoded)
        except (OSError, RuntimeError) as error:  # No memory to stage in, or a device error.
            self._laid_out[slot] = None
            raise self._give_up(step, error) from error
        self._buffers.filled(slot, self._number, step, hold=reach == MEMORY)
        stall_us = round((time.monotonic() - started_s) * 1_000_000)
        command = self._command(slot, step, values if self._plan.brings else None, encoded, stall_us)
        command["ending"] = LEFT if last else None
        self._hand_over(link, self._plan, command, reach, started_s)
        with self._changed:
            previous, self._unreported = self._unreported, None
        size_bytes = sum(length for _, length in command["cuts"])
        return Save(self._number, step, size_bytes, stall_us, reach, previous)

    def wait(self, timeout_s: float) -> Commit:
        """Wait until the newest save is durable and committed; captures that are held are none.

        Raises:
            CheckpointError: it failed, or there was not enough time.
        """
        number = self._awaited
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._outcomes, timeout_s):
                raise CheckpointError(
                    f"save {number} is not committed after {timeout_s:.1f} s",
                    hint="its drain goes on; the generation before it is intact",
                )
            outcome = self._outcomes[number]
            if isinstance(outcome, CheckpointError):
                self._unreported = None
                raise outcome
            return outcome

    def has_failed(self) -> bool:
        """Whether the newest save failed, as far as this rank knows: another one may know more."""
        with self._changed:
            return isinstance(self._outcomes.get(self._awaited), CheckpointError)

    def anywhere(self, flag: bool) -> bool:
        """Whether any rank says so; all ranks ask together."""
        return self._together.anywhere([flag])[0]

    def newest(self) -> Commit | None:
        """The newest generation that this attempt has loaded or committed, or the one that it reads."""
        with self._changed:
            return self._newest

    def standing(self) -> SaveStatus:
        """What a save costs, and which captures there are."""
        known = self._link is not None and self._link.alive  # else nobody brings what is held
        with self._changed:
            newest = self._newest
            return SaveStatus(
                newest.bytes if newest else None,
                newest.stall_us / 1e6 if newest else None,
                tuple(self._upload_s),
                self._buffers.held_step if known else None,
                max((step for step, _, _ in self._way.values()), default=None),
                newest.step if newest else None,
            )

    def leave(self, left_s: Callable[[], float]) -> None:
        """This process is about to end without a word: let the drain bring what it has and what is held, meanwhile.

        For a thread beside the loop's, which may go on: no capture begins any more, since the drain reads the buffers.
        """
        with self._filling:
            self._leaving = True  # A capture that has begun before has broken its seal, so the drain leaves it alone.
        if (link := self._link) is not None:
            while not link.close(min(LOOK_S, left_s()), in_order=False) and left_s() > 0:
                pass

    def close(self, *, failed: bool = False) -> None:
        """Let the drain finish, for at most the grace period; after that it goes on alone.

        After a failure the drains may have to wait for those of ranks that still hang. Who runs under an agent does
        not wait for that: the agent has to see this rank's end before it can end the others, and spares the drains.
        """
        patience_s = 0.0 if failed and self._told_epoch and self.world_size > 1 else self.grace_s
        if self._link is not None and not self._link.close(patience_s) and patience_s:
            logger.warning("the drain still works after %.0f s and goes on alone", patience_s)
        self._link = None
        self._buffers.close()

    # What `resume` and `open` are made of.

    def _find(self, take: Callable[[Commit], None]) -> Commit | None:
        """The newest generation that can be taken, after older attempts were fenced; None: nothing was committed.

        `take` raises Damaged, on all ranks alike, for one that cannot be.
        """
        self._await_rescue()
        self._epoch, self._nonce, candidates, damaged = self._together.from_rank0(self._begin)
        self.skipped = []
        for commit in candidates:
            self._newest = commit
            try:
                take(commit)
            except Damaged as damage:
                self._newest = None
                where = "; only nearer destinations were to have it" if commit.missing_levels else ""
                self.skipped.append(Skipped(commit.generation, commit.step, f"{damage}{where}"))
                continue
            self._opened = commit
            farthest = len(self._upload_s) - 1
            self._upload_s[farthest - min(commit.missing_levels, farthest)] = commit.uploaded_us / 1e6
            break
        oldest = self._opened.generation if self._opened else -1
        self.skipped += [Skipped(at, None, f"log record {at}: {reason}") for at, reason in damaged if at > oldest]
        if self.rank == 0:
            for skipped in self.skipped:
                what = f"step {skipped.step}" if skipped.step is not None else "a record"
                logger.warning("stepping over generation %d (%s): %s", skipped.generation, what, skipped.reason)
        if self._opened is None and self.skipped:
            raise CorruptError(
                f"none of {len(self.skipped)} generations in {self.to} verifies; newest: {self.skipped[-1].reason}",
                hint="restore the folder from a copy, or move it away to start again from step 0",
            )
        if self._opened is None:
            self._start_uploader(saves_before=0)
        return self._opened

    def _await_rescue(self) -> None:
        """Without a server: drains of the attempt before may still bring what they hold, and opening fences them."""
        if self._told_epoch:
            return
        before = self._together.from_rank0(lambda: rescue.newest_attempt(read_entries(self._blobs)))
        if before is None:
            return
        outlook = rescue.EarlierUploaders(self._blobs, *before)
        deadline_s = time.monotonic() + rescue.RESCUE_S_MAX
        told = False
        while living := self._together.from_rank0(lambda: self._still_living(outlook)):
            if self._together.from_rank0(lambda: time.monotonic() >= deadline_s):
                if self.rank == 0:
                    logger.warning("going on after %.0f s, though a drain still works: %s", rescue.RESCUE_S_MAX, living)
                return
            if not told and self.rank == 0:
                most = f"{rescue.RESCUE_S_MAX:.0f} s at most"
                logger.info(
                    "waiting for the drains of the attempt before (%s), which bring what it had: %s", living, most
                )
            told = True
        if outlook.silent and self.rank == 0:
            silent = ", ".join(sorted(outlook.silent)[:3])
            logger.warning("no sign of life of a drain for %.0f s, going on: %s", rescue.SILENT_S_MAX, silent)

    def _still_living(self, outlook: rescue.EarlierUploaders) -> str | None:
        """Asks for a second at most, and for half of what the other ranks wait for an answer."""
        until_s = time.monotonic() + min(rescue.LOOK_S_MAX, self.grace_s / 2)
        while (living := outlook.living(max(0.0, until_s - time.monotonic()))) and time.monotonic() < until_s:
            time.sleep(max(0.0, min(0.1, until_s - time.monotonic())))
        return living

    def _begin(self) -> tuple[int, str, list[Commit], list[tuple[int, str]]]:
        nonce = secrets.token_hex(8)
        at_us = time.time_ns() // 1000
        log = Log.open(self._blobs, nonce=nonce, epoch=self._epoch, at_us=at_us, world_size=self.world_size)
        self.past = past_attempts(log.entries)
        self._blobs.sweep_tmp()
        if self.base is not None:
            base_chunks(self._blobs, self.base)  # Said now, and not when the first save is under way.
        commits = [commit_of(entry) for entry in reversed(log.commits())]
        damaged = [(entry.index, entry.damage) for entry in log.entries if entry.record is None]
        return log.epoch, nonce, commits, damaged

    # What `save` is made of.

    def _ready_link(self, slots: Collection[int]) -> UploaderLink:
        """A living drain that leaves one of these buffers to write to."""
        assert self._link is not None, "resume() starts the drain"
        self._buffers.settle()
        self._wait_until_read(self._link, slots)
        if not self._link.alive:
            self._start_uploader(self._number - 1)
        return self._link

    def _wait_until_read(self, link: UploaderLink, slots: Collection[int]) -> None:
        if not link.wait_until_read(self.grace_s, slots):
            raise CheckpointError(
                f"the drain still reads the save before this one after {self.grace_s:.1f} s",
                hint="the store is slower than the interval between saves: save less often",
            )

    def _free_slot(self, link: UploaderLink, step: int, *, hold: bool) -> int:
        try:
            self._wait_until_read(link, self._buffers.slots(hold=hold))
        except CheckpointError as error:
            raise self._give_up(step, error) from error
        slot = self._buffers.pick(link.reading, hold=hold)
        assert slot is not None, "one was free, and only this thread takes any"
        return slot

    def _start_uploader(self, saves_before: int) -> None:
        setup = UploaderSetup(
            self.to,
            self.rank,
            self.world_size,
            self.epoch,
            self._nonce,
            str(self.keep),
            self.grace_s,
            self._buffers.fds,
            self._buffers.marks_fd,
            self._opened.generation if self._opened else None,
            saves_before,
            [skipped.generation for skipped in self.skipped],
            self.base,
        )
        self._buffers.forget()
        self._link = UploaderLink(setup, self._committed, self._failed)

    def _capture(self, slot: int, plan: RankPlan, tensors: dict[str, torch.Tensor], encoded: bytes) -> None:
        writer = self._writers[slot]
        with self._filling:
            if self._leaving:
                raise CheckpointError("this process is ending", hint="the drain brings what it holds")
            self._buffers.filling(slot)
        if self._laid_out[slot] is not plan:
            writer.prepare(plan.items)
            self._laid_out[slot] = plan
        writer.make_room(plan.items, len(encoded))
        writer.write_data(plan.items, planner_for(tensors, self.rank))
        at = writer.layout.total_bytes
        writer.staging.bytes[at : at + len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)

    def _give_up(self, step: int, error: Exception) -> CheckpointError:
        """Tell the other ranks that this one has no capture; the error to raise."""
        with contextlib.suppress(CheckpointError):  # Then their deadline tells them.
            write_failed(self._blobs, self._prefix(self._number), f"rank {self.rank}: {error}")
        return CheckpointError(f"step {step} could not be captured: {error}", hint="the previous generation is intact")

    def _prefix(self, number: int) -> str:
        return parts_prefix(self.epoch, self._nonce, number)

    def _command(self, slot: int, step: int, values: Any, encoded: bytes, stall_us: int) -> dict[str, Any]:
        """What the drain has to know of this capture."""
        layout = self._writers[slot].layout
        behind = lay_out([len(encoded)])
        return {
            "slot": slot,
            "step": step,
            "values": values,
            "cuts": [*layout.cuts, *((layout.total_bytes + at, length) for at, length in behind.cuts)],
            "extras": [[len(layout.cuts) + p.chunk, p.offset, p.length_bytes] for p in behind.pieces[0]],
            "total_bytes": layout.total_bytes + behind.total_bytes,
            "stall_us": stall_us,
            "captured_us": time.time_ns() // 1000,
        }

    def _hand_over(
        self, link: UploaderLink, plan: RankPlan, command: dict[str, Any], reach: int, started_s: float
    ) -> None:
        if self._sent_plan != (link, plan):
            link.send_layout({"plan": plan.name, "shards": plan.shards(self._writers[command["slot"]].layout)})
            self._sent_plan = (link, plan)
        if reach == MEMORY:
            link.send_hold(self._number, command)
            return
        self._awaited = self._number
        with self._changed:
            self._outward.captured()
            self._way[self._number] = (command["step"], reach, started_s)
        link.send_save(self._number, {**command, "missing_levels": len(self._blobs.levels) - reach})

    # What the drain tells; called from its listener.

    def _committed(self, number: int, commit: Commit) -> None:
        _tell(self._on_commit, commit)  # First, so that a commit is reported before anyone who waits for it may exit.
        with self._changed:
            self._newest = commit
            if number in self._way:
                _, reach, captured_s = self._way[number]
                self._upload_s[reach - 1] = commit.uploaded_us / 1e6
                self._outward.arrived(reach, captured_s)
            self._settle(number, commit)

    def _failed(self, number: int | None, error: CheckpointError) -> None:
        logger.warning("checkpoint failed: %s", error)
        _tell(self._on_failure, error)
        if number is not None:
            # A drain that has died could not tell the other ranks itself. That another one runs by now says nothing.
            with contextlib.suppress(CheckpointError):
                write_failed(self._blobs, self._prefix(number), f"rank {self.rank}: {error.message}")
        with self._changed:
            self._unreported = error
            if isinstance(error, FencedError):
                self._fenced = error
            if number is not None:
                self._settle(number, error)

    def _settle(self, number: int, outcome: Commit | CheckpointError) -> None:
        self._outcomes = {number: outcome}
        self._way.pop(number, None)
        self._changed.notify_all()


def _tell(callback: Callable[[T], None] | None, news: T) -> None:
    if callback is None:
        return
    try:
        callback(news)
    except Exception:  # The listener must go on, or every later save would seem to hang.
        logger.exception("a checkpoint callback failed")

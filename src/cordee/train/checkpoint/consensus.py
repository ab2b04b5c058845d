"""Collectives by which the ranks of a gang open, plan and load together, on their own gloo group.

The group's time-out is the grace period: a dead rank must not block the others for longer.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cordee.errors import CheckpointError
from cordee.storage.sealed import Damaged

T = TypeVar("T")


class NotFiniteError(CheckpointError):
    """A weight of a rank is not finite, so no rank saves; the same on all ranks."""


class Consensus:
    """One rank's side; a world of one needs no process group."""

    def __init__(self, rank: int, world_size: int, grace_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.grace_s = grace_s
        self.group: dist.ProcessGroup | None = None
        if world_size > 1:
            if not dist.is_initialized():
                raise CheckpointError(
                    f"a world of {world_size} ranks needs torch.distributed", hint="call init_process_group() first"
                )
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=grace_s))

    def from_rank0(self, work: Callable[[], T]) -> T:
        """Do the work on rank 0, and return its result, or raise its error, on all ranks."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = work()
            except CheckpointError as error:
                answer[1] = error
        if self.group is not None:
            self.call(lambda: dist.broadcast_object_list(answer, group_src=0, group=self.group))
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result

    def on_all(self, work: Callable[[], T], doing: str) -> T:
        """Do the work on each rank; if it fails on one, fail on all in the same way.

        Raises:
            CheckpointError: this rank or another one failed; `doing` names the work.
            Damaged: a rank found damaged bytes, and no rank failed otherwise.
        """
        mine: CheckpointError | None = None
        damage: str | None = None
        try:
            result = work()
        except CheckpointError as error:
            mine = error
        except Damaged as error:
            damage = str(error)
        found: list[tuple[str | None, str | None]] = [(str(mine) if mine else None, damage)] * self.world_size
        if self.group is not None:
            self.call(lambda: dist.all_gather_object(found, found[0], group=self.group))
        elsewhere, damage = (next(filter(None, kind), None) for kind in zip(*found, strict=True))
        if mine is not None:
            raise mine
        if elsewhere:
            raise CheckpointError(f"another rank could not {doing}: {elsewhere}", hint="see that rank's log")
        if damage:
            raise Damaged(damage)
        return result

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank; all ranks pass equally many."""
        if self.group is None:
            return flags
        mask = torch.tensor(flags, dtype=torch.uint8)
        self.call(lambda: dist.all_reduce(mask, dist.ReduceOp.MAX, group=self.group))
        return [bool(flag) for flag in mask.tolist()]

    def of_all(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        found = [value] * self.world_size
        if self.group is not None:
            self.call(lambda: dist.all_gather_object(found, value, group=self.group))
        return found

    def agree(self, step: int, problem: CheckpointError | None, *, changed: bool, reach: int) -> tuple[bool, int]:
        """Return whether a rank needs a new plan, and the largest reach that a rank asks for.

        The only collective of a save that reuses its plan.

        Raises:
            CheckpointError: a rank has a problem, or the ranks are at different steps.
        """
        kind = 0 if problem is None else 2 if isinstance(problem, NotFiniteError) else 1
        flags = torch.tensor([kind, int(changed), step, -step, reach])
        if self.group is not None:
            self.call(lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group))
        failed, replan, last, first, reach = flags.tolist()
        if problem:
            raise problem
        if failed:
            kinds = {1: CheckpointError, 2: NotFiniteError}
            raise kinds[failed](f"another rank could not capture step {step}", hint="see that rank's log")
        if last != -first:
            raise CheckpointError(
                f"the ranks are at different steps, {-first} to {last}", hint="run the same steps on every rank"
            )
        return bool(replan), reach

    def call(self, collective: Callable[[], T]) -> T:
        """Run a collective, and raise CheckpointError if a rank does not take part in time."""
        try:
            return collective()
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} could not reach the other ranks within {self.grace_s:.0f} s: {error}",
                hint="a rank has died or hangs: see the other ranks' logs",
            ) from error

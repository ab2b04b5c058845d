"""What the ranks of a gang tell each other when they open, plan or load: on a gloo group of our own, never the user's.

Its time-out is the grace period: a rank that has died must not hold the others longer than they have.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cordee.errors import CheckpointError
from cordee.storage.sealed import Damaged

T = TypeVar("T")


class Consensus:
    """One rank's end; a world of one needs no process group."""

    def __init__(self, rank: int, world_size: int, grace_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.grace_s = grace_s
        self.group: Any = None
        if world_size > 1:
            if not dist.is_initialized():
                raise CheckpointError(
                    f"a world of {world_size} ranks needs torch.distributed", hint="call init_process_group() first"
                )
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=grace_s))

    def from_rank0(self, work: Callable[[], T]) -> T:
        """Do it on rank 0; all ranks get its result or its error."""
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
        """Do it on each rank; if it fails on one it fails on all, in the same way.

        Raises:
            CheckpointError: this rank's own, or that of another one, which could not do what `doing` says.
            Damaged: a rank has found something damaged, and nothing worse has happened.
        """
        own: CheckpointError | None = None
        damage: str | None = None
        try:
            result = work()
        except CheckpointError as error:
            own = error
        except Damaged as error:
            damage = str(error)
        found: list[tuple[str | None, str | None]] = [(str(own) if own else None, damage)] * self.world_size
        if self.group is not None:
            mine = found[0]
            self.call(lambda: dist.all_gather_object(found, mine, group=self.group))
        elsewhere, damage = (next(filter(None, kind), None) for kind in zip(*found, strict=True))
        if own is not None:
            raise own
        if elsewhere:
            raise CheckpointError(f"another rank could not {doing}: {elsewhere}", hint="that rank's own log says more")
        if damage:
            raise Damaged(damage)
        return result

    def anywhere(self, flags: list[bool]) -> list[bool]:
        """Each flag: does some rank raise it? All ranks have as many."""
        if self.group is None:
            return flags
        mask = torch.tensor(flags, dtype=torch.uint8)
        self.call(lambda: dist.all_reduce(mask, dist.ReduceOp.MAX, group=self.group))
        return [bool(flag) for flag in mask.tolist()]

    def agree(self, step: int, problem: CheckpointError | None, *, changed: bool, reach: int) -> tuple[bool, int]:
        """(is there a rank that needs a new plan, the farthest reach that a rank asks for).

        The one collective of a save whose plan is kept.

        Raises:
            CheckpointError: a rank has a problem, or the ranks are at different steps.
        """
        flags = torch.tensor([int(problem is not None), int(changed), step, -step, reach])
        if self.group is not None:
            self.call(lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group))
        failed, replan, last, first, reach = flags.tolist()
        if problem:
            raise problem
        if failed:
            raise CheckpointError(f"another rank could not capture step {step}", hint="that rank's own log says why")
        if last != -first:
            raise CheckpointError(
                f"ranks save different steps: {-first} to {last}", hint="run the same steps on every rank"
            )
        return bool(replan), reach

    def call(self, collective: Callable[[], T]) -> T:
        """Run a collective; a rank that does not come is an error and not a crash."""
        try:
            return collective()
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} could not reach the other ranks within {self.grace_s:.0f} s: {error}",
                hint="a rank has died or hangs: look at the others' logs",
            ) from error

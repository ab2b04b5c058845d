"""What really runs: ranks on machines, gang by gang, whatever the control plane believes of them.

`Ranks` plays them in virtual time and asserts what must hold of the world itself: no GPU is used by two, no two
attempts of a job run at once, none runs after its end was reported, none goes back behind a committed checkpoint.
For fault tests; SimCluster is the fast one, whose agents never fail.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cordee.events import (
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Lease,
    Outcome,
    RankLeft,
    Reported,
    Restored,
    SpanClass,
)
from cordee.ids import JobId, attempt_name
from cordee.schedule.gang import Work
from cordee.simulate.engine import Engine

Key = tuple[JobId, int]
"""A job and the epoch of its attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a job does when it runs: its work, and how many of its first attempts fail by themselves."""

    work: Work
    fails: int = 0


@dataclass(slots=True)
class Gang:
    """The ranks of one attempt. `turn` grows whenever its future changes, so that what was planned is dropped."""

    placed: AttemptPlaced
    script: Script
    running: dict[str, Lease] = field(default_factory=dict)  # by node
    started: int = 0  # shares so far
    whole: bool = False  # all of them ran at once
    leaving: bool = False
    restored: bool = False
    turn: int = 0
    step: int = 0
    generation: int = 0
    since_us: int = 0  # when the span in progress began

    @property
    def key(self) -> Key:
        """Its job and epoch."""
        return self.placed.job_id, self.placed.epoch

    @property
    def name(self) -> str:
        """As people read it."""
        return attempt_name(*self.key)

    @property
    def first_node(self) -> str:
        """Where rank 0 is, which tells of the gang."""
        return self.placed.leases[0].node


class Ranks:
    """All gangs, and the checkpoints that outlive them.

    Attributes:
        gangs: by job and epoch, those that ever started.
        durable: the newest checkpoint of each job: its step and generation.
    """

    def __init__(
        self,
        engine: Engine,
        tell: Callable[[str, str, Event], None],
        left: Callable[[str, Key, Outcome, str], None],
        later_us: Callable[[], int],
    ) -> None:
        """`tell(node, stream, event)` is what rank 0 writes; `left(node, key, outcome, why)`: a share's ranks are gone.

        `later_us` draws how much later than the others a share ends.
        """
        self.scripts: dict[JobId, Script] = {}
        self.gangs: dict[Key, Gang] = {}
        self.durable: dict[JobId, tuple[int, int]] = {}
        self.reported_ended: set[tuple[JobId, int, str]] = set()  # shares that the log knows as ended
        self.committed: dict[JobId, int] = {}  # steps that the log knows as durable
        self._engine, self._tell, self._left, self._later_us = engine, tell, left, later_us
        self._used: dict[tuple[str, int], int] = {}  # thousandths of GPUs in use

    # -- shares ----------------------------------------------------------------------------------------------

    def start(self, node: str, placed: AttemptPlaced) -> None:
        """An agent starts its share."""
        gang = self.gangs.setdefault((placed.job_id, placed.epoch), Gang(placed, self.scripts[placed.job_id]))
        lease = next(each for each in placed.leases if each.node == node)
        self._may_start(gang, lease)
        for gpu in lease.gpus:
            self._used[node, gpu] = self._used.get((node, gpu), 0) + lease.milli
        gang.running[node] = lease
        gang.started += 1
        if len(gang.running) == len(placed.leases) == gang.started:
            gang.whole, gang.since_us = True, self._engine.now_us()
            self._after(gang, gang.script.work.start_us, self._restore)

    def _may_start(self, gang: Gang, lease: Lease) -> None:
        node = lease.node
        assert node not in gang.running, f"{gang.name} was started twice on {node}"
        assert (*gang.key, node) not in self.reported_ended, f"{gang.name} starts on {node} after its end was reported"
        for other in self.gangs.values():
            if other.placed.job_id == gang.placed.job_id and other is not gang:
                assert not other.running, f"{other.name} runs on {sorted(other.running)} while {gang.name} starts"
                assert other.placed.epoch < gang.placed.epoch, f"{gang.name} starts after {other.name}"
        for gpu in lease.gpus:
            used = self._used.get((node, gpu), 0)
            assert used + lease.milli <= 1000, f"{gang.name} starts on {node}:{gpu}, of which {used}/1000 are in use"

    def end(self, node: str, key: Key, outcome: Outcome, why: str) -> None:
        """Every process of a share is gone."""
        gang = self.gangs[key]
        lease = gang.running.pop(node, None)
        if lease is None:
            return
        gang.turn += outcome is not Outcome.FINISHED and outcome is not Outcome.CHECKPOINTED  # the others hang
        for gpu in lease.gpus:
            self._used[node, gpu] -= lease.milli
        self._left(node, key, outcome, why)

    def of_node(self, node: str) -> list[Key]:
        """Whose ranks run there."""
        return [key for key, gang in self.gangs.items() if node in gang.running]

    def log_says_ended(self, job_id: JobId, epoch: int, node: str) -> None:
        """From now on the share's GPUs may be given to others."""
        gang = self.gangs.get((job_id, epoch))
        name = attempt_name(job_id, epoch)
        assert gang is None or node not in gang.running, f"{name} still runs on {node}, and its end was reported"
        self.reported_ended.add((job_id, epoch, node))

    def log_says_committed(self, job_id: JobId, step: int) -> None:
        """From now on no attempt starts before this step."""
        self.committed[job_id] = max(step, self.committed.get(job_id, 0))
        assert self.durable[job_id][0] >= step, f"{job_id}: step {step} was committed, and cannot be read"

    # -- the course of a gang --------------------------------------------------------------------------------

    def notify(self, key: Key) -> None:
        """SIGTERM came to any of its ranks: all stop at the end of the step in progress."""
        gang = self.gangs.get(key)
        if gang is None or not gang.whole or gang.leaving or not gang.script.work.handles_notice:
            return
        if len(gang.running) < len(gang.placed.leases):
            return  # some are gone: the others hang in a collective
        gang.leaving = True
        if not gang.restored:
            self._leave(gang, Outcome.CHECKPOINTED)
        elif gang.since_us >= 0:
            gang.turn += 1
            step_us = self._step_us(gang)
            done = -(-(self._engine.now_us() - gang.since_us) // step_us)
            steps = min(done, gang.script.work.steps - gang.step)
            at_us = max(self._engine.now_us(), gang.since_us + steps * step_us)
            self._engine.at(at_us, self._stepped, gang, gang.turn, steps)

    def _after(self, gang: Gang, wait_us: int, action: Callable[..., None], *args: Any) -> None:
        self._engine.at(self._engine.now_us() + wait_us, action, gang, gang.turn, *args)

    def _step_us(self, gang: Gang) -> int:
        work, gpus = gang.script.work, sum(len(lease.gpus) for lease in gang.placed.leases)
        return work.step_us if work.gpus is None or not gpus else work.step_us * work.gpus // gpus

    def _restore(self, gang: Gang, turn: int) -> None:
        if gang.turn != turn:
            return
        gang.step, generation = self.durable.get(gang.placed.job_id, (0, 0))
        committed = self.committed.get(gang.placed.job_id, 0)
        assert gang.step >= committed, f"{gang.name} starts at step {gang.step}; {committed} were committed"
        gang.generation, gang.restored = generation, True
        self._span(gang, SpanClass.RESTART)
        self._say(gang, Restored, step=gang.step, generation=generation or None)
        if gang.placed.epoch <= gang.script.fails:
            self.end(gang.first_node, gang.key, Outcome.FAILED, "the script failed")
        else:
            self._train(gang)

    def _train(self, gang: Gang) -> None:
        work, step_us = gang.script.work, self._step_us(gang)
        left = work.steps - gang.step
        steps = left if work.every_us is None else min(left, max(1, work.every_us // step_us))
        self._after(gang, steps * step_us, self._stepped, steps)

    def _stepped(self, gang: Gang, turn: int, steps: int) -> None:
        if gang.turn != turn:
            return
        work = gang.script.work
        self._span(gang, SpanClass.USEFUL, first_step=gang.step, steps=steps)
        gang.step += steps
        if work.durable:
            gang.since_us, began_us = -1, gang.since_us  # it saves: a notice changes nothing
            self._after(gang, work.stall_us, self._saved, began_us)
        else:
            self._go_on(gang)

    def _saved(self, gang: Gang, turn: int, began_us: int) -> None:
        if gang.turn != turn:
            return
        gang.since_us = began_us
        self._span(gang, SpanClass.CHECKPOINT)
        job_id, gang.generation = gang.placed.job_id, gang.generation + 1
        step, _ = self.durable.get(job_id, (0, 0))
        assert gang.step >= step, f"{gang.name} commits step {gang.step} after {step}"
        self.durable[job_id] = (gang.step, gang.generation)
        took = {"size_bytes": 1, "stall_us": gang.script.work.stall_us, "upload_us": 0}
        self._say(gang, CheckpointCommitted, step=gang.step, generation=gang.generation, **took)
        self._go_on(gang)

    def _go_on(self, gang: Gang) -> None:
        if gang.step >= gang.script.work.steps:
            self._leave(gang, Outcome.FINISHED)
        elif gang.leaving:
            self._leave(gang, Outcome.CHECKPOINTED)
        else:
            self._train(gang)

    def _leave(self, gang: Gang, outcome: Outcome) -> None:
        """Every share by itself, a little after each other."""
        gang.turn += 1
        gang.leaving = True  # a notice that comes while it leaves changes nothing
        self._say(gang, RankLeft, rank=0, how=outcome.value, step=gang.step)
        for node in list(gang.running):
            at_us = self._engine.now_us() + self._later_us()
            self._engine.at(at_us, self.end, node, gang.key, outcome, "")

    # -- what rank 0 tells -----------------------------------------------------------------------------------

    def _span(self, gang: Gang, span: SpanClass, **steps: int) -> None:
        now_us = self._engine.now_us()
        if now_us > gang.since_us:
            self._say(gang, Reported, span=span, from_us=gang.since_us, **steps)
        gang.since_us = now_us

    def _say(self, gang: Gang, kind: type[Any], **fields: Any) -> None:
        if gang.script.work.reports:
            job_id, epoch = gang.key
            event = kind(at_us=self._engine.now_us(), job_id=job_id, epoch=epoch, **fields)
            self._tell(gang.first_node, f"{gang.name}/rank0", event)

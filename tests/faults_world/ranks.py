"""The ranks that really run on machines, gang by gang, whatever the control plane believes of them.

`Ranks` runs them in virtual time and asserts what must hold of the world itself: no GPU is used by two, no two attempts
of a job run at once, none runs after its end was reported, none starts behind a committed checkpoint.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from cordee.errors import EXIT_CHECKPOINTED
from cordee.events import AttemptPlaced, CheckpointCommitted, Event, Lease, Outcome, Restored
from cordee.ids import JobId, attempt_name
from cordee.schedule.gang import Gang, Reporter, Work
from cordee.simulate.engine import Engine

Key = tuple[JobId, int]
"""A job and the epoch of its attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A job's work, and how many of its first attempts fail by themselves."""

    work: Work
    fails: int = 0

    def on(self, gpus: int, epoch: int) -> Work:
        """Return the work of an attempt: it saves after the last whole step within its interval."""
        every_us, step_us = self.work.every_us, self.work.step_us_on(gpus)
        return replace(
            self.work,
            every_us=None if every_us is None else every_us // step_us * step_us,
            fails_after_steps=0 if epoch <= self.fails else None,
        )


@dataclass(slots=True)
class LiveGang:
    """The ranks of one attempt. `plan` grows whenever their future changes, so that older actions are dropped."""

    placed: AttemptPlaced
    running: dict[str, Lease] = field(default_factory=dict)  # rank groups by node
    started: set[str] = field(default_factory=set)  # nodes, ever
    reporter: Reporter | None = None  # since all rank groups ran at once
    leaving: bool = False
    plan: int = 0

    @property
    def key(self) -> Key:
        """Return its job and epoch."""
        return self.placed.job_id, self.placed.epoch

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return attempt_name(*self.key)

    @property
    def first_node(self) -> str:
        """Return the node of rank 0, which reports."""
        return self.placed.leases[0].node


class Ranks:
    """All gangs, and the checkpoints that outlive them.

    Attributes:
        gangs: by job and epoch, those that ever started.
        durable: the newest checkpoint of each job: its step and generation.
        reported_ended: rank groups that the log knows as ended.
        committed: the step of each job that the log knows as durable.
    """

    def __init__(
        self,
        engine: Engine,
        report: Callable[[str, Key, Event], None],
        leave: Callable[[str, Key, int], None],
        delay_us: Callable[[], int],
    ) -> None:
        """`report(node, key, event)` takes rank 0's; `leave(node, key, exit_code)` ends processes of a rank group.

        `delay_us` draws how much later than the others a rank group ends.
        """
        self.placed: dict[Key, AttemptPlaced] = {}  # in the log
        self.scripts: dict[JobId, Script] = {}
        self.gangs: dict[Key, LiveGang] = {}
        self.durable: dict[JobId, tuple[int, int]] = {}
        self.reported_ended: set[tuple[JobId, int, str]] = set()
        self.committed: dict[JobId, int] = {}
        self._engine, self._report, self._leave, self._delay_us = engine, report, leave, delay_us
        self._used: dict[tuple[str, int], int] = {}  # thousandths of GPUs in use

    # -- rank groups -----------------------------------------------------------------------------------------

    def start(self, node: str, key: Key) -> None:
        """Start the rank group of a node; when all of them run, the gang works."""
        placed = self.placed[key]
        gang = self.gangs.setdefault((placed.job_id, placed.epoch), LiveGang(placed))
        lease = next(each for each in placed.leases if each.node == node)
        self._check_start(gang, lease)
        for gpu in lease.gpus:
            self._used[node, gpu] = self._used.get((node, gpu), 0) + lease.milli
        gang.running[node] = lease
        gang.started.add(node)
        if len(gang.running) == len(placed.leases) == len(gang.started):
            now_us, (step, generation) = self._engine.now_us(), self.durable.get(placed.job_id, (0, 0))
            gpus = sum(len(each.gpus) for each in placed.leases)
            work = self.scripts[placed.job_id].on(gpus, placed.epoch)
            plan = Gang.start(work, now_us, gpus, epoch=placed.epoch, step=step)
            gang.reporter = Reporter.of(plan, placed.job_id, placed.epoch, now_us, generation)
            self._schedule(gang, gang.reporter.gang)

    def _check_start(self, gang: LiveGang, lease: Lease) -> None:
        node = lease.node
        assert node not in gang.started, f"{gang.name} was started twice on {node}"
        assert (*gang.key, node) not in self.reported_ended, f"{gang.name} starts on {node} after its end was reported"
        for other in self.gangs.values():
            if other.placed.job_id == gang.placed.job_id and other is not gang:
                assert not other.running, f"{other.name} runs on {sorted(other.running)} while {gang.name} starts"
                assert other.placed.epoch < gang.placed.epoch, f"{gang.name} starts after {other.name}"
        for gpu in lease.gpus:
            used = self._used.get((node, gpu), 0)
            assert used + lease.milli <= 1000, f"{gang.name} starts on {node}:{gpu}, of which {used}/1000 are in use"

    def hang(self, key: Key) -> None:
        """Note that a rank has died: the others wait for it for ever."""
        self.gangs[key].plan += 1

    def gone(self, node: str, key: Key) -> None:
        """Note that the last process of a rank group has ended."""
        lease = self.gangs[key].running.pop(node)
        for gpu in lease.gpus:
            self._used[node, gpu] -= lease.milli

    def end_reported(self, job_id: JobId, epoch: int, node: str) -> None:
        """Note that the log has the end of a rank group: from now on others may get its GPUs."""
        gang = self.gangs.get((job_id, epoch))
        name = attempt_name(job_id, epoch)
        assert gang is None or node not in gang.running, f"{name} still runs on {node}, and its end was reported"
        self.reported_ended.add((job_id, epoch, node))

    def commit_reported(self, job_id: JobId, step: int) -> None:
        """Note that the log has a checkpoint: from now on no attempt starts before this step."""
        self.committed[job_id] = max(step, self.committed.get(job_id, 0))
        assert self.durable[job_id][0] >= step, f"{job_id}: step {step} was committed, and cannot be read"

    # -- the future of a gang --------------------------------------------------------------------------------

    def notify(self, key: Key) -> None:
        """Send SIGTERM to all ranks of a gang that runs whole; if some are gone, the others hang in a collective."""
        gang, now_us = self.gangs.get(key), self._engine.now_us()
        if gang is None or gang.reporter is None or gang.leaving or len(gang.running) < len(gang.placed.leases):
            return
        plan = gang.reporter.gang
        if plan.work.handles_notice:
            gang.leaving = True
            if plan.notice(now_us):
                gang.plan += 1
                begun = plan.first_step + plan.periods * plan.interval_steps < plan.last_step
                if now_us < plan.train_us:
                    self._due(gang, gang.plan)
                elif plan.last_us == now_us and not begun:  # between two steps: in a turn of its own
                    self._engine.at(now_us, self._due, gang, gang.plan)
                else:
                    self._schedule(gang, plan)

    def _schedule(self, gang: LiveGang, plan: Gang) -> None:
        next_us = plan.next_us(self._engine.now_us())
        self._engine.at(plan.leave_us if next_us is None else next_us, self._due, gang, gang.plan)

    def _due(self, gang: LiveGang, number: int) -> None:
        """Report what is over; leave if all is."""
        if gang.plan != number or gang.reporter is None:
            return
        now_us, reporter, plan = self._engine.now_us(), gang.reporter, gang.reporter.gang
        if now_us < plan.leave_us:
            self._take(gang, reporter, reporter.report(now_us))
            self._schedule(gang, plan)
            return
        self._take(gang, reporter, reporter.leave(now_us))
        if plan.outcome is Outcome.FAILED:
            self._leave(gang.first_node, gang.key, 1)
            gang.plan += 1
            return
        gang.plan += 1
        gang.leaving = True  # a notice that comes while it leaves changes nothing
        exit_code = EXIT_CHECKPOINTED if plan.outcome is Outcome.CHECKPOINTED else 0
        for node in list(gang.running):  # each rank group by itself, a little after the others
            self._engine.at(now_us + self._delay_us(), self._leave, node, gang.key, exit_code)

    def _take(self, gang: LiveGang, reporter: Reporter, events: Iterable[Event]) -> None:
        job_id = gang.placed.job_id
        for event in events:
            if isinstance(event, Restored):
                committed = self.committed.get(job_id, 0)
                assert event.step >= committed, f"{gang.name} starts at step {event.step}; {committed} were committed"
            elif isinstance(event, CheckpointCommitted):
                step, _ = self.durable.get(job_id, (0, 0))
                assert event.step >= step, f"{gang.name} commits step {event.step} after {step}"
                self.durable[job_id] = (event.step, event.generation)
            if reporter.gang.work.reports:
                self._report(gang.first_node, gang.key, event)

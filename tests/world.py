"""A world in one line per node and job, and an ideal executor that plays it.

world = World(node("n1"), node("n2"), job("a", 8, "preemptible"))
world.cycle()             decide once; its events are committed and returned
world.play()              let the executor run until nothing more happens
"""

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from cordee.account import Ledger
from cordee.events import (
    AttemptPlaced,
    Capacity,
    CheckpointCommitted,
    Event,
    Failure,
    Job,
    JobSubmitted,
    KillOrdered,
    Node,
    NodeUp,
    NoticeGiven,
    Outcome,
    RanksEnded,
    RanksStarted,
    Reported,
    Restored,
    ServerUp,
    SpanClass,
    Tier,
)
from cordee.hardware.load import load_catalogue
from cordee.hardware.mig import MigTable
from cordee.ids import JobId
from cordee.schedule import Policy, State, enact
from cordee.schedule.gang import Gang, Reporter, Work
from cordee.schedule.state.transitions import apply

S = 1_000_000
HOUR = 3600 * S
PRICE = 3_600_000  # micro-dollars per GPU-hour: one micro-dollar per GPU-millisecond


Happening = Callable[["World"], Iterable[Event]]
"""A function of the world that returns events."""


def mig_table(gpu: str) -> MigTable:
    """Return the MIG profiles of a GPU of the catalogue."""
    table = load_catalogue().find_gpu(gpu).mig
    assert table is not None, f"{gpu} has no MIG profiles"
    return table


def node(name: str, gpus: int = 8, gpu: str = "H100", *, at_us: int = 0, **more: Any) -> NodeUp:
    """Return the event of a node that comes up."""
    fields: dict[str, Any] = {"epoch": 1, "micro_usd_per_gpu_hour": PRICE} | more
    return NodeUp(at_us=at_us, node=Node(name=name, gpus=gpus, gpu_name=gpu, **fields))


def job(name: str, gpus: int, tier: str = "standard", *, at_us: int = 0, **more: Any) -> JobSubmitted:
    """Return the submission of a job; its id is its name, and it is protected by default."""
    fields: dict[str, Any] = {"owner": "ann", "protected": True} | more
    if "capacity" in fields:
        fields["capacity"] = Capacity(fields["capacity"])
    return JobSubmitted(
        at_us=at_us, spec="{}", job=Job(job_id=JobId(name), name=name, gpus=gpus, tier=Tier(tier), **fields)
    )


def ranks_ended(world: "World", name: str, outcome: str, on: str | None = None, **more: Any) -> tuple[RanksEnded, ...]:
    """Return the ends of a live attempt's rank groups: of all that are held, or of the one on a node."""
    attempt = world.state.attempts[JobId(name)]
    nodes = [lease.node for lease in attempt.held] if on is None else [on]
    return tuple(
        RanksEnded(
            at_us=world.now_us, job_id=JobId(name), epoch=attempt.epoch, node=each, outcome=Outcome(outcome), **more
        )
        for each in nodes
    )


class World:
    """A log, the state and the ledger that follow from it, and an executor.

    `work` gives each job's seconds of work (100 by default), in steps of a second that a checkpoint keeps.
    `deaf` names jobs that ignore their notice, `broken` jobs whose script fails after two seconds.
    `policy` is Cordee's own by default.
    """

    def __init__(
        self,
        *events: Event,
        work: dict[str, int] | None = None,
        deaf: Iterable[str] = (),
        broken: Iterable[str] = (),
        policy: Policy | None = None,
    ) -> None:
        self.state, self.ledger, self.now_us = State(policy), Ledger(), 0
        self.log: list[Event] = []
        self.work, self.deaf, self.broken = dict(work or {}), set(deaf), set(broken)
        self.checks: list[Callable[[World], None]] = []
        self.errors: list[Exception] = []
        self._agenda: list[tuple[int, int, Event | Happening]] = []
        self._entries = 0
        self._durable: dict[JobId, tuple[int, int]] = {}  # step and generation of the newest checkpoint
        self._ranks: dict[JobId, Reporter] = {}  # of live gangs
        self.tell(ServerUp(at_us=0), *events)

    def tell(self, *events: Event) -> "World":
        """Append events, in this order."""
        for event in events:
            self.now_us = max(self.now_us, event.at_us)
            self.log.append(event)
            apply(self.state, event)
            self.ledger.apply(event)
        return self

    def at(self, seconds: float) -> "World":
        """Let time pass without events."""
        self.now_us = round(seconds * S)
        return self

    def cycle(self) -> tuple[Event, ...]:
        """Decide once, commit, and carry the commands out."""
        decision = enact(self.state, self.now_us, None, lambda events: self.log.extend(events) or events)
        self.errors += [error for _, error in decision.errors]
        for event in decision.events:
            self.ledger.apply(event)
            self._carry_out(event)
        if decision.wake_at_us is not None:
            self._later(decision.wake_at_us, ServerUp(at_us=-1))
        for check in self.checks:
            check(self)
        return decision.events

    def later(self, *events: Event) -> "World":
        """Schedule events for their time in `play`."""
        for event in events:
            self._later(event.at_us, event)
        return self

    def when(self, seconds: float, happening: Happening) -> "World":
        """Schedule a function of the world for a time in `play`."""
        self._later(round(seconds * S), happening)
        return self

    def play(self, until_s: float = 1e9) -> "World":
        """Run until no events are left, or until a time."""
        self.cycle()
        while self._agenda and self._agenda[0][0] <= until_s * S:
            self.now_us = max(self.now_us, self._agenda[0][0])
            while self._agenda and self._agenda[0][0] <= self.now_us:
                _, _, event = heapq.heappop(self._agenda)
                if callable(event):
                    self.tell(*event(self))
                elif event.at_us >= 0 and not self._is_stale(event):
                    self.tell(event)
            self.cycle()
            assert self._entries < 100_000, "the world comes to no end"
        return self

    def phase(self, name: str) -> str:
        """Return the phase of a job."""
        return self.state.jobs[JobId(name)].phase.value

    # -- the executor ----------------------------------------------------------------------------------------

    def _later(self, at_us: int, event: Event | Happening) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (max(at_us, self.now_us), self._entries, event))

    def _is_stale(self, event: Event) -> bool:
        """Return whether the event is of ranks whose attempt is over."""
        if not isinstance(event, RanksStarted | RanksEnded):
            return False
        attempt = self.state.attempts.get(event.job_id)
        return attempt is None or attempt.epoch != event.epoch

    def _carry_out(self, event: Event) -> None:
        if isinstance(event, AttemptPlaced):
            self._start(event)
        elif isinstance(event, NoticeGiven):
            self._notify(event)
        elif isinstance(event, KillOrdered):
            self._ranks.pop(event.job_id, None)
            for ended in self._ended(event.job_id, event.at_us + S // 10, Outcome.KILLED):
                self._later(ended.at_us, ended)

    def _start(self, event: AttemptPlaced) -> None:
        job_id, job = event.job_id, self.state.jobs[event.job_id].job
        work = Work(
            steps=self.work.get(job_id, 100),
            step_us=S,
            start_us=job.restart_us,
            every_us=None,
            stall_us=0,
            upload_us=job.save_us,
            saves_at_end=False,
            checkpoint_bytes=1,
            handles_notice=job_id not in self.deaf and job.protected and job.save_us <= job.grace_us,
            fails_after_steps=2 if job_id in self.broken else None,
        )
        step, generation = self._durable.get(job_id, (0, 0))
        gang = Gang.start(work, event.at_us, job.gpus, epoch=event.epoch, step=step)
        ranks = self._ranks[job_id] = Reporter.of(gang, job_id, event.epoch, event.at_us, generation)
        for lease in event.leases:
            at_us = event.at_us + S
            self._later(at_us, RanksStarted(at_us=at_us, job_id=job_id, epoch=event.epoch, node=lease.node))
        self._later(gang.train_us, lambda world: world._due(ranks))
        self._later(gang.leave_us, lambda world: world._due(ranks))

    def _notify(self, event: NoticeGiven) -> None:
        ranks = self._ranks.get(event.job_id)
        if ranks is not None and ranks.gang.notice(event.at_us):
            done = ranks.interrupt(event.at_us)
            self._later(event.at_us, lambda world: world._seen(done))
            self._later(ranks.gang.leave_us, lambda world: world._due(ranks))

    def _due(self, ranks: Reporter) -> Iterable[Event]:
        """Return what a gang reports now, and the end of its ranks if it leaves."""
        attempt = self.state.attempts.get(ranks.job_id)
        if self._ranks.get(ranks.job_id) is not ranks or attempt is None or attempt.epoch != ranks.epoch:
            return ()
        if self.now_us < ranks.gang.leave_us:
            return self._seen(ranks.report(self.now_us))
        del self._ranks[ranks.job_id]
        return (
            *self._seen(ranks.leave(self.now_us)),
            *self._ended(ranks.job_id, self.now_us, ranks.gang.outcome),
        )

    def _seen(self, events: Iterable[Event]) -> tuple[Event, ...]:
        """Keep the checkpoints; leave out what the worlds of the tests do not look at: where restarts and saves go."""
        for event in events:
            if isinstance(event, CheckpointCommitted):
                self._durable[event.job_id] = (event.step, event.generation)
        return tuple(
            event
            for event in events
            if isinstance(event, Restored | CheckpointCommitted)
            or (isinstance(event, Reported) and event.span is SpanClass.USEFUL)
        )

    def _ended(self, job_id: JobId, at_us: int, outcome: Outcome) -> list[RanksEnded]:
        attempt = self.state.attempts[job_id]
        failure = Failure(rank=0, exit_code=1, signal=None, tail=("boom",)) if outcome is Outcome.FAILED else None
        who: dict[str, Any] = {"job_id": job_id, "epoch": attempt.epoch, "outcome": outcome, "failure": failure}
        return [RanksEnded(at_us=at_us, node=lease.node, **who) for lease in attempt.held]


def brief(events: Iterable[Event]) -> list[str]:
    """Return decisions in words, for tables.

    >>> brief([KillOrdered(at_us=1, job_id=JobId("a"), epoch=1, why="late")])
    ['kill a']
    """
    return [_words(event) for event in events]


def _words(event: Any) -> str:
    match type(event).__name__:
        case "AttemptPlaced":
            return f"place {event.job_id} " + "+".join(f"{each.node}:{len(each.gpus)}" for each in event.leases)
        case "NoticeGiven":
            return f"notice {event.job_id} {event.reason.value}" + (f" for {event.for_job}" if event.for_job else "")
        case "KillOrdered":
            return f"kill {event.job_id}"
        case "AttemptEnded":
            return f"attempt {event.job_id}.{event.epoch} {event.outcome.value}"
        case "JobEnded":
            return f"job {event.job_id} {event.state}"
    return type(event).__name__

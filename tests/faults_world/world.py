"""The world of one seed: the control plane over ports that fail, and an invariant check after each step.

It has the same `Control.tick()`, store, executor and agents as production. The server dies before or after any call of
a port and a new `Control` reads the log; the store refuses; network, agents, machines and ranks fail (cluster.py,
network.py, machines.py, ranks.py). Then the faults stop, and everything that can run has to run to its end.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from cordee.control.agents.executor import AgentsExecutor
from cordee.control.ports import Pending, Report, Store
from cordee.control.snapshot import Snapshot, loaded, taken
from cordee.control.tick import Control
from cordee.errors import QueuesError, StoreError
from cordee.event_json import encode
from cordee.events import AttemptPlaced, Event, Job, JobSubmitted, NodeDown, NodeUp, QueuesSet
from cordee.ids import JobId
from cordee.schedule import decide
from cordee.schedule.explain import explain
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply
from cordee.simulate.engine import Engine
from cordee.simulate.store import MemoryStore
from cordee.units import US_PER_S
from faults_world import inputs
from faults_world.chains import chained, chains_rng, plan, release
from faults_world.cluster import Cluster, CommittedEvents
from faults_world.invariants import Invariants
from faults_world.network import MessageFaults

T = TypeVar("T")
BEGIN_US = 1_000_000 * US_PER_S
RETRY_US = US_PER_S
STEPS_MAX = 3_000
RECENT = 40
SILENT_S_MAX = 60.0
"""A node that was taken for dead had a fault within this time: lease, margin, and messages on their way."""

IDLE_TURNS_MAX = 20
QUIET_US = 7200 * US_PER_S
"""A world in which nothing happens for so long after the faults has come to its end."""
"""More steps of the server at one time without any effect are a wake-up in the past that never ends."""


CHANCES: dict[str, tuple[float, ...]] = {
    "lost": (0.002, 0.01),
    "late": (0.02, 0.1),
    "doubled": (0.1, 0.4),
    "crash": (0.002, 0.01),
    "refuse": (0.005, 0.02),
    "skew": (0.5, 20.0),
    "clocks": (3.0, 3600.0),
}
"""Probabilities for each message (lost, late, doubled) and each call (crash, refuse); skew of the clock of the server,
and of those of nodes, in seconds."""


RARE = {"store.events": 5, "store.confirm": 5}
"""Calls that are made so seldom that their faults are that much more likely, or few seeds would have one."""


class ServerCrashed(BaseException):
    """The server crashes at this call; only the loop that starts the next one catches it, after `away_us`."""

    def __init__(self, place: str, away_us: int = RETRY_US) -> None:
        super().__init__(place)
        self.away_us = away_us


class InvariantBroken(BaseException):
    """An event that breaks an invariant was committed; the control plane would catch an Exception."""


@dataclass(slots=True)
class CallFaults:
    """The faults around calls: the server crashes, or the store refuses. `counts` counts them by place."""

    rng: random.Random
    crash: float = 0.0
    refuse: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    def around(self, name: str, call: Callable[[], T], *, stores: bool = False) -> T:
        """Make the call; the server may crash before it or after it."""
        self._at(f"before {name}", name)
        if stores and self.refuse and self.rng.random() < self.refuse * RARE.get(name, 1):
            self.counts[f"refused {name}"] = self.counts.get(f"refused {name}", 0) + 1
            raise StoreError("the disk is full (fault simulation)")
        answer = call()
        self._at(f"after {name}", name)
        return answer

    def _at(self, place: str, name: str) -> None:
        if self.crash and self.rng.random() < self.crash * RARE.get(name, 1):
            self.counts[place] = self.counts.get(place, 0) + 1
            raise ServerCrashed(place)


class _Ports:
    """Clock, Store and Executor with faults around each call; the world takes what is committed."""

    def __init__(self, world: "FaultWorld") -> None:
        self._world, self._calls = world, world.calls
        self.executor: AgentsExecutor | None = None

    def now_us(self) -> int:
        return self._calls.around("clock.now_us", lambda: self._world.engine.now_us() + self._world.skew_us)

    def commit(self, events: Sequence[Event], *, seen: Iterable[tuple[str, int]] = ()) -> None:
        def commit() -> None:
            marks = tuple(seen)
            self._world.store.commit(events, seen=marks)
            try:
                self._world.committed(events, marks)
            except Exception as error:
                raise InvariantBroken(repr(error)) from error

        self._calls.around("store.commit", commit, stores=True)

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        log = self._calls.around("store.events", lambda: list(self._world.store.events(after)), stores=True)
        return iter(log)

    def marks(self, sources: Sequence[str]) -> Mapping[str, int]:
        return self._calls.around("store.marks", lambda: self._world.store.marks(sources), stores=True)

    def pending(self) -> Sequence[Pending]:
        return self._calls.around("store.pending", self._world.store.pending, stores=True)

    def confirm(self, numbers: Sequence[int]) -> None:
        self._calls.around("store.confirm", lambda: self._world.store.confirm(numbers), stores=True)

    def reports(self) -> Sequence[Report]:
        return self._calls.around("executor.reports", self._agents.reports)

    def acknowledge(self, source: str, seq: int) -> None:
        self._calls.around("executor.acknowledge", lambda: self._agents.acknowledge(source, seq))

    def carry_out(self, pending: Pending) -> bool:
        return self._calls.around("executor.carry_out", lambda: self._agents.carry_out(pending))

    @property
    def _agents(self) -> AgentsExecutor:
        assert self.executor is not None, "it is made right after this object"
        return self.executor


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault that is injected at random times.

    Attributes:
        rates: the expected number for each node; a world draws one of these.
        inject: injects it, and returns a line about it; empty if it was not possible.
    """

    rates: tuple[float, ...]
    inject: Callable[["FaultWorld", random.Random], str]


class FaultWorld:
    """The world of one seed."""

    def __init__(self, seed: int, faults: Mapping[str, Fault], folder: Path, store: Store | None = None) -> None:
        self.seed, rng = seed, random.Random(seed)
        self._recent: deque[tuple[int, str | Event]] = deque(maxlen=RECENT)
        self.engine = Engine(BEGIN_US)
        self.store: Store = store or MemoryStore()
        self.policy_name, self.policy = inputs.policy(rng)
        self.nodes, self.jobs = inputs.nodes(rng), inputs.jobs(rng)
        chains = chains_rng(seed)
        if chains is not None:
            scripts = [script for _, script in self.jobs]
            self.jobs = list(zip(chained([job for job, _ in self.jobs], chains), scripts, strict=True))
        self.queues = inputs.queues(rng, sum(node.gpus for node in self.nodes))
        self._rng = random.Random(rng.randrange(2**32))  # of faults
        rates = CHANCES | {kind: fault.rates for kind, fault in faults.items()}
        on = {kind: rng.random() < 0.6 for kind in rates}  # each world suffers from some kinds of faults only
        chance = {kind: on[kind] * rng.choice(each) for kind, each in rates.items()}
        messages = MessageFaults(lost=chance["lost"], late=chance["late"], doubled=chance["doubled"])
        self.calls = CallFaults(random.Random(rng.randrange(2**32)), chance["crash"], chance["refuse"])
        self.skew_us_max = round(chance["skew"] * US_PER_S)
        self.skew_us = 0
        late = {node.name: rng.choice((0, 0, 0, 30)) * US_PER_S for node in self.nodes}
        own = random.Random(rng.randrange(2**32))
        self.cluster = Cluster(self.engine, self.nodes, own, messages, folder, self.note, chance["clocks"])
        for name, machine in self.cluster.machines.items():
            self.engine.at(self.engine.now_us() + late[name], machine.power_on)
        self.invariants = Invariants(self.cluster.ranks)
        self.shadow = State(self.policy)
        self.marks: dict[str, int] = {}
        self.injected: dict[str, int] = {}
        self._checked: tuple[Control | None, int] = (None, 0)  # this state was
        self._snapshot: Snapshot | None = None
        self.accepted: set[JobId] = set()
        self.control: Control | None = None
        self.steps = self.crashes = self.events = 0
        self.faults_end_us = self.engine.now_us() + rng.randint(60, 900) * US_PER_S
        self._requests: deque[Callable[[Control], None]] = deque()
        self._wake_us: int | None = BEGIN_US  # when the server ticks next
        self._away_until_us = 0
        self._changed_us = BEGIN_US
        self._plan(faults, chance, rng)
        if chains is not None:
            plan(self, chains, BEGIN_US, self.faults_end_us - BEGIN_US)

    # -- faults ----------------------------------------------------------------------------------------------

    def _plan(self, faults: Mapping[str, Fault], chance: dict[str, float], rng: random.Random) -> None:
        begin_us, span_us = self.engine.now_us(), self.faults_end_us - self.engine.now_us()
        self._requests.append(lambda control: control.up())
        if self.queues:
            self._requests.append(self._set_queues)
        for job, script in self.jobs:
            self.cluster.ranks.scripts[job.job_id] = script
            self.engine.at(begin_us + rng.randint(0, span_us // 3), self._requests.append, self._submit(job))
        for kind, fault in faults.items():
            for _ in range(round(chance[kind] * rng.random() * len(self.nodes))):
                self.engine.at(begin_us + rng.randint(1, span_us), self._inject, kind, fault)
        self.engine.at(self.faults_end_us, self._end_faults)

    def _inject(self, kind: str, fault: Fault) -> None:
        text = fault.inject(self, self._rng)
        if text:
            self.injected[kind] = self.injected.get(kind, 0) + 1
            self.note(f"{kind}: {text}")

    def _submit(self, job: Job) -> Callable[[Control], None]:
        def submit(control: Control) -> None:
            if job.job_id not in control.state.jobs:
                known = tuple(each for each in job.after if JobId(each.of) in control.state.jobs)  # as admission does
                control.submit(replace(job, after=known), inputs.spec(job))
            self.accepted.add(job.job_id)

        return submit

    def _set_queues(self, control: Control) -> None:
        try:
            control.set_queues(self.queues)
        except QueuesError:
            self.queues = ()

    def _end_faults(self) -> None:
        """Stop all faults; the next server grants leases with few beats."""
        self.note("the faults stop")
        self.calls.crash = self.calls.refuse = 0.0
        self.cluster.calm()
        for name in self.cluster.machines:
            self.uncordon(name)
        self._requests.append(lambda control: control.up())
        for job, _ in self.jobs:
            release(self, job.job_id)
        raise ServerCrashed("once more", 0)

    @property
    def faults_over(self) -> bool:
        """Return whether the faults have stopped."""
        return self.engine.now_us() >= self.faults_end_us

    def cordon(self, name: str, *, drain: bool) -> None:
        """Let an operator take a node out of use."""
        self.request(
            lambda control: (
                control.cordon(name, by="ann", why="", drain=drain) if name in control.state.nodes.records else None
            )
        )

    def uncordon(self, name: str) -> None:
        """Let an operator put a node back into use."""
        self.request(
            lambda control: control.uncordon(name, by="ann", why="") if name in control.state.nodes.records else None
        )

    def _server_dies(self, away_us: int) -> None:
        self.control = None
        self.cluster.server_dies()
        self.crashes += 1
        self._away_until_us = self.engine.now_us() + away_us
        self._wake_us = self._away_until_us

    def request(self, call: Callable[[Control], None]) -> None:
        """Send a request to the server; a client that gets no answer asks again."""
        self._requests.append(call)

    # -- the play --------------------------------------------------------------------------------------------

    def note(self, what: str | Event) -> None:
        """Keep a line, or an event, for the report of a failure."""
        self._recent.append((self.engine.now_us() - BEGIN_US, what))

    @property
    def recent(self) -> list[str]:
        """Return the last events, a line each."""
        lines = ((at_us, what if isinstance(what, str) else brief(what)) for at_us, what in self._recent)
        return [f"{at_us / US_PER_S:10.3f} s  {what}" for at_us, what in lines]

    def play(self, steps: int | None = None) -> None:
        """Run to the end, or for a number of steps."""
        at_us, idle_turns, before = -1, 0, (-1, -1)
        while steps is None or self.steps < steps:
            now_us = self.engine.now_us()
            if self._is_due(now_us):
                assert self.steps < STEPS_MAX, f"no end after {STEPS_MAX} steps"
                self.steps += 1
                self._step_server()
                now_us = self.engine.now_us()
                done = (self.events, len(self._requests))
                idle_turns = idle_turns + 1 if (now_us, done) == (at_us, before) else 0
                at_us, before = now_us, done
                assert idle_turns < IDLE_TURNS_MAX, f"the wake-up at {self._wake_us}, now {at_us}, stays in the past"
                if self.faults_over and self.control is not None and not self._requests and not self._open():
                    break
                continue
            if self.faults_over and self._wake_us is None and now_us > self._changed_us + QUIET_US:
                break
            next_us = self.engine.next_us()
            assert next_us is not None, "agents beat for ever"
            if self._wake_us is not None and self.cluster.server_runs | (self.control is None):
                next_us = min(next_us, max(now_us, self._wake_us))
            try:
                self.engine.advance(next_us)
            except ServerCrashed as crash:
                self._crashed(crash)
        if steps is None:
            self._end()

    def _is_due(self, now_us: int) -> bool:
        """Return whether the server ticks now, or a new one starts."""
        if self.control is None:
            return now_us >= self._away_until_us
        if not self.cluster.server_runs:
            return False
        return bool(self._requests) or (self._wake_us is not None and now_us >= self._wake_us)

    def _crashed(self, crash: ServerCrashed) -> None:
        self.note(f"the server crashes {crash}")
        self._server_dies(crash.away_us)

    def _wake(self) -> None:
        """Let the server tick, as a change in its executor does."""
        self._wake_us = self.engine.now_us()

    def committed(self, events: Sequence[Event], marks: Iterable[tuple[str, int]]) -> None:
        """Take events that the store has committed."""
        for event in events:
            self.events += 1
            self._changed_us = self.engine.now_us()
            self.note(event)
            if isinstance(event, AttemptPlaced):
                self.cluster.ranks.placed[event.job_id, event.epoch] = event
            elif isinstance(event, NodeDown):
                self._check_down(event)
            self.invariants.apply(event)
            apply(self.shadow, event)
        for source, seq in marks:
            assert seq > self.marks.get(source, 0), f"the mark of {source} goes from {self.marks.get(source)} to {seq}"
            self.marks[source] = seq

    def _check_down(self, down: NodeDown) -> None:
        """Check that a node that was taken for dead by its silence could not be reached."""
        machine = self.cluster.machines[down.node]
        if machine.agent is None or machine.agent.epoch != down.epoch:
            return  # the agent of this epoch is dead
        quiet_s = (self.engine.now_us() - machine.troubled_us) / US_PER_S
        assert "silent" not in down.why or quiet_s < SILENT_S_MAX, f"{down}: it could be reached for {quiet_s} s"

    def _step_server(self) -> None:
        """Answer the requests and tick; the server may crash."""
        began_us, self._wake_us = self.engine.now_us(), None
        try:
            if self.control is None:
                self._start()
            assert self.control is not None
            while self._requests:
                self._requests[0](self.control)
                self._requests.popleft()
            wake_us = self.control.tick()
        except StoreError as error:
            self.note(f"refused: {error.message}")
            self._check()
            if self.control is None:
                self._server_dies(RETRY_US)
            else:
                self._wake_us = self.engine.now_us() + RETRY_US
            return
        except ServerCrashed as crash:
            self._crashed(crash)
            return
        self._check()
        for attempt in self.control.state.attempts.values():
            due_us = attempt.limit_at_us if attempt.notice is None else attempt.notice.deadline_us
            if due_us is not None and attempt.kill is None and attempt.held:
                overslept = f"{attempt.job.job_id} is due at {due_us}, and the server sleeps until {wake_us}"
                assert wake_us is not None and wake_us <= due_us, overslept
        if wake_us is not None:
            wake_us = max(began_us, wake_us - self.skew_us)
            self._wake_us = wake_us if self._wake_us is None else min(wake_us, self._wake_us)

    def _start(self) -> None:
        """Start a server: it reads the log, then lets agents in."""
        ports = _Ports(self)
        self.skew_us = self._rng.randint(-self.skew_us_max, self.skew_us_max) if not self.faults_over else self.skew_us
        self.cluster.server_dies()
        log = CommittedEvents(self.cluster.ranks, ports.marks)
        ports.executor = self.cluster.server_starts(log, self.skew_us, self._wake)
        fold = None
        if self._snapshot is not None and self.crashes % 2:  # the others replay the whole log
            fold = loaded(self._snapshot, self.policy, self._snapshot.number)
        control = Control(clock=ports, store=ports, executor=ports, policy=self.policy, fold=fold)
        assert control.state.snapshot() == self.shadow.snapshot(), "the log does not give the state back"
        self.control = log.control = control
        self.cluster.server_opens(log, ports.executor)

    # -- what must hold --------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Check every invariant after a step."""
        control = self.control
        if control is None:
            return
        assert not control.errors, f"a decision failed: {control.errors!r}"
        assert self.accepted <= control.state.jobs.keys(), "an accepted job is lost"
        if self._checked == (control, control.number):
            return
        self._checked = (control, control.number)
        if control.number % 3 == 0:
            self._snapshot = taken(control.fold)
        self.invariants.check_state(control.state)
        before = control.state.snapshot()
        assert before == self.shadow.snapshot(), "the state is not what was committed"
        control.state.idle = None  # as if it had not decided yet
        decide(control.state, max(self.engine.now_us() + self.skew_us, self.invariants.at_us or 0))
        assert control.state.snapshot() == before, "decide() changed the state"
        if self.steps % 8 == 0:
            self.invariants.check_ledger(control.ledger, self.engine.now_us())

    def _open(self) -> list[JobId]:
        """Return the jobs that have not ended."""
        return [job.job_id for job, _ in self.jobs if job.job_id not in self.invariants.ended]

    def _end(self) -> None:
        """Check that every job that can run has run, and that a new server has the same state."""
        assert self.control is not None and not self._requests, "the server did not come back"
        now_us = self.engine.now_us()
        self.invariants.check_ledger(self.control.ledger, now_us)
        assert self.accepted == {job.job_id for job, _ in self.jobs}, "a job was never accepted"
        assert not self.invariants.live, f"{list(self.invariants.live)} hold GPUs for ever"
        for job_id in self._open():
            if self._could_run(self.control.state, job_id):
                why = explain(self.control.state, job_id, now_us)
                raise AssertionError(f"{job_id} could run and did not: {why.reason}: {why.text}")
        before = self.control
        self._start()
        assert self.control.ledger.rows(now_us) == before.ledger.rows(now_us), "the log does not give the ledger back"

    def _could_run(self, state: State, job_id: JobId) -> bool:
        """Return whether the job would be placed if it were alone on the nodes as they are."""
        if any(JobId(each.of) not in self.invariants.ended for each in state.jobs[job_id].job.after):
            return False  # it waits for one that cannot run
        alone, at_us = State(self.policy), self.engine.now_us()
        for each in self.invariants.nodes.values():
            if each.up and not each.reclaimed and not each.cordoned:
                apply(alone, NodeUp(at_us=at_us, node=each.node))
        if state.quotas.queues:
            apply(alone, QueuesSet(at_us=at_us, queues=state.quotas.queues))
        apply(alone, JobSubmitted(at_us=at_us, job=state.jobs[job_id].job, spec="{}"))
        return any(isinstance(event, AttemptPlaced) for event in decide(alone, at_us).events)


def brief(event: Event) -> str:
    """Return an event in one line."""
    fields = encode(event)
    kind = fields.pop("kind")
    fields.pop("at_us")
    if isinstance(event, AttemptPlaced):
        gpus = " ".join(f"{lease.node}:{','.join(map(str, lease.gpus))}" for lease in event.leases)
        return f"{kind} {event.job_id}.{event.epoch} on {gpus}"
    if isinstance(event, JobSubmitted):
        return f"{kind} {event.job.job_id}: {event.job.gpus} GPUs, {event.job.tier.value}, queue {event.job.queue}"
    if isinstance(event, NodeUp):
        return f"{kind} {event.node.name} epoch {event.node.epoch}: {event.node.gpus} {event.node.gpu_name}"
    return f"{kind} " + " ".join(f"{name}={value}" for name, value in fields.items() if value not in (None, "", ()))

"""The world of one seed: the control plane over ports that fail, and an invariant check after each step.

It has the same `Control.tick()` and store as production. The server dies before or after any call of a port and a new
`Control` reads the log; the store refuses; network, agents, machines and ranks fail (hostile.py, ranks.py). Then the
faults stop, and everything that can run has to run to its end.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cordee.control.ports import Pending, Report, Store
from cordee.control.tick import Control
from cordee.errors import QueuesError, StoreError
from cordee.event_json import encode
from cordee.events import AttemptPlaced, Event, Job, JobSubmitted, NodeCordoned, NodeUncordoned, NodeUp, QueuesSet
from cordee.ids import JobId
from cordee.schedule import decide
from cordee.schedule.explain import explain
from cordee.schedule.state import State
from cordee.simulate.engine import Engine
from cordee.simulate.store import MemoryStore
from cordee.units import US_PER_S
from faults_world import inputs
from faults_world.hostile import HostileCluster, Network
from faults_world.invariants import Invariants

T = TypeVar("T")
BEGIN_US = 1_000_000 * US_PER_S
RETRY_US = US_PER_S
STEPS_MAX = 3_000
TRACE = 40
IN_VAIN = 20
"""So many turns at one moment that bring nothing are a wake-up in the past that never ends."""


CHANCES: dict[str, tuple[float, ...]] = {
    "lost": (0.05, 0.3),
    "late": (0.1, 0.4),
    "doubled": (0.1, 0.4),
    "crash": (0.002, 0.01),
    "refuse": (0.005, 0.02),
    "skew": (0.5, 20.0),
}
"""Probabilities for each message (lost, late, doubled) and each call (crash, refuse); skew of the clock in seconds."""


class ServerDied(BaseException):
    """The server is gone, here and now: nothing catches it but who starts the next one."""


@dataclass(slots=True)
class Fuse:
    """Where the server dies, or the store refuses; `blown` counts the places."""

    rng: random.Random
    dies: float = 0.0
    refuses: float = 0.0
    blown: dict[str, int] = field(default_factory=dict)

    def around(self, name: str, call: Callable[[], T], *, stores: bool = False) -> T:
        """Make the call, if the server lives to make it; it may not live to see the answer."""
        self._at(f"before {name}")
        if stores and self.refuses and self.rng.random() < self.refuses:
            self.blown[f"refused {name}"] = self.blown.get(f"refused {name}", 0) + 1
            raise StoreError("the disk is full, says the fault simulation")
        answer = call()
        self._at(f"after {name}")
        return answer

    def _at(self, place: str) -> None:
        if self.dies and self.rng.random() < self.dies:
            self.blown[place] = self.blown.get(place, 0) + 1
            raise ServerDied(place)


class _Ports:
    """Clock, Store and Executor, each call through the fuse; what was committed is told to `heard`."""

    def __init__(self, world: "FaultWorld") -> None:
        self._world, self._fuse = world, world.fuse

    def now_us(self) -> int:
        return self._fuse.around("clock.now_us", lambda: self._world.engine.now_us() + self._world.skew_us)

    def commit(self, events: Sequence[Event], *, seen: Iterable[tuple[str, int]] = ()) -> None:
        def commit() -> None:
            marks = tuple(seen)
            self._world.store.commit(events, seen=marks)
            self._world.committed(events, marks)

        self._fuse.around("store.commit", commit, stores=True)

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        log = self._fuse.around("store.events", lambda: list(self._world.store.events(after)), stores=True)
        return iter(log)

    def mark(self, source: str) -> int:
        return self._fuse.around("store.mark", lambda: self._world.store.mark(source), stores=True)

    def pending(self) -> Sequence[Pending]:
        return self._fuse.around("store.pending", self._world.store.pending, stores=True)

    def confirm(self, number: int) -> None:
        self._fuse.around("store.confirm", lambda: self._world.store.confirm(number), stores=True)

    def reports(self) -> Sequence[Report]:
        return self._fuse.around("executor.reports", self._world.cluster.reports)

    def acknowledge(self, source: str, seq: int) -> None:
        self._fuse.around("executor.acknowledge", lambda: self._world.cluster.acknowledge(source, seq))

    def carry_out(self, pending: Pending) -> bool:
        return self._fuse.around("executor.carry_out", lambda: self._world.cluster.carry_out(pending))


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault that is injected at random times.

    Attributes:
        rates: how many are expected for each node; a world draws one of these.
        inject: does it, and returns the line for the trace; empty if nothing could be done.
    """

    rates: tuple[float, ...]
    inject: Callable[["FaultWorld", random.Random], str]


class FaultWorld:
    """The world of one seed."""

    def __init__(self, seed: int, faults: Mapping[str, Fault], store: Store | None = None) -> None:
        self.seed, rng = seed, random.Random(seed)
        self._trace: deque[tuple[int, str | Event]] = deque(maxlen=TRACE)
        self.engine = Engine(BEGIN_US)
        self.store: Store = store or MemoryStore()
        self.policy_name, self.policy = inputs.policy(rng)
        self.nodes, self.jobs = inputs.nodes(rng), inputs.jobs(rng)
        self.queues = inputs.queues(rng, sum(node.gpus for node in self.nodes))
        self._rng = random.Random(rng.randrange(2**32))  # of faults
        rates = CHANCES | {kind: fault.rates for kind, fault in faults.items()}
        on = {kind: rng.random() < 0.6 for kind in rates}  # each world suffers from some kinds of faults only
        chance = {kind: on[kind] * rng.choice(each) for kind, each in rates.items()}
        self.network = Network(lost=chance["lost"], late=chance["late"], doubled=chance["doubled"])
        self.fuse = Fuse(random.Random(rng.randrange(2**32)), chance["crash"], chance["refuse"])
        self.skew_us_max = round(chance["skew"] * US_PER_S)
        self.skew_us = 0
        late = {node.name: rng.choice((0, 0, 0, 30)) * US_PER_S for node in self.nodes}
        self.cluster = HostileCluster(self.engine, self.nodes, random.Random(rng.randrange(2**32)), self.network, late)
        self.invariants = Invariants(self.cluster.ranks)
        self.shadow = State(self.policy)
        self.marks: dict[str, int] = {}
        self.injected: dict[str, int] = {}
        self._checked: tuple[Control | None, int] = (None, 0)  # this state was
        self.accepted: set[JobId] = set()
        self.control: Control | None = None
        self.steps = self.deaths = self.events = 0
        self.horizon_us = self.engine.now_us() + rng.randint(60, 900) * US_PER_S
        self._asked: deque[Callable[[Control], None]] = deque()
        self._drains: dict[str, int] = {}
        self._plan(faults, chance, rng)

    # -- faults ----------------------------------------------------------------------------------------------

    def _plan(self, faults: Mapping[str, Fault], chance: dict[str, float], rng: random.Random) -> None:
        begin_us, span_us = self.engine.now_us(), self.horizon_us - self.engine.now_us()
        self._asked.append(lambda control: control.up())
        if self.queues:
            self._asked.append(self._set_queues)
        for job, script in self.jobs:
            self.cluster.ranks.scripts[job.job_id] = script
            self.engine.at(begin_us + rng.randint(0, span_us // 3), self._asked.append, self._submit(job))
        for kind, fault in faults.items():
            for _ in range(round(chance[kind] * rng.random() * len(self.nodes))):
                self.engine.at(begin_us + rng.randint(1, span_us), self._inject, kind, fault)
        self.engine.at(self.horizon_us, self._calm)

    def _inject(self, kind: str, fault: Fault) -> None:
        said = fault.inject(self, self._rng)
        if said:
            self.injected[kind] = self.injected.get(kind, 0) + 1
            self.say(f"{kind}: {said}")

    def _submit(self, job: Job) -> Callable[[Control], None]:
        def submit(control: Control) -> None:
            if job.job_id not in control.state.jobs:
                control.submit(job, "{}")
            self.accepted.add(job.job_id)

        return submit

    def _set_queues(self, control: Control) -> None:
        try:
            control.set_queues(self.queues)
        except QueuesError:
            self.queues = ()

    def _calm(self) -> None:
        """From now on nothing fails any more."""
        self.say("the faults stop")
        self.network.lost = self.network.late = self.network.doubled = 0.0
        self.fuse.dies = self.fuse.refuses = 0.0
        for name in sorted(self._drains):
            self.operator(NodeUncordoned(at_us=self.engine.now_us(), node=name, by="ann"))
        self._asked.append(lambda control: control.up())

    @property
    def calm(self) -> bool:
        """The faults have stopped."""
        return self.engine.now_us() >= self.horizon_us

    def operator(self, event: Event) -> None:
        """What an operator says of nodes comes through a stream of its own."""
        if isinstance(event, NodeCordoned | NodeUncordoned):
            self._drains[event.node] = 1
        self.cluster.say("operator", event)

    def ask(self, question: Callable[[Control], None]) -> None:
        """Of the server, as soon as it answers; a client that gets no answer asks again."""
        self._asked.append(question)

    # -- the play --------------------------------------------------------------------------------------------

    def say(self, what: str | Event) -> None:
        """One more line of the trace."""
        self._trace.append((self.engine.now_us() - BEGIN_US, what))

    @property
    def trace(self) -> list[str]:
        """What happened lately, a line each."""
        said = ((at_us, what if isinstance(what, str) else brief(what)) for at_us, what in self._trace)
        return [f"{at_us / US_PER_S:10.3f} s  {what}" for at_us, what in said]

    def play(self, steps: int | None = None) -> None:
        """To the end, or for so many steps."""
        at_us, in_vain, before = -1, 0, (-1, -1)
        while steps is None or self.steps < steps:
            assert self.steps < STEPS_MAX, f"no end after {STEPS_MAX} steps"
            self.steps += 1
            wake_us = self._turn()
            done = (self.events, len(self._asked))
            in_vain = in_vain + 1 if (self.engine.now_us(), done) == (at_us, before) else 0
            at_us, before = self.engine.now_us(), done
            assert in_vain < IN_VAIN, f"the wake-up at {wake_us}, now {at_us}, lies in the past for ever"
            if self._asked or self.control is None:
                wake_us = at_us + RETRY_US
            elif wake_us is not None:
                wake_us = max(at_us, wake_us - self.skew_us)
            if self.cluster.told:  # an answer came at once, or has to come again
                wake_us = at_us if self.calm else min(wake_us or at_us + RETRY_US, at_us + RETRY_US)
            if self.calm and not self._open():
                break
            following = [each for each in (wake_us, self.engine.next_us()) if each is not None]
            if not following:
                break
            self.engine.advance(max(at_us, min(following)))
        if steps is None:
            self._end()

    def committed(self, events: Sequence[Event], marks: Iterable[tuple[str, int]]) -> None:
        """The store has them: so they have happened."""
        for event in events:
            self.events += 1
            self.say(event)
            self.invariants.take(event)
            self.shadow.apply(event)
        for source, seq in marks:
            assert seq > self.marks.get(source, 0), f"the mark of {source} goes from {self.marks.get(source)} to {seq}"
            self.marks[source] = seq

    def _turn(self) -> int | None:
        """One step of the server: what was asked of it, and a tick. It may not survive it."""
        try:
            if self.control is None:
                self._start()
            assert self.control is not None
            while self._asked:
                self._asked[0](self.control)
                self._asked.popleft()
            wake_us = self.control.tick()
        except StoreError as error:
            self.say(f"refused: {error.message}")
            self._check()
            return self.engine.now_us() + self.skew_us + RETRY_US
        except ServerDied as death:
            self.say(f"the server dies {death}")
            self.control = None
            self.deaths += 1
            return self.engine.now_us() + RETRY_US
        self._check()
        for attempt in self.control.state.attempts.values():
            due_us = attempt.limit_at_us if attempt.notice is None else attempt.notice.deadline_us
            if due_us is not None and attempt.kill is None and attempt.held:
                late = f"{attempt.job.job_id} is due at {due_us}, and the server sleeps until {wake_us}"
                assert wake_us is not None and wake_us <= due_us, late
        return wake_us

    def _start(self) -> None:
        ports = _Ports(self)
        self.skew_us = self._rng.randint(-self.skew_us_max, self.skew_us_max) if not self.calm else self.skew_us
        self.cluster.server_restarts()
        control = Control(clock=ports, store=ports, executor=ports, policy=self.policy)
        assert control.state.snapshot() == self.shadow.snapshot(), "the log does not give the state back"
        self.control = control

    # -- what must hold --------------------------------------------------------------------------------------

    def _check(self) -> None:
        """After each step."""
        control = self.control
        if control is None:
            return
        assert not control.errors, f"a decision failed: {control.errors!r}"
        assert self.accepted <= control.state.jobs.keys(), "an accepted job is lost"
        if self._checked == (control, control.number):
            return
        self._checked = (control, control.number)
        self.invariants.of_state(control.state)
        before = control.state.snapshot()
        assert before == self.shadow.snapshot(), "the state is not what was committed"
        control.state.idle = None  # as if it had not decided yet
        decide(control.state, max(self.engine.now_us() + self.skew_us, self.invariants.at_us or 0))
        assert control.state.snapshot() == before, "decide() left a trace"
        if self.steps % 8 == 0:
            self.invariants.of_ledger(control.ledger, self.engine.now_us())

    def _open(self) -> list[JobId]:
        """Jobs that have not ended."""
        return [job.job_id for job, _ in self.jobs if job.job_id not in self.invariants.ended]

    def _end(self) -> None:
        """Everything that can run has run, and a new server knows the same."""
        assert self.control is not None and not self._asked, "the server did not come back"
        now_us = self.engine.now_us()
        self.invariants.of_ledger(self.control.ledger, now_us)
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
        """Whether it would be placed if it were alone on the nodes as they are."""
        alone, at_us = State(self.policy), self.engine.now_us()
        for each in self.invariants.nodes.values():
            if each.up and not each.reclaimed and not each.cordoned:
                alone.apply(NodeUp(at_us=at_us, node=each.node))
        if state.quotas.queues:
            alone.apply(QueuesSet(at_us=at_us, queues=state.quotas.queues))
        alone.apply(JobSubmitted(at_us=at_us, job=state.jobs[job_id].job, spec="{}"))
        return any(isinstance(event, AttemptPlaced) for event in decide(alone, at_us).events)


def brief(event: Event) -> str:
    """An event in one line."""
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

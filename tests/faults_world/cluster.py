"""The machines, the network and the server's executor of one world, with the faults that can be injected.

The executor, its claims, leases and inbox, and the agents are those of production. This module decides nothing.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cordee.control.agents.claims import Member
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.agents.leases import LeaseTerms
from cordee.control.engines.port import Death, Reclaim
from cordee.control.tick import Control
from cordee.events import Event, Node
from cordee.ids import JobId
from cordee.simulate.engine import Engine
from cordee.units import US_PER_S
from faults_world.machines import Machine, SimulatedClock
from faults_world.network import MessageFaults, Network, Server
from faults_world.ranks import Key, Ranks

LOOK_US_MIN = US_PER_S // 2
CALM_LOOK_US, CALM_DIAL_US = 300 * US_PER_S, 20 * US_PER_S
AGENT_AWAY_S_MAX = 20
"""A dead agent is started again within this time, before its lease is over (docs/decisions/0013)."""


@dataclass(frozen=True, slots=True)
class CalmTerms(LeaseTerms):
    """Terms for the time after the faults: few beats, so that a day costs little."""

    lease_s: float = 1500.0

    @property
    def beat_s(self) -> float:
        """The time between two beats."""
        return 300.0

    @property
    def unreachable_s(self) -> float:
        """After this silence nothing new is placed on the node."""
        return 1000.0


class Condition(threading.Condition):
    """A condition for which one waits in simulated time: the world goes on meanwhile."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:  # type: ignore[override]
        """Let the world go on until the predicate holds or the time is over."""
        engine, assert_s = self._engine, timeout
        assert assert_s is not None, "nobody waits for ever"
        until_us = engine.now_us() + round(assert_s * US_PER_S)
        while not predicate():
            next_us = engine.next_us()
            if next_us is None or next_us > until_us:
                engine.advance(until_us)
                return bool(predicate())
            engine.advance(next_us)
        return True


class CommittedEvents:
    """The executor's view of the log (`control/agents/committed.py` has the one over a database)."""

    def __init__(self, ranks: Ranks, marks: Callable[[Sequence[str]], Mapping[str, int]]) -> None:
        self.control: Control | None = None
        self.marks = marks
        self._ranks = ranks

    def leased(self, job_id: str, epoch: int) -> Sequence[str]:
        """Return the nodes of an attempt in the order of its leases."""
        placed = self._ranks.placed.get((JobId(job_id), epoch))
        return [lease.node for lease in placed.leases] if placed else []

    def held(self, job_id: str, epoch: int) -> Sequence[str]:
        """Return the nodes on which an attempt's ranks have not ended."""
        attempt = self._control.state.attempts.get(JobId(job_id))
        return [lease.node for lease in attempt.held] if attempt and attempt.epoch == epoch else []

    def held_on(self, node: str) -> Sequence[tuple[str, int]]:
        """Return the attempts whose ranks on a node have not ended."""
        attempts = self._control.state.attempts.items()
        return [(job_id, each.epoch) for job_id, each in attempts if any(lease.node == node for lease in each.held)]

    def secrets(self, job_id: str, names: Sequence[str]) -> dict[str, str]:
        """Return none."""
        return {}

    def members(self) -> Iterator[Member]:
        """Yield the nodes of the log."""
        for record in self._control.state.nodes.records.values():
            node, reachable = record.node, not record.unreachable
            yield Member(node.name, epoch=node.epoch, up=record.up, machine=node.machine, reachable=reachable)

    @property
    def _control(self) -> Control:
        assert self.control is not None, "the server has begun"
        return self.control


@dataclass(slots=True)
class MachinesEngine:
    """An engine (`control/engines/port.py`) that knows which machines are off and which agents are dead."""

    machines: Mapping[str, Machine]

    def start(self, on_change: Callable[[], None], is_connected: Callable[[str], bool]) -> None:
        """Begin."""

    def owns(self, node: str) -> bool:
        """Return True."""
        return True

    def ended(self) -> Sequence[Death]:
        """Return the nodes without an agent."""
        dead = [machine for machine in self.machines.values() if machine.agent is None]
        return [Death(each.name, "its agent is dead", ranks_gone=not each.power) for each in dead]

    def reclaims(self) -> Sequence[Reclaim]:
        """Return what the cloud has announced."""
        found = [(machine.name, machine.reclaim_us) for machine in self.machines.values() if machine.power]
        return [Reclaim(name, deadline_us) for name, deadline_us in found if deadline_us is not None]

    def want(self, gpus: int) -> None:
        """Do nothing."""

    def missing(self) -> str:
        """Return nothing."""
        return ""

    def retire(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Cluster:
    """Everything outside of the control plane.

    Attributes:
        machines: by node.
        ranks: those that run.
        faults: of messages.
        terms: of the leases that the next server grants.
    """

    def __init__(
        self,
        engine: Engine,
        nodes: Iterable[Node],
        rng: random.Random,
        faults: MessageFaults,
        folder: Path,
        note: Callable[[str], None],
        skew_s_max: float,
    ) -> None:
        self._engine, self._rng = engine, rng
        self.faults = faults
        self.terms = LeaseTerms()
        self.network = Network(engine, rng, faults)
        self.network.troubled = self._troubled
        self.ranks = Ranks(engine, self._report, self._leave, lambda: rng.randrange(2 * US_PER_S))
        self.machines: dict[str, Machine] = {}
        for node in nodes:
            clock = SimulatedClock(engine, round(rng.uniform(-skew_s_max, skew_s_max) * US_PER_S))
            self.machines[node.name] = Machine(node, folder / node.name, self.network, rng, self.ranks, clock, note)
        self._has_engine = rng.random() < 0.5
        self._confirm_s = rng.choice((0.0, 2.0, 2.0))

    # -- the server ------------------------------------------------------------------------------------------

    def server_starts(self, log: CommittedEvents, skew_us: int, wake: Callable[[], None]) -> AgentsExecutor:
        """Make the executor of a new server, which is not open yet."""
        return AgentsExecutor(
            log=log,
            node_of=lambda token: None,
            engines=[MachinesEngine(self.machines)] if self._has_engine else [],
            terms=self.terms,
            wake=wake,
            confirm_s=self._confirm_s,
            clock=SimulatedClock(self._engine, skew_us),
            changed=Condition(self._engine),
        )

    def server_opens(self, log: CommittedEvents, executor: AgentsExecutor) -> None:
        """Let agents in."""
        executor.nodes.know(log.members())
        executor.begin()
        self.network.server = server = Server(executor)
        self._engine.at(self._engine.now_us(), self._look, server, self._engine.now_us())

    def server_dies(self) -> None:
        """Close what the server's process had open."""
        server = self.network.server
        if server is not None and server.alive:
            server.alive = False
            self.network.server_ended(server)

    def freeze(self, for_us: int) -> bool:
        """Stop the server's process for a time; return whether it ran."""
        server = self.network.server
        if server is None or not server.alive or server.frozen:
            return False
        server.frozen = True
        self._engine.at(self._engine.now_us() + for_us, self.thaw, server)
        return True

    def thaw(self, server: Server) -> None:
        """Let the server's process go on."""
        server.frozen = False
        self.network.flush()

    @property
    def server_runs(self) -> bool:
        """Return whether a server's process runs."""
        return self.network.server is not None and self.network.server.alive and not self.network.server.frozen

    def _look(self, server: Server, before_us: int) -> None:
        if not server.alive:
            return
        now_us = self._engine.now_us()
        wait_us = LOOK_US_MIN
        if not server.frozen:
            calm = isinstance(self.terms, CalmTerms)  # it is looked rarely then, and the server has not stood still
            wait_us = max(
                wait_us, round(server.executor.watch.look((now_us if calm else before_us) / US_PER_S) * US_PER_S)
            )
            before_us = now_us
            wait_us = CALM_LOOK_US if calm else wait_us
        self._engine.at(now_us + wait_us, self._look, server, before_us)

    # -- ranks -----------------------------------------------------------------------------------------------

    def _report(self, node: str, key: Key, event: Event) -> None:
        self.machines[node].table.report(key, event)

    def _leave(self, node: str, key: Key, exit_code: int) -> None:
        self.machines[node].table.leave(key, exit_code)

    def _troubled(self, node: str) -> None:
        machine = self.machines[node]
        machine.unproven_us = machine.troubled_us = self._engine.now_us()

    # -- faults ----------------------------------------------------------------------------------------------

    def agent_dies(self, name: str, back_us: int) -> bool:
        """Kill the agent, not its ranks; return whether there was one."""
        machine = self.machines[name]
        if machine.agent is None or machine.connection is None:
            return False
        machine.connection.close()
        machine.kill_agent()
        self._engine.at(self._engine.now_us() + back_us, machine.start_agent)
        return True

    def machine_dies(self, name: str, back_us: int | None, *, disk: bool = False) -> bool:
        """Cut the power; the machine comes back with an empty disk, or with `disk` with its own."""
        machine = self.machines[name]
        if not machine.power:
            return False
        machine.power_off(disk=disk)
        if back_us is not None:
            self._engine.at(self._engine.now_us() + back_us, machine.power_on)
        return True

    def cut(self, name: str, directions: Iterable[str], for_us: int) -> bool:
        """Cut a node off in these directions; return whether it was not."""
        if self.network.cuts.get(name):
            return False
        self.network.cuts[name] = set(directions)
        self._troubled(name)
        self._engine.at(self._engine.now_us() + for_us, self._heal, name)
        return True

    def _heal(self, name: str) -> None:
        if self.network.cuts.get(name):
            self._troubled(name)
            self.network.heal(name)

    def fill(self, name: str, for_us: int) -> bool:
        """Let the disk of a machine take nothing more for a time."""
        machine = self.machines[name]
        if machine.full or not machine.power:
            return False
        machine.full = True
        self._engine.at(self._engine.now_us() + for_us, self._empty, machine)
        return True

    def _empty(self, machine: Machine) -> None:
        machine.full = False

    def close(self) -> None:
        """Close what the agents have open."""
        for machine in self.machines.values():
            machine.kill_agent()

    def calm(self) -> None:
        """Stop every fault that lasts."""
        for machine in self.machines.values():
            machine.full = False
            self._heal(machine.name)
        self.faults.lost = self.faults.late = self.faults.doubled = 0.0
        if self.network.server is not None:
            self.thaw(self.network.server)
        self.terms, self.network.dial_us = CalmTerms(), CALM_DIAL_US

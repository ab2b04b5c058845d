"""An Executor over a network and machines that fail: messages are lost, delayed and doubled, agents and machines die.

Agents keep on disk what real ones keep (orders, tombstones, streams) and obey as they do. Membership is what the
executor knows for certain of nodes: which are silent, gone, or have outlived their lease. faults.py injects the faults;
this module decides nothing.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cordee.control.ports import Command, Pending, Report
from cordee.events import (
    AttemptPlaced,
    Event,
    KillOrdered,
    Node,
    NodeDown,
    NodeReclaimed,
    NodeUp,
    NoticeGiven,
    Outcome,
    RanksEnded,
    RanksStarted,
)
from cordee.simulate.engine import Engine
from cordee.units import US_PER_S
from faults_world.ranks import Key, Ranks

LEASE_US = 40 * US_PER_S
"""An agent that has no contact for this long ends its ranks."""

SILENT_US = 10 * US_PER_S
"""A node without contact for this long is reported down."""

RETRY_US = 5 * US_PER_S

TRIES = 20
"""A command that was sent to a machine this often waits `RETRY_US` before it is sent again: retries would otherwise
multiply in a world whose messages are late and whose store refuses."""


@dataclass(slots=True, kw_only=True)
class Network:
    """The probabilities of faults of a message, each independent; all zero is a network that works."""

    lost: float = 0.0
    late: float = 0.0
    doubled: float = 0.0
    late_us_max: int = 20 * US_PER_S


@dataclass(slots=True)
class Machine:
    """A node: its agent, and the agent's disk. `connection` grows with each new one: what was under way is lost."""

    node: Node
    agent: bool = False  # runs
    power: bool = False
    linked: bool = True
    connection: int = 0
    reclaim_us: int | None = None
    orders: dict[Key, AttemptPlaced] = field(default_factory=dict)
    tombstones: dict[Key, str] = field(default_factory=dict)
    ended: set[Key] = field(default_factory=set)  # its end is in a stream, or membership has reported it
    streams: dict[str, list[Event]] = field(default_factory=dict)  # of this disk; a rank's, or an agent's
    acknowledged: dict[str, int] = field(default_factory=dict)

    @property
    def reachable(self) -> bool:
        """Return whether messages come through."""
        return self.agent and self.linked


class HostileCluster:
    """The Executor port over machines that fail."""

    def __init__(
        self,
        engine: Engine,
        nodes: Iterable[Node],
        rng: random.Random,
        network: Network,
        delays_us: Mapping[str, int] | None = None,
    ) -> None:
        """Bring all nodes up now, or after a delay of their own."""
        self._engine, self._rng, self.network = engine, rng, network
        self.jitter_us = 2 * US_PER_S
        self.ranks = Ranks(engine, self._rank_reported, self._rank_group_ended, self._jitter_us)
        self.machines = {node.name: Machine(replace(node, epoch=node.epoch - 1)) for node in nodes}
        self._membership: dict[str, list[Event]] = {}  # streams that outlive machines
        self._acknowledged: dict[str, int] = {}
        self._lost: set[tuple[Key, str]] = set()  # rank groups that membership has reported as lost
        self._confirmed: set[tuple[int, str]] = set()  # known to this server only
        self._tries: dict[tuple[int, str], tuple[int, int]] = {}  # how often, and when last
        self._waking_us = 0  # there is an action at this time
        self._placed: dict[Key, AttemptPlaced] = {}
        for name in self.machines:
            engine.at(engine.now_us() + (delays_us or {}).get(name, 0), self.power_on, name)

    # -- the port --------------------------------------------------------------------------------------------

    def reports(self) -> Sequence[Report]:
        """Return records after the acknowledged ones from each stream that comes through, some of them again."""
        streams = self._streams()
        found: list[Report] = []
        self._rng.shuffle(streams)
        for name, reported, seen in streams:
            until = len(reported)
            if until > seen and self._happens(self.network.late):
                until = self._rng.randint(seen, until - 1)
                self._wake(self._late_us())
            begin = max(0, seen - 2) if self._happens(self.network.doubled) else seen
            found += [Report(source=name, seq=seq, event=reported[seq - 1]) for seq in range(begin + 1, until + 1)]
        return found

    def acknowledge(self, source: str, seq: int) -> None:
        """Acknowledge records; if that gets lost, they come again."""
        if self._happens(self.network.lost):
            self._wake(RETRY_US)
            return
        if source in self._membership:
            self._acknowledged[source] = max(seq, self._acknowledged.get(source, 0))
        for machine in self.machines.values():
            if source in machine.streams and machine.reachable:
                machine.acknowledged[source] = max(seq, machine.acknowledged.get(source, 0))

    def carry_out(self, pending: Pending) -> bool:
        """Send a command to every machine of the attempt that has not confirmed it."""
        command = pending.command
        key = (command.job_id, command.epoch)
        if isinstance(command, AttemptPlaced):
            self._placed[key] = command
        placed = self._placed.get(key)
        names = sorted(lease.node for lease in placed.leases) if placed else sorted(self.machines)
        for name in names:
            if (pending.number, name) not in self._confirmed and self._may_try((pending.number, name)):
                self._send(name, pending.number, command)
        done = all((pending.number, name) in self._confirmed for name in names)
        if not done:
            self._wake(RETRY_US)
        return done

    def _may_try(self, what: tuple[int, str]) -> bool:
        tries, last_us = self._tries.get(what, (0, 0))
        if tries >= TRIES and self._now_us() < last_us + RETRY_US:
            return False
        self._tries[what] = (tries + 1, self._now_us())
        return True

    def server_restarts(self) -> None:
        """Forget what the connections and the memory of the server held."""
        self._confirmed.clear()
        for machine in self.machines.values():
            machine.connection += 1

    @property
    def has_reports(self) -> bool:
        """Return whether a stream that comes through has records that are not acknowledged."""
        return any(len(reported) > seen for _, reported, seen in self._streams())

    def _streams(self) -> list[tuple[str, list[Event], int]]:
        """Return the streams that come through, each with its name and the number of acknowledged records."""
        disks = [machine for machine in self.machines.values() if machine.reachable]
        known = [(each.streams, each.acknowledged) for each in disks] + [(self._membership, self._acknowledged)]
        return [(name, reported, seen.get(name, 0)) for streams, seen in known for name, reported in streams.items()]

    def _jitter_us(self) -> int:
        return self._rng.randrange(1 + self.jitter_us)

    # -- messages --------------------------------------------------------------------------------------------

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._rng.random() < chance

    def _late_us(self) -> int:
        return self._rng.randint(1, self.network.late_us_max)

    def _wake(self, wait_us: int) -> None:
        """Have the control plane tick after a time: the world ticks after each action of the engine."""
        if self._waking_us <= self._now_us():
            self._waking_us = self._now_us() + wait_us
            self._engine.at(self._waking_us, lambda: None)

    def _send(self, name: str, number: int, command: Command) -> None:
        machine, key = self.machines[name], (command.job_id, command.epoch)
        if (key, name) in self._lost:
            self._confirmed.add((number, name))  # its ranks are gone
            return
        if not machine.power and isinstance(command, AttemptPlaced):
            self._report_lost(name, key, "the machine is gone")
            self._confirmed.add((number, name))
            return
        if self._happens(self.network.late):
            self._deliver_later(machine, number, command)
        elif not self._happens(self.network.lost):
            self._deliver(machine, machine.connection, number, command)
        if self._happens(self.network.doubled):
            self._deliver_later(machine, number, command)

    def _deliver_later(self, machine: Machine, number: int, command: Command) -> None:
        at_us = self._engine.now_us() + self._late_us()
        self._engine.at(at_us, self._deliver, machine, machine.connection, number, command)

    def _deliver(self, machine: Machine, connection: int, number: int, command: Command) -> None:
        if not machine.reachable or machine.connection != connection:
            return
        self._obey(machine, command)
        if not self._happens(self.network.lost):
            self._confirmed.add((number, machine.node.name))

    # -- agents ----------------------------------------------------------------------------------------------

    def _obey(self, machine: Machine, command: Command) -> None:
        """Obey as agent/agent.py does: every command is idempotent by (job, epoch) and kind."""
        key, name = (command.job_id, command.epoch), machine.node.name
        if isinstance(command, AttemptPlaced):
            if key in machine.orders:
                return
            machine.orders[key] = command
            if key in machine.tombstones:
                self._report_end(machine, key, Outcome.KILLED, "it was killed before it started")
                return
            self.ranks.start(name, command)
            job_id, epoch = key
            self._report(machine, RanksStarted(at_us=self._now_us(), job_id=job_id, epoch=epoch, node=name))
        elif isinstance(command, NoticeGiven):
            if key in machine.orders:
                self.ranks.notify(key)
        elif isinstance(command, KillOrdered):
            if key not in machine.orders:
                machine.tombstones.setdefault(key, command.why)
            elif key not in machine.ended:
                at_us = self._now_us() + self._jitter_us()
                self._engine.at(at_us, self.ranks.end, name, key, Outcome.KILLED, command.why)

    def _rank_group_ended(self, name: str, key: Key, outcome: Outcome, why: str) -> None:
        """Report the end of a rank group, if the agent runs; else a later agent reports it as lost."""
        machine = self.machines[name]
        if machine.agent:
            self._report_end(machine, key, outcome, why)

    def _report_end(self, machine: Machine, key: Key, outcome: Outcome, why: str) -> None:
        machine.ended.add(key)
        self._report(machine, self._ranks_ended(machine.node.name, key, outcome, why))

    def _ranks_ended(self, name: str, key: Key, outcome: Outcome, why: str) -> RanksEnded:
        return RanksEnded(at_us=self._now_us(), job_id=key[0], epoch=key[1], node=name, outcome=outcome, why=why)

    def _report(self, machine: Machine, event: Event) -> None:
        machine.streams.setdefault(f"node/{machine.node.name}/{machine.node.epoch}", []).append(event)

    def _rank_reported(self, name: str, stream: str, event: Event) -> None:
        self.machines[name].streams.setdefault(stream, []).append(event)

    def _now_us(self) -> int:
        return self._engine.now_us()

    # -- what is known for certain ---------------------------------------------------------------------------

    def report_membership(self, stream: str, event: Event) -> None:
        """Add a record to a stream that outlives machines."""
        self._membership.setdefault(stream, []).append(event)

    def _report_lost(self, name: str, key: Key, why: str) -> None:
        """Report a rank group as lost for good; its machine gets no more commands about it."""
        if (key, name) not in self._lost:
            self._lost.add((key, name))
            self.report_membership(f"members/{name}", self._ranks_ended(name, key, Outcome.LOST, why))

    def _is_down(self, name: str, why: str) -> None:
        down = NodeDown(at_us=self._now_us(), node=name, epoch=self.machines[name].node.epoch, why=why)
        self.report_membership(f"members/{name}", down)

    # -- faults ----------------------------------------------------------------------------------------------

    def power_on(self, name: str) -> None:
        """Bring a machine up, with an agent that claims it."""
        machine = self.machines[name]
        if not machine.power:
            machine.power = True
            self.agent_up(name)

    def agent_up(self, name: str) -> None:
        """Start an agent: it ends the ranks of the one before it, and claims the node."""
        machine = self.machines[name]
        if machine.agent or not machine.power:
            return
        machine.agent = True
        machine.connection += 1
        machine.node = replace(machine.node, epoch=machine.node.epoch + 1)
        for key in list(machine.orders):
            if key not in machine.ended:
                gang = self.ranks.gangs.get(key)
                if gang is not None and name in gang.running:
                    self.ranks.end(name, key, Outcome.LOST, "its agent died")
                else:
                    self._report_end(machine, key, Outcome.LOST, "its agent died")
        self._report(machine, NodeUp(at_us=self._now_us(), node=machine.node))
        if machine.reclaim_us is not None:
            self.announce(name, machine.reclaim_us)

    def agent_dies(self, name: str, back_us: int) -> bool:
        """Kill the agent, not its ranks; return whether there was one."""
        machine = self.machines[name]
        if not machine.reachable:
            return False
        machine.agent = False
        machine.connection += 1
        self._is_down(name, "its agent is gone")
        self._engine.at(self._now_us() + back_us, self.agent_up, name)
        return True

    def rank_dies(self, name: str, which: int) -> bool:
        """Kill a rank, which ends its rank group; return whether there was one."""
        keys = self.ranks.of_node(name)
        if keys and self.machines[name].agent:
            self.ranks.end(name, keys[which % len(keys)], Outcome.LOST, "a rank was killed")
            return True
        return False

    def machine_dies(self, name: str, back_us: int | None, *, disk: bool = False) -> bool:
        """Cut the power; the machine comes back with an empty disk, or with `disk` with its own."""
        machine = self.machines[name]
        if not machine.power or not machine.linked:
            return False
        machine.power = machine.agent = False
        machine.connection += 1
        machine.reclaim_us = None
        for key in self.ranks.of_node(name):
            self.ranks.end(name, key, Outcome.LOST, "")
        self._is_down(name, "the machine is gone")
        if not disk:
            for key in machine.orders:
                if key not in machine.ended or self._is_unheard(machine, key):
                    self._report_lost(name, key, "the machine is gone")
            self.machines[name] = Machine(machine.node, connection=machine.connection)
        if back_us is not None:
            self._engine.at(self._now_us() + back_us, self.power_on, name)
        return True

    def _is_unheard(self, machine: Machine, key: Key) -> bool:
        """Return whether the end of the rank group may be in a stream that is lost with the disk."""
        return any(
            isinstance(event, RanksEnded) and (event.job_id, event.epoch) == key
            for name, reported in machine.streams.items()
            for event in reported[machine.acknowledged.get(name, 0) :]
        )

    def announce(self, name: str, deadline_us: int) -> None:
        """Give the node the cloud's notice of a reclaim."""
        machine = self.machines[name]
        machine.reclaim_us = deadline_us
        epoch = machine.node.epoch
        self._report(machine, NodeReclaimed(at_us=self._now_us(), node=name, epoch=epoch, deadline_us=deadline_us))

    def cut(self, name: str, for_us: int) -> bool:
        """Cut a node off; it is reported down, and after its lease its ranks are gone."""
        machine = self.machines[name]
        if not machine.reachable:
            return False
        machine.linked = False
        machine.connection += 1
        self._engine.at(self._now_us() + for_us, self._heal, machine)
        steps = ((SILENT_US, self._silent), (LEASE_US, self._lease_ends), (LEASE_US + US_PER_S, self._gone))
        for after_us, action in steps:
            if after_us < for_us:
                self._engine.at(self._now_us() + after_us, action, machine)
        return True

    def _heal(self, machine: Machine) -> None:
        machine.linked = True
        machine.connection += 1
        # In the stream that reported it down, and so after that.
        self.report_membership(f"members/{machine.node.name}", NodeUp(at_us=self._now_us(), node=machine.node))
        if machine.reclaim_us is not None:
            self.announce(machine.node.name, machine.reclaim_us)

    def _silent(self, machine: Machine) -> None:
        self._is_down(machine.node.name, "silent")

    def _lease_ends(self, machine: Machine) -> None:
        for key in self.ranks.of_node(machine.node.name):
            self.ranks.end(machine.node.name, key, Outcome.LOST, "the lease of its node ran out")

    def _gone(self, machine: Machine) -> None:
        for key, placed in self._placed.items():
            if any(lease.node == machine.node.name for lease in placed.leases) and key not in machine.ended:
                self._report_lost(machine.node.name, key, "the lease of its node ran out")

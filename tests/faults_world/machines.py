"""A machine: a real `NodeAgent` on a real folder, over simulated time and a table of simulated processes.

The agent is killed with what it has in memory; its folder stays, and so do the ranks. A machine that loses its power
loses its ranks too, and maybe its folder. A full disk is a limit on the size of files while the agent runs.
"""

import math
import random
import resource
import shutil
import signal
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from cordee.agent.agent import NodeAgent
from cordee.agent.clock import Clock, MachineClock
from cordee.agent.copies import Copied
from cordee.agent.facts import Facts
from cordee.agent.gpus import Devices
from cordee.agent.prefetches import Prefetches
from cordee.agent.process import Process
from cordee.agent.settings import AgentSettings
from cordee.agent.transfers import Transfers
from cordee.agent.tunnels import Tunnels
from cordee.events import Event, Node
from cordee.ids import JobId
from cordee.simulate.engine import Engine
from cordee.telemetry.stream import StreamWriter
from cordee.units import US_PER_S
from faults_world.network import Connection, Network
from faults_world.ranks import Key, Ranks

RESTART_US = 2 * US_PER_S
"""After this time an agent that has ended is started again, as by the system's init."""

_TIMES = ("at_us", "from_us", "since_us")


class SimulatedClock(MachineClock):
    """The clocks of a machine in simulated time; `skew_us` is the error of the one that tells the time of day."""

    def __init__(self, engine: Engine, skew_us: int = 0) -> None:
        self.skew_us = skew_us
        self._engine = engine

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch."""
        return self._engine.now_us() + self.skew_us

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return self._engine.now_us() / US_PER_S

    def sleep(self, seconds: float) -> None:
        """Return at once: a signal has its effect at once here."""


@dataclass(slots=True)
class _Process:
    """A simulated process, which is its own Popen."""

    pid: int
    key: Key
    env: Mapping[str, str]
    parent: object  # the agent that started it
    returncode: int | None = None
    running: bool = True

    @property
    def process(self) -> Process:
        return Process(self.pid, float(self.pid))


class ProcessTable:
    """The processes of one machine; implements `cordee.agent.process.Processes` for its agents."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._entries: dict[int, _Process] = {}
        self._exits: list[tuple[int, int]] = []
        self._spools: dict[Key, StreamWriter] = {}
        self._last_pid = 1

    # -- for the agent ---------------------------------------------------------------------------------------

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, output: int) -> _Process:
        """Start a process; the first of a rank group starts the group in the world."""
        machine = self._machine
        key = (JobId(env["CORDEE_JOB"]), int(env["CORDEE_EPOCH"]))
        self._last_pid += 1
        if not self._of(key):
            machine.ranks.start(machine.name, key)
        entry = self._entries[self._last_pid] = _Process(self._last_pid, key, env, machine.agent)
        return entry

    def reap(self) -> list[tuple[int, int]]:
        """Return the pids and exit codes of children that have exited."""
        found, self._exits = self._exits, []
        return found

    def find(self, tag: str, known: Iterable[Process] = (), *, node: str | None = None) -> set[Process]:
        """Return the running processes of an attempt."""
        return {
            each.process
            for each in self._entries.values()
            if each.env["CORDEE_ATTEMPT"] == tag and each.env["CORDEE_NODE"] == (node or each.env["CORDEE_NODE"])
        }

    def identify(self, pid: int) -> Process | None:
        """Return the process with this pid."""
        entry = self._entries.get(pid)
        return entry.process if entry else None

    def has(self, process: Process, name: str) -> bool:
        """Return False: none is an uploader."""
        return False

    def worked(self, process: Process) -> float:
        """Return no processor time."""
        return 0.0

    def send(self, process: Process, number: signal.Signals) -> bool:
        """Signal a process."""
        entry = self._entries.get(process.pid)
        if entry is None:
            return False
        if number == signal.SIGKILL:
            self._machine.killed(entry.key)
            self._exit(entry, -signal.SIGKILL)
        else:
            self._machine.ranks.notify(entry.key)
        return True

    def notice_targets(self, pid: int) -> set[Process]:
        """Return the process itself."""
        entry = self._entries.get(pid)
        return {entry.process} if entry else set()

    # -- for the world ---------------------------------------------------------------------------------------

    def leave(self, key: Key, exit_code: int) -> None:
        """Let every process of a rank group exit by itself."""
        for entry in self._of(key):
            self._exit(entry, exit_code)

    def kill(self, which: int) -> bool:
        """Kill one process from outside; return whether there was one."""
        entries = list(self._entries.values())
        if entries:
            self._exit(entries[which % len(entries)], -signal.SIGKILL)
        return bool(entries)

    def clear(self) -> None:
        """End everything at once, since the machine is off."""
        for entry in list(self._entries.values()):
            self._exit(entry, -signal.SIGKILL)
        self._exits.clear()

    def orphan(self) -> None:
        """Forget exits that nobody has reaped, since their parent has died."""
        self._exits.clear()

    def report(self, key: Key, event: Event) -> None:
        """Write a report of rank 0 into its spool, by the clock of this machine."""
        skew_us = self._machine.clock.skew_us
        times = {name: getattr(event, name) + skew_us for name in _TIMES if hasattr(event, name)}
        with self._machine.disk():
            try:
                if key not in self._spools:
                    folder = Path(self._of(key)[0].env["CORDEE_SPOOL"])
                    self._spools[key] = StreamWriter(folder / "rank0.jsonl")
                self._spools[key].append(replace(event, **times))
            except OSError:
                pass  # the disk is full: the rank goes on without the report

    def _of(self, key: Key) -> list[_Process]:
        return [each for each in self._entries.values() if each.key == key]

    def _exit(self, entry: _Process, exit_code: int) -> None:
        del self._entries[entry.pid]
        machine = self._machine
        if entry.parent is machine.agent and machine.agent is not None:
            self._exits.append((entry.pid, exit_code))
            machine.wake()
        if exit_code < 0:
            machine.ranks.hang(entry.key)
        if not self._of(entry.key):
            spool = self._spools.pop(entry.key, None)
            if spool is not None:
                spool.close()
            machine.ranks.gone(machine.name, entry.key)


class KnownFacts(Facts):
    """The facts of a node as the world drew them."""

    def __init__(self, node: Node) -> None:
        self.devices = Devices(node.gpu_name, node.gpus, "of this world")
        self.data, self.gives_at = (), ""
        self.problem = ""
        self._drawn = node
        self._reported: Node | None = None

    def learn(self, cloud: Mapping[str, str]) -> None:
        """Learn nothing."""

    def changed(self, epoch: int, ours: Container[int]) -> Node | None:
        """Return the node if it is new or has changed."""
        node = replace(self._drawn, epoch=epoch)
        if self.problem:
            node = replace(node, unavailable=tuple(range(node.gpus)), unavailable_why=(self.problem,) * node.gpus)
        before, self._reported = self._reported, node
        return None if before == self._reported else self._reported


class _NoCopies:
    def make(self, order: object, folder: Path) -> None: ...

    def made(self) -> list[Copied]:
        return []

    def remove(self, tag: str, folder: Path) -> None: ...

    def close(self) -> None: ...


class NoTransfers(Transfers):
    """No copies of files, and no logs to ship: threads would carry them."""

    def __init__(self, folder: Path, settings: AgentSettings, wake: Callable[[], None]) -> None:
        self._shipper = None
        self.prefetches = Prefetches()
        self.gpu_files = ()
        self.copies = _NoCopies()  # type: ignore[assignment]
        self.tunnels = Tunnels(folder, "")  # nobody opens one


@dataclass(frozen=True, slots=True)
class Announced:
    """A notice of the cloud (`telemetry.cloud.Reclaim`) whose time left is simulated."""

    why: str
    deadline_us: int
    clock: SimulatedClock

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0, self.deadline_us - self.clock.now_us()) / US_PER_S


@dataclass(slots=True)
class Machine:
    """A node's machine.

    Attributes:
        agent: the running agent; None while there is none.
        power: whether the machine is on.
        full: whether its disk takes nothing more.
        reclaim_us: the time at which the cloud takes it; None if it has not said so.
        clock: its clocks.
        ranks: those of the whole world.
        lease_kills: number of rank groups that an agent killed since its lease had ended.
        unproven_us: when something last kept agent and server apart other than a refused connection.
        troubled_us: when anything did.
    """

    node: Node
    folder: Path
    network: Network
    rng: random.Random
    ranks: Ranks
    clock: SimulatedClock
    note: Callable[[str], None]
    agent: NodeAgent | None = None
    connection: Connection | None = None
    power: bool = False
    full: bool = False
    reclaim_us: int | None = None
    table: ProcessTable = field(init=False)
    lease_kills: int = 0
    unproven_us: int = 0
    troubled_us: int = 0
    _due_us: int = 0
    _number: int = 0

    def __post_init__(self) -> None:
        self.table = ProcessTable(self)
        self._new_disk()

    @property
    def name(self) -> str:
        """Return the node's name."""
        return self.node.name

    @property
    def engine(self) -> Engine:
        """Return the world's."""
        return self.network.engine

    # -- power, disk, agent ----------------------------------------------------------------------------------

    def power_on(self) -> None:
        """Bring the machine up, and its agent."""
        if not self.power:
            self.power = True
            self.start_agent()

    def power_off(self, *, disk: bool) -> None:
        """Cut the power; without `disk` its folder is gone too."""
        if self.connection is not None:
            self.connection.vanish()
        self.kill_agent()
        self.power, self.reclaim_us = False, None
        self.table.clear()
        if not disk:
            shutil.rmtree(self.folder)
            self._new_disk()

    def start_agent(self) -> None:
        """Start an agent on the machine's folder."""
        if not self.power or self.agent is not None:
            return
        self._number, self._due_us = self._number + 1, 0
        settings = AgentSettings(node=self.name, token="t", home=str(self.folder), address="10.0.0.1")

        def connect(_: Path, wake: Callable[[], None]) -> Connection:
            self.connection = Connection(self.name, self.network, self.wake)
            return self.connection

        folder = self.folder / "agent"
        clock = Clock(self.clock)
        self.agent = agent = NodeAgent(
            folder, settings, KnownFacts(self.node), connect, transfers=NoTransfers, clock=clock, processes=self.table
        )
        self._run(agent.begin)
        if self.reclaim_us is not None:
            self.announce(self.reclaim_us)

    def kill_agent(self) -> None:
        """Kill the agent; its ranks go on."""
        agent, self.agent = self.agent, None
        if agent is None:
            return
        self.table.orphan()
        agent.close()
        self.troubled_us = self.engine.now_us()

    def announce(self, deadline_us: int) -> None:
        """Give the machine the cloud's notice of a reclaim."""
        self.reclaim_us = deadline_us
        if self.agent is not None:
            announced = Announced("the cloud said so", deadline_us + self.clock.skew_us, self.clock)
            self._run(self.agent.reclaimed, announced)

    def killed(self, key: Key) -> None:
        """Note that the agent kills a rank group; without the server's word only at the end of its lease."""
        agent, now_us = self.agent, self.engine.now_us()
        if agent is None or not agent.lease.lapsed:
            return
        self.lease_kills += 1
        apart_s = (now_us - self.unproven_us) / US_PER_S
        assert apart_s <= agent.lease.lease_s, f"{key} is ended on {self.name}, where a server was only refused"

    def wake(self) -> None:
        """Let the agent's loop turn now."""
        self._at(self.engine.now_us())

    @contextmanager
    def disk(self) -> Iterator[None]:
        """Write to the machine's disk, which may be full."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            if self.full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def _new_disk(self) -> None:
        (self.folder / "agent").mkdir(parents=True)
        (self.folder / "agent" / "lock").touch()
        (self.folder / "agent" / "machine").write_text(f"{self.name}/{self.rng.randrange(2**32):08x}")

    # -- the agent's loop ------------------------------------------------------------------------------------

    def _at(self, at_us: int) -> None:
        if not self._due_us or at_us < self._due_us:
            self._due_us = at_us
            self.engine.at(at_us, self._turn, self._number, at_us)

    def _turn(self, number: int, at_us: int) -> None:
        if self.agent is None or number != self._number or at_us != self._due_us:
            return
        self._due_us = 0
        self._run(self.agent.step)

    def _run(self, call: Callable[..., object], *args: object) -> None:
        """Do something in the agent's process, which may end by that, and come back for its next turn.

        An error of the disk goes on to the world, and fails its seed: no agent may die of a full disk.
        """
        agent = self.agent
        assert agent is not None, "it runs"
        with self.disk():
            call(*args)
        if agent.ended:
            self.note(f"the agent of {self.name} ends")
            self._restart()
        elif agent.due_s != math.inf:
            self._at(max(self.engine.now_us() + 1, math.ceil(agent.due_s * US_PER_S)))

    def _restart(self) -> None:
        self.kill_agent()
        self.engine.at(self.engine.now_us() + RESTART_US, self.start_agent)

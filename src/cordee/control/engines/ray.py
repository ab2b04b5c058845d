"""The engine of a Ray cluster: Ray gives nodes, keeps their GPUs from its own jobs, and starts one agent on each.

Nothing that runs needs Ray: agents are daemons of their own, which dial the server. A node is dead to Ray when its
raylet does not answer; ranks may go on beside a dead raylet, so only the agent's lease decides that a node is down.
"""

import json
import logging
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cordee.agent.journal import write_json
from cordee.agent.settings import AgentSettings
from cordee.control.engines.port import Death, Reclaim

SILENT_S = 30.0  # a driver says something every second; Ray's calls wait while the head is away
RESTART_S, RESTART_S_MAX = 1.0, 15.0
START_AGAIN_S = 10.0  # between two tries to start the agent of one node
FOLDER = "~/.cordee/agents"
ARGS = ("-m", "cordee.agent.keeper", "--folder", "{folder}")

_log = logging.getLogger("cordee.control")


class DriverEndedError(Exception):
    """The driver's process has ended; the message is the last problem that it reported."""


class _DriverProcess:
    """The driver's process, and lines of JSON to and from it."""

    def __init__(self, address: str, namespace: str, log: Path) -> None:
        argv = [sys.executable, "-W", "ignore", "-m", "cordee.control.engines.ray_driver"]
        argv += ["--address", address, "--namespace", namespace]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd="/", start_new_session=True
            )
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._rest = b""
        self._problem = ""
        self._heard_s = time.monotonic()

    def send(self, command: dict[str, Any]) -> None:
        """Send a command; one that a dead driver misses is made again from the next one's facts."""
        try:
            self._in.write(json.dumps(command).encode() + b"\n")
            self._in.flush()
        except OSError:
            pass

    def facts(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the facts that arrive within a time.

        Raises:
            DriverEndedError: the process has ended, or was killed here because it was silent.
        """
        if not self._selector.select(timeout_s):
            if time.monotonic() - self._heard_s > SILENT_S:
                self._process.kill()
                self._problem = f"Ray has not answered for {SILENT_S:.0f} s"
            return []
        chunk = self._out.read()
        if not chunk:
            raise DriverEndedError(self._problem or f"its driver ended with exit code {self._process.wait()}")
        self._heard_s = time.monotonic()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        facts = [json.loads(line) for line in lines]
        self._problem = next((str(fact["problem"]) for fact in facts if "problem" in fact), self._problem)
        return facts

    def close(self, timeout_s: float = 5.0) -> None:
        """End the process; what it reserved and started stays."""
        try:
            self._in.close()
            self._process.wait(timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._selector.close()
        self._out.close()


@dataclass(slots=True)
class _Member:
    """A living node of the cluster that has the GPUs or slots which are asked for."""

    id: str
    name: str
    address: str
    amount: int
    labels: dict[str, str]
    drain_by_ms: int | None
    held: bool = False
    next_start_s: float = 0.0


class _KnownNodes:
    """The nodes that the engine ever started an agent on; a server that starts anew knows them before Ray answers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.names: set[str] = set(json.loads(path.read_text()) if path.exists() else ())

    def add(self, name: str) -> None:
        if name not in self.names:
            self.names.add(name)
            write_json(self._path, sorted(self.names))


class _Problems:
    """Problems, each of which is logged once until the cluster changes."""

    def __init__(self) -> None:
        self.last = ""
        self.logged: set[str] = set()

    def log(self, problem: str) -> None:
        self.last = problem
        if problem not in self.logged:
            self.logged.add(problem)
            _log.warning("%s", problem)


class RayEngine:
    """The nodes of a Ray cluster.

    Args:
        address: for `ray.init`: `auto`, HOST:PORT of the head, or ray://HOST:PORT.
        namespace: of the placement groups, and of the agents' folders: no other server's, and always the same.
        home: the server's, where the driver logs.
        settings: returns the settings of a node's agent, with a token of its own.
        slots: offer up to this many CPU slots of each node, in place of its GPUs.
    """

    def __init__(
        self,
        *,
        address: str,
        namespace: str,
        home: Path,
        settings: Callable[[str], AgentSettings],
        slots: int | None = None,
    ) -> None:
        self._settings, self._slots = settings, slots
        self._folder = f"{FOLDER}/{namespace}"
        self._on_change: Callable[[], None] = lambda: None
        self._is_connected: Callable[[str], bool] = lambda node: False
        self._known = _KnownNodes(home / "ray-nodes.json")
        self._spawn = partial(_DriverProcess, address, namespace, home / "ray-driver.log")
        self._driver: _DriverProcess | None = None
        self._members: dict[str, _Member] = {}  # by Ray's id
        self._problems = _Problems()
        self._want = self._asked = 0
        self._retired = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="cordee-ray", daemon=True)

    @property
    def _resource(self) -> str:
        return "GPU" if self._slots is None else "CPU"

    # -- the port -----------------------------------------------------------------------------------------------

    def start(self, on_change: Callable[[], None], is_connected: Callable[[str], bool]) -> None:
        """Begin to start agents."""
        self._on_change, self._is_connected = on_change, is_connected
        self._thread.start()

    def owns(self, node: str) -> bool:
        """Return whether the engine has ever started an agent of this node."""
        return node in self._known.names

    def ended(self) -> list[Death]:
        """Return the agents that exited as the server asked; otherwise no word of Ray's proves that one is dead."""
        if not self._retired:
            return []
        gone = [name for name in self._known.names if not self._is_connected(name)]
        return [Death(name, "it is given back to Ray", ranks_gone=True) for name in gone]

    def reclaims(self) -> list[Reclaim]:
        """Return the nodes that Ray drains by a deadline, as its autoscaler does before a spot node goes."""
        members = [member for member in self._members.values() if member.drain_by_ms]
        return [Reclaim(member.name, 1000 * (member.drain_by_ms or 0)) for member in members]

    def want(self, gpus: int) -> None:
        """Ask Ray's autoscaler for this number of further GPUs or slots."""
        self._want = gpus

    def spare_nodes(self) -> int:
        """Return 0: it is not known how far Ray's autoscaler goes."""
        return 0

    def missing(self) -> str:
        """Return the last problem."""
        return self._problems.last or f"no node of the cluster has a {self._resource}; --slots N offers CPU slots"

    def retire(self) -> None:
        """Start no more agents, and give the nodes back to Ray at the end."""
        self._retired = True

    def close(self) -> None:
        """Stop; agents go on, and their GPUs stay reserved unless the server shuts down."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._driver is not None:
            if self._retired:
                self._driver.send({"leave": True})
            self._driver.close()

    # -- the engine's thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        restart_s = RESTART_S
        while not self._stopped.is_set():
            try:
                self._driver = self._spawn()
                self._members, self._asked = {}, 0
                while not self._stopped.is_set():
                    for fact in self._driver.facts(1.0):
                        restart_s = RESTART_S if self._take(fact) else restart_s
                    self._tend(self._driver)
            except Exception as error:
                if isinstance(error, DriverEndedError | OSError):
                    self._problems.log(f"Ray's driver is started again: {error}")
                else:
                    _log.exception("Ray's driver is started again after an internal error")
                if self._driver is not None:
                    self._driver.close()
                self._stopped.wait(restart_s)
                restart_s = min(2 * restart_s, RESTART_S_MAX)

    def _take(self, fact: dict[str, Any]) -> bool:
        """Take a fact in; return whether it shows that Ray answers."""
        if "nodes" in fact:
            self._problems.logged.clear()
            self._meet(fact["nodes"])
            self._on_change()
        elif "gone" in fact and (member := self._members.get(fact["gone"]["id"])):
            _log.warning("Ray has lost node %s: %s", member.name, fact["gone"]["why"])
        elif "waiting" in fact and (member := self._members.get(fact["waiting"]["id"])):
            self._problems.log(
                f"node {member.name} waits until Ray's own jobs free its {member.amount} {self._resource}s"
            )
        elif "started" in fact and (member := self._members.get(fact["started"]["id"])):
            _log.info("the agent of %s runs: %s", member.name, fact["started"])
            if fact["started"]["nice"] > 0:
                self._problems.log(
                    f"the ranks of {member.name} run at nice {fact['started']['nice']}; "
                    "hint: start Ray there with RAY_worker_niceness=0"
                )
        elif "failed" in fact and (member := self._members.get(fact["failed"]["id"])):
            self._problems.log(f"node {member.name} has no agent: {fact['failed']['why']}")
        elif "warning" in fact:
            self._problems.log(fact["warning"])
        return "problem" not in fact

    def _meet(self, nodes: list[dict[str, Any]]) -> None:
        """Keep the living nodes that offer something; two of one name cannot be told apart."""
        offered = [node for node in nodes if node[f"{self._resource.lower()}s"] > 0]
        names = Counter(node_name(node["name"]) for node in offered)
        before, self._members = self._members, {}
        for node in offered:
            name = node_name(node["name"])
            if names[name] > 1:
                self._problems.log(f"Ray has {names[name]} nodes named {name}; hint: ray start --node-name NAME")
                continue
            member = _Member(
                id=node["id"],
                name=name,
                address=node["address"],
                amount=min(node[f"{self._resource.lower()}s"], self._slots or sys.maxsize),
                labels=node["labels"],
                drain_by_ms=node["drain_by_ms"],
            )
            if node["id"] in before:
                member.held, member.next_start_s = before[node["id"]].held, before[node["id"]].next_start_s
            self._members[node["id"]] = member

    def _tend(self, driver: _DriverProcess) -> None:
        """Reserve each member, start an agent where none is connected, and ask for what is missing."""
        if self._retired:
            return
        # Ray's request is for a whole cluster, and holds until the next one; nodes that are reserved stay without it.
        total = self._want and self._want + sum(member.amount for member in self._members.values())
        if total != self._asked:
            self._asked = total
            driver.send({"want": [{self._resource: 1}] * total})
        now_s = time.monotonic()
        for member in self._members.values():
            hold: dict[str, Any] = {"id": member.id, "resources": {self._resource: member.amount}}
            if self._is_connected(member.name):
                if not member.held:
                    driver.send({"hold": hold})
            elif now_s >= member.next_start_s:
                member.next_start_s = now_s + START_AGAIN_S
                self._known.add(member.name)
                settings = self._settings(member.name)
                slots = None if self._slots is None else member.amount
                config = asdict(replace(settings, labels=member.labels, slots=slots))
                start = {"folder": f"{self._folder}/{member.name}", "config": config, "args": ARGS}
                driver.send({"start": hold | start})
            member.held = True


def node_name(name: str) -> str:
    """Return Ray's name of a node as a name that a node may have here.

    >>> node_name("ip-10-0-0-7.ec2.internal")
    'ip-10-0-0-7.ec2.internal'
    """
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)

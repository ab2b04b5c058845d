"""The engine of a Slurm cluster: whole nodes as allocations, asked for while jobs wait and given back when idle.

A batch job of Slurm runs one agent, which joins the server with a token of one use. Slurm needs nothing else: no root,
no plugin, no shared folder. A node whose batch job Slurm has ended is dead for certain, with all its processes.
"""

import json
import logging
import math
import re
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from cordee.agent.journal import write_json
from cordee.control.engines.port import Death, Host
from cordee.errors import EngineError, InputError
from cordee.units import plural

LOOK_S = 2.0
IDLE_S = 300.0
UNUSED_S = 120.0
NOTICE_S = 120  # from Slurm's SIGTERM to an allocation's time limit
COMMAND_S = 30.0
# The agent is a step: at a preemption or a time limit Slurm sends SIGTERM to steps, but not to batch scripts.
# The folder outlives the allocation, so that reports which no server has heard go out with the next agent there.
_SCRIPT = """\
#!/bin/sh
folder="${{TMPDIR:-/tmp}}/{name}/$SLURMD_NODENAME"
mkdir -p "$folder" && chmod 700 "$folder" || exit 1
place="${{SLURM_TOPOLOGY_ADDR%"$SLURMD_NODENAME"}}"
place="${{place%.}}"
above="${{place%.*}}"
[ -z "$place" ] || set -- --label "rack=${{place##*.}}"
[ "$above" = "$place" ] || set -- "$@" --label "block=${{above##*.}}"
exec srun --overlap --ntasks=1 {command} --name "$SLURMD_NODENAME" --folder "$folder" "$@"
"""
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")
_RUNS = ("RUNNING", "COMPLETING", "STOPPED")
# Slurm has ended the processes of these. It has not heard from the node of a NODE_FAIL, whose ranks may go on, and
# knows nothing of a job that is not in the queue: there the node's lease decides.
_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")

_log = logging.getLogger("cordee.control")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """The nodes that are asked of Slurm; written as `slurm?partition=low&nodes=4`.

    Attributes:
        partition: the partition of the allocations; None: Slurm's default.
        nodes: allocations at once, at most.
        idle_s: a node that holds nothing for this long is given back.
        sbatch: further options of sbatch, such as `--account=a --time=12:00:00`.
    """

    partition: str | None = None
    nodes: int = 1
    idle_s: float = IDLE_S
    sbatch: str = ""

    @staticmethod
    def names(text: str) -> bool:
        """Return whether this is meant to be a request."""
        return text.partition("?")[0] == "slurm"

    @classmethod
    def parse(cls, text: str) -> "SlurmRequest":
        """Return the request that `str` wrote.

        >>> SlurmRequest.parse(str(SlurmRequest(partition="low", nodes=4))).nodes
        4

        Raises:
            InputError: a part is unknown or cannot be read.
        """
        given = dict(parse_qsl(text.partition("?")[2]))
        unknown = set(given) - {each.name for each in fields(cls)}
        if not cls.names(text) or unknown:
            raise InputError(f"{text!r} is no request to Slurm", hint="write --on slurm --partition P --nodes N")
        nodes = given.get("nodes", "1")
        if not (nodes.isdecimal() and int(nodes)):
            raise InputError(f"{nodes!r} is not a number of nodes", hint="write --nodes 4")
        return cls(
            partition=given.get("partition"),
            nodes=int(nodes),
            idle_s=float(given.get("idle_s", IDLE_S)),
            sbatch=given.get("sbatch", ""),
        )

    def __str__(self) -> str:
        given = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        return f"slurm?{urlencode(given)}" if given else "slurm"


class Allocation(NamedTuple):
    """A batch job of this engine, as Slurm shows it."""

    job_id: str
    state: str  # PENDING, RUNNING, TIMEOUT, ...
    node: str  # empty while it waits
    reason: str


class SlurmEngine:
    """The nodes that Slurm gives.

    Args:
        request: what is asked for.
        home: the server's; the engine's name for its batch jobs stands there, and its nodes' output.
        host: the server.
        slots: offer this many CPU slots of each node, in place of its GPUs.
    """

    def __init__(self, request: SlurmRequest, *, home: Path, host: Host, slots: int | None) -> None:
        self._request, self._home, self._host, self._slots = request, home, host, slots
        self._slurm = _Slurm(_name(home))
        self._gpus = slots or 0  # of one node
        self._fleet = _Fleet()
        self._want = 0
        self._first = True
        self._retired = False
        self._problem = ""  # Slurm's last error, else its reason why the first allocation waits
        self._stopped = threading.Event()
        self._poke = threading.Event()
        self._on_change: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._loop, name="cordee-slurm", daemon=True)

    # -- the port -----------------------------------------------------------------------------------------------

    def start(self, on_change: Callable[[], None], is_connected: Callable[[str], bool]) -> None:
        """Take over the allocations of an earlier server, and ask for a first node if there is none.

        Raises:
            EngineError: Slurm's commands are absent, no controller answers, or the partition has no GPUs.
        """
        self._on_change = on_change
        if self._slots is None:
            self._gpus = self._slurm.gpus(self._request.partition)
        self._look(self._slurm.allocations())
        self._thread.start()

    def owns(self, node: str) -> bool:
        """Return whether an allocation of the engine has, or had, this node."""
        return self._fleet.knows(node)

    def ended(self) -> list[Death]:
        """Return the nodes whose allocation has ended."""
        return self._fleet.deaths()

    def reclaims(self) -> tuple[()]:
        """Return nothing: Slurm tells the agents, by SIGTERM."""
        return ()

    def spare_nodes(self) -> int:
        """Return the number of further allocations that may be asked for."""
        return self._request.nodes - len(self._fleet.nodes())

    def missing(self) -> str:
        """Return what Slurm says of the allocations that wait."""
        return f"Slurm says: {self._problem}" if self._problem else f"its output is in {self._home / 'slurm'}"

    def retire(self) -> None:
        """Ask for nothing more; waiting allocations are cancelled, and the agents of the others exit by themselves."""
        self._retired = True
        self._poke.set()

    def close(self) -> None:
        """Stop; allocations stay, and the next server takes them over."""
        self._stopped.set()
        self._poke.set()
        if self._thread.is_alive():
            self._thread.join()

    def want(self, gpus: int) -> None:
        """Ask for allocations with this number of further GPUs in all."""
        if gpus != self._want:
            self._want = gpus
            self._poke.set()

    # -- the engine's thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopped.is_set():
            try:
                allocations = self._slurm.allocations()
                self._look(allocations)
                self._resize([each for each in allocations if each.state in _WAITS])
            except EngineError as error:
                if self._problem != error.message:
                    _log.error("Slurm is asked again: %s", error.message)
                self._problem = error.message
            self._poke.wait(LOOK_S)
            self._poke.clear()

    def _look(self, allocations: Sequence[Allocation]) -> None:
        if self._fleet.look(allocations):
            self._on_change()

    def _resize(self, waiting: Sequence[Allocation]) -> None:
        """Ask for as many nodes as waiting jobs can use, and give back those that nothing uses."""
        self._problem = waiting[0].reason if waiting else ""
        nodes = self._fleet.nodes()
        free = sum(not self._host.is_held(node) for node in nodes)
        wanted = max(0, math.ceil(self._want / self._gpus) - free)
        if self._first and not nodes:
            wanted = max(1, wanted)  # so that it is known what a node is like
        self._first = self._first and not nodes
        wanted = 0 if self._retired else min(wanted, self._request.nodes - len(nodes))
        for _ in range(wanted - len(waiting)):
            job_id = self._slurm.submit(self._script(), self._options())
            why = f"jobs wait for {plural(self._want, 'GPU')}" if self._want else "to learn what a node is like"
            _log.info("asked Slurm for a node, job %s: %s", job_id, why)
        for each in waiting[max(0, wanted) :]:
            self._slurm.cancel(each.job_id)
        # While jobs wait, a free node may wait for the others of a gang; after a while it is of no use to them.
        self._give_back(nodes, max(self._request.idle_s, UNUSED_S) if self._want else self._request.idle_s)

    def _give_back(self, nodes: Sequence[str], idle_s: float) -> None:
        for node in nodes:
            if self._fleet.idle_for_s(node, held=self._host.is_held(node)) >= idle_s:
                _log.info("node %s goes back to Slurm: it has held nothing for %.0f s", node, idle_s)
                self._host.dismiss(node)

    def _options(self) -> list[str]:
        options = ["--nodes=1", "--ntasks=1", "--exclusive", "--no-requeue", f"--signal=TERM@{NOTICE_S}"]
        options += [] if self._request.partition is None else [f"--partition={self._request.partition}"]
        options += [] if self._slots is not None else [f"--gpus-per-node={self._gpus}"]
        return [*options, f"--output={self._home / 'slurm'}/%j.log", *shlex.split(self._request.sbatch)]

    def _script(self) -> str:
        words = [*self._host.join(), "--foreground"]
        words += [] if self._slots is None else ["--slots", str(self._slots)]
        return _SCRIPT.format(name=self._slurm.name, command=shlex.join(words))


class _Fleet:
    """The nodes that the engine has, and those that it had; callable on each thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}  # by batch job: the node that it has
        self._deaths: dict[str, Death] = {}
        self._idle_since_s: dict[str, float] = {}

    def look(self, allocations: Sequence[Allocation]) -> bool:
        """Note which nodes there are; return whether some have gone."""
        now = {each.job_id: each for each in allocations}
        with self._lock:
            for job_id, node in list(self._running.items()):
                found = now.get(job_id)
                if found is None or found.state not in (*_WAITS, *_RUNS):
                    state = found.state if found else "it is not in the queue"
                    if state in _ENDED:
                        self._deaths[node] = Death(node, f"Slurm's job {job_id} has ended: {state}", ranks_gone=True)
                    else:
                        _log.warning("node %s: Slurm's job %s is over (%s); its lease decides", node, job_id, state)
                    self._idle_since_s.pop(node, None)
                    del self._running[job_id]
            for each in allocations:
                if each.state in _RUNS and each.node and each.job_id not in self._running:
                    self._running[each.job_id] = each.node
                    self._deaths.pop(each.node, None)
            return bool(self._deaths)

    def nodes(self) -> list[str]:
        """Return the nodes that there are, by name."""
        with self._lock:
            return sorted(self._running.values())

    def deaths(self) -> list[Death]:
        """Return the nodes that have gone."""
        with self._lock:
            return list(self._deaths.values())

    def knows(self, node: str) -> bool:
        """Return whether the engine has or had the node."""
        with self._lock:
            return node in self._deaths or node in self._running.values()

    def idle_for_s(self, node: str, *, held: bool) -> float:
        """Return the time since the node was first seen to hold nothing; 0 while it holds something."""
        now_s = time.monotonic()
        with self._lock:
            if held:
                self._idle_since_s.pop(node, None)
                return 0.0
            return now_s - self._idle_since_s.setdefault(node, now_s)


class _Slurm:
    """Slurm's commands, for the batch jobs of one name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def gpus(self, partition: str | None) -> int:
        """Return the GPUs of one node of a partition; of the smallest, where nodes differ."""
        which = [] if partition is None else [f"--partition={partition}"]
        rows = self._run("sinfo", "--noheader", *which, "--format=%G").split()
        found = [int(match[1]) for row in rows if (match := re.search(r"gpu:(?:[^:(,]+:)?(\d+)", row))]
        if not found:
            named = partition or "the default partition"
            raise EngineError(
                f"{named} has no node with GPUs: sinfo says {', '.join(rows) or 'nothing'}",
                hint="name another --partition, or offer CPU slots with --slots N",
            )
        return min(found)

    def allocations(self) -> list[Allocation]:
        """Return the batch jobs in the queue, oldest first; those that have ended stay there for some minutes."""
        rows = self._run("squeue", "--noheader", "--me", f"--name={self.name}", "--states=all", "--format=%i|%T|%N|%r")
        found = [Allocation(*line.strip().split("|", 3)) for line in rows.splitlines() if line.count("|") >= 3]
        return sorted(found, key=lambda each: int(each.job_id) if each.job_id.isdecimal() else 0)

    def submit(self, script: str, options: Sequence[str]) -> str:
        """Submit a batch job; return its id."""
        out = self._run("sbatch", "--parsable", f"--job-name={self.name}", *options, script=script)
        return out.strip().partition(";")[0]

    def cancel(self, job_id: str) -> None:
        """Cancel a batch job."""
        self._run("scancel", job_id)

    def _run(self, *argv: str, script: str | None = None) -> str:
        try:
            done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        except FileNotFoundError:
            hint = "run the server on a login node of the cluster"
            raise EngineError(f"Slurm's {argv[0]} is not on PATH", hint=hint) from None
        except subprocess.TimeoutExpired:
            raise EngineError(f"{argv[0]} did not answer within {COMMAND_S:.0f} s") from None
        if done.returncode:
            words = done.stderr.strip().splitlines()
            raise EngineError(f"{argv[0]} failed: {words[-1] if words else f'exit code {done.returncode}'}")
        return done.stdout


def _name(home: Path) -> str:
    """Return the name of this server's batch jobs, which is drawn once into the home."""
    path = home / "slurm" / "name.json"
    if path.exists():
        return str(json.loads(path.read_text())["name"])
    drawn = f"cordee-{secrets.token_hex(4)}"
    write_json(path, {"name": drawn}, sync=True)
    return drawn

"""A control plane on the real store, with a clock that a test turns and agents that a test plays."""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cordee.control.ports import Pending, Report
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.events import Event, Job, Node, NodeUp, Outcome, RanksEnded, Tier
from cordee.ids import JobId

GPT, PROD = JobId("gpt-abcdef"), JobId("prod-abcdef")
JOB = Job(job_id=GPT, name="gpt", owner="ada", gpus=4, tier=Tier.PREEMPTIBLE, protected=True)
URGENT = Job(job_id=PROD, name="prod", owner="ada", gpus=4, tier=Tier.PRODUCTION)
NODE = Node(name="local", epoch=1, gpu_name="slot", gpus=4, micro_usd_per_gpu_hour=2_000_000)


class Time:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.us = 1_000_000

    def now_us(self) -> int:
        self.us += 1
        return self.us


class Agents:
    """An executor that a test plays: what it reports, and whether it answers."""

    def __init__(self) -> None:
        self.waiting: list[Report] = []
        self.acknowledged: list[tuple[str, int]] = []
        self.orders: list[Pending] = []
        self.answers = True
        self._seq: dict[str, int] = {}

    def report(self, event: Event, source: str = "node/local/1") -> None:
        self._seq[source] = self._seq.get(source, 0) + 1
        self.waiting.append(Report(source=source, seq=self._seq[source], event=event))

    def reports(self) -> Sequence[Report]:
        return list(self.waiting)

    def acknowledge(self, source: str, seq: int) -> None:
        self.acknowledged.append((source, seq))
        self.waiting = [report for report in self.waiting if report.source != source or report.seq > seq]

    def carry_out(self, pending: Pending) -> bool:
        self.orders.append(pending)
        return self.answers


@cache
def _empty_database() -> bytes:
    """Return a new SQLite database: to migrate one takes longer than most tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cordee.db"
        SqlStore(f"sqlite:///{path}").close()
        return path.read_bytes()


def new_database(path: Path) -> str:
    """Write an empty database of this version; return its URL."""
    path.write_bytes(_empty_database())
    return f"sqlite:///{path}"


class Scene:
    """A control plane with one node of four slots."""

    def __init__(self, folder: Path, url: str = "", *, node: Node = NODE, at_us: int = 1_000_000) -> None:
        path = folder / "cordee.db"
        self.url = url or (f"sqlite:///{path}" if path.exists() else new_database(path))
        self.time, self.agents = Time(), Agents()
        self.time.us = at_us
        self.store = SqlStore(self.url)
        self.control = Control(clock=self.time, store=self.store, executor=self.agents)
        self.control.up()
        self.agents.report(NodeUp(at_us=self.time.us, node=node))
        self.control.tick()

    def restart(self) -> None:
        """As after kill -9: what was in memory is gone, the store and the agents are not."""
        self.store.close()
        self.store = SqlStore(self.url)
        self.control = Control(clock=self.time, store=self.store, executor=self.agents)
        self.control.up()

    def log(self) -> list[Event]:
        return [event for _, event in self.store.events()]

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.log() if isinstance(event, kind)]

    def ended(self, job_id: JobId, epoch: int, outcome: Outcome) -> None:
        now = self.time.us
        self.agents.report(RanksEnded(at_us=now, job_id=job_id, epoch=epoch, node="local", outcome=outcome))

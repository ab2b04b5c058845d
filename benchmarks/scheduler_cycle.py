"""What one scheduling cycle costs, by the size of the cluster: CPU time of `enact`, as `tick` calls it.

A cluster of nodes with 8 GPUs is filled with jobs of all tiers, 0.8 a node, and as many wait in 12 queues with quotas.
Two hours pass, in which jobs end and arrive, and those who wait take turns with those who run. Then jobs end, jobs
arrive, some of which start at once and some push others, nodes are lost with all on them and come back, and each
victim leaves by itself; each is followed by a cycle. It is the same world at every size: on twice as many nodes twice
as much happens. p50, p99 and the longest are of cycles that decided something, and each of these six kinds of cycles
weighs the same, however many there are of it. Garbage is looked for between the cycles, as the server does when it has
nothing else to do.

python benchmarks/scheduler_cycle.py [--nodes 100,1000,12500] [--cycles 50] [--most 3000] [--svg FILE] [--json]
"""

import argparse
import heapq
import json
import platform
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cordee.control.collector import collected_when_idle
from cordee.events import (
    AttemptPlaced,
    Event,
    Job,
    JobSubmitted,
    Node,
    NodeDown,
    NodeUp,
    NoticeGiven,
    Outcome,
    Queue,
    QueuesSet,
    RanksEnded,
    RanksStarted,
    ServerUp,
    Tier,
)
from cordee.ids import JobId
from cordee.schedule import State, enact
from cordee.schedule.state.transitions import apply
from cordee.view.chart import Axis, ChartLine, chart_svg

S = 1_000_000
SIZES = (1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 8, 8, 8, 8, 16, 16, 32, 64)  # 9.9 on average: 0.8 jobs a node
TIERS = (Tier.PRODUCTION, Tier.STANDARD, Tier.STANDARD, Tier.PREEMPTIBLE, Tier.PREEMPTIBLE)
QUEUES = 12
ENDS, ARRIVES, PUSHES, LOST = "a job ends", "a job arrives", "a job arrives and pushes", "a node is lost"
LEAVES, BACK, TIME = "a victim leaves", "a node comes back", "turns change"
MIX = (ENDS, ARRIVES, PUSHES, LOST, BACK, LEAVES)
SMALL, PRODUCTION = "a small job arrives", "a production gang arrives"
HAPPENINGS = (ENDS, ENDS, ARRIVES, ARRIVES, SMALL, PRODUCTION, PRODUCTION, LOST)
EVERY_S = 12_500  # of a node: one of these; a job runs for about ten hours
GANG, GANG_S = 64, 600  # GPUs of a production gang that arrives, and how long it runs
AWAY_S = 120  # a lost node


@dataclass
class Bench:
    """A cluster, what happens to it, and what the cycles cost."""

    nodes: int
    idle: Callable[[], None]  # looks for garbage
    state: State = field(default_factory=State)
    now_us: int = 1_000_000 * S
    ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    idle_ms: list[float] = field(default_factory=list)  # of cycles that decided nothing
    garbage_ms: list[float] = field(default_factory=list)  # between cycles
    agenda: list[tuple[int, str, Any]] = field(default_factory=list)  # what is to come: when, what, whom
    wake_at_us: int | None = None
    number: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.nodes)

    # -- before ----------------------------------------------------------------------------------------------

    def fill(self) -> float:
        """An empty cluster, and twice as many gangs as it holds: the seconds of the first cycle."""
        apply(self.state, ServerUp(at_us=self.now_us))
        for number in range(self.nodes):
            apply(self.state, NodeUp(at_us=self.now_us, node=self.node(number, 1)))
        quota = 8 * self.nodes // (2 * QUEUES)
        queues = tuple(Queue(name=f"q{each}", quota_gpus=quota, weight=1 + each % 3) for each in range(QUEUES))
        apply(self.state, QueuesSet(at_us=self.now_us, queues=queues))
        for _ in range(2 * int(0.8 * self.nodes)):
            self.submit(self.dice.choice(SIZES))
        self.cycle("fill")
        return self.ms.pop("fill")[0] / 1e3

    def grow_old(self) -> None:
        """Two hours: each minute one job in a hundred ends and another arrives, and who got notice has left.

        Else all would have begun at once, and lose their turns at once for ever.
        """
        for _ in range(120):
            self.now_us += 60 * S
            while self.agenda:
                _, _, job_id = heapq.heappop(self.agenda)
                self.end(job_id, Outcome.CHECKPOINTED)
            for job_id in self.dice.sample(self.running(), len(self.state.attempts) // 100):
                self.end(job_id, Outcome.FINISHED)
                self.submit(self.dice.choice(SIZES))
            self.cycle("before")
        for kept in (self.ms, self.idle_ms, self.garbage_ms):
            kept.clear()

    def node(self, number: int, epoch: int) -> Node:
        """Racks of 16 nodes, blocks of 8 racks."""
        domain = (f"block{number // 128}", f"rack{number // 16}")
        return Node(
            name=f"n{number:05}", epoch=epoch, gpu_name="H100", gpus=8, micro_usd_per_gpu_hour=3_000_000, domain=domain
        )

    def submit(self, gpus: int, tier: Tier | None = None) -> JobId:
        """A protected job."""
        self.number += 1
        job = Job(
            job_id=JobId(f"j{self.number:07}"),
            name="train",
            owner=f"u{self.dice.randrange(200)}",
            gpus=gpus,
            tier=tier or self.dice.choice(TIERS),
            queue=f"q{self.dice.randrange(QUEUES)}",
            protected=True,
            grace_us=60 * S,
        )
        apply(self.state, JobSubmitted(at_us=self.now_us, job=job, spec=""))
        return job.job_id

    # -- a cycle ---------------------------------------------------------------------------------------------

    def cycle(self, kind: str, who: JobId | None = None) -> None:
        """One decision, timed and kept; ranks of what was placed start at once, victims leave within half a minute."""
        begin = time.process_time()
        decision = enact(self.state, self.now_us, None, _written)
        spent_ms = (time.process_time() - begin) * 1e3
        assert not decision.errors, decision.errors
        if who is not None and any(isinstance(each, NoticeGiven) and each.for_job == who for each in decision.events):
            kind = PUSHES
        (self.ms[kind] if decision.events else self.idle_ms).append(spent_ms)
        self.wake_at_us = decision.wake_at_us
        self.state.quotas.forget()
        for event in decision.events:
            if isinstance(event, AttemptPlaced):
                at_us, job_id, epoch = self.now_us, event.job_id, event.epoch
                for lease in event.leases:
                    apply(self.state, RanksStarted(at_us=at_us, job_id=job_id, epoch=epoch, node=lease.node))
            elif isinstance(event, NoticeGiven):
                self.later(self.dice.randrange(1000, 30_000) * 1000, LEAVES, event.job_id)
        begin = time.process_time()
        self.idle()
        self.garbage_ms.append((time.process_time() - begin) * 1e3)

    def later(self, after_us: int, kind: str, whom: object = "") -> None:
        """Put it on the agenda."""
        heapq.heappush(self.agenda, (self.now_us + after_us, kind, whom))

    # -- what happens ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """The next thing on the agenda, and a cycle."""
        if self.wake_at_us is not None and self.wake_at_us < self.agenda[0][0]:
            self.now_us = max(self.now_us, self.wake_at_us)
            self.cycle(TIME)
            return
        self.now_us, kind, whom = heapq.heappop(self.agenda)
        arrived = self.happens(kind, whom)
        self.cycle(ARRIVES if arrived else kind, arrived)

    def happens(self, kind: str, whom: Any) -> JobId | None:
        """Tell the state; who arrived."""
        if kind == LEAVES:
            self.end(whom, Outcome.CHECKPOINTED)
            return None
        if kind == BACK:
            epoch = self.state.nodes.records[whom].node.epoch + 1
            apply(self.state, NodeUp(at_us=self.now_us, node=self.node(int(whom[1:]), epoch)))
            return None
        if kind == ENDS and whom:
            if whom in self.state.attempts:
                self.end(whom, Outcome.FINISHED)
            else:
                self.later(GANG_S * S, ENDS, whom)
            return None
        after_s = self.dice.expovariate(self.nodes / EVERY_S)
        self.later(round(after_s * S), self.dice.choice(HAPPENINGS))
        if kind == ENDS:
            self.end(self.dice.choice(self.running()), Outcome.FINISHED)
        elif kind == LOST:
            self.lose()
        elif kind == PRODUCTION:
            arrived = self.submit(GANG, Tier.PRODUCTION)
            self.later(GANG_S * S, ENDS, arrived)
            return arrived
        else:
            return self.submit(self.dice.choice((1, 2) if kind == SMALL else SIZES))
        return None

    def running(self) -> list[JobId]:
        """Jobs that run and are not asked to leave, in the order of their ids."""
        return sorted(job_id for job_id, each in self.state.attempts.items() if not each.leaving)

    def end(self, job_id: JobId, outcome: Outcome) -> None:
        """All shares of a job's attempt end."""
        attempt = self.state.attempts.get(job_id)
        for lease in attempt.held if attempt is not None else ():
            assert attempt is not None
            ended = RanksEnded(at_us=self.now_us, job_id=job_id, epoch=attempt.epoch, node=lease.node, outcome=outcome)
            apply(self.state, ended)

    def lose(self) -> None:
        """A node and all gangs on it; it comes back two minutes later."""
        name = self.state.attempts[self.dice.choice(self.running())].held[0].node
        epoch = self.state.nodes.records[name].node.epoch
        apply(self.state, NodeDown(at_us=self.now_us, node=name, epoch=epoch, why="silent"))
        for job_id, attempt in list(self.state.attempts.items()):
            if any(lease.node == name for lease in attempt.held):
                self.end(job_id, Outcome.LOST)
        self.later(AWAY_S * S, BACK, name)


def _written(events: Sequence[Event]) -> Sequence[Event]:
    return events


def measure(nodes: int, cycles: int, most: int) -> dict[str, Any]:
    """One size of cluster."""
    with collected_when_idle() as idle:
        bench = Bench(nodes, idle)
        fill_s = bench.fill()
        _tell(f"{nodes} nodes: filled with {len(bench.state.attempts)} gangs in one cycle of {fill_s:.1f} s")
        begin = time.process_time()
        bench.grow_old()
        _tell(f"{nodes} nodes: two hours have passed in {time.process_time() - begin:.1f} s")
        running, waiting, begin = len(bench.state.attempts), bench.state.waiting.count, time.process_time()
        bench.later(0, ENDS)
        for number in range(1, most + 1):
            bench.step()
            if number % 1000 == 0:
                _tell(f"{nodes} nodes: {number} cycles, {', '.join(f'{kind} {len(bench.ms[kind])}' for kind in MIX)}")
            if all(len(bench.ms[kind]) >= cycles for kind in MIX):
                break
        _tell(f"{nodes} nodes: {number} cycles in {time.process_time() - begin:.1f} s")
    return {
        "nodes": nodes,
        "running": running,
        "waiting": waiting,
        "cycles": sum(len(bench.ms[kind]) for kind in MIX),
        **_times(*(bench.ms[kind] for kind in MIX)),
        "idle": {"cycles": len(bench.idle_ms), **_times(bench.idle_ms)},
        "fill_s": round(fill_s, 2),
        "by_kind": {kind: {"cycles": len(times), **_times(times)} for kind, times in sorted(bench.ms.items())},
        "garbage": _times(bench.garbage_ms),
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def _times(*kinds: list[float]) -> dict[str, float]:
    """Of all kinds together, each of the same weight."""
    there = [times for times in kinds if times] or [[0.0]]
    ms = np.concatenate(there)
    weights = np.concatenate([np.full(len(times), 1 / len(times)) for times in there])
    order = np.argsort(ms)
    below = np.cumsum(weights[order]) / weights.sum()
    p50, p99 = (ms[order][np.searchsorted(below, share)] for share in (0.5, 0.99))
    return {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2), "max_ms": round(float(ms.max()), 2)}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def plot(rows: list[dict[str, Any]]) -> str:
    """The curve."""
    kinds = {"p99": ("", "p99_ms"), "p50": ("", "p50_ms"), "decides nothing": ("idle", "p50_ms")}
    lines = [
        ChartLine(name, [(row["nodes"], (row[part] if part else row)[key]) for row in rows])
        for name, (part, key) in kinds.items()
    ]
    x = Axis("nodes of 8 GPUs", "{:,.0f}".format, log=True, ticks=[row["nodes"] for row in rows])
    y = Axis("CPU ms", "{:g}".format)
    return chart_svg(lines, x, y, label="What a cycle costs by the size of the cluster")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="100,400,1000,4000,12500")
    parser.add_argument("--cycles", type=int, default=50, help="of each kind at least")
    parser.add_argument("--most", type=int, default=3000, help="cycles of each size, however rare a kind is")
    parser.add_argument("--svg", type=Path, help="where to draw the curve")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(int(nodes), args.cycles, args.most) for nodes in args.nodes.split(",")]
    if args.svg is not None:
        args.svg.write_text(plot(rows))
    if args.json:
        json.dump({"python": platform.python_version(), "rows": rows}, sys.stdout, indent=1)
        return
    print(f"Python {platform.python_version()}, CPU time of one cycle that decides something")
    heads = ("running", "waiting", "cycles", "p50 ms", "p99 ms", "max ms", "idle", "p50 ms", "fill s", "MB")
    print(f"{'nodes':>6}{''.join(f'{head:>9}' for head in heads)}")
    for row in rows:
        print(
            f"{row['nodes']:>6}{row['running']:>9}{row['waiting']:>9}{row['cycles']:>9}{row['p50_ms']:>9}"
            f"{row['p99_ms']:>9}{row['max_ms']:>9}{row['idle']['cycles']:>9}{row['idle']['p50_ms']:>9}"
            f"{row['fill_s']:>9}{row['rss_mb']:>9}"
        )
    for row in rows:
        print(f"{row['nodes']} nodes; garbage between two cycles took {row['garbage']['max_ms']} ms at most")
        for kind, times in row["by_kind"].items():
            mixed = "" if kind in MIX else ", not in the mix"
            print(
                f"  {kind:<24}{times['cycles']:>5} cycles, p50 {times['p50_ms']:>6}, p99 {times['p99_ms']:>6}, "
                f"longest {times['max_ms']:>6} ms{mixed}"
            )


if __name__ == "__main__":
    main()

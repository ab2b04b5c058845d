"""What one scheduling cycle costs: CPU time of `decide` on a full cluster, each cycle with something to decide.

A cluster of nodes with 8 GPUs is full of jobs of all tiers, 0.8 a node; as many wait in 12 queues with quotas. Then
things happen, one after the other, each followed by a cycle: a job arrives and starts or pushes one; a gang arrives and
pushes others; a job ends; a node is lost with all that runs on it, and comes back later; each victim leaves.

python benchmarks/scheduler_cycle.py [--nodes 100,1000,12500] [--steps 400] [--json]
"""

import argparse
import json
import platform
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

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
    RanksStarted,
    ServerUp,
    ShareEnded,
    Tier,
)
from cordee.ids import JobId
from cordee.schedule import State, decide

S = 1_000_000
SIZES = (1, 1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 16, 16, 32, 64)
TIERS = (Tier.PRODUCTION, Tier.STANDARD, Tier.STANDARD, Tier.PREEMPTIBLE, Tier.PREEMPTIBLE)
QUEUES = 12
KINDS = ("end", "end", "arrival", "push", "node lost")


@dataclass
class Bench:
    """A cluster, what happens to it, and what the cycles cost."""

    nodes: int
    seed: int = 1
    state: State = field(default_factory=State)
    now_us: int = 1_000_000 * S
    ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    empty: Counter[str] = field(default_factory=Counter)
    number: int = 0
    lost: list[str] = field(default_factory=list)
    wake_at_us: int | None = None

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def build(self) -> None:
        """Full, with as many waiting as running."""
        self.apply(ServerUp(at_us=self.now_us))
        for number in range(self.nodes):
            self.apply(NodeUp(at_us=self.now_us, node=self.node(number, 1)))
        quota = 8 * self.nodes // (2 * QUEUES)
        queues = tuple(Queue(name=f"q{each}", quota_gpus=quota, weight=1 + each % 3) for each in range(QUEUES))
        self.apply(QueuesSet(at_us=self.now_us, queues=queues))
        target = int(0.8 * self.nodes)
        left = 8 * self.nodes
        while left > 0:
            ahead = target - len(self.state.jobs)
            size = min(left, self.dice.choice(SIZES) if ahead > left // 64 else 64)
            self.submit(size)
            left -= size
        while self.state.waiting.count:
            before = self.state.waiting.count
            self.cycle("build")
            self.start()
            if self.state.waiting.count == before:
                break
        self.now_us += 7200 * S
        for _ in range(target - self.state.waiting.count):
            self.submit(self.dice.choice(SIZES), self.dice.choice(TIERS[1:]))
        for _ in range(60):  # until everybody who could be pushed by those who waited has been
            if not self.cycle("fill") and not self.noticed:
                break
            self.now_us += 40 * S
            self.leave()
            self.start()
        self.ms.clear()
        self.empty.clear()

    def node(self, number: int, epoch: int) -> Node:
        """Racks of 16 nodes, blocks of 8 racks."""
        domain = (f"block{number // 128}", f"rack{number // 16}")
        return Node(
            name=f"n{number:05}", epoch=epoch, gpu_name="H100", gpus=8, micro_usd_per_gpu_hour=3_000_000, domain=domain
        )

    def submit(self, gpus: int, tier: Tier | None = None) -> JobId:
        """A protected job."""
        self.number += 1
        job_id = JobId(f"j{self.number:07}")
        job = Job(
            job_id=job_id,
            name="train",
            owner=f"u{self.dice.randrange(200)}",
            gpus=gpus,
            tier=tier or self.dice.choice(TIERS),
            queue=f"q{self.dice.randrange(QUEUES)}",
            protected=True,
            grace_us=60 * S,
        )
        self.apply(JobSubmitted(at_us=self.now_us, job=job, spec=""))
        return job_id

    def apply(self, event: Event) -> None:
        """It happened."""
        self.state.apply(event)

    def cycle(self, kind: str) -> tuple[Event, ...]:
        """One decision, timed; its events are committed."""
        begin = time.process_time()
        decision = decide(self.state, self.now_us)
        self.ms[kind].append((time.process_time() - begin) * 1e3)
        assert not decision.errors, decision.errors
        if not decision.events:
            self.empty[kind] += 1
        for event in decision.events:
            self.apply(event)
        self.fresh = [each for each in decision.events if isinstance(each, AttemptPlaced)]
        self.noticed = [each for each in decision.events if isinstance(each, NoticeGiven)]
        return decision.events

    def start(self) -> None:
        """The ranks of what was placed run."""
        for placed in self.fresh:
            for lease in placed.leases:
                self.apply(RanksStarted(at_us=self.now_us, job_id=placed.job_id, epoch=placed.epoch, node=lease.node))

    def leave(self) -> None:
        """Who had notice has saved and left."""
        for given in self.noticed:
            self.end(given.job_id, Outcome.CHECKPOINTED)

    def end(self, job_id: JobId, outcome: Outcome) -> None:
        """All shares of a job's attempt end."""
        attempt = self.state.attempts.get(job_id)
        for lease in attempt.held if attempt is not None else ():
            assert attempt is not None
            ended = ShareEnded(at_us=self.now_us, job_id=job_id, epoch=attempt.epoch, node=lease.node, outcome=outcome)
            self.apply(ended)

    def step(self, kind: str) -> None:
        """Something happens."""
        self.now_us += self.dice.randrange(1, 20) * S
        if kind == "end":
            self.end(self.dice.choice(self.running()), Outcome.FINISHED)
        elif kind == "arrival":
            self.submit(1, Tier.PRODUCTION)
        elif kind == "push":
            self.submit(self.dice.choice((2, 4, 8, 16, 32, 64)), Tier.PRODUCTION)
        else:
            self.lose()
        self.cycle(kind)
        self.start()
        waves = 0
        while self.noticed and waves < 5:  # each victim leaves by itself, and what follows from that is decided
            leaving, waves = self.noticed, waves + 1
            self.now_us += 30 * S
            pushed = []
            for given in leaving:
                self.now_us += S // 10
                self.end(given.job_id, Outcome.CHECKPOINTED)
                self.cycle("victim leaves")
                self.start()
                pushed += self.noticed
            self.noticed = pushed
        self.leave()
        if len(self.lost) > 3:
            name = self.lost.pop(0)
            record = self.state.nodes[name]
            self.apply(NodeUp(at_us=self.now_us, node=self.node(int(name[1:]), record.node.epoch + 1)))
            self.cycle("node back")
            self.start()
            self.leave()

    def running(self) -> list[JobId]:
        """Jobs that run and are not asked to leave, in the order of their ids."""
        return sorted(job_id for job_id, each in self.state.attempts.items() if not each.leaving)

    def lose(self) -> None:
        """A node and all gangs on it."""
        job_id = self.dice.choice(self.running())
        name = self.state.attempts[job_id].held[0].node
        record = self.state.nodes[name]
        self.apply(NodeDown(at_us=self.now_us, node=name, epoch=record.node.epoch, why="silent"))
        for other, attempt in list(self.state.attempts.items()):
            if any(lease.node == name for lease in attempt.held):
                self.end(other, Outcome.LOST)
        self.lost.append(name)


def measure(nodes: int, steps: int) -> dict[str, object]:
    """One size of cluster."""
    bench = Bench(nodes)
    bench.build()
    running, waiting = len(bench.state.attempts), bench.state.waiting.count
    for number in range(steps):
        bench.step(KINDS[number % len(KINDS)])
    every = [each for times in bench.ms.values() for each in times]
    return {
        "nodes": nodes,
        "running": running,
        "waiting": waiting,
        "cycles": len(every),
        "empty": sum(bench.empty.values()),
        "p50_ms": round(float(np.percentile(every, 50)), 2),
        "p99_ms": round(float(np.percentile(every, 99)), 2),
        "max_ms": round(max(every), 2),
        "by_kind": {
            kind: {"cycles": len(times), "p50_ms": round(float(np.median(times)), 2), "max_ms": round(max(times), 2)}
            for kind, times in bench.ms.items()
        },
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="100,400,1600,6400,12500")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(int(nodes), args.steps) for nodes in args.nodes.split(",")]
    if args.json:
        json.dump({"python": platform.python_version(), "rows": rows}, sys.stdout, indent=1)
        return
    print(f"Python {platform.python_version()}, CPU time of one cycle, {args.steps} happenings")
    heads = ("running", "waiting", "cycles", "empty", "p50 ms", "p99 ms", "max ms", "MB")
    print(f"{'nodes':>6}{''.join(f'{head:>9}' for head in heads)}")
    for row in rows:
        print(
            f"{row['nodes']:>6}{row['running']:>9}{row['waiting']:>9}{row['cycles']:>9}{row['empty']:>9}"
            f"{row['p50_ms']:>9}{row['p99_ms']:>9}{row['max_ms']:>9}{row['rss_mb']:>9}"
        )
    for kind, times in rows[-1]["by_kind"].items():  # type: ignore[attr-defined]
        print(f"  {kind:<16} {times['cycles']:>5} cycles, p50 {times['p50_ms']} ms, max {times['max_ms']} ms")


if __name__ == "__main__":
    main()

"""What a place and a change of the index cost, against the size of the cluster.

python benchmarks/placement.py [--nodes 125 1250 12500] [--jobs 1500] [--json]

Nodes of 8 GPUs in racks of 8 and blocks of 128, filled to 95 % by gangs of 1 to 256 GPUs; then one ends, one arrives,
by turns. `fits` comes before `place`, and so pays for catching up with what changed. "host" jobs take CPU and memory
too, of few shapes, and are packed by the mix. CPU microseconds.
"""

import argparse
import json
import random
import time
from typing import Any

from cordee.events import Job, Lease, Node
from cordee.ids import JobId
from cordee.schedule.placement.entry import Used, entry_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import fits, place, pools

SIZES, SHARES = (1, 2, 4, 8, 16, 64, 256), (6, 2, 2, 3, 1, 0.5, 0.2)


class Cluster:
    """An index, what is leased, and what runs."""

    def __init__(self, nodes: int, host: bool) -> None:
        self.index, self.dice, self.host = FreeIndex(), random.Random(nodes), host
        self.nodes: dict[str, Node] = {}
        self.used: dict[str, Used] = {}
        self.running: list[tuple[Job, tuple[Lease, ...]]] = []
        self.jobs = 0
        self.times: dict[str, list[int]] = {"place": [], "place, several nodes": [], "fits": [], "update": []}
        counted = {"cpu_milli": 128_000, "memory_bytes": 1 << 41} if host else {}
        for number in range(nodes):
            domain = (f"b{number // 128:03}", f"r{number // 8:05}")
            node = Node(name=f"n{number:05}", epoch=1, gpu_name="H100", gpus=8, domain=domain, **counted)  # type: ignore[arg-type]
            self.nodes[node.name] = node
            self.put(node.name, Used())

    def put(self, name: str, used: Used) -> None:
        """What is leased of a node."""
        self.used[name] = used
        entry = entry_of(self.nodes[name], used)
        began = time.thread_time_ns()
        self.index.put(name, entry)
        self.times["update"].append(time.thread_time_ns() - began)

    def job(self) -> Job:
        """The next one."""
        self.jobs += 1
        gpus = self.dice.choices(SIZES, SHARES)[0]
        cpu = self.dice.choice((4000, 8000, 12000)) * gpus if self.host else 0
        return Job(
            job_id=JobId(f"j{self.jobs}"),
            name="j",
            owner="me",
            gpus=gpus,
            cpu_milli=cpu,
            memory_bytes=(gpus << 33) if self.host else 0,
        )

    def arrive(self) -> None:
        """A job asks, and starts if there is room."""
        job = self.job()
        pool = pools(job, self.index.kinds)
        self.index.mix.seen(job, self.jobs)
        began = time.thread_time_ns()
        room = fits(self.index, job, pool[0])
        asked = time.thread_time_ns()
        leases = place(self.index, job, pool)
        ended = time.thread_time_ns()
        assert room == (leases is not None)
        self.times["fits"].append(asked - began)
        if leases is not None:
            self.times["place, several nodes" if len(leases) > 1 else "place"].append(ended - asked)
            for lease in leases:
                self.put(lease.node, self.used[lease.node].plus(lease, job))
            self.running.append((job, leases))

    def end(self) -> None:
        """Some job ends."""
        job, leases = self.running.pop(self.dice.randrange(len(self.running)))
        for lease in leases:
            self.put(lease.node, self.used[lease.node].minus(lease, job))


def measure(nodes: int, host: bool, jobs: int) -> list[dict[str, Any]]:
    """Rows of one cluster."""
    cluster = Cluster(nodes, host)
    while cluster.index.free(("H100", next(iter(cluster.index.kinds))[1])) > 0.4 * nodes:
        cluster.arrive()
    for times in cluster.times.values():
        times.clear()
    for _ in range(jobs):
        cluster.end()
        cluster.arrive()
    rows = []
    for what, times in cluster.times.items():
        ordered = sorted(times)
        p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        rows.append({"nodes": nodes, "host": host, "what": what, "us_p50": p50 / 1000, "us_p99": p99 / 1000})
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[125, 1250, 12500])
    parser.add_argument("--jobs", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [row for nodes in given.nodes for host in (False, True) for row in measure(nodes, host, given.jobs)]
    if given.json:
        print(json.dumps(rows))
        return
    print(f"{'nodes':>7}  {'jobs':6}{'what':24}{'p50':>10}{'p99':>10}  CPU microseconds")
    for row in rows:
        jobs = "host" if row["host"] else "GPUs"
        print(f"{row['nodes']:>7}  {jobs:6}{row['what']:24}{row['us_p50']:>10.1f}{row['us_p99']:>10.1f}")


if __name__ == "__main__":
    main()

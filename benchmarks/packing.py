"""How much of a cluster's GPUs is allocated when more is asked for than there is, by how nodes are chosen.

python benchmarks/packing.py PODS NODES [--seeds 10] [--asked 1.3] [--processes 1] [--json]

Pods of Alibaba's openb trace (job_id,gpus,cpu_milli,memory_mib; parts of GPUs, and pods without one) arrive in random
order, resampled until they ask for 130 % of the GPUs, on its nodes (sn,cpu_milli,memory_mib,gpu,model), and never
leave: the experiment of FGD (Weng et al., USENIX ATC'23, section 6.2). A pod that fits nowhere is gone. All ways see
the same pods. `fgd` and `mix` are `Policy.packing`, through the scheduler's own index and `place`; `random` and
`best fit` (least CPU and GPU left, each over the largest node's) are here. "known" is told the whole trace beforehand,
as FGD is; "learns" has seen what has arrived.
"""

import argparse
import csv
import gzip
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cordee.events import Job, Node
from cordee.hardware.topology import parse_cluster
from cordee.ids import JobId
from cordee.schedule.placement.entry import Used, entry_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.mix import ask_of, ranked
from cordee.schedule.placement.place import place, pools
from cordee.schedule.policy import Packing

MIB = 1 << 20


class Pod(NamedTuple):
    """What a pod asks for."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    milli: int  # of each

    def job(self, number: int) -> Job:
        """As the scheduler knows it."""
        return Job(
            job_id=JobId(f"pod{number}"),
            name="pod",
            owner="me",
            gpus=self.gpus,
            gpu_milli=self.milli,
            cpu_milli=self.cpu_milli,
            memory_bytes=self.memory_mib * MIB,
        )


def read(path: Path) -> str:
    """A text file, packed or not."""
    return (gzip.open(path, "rt") if path.suffix == ".gz" else path.open()).read()


def read_pods(path: Path) -> list[Pod]:
    """The pods of the trace, in its order."""
    pods = []
    for row in csv.DictReader(read(path).splitlines()):
        gpus = float(row["gpus"])
        milli = round(1000 * gpus) if 0 < gpus < 1 else 1000
        pods.append(Pod(int(row["cpu_milli"]), int(row["memory_mib"]), 1 if 0 < gpus < 1 else int(gpus), milli))
    return pods


def arrivals(pods: list[Pod], ask_milli: float, seed: int) -> list[Pod]:
    """All of the trace and as many more drawn from it as ask for so much together, in random order."""
    dice = np.random.default_rng(seed)
    chosen, asked = list(pods), sum(pod.gpus * pod.milli for pod in pods)
    while asked < ask_milli:
        pod = pods[dice.integers(len(pods))]
        chosen.append(pod)
        asked += pod.gpus * pod.milli
    return [chosen[at] for at in dice.permutation(len(chosen))]


class Fleet:
    """Nodes as arrays, for the two ways that are not the scheduler's."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.cpu = np.array([node.cpu_milli for node in nodes], float)
        self.memory = np.array([node.memory_bytes or 0 for node in nodes], float) / MIB
        self.left = np.zeros((len(nodes), max(node.gpus for node in nodes)))
        for at, node in enumerate(nodes):
            self.left[at, : node.gpus] = 1000

    def room(self, pod: Pod) -> Any:
        """Nodes that hold a pod."""
        enough = (self.cpu >= pod.cpu_milli) & (self.memory >= pod.memory_mib)
        return np.flatnonzero(enough & ((self.left >= pod.milli).sum(axis=1) >= pod.gpus))

    def take(self, pod: Pod, node: int, gpus: Any) -> None:
        """Put a pod there."""
        self.cpu[node] -= pod.cpu_milli
        self.memory[node] -= pod.memory_mib
        self.left[node, gpus[: pod.gpus]] -= pod.milli


def by_chance(nodes: tuple[Node, ...], stream: list[Pod], seed: int) -> int:
    """Any node that holds it, any of its GPUs; thousandths of GPUs allocated."""
    fleet, dice, allocated = Fleet(nodes), np.random.default_rng((seed, 1)), 0
    for pod in stream:
        room = fleet.room(pod)
        if len(room):
            node = int(dice.choice(room))
            fleet.take(pod, node, dice.permutation(np.flatnonzero(fleet.left[node] >= pod.milli)))
            allocated += pod.gpus * pod.milli
    return allocated


def best_fit(nodes: tuple[Node, ...], stream: list[Pod], seed: int) -> int:
    """Where the least CPU and GPU is left, on the GPU with the least left; the seed does nothing."""
    fleet, allocated = Fleet(nodes), 0
    cpu_max, gpu_max = fleet.cpu.max(), fleet.left.sum(axis=1).max()
    for pod in stream:
        room = fleet.room(pod)
        if len(room):
            left = (fleet.cpu[room] - pod.cpu_milli) / cpu_max
            node = int(room[np.argmin(left + (fleet.left[room].sum(axis=1) - pod.gpus * pod.milli) / gpu_max)])
            gpus = np.flatnonzero(fleet.left[node] >= pod.milli)
            fleet.take(pod, node, gpus[np.argsort(fleet.left[node, gpus], kind="stable")])
            allocated += pod.gpus * pod.milli
    return allocated


def scheduled(
    nodes: tuple[Node, ...], stream: list[Pod], seed: int, *, packing: Packing, known: list[Pod] | None = None
) -> int:
    """Through the scheduler's index; the seed does nothing."""
    index, by_name = FreeIndex(), {node.name: node for node in nodes}
    used = dict.fromkeys(by_name, Used())
    for name, node in by_name.items():
        index.put(name, entry_of(node, used[name]))
    if known is not None:
        index.mix.learnt = ranked((ask_of(pod.job(0)), times) for pod, times in Counter(known).items())
    allocated, kinds = 0, tuple(index.kinds)
    for number, pod in enumerate(stream):
        job = pod.job(number)
        if known is None:
            index.mix.seen(job, number)
        for lease in place(index, job, pools(job, kinds), packing=packing) or ():
            used[lease.node] = used[lease.node].plus(lease, job)
            index.put(lease.node, entry_of(by_name[lease.node], used[lease.node]))
            allocated += lease.gpu_milli
    return allocated


Way = Callable[[tuple[Node, ...], list[Pod], int], int]


def ways(pods: list[Pod]) -> dict[str, Way]:
    """How nodes are chosen."""
    return {
        "random": by_chance,
        "best fit": best_fit,
        "FGD, known": partial(scheduled, packing="fgd", known=pods),
        "FGD, learns": partial(scheduled, packing="fgd"),
        "mix, learns (default)": partial(scheduled, packing="mix"),
    }


def one_seed(pods_path: Path, nodes_path: Path, asked: float, seed: int) -> dict[str, tuple[float, float]]:
    """Per cent of the GPUs allocated, and CPU milliseconds a pod, of each way."""
    pods, nodes = read_pods(pods_path), parse_cluster(read(nodes_path), source=str(nodes_path))
    gpus = sum(node.gpus for node in nodes)
    stream = arrivals(pods, 1000 * gpus * asked, seed)
    found = {}
    for name, way in ways(pods).items():
        began = time.process_time()
        allocated = way(nodes, stream, seed)
        found[name] = (100 * allocated / (1000 * gpus), 1000 * (time.process_time() - began) / len(stream))
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pods", type=Path)
    parser.add_argument("nodes", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--asked", type=float, default=1.3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with ProcessPoolExecutor(given.processes) as pool:
        seeds = list(pool.map(partial(one_seed, given.pods, given.nodes, given.asked), range(given.seeds)))
    peer = [seed["FGD, known"][0] for seed in seeds]
    rows = []
    for name in seeds[0]:
        shares = [seed[name][0] for seed in seeds]
        ahead = [share - other for share, other in zip(shares, peer, strict=True)]
        rows.append(
            {
                "way": name,
                "allocated_percent": round(statistics.fmean(shares), 2),
                "spread": round(statistics.pstdev(shares), 2),
                "ahead_of_fgd": round(statistics.fmean(ahead), 2),
                "ahead_error": round(statistics.stdev(ahead) / len(ahead) ** 0.5, 2) if len(ahead) > 1 else None,
                "better_in": sum(each > 0 for each in ahead),
                "cpu_ms_per_pod": round(statistics.fmean(seed[name][1] for seed in seeds), 2),
            }
        )
    if given.json:
        print(
            json.dumps({"python": platform.python_version(), "seeds": given.seeds, "asked": given.asked, "rows": rows})
        )
        return
    print(f"{'way':24}{'allocated':>11}{'spread':>8}{'ahead of FGD':>18}{'better in':>11}{'ms a pod':>10}")
    for row in rows:
        error = "" if row["ahead_error"] is None else f" ± {row['ahead_error']:.2f}"
        print(
            f"{row['way']:24}{row['allocated_percent']:>9.2f} %{row['spread']:>8.2f}"
            f"{row['ahead_of_fgd']:>+10.2f}{error:8}{row['better_in']:>8}/{given.seeds}{row['cpu_ms_per_pod']:>10.2f}"
        )


if __name__ == "__main__":
    main()

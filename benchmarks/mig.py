"""How much of a cluster's GPUs is allocated if parts of GPUs are MIG instances, beside fractions of any size.

python benchmarks/mig.py PODS NODES [--seeds 5] [--asked 1.3] [--histories 100000] [--json]

The experiment of `packing.py`: pods of Alibaba's openb trace in random order, resampled until they ask for 130 % of the
GPUs, none leaves. A pod that asks for a part of a GPU gets the smallest profile of the catalogue whose compute and
memory slices hold that part; every GPU is cut as an H100 is, whole while it has no instance. "FGD" packs the same parts
as fractions, as the trace has them and rounded up to the profile's memory slices: the second differs from MIG by the
legal starts alone. `asked` counts what the pods ask for, `held` what is leased for them.

Two bounds say what no packing can mend: `asked` if every GPU were full of the same pods, each rounded to its profile;
and the fewest GPUs that hold the instances that were placed, wherever they stand, beside the GPUs that were cut.

Histories: instances of random profiles come and go on one to four GPUs until none comes any more; each place is checked
against rules written here anew (starts, overlaps, the most of a profile, compute slices).
"""

import argparse
import json
import math
import platform
import random
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cordee.events import Job, Node
from cordee.hardware.load import load_catalogue
from cordee.hardware.mig import MigTable
from cordee.hardware.topology import parse_cluster
from cordee.ids import JobId
from cordee.schedule.placement.entry import Used, entry_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import place, pools
from packing import Pod, arrivals, read, read_pods

WAYS = ("FGD, fractions", "FGD, fractions of profiles", "MIG, legal starts")


def table_of(gpu: str) -> MigTable:
    """Return the profiles of a GPU of the catalogue."""
    table = load_catalogue().find_gpu(gpu).mig
    assert table is not None, f"{gpu} has no MIG profiles"
    return table


def profile_for(table: MigTable, milli: int) -> tuple[str, int]:
    """Return the smallest profile that holds a part of a GPU, and the thousandths that it counts as."""
    for facts in sorted(table.profiles, key=lambda each: (each.placed.size, each.placed.compute)):
        placed = facts.placed
        if "+me" in placed.name:
            continue
        if placed.size * 1000 >= milli * table.slices and placed.compute * 1000 >= milli * table.compute:
            return placed.name, 1000 * placed.size // table.slices
    raise AssertionError(f"no profile holds {milli} thousandths of a GPU")


def rounded_alone(stream: list[Pod], table: MigTable) -> float:
    """Return the per cent of full GPUs that pods ask for if each part is rounded to its profile."""
    held = sum(pod.gpus * (pod.milli if pod.milli >= 1000 else profile_for(table, pod.milli)[1]) for pod in stream)
    return 100 * sum(pod.gpus * pod.milli for pod in stream) / held


def fewest(placed: Counter[str], table: MigTable) -> int:
    """Return a number of GPUs below which no layout holds instances: by memory, by compute, and by starts alone.

    A profile that begins at one place only has a GPU each; one of half the slices that begins at two fills their other
    halves, and then two go on a GPU.
    """
    rules = {each.name: each.placed for each in table.profiles}
    memory = sum(rules[name].size * count for name, count in placed.items()) / table.slices
    compute = sum(rules[name].compute * count for name, count in placed.items()) / table.compute
    halves = {name: count for name, count in placed.items() if 2 * rules[name].size == table.slices}
    first = sum(count for name, count in halves.items() if len(rules[name].starts) == 1)
    second = sum(count for name, count in halves.items() if len(rules[name].starts) == 2)
    return math.ceil(max(memory, compute, first + max(0, second - first) / 2))


class Result(NamedTuple):
    """Per cent of the GPUs, CPU milliseconds a pod, GPUs that were cut and the fewest that would do."""

    asked: float
    held: float
    cpu_ms: float
    cut: int
    fewest: int


def play(way: str, nodes: tuple[Node, ...], stream: list[Pod], table: MigTable) -> Result:
    """Place the pods in their order through the scheduler's index."""
    mig = way.startswith("MIG")
    if mig:
        nodes = tuple(replace(node, mig=table.gpus(tuple(range(node.gpus)), switched=True)) for node in nodes)
    index, by_name = FreeIndex(), {node.name: node for node in nodes}
    used = dict.fromkeys(by_name, Used())
    for name, node in by_name.items():
        index.put(name, entry_of(node, used[name]))
    asked = held = 0
    placed: Counter[str] = Counter()
    cut: set[tuple[str, int]] = set()
    kinds, began = tuple(index.kinds), time.process_time()
    for number, pod in enumerate(stream):
        job: Job = pod.job(number)
        if job.gpu_milli < 1000 and way != WAYS[0]:
            profile, milli = profile_for(table, job.gpu_milli)
            job = replace(job, gpu_milli=milli, mig=profile if mig else None)
        index.mix.seen(job, number)
        for lease in place(index, job, pools(job, kinds), packing="fgd") or ():
            used[lease.node] = used[lease.node].plus(lease, job)
            index.put(lease.node, entry_of(by_name[lease.node], used[lease.node]))
            asked += pod.gpus * pod.milli
            held += lease.gpu_milli
            if lease.instance is not None:
                placed[lease.instance.profile] += 1
                cut.add((lease.node, lease.gpus[0]))
    gpus = sum(node.gpus for node in nodes)
    cpu_ms = 1000 * (time.process_time() - began) / len(stream)
    return Result(asked / gpus / 10, held / gpus / 10, cpu_ms, len(cut), fewest(placed, table))


def legal(table: MigTable, taken: dict[int, tuple[str, int, int]]) -> bool:
    """Return whether instances (profile, start, size) may stand on one GPU together, by rules of its own."""
    rules = {each.name: each.placed for each in table.profiles}
    slices: set[int] = set()
    compute = 0
    for profile, start, size in taken.values():
        rule = rules[profile]
        cells = set(range(start, start + size))
        if size != rule.size or start not in rule.starts or cells & slices or max(cells) >= table.slices:
            return False
        slices |= cells
        compute += rule.compute
    counts = [sum(each[0] == name for each in taken.values()) for name in rules]
    few = all(count <= rules[name].instances for name, count in zip(rules, counts, strict=True))
    return few and compute <= table.compute


def histories(table: MigTable, count: int, seed: int) -> dict[str, int]:
    """Play random histories; return the placements, the illegal ones, and refusals in spite of a place."""
    dice, found = random.Random(seed), {"placements": 0, "illegal": 0, "refused_in_vain": 0}
    profiles = [(each.name, 1000 * each.placed.size // table.slices, each.placed) for each in table.profiles]
    kinds = None
    for _ in range(count):
        node = Node(name="n", epoch=1, gpu_name="G", gpus=4, mig=table.gpus(tuple(range(dice.randint(1, 4)))))
        index, used = FreeIndex(), Used()
        boards: dict[int, dict[int, tuple[str, int, int]]] = {}
        index.put("n", entry_of(node, used))
        kinds, live = tuple(index.kinds), []
        for number in range(dice.randint(4, 24)):
            if live and dice.random() < 0.4:
                lease, job = live.pop(dice.randrange(len(live)))
                used = used.minus(lease, job)
                del boards[lease.gpus[0]][lease.instance.start]
                index.put("n", entry_of(node, used))
                continue
            name, milli, rule = dice.choice(profiles)
            job = Job(job_id=JobId(f"j{number}"), name="j", owner="me", gpus=1, gpu_milli=milli, mig=name)
            leases = place(index, job, pools(job, kinds))
            if leases is None:
                found["refused_in_vain"] += any(
                    legal(table, boards.get(gpu, {}) | {100: (name, start, rule.size)})
                    for gpu in node.mig.gpus
                    for start in rule.starts
                )
                continue
            (lease,) = leases
            at = boards.setdefault(lease.gpus[0], {})
            found["placements"] += 1
            illegal = lease.instance.start in at or lease.gpus[0] not in node.mig.gpus
            at[lease.instance.start] = (name, lease.instance.start, lease.instance.size)
            found["illegal"] += illegal or not legal(table, at)
            used = used.plus(lease, job)
            index.put("n", entry_of(node, used))
            live.append((lease, job))
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pods", type=Path)
    parser.add_argument("nodes", type=Path)
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--asked", type=float, default=1.3)
    parser.add_argument("--histories", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    table = table_of(given.gpu)
    pods, nodes = read_pods(given.pods), parse_cluster(read(given.nodes), source=str(given.nodes))
    gpus = sum(node.gpus for node in nodes)
    results: dict[str, list[Result]] = {way: [] for way in WAYS}
    bounds = []
    for seed in range(given.seeds):
        stream = arrivals(pods, 1000 * gpus * given.asked, seed)
        bounds.append(rounded_alone(stream, table))
        for way in WAYS:
            results[way].append(play(way, nodes, stream, table))
    began = time.process_time()
    random_histories = histories(table, given.histories, 0)
    cpu_s = time.process_time() - began
    rows = [
        {"way": way}
        | {name: round(statistics.fmean(getattr(each, name) for each in found), 2) for name in Result._fields}
        | {"spread_of_held": round(statistics.pstdev([each.held for each in found]), 2)}
        for way, found in results.items()
        if found
    ]
    if given.json:
        facts = {"python": platform.python_version(), "seeds": given.seeds, "histories": given.histories}
        bound = {"rounded_alone": round(statistics.fmean(bounds), 2)}
        print(json.dumps(facts | random_histories | bound | {"rows": rows}))
        return
    print(f"{'way':28}{'asked':>10}{'held':>10}{'spread':>8}{'ms a pod':>10}")
    for row in rows:
        print(
            f"{row['way']:28}{row['asked']:>8.2f} %{row['held']:>8.2f} %"
            f"{row['spread_of_held']:>8.2f}{row['cpu_ms']:>10.2f}"
        )
    print(f"asked if every GPU were full, by rounding to profiles alone: {statistics.fmean(bounds):.2f} %")
    print(f"GPUs cut: {rows[-1]['cut']:.0f}; their instances need {rows[-1]['fewest']:.0f} at least")
    shown = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in random_histories.items())
    print(f"{given.histories:,} histories: {shown} ({cpu_s:.0f} CPU s)")


if __name__ == "__main__":
    main()

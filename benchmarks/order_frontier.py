"""The order of jobs over many clusters: the mean JCT against the longest time away, for each patience and other orders.

python benchmarks/order_frontier.py [TRACES_FOLDER] [--jobs 400] [--only NAME,...] [--clusters PART,...]
    [--keep FILE] [--svg FILE]

Clusters of nodes of 8 GPUs: synthetic ones (jobs of minutes or of days, light and heavy tails, 8 to 128 GPUs, load 0.5
to 2), and each virtual cluster of each trace of a folder, on as many nodes as make the load at most 0.8 and 1.2. The
scheduler is the product's own, with the costs of `scheduler.py`; FIFO, EASY, SJF and SRSF know, or need not know, run
times. Gavel's and Tiresias' rules are those of `order_pool.py`, a pool of as many GPUs, over 2D-LAS in that pool.

Figures are kept in the file for each cluster and order as they come; those that it holds are not measured again, so a
run may be stopped, or shared by several processes that take other clusters. Times are CPU seconds.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from cordee.simulate.policies import NamedPolicy, named_policies
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import Tally
from cordee.simulate.workload import Costs, submissions
from cordee.view.chart import INKS, Axis, ChartLine, Mark, chart_svg
from cordee.view.frame import Frame
from order_pool import POOLS
from scheduler import nodes, one
from trace_clusters import VirtualCluster, folder_of_traces, virtual_clusters

PATIENCES = ("0.1", "0.25", "0.5", "1", "2", "4")
ORDERS = ("fifo", "easy", "sjf", "srsf", "2d-las", *(f"patience {each}" for each in PATIENCES), "never overdue")
"""Of the product; pools are named after their order."""
IN_A_POOL = tuple(f"{name} (pool)" for name in POOLS)
FIGURES = (("jct_s", 0.0), ("slowdown_p99", 1.0), ("away_s_max", 600.0), ("lost_gpu_hours", 1.0))
"""What is compared; less than this is as good."""

Found = dict[str, dict[str, dict[str, float]]]
"""Figures by cluster and order."""


def policy(order: str) -> NamedPolicy:
    """Return the product's policy for an order."""
    if order == "never overdue":
        named = policy("cordee")
        return replace(named, policy=replace(named.policy, patience=None))
    return named_policies([order.replace("patience ", "cordee:")])[0]


def synthetic(count: int) -> Iterator[tuple[VirtualCluster, int]]:
    """Yield jobs of minutes and of hours on small and large clusters, with light and heavy tails, over loads."""
    for median_s, sigma, gpus in ((120, 1.0, 8), (120, 2.2, 64), (1800, 2.2, 64), (7200, 1.5, 128), (600, 2.8, 128)):
        weights = ((1, 5), (2, 1), (4, 1), (8, 2), (16, 1), (32, 1), (64, 1))
        sizes = tuple((size, weight) for size, weight in weights if size <= gpus // 2)
        for load in (0.5, 0.8, 1.0, 1.3, 2.0):
            drawn = Synthetic(jobs=count, median_s=median_s, sigma=sigma, sizes=sizes).at_load(gpus, load, seed=1)
            name = f"{median_s} s/sigma {sigma}/{gpus} GPUs/load {load}"
            yield VirtualCluster(name, list(drawn.draw(1)), load * gpus), gpus // 8


def traced(folder: Path, count: int) -> Iterator[tuple[VirtualCluster, int]]:
    """Yield the virtual clusters of each trace in a folder, on as many nodes as make the load 0.8 and 1.2."""
    for each in virtual_clusters(folder, count):
        pooled = [replace(job, vc="", gpu_name=None) for job in each.jobs]
        for nodes_count in dict.fromkeys(map(each.nodes, (0.8, 1.2))):
            load = each.asked_gpus / nodes_count / 8
            yield replace(each, name=f"{each.name}/{nodes_count} nodes/load {load:.2f}", jobs=pooled), nodes_count


def measured(cluster: VirtualCluster, nodes_count: int, order: str) -> dict[str, float]:
    """Return the figures of one order on one cluster."""
    if order in IN_A_POOL:
        gpus = nodes_count * 8
        jobs = [(job.submit_us / 1e6, math.ceil(job.gpus), job.duration_us / 1e6) for job in cluster.jobs]
        return POOLS[order.removesuffix(" (pool)")](jobs, gpus).run()
    named = policy(order)
    tally = Tally(cluster.name)
    given = submissions(cluster.jobs, nodes(nodes_count), tally, costs=Costs(), estimates=named.estimates)
    row = one(order, named.policy, given, nodes_count)
    return {figure: row[figure] for figure, _ in FIGURES}


def all_measured(args: argparse.Namespace) -> Found:
    """Measure what the file does not hold yet; return the figures of all clusters and orders that were asked for."""
    kept = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep and args.keep.exists() else []
    known = {(row["cluster"], row["order"]): row["figures"] for row in kept}
    clusters = [*synthetic(args.jobs), *(traced(args.traces, args.jobs) if args.traces else ())]
    asked = [each for each in clusters if any(part in each[0].name for part in args.clusters.split(","))]
    found: Found = defaultdict(dict)
    for number, (cluster, nodes_count) in enumerate(asked, 1):
        for order in args.only.split(","):
            if (cluster.name, order) not in known:
                known[cluster.name, order] = measured(cluster, nodes_count, order)
                if args.keep:
                    row: dict[str, Any] = {"cluster": cluster.name, "order": order}
                    with args.keep.open("a") as file:
                        file.write(json.dumps(row | {"figures": known[cluster.name, order]}) + "\n")
            found[cluster.name][order] = known[cluster.name, order]
        print(f"{number} of {len(asked)}, {time.process_time():.0f} CPU s: {cluster.name}", file=sys.stderr, flush=True)
    return found


def ratios(found: Found, order: str, figure: str) -> list[float]:
    """Return an order's figure over that of 2D-LAS on each cluster."""
    base, least = "2d-las (pool)" if order in IN_A_POOL else "2d-las", dict(FIGURES)[figure]
    return [max(least, rows[order][figure]) / max(least, rows[base][figure]) for rows in found.values()]


def table(found: Found, orders: list[str]) -> Iterator[str]:
    """Yield the lines of a table: each order over 2D-LAS."""
    yield "| order | mean JCT | p99 slowdown | longest time away | GPU-hours lost |"
    yield "|---|---|---|---|---|"
    for order in orders:
        cells = []
        for figure, _ in FIGURES:
            over = ratios(found, order, figure)
            cells.append(f"{geometric_mean(over):.2f} / {np.quantile(over, 0.9):.2f} / {max(over):.2f}")
        yield f"| {order} | {' | '.join(cells)} |"


def picture(found: Found, orders: list[str]) -> str:
    """Return the frontier: mean JCT by longest time away, over 2D-LAS, geometric means over all clusters."""
    mean = lambda order, figure: geometric_mean(ratios(found, order, figure))  # noqa: E731
    points = {
        order: (mean(order, "away_s_max"), mean(order, "jct_s")) for order in orders if order != "fifo"
    }  # far off
    knob = [order for order in points if order.startswith("patience")]
    low_x, low_y = (math.floor(20 * min(each) - 0.5) / 20 for each in zip(*points.values(), strict=True))
    lines = [ChartLine("", [points[order] for order in knob])]
    lines += [ChartLine("", [point]) for order, point in points.items() if order not in knob]
    better = ChartLine("", [(low_x, 1), (1, 1), (1, low_y)], dashed=True)  # than 2D-LAS in both
    lines.insert(INKS.index("var(--soft)"), better)
    short = lambda order: order.removeprefix("" if order == knob[0] else "patience ")  # noqa: E731
    marks = [Mark(*point, short(order).removesuffix(" (pool)")) for order, point in points.items()]
    write = lambda value: f"{value:.2g}"  # noqa: E731
    x = Axis("longest time away, over 2D-LAS", write, log=True, ticks=(0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4))
    y = Axis("mean JCT, over 2D-LAS", write, log=True, ticks=(0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 2))
    return chart_svg(lines, x, y, marks, label="The frontier of orders", frame=Frame("wide", 960, 64, 24, 480))


def main() -> None:
    """Print the table of ratios, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=folder_of_traces, nargs="?")
    parser.add_argument("--jobs", type=int, default=400, help="of a cluster at most")
    parser.add_argument("--only", default=",".join((*ORDERS, *IN_A_POOL)))
    parser.add_argument("--clusters", default="", help="those whose names hold one of these; none: all")
    parser.add_argument("--keep", type=Path, help="the file that keeps the figures")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    found = all_measured(args)
    orders = [order for order in args.only.split(",") if order != "2d-las (pool)"]
    print(
        f"over 2D-LAS, {len(found)} clusters: geometric mean / 90th percentile / most\n",
        *table(found, orders),
        sep="\n",
    )
    if args.svg:
        args.svg.write_text(picture(found, orders))


if __name__ == "__main__":
    main()

"""The simulated cluster and its outages: from a text such as `80x8`, from files, or random from a seed.

`docs/how-to/simulate.md` quotes failure and reclaim rates with their sources; no rate is built in.
"""

import csv
import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cordee.errors import InputError
from cordee.events import Capacity, Node
from cordee.hardware.topology import parse_cluster
from cordee.simulate.traces.job import open_text
from cordee.simulate.world import Outage
from cordee.units import US_PER_S

_DAY_US = 86_400 * US_PER_S


def cluster(text: str, *, micro_usd_per_gpu_hour: int = 0, price_source: str = "no price is known") -> tuple[Node, ...]:
    """Return the nodes of `80x8xH100`, `2x40x8` (racks first) or several such joined by `+`, or of a file of nodes.

    >>> [node.name for node in cluster("2x8xH100+1x4xL4")]
    ['node-0000', 'node-0001', 'node-0002']

    Raises:
        InputError: the text is none of these.
    """
    path = Path(text)
    if path.suffix in (".csv", ".gz", ".yaml", ".yml"):
        with open_text(path) as file:
            nodes = parse_cluster(file.read(), source=text)
    else:
        nodes = parse_cluster(text)
    price = {"micro_usd_per_gpu_hour": micro_usd_per_gpu_hour, "price_source": price_source}
    return tuple(node if node.micro_usd_per_gpu_hour else replace(node, **price) for node in nodes)  # type: ignore[arg-type]


def vc_clusters(path: Path) -> dict[str, int]:
    """Return the number of nodes of each virtual cluster, from a table of names and numbers.

    Raises:
        InputError: a row is something else.
    """
    found: dict[str, int] = {}
    with open_text(path) as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if number == 1 and not (len(row) == 2 and row[1].strip().isdecimal()):
                continue
            if len(row) != 2 or not row[1].strip().isdecimal():
                raise InputError(f"{path}, line {number}: not a virtual cluster and its number of nodes")
            found[row[0].strip()] = int(row[1])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageRate:
    """The rate of random outages.

    Attributes:
        per_node_day: the mean number of outages of a node in a day of being up.
        back_us: how long an outage lasts.
        notice_us: how long before it the node gets notice.
    """

    per_node_day: float
    back_us: int
    notice_us: int = 0
    why: str = "the node failed"


def random_outages(nodes: Sequence[Node], rate: OutageRate, seed: int, start_us: int = 0) -> Iterator[Outage]:
    """Yield outages without end, in the order in which they begin."""
    rng = random.Random(f"{seed}/{rate.why}")
    rate_per_us = rate.per_node_day / _DAY_US
    heap: list[tuple[int, str]] = []
    for node in nodes:
        heapq.heappush(heap, (start_us + rate.notice_us + _wait_us(rng, rate_per_us), node.name))
    while heap:
        at_us, name = heapq.heappop(heap)
        yield Outage(
            at_us=at_us, nodes=(name,), notice_us=rate.notice_us, back_us=rate.back_us, why=rate.why
        )  # fmt: skip
        heapq.heappush(heap, (at_us + rate.back_us + rate.notice_us + _wait_us(rng, rate_per_us), name))


def _wait_us(rng: random.Random, rate_per_us: float) -> int:
    return max(1, round(rng.expovariate(rate_per_us)))


def spot_series(path: Path, nodes: Sequence[Node], notice_us: int = 0) -> tuple[tuple[Node, ...], list[Outage]]:
    """Return nodes that come and go by a series of `ms,op,node` (as github.com/uclasystem/bamboo has them).

    Each name of the series takes one of ours.

    Returns:
        The nodes, those of the series as spot capacity, and when they are away. Names beyond our nodes are left out.

    Raises:
        InputError: a row is something else.
    """
    names: dict[str, str] = {}
    away: dict[str, int] = {}
    outages: list[Outage] = []
    with open_text(path) as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) != 3 or row[1] not in ("add", "remove") or not row[0].strip().isdecimal():
                raise InputError(f"{path}, line {number}: not ms,add|remove,node", hint="see docs/how-to/simulate.md")
            if row[2] not in names:
                if len(names) == len(nodes):
                    continue
                name = names[row[2]] = nodes[len(names)].name
                if row[1] == "add" and int(row[0]) > 0:
                    away[name] = 0  # it was not there from the start
            name, at_us = names[row[2]], int(row[0]) * 1000
            if row[1] == "remove":
                away.setdefault(name, at_us)
            elif name in away:
                gone_us = away.pop(name)
                outages.append(_outage(name, gone_us, notice_us, at_us - gone_us))
    outages += [_outage(name, at_us, notice_us, None) for name, at_us in away.items()]
    spot = set(names.values())
    return (
        tuple(replace(node, capacity=Capacity.SPOT) if node.name in spot else node for node in nodes),
        sorted(outages, key=lambda each: (each.begin_us, each.nodes)),
    )


def _outage(name: str, at_us: int, notice_us: int, back_us: int | None) -> Outage:
    return Outage(at_us=at_us, nodes=(name,), notice_us=min(notice_us, at_us), back_us=back_us)


def merged(*outages: Iterator[Outage]) -> Iterator[Outage]:
    """Merge outages of several causes."""
    return heapq.merge(*outages, key=lambda each: each.begin_us)

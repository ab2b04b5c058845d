"""The simulated cluster and what becomes of its nodes: from a word such as `80x8`, from files, or by chance from a
seed.

Failure and reclaim rates are what `docs/how-to/simulate.md` quotes with their sources; nothing here has one built in.
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
    """The nodes of `80x8xH100`, `2x40x8` (racks first) or several such joined by `+`, or of a file of nodes.

    >>> [node.name for node in cluster("2x8xH100+1x4xL4")]
    ['node-0000', 'node-0001', 'node-0002']

    Raises:
        InputError: it is none of these.
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
    """Nodes of each virtual cluster, from a table whose rows are a name and a number.

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
class Chance:
    """How often nodes go, by chance.

    Attributes:
        per_node_day: how often a node goes in a day of being there.
        back_us: how long it stays away.
        notice_us: how long before it goes it is told.
    """

    per_node_day: float
    back_us: int
    notice_us: int = 0
    why: str = "the node failed"


def by_chance(nodes: Sequence[Node], chance: Chance, seed: int, start_us: int = 0) -> Iterator[Outage]:
    """Node after node goes and comes back, without end, in the order in which it is told."""
    dice = random.Random(f"{seed}/{chance.why}")
    rate_per_us = chance.per_node_day / _DAY_US
    heap: list[tuple[int, str]] = []
    for node in nodes:
        heapq.heappush(heap, (start_us + chance.notice_us + _wait_us(dice, rate_per_us), node.name))
    while heap:
        at_us, name = heapq.heappop(heap)
        yield Outage(
            at_us=at_us, nodes=(name,), notice_us=chance.notice_us, back_us=chance.back_us, why=chance.why
        )  # fmt: skip
        heapq.heappush(heap, (at_us + chance.back_us + chance.notice_us + _wait_us(dice, rate_per_us), name))


def _wait_us(dice: random.Random, rate_per_us: float) -> int:
    return max(1, round(dice.expovariate(rate_per_us)))


def spot_series(path: Path, nodes: Sequence[Node], notice_us: int = 0) -> tuple[tuple[Node, ...], list[Outage]]:
    """Nodes that come and go as a series of `ms,op,node` tells (as github.com/uclasystem/bamboo has them).

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
                outages.append(_taken(name, gone_us, notice_us, at_us - gone_us))
    outages += [_taken(name, at_us, notice_us, None) for name, at_us in away.items()]
    spot = set(names.values())
    return (
        tuple(replace(node, capacity=Capacity.SPOT) if node.name in spot else node for node in nodes),
        sorted(outages, key=lambda each: (each.begin_us, each.nodes)),
    )


def _taken(name: str, at_us: int, notice_us: int, back_us: int | None) -> Outage:
    return Outage(at_us=at_us, nodes=(name,), notice_us=min(notice_us, at_us), back_us=back_us)


def merged(*outages: Iterator[Outage]) -> Iterator[Outage]:
    """Several causes at once."""
    return heapq.merge(*outages, key=lambda each: each.begin_us)

"""The simulated cluster and its outages: from a text such as `80x8`, from files, or random from a seed.

`docs/how-to/simulate.md` quotes failure and reclaim rates with their sources; no rate is built in.
"""

import csv
import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from cordee.errors import CatalogueError, InputError
from cordee.events import Capacity, Node
from cordee.hardware.catalog import Catalogue
from cordee.hardware.topology import parse_cluster
from cordee.simulate.traces.job import open_text
from cordee.simulate.world import Outage
from cordee.units import US_PER_S

_DAY_US = 86_400 * US_PER_S
_RECLAIMED = "reclaimed by the cloud"


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


def cut_by_jobs(nodes: Sequence[Node], catalogue: Catalogue) -> tuple[Node, ...]:
    """Return the nodes with GPUs that are cut into MIG instances as jobs need them, and whole again, where they can be.

    They are as under agents whose label is `mig=switched`.
    """
    found = []
    for node in nodes:
        try:
            table = catalogue.find_gpu(node.gpu_name).mig
        except CatalogueError:
            table = None
        cuts = None if table is None else table.gpus(tuple(range(node.gpus)), switched=True)
        found.append(replace(node, mig=cuts))
    return tuple(found)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSeries:
    """A series of spot nodes that come and go; it begins again at its end.

    Attributes:
        period_us: the length of the series.
        late: nodes that are not there from the start, and when they come.
        away: nodes with the time at which each goes, and that at which it is back, by the first time.
        notice_us: how long before it goes a node gets notice.
    """

    period_us: int
    late: tuple[tuple[str, int], ...]
    away: tuple[tuple[str, int, int], ...]
    notice_us: int

    def outages(self, nodes: Sequence[Node], start_us: int = 0) -> Iterator[Outage]:
        """Yield the outages of those nodes that are in the series, which begins at `start_us`, without end."""
        here = {node.name for node in nodes}
        for name, back_us in self.late:
            if name in here:
                yield Outage(at_us=start_us, nodes=(name,), back_us=back_us, why=_RECLAIMED)
        away = sorted((gone_us, back_us, name) for name, gone_us, back_us in self.away if name in here)
        for first_us in count(0, self.period_us) if away and self.period_us else ():
            for gone_us, back_us, name in away:
                yield Outage(
                    at_us=start_us + first_us + gone_us,
                    nodes=(name,),
                    notice_us=min(self.notice_us, first_us + gone_us),
                    back_us=back_us - gone_us,
                    why=_RECLAIMED,
                )


def spot_series(path: Path, nodes: Sequence[Node], notice_us: int = 0) -> tuple[tuple[Node, ...], SpotSeries]:
    """Return nodes that come and go by a series of `ms,op,node` (as github.com/uclasystem/bamboo has them).

    A name that is added takes the first of our nodes that no other name has; without one it waits until a node is free.
    So as many of our nodes are up as names of the series, or all of them if those are more.

    Returns:
        The nodes, those that a name takes as spot capacity, and the series.

    Raises:
        InputError: a row is something else, or the series has no node.
    """
    rows = _rows(path)
    first: dict[str, str] = {}
    for _, op, name in rows:
        first.setdefault(name, op)
    rows = [(0, "add", name) for name, op in first.items() if op == "remove"] + rows  # they were there from the start
    free, gone_us = list(range(len(nodes))), dict.fromkeys(range(len(nodes)), 0)
    taken: dict[str, int] = {}
    waiting: dict[str, None] = {}
    came_us: dict[int, int] = {}  # for the first time
    away: list[tuple[int, int, int]] = []
    for at_us, op, name in rows:
        if op == "remove":
            waiting.pop(name, None)
            if name in taken:
                gone_us[taken[name]] = at_us
                heapq.heappush(free, taken.pop(name))
        elif name not in taken:
            waiting[name] = None
        while free and waiting:
            slot = heapq.heappop(free)
            longest = next(iter(waiting))
            del waiting[longest]
            taken[longest] = slot
            if slot in came_us:
                away.append((slot, gone_us[slot], at_us))
            came_us.setdefault(slot, at_us)
    period_us = rows[-1][0]
    up = set(taken.values())
    for slot, at_us in came_us.items():  # at the end each becomes as it was at the start
        if slot not in up or at_us:
            away.append((slot, period_us if slot in up else gone_us[slot], period_us + at_us))
    series = SpotSeries(
        period_us=period_us,
        late=tuple((nodes[slot].name, at_us) for slot, at_us in came_us.items() if at_us),
        away=tuple((nodes[slot].name, from_us, to_us) for slot, from_us, to_us in away),
        notice_us=notice_us,
    )
    spot = {nodes[slot].name for slot in came_us}
    return tuple(replace(node, capacity=Capacity.SPOT) if node.name in spot else node for node in nodes), series


def _rows(path: Path) -> list[tuple[int, str, str]]:
    rows = []
    with open_text(path) as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) != 3 or row[1] not in ("add", "remove") or not row[0].strip().isdecimal():
                raise InputError(f"{path}, line {number}: not ms,add|remove,node", hint="see docs/how-to/simulate.md")
            rows.append((int(row[0]) * 1000, row[1], row[2]))
    if not rows:
        raise InputError(f"{path} has no row", hint="a series has rows ms,add|remove,node")
    return sorted(rows, key=lambda row: row[0])


def merged(*outages: Iterator[Outage]) -> Iterator[Outage]:
    """Merge outages of several causes."""
    return heapq.merge(*outages, key=lambda each: each.begin_us)

"""A cluster as a tree of domains: cluster > block > rack > node > island > GPUs.

An island is the set of GPUs that share the fast link. Where an island spans nodes (GB200 NVL72) it stands above them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from cordee.errors import InputError

DomainKind = Literal["cluster", "block", "rack", "island", "node"]


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where one node stands. `island` names the NVLink domain it shares with other nodes, if it does."""

    name: str
    gpus: int
    block: str = "block0"
    rack: str = "rack0"
    island: str | None = None


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain and what is inside it; `gpus` counts all GPUs below. A leaf's GPUs share the fast link."""

    kind: DomainKind
    name: str
    gpus: int
    children: tuple["Domain", ...] = ()

    def walk(self) -> Iterator["Domain"]:
        """This domain and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def of_kind(self, kind: DomainKind) -> tuple["Domain", ...]:
        """All domains of one kind, in order of the tree."""
        return tuple(domain for domain in self.walk() if domain.kind == kind)

    def gpu_names(self) -> tuple[str, ...]:
        """Every GPU as `node/index`, in order of the tree."""
        nodes = [domain for domain in self.walk() if domain.kind == "node"]
        return tuple(f"{node.name}/{index}" for node in nodes for index in range(node.gpus))

    def smallest_holding(self, gpus: int) -> "Domain | None":
        """The smallest domain with at least so many GPUs; the first in the tree's order among equals.

        >>> parse_cluster("2x4x8").smallest_holding(16).name
        'block0/rack0'
        """
        fitting = [domain for domain in self.walk() if domain.gpus >= gpus]
        return min(fitting, key=lambda domain: (domain.gpus, -_DEPTH[domain.kind])) if fitting else None


_DEPTH: dict[DomainKind, int] = {"cluster": 0, "block": 1, "rack": 2, "island": 3, "node": 4}


def cluster_of(places: Iterable[NodePlace], *, island_gpus: int | None = None) -> Domain:
    """The tree of these nodes. Nodes with more GPUs than `island_gpus` are divided into islands.

    >>> cluster_of([NodePlace("a", 8), NodePlace("b", 8, rack="rack1")]).gpus
    16
    """
    nodes = sorted(places, key=lambda place: (place.block, place.rack, place.island or "", _natural(place.name)))
    names = [node.name for node in nodes]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"two nodes have the name {repeated[0]!r}", hint="every node needs a name of its own")
    blocks = []
    for block, in_block in groupby(nodes, key=lambda node: node.block):
        racks = []
        for rack, in_rack in groupby(in_block, key=lambda node: node.rack):
            path = f"{block}/{rack}"
            racks.append(_parent("rack", path, _islands(path, list(in_rack), island_gpus)))
        blocks.append(_parent("block", block, racks))
    return _parent("cluster", "cluster", blocks)


def parse_cluster(text: str, *, gpus_per_island: int | None = None) -> Domain:
    """The regular cluster that `8x8` (nodes x GPUs), `2x4x8` (racks first) or `2x2x4x8` (blocks first) describes.

    A GPU's name may end it: `8x8xH100`.

    >>> parse_cluster("8x8xH100").gpus, len(parse_cluster("2x2x4x8").of_kind("node"))
    (64, 16)

    Raises:
        InputError: not such a description.
    """
    match = re.fullmatch(r"(\d+(?:x\d+){1,3})(?:x[A-Za-z][\w.-]*)?", text.strip())
    counts = [int(part) for part in match[1].split("x")] if match else []
    if not counts or min(counts) < 1:
        raise InputError(f"{text!r} is not a cluster", hint="write nodes x GPUs: 8x8xH100, or racks first: 2x4x8xH100")
    blocks, racks, nodes, gpus = [1] * (4 - len(counts)) + counts
    places = (
        NodePlace(f"node{(b * racks + r) * nodes + n}", gpus, f"block{b}", f"rack{r}")
        for b in range(blocks)
        for r in range(racks)
        for n in range(nodes)
    )
    return cluster_of(places, island_gpus=gpus_per_island)


def _islands(path: str, nodes: Sequence[NodePlace], island_gpus: int | None) -> list[Domain]:
    """The children of a rack: islands of several nodes, or plain nodes."""
    children = []
    for island, members in groupby(nodes, key=lambda node: node.island):
        leaves = [_node(member, island_gpus) for member in members]
        children += leaves if island is None else [_parent("island", f"{path}/{island}", leaves)]
    return children


def _node(place: NodePlace, island_gpus: int | None) -> Domain:
    if island_gpus is None or place.island is not None or place.gpus <= island_gpus:
        return Domain("node", place.name, place.gpus)
    starts = range(0, place.gpus, island_gpus)
    sizes = [min(island_gpus, place.gpus - start) for start in starts]
    islands = tuple(Domain("island", f"{place.name}/island{i}", size) for i, size in enumerate(sizes))
    return Domain("node", place.name, place.gpus, islands)


def _parent(kind: DomainKind, name: str, children: Sequence[Domain]) -> Domain:
    return Domain(kind, name, sum(child.gpus for child in children), tuple(children))


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """`node10` after `node9`."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)

"""Free GPUs, indexed by kind, by domain and by how many a node has: placement reads no node it does not use.

A kind is a GPU's name and the capacity it was bought as. Free GPUs of a node are a bit mask of their indices.
Only `State` changes this index, through `put`, whose answer undoes it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from cordee.events import Capacity, Node

Kind = tuple[str, Capacity]
Domain = tuple[str, ...]


def mask_of(gpus: tuple[int, ...]) -> int:
    """The bit mask of GPU indices.

    >>> mask_of((0, 2))
    5
    """
    mask = 0
    for gpu in gpus:
        mask |= 1 << gpu
    return mask


def gpus_of(mask: int) -> tuple[int, ...]:
    """The GPU indices of a bit mask, ascending.

    >>> gpus_of(5)
    (0, 2)
    """
    return tuple(gpu for gpu in range(mask.bit_length()) if mask >> gpu & 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """A node that can be placed on: up, with its free GPUs."""

    node: Node
    free: int  # mask
    usable: int  # how many GPUs it has for Cordee, free or leased

    @property
    def kind(self) -> Kind:
        """What a job can ask for."""
        return (self.node.gpu_name, self.node.capacity)


@dataclass(slots=True)
class Bucket:
    """Nodes of one kind in one domain."""

    free: int = 0
    usable: int = 0
    nodes: int = 0
    split: int = 0  # nodes of several NVLink islands
    by_count: dict[int, list[str]] = field(default_factory=dict)  # names, ascending, of nodes with n > 0 free GPUs


class FreeIndex:
    """What can be placed on now."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.buckets: dict[Kind, dict[Domain, Bucket]] = {}

    def put(self, name: str, entry: Entry | None) -> Entry | None:
        """Set a node's entry, or take it out; returns the entry that was there."""
        old = self.entries.pop(name, None)
        if old is not None:
            self._count(name, old, -1)
        if entry is not None:
            self.entries[name] = entry
            self._count(name, entry, +1)
        return old

    def free(self, kind: Kind) -> int:
        """Free GPUs of a kind."""
        bucket = self.buckets.get(kind, {}).get(())
        return bucket.free if bucket else 0

    def usable(self, kind: Kind) -> int:
        """GPUs of a kind on nodes that are up, free or leased."""
        bucket = self.buckets.get(kind, {}).get(())
        return bucket.usable if bucket else 0

    def domains(self, kind: Kind, depth: int) -> Iterator[tuple[Domain, Bucket]]:
        """The domains of a kind at a depth; 0 is the whole cluster."""
        return ((domain, bucket) for domain, bucket in self.buckets.get(kind, {}).items() if len(domain) == depth)

    def value(self) -> object:
        """A deep copy, to compare."""
        buckets = {
            (kind, domain): (bucket.free, bucket.usable, bucket.nodes, bucket.split, _copy(bucket.by_count))
            for kind, domains in self.buckets.items()
            for domain, bucket in domains.items()
        }
        return dict(self.entries), buckets

    def _count(self, name: str, entry: Entry, sign: int) -> None:
        domains = self.buckets.setdefault(entry.kind, {})
        free = entry.free.bit_count()
        node = entry.node
        for depth in range(len(node.domain) + 1):
            domain = node.domain[:depth]
            bucket = domains.get(domain)
            if bucket is None:
                bucket = domains[domain] = Bucket()
            bucket.free += sign * free
            bucket.usable += sign * entry.usable
            bucket.nodes += sign
            bucket.split += sign * (0 < node.island_gpus < node.gpus)
            if free:
                _file(bucket.by_count, free, name, sign)
            if not bucket.nodes:
                del domains[domain]
        if not domains:
            del self.buckets[entry.kind]


def _file(by_count: dict[int, list[str]], free: int, name: str, sign: int) -> None:
    names = by_count.setdefault(free, [])
    if sign > 0:
        insort(names, name)
    else:
        del names[bisect_left(names, name)]
        if not names:
            del by_count[free]


def _copy(by_count: dict[int, list[str]]) -> dict[int, tuple[str, ...]]:
    return {count: tuple(names) for count, names in by_count.items()}

"""Which nodes give pieces of datasets to each other: what the agents are told, so that they ask before the store."""

from collections.abc import Iterable
from operator import attrgetter

from cordee.agent.clock import monotonic_s
from cordee.agent.messages import Neighbourhood
from cordee.events import Node
from cordee.schedule.state.records import NodeRecord

NODES_MAX = 16
"""The nodes of one dataset that others are told of: those that have most of it."""
SETS_MAX = 256
_EVERY_S = 1.0


class Neighbourhoods:
    """The nodes of a cluster that give data to each other, looked through once a second.

    Args:
        key: by which they know each other.

    Attributes:
        now: as they were a second ago at most; None: all are on one machine.
    """

    def __init__(self, key: str) -> None:
        self._key, self._next_s = key, 0.0
        self.now: Neighbourhood | None = None

    def look(self, records: Iterable[NodeRecord]) -> None:
        """Look through the nodes, unless that was done within the last second."""
        now_s = monotonic_s()
        if now_s >= self._next_s:
            self._next_s = now_s + _EVERY_S
            self.now = neighbourhood([each.node for each in records if each.up and not each.unreachable], self._key)


def neighbourhood(nodes: Iterable[Node], key: str) -> Neighbourhood | None:
    """Return the nodes that give data to each other, by dataset; None: all are on one machine.

    >>> from cordee.events import HeldSet
    >>> nodes = [Node(name=name, epoch=1, gpu_name="H100", gpus=8, machine=f"{name}/1", gives_at=f"{name}:1/f",
    ...               data=(HeldSet(url="s3://b", held_bytes=held_bytes, size_bytes=9),))
    ...          for name, held_bytes in (("a", 0), ("b", 9))]
    >>> neighbourhood(nodes, "key").sets, neighbourhood(nodes[:1], "key")
    ({'s3://b': ['b:1/f', 'a:1/f']}, None)
    """
    nodes = list(nodes)
    if len({node.machine.partition("/")[0] for node in nodes}) < 2:
        return None
    found: dict[str, list[tuple[int, str]]] = {}
    for node in sorted(nodes, key=attrgetter("name")):
        for each in node.data if node.gives_at else ():
            found.setdefault(each.url, []).append((-each.held_bytes, node.gives_at))
    largest = sorted(found, key=lambda url: (min(found[url]), url))[:SETS_MAX]
    return Neighbourhood(
        key=key, sets={url: [gives_at for _, gives_at in sorted(found[url])[:NODES_MAX]] for url in sorted(largest)}
    )

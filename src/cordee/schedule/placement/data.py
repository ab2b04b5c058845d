"""The time that nodes would take to load the data of a job, and when another place pays.

A job never waits for such a place, and none leaves for it: what starts at once reads its first batch in seconds, while
the rest of its data arrives.
"""

from collections.abc import Iterable, Mapping

from cordee.events import HeldSet, Job, Node

PAYS_S = 10.0
"""A node with the data is not sought for less loading than this."""
_SEARCHES = 4
_BYTES_PER_S = 100e6  # of a store whose rate no node has reported yet


def load_seconds(job: Job, nodes: Iterable[Node]) -> dict[str, float]:
    """Return how long each node would load what it lacks of a job's data.

    Datasets that no node has reported count nowhere: their sizes are not known.

    >>> from cordee.ids import JobId
    >>> held = HeldSet(url="s3://b", held_bytes=4 * 10**9, size_bytes=6 * 10**9, bytes_per_s=10**9)
    >>> nodes = [Node(name="a", epoch=1, gpu_name="H100", gpus=8, data=(held,)),
    ...          Node(name="b", epoch=1, gpu_name="H100", gpus=8)]
    >>> load_seconds(Job(job_id=JobId("x"), name="x", owner="me", gpus=8, data=("s3://b",)), nodes)
    {'a': 2.0, 'b': 6.0}
    """
    nodes = list(nodes)
    held = {node.name: {each.url: each for each in node.data if each.url in job.data} for node in nodes}
    known = {url: [sets[url] for sets in held.values() if url in sets] for url in job.data}
    sizes = {url: max((each.size_bytes for each in found), default=0) for url, found in known.items()}
    rates = {url: max((each.bytes_per_s for each in found), default=0) or _BYTES_PER_S for url, found in known.items()}

    def load_s(sets: Mapping[str, HeldSet], url: str) -> float:
        missing_bytes = sizes[url] - (sets[url].held_bytes if url in sets else 0)
        return max(0, missing_bytes) / rates[url]

    return {name: sum((load_s(sets, url) for url in job.data), 0.0) for name, sets in held.items()}


def shorter_loads(load_s: Mapping[str, float], found: Iterable[str]) -> list[float]:
    """Return the times, shortest first, within which a search for nodes with the data pays, for these that were found.

    >>> shorter_loads({"a": 0.0, "b": 30.0, "c": 35.0}, ["c"]), shorter_loads({"a": 0.0, "b": 5.0}, ["b"])
    ([0.0], [])
    """
    slowest_s = max((load_s[name] for name in found), default=0.0)
    return sorted({each for each in load_s.values() if each <= slowest_s - PAYS_S})[:_SEARCHES]

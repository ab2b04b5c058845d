"""Bring whole datasets into the cache of a node: what an agent runs before it starts the ranks of a job.

It ends when all is there, or when the cache has no room for more; the job fetches the rest. Its last line says which.
"""

import argparse
import json
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cordee.errors import CordeeError, as_body
from cordee.storage.cache.fetching import Fetching
from cordee.storage.cache.hints import Hint
from cordee.storage.cache.neighbours import Neighbours
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pins import Pin

_STREAMS = 4


def prefetch(node: NodeCache, urls: list[str]) -> dict[str, Any]:
    """Fetch datasets, one after the other; return how many objects and bytes of how many are there.

    `sets` has of each the bytes that are there, its size, and the bytes that its store and other nodes gave.

    Raises:
        CordeeError: one of them cannot be read.
    """
    fetching = Fetching(node)
    sets = {url: fetching.source(url).pins() for url in dict.fromkeys(urls)}
    pins = [pin for found in sets.values() for pin in found]
    hint = Hint(node.root)
    hint.write([pin.object_id for pin in pins])
    try:
        came = {}
        for url, own in sets.items():
            before = fetching.fetched_bytes, fetching.neighbours.given_bytes
            bring_all(fetching, own)
            came[url] = [fetching.fetched_bytes - before[0], fetching.neighbours.given_bytes - before[1]]
        # Some may have left for those that are read before.
        there = {pin.object_id for pin in pins if (each := node.open(pin.object_id)) is not None and each.is_complete}
    finally:
        hint.close()

    def there_bytes(of: list[Pin]) -> int:
        return sum(pin.size_bytes for pin in of if pin.object_id in there)

    return {
        "objects": len(pins),
        "objects_there": sum(pin.object_id in there for pin in pins),
        "bytes": sum(pin.size_bytes for pin in pins),
        "bytes_there": there_bytes(pins),
        "fetched_bytes": fetching.fetched_bytes,
        "given_bytes": fetching.neighbours.given_bytes,
        "sets": {url: [there_bytes(own), sum(pin.size_bytes for pin in own), *came[url]] for url, own in sets.items()},
    }


def bring_all(fetching: Fetching, pins: Iterable[Pin]) -> None:
    """Fetch objects, a few at a time: those first that this node is the first of its neighbours to fetch.

    Raises:
        CordeeError: one of them cannot be read.
    """
    turns, lock = _turns(fetching.neighbours, pins), threading.Lock()

    def bring() -> None:
        while True:
            with lock:
                pin = next(turns, None)
            if pin is None:
                return
            fetching.prefetch([pin])

    with ThreadPoolExecutor(_STREAMS) as pool:
        for done in [pool.submit(bring) for _ in range(_STREAMS)]:
            done.result()


def _turns(neighbours: Neighbours, pins: Iterable[Pin]) -> Iterator[Pin]:
    """Yield objects in order; asked late, since the neighbours of a gang become known while it begins."""
    later = []
    for pin in pins:
        if neighbours.comes_first(pin):
            yield pin
        else:
            later.append(pin)
    yield from later


def main() -> int:
    """Fetch the datasets of the command line, and print what is there, or the error, as JSON."""
    parser = argparse.ArgumentParser(description="Bring datasets into this node's cache, which the environment names.")
    parser.add_argument("urls", nargs="+")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="cordee data: %(message)s", stream=sys.stderr)
    try:
        print(json.dumps(prefetch(NodeCache(), given.urls)))
    except CordeeError as error:
        print(json.dumps(as_body(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

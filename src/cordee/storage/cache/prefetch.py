"""Bring whole datasets into the cache of a node: what an agent runs before it starts the ranks of a job.

It ends when all is there, or when the cache has no room for more; the job fetches the rest. Its last line says which.
"""

import argparse
import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor

from cordee.errors import CordeeError, as_body
from cordee.storage.cache.fetching import Fetching
from cordee.storage.cache.hints import Hint
from cordee.storage.cache.node import NodeCache

_STREAMS = 4


def prefetch(node: NodeCache, urls: list[str]) -> dict[str, int]:
    """Fetch datasets, one after the other; return how many objects and bytes of how many are there.

    Raises:
        CordeeError: one of them cannot be read.
    """
    fetching = Fetching(node)
    pins = [pin for url in urls for pin in fetching.source(url).pins()]
    hint = Hint(node.root)
    hint.write([pin.object_id for pin in pins])
    try:
        with ThreadPoolExecutor(_STREAMS) as pool:
            list(pool.map(lambda pin: fetching.prefetch([pin]), pins))
        found = [node.open(pin.object_id) for pin in pins]  # some may have left for those that are read before
        there = [each is not None and each.is_complete for each in found]
    finally:
        hint.close()
    return {
        "objects": len(pins),
        "objects_there": sum(there),
        "bytes": sum(pin.size_bytes for pin in pins),
        "bytes_there": sum(pin.size_bytes for pin, is_there in zip(pins, there, strict=True) if is_there),
        "fetched_bytes": fetching.fetched_bytes,
    }


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

"""A fetcher: a process beside a job that brings pieces into the node's cache when the job asks for them.

It is a process of its own since the runtime of obstore does not survive a fork, and data loaders fork; and so that
fetching takes none of the interpreter's time from the loop. It ends when nobody holds the other end of its input.
Requests are lines of JSON on a Unix socket, and so are the answers; bytes follow an answer that says how many.
"""

import argparse
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cordee.errors import CacheFullError, CordeeError, as_body
from cordee.storage.cache.fetching import Fetching, Row
from cordee.storage.cache.hints import Hint
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pins import Pin

_DEMANDS, _AHEAD, _BACKLOG = 16, 8, 64

log = logging.getLogger("cordee.data")


class Fetcher:
    """The fetcher of one job on one node."""

    def __init__(self, node: NodeCache) -> None:
        self._node, self._fetching = node, Fetching(node)
        self._demands = ThreadPoolExecutor(_DEMANDS, "demand")
        self._checks = ThreadPoolExecutor(1, "check")
        self._checking: dict[str, Future[None]] = {}
        self._ahead: queue.Queue[tuple[int, Pin, int, int, float]] = queue.Queue(_BACKLOG)
        self._round = 0  # of `ahead`; what an earlier one has asked for is not fetched any more
        self._calm = threading.Condition()
        self._urgent = 0
        self._hint: Hint | None = None
        for number in range(_AHEAD):
            threading.Thread(target=self._fetch_ahead, name=f"ahead-{number}", daemon=True).start()

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request, and the bytes that follow it."""
        operations: dict[str, Callable[..., Any]] = {
            "pins": self._pins,
            "get": self._get,
            "read": self._read,
            "mend": self._mend,
            "ahead": self._look_ahead,
            "hint": self._write_hint,
            "settle": self._settle,
        }
        try:
            found = operations[request.pop("op")](**request)
        except CordeeError as error:
            return as_body(error), b""
        except Exception as error:  # the job has to hear of it
            log.exception("a request failed")
            return as_body(CordeeError(f"the fetcher failed: {error!r}")), b""
        return ({"bytes": len(found)}, found) if isinstance(found, bytes) else ({"found": found}, b"")

    def _pins(self, url: str) -> list[list[Any]]:
        return [pin.as_json() for pin in self._fetching.source(url).pins()]

    def _get(self, pieces: list[list[Any]]) -> None:
        """Fetch pieces that a reader waits for: rows of a pin, the first piece and the one behind the last."""
        with self._calm:
            self._urgent += 1
        try:
            self._fetching.bring([(Pin(*row[0]), row[1], row[2]) for row in pieces], self._fetch_all)
        finally:
            with self._calm:
                self._urgent -= 1
                self._calm.notify_all()

    def _fetch_all(self, rows: Iterable[Row]) -> None:
        for done in [self._demands.submit(self._fetch, *row, 0.0) for row in rows]:
            done.result()

    def _fetch(self, pin: Pin, first: int, stop: int, soon: float) -> None:
        if self._fetching.fetch(pin, first, stop, soon=soon, wait=False) and pin.object_id not in self._checking:
            self._checking[pin.object_id] = self._checks.submit(self._check, pin)

    def _check(self, pin: Pin) -> None:
        try:
            self._fetching.check(pin)
        except CordeeError as error:  # readers see that it was condemned
            log.error("%s", error)
        except Exception:
            log.exception("%s: the check failed", pin.where)
        finally:
            self._checking.pop(pin.object_id, None)

    def _settle(self) -> int:
        """Wait for the checks that go on; return the bytes that were fetched."""
        for check in list(self._checking.values()):
            check.result()
        return self._fetching.fetched_bytes

    def _read(self, pin: list[Any], number: int, piece_bytes: int) -> bytes:
        return self._fetching.read(Pin(*pin), number, piece_bytes)

    def _mend(self, pin: list[Any], number: int) -> None:
        self._fetching.mend(Pin(*pin), number)

    def _look_ahead(self, pieces: list[list[Any]], begin: bool = False) -> None:
        """Fetch pieces that are read later, in this order; `begin`: and no others."""
        self._round += begin
        for soon, (pin, first, stop) in enumerate(pieces, 1):
            self._ahead.put((self._round, Pin(*pin), first, stop, float(soon)))

    def _fetch_ahead(self) -> None:
        while True:
            number, pin, first, stop, soon = self._ahead.get()
            with self._calm:
                self._calm.wait_for(lambda: not self._urgent, timeout=1.0)
            if number != self._round:
                continue
            try:
                self._fetch(pin, first, stop, soon)
            except CacheFullError as error:  # what is read sooner stays
                log.info("%s", error.message)
            except CordeeError as error:  # the reader hears of it when it comes there
                log.warning("%s", error.message)
            except Exception:
                log.exception("%s: fetching ahead failed", pin.where)

    def _write_hint(self, reads: list[str], queued: list[str], kept: list[str]) -> None:
        self._hint = self._hint or Hint(self._node.root)
        self._hint.write(reads, queued, kept)

    def serve(self, listener: socket.socket) -> None:
        """Answer every connection on a thread of its own."""
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                for line in lines:
                    head, body = self.answer(json.loads(line))
                    connection.sendall(json.dumps(head).encode() + b"\n" + body)
            except OSError:
                pass  # its reader was killed

    def close(self) -> None:
        """Take the hint back."""
        if self._hint is not None:
            self._hint.close()


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description="Bring pieces of datasets into the cache of this node.")
    parser.add_argument("--root", required=True)
    parser.add_argument("--limit-bytes", type=int)
    parser.add_argument("--listener", type=int, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="cordee data: %(message)s", stream=sys.stderr)
    fetcher = Fetcher(NodeCache(Path(given.root), given.limit_bytes))
    listener = socket.socket(fileno=given.listener)
    threading.Thread(target=fetcher.serve, args=(listener,), daemon=True).start()
    while os.read(0, 4096):
        pass
    fetcher.close()
    os._exit(0)  # fetches that go on hold nothing that another one would miss


if __name__ == "__main__":
    main()

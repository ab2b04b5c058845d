"""Ask the caches of other nodes for pieces before the store is asked.

The agent writes which nodes have read a dataset into `neighbours.json` of the cache, with the key of the cluster. Bytes
count as arrived when they have the digest that was named before them. A node that is dead, slow or gives other bytes
costs a bounded wait, and is not asked again for a while.
"""

import json
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cordee.errors import CertificateError
from cordee.storage.cache.pieces import Pieces
from cordee.storage.cache.pins import Pin
from cordee.tls import client_context

FILE = "neighbours.json"
PATIENCE_S, REQUEST_S = 1.0, 5.0
"""How long nothing may come from a neighbour, and how long all of them may take for one request; what came is kept."""
AWAY_S, AWAY_S_MAX = 2.0, 60.0
"""A neighbour that failed is asked again after this time, and after twice as long each further time."""
_LACKS_S = 2.0  # one that has not a piece of an object may be fetching it
_ASKED = 3  # neighbours, for one request
_LOOK_S = 1.0
_HEAD_BYTES_MAX = 8192
HEAD = struct.Struct(">I")  # how many bytes of JSON come before those of the pieces

log = logging.getLogger("cordee.data")


def write_neighbours(root: Path, key: str, own: str, sets: Mapping[str, Sequence[str]]) -> None:
    """Say which nodes read a dataset: `HOST:PORT/FINGERPRINT`, by its URL.

    Args:
        root: the folder of the cache.
        key: the cluster's.
        own: this node among them; "": it gives nothing to others.
        sets: the nodes by dataset.

    Raises:
        OSError: it cannot be written.
    """
    others = {url.rstrip("/"): [node for node in nodes if node != own] for url, nodes in sets.items()}
    new = root / f"{FILE}.new"
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"key": key, "own": own, "sets": others}, file)
    new.replace(root / FILE)


@dataclass(slots=True)
class _Known:
    """The neighbours as a process knows them."""

    key: str = ""
    own: str = ""
    sets: dict[str, list[str]] = field(default_factory=dict)
    mark: tuple[int, int] | None = None  # of the file that it was read from
    looked_s: float = float("-inf")


class Neighbours:
    """The neighbours of one node, as one process asks them.

    Args:
        root: the folder of its cache.

    Attributes:
        given_bytes: that they gave.
    """

    def __init__(self, root: Path) -> None:
        self._path, self._known = root / FILE, _Known()
        self._lock, self._local = threading.Lock(), threading.local()
        self._not_before: dict[tuple[str, str], float] = {}  # by node, and by object or "" for all
        self._distrusted: set[str] = set()
        self._failures: dict[str, int] = {}  # in a row
        self.given_bytes = 0

    def distrust(self, object_id: str) -> None:
        """Take this object from its store only, since what was there had not the digest that the store names."""
        self._distrusted.add(object_id)

    def comes_first(self, pin: Pin) -> bool:
        """Return whether this node is the one of all that read the dataset which fetches an object from its store.

        Nodes of a gang that begin in the same instant so fetch different objects first, and give them to each other.
        """
        others = self._nodes(pin.url)
        own = self._known.own
        return not own or all(_turn(pin.object_id, own) > _turn(pin.object_id, node) for node in others)

    def pieces(self, pin: Pin, pieces: Pieces, first: int, stop: int) -> Iterator[memoryview]:
        """Yield pieces from `first` on as neighbours have them, each with the digest that was named for it.

        Args:
            pin: the object.
            pieces: the same in this node's cache.
            first: the first piece that is wanted.
            stop: the one behind the last.
        """
        if pin.object_id in self._distrusted:
            return
        until_s = time.monotonic() + REQUEST_S
        for node in self._candidates(pin):
            try:
                for data in self._asked(node, pin, pieces, first, stop, until_s):
                    first += 1
                    yield data
                self._failures.pop(node, None)
            except (OSError, CertificateError, ValueError, KeyError, TypeError) as error:
                where = node.partition("/")[0]
                log.warning("%s: the cache of node %s is not asked for a while: %s", pin.where, where, error)
                self._put_off(node, "", self._away_s(node))
            if first >= stop or time.monotonic() > until_s:
                return
            self._put_off(node, pin.object_id, _LACKS_S)

    # -- which ones ------------------------------------------------------------------------------------------

    def _nodes(self, url: str) -> list[str]:
        now_s = time.monotonic()
        with self._lock:
            known = self._known
            if now_s >= known.looked_s + _LOOK_S:
                known.looked_s = now_s
                self._look()
            return known.sets.get(url.rstrip("/"), [])

    def _look(self) -> None:
        known = self._known
        try:
            status = self._path.stat()
            mark = status.st_ino, status.st_mtime_ns
            if mark == known.mark:
                return
            found = json.loads(self._path.read_text())
            known.key, known.own = str(found["key"]), str(found["own"])
            known.sets, known.mark = dict(found["sets"]), mark
        except FileNotFoundError:
            known.sets, known.mark = {}, None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be used: %s", self._path, error)

    def _candidates(self, pin: Pin) -> list[str]:
        now_s, found = time.monotonic(), []
        for node in self._nodes(pin.url):
            put_off_s = max(self._not_before.get((node, each), 0.0) for each in ("", pin.object_id))
            if put_off_s <= now_s:
                found.append(node)
        return sorted(found, key=lambda node: _turn(pin.object_id, node), reverse=True)[:_ASKED]

    def _away_s(self, node: str) -> float:
        """Count a failure; return for how long the node is not asked."""
        failures = self._failures.get(node, 0)
        if self._not_before.get((node, ""), 0.0) <= time.monotonic():  # not one of several threads
            self._failures[node] = failures + 1
        return min(AWAY_S * 2.0 ** min(failures, 10), AWAY_S_MAX)

    def _put_off(self, node: str, object_id: str, for_s: float) -> None:
        now_s = time.monotonic()
        with self._lock:
            if len(self._not_before) > 10_000:
                self._not_before = {each: at_s for each, at_s in self._not_before.items() if at_s > now_s}
            self._not_before[node, object_id] = now_s + for_s

    # -- one of them -----------------------------------------------------------------------------------------

    def _asked(
        self, node: str, pin: Pin, pieces: Pieces, first: int, stop: int, until_s: float
    ) -> Iterator[memoryview]:
        """Ask one neighbour.

        Raises:
            OSError: it is away, or slow.
            ValueError: it gives other bytes than it says.
        """
        request = {"key": self._known.key, "object": pin.object_id, "first": first, "stop": stop}
        is_whole = False  # what is left of an answer must not be taken for the next one
        try:
            head = self._head(node, request, until_s)
            digests = [bytes.fromhex(each) for each in head["digests"]]
            spans = [pieces.span(number) for number in range(first, min(stop, first + len(digests)))]
            if [end - start for start, end in spans] != head["sizes"]:
                raise ValueError("its pieces have other sizes")
            for digest, n_bytes in zip(digests, head["sizes"], strict=True):
                data = memoryview(bytearray(n_bytes))
                _fill(self._lines[node], data, until_s)
                if pieces.digest_of(data) != digest:
                    raise ValueError("it gives bytes that are not those of their digest")
                with self._lock:
                    self.given_bytes += n_bytes
                yield data
            is_whole = True
        finally:
            if not is_whole:
                self._hang_up(node)

    def _head(self, node: str, request: Mapping[str, Any], until_s: float) -> dict[str, Any]:
        """Send a request, and return what comes before the bytes."""
        if node in self._lines:
            with suppress(OSError):  # it may have closed a connection that was idle
                return _asked_for(self._lines[node], request, until_s)
            self._hang_up(node)
        address, _, fingerprint = node.partition("/")
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=_left_s(until_s))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines[node] = client_context(fingerprint).wrap_socket(
            plain
        )  # takes the socket, and closes it if it fails
        return _asked_for(self._lines[node], request, until_s)

    @property
    def _lines(self) -> "_Lines":
        """The connections of this thread, by node."""
        found: _Lines = self._local.__dict__.setdefault("lines", _Lines())
        return found

    def _hang_up(self, node: str) -> None:
        line = self._lines.pop(node, None)
        if line is not None:
            with suppress(OSError):
                line.close()


class _Lines(dict[str, ssl.SSLSocket]):
    """Connections that are closed with the thread that has them."""

    def __del__(self) -> None:
        for line in self.values():
            line.close()


def _asked_for(connection: ssl.SSLSocket, request: Mapping[str, Any], until_s: float) -> dict[str, Any]:
    connection.settimeout(_left_s(until_s))
    connection.sendall(json.dumps(request).encode() + b"\n")
    size = memoryview(bytearray(HEAD.size))
    _fill(connection, size, until_s)
    text = memoryview(bytearray(min(HEAD.unpack(size)[0], _HEAD_BYTES_MAX)))
    _fill(connection, text, until_s)
    head: dict[str, Any] = json.loads(bytes(text))
    if "error" in head:
        raise ConnectionError(str(head["error"]))
    return head


def _fill(connection: ssl.SSLSocket, data: memoryview, until_s: float) -> None:
    at = 0
    while at < len(data):
        connection.settimeout(_left_s(until_s))
        got = connection.recv_into(data[at:])
        if not got:
            raise ConnectionError("its answer was cut off")
        at += got


def _left_s(until_s: float) -> float:
    """Return how long may be waited for the next bytes.

    Raises:
        TimeoutError: no longer.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"it took longer than {REQUEST_S:g} s")
    return min(left_s, PATIENCE_S)


def _turn(object_id: str, node: str) -> bytes:
    """Return the weight of a node for an object (Thaler and Ravishankar, rendezvous hashing, 1998)."""
    return blake2b(f"{object_id} {node}".encode(), digest_size=8).digest()

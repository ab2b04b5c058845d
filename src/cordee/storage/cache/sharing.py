"""Give pieces of this node's cache to other nodes: a process that the agent starts, and that ends with its agent.

Its first line of input is the cluster's key, and its first line of output says at which port it listens, and with which
certificate. A request is a line of JSON, over TLS; the answer is JSON after its length, and the bytes of the pieces. It
gives what is there and neither fetches nor waits, and it hashes nothing: who asks holds the bytes against the digests.
"""

import argparse
import hmac
import json
import os
import signal
import socket
import socketserver
import ssl
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cordee.storage.cache.fetching import OPEN_MAX, RUN_PIECES
from cordee.storage.cache.neighbours import HEAD
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pieces import Pieces
from cordee.tls import fingerprint_of, self_signed

IDLE_S = 60.0
_HANDSHAKE_S, _SEND_S = 5.0, 10.0
_CONNECTIONS_MAX = 256
_REQUEST_BYTES_MAX = 4096
_NICE = 5  # the ranks of this node come first


class Shared:
    """The pieces of a cache, as others ask for them."""

    def __init__(self, node: NodeCache) -> None:
        self._node, self._lock = node, threading.Lock()
        self._open: OrderedDict[str, Pieces] = OrderedDict()

    def pieces(self, object_id: str, first: int, stop: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield the digest and the bytes of each piece from `first` on, up to one that is not there."""
        pieces = self._opened(object_id)
        if pieces is None or first < 0:
            return
        for number in range(first, min(stop, first + RUN_PIECES, pieces.count)):
            digest = pieces.digest(number)
            if digest is None:
                return
            start, end = pieces.span(number)
            yield digest, os.pread(pieces.data_fd, end - start, start)

    def _opened(self, object_id: str) -> Pieces | None:
        if not object_id.isalnum():
            return None
        with self._lock:
            found = self._open.pop(object_id, None)
            if found is None or found.is_evicted:
                found = self._node.open(object_id)
            if found is not None:
                self._open[object_id] = found
                while len(self._open) > OPEN_MAX:  # closed when no thread uses it any more
                    self._open.popitem(last=False)
            return found


class SharingServer(socketserver.ThreadingTCPServer):
    """The port at which other nodes ask, with a certificate that is made for it.

    Args:
        node: the cache.
        key: what all nodes of the cluster know.
        host: the address to listen at; "": all of this machine.

    Attributes:
        shared: the pieces.
        key: as given.
        context: of its TLS.
        fingerprint: of its certificate.
        left: the connections that it still takes; others wait for them, and give up.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, node: NodeCache, key: str, host: str = "") -> None:
        super().__init__((host, 0), _Handler)
        self.shared, self.key = Shared(node), key
        self.left = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        certificate, private = self_signed(["cordee"])
        with tempfile.TemporaryDirectory(prefix="cordee-") as folder:
            paths = Path(folder, "certificate"), Path(folder, "key")
            for path, pem in zip(paths, (certificate, private), strict=True):
                path.write_bytes(pem)
            self.context.load_cert_chain(*paths)
        self.fingerprint = fingerprint_of(ssl.PEM_cert_to_DER_cert(certificate.decode()))

    @property
    def port(self) -> int:
        """The port."""
        return int(self.server_address[1])


class _Handler(socketserver.BaseRequestHandler):
    server: SharingServer

    def handle(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError), self.server.left:  # who asked asks elsewhere
            self._serve()

    def _serve(self) -> None:
        self.request.settimeout(_HANDSHAKE_S)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.server.context.wrap_socket(self.request, server_side=True) as connection:
            lines = connection.makefile("rb")
            while True:
                connection.settimeout(IDLE_S)
                line = lines.readline(_REQUEST_BYTES_MAX)
                if not line.endswith(b"\n"):
                    return
                connection.settimeout(_SEND_S)
                if not self._answer(connection, json.loads(line)):
                    return

    def _answer(self, connection: ssl.SSLSocket, asked: dict[str, Any]) -> bool:
        if not hmac.compare_digest(str(asked.get("key", "")).encode(), self.server.key.encode()):
            _send(connection, {"error": "the key is not that of this cluster"})
            return False
        found = list(self.server.shared.pieces(str(asked["object"]), int(asked["first"]), int(asked["stop"])))
        _send(connection, {"digests": [digest.hex() for digest, _ in found], "sizes": [len(data) for _, data in found]})
        for _, data in found:
            connection.sendall(data)
        return True


def _send(connection: ssl.SSLSocket, head: dict[str, Any]) -> None:
    text = json.dumps(head).encode()
    connection.sendall(HEAD.pack(len(text)) + text)


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description="Give pieces of this node's cache to other nodes of the cluster.")
    parser.add_argument("--root", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    server = SharingServer(NodeCache(given.root), sys.stdin.readline().strip())
    print(json.dumps({"port": server.port, "fingerprint": server.fingerprint}), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()

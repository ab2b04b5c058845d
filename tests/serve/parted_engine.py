"""An engine on several nodes that stands for a tensor-parallel one such as vLLM: it needs no GPU, and is as strict.

Rank 0 meets the others over TCP, listens only when all have come, and asks each of them for its part of every answer.
When one is gone, rank 0 hangs, as a collective does.
"""

import json
import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

RANK, NODES = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"])
MASTER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
_LOCK = Lock()


def follow() -> None:
    while True:
        try:
            peer = socket.create_connection(MASTER)
            break
        except OSError:
            time.sleep(0.02)
    while peer.recv(1):
        peer.sendall(f"{os.environ['CORDEE_NODE']}\n".encode())


def lead() -> None:
    listener = socket.create_server(MASTER)
    parts = [listener.accept()[0].makefile("rwb", buffering=0) for _ in range(NODES - 1)]

    def gathered() -> list[str]:
        with _LOCK:
            for part in parts:
                part.write(b"?")
            told = [part.readline().decode().strip() for part in parts]
        while not all(told):
            time.sleep(60)
        return [os.environ["CORDEE_NODE"], *told]

    class Engine(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, document: object) -> None:
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer({"ok": True})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            text = " ".join(gathered())
            choice = {"index": 0, "text": text, "finish_reason": "stop"}
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            answer = {"id": "1", "object": "text_completion", "model": "wide", "choices": [choice], "usage": usage}
            self.answer(answer)

    where = (os.environ["CORDEE_HOST"], int(os.environ["CORDEE_PORT"]))
    ThreadingHTTPServer(where, Engine).serve_forever()


if __name__ == "__main__":
    sys.exit(follow() if RANK else lead())

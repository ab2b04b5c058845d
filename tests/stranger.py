"""Somebody else at the port where a server was."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN = "token-of-the-home"

_CODE = """
import os, socket
os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    print(len(listener.accept()[0].recv(999)), flush=True)
"""


@contextmanager
def listening() -> Iterator[tuple[int, Callable[[], int]]]:
    """Let a process of another user listen; yield its port, and what returns the bytes that its next client sent."""
    with subprocess.Popen([sys.executable, "-c", _CODE], stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        line = stranger.stdout
        try:
            yield int(line.readline()), lambda: int(line.readline())
        finally:
            stranger.kill()


def home_at(folder: Path, port: int) -> Path:
    """Make the home of a server that was killed, at whose port somebody else listens."""
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "server.json").write_text(json.dumps({"pid": 1, "url": f"http://127.0.0.1:{port}"}))
    return folder

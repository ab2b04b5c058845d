"""The cache of this node among those of the cluster: where others ask for pieces, and whom its own jobs ask.

Once a job of this node has named a dataset, and the server has said that there are other nodes, a process gives pieces
of the cache to them (`storage/cache/sharing.py`). It ends with the agent, whose next one starts another.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from cordee.agent.messages import Neighbourhood
from cordee.servers import is_loopback, own_address

_log = logging.getLogger("cordee.agent")


class DataSharing:
    """The giving of one node, and its knowledge of others.

    Attributes:
        gives_at: where the cache is given to others, `HOST:PORT/FINGERPRINT`; "": nowhere.
    """

    def __init__(self) -> None:
        self.gives_at = ""
        self._known: Neighbourhood | None = None
        self._address = ""
        self._reads = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def reads(self) -> None:
        """Note that jobs of this node read datasets."""
        self._reads = True
        self._give()

    def learn(self, new: Neighbourhood | None, address: str) -> None:
        """Take in what the server says of the neighbours, None if nothing; `address` is this machine's towards it."""
        if new is None:
            return
        if self._known is not None and self._known.key != new.key:
            self.close()  # another server, with another key
        self._known, self._address = new, own_address() if is_loopback(address) else address
        self._keep()
        self._give()

    def close(self) -> None:
        """Give nothing more."""
        with self._lock:
            process, self._process, self.gives_at = self._process, None, ""
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def _keep(self) -> None:
        """Write down for the fetchers of jobs whom to ask."""
        if self._known is None:
            return
        try:
            from cordee.storage.cache.neighbours import write_neighbours
            from cordee.storage.cache.node import default_folder

            root = default_folder()
            root.mkdir(parents=True, exist_ok=True)
            write_neighbours(root, self._known.key, self.gives_at, self._known.sets)
        except (ImportError, OSError) as error:
            _log.warning("the caches of other nodes are not asked: %s", error)

    def _give(self) -> None:
        with self._lock:
            gone = self._process is None or self._process.poll() is not None
            if not (gone and self._reads and self._known is not None):
                return
            from cordee.storage.cache.node import default_folder

            argv = [sys.executable, "-m", "cordee.storage.cache.sharing", "--root", str(default_folder())]
            package = str(Path(__file__).resolve().parents[2])
            try:
                self._process = process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd="/",
                    env={**os.environ, "PYTHONPATH": package},
                    start_new_session=True,
                )
            except OSError as error:
                _log.warning("this node gives no data to others: %s", error)
                return
            key = self._known.key
        threading.Thread(target=self._begin, args=(process, key), name="cordee-sharing", daemon=True).start()

    def _begin(self, process: "subprocess.Popen[str]", key: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(key + "\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            _log.warning("this node gives no data to others: %s", error)
            return
        host = f"[{self._address}]" if ":" in self._address else self._address
        with self._lock:
            if self._process is process:
                self.gives_at = f"{host}:{found['port']}/{found['fingerprint']}"
        self._keep()

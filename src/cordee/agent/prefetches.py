"""Prefetches: datasets that a job names are brought into this node's cache before its ranks start, and while they run.

A process with the attempt's own environment and tag does it (`storage/cache/prefetch.py`), so that it has the job's
credentials and ends with the attempt. Whatever becomes of it, the ranks start: they fetch what is missing themselves.
"""

import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cordee.agent.clock import monotonic_s
from cordee.agent.data_sharing import DataSharing
from cordee.agent.launch import Assignment
from cordee.events import HeldSet
from cordee.units import format_bytes, format_duration

_log = logging.getLogger("cordee.agent")


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The end of the wait for a rank group's datasets, and what is said of it."""

    order: Assignment
    says: str


class Prefetches:
    """The prefetches of one node, and what it knows of the datasets in its cache.

    Args:
        path: the file in which that is kept; None: nowhere.

    Attributes:
        held: the datasets that jobs have named.
        sharing: this node's cache among those of the cluster.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._ended: queue.SimpleQueue[Prefetched] = queue.SimpleQueue()
        self._path, self._lock = path, threading.Lock()
        self._hint: Any = None
        self.held = _read(path)
        self.sharing = DataSharing()
        if self.held:
            self.sharing.reads()

    def will_come(self, urls: Sequence[str] | None) -> None:
        """Let the cache keep the datasets of waiting jobs, in the order of the queue; None: they are as before."""
        if urls is None or (not urls and self._hint is None):
            return
        try:
            from cordee.storage.cache.hints import Hint
            from cordee.storage.cache.node import default_folder

            self._hint = self._hint or Hint(default_folder())
            self._hint.write((), queued=urls)
        except (ImportError, OSError) as error:
            _log.warning("the cache is not told of the queue: %s", error)

    @staticmethod
    def wanted(spec: Mapping[str, Any]) -> bool:
        """Return whether a job names datasets."""
        return bool((spec.get("data") or {}).get("sets"))

    def begin(self, order: Assignment, folder: Path, env: Mapping[str, str], before: str = "") -> None:
        """Begin to fetch the datasets of a rank group, with the environment of its ranks, and what was said before."""
        with self._lock:  # from now on others ask this node too
            new = {str(url) for url in order.spec["data"]["sets"]} - {each.url for each in self.held}
            self._keep([*self.held, *(HeldSet(url=url, held_bytes=0, size_bytes=0) for url in new)])
        self.sharing.reads()
        threading.Thread(
            target=self._run, args=(order, folder, dict(env), before), name="cordee-prefetch", daemon=True
        ).start()

    def ended(self) -> list[Prefetched]:
        """Return the rank groups that wait no longer, since the last call."""
        found = []
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    # -- on a thread of its own ------------------------------------------------------------------------------

    def _run(self, order: Assignment, folder: Path, env: dict[str, str], before: str) -> None:
        try:
            says = self._fetch(order, folder, env)
        except Exception as error:  # an unforeseen error must not keep the ranks from starting
            _log.exception("%s: its data are not prefetched", order.tag)
            says = f"not prefetched: {error!r}"
        self._ended.put(Prefetched(order, "; ".join(filter(None, [before, f"data: {says}"]))))

    def _fetch(self, order: Assignment, folder: Path, env: dict[str, str]) -> str:
        wanted = order.spec["data"]
        wait_s = None if wanted.get("wait_s") == "all" else float(wanted.get("wait_s") or 0.0)
        argv = [sys.executable, "-m", "cordee.storage.cache.prefetch", *map(str, wanted["sets"])]
        package = str(Path(__file__).resolve().parents[2])
        env = {**env, "PYTHONPATH": package}  # of the agent's interpreter, not of the job's
        began_s = monotonic_s()
        with (folder / "prefetch.log").open("wb") as log:
            process = subprocess.Popen(
                argv,
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            text = process.communicate(timeout=wait_s)[0]
        except subprocess.TimeoutExpired:
            self._follow(order, process, folder / "prefetch.log")
            return f"still arriving after {format_duration(wait_s or 0.0)}"
        self._note(text, monotonic_s() - began_s)
        return _said(text, monotonic_s() - began_s, folder / "prefetch.log")

    def _follow(self, order: Assignment, process: "subprocess.Popen[bytes]", log: Path) -> None:
        """Note the end of a prefetch that goes on beside the ranks."""
        began_s = monotonic_s()

        def wait() -> None:
            text = process.communicate()[0]
            self._note(text, monotonic_s() - began_s)
            _log.info("%s: its data: %s", order.tag, _said(text, monotonic_s() - began_s, log))

        threading.Thread(target=wait, name="cordee-prefetch-rest", daemon=True).start()

    def _note(self, text: bytes, took_s: float) -> None:
        """Take in what the process has printed of each dataset."""
        found = _printed(text)
        if found is None or "error" in found:
            return
        arrived = found["fetched_bytes"] + found["given_bytes"]
        rate = round(arrived / took_s) if arrived and took_s > 0 else 0
        with self._lock:
            held = {each.url: each for each in self.held}
            for url, (there, size, fetched, given) in found["sets"].items():
                before = held.get(url) or HeldSet(url=url, held_bytes=0, size_bytes=0)
                held[url] = HeldSet(
                    url=url,
                    held_bytes=there,
                    size_bytes=size,
                    bytes_per_s=rate or before.bytes_per_s,
                    found_bytes=before.found_bytes + max(0, there - fetched - given),
                    fetched_bytes=before.fetched_bytes + fetched,
                    given_bytes=before.given_bytes + given,
                )
            self._keep(held.values())

    def _keep(self, held: Iterable[HeldSet]) -> None:
        self.held = tuple(sorted(held, key=lambda each: each.url))
        if self._path is not None:
            new = self._path.with_suffix(".new")
            with suppress(OSError):  # a full disk: the server knows it
                new.write_text(json.dumps([asdict(each) for each in self.held]))
                new.replace(self._path)


def _read(path: Path | None) -> tuple[HeldSet, ...]:
    try:
        return () if path is None else tuple(HeldSet(**each) for each in json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return ()


def _printed(text: bytes) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found


def _said(text: bytes, took_s: float, log: Path) -> str:
    """Return what the process has printed, as a clause."""
    found = _printed(text)
    if found is None:
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        return f"not prefetched: {next(filter(None, map(str.strip, reversed(lines))), 'it was ended')[:200]}"
    if "error" in found:
        return f"not prefetched: {found['error']['message']}"
    there, of, fetched = (format_bytes(found[name]) for name in ("bytes_there", "bytes", "fetched_bytes"))
    given = f", {format_bytes(found['given_bytes'])} came from other nodes" if found["given_bytes"] else ""
    return f"{there} of {of} are on the node, {fetched} fetched in {format_duration(took_s)}{given}"

"""After the trainers of a gang have died, their uploaders agree on the newest capture that all have in memory.

Each writes which saves it has whole, reads the others' lists, and takes the newest that all have. The next attempt
waits for them, since its first record fences them. It does not wait for an uploader that has died: on its own machine
it looks at the process, and elsewhere at the uploader's signs of life.

    parts/<epoch>-<nonce>/held-<rank>      sealed {"format":1,"saves":[n...]}; none: this rank has no capture
    parts/<epoch>-<nonce>/rescued          sealed {"format":1,"save":n or null}: it is over; `save` was committed
    parts/<epoch>-<nonce>/living-<rank>    sealed {"format":1,"sign":n,...}: the uploader runs without its trainer
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cordee.errors import DestinationError
from cordee.storage.files import Blobs
from cordee.storage.log import LogEntry, of_kind
from cordee.storage.sealed import FORMAT, Damaged, seal, unseal

UPLOADER_MARKS = ("CORDEE_UPLOADER", "CORDEE_DRAIN")
"""Environment variables of an uploader, by which an agent that ends an attempt recognises it and gives it time.

The second one is the name of version 0.1.0: trainer and agent may be of different versions.
"""

UPLOADER_IGNORES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a trainer, and reach its uploader too: a terminal and Slurm send them to all processes."""

RESCUE_S_MAX = 120.0
"""Time for the uploaders of dead trainers: after it the agent ends them, and the next attempt fences them."""

SIGN_S = 3.0  # between two signs of life of an uploader whose trainer has ended
SOON_S = 0.1  # Most are done by then and need no sign; no attempt starts as fast.
SILENT_S_MAX = 20.0  # An uploader on another machine without a sign for this time is gone, or too slow.
LOOK_S_MAX = 1.0  # longest look at all uploaders of an attempt
_LOOKS = 16  # at once


def held_key(epoch: int, nonce: str, rank: int) -> str:
    """Return the key of the saves that a rank has in memory.

    >>> held_key(1, "n", 3)
    'parts/1-n/held-000003'
    """
    return f"{_folder(epoch, nonce)}/held-{rank:06d}"


def rescued_key(epoch: int, nonce: str) -> str:
    """Return the key of the record that ends the rescue."""
    return f"{_folder(epoch, nonce)}/rescued"


def write_held(blobs: Blobs, epoch: int, nonce: str, rank: int, saves: Iterable[int]) -> None:
    """Write which saves this rank has whole in memory."""
    blobs.put_if_absent(held_key(epoch, nonce, rank), seal({"format": FORMAT, "saves": sorted(saves)}))


def write_rescued(blobs: Blobs, epoch: int, nonce: str, save: int | None) -> None:
    """Write that the rescue is over, and the committed save; the first such record counts."""
    blobs.put_if_absent(rescued_key(epoch, nonce), seal({"format": FORMAT, "save": save}))


def newest_of_all(
    blobs: Blobs, epoch: int, nonce: str, world_size: int, until: Callable[[Callable[[], bool]], bool]
) -> int | None:
    """Return the newest save that every rank has; None if there is none, or a rank does not answer in time.

    Args:
        blobs: the store.
        epoch: the attempt's epoch.
        nonce: the attempt's nonce.
        world_size: the attempt's number of ranks.
        until: calls its argument until it returns True; returns False if the time runs out.
    """
    held: dict[int, set[int]] = {}

    def all_there() -> bool:
        for rank in range(world_size):
            if rank not in held and (data := blobs.get(held_key(epoch, nonce, rank))) is not None:
                held[rank] = set(unseal(data)["saves"])
        # An empty list decides at once: no save is on every rank.
        return len(held) == world_size or set() in held.values()

    if not until(all_there) or len(held) < world_size:
        return None
    return max(set.intersection(*held.values()), default=None)


def newest_attempt(entries: list[LogEntry]) -> tuple[int, str] | None:
    """Return (epoch, nonce) of the newest attempt in the log."""
    opened = of_kind(entries, "open")
    newest = opened[-1].record if opened else None
    return (newest.epoch, newest.nonce) if newest else None


class SignsOfLife:
    """An uploader's signs of life, from the end of its trainer until its last commit.

    So the next attempt waits for commits, but not for the work after them.

    Args:
        left: set when the trainer has ended.
        captured: returns the newest save that the trainer has announced.
    """

    def __init__(
        self,
        blobs: Blobs,
        epoch: int,
        nonce: str,
        rank: int,
        *,
        left: threading.Event,
        captured: Callable[[], int],
    ) -> None:
        self._blobs, self._key, self._left = blobs, _living_key(epoch, nonce, rank), left
        self._captured, self._settled = captured, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cordee-living", daemon=True)
        self._thread.start()

    def settled(self, save: float) -> None:
        """Record that no capture up to this one needs an upload any more."""
        self._settled = save
        if self._left.is_set() and not self._has_uploads():
            self._over.set()

    def end(self) -> None:
        """Stop: the trainer has ended, and nothing is left to upload."""
        self._over.set()
        self._thread.join()

    def _has_uploads(self) -> bool:
        return self._captured() > self._settled

    def _run(self) -> None:
        self._left.wait()
        signs, wait_s = 0, SOON_S
        while self._has_uploads() and not self._over.wait(wait_s):
            with contextlib.suppress(DestinationError):
                give_sign(self._blobs, self._key, signs, process())
            signs, wait_s = signs + 1, SIGN_S
        if signs:
            with contextlib.suppress(DestinationError):  # The signs then stop.
                self._blobs.delete(self._key)


def process() -> dict[str, object]:
    """Describe this process, so that another on the same machine can check whether it still runs."""
    return {"host": socket.gethostname(), "where": _where(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_running(described: Mapping[str, object]) -> bool | None:
    """Return whether a process that `process` described still runs; None: it is on another machine."""
    if described["where"] is None or described["where"] != _where():
        return None
    return _started(int(str(described["pid"]))) == described["started"]


def give_sign(blobs: Blobs, key: str, sign: int, process: dict[str, object]) -> None:
    """Write one sign of life; each has a new number."""
    blobs.put(key, seal({"format": FORMAT, "sign": sign, **process}))


class EarlierUploaders:
    """The uploaders of an earlier attempt, as the next one sees them.

    Attributes:
        silent: uploaders on other machines whose signs of life have stopped.
    """

    def __init__(self, blobs: Blobs, epoch: int, nonce: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._blobs, self._epoch, self._nonce, self._clock = blobs, epoch, nonce, clock
        self._signs: dict[str, tuple[int, float]] = {}  # by uploader: its newest sign, and when it was first seen
        self._pool = ThreadPoolExecutor(1)
        self._round: Future[str | None] | None = None
        self.silent: set[str] = set()

    def working(self, within_s: float = LOOK_S_MAX) -> str | None:
        """Name an uploader that still uploads its dead trainer's captures; None: there is none.

        Return within LOOK_S_MAX. If storage takes longer, the look goes on in the background, and the next call returns
        its result.
        """
        if self._round is None:
            self._round = self._pool.submit(self._look_at_all)
        try:
            found = self._round.result(within_s)
        except TimeoutError:
            if not self._round.done():
                return "not all looked at yet"
            found = self._round.result()
        self._round = None
        return found

    def _look_at_all(self) -> str | None:
        if self._blobs.size(rescued_key(self._epoch, self._nonce)) is not None:
            return None
        keys = [key for key in self._blobs.list(_folder(self._epoch, self._nonce)) if "/living-" in key]
        with ThreadPoolExecutor(_LOOKS) as pool:
            return next((name for name in list(pool.map(self._look, keys)) if name), None)

    def _look(self, key: str) -> str | None:
        try:
            data = self._blobs.get(key)
            sign = unseal(data) if data is not None else None
        except Damaged:
            sign = None
        if sign is None:
            return None
        name = f"rank {int(key.rpartition('-')[2])} on {sign['host']}"
        if (running := is_running(sign)) is not None:
            return name if running else None
        now_s = self._clock()
        number, since_s = self._signs.get(key, (None, now_s))
        if number != sign["sign"]:
            since_s = now_s
        self._signs[key] = (sign["sign"], since_s)
        if now_s - since_s < SILENT_S_MAX:
            self.silent.discard(name)
            return name
        self.silent.add(name)
        return None


def _living_key(epoch: int, nonce: str, rank: int) -> str:
    return f"{_folder(epoch, nonce)}/living-{rank:06d}"


def _where() -> str | None:
    """Identify the machine, its boot and its namespace of process numbers; None if the system has none."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """Return when this process was started, in the system's unit; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _folder(epoch: int, nonce: str) -> str:
    return f"parts/{epoch}-{nonce}"

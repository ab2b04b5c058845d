"""How the drains of a gang whose trainers have died agree on the newest capture that all of them hold in memory.

Each writes which saves it holds whole, reads what the others hold, and takes the newest that is everyone's: no rank is
asked twice, and none decides alone. The next attempt waits for it, since its first record fences them; not for a drain
that has died, which it sees by the process on its own machine, and by signs of life that stop coming from another.

    parts/<epoch>-<nonce>/held-<rank>      sealed {"format":1,"saves":[n...]}; none: this rank has nothing to bring
    parts/<epoch>-<nonce>/rescued          sealed {"format":1,"save":n or null}: it is over, and this was committed
    parts/<epoch>-<nonce>/living-<rank>    sealed {"format":1,"sign":n,...}: the drain works on without its trainer
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cordee.errors import DestinationError
from cordee.storage.files import Blobs
from cordee.storage.log import LogEntry
from cordee.storage.sealed import FORMAT, Damaged, seal, unseal

UPLOADER_MARKS = ("CORDEE_UPLOADER", "CORDEE_DRAIN")
"""Variables of an uploader's environment, by which an agent that ends an attempt's processes spares it for a while.

The second one is the name of version 0.1.0: trainer and agent may be of different versions.
"""

RESCUE_S_MAX = 120.0
"""What the drains of dead trainers are given: after it the agent ends them, and the next attempt fences them."""


SIGN_S = 3.0  # between two signs of life of a drain whose trainer has gone
SOON_S = 0.1  # Most have nothing left to do by then, and need give none; no attempt starts as fast.
SILENT_S_MAX = 20.0  # A drain elsewhere that gives none for so long is gone, or its disk is too slow to be waited for.
LOOK_S_MAX = 1.0  # a look at all drains of an attempt, before it says what it knows
_LOOKS = 16  # at once


def held_key(epoch: int, nonce: str, rank: int) -> str:
    """Where a rank says what it holds.

    >>> held_key(1, "n", 3)
    'parts/1-n/held-000003'
    """
    return f"{_folder(epoch, nonce)}/held-{rank:06d}"


def rescued_key(epoch: int, nonce: str) -> str:
    """Where it says that the rescue is over."""
    return f"{_folder(epoch, nonce)}/rescued"


def write_held(blobs: Blobs, epoch: int, nonce: str, rank: int, saves: Iterable[int]) -> None:
    """Say which saves this rank holds whole in memory."""
    blobs.put_if_absent(held_key(epoch, nonce, rank), seal({"format": FORMAT, "saves": sorted(saves)}))


def write_rescued(blobs: Blobs, epoch: int, nonce: str, save: int | None) -> None:
    """Say that it is over, and which save was committed; the first word stands."""
    blobs.put_if_absent(rescued_key(epoch, nonce), seal({"format": FORMAT, "save": save}))


def newest_of_all(
    blobs: Blobs, epoch: int, nonce: str, world_size: int, until: Callable[[Callable[[], bool]], bool]
) -> int | None:
    """The newest save that every rank holds; None if there is none, or a rank says nothing in the time there is.

    Args:
        blobs: the store.
        epoch: of the attempt.
        nonce: of the attempt.
        world_size: its ranks.
        until: asks its argument again and again until it is true, or until there is no more time: then it is False.
    """
    held: dict[int, set[int]] = {}

    def all_there() -> bool:
        for rank in range(world_size):
            if rank not in held and (data := blobs.get(held_key(epoch, nonce, rank))) is not None:
                held[rank] = set(unseal(data)["saves"])
        # An empty one decides at once: nothing is everyone's then.
        return len(held) == world_size or set() in held.values()

    if not until(all_there) or len(held) < world_size:
        return None
    return max(set.intersection(*held.values()), default=None)


def newest_attempt(entries: list[LogEntry]) -> tuple[int, str] | None:
    """(epoch, nonce) of the newest attempt in the log."""
    opened = [entry.record for entry in entries if entry.record and entry.record.kind == "open"]
    return (opened[-1].epoch, opened[-1].nonce) if opened else None


class SignsOfLife:
    """A drain's signs of life, from when its trainer has `left` until nothing is to be brought any more.

    So the next attempt waits for what can still be committed, and not for what is done behind a commit. `captured` says
    which is the newest save that the trainer has told of.
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
        """No capture up to this one is to be brought any more."""
        self._settled = save
        if self._left.is_set() and not self._brings():
            self._over.set()

    def end(self) -> None:
        """The trainer has left, and there is nothing left to do."""
        self._over.set()
        self._thread.join()

    def _brings(self) -> bool:
        return self._captured() > self._settled

    def _run(self) -> None:
        self._left.wait()
        signs, wait_s = 0, SOON_S
        while self._brings() and not self._over.wait(wait_s):
            with contextlib.suppress(DestinationError):
                give_sign(self._blobs, self._key, signs, process())
            signs, wait_s = signs + 1, SIGN_S
        if signs:
            with contextlib.suppress(DestinationError):  # Then they just stop coming.
                self._blobs.delete(self._key)


def process() -> dict[str, Any]:
    """This process, so that another one on the same machine can see whether it still runs."""
    return {"host": socket.gethostname(), "where": _where(), "pid": os.getpid(), "started": _started(os.getpid())}


def give_sign(blobs: Blobs, key: str, sign: int, process: dict[str, Any]) -> None:
    """One sign of life; each is another number."""
    blobs.put(key, seal({"format": FORMAT, "sign": sign, **process}))


class EarlierUploaders:
    """The drains of an older attempt, as the next one sees them.

    Attributes:
        silent: those elsewhere that have given no sign of life for too long.
    """

    def __init__(self, blobs: Blobs, epoch: int, nonce: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._blobs, self._epoch, self._nonce, self._clock = blobs, epoch, nonce, clock
        self._signs: dict[str, tuple[int, float]] = {}  # the newest of each, and when it was seen first
        self._pool = ThreadPoolExecutor(1)
        self._round: Future[str | None] | None = None
        self.silent: set[str] = set()

    def living(self, within_s: float = LOOK_S_MAX) -> str | None:
        """Whose drain still works on what its trainer has left behind; None: nobody's.

        It takes no longer than it may. A store may need longer for a thousand marks: then the look goes on beside, and
        who asks again is told what came of it.
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
            told = unseal(data) if data is not None else None
        except Damaged:
            told = None
        if told is None:
            return None
        name = f"rank {int(key.rpartition('-')[2])}'s on {told['host']}"
        if told["where"] is not None and told["where"] == _where():
            return name if _started(told["pid"]) == told["started"] else None
        now_s = self._clock()
        sign, since_s = self._signs.get(key, (None, now_s))
        if sign != told["sign"]:
            since_s = now_s
        self._signs[key] = (told["sign"], since_s)
        if now_s - since_s < SILENT_S_MAX:
            self.silent.discard(name)
            return name
        self.silent.add(name)
        return None


def _living_key(epoch: int, nonce: str, rank: int) -> str:
    return f"{_folder(epoch, nonce)}/living-{rank:06d}"


def _where() -> str | None:
    """The machine since it was started, and the space of its process numbers; None where nothing says so."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """When this process was started, in the system's unit; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _folder(epoch: int, nonce: str) -> str:
    return f"parts/{epoch}-{nonce}"

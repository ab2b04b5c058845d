"""One story of faults, drawn from a seed: readers of a dataset, and what happens to disk, cache, store and neighbour.

Every sample that a reader gets has the bytes that its name was pinned with; or the reader gets a named error.
"""

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from cache_world import Counted, Direct, direct, fill

from cordee.errors import DataError, DataReplacedError
from cordee.storage.cache.api import Data
from cordee.storage.cache.neighbours import write_neighbours
from cordee.storage.cache.pieces import PIECE_BYTES, Pieces
from cordee.storage.cache.sharing import SharingServer

RECORD = PIECE_BYTES // 8
FAULTS = ("flip", "cut data", "cut state", "scribble state", "evict", "full disk", "replace", "remove", "other job")
FAULTS += ("clock", "neighbour's disk", "neighbour is away", "neighbour gives nonsense")
YEAR_S = 31_557_600


def play(seed: int, folder: Path) -> str:
    """Play one story; return what it has met."""
    rng = random.Random(seed)
    names = [f"{number}.bin" for number in range(4)]
    contents = fill(folder / "set", {name: rng.randrange(1, 4) * PIECE_BYTES for name in names}, seed)
    fill(folder / "other", {"x.bin": 3 * PIECE_BYTES}, seed + 1)
    near = Near(folder, names)
    source, limit = Counted(str(folder / "set")), rng.choice([None, 5 * PIECE_BYTES, 2 * PIECE_BYTES])
    jobs = [direct(folder / "set", folder / "cache", limit, source) for _ in range(2)]
    samples = [job.data.samples(record_bytes=RECORD) for job in jobs]
    wanted = [contents[name][at : at + RECORD] for name in names for at in range(0, len(contents[name]), RECORD)]
    full, met, changed = [0.0], [], set()
    store = Pieces.store

    def stored(self: Pieces, number: int, data: memoryview) -> None:
        if rng.random() < full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        store(self, number, data)

    with mock.patch.object(Pieces, "store", stored), near:
        for _ in range(60):
            if rng.random() < 0.3:
                met.append(near.fault(rng) or _fault(rng, folder, jobs[0], names, full, changed))
                if met[-1] == "flip":  # what a process has hashed it believes; the next one finds it
                    jobs = [restarted(job, source, limit) for job in jobs]
                    samples = [job.data.samples(record_bytes=RECORD) for job in jobs]
            each = rng.choice(samples)
            indices = [rng.randrange(len(wanted)) for _ in range(4)]
            try:
                found = each.__getitems__(indices)
            except DataError as error:
                assert isinstance(error, DataReplacedError) and changed, f"seed {seed}: {met}: {error}"
                met.append("named")
                continue
            assert found == [wanted[index] for index in indices], f"seed {seed}: {met}: wrong bytes"
    for job in jobs:
        job.data.close()
    counted = {kind: met.count(kind) for kind in sorted(set(met))}
    return f"{len(met)} faults: {counted}; {near.given_bytes(jobs)} bytes of a neighbour"


class Near:
    """A node beside, which has read the dataset before the faults begin, and gives what it has."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.job = direct(folder / "set", folder / "near")
        for name in names:
            self.job.data.open(name).read()
        self.server = SharingServer(self.job.node, "key", "127.0.0.1")
        self.pieces, self.nonsense = self.server.shared.pieces, 0.0
        self.server.shared.pieces = self.given
        self.root, self.url = folder / "cache", self.job.data.url
        self.root.mkdir(exist_ok=True)

    def __enter__(self) -> "Near":
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.says("127.0.0.1", self.server.port)
        return self

    def __exit__(self, *of: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def says(self, host: str, port: int) -> None:
        """Write down where it is."""
        write_neighbours(self.root, "key", "", {self.url: [f"{host}:{port}/{self.server.fingerprint}"]})

    def given(self, object_id: str, first: int, stop: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield what it has, or nonsense."""
        for at, (digest, data) in enumerate(self.pieces(object_id, first, stop)):
            wrong = random.Random(f"{object_id} {first + at}").random() < self.nonsense
            yield digest, data[: at % 3 * 1000] + bytes(len(data) - at % 2) if wrong else data

    def fault(self, rng: random.Random) -> str:
        """Play a fault of this node, if one is drawn."""
        kind = rng.choice(FAULTS)
        if kind == "neighbour's disk":
            for pin in self.job.data.pins:
                if rng.random() < 0.5 and (pieces := self.job.node.open(pin.object_id)) is not None:
                    os.pwrite(pieces.data_fd, rng.randbytes(9), rng.randrange(pieces.size_bytes - 9))
        elif kind == "neighbour is away":  # or back
            self.says("127.0.0.1", rng.choice([1, self.server.port]))
        elif kind == "neighbour gives nonsense":
            self.nonsense = rng.choice([0.0, 0.3, 1.0])
        return kind if kind.startswith("neighbour") else ""

    def given_bytes(self, jobs: list[SimpleNamespace]) -> int:
        """Return what the jobs got from it."""
        return sum(job.fetching.neighbours.given_bytes for job in jobs)


def restarted(job: SimpleNamespace, source: Counted, limit: int | None) -> SimpleNamespace:
    """Return the job in another process, which was given the same pins."""
    channel = Direct(job.node, source)
    data = Data(job.data.url, job.data.pins, job.node, channel)
    return SimpleNamespace(data=data, node=job.node, source=source, channel=channel, fetching=channel.fetching)


def _fault(
    rng: random.Random, folder: Path, job: SimpleNamespace, names: list[str], full: list[float], changed: set[str]
) -> str:
    kind, name = rng.choice(FAULTS[:10]), rng.choice(names)
    object_id = job.data.pins[job.data.number(name)].object_id
    pieces = job.node.open(object_id)
    if kind == "clock":  # of this node, or of the server of its cache's file system
        at_s = time.time() + rng.choice([-1, 1]) * rng.random() * YEAR_S
        for path in [*folder.glob("cache/objects/*/*/about.json"), *folder.glob("cache/damaged/*")]:
            if rng.random() < 0.7:
                with suppress(FileNotFoundError):
                    os.utime(path, (at_s, at_s))
    elif kind == "full disk":
        full[0] = rng.choice([0.0, 0.5, 1.0])
    elif kind in ("replace", "remove") and len(changed) < 2 and rng.random() < 0.3:
        changed.add(name)
        (folder / "new").write_bytes(
            rng.randbytes((folder / "set" / name).stat().st_size if name not in changed else 9)
        )
        (folder / "new").replace(folder / "set" / name) if kind == "replace" else (folder / "set" / name).unlink(True)
    elif kind == "other job":
        direct(folder / "other", folder / "cache", 3 * PIECE_BYTES).data.read(0, 0, 3 * PIECE_BYTES)
    elif pieces is None:
        return "nothing there"
    elif kind == "evict":
        with job.node._locked():
            job.node._remove(object_id)
    elif kind == "flip":
        os.pwrite(pieces.data_fd, rng.randbytes(9), rng.randrange(pieces.size_bytes - 9))
    elif kind == "cut data":
        os.ftruncate(pieces.data_fd, rng.randrange(pieces.size_bytes))
    elif kind == "cut state":
        os.ftruncate(pieces.state_fd, rng.randrange(200))
    else:
        os.pwrite(pieces.state_fd, rng.randbytes(30), rng.randrange(200))
    return kind

"""One story of faults, drawn from a seed: readers of a dataset, and what happens to disk, cache and store.

Every sample that a reader gets has the bytes that its name was pinned with; or the reader gets a named error.
"""

import errno
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from cache_world import Counted, Direct, direct, fill

from cordee.errors import DataError, DataReplacedError
from cordee.storage.cache.api import Data
from cordee.storage.cache.pieces import PIECE_BYTES, Pieces

RECORD = PIECE_BYTES // 8
FAULTS = ("flip", "cut data", "cut state", "scribble state", "evict", "full disk", "replace", "remove", "other job")
FAULTS += ("clock",)
YEAR_S = 31_557_600


def play(seed: int, folder: Path) -> str:
    """Play one story; return what it has met."""
    rng = random.Random(seed)
    names = [f"{number}.bin" for number in range(4)]
    contents = fill(folder / "set", {name: rng.randrange(1, 4) * PIECE_BYTES for name in names}, seed)
    fill(folder / "other", {"x.bin": 3 * PIECE_BYTES}, seed + 1)
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

    with mock.patch.object(Pieces, "store", stored):
        for _ in range(60):
            if rng.random() < 0.3:
                met.append(_fault(rng, folder, jobs[0], names, full, changed))
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
    return f"{len(met)} faults, {met.count('named')} named errors"


def restarted(job: SimpleNamespace, source: Counted, limit: int | None) -> SimpleNamespace:
    """Return the job in another process, which was given the same pins."""
    channel = Direct(job.node, source)
    data = Data(job.data.url, job.data.pins, job.node, channel)
    return SimpleNamespace(data=data, node=job.node, source=source, channel=channel, fetching=channel.fetching)


def _fault(
    rng: random.Random, folder: Path, job: SimpleNamespace, names: list[str], full: list[float], changed: set[str]
) -> str:
    kind, name = rng.choice(FAULTS), rng.choice(names)
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

"""Speed of the storage under a folder: what is written and synced, and what is read back, not from memory."""

import os
import time
from contextlib import suppress
from pathlib import Path

from cordee.errors import DestinationError

BYTES = 128 << 20
_BLOCK = 4 << 20
REPEATS = 3


def storage_speed(folder: Path) -> dict[str, float]:
    """Return the bytes a second of writes with fsync and of reads, the middle of three.

    Raises:
        DestinationError: the folder cannot be written.
    """
    path = folder / f".cordee-calibrate.{os.getpid()}"
    writes, reads = [], []
    block = os.urandom(_BLOCK)  # what compresses would be too fast on some
    try:
        for _ in range(REPEATS):
            writes.append(write_s(path, block, BYTES))
            reads.append(read_s(path))
    except OSError as error:
        hint = "name a folder that can be written: --to"
        raise DestinationError(f"{folder} cannot be measured: {error.strerror}", hint=hint) from None
    finally:
        with suppress(OSError):
            path.unlink()
    middle = REPEATS // 2
    return {
        "write_bytes_per_s": BYTES / sorted(writes)[middle],
        "read_bytes_per_s": BYTES / sorted(reads)[middle],
    }


def write_s(path: Path, block: bytes, size: int) -> float:
    """Return the seconds in which so many bytes are written, in whole blocks, and synced.

    Raises:
        OSError: the file cannot be written.
    """
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def read_s(path: Path) -> float:
    """Return the seconds in which a file is read, after the kernel was asked to forget it.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        with suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it does not come from memory
        start = time.perf_counter()
        while file.read(_BLOCK):
            pass
        return time.perf_counter() - start

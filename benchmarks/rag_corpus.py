"""The corpus of `rag.py`: numbered passages whose vectors are drawn by their numbers, near one of 64 centres."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

DIMS, CENTRES, TABLE = 256, 64, 1 << 20
LINE_CHARS = 40
_NUMBER = re.compile(r"passage (\d+)")


def line(number: int) -> str:
    """Return a passage; all have one length, so that each is one chunk."""
    return f"passage {number:09d} is a line of text,".ljust(LINE_CHARS - 1) + "\n"


def write(path: Path, passages: int) -> None:
    """Write the corpus as one document."""
    with path.open("w") as out:
        out.writelines(line(number) for number in range(passages))


@cache
def _table() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((CENTRES, DIMS), np.float32), rng.standard_normal(TABLE, np.float32)


def embed(texts: list[str]) -> npt.NDArray[np.float32]:
    """Return the vectors of passages; a question that repeats one lies near it, and not on it."""
    numbers, asked = np.zeros(len(texts), np.int64), np.zeros(len(texts), bool)
    for at, text in enumerate(texts):
        found = _NUMBER.search(text)
        numbers[at], asked[at] = int(found[1]) if found else -1, "?" in text
    centres, noise = _table()
    places = (numbers[:, None] * 7919 + np.arange(DIMS)) % TABLE
    near = noise[(places + 31 * DIMS) % TABLE] * np.where(asked, np.float32(0.4), np.float32(0))[:, None]
    return centres[numbers % CENTRES] + noise[places] + near

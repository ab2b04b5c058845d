"""Destinations of checkpoints: a path, a URL of an object store, or several storage levels, nearest first.

A farther level may get fewer checkpoints: `/local/run, s3://bucket/run every 10` or `... every 30m`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cordee.errors import DestinationError, InputError
from cordee.storage.files import Blobs, FileBlobs, folder_of
from cordee.storage.levels import LeveledBlobs
from cordee.storage.remote import SCHEMES, RemoteBlobs
from cordee.units import parse_duration_s


@dataclass(frozen=True)
class Level:
    """One storage level. It gets every `every`th checkpoint, or one in `every_s` seconds; without either, all."""

    at: str
    every: int | None = None
    every_s: float | None = None

    def __str__(self) -> str:
        """Return the text that `parse_levels` reads."""
        often = f"{self.every}" if self.every else f"{self.every_s:.17g}s" if self.every_s else ""
        return f"{self.at} every {often}" if often else self.at


def parse_levels(to: str) -> tuple[Level, ...]:
    """Read the storage levels of a destination, and how often each gets a checkpoint.

    Raises:
        DestinationError: a level is empty, or a time cannot be read.

    >>> parse_levels("/local/run, s3://bucket/run every 10")[1]
    Level(at='s3://bucket/run', every=10, every_s=None)
    """
    found = []
    for text in (part.strip() for part in to.split(",")):
        if not text:
            raise DestinationError(
                f"{to!r} has an empty storage level", hint="a comma inside a path is written file:///a%2Cb"
            )
        at, often = text, ""
        if split := re.fullmatch(r"(\S.*?)\s+every\s+(\S+)", text):
            at, often = split[1], split[2]
        found.append(_level(at, often))
    if found[0].every or found[0].every_s:
        raise DestinationError(
            f"{found[0].at} is the nearest storage level, which gets each checkpoint",
            hint="set how often checkpoints are made by `every`, not in `to`",
        )
    return tuple(found)


def _level(at: str, often: str) -> Level:
    if not often:
        return Level(at)
    if often.isdecimal() and int(often) > 0:
        return Level(at, every=int(often) if int(often) > 1 else None)
    try:
        return Level(at, every_s=parse_duration_s(often))
    except InputError as error:
        raise DestinationError(
            f"{at} every {often} cannot be read",
            hint='write "every 10" or "every 30m"; a space inside a path is file:///a%20b',
        ) from error


def level_urls(to: str) -> tuple[str, ...]:
    """Return the paths and URLs of a destination's storage levels.

    >>> level_urls("/local/run, s3://bucket/run every 10")
    ('/local/run', 's3://bucket/run')
    """
    return tuple(level.at for level in parse_levels(to))


def moved(to: str, where: Callable[[str], str]) -> str:
    """Return the same destination with each level moved."""
    return ",".join(str(replace(level, at=where(level.at))) for level in parse_levels(to))


def is_remote(url: str) -> bool:
    """Return whether a storage level is in an object store."""
    return url.partition("://")[0] in SCHEMES and "://" in url


def check_destination(to: str) -> None:
    """Refuse a destination for which no store can be opened, without touching it.

    Raises:
        DestinationError: an unknown scheme, a URL without a bucket, or the same level twice.
    """
    found = level_urls(to)
    for url in found:
        if not is_remote(url):
            folder_of(url)
        elif not url.partition("://")[2].partition("/")[0]:
            raise DestinationError(f"{url!r} names no bucket", hint=f"write {url.partition('://')[0]}://bucket/prefix")
    if len({url.rstrip("/") for url in found}) < len(found):
        raise DestinationError(f"{to!r} names a storage level twice", hint="give each level a path or URL of its own")


def below(to: str, name: str) -> str:
    """Return the same destination, one folder deeper.

    >>> below("/a/,s3://b/c", "job-1")
    '/a/job-1,s3://b/c/job-1'
    """
    return moved(to, lambda url: f"{url.rstrip('/')}/{name}")


def absolute(to: str, cwd: str) -> str:
    """Return the same destination, independent of the working directory."""
    return moved(to, lambda place: place if "://" in place else str(Path(cwd) / Path(place).expanduser()))


def open_blobs(to: str) -> Blobs:
    """Open the store of a destination, or the stores of its levels as one.

    Raises:
        DestinationError: an unknown scheme, or a folder that cannot be made.
        MissingExtraError: an object store, without the library for it.
    """
    check_destination(to)
    opened: list[Blobs] = [RemoteBlobs(url) if is_remote(url) else FileBlobs(folder_of(url)) for url in level_urls(to)]
    return opened[0] if len(opened) == 1 else LeveledBlobs(opened)


def open_existing(to: str) -> Blobs:
    """Open the store of a destination that exists; no folder is made.

    Raises:
        DestinationError: there is no such folder; and as `open_blobs`.
    """
    check_destination(to)
    for url in level_urls(to):
        if not is_remote(url) and not folder_of(url).is_dir():
            raise DestinationError(
                f"there is no folder {folder_of(url)}",
                hint="a job's own folder is <to>/<job id>, or <to> without a server",
            )
    return open_blobs(to)

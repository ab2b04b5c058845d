"""Where checkpoints may go: a path, a URL of an object store, or several of them with commas between, nearest first.

A farther one may be given checkpoints more rarely: `/local/run, s3://bucket/run every 10` or `... every 30m`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from cordee.errors import DestinationError, InputError
from cordee.storage.files import Blobs, FileBlobs, folder_of
from cordee.storage.levels import LeveledBlobs
from cordee.storage.remote import SCHEMES, RemoteBlobs
from cordee.units import format_duration, parse_duration_s


@dataclass(frozen=True)
class Level:
    """One destination. It gets each `every`th checkpoint, or one in `every_s` seconds; without either, each."""

    at: str
    every: int | None = None
    every_s: float | None = None

    def __str__(self) -> str:
        """What `parse_levels` reads."""
        often = f"{self.every}" if self.every else f"{self.every_s:.17g}s" if self.every_s else ""
        return f"{self.at} every {often}" if often else self.at

    def frequency(self) -> str:
        """How often, for people.

        >>> Level("/a", every=10).frequency(), Level("/a", every_s=1800).frequency(), Level("/a").frequency()
        ('each 10th', 'every 30m', 'each')
        """
        if self.every_s:
            return f"every {format_duration(self.every_s)}"
        return f"each {self.every}th" if self.every else "each"


def parse_levels(to: str) -> tuple[Level, ...]:
    """The destinations that a text names, and how often each gets a checkpoint.

    Raises:
        DestinationError: an empty one, or a time that cannot be read.

    >>> parse_levels("/local/run, s3://bucket/run every 10")[1]
    Level(at='s3://bucket/run', every=10, every_s=None)
    """
    found = []
    for text in (place.strip() for place in to.split(",")):
        if not text:
            raise DestinationError(
                f"{to!r} names an empty destination", hint="a comma inside a path is written file:///a%2Cb"
            )
        at, often = text, ""
        if split := re.fullmatch(r"(\S.*?)\s+every\s+(\S+)", text):
            at, often = split[1], split[2]
        found.append(_place(at, often))
    if found[0].every or found[0].every_s:
        raise DestinationError(
            f"{found[0].at} is the nearest destination, which gets each checkpoint",
            hint="how often a checkpoint is made is said by `every`, apart from `to`",
        )
    return tuple(found)


def _place(at: str, often: str) -> Level:
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
    """The destinations that a text names.

    >>> places("/local/run, s3://bucket/run every 10")
    ('/local/run', 's3://bucket/run')
    """
    return tuple(place.at for place in parse_levels(to))


def moved(to: str, where: Callable[[str], str]) -> str:
    """The same text with each destination put elsewhere."""
    return ",".join(str(replace(place, at=where(place.at))) for place in parse_levels(to))


def is_remote(place: str) -> bool:
    """Whether one destination is in an object store."""
    return place.partition("://")[0] in SCHEMES and "://" in place


def check_destination(to: str) -> None:
    """Refuse what no store can be opened for; touches nothing.

    Raises:
        DestinationError: an unknown scheme, a URL without a bucket, or the same place twice.
    """
    found = level_urls(to)
    for place in found:
        if not is_remote(place):
            folder_of(place)
        elif not place.partition("://")[2].partition("/")[0]:
            raise DestinationError(
                f"{place!r} names no bucket", hint=f"write {place.partition('://')[0]}://bucket/prefix"
            )
    if len({place.rstrip("/") for place in found}) < len(found):
        raise DestinationError(f"{to!r} names a destination twice", hint="each level is a place of its own")


def below(to: str, name: str) -> str:
    """The same destinations, a folder deeper.

    >>> below("/a/,s3://b/c", "job-1")
    '/a/job-1,s3://b/c/job-1'
    """
    return moved(to, lambda place: f"{place.rstrip('/')}/{name}")


def open_blobs(to: str) -> Blobs:
    """The store behind a destination, or the levels behind several.

    Raises:
        DestinationError: an unknown scheme, or a folder that cannot be made.
        MissingExtraError: an object store, without the library for it.
    """
    check_destination(to)
    opened: list[Blobs] = [
        RemoteBlobs(place) if is_remote(place) else FileBlobs(folder_of(place)) for place in level_urls(to)
    ]
    return opened[0] if len(opened) == 1 else LeveledBlobs(opened)


def open_existing(to: str) -> Blobs:
    """The same, of a destination that is there: a folder that does not exist is not made.

    Raises:
        DestinationError: there is no such folder; and as `open_blobs`.
    """
    check_destination(to)
    for place in level_urls(to):
        if not is_remote(place) and not folder_of(place).is_dir():
            raise DestinationError(
                f"there is no folder {folder_of(place)}",
                hint="a job's own folder is <to>/<job id>, or <to> without a server",
            )
    return open_blobs(to)

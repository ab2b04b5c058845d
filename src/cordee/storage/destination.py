"""Where checkpoints may go: a path, a URL of an object store, or several of them with commas between, nearest first."""

from cordee.errors import DestinationError
from cordee.storage.files import Blobs, FileBlobs, folder_of
from cordee.storage.remote import SCHEMES, RemoteBlobs
from cordee.storage.tiers import Tiers


def places(to: str) -> tuple[str, ...]:
    """The destinations that a text names.

    >>> places("/local/run, s3://bucket/run")
    ('/local/run', 's3://bucket/run')
    """
    found = tuple(place.strip() for place in to.split(","))
    if not all(found):
        raise DestinationError(
            f"{to!r} names an empty destination", hint="a comma inside a path is written file:///a%2Cb"
        )
    return found


def is_remote(place: str) -> bool:
    """Whether one destination is in an object store."""
    return place.partition("://")[0] in SCHEMES and "://" in place


def check_destination(to: str) -> None:
    """Refuse what no store can be opened for; touches nothing.

    Raises:
        DestinationError: an unknown scheme, a URL without a bucket, or the same place twice.
    """
    found = places(to)
    for place in found:
        if not is_remote(place):
            folder_of(place)
        elif not place.partition("://")[2].partition("/")[0]:
            raise DestinationError(
                f"{place!r} names no bucket", hint=f"write {place.partition('://')[0]}://bucket/prefix"
            )
    if len({place.rstrip("/") for place in found}) < len(found):
        raise DestinationError(f"{to!r} names a destination twice", hint="each tier is a place of its own")


def below(to: str, name: str) -> str:
    """The same destinations, a folder deeper.

    >>> below("/a/,s3://b/c", "job-1")
    '/a/job-1,s3://b/c/job-1'
    """
    return ",".join(f"{place.rstrip('/')}/{name}" for place in places(to))


def open_blobs(to: str) -> Blobs:
    """The store behind a destination, or the tiers behind several.

    Raises:
        DestinationError: an unknown scheme, or a folder that cannot be made.
        MissingExtraError: an object store, without the library for it.
    """
    check_destination(to)
    opened: list[Blobs] = [
        RemoteBlobs(place) if is_remote(place) else FileBlobs(folder_of(place)) for place in places(to)
    ]
    return opened[0] if len(opened) == 1 else Tiers(opened)


def open_existing(to: str) -> Blobs:
    """The same, of a destination that is there: a folder that does not exist is not made.

    Raises:
        DestinationError: there is no such folder; and as `open_blobs`.
    """
    check_destination(to)
    for place in places(to):
        if not is_remote(place) and not folder_of(place).is_dir():
            raise DestinationError(
                f"there is no folder {folder_of(place)}",
                hint="a job's own folder is <to>/<job id>, or <to> without a server",
            )
    return open_blobs(to)

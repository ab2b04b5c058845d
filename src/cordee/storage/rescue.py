"""How the drains of a gang whose trainers have died agree on the newest capture that all of them hold in memory.

Each writes which saves it holds whole, reads what the others hold, and takes the newest that is everyone's: no rank is
asked twice, and none decides alone. The next attempt waits for it, since its first record fences them.

    parts/<epoch>-<nonce>/held-<rank>      sealed {"format":1,"saves":[n...]}; none: this rank has nothing to bring
    parts/<epoch>-<nonce>/rescued          sealed {"format":1,"save":n or null}: it is over, and this came of it
"""

from collections.abc import Callable, Iterable

from cordee.storage.files import Blobs
from cordee.storage.log import Entry
from cordee.storage.sealed import FORMAT, Damaged, seal, unseal

DRAIN = "CORDEE_DRAIN"
"""In the environment of a drain, so that whoever ends the processes of an attempt can spare it for a while."""

RESCUE_S_MAX = 120.0
"""What the drains of dead trainers are given: after it the agent ends them, and the next attempt fences them."""


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
    """Say that it is over; the first word stands."""
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


def newest_attempt(entries: list[Entry]) -> tuple[int, str] | None:
    """(epoch, nonce) of the newest attempt in the log."""
    opened = [entry.record for entry in entries if entry.record and entry.record.kind == "open"]
    return (opened[-1].epoch, opened[-1].nonce) if opened else None


def is_running(blobs: Blobs, epoch: int, nonce: str) -> bool:
    """Do drains of this attempt still bring what they hold?"""
    if blobs.size(rescued_key(epoch, nonce)) is not None:
        return False
    try:
        found = [blobs.get(key) for key in blobs.list(_folder(epoch, nonce)) if "/held-" in key]
        return any(data is not None and unseal(data)["saves"] for data in found)
    except Damaged:
        return False


def _folder(epoch: int, nonce: str) -> str:
    return f"parts/{epoch}-{nonce}"

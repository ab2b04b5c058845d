"""Which objects leave the cache when room is needed: a pure function of what is there and who will still read it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """An object in the cache.

    Attributes:
        object_id: its name in the cache.
        size_bytes: the room that it takes when it is complete.
        used_s: when a process last opened it.
        is_kept: whether somebody was given its path, and may open it at any time.
    """

    object_id: str
    size_bytes: int
    used_s: float
    is_kept: bool = False


def victims(
    held: Iterable[Held], next_use: Mapping[str, float], needed_bytes: int, *, before: float = 0.0
) -> list[Held] | None:
    """Return the objects that leave so that this room comes free; None: it cannot.

    First those that nobody will read, the longest unused first; then those that are read last (Belady, A study of
    replacement algorithms for a virtual-storage computer, 1966: here the future is known). None leaves that is read
    before the one that comes.

    Args:
        held: the objects in the cache.
        next_use: how soon each is read, in any unit; an object without an entry is read by nobody.
        needed_bytes: the room.
        before: how soon the one that comes is read.

    >>> [each.object_id for each in victims([Held("a", 5, 1), Held("b", 5, 2), Held("c", 5, 3)], {"a": 7, "b": 9}, 10)]
    ['c', 'b']
    """

    def order(each: Held) -> tuple[float, float, str]:
        return -next_use.get(each.object_id, math.inf), each.used_s, each.object_id

    found, freed = [], 0
    for each in sorted((each for each in held if not each.is_kept), key=order):
        if freed >= needed_bytes:
            break
        if next_use.get(each.object_id, math.inf) <= before:
            return None
        found.append(each)
        freed += each.size_bytes
    return found if freed >= needed_bytes else None

"""The garbage collector of a process with much state: new objects are looked at often, all of them seldom.

A cycle leaves no circles behind (a test), so a pass over everything finds nothing of it; at 12,500 nodes one takes a
third of a second. Here such passes wait until nobody does. Who calls `decide` by himself keeps Python's own settings.
They are the process's: two such stretches must not overlap in two threads, and what a host has frozen itself is thawed.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NEW, _MIDDLE, _ALL = 10_000, 20, 100
"""A pass over young objects after so many new ones; so many of these make one of middle age; so many of those one over
all of them, wherever it falls: only a process that was never idle comes to that."""

_DUE = 5  # passes of middle age, thus a million new objects, after which an idle moment is used
_WHOLE = 50  # so many passes in idle moments are one over what outlived those before, too


@contextmanager
def collected_when_idle() -> Iterator[Callable[[], None]]:
    """Inside, everything is looked through only when the caller says, by what this gives, that nothing waits for it."""
    before, passes = gc.get_threshold(), 0

    def idle() -> None:
        nonlocal passes
        if passes and gc.get_count()[2] < _DUE:
            return
        if passes % _WHOLE == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()  # what lives on is not looked at again
        passes += 1

    gc.set_threshold(_NEW, _MIDDLE, _ALL)
    try:
        yield idle
    finally:
        gc.set_threshold(*before)
        if passes:
            gc.unfreeze()

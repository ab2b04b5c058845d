"""Garbage collection for a process with much state: new objects are collected often, all objects only when idle.

The scheduler's cycle leaves no reference cycles (a test checks it), so a full collection finds nothing there; at 12,500
nodes it takes a third of a second. Full collections therefore wait until no request waits for the process. The settings
are process-wide: two threads must not use this at once, and objects that the host program froze are unfrozen.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_THRESHOLDS = (10_000, 20, 100)
"""Thresholds of the garbage collector: generations 0, 1, 2. Only a process that is never idle reaches the last one."""

_DUE = 5  # collections of generation 1, thus a million new objects, before an idle moment is used
_UNFREEZE_EVERY = 50  # every 50th collection in an idle moment also covers the objects that were frozen


@contextmanager
def collected_when_idle(every: int = _THRESHOLDS[0]) -> Iterator[Callable[[], None]]:
    """Collect all generations only when the caller calls the yielded function, which it does when it is idle.

    Between these moments new objects are collected once there are `every` more of them.
    """
    before, passes = gc.get_threshold(), 0

    def idle() -> None:
        nonlocal passes
        if passes and gc.get_count()[2] < _DUE:
            return
        if passes and passes % _UNFREEZE_EVERY == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()  # later collections skip the objects that survived
        passes += 1

    gc.set_threshold(every, *_THRESHOLDS[1:])
    try:
        yield idle
    finally:
        gc.set_threshold(*before)
        if passes:
            gc.unfreeze()

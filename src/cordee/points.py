"""Named points at which a test can kill this process, to see that whatever it left behind is harmless.

`CORDEE_TEST_KILL_AT=commit.before` kills at the first pass of that point, `commit.before:3` at the third.
"""

import os
import signal
from collections import Counter
from functools import cache

_passed: Counter[str] = Counter()


@cache
def _wanted() -> tuple[str, int]:
    """Return the point and the pass at which to die. Read once, at the first point: a tick passes many."""
    name, _, turn = os.environ.get("CORDEE_TEST_KILL_AT", "").partition(":")
    return name, int(turn or 1)


def point(name: str) -> None:
    """Die here by SIGKILL if the environment says so; otherwise do nothing."""
    wanted, turn = _wanted()
    if name != wanted:
        return
    _passed[name] += 1
    if _passed[name] == turn:
        os.kill(os.getpid(), signal.SIGKILL)

"""Named points at which a test can kill this process, to see that whatever it left behind is harmless.

`CORDEE_TEST_KILL_AT=commit.before` kills at the first pass of that point, `commit.before:3` at the third. It is read
when a process begins: a tick passes seven points, and reading it there was 3 % of a simulation.
"""

import os
import signal
from collections import Counter

_AT, _, _TURN = os.environ.get("CORDEE_TEST_KILL_AT", "").partition(":")
_passed: Counter[str] = Counter()


def point(name: str) -> None:
    """Die here by SIGKILL if the environment says so; otherwise do nothing."""
    if not _AT:
        return
    _passed[name] += 1
    if name == _AT and _passed[name] == int(_TURN or 1):
        os.kill(os.getpid(), signal.SIGKILL)

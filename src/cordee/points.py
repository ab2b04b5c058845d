"""Named points at which a test can kill this process, to see that whatever it left behind is harmless.

`CORDEE_TEST_KILL_AT=commit.before` kills at the first pass of that point, `commit.before:3` at the third.
"""

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def point(name: str) -> None:
    """Die here by SIGKILL if the environment says so; otherwise do nothing."""
    wanted = os.environ.get("CORDEE_TEST_KILL_AT")
    if not wanted:
        return
    _passed[name] += 1
    at, _, turn = wanted.partition(":")
    if at == name and _passed[name] == int(turn or 1):
        os.kill(os.getpid(), signal.SIGKILL)

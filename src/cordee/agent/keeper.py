"""`python -m cordee.agent.keeper --folder F`: the agent's parent, which starts another agent when one was killed.

Ranks outlive an agent that is killed, and nobody else would end them when the node's lease is over. The next agent ends
them at once. The keeper does nothing else, so that it does not die of it.
"""

import signal
import subprocess
import sys
import threading
import time
from types import FrameType

AGAIN_S_MIN, AGAIN_S_MAX = 0.1, 5.0
"""The time between two starts: it doubles while agents live no longer than the second value."""

CRASHED = 99
"""The exit code of an agent that an internal error has ended."""


class Keeper:
    """The parent of one agent at a time.

    Args:
        argv: the agent's command.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._agent: subprocess.Popen[bytes] | None = None
        self._ends = threading.Event()

    def run(self) -> int:
        """Keep an agent running until one exits by itself or a signal ends it; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        again_s = AGAIN_S_MIN
        while True:
            began_s = time.monotonic()
            self._agent = subprocess.Popen(self._argv)
            if self._ends.is_set():  # the signal came before there was an agent
                self._agent.terminate()
            code = self._agent.wait()
            if self._ends.is_set() or not (code < 0 or code == CRASHED):
                return max(code, 0)
            again_s = AGAIN_S_MIN if time.monotonic() - began_s > AGAIN_S_MAX else min(2 * again_s, AGAIN_S_MAX)
            why = f"was killed by signal {-code}" if code < 0 else "has failed"
            print(f"the agent {why}; another one starts in {again_s:.1f} s", file=sys.stderr, flush=True)
            if self._ends.wait(again_s):
                return 0

    def _end(self, number: int, _: FrameType | None) -> None:
        self._ends.set()
        if self._agent is not None:
            self._agent.send_signal(number)


if __name__ == "__main__":
    sys.exit(Keeper([sys.executable, "-m", "cordee.agent", *sys.argv[1:]]).run())

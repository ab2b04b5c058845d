"""A job in a terminal of its own: `terminal_script.py <folder> <trains|hangs> [terminal]`.

From step 5 on it trains without end, or hangs in that step. Without a terminal it writes to standard output.
"""

import os
import signal
import sys
import threading

import cordee


def take(terminal: str) -> None:
    """Make this the terminal of this process, which a shell does for what it starts."""
    os.setsid()
    fd = os.open(terminal, os.O_RDWR)  # the first terminal that the leader of a session opens is the session's
    for number in range(3):
        os.dup2(fd, number)
    sys.stdin = os.fdopen(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(to: str, how: str, terminal: str | None = None) -> None:
    if terminal is not None:
        take(terminal)
    tick = threading.Event()
    with cordee.job({"n": 0}, to=to, every=1000) as job:
        for step in job.steps(10**9):
            tick.wait(0.01)
            if step == 5:
                print("in step 5", flush=True)
                while how == "hangs":
                    tick.wait(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])

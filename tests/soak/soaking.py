"""The time of a soak test, and the seeds that it plays in it."""

import os
import random
import shlex
import sys
import time
from collections.abc import Callable

SECONDS = float(os.environ.get("CORDEE_SOAK_S", "600"))


class Soak:
    """The time of one test, and the seeds that it plays in it."""

    def __init__(self, nodeid: str) -> None:
        self._nodeid = nodeid
        self.seconds = SECONDS
        self._only = os.environ.get("CORDEE_SOAK_SEED")
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def say(self, what: str) -> None:
        print(f"{self.elapsed_s:7.1f} s  {what}", flush=True)

    def play(
        self,
        story: Callable[[int], object],
        *,
        at_most: int | None = None,
        until: Callable[[], bool] = lambda: False,
        say_every: int = 1,
    ) -> None:
        """Play stories until the time is up, or enough is done; each returns what there is to say of it."""
        seed = int(self._only) if self._only else random.SystemRandom().randrange(10**9)
        at_most = 1 if self._only else at_most
        played, said = 0, None
        print(f"\n{self._nodeid}", flush=True)
        while played != at_most and not until() and (played == 0 or self.elapsed_s < self.seconds):
            try:
                said = story(seed + played)
            except BaseException:
                environ = f"CORDEE_SOAK_SEED={seed + played} CORDEE_SOAK_S={self.seconds:g}"
                print(
                    f"replay: {environ} {sys.executable} -m pytest -s -m soak {shlex.quote(self._nodeid)}", flush=True
                )
                raise
            played += 1
            if played % say_every == 0:
                self.say(f"seed {seed + played - 1}: {said}")
        self.say(f"{played} seeds from {seed}: {said}")

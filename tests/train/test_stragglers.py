"""Who holds the others up: what is concluded from signs of life."""

import random
from dataclasses import replace

import pytest

from cordee.events import Behind
from cordee.train.watch.stragglers import (
    ENDED,
    SLOW_WINDOWS,
    WINDOW_STEPS,
    Sign,
    SlowRank,
    SlowRankDetector,
    find_stuck,
)

STUCK, SILENT = Behind.STUCK, Behind.SILENT


def sign(step: int = 12, *, stuck: bool = True, waits: bool | None = True, begun: int = 40, **more: object) -> Sign:
    told = {"beat": 1, "still_s": 70.0, "waited_s": 0.0, "watched_s": 1.0, "host": "a", "pid": 1, **more}
    return Sign(step=step, stuck=stuck, waits=waits, begun=begun, **told)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("signs", "silent", "found"),
    [
        # The one that is outside of all collectives, also if its host is steps ahead of the others.
        ([sign(), sign(waits=False, begun=39), sign()], {}, [(1, STUCK)]),
        ([sign(), sign(14, waits=False), sign()], {}, [(1, STUCK)]),
        # All wait: the one that began fewer steps, or fewer collectives; and nobody in particular.
        ([sign(), sign(), sign(11)], {}, [(2, STUCK)]),
        ([sign(), sign(begun=39), sign()], {}, [(1, STUCK)]),
        ([sign(), sign(), sign()], {}, [(0, STUCK), (1, STUCK), (2, STUCK)]),
        # Nothing is known of collectives.
        ([sign(waits=None), sign(9, waits=None), sign(waits=None)], {}, [(1, STUCK)]),
        # The others go on, since nothing binds them to it.
        ([sign(90, stuck=False, waits=False), sign(waits=False), sign(88, stuck=False, waits=False)], {}, [(1, STUCK)]),
        # Whose watcher is gone too says nothing any more: what it said last is old.
        ([sign(), sign(5, stuck=False, waits=False), sign(waits=False)], {1: 20.0}, [(1, SILENT)]),
    ],
)
def test_find_stuck(signs: list[Sign], silent: dict[int, float], found: list[tuple[int, Behind]]) -> None:
    assert find_stuck(dict(enumerate(signs)), silent) == found


class Gang:
    """Ranks whose waiting is drawn: the part of each window that a rank waits, and how far windows scatter."""

    def __init__(self, seed: int, scatter: float) -> None:
        self.random, self.scatter = random.Random(seed), scatter
        self.signs = {rank: sign(0, stuck=False, watched_s=0.001) for rank in range(4)}
        self.slowness = SlowRankDetector(10.0)
        assert self.slowness.look(self.signs) is None

    def window(self, *waits: float, steps: int = 50, seconds: float = 10.0) -> SlowRank | None:
        for rank, share in enumerate(waits):
            now, drawn = self.signs[rank], min(1.0, max(0.0, self.random.gauss(share, self.scatter)))
            waited_s, watched_s = now.waited_s + drawn * seconds, now.watched_s + seconds
            self.signs[rank] = replace(now, step=now.step + steps, waited_s=waited_s, watched_s=watched_s)
        return self.slowness.look(self.signs)


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_rank_is_told_once_and_so_is_its_end(seed: int) -> None:
    gang = Gang(seed, scatter=0.03)
    assert [gang.window(0.4, 0.4, 0.4, 0.4) for _ in range(100)] == [None] * 100, "nobody is slow"
    told = [gang.window(0.7, 0.7, 0.35, 0.7) for _ in range(10)]
    assert told[: SLOW_WINDOWS - 1] == [None] * (SLOW_WINDOWS - 1)
    slow = [each for each in told if each is not None]
    assert len(slow) == 1 and slow[0].rank == 2 and slow[0].waited == pytest.approx(0.35, abs=0.15)
    over = [each for each in (gang.window(0.4, 0.4, 0.4, 0.4) for _ in range(10)) if each is not None]
    assert over == [SlowRank(2, 0.0)]


def test_rank_that_is_late_now_and_then_is_not_slow() -> None:
    gang = Gang(0, scatter=0.0)
    for _ in range(50):
        assert gang.window(0.7, 0.7, 0.7, 0.1) is None, "one window"
        assert gang.window(0.7, 0.1, 0.7, 0.7) is None, "another rank"


def test_windows_hold_whole_steps_and_need_all_ranks() -> None:
    gang = Gang(0, scatter=0.0)
    apart = (0.7, 0.7, 0.1, 0.7)
    few = [gang.window(*apart, steps=1) for _ in range(SLOW_WINDOWS * WINDOW_STEPS - 1)]
    assert few == [None] * len(few) and gang.window(*apart, steps=1) is not None
    short = Gang(0, scatter=0.0)
    assert [short.window(*apart, seconds=1.0) for _ in range(25)] == [None] * 25
    gone = Gang(0, scatter=0.0)
    gone.signs[3] = replace(gone.signs[3], beat=ENDED)
    assert [gone.window(*apart) for _ in range(10)] == [None] * 10

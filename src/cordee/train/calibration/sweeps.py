"""Sweeps over all cases of a device until each is steady.

A sweep runs every case once, so that a neighbour who comes and goes disturbs a few runs of each and not all of one.
Runs at another speed of the device are repeated.
"""

import time
from collections.abc import Iterator, Sequence

from cordee.hardware.measured import Sample
from cordee.train.calibration.pace import BLOCK_S, Pace
from cordee.train.calibration.timing import SWEEPS_MIN, Case, Device

SWEEPS_MAX = 200


def measure(cases: Sequence[Case], device: Device, limit_s: float, pace: Pace | None = None) -> Iterator[Sample]:
    """Yield each case's time; those that are not steady when the limit has passed as they are.

    Runs while the device was slower are repeated once it is fast again, as long as the pace waits for that; where it is
    faster than ever, all runs before are.

    Args:
        cases: in the order of a sweep.
        device: where they run.
        limit_s: CPU seconds of this process, or wall seconds on a GPU, for all of them together.
        pace: sees whether the device is slower; None: nobody looks.
    """
    clock = time.process_time if device.kind == "cpu" else time.perf_counter
    until, waiting = clock() + limit_s, list(cases)
    for _ in range(SWEEPS_MAX):
        is_over = clock() >= until
        _sweep(cases, waiting, device, None if is_over else pace)
        waiting = [case for case in cases if not case.steady]
        if not waiting or (is_over and all(len(case.found) >= SWEEPS_MIN for case in waiting)):
            break
    yield from (case.result() for case in cases)


def _sweep(cases: Sequence[Case], waiting: Sequence[Case], device: Device, pace: Pace | None) -> None:
    """Run each waiting case once, and look at the device's speed after each block of them."""
    block: list[Case] = []
    begun = time.perf_counter()
    for case in waiting:
        case.sample(device)
        block.append(case)
        if pace is None or (time.perf_counter() - begun < BLOCK_S and case is not waiting[-1]):
            continue
        seen = pace.seen()
        if seen == "faster":
            _drop(cases, pace, every=True)
        elif seen == "slower" and pace.wait():
            _drop(block, pace, every=False)
        block, begun = [], time.perf_counter()


def _drop(cases: Sequence[Case], pace: Pace, *, every: bool) -> None:
    """Forget the last run of these cases, or every run."""
    for case in cases:
        dropped = len(case.found) if every else min(1, len(case.found))
        del case.found[len(case.found) - dropped :]
        pace.repeated += dropped

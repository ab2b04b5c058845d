"""Metrics under names of the script's own: points of their curves, reported every few seconds.

This file needs no torch. A value on a GPU is read a step later or some, so that the loop waits for nothing.
"""

import logging
import math
import time
from collections.abc import Mapping

from cordee.errors import InputError
from cordee.events import MetricsLogged
from cordee.reports import LIST_ITEMS_MAX, METRIC_NAME, METRICS_MAX
from cordee.train.reading import Reading
from cordee.train.report import Reporter
from cordee.train.trackers import Trackers

log = logging.getLogger("cordee")

PERIOD_S = 5.0
POINTS_MAX = 20
"""Points of one metric in one report: four a second."""

_KEPT_MAX = 1_000  # readings of one metric that wait for a report


class Metrics:
    """The values that one rank's script logged; those of rank 0 are reported."""

    def __init__(self, reporter: Reporter, rank: int, trackers: Trackers | None = None) -> None:
        self._reporter, self._rank, self._trackers = reporter, rank, trackers
        self._points: dict[str, list[tuple[int, Reading]]] = {}  # by name: steps and values, the newest last
        self._next_s = 0.0

    def log(self, values: Mapping[str, object], step: int) -> None:
        """Take values of this step, of each metric the newest: a number, or a tensor with one element.

        Raises:
            InputError: a name or a value is none, or there are too many names.
        """
        for name, value in values.items():
            points = self._points.get(name)
            if points is None:
                self._check(name)
            reading = value if isinstance(value, Reading) else Reading(name, value)
            if points is None:
                points = self._points[name] = []
            if points and points[-1][0] >= step:
                points[:] = [each for each in points if each[0] < step]  # logged again, or the job was rolled back
            points.append((step, reading))
            if len(points) > _KEPT_MAX:  # the device is that far behind, or the steps are that short
                del points[:-1:2]

    def _check(self, name: str) -> None:
        if not METRIC_NAME.fullmatch(name):
            raise InputError(
                f"{name!r} cannot name a metric", hint="use letters, digits and _ . / -, 64 at most, a letter first"
            )
        if len(self._points) >= METRICS_MAX:
            raise InputError(
                f"{name!r} is one more than {METRICS_MAX} metrics", hint="log the few that you compare runs by"
            )

    def stepped(self, step: int) -> None:
        """Report if a report is due; `step` steps are done. Values that have not arrived wait for the next one."""
        if self._points and time.monotonic() >= self._next_s:
            self._report(step, last=False)

    def close(self, most_s: float) -> None:
        """Let the trackers write what waits, for so many seconds."""
        if self._trackers is not None:
            self._trackers.close(most_s)

    def report(self, step: int) -> None:
        """Report all values logged since the last report, even if that waits for a device."""
        self._report(step, last=True)

    def _report(self, step: int, *, last: bool) -> None:
        if self._rank != 0:
            self._points.clear()
            return
        try:
            found = self._arrived(last=last)
        except RuntimeError as error:  # A failed device must not keep a rank from leaving.
            self._points.clear()
            log.warning("the metrics of step %d cannot be read: %s", step, error)
            return
        if found:
            if self._trackers is not None:
                self._trackers.put(found)
            steps, names, numbers = zip(*found, strict=True)
            values = tuple(number if math.isfinite(number) else None for number in numbers)
            self._reporter.append(MetricsLogged, rank=self._rank, step=step, names=names, values=values, steps=steps)
            self._next_s = time.monotonic() + PERIOD_S

    def _arrived(self, *, last: bool) -> list[tuple[int, str, float]]:
        """Take the values that can be read, by step; of many of one metric some, and always the newest."""
        most = max(1, min(POINTS_MAX, LIST_ITEMS_MAX // max(1, len(self._points))))
        found: list[tuple[int, str, float]] = []
        for name, points in self._points.items():
            ready = len(points) if last else next((i for i, each in enumerate(points) if not each[1].is_ready()), None)
            taken, points[:] = points[:ready], points[len(points) if ready is None else ready :]
            found += [(step, name, reading.number()) for step, reading in thinned(taken, most)]
        self._points = {name: points for name, points in self._points.items() if points}
        return sorted(found, key=lambda each: each[0])


def thinned(points: list[tuple[int, Reading]], most: int) -> list[tuple[int, Reading]]:
    """Return at most so many of the points: the newest, and those at equal distances before it.

    >>> [step for step, _ in thinned([(step, Reading("a", 1)) for step in range(10)], 4)]
    [0, 3, 6, 9]
    """
    stride = -(-len(points) // most) or 1
    return points[::-1][::stride][::-1]

"""Metrics under names of the script's own: their newest values, reported every few seconds.

This file needs no torch. A tensor is read only when it is reported.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from cordee.errors import InputError
from cordee.events import MetricsLogged
from cordee.reports import METRIC_NAME, METRICS_MAX
from cordee.train.report import Reporter

log = logging.getLogger("cordee")

PERIOD_S = 5.0


class Metrics:
    """The newest values that one rank's script logged; those of rank 0 are reported."""

    def __init__(self, reporter: Reporter, rank: int) -> None:
        self._reporter, self._rank = reporter, rank
        self._values: dict[str, Any] = {}
        self._next_s = 0.0

    def log(self, values: Mapping[str, object]) -> None:
        """Take the newest value of each metric: a number, or a tensor with one element.

        Raises:
            InputError: a name or a value is none, or there are too many names.
        """
        for name, value in values.items():
            if not METRIC_NAME.fullmatch(name):
                raise InputError(
                    f"{name!r} cannot name a metric", hint="use letters, digits and _ . / -, 64 at most, a letter first"
                )
            if name not in self._values and len(self._values) >= METRICS_MAX:
                raise InputError(
                    f"{name!r} is one more than {METRICS_MAX} metrics", hint="log the few that you compare runs by"
                )
            self._values[name] = _number(name, value)

    def stepped(self, step: int) -> None:
        """Report if a report is due; `step` steps are done."""
        if self._values and time.monotonic() >= self._next_s:
            self.report(step)

    def report(self, step: int) -> None:
        """Report the values logged since the last report."""
        found, self._values = self._values, {}
        if found and self._rank == 0:
            try:
                numbers = [float(value) for value in found.values()]
            except RuntimeError as error:  # A failed device must not keep a rank from leaving.
                log.warning("the metrics of step %d cannot be read: %s", step, error)
                return
            values = tuple(number if math.isfinite(number) else None for number in numbers)
            self._reporter.append(MetricsLogged, rank=self._rank, step=step, names=tuple(found), values=values)
            self._next_s = time.monotonic() + PERIOD_S


def _number(name: str, value: Any) -> Any:
    if hasattr(value, "detach") and hasattr(value, "numel"):
        if value.numel() == 1:
            return value.detach()
        raise InputError(f"the metric {name!r} has {value.numel()} values", hint="log one: its mean, for example")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"the metric {name!r} is {value!r}, not a number", hint="log numbers only") from None

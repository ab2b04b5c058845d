"""A trial of a sweep as its script sees it: its values, and the steps at which it leaves until its sweep promotes it.

This file needs no torch.
"""

import json
import os
from collections.abc import Mapping

from cordee.workload.sweep import RUNGS_ENV, TRIAL_ENV, Value


def trial(env: Mapping[str, str] | None = None) -> dict[str, Value]:
    """Return the values that the sweep has chosen for this trial, by name; empty outside of a sweep.

    >>> trial({"CORDEE_TRIAL": '{"lr": 0.001, "seed": 3}'})
    {'lr': 0.001, 'seed': 3}
    """
    found: dict[str, Value] = json.loads((os.environ if env is None else env).get(TRIAL_ENV) or "{}")
    return found


def rungs(env: Mapping[str, str] | None = None) -> tuple[int, ...]:
    """Return the steps at which this trial saves and leaves, ascending; empty outside of a sweep with rungs.

    A trial that was restored at one of them goes on to the next. The last one is the end of its training.

    >>> rungs({"CORDEE_RUNGS": "10,30,90"}), rungs({})
    ((10, 30, 90), ())
    """
    text = (os.environ if env is None else env).get(RUNGS_ENV)
    return tuple(int(step) for step in text.split(",")) if text else ()

"""The policies that can be compared by name, and what each is told of run times.

`sjf`, `srsf` and `easy` rest on estimates; here they get the true run times, which is more than any real one has. All
others know of a job only what it has done so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.errors import InputError
from cordee.schedule.policy import NAMED, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A policy as it is compared."""

    name: str
    says: str
    policy: Policy
    estimates: bool = False


_SAYS: dict[str, tuple[str, str, bool]] = {  # name: of the scheduler's, what it does, whether it is told run times
    "house": ("cordee", "what `cordee up` runs", False),
    "fifo": ("fifo", "strict order of arrival", False),
    "fit": ("fit", "order of arrival, whoever fits", False),
    "easy": ("easy", "order of arrival, a reservation, backfill around it", True),
    "sjf": ("sjf", "shortest first, whoever fits", True),
    "srsf": ("srsf", "shortest remaining service first, pushes", True),
    "2d-las": ("las", "least attained service first in two levels, pushes (Tiresias)", False),
    "fgd": ("fgd", "as house, but packed by fragmentation gradient descent (FGD)", False),
    "no-notice": ("kill", "as house, but who is pushed is killed without warning", False),
}

POLICIES = {
    name: Named(name=name, says=says, policy=NAMED[known], estimates=estimates)
    for name, (known, says, estimates) in _SAYS.items()
}


def chosen(names: Sequence[str]) -> list[Named]:
    """The policies of these names, each once.

    Raises:
        InputError: there is none of that name.
    """
    for name in names:
        if name not in POLICIES:
            raise InputError(f"there is no policy {name!r}", hint=f"use {', '.join(POLICIES)}")
    if not names:
        raise InputError("no policy is named", hint=f"use {', '.join(POLICIES)}")
    return [POLICIES[name] for name in dict.fromkeys(names)]

"""The policies that can be compared by name.

`sjf`, `srsf` and `easy` rest on estimates; here they get the true run times, which no real cluster has. All others know
of a job only what it has done so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cordee.control.patience import PATIENCE_MAX, parse_patience
from cordee.errors import InputError
from cordee.near import did_you_mean
from cordee.schedule.policy import NAMED, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """A policy in a comparison; with `estimates` it gets the true run times."""

    name: str
    description: str
    policy: Policy
    estimates: bool = False


_DESCRIPTIONS: dict[str, tuple[str, str, bool]] = {  # name: policy, description, true run times
    "cordee": ("cordee", "the policy of `cordee up`", False),
    "fifo": ("fifo", "strict order of arrival", False),
    "fit": ("fit", "order of arrival, every job that fits", False),
    "easy": ("easy", "order of arrival, a reservation, backfill around it", True),
    "sjf": ("sjf", "shortest first, every job that fits", True),
    "srsf": ("srsf", "shortest remaining service first, preempts", True),
    "2d-las": ("las", "least attained service first in two levels, preempts (Tiresias)", False),
    "fgd": ("fgd", "as cordee, but places by fragmentation gradient descent (FGD)", False),
    "no-notice": ("kill", "as cordee, but kills victims without notice", False),
}

POLICIES = {
    name: NamedPolicy(name=name, description=description, policy=NAMED[known], estimates=estimates)
    for name, (known, description, estimates) in _DESCRIPTIONS.items()
}


def named_policies(names: Sequence[str]) -> list[NamedPolicy]:
    """Return the policies of these names, each once.

    Raises:
        InputError: there is no policy of a name, or it has no such patience.
    """
    if not names:
        raise InputError("no policy was given", hint=f"use one of: {', '.join(POLICIES)}")
    return [_named(name) for name in dict.fromkeys(names)]


def _named(text: str) -> NamedPolicy:
    """Return the policy of a name, or of a name and a patience: `cordee:2`."""
    name, colon, number = text.partition(":")
    if name not in POLICIES:
        raise InputError(f"unknown policy {text!r}", hint=did_you_mean(name, POLICIES))
    if not colon:
        return POLICIES[name]
    named = POLICIES[name]
    try:
        patience = parse_patience(number)
    except InputError:
        patience = None
    if named.policy.patience is None or patience is None:
        raise InputError(
            f"{text!r} is no policy with a patience",
            hint="a patience multiplies how long long jobs run, for a policy of Cordee's own: cordee:2; it is above 0"
            f" and at most {PATIENCE_MAX:,}",
        )
    described = f"{named.description}, with a patience of {patience:g}"
    return replace(named, name=text, description=described, policy=replace(named.policy, patience=patience))

"""The patience of a server: an option of `cordee up`, in the log from each start on, so that a replay decides alike."""

from dataclasses import replace

from cordee.errors import InputError
from cordee.events import ServerUp
from cordee.schedule.policy import Policy

DEFAULT = "default"
PATIENCE_MAX = 1_000_000


def parse_patience(text: str) -> float | None:
    """Return a patience, a multiple of how long the long jobs run; None: the default one.

    Raises:
        InputError: it is none.
    """
    if text == DEFAULT:
        return None
    try:
        patience = float(text)
    except ValueError:
        patience = -1.0
    if not 0 < patience <= PATIENCE_MAX:
        hint = f"write a number above 0, at most {PATIENCE_MAX:,}: --patience 2, or --patience default"
        raise InputError(f"{text!r} is no patience", hint=hint)
    return patience


def policy_of(event: ServerUp, policy: Policy) -> Policy:
    """Return the policy of a server from its start on: this one, with the patience that the log says."""
    return policy if event.patience is None else replace(policy, patience=event.patience)

"""Roles by queue, and the one rule that the API, the pages and the streams ask. Pure.

A role in a queue holds for the queues below it as well. What is one's own, one always sees.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

EVERYWHERE = "*"  # no queue has this name


class Role(IntEnum):
    """The rights of somebody in a queue; a higher role may do what the lower ones may."""

    VIEWER = 1  # sees jobs, and what they cost
    USER = 2  # submits jobs, and changes the own ones
    OPERATOR = 3  # changes everybody's jobs; everywhere also nodes
    ADMIN = 4  # everywhere also queues, tokens, tenants, budgets, and the server's end


class Action(IntEnum):
    """A kind of request; its value is the role that it needs."""

    SEE = Role.VIEWER
    SUBMIT = Role.USER
    CHANGE = Role.OPERATOR
    ADMINISTER = Role.ADMIN


class Grant(NamedTuple):
    """A role in a queue and those below it, or everywhere."""

    queue: str
    role: Role


USER = (Grant(EVERYWHERE, Role.USER),)
ADMIN = (Grant(EVERYWHERE, Role.ADMIN),)


@dataclass(frozen=True, slots=True)
class Bearer:
    """The person or program that a token, or a login elsewhere, stands for.

    Attributes:
        name: its name: it owns what it submits.
        reads_only: whether it may change nothing.
        until_us: when the token is void; None: never.
        grants: its roles by queue.
    """

    name: str
    reads_only: bool = False
    until_us: int | None = None
    grants: tuple[Grant, ...] = USER


def may(bearer: Bearer, action: Action, *, owner: str | None = None, queues: Collection[str] = ()) -> bool:
    """Return whether somebody may do something.

    Args:
        bearer: who asks.
        action: what for.
        owner: of the thing in question, who may see and change it; None: it is nobody's.
        queues: of the thing in question, and all queues above; empty: it is the whole cluster's.

    >>> yuki = Bearer("yuki", grants=(Grant("vision", Role.USER),))
    >>> may(yuki, Action.SEE, owner="omar", queues=["segment", "vision"]), may(yuki, Action.SEE, owner="omar")
    (True, False)
    >>> may(yuki, Action.CHANGE, owner="yuki", queues=["vision"]), may(yuki, Action.CHANGE, queues=["vision"])
    (True, False)
    """
    if owner == bearer.name and (action is Action.SEE or (action is Action.CHANGE and writes(bearer))):
        return True
    if bearer.reads_only and action is not Action.SEE:
        return False
    held = (grant.role for grant in bearer.grants if grant.queue == EVERYWHERE or grant.queue in queues)
    return any(role.value >= action.value for role in held)


def writes(bearer: Bearer) -> bool:
    """Return whether somebody may change anything at all."""
    return not bearer.reads_only and any(grant.role >= Role.USER for grant in bearer.grants)


def grants_of(terms: Sequence[str]) -> tuple[Grant, ...]:
    """Return the roles that these terms name, such as `operator` or `user=vision,language`; by default a user.

    Raises:
        ValueError: a term names none; it is the error's argument.

    >>> grants_of(["operator=vision", "viewer"])
    (Grant(queue='vision', role=<Role.OPERATOR: 3>), Grant(queue='*', role=<Role.VIEWER: 1>))
    """
    found = []
    for term in terms:
        name, equals, queues = term.partition("=")
        role = Role.__members__.get(name.upper())
        names = queues.split(",") if equals else [EVERYWHERE]
        if role is None or name != name.lower() or not all(names):
            raise ValueError(term)
        found += [Grant(queue, role) for queue in names]
    return tuple(found) or USER

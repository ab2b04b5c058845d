"""Which replicas a service starts and stops next. Pure.

A service of one revision has as many replicas as it wants, and those in reserve. After an update it has one more
while the new revision replaces the old one: one is started, and when it is ready an old one leaves, so that never
fewer are ready than wanted. Where no GPU is free for the one more, an old one leaves first if enough stay ready.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cordee.control.directory import Replica, Service
from cordee.ids import JobId
from cordee.serve.policy.scale import leaving_order
from cordee.units import US_PER_S

SURGE = 1
NO_ROOM_US = 30 * US_PER_S
"""An update waits this long for a GPU for its first new replica before it ends an old one."""

_Ordered = Callable[[list[Replica]], list[Replica]]

_BACKOFF_US, _BACKOFF_MAX_US = 10 * US_PER_S, 300 * US_PER_S


class Changes(NamedTuple):
    """The number of replicas to start, those to stop, and the time at which this changes by itself."""

    start: int = 0
    stop: tuple[JobId, ...] = ()
    again_us: int | None = None


def backoff_us(failures: int) -> int:
    """Return the time from a failure to the next start; the first restart is at once.

    >>> [backoff_us(failures) // US_PER_S for failures in (0, 1, 2, 3, 4, 9)]
    [0, 0, 10, 20, 40, 300]
    """
    return 0 if failures < 2 else min(_BACKOFF_MAX_US, _BACKOFF_US << min(failures - 2, 16))


def changes(service: Service, now_us: int, held_milli: Mapping[str, int], each_milli: int) -> Changes:
    """Return what brings a service nearer to what it wants.

    Args:
        service: as it is.
        now_us: the time.
        held_milli: thousandths of GPUs that are held on each node of its replicas.
        each_milli: thousandths of GPUs of one replica.
    """
    staying = service.staying
    target = 0 if service.ended or service.wanted == 0 else service.wanted + standby(service)
    current = [each for each in staying if each.revision == service.revision]
    old = [each for each in staying if each.revision != service.revision]
    start = max(0, min(target - len(current), target + (SURGE if old else 0) - len(staying)))
    if old and any(each.node is None for each in current):  # a second one would wait behind it
        start = 0
    stop = _stops(current, old, target, lambda replicas: _least_useful(replicas, held_milli, each_milli))
    again_us = None
    if start and (failures := service.failures).number:
        at_us = failures.at_us + backoff_us(failures.number)
        if at_us > now_us:
            start, again_us = 0, at_us
        elif failures.number > 1:  # one shows whether it works now
            start = 0 if any(not each.is_ready for each in current) else 1
    if old and not stop and not any(each.leaving for each in service.replicas.values()):
        waiting = [each.since_us for each in current if each.node is None]
        ready = [each for each in old if each.is_ready]
        n_ready = sum(each.is_ready for each in staying)
        if waiting and ready and n_ready > max(1, service.fewest):
            if now_us - min(waiting) >= NO_ROOM_US:
                stop = (ready[0].job_id,)
            else:
                again_us = min(waiting) + NO_ROOM_US
    replaced = (each.job_id for each in service.replicas.values() if each.leaving and not each.stopped)
    return Changes(start, (*stop, *replaced), again_us)


def standby(service: Service) -> int:
    """Return the replicas that a service keeps in reserve."""
    return service.standby if service.wanted else 0


def in_reserve(service: Service) -> set[JobId]:
    """Return the ready replicas that get no requests as long as the others do: the newest ones beyond those wanted."""
    ready = [each for each in service.replicas.values() if each.is_ready]
    number = min(standby(service), max(0, len(ready) - service.wanted))
    newest = sorted(ready, key=lambda each: (each.revision == service.revision, each.submitted_us), reverse=True)
    return {each.job_id for each in newest[:number]}


def _stops(current: list[Replica], old: list[Replica], target: int, ordered: _Ordered) -> tuple[JobId, ...]:
    """Return the replicas beyond the target that may leave now: the old ones first, and those not ready before others.

    One of the new revision leaves only when there are too many of it.
    """
    surplus, n_ready = len(old) + len(current) - target, sum(each.is_ready for each in (*old, *current))
    found = list[JobId]()
    for replicas, most in ((old, surplus), (current, len(current) - target)):
        for replica in ordered(replicas)[: max(0, most)]:
            if replica.is_ready:
                if n_ready <= target:
                    break
                n_ready -= 1
            found.append(replica.job_id)
    return tuple(found)


def _least_useful(replicas: list[Replica], held_milli: Mapping[str, int], each_milli: int) -> list[Replica]:
    """Return those that wait, load or do not answer, in this order, then the ready ones, to free whole nodes."""
    by_age = sorted(replicas, key=lambda each: -each.submitted_us)
    ready = {each.job_id: each.node for each in by_age if each.is_ready and each.node is not None}
    place = {job_id: number for number, job_id in enumerate(leaving_order(ready, held_milli, each_milli))}
    return sorted(
        by_age,
        key=lambda each: (each.is_ready, each.ready is not None, each.node is not None, place.get(each.job_id, 0)),
    )

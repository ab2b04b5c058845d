"""Reserved nodes in the words of an explanation, and the nodes that a reservation of so many GPUs takes."""

from collections.abc import Iterable

from cordee.events import Capacity, Job, ReservationMade
from cordee.ids import JobId
from cordee.schedule.placement.place import is_for
from cordee.schedule.preemption.loss import Cost, charge
from cordee.schedule.state.records import Attempt, NodeRecord
from cordee.schedule.state.reservations import barring
from cordee.schedule.state.state import State
from cordee.workload.times import in_utc

_NAMED = 3

On = dict[str, list[JobId]]
"""The jobs that run on each node."""


def barred(state: State, job: Job) -> list[NodeRecord]:
    """Return the nodes with the GPUs of a job that are reserved for others, by name."""
    return [
        record
        for _, record in sorted(state.nodes.records.items())
        if record.stays
        and job.gpu_name in (None, record.node.gpu_name)
        and job.capacity in (Capacity.ANY, record.node.capacity)
        and barring(record, job)
    ]


def barred_by(records: Iterable[NodeRecord], job: Job) -> str:
    """Return the reservations that keep nodes from a job, in words; empty: there are none."""
    nodes: dict[ReservationMade, list[str]] = {}
    for record in records:
        for each in barring(record, job):
            nodes.setdefault(each, []).append(record.node.name)
    texts = (
        f"{_and(names)} {'is' if len(names) == 1 else 'are'} reserved {in_words(each)}" for each, names in nodes.items()
    )
    return "; ".join(texts)


def in_words(reservation: ReservationMade) -> str:
    """Return for whom and when nodes are reserved.

    >>> more = {"nodes": ("n3",), "from_us": 0, "until_us": 60_000_000, "by": "ada"}
    >>> in_words(ReservationMade(at_us=0, reservation="r7", user="ann", **more))
    'for user ann from 1970-01-01 00:00 UTC to 1970-01-01 00:01 UTC (r7)'
    """
    begin, end = in_utc(reservation.from_us), in_utc(reservation.until_us)
    return f"for {reservation.whom} from {begin} to {end} ({reservation.reservation})"


def reserved_nodes(state: State) -> dict[str, list[str]]:
    """Return the reservations of each node in words, the first one first."""
    found: dict[str, list[str]] = {}
    for each in sorted(state.agenda.reservations.values(), key=lambda each: (each.from_us, each.reservation)):
        for name in each.nodes:
            found.setdefault(name, []).append(in_words(each))
    return found


def overlap(state: State, node: str, from_us: int, until_us: int) -> str | None:
    """Return the reservation or the maintenance of a node that overlaps a time, in words; None: there is none."""
    agenda = state.agenda
    for made in sorted(agenda.reservations.values(), key=lambda each: each.from_us):
        if node in made.nodes and made.from_us < until_us and from_us < made.until_us:
            return f"reserved {in_words(made)}"
    for each in sorted(agenda.bookings.values(), key=lambda each: each.from_us):
        if node == each.node and each.from_us < until_us and from_us < each.until_us:
            return f"booked for maintenance from {in_utc(each.from_us)} to {in_utc(each.until_us)} ({each.booking})"
    return None


def cheapest_nodes(state: State, gpus: int, whom: str, from_us: int, until_us: int, now_us: int) -> tuple[str, ...]:
    """Return whole nodes of one kind with at least so many GPUs whose other jobs lose least when they leave.

    A job that should have ended by then loses nothing, and one on several nodes its whole loss once. Nodes are taken
    one by one by their loss for each GPU, then those that turn out to be superfluous are left out. Empty: the nodes
    that are in use, and neither reserved nor booked at that time, have too few GPUs of each kind.
    """
    on: On = {}
    for job_id, attempt in state.attempts.items():
        for lease in attempt.held:
            on.setdefault(lease.node, []).append(job_id)
    kinds: dict[tuple[str, Capacity], dict[str, int]] = {}
    for name, record in sorted(state.nodes.records.items()):
        usable = record.node.gpus - len(record.node.unavailable)
        if record.stays and usable and overlap(state, name, from_us, until_us) is None:
            kinds.setdefault((record.node.gpu_name, record.node.capacity), {})[name] = usable
    loss = {job_id: _loss(state, each, whom, from_us, now_us) for job_id, each in state.attempts.items()}
    found = []
    for usable_by_name in kinds.values():
        chosen = _chosen(usable_by_name, gpus, on, loss)
        if chosen:
            lost = _sum(loss[each] for each in {each for name in chosen for each in on.get(name, ())})
            found.append((lost, sum(usable_by_name[each] for each in chosen), chosen))
    return min(found)[2] if found else ()


def _chosen(usable: dict[str, int], gpus: int, on: On, loss: dict[JobId, Cost]) -> tuple[str, ...]:
    """Return nodes of one kind; empty: they have too few GPUs."""
    chosen: list[str] = []
    lost = set[JobId]()
    short = gpus
    while short > 0:
        ranks = []
        for name in usable.keys() - set(chosen):
            more = _sum(loss[each] for each in set(on.get(name, ())) - lost)
            useful = min(short, usable[name])
            ranks.append((more.micro_usd / useful, more.gpu_us / useful, max(0, usable[name] - short), name))
        if not ranks:
            return ()
        best = min(ranks)[-1]
        chosen.append(best)
        lost.update(on.get(best, ()))
        short -= usable[best]
    for name in [*chosen]:
        if short + usable[name] <= 0:
            chosen.remove(name)
            short += usable[name]
    return tuple(sorted(chosen))


def _loss(state: State, attempt: Attempt, whom: str, from_us: int, now_us: int) -> Cost:
    """Return what an attempt loses when it has to leave for a reservation."""
    left_us = state.left_us(state.jobs[attempt.job.job_id])
    if is_for(attempt.job, whom) or (left_us is not None and now_us + left_us <= from_us):
        return Cost(0, 0)
    return charge(attempt, now_us)


def _sum(costs: Iterable[Cost]) -> Cost:
    found = [*costs]
    return Cost(sum(each.micro_usd for each in found), sum(each.gpu_us for each in found))


def _and(names: list[str]) -> str:
    named = names if len(names) <= _NAMED else [*names[:_NAMED], f"{len(names) - _NAMED} more"]
    return " and ".join(part for part in (", ".join(named[:-1]), named[-1]) if part)

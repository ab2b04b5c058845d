"""Reservations of nodes: made, listed and cancelled by people."""

from dataclasses import dataclass, replace

from cordee.answers.nodes import ReservationOrder, ReservationView
from cordee.control.operations import Operations
from cordee.errors import ForbiddenError, InputError, NotFoundError
from cordee.events import ReservationCancelled, ReservationMade
from cordee.schedule.quota.queues import DEFAULT, near
from cordee.schedule.reserved import cheapest_nodes, overlap
from cordee.units import US_PER_S, plural
from cordee.workload.times import in_utc

_LATE_US = 60 * US_PER_S
"""How far in the past a reservation may begin: a request takes a moment."""

_EXAMPLE = "cordee reserve --nodes n1,n2 --from +2h --for 4h --queue eval"


@dataclass(slots=True)
class ReservationOperations:
    """The requests of people about reservations; each is one event.

    Attributes:
        operations: those on jobs and nodes, which share the log.
    """

    operations: Operations

    def reserve(self, order: ReservationOrder, *, by: str, operates: bool = False) -> ReservationView:
        """Reserve nodes for the jobs of a queue or a user.

        Raises:
            ForbiddenError: it is for others, and `by` does not operate the cluster.
            InputError: the time is over or empty, a node is taken then, or too few GPUs are left.
            NotFoundError: there is no such node or queue.
        """
        control, now_us = self.operations.control, self.operations.clock.now_us()
        if bool(order.nodes) == bool(order.gpus):
            raise InputError("a reservation needs either nodes or a number of GPUs", hint=_EXAMPLE)
        if order.queue is not None and order.user is not None:
            raise InputError("nodes are reserved for a queue or for a user, not for both", hint=_EXAMPLE)
        user = order.user or (by if order.queue is None else None)
        if user != by and not operates:
            self._refuse(by, f"nodes are reserved for {f'queue {order.queue}' if order.queue else user}")
        if order.from_us < now_us - _LATE_US or not max(now_us, order.from_us) < order.until_us:
            begin, end = in_utc(order.from_us), in_utc(order.until_us)
            raise InputError(f"it is {in_utc(now_us)}: nothing can be reserved from {begin} to {end}", hint=_EXAMPLE)
        with control.changed:
            self._check_queue(order.queue)
            made = ReservationMade(
                at_us=now_us, reservation=f"r{control.number + 1}", nodes=(), from_us=order.from_us,
                until_us=order.until_us, by=by, why=order.why, queue=order.queue, user=user,
            )  # fmt: skip
            control.note(replace(made, nodes=self._nodes(order, made.whom, now_us)))
            view = self._view(made.reservation)
        self.operations.wake()
        return view

    def reservations(self) -> list[ReservationView]:
        """Return every reservation that is not over, the first one first."""
        control = self.operations.control
        with control.changed:
            found = sorted(
                control.state.agenda.reservations.values(), key=lambda each: (each.from_us, each.reservation)
            )
            return [self._view(each.reservation) for each in found]

    def cancel(self, reservation: str, *, by: str, operates: bool = False) -> ReservationView:
        """Cancel a reservation; one that has begun ends.

        Raises:
            ForbiddenError: it is another user's or a queue's, and `by` does not operate the cluster.
            NotFoundError: there is none.
        """
        control = self.operations.control
        with control.changed:
            found = control.state.agenda.reservations.get(reservation)
            if found is None:
                raise NotFoundError(f"there is no reservation {reservation!r}", hint="cordee reserve list")
            if by not in (found.by, found.user) and not operates:
                self._refuse(by, f"{reservation} is cancelled, which is for {found.whom},")
            view = self._view(reservation)
            at_us = self.operations.clock.now_us()
            control.note(ReservationCancelled(at_us=at_us, reservation=reservation, by=by))
        self.operations.wake()
        return view

    def _nodes(self, order: ReservationOrder, whom: str, now_us: int) -> tuple[str, ...]:
        state = self.operations.control.state
        for name in order.nodes:
            self.operations.check_node(name)
            taken = overlap(state, name, order.from_us, order.until_us)
            if taken is not None:
                times = f"from {in_utc(order.from_us)} to {in_utc(order.until_us)}"
                raise InputError(
                    f"{name} cannot be reserved for {whom} {times}: it is {taken}",
                    hint="choose another time or node, or cancel that one first",
                )
        if order.nodes:
            return tuple(dict.fromkeys(order.nodes))
        found = cheapest_nodes(state, order.gpus, whom, order.from_us, order.until_us, now_us)
        if not found:
            raise InputError(
                f"no kind of GPU has {plural(order.gpus, 'GPU')} on nodes that are in use, and neither reserved nor "
                f"booked from {in_utc(order.from_us)} to {in_utc(order.until_us)}",
                hint="`cordee nodes` and `cordee reserve list` show them",
            )
        return found

    def _refuse(self, by: str, what: str) -> None:
        operator = self.operations.members.operator
        raise ForbiddenError(f"{what} by operators only, and you are {by}", hint=f"ask {operator}")

    def _check_queue(self, queue: str | None) -> None:
        """Refuse an unknown queue; until queues are set, any name is accepted, as it is of a job."""
        queues = self.operations.control.state.quotas.queues
        known = {each.name for each in queues} | {DEFAULT}
        if queue is not None and queues and queue not in known:
            raise NotFoundError(f"there is no queue {queue!r}", hint=near(queue, known))

    def _view(self, reservation: str) -> ReservationView:
        state = self.operations.control.state
        found = state.agenda.reservations[reservation]
        records = (state.nodes.records.get(name) for name in found.nodes)
        began = any(record is not None and found in record.reservations for record in records)
        return ReservationView.of(found, nodes=list(found.nodes), began=began)

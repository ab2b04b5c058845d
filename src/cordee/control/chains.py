"""Requests of people about when a job runs: pause, resume, hold, requeue, prioritize."""

from collections.abc import Callable
from dataclasses import dataclass

from cordee.answers.jobs import JobView
from cordee.answers.nodes import MaintenanceOrder, MaintenanceView
from cordee.control.operations import Operations
from cordee.errors import ForbiddenError, InputError, NotFoundError
from cordee.events import (
    HoldReleased,
    JobHeld,
    JobPrioritized,
    MaintenanceBooked,
    MaintenanceCancelled,
    RequeueRequested,
)
from cordee.ids import JobId
from cordee.schedule.cycle.maintain import cordon_why
from cordee.schedule.quota.limits import is_used_up
from cordee.schedule.state.chains import never
from cordee.schedule.state.records import JobRecord, Phase
from cordee.workload.spec import JobSpec
from cordee.workload.times import in_utc


@dataclass(slots=True)
class ChainOperations:
    """The requests of people about when a job runs; each is one event, and repeating it changes nothing.

    Attributes:
        operations: those on jobs, which share the log.
    """

    operations: Operations

    def hold(self, ref: str, *, by: str, leave: bool = False) -> JobView:
        """Keep a job from starting; with `leave`, pause it: while it runs it saves first and leaves its GPUs.

        Raises:
            InputError: it has ended, is asked to stop, or is a replica of a service.
        """

        def change(record: JobRecord) -> None:
            self._check_live(record, "paused" if leave else "held")
            held = record.gate.held
            if held is None or (leave and not held.leave):
                control, job_id = self.operations.control, record.job.job_id
                control.note(JobHeld(at_us=self._now_us(), job_id=job_id, by=by, leave=leave))

        return self._changed(ref, change)

    def resume(self, ref: str, *, by: str, operates: bool = False) -> JobView:
        """Let a held or paused job start again.

        Args:
            ref: the job.
            by: who asks.
            operates: whether `by` may change everybody's jobs of its queue.

        Raises:
            ForbiddenError: an operator holds it, and `by` is none.
            InputError: nobody holds it.
        """

        def change(record: JobRecord) -> None:
            job = record.job
            if record.gate.held is not None and not record.phase.ended:
                holder = record.gate.held.by
                if holder not in (job.owner, by) and not operates:
                    raise ForbiddenError(
                        f"{holder}, an operator, holds {job.job_id}: only operators may resume it", hint=f"ask {holder}"
                    )
                self.operations.control.note(HoldReleased(at_us=self._now_us(), job_id=job.job_id, by=by))
                return
            if record.phase is Phase.PAUSED:
                raise InputError(
                    f"{job.job_id} waits at a rung of its sweep, which promotes the best trials",
                    hint=f"cordee sweep show {job.sweep}",
                )
            hint = f"cordee requeue {job.job_id}" if record.phase.ended else f"cordee why {job.job_id}"
            raise InputError(f"{job.job_id} is {record.phase.value}: nobody holds or pauses it", hint=hint)

        return self._changed(ref, change)

    def requeue(self, ref: str, *, by: str) -> JobView:
        """Send a job to the end of its queue: a running one saves and leaves first, one that has ended runs again.

        Raises:
            InputError: it cannot run again.
        """

        def change(record: JobRecord) -> None:
            self._check_requeue(record)
            if record.gate.requeue is None:
                asked = RequeueRequested(at_us=self._now_us(), job_id=record.job.job_id, by=by)
                self.operations.control.note(asked)

        return self._changed(ref, change)

    def prioritize(self, ref: str, *, by: str, operates: bool = False) -> JobView:
        """Send a waiting job to the top of its queue; for its owner, to the best place of the owner's jobs there.

        Args:
            ref: the job.
            by: who asks.
            operates: whether `by` may change everybody's jobs of its queue.

        Raises:
            InputError: it does not wait in a line.
        """

        def change(record: JobRecord) -> None:
            job, control = record.job, self.operations.control
            if record.phase is not Phase.QUEUED:
                raise InputError(
                    f"{job.job_id} is {record.phase.value}: only a job that waits for GPUs has a place in its queue",
                    hint=f"cordee why {job.job_id}",
                )
            place_of = None if operates else self._best_of_owner(record)
            if operates or place_of is not None:
                asked = JobPrioritized(at_us=self._now_us(), job_id=job.job_id, by=by, place_of=place_of)
                control.note(asked)

        return self._changed(ref, change)

    def book(self, node: str, order: MaintenanceOrder, *, by: str) -> MaintenanceView:
        """Book a node for maintenance.

        Raises:
            InputError: the time is over or empty, or overlaps another one of the node.
            NotFoundError: there is no such node.
        """
        control, now_us = self.operations.control, self._now_us()
        with control.changed:
            self.operations.check_node(node)
            if not max(now_us, order.from_us) < order.until_us:
                raise InputError(
                    f"maintenance until {in_utc(order.until_us)} cannot begin at {in_utc(order.from_us)}",
                    hint="cordee nodes drain NODE --why TEXT --from +2h --for 4h",
                )
            for each in control.state.agenda.bookings.values():
                if each.node == node and each.from_us < order.until_us and order.from_us < each.until_us:
                    raise InputError(
                        f"{node} is booked as {each.booking} from {in_utc(each.from_us)} to {in_utc(each.until_us)}",
                        hint=f"cordee nodes cancel {each.booking}",
                    )
            booking = f"m{control.number + 1}"
            control.note(
                MaintenanceBooked(
                    at_us=now_us, booking=booking, node=node, from_us=order.from_us, until_us=order.until_us, by=by,
                    why=order.why,
                )
            )  # fmt: skip
            view = self._booking(booking)
        self.operations.wake()
        return view

    def bookings(self) -> list[MaintenanceView]:
        """Return every maintenance that is not over, the first one first."""
        control = self.operations.control
        with control.changed:
            found = sorted(control.state.agenda.bookings.values(), key=lambda each: (each.from_us, each.booking))
            return [self._booking(each.booking) for each in found]

    def cancel(self, booking: str, *, by: str) -> MaintenanceView:
        """Cancel a maintenance; one that has begun ends, and its node is back in use, unless it was cordoned besides.

        Raises:
            NotFoundError: there is none.
        """
        control = self.operations.control
        with control.changed:
            if booking not in control.state.agenda.bookings:
                raise NotFoundError(f"there is no maintenance {booking!r}", hint="cordee nodes maintenance")
            view, booked = self._booking(booking), control.state.agenda.bookings[booking]
            control.note(MaintenanceCancelled(at_us=self._now_us(), booking=booking, by=by))
            node = control.state.nodes.records[view.node]
            if view.began and (node.cordoned_by, node.cordon_why) == (booked.by, cordon_why(booked)):
                control.uncordon(view.node, by=by, why=f"maintenance {booking} was cancelled")
            elif view.began and node.cordoned_by is not None:  # for another reason: only its attempts need not leave
                control.cordon(view.node, by=node.cordoned_by, why=node.cordon_why, drain=node.drains)
        self.operations.wake()
        return view

    def _booking(self, booking: str) -> MaintenanceView:
        state = self.operations.control.state
        found = state.agenda.bookings[booking]
        began = state.nodes.records[found.node].leave_us == found.from_us
        return MaintenanceView.of(found, began=began)

    def _best_of_owner(self, record: JobRecord) -> JobId | None:
        """Return the first waiting job of the owner in the queue and tier of this one; None if it is this one."""
        state, job = self.operations.control.state, record.job
        own = [
            (-state.jobs[each].priority, state.waiting.place(each))
            for each in state.waiting.job_ids()
            if (state.jobs[each].job.owner, state.jobs[each].job.queue) == (job.owner, job.queue)
            and state.jobs[each].job.tier is job.tier
        ]
        first = min(own)[1].job_id
        return None if first == job.job_id else first

    def _changed(self, ref: str, change: Callable[[JobRecord], None]) -> JobView:
        operations = self.operations
        job_id = JobId(operations.job_id(ref))
        with operations.control.changed:
            record = operations.control.state.jobs.get(job_id)
            if record is None:
                raise InputError(
                    f"{job_id} ended long ago, and the scheduler has forgotten it",
                    hint="submit it again: its checkpoints are where they were",
                )
            change(record)
        operations.wake()
        return operations.job(job_id)

    def _check_live(self, record: JobRecord, done: str) -> None:
        """Check that a request can have an effect on a job.

        Raises:
            InputError: it cannot.
        """
        job = record.job
        if job.service is not None:
            raise InputError(
                f"{job.job_id} is a replica of the service {job.service}, which would start another one in its place",
                hint=f"cordee serve scale {job.service} 0",
            )
        if record.phase.ended:
            raise InputError(
                f"{job.job_id} has ended ({record.phase.value}): it cannot be {done}",
                hint=f"cordee requeue {job.job_id} lets it run again",
            )
        if record.stop is not None:
            raise InputError(f"{job.job_id} was asked to stop by {record.stop.by}: it cannot be {done}")

    def _check_requeue(self, record: JobRecord) -> None:
        job = record.job
        if not record.phase.ended:
            self._check_live(record, "requeued")
            return
        if job.job_id in self.operations.control.retiring:
            raise InputError(
                f"{job.job_id} has ended, and the server moves it to its archive at this moment: it cannot be requeued",
                hint="try again in a minute; if the scheduler has forgotten it then, submit it again",
            )
        if job.service is not None or job.sweep is not None:
            of = f"trial of the sweep {job.sweep}" if job.sweep else f"replica of the service {job.service}"
            raise InputError(f"{job.job_id} has ended, and is a {of}, which has gone on without it")
        if is_used_up(job, record.used_us, record.used_cost):
            raise InputError(
                f"{job.job_id} has used up its limit of time or cost: it would end at once",
                hint="submit it again with a larger limit: it becomes a new job, even under the same name",
            )
        why = never(self.operations.control.state, record)
        if why is not None:
            raise InputError(why, hint="requeue that one first")
        [row] = self.operations.store.jobs(job.job_id)
        spec = JobSpec.model_validate_json(row["spec"])
        self.operations.check_secrets(spec, {})
        self.operations.files.check(spec)

    def _now_us(self) -> int:
        return self.operations.clock.now_us()

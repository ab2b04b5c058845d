"""The HTTP face of chains: hold, pause, resume, requeue and prioritize a job; book nodes, and reserve them."""

from typing import Annotated

from fastapi import Depends

from cordee.answers.jobs import JobView
from cordee.answers.nodes import MaintenanceOrder, MaintenanceView, ReservationOrder, ReservationView
from cordee.control.api_route import Paged, user_router
from cordee.control.chains import ChainOperations
from cordee.control.dependencies import Asked, By
from cordee.control.reservations import ReservationOperations
from cordee.control.roles import Action

router = user_router("/v1")


async def _chains(operations: Asked) -> ChainOperations:
    return ChainOperations(operations)


Chains = Annotated[ChainOperations, Depends(_chains)]


@router.post("/jobs/{ref}/pause")
def pause(ref: str, chains: Chains, by: By) -> JobView:
    """Pause a job: it saves, gives its GPUs back, and waits until it is resumed."""
    return by.view(chains.hold(by.job(ref, Action.CHANGE, "pause it"), by=by.name, leave=True))


@router.post("/jobs/{ref}/hold")
def hold(ref: str, chains: Chains, by: By) -> JobView:
    """Keep a job from starting until it is resumed; one that runs goes on."""
    return by.view(chains.hold(by.job(ref, Action.CHANGE, "hold it"), by=by.name))


@router.post("/jobs/{ref}/resume")
def resume(ref: str, chains: Chains, by: By) -> JobView:
    """Let a held or paused job start again."""
    job_id = by.job(ref, Action.CHANGE, "resume it")
    return by.view(chains.resume(job_id, by=by.name, operates=by.operates_queue_of(job_id)))


@router.post("/jobs/{ref}/requeue")
def requeue(ref: str, chains: Chains, by: By) -> JobView:
    """Send a job to the end of its queue, after it has saved; one that has ended runs again."""
    return by.view(chains.requeue(by.job(ref, Action.CHANGE, "requeue it"), by=by.name))


@router.post("/jobs/{ref}/prioritize")
def prioritize(ref: str, chains: Chains, by: By) -> JobView:
    """Send a waiting job to the top of its queue; for its owner, of the owner's own jobs."""
    job_id = by.job(ref, Action.CHANGE, "prioritize it")
    return by.view(chains.prioritize(job_id, by=by.name, operates=by.operates_queue_of(job_id)))


@router.post("/nodes/{name}/maintenance", status_code=201)
def book(name: str, order: MaintenanceOrder, chains: Chains, by: By) -> MaintenanceView:
    """Book a node for maintenance: its attempts save and leave in time, and nothing starts there."""
    by.check(Action.CHANGE, "book maintenance")
    return chains.book(name, order, by=by.name)


@router.get("/maintenance")
def bookings(chains: Chains, page: Paged) -> list[MaintenanceView]:
    """Return every maintenance that is not over."""
    return page.of(chains.bookings(), lambda booking: booking.booking)


@router.delete("/maintenance/{booking}")
def cancel(booking: str, chains: Chains, by: By) -> MaintenanceView:
    """Cancel a maintenance; one that has begun ends."""
    by.check(Action.CHANGE, "cancel maintenance")
    return chains.cancel(booking, by=by.name)


@router.post("/reservations", status_code=201)
def reserve(order: ReservationOrder, operations: Asked, by: By) -> ReservationView:
    """Reserve nodes for the jobs of a queue or a user; others there save and leave in time."""
    return ReservationOperations(operations).reserve(order, by=by.name, operates=by.operates)


@router.get("/reservations")
def reservations(operations: Asked, page: Paged) -> list[ReservationView]:
    """Return every reservation that is not over."""
    return page.of(ReservationOperations(operations).reservations(), lambda each: each.reservation)


@router.delete("/reservations/{reservation}")
def cancel_reservation(reservation: str, operations: Asked, by: By) -> ReservationView:
    """Cancel a reservation; one that has begun ends."""
    return ReservationOperations(operations).cancel(reservation, by=by.name, operates=by.operates)

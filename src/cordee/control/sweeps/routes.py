"""The HTTP face of sweeps."""

from typing import Annotated

from fastapi import Depends, Request

from cordee.answers.sweeps import SweepDetailView, SweepSubmission, SweepView
from cordee.control.access import Access
from cordee.control.api_route import Paged, user_router
from cordee.control.dependencies import By, refuse_exposed_secrets
from cordee.control.sweeps.operations import SweepOperations
from cordee.errors import NotFoundError

router = user_router("/v1")


async def _sweeps(request: Request) -> SweepOperations:
    sweeps = request.app.state.sweeps
    assert isinstance(sweeps, SweepOperations), "create_app put it there"
    return sweeps


Sweeps = Annotated[SweepOperations, Depends(_sweeps)]


@router.post("/sweeps", status_code=201)
def declare(submission: SweepSubmission, sweeps: Sweeps, by: By, request: Request) -> SweepView:
    """Create a sweep, or refuse it and change nothing."""
    refuse_exposed_secrets(request, submission.secrets)
    by.check_submits(submission.spec)
    found = sweeps.declared(submission.job_id)
    if found is not None:
        by.check_changes(found.sweep_id, found.owner, found.spec)
    return by.view(sweeps.declare(submission, by.name))


@router.get("/sweeps")
def list_sweeps(sweeps: Sweeps, by: By, page: Paged) -> list[SweepView]:
    """Return all sweeps that the token may see, the newest first."""
    return by.views(page.of(seen_sweeps(sweeps, by), lambda sweep: sweep.sweep_id))


@router.get("/sweeps/{ref}")
def sweep(ref: str, sweeps: Sweeps, by: By) -> SweepDetailView:
    """Return one sweep with its trials and what each has used."""
    return by.view(sweeps.sweep(seen_sweep(ref, sweeps, by)))


@router.delete("/sweeps/{ref}")
def end(ref: str, sweeps: Sweeps, by: By) -> SweepView:
    """End a sweep: its trials save and leave."""
    return by.view(sweeps.end(_changed(ref, sweeps, by), by.name))


@router.post("/sweeps/{ref}/pause")
def pause(ref: str, sweeps: Sweeps, by: By) -> SweepView:
    """Pause a sweep: its trials save and leave, and none starts until it is resumed."""
    return by.view(sweeps.hold(_changed(ref, sweeps, by), by.name))


@router.post("/sweeps/{ref}/resume")
def resume(ref: str, sweeps: Sweeps, by: By) -> SweepView:
    """Resume a paused sweep."""
    return by.view(sweeps.hold(_changed(ref, sweeps, by), by.name, over=True))


def seen_sweeps(sweeps: SweepOperations, by: Access) -> list[SweepView]:
    """Return the sweeps that may be seen, the newest first."""
    known = sweeps.operations.control.fold.sweeps.sweeps
    return [each for each in sweeps.sweeps() if by.sees_spec(each.owner, known[each.sweep_id].spec)]


def seen_sweep(ref: str, sweeps: SweepOperations, by: Access) -> str:
    """Return the id of a sweep that may be seen.

    Raises:
        NotFoundError: there is none; its suggestions are for those who see all.
    """
    found = sweeps.declared(ref)
    if (found is None and by.sees_all) or (found is not None and by.sees_spec(found.owner, found.spec)):
        return ref if found is None else found.sweep_id
    raise NotFoundError(f"there is no sweep {ref!r}", hint="`cordee sweep list` shows them")


def _changed(ref: str, sweeps: SweepOperations, by: Access) -> str:
    """Return the id of a sweep that may be changed.

    Raises:
        ForbiddenError: it is another user's.
        NotFoundError: there is none that may be seen.
    """
    sweep_id = seen_sweep(ref, sweeps, by)
    found = sweeps.declared(sweep_id)
    if found is not None:
        by.check_changes(found.sweep_id, found.owner, found.spec)
    return sweep_id

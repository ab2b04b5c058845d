"""The HTTP face of sweeps."""

from typing import Annotated

from fastapi import Depends, Request

from cordee.answers.sweeps import SweepDetailView, SweepSubmission, SweepView
from cordee.control.dependencies import Owner, refuse_exposed_secrets, user_router
from cordee.control.sweeps.operations import SweepOperations

router = user_router("/v1")


async def _sweeps(request: Request) -> SweepOperations:
    sweeps = request.app.state.sweeps
    assert isinstance(sweeps, SweepOperations), "create_app put it there"
    return sweeps


Sweeps = Annotated[SweepOperations, Depends(_sweeps)]


@router.post("/sweeps", status_code=201)
def declare(submission: SweepSubmission, sweeps: Sweeps, owner: Owner, request: Request) -> SweepView:
    """Create a sweep, or refuse it and change nothing."""
    refuse_exposed_secrets(request, submission.secrets)
    return sweeps.declare(submission, owner)


@router.get("/sweeps")
def list_sweeps(sweeps: Sweeps) -> list[SweepView]:
    """Return all sweeps, the newest first."""
    return sweeps.sweeps()


@router.get("/sweeps/{ref}")
def sweep(ref: str, sweeps: Sweeps) -> SweepDetailView:
    """Return one sweep with its trials and what each has used."""
    return sweeps.sweep(ref)


@router.delete("/sweeps/{ref}")
def end(ref: str, sweeps: Sweeps, owner: Owner) -> SweepView:
    """End a sweep: its trials save and leave."""
    return sweeps.end(ref, owner)


@router.post("/sweeps/{ref}/pause")
def pause(ref: str, sweeps: Sweeps, owner: Owner) -> SweepView:
    """Pause a sweep: its trials save and leave, and none starts until it is resumed."""
    return sweeps.hold(ref, owner)


@router.post("/sweeps/{ref}/resume")
def resume(ref: str, sweeps: Sweeps, owner: Owner) -> SweepView:
    """Resume a paused sweep."""
    return sweeps.hold(ref, owner, over=True)

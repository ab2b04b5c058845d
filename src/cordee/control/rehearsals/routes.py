"""The HTTP face of rehearsals."""

from typing import Annotated

from fastapi import Depends, Request

from cordee.answers.submissions import RehearsalStarted, RehearsalSubmission, RehearsalView
from cordee.control.api_route import Paged, user_router
from cordee.control.dependencies import By, refuse_exposed_secrets
from cordee.control.rehearsals.operations import RehearsalOperations

router = user_router("/v1")


async def _rehearsals(request: Request) -> RehearsalOperations:
    rehearsals = request.app.state.rehearsals
    assert isinstance(rehearsals, RehearsalOperations), "create_app put it there"
    return rehearsals


Rehearsals = Annotated[RehearsalOperations, Depends(_rehearsals)]


@router.post("/rehearsals", status_code=201)
def start(submission: RehearsalSubmission, rehearsals: Rehearsals, by: By, request: Request) -> RehearsalStarted:
    """Queue the rehearsal of a job, or refuse it and change nothing."""
    refuse_exposed_secrets(request, submission.secrets)
    by.check_submits(submission.spec, submission.job_id)
    return rehearsals.start(submission, by.name)


@router.get("/rehearsals")
def list_rehearsals(rehearsals: Rehearsals, by: By, page: Paged) -> list[RehearsalView]:
    """Return the newest result of each code and number of GPUs, the newest first."""
    seen = [each for each in rehearsals.rehearsals() if by.sees_id(each.job_id)]
    return page.of(seen, lambda rehearsal: rehearsal.job_id)

"""The shapes of the API's answers about rehearsals."""

from typing import Annotated, Any

from pydantic import Field

from cordee.answers import JobView, Submission, View
from cordee.workload.rehearsal import LIMIT_S, REPLAYED, STEPS


class RehearsalSubmission(Submission):
    """A job to rehearse; without `gpus` on the smallest number that the plan knows to hold its model."""

    gpus: Annotated[int, Field(ge=1)] | None = None
    steps: Annotated[int, Field(ge=1, le=10_000)] = STEPS
    replayed: Annotated[int, Field(ge=1, le=200)] = REPLAYED
    limit_s: Annotated[float, Field(gt=0, le=86_400)] = LIMIT_S


class RehearsalStarted(View):
    """A rehearsal that was queued. `why_gpus` says why it runs on so many GPUs; `notes` are the assumptions made."""

    job: JobView
    spec: dict[str, Any]
    why_gpus: str
    notes: list[str]

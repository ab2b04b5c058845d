"""The fields that all events of one attempt share."""

from dataclasses import dataclass

from cordee.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent:
    """The fields of every event of one attempt: `epoch` counts the attempts of a job from 1."""

    at_us: int
    job_id: JobId
    epoch: int

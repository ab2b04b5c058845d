"""Retries of a job by the cause of its attempts' ends.

Causes to which the job gives a number of its own are `infrastructure`, `script` and `exit N`, which is apart from
`script`; all others are `any`. A count begins again with each attempt that commits a checkpoint. Of a cause with a
number of its own that attempt's end counts already, so that 0 means none at all.
"""

from cordee.events import AttemptEnded, Job, Outcome

Counts = tuple[tuple[str, int], ...]
"""Ends of attempts by cause, sorted."""

INFRASTRUCTURE, SCRIPT, ANY = "infrastructure", "script", "any"


def exit_cause(code: int) -> str:
    """Return the cause of an end with this exit code.

    >>> exit_cause(17)
    'exit 17'
    """
    return f"exit {code}"


def cause_of(job: Job, ended: AttemptEnded) -> str | None:
    """Return the cause under which an attempt's end counts; None: it is no failure."""
    limited = dict(job.retries)
    if ended.outcome is Outcome.LOST:
        return INFRASTRUCTURE if INFRASTRUCTURE in limited else ANY
    if ended.outcome is not Outcome.FAILED:
        return None
    code = ended.failure.exit_code if ended.failure is not None else None
    if code is not None and exit_cause(code) in limited:
        return exit_cause(code)
    return SCRIPT if SCRIPT in limited else ANY


def counted(failures: Counts, cause: str | None, *, committed: bool) -> Counts:
    """Return the ends by cause with one more; `committed`: this attempt has committed a checkpoint.

    >>> counted((("script", 2),), "script", committed=False), counted((("script", 2),), "script", committed=True)
    ((('script', 3),), (('script', 1),))
    """
    found = {} if committed else dict(failures)
    if cause is not None and not (committed and cause == ANY):
        found[cause] = found.get(cause, 0) + 1
    return tuple(sorted(found.items()))


def exceeded(job: Job, failures: Counts) -> str | None:
    """Return the limit of the job that is exceeded, as text; None: the job may be retried."""
    counts = dict(failures)
    return next((f"retries of {cause}: {most}" for cause, most in job.retries if counts.get(cause, 0) > most), None)

"""Retries of a job by the cause of its attempts' ends.

Causes to which the job gives a number of its own are `infrastructure`, `script` and `exit N`, which is apart from
`script`; all others are `any`. A count begins again with each attempt that commits a checkpoint. Of a cause with a
number of its own that attempt's end counts already, so that 0 means none at all.

An attempt whose preflight found a node at fault is no try: what failed there is out of use, so it ends by itself.

Between two tries there is a pause that grows; and an exception of Python that any further attempt would raise again,
such as a ValueError before the first step, ends the job at once.
"""

import re

from cordee.errors import DivergedError
from cordee.events import AttemptEnded, Failure, Job, Outcome
from cordee.units import US_PER_S

Counts = tuple[tuple[str, int], ...]
"""Ends of attempts by cause, sorted."""

INFRASTRUCTURE, SCRIPT, DIVERGED, ANY = "infrastructure", "script", "diverged", "any"

PAUSE_US, PAUSE_FACTOR, PAUSE_US_MAX = 2 * US_PER_S, 4, 600 * US_PER_S
"""The pause before the third try, its growth with each further one, and its longest; the second try comes at once."""

_OWN_FAULTS = {
    "AssertionError", "AttributeError", "FileNotFoundError", "ImportError", "IndentationError", "IndexError",
    "KeyError", "ModuleNotFoundError", "NameError", "NotImplementedError", "RecursionError", "SyntaxError", "TypeError",
    "UnboundLocalError", "UnicodeDecodeError", "ValueError", "ZeroDivisionError",
}  # fmt: skip
"""Exceptions that do not depend on machines or networks: the same script raises them again."""

_EXCEPTION = re.compile(r"(?:^|[\s\]])(?:\w+\.)*([A-Z]\w*(?:Error|Exception|Interrupt))(?=:|$)")


def exit_cause(code: int) -> str:
    """Return the cause of an end with this exit code.

    >>> exit_cause(17)
    'exit 17'
    """
    return f"exit {code}"


def cause_of(job: Job, ended: AttemptEnded) -> str | None:
    """Return the cause under which an attempt's end counts; None: it is no failure, or that of a node alone."""
    if ended.node_fault:
        return None
    limited = dict(job.retries)
    if ended.outcome is Outcome.LOST:
        return INFRASTRUCTURE if INFRASTRUCTURE in limited else ANY
    if ended.outcome is not Outcome.FAILED:
        return None
    code = ended.failure.exit_code if ended.failure is not None else None
    if code is not None and exit_cause(code) in limited:
        return exit_cause(code)
    if code == DivergedError.exit_code:
        return DIVERGED
    return SCRIPT if SCRIPT in limited else ANY


def counted(failures: Counts, cause: str | None, *, committed: bool) -> Counts:
    """Return the ends by cause with one more; `committed`: this attempt has committed a checkpoint.

    >>> counted((("script", 2),), "script", committed=False), counted((("script", 2),), "script", committed=True)
    ((('script', 3),), (('script', 1),))
    """
    if cause is None and (committed or not failures):
        return ()
    found = {} if committed else dict(failures)
    if cause is not None and not (committed and cause == ANY):
        found[cause] = found.get(cause, 0) + 1
    return tuple(sorted(found.items()))


def exceeded(job: Job, failures: Counts) -> str | None:
    """Return the limit of the job that is exceeded, as text; None: the job may be retried."""
    counts = dict(failures)
    if DIVERGED in counts:
        return "the loss diverged, and another start would do the same"
    return next((f"retries of {cause}: {most}" for cause, most in job.retries if counts.get(cause, 0) > most), None)


def counted_as(job: Job, ended: AttemptEnded) -> str:
    """Return the cause that an attempt's end has, as people name it."""
    cause = cause_of(job, ended)
    if cause == ANY:
        return INFRASTRUCTURE if ended.outcome is Outcome.LOST else SCRIPT
    return cause or ""


def own_fault(failure: Failure | None) -> str | None:
    """Return the exception with which a script failed, if every further attempt would raise it again.

    >>> own_fault(Failure(rank=0, exit_code=1, signal=None, tail=("Traceback", "ValueError: no such optimizer")))
    'ValueError'
    >>> own_fault(Failure(rank=0, exit_code=1, signal=None, tail=("RuntimeError: NCCL error",)))
    """
    if failure is None or failure.exit_code != 1:
        return None
    named = [found[1] for line in failure.tail for found in _EXCEPTION.finditer(line)]
    return named[-1] if named and named[-1] in _OWN_FAULTS else None


def again_at_us(job: Job, failures: Counts, last: AttemptEnded | None) -> int | None:
    """Return when a job may start again after an attempt that failed or was lost; None: at once, as the first time."""
    if last is None or last.node_fault or job.service is not None or last.outcome not in (Outcome.FAILED, Outcome.LOST):
        return None
    tries = dict(failures).get(cause_of(job, last) or ANY, 0) - 1
    return None if tries < 1 else last.at_us + min(PAUSE_US_MAX, PAUSE_US * PAUSE_FACTOR ** min(tries - 1, 10))

"""Names of jobs and attempts: `gpt-k3v9` is a job, `gpt-k3v9.2` its second attempt.

A job's id is unique across servers, since checkpoints are kept under it and outlive the server that ran it.
The random part is drawn by the caller: this module is pure.
"""

from typing import NewType

JobId = NewType("JobId", str)

ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # no l, o, 0, 1: read aloud without doubt


def job_id(name: str, drawn: bytes) -> JobId:
    """Return the id of a new job from its name and at least 6 random bytes.

    >>> job_id("gpt", bytes(range(6)))
    'gpt-abcdef'
    """
    assert len(drawn) >= 6, "six random bytes keep two servers' jobs apart"
    return JobId(name + "-" + "".join(ALPHABET[b % len(ALPHABET)] for b in drawn[:6]))


def attempt_name(job: JobId, epoch: int) -> str:
    """Return the name that people read: the job and the number of its attempt.

    >>> attempt_name(JobId("gpt-abcdef"), 2)
    'gpt-abcdef.2'
    """
    return f"{job}.{epoch}"

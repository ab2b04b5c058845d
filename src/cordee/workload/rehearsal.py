"""The job of a rehearsal: a few steps of a real job, on as few GPUs, with a notice in their middle."""

import hashlib
import json
from typing import NamedTuple

from cordee.workload.spec import Elastic, JobSpec, Limit, OnPreempt, Retries

REHEARSAL_ENV = "CORDEE_REHEARSAL"
STEPS, REPLAYED = 3, 3
LIMIT_S = 600.0
GRACE_S_MAX = 120.0  # a notice that is ignored shows after so long
_NAME_CHARS = 30


class RehearsedSteps(NamedTuple):
    """The steps of a rehearsal: before its notice, and those that the resumed run repeats."""

    steps: int = STEPS
    replayed: int = REPLAYED

    def __str__(self) -> str:
        """Return the text that `read` reads.

        >>> RehearsedSteps.read(str(RehearsedSteps(5, 2)))
        RehearsedSteps(steps=5, replayed=2)
        """
        return f"{self.steps}+{self.replayed}"

    @classmethod
    def read(cls, text: str) -> "RehearsedSteps":
        """Return the steps that a text names."""
        steps, _, replayed = text.partition("+")
        return cls(int(steps), int(replayed))


def rehearsal_name(name: str) -> str:
    """Return the name of the job that rehearses one of this name.

    >>> rehearsal_name("gpt")
    'gpt-rehearsal'
    """
    return f"{name[:_NAME_CHARS].rstrip('-')}-rehearsal"


def rehearsal_spec(spec: JobSpec, gpus: int, steps: RehearsedSteps, limit_s: float) -> JobSpec:
    """Return the job that rehearses another one.

    It ends with the first failure of its script, and its run time is bounded. Its checkpoints lie in a folder of its
    own, as those of each job do.

    Args:
        spec: the job.
        gpus: on which the rehearsal runs.
        steps: before and after its notice.
        limit_s: the longest run time.
    """
    part = gpus / spec.gpus if spec.gpus else 1
    shorter_s = limit_s if spec.limit.time_s is None else min(limit_s, spec.limit.time_s)
    changes = {
        "name": rehearsal_name(spec.name),
        "gpus": gpus,
        "elastic": Elastic(),
        "cpus": None if spec.cpus is None else spec.cpus * part,
        "memory_bytes": None if spec.memory_bytes is None else max(1, round(spec.memory_bytes * part)),
        "limit": Limit(time_s=shorter_s, cost_micro_usd=spec.limit.cost_micro_usd),
        "retries": Retries(script=0),
        "on_preempt": OnPreempt(grace_s=min(GRACE_S_MAX, shorter_s / 4)),
        "estimate_s": None,
        "sweep": None,
        "env": spec.env | {REHEARSAL_ENV: str(steps)},
    }
    return spec.model_copy(update=changes)


def code_of(spec: JobSpec, script: bytes | None) -> str:
    """Return the digest of what a job runs: its files, or else its script, and its command; empty if it has neither.

    Args:
        spec: the job.
        script: the content of the script that its command names; None: it was not read.
    """
    files = spec.files or (None if script is None else hashlib.sha256(script).hexdigest())
    if files is None:
        return ""
    return hashlib.sha256(json.dumps([files, spec.run]).encode()).hexdigest()[:32]

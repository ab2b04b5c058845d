"""Specs that clients send, checked."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cordee.answers.submissions import Submission
from cordee.errors import SpecError
from cordee.ids import ALPHABET
from cordee.workload.spec import JobSpec


def spec_of(submission: Submission, name: str | None = None) -> JobSpec:
    """Return the spec of a job that may be submitted; `name` is that of the job that it makes, if not its own.

    Raises:
        SpecError: it is none, its id is not of its name, or it is a service.
    """
    spec = read_spec(submission.spec)
    if spec.service is not None:
        raise SpecError(f"{spec.name} is a service, not a job", hint="send it to /v1/services, as `cordee serve run`")
    if spec.sweep is not None:
        raise SpecError(f"{spec.name} is a sweep, not a job", hint="send it to /v1/sweeps, as `cordee run`")
    name = spec.name if name is None else name
    if not re.fullmatch(re.escape(name) + f"-[{ALPHABET}]{{6}}", submission.job_id):
        raise SpecError(f"{submission.job_id!r} is not an id of a job named {name!r}", hint="use cordee.client")
    return spec


def read_spec(data: Mapping[str, Any]) -> JobSpec:
    """Return the spec that a client sent.

    Raises:
        SpecError: it is none.
    """
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

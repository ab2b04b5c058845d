"""A trial's JobSpec from that of its sweep. Pure."""

import json
import re
import shlex
from collections.abc import Mapping
from hashlib import blake2b

from cordee.ids import JobId
from cordee.ids import job_id as new_job_id
from cordee.workload.spec import JobSpec
from cordee.workload.sweep import RUNGS_ENV, TRIAL_ENV, Value


def trial_id(sweep_id: str, spec: JobSpec, number: int) -> JobId:
    """Return the id of a trial's job, which follows from its sweep and its number: no trial can start twice."""
    return new_job_id(_name(spec, number), blake2b(f"{sweep_id}/{number}".encode(), digest_size=6).digest())


def trial_spec(spec: JobSpec, number: int, values: Mapping[str, Value]) -> JobSpec:
    """Return the job of one trial: `{name}` in its command is the value of that parameter."""
    assert spec.sweep is not None, "only sweeps have trials"
    env = spec.env | {TRIAL_ENV: json.dumps(values)}
    if spec.sweep.rung_steps:
        env[RUNGS_ENV] = ",".join(map(str, spec.sweep.rung_steps))
    run: str | tuple[str, ...]
    if isinstance(spec.run, str):
        run = _filled(spec.run, {name: shlex.quote(str(value)) for name, value in values.items()})
    else:
        run = tuple(_filled(word, {name: str(value) for name, value in values.items()}) for word in spec.run)
    return spec.model_copy(update={"name": _name(spec, number), "run": run, "sweep": None, "env": env})


def unused_parameters(spec: JobSpec) -> list[str]:
    """Return the parameters that stand nowhere in the command: the script reads them by `cordee.trial()`."""
    assert spec.sweep is not None, "only sweeps have trials"
    text = spec.run if isinstance(spec.run, str) else " ".join(spec.run)
    return [name for name in spec.sweep.values if f"{{{name}}}" not in text]


def _name(spec: JobSpec, number: int) -> str:
    return f"{spec.name}-{number}"


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Put values in the place of their names in braces, and leave all other braces alone.

    >>> _filled("train --lr {lr} --x '{other}' ${HOME}", {"lr": "0.1"})
    "train --lr 0.1 --x '{other}' ${HOME}"
    """
    return re.sub(r"(?<!\$)\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)

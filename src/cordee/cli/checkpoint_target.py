"""Check at submission that a job can write its checkpoints: the folder, and room for two generations."""

import os
import shutil
from pathlib import Path

from cordee.errors import CordeeError, SpecError
from cordee.units import format_bytes
from cordee.workload.spec import JobSpec

_GENERATIONS = 2  # the newest stays until the next one is whole


def check_target(spec: JobSpec, folder: Path) -> None:
    """Check the destinations on this machine; buckets are checked when the job opens them.

    Args:
        spec: of the job.
        folder: the submitter's, in which a relative destination lies.

    Raises:
        SpecError: a destination cannot be written, or has no room for two generations of the job's model.
    """
    from cordee.storage.destination import is_remote, level_urls

    for place in level_urls(spec.checkpoint.to) if spec.checkpoint.to else ():
        if is_remote(place):
            continue
        target = folder / Path(place.removeprefix("file://")).expanduser()
        there = next(each for each in (target, *target.parents) if each.exists())
        if not there.is_dir():
            raise SpecError(f"checkpoint.to: {there} is a file, not a folder", hint="name a folder")
        if there != target and not target.is_relative_to(folder) and not os.access(there, os.W_OK | os.X_OK):
            continue  # it may be a mount that only the nodes have
        if not os.access(there, os.W_OK | os.X_OK):
            raise SpecError(f"checkpoint.to: {there} cannot be written", hint="name a folder of yours")
        _check_room(spec, folder, there)


def _check_room(spec: JobSpec, folder: Path, there: Path) -> None:
    n_bytes = _generation_bytes(spec, folder)
    free = shutil.disk_usage(there).free
    if n_bytes is not None and free < _GENERATIONS * n_bytes:
        raise SpecError(
            f"checkpoint.to: {there} has {format_bytes(free)} free, and two generations of {format_bytes(n_bytes)} "
            f"need {format_bytes(_GENERATIONS * n_bytes)}",
            hint="free space there, or name another folder or a bucket",
        )


def _generation_bytes(spec: JobSpec, folder: Path) -> int | None:
    """Return the bytes of one generation by the plan; None: the job names no model, or the plan does not know it."""
    from cordee.plan.training import OPTIMIZERS
    from cordee.workload.load import load_shape

    if spec.model is None:
        return None
    optimizer = OPTIMIZERS.get(spec.model.optimizer)
    try:
        shape = load_shape(spec.model.name or str(folder / (spec.model.config or "")))
    except CordeeError:
        return None  # admission says why
    return None if optimizer is None else round(shape.parameters * optimizer.checkpoint_bytes_per_parameter)

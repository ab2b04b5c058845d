"""Figures that a rehearsal has measured, in the place of those that were planned or assumed for a job."""

from dataclasses import replace
from pathlib import Path

from cordee.answers.submissions import RehearsalView
from cordee.control.admission import Admitted, script_of
from cordee.control.home import read_settings
from cordee.control.rehearsed.fold import Rehearsals
from cordee.control.rehearsed.verdict import grace_s
from cordee.events import Estimate, Job, RehearsalEnded
from cordee.units import US_PER_S, format_duration, parse_duration_s
from cordee.workload.rehearsal import code_of
from cordee.workload.spec import JobSpec

STEP_FACTOR = 2
"""A step of the job is expected within this factor of the rehearsal's: its few steps compile and warm up."""


GRACE_S_MAX = "10m"
_SCRIPT_BYTES_MAX = 16 * 1024 * 1024


def code_here(spec: JobSpec) -> str:
    """Return the digest of a job's code: of its submitted files, or of the script in its folder; empty: not known."""
    script = None if spec.files else script_of(spec)
    try:
        content = None
        if script is not None and script.is_file() and script.stat().st_size <= _SCRIPT_BYTES_MAX:
            content = script.read_bytes()
    except OSError:
        content = None
    return code_of(spec, content)


def as_rehearsed(admitted: Admitted, spec: JobSpec, rehearsals: Rehearsals, *, home: Path) -> Admitted:
    """Return an admitted job with the digest of its code and, if that was rehearsed, with what was measured."""
    if spec.service is not None:
        return admitted
    code = code_here(spec)
    job = replace(admitted.job, code=code)
    found = rehearsals.of(code, spec.gpus)
    if found is None or not found.passed:
        return replace(admitted, job=job)
    limit_s = parse_duration_s(read_settings(home).get("grace_max", GRACE_S_MAX))
    is_open = spec.on_preempt.grace_s == "auto"
    job = with_measured(job, found, grace_is_open=is_open, grace_s_max=limit_s)
    notes = admitted.notes
    if is_open:
        notes += (f"its grace period is {format_duration(job.grace_us / US_PER_S)}, from the save of its rehearsal",)
    return replace(admitted, job=job, notes=notes)


def with_measured(job: Job, found: RehearsalEnded, *, grace_is_open: bool, grace_s_max: float) -> Job:
    """Return the job with the values of its rehearsal.

    Args:
        job: the job as planned.
        found: a rehearsal of its code that passed.
        grace_is_open: whether its owner gave no grace period, so that one and a half measured saves are one.
        grace_s_max: the operator's limit of that.
    """
    changes: dict[str, object] = {}
    if found.save_us is not None and grace_is_open:
        changes["grace_us"] = round(min(grace_s_max, grace_s(found.save_us, found.step_us)) * US_PER_S)
    if found.gpus != job.gpus:  # a larger gang has another step, and another part of the checkpoint on each rank
        return replace(job, **changes)  # type: ignore[arg-type]
    planned = job.estimate_on(job.gpus) or Estimate(layout="", peak_bytes=0, gpu_memory_bytes=0, gpus=job.gpus)
    measured = measured_estimate(planned, found)
    changes["estimates"] = (measured, *(each for each in job.estimates if each.gpus != job.gpus))
    changes["save_us"] = measured.save_us or job.save_us
    if measured.restart_us:
        changes["restart_us"] = changes["min_run_us"] = measured.restart_us
    return replace(job, **changes)  # type: ignore[arg-type]


def measured_estimate(planned: Estimate, found: RehearsalEnded) -> Estimate:
    """Return the estimate with step, save, restart and memory as the rehearsal measured them on as many GPUs."""
    step_us, peak_bytes = found.step_us, found.peak_bytes
    changes: dict[str, object] = {}
    if step_us:
        changes |= {
            "step_us": step_us,
            "step_us_low": step_us // STEP_FACTOR,
            "step_us_high": step_us * STEP_FACTOR,
            "mfu": planned.mfu_at(planned.tokens_per_step / step_us * US_PER_S) if planned.tokens_per_step else None,
        }
    if peak_bytes and planned.gpu_memory_bytes:  # a process on a CPU slot has its interpreter's memory, too
        context_bytes = max(0, planned.peak_bytes - planned.allocated_bytes) if planned.allocated_bytes else 0
        changes |= {"allocated_bytes": peak_bytes, "peak_bytes": peak_bytes + context_bytes}
    if found.save_us:
        changes["save_us"] = found.save_us
    if found.restart_us:
        changes["restart_us"] = found.restart_us
    return replace(planned, **changes)  # type: ignore[arg-type]


def rehearsal_view(found: RehearsalEnded) -> RehearsalView:
    """Return a result as the API answers it."""
    is_known = found.passed and found.save_us is not None
    return RehearsalView(
        job_id=found.job_id,
        code=found.code,
        ended_us=found.at_us,
        passed=found.passed,
        why=found.why,
        notes=list(found.notes),
        gpus=found.gpus,
        gpu_name=found.gpu_name,
        steps=found.steps,
        peak_bytes=found.peak_bytes,
        step_us=found.step_us,
        save_us=found.save_us,
        restart_us=found.restart_us,
        grace_s=grace_s(found.save_us or 0, found.step_us) if is_known else None,
    )

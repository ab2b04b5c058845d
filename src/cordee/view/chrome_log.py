"""A log as a Chrome trace: a group for each job, a line for each attempt, what it did with its time as slices.

The classes are the ledger's, such as useful, lost or serving. An arrow leads from an attempt that
got notice for another job to the attempt that gained by it.
"""

from collections.abc import Iterable

from cordee.events import Event
from cordee.units import plural
from cordee.view.chrome import Flow, Slice, Track
from cordee.view.timeline import Segments, tracks


def log_slices(events: Iterable[Event], segments: Segments) -> tuple[list[Slice], list[Flow]]:
    """Return the slices and arrows of all attempts of a log; times are those of the log's clock."""
    slices: list[Slice] = []
    first: dict[str, list[Slice]] = {}
    preempted: list[tuple[Slice, str]] = []
    for group, track in enumerate(tracks(events, segments)):
        job = track.job
        for attempt in track.attempts:
            row = Track(group, attempt.epoch, job.name, f"attempt {attempt.epoch}, {plural(job.gpus, 'GPU')}")
            own = [
                Slice(row, span.name, span.name, span.from_us, span.to_us - span.from_us, {"gpus": job.gpus, **(
                    {"first_step": span.first_step, "steps": span.steps} if span.steps else {})})
                for span in attempt.spans
            ]  # fmt: skip
            slices += own
            if own:
                first.setdefault(job.job_id, []).append(own[0])
                preempted += [(own[-1], notice.for_job) for notice in attempt.notices if notice.for_job]
    flows = []
    for source, preemptor in preempted:
        end_us = source.start_us + source.length_us
        later = [each for each in first.get(preemptor, []) if each.start_us >= end_us]
        if later:
            flows.append(Flow("preempted", source, min(later, key=lambda each: each.start_us)))
    return slices, flows

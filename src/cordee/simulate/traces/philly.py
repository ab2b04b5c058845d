"""Microsoft's Philly trace as published: `cluster_job_log`, a JSON list (github.com/msr-fiddle/philly-traces).

A job's attempts are merged: its run time is the time of all of them, its GPUs those of the largest.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cordee.errors import TraceError
from cordee.simulate.traces.job import BadRow, Tally, TraceJob, checked, open_text, stamp_us


def philly(path: Path, tally: Tally) -> Iterator[TraceJob]:
    """Yield its jobs; "line" is the number of the entry.

    Raises:
        TraceError: it is no such list.
    """
    with open_text(path) as file:
        try:
            entries = json.load(file)
        except ValueError as error:
            raise TraceError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise TraceError(f"{path} is no list of jobs, but a {type(entries).__name__}")
    for number, entry in enumerate(entries, start=1):
        try:
            if not isinstance(entry, dict):
                raise BadRow("no job")
            yield checked(_job(entry, number))
        except BadRow as bad:
            tally.bad(str(bad), number)


def _job(entry: Mapping[str, Any], number: int) -> TraceJob:
    attempts = entry.get("attempts") or []
    if not attempts:
        raise BadRow("never ran")
    gpus = duration_us = 0
    for attempt in attempts:
        gpus = max(gpus, sum(len(part.get("gpus") or []) for part in attempt.get("detail") or []))
        start, end = attempt.get("start_time"), attempt.get("end_time")
        if start and end and "None" not in (start, end):
            duration_us += stamp_us(end, "end") - stamp_us(start, "start")
    if duration_us == 0 and (attempts[-1].get("end_time") in (None, "None")):
        raise BadRow("had not ended")
    return TraceJob(
        job_id=str(entry.get("jobid", number)),
        submit_us=stamp_us(entry.get("submitted_time"), "submission time"),
        gpus=gpus,
        duration_us=duration_us,
        line=number,
        user=str(entry.get("user") or ""),
        vc=str(entry.get("vc") or ""),
        status=str(entry.get("status") or ""),
    )

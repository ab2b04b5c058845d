"""Cordee's own log: the database of a home, which may be in use, or JSON lines, an event each.

A job of a log asks for what it asked for and works as long as it was seen to work.
"""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from cordee.control.store.segments import checked_lines
from cordee.errors import TraceError
from cordee.event_json import decode
from cordee.events import Event
from cordee.simulate.observed import observe
from cordee.simulate.traces.job import TraceJob, open_text

DATABASE = "cordee.db"


def is_log(path: Path) -> bool:
    """Return whether the path is a home, its database or JSON lines of events."""
    if path.is_dir():
        return (path / DATABASE).exists()
    if path.suffix == ".db":
        return True
    with open_text(path) as file:
        try:
            first = file.readline()
        except (OSError, EOFError):
            return False
    return first.startswith("{") and '"kind"' in first


def read_log(path: Path) -> Iterator[Event]:
    """Yield the events in order.

    Raises:
        TraceError: it cannot be read, or another version wrote it.
    """
    try:
        for number, text in _bodies(path):
            try:
                yield decode(json.loads(text))
            except ValueError as error:
                raise TraceError(
                    f"{path}, record {number}: {error}", hint="it was not written by this version"
                ) from error
    except (OSError, sqlite3.Error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _bodies(path: Path) -> Iterator[tuple[int, str]]:
    database = path / DATABASE if path.is_dir() else path
    if database.suffix != ".db":
        with open_text(path) as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        return
    # Read only: the server that owns it may be running.
    after = 0
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
    try:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'segments'").fetchone():
            for first, last, found, body in connection.execute("SELECT * FROM segments ORDER BY first"):
                yield from enumerate(checked_lines(first, last, found, body), start=first)
                after = last
        query = "SELECT number, body FROM log WHERE number > ? ORDER BY number"
        yield from connection.execute(query, (after,))
    finally:
        connection.close()


def logged_jobs(path: Path) -> Iterator[TraceJob]:
    """Yield the jobs that ended or ran in the log."""
    for line, seen in enumerate(observe(read_log(path)).jobs, start=1):
        job = seen.job
        yield TraceJob(
            job_id=job.job_id,
            submit_us=seen.submitted_us,
            gpus=job.gpus,
            duration_us=max(1, seen.worked_us),
            line=line,
            user=job.owner,
            vc=job.queue,
            status=seen.state,
            gpu_milli=job.gpu_milli,
            gpu_name=job.gpu_name,
            cpu_milli=job.cpu_milli,
            memory_bytes=job.memory_bytes,
            tier=job.tier.value,
            time_limit_us=job.time_limit_us,
            mig=job.mig or "",
        )

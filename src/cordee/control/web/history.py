"""The events of one job, from the log and from the segments that hold its older part."""

import json
from collections.abc import Sequence
from itertools import islice

import sqlalchemy as sa

from cordee.control.store import tables
from cordee.control.store.segments import checked_lines
from cordee.control.store.sql import SqlStore
from cordee.event_json import decode
from cordee.events import Event, JobSubmitted

EVENTS_MAX = 20_000
SEGMENTS_MAX = 300


def job_events(store: SqlStore, job_id: str) -> tuple[list[Event], bool]:
    """Return the events of a job, oldest first, and whether they begin with its submission.

    A job of very many events is cut at its newest ones, and one that is very old at the newest segments.
    """
    log = tables.log
    query = sa.select(log.c.number, log.c.body).where(log.c.job_id == job_id)
    rows = store.read(query.order_by(log.c.number.desc()).limit(EVENTS_MAX))
    found = [decode(json.loads(row["body"])) for row in rows]
    if len(found) < EVENTS_MAX and not _begins(found):
        found += _of_segments(store, job_id, EVENTS_MAX - len(found))
    found.reverse()
    return found, bool(found) and isinstance(found[0], JobSubmitted)


def _begins(newest_first: Sequence[Event]) -> bool:
    return bool(newest_first) and isinstance(newest_first[-1], JobSubmitted)


def _of_segments(store: SqlStore, job_id: str, most: int) -> list[Event]:
    """Return the events of a job that segments hold, newest first."""
    found: list[Event] = []
    segments, before, marker = tables.segments, None, json.dumps(job_id)
    for _ in range(SEGMENTS_MAX):
        query = sa.select(segments).order_by(segments.c.first.desc()).limit(1)
        rows = store.read(query if before is None else query.where(segments.c.first < before))
        if not rows:
            break
        [row] = rows
        before = row["first"]
        lines = checked_lines(row["first"], row["last"], row["hash"], bytes(row["body"]))
        here = (decode(json.loads(line)) for line in reversed(lines) if marker in line)
        found += islice((each for each in here if _is_of(each, job_id)), most - len(found))
        if len(found) >= most or _begins(found):
            break
    return found


def _is_of(event: Event, job_id: str) -> bool:
    of = event.job.job_id if isinstance(event, JobSubmitted) else getattr(event, "job_id", None)
    return of == job_id

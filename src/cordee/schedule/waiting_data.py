"""The datasets that waiting jobs will read, which caches keep for them."""

from heapq import merge
from itertools import islice

from cordee.schedule.state.state import State

JOBS_MAX = 1000
"""Waiting jobs that are looked at: those behind them start too late to keep data for."""


def waiting_data(state: State) -> tuple[str, ...]:
    """Return the URLs of the datasets of waiting jobs: of the higher tier first, then by priority and place."""
    lines = [[(*key[:2], place) for place in line.places[:JOBS_MAX]] for key, line in state.waiting.lines.items()]
    jobs = (state.jobs[place.job_id].job for *_, place in islice(merge(*lines), JOBS_MAX))
    return tuple(dict.fromkeys(url for job in jobs for url in job.data))

"""The cost of jobs, users, queues and services as an answer; it reads the accounts of all jobs that ever ended."""

from collections.abc import Callable

from cordee.account.attempt import AttemptRow
from cordee.account.sums import By, summed
from cordee.answers.cost import CostView
from cordee.control.electricity import electricity_of
from cordee.control.operations import Operations
from cordee.control.row_views import compared, cost_row_view
from cordee.control.snapshot import decoded_jobs
from cordee.ids import attempt_name


def cost(
    operations: Operations,
    by: By,
    sees: Callable[[AttemptRow], bool] | None = None,
    check: Callable[[], None] = lambda: None,
) -> CostView:
    """Return GPU time and cost until now.

    Args:
        operations: of the server.
        by: of which each row is.
        sees: chooses the attempts of the rows; the totals are of all.
        check: is called for each job, and may raise.
    """
    of_attempts = sees is not None or by in ("job", "epoch")
    now_us = operations.clock.now_us()
    with operations.control.changed:
        accounts, jobs = operations.control.ledger.at(now_us), set(operations.control.state.jobs)
        attempts = accounts.rows if of_attempts else ()
        measured = {job_id: operations.control.measurements.attempts(job_id) for job_id in jobs if attempts}
    if not of_attempts:
        rows = accounts.cost(by)
    else:
        # A job that is in the state may have been retired by an earlier version, in another form.
        bodies = operations.store.archive.retired()
        ended = []
        for body in (body for job_id, body in bodies.items() if job_id not in jobs):
            check()
            ended += decoded_jobs([body])
        every = (*attempts, *(row for job in ended for row in job.accounts))
        rows = summed(by, every, sees=sees)
        measured |= {job.record.job.job_id: job.measurements for job in ended}
    measures = {
        each.job_id if by == "job" else attempt_name(each.job_id, each.epoch): compared(each)
        for found in measured.values()
        for each in found
    }
    views = [cost_row_view(row, measures.get(row.key, [])) for row in rows]
    return CostView.of(accounts.totals(), by=by, at_us=now_us, rows=views, electricity=electricity_of(operations.home))

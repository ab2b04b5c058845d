"""The saved form of a state: plain records from which the same state is built again without its log.

What follows from the records alone (free GPUs, lines, columns) is not saved. The standing of a waiting job and the row
of a running one are, since they were computed from the run times that were known at that moment.
"""

from typing import NamedTuple

from cordee.events import Lease
from cordee.ids import JobId
from cordee.schedule.placement.entry import Used
from cordee.schedule.placement.mix import Mix
from cordee.schedule.policy import Policy
from cordee.schedule.quota.quotas import Quotas, SavedQuotas
from cordee.schedule.state.agenda import Agenda
from cordee.schedule.state.columns import Cell
from cordee.schedule.state.history import History
from cordee.schedule.state.records import Attempt, JobRecord, NodeRecord
from cordee.schedule.state.state import State


class SavedState(NamedTuple):
    """A state between two cycles.

    Attributes:
        waiting: the standing and the longest run time of each waiting job.
        running: the row of each attempt that could be preempted.
        changes: all changes, and those after which more may fit.
    """

    shutting_down: bool
    jobs: dict[JobId, JobRecord]
    attempts: dict[JobId, Attempt]
    nodes: dict[str, NodeRecord]
    leased: dict[str, Used]
    vacating: dict[str, tuple[tuple[Lease, JobId], ...]]
    went_down: dict[str, int]
    quarantines: list[tuple[int, str]]
    mix: Mix
    quotas: SavedQuotas
    agenda: Agenda
    history: History
    waiting: dict[JobId, tuple[int, int]]
    running: dict[JobId, dict[str, Cell]]
    changes: tuple[int, int]


def saved_state(state: State) -> SavedState:
    """Return the saved form of a state; it shares the state's dictionaries, so encode it before the next change."""
    assert not state.journal.keeps, "inside a what-if a state is not what it is"
    nodes, waiting = state.nodes, state.waiting
    leaving = {name: tuple((lease, job.job_id) for lease, job in leases) for name, leases in nodes.vacating.items()}
    return SavedState(
        shutting_down=state.shutting_down,
        jobs=state.jobs,
        attempts=state.attempts,
        nodes=nodes.records,
        leased=nodes.leased,
        vacating=leaving,
        went_down=nodes.went_down,
        quarantines=nodes.quarantines,
        mix=nodes.free.mix,
        quotas=state.quotas.saved(),
        agenda=state.agenda,
        history=state.history,
        waiting={job_id: (waiting.standing(job_id), waiting.length_us(job_id)) for job_id in sorted(waiting.job_ids())},
        running={job_id: state.running.row(job_id) for job_id in sorted(state.running.row_of)},
        changes=(state.changes.total, state.changes.gains),
    )


def restored_state(saved: SavedState, policy: Policy) -> State:
    """Return the state that was saved; it takes the saved form's dictionaries over.

    Args:
        saved: the saved form.
        policy: the policy under which it was saved.
    """
    state = State(policy, mix=saved.mix)
    state.shutting_down, state.jobs, state.attempts = saved.shutting_down, saved.jobs, saved.attempts
    state.quotas, state.agenda, state.history = Quotas.restored(saved.quotas), saved.agenda, saved.history
    state.running.levels = state.levels_gpu_us
    nodes = state.nodes
    nodes.records, nodes.leased = saved.nodes, saved.leased
    nodes.vacating = {
        name: tuple((lease, state.jobs[job_id].job) for lease, job_id in leases)
        for name, leases in saved.vacating.items()
    }
    nodes.went_down, nodes.quarantines = saved.went_down, saved.quarantines
    for name in nodes.records:
        nodes.reindex(name)
    for job_id, known in saved.waiting.items():
        state.enqueue(state.jobs[job_id], known)
    for job_id, row in saved.running.items():
        attempt = state.attempts[job_id]
        state.running.add(job_id, attempt.leases, attempt.job.queue, row)
    state.changes.set(*saved.changes, None)
    return state

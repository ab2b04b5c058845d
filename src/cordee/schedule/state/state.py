"""The state: jobs, live attempts, nodes, queues, and the indexes that make a cycle cheap.

`State` is the one mutable thing of this room. Only `transitions.apply` changes it, the events of the log in order give
the same state, and `journal.what_if()` takes back everything applied inside it. Records are frozen and replaced.
"""

from dataclasses import dataclass

from cordee.events import Event
from cordee.ids import JobId
from cordee.schedule.placement.mix import Mix
from cordee.schedule.policy import Policy
from cordee.schedule.quota.held import Held
from cordee.schedule.quota.quotas import HALF_LIFE_US, Quotas
from cordee.schedule.state.agenda import Agenda
from cordee.schedule.state.changes import Changes
from cordee.schedule.state.failed_searches import FailedSearches
from cordee.schedule.state.history import LADDER, History
from cordee.schedule.state.journal import Journal
from cordee.schedule.state.nodes import Nodes
from cordee.schedule.state.order import counts_service, relevelled, standing
from cordee.schedule.state.overdue import Allowances, overdue_until_us
from cordee.schedule.state.records import NEVER, Attempt, JobRecord, Phase
from cordee.schedule.state.running import Running, row_values
from cordee.schedule.state.waiting import Waiting
from cordee.units import US_PER_S

SAFE_PERCENT = 90
"""The percentile of the run times of the most similar jobs that a backfilled job is expected to need at most."""

_ENDED_MIN = 2
"""The least number of ended jobs from which it is known how long long jobs run; nobody is overdue before."""

_SLICES_MIN = 2
"""The least patience in time slices: that of the attempt for which a job waits, and its own."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A period in which nothing is left to decide as long as the state does not change."""

    changes: int
    newest: Event | None
    from_us: int
    until_us: int | None  # decide again then; None: only after a change

    def holds(self, changes: Changes, now_us: int) -> bool:
        """Return whether nothing has happened since that a cycle would act on."""
        if changes.total != self.changes:
            return False
        if changes.newest is not self.newest and changes.newest != self.newest:
            return False
        return self.from_us <= now_us < (NEVER if self.until_us is None else self.until_us)


class State:
    """Everything that the scheduler knows; it has one owner, and only `transitions.apply` changes it.

    Attributes:
        journal: the undo journal of what-ifs.
        policy: the rules by which waiting and running jobs are indexed; `use` changes it.
        jobs: all jobs, the ended ones as well.
        attempts: the live attempts of jobs.
        nodes: nodes with the indexes of what is free.
        quotas: the holdings of queues, and their limits.
        waiting: lines of waiting jobs.
        running: columns over the attempts that could be preempted.
        agenda: jobs that a cycle looks at besides the lines.
        history: run times of jobs that ended.
        changes: a count of the changes that matter to a cycle.
        idle, failed_searches: results of the last cycle that the next one need not compute again.
    """

    def __init__(
        self, policy: Policy | None = None, *, half_life_us: int = HALF_LIFE_US, mix: Mix | None = None
    ) -> None:
        """Start before the first event.

        Args:
            policy: the rules by which jobs are indexed; `decide` changes it when it is given another one.
            half_life_us: the time after which GPUs that a queue borrowed count half as much against it.
            mix: shapes of the jobs submitted so far.
        """
        self.journal = Journal()
        self.policy = policy or Policy()
        self.shutting_down = False
        self.changes = Changes(self.journal)
        self.jobs: dict[JobId, JobRecord] = {}
        self.attempts: dict[JobId, Attempt] = {}
        self.nodes = Nodes(self.journal, self.changes, self._resized, mix)
        self.quotas = Quotas(half_life_us=half_life_us)
        self.waiting = Waiting(self.journal)
        self.agenda = Agenda()
        self.history = History()
        self.running = self._running()
        self.idle: Idle | None = None
        self.failed_searches = FailedSearches()

    def use(self, policy: Policy) -> None:
        """Index by the rules of another policy."""
        if policy is self.policy or policy == self.policy:
            return
        self.policy = policy
        self.waiting, self.running = Waiting(self.journal), self._running()
        for job_id, record in self.jobs.items():
            if record.phase is Phase.QUEUED:
                self.enqueue(record)
            elif job_id in self.attempts:
                self.run(record, self.attempts[job_id])
        for name in self.nodes.records:
            self.nodes.reindex(name)
        self.changes.count()

    @property
    def levels_gpu_us(self) -> tuple[int, ...]:
        """Return the GPU time received at which a job moves down a level: by the policy, or learnt."""
        if not counts_service(self.policy):
            return ()
        fixed = self.policy.levels_gpu_us
        return self.history.levels_gpu_us if fixed is None else fixed

    def _running(self) -> Running:
        levels = self.levels_gpu_us
        bounds = LADDER if self.policy.levels_gpu_us is None and counts_service(self.policy) else levels
        return Running(self.journal, self.nodes.columns, bounds, levels)

    def learn(self, now_us: int) -> None:
        """Learn the levels anew, from ended jobs and from what the others have received; order waiting jobs by them."""
        history, before = self.history, self.running.levels
        live = [self.jobs[job_id].served_gpu_us for job_id in self.waiting.job_ids()]
        for job_id, attempt in self.attempts.items():
            gpu_milli = sum(lease.gpu_milli for lease in attempt.held)
            live.append(self.jobs[job_id].served_gpu_us + gpu_milli * max(0, now_us - attempt.placed_us) // 1000)
        self.journal.note(setattr, history, "learnt", history.learnt)
        history.learn(live)
        if self.levels_gpu_us == before:
            return
        self.journal.note(setattr, self.running, "levels", before)
        self.running.levels = self.levels_gpu_us
        for job_id in sorted(self.waiting.job_ids()):
            record, length_us = self.jobs[job_id], self.waiting.length_us(job_id)
            self.waiting.remove(record)
            given = record.gate.order
            if given is not None and given.standing is not None:
                given = given._replace(standing=relevelled(given.standing, before, self.running.levels))
                record = record._replace(gate=record.gate._replace(order=given))
                self.journal.put(self.jobs, job_id, record)
            self.enqueue(record, (standing(self.policy, self.running.levels, record, None), length_us))

    def snapshot(self) -> dict[str, object]:
        """Return a deep copy as plain values, to compare and to keep; indexes included."""
        return {
            "shutting_down": self.shutting_down,
            "jobs": dict(self.jobs),
            "attempts": dict(self.attempts),
            "nodes": self.nodes.value(),
            "agenda": self.agenda.value(),
            "waiting": self.waiting.value(),
            "running": self.running.value(),
            "quotas": self.quotas.value(),
            "history": self.history.value(),
            "changes": self.changes.total,
        }

    def allowances(self) -> Allowances:
        """Return the allowances of overdue jobs now."""
        mix = self.nodes.free.mix
        return Allowances(self.policy, self.patience_us, self.running, self.waiting, self.quotas, mix)

    def heeds_min_runs(self, tier: int) -> bool:
        """Return whether a job may wait for attempts of a tier to have run long enough: a higher tier, or a queue's."""
        return bool(self.quotas.queues) or any(line.tier < tier for line in self.waiting.lines.values())

    @property
    def patience_us(self) -> int:
        """Return the total wait after which a job is overdue; NEVER if none ever is."""
        policy = self.policy
        if not policy.guards:
            return NEVER
        if policy.patience_us is not None or policy.patience is None:
            return NEVER if policy.patience_us is None else policy.patience_us
        if self.history.ended < _ENDED_MIN:
            return NEVER
        patience_us = int(policy.patience * self.history.long_run_us) // US_PER_S * US_PER_S
        return max(_SLICES_MIN * policy.time_slice_us, patience_us)

    def left_us(self, record: JobRecord, percent: int = 50) -> int | None:
        """Return the run time that a job has left: by its estimate, or else by the jobs that ended before it."""
        job = record.job
        if job.estimate_us is not None:
            return max(0, job.estimate_us - record.used_us)
        return self.history.left_us(job, record.used_us, percent)

    def _length_us(self, record: JobRecord) -> int:
        """Return the longest run time of a job's next attempt: by its limit, or by a cautious estimate."""
        job, lengths = record.job, [NEVER]
        if job.time_limit_us is not None:
            lengths.append(max(job.time_limit_us, job.time_limit_us // 2 + job.grace_us) - record.used_us)
        left_us = self.left_us(record, SAFE_PERCENT)
        return min(lengths if left_us is None else (*lengths, left_us))

    def enqueue(self, record: JobRecord, known: tuple[int, int] | None = None) -> None:
        """Put a job into its line; `known` is its standing and its longest run time, computed now if not given."""
        leaf = self.quotas.leaf(record.job.queue)
        by_owner = self.quotas.budgets.by_user or any(holder.queue.user_gpus is not None for holder in leaf.path)
        if known is None:
            left_us = None if counts_service(self.policy) else self.left_us(record)
            known = standing(self.policy, self.running.levels, record, left_us), self._length_us(record)
        self.waiting.add(
            record,
            standing=known[0],
            length_us=known[1],
            queue=leaf.queue.name,
            owner=record.job.owner if by_owner else "",
            reserved=self.agenda.reserved_for(record.job) if self.agenda.reservations else (),
        )
        self.changes.count(gain=False)

    def run(self, record: JobRecord, attempt: Attempt) -> None:
        """Index an attempt among the attempts that could be preempted, unless it leaves already."""
        if attempt.leaving or attempt.ended:
            return
        late = attempt.placed_us - record.waits_from_us >= self.patience_us
        until_us = overdue_until_us(record, attempt, self.allowances()) if late else None
        values = row_values(self.policy, record, attempt, self.left_us(record), until_us)
        self.running.add(attempt.job.job_id, attempt.leases, attempt.job.queue, values)

    def _resized(self, before: Held, after: Held, at_us: int) -> None:
        self.quotas.resize(after.less(before), at_us)
        self.journal.note(self.quotas.resize, before.less(after), at_us)

"""The API without HTTP: one method for each request that a client can make."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import cordee
from cordee.account.measured import StepsLeft
from cordee.answers.jobs import AttemptView, FailureView, ForecastView, JobDetailView, JobView, WhyView
from cordee.answers.nodes import NodeView
from cordee.answers.queues import QueuesSubmission, QueuesView, QueueView
from cordee.answers.submissions import DryRunView, Submission, Submitted
from cordee.answers.view import HealthView
from cordee.control.admission import Admitted, admit, spec_for
from cordee.control.dry_run import dry_run, forecast_of
from cordee.control.files import JobFiles
from cordee.control.fold import EndedJob
from cordee.control.members import Members
from cordee.control.notify.destinations import read_destinations
from cordee.control.ports import Clock
from cordee.control.rehearsed.measured import as_rehearsed, code_here, rehearsal_view
from cordee.control.roles import Bearer
from cordee.control.row_views import compared
from cordee.control.secret_store import SecretStore
from cordee.control.snapshot import decoded_jobs
from cordee.control.specs import spec_of
from cordee.control.standby import Standby
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.control.ticks import Ticks
from cordee.errors import DependencyError, NotFoundError, SpecError, StoreError
from cordee.events import After, AfterEnd, BudgetRemoved, BudgetSet, Lease, Node, Queue
from cordee.hardware.catalog import Catalogue
from cordee.ids import JobId
from cordee.near import meant
from cordee.schedule.explain import explain
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.schedule.quota.queues import DEFAULT
from cordee.schedule.quota.quotas import Standing
from cordee.schedule.reserved import reserved_nodes
from cordee.schedule.state.records import NodeRecord, Phase
from cordee.schedule.state.state import State
from cordee.workload.spec import JobSpec


class Machines(Protocol):
    """The nodes' links, and the engines that bring nodes."""

    def link_facts(self, name: str) -> Mapping[str, int]:
        """Return what is known of a node's link: `refused`, `clock_off_us`."""
        ...

    def spare_nodes(self) -> int:
        """Return the number of further nodes, like those that are known, that may still come."""
        ...


@dataclass(slots=True)
class Operations:
    """The requests that clients make, over the server's parts.

    Attributes:
        control: the control plane around the scheduler.
        store: the log and the tables.
        clock: the time.
        home: the folder that the server owns.
        catalogue: GPUs and prices.
        wake: wakes the control loop.
        owners: who each token stands for.
        members: the nodes that joined.
        secrets: the secrets of jobs.
        standby: this server's part in a pair of servers; None: it is the only one.
        machines: the nodes' links and engines; None: there are none.
        ticks: figures of the control loop.
        closing: the server is about to exit, so streams that follow something end.
        files: the submitted files of jobs.
        forecasting: a lock; forecasts run one after the other, so that they use at most one processor.
    """

    control: Control
    store: SqlStore
    clock: Clock
    home: Path
    catalogue: Catalogue
    wake: Callable[[], None]
    owners: Mapping[str, Bearer]
    members: Members
    secrets: SecretStore
    standby: Standby | None = None
    machines: Machines | None = None
    ticks: Ticks = field(default_factory=Ticks)
    closing: bool = field(default=False)
    files: JobFiles = field(init=False)
    forecasting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.files = JobFiles(self.home, self.members.operator)

    def health(self) -> HealthView:
        """Describe the server itself."""
        public = self.members.public
        with self.control.changed:
            return HealthView(
                version=cordee.__version__,
                pid=os.getpid(),
                home=str(self.home),
                shutting_down=self.control.state.shutting_down,
                live_attempts=len(self.control.state.attempts),
                log_number=self.control.number,
                problem=self.ticks.problem,
                role="leader" if self.standby is None or self.standby.leads else "standby",
                servers=[] if self.standby is None else self.standby.servers,
                listens=None if public is None else public.url,
                fingerprint=None if public is None else public.fingerprint,
            )

    def submit(self, submission: Submission, owner: str) -> Submitted:
        """Admit and queue a job. Submitting it again changes nothing."""
        spec = spec_of(submission)
        self.check_secrets(spec, submission.secrets)
        self.files.check(spec, owner)
        if spec.notify.to:
            read_destinations(self.home).check(spec.notify.to)
        job_id = JobId(submission.job_id)
        code = code_here(spec)
        with self.control.changed:
            admitted, found = None, self.control.fold.rehearsals.of(code, spec.gpus)
            if job_id not in self.control.state.jobs and not self.store.archive.retired(job_id):
                admitted = self.admitted(spec, job_id, owner, unprotected=submission.unprotected)
                if submission.secrets:
                    self.secrets.keep(job_id, submission.secrets)
                try:
                    self.control.submit(admitted.job, spec_for(admitted.job, spec))
                except StoreError:
                    self.secrets.keep(job_id, {})
                    raise
        self.wake()
        [row] = self.store.jobs(job_id)
        return Submitted(
            job=_job_view(row),
            notes=list(admitted.notes) if admitted else [],
            micro_usd_per_hour=admitted.micro_usd_per_hour if admitted else 0,
            rehearsed=None if found is None else rehearsal_view(found),
        )

    def add_files(self, packed: bytes, owner: str) -> int:
        """Store submitted files for jobs to come, and remove those that no job needs; return their number."""
        self.files.collect([*self.store.unfinished(), *self._specs_of_others()])
        return self.files.add(packed, owner)

    def job_files(self, job_id: str, digests: Sequence[str]) -> bytes:
        """Return a pack of contents of a job's files.

        Raises:
            NotFoundError: there is no such job, or its files are not here.
        """
        row = self.row(job_id)
        files = json.loads(row["spec"]).get("files")
        if files is None:
            raise NotFoundError(f"{job_id} was submitted without its files")
        return self.files.pack(str(files), digests)

    def _specs_of_others(self) -> list[Mapping[str, Any]]:
        """Return the specs of services that want replicas and of sweeps that go on, as rows of unfinished jobs."""
        with self.control.changed:
            services = self.control.fold.directory.services.values()
            sweeps = self.control.fold.sweeps.sweeps.values()
            found = [each.spec for each in services if not each.ended]
            return [{"spec": each} for each in (*found, *(each.spec for each in sweeps if each.ended_us is None))]

    def check_secrets(self, spec: JobSpec, sent: Mapping[str, str]) -> None:
        """Check that each secret was sent or is in the home, and that no other one was sent.

        Raises:
            SpecError: it is not so.
        """
        for name in spec.secrets:
            if name not in sent and not self.secrets.has(name):
                raise SpecError(f"the secret {name} is not in the server's home", hint="submit with `cordee run`")
        for name in sent:
            if name not in spec.secrets:
                raise SpecError(f"the secret {name} was sent, but the job does not name it", hint=f"secrets: [{name}]")

    def dry_run(
        self, submission: Submission, owner: str, draws: int, cpu_s: Callable[[], float] = time.thread_time
    ) -> DryRunView:
        """Return the consequences of `submit`, or raise its error, and queue nothing; `cpu_s` bounds the forecast."""
        state, now_us = self.copy()
        job_id, unprotected = JobId(submission.job_id), submission.unprotected
        admitted = self.admitted(spec_of(submission), job_id, owner, unprotected=unprotected, state=state)
        steps_left = self.steps_left(state) if draws else {}
        with self.forecasting:
            return dry_run(state, now_us, admitted, draws, steps_left, cpu_s)

    def copy(self) -> tuple[State, int]:
        """Return a copy of the state and its time, for requests that take longer than the lock may be held."""
        with self.control.changed:
            snapshot, now_us = Snapshot(self.control.state), self.clock.now_us()
        return snapshot.restore(), now_us

    def steps_left(self, state: State) -> dict[JobId, StepsLeft]:
        """Return the steps that are left of the jobs of this copy, as far as they are known."""
        live = [job_id for job_id, record in state.jobs.items() if not record.phase.ended]
        with self.control.changed:
            found = {
                job_id: self.control.measurements.steps_left(job_id, running=job_id in state.attempts)
                for job_id in live
            }
        return {job_id: left for job_id, left in found.items() if left is not None}

    def _possible_nodes(self, state: State) -> list[Node]:
        """Return the known nodes and, as copies of the largest, those that an engine may bring."""
        nodes = [record.node for record in state.nodes.records.values()]
        if not nodes or self.machines is None:
            return nodes
        spare = self.machines.spare_nodes() - sum(not each.up for each in state.nodes.records.values())
        largest = max(nodes, key=lambda node: node.gpus)
        return nodes + [replace(largest, name=f"{largest.name}+{number}") for number in range(1, spare + 1)]

    def admitted(
        self, spec: JobSpec, job_id: JobId, owner: str, *, unprotected: bool = False, state: State | None = None
    ) -> Admitted:
        """Return the job of a spec, or refuse it with the numbers; hold the control's `changed`, or pass a state."""
        state = self.control.state if state is None else state
        admitted = admit(
            spec,
            job_id=job_id,
            owner=owner,
            nodes=self._possible_nodes(state),
            catalogue=self.catalogue,
            quotas=state.quotas,
            unprotected=unprotected,
        )
        after = tuple(each for text in spec.after if (each := self._after(text, job_id, spec.name)) is not None)
        if after:
            admitted = replace(admitted, job=replace(admitted.job, after=after))
        with self.control.changed:
            return as_rehearsed(admitted, spec, self.control.fold.rehearsals, home=self.home)

    def _after(self, text: str, job_id: JobId, name: str) -> After | None:
        """Return a dependency that a spec names; None if it has come true already.

        Raises:
            DependencyError: it can never come true.
            NotFoundError: there is no such job or sweep, or there are several jobs of that name.
        """
        of, _, written = text.partition(":")
        end = AfterEnd(written or "ok")
        try:
            row = self.row(of)
        except NotFoundError:
            sweep = self.control.fold.sweeps.find(of)
            if sweep is None:
                if of in (job_id, name):
                    raise DependencyError(f"{name} would start after itself", hint="name another job") from None
                raise
            found, done, how = (
                sweep.sweep_id,
                sweep.done if sweep.is_over else None,
                "ended without a trial that is done",
            )
        else:
            found, how = row["job_id"], {"failed": "failed", "stopped": "was stopped"}.get(row["state"], "ended well")
            done = None if row["ended_us"] is None else row["state"] == "done"
        if done is None:
            return After(of=found, end=end)
        if end is AfterEnd.ANY or done == (end is AfterEnd.OK):
            return None
        wanted = "ended well" if end is AfterEnd.OK else "failed"
        raise DependencyError(
            f"{found} {'ended well' if done else how}, and {name} was to start after it {wanted}",
            hint=f"cordee requeue {found}, or write after: [{of}:any]",
        )

    def stop(self, ref: str, *, by: str, now: bool) -> JobView:
        """Ask a job to end; one that has ended stays as it is."""
        job = self.job(ref)
        job_id = JobId(job.job_id)
        with self.control.changed:
            record = self.control.state.jobs.get(job_id)  # None: it ended long ago
            live = record if record is not None and not record.phase.ended else None
            if live is not None and (live.stop is None or (now and not live.stop.now)):
                self.control.stop(job_id, by=by, now=now)
        self.wake()
        return self.job(job_id)

    def down(self) -> HealthView:
        """Give every attempt notice; the control loop ends the server when all have left."""
        with self.control.changed:
            if not self.control.state.shutting_down:
                self.control.shut_down()
        self.wake()
        return self.health()

    def jobs(self, **which: Any) -> list[JobView]:
        """Return jobs, newest first: every one, or those that `SqlStore.jobs` chooses by these arguments."""
        found, sweep_of = [_job_view(row) for row in self.store.jobs(**which)], self.control.fold.sweeps.of
        with self.control.changed:
            of_sweeps = {each.job_id: known[0].sweep_id for each in found if (known := sweep_of(JobId(each.job_id)))}
            ahead = {each.job_id: self._steps_ahead(each) for each in found if each.ended_us is None}
        more: dict[str, dict[str, int | str | None]] = {each: {"sweep": sweep} for each, sweep in of_sweeps.items()}
        more |= {each: {**more.get(each, {}), **steps} for each, steps in ahead.items() if steps}
        return [each.model_copy(update=more[each.job_id]) if each.job_id in more else each for each in found]

    def _steps_ahead(self, job: JobView) -> dict[str, int | None]:
        """Return the steps of a job that runs, and the time for those that are left; hold the control's `changed`."""
        job_id = JobId(job.job_id)
        measured = self.control.measurements.of(job_id) if job_id in self.control.state.attempts else None
        if measured is None or measured.steps_total is None:
            return {}
        steps = max(0, measured.steps_total - max(measured.step, job.step or 0))
        left_us = None if measured.step_us is None else steps * measured.step_us
        return {"steps_total": measured.steps_total, "left_us": left_us}

    def job(self, ref: str, *, names: bool = False) -> JobDetailView:
        """Return a job by its id, or by its name if only one job, or only one that has not ended, has that name.

        With `names` it has the digest of its files and what lies and was written beside them.

        Raises:
            NotFoundError: there is none, or there are several.
        """
        row = self.row(ref)
        attempts = [_attempt_view(attempt) for attempt in self.store.attempts(row["job_id"])]
        seen = _job_view(row)
        with self.control.changed:
            view = seen.model_dump() | self._steps_ahead(seen)
        found = self._known(row["job_id"])
        job, newest = found.record.job, found.measurements[-1] if found.measurements else None
        spec = json.loads(row["spec"])
        files = self.files.view(spec.get("files"), row["job_id"], attempts, names=names)
        return JobDetailView(
            **view,
            attempts=attempts,
            spec=spec if names else {key: value for key, value in spec.items() if key != "files"},
            files=files,
            estimate=job.estimate_on(job.gpus) if newest is None else newest.estimate,
            measured=compared(newest),
            estimate_missed=found.missed,
        )

    def job_id(self, ref: str) -> str:
        """Return the id of a job by its id or name, as `job`."""
        return str(self.row(ref)["job_id"])

    def row(self, ref: str, sees: Callable[[Mapping[str, Any]], bool] | None = None) -> Mapping[str, Any]:
        """Return the row of a job by its id, or by its name if only one job, or only one that has not ended, has it.

        Rows for which `sees` is false are as if they were not there.
        """
        rows = self.store.jobs(ref) or self.store.jobs(name=ref)
        if sees is not None:
            rows = [row for row in rows if sees(row)]
        live = [row for row in rows if row["ended_us"] is None]
        for candidates in (rows, live):
            if len(candidates) == 1:
                return candidates[0]
        if rows:
            ids = ", ".join(row["job_id"] for row in rows[:5])
            raise NotFoundError(f"{len(rows)} jobs are named {ref!r}", hint=f"say which: {ids}")
        with self.control.changed:
            sweep = self.control.fold.sweeps.find(ref)
        if sweep is not None:
            raise NotFoundError(
                f"{ref!r} is a sweep, not a job", hint=f"`cordee sweep show {ref}`; its trials are jobs"
            )
        known = [row[key] for key in ("job_id", "name") for row in self.store.jobs() if sees is not None and sees(row)]
        raise NotFoundError(f"there is no job {ref!r}", hint=meant(ref, known) + "`cordee jobs` lists them")

    def _known(self, job_id: JobId) -> EndedJob:
        """Return what is known of a job: from the state, or from the archive if it ended long ago."""
        with self.control.changed:
            if job_id in self.control.state.jobs:
                return self.control.fold.known(job_id)
        [found] = decoded_jobs(self.store.archive.retired(job_id).values())
        return found

    def why(self, ref: str, draws: int = 0, cpu_s: Callable[[], float] = time.thread_time) -> WhyView:
        """Explain the state of a job; with draws, also forecast when it starts and ends, which `cpu_s` bounds."""
        job = self.job(ref)
        job_id = JobId(job.job_id)
        state, now_us = (self.control.state, self.clock.now_us()) if not draws else self.copy()
        if job_id not in state.jobs:
            state = State()
            state.jobs[job_id] = self._known(job_id).record
        steps_left = self.steps_left(state) if draws else {}
        with self.control.changed if not draws else self.forecasting:
            explained = explain(state, job_id, now_us)
            ahead = forecast_of(state, now_us, job_id, draws, steps_left, cpu_s)
        with self.control.changed:
            found = self.control.measurements.of(job_id)
            left_us = found.left_us if found is not None and job_id in self.control.state.attempts else None
        return WhyView.of(
            explained,
            job_id=job.job_id,
            state=job.state,
            left_us=left_us,
            measured=job.measured,
            estimate_missed=job.estimate_missed,
            failure=job.attempts[-1].failure if job.attempts else None,
            forecast=None if ahead is None else ForecastView.of(ahead),
        )

    def nodes(self) -> list[NodeView]:
        """Return every node that was ever up, by name, but those that have left."""
        with self.control.changed:
            state = self.control.state
            used: dict[str, dict[int, str]] = {}
            for job_id, attempt in state.attempts.items():
                for lease in attempt.held:
                    used.setdefault(lease.node, {}).update(_holders(lease, job_id, attempt.epoch))
            records = sorted(state.nodes.records.values(), key=lambda record: record.node.name)
            reserved = reserved_nodes(state)
        gone = self.members.gone()
        present = [record for record in records if record.up or record.node.name not in gone]
        names = [record.node.name for record in present]
        return [
            _node_view(
                record,
                used.get(name, {}),
                self.machines.link_facts(name) if self.machines else {},
                reserved.get(name, []),
            )
            for name, record in zip(names, present, strict=True)
        ]

    def cordon(self, name: str, *, by: str, why: str, drain: bool = False) -> NodeView:
        """Take a node out of use; with `drain` its attempts get notice.

        Raises:
            NotFoundError: the node does not exist.
        """
        with self.control.changed:
            self.check_node(name)
            self.control.cordon(name, by=by, why=why, drain=drain)
        self.wake()
        return self._node(name)

    def uncordon(self, name: str, *, by: str, why: str) -> NodeView:
        """Put a node back into use.

        Raises:
            NotFoundError: the node does not exist.
        """
        with self.control.changed:
            self.check_node(name)
            self.control.uncordon(name, by=by, why=why)
        self.wake()
        return self._node(name)

    def check_node(self, name: str) -> None:
        """Raise NotFoundError unless the node is known."""
        known = sorted(self.control.state.nodes.records)
        if name not in known:
            raise NotFoundError(f"there is no node {name!r}", hint=meant(name, known) + "`cordee nodes` lists them")

    def _node(self, name: str) -> NodeView:
        return next(node for node in self.nodes() if node.name == name)

    def queues(self) -> QueuesView:
        """Return the tree of queues: held, borrowed, lent, waiting."""
        now_us = self.clock.now_us()
        with self.control.changed:
            quotas = self.control.state.quotas
            standings = quotas.standings(now_us)
            records = self.control.state.jobs.values()
            jobs = [each for each in records if not each.phase.ended and not each.phase.deferred]
        above = {each.queue.name: each.queue.parent for each in standings}
        running, waiting = dict[str, int](), dict[str, list[int]]()
        for record in jobs:
            name: str | None = record.job.queue if record.job.queue in above else DEFAULT
            while name is not None:
                if record.phase is Phase.QUEUED:
                    waiting.setdefault(name, []).append(record.job.gpus * record.job.gpu_milli)
                else:
                    running[name] = running.get(name, 0) + 1
                name = above[name]
        views = [
            _queue_view(each, running.get(each.queue.name, 0), waiting.get(each.queue.name, [])) for each in standings
        ]
        return QueuesView(at_us=now_us, gpu_milli=quotas.offered.gpu_milli, queues=views)

    def set_queues(self, submission: QueuesSubmission, budgets: Sequence[BudgetSet | BudgetRemoved] = ()) -> QueuesView:
        """Replace the tree of queues, and change these budgets with it, or change nothing."""
        self.control.set_queues([Queue(**rules.model_dump()) for rules in submission.queues], budgets)
        self.wake()
        return self.queues()

    def progress(self, job_id: str) -> tuple[int, bool, bool]:
        """Return a job's newest epoch, whether that attempt has ended, and whether the job has.

        A client that follows the job's logs polls this.
        """
        attempts = self.store.attempts(job_id)
        over = self.closing or self.store.jobs(job_id)[0]["ended_us"] is not None
        newest = attempts[-1] if attempts else None
        return (newest["epoch"], newest["ended_us"] is not None, over) if newest else (0, True, over)


_OF_ROW = tuple(JobView.model_fields.keys() - {"sweep", "steps_total", "left_us"})


def _job_view(row: Mapping[str, Any]) -> JobView:
    return JobView(**{name: row[name] for name in _OF_ROW})


def _attempt_view(row: Mapping[str, Any]) -> AttemptView:
    known = {name: row[name] for name in AttemptView.model_fields}
    failure = None if row["failure"] is None else FailureView(**json.loads(row["failure"]))
    return AttemptView(**known | {"leases": json.loads(row["leases"]), "failure": failure})


def _holders(lease: Lease, job_id: JobId, epoch: int) -> dict[int, str]:
    return dict.fromkeys(lease.gpus, f"{job_id}.{epoch}")


def _node_view(record: NodeRecord, used: dict[int, str], link: Mapping[str, int], reserved: list[str]) -> NodeView:
    return NodeView.of(
        record.node,
        up=record.up,
        down_why="" if record.up else record.why,
        reachable=not record.unreachable,
        refused=link.get("refused", 0),
        clock_off_us=link.get("clock_off_us", 0),
        used=dict(sorted(used.items())),
        cordoned_by=record.cordoned_by,
        cordon_why=record.cordon_why,
        drains=record.drains,
        reserved=reserved,
    )


def _queue_view(standing: Standing, running: int, waiting: list[int]) -> QueueView:
    return QueueView(
        **asdict(standing.queue),
        depth=standing.depth,
        held_gpu_milli=standing.held_milli,
        borrowed_gpu_milli=standing.borrowed_milli,
        lends_gpu_milli=standing.lends_milli,
        fair_share_ppb=standing.share,
        users_gpu_milli=dict(standing.users),
        day_gpu_us=standing.day_gpu_us,
        day_micro_usd=standing.day_micro_usd,
        running_jobs=running,
        waiting_jobs=len(waiting),
        waiting_gpu_milli=sum(waiting),
    )

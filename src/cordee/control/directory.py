"""The directory of services: what is declared, and the replicas of each. A fold of the log like state and ledger."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cordee.events import (
    AttemptEnded,
    AttemptEvent,
    AttemptPlaced,
    Event,
    JobEnded,
    JobSubmitted,
    KeyCreated,
    KeyRevoked,
    KillOrdered,
    ModelOrdered,
    NoticeGiven,
    NoticeReason,
    Outcome,
    ReplicaReady,
    ReplicaUnready,
    ServiceDeclared,
    ServiceEnded,
    ServiceScaled,
    StopRequested,
    TenantSet,
)
from cordee.ids import JobId

LASTING_US = 600_000_000
"""A replica that was ready and lived this long did not fail soon, so another one may follow at once."""

_OF_GATEWAYS = (KeyCreated, KeyRevoked, TenantSet)
"""Events of no service that gateways must learn of at once."""

_COMES_BACK = (NoticeReason.DOWN,)
"""An attempt that leaves for this starts again by itself, before anything else could."""


class Failures(NamedTuple):
    """Failures in a row: their number, the time of the last one, and its reason."""

    number: int = 0
    at_us: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One job of a service, and its newest attempt.

    Attributes:
        epoch: of the newest attempt; 0: none was placed yet.
        node: where rank 0 of the live attempt runs.
        order: the model that the live attempt shall hold; None: its service has one, or none was ordered yet.
        ready: the newest report that the live attempt is ready; None: there was none.
        unready: why it gets no requests although it was ready.
        draining: it got notice, or its job is stopped: it answers its open requests and leaves.
        leaving: another one takes its place.
        stopped: it will not come back.
        was_ready: an attempt of it was ready once.
        since_us: when it came into its present state.
        why: the end of its last attempt.
    """

    job_id: JobId
    service: str
    revision: int
    submitted_us: int
    since_us: int
    epoch: int = 0
    node: str | None = None
    order: ModelOrdered | None = None
    ready: ReplicaReady | None = None
    unready: str | None = None
    draining: bool = False
    leaving: bool = False
    stopped: bool = False
    was_ready: bool = False
    why: str = ""

    @property
    def is_ready(self) -> bool:
        """Return whether it gets requests."""
        return self.ready is not None and self.unready is None and not self.draining

    @property
    def swaps(self) -> bool:
        """Return whether it was ready with another model than it shall hold."""
        return self.ready is not None and self.order is not None and self.order.model != self.ready.model


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A declared service.

    Attributes:
        owner: the user who created it.
        revision: of the newest declaration that changed more than the number of replicas.
        spec: the newest declaration's JobSpec as JSON.
        fewest, most: bounds of `wanted`.
        standby: ready replicas in reserve beyond those wanted.
        wanted: replicas that it shall have.
        why: the reason for the last change of it.
        ended: it wants none any more.
        failures: replicas that ended by themselves soon.
        replicas: those that have not ended, by job, the oldest first.
        load_us: by model, the time that its last load took.
        load_failures: by model, those of its loads.
    """

    name: str
    owner: str
    revision: int
    spec: str
    fewest: int
    most: int
    standby: int
    declared_us: int
    wanted: int
    why: str = ""
    ended: bool = False
    failures: Failures = field(default_factory=Failures)
    replicas: dict[JobId, Replica] = field(default_factory=dict)
    load_us: dict[str, int] = field(default_factory=dict)
    load_failures: dict[str, Failures] = field(default_factory=dict)

    @property
    def staying(self) -> list[Replica]:
        """Return the replicas that are not about to leave, the oldest first."""
        return [each for each in self.replicas.values() if not each.leaving]


class SavedDirectory(NamedTuple):
    """The saved form of a directory."""

    version: int
    services: dict[str, Service]


class Directory:
    """All services that were ever declared.

    Attributes:
        services: by name.
        version: the log's number of the last event that changed any of them, or a tenant or key of the gateways.
        kinds: of events that may change something.
    """

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.version = 0
        self._service_of: dict[JobId, str] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ServiceDeclared: self._declared,
            ServiceScaled: self._scaled,
            ServiceEnded: self._ended,
            JobSubmitted: self._submitted,
            StopRequested: self._stopped,
            AttemptPlaced: self._placed,
            NoticeGiven: self._noticed,
            KillOrdered: self._killed,
            ModelOrdered: self._model_ordered,
            ReplicaReady: self._ready,
            ReplicaUnready: self._unready,
            AttemptEnded: self._attempt_ended,
            JobEnded: self._job_ended,
        }
        self.kinds = frozenset((*self._handlers, *_OF_GATEWAYS))

    def saved(self) -> SavedDirectory:
        """Return the saved form; it shares this object's values."""
        return SavedDirectory(self.version, self.services)

    @classmethod
    def restored(cls, saved: SavedDirectory) -> "Directory":
        """Return the directory that was saved."""
        new = cls()
        new.version, new.services = saved
        new._service_of = {job_id: name for name, each in new.services.items() for job_id in each.replicas}
        return new

    def apply(self, number: int, event: Event) -> None:
        """Fold the log's event of this number; most are of no service."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            before = self.services
            handler(event)
            if self.services is not before:
                self.version = number
        elif isinstance(event, _OF_GATEWAYS):
            self.version = number

    def of(self, job_id: JobId) -> Replica | None:
        """Return a replica by its job, unless it has ended."""
        name = self._service_of.get(job_id)
        return None if name is None else self.services[name].replicas.get(job_id)

    # -- services --------------------------------------------------------------------------------------------

    def _put(self, service: Service) -> None:
        self.services = self.services | {service.name: service}

    def _declared(self, event: ServiceDeclared) -> None:
        before = self.services.get(event.service)
        renewed = before is None or before.ended or event.revision != before.revision
        wanted = event.min_replicas if before is None or before.ended else before.wanted
        made = Service(
            name=event.service,
            owner=event.by if before is None or before.ended else before.owner,
            revision=event.revision,
            spec=event.spec,
            fewest=event.min_replicas,
            most=event.max_replicas,
            standby=event.standby,
            declared_us=event.at_us if before is None or renewed else before.declared_us,
            wanted=max(event.min_replicas, min(event.max_replicas, wanted)),
            replicas={} if before is None else before.replicas,
            load_us={} if before is None else before.load_us,
        )
        if before is not None and not renewed:
            made = replace(made, why=before.why, failures=before.failures, load_failures=before.load_failures)
        self._put(made)

    def _scaled(self, event: ServiceScaled) -> None:
        service = self.services.get(event.service)
        if service is not None and not service.ended:
            self._put(replace(service, wanted=event.replicas, why=event.why))

    def _ended(self, event: ServiceEnded) -> None:
        service = self.services.get(event.service)
        if service is not None and not service.ended:
            self._put(replace(service, ended=True, wanted=0, why=event.why))

    # -- replicas --------------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted) -> None:
        job = event.job
        service = self.services.get(job.service) if job.service is not None else None
        if service is None or job.job_id in self._service_of:
            return
        self._service_of[job.job_id] = service.name
        made = Replica(
            job_id=job.job_id,
            service=service.name,
            revision=job.revision,
            submitted_us=event.at_us,
            since_us=event.at_us,
        )
        self._put(replace(service, replicas=service.replicas | {job.job_id: made}))

    def _change(self, replica: Replica | None, **changes: Any) -> None:
        if replica is not None:
            service = self.services[replica.service]
            changed = {replica.job_id: replace(replica, **changes)}
            self._put(replace(service, replicas=service.replicas | changed))

    def _live(self, event: AttemptEvent) -> Replica | None:
        replica = self.of(event.job_id)
        return replica if replica is not None and replica.epoch == event.epoch else None

    def _stopped(self, event: StopRequested) -> None:
        self._change(self.of(event.job_id), draining=True, leaving=True, stopped=True, since_us=event.at_us)

    def _placed(self, event: AttemptPlaced) -> None:
        self._change(self.of(event.job_id), epoch=event.epoch, node=event.leases[0].node, since_us=event.at_us)

    def _noticed(self, event: NoticeGiven) -> None:
        replica = self._live(event)
        if replica is not None:
            leaving = replica.leaving or event.reason not in _COMES_BACK
            self._change(replica, draining=True, leaving=leaving, since_us=event.at_us, why=event.reason.value)

    def _killed(self, event: KillOrdered) -> None:
        self._change(self._live(event), draining=True, since_us=event.at_us, why=event.why)

    def _model_ordered(self, event: ModelOrdered) -> None:
        self._change(self._live(event), order=event)

    def _ready(self, event: ReplicaReady) -> None:
        replica = self._live(event)
        if replica is not None and replica.node is not None:
            since_us = replica.since_us if replica.is_ready else event.at_us
            self._change(replica, ready=event, unready=None, was_ready=True, since_us=since_us, why="")
            self._loaded(replica, event)

    def _loaded(self, replica: Replica, event: ReplicaReady) -> None:
        service = self.services[replica.service]
        failures = {model: each for model, each in service.load_failures.items() if model != event.model}
        loads = service.load_us if event.load_us is None else service.load_us | {event.model: event.load_us}
        self._put(replace(service, load_us=loads, load_failures=failures))

    def _unready(self, event: ReplicaUnready) -> None:
        replica = self._live(event)
        if replica is not None and replica.node is not None and not replica.draining:
            # A replica that drains by itself was noticed by its cloud or its agent: the log learns of that later.
            self._change(replica, unready=event.why, draining=event.draining, since_us=event.at_us, why=event.why)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        replica = self._live(event)
        if replica is not None:
            if event.outcome is Outcome.FAILED and replica.order and (replica.ready is None or replica.swaps):
                self._load_failed(replica.service, replica.order.model, event)
            self._change(
                replica,
                node=None,
                order=None,
                ready=None,
                unready=None,
                draining=replica.leaving,
                since_us=event.at_us,
                why=event.why,
            )

    def _load_failed(self, name: str, model: str, event: AttemptEnded) -> None:
        service = self.services[name]
        before = service.load_failures.get(model, Failures())
        failed = {model: Failures(before.number + 1, event.at_us, event.why)}
        self._put(replace(service, load_failures=service.load_failures | failed))

    def _job_ended(self, event: JobEnded) -> None:
        replica = self.of(event.job_id)
        self._service_of.pop(event.job_id, None)
        if replica is None:
            return
        service = self.services[replica.service]
        left = {job_id: each for job_id, each in service.replicas.items() if job_id != event.job_id}
        service = replace(service, replicas=left)
        if not replica.leaving and replica.revision == service.revision:
            lasted = replica.was_ready and event.at_us - replica.submitted_us >= LASTING_US
            number = 1 if lasted else service.failures.number + 1
            service = replace(service, failures=Failures(number, event.at_us, event.why))
        self._put(service)

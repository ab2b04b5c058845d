"""The controller of services: it makes and ends replicas, as a user would submit and stop jobs.

It keeps no truth of its own. What is declared and which replicas there are, the log says (directory.py); what follows,
rollout.py and scaling.py say. So a killed server or a standby goes on where the last one was.
"""

import secrets
from dataclasses import dataclass, field, replace

import structlog

from cordee.control.admission import spec_for
from cordee.control.directory import Service
from cordee.control.eligible import micro_usd_per_hour
from cordee.control.operations import Operations
from cordee.control.services.gateways import Gateways
from cordee.control.services.inputs import replica_spec, secrets_of
from cordee.control.services.planned import estimate_of, planned_replica
from cordee.control.services.residency import orders
from cordee.control.services.rollout import changes
from cordee.control.services.scaling import ReplicaTerms, Scaler
from cordee.errors import CatalogueError, CordeeError, StoreError
from cordee.ids import job_id as new_job_id
from cordee.units import US_PER_S
from cordee.workload.spec import JobSpec

EVERY_US = 2 * US_PER_S
_REFUSED_US = 10 * US_PER_S
BY = "its service"


@dataclass(slots=True)
class Controller:
    """The control loop of services, one step at a time.

    Attributes:
        operations: those on jobs: admission, secrets, the log.
        gateways: the gateways' reports.
        problems: by service, the refusal of its next replica.
        limits: by service, the price that keeps it from more replicas.
    """

    operations: Operations
    gateways: Gateways
    problems: dict[str, CordeeError] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)
    _scaler: Scaler = field(default_factory=Scaler)
    _refused_us: dict[str, int] = field(default_factory=dict)

    def step(self) -> int | None:
        """Start and stop replicas; return the time of the next step, None: only a change is a reason for one.

        Raises:
            StoreError: the log cannot be written; what was decided before is in it.
        """
        operations = self.operations
        now_us, control = operations.clock.now_us(), operations.control
        again: list[int] = []
        with control.changed:
            if control.state.shutting_down:
                return None
            for name, service in sorted(control.fold.directory.services.items()):
                if service.ended and not service.replicas:
                    self._forget(name)
                    continue
                again.append(self._step(service, now_us))
        return min(again, default=None)

    def _forget(self, name: str) -> None:
        self._scaler.forget(name)
        self.problems.pop(name, None)
        self.limits.pop(name, None)
        self._refused_us.pop(name, None)

    def price_of(self, spec: JobSpec) -> int:
        """Return the micro-dollars an hour of a replica on the most expensive GPUs that it may get; 0: unknown."""
        operations = self.operations
        with operations.control.changed:
            nodes = [record.node for record in operations.control.state.nodes.records.values()]
        try:
            return micro_usd_per_hour(spec, nodes, operations.catalogue)
        except CatalogueError:  # Of a GPU that the catalogue does not have any more.
            return 0

    def _step(self, service: Service, now_us: int) -> int:
        """Take one service a step further; return the time of the next step."""
        control, spec = self.operations.control, JobSpec.model_validate_json(service.spec)
        if not service.ended and spec.service is not None:
            statuses = self.gateways.of(service, now_us)
            plan = estimate_of(service, control.state.jobs)
            price = self.price_of(spec) if spec.service.max_micro_usd_per_hour is not None else 0
            replica = ReplicaTerms(price, None if plan is None else plan.within_slo)
            decision = self._scaler.decide(service, spec.service, statuses, replica, now_us)
            self.limits[service.name] = decision.limit
            if decision.replicas != service.wanted:
                control.scale(service.name, decision.replicas, decision.why)
                service = control.fold.directory.services[service.name]
            ordered = orders(service, spec.service.all_models, statuses, now_us) if spec.service.models else []
            for each in ordered:
                control.order_model(each.job_id, each.epoch, each.model, each.why)
            if ordered:
                self.operations.wake()
        nodes = {each.node for each in service.replicas.values() if each.node is not None}
        held = {name: control.state.nodes.held_milli(name) for name in nodes}
        found = changes(service, now_us, held, spec.gpus * spec.gpu_milli)
        for job_id in found.stop:
            control.stop(job_id, by=service.owner if service.ended else BY)
        starts = found.start > 0 and now_us >= self._refused_us.get(service.name, 0)
        if (starts and self._start(service, spec, found.start, now_us)) or found.stop:
            self.operations.wake()
        return min(now_us + EVERY_US, found.again_us or now_us + EVERY_US)

    def _start(self, service: Service, spec: JobSpec, number: int, now_us: int) -> bool:
        """Submit replicas; return whether all were admitted."""
        try:
            made = replica_spec(self.operations, spec, service.revision)
            nodes = [record.node for record in self.operations.control.state.nodes.records.values()]
            estimate = planned_replica(spec.model_copy(update={"place": made.place}), nodes)
            for _ in range(number):
                job_id = new_job_id(service.name, secrets.token_bytes(6))
                job = self.operations.admitted(made, job_id, service.owner).job
                self.operations.secrets.pass_on(secrets_of(service.name), job_id)
                made_of = replace(job, service=service.name, revision=service.revision)
                if estimate is not None:
                    made_of = replace(made_of, estimates=(estimate,))
                self.operations.control.submit(made_of, spec_for(made_of, made))
        except StoreError:
            raise
        except CordeeError as error:
            # It may fit later: a node that is down comes back, a queue gets a larger limit.
            if str(self.problems.get(service.name)) != str(error):
                structlog.get_logger().warning("a replica was refused", service=service.name, error=str(error))
            self.problems[service.name] = error
            self._refused_us[service.name] = now_us + _REFUSED_US
            return False
        self.problems.pop(service.name, None)
        return True

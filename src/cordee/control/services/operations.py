"""The API of services without HTTP: one method for each request that a client or a gateway can make."""

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from cordee.answers.services import (
    GatewayAcknowledged,
    GatewayReport,
    RoutesView,
    ScaleOrder,
    ServiceSubmission,
    ServiceView,
)
from cordee.control.admission import check_program
from cordee.control.directory import Service
from cordee.control.operations import Operations
from cordee.control.services.controller import Controller
from cordee.control.services.gateways import Gateways
from cordee.control.services.inputs import check_models, pinned, replica_spec, secrets_of
from cordee.control.services.planned import check_part, estimate_of
from cordee.control.services.replica_spec import same_replicas
from cordee.control.services.usage import usage_events
from cordee.control.services.views import route_views, service_view
from cordee.control.specs import read_spec
from cordee.control.store.tenants import TenantRows
from cordee.control.tenants import Tenants
from cordee.errors import ForbiddenError, InputError, NotFoundError, SpecError, UnitError
from cordee.events import Estimate
from cordee.ids import job_id as new_job_id
from cordee.near import meant
from cordee.workload.service import ServiceSpec, parse_replicas
from cordee.workload.spec import JobSpec

_NO_BYTES = bytes(6)


@dataclass(slots=True)
class ServiceOperations:
    """The requests about services.

    Attributes:
        operations: those on jobs, which share log, secrets and files.
        gateways: the gateways' reports.
        controller: makes and ends replicas.
        tenants: the tenants of the gateways, and their keys.
    """

    operations: Operations
    gateways: Gateways
    controller: Controller
    tenants: Tenants

    @classmethod
    def over(cls, operations: Operations) -> "ServiceOperations":
        """Create the parts of services over the operations on jobs."""
        gateways, rows = Gateways(), TenantRows(operations.store)
        tenants = Tenants(operations.control, rows, operations.clock, operations.wake)
        return cls(operations, gateways, Controller(operations, gateways), tenants)

    def declare(self, submission: ServiceSubmission, owner: str) -> ServiceView:
        """Create a service, or update it; the same spec again changes nothing."""
        operations, spec = self.operations, read_spec(submission.spec)
        section = spec.service
        if section is None:
            raise SpecError(f"{spec.name} is a job: it has no section `service`", hint="send it to /v1/jobs")
        operations.check_secrets(spec, submission.secrets)
        self._check_files(spec, owner)
        if spec.run and spec.files is None:
            check_program(spec)
        check_models(spec)
        spec = pinned(operations, spec)
        made = replica_spec(operations, spec, 1)
        with operations.control.changed:
            nodes = [record.node for record in operations.control.state.nodes.records.values()]
        check_part(spec, nodes)
        with operations.control.changed:
            admitted = operations.admitted(made, new_job_id(spec.name, _NO_BYTES), owner)
            before = operations.control.fold.directory.services.get(spec.name)
            if before is not None and before.ended and before.replicas:
                raise SpecError(
                    f"{spec.name} has just ended, and {len(before.replicas)} of its replicas are leaving",
                    hint="try again when they have left: cordee serve list",
                )
            if before is None or before.ended or before.spec != spec.model_dump_json() or submission.secrets:
                self._write(spec, section, before, owner, submission.secrets)
        operations.wake()
        return self.service(spec.name, notes=admitted.notes)

    def _check_files(self, spec: JobSpec, owner: str) -> None:
        """Check the files of a service: those that it has its owner may keep."""
        with self.operations.control.changed:
            before = self.operations.control.fold.directory.services.get(spec.name)
        own = before is not None and not before.ended and before.owner == owner
        kept = own and before is not None and declared_spec(before).files == spec.files
        self.operations.files.check(spec, None if kept else owner)

    def _write(
        self, spec: JobSpec, section: ServiceSpec, before: Service | None, by: str, secrets: Mapping[str, str]
    ) -> None:
        operations, revision = self.operations, 1
        if before is not None:
            keeps = not before.ended and not secrets and same_replicas(spec, declared_spec(before))
            revision = before.revision if keeps else before.revision + 1
        if spec.secrets:
            operations.secrets.keep(secrets_of(spec.name), secrets)
        operations.control.declare(
            spec.name,
            revision,
            by=by,
            spec=spec.model_dump_json(),
            replicas=(section.replicas.min, section.replicas.max),
            standby=section.standby,
        )

    def services(self) -> list[ServiceView]:
        """Return all services, those that have ended last."""
        with self.operations.control.changed:
            found = list(self.operations.control.fold.directory.services.values())
        return [self._view(each) for each in sorted(found, key=lambda each: (each.ended, each.name))]

    def service(self, name: str, *, notes: tuple[str, ...] = ()) -> ServiceView:
        """Return one service.

        Raises:
            NotFoundError: there is none of this name.
        """
        return self._view(self._service(name), notes)

    def declared(self, name: str) -> Service | None:
        """Return a service as it was declared; None: there is none of this name."""
        with self.operations.control.changed:
            return self.operations.control.fold.directory.services.get(name)

    def _service(self, name: str) -> Service:
        with self.operations.control.changed:
            services = self.operations.control.fold.directory.services
            found = services.get(name)
        if found is None:
            hint = meant(name, services) + "`cordee serve list` shows them"
            raise NotFoundError(f"there is no service {name!r}", hint=hint)
        return found

    def _view(self, service: Service, notes: tuple[str, ...] = ()) -> ServiceView:
        now_us, problem = self.operations.clock.now_us(), self.controller.problems.get(service.name)
        return service_view(
            service,
            statuses=self.gateways.of(service, now_us),
            urls=self.gateways.urls(now_us),
            estimate=self._estimate(service),
            problem="" if problem is None else problem.message,
            limit=self.controller.limits.get(service.name, ""),
            micro_usd_per_hour=self.controller.price_of(declared_spec(service)),
            notes=notes,
        )

    def _estimate(self, service: Service) -> Estimate | None:
        with self.operations.control.changed:
            return estimate_of(service, self.operations.control.state.jobs)

    def scale(self, name: str, order: ScaleOrder, owner: str) -> ServiceView:
        """Set the number of replicas, or their bounds, of a service."""
        try:
            replicas = parse_replicas(order.replicas)
        except UnitError as error:
            raise InputError(error.message, hint=error.hint) from None
        with self.operations.control.changed:
            service = self._live(name)
            spec = declared_spec(service)
            assert spec.service is not None, "the directory holds services only"
            section = spec.service.model_copy(update={"replicas": replicas})
            self._write(spec.model_copy(update={"service": section}), section, service, service.owner, {})
            wanted = self._live(name).wanted
            if wanted != service.wanted:
                self.operations.control.scale(name, wanted, f"{owner} set it to {replicas}")
        self.operations.wake()
        return self.service(name)

    def end(self, name: str, owner: str) -> ServiceView:
        """End a service: its replicas answer their open requests and leave. One that has ended stays as it is."""
        with self.operations.control.changed:
            if not self._service(name).ended:
                self.operations.control.end_service(name, by=owner, why=f"stopped by {owner}")
                self.operations.secrets.keep(secrets_of(name), {})
        self.operations.wake()
        return self.service(name)

    def _live(self, name: str) -> Service:
        service = self._service(name)
        if service.ended:
            raise NotFoundError(f"the service {name} has ended", hint="start it again: cordee serve run")
        return service

    # -- gateways --------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Return the number that grows with each change of what a gateway must know."""
        return self.operations.control.fold.directory.version

    def routes(self) -> RoutesView:
        """Return all that a gateway needs to know."""
        with self.operations.control.changed:
            directory = self.operations.control.fold.directory
            version, found = directory.version, list(directory.services.values())
        return RoutesView(
            version=version,
            services=[route for each in found if not each.ended or each.replicas for route in route_views(each)],
            tenants=self.tenants.tenants(),
            keys=self.tenants.key_hashes(),
            prices=self.tenants.prices(),
        )

    def check_report(self, report: GatewayReport, by: str) -> None:
        """Check that a user who does not operate the cluster may report this.

        Usage makes a bill, and load makes replicas start and stop.

        Raises:
            ForbiddenError: it is usage, or the load of another owner's service.
        """
        operator = self.operations.members.operator
        if report.usage:
            raise ForbiddenError(
                f"{by} may not report usage: operators do, since a bill is made of it",
                hint=f"run the gateway with the token of {operator}",
            )
        with self.operations.control.changed:
            services = self.operations.control.fold.directory.services
            owners = {each.service: services[each.service].owner for each in report.status if each.service in services}
        for service, owner in owners.items():
            if owner != by:
                raise ForbiddenError(
                    f"{by} may not report the load of {service}, a service of {owner}",
                    hint=f"run the gateway with the token of {operator}",
                )

    def take_report(self, name: str, report: GatewayReport) -> GatewayAcknowledged:
        """Keep a gateway's status, and commit its usage exactly once.

        A line of a service that this cluster never had, as from a gateway of another one, is left out: refused, the
        gateway would send it again for ever, and all that comes after it.

        Raises:
            StoreError: nothing was committed: the gateway sends it again.
        """
        control, now_us = self.operations.control, self.operations.clock.now_us()
        services = control.fold.directory.services
        usage = [line for line in report.usage if line.service in services]
        if foreign := {line.service for line in report.usage} - services.keys():
            structlog.get_logger().warning("usage of no service is left out", gateway=name, services=sorted(foreign))
        self.gateways.put(name, report, now_us)
        live = {each.name: each for each in services.values() if not each.ended}
        if any(status.queued and _is_away(live.get(status.service), status.model) for status in report.status):
            self.operations.wake()
        seq = control.take_in(f"gateway/{name}", report.seq, usage_events(name, usage))
        return GatewayAcknowledged(seq=seq)


def _is_away(service: Service | None, model: str) -> bool:
    """Return whether a request for this model, "" for the only one, waits for what the controller decides."""
    if service is None or not service.wanted:
        return service is not None
    return bool(model) and all(each.order is None or each.order.model != model for each in service.replicas.values())


def declared_spec(service: Service) -> JobSpec:
    """Return the spec of a declared service."""
    return JobSpec.model_validate_json(service.spec)

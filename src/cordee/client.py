"""The Python client of the HTTP API; `answers` defines its answers.

`Client()` finds the server, on this machine or another, and raises its errors as the same classes of `cordee.errors`.
"""

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from cordee import tracing
from cordee.answers.cost import CostView
from cordee.answers.files import FileDigests, FilesReceived
from cordee.answers.jobs import JobDetailView, JobView, WhyView
from cordee.answers.metrics import JobCostView, LiveView, MetricsView
from cordee.answers.nodes import Joined, JoinTokenView, Leaving, MaintenanceView, NodeView, ReservationView
from cordee.answers.queues import BudgetRules, QueueRules, QueuesSubmission, QueuesView
from cordee.answers.services import (
    CostLinesView,
    GatewayAcknowledged,
    GatewayReport,
    KeyView,
    NewKeyView,
    RoutesView,
    ScaleOrder,
    ServiceSubmission,
    ServiceView,
    TenantView,
    UsageView,
)
from cordee.answers.submissions import (
    DryRunView,
    RehearsalStarted,
    RehearsalSubmission,
    RehearsalView,
    Submission,
    Submitted,
)
from cordee.answers.sweeps import SweepDetailView, SweepSubmission, SweepView
from cordee.answers.view import HealthView
from cordee.api_connection import ApiConnection
from cordee.client_money import Money
from cordee.errors import InputError, SpecError
from cordee.event_json import decode
from cordee.events import Event, Queue
from cordee.ids import JobId
from cordee.ids import job_id as new_job_id
from cordee.servers import (
    ServerAddress,
    default_home,
    find_server,
    fingerprint_of_environment,
    home_token,
    is_private,
    read_join_token,
    secrets_kept,
)
from cordee.workload.rehearsal import rehearsal_name

T = TypeVar("T")


class Client:
    """A connection to one server, or to that of several which leads.

    Its methods raise only subclasses of `CordeeError`. They may be called by one thread at a time.
    """

    def __init__(
        self,
        home: Path | None = None,
        *,
        url: str | None = None,
        others: Sequence[str] = (),
        token: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Connect to the server of a home, or to the one at `url`; by default, to that of `servers.find_server`.

        The token identifies the user: `token`, else CORDEE_TOKEN, else the home's own token.

        Args:
            home: folder of a server on this machine, or one that `cordee connect` has connected to a remote one.
            url: of the server's API.
            others: URLs of servers that stand by for it, or lead in its place.
            token: of the user.
            fingerprint: SHA-256 of the certificate of the server at `url`; by default CORDEE_FINGERPRINT, and without
                one the system's authorities decide.

        Raises:
            NoServerError: no server runs for the home.
            TokenError: the home's token cannot be read.
        """
        if url is None:
            address = find_server(home)
        else:
            token = token or os.environ.get("CORDEE_TOKEN") or home_token((home or default_home()).absolute())
            pinned = fingerprint or fingerprint_of_environment()
            address = ServerAddress(url, token, pinned, home and home.absolute(), others=tuple(others))
        self._line = ApiConnection(address, token or address.token)

    @property
    def address(self) -> ServerAddress:
        """Return where the server is, and how it is known."""
        return self._line.address

    @property
    def url(self) -> str:
        """Return the URL of the server's API."""
        return self.address.url

    @property
    def token(self) -> str:
        """Return the token by which the server knows the user."""
        return self._line.token

    @property
    def home(self) -> Path | None:
        """Return the server's folder; None if it is on another machine."""
        return self.address.home

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def health(self) -> HealthView:
        """Describe the server itself, whether it leads or stands by."""
        return self._line.ask_here(HealthView, "GET", "/v1/health")

    def submit(
        self,
        spec: Mapping[str, Any],
        *,
        unprotected: bool = False,
        job_id: JobId | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Submitted:
        """Queue a job.

        The secrets that the spec names are read from `environ`. If the server's home is on this machine they are
        copied into it and not sent. A server on another machine, over TLS, or one that shares its database with others
        keeps them encrypted until the job ends.

        Args:
            spec: a JobSpec as JSON-ready data.
            unprotected: accept that a preemptible job without checkpoints loses everything when it is preempted.
            job_id: an id made earlier, to send the same job again if it is not known whether it arrived.
            environ: the environment from which secrets are read.

        Raises:
            AdmissionError: the job was refused, and nothing was queued.
            SpecError: a secret is not in the environment.
            InputError: a secret would be sent unencrypted.
        """
        job_id = job_id or new_job_id(str(spec.get("name") or "job"), secrets.token_bytes(6))
        with tracing.span("cordee submit", job=job_id) as traceparent:
            traced = {} if traceparent is None else {"env": {**spec.get("env", {}), tracing.VARIABLE: traceparent}}
            sent = Submission(job_id=job_id, spec={**spec, **traced}, unprotected=unprotected)
            return self._submit(Submitted, "/v1/jobs", sent, environ)

    def _submit(self, shape: type[T], path: str, sent: Submission | ServiceSubmission, environ: Mapping[str, str]) -> T:
        """Send a spec with its secrets: over TLS, or through the home on this machine."""
        names = sent.spec.get("secrets") or ()
        self.check_secrets(names, environ)
        folder = self.address.secrets
        if folder is None:
            exposed = [each for each in (self.url, *self.address.others) if not is_private(each)]
            if names and exposed:
                raise InputError(
                    f"the secret {names[0]} would cross the network unencrypted, to {exposed[0]}",
                    hint="use the server's https URL, which `cordee up --listen` prints",
                )
            body = sent.model_dump(mode="json") | {"secrets": {name: environ[name] for name in names}}
            return self._ask(shape, "POST", path, json=body)
        with secrets_kept(folder, names, environ):
            return self._ask(shape, "POST", path, json=sent.model_dump(mode="json", exclude={"secrets"}))

    def dry_run(self, spec: Mapping[str, Any], *, unprotected: bool = False, draws: int = 0) -> DryRunView:
        """Return the consequences of submitting a job now; with draws, also forecast its start and end. Queue nothing.

        Raises:
            AdmissionError: the job would be refused.
        """
        job_id = new_job_id(str(spec.get("name") or "job"), secrets.token_bytes(6))
        sent = Submission(job_id=job_id, spec=dict(spec), unprotected=unprotected)
        body = sent.model_dump(mode="json")
        return self._ask(DryRunView, "POST", "/v1/dry-run", json=body, params={"draws": draws})

    def rehearse(
        self, spec: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ, **how: Any
    ) -> RehearsalStarted:
        """Queue the rehearsal of a job: some steps of it, a notice, and the same steps after the resume.

        `how` are the fields of `RehearsalSubmission`: `gpus`, `steps`, `replayed`, `limit_s`.

        Raises:
            AdmissionError: the job was refused, and nothing was queued.
            SpecError: a secret is not in the environment.
        """
        job_id = new_job_id(rehearsal_name(str(spec.get("name") or "job")), secrets.token_bytes(6))
        sent = RehearsalSubmission(job_id=job_id, spec=dict(spec), **how)
        return self._submit(RehearsalStarted, "/v1/rehearsals", sent, environ)

    def rehearsals(self) -> list[RehearsalView]:
        """Return the newest result of each code and number of GPUs, the newest first."""
        return self._list(RehearsalView, "/v1/rehearsals")

    def missing_files(self, digests: Iterable[str]) -> list[str]:
        """Return the digests of submitted files whose content the server lacks, or this user has not sent."""
        body = FileDigests(digests=list(digests)).model_dump()
        return self._ask(FileDigests, "POST", "/v1/files/missing", json=body).digests

    def send_files(self, packed: bytes) -> int:
        """Send a pack of submitted files, and return their number; this user's jobs and trees may name them.

        Raises:
            StoreError: the server's disk is full.
        """
        kind = {"Content-Type": "application/octet-stream"}
        return self._ask(FilesReceived, "PUT", "/v1/files", content=packed, headers=kind).received

    def job_files(self, job_id: str, digests: Iterable[str]) -> bytes:
        """Return a pack of contents of a job's files: of its tree, named by `spec["files"]`, and of what that names.

        Raises:
            ForbiddenError: the job is somebody else's, and the token not the operator's.
            NotFoundError: the server lacks them.
        """
        body = FileDigests(digests=list(digests)).model_dump()
        return self.exchange("POST", f"/v1/jobs/{quote(job_id)}/files", json=body)

    @staticmethod
    def check_secrets(names: Iterable[str], environ: Mapping[str, str]) -> None:
        """Raise SpecError if a secret is not in the environment."""
        for name in names:
            if name not in environ:
                raise SpecError(
                    f"the secret {name} is not in the environment",
                    hint=f"export {name} before you submit, or take it out of `secrets`",
                )

    def jobs(self) -> list[JobView]:
        """Return every job, newest first."""
        return self._list(JobView, "/v1/jobs")

    def job(self, job_id: str) -> JobDetailView:
        """Return one job, by its id or by a name that only one job has."""
        return self._ask(JobDetailView, "GET", f"/v1/jobs/{job_id}")

    def stop(self, job_id: str, *, now: bool = False) -> JobView:
        """Ask a job to end after a checkpoint, or `now`."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/stop", params={"now": now})

    def pause(self, job_id: str) -> JobView:
        """Pause a job: it saves, gives its GPUs back, and waits until `resume`."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/pause")

    def hold(self, job_id: str) -> JobView:
        """Keep a job from starting until `resume`; one that runs goes on."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/hold")

    def resume(self, job_id: str) -> JobView:
        """Let a held or paused job start again."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/resume")

    def requeue(self, job_id: str) -> JobView:
        """Send a job to the end of its queue, after it has saved; one that has ended runs again."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/requeue")

    def prioritize(self, job_id: str) -> JobView:
        """Send a waiting job to the top of its queue; for its owner, of the owner's own jobs."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/prioritize")

    def why(self, job_id: str, *, draws: int = 0) -> WhyView:
        """Explain the state of a job; with draws, also forecast when it starts and ends."""
        return self._ask(WhyView, "GET", f"/v1/jobs/{job_id}/why", params={"draws": draws})

    def logs(
        self,
        job_id: str,
        *,
        epoch: int | None = None,
        rank: int | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield the output of one attempt, by default the newest; with `follow`, from it to the job's end."""
        asked = {"epoch": epoch, "rank": rank, "tail": tail, "follow": follow}
        params = {name: value for name, value in asked.items() if value is not None}
        with self._line.stream(f"/v1/jobs/{job_id}/logs", params) as lines:
            yield from lines

    def metrics(self, job_id: str) -> MetricsView:
        """Return the curves of a job, by its id or name: what it logs, and what is measured of it."""
        return self._ask(MetricsView, "GET", f"/v1/jobs/{job_id}/metrics")

    def job_cost(self, job_id: str) -> JobCostView:
        """Return what a job has cost, by epoch of its data and of a million tokens."""
        return self._ask(JobCostView, "GET", f"/v1/jobs/{job_id}/cost")

    def live(self) -> LiveView:
        """Return what the jobs and GPUs do now."""
        return self._ask(LiveView, "GET", "/v1/live")

    def declare(self, spec: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> ServiceView:
        """Create a service, or update it; `spec` is a JobSpec with a `service` as JSON-ready data.

        Raises:
            AdmissionError: no replica of it would be admitted, and nothing has changed.
            SpecError: a secret is not in the environment.
        """
        return self._submit(ServiceView, "/v1/services", ServiceSubmission(spec=dict(spec)), environ)

    def services(self) -> list[ServiceView]:
        """Return all services, those that have ended last."""
        return self._list(ServiceView, "/v1/services")

    def service(self, name: str) -> ServiceView:
        """Return one service with its replicas."""
        return self._ask(ServiceView, "GET", f"/v1/services/{quote(name, safe='')}")

    def scale(self, name: str, replicas: str) -> ServiceView:
        """Set the number of replicas of a service, `2`, or its bounds, `1..4`."""
        body = ScaleOrder(replicas=replicas).model_dump()
        return self._ask(ServiceView, "POST", f"/v1/services/{quote(name, safe='')}/scale", json=body)

    def end_service(self, name: str) -> ServiceView:
        """End a service: its replicas answer their open requests and leave."""
        return self._ask(ServiceView, "DELETE", f"/v1/services/{quote(name, safe='')}")

    def declare_sweep(
        self, spec: Mapping[str, Any], *, unprotected: bool = False, environ: Mapping[str, str] = os.environ
    ) -> SweepView:
        """Create a sweep; `spec` is a JobSpec with a section `sweep` as JSON-ready data.

        Raises:
            AdmissionError: its first trial would not be admitted, and nothing has changed.
            SpecError: a secret is not in the environment.
        """
        sweep_id = new_job_id(str(spec.get("name") or "job"), secrets.token_bytes(6))
        sent = SweepSubmission(job_id=sweep_id, spec=dict(spec), unprotected=unprotected)
        return self._submit(SweepView, "/v1/sweeps", sent, environ)

    def sweeps(self) -> list[SweepView]:
        """Return all sweeps, the newest first."""
        return self._list(SweepView, "/v1/sweeps")

    def sweep(self, ref: str) -> SweepDetailView:
        """Return one sweep with its trials, by its id, or the newest one of a name."""
        return self._ask(SweepDetailView, "GET", f"/v1/sweeps/{quote(ref, safe='')}")

    def end_sweep(self, ref: str) -> SweepView:
        """End a sweep: its trials save and leave."""
        return self._ask(SweepView, "DELETE", f"/v1/sweeps/{quote(ref, safe='')}")

    def pause_sweep(self, ref: str) -> SweepView:
        """Pause a sweep: its trials save and leave, and none starts until `resume_sweep`."""
        return self._ask(SweepView, "POST", f"/v1/sweeps/{quote(ref, safe='')}/pause")

    def resume_sweep(self, ref: str) -> SweepView:
        """Resume a paused sweep."""
        return self._ask(SweepView, "POST", f"/v1/sweeps/{quote(ref, safe='')}/resume")

    def routes(self, *, after: int = 0, wait_s: float = 0.0) -> RoutesView:
        """Return what a gateway needs to know, when its version is above `after`, or after the wait."""
        return self._ask(RoutesView, "GET", "/v1/gateway/routes", params={"after": after, "wait_s": wait_s})

    def report(self, gateway: str, report: GatewayReport) -> GatewayAcknowledged:
        """Send a gateway's status and usage; usage of a seq that is acknowledged counts once."""
        path = f"/v1/gateways/{quote(gateway, safe='')}/reports"
        return self._ask(GatewayAcknowledged, "POST", path, json=report.model_dump(mode="json"))

    def nodes(self) -> list[NodeView]:
        """Return every node that was ever up."""
        return self._list(NodeView, "/v1/nodes")

    def cordon(self, node: str, *, why: str = "") -> NodeView:
        """Place nothing new on a node; attempts that run there go on."""
        return self._order_node(node, "cordon", why)

    def drain(self, node: str, *, why: str = "") -> NodeView:
        """Cordon a node and give its attempts notice: they save, leave, and start again elsewhere."""
        return self._order_node(node, "drain", why)

    def uncordon(self, node: str, *, why: str = "") -> NodeView:
        """Put a node back into use."""
        return self._order_node(node, "uncordon", why)

    def book_maintenance(self, node: str, *, from_us: int, until_us: int, why: str) -> MaintenanceView:
        """Book a node for maintenance; times are in microseconds since the Unix epoch."""
        body = {"from_us": from_us, "until_us": until_us, "why": why}
        return self._ask(MaintenanceView, "POST", f"/v1/nodes/{quote(node, safe='')}/maintenance", json=body)

    def maintenance(self) -> list[MaintenanceView]:
        """Return every maintenance that is not over."""
        return self._list(MaintenanceView, "/v1/maintenance")

    def cancel_maintenance(self, booking: str) -> MaintenanceView:
        """Cancel a maintenance; one that has begun ends."""
        return self._ask(MaintenanceView, "DELETE", f"/v1/maintenance/{quote(booking, safe='')}")

    def reserve(self, **order: Any) -> ReservationView:
        """Reserve nodes for the jobs of a queue or a user; the fields are those of `ReservationOrder`."""
        return self._ask(ReservationView, "POST", "/v1/reservations", json=order)

    def reservations(self) -> list[ReservationView]:
        """Return every reservation that is not over."""
        return self._list(ReservationView, "/v1/reservations")

    def cancel_reservation(self, reservation: str) -> ReservationView:
        """Cancel a reservation; one that has begun ends."""
        return self._ask(ReservationView, "DELETE", f"/v1/reservations/{quote(reservation, safe='')}")

    def _order_node(self, node: str, order: str, why: str) -> NodeView:
        return self._ask(NodeView, "POST", f"/v1/nodes/{quote(node, safe='')}/{order}", json={"why": why})

    def join_token(self, *, uses: int = 1, for_s: int = 3600) -> JoinTokenView:
        """Return a token with which machines join as nodes.

        Raises:
            ForbiddenError: only the user who runs the server may ask for one.
        """
        return self._ask(JoinTokenView, "POST", "/v1/join-tokens", json={"uses": uses, "for_s": for_s})

    @classmethod
    def join(cls, url: str, join_token: str, *, name: str, machine: str) -> Joined:
        """Join the server at `url` as a node.

        Raises:
            InputError: the join token is incomplete.
            TokenError: it is unknown, expired or used up.
            NameTakenError: another machine is the node of this name.
        """
        secret, fingerprint = read_join_token(join_token)
        with cls(url=url, token=secret, fingerprint=fingerprint) as client:
            return client._ask(Joined, "POST", "/v1/agents/join", json={"name": name, "machine": machine})

    def leave(self, node: str, *, as_node: bool = False) -> Leaving:
        """Drain a node that joined, and let it go when no attempt is left; ask again until then.

        Args:
            node: the node's name.
            as_node: this client's token is the node's own.
        """
        asks = "agents" if as_node else "nodes"
        return self._ask(Leaving, "POST", f"/v1/{asks}/{quote(node, safe='')}/leave")

    def queues(self) -> QueuesView:
        """Return the tree of queues: held, borrowed, lent, waiting."""
        return self._ask(QueuesView, "GET", "/v1/queues")

    def set_queues(self, queues: Iterable[Queue], budgets: Sequence[BudgetRules] | None = None) -> QueuesView:
        """Replace the tree of queues; with budgets, also all of these.

        Raises:
            QueuesError: they break a rule; nothing has changed.
        """
        rules = [QueueRules(**asdict(queue)) for queue in queues]
        sent = QueuesSubmission(queues=rules, budgets=None if budgets is None else list(budgets))
        return self._ask(QueuesView, "PUT", "/v1/queues", json=sent.model_dump(mode="json"))

    @property
    def money(self) -> Money:
        """Return the requests about budgets and chargeback."""
        return Money(self._ask, lambda *way, **how: self.exchange(*way, **how).decode())

    def cost(self, by: str = "job") -> CostView:
        """Return GPU time and cost by `job`, `user`, `queue` or `epoch`."""
        return self._ask(CostView, "GET", "/v1/cost", params={"by": by})

    def usage(self, by: str = "service") -> UsageView:
        """Return tokens and cost of services by `service`, `tenant`, `key` or `model`, beside all other jobs."""
        return self._ask(UsageView, "GET", "/v1/usage", params={"by": by})

    def usage_lines(self, from_us: int = 0, to_us: int | None = None) -> CostLinesView:
        """Return tokens and cost by day, service, tenant, key and model: lines that begin within a stretch of time."""
        params = {"from_us": from_us} | ({} if to_us is None else {"to_us": to_us})
        return self._ask(CostLinesView, "GET", "/v1/usage/lines", params=params)

    def create_key(self, tenant: str, *, name: str = "", models: Sequence[str] = ()) -> NewKeyView:
        """Make a key of a tenant, for the models that it names or for all; only this answer has its secret.

        Raises:
            ForbiddenError: only the user who runs the server may.
        """
        sent = {"tenant": tenant, "name": name, "models": list(models)}
        return self._ask(NewKeyView, "POST", "/v1/keys", json=sent)

    def keys(self) -> list[KeyView]:
        """Return all keys without their secrets, oldest first, revoked ones as well."""
        return self._list(KeyView, "/v1/keys")

    def revoke_key(self, key: str) -> KeyView:
        """Make a key void, by its id or by a name that only one key has."""
        return self._ask(KeyView, "DELETE", f"/v1/keys/{quote(key, safe='')}")

    def tenants(self) -> list[TenantView]:
        """Return all tenants by name, with what each has spent."""
        return self._list(TenantView, "/v1/tenants")

    def set_tenant(self, name: str, **rules: Any) -> TenantView:
        """Add a tenant, or replace its rules: the fields of `TenantRules`."""
        return self._ask(TenantView, "PUT", f"/v1/tenants/{quote(name, safe='')}", json=rules)

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[tuple[int, Event]]:
        """Yield the log after a number; with `follow`, as it grows."""
        with self._line.stream("/v1/events", {"after": after, "follow": follow}) as lines:
            number = 0
            for line in lines:
                field, _, value = line.partition(": ")
                if field == "id":
                    number = int(value)
                elif field == "data":
                    yield number, decode(json.loads(value))

    def down(self) -> HealthView:
        """Ask the server to checkpoint and requeue every job, and then to end; return at once."""
        return self._ask(HealthView, "POST", "/v1/down")

    def ask(self, shape: type[T], method: str, path: str, **kwargs: Any) -> T:
        """Return the leader's answer to a request of a part of the API that has a client of its own."""
        return self._ask(shape, method, path, **kwargs)

    def exchange(self, method: str, path: str, **kwargs: Any) -> bytes:
        """Return the body of this server's answer to a request of httpx."""
        return self._line.exchange(method, path, **kwargs)

    def _ask(self, shape: type[T], method: str, path: str, **kwargs: Any) -> T:
        return self._line.ask(shape, method, path, **kwargs)

    def _list(self, shape: type[T], path: str) -> list[T]:
        """Return a whole list, which the server sends in pages."""
        return [each for page in self._line.pages(list[shape], path) for each in page]  # type: ignore[valid-type]

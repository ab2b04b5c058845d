"""The replica that a tuning measures on: a service of its own, NAME-tune, with at most one replica.

It lives only as long as the tuning reports its load, as a gateway does: a service of 0..1 replicas that is idle has
none. So a tuning that is killed leaves no replica behind, and never touches the service that it tunes.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from cordee.answers.services import GatewayReport, GatewayStatus, ReplicaView, ServiceView
from cordee.client import Client
from cordee.errors import CordeeError, InputError, NotFoundError, ReplicaError
from cordee.serve.policy.tuning import merged_flags
from cordee.units import US_PER_S, format_duration
from cordee.workload.service import Flag, Replicas, Slo
from cordee.workload.spec import JobSpec

IDLE_S = 20.0
"""A replica whose tuning is silent for this long, after its last report has become stale, leaves."""
MARK = "CORDEE_TUNES"
"""The environment variable by which a service is known as the replica of a tuning."""
LEAVE_S = 120.0

_REPORT_S, _LOOK_S = 1.0, 0.1


class TuningReplica:
    """One replica beside a service, started with one setting of the engine after the other."""

    def __init__(self, connect: Callable[[], Client], spec: JobSpec, ready_s: float) -> None:
        """Prepare for a service.

        Args:
            connect: returns a client of the server; two are used, in two threads.
            spec: the service's.
            ready_s: time in which a replica must get ready.
        """
        self._client, self._connect, self._spec = connect(), connect, spec
        self._ready_s = ready_s
        self.name = f"{spec.name}-tune"
        self._status = GatewayStatus(service=self.name, queued=1)
        self._over = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="tuning", daemon=True)

    def __enter__(self) -> "TuningReplica":
        self._check_free()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(CordeeError):  # It leaves by itself, too, once nothing reports its load.
                self._end()
        finally:
            self._over.set()
            if self._reporter.is_alive():
                self._reporter.join()
            self._client.close()

    def start(self, flags: Mapping[str, Flag], look: Callable[[str], None]) -> ReplicaView:
        """Start the replica anew with these settings over those of the service, and return it once it is ready.

        Raises:
            ReplicaError: it does not get ready.
        """
        with suppress(NotFoundError):
            self._end()
        self._status = GatewayStatus(service=self.name, queued=1)
        if not self._reporter.is_alive():
            self._reporter.start()
        self._client.declare(self._declared(flags).model_dump(mode="json"))
        deadline_s = time.monotonic() + self._ready_s
        while True:
            service = self._client.service(self.name)
            ready = next((each for each in service.replicas if each.state == "ready"), None)
            if ready is not None:
                self._status = GatewayStatus(service=self.name, running=1)
                return ready
            if (ended := next((each for each in service.replicas if _has_ended(each)), None)) is not None:
                raise ReplicaError(self._reason(ended) or ended.why)
            if "replica failed" in service.why:
                raise ReplicaError(service.why)
            if time.monotonic() >= deadline_s:
                raise ReplicaError(f"not ready after {format_duration(self._ready_s)}: {_why(service)}")
            look(_why(service))
            time.sleep(_LOOK_S)

    def _reason(self, replica: ReplicaView) -> str:
        """Return the line of the first attempt's output that says why the engine ended; "": none does."""
        try:
            lines = [line.strip() for line in self._client.logs(replica.job_id, epoch=1, tail=100)]
        except CordeeError:
            return ""
        marked = [line.partition(" E ")[2].strip() for line in lines if " E " in line]  # llama.cpp marks errors so.
        raised = [line for line in lines if "Error: " in line]
        return marked[0] if marked else raised[-1] if raised else ""

    def _declared(self, flags: Mapping[str, Flag]) -> JobSpec:
        section = self._spec.service
        assert section is not None, "only services are tuned"
        # Idle sessions on disk are those of the service's users: they are neither taken nor mixed with others.
        no_sessions: dict[str, Flag] = {"slot-save-path": False}
        changed = {
            "replicas": Replicas(min=0, max=1),
            "models": (),
            "standby": 0,
            "slo": Slo(),
            "idle_s": IDLE_S,
            "drain_s": 1.0,
            "flags": merged_flags(section.flags, flags) | no_sessions,
        }
        update = {
            "name": self.name,
            "env": {**self._spec.env, MARK: self._spec.name},
            "service": section.model_copy(update=changed),
            "on_preempt": self._spec.on_preempt.model_copy(update={"grace_s": 1.0}),
        }
        return self._spec.model_copy(update=update)

    def _check_free(self) -> None:
        try:
            found = self._client.service(self.name)
        except NotFoundError:
            return
        if found.state != "ended" and MARK not in found.spec["env"]:
            raise InputError(
                f"there is a service {self.name}, whose name the tuning of {self._spec.name} needs",
                hint=f"end it: cordee serve stop {self.name}",
            )
        if found.state != "ended" and found.measured.queued + found.measured.running:
            raise InputError(f"{self._spec.name} is being tuned", hint=f"see: cordee serve show {self.name}")

    def _end(self) -> None:
        service = self._client.end_service(self.name)
        deadline_s = time.monotonic() + LEAVE_S
        while service.replicas:
            if time.monotonic() >= deadline_s:
                raise ReplicaError(
                    f"{service.replicas[0].job_id} has not left after {format_duration(LEAVE_S)}",
                    hint=f"cordee stop {service.replicas[0].job_id} --now",
                )
            time.sleep(_LOOK_S)
            service = self._client.service(self.name)

    def _report(self) -> None:
        """Report the load to the server until the end, as a gateway does; a server that is away is asked again."""
        with self._connect() as client:
            while not self._over.wait(_REPORT_S):
                report = GatewayReport(seq=0, at_us=int(time.time() * US_PER_S), status=[self._status])
                with suppress(CordeeError):
                    client.report(self.name, report)


def _has_ended(replica: ReplicaView) -> bool:
    """Return whether an attempt of a replica ended before it was ready."""
    return replica.epoch > 1 or (replica.epoch == 1 and replica.state == "waiting" and bool(replica.why))


def _why(service: ServiceView) -> str:
    if service.replicas:
        return service.replicas[0].why or f"the replica is {service.replicas[0].state}"
    return service.why or "no replica was started yet"

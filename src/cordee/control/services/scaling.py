"""The number of replicas that a service wants now: `serve.policy.scale` over what the gateways report."""

from typing import NamedTuple

from cordee.answers.services import GatewayStatus
from cordee.control.directory import Service
from cordee.control.services.gateways import served
from cordee.serve.policy.scale import Decision, ScaleInput, ScaleRules, ScaleState, decide, usable_slots
from cordee.units import US_PER_S
from cordee.workload.service import ServiceSpec


class ReplicaTerms(NamedTuple):
    """The price of one replica, and the requests at a time for which its plan meets the SLO; None: no such plan."""

    micro_usd_per_hour: int
    within_slo: int | None


class Scaler:
    """The autoscaler of all services; what it remembers of each is lost with the process, and begins anew."""

    def __init__(self) -> None:
        self._states: dict[str, ScaleState] = {}

    def decide(
        self, service: Service, spec: ServiceSpec, statuses: list[GatewayStatus], replica: ReplicaTerms, now_us: int
    ) -> Decision:
        """Return the number of replicas that a service shall have, and the reason if it changes."""
        state = self._states.get(service.name)
        if state is None or state.wanted != service.wanted:
            state = ScaleState(wanted=service.wanted, busy_at_us=now_us if service.wanted else None)
        decision = decide(
            now_us, state, _seen(service, statuses, replica), _rules(service, spec, replica.micro_usd_per_hour)
        )
        self._states[service.name] = decision.state
        return decision

    def forget(self, name: str) -> None:
        """Forget a service that ended."""
        self._states.pop(name, None)


def _seen(service: Service, statuses: list[GatewayStatus], replica: ReplicaTerms) -> ScaleInput:
    sums = served(service, statuses)
    ready = [each.ready for each in service.replicas.values() if each.is_ready and each.ready is not None]
    staying = [each for each in service.staying if each.revision == service.revision]
    return ScaleInput(
        ready=len(ready),
        starting=sum(not each.is_ready for each in staying),
        queued=sums.queued,
        running=sums.running,
        oldest_wait_us=max((status.oldest_wait_us for status in statuses), default=0),
        kv_fraction=sums.kv_fraction or 0.0,
        slots=usable_slots(min((each.slots for each in ready if each.slots), default=None), replica.within_slo),
        ttft_p99_us=sums.ttft_p99_us,
        tpot_p99_us=sums.tpot_p99_us,
    )


def _rules(service: Service, spec: ServiceSpec, micro_usd_per_hour: int) -> ScaleRules:
    slo = spec.slo
    return ScaleRules(
        min_replicas=service.fewest,
        max_replicas=service.most,
        ttft_us=None if slo.ttft_s is None else round(slo.ttft_s * US_PER_S),
        tpot_us=None if slo.tpot_s is None else round(slo.tpot_s * US_PER_S),
        window_us=round(spec.window_s * US_PER_S),
        idle_us=round(spec.idle_s * US_PER_S),
        micro_usd_per_hour=micro_usd_per_hour,
        max_micro_usd_per_hour=spec.max_micro_usd_per_hour,
        standby=spec.standby,
    )

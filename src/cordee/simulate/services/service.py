"""A service in the simulated cluster: its replicas are jobs of the schedule core, as many as the scaling policy wants.

Slot by slot: play the requests with the replicas that are ready, ask the policy, submit or stop replica jobs.
"""

from dataclasses import dataclass, field
from math import ceil

from cordee.control.tick import Control
from cordee.events import AttemptEnded, AttemptPlaced, Event, Job, JobEnded, NoticeGiven, Tier
from cordee.ids import JobId
from cordee.schedule.gang import Work
from cordee.serve.policy.scale import ScaleInput, ScaleRules, ScaleState, decide, leaving_order, usable_slots
from cordee.simulate.engine import Engine
from cordee.simulate.services.fluid import FluidPlay, SlotState
from cordee.simulate.world import SimCluster
from cordee.units import US_PER_S

_STEP_US = US_PER_S // 10
_ENDLESS_STEPS = 10**10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """A service as it is declared.

    Attributes:
        name: of the service.
        gpus: of one replica.
        gpu_name: the GPU that it needs; None: any.
        load_us: from placed to ready.
        drain_us: from the notice to the end of its requests.
        kv_tokens: of a replica's KV cache.
        rules: of the scaling policy.
    """

    name: str
    gpus: int
    gpu_name: str | None
    load_us: int
    drain_us: int
    kv_tokens: float
    rules: ScaleRules


@dataclass(slots=True)
class _Replica:
    """One replica job; `ready_us` is None while it waits or loads, or has left, and `node` while it has none."""

    job_id: JobId
    node: str | None = None
    ready_us: int | None = None
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ServedSlot:
    """One slot as it was played."""

    state: SlotState
    ready: int
    wanted: int


@dataclass
class SimulatedService:
    """The replicas of one service, from `start_us` on; slots are counted from there."""

    plan: ServicePlan
    play: FluidPlay
    start_us: int
    slots: list[ServedSlot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._replicas: dict[JobId, _Replica] = {}
        self._made = 0
        self._state = ScaleState()
        self._slot_us = round(self.play.slot_s * US_PER_S)

    def begin(self, engine: Engine, cluster: SimCluster, control: Control) -> None:
        """Start the first replicas so that they are ready for the first request."""
        self._engine, self._cluster, self._control = engine, cluster, control
        lead_us = self.plan.load_us + 60 * US_PER_S  # victims save in this time
        engine.at(max(engine.now_us(), self.start_us - lead_us), self._warm_up)
        engine.at(self.start_us + self._slot_us, self._end_slot, 0)

    def apply(self, event: Event) -> None:
        """Follow the replicas in the log."""
        kind = type(event)
        if kind is AttemptPlaced or kind is NoticeGiven or kind is AttemptEnded or kind is JobEnded:
            known = self._replicas.get(event.job_id)  # type: ignore[union-attr]
            if known is None:
                return
            if kind is AttemptPlaced:
                known.node = event.leases[0].node  # type: ignore[union-attr]
            elif kind is not NoticeGiven:
                known.node = None
            known.ready_us = event.at_us + self.plan.load_us if kind is AttemptPlaced else None
            if kind is JobEnded:
                del self._replicas[known.job_id]

    def _warm_up(self) -> None:
        first = self.play.requests[: max(1, ceil(60 / self.play.slot_s))]
        per_s = float(first.mean()) / self.play.slot_s
        needed = ceil(per_s / self.play.capacity_per_s) if per_s else 0
        rules = self.plan.rules
        self._state = ScaleState(wanted=max(rules.min_replicas, min(rules.max_replicas, needed)))
        self._reconcile(self._state.wanted)

    def _end_slot(self, slot: int) -> None:
        now_us = self._engine.now_us()
        ready = sum(each.ready_us is not None and each.ready_us <= now_us for each in self._replicas.values())
        played = self.play.advance(slot, ready)
        decision = decide(now_us, self._state, self._seen(played, ready), self.plan.rules)
        self._state = decision.state
        self._reconcile(decision.replicas)
        self.slots.append(ServedSlot(played, ready, decision.replicas))
        if slot + 1 < self.play.slots:
            self._engine.at(now_us + self._slot_us, self._end_slot, slot + 1)

    def _seen(self, played: SlotState, ready: int) -> ScaleInput:
        """Return what the gateways would report."""
        room = self.play.model.limits.max_sequences * ready
        running = min(round(played.open), room)
        kv_tokens = played.open * self.play.request_tokens
        return ScaleInput(
            ready=ready,
            starting=len(self._replicas) - ready,
            queued=round(played.open) - running,
            running=running,
            kv_fraction=min(1.0, kv_tokens / (ready * self.plan.kv_tokens)) if ready else 0.0,
            slots=usable_slots(self.play.model.limits.max_sequences, int(self.play.open_within_slo)),
            ttft_p99_us=round(played.ttft_p99_s * US_PER_S) if played.requests and ready else None,
            tpot_p99_us=round(played.tpot_p99_s * US_PER_S) if played.requests and ready else None,
        )

    def _reconcile(self, wanted: int) -> None:
        """Submit or stop replicas; those go first that wait, then those that load, then as whole nodes get free."""
        alive = [each for each in self._replicas.values() if not each.stopped]
        for _ in range(wanted - len(alive)):
            self._submit()
        if len(alive) <= wanted:
            return
        now_us, nodes = self._engine.now_us(), self._control.state.nodes
        loading = [each for each in alive if each.ready_us is None or each.ready_us > now_us]
        surplus = sorted(loading, key=lambda each: (each.node is not None, -(each.ready_us or 0)))
        ready = {each.job_id: each.node for each in reversed(alive) if each.node is not None and each not in loading}
        held = {node: nodes.held_milli(node) for node in ready.values()}
        order = leaving_order(ready, held, 1000 * self.plan.gpus)
        for each in (*surplus, *(self._replicas[job_id] for job_id in order))[: len(alive) - wanted]:
            each.stopped = True
            self._control.stop(each.job_id, by=self.plan.name)

    def _submit(self) -> None:
        self._made += 1
        job_id, plan = JobId(f"{self.plan.name}-{self._made}"), self.plan
        self._replicas[job_id] = _Replica(job_id)
        self._cluster.works[job_id] = Work(
            steps=_ENDLESS_STEPS,
            step_us=_STEP_US,
            start_us=plan.load_us,
            every_us=None,
            stall_us=0,
            upload_us=max(0, plan.drain_us - 2 * _STEP_US),
            leaves_during_start=True,
        )
        self._cluster.deferred.add(job_id)
        job = Job(
            job_id=job_id,
            name=plan.name,
            owner=plan.name,
            gpus=plan.gpus,
            tier=Tier.PRODUCTION,
            gpu_name=plan.gpu_name,
            grace_us=plan.drain_us,
            protected=True,
            save_us=0,
            restart_us=plan.load_us,
            within="node" if plan.gpus > 1 else None,
            service=plan.name,
            revision=1,
        )
        self._control.submit(job, "")

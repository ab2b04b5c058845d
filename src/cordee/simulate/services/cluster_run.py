"""One cluster for the time of the requests, with the service or without: who held its GPUs, and what that cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cordee.account.split import Split
from cordee.account.sums import CostRow
from cordee.control.tick import Control
from cordee.events import Event, Node
from cordee.simulate.compare import Scenario, outages_of
from cordee.simulate.engine import Engine
from cordee.simulate.policies import NamedPolicy
from cordee.simulate.run import run
from cordee.simulate.services.answer import GpuSample, TrainingResult
from cordee.simulate.services.fluid import FluidPlay
from cordee.simulate.services.held import HeldGpus
from cordee.simulate.services.service import ServicePlan, SimulatedService
from cordee.simulate.workload import submissions
from cordee.simulate.world import SimCluster
from cordee.units import MICRO_USD, US_PER_HOUR, US_PER_S

SAMPLE_S = 300
"""Seconds between two points of the drawn GPUs."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """The question.

    Attributes:
        scenario: the jobs and the one cluster; its window begins `warm_up_us` before the first request.
        play: the requests, by slots.
        service: as it is declared.
        policy: of the scheduler.
        split_gpus: of the serving cluster of two; None: the fewest that meet the SLO in every hour.
        refused: requests that are longer than the context, beside those of `play`.
        warm_up_us: time in which jobs fill the cluster before the first request.
    """

    scenario: Scenario
    play: FluidPlay
    service: ServicePlan
    policy: NamedPolicy
    split_gpus: int | None = None
    refused: int = 0
    warm_up_us: int = 24 * US_PER_HOUR

    @property
    def start_us(self) -> int:
        """Return the time of the first request."""
        return self.scenario.window_us[0] + self.warm_up_us

    @property
    def span_us(self) -> int:
        """Return the time that is compared: whole slots."""
        return round(self.play.slots * self.play.slot_s * US_PER_S)

    @property
    def gpus(self) -> int:
        """Return the GPUs of the one cluster."""
        return sum(node.gpus for node in self.scenario.nodes)


class ClusterRun:
    """One cluster, with or without the service: its held GPUs and costs between the first and the last request."""

    def __init__(self, asked: Together, nodes: tuple[Node, ...], service: SimulatedService | None = None) -> None:
        self.asked, self.nodes, self.service = asked, nodes, service
        self.held = HeldGpus()
        self.samples: list[GpuSample] = []
        self._before: dict[str, CostRow] = {}
        scenario, end_us = asked.scenario, asked.start_us + asked.span_us
        tally = replace(scenario.tally(), strict=False)
        done = run(
            nodes,
            submissions(
                scenario.tiered_jobs(tally),
                nodes,
                tally,
                costs=scenario.costs,
                estimates=asked.policy.estimates,
                limit=scenario.limit,
                window_us=scenario.window_us,
            ),
            outages_of(scenario, nodes),
            policy=asked.policy.policy,
            queues=scenario.queues,
            start_us=scenario.window_us[0],
            until_us=end_us,
            defer_reports=True,
            sink=self._apply,
            guest=self,
        )
        self.held.advance(end_us)
        self._after = {row.key: row for row in done.ledger.cost("service", end_us)}

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    def begin(self, engine: Engine, cluster: SimCluster, control: Control) -> None:
        self._engine, self._control = engine, control
        start_us = self.asked.start_us
        if self.service is not None:
            self.service.begin(engine, cluster, control)
        engine.at(start_us, cluster.flush)
        # One moment later: the reports of the flush are in the ledger then.
        engine.at(start_us + 1, self._snapshot)
        engine.at(start_us + SAMPLE_S * US_PER_S, self._sample)

    def _apply(self, event: Event) -> None:
        self.held.apply(event)
        if self.service is not None:
            self.service.apply(event)

    def _snapshot(self) -> None:
        now_us = self._engine.now_us()
        self._before = {row.key: row for row in self._control.ledger.cost("service", now_us)}
        self.held.advance(now_us)
        self.held.waiting_us = self.held.ended = self.held.preemptions = 0

    def _sample(self) -> None:
        now_us, held = self._engine.now_us(), self.held
        at_s = (now_us - self.asked.start_us) / US_PER_S
        play = self.asked.play
        low, high = int((at_s - SAMPLE_S) / play.slot_s), int(at_s / play.slot_s)
        per_s = float(play.requests[low:high].sum()) / SAMPLE_S
        self.samples.append(
            GpuSample(
                at_s=at_s,
                serving=round(held.serving / 1000),
                training=round(held.training / 1000),
                requests_per_s=per_s,
            )
        )
        if now_us + SAMPLE_S * US_PER_S <= self.asked.start_us + self.asked.span_us:
            self._engine.at(now_us + SAMPLE_S * US_PER_S, self._sample)

    def _costs(self) -> Iterator[tuple[str, CostRow, CostRow | None]]:
        for key, row in self._after.items():
            yield key, row, self._before.get(key)

    def serving(self) -> tuple[float, int]:
        """Return GPU-hours and micro-dollars of the replicas."""
        held_us = usd = 0
        for key, after, before in self._costs():
            if key:
                held_us += after.gpu_us.held - (before.gpu_us.held if before else 0)
                usd += after.micro_usd.held - (before.micro_usd.held if before else 0)
        return held_us / US_PER_HOUR, usd

    def training(self) -> TrainingResult:
        """Return how the jobs did."""
        useful = held = lost = usd = 0
        for key, after, before in self._costs():
            if not key:
                useful += _kept(after.gpu_us) - (_kept(before.gpu_us) if before else 0)
                held += after.gpu_us.held - (before.gpu_us.held if before else 0)
                lost += after.gpu_us.lost - (before.gpu_us.lost if before else 0)
                usd += after.micro_usd.held - (before.micro_usd.held if before else 0)
        return TrainingResult(
            useful_gpu_hours=useful / US_PER_HOUR,
            held_gpu_hours=held / US_PER_HOUR,
            lost_gpu_hours=lost / US_PER_HOUR,
            goodput=useful / held if held else 0.0,
            ended=self.held.ended,
            waiting_gpus=self.held.waiting_us / 1000 / self.asked.span_us,
            preemptions=self.held.preemptions,
            micro_usd=usd,
            usd_per_useful_gpu_hour=usd / MICRO_USD / (useful / US_PER_HOUR) if useful and usd else None,
        )


def _kept(split: Split) -> int:
    """Return the time of steps that are kept, those since the last report of a live attempt included."""
    return split.useful + split.unreported

"""A service and training jobs on one simulated cluster, beside two clusters with the same GPUs in total.

In one cluster the scaling policy decides how many replicas there are, and the schedule core which training jobs make
room for them. Of two clusters, the first has a fixed number of replicas and the second has the jobs.
"""

from collections.abc import Callable
from dataclasses import replace

from cordee.errors import DoesNotFitError, InputError
from cordee.events import Node
from cordee.simulate.services.answer import GOAL, ClustersResult, ServingResult, TogetherAnswer, TrainingResult
from cordee.simulate.services.cluster_run import ClusterRun, Together
from cordee.simulate.services.fluid import FluidPlay, SlotState
from cordee.simulate.services.service import ServedSlot, SimulatedService
from cordee.units import US_PER_HOUR, plural

HOUR_S = 3600
USEFUL = 0.99
"""The part of the one cluster's useful training that a separate training cluster must do to be as good."""
WAITING = 1.05
"""The multiple of the one cluster's waiting jobs, in GPUs, that a separate training cluster may have."""

Progress = Callable[[str], None]


def compare(asked: Together, progress: Progress = lambda _: None) -> TogetherAnswer:
    """Play one cluster, two of the same size, and two that do as well as the one.

    Raises:
        DoesNotFitError: no number of replicas on this cluster meets the SLO, and no split is given.
        InputError: the split leaves nothing for one of the clusters.
    """
    progress("replicas that meet the SLO at the peak")
    fixed = _fixed_replicas(asked)
    serving_gpus = fixed * asked.service.gpus if asked.split_gpus is None else asked.split_gpus
    progress("one cluster")
    service = SimulatedService(asked.service, asked.play.restart(), asked.start_us)
    one = ClusterRun(asked, asked.scenario.nodes, service)
    shared = _one(asked, one, service)
    progress("two clusters")
    trained = ClusterRun(asked, _without(asked.scenario.nodes, serving_gpus))
    apart = _two(asked, serving_gpus // asked.service.gpus, serving_gpus, trained)
    progress("two clusters that do as well")
    scenario = asked.scenario
    return TogetherAnswer(
        jobs=scenario.name,
        requests=asked.play.arrivals.name,
        service=asked.service.name,
        model=asked.play.model.candidate.request.shape.name,
        layout=asked.play.model.candidate.name,
        gpu=asked.play.model.candidate.case.gpu.name,
        slo=str(asked.play.model.slo),
        hours=asked.span_us / US_PER_HOUR,
        nodes=len(scenario.nodes),
        price_sources=tuple(sorted({node.price_source for node in scenario.nodes})),
        one=shared,
        two=apart,
        enough=_enough(asked, fixed, shared, apart, progress),
        samples=tuple(one.samples),
    )


def _one(asked: Together, done: ClusterRun, service: SimulatedService) -> ClustersResult:
    gpu_hours, usd = done.serving()
    training = done.training()
    return ClustersResult(
        gpus=asked.gpus,
        serving_gpus=None,
        micro_usd=_paid(asked, asked.scenario.nodes),
        idle_gpu_hours=asked.gpus * asked.span_us / US_PER_HOUR - gpu_hours - training.held_gpu_hours,
        serving=_serving(service.play, service.slots, asked.refused, gpu_hours, usd),
        training=training,
    )


def _two(asked: Together, replicas: int, serving_gpus: int, trained: ClusterRun) -> ClustersResult:
    """Return a serving cluster with a fixed number of replicas, beside a training cluster."""
    play = asked.play.restart()
    slots = [ServedSlot(play.advance(slot, replicas), replicas, replicas) for slot in range(play.slots)]
    hours = asked.span_us / US_PER_HOUR
    usd_per_hour = _usd_per_gpu_hour(asked.scenario.nodes)
    usd = round(serving_gpus * hours * usd_per_hour)
    training = trained.training()
    return ClustersResult(
        gpus=serving_gpus + trained.gpus,
        serving_gpus=serving_gpus,
        micro_usd=usd + round(trained.gpus * hours * usd_per_hour),
        idle_gpu_hours=trained.gpus * hours - training.held_gpu_hours,
        serving=_serving(play, slots, asked.refused, serving_gpus * hours, usd),
        training=training,
    )


def _serving(play: FluidPlay, slots: list[ServedSlot], refused: int, gpu_hours: float, usd: int) -> ServingResult:
    (ttft_p50, ttft_p99), (tpot_p50, tpot_p99) = play.percentiles(0.5, 0.99)
    states = [each.state for each in slots]
    requests = sum(each.requests for each in states) + refused
    return ServingResult(
        requests=requests,
        refused=refused,
        attained=sum(each.attained for each in states) / requests,
        worst_hour=worst_hour(states, play.slot_s),
        ttft_p50_s=ttft_p50,
        ttft_p99_s=ttft_p99,
        tpot_p50_s=tpot_p50,
        tpot_p99_s=tpot_p99,
        replicas_mean=sum(each.ready for each in slots) / len(slots),
        replicas_max=max(each.ready for each in slots),
        gpu_hours=gpu_hours,
        micro_usd=usd,
        usd_per_mtok=usd / play.arrivals.tokens if usd else None,  # micro-dollars a token are dollars a million
    )


def worst_hour(states: list[SlotState], slot_s: float) -> float:
    """Return the fraction of requests within the latencies in the hour that has the lowest; 1 without requests."""
    step = max(1, round(HOUR_S / slot_s))
    hours = [states[first : first + step] for first in range(0, len(states), step)]
    fractions = [
        sum(each.attained for each in hour) / requests
        for hour in hours
        if (requests := sum(each.requests for each in hour))
    ]
    return min(fractions, default=1.0)


def _fixed_replicas(asked: Together) -> int:
    """Return the fewest replicas that, always there, meet the SLO in every hour."""
    most = asked.gpus // asked.service.gpus
    if asked.split_gpus is not None:
        if not asked.service.gpus <= asked.split_gpus < asked.gpus:
            raise InputError(
                f"a serving cluster of {plural(asked.split_gpus, 'GPU')} of {asked.gpus:,} is no split",
                hint=f"give --split from {asked.service.gpus} GPUs, one replica, to {asked.gpus - 1}",
            )
        return asked.split_gpus // asked.service.gpus
    few, many, best = 1, most, 0.0
    while few < many:
        middle = (few + many) // 2
        if _attains(asked, middle) >= GOAL:
            many = middle
        else:
            few = middle + 1
    best = _attains(asked, few)
    if best < GOAL or few * asked.service.gpus >= asked.gpus:
        raise DoesNotFitError(
            f"{plural(few, 'replica')} on all {asked.gpus:,} GPUs keep {best:.1%} of the worst hour's requests within "
            f"{asked.play.model.slo}; {GOAL:.0%} are wanted, with GPUs left for training",
            hint="give a larger --cluster, a looser SLO or more GPUs a replica, or set the division: --split",
        )
    return few


def _attains(asked: Together, replicas: int) -> float:
    play = asked.play.restart()
    return worst_hour([play.advance(slot, replicas) for slot in range(play.slots)], play.slot_s)


def _enough(
    asked: Together, fixed: int, one: ClustersResult, two: ClustersResult, progress: Progress
) -> ClustersResult | None:
    """Return the fewest GPUs of two clusters that serve within the SLO and train as much as the one cluster does."""
    serving_gpus = fixed * asked.service.gpus
    per_node = max(node.gpus for node in asked.scenario.nodes)
    tried: dict[int, ClusterRun] = {}

    def trains(nodes: int) -> bool:
        progress(f"two clusters that do as well: a training cluster of {plural(nodes, 'node')}")
        tried[nodes] = ClusterRun(asked, _resized(asked.scenario.nodes, nodes * per_node))
        return _as_good(tried[nodes].training(), one.training)

    few, many = 1, -(-asked.gpus // per_node)
    while not trains(many):
        if many * per_node > 2 * asked.gpus:
            return None
        few, many = many + 1, many + max(1, many // 4)
    while few < many:
        middle = (few + many) // 2
        if trains(middle):
            many = middle
        else:
            few = middle + 1
    return _two(asked, fixed, serving_gpus, tried[many])


def _as_good(found: TrainingResult, wanted: TrainingResult) -> bool:
    return (
        found.useful_gpu_hours >= USEFUL * wanted.useful_gpu_hours
        and found.waiting_gpus <= WAITING * wanted.waiting_gpus + 1
    )


def _usd_per_gpu_hour(nodes: tuple[Node, ...]) -> float:
    """Return micro-dollars of a mean GPU-hour."""
    return sum(node.gpus * node.micro_usd_per_gpu_hour for node in nodes) / sum(node.gpus for node in nodes)


def _paid(asked: Together, nodes: tuple[Node, ...]) -> int:
    return round(sum(node.gpus for node in nodes) * _usd_per_gpu_hour(nodes) * asked.span_us / US_PER_HOUR)


def _without(nodes: tuple[Node, ...], gpus: int) -> tuple[Node, ...]:
    """Return the nodes less so many GPUs, from the last node on; a node may be cut."""
    kept = sum(node.gpus for node in nodes) - gpus
    return _resized(nodes, kept)


def _resized(nodes: tuple[Node, ...], gpus: int) -> tuple[Node, ...]:
    """Return so many GPUs on nodes like these: the first ones, the last of them cut, more of the first if they lack."""
    found: list[Node] = []
    for node in nodes:
        if gpus <= 0:
            break
        found.append(node if node.gpus <= gpus else replace(node, gpus=gpus, island_gpus=0))
        gpus -= found[-1].gpus
    number = len(nodes)
    while gpus > 0:
        found.append(replace(nodes[0], name=f"node-{number:04}", gpus=min(gpus, nodes[0].gpus)))
        gpus -= found[-1].gpus
        number += 1
    return tuple(found)

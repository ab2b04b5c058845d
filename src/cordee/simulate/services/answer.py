"""The answer of a service beside training jobs as values: the terminal, the page and the JSON show them."""

from dataclasses import dataclass

from cordee.units import format_micro_usd, plural

GOAL = 0.99
"""The fraction of requests that must meet both latencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """The result of the service.

    Attributes:
        refused: requests that are longer than the context; they miss the SLO.
        attained: fraction of requests within both latencies.
        worst_hour: the same fraction in the hour that has the lowest.
        ttft_p50_s, ttft_p99_s, tpot_p50_s, tpot_p99_s: over all requests.
        replicas_mean, replicas_max: ready ones.
        gpu_hours: held by replicas, loading and draining included.
        usd_per_mtok: dollars of these GPUs over a million tokens, input and output together; None without a price.
    """

    requests: int
    refused: int
    attained: float
    worst_hour: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    replicas_mean: float
    replicas_max: int
    gpu_hours: float
    micro_usd: int
    usd_per_mtok: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of the training jobs in the same time.

    Attributes:
        useful_gpu_hours: GPU time of steps that are kept.
        goodput: useful over held GPU time.
        ended: jobs that ran to their end.
        waiting_gpus: GPUs for which jobs waited, on average.
        preemptions: notices because another job was chosen.
        usd_per_useful_gpu_hour: None without a price, or without useful time.
    """

    useful_gpu_hours: float
    held_gpu_hours: float
    lost_gpu_hours: float
    goodput: float
    ended: int
    waiting_gpus: float
    preemptions: int
    micro_usd: int
    usd_per_useful_gpu_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClustersResult:
    """One way to have both. `micro_usd` pays for all GPUs all the time, idle ones included."""

    gpus: int
    serving_gpus: int | None  # of a cluster of its own; None: one cluster
    micro_usd: int
    idle_gpu_hours: float
    serving: ServingResult
    training: TrainingResult


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """GPUs at one moment of the one cluster, in seconds after the first request."""

    at_s: float
    serving: int
    training: int
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherAnswer:
    """One cluster beside two.

    Attributes:
        hours: that were compared, from the first request.
        one: the service and the jobs on one cluster.
        two: the same GPUs divided.
        enough: two clusters that do as well as the one, the fewest GPUs of each; None: not within ten times the GPUs.
    """

    jobs: str
    requests: str
    service: str
    model: str
    layout: str
    gpu: str
    slo: str
    hours: float
    nodes: int
    price_sources: tuple[str, ...]
    one: ClustersResult
    two: ClustersResult
    enough: ClustersResult | None
    samples: tuple[GpuSample, ...]

    @property
    def summary(self) -> str:
        """The gain of one cluster over two of the same size, in a sentence."""
        more = self.one.training.useful_gpu_hours - self.two.training.useful_gpu_hours
        fraction = more / self.two.training.useful_gpu_hours if self.two.training.useful_gpu_hours else 0.0
        verb = "more" if more >= 0 else "fewer"
        return (
            f"one cluster trains {abs(more):,.0f} useful GPU-hours {verb} ({fraction:+.1%}) than two of the same size, "
            f"and keeps {self.one.serving.attained:.2%} of the requests within the SLO against "
            f"{self.two.serving.attained:.2%}"
        )

    @property
    def saving(self) -> str:
        """The cost of two clusters that do as well, in a sentence; empty where none was found."""
        if self.enough is None:
            return ""
        gpus, usd = self.enough.gpus - self.one.gpus, self.enough.micro_usd - self.one.micro_usd
        if gpus <= 0:
            fewer = f"{plural(-gpus, 'GPU')} fewer" if gpus else "the same GPUs"
            return f"two clusters do as well with {fewer}"
        dollars = f", {format_micro_usd(usd)} ({usd / self.one.micro_usd:.1%})" if self.one.micro_usd else ""
        hours = "a day" if self.hours == 24 else f"in {self.hours:g} hours"
        return f"two clusters that do as well need {plural(gpus, 'GPU')} more{dollars} {hours}"

"""One replica of a service as the plan has it: its step times, its limits, and the requests that fill it."""

from dataclasses import dataclass
from functools import cached_property

from cordee.errors import DoesNotFitError
from cordee.plan.serving.judge import ServingCandidate, rank, under_traffic, unloaded
from cordee.plan.serving.performance import Performance, replica_limits, speed_of, steady_state
from cordee.plan.serving.queueing.batching import Limits
from cordee.plan.serving.request import ServingRequest, Slo
from cordee.plan.serving.speed.speed import Speed
from cordee.units import format_gb


@dataclass(frozen=True)
class ReplicaModel:
    """A replica in one layout, for requests of one mean length."""

    candidate: ServingCandidate
    slo: Slo
    prefixes: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.candidate.case.layout.gpus

    @cached_property
    def speed(self) -> Speed:
        """Its step times."""
        return speed_of(self.candidate.case)

    @cached_property
    def limits(self) -> Limits:
        """The limits of its engine and memory."""
        return replica_limits(self.candidate.memory, prefix_caching=self.prefixes)

    @cached_property
    def full(self) -> Performance:
        """Its steady state with as many requests as fit."""
        return steady_state(self.candidate.request.traffic, self.speed, 1, max(1, self.candidate.sequences))

    @cached_property
    def prefill_fraction(self) -> float:
        """The fraction of a mean request's work that is its prompt."""
        rates, mix = self.full.rates, self.full.mix
        prompt_s = mix.computed_tokens / rates.prefill_tokens_per_s
        return prompt_s / (prompt_s + mix.output_tokens / rates.decode_tokens_per_s)


def replica_model(request: ServingRequest, *, prefixes: bool = False) -> ReplicaModel:
    """Return the replica on exactly the request's GPUs that answers most within the latencies.

    Raises:
        DoesNotFitError: no layout of so many GPUs holds the model, or a request alone misses the latencies.
        LayoutError: none divides it.
    """
    whole = [each for each in unloaded(request) if each.case.layout.gpus == request.gpus]
    fitting = [under_traffic(each) for each in whole if each.fits]
    where = f"{request.gpus} x {request.gpu.name}"
    if not fitting:
        nearest = min(whole, key=rank, default=None)
        short = "" if nearest is None else f": {nearest.name} is short by {format_gb(nearest.shortfall_bytes)} a GPU"
        hint = "give a replica more GPUs (`gpus`), or a shorter `context`"
        raise DoesNotFitError(f"{request.shape.name} does not fit a replica of {where}{short}", hint=hint)
    best = min(fitting, key=rank)
    if not best.keeps_slo:
        raise DoesNotFitError(
            f"a replica of {where} misses {request.slo} even with one request",
            hint="give looser latencies, or a replica more GPUs (`gpus`)",
        )
    return ReplicaModel(best, request.slo, prefixes)

"""The answer: layouts of a replica by price, their memory, latencies, levers, and what would help where none does.

Parts that take seconds and that not every caller reads (remedies, the curve, the levers) are computed on first use.
Renderers are elsewhere: the terminal in `cli/`, the page in `page.py`, JSON in `document.py`.
"""

from dataclasses import dataclass
from functools import cached_property

from cordee.errors import DoesNotFitError, LayoutError
from cordee.hardware.catalog import Price
from cordee.hardware.power import Electricity, draw_of, no_draw
from cordee.plan.launch import Launch
from cordee.plan.serving.curve import ServingCurve, serving_curve
from cordee.plan.serving.disaggregation import PhasesPlan, PhasesWanted, plan_phases
from cordee.plan.serving.flags import Deployment, engine_settings, phase_settings
from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.levers.lever import Lever
from cordee.plan.serving.levers.levers import levers
from cordee.plan.serving.levers.quantise import borrowed_kernels
from cordee.plan.serving.levers.renting import HourPrice, hour_prices
from cordee.plan.serving.memory.memory import engine_log
from cordee.plan.serving.page import serving_page
from cordee.plan.serving.price.energy import energy_usd_per_mtok
from cordee.plan.serving.price.hours import DAY_HOURS, Renting
from cordee.plan.serving.price.own_or_api import BreakEven, OwnReplicas, break_even
from cordee.plan.serving.remedies import ServiceRemedy, remedies
from cordee.plan.serving.request import ServingRequest
from cordee.plan.serving.why import ServingWhy, why_not
from cordee.units import format_digits_usd, format_gb, format_latency, plural

STEADY = "the steady state of one replica, the same for all requests (--rate plays them one by one)"


@dataclass(frozen=True)
class ServingAnswer:
    """All layouts of one request, ranked. It draws itself in a notebook."""

    request: ServingRequest
    candidates: tuple[ServingCandidate, ...]
    phases_wanted: PhasesWanted | None = None

    @cached_property
    def phases(self) -> PhasesPlan | None:
        """Replicas for prefill and others for decode; None where they are not asked for, or do not fit."""
        return None if self.phases_wanted is None else plan_phases(self.request, self.phases_wanted)

    @property
    def phases_summary(self) -> str:
        """The plan of both phases, or that none fits; empty where it is not asked for."""
        if self.phases_wanted is None:
            return ""
        return f"no replicas for prefill and decode go into {self.where}" if self.phases is None else str(self.phases)

    @property
    def meets(self) -> bool:
        """Return whether what was asked for meets the SLO: a layout, or both phases where these were asked for."""
        if self.phases_wanted is None:
            return self.best is not None
        return self.phases is not None and self.phases.keeps_slo

    @property
    def serving(self) -> tuple[ServingCandidate, ...]:
        """Layouts that meet the SLO, the cheapest first."""
        return tuple(each for each in self.candidates if each.keeps_slo)

    @property
    def late(self) -> tuple[ServingCandidate, ...]:
        """Layouts that fit and miss a latency or do not keep up, the nearest first."""
        return tuple(each for each in self.candidates if each.fits and not each.keeps_slo)

    @property
    def rejected(self) -> tuple[ServingCandidate, ...]:
        """Layouts that do not fit, the nearest to fitting first."""
        return tuple(each for each in self.candidates if not each.fits)

    @property
    def best(self) -> ServingCandidate | None:
        """The cheapest layout that meets the SLO."""
        return self.candidates[0] if self.candidates[0].keeps_slo else None

    @property
    def nearest(self) -> ServingCandidate:
        """The best layout, or the one nearest to meeting the latencies, or to fitting."""
        return self.candidates[0]

    @property
    def fits(self) -> bool:
        """Return whether any layout fits."""
        return self.nearest.fits

    @property
    def engine_log(self) -> tuple[str, ...]:
        """The lines of memory and KV cache that the engine will print; none where they are not known."""
        return engine_log(self.nearest.memory)

    @cached_property
    def remedies(self) -> tuple[ServiceRemedy, ...]:
        """Changes after which a layout meets the SLO; none where one does already."""
        return () if self.best is not None else remedies(self.request)

    @property
    def floor(self) -> str:
        """The lowest latencies of any layout here, of those that exceed their limit; empty where none does."""
        if self.best is not None or not self.fits:
            return ""
        slo, fitting = self.request.slo, [each for each in self.candidates if each.fits]
        first = min(fitting, key=lambda each: each.floor.ttft_s)
        next_ = min(fitting, key=lambda each: each.floor.tpot_s)
        floors = (("TTFT", slo.ttft_s, first.floor.ttft_s, first), ("TPOT", slo.tpot_s, next_.floor.tpot_s, next_))
        missed = [
            f"{name} {format_latency(least_s)} with {each.name}"
            for name, limit_s, least_s, each in floors
            if limit_s is not None and least_s > limit_s
        ]
        return f"the floor here is {' and '.join(missed)}, of one request alone" if missed else ""

    @property
    def method(self) -> str:
        """The way in which the latencies were computed."""
        traffic, found = self.request.traffic, self.nearest.performance
        if found is None or not found.played:
            return STEADY
        if not traffic.requests or self.nearest.replicas == 1:
            return "requests in order of arrival, played through one replica"
        way = "by the hash of their first two prefix blocks, within 1.25 times the mean load"
        if not traffic.has_prefixes:
            way = "each on the replica with the fewest tokens before it"
        return f"requests in order of arrival, played through {self.nearest.replicas} replicas, {way}"

    @property
    def refusals(self) -> str:
        """The requests that the nearest layout does not accept; empty where it accepts all."""
        found = self.nearest.performance
        if found is None or not found.refused:
            return ""
        longest, limit = self.request.traffic.longest_tokens, self.nearest.case.max_context_tokens
        return (
            f"{found.refused:,} of {found.requests:,} requests refused: the context is {limit:,} tokens, the longest "
            f"request with its answer has {longest:,}"
        )

    @cached_property
    def curve(self) -> ServingCurve | None:
        """Throughput against latency of the nearest layout by concurrency; None where it does not fit."""
        return serving_curve(self.nearest) if self.fits else None

    @cached_property
    def electricity_usd_per_mtok(self) -> float | None:
        """Dollars of electricity of a million tokens, which a rented GPU's price holds already; None: unknown."""
        found = self.nearest.performance
        if found is None:
            return None
        tokens_per_s = found.requests_per_s * found.mix.tokens / self.nearest.busy_fraction
        busy = self.nearest.busy_fraction * self.request.pricing.mean_load
        return energy_usd_per_mtok(self.request.gpu, self.nearest.gpus, tokens_per_s, Electricity(), busy)

    @property
    def borrowed(self) -> str | None:
        """Where the kernels of the nearest layout's weights were measured, if not in this engine on this GPU."""
        request, weights = self.request, self.nearest.case.weights.name
        return borrowed_kernels(request.assumed.speedups, request.gpu.name, request.engine.name, weights)

    @cached_property
    def against_api(self) -> BreakEven | None:
        """The load from which this costs less than the request's API; None without one, or without a price."""
        api, price, found = self.request.pricing.api, self.request.price, self.nearest.performance
        if api is None or price is None or found is None:
            return None
        hours = self.request.pricing.busy_fractions
        own = OwnReplicas(
            rates=found.rates,
            gpus=self.nearest.case.layout.gpus,
            renting=self._paid(price),
            profile=hours if len(hours) > 1 else (1.0,) * 24,
            busy_fraction_max=self.nearest.busy_fraction,
        )
        return break_even(own, api, found.mix)

    def _paid(self, price: Price) -> Renting:
        """Return how replicas are paid for: at the chosen capacity, reserved or on demand where both have a price."""
        reserved = self.request.pricing.find(self.request.gpu, "reserved")
        if price.capacity == "spot" or reserved is None:
            return Renting(price.usd_per_gpu_hour)
        on_demand = self.request.pricing.find(self.request.gpu, "on-demand")
        # Without a price on demand even one hour a day costs all hours of a reserved GPU.
        hourly = DAY_HOURS * reserved.usd_per_gpu_hour if on_demand is None else on_demand.usd_per_gpu_hour
        return Renting(hourly, reserved.usd_per_gpu_hour)

    @cached_property
    def hours(self) -> tuple[HourPrice, ...]:
        """The price of a token by hour of the day; none without `--hours` or a trace of a day."""
        return hour_prices(self.nearest)

    @cached_property
    def levers(self) -> tuple[Lever, ...]:
        """The levers on the price, each with its effect here and its crossover; none where nothing fits."""
        return levers(self.nearest) if self.fits else ()

    @cached_property
    def why(self) -> ServingWhy | None:
        """Why the best is not what the request asks about."""
        return None if self.request.why is None else why_not(self, self.request.why)

    @cached_property
    def launch(self) -> Launch | None:
        """Settings of the best layout for the request's launcher.

        Raises:
            LayoutError: another engine than the plan's.
            DoesNotFitError: nothing fits.
        """
        if self.request.launcher is None:
            return None
        found, engine = self.nearest, self.request.engine.name
        if not found.fits:
            raise self.error()
        if self.request.launcher != engine:
            message = f"the plan is for {engine}, not for {self.request.launcher}: their memory differs"
            raise LayoutError(message, hint=f"give --engine {self.request.launcher}, or --launch {engine}")
        model, phases = self.request.model or self.request.shape.name, self.phases
        if phases is not None:
            pools = [Deployment(model, each.case, each.replicas) for each in (phases.prefill, phases.decode)]
            return phase_settings(self.request.launcher, *pools)
        return engine_settings(self.request.launcher, Deployment(model, found.case, found.replicas))

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the price, the GPU's figures and the step times come from, a sentence each."""
        request = self.request
        price, gpu, kernels = request.price, request.gpu, request.gpu.kernels
        if price is None:
            dollars = f"{request.pricing.capacity} price unknown: give --prices"
        else:
            dollars = f"{request.pricing.capacity} ${price.usd_per_gpu_hour:.2f} a GPU-hour: {price.source}"
        steps = "fractions of the nameplate, assumed: no kernel was measured on this GPU"
        if kernels.grids:
            other = "" if kernels.gpu == gpu.name else ", which has the same chip"
            steps = f"kernels measured on {kernels.gpu}{other}: {kernels.source}"
        found = [dollars, f"{gpu.name}: {gpu.source}", f"step times: {steps}", f"latencies: {self.method}"]
        found += [f"weights: {self.borrowed}"] if self.borrowed else []
        if any(each.case.layout.ep for each in self.candidates):
            given = request.traffic.imbalance
            text = (
                "as routing dumps of deepseek-ai/ESFT have it" if given is None else f"{given:g} times the mean, given"
            )
            found.append(f"experts: the fullest GPU's tokens {text}")
        if self.nearest.performance is not None:
            draw = draw_of(gpu)
            found.append(no_draw(gpu) if draw is None else f"electricity: {draw}")
        return tuple(found)

    @property
    def where(self) -> str:
        """The GPUs, for a message."""
        return f"{self.request.gpus} x {self.request.gpu.name}"

    @property
    def summary(self) -> str:
        """One line: layout, replicas, latencies and price; or what is missing."""
        found = self.nearest
        if not found.fits:
            short = format_gb(found.shortfall_bytes)
            return f"{self.request.shape.name} does not fit: {found.name}, the nearest, is short by {short} on each GPU"
        if found.performance is None:
            most = f"at most {found.capacity_per_s:,.1f} requests/s"
            return f"{found.name} fits, but {plural(found.replicas, 'replica')} cannot keep up: {most}"
        speed, at = found.performance, self.request.slo.statistic
        ttft, tpot = (1000 * getattr(each, at) for each in (speed.ttft, speed.tpot))
        price = "" if found.usd_per_mtok is None else f", {format_digits_usd(found.usd_per_mtok)} a million tokens"
        verdict = f"; {found.excess:.2f} times the SLO" if found.excess > 1 else ""
        verdict += f"; {self.refusals}" if self.refusals else ""
        where = f"{found.gpus} of {plural(self.request.gpus, 'GPU')}"
        return (
            f"{plural(found.replicas, 'replica')} of {found.name} on {where}: {speed.requests_per_s:,.1f} requests/s, "
            f"TTFT {ttft:,.0f} ms, TPOT {tpot:,.1f} ms{price}{verdict}"
        )

    def error(self) -> DoesNotFitError:
        """Return the refusal of a request in which nothing fits or meets the SLO."""
        found = self.nearest
        others = "; or ".join(str(each) for each in self.remedies)
        hint = "; ".join(filter(None, (self.floor, others))) or "use larger or more GPUs"
        name = self.request.shape.name
        if not found.fits:
            message = (
                f"{name} does not fit {self.where}, not even for one request: {found.name}, which is nearest, needs "
                f"{format_gb(found.shortfall_bytes)} more on each GPU: {found.memory.refusal}"
            )
        else:
            message = f"{name} on {self.where} does not meet {self.request.slo}: {self.summary}"
        return DoesNotFitError(message, hint=hint)

    def page(self) -> str:
        """Return the answer as one self-contained HTML page."""
        return serving_page(self)

    def __repr__(self) -> str:
        """Return the summary, which is what an interactive Python shows."""
        return f"<{self.request.shape.name} on {self.where}: {self.summary}>"

    def _repr_html_(self) -> str:
        return serving_page(self, notebook=True)

    def table(self) -> list[dict[str, object]]:
        """Return a row for each layout in base units, ready for `pandas.DataFrame`."""
        return [
            {
                "layout": each.name,
                "replicas": each.replicas,
                "fits": each.fits,
                "keeps_slo": each.keeps_slo,
                "kv_tokens": each.memory.kv_tokens,
                "sequences_max": each.sequences,
                "requests_per_s": None if each.performance is None else each.performance.requests_per_s,
                "ttft_s_p99": None if each.performance is None else each.performance.ttft.p99,
                "tpot_s_p99": None if each.performance is None else each.performance.tpot.p99,
                "usd_per_mtok": each.usd_per_mtok,
            }
            for each in self.candidates
        ]

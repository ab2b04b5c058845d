"""The answer: memory, layouts, time, survival and money of one request.

Parts that take seconds and that not every caller reads (remedies, the fewest GPUs, the longest contexts) are computed
on first use. Renderers are elsewhere: the terminal in `cli/`, the page in `page.py`, JSON in `document.py`.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from cordee.errors import DoesNotFitError
from cordee.events import Estimate
from cordee.hardware.power import EnergyUse, draw_of, no_draw
from cordee.plan.candidates import Candidate, Layouts, Remedy
from cordee.plan.cost import TrainingRun, training_run
from cordee.plan.expect import Expectation
from cordee.plan.iteration import RolloutPlan
from cordee.plan.launch import Launch, first_to_launch
from cordee.plan.layout import Layout
from cordee.plan.longest import LongestContext, longest_contexts
from cordee.plan.memory import gpu_state_bytes, state_bytes
from cordee.plan.memory_interval import seen_interval_bytes
from cordee.plan.page import plan_page
from cordee.plan.rent_or_buy import Comparison
from cordee.plan.request import Request
from cordee.plan.search import best_layout, best_sure, fewest_gpus_to_hold, fewest_gpus_to_train, remedies
from cordee.plan.shards import uneven_rows
from cordee.plan.states import flop_per_token
from cordee.plan.survive import LevelSave, Survival, capture_bytes_per_node, level_saves
from cordee.plan.training import Training
from cordee.plan.wanted import ANY_LAYOUT
from cordee.plan.why import Why, why_not
from cordee.units import GB, US_PER_S, format_bytes
from cordee.workload.model import ModelShape

LONGEST_SHOWN = 8


@dataclass(frozen=True)
class Answer:
    """Memory, layouts, time, survival and money of one request. It draws itself in a notebook."""

    request: Request
    layouts: Layouts
    expectations: tuple[Expectation, ...]
    rent_or_buy: Comparison | None
    rollouts: RolloutPlan | None = None

    @property
    def expert_balance(self) -> str | None:
        """The imbalance that measured loads give the nearest layout, as a sentence; None if none were given."""
        if not self.training.imbalance_by_ep:
            return None
        ep = self.nearest.layout.ep
        return (
            f"With the measured expert loads the fullest of {ep} expert ranks has "
            f"{self.training.imbalance_at(ep):.2f} times the mean load, experts placed as `cordee experts` would."
        )

    @property
    def uneven_rows(self) -> str | None:
        """The cost of FSDP2's whole rows for the nearest layout's fullest rank, as a sentence; None if it is little."""
        return uneven_rows(self.request.shape, self.nearest.layout, self.training)

    @property
    def training(self) -> Training:
        """The training with every default filled in."""
        return self.layouts.case.training

    @property
    def fits(self) -> bool:
        """Return whether any layout fits."""
        return self.best is not None

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits."""
        return self.layouts.best

    @property
    def nearest(self) -> Candidate:
        """The best layout, or the one nearest to fitting."""
        return self.layouts.nearest

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """Layouts that fit, the fastest first."""
        return self.layouts.fitting

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """Layouts that do not fit, the nearest to fitting first."""
        return self.layouts.rejected

    @cached_property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer states of the whole model."""
        return state_bytes(self.request.shape, self.training)

    @property
    def fewest_gpus_to_hold(self) -> int:
        """GPUs that hold the state alone, before one activation."""
        return fewest_gpus_to_hold(gpu_state_bytes(self.request.shape, self.training), self.request.gpu)

    @cached_property
    def fewest_gpus_to_train(self) -> tuple[int, Layout] | None:
        """The fewest of 1, 2, 3, 4, 6, ... GPUs, up to the request's, that train it, and how; None if nothing fits."""
        return fewest_gpus_to_train(self.layouts.case) if self.fits else None

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """Changes after which a layout fits; none where one does already."""
        return () if self.fits else remedies(self.layouts.case, self.request.settings.global_batch)

    @cached_property
    def suggestion(self) -> Candidate | None:
        """The best layout on the same GPUs if it is left open; None where nothing fits then either."""
        if self.fits or self.request.layout == ANY_LAYOUT:
            return None
        return best_layout(self.layouts.case).best

    @cached_property
    def sure(self) -> Candidate | None:
        """The fastest layout that fits at the upper end of its interval too; None if none does."""
        best = self.best
        if best is None or not best.tight:
            return best
        return best_sure(self.layouts.case, self.request.layout, self.request.price)

    @property
    def seen_interval_bytes(self) -> tuple[int, int] | None:
        """Bytes that nvidia-smi is expected to show on the fullest GPU in nine of ten runs of the best layout."""
        nearest = self.nearest
        return seen_interval_bytes(nearest.memory.worst, self.training, nearest.gpu_memory_bytes)

    @property
    def expected(self) -> Expectation:
        """The expectation on the kind of capacity that the request names."""
        return next(each for each in self.expectations if each.capacity == self.request.capacity)

    @property
    def survival(self) -> Survival:
        """Checkpoint, interval and losses on that kind of capacity."""
        return self.expected.survival

    @property
    def nodes(self) -> int:
        """Nodes that the GPUs fill."""
        return self.request.assumed.nodes(self.request.gpu, self.request.gpus)

    @property
    def level_saves(self) -> tuple[LevelSave, ...]:
        """Seconds of one checkpoint to each storage level."""
        return level_saves(self.survival.checkpoint_bytes, self.request.gpus, self.nodes)

    def capture_bytes_per_node(self, *, held: bool) -> int:
        """Return the host memory that captures take; `held`: some stay in memory while others are taken."""
        return capture_bytes_per_node(self.survival.checkpoint_bytes, self.nodes, held=held)

    @property
    def run(self) -> TrainingRun | None:
        """Time and dollars of training on the request's tokens; None if nothing fits or no tokens were given."""
        if self.request.tokens is None or self.best is None or self.best.step_s is None:
            return None
        price = self.request.price
        return training_run(
            self.request.tokens,
            tokens_per_step=self.training.tokens_per_step,
            step_s=self.best.step_s,
            gpus=self.request.gpus,
            goodput=self.survival.goodput,
            usd_per_gpu_hour=None if price is None else price.usd_per_gpu_hour,
        )

    def energy_of(self, seconds: float) -> EnergyUse | None:
        """Return the energy of all GPUs over so many seconds; None where electricity or a board's limit is unknown."""
        at, draw = self.request.assumed.electricity, draw_of(self.request.gpu)
        gpus = self.request.gpus if self.rollouts is None else self.rollouts.all_gpus
        return None if at is None or draw is None else EnergyUse(gpus, seconds, draw, at)

    @property
    def energy(self) -> EnergyUse | None:
        """The energy of a step of the best layout, or of an iteration with its roll-outs; None where it is unknown."""
        if self.best is None or self.best.step_s is None:
            return None
        return self.energy_of(self.best.step_s if self.rollouts is None else self.rollouts.iteration_s)

    @property
    def no_energy(self) -> str | None:
        """Why the energy of a plan whose steps are known is not; None: it is, or nobody asked for it."""
        if self.best is None or self.best.step_s is None or self.request.assumed.electricity is None:
            return None
        return None if self.energy is not None else no_draw(self.request.gpu)

    @property
    def run_energy(self) -> EnergyUse | None:
        """The energy of training on the request's tokens, interruptions included."""
        return None if self.run is None else self.energy_of(self.run.run_s)

    def why_not(self, layout: str) -> Why:
        """Return why the best layout is not this one.

        Raises:
            LayoutError: the text cannot be read.
        """
        return why_not(self.layouts, layout, lambda: self.remedies)

    @cached_property
    def why(self) -> Why | None:
        """Why the best layout is not the one that the request asks about."""
        return None if self.request.why is None else self.why_not(self.request.why)

    @cached_property
    def longest_contexts(self) -> tuple[LongestContext, ...]:
        """The longest sequence of the first layouts, and of those that are best for longer ones; if asked for."""
        if not self.request.contexts:
            return ()
        return longest_contexts(self.layouts, self.request.layout, LONGEST_SHOWN)

    @cached_property
    def launch(self) -> Launch | None:
        """Settings for the request's launcher: of the first layout that it runs as planned.

        Raises:
            LayoutError: no such launcher.
            DoesNotFitError: nothing fits.
        """
        if self.request.launcher is None:
            return None
        if not self.fits:
            where = f"{self.request.gpus} x {self.request.gpu.name}"
            raise DoesNotFitError(
                f"{self.request.shape.name} does not fit {where}: there is no layout to launch",
                hint=f"{self.nearest.layout} is nearest; run the same without --launch to see what would fit",
            )
        layouts = [candidate.layout for candidate in self.fitting]
        node = self.request.gpu.gpus_per_node
        return first_to_launch(self.request.launcher, self.request.shape, layouts, self.training, node_gpus=node)

    @property
    def summary(self) -> str:
        """One line: layout, memory, and what a step and a billion tokens take; or by how much it does not fit."""
        found = self.nearest
        memory = f"{found.layout}: {found.peak_bytes / GB:.1f} of {format_bytes(found.gpu_memory_bytes)}"
        if found.tight:
            memory += f" (tight: up to {found.needed_interval_bytes[1] / GB:.1f})"
        if found.step_s is None:
            return f"{memory}, over by {found.shortfall_bytes / GB:.1f} GB"
        usd = found.usd_per_billion_tokens
        money = "" if usd is None else f", ${usd:,.2f} a billion tokens"
        return f"{memory}, {found.step_s:,.1f} s a step{money}"

    def estimate(self) -> Estimate:
        """Return what travels with a job: the layout, its memory and step, and what a save and a restart take."""
        request, training, found = self.request, self.training, self.nearest
        low, high = found.step_interval_s or (None, None)
        return replace(
            estimate_of_work(request.shape, training, request.gpus, str(found.layout), self.survival),
            peak_bytes=found.peak_bytes,
            gpu_memory_bytes=found.gpu_memory_bytes,
            allocated_bytes=found.memory.worst.allocated_bytes,
            step_us=None if found.step_s is None else _us(found.step_s),
            step_us_low=None if low is None else _us(low),
            step_us_high=None if high is None else _us(high),
            gpu_flop_per_s=request.gpu.peak_flop_per_s(training.precision),
            mfu=found.mfu,
        )

    def error(self) -> DoesNotFitError:
        """Return the refusal of a request that does not fit, with its numbers and what would."""
        assert not self.fits, "only what does not fit is refused"
        found = self.nearest
        message = (
            f"{self.request.shape.name} does not fit {self.request.gpus} x {self.request.gpu.name}: {found.layout} "
            f"needs {format_bytes(found.peak_bytes)} on its fullest GPU, which has "
            f"{format_bytes(found.gpu_memory_bytes)}: over by {format_bytes(found.shortfall_bytes)}"
        )
        if self.suggestion is not None:
            hint = f"layout {self.suggestion.layout} fits with {format_bytes(self.suggestion.peak_bytes)}"
        else:
            each = (f"{remedy.change}: {remedy.candidate.layout} fits" for remedy in self.remedies)
            hint = "; or ".join(each) or "use larger GPUs"
        return DoesNotFitError(message, hint=hint)

    def page(self) -> str:
        """Return the answer as one self-contained HTML page."""
        return plan_page(self)

    def __repr__(self) -> str:
        """Return the summary, which is what an interactive Python shows."""
        return f"<{self.request.shape.name} on {self.request.gpus} x {self.request.gpu.name}: {self.summary}>"

    def _repr_html_(self) -> str:
        return plan_page(self, notebook=True)

    def table(self) -> list[dict[str, object]]:
        """Return a row for each layout in base units, ready for `pandas.DataFrame`."""
        return [
            {
                "layout": str(candidate.layout),
                "fits": candidate.fits,
                "peak_bytes": candidate.peak_bytes,
                "needed_bytes_low": candidate.needed_interval_bytes[0],
                "needed_bytes_high": candidate.needed_interval_bytes[1],
                "tight": candidate.tight,
                "shortfall_bytes": candidate.shortfall_bytes,
                "step_s": candidate.step_s,
                "mfu": candidate.mfu,
                "tokens_per_s": candidate.tokens_per_s,
                "usd_per_billion_tokens": candidate.usd_per_billion_tokens,
            }
            for candidate in (*self.fitting, *self.rejected)
        ]


def estimate_of_work(shape: ModelShape, training: Training, gpus: int, layout: str, survival: Survival) -> Estimate:
    """Return an estimate without memory and step time: the part that holds on CPU slots as on any GPU."""
    return Estimate(
        layout=layout,
        peak_bytes=0,
        gpu_memory_bytes=0,
        gpus=gpus,
        tokens_per_step=training.tokens_per_step,
        flop_per_token=float(flop_per_token(shape, training)),
        save_us=_us(survival.checkpoint_s),
        restart_us=_us(survival.restart_s),
    )


def _us(seconds: float) -> int:
    return round(seconds * US_PER_S)

"""The question: a model, GPUs, training settings, and what else an answer depends on."""

from dataclasses import dataclass, field, replace
from typing import Literal

from cordee.errors import LayoutError, ShapeError
from cordee.hardware.catalog import Capacity, Gpu, Price, price_of
from cordee.plan.expect import Assumptions
from cordee.plan.launch import check_launcher
from cordee.plan.launch_parts import FRAMEWORKS_OF, LEFT_OUT, WITH_ADAPTERS
from cordee.plan.optimum import Case
from cordee.plan.rent_or_buy import Ownership
from cordee.plan.settings import Settings
from cordee.plan.stages import parse_stage, with_stage
from cordee.plan.training import Framework, Stage
from cordee.plan.wanted import ANY_LAYOUT, LayoutWanted
from cordee.workload.model import ModelShape

Breadth = Literal["best", "meshes", "everything"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that an answer depends on.

    Attributes:
        shape: the model.
        search: how widely to search: "best" finds the one best layout and is the quickest; "meshes" also ranks the
            best layout of each mesh; "everything" varies schedules, kinds of context parallelism, sharding groups,
            micro-batches and offload as well.
        assumed: interruptions, storage and start-up, where nothing is measured.
        prices: the price list; `capacity` (on-demand or spot) selects the row that prices the run.
        tokens: length of the training run, for its time and cost.
        ownership: assumptions for rent or buy.
        why: a layout (`tp=8,pp=3`): explain why it was not chosen.
        contexts: also find the longest sequence of each layout.
        launcher: torchtitan, megatron, deepspeed or cordee: write the settings that start the best layout.
        stage: a stage with a reference (`dpo`, `grpo,group=8`); None: plain or supervised training.
    """

    shape: ModelShape
    gpu: Gpu
    gpus: int
    settings: Settings = field(default_factory=Settings)
    layout: LayoutWanted = ANY_LAYOUT
    search: Breadth = "meshes"
    assumed: Assumptions = field(default_factory=Assumptions)
    prices: tuple[Price, ...] = ()
    capacity: Capacity = "on-demand"
    tokens: float | None = None
    ownership: Ownership | None = None
    why: str | None = None
    contexts: bool = False
    launcher: str | None = None
    stage: str | None = None

    @property
    def price(self) -> Price | None:
        """The price of this GPU in this kind of capacity."""
        return price_of(self.prices, self.gpu, self.capacity)

    def parsed_stage(self) -> Stage | None:
        """Return the stage that is asked for; None for plain or supervised training.

        Raises:
            LayoutError: it cannot be read, or contradicts the settings.
        """
        if self.stage is None:
            return None
        seq_tokens = self.settings.sequence(self.shape)
        return parse_stage(self.stage, seq_tokens=seq_tokens, adapters=self.settings.train != "full")

    def case(self, framework: Framework | None = None) -> Case:
        """Return what all candidates have in common; `framework` stands in where the settings name none.

        Raises:
            LayoutError: contradictory training settings, or an unknown launcher.
            CatalogueError: the GPU does not compute in this precision.
            ShapeError: a model that is planned for serving only.
        """
        refuse_serving_only(self.shape)
        settings = replace(self.settings, framework=self._framework() or framework)
        if self.launcher in LEFT_OUT:
            settings = replace(settings, model_code=settings.model_code or "hf")
        self.gpu.peak_flop_per_s(settings.precision)  # raises if it has no such precision
        if settings.train != "full" and self.layout.recompute == "selective":
            raise LayoutError("adapters have no selective recomputation", hint="use --recompute full or none")
        if settings.train != "full" and self.launcher not in (None, *WITH_ADAPTERS):
            hint = f"configure them in the script; --launch {WITH_ADAPTERS[0]} writes peft's settings"
            raise LayoutError(f"--launch {self.launcher} writes no adapters", hint=hint)
        training = settings.training(self.shape, self.gpus)
        if self.stage is None:
            return Case(self.shape, self._left(0.0), self.gpus, training)
        if self.launcher is not None:
            raise LayoutError(f"--launch {self.launcher} writes no {self.stage}", hint="configure it in the script")
        stage = self.parsed_stage()
        assert stage is not None, "the text of a stage is read or refused"
        training = with_stage(training, stage, asked_batch=settings.global_batch, gpus=self.gpus)
        resident = 0.0 if stage.rollouts is None else stage.rollouts.resident
        return Case(self.shape, self._left(resident), self.gpus, training)

    def _framework(self) -> Framework | None:
        """Return the framework that is asked for, or that of the launcher.

        Raises:
            LayoutError: an unknown launcher, or one that runs another framework.
        """
        asked = self.settings.framework
        if self.launcher is None:
            return asked
        check_launcher(self.launcher)
        its = FRAMEWORKS_OF.get(self.launcher)
        if its is not None and asked not in (None, its):
            hint = f"leave --framework out, or write --framework {its}"
            raise LayoutError(f"--launch {self.launcher} runs {its}, not {asked}", hint=hint)
        return its or asked

    def _left(self, resident: float) -> Gpu:
        """Return the GPU without the fraction of its memory that an engine keeps."""
        return replace(self.gpu, memory_bytes=round(self.gpu.memory_bytes * (1 - resident))) if resident else self.gpu


def refuse_serving_only(shape: ModelShape) -> None:
    """Refuse a model whose training the formulas of this room do not describe.

    Raises:
        ShapeError: recurrent layers, layers with heads of their own, an indexer, or experts on a projection.
    """
    latent, moe = shape.latent, shape.experts
    if shape.is_uniform and not (latent and latent.index_heads) and not (moe and moe.latent):
        return
    raise ShapeError(
        f"{shape.name}: training a model of the family {shape.family} is not planned, since its layers differ",
        hint="`cordee plan MODEL --gpus 8xH100 --trace` finds its memory; `cordee serve plan` plans how it is served",
    )

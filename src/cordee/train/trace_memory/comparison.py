"""A traced rank beside the plan of the same layout: which layout is traced, as which question, and what was found.

torch is imported in the process that answers, and not here.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from cordee.errors import CatalogueError, InputError, LayoutError, MissingExtraError, ScriptError, ShapeError
from cordee.hardware.catalog import Gpu
from cordee.near import did_you_mean
from cordee.plan.ask import Answer, Request, ask
from cordee.plan.buffers import context_bytes, cuda_bytes_of
from cordee.plan.layout import Layout
from cordee.plan.memory import RankMemory, rank_memory
from cordee.plan.replay import with_replay
from cordee.plan.request import refuse_serving_only
from cordee.plan.settings import Settings
from cordee.plan.training import PURE_BF16, Training
from cordee.plan.wanted import LayoutWanted
from cordee.train.trace_memory.answer import Traced
from cordee.train.trace_memory.question import MODEL_CODES, ModelCode, Question, Weights
from cordee.workload.load import load_config, load_shape
from cordee.workload.model import ModelShape

# Families whose code is written out here as torchtitan writes it.
_TITAN = ("llama", "mistral", "qwen2", "qwen3")
_NOT_TRACED = "only data and tensor parallel ranks of FSDP2 and DDP are traced"
UNPLANNED_SEQ_TOKENS = 2048
PATIENCE_S = 60.0
_ZERO: dict[int, Literal[0, 1, 2, 3]] = {0: 0, 1: 1, 2: 2, 3: 3}
_ERRORS = {each.exit_code: each for each in (InputError, ShapeError, LayoutError, ScriptError, MissingExtraError)}


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """A traced rank, and the plan of the same layout where the planner knows the model.

    `eager` is the same rank without the compiler, where the question is of compiled layers; `first` the plan's first
    layout, where that cannot be traced and another is, and `why_not_first` the reason.
    """

    model: str
    gpu: Gpu
    gpus: int
    layout: Layout
    question: Question
    traced: Traced
    planned: RankMemory | None
    eager: Traced | None = None
    first: Layout | None = None
    why_not_first: str | None = None

    @property
    def needed_bytes(self) -> int:
        """Bytes without which the step does not go through, with the context that torch does not count."""
        return self.traced.reserve.needed_bytes + round(float(context_bytes(self.layout, cuda_bytes_of(self.gpu))))

    @property
    def fits(self) -> bool:
        """Return whether the GPU has them."""
        return self.needed_bytes <= self.gpu.visible_bytes

    def document(self) -> dict[str, object]:
        """Return the comparison as JSON."""
        planned = None
        if self.planned is not None:
            moments = self.planned.worst_timeline
            planned = {
                "allocated_bytes": self.planned.worst.allocated_bytes,
                "reserved_bytes": self.planned.worst.held_bytes,
                "needed_bytes": self.planned.worst.reserved_bytes,
                "peak": self.planned.peak_event,
                "moments": {moment.event: round(float(moment.allocated_bytes)) for moment in moments},
                "parts": self.planned.worst.parts(),
            }
        return {
            "model": self.model,
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "layout": str(self.layout),
            "first": None if self.first is None else str(self.first),
            "why_not_first": self.why_not_first,
            "question": self.question.document(),
            "traced": self.traced.document(),
            "eager": None if self.eager is None else self.eager.document(),
            "planned": planned,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class Tracing:
    """The question of a user; `code` None takes torchtitan's for families that are written out so, without adapters.

    `on_slow` is called where a trace takes more than a minute.
    """

    model: str
    gpu: Gpu
    gpus: int
    code: str | None
    autocast: bool
    wanted: LayoutWanted
    settings: Settings
    on_slow: Callable[[], None] = lambda: None

    def compare(self, request: Request | None) -> TraceComparison:
        """Trace a layout beside its plan; None: the planner does not know the model.

        Raises:
            CordeeError: the model, the layout or the settings cannot be traced.
        """
        code = _code(self.model, self.code, adapted=self.settings.train != "full")
        if request is None:
            return self._traced(code, *_unplanned(self.wanted, self.settings, self.gpus))
        if code == "hf" and request.settings.model_code is None and request.settings.train == "full":
            # The plan beside a trace is of the code that is traced; adapters are planned as that anyway.
            request = replace(request, settings=replace(request.settings, model_code=code))
        layout, training, first = _planned(request, code)
        why_not = None if first is None else _NOT_TRACED
        try:
            found = self._traced(code, layout, training)
        except LayoutError as error:
            # Only the model's own code knows whether it can be divided.
            if layout.tp == 1 or request.layout.tp is not None:
                raise
            undivided = replace(request, layout=replace(request.layout, tp=1))
            first, why_not = first or layout, error.message
            layout, training, _ = _planned(undivided, code)
            found = self._traced(code, layout, training)
        planned = _planned_memory(request.shape, layout, training, self.gpu)
        return replace(found, planned=planned, first=first, why_not_first=why_not)

    def _traced(self, code: ModelCode, layout: Layout, training: Training) -> TraceComparison:
        """Trace a layout, with and without the compiler where it is asked for."""
        compiled = self.settings.compiled
        question = _question(self.model, code, layout, training, autocast=self.autocast, compiled=compiled)
        eager = ask_process(replace(question, compiled=False), self.on_slow) if question.compiled else None
        traced = ask_process(question, self.on_slow)
        return TraceComparison(self.model, self.gpu, self.gpus, layout, question, traced, None, eager)


def _planned_memory(shape: ModelShape, layout: Layout, training: Training, gpu: Gpu) -> RankMemory:
    """Return the plan's memory of a layout, with the segments that a replay of the formulas' tensors keeps."""
    return with_replay(rank_memory(shape, layout, training, cuda_bytes_of(gpu)), shape, layout, training)


def is_planned(model: str) -> bool:
    """Return whether the planner has formulas for training a model; one without them may still have code."""
    if ":" in model:
        return False
    try:
        refuse_serving_only(load_shape(model))
    except ShapeError:
        load_config(model)
        return False
    return True


def _code(model: str, code: str | None, *, adapted: bool) -> ModelCode:
    """Return the code that is traced; adapters are planned as peft writes them over transformers' models."""
    if code == "megatron":
        raise InputError(
            "Megatron-LM's code cannot be traced: Transformer Engine's kernels run on a GPU alone",
            hint="cordee plan --framework megatron counts its tensors; its measured peaks are met to 0.2 %",
        )
    if code is None and adapted:
        return "hf"
    if code is None:
        family = None if ":" in model else load_config(model).get("model_type")
        return "torchtitan" if family in _TITAN else "hf"
    for known in MODEL_CODES:
        if code == known:
            return known
    raise InputError(f"unknown model code {code!r}", hint=did_you_mean(code, MODEL_CODES))


def _planned(request: Request, code: ModelCode) -> tuple[Layout, Training, Layout | None]:
    """Return the best layout of a plan that can be traced, and the best one where that is another that cannot.

    The nearest to fitting where none fits.
    """
    first = _ranked(answer := ask(request))[0]
    adapted, wanted = answer.training.adapters is not None, request.layout
    if _traceable(first, code, adapted=adapted):
        return first, answer.training, None
    axes = ("pp", "cp", "ep", *(("tp",) if adapted else ()))
    alone: dict[str, Any] = {axis: 1 for axis in axes if getattr(wanted, axis) is None}
    sp = False if wanted.sp is None and code == "hf" else wanted.sp
    narrower = replace(wanted, **alone, sp=sp, offload=wanted.offload or "none")
    ranked = _ranked(ask(replace(request, layout=narrower)))
    found = next((layout for layout in ranked if _traceable(layout, code, adapted=adapted)), None)
    if found is None:
        refused = f"no layout of this plan can be traced, such as {ranked[0]}"
        hint = "data and tensor parallel ranks are traced: --layout fsdp=8, fsdp=4,tp=2 or dp=8"
        raise LayoutError(refused, hint=hint)
    return found, answer.training, first


def _ranked(answer: Answer) -> list[Layout]:
    return [each.layout for each in (*answer.fitting, *answer.rejected)]


def _unplanned(wanted: LayoutWanted, settings: Settings, gpus: int) -> tuple[Layout, Training]:
    """Return the layout and training of a model that the planner has no formulas for: FSDP2 over what tp leaves."""
    plainest = wanted.plainest(gpus)
    layout = replace(plainest, zero=wanted.zero if wanted.zero is not None else 3 * (plainest.dp > 1))
    if layout.gpus != gpus or not _traceable(layout, "hf"):
        raise LayoutError(f"{layout} on {gpus} GPUs cannot be traced", hint="leave --layout out, or give fsdp=N")
    batch = settings.global_batch or layout.dp * layout.micro_batch
    adapters = settings.adapters(None)
    seq_tokens, optimizer = settings.seq_tokens or UNPLANNED_SEQ_TOKENS, settings.optimizer_of(adapters)
    return layout, Training(seq_tokens, batch, optimizer, settings.precision, adapters=adapters)


def _traceable(layout: Layout, code: ModelCode, *, adapted: bool = False) -> bool:
    """Return whether rank 0 stands for all: no pipeline, no exchange of tokens, no copies of what tp divides.

    Transformers' plans of tensor parallelism leave sequences whole, and adapters' matrices are not divided.
    """
    plain = layout.pp == layout.cp == layout.ep == 1 and layout.offload == "none"
    divided_copies = layout.tp > 1 and layout.zero < 2 and layout.dp > 1
    cut = layout.tp > 1 and (adapted or (layout.sp and code == "hf"))
    return plain and layout.recompute_layers is None and not divided_copies and not cut


def _question(
    model: str, code: ModelCode, layout: Layout, training: Training, *, autocast: bool, compiled: bool
) -> Question:
    """Return the question of a layout.

    Raises:
        InputError: the settings have no code that could be run.
    """
    if training.precision not in ("bf16", "fp16", "fp32") or training.tuning.frozen:
        what = "frozen parts" if training.tuning.frozen else training.precision
        raise InputError(f"{what} cannot be traced", hint="trace the full training in bf16; the plan knows the rest")
    if training.loss in ("fused", "chunked") or (training.loss == "compiled" and not compiled):
        hint = "leave --loss out to trace the eager one, or write yours into a function: mymodels:model"
        raise InputError(f"a {training.loss} loss is none of the model's own code", hint=hint)
    if not training.optimizer.name.startswith("adamw") or training.optimizer.name not in ("adamw", PURE_BF16):
        hint = f"trace it with adamw or {PURE_BF16}"
        raise InputError(f"{training.optimizer.name} is no optimizer of torch's own", hint=hint)
    adapters = training.adapters
    if adapters is not None and adapters.joined:
        hint = "leave --fused-qkv out; the plan knows it"
        raise InputError("products are traced as the model's own code has them: LitGPT's is not traced", hint=hint)
    recompute: Literal["none", "selective", "full"] = layout.recompute
    sharded = layout.zero >= 2 and layout.data_ranks > 1
    if compiled and (layout.tp > 1 or adapters is not None or not (sharded or layout.data_ranks == 1)):
        hint = "trace it with FSDP2 or on one GPU, or leave --compile out"
        raise InputError(
            f"compiled layers are not traced with tensor parallelism, DDP or adapters: {layout}", hint=hint
        )
    return Question(
        config={} if ":" in model else load_config(model),
        function=model if ":" in model else None,
        code=code,
        seq_tokens=training.seq_tokens,
        micro_batch=layout.micro_batch,
        micro_batches=min(2, layout.micro_batches(training.global_batch)),
        fsdp=layout.shard_ranks if sharded else 1,
        replicas=layout.data_ranks // (layout.shard_ranks if sharded else 1),
        zero=_ZERO[layout.zero],
        tp=layout.tp,
        sp=layout.sp and layout.tp > 1,
        adapters=adapters,
        weights=_weights(training, layout, autocast=autocast),
        recompute=recompute,
        compiled=compiled,
    )


def _weights(training: Training, layout: Layout, *, autocast: bool) -> Weights:
    if training.precision == "fp32":
        return "fp32"
    if training.optimizer.name == PURE_BF16:
        return "bf16"
    return "autocast" if autocast or layout.zero < 2 else "mixed"


def ask_process(question: Question, on_slow: Callable[[], None], patience_s: float = PATIENCE_S) -> Traced:
    """Return the answer of a process of its own: torch is not imported here.

    Raises:
        CordeeError: as the process says.
    """
    argv = [sys.executable, "-m", "cordee.train.trace_memory"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            answer, errors = _answer(process, question, on_slow, patience_s)
        except BaseException:
            process.kill()
            raise
    try:
        found = json.loads(answer)
    except ValueError:
        last = (errors.strip().splitlines() or ["without a word"])[-1]
        raise InputError(f"the model's code failed: {last}", hint=f"exit code {process.returncode}") from None
    if "error" in found:
        raise _ERRORS.get(found["exit_code"], CatalogueError)(found["error"], hint=found["hint"])
    return Traced.read(found)


def _answer(
    process: subprocess.Popen[str], question: Question, on_slow: Callable[[], None], patience_s: float
) -> tuple[str, str]:
    """Return what the process of a trace writes, and its errors."""
    try:
        return process.communicate(json.dumps(question.document()), timeout=patience_s)
    except subprocess.TimeoutExpired:
        on_slow()
        return process.communicate()

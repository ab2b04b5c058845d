"""Part 1: the memory that a model needs before its first token, and the layouts that fit. The planner computes all."""

from dataclasses import dataclass

from cordee.demo import claims
from cordee.demo.narrator import Narrator
from cordee.hardware.load import load_catalogue
from cordee.plan import Answer, Assumptions, Request, Settings, ask
from cordee.plan.candidates import Candidate
from cordee.plan.expect import DEFAULTS
from cordee.plan.memory import state_bytes
from cordee.plan.search import fewest_gpus_to_hold
from cordee.plan.survive import Survival
from cordee.units import format_bytes, format_duration
from cordee.view.memory import MemoryBar, memory_html
from cordee.workload.load import load_shape

GPUS = 64
LLAMA_3_70B_PARAMETERS = 70_553_706_496  # the published model's own count
SHOWN = 4


@dataclass(frozen=True, slots=True)
class Sizing:
    """The plan, for later parts."""

    plan: Answer
    survival: Survival
    step_s: float


def show_memory(narrator: Narrator) -> Sizing:
    """Plan two models, check the known figures, and show the layouts against the memory of a GPU."""
    catalogue = load_catalogue()
    gpu = catalogue.find_gpu("H100")
    gpu_memory = format_bytes(gpu.visible_bytes)
    lead = (
        "Training keeps 16 bytes for each parameter: the weight, its gradient, a precise copy and two averages of the "
        f"optimizer. One GPU has {gpu_memory}. The question is where the rest goes."
    )
    with narrator.part("The memory", lead):
        shape = load_shape("llama-3-70b")
        plan = ask(Request(shape=shape, gpu=gpu, gpus=GPUS, assumed=Assumptions(mtbi_s=DEFAULTS.reclaim_mtbi_s)))
        assert plan.best is not None and plan.best.step_s is not None, "Llama-3-70B fits 64 H100s"
        narrator.claim(
            claims.parameters(
                f"Llama-3-70B has {LLAMA_3_70B_PARAMETERS:,} parameters", shape.parameters, LLAMA_3_70B_PARAMETERS
            )
        )
        narrator.claim(claims.weight(f"It weighs 1.129 TB, against {gpu_memory} a GPU", plan.state_bytes, "1.129 TB"))
        _show_large(narrator)
        _show_layouts(narrator, plan)
    return Sizing(plan, plan.survival, plan.best.step_s)


def _show_large(narrator: Narrator) -> None:
    gpu = load_catalogue().find_gpu("H100")
    shape = load_shape("llama-3-405b")
    n_bytes = state_bytes(shape, Settings(optimizer="adamw-8bit").training(shape, GPUS))
    says = "Llama-3-405B with BF16 weights and gradients and 8-bit Adam weighs 2.448 TB"
    narrator.claim(claims.weight(says, n_bytes, "2.448 TB"))
    fewest = fewest_gpus_to_hold(n_bytes, gpu)
    measured = f"{n_bytes:,} bytes / {gpu.visible_bytes:,} bytes a GPU = {n_bytes / gpu.visible_bytes:.2f}"
    narrator.claim(claims.check(fewest == 29, "Its state alone needs 29 GPUs, before one activation", measured))


def _show_layouts(narrator: Narrator, plan: Answer) -> None:
    gpu, shown = plan.request.gpu, (*plan.fitting[:SHOWN], *plan.rejected[:SHOWN])
    narrator.screen.paragraph(
        f"Of the layouts on {plan.request.gpus} x {gpu.name}, {len(plan.fitting)} fit and {len(plan.rejected)} do not:"
    )
    bars = [_bar(candidate) for candidate in shown]
    verdicts = [(bar, _verdict(each), each.fits) for bar, each in zip(bars, shown, strict=True)]
    narrator.screen.memory(verdicts, gpu.visible_bytes)
    narrator.figure(memory_html(bars, gpu.visible_bytes))
    held = {str(candidate.layout): _held_bytes(candidate) for candidate in (*plan.fitting, *plan.rejected)}
    narrator.claim(claims.holds_the_state(held, plan.state_bytes))
    narrator.note(f"cordee plan llama-3-70b --gpus {plan.request.gpus}xH100 shows all of them.")


def _bar(candidate: Candidate) -> MemoryBar:
    note = "" if candidate.fits else f"+{format_bytes(candidate.shortfall_bytes)}"
    return MemoryBar(str(candidate.layout), candidate.memory.worst.parts(), note)


def _held_bytes(candidate: Candidate) -> int:
    """Return weights, gradients and optimizer on all GPUs together, copies included."""
    stages, copies = candidate.memory.stages, candidate.layout.tp * candidate.layout.dp
    return copies * sum(stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes for stage in stages)


def _verdict(candidate: Candidate) -> str:
    if not candidate.fits:
        return f"+{candidate.shortfall_bytes:,} bytes"
    step = f", {format_duration(candidate.step_s)} a step" if candidate.step_s else ""
    return f"{format_bytes(candidate.peak_bytes)}{step}"

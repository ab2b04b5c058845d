"""Part 1: what a model weighs before its first token, and which layouts fit. The planner says it all."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from cordee.cli.plan_text import COLOURS
from cordee.cli.story import claims
from cordee.cli.story.teller import Teller
from cordee.hardware.load import load_catalogue
from cordee.plan import Answer, Assumptions, Request, Settings, ask
from cordee.plan.answer import Candidate
from cordee.plan.expect import DEFAULTS
from cordee.plan.memory import state_bytes
from cordee.plan.search import fewest_gpus_to_hold
from cordee.plan.survive import Survival
from cordee.units import format_bytes, format_duration
from cordee.view.memory import PARTS, WALL, MemoryBar, full_scale_bytes, memory_cells, memory_svg
from cordee.workload.load import load_shape

GPUS = 64
LLAMA_3_70B_PARAMETERS = 70_553_706_496  # the published model's own count
SHOWN = 4
BAR_WIDTH = 26


@dataclass(frozen=True, slots=True)
class Bill:
    """What later parts need of the plan."""

    plan: Answer
    survival: Survival
    step_s: float


def tell_bill(teller: Teller) -> Bill:
    """Plan two models, check the known figures, and show the layouts against the wall."""
    catalogue = load_catalogue()
    gpu = catalogue.find_gpu("H100")
    wall = format_bytes(gpu.memory_bytes)
    lead = (
        "Training keeps 16 bytes for each parameter: the weight, its gradient, a precise copy and two averages of the "
        f"optimizer. One GPU has {wall}. The question is where the rest goes."
    )
    with teller.part("The bill", lead):
        shape = load_shape("llama-3-70b")
        plan = ask(Request(shape=shape, gpu=gpu, gpus=GPUS, assumed=Assumptions(mtbi_s=DEFAULTS.reclaim_mtbi_s)))
        assert plan.best is not None and plan.best.step is not None, "Llama-3-70B fits 64 H100s"
        teller.claim(
            claims.parameters(
                f"Llama-3-70B has {LLAMA_3_70B_PARAMETERS:,} parameters", shape.parameters, LLAMA_3_70B_PARAMETERS
            )
        )
        teller.claim(claims.bill(f"It weighs 1.129 TB, against {wall} a GPU", plan.state_bytes, "1.129 TB"))
        _tell_large(teller)
        _tell_layouts(teller, plan)
    return Bill(plan, plan.survival, plan.best.step.total_s)


def _tell_large(teller: Teller) -> None:
    gpu = load_catalogue().find_gpu("H100")
    shape = load_shape("llama-3-405b")
    n_bytes = state_bytes(shape, Settings(optimizer="adamw-8bit").training(shape, GPUS))
    says = "Llama-3-405B with BF16 weights and gradients and 8-bit Adam weighs 2.435 TB"
    teller.claim(claims.bill(says, n_bytes, "2.435 TB"))
    fewest = fewest_gpus_to_hold(n_bytes, gpu)
    measured = f"{n_bytes:,} bytes / {gpu.memory_bytes:,} bytes a GPU = {n_bytes / gpu.memory_bytes:.2f}"
    teller.claim(claims.check(fewest == 31, "That is 31 GPUs only to hold it, before one activation", measured))


def _tell_layouts(teller: Teller, plan: Answer) -> None:
    fitting, rejected = plan.fitting[:SHOWN], plan.rejected[:SHOWN]
    teller.say(
        f"Of the layouts on {plan.request.gpus} x {plan.request.gpu.name}, {len(plan.fitting)} fit and "
        f"{len(plan.rejected)} do not:"
    )
    shown = [_bar(candidate) for candidate in (*fitting, *rejected)]
    names = max(len(bar.label) for bar in shown)
    for candidate, bar in zip((*fitting, *rejected), shown, strict=True):
        row = Text(f"{bar.label:<{names}}  ").append(
            _drawn(bar, shown, plan.request.gpu.memory_bytes, teller.ascii_only)
        )
        teller.line(None, row.append(f"  {_verdict(candidate)}", "" if candidate.fits else "red"))
    teller.figure(memory_svg(shown, plan.request.gpu.memory_bytes))
    held = {str(candidate.layout): _held_bytes(candidate) for candidate in (*plan.fitting, *plan.rejected)}
    teller.claim(claims.holds_the_bill(held, plan.state_bytes))
    teller.note(f"cordee plan llama-3-70b --gpus {plan.request.gpus}xH100 shows all of them.")


def _bar(candidate: Candidate) -> MemoryBar:
    note = "" if candidate.fits else f"+{format_bytes(candidate.shortfall_bytes)}"
    return MemoryBar(str(candidate.layout), candidate.memory.worst.parts(), note)


def _held_bytes(candidate: Candidate) -> int:
    """Weights, gradients and optimizer on all GPUs together, copies included."""
    stages, alike = candidate.memory.stages, candidate.layout.tp * candidate.layout.dp
    return alike * sum(stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes for stage in stages)


def _verdict(candidate: Candidate) -> str:
    if not candidate.fits:
        return f"+{candidate.shortfall_bytes:,} bytes"
    step = f", {format_duration(candidate.step.total_s)} a step" if candidate.step else ""
    return f"{format_bytes(candidate.peak_bytes)}{step}"


def _drawn(bar: MemoryBar, shown: Sequence[MemoryBar], wall_bytes: int, ascii_only: bool) -> Text:
    drawn = Text()
    for part, cells in memory_cells(bar, wall_bytes, full_scale_bytes(shown, wall_bytes), BAR_WIDTH):
        glyph = WALL[ascii_only] if part == "wall" else PARTS[part][1][ascii_only] if part else " "
        drawn.append(glyph * cells, COLOURS.get(part, ""))
    return drawn

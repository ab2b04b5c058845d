"""The reason against a layout: it does not divide, it does not fit, or another is faster, with the numbers."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from cordee.plan.candidates import Candidate, Layouts, Remedy
from cordee.plan.optimum import optimum
from cordee.plan.rules import first_misfit
from cordee.plan.search import default_choices, evaluate
from cordee.plan.wanted import LayoutWanted, parse_layout
from cordee.units import format_bytes

Ground = Literal["does not divide", "does not fit", "slower", "the best"]


@dataclass(frozen=True, slots=True)
class Why:
    """Why one layout is not the best: it does not divide, does not fit, or is slower.

    `more_s` is the time that it takes longer than the best one, by part of the step, the largest first. `hint` names
    the nearest layout that divides or fits.
    """

    asked: str
    ground: Ground
    message: str
    hint: str
    candidate: Candidate | None
    best: Candidate | None
    more_s: tuple[tuple[str, float], ...] = ()


def why_not(plan: Layouts, text: str, remedies: Callable[[], tuple[Remedy, ...]]) -> Why:
    """Return why the best layout is not this one. What the text leaves open is filled as well as it can be.

    Raises:
        LayoutError: the text cannot be read.
    """
    wanted = parse_layout(text)
    case = plan.case
    choices = replace(default_choices(case), micro_batches=None)
    winner, _ = optimum(case, wanted, choices)
    if winner is None:
        return _does_not_divide(plan, text, wanted)
    candidate = evaluate(case, winner.layout, plan.price)
    if not candidate.fits:
        return _does_not_fit(plan, text, wanted, candidate, remedies)
    best = plan.best
    assert candidate.step is not None, "it fits"
    seconds = candidate.step.total_s
    if best is None or best.step is None or seconds <= best.step.total_s:
        message = f"{candidate.layout} is the best: {seconds:,.2f} s a step, {format_bytes(candidate.peak_bytes)}"
        hint = "" if best is None or best.layout == candidate.layout else f"the plan has {best.layout}"
        return Why(text, "the best", message, hint, candidate, best)
    least = best.step.total_s
    more = {part.name.removesuffix("_s"): getattr(candidate.step, part.name) - getattr(best.step, part.name)
            for part in fields(candidate.step)}  # fmt: skip
    parts = tuple(sorted(((name, each) for name, each in more.items() if each), key=lambda pair: -abs(pair[1])))
    faster = sum(c.step.total_s < seconds for c in plan.fitting if c.step is not None)
    message = (
        f"{candidate.layout} fits with {format_bytes(candidate.peak_bytes)} but takes {seconds:,.2f} s a step, "
        f"{seconds / least - 1:.1%} more than {best.layout} with {least:,.2f} s; {faster} meshes are faster"
    )
    hint = "; ".join(f"{name} {seconds:+,.2f} s" for name, seconds in parts[:3])
    return Why(text, "slower", message, hint, candidate, best, parts)


def _does_not_divide(plan: Layouts, text: str, wanted: LayoutWanted) -> Why:
    case = plan.case
    misfit = first_misfit(wanted.plainest(case.gpus), case.shape, case.gpus, case.training)
    message, hint = misfit or (f"no layout like {text} divides the job", "name fewer axes")
    return Why(text, "does not divide", message, hint, None, plan.best)


def _does_not_fit(
    plan: Layouts, text: str, wanted: LayoutWanted, candidate: Candidate, remedies: Callable[[], tuple[Remedy, ...]]
) -> Why:
    parts = sorted(candidate.memory.worst.parts().items(), key=lambda pair: -pair[1])
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts[:3])
    message = (
        f"{candidate.layout} needs {format_bytes(candidate.peak_bytes)} on its fullest GPU (stage "
        f"{candidate.memory.worst_stage}, at {candidate.memory.peak_event}), {format_bytes(candidate.shortfall_bytes)} "
        f"more than the {format_bytes(candidate.gpu_memory_bytes)} it has: {largest}"
    )
    return Why(text, "does not fit", message, _hint(plan, wanted, remedies), candidate, plan.best)


def _hint(plan: Layouts, wanted: LayoutWanted, remedies: Callable[[], tuple[Remedy, ...]]) -> str:
    """Say what makes this very layout fit; else what fits at all."""
    case, free = plan.case, default_choices(plan.case)
    tries = (
        ("recomputation", replace(wanted, recompute="full"), free),
        ("more sharding", replace(wanted, zero=3, shard=None), free),
        ("both", replace(wanted, zero=3, shard=None, recompute="full"), free),
        ("offload to the host", wanted, replace(free, offloads=("optimizer", "activations", "both"))),
    )
    for how, other, choices in tries:
        winner, _ = optimum(case, other, choices)
        if winner is not None and winner.seconds is not None:
            return f"with {how} it fits: {winner.layout}, {format_bytes(winner.peak_bytes)}"
    if plan.best is not None:
        return f"{plan.best.layout} fits with {format_bytes(plan.best.peak_bytes)}"
    return "; or ".join(f"{remedy.change}: {remedy.candidate.layout}" for remedy in remedies())

"""Entry point of the planner for training: `ask(Request) -> Answer`, and `ask_curve` for a range of GPU counts.

Times and bytes are modelled from vendor data and from tables fitted to published measurements; what is assumed instead,
the answer marks. The command line, a notebook, admission, the comparison with a profile and the demo all ask here, so
they make the same assumptions.

The training process does not call the planner; it gets its `Estimate` in CORDEE_ESTIMATE, for its first save and
restart. Once it has measured a save, it sets its interval by `plan.interval`, with the same optimum
(`survive.best_period_s`) for its own costs and failures.
"""

from collections.abc import Callable
from typing import TypeVar

from cordee.plan.answer import Answer
from cordee.plan.candidates import Layouts
from cordee.plan.curve import Curve, scaling_curve, sizes
from cordee.plan.expect import expectations
from cordee.plan.launch import expressible
from cordee.plan.optimum import Case
from cordee.plan.rent_or_buy import compare
from cordee.plan.request import Request
from cordee.plan.search import best_layout, best_per_mesh, default_choices
from cordee.plan.space import ALL_CHOICES, Choices
from cordee.plan.training import Framework

__all__ = ["Answer", "Request", "ask", "ask_curve"]

Found = TypeVar("Found", Layouts, Curve)

# Tried in this order for a job that does not name its framework, because each allocates other buffers in addition to
# the model state.
ANY_FRAMEWORK: tuple[Framework, ...] = ("torch", "megatron")


def ask(request: Request) -> Answer:
    """Evaluate the layouts of a model on these GPUs, and add the costs of interruptions, a run and owned GPUs.

    If no layout fits, `Answer.best` is None, and `nearest` is the layout that exceeds the GPU's memory least.

    Raises:
        LayoutError: the layout or the settings do not divide the model, the GPUs or the batch.
        CatalogueError: the GPU does not compute in this precision.
        ShapeError: a model that is planned for serving only.
    """
    layouts = _in_its_framework(request, lambda case: _layouts(request, case))
    # After a notice the last save waits for the end of the step. A layout that does not fit has no step time; 0 s of it
    # leave the costs of saving and restarting.
    step_s = layouts.nearest.step_s or 0.0
    expected = expectations(layouts.case, assumed=request.assumed, prices=request.prices, step_s=step_s)
    rent_or_buy = None if request.ownership is None else compare(request.ownership)
    return Answer(request, layouts, expected, rent_or_buy)


def ask_curve(request: Request, first: int) -> Curve:
    """Compute how fast the same optimizer step runs on `first` GPUs, twice as many, ..., and the request's number.

    Each size has its best layout; the search "meshes" is as "best".

    Raises:
        LayoutError: an empty range, or contradictory settings.
        CatalogueError: the GPU does not compute in this precision.
        ShapeError: a model that is planned for serving only.
    """
    counts = sizes(first, request.gpus)
    return _in_its_framework(
        request,
        lambda case: scaling_curve(
            case, counts, price=request.price, wanted=request.layout, choices=lambda size: _choices(request, size)
        ),
    )


def _in_its_framework(request: Request, evaluate: Callable[[Case], Found]) -> Found:
    """Evaluate the request in its framework; if it names none, in the first one in which any layout fits."""
    frameworks = ANY_FRAMEWORK if request.settings.framework is None else (request.settings.framework,)
    found: list[Found] = []
    for framework in frameworks:
        found.append(evaluate(request.case(framework)))
        if found[-1].fits:
            return found[-1]
    return found[0]


def _layouts(request: Request, case: Case) -> Layouts:
    if request.search == "best":
        return best_layout(case, request.layout, request.price)
    wanted, choices = expressible(request.launcher, request.layout, _choices(request, case))
    return best_per_mesh(case, wanted, choices, request.price)


def _choices(request: Request, case: Case) -> Choices:
    return ALL_CHOICES if request.search == "everything" else default_choices(case)

"""The door of the planner: `ask(Request) -> Answer`, and `ask_curve` for a range of GPU counts.

Training only; times and bytes are modelled, from tables that were fitted to published measurements. The command line, a
notebook, admission, the comparison with a profile and the demo all ask here, so they make the same assumptions.

A trainer does not ask: it has the `Estimate` of admission's answer (CORDEE_ESTIMATE), by which it judges its first save
and restart. Once it has measured a save, it sets its interval by `plan.interval`, with the same optimum
(`survive.best_period_s`) for its own costs and failures.
"""

from cordee.plan.answer import Answer
from cordee.plan.candidates import Layouts
from cordee.plan.curve import Curve, scaling_curve, sizes
from cordee.plan.expect import expectations
from cordee.plan.rent_or_buy import compare
from cordee.plan.request import Request
from cordee.plan.search import best_layout, every_mesh, ordinary
from cordee.plan.space import EVERYTHING
from cordee.plan.training import Framework

__all__ = ["Answer", "Request", "ask", "ask_curve"]

# Tried in this order for a job that does not name its framework: they hold different buffers beside the model.
ANY_FRAMEWORK: tuple[Framework, ...] = ("torch", "megatron")


def ask(request: Request) -> Answer:
    """Judge the layouts of a model on these GPUs, and add what interruptions, a run and owning the GPUs would cost.

    If no layout fits, `Answer.best` is None, and `nearest` is the layout that exceeds the GPU's memory least.

    Raises:
        LayoutError: the layout or the settings do not divide the model, the GPUs or the batch.
        CatalogueError: the GPU does not compute in this precision.
    """
    layouts = _layouts(request)
    # After a notice, the last save waits for the end of the step in progress. A layout that does not fit has no step.
    step_s = layouts.nearest.step_s or 0.0
    expected = expectations(layouts.case, assumed=request.assumed, prices=request.prices, step_s=step_s)
    rent_or_buy = None if request.ownership is None else compare(request.ownership)
    return Answer(request, layouts, expected, rent_or_buy)


def ask_curve(request: Request, first: int) -> Curve:
    """Compute how fast the same optimizer step runs on `first` GPUs up to the request's number.

    Raises:
        LayoutError: an empty range, or contradictory settings.
        CatalogueError: the GPU does not compute in this precision.
    """
    counts = sizes(first, request.gpus)
    return scaling_curve(request.case(), counts, price=request.price, wanted=request.layout)


def _layouts(request: Request) -> Layouts:
    """Judge the layouts for the request's framework; without one, for the first framework in which any layout fits."""
    frameworks = ANY_FRAMEWORK if request.settings.framework is None else (request.settings.framework,)
    judged = (_judge(request, framework) for framework in frameworks)
    first = next(judged)
    return first if first.fitting else next((layouts for layouts in judged if layouts.fitting), first)


def _judge(request: Request, framework: Framework) -> Layouts:
    case = request.case(framework)
    if request.search == "best":
        return best_layout(case, request.layout, request.price)
    choices = EVERYTHING if request.search == "everything" else ordinary(case)
    return every_mesh(case, request.layout, choices, request.price)

"""One question, one answer: `ask(Request) -> Answer`.

The command line, a notebook, admission, the profile's comparison and the demo ask here and nowhere else, so that they
all assume the same.
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

# Frameworks whose buffers may hold a job that does not name its own.
ANY_FRAMEWORK: tuple[Framework, ...] = ("torch", "megatron")


def ask(request: Request) -> Answer:
    """Answer a request: the same request always has the same answer.

    Raises:
        LayoutError: the layout or the settings do not divide the model, the GPUs or the batch.
        CatalogueError: the GPU does not compute in this precision.
    """
    layouts = _layouts(request)
    # A last save has to wait for the end of the step in progress; without a layout that fits there is none.
    step_s = layouts.nearest.step_s or 0.0
    expected = expectations(layouts.case, assumed=request.assumed, prices=request.prices, step_s=step_s)
    rent_or_buy = None if request.ownership is None else compare(request.ownership)
    return Answer(request, layouts, expected, rent_or_buy)


def ask_curve(request: Request, first: int) -> Curve:
    """Answer how speed grows from `first` GPUs to the request's, with one and the same step.

    Raises:
        LayoutError: an empty range, or settings that cannot be.
    """
    counts = sizes(first, request.gpus)
    return scaling_curve(request.case(), counts, price=request.price, wanted=request.layout)


def _layouts(request: Request) -> Layouts:
    """Judge the layouts in the buffers of the request's framework; of any framework, in the first that hold one."""
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

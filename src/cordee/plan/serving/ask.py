"""The serving door: `ask(ServingRequest) -> ServingAnswer`.

Each layout of a replica that divides the model is judged in each format, and ranked by the price of a million tokens
among those that meet the SLO. The command line and notebooks ask here, so they make the same assumptions.
"""

from cordee.plan.serving.answer import ServingAnswer
from cordee.plan.serving.disaggregation import PhasesWanted, check_phases
from cordee.plan.serving.judge import judge_all, rank
from cordee.plan.serving.request import ServingRequest

__all__ = ["ServingAnswer", "ServingRequest", "ask"]


def ask(request: ServingRequest, phases: PhasesWanted | None = None) -> ServingAnswer:
    """Judge the layouts of a replica on these GPUs under the request's traffic.

    With `phases`, the answer also has a plan of replicas for prefill and others for decode.

    If none meets the SLO, `ServingAnswer.best` is None and `nearest` is the one that misses them least, or that
    lacks the fewest bytes.

    Raises:
        LayoutError: no layout that is asked for divides the model.
        CatalogueError: the GPU does not compute in a format.
        SpecError: phases for a fixed concurrency.
    """
    if phases is not None:
        check_phases(request)
    return ServingAnswer(request, tuple(sorted(judge_all(request), key=rank)), phases)

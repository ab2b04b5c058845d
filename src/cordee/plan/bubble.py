"""How long a pipeline takes beyond the work of its busiest stage, by schedule. Sizes may be NumPy arrays."""

from typing import Any

from cordee.plan.layout import Schedule


def bubble_s(schedule: Schedule, pp: Any, chunks: Any, *, forward_s: Any, inner_s: Any, weight_s: Any) -> Any:
    """Idle seconds of one rank in a step, for stages that take the same time.

    Args:
        schedule: GPipe and 1F1B (arXiv:2104.04473, section 2.2) wait (p-1)(F+B); interleaving divides by the chunks;
            ZB-H1 waits (p-1)(F+B-W) of its own B and W, that is a third at F=B=W, ZB-H2 (p-1)(F+B-2W), both at least
            0, and ZB-V only what F, B and W differ (arXiv:2401.10241, section 2); DualPipe (p/2-1)(FB+B-3W) with FB a
            forward and a backward that overlap (deepseek-ai/DualPipe README); DualPipeV is one of 2p stages cut in
            half: (p-1)(FB+B-3W) of a chunk, which is half as long. ZB-H2 and ZB-V reach theirs if no barrier stands
            between steps; else they wait (p-1) times the forward of a stage. `pipeline/` has them all as tables.
        pp: stages.
        chunks: pieces of the model on one rank.
        forward_s: F of one micro-batch over all layers of a rank.
        inner_s: B, the gradient of its input.
        weight_s: W, the gradient of its weights.

    >>> second = {"forward_s": 1.0, "inner_s": 1.0, "weight_s": 1.0}
    >>> bubble_s("1f1b", 4, 1, **second), bubble_s("interleaved", 4, 3, **second)
    (9.0, 3.0)
    >>> bubble_s("zb-h1", 4, 1, **second), bubble_s("zb-h2", 4, 1, **second)
    (3.0, 0.0)
    """
    both = inner_s + weight_s
    whole = forward_s + both
    if schedule in ("1f1b", "gpipe"):
        return (pp - 1) * whole
    if schedule == "interleaved":
        return (pp - 1) * whole / chunks
    if schedule == "zb-h1":
        return (pp - 1) * _positive(forward_s + inner_s - weight_s)
    if schedule == "zb-h2":
        return (pp - 1) * _positive(forward_s + inner_s - 2 * weight_s)
    if schedule == "zb-v":
        # The fold divides a stage into two chunks; what is left is the difference between the three passes.
        return (pp - 1) * (_positive(forward_s - weight_s) + _positive(inner_s - weight_s)) / 2
    # Overlapping hides the traffic of a pair of passes, but both compute on the same chip: FB takes as long as F and B.
    waits = _positive(pp / 2 - 1) if schedule == "dualpipe" else (pp - 1) / 2
    return waits * _positive(whole + both - 3 * weight_s)


def _positive(value: Any) -> Any:
    """The value, or 0 where it is negative; for numbers and for arrays."""
    return value * (value > 0)

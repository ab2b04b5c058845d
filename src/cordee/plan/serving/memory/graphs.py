"""Bytes of CUDA graphs: an engine captures one of its decode step for each of some batch sizes."""

from cordee.plan.serving.case import ServingCase

CAPTURED_MAX = 512
"""The largest batch of which vLLM captures a graph."""


def graph_bytes(case: ServingCase) -> int:
    """Return the bytes of all captured graphs; 0 without them."""
    rule = case.engine.memory
    if case.eager:
        return 0
    plain, recurrent = rule.capture_bytes
    each = plain if case.shape.mixed is None or case.shape.mixed.recurrent is None else recurrent
    return each * captures(case.max_sequences) if each else rule.graph_bytes


def captures(max_sequences: int) -> int:
    """Return the graphs that vLLM captures: of pieces, up to twice the sequences, and of whole decode steps.

    >>> captures(1024), captures(256), captures(128)
    (102, 86, 54)
    """
    return _sizes(min(2 * max_sequences, CAPTURED_MAX)) + _sizes(min(max_sequences, CAPTURED_MAX))


def _sizes(most: int) -> int:
    """Return how many sizes up to this one are captured: 1, 2, 4, then each eighth to 256, each sixteenth beyond."""
    return sum(size <= most for size in (1, 2, 4)) + min(most, 256) // 8 + max(0, most - 256) // 16

"""GPU memory of a case as CUDA reports it: as it was read on the machine, or as its type usually shows."""

from cordee.plan.serving.case import ServingCase


def case_visible_bytes(case: ServingCase) -> int:
    """Return the total of a case's GPU: as it was read on the machine, or as its type usually shows."""
    return case.visible_bytes if case.visible_bytes is not None else case.gpu.visible_bytes

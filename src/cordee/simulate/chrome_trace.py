"""Simulated runs as a Chrome trace: a group for each policy's node, a line for each of its GPUs."""

from collections.abc import Sequence

from cordee.simulate.compare import Result
from cordee.simulate.gantt import Held
from cordee.view.chrome import Slice, Track, chrome_trace_text


def simulation_chrome_trace(results: Sequence[Result]) -> str:
    """Return the attempts on the nodes that a run keeps for drawing, one policy after the other."""
    slices: list[Slice] = []
    for order, result in enumerate(results):
        number = {node: order * len(result.gantt.nodes) + at for at, node in enumerate(result.gantt.nodes)}
        end_us = max((held.to_us for held in result.gantt.held), default=0)
        for held in result.gantt.window(0, end_us):
            slices += _slices(held, number[held.node], result.policy.name)
    policies = ", ".join(result.policy.name for result in results)
    return chrome_trace_text(slices, about={"traceName": policies})


def _slices(held: Held, group: int, policy: str) -> list[Slice]:
    """Return one slice for each GPU: each is a line."""
    end = "still runs" if held.outcome is None else str(held.outcome)
    return [
        Slice(
            Track(group, gpu, f"{policy}: {held.node}", f"GPU {gpu}"), held.job_id, "held", held.from_us,
            held.to_us - held.from_us, {"ended": end},
        )
        for gpu in held.gpus
    ]  # fmt: skip

"""Faults of nodes by the log: nodes that went down, and GPUs that became sick."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cordee.events import (
    NODE_LEFT,
    Event,
    Node,
    NodeDown,
    NodeReclaimed,
    NodeUncordoned,
    NodeUp,
    ServerShuttingDown,
    ServerUp,
)

LEMON = 3
"""The number of faults from which on a node is named a lemon."""

_NO_FAULTS = ("in use by", "left out by", "offered by another", "of another kind")
"""Beginnings of reasons for which a GPU is unavailable and not sick."""

_NO_DOWNS = (NODE_LEFT, "its agent is gone: another one has the node")
"""Beginnings of reasons for which a node is down and the machine has no fault."""


@dataclass(frozen=True, slots=True)
class NodeFault:
    """One fault of a node; it is settled if an operator has put the node back into use since."""

    at_us: int
    why: str
    is_settled: bool = False


def lemon_faults(faults: Sequence[NodeFault]) -> int:
    """Return the number of faults for which a node is a lemon; 0 if it is none."""
    open_faults = sum(not fault.is_settled for fault in faults)
    return open_faults if open_faults >= LEMON else 0


def faults_of(events: Iterable[Event]) -> dict[str, list[NodeFault]]:
    """Return the faults of each node, in order.

    A node that left, was reclaimed or went down with its server has no fault. GPUs that become sick together are one
    fault; a GPU that stays sick, or becomes so again, is counted once a claim.
    """
    found: dict[str, list[NodeFault]] = {}
    seen: dict[str, tuple[int, set[tuple[int, str]]]] = {}
    reclaimed: set[str] = set()
    is_ending = False
    for event in events:
        if isinstance(event, ServerUp | ServerShuttingDown):
            is_ending = isinstance(event, ServerShuttingDown)
        elif isinstance(event, NodeUncordoned):
            found[event.node] = [replace(fault, is_settled=True) for fault in found.get(event.node, [])]
        elif isinstance(event, NodeReclaimed):
            reclaimed.add(event.node)
        elif isinstance(event, NodeDown):
            if not (is_ending or event.node in reclaimed or event.why.startswith(_NO_DOWNS)):
                found.setdefault(event.node, []).append(NodeFault(event.at_us, event.why))
        elif isinstance(event, NodeUp):
            node = event.node
            epoch, known = seen.get(node.name, (node.epoch, set()))
            if epoch != node.epoch:
                known = set()
                reclaimed.discard(node.name)
            new = _sick(node) - known
            for why in sorted({why for _, why in new}):
                gpus = ", ".join(str(gpu) for gpu, each in sorted(new) if each == why)
                found.setdefault(node.name, []).append(NodeFault(event.at_us, f"GPU {gpus}: {why}"))
            seen[node.name] = node.epoch, known | new
    return found


def _sick(node: Node) -> set[tuple[int, str]]:
    return {(gpu, why) for gpu, why in zip(node.unavailable, node.unavailable_why, strict=True) if is_sick(why)}


def is_sick(why: str) -> bool:
    """Return whether a GPU that is unavailable for this reason is sick, and not merely in use."""
    return not why.startswith(_NO_FAULTS)

"""MIG instances at admission: the nodes that offer a profile, and the thousandths of a GPU that it counts as."""

from collections.abc import Sequence

from cordee.errors import SpecError, TooLargeError
from cordee.events import Node


def nodes_with(profile: str, eligible: Sequence[Node], nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes whose GPUs can have an instance of a profile.

    Args:
        profile: such as 1g.10gb.
        eligible: the nodes with GPUs that the job may get.
        nodes: all known nodes, for the hint.

    Raises:
        TooLargeError: none of them has it.
    """
    found = [node for node in eligible if _size(node, profile) is not None]
    if found:
        return found
    known = sorted({each.name for node in nodes if node.mig is not None for each in node.mig.profiles})
    have = f"the cluster has {', '.join(known)}" if known else "no GPU of the cluster is in MIG mode: label its node"
    raise TooLargeError(
        f"the job needs a MIG instance {profile}, and no node that it may use has that profile",
        hint=have if known else f"{have} mig=fixed, mig=dynamic or mig=switched",
    )


def instance_milli(profile: str, eligible: Sequence[Node]) -> int:
    """Return the thousandths of a GPU that an instance counts as: its memory slices of all (docs/decisions/0018).

    Raises:
        SpecError: it is of different sizes on the nodes: 1g.10gb is one slice of an H100 and two of an A100-40.
    """
    sizes: dict[int, set[str]] = {}
    for node in eligible:
        size = _size(node, profile)
        if node.mig is not None and size is not None:
            sizes.setdefault(node.mig.milli(size), set()).add(node.gpu_name)
    if len(sizes) == 1:
        return next(iter(sizes))
    named = "; ".join(f"{milli / 1000:g} of {' and '.join(sorted(gpus))}" for milli, gpus in sorted(sizes.items()))
    one = sorted(gpu for gpus in sizes.values() for gpu in gpus)[0]
    raise SpecError(
        f"{profile} is of different sizes in this cluster: {named}", hint=f"name one: gpus: {one}:{profile}"
    )


def _size(node: Node, profile: str) -> int | None:
    """Return the memory slices of a profile on a node; None if the node has none of it."""
    if node.mig is None:
        return None
    if node.mig.fixed is not None:
        return next((each[2] for each in node.mig.fixed if each[3] == profile), None)
    return next((each.size for each in node.mig.profiles if each.name == profile), None)

"""MIG instances at admission: the nodes that offer a profile, and the thousandths of a GPU that it counts as."""

from collections.abc import Sequence

from cordee.errors import CatalogueError, SpecError, TooLargeError
from cordee.events import Node
from cordee.hardware.catalog import Catalogue, Gpu
from cordee.near import did_you_mean


def check_profile(profile: str, gpu: str | None, nodes: Sequence[Node], catalogue: Catalogue) -> None:
    """Refuse a name that no GPU has for a profile, rather than look for a node that would have it.

    What a node offers is one, as are variants that only drivers know (`1g.24gb+gfx`) of a profile that is known.

    Raises:
        CatalogueError: the named GPU, or any of the catalogue if none is named, has no such profile.
    """
    if any(_size(node, profile) is not None for node in nodes):
        return
    wanted = None if gpu is None else catalogue.find_gpu(gpu)
    known = _profiles(catalogue.gpus if wanted is None else (wanted,))
    if profile.partition("+")[0] in known:
        return
    if wanted is not None and not known:
        hint = (
            f"leave {profile} out, or name another GPU: {', '.join(each.name for each in catalogue.gpus if each.mig)}"
        )
        raise CatalogueError(f"no MIG profile of {wanted.name} is known", hint=hint)
    who = "no GPU of the catalogue" if wanted is None else wanted.name
    has = "has a" if wanted is None else "has no"
    raise CatalogueError(f"{who} {has} MIG profile {profile!r}", hint=did_you_mean(profile, known, listed="known are "))


def _profiles(gpus: Sequence[Gpu]) -> list[str]:
    """Return the names of all MIG profiles of these GPUs, each once, the smallest first."""
    names = {each.name: each.placed.compute for gpu in gpus if gpu.mig is not None for each in gpu.mig.profiles}
    return sorted(names, key=lambda name: (names[name], name))


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

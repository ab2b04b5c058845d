"""The nodes whose GPUs a job may get, and its price there."""

from collections.abc import Sequence

from cordee.control.instances import instance_milli, nodes_with
from cordee.control.prices import SLOT
from cordee.errors import CatalogueError, SpecError, TooLargeError
from cordee.events import Capacity, Node
from cordee.hardware.catalog import Catalogue
from cordee.workload.spec import JobSpec


def micro_usd_per_hour(spec: JobSpec, nodes: Sequence[Node], catalogue: Catalogue) -> int:
    """Return the price of a job on the most expensive GPUs that it may get; 0: no node has any, or no price."""
    kind = kind_of(spec, nodes, catalogue)
    eligible = [node for node in nodes if may_get(node, kind, spec)]
    if spec.mig is not None:
        try:
            eligible = nodes_with(spec.mig, eligible, nodes)
            spec = spec.model_copy(update={"gpu_milli": instance_milli(spec.mig, eligible)})
        except (SpecError, TooLargeError):  # no node has it now, or it is of several sizes: it is not placed
            return 0
    return hourly_price(spec, eligible, 0) if eligible else 0


def kind_of(spec: JobSpec, nodes: Sequence[Node], catalogue: Catalogue) -> str | None:
    """Return the requested kind of GPU, under the name that the nodes use."""
    if spec.gpu is None or spec.gpu == SLOT:
        return spec.gpu
    wanted = catalogue.find_gpu(spec.gpu)
    for name in sorted({node.gpu_name for node in nodes} - {SLOT}):
        try:
            if catalogue.find_gpu(name) == wanted:
                return name
        except CatalogueError:  # an unknown GPU is not the requested one
            continue
    return wanted.name


def may_get(node: Node, kind: str | None, spec: JobSpec) -> bool:
    """Return whether a node has GPUs that a job may get."""
    return kind in (None, node.gpu_name) and Capacity(spec.capacity) in (Capacity.ANY, node.capacity)


def hourly_price(spec: JobSpec, eligible: Sequence[Node], micro_usd_per_cpu_hour: int) -> int:
    """Return the micro-dollars an hour of a job on the dearest of these nodes; without GPUs, of its CPU cores."""
    if not spec.gpus:
        return round((spec.cpus or 1) * micro_usd_per_cpu_hour)
    return dearest(eligible).micro_usd_per_gpu_hour * spec.gpus * spec.gpu_milli // 1000


def dearest(eligible: Sequence[Node]) -> Node:
    """Return the node whose GPUs cost most."""
    return max(eligible, key=lambda node: (node.micro_usd_per_gpu_hour, node.name))

"""The device mesh of a planned layout, so that a script builds what was planned."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cordee.errors import LayoutError, StopError
from cordee.plan.layout import Layout


def layout_mesh(layout: Layout, world_size: int, device_type: str | None = None) -> DeviceMesh:
    """Return the mesh with the layout's axes pp, dp, cp and tp, outermost first; axes of size 1 are left out.

    Args:
        layout: of all ranks.
        world_size: ranks of the gang.
        device_type: None: cuda where there is a GPU, else cpu.

    Raises:
        LayoutError: it is for another number of ranks.
    """
    if layout.gpus != world_size:
        raise LayoutError(
            f"layout {layout} is for {layout.gpus} ranks, but the gang has {world_size}",
            hint="take the layout from job.layout: an elastic job has one for each of its sizes",
        )
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    names, sizes = zip(*layout.axes, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks.

    Raises:
        StopError: it is one of several, and torch.distributed is not initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise StopError(
            f"this is one of {world_size} ranks, and torch.distributed is not initialised",
            hint="call torch.distributed.init_process_group() before cordee.job()",
        )
    return 0, 1

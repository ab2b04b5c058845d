"""The device mesh of a planned layout, so that a script builds what was planned."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cordee.errors import LayoutError
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

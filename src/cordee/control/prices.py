"""What a node's GPUs cost: the catalogue's price for their kind, written on the node when its agent reports it.

A price travels in the log with the node, so that the ledger of last month does not change with this month's prices.
"""

from dataclasses import replace

from cordee.errors import CatalogueError
from cordee.events import Node
from cordee.hardware.catalog import Catalogue
from cordee.units import MICRO_USD

SLOT = "slot"


def priced(node: Node, catalogue: Catalogue, slots_as: str | None = None) -> Node:
    """The node with its price and where that comes from.

    Args:
        node: as its agent reports it.
        catalogue: prices, the user's laid over ours.
        slots_as: account CPU slots at this GPU's price; None: they cost nothing.
    """
    kind = slots_as if node.gpu_name == SLOT else node.gpu_name
    if kind is None:
        return replace(node, micro_usd_per_gpu_hour=0, price_source="CPU slots are not billed")
    try:
        gpu = catalogue.find_gpu(kind)
    except CatalogueError:
        return replace(node, micro_usd_per_gpu_hour=0, price_source=f"no price is known for {kind}")
    price = catalogue.price(gpu, "spot" if node.capacity == "spot" else "on-demand")
    if price is None:
        source = f"no {node.capacity} price is known for {gpu.name}"
        return replace(node, micro_usd_per_gpu_hour=0, price_source=source)
    source = f"{gpu.name} {node.capacity}: {price.source}"
    if node.gpu_name == SLOT:
        source = f"each CPU slot accounted as one {source}"
    return replace(node, micro_usd_per_gpu_hour=round(price.usd_per_gpu_hour * MICRO_USD), price_source=source)

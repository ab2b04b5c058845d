"""Prices of a node's GPUs: its label's or the catalogue's, written on the node when its agent reports it.

A price travels in the log with the node, so that the ledger of last month does not change with this month's prices.
"""

from collections.abc import Sequence
from dataclasses import replace

from cordee.control.ports import Executor, Pending, Report
from cordee.errors import CatalogueError
from cordee.events import NO_PRICE, Node, NodeUp
from cordee.hardware.catalog import Catalogue
from cordee.units import MICRO_USD

SLOT = "slot"


def priced(node: Node, catalogue: Catalogue, slots_as: str | None = None) -> Node:
    """Return the node with its price and the source of that price; a price that its agent reports stands.

    Args:
        node: as its agent reports it.
        catalogue: prices; the user's own override the built-in ones.
        slots_as: charge CPU slots at this GPU's price; None: they cost nothing.
    """
    if node.price_source != NO_PRICE:
        return node
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


class Priced:
    """An executor that adds prices to the nodes of another executor and passes everything else through."""

    def __init__(self, inner: Executor, catalogue: Catalogue, slots_as: str | None) -> None:
        self._inner, self._catalogue, self._slots_as = inner, catalogue, slots_as

    def reports(self) -> Sequence[Report]:
        """Return the reports of the inner executor, with prices on the nodes."""
        return [self._with_price(report) for report in self._inner.reports()]

    def acknowledge(self, source: str, seq: int) -> None:
        """Pass the call on."""
        self._inner.acknowledge(source, seq)

    def carry_out(self, pending: Pending) -> bool:
        """Pass the call on."""
        return self._inner.carry_out(pending)

    def _with_price(self, report: Report) -> Report:
        if not isinstance(report.event, NodeUp):
            return report
        node = priced(report.event.node, self._catalogue, self._slots_as)
        return report._replace(event=replace(report.event, node=node))

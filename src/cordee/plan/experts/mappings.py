"""A placement in the formats of inference engines.

DeepSeek's EPLB: `phy2log` (layers x replicas), `log2phy` (layers x experts x most replicas, -1 where there is none),
`logcnt` (layers x experts). vLLM's state has the same three under longer names, its second one as wide as redundant
experts + 1. SGLang's `--init-expert-location FILE.json` takes `physical_to_logical_map` and nothing beside it, with a
row for every layer of the model: the dense ones first.
"""

from typing import Literal

import numpy as np

from cordee.hardware.arrays import Ints
from cordee.plan.experts.shape import ExpertPlacement

MAPPING_FORMATS = ("deepseek", "vllm", "sglang")
MappingFormat = Literal["deepseek", "vllm", "sglang"]


def phy2log(placement: ExpertPlacement) -> Ints:
    """Return the expert in each slot: layers x replicas."""
    return placement.slots.reshape(len(placement.slots), -1)


def log2phy(placement: ExpertPlacement, width: int | None = None) -> Ints:
    """Return the slots of each expert in rising order, -1 after the last: layers x experts x `width`."""
    counts = placement.counts
    width = int(counts.max()) if width is None else width
    flat = phy2log(placement)
    order = np.argsort(flat, axis=1, kind="stable")
    first = np.cumsum(counts, axis=1) - counts
    nth = np.arange(width)
    at = np.minimum(first[:, :, None] + nth, flat.shape[1] - 1).reshape(len(flat), -1)
    slots = np.take_along_axis(order, at, axis=1).reshape(*counts.shape, width)
    found: Ints = np.where(nth < counts[:, :, None], slots, -1)
    return found


def mapping(placement: ExpertPlacement, layout: MappingFormat, *, dense_layers: int = 0) -> dict[str, list[object]]:
    """Return the mappings of one engine as JSON values."""
    slots = phy2log(placement)
    if layout == "sglang":
        trivial = (np.arange(slots.shape[1]) % placement.experts)[None].repeat(dense_layers, axis=0)
        return {"physical_to_logical_map": np.concatenate([trivial, slots]).tolist()}
    if layout == "vllm":
        width = placement.fleet.replicas - placement.experts + 1
        return {
            "physical_to_logical_map": slots.tolist(),
            "logical_to_physical_map": log2phy(placement, width).tolist(),
            "logical_replica_count": placement.counts.tolist(),
        }
    return {
        "phy2log": slots.tolist(),
        "log2phy": log2phy(placement).tolist(),
        "logcnt": placement.counts.tolist(),
    }

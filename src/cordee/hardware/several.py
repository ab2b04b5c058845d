"""Several kinds of GPU as one: a gang's ranks have equal work, so each of its numbers is that of the worst kind."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cordee.errors import CatalogueError
from cordee.hardware.catalog import PRICED, Gpu, Price, Source, price_of
from cordee.hardware.power import mean_draw


def pace_of(gpu: Gpu) -> float:
    """Return the FLOP/s in 16 bits that large products reach on a GPU."""
    return gpu.peak16_flop_per_s * gpu.efficiency.product_fraction * gpu.board_ratio


def joined(counts: Mapping[Gpu, int]) -> Gpu:
    """Return the GPU that every rank of a gang over these kinds may count on.

    Fractions of the nameplate are those of the kind with the slowest products. What was calibrated or measured kernel
    by kernel on one of them does not hold for both.

    Raises:
        CatalogueError: they have no precision in common.
    """
    kinds = sorted(counts, key=pace_of)
    slowest = kinds[0]
    common = [dtype for dtype in slowest.flop_per_s if all(dtype in gpu.flop_per_s for gpu in kinds)]
    name = " and ".join(gpu.name for gpu in counts)
    if not common:
        raise CatalogueError(f"{name} have no precision in common", hint="give the job to one kind")
    text = " + ".join(f"{count} x {gpu.name}" for gpu, count in counts.items())
    return replace(
        slowest,
        name=name,
        aliases=(),
        memory_bytes=min(gpu.memory_bytes for gpu in kinds),
        visible_fraction=min(kinds, key=lambda gpu: gpu.visible_bytes).visible_fraction,
        memory_bytes_per_s=min(gpu.memory_bytes_per_s for gpu in kinds),
        flop_per_s={dtype: min(gpu.flop_per_s[dtype] for gpu in kinds) for dtype in common},
        link_bytes_per_s=min(gpu.link_bytes_per_s for gpu in kinds),
        gpus_per_node=min(gpu.gpus_per_node for gpu in kinds),
        island_gpus=min(gpu.island_gpus for gpu in kinds),
        network_bytes_per_s=min(gpu.network_bytes_per_s for gpu in kinds),
        source=Source(
            f"{text}: each number is that of the worst kind, since ranks have equal work", slowest.source.as_of
        ),
        mig=None,
        measured=None,
        draw=mean_draw(counts),
    )


def joined_prices(name: str, counts: Mapping[Gpu, int], prices: Sequence[Price]) -> tuple[Price, ...]:
    """Return the mean price of a GPU of such a gang, for each capacity in which all kinds have one."""
    found, total = [], sum(counts.values())
    for capacity in PRICED:
        each = {gpu: price_of(prices, gpu, capacity) for gpu in counts}
        known = {gpu: price for gpu, price in each.items() if price is not None}
        if len(known) < len(counts):
            continue
        mean = sum(counts[gpu] * price.usd_per_gpu_hour for gpu, price in known.items()) / total
        title = "; ".join(
            f"{gpu.name} ${price.usd_per_gpu_hour:.2f}, {price.source.title}" for gpu, price in known.items()
        )
        oldest = min(price.source.as_of for price in known.values())
        found.append(Price(name, capacity, mean, Source(f"the mean of {title}", oldest)))
    return tuple(found)

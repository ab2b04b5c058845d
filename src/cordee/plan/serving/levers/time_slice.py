"""Parts of a GPU that processes share in time, as GPUs of their own; for MIG instances see `Gpu.instances`."""

from dataclasses import replace

from cordee.hardware.catalog import Gpu


def time_slice(gpu: Gpu, milli: int) -> Gpu:
    """Return a part of a GPU in thousandths, as it is while all its parts are busy.

    >>> from cordee.hardware.load import load_catalogue
    >>> quarter = time_slice(load_catalogue().find_gpu("H100"), 250)
    >>> quarter.name, quarter.memory_bytes
    ('H100 x 0.25', 20000000000)
    """
    part = milli / 1000
    return replace(
        gpu,
        name=f"{gpu.name} x {part:g}",
        aliases=(),
        memory_bytes=round(gpu.memory_bytes * part),
        memory_bytes_per_s=gpu.memory_bytes_per_s * part,
        flop_per_s={dtype: rate * part for dtype, rate in gpu.flop_per_s.items()},
        island_gpus=1,
    )

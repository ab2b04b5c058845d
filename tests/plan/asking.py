"""The planner's question as tests write it: model, GPU and count, then whatever differs from the defaults."""

from dataclasses import fields

from cordee.hardware.catalog import Gpu, Price
from cordee.plan import Answer, Request, Settings, ask
from cordee.plan.layout import Recompute
from cordee.plan.wanted import layout_wanted
from cordee.workload.model import ModelShape

_SETTINGS = {field.name for field in fields(Settings)}


def asked(
    shape: ModelShape, gpu: Gpu, gpus: int, *, layout: str | None = None, recompute: Recompute | None = None,
    micro_batch: int | None = None, price: Price | None = None, **other: object,
) -> Request:  # fmt: skip
    """Return the request; other arguments are fields of `Settings` or of `Request`."""
    settings = Settings(**{name: value for name, value in other.items() if name in _SETTINGS})  # type: ignore[arg-type]
    rest = {name: value for name, value in other.items() if name not in _SETTINGS}
    return Request(
        shape=shape, gpu=gpu, gpus=gpus, settings=settings, layout=layout_wanted(layout, recompute, micro_batch),
        prices=() if price is None else (price,), **rest,  # type: ignore[arg-type]
    )  # fmt: skip


def planned(shape: ModelShape, gpu: Gpu, gpus: int, **other) -> Answer:
    """Return the answer to such a request."""
    return ask(asked(shape, gpu, gpus, **other))

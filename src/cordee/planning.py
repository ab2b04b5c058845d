"""`cordee.plan(model, gpus)` for notebooks, and the files that a plan is made from: models, GPUs, prices.

`plan/` itself reads no file. What a user writes (`64xH100`, a folder, a list of prices) becomes a `Request` here.
"""

import os
import re
from pathlib import Path
from typing import TypedDict, Unpack

from cordee.errors import CatalogueError, SpecError
from cordee.hardware.catalog import Capacity, Catalogue, Gpu
from cordee.hardware.load import load_catalogue
from cordee.plan.ask import Answer, Request, ask
from cordee.plan.expect import Assumptions
from cordee.plan.layout import Recompute
from cordee.plan.settings import Settings
from cordee.plan.training import Loss, Precision
from cordee.plan.wanted import layout_wanted
from cordee.workload.gpus import parse_gpus
from cordee.workload.load import load_shape

_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class SettingsGiven(TypedDict, total=False):
    """The fields of `Settings` that a notebook may give."""

    seq_tokens: int
    global_batch: int
    optimizer: str
    precision: Precision
    framework: str
    loss: Loss


def plan(
    model: str | Path,
    gpus: str,
    *,
    layout: str | None = None,
    recompute: Recompute | None = None,
    micro_batch: int | None = None,
    capacity: Capacity = "on-demand",
    prices: Path | None = None,
    assumed: Assumptions | None = None,
    tokens: str | None = None,
    **settings: Unpack[SettingsGiven],
) -> Answer:
    """Plan a model of the catalogue, a config.json or a folder with one, on GPUs such as `64xH100`.

    Args:
        model: what to train.
        gpus: the job's total and the kind of GPU.
        layout: judge only layouts like this one: `tp=8,pp=2`.
        recompute: none, selective or full; None tries all.
        micro_batch: sequences; None tries 1 to 8.
        capacity: the kind whose price counts.
        prices: a `prices.toml` over the catalogue's; None takes the one in Cordee's home, if there is one.
        assumed: storage and interruptions.
        tokens: how many to train on, for time and cost: `300B`, `1.4T`.
        **settings: the fields of `Settings`: `seq_tokens`, `global_batch`, `optimizer`, `precision`, ...

    Raises:
        CatalogueError, ShapeError, LayoutError, SpecError: something is unknown, unreadable or does not divide.
    """
    catalogue = load_catalogue(prices or home_prices())
    count, kind = parse_gpus(gpus)
    return ask(
        Request(
            shape=load_shape(str(model)),
            gpu=find_gpu(catalogue, gpus, count, kind),
            gpus=count,
            settings=Settings(**settings),  # type: ignore[arg-type]
            layout=layout_wanted(layout, recompute, micro_batch),
            assumed=assumed or Assumptions(),
            prices=catalogue.prices,
            capacity=capacity,
            tokens=None if tokens is None else parse_tokens(tokens),
        )
    )


def find_gpu(catalogue: Catalogue, text: str, count: int, kind: str | None) -> Gpu:
    """Return the GPU that a text such as `64xH100` names.

    Raises:
        CatalogueError: it names none, or one that is unknown.
    """
    if kind is None:
        known = ", ".join(gpu.name for gpu in catalogue.gpus)
        raise CatalogueError(f"--gpus {text} does not say which GPU", hint=f"write {count}xH100; known are {known}")
    return catalogue.find_gpu(kind)


def home_prices() -> Path | None:
    """Return the `prices.toml` in Cordee's home, which a server accounts by too; None if there is none."""
    path = Path(os.environ.get("CORDEE_HOME") or "~/.cordee").expanduser() / "prices.toml"
    return path if path.exists() else None


def parse_tokens(text: str) -> float:
    """Return the tokens of `300B` or `1.4T`.

    >>> parse_tokens("300B"), parse_tokens("1.4T")
    (300000000000.0, 1400000000000.0)

    Raises:
        SpecError: not such a text, or no tokens.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMBGT])", text.strip())
    if match is None or float(match[1]) == 0:
        raise SpecError(f"--tokens {text} is not a number of tokens", hint="write 300B or 1.4T")
    return float(match[1]) * _COUNTS[match[2].upper()]

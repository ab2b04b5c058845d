"""The section `data` of a job file: the datasets that its ranks will read with `cordee.data`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cordee.units import parse_duration_s

DatasetUrl = Annotated[str, Field(pattern=r"^((s3|gs|az|file)://[^/\s]*\S*|/\S*)$")]


def _listed(value: Any) -> Any:
    """Accept one text in the place of a list of one."""
    return (value,) if isinstance(value, str) else value


class DataSpec(BaseModel):
    """Datasets that are brought into the cache of each node, and how long the ranks wait for them there.

    `wait_s`: all that has not arrived by then is fetched while the ranks run; "all": they wait for all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    sets: Annotated[tuple[DatasetUrl, ...], BeforeValidator(_listed)] = ()
    wait_s: Annotated[float, Field(ge=0)] | Literal["all"] = 0.0


def in_full(written: Any) -> Any:
    """Return the section, if it is written as one URL or a list of them.

    >>> in_full("s3://bucket/set")
    {'sets': 's3://bucket/set'}
    """
    return {"sets": written} if written is not None and not isinstance(written, Mapping) else written


def parse_wait(text: str) -> float | str:
    """Read a time, or `all`."""
    return "all" if text == "all" else parse_duration_s(text)

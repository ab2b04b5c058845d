"""The section `notify` of a job file: which notifications of a job go to which destinations of the server."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NotifyKind = Literal["start", "end", "failure", "preemption", "hang", "budget"]
"""`end`: done or stopped; `failure`: of the job, or of an attempt by its ranks; `budget`: 80 % of `limit.cost`."""

URGENT: frozenset[NotifyKind] = frozenset(("failure", "hang", "budget"))
"""Kinds that are sent in quiet hours too."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Notify(BaseModel):
    """Destinations by their names in the server's `notify.toml` (None: its default), and the kinds sent there."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    to: Annotated[tuple[Annotated[str, Field(min_length=1)], ...] | None, BeforeValidator(_listed)] = None
    on: Annotated[tuple[NotifyKind, ...] | None, BeforeValidator(_listed)] = None

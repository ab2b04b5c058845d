"""The base of JSON documents: rows that pydantic reads from the attributes of the values that they show."""

from typing import Any

from pydantic import AliasPath, BaseModel, ConfigDict, Field


class Row(BaseModel):
    """A part of a document, read from the attributes of a value, or by name from JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True, populate_by_name=True)


def read_from(*path: str) -> Any:
    """Return a field that is read from this path of attributes."""
    return Field(validation_alias=AliasPath(*path))

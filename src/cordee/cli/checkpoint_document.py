"""The JSON of `cordee checkpoint`: a row for each verb; what a generation and a verification hold is read from them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from cordee.document import Row, read_from
from cordee.units import US_PER_S


def _when(at_us: int | None) -> str | None:
    return datetime.fromtimestamp(at_us / US_PER_S, UTC).isoformat(timespec="seconds") if at_us else None


class GenerationDocument(Row):
    """One generation; `stored_bytes` null: its manifest cannot be read; `world_size` null: any."""

    generation: int = read_from("commit", "generation")
    step: int = read_from("commit", "step")
    epoch: int = read_from("commit", "epoch")
    at: Annotated[str | None, BeforeValidator(_when)] = read_from("at_us")
    bytes: int = read_from("commit", "bytes")
    stored_bytes: int | None
    world_size: Annotated[int | None, BeforeValidator(lambda size: size or None)]
    verified: bool
    missing_levels: int = read_from("commit", "missing_levels")
    pin: str | None
    stall_us: int = read_from("commit", "stall_us")
    uploaded_us: int = read_from("commit", "uploaded_us")


class BadCopy(Row):
    """A bad copy: its storage level and what is wrong."""

    level: str
    why: str


class VerificationDocument(Row):
    """The state of one generation."""

    generation: int = read_from("commit", "generation")
    step: int = read_from("commit", "step")
    intact: Annotated[bool, BeforeValidator(lambda lost: lost is None)] = read_from("lost")
    chunks: int
    bytes: int
    bad: Annotated[
        tuple[BadCopy, ...],
        BeforeValidator(lambda found: [BadCopy(level=level, why=why) for level, why in found]),
    ]


class DiffDocument(Row):
    """The difference of the generations of two steps."""

    first: int
    second: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[str, ...]
    same: int
    shared_bytes: int
    second_bytes: int


class PinDocument(Row):
    """A generation and its pin."""

    generation: int
    step: int
    pin: str | None


class ImportDocument(PinDocument):
    """An imported generation."""

    bytes: int


class CollectedDocument(Row):
    """The generations that a collection retired, by number, and the number of blobs that it deleted."""

    dry_run: bool
    retired: list[int]
    deleted: int


class ExportDocument(Row):
    """The files of an export."""

    step: int
    bytes: int
    files: list[Path]

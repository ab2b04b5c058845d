"""The answer of every kind of GPU as a JSON document: base units, the schema in `CardsDocument.model_json_schema()`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from cordee.document import Row, read_from
from cordee.hardware.catalog import Price
from cordee.plan.cards import Card, Cards
from cordee.plan.document import ModelRow, Text, TrainingRow


def _name(card: Card | None) -> str | None:
    return None if card is None else card.gpu.name


def _source(price: object) -> object:
    return str(price.source) if isinstance(price, Price) else price


class CardRow(Row):
    """One kind of GPU."""

    gpu: str = read_from("gpu", "name")
    gpus: int
    fits: bool
    layout: Text = read_from("candidate", "layout")
    peak_bytes: int = read_from("candidate", "peak_bytes")
    gpu_memory_bytes: int = read_from("candidate", "gpu_memory_bytes")
    shortfall_bytes: int = read_from("candidate", "shortfall_bytes")
    needed_bytes_nine_of_ten: tuple[int, int] = read_from("candidate", "needed_interval_bytes")
    tight: bool = read_from("candidate", "tight")
    step_s: float | None = read_from("candidate", "step_s")
    tokens_per_s: float | None = read_from("candidate", "tokens_per_s")
    longest_seq_tokens: int = read_from("seq_tokens")
    largest_micro_batch: int = read_from("micro_batch")
    sure_longest_seq_tokens: int = read_from("sure_seq_tokens")
    sure_largest_micro_batch: int = read_from("sure_micro_batch")
    usd_per_hour: float | None
    usd_per_billion_tokens: float | None
    price_source: Annotated[str | None, BeforeValidator(_source)] = read_from("price")


class UnableRow(Row):
    """A kind of GPU that cannot compute it."""

    gpu: str
    reason: str


class CardsDocument(Row):
    """All kinds of GPU, those that fit first, the cheapest of them first."""

    version: Literal[1] = 1
    model: ModelRow
    training: TrainingRow
    cards: tuple[CardRow, ...]
    unable: tuple[UnableRow, ...]
    smallest: str | None
    smallest_sure: str | None
    cheapest: str | None


def cards_document(found: Cards) -> CardsDocument:
    """Return the document of an answer."""
    every = (*found.fitting, *found.rejected)
    return CardsDocument(
        model=ModelRow.model_validate(found.request.shape),
        training=TrainingRow.model_validate(every[0].training),
        cards=tuple(CardRow.model_validate(card) for card in every),
        unable=tuple(UnableRow(gpu=gpu, reason=reason) for gpu, reason in found.unable),
        smallest=_name(found.smallest),
        smallest_sure=_name(found.smallest_sure),
        cheapest=_name(found.cheapest),
    )

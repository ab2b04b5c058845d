"""Readers of published traces of requests: Mooncake's JSON lines, the CSV of Azure and of BurstGPT.

Not part of `requests.py`, which does no I/O.
"""

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cordee.errors import TraceError
from cordee.workload.requests import Request

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of one id in `hash_ids` (kvcache-ai/Mooncake, FAST25-release/README.md)."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Format:
    """One format: the columns that it is known by, and how one row becomes a request."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], Request]


def load_requests(path: Path, *, limit: int | None = None) -> tuple[Request, ...]:
    """Return the requests of a trace in the order of arrival, the first at 0 s; those without an answer are left out.

    Raises:
        TraceError: no such file, no rows, columns of no known format (the message names them), or a bad row.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path} cannot be read: {error}", hint="give a trace of requests: JSON lines or CSV"
        ) from None
    rows = _rows(text, path)
    if not rows:
        raise TraceError(f"{path} has no requests", hint="give a trace of at least one")
    columns = tuple(rows[0])
    found = next((each for each in FORMATS if set(each.columns) <= set(columns)), None)
    if found is None:
        known = "; ".join(f"{each.name}: {', '.join(each.columns)}" for each in FORMATS)
        has = ", ".join(columns)
        raise TraceError(f"{path} has the columns {has}, which no trace of requests has", hint=f"known are {known}")
    requests = []
    for number, row in enumerate(rows, start=1):
        try:
            requests.append(found.read(row))
        except (KeyError, TypeError, ValueError) as error:
            hint = f"a row of {found.name} has {', '.join(found.columns)}"
            raise TraceError(f"{path}, row {number}: {error}", hint=hint) from None
    return _in_order([each for each in requests if each.input_tokens > 0 and each.output_tokens > 0], limit)


def _rows(text: str, path: Path) -> list[Row]:
    if not text.lstrip().startswith("{"):
        return [dict(row) for row in csv.DictReader(text.splitlines())]
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}", hint="write one JSON object in each line") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}, line {number} is no object", hint="write one JSON object in each line")
        rows.append(row)
    return rows


def _in_order(requests: list[Request], limit: int | None) -> tuple[Request, ...]:
    ordered = sorted(requests, key=lambda each: each.arrival_s)[:limit]
    first = ordered[0].arrival_s if ordered else 0.0
    return tuple(
        Request(each.arrival_s - first, each.input_tokens, each.output_tokens, each.blocks, each.block_tokens)
        for each in ordered
    )


def _mooncake(row: Row) -> Request:
    ids = row.get("hash_ids") or ()
    if not isinstance(ids, list | tuple):
        raise ValueError(f"hash_ids is {ids!r}, not a list")
    blocks = tuple(int(each) for each in ids)
    arrival_s = float(str(row["timestamp"])) / 1000
    return Request(arrival_s, _count(row["input_length"]), _count(row["output_length"]), blocks, MOONCAKE_BLOCK_TOKENS)


def _azure(row: Row) -> Request:
    # Seven digits of a second's fraction, where Python reads six; some rows have none.
    moment = datetime.fromisoformat(str(row["TIMESTAMP"]).strip()[:26])
    return Request(moment.replace(tzinfo=UTC).timestamp(), _count(row["ContextTokens"]), _count(row["GeneratedTokens"]))


def _burst(row: Row) -> Request:
    return Request(float(str(row["Timestamp"])), _count(row["Request tokens"]), _count(row["Response tokens"]))


def _count(value: object) -> int:
    return int(float(str(value)))


FORMATS = (
    Format("Mooncake", ("timestamp", "input_length", "output_length"), _mooncake),
    Format("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    Format("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), _burst),
)

"""Read YAML with the line of each key, quantities with their units, and errors that point at their place."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cordee.errors import SpecError, UnitError
from cordee.near import did_you_mean

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Where:
    """The line and column of each key in the text, from 1, for errors; flags have no source."""

    source: str
    positions: Mapping[Path, tuple[int, int]]

    def error(self, path: Path, message: str, hint: str | None = None) -> SpecError:
        known = next((self.positions[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.positions), None)
        place = f"{self.source}:{known[0]}:{known[1]}" if known else self.source
        return SpecError(f"{place}: {message}" if place else message, hint=hint)


def quantity(read: Callable[[str], Any], value: Any, path: Path, where: Where) -> Any:
    """Return the value in base units."""
    try:
        return read(str(plain(value, path, where)))
    except UnitError as error:
        raise where.error(path, f"{'.'.join(map(str, path))}: {error.message}", error.hint) from None


def mapping(document: Mapping[str, Any], key: str, where: Where, inside: Path = ()) -> dict[str, Any]:
    """Return the mapping below a key; an absent one is empty."""
    value = document.get(key) or {}
    if not isinstance(value, dict):
        name = ".".join(map(str, (*inside, key)))
        raise where.error(
            (*inside, key), f"{name} must be a mapping, not {value!r}", f"write its keys indented below {key}:"
        )
    return value


def check_keys(written: Collection[str], known: Collection[str], inside: Path, where: Where) -> None:
    """Check that all keys written are known."""
    for key in written:
        if key in known:
            continue
        hint = did_you_mean(str(key), known, listed="known are ")
        place = f" in {'.'.join(map(str, inside))}" if inside else ""
        raise where.error((*inside, key), f"unknown key {key!r}{place}", hint)


def plain(value: Any, path: Path, where: Where) -> Any:
    """Return a text or a number, and refuse anything else."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise where.error(path, f"{'.'.join(map(str, path))} cannot be {value!r}")
    return value


def explained(
    error: ValidationError, inside: Path, where: Where, *, written_as: Mapping[str, str], hints: Mapping[str, str]
) -> SpecError:
    """Return pydantic's first error in plain words, with its place in the text."""
    first = error.errors()[0]
    path = (*inside, *(written_as.get(str(part), part) for part in first["loc"] if not _is_branch(part)))
    name = ".".join(map(str, path))
    context = first.get("ctx", {})
    if first["type"] == "value_error":
        return where.error(path, str(context["error"]))
    if first["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
        listed = "use one of: " if len(allowed) > 1 else "use "
        hint = did_you_mean(str(first["input"]), allowed, listed=listed)
        return where.error(path, f"unknown {name} {first['input']!r}", hint)
    advice = hints.get(name) or _LIMIT_HINTS.get(first["type"], "").format(**context) or None
    return where.error(path, f"{name} = {first['input']!r}: {first['msg'].lower().replace('tuple', 'list')}", advice)


_LIMIT_HINTS = {
    "greater_than": "use more than {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than_equal": "use {le} or less",
    "int_parsing": "write a whole number",
    "int_from_float": "write a whole number",
}


def _is_branch(part: str | int) -> bool:
    """Return whether a part of a path is pydantic's name for a branch of a union, not a key of the text."""
    return isinstance(part, str) and bool(re.search(r"[\[\]()]|^(str|float|int|tuple|constrained)", part))


_LEVELS_MAX = 64


def load_yaml(text: str, source: str) -> tuple[Any, dict[Path, tuple[int, int]]]:
    """Return the document as plain values, and the places of its keys."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    positions: dict[Path, tuple[int, int]] = {}
    try:
        if _is_deep(text):
            raise SpecError(f"{source}: the YAML is nested too deeply", hint="a job needs three levels at most")
        return _strip(YAML(typ="rt").load(text), (), positions), positions
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        hint = "give each key once" if "duplicate" in str(error.problem) else "check indentation and quotes there"
        raise SpecError(f"{place}: not valid YAML: {_first_line(error.problem)}", hint=hint) from None
    except YAMLError as error:
        raise SpecError(f"{source}: not valid YAML: {_first_line(str(error))}", hint="use plain text") from None


def _is_deep(text: str) -> bool:
    """Return whether more levels lie in each other than any document needs: composing them takes quadratic time."""
    from ruamel.yaml import YAML
    from ruamel.yaml.tokens import (
        BlockEndToken,
        BlockMappingStartToken,
        BlockSequenceStartToken,
        FlowMappingEndToken,
        FlowMappingStartToken,
        FlowSequenceEndToken,
        FlowSequenceStartToken,
    )

    opens = (BlockMappingStartToken, BlockSequenceStartToken, FlowMappingStartToken, FlowSequenceStartToken)
    closes = (BlockEndToken, FlowMappingEndToken, FlowSequenceEndToken)
    depth = 0
    for token in YAML(typ="rt").scan(text):
        depth += isinstance(token, opens) - isinstance(token, closes)
        if depth > _LEVELS_MAX:
            return True
    return False


def _first_line(text: str | None) -> str:
    return (text or "unreadable").strip().splitlines()[0]


def _strip(node: Any, path: Path, positions: dict[Path, tuple[int, int]]) -> Any:
    """Return ruamel's tree as plain values, noting each key's line and column."""
    if isinstance(node, dict):
        plain = {}
        for key, value in node.items():
            if key in (node.lc.data or {}):  # type: ignore[attr-defined]  # A merged key is elsewhere in the text.
                line, column = node.lc.key(key)  # type: ignore[attr-defined]
                positions[(*path, key)] = (line + 1, column + 1)
            plain[key] = _strip(value, (*path, key), positions)
        return plain
    if isinstance(node, list):
        for index in range(len(node)):
            line, column = node.lc.item(index)  # type: ignore[attr-defined]
            positions[(*path, index)] = (line + 1, column + 1)
        return [_strip(value, (*path, index), positions) for index, value in enumerate(node)]
    if isinstance(node, bool) or node is None:
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return getattr(node, "value", node)  # The text of a tagged scalar, never an object.

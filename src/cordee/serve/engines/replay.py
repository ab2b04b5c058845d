"""An answer that is computed again on another replica: its client gets only the events that continue its own.

Under a grammar, a parser of tool calls, or with several choices, no engine can enter an answer in its middle. It can
compute the same answer again where it draws tokens by a seed, or none at all; the two are compared field by field.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cordee.serve.engines.port import Body

_WHOLE = frozenset(("role", "id", "type", "finish_reason"))
"""Strings that come once; all others grow by what an event adds."""

Path = tuple[str | int, ...]


class DivergedError(Exception):
    """The answer that was computed again is not the one that the client has begun to get."""


@dataclass(slots=True)
class _Text:
    """A string of the client's, of which the first `again` characters have come again."""

    sent: str = ""
    again: int = 0

    def lacks(self, new: str) -> str:
        """Take the next characters, and return those that the client lacks."""
        known = self.sent[self.again : self.again + len(new)]
        if not new.startswith(known):
            raise DivergedError(
                f"another replica's answer differs after {self.again + _common(new, known):,} characters"
            )
        self.again += len(new)
        lacking = new[len(known) :]
        self.sent += lacking
        return lacking


@dataclass(slots=True)
class _Items:
    """A list of the client's, such as log probabilities, of which the first `again` items have come again."""

    sent: list[Any] = field(default_factory=list)
    again: int = 0

    def lacks(self, new: list[Any]) -> list[Any]:
        """Take the next items, and return those that the client lacks."""
        known = self.sent[self.again : self.again + len(new)]
        if [_token(each) for each in known] != [_token(each) for each in new[: len(known)]]:
            raise DivergedError(f"another replica's answer differs within {len(known)} items after {self.again:,}")
        self.again += len(new)
        lacking = new[len(known) :]
        self.sent += lacking
        return lacking


@dataclass(slots=True)
class SentChoices:
    """The choices of an answer as their client has them: each field's text, by its path.

    Attributes:
        wanted: choices that the client asked for.
        comes_again: the answer is computed again.
        left_out: events of which the client had everything.
    """

    wanted: int = 1
    comes_again: bool = False
    left_out: int = 0
    _ended: set[int] = field(default_factory=set)
    _texts: dict[Path, _Text] = field(default_factory=dict)
    _items: dict[Path, _Items] = field(default_factory=dict)
    _whole: set[Path] = field(default_factory=set)

    def begin_again(self) -> None:
        """Expect the whole answer from its start."""
        self.comes_again = True
        for _, each in self._growing():
            each.again = 0

    @property
    def is_whole(self) -> bool:
        """Return whether each choice has its finish reason."""
        return len(self._ended) >= self.wanted

    def set_text(self, path: Path, text: str) -> None:
        """Note a text of the client's that was counted elsewhere."""
        self._texts[path] = _Text(text, len(text))

    def lacking(self, choices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Take the choices of the next event, and return what the client lacks of them.

        Raises:
            DivergedError: they do not continue what the client has.
        """
        found = self._entries((), choices)
        for place, choice in enumerate(choices):
            if choice.get("finish_reason"):
                self._end(choice.get("index", place))
        return found

    def _end(self, index: int) -> None:
        self._ended.add(index)
        for path, each in self._growing():
            if path[0] == index and each.again < len(each.sent):
                numbers = f"{each.again:,} characters, and the client has {len(each.sent):,}"
                raise DivergedError(f"another replica's answer ends after {numbers}")

    def _growing(self) -> list[tuple[Path, _Text | _Items]]:
        return [*self._texts.items(), *self._items.items()]

    def _entries(self, path: Path, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for place, entry in enumerate(entries):
            lacking, more = self._fields((*path, entry.get("index", place)), entry)
            if more:
                found.append(lacking)
        return found

    def _fields(self, path: Path, given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the fields without what the client has, and whether anything is left in them."""
        found, more = dict[str, Any](), False
        for key, value in given.items():
            lacking, left = self._field((*path, key), key, value)
            # A client looks for these keys, with or without content.
            if left or not value or key in ("index", "delta", "text"):
                found[key] = lacking
            elif key == "logprobs":
                found[key] = None
            more |= left
        return found, more

    def _field(self, path: Path, key: str, value: Any) -> tuple[Any, bool]:
        if key == "index" or value is None or value in ("", [], {}):
            return value, False
        if isinstance(value, dict):
            return self._fields(path, value)
        if isinstance(value, list) and all(isinstance(each, dict) and "index" in each for each in value):
            entries = self._entries(path, value)
            return entries, bool(entries)
        if isinstance(value, list):
            items = self._items.setdefault(path, _Items()).lacks(value)
            return items, bool(items)
        if isinstance(value, str) and key not in _WHOLE:
            text = self._texts.setdefault(path, _Text()).lacks(value)
            return text, bool(text)
        is_new = path not in self._whole
        self._whole.add(path)
        return value, is_new


def _token(item: object) -> object:
    """Return the part of a list's item that is the same each time: probabilities differ in their last bits."""
    if isinstance(item, dict):
        return item.get("token")
    return item if isinstance(item, str) else None


def _common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)


def can_replay(body: Mapping[str, object]) -> bool:
    """Return whether an engine would give the same answer again: it draws no token, or draws them by a seed.

    >>> can_replay({"temperature": 0}), can_replay({"seed": 7}), can_replay({})
    (True, True, False)
    """
    seed = body.get("seed")
    has_seed = isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0
    return has_seed or body.get("temperature") == 0 or body.get("top_k") == 1


def with_seed(body: Body) -> Body:
    """Return a request that can be replayed: one that leaves the draws to chance gets a seed by chance."""
    return body if can_replay(body) else {**body, "seed": secrets.randbelow(1 << 31)}

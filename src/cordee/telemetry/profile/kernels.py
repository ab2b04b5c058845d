"""The class of a kernel by its name and category: a table of rules in TOML, the user's before Cordee's."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from cordee.errors import CatalogueError

Kind = Literal["compute", "transfer", "waiting", "memory"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMMUNICATING = ("transfer", "waiting")
OTHER = "other"
_SHIPPED = Path(__file__).parent / "kernels.toml"
_EXAMPLE = 'class = [{name = "my all-to-all", kind = "transfer", pattern = "my_a2a"}]'


@dataclass(frozen=True, slots=True)
class KernelClass:
    """A class of kernels; `matched`: the n-th on each rank belong to one collective."""

    name: str
    kind: Kind
    matched: bool = True

    @property
    def communicates(self) -> bool:
        """Return whether its kernels move data between ranks or wait for them."""
        return self.kind in COMMUNICATING


@dataclass(frozen=True, slots=True)
class KernelRule:
    """A class with the pattern of its kernels' names, or of their category."""

    kernel_class: KernelClass
    pattern: re.Pattern[str] | None
    category: re.Pattern[str] | None


@dataclass(frozen=True, slots=True)
class Categories:
    """The categories of a profiler by their contents."""

    device: tuple[str, ...]
    launch: tuple[str, ...]
    host: tuple[str, ...]
    mark: tuple[str, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The rules, in the order of their precedence."""

    rules: tuple[KernelRule, ...]
    categories: Categories

    def of(self, name: str, category: str = "") -> KernelClass:
        """Return the class of a kernel.

        >>> table = load_kernels()
        >>> [table.of(name).kind for name in ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "my_kernel")]
        ['transfer', 'compute']
        """
        for rule in self.rules:
            if rule.pattern is not None and rule.pattern.search(name):
                return rule.kernel_class
            if rule.category is not None and rule.category.fullmatch(category):
                return rule.kernel_class
        return KernelClass(OTHER, "compute")


def load_kernels(own: Path | None = None) -> KernelTable:
    """Return Cordee's table, with the user's rules before it.

    Raises:
        CatalogueError: the file is missing, is not TOML, or a rule of it cannot be used.
    """
    rules, categories = _shipped()
    if own is None:
        return KernelTable(rules, categories)
    facts = _toml(own)
    unknown = facts.keys() - {"class", "categories"}
    if unknown:
        hint = f"write rules as {_EXAMPLE}"
        raise CatalogueError(f"{own}: {', '.join(sorted(unknown))} is not known", hint=hint)
    more = _categories(facts.get("categories", {}), str(own))
    added = Categories(*(
        (*(name for name in getattr(categories, part) if not _in_another(name, part, more)), *getattr(more, part))
        for part in Categories.__slots__
    ))  # fmt: skip
    return KernelTable((*_rules(facts, str(own)), *rules), added)


def _in_another(name: str, part: str, more: Categories) -> bool:
    return any(name in getattr(more, other) for other in Categories.__slots__ if other != part)


@cache
def _shipped() -> tuple[tuple[KernelRule, ...], Categories]:
    facts = _toml(_SHIPPED)
    return tuple(_rules(facts, _SHIPPED.name)), _categories(facts["categories"], _SHIPPED.name)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CatalogueError(f"{path} does not exist", hint="give the path of a table of kernels, TOML") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError(f"{path} cannot be read: {error}", hint=f"write TOML such as {_EXAMPLE}") from None


def _categories(facts: Any, where: str) -> Categories:
    parts = Categories.__slots__
    sound = isinstance(facts, dict) and facts.keys() <= set(parts) and all(_are_words(each) for each in facts.values())
    if not sound:
        hint = f"[categories] takes lists of words for {', '.join(parts)}"
        raise CatalogueError(f"{where}: [categories] is {facts!r}", hint=hint)
    return Categories(*(tuple(facts.get(part, ())) for part in parts))


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _rules(facts: dict[str, Any], where: str) -> Iterable[KernelRule]:
    tables = facts.get("class", [])
    if not isinstance(tables, list):
        raise CatalogueError(f"{where}: class is {tables!r}, not a list of tables", hint=f"write {_EXAMPLE}")
    return [_rule(table, f"{where}: class {number}") for number, table in enumerate(tables, start=1)]


def _rule(table: Any, where: str) -> KernelRule:
    known = {"name", "kind", "pattern", "category", "matched", "source", "as_of"}
    if not isinstance(table, dict) or not table.keys() <= known:
        wrong = sorted(table.keys() - known) if isinstance(table, dict) else table
        raise CatalogueError(f"{where}: {wrong} is not known", hint=f"write {_EXAMPLE}")
    name, kind, matched = table.get("name"), table.get("kind"), table.get("matched", True)
    if not isinstance(name, str) or not name or kind not in KINDS or not isinstance(matched, bool):
        given = f"name {name!r}, kind {kind!r}, matched {matched!r}"
        hint = f"give a name, and as kind one of {', '.join(KINDS)}: {_EXAMPLE}"
        raise CatalogueError(f"{where}: {given} is not a class of kernels", hint=hint)
    if ("pattern" in table) == ("category" in table):
        raise CatalogueError(f"{where}, {name!r}: give either pattern or category", hint=f"write {_EXAMPLE}")
    kernel_class = KernelClass(name, kind, matched)
    return KernelRule(kernel_class, _compiled(table, "pattern", where), _compiled(table, "category", where))


def _compiled(table: dict[str, Any], key: str, where: str) -> re.Pattern[str] | None:
    text = table.get(key)
    if text is None:
        return None
    try:
        return re.compile(text, re.IGNORECASE)
    except (re.error, TypeError) as error:
        hint = "write a regular expression of Python in single quotes"
        raise CatalogueError(f"{where}: {key} {text!r}: {error}", hint=hint) from None

"""Identifiers and docstrings of the package, held against docs/glossary.md."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from sources import PACKAGE, SOURCES, nodes, room

GLOSSARY = (Path(__file__).parent.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
HEADLESS = {"what", "whether", "how", "who", "whom", "whose", "of", "so", "that", "in", "by"}
"""Words with which no docstring begins: they leave a sentence without its subject or its verb."""


PROPER_NOUNS = re.compile(r"chrome_?trace|fair_share|save_strategy", re.IGNORECASE)
"""Names of a format, of a concept and of another library's argument, whatever words they are made of."""


def _table(heading: str) -> list[list[str]]:
    section = GLOSSARY.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


FORBIDDEN = {word.strip() for row in _table("Not these") for word in row[0].split(",")}
HOMONYMS = {row[0]: [room.strip() for room in row[2].split(",")] for row in _table("One meaning")}


def _names(of: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield each name that these nodes define, with its line."""
    for node in of:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


@cache
def words(name: str) -> list[str]:
    """Split an identifier into its words, in lower case.

    >>> words("tokensPerStep"), words("_RankGroups_2")
    (['tokens', 'per', 'step'], ['rank', 'groups'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _may_stand(word: str, room: str) -> bool:
    return any(room == allowed or room.startswith(f"{allowed}/") for allowed in HOMONYMS[word])


def test_every_name_is_in_the_words_of_the_field() -> None:
    wrong = []
    for path in SOURCES:
        for name, line in _names(nodes(path)):
            if PROPER_NOUNS.search(name):
                continue
            for word in words(name):
                if {word, _singular(word), name} & FORBIDDEN:
                    wrong.append(f"{path}:{line}: {name}: {word!r} stands under 'Not these' in docs/glossary.md")
                elif _singular(word) in HOMONYMS and not _may_stand(_singular(word), room(path)):
                    wrong.append(f"{path}:{line}: {name}: {word!r} has another meaning, see docs/glossary.md")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and re.split(r"\W", text, maxsplit=1)[0].lower() in HEADLESS:
                    wrong.append(f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def test_a_class_name_means_one_thing_in_a_room() -> None:
    seen: dict[tuple[str, str], Path] = {}
    twice = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                key = (path.relative_to(PACKAGE).parts[0], node.name)
                if seen.setdefault(key, path) != path:
                    twice.append(f"{node.name}: {seen[key]} and {path}")
    assert not twice, "\n".join(twice)


@pytest.mark.parametrize(
    ("source", "what"),
    [("def pusher(x): pass", "pusher"), ("eaten_at_us = 1", "eaten"), ("class FaultDice: pass", "dice")],
)
def test_a_forbidden_word_is_found(source: str, what: str) -> None:
    assert any(what in words(name) and what in FORBIDDEN for name, _ in _names(ast.walk(ast.parse(source))))

"""Files that pages name exist, pages are found from the index, and each of them is in the site's navigation."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", DOCS / "index.md", *(DOCS / "design").glob("*.md")])
FOLDERS = [ROOT / name for name in ("src", "tests", "benchmarks", "examples")]
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in folder.rglob("*.py")]
INSIDE = {f"/{parent.as_posix()}/" for file in FILES for parent in Path(file).parents} | {"/src/cordee/view/templates/"}
OF_OTHERS = {
    "train.py",  # a user's script
    "parallel/loss.py",  # torch's
    "pipelining/stage.py",  # torch's
}


def names_a_file(word: str) -> bool:
    """Return whether a path, or the end of one, is a file of the repository."""
    return any(f"/{file}".endswith(f"/{word}") for file in FILES)


def names_a_module(word: str) -> bool:
    """Return whether `cordee.room.file` is a module, or the part before its last dot is."""
    paths = ["src/" + "/".join(parts) for parts in (word.split("."), word.split(".")[:-1]) if parts]
    return any(f"{path}.py" in FILES or f"/{path}/" in INSIDE for path in paths)


def names_a_folder(word: str) -> bool:
    """Return whether a path that ends in a slash, or the end of one, is a folder of the repository."""
    return any(folder.endswith(f"/{word}") for folder in INSIDE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_docs_name_exist(page: Path) -> None:
    text = page.read_text()
    files = set(re.findall(r"(?<![\w./-])[\w/-]*\w\.py\b", text)) - OF_OTHERS
    modules = set(re.findall(r"`(cordee(?:\.[a-z_]+)+)`", text)) - {"cordee.job"}
    folders = set(re.findall(r"`((?:[a-z_]+/)+)`", text))
    missing = [word for word in files if not names_a_file(word)]
    missing += [word for word in modules if not names_a_module(word)]
    missing += [word for word in folders if not names_a_folder(word)]
    assert not missing, f"{page.relative_to(ROOT)} names {', '.join(sorted(missing))}"


@pytest.mark.parametrize(
    ("folder", "pages"),
    [
        ("agent", ["agent", "files"]),
        ("control/agents", ["control", "files"]),
        ("control/engines", ["control", "ray", "slurm"]),
        ("control/store", ["control"]),
    ],
)
def test_every_file_stands_in_a_page_of_its_room(folder: str, pages: list[str]) -> None:
    text = "".join((DOCS / "design" / f"{page}.md").read_text() for page in pages)
    files = [path.name for path in (ROOT / "src" / "cordee" / folder).glob("*.py") if path.name != "__init__.py"]
    assert [name for name in files if not re.search(rf"(?<!\w){name}", text)] == []


def test_the_index_links_every_entry_and_every_page_of_how_to_and_reference() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text()))
    folders = ("start", "how-to", "reference")
    assert {path.relative_to(DOCS).as_posix() for name in folders for path in (DOCS / name).glob("*.md")} <= linked
    assert all((DOCS / target).is_file() for target in linked)


def test_the_path_leads_from_page_to_page() -> None:
    pages = sorted((DOCS / "path").glob("*.md"))
    assert len(pages) == 10
    for page, following in itertools.pairwise(pages):
        assert f"]({following.name})" in page.read_text().split("**To take with you.**")[1], page.name
    for page in pages:
        text = page.read_text()
        assert (text.count("\n") <= 90 and "\n    $ cordee " in text) or "\n    cordee " in text, page.name
        for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text):
            picture = (page.parent / target).read_text()
            ElementTree.fromstring(picture)
            assert len(picture) < 50_000 and "prefers-color-scheme:dark" in picture, target
        assert "](../img/" in text, f"{page.name} has no picture"


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    entries = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert entries == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_between_pages_lead_somewhere_in_docs(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        there = (page.parent / target).resolve()
        assert there.exists() and there.is_relative_to(DOCS), (
            f"{target}: the site has pages of docs/ only; link other files on GitHub"
        )

"""Commands that a page of the documentation shows, with what they print.

A block begins with `$ cordee ...`; below it stand sections of the output, each from its heading to the next empty line,
with `...` between them. Pictures name the command whose HTML page they are taken from. `python tests/pages.py` writes
blocks and pictures anew after a change that is meant.
"""

import io
import os
import re
import shlex
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from unittest.mock import patch

from cordee.cli.main import main

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (
    DOCS / "how-to" / "serve-plan.md",
    DOCS / "start" / "laptop.md",
    *sorted((DOCS / "path").glob("*.md")),
)
PICTURE = re.compile(
    r"^!\[[^\]]+\]\((?P<file>[^)]+\.svg)\)\n"
    r"<!-- drawn by `cordee (?P<words>[^`]+)`: figure (?P<number>\d+), (?P<frame>wide|narrow) -->",
    re.MULTILINE,
)
WIDTHS = {"wide": 1080, "narrow": 520}
BLOCK = re.compile(r"^    \$ cordee ([^\n]+)\n((?:    (?!\$)[^\n]*\n|\n(?=    (?!\$)))*)", re.MULTILINE)


@cache
def printed(words: str) -> str:
    """Return what the command prints on 100 columns, with the catalogue's prices."""
    out = io.StringIO()
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "CORDEE_HOME": os.devnull}
    with patch.dict(os.environ, plain), redirect_stdout(out), redirect_stderr(io.StringIO()):
        try:
            main(shlex.split(words))
        except SystemExit as left:
            assert left.code in (None, 0, 21), words
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def sections(output: str) -> list[str]:
    """Return the parts of an output that empty lines divide."""
    return output.split("\n\n")


def refreshed(page: str) -> str:
    """Return the page with its blocks as the commands print them now: the same sections, the last one by its place."""

    def block(found: re.Match[str]) -> str:
        now = sections(printed(found[1]))
        shown = re.sub(r"^    ", "", found[2], flags=re.MULTILINE).strip("\n").split("\n...\n")
        kept = [next((each for each in now if _heading(each).startswith(_heading(old))), now[-1]) for old in shown]
        lines = [f"$ cordee {found[1]}", *"\n...\n".join(kept).splitlines()]
        return "".join(f"    {line}".rstrip() + "\n" for line in lines)

    return BLOCK.sub(block, page)


def _heading(section: str) -> str:
    """Return a section's first line without its numbers and its aside."""
    return re.sub(r"\d+", "#", section.splitlines()[0].split("  ")[0]) if section else ""


def draw(page: Path) -> None:
    """Write the pictures of a page, each on a ground of its own, so that it is right on light pages and dark ones."""
    for found in PICTURE.finditer(page.read_text(encoding="utf-8")):
        words, frame = found["words"], found["frame"]
        if "rank0.json.gz" in words and not Path("rank0.json.gz").is_file():
            continue  # a profile that others published: this picture is drawn where the file is
        with tempfile.TemporaryDirectory() as folder:
            html = Path(folder) / "page.html"
            printed(f"{words} --html {html}")
            figures = re.findall(
                rf'<svg [^>]*class="\w+ {frame}".*?</svg>', html.read_text(encoding="utf-8"), re.DOTALL
            )
        svg = figures[int(found["number"]) - 1]
        svg = svg.replace("<svg ", f'<svg width="{WIDTHS[frame]}" ', 1)
        ground = '<rect width="100%" height="100%" rx="6" style="fill:var(--card)"/>'
        (page.parent / found["file"]).write_text(svg.replace("</style>", f"</style>{ground}", 1), encoding="utf-8")


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
        draw(path)

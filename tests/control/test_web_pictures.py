"""The pictures of the pages in the documentation: each can be drawn anew, is there, small, and named."""

import shutil
from pathlib import Path

import pytest
from web_pictures import OUT, PAGES, WIDTHS, make
from web_product import everything

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAMES = {f"{name}_{width}.webp" for name in PAGES for width in WIDTHS}
BYTES_MAX, SUM_MAX = 100_000, 2_500_000


def test_the_documentation_has_each_page_at_each_width_and_no_large_file() -> None:
    sizes = {path.name: path.stat().st_size for path in OUT.iterdir()}
    assert sizes.keys() == NAMES
    assert max(sizes.values()) < BYTES_MAX and sum(sizes.values()) < SUM_MAX, sizes
    text = (OUT.parent.parent / "reference" / "pages.md").read_text()
    assert all(f"](../img/web/{name})" in text for name in NAMES)


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("look", [False, True], ids=["documentation", "look"])
def test_pictures_are_drawn_anew(look: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    make(everything(tmp_path_factory.mktemp("home")), tmp_path, look=look)
    names = {path.name for path in tmp_path.iterdir()}
    if look:
        wanted = [f"{width}_{scheme}" for width in WIDTHS for scheme in ("light", "dark")] + ["print"]
        assert {f"{name}_{each}.png" for name in PAGES for each in wanted} <= names
    else:
        assert names == NAMES

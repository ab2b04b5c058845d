"""Pictures of the pages of a server, with the content of `web_product.py`.

python tests/control/web_pictures.py                   write those of the documentation anew, in docs/img/web/
python tests/control/web_pictures.py --look FOLDER     write whole pages, light and dark, and as they print
python tests/control/web_pictures.py --pages now,cost  only these
"""

import argparse
import base64
import shutil
import tempfile
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from api_scene import TOKEN
from web_product import LONG, everything
from web_world import Team

OUT = Path(__file__).parent.parent.parent / "docs" / "img" / "web"
PAGES = {
    "now": "/",
    "job": "/jobs/llama-8b-pretrain",
    "sweep": "/sweeps/sft-learning-rate",
    "queues": "/queues",
    "cost": "/cost",
    "nodes": "/nodes",
    "services": "/services",
    "lab": "/lab?policy=fifo&days=7",
    "audit": "/audit",
    "artifacts": "/artifacts",
    "artifact": "/artifacts/llama-8b:best",
    "login": "/login",
}
MORE = {
    "sweeps": "/sweeps",
    "failed": f"/jobs/{LONG}",
    "waiting": "/jobs/llama-8b-long-context",
    "consent": "/jobs/segment-vit/stop",
    "drain": "/nodes/a1/drain",
    "missing": "/jobs/nobody",
}
"""Pages that are looked at, and not in the documentation."""

WIDTHS = {400: 1_600, 1_280: 1_280, 2_560: 1_440}
"""The width of a picture, and its height at most."""

QUALITY = 50


def main() -> None:
    """Make the pictures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", type=Path, metavar="FOLDER", help="whole pages as PNG and PDF")
    parser.add_argument("--pages", default="", help=f"some of {', '.join(PAGES | MORE)}")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(
            everything(Path(folder)), given.look or OUT, given.pages.split(",") if given.pages else (), look=given.look
        )


def make(team: Team, out: Path, names: Collection[str] = (), *, look: bool = False) -> None:
    """Write pictures of these pages, by default of all, into a folder; with `look` those to look at; end the team."""
    from playwright.sync_api import sync_playwright

    every = PAGES | MORE if look else PAGES
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    out.mkdir(parents=True, exist_ok=True)
    with closing(team), sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = {"base_url": team.api.url, "timezone_id": "UTC", "reduced_motion": "reduce"}
        page, stranger = browser.new_context(**view).new_page(), browser.new_context(**view).new_page()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        page.goto(httpx.post(f"{team.api.url}/v1/web-tickets", headers=headers, timeout=60).json()["url"])
        for name in names or every:
            on = stranger if name == "login" else page
            on.set_default_timeout(150_000)
            on.emulate_media(color_scheme="light")
            on.goto(every[name])
            (_whole if look else _picture)(on, out / name)
        browser.close()


def _picture(page: Any, out: Path) -> None:
    for width, height_max in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 600})
        height = min(height_max, page.evaluate("document.documentElement.scrollHeight"))
        page.set_viewport_size({"width": width, "height": height})
        asked = {"format": "webp", "quality": QUALITY}
        found = page.context.new_cdp_session(page).send("Page.captureScreenshot", asked)
        picture = base64.b64decode(found["data"])
        Path(f"{out}_{width}.webp").write_bytes(picture)
        print(f"{out.name}_{width}.webp: {height} pixels high, {len(picture):,} bytes")


def _whole(page: Any, out: Path) -> None:
    """Write the whole page at each width, light and dark, and what it prints."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.screenshot(path=f"{out}_{width}_{scheme}.png", full_page=True)
    page.emulate_media(color_scheme="light", media="print")
    page.set_viewport_size({"width": 1_047, "height": 720})
    page.screenshot(path=f"{out}_print.png", full_page=True)
    page.pdf(path=f"{out}.pdf", print_background=True, prefer_css_page_size=True)
    page.emulate_media(media="screen")


if __name__ == "__main__":
    main()

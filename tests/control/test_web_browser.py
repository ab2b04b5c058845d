"""The pages in Chromium: each at three widths, light and dark, with axe's rules; live, by keyboard, without errors."""

import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
from api_scene import TOKEN
from web_product import LONG, everything
from web_world import Team

from cordee.events import Outcome

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
PAGES = (
    "/", "/jobs/llama-8b-pretrain", f"/jobs/{LONG}", "/jobs/diffusion-xl", "/queues", "/cost", "/nodes", "/nodes/b2",
    "/sweeps", "/sweeps/sft-learning-rate", "/services", "/lab", "/audit", "/jobs/segment-vit/stop",
    "/nodes/a1/drain", "/artifacts", "/artifacts/llama-8b:best", "/artifacts/team/reranker", "/login",
)  # fmt: skip
WIDTHS = (400, 1_280, 2_560)
PAPER = 1_047  # CSS pixels of A4 across, without its margins
WAIT_MS = 60_000
SEEN = """is_seen => { Object.defineProperty(document, "hidden", {value: !is_seen, configurable: true});
  document.dispatchEvent(new Event("visibilitychange")); }"""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = everything(tmp_path_factory.mktemp("team"))
    yield team
    team.close()


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "playwright.Browser", team: Team) -> Iterator["playwright.Page"]:
    page = browser.new_page(base_url=team.api.url)
    page.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    page.goto(httpx.post(f"{team.api.url}/v1/web-tickets", headers=headers, timeout=WAIT_MS / 1000).json()["url"])
    yield page
    page.close()
    assert not problems


def violations(page: "playwright.Page", only: dict[str, object]) -> list[tuple[str, str, str]]:
    """Return the violations of some rules that axe finds."""
    found = page.evaluate("only => axe.run({runOnly: only, resultTypes: ['violations']})", only)
    return [
        (each["id"], node["html"][:160], node["failureSummary"][:200])
        for each in found["violations"]
        for node in each["nodes"][:3]
    ]


def test_every_page_is_accessible_and_fits_its_window(page: "playwright.Page") -> None:
    script = axe.Axe().axe_script
    for path in PAGES:
        page.emulate_media(color_scheme="light")
        page.goto(path)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, (path, width)
        page.evaluate(script)
        wrong = violations(page, {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]})
        page.emulate_media(color_scheme="dark")
        wrong += violations(page, {"type": "rule", "values": ["color-contrast"]})
        assert not wrong, (path, wrong)


def test_orders_starts_and_reasons_are_in_view_at_each_width(page: "playwright.Page") -> None:
    for path, cells in (("/nodes", "#node-rows .button"), ("/", "#queue-rows :is(td:nth-last-child(2), .why)")):
        page.goto(path)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            # All in one moment: the page replaces its rows while it is looked at.
            ends = page.locator(cells).evaluate_all("cells => cells.map(each => each.getBoundingClientRect())")
            assert len(ends) > 2
            assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in ends), (path, width)


def test_a_page_that_is_hidden_is_not_followed_so_that_a_seventh_one_opens(
    browser: "playwright.Browser", team: Team
) -> None:
    """A browser opens six connections to a server; what is followed keeps one."""
    context = browser.new_context(base_url=team.api.url)
    context.set_default_timeout(WAIT_MS)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    ticket = httpx.post(f"{team.api.url}/v1/web-tickets", headers=headers, timeout=WAIT_MS / 1000).json()["url"]
    tabs = []
    for at in range(7):
        tab = context.new_page()
        tab.goto(ticket if at == 0 else "/")
        playwright.expect(tab.locator("#pulse")).to_have_text("live")
        playwright.expect(tab.locator("body")).to_have_attribute("data-updates", re.compile("[1-9]"))
        tabs.append(tab)
        if at < 6:
            tab.evaluate(SEEN, False)
            playwright.expect(tab.locator("#pulse")).to_have_text("paused")
    first = tabs[0]
    money = first.locator("[data-rate]")
    stopped = money.inner_text()
    playwright.expect(tabs[-1].locator("[data-rate]")).not_to_have_text(tabs[-1].locator("[data-rate]").inner_text())
    assert money.inner_text() == stopped, "nobody says that it goes on"
    first.evaluate(SEEN, True)
    playwright.expect(first.locator("#pulse")).to_have_text("live")
    playwright.expect(money).not_to_have_text(stopped)
    context.close()


def test_every_page_prints_on_paper_without_what_only_a_screen_needs(page: "playwright.Page") -> None:
    page.emulate_media(media="print")
    page.set_viewport_size({"width": PAPER, "height": 740})
    for path in PAGES:
        page.goto(path)
        cut = page.evaluate(
            "[...document.querySelectorAll('.wide, figure')].filter(each => each.scrollWidth > each.clientWidth + 1)"
            ".map(each => `${each.getAttribute('aria-label')}: ${each.scrollWidth} of ${each.clientWidth} pixels`)"
        )
        assert not cut, (path, cut)
        for needless in ("nav", ".filter", ".actions", ".pulse", "footer .keys"):
            playwright.expect(page.locator(needless).locator("visible=true")).to_have_count(0)


@pytest.mark.parametrize("path", ["/", "/nodes", "/jobs/llama-8b-pretrain", "/sweeps/sft-learning-rate"])
def test_the_tab_key_reaches_every_control_and_shows_where_it_is(page: "playwright.Page", path: str) -> None:
    page.add_init_script("window.EventSource = class extends EventTarget { close() {} }")  # its parts stay as they are
    page.goto(path)
    wanted = page.evaluate(
        "() => { const all = [...document.querySelectorAll('a[href], button, input, select, [tabindex=\"0\"]')]"
        "  .filter(each => each.tabIndex >= 0 && each.checkVisibility() && each.type !== 'hidden');"
        "  all.forEach((each, at) => each.dataset.at = at); return all.length; }"
    )
    reached = set()
    for _ in range(wanted):
        page.keyboard.press("Tab")
        at, ring = page.evaluate(
            "() => { const on = document.activeElement, style = getComputedStyle(on);"
            "  return [on.dataset.at, style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2]; }"
        )
        assert ring, f"no focus is seen on control {at} of {path}"
        reached.add(int(at))
    assert reached == set(range(wanted))
    links = "[...document.querySelectorAll('main a[tabindex=\"-1\"]')].map(each => each.getAttribute('href'))"
    elsewhere = "[...document.querySelectorAll('a[data-at]')].map(each => each.getAttribute('href'))"
    assert set(page.evaluate(links)) <= set(page.evaluate(elsewhere)), "what the tab key leaves out is linked elsewhere"


def test_a_sweep_shows_how_trials_are_halved(page: "playwright.Page", team: Team) -> None:
    page.goto("/sweeps")
    page.get_by_role("link", name="sft-learning-rate").click()
    rows = page.locator("#halving tbody tr")
    playwright.expect(rows).to_have_count(3)
    steps, reached, went_on = (rows.locator(f":nth-child({column})").all_inner_texts() for column in (2, 4, 5))
    sweep = team.api.sweeps.sweep("sft-learning-rate")
    assert steps == ["100", "300", "900"]
    assert reached == [str(sum(each.rung > rung for each in sweep.trials)) for rung in range(3)]
    assert int(went_on[0]) == int(reached[0]) // 3 > 0


def test_a_page_stays_current_and_its_money_ticks(page: "playwright.Page", team: Team) -> None:
    page.goto("/")
    ticking = page.locator("[data-rate]")
    before = ticking.inner_text()
    playwright.expect(ticking).not_to_have_text(before, timeout=WAIT_MS)
    filter_ = page.locator("[data-filter=running-rows]")
    filter_.fill("tomas")
    playwright.expect(page.locator("#running-rows tr:visible")).to_have_count(1)
    playwright.expect(page.locator("body")).to_have_attribute("data-updates", re.compile("[1-9]"))
    team.leave(team.ids["eval-nightly"], "done", Outcome.FINISHED)
    playwright.expect(page.locator("#running-rows")).not_to_contain_text("eval-nightly", timeout=WAIT_MS)
    assert filter_.input_value() == "tomas"  # what was typed outlives the part around it


def test_the_keyboard_reaches_every_page(page: "playwright.Page") -> None:
    page.goto("/")
    for key, path in (("q", "/queues"), ("c", "/cost"), ("o", "/nodes"), ("a", "/artifacts"),
        ("s", "/sweeps"), ("v", "/services"), ("u", "/audit"), ("l", "/lab"), ("n", "/"),
    ):  # fmt: skip
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(re.compile(re.escape(path) + "$"))
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.matches('[type=search]')")
    page.keyboard.type("dpo-sweep")
    playwright.expect(page.locator("#queue-rows tr:visible")).to_have_count(1)
    page.goto("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"


def test_the_lineage_leads_to_the_job_and_to_what_came_of_it(page: "playwright.Page", team: Team) -> None:
    page.goto("/artifacts")
    page.get_by_role("link", name="llama-8b:2").click()
    shown = page.locator(".lineage.wide")
    shown.get_by_role("link", name="team/reranker:1").click()
    page.wait_for_url("**/artifacts/team/reranker:1")
    job_id = team.ids["reranker-sft"]
    shown.get_by_role("link", name=job_id).focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/{job_id}")


def test_a_person_pauses_a_job_from_its_page(page: "playwright.Page", team: Team) -> None:
    job_id = team.submit("late-eval", "ada", 16, "product")
    page.goto(f"/jobs/{job_id}")
    page.get_by_role("link", name="Pause").click()
    page.get_by_role("button", name="Pause it").click()
    page.get_by_text("It was asked to save").wait_for()
    assert page.url == f"{team.api.url}/jobs/{job_id}?done=pause"
    team.tick()
    assert team.api.operations.job(job_id).state == "paused"
    playwright.expect(page.locator("#summary")).to_contain_text("Resume", timeout=WAIT_MS)

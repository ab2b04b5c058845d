"""What asks the server in `team.py`: browsers and clients of the API, each kind in a process of its own."""

import asyncio
import http.client
import json
import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

TIMEOUT_S = 60.0
START_S = 180.0

PAINTED = """() => new Promise(done => {
  const tell = () => {
    const page = performance.getEntriesByType("navigation")[0];
    const all = [page, ...performance.getEntriesByType("resource")];
    const paint = performance.getEntriesByName("first-paint")[0];
    done({
      answer_ms: page.responseEnd - page.requestStart,
      paint_ms: paint ? paint.startTime : null,
      bytes: all.reduce((sum, each) => sum + each.transferSize, 0),
    });
  };
  if (performance.getEntriesByName("first-paint").length) return tell();
  new PerformanceObserver(tell).observe({type: "paint", buffered: true});
  setTimeout(tell, 10000);
})"""
"""What the page measured of itself, once it is painted. `bytes` are those of the network, headers included."""


class Visit(NamedTuple):
    """A page as one browser got it, or an answer of the API; times in ms, of which a failure has none."""

    what: str
    answer_ms: float | None
    paint_ms: float | None
    size: int
    wrong: str = ""


class Load:
    """A process that asks the server when it is told to: `begin`, and then `end` for what it saw."""

    def __init__(self, work: Callable[..., None], *given: object) -> None:
        """Start `work(connection, *given)`, and wait until it is ready."""
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *given), daemon=True)
        self._process.start()
        theirs.close()
        self._answer(START_S)

    def begin(self, seconds: float) -> None:
        """Let it ask for so long."""
        self._line.send(seconds)
        self._lasts_s = seconds

    def end(self) -> list[Visit]:
        """Return what it saw, once it has ended."""
        found: list[Visit] = self._answer(self._lasts_s + 2 * TIMEOUT_S)
        return found

    def _answer(self, timeout_s: float) -> Any:
        assert self._line.poll(timeout_s), f"a process of the load said nothing for {timeout_s:.0f} s"
        return self._line.recv()

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()


# -- browsers ---------------------------------------------------------------------------------------------------------


def browsers(line: Connection, url: str, tokens: Sequence[str], paths: dict[str, str], dwell_s: float) -> None:
    """Turn pages in Chromium, one for each token: open the next path, stay there and follow it, go on."""
    asyncio.run(_browsers(line, url, tokens, paths, dwell_s))


async def _browsers(line: Connection, url: str, tokens: Sequence[str], paths: dict[str, str], dwell_s: float) -> None:
    from playwright.async_api import async_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert chromium is not None, "no Chromium is installed"
    async with async_playwright() as started:
        browser = await started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = []
        for token in tokens:
            page = await (await browser.new_context(base_url=url)).new_page()
            page.set_default_timeout(TIMEOUT_S * 1e3)
            await page.goto(_ticket(url, token))
            await page.goto("about:blank")
            pages.append(page)
        line.send(len(pages))
        while (seconds := await asyncio.to_thread(_told, line)) is not None:
            until_s = time.monotonic() + seconds
            turns = (_turn(page, at, paths, dwell_s, until_s) for at, page in enumerate(pages))
            line.send([visit for found in await asyncio.gather(*turns) for visit in found])
        await browser.close()


async def _turn(page: Any, at: int, paths: dict[str, str], dwell_s: float, until_s: float) -> list[Visit]:
    """Visit pages until it is time; the first browsers begin at different ones, and not all at once."""
    found, names = [], list(paths)
    await asyncio.sleep(dwell_s * at / 20)
    while time.monotonic() < until_s:
        name = names[(at + len(found)) % len(names)]
        try:
            answer = await page.goto(paths[name])
            seen = await page.evaluate(PAINTED)
        except Exception as error:  # Playwright's: a page that does not come is a figure, and the others go on
            found.append(Visit(name, None, None, 0, str(error).splitlines()[0]))
        else:
            wrong = "" if answer.status == 200 else f"status {answer.status}"
            found.append(Visit(name, seen["answer_ms"], seen["paint_ms"], seen["bytes"], wrong))
        await asyncio.sleep(max(0.0, min(dwell_s, until_s - time.monotonic())))
    await page.goto("about:blank")
    return found


def _ticket(url: str, token: str) -> str:
    asked = Request(f"{url}/v1/web-tickets", method="POST", headers={"Authorization": f"Bearer {token}"})
    with urlopen(asked, timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["url"])


# -- clients of the API -----------------------------------------------------------------------------------------------


def clients(line: Connection, url: str, tokens: Sequence[str], paths: dict[str, str], every_s: float) -> None:
    """Ask as programs do, one for each token: over a connection that stays, the next path each `every_s` seconds."""
    line.send(len(tokens))
    while (seconds := _told(line)) is not None:
        found: list[list[Visit]] = [[] for _ in tokens]
        until_s = time.monotonic() + seconds
        threads = [
            threading.Thread(target=_ask, args=(url, token, at, paths, every_s, until_s, found[at]))
            for at, token in enumerate(tokens)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        line.send([visit for each in found for visit in each])


def _ask(
    url: str, token: str, at: int, paths: dict[str, str], every_s: float, until_s: float, found: list[Visit]
) -> None:
    names, due_s = list(paths), time.monotonic() + every_s * at / 100 % every_s
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    while due_s < until_s:
        time.sleep(max(0.0, due_s - time.monotonic()))
        name = names[(at + len(found)) % len(names)]
        from_s = time.perf_counter()
        try:
            connection.request("GET", paths[name], headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            size = len(answer.read())
        except OSError as error:
            connection.close()
            found.append(Visit(name, None, None, 0, type(error).__name__))
        else:
            wrong = "" if answer.status == 200 else f"status {answer.status}"
            found.append(Visit(name, 1e3 * (time.perf_counter() - from_s), None, size, wrong))
        due_s = max(due_s + every_s, time.monotonic())
    connection.close()


def _told(line: Connection) -> float | None:
    """Return for how many seconds to ask; None at the end."""
    try:
        return float(line.recv())
    except EOFError:
        return None

"""The pages over a real socket: logging in, who may do what, what other sites cannot, and what a page shows."""

import csv
import io
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_scene import OTHER, TOKEN
from web_world import H100, HOUR, S, Team, a_week, with_artifacts

from cordee.control.access import Access
from cordee.control.months import Books, Span
from cordee.control.roles import ADMIN, Bearer
from cordee.control.web.job import job_parts
from cordee.control.web.parts import Parts
from cordee.control.web.sessions import LASTS_S
from cordee.events import NodeCordoned, StopRequested
from cordee.units import MiB, format_bytes, format_micro_usd


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = with_artifacts(a_week(tmp_path_factory.mktemp("team")))
    yield team
    team.close()


@contextmanager
def logged_in(team: Team, token: str = TOKEN) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=team.api.url, follow_redirects=True, timeout=60) as browser:
        answer = browser.post("/login", data={"token": token, "next": "/queues"})
        assert answer.status_code == 200, answer.text
        yield browser


def form_of(html: str) -> str:
    found = re.search(r'name="form" value="([0-9a-f]+)"', html)
    assert found is not None
    return found[1]


@pytest.fixture
def ada(team: Team) -> Iterator[httpx.Client]:
    with logged_in(team) as browser:
        yield browser


@pytest.fixture
def bob(team: Team) -> Iterator[httpx.Client]:
    with logged_in(team, OTHER) as browser:
        yield browser


PAGES = ("/", "/queues", "/nodes", "/sweeps", "/services", "/cost", "/artifacts", "/artifacts/llama-8b")


@pytest.mark.parametrize("path", PAGES)
def test_who_is_not_logged_in_is_sent_to_the_login_and_back(team: Team, path: str) -> None:
    with httpx.Client(base_url=team.api.url, timeout=60) as stranger:
        sent = stranger.get(path + "?by=user")
        assert sent.status_code == 303
        assert sent.headers["location"].startswith("/login?next=")
        page = stranger.get(sent.headers["location"])
        assert f'name="next" value="{path}?by=user"' in page.text
        done = stranger.post("/login", data={"token": TOKEN, "next": f"{path}?by=user"})
        assert (done.status_code, done.headers["location"]) == (303, f"{path}?by=user")


def test_a_wrong_token_begins_no_session(team: Team) -> None:
    with httpx.Client(base_url=team.api.url, timeout=60) as stranger:
        answer = stranger.post("/login", data={"token": "wrong"})
        assert answer.status_code == 401
        assert "The token is wrong." in answer.text
        assert not stranger.cookies
        assert stranger.get("/live", params={"page": "now"}).status_code == 401


@pytest.mark.parametrize("to", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_a_login_leads_to_this_server_only(team: Team, to: str) -> None:
    answer = httpx.post(f"{team.api.url}/login", data={"token": TOKEN, "next": to}, timeout=60)
    assert answer.headers["location"] == "/"


def test_a_ticket_logs_in_once(team: Team) -> None:
    made = httpx.post(
        f"{team.api.url}/v1/web-tickets", headers={"Authorization": f"Bearer {OTHER}"}, timeout=60
    ).json()["url"]
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        assert "bob" in browser.get(made).text
    with httpx.Client(follow_redirects=True, timeout=60) as second:
        assert "used or too old" in second.get(made).text
        assert not second.cookies


def test_a_session_ends_by_time_by_its_token_and_by_a_changed_cookie(tmp_path: Path) -> None:
    team = Team(tmp_path)
    try:
        with logged_in(team, OTHER) as browser:
            [(name, cookie)] = browser.cookies.items()
            assert browser.get("/nodes").url.path == "/nodes"
            browser.cookies.set(name, ("A" if cookie[0] != "A" else "B") + cookie[1:], domain="127.0.0.1")
            assert browser.get("/nodes").url.path == "/login"
            browser.cookies.clear()
            browser.cookies.set(name, cookie, domain="127.0.0.1")
            assert browser.get("/nodes").url.path == "/nodes"
            owners = team.api.operations.owners
            team.api.operations.owners = {token: owner for token, owner in owners.items() if token != OTHER}
            assert browser.get("/nodes").url.path == "/login"
            team.api.operations.owners = owners
            assert browser.get("/nodes").url.path == "/nodes"
            team.api.scene.time.us += LASTS_S * S
            assert browser.get("/nodes").url.path == "/login"
    finally:
        team.close()


@pytest.mark.parametrize("path", [*PAGES, "/login", "/jobs/nobody", "/jobs/eval-nightly"])
def test_every_page_forbids_what_it_does_not_need(ada: httpx.Client, path: str) -> None:
    answer = ada.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in answer.text and " onclick" not in answer.text
    cookie = ada.post("/login", data={"token": TOKEN}, follow_redirects=False).headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie


def test_now_shows_who_holds_what_who_waits_and_what_is_idle(ada: httpx.Client, team: Team) -> None:
    html = ada.get("/").text
    assert html.count('class="gpu held" href=') == 36
    assert "36 of 40" in html
    told = r'title="GPU (\d): segment-vit of yuki, (\d+)% busy, ([\d.]+) GB of 85 GB"[^>]*>(\d+)</a>'
    cells = re.findall(told, html)
    assert [(gpu, memory) for gpu, _, memory, _ in cells[:3]] == [("0", "72.4"), ("1", "72"), ("2", "71.6")]
    assert len({busy for _, busy, *_ in cells}) > 3 and all(busy == shown for _, busy, _, shown in cells)
    rate = re.search(r'data-rate="(\d+)"', html)
    assert rate is not None and int(rate[1]) == 4 * 2_990_000
    for name in ("llama-8b-pretrain", "segment-vit", "diffusion-xl"):
        assert name in html
    assert "llama-8b-long-context" in html and "it needs 16 GPUs" in html
    assert "cordoned by ada: ECC errors on GPU 5" in html


def test_a_job_shows_its_attempts_curves_logs_and_cost(ada: httpx.Client, team: Team) -> None:
    html = ada.get("/jobs/llama-8b-pretrain").text
    assert html.count("attempt 1") and html.count("attempt 2")
    assert "loss by step" in html and "96 GB" in html
    assert "of 6,000 steps" in html
    assert "by infrastructure" in html
    assert 'href="/artifacts/llama-8b:2"' in html and 'href="/artifacts/corpus/web-2026:1"' in html
    found = ada.get(f"/jobs/{team.ids['llama-8b-pretrain']}", params={"words": "nccl", "rank": 0, "epoch": 2}).text
    assert "WARNING: one <mark>NCCL</mark> retry on rank 3" in found
    assert "step     50" not in found
    assert ada.get("/jobs/nobody").status_code == 404
    assert ada.get("/jobs/llama-8b-pretrain", params={"rank": "x"}).status_code == 422


def test_an_artifact_shows_its_job_its_files_and_what_came_of_it(ada: httpx.Client, team: Team) -> None:
    listed = ada.get("/artifacts").text
    assert all(f'href="/artifacts/{ref}"' in listed for ref in ("corpus/web-2026:1", "llama-8b:2", "team/reranker:1"))
    assert "llama-8b:1" not in listed, "the newest version of each name"
    page = ada.get("/artifacts/llama-8b:best").text
    big = team.ids["llama-8b-pretrain"]
    spent = team.api.artifacts.show("llama-8b:2", Access(Bearer("ada", grants=ADMIN), team.api.operations)).maker
    assert spent is not None and spent.micro_usd > 0
    for told in (
        f'href="/jobs/{big}"', format_micro_usd(spent.micro_usd), 'href="/artifacts/corpus/web-2026:1"',
        'href="/artifacts/team/reranker:1"', f'href="/jobs/{team.ids["eval-nightly"]}"', "weights.f32", "production",
        "version 2 is in production", "tag best is version 2", "by the public key", "no file that runs code",
        'href="/artifacts/llama-8b:1"',
    ):  # fmt: skip
        assert told in page, told
    assert ada.get("/artifacts/llama-8b:9").status_code == ada.get("/artifacts/nobody").status_code == 404
    first = team.folder / "artifacts" / "manifests" / digest_of_version(team, "llama-8b:1")
    first.rename(first.with_name("away"))
    assert "cannot be listed from here" in ada.get("/artifacts/llama-8b:1").text, "the rest of the page is there"
    first.with_name("away").rename(first)


def digest_of_version(team: Team, ref: str) -> str:
    return team.api.artifacts.show(ref, Access(Bearer("ada", grants=ADMIN), team.api.operations)).digest


def test_a_token_to_read_with_changes_nothing_by_any_way(tmp_path: Path) -> None:
    team, token = Team(tmp_path), "a-token-to-read-with-only"
    try:
        job_id = team.submit("short", "carol", 8, "product")
        bearers = team.api.operations.owners
        team.api.operations.owners = {**bearers, token: Bearer("carol", reads_only=True, until_us=team.now + HOUR)}
        before = team.api.operations.control.number
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{team.api.url}/v1/jobs", headers=headers, timeout=60).status_code == 200
        described = httpx.get(f"{team.api.url}/openapi.json", timeout=60).json()["paths"]
        asked = 0
        for path, methods in described.items():
            for method in methods:
                if method != "get" and not path.startswith("/v1/agents") and path != "/v1/web-tickets":
                    url = team.api.url + re.sub(r"\{\w+\}", job_id, path)
                    answer = httpx.request(method, url, headers=headers, json={}, verify=False, timeout=60)
                    assert answer.status_code == 403, (method, path, answer.text)
                    asked += 1
        assert asked > 30
        with logged_in(team, token) as carol:
            assert f"/jobs/{job_id}/stop" not in carol.get(f"/jobs/{job_id}").text
            form = form_of(carol.get("/").text)
            assert carol.post(f"/jobs/{job_id}/stop", data={"form": form}).status_code == 403
            assert team.api.operations.control.number == before
            team.api.scene.time.us += 2 * HOUR
            assert carol.get("/").url.path == "/login"
        gone = httpx.get(f"{team.api.url}/v1/jobs", headers=headers, timeout=60)
        assert gone.status_code == 401 and "has expired" in gone.text
    finally:
        team.close()


def test_what_people_write_is_text_in_a_page(ada: httpx.Client, team: Team) -> None:
    """A log line and a name are shown as they are, and never become markup."""
    job_id = team.ids["eval-nightly"]
    [log, *_] = sorted((team.folder / "attempts" / job_id).rglob("rank0.log"))
    log.write_text("<script>alert(1)</script> <b>bold</b>\n")
    html = ada.get(f"/jobs/{job_id}", params={"words": "<b>"}).text
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)" in html
    assert "<mark>&lt;b&gt;</mark>" in html


def test_logs_show_the_newest_lines_of_each_rank_and_search_more_than_the_last_ones(
    ada: httpx.Client, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = team.ids["diffusion-xl"]  # it waits, so that nothing else is there
    folder = team.folder / "attempts" / job_id / "1" / "n1" / "logs"
    folder.mkdir(parents=True)
    for rank in range(3):
        (folder / f"rank{rank}.log").write_text("".join(f"line {each} of rank {rank}\n" for each in range(400)))
    (folder / "rank3.log").write_text("step 1\nRuntimeError: the first one\n")

    def shown(**query: object) -> tuple[list[str], str]:
        html = ada.get(f"/jobs/{job_id}", params={"epoch": 1, **query}).text
        text = re.sub("</?mark>", "", html[html.index('id="logs"') : html.index('id="measured"')])
        return re.findall(r"^(?:<pre.*>)?(\[rank\d\].*|line.*)$", text, re.MULTILINE), text

    lines, text = shown()
    assert [sum(f"[rank{rank}]" in line for line in lines) for rank in range(4)] == [99, 99, 100, 2]
    assert "[rank0] line 399 of rank 0" in lines and "[rank3] RuntimeError: the first one" in lines
    assert "The newest lines of each rank" in text
    assert len(shown(words="line")[0]) == 300 and shown(words="RUNTIME")[0] == ["[rank3] RuntimeError: the first one"]
    with (folder / "rank0.log").open("a") as file:
        file.writelines(f"{each:>100}\n" for each in range(30_000))  # 3 MB
    assert shown(words="line 7 of rank 0")[0] == ["[rank0] line 7 of rank 0"]
    assert "No line has these words." in shown(words="nowhere")[1]
    monkeypatch.setattr("cordee.control.web.job.LOG_BYTES", MiB)
    lines, text = shown(words="line 7 of rank 0", rank=0)
    assert not lines and f"No line in the last {format_bytes(MiB)} has these words" in text
    monkeypatch.setattr("cordee.control.web.job.LOGS_SHOWN", 3)
    assert "and 1 log more: choose a rank" in shown(words="of rank")[1]


def test_a_job_is_stopped_after_consent_and_not_by_another_site(tmp_path: Path) -> None:
    team = Team(tmp_path)
    try:
        job_id = team.submit("short", "bob", 8, "product")
        with logged_in(team) as ada, logged_in(team, OTHER) as bob:
            ask = bob.get(f"/jobs/{job_id}/stop")
            assert "It writes no checkpoint" in ask.text
            token = form_of(ask.text)
            assert bob.post(f"/jobs/{job_id}/stop", data={}).status_code == 403
            assert bob.post(f"/jobs/{job_id}/stop", data={"form": form_of(ada.get("/").text)}).status_code == 403
            for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                assert bob.post(f"/jobs/{job_id}/stop", data={"form": token}, headers=headers).status_code == 403
            assert bob.get(f"/jobs/{job_id}/explode").status_code == 422
            assert not team.api.scene.of(StopRequested)
            done = bob.post(f"/jobs/{job_id}/stop", data={"form": token})
            assert done.url.path == f"/jobs/{job_id}" and "It was asked to stop." in done.text
            [asked] = team.api.scene.of(StopRequested)
            assert isinstance(asked, StopRequested) and (asked.by, asked.now) == ("bob", False)
    finally:
        team.close()


def test_nobody_changes_the_jobs_of_others_and_only_the_operator_changes_nodes(
    team: Team, ada: httpx.Client, bob: httpx.Client
) -> None:
    job_id = team.ids["segment-vit"]
    assert "/stop" not in bob.get(f"/jobs/{job_id}").text and "/stop" in ada.get(f"/jobs/{job_id}").text
    assert bob.get(f"/jobs/{job_id}/stop").status_code == 403
    token = form_of(bob.get("/").text)
    assert bob.post(f"/jobs/{job_id}/stop", data={"form": token}).status_code == 403
    assert "Drain" not in bob.get("/nodes").text
    assert bob.post("/nodes/a1/drain", data={"form": token}).status_code == 403
    before = len(team.api.scene.of(NodeCordoned))
    done = ada.post("/nodes/a1/cordon", data={"form": form_of(ada.get("/").text), "why": "a fan"})
    assert done.url.path == "/nodes"
    events = team.api.scene.of(NodeCordoned)
    assert len(events) == before + 1 and isinstance(events[-1], NodeCordoned) and events[-1].why == "a fan"
    ada.post("/nodes/a1/uncordon", data={"form": form_of(ada.get("/").text)})


def test_a_month_adds_up_to_the_ledger(team: Team, ada: httpx.Client) -> None:
    """All was held within one month, so its costs are the ledger's, and held and idle are the capacity."""
    with team.api.scene.control.changed:
        totals = team.api.scene.control.ledger.totals(team.now)
    costs = Books(team.api.operations).costs(Span.month("2026-11"), team.now)
    assert costs.total.paid == totals.micro_usd.held
    assert abs(costs.idle_micro_usd - totals.idle_micro_usd) <= totals.idle_micro_usd // 1_000_000
    for sums in costs.by.values():
        assert sum(each.paid for each in sums.values()) == costs.total.paid
    assert abs(sum(held for held, _ in costs.days) - costs.total.paid) <= len(costs.days)
    rows = list(csv.DictReader(io.StringIO(ada.get("/cost.csv", params={"month": "2026-11"}).text)))
    later = 100  # the clock of the scene goes on by a microsecond with each question

    def summed(rows: list[dict[str, str]], column: str) -> int:
        return int(sum(Decimal(row[column]) for row in rows) * 10**6)

    assert 0 <= summed(rows, "held_total_usd") - totals.micro_usd.held < later
    assert summed(rows, "lost_gpu_seconds") == totals.gpu_us.lost > 0
    assert 0 <= summed(rows, "idle_usd") - totals.idle_micro_usd < later
    assert {row["price_sources"] for row in rows if row["user"] != "(idle)"} == {H100.price_source}
    for path in ("/v1/chargeback.csv", "/v1/chargeback.csv?idle=by-use"):
        other = httpx.get(team.api.url + path, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60).text
        found = list(csv.DictReader(io.StringIO(other)))
        assert summed(found, "billed_usd") == summed(found, "held_total_usd") + summed(found, "idle_usd") > 0
    mine = httpx.get(f"{team.api.url}/v1/chargeback", headers={"Authorization": f"Bearer {OTHER}"}, timeout=60).json()[
        "lines"
    ]
    assert [line["user"] for line in mine] == sorted(row["user"] for row in rows)  # a user sees all queues
    assert ada.get("/cost", params={"month": "2026-13"}).status_code == 422
    assert ada.get("/cost", params={"by": "planet"}).status_code == 422


def test_two_months_are_divided_by_the_time_in_each(team: Team) -> None:
    whole = Books(team.api.operations).costs(Span.month("2026-11"), team.now)
    books, middle = Books(team.api.operations), whole.span.from_us + 24 * 24 * HOUR
    first = books.costs(Span(whole.span.from_us, middle, "one"), team.now)
    second = books.costs(Span(middle, whole.span.to_us, "two"), team.now)
    assert first.total.paid > 0 and second.total.paid > 0
    assert abs(first.total.paid + second.total.paid - whole.total.paid) < 100
    assert abs(first.capacity_micro_usd + second.capacity_micro_usd - whole.capacity_micro_usd) < 100


def test_a_follower_gets_what_changed_and_no_more(team: Team, ada: httpx.Client) -> None:
    with ada.stream("GET", "/live", params={"page": "queues"}) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: parts"
        assert '"tree"' in next(lines)
    assert ada.get("/live", params={"page": "nothing"}).status_code == 404


def test_pages_that_wait_to_be_drawn_keep_no_thread_and_are_not_drawn_for_who_has_left(
    team: Team, ada: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty requests for a page with new words each; all threads for requests stay free meanwhile."""
    job_id, drawn = team.ids["segment-vit"], list[str]()

    def counted(*given: Any) -> Parts:
        drawn.append(given[-1].words)
        return job_parts(*given)

    monkeypatch.setattr("cordee.control.web.pages.job_parts", counted)
    [(name, cookie)] = ada.cookies.items()
    url = httpx.URL(team.api.url)
    lines = [socket.create_connection((url.host, url.port or 80)) for _ in range(60)]
    with team.api.pages.drawings._drawing:  # as if one page took for ever
        for at, line in enumerate(lines):
            ask = f"GET /jobs/{job_id}?words=w{at} HTTP/1.1\r\nHost: x\r\nCookie: {name}={cookie}\r\n\r\n"
            line.sendall(ask.encode())
        while team.api.pages.turns.waiting < len(lines):
            assert team.api.client.health().pid
        assert job_id in [each.job_id for each in team.api.client.jobs()]
        for line in lines:
            line.close()
        for _ in range(10):
            assert team.api.client.health().pid
    assert ada.get(f"/jobs/{job_id}", params={"words": "last"}).status_code == 200
    assert drawn[-1] == "last" and len(drawn) < 5, "one was begun, and the others have left"


def test_files_of_the_pages_may_be_kept_for_ever(ada: httpx.Client) -> None:
    html = ada.get("/login").text
    for path in re.findall(r'"(/web/[^"]+)"', html):
        answer = ada.get(path)
        assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"]
    assert ada.get("/web/x/../../etc/passwd").status_code == 404
    assert ada.get("/web/x/nothing").status_code == 404

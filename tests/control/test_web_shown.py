"""Numbers and names that pages show: weights of a week, hit rates, payers who may not be seen, prices, faults."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_scene import OTHER, TOKEN
from services_world import World, chat
from web_world import DAY, H100, HOUR, MINUTE, NODES, QUEUES, S, Team

from cordee.answers.queues import QueuesSubmission
from cordee.answers.services import UsageLine
from cordee.control.access import Access
from cordee.control.chargeback import lines_of
from cordee.control.months import Books, Span
from cordee.control.roles import ADMIN, Bearer, Grant, Role
from cordee.control.web.others import services_parts
from cordee.events import NodeDown, NodeUp, Outcome
from cordee.view.page import part


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    team = Team(tmp_path)
    yield team
    team.close()


def shown(url: str, path: str, token: str = TOKEN) -> str:
    with httpx.Client(base_url=url, follow_redirects=True, timeout=60) as browser:
        browser.post("/login", data={"token": token})
        answer = browser.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text


def test_the_weeks_of_a_queue_are_compared_with_its_siblings_by_the_weights_of_then(team: Team) -> None:
    language, vision = team.submit("a", "ines", 8, "language"), team.submit("b", "yuki", 8, "vision")
    for job_id in (language, vision):
        team.start(job_id)
    team.submit("c", "omar", 16, "product")
    team.tick(DAY)
    team.tick(7 * DAY)
    changed = [each.model_copy(update={"weight": 3 if each.name == "vision" else each.weight}) for each in QUEUES]
    team.api.operations.set_queues(QueuesSubmission(queues=changed))
    team.tick(HOUR)
    html = shown(team.api.url, "/queues")
    told = dict(re.findall(r'GPU time of \w+(?: \w+)? that went to (\w+), by week, the newest last: ([^"]+)"', html))
    paths = re.findall(r'that went to (\w+), by(?:.|\n)*?<path d="(.*?)"', html)
    lines = {name: re.findall(r"M\d+ ([\d.]+)h", path) for name, path in paths}
    assert {name: parts.split(", ")[-1] for name, parts in told.items()} == {
        "research": "50%", "vision": "50%", "language": "50%", "product": "50%", "default": "0%"
    }  # fmt: skip
    # Heights from the top of 30: language had 2 of 3 and has 2 of 5; the weeks before the cluster have no line.
    assert (lines["language"], lines["vision"], lines["product"]) == (["10", "18"], ["20", "12"], ["24", "24"])


def test_a_service_shows_how_many_input_tokens_came_from_a_cache(world: World) -> None:
    world.api.client.declare(chat())
    world.turn()
    world.get_ready()
    viewer = Access(Bearer("ada", grants=ADMIN), world.api.operations)

    def page() -> str:
        return services_parts(world.api.services, viewer)["services"]

    assert "<b>–</b><span>of input tokens from a prefix cache, in seven days" in page()
    [first, second] = world.view().replicas
    now_us = world.api.scene.time.us
    about: dict[str, Any] = {"service": "chat", "tenant": "t", "key": "k", "model": "tiny", "until_us": now_us}
    lines = [
        UsageLine(
            job_id=each.job_id, epoch=each.epoch, from_us=0, requests=3, failed=0, input_tokens=1_000,
            cached_tokens=cached, output_tokens=100, busy_us=S, **about,
        )
        for each, cached in ((first, 250), (second, 650))
    ]  # fmt: skip
    world.say(seq=1, usage=lines)
    world.turn(2.0)
    html = page()
    assert "<b>45%</b><span>of input tokens from a prefix cache, in seven days" in html
    assert "Planned and measured" not in html, "nothing was planned, so there is nothing beside it"
    world.turn(8 * 86_400.0)
    assert "<b>–</b><span>of input tokens" in page()


def test_who_may_not_see_a_job_does_not_learn_for_whom_something_was_lost(team: Team) -> None:
    low = team.submit("low", "yuki", 40, "vision", tier="preemptible", checkpoint={"to": str(team.folder / "to")})
    team.start(low)
    team.train((low, 100, 1000), save=False)
    team.submit("high", "ines", 16, "language", tier="production")
    team.tick(40 * S)
    team.leave(low, "lost", Outcome.LOST)
    team.tick(MINUTE)
    books, span = Books(team.api.operations), Span.containing(team.now)
    vera = Bearer("vera", grants=(Grant("vision", Role.VIEWER),))
    team.api.operations.owners |= {OTHER: vera}
    for bearer, payer in ((Bearer("ada", grants=ADMIN), "ines"), (vera, "another user")):
        by = Access(bearer, team.api.operations)
        [lost] = books.costs(span, team.now, by).lost
        assert (lost.owner, lost.cause, lost.payer) == ("yuki", "preempt", payer)
        payers = {each for line in lines_of(books, by, team.now) for each in line.payers}
        assert payers == {(payer, "language")}
    for path in ("/cost", "/cost.csv"):
        text = shown(team.api.url, path, OTHER)
        assert "another user" in text and not re.search(r"\bines\b", text), path


def test_a_node_shows_its_faults_with_cause_and_time_and_the_source_of_its_price(team: Team) -> None:
    for epoch in (1, 2):
        down = NodeDown(at_us=team.now, node="b2", epoch=epoch, why="its agent is silent for 60 s")
        team.say(down, f"node/b2/{epoch}")
        team.tick(HOUR)
        team.say(NodeUp(at_us=team.now, node=replace(NODES[-1], epoch=epoch + 1)), f"node/b2/{epoch + 1}")
        team.tick(HOUR)
    html = shown(team.api.url, "/nodes")
    assert html.count(H100.price_source) == 1, "five nodes have it"
    assert re.search(r'<a href="/nodes/b2">b2</a>', html) and "its agent is silent for 60 s" in html
    page = shown(team.api.url, "/nodes/b2")
    faults = page[page.index('id="faults"') : page.index('id="maintenance"')]
    assert faults.count("its agent is silent for 60 s") == 2 and faults.count("<time data-at=") == 2
    assert "a1" not in page[page.index('id="history"') :]
    assert httpx.get(f"{team.api.url}/nodes/b9", follow_redirects=False, timeout=60).status_code == 303
    with httpx.Client(base_url=team.api.url, timeout=60) as ada:
        ada.post("/login", data={"token": TOKEN})
        assert ada.get("/nodes/b9").status_code == 404


def test_a_young_cluster_names_each_day_once_and_waits_in_whole_seconds(team: Team) -> None:
    team.start(team.submit("a", "ines", 40, "language"))
    team.tick(30 * HOUR)
    chart = shown(team.api.url, "/cost").split('class="chart wide"')[1].split("</svg>")[0]
    below = re.findall(r"<text[^>]*>(\d{1,2})</text>", chart)
    assert below == ["23", "24"], "the two days of which something is known"
    start = {"p10_us": team.now + 402_300, "p50_us": team.now + 3_500_000, "p90_us": team.now + 353 * S}
    told = part("starts", {"start": start}, team.now, template="web/parts.html.j2")
    assert "0 s to 5m53s" in told and "in 4 s" in told and " ms" not in told


def test_now_draws_blocks_racks_and_islands_and_says_since_when_gpus_are_idle(team: Team) -> None:
    island = replace(NODES[0], name="a9", island_gpus=4)
    team.say(NodeUp(at_us=team.now, node=island), "node/a9/1")
    team.tick(MINUTE)
    html = shown(team.api.url, "/")
    assert html.count('<h3 class="block">block-1 <small>0 of 48 held') == 1
    assert re.findall(r"<h4>([\w-]+)", html) == ["rack-a", "rack-b"]
    assert html.count('aria-label="island 1"') == html.count('aria-label="island 2"') == 1
    assert "idle since <time data-at=" in html and "2026-11-23 00:00" in html


def test_one_who_runs_a_job_may_give_its_gpus_to_others(team: Team) -> None:
    job_id = team.submit("a", "ada", 40, "language", checkpoint={"to": str(team.folder / "to")})
    team.start(job_id)
    assert "Give its GPUs to others</a>" in shown(team.api.url, f"/jobs/{job_id}")
    asked = shown(team.api.url, f"/jobs/{job_id}/requeue")
    assert "As if it were preempted, it goes to the end of its queue" in asked and "leaves with a checkpoint" in asked
    waiting = team.submit("b", "ada", 40, "language")
    assert ">Requeue</a>" in shown(team.api.url, f"/jobs/{waiting}")

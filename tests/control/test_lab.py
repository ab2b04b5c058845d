"""The policy lab: a log replayed in a process beside its server, bounded, and let go when nobody waits."""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_scene import OTHER, TOKEN
from web_world import Team, a_week

from cordee.control import lab as lab_module
from cordee.control.access import Access
from cordee.control.lab import POLICIES, Lab
from cordee.control.roles import Bearer, Grant, Role
from cordee.control.web.lab import _moved
from cordee.errors import BusyError, InputError
from cordee.simulate.policies import POLICIES as KNOWN
from cordee.view.page import part


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = a_week(tmp_path_factory.mktemp("team"))
    yield team
    team.close()


def test_the_lab_tries_every_policy_that_can_be_replayed() -> None:
    assert list(POLICIES) == [name for name in KNOWN if name != "cordee"]


async def _yes() -> bool:
    return True


async def _no() -> bool:
    return False


def test_a_page_says_who_would_have_waited(team: Team) -> None:
    team.api.operations.owners |= {OTHER: Bearer("bob", grants=(Grant("product", Role.VIEWER),))}
    with httpx.Client(base_url=team.api.url, follow_redirects=True, timeout=200) as ada:
        assert ada.get("/lab").url.path == "/login"
        ada.post("/login", data={"token": TOKEN})
        assert "Replay</button>" in ada.get("/lab").text
        assert ada.get("/lab", params={"policy": "magic"}).status_code == 422
        assert ada.get("/lab", params={"policy": "fifo", "days": "x"}).status_code == 422
        html = ada.get("/lab", params={"policy": "no-notice", "days": 7}).text
        assert "8 jobs under no-notice" in html and "would have started later" in html
        assert "useful, of what was held" in html and "lost, in dollars" in html
        assert re.search(r"never started</th><td class=\"n\">\d+</td><td class=\"n\">\d+</td>", html)
        moved = re.findall(
            r'<th scope="row"><a href="/jobs/([^"]+)">([^<]+)</a></th><td>(\w+)</td><td>(\w+)</td>', html
        )
        assert moved and all(team.ids[name] == job_id for job_id, name, *_ in moved)
        assert {each[2:] for each in moved} <= {
            ("ines", "language"),
            ("yuki", "vision"),
            ("omar", "product"),
            ("tomas", "product"),
        }


def test_jobs_that_may_not_be_seen_are_moved_without_a_name(team: Team) -> None:
    ids = [team.ids["segment-vit"], team.ids["reranker-sft"]]
    moves = [{"job_id": each, "was_s": 0.0, "would_be_s": None} for each in ids]
    found = {"replayed": [{"later": 2, "sooner": 0, "moved": moves}]}
    bob = Access(Bearer("bob", grants=(Grant("product", Role.VIEWER),)), team.api.operations)
    moved = _moved(found, bob)
    assert moved[0].row is None and moved[1].row is not None and moved[1].row["owner"] == "omar"
    html = part("result", found | {"jobs": 2}, "fifo", [], moved, template="web/lab.html.j2")
    assert ids[0] not in html and "another queue" in html and f'"/jobs/{ids[1]}"' in html


def test_one_replay_at_a_time_and_none_without_a_client(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(team.api.operations)

    async def both() -> list[Any]:
        return await asyncio.gather(lab.replay("fifo", 7, _no), lab.replay("fifo", 7, _yes), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None and isinstance(second, BusyError)
    monkeypatch.setattr(lab_module, "LASTS_S", 0.5)
    with pytest.raises(BusyError, match="took more than"):
        asyncio.run(lab.replay("fifo", 7, _yes))
    with pytest.raises(InputError, match="cannot be tried"):
        asyncio.run(lab.replay("fifo", 3, _yes))


def test_what_a_replay_reads_is_copied_within_its_limits(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, copy = Lab(team.api.operations), tmp_path / "log.jsonl"
    lab._copy(copy, 1, threading.Event())
    events = [json.loads(line) for line in copy.read_text().splitlines()]
    copied = {event.get("job", event).get("job_id") for event in events} - {None}
    early = team.ids["tokenizer-ablation"]  # it had ended a day before
    assert copied == set(team.ids.values()) - {early}
    assert {"NodeUp", "QueuesSet"} <= {event["kind"] for event in events}
    assert not any(event["kind"] == "MetricsLogged" for event in events)
    lab._copy(copy, 7, threading.Event())
    assert early in copy.read_text()

    stopped = threading.Event()

    def endless(after: int = 0) -> Iterator[tuple[int, str]]:
        try:
            yield from zip(itertools.count(), itertools.repeat('{"kind": "NodeDown"}'), strict=False)
        finally:
            stopped.set()

    monkeypatch.setattr(team.api.operations.store, "bodies", endless)
    assert asyncio.run(lab.replay("fifo", 7, _no)) is None
    assert stopped.is_set(), "the copy ends when nobody waits for it"
    monkeypatch.setattr(lab_module, "COPY_BYTES_MAX", 10_000)
    with pytest.raises(InputError, match="has more than 10 kB"):
        asyncio.run(lab.replay("fifo", 7, _yes))
    monkeypatch.undo()
    monkeypatch.setattr(lab_module, "LASTS_S", 0.1)
    monkeypatch.setattr(team.api.operations.store, "bodies", endless)
    with pytest.raises(BusyError, match="took more than"):
        asyncio.run(lab.replay("fifo", 7, _yes))


def test_an_empty_log_is_an_error_that_says_so(tmp_path: Path) -> None:
    team = Team(tmp_path)
    try:
        with pytest.raises(InputError, match="has no job"):
            asyncio.run(Lab(team.api.operations).replay("fifo", 1, _yes))
    finally:
        team.close()

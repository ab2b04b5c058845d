"""The policy lab: a log replayed in a process beside its server, bounded, and let go when nobody waits."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_scene import OTHER, TOKEN
from web_world import Team, a_week

from cordee.control import lab as lab_module
from cordee.control.lab import POLICIES, Lab
from cordee.control.roles import Bearer, Grant, Role
from cordee.errors import BusyError, InputError
from cordee.simulate.policies import POLICIES as KNOWN


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


def test_an_empty_log_is_an_error_that_says_so(tmp_path: Path) -> None:
    team = Team(tmp_path)
    try:
        with pytest.raises(InputError, match="has no job"):
            asyncio.run(Lab(team.api.operations).replay("fifo", 1, _yes))
    finally:
        team.close()

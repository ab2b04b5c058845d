"""Budgets over the API: who may set them, what is refused, and what the pages, metrics and messages say of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_scene import OTHER, TOKEN
from web_world import DAY, HOUR, MINUTE, START_US, S, Team, a_week

from cordee.answers.queues import BudgetRules, BudgetView, QueueRules
from cordee.client import Client
from cordee.control.months import Books, Span
from cordee.control.notify.messages import kind_of, reached_message
from cordee.control.roles import ADMIN, Bearer, Grant, Role
from cordee.errors import ForbiddenError, InputError, NotFoundError
from cordee.events import Budget, BudgetReached, BudgetRemoved, BudgetSet, Queue
from cordee.units import format_duration

YUKI = "a-token-of-yuki"
DECEMBER_US = 1_796_083_200 * S


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = a_week(tmp_path_factory.mktemp("team"))
    admin = (Grant("vision", Role.ADMIN), Grant("product", Role.USER))
    team.api.operations.owners = {
        TOKEN: Bearer("ada", grants=ADMIN), OTHER: Bearer("bob"), YUKI: Bearer("yuki", grants=admin)
    }  # fmt: skip
    yield team
    team.close()


def client(team: Team, token: str) -> Client:
    return Client(team.folder, url=team.api.url, token=token)


def of(found: list[BudgetView], queue: str | None, user: str | None = None) -> BudgetView:
    return next(each for each in found if (each.queue, each.user) == (queue, user))


def test_a_budget_says_what_is_spent_and_what_will_be(team: Team) -> None:
    found = team.api.client.money.budgets()
    with team.api.scene.control.changed:
        rows = team.api.scene.control.ledger.rows(team.now)
    research = of(found, "research")
    paid = sum(row.micro_usd.held for row in rows if row.queue in ("language", "vision"))
    assert 0 <= research.spent_micro_usd - paid <= len(rows)
    assert research.micro_usd_per_hour == 24 * 2_990_000 and research.held_gpu_milli == 24_000
    rest, age = research.until_us - team.now, team.now - START_US
    assert age < 7 * DAY
    assert research.ahead_micro_usd == pytest.approx(research.spent_micro_usd * (1 + rest / age), rel=1e-6)
    yuki = of(found, None, "yuki")
    assert yuki.spent_gpu_us == sum(row.gpu_us.held for row in rows if row.owner == "yuki") and yuki.percent == 50
    assert of(found, "product").ahead_micro_usd is None  # it has no end
    told = [event for event in team.api.scene.of(BudgetReached) if event.budget.queue == "research"]
    assert [event.percent for event in told] == [50] and research.percent == 50


def test_forecasts_take_the_rate_since_the_first_node_joined_and_go_back_over_the_months_start(tmp_path: Path) -> None:
    team = Team(tmp_path)
    try:
        team.api.client.money.set_budget(queue="vision", micro_usd=100_000_000)
        team.start(team.submit("probe", "yuki", 8, "vision"))
        team.tick(10 * MINUTE)
        for at_us in (team.now, DECEMBER_US + HOUR):  # ten minutes old; seven days are half in November
            team.api.scene.time.us = at_us
            [found] = team.api.client.money.budgets()
            costs = Books(team.api.operations).costs(Span.containing(team.now), team.now)
            rest_hours = (costs.span.to_us - at_us) / HOUR
            for ahead in (found.ahead_micro_usd, costs.ahead_micro_usd):
                assert ahead == pytest.approx(costs.total.paid + 8 * 2_990_000 * rest_hours, rel=1e-3)
            assert costs.rate_of.lasts_us == pytest.approx(min(at_us - START_US, 7 * DAY), abs=S)
    finally:
        team.close()


def test_a_queues_admin_sets_its_budgets_and_no_others(team: Team) -> None:
    with client(team, YUKI) as yuki, client(team, OTHER) as bob:
        assert yuki.money.set_budget(queue="vision", micro_usd=10**9).spent_micro_usd > 0
        assert {(each.queue, each.user) for each in yuki.money.budgets()} == {
            ("vision", None),
            (None, "yuki"),
            ("product", None),
        }
        for rules in ({"queue": "language"}, {"user": "yuki"}, {"queue": "product"}, {}):
            with pytest.raises(ForbiddenError, match="yuki may not set budgets of"):
                yuki.money.set_budget(**rules, micro_usd=1)
        with pytest.raises(ForbiddenError, match="bob may not set budgets of queue vision"):
            bob.money.remove_budget(queue="vision")
        assert yuki.money.remove_budget(queue="vision").micro_usd == 10**9
    with pytest.raises(NotFoundError, match="queue vision has no budget per month"):
        team.api.client.money.remove_budget(queue="vision")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"queue": "vison", "micro_usd": 1}, "there is no queue 'vison'"),
        ({"queue": "vision"}, "needs money, GPU time, or both"),
        ({"queue": "vision", "gpu_us": 1, "stops": True}, "only a hard budget stops"),
        ({"queue": "vision", "micro_usd": 0}, "micro_usd"),
        ({"per": "week", "micro_usd": 1}, "per"),
    ],
)
def test_what_is_no_budget_is_refused_and_changes_nothing(team: Team, rules: dict[str, object], said: str) -> None:
    before = team.api.scene.control.number
    with pytest.raises((InputError, NotFoundError), match=said):
        team.api.client.money.set_budget(**rules)
    assert team.api.scene.control.number == before


def test_a_file_of_queues_replaces_all_budgets_or_changes_nothing(tmp_path: Path) -> None:
    team = Team(tmp_path)
    try:
        mine, tree = BudgetRules(queue="vision", micro_usd=5, hard=True), [Queue(name="vision"), Queue(name="product")]
        team.api.client.set_queues(tree, [mine, BudgetRules(user="bob", per="total", gpu_us=7)])
        assert [each.queue for each in team.api.client.money.budgets()] == [None, "vision"]
        number = team.api.scene.control.number
        with pytest.raises(NotFoundError, match="there is no queue 'research'"):
            team.api.client.set_queues(tree[:1], [BudgetRules(queue="research", micro_usd=1)])
        assert team.api.scene.control.number == number
        team.api.client.set_queues(tree)  # without budgets they stay
        assert len(team.api.client.money.budgets()) == 2
        team.api.client.set_queues(tree, [mine])
        assert [each.queue for each in team.api.client.money.budgets()] == ["vision"]
        assert len(team.api.scene.of(BudgetSet)) == 2 and len(team.api.scene.of(BudgetRemoved)) == 1
    finally:
        team.close()


def test_a_job_over_a_budget_says_so(tmp_path: Path) -> None:
    team = Team(tmp_path)
    try:
        team.api.client.money.set_budget(queue="vision", micro_usd=25_000_000, hard=True)
        job_id = team.submit("probe", "bob", 8, "vision")
        team.start(job_id)
        team.tick(HOUR // 2)
        waits = team.submit("next", "bob", 8, "vision")
        why = team.api.client.why(waits)
        assert why.reason == "budget"
        assert why.text.startswith("queue vision spent $11.96 of the budget of $25.00 for 2026-11")
        assert why.until_us == DECEMBER_US
    finally:
        team.close()


def test_pages_metrics_and_messages_have_the_numbers(team: Team) -> None:
    with httpx.Client(base_url=team.api.url, follow_redirects=True, timeout=60) as ada:
        ada.post("/login", data={"token": TOKEN})
        for page in ("/queues", "/cost"):
            html = ada.get(page).text
            assert f"at the rate of the last {format_duration(round((team.now - START_US) / S))}" in html
            assert "queue research" in html and "$4,000" in html and "500.0 GPU-h" in html, page
            assert "jobs wait; running ones leave" in html, page
    with httpx.Client(base_url=team.api.url, follow_redirects=True, timeout=60) as bob:
        bob.post("/login", data={"token": OTHER})
        team.api.operations.owners |= {OTHER: Bearer("bob", grants=(Grant("product", Role.USER),))}
        html = bob.get("/queues").text
        assert "queue product" in html and "yuki" not in html
    text = httpx.get(f"{team.api.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60).text
    assert re.search(r'cordee_budget_dollars\{queue="research",user="",per="month"\} 4000\n', text)
    assert re.search(r'cordee_budget_spent_gpu_seconds\{queue="",user="yuki",per="month"\} \d+', text)
    event = BudgetReached(
        at_us=team.now,
        budget=Budget(queue="llm", user="ann", micro_usd=9_000_000, hard=True),
        percent=80,
        from_us=1_793_491_200 * S,
        micro_usd=7_500_000,
        gpu_us=0,
    )
    assert kind_of(event) == "budget"
    assert reached_message(7, event).text == (
        "the budget of ann in queue llm of 2026-11: 80 % is spent, $7.50 of $9.00; jobs over it wait"
    )


def test_rules_of_the_api_are_those_of_the_log() -> None:
    assert BudgetRules.of(Budget(user="ann", gpu_us=3)).model_dump() == {
        "queue": None, "user": "ann", "per": "month", "micro_usd": None, "gpu_us": 3, "hard": False, "stops": False
    }  # fmt: skip
    assert set(QueueRules.model_fields) == set(Queue.__dataclass_fields__)

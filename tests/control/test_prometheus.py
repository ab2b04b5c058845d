"""The metrics as Prometheus reads them, and the rules and the dashboard that ship with them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_scene import TOKEN, Api
from ruamel.yaml import YAML
from web_world import Team, a_week

SHIPPED = Path(__file__).parents[2] / "examples" / "prometheus"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed")
OF_SERVICES = {
    "cordee_token_rate",
    "cordee_time_to_first_token_p99_seconds",
    "cordee_tenant_spent_dollars",
    "cordee_tenant_budget_dollars",
}
"""Of a server with services and tenants; the source has them."""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = a_week(tmp_path_factory.mktemp("team"))
    yield team
    team.close()


def metrics_of(api: Api) -> str:
    return httpx.get(f"{api.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60).text


def value(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found is not None, series
    return float(found[1])


def test_the_cluster_in_numbers(team: Team) -> None:
    text = metrics_of(team.api)
    states = {name: value(text, f'cordee_gpus{{state="{name}"}}') for name in ("held", "free", "cordoned", "down")}
    assert states == {"held": 36, "free": 0, "cordoned": 4, "down": 0}
    assert value(text, 'cordee_nodes{state="up"}') == 4 and value(text, 'cordee_nodes{state="cordoned"}') == 1
    assert value(text, 'cordee_queue_waiting_gpus{queue="research"}') == 24
    assert value(text, 'cordee_queue_quota_gpus{queue="language"}') == 16
    assert value(text, "cordee_idle_dollars_per_hour") == pytest.approx(4 * 2.99)
    assert value(text, "cordee_held_dollars_per_hour") == pytest.approx(36 * 2.99)
    assert value(text, "cordee_oldest_wait_seconds") >= 1200
    assert value(text, "cordee_control_loop_works") == 1
    assert value(text, "cordee_control_loop_tick_seconds_count") == 0, "a test turns this loop"
    assert not any(name in text for name in team.ids), "a series for each job would grow without bound"


def _expressions() -> list[str]:
    rules: dict[str, Any] = YAML(typ="safe").load(SHIPPED / "cordee.rules.yml")
    panels = json.loads((SHIPPED / "grafana-dashboard.json").read_text())["panels"]
    ruled = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    return [*ruled, *(target["expr"] for panel in panels for target in panel["targets"])]


def test_rules_and_dashboard_ask_for_metrics_that_exist(team: Team) -> None:
    rules: dict[str, Any] = YAML(typ="safe").load(SHIPPED / "cordee.rules.yml")
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)", metrics_of(team.api), re.MULTILINE))
    known = {f"{name}_bucket" if kind == "histogram" else name for name, kind in kinds.items()} | OF_SERVICES | recorded
    asked = {name for each in _expressions() for name in re.findall(r"\bcordee[\w:]+", each)} - {"cordee"}
    assert asked and asked <= known, asked - known


@needs_promtool
def test_promtool_accepts_the_metrics(team: Team) -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=metrics_of(team.api), text=True, capture_output=True, check=False
    )
    assert "error while linting" not in done.stderr and "parse" not in done.stderr, done.stderr
    new = [
        line
        for line in done.stderr.splitlines()
        if re.match(r"cordee_(gpus|nodes|jobs|queue_|oldest|idle_dollars)", line)
    ]
    assert not new, new


def test_every_alert_is_tested_to_be_silent_and_to_fire() -> None:
    rules: dict[str, Any] = YAML(typ="safe").load(SHIPPED / "cordee.rules.yml")
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    tests: dict[str, Any] = YAML(typ="safe").load(SHIPPED / "cordee.rules.test.yml")
    tried = [each for group in tests["tests"] for each in group["alert_rule_test"]]
    for fires in (True, False):
        assert {each["alertname"] for each in tried if bool(each["exp_alerts"]) is fires} == alerts


@needs_promtool
def test_the_rules_are_right_by_their_own_tests() -> None:
    for words in (["check", "rules", "cordee.rules.yml"], ["test", "rules", "cordee.rules.test.yml"]):
        done = subprocess.run([str(PROMTOOL), *words], cwd=SHIPPED, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

"""The verbs of keys, tenants and usage, against a server whose replicas the test plays."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO

import jsonschema
import pytest
from api_scene import TOKEN, Api
from pydantic import TypeAdapter
from stage import GPT, JOB

from cordee.answers.services import CostLinesView, NewKeyView, UsageView
from cordee.cli.main import main
from cordee.events import TokensServed
from cordee.ids import JobId
from cordee.units import MICRO_USD

CHAT = JobId("chat-abcdef")
Verb = Callable[..., str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server with a replica on two slots and a job on the other two; it served two tenants in an hour."""
    api = Api(tmp_path_factory.mktemp("tenants"))
    scene, start_us = api.scene, api.scene.time.us
    replica = replace(JOB, job_id=CHAT, name="chat", gpus=2, service="chat", protected=False)
    for job in (replica, replace(JOB, job_id=GPT, gpus=2)):
        scene.control.submit(job, "{}")
    scene.control.tick()
    scene.time.us += 3_600 * MICRO_USD
    for seq, (tenant, tokens) in enumerate((("acme", 300_000), ("beta", 100_000)), start=1):
        served = TokensServed(
            at_us=start_us + 5, job_id=CHAT, epoch=1, gateway="g", service="chat", tenant=tenant, key=f"key-{seq}",
            model="tiny", from_us=start_us, busy_us=0, requests=3, failed=1, input_tokens=tokens, cached_tokens=50_000,
            output_tokens=tokens // 10,
        )  # fmt: skip
        assert scene.control.take_in("gateway/g", seq, [served]) == seq
    yield api
    api.close()


@pytest.fixture
def verb(server: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    monkeypatch.setenv("CORDEE_URL", server.url)
    monkeypatch.setenv("CORDEE_TOKEN", TOKEN)

    def call(*words: str) -> str:
        try:
            main(words)
        except SystemExit as end:
            assert end.code in (0, None), capsys.readouterr().err
        return capsys.readouterr().out

    return call


def test_a_key_from_its_making_to_its_end(server: Api, verb: Verb) -> None:
    assert "anybody who reaches a gateway may use it" in verb("serve", "keys", "list")
    verb("serve", "keys", "tenant", "acme", "--weight", "1")
    listed = verb("serve", "keys", "list")
    assert "anybody who reaches a gateway may use it" in listed and "acme" in listed  # A tenant locks nobody out.
    secret = verb("serve", "keys", "create", "acme", "--name", "ci", "--model", "tiny").strip()
    assert secret.startswith("sk-cordee-")
    limits = verb("serve", "keys", "tenant", "acme", "--budget", "$12.50", "--per", "day", "--rate", "2.5")
    assert limits.startswith("acme: weight 1, priority 0, rate 2.5/s, budget $12.50 a day, spent $")
    assert "weight 3, priority 0, rate none, budget $12.50 a day" in verb(
        "serve", "keys", "tenant", "acme", "--weight", "3", "--rate", "none"
    )
    listed = verb("serve", "keys", "list")
    assert secret not in listed and "ci" in listed and "tiny" in listed and "by ada" in listed
    assert "of acme is void" in verb("serve", "keys", "revoke", "ci")
    assert "ci" not in verb("serve", "keys", "list") and "revoked" in verb("serve", "keys", "list", "--revoked")
    made = json.loads(verb("serve", "keys", "create", "acme", "--json"))
    jsonschema.validate(made, TypeAdapter(NewKeyView).json_schema())
    assert json.loads(verb("serve", "keys", "list", "--json"))["keys"][0]["id"] == made["id"]


@pytest.mark.parametrize("by", ["service", "tenant", "key", "model"])
def test_one_table_for_services_and_training(verb: Verb, by: str) -> None:
    found = json.loads(verb("cost", "--by", by, "--json"))
    jsonschema.validate(found, TypeAdapter(UsageView).json_schema())
    total = sum(row["micro_usd"]["total"] for row in found["rows"]) + found["training_micro_usd"]["held"]
    assert total == found["micro_usd"] and found["training_micro_usd"]["held"] > 0
    said = verb("cost", "--by", by).splitlines()
    assert any(line.startswith("training") and line.split()[-1] == "$4.00" for line in said)
    assert [line.split()[-1] for line in said if line.startswith("all")][-1] == "$8.00"


def test_usage_lines_as_a_table_and_as_csv(verb: Verb) -> None:
    table = verb("cost", "--usage")
    assert "key-1" in table and "acme" in table
    rows = list(csv.DictReader(StringIO(verb("cost", "--usage", "--csv"))))
    assert [(row["SubAccountId"], row["ResourceId"], row["SkuId"]) for row in rows] == [
        ("acme", "key-1", "tiny"), ("beta", "key-2", "tiny")
    ]  # fmt: skip
    assert rows[0]["ChargePeriodStart"] == "1970-01-01T00:00:00Z" and rows[0]["x_CachedTokens"] == "50000"
    lines = json.loads(verb("cost", "--usage", "--json"))
    jsonschema.validate(lines, TypeAdapter(CostLinesView).json_schema())
    cents = [line["micro_usd"] for line in lines["lines"]]
    for row, cost in zip(rows, cents, strict=True):
        parts = [row[name] for name in ("x_InputCost", "x_CachedCost", "x_OutputCost", "x_UnusedCost")]
        amounts = [int(part.replace(".", "")) for part in parts]
        assert sum(amounts) == cost["total"] and abs(int(row["BilledCost"].replace(".", "")) - cost["total"]) < 10
    assert len(verb("cost", "--usage", "--csv", "--since", "1970-01-02").splitlines()) == 1
    assert len(verb("cost", "--usage", "--csv", "--since", "1970-01", "--until", "1970-02").splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("cost", "--usage", "--since", "yesterday"), "write 2026-11-30 or 2026-11"),
        (("serve", "keys", "tenant", "acme", "--budget", "much"), "write a number, or none"),
        (("serve", "keys", "tenant", "acme", "--per", "year"), "'day' or 'month'"),
        (("serve", "keys", "revoke", "key-0"), "`cordee serve keys list` shows them"),
    ],
)
def test_mistakes_are_explained(
    server: Api, words: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORDEE_URL", server.url)
    monkeypatch.setenv("CORDEE_TOKEN", TOKEN)
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code not in (0, None)
    assert why in capsys.readouterr().err

"""Tenants and their keys: what is kept of a key, who may change it, what gateways get, and what it is spent."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from api_scene import OTHER, TOKEN, Api
from stage import JOB, NODE, Scene

from cordee.account.usage import usage_rows
from cordee.answers.services import KeyRequest
from cordee.client import Client
from cordee.control.members import hash_of
from cordee.control.store.sql import SqlStore
from cordee.control.store.tenants import TenantRows
from cordee.control.tenants import Tenants
from cordee.errors import ForbiddenError, InputError, NotFoundError, StoreError
from cordee.events import KeyCreated, KeyRevoked, ReplicaReady, TenantSet, TokensServed
from cordee.ids import JobId

CHAT = JobId("chat-abcdef")
REPLICA = replace(JOB, job_id=CHAT, name="chat", service="chat", protected=False)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server that the tests of this file share, in their order."""
    api = Api(tmp_path_factory.mktemp("tenants"))
    yield api
    api.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.store.close()


def tenants_of(scene: Scene) -> Tenants:
    return Tenants(scene.control, TenantRows(scene.store), scene.time)


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    url = f"sqlite:///{tmp_path}/cordee.db"
    store = SqlStore(url if request.param == "sqlite" else request.getfixturevalue("postgres").database())
    yield store
    store.close()


def test_the_tables_of_tenants_and_keys(store: SqlStore) -> None:
    rows = TenantRows(store)
    acme = {"name": "acme", "weight": 2.5, "priority": -1, "rate_per_s": None, "budget_micro_usd": 2**40, "per": "day"}
    rows.set_tenant(acme)
    rows.set_tenant(acme | {"weight": 0.5, "rate_per_s": 3.5})
    assert rows.tenants() == [acme | {"weight": 0.5, "rate_per_s": 3.5}]
    key = {
        "id": "key-1",
        "hash": "h1",
        "tenant": "acme",
        "name": "ci",
        "models": ["tiny"],
        "created_us": 5,
        "by": "ada",
    }
    rows.add_key(key | {"revoked_us": None})
    with pytest.raises(StoreError, match="nothing was changed"):
        rows.add_key(key | {"id": "key-2", "revoked_us": None})
    rows.revoke_key("key-1", 7)
    rows.revoke_key("key-1", 9)
    assert rows.all_keys() == [key | {"revoked_us": 7}]


def test_a_key_is_shown_once_and_kept_as_its_hash(scene: Scene, tmp_path: Path) -> None:
    tenants = tenants_of(scene)
    made = tenants.create_key(KeyRequest(tenant="acme", name="ci", models=["tiny"]), "ada")
    assert made.secret.startswith("sk-cordee-") and len(made.secret) > 50 and made.secret not in repr(made)
    [listed] = tenants.keys()
    assert listed.model_dump() == made.model_dump(exclude={"secret"})
    [kept] = tenants.key_hashes()
    assert (kept.hash, kept.id, kept.tenant, kept.models) == (hash_of(made.secret), made.id, "acme", ["tiny"])
    data = b"".join(path.read_bytes() for path in tmp_path.glob("cordee.db*"))
    assert made.secret.encode() not in data and kept.hash.encode() in data
    [event] = scene.of(KeyCreated)
    assert isinstance(event, KeyCreated) and event.key == made.id and kept.hash not in repr(scene.log())
    assert [tenant.name for tenant in tenants.tenants()] == ["acme"]


def test_a_revoked_key_is_void_and_none_opens_no_door(scene: Scene) -> None:
    tenants = tenants_of(scene)
    assert tenants.key_hashes() == []
    first, second = (tenants.create_key(KeyRequest(tenant="acme", name=name), "ada") for name in ("a", "b"))
    number = scene.control.number
    assert tenants.revoke_key("a", "ada").revoked_us is not None
    assert scene.control.number == number + 1, "a gateway that waits for a change is woken"
    assert tenants.revoke_key(first.id, "ada").revoked_us is not None and scene.control.number == number + 1
    assert [each.id for each in tenants.key_hashes()] == [second.id]
    tenants.revoke_key(second.id, "ada")
    [nobody] = tenants.key_hashes()
    assert nobody.hash == "" and len(scene.of(KeyRevoked)) == 2
    scene.restart()
    listed = tenants_of(scene).keys()
    assert [each.revoked_us is None for each in listed] == [False, False]


def test_only_the_operator_changes_tenants_and_keys(api: Api) -> None:
    with Client(url=api.url, token=OTHER) as bob:
        for ask in (
            lambda: bob.create_key("acme"), lambda: bob.revoke_key("key-1"), lambda: bob.set_tenant("acme", weight=9)
        ):  # fmt: skip
            with pytest.raises(ForbiddenError, match="bob may not change tenants and keys"):
                ask()
        assert bob.keys() == [] and bob.tenants() == []
    with pytest.raises(NotFoundError, match="there is no key 'key-1'"):
        api.client.revoke_key("key-1")
    for name in ("", "a b", "ä", "-x", "a" * 64):
        with pytest.raises(InputError, match="tenant: String should match pattern"):
            api.client.create_key(name)
    assert not api.scene.of(TenantSet)


def test_rules_of_a_tenant(api: Api) -> None:
    api.client.create_key("beta")
    seen = api.client.set_tenant("beta", weight=3.0, priority=5, rate_per_s=2.5, budget_micro_usd=40_000_000, per="day")
    assert (seen.weight, seen.priority, seen.rate_per_s, seen.per) == (3.0, 5, 2.5, "day")
    api.client.create_key("beta")
    assert api.client.tenants() == [seen]
    with pytest.raises(InputError, match="weight"):
        api.client.set_tenant("beta", weight=0)


def served(gateway: str, from_us: int, tokens: int, tenant: str = "", busy_us: int = 0) -> TokensServed:
    return TokensServed(
        at_us=from_us + 1, job_id=CHAT, epoch=1, gateway=gateway, service="chat", tenant=tenant, key="k", model="tiny",
        from_us=from_us, busy_us=busy_us, requests=int(tokens > 0), failed=0, input_tokens=tokens, cached_tokens=0,
        output_tokens=tokens,
    )  # fmt: skip


def serving(scene: Scene) -> None:
    """Two gateways report the same replica for the same second; one of them sends its report twice."""
    scene.control.submit(REPLICA, "{}")
    scene.control.tick()
    ready = {"rank": 0, "address": "http://127.0.0.1:1", "engine": "llama.cpp", "model": "tiny"}
    scene.agents.report(ReplicaReady(at_us=scene.time.us, job_id=CHAT, epoch=1, **ready), f"{CHAT}.1/rank0")
    scene.control.tick()
    start_us = scene.time.us
    scene.time.us += 3_600_000_000
    busy = {"from_us": start_us, "tokens": 0, "busy_us": 1_000_000}
    for gateway, tokens in (("g", 100), ("h", 300), ("g", 100)):
        events = [served(gateway, **busy), served(gateway, start_us, tokens, tenant="acme")]
        assert scene.control.take_in(f"gateway/{gateway}", 1, events) == 1


def test_two_gateways_and_a_report_that_is_sent_twice_count_once(scene: Scene) -> None:
    serving(scene)
    for _ in range(2):
        now_us, ledger = scene.time.us, scene.control.ledger
        (row,) = ledger.cost("service", now_us)
        assert row.gpu_us.serving == 4 * 1_000_000 and row.tokens == 2 * 400
        (usage,) = usage_rows(ledger.usage(now_us), "tenant")
        assert (usage.tokens.requests, usage.tokens.output, usage.micro_usd.unused) == (2, 400, 0)
        assert usage.micro_usd.total == row.micro_usd.held >= 4 * NODE.micro_usd_per_gpu_hour
        scene.restart()


def test_usage_spending_and_metrics_over_http(api: Api) -> None:
    api.client.create_key("acme")
    api.client.set_tenant("acme", budget_micro_usd=5_000_000)
    serving(api.scene)
    for by in ("service", "tenant", "key", "model"):
        seen = api.client.usage(by)
        assert sum(row.micro_usd.total for row in seen.rows) + seen.training_micro_usd.held == seen.micro_usd > 0
    [row] = api.client.usage("key").rows
    assert (row.key, row.tenant, row.tokens.input) == ("k", "acme", 400)
    [row] = api.client.usage("service").rows
    assert row.gpu_us is not None and row.gpu_us.serving == 4_000_000 and row.micro_usd_per_million.output
    tenant, other = api.client.tenants()
    assert (tenant.name, other.spent_micro_usd) == ("acme", 0)
    assert tenant.spent_micro_usd > 0 and tenant.budget_micro_usd == 5_000_000
    [line] = api.client.usage_lines().lines
    assert (line.from_us, line.tenant, line.tokens.output) == (0, "acme", 400)
    assert api.client.usage_lines(from_us=1).lines == []
    assert api.services.tenants.prices()["chat"].output == 4 * api.services.tenants.prices()["chat"].input
    answer = httpx.get(f"{api.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=60)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    labels = '{service="chat",tenant="acme",model="tiny"}'
    for wanted in (
        f"cordee_generation_tokens_total{labels} 400",
        f"cordee_requests_total{labels} 2",
        'cordee_gpu_seconds{service="chat",class="serving"} 4',
        'cordee_tenant_budget_dollars{tenant="acme"} 5',
        "# TYPE cordee_cost_dollars_total counter",
    ):
        assert wanted in lines
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))
    assert httpx.get(f"{api.url}/metrics", trust_env=False, timeout=60).status_code == 401

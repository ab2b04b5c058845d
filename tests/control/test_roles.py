"""Roles by queue over a real socket: who sees what, who may change what, and that no route forgets to ask."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api_scene import TOKEN
from services_world import chat
from web_world import Team, a_week

from cordee.account.sums import summed
from cordee.answers.artifacts import CollectRequest, Committed
from cordee.answers.submissions import VictimView
from cordee.artifacts import ArtifactClient, PushResult, PushWanted, ServerBlobs
from cordee.client import Client
from cordee.control.access import HIDDEN, HIDDEN_ARTIFACT, Access, path_to
from cordee.control.home import Home
from cordee.control.roles import ADMIN, EVERYWHERE, Action, Bearer, Grant, Role, grants_of, may
from cordee.errors import ForbiddenError, HomeUnsuitableError, InputError, NotFoundError
from cordee.events import JobHeld, Queue
from cordee.workload.spec import JobSpec

_NAMES = ("nina", "vera", "yuki", "omar", "mia")
NOBODY, VIEWER, USER, OPERATOR, MANY = (f"the-token-of-{name}-000000" for name in _NAMES)
GRANTS: dict[str, Bearer] = {
    TOKEN: Bearer("ada", grants=ADMIN),
    NOBODY: Bearer("nina", grants=(Grant("elsewhere", Role.USER),)),
    VIEWER: Bearer("vera", grants=(Grant("vision", Role.VIEWER),)),
    USER: Bearer("yuki", grants=(Grant("vision", Role.USER),)),
    OPERATOR: Bearer("omar", grants=(Grant("research", Role.OPERATOR),)),
    MANY: Bearer("mia"),
}
SECRETS = re.compile(r"llama|reranker|eval-nightly|tokenizer|dpo-sweep|\bines\b|tomas")
"""Names of jobs and users that one who only sees the queue `vision` must never read."""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = a_week(tmp_path_factory.mktemp("roles"))
    team.api.operations.owners = GRANTS
    job_id = team.ids["llama-8b-long-context"]
    team.api.scene.control.note(JobHeld(at_us=team.now, job_id=job_id, by="ines"))
    team.tick()
    push(team, TOKEN, "llama-8b-weights", queue="language")
    push(team, TOKEN, "segment-weights", queue="vision", base="llama-8b-weights", parents=("llama-8b-weights",))
    yield team
    while _CLIENTS:
        _CLIENTS.popitem()[1].close()
    team.close()


def asked(team: Team, token: str, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.request(method, team.api.url + path, headers=headers, timeout=30, verify=False, **more)


def push(team: Team, token: str, name: str, seed: int = 0, **wanted: Any) -> PushResult:
    """Push a file of 256 KiB that differs little from that of any other name of the same seed."""
    data = np.random.default_rng(seed).normal(0, 0.02, 1 << 16).astype(np.float32)
    data[: len(name)] += 1
    (team.folder / f"{name}.f32").write_bytes(data.tobytes())
    return ArtifactClient(client(team, token)).push(team.folder / f"{name}.f32", name, PushWanted(**wanted))


def client(team: Team, token: str) -> Client:
    """Return a client that lives as long as the team."""
    if token not in _CLIENTS:
        _CLIENTS[token] = Client(url=team.api.url, token=token)
    return _CLIENTS[token]


_CLIENTS: dict[str, Client] = {}


# -- the rule -----------------------------------------------------------------------------------------------------


def test_a_higher_role_may_do_all_that_a_lower_one_may() -> None:
    for lower, higher in itertools.pairwise(Role):
        for action in Action:
            mine = Bearer("x", grants=(Grant("q", lower),)), Bearer("x", grants=(Grant("q", higher),))
            assert may(mine[0], action, queues=["q"]) <= may(mine[1], action, queues=["q"]), (lower, action)
        assert any(not may(Bearer("x", grants=(Grant("q", lower),)), each, queues=["q"]) for each in Action)


@pytest.mark.parametrize("action", Action)
def test_a_role_holds_in_its_queue_and_below_it_only(action: Action) -> None:
    admin = Bearer("x", grants=(Grant("research", Role.ADMIN),))
    assert may(admin, action, queues=["llm", "research"])
    assert not may(admin, action, queues=["product"])
    assert not may(admin, action), "a role in a queue is none in the cluster"
    assert may(Bearer("x", grants=ADMIN), action, queues=["product"]) and may(Bearer("x", grants=ADMIN), action)


def test_who_reads_only_changes_nothing_of_its_own_either() -> None:
    for reader in (Bearer("x", reads_only=True, grants=ADMIN), Bearer("x", grants=grants_of(["viewer"]))):
        assert may(reader, Action.SEE, owner="x", queues=["q"])
        assert not any(may(reader, each, owner="x", queues=["q"]) for each in Action if each is not Action.SEE)


@pytest.mark.parametrize("term", ["owner", "Operator", "user=", "viewer=a,,b", "admin="])
def test_an_unknown_role_is_refused_and_named(term: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"bob {'a' * 24} {term}\n")
    path.chmod(0o600)
    with pytest.raises(HomeUnsuitableError, match="is no term of a token") as error:
        Home(tmp_path).owners("ada")
    assert "operator=QUEUE" in str(error.value.hint)


def test_the_file_of_tokens_gives_roles(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    bob = f"bob {'a' * 24} operator=vision,llm viewer until=2026-12-31"
    path.write_text(f"{bob}\nada {'b' * 24}\nada {'c' * 24} viewer\n")
    path.chmod(0o600)
    found = Home(tmp_path).owners("ada")
    vision, llm = Grant("vision", Role.OPERATOR), Grant("llm", Role.OPERATOR)
    assert found["a" * 24].grants == (vision, llm, Grant(EVERYWHERE, Role.VIEWER))
    assert found["b" * 24].grants == ADMIN, "the operator's further tokens are as good as the first"
    assert found["c" * 24].grants == (Grant(EVERYWHERE, Role.VIEWER),), "unless a role is written"


def test_a_ring_of_queues_cannot_be_declared_so_a_path_ends() -> None:
    queues = [Queue(name="a", parent="b"), Queue(name="b", parent="c"), Queue(name="c")]
    assert path_to("a", queues) == ["a", "b", "c"]


# -- what is seen -------------------------------------------------------------------------------------------------

READS = [
    "/v1/jobs", "/v1/nodes", "/v1/queues", "/v1/live", "/v1/events", "/v1/sweeps", "/v1/services", "/v1/rehearsals",
    "/v1/gateway/routes", "/v1/cost?by=job", "/v1/cost?by=user", "/v1/cost?by=epoch", "/metrics", "/v1/maintenance",
    "/v1/reservations", "/v1/artifacts", "/v1/artifacts/version?ref=segment-weights",
    "/v1/artifacts?name=segment-weights",
]  # fmt: skip


@pytest.mark.parametrize("path", READS)
def test_one_of_another_queue_sees_that_gpus_are_held_and_not_by_what(team: Team, path: str) -> None:
    answer = asked(team, VIEWER, "GET", path)
    assert answer.status_code == 200, answer.text
    assert not SECRETS.findall(answer.text), path
    whole = asked(team, TOKEN, "GET", path)
    assert whole.status_code == 200


def test_held_gpus_are_seen_on_nodes_without_a_name(team: Team) -> None:
    mine = {node.name: node.used for node in client(team, VIEWER).nodes()}
    theirs = {node.name: node.used for node in client(team, TOKEN).nodes()}
    assert {name: set(used) for name, used in mine.items()} == {name: set(used) for name, used in theirs.items()}
    holders = {holder for used in mine.values() for holder in used.values()}
    assert HIDDEN in holders and any(each.startswith("segment-vit-") for each in holders)
    live = client(team, VIEWER).live()
    assert sum(node.held for node in live.nodes) == sum(map(len, theirs.values()))
    assert {job.owner for job in live.jobs} == {"yuki"}


def test_a_reason_names_no_job_that_may_not_be_seen(team: Team) -> None:
    job_id = team.ids["diffusion-xl"]
    whole = client(team, TOKEN).why(job_id)
    assert any(map(SECRETS.match, whole.blocking)), "or this test shows nothing"
    seen = client(team, VIEWER).why(job_id)
    assert HIDDEN in seen.blocking and not SECRETS.findall(seen.model_dump_json())


def test_a_victim_that_may_not_be_seen_has_no_name_and_no_owner(team: Team) -> None:
    known = VictimView(job_id=team.ids["segment-vit"], owner="yuki", reason="x", expected_loss_micro_usd=1)
    hidden = VictimView(job_id=team.ids["llama-8b-pretrain"], owner="ines", reason="x", expected_loss_micro_usd=2)
    spec = {"run": ["true"], "name": "try", "gpus": 8, "queue": "vision"}
    found = client(team, TOKEN).dry_run(spec).model_copy(update={"victims": [known, hidden]})
    shown = Access(GRANTS[USER], team.api.operations).dry_run(found)
    assert shown.victims == [known, hidden.model_copy(update={"job_id": HIDDEN, "owner": ""})]
    assert Access(GRANTS[TOKEN], team.api.operations).dry_run(found) == found


@pytest.mark.parametrize("path", ["", "/why", "/logs", "/metrics", "/cost"])
def test_a_job_that_may_not_be_seen_is_as_if_it_were_not_there(team: Team, path: str) -> None:
    job_id = team.ids["llama-8b-pretrain"]
    hidden = asked(team, VIEWER, "GET", f"/v1/jobs/{job_id}{path}")
    absent = asked(team, VIEWER, "GET", f"/v1/jobs/llama-8b-pretraim{path}")
    assert (hidden.status_code, absent.status_code) == (404, 404)
    assert hidden.json()["kind"] == absent.json()["kind"] if "kind" in hidden.json() else True
    assert "did you mean" not in absent.text, "a suggestion would tell the name"
    assert asked(team, VIEWER, "GET", f"/v1/jobs/{team.ids['segment-vit']}{path}").status_code == 200
    assert asked(team, OPERATOR, "GET", f"/v1/jobs/{job_id}{path}").status_code == 200, "research is above language"


def test_costs_have_rows_of_what_is_seen_and_the_sum_of_all(team: Team) -> None:
    whole, mine = client(team, TOKEN).cost("user"), client(team, VIEWER).cost("user")
    assert {row.key for row in mine.rows} == {"yuki"} < {row.key for row in whole.rows}
    assert mine.micro_usd == whole.micro_usd, "that GPUs are held is no secret"
    with team.api.scene.control.changed:
        rows = team.api.scene.control.ledger.rows(team.now)
    seen = Access(GRANTS[VIEWER], team.api.operations).sees
    every = {row.key: row for row in summed("user", rows)}
    assert summed("user", rows, sees=seen) == (every["yuki"],), "filtering changes no sum"


PAGES = (
    "/",
    "/queues",
    "/cost",
    "/cost?by=job",
    "/cost.csv?by=job",
    "/cost.csv",
    "/nodes",
    "/sweeps",
    "/services",
    "/artifacts",
    "/artifacts/segment-weights",
)


@pytest.mark.parametrize("path", PAGES)
def test_pages_name_no_job_that_may_not_be_seen(team: Team, path: str) -> None:
    with httpx.Client(base_url=team.api.url, follow_redirects=True, timeout=60) as browser:
        browser.post("/login", data={"token": VIEWER})
        page = browser.get(path)
        assert page.status_code == 200
        assert not SECRETS.findall(page.text), path
        hidden = browser.get(f"/jobs/{team.ids['llama-8b-pretrain']}")
        assert browser.get("/artifacts/llama-8b-weights").status_code == 404
        assert hidden.status_code == 404 and "llama" not in hidden.text.replace(team.ids["llama-8b-pretrain"], "")
        with browser.stream("GET", "/live", params={"page": "now"}) as live:
            first = next(line for line in live.iter_lines() if line.startswith("data"))
        assert not SECRETS.findall(first)


def test_a_user_without_a_role_here_sees_the_own_jobs_only(team: Team) -> None:
    assert client(team, NOBODY).jobs() == []
    ines = "the-token-of-ines-000000"
    team.api.operations.owners = {**GRANTS, ines: Bearer("ines", grants=(Grant("elsewhere", Role.USER),))}
    assert {job.owner for job in client(team, ines).jobs()} == {"ines"}
    team.api.operations.owners = GRANTS


# -- what is changed ----------------------------------------------------------------------------------------------


def refused(team: Team, token: str, method: str, path: str, **more: Any) -> int:
    number = team.api.scene.control.number
    answer = asked(team, token, method, path, **more)
    assert team.api.scene.control.number == number, "what is refused leaves no event"
    return answer.status_code


def test_a_user_changes_no_job_of_another(team: Team) -> None:
    others, own = team.ids["llama-8b-pretrain"], team.ids["segment-vit"]
    for verb in ("stop", "hold", "pause", "resume", "requeue", "prioritize"):
        assert refused(team, MANY, "POST", f"/v1/jobs/{others}/{verb}") == 403, verb
        assert refused(team, USER, "POST", f"/v1/jobs/{others}/{verb}") == 404, verb
        assert refused(team, VIEWER, "POST", f"/v1/jobs/{own}/{verb}") == 403, verb
    with pytest.raises(ForbiddenError, match="only ines and operators of language may stop it"):
        client(team, MANY).stop(others)
    with pytest.raises(NotFoundError):
        client(team, USER).stop(others)
    spec = {"run": ["true"], "name": "mine", "gpus": 1, "queue": "vision"}
    mine = client(team, USER).submit(spec, unprotected=True).job.job_id
    assert client(team, OPERATOR).hold(mine).job_id == mine, "omar operates research, and so vision"
    with pytest.raises(ForbiddenError, match="omar, an operator, holds"):
        client(team, USER).resume(mine)
    client(team, OPERATOR).resume(mine)
    assert client(team, USER).stop(mine).job_id == mine


def test_a_queue_takes_jobs_of_its_users_only(team: Team) -> None:
    spec = {"run": ["true"], "name": "try", "gpus": 1}
    for token, queue, allowed in ((USER, "vision", True), (USER, "product", False), (VIEWER, "vision", False)):
        for path in ("/v1/jobs", "/v1/dry-run"):
            body = {"job_id": "try-abcdef", "spec": spec | {"queue": queue}, "unprotected": True}
            if path == "/v1/jobs" and allowed:
                continue
            assert (asked(team, token, "POST", path, json=body).status_code == 200) is allowed, (token, queue, path)
    taken = {"job_id": team.ids["llama-8b-pretrain"], "spec": spec | {"queue": "vision", "name": "llama-8b-pretrain"}}
    answer = asked(team, USER, "POST", "/v1/jobs", json=taken)
    assert answer.status_code == 403 and "another user's" in answer.text, "an id is no way to read its job"


ADMIN_ONLY = [
    ("PUT", "/v1/queues", {"queues": []}), ("POST", "/v1/down", None), ("POST", "/v1/join-tokens", {}),
    ("POST", "/v1/keys", {"tenant": "t", "name": "n"}), ("PUT", "/v1/tenants/t", {}), ("DELETE", "/v1/keys/k", None),
]  # fmt: skip
OPERATORS = [
    ("POST", "/v1/nodes/a1/cordon", {"why": "x"}), ("POST", "/v1/nodes/a1/drain", {"why": "x"}),
    ("POST", "/v1/nodes/a1/uncordon", {"why": "x"}), ("POST", "/v1/nodes/a1/leave", None),
    ("DELETE", "/v1/maintenance/m1", None),
    ("POST", "/v1/nodes/a1/maintenance", {"from_us": 1, "until_us": 2, "why": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body"), ADMIN_ONLY + OPERATORS)
def test_nodes_are_operators_and_the_cluster_is_admins(team: Team, method: str, path: str, body: Any) -> None:
    whole = "the-token-of-all-operators-00"
    team.api.operations.owners = {**GRANTS, whole: Bearer("oona", grants=grants_of(["operator"]))}
    for token in (NOBODY, VIEWER, USER, OPERATOR, MANY):
        assert refused(team, token, method, path, json=body) == 403, token
    if (method, path, body) in ADMIN_ONLY:
        assert refused(team, whole, method, path, json=body) == 403
    elif "uncordon" in path:
        assert asked(team, whole, method, path, json=body).status_code == 200
    team.api.operations.owners = GRANTS


OPEN = {
    # Answers that are about nobody's job, and a person's own: reserving nodes for oneself is checked in its own test.
    "GET /v1/health", "POST /v1/web-tickets", "GET /v1/maintenance", "GET /v1/reservations", "POST /v1/reservations",
    "POST /v1/files/missing", "PUT /v1/files", "POST /v1/artifacts/pushes",
    "DELETE /v1/artifacts/pushes/{push}",
}  # fmt: skip
W = "segment-weights"
ABOUT_ARTIFACTS: dict[str, Any] = {
    "get version": {"params": {"ref": W}}, "get {kind}/{digest}/size": {"params": {"of": "<digest>"}},
    "get {kind}/{digest}": {"params": {"of": "<digest>"}}, "put {kind}/{digest}": {"params": {"push": "0" * 16}},
    "post tags": {"json": {"ref": W, "tag": "best"}}, "post stages": {"json": {"ref": W, "stage": "best"}},
    "post uses": {"json": {"ref": W, "job": "segment-vit"}}, "post removals": {"json": {"ref": W}},
    "post collections": {"json": {"name": W, "keep": 1, "dry": False}},
    "post pushes/{push}/commit": {"json": {"name": W, "manifest": "{}", "stored_bytes": 0}},
}  # fmt: skip
"""What requests about artifacts say, by method and path."""


def test_no_route_forgets_to_ask(team: Team) -> None:
    """Ask every route of the API with a token that has no role here: it learns and changes nothing."""
    described = httpx.get(f"{team.api.url}/openapi.json", timeout=60).json()
    names = {"ref": team.ids["segment-vit"], "job_id": team.ids["segment-vit"], "name": "a1", "queue": "vision"}
    with team.api.scene.control.changed:
        named = team.api.scene.control.fold.artifacts.named[W]
    names |= {"kind": "manifests", "digest": named.live[0].pushed.digest, "push": "0" * 16}
    tried = 0
    for path, methods in described["paths"].items():
        if path.startswith("/v1/agents"):
            continue
        for method in methods:
            if f"{method.upper()} {path}" in OPEN:
                continue
            filled = re.sub(r"{(\w+)}", lambda found: names.get(found[1], "x"), path)
            number = team.api.scene.control.number
            about = json.dumps(ABOUT_ARTIFACTS.get(f"{method} {path.removeprefix('/v1/artifacts/')}", {}))
            asks = {"json": {}} if method != "get" else {}
            asks |= json.loads(about.replace("<digest>", names["digest"]))
            answer = asked(team, NOBODY, method.upper(), filled, **asks)
            assert team.api.scene.control.number == number, (method, path)
            assert answer.status_code in (200, 403, 404, 422), (method, path, answer.status_code, answer.text)
            text = answer.text.replace(team.ids["segment-vit"], "").replace("'segment-vit'", "").replace(f"'{W}'", "")
            assert not SECRETS.findall(text) and not re.findall("segment|diffusion|yuki|omar", text), path
            tried += 1
    assert tried > 35


def test_a_sweep_is_its_owners(team: Team) -> None:
    sweep = {"values": {"lr": {"choices": [1, 2]}}}
    spec = JobSpec.model_validate({"run": ["true"], "name": "grid", "gpus": 1, "queue": "product", "sweep": sweep})
    team.api.scene.control.declare_sweep("grid-abcdef", by="omar", spec=spec.model_dump_json())
    for method, path in (("DELETE", ""), ("POST", "/pause"), ("POST", "/resume")):
        for token, code in ((USER, 404), (VIEWER, 403), (MANY, 403)):
            assert refused(team, token, method, f"/v1/sweeps/grid-abcdef{path}") == code, (token, path)
    assert asked(team, USER, "GET", "/v1/sweeps/grid").status_code == 404
    assert asked(team, USER, "GET", "/v1/sweeps").json() == []
    assert asked(team, OPERATOR, "POST", "/v1/sweeps/grid/pause").status_code == 200, "it is omar's"


def test_a_service_is_its_owners(team: Team) -> None:
    spec = chat(1) | {"queue": "product"}
    declared = JobSpec.model_validate(spec).model_dump_json()
    team.api.scene.control.declare("chat", 1, by="omar", spec=declared, replicas=(1, 2))
    order = {"replicas": "0"}
    for token, code in ((USER, 404), (MANY, 403), (VIEWER, 403)):
        assert refused(team, token, "POST", "/v1/services/chat/scale", json=order) == code, token
        assert refused(team, token, "DELETE", "/v1/services/chat") == code, token
    hidden = asked(team, USER, "POST", "/v1/services/chat/scale", json=order)
    assert "omar" not in hidden.text, "whose it is, is not said either"
    own = {"spec": {**spec, "queue": "vision"}}
    taken = asked(team, USER, "POST", "/v1/services", json=own)
    assert taken.status_code == 403 and "is taken by another service" in taken.text and "omar" not in taken.text
    assert refused(team, MANY, "POST", "/v1/services", json={"spec": spec}) == 403, "nor is it updated"
    assert asked(team, OPERATOR, "DELETE", "/v1/services/chat").status_code == 200


# -- artifacts ------------------------------------------------------------------------------------------------------


def artifacts(team: Team, token: str) -> ArtifactClient:
    return ArtifactClient(client(team, token))


def test_artifacts_of_a_queue_are_seen_and_changed_by_its_roles(team: Team) -> None:
    push(team, USER, "yukis-weights", queue="vision", seed=1)
    assert {each.name for each in artifacts(team, VIEWER).versions()} == {W, "yukis-weights"}
    assert artifacts(team, NOBODY).versions() == []
    hidden = asked(team, VIEWER, "GET", "/v1/artifacts/version?ref=llama-8b-weights")
    near = asked(team, VIEWER, "GET", "/v1/artifacts/version?ref=llama-8b-weightz")
    assert (hidden.status_code, near.status_code) == (404, 404) and "did you mean" not in near.text
    shown = artifacts(team, VIEWER).show(W)
    assert {(each.ref, each.how) for each in shown.lineage} == {(HIDDEN_ARTIFACT, "made from")}
    assert {each.ref for each in artifacts(team, TOKEN).show(W).lineage} == {"llama-8b-weights:1"}
    for path, body in (("tags", {"tag": "best"}), ("stages", {"stage": "best"}), ("removals", {})):
        for token, name, code in (
            (VIEWER, W, 403),
            (USER, W, 403),
            (USER, "llama-8b-weights", 404),
            (VIEWER, "yukis-weights", 403),
        ):
            assert refused(team, token, "POST", f"/v1/artifacts/{path}", json={"ref": name, **body}) == code, path
    assert artifacts(team, OPERATOR).tag("llama-8b-weights", "best").tags == ["best"], "research is above language"
    assert artifacts(team, USER).stage("yukis-weights", "staging").stage == "staging", "it is yuki's"


def test_a_push_needs_a_role_in_its_queue(team: Team) -> None:
    job_id = team.ids["segment-vit"]
    assert push(team, USER, "of-a-job", job=job_id).version.queue == "vision", "as its job"
    assert push(team, USER, "of-a-job", seed=2).version.queue == "vision", "as before"
    with pytest.raises(ForbiddenError, match="yuki may not push to the queue default"):
        push(team, USER, "of-no-queue")
    with pytest.raises(ForbiddenError, match="queue product"):
        push(team, USER, "of-a-job", queue="product", seed=3)
    with pytest.raises(InputError, match="no queue 'vison'"):
        push(team, USER, "of-a-job", queue="vison", seed=3)
    with pytest.raises(NotFoundError):
        push(team, USER, "new", queue="vision", job=team.ids["llama-8b-pretrain"])
    with pytest.raises(ForbiddenError, match="taken by another artifact") as taken:
        push(team, USER, "llama-8b-weights", queue="vision", seed=3)
    assert "ada" not in str(taken.value), "whose it is, is not said"
    with pytest.raises(ForbiddenError, match="segment-weights is ada's"):
        push(team, USER, W, queue="vision", seed=3)


def test_a_digest_is_no_way_to_the_bytes_of_another_queue(team: Team) -> None:
    whole = artifacts(team, TOKEN)
    secret = whole.show("llama-8b-weights").digest
    _, artifact = whole.read("llama-8b-weights")
    [chunk] = artifact.manifest.stored_sizes()
    own = push(team, USER, "yukis-own", queue="vision", seed=9).version.digest
    for of in ([], [secret], [own]):
        for path in (f"chunks/{chunk}", f"manifests/{secret}"):
            assert asked(team, USER, "GET", f"/v1/artifacts/{path}", params={"of": of}).status_code == 404, path
            assert asked(team, USER, "GET", f"/v1/artifacts/{path}/size", params={"of": of}).json() == {
                "size_bytes": None
            }
    with artifacts(team, USER)._opened() as opened:
        commit = f"/v1/artifacts/pushes/{opened.push}/commit"
        body = {"name": "stolen", "manifest": artifact.manifest.encode().decode(), "stored_bytes": 0, "queue": "vision"}
        number = team.api.scene.control.number
        answer = Committed.model_validate(asked(team, USER, "POST", commit, json=body).json())
        assert (answer.version, answer.missing) == (None, [chunk]), "to name a chunk is not to have it"
        assert team.api.scene.control.number == number
    for section in ({"artifacts": [secret]}, {"service": {"model": "artifact:llama-8b-weights"}}):
        spec = {"run": ["true"], "name": "try", "gpus": 1, "queue": "vision", **section}
        path, more = ("services", {}) if "service" in section else ("jobs", {"job_id": "try-abcdef"})
        hidden = asked(team, USER, "POST", f"/v1/{path}", json={"spec": spec, **more})
        assert (hidden.status_code, "there is no artifact" in hidden.text) == (422, True), hidden.text
    mine = artifacts(team, USER)
    whole.pull("llama-8b-weights", team.folder / "handed-over")
    made = mine.push(team.folder / "handed-over", "my-own-copy", PushWanted(queue="vision"))
    assert made.written_bytes > 0, "who has the bytes sends them"
    assert isinstance(mine.read("my-own-copy")[0].blobs, ServerBlobs) and mine.verify("my-own-copy") == []
    assert mine.verify(W) == [], "a version is read through its base, seen or not"


def test_a_collection_takes_old_versions_of_names_that_may_be_changed(team: Team) -> None:
    for seed in range(4, 7):
        push(team, USER, "often", queue="vision", seed=seed, base="none")
        push(team, TOKEN, "adas", queue="vision", seed=seed, base="none")
    old = {each.ref for each in artifacts(team, USER).collect(CollectRequest(keep=1)).versions}
    assert {"often:1", "often:2"} <= old and not any(ref.startswith("adas") for ref in old)
    assert {each.ref for each in artifacts(team, OPERATOR).collect(CollectRequest(keep=2)).versions} >= {
        "often:1",
        "adas:1",
    }
    for name, code in (("adas", 403), ("llama-8b-weights", 404)):
        body = {"keep": 1, "name": name, "dry": False}
        assert refused(team, USER, "POST", "/v1/artifacts/collections", json=body) == code

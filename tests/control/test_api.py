"""The API over a real socket: the token, errors that come back as they were, and that a refusal changes nothing."""

import json
import pkgutil
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_scene import OTHER, SPEC, TOKEN, Api
from stage import GPT, JOB

import cordee.answers
from cordee import __version__, errors
from cordee.answers.view import View
from cordee.cli.jobs import steps_text
from cordee.client import Client
from cordee.errors import (
    CordeeError,
    InputError,
    NoServerError,
    NotFoundError,
    SpecError,
    TokenError,
    TooLargeError,
    UnprotectedError,
    as_body,
    from_body,
)
from cordee.events import (
    Estimate,
    JobSubmitted,
    Measured,
    Outcome,
)
from cordee.ids import JobId

SHAPES = [import_module(f"cordee.answers.{each.name}") for each in pkgutil.iter_modules(cordee.answers.__path__)]


def _paths(api: Api) -> list[tuple[str, str]]:
    described = httpx.get(f"{api.url}/openapi.json", timeout=60).json()["paths"]
    return [(method.upper(), path) for path, methods in described.items() for method in methods]


def test_the_api_is_versioned_and_says_what_it_answers(api: Api) -> None:
    """A client written against /openapi.json gets what it was promised: the shapes of `cordee.client`."""
    described = httpx.get(f"{api.url}/openapi.json", timeout=60).json()
    assert described["info"]["version"] == __version__
    answers = {}
    for path, methods in described["paths"].items():
        assert path.startswith("/v1/") or path == "/metrics"
        for method, operation in methods.items():
            assert operation["summary"]
            good = next(answer for code, answer in operation["responses"].items() if code.startswith("2"))
            shape = good.get("content", {}).get("application/json", {}).get("schema", {})
            shape = shape.get("items", shape).get("$ref", "a stream")
            answers[f"{method} {path.removeprefix('/v1')}"] = shape.rsplit("/", 1)[-1]
    assert answers == {
        "get /health": "HealthView",
        "post /jobs": "Submitted",
        "post /dry-run": "DryRunView",
        "post /files/missing": "FileDigests",
        "put /files": "FilesReceived",
        "get /jobs": "JobView",
        "get /jobs/{ref}": "JobDetailView",
        "post /jobs/{ref}/stop": "JobView",
        **{f"post /jobs/{{ref}}/{verb}": "JobView" for verb in ("pause", "hold", "resume", "requeue", "prioritize")},
        "get /jobs/{ref}/why": "WhyView",
        "get /jobs/{ref}/logs": "a stream",
        "get /jobs/{ref}/metrics": "MetricsView",
        "get /jobs/{ref}/cost": "JobCostView",
        "get /live": "LiveView",
        "post /services": "ServiceView",
        "get /services": "ServiceView",
        "get /services/{name}": "ServiceView",
        "post /services/{name}/scale": "ServiceView",
        "delete /services/{name}": "ServiceView",
        "get /gateway/routes": "RoutesView",
        "post /gateways/{name}/reports": "GatewayAcknowledged",
        "post /keys": "NewKeyView",
        "get /keys": "KeyView",
        "delete /keys/{key}": "KeyView",
        "get /tenants": "TenantView",
        "put /tenants/{name}": "TenantView",
        "get /usage": "UsageView",
        "get /usage/lines": "CostLinesView",
        "get /metrics": "a stream",
        "get /nodes": "NodeView",
        "post /nodes/{name}/cordon": "NodeView",
        "post /nodes/{name}/drain": "NodeView",
        "post /nodes/{name}/uncordon": "NodeView",
        "post /nodes/{name}/leave": "Leaving",
        "post /sweeps": "SweepView",
        "get /sweeps": "SweepView",
        "get /sweeps/{ref}": "SweepDetailView",
        "delete /sweeps/{ref}": "SweepView",
        "post /nodes/{name}/maintenance": "MaintenanceView",
        "get /maintenance": "MaintenanceView",
        "delete /maintenance/{booking}": "MaintenanceView",
        "post /reservations": "ReservationView",
        "get /reservations": "ReservationView",
        "delete /reservations/{reservation}": "ReservationView",
        "post /sweeps/{ref}/pause": "SweepView",
        "post /sweeps/{ref}/resume": "SweepView",
        "post /rehearsals": "RehearsalStarted",
        "get /rehearsals": "RehearsalView",
        "post /join-tokens": "JoinTokenView",
        "post /web-tickets": "WebTicketView",
        "post /agents/join": "Joined",
        "post /agents/{node}/leave": "Leaving",
        "get /queues": "QueuesView",
        "put /queues": "QueuesView",
        "get /cost": "CostView",
        "get /artifacts": "VersionView",
        "get /artifacts/version": "VersionDetailView",
        "get /artifacts/store": "StoreView",
        "post /artifacts/pushes": "PushOpened",
        "post /artifacts/pushes/{push}/renew": "a stream",
        "delete /artifacts/pushes/{push}": "a stream",
        "post /artifacts/pushes/{push}/commit": "Committed",
        **{f"post /artifacts/{verb}": "VersionView" for verb in ("tags", "stages", "uses", "removals")},
        "post /artifacts/collections": "CollectedView",
        "get /artifacts/{kind}/{digest}": "a stream",
        "get /artifacts/{kind}/{digest}/size": "BlobSize",
        "put /artifacts/{kind}/{digest}": "a stream",
        "get /events": "a stream",
        "get /audit": "AuditView",
        "get /budgets": "BudgetView",
        "put /budgets": "BudgetView",
        "delete /budgets": "BudgetView",
        "get /chargeback": "ChargebackView",
        "get /chargeback.csv": "a stream",
        "post /down": "HealthView",
    }
    for name in set(answers.values()) - {"a stream"}:
        shape = next(getattr(each, name) for each in SHAPES if hasattr(each, name))
        assert described["components"]["schemas"][name]["properties"].keys() == shape.model_fields.keys()


def test_every_path_wants_the_token(api: Api) -> None:
    paths = _paths(api)
    assert len(paths) >= 10
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        for method, path in paths:
            answer = httpx.request(
                method, api.url + re.sub(r"\{\w+\}", "x", path), headers=headers, verify=False, timeout=60
            )
            assert answer.status_code == 401, (method, path)
            assert isinstance(from_body(answer.json()), TokenError)
            assert TOKEN not in answer.text
    with Client(url=api.url, token="wrong") as client, pytest.raises(TokenError, match="the token is wrong"):
        client.jobs()


def _tree(cls: type[CordeeError]) -> list[type[CordeeError]]:
    return [cls] + [leaf for sub in cls.__subclasses__() for leaf in _tree(sub)]


@pytest.mark.parametrize("cls", _tree(CordeeError), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("hint", [None, "do this"])
def test_every_error_comes_back_as_it_was(cls: type[CordeeError], hint: str | None) -> None:
    back = from_body(json.loads(json.dumps(as_body(cls("what is wrong", hint=hint)))))
    assert type(back) is (cls if cls.__module__ == errors.__name__ else errors.ServerError)
    assert (back.message, back.hint) == ("what is wrong", hint)


def test_submit_and_read_back(api: Api) -> None:
    made = api.client.submit(SPEC)
    assert made.job.state == "queued"
    assert made.job.owner == "ada"
    assert api.client.jobs() == [made.job]
    api.scene.control.tick()
    job = api.client.job("gpt")
    assert job.state == "running"
    assert [attempt.leases for attempt in job.attempts] == [{"local": [0, 1, 2, 3]}]
    assert job.spec["gpus"] == 4
    assert api.client.nodes()[0].used == dict.fromkeys(range(4), f"{job.job_id}.1")
    assert "runs on" in api.client.why(job.job_id).text or "placed on" in api.client.why(job.job_id).text


def test_a_job_belongs_to_the_owner_of_its_token(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_TOKEN", OTHER)
    with Client(url=api.url) as bob:
        made = bob.submit(SPEC)
    assert made.job.owner == "bob"
    assert api.client.job(made.job.job_id).owner == "bob"
    assert api.client.submit(SPEC | {"name": "other"}).job.owner == "ada"


def test_a_dry_run_says_what_submitting_would_do_and_queues_nothing(api: Api) -> None:
    low = api.client.submit(SPEC | {"tier": "preemptible"}, unprotected=True).job
    api.scene.control.tick()
    number, before = api.scene.control.number, api.scene.control.state.snapshot()
    seen = api.client.dry_run(SPEC | {"tier": "production", "estimate_s": 7200, "limit": {"time_s": 36_000}}, draws=5)
    assert (seen.gpus, seen.tier, seen.queue, seen.racks) == (4, "production", "default", None)
    assert seen.micro_usd_per_hour == 4 * 2_000_000
    assert (seen.micro_usd_to_estimate, seen.micro_usd_to_limit) == (2 * 8_000_000, 10 * 8_000_000)
    assert [(victim.job_id, victim.owner, victim.reason) for victim in seen.victims] == [(low.job_id, "ada", "preempt")]
    assert seen.victims[0].expected_loss_micro_usd > 0
    assert not seen.starts_now and seen.reason == "waits-for-victims" and seen.blocking == [low.job_id]
    assert seen.nodes == {"local": [0, 1, 2, 3]}, "where the forecast has it"
    assert seen.forecast is not None and seen.forecast.draws == 5 and seen.forecast.learnt_from == 0
    start_us, end_us = seen.forecast.start.p50_us, seen.forecast.end.p50_us
    assert start_us == seen.until_us == seen.forecast.at_us + 30_000_000, "the victim cannot save, and has 30 s"
    assert end_us == start_us + 7200 * 1_000_000
    small = api.client.dry_run(SPEC | {"gpus": 1, "tier": "preemptible", "checkpoint": {"to": "/c"}})
    assert (small.victims, small.nodes, small.forecast, small.starts_now) == ([], {}, None, False)
    with pytest.raises(TooLargeError):
        api.client.dry_run(SPEC | {"gpus": 5})
    assert (api.scene.control.number, api.scene.control.state.snapshot()) == (number, before)


def test_a_dry_run_of_a_job_that_starts_now_names_its_place(api: Api) -> None:
    seen = api.client.dry_run(SPEC | {"gpus": 3})
    assert seen.starts_now and seen.reason == "starts-now" and seen.nodes == {"local": [0, 1, 2]}
    assert seen.micro_usd_per_hour == 3 * 2_000_000 and seen.estimate is None


def test_why_with_draws_says_when(api: Api) -> None:
    first = api.client.submit(SPEC | {"estimate_s": 600}).job
    api.scene.control.tick()
    second = api.client.submit(SPEC | {"name": "next", "estimate_s": 60}).job
    before = api.scene.control.state.snapshot()
    assert api.client.why(second.job_id).forecast is None
    runs, waits = (api.client.why(job.job_id, draws=3).forecast for job in (first, second))
    assert runs is not None and waits is not None and runs.draws == waits.draws == 3
    assert runs.start.p50_us is not None and runs.start.p50_us < runs.at_us
    assert runs.end.p10_us == runs.end.p90_us == runs.start.p50_us + 600 * 1_000_000
    assert waits.start.p50_us is not None and waits.start.p50_us <= runs.end.p90_us
    assert api.scene.control.state.snapshot() == before
    with pytest.raises(InputError, match="draws"):
        api.client.why(second.job_id, draws=-1)


def test_the_same_submission_again_changes_nothing(api: Api) -> None:
    first = api.client.submit(SPEC, job_id=GPT)
    number = api.client.health().log_number
    assert api.client.submit(SPEC, job_id=GPT).job.job_id == first.job.job_id
    assert api.client.health().log_number == number
    assert len(api.scene.of(JobSubmitted)) == 1


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (SPEC | {"gpus": 5}, TooLargeError),
        (SPEC | {"tier": "preemptible"}, UnprotectedError),
        (SPEC | {"run": ["no-such-program"]}, errors.ScriptError),
        (SPEC | {"tier": "spot"}, SpecError),
        (SPEC | {"gpuz": 5}, SpecError),
        (SPEC | {"name": "Not A Name"}, SpecError),
        ({}, SpecError),
    ],
)
def test_a_refusal_changes_nothing(api: Api, spec: dict[str, Any], error: type[CordeeError]) -> None:
    before = api.client.health()
    with pytest.raises(error):
        api.client.submit(spec, job_id=JobId("gpt-abcdef"))
    assert api.client.health() == before
    assert api.client.jobs() == []


@pytest.mark.parametrize("job_id", ["../../etc-abcdef", "gpt-ABCDEF", "other-abcdef", "gpt", ""])
def test_an_id_that_is_none_is_refused(api: Api, job_id: str) -> None:
    with pytest.raises(SpecError, match="is not an id of a job named 'gpt'"):
        api.client.submit(SPEC, job_id=JobId(job_id)) if job_id else api.client._ask(
            View, "POST", "/v1/jobs", json={"job_id": "", "spec": SPEC}
        )


def test_an_unknown_job_is_not_found_and_the_nearest_is_named(api: Api) -> None:
    api.client.submit(SPEC, job_id=GPT)
    for ask in (api.client.job, api.client.stop, api.client.why, lambda ref: list(api.client.logs(ref))):
        with pytest.raises(NotFoundError, match="there is no job 'gtp-abcdef'\nhint: did you mean gpt-abcdef"):
            ask("gtp-abcdef")


def test_a_name_that_several_jobs_have_is_refused(api: Api) -> None:
    api.client.submit(SPEC, job_id=GPT)
    api.client.submit(SPEC, job_id=JobId("gpt-bbbbbb"))
    with pytest.raises(NotFoundError, match=r"2 jobs are named 'gpt'\nhint: say which: gpt-"):
        api.client.job("gpt")


def test_stop_is_asked_once(api: Api) -> None:
    api.client.submit(SPEC, job_id=GPT)
    api.scene.control.tick()
    api.client.stop("gpt")
    number = api.client.health().log_number
    api.client.stop("gpt")
    assert api.client.health().log_number == number
    api.client.stop("gpt", now=True)
    assert api.client.health().log_number == number + 1
    api.scene.control.tick()
    api.scene.ended(GPT, 1, Outcome.KILLED)
    api.scene.control.tick()
    number = api.client.health().log_number
    assert api.client.stop("gpt", now=True).state == "stopped"
    assert api.client.health().log_number == number


def test_down_is_asked_once(api: Api) -> None:
    assert not api.client.health().shutting_down
    assert api.client.down().shutting_down
    number = api.client.health().log_number
    api.client.down()
    assert api.client.health().log_number == number


def test_api_names_missing_jobs_and_paths(api: Api) -> None:
    with pytest.raises(NotFoundError, match="there is nothing at /v2/jobs"):
        api.client._ask(View, "GET", "/v2/jobs")
    with pytest.raises(errors.ServerError, match="Method Not Allowed"):
        api.client._ask(View, "DELETE", "/v1/jobs")
    with pytest.raises(InputError, match=r"query\.by"):
        api.client.cost("planet")


def test_a_server_that_is_gone_is_no_server(api: Api, tmp_path: Path) -> None:
    api.stop()
    with pytest.raises(NoServerError, match=r"(?s)no server answers.*cordee up"):
        api.client.jobs()
    with pytest.raises(NoServerError, match="no server runs on"):
        Client(tmp_path / "nowhere")


def test_secrets_stay_in_the_home(api: Api) -> None:
    value = "hf_this-is-secret"
    with pytest.raises(SpecError, match="the secret HF_TOKEN is not in the environment"):
        api.client.submit(SPEC | {"secrets": ["HF_TOKEN"]}, environ={})
    with pytest.raises(TooLargeError):
        api.client.submit(SPEC | {"secrets": ["HF_TOKEN"], "gpus": 99}, environ={"HF_TOKEN": value})
    path = api.operations.home / "secrets" / "HF_TOKEN"
    assert not path.exists(), "the job was refused"
    api.client.submit(SPEC | {"secrets": ["HF_TOKEN"]}, environ={"HF_TOKEN": value}, job_id=GPT)
    assert path.read_text() == value
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    said = api.client.job("gpt").model_dump_json() + "".join(map(str, api.client.events()))
    said += "".join(file.read_bytes().decode(errors="replace") for file in api.operations.home.glob("cordee.db*"))
    assert "HF_TOKEN" in said
    assert value not in said


def test_a_secret_that_nobody_wrote_is_refused(api: Api) -> None:
    body = {"job_id": GPT, "spec": SPEC | {"secrets": ["HF_TOKEN"]}}
    with pytest.raises(SpecError, match="HF_TOKEN is not in the server's home"):
        api.client._ask(View, "POST", "/v1/jobs", json=body)


def test_a_job_is_answered_with_its_plan_what_it_measures_and_the_end_by_its_own_steps(api: Api) -> None:
    plan = Estimate(
        layout="tp2 fsdp2",
        gpus=4,
        peak_bytes=70,
        allocated_bytes=60,
        gpu_memory_bytes=80,
        step_us=1_000_000,
        step_us_low=900_000,
        step_us_high=1_200_000,
        mfu=0.4,
    )
    api.scene.control.submit(replace(JOB, estimates=(plan,)), json.dumps(SPEC))
    assert api.client.job(GPT).estimate == plan, "known before it is placed"
    api.scene.control.tick()
    scope = {"at_us": api.scene.time.us, "job_id": GPT, "epoch": 1, "rank": 0}
    api.scene.agents.report(
        Measured(**scope, step=54, steps_total=60, peak_bytes=63, step_us=1_500_000, tokens_per_s=9.0, mfu=0.3),
        "gpt-abcdef.1/rank0",
    )
    api.scene.control.tick()
    job, why, [cost] = api.client.job(GPT), api.client.why(GPT), api.client.cost("epoch").rows
    assert [(row.quantity, row.off_by, row.missed) for row in job.measured] == [
        ("peak memory", pytest.approx(0.05), False),
        ("step time", pytest.approx(0.5), True),
        ("MFU", pytest.approx(-0.25), False),
    ]
    assert why.measured == job.measured == cost.measured
    assert why.left_us == 6 * 1_500_000
    listed = api.client.jobs()[0]
    assert (job.steps_total, job.left_us) == (listed.steps_total, listed.left_us) == (60, why.left_us)
    assert steps_text(listed.model_copy(update={"step": 54})) == "54 of 60, 9 s left"
    ahead = api.client.why(GPT, draws=5).forecast
    assert ahead is not None and ahead.source == "its own steps"
    assert ahead.end.p90_us is not None and ahead.end.p90_us - ahead.at_us < 12_000_000
    assert job.estimate_missed == ["its step time is 1.5 s, outside the planned 900 ms to 1.2 s"]
    assert api.client.jobs()[0].why == job.estimate_missed[0]
    assert api.client.cost("user").rows[0].measured == []

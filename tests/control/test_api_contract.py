"""The API against its own description: generated requests, valid and not, get only answers that /openapi.json names."""

from collections.abc import Iterator
from contextlib import nullcontext, suppress

import pytest
import schemathesis
from described_app import OPERATIONS, TOKEN_HEADER, described_app
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import positive_data_acceptance

DOCUMENTS = (
    "/v1/jobs",
    "/v1/dry-run",
    "/v1/rehearsals",
    "/v1/reservations",
    "/v1/nodes/{name}/maintenance",
    "/v1/queues",
    "/v1/budgets",
    "/v1/services",
    "/v1/sweeps",
    "/v1/services/{name}/scale",
)
"""Specs, numbers of replicas, stretches of time, queues and budgets have rules that no JSON schema states: 422."""


@pytest.fixture(scope="module")
def app_schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    with described_app(tmp_path_factory.mktemp("home")) as found:
        yield found


MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_described(
    app_schema: schemathesis.BaseSchema, method: str, path: str, mode: schemathesis.GenerationMode
) -> None:
    ruled = path in DOCUMENTS and method in ("POST", "PUT")

    @seed(5)
    @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=app_schema[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(
            headers=TOKEN_HEADER, timeout=60, excluded_checks=[positive_data_acceptance] if ruled else []
        )

    # An operation without parameters has no wrong ones.
    with suppress(Unsatisfiable) if mode is schemathesis.GenerationMode.NEGATIVE else nullcontext():
        check()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("TRACE", "/v1/jobs", "GET, POST"), ("DELETE", "/v1/queues", "GET, PUT"), ("GET", "/v1/nodes/n/drain", "POST")],
)
def test_a_method_that_a_path_does_not_have(
    app_schema: schemathesis.BaseSchema, method: str, path: str, allowed: str
) -> None:
    answer = TestClient(app_schema.app).request(method, path, headers=TOKEN_HEADER)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["kind"] == "ServerError"


def test_a_misspelt_parameter_is_refused(app_schema: schemathesis.BaseSchema) -> None:
    answer = TestClient(app_schema.app).get("/v1/events", params={"folow": True}, headers=TOKEN_HEADER)
    assert answer.status_code == 422
    assert answer.json()["error"]["hint"] == "did you mean follow? /openapi.json describes every request"

"""Generated requests, valid and not, to every operation of the API: no answer is an error of the server's own.

CORDEE_SOAK_REQUESTS   end after so many requests (0: when the time is up)
"""

import os
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import schemathesis
from api_examples import SWEEP
from api_scene import SPEC
from described_app import OPERATIONS, TOKEN_HEADER, described_app
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis.checks import not_a_server_error
from soaking import Soak

from cordee.control.forecast import forecast
from cordee.ids import job_id

EXAMPLES = 50
ANSWER_S = 300.0
FORECAST_S = 0.05  # of processor time; two seconds for each would leave no time for the other operations
REQUESTS = int(os.environ.get("CORDEE_SOAK_REQUESTS", "0"))
MODES = list(schemathesis.GenerationMode)


def things(client: TestClient, number: int) -> dict[str, str]:
    """Make one thing of each kind; return the name of each by the path of its operations."""
    job, sweep = job_id("gpt", number.to_bytes(6)), job_id("lr", number.to_bytes(6))
    for method, path, body in (
        ("PUT", "/v1/queues", {"queues": []}),
        ("POST", "/v1/jobs", {"job_id": job, "spec": SPEC, "unprotected": True}),
        ("POST", "/v1/sweeps", {"job_id": sweep, "spec": SWEEP}),
        ("PUT", "/v1/tenants/support", {}),
        ("POST", "/v1/keys", {"tenant": "support"}),
    ):
        answer = client.request(method, path, json=body, headers=TOKEN_HEADER)
        assert answer.status_code in (200, 201, 409), answer.text
    return {"/v1/jobs": job, "/v1/sweeps": sweep, "/v1/tenants": "support", "/v1/nodes": "local"}


def test_no_request_ends_in_an_error_of_the_server(soak: Soak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed is a batch for one operation, with requests that its description allows, or forbids.

    Every second request is about something that exists.
    """
    monkeypatch.setitem(forecast.__kwdefaults__, "budget_s", FORECAST_S)
    answers, named = Counter[int](), dict[str, str]()

    @cache
    def cases(operation: int, mode: int) -> SearchStrategy[schemathesis.Case]:
        method, path = OPERATIONS[operation]
        return schema[path][method].as_strategy(generation_mode=MODES[mode])

    def batch(seed: int) -> str:
        operation, mode = seed % len(OPERATIONS), seed // len(OPERATIONS) % 2
        kind = OPERATIONS[operation][1].partition("/{")[0]
        if not named or operation == 0:
            named.update(things(TestClient(schema.app), seed % 2**40))

        @seeded(seed)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases(operation, mode))
        def check(case: schemathesis.Case) -> None:
            for name in case.path_parameters or {}:
                if kind in named and name in ("ref", "name") and answers.total() % 2:
                    case.path_parameters[name] = named[kind]
            answer = case.call(headers=TOKEN_HEADER, timeout=ANSWER_S)
            answers[answer.status_code // 100 * 100] += 1
            case.validate_response(answer, checks=[not_a_server_error])

        try:
            check()
        except Unsatisfiable:  # an operation without parameters has no wrong ones
            pass
        return f"{answers.total():,} requests, by class of answers {dict(sorted(answers.items()))}"

    with described_app(tmp_path) as schema:
        soak.play(batch, until=lambda: answers.total() >= REQUESTS > 0, say_every=len(OPERATIONS) // 4)

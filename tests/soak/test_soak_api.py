"""Generated requests, valid and not, to every operation of the API: no answer is an error of the server's own."""

from pathlib import Path

import schemathesis
from described_app import OPERATIONS, TOKEN_HEADER, described_app
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from soaking import Soak

EXAMPLES = 20


def test_no_request_ends_in_an_error_of_the_server(soak: Soak, tmp_path: Path) -> None:
    """Each seed is a batch for one operation, with requests that its description allows, or forbids."""
    sent = 0

    def batch(seed: int) -> str:
        nonlocal sent
        method, path = OPERATIONS[seed % len(OPERATIONS)]
        mode = list(schemathesis.GenerationMode)[seed // len(OPERATIONS) % 2]

        @seeded(seed)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            nonlocal sent
            sent += 1
            case.validate_response(case.call(headers=TOKEN_HEADER), checks=[not_a_server_error])

        try:
            check()
        except Unsatisfiable:  # an operation without parameters has no wrong ones
            pass
        return f"{sent:,} requests"

    with described_app(tmp_path) as schema:
        soak.play(batch, say_every=len(OPERATIONS))

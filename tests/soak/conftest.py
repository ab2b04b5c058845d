"""Soak tests: the fault tests of the default suite, with as many seeds as the time allows. Run by `make soak`.

CORDEE_SOAK_S      seconds for each test (600)
CORDEE_SOAK_SEED   play this seed alone, as the line under a failure says
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The helpers of the rooms' own tests, also where only this folder is collected.
sys.path += [
    str(HERE.parent),
    *(str(HERE.parent / room) for room in ("agent", "control", "faults", "schedule", "storage", "storage/cache")),
]

from soaking import SECONDS, Soak  # noqa: E402


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Soak:
    return Soak(request.node.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.soak)
            item.add_marker(pytest.mark.timeout(SECONDS + 1800))  # the last story may be a long one

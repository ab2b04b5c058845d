"""Makes `tests/` importable (`import world`), and lets a failing Hypothesis example say how to replay it."""

import atexit
import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from postgres import postgres  # noqa: F401 - a fixture
from s3_world import s3, s3_server  # noqa: F401 - fixtures

# A client first loads the authorities of the machine, 140 of them in 30 ms; no test meets whom one of them has signed.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data" / "authority.pem")

# Helpers that assert say what they compared, as tests do.
pytest.register_assert_rewrite("gang_scene", "kill_story", "log_histories", "random_worlds")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collection imports and makes, which stays until the end, out of every pass of the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


if "PYTEST_XDIST_WORKER" in os.environ:
    # A worker that has reported all would take five seconds to destroy what it has imported. Handlers that libraries
    # registered after this line have run by then.
    atexit.register(os._exit, 0)
else:

    def pytest_unconfigure() -> None:
        gc.unfreeze()  # libraries look for leaks when the process ends


_FIRST = ("slurm", "ray", "long", "gang")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start clusters or gangs, or are long, come first, so that no worker sits with one at the end."""
    turns = {item.path: len(_FIRST) for item in items}
    for item in items:
        for turn, mark in enumerate(_FIRST):
            if item.get_closest_marker(mark):
                turns[item.path] = min(turn, turns[item.path])
    items.sort(key=lambda item: turns[item.path])


# The same examples each time: who sees a failure has caused it. What nobody has seen yet is for the soak, which draws.
# A machine that stalls while an example is drawn is no fault of the test.
settings.register_profile(
    "cordee", deadline=None, print_blob=True, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cordee")

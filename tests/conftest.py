"""Makes `tests/` importable (`import world`), and lets a failing Hypothesis example say how to replay it."""

import pytest
from hypothesis import HealthCheck, settings

from postgres import postgres  # noqa: F401 - a fixture
from s3_world import s3, s3_server  # noqa: F401 - fixtures

# Helpers that assert say what they compared, as tests do.
pytest.register_assert_rewrite("gang_scene", "kill_story", "log_histories", "random_worlds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start gangs or clusters come first, so that no worker sits with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("gang") or item.get_closest_marker("slurm")}
    items.sort(key=lambda item: item.path not in slow)


# The same examples each time: who sees a failure has caused it. What nobody has seen yet is for the soak, which draws.
# A machine that stalls while an example is drawn is no fault of the test.
settings.register_profile(
    "cordee", deadline=None, print_blob=True, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cordee")

"""Makes `tests/` importable (`import world`), and lets a failing Hypothesis example say how to replay it."""

import pytest
from hypothesis import settings

from s3_world import s3, s3_server  # noqa: F401 - fixtures

# Helpers that assert say what they compared, as tests do.
pytest.register_assert_rewrite("gang_scene", "kill_story", "log_histories", "random_worlds")

settings.register_profile("cordee", deadline=None, print_blob=True)
settings.load_profile("cordee")

"""Makes `tests/` importable (`import world`), and lets a failing Hypothesis example say how to replay it."""

from hypothesis import settings

settings.register_profile("cordee", deadline=None, print_blob=True)
settings.load_profile("cordee")

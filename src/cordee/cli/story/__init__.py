"""The parts of `cordee demo`: what it claims, what it runs, and how it tells it."""

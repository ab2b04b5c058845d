"""Engines behind two faces (`port.py`): how to start and probe each one, and how to speak with it."""

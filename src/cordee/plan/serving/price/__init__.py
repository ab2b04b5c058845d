"""Dollars of a token: hours, capacity, energy, and an API instead (pure)."""

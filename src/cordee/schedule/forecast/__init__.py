"""Forecasts of starts and ends: the same `decide`, run forward over run times."""

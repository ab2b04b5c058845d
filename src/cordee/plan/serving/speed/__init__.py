"""Seconds of a step: products, attention, experts, traffic, and the steady state (pure)."""

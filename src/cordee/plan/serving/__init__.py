"""Serving, planned: memory of the KV cache, speed of a batch, levers and their crossovers, price of a token (pure)."""

"""Levers that lower the price of a token, each with its crossover (pure)."""

"""Emissions of electricity where a server stands, as an answer: by its home's prices.toml, or the world's grid."""

from pathlib import Path

from cordee.answers.cost import ElectricityView
from cordee.hardware.load import load_electricity


def electricity_of(home: Path) -> ElectricityView:
    """Return the factors of a home, read anew, so that a change of its file counts from the next answer on."""
    prices = home / "prices.toml"
    at = load_electricity(prices if prices.exists() else None)
    grams = None if at.grid is None else at.grid.g_co2e_per_kwh
    return ElectricityView(building_factor=at.building_factor, g_co2e_per_kwh=grams, sources=list(at.sources))

"""What electricity costs and emits: the shipped facts, a user's own, and sums by hand."""

from pathlib import Path

import pytest

from cordee.errors import CatalogueError
from cordee.hardware.load import load_catalogue, load_electricity
from cordee.hardware.power import POWER, EnergyUse, draw_of

H100 = load_catalogue().find_gpu("H100")


def _own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(f"[electricity]\n{text}\n")
    return path


def test_without_a_file_the_worlds_grid_counts_with_its_source() -> None:
    at = load_electricity()
    assert at.grid is not None and at.grid.name == "world" and at.grid.g_co2e_per_kwh == 481
    assert "Ember" in str(at.grid.source) and "2024" in at.grid.source.as_of and len(at.sources) == 2


def test_energy_is_watts_times_time_times_the_building() -> None:
    draw = draw_of(H100)
    assert draw is not None and (draw.watts, draw.host.watts) == (700, 575)
    use = EnergyUse(8, 3600.0, draw, load_electricity())
    assert use.kwh == pytest.approx(8 * 1.275 * 1.56)
    assert use.kg_co2e == pytest.approx(use.kwh * 0.481) and use.usd == pytest.approx(use.kwh * 0.10)


def test_an_instance_draws_its_part_of_the_whole() -> None:
    whole, part = draw_of(H100), draw_of(load_catalogue().find_gpu("H100 1g.10gb"))
    assert whole is not None and part is not None
    assert (part.watts, part.host.watts) == (whole.watts / 8, whole.host.watts / 8)


def test_every_board_is_a_gpu_of_the_catalogue() -> None:
    assert set(POWER) <= {gpu.name for gpu in load_catalogue().gpus}


def test_a_users_grid_price_and_building_replace_the_shipped_ones(tmp_path: Path) -> None:
    named = load_electricity(_own(tmp_path, 'grid = "France"'))
    assert named.grid is not None and named.grid.g_co2e_per_kwh == 56 and named.building_factor == 1.56
    told = 'source = "our supplier", as_of = "2026-03"'.replace(", ", "\n")
    own = load_electricity(_own(tmp_path, f"g_co2e_per_kwh = 21.7\nbuilding_factor = 1.1\nusd_per_kwh = 0.12\n{told}"))
    assert own.grid is not None and (own.grid.g_co2e_per_kwh, own.building_factor, own.usd_per_kwh) == (21.7, 1.1, 0.12)
    assert own.grid.source.title == own.building_source.title == "our supplier"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('grid = "Frence"', "unknown grid 'Frence'"),
        ("g_co2e_per_kwh = 20", "lacks the source"),
        ('building_factor = 0.9\nsource = "x"\nas_of = "2026"', "building_factor = 0.9"),
        ('g_co2e_per_kwh = true\nsource = "x"\nas_of = "2026"', "g_co2e_per_kwh = True"),
        ("watts = 3", "unknown watts"),
    ],
)
def test_what_cannot_be_read_is_refused_by_plans_and_servers_alike(tmp_path: Path, text: str, says: str) -> None:
    path = _own(tmp_path, text)
    for read in (load_electricity, load_catalogue):
        with pytest.raises(CatalogueError, match=says):
            read(path)
